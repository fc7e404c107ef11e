"""What `migrate verify` takes, in rounds with the `apply` whose output it checks: wall clock,
processor time, private memory.
"""

from __future__ import annotations

import re
import shutil
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import memory
import process
import report
from tasks import VERIFY_BLOCKS, VERIFY_LAYOUTS, VERIFY_PRIVATE, Limit

if TYPE_CHECKING:
    from bench import Bench

MB = 1_000_000
UNITS = {"B": 1, "kB": 1000, "MB": MB, "GB": 1000 * MB}


def layouts(bench: Bench) -> list[Limit]:
    """Experts stacked and joined, and taken apart again."""
    return [
        *_measured(bench, "v4 -> v5", "v4", ["apply", "--to", "hf-mixtral@v5"], VERIFY_LAYOUTS),
        *_measured(bench, "v5 -> v4", "v5", ["downgrade", "--to", "hf-mixtral@v4"], VERIFY_LAYOUTS),
    ]


def blocks(bench: Bench) -> list[Limit]:
    """FP8 blocks to bf16 and back."""
    lossy = ["--allow", "lossy"]
    return [
        *_measured(
            bench,
            "FP8 blocks -> bf16",
            "fp8-large",
            ["apply", "--to", "deepseek-v3@bf16", *lossy],
            VERIFY_BLOCKS,
        ),
        *_measured(
            bench,
            "bf16 -> FP8 blocks",
            "bf16-large",
            ["downgrade", "--to", "deepseek-v3@fp8", *lossy],
            VERIFY_BLOCKS,
        ),
    ]


def _measured(
    bench: Bench, title: str, source: str, command: list[str], bound: float
) -> list[Limit]:
    bench.require(source)
    old, kept, target = bench.root / source, bench.root / "verified", bench.root / "out"
    for folder in (kept, target):
        shutil.rmtree(folder, ignore_errors=True)
    verb, *rest = command

    def made(out: Path) -> list[Any]:
        return [*bench.migrate, verb, old, "-o", out, *rest, "--no-fsync"]

    process.run(made(kept))
    for folder in (old, kept):
        memory.read_through(folder, anew=True)
    written = sum(f.stat().st_size for f in kept.iterdir())
    # read while it runs, because it goes to stderr
    said = process.run(
        ["sh", "-c", 'exec "$@" 2>&1', "sh", *bench.migrate, "verify", kept, "--source", old]
    ).stdout
    found = re.search(r"at most ([0-9.]+) (\w+) of memory", said)
    if found is None:
        raise process.RunError("verify does not say how much memory it takes")
    planned = float(found[1]) * UNITS[found[2]]
    rounds: dict[str, list[process.Taken]] = {"apply": [], "verify": []}
    for number in range(bench.args.rounds):
        for name in list(rounds)[:: 1 if number % 2 == 0 else -1]:
            argv = (
                made(target)
                if name == "apply"
                else [*bench.migrate, "verify", kept, "--source", old, "-q"]
            )
            need = int(written * 1.05) + 512 * MB if name == "apply" else int(planned) + 256 * MB
            rounds[name].append(bench.timed(argv, target if name == "apply" else None, need))
    shutil.rmtree(kept)
    wall, cpu = (
        report.spread(
            report.ratios(
                *([getattr(t, what) for t in rounds[name]] for name in ("verify", "apply"))
            )
        )
        for what in ("wall", "cpu")
    )
    seconds = {name: statistics.median(t.wall for t in taken) for name, taken in rounds.items()}
    beyond = (max(t.private for t in rounds["verify"]) - planned) / MB
    note = f" ({report.shown(wall)}; {seconds['verify']:.2f} s against {seconds['apply']:.2f} s)"
    return [
        Limit(f"verify {title}: time, of apply's", wall[0], bound, note=note),
        Limit(
            f"verify {title}: processor time, of apply's",
            cpu[0],
            bound,
            note=f" ({report.shown(cpu)})",
        ),
        Limit(
            f"verify {title}: private memory beyond the {planned / MB:.0f} MB that it announces",
            max(0.0, beyond),
            VERIFY_PRIVATE,
            unit=" MB",
        ),
    ]


ROWS: dict[str, Callable[[Bench], list[Limit]]] = {
    "verify-layouts": layouts,
    "verify-blocks": blocks,
}
