"""The numbers of a layout, plainly: the one reference that every codec is checked against.

It shares with decoding what a layout says and the arithmetic of shapes, and nothing else: codes are
read bit by bit, the place of every entry is worked out for every number, and each step is computed
in float64, where products of floats of 24 bits are exact and sums and quotients are rounded so
finely that rounding again is rounding once (Figueroa 1995), and then rounded to float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from ...core.spec import BITS, Spec
from ...elements.raw import carrier
from .geometry import Extents, geometry
from .layout import ElementType, Field, Grid, NumberLayout, Packing, Term

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

# numbers that are worked out together
_AT_A_TIME = 1 << 16
_QUIET = {"float32": 0x7FC00000, "bfloat16": 0x7FC0, "float16": 0x7E00}


def reference(
    layout: NumberLayout, specs: Mapping[str, Spec], arrays: Mapping[str, Array], dtype: str
) -> Array:
    """All numbers of whole parts, raw elements of numpy both. OpError as `geometry`."""
    import numpy as np

    geo = geometry(layout, specs)
    out = np.empty(geo.full, carrier(dtype))
    if not out.size:
        return out.reshape(geo.shape)
    rows = geo.full[-2]
    # float64 of a few rows at a time
    step = max(1, _AT_A_TIME // max(1, geo.full[-1]))
    with np.errstate(all="ignore"):
        for at in np.ndindex(geo.full[:-2]):
            codes = _all_codes(geo, arrays, at)
            entries = {grid: _entries(geo, grid, arrays, at) for grid in layout.grids()}
            for low in range(0, rows, step):
                part = slice(low, min(low + step, rows))
                numbers = _numbers(geo, arrays, entries, codes[part], part)
                out[at][part] = _rounded(numbers, dtype)
    return out.reshape(geo.shape)


def _all_codes(geo: Extents, arrays: Mapping[str, Array], at: tuple[int, ...]) -> Any:
    """The codes of one matrix."""
    layout, (rows, columns) = geo.layout, geo.full[-2:]
    raw, dtype = arrays[layout.role], geo.spec(layout.role).dtype
    if isinstance(layout.codes, Field):
        packed = raw.reshape(*geo.full[:-2], rows, -1, layout.record.nbytes)[at]
        return _field(packed, layout.codes)[:, :columns]
    if layout.flat:
        return _codes(raw.reshape(1, -1), layout.codes, dtype, False)[:, :columns]
    inner = 3 if layout.codes.run else 2
    matrix = raw.reshape(*geo.full[:-2], *(1, 1, 1, *raw.shape)[-inner:])[at]
    matrix = matrix.reshape(matrix.shape[0], -1)
    return _codes(matrix, layout.codes, dtype, layout.codes.transposed)[:rows, :columns]


def _numbers(
    geo: Extents,
    arrays: Mapping[str, Array],
    entries: Mapping[Grid, Array],
    codes: Any,
    rows: slice,
) -> Any:
    """The float32 numbers of some rows of one matrix, as float64."""
    layout = geo.layout
    numbers: Any = _values(layout.elements, arrays).take(codes, mode="clip")
    if layout.zero is not None:
        numbers = numbers - _spread(geo, layout.zero, arrays, entries, rows)
    if layout.scale:
        numbers = _single(numbers * _chain(geo, layout.scale, arrays, entries, rows))
    if layout.after is not None:
        numbers = _single(numbers * layout.after)
    if layout.less:
        numbers = _single(numbers - _chain(geo, layout.less, arrays, entries, rows))
    return numbers


def _chain(
    geo: Extents,
    terms: tuple[Term, ...],
    arrays: Mapping[str, Array],
    entries: Mapping[Grid, Array],
    rows: slice,
) -> Any:
    found: Any = None
    for how, what in terms:
        step: Any = what
        if isinstance(what, Grid):
            step = _spread(geo, what, arrays, entries, rows)
        if found is None:
            found = step
        else:
            found = _single(
                found * step if how == "*" else found / step if how == "/" else found + step
            )
    return found


def _spread(
    geo: Extents,
    grid: Grid,
    arrays: Mapping[str, Array],
    entries: Mapping[Grid, Array],
    rows: slice,
) -> Array:
    """The entry of every number of some rows of a matrix, or of the rows where columns share it."""
    import numpy as np

    high, wide = geo.block(grid)
    row = np.arange(rows.start, rows.stop) // high if high else np.zeros(1, "i8")
    if grid.index:
        column = arrays[grid.index].astype("i8")
    else:
        column = np.arange(geo.full[-1]) // wide if wide else np.zeros(1, "i8")
    return entries[grid].take(row, 0).take(column, 1)


def _entries(geo: Extents, grid: Grid, arrays: Mapping[str, Array], at: tuple[int, ...]) -> Array:
    """The entries of a grid for one matrix, a row and a column for each block, as float64."""
    import numpy as np

    raw, dtype, elements = arrays[grid.role], geo.spec(grid.role).dtype, grid.elements
    if grid.field is not None:
        packed = raw.reshape(*geo.full[:-1], -1, geo.layout.record.nbytes)[at]
        if elements is not None:
            return _values(elements, arrays)[_field(packed, grid.field)]
        size = BITS[grid.field.dtype] // 8
        taken = np.ascontiguousarray(packed[..., grid.field.at : grid.field.at + size])
        return _widened(taken.view(f"<u{size}").reshape(len(packed), -1), grid.field.dtype)
    if geo.layout.flat:
        matrix = raw.reshape(1, -1)
    else:
        matrix = raw.reshape(geo.form(grid))[at if grid.leading else (0,) * len(at)]
    if grid.swizzled:
        # 512 bytes for each tile of 128 rows and 4 columns
        down, across = (n // t for n, t in zip(matrix.shape, grid.tile, strict=True))
        i, j = np.arange(down * 128)[:, None], np.arange(across * 4)
        place = (i // 128 * across + j // 4) * 512 + i % 32 * 16 + i % 128 // 32 * 4 + j % 4
        matrix = matrix.reshape(-1)[place]
    elif grid.packing is not None:
        matrix = _codes(matrix, grid.packing, dtype, grid.transposed)
    elif grid.transposed:
        matrix = matrix.T
    if elements is not None:
        return _values(elements, arrays)[matrix]
    found: Array = _widened(matrix, grid.byte if dtype == "uint8" else dtype)
    return found


def _codes(words: Any, packing: Packing, dtype: str, transposed: bool) -> Any:
    """The codes of a stored matrix of words, in the rows and columns of the numbers."""
    import numpy as np

    matrix = words.T if transposed else words
    word = BITS[dtype]
    if word == packing.bits and not packing.plus:
        return matrix
    lines = np.ascontiguousarray(matrix if packing.axis == -1 else matrix.T)
    per = word // packing.bits
    if packing.plus and not packing.dense:
        lines = lines + lines.dtype.type(sum(packing.plus << packing.bits * i for i in range(per)))
    bits = np.unpackbits(lines.view("u1"), axis=-1, bitorder="little")
    if packing.dense:
        count = bits.shape[-1] // packing.bits
        fields: Any = bits[:, : count * packing.bits].reshape(len(lines), count, packing.bits)
    else:
        each = bits.reshape(len(lines), -1, word)[..., : per * packing.bits]
        fields = each.reshape(len(lines), -1, per, packing.bits)
        fields = fields[:, :, list(packing.order or range(per))]
        fields = fields.reshape(len(lines), -1, packing.bits)
    codes = (fields.astype("u2") << np.arange(packing.bits, dtype="u2")).sum(-1)
    if packing.plus and packing.dense:
        codes = codes + packing.plus & (1 << packing.bits) - 1
    return codes if packing.axis == -1 else codes.T


def _field(packed: Array, field: Field) -> Array:
    """The codes of records [rows, records, nbytes] as [rows, records * count]."""
    import numpy as np

    codes = np.zeros((*packed.shape[:2], field.count), "u1")
    for piece in field.pieces:
        taken = packed[..., list(piece.bytes)] >> np.array(piece.shifts, "u1")
        codes |= (taken & (1 << piece.bits) - 1) << piece.left
    return codes.reshape(len(packed), -1)


def _values(elements: ElementType, arrays: Mapping[str, Array]) -> Array:
    if elements.part:
        return _widened(arrays[elements.part].reshape(-1), "float32")
    return _table(elements)


@cache
def _table(elements: ElementType) -> Array:
    import numpy as np

    return np.array(elements.values())


def _widened(raw: Array, dtype: str) -> Array:
    """Raw elements as float64."""
    import numpy as np

    if dtype in ("float32", "float16"):
        return np.ascontiguousarray(raw).view(f"<f{raw.itemsize}").astype("f8")
    if dtype == "bfloat16":
        return (raw.astype("<u4") << 16).view("<f4").astype("f8")
    if dtype == "float8_e8m0fnu":
        return np.where(raw == 255, np.nan, 2.0 ** (raw.astype("f8") - 127))
    return _table(ElementType(8, dtype=dtype))[raw]


def _single(numbers: Any) -> Any:
    return numbers.astype("<f4").astype("f8")


def _rounded(numbers: Array, dtype: str) -> Array:
    """float32 numbers as raw elements, to the nearest, ties to even; NaN as the quiet one."""
    import numpy as np

    single = np.ascontiguousarray(numbers, "<f4")
    if dtype == "bfloat16":
        bits = single.view("<u4")
        # what NaN overflows to is replaced below
        raw = (bits + np.uint32(0x7FFF) + (bits >> 16 & 1) >> 16).astype("<u2")
    else:
        raw = single.view("<u4") if dtype == "float32" else single.astype("<f2").view("<u2")
    found: Array = np.where(np.isnan(single), raw.dtype.type(_QUIET[dtype]), raw)
    return found
