"""What value-changing ops did to the numbers: measured box by box, reported by tensor and rule.

Sums are in float64. What is computed twice counts once: a box after a whole value was let go for
memory or by two threads, and where a result is read in another order than it is computed in, what a
box shares with earlier ones. Boxes are added up in their order, so that the figures do not depend
on threads, the last digits of sums apart where boxes overlap. The signal-to-noise ratio is
10·log10(Σ wanted² / Σ (wanted - got)²); an error of nothing makes it infinite, which is written as
"exact" where every element was compared with what it should be.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from .. import ops
from ..ops.base import ValueOp
from ..planning.graph import ComputedTensor
from .geometry import joined, outside

if TYPE_CHECKING:
    import numpy as np

    from ..ops.base import Box
    from ..planning.graph import Computation, Tensor

# numbers measured at a time: with their float64 images they stay in a second-level cache
_STEP = 1 << 15
_LARGEST = ("max_abs", "max_relative", "amax")
_SUMS = ("count", "error", "signal", "saturated", "underflowed", "non_finite")


@dataclass(slots=True)
class Tally:
    """The error of some elements.

    `count` elements were measured; `max_abs` of wanted - got; `max_relative` to the block's largest
    magnitude, where blocks are given, `amax` of all wanted where they are not; `error` and `signal`
    are Σ (wanted - got)² and Σ wanted². What is wanted or became infinite or NaN is in none of
    these; `non_finite` elements became so and were not. `sure`: nothing but what is said here may
    have happened to any element.
    """

    count: int = 0
    max_abs: float = 0.0
    max_relative: float = 0.0
    amax: float = 0.0
    error: float = 0.0
    signal: float = 0.0
    saturated: int = 0
    underflowed: int = 0
    non_finite: int = 0
    sure: bool = True

    def merge(self, other: Tally) -> None:
        """Adds the elements of `other`."""
        for name in _LARGEST:
            setattr(self, name, max(getattr(self, name), getattr(other, name)))
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.sure = self.sure and other.sure

    def add(
        self,
        wanted: Any,
        got: Any,
        amax: Any = None,
        *,
        saturated: int = 0,
        underflowed: int = 0,
        non_finite: int | None = None,
        sure: bool = True,
    ) -> None:
        """`ops.Meter`: arrays or torch tensors of one shape, and `amax`, which broadcasts to it."""
        self.saturated += int(saturated)
        self.underflowed += int(underflowed)
        self.sure = self.sure and sure
        if non_finite is not None:
            non_finite += self.non_finite
        self._measure(wanted, got, amax)
        if non_finite is not None:
            self.non_finite = non_finite

    def _measure(self, wanted: Any, got: Any, amax: Any) -> None:
        import numpy as np

        wanted, got, amax = _array(wanted), _array(got), None if amax is None else _array(amax)
        self.count += wanted.size
        if not wanted.size:
            return
        with np.errstate(all="ignore"):
            if wanted.size <= _STEP:
                self._part(wanted, got, amax)
                return
            if amax is not None:
                amax = np.broadcast_to(amax, wanted.shape)
            for part in _parts(wanted.shape):
                self._part(wanted[part], got[part], None if amax is None else amax[part])

    def _part(
        self,
        wanted: np.ndarray[Any, Any],
        got: np.ndarray[Any, Any],
        amax: np.ndarray[Any, Any] | None,
    ) -> None:
        import numpy as np

        w = wanted.astype("f8", copy=False)
        e = np.subtract(w, got, dtype="f8")
        error, signal = _squares(e), _squares(w)
        if not math.isfinite(error + signal):
            bad = ~(np.isfinite(w) & np.isfinite(got))
            self.non_finite += int(
                (~np.isfinite(got) & (w != got) & ~(np.isnan(w) & np.isnan(got))).sum()
            )
            self.sure = self.sure and not (bad & np.isfinite(got)).any()
            w, e = np.where(bad, 0, w), np.where(bad, 0, e)
            error, signal = _squares(e), _squares(w)
        self.error += error
        self.signal += signal
        if not error and not e.any():
            self.amax = max(self.amax, float(np.abs(w).max()))
            return
        e = np.abs(e)
        self.max_abs = max(self.max_abs, float(e.max()))
        if amax is None:
            self.amax = max(self.amax, float(np.abs(w).max()))
            return
        # a block of zeros has no magnitude to compare with
        relative = np.divide(e, amax, out=np.zeros_like(e), where=amax > 0)
        self.max_relative = max(self.max_relative, float(relative.max()))

    @property
    def relative(self) -> float:
        """The largest error relative to its block's amax, or to that of all without blocks."""
        if self.max_relative or not self.amax:
            return self.max_relative
        return self.max_abs / self.amax

    @property
    def exact(self) -> bool:
        return self.sure and not (
            self.max_abs or self.saturated or self.underflowed or self.non_finite
        )

    @property
    def sqnr_db(self) -> float | None:
        """In decibels; None where there is no error, or nothing finite to compare it with."""
        if not (self.error and self.signal) or not math.isfinite(self.error + self.signal):
            return None
        return 10 * math.log10(self.signal / self.error)

    def to_json(self) -> dict[str, Any]:
        return {
            "exact": self.exact,
            "elements_measured": self.count,
            "max_abs_error": self.max_abs if self.count or self.sure else None,
            "max_relative_error": self.relative if self.count or self.sure else None,
            "sqnr_db": self.sqnr_db,
            "saturated": self.saturated,
            "underflowed": self.underflowed,
            "non_finite": self.non_finite,
        }


def _squares(numbers: np.ndarray[Any, Any]) -> float:
    """Σ x². Not `vdot`: OpenBLAS divides it among threads, and their barriers take milliseconds."""
    import numpy as np

    flat = numbers.reshape(-1)
    return float(np.einsum("i,i", flat, flat))


def _array(numbers: Any) -> np.ndarray[Any, Any]:
    """Numbers of numpy or torch, of any device, as an array on the CPU."""
    import numpy as np

    found: np.ndarray[Any, Any] = np.asarray(
        numbers.detach().cpu().numpy() if hasattr(numbers, "detach") else numbers
    )
    return found


def _parts(shape: Sequence[int]) -> Iterable[tuple[Any, ...]]:
    """Indices of parts of some ten thousand elements each."""
    if not shape:
        return [(...,)]
    inner = math.prod(shape[1:])
    if inner > _STEP:
        return [(slice(i, i + 1), *rest) for i in range(shape[0]) for rest in _parts(shape[1:])]
    step = max(1, _STEP // max(1, inner))
    return [(slice(i, i + step),) for i in range(0, shape[0], step)]


def _enter(boxes: list[Box], box: Box) -> None:
    """Adds a box, joined with its neighbours: a tensor computed in order is one box, not many."""
    for i, other in enumerate(boxes):
        if (both := joined(other, box)) is not None:
            del boxes[i]
            _enter(boxes, both)
            return
    boxes.append(box)


@dataclass(slots=True)
class _Summary:
    """What one op of a rule did."""

    total: Tally = field(default_factory=Tally)
    elements: int = 0
    exact: bool = True
    keys: set[str] = field(default_factory=set)


class Ledger:
    """The errors of one run, shared by threads: a tally per box of each value that may round."""

    def __init__(self, outputs: Mapping[str, Tensor]) -> None:
        self._lock = threading.Lock()
        self._values: dict[int, tuple[ComputedTensor, list[str]]] = {}
        self._of: dict[int, list[tuple[ComputedTensor, list[str]]]] = {}
        self._boxes: dict[int, dict[Box, Tally]] = {}
        # by value, what `claim` gave away
        self._claimed: dict[int, list[Box]] = {}
        self._totals: dict[int, Tally] = {}
        self._measured: set[int] = set()
        for key, tensor in outputs.items():
            todo, seen = [tensor], set[int]()
            while todo:
                for value in todo.pop().sources:
                    if isinstance(value, ComputedTensor) and id(value) not in seen:
                        seen.add(id(value))
                        if id(value) not in self._values:
                            entry = self._values[id(value)] = value, []
                            self._of.setdefault(id(value.computation), []).append(entry)
                        self._values[id(value)][1].append(key)
                        todo += value.computation.inputs
        # of the values, alike in each process that runs the plan
        self._names = list(self._values)
        self._numbers = {name: number for number, name in enumerate(self._names)}

    def meter(self, value: ComputedTensor, box: Box) -> Tally:
        """What an op tells the error of one box of `value` to."""
        tally = Tally()
        with self._lock:
            self._boxes.setdefault(id(value), {})[box] = tally
            self._measured.add(id(value))
        return tally

    def claim(self, value: ComputedTensor, box: Box) -> list[Box]:
        """The elements of `box` not claimed before, as disjoint boxes: the caller measures them."""
        with self._lock:
            claimed, left = self._claimed.setdefault(id(value), []), [box]
            for other in claimed:
                left = [part for piece in left for part in outside(piece, other)]
            for part in left:
                _enter(claimed, part)
        return left

    def close(self, call: Computation) -> None:
        """Adds up the boxes of a call that will not be read again."""
        for value, _ in self._of.get(id(call), ()):
            self._total(id(value))

    def _total(self, name: int) -> Tally:
        with self._lock:
            boxes = self._boxes.pop(name, {})
            total = self._totals.setdefault(name, Tally())
        for box in sorted(boxes):
            total.merge(boxes[box])
        return total

    def drain(self) -> list[tuple[int, Box, dict[str, Any]]]:
        """What was measured since the last call, for `enter` in the process that this one helps:
        the number of a value, the box, and its tally.
        """
        with self._lock:
            found, self._boxes = self._boxes, {}
        return [
            (self._numbers[name], box, asdict(tally))
            for name, boxes in found.items()
            for box, tally in boxes.items()
        ]

    def enter(
        self, measured: Iterable[tuple[int, Sequence[Sequence[int]], dict[str, Any]]]
    ) -> None:
        """Takes the boxes that a helping process measured. One that several did counts once."""
        for number, box, fields in measured:
            name = self._names[number]
            with self._lock:
                boxes = self._boxes.setdefault(name, {})
                boxes[tuple((low, high) for low, high in box)] = Tally(**fields)
                self._measured.add(name)

    def tallies(self) -> list[tuple[int, dict[str, Any]]]:
        """What was measured: the number of a value, which is the same in each process that runs the
        plan, and its tally.
        """
        return [
            (number, asdict(self._total(name)))
            for number, name in enumerate(self._values)
            if name in self._measured
        ]

    def add(self, tallies: Iterable[tuple[int, dict[str, Any]]]) -> None:
        """Enters what another process measured. Of a value that several computed, and together more
        than once, the larger part counts.
        """
        for number, fields in tallies:
            name, other = self._names[number], Tally(**fields)
            total = self._total(name)
            if total.count + other.count <= self._values[name][0].spec.numel:
                total.merge(other)
            elif other.count > total.count:
                self._totals[name] = other
            self._measured.add(name)

    def report(self, *, complete: bool) -> dict[str, Any] | None:
        """All figures, as the documents hold them: by rule and by output. None if the run computes
        nothing. `complete`: nothing was taken over from an earlier run."""
        tensors, rules = [], dict[tuple[str, str], _Summary]()
        for name, (value, keys) in self._values.items():
            call = value.computation
            if not isinstance(ops.get(call.op_call.op), ValueOp):
                continue
            total = self._total(name)
            if ops.get(call.op_call.op).kind == "part" and value.output and not total.count:
                # a scale: what it rounds is in the error of the codes
                continue
            if call.lossy and not complete and name not in self._measured:
                # an earlier run computed it, and its error is not known
                continue
            # what an earlier run computed of it may have been rounded
            exact = total.exact and (complete or not call.lossy)
            figures = {"elements": value.spec.numel, **total.to_json(), "exact": exact}
            tensors.append(
                {
                    "keys": keys,
                    "rule": call.rule,
                    "op": call.op_call.op,
                    "from": list(call.keys),
                    **figures,
                }
            )
            summary = rules.setdefault((call.rule, call.op_call.op), _Summary())
            # the largest relative error of a rule is that of its worst tensor
            total.max_relative = total.relative
            summary.total.merge(total)
            summary.elements += value.spec.numel
            summary.exact &= exact
            summary.keys.update(keys)
        if not tensors:
            return None
        return {
            "complete": complete,
            "rules": [
                {
                    "rule": rule,
                    "op": op,
                    "tensors": len(s.keys),
                    "elements": s.elements,
                    **s.total.to_json(),
                    "exact": s.exact,
                }
                for (rule, op), s in rules.items()
            ],
            "tensors": tensors,
        }
