"""Shapes and boxes of a layout: which parts numbers of a shape have, and what a box of the numbers
comes from. Integers alone: planning asks for them.

A layout is worked out over `[..., rows, columns]`: numbers of fewer axes get axes of length 1 in
front, and those of a flat layout are one row of all of them (`Extents.full`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import lcm, prod
from typing import TYPE_CHECKING, NamedTuple

from ...core.errors import OpError
from ...core.spec import BITS, Spec
from ...core.spec import spec as spec_of
from .layout import ElementType, Field, Grid, NumberLayout, Packing

if TYPE_CHECKING:
    from ...ops.base import Box

Shape = tuple[int, ...]
# whole axes are no blocks
SHARING = {(0, 0): "with one for all", (1, 0): "with one for each row"}
Side = tuple[int, int]


class Held(NamedTuple):
    """A part of a matrix of codes or entries, as rows and columns of them."""

    rows: Side
    columns: Side


class Extents:
    """The shapes of one tensor's parts and numbers, which fit each other."""

    __slots__ = ("_forms", "full", "layout", "shape", "specs")

    def __init__(self, layout: NumberLayout, specs: Mapping[str, Spec]) -> None:
        self.layout = layout
        self.specs = specs
        for role in layout.roles():
            if role not in specs:
                raise OpError(
                    "M408",
                    f"{layout.name} cannot be decoded without its {role}, which is not there",
                )
        self._check_dtypes()
        self._check_widths()
        # the shape of the numbers
        self.shape: Shape = self._numbers()
        self.full: Shape = _full(layout, self.shape)
        # the grids' whole shapes, axes that are not stored included
        self._forms = {grid: self._form(grid) for grid in layout.grids() if grid.field is None}
        self._check_tables()

    # what fits

    def _check_dtypes(self) -> None:
        layout = self.layout
        wanted: dict[str, Sequence[str]] = {g.role: _dtypes(g) for g in layout.grids()}
        wanted |= dict.fromkeys(layout.tables(), ("float32",))
        wanted |= {g.index: ("int32", "int64") for g in layout.grids() if g.index}
        codes = layout.codes
        wanted[layout.role] = codes.dtypes if isinstance(codes, Packing) else ("uint8",)
        for role, dtypes in wanted.items():
            found = self.specs[role].dtype
            if found not in dtypes:
                raise OpError(
                    "M303",
                    f"{layout.name}: the {role} is {found}, not {_one_of(dtypes)}",
                    help=f"limit the rule to what is encoded: `when: {{{role}: {{dtype: "
                    f"[{', '.join(dtypes)}]}}}}`",
                )

    def _check_widths(self) -> None:
        """ValueError for codes that stand for nothing."""
        layout = self.layout
        held: list[tuple[str, ElementType | None, Packing | Field | None]] = [
            (layout.role, layout.elements, layout.codes)
        ]
        held += [(g.role, g.elements, g.packing or g.field) for g in layout.grids() if g.elements]
        for role, elements, packing in held:
            bits = min(packing.bits, 8) if isinstance(packing, Packing) else 8
            if isinstance(packing, Field):
                bits = max(piece.bits + piece.left for piece in packing.pieces)
            if isinstance(packing, Packing) and BITS[self.specs[role].dtype] < 8:
                bits = BITS[self.specs[role].dtype]
            if elements is not None and elements.bits < bits:
                raise ValueError(f"{role}: codes of {bits} bits, elements of {elements.bits}")

    def _numbers(self) -> Shape:
        layout, stored = self.layout, self.specs[self.layout.role]
        shape = layout.shape
        if shape is None:
            shape = _capacity(layout, stored)
        wanted = codes_shape(layout, shape, stored.dtype)
        if wanted != stored.shape:
            raise OpError(
                "M310",
                f"{layout.name}: the {layout.role} is {list(stored.shape)}, that of numbers of "
                f"{list(shape)} is {list(wanted)}",
            )
        return shape

    def _form(self, grid: Grid) -> Shape:
        stored = self.specs[grid.role].shape
        lead, entries = self._entries(grid)
        wanted = _stored(grid, lead, entries, self.specs[grid.role].dtype)
        if grid.index:
            # how many there are is not to be had from the shape of the numbers
            free = -2 if grid.transposed else -1
            if len(stored) == len(wanted):
                at = list(wanted)
                at[free] = stored[free]
                wanted = tuple(at)
        if stored in self._spellings(grid, wanted) or (
            not self.layout.flat
            and prod(wanted) == 1 == prod(stored)
            and len(stored) <= max(len(self.shape), 1)
        ):
            return wanted
        blocks = SHARING.get(grid.block) or "in blocks of " + " x ".join(
            str(b) if b else "all" for b in grid.block
        )
        spoken = " or ".join(str(list(s)) for s in self._spellings(grid, wanted))
        raise OpError(
            "M310",
            f"{self.layout.name}: the {grid.role} is {list(stored)}, that of numbers of "
            f"{list(self.shape)} {blocks} is {spoken}",
            help=self._fitting(grid, stored),
        )

    def _check_tables(self) -> None:
        for role, count in self.layout.tables().items():
            found = self.specs[role]
            if found.shape != (count,):
                raise OpError(
                    "M310",
                    f"{self.layout.name}: the {role} is {list(found.shape)}, codes of "
                    f"{count.bit_length() - 1} bits look up {count} numbers",
                )
        if indexed := [grid for grid in self.layout.grids() if grid.index]:
            self._check_indices(indexed)

    def _check_indices(self, grids: Sequence[Grid]) -> None:
        """OpError M310 for an index that does not name an entry for each column, and for grids of
        one index that have not as many entries.
        """
        first = self._columns(grids[0])
        for grid in grids:
            if self.specs[grid.index].shape != self.full[-1:]:
                raise OpError(
                    "M310",
                    f"{self.layout.name}: the {grid.index} is "
                    f"{list(self.specs[grid.index].shape)}, one for each of {self.full[-1]} "
                    "columns is needed",
                )
            if (found := self._columns(grid)) != first:
                raise OpError(
                    "M310",
                    f"{self.layout.name}: the {grid.role} is of {found} groups, the "
                    f"{grids[0].role} of {first}",
                )

    def _fitting(self, grid: Grid, stored: Shape) -> str:
        """Advice on blocks that fit: powers of two, as all known producers use, or the smallest."""
        plain = not (grid.transposed or grid.swizzled or grid.packing or self.layout.flat)
        if plain and grid.padded == (1, 1) and len(stored) == len(self.full) >= 2:
            found = [_side(n, g) for n, g in zip(self.full[-2:], stored[-2:], strict=True)]
            if stored[:-2] == self.full[:-2] and None not in found:
                fitting = f"`block: {found}`" if min(grid.block) else f"blocks of {found}"
                return (
                    f"{fitting} would fit, and so may others; the true one is in the checkpoint's "
                    "quantization config"
                )
        return (
            f"no block fits: the {grid.role} belongs to another {self.layout.role}, or a side was "
            "cut or joined without it"
        )

    # boxes

    def inner(self, box: Box) -> Box:
        """A box of the numbers as one of `full`: of a flat layout from its first to its last."""
        if self.layout.flat:
            low = high = 0
            for (first, stop), length in zip(box, self.shape, strict=True):
                low, high = low * length + first, high * length + stop - 1
            return ((0, 1), (low, high + 1) if prod(b - a for a, b in box) else (low, low))
        return (*((0, 1),) * (len(self.full) - len(box)), *box)

    def needs(self, box: Box) -> dict[str, Box]:
        """role -> the box of that part which a box of the numbers comes from."""
        layout, full = self.layout, self.inner(box)
        out: dict[str, Box] = {layout.role: self._codes_box(full)}
        for grid in layout.grids():
            if grid.field is None:
                out[grid.role] = self._grid_box(grid, full)
                if grid.index:
                    out[grid.index] = (full[-1],)
        for role in layout.tables():
            out[role] = tuple((0, n) for n in self.specs[role].shape)
        return out

    def codes_held(self, full: Box) -> Held:
        """The rows and columns of codes in what `needs` asks for of the codes."""
        codes = self.layout.codes
        rows, columns = full[-2:]
        if isinstance(codes, Packing) and codes.axis == -2:
            return Held(_aligned(rows, self.unit(), self.full[-2]), columns)
        return Held(rows, _aligned(columns, self.unit(), self.full[-1]))

    def entries_held(self, grid: Grid, full: Box) -> Held:
        """The rows and columns of entries that hold what a box of the numbers needs; what is stored
        may hold more before and after them (`entries_at`).
        """
        rows, columns = full[-2:]
        if grid.index:
            return Held(_over(rows, grid.block[0]), (0, self._columns(grid)))
        return Held(_over(rows, grid.block[0]), _over(columns, self._block(grid)[1]))

    def entries_at(self, grid: Grid, full: Box) -> Held:
        """The rows and columns of entries in what `needs` asks for of a grid."""
        held = self.entries_held(grid, full)
        if grid.field is not None:
            columns = self.codes_held(full).columns
            return Held(held.rows, _over(columns, self._block(grid)[1]))
        if grid.swizzled:
            return Held(_aligned(held.rows, 128), (0, -(-self._columns(grid) // 4) * 4))
        if grid.packing is not None:
            unit, _ = grid.packing.unit(self.specs[grid.role].dtype)
            if grid.packing.axis == -1:
                return Held(held.rows, _aligned(held.columns, unit))
            return Held(_aligned(held.rows, unit), held.columns)
        return held

    def unit(self) -> int:
        """The codes along the packed axis that lie in whole words, or in a whole record or run."""
        codes = self.layout.codes
        if isinstance(codes, Field):
            return self.layout.record.codes
        found, _ = codes.unit(self.specs[self.layout.role].dtype)
        return found * max(codes.run, 1)

    def grain(self) -> tuple[int, ...]:
        """Multiples at which boxes of the numbers are cut at little cost."""
        layout, codes = self.layout, self.layout.codes
        if layout.flat:
            return (1,) * len(self.shape)
        rows = columns = 1
        down = isinstance(codes, Packing) and codes.axis == -2
        rows, columns = (self.unit(), 1) if down else (1, self.unit())
        for grid in layout.grids():
            # a group is cut only where it is long
            if 0 < (wide := self._block(grid)[1]) <= 64 and not grid.index:
                columns = lcm(columns, wide)
        return (
            (*(1,) * (len(self.full) - 2), rows, columns)[-len(self.shape) :] if self.shape else ()
        )

    def codes_grain(self) -> tuple[int, ...]:
        """Multiples at which boxes of the codes' part are cut at little cost."""
        return (1,) * len(self.specs[self.layout.role].shape)

    def spec(self, role: str) -> Spec:
        """The spec of a part."""
        return self.specs[role]

    def form(self, grid: Grid) -> Shape:
        """The whole shape of a grid that is a part, axes that are not stored included."""
        return self._forms[grid]

    def whole(self, grid: Grid, axes: int) -> list[bool]:
        """Which axes of a grid it may lack where it is stored: those of which there is one entry
        for all, and those that the numbers lack.
        """
        inner = [not b for b in grid.block]
        inner = [w or 2 - i > len(self.shape) for i, w in enumerate(inner)]
        if self.layout.flat:
            inner = [True, not grid.block[1]]
        if grid.transposed:
            inner.reverse()
        return [*(not grid.leading,) * (axes - 2), *inner]

    def _spellings(self, grid: Grid, form: Shape) -> list[Shape]:
        """The shapes that a grid may be stored in; of a flat layout there is one."""
        if self.layout.flat:
            return [form[-1:]]
        lacking = self.whole(grid, len(form))
        kept = tuple(n for n, whole in zip(form, lacking, strict=True) if not whole)
        # of two axes that it may lack it may have one
        return list(dict.fromkeys([form, kept, *([(*kept, 1)] if all(lacking[-2:]) else [])]))

    def block(self, grid: Grid) -> tuple[int, int]:
        """Rows and columns of the numbers that share an entry; 0 is a whole axis."""
        return self._block(grid)

    def _block(self, grid: Grid) -> tuple[int, int]:
        if grid.field is not None:
            return 1, self.layout.record.codes // grid.field.count
        return grid.block

    def _columns(self, grid: Grid) -> int:
        if grid.index:
            # the axis is not packed: only rows of zeros are
            return self._forms[grid][-2 if grid.transposed else -1]
        return _count(self.full[-1], grid.block[1])

    def _entries(self, grid: Grid) -> tuple[Shape, tuple[int, int]]:
        rows, columns = (_count(n, b) for n, b in zip(self.full[-2:], grid.block, strict=True))
        lead = self.full[:-2] if grid.leading else (1,) * len(self.full[:-2])
        return lead, (rows, columns)

    def _codes_box(self, full: Box) -> Box:
        layout, spec = self.layout, self.specs[self.layout.role]
        codes, held = layout.codes, self.codes_held(full)
        if isinstance(codes, Field):
            record = layout.record
            low, high = held.columns
            stored: Box = (
                *full[:-1],
                (low // record.codes * record.nbytes, -(-high // record.codes) * record.nbytes),
            )
            return stored[-len(spec.shape) :]
        rows, columns = held
        if codes.axis == -1:
            columns = _in_words(codes, columns, spec.dtype)
        else:
            rows = _in_words(codes, rows, spec.dtype)
        if layout.flat:
            return _of_flat(columns, spec.shape)
        inner = (columns, rows) if codes.transposed else (rows, columns)
        stored = (*full[:-2], *inner)
        if codes.run:
            low, high = stored[-1]
            stored = (*stored[:-1], (low // codes.run, -(-high // codes.run)), (0, codes.run))
        # numbers of fewer than two axes have codes of as many
        return stored[len(stored) - len(spec.shape) :]

    def _grid_box(self, grid: Grid, full: Box) -> Box:
        stored, form = self.specs[grid.role].shape, self._forms[grid]
        at = self.entries_at(grid, full)
        rows, columns = at
        if grid.swizzled:
            inner: tuple[Side, Side] = (
                (rows[0] // 128 * grid.tile[0], min(rows[1] // 128 * grid.tile[0], form[-2])),
                (0, form[-1]),
            )
        else:
            if grid.packing is not None:
                dtype = self.specs[grid.role].dtype
                if grid.packing.axis == -1:
                    columns = _in_words(grid.packing, columns, dtype)
                else:
                    rows = _in_words(grid.packing, rows, dtype)
            inner = (columns, rows) if grid.transposed else (rows, columns)
        if self.layout.flat:
            return _of_flat(inner[1], stored)
        lead: Box = full[:-2] if grid.leading else ((0, 1),) * len(full[:-2])
        box = tuple(
            (min(low, n), min(high, n))
            for (low, high), n in zip((*lead, *inner), form, strict=True)
        )
        if len(stored) == len(form):
            return box
        if prod(form) == 1:
            return ((0, 1),) * len(stored)
        kept = tuple(
            side for side, whole in zip(box, self.whole(grid, len(form)), strict=True) if not whole
        )
        return (*kept, *((0, 1),) * (len(stored) - len(kept)))


def geometry(layout: NumberLayout, specs: Mapping[str, Spec]) -> Extents:
    """The geometry of parts that fit each other.

    OpError M303 for a dtype that the layout does not have, M304 and M310 for shapes: naming the
    role, both shapes and what would fit; M408 for a part that is not there.
    """
    return _geometry(layout, tuple(specs.items()))


@lru_cache(maxsize=4096)
def _geometry(layout: NumberLayout, specs: tuple[tuple[str, Spec], ...]) -> Extents:
    return Extents(layout, dict(specs))


def decoded(layout: NumberLayout, specs: Mapping[str, Spec], dtype: str) -> Spec:
    """The spec of the numbers. OpError as `geometry`, and M303 for a dtype that is not made."""
    if dtype not in layout.numbers:
        raise OpError(
            "M303",
            f"{layout.name} decodes to {', '.join(layout.numbers)}, not to {dtype}",
            help="write a `cast` after it",
        )
    return spec_of(dtype, geometry(layout, specs).shape)


def stored_shapes(
    layout: NumberLayout, shape: Shape, dtypes: Mapping[str, str]
) -> dict[str, Shape]:
    """role -> shape of the parts of numbers of this shape, stored with these dtypes; axes of
    length 1 that a grid may lack are there.
    """
    full = _full(layout, shape)
    out = {layout.role: codes_shape(layout, shape, dtypes[layout.role])}
    for grid in layout.grids():
        if grid.field is None:
            entries = tuple(_count(n, b) for n, b in zip(full[-2:], grid.block, strict=True))
            lead = full[:-2] if grid.leading else (1,) * len(full[:-2])
            form = _stored(grid, lead, (entries[0], entries[1]), dtypes[grid.role])
            out[grid.role] = form[-1:] if layout.flat else form
    return out


def codes_shape(layout: NumberLayout, shape: Shape, dtype: str) -> Shape:
    """The stored shape of the codes of numbers of this shape."""
    codes = layout.codes
    if isinstance(codes, Field):
        if not shape:
            raise OpError("M304", f"{layout.name} is of numbers of 1 or more axes, these have none")
        return (*shape[:-1], -(-shape[-1] // layout.record.codes) * layout.record.nbytes)
    if layout.flat:
        return (codes.words(prod(shape), dtype), 1)
    needed = 2 if codes.axis == -2 or codes.transposed or codes.padded != (1, 1) else 1
    if not shape and codes.bits == codes.word(dtype):
        needed = 0
    needed = max(needed, layout.axes)
    if len(shape) < needed:
        raise OpError(
            "M304",
            f"{layout.name} is of numbers of {needed} or more axes, these have "
            f"{len(shape) or 'none'}",
        )
    if len(shape) < 2:
        return tuple(codes.words(n, dtype) for n in shape)
    inner = list(shape[-2:])
    axis = codes.axis
    if codes.transposed:
        inner.reverse()
        axis = -3 - axis
    inner = [-(-n // m) * m for n, m in zip(inner, codes.padded, strict=True)]
    inner[axis] = codes.words(inner[axis], dtype)
    if codes.run:
        inner[-1:] = [-(-inner[-1] // codes.run), codes.run]
    return (*shape[:-2], *inner)


def fitting_padding(
    specs: Mapping[str, Spec], block: Side, choices: Sequence[Side]
) -> tuple[int, int]:
    """Of these multiples of rows and columns those to which the scale of codes of 4 bits is padded:
    the first where none fits, or where it is not there.
    """
    codes, scale = specs.get("weight"), specs.get("scale")
    if codes is not None and scale is not None and len(codes.shape) > 1:
        rows, columns = codes.shape[-2], codes.shape[-1] * BITS[codes.dtype] // 4
        entries = -(-rows // block[0]), -(-columns // block[1])
        for choice in choices:
            padded = tuple(-(-n // m) * m for n, m in zip(entries, choice, strict=True))
            if scale.shape[-2:] == padded:
                return choice
    return choices[0]


def matrices_of(name: str, specs: Mapping[str, Spec], roles: Sequence[str]) -> list[Side]:
    """The rows and columns of these parts. OpError M408 for one that is not there, M304 for one
    that is not a matrix.
    """
    found = []
    for role in roles:
        if role not in specs:
            raise OpError(
                "M408", f"{name} cannot be decoded without its {role}, which is not there"
            )
        if len(shape := specs[role].shape) != 2:
            raise OpError("M304", f"{name}: the {role} is {list(shape)}, not of 2 axes")
        found.append((shape[0], shape[1]))
    return found


def check_form(name: str, form: str, fits: Mapping[str, bool], specs: Mapping[str, Spec]) -> None:
    """OpError M310 with the shapes where parts are not of this form, of those that may fit."""
    if fits[form]:
        return
    other = next((f", they are of the form {other}" for other in fits if fits[other]), "")
    *shapes, last = (f"a {role} {list(spec.shape)}" for role, spec in specs.items())
    raise OpError(
        "M310", f"{name}: {', '.join(shapes)} and {last} are not of the form {form}{other}"
    )


def _capacity(layout: NumberLayout, stored: Spec) -> Shape:
    """The largest shape of numbers whose codes are stored so."""
    codes, shape = layout.codes, stored.shape
    if isinstance(codes, Field):
        record = layout.record
        if not shape or shape[-1] % record.nbytes:
            raise OpError(
                "M310",
                f"{layout.name}: the {layout.role} is {list(shape)}, not rows of records of "
                f"{record.nbytes} bytes",
            )
        return (*shape[:-1], shape[-1] // record.nbytes * record.codes)
    if layout.flat:
        return (codes.capacity(stored.numel, stored.dtype),)
    if codes.run:
        if len(shape) < 2 or shape[-1] != codes.run:
            raise OpError(
                "M310",
                f"{layout.name}: the {layout.role} is {list(shape)}, its last axis should have "
                f"{codes.run} entries",
            )
        shape = (*shape[:-2], shape[-2] * codes.run)
    if len(shape) < 2:
        if codes.axis == -2 or codes.transposed:
            raise OpError(
                "M304", f"{layout.name}: the {layout.role} is {list(shape)}, not rows and columns"
            )
        return tuple(codes.capacity(n, stored.dtype) for n in shape)
    inner = list(shape[-2:])
    if codes.transposed:
        inner.reverse()
    inner[codes.axis] = codes.capacity(inner[codes.axis], stored.dtype)
    return (*shape[:-2], *inner)


def _dtypes(grid: Grid) -> Sequence[str]:
    if grid.field is not None:
        return ("uint8",)
    return grid.packing.dtypes if grid.packing is not None else grid.dtypes


def _full(layout: NumberLayout, shape: Shape) -> Shape:
    if layout.flat:
        return (1, prod(shape))
    return (*(1,) * (2 - len(shape)), *shape)


def _count(length: int, block: int) -> int:
    return -(-length // block) if block else 1


def _over(side: Side, block: int) -> Side:
    """The blocks that hold a side of a box."""
    return (side[0] // block, -(-side[1] // block)) if block else (0, 1)


def _aligned(side: Side, unit: int, stop: int | None = None) -> Side:
    """A side widened to whole units."""
    high = -(-side[1] // unit) * unit
    return side[0] // unit * unit, high if stop is None else min(high, max(stop, side[1]))


def _in_words(packing: Packing, side: Side, dtype: str) -> Side:
    unit, words = packing.unit(dtype)
    return side[0] // unit * words, side[0] // unit * words + packing.words(
        side[1] - side[0] // unit * unit, dtype
    )


def _of_flat(side: Side, stored: Shape) -> Box:
    """The box of a flat part whose words lie along its one long axis, or all of it."""
    if sum(n != 1 for n in stored) > 1:
        return tuple((0, n) for n in stored)
    long = next((i for i, n in enumerate(stored) if n != 1), 0)
    return tuple(
        (min(side[0], n), min(side[1], n)) if i == long else (0, n) for i, n in enumerate(stored)
    )


def _stored(grid: Grid, lead: Shape, entries: tuple[int, int], dtype: str) -> Shape:
    rows, columns = entries[0] * grid.repeated, entries[1]
    if grid.swizzled:
        high, wide = grid.tile
        return (*lead, high * -(-rows // 128), wide * -(-columns // 4))
    inner = [columns, rows] if grid.transposed else [rows, columns]
    inner = [-(-n // m) * m for n, m in zip(inner, grid.padded, strict=True)]
    if grid.packing is not None:
        axis = -3 - grid.packing.axis if grid.transposed else grid.packing.axis
        inner[axis] = grid.packing.words(inner[axis], dtype)
    return (*lead, *inner)


def _side(n: int, g: int) -> int | None:
    """A side of blocks of which `g` cover `n` elements."""
    sizes = [*(2**i for i in range(16)), -(-n // max(1, g))]
    return next((b for b in sizes if b and -(-n // b) == g), None)


def _one_of(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"one of {', '.join(words)}"


def place(index: Sequence[int], box: Box) -> str:
    """An index within a box as one within the whole tensor."""
    return f"[{', '.join(str(i + low) for i, (low, _) in zip(index, box, strict=True))}]"
