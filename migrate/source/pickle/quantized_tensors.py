"""Quantized tensors that libraries pickle as objects: those of Transformer Engine from 1.2 on, read
from the calls that rebuild them, and those of torchao, read from the fields that torch saves of a
wrapper subclass.

The bytes stay as they are, padding of scales and all: a component is a plain tensor called by the
attribute that it is in the class. A release of Transformer Engine is known by the name that is
called and by the number of its arguments; what they are is the table `ARGUMENTS`. Of quantizers,
only scalars and tensors are read.

Each class of torchao says what its components are; the list is that of torchao 0.18, whose classes
`torch.save` writes by these names. All that says how activations are quantized is kept as it was
and not looked into. Classes that are not here are refused by name, as any subclass is: packed
layouts for one kernel (tinygemm, Marlin) mean nothing without it.
"""

from __future__ import annotations

from math import prod
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
from .nodes import ABSENT, JSON_SCALARS, METHOD, Call, Dict, kind_of
from .tree import (
    NEW,
    NUMBERINGS,
    OLD,
    Composite,
    Constant,
    Described,
    DictNode,
    Encoding,
    ListNode,
    Opaque,
    TensorRecord,
    readings,
)

_TE = "transformer_engine.pytorch"
# how many arguments there are -> what they are; a component by its attribute
_BOTH = ("_rowwise_data", "_rowwise_scale_inv", "_columnwise_data", "_columnwise_scale_inv")
_MXFP8 = (*_BOTH, "code", "dtype", "shape", "quantizer", "with_gemm_swizzled_scales")
_BLOCK = ("shape", *_BOTH, "code", "dtype", "quantizer", "is_2D_scaled", "data_format")
_FLOAT8 = ("_data", "code", "_scale_inv", "dtype", "shape", "_transpose")
_NVFP4 = (
    "shape",
    *_BOTH,
    "_amax_rowwise",
    "_amax_columnwise",
    "code",
    "dtype",
    "quantizer",
    "with_gemm_swizzled_scales",
    "row_scaled_nvfp4",
    "nvfp4_use_4over6",
    "nvfp4_e4m3_max",
)
ARGUMENTS: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {
    "Float8Tensor": (_FLOAT8, (4, 5, 6)),
    "MXFP8Tensor": (_MXFP8, (6, 7, 8, 9)),
    "Float8BlockwiseQTensor": (_BLOCK, (9, 10)),
    "NVFP4Tensor": (_NVFP4, (10, 11, 14)),
}
# in the order of the class's own `__tensor_flatten__`
COMPONENTS: dict[str, dict[str, str]] = {
    "Float8Tensor": {"_data": "data", "_transpose": "transpose", "_scale_inv": "scale"},
    "MXFP8Tensor": dict(zip(_BOTH, ("data", "scale", "columnwise_data", "columnwise_scale"),
    strict=True)),
    "Float8BlockwiseQTensor": dict(zip(_BOTH,
    ("data", "scale", "columnwise_data", "columnwise_scale"), strict=True)),
    "NVFP4Tensor": {
        **dict(zip(_BOTH, ("data", "scale", "columnwise_data", "columnwise_scale"), strict=True)),
        "_amax_rowwise": "amax", "_amax_columnwise": "columnwise_amax",
    },
}  # fmt: skip
FORMATS = {
    "Float8Tensor": "te-fp8",
    "MXFP8Tensor": "te-mxfp8",
    "Float8BlockwiseQTensor": "te-fp8-block",
    "NVFP4Tensor": "te-nvfp4",
}
QUANTIZERS = {
    "Float8Quantizer": "Float8Tensor",
    "Float8CurrentScalingQuantizer": "Float8Tensor",
    "MXFP8Quantizer": "MXFP8Tensor",
    "Float8BlockQuantizer": "Float8BlockwiseQTensor",
    "NVFP4Quantizer": "NVFP4Tensor",
}
_SCALES = {
    "MXFP8Tensor": "uint8",
    "NVFP4Tensor": "uint8",
    "Float8Tensor": "float32",
    "Float8BlockwiseQTensor": "float32",
}
MODULES = {
    "Float8Tensor": (f"{_TE}.tensor.float8_tensor", f"{_TE}.float8_tensor"),
    "MXFP8Tensor": (f"{_TE}.tensor.mxfp8_tensor",),
    "Float8BlockwiseQTensor": (f"{_TE}.tensor.float8_blockwise_tensor",),
    "NVFP4Tensor": (f"{_TE}.tensor.nvfp4_tensor",),
}
FUNCTIONS = {
    "Float8Tensor": "_make_float8_tensor_in_reduce_ex",
    "MXFP8Tensor": "_make_mxfp8_tensor_in_reduce_ex",
    "Float8BlockwiseQTensor": "_make_float8_blockwise_tensor_in_reduce_ex",
    "NVFP4Tensor": "_make_nvfp4_tensor_in_reduce_ex",
}
_OLDEST_ENUM = "transformer_engine_extensions"
_NEWEST_ENUM = f"{_TE}.constants"
ENUMS = ((_OLDEST_ENUM, "DType"), ("transformer_engine_torch", "DType"), (_NEWEST_ENUM, "DType"))
_FORMAT_ENUM = ("transformer_engine_torch", "Float8BlockScaleTensorFormat")
# its other member, 0, is what the kernels read
COMPACT = 1
# every object looks through them, and many may share one quantizer
MOST_FIELDS = 64


def tensor(call: Call, parts: list[Any], _: Decoding) -> Composite:
    """One quantized tensor; ForeignError for unknown forms, ContradictionError for wrong parts."""
    cls = _class_of(call)
    if not plain(call):
        raise ForeignError("a quantized tensor that was changed after it was rebuilt")
    for part in parts:
        if type(part) is Opaque:
            raise NestedError(part)
    given = dict(zip(ARGUMENTS[cls][0], parts, strict=False))
    held = [(name, given[name]) for name in COMPONENTS[cls] if given.get(name) is not None]
    if any(type(record) is not TensorRecord for _, record in held):
        raise ContradictionError(f"a {cls} whose components are not tensors")
    positions = {
        name: call.arguments[at] for at, name in enumerate(ARGUMENTS[cls][0][: len(parts)])
    }
    code, enum = integer(given["code"], ENUMS)
    shape = _shape(given, held)
    quantizer = given.get("quantizer")
    riders = riders_of(quantizer)
    components = [*held, *((f"_quantizer.{name}", record) for name, record, _ in riders)]
    sources = [*(positions[name] for name, _ in held), *(node for _, _, node in riders)]
    options = _options(given, quantizer)
    check(cls, shape, dict(held), compact=options.get("data_format") == COMPACT)
    numberings = (
        (NEW,)
        if call.function.name == FUNCTIONS[cls] or enum == _NEWEST_ENUM
        else _numberings(cls, len(parts), enum)
    )
    if len({id(source) for source in sources}) < len(sources):
        raise ContradictionError(f"a {cls} with one tensor in two places")
    name, held_names = f"{call.function.module}.{cls}", tuple(name for name, _ in held)
    encoding = encoding_of(
        cls, name, shape, _dtype(given["dtype"]), held_names, code, numberings, options
    )
    return Composite(encoding, tuple(components), tuple(sources), False, call)


def encoding_of(
    cls: str,
    name: str,
    shape: tuple[int, ...],
    dtype: str,
    held: tuple[str, ...],
    code: int,
    numberings: tuple[str, ...],
    options: dict[str, Any],
) -> Encoding:
    """The encoding of a class with these components; ContradictionError for an integer that no
    quantized tensor has.
    """
    found = readings(code, numberings)
    if not found:
        raise ContradictionError(
            f"a {cls} of the dtype {code}, which is none that its releases quantize to"
        )
    number = next(iter(found.values())) if len(found) == 1 else None
    if number is not None and (number == "float4_e2m1fn") != (cls == "NVFP4Tensor"):
        raise ContradictionError(f"a {cls} of {number}")
    roles = {role: attribute for attribute, role in COMPONENTS[cls].items() if attribute in held}
    block = {
        "MXFP8Tensor": (1, 32),
        "NVFP4Tensor": (16, 16) if options.get("with_2d_quantization") else (1, 16),
    }.get(cls)
    if cls == "Float8BlockwiseQTensor":
        block = (128, 128) if options.get("is_2D_scaled") else (1, 128)
    elif cls == "MXFP8Tensor" and options.get("with_2d_quantization"):
        block = (32, 32)
    return Encoding(
        FORMATS[cls], name, shape, dtype, roles, number, code, found, block, options=options
    )


def check(
    cls: str, shape: tuple[int, ...], held: dict[str, TensorRecord], *, compact: bool = False
) -> None:
    """ContradictionError unless components have their class's shapes and dtypes, or padding.
    `compact`: columnwise data lie as the others do.
    """
    data = "_data" if cls == "Float8Tensor" else "_rowwise_data"
    turned = "_transpose" if cls == "Float8Tensor" else "_columnwise_data"
    if data not in held and turned not in held:
        raise ContradictionError(f"a {cls} without data")
    last = shape[-1] if shape else 1
    transposed = (last, *shape[:-1])
    straight = cls == "MXFP8Tensor" or compact
    expected = {data: shape, turned: shape if straight else transposed}
    for name, record in held.items():
        if name in expected:
            due = expected[name]
            if cls == "NVFP4Tensor":
                due = (*due[:-1], due[-1] // 2) if due and due[-1] % 2 == 0 else due
            if record.dtype != "uint8" or record.shape != due:
                raise ContradictionError(
                    f"a {cls} of shape {list(shape)} whose {name} is {record.dtype} "
                    f"{list(record.shape)}"
                )
        elif "amax" in name:
            if record.dtype != "float32":
                raise ContradictionError(f"a {cls} whose {name} is {record.dtype}")
        elif (
            # a scale that was cast with all that is of the tensor's dtype
            record.dtype not in (_SCALES[cls], "bfloat16" if cls == "Float8Tensor" else "")
        ) or not _covers(cls, name, shape, record.shape):
            raise ContradictionError(
                f"a {cls} of shape {list(shape)} whose {name} is {record.dtype} "
                f"{list(record.shape)}"
            )
    if not {name for name in held if "scale" in name}:
        raise ContradictionError(f"a {cls} without scales")


def _covers(cls: str, name: str, shape: tuple[int, ...], scale: tuple[int, ...]) -> bool:
    """Whether scales of this shape cover the tensor; how they are padded depends on the release."""
    if cls == "Float8Tensor":
        return prod(scale) == 1
    if len(scale) != 2 or not shape:
        return False
    rows, columns = prod(shape[:-1]), shape[-1]
    if cls == "Float8BlockwiseQTensor":
        # 1D scales lie transposed in some releases; the fewest are of 128 x 128 blocks
        return prod(scale) >= -(-rows // 128) * -(-columns // 128)
    if name == "_rowwise_scale_inv":
        return scale[0] >= rows and scale[1] >= -(-columns // (32 if cls == "MXFP8Tensor" else 16))
    if cls == "MXFP8Tensor":
        return scale[0] >= -(-rows // 32) and scale[1] >= columns
    return scale[0] >= columns and scale[1] >= -(-rows // 16)


def integer(value: Any, enums: tuple[tuple[str, str], ...]) -> tuple[int, str]:
    """The integer of an enum's member, and the module of the enum."""
    if type(value) is Opaque:
        raise NestedError(value)
    if type(value) is Described and len(value.items) == 1 and type(value.items[0]) is int:
        module, _, name = value.name.rpartition(".")
        if (module, name) in enums:
            return value.items[0], module
    raise ContradictionError("a quantized tensor without the integer of its dtype")


def riders_of(quantizer: Any) -> list[tuple[str, TensorRecord, Any]]:
    """The tensors among a quantizer's fields: name, record, and the node that it was read from."""
    if quantizer is None:
        return []
    if (
        type(quantizer) is not Described
        or quantizer.name.rpartition(".")[2] not in QUANTIZERS
        or type(quantizer.fields) is not DictNode
    ):
        raise ForeignError("a quantizer that is not known")
    nodes = {key: node for key, node in quantizer.node.state.pairs if type(key) is str}
    found = []
    for key, value in quantizer.fields.pairs:
        if type(value) is TensorRecord:
            found.append((key, value, nodes[key]))
    return found


def _class_of(call: Call) -> str:
    name = call.function.name
    return (
        name.partition(".")[0]
        if "." in name
        else next(cls for cls, function in FUNCTIONS.items() if function == name)
    )


def _numberings(cls: str, count: int, enum: str) -> tuple[str, ...]:
    """Which numberings the releases had that made this call."""
    if (
        enum == _OLDEST_ENUM
        or (cls == "Float8Tensor" and count == 4)
        or (cls == "MXFP8Tensor" and count == 6)
    ):
        return (OLD,)
    if (
        cls == "NVFP4Tensor"
        or (cls == "MXFP8Tensor" and count > 7)
        or (cls == "Float8BlockwiseQTensor" and count > 9)
    ):
        return (NEW,)
    return tuple(NUMBERINGS)


def _shape(given: dict[str, Any], held: list[tuple[str, TensorRecord]]) -> tuple[int, ...]:
    shape = given.get("shape")
    if shape is None:
        # the first releases did not say it
        for name, record in held:
            if name in ("_data", "_rowwise_data"):
                return record.shape
        raise ContradictionError("a quantized tensor without a shape")
    if (
        type(shape) is not ListNode
        or shape.kind not in ("Size", "tuple", "list")
        or any(type(n) is not int or n < 0 for n in shape.items)
    ):
        raise ContradictionError("a quantized tensor whose shape is none")
    return shape.items


def _dtype(value: Any) -> str:
    if type(value) is not Constant or value.kind != "dtype":
        raise ContradictionError("a quantized tensor that stands for no dtype")
    return value.text


def _options(given: dict[str, Any], quantizer: Any) -> dict[str, Any]:
    """The scalars beside the components: of the object, then others of its quantizer."""
    out: dict[str, Any] = {}
    for name, value in given.items():
        if name in ("code", "dtype", "shape", "quantizer") or type(value) is TensorRecord:
            continue
        if name == "data_format" and value is not None:
            value = integer(value, (_FORMAT_ENUM,))[0]
        if type(value) not in JSON_SCALARS:
            raise ContradictionError(f"a quantized tensor whose {name} is not a scalar")
        if not name.startswith("_"):
            out[name] = value
    if quantizer is not None:
        for key, value in quantizer.fields.pairs:
            if type(value) in JSON_SCALARS and value is not None:
                out.setdefault(key, value)
    return out


def enum(call: Call, _: Any, __: Decoding) -> Described:
    """A member of an enum by its integer: the argument, or the state that the bindings of C++ enums
    were pickled with.
    """
    value = call.arguments[0] if call.arguments else call.state
    if (
        type(value) is not int
        or call.items
        or call.pairs
        or (call.arguments and call.state is not ABSENT)
    ):
        raise ContradictionError(f"{kind_of(call)} without an integer")
    return Described(str(call.function), (value,), None, call)


def quantizer(call: Call, parts: list[Any], _: Decoding) -> Described:
    """A quantizer by its fields, each a scalar, a dtype or a tensor."""
    fields = parts[0]
    if (
        call.items
        or call.pairs
        or type(fields) is not DictNode
        or fields.kind != "dict"
        or len(fields.pairs) > MOST_FIELDS
    ):
        raise ForeignError("a quantizer without fields, or with more than any has")
    for key, value in fields.pairs:
        if type(value) is Opaque:
            raise NestedError(value)
        if type(key) is not str or not (
            type(value) in JSON_SCALARS or type(value) in (TensorRecord, Described, Constant)
        ):
            raise ForeignError("a quantizer that holds more than scalars and tensors")
        if type(value) is Described and (len(value.items) != 1 or value.fields is not None):
            raise ForeignError("a quantizer that holds another object")
    return Described(str(call.function), (), fields, call)


_TENSOR = Decoder(tensor, lambda call: list(call.arguments))
_QUANTIZER = Decoder(quantizer, lambda call: [None if call.state is ABSENT else call.state])
_ENUM = Decoder(enum)
_OF_TE: Table = {
    **{
        (module, name, "reduce", count): _TENSOR
        for cls, (_, counts) in ARGUMENTS.items()
        for module in MODULES[cls]
        for name in (FUNCTIONS[cls], f"{cls}.{METHOD}")
        for count in counts
    },
    **{
        (module, name, "newobj", 0): _QUANTIZER
        for name, cls in QUANTIZERS.items()
        for module in MODULES[cls]
    },
    **{(*name, "reduce", 1): _ENUM for name in (*ENUMS, _FORMAT_ENUM)},
    **{(*name, "newobj", 0): _ENUM for name in (*ENUMS, _FORMAT_ENUM)},
}
# classes that stand as an argument of `getattr`
NAMES = tuple((module, cls) for cls, modules in MODULES.items() for module in modules)


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
        options=_activations(fields),
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


def _activations(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value
        for key, value in fields.items()
        if type(value) in JSON_SCALARS and key not in ("block_size", "_is_param")
    }


def _flat(value: Any) -> bool:
    """Whether a field is a scalar, a list of numbers, a dtype, or one of the settings below."""
    kind = type(value)
    if kind is ListNode:
        return len(value.items) <= _MOST_ITEMS and all(
            type(item) in JSON_SCALARS for item in value.items
        )
    return kind in JSON_SCALARS or kind is Constant or kind is Described


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


def setting(call: Call, parts: list[Any], decoding: Decoding) -> Described:
    """A setting by its arguments and fields: scalars, dtypes and other settings."""
    made = described(call, parts, decoding)
    fields = () if made.fields is None else made.fields.pairs
    for value in (*made.items, *(value for _, value in fields)):
        if type(value) is Opaque:
            raise NestedError(value)
        if not _flat(value):
            raise ForeignError(f"{kind_of(call)} with more than settings")
    return made


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
    **_OF_TE,
    **{(module, name, "newobj", count): _SETTING for module, name, count in _SETTINGS},
    **{(*name, "reduce", 1): Decoder(member, lambda call: list(call.arguments)) for name in _ENUMS},
}
