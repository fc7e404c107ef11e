"""Memory of runs over distributed checkpoints of 20 GB. The sources are holes in files, whose
checksums are those of zeros; what is written takes its space on the disk.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from commandline import ROOT

import migrate
from migrate.core.spec import Spec, spec
from migrate.formats.dcp import FORMAT

sys.path.append(str(ROOT / "benchmarks"))
import data
import process
from tasks import DCP_PRIVATE

MB, GB = 1_000_000, 1_000_000_000
LARGE = data.Shape(
    layers=7,
    experts=8,
    hidden=4096,
    intermediate=14336,
    vocab=32000,
    heads=32,
    kv_heads=8,
    shards=1,
)
# of which the same run takes what it takes without tensors
TINY = data.PRESETS["tiny"]
ZEROS = bytes(1 << 20)


def specs_of(shape: data.Shape) -> dict[str, Spec]:
    tensors = {key: one for n in range(shape.shards) for key, one in shape.tensors(n).items()}
    return {key: spec("bfloat16", one) for key, one in tensors.items()}


@functools.cache
def checksum(nbytes: int) -> int:
    """The CRC-32 of so many zeros."""
    found = 0
    for start in range(0, nbytes, len(ZEROS)):
        found = zlib.crc32(ZEROS[: nbytes - start], found)
    return found


def sparse(file: Path, parts: Sequence[tuple[int, bytes]], size: int) -> None:
    """A file that holds these bytes at these offsets, and nothing else."""
    with file.open("wb") as opened:
        opened.truncate(size)
        for offset, content in parts:
            os.pwrite(opened.fileno(), content, offset)


def write_dcp(folder: Path, shape: data.Shape) -> Path:
    """Each tensor in two chunks, as of two ranks."""
    target = FORMAT.describe(
        specs_of(shape), folder=True, max_shard_size=5 * GB, metadata={}, stamp=None, chunks=2
    )
    folder.mkdir()
    for file in target.files:
        parts, crcs = [(0, file.header)], []
        for one in file.tensors:
            crcs.append(checksum(one.nbytes))
            assert file.seal is not None
            parts.append((one.offset + one.nbytes, file.seal(crcs)))
        sparse(folder / file.name, parts, file.size)
    (folder / ".metadata").write_bytes(target.small[".metadata"])
    return folder


def write_safetensors(folder: Path, shape: data.Shape) -> Path:
    folder.mkdir()
    head, nbytes = data.header({key: one.shape for key, one in specs_of(shape).items()})
    sparse(folder / "model.safetensors", [(0, head)], len(head) + nbytes)
    return folder


def private(source: Path, out: Path, *words: Any) -> int:
    """The most private memory that a run took, in bytes; what it wrote is looked at and removed."""
    argv = [sys.executable, "-m", "migrate", "apply", source, "-o", out, "--to", "hf-mixtral@v5"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    try:
        taken = process.run([*map(str, (*argv, *words)), "--no-fsync", "-q"], env)
        before, after = migrate.inspect(source), migrate.inspect(out)
        assert before.bytes == after.bytes
        assert after.layouts[0].layout == "v5"
        # no holes: the disk holds what was written
        held = sum(file.stat().st_blocks * 512 for file in out.iterdir())
        assert held >= after.bytes
    finally:
        shutil.rmtree(out, ignore_errors=True)
    return taken.private


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("write", "written"), [(write_dcp, "safetensors"), (write_safetensors, "dcp")]
)
def test_memory_does_not_grow_with_the_checkpoint(write: Any, written: str, tmp_path: Path) -> None:
    room = shutil.disk_usage(tmp_path).free
    if room < 25 * GB:
        pytest.skip(f"writes 21 GB, and {tmp_path} has {room / GB:.0f} GB free")
    found = {}
    for name, shape in (("tiny", TINY), ("large", LARGE)):
        source = write(tmp_path / name, shape)
        (source / "config.json").write_text(json.dumps(shape.config()))
        words = ("--output-format", written)
        found[name] = private(source, tmp_path / "out", *words) / MB
    assert migrate.inspect(tmp_path / "large").bytes > 20 * GB
    beyond = found["large"] - found["tiny"]
    print(f"{write.__name__} -> {written}: {beyond:.0f} MB beyond {found['tiny']:.0f} MB")
    assert found["tiny"] > 10, "the process was not measured"
    assert beyond <= DCP_PRIVATE


# a file that describes so many tensors of two elements
DESCRIBE = """
import sys
from migrate.source.pickle.dcp_emit import emit_metadata
from migrate.source.pickle.dcp_metadata import Metadata, SavedChunk, SavedPart, TensorEntry
folder, count = sys.argv[1], int(sys.argv[2])
held, name, chunks = {}, "__0_0.distcp", (SavedChunk((0,), (2,)),)
for n in range(count):
    part = SavedPart(name, 1600 * n, 1600, ())
    held[f"layers.{n >> 3}.k{n & 7}.weight"] = TensorEntry(
        "bfloat16", (2,), False, None, chunks, (part,)
    )
made = Metadata(held, {}, {key: (key,) for key in held}, (name,), "1.0.0", False)
with open(f"{folder}/.metadata", "wb") as out:
    out.write(emit_metadata(made))
"""
# a folder with so many of them, each an archive of its own
MAKE = """
import sys, zlib
from migrate.core.spec import spec
from migrate.formats.dcp import FORMAT
folder, count = sys.argv[1], int(sys.argv[2])
specs = {f"layers.{n >> 3}.k{n & 7}.weight": spec("bfloat16", (2,)) for n in range(count)}
target = FORMAT.describe(specs, folder=True, max_shard_size=1 << 40, metadata={}, stamp=None)
with open(f"{folder}/.metadata", "wb") as out:
    out.write(target.small[".metadata"])
for file in target.files:
    crcs = []
    with open(f"{folder}/{file.name}", "wb", 1 << 20) as out:
        out.write(file.header)
        for one in file.tensors:
            crcs.append(zlib.crc32(bytes(4)))
            out.write(bytes(4) + file.seal(crcs))
"""
MANY, MOST = 1_000_000, 1_500 * MB


def memory_of(*words: Any, statuses: Sequence[int] = (0,)) -> process.Taken:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return process.run([sys.executable, *map(str, words)], env, statuses)


@pytest.mark.thorough
def test_a_million_entries_that_lie_in_no_file_are_refused_within_the_limit(tmp_path: Path) -> None:
    memory_of("-c", DESCRIBE, tmp_path, MANY)
    taken = memory_of("-m", "migrate", "inspect", tmp_path, statuses=(3,))
    print(f"refused: {taken.private / MB:.0f} MB, {taken.cpu:.0f} s")
    assert 10 * MB < taken.private < MOST


@pytest.mark.campaign
def test_a_million_entries_are_read_within_the_limit(tmp_path: Path) -> None:
    memory_of("-c", MAKE, tmp_path, MANY)
    taken = memory_of("-m", "migrate", "inspect", tmp_path, "--format", "json")
    print(f"inspect: {taken.private / MB:.0f} MB, {taken.cpu:.0f} s")
    assert json.loads(taken.stdout)["tensors"] == MANY
    assert 10 * MB < taken.private < MOST
