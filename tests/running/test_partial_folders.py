"""A partial folder is taken over only if it is what a run of migrate leaves behind."""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
from pathlib import Path

import pytest
from raw_files import describe, whole

from migrate.core.errors import MigrateError, QuestionError, RunError
from migrate.running import publish
from migrate.source.blobs import Identity

STOOD = {"raw-0.bin": Identity(1, 2, 3, 4, 5)}


def code(error: pytest.ExceptionInfo[MigrateError]) -> str:
    return error.value.diagnostics[0].code


def taken(out: Path, *, resume: bool = True) -> publish.Partial:
    """The partial folder of a small target of two files."""
    target = describe({key: whole(key, "uint8", (100,)) for key in ("a", "b")}, files=2)
    return publish.Partial(out, target, "plan-1", resume=resume, source=STOOD)


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    """A partial folder with both files and a claim."""
    made = taken(tmp_path / "out", resume=False)
    made.allocate()
    made.claim("out-0.bin", 0, 0, 108, "0" * 32)
    made.close()
    return made.folder


def refused(begun: Path, said: str) -> None:
    """Taking the folder over is refused with these words, and changes nothing in it."""
    before = [
        (p, s.st_ino, s.st_size, s.st_mtime_ns, s.st_nlink)
        for p in sorted(begun.rglob("*"))
        for s in [os.lstat(p)]
    ]
    with pytest.raises(QuestionError) as caught:
        taken(begun.with_name("out"))
    assert code(caught) == "M926"
    assert caught.value.diagnostics[0].message.startswith(said), caught.value.diagnostics[0].message
    assert "remove that folder" in (caught.value.diagnostics[0].help or "")
    assert before == [
        (p, s.st_ino, s.st_size, s.st_mtime_ns, s.st_nlink)
        for p in sorted(begun.rglob("*"))
        for s in [os.lstat(p)]
    ]


def test_a_partial_folder_of_our_own_is_taken_over(begun: Path) -> None:
    made = taken(begun.with_name("out"))
    made.close()
    assert made.claims == {("out-0.bin", 0): (0, 108, "0" * 32)}
    assert sorted(p.name for p in begun.iterdir()) == ["data", "journal.jsonl"]


@pytest.mark.parametrize("name", ["data/out-0.bin", "data/notes.txt", "journal.jsonl", "other"])
def test_a_hard_link_in_a_partial_folder_is_refused(begun: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "mine").write_text("mine")
    (begun / name).unlink(missing_ok=True)
    os.link(tmp_path / "mine", begun / name)
    refused(begun, f"{name} in {begun} has 2 names (hard links)")
    assert (tmp_path / "mine").read_text() == "mine"


@pytest.mark.parametrize("name", ["data/out-0.bin", "data/notes.txt", "journal.jsonl", "other"])
def test_a_pipe_in_a_partial_folder_is_refused_and_not_waited_for(begun: Path, name: str) -> None:
    (begun / name).unlink(missing_ok=True)
    os.mkfifo(begun / name)
    refused(begun, f"{name} in {begun} is a pipe")


@pytest.mark.parametrize("name", ["data/out-0.bin", "data/sub", "data/sub/notes.txt", "data"])
def test_a_link_in_a_partial_folder_is_refused(begun: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "mine").write_text("mine")
    if name == "data":
        shutil.rmtree(begun / "data")
    (begun / name).parent.mkdir(exist_ok=True)
    (begun / name).unlink(missing_ok=True)
    (begun / name).symlink_to(tmp_path / "mine" if "." in name else tmp_path)
    refused(begun, f"{name} in {begun} is a link")
    assert (tmp_path / "mine").read_text() == "mine"


def test_a_linked_journal_is_not_written_through(
    begun: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (begun / "journal.jsonl").rename(tmp_path / "mine")
    (begun / "journal.jsonl").symlink_to(tmp_path / "mine")
    before = (tmp_path / "mine").read_bytes()
    refused(begun, f"journal.jsonl in {begun} is a link")
    # one that is laid there after the look
    monkeypatch.setattr(publish.Partial, "_require_entries", lambda self: None)
    with pytest.raises(RunError) as caught:
        taken(tmp_path / "out")
    assert code(caught) == "M913"
    assert (tmp_path / "mine").read_bytes() == before


@pytest.mark.parametrize("journal", [True, False])
def test_a_folder_that_only_has_the_name_is_refused_with_all_that_is_in_it(
    begun: Path, journal: bool
) -> None:
    if not journal:
        (begun / "journal.jsonl").unlink()
        refused(begun, f"{begun} has no journal")
    (begun / "notes.txt").write_text("mine")
    refused(begun, f"notes.txt in {begun} is not something that a run makes")


@pytest.mark.parametrize(("name", "kind"), [("journal.jsonl", "a folder"), ("data", "a file")])
def test_a_journal_or_data_of_another_kind_is_refused(begun: Path, name: str, kind: str) -> None:
    if name == "data":
        shutil.rmtree(begun / name)
        (begun / name).write_text("mine")
    else:
        (begun / name).unlink()
        (begun / name).mkdir()
    refused(begun, f"{name} in {begun} is {kind}")


def test_a_folder_that_has_the_name_of_a_weight_file_is_named_with_the_way_out(
    begun: Path,
) -> None:
    path = begun / "data" / "out-1.bin"
    path.unlink()
    path.mkdir()
    made = taken(begun.with_name("out"))
    with pytest.raises(RunError) as caught:
        made.allocate()
    made.close()
    (found,) = caught.value.diagnostics
    assert (found.code, found.message) == ("M913", f"cannot open {path}: Is a directory")
    assert found.notes == (f"what was written so far is kept in {begun}",)
    assert "--resume" in (found.help or "") or "resume=True" in (found.help or "")
    path.rmdir()
    again = taken(begun.with_name("out"))
    again.allocate()
    again.close()
    assert path.is_file()


def test_what_a_kill_leaves_at_any_moment_is_taken_over(begun: Path) -> None:
    # between the folder and its journal, before its first line, before the data, at a probe
    for leave in ("nothing", "empty journal", "journal", "scratch-77"):
        shutil.rmtree(begun)
        if leave != "nothing":
            taken(begun.with_name("out"), resume=False).close()
        else:
            begun.mkdir()
        if leave == "empty journal":
            os.truncate(begun / "journal.jsonl", 0)
        if leave in ("journal", "empty journal"):
            (begun / "data").rmdir()
        if leave.startswith("scratch"):
            (begun / leave).touch()
        made = taken(begun.with_name("out"))
        made.discard()
        assert not begun.exists()
        taken(begun.with_name("out"), resume=False).close()


def test_files_of_somebody_else_are_not_removed_with_the_folder(
    begun: Path, tmp_path: Path
) -> None:
    (begun / "data" / "notes.txt").write_text("mine")
    made = taken(tmp_path / "out")
    made.allocate()
    made.discard()
    assert (begun / "data" / "notes.txt").read_text() == "mine"
    # nor where the target is one file
    single = describe({"a": whole("a", "uint8", (100,))}, folder=False)
    alone = publish.Partial(tmp_path / "one", single, "p", resume=False, source=STOOD)
    alone.allocate()
    descriptor = alone.open(single.files[0].name)
    os.pwrite(descriptor, single.files[0].header, 0)
    os.close(descriptor)
    alone.close()
    (alone.data / "notes.txt").write_text("mine")
    again = publish.Partial(tmp_path / "one", single, "p", resume=True, source=STOOD)
    with pytest.raises(RunError, match=r"did not write notes\.txt"):
        again.check()
    again.discard()
    assert (alone.data / "notes.txt").read_text() == "mine"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("name", ["", "journal.jsonl", "data", "data/out-1.bin", "data/other"])
def test_what_belongs_to_another_user_in_a_partial_folder_is_refused(
    begun: Path, name: str
) -> None:
    (begun / "data" / "other").write_text("x")
    os.chown(begun / name, 65534, 65534)
    where = f"{name} in " if name else ""
    refused(begun, f"{where}{begun} belongs to user 65534, and what is made here belongs to user 0")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.heavy
def test_a_partial_folder_of_another_user_is_named_to_one_who_may_not_write_in_it(
    begun: Path, tmp_path: Path
) -> None:
    begun.chmod(0o755)
    for folder in (tmp_path, *tmp_path.parents):
        if Path(tempfile.gettempdir()) in folder.parents:
            folder.chmod(0o755)
    with warnings.catch_warnings():
        # that other threads hold locks, which the child takes none of
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        try:
            os.setresuid(65534, 65534, 65534)
            with pytest.raises(QuestionError) as caught:
                taken(tmp_path / "out")
            said = f"{begun} belongs to user 0, and this run may not write in it"
            os._exit(0 if code(caught) == "M926" and said in str(caught.value) else 1)
        except BaseException:  # noqa: BLE001 - the child must not run the rest of the suite
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("how", ["lines", "one line", "sparse", "claims"])
def test_a_journal_larger_than_the_plan_explains_is_refused(begun: Path, how: str) -> None:
    journal = begun / "journal.jsonl"
    head, claim = journal.read_bytes().splitlines(keepends=True)
    if how == "sparse":
        os.truncate(journal, 1 << 40)
    else:
        journal.write_bytes(
            {"lines": b'{"x":1}\n' * 600, "one line": b"\0" * 5000, "claims": head + claim * 40}[
                how
            ]
        )
    refused(
        begun,
        f"journal.jsonl in {begun} has {journal.stat().st_size:,} bytes, and all runs of this "
        "plan together write at most",
    )
    # two files of one tile, each claimed sixteen times at most
    journal.write_bytes(head + claim * 32)
    taken(begun.with_name("out")).close()
