"""What is outside the allow-list, written again without being read, where a person asks for it.

The inert node of such a value goes out as it came in: the same names, called in the same way with
the same arguments, in the opcodes that every stream of ours has. The storages that it refers to go
with it, whole, as tensors of bytes that rules do not see. Nothing of it is looked up or called
here; a program that unpickles the output runs what the source would have run.

What it shares with other carried values stays shared, and what it shares with values that are read
is written twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .pickle.decoding import STORAGES
from .pickle.nodes import ABSENT, COMPOSITES, Call, Dict, Global, Persistent, Set
from .pickle.policy import NAMES
from .pickle.tree import (
    ITEMSIZE,
    SCALARS,
    Carried,
    DictNode,
    ListNode,
    Opaque,
    Storage,
    TensorRecord,
    inside,
)


def carry(root: Any, unfit: Mapping[int, str], sizes: Mapping[str, int]) -> Any:
    """The tree with what is opaque, and what is `unfit` by identity, as values that are carried;
    None if one of them refers to what is in no storage of `sizes` (bytes by key), or is a key.
    """
    records: dict[str, TensorRecord] = {}
    made: dict[int, Any] = {}

    def visit(value: Any) -> Any:
        kind = type(value)
        if kind in SCALARS:
            return value
        if id(value) not in made:
            made[id(value)] = _new(value)
        return made[id(value)]

    def _new(value: Any) -> Any:
        kind = type(value)
        if kind is Opaque or id(value) in unfit:
            node = getattr(value, "node", None)
            keys = None if node is None else _storages(node, sizes)
            if keys is None:
                raise _UncarriedError
            for key in keys:
                if key not in records:
                    storage = Storage(key, None, "cpu", sizes[key], 1)
                    records[key] = TensorRecord(
                        "uint8", storage, 0, (sizes[key],), (1,), False, None
                    )
            name = getattr(value, "name", "") or kind.__name__
            reason = unfit.get(id(value), getattr(value, "reason", ""))
            return Carried(name, reason, node, tuple((key, records[key]) for key in keys))
        if kind is DictNode:
            if any(visit(key) is not key for key, _ in value.pairs):
                # a key has no place for storages of its own
                raise _UncarriedError
            pairs = tuple((key, visit(held)) for key, held in value.pairs)
            attributes = visit(value.attributes)
            same = attributes is value.attributes and all(
                held is was for (_, held), (_, was) in zip(pairs, value.pairs, strict=True)
            )
            return value if same else DictNode(value.kind, pairs, value.node, attributes)
        if kind is ListNode:
            items = tuple(map(visit, value.items))
            same = all(a is b for a, b in zip(items, value.items, strict=True))
            return value if same else ListNode(value.kind, items, value.node)
        return value

    try:
        return visit(root)
    except _UncarriedError:
        return None


class _UncarriedError(Exception):
    """A value that cannot be carried."""


def _storages(node: Any, sizes: Mapping[str, int]) -> list[str] | None:
    """The keys of the storages that a node refers to, in order, each once; None if it names one in
    another way than torch does, or one that is not there.
    """
    keys: dict[str, None] = {}
    for one in walk_nodes(node):
        if type(one) is not Persistent:
            continue
        key = _key(one.id, sizes)
        if key is None:
            return None
        keys[key] = None
    return list(keys)


def _key(identity: Any, sizes: Mapping[str, int]) -> str | None:
    if (
        type(identity) is not tuple
        or len(identity) not in (5, 6)
        or identity[5:] not in ((), (None,))
    ):
        return None
    word, cls, key, location, numel = identity[:5]
    if word != "storage" or type(key) is not str or type(location) is not str:
        return None
    if type(cls) is not Global or (cls.module, cls.name) not in STORAGES or type(numel) is not int:
        return None
    dtype = STORAGES[cls.module, cls.name]
    itemsize = 1 if dtype is None else ITEMSIZE[dtype]
    return key if sizes.get(key) == numel * itemsize else None


def walk_nodes(root: Any) -> Iterator[Any]:
    """The nodes below one, itself included, each composite once, in order."""
    seen: set[int] = set()
    stack = [root]
    while stack:
        node = stack.pop()
        if type(node) in COMPOSITES:
            if id(node) in seen:
                continue
            seen.add(id(node))
        yield node
        stack += reversed(_below(node))


def _below(node: Any) -> list[Any]:
    kind = type(node)
    if kind is tuple or kind is list:
        return list(node)
    if kind is Dict:
        return [part for pair in node.pairs for part in pair]
    if kind is Set:
        return list(node.items)
    if kind is not Call:
        return []
    held = [
        node.function,
        *node.arguments,
        *(node.items or ()),
        *(part for pair in node.pairs or () for part in pair),
    ]
    return held if node.state is ABSENT else [*held, node.state]


def carried_names(root: Any) -> set[tuple[str, str]]:
    """The names outside the allow-list in what a tree carries."""
    names: set[tuple[str, str]] = set()
    seen: set[int] = set()
    stack = [root]
    while stack:
        value = stack.pop()
        if type(value) in SCALARS or id(value) in seen:
            continue
        seen.add(id(value))
        if type(value) is Carried:
            names.update(
                (node.module, node.name) for node in walk_nodes(value.node) if type(node) is Global
            )
        elif type(value) is DictNode:
            stack += [key for key, _ in value.pairs]
        stack += [held for _, held in inside(value)]
    return names - NAMES
