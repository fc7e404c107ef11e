"""The values beside the tensors of a checkpoint, by the names that lead to each.

A place is spelled from the root of a file on: keys of dicts, fields of Namespaces, integer keys and
places in lists in decimal, with dots between. `args.num_layers` is one word for both kinds of
`args`, a Namespace and a dict.

Each part of a checkpoint has values of its own; those that are equal say one thing.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .pickle.decoding import ContradictionError, ForeignError
from .pickle.nodes import JSON_SCALARS
from .pickle.python_objects import number
from .pickle.tree import OBJECTS, Array, Constant, DictNode, ListNode
from .tree import item_at

if TYPE_CHECKING:
    from .index import Index

ABSENT = object()
# items of a list that is a value
MOST_ITEMS = 100_000
_LISTS = frozenset({"list", "tuple", "Size", "set", "frozenset", "deque"})


class Unlike:
    """What stands where a plain value was asked for; its text says what it is."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text

    def __str__(self) -> str:
        return self.text


class Values:
    """The values of a checkpoint's `parts`: what each is called in messages, and its root."""

    __slots__ = ("_names", "_parts")

    def __init__(self, parts: Sequence[tuple[str, Any]]) -> None:
        self._parts = parts
        # of a dict that was asked, its entries by text; many places ask the same one
        self._names: dict[int, dict[str, Any]] = {}

    @classmethod
    def of(cls, index: Index) -> Values:
        """Those of a checkpoint, part by part as it is read; a state dict in memory is one."""
        if index.tree is None:
            return cls([("", dict(index.items))] if index.items else [])
        several = len(index.tree.parts) > 1
        return cls(
            [
                (f"part {number}" if several else "", part.root)
                for number, part in enumerate(index.tree.parts)
            ]
        )

    def at(self, place: str) -> Iterator[tuple[str, Any]]:
        """(where it stands, for messages; the value) at a place, as `plain` makes it; equal values
        of several parts once. Nothing where no part has it, or where it is None.
        """
        said: set[str] = set()
        words = place.split(".")
        for name, root in self._parts:
            found: Any = root
            for word in words:
                found = self._held(found, word)
                if found is ABSENT:
                    break
            if found is ABSENT or found is None:
                continue
            value = plain(found)
            text = f"{type(value).__name__} {value}"
            if text not in said:
                said.add(text)
                yield f"{place} of {name}" if name else place, value

    def _held(self, node: Any, word: str) -> Any:
        kind = type(node)
        if kind is DictNode:
            names = self._names.get(id(node))
            if names is None:
                names = {str(key): value for key, value in node.pairs if type(key) is int}
                names.update({key: value for key, value in node.pairs if type(key) is str})
                self._names[id(node)] = names
            return names.get(word, ABSENT)
        if kind is ListNode:
            found = item_at(node, word)
            return ABSENT if found is None else found
        if (kind.__module__, kind.__name__) == OBJECTS["Namespace"]:
            return vars(node).get(word, ABSENT)
        return node.get(word, ABSENT) if isinstance(node, Mapping) else ABSENT


def plain(value: Any) -> Any:
    """A number, text or list as it is; the name of a dtype or of a member of an enum; a number of
    numpy's as one of Python's. `Unlike` for everything else.
    """
    kind = type(value)
    if kind in JSON_SCALARS:
        return value
    if kind is Constant:
        return value.text.rpartition(".")[2] if value.kind == "enum" else value.text
    if kind is Array and value.scalar:
        try:
            return number(value)
        except (ForeignError, ContradictionError):
            return Unlike(f"a number of numpy's {value.dtype}")
    if isinstance(value, enum.Enum):
        return value.name
    items = (
        value.items
        if kind is ListNode and value.kind in _LISTS
        else value
        if kind in (list, tuple)
        else None
    )
    if items is None:
        return Unlike(f"a {getattr(value, 'kind', kind.__name__)}")
    if len(items) > MOST_ITEMS:
        return Unlike(f"a list of {len(items):,} items")
    return [item if type(item) in JSON_SCALARS else _flat(item) for item in items]


def _flat(item: Any) -> Any:
    """An item of a list; lists in lists are none."""
    kind = type(item)
    nested = kind is ListNode or kind in (list, tuple)
    return Unlike("a list") if nested else plain(item)
