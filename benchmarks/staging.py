"""Snapshots of a training state: against `copy.deepcopy`, a recursive `detach().clone()` and
torch's stager, in one process with one thread, ratios within a round.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import process
import report
from tasks import Limit

if TYPE_CHECKING:
    from bench import Bench

HERE = Path(__file__).resolve().parent
# case, title, and (way, other way, bound) of each target
CASES: dict[str, tuple[str, tuple[tuple[str, str, float], ...]]] = {
    "large": ("8 x 64 MB", (("cold", "clone", 1.25), ("warm", "clone", 0.5))),
    "middle": ("1,000 x 256 KB", (("warm", "clone", 1.0),)),
    "small": (
        "20,000 x 4 KB",
        (("warm", "clone", 3.5), ("warm", "torch", 0.55), ("warm", "deepcopy", 0.45)),
    ),
    "views": ("20,000 views of one storage", (("warm", "deepcopy", 0.5), ("warm", "torch", 0.6))),
    "ints": ("100,000 ints", (("warm", "deepcopy", 0.75),)),
    "dicts": ("100,000 small dicts", (("warm", "deepcopy", 0.75),)),
    "dataclasses": ("100,000 dataclasses", (("warm", "deepcopy", 0.75),)),
}
PRIVATE, LEFT_MB = 1.05, 2.0
WAYS = {
    "cold": "first",
    "warm": "again",
    "clone": "a clone",
    "torch": "torch's stager",
    "deepcopy": "deepcopy",
}


def _measured(what: str, rounds: int) -> dict[str, Any]:
    argv = [sys.executable, HERE / "staging_cases.py", what, str(rounds)]
    found: dict[str, Any] = json.loads(process.run(argv).stdout.splitlines()[-1])
    return found


def speed(bench: Bench) -> list[Limit]:
    """Each kind of state, in a process of its own."""
    found = []
    for name, (title, targets) in CASES.items():
        seconds = _measured(name, bench.args.rounds)
        for way, other, bound in targets:
            spread = report.spread(report.ratios(seconds[way], seconds[other]))
            took = f"{min(seconds[way]) * 1e3:.0f} ms to {min(seconds[other]) * 1e3:.0f}"
            what = f"{title}, {WAYS[way]}: against {WAYS[other]}"
            found.append(Limit(what, spread[0], bound, note=f" ({report.shown(spread)}; {took})"))
    return found


def memory(bench: Bench) -> list[Limit]:
    """Private memory of a state of 512 MB at the peak of `stage`, and what is left of it."""
    taken = _measured("memory", bench.args.rounds)
    left = "512 MB: private memory left, released and two small stages later"
    return [
        Limit("512 MB: private memory at the peak, of the bytes staged", taken["peak"], PRIVATE),
        Limit(left, taken["left"], LEFT_MB, unit=" MB"),
    ]


ROWS: dict[str, Callable[[Bench], Sequence[Limit]]] = {
    "staging-speed": speed,
    "staging-memory": memory,
}
