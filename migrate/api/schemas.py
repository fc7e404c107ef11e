"""The schema of rule files for the keys of one checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from typing import Any

from ..core.out_of_memory import guarded
from ..core.types import PathLike
from ..planning.request import make_request
from .opening import opened


@guarded
def schema_for(
    path: PathLike, *, allow: Iterable[str] = (), at: str | None = None
) -> dict[str, Any]:
    """The schema of a rule file that completes the key templates of the checkpoint at `path`."""
    from ..authoring.scaffold import templates
    from ..rules.schema import rule_file

    request = make_request((), (), (), None, allow, at=at)
    with closing(opened("path", path, request, meta=True)) as source:
        return rule_file([str(draft.sources) for draft in templates(source.index.tensors)])
