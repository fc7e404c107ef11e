"""The strict reader of torch's archives: all that torch writes goes in, and nothing that two
readers could take differently.
"""

from __future__ import annotations

import io
import os
import random
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from handmade_zip import Member, build, genuine

from migrate.core.errors import CheckpointError
from migrate.source import zip_archive
from migrate.source.blobs import BytesBlob, identity
from migrate.source.local import LocalBlob
from migrate.source.zip_archive import Archive, check_record, read_archive, read_record


def opened(path: Path) -> LocalBlob:
    return LocalBlob(str(path), os.open(path, os.O_RDONLY), lambda name: identity(os.stat(name)))


def saved(value: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


def tried(data: bytes) -> Archive | CheckpointError:
    """What reading gives; any other error than a CheckpointError fails the test."""
    try:
        return read_archive(BytesBlob("x.pt", data))
    except CheckpointError as error:
        return error


STATE = {
    "a": torch.arange(12.0),
    "none": torch.empty(0),
    "b": torch.ones(5, dtype=torch.bfloat16),
    "n": 3,
}


@pytest.fixture
def options() -> Any:
    """torch's settings for saving, put back afterwards."""
    from torch.utils.serialization import config

    before = config.save.compute_crc32, config.save.storage_alignment
    yield config.save
    config.save.compute_crc32, config.save.storage_alignment = before


@pytest.mark.parametrize("alignment", [1, 8, 64, 4096, 16384])
@pytest.mark.parametrize("crc", [True, False])
def test_a_file_of_torch_is_read_as_python_reads_it(
    options: Any, alignment: int, crc: bool, tmp_path: Path
) -> None:
    options.compute_crc32, options.storage_alignment = crc, alignment
    path = tmp_path / "model.pt"
    torch.save(STATE, path)
    blob = opened(path)
    found = read_archive(blob)
    blob_bytes = path.read_bytes()
    assert found.root == "model"
    with zipfile.ZipFile(path) as oracle:
        assert [f"model/{name}" for name in found.records] == oracle.namelist()
        for info, (name, record) in zip(oracle.infolist(), found.records.items(), strict=True):
            assert record.name == name
            assert record.crc == (info.CRC if info.CRC or not info.file_size else None)
            start = record.offset
            if crc:
                assert oracle.read(info) == blob_bytes[start : start + record.size]
            check_record(blob, record)
    if not crc:
        assert found.records["data/0"].crc is None
    assert found.records["data/0"].offset % alignment == 0
    reader = torch._C.PyTorchFileReader(str(path))
    for name, record in found.records.items():
        assert reader.get_record_offset(name) == record.offset
    blob.close()


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_a_file_in_memory_has_the_folder_archive(protocol: int) -> None:
    data = saved(STATE, pickle_protocol=protocol)
    found = read_archive(BytesBlob("x", data))
    assert found.root == "archive"
    assert read_record(BytesBlob("x", data), found.records["version"], 10) == b"3\n"


def test_an_archive_inside_a_larger_file_has_offsets_from_the_files_begin() -> None:
    one, two = saved(STATE), saved({"w": torch.arange(7)})
    blob = BytesBlob("x", one + two + b"tail")
    whole = read_archive(BytesBlob("y", two))
    found = read_archive(blob, start=len(one), size=len(two))
    assert {n: r.offset - len(one) for n, r in found.records.items()} == {
        n: r.offset for n, r in whole.records.items()
    }
    check_record(blob, found.records["data/0"])


def test_storages_larger_than_four_gib_are_where_torch_put_them(tmp_path: Path) -> None:
    path = tmp_path / "big.pt"
    big = torch.empty((1 << 32) + 5, dtype=torch.uint8)
    with torch.serialization.skip_data():
        torch.save(
            {"a": torch.ones(3), "big": big, "none": torch.empty(0), "b": torch.ones(7)}, path
        )
    blob = opened(path)
    found = read_archive(blob)
    reader = torch._C.PyTorchFileReader(str(path))
    assert [r.size for n, r in found.records.items() if n.startswith("data/")] == [
        12,
        (1 << 32) + 5,
        0,
        28,
    ]
    for name, record in found.records.items():
        assert reader.get_record_offset(name) == record.offset
    assert found.records["data/3"].offset > 1 << 32
    del reader
    blob.close()


def test_what_pythons_zipfile_stores_is_read() -> None:
    for flush in (True, False):
        file: Any = io.BytesIO()
        # a file that cannot seek gets data descriptors
        target = file if flush else type("Pipe", (), {"write": file.write, "flush": file.flush})()
        with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as out:
            for member in genuine():
                out.writestr(zipfile.ZipInfo(str(member.name)), member.data)
        found = read_archive(BytesBlob("x", file.getvalue()))
        for member in genuine():
            record = found.records[str(member.name)[2:]]
            assert file.getvalue()[record.offset : record.offset + record.size] == member.data


def test_a_handmade_archive_is_read() -> None:
    for zip64 in (True, False):
        found = read_archive(BytesBlob("x", build(genuine(), zip64=zip64)))
        assert found.root == "m"
        assert list(found.records) == ["data.pkl", "byteorder", "data/0", "data/1", "version"]


def test_storages_called_after_their_address_are_read() -> None:
    # as torch up to 1.8 wrote them
    found = read_archive(
        BytesBlob(
            "x",
            build(
                [
                    *genuine(),
                    Member("m/data/94097812345678", b"x"),
                    Member("m/data/18446744073709551615", b"y"),
                ]
            ),
        )
    )
    assert list(found.records)[-2:] == ["data/94097812345678", "data/18446744073709551615"]


def test_ten_thousand_small_records_are_read_by_few_calls() -> None:
    data = build(
        [Member("m/data.pkl", b"."), *(Member(f"m/data/{i}", b"x") for i in range(10_000))]
    )

    class Counting(BytesBlob):
        __slots__ = ()
        reads: list[int] = []  # noqa: RUF012

        def readinto(self, offset: int, buffer: memoryview) -> None:
            self.reads.append(buffer.nbytes)
            super().readinto(offset, buffer)

    assert len(read_archive(Counting("x", data)).records) == 10_001
    assert len(Counting.reads) < 60
    assert sum(Counting.reads) < 2.5 * len(data)


def edited(index: int, **changes: Any) -> list[Member]:
    members = genuine()
    for name, value in changes.items():
        setattr(members[index], name, value)
    return members


CRC = zlib.crc32(bytes(range(48)))


def described(crc: int = CRC, size: int = 48) -> bytes:
    return b"PK\x07\x08" + struct.pack("<III", crc, 48, size)


def beyond() -> Member:
    """A record without a descriptor that says that it is longer than it is."""
    fields = {"flags": 0x0800, "size": 50, "packed": 50, "crc": 7}
    return Member("m/data/2", b"y" * 22, local=fields, central=fields)


FULL = {"size": 0xFFFFFFFF, "packed": 0xFFFFFFFF}
DOUBLE = struct.pack("<HHQQ", 1, 16, 48, 48)

REFUSED = {
    # Z1
    "a duplicate name": (build([*genuine(), Member("m/data.pkl", b"evil")]), "M940",
    "data.pkl is there twice"),
    "a duplicate name in front": (build([Member("m/data.pkl", b"evil"), *genuine()]), "M940",
    "data.pkl is there twice"),
    "a duplicate storage": (build([*genuine(), Member("m/data/0", b"evil")]), "M940",
    "data/0 is there twice"),
    "a name equal but for case": (build([*genuine(), Member("m/DATA.pkl", b"evil")]), "M940",
    "upper and lower case"),
    "a folder equal but for case": (build([*genuine(), Member("M/data.pkl", b"evil")]), "M940",
    "does not lie in m/"),
    "a local header with another name": (build(edited(0, local={"name": b"m/data.pkx"})), "M940",
    "has another name"),
    "a local header with a longer name": (build(edited(0, local={"name": b"m/data.pkl2"})), "M940",
    "has another name"),
    "a renamed directory entry": (build(edited(2, central={"name": b"m/data/7"})), "M940",
    "has another name"),
    "local flags": (build(edited(2, local={"flags": 0x0800}, descriptor=described())), "M940",
    "contradict"),
    "local method": (build(edited(2, local={"method": 8})), "M940", "contradict"),
    "local time": (build(edited(2, local={"time": 7})), "M940", "contradict"),
    "local version": (build(edited(2, local={"need": 7})), "M940", "contradict"),
    "local crc": (build(edited(2, local={"crc": 7})), "M940", "contradict"),
    "local size": (build(edited(2, local={"size": 40, "packed": 40})), "M940", "contradict"),
    "local packed size": (build(edited(2, local={"packed": 48})), "M940", "contradict"),
    "no local header": (build(edited(2, local={"sign": 0x04034B51})), "M940", "no local header"),
    "a descriptor with another crc": (build(edited(2, descriptor=described(crc=1))), "M940",
    "no data descriptor"),
    "a descriptor with another size": (build(edited(2, descriptor=described(size=47))), "M940",
    "no data descriptor"),
    "a descriptor without a sign": (build(edited(2, descriptor=struct.pack("<III", CRC, 48, 48))),
    "M940", "no data descriptor"),
    "a wide descriptor": (build(edited(2,
    descriptor=b"PK\7\10" + struct.pack("<IQQ", CRC, 48, 48))), "M940", "no data descriptor"),
    "no descriptor": (build(edited(2, descriptor=b"")), "M940", "no data descriptor"),
    "two roots": (build([*genuine(), Member("n/data/2", b"x")]), "M940",
    "n/data/2 does not lie in m/"),
    "a record outside of the root": (build([*genuine(), Member("data.pkl", b"x")]), "M940",
    "does not lie in m/"),
    "no root": (build([Member("data.pkl", b"x"), Member("version", b"3\n")]), "M940",
    "not below a plain folder"),
    "bytes in front": (build(genuine(), prefix=b"#!/bin/sh\n"), "M940",
    "10 unclaimed bytes lie in front"),
    "bytes in front that offsets pass over": (b"MZ" * 32 + build(genuine()), "M940", "locator"),
    "bytes in front without zip64": (b"MZ" * 32 + build(genuine(), zip64=False), "M940",
    "directory should end"),
    "bytes behind": (build(genuine(), suffix=b"evil"), "M940", "4 bytes follow the end record"),
    "a zip behind": (build(genuine()) + build(genuine("n")), "M940", "locator"),
    "a zip behind without zip64": (build(genuine(), zip64=False) + build(genuine("n"), zip64=False),
    "M940", "directory should end"),
    "a second end record behind": (build(genuine()) + build(genuine())[-22:], "M940",
    "directory should end"),
    "an end record in the comment": (build(genuine(), end={"comment": build(genuine())[-22:]}),
    "M940", "directory should end"),
    "a comment": (build(genuine(), end={"comment": b"hi"}), "M940",
    "2 bytes follow the end record"),
    "a comment of no bytes": (build(genuine(), end={"comment": b""}, suffix=b"")[:-2] + b"\1\0",
    "M940", "comment"),
    "a gap before a record": (build(edited(2, gap=b"evil")), "M940",
    "4 unclaimed bytes lie in front"),
    "a gap before the directory": (build(genuine(), between=b"evil"), "M940",
    "4 unclaimed bytes lie between"),
    "a gap behind the directory": (build(genuine(), behind_directory=b"evil"), "M940",
    "directory should end"),
    "a record that is not in the directory": (build(edited(2, listed=False)), "M940",
    "unclaimed bytes lie in front"),
    "a last record that is not in the directory": (build(edited(4, listed=False)), "M940",
    "unclaimed bytes lie between"),
    "a locator that points elsewhere": (build(genuine(), locator={"at": 64}), "M940",
    "its locator points to 64"),
    "a second zip64 end record": (build(genuine(), behind_directory=build(genuine())[-98:-42],
    locator={"at": 1}), "M940", "locator"),
    "two disks": (build(genuine(), locator={"disks": 2}), "M940", "locator"),
    "a zip64 directory elsewhere": (build(genuine(), end64={"begin": 0}), "M940",
    "contradict each other"),
    "a zip64 count of its own": (build(genuine(), end64={"count": 1, "here": 1}), "M940",
    "contradict each other"),
    "a zip64 record with more in it": (build(genuine(), end64={"own": 60}), "M940",
    "contradict each other"),
    "an end record that leaves all to zip64": (build(genuine(), end={"begin": 0xFFFFFFFF}), "M940",
    "contradict each other"),
    "an entry without a record": (build([*genuine(), Member("m/data/2", b"x", written=False)]),
    "M940", "no room for a local header"),
    "a record that reaches into the directory": (build([*genuine(), beyond()]), "M940",
    "ends at 562, and the directory begins at 534"),
    "a count too low": (build(genuine(), end={"count": 4, "here": 4}, zip64=False), "M940",
    "directory of 4 entries"),
    "a count too high": (build(genuine(), end={"count": 6, "here": 6}, zip64=False), "M940",
    "directory ends in entry 5"),
    "a directory of another sign": (build(edited(2, central={"sign": 0x02014B51})), "M940",
    "entry 2 of the directory does not begin"),
    "a Unicode-path field": (build(edited(0, central_extra=struct.pack("<HHBI", 0x7075, 5, 1, 0))),
    "M940", "0x7075 in the directory"),
    "a local Unicode-path field": (build(edited(0,
    local_extra=struct.pack("<HHBI", 0x7075, 5, 1, 0))), "M940", "0x7075 in the local"),
    "an unknown field": (build(edited(0, local_extra=b"FC\0\0")), "M940",
    "0x4346 in the local header: unknown"),
    "a field beside the padding": (build(edited(0, local_extra=b"FB\1\0ZUT\0\0")), "M940",
    "0x5455 in the local header: times"),
    "padding twice": (build(edited(0, local_extra=b"FB\0\0FB\0\0")), "M940",
    "cut short or there twice"),
    "padding cut short": (build(edited(0, local_extra=b"FB\5\0ZZ")), "M940",
    "cut short or there twice"),
    "half a field": (build(edited(0, local_extra=b"FB")), "M940", "cut short or there twice"),
    "a local zip64 field with another size": (build(edited(2,
    local_extra=struct.pack("<HHQQ", 1, 16, 40, 40))), "M940", "contradict"),
    "a local zip64 field of odd length": (build(edited(2, local_extra=b"\1\0\3\0abc")), "M940",
    "contradict"),
    "a local zip64 field with another offset": (build(edited(2,
    local_extra=struct.pack("<HHQ", 1, 8, 5))), "M940", "contradict"),
    "a zip64 field that nothing asks for": (build(edited(2, central_extra=DOUBLE)), "M940",
    "does not fit the entry"),
    "a zip64 field that is missing": (build(edited(2, central=FULL)), "M940", "no data descriptor"),
    "a zip64 field that is too short": (
        build(edited(2, central=FULL, central_extra=b"\1\0\x08\0" + bytes(8))), "M940",
        "does not fit",
    ),
    "a zip64 size beyond the file": (
        build(edited(2, central=FULL, central_extra=b"\1\0\x10\0" + b"\xff" * 16)), "M940",
        "no data desc",
    ),
    "an entry with a comment": (build(edited(0, comment=b"hi")), "M940", "comment"),
    # Z2
    "deflate": (build(edited(0, central={"method": 8}, local={"method": 8})), "M941",
    "compressed (deflate)"),
    "zstd": (build(edited(0, central={"method": 93}, local={"method": 93})), "M941",
    "compressed (zstd)"),
    "an unknown method": (build(edited(0, central={"method": 77}, local={"method": 77})), "M941",
    "compressed (method 77)"),
    "encryption": (build(edited(0, central={"flags": 0x809}, local={"flags": 0x809})), "M941",
    "encrypted"),
    "an unknown flag": (build(edited(0, central={"flags": 0x80A}, local={"flags": 0x80A})), "M940",
    "flags 0x080a"),
    "a masked directory": (build(edited(0, central={"flags": 0x2808}, local={"flags": 0x2808})),
    "M940", "flags 0x2808"),
    "a link": (build(edited(2, central={"attributes": 0xA1FF0000})), "M940", "is a link"),
    "a folder": (build(edited(2, central={"attributes": 0x10})), "M940", "is a link, a folder"),
    "a device": (build(edited(2, central={"attributes": 0x21B60000})), "M940", "a device"),
    "another disk": (build(edited(2, central={"disk": 1})), "M940", "another disk"),
    "a folder entry": (build([*genuine(), Member("m/data/", b"")]), "M940", "end in a slash"),
    "an absolute name": (build([*genuine(), Member("/etc/passwd", b"x")]), "M940", "absolute"),
    "an absolute root": (build([Member("/data.pkl", b"x")]), "M940", "plain folder"),
    "a climbing name": (build([*genuine(), Member("m/../../x", b"x")]), "M940", "climb"),
    "a climbing root": (build(genuine("..")), "M940", "plain folder"),
    "a backslash": (build([*genuine(), Member("m\\data\\9", b"x")]), "M940", "odd characters"),
    "a drive": (build([*genuine(), Member("C:/x", b"x")]), "M940", "odd characters"),
    "a NUL": (build([*genuine(), Member("m/data/0\0", b"x")]), "M940", "odd characters"),
    "an escape code": (build([*genuine(), Member("m/\x1b[2J", b"x")]), "M940", "odd characters"),
    "a name that is not text": (build([*genuine(), Member(b"m/\xff\xfe", b"x")]), "M940",
    "odd characters"),
    "a root that is not text": (build([Member(b"\xff/data.pkl", b"x")]), "M940", "not text"),
    "an empty name": (build([*genuine(), Member("", b"x")]), "M940", "odd characters"),
    "an entry that overlaps": (build([*genuine(),
    Member("m/data/2", b"x", listed=True, header=10)]), "M940", "overlaps"),
    "two entries of one record": (build([*genuine(), Member("m/data/2", b"x", header=0)]), "M940",
    "overlaps"),
    "an entry behind the directory": (build([*genuine(), Member("m/data/2", b"x", header=10**6)]),
    "M940", "unclaimed bytes lie in front"),
    "a size that reaches into the next": (build(edited(2, central={"size": 49, "packed": 49})),
    "M940", "no data descriptor"),
    "a size of another stored size": (build(edited(2, central={"packed": 40})), "M940",
    "are stored as 40"),
    "a crc of nothing": (build(edited(3, central={"crc": 5})), "M940", "0 bytes with the CRC-32"),
    # Z4
    "an empty zip": (build([]), "M941", "empty zip"),
    "an empty zip without zip64": (build([], zip64=False), "M941", "empty zip"),
    "TorchScript": (build([*genuine(), Member("m/constants.pkl", b"x"),
    Member("m/code/__torch__.py", b"x")]), "M941", "TorchScript"),
    "TorchScript without constants": (build([*genuine(), Member("m/code/__torch__.py", b"x")]),
    "M941", "TorchScript"),
    "torch.package": (build([*genuine(), Member("m/.data/extern_modules", b"x")]), "M941",
    "torch.package"),
    "torch.export": (build([Member("m/archive_format", b"pt2"), Member("m/models/m.json", b"{}")]),
    "M941", "torch.export"),
    "npz": (build([Member("a.npy", b"x"), Member("b.npy", b"x")]), "M941", ".npz"),
    "a jar": (build([Member("META-INF/MANIFEST.MF", b"x"), Member("a/B.class", b"x")]), "M941",
    "with META-INF/MANIFEST.MF"),
    "an unknown record": (build([*genuine(), Member("m/extra.bin", b"x")]), "M941",
    "m/extra.bin, which torch.save does not write"),
    "a storage with a leading zero": (build([*genuine(), Member("m/data/01", b"x")]), "M941",
    "m/data/01"),
    "a storage with a name": (build([*genuine(), Member("m/data/x", b"x")]), "M941", "m/data/x"),
    "no data.pkl": (build(genuine()[1:]), "M941", "no data.pkl"),
    "a big-endian file": (build(edited(1, data=b"big")), "M941", "big-endian"),
    "an unknown byte order": (build(edited(1, data=b"middle")), "M940", "byteorder is `middle`"),
    "a long byte order": (build(edited(1, data=b"x" * 65)), "M940", "byteorder has 65 bytes"),
    "a long version": (build(edited(4, data=b"3" * 65)), "M940", "version has 65 bytes"),
    "a long identity": (build([*genuine(), Member("m/.data/serialization_id", b"0" * 65)]), "M940",
    "serialization_id has 65 bytes"),
    "a long format version": (build([*genuine(), Member("m/.format_version", b"1" * 65)]), "M940",
    ".format_version has 65 bytes"),
    "a long alignment": (build([*genuine(), Member("m/.storage_alignment", b"6" * 65)]), "M940",
    ".storage_alignment has 65 bytes"),
    "a wrong version crc": (build(genuine()).replace(b"3\n", b"4\n"), "M942", "version"),
    "a wrong byte order crc": (build(edited(1, data=b"little")).replace(b"little", b"big!!!"),
    "M942", "byteorder"),
    "a zip of another program": (build([Member("a/x", b"x"), Member("b/y", b"y")]), "M941",
    "a zip archive with a/x, not one"),
    "nothing": (b"", "M940", "no end record"),
    "text": (b"hello" * 100, "M940", "no end record"),
    "half an end record": (build(genuine())[:-1], "M940", "the end record is cut short"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_and_the_message_says_why(name: str) -> None:
    data, code, said = REFUSED[name]
    found = tried(data)
    assert isinstance(found, CheckpointError)
    (diagnostic,) = found.diagnostics
    assert (diagnostic.code, said in diagnostic.message) == (code, True), diagnostic.message
    assert diagnostic.message.startswith("x.pt: ")
    assert diagnostic.message.isascii()
    assert diagnostic.message.isprintable()
    assert len(diagnostic.message) < 400


def test_a_record_whose_bytes_changed_is_told_by_its_crc() -> None:
    data = bytearray(build(genuine()))
    found = read_archive(BytesBlob("x.pt", bytes(data)))
    record = found.records["data/0"]
    check_record(BytesBlob("x.pt", data), record)
    data[record.offset + 47] ^= 1
    read_archive(BytesBlob("x.pt", data))
    with pytest.raises(
        CheckpointError, match="data/0: its 48 bytes at 256 have the CRC-32"
    ) as caught:
        check_record(BytesBlob("x.pt", data), record)
    assert caught.value.diagnostics[0].code == "M942"


def test_a_record_longer_than_a_part_is_checked_to_its_end() -> None:
    data = bytearray(build([*genuine(), Member("m/data/2", bytes(3_000_001))]))
    record = read_archive(BytesBlob("x.pt", data)).records["data/2"]
    check_record(BytesBlob("x.pt", data), record)
    data[record.offset + 3_000_000] = 1
    with pytest.raises(CheckpointError, match="M942"):
        check_record(BytesBlob("x.pt", data), record)


def test_a_large_small_record_is_not_read() -> None:
    blob = BytesBlob("x.pt", build(genuine()))
    with pytest.raises(CheckpointError, match=r"M914.*data/0 has 48 bytes, allowed are 47"):
        read_record(blob, read_archive(blob).records["data/0"], 47)


def test_a_directory_beyond_the_limits_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    data = build(genuine())
    for limit in ("MAX_DIRECTORY", "MAX_RECORDS"):
        with monkeypatch.context() as patched:
            patched.setattr(zip_archive, limit, 4)
            found = tried(data)
            assert isinstance(found, CheckpointError)
            assert found.diagnostics[0].code == "M914"


def test_a_directory_that_claims_to_be_large_is_refused_before_it_is_read() -> None:
    found = tried(
        build(
            genuine(), end64={"length": 1 << 62, "begin": 5}, end={"length": 0xFFFFFFFF, "begin": 5}
        )
    )
    assert isinstance(found, CheckpointError)
    assert "directory should end" in found.diagnostics[0].message


def test_a_file_cut_at_any_byte_is_refused() -> None:
    data = saved(STATE)
    assert isinstance(tried(data), Archive)
    for length in range(len(data)):
        assert isinstance(tried(data[:length]), CheckpointError)
        assert isinstance(tried(data[length + 1 :]), CheckpointError)


@pytest.mark.parametrize("zip64", [True, False])
def test_any_byte_that_changes_is_refused_or_changes_nothing_that_is_read(zip64: bool) -> None:
    data = build(genuine(), zip64=zip64)
    whole = read_archive(BytesBlob("x", data))
    inside = {at for r in whole.records.values() for at in range(r.offset, r.offset + r.size)}
    for at in range(len(data)):
        for bits in (0x01, 0x20, 0x80, 0xFF):
            changed = bytearray(data)
            changed[at] ^= bits
            found = tried(bytes(changed))
            if isinstance(found, CheckpointError):
                continue
            assert (found.root, found.records) == (whole.root, whole.records)
            damaged = []
            for record in found.records.values():
                try:
                    check_record(BytesBlob("x", bytes(changed)), record)
                except CheckpointError:
                    damaged.append(record.name)
            assert bool(damaged) == (at in inside)


def test_random_damage_gives_nothing_but_checkpoint_errors() -> None:
    random_source = random.Random(4)
    originals = [build(genuine()), build(genuine(), zip64=False), saved({"w": torch.arange(3)})]
    refused = 0
    for _ in range(4000):
        data = bytearray(random_source.choice(originals))
        for _ in range(random_source.randrange(1, 6)):
            at = random_source.randrange(len(data))
            how = random_source.random()
            if how < 0.6:
                data[at] = random_source.choice([0, 1, 8, 0xFF, random_source.randrange(256)])
            elif how < 0.8:
                del data[at : at + random_source.randrange(1, 40)]
            else:
                data[at:at] = bytes(
                    data[
                        (begin := random_source.randrange(len(data))) : begin
                        + random_source.randrange(1, 40)
                    ]
                )
        refused += isinstance(tried(bytes(data)), CheckpointError)
    assert refused > 3000
