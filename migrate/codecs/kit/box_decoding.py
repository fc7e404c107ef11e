"""One box of one tensor, decoded in chunks: one text for numpy and torch.

Where bytes of codes can be looked up as they lie, in numpy (`lookup`), they are; ragged ends and
rare forms are unpacked to one code an element. Products are made in place, in chunks that a cache
holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from math import lcm, prod
from typing import TYPE_CHECKING, Any

from ...core.errors import OpError
from ...elements.numbers import is_numpy, module
from ...elements.raw import scratch
from ...elements.transposes import is_turned
from . import tables
from .geometry import Extents, Held
from .integer_products import (
    SHORT,
    GroupEntries,
    fill_integers,
    integers_of_bytes,
    integers_of_codes,
    integers_of_words,
)
from .layout import ElementType, Field, Grid, Packing, Term
from .lookup import ByteTables, codes_in_byte, floats_of, integers_of, natural
from .products import fill_products
from .tables import narrowed, values_like, widened
from .unpacking import codes, field_codes, field_numbers, records

if TYPE_CHECKING:
    import numpy as np

    from ...ops.base import Box

    Array = np.ndarray[Any, Any]

# numbers of one step: what they are made of stays in a last-level cache, and a step takes much
# longer than the calls that it is made of
CHUNK = 1 << 19
# of so small a part of the rows of a box entries are widened by themselves
FEW = 8
# numbers of a matrix that are worth a table of their own
WORTH = 1 << 17
# floats below it have an exponent to spare
_ROOM = 2.0**127
# and on another device, where a step costs a launch of each operation
CHUNK_OF_DEVICE = 1 << 25


class BoxDecoder:
    """One box of one tensor."""

    def __init__(self, geo: Extents, arrays: Mapping[str, Any], dtype: str, full: Box) -> None:
        self._geo, self._layout, self._arrays = geo, geo.layout, arrays
        self._dtype, self._full = dtype, full
        self._lead = [high - low for low, high in full[:-2]]
        self._stored = {
            grid: stored_entries(geo, grid, arrays[grid.role], full)
            for grid in self._layout.grids()
            if grid.field is None
        }
        self._numbers: dict[Grid, Any] = {}
        self._groups: dict[Grid, int] = {}
        self._raw = self._codes()
        self._finite = False
        for grid in self._layout.grids():
            if grid.index:
                self._check_index(grid)
        self._near = is_numpy(self._raw)
        self._by_products = self._near and self._takes_products()
        floats = self._layout.elements.dtype
        self._by_integers = self._near and not floats and self._takes_integers()
        self._tables = ByteTables(self._layout, geo, dtype) if self._near else None

    def _takes_products(self) -> bool:
        """Whether numbers are codes of e4m3 times scales, each code a byte, as bfloat16."""
        layout, packing = self._layout, self._layout.codes
        return (
            self._dtype == "bfloat16"
            and layout.elements.dtype == "float8_e4m3fn"
            and isinstance(packing, Packing)
            and not (packing.transposed or packing.run)
            and codes_in_byte(packing, self._geo.spec(layout.role).dtype) == 1
            and bool(layout.scale)
            and layout.zero is None
            and layout.after is None
            and not layout.less
        )

    def _takes_integers(self) -> bool:
        """Whether numbers are integers, less zeros where they have four bits, times one scale of so
        few digits that `fill_integers` takes them.
        """
        layout, packing = self._layout, self._layout.codes
        if not layout.elements.whole or len(layout.scale) != 1 or layout.less or layout.flat:
            return False
        (grid,) = (term.what for term in layout.scale)
        if not isinstance(grid, Grid) or grid.elements is not None or layout.after is not None:
            return False
        dtype = grid.field.dtype if grid.field else self._geo.spec(grid.role).dtype
        if dtype not in SHORT.get(self._dtype, ()):
            return False
        if isinstance(packing, Field):
            return layout.zero is None
        word = packing.word(self._geo.spec(layout.role).dtype)
        return (
            (packing.bits == 4 or (packing.bits == 8 and layout.zero is None))
            and (word == 32 or (word == 8 and not packing.order and packing.axis == -1))
            and not (packing.run or packing.plus)
        )

    def into(self, out: Any) -> None:
        """Fills `out` [..., rows, columns]."""
        rows, columns = self._full[-2:]
        turned = self._near and out.strides[-2] < out.strides[-1]
        chunks = self._chunks(rows, columns, turned)
        for at in product(*map(range, self._lead)):
            work = self._work(at, prod(out.shape[-2:]))
            for chunk in chunks:
                (top, bottom), (left, right) = chunk
                target = out[at][
                    top - rows[0] : bottom - rows[0], left - columns[0] : right - columns[0]
                ]
                work(at, chunk, target)

    def _chunks(
        self, rows: tuple[int, int], columns: tuple[int, int], turned: bool = False
    ) -> list[Held]:
        size = CHUNK if self._near else CHUNK_OF_DEVICE
        if self._near and self._layout.elements.bits == 8:
            # codes that take arithmetic, and no table that has to stay in the cache
            size *= 2
        high, wide = self._units()
        most = columns[1] - columns[0]
        if turned:
            most = min(most, size // max(1, rows[1] - rows[0]))
        across = max(wide, min(most, size) // wide * wide)
        down = max(high, size // across // high * high)
        return [
            Held(side, other)
            for side in _cuts(rows, down, high)
            for other in _cuts(columns, across, wide)
        ]

    def _units(self) -> tuple[int, int]:
        """Rows and columns at which chunks are cut."""
        packing, unit = self._layout.codes, self._geo.unit()
        down = isinstance(packing, Packing) and packing.axis == -2
        high, wide = (unit, 1) if down else (1, unit)
        for grid in self._layout.grids():
            each = self._sides(grid)[1]
            if 0 < each <= 1024:
                wide = lcm(wide, each)
        return high, wide

    # the parts

    def _codes(self) -> Any:
        raw = self._arrays[self._layout.role]
        if self._layout.flat:
            return raw.reshape(1, -1)
        packing = self._layout.codes
        lead = len(self._full) - 2
        axes = 3 if isinstance(packing, Packing) and packing.run else 2
        missing = lead + axes - len(raw.shape)
        return raw.reshape((1,) * missing + tuple(raw.shape)) if missing > 0 else raw

    def _check_index(self, grid: Grid) -> None:
        """OpError M406 for an index of which there is no entry."""
        index, count = self._arrays[grid.index], self._geo.form(grid)[-2 if grid.transposed else -1]
        if is_numpy(index):
            index = index.view(f"i{index.itemsize}")
        low, high = int(index.min()), int(index.max())
        if low < 0 or high >= count:
            wrong = low if low < 0 else high
            place = int(
                (index == wrong).argmax() if is_numpy(index) else (index == wrong).nonzero()[0]
            )
            raise OpError(
                "M406",
                f"dequantize: the {grid.index} of column {self._full[-1][0] + place} is {wrong}, "
                f"the {grid.role} has entries 0 to {count - 1}",
                help="the parts belong to different tensors, or one of them is damaged",
            )

    def known(self, grid: Grid) -> Any:
        """The entries of a grid as float32."""
        if grid not in self._numbers:
            self._numbers[grid] = self._widened(grid, self._stored[grid])
        return self._numbers[grid]

    def _widened(self, grid: Grid, raw: Any) -> Any:
        if grid.elements is not None:
            return _looked_up(self._table(grid.elements, raw), raw)
        dtype = self._geo.spec(grid.role).dtype
        return widened(_contiguous(raw), grid.byte if dtype == "uint8" else dtype)

    def _table(self, elements: ElementType, like: Any) -> Any:
        if elements.part:
            return widened(_contiguous(self._arrays[elements.part].reshape(-1)), "float32")
        return values_like(elements, like)

    # one chunk

    def _work(self, at: tuple[int, ...], size: int) -> Callable[[tuple[int, ...], Held, Any], None]:
        """What fills the chunks of one matrix."""
        if self._tables is None or size < WORTH:
            return self._chunk
        made = self._tables.of(at, self._table(self._layout.elements, self._raw), self.known)
        if made is None:
            return self._chunk

        def look_up(at: tuple[int, ...], chunk: Held, out: Any) -> None:
            raw, held = self._words(at, (*((i, i + 1) for i in at), *chunk))
            if held != chunk or not made.fill(
                self._bytes(raw, is_turned(out) and made.turns),
                self._scale_bytes(made.grid, at, chunk),
                out,
            ):
                self._chunk(at, chunk, out)

        return look_up

    def _scale_bytes(self, grid: Grid | None, at: tuple[int, ...], chunk: Held) -> Any:
        """The bytes of a grid for the rows and blocks of columns of a chunk; None where columns
        begin or end within a block.
        """
        if grid is None:
            return None
        high, wide = grid.block
        (top, bottom), (left, right) = chunk
        if wide and (left % wide or right % wide):
            return None
        found = self._stored[grid]
        found = found[at] if grid.leading else found[(0,) * len(at)]
        inside = self._geo.entries_held(grid, self._full)
        if wide:
            first = inside.columns[0]
            found = found[:, left // wide - first : right // wide - first]
        if high:
            first = inside.rows[0]
            found = found[top // high - first : -(-bottom // high) - first]
            if high > 1:
                found = found.repeat(high, 0)[top % high :][: bottom - top]
        return found

    def _bytes(self, raw: Any, apart: bool = False) -> Any:
        """The words of a chunk as bytes, a row for each row of numbers, codes in turn; rows of
        bytes may be `apart` and stay it.
        """
        packing = self._layout.codes
        if not isinstance(packing, Packing):
            raise TypeError(packing)
        if packing.run:
            raw = raw.reshape(raw.shape[0], -1)
        if apart and raw.itemsize == 1 and not packing.transposed:
            return raw.view("u1")
        return natural(
            _turned(raw) if packing.transposed else _contiguous(raw),
            packing,
            self._geo.spec(self._layout.role).dtype,
        )

    def _chunk(self, at: tuple[int, ...], chunk: Held, out: Any) -> None:
        import numpy as np

        layout = self._layout
        if self._near and out.strides[-2] < out.strides[-1]:
            made = np.empty(out.shape, out.dtype)
            self._chunk(at, chunk, made)
            out[...] = made
            return
        raw, held = self._words(at, (*((i, i + 1) for i in at), *chunk))
        if self._by_products and held == chunk:
            scales, *each = self._chain(raw, layout.scale, at, chunk, raw, held)
            sides = zip(chunk, each, strict=True)
            skip = [low % n if n else 0 for (low, _), n in sides]
            if fill_products(raw, scales, (each[0], each[1]), (skip[0], skip[1]), out):
                return
        if isinstance(layout.codes, Field):
            raw = records(raw, layout.record.nbytes)
        if self._by_integers and held == chunk and self._fill_integers(at, chunk, raw, out):
            return
        floats, later = self._floats(raw, chunk, held)
        # NaN is rare, and looked for where a code or an entry is not finite
        self._finite = self._near and later != 0 and not layout.less
        with _quiet():
            if layout.zero is not None:
                self._step(floats, "-", (Term("*", layout.zero),), at, chunk, raw, held)
            if layout.scale:
                self._step(floats, "*", layout.scale, at, chunk, raw, held, later)
            elif later > 1:
                floats *= _float(later, floats)
            if layout.after is not None:
                floats *= _float(layout.after, floats)
            if layout.less:
                self._step(floats, "-", layout.less, at, chunk, raw, held)
        narrowed(floats, self._dtype, out, self._finite)

    def _fill_integers(self, at: tuple[int, ...], chunk: Held, raw: Any, out: Any) -> bool:
        """Fills `out` by `fill_integers`; False where it cannot."""
        layout, packing = self._layout, self._layout.codes
        found = [self._chain(raw, layout.scale, at, chunk, raw, chunk)]
        if layout.zero is not None:
            zero, *sides = self._chain(raw, (Term("*", layout.zero),), at, chunk, raw, chunk)
            found.append((zero.astype("i1"), *sides))
        for _, rows, columns in found:
            if rows > 1 or (columns and (chunk.columns[0] % columns or chunk.columns[1] % columns)):
                return False
        scale, *zeros = [GroupEntries(entries, columns) for entries, _, columns in found]
        if isinstance(packing, Field):
            codes = field_codes(raw, packing).reshape(len(raw), -1)
            codes = integers_of_codes(codes, layout.elements)
        elif packing.axis == -1:
            codes = integers_of_bytes(self._bytes(raw), layout.elements)
        else:
            words = _turned(raw) if packing.transposed else _contiguous(raw)
            codes = integers_of_words(words, packing, layout.elements)
        # the last word may be partly empty
        if codes is None or codes.shape != out.shape:
            return False
        return fill_integers(codes, zeros[0] if zeros else None, scale, self._dtype, out)

    def _floats(self, raw: Any, chunk: Held, held: Held) -> tuple[Any, float]:
        """The numbers of the codes of a chunk, and what they have yet to be multiplied by; 0 is 1
        where a number may be infinite or NaN.
        """
        layout = self._layout
        packing, elements = layout.codes, layout.elements
        dtype = self._geo.spec(layout.role).dtype
        if self._near and held == chunk and isinstance(packing, Packing) and packing.axis == -1:
            each = codes_in_byte(packing, dtype)
            keys = self._bytes(raw) if each else None
            # the last word may be partly empty
            if keys is not None and keys.shape[1] * each == chunk.columns[1] - chunk.columns[0]:
                out = scratch("kit floats", keys.size * each * 4).view("<f4")
                out = out.reshape(keys.shape[0], -1)
                return out, floats_of(keys, packing, dtype, elements, self._table, out)
        found = self._unpacked(raw, chunk, held)
        if self._near and elements.whole:
            out = scratch("kit floats", found.size * 4).view("<f4").reshape(found.shape)
            return out, integers_of(found, elements, out)
        return _looked_up(self._table(elements, found), found), 0

    def _unpacked(self, raw: Any, chunk: Held, held: Held) -> Any:
        """The codes of a chunk, one an element."""
        packing, dtype = self._layout.codes, self._geo.spec(self._layout.role).dtype
        (top, bottom), (left, right) = (
            (low - first, high - first) for (low, high), (first, _) in zip(chunk, held, strict=True)
        )
        if isinstance(packing, Field):
            found = field_codes(raw, packing)
            found = found.reshape(found.shape[0], -1)
        else:
            found = codes(raw, packing, dtype, packing.transposed)
        return found[top:bottom, left:right]

    def _words(self, at: tuple[int, ...], box: Box) -> tuple[Any, Held]:
        """The stored words of a chunk, and which codes these are."""
        layout, packing = self._layout, self._layout.codes
        held = self._geo.codes_held(box)
        whole = self._geo.codes_held(self._full)
        sides = [
            (low - first, high - first) for (low, high), (first, _) in zip(held, whole, strict=True)
        ]
        array = self._raw[at]
        if isinstance(packing, Field):
            record = layout.record
            (top, bottom), (left, right) = sides
            left, right = left // record.codes, -(-right // record.codes)
            return array[top:bottom, left * record.nbytes : right * record.nbytes], held
        dtype = self._geo.spec(layout.role).dtype
        low, high = sides[packing.axis]
        sides[packing.axis] = packing.words(low, dtype), packing.words(high, dtype)
        if packing.transposed:
            sides.reverse()
        (top, bottom), (left, right) = sides
        if packing.run:
            left, right = left // packing.run, -(-right // packing.run)
        return array[top:bottom, left:right], held

    def _step(
        self,
        floats: Any,
        how: str,
        terms: Sequence[Term],
        at: tuple[int, ...],
        chunk: Held,
        raw: Any,
        held: Held,
        later: float = 1.0,
    ) -> None:
        """Takes what a chain makes for each number of a chunk from it, or multiplies by it and by
        `later`, a power of two.
        """
        found, rows, columns = self._chain(floats, terms, at, chunk, raw, held)
        if self._finite or later > 1:
            # NaN is not below anything
            largest = float(abs(found).max())
            self._finite = self._finite and largest < _ROOM
            if later > 1 and largest * later < _ROOM:
                found = found * _float(later, floats)
            elif later > 1:
                # before the product, which could be too small for all its digits without it
                floats *= _float(later, floats)
        (top, bottom), (left, right) = chunk
        target = floats
        if rows > 1 and top % rows == 0 == bottom % rows:
            # the rows of a block together, each with the entries of all columns
            found = _over_columns(found, columns, chunk)[:, None]
            target = floats.reshape(-1, rows, floats.shape[1])
        elif columns >= 32 and left % columns == 0 == right % columns and found.shape[1] > 1:
            # each entry with its neighbours, as long as there are enough of them
            found = _over_rows(found, rows, chunk)[..., None]
            target = floats.reshape(len(floats), -1, columns)
        else:
            found = _over_columns(_over_rows(found, rows, chunk), columns, chunk)
        torch = tables.imported() if self._near and found.size > 1 else None
        if torch is not None:
            own = _contiguous(found)
            if not own.flags.writeable:
                own = own.copy()
            ours, theirs = torch.from_numpy(target), torch.from_numpy(own)
            (ours.mul_ if how == "*" else ours.sub_)(theirs)
        elif how == "*":
            target *= found
        else:
            target -= found

    def _chain(
        self,
        like: Any,
        terms: Sequence[Term],
        at: tuple[int, ...],
        chunk: Held,
        raw: Any,
        held: Held,
    ) -> tuple[Any, int, int]:
        """What a chain makes for each cell of a chunk, and the rows and columns of a cell, of
        which 0 are all.
        """
        blocks = [self._sides(t.what) for t in terms if isinstance(t.what, Grid)]
        rows, columns = (
            min((b for b in sides if b), default=0) for sides in zip(*blocks, strict=True)
        )
        cells = Held(_cells(chunk.rows, rows), _cells(chunk.columns, columns))
        found: Any = None
        for by, what in terms:
            if isinstance(what, Grid):
                step = self._spread(what, at, cells, (rows, columns), chunk, raw, held)
            else:
                step = _float(what, like)
            if found is None:
                found = step
            elif by == "*":
                found = found * step
            elif by == "/":
                found = found / step
            else:
                found = found + step
        return found, rows, columns

    # for those who look at what was made

    def plain(self, at: tuple[int, ...], chunk: Held) -> tuple[Any, Any, Any]:
        """The numbers of the codes of a chunk without their zeros, their scales, and what is taken
        from the products, None where nothing is: float32 that spread over each other.
        """
        layout = self._layout
        raw, held = self._words(at, (*((i, i + 1) for i in at), *chunk))
        if isinstance(layout.codes, Field):
            raw = records(raw, layout.record.nbytes)
        found = self._unpacked(raw, chunk, held)
        floats = _looked_up(self._table(layout.elements, found), found)

        def of(terms: Sequence[Term]) -> Any:
            made, rows, columns = self._chain(floats, terms, at, chunk, raw, held)
            return _over_columns(_over_rows(made, rows, chunk), columns, chunk)

        with _quiet():
            if layout.zero is not None:
                floats = floats - of((Term("*", layout.zero),))
            scale = of(layout.scale) if layout.scale else None
            return floats, scale, of(layout.less) if layout.less else None

    def values(self) -> Any:
        """The float32 number of each code."""
        return self._table(self._layout.elements, self._raw)

    def entries(self, grid: Grid, at: tuple[int, ...]) -> Any:
        """All entries of a grid that a matrix of the box needs, as float32."""
        if grid.field is None:
            found = self.known(grid)
            return found[at] if grid.leading else found[(0,) * len(at)]
        return self._of_records(
            grid.field, grid.elements, records(self._raw[at], self._layout.record.nbytes)
        )

    def stored(self, grid: Grid, at: tuple[int, ...] | None = None) -> Any:
        """The entries of a grid that a matrix of the box needs, or all of it, as they are stored,
        where each is a byte of numpy's; else None.
        """
        found = self._stored.get(grid)
        if not self._near or found is None or found.itemsize != 1 or grid.elements is not None:
            return None
        return found if at is None else found[at if grid.leading else (0,) * len(at)]

    def matrices(self) -> list[tuple[int, ...]]:
        """The indices of the matrices of the box."""
        return list(product(*map(range, self._lead)))

    def chunks(self) -> list[Held]:
        """The parts of a matrix that are worked on at a time."""
        rows, columns = self._full[-2:]
        return self._chunks(rows, columns)

    def _sides(self, grid: Grid) -> tuple[int, int]:
        """Rows and columns of numbers that share an entry; 0 is a whole axis."""
        rows, columns = self._geo.block(grid)
        return rows, self._group(grid) if grid.index else columns

    def _group(self, grid: Grid) -> int:
        """The columns in turn that share an entry, where the index says so; else 1."""
        if not self._near:
            return 1
        if grid not in self._groups:
            import numpy as np

            low, high = self._full[-1]
            each = -(-self._geo.full[-1] // self._geo.entries_held(grid, self._full).columns[1])
            index = self._arrays[grid.index]
            in_turn = np.array_equal(index, np.arange(low, high) // each)
            self._groups[grid] = each if in_turn else 1
        return self._groups[grid]

    def _spread(
        self,
        grid: Grid,
        at: tuple[int, ...],
        cells: Held,
        each: tuple[int, int],
        chunk: Held,
        raw: Any,
        held: Held,
    ) -> Any:
        """The entries of a grid for each cell of a chunk, of rows and columns that it may lack."""
        if grid.field is not None:
            found = self._of_records(grid.field, grid.elements, raw)
            first: tuple[int, int] = held.rows[0], held.columns[0] // self._geo.block(grid)[1]
        else:
            inside = self._geo.entries_held(grid, self._full)
            first = inside.rows[0], inside.columns[0]
            place = at if grid.leading else (0,) * len(at)
            (top, bottom), (low, high) = cells.rows, inside.rows
            few = FEW * (bottom - top) <= high - low and each[0] == self._sides(grid)[0] > 0
            if few and grid not in self._numbers:
                found = self._widened(grid, self._stored[grid][place][top - low : bottom - low])
                first = top, inside.columns[0]
            else:
                found = self.known(grid)[place]
        for axis, block in enumerate(self._sides(grid)):
            if not block:
                continue
            low, high = cells[axis]
            if grid.index and axis == 1 and block == 1:
                start, (left, right) = self._full[-1][0], chunk.columns
                index = self._arrays[grid.index][left - start : right - start]
                found = _taken(found, index, 1)
            elif block == each[axis]:
                kept = slice(low - first[axis], high - first[axis])
                found = found[kept] if axis == 0 else found[:, kept]
            else:
                steps = [i * each[axis] // block - first[axis] for i in range(low, high)]
                found = _taken(found, steps, axis)
        return found

    def _of_records(self, field: Field, elements: ElementType | None, raw: Any) -> Any:
        if elements is None:
            numbers = field_numbers(raw, field)
            return widened(numbers.reshape(numbers.shape[0], -1), field.dtype)
        found = field_codes(raw, field)
        return _looked_up(values_like(elements, found), found.reshape(found.shape[0], -1))


def stored_entries(geo: Extents, grid: Grid, raw: Any, full: Box) -> Any:
    """The entries of a grid for a box of numbers, as they are stored or as codes,
    [..., rows, columns], from `entries_held` on; `raw` is the box that `needs` names.
    """
    held, at = geo.entries_held(grid, full), geo.entries_at(grid, full)
    if geo.layout.flat:
        raw = raw.reshape(1, -1)
    elif len(raw.shape) != len(geo.form(grid)):
        raw = raw.reshape(_with_axes(raw.shape, geo.whole(grid, len(geo.form(grid)))))
    if grid.swizzled:
        raw = _unswizzled(raw, grid.tile)
    elif grid.packing is not None:
        raw = codes(raw, grid.packing, geo.spec(grid.role).dtype, grid.transposed)
    elif grid.transposed:
        raw = raw.swapaxes(-1, -2)
    (top, bottom), (left, right) = (
        (low - first, high - first) for (low, high), (first, _) in zip(held, at, strict=True)
    )
    return raw[..., top:bottom, left:right]


def _cells(side: tuple[int, int], each: int) -> tuple[int, int]:
    return (side[0] // each, -(-side[1] // each)) if each else (0, 1)


def _cuts(side: tuple[int, int], step: int, unit: int) -> list[tuple[int, int]]:
    """A side in parts of `step`, cut at multiples of `unit`: what does not fill one at either end
    is a part of its own.
    """
    low, high = side
    first, last = -(-low // unit) * unit, high // unit * unit
    if first >= last:
        return [side]
    found = [(i, min(i + step, last)) for i in range(first, last, step)]
    return [
        *([(low, first)] if low < first else []), *found, *([(last, high)] if last < high else [])
    ]  # fmt: skip


def _with_axes(shape: Sequence[int], whole: Sequence[bool]) -> tuple[int, ...]:
    """The shape of a box of a grid with the axes that it lacks where it is stored."""
    if prod(shape) == 1:
        return (1,) * len(whole)
    left = list(shape)
    return tuple(1 if lacks else left.pop(0) for lacks in whole)


def _unswizzled(raw: Any, tile: tuple[int, int]) -> Any:
    """Tiles of 128 rows and 4 columns, each 512 bytes, in rows and columns."""
    *lead, high, wide = raw.shape
    high, wide = high // tile[0], wide // tile[1]
    tiles = raw.reshape(*lead, high, wide, 32, 4, 4)
    # byte (i % 32) * 16 + (i % 128) // 32 * 4 + j % 4 of tile (i // 128, j // 4)
    n = len(lead)
    order = (*range(n), n, n + 3, n + 2, n + 1, n + 4)
    moved = tiles.transpose(order) if is_numpy(raw) else tiles.permute(order)
    return moved.reshape(*lead, high * 128, wide * 4)


def _looked_up(table: Any, found: Any) -> Any:
    if is_numpy(found):
        return table.take(found, mode="clip")
    flat = found.reshape(-1)
    return table.index_select(0, flat.int()).reshape(found.shape)


def _taken(array: Any, index: Any, axis: int) -> Any:
    if is_numpy(array):
        import numpy as np

        number = np.asarray(index)
        if number.dtype.kind == "u":
            number = number.view(f"i{number.itemsize}")
        return array.take(number, axis)
    import torch

    if isinstance(index, torch.Tensor):
        return array.index_select(axis, index)
    return array.index_select(axis, torch.tensor(index, device=array.device))


def _over_rows(found: Any, each: int, chunk: Held) -> Any:
    """Entries of `each` rows for every row of a chunk."""
    if each <= 1 or found.shape[0] == 1:
        return found
    skip = chunk.rows[0] % each
    return _repeated(found, each, 0)[skip : skip + chunk.rows[1] - chunk.rows[0]]


def _over_columns(found: Any, each: int, chunk: Held) -> Any:
    """Entries of `each` columns for every column of a chunk."""
    if each <= 1 or found.shape[1] == 1:
        return found
    skip = chunk.columns[0] % each
    return _repeated(found, each, 1)[:, skip : skip + chunk.columns[1] - chunk.columns[0]]


def _repeated(array: Any, each: int, axis: int) -> Any:
    if is_numpy(array):
        return module(array).repeat(array, each, axis)
    return array.repeat_interleave(each, axis)


def _float(value: float, like: Any) -> Any:
    if is_numpy(like):
        import numpy as np

        return np.float32(value)
    # a number of Python's that is a float32 is one of each step too
    return value


def _contiguous(array: Any) -> Any:
    if is_numpy(array):
        import numpy as np

        return np.ascontiguousarray(array)
    return array.contiguous()


def _turned(words: Array) -> Array:
    """The transpose of a matrix in numpy, a line of the cache at a time: twice as fast as a copy
    that reads one column after the other.
    """
    import numpy as np

    rows, columns = words.shape
    out, each = np.empty((columns, rows), words.dtype), 64 // words.itemsize
    for first in range(0, rows, each):
        out[:, first : first + each] = words[first : first + each].T
    return out


def _quiet() -> Any:
    import numpy as np

    return np.errstate(all="ignore")
