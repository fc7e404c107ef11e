"""Objects of Transformer Engine that no file held: the group of members that were separate, and the
members of a group.

Only the call around the components is made here, as TE 2.16 and later write it; the components
themselves are the same bytes in either layout. Where the call needs what the object did not hold,
such as the quantizer that older releases and Float8Tensor leave out, nothing is made.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

from .encodings import NEW
from .nodes import ABSENT, Call, Dict, Global
from .te_grouped import GROUPED, RUN_OF
from .te_tensors import ARGUMENTS, FORMATS, FUNCTIONS, MODULES, QUANTIZERS
from .tree import MEMBERS, Composite, TensorRecord

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
    """The GroupedTensor of so many tensors like this one, its components in stacks; None where it
    cannot be made.
    """
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
    """One of the tensors that a GroupedTensor holds, its components without the first dimension;
    None where it cannot be made.
    """
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
