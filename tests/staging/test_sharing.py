"""Shared memory: descriptors, what other processes are sent, and how long they keep it."""

from __future__ import annotations

import copy
import gc
import io
import multiprocessing
import os
import pickle
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import sharing_case
import torch
from work import HANG

from migrate import MigrateError
from migrate.staging.stager import Stager

MIB = 1 << 20


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture(scope="module")
def other() -> Iterator[Callable[[str, Any], Any]]:
    """`other(what, held)`: an order to a process that was spawned, and its answer."""
    context = multiprocessing.get_context("spawn")
    theirs, orders = context.Pipe(duplex=False)
    answers, back = context.Pipe(duplex=False)
    child = context.Process(target=sharing_case.touch, args=(theirs, back), daemon=True)
    child.start()

    def ask(what: str, held: Any) -> Any:
        orders.send((what, held))
        assert answers.poll(HANG), "the other process does not answer"
        return answers.recv()

    yield ask
    orders.send(None)
    child.join(HANG)


def test_many_tensors_take_few_descriptors() -> None:
    state = {str(n): torch.full((16,), float(n)) for n in range(20_000)}
    stager = Stager(share_memory=True)
    before = descriptors()
    snapshot = stager.stage(state)
    assert descriptors() - before < 16
    # of no mounted file system, whose size would be a limit
    names = [os.readlink(fd) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()]
    assert any(name.startswith("/memfd:migrate-staging") for name in names)
    assert not any(name.startswith("/dev/shm") for name in names)
    assert snapshot.state["19999"].eq(19_999).all()
    del snapshot
    stager.close()
    assert descriptors() == before


def test_the_other_process_sees_the_same_memory(other: Callable[[str, Any], Any]) -> None:
    stager = Stager(share_memory=True)
    state = {"a": torch.ones(3), "b": torch.zeros(2), "large": torch.arange(4.0)}
    staged = stager.stage(state).state
    assert other("take", staged) == {"a": [1] * 3, "b": [0] * 2, "large": [0, 1, 2, 3]}
    staged["a"].fill_(2)
    assert other("read", "a") == [2] * 3
    assert other("write", "b") == "written"
    assert staged["b"].tolist() == [7] * 2
    assert state["b"].tolist() == [0] * 2
    other("let go", None)


def test_it_keeps_what_the_sender_lets_go(other: Callable[[str, Any], Any]) -> None:
    stager, state = Stager(share_memory=True), {"a": torch.ones(3)}
    staged = stager.stage(state).state
    address = staged["a"].data_ptr()
    other("take", staged)
    del staged
    for step in range(3):
        again = stager.stage({"a": torch.full((3,), step + 2.0)})
        assert again.state["a"].data_ptr() != address or step > 1
    assert other("read", "a") == [1] * 3
    stager.close()
    assert other("read", "a") == [1] * 3
    other("let go", None)


def test_memory_that_the_other_let_go_of_is_used_again(other: Callable[[str, Any], Any]) -> None:
    stager, state = Stager(share_memory=True), {"a": torch.ones(3)}
    before: list[int] = []
    for step in range(4):
        state["a"].fill_(step)
        snapshot = stager.stage(state)
        before.append(snapshot.state["a"].data_ptr())
        assert other("take", snapshot.state) == {"a": [step] * 3}
        other("let go", None)
        del snapshot
    assert len(set(before)) == 1


def test_one_tensor_and_a_message_with_tensors_of_others(other: Callable[[str, Any], Any]) -> None:
    staged = Stager(share_memory=True).stage({"a": torch.ones(3)}).state
    foreign = torch.full((2,), 4.0)
    assert other("take", {"mine": staged["a"], "torch's": foreign}) == {
        "mine": [1] * 3,
        "torch's": [4] * 2,
    }
    other("let go", None)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.uint16], ids=str)
def test_dtypes_that_torch_sends_in_its_own_way(
    other: Callable[[str, Any], Any], dtype: torch.dtype
) -> None:
    x = torch.arange(64, dtype=torch.uint8).view(dtype)
    staged = Stager(share_memory=True).stage({"x": x})
    assert other("bits", staged["x"]) == (dtype, list(range(64)))


def test_a_snapshot_is_sent_whole(other: Callable[[str, Any], Any], tmp_path: Path) -> None:
    """Structure, size and devices; the same memory, kept when the sender lets go."""
    stager = Stager(share_memory=True)
    base = torch.zeros(3 * MIB)
    state = {"a": torch.ones(3), "b": torch.zeros(2), "part": base[MIB : MIB + 2]}
    state["tied"] = state["a"]
    snapshot = stager.stage(state)
    assert other("take", snapshot) == {name: x.tolist() for name, x in state.items()}
    nbytes, devices, tied, restored = other("about", None)
    assert (nbytes, devices, tied) == (snapshot.nbytes, snapshot.devices, True)
    assert nbytes < MIB
    assert torch.equal(restored["part"], state["part"])
    snapshot["a"].fill_(2)
    assert other("read", "a") == [2] * 3
    assert other("write", "b") == "written"
    assert snapshot["b"].tolist() == [7] * 2
    snapshot.release()
    del snapshot
    for _ in range(3):
        stager.stage({name: torch.full_like(x, 9) for name, x in state.items()})
    stager.close()
    assert other("read", "b") == [7] * 2
    assert other("read", "tied") == [2] * 3
    saved = other("save", str(tmp_path / "saved.pt"))
    assert torch.load(saved, weights_only=True)["b"].tolist() == [7] * 2
    other("let go", None)


def test_a_snapshot_that_lies_elsewhere_or_was_released_is_not_sent() -> None:
    private, shared = Stager().stage({"a": torch.ones(3)}), Stager(share_memory=True).stage([1])
    for send in (ForkingPickler.dumps, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"Stager\(share_memory=True\).* its `state`"):
            send(private)
    shared.release()
    with pytest.raises(MigrateError, match="M976"):
        ForkingPickler.dumps(shared)
    with pytest.raises(MigrateError, match=r"M975.*\['s'\]: a Snapshot cannot be copied"):
        Stager().stage({"s": private})


def test_a_process_is_started_with_a_state() -> None:
    """Every way that a tensor is taken apart, by the arguments of a process."""
    weight = torch.ones(2, 3)
    state = {
        "w": weight,
        "again": weight[0],
        "p": torch.nn.Parameter(torch.ones(2)),
        "sparse": torch.eye(2).to_sparse(),
        "conj": torch.tensor([1 + 2j]).conj(),
    }
    stager = Stager(share_memory=True)
    staged = stager.stage(state).state
    context = multiprocessing.get_context("spawn")
    answers, back = context.Pipe(duplex=False)
    child = context.Process(target=sharing_case.describe, args=(staged, back))
    child.start()
    assert answers.poll(HANG), "the process does not answer"
    assert answers.recv() == {
        "tied": True,
        "seen": 5.0,
        "classes": ["Parameter", "Tensor", "Tensor", "Tensor", "Tensor"],
        "sparse": [[1, 0], [0, 1]],
        "conj": [[1, -2]],
        "grad": True,
    }
    child.join(HANG)
    assert staged["w"][0, 0].item() == 5
    assert weight[0, 0].item() == 1


def test_a_state_is_saved_and_copied_like_any_other() -> None:
    """Only multiprocessing sends handles."""
    state = {"a": torch.ones(3), "p": torch.nn.Parameter(torch.ones(2))}
    staged = Stager(share_memory=True).stage(state).state
    file = io.BytesIO()
    torch.save(staged, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert type(staged) is dict
    assert torch.equal(loaded["a"], torch.ones(3))
    assert torch.equal(copy.deepcopy(staged)["p"], staged["p"])


def test_is_shared_knows_torchs_allocators_alone() -> None:
    staged = Stager(share_memory=True).stage({"a": torch.ones(3)}).state
    assert not staged["a"].is_shared()


def test_nothing_stays_behind() -> None:
    gc.collect()
    gc.disable()
    try:
        before, stager = descriptors(), Stager(share_memory=True)
        for _ in range(3):
            stager.stage({"a": torch.ones(3), "b": torch.ones(MIB)})
        stager.close()
        assert descriptors() == before
    finally:
        gc.enable()
