"""How a run goes about its work, and the numbers that people give for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ..core.errors import fail, printable
from ..formats import parse_size
from .device import CPU, Device, parse_device

# below it not even the buffers of one thread fit
LEAST_MEMORY = 1 << 20
SHARD = "5GB"
MOST_THREADS = 64
MAX_MEMORY = 10**9
_parse_text = lru_cache(maxsize=16)(parse_size)


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How a run goes about its work. But for the size of shards, which is part of the plan, nothing
    of it changes what is written.

    `threads` that read, compute and write; `max_memory` in bytes for tensors that are computed or
    transposed; `max_shard_size` in bytes, of the largest output file; `fsync`: wait until the disk
    has everything; `resume`: continue what an earlier run left behind; `device`: what computes;
    `progress`: called with the bytes that are done and the bytes in all.
    """

    threads: int = 2
    max_memory: int = MAX_MEMORY
    max_shard_size: int = 5 * 10**9
    fsync: bool = True
    resume: bool = False
    device: Device = CPU
    progress: Callable[[int, int], None] | None = None


def read_options(
    *,
    max_shard_size: int | str | None = None,
    threads: int = 2,
    max_memory: int | str = "1GB",
    fsync: bool = True,
    resume: bool = False,
    device: str = "cpu",
    progress: Callable[[int, int], None] | None = None,
) -> RunOptions:
    """The options that a person gives, sizes as numbers or as text such as `5GB`.

    QuestionError M115 for anything but a size, a number of threads or a device, M407 if torch finds
    no GPU.
    """
    shard = bytes_of(SHARD if max_shard_size is None else max_shard_size)
    memory = memory_of(max_memory)
    check_threads(threads)
    where = CPU if device == "cpu" else parse_device(device)
    return RunOptions(threads, memory, shard, fsync, resume, where, progress)


def bytes_of(given: int | str) -> int:
    """Bytes, from a number or from text such as `5GB`; QuestionError M115 for anything else."""
    try:
        return _parse_text(given) if isinstance(given, str) else parse_size(given)
    except ValueError as error:
        fail("M115", str(error))


def memory_of(given: int | str) -> int:
    """Bytes of memory for a run; QuestionError M115 below `LEAST_MEMORY`."""
    found = bytes_of(given)
    if found < LEAST_MEMORY:
        fail(
            "M115",
            f"max_memory of {found} bytes is too little for any run",
            help=f"give at least {LEAST_MEMORY} bytes",
        )
    return found


def check_threads(given: Any) -> None:
    """QuestionError M115 for anything but a number of threads."""
    if not isinstance(given, int) or isinstance(given, bool) or not 1 <= given <= MOST_THREADS:
        fail(
            "M115",
            f"`threads` must be a number from 1 to {MOST_THREADS}, not {printable(repr(given))}",
        )
