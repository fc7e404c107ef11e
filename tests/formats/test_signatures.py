"""What a file is, told from its first and last bytes, and said by name when it is not one of
torch's containers.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import pickle
import tarfile
import zipfile
from typing import Any

import pytest
import torch
from handmade_zip import build, genuine

from migrate.core.errors import CheckpointError
from migrate.formats._signatures import HEAD, TAIL, file_kind, refuse_kind


def told(data: bytes) -> str:
    return file_kind(data[:HEAD], len(data), data[-TAIL:])


def saved(**options: Any) -> bytes:
    file = io.BytesIO()
    torch.save({"w": torch.arange(3.0)}, file, **options)
    return file.getvalue()


def tar(format: int) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=format) as out:
        for name in ("sys_info", "pickle", "tensors", "storages"):
            info = tarfile.TarInfo(name)
            info.size = 5
            out.addfile(info, io.BytesIO(b"12345"))
    return file.getvalue()


def old_tar() -> bytes:
    """A tar without the sign `ustar`, as the first tars were; the checksum is the only sign."""
    block = bytearray(tar(tarfile.USTAR_FORMAT)[:512])
    block[257:265] = bytes(8)
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block) + bytes(1024)


DATA = b"text that is packed " * 50
KINDS = {
    "zip": saved(),
    "legacy": saved(_use_new_zipfile_serialization=False),
    "legacy, protocol 4": saved(_use_new_zipfile_serialization=False, pickle_protocol=4),
    "zip, with bytes in front": build(genuine(), prefix=b"#!/bin/sh\n"),
    "zip, an empty one": build([]),
    "tar": tar(tarfile.USTAR_FORMAT),
    "tar, of gnu": tar(tarfile.GNU_FORMAT),
    "tar, with pax headers": tar(tarfile.PAX_FORMAT),
    "tar, an old one": old_tar(),
    "gzip": gzip.compress(DATA),
    "bzip2": bz2.compress(DATA),
    "xz": lzma.compress(DATA),
    "zstd": b"\x28\xb5\x2f\xfd" + DATA,
    "7z": b"7z\xbc\xaf\x27\x1c\0\4" + DATA,
    "rar": b"Rar!\x1a\7\1\0" + DATA,
    "pickle": pickle.dumps({"w": 1}, 2),
    "pickle, protocol 4": pickle.dumps({"w": 1}, 4),
    "pickle, protocol 5": pickle.dumps([1], 5),
    "pickle, protocol 0": pickle.dumps({"w": 1}, 0),
    "pickle, a call of protocol 0": b"cos\nsystem\n(S'true'\ntR.",
    "hdf5": b"\x89HDF\r\n\x1a\n" + DATA,
    "numpy": b"\x93NUMPY\1\0" + DATA,
    "gguf": b"GGUF\3\0\0\0" + DATA,
    "safetensors": b"\x02\0\0\0\0\0\0\0{}",
    "git-lfs": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n",
    "html": b"\n<!DOCTYPE html><html></html>",
    "html, without a type": b"<html></html>",
    "empty": b"",
    "unknown": b"hello",
    "unknown, zeros": bytes(1024),
    "unknown, one byte": b"\x80",
    "unknown, large": b"\x01\x02\x03" * 5000,
}


@pytest.mark.parametrize("name", KINDS)
def test_a_file_is_told_by_its_bytes(name: str) -> None:
    assert told(KINDS[name]) == name.partition(",")[0]


@pytest.mark.parametrize("name", sorted({n.partition(",")[0] for n in KINDS} - {"zip", "legacy"}))
def test_another_kind_is_refused_by_name(name: str) -> None:
    with pytest.raises(CheckpointError, match=r"M941.*x.pt: is ") as caught:
        refuse_kind("x.pt", name)
    assert caught.value.diagnostics[0].help


def test_a_zip_of_any_length_in_front_of_its_end_is_a_zip() -> None:
    file = io.BytesIO(b"x" * 3000)
    file.seek(0, 2)
    with zipfile.ZipFile(file, "a") as out:
        out.writestr("a", b"b")
    assert told(file.getvalue()) == "zip"
