"""Float8 numbers that a plan would take for numbers in their own right, although the tensor beside
them is their scale under a name that no table knows.

Cast without its scale such a weight is a hundred to some ten thousand times too large, and nothing
in the output shows it. A float8 tensor of a model is hardly ever without a scale; so wherever one
is cast, a tensor in its module that has the shape of a scale, or the name and the size of one, is
reason enough to refuse until the rule says that the numbers are meant as they are.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..core.errors import Report, listed, printable
from ..core.part_names import FLOAT8, WIDE
from ..core.spec import BITS
from .graph import computations

if TYPE_CHECKING:
    from ..core.spec import Spec
    from ..source.blobs import StoredTensor
    from .bind import StepResult
    from .graph import Tensor

# a scale of at least so many elements along the last axis makes a grid plausible by itself
_LEAST_BLOCK = 16
# keys of one module that are looked at for each tensor
_MOST = 64
_NAMES = ("scale", "amax", "scb")
_SHORT_NAMES = ("s", "inv")


def check_unscaled(
    stored: Mapping[str, StoredTensor],
    weights: Collection[str],
    users: Mapping[str, Mapping[str, None]],
    outputs: Mapping[str, Tensor],
    steps: Sequence[StepResult],
    known: Collection[str],
    report: Report,
) -> None:
    """M409 for each of `weights`, float8 tensors without a part of a known name, that becomes a
    wider float without what looks like its scale.

    `users` are the outputs that are made of each stored tensor, `known` keys that a table says are
    something else.
    """
    cast = {
        key: made
        for key in weights
        if (made := [out for out in users.get(key, ()) if outputs[out].spec.dtype not in FLOAT8
                     and BITS[outputs[out].spec.dtype] > 8])
    }  # fmt: skip
    if not cast:
        return
    neighbours = Neighbours(stored)
    quiet = []
    for key, made in cast.items():
        alone = [out for out in made if not _said(outputs[out])]
        scale = likely_scale(key, {k: stored[k].spec for k in neighbours.of(key)}, known)
        if scale is not None:
            alone = [out for out in alone if out not in users.get(scale, ())]
            if alone:
                _report(key, alone[0], scale, stored, steps, report)
        elif alone and len(stored[key].spec.shape) > 1:
            quiet.append(key)
    if quiet and steps:
        steps[-1].notes.append(
            f"float8 numbers of {listed(quiet, 4)} are taken as they are: nothing beside them "
            "looks like a scale"
        )


def module_of(key: str) -> str:
    """The key up to and with its last dot."""
    return key[: key.rfind(".") + 1]


class Neighbours:
    """The keys of each module, in order."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._modules: dict[str, list[str]] = {}
        for key in sorted(keys):
            self._modules.setdefault(module_of(key), []).append(key)

    def of(self, key: str) -> list[str]:
        """The keys of the module that a key is in, itself among them; where a module has very many,
        those whose names are next to it.
        """
        found = self._modules[module_of(key)]
        if len(found) <= _MOST:
            return found
        at = bisect_left(found, key)
        return found[max(0, at - _MOST // 2) : at + _MOST // 2]


def likely_scale(key: str, module: Mapping[str, Spec], known: Collection[str] = ()) -> str | None:
    """The tensor of the module that is all but certainly the scale of the float8 tensor at `key`,
    one whose name says so first. None: there is none.
    """
    shape = module[key].shape
    found = None
    for other, spec in module.items():
        if other == key or other in known or spec.dtype not in (*WIDE, "float8_e8m0fnu"):
            continue
        leaf = other[len(module_of(other)) :].lower().partition("@")[0]
        words = leaf.split("_")
        named = any(name in leaf for name in _NAMES) or words[-1] in _SHORT_NAMES
        if not _may_scale(shape, spec.shape, named):
            continue
        if named:
            return other
        found = found or other
    return found


def _may_scale(weight: tuple[int, ...], scale: tuple[int, ...], named: bool) -> bool:
    """Whether a tensor of the shape `scale` can hold factors of rows, blocks or all of `weight`."""
    size = 1
    for length in scale:
        size *= length
    if size == 1:
        return True
    if not weight or len(scale) > len(weight):
        return False
    if len(scale) < len(weight):
        # without a name, a bias would do as well
        return named and scale == weight[: len(scale)]
    blocks = zip(weight, scale, strict=True)
    if not all(0 < parts <= length and _divides(length, parts) for length, parts in blocks):
        return False
    last, parts = weight[-1], scale[-1]
    return parts < last if named else parts == 1 or -(-last // parts) >= _LEAST_BLOCK


def _divides(length: int, parts: int) -> bool:
    """Whether blocks of some size, the last of which may be smaller, are so many."""
    return parts == 1 or -(-length // parts) <= (length - 1) // (parts - 1)


def _said(tensor: Tensor) -> bool:
    return any(getattr(call.op_call.args, "unscaled", False) for call in computations([tensor]))


def _report(
    key: str,
    made: str,
    scale: str,
    stored: Mapping[str, StoredTensor],
    steps: Iterable[StepResult],
    report: Report,
) -> None:
    rule: Any = None
    for bound in steps:
        provenance = bound.provenance.get(made)
        rule = provenance.rule if provenance is not None else rule
    who = f"rule {rule.name!r}" if rule is not None else "the plan"
    report.add(
        "M409",
        f"{who} makes numbers of {printable(key)} ({stored[key].spec}) alone, and "
        f"{printable(scale)} ({stored[scale].spec}) is all but certainly its scale",
        spans=(rule.span,) if rule is not None else (),
        help="decode the two with `dequantize`, as roles of one rule; if the numbers are meant as "
        "they are, say so: `cast: {…, unscaled: true}`",
    )
