"""Whether the configuration that comes out asks for scales of inputs that no tensor holds.

A library may scale what a layer takes by a number that it stored beside the weight (a static
scheme). Plain weights have no use for it, and no rule can make it of weights: it comes of data. A
loader that believes a configuration with a static scheme scales inputs by what happens to lie in
memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from ..core.errors import Diagnostic, printable
from .configured_caches import configurations
from .sides import SideFiles

_SCALES = ("input_scale", "activation_scale", "input_global_scale")
# ModelOpt's words for formats whose inputs are scaled as they come, or not at all
_FREE = (
    "fp8_per_channel_per_token", "fp8_pb_wo", "fp8_pb_real", "mxfp4", "mxfp8", "mixed_precision",
    "w4a16_nvfp4", "w4a16_awq", "int4_awq", "w8a16", "int8_wo",
)  # fmt: skip


def check_inputs(sides: SideFiles, outputs: Collection[str]) -> list[Diagnostic]:
    """M519 for each place of the configuration that says that inputs have scales, if none has."""
    if any(key.partition("@")[0].endswith(_SCALES) for key in outputs):
        return []
    return [
        Diagnostic(
            "M519",
            f"{printable(place, 300)} is {printable(str(value), 80)}: inputs are scaled by numbers "
            "that are stored, and no tensor that comes out is one",
            help=_HELP,
        )
        for place, value in _static(sides)
    ]


def _static(sides: SideFiles) -> Iterator[tuple[str, Any]]:
    for place, said in configurations(sides).items():
        inner = said.get("quantization")
        for where, value in ((place, said), (f"{place}.quantization", inner)):
            if isinstance(value, Mapping):
                yield from _static_in(where, value)


def _static_in(place: str, said: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    if said.get("activation_scheme") == "static":
        yield f"{place}.activation_scheme", "static"
    algorithm = said.get("quant_algo")
    if isinstance(algorithm, str):
        if algorithm.lower() not in _FREE:
            yield f"{place}.quant_algo", algorithm
        return
    groups = said.get("config_groups")
    for name, group in groups.items() if isinstance(groups, Mapping) else ():
        inputs = group.get("input_activations") if isinstance(group, Mapping) else None
        if isinstance(inputs, Mapping) and inputs.get("dynamic", False) in (False, "local"):
            at = f"{place}.config_groups.{name}.input_activations.dynamic"
            yield at, inputs.get("dynamic", False)


_HELP = (
    "let the library that serves the model calibrate it again, or correct the configuration to a "
    "scheme without such scales; what a way there drops comes back where it kept the bytes of the "
    "source (`undo`)"
)
