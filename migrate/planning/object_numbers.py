"""Which codec decodes the components of a quantized object, and encodes numbers as them.

The grids of components (`source.quantized_layouts`) say where an element stands; once these are
taken out of padding, transposes and swizzles, what is left is a plain number format. A class is one
row of `_CODINGS`. What no codec encodes as the class does it has none: no arithmetic is guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from ..core.errors import listed
from ..core.spec import Spec
from ..ops.base import OpCall
from ..ops.dequantize import OP as DEQUANTIZE
from ..ops.dequantize import codec_called
from ..ops.quantize import OP as QUANTIZE
from ..source.component_grids import matrix
from ..source.pickle.tree import Encoding

# the dtype of numbers in between; every codec decodes to it
NUMBERS = "float32"
_DEFAULT_MAX = 448


class Coding(NamedTuple):
    """One copy of the numbers in a number format: the components of each role, all but the first of
    them the same once more; `turned` where rows of the format are the tensor's columns.

    `args` are the arguments of the codec, `encoder` those beside them that encoding takes. `codes`
    is the dtype of the codes, where the component is of plain bytes. `shapes` are those of roles
    that are no matrices. `zeros` are roles of which all elements are 0 where numbers are encoded.
    `unmade` says why nothing encodes numbers so, empty where they are.
    """

    codec: str
    roles: Mapping[str, tuple[str, ...]]
    args: Mapping[str, Any]
    encoder: Mapping[str, Any]
    codes: str | None = None
    turned: bool = False
    shapes: Mapping[str, tuple[int, ...]] = {}
    unmade: str = ""
    zeros: tuple[str, ...] = ()

    def decoding(self, specs: Mapping[str, Spec]) -> OpCall:
        """The op that decodes these parts, by role in the order of the codec's."""
        codec = codec_called(self.codec)
        args = DEQUANTIZE.Args(self.codec, NUMBERS, codec.Args(**self.args))
        roles = [role for role in codec.parts if role in specs]
        given = [specs[role] for role in roles]
        if DEQUANTIZE.settles(args, roles):
            args = DEQUANTIZE.settle(args, roles, given, {})
        return OpCall("dequantize", args)

    def encoding(self, numbers: Spec) -> OpCall:
        """The op that encodes numbers of this spec as the parts that the coding has."""
        own = codec_called(self.codec).Args(**self.args, **self.encoder)
        args: Any = QUANTIZE.Args(self.codec, None, own)
        if QUANTIZE.settles(args, self.encoded_parts()):
            args = QUANTIZE.settle(args, self.encoded_parts(), [numbers], {})
        return OpCall("quantize", args)

    def encoded_parts(self) -> list[str]:
        """The roles that are encoded, in the order of the codec's."""
        return [role for role in self.parts() if role not in self.zeros]

    def parts(self) -> list[str]:
        """The roles in the order of the codec's."""
        return [role for role in codec_called(self.codec).parts if role in self.roles]


def codings(encoding: Encoding, components: Mapping[str, str]) -> list[Coding] | str:
    """The copies of the numbers that an object of these components (name -> dtype) has, or why
    nothing encodes them.
    """
    found = _found(encoding, components)
    if isinstance(found, str):
        return found
    if why := next((coding.unmade for coding in found if coding.unmade), None):
        return why
    known = {name for coding in found for names in coding.roles.values() for name in names}
    left = [name for name in components if name not in known]
    if left:
        return f"nothing computes its {listed(left)}"
    return found


def decodes(encoding: Encoding, components: Mapping[str, str]) -> Coding | str:
    """The copy of the numbers that is decoded, or why there is none."""
    found = _found(encoding, components)
    return found if isinstance(found, str) else found[0]


def _found(encoding: Encoding, components: Mapping[str, str]) -> list[Coding] | str:
    row = _CODINGS.get(encoding.format)
    if row is None:
        return f"nothing reads or makes the numbers of {encoding.format} as {encoding.name} does"
    if encoding.number is None:
        return "the dtype of its numbers is not known"
    found = row(encoding, components)
    return found or "it has neither of its usages whole"


def _there(components: Collection[str], *names: str) -> tuple[str, ...]:
    return tuple(name for name in names if name in components)


def _float8(encoding: Encoding, components: Mapping[str, str]) -> list[Coding] | str:
    roles = {"weight": _there(components, "_data", "_transpose"), "scale": ("_scale_inv",)}
    number = encoding.number
    said = {"granularity": "tensor", "codes": number}
    made = {"like": "modelopt", "scale": components["_scale_inv"]}
    return [Coding("fp8", roles, said, made, number, shapes={"scale": ()})]


def _both(
    components: Mapping[str, str], amax: bool = False
) -> list[tuple[dict[str, tuple[str, ...]], bool]]:
    """The roles of the rowwise copy and of the columnwise one, as far as they are there."""
    found = []
    for side in ("rowwise", "columnwise"):
        data, scale = f"_{side}_data", f"_{side}_scale_inv"
        if data in components and scale in components:
            roles: dict[str, tuple[str, ...]] = {"weight": (data,), "scale": (scale,)}
            if amax:
                roles["global"] = (f"_amax_{side}",)
            found.append((roles, side == "columnwise"))
    return found


def _mxfp8(encoding: Encoding, components: Mapping[str, str]) -> list[Coding] | str:
    number = encoding.number
    made = {"like": "torchao" if encoding.block == (1, 32) else "te-2d"}
    return [
        Coding("mxfp8", roles, {"codes": number}, made, number, turned)
        for roles, turned in _both(components)
    ]


def _float8_block(encoding: Encoding, components: Mapping[str, str]) -> list[Coding] | str:
    rows = not encoding.block or encoding.block[0] == 1
    block, made = (1, 128) if rows else (128, 128), {"like": "hf"}
    copies = _both(components)
    if not rows:
        both = {
            "weight": _there(components, "_rowwise_data", "_columnwise_data"),
            "scale": _there(components, "_rowwise_scale_inv", "_columnwise_scale_inv"),
        }
        copies = [(both, False)]
    if encoding.number != "float8_e4m3fn":
        said, why = {"codes": encoding.number, "block": block}, "no codec encodes blocks of "
        return [
            Coding("fp8", roles, said, {}, encoding.number, turned, {}, f"{why}{encoding.number}")
            for roles, turned in copies
        ]
    return [
        Coding("fp8-block", roles, {"block": block}, made, encoding.number, turned)
        for roles, turned in copies
    ]


def _nvfp4(encoding: Encoding, components: Mapping[str, str]) -> list[Coding] | str:
    options = encoding.options or {}
    said: dict[str, Any] = {"form": "te"}
    shapes: dict[str, tuple[int, ...]] = {"global": (1,)}
    made, unmade = {"like": "te-2d" if encoding.block == (16, 16) else "te"}, ""
    most = options.get("nvfp4_e4m3_max") or _DEFAULT_MAX
    if most != _DEFAULT_MAX:
        said["e4m3_max"], unmade = most, "no codec encodes 4 over 6"
    if options.get("row_scaled_nvfp4"):
        # each row is a matrix by itself
        (high, wide), unmade = matrix(encoding.shape), "no codec makes an amax for each row"
        shapes = {"weight": (high, 1, wide // 2), "scale": (high, 1, -(-wide // 16))}
        shapes["global"] = (high,)
    found = []
    for roles, turned in _both(components, amax=True):
        if roles["global"][0] not in components:
            return f"it has no {roles['global'][0]}"
        found.append(Coding("nvfp4", roles, said, made, None, turned, shapes, unmade))
    return found


def _ao_float8(encoding: Encoding, components: Mapping[str, str]) -> list[Coding] | str:
    block, shape = encoding.block, encoding.shape
    roles = {"weight": ("qdata",), "scale": ("scale",)}
    number = encoding.number
    if block is None or len(shape) != 2:
        return "its blocks are not those of a matrix"
    of_all, of_rows = block == shape, block == (1, shape[1])
    if of_all or of_rows:
        said = {"granularity": "tensor" if of_all else "channel", "codes": number}
        made = {"like": "torchao", "scale": components["scale"]}
        return [Coding("fp8", roles, said, made, number, shapes={"scale": ()} if of_all else {})]
    if block[0] == 1:
        return "its shards have some of the columns of rows that have a scale each"
    if number != "float8_e4m3fn":
        return f"no codec has blocks of {number}"
    made = {"like": "hf", "scale": components["scale"]}
    return [Coding("fp8-block", roles, {"block": block}, made, number)]


def _ao_int8(encoding: Encoding, components: Mapping[str, str]) -> list[Coding] | str:
    block, shape = encoding.block, encoding.shape
    if block is None or len(shape) != 2 or block not in (shape, (1, shape[1])):
        return "its scales are neither those of rows nor that of the tensor"
    roles, unmade = {"weight": ("qdata",), "scale": ("scale",)}, ""
    if components["scale"] != NUMBERS:
        unmade = f"no codec has integers with scales of {components['scale']}"
    elif (encoding.options or {}).get("reduce_range"):
        unmade = "no codec has integers of a reduced range"
    # `from_hp` is symmetric unless it is told, and stores zero points of 0 then
    zeros = ("zero",) if "zero_point" in components else ()
    roles |= dict.fromkeys(zeros, ("zero_point",))
    said = {"granularity": "tensor" if block == shape else "channel"}
    shapes = {role: (1,) for role in roles if role != "weight"} if block == shape else {}
    made = {"like": "torchao"}
    return [Coding("int8", roles, said, made, None, False, shapes, unmade, zeros)]


def _ao_int4(encoding: Encoding, components: Mapping[str, str]) -> str:
    return "how its kernels order codes is known of no GPU"


def _ao_mx(encoding: Encoding, components: Mapping[str, str]) -> list[Coding] | str:
    if encoding.block != (1, 32):
        return "no codec has scales of so many columns"
    roles = {"weight": ("qdata",), "scale": ("scale",)}
    made = {"like": "torchao", "scale": components["scale"]}
    if encoding.number == "float4_e2m1fn":
        return [Coding("mxfp4", roles, {}, made)]
    return [Coding("mxfp8", roles, {"codes": encoding.number}, made, encoding.number)]


def _ao_nvfp4(encoding: Encoding, components: Mapping[str, str]) -> list[Coding] | str:
    roles: dict[str, tuple[str, ...]] = {"weight": ("qdata",), "scale": ("scale",)}
    made: dict[str, Any] = {"like": "torchao"}
    if "per_tensor_scale" in components:
        roles["global"] = ("per_tensor_scale",)
    else:
        made["levels"] = 1
    return [Coding("nvfp4", roles, {}, made, shapes={"global": ()})]


_Row = Callable[[Encoding, Mapping[str, str]], "list[Coding] | str"]
_CODINGS: dict[str, _Row] = {
    "te-fp8": _float8,
    "te-mxfp8": _mxfp8,
    "te-fp8-block": _float8_block,
    "te-nvfp4": _nvfp4,
    "ao-fp8": _ao_float8,
    "ao-int8": _ao_int8,
    "ao-int4": _ao_int4,
    "ao-mx": _ao_mx,
    "ao-nvfp4": _ao_nvfp4,
}
