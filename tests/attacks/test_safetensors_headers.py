"""Headers made to mislead: always a named refusal, or the very reading that the safetensors library
has.
"""

import json
import random
import struct
import sys
from pathlib import Path

import pytest
import safetensors
import torch
from marks import thorough
from safetensors.torch import save
from work import times

from migrate import formats
from migrate.core.errors import CheckpointError, MigrateError
from migrate.formats._header import NAMES


def content(header, data: bytes = b"", pad: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) + len(pad)) + text + pad + data


def entry(begin: int = 0, end: int = 4, dtype="U8", shape=(4,), **more) -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end], **more}


def refused(path: Path, raw: bytes, code: str) -> str:
    path.write_bytes(raw)
    with pytest.raises(CheckpointError) as caught:
        formats.open(path)
    assert {d.code for d in caught.value.diagnostics} == {code}, str(caught.value)
    assert path.name in str(caught.value)
    assert str(caught.value).replace("\n", "").replace("…", "").isascii()
    return str(caught.value)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "m.safetensors"


LYING = {
    "overlap": ({"a": entry(), "b": entry(2, 6)}, b"x" * 6, "it overlaps a"),
    "alias": ({"a": entry(), "b": entry()}, b"x" * 4, "it overlaps a"),
    "inside another": ({"a": entry(0, 8, shape=[8]), "b": entry(2, 6)}, b"x" * 8, "it overlaps a"),
    "hole": ({"a": entry(), "b": entry(6, 10)}, b"x" * 10, "2 unclaimed bytes lie before it"),
    "gap at the start": ({"a": entry(1, 5)}, b"x" * 5, "1 unclaimed bytes lie before it"),
    "empty tensor outside": (
        {"a": entry(), "b": entry(9, 9, shape=[0])},
        b"x" * 4,
        "5 unclaimed bytes",
    ),
    "trailing bytes": ({"a": entry()}, b"x" * 5, "1 unclaimed bytes follow"),
    "truncated": ({"a": entry()}, b"x" * 3, "ends at 4 of the data, and the file has 3"),
    "reversed": ({"a": entry(4, 0)}, b"x" * 4, r"[4, 0] are not a range"),
    "shape too large": (
        {"a": entry(shape=[5])},
        b"x" * 4,
        "is 5 bytes, but its data_offsets [0, 4] hold 4",
    ),
    "dtype too large": ({"a": entry(dtype="F64")}, b"x" * 4, "is 32 bytes"),
    "unknown dtype": ({"a": entry(dtype="F128")}, b"x" * 4, "unknown dtype F128"),
    "dtype of another type": ({"a": entry(dtype=["U8"])}, b"x" * 4, "unknown dtype"),
    "small letters": ({"a": entry(dtype="u8")}, b"x" * 4, "unknown dtype u8"),
    "unknown field": ({"a": entry(evil=1)}, b"x" * 4, "unknown fields evil"),
    "no shape": ({"a": {"dtype": "U8", "data_offsets": [0, 4]}}, b"x" * 4, "no shape"),
    "nothing": ({"a": {}}, b"", "no data_offsets, dtype, shape"),
    "a list": ({"a": [1, 2]}, b"", "not an object"),
    "null": ({"a": None}, b"", "not an object"),
    "shape text": ({"a": entry() | {"shape": "4444"}}, b"x" * 4, "not a list"),
    "shape object": ({"a": entry() | {"shape": {"4": 4}}}, b"x" * 4, "not a list"),
    "text in shape": ({"a": entry(shape=["4"])}, b"x" * 4, "is not a length"),
    "list in shape": ({"a": entry(shape=[[4]])}, b"x" * 4, "is not a length"),
    "bool in shape": ({"a": entry(0, 1, shape=[True])}, b"x", "is not a length"),
    "bool in a known shape": (
        {"b": entry(0, 1, shape=[1]), "a": entry(1, 2, shape=[True])},
        b"xx",
        "is not a length",
    ),
    "bool in offsets": ({"a": entry(False, True, shape=[1])}, b"x", "are not a range"),
    "negative": ({"a": entry(shape=[-4])}, b"x" * 4, "is not a length"),
    "two negatives": ({"a": entry(shape=[-2, -2])}, b"x" * 4, "is not a length"),
    "negative offsets": ({"a": entry(-4, 0)}, b"x" * 4, "are not a range"),
    "three offsets": ({"a": entry() | {"data_offsets": [0, 4, 4]}}, b"x" * 4, "not two numbers"),
    "text offsets": ({"a": entry() | {"data_offsets": "04"}}, b"x" * 4, "not two numbers"),
    "null offsets": ({"a": entry() | {"data_offsets": [None, 4]}}, b"x" * 4, "are not a range"),
    "huge": ({"a": entry(shape=[10**400])}, b"x" * 4, "of more than 30 digits"),
    "huge offset": ({"a": entry(0, 10**400)}, b"x" * 4, "are not a range"),
    "product overflow": (
        {"a": entry(0, 0, shape=[2**32, 2**32])},
        b"",
        "more elements than can be counted",
    ),
    "product overflow behind a zero": (
        {"a": entry(0, 0, shape=[0, 2**32, 2**32])},
        b"",
        "more elements than can be counted",
    ),
    "rank": ({"a": entry(shape=[1] * 64 + [4])}, b"x" * 4, "65 dimensions"),
    "half a byte": ({"a": entry(0, 2, dtype="F4", shape=[3])}, b"xx", "12 bits, not whole bytes"),
    "six bits": (
        {"a": entry(0, 3, dtype="F6_E2M3", shape=[3])},
        b"xxx",
        "18 bits, not whole bytes",
    ),
    "metadata number": (
        {"__metadata__": {"a": 1}},
        b"",
        "__metadata__ is not an object of strings",
    ),
    "metadata list": ({"__metadata__": ["a"]}, b"", "__metadata__ is not an object of strings"),
    "metadata null": ({"__metadata__": None}, b"", "__metadata__ is not an object of strings"),
    "metadata nested": (
        {"__metadata__": {"a": {"b": "c"}}},
        b"",
        "__metadata__ is not an object of strings",
    ),
}


@pytest.mark.parametrize("name", LYING)
def test_a_lying_header_is_refused_with_key_and_numbers(path, name):
    header, data, words = LYING[name]
    assert words in refused(path, content(header, data), "M906")


BROKEN = {
    "no bytes of a header": (b"\x00" * 7, "too short"),
    "longer than the file": (struct.pack("<Q", 3) + b"{}", "a header of 3 bytes in a file of 10"),
    "no object": (content(b"[]"), "starts with '[]'"),
    "empty": (content(b""), "starts with ''"),
    "leading space": (content(b" {}"), "starts with ' {}'"),
    "byte order mark": (content(b"\xef\xbb\xbf{}"), "and not with {"),
    "padded with newlines": (content(b"{}", pad=b"\n\n"), "and not with } and spaces"),
    "padded with zeros": (content(b"{}", pad=b"\0\0"), "and not with } and spaces"),
    "two objects": (content(b"{} {}"), "not JSON"),
    "cut": (content(b'{"a":{"dtype":"U8"}'), "not JSON"),
    "not UTF-8": (content(b'{"\xff":{}}'), "not UTF-8, at byte 2"),
    "UTF-16": (content("{}".encode("utf-16-le") + b"}"), "not JSON"),
    "surrogate": (
        content(rb'{"\ud800":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'),
        "half a surrogate pair",
    ),
    "NaN": (content(b'{"a":{"dtype":"U8","shape":[NaN],"data_offsets":[0,0]}}'), "NaN is not JSON"),
    "Infinity": (
        content(b'{"a":{"dtype":"U8","shape":[-Infinity],"data_offsets":[0,0]}}'),
        "-Infinity is not JSON",
    ),
    "fraction": (
        content(b'{"a":{"dtype":"U8","shape":[0.0],"data_offsets":[0,0]}}'),
        "0.0 where only integers",
    ),
    "exponent": (
        content(b'{"a":{"dtype":"U8","shape":[0e9],"data_offsets":[0,0]}}'),
        "0e9 where only integers",
    ),
    "minus zero": (
        content(b'{"a":{"dtype":"U8","shape":[-0],"data_offsets":[0,0]}}'),
        "-0 where only integers",
    ),
    "endless number": (
        content(b'{"a":{"dtype":"U8","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,0]}}'),
        "more than 4300 digits",
    ),
    "key twice": (
        content(b'{"a":{"dtype":"U8"},"a":{"dtype":"U8"}}'),
        "the same name twice in one JSON object: a",
    ),
    "key twice by escape": (
        content(
            b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"\\u0061":{"dtype":"I8","shape":[0],"data_offsets":[0,0]}}'
        ),
        "the same name twice in one JSON object: a",
    ),
    "field twice": (
        content(b'{"a":{"dtype":"U8","dtype":"I8","shape":[0],"data_offsets":[0,0]}}'),
        "twice in one JSON object: dtype",
    ),
    "metadata twice": (
        content(b'{"__metadata__":{},"__metadata__":{}}'),
        "twice in one JSON object: __metadata__",
    ),
    "metadata entry twice": (
        content(b'{"__metadata__":{"a":"1","a":"2"}}'),
        "twice in one JSON object: a",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_header_is_refused(path, name):
    raw, words = BROKEN[name]
    assert words in refused(path, raw, "M906")


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (struct.pack("<Q", 100_000_001) + b"{}", "more than the 100000000"),
        (struct.pack("<Q", 2**64 - 1) + b"{}", "18446744073709551615"),
        (content(b'{"a":' + b"[" * 2000 + b"]" * 2000 + b" " * 40000 + b"}"), "nested too deeply"),
        (content(b'{"a":[' + b"[]," * 100_000 + b"[]]}"), "consists of brackets"),
    ],
)
def test_a_header_beyond_a_limit_is_refused_before_it_costs_anything(path, raw, words):
    said = []
    # since 3.13 Python's parser goes that deep, and what it reads is no entry
    deep = words == "nested too deeply" and sys.version_info >= (3, 13)
    assert (
        times(lambda: said.append(refused(path, raw, "M906" if deep else "M914")), best_of=1) < 100
    )
    assert ("its entry is not an object" if deep else words) in said[0]


def test_several_problems_come_out_together_and_not_without_end(path):
    bad = {f"k{i}": entry(0, 5) for i in range(1000)}
    text = refused(path, content(bad, b"xxxxx"), "M906")
    assert "k0" in text
    assert text.count("error[M906]") == 20


def test_names_that_would_drive_a_terminal_are_escaped(path):
    text = refused(path, content({"\x1b[31mred\u202e\n": entry(0, 5)}, b"xxxxx"), "M906")
    assert "\\x1b[31mred\\u202e\\n" in text


def test_space_padding_and_any_order_of_fields_and_tensors_are_genuine(path):
    header = {
        "b": {"data_offsets": [4, 8], "shape": [], "dtype": "F32"},
        "a": entry(),
        "z": entry(4, 4, shape=[0, 5]),
    }
    path.write_bytes(content(header, b"x" * 8, pad=b" " * 77))
    with formats.open(path) as source:
        assert {k: (t.spec.dtype, t.spec.shape) for k, t in source.index.tensors.items()} == {
            "b": ("float32", ()),
            "a": ("uint8", (4,)),
            "z": ("uint8", (0, 5)),
        }


# against the library


def small_file() -> bytes:
    tensors = {
        "layer.0.weight": torch.arange(6, dtype=torch.bfloat16).view(2, 3),
        "layer.1.weight": torch.arange(4, dtype=torch.int64),
        "e": torch.empty(0, 2),
        "f": torch.ones(3, dtype=torch.uint8),
    }
    return save(tensors, {"format": "pt"})


def agrees(path: Path, raw: bytes) -> bool:
    """Whether the file opens; if it does, asserts that the library reads the same. Any error but
    ours comes through.
    """
    path.write_bytes(raw)
    try:
        source = formats.open(path)
    except MigrateError as error:
        if error.exit_code != 3:
            raise
        return False
    with source:
        ours = {}
        for key, stored in source.index.tensors.items():
            buffer = bytearray(stored.spec.nbytes)
            source.blobs[0].readinto(stored.offset, memoryview(buffer))
            ours[key] = (NAMES[stored.spec.dtype], stored.spec.shape, bytes(buffer))
    theirs = {
        name: (e["dtype"], tuple(e["shape"]), bytes(e["data"]))
        for name, e in safetensors.deserialize(raw)
    }
    assert ours == theirs
    return True


def test_a_file_cut_at_any_byte_is_refused(path):
    raw = small_file()
    assert agrees(path, raw)
    assert not any(agrees(path, raw[:size]) for size in range(len(raw)))


@pytest.mark.parametrize("flips", thorough([1000, 10_000]))
def test_flipped_bytes_are_refused_or_read_as_the_library_reads_them(path, flips):
    raw = small_file()
    length = 8 + int.from_bytes(raw[:8], "little")
    chance = random.Random(20)
    opened = 0
    for _ in range(flips):
        mutant = bytearray(raw)
        for _ in range(chance.choice((1, 1, 1, 2, 3))):
            mutant[chance.randrange(length)] = chance.choice(
                (chance.randrange(256), ord(chance.choice('{}[]",:0123456789-eE.\\ ')))
            )
        opened += agrees(path, bytes(mutant))
    assert flips // 100 < opened < flips * 9 // 10


def test_spliced_headers_are_refused_or_read_as_the_library_reads_them(path):
    raw = small_file()
    length = int.from_bytes(raw[:8], "little")
    header, data = raw[8 : 8 + length].rstrip(), raw[8 + length :]
    words = b'null|true|-0|1e0|[]|{}|""|0|18446744073709551616|"\\ud800"|\xff|\\u0000| |\t'.split(
        b"|"
    )
    chance = random.Random(21)
    for _ in range(2_000):
        start = chance.randrange(len(header))
        stop = start + chance.choice((0, 1, 1, 2, 5))
        agrees(path, content(header[:start] + chance.choice(words) + header[stop:], data))
