"""GroupedTensor of Transformer Engine: the weights of a grouped linear layer in one object,
quantized or not.

It is made of flat runs of bytes. Where all members have one shape, a component is seen as a stack
of its members' components and is called as in a member: splitting the stack gives the members'
bytes, which is what a rule needs to go from one layout to the other. Unquantized, it is seen as the
dense tensor that it is, under its own key.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

from .decoding import ContradictionError, Decoding, ForeignError, NestedError, dtype_of, integers
from .nodes import ABSENT, Call, Dict, Global
from .quantized_tensors import (
    ARGUMENTS,
    ENUMS,
    FORMATS,
    FUNCTIONS,
    MODULES,
    QUANTIZERS,
    check,
    encoding_of,
    integer,
    riders_of,
)
from .tree import MEMBERS, NEW, Composite, DictNode, Encoding, ListNode, Opaque, TensorRecord

GROUPED = (
    ("transformer_engine.pytorch.tensor.grouped_tensor", "GroupedTensor"),
    ("transformer_engine.pytorch.tensor.storage.grouped_tensor_storage", "GroupedTensor"),
)
# in the order of the members' components
_RUNS = (
    "rowwise_data",
    "scale_inv",
    "columnwise_data",
    "columnwise_scale_inv",
    "amax",
    "columnwise_amax",
    "scale",
    "first_dims",
    "last_dims",
    "tensor_offsets",
)
_TABLES = (
    "tensor_shapes",
    "offsets",
    "scale_inv_offsets",
    "columnwise_scale_inv_offsets",
    "logical_shape",
)
_SCALARS = (
    "num_tensors",
    "_with_gemm_swizzled_scales",
    "_row_scaled_nvfp4",
    "_nvfp4_use_4over6",
    "_nvfp4_e4m3_max",
    "_is_param",
)
_OTHERS = ("quantizer", "fake_dtype", MEMBERS)
_IN_MEMBER = {
    "rowwise_data": "_rowwise_data",
    "scale_inv": "_rowwise_scale_inv",
    "columnwise_data": "_columnwise_data",
    "columnwise_scale_inv": "_columnwise_scale_inv",
    "amax": "_amax_rowwise",
    "columnwise_amax": "_amax_columnwise",
}
_IN_FLOAT8 = {"rowwise_data": "_data", "columnwise_data": "_transpose", "scale_inv": "_scale_inv"}
# of each class, the run of a group that holds an attribute of its members
RUN_OF = {
    cls: {
        attribute: run
        for run, attribute in (_IN_FLOAT8 if cls == "Float8Tensor" else _IN_MEMBER).items()
    }
    for cls in dict.fromkeys(QUANTIZERS.values())
}
_MOST = 100_000


def grouped(call: Call, state: Any, decoding: Decoding) -> Composite:
    """`_rebuild_from_type_v2(_rebuild_wrapper_subclass, GroupedTensor, arguments, state)`."""
    arguments = call.arguments[2]
    if type(arguments) is not tuple or len(arguments) != 8 or type(arguments[7]) is not bool:
        raise ForeignError("a grouped tensor with other arguments")
    dtype, wrapped = dtype_of(arguments[1]), integers(arguments[2])
    fields = _fields(state)
    raw = {key: node for key, node in _state_node(call).pairs if type(key) is str}
    count = fields.get("num_tensors")
    if type(count) is not int or not 0 < count <= _MOST:
        raise ContradictionError("a grouped tensor of no number of tensors")
    decoding.spend(
        sum(
            len(fields[name].items)
            for name in ("tensor_shapes", MEMBERS)
            if type(fields.get(name)) is ListNode
        )
    )
    runs = {name: fields[name] for name in _RUNS if type(fields.get(name)) is TensorRecord}
    _check_members(fields.get(MEMBERS), runs)
    riders = riders_of(fields.get("quantizer"))
    member = _member_shape(fields, count)
    options = {
        name.lstrip("_"): fields[name] for name in _SCALARS[1:5] if fields.get(name) is not None
    }
    name = str(call.arguments[1])
    if member is None:
        held = list(runs.items())
        encoding = Encoding(
            "te-grouped",
            name,
            wrapped,
            dtype,
            {run: run for run in runs},
            members=count,
            options=options,
        )
    elif fields.get("quantizer") is None:
        if list(runs) != ["rowwise_data"] or runs["rowwise_data"].dtype != dtype:
            raise ContradictionError(
                f"a grouped tensor of {dtype} that is not made of one run of it"
            )
        held = [("", _stacked(runs["rowwise_data"], (count, *member)))]
        encoding = Encoding(
            "te-grouped",
            name,
            (count, *member),
            dtype,
            {"data": ""},
            members=count,
            options=options,
        )
    else:
        held, encoding = _quantized(fields, runs, name, (count, *member), dtype, options)
    if len({id(raw[run]) for run in runs}) < len(runs):
        raise ContradictionError("a grouped tensor with one tensor in two places")
    sources = [*(raw[run] for run in runs), *(node for _, _, node in riders)]
    components = (*held, *((f"_quantizer.{key}", record) for key, record, _ in riders))
    return Composite(encoding, components, tuple(sources), arguments[7], call, flat=True)


def _quantized(
    fields: dict[str, Any],
    runs: dict[str, TensorRecord],
    name: str,
    shape: tuple[int, ...],
    dtype: str,
    options: dict[str, Any],
) -> tuple[list[tuple[str, TensorRecord]], Encoding]:
    """The components as stacks of the members' components, and what they are."""
    quantizer = fields["quantizer"]
    cls = QUANTIZERS[quantizer.name.rpartition(".")[2]]
    called = _IN_FLOAT8 if cls == "Float8Tensor" else _IN_MEMBER
    foreign = [run for run in runs if run not in called]
    if foreign:
        raise ForeignError(f"a grouped tensor of {cls} that has {foreign[0]}")
    count, *member = shape
    two = quantizer.fields.get("block_scaling_dim") != 1
    held = []
    for run, record in runs.items():
        if prod(record.shape) % count:
            raise ContradictionError(
                f"a grouped tensor of {count} members whose {run} has {prod(record.shape)} elements"
            )
        held.append(
            (
                called[run],
                _stacked(
                    record,
                    (count, *_shape_of(cls, run, tuple(member), prod(record.shape) // count, two)),
                ),
            )
        )
    for _, record in held:
        if len(record.shape) < 2:
            raise ContradictionError("a grouped tensor with a component that has no rows")
    check(
        cls,
        tuple(member),
        {attribute: record._replace(shape=record.shape[1:]) for attribute, record in held},
    )
    code, _ = integer(quantizer.fields.get("dtype"), ENUMS)
    scalars = {
        key: value
        for key, value in quantizer.fields.pairs
        if type(value) in (bool, int, float, str)
    }
    if cls == "Float8BlockwiseQTensor":
        scalars["is_2D_scaled"] = quantizer.fields.get("block_scaling_dim") == 2
    # grouped tensors are younger than the new numbering
    made = encoding_of(
        cls, name, shape, dtype, tuple(a for a, _ in held), code, (NEW,), {**options, **scalars}
    )
    return held, Encoding(
        made.format, name, shape, dtype, made.roles, made.number, made.code, made.readings,
        made.block, count, made.options
    )  # fmt: skip


def in_members(
    cls: str, run: str, member: tuple[int, ...], numel: int, two: bool
) -> tuple[str, tuple[int, ...]] | None:
    """What a run of `numel` elements for each member is called in a member, and its shape there;
    None for runs that are not known.
    """
    called = (_IN_FLOAT8 if cls == "Float8Tensor" else _IN_MEMBER).get(run)
    try:
        return (called, _shape_of(cls, run, member, numel, two)) if called else None
    except ForeignError:
        return None


def _shape_of(cls: str, run: str, shape: tuple[int, ...], numel: int, two: bool) -> tuple[int, ...]:
    """The shape of a member's component of `numel` elements; `two`: of square blocks."""
    rows, last = prod(shape[:-1]), shape[-1]
    if run == "rowwise_data" or (run == "columnwise_data" and cls == "MXFP8Tensor"):
        return (*shape[:-1], last // 2) if cls == "NVFP4Tensor" else shape
    if run == "columnwise_data":
        turned = (last, *shape[:-1])
        return (*turned[:-1], turned[-1] // 2) if cls == "NVFP4Tensor" else turned
    per = {"MXFP8Tensor": 32, "NVFP4Tensor": 16}.get(cls)
    if "scale" in run and per is not None:
        across = run.startswith("columnwise")
        if cls == "MXFP8Tensor" and across:
            due = (_up(-(-rows // 32), 4), _up(last, 128))
        else:
            outer, inner = (last, rows) if across else (rows, last)
            due = (_up(outer, 128), _up(-(-inner // per), 4))
        if prod(due) == numel:
            return due
    if "scale" in run and cls == "Float8BlockwiseQTensor":
        outer, inner = (last, rows) if run.startswith("columnwise") else (rows, last)
        due = (
            (-(-outer // 128), _up(-(-inner // 128), 4))
            if two
            else (-(-inner // 128), _up(outer, 4))
        )
        if prod(due) == numel:
            return due
        raise ForeignError("a grouped tensor whose scales are laid out in another way")
    return (numel,)


def _up(number: int, step: int) -> int:
    return -(-number // step) * step


def _stacked(record: TensorRecord, shape: tuple[int, ...]) -> TensorRecord:
    """The same elements in this shape."""
    if prod(record.shape) != prod(shape):
        raise ContradictionError(
            f"a grouped tensor of shape {list(shape)} that has {prod(record.shape)} elements"
        )
    if not record.contiguous:
        raise ForeignError("a grouped tensor whose bytes do not lie in one run")
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return record._replace(shape=shape, strides=tuple(reversed(strides)))


def _fields(state: Any) -> dict[str, Any]:
    if type(state) is not DictNode or state.kind != "dict":
        raise ForeignError("a grouped tensor without fields")
    fields: dict[str, Any] = {}
    for key, value in state.pairs:
        if type(value) is Opaque:
            raise NestedError(value)
        known = type(key) is str and (
            key in _RUNS or key in _TABLES or key in _SCALARS or key in _OTHERS
        )
        fits = (
            type(value) is TensorRecord or value is None
            if key in _RUNS
            else type(value) is ListNode or value is None
            if key in _TABLES
            else type(value) in (bool, int, type(None))
            if key in _SCALARS
            else known
        )
        if not known or not fits:
            raise ForeignError("a grouped tensor with other fields than are known")
        fields[key] = value
    return fields


def _member_shape(fields: dict[str, Any], count: int) -> tuple[int, ...] | None:
    """The shape of every member; None where they differ, or differ for all that is known."""
    if fields.get("first_dims") is not None or fields.get("last_dims") is not None:
        return None
    shapes = fields.get("tensor_shapes")
    if type(shapes) is not ListNode or len(shapes.items) != count:
        return None
    found = set()
    for shape in shapes.items:
        if type(shape) is not ListNode or any(type(n) is not int or n < 0 for n in shape.items):
            raise ContradictionError("a grouped tensor with a member whose shape is none")
        found.add(shape.items)
    return found.pop() if len(found) == 1 else None


def _check_members(members: Any, runs: dict[str, TensorRecord]) -> None:
    """ForeignError if members are more than views of the runs, and could not be made again."""
    if members is None:
        return
    own = {record.storage for record in runs.values()}
    if type(members) is not ListNode:
        raise ForeignError("a grouped tensor whose members are not a list")
    for member in members.items:
        records = (
            [record for name, record in member.components if "." not in name]
            if type(member) is Composite
            else [member]
        )
        if any(type(record) is not TensorRecord or record.storage not in own for record in records):
            raise ForeignError("a grouped tensor whose members have bytes of their own")


def _state_node(call: Call) -> Dict:
    state = call.arguments[3]
    if type(state) is not Dict:
        raise ForeignError("a grouped tensor without fields")
    return state


_IN_ORDER = (
    "rowwise_data",
    "columnwise_data",
    "scale_inv",
    "columnwise_scale_inv",
    "amax",
    "columnwise_amax",
)
_CLASSES = {word: cls for cls, word in FORMATS.items()}


def group(member: Composite, count: int) -> Composite | None:
    """The GroupedTensor of so many tensors like this, its components in stacks, or None."""
    cls = _CLASSES.get(member.encoding.format)
    quantizer = None if cls is None or member.encoding.members else _quantizer(member, cls)
    # groups are younger than the new numbering, and the integer goes into them as it is
    if (
        cls is None
        or quantizer is None
        or _riders(member)
        or set(member.encoding.readings or ()) != {NEW}
    ):
        return None
    encoding = replace(
        member.encoding,
        name=".".join(GROUPED[0]),
        shape=(count, *member.encoding.shape),
        members=count,
        options={k: v for k, v in (member.encoding.options or {}).items() if k != "data_format"},
    )
    options = encoding.options or {}
    runs = RUN_OF[cls]
    slots = {
        runs[attribute]: Call("reduce", Global("", ""), ()) for attribute, _ in member.components
    }
    shape, rows = member.encoding.shape, prod(member.encoding.shape[:-1])
    numel = prod(shape)
    state: list[tuple[Any, Any]] = [
        ("num_tensors", count), ("quantizer", quantizer), ("tensor_shapes", [shape] * count),
        ("fake_dtype", Global("torch", encoding.dtype)),
    ]  # fmt: skip
    state += [(run, slots.get(run)) for run in _IN_ORDER]
    state += [(name, None) for name in ("scale", "first_dims", "last_dims", "tensor_offsets")]
    state.append(("offsets", [i * numel for i in range(count + 1)]))
    sizes = {runs[attribute]: prod(record.shape) for attribute, record in member.components}
    for run in ("scale_inv", "columnwise_scale_inv"):
        offsets = [i * sizes[run] for i in range(count + 1)] if run in sizes else None
        state.append((f"{run}_offsets", offsets))
    state += [
        ("logical_shape", (count * rows, shape[-1])), (MEMBERS, None),
        ("_with_gemm_swizzled_scales", options.get("with_gemm_swizzled_scales") or False),
        ("_row_scaled_nvfp4", options.get("row_scaled_nvfp4") or False),
        ("_nvfp4_use_4over6", options.get("nvfp4_use_4over6") or False),
        ("_nvfp4_e4m3_max", options.get("nvfp4_e4m3_max") or 448),
    ]  # fmt: skip
    wrapper = Global(*GROUPED[0])
    whole = (count, *shape)
    strides = tuple(prod(whole[at + 1 :]) for at in range(len(whole)))
    layout = Call("reduce", Global("torch.serialization", "_get_layout"), ("torch.strided",))
    device = Call("reduce", Global("torch", "device"), ("cpu",))
    arguments = (wrapper, Global("torch", encoding.dtype), whole, strides, 0, layout, device, False)
    function = Global("torch._utils", "_rebuild_wrapper_subclass")
    node = Call(
        "reduce",
        Global("torch._tensor", "_rebuild_from_type_v2"),
        (function, wrapper, arguments, Dict(state)),
    )
    components = tuple(
        (attribute, record._replace(shape=(count, *record.shape)))
        for attribute, record in member.components
    )
    return Composite(
        encoding,
        components,
        tuple(slots[runs[attribute]] for attribute, _ in components),
        False,
        node,
        flat=True,
    )


def member_of(grouped: Composite) -> Composite | None:
    """One tensor of a GroupedTensor, components without the first dimension, or None."""
    cls = _CLASSES.get(grouped.encoding.format)
    if cls is None or not grouped.encoding.members or _riders(grouped):
        return None
    state = grouped.node.arguments[3]
    quantizer = state.get("quantizer")
    if type(quantizer) is not Call or quantizer.state is ABSENT:
        return None
    options = grouped.encoding.options or {}
    shape = grouped.encoding.shape[1:]
    given: dict[str, Any] = {
        "code": quantizer.state.get("dtype"), "dtype": Global("torch", grouped.encoding.dtype),
        "quantizer": quantizer,
        "shape": Call("reduce", Global("torch", "Size"), (shape,)),
        "is_2D_scaled": options.get("is_2D_scaled"),
        "with_gemm_swizzled_scales": options.get("with_gemm_swizzled_scales", False),
        "row_scaled_nvfp4": options.get("row_scaled_nvfp4", False),
        "nvfp4_use_4over6": options.get("nvfp4_use_4over6", False),
        "nvfp4_e4m3_max": options.get("nvfp4_e4m3_max", 448),
    }  # fmt: skip
    slots = {attribute: Call("reduce", Global("", ""), ()) for attribute, _ in grouped.components}
    names, counts = ARGUMENTS[cls]
    count = counts[-1] if cls != "Float8Tensor" or "_transpose" in slots else 5
    arguments = tuple(slots.get(name, given.get(name)) for name in names[:count])
    module = MODULES[cls][0]
    encoding = replace(grouped.encoding, name=f"{module}.{cls}", shape=shape, members=0)
    components = tuple(
        (attribute, record._replace(shape=record.shape[1:]))
        for attribute, record in grouped.components
    )
    return Composite(
        encoding,
        components,
        tuple(slots.values()),
        False,
        Call("reduce", Global(module, FUNCTIONS[cls]), arguments),
    )


def alike(one: Composite, other: Composite) -> bool:
    """Whether two objects differ in nothing but the bytes of their components."""
    a, b = one.encoding, other.encoding
    same = (a.format, a.name, a.shape, a.dtype, a.code, a.members) == (
        b.format,
        b.name,
        b.shape,
        b.dtype,
        b.code,
        b.members,
    )
    return (
        same
        and a.options == b.options
        and [_form(x) for x in one.components] == [_form(x) for x in other.components]
    )


def _form(component: tuple[str, TensorRecord]) -> tuple[str, str, tuple[int, ...]]:
    attribute, record = component
    return attribute, record.dtype, record.shape


def _riders(value: Composite) -> bool:
    return any("." in attribute for attribute, _ in value.components)


def _quantizer(value: Composite, cls: str) -> Any:
    """The node of the quantizer that the object was rebuilt with; None without one."""
    names, arguments = ARGUMENTS[cls][0], value.node.arguments
    at = names.index("quantizer") if "quantizer" in names else len(arguments)
    found = arguments[at] if at < len(arguments) else None
    return found if type(found) is Call and found.function.name in QUANTIZERS else None
