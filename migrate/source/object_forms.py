"""Quantized tensors of Transformer Engine in the words of a release: the call that it pickles them
by, the arguments in their order, and the integer that a dtype has there.

Releases from 2.16 on write functions that they register with torch, so that its loader of weights
reads such files; what older releases wrote (`getattr` of a class) it refuses. Their spellings are
therefore the ones that can be asked for. Bytes stay as they are: where a release has no place for a
component, or would take scales to lie in another order, the tensor is refused.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, NamedTuple

from ..core.errors import fail, listed, option, plural, printable
from .pickle.nodes import ABSENT, Call, Dict, Global
from .pickle.quantized_tensors import ARGUMENTS, ENUMS, FORMATS, FUNCTIONS, MODULES
from .pickle.tree import NEW, NUMBERINGS, Composite, DictNode, ListNode, answered, ask
from .tree import objects_of


class _Release(NamedTuple):
    """How many arguments each class has, and the module of the enum of dtypes."""

    counts: dict[str, int]
    enum: str


_OLD_ENUM, _NEW_ENUM = ENUMS[1][0], ENUMS[2][0]
_BEFORE = {"Float8Tensor": 5, "MXFP8Tensor": 9, "Float8BlockwiseQTensor": 10, "NVFP4Tensor": 11}
_SINCE = {**_BEFORE, "NVFP4Tensor": 14}
RELEASES = {
    "te-2.16": _Release(_BEFORE, _OLD_ENUM),
    "te-2.17": _Release(_SINCE, _NEW_ENUM),
    "te-2.18": _Release(_SINCE, _NEW_ENUM),
    "te-2.19": _Release({**_SINCE, "Float8Tensor": 6}, _NEW_ENUM),
    "te-2.20": _Release({**_SINCE, "Float8Tensor": 6}, _NEW_ENUM),
}
_NAME = re.compile(r"te-(?:1|2\.(?:[0-9]|1[0-5]))(?:\.[0-9]+)*")
# what a release writes where an older one said nothing
_DEFAULTS = {
    "with_gemm_swizzled_scales": False,
    "row_scaled_nvfp4": False,
    "nvfp4_use_4over6": False,
    "nvfp4_e4m3_max": 448,
}
# fields that quantizers got in the course of time, in all classes
_FIELDS = {"optimize_for_gemm": False}
_CLASSES = {word: cls for cls, word in FORMATS.items()}
_COMPACT = 1


def require_form(said: Any) -> str:
    """What a person says of the form of objects, as one of `RELEASES`. M115 for anything else."""
    if said not in RELEASES:
        older = (
            "what releases before 2.16 wrote is read, but not written: torch's loader of weights "
            "refuses it, because it calls `getattr` of a class"
        )
        fail(
            "M115",
            f"`object_form` cannot be {printable(str(said))}",
            notes=(older,) * bool(_NAME.fullmatch(str(said))),
            help=f"one of {listed(list(RELEASES))}; without it objects keep their form",
        )
    return str(said)


def respelled(root: Any, form: str, numbering: str | None) -> tuple[Any, int]:
    """The tree with its objects of Transformer Engine in the words of a release, and how many these
    are. M957 naming those that the release has no words for, M955 for dtypes that neither the tree
    nor a person (`numbering`) tells.
    """
    known = _CLASSES.keys()
    objects = {
        ".".join(map(str, path)): value
        for path, value in objects_of(root)
        if value.encoding.format in known and not value.encoding.members
    }
    encodings = answered({key: value.encoding for key, value in objects.items()}, numbering)
    ask(encodings)
    made: dict[int, Any] = {}
    against: list[str] = []
    for key, value in objects.items():
        found = spelled(replace(value, encoding=encodings[key]), form)
        if isinstance(found, str):
            against.append(f"{printable(key)}: {found}")
        else:
            made[id(value)] = found
    if against:
        fail(
            "M957",
            f"{form} has no form for {plural(len(against), 'quantized tensor')}",
            notes=tuple(against[:8]),
            help=f"name another release, or leave {option('params', 'object_form=…')} out",
        )
    return _replaced(root, made), len(made)


def spelled(value: Composite, form: str) -> Composite | str:
    """One object in the words of a release, or why it has none."""
    cls, release = _CLASSES[value.encoding.format], RELEASES[form]
    names = ARGUMENTS[cls][0]
    given = dict(zip(names, value.node.arguments, strict=False))
    options = value.encoding.options or {}
    if options.get("data_format") == _COMPACT and not options.get("is_2D_scaled"):
        return "its scales are compact, and this release has them transposed"
    kept = names[: release.counts[cls]]
    left = [name for name, _ in value.components if "." not in name and name not in kept]
    if left:
        return f"no place for {listed(left)}"
    number = value.encoding.number or ""
    code = {name: n for n, name in NUMBERINGS[NEW].items()}[number]
    dtype = Call("reduce", Global(release.enum, "DType"), (code,))
    given |= {
        "code": dtype,
        "dtype": Global("torch", value.encoding.dtype),
        "shape": Call("reduce", Global("torch", "Size"), (value.encoding.shape,)),
        "quantizer": _quantizer(given.get("quantizer"), dtype),
        "data_format": None,
    }
    arguments = tuple(given.get(name, _DEFAULTS.get(name)) for name in kept)
    module = MODULES[cls][0]
    node = Call("reduce", Global(module, FUNCTIONS[cls]), arguments)
    encoding = replace(value.encoding, name=f"{module}.{cls}", code=code, readings={NEW: number})
    return replace(value, encoding=encoding, node=node)


def _quantizer(node: Any, dtype: Call) -> Any:
    """The quantizer with the dtype of the release; None without one."""
    if type(node) is not Call or node.state is ABSENT or type(node.state) is not Dict:
        return node
    pairs = [(key, dtype if key == "dtype" else part) for key, part in node.state.pairs]
    known = {key for key, _ in pairs}
    pairs += [(key, default) for key, default in _FIELDS.items() if key not in known]
    made = Call(node.how, node.function, node.arguments)
    made.state = Dict(pairs)
    return made


def _replaced(root: Any, made: dict[int, Any]) -> Any:
    """The tree with these in place of what they are made of, by identity."""
    if not made:
        return root
    done = dict(made)

    def visit(value: Any) -> Any:
        if id(value) in done:
            return done[id(value)]
        out = value
        if type(value) is DictNode:
            pairs = tuple((key, visit(held)) for key, held in value.pairs)
            if any(a[1] is not b[1] for a, b in zip(pairs, value.pairs, strict=True)):
                out = DictNode(value.kind, pairs, value.node, value.attributes)
        elif type(value) is ListNode:
            items = tuple(visit(held) for held in value.items)
            if any(a is not b for a, b in zip(items, value.items, strict=True)):
                out = ListNode(value.kind, items, value.node)
        done[id(value)] = out
        return out

    return visit(root)
