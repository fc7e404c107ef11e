"""A live module written in another layout, through the same run as any other checkpoint: whole or
not at all, with a stamp.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ..core.diagnostics import fail, listed, printable
from ..core.memory import guarded
from ..planning.question import SUFFIXES, PathLike, Question, path_text
from ..running.job import write
from . import module as modules
from .load import GATHER, asked
from .targets import is_distributed

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
    max_shard_size: int | str | None = None,
    max_memory: int | str = "1GB",
    threads: int = 2,
    fsync: bool = True,
    resume: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Writes a module to `path` in the layout `to`, an older one too, and answers with what was
    published, as `apply` does.

    The ending of `path` says the format, `.safetensors` or `.pt`; without one a folder is written,
    with the module's `config`, if it has one, as the rules change it. Names are the model's own,
    without the segments of DDP and torch.compile. Without `to` and `rules` the module is written as
    it is. M916 for a module on the meta device.
    """
    if not modules.is_module(model):
        fail(
            "M115",
            f"`model` is a module, not a {printable(type(model).__qualname__)}",
            help="`apply` takes state dicts",
        )
    ending = os.path.splitext(path_text("path", path))[1]
    question = asked(to, from_, rules, params, allow, None, output_format or SUFFIXES.get(ending))
    return write(
        lambda: _opened(model, question),
        path,
        question,
        max_shard_size=max_shard_size,
        threads=threads,
        max_memory=max_memory,
        fsync=fsync,
        resume=resume,
        progress=progress,
    )


def _opened(model: torch.nn.Module, question: Question) -> MemorySource:
    source = modules.opened(model)
    parts = [key for key, one in source.values.items() if is_distributed(one)]
    if parts:
        fail(
            "M916",
            f"other processes hold parts of {listed(parts, 4)}",
            help=f"{GATHER}; `apply` writes it, in one process",
        )
    if source.converted and "lossy" not in question.allow:
        what = (
            f"a file holds plain numbers, and {listed(sorted(source.converted), 4)} hold them "
            "in a number format of their own"
        )
        fail("M916", what, help='allow={"lossy"} writes them dequantized')
    return source
