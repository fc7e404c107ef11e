"""Inert nodes as JSON and back: how what a .pt file holds beside its tensors travels with a format
that has no place for it.

Nothing is lost, because the nodes are few kinds and each is spelled out. null, booleans, numbers,
text and lists stand for themselves; all else is an object with one telling name:

    {"dict": [[key, value], …]}    {"tuple": […]}    {"set": […]}    {"frozenset": […]}
    {"bytes": base64}    {"bytearray": base64}
    {"text": base64}                text with half a surrogate pair
    {"float": "7ff8000000000000"}   a float that JSON has no word for, by its bits
    {"name": ["torch", "float32"]}  a name that is a value
    {"call": [name, arguments], "how", "state", "items", "pairs"}
    {"storage": key, "of", "at", "numel"}   a storage of a carried value, which lies beside
    {"tensor": key, …}              a tensor, which lies beside; in a dict, a plain tensor called by
                                    its key is the key alone: [key]
    {"id": n, "is": …} {"ref": n}   one object that stands in several places

What is read back goes through the decoders of a stream: JSON makes nothing trustworthy.
"""

from __future__ import annotations

import binascii
import math
import re
import struct
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from ...core.errors import fail, printable
from .nodes import ABSENT, JSON_SCALARS, Call, Dict, Global, Set, WrongError, forms_of
from .tree import CarriedStorage

MAX_DEPTH = 200
_LONG = frozenset({str, bytes, bytearray})
# what is spelled as it is, and what is never spelled by a number
_WHOLE = frozenset({type(None), bool, int})
_SHORT = _WHOLE | {float}
LONG = 200
_HALF = re.compile("[\ud800-\udfff]")
_FLAGS = ("requires_grad", "parameter")


class Ref(NamedTuple):
    """A tensor that lies elsewhere under `key`. `state` are its attributes as nodes; `tied` is the
    key that it shared its bytes with.
    """

    key: str
    requires_grad: bool = False
    parameter: bool = False
    subclass: str | None = None
    state: Any = None
    tied: str | None = None

    @property
    def plain(self) -> bool:
        return self[1:] == (False, False, None, None, None)


def to_json(value: Any) -> Any:
    """The JSON value that spells out nodes in which each tensor is a `Ref`."""
    return _Speller(value).spell(value)


class _Speller:
    def __init__(self, root: Any) -> None:
        counts: dict[int, int] = {}
        stack = [root]
        while stack:
            node = stack.pop()
            kind = type(node)
            if kind in JSON_SCALARS or kind is Global or kind in (bytes, bytearray, complex):
                # long ones are spelled once, wherever they stand
                if kind in _LONG and len(node) > LONG:
                    counts[id(node)] = counts.get(id(node), 0) + 1
                continue
            counts[id(node)] = counts.get(id(node), 0) + 1
            if counts[id(node)] == 1:
                stack += [part for part in _held(node) if type(part) not in _SHORT]
        self.shared = {number for number, count in counts.items() if count > 1}
        self.numbers: dict[int, int] = {}

    def spell(self, node: Any) -> Any:
        kind = type(node)
        if kind is float:
            return node if math.isfinite(node) else {"float": struct.pack(">d", node).hex()}
        if kind in JSON_SCALARS and not (kind is str and id(node) in self.shared):
            return self.plain(node, kind)
        if id(node) in self.shared:
            if id(node) in self.numbers:
                return {"ref": self.numbers[id(node)]}
            number = self.numbers[id(node)] = len(self.numbers)
            return {"id": number, "is": self.plain(node, kind)}
        return self.plain(node, kind)

    def plain(self, node: Any, kind: type) -> Any:
        if kind is str and not node.isascii() and _broken(node):
            return {"text": b64encode(node.encode("utf-8", "surrogatepass")).decode()}
        if kind in JSON_SCALARS:
            return node
        if kind is list:
            return self.items(node)
        if kind is tuple:
            return {"tuple": self.items(node)}
        if kind is Dict:
            return {"dict": self.pairs(node.pairs)}
        if kind is Ref:
            return self.tensor(node)
        if kind is CarriedStorage:
            said = {
                "of": [node.cls.module, node.cls.name],
                "at": node.location,
                "numel": node.numel,
            }
            return {"storage": node.at.key if type(node.at) is Ref else None, **said}
        if kind is Global:
            return {"name": [node.module, node.name]}
        if kind is Call:
            out: dict[str, Any] = {
                "call": [
                    [node.function.module, node.function.name],
                    [self.spell(a) for a in node.arguments],
                ]
            }
            if node.how != "reduce":
                out["how"] = node.how
            if node.state is not ABSENT:
                out["state"] = self.spell(node.state)
            if node.items:
                out["items"] = [self.spell(item) for item in node.items]
            if node.pairs:
                out["pairs"] = self.pairs(node.pairs)
            return out
        if kind is Set:
            return {
                "frozenset" if node.frozen else "set": [self.spell(item) for item in node.items]
            }
        if kind in (bytes, bytearray):
            return {kind.__name__: b64encode(node).decode()}
        if kind is complex:
            return {
                "call": [["builtins", "complex"], [self.spell(node.real), self.spell(node.imag)]]
            }
        raise ValueError(f"a {kind.__name__} has no spelling")

    def items(self, items: Sequence[Any]) -> list[Any]:
        # thousands of numbers, as the states of generators have them
        if _WHOLE.issuperset(map(type, items)):
            return list(items)
        return [self.spell(item) for item in items]

    def pairs(self, pairs: list[tuple[Any, Any]]) -> list[Any]:
        out: list[Any] = []
        for key, value in pairs:
            if (
                type(value) is Ref
                and value.key == key
                and value.plain
                and id(value) not in self.shared
            ):
                out.append([key])
            else:
                out.append([self.spell(key), self.spell(value)])
        return out

    def tensor(self, ref: Ref) -> dict[str, Any]:
        out: dict[str, Any] = {"tensor": ref.key}
        out.update({flag: True for flag, said in zip(_FLAGS, ref[1:3], strict=True) if said})
        if ref.subclass is not None:
            out["subclass"] = ref.subclass
        if ref.state is not None:
            out["state"] = self.spell(ref.state)
        if ref.tied is not None:
            out["tied"] = ref.tied
        return out


def _broken(text: str) -> bool:
    return _HALF.search(text) is not None


def _held(node: Any) -> list[Any]:
    kind = type(node)
    if kind is list or kind is tuple:
        return list(node)
    if kind is Dict:
        return [part for pair in node.pairs for part in pair]
    if kind is Set:
        return list(node.items)
    if kind is Ref:
        return [] if node.state is None else [node.state]
    if kind is Call:
        out = [
            *node.arguments,
            *(node.items or ()),
            *(part for pair in node.pairs or () for part in pair),
        ]
        return out if node.state is ABSENT else [*out, node.state]
    return []


def from_json(document: Any, tensor: Callable[[Ref | CarriedStorage], Any], label: str) -> Any:
    """The nodes that a JSON value spells, each tensor as `tensor` makes it. M906 naming `label` for
    anything `to_json` does not write.
    """
    return _JsonReader(tensor, label).read(document, 0)


class _JsonReader:
    def __init__(self, tensor: Callable[[Ref | CarriedStorage], Any], label: str) -> None:
        self.tensor_of, self.label = tensor, label
        self.known: dict[int, Any] = {}
        self.names: dict[tuple[str, str], Global] = {}

    def bad(self, what: str) -> NoReturn:
        fail(
            "M906",
            f"{self.label}: {what}",
            help="fetch the file again, or remove it to go on with the tensors alone",
        )

    def read(self, value: Any, depth: int) -> Any:
        kind = type(value)
        if kind in JSON_SCALARS:
            return value
        if depth > MAX_DEPTH:
            self.bad(f"is nested more than {MAX_DEPTH} deep")
        if kind is list:
            return [self.read(item, depth + 1) for item in value]
        if kind is not dict or not value:
            self.bad("holds something that is not a value")
        match value:
            case {"ref": int(number), **rest} if not rest and number in self.known:
                return self.known[number]
            case {"id": int(number), "is": inner, **rest} if not rest and number not in self.known:
                made = self.read(inner, depth + 1)
                self.known[number] = made
                return made
            case {"tuple": list(items), **rest} if not rest:
                return tuple(self.read(item, depth + 1) for item in items)
            case {"dict": list(pairs), **rest} if not rest:
                return Dict(self.pairs(pairs, depth))
            case {"set": list(items), **rest} if not rest:
                return Set(False, self.distinct([self.read(item, depth + 1) for item in items]))
            case {"frozenset": list(items), **rest} if not rest:
                return Set(True, self.distinct([self.read(item, depth + 1) for item in items]))
            case {"bytes": str(text), **rest} if not rest:
                return self.raw(text)
            case {"bytearray": str(text), **rest} if not rest:
                return bytearray(self.raw(text))
            case {"text": str(text), **rest} if not rest:
                return self.text(text)
            case {"float": str(text), **rest} if not rest and len(text) == 16:
                return struct.unpack(">d", self.hex(text))[0]
            case {"name": [str(module), str(name)], **rest} if not rest:
                return self.name(module, name)
            case {
                "storage": str(key),
                "of": [str(module), str(name)],
                "at": str(location),
                "numel": int(numel),
                **rest,
            } if not rest:
                return self.tensor_of(
                    CarriedStorage(Ref(key), self.name(module, name), location, numel)
                )
            case {"tensor": str(key), **rest}:
                return self.tensor(key, rest, depth)
            case {"call": [[str(module), str(name)], list(arguments)], **rest} if rest.keys() <= {
                "how",
                "state",
                "items",
                "pairs",
            }:
                return self.call(self.name(module, name), arguments, rest, depth)
        return self.bad(
            f"holds an object with the names {printable(', '.join(map(str, list(value)[:4])))}"
        )

    def call(
        self, function: Global, arguments: list[Any], rest: Mapping[Any, Any], depth: int
    ) -> Call:
        how = rest.get("how", "reduce")
        if how not in ("reduce", "newobj"):
            self.bad("calls something in an unknown way")
        made = Call(how, function, tuple(self.read(a, depth + 1) for a in arguments))
        if "state" in rest:
            made.state = self.read(rest["state"], depth + 1)
        if type(items := rest.get("items")) is list:
            made.items = [self.read(item, depth + 1) for item in items]
        if type(pairs := rest.get("pairs")) is list:
            made.pairs = self.pairs(pairs, depth)
        return made

    def pairs(self, pairs: list[Any], depth: int) -> list[tuple[Any, Any]]:
        out: list[tuple[Any, Any]] = []
        for pair in pairs:
            if (
                type(pair) is not list
                or not 1 <= len(pair) <= 2
                or (len(pair) == 1 and type(pair[0]) is not str)
            ):
                self.bad("has an entry of a dict that is not a pair")
            key = self.read(pair[0], depth + 1)
            out.append(
                (key, self.tensor_of(Ref(key)) if len(pair) == 1 else self.read(pair[1], depth + 1))
            )
        self.distinct([key for key, _ in out])
        return out

    def distinct(self, keys: list[Any]) -> list[Any]:
        """The keys of a dict or the members of a set: values that can be such, none twice."""
        try:
            forms, _ = forms_of(keys)
        except WrongError as error:
            self.bad(error.message)
        if len(set(forms)) != len(keys):
            self.bad("has a key twice in one dict, or a member twice in one set")
        return keys

    def tensor(self, key: str, rest: Mapping[Any, Any], depth: int) -> Any:
        flags = [rest.get(flag, False) for flag in _FLAGS]
        subclass, tied = rest.get("subclass"), rest.get("tied")
        wrong = rest.keys() - {*_FLAGS, "subclass", "state", "tied"} or any(
            type(flag) is not bool for flag in flags
        )
        if (
            wrong
            or subclass not in (None, "Buffer")
            or (tied is not None and type(tied) is not str)
        ):
            self.bad(f"says something else of the tensor {printable(key)} than can be said")
        state = self.read(rest["state"], depth + 1) if "state" in rest else None
        return self.tensor_of(Ref(key, flags[0], flags[1], subclass, state, tied))

    def name(self, module: str, name: str) -> Global:
        return self.names.setdefault((module, name), Global(module, name))

    def raw(self, text: str) -> bytes:
        try:
            return b64decode(text, validate=True)
        except (ValueError, binascii.Error):
            self.bad("holds bytes that are not base64")

    def text(self, text: str) -> str:
        try:
            return self.raw(text).decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            self.bad("holds text that is not UTF-8")

    def hex(self, text: str) -> bytes:
        try:
            return bytes.fromhex(text)
        except ValueError:
            self.bad("holds a number that is not its bits")
