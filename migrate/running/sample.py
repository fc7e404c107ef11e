"""A sample of an output's tensors: tensors, and rows of large ones that can be made row by row.

Each region of some MiB is taken with the same chance, so that a fault that is spread over the
checkpoint is found as surely as with whole tensors. Of each kind of output (a rule's ops on specs)
at least one region is taken: a rule that is wrong is wrong everywhere.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ..core.errors import fail, listed, plural, printable
from ..core.templates import collapse
from .differences import Unlooked
from .eager import Specs, by_rows, kind

if TYPE_CHECKING:
    from ..planning.graph import Program
    from ..source.index import Source

# bytes of a region
REGION = 4 << 20


class Rows(NamedTuple):
    """Rows of one output that are looked at, as [start, stop), and their bytes."""

    rows: tuple[tuple[int, int], ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Sample:
    """Outputs looked at as a `whole`, and `regions` of others; `share` and `seed` choose them."""

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
    """The part that a person asks for, `5%` or `0.05`. QuestionError M115 outside of 0 to 1."""
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
    program: Mapping[str, Program],
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
        starts = regions_of(expression, specs)
        chosen = [one for one in starts if chance.random() < share]
        if chosen:
            met.add(sort)
            _take(key, chosen, len(starts), specs, expression, whole, regions)
    for sort, keys in kinds.items():
        if sort not in met:
            key = chance.choice(keys)
            starts = regions_of(program[key], specs)
            _take(key, [chance.choice(starts)], len(starts), specs, program[key], whole, regions)
    return Sample(share, seed, frozenset(whole), regions)


def left_out_of(
    sample: Sample, program: Mapping[str, Program], output: Source, sums: bool
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


def regions_of(expression: Program, specs: Specs) -> list[tuple[int, int]]:
    """The regions of an output, as rows; one for what is small or is made as a whole only."""
    spec = specs.of(expression)
    count = spec.shape[0] if spec.shape else 1
    if spec.nbytes <= REGION or count < 2 or not by_rows(expression, specs):
        return [(0, count)]
    step = max(1, count * REGION // spec.nbytes)
    return [(start, min(start + step, count)) for start in range(0, count, step)]


def _take(
    key: str,
    chosen: list[tuple[int, int]],
    of: int,
    specs: Specs,
    expression: Program,
    whole: set[str],
    regions: dict[str, Rows],
) -> None:
    if len(chosen) == of:
        whole.add(key)
        return
    spec = specs.of(expression)
    each = spec.nbytes // spec.shape[0]
    regions[key] = Rows(tuple(chosen), each * sum(stop - start for start, stop in chosen))
