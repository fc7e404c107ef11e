"""Processes that compute for the threads of a run: the same bytes, hashes, figures and errors as
threads give, whatever happens to a process.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from work import HANG

from migrate.core.spec import Spec
from migrate.running.fillers import Fillers, _Child
from migrate.running.part_hashes import PIECE, PartHashes

# three weights in FP8, above what is worth a process together: one begins within a piece of a hash
ROWS, COLUMNS = 3000, 2500
RUN = "import sys; from migrate.cli.main import main; sys.argv[0] = 'migrate'; main()"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fillers") / "fp8"
    folder.mkdir()
    rng, tensors = np.random.default_rng(0), {}
    for name in ("q_proj", "k_proj", "v_proj"):
        codes = rng.integers(0, 0x7E, (ROWS, COLUMNS), "u1")
        key = f"model.layers.0.self_attn.{name}.weight"
        tensors[key] = ("F8_E4M3", codes.shape, codes.tobytes())
        scales = (rng.random((ROWS, 1)) * 0.01 + 0.001).astype("<f4")
        tensors[f"{key}_scale"] = ("F32", scales.shape, scales.tobytes())
    (folder / "model.safetensors").write_bytes(safetensors_of(tensors))
    config = {
        "model_type": "llama",
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "quantization_status": "compressed",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
                }
            },
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def safetensors_of(tensors: dict[str, tuple[str, tuple[int, ...], bytes]]) -> bytes:
    head: dict[str, Any] = {}
    data = b""
    for key, (dtype, shape, raw) in tensors.items():
        head[key] = {
            "dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]
        }  # fmt: skip
        data += raw
    text = json.dumps(head).encode()
    return len(text).to_bytes(8, "little") + text + data


def run(
    checkpoint: Path, out: Path, *options: str, before: str = ""
) -> subprocess.CompletedProcess[str]:
    (done,) = launch(checkpoint, out, 1, *options, before=before)
    return done


def launch(
    checkpoint: Path, out: Path, world: int, *options: str, before: str = ""
) -> list[subprocess.CompletedProcess[str]]:
    """What each of so many ranks answers."""
    to = () if "--to" in options else ("--to", "fp8@bf16")
    command = ["apply", checkpoint, "-o", out, *to, "--allow", "lossy", "-v"]
    saved = ["--report", out.with_suffix(".json")]
    command = [sys.executable, "-c", f"{before}\n{RUN}", *command, *saved, *options]
    started = []
    for rank in range(world):
        place = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world}
        environment = os.environ | ({k: str(n) for k, n in place.items()} if world > 1 else {})
        pipe = subprocess.PIPE
        started.append(
            subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True)
        )
    said = [one.communicate(timeout=HANG) for one in started]
    return [
        subprocess.CompletedProcess(command, one.returncode, *texts)
        for one, texts in zip(started, said, strict=True)
    ]


def report(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(out.with_suffix(".json").read_text())
    assert found.pop("path") == str(out)
    return found


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def single(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """What one thread writes, and its report."""
    out = tmp_path_factory.mktemp("single") / "out"
    done = run(checkpoint, out, "--threads", "1")
    assert done.returncode == 0, done.stderr
    assert "processes compute" not in done.stderr
    return out, report(out)


def test_processes_write_report_and_hash_what_one_thread_does(
    checkpoint: Path, single: tuple[Path, Any], tmp_path: Path
) -> None:
    done = run(checkpoint, tmp_path / "out", "--threads", "3")
    assert done.returncode == 0, done.stderr
    assert "3 processes compute" in done.stderr
    assert content(tmp_path / "out") == content(single[0])
    assert "migrate.parts" in content(tmp_path / "out")
    assert report(tmp_path / "out") == single[1]
    assert single[1]["complete"]


ONCE = """
import os, sys
from migrate.ops.quantize import Quantize
from migrate.running import tiles
tiles.MANY = 1 << 20
class Seen:
    def find_spec(name, *more):
        if name == "torch":
            os.write(2, b"torch is imported\\n")
sys.meta_path.insert(0, Seen)
compute = Quantize.compute
def counted(self, args, arrays, specs, output, *more, **known):
    if output:
        os.write(2, b"a scale from numbers\\n")
    return compute(self, args, arrays, specs, output, *more, **known)
Quantize.compute = counted
"""


def test_floats_of_eight_bits_are_made_by_processes_without_torch(
    single: tuple[Path, Any], tmp_path: Path
) -> None:
    """The scales of rows that different processes made are known to both."""
    made = []
    for threads in ("1", "2"):
        out = tmp_path / threads
        done = run(
            single[0], out, "--threads", threads, "--to", "fp8@compressed-tensors",
            before=ONCE,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert "torch is imported" not in done.stderr
        # but of a tensor whose last codes are not there yet
        assert done.stderr.count("a scale from numbers") < (1 if threads == "1" else 3)
        assert ("processes compute" in done.stderr) == (threads == "2")
        made.append((content(out), report(out)))
    assert made[0] == made[1]


SURVEYS = """
import os
from migrate.ops.quantize import Quantize
survey = Quantize.survey
def counted(self, args, specs, box, array, known=None):
    if known is None:
        os.write(2, b"a survey\\n")
    return survey(self, args, specs, box, array, known)
Quantize.survey = counted
"""


def test_what_is_known_of_a_whole_tensor_is_found_once(tmp_path: Path) -> None:
    numbers = np.random.default_rng(0).integers(0x3B00, 0x3C00, (4, 3000, 3000), "<u2")
    keys = [f"model.layers.{n}.mlp.up_proj.weight" for n in range(4)]
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "model.safetensors").write_bytes(
        safetensors_of(
            {k: ("BF16", a.shape, a.tobytes()) for k, a in zip(keys, numbers, strict=True)}
        )
    )
    (plain / "config.json").write_text('{"model_type": "llama"}')
    for threads in "1", "3":
        options = ["--from", "fp8@bf16", "--to", "fp8@modelopt", "--threads", threads]
        done = run(plain, tmp_path / threads, *options, before=SURVEYS)
        assert done.returncode == 0, done.stderr
        assert ("processes compute" in done.stderr) is (threads == "3")
        assert done.stderr.count("a survey") == len(keys)
    assert content(tmp_path / "1") == content(tmp_path / "3")
    assert report(tmp_path / "1") == report(tmp_path / "3")


BOTH = """\
id: acme/decoded-and-encoded
title: One scale for each tensor instead of one for each row
lineage: acme
edge: [rows, tensors]
rules:
  - name: weights
    from: {weight: "{p...}.weight", scale: "{p...}.weight_scale"}
    to: {weight: "{p}.weight", scale: "{p}.weight_scale"}
    via:
      - dequantize: {codec: fp8, dtype: bfloat16}
      - quantize: {codec: fp8, granularity: tensor, from: bfloat16}
"""


def test_what_is_measured_and_hashed_for_a_survey_is_told(checkpoint: Path, tmp_path: Path) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text(BOTH)
    for threads in "1", "3":
        command = [
            sys.executable, "-c", f"{SMALL}\n{RUN}", "apply", checkpoint, "-o", tmp_path / threads,
            "--rules", rules, "--allow", "lossy", "-v", "--threads", threads,
            "--report", tmp_path / f"{threads}.json",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=HANG, check=False)
        assert done.returncode == 0, done.stderr
        assert ("processes compute" in done.stderr) is (threads == "3")
    assert content(tmp_path / "1") == content(tmp_path / "3")
    one, three = (report(tmp_path / threads)["rules"] for threads in ("1", "3"))
    assert [rule["op"] for rule in one] == ["quantize", "dequantize"]
    assert one[0] == three[0]
    # of what is decoded for a survey and again for the codes, two processes may measure more
    for figure in ("elements_measured", "max_abs_error", "max_relative_error"):
        assert three[1][figure] >= one[1][figure], figure


def test_an_order_arrives_whole_though_signals_come() -> None:
    """A pipe that is full takes a part of a line when a handler runs, and says how much."""
    orders, answers = os.pipe(), os.pipe()
    heard: list[bytes] = []

    def listen() -> None:
        with open(orders[0], "rb") as stream, open(answers[1], "wb", 0) as back:
            time.sleep(0.5)
            heard.append(stream.readline())
            back.write(b'{"done": true}\n')

    child = _Child(0, orders[1], answers[0])
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)
    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    try:
        assert child.ask(["x" * (1 << 20)]) == {"done": True}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        child.hang_up()
        listener.join(HANG)
    assert json.loads(heard[0]) == ["x" * (1 << 20)]


DIES = """
import os, signal
from migrate.running import gather
taken = []
take = gather.Gather.take
def dies(self, batch):
    taken.append(batch)
    if os.getpid() != parent and len(taken) == 2:
        {how}
    take(self, batch)
gather.Gather.take = dies
parent = os.getpid()
"""


@pytest.mark.parametrize(
    ("how", "complete"),
    [("os.kill(os.getpid(), signal.SIGKILL)", False), ("raise MemoryError('no more')", True)],
    ids=["killed", "fails"],
)
def test_a_thread_goes_on_without_its_process(
    checkpoint: Path, single: tuple[Path, Any], tmp_path: Path, how: str, complete: bool
) -> None:
    done = run(checkpoint, tmp_path / "out", before=DIES.format(how=how))
    assert done.returncode == 0, done.stderr
    assert "2 processes compute" in done.stderr
    assert content(tmp_path / "out") == content(single[0])
    said = report(tmp_path / "out")
    # what the killed one had measured is not known
    assert said["complete"] is complete
    if complete:
        assert said == single[1]


# what each rank writes of these files is worth its processes
SMALL = "from migrate.running import tiles; tiles.MANY = 1\n"
NO_FORK = """
import os
def fork():
    raise AssertionError("forked")
os.fork = fork
"""


@pytest.mark.ranks
def test_ranks_compute_in_their_threads(checkpoint: Path, tmp_path: Path) -> None:
    """Each has a thread that watches the others, and beside threads nothing is forked: no rank has
    a process that can die without it.
    """
    words = ["--max-shard-size", "16MB", "--threads", "2"]
    one = run(checkpoint, tmp_path / "one", *words, before=SMALL)
    assert one.returncode == 0, one.stderr
    assert "2 processes compute" in one.stderr
    found = launch(checkpoint, tmp_path / "several", 3, *words, before=SMALL + NO_FORK)
    assert [done.returncode for done in found] == [0] * 3, found
    assert not any("processes compute" in done.stderr for done in found)
    assert content(tmp_path / "several") == content(tmp_path / "one")
    assert report(tmp_path / "several") == report(tmp_path / "one")


def test_an_error_is_that_of_one_thread(checkpoint: Path, tmp_path: Path) -> None:
    before = """
from migrate.ops import base
from migrate import ops
op = ops.get("dequantize")
compute = type(op).compute
def refuses(self, args, inputs, specs, output, box, *rest, **memo):
    if box[0][0] >= 1500:
        raise base.OpError("M406", "not this row")
    return compute(self, args, inputs, specs, output, box, *rest, **memo)
type(op).compute = refuses
"""
    said = {}
    for threads in "1", "2":
        done = run(checkpoint, tmp_path / threads, "--threads", threads, before=before)
        assert done.returncode not in (0, 70), done.stderr
        assert ("processes compute" in done.stderr) is (threads == "2")
        said[threads] = [
            line.replace(str(tmp_path / threads), "out")
            for line in done.stderr.splitlines()
            if "not this row" in line or line.startswith("error")
        ]
        assert not (tmp_path / threads).exists()
    assert said["1"] == said["2"]
    assert said["1"]


def test_processes_end_with_the_run_that_is_killed_and_it_can_go_on(
    checkpoint: Path, single: tuple[Path, Any], tmp_path: Path
) -> None:
    slow = """
import os, time
from migrate.running import gather
take = gather.Gather.take
def slowly(self, batch):
    if os.getpid() != parent:
        print("child", os.getpid(), flush=True)
        time.sleep(0.3)
    take(self, batch)
gather.Gather.take = slowly
parent = os.getpid()
"""
    command = ["apply", checkpoint, "-o", tmp_path / "out", "--to", "fp8@bf16", "--allow", "lossy"]
    with subprocess.Popen(
        [sys.executable, "-c", f"{slow}\n{RUN}", *command], stdout=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None
        children = {int(running.stdout.readline().split()[1]) for _ in range(2)}
        running.kill()
    for _ in range(100 * HANG):
        if not any(map(alive, children)):
            break
        time.sleep(0.01)
    assert not any(map(alive, children))
    done = run(checkpoint, tmp_path / "out", "--resume")
    assert done.returncode == 0, done.stderr
    assert content(tmp_path / "out") == content(single[0])


def alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def test_an_interrupt_ends_the_processes(checkpoint: Path, tmp_path: Path) -> None:
    interrupted = """
import os, signal
from migrate.running import gather
take = gather.Gather.take
def asks(self, batch):
    if os.getpid() != parent:
        print("child", os.getpid(), flush=True)
        os.kill(parent, signal.SIGINT)
    take(self, batch)
gather.Gather.take = asks
parent = os.getpid()
"""
    done = run(checkpoint, tmp_path / "out", before=interrupted)
    assert done.returncode == 130
    children = {int(line.split()[1]) for line in done.stdout.splitlines() if "child" in line}
    assert children
    assert not any(map(alive, children))


def test_nothing_is_forked_beside_other_threads_or_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def fork() -> int:
        raise AssertionError("forked")

    monkeypatch.setattr(os, "fork", fork)
    arguments: Any = (2, 1 << 20, [], {}, None, None)
    monkeypatch.setitem(sys.modules, "torch", object())
    assert Fillers.begin(*arguments) is None
    monkeypatch.delitem(sys.modules, "torch")
    ended = threading.Event()
    other = threading.Thread(target=ended.wait)
    other.start()
    try:
        assert Fillers.begin(*arguments) is None
    finally:
        ended.set()
        other.join()


def test_hashes_of_pieces_come_together_from_two_processes() -> None:
    spec = Spec("uint8", (5 * PIECE + 7,))
    data = memoryview(np.random.default_rng(1).integers(0, 256, spec.shape, "u1").tobytes())
    whole, parent = PartHashes({"w": spec}), PartHashes({"w": spec})
    whole._by_key["w"].feed(0, data)
    for ranges in [(0, 2 * PIECE), (4 * PIECE, 5 * PIECE + 7)], [(2 * PIECE, 4 * PIECE)]:
        child = PartHashes({"w": spec})
        assert child.drain() == []
        for start, stop in ranges:
            part = np.frombuffer(data[start:stop], "u1")
            child._take(child._by_key["w"], spec, ((start, stop),), part)
            said = json.loads(json.dumps(child.drain()))
            assert said
            parent.enter(said)
        assert child.drain() == []
    assert not parent.unfinished()
    assert parent.values() == whole.values()
