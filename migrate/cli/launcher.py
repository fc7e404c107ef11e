"""What a launcher of several processes, or the scheduler of an array, says in the environment.

`torchrun`, and scripts around `srun` or `mpirun`, set RANK and WORLD_SIZE. The command line alone
looks at them: a training job may call a Python function on one of its ranks.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

import click

from ..core.errors import fail, listed, plural, printable
from ..core.types import Ranks, RunPart
from ..running.resources import MOST_THREADS
from .render import word
from .terminal import safe, size

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
# of a number of parts: a million
_DIGITS = 6


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


def part(command: F) -> F:
    """`--part I/N|slurm`."""
    option: Callable[[F], F] = click.option(
        "--part",
        "part",
        metavar="I/N|slurm",
        help="Write only the files of part I of N (0/N to N-1/N), or of this task of a SLURM "
        "array; `migrate publish OUT` then publishes all.",
    )
    return option(command)


def part_of(text: str | None, environment: Mapping[str, str] = os.environ) -> RunPart | None:
    """The part that `--part` names. M115 for what names none."""
    if text is None:
        return None
    if text == "slurm":
        return _task_of_an_array(environment)
    number, slash, of = text.partition("/")
    if not (slash and all(one.isascii() and one.isdigit() for one in (number, of))):
        fail(
            "M115",
            f"--part {printable(text, 80)} names no part",
            help="--part 0/3 is the first of three, --part slurm the task of an array",
        )
    if len(number) > _DIGITS or len(of) > _DIGITS or int(number) >= int(of):
        last = f"parts of {of} are 0/{of} to {int(of) - 1}/{of}" if int(of[:9]) else "count from 0"
        fail("M115", f"there is no part {printable(text, 80)}", help=last)
    return RunPart(int(number), int(of))


def _task_of_an_array(environment: Mapping[str, str]) -> RunPart:
    names = {word: f"SLURM_ARRAY_TASK_{word}" for word in ("ID", "MIN", "MAX", "COUNT")}
    if absent := [name for name in names.values() if name not in environment]:
        fail(
            "M115",
            f"--part slurm: {', '.join(absent)} {'is' if len(absent) == 1 else 'are'} not set",
            help="it is for a task of `sbatch --array=0-N`; --part I/N is for everything else",
        )
    task, first, last, count = (
        _number(environment, name, "--part I/N says it in numbers") for name in names.values()
    )
    step, rest = divmod(last - first, max(1, count - 1))
    number, between = divmod(task - first, max(1, step))
    if rest or between or not 0 <= number < count or (count > 1 and not step):
        fail(
            "M115",
            f"--part slurm: the tasks of this array ({count} from {first} to {last}) are no "
            "numbers with equal steps",
            help="use an array such as --array=0-7, or say --part I/N",
        )
    return RunPart(number, count)


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


def part_text(doc: Mapping[str, Any]) -> str:
    """What a part that is done says."""
    doc = safe(doc)
    written = sum(file["size"] for file in doc["files"].values())
    what = f"{plural(len(doc['files']), 'file')}, {size(written)}"
    was = " before" if doc["already"] else ""
    lines = [f"part {doc['part']}/{doc['parts']} is done{was}   {what}   in {doc['partial']}"]
    lines += [f"note: {note}" for note in doc["notes"]]
    if doc["missing"]:
        left = [f"{number}/{doc['parts']}" for number in doc["missing"]]
        lines.append(f"not done yet: {listed(left, 20)}")
    else:
        lines.append(f"all parts are done; to publish them:  migrate publish {word(doc['path'])}")
    return "\n".join(lines)


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


_ALONE = "--ranks off runs this command alone"


def _number(environment: Mapping[str, str], name: str, help: str = _ALONE) -> int:
    text = environment[name]
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        fail("M115", f"{name}={printable(text, 80)} is not a number", help=help)
    return int(text)


def _refuse(what: str) -> NoReturn:
    fail("M115", what, help=_ALONE)
