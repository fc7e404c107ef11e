"""States as bytes: a record as Transformer Engine 2.x writes it, and an object beside the tensors
as rules see it; without Transformer Engine.

The bytes of a record are a pickle, because that is what its loader takes. It names what TE's own
names, and nothing else: the recipe, its format, and torch's functions that make a tensor of bytes.
The name of a user's function is not written, because loading it would import its module.

Rules see tensors, and the op reads bytes, so an object is packed into a row of them: a pickle of
the same values, made here and executed nowhere. What marks it as packed is drawn anew for each
process, so no bytes of a checkpoint can pass for an object.
"""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any

from ..core.errors import OpError, fail, printable
from ..source.blobs import read_rows, rows_of
from ..source.pickle.decoding import MAGIC, PROTOCOL, TYPED, ForeignError
from ..source.pickle.emit import emit, emit_protocol4
from ..source.pickle.nodes import EXTRA_STATE, JSON_SCALARS, Call, Dict, Global
from ..source.pickle.tree import Buffer, DictNode, ListNode, TensorRecord
from .record import (
    EXTRAS,
    FORMAT,
    FORMAT_HELPER,
    MARK,
    RECIPE,
    SCALING,
    Function,
    Object,
    Parameters,
    Recipe,
    ScalingState,
    StateForm,
    StateRecord,
    StateTensor,
    normal,
)

if TYPE_CHECKING:
    from ..source.blobs import Blob, StoredTensor
    from ..source.index import Index

# what may be a tensor in a state dict in memory
_ARRAYS = frozenset({("torch", "Tensor"), ("numpy", "ndarray")})


def content(found: Object, index: Index, blobs: Sequence[Blob]) -> bytes:
    """The bytes of a state: of a buffer its content, else the packed form. M950 if it has none."""
    value = found.value
    if value is None:
        return _none()
    if type(value) is Buffer:
        return value.data
    if type(value) is io.BytesIO:
        return value.getvalue()
    try:
        return MARK + emit_protocol4(_Packing(index, blobs).node(value, 0), name=found.name)
    except (ForeignError, OpError) as no:
        message = no.message if isinstance(no, OpError) else str(no)
        fail("M950", f"{printable(found.name)}: {message}")


@cache
def _none() -> bytes:
    """What modules without a state have, thousands of them in one checkpoint."""
    return MARK + emit_protocol4(None, name="None")


class _Packing:
    """Values to nodes, tensors with their bytes inside. What is one object stays one."""

    def __init__(self, index: Index, blobs: Sequence[Blob]) -> None:
        self._index, self._blobs, self._nodes = index, blobs, Nodes()
        self._done: dict[int, Any] = {}
        self._room = EXTRA_STATE.size

    def node(self, value: Any, depth: int) -> Any:
        kind = type(value)
        if kind in JSON_SCALARS:
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

    def read(self, stored: StoredTensor, blobs: Sequence[Blob]) -> StateTensor:
        self._room -= stored.spec.nbytes
        if self._room < 0:
            raise ForeignError(f"more than {EXTRA_STATE.size:,} bytes")
        rows = rows_of(stored)
        if rows is None:
            raise ForeignError("a tensor that is not stored row by row")
        return StateTensor(stored.spec.dtype, stored.spec.shape, read_rows(rows, blobs))


_STORAGES = {dtype: name for name, dtype in TYPED.items()}
_SIZES = Dict([("short", 2), ("int", 4), ("long", 4)])
_SYSTEM = Dict([("protocol_version", PROTOCOL), ("little_endian", True), ("type_sizes", _SIZES)])
# what every stream of torch.save begins with
_HEAD = b"".join(emit(part, name="a storage") for part in (MAGIC, PROTOCOL, _SYSTEM))


def pickled(record: StateRecord, name: str) -> bytes:
    """The bytes that 2.x would have written for this state; empty where it holds nothing.

    A record of 1.x gets the recipe and the slots that `normal` finds. OpError M950 for what cannot
    be said so: see `normal`, and a recipe that names a function.
    """
    states = normal(record)
    if not states:
        return b""
    writer = Nodes()
    root = (
        writer.state(states[""])
        if "" in states
        else Dict([(mode, writer.state(state)) for mode, state in states.items()])
    )
    return emit_protocol4(root, name=name)


class Nodes:
    """Values to nodes; one object for one value, as the pickler would share them."""

    def __init__(self) -> None:
        self._made: dict[int, Any] = {}
        self._names: dict[tuple[str, str], Global] = {}
        self._storages = 0

    def name(self, name: tuple[str, str]) -> Global:
        return self._names.setdefault(name, Global(*name))

    def state(self, state: ScalingState) -> Dict:
        pairs: list[tuple[Any, Any]] = [(RECIPE, self.node(state.recipe))]
        pairs += [(key, self.node(state.tensors[key])) for key in SCALING if key in state.tensors]
        return Dict([*pairs, (EXTRAS, self.node(state.extras))])

    def node(self, value: Any) -> Any:
        if value is None or type(value) in (bool, int, float, str):
            return value
        if id(value) not in self._made:
            self._made[id(value)] = self.anew(value)
        return self._made[id(value)]

    def anew(self, value: Any) -> Any:
        if isinstance(value, StateTensor):
            return self.tensor(value)
        if isinstance(value, StateForm):
            helper = Call("newobj", self.name(FORMAT_HELPER), tuple(value))
            return Call("reduce", self.name(FORMAT), (helper,))
        if isinstance(value, (Recipe, Parameters)):
            made = Call("newobj", self.name((value.module, value.name)), ())
            made.state = self.dict(value.fields)
            return made
        if isinstance(value, Function):
            raise OpError(
                "M950",
                f"its recipe names the function {value.module}.{value.name}, which a loader would "
                "import",
                help="`delayed_scaling: tensors` keeps the scales without the recipe",
            )
        if isinstance(value, dict):
            return self.dict(value)
        items = [self.node(item) for item in value]
        return tuple(items) if isinstance(value, tuple) else items

    def dict(self, fields: Mapping[str, Any]) -> Dict:
        return Dict([(key, self.node(value)) for key, value in fields.items()])

    def tensor(self, tensor: StateTensor) -> Call:
        strides, step = [], 1
        for size in reversed(tensor.shape):
            strides.append(step)
            step *= max(size, 1)
        cls = _STORAGES.get(tensor.dtype)
        if cls is None:
            raise OpError("M950", f"a tensor of {tensor.dtype}, which no release of 2.x keeps")
        storage = Call(
            "reduce", self.name(("torch.storage", "_load_from_bytes")), (self.stream(cls, tensor),)
        )
        hooks = Call("reduce", self.name(("collections", "OrderedDict")), ())
        arguments = (storage, 0, tensor.shape, tuple(reversed(strides)), False, hooks)
        return Call("reduce", self.name(("torch._utils", "_rebuild_tensor_v2")), arguments)

    def stream(self, cls: str, tensor: StateTensor) -> bytes:
        """A storage as torch.save once wrote it; its key, an address there, is a number here."""
        key = str(self._storages)
        self._storages += 1
        numel = prod(tensor.shape)
        identity = emit(
            ("storage", Global("torch", cls), key, "cpu", numel, None), name="a storage"
        )
        # torch writes a storage alone: nothing refers to it again, so the memo has no place for it
        return b"".join(
            (
                _HEAD,
                identity[:-1],
                b"Q.",
                emit([key], name="a key"),
                numel.to_bytes(8, "little"),
                tensor.data,
            )
        )
