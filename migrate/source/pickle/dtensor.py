"""DTensors: what one rank held of a distributed tensor, described well enough to say so and to know
when it is all of it.

The mesh and the placements are read from fields alone. Releases of torch differ in the fields of a
mesh, so its shape may stay unknown; the global shape and the placements are in all of them.
"""

from __future__ import annotations

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
    plain,
)
from .keys import kind_of
from .nodes import ABSENT, Call
from .tree import Described, DictNode, ListNode, LocalShard, Opaque, TensorRecord

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
    # how torch marks a parameter that is no torch.nn.Parameter
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
    """The shape of a DeviceMesh: of its `mesh` tensor in older releases, of its layout's axes in
    newer ones; else None.
    """
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


def described(call: Call, parts: list[Any], _: Decoding) -> Described:
    """An object by its arguments and its dict of fields."""
    *items, fields = parts
    if (
        call.items
        or call.pairs
        or not (fields is None or (type(fields) is DictNode and fields.kind == "dict"))
    ):
        raise ForeignError(f"{kind_of(call)} with more than fields")
    return Described(str(call.function), tuple(items), fields, call)


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

DECODERS: Table = {
    **{(*name, "newobj", 0): Decoder(described, _parts) for name in (*_PLACEMENTS, *_OBJECTS)},
    **{(module, "DTensorSpec", "newobj", 0): Decoder(described, _parts) for module in _SPECS},
    **{(module, "TensorMeta", "newobj", 3): Decoder(_tuple, _parts) for module in _SPECS},
    **{(module, "ShardOrderEntry", "newobj", 2): Decoder(_tuple, _parts) for module in _SPECS},
}
