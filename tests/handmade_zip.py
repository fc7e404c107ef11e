"""Zip archives made by hand, with a knob for every field: what the tests of the strict reader are
fed with.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Member:
    """One record as torch writes it. `local` and `central` replace fields by name; the extra fields
    and the descriptor can be given.
    """

    name: str | bytes
    data: bytes = b""
    local: dict[str, Any] = field(default_factory=dict)
    central: dict[str, Any] = field(default_factory=dict)
    local_extra: bytes | None = None
    central_extra: bytes = b""
    comment: bytes = b""
    descriptor: bytes | None = None
    gap: bytes = b""
    # None: where the header really is
    header: int | None = None
    listed: bool = True
    written: bool = True


def genuine(root: str = "m") -> list[Member]:
    """The records of a small file of torch.save."""
    return [
        Member(f"{root}/data.pkl", b"\x80\x02}q\x00."),
        Member(f"{root}/byteorder", b"little"),
        Member(f"{root}/data/0", bytes(range(48))),
        Member(f"{root}/data/1", b""),
        Member(f"{root}/version", b"3\n"),
    ]


def build(
    members: list[Member],
    *,
    prefix: bytes = b"",
    suffix: bytes = b"",
    end: dict[str, Any] | None = None,
    end64: dict[str, Any] | None = None,
    locator: dict[str, Any] | None = None,
    zip64: bool = True,
    between: bytes = b"",
    behind_directory: bytes = b"",
) -> bytes:
    """The archive. `end`, `end64` and `locator` replace fields of the end records by name."""
    out = bytearray(prefix)
    directory = bytearray()
    for member in members:
        out += member.gap
        name = member.name.encode() if isinstance(member.name, str) else member.name
        crc, size = zlib.crc32(member.data), len(member.data)
        flags = 0x0808 if size else 0x0800
        at = len(out)
        extra = member.local_extra
        if extra is None:
            padding = -(at + 34 + len(name)) % 64
            extra = b"FB" + struct.pack("<H", padding) + b"Z" * padding
        fields = {
            "sign": 0x04034B50,
            "need": 0,
            "flags": flags,
            "method": 0,
            "time": 0,
            "date": 0,
            "crc": 0,
            "packed": 0,
            "size": 0,
        }
        fields |= {"name": name} | member.local
        written = fields.pop("name")
        record = (
            struct.pack("<IHHHHHIIIHH", *fields.values(), len(written), len(extra))
            + written
            + extra
            + member.data
        )
        if member.descriptor is not None:
            record += member.descriptor
        elif fields["flags"] & 8:
            record += b"PK\x07\x08" + struct.pack("<III", crc, size, size)
        if member.written:
            out += record
        if not member.listed:
            continue
        fields = {
            "sign": 0x02014B50,
            "made": 0,
            "need": 0,
            "flags": flags,
            "method": 0,
            "time": 0,
            "date": 0,
            "crc": crc,
        }
        fields |= {"packed": size, "size": size, "disk": 0, "internal": 0, "attributes": 0}
        fields |= {
            "header": at if member.header is None else member.header,
            "name": name,
        } | member.central
        written = fields.pop("name")
        values = list(fields.values())
        lengths = (len(written), len(member.central_extra), len(member.comment))
        directory += struct.pack("<IHHHHHHIIIHHHHHII", *values[:10], *lengths, *values[10:])
        directory += written + member.central_extra + member.comment
    out += between
    begin, length, count = len(out), len(directory), sum(m.listed for m in members)
    out += directory + behind_directory
    if zip64:
        at = len(out)
        fields = {
            "sign": 0x06064B50,
            "own": 44,
            "made": 0x031E,
            "need": 45,
            "disk": 0,
            "start": 0,
            "here": count,
            "count": count,
        }
        fields |= {"length": length, "begin": begin} | (end64 or {})
        out += struct.pack("<IQHHIIQQQQ", *fields.values())
        fields = {"sign": 0x07064B50, "disk": 0, "at": at, "disks": 1} | (locator or {})
        out += struct.pack("<IIQI", *fields.values())
    fields = {
        "sign": 0x06054B50,
        "disk": 0,
        "start": 0,
        "here": count,
        "count": count,
        "length": length,
        "begin": begin,
    }
    fields |= {"comment": b""} | (end or {})
    comment = fields.pop("comment")
    out += struct.pack("<IHHHHIIH", *fields.values(), len(comment)) + comment
    return bytes(out + suffix)
