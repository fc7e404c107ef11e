"""The rules that ship, as they were packaged, against what reading their files gives."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from migrate.core.errors import Report
from migrate.ops.base import OpCall
from migrate.rules import files, packaged, packs
from migrate.rules.compiled import compile_file
from migrate.rules.files import NAME, RulePart
from migrate.rules.loading import load_files
from migrate.rules.packs import Packs, load_edge, read_lineage

HOMES = sorted(path.parent for path in files.shipped_folder().glob("*/layouts.yaml"))


def same(made: Any, model: Any) -> bool:
    """Whether what was packaged says what the model says: fields, properties and types, all the way
    down.
    """
    if isinstance(model, BaseModel):
        names = [name for name in type(model).model_fields if name != "tests"]
        names += [name for name, held in vars(type(model)).items() if isinstance(held, property)]
        return isinstance(made, RulePart) and all(
            same(getattr(made, name), getattr(model, name)) for name in names
        )
    if type(made) is not type(model):
        return False
    if isinstance(model, dict):
        return list(made) == list(model) and all(same(made[key], model[key]) for key in model)
    if isinstance(model, OpCall):
        return made.op == model.op and same(made.args, model.args)
    if isinstance(model, (tuple, list)):
        return len(made) == len(model) and all(map(same, made, model))
    return bool(made == model)


@pytest.mark.parametrize("home", HOMES, ids=lambda home: home.name)
def test_what_was_packaged_is_what_the_files_say(home: Path) -> None:
    report = Report()
    written, ready = read_lineage(home.name, home, report), files.shipped_lineage(home)
    assert not report.diagnostics
    assert written is not None
    assert ready == written, f"{home / NAME} is not current: python -m migrate.rules.packaged"
    for edge in written.edges:
        for read, file in zip(load_files(edge.files), load_edge(edge.files), strict=True):
            assert type(file.model) is RulePart
            assert same(file.model, read.model)
            assert file.hash == read.hash == file.sealed
            # every place that a message or a plan names
            one, other = (compile_file(each, Report()) for each in (read, file))
            assert [rule.path for rule in one[0]] == [rule.path for rule in other[0]]
            for path in [p for p in dict(read.document.places()[0]) if p[:1] != ("tests",)]:
                assert file.span(*path) == read.span(*path)
                assert file.key_span(*path) == read.key_span(*path)


def test_the_files_are_as_they_would_be_made() -> None:
    assert [str(place) for place, _ in packaged.differences()] == [], (
        "python -m migrate.rules.packaged"
    )


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A lineage of a copy of the rules that ship, in its place."""
    folder = tmp_path / "shipped"
    shutil.copytree(files.shipped_folder() / "hf-mixtral", folder / "hf-mixtral")
    monkeypatch.setattr(files, "shipped_folder", lambda: folder)
    monkeypatch.setattr(packs, "shipped_folder", lambda: folder)
    monkeypatch.setattr(packs, "_scan", lambda: iter(()))
    return folder / "hf-mixtral"


def ready(home: Path) -> bool:
    lineage = files.shipped_lineage(home)
    paths = sorted(home.rglob("v5/*.yaml"))
    assert (lineage is None) == (files.shipped_files(paths) is None)
    return lineage is not None


def test_it_counts_only_while_it_fits_the_files_that_are_there(shipped: Path) -> None:
    assert ready(shipped)
    (rules,) = shipped.rglob("v5/*.yaml")
    kept = {path: path.read_bytes() for path in (rules, shipped / "layouts.yaml", shipped / NAME)}
    for path in (rules, shipped / "layouts.yaml"):
        path.write_bytes(kept[path] + b"# more\n")
        assert not ready(shipped)
        path.write_bytes(kept[path])
    (shipped / "v5" / "more.yaml").write_bytes(kept[rules])
    assert not ready(shipped)
    (shipped / "v5" / "more.yaml").unlink()
    for text in (
        b"",
        b"{}",
        b"[]",
        b"{",
        kept[shipped / NAME].replace(b'["form", 3]', b'["form", 2]'),
        b'{"unknown": []}',
        kept[shipped / NAME] + b"[]\n",
        b"\xff",
    ):
        (shipped / NAME).write_bytes(text)
        assert not ready(shipped), text
    (shipped / NAME).unlink()
    assert not ready(shipped)
    # and what does not count is read as anybody's is
    (shipped / "rules.lock").unlink(missing_ok=True)
    rules.write_bytes(kept[rules].replace(b"dim: 1", b"dim: 0"))
    (shipped / NAME).write_bytes(kept[shipped / NAME])
    (edge,) = Packs((), scan=False).load_lineage("hf-mixtral").edges
    (file,) = load_edge(edge.files)
    assert file.sealed == ""
    assert [step.args.get("dim") for step in file.model.rules[0].via] == [None, 0]


def test_what_was_read_is_kept_until_something_there_changes(
    shipped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # written to this moment, nothing is kept
    assert files.shipped_lineage(shipped) is not files.shipped_lineage(shipped)
    monkeypatch.setattr(files, "_SOON", -(10**12))
    assert ready(shipped)
    kept = files.shipped_lineage(shipped)
    assert files.shipped_lineage(shipped) is kept
    (rules,) = shipped.rglob("v5/*.yaml")
    text, times = rules.read_bytes(), rules.stat()

    def tick() -> None:
        """Until the clock of the file system has moved on."""
        probe = shipped.parent / "probe"
        probe.write_bytes(b"")
        began = probe.stat().st_ctime_ns
        while probe.stat().st_ctime_ns == began:
            probe.write_bytes(b"x")

    tick()
    rules.write_bytes(text.replace(b"dim: 1", b"dim: 0"))
    os.utime(rules, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert not ready(shipped)
    rules.write_bytes(text)
    assert ready(shipped)
    for change in (
        lambda: (shipped / "v5" / "more.yaml").write_bytes(text),
        (shipped / "v5" / "more.yaml").unlink,
        lambda: (shipped / "v6").mkdir(),
        lambda: (shipped / "v6" / "more.yaml").write_bytes(text),
    ):
        before = files.shipped_lineage(shipped)
        tick()
        change()
        assert files.shipped_lineage(shipped) is not before or before is None
    assert not ready(shipped)


def test_it_is_trusted_nowhere_but_among_the_rules_that_ship(shipped: Path, tmp_path: Path) -> None:
    other = tmp_path / "rules" / "hf-mixtral"
    shutil.copytree(shipped, other)
    text = (other / NAME).read_text()
    (other / NAME).write_text(text.replace("gate_up_proj", "something_else"))
    found = packs.find_packs(tmp_path / "rules", cwd=tmp_path)
    (edge,) = found.load_lineage("hf-mixtral").edges
    (file,) = load_edge(edge.files)
    assert "something_else" not in str(file.model.rules[0].targets)
    # a link into the rules that ship is no part of them
    assert files.shipped_lineage(other) is None


def test_a_field_that_it_does_not_know_is_named() -> None:
    (path,) = (files.shipped_folder() / "hf-mixtral").rglob("v5/*.yaml")
    (file,) = load_edge([path])
    with pytest.raises(AttributeError, match=r"python -m migrate\.rules\.packaged"):
        file.model.nothing


def test_it_is_data_alone() -> None:
    for home in HOMES:
        tags: set[str] = set()
        for line in (home / NAME).read_bytes().splitlines():
            json.loads(line, object_hook=lambda found, tags=tags: tags.update(found))
        assert tags <= {"map", "tuple", "part", "step", "Layout", "LayoutGrid", "Detect"}
