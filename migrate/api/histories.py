"""What was applied to a checkpoint, and the lineages that are known."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from typing import overload

from ..core.out_of_memory import guarded
from ..core.types import PathLike
from ..planning.lineages import known_lineages
from ..planning.request import make_request
from ..results import HistoryReport, LineagesReport
from .opening import opened


@overload
def history(
    path: None = None,
    *,
    lineage: str | None = None,
    rules: Iterable[PathLike] = (),
    allow: Iterable[str] = (),
    at: str | None = None,
    counts: bool = False,
) -> LineagesReport: ...
@overload
def history(
    path: PathLike,
    *,
    lineage: str | None = None,
    rules: Iterable[PathLike] = (),
    allow: Iterable[str] = (),
    at: str | None = None,
    counts: bool = False,
) -> HistoryReport: ...
@guarded
def history(
    path: PathLike | None = None,
    *,
    lineage: str | None = None,
    rules: Iterable[PathLike] = (),
    allow: Iterable[str] = (),
    at: str | None = None,
    counts: bool = False,
) -> HistoryReport | LineagesReport:
    """Read from its stamp what was applied to a checkpoint, or list the known lineages.

    Args:
        path: A checkpoint. Default: None.
        lineage: The only lineage to list. Default: None, all.
        rules: Folders of lineages that are searched first. Default: none.
        allow: Permissions: "links", "opaque". Default: none.
        at: The dict of a nested checkpoint that rules work on, as a path such as
            `model.state_dict`. Default: found automatically.
        counts: Read the rules of each edge: how many there are, and whether they are lossless.
            Default: False.

    Returns:
        A `HistoryReport`; without a path a `LineagesReport`.

    Raises:
        MigrateError: M507 for a lineage that is not known, M9xx where the checkpoint cannot be
            read.

    Example:
        >>> [edge.to for edge in migrate.history("new").applied]
        ['v5']
    """
    from ..running.inspection import describe_history

    request = make_request((), (), rules, None, allow, at=at)
    if path is None:
        return LineagesReport.of(lineages=known_lineages(request.rules, lineage, counts=counts))
    with closing(opened("path", path, request)) as source:
        return describe_history(source, request, lineage, counts)
