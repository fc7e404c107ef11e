"""Boxes of parts of integers made of boxes of other such parts, and what of it cannot be exact.

Codes are unpacked, looked up where the target has others, and packed; entries of scales and zeros
are put in other places. All of it is numpy: there is less arithmetic than a copy to a device takes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf, prod
from typing import TYPE_CHECKING, Any, TypeAlias

from ...core.errors import OpError
from ...core.spec import BITS, coordinates
from . import rounding
from .box_decoding import stored_entries
from .geometry import Held
from .layout import Field, Grid, Packing
from .nibbles import in_turn, looked_up, turned
from .placing import copy_raw
from .recoding_integers import HELP, IntegerRecoding, dtype_of, groups_of, packing_of
from .record_boxes import bytes_in_turn, codes_in_records, entries_in_records, records_of
from .tables import widened
from .unpacking import codes as unpacked

if TYPE_CHECKING:
    import numpy as np

    from ...ops.base import Box

    Array: TypeAlias = "np.ndarray[Any, Any]"

# integers that have no place
INSTEAD = "`dequantize` and `quantize` in two edges encode the numbers anew, and round"


def recode_integers(
    path: IntegerRecoding, arrays: Mapping[str, Array], role: str, box: Box, out: Array
) -> None:
    """Fills `out`, raw elements, with `box` of a part, from the boxes that `IntegerRecoding.needs`
    names. OpError M406 for the first code, zero, scale or index that the target cannot hold, with
    its place and value.
    """
    if not out.size:
        return
    if role in path.bytes_of:
        _fixed(path, role, box, out)
    elif role == path.target.layout.role:
        _codes(path, arrays, box, out)
    elif role == path.grids[1].index:
        _index(path, arrays, box, out)
    else:
        _entries(path, arrays, role, box, out)


def _fixed(path: IntegerRecoding, role: str, box: Box, out: Array) -> None:
    import numpy as np

    whole = np.frombuffer(path.bytes_of[role], out.dtype).reshape(path.parts[role].shape)
    out[...] = whole[tuple(slice(*side) for side in box)]


# codes


def _codes(path: IntegerRecoding, arrays: Mapping[str, Array], box: Box, out: Array) -> None:
    full = path.numbers_of_codes(box)
    if not prod(b - a for a, b in full):
        out[...] = 0
        return
    target = path.target.layout
    if isinstance(target.codes, Field):
        _records(path, arrays, full, box, out)
        return
    held = path.source.codes_held(full)
    if _several(path, arrays[path.source.layout.role], full, held, box, out):
        return
    mine = packing_of(target)
    _put(
        _codes_of(path, arrays, full),
        mine,
        mine.transposed,
        path.parts[target.role].dtype,
        box,
        out,
    )


def _codes_of(path: IntegerRecoding, arrays: Mapping[str, Array], full: Box) -> Array:
    """The target's codes of a box of numbers, one a byte. M406 for one that it does not have."""
    import numpy as np

    source = path.source
    role, packing = source.layout.role, source.layout.codes
    if isinstance(packing, Field):
        found = codes_in_records(source, arrays[role], full)
    else:
        found = unpacked(arrays[role], packing, source.spec(role).dtype, packing.transposed)
    rows, columns = (
        slice(low - first, high - first)
        for (low, high), (first, _) in zip(full[-2:], source.codes_held(full), strict=True)
    )
    found = found[..., rows, columns]
    if path.codes != tuple(range(len(path.codes))):
        table = np.array(path.codes, "i2")
        if (table < 0).any():
            _check_codes(path, table, found, full)
        found = table.astype("u1")[found]
    return found


def _records(
    path: IntegerRecoding, arrays: Mapping[str, Array], full: Box, box: Box, out: Array
) -> None:
    """Fills `out`, a box of records, with codes and scales."""
    import numpy as np

    layout, (one, other) = path.target.layout, path.grids
    each = layout.record.codes
    low, high = full[-1]
    entries: Box = (*full[:-1], (low // each, high // each))
    _check_dropped(path, arrays, entries, full)
    made = _spread(path, one, arrays, entries, full)
    if other.finite:
        _check_scales(path, made, entries, -inf)
    lead = [stop - first for first, stop in entries]
    made = np.broadcast_to(made, lead)
    turn = _in_turn(path, arrays[path.source.layout.role], full, path.source.codes_held(full))
    codes = np.empty(prod(lead) * each * layout.elements.bits // 8, "u1")
    if turn is not None and _becomes(path, turn, codes):
        found = records_of(layout, other, codes, made, turned=True)
    else:
        found = records_of(layout, other, _codes_of(path, arrays, full), made)
    first = low // each * layout.record.nbytes
    out[...] = found[..., box[-1][0] - first : box[-1][1] - first].reshape(out.shape)


def _several(
    path: IntegerRecoding, words: Array, full: Box, held: Held, box: Box, out: Array
) -> bool:
    """Fills `out` several codes at a time; False where they do not lie so, or one has no place."""
    import numpy as np

    one, other = path.source.layout.codes, packing_of(path.target.layout)
    if not in_turn(other) or held.columns != full[-1] or not out.flags.c_contiguous:
        return False
    if prod(b - a for a, b in full) * other.bits != out.nbytes * 8:
        return False
    if isinstance(one, Field) or in_turn(one):
        # what the box holds of bytes begins with a code
        raw = _in_turn(path, words, full, held)
        return raw is not None and _becomes(path, raw, out.view("u1"))
    turns = one == Packing(4, one.dtypes, axis=-2, order=one.order, transposed=True)
    columns = full[-1][1] - full[-1][0]
    if not turns or words.ndim != 2 or words.itemsize != 4 or columns % 8 or other.bits != 4:
        return False
    if path.codes != tuple(range(16)):
        return False
    (low, high), (first, last) = full[-2], held.rows
    whole = (low, high) == (first, last)
    made = out if whole else np.empty((last - first, columns // 8), "<u4")
    turned(words.view("<u4"), one.order, made.view("<u4"))
    if not whole:
        out[...] = made[low - first : high - first].view(out.dtype)
    return True


def _in_turn(path: IntegerRecoding, words: Array, full: Box, held: Held) -> Array | None:
    """The source's codes of a box of numbers in turn, as an even number of bytes; None where they
    do not lie so, or the box begins or ends within bytes or records.
    """
    import numpy as np

    layout = path.source.layout
    if held.rows != full[-2] or held.columns != full[-1]:
        return None
    if isinstance(layout.codes, Field):
        found = bytes_in_turn(path.source, words, full)
    else:
        found = words if in_turn(layout.codes) else None
    if found is None:
        return None
    raw: Array = np.ascontiguousarray(found).view("u1")
    size = prod(b - a for a, b in full) * layout.elements.bits
    return raw if raw.size * 8 == size and not raw.size % 2 else None


def _becomes(path: IntegerRecoding, raw: Array, out: Array) -> bool:
    """Fills `out` (u1) with what codes in turn become; False at one without any."""
    bits = path.source.layout.elements.bits, path.target.layout.elements.bits
    if path.codes == tuple(range(1 << bits[1])):
        out.reshape(-1)[:] = raw.reshape(-1)
        return True
    return looked_up(raw, path.codes, bits, out)


def _check_codes(path: IntegerRecoding, table: Array, found: Array, full: Box) -> None:
    """M406 at the first code without one in the target."""
    lost = table[found] < 0
    if not lost.any():
        return
    index = coordinates(int(lost.reshape(-1).argmax()), lost.shape)
    number = path.source.layout.elements.values()[int(found[index])]
    raise OpError(
        "M406",
        f"recode: the number at {_place(full, index)} has no code in "
        f"{path.target.layout.name}: its code stands for {number:g}",
        help=HELP,
    )


# scales and zeros


def _entries(
    path: IntegerRecoding, arrays: Mapping[str, Array], role: str, box: Box, out: Array
) -> None:
    import numpy as np

    entries = path.entries_in(role, box)
    if not prod(b - a for a, b in entries):
        out[...] = 0
        return
    full, (one, other) = path.of_entries(entries), path.grid_of(role)
    if role == path.grids[1].role:
        _check_dropped(path, arrays, entries, full)
    if one is None:
        made = np.full([b - a for a, b in entries], _code_of_middle(path, other), "u1")
    else:
        made = _spread(path, one, arrays, entries, full)
        if role == path.zero_role:
            made = _shifted_zeros(path, made, one, other, entries)
        elif path.asks_positive:
            _check_scales(path, made, entries, 0)
    dtype = path.parts[role].dtype
    _put(made, other.packing, other.transposed, dtype, path.sides(other, box), out)


def _spread(
    path: IntegerRecoding, grid: Grid, arrays: Mapping[str, Array], entries: Box, full: Box
) -> Array:
    """What the source has, raw or as codes, for each of the target's entries."""
    import numpy as np

    source = path.source
    if grid.field is not None:
        raw = entries_in_records(source, grid, arrays[grid.role], full)
    else:
        raw = stored_entries(source, grid, arrays[grid.role], full)
    held = source.entries_held(grid, full)
    for axis in (-2, -1):
        was, now = (tile[axis] for tile in path.tiles)
        (low, high), first = entries[axis], held[axis][0]
        if was == now:
            cut = slice(low - first, high - first)
            raw = raw[..., cut, :] if axis == -2 else raw[..., cut]
        else:
            raw = raw.take(np.arange(low, high) * now // was - first, axis)
    return raw


def _shifted_zeros(
    path: IntegerRecoding, found: Array, one: Grid, other: Grid, entries: Box
) -> Array:
    """The codes of the target's zeros for those of the source; M406 for one that has none."""
    import numpy as np

    bits = packing_of(path.source.layout).bits
    if one.nonzero:
        largest = (1 << bits) - 1
        _refuse_zero(
            path, found, found == 0, entries,
            lambda _: f"stored as {largest}, which less 1 can be 0 or {largest + 1}",
            "GPTQModel subtracts 1 from whole words, and reads it as 0 that borrowed from its "
            "neighbour: `zeros: words` in `from` does the same",
        )  # fmt: skip
    table, values = np.array(path.zeros, "i2"), _numbers(one)
    made = table[found]
    _refuse_zero(
        path, found, made < 0, entries,
        lambda code: f"{values[code]:g}, which {path.target.layout.name} has no code for",
    )  # fmt: skip
    if other.nonzero:
        _refuse_zero(
            path, found, made == 0, entries,
            lambda _: "0, which cannot be stored less 1",
            "GPTQModel subtracts 1 from whole words, and borrows from the neighbour: `zeros: "
            "words` in `to` does the same",
        )  # fmt: skip
    return made.astype("u1")


def _check_dropped(
    path: IntegerRecoding, arrays: Mapping[str, Array], entries: Box, full: Box
) -> None:
    """M406 for a zero that is not the middle and an index that is not in turn, where the target has
    no place for them.
    """
    import numpy as np

    zero = path.source.layout.zero
    if path.drops_zero and zero is not None:
        found = _spread(path, zero, arrays, entries, full)
        values = _numbers(zero)
        middle = values.index(-path.shift)
        _refuse_zero(
            path, found, found != middle, entries,
            lambda code: f"{values[code]:g}, and not {-path.shift}, the middle of the codes",
            "give the zero a name in `to`, if the other format has them; " + INSTEAD,
        )  # fmt: skip
    if path.drops_index:
        low, high = full[-1]
        role, each = path.grids[0].index, path.tiles[1][1]
        index = _signed(arrays[role])
        _check_index(path, index, low)
        wrong = index != np.arange(low, high) // each
        if wrong.any():
            at = int(wrong.argmax())
            raise OpError(
                "M406",
                f"recode: the {role} of column {low + at} is {int(index[at])}, that of columns in "
                f"turn, {each} in each group, is {(low + at) // each}",
                notes=("the columns were sorted by how much they matter (desc_act)",),
                help="int-pack has an index too: name it in `to`, `group: …`; " + INSTEAD,
            )


def _check_scales(path: IntegerRecoding, raw: Array, entries: Box, least: float) -> None:
    """M406 at the first scale that is not finite and above `least`."""
    import numpy as np

    grid = path.grids[0]
    found = widened(np.ascontiguousarray(raw), dtype_of(path.source, grid))
    wrong = ~((found > least) & (found < inf))
    if wrong.any():
        index = coordinates(int(wrong.reshape(-1).argmax()), wrong.shape)
        raise OpError(
            "M406",
            f"recode: the scale of the numbers from {_first(path, entries, index)} on is "
            f"{float(found[index]):g}",
            help=f"a scale is {'' if least else 'positive and '}finite; `non_finite: keep` in `to` "
            "takes what is stored",
        )


def _refuse_zero(
    path: IntegerRecoding, found: Array, wrong: Array, entries: Box, said: Any, help: str = INSTEAD
) -> None:
    """M406 at the first zero that is `wrong`; `said` says what is, of its code."""
    if not wrong.any():
        return
    index = coordinates(int(wrong.reshape(-1).argmax()), wrong.shape)
    zero = path.source.layout.zero
    raise OpError(
        "M406",
        f"recode: the {zero.role if zero is not None else 'zero'} of the numbers from "
        f"{_first(path, entries, index)} on is {said(int(found[index]))}",
        help=help,
    )


def _numbers(grid: Grid) -> tuple[float, ...]:
    """The integer of each code of a grid of zeros."""
    if grid.elements is None:
        raise TypeError(grid)
    return grid.elements.values()


def _code_of_middle(path: IntegerRecoding, grid: Grid) -> int:
    """The code of the zeros of numbers without any."""
    return _numbers(grid).index(path.shift)


# the index


def _index(path: IntegerRecoding, arrays: Mapping[str, Array], box: Box, out: Array) -> None:
    import numpy as np

    one, other = path.grids
    if one.index:
        _check_index(path, _signed(arrays[one.index]), box[0][0])
        out[...] = arrays[one.index]
        return
    made = np.arange(*box[0]) // path.tiles[1][1]
    bits = BITS[path.parts[other.index].dtype]
    out[...] = made.astype(f"<i{bits // 8}").view(out.dtype)


def _check_index(path: IntegerRecoding, index: Array, low: int) -> None:
    """M406 at the first column, counted from `low`, of a group that there is not."""
    role, count = path.grids[0].index, groups_of(path.source, path.grids[0])
    wrong = (index < 0) | (index >= count)
    if wrong.any():
        at = int(wrong.argmax())
        raise OpError(
            "M406",
            f"recode: the {role} of column {low + at} is {int(index[at])}, the "
            f"{path.grids[0].role} has entries 0 to {count - 1}",
            help="the parts belong to different tensors, or one of them is damaged",
        )


def _signed(raw: Array) -> Array:
    return raw.view(f"<i{raw.itemsize}")


# places


def _put(
    codes: Array, packing: Packing | None, transposed: bool, dtype: str, box: Box, out: Array
) -> None:
    """Fills `out`, a stored box, with the codes or entries [..., rows, columns] that it holds."""
    import numpy as np

    made = codes
    if packing is not None and BITS[dtype] != packing.bits:
        along = made if packing.axis == -1 else made.swapaxes(-1, -2)
        words = packed(np.ascontiguousarray(along), packing, BITS[dtype])
        _, per = packing.unit(dtype)
        low, high = (box[-1], box[-2])[(packing.axis == -2) != transposed]
        first = low // per * per
        words = words[..., low - first : high - first]
        made = words if packing.axis == -1 else words.swapaxes(-1, -2)
    if transposed:
        made = made.swapaxes(-1, -2)
    if made.size == out.size:
        copy_raw(out, made.reshape(out.shape))
        return
    # what is over is padding
    out[...] = 0
    copy_raw(out[tuple(slice(0, n) for n in made.shape)], made)


def packed(codes: Array, packing: Packing, word: int) -> Array:
    """Codes (u1, [..., n]) as words along the last axis, less what is added to them when they are
    read.
    """
    import numpy as np

    bits, plus = packing.bits, packing.plus
    if plus and packing.dense:
        codes = (codes - np.uint8(plus)) & np.uint8((1 << bits) - 1)
    words: Array = rounding.pack(rounding.Lanes(), codes, bits, word, packing.order, packing.dense)
    if plus and not packing.dense:
        # as the libraries do it: what borrows takes it from the next code
        words = words.view(f"<u{word // 8}")
        words = words - words.dtype.type(sum(plus << bits * i for i in range(word // bits)))
    return words


def _first(path: IntegerRecoding, entries: Box, index: Sequence[int]) -> list[int]:
    """The first of the numbers that share an entry of a box."""
    at = [i + low for i, (low, _) in zip(index, entries, strict=True)]
    at[-2:] = [i * t for i, t in zip(at[-2:], path.tiles[1], strict=True)]
    return at


def _place(full: Box, index: Sequence[int]) -> list[int]:
    """An index within a box of numbers as one within all of them."""
    return [i + low for i, (low, _) in zip(index, full, strict=True)]


__all__ = ["packed", "recode_integers"]
