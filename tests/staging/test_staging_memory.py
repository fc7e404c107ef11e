"""Memory of snapshots: how long it is lent, when it goes back, and to what limit."""

from __future__ import annotations

import gc
import mmap
import multiprocessing
import os
import resource
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from marks import thorough
from safetensors.torch import load_file
from work import HANG

from migrate.core.errors import QuestionError, RunError
from migrate.staging.jobs import write_here
from migrate.staging.memory import PAGE, BlockPool, Want, pages
from migrate.staging.stager import Stager

MIB = 1 << 20


@pytest.fixture
def uncollected() -> Iterator[None]:
    """What is free here is free by counting references."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def large(count: int = 3, size: int = 2 * MIB) -> dict[str, torch.Tensor]:
    return {f"w{n}": torch.full((size // 4,), float(n)) for n in range(count)}


def addresses(state: Any) -> list[int]:
    return [x.data_ptr() for x in state.values()]


class TestLifetimes:
    @pytest.mark.parametrize("share", [False, True])
    def test_a_second_stage_never_overwrites(self, uncollected: None, share: bool) -> None:
        stager, state = Stager(share_memory=share), {**large(), "small": torch.zeros(3)}
        first = stager.stage(state)
        taken = stager.stage(state).state["w1"]
        for x in state.values():
            x.fill_(9)
        for _ in range(3):
            stager.stage(state)
        assert [x[0].item() for x in first.state.values()] == [0, 1, 2, 0]
        assert taken.eq(1).all()

    def test_the_last_reference_gives_the_memory_back(self, uncollected: None) -> None:
        stager, state = Stager(), large(2)
        state["tied"] = state["w0"][10:]
        snapshot = stager.stage(state)
        before, held = addresses(snapshot.state), snapshot.state["tied"]
        del snapshot
        # w1 is free, w0 is not: a view of it is left
        second = addresses(stager.stage(state).state)
        assert second[1] == before[1]
        assert second[0] != before[0]
        assert held[0].item() == 0
        del held
        assert addresses(stager.stage(state).state)[1] == before[1]
        stager.trim()
        assert stager.nbytes == 0

    @pytest.mark.parametrize("share", [False, True])
    def test_the_next_stage_gets_the_same_addresses(self, uncollected: None, share: bool) -> None:
        stager = Stager(share_memory=share)
        state: dict[str, Any] = {**large(5), **{str(n): torch.ones(n + 1) for n in range(50)}}
        state["module"] = torch.nn.Linear(3, 3).state_dict()["weight"]
        before = addresses(stager.stage(state).state)
        other = large(1, 3 * MIB)
        for _ in range(4):
            assert addresses(stager.stage(state).state) == before
            stager.stage(other)

    def test_every_kind_of_state_is_let_go_of(self, uncollected: None) -> None:
        cycle: list[Any] = [torch.ones(3)]
        cycle.append(cycle)
        module = torch.nn.Linear(4, 4)
        optimizer = torch.optim.Adam(module.parameters())
        module(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        state = {
            "optimizer": optimizer.state_dict(),
            "sparse": torch.eye(3).to_sparse(),
            "nested": torch.nested.nested_tensor(
                [torch.ones(2), torch.ones(3)], layout=torch.jagged
            ),
            "storage": torch.ones(5).untyped_storage(),
            "large": torch.ones(MIB),
        }
        stager = Stager()
        snapshot = stager.stage(state)
        assert snapshot.devices
        snapshot.restore()
        del snapshot
        stager.trim()
        assert stager.nbytes == 0

    def test_release_lets_go_and_tensors_taken_out_stay(self, uncollected: None) -> None:
        stager, state = Stager(), large(2)
        with stager.stage(state) as snapshot:
            taken = snapshot.state["w1"]
        stager.trim()
        assert stager.nbytes == pages(2 * MIB)
        assert taken.eq(1).all()
        del taken
        stager.trim()
        assert stager.nbytes == 0

    def test_memory_outlives_its_stager(self, uncollected: None) -> None:
        state = {**large(2), "small": torch.full((4,), 3.0)}
        taken = Stager(share_memory=True).stage(state).state
        gc.collect()
        assert taken["w1"].eq(1).all()
        assert taken["small"].eq(3).all()

    def test_after_close_the_stager_works(self) -> None:
        stager, state = Stager(), large(2)
        stager.stage(state)
        stager.close()
        assert stager.nbytes == 0
        assert stager.stage(state).state["w1"].eq(1).all()


class TestChanges:
    """States that are not what they were at the stage before."""

    def test_storages_grow_shrink_move_appear_and_vanish(self, uncollected: None) -> None:
        stager = Stager()
        state: dict[str, torch.Tensor] = {**large(3), "small": torch.zeros(7)}
        kept = []
        for step in range(6):
            state["w0"].untyped_storage().resize_((2 + step % 3) * MIB)
            state["w0"] = torch.full((state["w0"].untyped_storage().nbytes() // 4,), step + 0.5)
            state["w1"] = state["w1"].clone() + 1
            state["small"] = torch.full((7 * (step % 2 + 1),), float(step))
            state.pop(f"new{step - 1}", None)
            state[f"new{step}"] = torch.full((MIB,), float(step))
            snapshot = stager.stage(state)
            kept.append(({key: x.clone() for key, x in state.items()}, snapshot))
        for expected, snapshot in kept:
            assert list(snapshot.state) == list(expected)
            assert all(torch.equal(snapshot.state[key], x) for key, x in expected.items())

    def test_what_two_stages_did_not_use_is_unmapped(self, uncollected: None) -> None:
        stager, small = Stager(), {"x": torch.ones(3)}
        stager.stage(large(3))
        assert stager.nbytes == 3 * pages(2 * MIB)
        stager.stage(small)
        assert stager.nbytes == 3 * pages(2 * MIB) + PAGE
        stager.stage(small)
        assert stager.nbytes == PAGE

    def test_a_storage_that_has_moved_gets_a_block_that_is_free(self, uncollected: None) -> None:
        stager, kept = Stager(), []
        for step in range(3):
            # at another address each time
            kept.append(torch.full((MIB,), float(step)))
            assert stager.stage({"w": kept[-1]})["w"].eq(step).all()
            assert stager.nbytes == 4 * MIB
        assert len({x.data_ptr() for x in kept}) == 3

    def test_storages_that_share_a_slab_are_aligned_and_apart(self) -> None:
        state = {str(n): torch.full((n + 1,), n, dtype=torch.uint8) for n in range(200)}
        stager = Stager()
        staged = stager.stage(state).state
        assert stager.nbytes == pages(sum(-(-x.numel() // 64) * 64 for x in state.values()))
        assert all(x.data_ptr() % 64 == 0 for x in staged.values())
        assert all(x.untyped_storage().nbytes() == x.numel() for x in staged.values())
        for x in staged.values():
            x.fill_(255)
            x.fill_(x.numel() - 1)
        assert all(torch.equal(staged[key], x) for key, x in state.items())

    @pytest.mark.parametrize("share", [False, True])
    def test_small_ones_among_those_that_overlap_and_large_ones(self, share: bool) -> None:
        """Storages of one array of numpy, in any order, with gaps, overlaps and neighbours."""
        held = numpy.random.default_rng(0).integers(0, 256, 5 * MIB, dtype=numpy.uint8)
        ends = [
            (0, 90),
            (90, 200),
            (95, 100),
            (120, 130),
            (150, 260),
            (150, 160),
            (300, 301),
            (301, 400),
        ]
        ends += [(5000, 2 * MIB), (2 * MIB - 1, 2 * MIB + 9), (2 * MIB + 9, 5 * MIB - 1)]
        state = [torch.from_numpy(held[low:end]) for low, end in reversed(ends)]
        staged = Stager(share_memory=share).stage(state).state
        assert all(torch.equal(x, y) for x, y in zip(staged, state, strict=True))
        low, high = [x.data_ptr() for x in staged], [x.data_ptr() + x.numel() for x in staged]
        for one in range(len(ends)):
            for other in range(one):
                met = low[one] < high[other] and low[other] < high[one]
                tied = (
                    state[one].data_ptr() < state[other].data_ptr() + state[other].numel()
                    and state[other].data_ptr() < state[one].data_ptr() + state[one].numel()
                )
                assert met == tied
                if tied:
                    theirs = state[one].data_ptr() - state[other].data_ptr()
                    assert low[one] - low[other] == theirs


class TestLimit:
    def test_too_little_is_refused_before_anything_is_copied(self, uncollected: None) -> None:
        stager, state = Stager(max_memory="5MiB"), large(2)
        first = stager.stage(state)
        mark = first.state["w0"].data_ptr()
        with pytest.raises(RunError) as caught:
            stager.stage(state)
        (problem,) = caught.value.diagnostics
        assert problem.code == "M919"
        assert f"a snapshot of {4 * MIB} bytes does not fit" in problem.message
        assert problem.notes == (f"snapshot 1 holds {4 * MIB} bytes",)
        assert stager.nbytes == 4 * MIB
        first.release()
        assert stager.stage(state).state["w0"].data_ptr() == mark

    def test_what_is_free_makes_room(self, uncollected: None) -> None:
        stager = Stager(max_memory=5 * MIB)
        stager.stage(large(2))
        assert stager.stage(large(1, 3 * MIB)).state["w0"].eq(0).all()
        assert stager.nbytes <= 5 * MIB

    def test_one_tensor_taken_out_is_said(self, uncollected: None) -> None:
        stager, state = Stager(max_memory=5 * MIB), large(2)
        taken = stager.stage(state).state["w1"]
        with pytest.raises(RunError, match="are in use") as caught:
            stager.stage(large(2, int(2.2 * MIB)))
        assert caught.value.diagnostics[0].notes == (f"snapshot 1 holds {2 * MIB} bytes",)
        del taken
        stager.stage(state)

    def test_what_is_free_is_said_to_be_in_use_by_nobody(self, uncollected: None) -> None:
        stager, state = Stager(max_memory=7 * MIB), large(2)
        taken = stager.stage(state).state["w1"]
        more = {"w0": state["w0"], "new": torch.ones(MIB)}
        with pytest.raises(RunError, match="are in use") as caught:
            stager.stage(more)
        (problem,) = caught.value.diagnostics
        assert f"a snapshot of {6 * MIB} bytes" in problem.message
        assert f"of which {2 * MIB} are in use" in problem.message
        assert problem.notes == (f"snapshot 1 holds {2 * MIB} bytes",)
        del taken
        stager.stage(more)

    def test_what_lies_idle_is_given_up_where_the_system_has_no_more(self) -> None:
        assert in_a_process(_idle) == [0.0, 300 * MIB]

    @pytest.mark.parametrize("share", [False, True])
    def test_no_memory_of_the_system_is_a_diagnostic(self, share: bool, tmp_path: Path) -> None:
        """In a process of its own, whose address space and files are limited."""
        answers = in_a_process(_limited, share)
        assert answers == ["M919", 0, "M919", 1.0]


def _idle() -> list[Any]:
    before, after, stager = large(1, 256 * MIB), large(1, 300 * MIB), Stager()
    stager.stage(before)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (used + 100 * MIB, hard))
    return [stager.stage(after)["w0"][-1].item(), stager.nbytes]


def _limited(share: bool) -> list[Any]:
    state, more, stager = large(2), large(1, 512 * MIB), Stager(share_memory=share)
    stager.stage(state)
    what = resource.RLIMIT_FSIZE if share else resource.RLIMIT_AS
    used = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    before = resource.getrlimit(what)
    resource.setrlimit(what, (64 * MIB if share else used + 64 * MIB, before[1]))
    said: list[Any] = []
    for _ in range(2):
        try:
            stager.stage(more)
        except RunError as error:
            said.append(error.diagnostics[0].code)
        if len(said) == 1:
            said.append(stager.nbytes)
    return [*said, stager.stage(state).state["w1"][0].item()]


def in_a_process(function: Any, *arguments: Any) -> Any:
    """The answer of a function in a forked child."""
    context = multiprocessing.get_context("fork")
    into, back = context.Pipe(duplex=False)

    def run() -> None:
        # the threads of torch's operations are the parent's
        torch.set_num_threads(1)
        try:
            back.send(function(*arguments))
        except BaseException as error:  # noqa: BLE001 - the parent says it
            back.send(error)

    with warnings.catch_warnings():
        # the child takes no lock of a thread that it has not
        warnings.simplefilter("ignore", DeprecationWarning)
        child = context.Process(target=run)
        child.start()
    assert into.poll(HANG), "the child does not answer"
    answer = into.recv()
    child.join(HANG)
    if isinstance(answer, BaseException):
        raise answer
    return answer


class TestProcesses:
    @pytest.mark.parametrize("share", [False, True])
    def test_a_forked_child_has_memory_of_its_own(self, share: bool) -> None:
        stager, state = Stager(share_memory=share), large(2)
        kept = stager.stage(state)
        stager.stage(large(3))

        def child() -> Any:
            mine = stager.stage({"w0": torch.full((MIB,), 8.0)}).state["w0"]
            seen = kept.state["w1"][0].item(), mine[0].item(), stager.nbytes == pages(4 * MIB)
            stager.close()
            return seen

        assert in_a_process(child) == (1, 8, True)
        assert [x[0].item() for x in kept.state.values()] == [0, 1]
        assert stager.stage(state).state["w1"].eq(1).all()

    def test_a_forked_child_copies_without_the_threads_of_torch(self) -> None:
        """These are the parent's, and a copy that is handed to them never ends."""
        code = """if True:
            import os, sys, torch, migrate

            torch.set_num_threads(2)
            large = torch.ones(1 << 22)
            large.mul_(2)  # the threads are there now
            stager = migrate.Stager()
            child = os.fork()
            if not child:
                made = stager.stage({"w": large})["w"]
                os._exit(0 if made.data_ptr() != large.data_ptr() and bytes(
                    made.untyped_storage()[:8]) == bytes(large.untyped_storage()[:8]) else 3)
            sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """
        run = subprocess.run([sys.executable, "-c", code], timeout=HANG, check=False)
        assert run.returncode == 0

    def test_a_forked_child_closes_without_the_jobs_of_its_parent(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        go = threading.Event()

        def write(*given: Any) -> Any:
            assert go.wait(2 * HANG)
            return write_here(*given)

        monkeypatch.setattr("migrate.staging.stager.write_here", write)
        stager = Stager()
        job = stager.stage({"w": torch.ones(3)}).save_async(tmp_path / "out")
        try:
            assert in_a_process(stager.close) is None
        finally:
            go.set()
        job.result(HANG)

    @pytest.mark.parametrize("share", [False, True])
    def test_a_forked_child_saves_what_it_staged_and_nothing_of_its_parent(
        self, share: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Whose writer is busy: in the child no thread would ever come to the job."""
        go = threading.Event()

        def write(*given: Any) -> Any:
            assert go.wait(2 * HANG)
            return write_here(*given)

        monkeypatch.setattr("migrate.staging.stager.write_here", write)
        stager = Stager(share_memory=share)
        snapshot = stager.stage({"w": torch.ones(3)})
        migration = snapshot.migrate()
        job, ended = snapshot.save_async(tmp_path / "out"), snapshot.save_async(tmp_path / "no")
        ended.cancel()

        def child() -> Any:
            go.set()
            asked = (
                lambda: snapshot.save_async(tmp_path / "a"),
                lambda: snapshot.save(tmp_path / "a"),
                lambda: migration.save_async(tmp_path / "a"),
                lambda: snapshot.migrate().save(tmp_path / "a"),
                job.result,
                job.exception,
                job.cancel,
            )
            said = []
            for one in asked:
                with pytest.raises(QuestionError) as caught:
                    one()
                said += [problem.code for problem in caught.value.diagnostics]
            mine = stager.stage({"w": torch.full((3,), 5.0)}).save_async(tmp_path / "mine")
            return said, snapshot["w"].tolist(), mine.result(HANG).path

        try:
            assert in_a_process(child) == (["M981"] * 7, [1, 1, 1], str(tmp_path / "mine"))
        finally:
            go.set()
        assert job.result(HANG).path == str(tmp_path / "out")
        assert sorted(os.listdir(tmp_path)) == ["mine", "out"]
        assert load_file(tmp_path / "mine" / "model.safetensors")["w"].tolist() == [5, 5, 5]
        assert in_a_process(job.result).path == str(tmp_path / "out")

    def test_threads_stage_at_once(self) -> None:
        stager = Stager()
        wrong: list[str] = []

        def work(number: int) -> None:
            state = {"large": torch.full((MIB,), float(number)), "small": torch.full((5,), -1.0)}
            for step in range(8):
                state["small"].fill_(number * 100 + step)
                staged = stager.stage(state).state
                other = stager.stage({"large": state["small"]})
                right = (
                    staged["large"].eq(number).all()
                    and staged["small"].eq(number * 100 + step).all()
                )
                if not right:
                    wrong.append(f"{number} {step}")
                other.release()

        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(HANG)
        assert not any(thread.is_alive() for thread in threads)
        assert not wrong
        stager.trim()
        assert stager.nbytes == 0


class TestPool:
    def test_a_failure_while_mapping_takes_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import migrate.staging.memory as memory

        pool, made = BlockPool(), []
        real = memory.MappedBlock

        def third_is_interrupted(size: int, **more: Any) -> Any:
            if len(made) == 2:
                raise KeyboardInterrupt
            made.append(real(size, **more))
            return made[-1]

        monkeypatch.setattr(memory, "MappedBlock", third_is_interrupted)
        with pytest.raises(KeyboardInterrupt):
            pool.borrow([Want(MIB)] * 3)
        assert pool.nbytes == 0
        assert all(block.memory.closed for block in made)

    def test_blocks_are_whole_pages(self) -> None:
        pool = BlockPool()
        views, starts = pool.borrow([Want(1), Want(PAGE), Want(PAGE + 1)])
        assert [len(view) for view in views] == [PAGE, PAGE, 2 * PAGE]
        assert all(start % PAGE == 0 for start in starts)


def private(pid: int | None = None) -> int:
    """Bytes of memory that belong to a process alone, huge pages among them."""
    text = Path(f"/proc/{pid or os.getpid()}/smaps_rollup").read_text()
    kinds = ("Private_Dirty", "Private_Clean")
    return sum(int(x.split()[1]) for x in text.splitlines() if x.startswith(kinds)) * 1024


class TestLeaks:
    def test_private_memory_is_what_is_staged_and_goes_back(self, uncollected: None) -> None:
        stager, state, small = Stager(), large(4, 32 * MIB), {"x": torch.ones(3)}
        state["views"] = state["w0"][::2]
        stager.stage(small)
        before = private()
        snapshots = [stager.stage(state) for _ in range(2)]
        staged = sum(snapshot.nbytes for snapshot in snapshots)
        assert staged == 2 * 4 * 32 * MIB
        assert private() - before <= staged * 1.05
        del snapshots
        for _ in range(2):
            stager.stage(small)
        assert private() - before <= 2 * MIB

    @pytest.mark.parametrize(("apart", "saves"), thorough([(False, 60), (True, 30)]))
    def test_saves_leave_nothing_behind(self, apart: bool, saves: int, tmp_path: Path) -> None:
        """Neither descriptors, threads, processes, mappings nor objects: fewer than one a save."""
        stager = Stager(process=apart)
        state = {"w": torch.ones(MIB // 2), "small": torch.ones(3), "step": 0}
        counts: list[dict[str, int]] = []
        for step in range(10 + saves):
            if step in (10, 9 + saves):
                gc.collect()
                counts.append(held_now(stager))
            state["step"] = step
            snapshot = stager.stage(state)
            job = snapshot.save_async(tmp_path / f"{step}.safetensors", fsync=False)
            assert job.result(HANG).tensors == 2
            del snapshot, job
            (tmp_path / f"{step}.safetensors").unlink()
        before, after = counts
        assert after.pop("objects") - before.pop("objects") < saves // 2
        assert after == before
        stager.close()


def held_now(stager: Stager) -> dict[str, int]:
    """What a process has of everything that could be left behind."""
    thread = stager._writer._thread
    if thread is not None:
        # it may still be on its way out
        thread.join(HANG)
    tasks = Path("/proc/self/task").iterdir()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "children": sum(len((task / "children").read_text().split()) for task in tasks),
        "mappings": Path("/proc/self/maps").read_text().count("memfd:migrate-staging"),
        "blocks": len(stager._pool._blocks),
        "bytes": stager.nbytes,
        "objects": len(gc.get_objects()),
    }
