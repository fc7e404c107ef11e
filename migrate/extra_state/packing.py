"""Objects as the bytes that rules see.

Rules see tensors, and the op reads bytes, so an object is packed into a row of them: a pickle of
the same values, made here and executed nowhere. What marks it as packed is drawn anew for each
process, so no bytes of a checkpoint can pass for an object.
"""

from __future__ import annotations

import io
import os
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..core.errors import OpError, fail, printable
from ..source.pickle.decoding import ForeignError
from ..source.pickle.emit import emit_protocol4
from ..source.pickle.limits import EXTRA_STATE
from ..source.pickle.nodes import Dict
from ..source.pickle.tree import Buffer, DictNode, ListNode, TensorRecord
from .objects import Object
from .record import StateTensor

if TYPE_CHECKING:
    from ..source.blobs import Blob, Stored
    from ..source.index import Index

MARK = os.urandom(16)
# what may be a tensor in a state dict in memory
_ARRAYS = frozenset({("torch", "Tensor"), ("numpy", "ndarray")})
_PLAIN = frozenset({type(None), bool, int, float, str})


def content(found: Object, index: Index, blobs: Sequence[Blob]) -> bytes:
    """The bytes of a state: of a buffer what it holds, of another object the packed form. M950 for
    what no extra state is made of.
    """
    value = found.value
    if type(value) is Buffer:
        return value.data
    if type(value) is io.BytesIO:
        return value.getvalue()
    try:
        return MARK + emit_protocol4(_Packing(index, blobs).node(value, 0), name=found.name)
    except (ForeignError, OpError) as no:
        message = no.message if isinstance(no, OpError) else str(no)
        fail("M950", f"{printable(found.name)}: {message}")


class _Packing:
    """Values to nodes, tensors with their bytes inside. What is one object stays one."""

    def __init__(self, index: Index, blobs: Sequence[Blob]) -> None:
        from .write import Nodes

        self._index, self._blobs, self._nodes = index, blobs, Nodes()
        self._done: dict[int, Any] = {}
        self._room = EXTRA_STATE.size

    def node(self, value: Any, depth: int) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if id(value) in self._done:
            return self._done[id(value)]
        if depth > EXTRA_STATE.depth:
            raise ForeignError("values that are nested too deep")
        if kind is DictNode and value.kind in ("dict", "OrderedDict"):
            made: Any = Dict(
                [(self.key(key), self.node(held, depth + 1)) for key, held in value.pairs]
            )
        elif kind is dict or kind is OrderedDict:
            made = Dict(
                [(self.key(key), self.node(held, depth + 1)) for key, held in value.items()]
            )
        elif (
            kind is list or kind is tuple or (kind is ListNode and value.kind in ("list", "tuple"))
        ):
            items = [
                self.node(item, depth + 1) for item in (value.items if kind is ListNode else value)
            ]
            made = (
                items
                if kind is list or (kind is ListNode and value.kind == "list")
                else tuple(items)
            )
        else:
            made = self._nodes.tensor(self.tensor(value))
        self._done[id(value)] = made
        return made

    def key(self, key: Any) -> str:
        if type(key) is not str:
            raise ForeignError("a dict with a key that is not text")
        return key

    def tensor(self, value: Any) -> StateTensor:
        if type(value) is TensorRecord:
            if (
                value.parameter
                or value.subclass
                or value.state is not None
                or value.conjugate
                or value.negative
            ):
                raise ForeignError("a tensor that is more than its numbers")
            tree = self._index.tree
            key = tree.names[id(value)] if tree is not None else ""
            return self.read(
                self._index.tensors.get(key) or self._index.passed_through[key], self._blobs
            )
        if (type(value).__module__, type(value).__name__) not in _ARRAYS:
            raise ForeignError(
                f"a value of the kind {printable(type(value).__name__)}, which no extra state holds"
            )
        from ..formats import memory

        source = memory.open({"tensor": value})
        return self.read(source.index.tensors["tensor"], source.blobs)

    def read(self, stored: Stored, blobs: Sequence[Blob]) -> StateTensor:
        self._room -= stored.spec.nbytes
        if self._room < 0:
            raise ForeignError(f"more than {EXTRA_STATE.size:,} bytes")
        if stored.strides is not None:
            raise ForeignError("a tensor that is not stored row by row")
        data = bytearray(stored.spec.nbytes)
        if data:
            blobs[stored.blob].readinto(stored.offset, memoryview(data))
        return StateTensor(stored.spec.dtype, stored.spec.shape, bytes(data))
