"""CRC-32 of parts, put together, against zlib's over the whole."""

from __future__ import annotations

import random
import subprocess
import sys
import zlib
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from migrate.source import zip_archive
from migrate.source.zip_archive import combine, crc32, zeros


def test_the_library_computes_what_zlib_computes() -> None:
    data = random.Random(1).randbytes(100_003)
    for part in (data, data[:1], b"", bytearray(data), memoryview(data)[7:]):
        assert crc32(part) == zlib.crc32(part)
        assert crc32(part, 12345) == zlib.crc32(part, 12345)


def test_isal_is_used_and_zlib_where_it_cannot_be_loaded() -> None:
    for code, name in (("", "isal"), ("sys.modules['isal'] = None;", "zlib")):
        if name == "isal":
            pytest.importorskip("isal", reason="isal is not installed here")
        code = (
            f"import sys; {code} from migrate.source.zip_archive import crc32, library; "
            "print('isal' in sys.modules, crc32(b'abc'), library()[0])"
        )
        out = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        assert out == f"{name == 'zlib'} {zlib.crc32(b'abc')} {name}\n"


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_two_parts_combine_to_the_whole(first: bytes, second: bytes) -> None:
    assert combine(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


def test_any_cut_of_a_long_text_combines_in_any_order() -> None:
    source = random.Random(3)
    data = source.randbytes(1_000_000)
    cuts = sorted({0, len(data), *(source.randrange(len(data)) for _ in range(30))})
    parts = [(zlib.crc32(data[a:b]), b - a) for a, b in pairwise(cuts)]
    while len(parts) > 1:
        at = source.randrange(len(parts) - 1)
        (left, size), (right, more) = parts[at : at + 2]
        parts[at : at + 2] = [(combine(left, right, more), size + more)]
    assert parts == [(zlib.crc32(data), len(data))]


def test_parts_combine_alike_with_isal_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = (0, 1, 5, 4096, (1 << 31) - 1, 1 << 32, (1 << 32) + 5, 10**13)
    found = [combine(0x12345678, 0x9ABCDEF0, length) for length in lengths]
    monkeypatch.setattr(zip_archive, "_combining", lambda: None)
    assert [combine(0x12345678, 0x9ABCDEF0, length) for length in lengths] == found
    test_any_cut_of_a_long_text_combines_in_any_order()
    test_lengths_beyond_four_gib_add_up()


@pytest.mark.parametrize("length", [0, 1, 2, 3, 63, 64, 1000, 65_537])
def test_zeros_need_not_be_made(length: int) -> None:
    assert zeros(length) == zlib.crc32(bytes(length))


def test_lengths_beyond_four_gib_add_up() -> None:
    large = (1 << 32) + 5
    assert (
        zeros(large)
        == combine(zeros(1 << 32), zeros(5), 5)
        == combine(zeros(5), zeros(1 << 32), 1 << 32)
    )
