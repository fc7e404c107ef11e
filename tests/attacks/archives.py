"""Zip archives written byte by byte as torch.save writes them, with every field free to lie; and
the other containers of weights.
"""

from __future__ import annotations

import io
import json
import struct
import tarfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import opcodes as o


@dataclass(frozen=True, slots=True)
class Member:
    """One member. What is None is as it should be; `local` overrides fields of the local header
    alone.
    """

    name: str | bytes
    data: bytes = b""
    crc: int | None = None
    size: int | None = None
    packed: bytes | None = None
    method: int = 0
    flags: int = 0x0800
    extra: bytes = b""
    attributes: int = 0
    comment: bytes = b""
    offset: int | None = None
    local: Mapping[str, object] = field(default_factory=dict)

    @property
    def raw_name(self) -> bytes:
        return self.name if isinstance(self.name, bytes) else self.name.encode()


def data_pkl(
    pickle: bytes,
    storages: Mapping[str, bytes] | None = None,
    root: str = "archive",
    byteorder: bytes = b"little",
) -> list[Member]:
    """The members of a torch.save archive."""
    held = {"0": bytes(16)} if storages is None else storages
    records = {
        "data.pkl": pickle,
        ".format_version": b"1",
        ".storage_alignment": b"64",
        "byteorder": byteorder,
    }
    records |= {f"data/{key}": raw for key, raw in held.items()} | {"version": b"3\n"}
    return [Member(f"{root}/{name}", raw) for name, raw in records.items()]


def _header(member: Member) -> tuple[bytes, int, int, int]:
    """What is packed, its CRC, and the size before."""
    packed = member.data if member.packed is None else member.packed
    crc = zlib.crc32(member.data) if member.crc is None else member.crc
    return packed, crc, len(packed), len(member.data) if member.size is None else member.size


def archive(
    members: Sequence[Member],
    *,
    before: bytes = b"",
    after: bytes = b"",
    comment: bytes = b"",
    end: Mapping[str, int] | None = None,
    zip64: Mapping[str, int] | None = None,
    hidden: Sequence[Member] = (),
    between: bytes = b"",
) -> bytes:
    """The archive. `hidden` members have no entry in the directory, `zip64` adds the zip64 end
    record with fields of its own choice, `end` overrides fields of the end record, `between` stands
    between the members and the directory."""
    out = bytearray(before)
    entries = []
    for member in (*members, *hidden):
        at = len(out)
        here = replace(member, **member.local)  # type: ignore[arg-type]
        packed, crc, length, size = _header(here)
        room = (-(at + 30 + len(here.raw_name) + 4)) % 64 if not here.extra else 0
        extra = here.extra or b"FB" + struct.pack("<H", room) + b"Z" * room
        out += struct.pack(
            "<IHHHHHIIIHH",
            0x04034B50,
            0,
            here.flags,
            here.method,
            0,
            0x21,
            crc,
            length,
            size,
            len(here.raw_name),
            len(extra),
        )
        out += here.raw_name + extra + packed
        if member not in hidden:
            entries.append((member, at if member.offset is None else member.offset))
    out += between
    start = len(out)
    for member, at in entries:
        packed, crc, length, size = _header(member)
        out += struct.pack(
            "<IHHHHHHIIIHHHHHII",
            0x02014B50,
            0,
            0,
            member.flags,
            member.method,
            0,
            0x21,
            crc,
            length,
            size,
            len(member.raw_name),
            len(member.extra),
            len(member.comment),
            0,
            0,
            member.attributes,
            at,
        )
        out += member.raw_name + member.extra + member.comment
    length = len(out) - start
    if zip64 is not None:
        told = {
            "entries": len(entries),
            "length": length,
            "start": start,
            "record": len(out),
        } | zip64
        out += struct.pack(
            "<IQHHIIQQQQ",
            0x06064B50,
            44,
            45,
            45,
            0,
            0,
            told["entries"],
            told["entries"],
            told["length"],
            told["start"],
        )
        out += struct.pack("<IIQI", 0x07064B50, 0, told["record"], 1)
    told = {
        "disk": 0,
        "entries": len(entries),
        "length": length,
        "start": start,
        "comment": len(comment),
    } | (end or {})
    out += struct.pack(
        "<IHHHHIIH",
        0x06054B50,
        told["disk"],
        told["disk"],
        told["entries"],
        told["entries"],
        told["length"],
        told["start"],
        told["comment"],
    )
    return bytes(out) + comment + after


def changed(members: Sequence[Member], name: str, **fields: object) -> list[Member]:
    """The members, the one whose name ends in `name` with other fields."""
    return [replace(m, **fields) if m.raw_name.endswith(name.encode()) else m for m in members]  # type: ignore[arg-type]


def genuine_pickle(value: bytes | None = None) -> bytes:
    """The data.pkl of `{"w": four floats}`, and of a value beside it."""
    held = {"w": o.tensor()}
    return (
        o.stream(o.value(held), 2) if value is None else o.stream(o.value({**held, "epoch": value}))
    )


def tar_of(files: Mapping[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, raw in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(raw)
            tar.addfile(info, io.BytesIO(raw))
    return out.getvalue()


def safetensors(
    tensors: Mapping[str, bytes | Sequence[object]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """A safetensors file of U8 tensors with these bytes."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name, raw in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(raw)], "data_offsets": [at, at + len(raw)]}
        at += len(raw)
    return with_header(header, b"".join(bytes(raw) for raw in tensors.values()))  # type: ignore[arg-type]


def with_header(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data
