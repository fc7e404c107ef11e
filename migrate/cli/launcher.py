"""What a launcher of several processes says in the environment.

`torchrun`, and scripts around `srun` or `mpirun`, set RANK and WORLD_SIZE. The command line alone
looks at them: a training job may call a Python function on one of its ranks.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import click

from ..core.errors import fail, printable
from ..core.types import Ranks
from ..running.resources import MOST_THREADS

F = TypeVar("F", bound=Callable[..., Any])

# what tells two launches on one machine from each other, where it is set
_LAUNCH = (
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
)
# threads of a process that runs alone
_THREADS = 2


def ranks(command: F) -> F:
    """`--ranks auto|off`."""
    option: Callable[[F], F] = click.option(
        "--ranks",
        "launched",
        type=click.Choice(["auto", "off"]),
        default="auto",
        show_default=True,
        help="auto: share the work with the other processes if RANK and WORLD_SIZE are set, as by "
        "torchrun; off: run alone.",
    )
    return option(command)


def ranks_of(launched: str, environment: Mapping[str, str] = os.environ) -> Ranks | None:
    """The place of this process in the launch; None if it runs alone. M115 for variables that
    contradict each other.
    """
    if launched == "off" or not {"RANK", "WORLD_SIZE"} <= environment.keys():
        return None
    rank, world = (_number(environment, name) for name in ("RANK", "WORLD_SIZE"))
    local = _number(environment, "LOCAL_RANK") if "LOCAL_RANK" in environment else 0
    if rank >= world:
        _refuse(f"RANK={rank} and WORLD_SIZE={world} contradict each other")
    if world == 1:
        return None
    return Ranks(rank, world, local, "|".join(environment.get(name, "") for name in _LAUNCH))


def threads_of(
    given: int | None, ranks: Ranks | None, environment: Mapping[str, str] = os.environ
) -> int:
    """The threads of this process: by default the cores are divided among those of a machine."""
    if given is not None:
        return given
    if ranks is None or "LOCAL_WORLD_SIZE" not in environment:
        return _THREADS
    share = _cores() // max(1, _number(environment, "LOCAL_WORLD_SIZE"))
    return max(1, min(MOST_THREADS, share))


@contextmanager
def ending_with_the_others(ranks: Ranks | None) -> Iterator[None]:
    """SIGTERM, with which a launcher ends all when one has failed, lets this process say why."""
    if ranks is None:
        yield
        return
    from ..running.rank_run import Terminated

    def end(number: int, frame: Any) -> None:
        # once: what follows takes a moment
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Terminated

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment[name]
    if not text.isascii() or not text.isdigit():
        _refuse(f"{name}={printable(text, 80)} is not a number")
    return int(text)


def _refuse(what: str) -> None:
    fail("M115", what, help="--ranks off runs this command alone")
