"""Sharing of extents: on real XFS and Btrfs images where they can be mounted, and with an ioctl
that copies everywhere else.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from marks import thorough
from raw_files import MemoryBlob, RawBlob, describe, random_raw, read_back, whole, write_source

import migrate
from migrate.core import view as views
from migrate.core.errors import MigrateError
from migrate.core.spec import spec
from migrate.formats import safetensors
from migrate.planning.graph import Tensor
from migrate.planning.plan import Plan
from migrate.planning.request import make_request
from migrate.running import geometry, publish, share, tiles
from migrate.running.prepare import plan_for
from migrate.running.resources import RunOptions
from migrate.source.blobs import BytesBlob, read_bytes
from migrate.source.places import find_place

REFUSALS = [
    errno.ENOTTY,
    errno.EOPNOTSUPP,
    errno.EXDEV,
    errno.EINVAL,
    errno.EPERM,
    errno.EACCES,
    errno.ENOSYS,
    errno.ENOSPC,
    errno.EIO,
]
MKFS = {"xfs": ["mkfs.xfs", "-q", "-f", "-m", "reflink=1"], "btrfs": ["mkfs.btrfs", "-q", "-f"]}
MIB = 1 << 20


class Disk:
    """A file system in a file, mounted at `path`."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.image, self.path = folder / "image", folder / "disk"
        with self.image.open("wb") as image:
            image.truncate(640 * MIB)
        self._run(*MKFS[kind], str(self.image))
        self.path.mkdir()
        self.mount()

    @staticmethod
    def _run(*command: str) -> None:
        if shutil.which(command[0]) is None:
            pytest.skip(f"there is no {command[0]}")
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"{command[0]} is not possible here: {done.stderr.strip()}")

    def mount(self) -> None:
        self._run("mount", "-o", "loop", str(self.image), str(self.path))

    def unmount(self) -> None:
        subprocess.run(["umount", str(self.path)], check=True)

    def used(self) -> int:
        os.sync()
        found = os.statvfs(self.path)
        return (found.f_blocks - found.f_bfree) * found.f_frsize


@pytest.fixture(params=[pytest.param(kind, marks=pytest.mark.filesystems) for kind in MKFS])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    made = Disk(request.param, tmp_path)
    yield made
    made.unmount()


def shared_bytes(path: Path) -> int:
    """Bytes in extents that the file system calls shared (FIEMAP)."""
    count, found, at = 64, 0, 0
    with path.open("rb") as file:
        while True:
            answer = bytearray(
                struct.pack("=QQIIII", at, 2**64 - 1 - at, 1, 0, count, 0) + bytes(56 * count)
            )
            fcntl.ioctl(file, 0xC020660B, answer)
            mapped = struct.unpack_from("=I", answer, 20)[0]
            for i in range(mapped):
                logical, _, length, flags = struct.unpack_from("=QQQ16xI", answer, 32 + 56 * i)
                found += length if flags & 0x2000 else 0
                at = logical + length
                if flags & 1:
                    return found
            if not mapped:
                return found


RULES = """\
id: t/v2/rename
title: rename
why: the framework says net now
lineage: t
edge: [v1, v2]
rules:
  - {name: all, from: "model.{k...}", to: "net.{k}"}
"""


def write_checkpoint(path: Path, layers: int = 12, kib: int = 16 * 1024) -> None:
    """A file as safetensors writes it: its data starts where its header ends, at a multiple of
    8.
    """
    from safetensors.numpy import save_file

    rng = np.random.default_rng(0)
    arrays = {}
    for i in range(layers):
        arrays[f"model.{i}.weight"] = np.frombuffer(rng.bytes(kib << 10), "u2").reshape(-1, 1024)
        arrays[f"model.{i}.norm"] = rng.integers(0, 2**16, 4096).astype("u2")
    save_file(arrays, path)


def rename(source: Path, out: Path, **options: Any) -> dict[str, Any]:
    rules = source.parent / "rename.yaml"
    rules.write_text(RULES)
    return migrate.apply(source, out, rules=[rules], **options)


def state(path: Path) -> tuple[int, int, int, int, str]:
    found = os.stat(path)
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns, digest(path)


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return (
            hashlib.file_digest(file, "sha256").hexdigest()
            if hasattr(hashlib, "file_digest")
            else hashlib.sha256(file.read()).hexdigest()
        )


@pytest.fixture
def unshared(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    with monkeypatch.context() as patch:
        patch.setattr(share, "ioctl", refusing(errno.EOPNOTSUPP))
        yield patch


def refusing(code: int) -> Any:
    def refuse(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    return refuse


def test_a_rename_takes_no_space_and_outlives_its_source(
    disk: Disk, unshared: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source, out, copied = (
        disk.path / "old.safetensors",
        disk.path / "new.safetensors",
        disk.path / "copy.safetensors",
    )
    write_checkpoint(source)
    rename(source, copied)
    assert shared_bytes(copied) == 0
    expected = digest(copied)
    copied.unlink()
    unshared.undo()
    before, used = state(source), disk.used()
    result = rename(source, out)
    assert disk.used() - used < 1 * MIB
    assert shared_bytes(out) > out.stat().st_size - 64 * 1024 > 190 * MIB
    assert state(source) == before
    assert digest(out) == expected
    assert result.files["model.safetensors"].size == out.stat().st_size
    source.unlink()
    disk.unmount()
    disk.mount()
    assert digest(out) == expected


def test_data_files_of_a_distributed_checkpoint_take_no_space_under_other_names(
    disk: Disk,
) -> None:
    flat, old, out = (disk.path / name for name in ("old.safetensors", "old", "new"))
    write_checkpoint(flat)
    migrate.apply(flat, old, output_format="dcp", chunks=4)
    flat.unlink()
    expected = {path.name: digest(path) for path in old.glob("*.distcp")}
    used = disk.used()
    result = rename(old, out)
    assert disk.used() - used < 1 * MIB
    assert {path.name: digest(path) for path in out.glob("*.distcp")} == expected
    assert len(expected) == 4
    for path in out.glob("*.distcp"):
        assert shared_bytes(path) > path.stat().st_size - 64 * 1024 > 40 * MIB
    assert result.bytes_shared > 190 * MIB


def test_a_disk_too_full_for_a_copy_has_room_for_a_rename(
    disk: Disk, unshared: pytest.MonkeyPatch
) -> None:
    source, out = disk.path / "old.safetensors", disk.path / "new.safetensors"
    write_checkpoint(source)
    os.sync()
    with (disk.path / "filler").open("wb") as filler:
        found = os.statvfs(disk.path)
        os.posix_fallocate(filler.fileno(), 0, found.f_bavail * found.f_frsize - 64 * MIB)
    with pytest.raises(MigrateError) as caught:
        rename(source, out)
    assert [d.code for d in caught.value.diagnostics] == ["M909"]
    assert sorted(os.listdir(disk.path)) == ["filler", "old.safetensors", "rename.yaml"]
    unshared.undo()
    rename(source, out)
    assert shared_bytes(out) > 190 * MIB


def test_what_is_not_renamed_only_is_the_same_with_and_without_sharing(
    disk: Disk, unshared: pytest.MonkeyPatch
) -> None:
    arrays, outputs = mixture()
    source = write_source(disk.path / "in", arrays, 2)
    target = describe(outputs, files=2, header=bytes(4096 + 4))
    copied = tiles.write_target(
        outputs, source, target, disk.path / "copied", digest="d", options=RunOptions(fsync=False)
    )
    unshared.undo()
    shared = tiles.write_target(
        outputs, source, target, disk.path / "shared", digest="d", options=RunOptions(fsync=False)
    )
    source.close()
    assert copied.bytes_shared == 0
    assert shared.bytes_shared > 2 * MIB
    assert (
        sum(shared_bytes(disk.path / "shared" / f.name) for f in target.files)
        == shared.bytes_shared
    )
    assert shared.files == copied.files
    assert (
        read_back(disk.path / "shared", target)
        == read_back(disk.path / "copied", target)
        == expected(arrays, outputs)
    )


def test_an_interrupted_run_with_clones_is_resumed(disk: Disk) -> None:
    source, out = disk.path / "old.safetensors", disk.path / "new.safetensors"
    write_checkpoint(source)

    def interrupt(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rename(source, out, progress=interrupt)
    used = disk.used()
    result = rename(source, out, resume=True)
    assert 0 < result.bytes_written < out.stat().st_size * 0.6
    assert disk.used() - used < 1 * MIB
    again = disk.path / "again.safetensors"
    rename(source, again)
    assert digest(again) == digest(out)


def test_a_source_written_to_under_a_clone_removes_everything(disk: Disk) -> None:
    source, out = disk.path / "old.safetensors", disk.path / "new.safetensors"
    write_checkpoint(source, layers=2)

    def meddle(done: int, total: int) -> None:
        with source.open("r+b") as file:
            file.seek(-5, os.SEEK_END)
            file.write(b"other")

    with pytest.raises(MigrateError) as caught:
        rename(source, out, progress=meddle)
    assert {d.code for d in caught.value.diagnostics} == {"M905"}
    assert sorted(os.listdir(disk.path)) == ["old.safetensors", "rename.yaml"]


def test_a_source_elsewhere_is_copied(disk: Disk, tmp_path: Path) -> None:
    source, out = tmp_path / "old.safetensors", disk.path / "new.safetensors"
    write_checkpoint(source, layers=2)
    rename(source, out)
    assert shared_bytes(out) == 0
    copied = tmp_path / "new.safetensors"
    rename(source, copied)
    assert digest(copied) == digest(out)


def mixture() -> tuple[dict[str, tuple[str, np.ndarray]], dict[str, Tensor]]:
    """Long runs that lie alike and not, short ones between, rows of 1 MiB that change their order,
    and a fill.
    """
    rng = np.random.default_rng(1)
    shapes = {
        "a": (3 * MIB,),
        "b": (MIB + 4096,),
        "c": (6, MIB),
        "d": (1000, 1001),
        "e": (2 * MIB + 77,),
    }
    arrays = {key: ("uint8", random_raw(rng, "uint8", shape)) for key, shape in shapes.items()}
    va, vb, vc, vd, ve = (views.stored(0, s) for s in shapes.values())
    made = {
        "a": (va, ("a",)),
        "tail": (views.slice_(va, 0, 4096, 2 * MIB + 4096), ("a",)),
        "turned": (views.permute(vd, (1, 0)), ("d",)),
        "rows": (views.flip(vc, 0), ("c",)),
        "padded": (views.pad(ve, 0, 4096, 11, 7), ("e",)),
        "both": (views.concat([va, views.stored(1, shapes["b"])], 0), ("a", "b")),
        "b": (vb, ("b",)),
    }
    return arrays, {
        key: Tensor(spec("uint8", view.shape), view, sources)
        for key, (view, sources) in made.items()
    }


def expected(
    arrays: dict[str, tuple[str, np.ndarray]], outputs: dict[str, Tensor]
) -> dict[str, bytes]:
    a, b, c, d, e = (array for _, array in arrays.values())
    made = {
        "a": a, "tail": a[4096 : 2 * MIB + 4096], "turned": d.T, "rows": c[::-1],
        "padded": np.pad(e, (4096, 11), constant_values=7),
        "both": np.concatenate([a, b]), "b": b,
    }  # fmt: skip
    return {key: np.ascontiguousarray(made[key]).tobytes() for key in outputs}


class CopyingIoctl:
    """FICLONERANGE by a copy, as strict as the kernel; from call number `last` on it answers
    `code`.
    """

    def __init__(self, block: int = 4096, last: int = -1, code: int = 0) -> None:
        self.block, self.last, self.code = block, last, code
        self.calls: list[tuple[int, int, int, int]] = []
        self.refused = 0

    def __call__(self, target: int, request: int, packed: bytes) -> int:
        source, origin, nbytes, at = struct.unpack("=qQQQ", packed)
        if len(self.calls) == self.last:
            self.refused += 1
            raise OSError(self.code, os.strerror(self.code))
        self.calls.append((source, origin, nbytes, at))
        assert request == 0x4020940D
        assert origin % self.block == at % self.block == nbytes % self.block == 0 < nbytes
        assert origin + nbytes <= os.fstat(source).st_size
        for i in range(0, nbytes, MIB):
            os.pwrite(target, os.pread(source, min(MIB, nbytes - i), origin + i), at + i)
        return 0


@pytest.mark.parametrize("code", REFUSALS, ids=errno.errorcode.get)
@pytest.mark.parametrize("last", thorough([1, 0, 3]))
def test_a_refused_clone_is_a_copy_for_the_rest_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, last: int
) -> None:
    arrays, outputs = mixture()
    source = write_source(tmp_path / "in", arrays, 1)
    target = describe(outputs, files=2, header=bytes(4096 + 4))
    cloning = CopyingIoctl(last=last, code=code)
    monkeypatch.setattr(share, "ioctl", cloning)
    result = tiles.write_target(
        outputs, source, target, tmp_path / "out", digest="d", options=RunOptions(fsync=False)
    )
    source.close()
    assert (len(cloning.calls), cloning.refused) == (last, 1)
    # the first is the probe
    assert result.bytes_shared == sum(nbytes for _, _, nbytes, _ in cloning.calls[1:])
    assert read_back(tmp_path / "out", target) == expected(arrays, outputs)
    assert sorted(os.listdir(tmp_path / "out")) == [f.name for f in target.files]


def test_this_file_system_makes_the_right_bytes_whether_it_shares_or_not(tmp_path: Path) -> None:
    arrays, outputs = mixture()
    source = write_source(tmp_path / "in", arrays, 2)
    target = describe(outputs, header=bytes(4096 + 4))
    tiles.write_target(
        outputs, source, target, tmp_path / "out", digest="d", options=RunOptions(fsync=False)
    )
    source.close()
    assert read_back(tmp_path / "out", target) == expected(arrays, outputs)


def test_what_is_cloned_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays, outputs = mixture()
    source = write_source(tmp_path / "in", arrays, 1)
    target = describe(outputs, header=bytes(4096 + 4))
    cloning, written = CopyingIoctl(), []
    monkeypatch.setattr(share, "ioctl", cloning)
    write = tiles.write_at
    monkeypatch.setattr(
        tiles,
        "write_at",
        lambda fd, data, offset: (written.append((offset, len(data))), write(fd, data, offset)),
    )
    tiles.write_target(
        outputs, source, target, tmp_path / "out", digest="d", options=RunOptions(fsync=False)
    )
    source.close()
    ranges = sorted([*written, *((at, nbytes) for _, _, nbytes, at in cloning.calls[1:])])
    assert [at for at, _ in ranges] == [0, *(at + nbytes for at, nbytes in ranges)][:-1]
    assert sum(ranges[-1]) == target.files[0].size


def test_one_probe_is_made_and_none_for_bytes_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def refuse(*arguments: Any) -> int:
        calls.append(arguments)
        raise OSError(errno.EOPNOTSUPP, "no")

    monkeypatch.setattr(share, "ioctl", refuse)
    arrays, outputs = mixture()
    for blob, probes in ((RawBlob, 1), (MemoryBlob, 0)):
        calls.clear()
        source = write_source(tmp_path / blob.__name__, arrays, 3, blob)
        tiles.write_target(
            outputs,
            source,
            describe(outputs),
            tmp_path / f"out-{blob.__name__}",
            digest="d",
            options=RunOptions(fsync=False),
        )
        source.close()
        assert len(calls) == probes


def test_tensors_that_follow_each_other_on_both_sides_are_one_run(tmp_path: Path) -> None:
    keys = [f"k{i}" for i in range(8)]
    arrays = {key: ("uint8", np.zeros(300_000, "u1")) for key in keys}
    source = write_source(tmp_path / "in", arrays)
    outputs = {key: whole(key, "uint8", (300_000,)) for key in keys}
    # the source has gaps of 0 to 4 bytes, the target has none
    found = share.shared_extents(
        describe(outputs).files[0], outputs, source, geometry.ByteLayouts()
    )
    starts = [0, *(i for i in range(1, 8) if i % 5)]
    assert [r.at for r in found] == [8 + 300_000 * i for i in starts]
    assert [r.nbytes for r in found] == [
        300_000 * (b - a) for a, b in zip(starts, [*starts[1:], 8], strict=True)
    ]
    source.close()


@pytest.mark.parametrize(("nbytes", "clones"), [(MIB - 1, 0), (MIB, 1)])
def test_runs_below_a_mebibyte_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nbytes: int, clones: int
) -> None:
    cloning = CopyingIoctl()
    monkeypatch.setattr(share, "ioctl", cloning)
    source = write_source(tmp_path / "in", {"a": ("uint8", np.ones(nbytes, "u1"))})
    outputs = {"a": whole("a", "uint8", (nbytes,))}
    tiles.write_target(
        outputs,
        source,
        describe(outputs, header=bytes(4)),
        tmp_path / "out",
        digest="d",
        options=RunOptions(fsync=False),
    )
    source.close()
    assert len(cloning.calls) == 1 + clones


def test_longer_clones_are_made_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cloning = CopyingIoctl()
    monkeypatch.setattr(share, "ioctl", cloning)
    monkeypatch.setattr(share, "AT_ONCE", MIB)
    array = random_raw(np.random.default_rng(2), "uint8", (5 * MIB // 2,))
    source = write_source(tmp_path / "in", {"a": ("uint8", array)})
    outputs = {"a": whole("a", "uint8", array.shape)}
    target = describe(outputs, header=bytes(4))
    tiles.write_target(
        outputs, source, target, tmp_path / "out", digest="d", options=RunOptions(fsync=False)
    )
    source.close()
    assert [nbytes for _, _, nbytes, _ in cloning.calls[1:]] == [MIB, MIB, MIB // 2 - 4096]
    assert read_back(tmp_path / "out", target)["a"] == array.tobytes()


@given(
    cuts=st.lists(st.integers(0, 40), max_size=12, unique=True).map(sorted),
    bounds=st.tuples(st.integers(0, 40), st.integers(0, 40)).map(sorted),
)
def test_gaps_are_what_the_clones_leave(cuts: list[int], bounds: list[int]) -> None:
    shared = object.__new__(share.Shared)
    clones = [share.Extent(a, b - a, 0, 0) for a, b in zip(cuts[::2], cuts[1::2], strict=False)]
    shared._clones = {"f": clones}
    covered = {i for run in clones for i in range(run.at, run.at + run.nbytes)}
    gaps = list(shared.gaps("f", *bounds))
    assert [i for a, b in gaps for i in range(a, b)] == [
        i for i in range(*bounds) if i not in covered
    ]
    assert all(a < b for a, b in gaps)
    assert shared.nbytes("f") == len(covered)


def test_the_space_check_counts_what_is_there_and_what_is_shared_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs = {"a": whole("a", "uint8", (8 * MIB,))}
    target = describe(outputs)
    shared = object.__new__(share.Shared)
    shared._clones = {"out-0.bin": [share.Extent(4096, 7 * MIB, 0, 0)]}
    partial = publish.Partial(tmp_path / "out", target, "d", resume=False)
    stat = os.statvfs(tmp_path)
    free = 0
    monkeypatch.setattr(
        publish.os,
        "statvfs",
        lambda path: os.statvfs_result((1, 1, free, free, free, *tuple(stat)[5:])),
    )
    free = MIB + 8
    partial.require(0, shared)
    free = MIB + 7
    partial.claims["x", 0] = (0, 0, "")
    with pytest.raises(MigrateError, match=f"needs {MIB + 8} bytes"):
        partial.require(0, shared)
    with (partial.data / "out-0.bin").open("wb") as file:
        file.write(bytes(2 * MIB))
        file.truncate(8 * MIB + 8)
    with pytest.raises(MigrateError, match=f"needs {MIB + 8} bytes"):
        partial.require(0, shared)
    (partial.data / "out-0.bin").write_bytes(bytes(8 * MIB + 8))
    free = 0
    partial.require(0, shared)
    partial.close()


def test_a_planned_output_lies_like_its_source(tmp_path: Path) -> None:
    source = tmp_path / "old.safetensors"
    write_checkpoint(source, layers=3, kib=1024)
    made = rename(source, tmp_path / "new.safetensors")
    assert made.path
    starts = {}
    for name in ("old", "new"):
        opened = safetensors.FORMAT.open(find_place(tmp_path / f"{name}.safetensors", False))
        starts[name] = {
            key.split(".", 1)[1]: t.offset % 4096 for key, t in opened.index.tensors.items()
        }
        opened.close()
    assert starts["old"] == starts["new"]


def test_what_holds_the_bytes_decides_neither_padding_nor_digest(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    write_checkpoint(tmp_path / "old" / "model.safetensors", layers=3, kib=1024)
    (tmp_path / "rename.yaml").write_text(RULES)
    question = make_request((), (), [tmp_path / "rename.yaml"], None, ())

    opened = migrate.formats.open(tmp_path / "old")
    start = min(t.offset for t in opened.index.tensors.values()) % 4096
    opened.close()

    def planned(folder: bool, held: bool) -> Plan:
        source = migrate.formats.open(tmp_path / "old")
        in_memory = [BytesBlob(blob.name, read_bytes(blob, 0, blob.size)) for blob in source.blobs]
        files, source.blobs = source.blobs, in_memory if held else source.blobs
        try:
            return plan_for(source, question, folder, 5 << 30)
        finally:
            source.blobs = files
            source.close()

    for shape in (True, False):
        in_files, in_memory = planned(shape, held=False), planned(shape, held=True)
        assert in_files.digest == in_memory.digest
        assert [f.header for f in in_files.target.files] == [
            f.header for f in in_memory.target.files
        ]
        (file,) = in_memory.target.files
        # within a page it stands as in the source, whose data starts at a multiple of 8 only
        assert file.tensors[0].offset % 4096 == start
        assert start % 64
