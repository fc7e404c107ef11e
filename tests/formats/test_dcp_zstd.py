"""Archives that torch wrote through its stream extension. zlib stands in for zstandard, which is
not there everywhere; the shape of the streams is the same.
"""

from __future__ import annotations

import gc
import gzip
import io
import os
from pathlib import Path
from typing import IO, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_folders import Cutter, rows, tensor_of
from torch.distributed.checkpoint._extension import (
    ExtensionRegistry,
    StreamTransformExtension,
)

import migrate
from migrate import formats
from migrate.core.errors import CheckpointError
from migrate.formats import _dcpzstd
from migrate.source.blobs import ChunkedTensor

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

STATE = {
    "w": torch.arange(12.0).reshape(4, 3),
    "t": torch.arange(12.0).reshape(4, 3).t(),
    "step": 7,
}


class ByGzip(StreamTransformExtension):
    version = "1"

    @staticmethod
    def from_descriptor(version: str) -> ByGzip:
        return ByGzip()

    @staticmethod
    def registry_name() -> str:
        return "stream.zstd"

    def get_descriptor(self) -> str:
        return f"stream.zstd/{self.version}"

    def transform_to(self, output: IO[bytes]) -> Any:
        return gzip.GzipFile(fileobj=output, mode="wb")

    def transform_from(self, input: IO[bytes]) -> Any:
        return gzip.GzipFile(fileobj=input)


class Rot13(ByGzip):
    """An extension of somebody's own, of which reading asks."""

    asked = False

    @staticmethod
    def from_descriptor(version: str) -> Rot13:
        Rot13.asked = True
        return Rot13()

    @staticmethod
    def registry_name() -> str:
        return "stream.rot13"

    def get_descriptor(self) -> str:
        return "stream.rot13/1"


class Turned(Rot13):
    """Bytes by the thirteenth behind them."""

    @staticmethod
    def from_descriptor(version: str) -> Turned:
        assert version == "1"
        return Turned()

    def transform_to(self, output: IO[bytes]) -> Any:
        return _Turning(output)

    def transform_from(self, input: IO[bytes]) -> Any:
        return io.BytesIO(bytes((byte - 13) % 256 for byte in input.read()))


class _Turning(io.RawIOBase):
    def __init__(self, out: IO[bytes]) -> None:
        super().__init__()
        self._out = out

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._out.write(bytes((byte + 13) % 256 for byte in memoryview(data).cast("B")))
        return memoryview(data).nbytes


def save(folder: Path, extension: Any) -> Path:
    writer = dcp.FileSystemWriter(folder, sync_files=False, _extensions=[extension])
    dcp.save(STATE, storage_writer=writer, planner=Cutter({"w": rows((4, 3), [2, 2])}))
    return folder


@pytest.fixture
def by_gzip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_dcpzstd, "decompressor", lambda: lambda raw: gzip.GzipFile(fileobj=raw))


def refused(path: Path) -> list[str]:
    with pytest.raises(CheckpointError) as caught:
        formats.open(path)
    return [f"{d.code}: {d.message}" for d in caught.value.diagnostics]


def check(folder: Path) -> None:
    with formats.open(folder) as source:
        index = source.index
        assert isinstance(index.tensors["w"], ChunkedTensor)
        for key, stored in index.tensors.items():
            found = tensor_of(source, stored)
            assert torch.equal(found, STATE[key])  # type: ignore[arg-type]
        assert index.items == {"step": 7}
        assert index.notes == ()
        source.check_unchanged()
        assert source.identities().keys() == {".metadata", "__0_0.distcp"}


@pytest.mark.usefixtures("by_gzip")
def test_compressed_archives_are_decompressed_once(tmp_path: Path) -> None:
    folder = save(tmp_path / "c", ByGzip())
    assert (folder / "__0_0.distcp").stat().st_size < 4000
    check(folder)


@pytest.mark.libraries
def test_zstandard_itself(tmp_path: Path) -> None:
    pytest.importorskip("zstandard")
    from torch.distributed.checkpoint._extension import ZStandard

    check(save(tmp_path / "c", ZStandard()))


@pytest.mark.usefixtures("by_gzip")
def test_a_run_reads_them(tmp_path: Path) -> None:
    folder = save(tmp_path / "c", ByGzip())
    migrate.apply(folder, tmp_path / "out.safetensors", rules=rule(tmp_path))
    with formats.open(tmp_path / "out.safetensors") as source:
        found = {key: tensor_of(source, stored) for key, stored in source.index.tensors.items()}
    assert found.keys() == {"v", "t"}
    assert torch.equal(found["v"], torch.arange(12.0).reshape(4, 3))
    # not by its names alone: the output is not compressed
    migrate.apply(folder, tmp_path / "out", rules=rule(tmp_path), output_format="dcp")
    loaded = {"v": torch.zeros(4, 3)}
    dcp.load(loaded, checkpoint_id=tmp_path / "out")
    assert torch.equal(loaded["v"], torch.arange(12.0).reshape(4, 3))


def rule(folder: Path) -> Path:
    path = folder / "rule.yaml"
    path.write_text(
        "id: demo/v2/x\ntitle: A change\nlineage: demo\nedge: [v1, v2]\nkeep: [t]\n"
        "rules:\n  - {name: r, from: w, to: v}\n"
    )
    return path


def test_without_a_decompressor_they_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_dcpzstd, "decompressor", lambda: None)
    found = refused(save(tmp_path / "c", ByGzip()))
    assert len(found) == 4 - 1
    assert all("is compressed by zstandard, and nothing here can decompress" in f for f in found)


def test_other_transforms_are_refused_by_name(tmp_path: Path) -> None:
    class Second(ByGzip):
        version = "2"

    found = refused(save(tmp_path / "c", Second()))
    assert "was written through stream.zstd/2, which cannot be read" in found[0]


class EOFErrorStream(io.BytesIO):
    def read(self, size: int | None = -1) -> bytes:
        raise EOFError("the stream is cut short")


def test_what_cannot_be_decompressed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(tmp_path / "c", ByGzip())
    monkeypatch.setattr(_dcpzstd, "decompressor", lambda: lambda raw: EOFErrorStream())
    assert "cannot be decompressed: the stream is cut short" in refused(folder)[0]
    # far more than .metadata says
    monkeypatch.setattr(_dcpzstd, "decompressor", lambda: lambda raw: io.BytesIO(bytes(1 << 22)))
    found = refused(folder)
    assert found[0].startswith("M914: ")
    assert "which is more than .metadata says" in found[0]


def test_an_extension_that_no_reader_is_told_of_is_refused_as_torch_does(tmp_path: Path) -> None:
    """Stock torch reads it only with a registry that the caller makes; nothing of it runs here."""
    save(tmp_path / "in", Rot13())
    state = {"w": torch.zeros(4, 3)}
    with pytest.raises(dcp.api.CheckpointException, match="Unknown extension"):
        dcp.load(state, storage_reader=dcp.FileSystemReader(tmp_path / "in"))
    with pytest.raises(dcp.api.CheckpointException, match=r"M938.*\n?.*stream\.rot13/1"):
        dcp.load(state, storage_reader=migrate.dcp.MigratingReader(tmp_path / "in"))
    assert not state["w"].any()
    assert not Rot13.asked


@pytest.mark.usefixtures("by_gzip")
def test_an_extension_that_the_caller_hands_over_is_read_through(tmp_path: Path) -> None:
    """Its classes are the caller's code; a name in the checkpoint chooses among these alone."""
    registry = ExtensionRegistry()
    registry.register(Turned)
    save(tmp_path / "in", Turned())
    rules = rule(tmp_path)
    for key, reader in (
        ("w", dcp.FileSystemReader(tmp_path / "in", _extension_registry=registry)),
        ("w", migrate.dcp.MigratingReader(tmp_path / "in", extensions=registry)),
        ("v", migrate.dcp.MigratingReader(tmp_path / "in", rules=rules, extensions=registry)),
    ):
        state: dict[str, Any] = {key: torch.zeros(4, 3), "t": torch.zeros(3, 4), "step": 0}
        dcp.load(state, storage_reader=reader)
        assert torch.equal(state[key], STATE["w"])  # type: ignore[arg-type]
        assert torch.equal(state["t"], STATE["t"])  # type: ignore[arg-type]
        assert state["step"] == 7
    without = migrate.dcp.MigratingReader(tmp_path / "in", extensions=ExtensionRegistry())
    with pytest.raises(dcp.api.CheckpointException, match=r"M938.*\n?.*stream\.rot13/1"):
        dcp.load({"w": torch.zeros(4, 3)}, storage_reader=without)


def open_files() -> list[str]:
    """What this process has open: files that exist, and those that have no name any more."""
    here = Path("/proc/self/fd")
    return sorted(os.readlink(one) for one in here.iterdir() if os.path.islink(one))


@pytest.mark.usefixtures("by_gzip")
def test_a_reader_keeps_nothing_open_of_a_load_that_did_not_come_about(
    tmp_path: Path,
) -> None:
    """torch does not say to a reader that a planner failed: what was decompressed goes with it."""
    source, before = save(tmp_path / "in", ByGzip()), open_files()
    wrong = {"w": torch.zeros(5, 3)}
    reader = migrate.dcp.MigratingReader(source)
    with pytest.raises(dcp.api.CheckpointException, match="Size mismatch"):
        dcp.load(wrong, storage_reader=reader)
    (left,) = [name for name in open_files() if name not in before]
    assert "deleted" in left
    del reader
    gc.collect()
    assert open_files() == before
    reader = migrate.dcp.MigratingReader(source)
    right = {"w": torch.zeros(4, 3), "step": 0}
    dcp.load(right, storage_reader=reader)
    assert right["step"] == 7
    assert torch.equal(right["w"], torch.arange(12.0).reshape(4, 3))
    assert open_files() == before
