"""Buckets that the workers of a real Ray cluster read and write, and what each of them is given."""

from __future__ import annotations

import json
import os
import select
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from store_servers import S3
from test_ray import Cluster, cluster, ended
from test_stores_written import tree
from written_stores import held, uploads

import migrate

pytestmark = pytest.mark.servers


@pytest.fixture(scope="module")
def _workers(started_s3: S3) -> Iterator[Cluster]:
    named = {
        "AWS_ENDPOINT_URL": started_s3.url,
        "AWS_ACCESS_KEY_ID": "planted-key",
        "AWS_SECRET_ACCESS_KEY": "planted-secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        # for which Ray takes our word
        "MADE_UP_GPUS": "2",
    }
    with cluster(2, **named) as found:
        yield found


@pytest.fixture
def workers(_workers: Cluster) -> Iterator[Cluster]:
    yield _workers
    for name in ("without", "told"):
        (_workers.folder / name).unlink(missing_ok=True)


def words(source: object, out: str, rule: Path, *more: str) -> list[object]:
    command: list[object] = ["apply", source, "-o", out, "--rules", rule, "-q"]
    return [*command, "--max-shard-size", "9MB", "--format", "json", *more]


def told(workers: Cluster) -> list[list[Any]]:
    """Part, process, memory, threads and device of each part that was written."""
    return [json.loads(line) for line in (workers.folder / "told").read_text().splitlines()]


def end(pid: int) -> None:
    """Kills a process that is no child of this one, and waits until its connections are closed."""
    process = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    select.select([process], [], [])
    os.close(process)


def test_workers_write_from_bucket_to_bucket(
    s3: S3, workers: Cluster, local: Path, made: Path, tmp_path: Path
) -> None:
    source, out = s3.put(local, f"{tmp_path.name}/old"), f"s3://bucket/{tmp_path.name}/new"
    alone = migrate.apply(source, f"{out}-one", rules=[made], max_shard_size="9MB")
    done = workers.run(*words(source, out, made))
    assert done.exit == 0, done.err
    assert held(s3, f"{tmp_path.name}/new/") == held(s3, f"{tmp_path.name}/new-one/")
    said = done.json
    assert said["store"]["copied"] == alone.store.copied > 5 << 20
    assert said["digest"] == alone.digest
    assert {number for number, *_ in told(workers)} == set(range(len(alone.files)))
    assert not uploads(s3, tmp_path.name)
    assert not held(s3, f"{tmp_path.name}/new.migrate-partial")


def test_workers_that_are_killed_three_times_make_what_one_process_makes(
    s3: S3, workers: Cluster, local: Path, made: Path, tmp_path: Path
) -> None:
    prefix = f"{tmp_path.name}/new"
    alone = migrate.apply(local, tmp_path / "here", rules=[made], max_shard_size="9MB")
    # the first part of an upload is there, and the second has no answer
    s3.spoil(late=f"*1=PUT .*{prefix}/.*partNumber=")
    child = workers.start(*words(local, f"s3://bucket/{prefix}", made))
    s3.wait_until_held()
    killed: set[int] = set()
    while len(killed) < 3:
        assert child.poll() is None, ended(child).err
        _, pid, *_ = told(workers)[-1]
        if pid not in killed:
            end(pid)
            killed.add(pid)
            # who begins a part again waits until it is killed
            s3.spoil(hold=f".*{prefix}")
        time.sleep(0.02)
    s3.spoil()
    done = ended(child)
    assert done.exit == 0, f"{done.out}{done.err[-2000:]}"
    # each of those was begun once more
    assert len(told(workers)) >= len(alone.files) + 3
    assert held(s3, f"{prefix}/") == tree(tmp_path / "here")
    assert not uploads(s3, tmp_path.name)
    assert not held(s3, f"{prefix}.migrate-partial")


def test_what_takes_long_is_uploaded_a_second_time(
    s3: S3, workers: Cluster, local: Path, made: Path, tmp_path: Path
) -> None:
    out = f"s3://bucket/{tmp_path.name}/new"
    migrate.apply(local, tmp_path / "here", rules=[made], max_shard_size="9MB")
    # the first worker that sends a part of it has no answer for ever
    s3.spoil(hold="*0=PUT .*model-00001.*partNumber=")
    code = (
        "import sys; from migrate.running import ray_run; ray_run.LATE = 0.5\n"
        "from migrate.cli import main; sys.exit(main.run(sys.argv[1:]))"
    )
    command = [str(word) for word in words(local, out, made)]
    done = ended(workers.python(["-c", code, *command, "--on", "ray"]))
    s3.spoil()
    assert done.exit == 0, done.err
    assert held(s3, f"{tmp_path.name}/new/") == tree(tmp_path / "here")
    numbers = [number for number, *_ in told(workers)]
    assert len(numbers) == len(set(numbers)) + 1
    assert not uploads(s3, tmp_path.name)


def test_each_worker_has_the_memory_and_the_threads_that_were_given(
    workers: Cluster, local: Path, made: Path, tmp_path: Path
) -> None:
    more = ("--max-memory", "64MB", "--threads", "2")
    done = workers.run(*words(local, str(tmp_path / "out"), made, *more))
    assert done.exit == 0, done.err
    found = told(workers)
    assert len(found) == 3
    assert {tuple(options) for _, _, *options in found} == {(64_000_000, 2, "cpu")}
    migrate.apply(local, tmp_path / "here", rules=[made], max_shard_size="9MB")
    assert tree(tmp_path / "out") == tree(tmp_path / "here")


def test_a_device_is_that_of_the_worker(
    workers: Cluster, local: Path, made: Path, tmp_path: Path
) -> None:
    """The workers have a GPU as far as Ray knows; the process that starts the run needs none."""
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU, and here it is to have none")
    done = workers.run(*words(local, str(tmp_path / "out"), made, "--device", "cuda"))
    assert done.exit != 0
    assert "error[M407]: --device cuda: " in done.err or '"M407"' in done.out
    assert not (workers.folder / "told").exists()


def test_a_worker_without_an_extra_names_it(
    s3: S3, workers: Cluster, local: Path, made: Path, tmp_path: Path
) -> None:
    source = s3.put(local, f"{tmp_path.name}/old")
    (workers.folder / "without").write_text("boto3")
    done = ended(workers.start(*words(source, str(tmp_path / "out"), made)))
    assert done.exit == 4, done.err
    text = done.out + done.err
    assert "M974" in text
    assert "is read through boto3, which is not installed" in text
    assert "on all machines of the cluster: pip install 'ckpt-migrate[s3]'" in text
    (workers.folder / "without").unlink()
    again = workers.run(*words(source, str(tmp_path / "out"), made, "--resume"))
    assert again.exit == 0, again.err
