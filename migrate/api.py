"""One function per verb. The command line calls only these; they print nothing and exit nowhere.

    inspect, plan       headers only
    apply, downgrade    plan, then run: gather, write, check, publish
    verify, diff        compare bytes
    history             read stamps and lineages
    lint                look at rule files
    test                run the tests of rule files

The first four take state dicts and modules too. Each answers with a read-only object of
`migrate.results`, whose `to_json()` is what the command of the same name prints.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict, overload

from . import formats
from .core.errors import fail, option
from .core.out_of_memory import guarded
from .core.types import PathLike, Progress, Ranks
from .planning.lineages import known_lineages
from .planning.plan import Plan
from .planning.request import CHANGED_SOURCE, Request, make_request, output_format_of, path_text
from .planning.savedplan import request_of, saved_plan
from .results import (
    ApplyReport,
    DiffReport,
    HistoryReport,
    InspectReport,
    LineagesReport,
    LintReport,
    PlanReport,
    StateDictReport,
    VerifyEstimate,
    VerifyReport,
)
from .rules.params import resolve
from .ruletests.run import test as test
from .running.prepare import is_folder, plan_for, side_reader
from .running.resources import SHARD, bytes_of, check_threads, memory_of, parse_device, read_options
from .source.index import Source
from .source.pickle.tree import PARAMETER

if TYPE_CHECKING:
    import torch
    from typing_extensions import Unpack

    class _Request(TypedDict, total=False):
        """The keyword arguments that `apply` and `downgrade` have in common."""

        to: str | Iterable[str]
        from_: str | Iterable[str]
        rules: Iterable[PathLike]
        params: Mapping[str, Any] | None
        allow: Iterable[str]
        max_shard_size: int | str | None
        threads: int
        max_memory: int | str
        fsync: bool
        resume: bool
        device: str
        progress: Progress | None
        at: str | None
        output_format: str | None
        chunks: int | None
        rewrite: bool
        ranks: Ranks | None
        undo: PathLike | None

    class _ApplyRequest(_Request, total=False):
        source: PathLike | None


# what a saved plan holds of the request
_IN_PLAN = ("to", "from_", "rules", "params", "allow", "max_shard_size")
# a state dict or a module
Live: TypeAlias = "Mapping[str, Any] | torch.nn.Module"


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
    from .running.inspection import describe

    request = make_request((), (), rules, params, allow, at=at)
    resolve({}, request.params, known=[PARAMETER, "parts"])
    with closing(_opened("path", path, request, meta=True)) as source:
        return describe(source, request, expand=expand, values=values)


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
        rules: Rule files, applied as they are, or one folder of lineages that is searched first.
            Default: none.
        params: Values of the rules' params, by name. Default: none; they are read from the
            checkpoint.
        allow: Permissions, such as "lossy" or "drop". Default: none, so that whatever would lose
            something is refused.
        max_shard_size: Bytes of the largest output file, also as text ("500MB"). Default: 5 GB.
        single_file: Whether the output is one file. Default: None, like the source.
        backwards: Plan what `downgrade` would do. Default: False.
        at: The dict of a nested checkpoint that rules work on, as a path such as
            `model.state_dict`. Default: found automatically.
        output_format: "safetensors", "torch", "dcp" or "torch_dist". Default: as the source.
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
    with closing(_opened("path", path, request, meta=True)) as source:
        folder = is_folder(source, single_file, output_format_of(source.format, request))
        return plan_for(source, request, folder, bytes_of(max_shard_size)).expanded(expand)


@overload
def apply(
    path: Live,
    out: None = None,
    *,
    inform: Callable[[StateDictReport], None] | None = None,
    dry_run: Literal[False] = False,
    **request: Unpack[_Request],
) -> OrderedDict[str, Any]: ...
@overload
def apply(
    path: PathLike | Live,
    out: PathLike,
    *,
    dry_run: Literal[False] = False,
    **request: Unpack[_ApplyRequest],
) -> ApplyReport: ...
@overload
def apply(
    path: PathLike | Live,
    out: PathLike | None = None,
    *,
    dry_run: Literal[True],
    **request: Unpack[_ApplyRequest],
) -> PlanReport: ...
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
    undo: PathLike | None = None,
    side: PathLike | None = None,
) -> ApplyReport | PlanReport | OrderedDict[str, Any]:
    """Migrate a checkpoint into a new one, or a state dict in memory.

    The output is complete or absent: whatever goes wrong, nothing is published. A checkpoint that
    is already in the wanted layout is left alone, and the report's `path` is then None.

    Args:
        path: A checkpoint, a state dict, a module, or a saved plan (a file ending in .json), which
            is planned again and must give the same digest.
        out: The new checkpoint, which must not exist: one file if the name ends in .safetensors,
            .pt, .pth, .bin or .ckpt, else a folder. Default: None, for a state dict or a module
            that is migrated in memory.
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
        resume: Continue a killed or failed run. Default: False.
        device: Where values are computed: "cpu", "cuda", or "cuda:all" to include ops whose bits
            differ there. Default: "cpu".
        progress: Called with the bytes done so far and the bytes in total. Default: None.
        inform: Called with a `StateDictReport` after a migration in memory. Default: None.
        at: The dict of a nested checkpoint that rules work on, as a path such as
            `model.state_dict`. Default: found automatically.
        output_format: "safetensors", "torch", "dcp" (torch.distributed.checkpoint) or "torch_dist"
            (Megatron's). Default: as the suffix of the name says, else as the source.
        chunks: Cut tensors as FSDP2 on so many ranks holds them; for "dcp". Default: None.
        rewrite: Write data files of "dcp" anew where names alone change. Default: False.
        dry_run: Return the plan and write nothing; `out` may then be left out. Default: False.
        source: A copy of the checkpoint that a saved plan was made for, to run it on. Default: the
            checkpoint itself.
        ranks: The place of this process among several that make the same call and share the work, a
            `migrate.core.types.Ranks`. Default: None, this process alone; the environment is not
            looked at.
        undo: A folder, which must not exist, for the tensors that a downgrade does not restore bit
            for bit. Default: None.
        side: As for `plan`. Default: None.

    Returns:
        An `ApplyReport`; with `dry_run` a `PlanReport`; without `out` the new state dict, whose
        tensors are new; tied tensors stay tied.

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
    from .running.job import write_checkpoint

    live = False
    if not isinstance(path, (str, os.PathLike)):
        from .live.module import is_module, state

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
        from .live.statedict import migrate_in_memory

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
    copy = None if source is None else path_text("source", source)
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
        path, max_shard_size = copy or saved["source"]["path"], saved["options"]["max_shard_size"]
    elif copy is not None:
        fail(
            "M115",
            f"{option('source')} says where a copy of a saved plan's checkpoint lies, and this is "
            "not a saved plan",
        )
    return write_checkpoint(
        lambda: _opened("path", path, request, wrapped=False),
        out,
        request,
        read_options(
            max_shard_size=max_shard_size,
            threads=threads,
            max_memory=max_memory,
            fsync=fsync,
            resume=resume,
            device=device,
            progress=progress,
            local_rank=None if ranks is None else ranks.local_rank,
        ),
        ranks=ranks,
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
    **request: Unpack[_Request],
) -> ApplyReport: ...
@overload
def downgrade(
    path: PathLike | Live,
    out: PathLike | None = None,
    *,
    dry_run: Literal[True],
    **request: Unpack[_Request],
) -> PlanReport: ...
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
    undo: PathLike | None = None,
) -> ApplyReport | PlanReport:
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
        resume: Continue a killed or failed run. Default: False.
        device: Where values are computed: "cpu", "cuda", or "cuda:all" to include ops whose bits
            differ there. Default: "cpu".
        progress: Called with the bytes done so far and the bytes in total. Default: None.
        at: The dict of a nested checkpoint that rules work on, as a path such as
            `model.state_dict`. Default: found automatically.
        output_format: "safetensors", "torch", "dcp" (torch.distributed.checkpoint) or "torch_dist"
            (Megatron's). Default: as the suffix of the name says, else as the source.
        chunks: Cut tensors as FSDP2 on so many ranks holds them; for "dcp". Default: None.
        rewrite: Write data files of "dcp" anew where names alone change. Default: False.
        dry_run: Return the plan and write nothing. Default: False.
        ranks: The place of this process among several that make the same call and share the work, a
            `migrate.core.types.Ranks`. Default: None, this process alone; the environment is not
            looked at.
        undo: The folder that `apply` wrote with `undo=`: what comes out is then exact to the bit.
            Default: None.

    Returns:
        An `ApplyReport`; with `dry_run` a `PlanReport`.

    Raises:
        MigrateError: What `apply` raises, and M405 if a rule cannot be undone exactly.

    Example:
        >>> migrate.downgrade("new", "back").layouts["hf-mixtral"]
        'v4'
    """
    from .running.job import write_checkpoint

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
    return write_checkpoint(
        lambda: _opened("path", path, request, wrapped=False),
        out,
        request,
        read_options(
            max_shard_size=max_shard_size,
            threads=threads,
            max_memory=max_memory,
            fsync=fsync,
            resume=resume,
            device=device,
            progress=progress,
            local_rank=None if ranks is None else ranks.local_rank,
        ),
        ranks=ranks,
        undo=undo,
        dry_run=dry_run,
    )


@guarded
def verify(
    out: PathLike,
    *,
    source: PathLike,
    to: str | Iterable[str] = (),
    from_: str | Iterable[str] = (),
    rules: Iterable[PathLike] = (),
    params: Mapping[str, Any] | None = None,
    allow: Iterable[str] = (),
    threads: int = 2,
    max_memory: int | str | None = None,
    sample: float | str | None = None,
    seed: int | None = None,
    progress: Progress | None = None,
    inform: Callable[[VerifyEstimate], None] | None = None,
    at: str | None = None,
    side: PathLike | None = None,
    ranks: Ranks | None = None,
) -> VerifyReport:
    """Recompute every output tensor from the source with a second implementation; compare bytes.

    The applied edges are read from the stamp of `out`, unless `to` or `rules` are given.

    Args:
        out: The checkpoint that a run wrote.
        source: The checkpoint that it was made from.
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
        threads: Tensors to make at the same time, 1 to 64. Default: 2.
        max_memory: Bytes that tensors and what they are made of may take, also as text ("4GB").
            Default: None: two tensors at a time within 1 GB, or the largest alone.
        sample: The part to compare, as "5%" or 0.05: tensors, and rows of large ones. Default: all.
        seed: The seed that chooses the sample. Default: None, a random one; the report names it.
        progress: Called with the bytes done so far and the bytes in total. Default: None.
        inform: Called with a `VerifyEstimate` before the work begins. Default: None.
        at: The dict of a nested checkpoint that rules work on, as a path such as
            `model.state_dict`. Default: found automatically.
        side: The folder whose side files the run took as well. Default: none.
        ranks: The place of this process among several that make the same call and share the work, a
            `migrate.core.types.Ranks`. Default: None, this process alone; the environment is not
            looked at.

    Returns:
        A `VerifyReport`; `not_compared` lists what was not compared.

    Raises:
        MigrateError: M115 for wrong arguments or if nothing records what was applied, M919 if
            `max_memory` is too small, M5xx and M9xx as `plan`.

    Example:
        >>> migrate.verify("new", source="old").equal
        True
    """
    from .running.comparison import verify_output
    from .running.sample import parse_share

    check_threads(threads)
    budget = None if max_memory is None else memory_of(max_memory)
    share = None if sample is None else parse_share(sample)
    if seed is not None and share is None:
        fail(
            "M115",
            "a seed chooses a sample, but no sample is requested",
            help=f"give {option('sample', '5%')} too, or leave {option('seed')} out",
        )
    request = make_request(to, from_, rules, params, allow, at=at, side=side)
    with (
        closing(_opened("source", source, request)) as opened,
        closing(_opened("out", out, replace(request, side=None))) as made,
    ):
        verified: Callable[..., VerifyReport] = verify_output
        if ranks is not None and ranks.world > 1:
            from .running.rank_run import verify_by_ranks

            verified = partial(verify_by_ranks, ranks=ranks)
        return verified(
            opened,
            made,
            request,
            budget=budget,
            share=share,
            seed=seed,
            threads=threads,
            progress=progress,
            inform=inform,
        )


@guarded
def diff(
    a: PathLike,
    b: PathLike,
    *,
    allow: Iterable[str] = (),
    progress: Progress | None = None,
    at: str | None = None,
    tensors_only: bool = False,
) -> DiffReport:
    """Compare two checkpoints: keys, specs, element bytes, side files and values, but no stamps.

    Args:
        a: A checkpoint.
        b: Another one.
        allow: Permissions, "links" and "opaque". Default: none.
        progress: Called with the bytes done so far and the bytes in total. Default: None.
        at: The dict of a nested checkpoint that rules work on, as a path such as
            `model.state_dict`. Default: found automatically.
        tensors_only: Compare only tensors. Default: False.

    Returns:
        A `DiffReport`; `not_compared` lists what was not compared.

    Raises:
        MigrateError: M115 for wrong arguments, M9xx where a checkpoint cannot be read.

    Example:
        >>> migrate.diff("old", "back").equal
        True
    """
    from .running.comparison import compare_checkpoints

    request = make_request((), (), (), None, allow, at=at)
    with closing(_opened("a", a, request)) as one, closing(_opened("b", b, request)) as other:
        return compare_checkpoints(one, other, progress, tensors_only=tensors_only)


@overload
def history(
    path: None = None,
    *,
    lineage: str | None = None,
    rules: Iterable[PathLike] = (),
    allow: Iterable[str] = (),
    at: str | None = None,
) -> LineagesReport: ...
@overload
def history(
    path: PathLike,
    *,
    lineage: str | None = None,
    rules: Iterable[PathLike] = (),
    allow: Iterable[str] = (),
    at: str | None = None,
) -> HistoryReport: ...
@guarded
def history(
    path: PathLike | None = None,
    *,
    lineage: str | None = None,
    rules: Iterable[PathLike] = (),
    allow: Iterable[str] = (),
    at: str | None = None,
) -> HistoryReport | LineagesReport:
    """Read from its stamp what was applied to a checkpoint, or list the known lineages.

    Args:
        path: A checkpoint. Default: None.
        lineage: The only lineage to list. Default: None, all.
        rules: Folders of lineages that are searched first. Default: none.
        allow: Permissions: "links", "opaque". Default: none.
        at: The dict of a nested checkpoint that rules work on, as a path such as
            `model.state_dict`. Default: found automatically.

    Returns:
        A `HistoryReport`; without a path a `LineagesReport`.

    Raises:
        MigrateError: M507 for a lineage that is not known, M9xx where the checkpoint cannot be
            read.

    Example:
        >>> [edge.to for edge in migrate.history("new").applied]
        ['v5']
    """
    from .running.inspection import describe_history

    request = make_request((), (), rules, None, allow, at=at)
    if path is None:
        return LineagesReport.of(lineages=known_lineages(request.rules, lineage))
    with closing(_opened("path", path, request)) as source:
        return describe_history(source, request, lineage)


@guarded
def lint(
    paths: Iterable[PathLike] = (),
    *,
    select: Iterable[str] = (),
    ignore: Iterable[str] = (),
    index: PathLike | None = None,
    allow: Iterable[str] = (),
    at: str | None = None,
) -> LintReport:
    """Check rule files and layouts without running them.

    Args:
        paths: Rule files or folders. Default: none: those in `./rules`, else those included with
            migrate.
        select: Codes or names of the only findings to report. Default: all.
        ignore: Codes or names of findings to leave out. Default: none.
        index: A checkpoint whose headers the rules are checked against. Default: None.
        allow: Permissions to open that checkpoint: "links", "opaque". Default: none.
        at: The dict of a nested checkpoint that rules work on, as a path such as
            `model.state_dict`. Default: found automatically.

    Returns:
        A `LintReport`: its `exit` is 0, 1 with findings, and 2 where a file cannot be loaded.

    Raises:
        MigrateError: M115 for wrong arguments, M9xx where `index` cannot be read. What is wrong
            with rule files is in the report.

    Example:
        >>> migrate.lint("rename.yaml", ignore=["M608", "M610", "M622"]).exit
        0
    """
    from .lints.findings import lint as find

    given = (paths,) if isinstance(paths, (str, os.PathLike)) else tuple(paths)
    places = [path_text("paths", p) for p in given]
    codes = [(word,) if isinstance(word, str) else tuple(word) for word in (select, ignore)]
    source = (
        None
        if index is None
        else _opened("index", index, make_request((), (), (), None, allow, at=at))
    )
    try:
        headers = None if source is None else source.index
        found = find(
            places,
            codes[0],
            codes[1],
            headers,
            side_reader(source) if source is not None else lambda name: None,
        )
    finally:
        if source is not None:
            source.close()
    broken = any(d.severity == "error" for d in found.problems)
    diagnostics = [*found.problems, *found.findings]
    return LintReport.of(
        exit=2 if broken else 1 if diagnostics else 0,
        files=list(found.files),
        suppressed=found.suppressed,
        diagnostics=[d.to_json() for d in diagnostics],
    )


def _opened(
    name: str, path: PathLike | Live, request: Request, *, meta: bool = False, wrapped: bool = True
) -> Source:
    """A checkpoint, state dict or module; `meta` and `wrapped` say what of the latter is taken."""
    if not isinstance(path, (str, os.PathLike)):
        from .live.module import is_module, opened

        if isinstance(path, Mapping) or is_module(path):
            return opened(path, meta=meta, wrapped=wrapped, at=request.at)
    carry = "carry" in request.allow
    return formats.open(path_text(name, path), carry=carry, **request.opening)
