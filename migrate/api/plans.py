"""A migration worked out from headers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import closing
from typing import Any

from ..core.out_of_memory import guarded
from ..core.types import PathLike
from ..planning.plan import Plan
from ..planning.request import make_request
from ..running.output_shapes import is_folder, output_format_of
from ..running.prepare import plan_for
from ..running.resources import SHARD, bytes_of
from .opening import Live, opened


@guarded
def plan(
    path: PathLike | Live,
    *,
    to: str | Iterable[str] = (),
    from_: str | Iterable[str] = (),
    rules: Iterable[PathLike] = (),
    params: Mapping[str, Any] | None = None,
    allow: Iterable[str] = (),
    max_shard_size: int | str = SHARD,
    single_file: bool | None = None,
    backwards: bool = False,
    at: str | None = None,
    output_format: str | None = None,
    chunks: int | None = None,
    rewrite: bool = False,
    undo: bool = False,
    side: PathLike | None = None,
    expand: bool = False,
) -> Plan:
    """Work out a migration from headers: all output names, shapes, dtypes, offsets, and problems.

    Args:
        path: A checkpoint (a folder, a file, an index of shards), a state dict or a module.
        to: Layouts to reach, as `LINEAGE@LAYOUT`, one or several. Default: none; `rules` then
            determine what is done.
        from_: Layouts that the checkpoint is in. Default: none; read from its stamp, else detected
            from keys, shapes and `config.json`.
        rules: Rule files, applied as they are, or one folder of lineages that is searched first, or
            `pack:NAME` for the installed pack of that name. Default: none.
        params: Values of the rules' params, by name. Default: none; they are read from the
            checkpoint.
        allow: Permissions, such as "lossy" or "drop". Default: none, so that whatever would lose
            something is refused.
        max_shard_size: Bytes of the largest output file, also as text ("500MB"). Default: 5 GB.
        single_file: Whether the output is one file. Default: None, like the source.
        backwards: Plan what `downgrade` would do. Default: False.
        at: The dict of a nested checkpoint that rules work on, as a path such as
            `model.state_dict`. Default: found automatically.
        output_format: "safetensors", "torch", "dcp", "torch_dist" or one that a package declares.
            Default: as the source.
        chunks: Cut tensors as FSDP2 on so many ranks holds them; for "dcp". Default: None.
        rewrite: Write data files of "dcp" anew where names alone change. Default: False.
        undo: Plan what `apply` would do with `undo=`. Default: False.
        side: A folder whose side files (tokenizer, …) are taken as well. Default: none.
        expand: List every tensor in a row of its own. Default: False.

    Returns:
        A `Plan`. Its `report` has the fields of `migrate plan --format json`; its `to_json()` is
        the text of a file that `apply` runs.

    Raises:
        MigrateError: All problems at once: M115 for wrong arguments, M2xx and M3xx where rules and
            checkpoint do not fit, M4xx for loss that is not allowed, M5xx for layouts, M9xx where
            the checkpoint cannot be read.

    Example:
        >>> plan = migrate.plan("old", to="hf-mixtral@v5")
        >>> plan.report.downgrade.exact
        True
    """
    request = make_request(
        to,
        from_,
        rules,
        params,
        allow,
        backwards=backwards,
        at=at,
        output_format=output_format,
        chunks=chunks,
        rewrite=rewrite,
        undo=undo and not backwards,
        side=side,
    )
    with closing(opened("path", path, request, meta=True)) as source:
        folder = is_folder(source, single_file, output_format_of(source.format, request))
        return plan_for(source, request, folder, bytes_of(max_shard_size)).expanded(expand)
