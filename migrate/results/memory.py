"""What is said of a migration in memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ..core.document import DocumentPart, Result
from ..core.errors import Diagnostic
from .shared import DocumentReport, ErrorReport, LostKeys, PathEdge


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
