"""A target is whole or absent, whatever happens while it is written."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from disks import mounted
from marks import thorough
from raw_files import (
    MemoryBlob,
    RawBlob,
    RawSource,
    describe,
    random_raw,
    read_back,
    whole,
    write_source,
)
from work import HANG

from migrate.core.errors import CheckpointError, MigrateError, QuestionError, RunError
from migrate.planning.graph import ValueCheck
from migrate.running import publish, tiles
from migrate.running.resources import RunOptions

KEYS = [f"k{i}" for i in range(6)]
SHAPE = (700, 4096)


@pytest.fixture
def source(tmp_path: Path) -> RawSource:
    rng = np.random.default_rng(0)
    return write_source(
        tmp_path / "in", {k: ("uint8", random_raw(rng, "uint8", SHAPE)) for k in KEYS}, 2
    )


def outputs() -> dict:
    return {k: whole(k, "uint8", SHAPE) for k in KEYS}


def go(source: RawSource, out: Path, **options):
    target = describe(outputs(), files=options.pop("files", 2))
    more = {name: options.pop(name) for name in ("checks", "side_files") if name in options}
    digest = options.pop("digest", "plan-1")
    run = RunOptions(**{"fsync": False, **options})
    return tiles.write_target(outputs(), source, target, out, digest=digest, options=run, **more)


def content(source: RawSource) -> dict[str, bytes]:
    found = {}
    for key, at in source.index.tensors.items():
        buffer = bytearray(at.spec.nbytes)
        source.blobs[at.blob].readinto(at.offset, memoryview(buffer))
        found[key] = bytes(buffer)
    return found


def code(error: pytest.ExceptionInfo[MigrateError]) -> str:
    return error.value.diagnostics[0].code


class Interrupted(Exception):
    pass


def interrupt_after(tiles_done: int):
    count = 0

    def progress(done: int, total: int) -> None:
        nonlocal count
        count += 1
        if count >= tiles_done:
            raise Interrupted

    return progress


def part_done(source: RawSource, out: Path) -> Path:
    with pytest.raises(Interrupted):
        go(source, out, progress=interrupt_after(2), threads=1)
    partial = out.with_name(out.name + ".migrate-partial")
    assert not out.exists()
    assert partial.stat().st_mode & 0o777 == 0o700
    return partial


@pytest.mark.parametrize("folder", [True, False])
@pytest.mark.parametrize("fsync", [True, False])
def test_the_target_appears_with_all_it_holds_and_nothing_else(
    source: RawSource, tmp_path: Path, folder: bool, fsync: bool
) -> None:
    out = tmp_path / "deep" / "out"
    out.parent.mkdir()
    (tmp_path / "extra.txt").write_text("copied")
    target = describe(outputs(), files=2 if folder else 1, folder=folder)
    side = (
        [("config.json", b"{}"), ("sub/extra.txt", str(tmp_path / "extra.txt"))] if folder else []
    )
    tiles.write_target(
        outputs(), source, target, out, digest="d", side_files=side, options=RunOptions(fsync=fsync)
    )
    assert read_back(out, target) == content(source)
    assert os.listdir(out.parent) == ["out"]
    if folder:
        names = sorted(str(p.relative_to(out)) for p in out.rglob("*") if p.is_file())
        assert names == ["config.json", "out-0.bin", "out-1.bin", "sub/extra.txt"]
        assert (out / "sub" / "extra.txt").read_text() == "copied"


def test_an_existing_target_is_never_replaced_not_even_an_empty_folder(
    source: RawSource, tmp_path: Path
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("folder", "file", "link"):
        with pytest.raises(QuestionError) as caught:
            go(source, tmp_path / name)
        assert code(caught) == "M904"
    assert (tmp_path / "file").read_text() == "mine"
    assert not list(tmp_path.glob("*.migrate-partial"))


def test_a_target_inside_or_around_the_source_is_refused(source: RawSource, tmp_path: Path) -> None:
    (tmp_path / "alias").symlink_to(tmp_path / "in")
    for out in (tmp_path / "in" / "out", tmp_path / "alias" / "out"):
        with pytest.raises(QuestionError) as caught:
            go(source, out)
        assert code(caught) == "M904"
    source.path = str(tmp_path / "new" / "in")
    with pytest.raises(QuestionError) as caught:
        go(source, tmp_path / "new")
    assert code(caught) == "M904"


def test_a_folder_that_appears_meanwhile_is_kept_and_the_output_too(
    source: RawSource, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with pytest.raises(QuestionError) as caught:
        go(source, out, progress=lambda done, total: out.mkdir(exist_ok=True))
    assert code(caught) == "M904"
    assert not os.listdir(out)
    out.rmdir()
    result = go(source, out, resume=True)
    assert result.bytes_written == 0
    assert read_back(out, describe(outputs(), files=2)) == content(source)


def test_a_file_is_not_renamed_over_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "old").write_text("new")
    (tmp_path / "there").write_text("old")
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty").mkdir()
    for number in (None, errno.ENOSYS, errno.EINVAL):
        if number is not None:

            def refuse(old: Path, new: Path, number: int = number) -> None:
                raise OSError(number, "refused")

            monkeypatch.setattr(publish, "_rename_no_replace", refuse)
        for old, new in (("old", "there"), ("folder", "empty")):
            with pytest.raises(FileExistsError):
                publish.rename_without_replacing(tmp_path / old, tmp_path / new)
        assert (tmp_path / "there").read_text() == "old"
        for old in ("old", "folder"):
            publish.rename_without_replacing(tmp_path / old, tmp_path / "moved")
            assert not (tmp_path / old).exists()
            publish.rename_without_replacing(tmp_path / "moved", tmp_path / old)


def test_a_partial_folder_is_not_touched_without_resume(source: RawSource, tmp_path: Path) -> None:
    partial = part_done(source, tmp_path / "out")
    before = (partial / "journal.jsonl").read_bytes()
    with pytest.raises(QuestionError, match="resume=True") as caught:
        go(source, tmp_path / "out")
    assert code(caught) == "M911"
    assert (partial / "journal.jsonl").read_bytes() == before


def test_a_partial_folder_of_another_plan_is_not_resumed(source: RawSource, tmp_path: Path) -> None:
    partial = part_done(source, tmp_path / "out")
    with pytest.raises(QuestionError, match="plan-2") as caught:
        go(source, tmp_path / "out", digest="plan-2", resume=True)
    assert code(caught) == "M918"
    assert partial.exists()


@pytest.mark.parametrize("version", [1, 2, 4, None, "x"])
def test_a_journal_of_another_format_is_refused_with_its_version(
    source: RawSource, tmp_path: Path, version: object
) -> None:
    journal = part_done(source, tmp_path / "out") / "journal.jsonl"
    head, rest = journal.read_bytes().split(b"\n", 1)
    journal.write_bytes(
        json.dumps({**json.loads(head), "format_version": version}).encode() + b"\n" + rest
    )
    with pytest.raises(QuestionError, match=f"format version {version}, this one's is 3") as caught:
        go(source, tmp_path / "out", resume=True)
    assert code(caught) == "M918"
    assert "remove that folder" in (caught.value.diagnostics[0].help or "")
    assert "another plan" not in str(caught.value)


@pytest.mark.parametrize(
    "line",
    [
        {"file": []}, {"tile": {}}, {"tile": True}, {"tile": 1.0}, {"offset": None},
        {"length": "1"}, {publish.HASH: {}}, "[" * 3000,
        '{"file":' + "1" * 5000 + "}", "null", "{}",
    ],
    ids=lambda line: str(line)[:20],
)  # fmt: skip
def test_a_foreign_line_of_a_journal_claims_nothing(
    source: RawSource, tmp_path: Path, line: object
) -> None:
    partial = part_done(source, tmp_path / "out")
    journal = partial / "journal.jsonl"
    true = json.loads(journal.read_bytes().splitlines()[1])
    journal.write_text(
        journal.read_text()
        + (line if isinstance(line, str) else json.dumps({**true, **line}))
        + "\n"
    )
    made = publish.Partial(
        tmp_path / "out",
        describe(outputs(), files=2),
        "plan-1",
        resume=True,
        source=source.identities(),
    )
    made.close()
    assert made.claims
    assert {type(part) for claim, value in made.claims.items() for part in (*claim, *value)} == {
        str,
        int,
    }
    go(source, tmp_path / "out", resume=True)
    assert read_back(tmp_path / "out", describe(outputs(), files=2)) == content(source)


@pytest.mark.parametrize("line", ["[" * 100_000, '{"a":' * 100_000], ids=["list", "dict"])
def test_a_line_nested_too_deep_is_foreign(line: str) -> None:
    assert publish.parsed_line(line.encode()) == {}


@pytest.mark.parametrize("stray", ["evil.bin", ".out-0.bin.tmp", "sub/evil.bin", "empty/"])
def test_what_somebody_else_laid_into_the_partial_folder_is_named_and_not_published(
    source: RawSource, tmp_path: Path, stray: str
) -> None:
    path = part_done(source, tmp_path / "out") / "data" / stray
    if stray.endswith("/"):
        path.mkdir()
    else:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x")
    side = [("sub/notes.txt", b"mine")]
    with pytest.raises(RunError) as caught:
        go(source, tmp_path / "out", side_files=side, resume=True)
    assert code(caught) == "M913"
    assert caught.value.diagnostics[0].message.startswith(
        f"this run did not write {stray.rstrip('/')} in "
    )
    assert not (tmp_path / "out").exists()
    assert os.path.lexists(path)
    path.rmdir() if stray.endswith("/") else path.unlink()
    assert go(source, tmp_path / "out", side_files=side, resume=True).bytes_written == 0
    assert sorted(p.name for p in (tmp_path / "out").rglob("*")) == [
        "notes.txt",
        "out-0.bin",
        "out-1.bin",
        "sub",
    ]


def test_a_run_that_is_resumed_again_and_again_leaves_a_journal_that_is_explained(
    source: RawSource, tmp_path: Path
) -> None:
    partial = part_done(source, tmp_path / "out")
    for _ in range(10):
        # what a power cut lost
        with open(partial / "data" / "out-0.bin", "r+b") as file:
            file.write(bytes(8))
        with pytest.raises(Interrupted):
            go(source, tmp_path / "out", progress=interrupt_after(4), threads=1, resume=True)
    go(source, tmp_path / "out", resume=True)
    assert read_back(tmp_path / "out", describe(outputs(), files=2)) == content(source)


def other_bytes(path: Path) -> bytes:
    found = path.read_bytes()
    return found[:4] + bytes(255 - b for b in found[4:])


def in_place(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(other_bytes(path))


def in_place_with_its_time(path: Path) -> None:
    before = os.stat(path)
    in_place(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def renamed_over(path: Path) -> None:
    before, beside = os.stat(path), path.with_name("beside")
    beside.write_bytes(other_bytes(path))
    os.utime(beside, ns=(before.st_atime_ns, before.st_mtime_ns))
    beside.rename(path)


def made_anew(path: Path) -> None:
    before, content = os.stat(path), other_bytes(path)
    path.unlink()
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("replace", [in_place, in_place_with_its_time, renamed_over, made_anew])
def test_a_source_that_was_replaced_is_not_resumed(
    source: RawSource, tmp_path: Path, replace: Callable[[Path], None]
) -> None:
    partial = part_done(source, tmp_path / "out")
    replace(tmp_path / "in" / "raw-1.bin")
    again = RawSource(tmp_path / "in", dict(source.index.tensors), ["raw-0.bin", "raw-1.bin"])
    with pytest.raises(QuestionError) as caught:
        go(again, tmp_path / "out", resume=True)
    assert code(caught) == "M918"
    assert "raw-1.bin: " in caught.value.diagnostics[0].message
    assert "raw-0.bin" not in str(caught.value)
    assert "remove that folder and start over" in (caught.value.diagnostics[0].help or "")
    assert not (tmp_path / "out").exists()
    shutil.rmtree(partial)
    go(again, tmp_path / "out", resume=True)
    assert read_back(tmp_path / "out", describe(outputs(), files=2)) == content(again)


def test_another_device_is_the_same_source(
    source: RawSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part_done(source, tmp_path / "out")
    known = {
        name: found._replace(device=found.device + 1) for name, found in source.identities().items()
    }
    monkeypatch.setattr(source, "identities", lambda: known)
    assert go(source, tmp_path / "out", resume=True).bytes_written < sum(
        f.size for f in describe(outputs(), files=2).files
    )


@pytest.mark.parametrize("gone", [True, False])
def test_a_source_of_other_files_is_not_resumed(
    source: RawSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gone: bool
) -> None:
    part_done(source, tmp_path / "out")
    known = source.identities()
    found = known.pop("raw-0.bin")
    monkeypatch.setattr(
        source,
        "identities",
        lambda: known if gone else {**known, "raw-0.bin": found, "raw-2.bin": found},
    )
    with pytest.raises(
        QuestionError,
        match=r"raw-0\.bin: it is no longer there" if gone else r"raw-2\.bin: it was not there",
    ) as caught:
        go(source, tmp_path / "out", resume=True)
    assert code(caught) == "M918"


@pytest.mark.parametrize(
    "edit",
    [[], {}, "x", {"raw-0.bin": [1]}, {"raw-0.bin": ["1", 2, 3, 4], "raw-1.bin": None}, None],
)
def test_a_head_that_was_edited_is_refused(source: RawSource, tmp_path: Path, edit: object) -> None:
    journal = part_done(source, tmp_path / "out") / "journal.jsonl"
    head, rest = journal.read_bytes().split(b"\n", 1)
    journal.write_bytes(json.dumps({**json.loads(head), "source": edit}).encode() + b"\n" + rest)
    with pytest.raises(QuestionError, match=r"raw-0\.bin") as caught:
        go(source, tmp_path / "out", resume=True)
    assert code(caught) == "M918"


def test_of_what_lies_in_memory_nothing_is_taken_over(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {k: ("uint8", random_raw(rng, "uint8", SHAPE)) for k in KEYS}
    part_done(write_source(tmp_path / "in", arrays, 2, MemoryBlob), tmp_path / "out")
    other = write_source(
        tmp_path / "in2", {k: (dtype, 255 - a) for k, (dtype, a) in arrays.items()}, 2, MemoryBlob
    )
    result = go(other, tmp_path / "out", resume=True)
    assert result.bytes_written == sum(f["size"] for f in result.files.values())
    assert read_back(tmp_path / "out", describe(outputs(), files=2)) == content(other)


def test_a_partial_folder_in_use_is_refused(source: RawSource, tmp_path: Path) -> None:
    other = publish.Partial(tmp_path / "out", describe(outputs()), "plan-1", resume=False)
    with pytest.raises(QuestionError, match="another run") as caught:
        go(source, tmp_path / "out", resume=True)
    assert code(caught) == "M911"
    other.discard()


def test_resume_writes_only_what_is_missing(source: RawSource, tmp_path: Path) -> None:
    partial = part_done(source, tmp_path / "out")
    claimed = [json.loads(line) for line in (partial / "journal.jsonl").read_bytes().splitlines()]
    stood = {
        path.name: [s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns]
        for path in (tmp_path / "in").iterdir()
        for s in [os.stat(path)]
    }
    assert claimed[0] == {
        "format_version": 3,
        "kind": "journal",
        "digest": "plan-1",
        "hash": "xxh3_128",
        "source": stood,
    }
    assert len(claimed) == 3
    result = go(source, tmp_path / "out", resume=True)
    assert result.bytes_written == sum(f["size"] for f in result.files.values()) - sum(
        c["length"] for c in claimed[1:]
    )
    assert read_back(tmp_path / "out", describe(outputs(), files=2)) == content(source)
    fresh = go(source, tmp_path / "fresh")
    assert fresh.files == result.files


def test_a_claimed_tile_that_is_not_there_is_written_again(
    source: RawSource, tmp_path: Path
) -> None:
    partial = part_done(source, tmp_path / "out")
    claim = json.loads((partial / "journal.jsonl").read_bytes().splitlines()[1])
    with open(partial / "data" / claim["file"], "r+b") as file:
        file.seek(claim["offset"] + 12345)
        file.write(b"damage")
    go(source, tmp_path / "out", resume=True)
    assert read_back(tmp_path / "out", describe(outputs(), files=2)) == content(source)


@pytest.mark.parametrize("keep", [0, 1, 30, 100, 101, 102, 170, 250, 10_000])
def test_a_torn_journal_claims_nothing_that_is_not_there(
    source: RawSource, tmp_path: Path, keep: int
) -> None:
    partial = part_done(source, tmp_path / "out")
    journal = partial / "journal.jsonl"
    journal.write_bytes(journal.read_bytes()[:keep])
    go(source, tmp_path / "out", resume=True)
    assert read_back(tmp_path / "out", describe(outputs(), files=2)) == content(source)


def test_resume_without_a_partial_folder_is_a_plain_run(source: RawSource, tmp_path: Path) -> None:
    go(source, tmp_path / "out", resume=True)
    assert read_back(tmp_path / "out", describe(outputs(), files=2)) == content(source)


CHILD = """
import sys
sys.path[:0] = {paths!r}
from test_publish import KEYS, SHAPE, go
from raw_files import RawSource, Stored
from migrate.core.spec import Spec
from pathlib import Path
root = Path({root!r})
tensors = {tensors}
import time
def slowly(done, total):
    if not done:
        return
    sys.stdout.write("."); sys.stdout.flush(); time.sleep(0.01)
go(RawSource(root / "in", tensors, ["raw-0.bin", "raw-1.bin"]), root / "out", resume={resume}, progress=slowly, fsync=True)
"""  # noqa: E501


def child(source: RawSource, root: Path, resume: bool) -> subprocess.Popen[bytes]:
    here = Path(__file__).parent
    program = CHILD.format(
        paths=[str(here), str(here.parent), str(here.parents[1])],
        root=str(root),
        tensors=dict(source.index.tensors),
        resume=resume,
    )
    return subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


@pytest.mark.parametrize("lives", thorough([4, 10]))
def test_a_killed_run_is_resumed_to_the_same_bytes(
    source: RawSource, tmp_path: Path, lives: int
) -> None:
    chance = random.Random(0)
    out, killed = tmp_path / "out", 0
    for _ in range(lives):
        run = child(source, tmp_path, True)
        assert run.stdout is not None
        # each life is let write a tile or two, then killed at a random moment
        run.stdout.read(1)
        time.sleep(chance.random() * 0.02)
        run.kill()
        run.communicate()
        killed += run.returncode == -signal.SIGKILL
        if out.exists():
            assert read_back(out, describe(outputs(), files=2)) == content(source)
            shutil.rmtree(out)
            shutil.rmtree(tmp_path / "out.migrate-partial", ignore_errors=True)
    assert killed
    go(source, out, resume=True)
    assert read_back(out, describe(outputs(), files=2)) == content(source)
    assert not (tmp_path / "out.migrate-partial").exists()


def test_an_interrupt_keeps_the_partial_folder_and_leaves_no_thread(
    source: RawSource, tmp_path: Path
) -> None:
    run = child(source, tmp_path, False)
    assert run.stdout is not None
    run.stdout.read(1)
    run.send_signal(signal.SIGINT)
    _, errors = run.communicate(timeout=HANG)
    assert b"KeyboardInterrupt" in errors
    assert not (tmp_path / "out").exists()
    go(source, tmp_path / "out", resume=True)
    assert read_back(tmp_path / "out", describe(outputs(), files=2)) == content(source)


def test_an_error_in_one_thread_stops_all(source: RawSource, tmp_path: Path) -> None:
    before = threading.active_count()
    with pytest.raises(Interrupted):
        go(source, tmp_path / "out", progress=interrupt_after(1), threads=2)
    assert threading.active_count() == before


def test_a_full_disk_is_seen_before_the_first_byte(
    source: RawSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.statvfs(tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result([*real[:4], 100, *real[5:]]))
    with pytest.raises(RunError) as caught:
        go(source, tmp_path / "out")
    assert code(caught) == "M909"
    assert os.listdir(tmp_path) == ["in"]


@pytest.fixture
def small_disk(tmp_path: Path):
    with mounted(tmp_path / "disk", "12m") as disk:
        yield disk


def test_a_disk_too_small_keeps_nothing(
    source: RawSource, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RunError, match="are free"):
        go(source, small_disk / "out")
    monkeypatch.setattr(publish.Partial, "require", lambda self, side, shared=None: None)
    with pytest.raises(RunError, match="cannot allocate") as caught:
        go(source, small_disk / "out")
    assert code(caught) == "M909"
    assert not os.listdir(small_disk)


def test_a_disk_that_fills_up_keeps_what_is_done_and_can_be_resumed(
    source: RawSource, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subprocess.run(["mount", "-o", "remount,size=40m", str(small_disk)], check=True)
    monkeypatch.setattr(publish.Partial, "allocate", lambda self, shared=None: sparse(self))
    filler = small_disk / "filler"

    def fill(done: int, total: int) -> None:
        if not filler.exists():
            with open(filler, "wb", buffering=0) as file, contextlib.suppress(OSError):
                while file.write(bytes(1 << 20)):
                    pass

    with pytest.raises(RunError, match="No space left") as caught:
        go(source, small_disk / "out", progress=fill)
    assert code(caught) == "M909"
    assert "resume=True" in (caught.value.diagnostics[0].help or "")
    filler.unlink()
    result = go(source, small_disk / "out", resume=True)
    assert 0 < result.bytes_written < sum(f["size"] for f in result.files.values())
    assert read_back(small_disk / "out", describe(outputs(), files=2)) == content(source)


def sparse(partial: publish.Partial) -> None:
    for file in partial.target.files:
        with open(partial.data / file.name, "a+b") as made:
            made.truncate(file.size)


def test_a_folder_that_cannot_be_synced_is_said_with_the_output_in_place(
    source: RawSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, real = tmp_path / "out", publish.sync

    def fail_last(path: Path) -> None:
        if path == out.parent:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(path)

    monkeypatch.setattr(publish, "sync", fail_last)
    with pytest.raises(
        RunError, match="was published and is complete, but may not survive a power cut"
    ) as caught:
        go(source, out, fsync=True)
    assert code(caught) == "M970"
    assert out.is_dir()
    assert list(tmp_path.glob("*.migrate-partial")) == []


def test_a_source_cut_short_while_it_is_read_publishes_nothing(
    source: RawSource, tmp_path: Path
) -> None:
    cut = iter([True])

    def progress(done: int, total: int) -> None:
        if next(cut, False):
            os.truncate(tmp_path / "in" / "raw-1.bin", 5)

    with pytest.raises(CheckpointError) as caught:
        go(source, tmp_path / "out", progress=progress)
    assert code(caught) == "M905"
    assert os.listdir(tmp_path) == ["in"]


def test_a_source_rewritten_while_it_is_read_publishes_nothing(
    source: RawSource, tmp_path: Path
) -> None:
    def progress(done: int, total: int) -> None:
        with open(tmp_path / "in" / "raw-0.bin", "r+b") as file:
            file.write(b"HEAD")
        os.utime(tmp_path / "in" / "raw-0.bin", ns=(1, 1))

    with pytest.raises(CheckpointError) as caught:
        go(source, tmp_path / "out", progress=progress)
    assert code(caught) == "M905"
    assert os.listdir(tmp_path) == ["in"]


def test_a_source_that_cannot_be_read_keeps_the_partial_folder(
    source: RawSource, tmp_path: Path
) -> None:
    class Broken(RawBlob):
        def fileno(self) -> None:
            return None

        def readinto(self, offset: int, buffer: memoryview) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    source.blobs[1] = Broken(tmp_path / "in" / "raw-1.bin")
    with pytest.raises(RunError, match=r"cannot read raw-1\.bin") as caught:
        go(source, tmp_path / "out")
    assert code(caught) == "M913"
    assert (tmp_path / "out.migrate-partial").exists()


def test_a_failed_value_check_leaves_nothing_behind(source: RawSource, tmp_path: Path) -> None:
    a, b = (whole(k, "uint8", SHAPE) for k in ("k0", "k1"))
    check = ValueCheck(
        "equal", (a, b), None, "M404", "the copies are not equal", "one", ("k0", "k1")
    )
    with pytest.raises(CheckpointError, match="the copies are not equal"):
        go(source, tmp_path / "out", checks=[check])
    assert os.listdir(tmp_path) == ["in"]


def test_a_file_changed_under_the_run_is_not_published(source: RawSource, tmp_path: Path) -> None:
    def progress(done: int, total: int) -> None:
        if done == total:
            with open(tmp_path / "out.migrate-partial" / "data" / "out-0.bin", "r+b") as file:
                file.write(b"?")

    with pytest.raises(RunError, match="was not written as planned"):
        go(source, tmp_path / "out", progress=progress)
    assert not (tmp_path / "out").exists()


def test_a_side_file_cannot_leave_the_target(source: RawSource, tmp_path: Path) -> None:
    for name in ("../evil", "/evil"):
        with pytest.raises(ValueError, match="does not stay"):
            go(source, tmp_path / "out", side_files=[(name, b"x")])
        shutil.rmtree(tmp_path / "out.migrate-partial")
    assert os.listdir(tmp_path) == ["in"]


def test_a_place_that_cannot_be_written_is_named(source: RawSource, tmp_path: Path) -> None:
    with pytest.raises(QuestionError, match="nowhere") as caught:
        go(source, tmp_path / "nowhere" / "out")
    assert code(caught) == "M115"
    (tmp_path / "file").touch()
    with pytest.raises(QuestionError, match="is not a folder"):
        go(source, tmp_path / "file" / "out")
