"""Rule files that were loaded before are not parsed again while their bytes are the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from migrate.core.errors import MigrateError, Report
from migrate.rules import loading
from migrate.rules.compiled import compile_file_once
from migrate.rules.loading import load_files, load_files_once

TEXT = "id: a/b/c\ntitle: t\nlineage: a\nedge: [x, y]\nrules: [{name: r, from: k, to: l}]\n"


def test_a_file_is_parsed_again_when_its_bytes_change(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(TEXT)
    (first,) = load_files_once([path])
    (again,) = load_files_once([str(path)])
    assert again is first
    assert first.hash == load_files([path])[0].hash
    path.write_text(TEXT.replace("to: l", "to: m"))
    (other,) = load_files_once([path])
    assert other.hash != first.hash
    path.write_text(TEXT)
    assert load_files_once([path])[0].model == first.model


def test_a_file_that_is_written_to_while_it_is_read_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(TEXT)

    def written_to(paths: list[Path]) -> object:
        loaded = load_files(paths)
        path.write_text(TEXT.replace("to: l", "to: m"))
        return loaded

    monkeypatch.setattr(loading, "load_files", written_to)
    load_files_once([path])
    monkeypatch.undo()
    assert load_files_once([path])[0].hash == load_files([path])[0].hash


def test_what_is_wrong_is_said_every_time(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(TEXT.replace("title: t\n", ""))
    for _ in range(2):
        with pytest.raises(MigrateError, match="M101"):
            load_files_once([path])
    with pytest.raises(MigrateError, match="M108"):
        load_files_once([tmp_path / "nothing.yaml"])
    path.write_text(TEXT.replace("to: l", 'to: "{j}"'))
    (loaded,) = load_files_once([path])
    for _ in range(2):
        report = Report()
        compile_file_once(loaded, report)
        assert [found.code for found in report.diagnostics] == ["M203"]
