"""From the parts of one layout to those of another, never through numbers: which parts are copied,
which are computed, and of what. Shapes and layouts alone say it; planning asks for it.

With `code` and `scale` of each number, and those of the target marked ',

    table'[code'] * scale' = table[code] * scale,    scale' = scale / 2^shift

so a path is a map of codes for each shift, another packing, and a map of scales. Three of the
latter are known (`Path`):

    direct   one grid to one: an entry goes to all finer blocks. Where the other's blocks are
             coarser, entries must be powers of two; the largest in a block decides its scale,
             and what the others lack goes into their codes
    split    one grid of powers of two to a grid and the scale of all numbers: the largest power
             in the tensor decides the latter
    reform   a grid and the scale of all to the same grid and another spelling of the scale: its
             reciprocal, or an amax

What follows from shapes is refused here; what depends on the data, where a box is computed
(`recoding_boxes`).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from math import copysign, floor, frexp, isfinite, isinf, isnan, log2, prod
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from ...core.errors import OpError
from ...core.spec import BITS, Spec
from ...elements.codes import FLOATS as FORMS
from ...elements.codes import number_of
from . import rounding
from .geometry import Extents, geometry
from .layout import ElementType, Grid, NumberLayout, Packing
from .placing import PlacedParts

if TYPE_CHECKING:
    from ...ops.base import Box

Path: TypeAlias = Literal["direct", "split", "reform"]
# a step of a copy: ("reshape", shape), ("permute", axes), ("slice", axis, stop), ("pad", axis, end)
Move: TypeAlias = "tuple[str, tuple[int, ...]]"

# smaller scales are numbers that hardware may take for zero
LEAST_POWER = -126


class Copied(NamedTuple):
    """A part that holds the elements of one of the source, in places that `moves` lead to."""

    role: str
    moves: tuple[Move, ...] = ()


class Chain(NamedTuple):
    """The scale of a layout: a grid, and the scale of all numbers, by which it is multiplied or
    divided, and which constants follow.
    """

    grid: Grid
    whole: Grid | None
    how: str
    factors: tuple[float, ...]


class TargetParts(PlacedParts):
    """The parts that are made: which numbers their boxes hold, and how they are filled."""

    def of_codes(self, box: Box) -> Box:
        """The numbers, with all axes, whose codes lie in a box of the codes."""
        return self._of_codes(box)

    def of_entries(self, role: str, box: Box) -> Box:
        """The entries that a box of a grid holds."""
        return self._entries_box(role, box)

    def put_codes(self, codes: Any, full: Box, box: Box, out: Any) -> None:
        """Fills `out`, a box of the codes, with the codes of the numbers `full`, one a byte."""
        packing = self.packing
        words = codes
        if self.word >= 8 and (packing.bits, packing.order) != (self.word, ()):
            words = rounding.pack(
                rounding.Lanes(), codes, packing.bits, self.word, packing.order, packing.dense
            )
        cut = [slice(0, b - a) for a, b in full]
        self._deliver(out, words, cut, box)

    def put_entries(self, role: str, entries: Any, box: Box, out: Any) -> None:
        """Fills `out`, a box of a grid, with the entries that it holds, as they are stored."""
        self._place(role, entries, box, out)


class Recoding:
    """How parts that fit `source` become `parts`, role -> Spec, which fit `target`.

    `exact_in`: the dtype in which numbers stay what they are, though the scale of all is another by
    a rounding; "" where they stay so in float32.
    """

    # parts whose bytes follow from shapes
    bytes_of: Mapping[str, bytes] = {}

    def __init__(
        self, source: Extents, target: NumberLayout, parts: Mapping[str, Spec], exact_in: str = ""
    ) -> None:
        self.source, self.exact_in = source, exact_in
        layout = source.layout
        for one in (layout, target):
            _check_recoded(one)
        turned = isinstance(target.codes, Packing) and target.codes.transposed
        if turned or set(parts) - set(target.roles()):
            raise OpError("M308", f"recode: no exact path leads from or to {target.name} yet")
        # refuses parts that do not fit the layout
        self.target = geometry(target, parts)
        self.boxes = TargetParts(target, Spec("float32", source.shape), parts)
        self.chains = _chain(layout), _chain(target)
        self._tiles = self._tile(source, self.chains[0].grid), self._tile(self.target, self.grid)
        self.path: Path = self._path()
        self.coarse = self._is_coarse()
        self.same_codes = _same_elements(layout.elements, target.elements)
        # the power of two that all scales lose and all codes gain
        self.shift = 0
        if not self.same_codes and not self.coarse:
            self.shift = best_shift(layout.elements, target.elements)
        elif self.coarse:
            largest = headroom(layout.elements, target.elements)
            if largest is None:
                raise self._none("the largest code has none there, whatever its scale")
            self.shift = largest
        self.copies = {role: copied for role in parts if (copied := self._copied(role)) is not None}

    @property
    def grid(self) -> Grid:
        """The target's grid of scales."""
        return self.chains[1].grid

    @property
    def parts(self) -> Mapping[str, Spec]:
        return self.boxes.parts

    @property
    def tiles(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Rows and columns that share a scale, in the source and in the target."""
        return self._tiles

    @property
    def asks_powers(self) -> bool:
        """Whether scales must be powers of two in the target, and need not be in the source."""
        one, other = (chain.grid for chain in self.chains)
        free = not one.powers and stands_for(one, self.source) != "float8_e8m0fnu"
        return other.powers and free

    @property
    def asks_positive(self) -> bool:
        """Whether scales must be positive numbers in the target, and need not be in the source."""
        one, other = (chain.grid for chain in self.chains)
        return other.positive and not (one.positive and other.zeros >= one.zeros)

    @property
    def stricter(self) -> bool:
        """Whether scales of the same dtype may be refused."""
        return self.asks_powers or self.asks_positive

    @property
    def surveyed(self) -> bool:
        """Whether the largest scale has to be known before the first box."""
        return self.path == "split"

    @property
    def inputs(self) -> tuple[str, ...]:
        """The roles of the source as they are read: what is surveyed is first."""
        first = self.chains[0].grid.role
        roles = self.source.layout.roles()
        return (first, *(r for r in roles if r != first)) if self.surveyed else roles

    @property
    def merges(self) -> bool:
        """Whether two codes become one: that of a negative zero, where the target has none."""
        if self.same_codes:
            return False
        made = [c for c in self.codes(self.shift) if c >= 0]
        numbers = self.target.layout.elements.values()
        finite = [c for c in made if not isnan(numbers[c])]
        return len(set(finite)) < len(finite)

    @property
    def respells(self) -> bool:
        """Whether the scale of all numbers becomes another number, of which it may not follow."""
        return (
            self.path == "reform"
            and self.chains[1].whole is not None
            and (self.chains[0].whole is None or not self._same_whole())
        )

    def codes(self, shift: int) -> tuple[int, ...]:
        """The target's code of each of the source's codes that gain this power of two; -1 where
        there is none.
        """
        return code_map(self.source.layout.elements, self.target.layout.elements, shift)

    def needs(self, role: str, box: Box) -> dict[str, Box]:
        """role -> the box of each part of the source that a box of a part comes from."""
        source = self.source
        empty = {r: ((0, 0),) * len(source.spec(r).shape) for r in source.layout.roles()}
        if not prod(b - a for a, b in box) and box:
            return empty
        grid, whole = self.chains[0].grid.role, self.chains[0].whole
        if role == self.target.layout.role:
            full = self.boxes.of_codes(box)
            found = source.needs(_outer(full, source.shape))
            wanted = {source.layout.role: found[source.layout.role]}
            if self.coarse:
                wider = self.on_tiles(full)
                wanted[grid] = source.needs(_outer(wider, source.shape))[grid]
            return empty | wanted
        if role == self.grid.role:
            found = source.needs(
                _outer(self.of_entries(self.boxes.of_entries(role, box)), source.shape)
            )
            wanted = {grid: found[grid]}
            if self.path == "split":
                wanted[source.layout.role] = found[source.layout.role]
            return empty | wanted
        if self.path == "reform" and whole is not None:
            return empty | {whole.role: tuple((0, n) for n in source.spec(whole.role).shape)}
        return empty

    def of_entries(self, entries: Box) -> Box:
        """The numbers that share entries of the target's grid."""
        sides = zip(entries[-2:], self._tiles[1], self.source.full[-2:], strict=True)
        lead = entries[:-2] if self.boxes.leading else tuple((0, n) for n in self.source.full[:-2])
        return (*lead, *((low * t, min(n, high * t)) for (low, high), t, n in sides))

    def on_tiles(self, full: Box) -> Box:
        """A box of numbers widened to whole blocks of the target."""
        sides = zip(full[-2:], self._tiles[1], self.source.full[-2:], strict=True)
        return (*full[:-2], *((a // t * t, min(n, -(-b // t) * t)) for (a, b), t, n in sides))

    def grain(self, role: str) -> tuple[int, ...]:
        """Multiples at which boxes of a part are cut at little cost."""
        shape = self.parts[role].shape
        if role in (self.target.layout.role, self.grid.role):
            return self.boxes.grain(role)
        return (1,) * len(shape)

    # what is possible

    def _tile(self, geo: Extents, grid: Grid) -> tuple[int, int]:
        rows, columns = (
            max(1, min(b or n, n)) for b, n in zip(geo.block(grid), geo.full[-2:], strict=True)
        )
        return rows, columns

    def _path(self) -> Path:
        (one, other), (source, target) = self.chains, (self.source, self.target)
        kept = stands_for(one.grid, source) == stands_for(other.grid, target)
        if other.whole is None:
            if one.whole is not None:
                raise self._none("the scale of all numbers has no place there")
            return "direct"
        same = _same_elements(source.layout.elements, target.layout.elements)
        if kept and same:
            return "reform"
        if one.whole is None and same:
            return "split"
        raise self._none("neither codes nor scales are those of the other")

    def _is_coarse(self) -> bool:
        """Whether a block of the target holds several of the source. OpError where blocks overlap,
        and where coarse ones cannot be made.
        """
        coarse = False
        (one, other), sides = self.chains, self.source.full[-2:]
        for was, now, n in zip(*self._tiles, sides, strict=True):
            if was % now and was < n:
                if now % was and now < n:
                    raise self._none(f"blocks of {was} and of {now} overlap")
                coarse = True
        lead = prod(self.source.full[:-2])
        if one.grid.leading and not other.grid.leading and lead > 1:
            raise self._none(f"one scale cannot stand for those of {lead} matrices")
        if one.whole is not None and other.whole is not None:
            several, wanted = (
                geo.spec(grid.role).numel
                for geo, grid in ((self.source, one.whole), (self.target, other.whole))
            )
            if several not in (1, wanted):
                raise self._none(f"the {other.whole.role} has no room for {several} scales")
        if not coarse:
            return False
        if self.path != "direct":
            raise self._none(
                "blocks of the other hold several scales, for whose ratio codes have no room"
            )
        return True

    def _none(self, why: str) -> OpError:
        return OpError(
            "M308",
            f"recode: there is no exact path from {self.source.layout.name} to "
            f"{self.target.layout.name}: {why}",
            help="`dequantize` and `quantize` in two edges go through numbers, and round",
        )

    # what is copied

    def _copied(self, role: str) -> Copied | None:
        source, target = self.source, self.target
        if role == target.layout.role:
            return self._copied_codes()
        one, other = self.chains
        if role == other.grid.role:
            if self.path == "split" or self.shift or self.coarse:
                return None
            if stands_for(one.grid, source) != stands_for(other.grid, target):
                return None
            if (
                self.stricter
                or self._tiles[0] != self._tiles[1]
                or one.grid.leading != other.grid.leading
            ):
                return None
            if BITS[source.spec(one.grid.role).dtype] != BITS[target.spec(role).dtype]:
                return None
            return Copied(one.grid.role, self._moves())
        if one.whole is None or other.whole is None or not self._same_whole():
            return None
        return Copied(one.whole.role, (("reshape", target.spec(role).shape),))

    def _same_whole(self) -> bool:
        one, other = self.chains
        if one.whole is None or other.whole is None or one[2:] != other[2:]:
            return False
        specs = self.source.spec(one.whole.role), self.target.spec(other.whole.role)
        return specs[0].dtype == specs[1].dtype and specs[0].numel == specs[1].numel

    def _copied_codes(self) -> Copied | None:
        source, target = self.source, self.target
        one, other = source.layout.codes, target.layout.codes
        specs = source.spec(source.layout.role), target.spec(target.layout.role)
        if not (isinstance(one, Packing) and isinstance(other, Packing)) or not self.same_codes:
            return None
        if self.coarse or self.shift or _spelled(one) != _spelled(other):
            return None
        if BITS[specs[0].dtype] != BITS[specs[1].dtype] or specs[0].numel != specs[1].numel:
            return None
        moves = () if specs[0].shape == specs[1].shape else (("reshape", specs[1].shape),)
        return Copied(source.layout.role, moves)

    def _moves(self) -> tuple[Move, ...]:
        """From the source's grid as it is stored to the target's, whose entries are the same."""
        source, target, lead = self.source, self.target, self.source.full[:-2]
        one, other = self.chains[0].grid, self.grid
        lead = lead if one.leading else (1,) * len(lead)
        n = len(lead)
        stored = source.spec(one.role).shape
        entries = tuple(
            -(-length // t) for length, t in zip(source.full[-2:], self._tiles[0], strict=True)
        )
        moves: list[Move] = [("reshape", source.form(one))]
        at = list(source.form(one)[-2:])
        if one.swizzled:
            high, wide = at[0] // one.tile[0], at[1] // one.tile[1]
            moves.append(("reshape", (*lead, high, wide, 32, 4, 4)))
            moves.append(("permute", (*range(n), n, n + 3, n + 2, n + 1, n + 4)))
            at = [high * 128, wide * 4]
            moves.append(("reshape", (*lead, *at)))
        elif one.transposed:
            moves.append(("permute", (*range(n), n + 1, n)))
            at.reverse()
        for axis, count in enumerate(entries):
            if at[axis] != count:
                moves.append(("slice", (n + axis, count)))
        wanted = list(target.form(other)[-2:])
        if other.swizzled:
            inner = [wanted[0] // other.tile[0] * 128, wanted[1] // other.tile[1] * 4]
        else:
            inner = wanted[::-1] if other.transposed else wanted
        for axis, count in enumerate(entries):
            if inner[axis] != count:
                moves.append(("pad", (n + axis, inner[axis])))
        if other.swizzled:
            high, wide = inner[0] // 128, inner[1] // 4
            moves.append(("reshape", (*lead, high, 4, 32, wide, 4)))
            moves.append(("permute", (*range(n), n, n + 3, n + 2, n + 1, n + 4)))
        elif other.transposed:
            moves.append(("permute", (*range(n), n + 1, n)))
        moves.append(("reshape", target.spec(other.role).shape))
        if all(name == "reshape" for name, _ in moves):
            moves = [moves[-1]] if stored != target.spec(other.role).shape else []
        return tuple(moves)


def whole_of(layout: NumberLayout) -> Grid | None:
    """The grid of a layout's scale of all numbers, where blocks have their own as well."""
    grids = [term.what for term in layout.scale if isinstance(term.what, Grid)]
    return grids[1] if len(grids) > 1 else None


@lru_cache(maxsize=1024)
def recoding(
    layout: NumberLayout,
    specs: tuple[tuple[str, Spec], ...],
    target: NumberLayout,
    parts: tuple[tuple[str, Spec], ...],
    exact_in: str = "",
) -> Recoding:
    """The path from parts of one layout to those of another. OpError M308 where there is none, and
    as `geometry` where parts do not fit.
    """
    return Recoding(geometry(layout, dict(specs)), target, dict(parts), exact_in)


def stands_for(grid: Grid, geo: Extents) -> str:
    """The float dtype of the entries of a grid."""
    dtype = geo.spec(grid.role).dtype
    return grid.byte if dtype == "uint8" else dtype


def least_power(dtype: str) -> int:
    """The exponent of the smallest power of two that a scale of this dtype is made."""
    if dtype == "float8_e8m0fnu":
        return -127
    # of scales of a byte the smallest of all, of others the smallest of full precision
    return (
        floor(log2(FORMS[dtype].quantum))
        if BITS[dtype] == 8
        else max(LEAST_POWER, floor(log2(FORMS[dtype].quantum)))
    )


def most_power(dtype: str) -> int:
    """The exponent of the largest power of two of a dtype."""
    return 127 if dtype == "float8_e8m0fnu" else floor(log2(FORMS[dtype].largest))


@lru_cache(maxsize=1024)
def code_map(source: ElementType, target: ElementType, shift: int) -> tuple[int, ...]:
    """For each code of `source`, the code of `target` that stands for 2^shift times its number, -1
    where there is none. NaN is NaN, of the same sign where there are two; so is zero.
    """
    numbers, (codes, nans) = target.values(), _by_number(target)
    found = []
    given = source.values()
    # one NaN has no sign, whatever its bits
    signed = sum(map(isnan, given)) > 1
    for code, number in enumerate(given):
        if isnan(number):
            if code < len(numbers) and isnan(numbers[code]):
                found.append(code)
                continue
            sign = signed and code >= len(given) // 2
            found.append(nans.get(sign, nans.get(not sign, -1)))
            continue
        wanted = number if isinf(number) else number * 2.0**shift
        there = codes.get((wanted, _is_negative(wanted)))
        if there is None and wanted == 0:
            there = codes.get((0.0, False))
        found.append(-1 if there is None else there)
    return tuple(found)


@lru_cache(maxsize=64)
def _by_number(elements: ElementType) -> tuple[dict[tuple[float, bool], int], dict[bool, int]]:
    """The code of each number with its sign, and of NaN in either half of the codes."""
    numbers = elements.values()
    codes: dict[tuple[float, bool], int] = {}
    nans: dict[bool, int] = {}
    for code, number in enumerate(numbers):
        if isnan(number):
            nans.setdefault(code >= len(numbers) // 2, code)
        else:
            codes.setdefault((number, _is_negative(number)), code)
    return codes, nans


@lru_cache(maxsize=256)
def best_shift(source: ElementType, target: ElementType) -> int:
    """The shift under which most codes have one of the other's; of several the smallest."""

    def lost(shift: int) -> int:
        return sum(code < 0 for code in code_map(source, target, shift))

    return min(range(-32, 33), key=lambda shift: (lost(shift), abs(shift), shift))


@lru_cache(maxsize=256)
def headroom(source: ElementType, target: ElementType) -> int | None:
    """The largest shift under which the largest code has one of the other's; None without one."""
    top = max((x for x in source.values() if isfinite(x)), default=0.0)
    codes, _ = _by_number(target)
    return max((s for s in range(-64, 65) if (top * 2.0**s, False) in codes), default=None)


def _is_negative(number: float) -> bool:
    return copysign(1, number) < 0


def _same_elements(one: ElementType, other: ElementType) -> bool:
    return one == other or (bool(one.values()) and _bits_of(one) == _bits_of(other))


def _bits_of(elements: ElementType) -> tuple[str, ...]:
    return tuple(map(repr, elements.values()))


def _spelled(packing: Packing) -> tuple[object, ...]:
    """What two packings have to agree on for words to be the same."""
    in_turn = packing.order == tuple(range(len(packing.order)))
    return (
        packing.bits, packing.axis, () if in_turn else packing.order, packing.dense,
        packing.transposed, packing.padded, packing.plus,
    )  # fmt: skip


def _check_recoded(layout: NumberLayout) -> None:
    """OpError M308 for layouts that no path is known for."""
    simple = isinstance(layout.codes, Packing) and not (
        layout.flat or layout.less or layout.zero or layout.tables() or layout.elements.whole
    )
    if not simple or layout.after is not None or not layout.scale:
        raise OpError("M308", f"recode: no exact path leads from or to {layout.name} yet")
    for grid in layout.grids():
        if grid.field or grid.packing or grid.index or grid.elements:
            raise OpError("M308", f"recode: no exact path leads from or to {layout.name} yet")


def _chain(layout: NumberLayout) -> Chain:
    """The scale of a layout. OpError M308 for one of another form."""
    (how, first), *rest = layout.scale
    whole, between = None, "*"
    factors: list[float] = []
    good = how == "*" and isinstance(first, Grid)
    for step, what in rest:
        if isinstance(what, Grid):
            good = good and whole is None and not factors and what.block == (0, 0)
            whole, between = what, step
        else:
            good = good and step == "*"
            factors.append(what)
        good = good and step in ("*", "/")
    if not good or not isinstance(first, Grid) or (factors and whole is None):
        raise OpError("M308", f"recode: no exact path leads from or to {layout.name} yet")
    return Chain(first, whole, between, tuple(factors))


def _outer(full: Box, shape: tuple[int, ...]) -> Box:
    """A box of all axes as one of the numbers, which may have fewer than two."""
    return full[len(full) - len(shape) :] if shape else ()


@lru_cache(maxsize=64)
def entry_values(dtype: str) -> tuple[float, ...]:
    """The positive finite numbers of a float dtype of a byte, in order."""
    numbers = {float(number_of(dtype, code).real) for code in range(256)}
    return tuple(sorted(x for x in numbers if isfinite(x) and x > 0))


def is_power(number: float) -> bool:
    """Whether a number is a power of two."""
    return frexp(number)[0] == 0.5
