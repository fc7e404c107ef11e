"""Which modules an edge leaves encoded in a number format, and which plain.

Loaders want to know it from the configuration: as `ignore`, `modules_to_not_convert` or
`exclude_modules`, under the exact names of modules. So the patch of a side file may take the two
lists, and the plan makes them of the tensors that come out.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, NamedTuple, NoReturn

from .. import codecs
from ..core.errors import fail, printable
from ..core.part_names import PartNames, key_of_part
from ..core.spec import BITS, Spec
from ..core.templates import rank_of
from ..rules.arguments import (
    BY,
    CODEC,
    ENCODED_MODULES,
    MODULE_LISTS,
    PARAM,
    PLAIN_MODULES,
    is_choice,
    is_each,
)
from .graph import ComputedTensor, Tensor
from .parts import foreseen_bytes
from .patches import leaves_of_patch

GROUP, GRANULARITY = "group", "granularity"
_WIDE = frozenset(("float16", "bfloat16", "float32", "float64"))


class _Stored(NamedTuple):
    """A way in which a module can be stored: the codec, and its arguments as far as known."""

    codec: str
    arguments: Mapping[str, Any]

    def fits(self, wanted: Mapping[str, Any]) -> bool:
        return all(
            self.argument(name) in (value if isinstance(value, (list, tuple)) else [value])
            for name, value in wanted.items()
        )

    def argument(self, name: str) -> Any:
        """The codec for `codec`, else that argument, None where it is not known. What names no
        granularity has a scale for each group, or for each row.
        """
        if name == GRANULARITY and name not in self.arguments:
            return GROUP if GROUP in self.arguments else "channel"
        return self.codec if name == CODEC else self.arguments.get(name)


class EncodedModules(list[str]):
    """The names of the modules that hold codes, and the tensors that they were seen in."""

    tensors: Mapping[str, Tensor]

    @classmethod
    def of(cls, names: Iterable[str], tensors: Mapping[str, Tensor]) -> EncodedModules:
        made = cls(names)
        made.tensors = tensors
        return made

    def sets(self, wanted: Mapping[str, Any]) -> list[tuple[dict[str, Any], list[str]]]:
        """(values of the arguments that `by` names, the modules that are stored so) for each set of
        values that occurs, in the order of the values. M513 as `choose`.
        """
        by = wanted[BY]
        ways = self._ways()
        found: dict[tuple[Any, ...], list[str]] = {}
        for module in self.choose({name: one for name, one in wanted.items() if name != BY}):
            said = {tuple(way.argument(name) for name in by) for way in ways[module]}
            known = dict(zip(by, next(iter(said)), strict=True)) if len(said) == 1 else {}
            # rows that are not cut into groups have no size of these
            if not known or None in (v for name, v in known.items() if name != GROUP):
                _refuse(module, ways[module], f"`{', '.join(by)}` of it are not certain")
            found.setdefault(said.pop(), []).append(module)
        # what is not there has no order
        ordered = sorted(found, key=lambda values: [(v is None, str(type(v)), v) for v in values])
        return [
            ({n: v for n, v in zip(by, one, strict=True) if v is not None}, found[one])
            for one in ordered
        ]

    def choose(self, wanted: Mapping[str, Any]) -> list[str]:
        """Those that are stored as `wanted` says: `codec`, by name or of several, and arguments of
        it. M513 for a module of which it is not certain.
        """
        ways, out = self._ways(), []
        for module in self:
            fits = {way.fits(wanted) for way in ways[module]}
            if len(fits) > 1:
                said = printable(str(dict(wanted)))
                which = f"whether it is one of `${ENCODED_MODULES}: {said}` is not certain"
                _refuse(module, ways[module], which)
            out += [module] if True in fits else []
        return out

    def _ways(self) -> dict[str, list[_Stored]]:
        """In which ways each module can be stored."""
        table = codecs.part_names()
        ways: dict[str, list[_Stored]] = {}
        made: dict[str, list[_Stored]] = {}
        for key, tensor in self.tensors.items():
            if _codes(tensor.spec):
                said = _made(tensor)
                found = _readings(key, said, self.tensors, table)
                ways.setdefault(_module(key), []).extend(found)
                made.setdefault(_module(key), []).extend([said] if said is not None else [])
        return {module: found or made[module] for module, found in ways.items()}


def _refuse(module: str, ways: Iterable[_Stored], uncertain: str) -> NoReturn:
    forms = dict.fromkeys(map(_spelled, ways))
    fail(
        "M513",
        f"{printable(module)} may be {' or '.join(forms)}, so {uncertain}",
        help="leave out the arguments that its tensors do not tell",
    )


def _spelled(way: _Stored) -> str:
    return ", ".join([way.codec, *(f"{k} {v}" for k, v in way.arguments.items())])


def _made(tensor: Tensor) -> _Stored | None:
    """What the rule says that makes these codes; None if they are stored."""
    source = tensor.sources[0] if len(tensor.sources) == 1 else None
    args: Any = source.computation.op_call.args if isinstance(source, ComputedTensor) else None
    if getattr(args, "codec", None) is None:
        return None
    own = args.codec_args
    names = [field.name for field in fields(own)] if own is not None else []
    return _Stored(args.codec, {n: v for n in names if (v := getattr(own, n)) is not None})


def _readings(
    key: str, said: _Stored | None, tensors: Mapping[str, Tensor], table: PartNames
) -> list[_Stored]:
    """How the tensor of these codes can be stored, by the names, dtypes and shapes of its parts."""
    rank = key[len(_plain(key)) :]
    best: list[_Stored] = []
    most = (0, 0)
    for stem, first, _ in table.firsts.find(_plain(key)):
        near = {
            end: tensors[part].spec
            for end in (first, *table.partners(first))
            if (part := key_of_part(stem, end) + rank) in tensors
        }
        said_of = {
            end: elements
            for end in table.sized.get(first, ())
            if end in near and (elements := _foreseen(tensors[key_of_part(stem, end) + rank]))
        }
        found = [
            reading
            for reading in table.read(first, near, said_of)
            if not reading.missing and (said is None or said.codec == reading.format)
        ]
        if found and (len(found[0].endings), len(first)) > most:
            most = len(found[0].endings), len(first)
            known = {} if said is None else said.arguments
            best = [_Stored(r.format, {**r.arguments, **known}) for r in found]
    return best


def _foreseen(tensor: Tensor) -> tuple[int, ...] | None:
    """The integers of a small part that is computed, where they follow from shapes."""
    form = {"int32": "<i", "int64": "<q"}.get(tensor.spec.dtype)
    data = foreseen_bytes(tensor) if form is not None else None
    return None if data is None else tuple(one for (one,) in struct.iter_unpack(form or "", data))


def first_encoded(tensors: Mapping[str, Tensor]) -> str | None:
    """A tensor with its number format, as `l.experts.down_proj (nvfp4, form modelopt)`, of those
    that hold codes and whose parts are there; None without any.
    """
    table = codecs.part_names()
    for key, tensor in tensors.items():
        if _codes(tensor.spec) and (found := _readings(key, None, tensors, table)):
            return f"{printable(key)} ({_spelled(found[0])})"
    return None


def _plain(key: str) -> str:
    """The key without its rank."""
    return key.rpartition("@")[0] if "@" in key and rank_of(key) is not None else key


def _module(key: str) -> str:
    return _plain(key).rpartition(".")[0]


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
            module = _module(key)
            kinds[module] = kinds.get(module, False) or encoded
    places: dict[str, tuple[int, int | str]] = {}
    ordered = sorted(kinds, key=lambda module: _in_order(module, places))
    return {
        PLAIN_MODULES: [module for module in ordered if not kinds[module]],
        ENCODED_MODULES: EncodedModules.of((m for m in ordered if kinds[m]), tensors),
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
        return is_choice(value) or is_each(value) or any(map(_named, value.values()))
    match = PARAM.fullmatch(value) if isinstance(value, str) else None
    return match is not None and match[1] in MODULE_LISTS
