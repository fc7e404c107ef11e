"""Copies from devices: their order, what waits for them, and what keeps their memory.

On the CPU with stand-ins for stream and event, which say what was asked of them in which order;
by `make gpu` with the real ones.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor
from work import HANG

from migrate.staging.copying import Streams
from migrate.staging.stager import Stager
from migrate.staging.tensors import Storages

CUDA, OTHER = torch.device("cuda", 0), torch.device("cuda", 1)


class Device:
    """What `torch.cuda` is to the code, with one device whose copies are there when it says so."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.there = False
        outer = self

        class Event:
            def query(self) -> bool:
                return outer.there

            def synchronize(self) -> None:
                outer.said.append("synchronize")
                outer.there = True

        class Stream:
            def __init__(self, device: Any = None, priority: int = 0) -> None:
                self.name = "current" if device is None else f"side {priority}"
                if device == OTHER:
                    self.name += " of the other"

            @staticmethod
            def priority_range() -> tuple[int, int]:
                return 2, -5

            def wait_stream(self, other: Any) -> None:
                outer.said.append(f"{self.name} waits for {other.name}")

            def wait_event(self, event: Event) -> None:
                outer.said.append(f"{self.name} waits for the copies")

            def record_event(self) -> Event:
                outer.said.append(f"event on {self.name}")
                return Event()

        self.Stream = Stream

    def current_stream(self, device: Any) -> Any:
        return self.Stream()

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.said.append(f"into {stream.name}")
        yield
        self.said.append(f"out of {stream.name}")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Device:
    """Devices on which every storage of 100 floats or more is said to lie, of 1,000 the other."""
    made, entered = Device(), Storages.entered

    def number(self: Storages, key: Any, storage: Any, address: int, size: int, *rest: int) -> int:
        found = entered(self, key, storage, address, size, *rest)
        if size >= 400:
            self.devices[found] = OTHER if size >= 4000 else CUDA
        return found

    def keep(source: torch.Tensor, stream: Any) -> None:
        made.said.append(f"keep {source.numel()} for {stream.name}")

    monkeypatch.setattr(torch, "get_device_module", lambda device: made)
    monkeypatch.setattr(Storages, "entered", number)
    monkeypatch.setattr(torch.Tensor, "record_stream", keep)
    return made


STATE = {"there": torch.ones(100), "here": torch.zeros(3)}
COPIES = [
    "side 2 waits for current",
    "into side 2",
    "keep 400 for side 2",
    "out of side 2",
    "event on side 2",
]


def test_stage_waits_for_the_copies(gpu: Device) -> None:
    snapshot = Stager().stage(STATE)
    assert gpu.said == [*COPIES, "synchronize"]
    assert snapshot.done()
    assert snapshot.state["there"].eq(1).all()
    assert gpu.said == [*COPIES, "synchronize"]


def test_without_blocking_the_guard_makes_the_stream_wait(gpu: Device) -> None:
    snapshot = Stager().stage(STATE, non_blocking=True)
    assert gpu.said == COPIES
    assert not snapshot.done()
    snapshot.guard()
    assert gpu.said[len(COPIES) :] == ["current waits for the copies"]
    assert not snapshot.done()
    gpu.there = True
    assert snapshot.done()


@pytest.mark.parametrize("read", [lambda x: x.state, lambda x: x["there"], lambda x: x.wait()])
def test_reading_waits(gpu: Device, read: Any) -> None:
    snapshot = Stager().stage(STATE, non_blocking=True)
    read(snapshot)
    assert gpu.said[len(COPIES) :] == ["synchronize"]


def test_what_is_on_the_cpu_is_there_when_stage_returns(gpu: Device) -> None:
    state = {"there": torch.ones(100), "here": torch.zeros(3)}
    snapshot = Stager().stage(state, non_blocking=True)
    state["here"].fill_(9)
    assert snapshot.state["here"].eq(0).all()


def test_each_device_has_a_stream(gpu: Device) -> None:
    state = {**STATE, "more": torch.ones(200), "other": torch.full((1000,), 2.0)}
    snapshot = Stager().stage(state, non_blocking=True)
    for name, kept in (("side 2", [400, 800]), ("side 2 of the other", [4000])):
        mine = [said for said in gpu.said if re.search(rf"{name}($| waits)", said)]
        assert mine[:2] == [f"{name} waits for current", f"into {name}"]
        assert sorted(mine[2:-2]) == [f"keep {n} for {name}" for n in kept]
        assert mine[-2:] == [f"out of {name}", f"event on {name}"]
    before = len(gpu.said)
    snapshot.guard()
    assert gpu.said[before:] == ["current waits for the copies"] * 2
    assert snapshot["other"].eq(2).all()
    assert gpu.said[before + 2 :] == ["synchronize"] * 2
    assert set(snapshot.devices.values()) == {torch.device("cpu"), CUDA, OTHER}


def test_a_stream_is_made_once(gpu: Device) -> None:
    stager, made = Stager(), []
    real = gpu.Stream
    gpu.Stream = lambda *args, **more: made.append(args) or real(*args, **more)  # type: ignore[assignment,misc,func-returns-value]
    gpu.Stream.priority_range = real.priority_range  # type: ignore[attr-defined]
    for _ in range(3):
        stager.stage(STATE)
    assert len([args for args in made if args]) == 1


def test_devices_without_priorities_have_a_stream(
    gpu: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(gpu.Stream, "priority_range")
    assert Stager().stage(STATE)["there"].eq(1).all()
    assert gpu.said[0] == "side 0 waits for current"


@pytest.mark.filterwarnings("ignore")
def test_devices_are_those_of_what_a_tensor_consists_of(gpu: Device) -> None:
    x = torch.ones(100)
    two = TwoTensor(x, torch.ones(100))
    two.note = torch.ones(2)
    state = {"two": two, "coo": torch.eye(100).to_sparse(), "here": torch.zeros(3)}
    found = Stager().stage(state).devices
    assert (found["['two']"], found["['two'].a"], found["['two'].note"]) == (
        CUDA,
        CUDA,
        torch.device("cpu"),
    )
    assert found["['coo']"] == CUDA
    assert found["['here']"] == torch.device("cpu")


@pytest.mark.filterwarnings("ignore")
def test_scales_of_channels_are_there_before_they_are_read(gpu: Device) -> None:
    """torch reads them when such a tensor is made, which cannot wait for a `guard`."""
    x = torch.quantize_per_channel(torch.ones(2, 3), torch.ones(2), torch.zeros(2), 0, torch.qint8)
    snapshot = Stager().stage({**STATE, "x": x}, non_blocking=True)
    assert gpu.said == [*COPIES, "synchronize"]
    assert snapshot["x"].dequantize().equal(torch.ones(2, 3))


def test_memory_is_lent_until_the_copies_are_there(gpu: Device) -> None:
    """A snapshot that nobody kept: its memory is not given to the next while a device writes."""
    stager = Stager()
    stager.stage(STATE, non_blocking=True)
    assert gpu.said == [*COPIES, "synchronize"]
    stager.trim()
    assert stager.nbytes == 0


def test_a_failure_between_copies_waits(gpu: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    def keep(self: Streams, source: torch.Tensor, device: torch.device) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Streams, "keep", keep)
    stager = Stager()
    with pytest.raises(KeyboardInterrupt):
        stager.stage(STATE)
    assert gpu.said[-1] == "synchronize"
    stager.trim()
    assert stager.nbytes == 0


class Driver:
    """What stands for `torch.cuda.cudart()`: which ranges are registered, and what was refused."""

    def __init__(self) -> None:
        self.ranges: dict[int, int] = {}
        self.said: list[tuple[str, int]] = []
        self.status = 0

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert address % 4096 == 0
        assert size % 4096 == 0
        overlaps = any(a < address + size and address < a + n for a, n in self.ranges.items())
        if self.status or overlaps:
            return self.status or 712
        self.ranges[address] = size
        self.said.append(("register", address))
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        # unmapped pages can no longer be read
        ctypes.string_at(address, 1)
        del self.ranges[address]
        self.said.append(("unregister", address))
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    return made


@pytest.mark.parametrize("share", [False, True])
def test_a_block_is_registered_once_and_for_life(driver: Driver, share: bool) -> None:
    state = {"large": torch.ones(1 << 19), **{str(n): torch.ones(3) for n in range(20)}}
    stager = Stager(pin_memory=True, share_memory=share)
    for _ in range(3):
        kept = stager.stage(state)
    registered = [what for what in driver.said if what[0] == "register"]
    assert len(registered) == len(set(registered)) == (2 if share else 4)
    del kept
    stager.close()
    assert not driver.ranges
    assert stager.stage(state).state["0"].eq(1).all()


def test_memory_that_outlives_its_stager_is_unregistered(driver: Driver) -> None:
    taken = Stager(pin_memory=True).stage({"w": torch.ones(3)}).state["w"]
    assert len(driver.ranges) == 1
    del taken
    assert not driver.ranges


def test_at_exit_what_is_left_is_unregistered_quietly() -> None:
    """By then a driver may answer with anything: nobody can do anything about it."""
    code = """if True:
        import migrate, torch

        class Driver:
            def cudaHostRegister(self, address, size, flags):
                return 0

            def cudaHostUnregister(self, address):
                print("unregistered", flush=True)
                raise RuntimeError("driver shutting down")

        torch.cuda.is_available = lambda: True
        torch.cuda.cudart = Driver
        stager = migrate.Stager(pin_memory=True)
        kept = stager.stage({"w": torch.ones(3)}), stager.stage({"w": torch.ones(3)})["w"]
    """
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "unregistered\n" * 2, "")


def test_pages_that_cannot_be_registered_are_a_diagnostic(driver: Driver) -> None:
    from migrate.core.errors import RunError

    driver.status = 2
    stager = Stager(pin_memory=True)
    with pytest.raises(RunError, match="cudaError 2") as caught:
        stager.stage({"w": torch.ones(3)})
    assert caught.value.diagnostics[0].code == "M919"
    assert stager.nbytes == 0


def test_without_a_gpu_it_is_said_once() -> None:
    with pytest.warns(UserWarning, match="torch sees no GPU here") as caught:
        stager = Stager(pin_memory=True)
    assert len(caught) == 1
    assert stager.stage({"w": torch.ones(3)}).state["w"].eq(1).all()


@pytest.mark.gpu
@pytest.mark.parametrize("share", [False, True])
def test_the_real_ones(device: str, share: bool) -> None:
    """Bit for bit, three times, pinned and shared, while the device changes the source behind."""
    stager = Stager(pin_memory=True, share_memory=share)
    state = {str(n): torch.randn(1 << 20, device=device) for n in range(8)}
    for _ in range(3):
        expected = {key: x.cpu() for key, x in state.items()}
        snapshot = stager.stage(state, non_blocking=True)
        snapshot.guard()
        for x in state.values():
            x.add_(1)
        assert all(torch.equal(snapshot.state[key], x) for key, x in expected.items())


def _gpus(count: int) -> list[torch.device]:
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} GPUs")
    return [torch.device("cuda", n) for n in range(count)]


@pytest.mark.gpu
def test_several_real_ones() -> None:
    devices = _gpus(2)
    state = {str(d): torch.randn(1 << 20, device=d) for d in devices}
    expected = {key: x.cpu() for key, x in state.items()}
    snapshot = Stager(pin_memory=True).stage(state, non_blocking=True)
    snapshot.guard()
    for x in state.values():
        x.zero_()
    assert all(torch.equal(snapshot.state[key], x) for key, x in expected.items())
    assert snapshot.devices == {f"[{key!r}]": x.device for key, x in state.items()}


@pytest.mark.gpu
def test_copies_run_beside_matmuls() -> None:
    """By a trace of the device: some copy begins before a product ends that began before it."""
    from torch.profiler import ProfilerActivity, profile

    (device,) = _gpus(1)
    matrix = torch.randn(4096, 4096, device=device)
    state = {str(n): torch.randn(16 << 20, device=device) for n in range(8)}
    stager = Stager(pin_memory=True)
    stager.stage(state).release()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        snapshot = stager.stage(state, non_blocking=True)
        for _ in range(60):
            matrix @ matrix
        snapshot.wait()
        torch.cuda.synchronize()
    spans = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in trace.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    copies = [span for span in spans if "DtoH" in span[0]]
    products = [span for span in spans if "gemm" in span[0].lower()]
    assert copies
    assert products
    assert any(c[1] < p[2] and p[1] < c[2] for c in copies for p in products)
