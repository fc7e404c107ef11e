"""The parts of a tensor made a second time: whole, in plain numpy, without chunks, bits or torch.

`verify` and the kit compare with these. Blocks are laid out on axes of their own, padded with
zeros, so that a scale is one `max`; codes are searched among the borders between the numbers that
codes stand for, in float64.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias

from ...core.spec import BITS
from ...elements.raw import carrier
from .layout import ElementType
from .magnitudes import widened
from .scale_rules import ScaleRule, Scales

if TYPE_CHECKING:
    import numpy as np

    from .encoding import TensorEncoding

    Array: TypeAlias = "np.ndarray[Any, Any]"


def reference_parts(encoding: TensorEncoding, array: Array) -> dict[str, Array]:
    """role -> raw elements of each part of the whole tensor `array`, raw elements."""
    import numpy as np

    spec, rule, layout = encoding.spec, encoding.rule, encoding.layout
    numbers = widened(np.ascontiguousarray(array), spec.dtype).reshape(encoding.full)
    with np.errstate(all="ignore"):
        blocks, shape = _blocks(numbers, encoding)
        known = (
            np.where(np.isfinite(blocks), blocks, 0)
            if encoding.non_finite == "saturate"
            else blocks
        )
        axes = (
            (-3, -1)
            if encoding.leading
            else tuple(i for i in range(blocks.ndim) if i not in (blocks.ndim - 4, blocks.ndim - 2))
        )
        amax = np.abs(known).max(axes, initial=0, keepdims=True)
        whole = None
        out: dict[str, Array] = {}
        if encoding.whole is not None:
            whole = rule.whole(np.float32(amax.max(initial=0)), spec.dtype)
            dtype = encoding.parts[encoding.whole.role].dtype
            out[encoding.whole.role] = _stored(whole.reshape(-1)[:1], dtype).reshape(
                encoding.parts[encoding.whole.role].shape
            )
        zero = None
        if rule.asymmetric:
            low, high = (
                known.min(axes, initial=0, keepdims=True),
                known.max(axes, initial=0, keepdims=True),
            )
            scales, zero = rule.ranges(layout.elements, spec.dtype, low, high)
        else:
            scales = _scales(rule, layout.elements, spec.dtype, amax, whole)
        scaled = blocks / scales.factor if scales.divides else blocks * scales.factor
        scaled = _rounded(scaled, scales.dtype)
        if zero is not None:
            scaled = _rounded(scaled + zero, scales.dtype)
        codes = _codes(layout.elements, rule, scaled, blocks, scales.factor)
    codes = _unblocked(codes, shape, encoding.full)
    out[layout.role] = _words(encoding, codes)
    entries = np.broadcast_to(scales.stored, amax.shape).reshape(encoding.entries)
    out[encoding.grid.role] = _grid(
        encoding, _stored(entries, encoding.parts[encoding.grid.role].dtype)
    )
    if zero is not None and layout.zero is not None and layout.zero.packing is not None:
        half = 1 << (layout.elements.bits - 1)
        fields = (zero.reshape(encoding.entries) + half).astype("u1").swapaxes(-1, -2)
        packing, part = layout.zero.packing, encoding.parts[layout.zero.role]
        words = _packed(fields, packing.bits, BITS[part.dtype], packing.order, packing.dense)
        out[layout.zero.role] = np.ascontiguousarray(words.swapaxes(-1, -2))
    if "shape" in encoding.parts:
        out["shape"] = np.array(spec.shape, "<i8").view("<u8")
    return out


def _blocks(numbers: Array, encoding: TensorEncoding) -> tuple[Array, tuple[int, ...]]:
    """Numbers as [..., rows of blocks, rows, columns of blocks, columns], padded with zeros."""
    import numpy as np

    (high, wide), (rows, columns) = encoding.tile, numbers.shape[-2:]
    down, across = -(-rows // high), -(-columns // wide)
    padded = np.zeros((*numbers.shape[:-2], down * high, across * wide), "f4")
    padded[..., :rows, :columns] = numbers
    shape = (*numbers.shape[:-2], down, high, across, wide)
    return padded.reshape(shape), padded.shape


def _unblocked(codes: Array, shape: tuple[int, ...], full: tuple[int, ...]) -> Array:
    return codes.reshape(shape)[..., : full[-2], : full[-1]]


def _scales(
    rule: ScaleRule, elements: ElementType, dtype: str, amax: Array, whole: Array | None
) -> Scales:
    """The scales of MX formats by their definition, of others by their producer's formula."""
    import numpy as np

    if rule.kind != "mx":
        return rule.scales(elements, dtype, amax, whole)
    deepseek = rule.like == "deepseek"
    wide = np.maximum(amax, np.float32(1e-4)).astype("f8") if deepseek else amax.astype("f8")
    most = max(v for v in elements.values() if np.isfinite(v))
    top = np.floor(np.log2(most))
    # frexp is exact: wide = mantissa * 2^exponent with the mantissa from 1/2 up to 1
    mantissa, exponent = np.frexp(wide)
    floor = exponent - 1.0
    if rule.power == "floor":
        power = floor - top
    elif rule.power == "ceil":
        power = floor + (mantissa != 0.5) - top
    elif rule.power == "rceil":
        power = floor - top + (mantissa * 2 > most / 2**top)
    else:
        bits = {3: 3, 2: 2, 1: 1}[rule.mantissa_bits or {448.0: 3, 57344.0: 2, 6.0: 1}[most]]
        # to `bits` bits after the point, halves up
        power = floor - top + (np.floor(mantissa * 2 * 2**bits + 0.5) / 2**bits >= 2)
    byte = np.where(wide == 0, 0, power + 127).clip(1 if deepseek else 0, 254)
    byte = np.where(np.isinf(wide), 254 if rule.power == "rceil" else 255 - top, byte)
    byte = np.where(np.isnan(wide), 254 if deepseek else np.nan, byte)
    scale = np.exp2(byte - 127).astype("f4")
    return Scales(scale, (np.float32(1) / scale))


def _rounded(numbers: Array, dtype: str) -> Array:
    """float32 rounded to `dtype`, ties to even, by float64."""
    import numpy as np

    if dtype == "float32":
        return numbers
    if dtype == "float16":
        return numbers.astype("f2").astype("f4")
    wide = numbers.astype("f8")
    _, exponent = np.frexp(wide)
    # 8 significant bits; of subnormals fewer
    unit = np.exp2(np.maximum(exponent - 8.0, -133.0))
    near = np.where(np.isfinite(wide), np.rint(wide / unit) * unit, wide)
    return np.where(np.abs(near) > 3.3895313892515355e38, np.sign(near) * np.inf, near).astype("f4")


def _codes(
    elements: ElementType, rule: ScaleRule, scaled: Array, given: Array, factor: Array
) -> Array:
    """The code of each scaled number."""
    import numpy as np

    if elements.whole:
        top = (1 << (elements.bits - 1)) - 1
        low = -top if rule.like == "kimi" else -top - 1
        whole = np.nan_to_num(np.rint(scaled).clip(low, top)).astype("i8")
        codes = (whole if elements.negative else whole + top + 1) & ((1 << elements.bits) - 1)
        found: Array = codes.astype("u1")
        return found
    values = np.array(elements.values(), "f8")
    if elements.numbers:
        between = (values[1:] + values[:-1]) / 2
        return np.searchsorted(between, scaled.astype("f8"), "left").astype("u1")
    codes = np.flatnonzero(np.isfinite(values) & ~np.signbit(values))
    known = values[codes]
    between = (known[1:] + known[:-1]) / 2
    magnitude = np.abs(np.nan_to_num(scaled.astype("f8"), posinf=np.inf))
    low, high = (np.searchsorted(between, magnitude, side) for side in ("left", "right"))
    even = rule.ties == "even" if elements.bits == 4 else True
    code = codes[np.where((low != high) & (low % 2 == 1) & even, high, low)]
    half = 1 << (elements.bits - 1)
    if elements.bits == 4:
        scaled = np.nan_to_num(scaled, posinf=np.inf, neginf=-np.inf)
        sign = {
            "bit": np.signbit(scaled),
            "negative": scaled < 0,
            "not positive": ~(scaled > 0),
            "not zero": (scaled < 0) & (code != 0),
        }[rule.sign]
        made: Array = (code + half * sign).astype("u1")
        return made
    uz = elements.dtype.endswith("uz")
    signed = code + half * (np.signbit(scaled) & ((code != 0) if uz else True))
    nan = np.isnan(scaled)
    if nan.any():
        own = np.isnan(given) | np.isnan(np.broadcast_to(factor, scaled.shape))
        signed[nan] = 0x80 if uz else np.where(own[nan], half - 1, 2 * half - 1)
    return np.asarray(signed, "u1")


def _packed(codes: Array, bits: int, word: int, order: tuple[int, ...], dense: bool) -> Array:
    """Codes as words along the last axis, bit by bit."""
    import numpy as np

    if word < 8 or bits == word:
        return codes
    count = codes.shape[-1]
    per = word // bits
    words = -(-count * bits // word) if dense else -(-count // per)
    stream = np.zeros((*codes.shape[:-1], words * word), "u1")
    for i in range(count):
        field = order[i % per] if order else i % per
        first = i * bits if dense else i // per * word + field * bits
        for bit in range(bits):
            stream[..., first + bit] = codes[..., i] >> bit & 1
    return np.packbits(stream, axis=-1, bitorder="little").view(f"<u{word // 8}")


def _words(encoding: TensorEncoding, codes: Array) -> Array:
    import numpy as np

    packing, part = encoding.packing, encoding.parts[encoding.layout.role]
    words = _packed(
        np.ascontiguousarray(codes), packing.bits, BITS[part.dtype], packing.order, packing.dense
    )
    return words.reshape(part.shape)


def _grid(encoding: TensorEncoding, entries: Array) -> Array:
    """Entries in the shape in which they are stored."""
    import numpy as np

    grid, part = encoding.grid, encoding.parts[encoding.grid.role]
    if grid.swizzled:
        rows, columns = entries.shape[-2:]
        out = np.zeros(prod(part.shape), entries.dtype)
        wide = -(-columns // 4)
        flat = entries.reshape(rows, columns)
        for i in range(rows):
            for j in range(columns):
                out[
                    ((i // 128) * wide + j // 4) * 512 + i % 32 * 16 + i % 128 // 32 * 4 + j % 4
                ] = flat[i, j]
        return out.reshape(part.shape)
    if grid.transposed:
        entries = entries.swapaxes(-1, -2)
    if entries.size == prod(part.shape):
        return np.ascontiguousarray(entries).reshape(part.shape)
    padded = np.zeros(part.shape, entries.dtype)
    padded[tuple(slice(0, n) for n in entries.shape)] = entries
    return padded


def _stored(scales: Array, dtype: str) -> Array:
    """Scales as raw elements of their dtype."""
    import numpy as np

    scales = np.asarray(scales, "<f4")
    nan = np.isnan(scales)
    if dtype in ("float8_e8m0fnu", "uint8"):
        with np.errstate(all="ignore"):
            exponent = np.rint(np.log2(scales.astype("f8"))) + 127
        return np.where(nan, 255, np.nan_to_num(exponent)).astype("u1")
    if dtype == "float8_e4m3fn":
        # (-1)^s 2^(e - 7) (1 + m / 8), below the smallest exponent 2^-6 m / 8
        mantissa, exponent = np.frexp(scales.astype("f8"))
        normal = (exponent + 6) * 8 + (mantissa * 2 - 1) * 8
        code = np.where(exponent + 6 > 0, normal, scales.astype("f8") * 512)
        return np.where(nan, 0x7F, np.nan_to_num(code)).astype("u1")
    if dtype == "bfloat16":
        raw = scales.view("<u4") >> 16
    else:
        raw = scales.view("<u4") if dtype == "float32" else scales.astype("<f2").view("<u2")
    quiet = {"float32": 0x7FC00000, "bfloat16": 0x7FC0, "float16": 0x7E00}[dtype]
    return np.where(nan, quiet, raw).astype(carrier(dtype))
