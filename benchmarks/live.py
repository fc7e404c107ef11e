"""What is loaded into live modules, each time in a process of its own: how long it takes, and what
memory.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import data
import memory
import process
import report
from tasks import HOOK_AGAIN, HOOK_FIRST, HOOK_KEYS, LOAD_PRIVATE, LOAD_TIMES, Limit

HERE = Path(__file__).resolve().parent
ROUNDS = 7
MB = 1_000_000
SHAPE = data.Shape(
    layers=14, experts=16, hidden=1024, intermediate=1408, vocab=8192, heads=8, kv_heads=2, shards=4
)


def load(migrate: list[str], python: str, folder: Path, checkpoint: Path) -> list[Limit]:
    """`migrate.load` of 2 GB in the old layout, against torch's load of the migrated files."""
    places = []
    for name, shape in (("live", SHAPE), ("live-tiny", data.PRESETS["tiny"])):
        old, new = folder / f"{name}-v4", folder / f"{name}-v5"
        if not (old / "config.json").exists():
            data.make(old, shape)
        if not new.exists():
            process.run(
                [
                    *migrate,
                    "apply",
                    old,
                    "-o",
                    new,
                    "--to",
                    "hf-mixtral@v5",
                    "--max-shard-size",
                    "600MB",
                    "--no-fsync",
                ]
            )
        places += [old, new]
    for place in places:
        memory.read_through(place)

    def taken(how: str, *more: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(
            process.run([python, HERE / "live_load.py", how, *places, *more]).stdout
        )
        return found

    rounds: dict[str, list[dict[str, Any]]] = {"migrate": [], "torch": []}
    for number in range(ROUNDS):
        for how in list(rounds)[:: 1 if number % 2 == 0 else -1]:
            rounds[how].append(taken(how))
    seconds = {how: [one["seconds"] for one in found] for how, found in rounds.items()}
    times = report.spread(report.ratios(seconds["migrate"], seconds["torch"]))
    first = statistics.median(one["first"] for one in rounds["migrate"])
    held = taken("migrate", "--memory")
    more = (
        f"{statistics.median(seconds['migrate']):.2f} s, the first in a process {first:.2f} s more"
    )
    beyond = max(0, held["private"] - held["largest"]) / MB
    return [
        Limit(
            "load of 2 GB, against load_state_dict(load_file)",
            times[0],
            LOAD_TIMES,
            note=f" ({report.shown(times)}; {more})",
        ),
        Limit(
            "load of 2 GB, private memory beyond module and one tensor",
            beyond,
            LOAD_PRIVATE,
            unit=" MB",
        ),
    ]


def hook(migrate: list[str], python: str, folder: Path, checkpoint: Path) -> list[Limit]:
    """The hook of `migrate.attach` on many tensors."""
    rounds = [
        json.loads(process.run([python, HERE / "live_hook.py"]).stdout) for _ in range(ROUNDS)
    ]
    first, second = (
        statistics.median(one[name] / one["plain"] for one in rounds)
        for name in ("first", "second")
    )
    what = f"hook on {HOOK_KEYS:,} tensors, against load_state_dict of what it makes"
    return [Limit(what, first, HOOK_FIRST), Limit(f"{what}: again", second, HOOK_AGAIN)]


COMMANDS: dict[str, Callable[[list[str], str, Path, Path], list[Limit]]] = {
    "load": load,
    "hook": hook,
}
