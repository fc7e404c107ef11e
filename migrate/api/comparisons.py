"""Bytes compared: an output with its source, and a checkpoint with another one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

from ..core.errors import fail, option
from ..core.out_of_memory import guarded
from ..core.types import PathLike, Progress, Ranks
from ..planning.request import make_request
from ..results import (
    DiffReport,
    VerifyEstimate,
    VerifyReport,
)
from ..running.resources import check_threads, memory_of
from .opening import opened


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
    from ..running.comparison import verify_output
    from ..running.sample import parse_share

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
        closing(opened("source", source, request)) as origin,
        closing(opened("out", out, replace(request, side=None))) as made,
    ):
        verified: Callable[..., VerifyReport] = verify_output
        if ranks is not None and ranks.world > 1:
            from ..running.rank_run import verify_by_ranks

            verified = partial(verify_by_ranks, ranks=ranks)
        return verified(
            origin,
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
    from ..running.comparison import compare_checkpoints

    request = make_request((), (), (), None, allow, at=at)
    with closing(opened("a", a, request)) as one, closing(opened("b", b, request)) as other:
        return compare_checkpoints(one, other, progress, tensors_only=tensors_only)
