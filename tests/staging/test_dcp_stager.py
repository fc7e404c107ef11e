"""`Stager.for_dcp`: torch's `async_save` over snapshots of ours."""

from __future__ import annotations

import copy
import gc
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import quantized_classes as classes
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dcp_memory_case import kilobytes
from dcp_stager_case import LEFT_TO_COLLECTOR, free
from quantized_ranks import HAS_STAGERS, KINDS, async_save, boxes, piece
from ranks import Ranks
from stored_objects import chunks, of_object
from work import HANG

import migrate
from migrate.staging.streams import Arrival

Start = Callable[[int], Ranks]
# torch 2.8 takes no Future
WAYS = [False, True] if HAS_STAGERS else [False]
ways = pytest.mark.parametrize("non_blocking", WAYS, ids=["dict", "future"][: len(WAYS)])


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def state(n: float) -> dict[str, Any]:
    w = torch.full((300, 100), n)
    return {"model": {"w": w, "row": w[1], "q": w[:2].to(torch.bfloat16)}, "step": int(n)}


def loaded(folder: Path) -> dict[str, Any]:
    into = state(-1)
    dcp.load(into, checkpoint_id=folder)
    return into


@ways
def test_each_save_has_its_values_and_its_memory_is_used_again(
    non_blocking: bool, tmp_path: Path, group: None, without_collector: None
) -> None:
    stager = migrate.Stager()
    ours = stager.for_dcp(non_blocking)
    held = []
    for n in range(3):
        live = state(n)
        saved = async_save(live, str(tmp_path / str(n)), ours)
        live["model"]["w"].fill_(-7)
        assert hasattr(saved, "staging_completion") == non_blocking
        getattr(saved, "upload_completion", saved).result()
        del saved
        if LEFT_TO_COLLECTOR:
            gc.collect()
        held.append(stager.nbytes)
    free(stager)
    # a thread of torch's may still have the save before
    assert max(held) <= 2 * held[0]
    for n in range(3):
        back, due = loaded(tmp_path / str(n)), state(n)
        assert back["step"] == n
        for key, x in due["model"].items():
            assert torch.equal(back["model"][key], x), key


@ways
def test_what_cannot_be_staged_is_raised_by_async_save(
    non_blocking: bool, tmp_path: Path, group: None
) -> None:
    stager = migrate.Stager()
    unfit = {**state(0), "lock": [threading.Lock()]}
    with pytest.raises(migrate.MigrateError, match=r"\['lock'\].*_thread.lock") as raised:
        async_save(unfit, str(tmp_path / "out"), stager.for_dcp(non_blocking))
    assert raised.value.diagnostics[0].code == "M975"
    assert stager.nbytes == 0
    assert not (tmp_path / "out").exists()


def test_the_lease_ends_with_the_dict_and_not_with_the_stager(without_collector: None) -> None:
    stager = migrate.Stager()
    ours = stager.for_dcp()
    staged = ours.stage(state(1))
    ours.close()
    assert stager.nbytes > 0
    taken = staged["model"]["row"]
    del staged
    stager.trim()
    assert stager.nbytes > 0
    assert taken.eq(1).all()
    del taken
    stager.trim()
    assert stager.nbytes == 0
    assert ours.stage(state(2))["step"] == 2
    ours.close()
    # gives back itself what nothing uses
    assert stager.nbytes == 0


def test_before_the_first_stage_there_is_nothing_to_wait_for() -> None:
    ours = migrate.Stager().for_dcp(non_blocking=True)
    ours.guard()
    ours.synchronize_staging()
    ours.close()


def test_close_waits_for_the_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    copying = Copying()
    monkeypatch.setattr("migrate.staging.copying.run", lambda *_: copying)
    ours = migrate.Stager().for_dcp(non_blocking=True)
    future = ours.stage({"w": torch.ones(3)})
    closing = threading.Thread(target=ours.close)
    closing.start()
    closing.join(0.2)
    assert closing.is_alive()
    copying.there.set()
    closing.join(HANG)
    assert not closing.is_alive()
    assert list(future.result(HANG)) == ["w"]


def test_five_saves_take_no_more_memory_than_one(tmp_path: Path, group: None) -> None:
    ours = migrate.Stager().for_dcp()
    live, taken = {"w": torch.zeros(8_000_000)}, []
    for n in range(5):
        live["w"].fill_(n)
        async_save(live, str(tmp_path / "w" / str(n)), ours).result()
        gc.collect()
        taken.append(1000 * kilobytes("VmRSS"))
    # what torch's own test of its stager allows
    assert taken[-1] - taken[0] < 1.2 * live["w"].nbytes, taken


class Copying(Arrival):
    """Copies that are there when it is said, as those of a device."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.there, self.error, self.guarded = threading.Event(), error, 0

    def wait(self) -> None:
        self.there.wait()
        if self.error:
            raise self.error

    def done(self) -> bool:
        return self.there.is_set()

    def guard(self) -> None:
        self.guarded += 1


@pytest.mark.parametrize("error", [None, RuntimeError("the device is lost")], ids=["good", "bad"])
def test_a_future_is_there_when_the_copies_are(
    error: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    copying = Copying(error)
    monkeypatch.setattr("migrate.staging.copying.run", lambda *_: copying)
    ours = migrate.Stager().for_dcp(non_blocking=True)
    future = ours.stage({"w": torch.ones(3)})
    assert isinstance(future, Future)
    assert not future.done()
    ours.guard()
    assert copying.guarded == 1
    copying.there.set()
    if error is None:
        ours.synchronize_staging()
        assert list(future.result()) == ["w"]
    else:
        with pytest.raises(RuntimeError, match="the device is lost"):
            future.result()
        with pytest.raises(RuntimeError, match="the device is lost"):
            ours.synchronize_staging()


def test_torch_finds_what_it_asks_a_stager_for() -> None:
    """By its shape: it is no subclass, and nothing of torch's private modules is imported."""
    from torch.distributed.checkpoint.staging import AsyncStager

    ours = migrate.Stager().for_dcp()
    assert AsyncStager not in type(ours).__mro__
    assert ours.should_synchronize_after_execute is False
    wanted = {name for name in vars(AsyncStager) if not name.startswith("_")}
    assert {name for name in wanted if not hasattr(ours, name)} == set()


def test_a_writer_stages_where_torch_asks_it(tmp_path: Path, group: None) -> None:
    """As torch 2.8 does, and later releases for old writers; it goes to another process."""
    ours = migrate.Stager().for_dcp()
    writer = ours.writer(dcp.FileSystemWriter(tmp_path / "1"))
    live = state(1)
    saved = dcp.async_save(live, storage_writer=writer)
    live["model"]["w"].fill_(-7)
    saved.result()
    assert loaded(tmp_path / "1")["model"]["w"].eq(1).all()
    sent = copy.copy(writer)
    sent.__dict__ = copy.deepcopy(writer.__dict__)
    with pytest.raises(RuntimeError, match="in another process"):
        sent.stage({})


@pytest.mark.ranks
@ways
@pytest.mark.parametrize("executor", ["thread", "process"])
def test_fsdp2_trains_on_while_it_is_saved(
    executor: str, non_blocking: bool, ranks: Start, tmp_path: Path
) -> None:
    flag = "yes" if non_blocking else ""
    ranks(2).run("dcp_stager_case", "trains", str(tmp_path), executor, flag)


@pytest.mark.ranks
def test_tensors_whose_new_empty_is_dense_are_saved_as_what_they_are(
    ranks: Start, tmp_path: Path
) -> None:
    """Transformer Engine before 2.16, of which torch's own stager saved what lay in memory."""
    kinds = ["te-float8", "te-mxfp8-rowwise"]
    ranks(2).run(
        "old_releases_case", "saves_unwritten", str(tmp_path / "in"), json.dumps(kinds), "staged"
    )
    with classes.installed():
        for name in kinds:
            due = boxes(KINDS[name], 2)
            for box, (_, held, _) in zip(
                due, chunks(tmp_path / "in", f"model.{name}"), strict=True
            ):
                wanted = {key: one.tobytes() for key, one in piece(name, box).items()}
                assert of_object(name, held) == wanted, name
