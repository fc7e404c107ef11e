"""A live module written in any layout by the same run as a checkpoint: whole, with a stamp."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

from ..core.errors import fail, listed, printable
from ..core.out_of_memory import guarded
from ..core.types import PathLike
from ..elements.raw import is_dtensor
from ..planning.request import Request, path_text
from ..results import ApplyReport
from ..running.job import write_checkpoint
from ..running.output_shapes import format_of_ending
from ..running.resources import read_options
from . import module as modules
from .load import GATHER, live_request

if TYPE_CHECKING:
    import torch

    from ..formats.memory import MemorySource


@guarded
def save(
    model: torch.nn.Module,
    path: PathLike,
    to: str | Iterable[str] = (),
    *,
    from_: str | Iterable[str] = (),
    rules: Iterable[PathLike] = (),
    params: Mapping[str, Any] | None = None,
    allow: Iterable[str] = (),
    output_format: str | None = None,
    chunks: int | None = None,
    max_shard_size: int | str | None = None,
    max_memory: int | str = "1GB",
    threads: int = 2,
    fsync: bool = True,
    resume: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> ApplyReport:
    """Write a live module to disk or to a store, in any layout, including older ones.

    A folder gets the module's `config`, if it has one, as the rules change it. Names are the
    model's own, without the segments that DDP and torch.compile insert.

    Args:
        model: The module.
        path: The new checkpoint, which must not exist: one file by its ending (.safetensors, .pt,
            .pth, .bin, .ckpt), else a folder. Also a URL, as for `apply`.
        to: Layouts to write, as `LINEAGE@LAYOUT`. Default: none; the module is written as it is.
        from_: Layouts that the module is in. Default: none; read from its stamp, else detected from
            keys, shapes and `config.json`.
        rules: Rule files, applied as they are, or one folder of lineages that is searched first.
            Default: none.
        params: Values of the rules' params, by name. Default: none; they are read from the
            checkpoint.
        allow: Permissions, such as "lossy" or "drop". Default: none, so that whatever would lose
            something is refused.
        output_format: "safetensors", "torch", "dcp" (torch.distributed.checkpoint), "torch_dist"
            (Megatron's) or one that a package declares. Default: as the suffix of the name says,
            else "safetensors".
        chunks: Cut each tensor as FSDP2 on so many ranks would hold it; for "dcp". Default: None,
            chunks of at most 512 MiB.
        max_shard_size: Bytes of the largest output file, also as text ("500MB"). Default: 5 GB.
        max_memory: Bytes for tensors that are computed or transposed, also as text ("4GB").
            Default: 1 GB.
        threads: Output files to write at the same time, 1 to 64. Default: 2.
        fsync: Wait until everything is on disk; without it a power cut may lose the output.
            Default: True.
        resume: Continue a killed or failed run, not in a store. Default: False.
        progress: Called with the bytes done so far and the bytes in total. Default: None.

    Returns:
        An `ApplyReport`.

    Raises:
        MigrateError: What `apply` raises, and M916 for a module on the meta device or with parts in
            other processes.

    Example:
        >>> migrate.save(torch.nn.Linear(2, 2), "linear.safetensors").tensors
        2
    """
    if not modules.is_module(model):
        fail(
            "M115",
            f"`model` must be a module, not a {printable(type(model).__qualname__)}",
            help="`apply` takes state dicts",
        )
    ending = os.path.splitext(path_text("path", path))[1]
    request = live_request(
        to, from_, rules, params, allow, None, output_format or format_of_ending(ending), chunks
    )
    report = write_checkpoint(
        lambda: _opened(model, request),
        path,
        request,
        read_options(
            max_shard_size=max_shard_size,
            threads=threads,
            max_memory=max_memory,
            fsync=fsync,
            resume=resume,
            progress=progress,
        ),
    )
    return cast("ApplyReport", report)


def _opened(model: torch.nn.Module, request: Request) -> MemorySource:
    source = modules.opened(model)
    parts = [key for key, one in source.values.items() if is_dtensor(one)]
    if parts:
        fail(
            "M916",
            f"other processes hold parts of {listed(parts, 4)}",
            help=f"{GATHER}; `apply` writes it, in one process",
        )
    if source.converted and "lossy" not in request.allow:
        what = (
            f"a file holds plain numbers, and {listed(sorted(source.converted), 4)} hold them "
            "in a number format of their own"
        )
        fail("M916", what, help='allow={"lossy"} writes them dequantized')
    return source
