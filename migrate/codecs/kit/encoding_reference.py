"""The parts of a tensor made a second time, in plain numpy: without bits, tiles or torch.

`verify` and the kit compare with these. Rows are worked on some at a time, so that memory is that
of the parts; the largest of each block is found first, then each number is scaled by the entry at
its index and its code looked up.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from ...core.spec import BITS
from ...elements.raw import carrier
from .layout import ElementType, Grid
from .magnitudes import widened
from .rounding import looked_up
from .scale_rules import ScaleRule, Scales

if TYPE_CHECKING:
    import numpy as np

    from .encoding import TensorEncoding

    Array: TypeAlias = "np.ndarray[Any, Any]"

# numbers that are worked on at a time
STEP = 1 << 16


class RowMagnitudes(NamedTuple):
    """What a survey knows of some rows of a tensor: the largest magnitude of `all` of it, and of
    the `tiles` that the rows lie in, None where that is found in the rows themselves.
    """

    all: Array
    tiles: Array | None


def reference_survey(
    encoding: TensorEncoding, array: Array, start: int, known: Array | None = None
) -> Array:
    """The largest magnitudes in the rows of the first axis up to and with `array`, rows from
    `start` on, as float32: one of all, or of each tile that no box holds.
    """
    import numpy as np

    shape = encoding.entries if encoding.surveys_tiles else (1, 1)
    found: Array = np.zeros(shape, "f4") if known is None else known
    # where the first axis is among those of `full`
    axis = len(encoding.full) - len(encoding.spec.shape)
    raw = np.ascontiguousarray(array).reshape((1,) * axis + array.shape)
    lead, (high, wide) = len(encoding.full) - 2, encoding.tile
    for at, rows in _some_rows(raw):
        numbers = np.abs(widened(raw[at][rows], encoding.spec.dtype))
        if encoding.non_finite == "saturate":
            numbers = np.where(np.isfinite(numbers), numbers, 0)
        if shape == (1, 1):
            found[0, 0] = np.maximum(found[0, 0], numbers.max(initial=0))
            continue
        down = (np.arange(rows.start, rows.stop) + (start if axis == lead else 0)) // high
        across = (np.arange(raw.shape[-1]) + (start if axis > lead else 0)) // wide
        matrix = (at[0] + start, *at[1:]) if at else ()
        entries = found[matrix if encoding.leading else ()]
        edges = np.flatnonzero(np.diff(across, prepend=-1))
        for row, most in zip(down, np.maximum.reduceat(numbers, edges, axis=1), strict=True):
            entries[row, across[edges]] = np.maximum(entries[row, across[edges]], most)
    return found


def survey_of_rows(
    encoding: TensorEncoding, survey: Array, start: int, count: int
) -> RowMagnitudes:
    """What `survey` says of `count` rows of the first axis from `start` on."""
    whole = survey.max(initial=0)
    if not encoding.surveys_tiles:
        return RowMagnitudes(whole, None)
    axis = len(encoding.full) - len(encoding.spec.shape)
    inner = axis - (len(encoding.full) - 2)
    if inner < 0:
        return RowMagnitudes(whole, survey[start : start + count] if encoding.leading else survey)
    tile = encoding.tile[inner]
    part = slice(start // tile, -(-(start + count) // tile))
    return RowMagnitudes(whole, survey[part] if inner == 0 else survey[..., part])


def parts_of_survey(encoding: TensorEncoding, survey: Array) -> dict[str, Array]:
    """role -> raw elements of the whole parts that follow from a survey alone."""
    import numpy as np

    rule, spec, parts = encoding.rule, encoding.spec, encoding.parts
    found = {}
    with np.errstate(all="ignore"):
        whole = None
        if encoding.whole is not None:
            role = encoding.whole.role
            whole = rule.whole(survey.max(initial=0), spec.dtype)
            found[role] = np.zeros(parts[role].shape, carrier(parts[role].dtype))
            found[role][...] = _stored(whole.reshape(-1), parts[role].dtype)[0]
        if encoding.surveys_tiles and not spec.numel:
            found |= _scale_of_nothing(encoding)
        elif encoding.surveys_tiles:
            scales = _scales(rule, encoding.layout.elements, spec.dtype, survey, whole)
            entries = _stored(
                scales.stored.reshape(encoding.entries), parts[encoding.grid.role].dtype
            )
            found[encoding.grid.role] = _grid(encoding, entries)
    return found


def reference_parts(
    encoding: TensorEncoding, array: Array, survey: RowMagnitudes | None = None
) -> dict[str, Array]:
    """role -> raw elements of each part of `array`, raw elements: of a whole tensor or, with what a
    survey of that says, of some rows of it.
    """
    import numpy as np

    spec, rule, layout = encoding.spec, encoding.rule, encoding.layout
    tile = encoding.tile
    raw: Array = np.ascontiguousarray(array).reshape(encoding.full)
    if layout.flat:
        # blocks as rows; in a word that is left numbers follow that are 0
        wide = tile[1] if spec.numel > tile[1] else -(-tile[1] // encoding.unit) * encoding.unit
        padded = np.zeros(-(-spec.numel // wide) * wide, raw.dtype)
        padded[: spec.numel] = raw.reshape(-1)
        raw, tile = padded.reshape(-1, wide), (1, wide)
    saturate = encoding.non_finite == "saturate"
    grid = (*raw.shape[:-2], *(-(-n // t) for n, t in zip(raw.shape[-2:], tile, strict=True)))
    low, high = np.zeros(grid, "f4"), np.zeros(grid, "f4")
    out = {role: np.zeros(part.shape, carrier(part.dtype)) for role, part in encoding.parts.items()}
    out |= {role: encoding.constant_part(role) for role in encoding.constant}
    if not spec.numel:
        if encoding.whole is None:
            return out | _scale_of_nothing(encoding)
        role, nothing = encoding.whole.role, rule.whole(np.zeros(1, "f4"), spec.dtype)
        out[role][...] = _stored(nothing, encoding.parts[role].dtype)[0]
        return out
    # words of one row side by side
    codes = out[layout.role].reshape((-1,) if layout.flat else (*raw.shape[:-1], -1))
    with np.errstate(all="ignore"):
        for at, rows in _some_rows(raw):
            numbers = widened(raw[at][rows], spec.dtype)
            known = np.where(np.isfinite(numbers), numbers, 0) if saturate else numbers
            first, last = rows.start // tile[0], -(-rows.stop // tile[0])
            for row in range(first, last):
                inside = slice(max(0, row * tile[0] - rows.start), (row + 1) * tile[0] - rows.start)
                edges = np.arange(0, raw.shape[-1], tile[1])
                for found, sign in ((low, -1), (high, 1)):
                    most = np.maximum.reduceat((sign * known[inside]).max(0, initial=0), edges)
                    found[at][row] = np.maximum(found[at][row], most)
        # of zeros of both signs either may be the largest
        low, high = np.abs(low), np.abs(high)
        largest = np.maximum(low, high)
        if survey is not None and survey.tiles is not None:
            largest = np.broadcast_to(survey.tiles, grid)
        elif not encoding.leading:
            largest = np.broadcast_to(largest.max(initial=0), largest.shape)
        whole = None
        if encoding.whole is not None:
            known = largest.max(initial=0) if survey is None else survey.all
            whole = rule.whole(known, spec.dtype)
            role = encoding.whole.role
            out[role][...] = _stored(whole.reshape(-1), encoding.parts[role].dtype)[0]
        zero = None
        if rule.asymmetric:
            scales, zero = rule.ranges(layout.elements, spec.dtype, -low, high)
        else:
            scales = _scales(rule, layout.elements, spec.dtype, largest, whole)
        last = None
        if layout.flat and spec.numel % encoding.grid.block[1]:
            # a block that is shorter than the others
            last = rule.scales(layout.elements, spec.dtype, largest[-1:], whole, True)
            scales.stored[-1:] = last.stored
        for at, rows in _some_rows(raw):
            numbers = widened(raw[at][rows], spec.dtype)
            down = np.arange(rows.start, rows.stop) // tile[0]
            across = np.arange(raw.shape[-1]) // tile[1]
            factor = scales.factor[at][down][:, across]
            scaled = numbers / factor if scales.divides else numbers * factor
            if last is not None and rows.stop == len(raw):
                few = numbers[-1:]
                scaled[-1:] = few / last.factor if last.divides else few * last.factor
                # of what follows the numbers, whatever their scale is
                scaled[-1, spec.numel - (len(raw) - 1) * raw.shape[-1] :] = 0
            scaled = _rounded(scaled, scales.dtype)
            if zero is not None:
                scaled = _rounded(scaled + zero[at][down][:, across], scales.dtype)
            made = _codes(layout.elements, rule, scaled, numbers, factor)
            packing, word = encoding.packing, BITS[encoding.parts[layout.role].dtype]
            words = _packed(made, packing.bits, word, packing.order, packing.dense)
            if layout.flat:
                start = rows.start * words.shape[-1]
                room = codes[start : start + words.size]
                room[...] = words.reshape(-1)[: room.size]
            else:
                codes[at][rows] = words
    entries = scales.stored
    if not encoding.leading:
        entries = entries.reshape(-1)[:1]
    part = encoding.parts[encoding.grid.role]
    held = encoding.grid.byte if part.dtype == "uint8" else part.dtype
    entries = _stored(entries.reshape(encoding.entries), held)
    out[encoding.grid.role] = _grid(encoding, entries)
    if zero is not None and layout.zero is not None:
        out[layout.zero.role] = _zeros(encoding, layout.zero, zero.reshape(encoding.entries))
    return out


def _zeros(encoding: TensorEncoding, grid: Grid, zeros: Array) -> Array:
    """Signed codes of zero as they are stored."""
    import numpy as np

    elements, part = encoding.layout.elements, encoding.parts[grid.role]
    if elements.negative:
        return zeros.astype("i1").view("u1").reshape(part.shape)
    if grid.packing is None:
        raise TypeError(grid)
    packing, word = grid.packing, BITS[part.dtype]
    fields = (zeros + (1 << (elements.bits - 1))).astype("u1").swapaxes(-1, -2)
    words = _packed(fields, packing.bits, word, packing.order, packing.dense)
    return np.ascontiguousarray(words.swapaxes(-1, -2))


def _scale_of_nothing(encoding: TensorEncoding) -> dict[str, Array]:
    """The scales of a tensor without numbers: those of zeros."""
    import numpy as np

    role = encoding.grid.role
    scale = encoding.rule.of_nothing(encoding.layout.elements, encoding.spec.dtype)
    part = encoding.parts[role]
    return {role: np.full(part.shape, _stored(scale, part.dtype)[0, 0], carrier(part.dtype))}


def _some_rows(raw: Array) -> Iterator[tuple[tuple[int, ...], slice]]:
    """(index of a matrix, some of its rows) until all are named."""
    import numpy as np

    rows, step = raw.shape[-2], max(1, STEP // max(1, raw.shape[-1]))
    for at in np.ndindex(raw.shape[:-2]):
        for row in range(0, rows, step):
            yield at, slice(row, min(row + step, rows))


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
        order = np.argsort(values, kind="stable")
        # as float32, in which they are compared
        between = ((values[order][1:] + values[order][:-1]) / 2).astype("f4")
        return order.astype("u1")[np.searchsorted(between, scaled, "left")]
    half = 1 << (elements.bits - 1)
    if elements.bits == 4:
        scaled = np.nan_to_num(scaled, posinf=np.inf, neginf=-np.inf)
        code = looked_up(np.abs(scaled), elements.dtype, rule.ties)
        sign = {
            "bit": np.signbit(scaled),
            "negative": scaled < 0,
            "not positive": ~(scaled > 0),
            "not zero": (scaled < 0) & (code != 0),
        }[rule.sign]
        made: Array = code | (half * sign).astype("u1")
        return made
    code = looked_up(scaled, elements.dtype)
    nan = np.isnan(scaled)
    if nan.any():
        own = np.isnan(given) | np.isnan(np.broadcast_to(factor, scaled.shape))
        one = elements.dtype.endswith("uz")
        code[nan] = half if one else np.where(own[nan], half - 1, 2 * half - 1)
    return code


def _packed(codes: Array, bits: int, word: int, order: tuple[int, ...], dense: bool) -> Array:
    """Codes as words along the last axis, bit by bit."""
    import numpy as np

    if word < 8 or bits == word:
        return codes
    count = codes.shape[-1]
    per = word // bits
    words = -(-count * bits // word) if dense else -(-count // per)
    at = np.arange(count)
    fields = np.array(order)[at % per] if order else at % per
    first = at * bits if dense else at // per * word + fields * bits
    stream = np.zeros((*codes.shape[:-1], words * word), "u1")
    for bit in range(bits):
        stream[..., first + bit] = codes >> bit & 1
    return np.packbits(stream, axis=-1, bitorder="little").view(f"<u{word // 8}")


def _grid(encoding: TensorEncoding, entries: Array) -> Array:
    """Entries in the shape in which they are stored."""
    import numpy as np

    grid, part = encoding.grid, encoding.parts[encoding.grid.role]
    entries = entries.repeat(grid.repeated, axis=-2)
    if grid.swizzled:
        rows, columns = entries.shape[-2:]
        matrices = entries.reshape(-1, rows, columns)
        out = np.zeros((len(matrices), prod(part.shape[-2:])), entries.dtype)
        wide = -(-columns // 4)
        for i in range(rows):
            for j in range(columns):
                at = ((i // 128) * wide + j // 4) * 512 + i % 32 * 16 + i % 128 // 32 * 4 + j % 4
                out[:, at] = matrices[:, i, j]
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
        tiny = (exponent + 6 <= 0) | (scales == 0)
        code = np.where(tiny, scales.astype("f8") * 512, normal)
        return np.where(nan, 0x7F, np.nan_to_num(code)).astype("u1")
    if dtype == "bfloat16":
        raw = scales.view("<u4") >> 16
    else:
        raw = scales.view("<u4") if dtype == "float32" else scales.astype("<f2").view("<u2")
    quiet = {"float32": 0x7FC00000, "bfloat16": 0x7FC0, "float16": 0x7E00}[dtype]
    return np.where(nan, quiet, raw).astype(carrier(dtype))
