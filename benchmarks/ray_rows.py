"""A run of the workers of a Ray cluster on this machine, against the same run in one process: what
Ray adds after start-up, and how much faster four workers are, where there are cores for them.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import memory
import report
from distributed import in_turn
from tasks import RAY_FASTER, RAY_OVERHEAD, Limit

if TYPE_CHECKING:
    from bench import Bench

# four files of about the same size, for four workers
FILES, WORKERS = 4, 4
TO = ("--to", "hf-mixtral@v5")
# without one, clusters that start at the same time each make their own
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
CLUSTER = """
import sys, ray
here = ray.init(address="local", num_cpus=int(sys.argv[1]), object_store_memory=80 << 20,
    include_dashboard=False, logging_level="ERROR", log_to_driver=False, _temp_dir=sys.argv[2])
print(here.address_info["gcs_address"], flush=True)
sys.stdin.read()
"""


@contextmanager
def _cluster(workers: int) -> Iterator[str]:
    """The address of a cluster with so many workers."""
    # sockets lie in the folder, and a socket's path has at most 107 characters
    with (
        tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder,
        subprocess.Popen(
            [sys.executable, "-c", CLUSTER, str(workers), folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **TOKEN, "RAY_USAGE_STATS_ENABLED": "0"},
            text=True,
        ) as child,
    ):
        try:
            yield child.stdout.readline().strip()
        finally:
            child.communicate()


def _apply(bench: Bench, source: Path, address: str | None) -> Callable[[Path], list[Any]]:
    """The command over a checkpoint, by one thread or by the workers at an address."""
    size = max(sum(path.stat().st_size for path in source.iterdir()) // FILES, 1)
    options = [*TO, "--threads", "1", "--max-shard-size", str(size + size // 16), "--no-fsync"]
    told = {**TOKEN, "RAY_ADDRESS": address}
    where = [] if address is None else ["env", *(f"{name}={value}" for name, value in told.items())]
    on = [] if address is None else ["--on", "ray"]
    return lambda out: [*where, *bench.migrate, "apply", source, "-o", out, *options, *on]


def ray(bench: Bench) -> list[Limit]:
    """One worker against one process; with four cores, four workers against one."""
    whole, tiny = bench.root / "v4", bench.root / "tiny-v4"
    memory.read_through(whole)
    cores = len(os.sched_getaffinity(0))
    with _cluster(1) as one, _cluster(WORKERS if cores >= WORKERS else 1) as four:
        sides: dict[str, str | None] = {"alone": None, "one": one}
        if cores >= WORKERS:
            sides["four"] = four
        taken = in_turn(bench, {name: _apply(bench, whole, at) for name, at in sides.items()})
        start = in_turn(bench, {name: _apply(bench, tiny, at) for name, at in sides.items()})
    least = {name: min(run.wall for run in runs) for name, runs in start.items()}
    walls = {name: [run.wall - least[name] for run in runs] for name, runs in taken.items()}
    over = report.spread(report.ratios(walls["one"], walls["alone"]))
    said = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in least.items())
    found = [
        Limit(
            "one worker of Ray against one process: less start-up",
            over[0],
            RAY_OVERHEAD,
            note=f" ({report.shown(over)}; start-up {said} apart)",
        )
    ]
    if "four" in walls:
        faster = report.spread(report.ratios(walls["one"], walls["four"]))
        found.append(
            Limit(
                "four workers of Ray against one: times as fast",
                faster[0],
                RAY_FASTER,
                at_least=True,
                note=f" ({report.shown(faster)})",
            )
        )
    return found


ROWS: dict[str, Callable[[Bench], list[Limit]]] = {"ray": ray}
