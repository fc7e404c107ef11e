"""Which modules an edge leaves encoded in a number format, and which plain.

Loaders want to know it from the configuration: as `ignore`, `modules_to_not_convert` or
`exclude_modules`, under the exact names of modules. So the patch of a side file may take the two
lists, and the plan makes them of the tensors that come out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..core.spec import BITS, Spec
from ..core.templates import rank_of
from ..rules.arguments import ENCODED_MODULES, MODULE_LISTS, PARAM, PLAIN_MODULES
from .graph import Tensor
from .patches import leaves_of_patch

_WIDE = frozenset(("float16", "bfloat16", "float32", "float64"))


def list_modules(tensors: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """The modules by what patches call the two lists, each in the order of names, numbers in
    numeric order. A module is a key without its last segment.

    It is encoded if a tensor of two or more axes in it holds codes: elements of at most 8 bits, or
    words of 32 bits. It is plain if none does and one such tensor holds floats. Vectors decide
    nothing: norms and biases are never encoded, and no loader asks for them.
    """
    kinds: dict[str, bool] = {}
    # many tensors share a spec
    seen: dict[int, bool | None] = {}
    for key, tensor in tensors.items():
        spec = tensor.spec
        encoded = seen[id(spec)] if id(spec) in seen else seen.setdefault(id(spec), _codes(spec))
        if encoded is not None:
            name = key.rpartition("@")[0] if "@" in key and rank_of(key) is not None else key
            module = name.rpartition(".")[0]
            kinds[module] = kinds.get(module, False) or encoded
    places: dict[str, tuple[int, int | str]] = {}
    ordered = sorted(kinds, key=lambda module: _in_order(module, places))
    return {
        PLAIN_MODULES: [module for module in ordered if not kinds[module]],
        ENCODED_MODULES: [module for module in ordered if kinds[module]],
    }


def _codes(spec: Spec) -> bool | None:
    if len(spec.shape) < 2:
        return None
    if spec.dtype in _WIDE:
        return False
    codes = (BITS[spec.dtype] <= 8 and spec.dtype != "bool") or spec.dtype == "int32"
    return True if codes else None


def _in_order(module: str, places: dict[str, tuple[int, int | str]]) -> list[tuple[int, int | str]]:
    """What sorts the module; `places` are those of segments that were seen."""
    parts = module.split(".")
    for part in parts:
        if part not in places:
            number = part.isascii() and part.isdecimal() and len(part) < 19
            places[part] = (0, int(part)) if number else (1, part)
    return [places[part] for part in parts]


def takes_modules(patches: Iterable[Any]) -> bool:
    """Whether one of the patches of files takes a list of modules."""
    return any(_named(value) for patch in patches for _, value in leaves_of_patch(patch))


def _named(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_named, value))
    if isinstance(value, Mapping):
        return any(map(_named, value.values()))
    match = PARAM.fullmatch(value) if isinstance(value, str) else None
    return match is not None and match[1] in MODULE_LISTS
