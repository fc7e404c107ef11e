"""What the public functions return: one read-only class per answer, with a typed attribute for each
field.

A report holds the document that the command of the same name prints with `--format json`;
`to_json()` gives that document. What each field means is written once, in its schema:
`schemas/<kind>.schema.json`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from .core.document import DocumentPart, Result
from .core.errors import Diagnostic as Diagnostic


class DocumentReport(Result):
    """A result that is a JSON document of its own, with a schema: `schemas/<kind>.schema.json`."""

    @property
    def format_version(self) -> str:
        """The format of the document: a reader of 1.x reads every 1.y."""
        return str(self._document["format_version"])

    @property
    def kind(self) -> str:
        """The kind of the document, which is the name of its schema."""
        return str(self._document["kind"])


# what several documents share


class RuleId(DocumentPart):
    """A rule file by its id and the hash of what it means."""

    id: str
    hash: str


class PathEdge(DocumentPart):
    """An edge of a lineage, walked in one direction."""

    lineage: str
    from_: str
    to: str
    backwards: bool


class LostKeys(DocumentPart):
    """What is lost by one rule: `kind` is `lossy` or `drop`, `keys` are collapsed."""

    kind: str
    rule: str
    at: str
    why: str
    keys: tuple[str, ...]


class DowngradeVerdict(DocumentPart):
    """Whether the source can be restored exactly, and if not, why."""

    exact: bool
    because: tuple[str, ...]


class AskedRequest(DocumentPart):
    """The request, as it was made."""

    to: tuple[str, ...]
    from_: tuple[str, ...]
    rules: tuple[str, ...]
    params: Mapping[str, Any]
    allow: tuple[str, ...]
    backwards: bool | None
    at: str | None
    output_format: str | None
    chunks: int | None
    rewrite: bool | None
    undo: bool | None


class FileSize(DocumentPart):
    """A weight file: `size` in bytes."""

    name: str
    size: int


class SideFileSize(DocumentPart):
    """A small file beside the tensors: `size` in bytes."""

    path: str
    size: int


class NotCompared(DocumentPart):
    """Something that was not compared, and why."""

    what: str
    why: str


class ErrorFigures(DocumentPart):
    """Errors of computed elements; None where none was measured."""

    rule: str
    op: str
    elements: int
    exact: bool
    elements_measured: int
    max_abs_error: float | None
    max_relative_error: float | None
    sqnr_db: float | None
    saturated: int
    underflowed: int
    non_finite: int


class RuleErrors(ErrorFigures):
    """The errors of one op of a rule, over all its tensors."""

    tensors: int


class TensorErrors(ErrorFigures):
    """The errors of one computed tensor."""

    keys: tuple[str, ...]
    from_: tuple[str, ...]


class ErrorReport(DocumentPart):
    """What was done to the numbers. `complete` is False if a resumed run computed only a part."""

    complete: bool
    rules: tuple[RuleErrors, ...]
    tensors: tuple[TensorErrors, ...]


class LineageLayout(DocumentPart):
    """A layout of a lineage. `message` is that of a deprecated one."""

    name: str
    title: str
    status: str
    message: str | None
    note: str


class LineageEdge(DocumentPart):
    """The rule files between two layouts."""

    from_: str
    to: str
    files: tuple[str, ...]


class LineageReport(DocumentPart):
    """A lineage with its layouts, oldest first, and its edges."""

    name: str
    title: str
    ordered: bool
    layouts: tuple[LineageLayout, ...]
    edges: tuple[LineageEdge, ...]


# inspect


class DtypeCount(DocumentPart):
    """The tensors of one dtype: how many, their elements and their bytes."""

    dtype: str
    tensors: int
    parameters: int
    bytes: int


class DetectedLayout(DocumentPart):
    """A layout that the checkpoint matches, and the evidence."""

    lineage: str
    layout: str
    evidence: tuple[str, ...]
    note: str


class NearestLayout(DocumentPart):
    """A layout that the checkpoint does not match, with the evidence for it and `against` it."""

    RENAMED: ClassVar[Mapping[str, str]] = {"signs": "found"}
    lineage: str
    layout: str
    signs: tuple[str, ...]
    against: tuple[str, ...]


class KeyGroup(DocumentPart):
    """Keys of one dtype and shape, collapsed; `bytes` are those of all of them."""

    keys: str
    count: int
    spec: str
    bytes: int


class StoredPartSpec(DocumentPart):
    """A part of a tensor in a number format: what its key ends with, its dtype and shape."""

    name: str
    spec: str


class FormatReading(DocumentPart):
    """A number format that tensors can be in: the codec's name, the producers that name and store
    it so, and the codec's arguments as far as dtypes and shapes tell.
    """

    format: str
    producer: str
    arguments: Mapping[str, Any]


class FormatGroup(DocumentPart):
    """Tensors that are stored alike in a number format.

    `names` are the last words of their modules, `keys` those of their codes, collapsed, `count` how
    many tensors they are, and `parts` the parts of the first. Of several `readings` the arguments
    in `decides` tell which is meant (`codec`: the format itself). `missing` are parts that should
    be there, `problem` says why there is no reading, or why no codec decodes it. `configured` is
    what the configuration says, `contradiction` a sentence where that and the tensors differ.
    """

    names: tuple[str, ...]
    keys: tuple[str, ...]
    count: int
    parts: tuple[StoredPartSpec, ...]
    readings: tuple[FormatReading, ...]
    decides: tuple[str, ...]
    missing: tuple[str, ...]
    problem: str | None
    configured: str | None
    contradiction: str | None


class PlainGroup(DocumentPart):
    """The matrices of one dtype that are not encoded, beside others that are: the last words of
    their modules, how many they are, and a sentence where the configuration says that one of them
    is encoded.
    """

    dtype: str
    names: tuple[str, ...]
    count: int
    contradiction: str | None


class StoredValue(DocumentPart):
    """A value that is not a tensor."""

    path: str
    value: Any


class StoredObject(DocumentPart):
    """A quantized tensor that was saved as an object."""

    key: str
    object: str
    format: str
    dtype: str
    shape: tuple[int, ...]
    number: str | None
    readings: Mapping[str, str]
    block: tuple[int, ...] | None
    members: int
    roles: Mapping[str, str]
    options: Mapping[str, Any]


class CarriedCount(DocumentPart):
    """Tensors outside of the dict that rules work on."""

    tensors: int
    bytes: int


class OutsideName(DocumentPart):
    """A name in a pickle that is outside of the allow-list."""

    name: str
    reason: str
    count: int
    paths: tuple[str, ...]


class InspectReport(DocumentReport):
    """What a checkpoint contains, and which layouts it matches."""

    KIND = "inspection"
    path: str
    format: str
    index_hash: str
    files: tuple[FileSize, ...]
    grid: str | None
    tensors: int
    bytes: int
    parameters: int
    dtypes: tuple[DtypeCount, ...]
    layouts: tuple[DetectedLayout, ...]
    nearest: tuple[NearestLayout, ...]
    keys: tuple[KeyGroup, ...]
    number_formats: tuple[FormatGroup, ...]
    plain: tuple[PlainGroup, ...]
    side_files: tuple[SideFileSize, ...]
    left_out: tuple[str, ...]
    metadata: Mapping[str, str]
    at: str | None
    items: tuple[StoredValue, ...]
    items_more: int
    values: Mapping[str, Any]
    objects: tuple[StoredObject, ...]
    unjoined: Mapping[str, str]
    carried: CarriedCount
    outside: tuple[OutsideName, ...]
    notes: tuple[str, ...]


# plan


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
    reference: Mapping[str, str] | None
    warnings: tuple[Diagnostic, ...]
    question: AskedRequest
    free: int


# apply, downgrade, save


class WrittenFile(DocumentPart):
    """A weight file that was written: `size` in bytes, and the checksum of all of it."""

    size: int
    xxh3_128: str


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


# verify, diff


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


# history


class PackOrigin(DocumentPart):
    """Where the rules of an applied edge came from."""

    origin: str
    name: str | None
    version: str | None


class StampedHash(DocumentPart):
    """What a single file keeps of tensors that were decoded: one hash of all of them."""

    hash: str
    keys: Any


class OptimizerNames(DocumentPart):
    """The parameters that the numbers of an optimizer are, in order, before and after a run."""

    place: str
    before: tuple[str, ...]
    after: tuple[str, ...]


class AppliedEdge(DocumentPart):
    """An edge that was applied, from the stamp. A downgrade needs `kept`, `absent` and `files`."""

    lineage: str
    from_: str
    to: str
    rules: tuple[RuleId, ...]
    params: Mapping[str, Any]
    files: Mapping[str, Any] | None
    ranks: str | None
    kept: Any
    absent: Any
    pack: PackOrigin | None
    optimizer: str | None
    optimizer_names: tuple[OptimizerNames, ...] | None
    parts: StampedHash | None
    tool: str
    source: str


class HistoryReport(DocumentReport):
    """What was applied to a checkpoint, oldest first."""

    KIND = "history"
    path: str
    output: str
    carried: tuple[str, ...]
    layouts: Mapping[str, str]
    standing: Mapping[str, str]
    lineages: tuple[LineageReport, ...]
    applied: tuple[AppliedEdge, ...]
    notes: tuple[str, ...]


class LineagesReport(DocumentReport):
    """The known lineages with their layouts and edges."""

    KIND = "lineages"
    lineages: tuple[LineageReport, ...]


# lint, test


class LintReport(DocumentReport):
    """The findings of lint: `exit` is 0, 1 with findings, 2 if a file cannot be loaded."""

    KIND = "lint"
    exit: int
    files: tuple[str, ...]
    suppressed: int
    diagnostics: tuple[Diagnostic, ...]


class RuleTestCounts(DocumentPart):
    """How many rule files and checks."""

    files: int
    passed: int
    failed: int
    skipped: int


class RuleTestCheck(DocumentPart):
    """One check of a rule file: `status` is `passed`, `failed` or `skipped`."""

    kind: str
    name: str
    status: str
    reason: str
    diagnostics: tuple[Diagnostic, ...]


class RuleTestFile(DocumentPart):
    """A rule file with its checks."""

    id: str
    path: str
    checks: tuple[RuleTestCheck, ...]


class RuleTestReport(DocumentReport):
    """Whether rule files pass their tests and the checks that every rule must pass."""

    KIND = "test"
    specs: bool
    passed: bool
    counts: RuleTestCounts
    files: tuple[RuleTestFile, ...]


# modules and state dicts in memory


class LoadReport(DocumentReport):
    """What was loaded into a module; `bytes_written` counts this process's part of DTensors."""

    KIND = "loaded"
    source: str
    format: str
    steps: tuple[PathEdge, ...]
    layouts: Mapping[str, str]
    params: Mapping[str, Any]
    tensors: int
    bytes_written: int
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    left_on_meta: tuple[str, ...]
    losses: tuple[LostKeys, ...]
    notes: tuple[str, ...]
    warnings: tuple[Diagnostic, ...]
    report: ErrorReport | None


class TensorCounts(DocumentPart):
    """How many tensors a state dict had, and how many it has after the migration."""

    RENAMED: ClassVar[Mapping[str, str]] = {"before": "read", "after": "made"}
    before: int
    after: int


class StateDictReport(Result):
    """What was done to a state dict; `report` is None if nothing was computed, or not yet."""

    steps: tuple[PathEdge, ...]
    layouts: Mapping[str, str]
    params: Mapping[str, Any]
    losses: tuple[LostKeys, ...]
    notes: tuple[str, ...]
    warnings: tuple[Diagnostic, ...]
    tensors: TensorCounts | None
    report: ErrorReport | None
