"""Types and versions that all of the library shares."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

__version__ = "0.1.0"


# where something lies, as callers may say it
PathLike: TypeAlias = "str | os.PathLike[str]"
# called with bytes that are done and bytes in all
Progress: TypeAlias = Callable[[int, int], None]
# before the name of an installed pack, where a folder of lineages could stand
PACK = "pack:"
# of each JSON document that a command answers with, of plans and of stamps
FORMAT_VERSION = "1.0"


@dataclass(frozen=True, slots=True)
class Ranks:
    """The place of this process among `world` of them that run the same command and share the work.

    `rank` counts from 0, `local_rank` on its machine. `launch` is whatever tells their launch from
    others, and may be empty.
    """

    rank: int
    world: int
    local_rank: int = 0
    launch: str = ""


@dataclass(frozen=True, slots=True)
class RunPart:
    """One of `of` processes that each write some files of one output, whenever and wherever they
    run. `number` counts from 0.
    """

    number: int
    of: int

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"


T = TypeVar("T", bound=tuple[Any, ...])


def records(kind: type[T], *columns: Iterable[Any]) -> list[T]:
    """One `kind` for each position of the columns, which are its fields in order, defaults
    included; the shortest ends it.
    """
    new = tuple.__new__
    return [new(kind, row) for row in zip(*columns)]  # noqa: B905 - columns may be endless
