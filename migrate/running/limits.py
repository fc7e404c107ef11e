"""Numbers that people give: sizes of shards, the memory that a run may take, its threads."""

from __future__ import annotations

from typing import Any

from ..core.diagnostics import printable
from ..core.errors import fail
from ..formats import parse_size

# below it not even the buffers of one thread fit
LEAST_MEMORY = 1 << 20
SHARD = "5GB"
MOST_THREADS = 64


def bytes_of(given: int | str) -> int:
    """Bytes, from a number or from text such as `5GB`; QuestionError M115 for what is no size."""
    try:
        return parse_size(given)
    except ValueError as error:
        fail("M115", str(error))


def memory_of(given: int | str) -> int:
    """Bytes of memory for a run; QuestionError M115 below `LEAST_MEMORY`."""
    found = bytes_of(given)
    if found < LEAST_MEMORY:
        fail(
            "M115",
            f"max_memory of {found} bytes is not enough for anything",
            help=f"give at least {LEAST_MEMORY} bytes",
        )
    return found


def check_threads(given: Any) -> None:
    """QuestionError M115 for what is no number of threads."""
    if not isinstance(given, int) or isinstance(given, bool) or not 1 <= given <= MOST_THREADS:
        fail(
            "M115", f"`threads` is a number from 1 to {MOST_THREADS}, not {printable(repr(given))}"
        )
