"""What `apply` and `downgrade` answer."""

from __future__ import annotations

from collections.abc import Mapping

from ..core.document import DocumentPart
from ..core.errors import Diagnostic
from .plans import StoredOutput, UndoTensors
from .shared import AskedRequest, DocumentReport, DowngradeVerdict, ErrorReport, LostKeys, PathEdge


class WrittenFile(DocumentPart):
    """A weight file that was written: `size` in bytes, and the checksum of all of it; None where
    not all of it passed through this machine.
    """

    size: int
    xxh3_128: str | None


class RestoredTensors(DocumentPart):
    """Which tensors that a way back made again are what they were. `equal` is None where that is
    not known; `known` says by what: "each", "together" or "nothing".
    """

    tensors: int
    equal: int | None
    different: tuple[str, ...]
    known: str


class ApplyReport(DocumentReport):
    """What a run published. `path` is None if there was nothing to do; sizes are in bytes."""

    KIND = "published"
    path: str | None
    source: str
    copy_of: str | None
    digest: str
    steps: tuple[PathEdge, ...]
    question: AskedRequest
    tensors: int
    files: Mapping[str, WrittenFile]
    bytes_read: int
    bytes_written: int
    bytes_shared: int
    layouts: Mapping[str, str]
    losses: tuple[LostKeys, ...]
    optimizer: str | None
    downgrade: DowngradeVerdict
    notes: tuple[str, ...]
    warnings: tuple[Diagnostic, ...]
    report: ErrorReport | None
    restored: RestoredTensors | None
    undo: UndoTensors | None
    store: StoredOutput | None


class PartReport(DocumentReport):
    """What one part of a run wrote into the folder `partial`; nothing is published yet. `already`:
    an earlier run of the part had done everything. `missing` are the parts that are not done.
    """

    KIND = "part"
    path: str
    partial: str
    part: int
    parts: int
    digest: str
    files: Mapping[str, WrittenFile]
    bytes_written: int
    already: bool
    missing: tuple[int, ...]
    notes: tuple[str, ...]
