"""What the verbs share: how their checkpoints are opened, and the arguments of those that write."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict

from .. import formats
from ..core.types import PathLike, Progress, Ranks
from ..planning.request import Request, path_text
from ..source.index import Source

if TYPE_CHECKING:
    import torch

    class SharedRequest(TypedDict, total=False):
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
        copy: str
        read_back: bool

    class AppliedRequest(SharedRequest, total=False):
        source: PathLike | None


# a state dict or a module
Live: TypeAlias = "Mapping[str, Any] | torch.nn.Module"


def opened(
    name: str, path: PathLike | Live, request: Request, *, meta: bool = False, wrapped: bool = True
) -> Source:
    """A checkpoint, state dict or module. `meta`: names, shapes and dtypes will do; `wrapped`: so
    do subclasses of tensors in memory.
    """
    if not isinstance(path, (str, os.PathLike)):
        from ..live.module import is_module
        from ..live.module import opened as module_opened

        if isinstance(path, Mapping) or is_module(path):
            return module_opened(path, meta=meta, wrapped=wrapped, at=request.at)
    carry = "carry" in request.allow
    return formats.open(path_text(name, path), carry=carry, headers=meta, **request.opening)
