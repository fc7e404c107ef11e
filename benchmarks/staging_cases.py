"""One kind of state, staged by each way in turn: seconds by round, as JSON, for `staging.py`."""

from __future__ import annotations

import copy
import dataclasses
import gc
import json
import mmap
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import migrate


@dataclasses.dataclass
class Record:
    """A step and its name."""

    step: int
    name: str


def cloned(obj: Any) -> Any:
    """What everybody writes first: tensors cloned, dicts and lists gone through."""
    if isinstance(obj, torch.Tensor):
        return obj.detach().clone()
    if isinstance(obj, dict):
        return {key: cloned(value) for key, value in obj.items()}
    if isinstance(obj, list):
        return [cloned(value) for value in obj]
    return obj


def state(what: str) -> Any:
    """The state of a case."""
    if what in ("large", "memory"):
        return {str(n): torch.randn(16 << 20) for n in range(8)}
    if what == "middle":
        return {str(n): torch.randn(1 << 16) for n in range(1000)}
    if what == "small":
        return {str(n): torch.randn(32, 32) for n in range(20_000)}
    if what == "views":
        base = torch.randn(20_000 * 16)
        return {str(n): base[n * 16 : n * 16 + 16] for n in range(20_000)}
    if what == "ints":
        return list(range(1000, 101_000))
    if what == "dicts":
        return [{"step": n, "name": str(n)} for n in range(100_000)]
    return [Record(n, "name") for n in range(100_000)]


def torchs() -> Callable[[Any], Any]:
    """`stage` of torch's stager, warm in every round but the first."""
    from torch.distributed.checkpoint._state_dict_stager import StateDictStager

    stager = StateDictStager()

    def stage(obj: Any) -> Any:
        return stager.stage({"state": obj})

    return stage


def nbytes(obj: Any) -> int:
    """The bytes of the tensors in a dict; 0 for anything else."""
    return sum(x.nbytes for x in obj.values()) if isinstance(obj, dict) else 0


def warm_pages(size: int) -> None:
    """Lets the kernel have free pages of that many bytes that the host has given already.

    A hypervisor takes free pages back: see `memory.py`.
    """
    if size:
        with mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as pages:
            pages.madvise(mmap.MADV_HUGEPAGE)
            for at in range(0, size, mmap.PAGESIZE):
                pages[at] = 1


def timed(call: Callable[[], Any], size: int = 0) -> float:
    """Seconds of a call, what it answers with kept until the clock has been read; `size`: bytes
    that it will need.
    """
    gc.collect()
    warm_pages(size)
    begun = time.perf_counter()
    made = call()
    taken = time.perf_counter() - begun
    del made
    return taken


def speed(what: str, rounds: int) -> dict[str, list[float]]:
    """Seconds of each way, one after the other in each round, the order turned every round."""
    held, stager, theirs = state(what), migrate.Stager(), torchs()
    ways: dict[str, Callable[[], Any]] = {
        "clone": lambda: cloned(held),
        "cold": lambda: migrate.Stager().stage(held),
        "warm": lambda: stager.stage(held),
        "deepcopy": lambda: copy.deepcopy(held),
        "torch": lambda: theirs(held),
    }
    for call in ways.values():
        call()
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    needed = nbytes(held)
    for number in range(rounds):
        for way in list(ways)[:: -1 if number % 2 else 1]:
            seconds[way].append(timed(ways[way], needed))
    return seconds


def private() -> int:
    """Bytes of memory that belong to this process alone."""
    text = Path("/proc/self/smaps_rollup").read_text()
    kinds = ("Private_Dirty", "Private_Clean")
    return sum(int(x.split()[1]) for x in text.splitlines() if x.startswith(kinds)) * 1024


def memory() -> dict[str, float]:
    """The highest private memory during a stage in staged bytes, and megabytes left later."""
    held, stager, small = state("memory"), migrate.Stager(), {"x": torch.ones(3)}
    stager.stage(small)
    gc.collect()
    before, peak, stop = private(), [0], threading.Event()

    def watch() -> None:
        while not stop.wait(0.005):
            peak[0] = max(peak[0], private())

    watcher = threading.Thread(target=watch)
    watcher.start()
    snapshot = stager.stage(held)
    peak[0] = max(peak[0], private())
    stop.set()
    watcher.join()
    nbytes = snapshot.nbytes
    snapshot.release()
    for _ in range(2):
        stager.stage(small)
    return {"peak": (peak[0] - before) / nbytes, "left": (private() - before) / 1e6}


def main() -> None:
    what, rounds = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    print(json.dumps(memory() if what == "memory" else speed(what, rounds)))


if __name__ == "__main__":
    main()
