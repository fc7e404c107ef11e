"""Trees of .pt files on their way out: which key each tensor has, which storage, which node.

Every tensor is written row-major in a storage of its own, and tensors that were one are one again. What shared a part of
its bytes with another one is written apart: that is the same to whoever reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..core.diagnostics import Report, printable
from ..core.spec import Spec
from ..source.outline import Part, leaves
from ..source.pickle.jsonform import Ref, to_json
from ..source.pickle.tree import ITEMSIZE, DictNode, ListNode, Storage, TensorRecord, to_nodes

PACKED = {"float4_e2m1fn": "float4_e2m1fn_x2"}
CARRIED = "/"
# of tensors that have no bytes yet
NOWHERE = Storage("", None, "cpu", 0, 1)
_SCALARS = frozenset({type(None), bool, int, float, str})


def carried_prefix(tensors: Mapping[str, Any]) -> str:
    """What keys of carried tensors begin with: slashes, as many as no tensor's key begins with."""
    prefix = CARRIED
    while any(key.startswith(prefix) for key in tensors):
        prefix += CARRIED
    return prefix


def items_of(part: Part) -> Iterator[tuple[str, Any]]:
    """(path, value) of what is no tensor, as JSON values, without the attributes of the dict that rules work on."""
    table = part.table
    if table is not None and table is part.root and all(type(value) is TensorRecord for _, value in table.pairs):
        return
    for leaf in leaves(part.root, table):
        value = leaf.value
        if type(value) is TensorRecord or ".state" in leaf.words or (value is table and leaf.words == (part.at or ())):
            continue
        kind = type(value)
        spelled = value if kind in _SCALARS else to_json(node_of(value))
        yield leaf.path or ".", spelled


def node_of(value: Any) -> Any:
    """The nodes of a value without tensors."""
    if type(value) in (DictNode, ListNode):
        return to_nodes(value, lambda record: None)
    return getattr(value, "node", value)


def torch_form(spec: Spec) -> tuple[str, tuple[int, ...]]:
    """dtype and shape as torch has them."""
    if spec.dtype in PACKED:
        return PACKED[spec.dtype], (*spec.shape[:-1], spec.shape[-1] // 2)
    return spec.dtype, spec.shape


def record(spec: Spec, like: TensorRecord | None = None) -> TensorRecord:
    """A tensor of an output as a leaf of its tree, with the flags of another one."""
    dtype, shape = torch_form(spec)
    made = TensorRecord(dtype, NOWHERE, 0, shape, (), False, None)
    if like is None:
        return made
    return made._replace(requires_grad=like.requires_grad, parameter=like.parameter, subclass=like.subclass, state=like.state)


def check_holds(specs: Mapping[str, Spec]) -> None:
    """M916 naming the tensors that torch has no dtype for."""
    report = Report()
    for key, spec in specs.items():
        if torch_form(spec)[0] not in ITEMSIZE:
            report.add("M916", f"torch cannot hold {printable(key)}: it has no {spec.dtype}", help="dequantize or cast it")
        elif spec.dtype in PACKED and (not spec.shape or spec.shape[-1] % 2):
            report.add("M916", f"torch cannot hold {printable(key)}: {spec} has no rows of whole pairs")
        if len(report.diagnostics) >= 20:
            break
    report.check()


def plain_part(specs: Mapping[str, Spec]) -> tuple[Part, dict[int, str]]:
    """A dict of tensors by these keys, and the keys by identity."""
    records = [(key, record(spec)) for key, spec in specs.items()]
    return Part(DictNode("dict", tuple(records), None), ()), {id(made): key for key, made in records}


def nodes(root: Any, tensor: Callable[[TensorRecord], Any]) -> Any:
    """The inert nodes that mean the tree; `tensor` makes those of a tensor but for its attributes, which go with it."""
    return to_nodes(root, tensor)


def state_node(like: TensorRecord) -> Any:
    """The attributes of a tensor as nodes, None without."""
    return None if like.state is None else to_nodes(like.state, lambda record: None)


def ref(like: TensorRecord, key: str, tied: str | None) -> Ref:
    """A tensor that lies elsewhere."""
    return Ref(key, like.requires_grad, like.parameter, like.subclass, state_node(like), tied)
