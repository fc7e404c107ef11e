"""What a worker says that does not see what is seen where a run was started. Needs no Ray."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

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
