"""From bucket to bucket: experts stacked by the store's own copies and through memory, against all
downloaded, migrated and uploaded; experts too short to be copied; a store that is far away.

The server is pinned to one processor and what is measured to another. Each row is run on every
server that is installed, Ceph's gateway and ministack, and on moto where neither is. The latter two
are Python and take most of the time: what is compared then is how much each side has them do.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import data
import memory
import process
import report
import stores_server
from tasks import (
    STORES_COPIED,
    STORES_FAR,
    STORES_MEMORY,
    STORES_PASSED,
    STORES_PRIVATE,
    STORES_READ,
    STORES_SHORT,
    STORES_STREAMED,
    Limit,
)

if TYPE_CHECKING:
    from bench import Bench

HERE = Path(__file__).resolve().parent
PYTHON = sys.executable
MB = 1_000_000
BUCKET = "bench"
# experts of 6.3 MB, which a store copies, and of 2.5 MB, of which two in a row have less than 5 MiB
LONG, SHORT = 3072, 1200
# parts that are held at once where boto3 alone reads and uploads
HELD = 9
# seconds that every request of the last row takes longer
FAR = 0.05
TO = ("--to", "hf-mixtral@v5", "--max-memory", f"{STORES_MEMORY}MB")


def _shape(size: str, intermediate: int) -> data.Shape:
    """A model of about 700 MB whose experts alone have 5 MiB, or nothing; for the sizes that only
    try the rows, an eighth of it.
    """
    whole = size not in ("tiny", "demo")
    layers = (2 if intermediate == LONG else 4) if whole else 1
    return data.Shape(
        layers=layers,
        experts=18 if whole else 4,
        hidden=1024,
        intermediate=intermediate,
        vocab=1024,
        heads=8,
        kv_heads=1,
        shards=2 if layers > 1 else 1,
    )


class Store:
    """The server, and runs against it: straight to it, or through its proxy."""

    def __init__(self, bench: Bench, child: subprocess.Popen[str], here: int) -> None:
        import boto3

        self._bench, self._child = bench, child
        self.name, self._url, self._proxy, self._key, self._secret = json.loads(self._line())
        self._pinned = ["taskset", "-c", str(here)]
        self._client = boto3.client(
            "s3",
            endpoint_url=self._url,
            region_name="us-east-1",
            aws_access_key_id=self._key,
            aws_secret_access_key=self._secret,
        )
        self._client.create_bucket(Bucket=BUCKET)
        self.nbytes = 0

    def hold(self, intermediate: int) -> str:
        """The prefix of a checkpoint with experts of this size, which is uploaded."""
        folder = self._bench.root / f"stores-{intermediate}"
        if not (folder / "config.json").exists():
            shutil.rmtree(folder, ignore_errors=True)
            data.make(folder, _shape(self._bench.args.size, intermediate))
        memory.read_through(folder)
        self.nbytes = sum(path.stat().st_size for path in folder.iterdir())
        for path in folder.iterdir():
            self._client.upload_file(str(path), BUCKET, f"{folder.name}/{path.name}")
        return folder.name

    def migrate(self, prefix: str, *more: str) -> list[Any]:
        urls = (f"s3://{BUCKET}/{prefix}", "-o", f"s3://{BUCKET}/out")
        return [*self._bench.migrate, "apply", *urls, *TO, *self._shards(), *more]

    def peer(self, prefix: str) -> list[Any]:
        scratch = self._bench.root / "out"
        command = [*self._bench.migrate, "apply", *TO, *self._shards(), "--no-fsync"]
        return [PYTHON, HERE / "stores_peer.py", BUCKET, prefix, "out", scratch, *command]

    def floor(self, prefix: str, argv: Sequence[Any]) -> list[Any]:
        """What has boto3 move as many bytes in as many requests as this run of migrate."""
        made = json.loads(self.run([*argv, "--format", "json"]).stdout)["store"]
        counts = [str(made["passed"]), str(made["parts"]), str(HELD)]
        return [PYTHON, HERE / "stores_floor.py", BUCKET, prefix, "out", *counts]

    def _shards(self) -> tuple[str, str]:
        return "--max-shard-size", str(self.nbytes // 4 + 64 * MB)

    def run(self, argv: Sequence[Any], *, by_proxy: bool = False) -> process.Taken:
        """A run on the other processor; what it wrote stays."""
        shutil.rmtree(self._bench.root / "out", ignore_errors=True)
        self.remove("out/")
        need = 2 * self.nbytes + 512 * MB
        return self._bench.timed([*self._there(by_proxy), *argv], None, need)

    def _there(self, by_proxy: bool = False) -> list[str]:
        named = {
            "AWS_ENDPOINT_URL": self._proxy if by_proxy else self._url,
            "AWS_ACCESS_KEY_ID": self._key,
            "AWS_SECRET_ACCESS_KEY": self._secret,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        return [*self._pinned, "env", *(f"{name}={value}" for name, value in named.items())]

    def passed(self, argv: Sequence[Any]) -> tuple[int, int]:
        """What the server sends and receives in a run."""
        self._ask("passed")
        self.run(argv, by_proxy=True)
        sent, received = self._ask("passed")
        return sent, received

    def equal(self, one: Sequence[Any], other: Sequence[Any]) -> None:
        """RunError unless both commands write the same tensors."""
        self.run(one)
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix="out/")
        for key in [one["Key"] for page in pages for one in page["Contents"]]:
            there = {"Bucket": BUCKET, "Key": key}
            self._client.copy(there, BUCKET, key.replace("out/", "kept/", 1))
        self.run(other)
        urls = (f"s3://{BUCKET}/kept", f"s3://{BUCKET}/out")
        process.run([*self._there(), *self._bench.migrate, "diff", *urls, "--tensors-only"])
        self.remove("kept/")

    def remove(self, prefix: str) -> None:
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        for key in [one["Key"] for page in pages for one in page.get("Contents", ())]:
            self._client.delete_object(Bucket=BUCKET, Key=key)

    def far(self, argv: Sequence[Any], seconds: float) -> process.Taken:
        """A run of which every request takes so much longer."""
        self._ask(f"far {seconds}")
        return self.run(argv, by_proxy=True)

    def _ask(self, what: str) -> Any:
        print(what, file=self._child.stdin, flush=True)
        return json.loads(self._line())

    def _line(self) -> str:
        line = self._child.stdout.readline() if self._child.stdout else ""
        if not line:
            raise process.RunError("the server has ended")
        return line


@contextmanager
def _started(bench: Bench, kind: str) -> Iterator[Store | None]:
    """A server on one processor; None where it cannot have one for itself."""
    there, *others = sorted(os.sched_getaffinity(0))
    if not others or shutil.which("taskset") is None:
        print("stores: left out, two processors and taskset are needed", file=sys.stderr)
        yield None
        return
    with subprocess.Popen(
        ["taskset", "-c", str(there), PYTHON, HERE / "stores_server.py", kind],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        try:
            yield Store(bench, child, others[0])
        finally:
            child.communicate()


def _on_each(row: Callable[[Bench, Store], list[Limit]]) -> Callable[[Bench], list[Limit]]:
    """The row, on one server after the other."""

    @wraps(row)
    def rows(bench: Bench) -> list[Limit]:
        limits: list[Limit] = []
        for kind in stores_server.there():
            with _started(bench, kind) as store:
                if store is None:
                    break
                limits += row(bench, store)
        return limits

    return rows


def _in_turn(
    bench: Bench, sides: dict[str, Callable[[], process.Taken]]
) -> dict[str, list[process.Taken]]:
    """Each side once a round, in turn."""
    found: dict[str, list[process.Taken]] = {name: [] for name in sides}
    for number in range(bench.args.rounds):
        for name in list(sides)[:: 1 if number % 2 == 0 else -1]:
            found[name].append(sides[name]())
    return found


def _ratio(
    what: str,
    one: list[process.Taken],
    other: list[process.Taken],
    bound: float,
    least: list[process.Taken] | None = None,
) -> Limit:
    """`least`: what the same requests take by themselves, which the note says."""

    def of(side: list[process.Taken]) -> report.Spread:
        walls = ([taken.wall for taken in taking] for taking in (side, other))
        return report.spread(report.ratios(*walls))

    spread, note = of(one), ""
    if least is not None:
        seconds = [report.spread([taken.wall for taken in side])[0] for side in (one, other, least)]
        note = f"; as many requests by boto3 alone {report.shown(of(least))}; " + (
            "{:.1f} s, {:.1f} s and {:.1f} s".format(*seconds)
        )
    return Limit(what, spread[0], bound, note=f" ({report.shown(spread)}{note})")


def _private(what: str, found: list[process.Taken]) -> Limit:
    most = max(taken.private for taken in found) / MB
    bound = STORES_MEMORY + STORES_PRIVATE
    return Limit(f"{what}: private memory", most, bound, unit=" MB")


@_on_each
def copies(bench: Bench, store: Store) -> list[Limit]:
    """Experts of 6.3 MB: copied by the store, and streamed."""
    prefix = store.hold(LONG)
    copied, peer = store.migrate(prefix), store.peer(prefix)
    streamed = [*copied, "--copy", "never"]
    store.equal(peer, copied)
    store.equal(copied, streamed)
    sides = {"copied": copied, "streamed": streamed, "peer": peer}
    for name in ("copied", "streamed"):
        sides[f"least {name}"] = store.floor(prefix, sides[name])
    found = _in_turn(bench, {name: partial(store.run, argv) for name, argv in sides.items()})
    bytes_passed = {"copied": store.passed(copied), "peer": store.passed(peer)}
    title = f"{store.name}: bucket to bucket, {store.nbytes / MB:,.0f} MB, experts of 6.3 MB"
    limits = [
        _ratio(
            f"{title}, copied: of download, apply, upload",
            found["copied"],
            found["peer"],
            STORES_COPIED,
            found["least copied"],
        )
    ]
    for way, mine, theirs in zip(("sent", "received"), *bytes_passed.values(), strict=True):
        limits.append(
            Limit(
                f"{title}, copied: bytes {way} by the store, of that",
                mine / theirs,
                STORES_PASSED,
                note=f" ({mine / MB:.1f} MB and {theirs / MB:.1f} MB)",
            )
        )
    limits.append(
        _ratio(
            f"{title}, streamed: of download, apply, upload",
            found["streamed"],
            found["peer"],
            STORES_STREAMED,
            found["least streamed"],
        )
    )
    return [*limits, *(_private(f"{title}, {who}", found[who]) for who in ("copied", "streamed"))]


@_on_each
def short(bench: Bench, store: Store) -> list[Limit]:
    """Experts of 2.5 MB, which pass through memory whatever is asked for."""
    auto = store.migrate(store.hold(SHORT))
    shown = store.run([*auto, "--dry-run"]).stdout
    if "5 MiB" not in shown:
        raise process.RunError(f"the plan does not say why nothing is copied\n{shown}")
    never = [*auto, "--copy", "never"]
    store.equal(never, auto)
    found = _in_turn(bench, {"auto": lambda: store.run(auto), "never": lambda: store.run(never)})
    title = f"{store.name}: bucket to bucket, {store.nbytes / MB:,.0f} MB, experts of 2.5 MB"
    return [
        _ratio(f"{title}: of the same streamed", found["auto"], found["never"], STORES_SHORT),
        _private(title, found["auto"]),
    ]


@_on_each
def far(bench: Bench, store: Store) -> list[Limit]:
    """Streamed, from a store that is 50 ms away."""
    streamed = store.migrate(store.hold(LONG), "--copy", "never")
    found = _in_turn(
        bench,
        {"far": lambda: store.far(streamed, FAR), "near": lambda: store.far(streamed, 0)},
    )
    title = f"{store.name}: bucket to bucket, streamed, {FAR * 1000:.0f} ms a request"
    return [
        _ratio(f"{title}: of none", found["far"], found["near"], STORES_FAR),
        _private(title, found["far"]),
    ]


@_on_each
def reading(bench: Bench, store: Store) -> list[Limit]:
    """By ranges, as a run reads, and by boto3's client with 16 threads: processor time."""
    prefix = store.hold(LONG)
    found: dict[str, list[float]] = {"ours": [], "boto3": []}
    runs: list[process.Taken] = []
    for number in range(bench.args.rounds):
        for who in list(found)[:: 1 if number % 2 == 0 else -1]:
            limit = str(STORES_MEMORY * MB)
            argv = [PYTHON, HERE / "stores_reading.py", who, BUCKET, prefix, limit]
            taken = store.run(argv)
            seconds, nbytes = json.loads(taken.stdout)
            found[who].append(seconds)
            runs += [taken] if who == "ours" else []
    name = store.name
    spread = report.spread(report.ratios(*found.values()))
    what = (
        f"{name}: reading {nbytes / MB:,.0f} MB by ranges: processor time, of boto3 with 16 threads"
    )
    return [
        Limit(what, spread[0], STORES_READ, note=f" ({report.shown(spread)})"),
        _private(f"{name}: reading by ranges", runs),
    ]


ROWS: dict[str, Callable[[Bench], list[Limit]]] = {
    "stores-copies": copies,
    "stores-short": short,
    "stores-far": far,
    "stores-reading": reading,
}
