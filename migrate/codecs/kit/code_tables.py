"""Codes of one element type as those of another, by tables of one or several at a time.

A coarse path shifts the codes of each cell by a power of two of its own. Where that takes the same
from all bytes that are not zero, as it does between normal floats, the first table answers for all
cells: four codes at a time, and what a cell is shifted by is subtracted from eight.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from ...core.errors import OpError
from ...core.spec import coordinates
from ...elements.raw import scratch
from .layout import ElementType
from .lookup import gathered, of_pairs, pair_keys
from .recoding import Recoding, code_map

if TYPE_CHECKING:
    import numpy as np

    from ...ops.base import Box

    Array: TypeAlias = "np.ndarray[Any, Any]"

# codes that are looked up at a time, with their indices and results in a cache; four at a time
CHUNK = 1 << 16
CHUNK_OF_FOURS = 1 << 17
# bytes that are worth a table of two
WORTH = 1 << 17
# shifts below the headroom that have a table of their own; in the last all numbers vanish
DEEPEST = 40
HELP = "`dequantize` and `quantize` in two edges go through numbers, and round"
# a byte of each code in a word
ONES = 0x0101010101010101
# a number in each half of the halves of a word
HALVES = 0x0001000100010001


class Slope(NamedTuple):
    """How codes follow from those of the first table, up to table number `deepest`: of each that
    has bit `bit`, `step` is taken once for every table.
    """

    step: int
    bit: int
    deepest: int


class CodeLookup:
    """The codes of a box of numbers, [rows, columns], in other tables. `levels` [rows, cells] says
    which table the codes of each cell of columns are looked up in; None: the first.
    """

    def __init__(self, path: Recoding, tables: Array, levels: Array | None, full: Box) -> None:
        import numpy as np

        self._path, self._tables, self._levels, self._full = path, tables, levels, full
        self._cell = min(tile[1] for tile in path.tiles)
        # whether a code may have none in the target
        self._doubtful = bool((tables[: 1 if levels is None else int(levels.max()) + 1] < 0).any())
        if self._doubtful and levels is not None:
            self._doubtful = bool((tables[np.unique(levels)] < 0).any())

    @property
    def in_pairs(self) -> bool:
        """Whether bytes with two codes can be looked up as they are."""
        (left, right), cell = self._full[-1], self._cell
        whole = self._levels is None or not (left % cell or right % cell or cell % 2)
        return whole and not self._doubtful

    @property
    def _slope(self) -> Slope | None:
        """How codes of all cells follow from the first table, where words of eight lie within
        cells; None where they do not.
        """
        if self._levels is None or self._cell % 8:
            return None
        found = _slope_of(self._tables.tobytes(), self._tables.shape)
        return found if found is not None and int(self._levels.max()) <= found.deepest else None

    def pairs(self, words: Array, out: Array) -> None:
        """Fills `out` with the codes in bytes that have two each, the first in the low bits."""
        if words.size >= WORTH and not words.shape[1] % 2:
            slope = self._slope
            if self._levels is None or slope is not None:
                self._fours(words.view("<u2"), slope, out)
                return
        table = _pair_tables(self._tables.tobytes(), self._tables.shape)
        step = max(1, CHUNK // words.shape[1])
        for row in range(0, len(words), step):
            keys = words[row : row + step]
            if self._levels is not None:
                keys = pair_keys(self._levels[row : row + step], keys)
            gathered(table, keys, out[row : row + step])

    def _fours(self, words: Array, slope: Slope | None, out: Array) -> None:
        """Fills `out` with the codes in words that have four each."""
        import numpy as np

        table = _table_of_fours(self._tables[0].tobytes())
        step = max(1, CHUNK_OF_FOURS // out.shape[1])
        for row in range(0, len(words), step):
            made = out[row : row + step]
            gathered(table, words[row : row + step], made)
            if slope is None or self._levels is None:
                continue
            eight = made.view("<u8")
            less = scratch("kit shifted", eight.nbytes).view("<u8").reshape(eight.shape)
            np.right_shift(eight, np.uint64(slope.bit), out=less)
            less &= np.uint64(ONES)
            levels = self._levels[row : row + step]
            steps = _steps(slope, len(self._tables), eight.shape[1] // levels.shape[1])
            each = scratch("kit steps", eight.nbytes).view("<u8")
            np.take(steps, levels, 0, each.reshape(*levels.shape, -1), mode="clip")
            # products of two bytes of 0 and 1 with a byte: processors have none of eight
            halves = less.view("<u2")
            halves *= each.view("<u2").reshape(halves.shape)
            # what is taken from a code is no more than it, so that none borrows from its neighbour
            eight -= less

    def single(self, codes: Array, out: Array) -> None:
        """Fills `out` with the codes of `codes`, one an element."""
        import numpy as np

        width, tables = self._tables.shape[1], self._tables.astype("u1").reshape(-1)
        step = max(1, CHUNK // codes.shape[1])
        left, right = self._full[-1]
        columns = np.arange(left, right) // self._cell - left // self._cell
        for row in range(0, len(codes), step):
            index = codes[row : row + step]
            if self._levels is not None:
                index = index.astype("i8")
                index += self._levels[row : row + step][:, columns].astype("i8") * width
            if self._doubtful:
                self._refuse(index, row)
            np.take(tables, index, out=out[row : row + step], mode="clip")

    def _refuse(self, index: Array, row: int) -> None:
        """M406 at the first code without one in the target."""
        lost = (self._tables.reshape(-1) < 0).take(index, mode="clip")
        if not lost.any():
            return
        at, column = coordinates(int(lost.reshape(-1).argmax()), lost.shape)
        level, code = divmod(int(index[at, column]), self._tables.shape[1])
        geo, sides = self._path.source, self._full
        heights = tuple(b - a for a, b in sides[:-1])
        place = [
            *(i + low for i, (low, _) in zip(coordinates(row + at, heights), sides, strict=False)),
            column + sides[-1][0],
        ]
        number = geo.layout.elements.values()[code]
        shift = self._path.shift - level
        said = f"its code stands for {number:g}"
        if self._path.coarse and level > DEEPEST:
            said += ", its scale is NaN"
        elif shift:
            said += f", times 2^{shift}" if level < DEEPEST else ", far below the others"
        raise OpError(
            "M406",
            f"recode: the number at {place[len(place) - len(geo.shape) :]} has no code in "
            f"{self._path.target.layout.name}: {said}",
            notes=(
                ("one scale of the other format stands for several, from which it is too far",)
                if self._path.coarse
                else ()
            ),
            help=HELP,
        )


@lru_cache(maxsize=32)
def code_tables(source: ElementType, target: ElementType, shift: int, coarse: bool) -> Array:
    """The target's codes for the shift, and of a coarse path for all shifts below it, at the end
    for scales that are NaN; -1 where there is none.
    """
    import numpy as np

    maps = [
        code_map(source, target, shift - level) for level in range(DEEPEST + 1 if coarse else 1)
    ]
    if coarse:
        nan = next((code for code, n in enumerate(target.values()) if n != n), -1)
        maps.append((nan,) * len(maps[0]))
    found = np.array(maps, "i2")
    found.setflags(write=False)
    return found


@lru_cache(maxsize=8)
def _pair_tables(tables: bytes, shape: tuple[int, int]) -> Array:
    """Both codes of a byte with two, as one element, for each table in turn."""
    import numpy as np

    single = np.frombuffer(tables, "i2").reshape(shape).astype("<u2")
    byte = np.arange(256)
    found: Array = (single[:, byte & 15] | single[:, byte >> 4] << 8).reshape(-1)
    return found


@lru_cache(maxsize=8)
def _table_of_fours(table: bytes) -> Array:
    """The four codes of two bytes, as one element."""
    return of_pairs(_pair_tables(table, (1, len(table) // 2)))


@lru_cache(maxsize=8)
def _steps(slope: Slope, levels: int, words: int) -> Array:
    """For each level what the codes of a cell, which are so many words, lose: [levels, words]. A
    row of a table is copied faster than a word is repeated.
    """
    import numpy as np

    # levels beyond the deepest of the slope are never looked up
    found = np.arange(levels, dtype="<u8") * np.uint64(slope.step)
    found = (found & np.uint64(0xFF)) * np.uint64(HALVES)
    return np.repeat(found[:, None], words, 1)


@lru_cache(maxsize=8)
def _slope_of(tables: bytes, shape: tuple[int, int]) -> Slope | None:
    """The slope of these tables; None where they have none."""
    import numpy as np

    found = np.frombuffer(tables, "i2").reshape(shape)
    if len(found) < 2 or found[0].min() < 0:
        return None
    moved = found[0] - found[1]
    step = int(moved.max())
    for bit in range(8):
        moves = found[0] >> bit & 1
        wanted = found[0] - np.arange(len(found))[:, None] * (step * moves)
        alike = (wanted == found).all(1)
        if step > 0 and alike[1]:
            return Slope(step, bit, int(alike.argmin()) - 1 if not alike.all() else len(found) - 1)
    return None
