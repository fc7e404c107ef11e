"""Numbers encoded as the parts of a layout: codes, their scales and, where there are any, the scale
of all of them and zeros.

A box of codes or scales comes from the box of numbers that `needs` names: whole tiles, a tile being
the numbers that share a scale. Tiles too large for a box, above all that which is the whole tensor,
are surveyed first: `survey` takes all boxes of the numbers in turn and keeps the largest
magnitudes, so that no box is larger for them. Work goes in chunks of rows, whose numbers, scaled
numbers and codes stay in a cache.

What is stored for codes that were computed is kept in `memo`, from which `recall` fills boxes of
the other parts without the numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from math import isfinite, prod
from typing import TYPE_CHECKING, Any, TypeAlias

from ...core.errors import OpError
from ...core.spec import BITS, Spec, coordinates
from ...elements.raw import carrier, typed
from . import encoding_error, float8_codes, rounding, shared_scale
from .layout import NumberLayout
from .magnitudes import amax, extremes
from .placing import PlacedParts, copy_raw
from .rounding import Lanes, lanes_of, largest_of
from .scale_rules import ScaleRule, Scales, rounded_to
from .spreading import apply
from .stored_scales import as_stored
from .tables import imported

if TYPE_CHECKING:
    import numpy as np

    from ...ops.base import Box, Meter

    Array: TypeAlias = "np.ndarray[Any, Any]"

# numbers of one step: in numpy few enough for a second-level cache, in torch so many that an op
# takes longer than the interpreter's lock to change hands, and on a device more
CHUNK = {"numpy": 1 << 18, "cpu": 1 << 20, "device": 1 << 25}
# numbers of one scale that a meter is told of at once: of 65,536 at a time this took almost as long
# as encoding them, of so many a third
TOLD = 1 << 20

# numbers of a tile of which the magnitude is kept, rather than what is stored
LARGE = 1 << 8


class TensorEncoding(PlacedParts):
    """How numbers of `spec` become `parts`, role -> Spec, by the arithmetic of `rule`. `constant`
    has the bytes of those parts that are the same whatever the numbers are.

    `non_finite`: refuse (M406 at the first), saturate (infinities get the largest code, NaN its own
    code or M406 without one) or keep (as `rule` makes it).
    """

    def __init__(
        self,
        layout: NumberLayout,
        spec: Spec,
        parts: Mapping[str, Spec],
        rule: ScaleRule,
        non_finite: str = "refuse",
        constant: Mapping[str, bytes] = {},
    ) -> None:
        super().__init__(layout, spec, parts)
        self.constant = {role: data for role, data in constant.items() if role in self.parts}
        if rule.region == "tensor" and len(spec.shape) > 2:
            rule = replace(rule, region="stack")
        self.rule, self.non_finite = rule, non_finite

    def _inside(self, array: Any, full: Box) -> Any:
        """The numbers of `full` of the array that `needs` asked for, with the axes of `full`."""
        if not self.layout.flat:
            return array.reshape(tuple(b - a for a, b in full))
        inner = max(1, prod(self.spec.shape[1:]))
        first = full[-1][0] // inner * inner
        return array.reshape(1, -1)[:, full[-1][0] - first : full[-1][1] - first]

    # the first pass

    def survey(self, array: Any, box: Box, known: Array | None = None) -> Array:
        """The largest magnitudes so far, in float32: of the whole tensor, or of each entry of a
        grid of large tiles. `array` holds the box of the numbers; boxes come in row-major order.

        OpError M406 at the first number that is not finite, if these are refused.
        """
        import numpy as np

        shape = self.entries if self.surveys_tiles else (1, 1)
        found: Array = np.zeros(shape, "f4") if known is None else known
        if 0 in array.shape:
            return found
        saturate = self.non_finite == "saturate"
        full = box if len(box) > 1 else (*((0, 1),) * (2 - len(box)), *box)
        matrices = array.reshape(tuple(b - a for a, b in full))
        high, wide = self.tile if self.surveys_tiles else self.full[-2:]
        for at in product(*(range(b - a) for a, b in full[:-2])):
            matrix = matrices[at]
            self._refuse_codeless(matrix, at, full, 0)
            (top, bottom), (left, right) = full[-2:]
            for row in range(top // high, -(-bottom // high)):
                for column in range(left // wide, -(-right // wide)):
                    rows = slice(max(0, row * high - top), (row + 1) * high - top)
                    columns = slice(max(0, column * wide - left), (column + 1) * wide - left)
                    part = matrix[rows, columns]
                    largest = amax(part, self.spec.dtype, tuple(part.shape), saturate)
                    if self.non_finite == "refuse" and not isfinite(largest.max()):
                        raise self._not_finite(part, at, full, rows.start, columns.start)
                    lead = tuple(a + i for (a, _), i in zip(full[:-2], at, strict=True))
                    entry = (*(lead if self.leading and self.surveys_tiles else ()), row, column)
                    found[entry] = np.maximum(found[entry], largest[0, 0])
        return found

    # encoding

    def remembers(self) -> int:
        """The most bytes that `encode` keeps in `memo`."""
        if self.surveys_tiles:
            return 0
        return sum(_KeptEntries.size(self.entries, kind) for kind in self._memorable().values())

    def _memorable(self) -> dict[str, str]:
        """What is kept in `memo`, and the numpy dtypes of its entries."""
        if self._keeps_amax:
            return {"amax": "<f4"}
        return {role: carrier(self._kept_as(role)) for role in self._followers()}

    def _known(self, memo: dict[str, Any], name: str) -> _KeptEntries:
        """The entries of that name in `memo`; in the memory `room` that is in it, if there is."""
        found: _KeptEntries | None = memo.get(name)
        if found is None:
            at, room = 0, memo.get("room")
            for other, kind in self._memorable().items():
                size = _KeptEntries.size(self.entries, kind)
                if other == name:
                    part = None if room is None else room[at : at + size]
                    found = memo.setdefault(name, _KeptEntries(self.entries, kind, part))
                at += size
        if found is None:
            raise ValueError(f"{self.layout.name}: {name} is not kept")
        return found

    @property
    def _keeps_amax(self) -> bool:
        """Whether magnitudes are kept in `memo`, from which scales and codes follow, in whatever
        order they are asked for; of small tiles, what is stored is less.
        """
        return prod(self.tile) >= LARGE and not self.rule.asymmetric

    def _followers(self) -> dict[str, Spec]:
        """The parts that encoding codes leaves in `memo`."""
        return {r: s for r, s in self.parts.items() if r in (self.grid.role, self._zero) and r}

    def recall(
        self,
        role: str,
        box: Box,
        out: Any,
        memo: dict[str, Any] | None = None,
        survey: Array | None = None,
    ) -> bool:
        """Fills `out` as `encode` would, from `memo` and `survey` alone; False where these are not
        enough.
        """
        if role == self.layout.role:
            return False
        if role not in self._followers() or self.surveys_tiles:
            self.encode(None, role, box, out, survey=survey)
            return True
        name = "amax" if self._keeps_amax else role
        entries = None
        if memo is not None:
            entries = self._known(memo, name).get(_slices(self._entries_box(role, box)))
        if entries is None:
            return False
        if self._keeps_amax:
            whole = None if self.whole is None else self._scale_of_all(survey)
            short = self._is_short and box[-1][1] == self.parts[role].shape[-1]
            scales = self.rule.scales(self.layout.elements, self.spec.dtype, entries, whole, short)
            entries = self._kept(role, scales, None)
        self._place(role, entries, box, out)
        return True

    def encode(
        self,
        array: Any,
        role: str,
        box: Box,
        out: Any,
        meter: Meter | None = None,
        memo: dict[str, Any] | None = None,
        survey: Array | None = None,
    ) -> None:
        """Fills `out`, raw elements, with `box` of a part, from the box of the numbers that `needs`
        names. `survey` is what `survey` found, where `surveyed`.
        """
        if self.whole is not None and role == self.whole.role:
            self._fill(out, self._scale_of_all(survey), self.parts[role].dtype)
            return
        if role in self.constant:
            copy_raw(out, self.constant_part(role)[_slices(box)])
            return
        if role != self.layout.role:
            self._entries(array, role, box, out, memo, survey)
            return
        full = self._numbers(role, box)
        if full is None or not prod(b - a for a, b in full):
            return
        region = self._of_codes(box)
        numbers = self._inside(array, full)
        if survey is not None and not self.surveys_tiles:
            survey = self._scale_of_all(survey)
        cut = [slice(a - c, b - c) for (a, b), (c, _) in zip(region, full, strict=True)]
        words = self._words(out, full, box)
        for at in product(*(range(n) for n in numbers.shape[:-2])):
            inside = (cut[-2], cut[-1])
            for part, room, place, here in self._rows(numbers[at], words[at], full, inside):
                self._matrix(part, at, place, room, here, meter, memo, survey)
        self._deliver(out, words, cut, box)

    def constant_part(self, role: str) -> Array:
        """The raw elements of a part that is the same whatever the numbers are."""
        import numpy as np

        part = self.parts[role]
        raw = np.frombuffer(self.constant[role], carrier(part.dtype))
        # torch warns of arrays that cannot be written
        made: Array = raw.reshape(part.shape).copy()
        return made

    def _scale_of_all(self, survey: Array | None) -> Array:
        import numpy as np

        if survey is None and not self.spec.numel:
            survey = np.zeros((1, 1), "f4")
        if survey is None:
            raise ValueError(f"{self.layout.name}: nothing is known of the whole tensor")
        return self.rule.whole(survey, self.spec.dtype)

    def _fill(self, out: Any, value: Array, dtype: str) -> None:
        copy_raw(out, as_stored(value.reshape(-1)[:1], dtype)[0])

    def _entries(
        self,
        array: Any,
        role: str,
        box: Box,
        out: Any,
        memo: dict[str, Any] | None,
        survey: Array | None,
    ) -> None:
        """`encode` of scales, or of zeros."""
        import numpy as np

        entries = self._entries_box(role, box)
        if not (self.spec.numel and prod(b - a for a, b in entries)):
            out[...] = 0
            if not self.spec.numel and role == self.grid.role and self.whole is None:
                scale = self.rule.of_nothing(self.layout.elements, self.spec.dtype)
                self._fill(out, scale, self.parts[role].dtype)
            return
        if self.surveys_tiles:
            if survey is None:
                raise ValueError(f"{self.layout.name}: nothing is known of the whole tensor")
            found = survey[tuple(slice(a, b) for a, b in entries)]
            scales = self.rule.scales(self.layout.elements, self.spec.dtype, found)
            self._place(role, as_stored(scales.stored, self.parts[role].dtype), box, out)
            return
        full = self._of_entries(entries)
        numbers = self._inside(array, full)
        made = np.empty([b - a for a, b in entries], carrier(self._kept_as(role)))
        whole = None if self.whole is None else self._scale_of_all(survey)
        for at in product(*(range(n) for n in numbers.shape[:-2])):
            matrix = numbers[at]
            step = self._step(lanes_of(matrix), matrix.shape[-1])
            for row in range(0, matrix.shape[0], step):
                part = matrix[row : row + step]
                scales, zero, _ = self._scales(part, at, full, row, whole, memo)
                first = row // self.tile[0]
                kept = made[at][first : first + scales.stored.shape[0]]
                kept[...] = self._kept(role, scales, zero)
        self._place(role, made, box, out)

    def _kept_as(self, role: str) -> str:
        return "uint8" if role == self._zero else self.parts[role].dtype

    def _kept(self, role: str, scales: Scales, zero: Array | None) -> Array:
        """Entries as they are kept: scales as they are stored, zeros one code a byte."""
        if role != self._zero:
            if scales.raw is not None and BITS[self.parts[role].dtype] == 8:
                return scales.raw
            return as_stored(scales.stored, self.parts[role].dtype)
        if zero is None:
            raise ValueError(f"{self.layout.name}: these scales have no zeros")
        # added to unsigned integers, the offset wraps
        elements = self.layout.elements
        offset = 0 if elements.negative else 1 << (elements.bits - 1)
        found: Array = (zero.astype("i1").view("u1") + offset).astype("u1")
        return found

    def _step(self, lanes: Lanes, columns: int) -> int:
        """The rows of a chunk: whole tiles."""
        size = CHUNK["numpy" if lanes.device is None else "cpu" if lanes.on_cpu else "device"]
        high = 1 if self.surveys_tiles else self.tile[0]
        return max(1, size // max(1, columns) // high) * high

    def _refuse_codeless(self, matrix: Any, at: tuple[int, ...], full: Box, row: int) -> None:
        """M406 at a NaN that would be saturated, where codes have none."""
        if self.non_finite != "saturate" or self._has_nan:
            return
        largest = amax(matrix, self.spec.dtype, tuple(matrix.shape))
        if largest.max() != largest.max():
            raise self._not_finite(matrix, at, full, row, 0, self.layout.name)

    def _not_finite(
        self, matrix: Any, at: tuple[int, ...], full: Box, row: int, column: int, nan: str = ""
    ) -> OpError:
        """M406 for a matrix from this row and column of matrix `at` of the numbers `full` on."""
        (top, left), number = encoding_error.first_odd(matrix, self.spec.dtype, bool(nan))
        index = [a + i for (a, _), i in zip(full, (*at, row + top, column + left), strict=True)]
        if self.layout.flat:
            # tiles may be rows here
            flat = full[-1][0] + (row + top) * self.tile[1] + column + left
            index = list(coordinates(flat, self.spec.shape))
        return encoding_error.not_finite(index[len(index) - len(self.spec.shape) :], number, nan)

    @property
    def _has_nan(self) -> bool:
        return any(v != v for v in self.layout.elements.values())

    def _scales(
        self,
        part: Any,
        at: tuple[int, ...],
        full: Box,
        row: int,
        whole: Array | None,
        memo: dict[str, Any] | None,
    ) -> tuple[Scales, Array | None, Array]:
        """The scales of the tiles of some rows from row `row` on, their zeros if there are any, and
        their largest magnitudes.
        """
        import numpy as np

        elements, dtype = self.layout.elements, self.spec.dtype
        self._refuse_codeless(part, at, full, row)
        if self.rule.asymmetric:
            low, high = extremes(part, dtype, self.tile)
            largest = np.maximum(high, -low)
        else:
            largest = self._amax(part, at, full, row, memo)
        # the largest of what has no sign is NaN or infinite where any is
        if self.non_finite == "refuse" and not isfinite(largest.max()):
            raise self._not_finite(part, at, full, row, 0)
        if self.rule.asymmetric:
            scales, zero = self.rule.ranges(elements, dtype, low, high)
            return scales, zero, largest
        short = self._is_short and part.shape[-1] % self.grid.block[1] != 0
        scales = self.rule.scales(elements, dtype, largest, whole, short)
        if self.non_finite == "refuse" and not scales.divides and not isfinite(scales.factor.max()):
            raise encoding_error.too_small(largest, scales.factor, at, full, row, self.tile)
        return scales, None, largest

    @property
    def _is_short(self) -> bool:
        """Whether the last block of a flat layout has fewer numbers than the others."""
        return self.layout.flat and self.spec.numel % self.grid.block[1] != 0

    def _rows(
        self, matrix: Any, words: Any, full: Box, inside: tuple[slice, slice]
    ) -> Iterator[tuple[Any, Any, Box, tuple[slice, slice]]]:
        """A matrix with the words for its codes, its place and what is `inside` of it; of flat
        numbers tiles as rows, then what is left.
        """
        wide, count = self.tile[1], matrix.shape[-1]
        if not self.layout.flat or count <= wide or wide % self.unit:
            yield matrix, words, full, inside
            return
        words, whole = words.reshape(1, -1), count // wide * wide
        here = self.packing.words(whole, self.parts[self.layout.role].dtype)
        rows = whole // wide
        tiles = matrix[:, :whole].reshape(rows, wide)
        yield tiles, words[:, :here].reshape(rows, -1), full, inside
        if whole < count:
            place = ((0, 1), (full[-1][0] + whole, full[-1][1]))
            last = inside[1]
            left = slice(max(0, last.start - whole), max(0, last.stop - whole))
            yield matrix[:, whole:], words[:, here:], place, (inside[0], left)

    def _matrix(
        self,
        matrix: Any,
        at: tuple[int, ...],
        full: Box,
        words: Any,
        inside: tuple[slice, slice],
        meter: Meter | None,
        memo: dict[str, Any] | None,
        known: Array | None,
    ) -> None:
        """Codes of a matrix that begins and ends with tiles into `words`; `meter` hears of those
        `inside`. `known`: the magnitudes of surveyed tiles, or the scale of the whole tensor.
        """
        import numpy as np

        by_table = self._by_table(matrix, at, full, memo, known)
        if by_table is not None:
            self._looked_up(matrix, full, words, inside, meter, *by_table)
            return
        elements, given = self.layout.elements, matrix
        floats = bool(elements.dtype) and elements.bits == 8 and isinstance(matrix, np.ndarray)
        if floats and imported() is not None:
            # torch's casts take less of a processor; magnitudes are numpy's still
            matrix, words = typed(matrix, self.spec.dtype), typed(words, "uint8")
            floats = False
        lanes = lanes_of(matrix)
        rows, columns = matrix.shape
        zero = None
        step = self._step(lanes, columns)
        for row in range(0, rows, step):
            part, raw = matrix[row : row + step], given[row : row + step]
            if self.surveys_tiles:
                scales, largest = self._surveyed_scales(at, full, row, part, known)
                self._refuse_codeless(raw, at, full, row)
            else:
                scales, zero, largest = self._scales(raw, at, full, row, known, memo)
                self._remember(scales, zero, at, full, row, memo)
            shape = tuple(part.shape)
            tame = bool(np.isfinite(largest).all() and np.isfinite(scales.factor).all())
            wild = self.non_finite != "refuse" and not (tame and self.non_finite == "keep")
            over = None
            doubtful = wild or self.rule.saturates or self._are_beyond(scales, largest)
            told = meter is not None and doubtful
            told = told and (wild or self._may_saturate(scales, largest, zero))
            if floats and not wild:
                codes, of = words[row : row + step], (self.spec.dtype, scales, self.tile)
                float8_codes.fill_codes(part, *of, largest, elements, codes)
                if told:
                    over = float8_codes.too_large(codes, part, *of, elements)
            else:
                numbers, factor = self._scaled(lanes, part, scales, zero, wild)
                if told:
                    over = rounding.beyond(lanes, numbers, elements)
                if doubtful and lanes.device is not None and elements.bits == 8 and elements.dtype:
                    rounding.clamp(numbers, elements)
                with np.errstate(all="ignore"):
                    codes = self._codes(lanes, numbers, part, factor, wild, words[row : row + step])
            if meter is not None:
                place = encoding_error.place(self, full, row, shape, scales.stored.shape, inside)
                made = encoding_error.Made(part, codes, over, scales, zero, largest, tame)
                encoding_error.tell(meter, self, lanes, made, place)

    def _by_table(
        self,
        matrix: Any,
        at: tuple[int, ...],
        full: Box,
        memo: dict[str, Any] | None,
        survey: Array | None,
    ) -> tuple[Scales, Array] | None:
        """The scale of a whole matrix and the magnitude that it is of, if its codes follow from the
        bits of its numbers and none lies beyond the codes.
        """
        import numpy as np

        elements, dtype = self.layout.elements, self.spec.dtype
        floats = bool(elements.dtype) and elements.bits == self.word == 8 and BITS[dtype] == 16
        if not floats or self.non_finite == "saturate" or not isinstance(matrix, np.ndarray):
            return None
        if not self.surveys_tiles:
            if matrix.shape != self.tile or self.layout.flat:
                return None
            scales, zero, largest = self._scales(matrix, at, full, 0, survey, memo)
            self._remember(scales, zero, at, full, 0, memo)
        else:
            lead = tuple(a + i for (a, _), i in zip(full[:-2], at, strict=True))
            known = survey if survey is None or survey.size == 1 else survey[lead]
            if known is None or known.size != 1:
                return None
            largest = known.reshape(1, 1)
            scales = self.rule.scales(elements, dtype, largest)
        beyond = self._may_saturate(scales, largest, None)
        return None if beyond or not np.isfinite(scales.factor).all() else (scales, largest)

    def _looked_up(
        self,
        matrix: Array,
        full: Box,
        words: Array,
        inside: tuple[slice, slice],
        meter: Meter | None,
        scales: Scales,
        largest: Array,
    ) -> None:
        """`_matrix` by a table of the codes of all numbers."""
        elements, dtype, lanes = self.layout.elements, self.spec.dtype, Lanes()
        step = max(1, TOLD // max(1, matrix.shape[1]))
        for row in range(0, len(matrix), step):
            part, codes = matrix[row : row + step], words[row : row + step]
            count = prod(self.tile)
            shared_scale.fill_codes(part, dtype, scales, elements.dtype, codes, count)
            if meter is not None:
                at = encoding_error.place(self, full, row, part.shape, (1, 1), inside)
                made = encoding_error.Made(part, codes, None, scales, None, largest, True)
                encoding_error.tell(meter, self, lanes, made, at)

    def _scaled(
        self, lanes: Lanes, part: Any, scales: Scales, zero: Array | None, wild: bool
    ) -> tuple[Any, Any]:
        """Some rows of a matrix as float32 that is rounded to codes next, or in the dtype that they
        are of where quotients are rounded to that and all of them are tame; and their factors.
        """
        import numpy as np

        if not wild and self._divides_at_once(lanes, scales):
            numbers = typed(part, self.spec.dtype)
            quotients = lanes.take("quotients", tuple(part.shape), "u2").view(numbers.dtype)
            factor = lanes.of(np.ascontiguousarray(scales.factor, "f4")).to(numbers.dtype)
            return lanes.xp.divide(numbers, factor, out=quotients), factor
        numbers = lanes.take("numbers", tuple(part.shape), "f4")
        lanes.widen(part, self.spec.dtype, numbers)
        factor = lanes.of(np.ascontiguousarray(scales.factor, "f4"))
        with np.errstate(all="ignore"):
            op = lanes.xp.divide if scales.divides else lanes.xp.multiply
            apply(lanes, numbers, factor, self.tile, op)
            lanes.narrow(numbers, scales.dtype)
            if zero is not None:
                offset = lanes.of(np.ascontiguousarray(zero, "f4"))
                apply(lanes, numbers, offset, self.tile, lanes.xp.add)
                lanes.narrow(numbers, scales.dtype)
        return numbers, factor

    def _divides_at_once(self, lanes: Lanes, scales: Scales) -> bool:
        """Whether torch's quotients of bfloat16, which are rounded once, are what codes are of:
        scales of rows that bfloat16 holds.
        """
        floats = self.layout.elements.dtype and self.layout.elements.bits == 8
        if lanes.device is None or not (lanes.on_cpu and floats and scales.divides):
            return False
        if scales.dtype != "bfloat16" or self.spec.dtype != "bfloat16":
            return False
        # all numbers of a row have one
        rows = scales.factor.shape[1] == 1 and self.tile[0] == 1
        return rows and bool((rounded_to(scales.factor, "bfloat16") == scales.factor).all())

    def _are_beyond(self, scales: Scales, largest: Array) -> bool:
        """Whether some quotients lie beyond the largest fp8 code: a scale of few digits, as a
        subnormal one, may be much smaller than what it was rounded from.
        """
        import numpy as np

        if self.rule.kind != "float" or not scales.divides:
            return False
        # no cast rounds less than this up
        most = largest_of(self.layout.elements) * (1 + 2**-6)
        with np.errstate(all="ignore"):
            return bool((largest > scales.factor * most).any())

    def _may_saturate(self, scales: Scales, largest: Array, zero: Array | None) -> bool:
        """Whether the largest number of a tile may lie where no code is nearest."""
        import numpy as np

        if zero is not None:
            return True
        with np.errstate(all="ignore"):
            found = largest / scales.factor if scales.divides else largest * scales.factor
        # no rounding takes a number up by more than this; NaN is not below anything
        return not bool((found * (1 + 2**-7) < rounding.nearest_below(self.layout.elements)).all())

    def _codes(
        self, lanes: Lanes, numbers: Any, part: Any, factor: Any, wild: bool, words: Any
    ) -> Any:
        """The codes (u1) of scaled numbers, packed into `words`."""
        elements, packing = self.layout.elements, self.packing
        straight = elements.bits == 8 and self.word == 8
        codes = words if straight else lanes.take("codes", tuple(part.shape), "u1")
        if elements.dtype and elements.bits == 8:
            rounding.cast(lanes, numbers, elements, codes)
            if wild:
                _settle_nan(
                    lanes, numbers, part, self.spec.dtype, factor, self.tile, elements, codes
                )
            return codes
        if wild:
            # `bucketize` puts NaN behind all borders, e2m1 and integers have no code for it
            nan = float("inf") if elements.numbers else 0.0
            numbers[lanes.xp.isnan(numbers)] = nan
        if elements.whole:
            low = -(1 << (elements.bits - 1)) + (self.rule.like == "kimi")
            rounding.integers(lanes, numbers, elements, low, codes)
        else:
            rounding.counted(lanes, numbers, elements, self.rule.ties, self.rule.sign, codes)
        if not straight:
            kept = codes
            if self.layout.flat and codes.shape[-1] % self.unit:
                # in the word that is left numbers follow that are 0
                over = self.unit - codes.shape[-1] % self.unit
                kept = lanes.take("filled", (len(codes), codes.shape[-1] + over), "u1")
                kept[:, :-over] = codes
                kept[:, -over:] = rounding.code_of_zero(elements)
            if self.word >= 8:
                kept = rounding.pack(
                    lanes, kept, packing.bits, self.word, packing.order, packing.dense
                )
            copy_raw(words, kept.reshape(words.shape))
        return codes

    def _surveyed_scales(
        self, at: tuple[int, ...], full: Box, row: int, part: Any, survey: Array | None
    ) -> tuple[Scales, Array]:
        """The scales of the tiles that these rows lie in, one for each row or for all."""
        import numpy as np

        if survey is None:
            raise ValueError(f"{self.layout.name}: nothing is known of the whole tensor")
        if not self.leading or survey.size == 1:
            largest = survey.reshape(1, 1)
        else:
            lead = tuple(a + i for (a, _), i in zip(full[:-2], at, strict=True))
            rows = (full[-2][0] + row + np.arange(part.shape[0])) // self.tile[0]
            columns = (full[-1][0] + np.arange(part.shape[1])) // self.tile[1]
            largest = survey[lead][rows]
            largest = largest if survey.shape[-1] == 1 else largest[:, columns]
        return self.rule.scales(self.layout.elements, self.spec.dtype, largest), largest

    def _remember(
        self,
        scales: Scales,
        zero: Array | None,
        at: tuple[int, ...],
        full: Box,
        row: int,
        memo: dict[str, Any] | None,
    ) -> None:
        if memo is None or self._keeps_amax:
            return
        for role in self._followers():
            kept = self._kept(role, scales, zero)
            self._known(memo, role).put(self._entries_of(kept.shape, at, full, row), kept)

    def _amax(
        self, part: Any, at: tuple[int, ...], full: Box, row: int, memo: dict[str, Any] | None
    ) -> Array:
        """The largest magnitudes of the tiles of some rows, each looked for once."""
        dtype, saturate = self.spec.dtype, self.non_finite == "saturate"
        if memo is None or not self._keeps_amax:
            return amax(part, dtype, self.tile, saturate)
        kept = self._known(memo, "amax")
        shape = tuple(-(-n // t) for n, t in zip(part.shape, self.tile, strict=True))
        place = self._entries_of(shape, at, full, row)
        known: Array | None = kept.get(place)
        if known is not None:
            return known.reshape(shape)
        found = amax(part, dtype, self.tile, saturate)
        kept.put(place, found)
        return found

    def _entries_of(
        self, shape: tuple[int, ...], at: tuple[int, ...], full: Box, row: int
    ) -> tuple[Any, ...]:
        """Where the entries of some rows of a matrix, of this shape, lie among all."""
        first, left = (full[-2][0] + row) // self.tile[0], full[-1][0] // self.tile[1]
        rows, columns = shape
        if self.layout.flat:
            # tiles may be rows here
            first, left, rows, columns = 0, left + row, 1, rows * columns
        lead = (a + i for (a, _), i in zip(full[:-2], at, strict=True))
        return (*lead, slice(first, first + rows), slice(left, left + columns))


class _KeptEntries:
    """What was worked out of the entries of a grid: what is stored of them, or magnitudes.

    Each is half of a word, the other half of which is 1 once it is there: processes that share the
    memory see both or neither.
    """

    __slots__ = ("_dtype", "_words")

    def __init__(self, entries: tuple[int, ...], dtype: str, room: Any = None) -> None:
        import numpy as np

        self._dtype = np.dtype(dtype)
        word = f"<u{2 * self._dtype.itemsize}"
        self._words: Array = (
            np.zeros(entries, word) if room is None else np.frombuffer(room, word).reshape(entries)
        )

    @staticmethod
    def size(entries: tuple[int, ...], dtype: str) -> int:
        """The bytes that these take."""
        import numpy as np

        return 2 * np.dtype(dtype).itemsize * prod(entries)

    def get(self, place: tuple[Any, ...]) -> Array | None:
        words, size = self._words[place], self._dtype.itemsize
        if not (words >> (8 * size)).all():
            return None
        found: Array = words.astype(f"<u{size}").view(self._dtype)
        return found

    def put(self, place: tuple[Any, ...], entries: Array) -> None:
        import numpy as np

        size = self._dtype.itemsize
        words = np.ascontiguousarray(entries, self._dtype).view(f"<u{size}")
        words = words.astype(self._words.dtype) | (1 << (8 * size))
        self._words[place] = words.reshape(self._words[place].shape)


def _settle_nan(
    lanes: Lanes,
    numbers: Any,
    given: Any,
    dtype: str,
    factor: Any,
    tile: tuple[int, int],
    elements: Any,
    codes: Any,
) -> None:
    """One code for NaN, another for what infinity and a scale make, whatever a processor makes."""
    xp = lanes.xp
    known = elements.values()
    high = len(known) // 2
    nan = next(code for code in range(high - 1, len(known)) if known[code] != known[code])
    other = len(known) - 1 if nan < high else nan
    scale = xp.zeros_like(numbers)
    apply(lanes, scale, factor, tile, xp.add)
    given = lanes.widen(given, dtype, xp.empty_like(numbers))
    undefined = xp.isnan(given) | xp.isnan(scale)
    if lanes.device is None:
        codes[...] = xp.where(xp.isnan(numbers), xp.where(undefined, nan, other), codes)
        return
    found = xp.where(undefined, nan, other).to(xp.uint8)
    codes.copy_(xp.where(numbers.isnan(), found, codes))


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(low, high) for low, high in box)
