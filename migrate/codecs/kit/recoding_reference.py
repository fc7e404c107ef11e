"""Parts of one layout made of parts of another, plainly: what `recoding_boxes` is checked against.

It shares with that which parts there are and which shifts are taken, and nothing else: every number
is worked out in float64, in which products of a code and a scale are exact, and its code in the
other format is looked for among all of that format's numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...core.spec import BITS, Spec
from ...elements.raw import carrier
from .geometry import Extents
from .layout import ElementType, Field, Grid, NumberLayout, Packing
from .recoding import Chain, Recoding, least_power, most_power, stands_for
from .recoding_integers import IntegerRecoding, packing_of
from .reference import _all_codes as all_codes
from .reference import _entries as all_entries
from .reference import _widened as widened

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]


def recoded_parts(
    path: Recoding | IntegerRecoding, arrays: Mapping[str, Array], whole: Array | None = None
) -> dict[str, Array]:
    """role -> raw elements of each part, of whole parts of the source. `whole`: the scale of all
    numbers where these are some of them.
    """
    import numpy as np

    if isinstance(path, IntegerRecoding):
        return _every_integer(path, arrays)
    source, target = path.source, path.target
    one, other = path.chains
    lead = source.full[:-2]
    out = {role: np.zeros(spec.shape, carrier(spec.dtype)) for role, spec in path.parts.items()}
    if whole is None:
        whole = _whole_of(path, arrays)
    codes, grids = [], []
    with np.errstate(all="ignore"):
        for at in np.ndindex(lead) if source.full[-1] and source.full[-2] else ():
            given = all_codes(source, arrays, at)
            numbers = _elements(source)[given]
            entries = all_entries(source, one.grid, arrays, at)
            mine, theirs = (_spread(source, tile) for tile in path.tiles)
            if path.path == "split":
                factor = whole[at] if other.whole is not None and other.whole.leading else whole
                lowest = 2.0 ** least_power(stands_for(other.grid, target))
                made = np.fmax(entries / np.asarray(factor).reshape(-1)[0], lowest)
                made = np.where(np.isnan(entries), np.nan, made)
            elif path.coarse:
                made = _of_blocks(path, entries)
            else:
                made = entries * 2.0**-path.shift
            if not path.coarse:
                rows, columns = (
                    np.arange(-(-n // t)) * t // w
                    for n, t, w in zip(source.full[-2:], path.tiles[1], path.tiles[0], strict=True)
                )
                made = made[rows][:, columns]
            if path.path == "direct":
                scale = entries[mine[0]][:, mine[1]]
                moved = numbers * scale / made[theirs[0]][:, theirs[1]]
                # a scale without a quotient stays beside its code, unless another takes its place
                alone = np.full(numbers.shape, np.nan) if path.coarse else numbers * 2.0**path.shift
                numbers = np.where(np.isfinite(scale) & (scale != 0), moved, alone)
            # of NaN by a scale the sign means nothing
            alone = np.isnan(_elements(source)).sum() == 1
            negative = (given >= len(_elements(source)) // 2) & ~(
                np.isnan(numbers) & (alone | ~np.isnan(_elements(source)[given]))
            )
            found = _codes_of(target, numbers, negative)
            # of several NaN each stays what it is
            codes.append(given if path.same_codes and not path.coarse else found)
            grids.append(made)
    for role, copied in path.copies.items():
        # of no numbers a scale that stays in its place is what it was
        if not codes and all(how == "reshape" for how, _ in copied.moves):
            out[role][...] = arrays[copied.role].reshape(out[role].shape)
    if codes:
        _place_codes(path, np.array(codes).reshape(source.full), out[target.layout.role])
        inner = np.array(grids).reshape(*lead, *grids[0].shape)
        _place_entries(path, inner, out[other.grid.role])
    if other.whole is not None:
        spelled = _spelled(path, arrays, whole)
        stored = spelled.astype("f4").view("<u4").reshape(-1)
        found = out[other.whole.role]
        found[...] = stored.reshape(found.shape) if stored.size == found.size else stored[0]
    return out


def _elements(geo: Extents) -> Array:
    import numpy as np

    return np.array(geo.layout.elements.values())


def _spread(geo: Extents, tile: tuple[int, int]) -> tuple[Array, Array]:
    """For each row and column of a matrix the number of its entry."""
    import numpy as np

    rows, columns = (np.arange(n) // t for n, t in zip(geo.full[-2:], tile, strict=True))
    return rows, columns


def _of_blocks(path: Recoding, entries: Array) -> Array:
    """The power of two of each block of the target, from the largest that it holds."""
    import numpy as np

    (high, wide), (rows, columns) = path.tiles[1], path.source.full[-2:]
    row, column = (np.arange(n) // t for n, t in zip((rows, columns), path.tiles[0], strict=True))
    dtype = stands_for(path.grid, path.target)
    out = np.empty((-(-rows // high), -(-columns // wide)))
    for i, j in np.ndindex(out.shape):
        block = entries[np.unique(row[i * high : (i + 1) * high])]
        block = block[:, np.unique(column[j * wide : (j + 1) * wide])]
        if path.same_codes and (block == block[0, 0]).all():
            out[i, j] = block[0, 0]
            continue
        known = block[~np.isnan(block)]
        largest = known.max() if known.size else 2.0**path.shift
        out[i, j] = max(largest / 2.0**path.shift, 2.0 ** least_power(dtype))
    return out


def _codes_of(geo: Extents, numbers: Array, negative: Array) -> Array:
    """The code of each number that the elements have, by looking at all of them. Zeros and NaN are
    `negative` or not, where there are two of them.
    """
    import numpy as np

    known = _elements(geo)
    out = np.zeros(numbers.shape, "u1")
    for alike in (np.isnan(known), known == 0):
        there = np.flatnonzero(alike)
        mine = np.isnan(numbers) if np.isnan(known[there]).any() else numbers == 0
        if len(there):
            out[mine] = np.where(negative[mine], there[-1], there[0])
    for code in np.flatnonzero(~np.isnan(known) & (known != 0)):
        out[numbers == known[code]] = code
    return out


def _place_codes(path: Recoding, codes: Array, out: Array) -> None:
    """Fills `out` with codes of a byte each, packed as the target packs them."""
    packing = path.target.layout.codes
    if not isinstance(packing, Packing):
        raise TypeError(packing)
    word = path.boxes.word
    if word < 8 or word == packing.bits:
        out[...] = codes.reshape(out.shape)
        return
    per = word // packing.bits
    order = packing.order or tuple(range(per))
    lines = out.reshape(*codes.shape[:-1], -1)
    lines[...] = 0
    for number in range(codes.shape[-1]):
        field = order[number % per] * packing.bits
        lines[..., number // per] |= codes[..., number].astype(out.dtype) << field


def _place_entries(path: Recoding, entries: Array, out: Array) -> None:
    """Fills `out` with the entries of the target's grid where they are stored."""
    import numpy as np

    grid: Grid = path.grid
    raw = _raw(entries, stands_for(grid, path.target)).astype(out.dtype)
    form = path.target.form(grid)
    whole = out.reshape(form)
    raw = raw if grid.leading else raw[(slice(0, 1),) * (raw.ndim - 2)]
    for i, j in np.ndindex(raw.shape[-2:]):
        if grid.swizzled:
            across = form[-1] // grid.tile[1]
            place = (i // 128 * across + j // 4) * 512 + i % 32 * 16 + i % 128 // 32 * 4 + j % 4
            whole[..., place // form[-1], place % form[-1]] = raw[..., i, j]
        elif grid.transposed:
            whole[..., j, i] = raw[..., i, j]
        else:
            whole[..., i, j] = raw[..., i, j]


def _raw(numbers: Array, dtype: str) -> Array:
    """float64 as raw elements of a dtype that holds them, by looking for each among its numbers."""
    import numpy as np

    if dtype in ("float32", "float16"):
        width = 4 if dtype == "float32" else 2
        made = numbers.astype(f"<f{width}")
        quiet = {4: 0x7FC00000, 2: 0x7E00}[width]
        return np.where(np.isnan(numbers), quiet, made.view(f"<u{width}")).astype(f"<u{width}")
    if dtype == "bfloat16":
        bits = numbers.astype("<f4").view("<u4") >> 16
        return np.where(np.isnan(numbers), 0x7FC0, bits).astype("<u2")
    known = widened(np.arange(256, dtype="u1"), dtype)
    out = np.zeros(numbers.shape, "u1")
    for code in reversed(range(256)):
        if np.isnan(known[code]):
            out[np.isnan(numbers)] = code
        else:
            mine = numbers == known[code]
            if known[code] == 0:
                mine &= np.signbit(numbers) == np.signbit(known[code])
            out[mine] = code
    return out


def _whole_of(path: Recoding, arrays: Mapping[str, Array]) -> Array:
    """The scale of all numbers of the source, or what a split makes it; float64."""
    import numpy as np

    one = path.chains[0]
    source, lead = path.source, path.source.full[:-2]
    if path.path == "split":
        found = np.zeros(lead)
        found[...] = np.nan
        for at in np.ndindex(lead) if source.full[-1] and source.full[-2] else ():
            entries = all_entries(source, one.grid, arrays, at)
            known = entries[~np.isnan(entries)]
            found[at] = known.max() if known.size else np.nan
        return whole_of_powers(path, found)
    if one.whole is None:
        return np.ones(1)
    spec: Spec = source.spec(one.whole.role)
    return _meaning(one, widened(arrays[one.whole.role], spec.dtype).reshape(-1))


def whole_of_powers(path: Recoding, largest: Array) -> Array:
    """What a split makes the scale of all numbers, float64, of the largest scale of each matrix."""
    import numpy as np

    other = path.chains[1]
    if other.whole is None or not other.whole.leading:
        largest = np.full((1,) * largest.ndim, np.fmax.reduce(largest, axis=None, initial=np.nan))
    top = 2.0 ** most_power(stands_for(path.grid, path.target))
    return np.where(np.isnan(largest), 1.0, np.maximum(largest / top, 2.0**-126))


def _integer(number: float) -> float:
    """What a constant divides by: 2688 for its reciprocal in float32."""
    import numpy as np

    whole = round(1 / number)
    return float(whole) if float(np.float32(1 / whole)) == number else 1 / number


def _meaning(chain: Chain, stored: Array) -> Array:
    found = 1 / stored if chain.how == "/" else stored
    for number in chain.factors:
        found = found / _integer(number)
    return found


def _spelled(path: Recoding, arrays: Mapping[str, Array], whole: Array) -> Array:
    one, other = path.chains
    if one.whole is not None and one[2:] == other[2:]:
        spec = path.source.spec(one.whole.role)
        return widened(arrays[one.whole.role], spec.dtype).reshape(-1)
    found = whole
    for number in other.factors:
        found = found * _integer(number)
    return 1 / found if other.how == "/" else found


def _every_integer(path: IntegerRecoding, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """`recoded_parts` of integers."""
    import numpy as np

    source, (one, other) = path.source, path.grids
    out: dict[str, Array] = {}
    for role, spec in path.parts.items():
        if role in path.bytes_of:
            said = np.frombuffer(path.bytes_of[role], carrier(spec.dtype))
            out[role] = said.reshape(spec.shape)
        elif other.index and role == other.index:
            width = np.dtype(carrier(spec.dtype)).itemsize
            group = np.arange(source.full[-1]) // path.tiles[1][1]
            made = group.astype(f"<i{width}").view(f"<u{width}")
            out[role] = arrays[one.index] if one.index else made
        else:
            out[role] = recoded_integers(path, arrays, role)
    return out


def recoded_integers(path: IntegerRecoding, arrays: Mapping[str, Array], role: str) -> Array:
    """The codes, the scale or the zero: each integer is looked for among the other's, and so is
    each zero. Of `arrays` no more is read than this takes.
    """
    import numpy as np

    source, kept, zero = path.source, path.target.layout, path.source.layout.zero
    (one, other), spec = path.grids, path.parts[role]
    out = np.zeros(spec.shape, carrier(spec.dtype))
    rows, columns = (
        np.arange(count) * now // was
        for count, was, now in zip(path.counts(other), *path.tiles, strict=True)
    )

    def codes(at: tuple[int, ...]) -> Array:
        given: Any = np.zeros(source.full[-2:], "u1")
        if given.size:
            given = all_codes(source, arrays, at)
        return _code_of(kept.elements, _elements(source)[given] + path.shift)

    def scales(at: tuple[int, ...]) -> Array:
        raw = _raw_entries(source, one, arrays, at)
        found: Array = (raw.T if one.transposed else raw)[rows][:, columns]
        return found

    def zeros(at: tuple[int, ...]) -> Array:
        entries: Any = np.zeros((len(rows), len(columns)))
        if zero is not None and entries.size:
            entries = all_entries(source, zero, arrays, at)[rows][:, columns]
        return _code_of(_elements_of(kept.zero), entries + path.shift)

    lead = [*np.ndindex(source.full[:-2])]
    if isinstance(kept.codes, Field):
        _store_records(kept, kept.codes, [*map(codes, lead)], [*map(scales, lead)], out)
    elif role == kept.role:
        packing = packing_of(kept)
        _store([*map(codes, lead)], packing, packing.transposed, out)
    elif role == other.role:
        made = lead if other.leading else lead[:1]
        _store([*map(scales, made)], None, other.transposed, out)
    elif kept.zero is not None:
        _store([*map(zeros, lead)], kept.zero.packing, kept.zero.transposed, out)
    return out


def _elements_of(grid: Grid | None) -> ElementType:
    if grid is None or grid.elements is None:
        raise TypeError(grid)
    return grid.elements


def _raw_entries(
    geo: Extents, grid: Grid, arrays: Mapping[str, Array], at: tuple[int, ...]
) -> Array:
    """The entries of a matrix as they are stored."""
    import numpy as np

    raw = arrays[grid.role]
    if grid.field is None:
        matrix: Array = raw.reshape(geo.form(grid))[at if grid.leading else (0,) * len(at)]
        return matrix
    width = BITS[grid.field.dtype] // 8
    blocks = raw.reshape(*geo.full[:-1], -1, geo.layout.record.nbytes)[at]
    taken = np.ascontiguousarray(blocks[..., grid.field.at : grid.field.at + width])
    return taken.view(f"<u{width}")[..., 0]


def _store_records(
    layout: NumberLayout, field: Field, codes: list[Array], scales: list[Array], out: Array
) -> None:
    """Fills `out` with records of matrices of codes and of raw scales, bit by bit."""
    import numpy as np

    (grid,) = layout.grids()
    blocks = out.reshape(len(codes), -1, layout.record.nbytes)
    at = grid.field.at if grid.field is not None else 0
    for matrix, entries, made in zip(codes, scales, blocks, strict=True):
        given = matrix.reshape(-1, layout.record.codes)
        entry = np.ascontiguousarray(entries).reshape(-1, 1).view("u1")
        made[:, at : at + entry.shape[1]] = entry
        for bits in field.pieces:
            for i, (byte, shift) in enumerate(zip(bits.bytes, bits.shifts, strict=True)):
                for bit in range(bits.bits):
                    made[:, byte] |= (given[:, i] >> (bits.left + bit) & 1) << (shift + bit)


def _code_of(elements: ElementType, integers: Array) -> Array:
    """The code of each integer, by looking for it among the sorted integers of all codes."""
    import numpy as np

    known = np.array(elements.values())
    order = np.argsort(known)
    found = order[np.searchsorted(known[order], integers).clip(0, len(known) - 1)]
    return np.where(known[found] == integers, found, 0).astype("u1")


def _store(matrices: list[Array], packing: Packing | None, transposed: bool, out: Array) -> None:
    """Fills `out` with matrices of codes or entries as they are stored; the rest is padding."""
    import numpy as np

    if packing is not None and packing.bits != out.itemsize * 8:
        matrices = [_words(matrix, packing, out) for matrix in matrices]
    made = np.array([matrix.T if transposed else matrix for matrix in matrices])
    if made.size == out.size:
        out[...] = made.reshape(out.shape)
        return
    for at, matrix in zip(np.ndindex(out.shape[:-2]), made, strict=True):
        out[at][: matrix.shape[0], : matrix.shape[1]] = matrix


def _words(codes: Array, packing: Packing, out: Array) -> Array:
    """Codes of a byte each in words, bit by bit."""
    import numpy as np

    lines = codes if packing.axis == -1 else codes.T
    word, bits, plus = out.itemsize * 8, packing.bits, packing.plus
    per = word // bits
    count = -(-lines.shape[1] * bits // word) if packing.dense else -(-lines.shape[1] // per)
    words = np.zeros((len(lines), count), out.dtype)
    for number in range(lines.shape[1]):
        code = lines[:, number].astype("i2")
        if packing.dense:
            code = (code - plus) % (1 << bits)
        field = packing.order[number % per] if packing.order else number % per
        first = number * bits if packing.dense else number // per * word + field * bits
        for bit in range(bits):
            at, shift = divmod(first + bit, word)
            words[:, at] |= ((code >> bit) & 1).astype(out.dtype) << out.dtype.type(shift)
    if plus and not packing.dense:
        # what borrows takes it from the next code
        words -= out.dtype.type(sum(plus << (bits * i) for i in range(per)))
    return words if packing.axis == -1 else words.T
