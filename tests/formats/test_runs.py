"""Folders of training runs: which checkpoint in them is read, and what a tracker may not say."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import save_file
from torch import full

from migrate import formats
from migrate.core.errors import MigrateError
from migrate.formats._runs import TRACKER


def saved(folder: Path, value: int) -> None:
    folder.mkdir(parents=True)
    save_file({"w": full((2,), float(value))}, folder / "model.safetensors")


def run_folder(folder: Path, *iterations: int, tracker: str | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    for number in iterations:
        saved(folder / f"iter_{number:07}", number)
    if tracker is not None:
        (folder / TRACKER).write_text(tracker)
    return folder


def refused(path: Path, code: str, allow_links: bool = False) -> str:
    with pytest.raises(MigrateError) as caught:
        formats.open(path, allow_links)
    assert [d.code for d in caught.value.diagnostics] == [code], str(caught.value)
    (found,) = caught.value.diagnostics
    return "\n".join((found.message, *found.notes))


@pytest.mark.parametrize("text", ["10", "10\n", " 10 ", "0000010"])
def test_the_tracker_says_which_checkpoint_is_read(tmp_path: Path, text: str) -> None:
    run = run_folder(tmp_path / "run", 5, 10, 20, tracker=text)
    with formats.open(run) as source:
        assert source.path == str(run / "iter_0000010")
        assert source.index.files == ("model.safetensors",)
        (note,) = source.index.notes
    assert note == (
        "of iter_0000005, iter_0000010, iter_0000020 in the run folder, iter_0000010 is read: "
        f"which {TRACKER} names"
    )


def test_a_release_is_a_checkpoint_of_a_run(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", 5, tracker="release")
    saved(run / "release", 1)
    with formats.open(run) as source:
        assert source.path == str(run / "release")


def test_more_than_seven_digits_are_a_name_as_well(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", 123_456_789, tracker="123456789")
    with formats.open(run) as source:
        assert source.path == str(run / "iter_123456789")


def test_an_iteration_can_be_named_itself(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", 5, 10, tracker="10")
    with formats.open(run / "iter_0000005") as source:
        assert source.index.notes == ()


def test_a_single_iteration_needs_no_tracker(tmp_path: Path) -> None:
    with formats.open(run_folder(tmp_path / "run", 5)) as source:
        assert source.path.endswith("iter_0000005")
        assert "the only one" in source.index.notes[0]


def test_several_iterations_without_a_tracker_are_named(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", 5, 10)
    found = refused(run, "M915")
    assert TRACKER in found
    assert "iter_0000005, iter_0000010" in found


def test_weights_beside_iterations_are_the_checkpoint(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", 5, 10)
    save_file({"w": full((2,), 0.0)}, run / "model.safetensors")
    with formats.open(run) as source:
        assert source.path == str(run)


def test_a_number_without_its_folder_is_named_with_what_there_is(tmp_path: Path) -> None:
    found = refused(run_folder(tmp_path / "run", 5, 10, tracker="20"), "M908")
    assert "iter_0000020" in found
    assert "iter_0000005, iter_0000010" in found
    assert "release" in refused(run_folder(tmp_path / "none", tracker="release"), "M908")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "../other",
        "/etc",
        "iter_0000005",
        "-5",
        "5.0",
        "٥",  # a digit of another script
        "5\n10",
        "9" * 19,
        "9" * 5000,
        "release/../iter_0000005",
    ],
)
def test_a_tracker_may_say_nothing_else(tmp_path: Path, text: str) -> None:
    found = refused(run_folder(tmp_path / "run", 5, tracker=text), "M906")
    assert TRACKER in found
    # what is quoted is escaped once
    assert "\\\\" not in found
    assert len(found) < 400


def test_a_tracker_that_is_a_link_needs_permission(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", 5)
    (tmp_path / "elsewhere").write_text("5")
    (run / TRACKER).symlink_to(tmp_path / "elsewhere")
    assert TRACKER in refused(run, "M907")
    with formats.open(run, allow_links=True) as source:
        assert source.path.endswith("iter_0000005")


@pytest.mark.parametrize("allow_links", [False, True])
@pytest.mark.parametrize("tracker", ["7", None])
def test_an_iteration_that_is_a_link_or_a_file_is_none(
    tmp_path: Path, tracker: str | None, allow_links: bool
) -> None:
    saved(tmp_path / "elsewhere", 7)
    run = run_folder(tmp_path / "run", tracker=tracker)
    (run / "iter_0000007").symlink_to(tmp_path / "elsewhere")
    found = refused(run, "M907", allow_links)
    assert "iter_0000007" in found
    assert f"a link to {tmp_path / 'elsewhere'}" in found
    (run / "iter_0000007").unlink()
    (run / "iter_0000007").write_text("")
    assert "iter_0000007" in refused(run, "M907", allow_links)
