"""What a checkpoint holds, from its headers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import closing
from typing import Any

from ..core.errors import fail, option, printable
from ..core.out_of_memory import guarded
from ..core.types import PathLike
from ..planning.request import make_request, path_text
from ..results import InspectReport
from ..rules.params import resolve
from ..source.index import Source
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
    save_index: PathLike | None = None,
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
        save_index: A new file, ending in `.json`, for what headers say: it stands for the
            checkpoint where no tensor is read. Default: None.

    Returns:
        An `InspectReport`.

    Raises:
        MigrateError: M115 for wrong arguments, M904 where `save_index` exists, M917 where there is
            no checkpoint, other M9xx where it cannot be read.

    Example:
        >>> report = migrate.inspect("old")
        >>> report.format, report.tensors, report.layouts[0].layout
        ('safetensors', 41, 'v4')
    """
    from ..running.inspection import describe

    request = make_request((), (), rules, params, allow, at=at)
    resolve({}, request.params, known=[PARAMETER, "parts"])
    with closing(opened("path", path, request, meta=True)) as source:
        report = describe(source, request, expand=expand, values=values)
        if save_index is not None:
            _save_index(source, path_text("save_index", save_index))
        return report


def _save_index(source: Source, file: str) -> None:
    from ..formats.saved_index import written

    if not file.endswith(".json"):
        fail("M115", f"{option('save_index')} takes a file that ends in .json")
    text = written(source)
    try:
        with open(file, "x", encoding="utf-8") as out:
            out.write(text)
    except FileExistsError:
        fail("M904", f"{printable(file, 300)} exists", help="choose another name, or move it away")
    except OSError as error:
        fail("M115", f"cannot write {printable(file, 300)}: {error.strerror or error}")
