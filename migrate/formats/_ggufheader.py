"""The header of one GGUF file: read without gguf-py, with every check there can be.

    "GGUF", version u32, count of tensors u64, count of key-values u64
    a key, the type of its value u32, the value                       for each key-value
    a name, count of axes u32, lengths u64, type u32, offset u64      for each tensor
    padding to the alignment, then the data: each tensor padded to the alignment

All is little-endian; texts and arrays have their length, a u64, before them. Offsets count from the
begin of the data. llama.cpp reads tensors that lie in the order of the header without a hole; here
the order may be another one, a hole is refused, because nothing says what it hides.

Arrays that are longer than a configuration needs, as those of a tokenizer, are walked and not kept:
their length says that they are there. Source: docs/gguf.md of ggml, and gguf.cpp.
"""

from __future__ import annotations

import struct
from math import prod
from operator import itemgetter
from typing import Any, NamedTuple, NoReturn

from ..core.errors import Report, fail, plural, printable
from ..core.spec import Spec, spec
from ..source.blobs import FileBlob, Stored
from ..source.ggml_types import TYPES, GgmlType

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = "general.alignment"
# bytes of all that stands before the data; tokenizers take some millions of them
MAX_HEADER = 80_000_000
MAX_TENSORS, MAX_VALUES = 100_000, 100_000
MAX_NAME, MAX_SEGMENTS, MAX_AXES, MAX_ALIGNMENT = 65_535, 32, 4, 1 << 20
# bytes of all keys
MAX_KEYS = 4 << 20
# of an array that is kept, and bytes of a text or of all texts of an array
MOST_ITEMS, MOST_TEXT = 1024, 65_536
# texts of all arrays, each of which is a step; a tokenizer has some hundred thousand
MAX_TEXTS = 2_000_000
# bytes of all texts and arrays that are kept: as JSON they are some times as many
MOST_KEPT = 1 << 20
_WINDOW = 1 << 20
_MAX_PROBLEMS = 20
_CUT = "the file was cut short: fetch it again"

_SCALARS = {
    0: ("uint8", "<B"), 1: ("int8", "<b"), 2: ("uint16", "<H"), 3: ("int16", "<h"),
    4: ("uint32", "<I"), 5: ("int32", "<i"), 6: ("float32", "<f"), 7: ("bool", "<B"),
    10: ("uint64", "<Q"), 11: ("int64", "<q"), 12: ("float64", "<d"),
}  # fmt: skip
_FLOAT32, _BOOL, _TEXT, _ARRAY = 6, 7, 8, 9


class Left(NamedTuple):
    """A value that is not kept: what it is, and how many items or bytes it has."""

    kind: str
    length: int


class GgufHeader(NamedTuple):
    """The key-values and the tensors of one file, each in the order of the file.

    `types` are those of the tensors, by name; `None` is one whose size is not known. A tensor of
    blocks is bytes, and where in the file its type stands is in `marks`.
    """

    values: dict[str, Any]
    tensors: dict[str, Stored]
    types: dict[str, tuple[int, GgmlType | None]]
    marks: dict[str, Stored]


class _Info(NamedTuple):
    name: str
    lengths: tuple[int, ...]
    type: int
    offset: int
    # where the type stands in the file
    at: int


def read_header(blob: FileBlob, number: int, label: str) -> GgufHeader:
    """The header of the file that is blob `number`; `label` names it in messages.

    Guarantees that every tensor lies inside the file, aligned, without overlap and without a hole,
    and that its rows are whole blocks. M906 with the name and the numbers otherwise, M914 beyond a
    limit, M943 for a version or an order of bytes that is not read.
    """
    reader = _HeaderReader(blob, label)
    _check_version(reader.take(8), label)
    tensors, values = reader.unpack("<QQ", "the counts")
    for what, count, most in (
        ("tensors", tensors, MAX_TENSORS),
        ("key-values", values, MAX_VALUES),
    ):
        if count > most:
            fail("M914", f"{label}: claims {count} {what}, more than {most}")
    held: dict[str, Any] = {}
    room = MAX_KEYS
    for _ in range(values):
        key = reader.name("a key")
        room -= len(key)
        if room < 0:
            fail("M914", f"{label}: its keys have more than {MAX_KEYS} bytes")
        if key in held:
            fail("M906", f"{label}: the key {printable(key)} stands there twice")
        if key.count(".") >= MAX_SEGMENTS:
            fail("M914", f"{label}: the key {printable(key)} has more than {MAX_SEGMENTS} segments")
        held[key] = reader.value(f"key {printable(key)}")
    infos = [_read_info(reader) for _ in range(tensors)]
    alignment = held.get(ALIGNMENT, 32)
    if (
        type(alignment) is not int
        or not 0 < alignment <= MAX_ALIGNMENT
        or alignment.bit_count() > 1
    ):
        fail(
            "M906",
            f"{label}: {ALIGNMENT} is {printable(str(alignment), 60)}, and not a power of two up "
            f"to {MAX_ALIGNMENT}",
        )
    found = _place(infos, -(-reader.at // alignment) * alignment, alignment, blob, number, label)
    return GgufHeader(held, *found)


def _check_version(head: bytes, label: str) -> None:
    """M943 naming what is not read."""
    if head[:4] != MAGIC:
        fail("M906", f"{label}: starts with {ascii(head[:4])[1:]} and not with {ascii(MAGIC)[1:]}")
    version = int.from_bytes(head[4:], "little")
    if version in VERSIONS:
        return
    swapped = int.from_bytes(head[4:], "big")
    if swapped in (1, *VERSIONS):
        fail(
            "M943",
            f"{label}: GGUF of version {swapped} for a big-endian machine",
            help="convert it with gguf_convert_endian.py of llama.cpp",
        )
    fail(
        "M943",
        f"{label}: GGUF of version {version}, and versions 2 and 3 are read",
        help="make it again with the tools of llama.cpp"
        if version < VERSIONS[0]
        else "a newer migrate may read it",
    )


def _read_info(reader: _HeaderReader) -> _Info:
    name = reader.name("the name of a tensor")
    what = printable(name)
    (axes,) = reader.unpack("<I", what)
    if axes > MAX_AXES:
        fail("M906", f"{reader.label}: {what}: {axes} axes, more than the {MAX_AXES} of ggml")
    lengths = reader.unpack(f"<{axes}Q", what)
    at = reader.at
    kind, offset = reader.unpack("<IQ", what)
    return _Info(name, lengths, kind, offset, at)


class _HeaderReader:
    """The bytes of a header, one after the other; more of the file is read as they are needed."""

    def __init__(self, blob: FileBlob, label: str) -> None:
        self.blob, self.label, self.at = blob, label, 0
        self._room, self._texts_left = MOST_KEPT, MAX_TEXTS
        self._limit = min(blob.size, MAX_HEADER)
        self.data = b""

    def require(self, count: int, what: str = "the header") -> None:
        """Makes `count` more bytes readable. M906 if the file ends before, M914 at the limit."""
        end = self.at + count
        if end <= len(self.data):
            return
        if end > self.blob.size:
            fail(
                "M906",
                f"{self.label}: {what}: {count} bytes at {self.at} are needed, and the file ends "
                f"at {self.blob.size}",
                help=_CUT,
            )
        if end > MAX_HEADER:
            fail("M914", f"{self.label}: {what} ends at {end}, and a header at {MAX_HEADER}")
        size = min(max(end, 2 * len(self.data), _WINDOW), self._limit)
        self.data += self.blob.read(len(self.data), size - len(self.data))

    def take(self, count: int, what: str = "the header") -> bytes:
        self.require(count, what)
        self.at += count
        return self.data[self.at - count : self.at]

    def unpack(self, form: str, what: str) -> tuple[Any, ...]:
        return struct.unpack(form, self.take(struct.calcsize(form), what))

    def name(self, what: str) -> str:
        """A key or the name of a tensor: text of at least one byte. M906, M914."""
        (length,) = self.unpack("<Q", what)
        if length > MAX_NAME:
            fail("M914", f"{self.label}: {what} of {length} bytes, more than {MAX_NAME}")
        try:
            text = self.take(length, what).decode("utf-8")
        except UnicodeDecodeError:
            fail("M906", f"{self.label}: {what} at {self.at - length} is not UTF-8")
        if not text:
            fail("M906", f"{self.label}: {what} at {self.at} is empty")
        return text

    def value(self, what: str) -> Any:
        """The value that comes next, or a `Left` for one that is too long to keep."""
        (kind,) = self.unpack("<I", what)
        if kind == _TEXT:
            (length,) = self.unpack("<Q", what)
            self.require(length, what)
            self.at += length
            if length > MOST_TEXT or not self._keeps(length):
                return Left("string", length)
            return _text(self.data[self.at - length : self.at])
        if kind == _ARRAY:
            return self._array(what)
        if kind not in _SCALARS:
            self._refuse(f"{what} is of type {kind}, which GGUF does not have")
        form = _SCALARS[kind][1]
        return self._scalar(kind, self.unpack(form, what)[0], what)

    def _array(self, what: str) -> Any:
        kind, count = self.unpack("<IQ", what)
        if kind == _TEXT:
            return self._texts(count, what)
        if kind == _ARRAY:
            self._refuse(f"{what} is an array of arrays, which llama.cpp does not read either")
        if kind not in _SCALARS:
            self._refuse(f"{what} is an array of type {kind}, which GGUF does not have")
        name, form = _SCALARS[kind]
        size = count * struct.calcsize(form)
        self.require(size, what)
        self.at += size
        if count > MOST_ITEMS or not self._keeps(size):
            return Left(name, count)
        held = struct.unpack_from(f"<{count}{form[1]}", self.data, self.at - size)
        return [self._scalar(kind, item, what) for item in held]

    def _texts(self, count: int, what: str) -> Any:
        self._texts_left -= count
        # each has its length: a count that cannot be true is `require`'s, and no other is read for
        if self._texts_left < 0 and self.at + 8 * count <= self.blob.size:
            fail("M914", f"{self.label}: {what}: its arrays have more than {MAX_TEXTS} texts")
        self.require(8 * count, what)
        length_at, start = struct.Struct("<Q").unpack_from, self.at
        held: list[tuple[int, int]] = []
        for _ in range(count):
            self.require(8, what)
            (length,) = length_at(self.data, self.at)
            self.at += 8
            self.require(length, what)
            if count <= MOST_ITEMS:
                held.append((self.at, self.at + length))
            self.at += length
        size = self.at - start
        if count > MOST_ITEMS or size > MOST_TEXT or not self._keeps(size):
            return Left("string", count)
        return [_text(self.data[begin:end]) for begin, end in held]

    def _keeps(self, size: int) -> bool:
        """Whether there is room for a value of so many bytes; takes it."""
        self._room -= size
        return self._room >= 0

    def _scalar(self, kind: int, value: Any, what: str) -> Any:
        if kind == _BOOL:
            if value > 1:
                self._refuse(f"{what} is a bool of the byte {value}")
            return value == 1
        return shortest(value) if kind == _FLOAT32 else value

    def _refuse(self, message: str) -> NoReturn:
        fail("M906", f"{self.label}: {message}")


def _text(data: bytes) -> str:
    return data.decode("utf-8", "backslashreplace")


def shortest(value: float) -> float:
    """The number with the fewest digits that is this float32, as people wrote it: 1e-05, and not
    9.999999747378752e-06. What is not finite stays.
    """
    raw = struct.pack("<f", value)
    for digits in range(1, 9):
        near = float(f"{value:.{digits}g}")
        if abs(near) < 3.5e38 and _float32(near) == raw:
            return near
    return value


def _float32(value: float) -> bytes | None:
    try:
        return struct.pack("<f", value)
    except OverflowError:
        return None


_DAMAGED = (
    "the file is damaged, or was written by a faulty program: fetch it again, or make it anew"
)


def _place(
    infos: list[_Info], start: int, alignment: int, blob: FileBlob, number: int, label: str
) -> tuple[dict[str, Stored], dict[str, tuple[int, GgmlType | None]], dict[str, Stored]]:
    """Where each tensor lies, its type, and where that stands. All problems at once: M906."""
    report = Report()
    tensors: dict[str, Stored] = {}
    types: dict[str, tuple[int, GgmlType | None]] = {}
    marks: dict[str, Stored] = {}
    places: dict[str, Stored] = {}
    # how far the data is claimed; None: not known, behind a tensor without a length
    covered: int | None = 0
    last = "the header"
    in_order = sorted(infos, key=itemgetter(3))
    ends = [*(info.offset for info in in_order[1:]), max(blob.size - start, 0)]
    # a file without tensors ends, too
    for info, end in zip(in_order, ends, strict=False):
        shown = printable(info.name)
        known = TYPES.get(info.type)
        problem, made = _spec_of(info, known, end)
        sized = not problem
        if info.name in places:
            problem = "its name stands there twice"
        elif not problem and info.offset % alignment:
            problem = f"its offset {info.offset} is not a multiple of the alignment {alignment}"
        elif not problem and start + info.offset + made.nbytes > blob.size:
            problem = f"ends at {start + info.offset + made.nbytes}, and the file at {blob.size}"
        elif not problem and covered is not None and info.offset != covered:
            problem = (
                f"starts at {info.offset} of the data, and {printable(last)} ends at {covered}: "
                + (
                    f"{info.offset - covered} unclaimed bytes lie before it"
                    if info.offset > covered
                    else "they overlap"
                )
            )
        # what is said of one tensor is not said of all that follow
        if not sized:
            covered = None
        elif (stop := -(-(info.offset + made.nbytes) // alignment) * alignment) >= (covered or 0):
            covered, last = stop, info.name
        if problem:
            report.add("M906", f"{label}: {shown}: {problem}", help=_DAMAGED)
            if len(report.diagnostics) >= _MAX_PROBLEMS:
                break
        places[info.name] = Stored(made, number, start + info.offset)
    report.check()
    behind = blob.size - start - (covered or 0)
    if infos and behind > 0:
        fail(
            "M906",
            f"{label}: {plural(behind, 'unclaimed byte')} after {printable(last)}, the last tensor",
            help=_DAMAGED,
        )
    mark = spec("int32", ())
    for info in infos:
        known = TYPES.get(info.type)
        tensors[info.name] = places[info.name]
        types[info.name] = (info.type, known)
        if known is None or known.dtype is None:
            marks[info.name] = Stored(mark, number, info.at)
    return tensors, types, marks


def _spec_of(info: _Info, known: GgmlType | None, end: int) -> tuple[str, Spec]:
    """What is wrong with the shape of a tensor ("" if nothing is), and its spec: axes in torch's
    order, blocks as the bytes of a row. One of unknown type has all bytes up to `end`.
    """
    nothing = spec("uint8", (0,))
    shape = info.lengths[::-1]
    if prod(length for length in shape if length) * 8 >= 1 << 63:
        return f"the shape {list(shape)} has more elements than can be counted", nothing
    if info.offset >= 1 << 62:
        return f"its offset {info.offset} lies outside any file", nothing
    if known is None:
        if info.type >= 1 << 31:
            return f"its type {info.type} is not one of ggml", nothing
        return "", spec("uint8", (max(end - info.offset, 0),))
    if known.dtype is not None:
        return "", spec(known.dtype, shape)
    row = shape[-1] if shape else 1
    if row % known.elements:
        return (
            f"rows of {row} are not whole blocks of {known.elements} in {known.name}",
            nothing,
        )
    return "", spec("uint8", (*shape[:-1], row // known.elements * known.nbytes))
