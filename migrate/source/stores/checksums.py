"""The checksums that S3 keeps of objects, and how those of parts make that of the whole.

All three are remainders, so the one of two stretches in a row follows from that of each and the
length of the second. CRC32 is computed here; the others are awscrt's, as boto3's are.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Final, NamedTuple

from ..zip_archive import combine, crc32

# bytes of each
_WIDTHS: Final = {"CRC32": 4, "CRC32C": 4, "CRC64NVME": 8}


class Checksum(NamedTuple):
    """A kind of checksum: of bytes, going on from a value; and of two stretches in a row, from that
    of each and the length of the second.
    """

    name: str
    of: Callable[[Any, int], int]
    combine: Callable[[int, int, int], int]

    def joined(self, parts: Iterable[tuple[int, int]]) -> int:
        """That of stretches in a row, each with its checksum and its length."""
        found = 0
        for value, length in parts:
            found = self.combine(found, value, length)
        return found


def checksum_named(name: str | None) -> Checksum | None:
    """The checksum that S3 calls so; None for one that cannot be combined here."""
    if name == "CRC32":
        return Checksum(name, crc32, combine)
    if name not in _WIDTHS:
        return None
    try:
        from awscrt import checksums
    except ImportError:
        return None
    # older releases cannot combine
    joining = getattr(checksums, f"combine_{name.lower()}", None)
    return None if joining is None else Checksum(name, getattr(checksums, name.lower()), joining)


def decoded(name: str, text: str | None) -> int | None:
    """A checksum as S3 writes it; None for what is none, such as that of the checksums of parts."""
    with suppress(ValueError):
        if text and len(found := b64decode(text, validate=True)) == _WIDTHS[name]:
            return int.from_bytes(found, "big")
    return None


def kept_in(answer: Any) -> tuple[str, int] | None:
    """The checksum of all bytes of an object that an answer of S3 tells, and its name."""
    for name in _WIDTHS:
        if (found := decoded(name, answer.get(f"Checksum{name}"))) is not None:
            return name, found
    return None


def joined_parts(parts: Iterable[Any]) -> tuple[str, int, int] | None:
    """The checksum of the parts of an object in a row, as S3 describes them: its name, its value
    and how many bytes that are; None where a part has none of its own.
    """
    found: tuple[str, int, int] | None = None
    for part in parts:
        one, size = kept_in(part), part["Size"]
        if one is None or (found is not None and one[0] != found[0]):
            return None
        name, value = one
        if found is not None:
            kind = checksum_named(name)
            if kind is None:
                return None
            found = name, kind.combine(found[1], value, size), found[2] + size
        else:
            found = name, value, size
    return found
