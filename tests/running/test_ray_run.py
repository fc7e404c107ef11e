"""What a worker says that does not see what is seen where a run was started. Needs no Ray."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from commandline import safetensors

from migrate import formats
from migrate.core.errors import MigrateError
from migrate.planning.request import Request
from migrate.running import ray_run
from migrate.running.ranks import facts_of
from migrate.running.resources import RunOptions


@pytest.fixture
def order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ray_run._Order:
    monkeypatch.chdir(tmp_path)
    safetensors(tmp_path / "in.safetensors", {"a": ("U8", [16])})
    opened = partial(formats.open, str(tmp_path / "in.safetensors"))
    source = opened()
    facts = facts_of(source.identities(), "d")
    source.close()
    (tmp_path / "probe").write_text("seen")
    return ray_run._Order(
        str(tmp_path), False, opened, Request(), False, RunOptions(), "cpu", "out", 1, None, facts
    )


def looked(order: ray_run._Order, probe: str = "probe", written: str = "seen") -> str | None:
    found = ray_run.look(order, probe, written)
    return None if found is None else found.what


def test_a_worker_that_sees_the_same_says_nothing(order: ray_run._Order) -> None:
    assert looked(order) is None


def test_a_worker_that_sees_another_file_under_the_name_of_the_source(
    order: ray_run._Order, tmp_path: Path
) -> None:
    path = tmp_path / "in.safetensors"
    copy = tmp_path / "copy"
    copy.write_bytes(path.read_bytes())
    os.replace(copy, path)
    found = looked(order)
    assert found is not None
    assert found.startswith("sees another source: in.safetensors: inode ")
    path.unlink()
    assert str(looked(order)).startswith("cannot open the source: ")


def test_a_worker_that_does_not_see_what_was_written(order: ray_run._Order) -> None:
    assert str(looked(order, probe="nowhere")).startswith("does not see what was just written")
    assert str(looked(order, written="other")).startswith("sees another file under the name probe")
    away = replace(order, home="/nowhere")
    assert str(looked(away)).startswith("cannot enter /nowhere: no such file")


def test_a_worker_of_another_version(order: ray_run._Order) -> None:
    other = replace(order, facts={**order.facts, "version": "9.9"})
    found = str(looked(other))
    assert found.endswith("the process that started the run is migrate 9.9")


@pytest.mark.parametrize("of", ["source", "output"])
def test_a_worker_without_an_extra_names_it(
    order: ray_run._Order, monkeypatch: pytest.MonkeyPatch, of: str
) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    if of == "source":
        other, probe = replace(order, opened=partial(formats.open, "s3://bucket/x")), "probe"
    else:
        other, probe = replace(order, out="s3://bucket/x"), None
    found = ray_run.look(other, probe, "seen")
    assert found is not None
    assert "which is not installed" in found.what
    assert found.help == "on all machines of the cluster: pip install 'ckpt-migrate[s3]'"
    with pytest.raises(MigrateError) as caught:
        ray_run._refuse_differing([ray_run.Differing("one differs"), found])
    assert [(d.code, d.help) for d in caught.value.diagnostics] == [("M974", found.help)]


class Started:
    """What stands for Ray: a cluster with so much, or a start that fails."""

    exceptions = SimpleNamespace(RayError=RuntimeError)

    def __init__(self, failing: Exception | None = None, **resources: float) -> None:
        self.resources, self.failing, self.ended = resources, failing, False

    def is_initialized(self) -> bool:
        return False

    def init(self, **_: object) -> None:
        if self.failing is not None:
            raise self.failing

    def cluster_resources(self) -> dict[str, float]:
        return self.resources

    def shutdown(self) -> None:
        self.ended = True


def connected(monkeypatch: pytest.MonkeyPatch, ray: Started, at: str, **needs: int) -> str:
    """What is said where a cluster cannot be worked with; nothing where it can."""
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    try:
        with ray_run._connected(ray_run.Cluster(at, "cpu"), needs) as found:
            assert found is ray
    except MigrateError as error:
        return str(error)
    return ""


def test_a_cluster_of_this_machine_without_room_for_a_worker_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would be waited for without an end, since it does not grow."""
    small = Started(CPU=2.0)
    said = connected(monkeypatch, small, "ray", num_cpus=3)
    assert "error[M985]: this machine has no room for a worker of 3 cores\n" in said
    assert small.ended
    said = connected(monkeypatch, Started(CPU=2.0), "ray", num_cpus=1, num_gpus=1)
    assert "a worker of 1 core and a GPU" in said
    assert 'device="cpu"' in said
    assert not connected(monkeypatch, Started(CPU=2.0), "ray", num_cpus=2)
    assert not connected(monkeypatch, Started(CPU=2.0, GPU=1.0), "ray", num_cpus=2, num_gpus=1)
    # one that others have started may grow
    assert not connected(monkeypatch, Started(CPU=2.0), "ray://head:10001", num_cpus=3)


def test_whatever_ray_raises_when_it_cannot_start_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    late = Started(Exception("The current node timed out during startup."))
    said = connected(monkeypatch, late, "ray", num_cpus=1)
    assert "error[M985]: cannot start a cluster on this machine" in said
    assert "timed out during startup" in said


class Dealt:
    """What stands for Ray where parts are handed out: each is done when it was begun."""

    exceptions = SimpleNamespace(RayError=RuntimeError)

    def __init__(self) -> None:
        self.begun: list[int] = []

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 2.0}

    def remote(self, _: object) -> SimpleNamespace:
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=self.begin))

    def begin(self, _: object, number: int, second: bool) -> int:
        self.begun.append(number)
        return number

    def wait(self, references: list[int], timeout: float) -> tuple[list[int], list[int]]:
        return references[:1], references[1:]

    def get(self, _: int, timeout: float | None = None) -> None:
        return None

    def cancel(self, _: int, force: bool) -> None:
        return None


def test_the_largest_file_is_begun_first(order: ray_run._Order) -> None:
    sizes, ray = [5, 40, 20, 1, 30, 10], Dealt()
    left: Any = SimpleNamespace(done=lambda of, digest: {4}, written=lambda part, second: None)
    files: Any = [
        [SimpleNamespace(name=str(number), of=None, nbytes=nbytes)]
        for number, nbytes in enumerate(sizes)
    ]
    told: list[tuple[int, int]] = []
    dealer = ray_run._Dealer(ray, replace(order, of=len(sizes)), left, files, {"num_cpus": 1})
    dealer.go(lambda done, total: told.append((done, total)))
    # the one of 30 bytes was done before
    assert ray.begun == [1, 2, 5, 0, 3]
    assert told == sorted(told)
    assert told[-1] == (sum(sizes), sum(sizes))


def test_nothing_is_published_while_a_worker_may_still_write(
    order: ray_run._Order, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_run, "ENDING", 0.0)
    left: Any = SimpleNamespace(state=lambda part, second: "is at work")
    dealer = ray_run._Dealer(Dealt(), replace(order, of=2), left, [[], []], {"num_cpus": 1})
    dealer.running = {7: (1, False)}
    with pytest.raises(MigrateError) as caught:
        dealer.end()
    assert [d.code for d in caught.value.diagnostics] == ["M985"]
    assert "the worker of part 1/2 was told to end, and may still be at work" in str(caught.value)
