"""A source and a target without any format: raw bytes in files, for tests of the running floor
alone.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from migrate.core import view as views
from migrate.core.errors import fail
from migrate.core.spec import BITS, Spec, spec
from migrate.elements.raw import pack
from migrate.planning.graph import Tensor
from migrate.running.resources import RunOptions
from migrate.running.tiles import write_target
from migrate.source.blobs import Identity, Stored, identity
from migrate.source.index import Index
from migrate.source.target import OutputFile, Placed, Target

KINDS = {
    "uint8": "u1",
    "bfloat16": "u2",
    "float32": "u4",
    "float64": "u8",
    "complex128": "V16",
    "float4_e2m1fn": "u1",
    "float6_e2m3fn": "u1",
}


class RawBlob:
    def __init__(self, path: Path) -> None:
        self.name = path.name
        self.fd = os.open(path, os.O_RDONLY)
        self.identity: Identity | None = identity(os.fstat(self.fd))
        self.size = os.fstat(self.fd).st_size

    def hold(self) -> AbstractContextManager[int | None]:
        return nullcontext(self.fileno())

    def fileno(self) -> int | None:
        return self.fd

    def readinto(self, offset: int, buffer: memoryview) -> None:
        while buffer:
            n = os.preadv(self.fd, [buffer], offset)
            if not n:
                fail("M905", f"{self.name} was cut short")
            buffer, offset = buffer[n:], offset + n


class MemoryBlob(RawBlob):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.identity = None

    def fileno(self) -> int | None:
        return None


class RawSource:
    format = "raw"

    def __init__(
        self,
        folder: Path,
        tensors: dict[str, Stored],
        files: list[str],
        blob: type[RawBlob] = RawBlob,
    ) -> None:
        self.path = str(folder)
        self.blobs = [blob(folder / f) for f in files]
        self.index = Index(tensors, tuple(files))
        self._seen = [self._stat(b) for b in self.blobs]

    @staticmethod
    def _stat(blob: RawBlob) -> tuple[int, int]:
        found = os.fstat(blob.fd)
        return found.st_size, found.st_mtime_ns

    def side_file(self, path: str) -> bytes:
        return (Path(self.path) / path).read_bytes()

    def identities(self) -> dict[str, Identity] | None:
        found = {blob.name: identity(os.fstat(blob.fd)) for blob in self.blobs}
        return found if all(blob.identity for blob in self.blobs) else None

    def check_unchanged(self) -> None:
        for blob, seen in zip(self.blobs, self._seen, strict=True):
            if self._stat(blob) != seen:
                fail("M905", f"{blob.name} has changed")

    def close(self) -> None:
        for blob in self.blobs:
            if blob.fd >= 0:
                os.close(blob.fd)
                blob.fd = -1


def random_raw(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    n = int(np.prod(shape, dtype=np.int64))
    if BITS[dtype] < 8:
        return rng.integers(0, 1 << BITS[dtype], n).astype("u1").reshape(shape)
    return rng.integers(0, 256, n * BITS[dtype] // 8).astype("u1").view(KINDS[dtype]).reshape(shape)


def write_source(
    folder: Path,
    arrays: dict[str, tuple[str, np.ndarray]],
    files: int = 1,
    blob: type[RawBlob] = RawBlob,
) -> RawSource:
    """Raw files of `arrays` (key -> (dtype, raw elements)), dealt out over `files`, with odd gaps
    between tensors.
    """
    folder.mkdir(parents=True, exist_ok=True)
    contents = [bytearray(b"head") for _ in range(files)]
    tensors = {}
    for i, (key, (dtype, array)) in enumerate(arrays.items()):
        content = contents[i % files]
        content += b"." * (i % 5)
        tensors[key] = Stored(Spec(dtype, array.shape), i % files, len(content))
        content += pack(array, dtype)
    names = [f"raw-{i}.bin" for i in range(files)]
    for name, content in zip(names, contents, strict=True):
        (folder / name).write_bytes(content)
    return RawSource(folder, tensors, names, blob)


def whole(key: str, dtype: str, shape: tuple[int, ...]) -> Tensor:
    return Tensor(spec(dtype, shape), views.stored(0, shape), (key,))


def describe(
    outputs: dict[str, Tensor], *, files: int = 1, folder: bool = True, header: bytes = b"HEADER.."
) -> Target:
    parts: list[list[Placed]] = [[] for _ in range(files)]
    ends = [len(header)] * files
    for i, (key, tensor) in enumerate(outputs.items()):
        n = tensor.spec.nbytes
        parts[i % files].append(Placed(key, ends[i % files], n))
        ends[i % files] += n
    return Target(
        tuple(
            OutputFile(f"out-{i}.bin", header, tuple(p), e)
            for i, (p, e) in enumerate(zip(parts, ends, strict=True))
        ),
        folder,
    )


def read_back(out: Path, target: Target) -> dict[str, bytes]:
    found = {}
    for file in target.files:
        content = (out / file.name if target.folder else out).read_bytes()
        assert len(content) == file.size
        assert content.startswith(file.header)
        for key, offset, nbytes, _ in file.tensors:
            found[key] = content[offset : offset + nbytes]
    return found


def write_and_read(
    outputs: dict[str, Tensor], source: RawSource, out: Path, files: int = 1, **options: Any
) -> dict[str, bytes]:
    """The bytes of each output of a run, as its files hold them."""
    target = describe(outputs, files=files)
    chosen = RunOptions(**{"fsync": False, "threads": 2, **options})
    write_target(outputs, source, target, out, digest="d", options=chosen)
    return read_back(out, target)
