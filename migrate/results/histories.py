"""What `history` answers: of a checkpoint, and of the lineages that are known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..core.document import DocumentPart
from .shared import DocumentReport, RuleId


class LineageLayout(DocumentPart):
    """A layout of a lineage. `message` is that of a deprecated one."""

    name: str
    title: str
    status: str
    message: str | None
    note: str


class LineageEdge(DocumentPart):
    """The rule files between two layouts. `rules` and `lossless` are None unless they were asked
    for with `counts`; `lossless` also where params decide it.
    """

    from_: str
    to: str
    files: tuple[str, ...]
    rules: int | None
    lossless: bool | None


class LineageReport(DocumentPart):
    """A lineage with its layouts, oldest first, and its edges."""

    name: str
    title: str
    ordered: bool
    aliases: tuple[str, ...]
    model_types: tuple[str, ...]
    family: bool
    layouts: tuple[LineageLayout, ...]
    edges: tuple[LineageEdge, ...]


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
    """An edge that was applied, from the stamp. A downgrade needs `files`, `grid`, `kept`, `absent`
    and `nothing`.
    """

    lineage: str
    from_: str
    to: str
    rules: tuple[RuleId, ...]
    params: Mapping[str, Any]
    files: Mapping[str, Any] | None
    ranks: str | None
    grid: Mapping[str, Any] | None
    kept: Any
    absent: Any
    nothing: Any
    pack: PackOrigin | None
    optimizer: str | None
    optimizer_names: tuple[OptimizerNames, ...] | None
    parts: StampedHash | None
    tool: str
    source: str


class DeclaredLayout(DocumentPart):
    """A layout that `stamp` stated; `why` is None where nothing spoke against it."""

    lineage: str
    layout: str
    why: str | None


class HistoryReport(DocumentReport):
    """What was applied to a checkpoint, oldest first. `grid` is how it was cut by a run that
    changed only its format.
    """

    KIND = "history"
    path: str
    output: str
    carried: tuple[str, ...]
    grid: Mapping[str, Any] | None
    declared: tuple[DeclaredLayout, ...]
    layouts: Mapping[str, str]
    standing: Mapping[str, str]
    lineages: tuple[LineageReport, ...]
    applied: tuple[AppliedEdge, ...]
    notes: tuple[str, ...]


class LineagesReport(DocumentReport):
    """The known lineages with their layouts and edges."""

    KIND = "lineages"
    lineages: tuple[LineageReport, ...]


class StampReport(DocumentReport):
    """A checkpoint stamped: what the stamp says, and in which file."""

    KIND = "stamp"
    path: str
    written: str
    lineage: str
    layout: str
    why: str | None
    evidence: tuple[str, ...]
