"""A second way to the same bytes: outputs recomputed through the eager twins of the ops (`eager`)
and compared, all of them or a sample.

It shares nothing with views, tiles and gathering: stored tensors are read whole, ops run on whole
arrays, or where numbers are computed and tensors are large, on some rows of them (`Op.rows`). An
error in the view algebra or in the writer therefore shows here. Outputs that come from one call are
made together; two threads take one such job after the other, as long as what they hold together
stays below the limit. What was written is read back a stretch at a time and compared as
whole words. Elements are looked at only where words differ.

Bytes are compared. Two ops do not promise theirs, on a GPU or where libraries add in another order
(`ValueOp.same_bits`), and declare how far they may be off. What one of them made, moved but not
computed with again, may differ by that much and is reported.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import ops
from ..core import log
from ..core.errors import Report, option, printable
from ..core.spec import BITS, coordinates
from ..elements.reference import reference_values
from ..ops.base import ValueOp
from ..planning.graph import ApplyOp, Program, ReadKey
from ..source.blobs import rows_of
from .ahead import reading_keys
from .eager import (
    SURVEYED,
    EagerEvaluation,
    Need,
    Pool,
    Specs,
    by_rows,
    is_computed,
    kind,
    read_elements,
    read_stretch,
    reads_nothing,
    several,
)
from .padding import FilledUp, without_padding
from .ranks import deal
from .resources import run_together
from .sample import regions_of

if TYPE_CHECKING:
    import numpy as np

    from ..source.index import Source
    from .sample import Rows, Sample

# bytes that are compared at a time: they stay in the processor's cache between the read and the
# comparison
STRETCH = 1 << 18
# what threads may hold together by default, if no tensor needs more
MEMORY = 10**9
# where what is made together takes more than this, numbers are computed some rows at a time, and
# what those take
LARGE, AT_A_TIME = 256 << 20, 64 << 20
# of the measured time before a run, and what a run is too short to be measured for
SECONDS, SHORT = 1.0, 256 << 20
# the largest part of one kind that is measured
_MEASURED = 64 << 20
# kinds of tensors that are named where they take too much
_MOST_SAID = 7


@dataclass(frozen=True, slots=True)
class Mismatch:
    """An output that is not what the program makes. `index` is that of the first element that
    differs.

    `what` is "missing", "shape", "bytes", "padding" for bytes that stand for nothing, or "near":
    bytes that differ by no more than the op that made them says they may.
    """

    key: str
    what: str
    index: tuple[int, ...] | None
    detail: str


class CompareJob(NamedTuple):
    """Outputs that are made together: what it takes, and their bytes. `rows`: those that are made
    at a time of each output, 0 of one without axes; None where all are.
    """

    keys: tuple[str, ...]
    need: Need
    nbytes: int
    rows: tuple[int, ...] | None = None


def recompute(
    program: Mapping[str, Program],
    source: Source,
    output: Source,
    *,
    progress: Callable[[int, int], None] | None = None,
    threads: int = 1,
    max_memory: int | None = None,
    sample: Sample | None = None,
) -> list[Mismatch]:
    """Every output of `program` that differs from what `output` holds, in the program's order.

    Keys of `output` that the program does not make are not looked at. `sample` says what of the
    outputs is looked at, without it all. RunError M919 before anything is read, naming each output
    that takes more memory than `max_memory`.
    """
    return Recomputation(program, source, output, max_memory, sample).run(threads, progress)


class Recomputation:
    """Outputs to be compared: `jobs`, the `memory` the threads' largest take, and the work.

    Of the outputs that are `filled` up, only what is not padding counts.
    """

    def __init__(
        self,
        program: Mapping[str, Program],
        source: Source,
        output: Source,
        max_memory: int | None = None,
        sample: Sample | None = None,
        filled: Mapping[str, FilledUp] | None = None,
    ) -> None:
        self.filled = filled or {}
        self.program, self.source, self.output, self.sample = program, source, output, sample
        self.specs = Specs(source)
        self._large = LARGE if max_memory is None else min(LARGE, max_memory)
        self._surveys: dict[Any, Any] = {}
        there = output.index.tensors
        self.missing = [key for key in program if key not in there]
        chosen = [
            key for key in program if key in there and (sample is None or key in sample.whole)
        ]
        self.jobs = [self._job(keys) for keys in _together(program, chosen)]
        self.largest = max(
            self.jobs, key=lambda job: job.need.memory, default=CompareJob((), Need(0, ()), 0)
        )
        self.budget = max(MEMORY, self.largest.need.memory) if max_memory is None else max_memory
        self._regions = (
            {}
            if sample is None
            else {key: self._region(key, one) for key, one in sample.regions.items()}
        )
        self._refuse(max_memory)

    def memory(self, threads: int) -> int:
        """The most bytes that all threads hold at once."""
        most = sorted((job.need.memory for job in self.jobs), reverse=True)[:threads]
        return max(
            min(max(self.budget, self.largest.need.memory), sum(most)),
            max(self._regions.values(), default=0),
        )

    def parts(self) -> dict[Any, int]:
        """The bytes of what is done at a time, by one process: of jobs by number, of regions by
        key.
        """
        regions = {} if self.sample is None else self.sample.regions
        return {
            **{number: job.nbytes for number, job in enumerate(self.jobs)},
            **{key: one.nbytes for key, one in regions.items()},
        }

    def announced(self, threads: int, seconds: float | None, processes: int = 1) -> dict[str, Any]:
        """What is to be done, and what it takes, before it begins."""
        regions = {} if self.sample is None else self.sample.regions
        return {
            "tensors": sum(len(job.keys) for job in self.jobs) + len(regions),
            "bytes": sum(job.nbytes for job in self.jobs)
            + sum(one.nbytes for one in regions.values()),
            "processes": processes,
            "threads": threads,
            "memory": self.memory(threads),
            "largest": next(iter(self.largest.keys), None),
            "largest_memory": self.largest.need.memory,
            "seconds": seconds,
        }

    def _job(self, keys: Sequence[str]) -> CompareJob:
        whole = self._whole_job(keys)
        return whole if whole.need.memory <= self._large else self._in_rows(whole)

    def _whole_job(self, keys: Sequence[str]) -> CompareJob:
        need = self.specs.need([self.program[key] for key in keys])
        there = [self.output.index.tensors[key] for key in keys]
        # what is stored with strides is read whole
        whole = max((2 * at.spec.nbytes for at in there if rows_of(at) is None), default=0)
        inexact = max(
            (
                at.spec.numel
                for key, at in zip(keys, there, strict=True)
                if _inexact(self.program[key])
            ),
            default=0,
        )
        memory = 4 * STRETCH + (
            2 * STRETCH
            if isinstance(self.program[keys[0]], ReadKey) and not whole
            else need.memory + whole + 64 * inexact
        )
        return CompareJob(
            tuple(keys), need._replace(memory=memory), sum(at.spec.nbytes for at in there)
        )

    def _in_rows(self, job: CompareJob) -> CompareJob:
        """The same made in rows where numbers are computed and that takes less."""
        programs, rows, most = [self.program[key] for key in job.keys], [], 0
        if not any(map(is_computed, programs)):
            return job
        for key, program in zip(job.keys, programs, strict=True):
            spec = self.output.index.tensors[key].spec
            if not by_rows(program, self.specs) or self.specs.of(program) != spec:
                return job
            if not spec.shape or reads_nothing(program, self.specs):
                rows.append(spec.shape[0] if spec.shape else 0)
                continue
            step = max(1, spec.shape[0] * min(AT_A_TIME, self._large // 4) // job.need.memory)
            # most blocks end at these
            rows.append(step - step % 128 if step >= 128 else step)
            most = max(most, 2 * job.need.memory * rows[-1] // spec.shape[0])
        memory = 4 * STRETCH + 4 * SURVEYED + most
        if memory >= job.need.memory:
            return job
        return job._replace(need=Need(memory, ()), rows=tuple(rows))

    def _region(self, key: str, one: Rows) -> int:
        """About the bytes of the largest rows: their part of the whole, twice if blocks round."""
        whole, spec = self._whole_job([key]).need.memory, self.output.index.tensors[key].spec
        return min(
            whole, 2 * whole * max(stop - start for start, stop in one.rows) // spec.shape[0]
        )

    def _refuse(self, max_memory: int | None) -> None:
        """M919 for what takes more: three of each size and dtype, largest first, and a count."""
        if max_memory is None:
            return
        wanted = {job.keys: job.need.memory for job in self.jobs} | {
            (key,): nbytes for key, nbytes in self._regions.items()
        }
        alike: dict[Any, list[tuple[str, ...]]] = {}
        for keys, nbytes in wanted.items():
            if nbytes > max_memory:
                alike.setdefault((nbytes, self.specs.of(self.program[keys[0]])), []).append(keys)
        report = Report()
        for (nbytes, spec), found in sorted(alike.items(), key=lambda pair: -pair[0][0])[
            :_MOST_SAID
        ]:
            for number, keys in enumerate(found[:3]):
                also = f" and {len(keys) - 1} more of the same call" if len(keys) > 1 else ""
                more = (
                    f"; so do {len(found) - 3} more like it"
                    if number == 2 and len(found) > 3
                    else ""
                )
                report.add(
                    "M919",
                    f"{printable(keys[0])}{also}, {spec}: with what it is made of it takes "
                    f"{nbytes:,} bytes at once, the limit is {max_memory:,}{more}",
                    help=f"give {option('max_memory', max(wanted.values()))} or more; verify "
                    "works on whole tensors",
                )
        report.check()

    @log.phase("recomputing and comparing")
    def run(
        self, threads: int = 1, progress: Callable[[int, int], None] | None = None
    ) -> list[Mismatch]:
        """What differs, in the program's order."""
        regions = [] if self.sample is None else list(self.sample.regions.items())
        count = ByteCount(
            sum(job.nbytes for job in self.jobs) + sum(r.nbytes for _, r in regions), progress
        )
        found: dict[str, Mismatch] = {
            key: Mismatch(key, "missing", None, "is not in the output") for key in self.missing
        }
        lock = threading.Lock()

        def compare(job: CompareJob, pool: Pool) -> None:
            wrong = self._compare(job, pool, count)
            with lock:
                found.update(wrong)

        keys = [key for job in self.jobs for key in job.keys]
        read = _keys_of(self.program[key] for key in keys)
        with (
            reading_keys(read, self.source, self.budget),
            reading_keys(keys, self.output, self.budget),
        ):
            _Crew(self.jobs, self.budget, compare).go(threads)
        for key, one in regions:
            wrong = self.compare_rows(key, one.rows)
            count.add(one.nbytes)
            if wrong is not None:
                found[key] = wrong
        return [found[key] for key in self.program if key in found]

    def _compare(self, job: CompareJob, pool: Pool, count: ByteCount) -> dict[str, Mismatch]:
        if job.rows is not None:
            pool.begin()
            return self._compare_in_rows(job, job.rows, count)
        pool.begin(job.need.sizes)
        uses = Counter(call for key in job.keys for call in several(self.program[key]))
        evaluate = EagerEvaluation(self.source, self.specs, pool, uses)
        found = {}
        for key in job.keys:
            expression = self.program[key]
            wrong = self._one(key, expression, evaluate)
            evaluate.done(expression)
            if wrong is not None:
                found[key] = wrong
            count.add(self.output.index.tensors[key].spec.nbytes)
        return found

    def _compare_in_rows(
        self, job: CompareJob, rows: Sequence[int], count: ByteCount
    ) -> dict[str, Mismatch]:
        found = {}
        for key, step in zip(job.keys, rows, strict=True):
            spec = self.output.index.tensors[key].spec
            parts = [(0, 1)]
            if step:
                parts = [(i, min(i + step, spec.shape[0])) for i in range(0, spec.shape[0], step)]
            wrong = self.compare_rows(key, parts)
            if wrong is not None:
                found[key] = wrong
            count.add(spec.nbytes)
        return found

    def _one(self, key: str, expression: Program, evaluate: EagerEvaluation) -> Mismatch | None:
        there = self.output.index.tensors[key]
        if (
            isinstance(expression, ReadKey)
            and _plain(self.source, expression.key)
            and there.spec == self.specs.of(expression)
        ):
            made: Any = None
        else:
            made = evaluate(expression)
        wrong = self._differ(key, expression, made)
        if wrong is not None and wrong.what == "bytes" and key in self.filled:
            # small beside the numbers that they are scales of
            there_now = without_padding(read_elements(self.output, key), self.filled[key])
            due = without_padding(evaluate(expression), self.filled[key])
            if due.shape == there_now.shape and _equal(_flat(due), _flat(there_now)):
                return replace(wrong, what="padding")
        if (
            wrong is not None
            and wrong.what == "bytes"
            and (slack := evaluate.slack(expression)) is not None
        ):
            return _excused(
                wrong,
                slack,
                evaluate(expression),
                read_elements(self.output, key),
                there.spec.dtype,
            )
        return wrong

    def _differ(self, key: str, expression: Program, recomputed: Any) -> Mismatch | None:
        """How the output differs from `recomputed`; for None both are stored and read in parts."""
        spec = self.output.index.tensors[key].spec
        if recomputed is not None and recomputed.shape != spec.shape:
            return Mismatch(
                key, "shape", None, f"is {list(spec.shape)}, should be {list(recomputed.shape)}"
            )
        if recomputed is not None and recomputed.dtype.itemsize != max(1, BITS[spec.dtype] // 8):
            width = max(1, BITS[spec.dtype] // 8)
            return Mismatch(
                key,
                "bytes",
                None,
                f"has elements of {width} bytes, should have {recomputed.dtype.itemsize}",
            )
        if not spec.numel:
            return None
        if recomputed is None and isinstance(expression, ReadKey):
            pairs = _stored_pairs(self.source, expression.key, self.output, key)
        else:
            pairs = _pairs(recomputed, self.output, key)
        return _counted(key, pairs, spec.shape)

    def compare_rows(self, key: str, rows: Sequence[tuple[int, int]]) -> Mismatch | None:
        """How these rows differ from what the program makes; other rows do not count."""
        spec = self.output.index.tensors[key].spec
        pool = Pool()
        evaluate = EagerEvaluation(self.source, self.specs, pool, None, self._surveys)
        if not spec.shape:
            return self._one(key, self.program[key], evaluate)
        each = spec.numel // spec.shape[0]
        others = EagerEvaluation(self.output, Specs(self.output))

        def pairs() -> Iterator[tuple[int, Any, Any]]:
            for start, stop in rows:
                pool.begin()
                made = evaluate.rows(self.program[key], start, stop)
                there = others.rows(ReadKey(key), start, stop)
                yield start * each, _flat(made), _flat(there)

        if self.specs.of(self.program[key]).shape != spec.shape:
            return Mismatch(
                key,
                "shape",
                None,
                f"is {list(spec.shape)}, should be {list(self.specs.of(self.program[key]).shape)}",
            )
        looked = sum(stop - start for start, stop in rows) * each
        wrong = _counted(key, pairs(), spec.shape, None if looked == spec.numel else looked)
        if wrong is not None and _inexact(self.program[key]):
            # how far elements may be off is known of whole tensors
            return self._one(key, self.program[key], evaluate)
        return wrong


class ByteCount:
    """Bytes that are done, for any number of threads."""

    def __init__(self, total: int, tell: Callable[[int, int], None] | None) -> None:
        self._total, self._tell, self._done, self._lock = total, tell, 0, threading.Lock()

    def add(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            if self._tell is not None:
                self._tell(self._done, self._total)


class _Crew:
    """Threads that take jobs in order, those that fit beside the ones that are under way."""

    def __init__(
        self, jobs: Sequence[CompareJob], budget: int, work: Callable[[CompareJob, Pool], None]
    ) -> None:
        self._waiting, self._work, self._left = list(reversed(jobs)), work, budget
        self._budget, self._turn = budget, threading.Condition()
        self._error: BaseException | None = None

    def go(self, threads: int) -> None:
        """Does all jobs; raises the first error after all threads have ended."""
        threads = min(threads, len(self._waiting))
        run_together(
            lambda _: self._loop(), threads, lambda: self._fail(InterruptedError("stopped"))
        )
        if self._error is not None:
            raise self._error

    def _loop(self) -> None:
        pool = Pool()
        try:
            while (job := self._take(pool)) is not None:
                try:
                    self._work(job, pool)
                finally:
                    with self._turn:
                        self._left += job.need.memory
                        self._turn.notify_all()
        except BaseException as error:  # noqa: BLE001 - carried to the thread that waits
            self._fail(error)

    def _take(self, pool: Pool) -> CompareJob | None:
        with self._turn:
            while self._waiting and self._error is None:
                job = self._waiting[-1]
                if job.need.memory <= self._left or self._left == self._budget:
                    self._waiting.pop()
                    self._left -= job.need.memory
                    return job
                pool.begin()
                self._turn.wait(0.5)
        return None

    def _fail(self, error: BaseException) -> None:
        with self._turn:
            self._error = self._error or error
            self._turn.notify_all()


def _together(program: Mapping[str, Program], keys: Sequence[str]) -> list[list[str]]:
    """The keys in groups that are made of one call, in the program's order of their first."""
    groups: dict[Any, list[str]] = {}
    for key in keys:
        expression = program[key]
        calls = several(expression) if isinstance(expression, ApplyOp) else []
        groups.setdefault(calls[0] if calls else key, []).append(key)
    return list(groups.values())


def _keys_of(programs: Iterable[Program]) -> Iterator[str]:
    """The stored keys that outputs are made of, each once."""
    keys, seen = set[str](), set[int]()
    for program in programs:
        todo = [program]
        while todo:
            one = todo.pop()
            if isinstance(one, ReadKey):
                if one.key not in keys:
                    keys.add(one.key)
                    yield one.key
            elif id(one) not in seen:
                seen.add(id(one))
                todo += reversed(one.inputs)


def _inexact(expression: Program) -> bool:
    stack = [expression]
    while stack:
        here = stack.pop()
        if isinstance(here, ApplyOp):
            op = ops.get(here.op)
            if isinstance(op, ValueOp) and not op.same_bits:
                return True
            stack += here.inputs
    return False


def _plain(source: Source, key: str) -> bool:
    return rows_of(source.index.tensors[key]) is not None


def _flat(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    import numpy as np

    return np.ascontiguousarray(array).reshape(-1)


def _steps(numel: int, dtype: str) -> Iterator[tuple[int, int]]:
    """Stretches of so many elements, which begin at whole bytes."""
    step = max(STRETCH * 8 // max(8, BITS[dtype]) // 8 * 8, 8)
    for start in range(0, numel, step):
        yield start, min(numel, start + step)


def _stored_pairs(
    source: Source, key: str, output: Source, other: str
) -> Iterator[tuple[int, Any, Any]]:
    """(first element, elements of a stored tensor, elements of the output), stretch by stretch."""
    import numpy as np

    spec = source.index.tensors[key].spec
    if not _plain(output, other):
        yield 0, _flat(read_elements(source, key)), _flat(read_elements(output, other))
        return
    buffers = np.empty(2 * STRETCH + 32, "u1")
    a, b = buffers[: STRETCH + 16], buffers[STRETCH + 16 :]
    for start, stop in _steps(spec.numel, spec.dtype):
        yield (
            start,
            read_stretch(source, key, start, stop, a),
            read_stretch(output, other, start, stop, b),
        )


def _pairs(made: np.ndarray[Any, Any], output: Source, key: str) -> Iterator[tuple[int, Any, Any]]:
    """(first element, elements that were made, elements of the output), stretch by stretch."""
    import numpy as np

    spec = output.index.tensors[key].spec
    if not _plain(output, key):
        yield 0, _flat(made), _flat(read_elements(output, key))
        return
    buffer = np.empty(STRETCH + 16, "u1")
    start = 0
    for part in _ordered(made if BITS[spec.dtype] >= 8 else _flat(made)):
        for low, high in _steps(part.size, spec.dtype):
            yield (
                start + low,
                part[low:high],
                read_stretch(output, key, start + low, start + high, buffer),
            )
        start += part.size


def _ordered(made: np.ndarray[Any, Any]) -> Iterator[np.ndarray[Any, Any]]:
    """The elements in row-major order, flat; if strided, as many rows as stay in the cache."""
    if made.flags.c_contiguous or made.ndim < 2 or not made.size:
        yield _flat(made)
    elif made[0].nbytes > STRETCH:
        for row in made:
            yield from _ordered(row)
    else:
        step = max(1, STRETCH // made[0].nbytes)
        for low in range(0, len(made), step):
            yield _flat(made[low : low + step])


def _counted(
    key: str,
    pairs: Iterator[tuple[int, Any, Any]],
    shape: tuple[int, ...],
    looked: int | None = None,
) -> Mismatch | None:
    """The mismatch of elements that differ; None if none does."""
    import numpy as np

    count, first = 0, 0
    for start, made, there in pairs:
        if _equal(made, there):
            continue
        width = made.dtype.itemsize
        # 16 bytes have no comparison of their own
        x, y = (
            a.view("u8").reshape(-1, 2) if width == 16 else a.view(f"u{width}").reshape(-1, 1)
            for a in (made, there)
        )
        differ = (x != y).any(axis=1)
        if not count:
            first = start + int(differ.argmax())
        count += int(np.count_nonzero(differ))
    if not count:
        return None
    index = coordinates(first, shape)
    total = 1
    for n in shape:
        total *= n
    of = (
        f"{count} of {total} elements differ"
        if looked is None
        else f"{count} of the {looked} elements that were looked at differ"
    )
    return Mismatch(key, "bytes", index, of)


def _equal(made: np.ndarray[Any, Any], there: np.ndarray[Any, Any]) -> bool:
    """Whether two stretches are the same bytes, compared as words, then the few bytes behind."""
    import numpy as np

    a, b = made.view("u1"), there.view("u1")
    whole = a.size // 8 * 8
    if whole and np.not_equal(a[:whole].view("u8"), b[:whole].view("u8")).any():
        return False
    return whole == a.size or bool((a[whole:] == b[whole:]).all())


def _excused(
    wrong: Mismatch,
    slack: tuple[str, np.ndarray[Any, Any]],
    made: np.ndarray[Any, Any],
    there: np.ndarray[Any, Any],
    dtype: str,
) -> Mismatch:
    """The mismatch, as "near" where no element is further off than `slack` lets it be."""
    import numpy as np

    op, bound = slack
    differ = made != there
    with np.errstate(invalid="ignore"):
        off = np.abs(reference_values(made, dtype) - reference_values(there, dtype))
    # a NaN is within no bound
    if made.dtype != there.dtype or not (off[differ] <= bound[differ]).all():
        return replace(wrong, detail=f"{wrong.detail}, by more than {op} may")
    return replace(wrong, what="near", detail=f"{wrong.detail}, by no more than {op} may")


def estimate_seconds(work: Recomputation, threads: int, processes: int = 1) -> float | None:
    """About how many seconds `work` takes until the last of so many processes, each with so many
    threads, is done: one region of each kind is made and compared, the kinds with most bytes first.

    None for what is too little to be measured, and where no kind can be made in part.
    """
    kinds: dict[Any, tuple[int, str]] = {}
    there = work.output.index.tensors
    todo = [(key, there[key].spec.nbytes) for job in work.jobs for key in job.keys]
    todo += (
        []
        if work.sample is None
        else [(key, one.nbytes) for key, one in work.sample.regions.items()]
    )
    total = sum(nbytes for _, nbytes in todo)
    if total < SHORT:
        return None
    for key, nbytes in todo:
        sort = kind(work.program[key], work.specs)
        kinds[sort] = (kinds.get(sort, (0, key))[0] + nbytes, key)
    spent = seconds = 0.0
    known = 0
    for nbytes, key in sorted(kinds.values(), reverse=True):
        spec = there[key].spec
        if (
            spent > SECONDS
            or not spec.nbytes
            or not spec.shape
            or work.specs.of(work.program[key]) != spec
        ):
            continue
        start, stop = regions_of(work.program[key], work.specs)[0]
        part = spec.nbytes * (stop - start) // spec.shape[0]
        if part > _MEASURED:
            continue
        # the first time pays for what is imported and made once
        first, taken = (_timed(work, key, (start, stop)) for _ in range(2))
        spent += first + taken
        seconds += taken / part * nbytes
        known += nbytes
    if not known:
        return None
    # what is dealt to the process that gets most
    sizes = work.parts()
    dealt = max(deal(sizes, processes), key=lambda own: sum(map(sizes.__getitem__, own)))
    largest = sum(map(sizes.__getitem__, dealt))
    jobs = sum(isinstance(part, int) for part in dealt)
    # threads share the memory's speed and the interpreter's lock, and regions have one
    together = max(1, min(threads, jobs, os.cpu_count() or 1))
    return seconds * largest / known / (1 + 0.5 * (together - 1))


def _timed(work: Recomputation, key: str, rows: tuple[int, int]) -> float:
    began = time.perf_counter()
    work.compare_rows(key, [rows])
    return time.perf_counter() - began
