"""What CPython's unpickler makes of a stream when every name is a stub that records what is done to
it, and whether nodes say the same.
"""

from __future__ import annotations

import io
import pickle
import struct
from typing import Any

from migrate.source.pickle.nodes import ABSENT, Call, Dict, Global, Persistent, Set

# the names that streams of protocol 2 use for what Python 3 calls otherwise
OLD_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg"}
OLD_NAMES = {
    ("__builtin__", "unicode"): "str",
    ("__builtin__", "long"): "int",
    ("__builtin__", "xrange"): "range",
}


class Recording(type):
    def __call__(cls, *arguments: Any) -> Any:
        made = object.__new__(cls)
        made.record("reduce", arguments)
        return made


class Stub(metaclass=Recording):
    module = name = ""

    def __new__(cls, *arguments: Any) -> Any:
        made = object.__new__(cls)
        made.record("newobj", arguments)
        return made

    def record(self, how: str, arguments: tuple[Any, ...]) -> None:
        self.how, self.arguments, self.states, self.items, self.pairs = how, arguments, [], [], []

    def __setstate__(self, state: Any) -> None:
        self.states.append(state)

    def append(self, item: Any) -> None:
        self.items.append(item)

    def extend(self, items: list[Any]) -> None:
        self.items += items

    def __setitem__(self, key: Any, value: Any) -> None:
        self.pairs.append((key, value))


class Pid:
    def __init__(self, identity: Any) -> None:
        self.identity = identity


class Oracle(pickle.Unpickler):
    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self.old = data[1:2] == b"\x02"
        self.stubs: dict[tuple[str, str], type] = {}

    def find_class(self, module: str, name: str) -> Any:
        if self.old:
            module, name = OLD_MODULES.get(module, module), OLD_NAMES.get((module, name), name)
        if (module, name) not in self.stubs:
            self.stubs[module, name] = Recording(name, (Stub,), {"module": module, "name": name})
        return self.stubs[module, name]

    def persistent_load(self, identity: Any) -> Any:
        return Pid(identity)


def oracle(data: bytes) -> Any:
    return Oracle(data).load()


def difference(node: Any, thing: Any) -> str | None:
    """The first place where the nodes and what the oracle made differ, in value, in kind or in what
    is shared; None if nowhere.
    """
    todo: list[tuple[Any, Any, str]] = [(node, thing, "value")]
    there: dict[int, Any] = {}
    back: dict[int, Any] = {}
    while todo:
        a, b, where = todo.pop()
        kind = type(a)
        if kind in (int, bool, str, bytes, bytearray, type(None)):
            if kind is not type(b) or a != b:
                return f"{where}: {a!r} and {b!r}"
            continue
        if kind is float:
            if type(b) is not float or struct.pack("d", a) != struct.pack("d", b):
                return f"{where}: {a!r} and {b!r}"
            continue
        if kind is tuple and not a:
            if b != ():
                return f"{where}: () and {b!r}"
            continue
        if id(a) in there or id(b) in back:
            if there.get(id(a)) is not b or back.get(id(b)) is not a:
                return f"{where}: shared otherwise"
            continue
        there[id(a)], back[id(b)] = b, a
        if kind is Global:
            if not isinstance(b, Recording) or (a.module, a.name) != (b.module, b.name):
                return f"{where}: {a} and {b!r}"
        elif kind is tuple or kind is list:
            if kind is not type(b) or len(a) != len(b):
                return f"{where}: another {kind.__name__}"
            todo += [(x, y, f"{where}[{i}]") for i, (x, y) in enumerate(zip(a, b, strict=True))]
        elif kind is Dict:
            if type(b) is not dict or len(a.pairs) != len(b):
                return f"{where}: another dict"
            for (k, v), (ok, ov) in zip(a.pairs, b.items(), strict=True):
                todo += [(k, ok, f"{where} key"), (v, ov, f"{where} value")]
        elif kind is Set:
            if type(b) is not (frozenset if a.frozen else set) or len(a.items) != len(b):
                return f"{where}: another set"
            if sorted(map(described, a.items)) != sorted(map(described, b)):
                return f"{where}: other members"
        elif kind is Persistent:
            if type(b) is not Pid:
                return f"{where}: no persistent id"
            todo.append((a.id, b.identity, f"{where} id"))
        elif kind is Call:
            if (
                not isinstance(b, Stub)
                or a.how != b.how
                or len(b.states) != (a.state is not ABSENT)
            ):
                return f"{where}: another call"
            todo.append((a.function, type(b), f"{where} function"))
            # a call in Python makes a tuple of its own, and so does the unpickler of what is
            # appended
            todo += [
                (list(a.arguments), list(b.arguments), f"{where} arguments"),
                (list(a.items or []), b.items, f"{where} items"),
            ]
            todo += [
                (x, y, f"{where} pair")
                for p, q in zip(a.pairs or [], b.pairs, strict=True)
                for x, y in zip(p, q, strict=True)
            ]
            if b.states:
                todo.append((a.state, b.states[0], f"{where} state"))
        else:
            return f"{where}: no node: {kind}"
    return None


def described(member: Any) -> str:
    """A member of a set as text; what is not plain data is described by its kind."""
    if type(member) is tuple:
        return f"({','.join(map(described, member))})"
    return repr(member) if type(member) in (int, bool, str, bytes, float, type(None)) else "object"
