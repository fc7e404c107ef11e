"""From the parts of one layout of integers to those of another, never through numbers: which parts
are copied, which are computed, and of what. Shapes and layouts alone say it; planning asks for it.

With `code` of a number, and `scale` and `zero` of its group, those of the target marked ',

    (code' - zero') * scale' = (code - zero) * scale,   scale' = scale
    code' = code + shift,   zero' = zero + shift

where `shift` leads from the middle of the zeros of the one to that of the other; 0 is the middle of
a layout without zeros. So a zero that the target has no place for must be the middle, and one that
it has a place for and the source does not have is. An index part says which group a column belongs
to: where the target has none, columns must be in turn.

What follows from shapes is refused here; what depends on the data, where a box is computed
(`integer_boxes`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import lru_cache
from math import lcm, prod
from typing import TYPE_CHECKING, Any

from ...core.errors import OpError
from ...core.part_names import lengths_of, stored_part
from ...core.spec import BITS, Spec
from ...core.spec import spec as spec_of
from .geometry import Extents, Held, geometry
from .groups import columns_said, group_of
from .layout import ElementType, Field, Grid, NumberLayout, Packing
from .recoding import Copied, Move
from .recoding import _outer as outer
from .word_packing import is_split

if TYPE_CHECKING:
    from ...ops.base import Box
    from .codec import LayoutCodec

# bytes of a stretch that is read by itself, of rows that are read whole, as what is between such
# stretches is cheaper to read than to skip, and of the largest box that is made of them
RUN = 2 << 10
ROW = 16 << 10
BOX = 16 << 20
HELP = "`dequantize` and `quantize` in two edges go through numbers, and round"


class IntegerRecoding:
    """How parts that fit `source`, of which `inputs` are there, become `parts`, role -> Spec, which
    fit `target`; `bytes_of` are those whose bytes follow from shapes.
    """

    # a scale is never another, so that nothing has to be known before the first box
    surveyed = merges = respells = coarse = False
    exact_in = ""

    def __init__(
        self,
        source: Extents,
        inputs: tuple[str, ...],
        target: NumberLayout,
        parts: Mapping[str, Spec],
        bytes_of: Mapping[str, bytes],
    ) -> None:
        self.source, self.inputs = source, inputs
        self.parts, self.bytes_of = dict(parts), dict(bytes_of)
        for one in (source.layout, target):
            check_integers(one)
        # refuses parts that do not fit the layout
        self.target = geometry(target, parts)
        if self.target.shape != source.shape:
            raise self._none(f"its words are those of {list(self.target.shape)}")
        self.grids = scale_of(source.layout), scale_of(target)
        was, now = (dtype_of(g, s) for g, s in zip((source, self.target), self.grids, strict=True))
        if was != now and target.role == self.grids[1].role:
            raise self._none(f"its scales are {now}, and {was} here")
        one, other = source.layout, target
        self.shift = _middle(other.zero) - _middle(one.zero)
        self.codes = code_map(one.elements, other.elements, self.shift)
        self.tiles = self._tiles()
        self.drops_zero = one.zero is not None and other.zero is None
        self.drops_index = bool(self.grids[0].index) and not self.grids[1].index
        self.zeros: tuple[int, ...] = ()
        if other.zero is not None and one.zero is not None:
            self.zeros = code_map(_elements(one.zero), _elements(other.zero), self.shift)
        self.copies = {role: copied for role in parts if (copied := self._copied(role)) is not None}

    @property
    def zero_role(self) -> str:
        """The role of the target's zeros; empty without any."""
        zero = self.target.layout.zero
        return "" if zero is None else zero.role

    @property
    def asks_positive(self) -> bool:
        """Whether scales must be positive numbers in the target, and need not be in the source."""
        one, other = self.grids
        return other.positive and not one.positive

    def grid_of(self, role: str) -> tuple[Grid | None, Grid]:
        """The grids of the source, where it has one, and of the target for a role of the target."""
        zero = self.target.layout.zero
        if zero is not None and role == zero.role:
            return self.source.layout.zero, zero
        return self.grids

    def numbers_of_codes(self, box: Box) -> Box:
        """The numbers, with all axes, whose codes lie in a box of the codes."""
        layout = self.target.layout
        if isinstance(layout.codes, Field):
            low, high = box[-1]
            each, nbytes = layout.record.codes, layout.record.nbytes
            lead = ((0, 1),) * (len(self.source.full) - len(box))
            return (*lead, *box[:-1], (low // nbytes * each, -(-high // nbytes) * each))
        packing, dtype = packing_of(layout), self.parts[layout.role].dtype
        held = held_in(packing, packing.transposed, dtype, box[-2:], self.target.full[-2:])
        return (*box[:-2], *held)

    def entries_in(self, role: str, box: Box) -> Box:
        """The entries, with all axes, that a box of a grid holds."""
        _, grid = self.grid_of(role)
        sides = self.sides(grid, box)
        packing, dtype = grid.packing, self.parts[role].dtype
        held = held_in(packing, grid.transposed, dtype, sides[-2:], self.counts(grid))
        return (*sides[:-2], *held)

    def sides(self, grid: Grid, box: Box) -> Box:
        """A box of a stored grid with the axes that it lacks."""
        form = self.target.form(grid)
        if len(box) == len(form):
            return box
        if prod(form) == 1:
            return ((0, 1),) * len(form)
        left = list(box)
        lacking = self.target.whole(grid, len(form))
        return tuple((0, 1) if lacks else left.pop(0) for lacks in lacking)

    def of_entries(self, entries: Box) -> Box:
        """The numbers that share entries of the target's grids."""
        full = self.source.full
        lead = entries[:-2] if self.grids[1].leading else tuple((0, n) for n in full[:-2])
        sides = zip(entries[-2:], self.tiles[1], full[-2:], strict=True)
        return (*lead, *((low * t, min(n, high * t)) for (low, high), t, n in sides))

    def needs(self, role: str, box: Box) -> dict[str, Box]:
        """role -> the box of each part of the source that a box of a part comes from."""
        source, (one, other) = self.source, self.grids
        empty: dict[str, Box] = {r: ((0, 0),) * len(source.spec(r).shape) for r in self.inputs}
        if box and not prod(b - a for a, b in box):
            return empty
        wanted: list[str] = []
        if role == self.target.layout.role:
            full, wanted = self.numbers_of_codes(box), [source.layout.role]
            if other.field is not None:
                zero = source.layout.zero
                wanted += [r for r in (one.role, one.index, zero and zero.role) if r]
        elif role in (other.role, self.zero_role):
            full = self.of_entries(self.entries_in(role, box))
            zero = source.layout.zero
            if role == other.role:
                wanted = [one.role, *([one.index] if self.drops_index else [])]
            if zero is not None and (role != other.role or self.drops_zero):
                wanted.append(zero.role)
        elif role == other.index and one.index:
            return empty | {one.index: box}
        else:
            return empty
        found = source.needs(outer(full, source.shape))
        return empty | {role: found[role] for role in wanted}

    def grain(self, role: str) -> tuple[int, ...]:
        """Multiples at which boxes of a part are cut at little cost."""
        shape = self.parts[role].shape
        if role != self.target.layout.role:
            return (1,) * len(shape)
        rows = columns = 1
        for geo in (self.source, self.target):
            if getattr(geo.layout.codes, "axis", -1) == -2:
                rows = lcm(rows, geo.unit())
            else:
                columns = lcm(columns, geo.unit())
        rows *= self._rows_of_runs(rows)
        record = self.target.layout.record
        if isinstance(self.target.layout.codes, Field):
            grain = (rows, columns // record.codes * record.nbytes)
            return (*(1,) * (len(shape) - 2), *grain)[-len(shape) :]
        packing, dtype = packing_of(self.target.layout), self.parts[role].dtype
        unit, words = packing.unit(dtype)
        if packing.axis == -2:
            rows = rows // unit * words
        else:
            columns = columns // unit * words
        inner = (columns, rows) if packing.transposed else (rows, columns)
        return (*(1,) * (len(shape) - 2), *inner)

    def _rows_of_runs(self, rows: int) -> int:
        """How many times so many rows are a box whose columns lie in long stretches of the source,
        where that stores columns; 1 where it stores rows, and where boxes would be large.
        """
        role, kept = self.source.layout.role, self.target.layout.role
        if _is_turned(self.source.layout) == _is_turned(self.target.layout):
            return 1
        spec, made, count = self.source.spec(role), self.parts[kept], max(1, self.source.full[-2])
        row, whole = spec.shape[-1] * BITS[spec.dtype] // 8, prod(made.shape[-2:])
        run, size = row * rows // count, whole * BITS[made.dtype] // 8 * rows // count
        wanted = -(-count // rows) if row <= ROW else RUN // max(1, run)
        return max(1, min(wanted, BOX // max(1, size)))

    # what is possible

    def _tiles(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Rows and columns that share a scale, in the source and in the target. OpError M308 where
        a block of the target has several.
        """
        (one, other), sides = self.grids, self.source.full[-2:]
        found = [
            [max(1, min(b or n, n)) for b, n in zip(geo.block(grid), sides, strict=True)]
            for geo, grid in zip((self.source, self.target), (one, other), strict=True)
        ]
        for at, geo in enumerate((self.source, self.target)):
            if self.grids[at].index:
                groups = groups_of(geo, self.grids[at])
                # those of the other, or, where both have an index, as many as there can be
                each = -(-sides[1] // max(1, groups))
                found[at][1] = each if self.grids[1 - at].index else found[1 - at][1]
                if -(-sides[1] // found[at][1]) != groups and not self.grids[1 - at].index:
                    raise self._none(f"{groups} groups are not of {found[at][1]} columns each")
        both = one.index and other.index
        if both and groups_of(self.source, one) != groups_of(self.target, other):
            raise self._none("the groups of columns are others")
        for what, was, now, n in zip(("rows", "columns"), *found, sides, strict=True):
            if was % now and was < n:
                raise self._none(f"{now} {what} share a scale there, and {was} here")
        lead = prod(self.source.full[:-2])
        if one.leading and not other.leading and lead > 1:
            raise self._none(f"one scale cannot stand for those of {lead} matrices")
        (a, b), (c, d) = found
        return (a, b), (c, d)

    def _none(self, why: str) -> OpError:
        return OpError(
            "M308",
            f"recode: there is no exact path from {self.source.layout.name} of numbers "
            f"{list(self.source.shape)} to {self.target.layout.name}: {why}",
            help=HELP,
        )

    def counts(self, grid: Grid) -> tuple[int, int]:
        """The rows and columns of the entries of a grid of the target."""
        sides = zip(self.target.full[-2:], self.tiles[1], self.target.block(grid), strict=True)
        # what is one for all is there where there are no numbers, too
        rows, columns = (-(-n // tile) if block else 1 for n, tile, block in sides)
        return rows, groups_of(self.target, grid) if grid.index else columns

    # what is copied

    def _copied(self, role: str) -> Copied | None:
        one, other = self.grids
        if role == self.target.layout.role:
            return self._copied_codes()
        if other.index and role == other.index:
            # groups that there are not have to be seen
            return None
        if role == other.role:
            checked = self.drops_zero or self.drops_index or self.asks_positive
            # what was read while planning alone is an input of something that is made
            checked = checked or not set(self.inputs) <= {*self.source.layout.roles()}
            return None if checked else self._copied_grid(one, other)
        zero, kept = self.grid_of(role)
        if role in self.bytes_of or zero is None:
            return None
        packings = zero.packing, kept.packing
        if packings[0] is None or packings[1] is None or not _is_identity(self.zeros):
            return None
        spare = (
            self.source.full[-2:][packings[1].axis] % packings[1].unit(self.parts[role].dtype)[0]
        )
        if spare or _spelled(packings[0]) != _spelled(packings[1]):
            return None
        return None if kept.nonzero and not zero.nonzero else self._copied_grid(zero, kept)

    def _copied_codes(self) -> Copied | None:
        source, target = self.source, self.target
        role, kept = source.layout.role, target.layout.role
        one, other = source.layout.codes, target.layout.codes
        if not (isinstance(one, Packing) and isinstance(other, Packing)):
            return None
        specs = source.spec(role), target.spec(kept)
        spare = source.full[-2:][one.axis] % one.unit(specs[0].dtype)[0]
        if spare or not _is_identity(self.codes) or _spelled(one) != _spelled(other):
            return None
        if specs[0].dtype != specs[1].dtype or specs[0].numel != specs[1].numel:
            return None
        return Copied(role, _turned(len(specs[0].shape), one.transposed != other.transposed))

    def _copied_grid(self, one: Grid, other: Grid) -> Copied | None:
        specs = self.source.spec(one.role), self.target.spec(other.role)
        same = self.tiles[0] == self.tiles[1] and one.leading == other.leading
        if not same or specs[0].dtype != specs[1].dtype or specs[0].numel != specs[1].numel:
            return None
        form = self.source.form(one)
        turned = _turned(len(form), one.transposed != other.transposed)
        if not turned and specs[0].shape == specs[1].shape:
            return Copied(one.role)
        first: tuple[Move, ...] = () if form == specs[0].shape else (("reshape", form),)
        made = self.target.form(other)
        last: tuple[Move, ...] = () if made == specs[1].shape else (("reshape", specs[1].shape),)
        return Copied(one.role, (*first, *turned, *last))


def recoding_of_integers(
    layout: NumberLayout,
    specs: tuple[tuple[str, Spec], ...],
    codec: LayoutCodec,
    args: Any,
    group: int | None,
    named: Collection[str] | None,
) -> IntegerRecoding:
    """The path from parts of a layout of integers to those of `codec`. OpError as `target_parts`,
    M308 where there is none, and as `geometry` where parts do not fit.
    """
    check_integers(layout)
    source = geometry(layout, dict(specs))
    own, parts, said = target_parts(codec, args, source, group, named)
    inputs = tuple(role for role, _ in specs)
    return IntegerRecoding(source, inputs, codec.layout(own, parts), parts, said)


def target_parts(
    codec: LayoutCodec, args: Any, source: Extents, group: int | None, named: Collection[str] | None
) -> tuple[Any, dict[str, Spec], Mapping[str, bytes]]:
    """The arguments with what they leave open as it is in the source, the parts that the codec then
    has for the same numbers, and the bytes of those that follow from shapes.

    `group` is what the source's arguments say of the columns that share a scale. `named` are the
    roles that there are names for, None where that is not known: a zero or an index without a name
    is left out. OpError M308 where the codec has no place for what there is, and as its own checks.
    """
    layout, scale = source.layout, scale_of(source.layout)
    each = _columns_of(source, scale, getattr(args, "group", None) or group)
    of = spec_of(dtype_of(source, scale), source.shape)
    own = _as_given(args, layout, each, scale.block == (0, 0))
    zero = "zero" in codec.parts and ("zero" not in codec.optional or layout.zero is not None)
    if hasattr(own, "symmetric"):
        named_zero = own.symmetric is None and named is not None and "zero" in named
        kept = own.symmetric is False or (named_zero and zero)
        own, zero = replace(own, symmetric=not kept), kept
    elif named is not None and "zero" in codec.optional:
        zero = zero and "zero" in named
    index = "group" in codec.parts and bool(scale.index)
    if named is not None and "group" in codec.parts:
        # a form that is read by others with an index has one of columns in turn
        index = "group" in named and (index or not codec.encodes)
    codec.validate(own, codec.encodes)
    made = codec.recoded(own, of)
    said = codec.foreseen(own, of)
    if made is not None:
        lacking = set(codec.optional) - set(made if named is None else named)
        parts = {role: part for role, part in made.items() if role not in lacking}
        said = {role: one for role, one in said.items() if role in parts}
    elif codec.encodes:
        found = zip(codec.parts, codec.encoded(own, of), strict=True)
        parts = {role: part for role, part in found if part is not None}
    else:
        asked, columns = getattr(own, "group", None), source.full[-1]
        wide = each or columns if asked is None else columns_said(codec.name, columns, asked)
        parts = _by_names(codec, own, of, layout.elements.bits, max(1, wide))
    if "scale" in parts:
        parts["scale"] = spec_of(of.dtype, parts["scale"].shape)
    if zero and "zero" not in parts:
        parts["zero"] = spec_of("int8", parts["scale"].shape)
    elif not zero:
        parts.pop("zero", None)
    parts.pop("group", None)
    if index:
        parts["group"] = (
            source.spec(scale.index) if scale.index else spec_of("int32", source.full[-1:])
        )
    parts = {role: parts[role] for role in codec.parts if role in parts}
    if codec.planning:
        own = codec.settle(own, [parts.get(role) for role in codec.parts], said)
    return own, parts, said


def _as_given(args: Any, layout: NumberLayout, each: int | None, whole: bool) -> Any:
    """The arguments with bits and groups as in the source where they are left open."""
    own = args
    if getattr(own, "bits", 0) is None:
        own = replace(own, bits=layout.elements.bits)
    if getattr(own, "form", "") is None and is_split(getattr(own, "bits", 0) or 1):
        own = replace(own, form="dense")
    open_group = hasattr(own, "group") and own.group is None
    if hasattr(own, "granularity"):
        open_group = open_group and own.granularity is None
        if open_group and whole:
            return replace(own, granularity="tensor")
    return replace(own, group=each) if open_group and each else own


def _by_names(codec: LayoutCodec, args: Any, of: Spec, bits: int, group: int) -> dict[str, Spec]:
    """The parts of numbers of this spec as the codec's conventions write them. OpError M308 where
    none does.
    """
    known = {"bits": getattr(args, "bits", None) or bits, "group": group}
    known |= dict(zip(("N", "K"), of.shape[-2:], strict=True))
    for names in codec.names:
        if any(getattr(args, name, said) != said for name, said in names.arguments.items()):
            continue
        parts = {}
        for role, text in names.parts.items():
            part = stored_part(text)
            if (lengths := lengths_of(part, known)) is None:
                break
            leading = of.shape[:-2]
            if leading and not part.shapes[0][0]:
                break
            dtype = of.dtype if of.dtype in part.dtypes else part.dtypes[0]
            parts[role] = spec_of(dtype, (*leading, *lengths))
        else:
            return parts
    raise OpError("M308", f"recode: {codec.name} does not say how parts of {of} are stored")


def _columns_of(source: Extents, scale: Grid, said: int | None) -> int | None:
    """The columns that share a scale; None: all of a row."""
    columns = source.full[-1]
    if scale.index:
        return group_of(source.layout.name, columns, groups_of(source, scale), said)
    each = source.block(scale)[1]
    return each if 0 < each < columns or (each and not columns) else None


def groups_of(geo: Extents, grid: Grid) -> int:
    """How many entries each row has."""
    return geo.form(grid)[-2 if grid.transposed else -1]


def packing_of(layout: NumberLayout) -> Packing:
    """How the codes of a layout of integers lie."""
    if not isinstance(layout.codes, Packing):
        raise TypeError(layout.codes)
    return layout.codes


def held_in(
    packing: Packing | None,
    transposed: bool,
    dtype: str,
    sides: Box,
    counts: tuple[int, ...],
) -> Held:
    """The rows and columns of codes or entries that the last two sides of a stored box hold."""
    both = [*(sides[::-1] if transposed else sides)]
    if packing is not None:
        unit, words = packing.unit(dtype)
        low, high = both[packing.axis]
        both[packing.axis] = low // words * unit, -(-high // words) * unit
    rows, columns = (
        (min(low, n), min(high, n)) for (low, high), n in zip(both, counts, strict=True)
    )
    return Held(rows, columns)


@lru_cache(maxsize=256)
def code_map(source: ElementType, target: ElementType, shift: int) -> tuple[int, ...]:
    """For each code of `source`, the code of `target` that stands for its integer and `shift`; -1
    where there is none.
    """
    codes = {number: code for code, number in enumerate(target.values())}
    return tuple(codes.get(number + shift, -1) for number in source.values())


def check_integers(layout: NumberLayout) -> None:
    """OpError M308 for layouts that are not of integers with one scale for each block."""
    simple = layout.elements.whole and not getattr(layout.codes, "run", 0)
    simple = simple and not (layout.flat or layout.less or layout.tables())
    if simple and layout.after is None and len(layout.scale) == 1:
        how, grid = layout.scale[0]
        zero = layout.zero
        alike = isinstance(grid, Grid) and (
            zero is None
            or (grid.block, grid.index, grid.leading) == (zero.block, zero.index, zero.leading)
        )
        if how == "*" and alike and not any(g.swizzled for g in layout.grids()):
            return
    raise OpError("M308", f"recode: no exact path leads from or to {layout.name} yet")


def dtype_of(geo: Extents, grid: Grid) -> str:
    """The dtype of the entries of a scale."""
    return geo.spec(grid.role).dtype if grid.field is None else grid.field.dtype


def scale_of(layout: NumberLayout) -> Grid:
    """The grid of the scale. OpError M308 for a layout of another form."""
    check_integers(layout)
    grid = layout.scale[0].what
    if not isinstance(grid, Grid):
        raise TypeError(grid)
    return grid


def _is_turned(layout: NumberLayout) -> bool:
    """Whether codes are stored by columns."""
    return isinstance(layout.codes, Packing) and layout.codes.transposed


def _elements(grid: Grid) -> ElementType:
    if grid.elements is None:
        raise TypeError(grid)
    return grid.elements


def _middle(zero: Grid | None) -> int:
    """The integer that a zero is where codes are symmetric."""
    if zero is None or _elements(zero).negative:
        return 0
    return 1 << (_elements(zero).bits - 1)


def _is_identity(codes: tuple[int, ...]) -> bool:
    return codes == tuple(range(len(codes)))


def _spelled(packing: Packing) -> tuple[object, ...]:
    """What two packings have to agree on for words to be the same, in one order of axes or the
    other.
    """
    in_turn = packing.order == tuple(range(len(packing.order)))
    return (
        packing.bits, packing.axis, () if in_turn else packing.order, packing.dense,
        packing.padded, packing.plus,
    )  # fmt: skip


def _turned(axes: int, turned: bool) -> tuple[Move, ...]:
    n = axes - 2
    return (("permute", (*range(n), n + 1, n)),) if turned else ()
