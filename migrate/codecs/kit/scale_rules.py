"""How the largest magnitudes of blocks become scales: what is stored, and what numbers are
multiplied or divided by before they are rounded to codes.

Libraries that read one format need not write the same codes, so a `ScaleRule` names whose
arithmetic it is (`like`). All work is on grids of float32 magnitudes, in numpy, whatever holds the
numbers.

    like                per                      scale
    deepseek            fp8                      max(amax, 1e-4) / largest; x * (1 / scale)
    hf                  fp8                      1 / (largest / amax); x * (largest / amax)
    compressed-tensors  fp8, integers            amax / half the range, and the quotient x / scale,
                                                 all rounded to the dtype of the numbers
    modelopt            fp8, int8                amax / largest; of blocks in the numbers' dtype
    torchao             fp8, int8                as this in the numbers' dtype; x / scale is not
    te                  nvfp4                    the largest magnitude of all is stored, not a scale
    kimi                int4                     amax / 7 in the numbers' dtype
    bitsandbytes        nf4, fp4                 amax; x * (1 / amax), but x / amax in a last block
                                                 that is shorter than the others

The powers of two of MX formats are taken from exponent bits (`mx`), never from a logarithm. What
all-zero blocks get is the producer's own scale if it is a number, else 1.

Sources: compressed-tensors 0.20 `calculate_qparams` and `generate_gparam` on the CPU, ModelOpt 0.47
`quantization/qtensor`, torchao 0.18 `prototype/mx_formats`, DeepGEMM 54e2261 `utils/math`,
transformers 5.23 `Fp8Quantize`, bitsandbytes 0.50 `backends/default`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from .layout import ElementType
from .rounding import largest_of, nearest

if TYPE_CHECKING:
    import numpy as np

    Array: TypeAlias = "np.ndarray[Any, Any]"

# DeepGEMM's floor of a block's largest magnitude
FLOOR = 1e-4
# bitsandbytes' floor of it
LEAST = 1e-38
# the largest e4m3 number times the largest e2m1 number: what the scales of NVFP4 span
SPAN = 2688.0
# the distance from 1 to the next number
EPSILON = {"float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}

# dtypes that scales are rounded to, as `rounding` has them
_ROUNDED = {"f32": "float32", "bf16": "bfloat16"}

Kind: TypeAlias = Literal["float", "mx", "nvfp4", "integer", "table"]


class Scales(NamedTuple):
    """What is stored (float32 values that the part's dtype holds whole), and what numbers are
    multiplied by, or divided by where `divides`.

    The product or quotient is rounded to `dtype`. `back` is what decoding multiplies codes by,
    where it is not `stored` alone, `raw` are the codes of `stored`, where they are known.
    """

    stored: Array
    factor: Array
    divides: bool = False
    dtype: str = "float32"
    back: Array | None = None
    raw: Array | None = None


@dataclass(frozen=True, slots=True)
class ScaleRule:
    """Whose arithmetic makes scales, and for which kind of format."""

    kind: Kind
    like: str
    # what becomes of an fp8 scale before it is stored: f32 (nothing), bf16, pow2, or a dtype that
    # it is rounded to
    rounding: str = "f32"
    # what shares an fp8 scale: a tensor, a stack of matrices, a row or a block
    region: Literal["tensor", "stack", "row", "block"] = "block"
    # the exponent of an MX scale: floor, ceil, rceil or even
    power: str = "rceil"
    # integers with a zero: scales span the range of the numbers and 0, not twice the largest
    asymmetric: bool = False

    @property
    def mantissa_bits(self) -> int | None:
        """Bits that `even` rounds a magnitude to; None: as many as codes have."""
        return 1 if self.like == "compressed-tensors" else None

    @property
    def saturates(self) -> bool:
        """Whether finite numbers can lie beyond the largest code, whatever their scale."""
        return (
            (self.kind == "mx" and self.power in ("floor", "even"))
            or (self.kind == "nvfp4" and self.like in ("torchao", "te"))
            or (self.kind == "integer" and self.like in ("compressed-tensors", "torchao"))
        )

    @property
    def ties(self) -> str:
        """Where a number halfway between two e2m1 codes goes: even, or zero."""
        return "zero" if self.kind == "mx" and self.like in ("modelopt", "deepseek") else "even"

    @property
    def sign(self) -> str:
        """Which numbers get the sign of an e2m1 code (`rounding.SIGNS`)."""
        if self.kind == "mx" and self.like == "modelopt":
            return "not positive"
        if self.like == "deepseek":
            return "not zero"
        return "bit" if self.like == "torchao" else "negative"

    def whole(self, amax: Array, dtype: str) -> Array:
        """The scale of a whole NVFP4 tensor of this largest magnitude, as it is stored."""
        import numpy as np

        amax = np.asarray(amax, "f4")
        if self.like == "te":
            return amax
        with np.errstate(all="ignore"):
            if self.like == "compressed-tensors":
                # torch divides a number of Python's by a tensor as a product with the reciprocal,
                # each rounded to the tensor's dtype
                quotient = rounded_to(rounded_to(1 / amax, dtype) * np.float32(SPAN), dtype)
                usable = (amax > 0) & np.isfinite(quotient)
            else:
                quotient = amax / np.float32(SPAN)
                usable = quotient != 0
        return np.where(usable, quotient, np.float32(1))

    def scales(
        self,
        elements: ElementType,
        dtype: str,
        amax: Array,
        whole: Array | None = None,
        short: bool = False,
    ) -> Scales:
        """For blocks of these largest magnitudes (float32) of numbers of `dtype`.

        `whole` is the scale of the tensor, where the format has one. `short`: the last block has
        fewer numbers than the others; where it is not the only one, the factor is of the others.
        """
        import numpy as np

        with np.errstate(all="ignore"):
            if self.kind == "mx":
                return _powers(self, elements, amax)
            if self.kind == "nvfp4":
                return _of_nvfp4(self.like, dtype, amax, whole)
            if self.kind == "integer":
                return _of_integers(self.like, elements, dtype, amax)
            if self.kind == "table":
                return _of_table(amax, short)
            return _of_floats(self, largest_of(elements), dtype, amax)

    def of_nothing(self, elements: ElementType, dtype: str) -> Array:
        """The scale of a block without numbers: that of zeros."""
        import numpy as np

        none = np.zeros((1, 1), "f4")
        if self.asymmetric:
            return self.ranges(elements, dtype, none, none)[0].stored
        return self.scales(elements, dtype, none).stored

    def ranges(
        self, elements: ElementType, dtype: str, low: Array, high: Array
    ) -> tuple[Scales, Array]:
        """The scales of blocks between `low` <= 0 and `high` >= 0, and the code of zero of each, as
        a signed integer (float32): (high - low) / (2^bits - 1) and lowest - low / scale.
        """
        import numpy as np

        least = -(1 << (elements.bits - 1))
        with np.errstate(all="ignore"):
            span = rounded_to(high - low, dtype)
            scale = rounded_to(span / np.float32((1 << elements.bits) - 1), dtype)
            # of a scale of 0 this is NaN, for which the code of 0 stands
            zero = rounded_to(np.float32(least) - rounded_to(low / scale, dtype), dtype)
            zero = np.nan_to_num(np.rint(zero.clip(least, -least - 1)))
            scale = np.where(scale == 0, np.float32(EPSILON[dtype]), scale)
        return Scales(scale, scale, True, dtype), zero


def _of_floats(rule: ScaleRule, largest: float, dtype: str, amax: Array) -> Scales:
    import numpy as np

    like, stored = rule.like, rule.rounding
    one, most = np.float32(1), np.float32(largest)
    if like in ("compressed-tensors", "modelopt", "torchao"):
        modelopt = like == "modelopt"
        scale = amax / most
        if not modelopt or rule.region == "block":
            scale = rounded_to(scale, dtype)
        if stored == "pow2":
            scale = np.where(scale == 0, scale, _power_above(scale))
            scale = np.where(np.isfinite(amax), scale, np.float32(np.nan))
        else:
            scale = rounded_to(scale, _ROUNDED.get(stored, stored))
        nothing = EPSILON[dtype] if like == "compressed-tensors" else 1
        scale = np.where(scale == 0, np.float32(nothing), scale)
        # a matrix over a tensor without axes keeps its dtype
        wide = like == "torchao" or (modelopt and rule.region in ("stack", "row"))
        return Scales(scale, scale, True, "float32" if wide else dtype)
    if like == "deepseek":
        scale = np.maximum(amax, np.float32(FLOOR)) / most
    else:
        # largest / amax, as torch divides a number of Python's: rounded twice
        factor = np.where(amax > 0, one / amax * most, one)
        scale = one / factor
    if stored == "f32":
        return Scales(scale, one / scale if like == "deepseek" else factor)
    if stored == "bf16":
        scale = rounded_to(scale, "bfloat16")
    else:
        powers = _power_above(scale)
        if like != "deepseek":
            powers = np.where(np.isfinite(scale), powers, np.float32(np.nan))
        scale = powers
    return Scales(scale, one / scale)


def _power_above(scale: Array) -> Array:
    """The least normal powers of two that are not below float32 numbers above zero."""
    bits = scale.view("<i4")
    exponents = (bits >> 23) + (bits & 0x7FFFFF != 0)
    powers: Array = (exponents.clip(1, 254) << 23).view("<f4")
    return powers


def _powers(rule: ScaleRule, elements: ElementType, amax: Array) -> Scales:
    import numpy as np

    if rule.like == "deepseek":
        amax = np.maximum(amax, np.float32(FLOOR))
    exponents = mx(rule.power, elements, amax, rule.mantissa_bits)
    if rule.like == "deepseek":
        exponents = exponents.clip(1, 254)
    scale = of_exponents(exponents)
    return Scales(scale, np.float32(1) / scale)


def mx(power: str, elements: ElementType, amax: Array, mantissa_bits: int | None = None) -> Array:
    """The E8M0 bytes of blocks of these magnitudes (OCP MX 1.0 6.3 for `floor`).

    With 2^e the power of two not above a magnitude and 2^E that of the largest code: floor is
    e - E; ceil one more unless the magnitude is a power of two; rceil the least whose largest code
    is not below the magnitude; even is floor of the magnitude rounded to `mantissa_bits`. 255 is
    NaN's.
    """
    import numpy as np

    bits = np.ascontiguousarray(amax, "<f4").view("<i4")
    most = int(np.float32(largest_of(elements)).view("<i4"))
    top, fraction = (most >> 23) - 127, most & 0x7FFFFF
    if power == "even":
        kept = mantissa_of(elements) if mantissa_bits is None else mantissa_bits
        found = (bits + (1 << (22 - kept))) >> 23
    else:
        above = {
            "floor": bits < 0,
            "ceil": bits & 0x7FFFFF != 0,
            "rceil": bits & 0x7FFFFF > fraction,
        }
        found = (bits >> 23) + above[power]
    found = (found - top).clip(0, 254)
    if power == "rceil":
        found = np.where(bits == 0x7F800000, 254, found)
    return np.where(np.isnan(amax), 255, found)


def of_exponents(exponents: Array) -> Array:
    """2^(byte - 127) as float32, for 255 NaN."""
    import numpy as np

    wide = exponents.astype("<i4")
    bits = np.where(wide == 0, 0x00400000, wide << 23)
    return np.where(wide == 255, 0x7FC00000, bits).astype("<u4").view("<f4")


def _of_nvfp4(like: str, dtype: str, amax: Array, whole: Array | None) -> Scales:
    import numpy as np

    six, f4 = np.float32(6), np.float32
    if like == "compressed-tensors":
        raw, found = nearest("float8_e4m3fn", rounded_to(amax / six, dtype) * whole)
        zero = found == 0
        # the code of 0.125
        raw, stored = np.where(zero, np.uint8(0x20), raw), np.where(zero, f4(0.125), found)
        back = stored / whole
        return Scales(stored, _not_zero(back), True, back=back, raw=raw)
    if like == "torchao":
        scale = amax / six if whole is None else amax / six / whole
        raw, stored = nearest("float8_e4m3fn", np.maximum(scale, f4(2.0**-6)))
        if whole is None:
            return Scales(stored, f4(1) / stored, raw=raw)
        return Scales(stored, (f4(1) / whole) / stored, back=stored * whole, raw=raw)
    if like == "te":
        span, most = f4(SPAN), np.finfo("f4").max
        encoding = np.where(whole == 0, f4(1), np.minimum(span / whole, most))
        # a block may be so small that its scale is zero
        raw, stored = nearest("float8_e4m3fn", amax * (encoding * f4(1 / 6)))
        factor = np.minimum(f4(1) / (stored * (f4(1) / encoding)), most)
        return Scales(stored, factor, back=stored * whole * f4(1 / SPAN), raw=raw)
    scale = np.where(amax == 0, f4(1), amax / (six * whole))
    raw, stored = nearest("float8_e4m3fn", np.maximum(scale, f4(2.0**-9)))
    back = stored * whole
    return Scales(stored, _not_zero(back), True, back=back, raw=raw)


def _not_zero(divisor: Array) -> Array:
    """What decodes to zero is encoded as zero."""
    import numpy as np

    return np.where(divisor == 0, np.float32(np.inf), divisor)


def _of_integers(like: str, elements: ElementType, dtype: str, amax: Array) -> Scales:
    import numpy as np

    half = (1 << (elements.bits - 1)) - 1
    steps = np.float32(half + 0.5 if like in ("compressed-tensors", "torchao") else half)
    scale = amax / steps if like == "modelopt" else rounded_to(amax / steps, dtype)
    if like == "torchao":
        scale = np.maximum(scale, np.float32(EPSILON["float32"]))
        return Scales(scale, np.float32(1) / scale)
    nothing = EPSILON[dtype] if like == "compressed-tensors" else 1
    scale = np.where(scale == 0, np.float32(nothing), scale)
    return Scales(scale, scale, True, "float32" if like == "modelopt" else dtype)


def _of_table(amax: Array, short: bool) -> Scales:
    import numpy as np

    # the least that bitsandbytes divides by, and what it stores of a short block of zeros
    divisor = np.maximum(amax, np.float32(LEAST))
    if not short:
        return Scales(amax, np.float32(1) / divisor)
    stored = amax.copy()
    stored[..., -1:] = divisor[..., -1:]
    if amax.size == 1:
        return Scales(stored, divisor, True)
    return Scales(stored, np.float32(1) / divisor)


def rounded_to(numbers: Array, dtype: str) -> Array:
    """float32 numbers rounded to the nearest of `dtype`, ties to even, as float32; NaN stays."""
    import numpy as np

    if dtype == "float32":
        return np.asarray(numbers, "<f4")
    if dtype == "float16":
        return np.asarray(numbers, "<f4").astype("<f2").astype("<f4")
    wide = np.asarray(numbers, "<f4")
    bits = np.ascontiguousarray(wide).view("<i4")
    near = ((bits + (0x7FFF + (bits >> 16 & 1))) & -0x10000).view("<f4")
    return np.where(np.isnan(wide), wide, near).reshape(wide.shape)


def mantissa_of(elements: ElementType) -> int:
    """The bits behind the point of a float type."""
    return {"float8_e4m3fn": 3, "float8_e5m2": 2, "float4_e2m1fn": 1}[elements.dtype]
