"""Live modules and snapshots of a training state that are saved to stores."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from store_servers import S3
from work import HANG
from written_stores import held, uploads

import migrate
from migrate.core.errors import MigrateError
from migrate.source.stores.system_output import HeldFiles
from migrate.staging import jobs

fsspec = pytest.importorskip("fsspec")

import stored_systems  # noqa: E402

pytestmark = pytest.mark.servers
RULE = """\
id: t/rename
title: t
lineage: t
edge: [a, b]
rules: [{name: r, from: "{k...}", to: "new.{k}"}]
"""
SECRET = "planted-secret"
# a child process would see file systems of its own, where they are in memory
WRITTEN_BY = [("s3", False), ("s3", True), ("memory", False), ("gs", False)]


class Store:
    """Where a test saves: `at` is a URL. What is there, shown or not, and what fails."""

    def __init__(self, at: str, s3: S3 | None, name: str) -> None:
        self.at, self.s3, self._name = at, s3, name

    def held(self) -> dict[str, bytes]:
        if self.s3 is None:
            return stored_systems.held(fsspec.filesystem(self.at.partition(":")[0]), self.at)
        assert not uploads(self.s3, self._name)
        return held(self.s3, f"{self._name}/")


@pytest.fixture(params=["s3", "memory", "gs"])
def store(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Store]:
    if request.param == "s3":
        server = request.getfixturevalue("s3")
        yield Store(f"s3://bucket/{tmp_path.name}", server, tmp_path.name)
        return
    registry = import_module("fsspec.registry")._registry
    monkeypatch.setitem(registry, "gs", stored_systems.Closing)
    store = Store(f"{request.param}://{tmp_path.name}/deep", None, tmp_path.name)
    yield store
    if store.held():
        fsspec.filesystem(request.param).rm(store.at, recursive=True)


@pytest.fixture
def rule(tmp_path: Path) -> Path:
    place = tmp_path / "rename.yaml"
    place.write_text(RULE)
    return place


def state(fill: float = 1.0) -> dict[str, Any]:
    return {"model": {"a": torch.full((300_000,), fill), "b": torch.arange(3)}, "step": 7}


def codes(call: Callable[[], Any]) -> tuple[set[str], str]:
    with pytest.raises(MigrateError) as caught:
        call()
    assert SECRET not in str(caught.value)
    return {d.code for d in caught.value.diagnostics}, str(caught.value)


@pytest.mark.parametrize("name", ["new", "new.safetensors", "new.pt"])
def test_a_module_is_saved_to_a_store(store: Store, rule: Path, tmp_path: Path, name: str) -> None:
    model = torch.nn.Linear(30, 20)
    report = migrate.save(model, f"{store.at}/{name}", rules=[rule])
    assert report.path == f"{store.at}/{name}"
    assert report.store.copied == 0
    migrate.save(model, tmp_path / name, rules=[rule])
    here = tmp_path / name
    files = stored_systems.tree(here) if here.is_dir() else {"": here.read_bytes()}
    assert store.held() == {f"{name}/{inner}".rstrip("/"): d for inner, d in files.items()}
    said, text = codes(lambda: migrate.save(model, f"{store.at}/{name}"))
    assert said == {"M904"}
    assert f"{store.at}/{name} already exists" in text
    assert migrate.diff(f"{store.at}/{name}", here).equal


@pytest.mark.parametrize(("store", "apart"), WRITTEN_BY, indirect=["store"])
def test_a_snapshot_is_saved_to_a_store(
    store: Store, rule: Path, tmp_path: Path, apart: bool
) -> None:
    stager = migrate.Stager(process=apart)
    given = state()
    snapshot = stager.stage(given)
    migration = snapshot.migrate(rules=rule, at="model")
    saved = {
        name: [one.save_async(f"{at}/{name}") for at in (store.at, tmp_path)]
        for name, one in {"step.pt": snapshot, "new": migration, "new.pt": migration}.items()
    }
    given["model"]["a"].zero_()
    for name, (there, here) in saved.items():
        assert there.path == f"{store.at}/{name}"
        report = there.result(HANG)
        assert report.path == there.path
        assert report.files == here.result(HANG).files
        assert there.progress[0] == there.progress[1] > 0
    stager.close()
    found = store.held()
    loaded = torch.load(io.BytesIO(found["step.pt"]), weights_only=True)
    assert torch.equal(loaded["model"]["a"], state()["model"]["a"])
    for name in saved:
        assert migrate.diff(f"{store.at}/{name}", tmp_path / name).equal


def test_what_is_in_the_memory_of_a_process_is_not_written_by_another(tmp_path: Path) -> None:
    with migrate.Stager(process=True) as stager:
        snapshot = stager.stage(state())
        said, text = codes(lambda: snapshot.save_async(f"memory://{tmp_path.name}/step.pt"))
    assert (said, "process=True" in text) == ({"M115"}, True)


def test_what_is_not_free_is_refused_by_save_async_itself(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()

    def write(work: Any, progress: Any, stop: Any) -> Any:
        assert go.wait(HANG)
        return jobs.write_here(work, progress, stop)

    monkeypatch.setattr("migrate.staging.stager.write_here", write)
    stager = migrate.Stager()
    snapshot = stager.stage(state())
    job = snapshot.save_async(f"{store.at}/new")
    said, text = codes(lambda: snapshot.save_async(f"{store.at}/new"))
    assert (said, "another job" in text) == ({"M904"}, True)
    go.set()
    job.result(HANG)
    before = store.held()
    said, text = codes(lambda: snapshot.save_async(f"{store.at}/new"))
    assert (said, "already exists" in text) == ({"M904"}, True)
    said, _ = codes(lambda: snapshot.save_async("hf://org/model"))
    assert said == {"M115"}
    # what a trainer that was killed has left
    left = f"{store.at}/out.migrate-partial"
    if store.s3 is not None:
        body = b'{"kind": "journal"}'
        key = f"{left.removeprefix('s3://bucket/')}/journal.json"
        store.s3.client.put_object(Bucket="bucket", Key=key, Body=body)
    else:
        system = fsspec.filesystem(store.at.partition(":")[0])
        system.pipe_file(f"{left}/{'0' * 32}/model.safetensors", b"half")
    said, text = codes(lambda: snapshot.save_async(f"{store.at}/out"))
    assert (said, f"migrate clean {store.at}/out" in text) == ({"M911"}, True)
    assert store.held().items() >= before.items()
    stager.close()


@pytest.mark.parametrize("when", ["in the middle", "when it appears"])
def test_of_a_save_that_fails_nothing_is_left_and_a_retry_succeeds(
    store: Store, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stager = migrate.Stager()
    snapshot = stager.stage(state())
    late = when == "when it appears"
    with monkeypatch.context() as patched:
        if store.s3 is not None:
            # behind the first shard the stamp appears
            store.s3.spoil(fail="PUT .*history.json" if late else "PUT .*partNumber")
        else:
            patched.setattr(HeldFiles, "appear" if late else "write", broken())
        job = snapshot.save_async(f"{store.at}/new", max_shard_size="1MB")
        error = job.exception(HANG)
    assert isinstance(error, MigrateError), error
    assert [d.code for d in error.diagnostics] == ["M922" if store.s3 is None else "M969"]
    assert f"nothing was published at {store.at}/new" in str(error)
    assert "resume" not in str(error)
    assert SECRET not in str(error)
    if store.s3 is not None:
        store.s3.spoil()
    assert store.held() == {}
    assert snapshot.save_async(f"{store.at}/new").result(HANG).path == f"{store.at}/new"
    stager.close()


def broken() -> Callable[..., None]:
    """A method that works once."""
    calls: list[Any] = [HeldFiles.appear, HeldFiles.write]

    def once(files: HeldFiles, name: str, *more: Any) -> None:
        call = calls[bool(more)]
        if call is None:
            raise MemoryError
        calls[bool(more)] = None
        call(files, name, *more)

    return once


@pytest.mark.parametrize(("store", "apart"), WRITTEN_BY, indirect=["store"])
def test_of_a_save_that_is_cancelled_nothing_is_left(
    store: Store, apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go = threading.Event(), threading.Event()

    def told(self: Any, done: int, total: int) -> None:
        begun.set()
        assert go.wait(HANG)

    stager = migrate.Stager(process=apart)
    with monkeypatch.context() as patched:
        if apart:
            # the child is told to end when it waits for the answer to this
            store.s3.spoil(hold="PUT .*history.json")
        else:
            patched.setattr(jobs.Job, "_told", told)
        job = stager.stage(state()).save_async(f"{store.at}/new")
        if apart:
            store.s3.wait_until_held()
        else:
            assert begun.wait(HANG)
        assert job.cancel()
        go.set()
        with pytest.raises(CancelledError):
            job.result(HANG)
    if store.s3 is not None:
        store.s3.spoil()
    assert store.held() == {}
    stager.close()


def test_no_message_and_no_answer_has_the_secrets_of_a_url(rule: Path, tmp_path: Path) -> None:
    url = f"memory://user:{SECRET}@{tmp_path.name}/new"
    stager = migrate.Stager()
    snapshot = stager.stage(state())
    job = snapshot.save_async(url)
    report = job.result(HANG)
    for text in (job.path, repr(job), repr(report), str(report.to_json())):
        assert SECRET not in text
    said, _ = codes(lambda: snapshot.save_async(url))
    assert said == {"M904"}
    stager.close()
    fsspec.filesystem("memory").rm(f"/user:{SECRET}@{tmp_path.name}", recursive=True)
