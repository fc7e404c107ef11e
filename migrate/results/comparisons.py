"""What `verify` and `diff` answer."""

from __future__ import annotations

from ..core.document import DocumentPart, Result
from .shared import DocumentReport, NotCompared


class VerifiedSample(DocumentPart):
    """The part that a verification looked at; `bytes` are those of the outputs compared."""

    share: float
    seed: int
    bytes: int
    tensors: int
    tensors_in_part: int


class TensorFinding(DocumentPart):
    """A tensor that is not, or not exactly, what it should be."""

    key: str
    what: str


class VerifyReport(DocumentReport):
    """Whether a checkpoint equals what its source gives when recomputed independently."""

    KIND = "verification"
    path: str
    source: str
    equal: bool
    tensors: int
    bytes: int
    memory: int
    sample: VerifiedSample | None
    differences: tuple[TensorFinding, ...]
    near: tuple[TensorFinding, ...]
    not_compared: tuple[NotCompared, ...]
    notes: tuple[str, ...]


class VerifyEstimate(Result):
    """What a verification takes: peak `memory` in bytes of each of its `processes`, and `seconds`
    until the last of them is done, or None where unknown. `threads` are those of one process.
    """

    tensors: int
    bytes: int
    processes: int
    threads: int
    memory: int
    largest: str | None
    largest_memory: int
    seconds: float | None


class SpecDifference(DocumentPart):
    """A tensor whose dtype or shape differs."""

    key: str
    a: str
    b: str


class BytesDifference(DocumentPart):
    """A tensor whose contents differ: where the first element is that differs, and how many do."""

    key: str
    index: tuple[int, ...]
    count: int
    max_abs_error: float | None
    sqnr_db: float | None


class DiffReport(DocumentReport):
    """Where two checkpoints differ. `tensors` and `bytes` are those of `a`."""

    KIND = "difference"
    a: str
    b: str
    equal: bool
    tensors_equal: bool
    tensors: int
    bytes: int
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    specs: tuple[SpecDifference, ...]
    bytes_differ: tuple[BytesDifference, ...]
    side_files: tuple[str, ...]
    others: tuple[str, ...]
    not_compared: tuple[NotCompared, ...]
    notes: tuple[str, ...]
