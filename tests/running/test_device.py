"""Staging: what goes through a lane comes out as it would without one, in any order of boxes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from raw_files import describe, random_raw, read_back, whole, write_source
from value_ops import Widen, call, install

from migrate.core.errors import QuestionError
from migrate.core.spec import spec
from migrate.ops.base import ValueOp
from migrate.running import resources as devices
from migrate.running import tiles
from migrate.running.resources import RunOptions

torch = pytest.importorskip("torch")


class Staged(devices.Device):
    """A device that goes through the lane even where it is the CPU."""

    def lane(self) -> devices.Lane:
        return devices.Lane(self.name)


class TorchWiden(Widen):
    """Widens on whatever device its arrays are."""

    name = "widen"

    def compute(
        self, args: Any, arrays: Any, specs: Any, output: int, box: Any, out: Any, meter: Any = None
    ) -> None:
        assert isinstance(arrays[0], torch.Tensor)
        assert list(arrays[0].shape) == list(out.shape) == [b - a for a, b in box]
        self.count(output, box, np.empty(0))
        out.view(torch.float32).copy_(arrays[0].view(torch.bfloat16))

    def count(self, output: int, box: Any, out: Any) -> None:
        with self._lock:
            self.seen[tuple(box)] += 1


def test_boxes_come_back_in_their_places_though_buffers_take_turns(device: str) -> None:
    lane = devices.Lane(device)
    rng = np.random.default_rng(0)
    pairs = []
    for n in (5, 70_000, 1, 300, 70_001, 0):
        a, b = (rng.integers(0, 1 << 16, n).astype("<u2") for _ in range(2))
        place = np.zeros((n, 2), "<u2")[:, 1]
        lane.submit(
            [a, b],
            lambda given, out: out.copy_((given[0].int() ^ given[1].int()).to(torch.uint16)),
            place,
        )
        wanted = a ^ b
        # what was given may be reused as soon as it is submitted
        a[:] = b[:] = 0
        pairs.append((place, wanted))
    lane.drain()
    for place, wanted in pairs:
        assert (place == wanted).all()


@pytest.mark.parametrize("threads", [1, 2])
def test_a_run_through_staging_writes_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, threads: int
) -> None:
    ops = install(monkeypatch)
    ops["widen"] = staged = TorchWiden()
    monkeypatch.setattr("migrate.running.evaluator.CHUNK", 1 << 16)
    a = random_raw(np.random.default_rng(1), "bfloat16", (700, 300))
    # NaNs that are not quiet become so where torch converts
    a[(a & 0x7F80) == 0x7F80] = 0
    source = write_source(tmp_path / "in", {"a": ("bfloat16", a)})
    outputs = {"o": call(staged, whole("a", "bfloat16", a.shape))[0]}
    target = describe(outputs)
    tiles.write_target(
        outputs,
        source,
        target,
        tmp_path / "out",
        digest="d",
        options=RunOptions(fsync=False, threads=threads, device=Staged(device)),
    )
    assert read_back(tmp_path / "out", target)["o"] == (a.astype("u4") << 16).tobytes()
    assert len(staged.seen) > 4


def test_ops_whose_bits_differ_stay_on_the_cpu_unless_all_is_asked() -> None:
    class Same(ValueOp):
        name = "same_bits"

    class Differs(ValueOp):
        name = "differs"
        same_bits = False

    word, wide = np.dtype("<u4"), np.dtype("V16")
    assert devices.Device("cuda").takes(Same(), word)
    assert not devices.Device("cuda").takes(Differs(), word)
    assert devices.Device("cuda", every=True).takes(Differs(), word)
    assert not devices.Device("cuda", every=True).takes(Same(), wide)


def test_an_unknown_device_is_a_wrong_question() -> None:
    with pytest.raises(QuestionError) as caught:
        devices.parse_device("tpu")
    assert caught.value.diagnostics[0].code == "M115"
    assert devices.parse_device("cpu").lane() is None


@pytest.mark.parametrize("name", ["cuda", "cuda:all"])
def test_without_a_gpu_cuda_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(QuestionError) as caught:
        devices.parse_device(name)
    assert caught.value.diagnostics[0].code == "M407"
    assert spec("float32", ()).numel == 1


def test_a_device_that_is_there_is_taken(device: str) -> None:
    assert devices.parse_device(device) == devices.Device(device)
    assert device == "cpu" or devices.parse_device(f"{device}:all").every


@pytest.mark.parametrize(("local_rank", "name"), [(0, "cuda:0"), (1, "cuda:1"), (5, "cuda:1")])
def test_each_process_of_a_machine_has_a_gpu(
    monkeypatch: pytest.MonkeyPatch, local_rank: int, name: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert devices.parse_device("cuda", local_rank) == devices.Device(name)
    assert devices.parse_device("cuda:all", local_rank) == devices.Device(name, True)
    assert devices.parse_device("cpu", local_rank) == devices.CPU
    options = devices.read_options(device="cuda", local_rank=local_rank)
    assert options.device == devices.Device(name)
