"""Tensors, parameters, DTensors and torch's small values, read from the calls that rebuild them.

A dense tensor becomes a `TensorRecord` or a contradiction. What is a tensor to torch but no dense
view of one storage (sparse, quantized, nested, meta, an unknown subclass) is refused by name: its
bytes lie in the file, but what they mean is not ours to guess.

A DTensor is what one rank held of a distributed tensor, described well enough to say so and to know
when it is all of it. The mesh and the placements are read from fields alone. Releases of torch
differ in the fields of a mesh, so its shape may stay unknown; the global shape and the placements
are in all of them.
"""

from __future__ import annotations

import re
from dataclasses import replace
from math import prod
from typing import Any

from .decoding import (
    ContradictionError,
    Decoder,
    Decoding,
    ForeignError,
    NestedError,
    Table,
    dtype_of,
    integers,
    is_global,
    plain,
)
from .nodes import ABSENT, Call, Dict, Global, kind_of
from .quantized_tensors import CLASSES, described, wrapped
from .te_grouped import GROUPED, grouped
from .tree import (
    ITEMSIZE,
    Composite,
    Constant,
    Described,
    DictNode,
    ListNode,
    LocalShard,
    Opaque,
    TensorRecord,
)

WRAPPER = ("torch._utils", "_rebuild_wrapper_subclass")
DTENSOR = (
    ("torch.distributed.tensor", "DTensor"),
    ("torch.distributed._tensor.api", "DTensor"),
    ("torch.distributed.tensor._api", "DTensor"),
    ("torch.distributed._tensor", "DTensor"),
)


def shard(call: Call, state: Any, _: Decoding) -> LocalShard:
    """The local shard of
    `_rebuild_from_type_v2(_rebuild_wrapper_subclass, DTensor, arguments, state)`.

    The arguments are (class, dtype, size, stride, storage offset, layout, device, requires_grad);
    the state holds `_local_tensor` and `_spec`.
    """
    arguments = call.arguments[2]
    if type(arguments) is not tuple or len(arguments) != 8:
        raise ForeignError("a DTensor with other arguments")
    dtype, shape, requires_grad = dtype_of(arguments[1]), integers(arguments[2]), arguments[7]
    if type(requires_grad) is not bool or any(size < 0 for size in shape):
        raise ContradictionError("a DTensor whose requires_grad or shape is none")
    attributes = None
    if type(state) is ListNode and len(state.items) == 2:
        # what is in the object's dict, and what is in its slots
        attributes, state = state.items
    if type(state) is not DictNode or {key for key, _ in state.pairs if type(key) is str} != {
        "_local_tensor",
        "_spec",
    }:
        raise ForeignError(
            "a DTensor with other fields than its local tensor and its specification"
        )
    # how torch marks a parameter of another class than torch.nn.Parameter
    parameter = type(attributes) is DictNode and attributes.get("_is_param") is True
    # torch 2.8 writes an empty dict where later ones write None
    if attributes is not None and not (
        type(attributes) is DictNode and len(attributes.pairs) == parameter
    ):
        raise ForeignError("a DTensor with attributes")
    local, spec = state.get("_local_tensor"), state.get("_spec")
    if type(local) is Opaque or type(spec) is Opaque:
        raise NestedError(local if type(local) is Opaque else spec)
    if type(local) is not TensorRecord:
        raise ForeignError("a DTensor whose local tensor is not a dense tensor")
    if type(spec) is not Described or type(spec.fields) is not DictNode:
        raise ForeignError("a DTensor without a known specification")
    if local.dtype != dtype or len(local.shape) != len(shape):
        raise ContradictionError(
            f"a DTensor of {dtype} and {len(shape)} dimensions made of {local.dtype} and "
            f"{len(local.shape)}"
        )
    placements = spec.fields.get("placements")
    if type(placements) is not ListNode:
        raise ForeignError("a DTensor without placements")
    texts = tuple(_placement(p, len(shape)) for p in placements.items)
    mesh = _mesh(spec.fields.get("mesh"))
    if mesh is not None and len(mesh) != len(texts):
        raise ContradictionError(
            f"a DTensor with {len(texts)} placements on a mesh of {len(mesh)} dimensions"
        )
    return LocalShard(local, dtype, shape, texts, mesh, requires_grad, spec, call, parameter)


def _placement(value: Any, dimensions: int) -> str:
    if type(value) is Opaque:
        raise NestedError(value)
    if type(value) is not Described:
        raise ForeignError("a placement that is not known")
    name, fields = value.name.rpartition(".")[2], value.fields
    if name == "Replicate":
        return "R"
    if type(fields) is not DictNode:
        raise ForeignError("a placement without fields")
    if name in ("Partial", "_Partial"):
        return f"P({fields.get('reduce_op')})" if type(fields.get("reduce_op")) is str else "P(?)"
    dim = fields.get("dim")
    if type(dim) is not int or not 0 <= dim < dimensions:
        raise ContradictionError(
            "a DTensor that is sharded over a dimension which it does not have"
        )
    return f"S({dim})" if name == "Shard" else f"_S({dim}, {fields.get('split_factor')})"


def _mesh(value: Any) -> tuple[int, ...] | None:
    """The shape of a DeviceMesh: of its `mesh` tensor, of its layout in newer ones, else None."""
    if type(value) is not Described or type(value.fields) is not DictNode:
        return None
    for field in ("mesh", "_mesh"):
        ranks = value.fields.get(field)
        if type(ranks) is TensorRecord:
            return ranks.shape
    layout = value.fields.get("_layout")
    axes = (
        layout.fields.get("axes")
        if type(layout) is Described and type(layout.fields) is DictNode
        else None
    )
    if type(axes) is not ListNode:
        return None
    shape = []
    for axis in axes.items:
        sizes = (
            axis.fields.get("shape")
            if type(axis) is Described and type(axis.fields) is DictNode
            else None
        )
        if type(sizes) is not ListNode or any(type(size) is not int for size in sizes.items):
            return None
        shape.append(prod(sizes.items))
    return tuple(shape)


def _parts(call: Call) -> list[Any]:
    return [*call.arguments, None if call.state is ABSENT else call.state]


def _tuple(call: Call, parts: list[Any], decoding: Decoding) -> Described:
    if not plain(call):
        raise ForeignError(f"{kind_of(call)} that was changed")
    return described(call, parts, decoding)


_PLACEMENTS = tuple(
    (f"torch.distributed.{module}", name)
    for module in ("tensor.placement_types", "_tensor.placement_types")
    for name in ("Shard", "Replicate", "Partial", "_Partial", "_StridedShard")
)
_OBJECTS = (
    ("torch.distributed.device_mesh", "DeviceMesh"),
    ("torch.distributed._tensor.device_mesh", "DeviceMesh"),
    ("torch.distributed._mesh_layout", "_MeshLayout"),
    ("torch.distributed._mesh_layout", "_FlatLayout"),
)
_SPECS = tuple(
    f"torch.distributed.{module}"
    for module in ("tensor._dtensor_spec", "_tensor._dtensor_spec", "_tensor.placement_types")
)

_DISTRIBUTED: Table = {
    **{(*name, "newobj", 0): Decoder(described, _parts) for name in (*_PLACEMENTS, *_OBJECTS)},
    **{(module, "DTensorSpec", "newobj", 0): Decoder(described, _parts) for module in _SPECS},
    **{(module, "TensorMeta", "newobj", 3): Decoder(_tuple, _parts) for module in _SPECS},
    **{(module, "ShardOrderEntry", "newobj", 2): Decoder(_tuple, _parts) for module in _SPECS},
}


_new = tuple.__new__
_ORDERED = ("collections", "OrderedDict")
# the classes of quantized tensors that torch saves by their fields
WRAPPED = (*GROUPED, *CLASSES)
SUBCLASSES = (("torch", "Tensor"), ("torch._tensor", "Tensor"), ("torch.nn.parameter", "Buffer"))


def tensor(call: Call, _: Any, decoding: Decoding) -> TensorRecord:
    """`_rebuild_tensor(storage, offset, size, stride)`; v2 adds `requires_grad, hooks[, metadata]`,
    v3 the dtype before metadata.
    """
    arguments = call.arguments
    if call.state is not ABSENT or call.items or call.pairs:
        raise ForeignError("a tensor that was changed after it was rebuilt")
    storage = decoding.storage(arguments[0])
    requires_grad, rest = False, arguments[6:]
    if len(arguments) > 4:
        requires_grad = arguments[4]
        if type(requires_grad) is not bool:
            raise ContradictionError(f"requires_grad is {kind_of(requires_grad)}")
        hooks = arguments[5]
        # one name is one object, so the name is looked at once
        if (
            type(hooks) is not Call
            or hooks.function is not decoding.hooks
            or hooks.arguments
            or not plain(hooks)
        ):
            _no_hooks(hooks)
            decoding.hooks = hooks.function if type(hooks) is Call else decoding.hooks
    if call.function.name == "_rebuild_tensor_v3":
        dtype, rest = dtype_of(rest[0]), rest[1:]
    elif storage.dtype is None:
        raise ContradictionError(f"a tensor without a dtype on the untyped storage {storage.key}")
    else:
        dtype = storage.dtype
    shape, strides = arguments[2], arguments[3]
    if type(shape) is not tuple:
        shape = integers(shape)
    if type(strides) is not tuple:
        strides = integers(strides)
    geometry = decoding.geometry(shape, strides)
    decoding.check_view(storage, dtype, arguments[1], geometry)
    if dtype[0] == "q":
        raise ForeignError("a quantized dtype on a tensor that is not quantized")
    conjugate, negative = _lazy_bits(rest[0]) if rest else (False, False)
    # all fields at once: the named tuple's own function takes three times as long
    return _new(
        TensorRecord,
        (
            dtype,
            storage,
            arguments[1],
            shape,
            strides,
            requires_grad,
            call,
            False,
            conjugate,
            negative,
            None,
            None,
        ),
    )


def _no_hooks(node: Any) -> None:
    if node is None or (
        type(node) is Call
        and is_global(node.function, _ORDERED)
        and not node.arguments
        and plain(node)
    ):
        return
    if type(node) is Dict and not node.pairs:
        return
    raise ForeignError("backward hooks, which are code")


def _lazy_bits(node: Any) -> tuple[bool, bool]:
    """(conj, neg) of the metadata that torch saves beside a tensor."""
    if node is None:
        return False, False
    if type(node) is not Dict:
        raise ContradictionError(f"a tensor's metadata is {kind_of(node)}")
    bits = {"conj": False, "neg": False}
    for key, value in node.pairs:
        if type(key) is not str or key not in bits or type(value) is not bool:
            raise ForeignError("metadata of a tensor other than conj and neg")
        bits[key] = value
    return bits["conj"], bits["neg"]


def parameter(call: Call, parts: list[Any], _: Decoding) -> TensorRecord | LocalShard:
    """`_rebuild_parameter(data, requires_grad, hooks)`, and `_with_state` with attributes last."""
    data, requires_grad = parts[0], call.arguments[1]
    if type(requires_grad) is not bool:
        raise ContradictionError(f"requires_grad is {kind_of(requires_grad)}")
    _no_hooks(call.arguments[2])
    if not plain(call):
        raise ForeignError("a parameter that was changed after it was rebuilt")
    state = _state(parts[1]) if len(parts) > 1 else None
    if isinstance(data, LocalShard) and state is None:
        return replace(data, parameter=True, requires_grad=requires_grad, node=call)
    if not isinstance(data, TensorRecord) or data.parameter:
        raise _not_dense(data)
    if state is not None and data.state is not None:
        raise ForeignError("a parameter whose data has attributes of its own")
    return data._replace(
        parameter=True,
        requires_grad=requires_grad,
        node=call,
        state=data.state if state is None else state,
    )


def _state(state: Any) -> Any:
    """Attributes worth keeping: a dict with entries, or `(None, {...})` of objects with slots."""
    if (
        type(state) is ListNode
        and state.kind == "tuple"
        and len(state.items) == 2
        and state.items[0] is None
    ):
        state = state.items[1]
    if state is None or (type(state) is DictNode and not state.pairs):
        return None
    if (
        type(state) is not DictNode
        or state.kind != "dict"
        or any(type(key) is not str for key, _ in state.pairs)
    ):
        raise ForeignError("attributes that are not a dict of names")
    return state


def _not_dense(data: Any) -> Exception:
    if isinstance(data, Opaque):
        return NestedError(data)
    return ContradictionError("a parameter or subclass is made of something that is not a tensor")


def _from_type_parts(call: Call) -> list[Any]:
    function, _, arguments, state = call.arguments
    if type(function) is not Global or type(arguments) is not tuple or is_global(function, WRAPPER):
        return [None, state]
    return [Call("reduce", function, arguments), state]


def from_type(
    call: Call, parts: list[Any], decoding: Decoding
) -> TensorRecord | LocalShard | Composite:
    """`_rebuild_from_type_v2(function, type, arguments, state)`: a tensor with attributes, an
    nn.Buffer, a DTensor, or a quantized tensor that is an object."""
    function, cls, _, _ = call.arguments
    if type(function) is not Global or not plain(call):
        raise ContradictionError("a tensor that is rebuilt by something other than a function")
    if is_global(function, WRAPPER) and is_global(cls, *DTENSOR):
        return shard(call, parts[1], decoding)
    if is_global(function, WRAPPER) and is_global(cls, *WRAPPED):
        return (grouped if is_global(cls, *GROUPED) else wrapped)(call, parts[1], decoding)
    if not is_global(cls, *SUBCLASSES):
        raise ForeignError(f"a tensor subclass, {kind_of(cls)}")
    data = parts[0]
    if not isinstance(data, TensorRecord) or data.state is not None:
        raise _not_dense(data)
    state = _state(parts[1])
    buffer = cls.name == "Buffer" or (type(state) is DictNode and state.get("_is_buffer") is True)
    return data._replace(node=call, subclass="Buffer" if buffer else None, state=state)


def _size(call: Call, _: Any, __: Decoding) -> ListNode:
    if not plain(call):
        raise ForeignError("a torch.Size that was changed")
    return ListNode("Size", integers(call.arguments[0]), call)


_DEVICE = re.compile("[a-z][a-z0-9_]{0,30}(:[0-9]{1,9})?", re.ASCII)


def _device(call: Call, _: Any, __: Decoding) -> Constant:
    kind, *number = call.arguments
    if (
        type(kind) is not str
        or _DEVICE.fullmatch(kind) is None
        or any(type(n) is not int for n in number)
        or not plain(call)
    ):
        raise ContradictionError("a torch.device of something other than a name and a number")
    return Constant("device", ":".join([kind, *map(str, number)]), call)


def _layout(call: Call, _: Any, __: Decoding) -> Constant:
    text = call.arguments[0]
    if type(text) is not str or not plain(call):
        raise ContradictionError("a torch.layout that is not a name")
    return Constant("layout", text.removeprefix("torch."), call)


def _utils(name: str, *arities: int) -> list[tuple[str, str, str, int]]:
    return [("torch._utils", name, "reduce", n) for n in arities]


DECODERS: Table = {
    **_DISTRIBUTED,
    **dict.fromkeys(_utils("_rebuild_tensor", 4), Decoder(tensor)),
    **dict.fromkeys(_utils("_rebuild_tensor_v2", 6, 7), Decoder(tensor)),
    **dict.fromkeys(_utils("_rebuild_tensor_v3", 7, 8), Decoder(tensor)),
    **dict.fromkeys(
        _utils("_rebuild_parameter", 3), Decoder(parameter, lambda call: [call.arguments[0]])
    ),
    **dict.fromkeys(
        _utils("_rebuild_parameter_with_state", 4),
        Decoder(parameter, lambda call: [call.arguments[0], call.arguments[3]]),
    ),
    ("torch._tensor", "_rebuild_from_type_v2", "reduce", 4): Decoder(from_type, _from_type_parts),
    ("torch", "Size", "reduce", 1): Decoder(_size),
    ("torch", "device", "reduce", 1): Decoder(_device),
    ("torch", "device", "reduce", 2): Decoder(_device),
    ("torch.serialization", "_get_layout", "reduce", 1): Decoder(_layout),
}

# What `staging.torchstream` writes for objects that cannot be found by name.
UNNAMED = ("migrate.staging.torchstream", "Unnamed")
# What is known and refused: the names that people meet, in words that they know.
REFUSED: dict[tuple[str, str], str] = {
    ("torch._utils", "_rebuild_sparse_tensor"): "a sparse tensor; save its indices() and values()",
    ("torch._utils", "_rebuild_sparse_csr_tensor"): "a sparse tensor; save its indices and values",
    (
        "torch._utils",
        "_rebuild_qtensor",
    ): "a quantized tensor; save int_repr(), scales and zero points",
    ("torch._utils", "_rebuild_nested_tensor"): "a nested tensor; save values() and offsets()",
    (
        "torch._utils",
        "_rebuild_meta_tensor_no_storage",
    ): "a tensor on the meta device, which has no data",
    ("torch._utils", "_rebuild_wrapper_subclass"): "a tensor subclass made of other tensors",
    (
        "torch._utils",
        "_rebuild_device_tensor_from_numpy",
    ): "a tensor of a device that torch saves by way of numpy",
    (
        "torch._utils",
        "_rebuild_device_tensor_from_cpu_tensor",
    ): "a tensor of a device that torch saves by way of the CPU",
    ("torch._tensor", "_rebuild_from_type"): "a tensor subclass as torch before 1.9 saved it",
    ("torch._C", "Generator"): "a torch.Generator; save its get_state()",
    ("torch.storage", "_load_from_bytes"): "a torch.save stream inside a string of bytes",
    UNNAMED: "a function, process group or other object that no file holds",
}

QSCHEMES = (
    "per_tensor_affine",
    "per_channel_affine",
    "per_tensor_symmetric",
    "per_channel_symmetric",
    "per_channel_affine_float_qparams",
)
CONSTANTS: dict[tuple[str, str], tuple[str, str]] = {
    **{("torch", name): ("dtype", name) for name in ITEMSIZE},
    **{("torch", name): ("qscheme", name) for name in QSCHEMES},
}


def shown(name: Global) -> str:
    """A name as messages give it. That of a stand-in of ours says nothing to its reader."""
    return "an object without a name" if (name.module, name.name) == UNNAMED else str(name)
