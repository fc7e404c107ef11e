"""A quantized tensor as the object that it would be in another size: of the same class, flags and
quantizer, the calls that rebuild it with the sizes that follow from its shape.

That is what joins shards to one tensor and cuts one into shards. What a call says of sizes is
little, and it is named here; everything else of it stays as it was read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

from .decoding import is_global
from .nodes import Call, Dict, Global
from .quantized_tensors import ARGUMENTS
from .te_grouped import GROUPED
from .tree import Composite, TensorRecord

Shape = tuple[int, ...]


def resized(value: Composite, shape: Shape, components: Mapping[str, Shape]) -> Composite:
    """The object as one of this `shape`, its components in these shapes and row-major. A component
    that is not named keeps its shape.
    """
    encoding = replace(value.encoding, shape=shape)
    if encoding.members:
        encoding = replace(encoding, members=shape[0])
    if encoding.block == value.encoding.shape:
        encoding = replace(encoding, block=(shape[0], shape[1]))
    parts = tuple(
        (name, _in_shape(record, components.get(name, record.shape)))
        for name, record in value.components
    )
    node = value.node
    if is_global(node.function, ("torch._tensor", "_rebuild_from_type_v2")):
        node = _of_wrapper(node, encoding.members, value.encoding.shape, shape, parts)
    else:
        names = ARGUMENTS[value.encoding.name.rpartition(".")[2]][0]
        if "shape" in names and names.index("shape") < len(node.arguments):
            at = names.index("shape")
            arguments = (*node.arguments[:at], _size(shape), *node.arguments[at + 1 :])
            node = Call(node.how, node.function, arguments)
    return replace(value, encoding=encoding, components=parts, node=node)


def _in_shape(record: TensorRecord, shape: Shape) -> TensorRecord:
    """The same kind of tensor in a shape of its own; where it lies is another matter."""
    return record._replace(shape=shape, strides=_strides(shape), offset=0)


def _size(shape: Shape) -> Call:
    return Call("reduce", Global("torch", "Size"), (shape,))


def _strides(shape: Shape) -> Shape:
    return tuple(prod(max(n, 1) for n in shape[at + 1 :]) for at in range(len(shape)))


def _of_wrapper(
    node: Call,
    members: int,
    was: Shape,
    shape: Shape,
    parts: tuple[tuple[str, TensorRecord], ...],
) -> Call:
    """The call that torch writes of a wrapper subclass."""
    function, cls, arguments, state = node.arguments
    arguments = (*arguments[:2], _size(shape), _strides(shape), *arguments[4:])
    said: dict[Any, Any] = {}
    if is_global(cls, *GROUPED):
        said = _of_group(state, members, shape, dict(parts))
    elif type(state.get("block_size")) in (list, tuple):
        # a block that was the whole tensor is so again; one that is as high as a shard by chance
        # has other blocks beside it
        block = state.get("block_size")
        if tuple(block) == was:
            said["block_size"] = type(block)(shape)
    pairs = [(key, said.get(key, part)) for key, part in state.pairs]
    return Call(node.how, node.function, (function, cls, arguments, Dict(pairs)))


def _of_group(
    state: Dict, members: int, shape: Shape, parts: Mapping[str, TensorRecord]
) -> dict[str, Any]:
    """What a GroupedTensor of so many members says of their sizes."""
    member, rows = shape[1:], prod(shape[:-1])
    each = prod(member)
    said: dict[str, Any] = {
        "num_tensors": members,
        "tensor_shapes": [member] * members,
        "offsets": [at * each for at in range(members + 1)],
        "logical_shape": (rows, shape[-1]),
    }
    for run, name in (("scale_inv", "_rowwise_scale_inv"), ("scale_inv", "_scale_inv"),
                      ("columnwise_scale_inv", "_columnwise_scale_inv")):  # fmt: skip
        if name in parts:
            step = prod(parts[name].shape) // members
            said[f"{run}_offsets"] = [at * step for at in range(members + 1)]
    return {key: value for key, value in said.items() if state.get(key) is not None}
