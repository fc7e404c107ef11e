"""What a pickle stream is read as: names, calls and containers that do nothing.

None, bool, int, float, str, bytes, bytearray and tuple stand for themselves, a list is a list.
Everything else is one of the classes below. Identity is meaning: what the stream memoised and read
twice is one object here, as it would be there. What `machine.read` returns holds no cycle and is
not deeper than its limits say.
"""

from __future__ import annotations

from typing import Any


class Global:
    """The name of something in a module; one object per name in a stream. Never looked up."""

    __slots__ = ("module", "name")

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


# The class method that quantized tensors of Transformer Engine before 2.16 were pickled with, as
# `getattr(Class, METHOD)`. It is read as one name, `Class._make_in_reduce_ex`, which no stream can
# spell otherwise.
METHOD = "_make_in_reduce_ex"


class Absent:
    """The type of `ABSENT`."""

    __slots__ = ()


ABSENT = Absent()


class Call:
    """What REDUCE, NEWOBJ or NEWOBJ_EX would make: `function` with `arguments`, then what BUILD,
    APPENDS and SETITEMS did to it.

    `how` is "reduce" or "newobj". `state` is ABSENT without a BUILD; a second BUILD is refused by
    the machine. `items` are what was appended, `pairs` what was set, in order; None without either.
    """

    __slots__ = ("arguments", "function", "how", "items", "pairs", "state")

    def __init__(self, how: str, function: Global, arguments: tuple[Any, ...]) -> None:
        self.how, self.function, self.arguments = how, function, arguments
        self.state: Any = ABSENT
        self.items: list[Any] | None = None
        self.pairs: list[tuple[Any, Any]] | None = None


class Dict:
    """A dict: its pairs in the order of the stream, no key twice (as Python compares keys: 1, 1.0
    and True are one key).

    A call is another key than any other call: which calls make equal objects only their decoder
    knows.
    """

    __slots__ = ("pairs",)

    def __init__(self, pairs: list[tuple[Any, Any]] | None = None) -> None:
        self.pairs: list[tuple[Any, Any]] = [] if pairs is None else pairs

    def get(self, key: Any, default: Any = None) -> Any:
        """The value of a scalar key, compared with its type (1, 1.0 and True differ); looks through
        all pairs.
        """
        kind = type(key)
        return next((value for k, value in self.pairs if type(k) is kind and k == key), default)


class Set:
    """A set (`frozen` for frozenset): its members in the order of the stream, none twice."""

    __slots__ = ("frozen", "items")

    def __init__(self, frozen: bool, items: list[Any] | None = None) -> None:
        self.items: list[Any] = [] if items is None else items
        self.frozen = frozen


class Persistent:
    """A persistent id, as torch writes for storages."""

    __slots__ = ("id",)

    def __init__(self, identity: Any) -> None:
        self.id = identity
