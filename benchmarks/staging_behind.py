"""A save behind a loop of matmuls, of a snapshot whose tensors are renamed: what it takes from the
loop, written by a thread of the same process and by a child process.

One thread for the matmuls and one that writes, on a machine of two cores; no fsync, and what was
written before is on the disk. Beside it `cp` of the same bytes: what anything that writes takes
from the loop.

    staging_behind.py BYTES FOLDER ROUNDS
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import process
import report
from tasks import RULES, Limit

if TYPE_CHECKING:
    from bench import Bench

BEHIND_TIMES = 1.15
# bytes of a tensor, rows of a matrix: a step of some milliseconds comes back to the interpreter
# often enough to feel who else holds it
TENSOR, ROWS_OF_MATRIX = 32 << 20, 512
# seconds of the loop alone
ALONE = 1.5


def behind(bench: Bench) -> list[Limit]:
    """The loop's time while a state as large as the checkpoint is saved, against its time alone."""
    folder = bench.root / "behind"
    try:
        argv = [sys.executable, __file__, str(bench.total), str(folder), str(bench.args.rounds)]
        taken = json.loads(process.run(argv).stdout.splitlines()[-1])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    steps, saves = taken["steps"], taken["saves"]
    times = {
        way: report.spread(report.ratios(steps[way], steps["alone"]))
        for way in ("thread", "child", "cp")
    }
    took = {way: report.spread(seconds)[0] for way, seconds in saves.items()}
    note = (
        f" ({report.shown(times['thread'])}, a save takes {took['thread']:.1f} s; by a child "
        f"process {report.shown(times['child'])}, {took['child']:.1f} s; beside cp "
        f"{report.shown(times['cp'])}, {took['cp']:.1f} s)"
    )
    what = f"{bench.total / 1e9:.1f} GB saved by a thread behind a loop of matmuls: the loop's time"
    return [Limit(what, times["thread"][0], BEHIND_TIMES, note=note)]


def _steps(goes_on: Callable[[], bool]) -> float:
    """Seconds of a step of the loop, on the average of as many as go on."""
    import torch

    matrix = torch.ones(ROWS_OF_MATRIX, ROWS_OF_MATRIX)
    product = torch.empty_like(matrix)
    count, begun = 0, time.perf_counter()
    while goes_on():
        torch.mm(matrix, matrix, out=product)
        count += 1
    return (time.perf_counter() - begun) / count


def _alone() -> float:
    until = time.perf_counter() + ALONE
    return _steps(lambda: time.perf_counter() < until)


def _measured(nbytes: int, folder: Path, rounds: int) -> dict[str, Any]:
    import torch

    import migrate

    torch.set_num_threads(1)
    one = torch.randint(0, 1 << 15, (TENSOR // 2,), dtype=torch.int16).view(torch.bfloat16)
    half = max(1, nbytes // TENSOR // 2)
    names = [f"model.layers.{n}.{k}" for n in range(half) for k in ("mlp.w", "block_sparse_moe.w")]
    state = {name: one.clone() for name in [*names, "lm_head.weight"]}
    stagers = {"thread": migrate.Stager(), "child": migrate.Stager(process=True)}
    renamed = {
        way: stager.stage(state).migrate(rules=RULES / "rename.yaml")
        for way, stager in stagers.items()
    }
    del state
    steps: dict[str, list[float]] = {"alone": [], "thread": [], "child": [], "cp": []}
    saves: dict[str, list[float]] = {"thread": [], "child": [], "cp": []}
    kept = folder / "kept"
    renamed["thread"].save(kept, fsync=False)

    def saved(way: str) -> float:
        out = folder / way
        begun = time.perf_counter()
        job = renamed[way].save_async(out, fsync=False)
        step = _steps(lambda: not job.done())
        saves[way].append(time.perf_counter() - begun)
        job.result()
        shutil.rmtree(out)
        return step

    def copied() -> float:
        out = folder / "copy"
        begun = time.perf_counter()
        copying = subprocess.Popen(["cp", "-r", "--reflink=never", kept, out])
        step = _steps(lambda: copying.poll() is None)
        saves["cp"].append(time.perf_counter() - begun)
        shutil.rmtree(out)
        return step

    ways: Sequence[tuple[str, Callable[[], float]]] = [
        ("alone", _alone),
        ("thread", lambda: saved("thread")),
        ("child", lambda: saved("child")),
        ("cp", copied),
    ]
    # once for nothing: imports, and pages of the cache
    for number in range(rounds + 1):
        for way, step in ways[:: -1 if number % 2 else 1]:
            os.sync()
            steps[way].append(step())
    return {
        "steps": {way: taken[1:] for way, taken in steps.items()},
        "saves": {way: taken[1:] for way, taken in saves.items()},
    }


ROWS: dict[str, Callable[[Bench], Sequence[Limit]]] = {"staging-behind": behind}


if __name__ == "__main__":
    print(json.dumps(_measured(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))))
