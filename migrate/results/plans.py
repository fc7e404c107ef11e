"""What `plan` answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..core.document import DocumentPart
from ..core.errors import Diagnostic
from .shared import (
    AskedRequest,
    DocumentReport,
    DowngradeVerdict,
    LostKeys,
    PathEdge,
    RuleId,
    SideFileSize,
)


class PlannedSource(DocumentPart):
    """The checkpoint that is read."""

    path: str
    format: str
    index_hash: str
    tensors: int
    bytes: int
    files: tuple[str, ...]
    states: tuple[FileState, ...]


class FileState(DocumentPart):
    """A file of the source when it was planned: bytes, and ns since 1970 of its last change."""

    name: str
    size: int
    mtime_ns: int | None


class RuleOrigin(DocumentPart):
    """Where rules come from that are not included with migrate."""

    lineage: str
    origin: str
    name: str
    version: str
    places: tuple[str, ...]


class OutputOptions(DocumentPart):
    """How the output is divided into files; `max_shard_size` in bytes. `chunks` is None where none
    were asked for, `data` is "copied" where data files are copied as they are and else None;
    `to_json()` leaves out what is None.
    """

    max_shard_size: int
    folder: bool
    format: str
    chunks: int | None
    data: str | None


class PlannedRow(DocumentPart):
    """What a rule makes of which keys. `to` and `spec` are None if nothing comes out."""

    change: str
    to: str | None
    count: int
    spec: str | None
    bytes: int | None
    from_: tuple[str, ...]
    sample: bool
    ops: tuple[str, ...]
    lossy: bool | None
    rule: str
    at: str
    leg: str
    why: str | None


class PlannedFile(DocumentPart):
    """A weight file that will be written: `size` in bytes."""

    name: str
    size: int
    tensors: int
    header_sha256: str


class PlannedTarget(DocumentPart):
    """What will be written."""

    folder: bool
    tensors: int
    bytes: int
    files: tuple[PlannedFile, ...]
    small: tuple[str, ...]


class ChangedValue(DocumentPart):
    """A changed value in a side file; `to_json()` omits `before` or `after` if there is none."""

    at: str
    before: Any
    after: Any


class PatchedFile(DocumentPart):
    """What an edge does to a side file."""

    path: str
    change: str
    leg: str
    changes: tuple[ChangedValue, ...]


class PlannedCheck(DocumentPart):
    """A condition on values that is checked before anything is written."""

    rule: str
    kind: str
    count: int
    sample: str


class ReturningCodec(DocumentPart):
    """What of the parts of a number format comes back when a rule encodes them again."""

    rule: str
    codec: str
    returns: str


class KeptHashes(DocumentPart):
    """The file of hashes that the output keeps; `bytes` is its size."""

    tensors: int
    bytes: int


class UndoTensors(DocumentPart):
    """What the way back does not bring back, as a folder holds it: `bytes` of all tensors; `path`
    is None in a plan. `exact`: with it everything comes back, also values other than tensors.
    """

    path: str | None
    tensors: int
    bytes: int
    exact: bool


class StoredOutput(DocumentPart):
    """How an output comes into a bucket: bytes that the store copies and that pass through this
    machine, `parts` of weight files, and the requests that write. `why` nothing is copied, if
    nothing is; `checksum` of what was uploaded; `read_back`: what was copied was read and compared;
    `compared`: bytes of it whose checksums were.
    """

    copied: int
    passed: int
    parts: int
    requests: int
    why: str | None
    checksum: str | None
    read_back: bool | None
    compared: int | None


class PlanReport(DocumentReport):
    """What a migration will do: the document of a plan. Its `path` are the edges, in order."""

    KIND = "plan"
    digest: str
    tool: str
    source: PlannedSource
    path: tuple[PathEdge, ...]
    layouts: Mapping[str, str]
    rules: tuple[RuleId, ...]
    origins: tuple[RuleOrigin, ...]
    params: Mapping[str, Any]
    allow: tuple[str, ...]
    options: OutputOptions
    rows: tuple[PlannedRow, ...]
    unchanged: int
    target: PlannedTarget
    side_files: tuple[SideFileSize, ...]
    left_out: tuple[str, ...]
    patched: tuple[PatchedFile, ...]
    bytes_read: int
    bytes_written: int
    peak_memory: int
    losses: tuple[LostKeys, ...]
    checks: tuple[PlannedCheck, ...]
    decided: Mapping[str, Any]
    notes: tuple[str, ...]
    optimizer: str | None
    downgrade: DowngradeVerdict
    returns: tuple[ReturningCodec, ...] | None
    parts: KeptHashes | None
    undo: UndoTensors | None
    store: StoredOutput | None
    reference: Mapping[str, str] | None
    warnings: tuple[Diagnostic, ...]
    question: AskedRequest
    free: int


class KeyTensor(DocumentPart):
    """A tensor with its key; `bytes` of its elements."""

    key: str
    spec: str
    bytes: int


class KeyStep(DocumentPart):
    """What a rule of an edge makes of which tensors. `to` is None where they go."""

    leg: str
    change: str
    from_: tuple[KeyTensor, ...]
    to: KeyTensor | None
    ops: tuple[str, ...]
    lossy: bool
    rule: str
    at: str
    why: str


class KeyReport(DocumentReport):
    """What a plan says of one key: it `before`, in the source, and `after`, in the output, or None
    where it is not; the `sources` that the output is made of, the `outputs` that the source goes
    into, the `steps` between them, and what is lost on them.
    """

    KIND = "key"
    key: str
    before: KeyTensor | None
    after: KeyTensor | None
    sources: tuple[KeyTensor, ...]
    outputs: tuple[KeyTensor, ...]
    steps: tuple[KeyStep, ...]
    losses: tuple[LostKeys, ...]
