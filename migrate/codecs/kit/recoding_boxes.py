"""Boxes of parts made of boxes of other parts, and what of it cannot be exact.

Codes are looked up, two at a time where a byte holds two; scales are taken apart into powers of two
where these move between codes and scales. All of it is numpy: there is less arithmetic than a copy
to a device takes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias

from ...core.errors import OpError
from ...core.spec import coordinates
from ...elements.raw import carrier
from .box_decoding import stored_entries
from .code_tables import DEEPEST, HELP, CodeLookup, code_tables
from .layout import ElementType, Packing
from .recoding import Chain, Recoding, entry_values, least_power, most_power, stands_for
from .stored_scales import as_stored
from .tables import narrowed, values, widened
from .unpacking import codes as unpacked

if TYPE_CHECKING:
    import numpy as np

    from ...ops.base import Box, Meter

    Array: TypeAlias = "np.ndarray[Any, Any]"

# what stands for the exponent of a scale that is NaN
NO_POWER = -(1 << 15)


def recode(
    path: Recoding,
    arrays: Mapping[str, Array],
    role: str,
    box: Box,
    out: Array,
    meter: Meter | None = None,
    survey: Array | None = None,
) -> None:
    """Fills `out`, raw elements, with `box` of a part, from the boxes that `Recoding.needs` names.

    `survey` is what `survey_powers` found, where the path is `surveyed`. OpError M406 for the first
    code or scale that the target cannot hold, with its index and value.
    """
    import numpy as np

    if role == path.target.layout.role:
        _codes(path, arrays, box, out)
        if meter is not None:
            # nothing but the sign of a zero may have gone
            meter.add(np.empty(0), np.empty(0))
    elif role == path.grid.role:
        _entries(path, arrays, box, out, survey)
    elif path.path == "split":
        _whole_of_powers(path, survey, out)
    else:
        _whole(path, arrays, out, meter)


# codes


def _codes(path: Recoding, arrays: Mapping[str, Array], box: Box, out: Array) -> None:
    import numpy as np

    full = path.boxes.of_codes(box)
    shape = tuple(b - a for a, b in full)
    if not prod(shape):
        return
    source, packing = path.source, path.source.layout.codes
    if not isinstance(packing, Packing):
        raise TypeError(packing)
    words, dtype = arrays[source.layout.role], source.spec(source.layout.role).dtype
    levels = _levels(path, arrays, full)
    mine = path.boxes.packing
    direct = (
        mine.bits == 8 == path.boxes.word and out.flags.c_contiguous and out.size == prod(shape)
    )
    made = out.reshape(-1, shape[-1]) if direct else np.empty((prod(shape[:-1]), shape[-1]), "u1")
    tables = code_tables(
        source.layout.elements, path.target.layout.elements, path.shift, path.coarse
    )
    if levels is not None:
        level = int(levels.max())
        # where all scales of a block agree, so do the tables
        if level == levels.min() and (tables[level] >= 0).all():
            tables, levels = tables[level : level + 1], None
    held = source.codes_held(full)
    lookup = CodeLookup(path, tables, levels, full)
    if packing == Packing(4, packing.dtypes, run=packing.run) and held.columns == full[-1]:
        pairs = words.dtype.itemsize == 1 and packing.word(dtype) == 8 and not shape[-1] % 2
    else:
        pairs = False
    if pairs and lookup.in_pairs:
        lookup.pairs(np.ascontiguousarray(words).reshape(len(made), -1), made)
    else:
        found = _unpacked(path, words, packing, full)
        lookup.single(np.ascontiguousarray(found).reshape(len(made), -1), made)
    if not direct:
        path.boxes.put_codes(made.reshape(shape), full, box, out)


def _unpacked(path: Recoding, words: Array, packing: Packing, full: Box) -> Array:
    """The codes of a box of numbers, one an element."""
    source = path.source
    lacking = len(full) + bool(packing.run) - words.ndim
    found: Array = unpacked(
        words.reshape((1,) * lacking + words.shape),
        packing,
        source.spec(source.layout.role).dtype,
        packing.transposed,
    )
    cut = tuple(
        slice(low - first, high - first)
        for (low, high), (first, _) in zip(full[-2:], source.codes_held(full), strict=True)
    )
    return found[..., cut[0], cut[1]]


def _levels(path: Recoding, arrays: Mapping[str, Array], full: Box) -> Array | None:
    """How far below the headroom the codes of each cell of each row of a box are shifted."""
    import numpy as np

    if not path.coarse:
        return None
    wider = path.on_tiles(full)
    alike = _alike(path, arrays, wider)
    powers = _powers(path, arrays, wider, alike)
    chosen = _chosen(path, _reduced(path, powers, wider, np.maximum))
    was, now = path.tiles
    cell = min(was[1], now[1])
    (top, bottom), (left, right) = full[-2:]
    rows = np.arange(top, bottom)
    columns = np.arange(left // cell, -(-right // cell)) * cell

    def at(found: Array, tile: tuple[int, int]) -> Array:
        # rows last: whole ones are copied
        for axis, places in ((-1, columns), (-2, rows)):
            index = places // tile[axis] - wider[axis][0] // tile[axis]
            if not np.array_equal(index, np.arange(found.shape[axis])):
                found = found.take(index, axis)
        return found

    own, none = at(powers, was), powers.min() == NO_POWER
    # half of what NaN has is below all others
    known = np.maximum(own, NO_POWER // 2) if none else own
    level = at((chosen + path.shift).astype("i2"), now) - known
    level = np.clip(level, 0, DEEPEST, out=level).astype("u1")
    if none:
        level[own == NO_POWER] = DEEPEST + 1
    if alike is not None:
        # codes whose scale is that of the block stay what they are
        level[at(alike, now)] = 0
    heights = tuple(b - a for a, b in full[:-1])
    return np.broadcast_to(level, (*heights, len(columns))).reshape(-1, len(columns))


# scales


def _raw(path: Recoding, arrays: Mapping[str, Array], full: Box) -> Array:
    """The entries of the source for a box of numbers, [..., rows, columns], as they are stored."""
    grid = path.chains[0].grid
    found: Array = stored_entries(path.source, grid, arrays[grid.role], full)
    return found


def _first(path: Recoding, full: Box) -> list[int]:
    """Where the entries for a box of numbers begin among all."""
    grid = path.chains[0].grid
    held = path.source.entries_held(grid, full)
    lead = [low if grid.leading else 0 for low, _ in full[:-2]]
    return [*lead, held.rows[0], held.columns[0]]


def _powers(
    path: Recoding, arrays: Mapping[str, Array], full: Box, alike: Array | None = None
) -> Array:
    """The exponents of the source's entries for a box of numbers; M406 for any that is not a
    power of two, except in blocks of the target whose entries are all `alike`.
    """
    import numpy as np

    grid, raw = path.chains[0].grid, _raw(path, arrays, full)
    dtype = stands_for(grid, path.source)
    found, odd = powers_of(raw, dtype)
    if alike is not None and odd.any():
        odd &= ~_of_source(path, alike, full)
    if odd.any():
        index = coordinates(int(odd.reshape(-1).argmax()), odd.shape)
        value = float(widened(np.ascontiguousarray(raw), dtype)[index])
        _refuse_entry(path, grid.role, index, full, value, "and no power of two")
    return found


def _alike(path: Recoding, arrays: Mapping[str, Array], full: Box) -> Array | None:
    """In which blocks of the target all entries of the source are the same, so that they stay and
    so do codes; None where codes are others in any case.
    """
    import numpy as np

    if not path.same_codes:
        return None
    raw = _raw(path, arrays, full)
    least, most = (_reduced(path, raw, full, f) for f in (np.minimum, np.maximum))
    number = widened(np.ascontiguousarray(most), stands_for(path.chains[0].grid, path.source))
    return np.asarray((least == most) & ~np.isnan(number))


def _of_source(path: Recoding, found: Array, full: Box) -> Array:
    """What is said of blocks of the target, for each block of the source in a box."""
    import numpy as np

    for axis in (-2, -1):
        was, now = (tile[axis] for tile in path.tiles)
        low, high = full[axis]
        blocks = np.arange(low // was, -(-high // was))
        found = found.take(np.maximum(blocks * was, low) // now - low // now, axis)
    return found


def powers_of(raw: Array, dtype: str) -> tuple[Array, Array]:
    """The exponents of raw scales, `NO_POWER` for NaN, and which are neither."""
    import numpy as np

    if dtype == "float8_e8m0fnu":
        found = raw.astype("i2")
        found -= 127
        none = raw == 255
        if none.any():
            found[none] = NO_POWER
        return found, np.zeros(raw.shape, "?")
    numbers = widened(np.ascontiguousarray(raw), dtype)
    mantissa, exponent = np.frexp(numbers)
    nan = np.isnan(numbers)
    made = np.where(nan, NO_POWER, exponent - 1).astype("i2")
    return made, (mantissa != 0.5) & ~nan


def _refuse_entry(
    path: Recoding, role: str, index: Sequence[int], full: Box, value: float, why: str
) -> None:
    place = [i + first for i, first in zip(index, _first(path, full), strict=True)]
    raise OpError(
        "M406",
        f"recode: the {role} at {place} is {value:.9g}, {why}",
        help=HELP,
    )


def _reduced(path: Recoding, entries: Array, full: Box, how: Any) -> Array:
    """The largest entry, or what `how` takes of several, in each block of the target, for a box of
    whole blocks.
    """
    import numpy as np

    for axis in (-2, -1):
        was, now = (tile[axis] for tile in path.tiles)
        low, high = full[axis]
        blocks = np.arange(low // now, -(-high // now))
        places = blocks * now // was - low // was
        if now <= was:
            entries = entries.take(places, axis)
        elif low % now == high % now == now % was == 0:
            each, count = now // was, entries.ndim + axis
            shape = entries.shape
            runs = entries.reshape(*shape[:count], len(blocks), each, *shape[count + 1 :])
            entries = how.reduce(runs, count + 1)
        else:
            entries = how.reduceat(entries, places, axis)
    return entries


def _chosen(path: Recoding, largest: Array) -> Array:
    """The exponents of scales of blocks in which these are the largest powers."""
    import numpy as np

    dtype = stands_for(path.grid, path.target)
    made = np.maximum(largest.astype("i4") - path.shift, least_power(dtype))
    return np.where(largest == NO_POWER, 0, made)


def _entries(
    path: Recoding, arrays: Mapping[str, Array], box: Box, out: Array, survey: Array | None
) -> None:
    import numpy as np

    entries = path.boxes.of_entries(path.grid.role, box)
    shape = tuple(b - a for a, b in entries)
    if not prod(shape):
        out[...] = 0
        return
    full = path.of_entries(entries)
    role, spec = path.grid.role, path.parts[path.grid.role]
    if path.path == "split":
        made = _split(path, arrays, full, survey)
    elif path.coarse:
        alike = _alike(path, arrays, full)
        powers = _powers(path, arrays, full, alike)
        chosen = _chosen(path, _reduced(path, powers, full, np.maximum))
        if alike is not None:
            chosen[alike] = 0
        dtype = stands_for(path.grid, path.target)
        if chosen.max() > most_power(dtype):
            index = coordinates(int(chosen.argmax()), chosen.shape)
            raise OpError(
                "M406",
                f"recode: the scale of block {[*index]} from {[low for low, _ in full]} on would "
                f"be 2^{int(chosen.max())}, which {dtype} cannot hold",
                help=HELP,
            )
        made = as_stored(np.ldexp(np.float32(1), chosen), dtype)
        if alike is not None and alike.any():
            kept = _reduced(path, _shifted(path, arrays, full), full, np.maximum)
            made = np.where(alike, kept, made)
    else:
        made = _shifted(path, arrays, full)
        made = _spread(path, made, full)
    made = np.broadcast_to(made.astype(carrier(spec.dtype)), shape)
    path.boxes.put_entries(role, np.ascontiguousarray(made), box, out)


def _spread(path: Recoding, entries: Array, full: Box) -> Array:
    """Entries of the source for each block of the target, whose blocks lie within the other's."""
    import numpy as np

    for axis in (-2, -1):
        was, now = (tile[axis] for tile in path.tiles)
        low, high = full[axis]
        if was != now:
            blocks = np.arange(low // now, -(-high // now))
            entries = entries.take(blocks * now // was - low // was, axis)
    return entries


def _shifted(path: Recoding, arrays: Mapping[str, Array], full: Box) -> Array:
    """The source's entries as the target stores them."""
    import numpy as np

    raw, one = _raw(path, arrays, full), path.chains[0].grid
    was, now = stands_for(one, path.source), stands_for(path.grid, path.target)
    if was == now and not path.shift and not path.stricter:
        return raw
    given = widened(np.ascontiguousarray(raw), was)
    with np.errstate(all="ignore"):
        wanted = np.ldexp(given, -path.shift)
    made = as_stored(wanted, now)
    back = widened(made, now)
    # a shift is undone to see whether it lost anything
    with np.errstate(all="ignore"):
        lost = np.ldexp(back.astype("f8"), path.shift) != given.astype("f8")
    lost &= ~(np.isnan(given) & np.isnan(back))
    above = given >= 0 if path.chains[1].grid.zeros else given > 0
    for asked, why, odd in (
        (path.asks_positive, "no positive number", ~(np.isfinite(given) & above)),
        (path.asks_powers, "no power of two", powers_of(made, now)[1]),
    ):
        if asked and odd.any():
            index = coordinates(int(odd.reshape(-1).argmax()), odd.shape)
            _refuse_entry(path, one.role, index, full, float(given[index]), f"and {why}")
    if lost.any():
        index = coordinates(int(lost.reshape(-1).argmax()), lost.shape)
        value = float(given[index])
        holds = "holds powers of two alone" if now == "float8_e8m0fnu" else "does not hold that"
        shifted = f", times 2^{-path.shift}" if path.shift else ""
        _refuse_entry(path, one.role, index, full, value, f"and {now} {holds}{shifted}")
    return made


# a scale of all numbers


def survey_powers(path: Recoding, box: Box, array: Array, known: Array | None = None) -> Array:
    """The largest and the smallest power of two among the scales of each matrix, or of all, after
    one more box of the stored scales; `NO_POWER` and less than none where there is none yet.
    """
    import numpy as np

    grid, geo = path.chains[0].grid, path.source
    lead = geo.full[:-2] if grid.leading else (1,) * len(geo.full[:-2])
    if known is None:
        known = np.stack([np.full(lead, NO_POWER, "i2"), np.full(lead, -NO_POWER - 1, "i2")])
    if not array.size:
        return known
    form = geo.form(grid)
    stored = geo.spec(grid.role).shape
    powers, odd = powers_of(array, stands_for(grid, geo))
    rows, columns = (-(-n // t) for n, t in zip(geo.full[-2:], path.tiles[0], strict=True))
    least = np.where(powers == NO_POWER, -NO_POWER - 1, powers)
    if not odd.any() and form[-2:] == (rows, columns) and (known[0].size == 1 or stored == form):
        # all of them are entries, of one matrix or of several in turn
        here: tuple[Any, ...] = (...,)
        axes = None
        if known[0].size > 1:
            here, axes = tuple(slice(a, b) for a, b in box[:-2]), (-2, -1)
        for number, found in enumerate((powers.max(axes), least.min(axes))):
            at = (number, *here)
            place = known[at]
            (np.minimum if number else np.maximum)(place, found, out=place)
        return known
    # which entries these are: the index in the stored part, then in the grid
    grids = np.meshgrid(*(np.arange(a, b) for a, b in box), indexing="ij", sparse=True)
    flat = np.zeros((1,) * array.ndim, "i8")
    for place, length in zip(grids, stored, strict=True):
        flat = flat * length + place
    flat = np.broadcast_to(flat, array.shape).reshape(-1)
    matrix, inner = np.divmod(flat, form[-2] * form[-1])
    if grid.swizzled:
        across = form[-1] // grid.tile[1]
        tile, within = np.divmod(inner, 512)
        row = tile // across * 128 + within % 16 // 4 * 32 + within // 16
        column = tile % across * 4 + within % 4
    else:
        row, column = np.divmod(inner, form[-1])
        if grid.transposed:
            row, column = column, row
    inside = (row < rows) & (column < columns)
    if (wrong := odd.reshape(-1) & inside).any():
        first = int(wrong.argmax())
        index = [*coordinates(int(matrix[first]), lead), int(row[first]), int(column[first])]
        value = float(widened(array.reshape(-1)[first : first + 1], stands_for(grid, geo))[0])
        raise OpError(
            "M406",
            f"recode: the {grid.role} at {index} is {value:.9g}, and no power of two",
            help=HELP,
        )
    np.maximum.at(known[0, ...].reshape(-1), matrix[inside], powers.reshape(-1)[inside])
    np.minimum.at(known[1, ...].reshape(-1), matrix[inside], least.reshape(-1)[inside])
    return known


def tells_zeros(path: Recoding, survey: Array) -> bool:
    """Whether a scale may be so small that its block must have no number but zero."""

    far = survey[1, ...].astype("i4") - _whole_powers(path, survey)
    return bool((far < least_power(stands_for(path.grid, path.target))).any())


def _whole_powers(path: Recoding, survey: Array | None) -> Array:
    """The exponent of the scale of all numbers, of each matrix or of all."""
    import numpy as np

    if survey is None:
        if path.source.spec(path.chains[0].grid.role).numel:
            raise ValueError(f"{path.target.layout.name}: nothing is known of the whole tensor")
        # of no scales none is the largest
        survey = survey_powers(path, (), np.empty(0, "u1"))
    whole = path.chains[1].whole
    per_matrix = whole is None or whole.leading
    largest = survey[0, ...]
    if not per_matrix:
        largest = largest.max(keepdims=True, initial=NO_POWER)
    top = most_power(stands_for(path.grid, path.target))
    made = np.maximum(largest.astype("i4") - top, -126)
    return np.where(largest == NO_POWER, 0, made)


def _split(path: Recoding, arrays: Mapping[str, Array], full: Box, survey: Array | None) -> Array:
    """The scales of blocks, each the power of its block over that of all numbers."""
    import numpy as np

    powers, whole = _powers(path, arrays, full), _whole_powers(path, survey)
    lead = tuple(
        slice(a, b) if n > 1 else slice(None)
        for (a, b), n in zip(full[:-2], whole.shape, strict=True)
    )
    found = powers.astype("i4") - whole[lead][..., None, None]
    dtype = stands_for(path.grid, path.target)
    low = least_power(dtype)
    nan = powers == NO_POWER
    if path.asks_positive and nan.any():
        index = coordinates(int(nan.reshape(-1).argmax()), nan.shape)
        role = path.chains[0].grid.role
        _refuse_entry(path, role, index, full, float("nan"), "and no positive number")
    small = (found < low) & ~nan
    if small.any():
        # whose codes are all zero may have any scale
        small &= _has_numbers(path, arrays, full)
    if small.any():
        index = coordinates(int(small.reshape(-1).argmax()), small.shape)
        largest = int(whole[lead].max()) + most_power(dtype)
        _refuse_entry(
            path, path.chains[0].grid.role, index, full, float(np.ldexp(1.0, int(powers[index]))),
            f"more than 2^{most_power(dtype) - low} below the largest, 2^{largest}",
        )  # fmt: skip
    made = as_stored(np.ldexp(np.float32(1), np.maximum(found, low)), dtype)
    if nan.any():
        made = np.where(nan, as_stored(np.full(1, np.nan, "f4"), dtype), made)
    return _spread(path, made, full)


def _has_numbers(path: Recoding, arrays: Mapping[str, Array], full: Box) -> Array:
    """Whether any number of each block of the source is not zero."""
    import numpy as np

    source, packing = path.source, path.source.layout.codes
    if not isinstance(packing, Packing):
        raise TypeError(packing)
    codes = _unpacked(path, arrays[source.layout.role], packing, full)
    some: Array = (values(source.layout.elements) != 0)[codes]
    for axis in (-2, -1):
        tile, (low, high) = path.tiles[0][axis], full[axis]
        places = np.arange(low // tile, -(-high // tile)) * tile - low
        some = np.logical_or.reduceat(some, np.maximum(places, 0), axis)
    return some


def _whole_of_powers(path: Recoding, survey: Array | None, out: Array) -> None:
    import numpy as np

    powers, chain = _whole_powers(path, survey), path.chains[1]
    spelled = spell(chain, np.ldexp(1.0, powers))
    dtype = stands_for(chain.grid, path.target)
    entries = np.ldexp(np.float32(1), np.arange(least_power(dtype), most_power(dtype) + 1))
    with np.errstate(all="ignore"):
        made = scales(chain, entries, spelled.reshape(-1, 1))
        wanted = np.ldexp(entries, powers.reshape(-1, 1))
    if not np.array_equal(made, wanted):
        raise OpError(
            "M406",
            f"recode: {path.target.layout.name} has no scale of all numbers that is 2^"
            f"{int(powers.reshape(-1)[0])}, {spelled.reshape(-1)[0]:.9g} is not in float32",
            help=HELP,
        )
    _put_whole(path, spelled, out)


def _put_whole(path: Recoding, spelled: Array, out: Array) -> None:
    import numpy as np

    whole = path.chains[1].whole
    dtype = path.parts[whole.role].dtype if whole is not None else "float32"
    stored = as_stored(spelled, dtype)
    if stored.size == out.size:
        out[...] = stored.reshape(out.shape)
    else:
        out[...] = np.broadcast_to(stored.reshape(-1)[:1], out.shape)


def spell(chain: Chain, factor: Array) -> Array:
    """What a chain stores for scales of all numbers, float64, as float32."""
    import numpy as np

    for number in chain.factors:
        # constants are reciprocals of integers, rounded to float32: 2688, 1536
        whole = round(1 / number)
        exact = float(np.float32(1 / whole)) == number
        factor = factor * whole if exact else factor / number
    with np.errstate(all="ignore"):
        found = 1 / factor if chain.how == "/" else factor
        return found.astype("f4")


def factor_of(chain: Chain, stored: Array) -> Array:
    """The scale of all numbers that a chain stores as this, in float64."""
    import numpy as np

    found = stored.astype("f8")
    with np.errstate(all="ignore"):
        if chain.how == "/":
            found = 1 / found
        for number in chain.factors:
            whole = round(1 / number)
            exact = float(np.float32(1 / whole)) == number
            found = found / whole if exact else found * number
    return found


def scales(chain: Chain, entries: Array, stored: Array) -> Array:
    """The scales, each step in float32, of entries and what is stored for all numbers."""
    import numpy as np

    found = entries * stored if chain.how == "*" else entries / stored
    for number in chain.factors:
        found = found * np.float32(number)
    return found


def _whole(path: Recoding, arrays: Mapping[str, Array], out: Array, meter: Meter | None) -> None:
    """The scale of all numbers, in the target's spelling; M406 where numbers would be others."""
    import numpy as np

    one, other = path.chains
    if one.whole is None:
        given = np.ones(1, "f4")
    else:
        dtype = path.source.spec(one.whole.role).dtype
        given = widened(np.ascontiguousarray(arrays[one.whole.role]), dtype).reshape(-1)
    wrong = ~(np.isfinite(given) & (given > 0))
    if wrong.any() and one.whole is not None:
        _refuse_whole(path, int(wrong.argmax()), given, "it is no positive number")
    made = (
        given
        if one[2:] == other[2:] and one.whole is not None
        else spell(other, factor_of(one, given))
    )
    _certify(path, given, made)
    if meter is not None:
        meter.add(factor_of(one, given), factor_of(other, made))
    _put_whole(path, made, out)


def _refuse_whole(path: Recoding, at: int, given: Array, why: str) -> None:
    whole = path.chains[0].whole
    if whole is None:
        where, value = "a scale of all numbers", ""
    else:
        index = [*coordinates(at, path.source.spec(whole.role).shape)]
        where, value = f"the {whole.role}" + (f" at {index}" if index else ""), f"{given[at]:.9g}"
    raise OpError(
        "M406",
        f"recode: {where} is {value}, {why}" if value else f"recode: {where}: {why}",
        help=HELP
        if path.exact_in
        else "`exact_in: bfloat16` asks that the numbers be the same in bfloat16, and no more",
    )


def _certify(path: Recoding, given: Array, made: Array) -> None:
    """M406 for the first scale of all numbers with which any product of a code and a scale is
    another, in float32 or what it is rounded to.
    """
    import numpy as np

    one, other = path.chains
    dtype = path.exact_in or "float32"
    entries, codes = _factors(stands_for(one.grid, path.source), path.source.layout.elements)
    products = np.empty((2, codes.size, entries.size), "f4")
    raw = np.empty(products.shape, carrier(dtype))
    for at, (old, new) in enumerate(zip(given, made, strict=True)):
        with np.errstate(all="ignore"):
            first = scales(one, entries, old) if one.whole is not None else entries
            np.multiply(codes[:, None], first, out=products[0])
            np.multiply(codes[:, None], scales(other, entries, new), out=products[1])
        narrowed(products, dtype, raw)
        differ = raw[0] != raw[1]
        if differ.any():
            i, j = coordinates(int(differ.reshape(-1).argmax()), differ.shape)
            _refuse_whole(
                path,
                at,
                given,
                f"and {new:.9g} in the other spelling: {int(differ.sum())} of {differ.size} "
                f"products of codes and scales differ in {dtype}, the first {codes[i]:g} * "
                f"{entries[j]:g}",
            )


@lru_cache(maxsize=16)
def _factors(dtype: str, elements: ElementType) -> tuple[Array, Array]:
    """The positive scales of a dtype, and the magnitudes of the codes."""
    import numpy as np

    table = values(elements)
    codes = np.unique(np.abs(table[np.isfinite(table)])).astype("f4")
    return np.array(entry_values(dtype), "f4"), codes


__all__ = ["recode", "survey_powers"]
