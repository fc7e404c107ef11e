"""What a pickle stream is read as: names, calls and containers that do nothing, how their keys are
compared, and how large a stream may be.

None, bool, int, float, str, bytes, bytearray and tuple stand for themselves, a list is a list.
Everything else is one of the classes below. Identity is meaning: what the stream memoised and read
twice is one object here, as it would be there. What `machine.read_pickle` returns holds no cycle
and is not deeper than its limits say.

A hash of numbers or tuples can be chosen by the author of a stream, so that a dict of them takes
for ever; hashing a tuple that is deep enough kills the process. As keys of dicts and members of
sets, numbers keep to 64 bits, and tuples become a flat row of texts, whose hashes cannot be chosen.

Genuine streams stay far below their limits. These are for the others: a stream of one-byte opcodes
makes objects of a hundred bytes each, and a tuple a million levels deep kills the process that
hashes or prints it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

from ...core.errors import printable


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

    A call is a key of its own: only its decoder knows which calls make equal objects.
    """

    __slots__ = ("pairs",)

    def __init__(self, pairs: list[tuple[Any, Any]] | None = None) -> None:
        self.pairs: list[tuple[Any, Any]] = [] if pairs is None else pairs

    def get(self, key: Any, default: Any = None) -> Any:
        """The value of a scalar key, compared with its type (1, 1.0 and True differ). Linear."""
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


# compared as they are; calls and globals by identity
# what holds other nodes
COMPOSITES: Final = frozenset({tuple, list, Dict, Set, Call, Persistent})
_KEYS: Final = frozenset({str, bool, float, Global, Call})


class WrongError(Exception):
    """What is wrong with the opcode in hand; the machine adds the stream and the offset."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


class EndedError(WrongError):
    """The stream ends too early; where only a part of it was read, that part is too short."""


def kind_of(value: Any) -> str:
    """What a value is, in a few words; never its contents."""
    kind = type(value)
    if kind is Global:
        return printable(str(value))
    if kind is Call:
        return f"a call of {printable(str(value.function))}"
    return "None" if value is None else "an int" if kind is int else f"a {kind.__name__.lower()}"


def forms_of(keys: list[Any]) -> tuple[list[Any], int]:
    """What stands for the keys where they are compared, and what that costs, in nodes."""
    if set(map(type, keys)) <= {str}:
        return keys, 0
    forms: list[Any] = []
    cost = 0
    for key in keys:
        kind = type(key)
        if kind is tuple:
            shape: list[str] = []
            leaves: list[Any] = []
            _flatten(key, 1, shape, leaves)
            forms.append(("".join(shape), *leaves))
            cost += len(shape)
        elif kind is bytes:
            forms.append(("b", _text(key)))
            cost += 1
        elif kind is int:
            forms.append(_number(key))
        elif key is None or kind in _KEYS:
            forms.append(key)
        else:
            raise WrongError("M931", f"{kind_of(key)} as a key")
    return forms, cost


def _flatten(key: tuple[Any, ...], depth: int, shape: list[str], leaves: list[Any]) -> None:
    """A tuple as its shape and its leaves: hashes of numbers can be chosen, those of texts not."""
    if depth > 3:
        raise WrongError("M932", "a tuple as a key that is more than 3 deep")
    shape.append("(")
    for part in key:
        kind = type(part)
        if len(shape) > 64:
            raise WrongError("M932", "a tuple as a key that has more than 64 parts")
        if kind is tuple:
            _flatten(part, depth + 1, shape, leaves)
            continue
        if (
            kind is int
            or kind is bool
            or (kind is float and part.is_integer() and abs(part) < 2.0**64)
        ):
            # 1, 1.0 and True are one key
            shape.append("n")
            leaves.append(str(_number(int(part))))
        elif kind is float:
            shape.append("f")
            leaves.append(repr(part))
        elif kind is bytes:
            shape.append("b")
            leaves.append(_text(part))
        elif part is None:
            shape.append("z")
        elif kind in _KEYS:
            shape.append("s" if kind is str else "@")
            leaves.append(part)
        else:
            raise WrongError("M931", f"{kind_of(part)} in a tuple as a key")
    shape.append(")")


def _number(key: int) -> int:
    if key.bit_length() > 64:
        raise WrongError("M932", "an integer of more than 64 bits as a key")
    return key


def _text(key: bytes) -> str:
    if len(key) > 1024:
        raise WrongError("M932", f"bytes of length {len(key):,} as a key; at most 1,024")
    return key.decode("latin-1")


@dataclass(frozen=True, slots=True)
class Limits:
    """Budgets of one stream; reaching past one is M932. `size`, `text`, `blob` and `integer` are in
    bytes, the others are counts.
    """

    size: int
    opcodes: int
    stack: int
    marks: int
    memo: int
    # containers and calls; never more than 100,000 and one for each three bytes of the stream
    nodes: int
    depth: int
    text: int
    blob: int
    # 128 bits without a sign, as numpy's generators have them
    integer: int = 17


MiB = 1 << 20

# the state of a Transformer Engine module
EXTRA_STATE = Limits(
    size=64 * MiB,
    opcodes=200_000,
    stack=10_000,
    marks=32,
    memo=50_000,
    nodes=100_000,
    depth=24,
    text=4096,
    blob=32 * MiB,
)
# data.pkl of a zip, the object pickle of a legacy file; protocol 2 writes bytes as text
ARCHIVE = Limits(
    size=176 * MiB,
    opcodes=20_000_000,
    stack=100_000,
    marks=64,
    memo=5_000_000,
    nodes=5_000_000,
    depth=64,
    text=64 * MiB,
    blob=64 * MiB,
)
# .metadata of torch.distributed.checkpoint: one call a chunk, 50 MB for 320,000 chunks
METADATA = Limits(
    size=512 * MiB,
    opcodes=200_000_000,
    stack=100_000,
    marks=64,
    memo=50_000_000,
    nodes=50_000_000,
    depth=64,
    text=MiB,
    blob=0,
)


# what JSON spells as it is, and what holds no other node
JSON_SCALARS: Final = frozenset({type(None), bool, int, float, str})
_FLAT: Final = JSON_SCALARS | {bytes, bytearray, Global}
_GROUP = 1024


def measure(value: Any, limits: Limits, size: int | None = None) -> None:
    """M932 if the value is too deep, or has too many parts, counted at each depth where they lie.

    A value that shares nothing has no more parts than its stream has bytes, which is `size` where
    there is a stream. Past that, what is shared is looked at once for each of its depths; genuine
    values share little, and at two or three depths.
    """
    deep = f"values nested more than {limits.depth} deep"
    most = limits.opcodes if size is None else min(limits.opcodes, 4 * size + _GROUP)
    left = min(most, 1_000_000 if size is None else size)
    groups = [([value], 1)]
    while groups and left >= 0:
        group, depth = groups.pop()
        if depth > limits.depth:
            if any(type(node) not in _FLAT for node in group):
                raise WrongError("M932", deep)
            continue
        held = _held(group, left)
        left -= len(held)
        groups += [(held[i : i + _GROUP], depth + 1) for i in range(0, len(held), _GROUP)]
    if left >= 0:
        return
    level, looked = [value], 0
    for _ in range(limits.depth):
        held = _held(level, most)
        looked += len(held)
        if looked > most:
            raise WrongError(
                "M932", f"more than {most:,} values, those that are shared counted at each depth"
            )
        level = list({id(part): part for part in held if type(part) not in _FLAT}.values())
        if not level:
            return
    raise WrongError("M932", deep)


def _held(nodes: list[Any], most: int) -> list[Any]:
    """What the nodes hold; stops soon after `most`."""
    held: list[Any] = []
    for node in nodes:
        kind = type(node)
        if kind in _FLAT:
            continue
        if kind is tuple or kind is list:
            held += node
        elif kind is Call:
            held += node.arguments
            if node.state is not ABSENT:
                held.append(node.state)
            if node.items is not None:
                held += node.items
            if node.pairs is not None:
                held += chain.from_iterable(node.pairs)
        elif kind is Persistent:
            held.append(node.id)
        elif kind is Dict:
            held += chain.from_iterable(node.pairs)
        elif kind is Set:
            held += node.items
        if len(held) > most:
            break
    return held
