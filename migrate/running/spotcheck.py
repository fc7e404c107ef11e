"""A part of the outputs, chosen by chance, that `verify` looks at; and how long looking at all of
them would take.

What is chosen are tensors, and of large tensors that can be made row by row some rows; each region
of some MiB is taken with the same chance, so that a fault that is spread over the checkpoint is
found as surely as with whole tensors. Of each kind of output (a rule's ops on specs) at least one
region is taken: a rule that is wrong is wrong everywhere.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ..core.diagnostics import fail, listed, plural, printable
from ..core.templates import collapse
from ..planning.graph import Expr
from .differences import Unlooked
from .eager import Specs, by_rows, kind

if TYPE_CHECKING:
    from ..source.index import Source
    from .verify import Recomputation

# bytes of a region
REGION = 4 << 20
# of the measured time before a run, and what a run is too short to be measured for
SECONDS, SHORT = 1.0, 256 << 20
# the largest part of one kind that is measured
_MEASURED = 64 << 20


class Rows(NamedTuple):
    """Rows of one output that are looked at, as [start, stop), and their bytes."""

    rows: tuple[tuple[int, int], ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Sample:
    """What is looked at: outputs as a `whole`, and `regions` of others. The same `share` and `seed`
    choose the same.
    """

    share: float
    seed: int
    whole: frozenset[str]
    regions: Mapping[str, Rows]

    def nbytes(self, output: Source) -> int:
        """The bytes that are compared."""
        there = output.index.tensors
        return sum(there[key].spec.nbytes for key in self.whole) + sum(
            one.nbytes for one in self.regions.values()
        )

    def to_json(self, output: Source) -> dict[str, Any]:
        """The sample as the answer of `verify` has it."""
        return {
            "share": self.share, "seed": self.seed, "bytes": self.nbytes(output),
            "tensors": len(self.whole),
            "tensors_in_part": len(self.regions),
        }  # fmt: skip


def parse_share(given: float | str) -> float:
    """The part of the outputs that a person asks for: `5%`, `0.05`. QuestionError M115 for anything
    but 0 to 1.
    """
    text = str(given).strip()
    try:
        found = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        found = -1.0
    if isinstance(given, bool) or not 0 < found <= 1:
        fail(
            "M115",
            f"a sample is a part of the checkpoint, as `5%` or `0.05`, not {printable(text)}",
        )
    return found


def choose_sample(
    program: Mapping[str, Expr],
    source: Source,
    output: Source,
    share: float,
    seed: int | None = None,
) -> Sample:
    """A sample of the outputs that are there, chosen by `seed`, or by a new one at random."""
    seed = random.SystemRandom().randrange(1 << 32) if seed is None else seed
    chance, specs = random.Random(seed), Specs(source)
    whole: set[str] = set()
    regions: dict[str, Rows] = {}
    kinds: dict[Any, list[str]] = {}
    met: set[Any] = set()
    for key, expression in program.items():
        if key not in output.index.tensors:
            continue
        sort = kind(expression, specs)
        kinds.setdefault(sort, []).append(key)
        starts = _regions(expression, specs)
        chosen = [one for one in starts if chance.random() < share]
        if chosen:
            met.add(sort)
            _take(key, chosen, len(starts), specs, expression, whole, regions)
    for sort, keys in kinds.items():
        if sort not in met:
            key = chance.choice(keys)
            starts = _regions(program[key], specs)
            _take(key, [chance.choice(starts)], len(starts), specs, program[key], whole, regions)
    return Sample(share, seed, frozenset(whole), regions)


def left_out_of(
    sample: Sample, program: Mapping[str, Expr], output: Source, sums: bool
) -> list[Unlooked]:
    """What of the outputs the sample leaves out; `sums`: and checksums that the files record."""
    there, out = output.index.tensors, []
    left = [
        key
        for key in program
        if key in there and key not in sample.whole and key not in sample.regions
    ]
    parts = sum(there[key].spec.nbytes for key in sample.regions) - sum(
        one.nbytes for one in sample.regions.values()
    )
    if left:
        forms = listed([c.text for c in collapse(left, lambda key: there[key].spec)], 20)
        nbytes = sum(there[key].spec.nbytes for key in left)
        out.append(
            Unlooked(
                f"{plural(len(left), 'tensor')}, {nbytes:,} bytes: {forms}", "not in the sample"
            )
        )
    if sample.regions:
        forms = listed(
            [c.text for c in collapse(list(sample.regions), lambda key: there[key].spec)], 20
        )
        out.append(
            Unlooked(
                f"{parts:,} bytes of {plural(len(sample.regions), 'tensor')}: {forms}",
                "rows that are not in the sample",
            )
        )
    return (
        out
        + [Unlooked("the checksums that the files record", "they are those of whole tensors")]
        * sums
    )


def _regions(expression: Expr, specs: Specs) -> list[tuple[int, int]]:
    """The regions of an output, as rows; one for what is small or is made as a whole only."""
    spec = specs.of(expression)
    count = spec.shape[0] if spec.shape else 1
    if spec.nbytes <= REGION or count < 2 or not by_rows(expression):
        return [(0, count)]
    step = max(1, count * REGION // spec.nbytes)
    return [(start, min(start + step, count)) for start in range(0, count, step)]


def _take(
    key: str,
    chosen: list[tuple[int, int]],
    of: int,
    specs: Specs,
    expression: Expr,
    whole: set[str],
    regions: dict[str, Rows],
) -> None:
    if len(chosen) == of:
        whole.add(key)
        return
    spec = specs.of(expression)
    each = spec.nbytes // spec.shape[0]
    regions[key] = Rows(tuple(chosen), each * sum(stop - start for start, stop in chosen))


def estimate_seconds(work: Recomputation, threads: int) -> float | None:
    """About how many seconds `work` takes: one region of each kind is made and compared, the kinds
    with most bytes first.

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
        start, stop = _regions(work.program[key], work.specs)[0]
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
    # threads share the memory's speed and the interpreter's lock
    return (
        seconds
        * total
        / known
        / (1 + 0.5 * (min(threads, len(work.jobs), os.cpu_count() or 1) - 1 if work.jobs else 0))
    )


def _timed(work: Recomputation, key: str, rows: tuple[int, int]) -> float:
    began = time.perf_counter()
    work.compare_rows(key, [rows])
    return time.perf_counter() - began
