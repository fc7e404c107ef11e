"""Files written by the workers of a real Ray cluster on this machine."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from commandline import ROOT, Result, done, fingerprint, rules, safetensors
from ray_cluster import ATTEMPTS
from work import HANG

pytestmark = pytest.mark.servers

pytest.importorskip("ray", reason="ray is not installed: pip install 'ckpt-migrate[ray]'")

RULES = """rules:
  - {name: turn, from: 'l.{i:int}.t', to: 'l.{i}.turned', via: [{transpose: {dims: [0, 1]}}]}
  - {name: half, from: 'l.{i:int}.h', to: 'l.{i}.half', via: [{cast: {to: float16}}]}
"""


@dataclass(frozen=True)
class Scene:
    """A checkpoint of 44 MB, its rules, and what one process makes of them."""

    folder: Path
    wanted: dict[str, str]
    said: dict[str, Any]

    def words(self, out: Path) -> list[str]:
        folder = self.folder
        words = ["apply", folder / "in.safetensors", "-o", out, "--rules", folder / "rules.yaml"]
        return [*map(str, words), "--max-shard-size", "12MB", "--allow", "lossy"]

    def made(self, out: Path) -> dict[str, str]:
        return {Path(name).name: found for name, found in fingerprint(out).items()}


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    folder = tmp_path_factory.mktemp("ray")
    tensors: dict = {}
    for i in range(8):
        tensors[f"l.{i}.t"] = ("F32", [1000, 1300])
        tensors[f"l.{i}.h"] = ("F32", [200, 300])
    safetensors(folder / "in.safetensors", tensors)
    rules(folder, RULES)
    scene = Scene(folder, {}, {})
    said = done(*scene.words(folder / "one"), "-q", "--format", "json").json
    return Scene(folder, scene.made(folder / "one"), said)


@dataclass(frozen=True)
class Cluster:
    """A cluster that runs: where, and the folder in which its workers are told to wait."""

    address: str
    folder: Path
    # of this cluster alone, in the variables by which Ray is told
    token: Mapping[str, str]

    def start(self, *words: object) -> subprocess.Popen[str]:
        """The command line with this cluster as the one of the environment."""
        return self.python(["-m", "migrate", *map(str, words), "--on", "ray"])

    def python(self, words: list[str]) -> subprocess.Popen[str]:
        here = {"PYTHONPATH": str(ROOT), "RAY_ADDRESS": self.address}
        environment, pipe = {**os.environ, **here, **self.token}, subprocess.PIPE
        command = [sys.executable, *words]
        return subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True)

    def run(self, *words: object) -> Result:
        return ended(self.start(*words))


def ended(child: subprocess.Popen[str]) -> Result:
    out, err = child.communicate(timeout=HANG)
    return Result(child.returncode, out, err)


@contextmanager
def cluster(workers: int, **environment: str) -> Iterator[Cluster]:
    # a socket's path has at most 107 characters
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    command = [sys.executable, str(ROOT / "tests" / "cli" / "ray_cluster.py")]
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    child = subprocess.Popen(
        [*command, str(workers), str(folder)],
        env={**os.environ, "PYTHONPATH": str(ROOT), **token, **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout is not None
        address = child.stdout.readline().strip()
        assert address, child.wait()
        yield Cluster(address, folder, token)
    finally:
        child.communicate(timeout=HANG)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def _two() -> Iterator[Cluster]:
    with cluster(2) as found:
        yield found


@pytest.fixture
def two(_two: Cluster) -> Iterator[Cluster]:
    """A cluster of two workers, which wait for nothing."""
    yield _two
    for name in ("pause", "hold"):
        (_two.folder / name).unlink(missing_ok=True)


def journal(out: Path, number: int) -> Path:
    return Path(f"{out}.migrate-partial/journal-{number + 1}.jsonl")


def holder(out: Path, number: int) -> int | None:
    """The process that has the journal of a part open."""
    wanted = str(journal(out, number).resolve())
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            descriptors = os.listdir(f"/proc/{pid}/fd")
            held = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in descriptors]
        except OSError:
            continue
        if wanted in held:
            return int(pid)
    return None


def wait_for_tile(out: Path, number: int, child: subprocess.Popen[str]) -> None:
    while not journal(out, number).exists() or b'"tile"' not in journal(out, number).read_bytes():
        assert child.poll() is None, child.communicate()
        time.sleep(0.02)


def unlike(said: Any, other: Any) -> dict[str, Any]:
    """The fields in which two answers differ, but for where the output lies."""
    return {k: (said[k], other[k]) for k in said if k != "path" and said[k] != other[k]}


@pytest.mark.parametrize("workers", [1, 3])
def test_the_output_does_not_depend_on_the_number_of_workers(
    scene: Scene, tmp_path: Path, workers: int
) -> None:
    with cluster(workers) as found:
        made = found.run(*scene.words(tmp_path / "out"), "--format", "json", "-q")
    assert (made.exit, made.err) == (0, "")
    assert unlike(scene.said, made.json) == {}
    assert scene.made(tmp_path / "out") == scene.wanted


def test_two_workers_say_what_one_process_says(two: Cluster, scene: Scene, tmp_path: Path) -> None:
    out = tmp_path / "out"
    # what ends soon is not told about otherwise
    code = (
        "import sys; from migrate.cli import main, terminal; terminal._PATIENCE = 0\n"
        "sys.exit(main.run(sys.argv[1:]))"
    )
    made = ended(two.python(["-c", code, *scene.words(out), "--on", "ray"]))
    assert made.exit == 0, made.err
    assert made.out.startswith(f"published {out}")
    assert "writing 100 %" in made.err
    assert f"next:  migrate verify {out}" in made.err
    assert scene.made(out) == scene.wanted
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_single_file_is_written_by_all_workers(
    two: Cluster, scene: Scene, tmp_path: Path
) -> None:
    words = ["apply", scene.folder / "in.safetensors", "--rules", scene.folder / "rules.yaml"]
    words += ["--allow", "lossy", "-q"]
    one, out = (tmp_path / f"{name}.safetensors" for name in ("one", "out"))
    done(*words, "-o", one)
    made = two.run(*words, "-o", out, "--format", "json")
    assert made.exit == 0, made.err
    # which no process has read as a whole
    assert [file["xxh3_128"] for file in made.json["files"].values()] == [None]
    assert out.read_bytes() == one.read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one.safetensors", "out.safetensors"]


def test_a_worker_that_is_killed_goes_on(two: Cluster, scene: Scene, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (two.folder / "pause").write_text("3")
    child = two.start(*scene.words(out), "-q", "--format", "json")
    wait_for_tile(out, 0, child)
    killed: set[int] = set()
    while len(killed) < 3:
        assert child.poll() is None, ended(child).err
        pid = holder(out, 0)
        # the coordinator looks into journals too
        if pid is not None and pid not in {child.pid, *killed}:
            os.kill(pid, signal.SIGKILL)
            killed.add(pid)
        time.sleep(0.02)
    (two.folder / "pause").unlink()
    made = ended(child)
    assert made.exit == 0, made.err
    # what was journalled before is not written again
    assert made.json["bytes_written"] < scene.said["bytes_written"]
    assert scene.made(out) == scene.wanted


def test_what_takes_long_is_written_a_second_time(
    two: Cluster, scene: Scene, tmp_path: Path
) -> None:
    out, name = tmp_path / "out", "model-00001-of-00004.safetensors"
    assert name in scene.wanted
    (two.folder / "hold").write_text(name)
    code = (
        "import sys; from migrate.running import ray_run; ray_run.LATE = 0.5\n"
        "from migrate.cli import main; sys.exit(main.run(sys.argv[1:]))"
    )
    made = ended(two.python(["-c", code, *scene.words(out), "--on", "ray", "-q"]))
    # the first would wait for ever
    assert made.exit == 0, made.err
    assert scene.made(out) == scene.wanted
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_an_interrupt_ends_the_workers_and_keeps_what_they_wrote(
    two: Cluster, scene: Scene, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    (two.folder / "pause").write_text("1")
    child = two.start(*scene.words(out))
    wait_for_tile(out, 0, child)
    child.send_signal(signal.SIGINT)
    stopped = ended(child)
    assert stopped.exit == 130, stopped.err
    assert "run the same command with --resume to go on" in stopped.err
    assert [holder(out, number) for number in range(4)] == [None] * 4
    (two.folder / "pause").unlink()
    refused = two.run(*scene.words(out))
    assert (refused.exit, "error[M911]" in refused.err) == (2, True)
    again = two.run(*scene.words(out), "--resume", "-q", "--format", "json")
    assert again.exit == 0, again.err
    assert again.json["bytes_written"] < scene.said["bytes_written"]
    assert scene.made(out) == scene.wanted


def test_what_a_dead_coordinator_left_is_finished_otherwise(
    two: Cluster, scene: Scene, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    (two.folder / "pause").write_text("1")
    child = two.start(*scene.words(out))
    wait_for_tile(out, 0, child)
    child.kill()
    ended(child)
    while any(holder(out, number) for number in range(4)):
        time.sleep(0.05)
    done(*scene.words(out), "--resume", "-q")
    assert scene.made(out) == scene.wanted


def test_nothing_of_the_checkpoint_passes_through_the_object_store(
    two: Cluster, scene: Scene, tmp_path: Path
) -> None:
    """All that Ray carries is what a worker is sent and what it answers."""
    code = (
        "import json, sys, ray; from ray import cloudpickle; from migrate.running import ray_run\n"
        "from migrate.cli import main; sent = []; begin = ray_run._Dealer.begin\n"
        "def counted(self, number, *, second):\n"
        "    sent.append(len(cloudpickle.dumps((self.order, number, second))))\n"
        "    begin(self, number, second=second)\n"
        "ray_run._Dealer.begin = counted\n"
        "get, got = ray.get, []\n"
        "def seen(reference, **more):\n"
        "    got.append(get(reference, **more)); return got[-1]\n"
        "ray.get = seen\n"
        "status = main.run(sys.argv[1:])\n"
        "print(json.dumps([status, sent, got]), file=sys.stderr)\n"
    )
    made = ended(two.python(["-c", code, *scene.words(tmp_path / "out"), "--on", "ray", "-q"]))
    status, sent, got = json.loads(made.err.splitlines()[-1])
    assert status == 0, made.err
    assert len(sent) == 4
    assert max(sent) < 10_000
    # one word of each machine, and of each part
    assert got == [None] * 5


def test_a_fault_of_the_checkpoint_leaves_nothing(two: Cluster, tmp_path: Path) -> None:
    tensors: dict = {f"l.0.{j}.r": ("U8", [1000], bytes([j]) * 1000) for j in range(2)}
    tensors["l.0.t"] = ("U8", [1000])
    safetensors(tmp_path / "in.safetensors", tensors)
    rule = rules(
        tmp_path,
        "keep: [l.0.t]\nrules: [{name: same, from: 'l.{i:int}.{j:int}.r', to: 'l.{i}.r',"
        " via: [{same: {over: j, count: 2}}]}]\n",
    )
    words = ["apply", tmp_path / "in.safetensors", "-o", tmp_path / "out", "--rules", rule, "-q"]
    made = two.run(*words, "--max-shard-size", "1kB")
    assert made.exit == 3, made.err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.safetensors", "rules.yaml"]


def test_another_way_of_parts_is_not_mixed_with_a_cluster(
    two: Cluster, scene: Scene, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    done(*scene.words(out), "--part", "0/3", "-q")
    made = two.run(*scene.words(out), "--resume", "-q")
    assert made.exit == 2, made.err
    assert "error[M918]: " in made.err
    assert "was begun with 3 parts, and this is of 4" in made.err


def test_a_cluster_that_lets_nobody_in(two: Cluster, scene: Scene, tmp_path: Path) -> None:
    token = {**two.token, "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    other = Cluster(two.address, two.folder, token)
    made = other.run(*scene.words(tmp_path / "out"), "-q")
    assert made.exit == 4, made.err
    assert "error[M985]: cannot reach the cluster (--on ray)" in made.err
    assert list(tmp_path.iterdir()) == []


# until Ray's server for clients takes one: behind it an agent starts, for which it waits 15 seconds
WAIT = """
import sys, time, ray
while True:
    try:
        ray.init(sys.argv[1], logging_level="ERROR")
        break
    except (ConnectionError, RuntimeError):
        ray.shutdown()
        time.sleep(0.5)
"""


def start_head(folder: Path, environment: Mapping[str, str]) -> tuple[subprocess.Popen[bytes], str]:
    """A head of a cluster, and the address for its clients."""
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        port, client = one.getsockname()[1], other.getsockname()[1]
    words = ["start", "--head", "--block", "--num-cpus=2", "--include-dashboard=false"]
    words += [f"--port={port}", f"--ray-client-server-port={client}", f"--temp-dir={folder}"]
    words += ["--object-store-memory=80000000"]
    command = [sys.executable, "-m", "ray.scripts.scripts", *words]
    null = subprocess.DEVNULL
    return (
        subprocess.Popen(command, env=environment, stdout=null, stderr=null),
        f"ray://127.0.0.1:{client}",
    )


def takes_clients(
    head: subprocess.Popen[bytes], address: str, environment: Mapping[str, str]
) -> bool:
    """Waits until the head takes a client; False if it ends before."""
    with subprocess.Popen([sys.executable, "-c", WAIT, address], env=environment) as waiting:
        while head.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                return waiting.wait(0.2) == 0
        waiting.kill()
    return False


def test_a_client_of_a_cluster(scene: Scene, tmp_path: Path) -> None:
    """`ray://`: this process is no part of the cluster, and speaks to a server of it."""
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    # a slow machine needs more than Ray's 30 seconds
    names = ("RAY_CLIENT_SERVER_CHECK_CHANNEL_TIMEOUT_S", "RAY_CLIENT_INITIAL_CONNECTION_TIMEOUT_S")
    names += ("RAY_CLIENT_MAX_CONNECTION_TIMEOUT_S", "TIMEOUT_FOR_SPECIFIC_SERVER_S")
    here = {**os.environ, **token, **dict.fromkeys(names, "300"), "PYTHONPATH": str(ROOT)}
    here["RAY_USAGE_STATS_ENABLED"] = "0"
    for _ in range(ATTEMPTS):
        folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
        head, address = start_head(folder, here)
        try:
            if not takes_clients(head, address, here):
                continue
            command = [sys.executable, "-m", "migrate", *scene.words(tmp_path / "out"), "-q"]
            command += ["--format", "json", "--on", address]
            pipe = subprocess.PIPE
            made = ended(subprocess.Popen(command, env=here, stdout=pipe, stderr=pipe, text=True))
        finally:
            head.terminate()
            head.wait(HANG)
            shutil.rmtree(folder, ignore_errors=True)
        if "Starting Ray client server failed" in made.out:
            # the process that Ray begins for each client; the one before had its own
            continue
        assert made.exit == 0, made.out
        assert unlike(scene.said, made.json) == {}
        assert scene.made(tmp_path / "out") == scene.wanted
        return
    raise AssertionError("no head of a cluster could be started")
