"""A distributed checkpoint opened without a look at every chunk: chunks that seem alike are taken
to be alike, until those that are read here are looked at.

What planning reads decides what is made, so where it reads any tensor all chunks are looked at
first. So they are where that is seen which makes no whole tensor: the refusal names all such
tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import TYPE_CHECKING, Any, TypeVar

from ..core.errors import MigrateError
from ..core.templates import matches
from ..planning.request import DISTRIBUTED
from ..running.encoding_anew import patterns_of

if TYPE_CHECKING:
    from ..planning.request import Request
    from ..source.blobs import Blob
    from ..source.index import Source

T = TypeVar("T")
# by the key of a tensor: whether its chunks may be taken to be alike; None: no chunks are
Lazily = Callable[[str], bool]


def lazily(request: Request) -> Lazily:
    """Which tensors' chunks may be taken to be alike: not those of tensors that the request has
    encoded anew, for that has to be the same on all ranks.
    """
    patterns = patterns_of(request)
    if not patterns:
        return lambda _: True

    def may_be_taken(key: str) -> bool:
        # a pattern may leave out the path of the dict that rules work on
        words = key.split(".")
        names = [".".join(words[n:]) for n in range(len(words))]
        return not any(matches(pattern, name) for pattern in patterns for name in names)

    return may_be_taken


def plan_lazily(
    open_source: Callable[[Lazily | None], Source],
    request: Request,
    plan: Callable[[Source], T],
) -> tuple[Source, T]:
    """The opened checkpoint, and what `plan` makes of it. Before anything of it is used, `confirm`
    of the source has to look at the chunks that are read, and if it does not, all is planned again
    with `open_source(None)`.
    """
    try:
        source = open_source(lazily(request))
        planned, watched = source, list[_WatchedBlob]()
        if source.format == DISTRIBUTED:
            watched = [_WatchedBlob(blob) for blob in source.blobs]
            planned = copy(source)
            planned.blobs = watched
        made = closed_if_it_fails(source, lambda: plan(planned))
        if not any(blob.was_read for blob in watched):
            return source, made
        source.close()
    except MigrateError as error:
        if all(one.code != "M946" for one in error.diagnostics):
            raise
    source = open_source(None)
    return source, closed_if_it_fails(source, lambda: plan(source))


def closed_if_it_fails(source: Source, make: Callable[[], T]) -> T:
    """What `make` makes; the source is closed if that raises."""
    try:
        return make()
    except BaseException:
        source.close()
        raise


class _WatchedBlob:
    """A blob that remembers whether anything of it was read."""

    identity = None

    def __init__(self, blob: Blob) -> None:
        self._blob, self.was_read = blob, False
        self.name, self.size = blob.name, blob.size

    def fileno(self) -> None:
        """None: all is read by `readinto`."""

    def readinto(self, offset: int, buffer: memoryview) -> None:
        """As the blob's own."""
        self.was_read = True
        self._blob.readinto(offset, buffer)

    def __getattr__(self, name: str) -> Any:
        self.was_read = True
        return getattr(self._blob, name)
