"""What several documents share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..core.document import DocumentPart, Result


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
