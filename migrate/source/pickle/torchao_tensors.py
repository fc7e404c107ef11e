"""Quantized tensors of torchao, read from the fields that torch saves of a wrapper subclass.

Each class says what its components are; the list is that of torchao 0.18, whose classes
`torch.save` writes by these names. All that says how activations are quantized is kept as it was
and not looked into. Classes that are not here are refused by name, as any subclass is: packed
layouts for one kernel (tinygemm, Marlin) mean nothing without it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

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
from .encodings import Encoding
from .keys import kind_of
from .nodes import ABSENT, Call, Dict
from .tree import Composite, Constant, Described, DictNode, ListNode, Opaque, TensorRecord

_AO = "torchao.quantization"
_MX = "torchao.prototype.mx_formats"


class _Class(NamedTuple):
    """What a class is made of: the components of each role that it must have and may have; `number`
    is what they hold, else their dtype.
    """

    format: str
    needed: dict[str, str]
    optional: dict[str, str]
    number: str | None = None


_POINTS = {"qdata": "data", "scale": "scale", "zero_point": "zero_point"}
_ACTIVATIONS = {
    "act_quant_scale": "act_scale",
    "act_quant_zero_point": "act_zero_point",
    "act_pre_scale": "act_pre_scale",
}
CLASSES: dict[tuple[str, str], _Class] = {
    (_AO, "Float8Tensor"): _Class("ao-fp8", {"qdata": "data", "scale": "scale"}, {}),
    (_AO, "Int8Tensor"): _Class("ao-int8", {"qdata": "data", "scale": "scale"},
    {"zero_point": "zero_point", **_ACTIVATIONS}),
    (_AO, "Int4Tensor"): _Class("ao-int4", _POINTS, {"act_pre_scale": "act_pre_scale"}, "int4"),
    (_AO, "IntxUnpackedToInt8Tensor"): _Class("ao-intx", _POINTS, {}),
    (f"{_MX}.mx_tensor", "MXTensor"): _Class("ao-mx", {"qdata": "data", "scale": "scale"}, {}),
    (f"{_MX}.nvfp4_tensor", "NVFP4Tensor"): _Class(
        "ao-nvfp4", {"qdata": "data", "scale": "scale"},
        {"per_tensor_scale": "tensor_scale", "act_per_tensor_scale": "act_tensor_scale"},
        "float4_e2m1fn",
    ),
}  # fmt: skip
_MOST_FIELDS, _MOST_ITEMS = 64, 64
_SCALARS = frozenset({type(None), bool, int, float, str})


def wrapped(call: Call, state: Any, _: Decoding) -> Composite:
    """The object of `_rebuild_from_type_v2(_rebuild_wrapper_subclass, class, arguments, state)`."""
    name = call.arguments[1]
    cls = CLASSES[name.module, name.name]
    arguments = call.arguments[2]
    if type(arguments) is not tuple or len(arguments) != 8 or type(arguments[7]) is not bool:
        raise ForeignError(f"{kind_of(name)} with other arguments")
    dtype, shape = dtype_of(arguments[1]), integers(arguments[2])
    if (
        type(state) is not DictNode
        or state.kind != "dict"
        or type(call.arguments[3]) is not Dict
        or len(state.pairs) > _MOST_FIELDS
    ):
        raise ForeignError(f"{kind_of(name)} without fields, or with more than any has")
    held: list[tuple[str, TensorRecord]] = []
    fields: dict[str, Any] = {}
    roles: dict[str, str] = {}
    known = {**cls.needed, **cls.optional}
    for key, value in state.pairs:
        if type(value) is Opaque:
            raise NestedError(value)
        if type(key) is not str:
            raise ForeignError(f"{kind_of(name)} with a field that has no name")
        if type(value) is TensorRecord:
            if key not in known:
                raise ForeignError(f"{kind_of(name)} with a tensor that is not known")
            held.append((key, value))
            roles[known[key]] = key
        elif not _flat(value):
            raise ForeignError(f"{kind_of(name)} with a field that is not known")
        else:
            fields[key] = value
    missing = [key for key in cls.needed if key not in roles.values()]
    if missing:
        raise ContradictionError(f"{kind_of(name)} without {missing[0]}")
    raw = {key: node for key, node in call.arguments[3].pairs if type(key) is str}
    number = _number(cls, fields, dict(held)["qdata"])
    encoding = Encoding(
        cls.format,
        str(name),
        shape,
        dtype,
        roles,
        number,
        block=_block(fields),
        options=_options(fields),
    )
    return Composite(encoding, tuple(held), tuple(raw[key] for key, _ in held), arguments[7], call)


def _number(cls: _Class, fields: dict[str, Any], data: TensorRecord) -> str:
    for key in ("elem_dtype", "target_dtype"):
        said = fields.get(key)
        if type(said) is Constant and said.kind == "dtype":
            return said.text.removesuffix("_x2")
    return cls.number or data.dtype


def _block(fields: dict[str, Any]) -> tuple[int, int] | None:
    said = fields.get("block_size")
    if type(said) is int:
        return (1, said)
    items = said.items if type(said) is ListNode else ()
    return (items[0], items[1]) if len(items) == 2 and all(type(n) is int for n in items) else None


def _options(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value
        for key, value in fields.items()
        if type(value) in _SCALARS and key not in ("block_size", "_is_param")
    }


def _flat(value: Any) -> bool:
    """Whether a field is a scalar, a list of numbers, a dtype, or one of the settings below."""
    kind = type(value)
    if kind is ListNode:
        return len(value.items) <= _MOST_ITEMS and all(
            type(item) in _SCALARS for item in value.items
        )
    return kind in _SCALARS or kind is Constant or kind is Described


def setting(call: Call, parts: list[Any], _: Decoding) -> Described:
    """A setting by its arguments and fields: scalars, dtypes and other settings."""
    *items, fields = parts
    if (
        call.items
        or call.pairs
        or not (fields is None or (type(fields) is DictNode and fields.kind == "dict"))
    ):
        raise ForeignError(f"{kind_of(call)} with more than fields")
    for value in (*items, *(value for _, value in (fields.pairs if fields is not None else ()))):
        if type(value) is Opaque:
            raise NestedError(value)
        if not _flat(value):
            raise ForeignError(f"{kind_of(call)} with more than settings")
    return Described(str(call.function), tuple(items), fields, call)


def member(call: Call, parts: list[Any], _: Decoding) -> Described:
    """A member of an enum, by its value."""
    if not plain(call) or type(parts[0]) not in (int, str):
        raise ContradictionError(f"{kind_of(call)} without a value")
    return Described(str(call.function), (parts[0],), None, call)


_SETTINGS = (
    (f"{_AO}.quantize_.workflows.float8.float8_tensor", "QuantizeTensorToFloat8Kwargs", 0),
    (f"{_AO}.quantize_.workflows.int8.int8_tensor", "QuantizeTensorToInt8Kwargs", 0),
    ("torchao.float8.inference", "Float8MMConfig", 3),
    (f"{_MX}.mx_tensor", "QuantizeTensorToMXKwargs", 0),
    (f"{_MX}.nvfp4_tensor", "QuantizeTensorToNVFP4Kwargs", 0),
    *((f"{_AO}.granularity", name, 0) for name in ("PerRow", "PerTensor", "PerAxis", "PerGroup",
    "PerBlock", "PerToken")),
)  # fmt: skip
_ENUMS = (
    (f"{_AO}.quantize_.common.kernel_preference", "KernelPreference"),
    (f"{_AO}.quant_primitives", "MappingType"),
    (f"{_AO}.quant_primitives", "ZeroPointDomain"), (f"{_MX}.config", "ScaleCalculationMode"),
)  # fmt: skip
_SETTING = Decoder(
    setting, lambda call: [*call.arguments, None if call.state is ABSENT else call.state]
)
DECODERS: Table = {
    **{(module, name, "newobj", count): _SETTING for module, name, count in _SETTINGS},
    **{(*name, "reduce", 1): Decoder(member, lambda call: list(call.arguments)) for name in _ENUMS},
}
