"""Which modules an edge leaves encoded in a number format, and which plain.

Loaders want to know it from the configuration: as `ignore`, `modules_to_not_convert` or
`exclude_modules`, under the exact names of modules. So the patch of a side file may take the two
lists, and the plan makes them of the tensors that come out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, NamedTuple

from .. import codecs
from ..core.errors import fail, printable
from ..core.part_names import PartNames, key_of_part
from ..core.spec import BITS, Spec
from ..core.templates import rank_of
from ..rules.arguments import (
    CODEC,
    ENCODED_MODULES,
    MODULE_LISTS,
    PARAM,
    PLAIN_MODULES,
    is_choice,
)
from .graph import ComputedTensor, Tensor
from .patches import leaves_of_patch

_WIDE = frozenset(("float16", "bfloat16", "float32", "float64"))


class _Stored(NamedTuple):
    """A way in which a module can be stored: the codec, and its arguments as far as known."""

    codec: str
    arguments: Mapping[str, Any]

    def fits(self, wanted: Mapping[str, Any]) -> bool:
        return all(
            self._of(name) in (value if isinstance(value, (list, tuple)) else [value])
            for name, value in wanted.items()
        )

    def _of(self, name: str) -> Any:
        return self.codec if name == CODEC else self.arguments.get(name)


class EncodedModules(list[str]):
    """The names of the modules that hold codes, and the tensors that they were seen in."""

    tensors: Mapping[str, Tensor]

    @classmethod
    def of(cls, names: Iterable[str], tensors: Mapping[str, Tensor]) -> EncodedModules:
        made = cls(names)
        made.tensors = tensors
        return made

    def choose(self, wanted: Mapping[str, Any]) -> list[str]:
        """Those that are stored as `wanted` says: `codec`, by name or of several, and arguments of
        it. M513 for a module of which it is not certain.
        """
        table = codecs.part_names()
        ways: dict[str, list[_Stored]] = {}
        made: dict[str, list[_Stored]] = {}
        for key, tensor in self.tensors.items():
            if _codes(tensor.spec):
                said = _made(tensor)
                found = _readings(key, said, self.tensors, table)
                ways.setdefault(_module(key), []).extend(found)
                made.setdefault(_module(key), []).extend([said] if said is not None else [])
        out = []
        for module in self:
            there = ways[module] or made[module]
            fits = {way.fits(wanted) for way in there}
            if len(fits) > 1:
                forms = dict.fromkeys(map(_spelled, there))
                fail(
                    "M513",
                    f"{printable(module)} may be {' or '.join(forms)}, so whether it is one of "
                    f"`${ENCODED_MODULES}: {printable(str(dict(wanted)))}` is not certain",
                    help="leave out the arguments that its tensors do not tell",
                )
            out += [module] if True in fits else []
        return out


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
        found = [
            reading
            for reading in table.read(first, near)
            if not reading.missing and (said is None or said.codec == reading.format)
        ]
        if found and (len(found[0].endings), len(first)) > most:
            most = len(found[0].endings), len(first)
            known = {} if said is None else said.arguments
            best = [_Stored(r.format, {**r.arguments, **known}) for r in found]
    return best


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
        return is_choice(value) or any(map(_named, value.values()))
    match = PARAM.fullmatch(value) if isinstance(value, str) else None
    return match is not None and match[1] in MODULE_LISTS
