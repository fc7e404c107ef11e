"""Files that are large only by their size: holes, which cost who makes them nothing, up to the
limits of each reader.
"""

from __future__ import annotations

import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import opcodes as o
import pytest
from work import HANG

from migrate.formats._header import MAX_HEADER
from migrate.formats.safetensors import MAX_ITEMS
from migrate.source.paths import HISTORY, ITEMS, MAX_HISTORY
from migrate.source.pickle.nodes import ARCHIVE
from migrate.source.shards import MAX_INDEX
from migrate.source.zip_archive import END, ENTRY, LOCAL

ROOT = Path(__file__).parents[2]
MEMORY = 300_000_000
# each file in a process of its own, forked from one that has imported what is needed
INSPECT = """
import os, sys
import migrate
from migrate.core.errors import CheckpointError
from migrate.formats import safetensors, torchzip
for path in sys.argv[1:]:
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0
        continue
    try:
        migrate.inspect(path)
        said = "opened"
    except CheckpointError as error:
        said = " ".join(found.code for found in error.diagnostics)
    with open("/proc/self/status") as file:
        print(said, next(line.split()[1] for line in file if line.startswith("VmHWM")), sep="\\t", flush=True)
    os._exit(0)
"""  # noqa: E501


def hole(path: Path, head: bytes, size: int, tail: bytes = b"") -> Path:
    """A file of `size` bytes, and a tail, of which only the first and the tail were written."""
    with path.open("wb") as file:
        file.write(head)
        file.truncate(size)
        file.seek(size)
        file.write(tail)
    return path


def pt(head: bytes, size: int = ARCHIVE.size) -> Callable[[Path], Path]:
    """An archive with nothing but a data.pkl of this beginning and size, whose checksum was not
    recorded.
    """
    name = b"a/data.pkl"
    local = LOCAL.pack(0x04034B50, 0, 0x0800, 0, 0, 0, 0, size, size, len(name), 0) + name
    entry = (
        ENTRY.pack(0x02014B50, 0, 0, 0x0800, 0, 0, 0, 0, size, size, len(name), 0, 0, 0, 0, 0, 0)
        + name
    )
    end = END.pack(0x06054B50, 0, 0, 1, 1, len(entry), len(local) + size, 0)
    return lambda folder: hole(folder / "m.pt", local + head, len(local) + size, entry + end)


def beside(name: str, size: int) -> Callable[[Path], Path]:
    def build(folder: Path) -> Path:
        (folder / "m.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
        return hole(folder / name, b"", size).parent

    return build


def legacy_of_two_blobs(size: int) -> Callable[[Path], Path]:
    """An object of two blobs of zeros, each of which may be there."""
    head = b"".join(
        o.stream(o.value(part), 2)
        for part in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True})
    )
    begin = b"\x80\x02](B" + struct.pack("<I", size)

    def build(folder: Path) -> Path:
        path = hole(
            folder / "m.bin", head + begin, len(head + begin) + size, b"B" + struct.pack("<I", size)
        )
        return hole_behind(path, size, b"e." + o.stream(o.value([]), 2))

    return build


def hole_behind(path: Path, size: int, tail: bytes) -> Path:
    with path.open("r+b") as file:
        file.seek(size, 2)
        file.write(tail)
    return path


LONG = 64 << 20
SPARSE: dict[str, tuple[str, Callable[[Path], Path]]] = {
    "nothing in a data.pkl": ("M930", pt(b"")),
    "a data.pkl above the limit": ("M914", pt(b"", ARCHIVE.size + 1)),
    "a frame": ("M930", pt(b"\x80\x04\x95" + struct.pack("<Q", 65 << 20))),
    "a frame of all there is": ("M932", pt(b"\x80\x04\x95" + struct.pack("<Q", ARCHIVE.size - 11))),
    "a text": ("M930", pt(b"\x80\x02X" + struct.pack("<I", LONG))),
    "bytes": ("M930", pt(b"\x80\x04B" + struct.pack("<I", LONG))),
    "a bytearray": ("M930", pt(b"\x80\x05\x96" + struct.pack("<Q", LONG))),
    "a legacy file": (
        "M930",
        lambda folder: hole(folder / "m.bin", o.legacy(o.value({}))[:60], 1 << 34),
    ),
    "a legacy file with a large object": ("opened", legacy_of_two_blobs(30 << 20)),
    "a legacy file with an object above the limit": ("M932", legacy_of_two_blobs(40 << 20)),
    "a header of safetensors": (
        "M906",
        lambda folder: hole(
            folder / "m.safetensors", struct.pack("<Q", MAX_HEADER) + b"{", 7 + MAX_HEADER, b"}"
        ),
    ),
    "an index": (
        "M906",
        lambda folder: hole(folder / "pytorch_model.bin.index.json", b"{", MAX_INDEX),
    ),
    "an index of safetensors": (
        "M906",
        lambda folder: hole(folder / "model.safetensors.index.json", b"{", MAX_INDEX),
    ),
    "items": ("M906", beside(ITEMS, MAX_ITEMS)),
    "a stamp": ("opened", beside(HISTORY, MAX_HISTORY)),
}


@pytest.fixture(scope="module")
def inspected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What `inspect` says of each, and the most memory that it took, in kB."""
    paths = []
    for _, build in SPARSE.values():
        folder = tmp_path_factory.mktemp("sparse")
        paths.append(str(build(folder)))
    done = subprocess.run(
        [sys.executable, "-c", INSPECT, *paths],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(SPARSE, (line.split("\t") for line in done.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("what", SPARSE)
def test_a_hole_in_a_file_takes_no_more_memory_than_is_promised(
    what: str, inspected: dict[str, list[str]]
) -> None:
    code, _ = SPARSE[what]
    said, peak = inspected[what]
    assert said == code
    assert int(peak) * 1024 < MEMORY
