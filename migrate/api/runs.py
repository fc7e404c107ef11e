"""Migrations carried out, forwards and back: planned, gathered, written, checked, published."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, overload

from ..core.errors import fail, option
from ..core.out_of_memory import guarded
from ..core.types import PathLike, Progress, Ranks, RunPart
from ..planning.request import CHANGED_SOURCE, Request, make_request, path_text
from ..planning.savedplan import request_of, saved_plan
from ..results import (
    ApplyReport,
    PartReport,
    PlanReport,
    StateDictReport,
)
from ..running.resources import (
    memory_of,
    parse_device,
    read_options,
)
from .opening import Live, opened

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .opening import AppliedRequest, SharedRequest

# what a saved plan holds of the request
_IN_PLAN = ("to", "from_", "rules", "params", "allow", "max_shard_size")


@overload
def apply(
    path: Live,
    out: None = None,
    *,
    inform: Callable[[StateDictReport], None] | None = None,
    dry_run: Literal[False] = False,
    **request: Unpack[SharedRequest],
) -> OrderedDict[str, Any]: ...
@overload
def apply(
    path: PathLike | Live,
    out: PathLike,
    *,
    dry_run: Literal[False] = False,
    **request: Unpack[AppliedRequest],
) -> ApplyReport: ...
@overload
def apply(
    path: PathLike | Live,
    out: PathLike | None = None,
    *,
    dry_run: Literal[True],
    **request: Unpack[AppliedRequest],
) -> PlanReport: ...
@overload
def apply(
    path: PathLike,
    out: PathLike,
    *,
    part: RunPart,
    dry_run: Literal[False] = False,
    **request: Unpack[AppliedRequest],
) -> PartReport: ...
@guarded
def apply(
    path: PathLike | Live,
    out: PathLike | None = None,
    *,
    to: str | Iterable[str] = (),
    from_: str | Iterable[str] = (),
    rules: Iterable[PathLike] = (),
    params: Mapping[str, Any] | None = None,
    allow: Iterable[str] = (),
    max_shard_size: int | str | None = None,
    threads: int = 2,
    max_memory: int | str = "1GB",
    fsync: bool = True,
    resume: bool = False,
    device: str = "cpu",
    progress: Progress | None = None,
    inform: Callable[[StateDictReport], None] | None = None,
    at: str | None = None,
    output_format: str | None = None,
    chunks: int | None = None,
    rewrite: bool = False,
    dry_run: bool = False,
    source: PathLike | None = None,
    ranks: Ranks | None = None,
    part: RunPart | None = None,
    on: str | None = None,
    undo: PathLike | None = None,
    copy: str = "auto",
    read_back: bool = False,
    side: PathLike | None = None,
) -> ApplyReport | PartReport | PlanReport | OrderedDict[str, Any]:
    """Migrate a checkpoint into a new one, or a state dict in memory.

    The output is complete or absent: whatever goes wrong, nothing is published. A checkpoint that
    is already in the wanted layout is left alone, and the report's `path` is then None.

    Args:
        path: A checkpoint, a state dict, a module, or a saved plan (a file ending in .json), which
            is planned again and must give the same digest.
        out: The new checkpoint, which must not exist: one file if the name ends in .safetensors,
            .pt, .pth, .bin or .ckpt, else a folder; or the URL of such a name in a store (`s3://`,
            `gs://`, `az://` and others that fsspec writes), or `hf://ORG/MODEL` for a pull
            request, `hf://ORG/MODEL@BRANCH` for a commit. Default: None, for a state dict or a
            module that is migrated in memory.
        to: Layouts to reach, as `LINEAGE@LAYOUT`, one or several. Default: none; `rules` then
            determine what is done.
        from_: Layouts that the checkpoint is in. Default: none; read from its stamp, else detected
            from keys, shapes and `config.json`.
        rules: Rule files, applied as they are, or one folder of lineages that is searched first.
            Default: none.
        params: Values of the rules' params, by name. Default: none; they are read from the
            checkpoint.
        allow: Permissions, such as "lossy" or "drop". Default: none, so that whatever would lose
            something is refused.
        max_shard_size: Bytes of the largest output file, also as text ("500MB"). Default: 5 GB.
        threads: Files to write, and processes that compute, at the same time, 1 to 64. Default: 2.
        max_memory: Bytes for tensors that are computed or transposed, also as text ("4GB").
            Default: 1 GB.
        fsync: Wait until everything is on disk; without it a power cut may lose the output.
            Default: True.
        resume: Continue a killed or failed run; of stores S3 alone keeps what one wrote. Default:
            False.
        device: Where values are computed: "cpu", "cuda", or "cuda:all" to include ops whose bits
            differ there. Default: "cpu".
        progress: Called with the bytes done so far and the bytes in total. Default: None.
        inform: Called with a `StateDictReport` after a migration in memory. Default: None.
        at: The dict of a nested checkpoint that rules work on, as a path such as
            `model.state_dict`. Default: found automatically.
        output_format: "safetensors", "torch", "dcp" (torch.distributed.checkpoint), "torch_dist"
            (Megatron's) or one that a package declares. Default: as the suffix of the name says,
            else as the source.
        chunks: Cut tensors as FSDP2 on so many ranks holds them; for "dcp". Default: None.
        rewrite: Write data files of "dcp" anew where names alone change. Default: False.
        dry_run: Return the plan and write nothing; `out` may then be left out. Default: False.
        source: A copy of the checkpoint that a saved plan was made for, to run it on. Default: the
            checkpoint itself.
        ranks: The place of this process among several that make the same call and share the work, a
            `migrate.core.types.Ranks`. Default: None, this process alone; the environment is not
            looked at.
        part: The files of one part are written, a `migrate.core.types.RunPart`, and nothing is
            published: `publish` does that when all parts are done. Default: None, all files.
        on: "ray" or "ray://ADDRESS": a Ray cluster whose workers write the files. Default: None,
            this process.
        undo: A folder, which must not exist, for the tensors that a downgrade does not restore bit
            for bit. Default: None.
        copy: Whether a bucket copies by itself what only moves from a bucket: "auto" or "never".
            Default: "auto".
        read_back: Read what was copied so, and compare. Default: False.
        side: As for `plan`. Default: None.

    Returns:
        An `ApplyReport`; with `part` a `PartReport`; with `dry_run` a `PlanReport`; without `out`
        the new state dict, whose tensors are new; tied tensors stay tied.

    Raises:
        MigrateError: What `plan` raises, and M903 if a saved plan no longer fits, M904 if `out`
            exists, and M909, M913, M919 or M922 if disk or memory do not suffice.

    Example:
        >>> report = migrate.apply("old", "new", to="hf-mixtral@v5")
        >>> report.path, report.tensors, report.downgrade.exact
        ('new', 21, True)
        >>> new = migrate.apply({"model.norm.weight": torch.ones(4)}, rules="rename.yaml")
        >>> list(new)
        ['norm.weight']
    """
    from ..running.job import write_checkpoint

    live = False
    if not isinstance(path, (str, os.PathLike)):
        from ..live.module import is_module, state

        live = isinstance(path, Mapping) or is_module(path)
    saved = None if live else saved_plan(path_text("path", path))
    request = make_request(
        to,
        from_,
        rules,
        params,
        allow,
        at=at,
        output_format=output_format,
        chunks=chunks,
        rewrite=rewrite,
        undo=undo is not None,
        side=side,
        planned=saved is not None,
    )
    if out is None and live and not dry_run:
        from ..live.statedict import migrate_in_memory

        tensors = path if isinstance(path, Mapping) else state(path)
        return migrate_in_memory(
            tensors, request, memory_of(max_memory), parse_device(device), inform
        )
    if inform is not None:
        fail(
            "M115",
            "`inform` is for a state dict that is migrated in memory",
            help="a run that writes files returns all of it",
        )
    elsewhere = None if source is None else path_text("source", source)
    changed = CHANGED_SOURCE in request.allow
    if saved is not None:
        if (
            replace(request, allow=request.allow - {CHANGED_SOURCE}, undo=False) != Request()
            or max_shard_size is not None
        ):
            beside = (
                f"only {option('source')} and "
                f"{option('allow', CHANGED_SOURCE)} may be given with it"
            )
            fail(
                "M115",
                f"a saved plan is run as it is; {', '.join(map(option, _IN_PLAN))} are part of it",
                help=beside,
            )
        request = request_of(saved)
        path, max_shard_size = (
            elsewhere or saved["source"]["path"],
            saved["options"]["max_shard_size"],
        )
    elif elsewhere is not None:
        fail(
            "M115",
            f"{option('source')} says where a copy of a saved plan's checkpoint lies, and this is "
            "not a saved plan",
        )
    cluster = None
    if on is not None:
        from ..running.ray_run import cluster_of

        cluster = cluster_of(on, device)
    return write_checkpoint(
        partial(opened, "path", path, request, wrapped=False),
        out,
        request,
        read_options(
            max_shard_size=max_shard_size,
            threads=threads,
            max_memory=max_memory,
            fsync=fsync,
            resume=resume,
            device=device if cluster is None else "cpu",
            progress=progress,
            local_rank=None if ranks is None else ranks.local_rank,
            copy=copy,
            read_back=read_back,
        ),
        ranks=ranks,
        part=part,
        cluster=cluster,
        undo=undo,
        saved=saved,
        changed=changed,
        dry_run=dry_run,
    )


@overload
def downgrade(
    path: PathLike | Live,
    out: PathLike,
    *,
    dry_run: Literal[False] = False,
    **request: Unpack[SharedRequest],
) -> ApplyReport: ...
@overload
def downgrade(
    path: PathLike | Live,
    out: PathLike | None = None,
    *,
    dry_run: Literal[True],
    **request: Unpack[SharedRequest],
) -> PlanReport: ...
@overload
def downgrade(
    path: PathLike,
    out: PathLike,
    *,
    part: RunPart,
    dry_run: Literal[False] = False,
    **request: Unpack[SharedRequest],
) -> PartReport: ...
@guarded
def downgrade(
    path: PathLike | Live,
    out: PathLike | None = None,
    *,
    to: str | Iterable[str] = (),
    from_: str | Iterable[str] = (),
    rules: Iterable[PathLike] = (),
    params: Mapping[str, Any] | None = None,
    allow: Iterable[str] = (),
    max_shard_size: int | str | None = None,
    threads: int = 2,
    max_memory: int | str = "1GB",
    fsync: bool = True,
    resume: bool = False,
    device: str = "cpu",
    progress: Progress | None = None,
    at: str | None = None,
    output_format: str | None = None,
    chunks: int | None = None,
    rewrite: bool = False,
    dry_run: bool = False,
    ranks: Ranks | None = None,
    part: RunPart | None = None,
    on: str | None = None,
    undo: PathLike | None = None,
    copy: str = "auto",
    read_back: bool = False,
) -> ApplyReport | PartReport | PlanReport:
    """Take a checkpoint back to an older layout; by default, undo the last run in its stamp.

    Args:
        path: A checkpoint (a folder, a file, an index of shards), a state dict or a module.
        out: The new checkpoint, which must not exist; as in `apply`. Default: None, with `dry_run`
            only.
        to: Layouts to go back to, as `LINEAGE@LAYOUT`. Default: none; the last run in the stamp is
            undone, or `rules` are.
        from_: Layouts that the checkpoint is in. Default: none; read from its stamp, else detected
            from keys, shapes and `config.json`.
        rules: Rule files, applied as they are, or one folder of lineages that is searched first.
            Default: none.
        params: Values of the rules' params, by name. Default: none; they are read from the
            checkpoint.
        allow: Permissions, such as "lossy" or "drop". Default: none, so that whatever would lose
            something is refused.
        max_shard_size: Bytes of the largest output file, also as text ("500MB"). Default: 5 GB.
        threads: Files to write, and processes that compute, at the same time, 1 to 64. Default: 2.
        max_memory: Bytes for tensors that are computed or transposed, also as text ("4GB").
            Default: 1 GB.
        fsync: Wait until everything is on disk; without it a power cut may lose the output.
            Default: True.
        resume: Continue a killed or failed run; of stores S3 alone keeps what one wrote. Default:
            False.
        device: Where values are computed: "cpu", "cuda", or "cuda:all" to include ops whose bits
            differ there. Default: "cpu".
        progress: Called with the bytes done so far and the bytes in total. Default: None.
        at: The dict of a nested checkpoint that rules work on, as a path such as
            `model.state_dict`. Default: found automatically.
        output_format: "safetensors", "torch", "dcp" (torch.distributed.checkpoint), "torch_dist"
            (Megatron's) or one that a package declares. Default: as the suffix of the name says,
            else as the source.
        chunks: Cut tensors as FSDP2 on so many ranks holds them; for "dcp". Default: None.
        rewrite: Write data files of "dcp" anew where names alone change. Default: False.
        dry_run: Return the plan and write nothing. Default: False.
        ranks: The place of this process among several that make the same call and share the work, a
            `migrate.core.types.Ranks`. Default: None, this process alone; the environment is not
            looked at.
        part: As for `apply`. Default: None, all files.
        on: As for `apply`. Default: None, this process.
        undo: The folder that `apply` wrote with `undo=`: what comes out is then exact to the bit.
            Default: None.
        copy: As for `apply`. Default: "auto".
        read_back: As for `apply`. Default: False.

    Returns:
        An `ApplyReport`; with `part` a `PartReport`; with `dry_run` a `PlanReport`.

    Raises:
        MigrateError: What `apply` raises, and M405 if a rule cannot be undone exactly.

    Example:
        >>> migrate.downgrade("new", "back").layouts["hf-mixtral"]
        'v4'
    """
    from ..running.job import write_checkpoint

    request = make_request(
        to,
        from_,
        rules,
        params,
        allow,
        backwards=True,
        at=at,
        output_format=output_format,
        chunks=chunks,
        rewrite=rewrite,
        undo=undo is not None,
    )
    cluster = None
    if on is not None:
        from ..running.ray_run import cluster_of

        cluster = cluster_of(on, device)
    return write_checkpoint(
        partial(opened, "path", path, request, wrapped=False),
        out,
        request,
        read_options(
            max_shard_size=max_shard_size,
            threads=threads,
            max_memory=max_memory,
            fsync=fsync,
            resume=resume,
            device=device if cluster is None else "cpu",
            progress=progress,
            local_rank=None if ranks is None else ranks.local_rank,
            copy=copy,
            read_back=read_back,
        ),
        ranks=ranks,
        part=part,
        cluster=cluster,
        undo=undo,
        dry_run=dry_run,
    )


@guarded
def publish(
    out: PathLike,
    *,
    source: PathLike | None = None,
    threads: int = 2,
    max_memory: int | str = "1GB",
    fsync: bool = True,
) -> ApplyReport:
    """Publish what the parts of a run wrote (`apply` with `part`), all of which are done.

    Args:
        out: The new checkpoint, as the parts were given it.
        source: The checkpoint that they read, where what is recorded of it does not lead there: a
            signed URL, whose query is not recorded. Default: None.
        threads: As for `apply`. Default: 2.
        max_memory: Bytes for what has to be read once more, also as text ("4GB"). Default: 1 GB.
        fsync: Wait until everything is on disk; without it a power cut may lose the output.
            Default: True.

    Returns:
        An `ApplyReport`, as one process would have answered with that wrote all files.

    Raises:
        MigrateError: M983 if there are no parts, M984 naming those that are not done, M911 while
            one is at work, M903 or M918 if the source or the rules are no longer the same, M904 if
            `out` exists.

    Example:
        >>> for number in range(2):
        ...     part = migrate.core.types.RunPart(number, 2)
        ...     report = migrate.apply("old", "parted", to="hf-mixtral@v5", part=part)
        >>> report.missing, migrate.publish("parted").path
        ((), 'parted')
    """
    from ..running.job import publish_checkpoint

    options = read_options(threads=threads, max_memory=max_memory, fsync=fsync)
    return publish_checkpoint(
        path_text("out", out),
        lambda path, request: opened("path", path, request, wrapped=False),
        options,
        None if source is None else path_text("source", source),
    )
