"""What a checkpoint holds, from its headers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import closing
from typing import Any

from ..core.out_of_memory import guarded
from ..core.types import PathLike
from ..planning.request import make_request
from ..results import InspectReport
from ..rules.params import resolve
from ..source.pickle.tree import PARAMETER
from .opening import Live, opened


@guarded
def inspect(
    path: PathLike | Live,
    *,
    rules: Iterable[PathLike] = (),
    params: Mapping[str, Any] | None = None,
    allow: Iterable[str] = (),
    expand: bool = False,
    at: str | None = None,
    values: bool = False,
) -> InspectReport:
    """Describe a checkpoint from its headers: tensors, layouts, and what else it contains.

    No tensor is read; of extra states the small records that say what they are.

    Args:
        path: A checkpoint (a folder, a file, an index of shards), a state dict or a module.
        rules: Folders of lineages that are searched first. Default: none.
        params: Only `te_dtype_numbering`, "0.8" or "2.4": how a dtype of 7 is read. Default: none.
        allow: Permissions: "links" to follow links out of the folder, "opaque". Default: none.
        expand: List every key instead of collapsing similar keys. Default: False.
        at: The dict of a nested checkpoint that rules work on. Default: found automatically.
        values: List all values that are no tensors, alike ones once. Default: False.

    Returns:
        An `InspectReport`.

    Raises:
        MigrateError: M115 for wrong arguments, M917 where there is no checkpoint, other M9xx where
            it cannot be read.

    Example:
        >>> report = migrate.inspect("old")
        >>> report.format, report.tensors, report.layouts[0].layout
        ('safetensors', 41, 'v4')
    """
    from ..running.inspection import describe

    request = make_request((), (), rules, params, allow, at=at)
    resolve({}, request.params, known=[PARAMETER, "parts"])
    with closing(opened("path", path, request, meta=True)) as source:
        return describe(source, request, expand=expand, values=values)
