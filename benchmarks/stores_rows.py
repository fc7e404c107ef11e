"""From bucket to bucket: experts stacked by the store's own copies and through memory, against all
downloaded, migrated and uploaded; experts too short to be copied; a store that is far away.

The server is pinned to one processor and what is measured to another. It is moto, which is Python
and takes most of the time: what is compared is how much each side has it do.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.request import urlopen

import data
import memory
import process
import report
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


class Passed(NamedTuple):
    """What a run took, and the bytes of bodies that the server sent and received meanwhile."""

    taken: process.Taken
    sent: int
    received: int


class Store:
    """The server, and runs against it."""

    def __init__(self, bench: Bench, url: str, here: int) -> None:
        import boto3

        self._bench, self._url = bench, url
        named = {
            "AWS_ENDPOINT_URL": url,
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        self._pinned = ["taskset", "-c", str(here)]
        self._pinned += ["env", *(f"{name}={value}" for name, value in named.items())]
        self._client = boto3.client(
            "s3",
            endpoint_url=url,
            region_name="us-east-1",
            aws_access_key_id="key",
            aws_secret_access_key="secret",
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

    def _shards(self) -> tuple[str, str]:
        return "--max-shard-size", str(self.nbytes // 4 + 64 * MB)

    def run(self, argv: Sequence[Any]) -> Passed:
        """A run on the other processor; what it wrote stays."""
        shutil.rmtree(self._bench.root / "out", ignore_errors=True)
        self.remove("out/")
        self._ask("passed")
        taken = self._bench.timed([*self._pinned, *argv], None, 2 * self.nbytes + 512 * MB)
        sent, received = json.loads(self._ask("passed"))
        return Passed(taken, sent, received)

    def equal(self, one: Sequence[Any], other: Sequence[Any]) -> None:
        """RunError unless both commands write the same tensors."""
        self.run(one)
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix="out/")
        for key in [one["Key"] for page in pages for one in page["Contents"]]:
            there = {"Bucket": BUCKET, "Key": key}
            self._client.copy(there, BUCKET, key.replace("out/", "kept/", 1))
        self.run(other)
        urls = (f"s3://{BUCKET}/kept", f"s3://{BUCKET}/out")
        process.run([*self._pinned, *self._bench.migrate, "diff", *urls, "--tensors-only"])
        self.remove("kept/")

    def remove(self, prefix: str) -> None:
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        for key in [one["Key"] for page in pages for one in page.get("Contents", ())]:
            self._client.delete_object(Bucket=BUCKET, Key=key)

    @contextmanager
    def far(self, seconds: float) -> Iterator[None]:
        """Every request takes so much longer."""
        self._ask(f"far?{seconds}")
        try:
            yield
        finally:
            self._ask("far?0")

    def _ask(self, what: str) -> bytes:
        with urlopen(f"{self._url}/__{what}") as answer:
            return bytes(answer.read())


@contextmanager
def _started(bench: Bench) -> Iterator[Store | None]:
    """The server on one processor; None where it cannot have one for itself."""
    there, *others = sorted(os.sched_getaffinity(0))
    if not others or shutil.which("taskset") is None:
        print("stores: left out, two processors and taskset are needed", file=sys.stderr)
        yield None
        return
    with subprocess.Popen(
        ["taskset", "-c", str(there), PYTHON, HERE / "stores_server.py"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        try:
            yield Store(bench, f"http://127.0.0.1:{int(child.stdout.readline())}", others[0])
        finally:
            child.communicate()


def _in_turn(bench: Bench, sides: dict[str, Callable[[], Passed]]) -> dict[str, list[Passed]]:
    """Each side once a round, in turn."""
    found: dict[str, list[Passed]] = {name: [] for name in sides}
    for number in range(bench.args.rounds):
        for name in list(sides)[:: 1 if number % 2 == 0 else -1]:
            found[name].append(sides[name]())
    return found


def _ratio(what: str, one: list[Passed], other: list[Passed], bound: float) -> Limit:
    walls = ([passed.taken.wall for passed in side] for side in (one, other))
    spread = report.spread(report.ratios(*walls))
    return Limit(what, spread[0], bound, note=f" ({report.shown(spread)})")


def _private(what: str, found: list[Passed]) -> Limit:
    most = max(passed.taken.private for passed in found) / MB
    bound = STORES_MEMORY + STORES_PRIVATE
    return Limit(f"{what}: private memory", most, bound, unit=" MB")


def copies(bench: Bench) -> list[Limit]:
    """Experts of 6.3 MB: copied by the store, and streamed."""
    with _started(bench) as store:
        if store is None:
            return []
        prefix = store.hold(LONG)
        copied, peer = store.migrate(prefix), store.peer(prefix)
        streamed = [*copied, "--copy", "never"]
        store.equal(peer, copied)
        store.equal(copied, streamed)
        found = _in_turn(
            bench,
            {
                "copied": lambda: store.run(copied),
                "streamed": lambda: store.run(streamed),
                "peer": lambda: store.run(peer),
            },
        )
        title = f"bucket to bucket, {store.nbytes / MB:,.0f} MB, experts of 6.3 MB"
    limits = [
        _ratio(
            f"{title}, copied: of download, apply, upload",
            found["copied"],
            found["peer"],
            STORES_COPIED,
        )
    ]
    for way in ("sent", "received"):
        mine, theirs = (max(getattr(p, way) for p in found[who]) for who in ("copied", "peer"))
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
        )
    )
    return [*limits, *(_private(f"{title}, {who}", found[who]) for who in ("copied", "streamed"))]


def short(bench: Bench) -> list[Limit]:
    """Experts of 2.5 MB, which pass through memory whatever is asked for."""
    with _started(bench) as store:
        if store is None:
            return []
        auto = store.migrate(store.hold(SHORT))
        shown = store.run([*auto, "--dry-run"]).taken.stdout
        if "5 MiB" not in shown:
            raise process.RunError(f"the plan does not say why nothing is copied\n{shown}")
        never = [*auto, "--copy", "never"]
        store.equal(never, auto)
        found = _in_turn(
            bench, {"auto": lambda: store.run(auto), "never": lambda: store.run(never)}
        )
        title = f"bucket to bucket, {store.nbytes / MB:,.0f} MB, experts of 2.5 MB"
    return [
        _ratio(f"{title}: of the same streamed", found["auto"], found["never"], STORES_SHORT),
        _private(title, found["auto"]),
    ]


def far(bench: Bench) -> list[Limit]:
    """Streamed, from a store that is 50 ms away."""
    with _started(bench) as store:
        if store is None:
            return []
        streamed = store.migrate(store.hold(LONG), "--copy", "never")

        def away() -> Passed:
            with store.far(FAR):
                return store.run(streamed)

        found = _in_turn(bench, {"far": away, "near": lambda: store.run(streamed)})
    title = f"bucket to bucket, streamed, {FAR * 1000:.0f} ms a request"
    return [_ratio(f"{title}: of none", found["far"], found["near"], STORES_FAR)]


def reading(bench: Bench) -> list[Limit]:
    """By ranges, as a run reads, and by boto3's client with 16 threads: processor time."""
    with _started(bench) as store:
        if store is None:
            return []
        prefix = store.hold(LONG)
        found: dict[str, list[float]] = {"ours": [], "boto3": []}
        for number in range(bench.args.rounds):
            for who in list(found)[:: 1 if number % 2 == 0 else -1]:
                argv = [PYTHON, HERE / "stores_reading.py", who, BUCKET, prefix]
                seconds, nbytes = json.loads(store.run(argv).taken.stdout)
                found[who].append(seconds)
    spread = report.spread(report.ratios(*found.values()))
    what = f"reading {nbytes / MB:,.0f} MB by ranges: processor time, of boto3 with 16 threads"
    return [Limit(what, spread[0], STORES_READ, note=f" ({report.shown(spread)})")]


ROWS: dict[str, Callable[[Bench], list[Limit]]] = {
    "stores-copies": copies,
    "stores-short": short,
    "stores-far": far,
    "stores-reading": reading,
}
