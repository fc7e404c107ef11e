"""A record as the bytes that Transformer Engine 2.x writes, without Transformer Engine.

The bytes are a pickle, because that is what its loader takes. It names what TE's own names, and
nothing else: the recipe, its format, and torch's functions that make a tensor of bytes. The name of
a user's function is not written, because whoever loads it imports the module of that name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..core.errors import OpError
from ..source.pickle.decoding import TYPED
from ..source.pickle.emit import emit, emit_protocol4
from ..source.pickle.nodes import Call, Dict, Global
from ._storages import MAGIC, PROTOCOL
from .normal import normal
from .recipes import FORMAT, FORMAT_HELPER
from .record import (
    EXTRAS,
    RECIPE,
    SCALING,
    Function,
    Parameters,
    Recipe,
    ScalingState,
    StateForm,
    StateRecord,
    StateTensor,
)

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
        """What torch.save writes of a storage in its old form; the key, the address of the storage
        there, is a number here.
        """
        key = str(self._storages)
        self._storages += 1
        numel = 1
        for size in tensor.shape:
            numel *= size
        identity = emit(
            ("storage", Global("torch", cls), key, "cpu", numel, None), name="a storage"
        )
        # torch writes a storage alone, so nothing refers to it again, and the memo has no place for
        # it
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
