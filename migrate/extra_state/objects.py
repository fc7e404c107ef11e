"""States that are objects beside the tensors: the lists and dicts of 0.1 to 0.5, None, and the
`io.BytesIO` of later releases.
"""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from ..source.pickle.tree import Buffer, DictNode, ListNode
from ..source.tree import is_state

if TYPE_CHECKING:
    from ..source.index import Index

_CONTAINERS = frozenset({DictNode, ListNode, dict, OrderedDict, list, tuple})


class Object(NamedTuple):
    """One state: the key that rules see, the rank of its file, its key there, and its value,
    decoded or (in memory) as it is.
    """

    name: str
    rank: int
    key: str
    value: Any


def objects(index: Index, asked: Callable[[str], bool] = is_state) -> Iterator[Object]:
    """The states of a checkpoint that stand beside its tensors, under keys that are `asked` for."""
    if index.tree is None:
        for key, item in index.items.items():
            if (type(item) is io.BytesIO or type(item) in _CONTAINERS or item is None) and asked(
                key
            ):
                yield Object(key, 0, key, item)
        return
    several = len(index.tree.parts) > 1
    for rank, part in enumerate(index.tree.parts):
        for key, value in part.table.pairs if part.table is not None else ():
            if (
                type(key) is str
                and (type(value) is Buffer or type(value) in _CONTAINERS or value is None)
                and asked(key)
            ):
                yield Object(f"{key}@{rank}" if several else key, rank, key, value)
