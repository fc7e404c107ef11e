"""The header of one safetensors file: read with every check there can be, written by hand.

A file is a u64 (little endian) length, that many bytes of JSON, then the tensors without a hole.
The safetensors library is the oracle of the tests, not the reader: it keeps the last of two equal
names, ignores unknown fields, and its Python binding cannot say what is wrong with a file.
Everything here runs over 100,000 tensors in some tenths of a second: a header as all writers make
it is taken by one regular expression (`_canonical`), any other goes through the JSON parser, and a
bad entry is looked at again by `_explain`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from itertools import repeat
from json.encoder import encode_basestring
from math import prod
from operator import itemgetter, sub
from typing import Any, NamedTuple

from ..core.errors import CheckpointError, Report, fail, listed, option, printable
from ..core.spec import BITS, Spec, spec
from ..core.types import records
from ..source.blobs import FileBlob, Stored
from ..source.jsontext import collector_paused, parse
from ..source.target import OutputFile, Placed

# what torch's HuggingFaceStorageWriter says in the metadata of each file (`_hfshards`)
SHARDING, RELEASE = "DCP_SHARDING_INFO", "DCP_VERSION"
MAX_HEADER = 100_000_000  # bytes of JSON; safetensors' own limit, for readers and writers
MAX_RANK = 64
ALIGN = 64  # the data starts at a multiple of this
# or of this, where it lies as in the source; safetensors' own alignment, and its longest element
SHARED_ALIGN = 8
PAGE = 4096  # file systems share blocks of this size between files
WORTH = 1 << 20  # from so many bytes on it is worth padding a header
_MAX_PROBLEMS = 20
_FIELDS = {"dtype", "shape", "data_offsets"}


class _Style(NamedTuple):
    """What a writer puts between values; an entry without escapes, what that is beside its five
    groups, and a shape.
    """

    comma: str
    entry: re.Pattern[str]
    around: int
    shape: re.Pattern[str]


def _style(space: str) -> _Style:
    number = "(?:0|[1-9][0-9]{0,17})"
    entry = (
        r'"([^"\\\x00-\x1f]+)": \{"dtype": "([A-Z0-9_]+)", "shape": \[([0-9, ]*)\], '
        rf'"data_offsets": \[({number}), ({number})\]\}}, '
    )
    around = '"": {"dtype": "", "shape": [], "data_offsets": [, ]}, '
    shape = f"(?:{number}(?:, {number})*)?"
    comma, entry, around, shape = (t.replace(" ", space) for t in (", ", entry, around, shape))
    return _Style(comma, re.compile(entry), len(around), re.compile(shape))


# as the safetensors library writes headers, and as Python's json does by default
_DENSE, _SPACED = _style(""), _style(" ")

# name in the header -> torch's name; source: safetensors 0.8 `Dtype`
DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32",
    "I32": "int32",
    "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32",
    "F64": "float64", "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu", "F6_E2M3": "float6_e2m3fn", "F6_E3M2": "float6_e3m2fn",
    "F4": "float4_e2m1fn",
}  # fmt: skip
NAMES = {torch_name: name for name, torch_name in DTYPES.items()}


class Header(NamedTuple):
    """The tensors of one file in the header's order, and its `__metadata__`."""

    tensors: dict[str, Stored]
    metadata: dict[str, str]


def header_length(start: bytes) -> int:
    """How long the header is that begins with these bytes, with its length in front."""
    return 8 + int.from_bytes(start[:8], "little")


def read_header(blob: FileBlob, number: int, label: str) -> Header:
    """The header of the file that is blob `number`; `label` names it in messages.

    Guarantees that every tensor lies inside the file, that they cover it without hole or overlap,
    and that dtype, shape and length agree. M906 with the key and the numbers otherwise (several at
    once), M914 beyond a limit.
    """
    if blob.size < 8:
        fail(
            "M906",
            f"{label}: {blob.size} bytes, too short for a safetensors header",
            help="the file was cut short: fetch it again",
        )
    length = int.from_bytes(blob.read(0, 8), "little")
    if length > MAX_HEADER:
        fail(
            "M914",
            f"{label}: a header of {length} bytes, more than the {MAX_HEADER} that safetensors "
            "allows",
        )
    if length > blob.size - 8:
        fail(
            "M906",
            f"{label}: a header of {length} bytes in a file of {blob.size}",
            help="the file was cut short: fetch it again",
        )
    data = blob.read(8, length)
    if data[:1] != b"{":
        fail(
            "M906", f"{label}: the header starts with {ascii(bytes(data[:8]))[1:]} and not with {{"
        )
    # only spaces may follow the object; other white space would pass as JSON
    if data.rstrip(b" ")[-1:] != b"}":
        fail(
            "M906",
            f"{label}: the header ends with {ascii(bytes(data[-8:]))[1:]} and not with }} and "
            "spaces",
        )
    with collector_paused():
        found = _canonical(data, number, 8 + length, blob.size, label)
        if found is not None:
            return found
        return _validated(
            parse(data, label),
            number,
            8 + length,
            blob.size,
            label,
            booleans=b"true" in data or b"false" in data,
        )


def _canonical(
    data: bytes | bytearray, number: int, start: int, size: int, label: str
) -> Header | None:
    """The header if it is right and written as writers do: metadata first, nothing escaped, entries
    in the order of their data.

    None otherwise, for whatever reason: the long way finds the same tensors, or says what is wrong.
    """
    # a hole in the file, which is no JSON: not worth the copies that follow
    if b"\0" in data:
        return None
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return None
    text = text.rstrip(" ")
    style = _SPACED if '"dtype": "' in text else _DENSE
    whole, text = text[:1] + text[-1:] == "{}", text[:-1] + style.comma
    first = style.entry.search(text)
    if first is None or not whole:
        return None
    before, entries = text[: first.start()], text[first.start() :]
    metadata: dict[str, str] = {}
    if before != "{":
        try:
            held = parse(before.removesuffix(style.comma).encode() + b"}", label)
        except CheckpointError:
            return None
        metadata = held.get("__metadata__")
        if (
            not before.endswith(style.comma)
            or len(held) != 1
            or type(metadata) is not dict
            or not all(type(v) is str for v in metadata.values())
        ):
            return None
    found = style.entry.findall(entries)
    # matches do not overlap, so that equal lengths mean that nothing lies between them
    if sum(map(len, map("".join, found))) + style.around * len(found) != len(entries):
        return None
    keys, dtypes, shapes, begins, ends = zip(*found, strict=True)
    kinds = list(zip(dtypes, shapes, strict=True))
    begin, end = list(map(int, begins)), list(map(int, ends))
    if begin[0] != 0 or begin[1:] != end[:-1] or start + end[-1] != size:
        return None
    known: dict[tuple[str, str], tuple[Spec, int]] = {}
    for kind in set(kinds):
        if not style.shape.fullmatch(kind[1]):
            return None
        at = kinds.index(kind)
        entry = {
            "dtype": kind[0],
            "shape": [int(n) for n in kind[1].split(",") if n],
            "data_offsets": [begin[at], end[at]],
        }
        if _explain(entry):
            return None
        known[kind] = _checked(entry)
    if list(map(sub, end, begin)) != [known[kind][1] for kind in kinds]:
        return None
    specs = [known[kind][0] for kind in kinds]
    stored = records(
        Stored, specs, repeat(number), [start + b for b in begin], repeat(None), repeat(None)
    )
    tensors = dict(zip(keys, stored, strict=True))
    return (
        Header(tensors, metadata)
        if len(tensors) == len(keys) and "__metadata__" not in tensors
        else None
    )


def _validated(
    header: dict[str, Any], number: int, start: int, size: int, label: str, booleans: bool
) -> Header:
    report = Report()
    metadata = header.pop("__metadata__", {})
    if type(metadata) is not dict or not all(type(v) is str for v in metadata.values()):
        report.add("M906", f"{label}: __metadata__ is not an object of strings")
        metadata = {}
    tensors: dict[str, Stored] = {}
    ranges: list[tuple[int, int, str]] = []
    known: dict[tuple[str, tuple[int, ...]], tuple[Spec, int]] = {}
    for key, entry in header.items():
        try:
            shape = tuple(entry["shape"])
            begin, end = entry["data_offsets"]
            # True == 1 would be found among the known shapes
            wrong = booleans and not all(type(n) is int for n in (*shape, begin, end))
            found = None if wrong else known.get((entry["dtype"], shape))
            if found is None:
                found = known[entry["dtype"], shape] = _checked(entry)
            if end - begin != found[1] or begin < 0 or len(entry) != 3:
                raise ValueError
            tensors[key] = Stored(found[0], number, start + begin)
            ranges.append((begin, end, key))
        except (ValueError, TypeError, KeyError):
            report.add("M906", f"{label}: {printable(key)}: {_explain(entry)}")
            if len(report.diagnostics) >= _MAX_PROBLEMS:
                break
    report.check()
    _check_cover(ranges, size - start, label)
    return Header(tensors, metadata)


def _checked(entry: dict[str, Any]) -> tuple[Spec, int]:
    """The spec of a well-formed entry and its bytes; else ValueError, TypeError or KeyError."""
    problem = _explain(entry)
    if problem:
        raise ValueError(problem)
    made = spec(DTYPES[entry["dtype"]], tuple(entry["shape"]))
    return made, made.nbytes


def _explain(entry: Any) -> str:
    """What is wrong with one entry of the header, "" if nothing is."""
    if type(entry) is not dict:
        return "its entry is not an object"
    if entry.keys() != _FIELDS:
        odd = sorted(entry.keys() - _FIELDS)
        return (
            f"unknown fields {listed(odd)}"
            if odd
            else f"no {listed(sorted(_FIELDS - entry.keys()))}"
        )
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if type(dtype) is not str or dtype not in DTYPES:
        return f"unknown dtype {printable(str(dtype), 40)}"
    if type(shape) is not list or len(shape) > MAX_RANK:
        return (
            f"a shape of {len(shape)} dimensions, more than {MAX_RANK}"
            if type(shape) is list
            else "its shape is not a list"
        )
    for dim in shape:
        if type(dim) is not int or not 0 <= dim < 2**63:
            return f"the dimension {_shown(dim)} is not a length"
    # a dimension of 0 must not hide a product that overflows in other readers
    elements = prod(d for d in shape if d)
    if elements * BITS[DTYPES[dtype]] >= 2**63:
        return f"the shape {_shown(shape)} has more elements than can be counted"
    bits = prod(shape) * BITS[DTYPES[dtype]]
    if bits % 8:
        return f"{dtype} of shape {_shown(shape)} is {bits} bits, not whole bytes"
    if type(offsets) is not list or len(offsets) != 2:
        return "its data_offsets are not two numbers"
    if not all(type(n) is int and 0 <= n < 2**63 for n in offsets) or offsets[0] > offsets[1]:
        return f"the data_offsets {_shown(offsets)} are not a range"
    held = offsets[1] - offsets[0]
    if held != bits // 8:
        return (
            f"{dtype} of shape {_shown(shape)} is {bits // 8} bytes, but its data_offsets "
            f"{_shown(offsets)} hold {held}"
        )
    return ""


def _shown(value: Any) -> str:
    if type(value) is int:
        return str(value) if abs(value) < 10**30 else "of more than 30 digits"
    if type(value) is list:
        return f"[{', '.join(_shown(v) for v in value[:MAX_RANK])}]"
    return printable(ascii(value), 40)


def _check_cover(ranges: list[tuple[int, int, str]], size: int, label: str) -> None:
    """M906 unless the ranges cover `size` bytes exactly."""
    ranges.sort(key=itemgetter(0, 1))
    covered, last = 0, "the header"
    report = Report()
    for begin, end, key in ranges:
        if begin != covered:
            how = (
                f"{begin - covered} unclaimed bytes lie before it"
                if begin > covered
                else f"it overlaps {printable(last)}"
            )
            report.add(
                "M906",
                f"{label}: {printable(key)}: starts at {begin} of the data, and {printable(last)} "
                f"ends at {covered}: {how}",
            )
            if len(report.diagnostics) >= _MAX_PROBLEMS:
                break
        covered, last = max(covered, end), key
    else:
        if covered > size:
            cut = "the file was cut short: fetch it again"
            report.add(
                "M906",
                f"{label}: {printable(last)}: ends at {covered} of the data, and the file has "
                f"{size}",
                help=cut,
            )
        elif covered < size:
            report.add(
                "M906",
                f"{label}: {size - covered} unclaimed bytes follow the last tensor, which ends at "
                f"{covered} of the data",
            )
    report.check()


Origins = Callable[[str], Iterable[tuple[int, int]]]


def write_header(
    name: str,
    keys: Sequence[str],
    specs: Mapping[str, Spec],
    metadata: Mapping[str, str],
    origins: Origins | None = None,
    last: Container[str] = (),
) -> OutputFile:
    """The file `name` with these tensors: larger elements first, else in the order given, so that
    each lies aligned to its own size.

    The keys `last` follow in the same order, unless the first of them would lie unaligned there:
    then they stand among the others.

    `origins` gives, for a key, (offset, bytes) pairs: so many of its bytes could be shared with a
    file in which the tensor starts at that offset. The header is then padded so that most bytes lie
    as in the source within their page. The specs are ones that `holds` accepts. M916 if the header
    would be larger than readers take.
    """
    parts = [
        f'"__metadata__":{{{",".join(f"{encode_basestring(k)}:{encode_basestring(v)}" for k, v in metadata.items())}}}'  # noqa: E501
    ]
    text: dict[int, tuple[str, int, int]] = {}
    described = []
    for key in keys:
        found = specs[key]
        if (facts := text.get(id(found))) is None:
            shape = ",".join(map(str, found.shape))
            middle = f':{{"dtype":"{NAMES[found.dtype]}","shape":[{shape}],"data_offsets":['
            bits = BITS[found.dtype]
            alignment = bits // 8 if bits % 8 == 0 else 1
            facts = text[id(found)] = (middle, found.nbytes, -alignment)
        described.append((facts[2], key, facts))
    described.sort(key=itemgetter(0))
    behind = [one for one in described if one[1] in last]
    if behind:
        before = [one for one in described if one[1] not in last]
        if sum(facts[1] for _, _, facts in before) % -behind[0][0] == 0:
            described = before + behind
    at = 0
    ends = []
    for _, key, (middle, nbytes, _) in described:
        parts.append(f"{encode_basestring(key)}{middle}{at},{at + nbytes}]}}")
        ends.append((key, at, nbytes))
        at += nbytes
    data = f"{{{','.join(parts)}}}".encode()
    start = -(-(8 + len(data)) // ALIGN) * ALIGN
    if origins is not None and at >= WORTH and 8 + len(data) + PAGE <= MAX_HEADER:
        start = _shared_start(8 + len(data), ends, origins) or start
    if start - 8 > MAX_HEADER:
        fail(
            "M916",
            f"{name}: {len(keys)} tensors need a header of {start - 8} bytes, and safetensors "
            f"allows {MAX_HEADER}",
            help=f"write a folder with a smaller {option('max_shard_size')}",
        )
    header = (start - 8).to_bytes(8, "little") + data.ljust(start - 8)
    return OutputFile(
        name,
        header,
        tuple([Placed(key, start + begin, nbytes) for key, begin, nbytes in ends]),
        start + at,
    )


def _shared_start(least: int, ends: Sequence[tuple[str, int, int]], origins: Origins) -> int | None:
    """Where the data starts, from `least` on, so that most bytes lie as in the source, or None."""
    votes: dict[int, int] = {}
    for key, begin, _ in ends:
        for offset, nbytes in origins(key):
            phase = (offset - begin) % PAGE
            votes[phase] = votes.get(phase, 0) + nbytes
    possible = [
        (-nbytes, phase)
        for phase, nbytes in votes.items()
        if phase % SHARED_ALIGN == 0 and nbytes >= WORTH
    ]
    return least + (min(possible)[1] - least) % PAGE if possible else None


def check_holds(specs: Mapping[str, Spec], metadata: Mapping[str, str]) -> None:
    """M916 naming every key that safetensors cannot hold: by its dtype, its size or its name."""
    report = Report()
    kinds: dict[int, str] = {}
    unfit: dict[str, list[str]] = {}
    for key, found in specs.items():
        if (why := kinds.get(id(found))) is None:
            why = kinds[id(found)] = _unfit(found)
        if why:
            unfit.setdefault(why, []).append(key)
    for why, keys in unfit.items():
        report.add(
            "M916",
            f"safetensors cannot hold {listed(keys)}: {why}",
            help="cast or drop them, or write another format",
        )
    if "__metadata__" in specs:
        report.add(
            "M916",
            "safetensors cannot hold a tensor called __metadata__: the name is the format's own",
            help="rename it",
        )
    text = ("".join(specs), "".join(metadata), "".join(metadata.values()))
    try:
        "".join(text).encode()
    except UnicodeEncodeError:
        halves = [
            t
            for t in (*specs, *metadata, *metadata.values())
            if any("\ud800" <= c <= "\udfff" for c in t)
        ]
        report.add(
            "M916",
            f"safetensors cannot hold {listed(halves)}: half a surrogate pair is not text",
            help="rename it",
        )
    report.check()


def _unfit(found: Spec) -> str:
    if found.dtype not in NAMES:
        return f"it has no name for {found.dtype}"
    if prod(found.shape) * BITS[found.dtype] % 8:
        return f"{found} is not whole bytes"
    return f"more than {MAX_RANK} dimensions" if len(found.shape) > MAX_RANK else ""
