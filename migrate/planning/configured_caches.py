"""Whether the configuration that comes out still says that the KV cache is quantized.

ModelOpt says it as `kv_cache_quant_algo` (`kv_cache_scheme` in its copy in `config.json`), and
compressed-tensors as `kv_cache_scheme`, an object with fields of its own. Where a rule file writes
one configuration in place of the other and says nothing of the cache, a reader keeps keys and
values in the dtype of the model.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from ..core.errors import Diagnostic, listed, plural, printable
from ..source.module_lists import CONFIG, MODELOPT_CONFIG, QUANTIZATION
from .sides import SideFiles

_NAMES = ("kv_cache_scheme", "kv_cache_quant_algo")
_SCALES = (
    *(f".{of}_{what}" for of in "qkv" for what in ("scale", "zero_point", "global_scale")),
    ".k_proj.output_scale",
    ".v_proj.output_scale",
)


def check_caches(
    before: SideFiles, after: SideFiles, stored: Iterable[str], outputs: Iterable[str]
) -> list[Diagnostic]:
    """M519 where the source's configuration says that the KV cache is quantized and the one that
    comes out does not; not where that is none at all and the plan names the scales that it drops.
    """
    said = _declared(before)
    if not said or _declared(after):
        return []
    scales, written = _scales(outputs), configurations(after)
    if not scales and not written and _scales(stored):
        return []
    says = " and ".join(f"{place} is {printable(json.dumps(v), 120)}" for place, v in said)
    missing = (
        f"{' and '.join(written)}, which this run writes, {_do(written)} not say how the KV cache "
        "is encoded"
        if written
        else f"{CONFIG} that this run writes says of no number format"
    )
    stay = (
        f"; {plural(len(scales), 'scale')} of the cache {'stays' if len(scales) == 1 else 'stay'} "
        f"({listed(scales, 3)})"
        if scales
        else ""
    )
    return [Diagnostic("M519", f"{says}; {missing}{stay}", help=_HELP)]


def _do(places: Mapping[str, object]) -> str:
    return "does" if len(places) == 1 else "do"


def configurations(sides: SideFiles) -> dict[str, Mapping[str, Any]]:
    """place -> what is said of number formats there."""
    config, other = sides.value(CONFIG) or {}, sides.value(MODELOPT_CONFIG) or {}
    nested = config.get("text_config")
    found = {f"{CONFIG}#{name}": config.get(name) for name in QUANTIZATION}
    if isinstance(nested, Mapping):
        found |= {f"{CONFIG}#text_config.{name}": nested.get(name) for name in QUANTIZATION}
    found[f"{MODELOPT_CONFIG}#quantization"] = other.get("quantization")
    return {place: value for place, value in found.items() if isinstance(value, Mapping)}


def _declared(sides: SideFiles) -> list[tuple[str, Any]]:
    """(place, value) of each statement that the cache is quantized."""
    out = []
    for place, said in configurations(sides).items():
        inner = said.get("quantization")
        objects = [(place, said)]
        if isinstance(inner, Mapping):
            objects.append((f"{place}.quantization", inner))
        out += [
            (f"{where}.{name}", value[name])
            for where, value in objects
            for name in _NAMES
            if value.get(name)
        ]
    return out


def _scales(keys: Iterable[str]) -> list[str]:
    return [key for key in keys if key.partition("@")[0].endswith(_SCALES)]


_HELP = (
    "readers keep keys and values in the dtype of the model then: where the model is served name "
    "that of the cache (`kv_cache_dtype` in vLLM), or declare it in the output's "
    'configuration (`"kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", '
    '"symmetric": true, "dynamic": false}` for compressed-tensors and FP8)'
)
