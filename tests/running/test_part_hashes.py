"""Hashes of tensors whose bytes come in ranges, and the file that keeps them."""

from __future__ import annotations

import random
import threading
from itertools import pairwise
from pathlib import Path

import pytest
import xxhash

from migrate.core.spec import Spec
from migrate.planning.restoring import HashedParts, PartsFile
from migrate.running.part_hashes import (
    MOST,
    PIECE,
    PartHashes,
    TensorHash,
    combine_hashes,
    file_of,
    read_parts,
    size_of_file,
)

SIZES = [0, 1, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE, 5 * PIECE + 123]


def plainly(data: bytes) -> bytes:
    """The definition, without haste: the hash of the hashes of pieces of 64 KiB."""
    pieces = [data[at : at + 65536] for at in range(0, len(data), 65536)]
    return xxhash.xxh3_64_digest(b"".join(map(xxhash.xxh3_64_digest, pieces)))


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("seed", range(5))
def test_ranges_in_any_order_give_the_hash_and_what_is_missing_is_told(
    nbytes: int, seed: int
) -> None:
    bits = random.Random(seed)
    data = bits.randbytes(nbytes)
    cuts = sorted({0, nbytes, *(bits.randrange(nbytes + 1) for _ in range(8))})
    ranges = list(pairwise(cuts))
    bits.shuffle(ranges)
    found = TensorHash(nbytes)
    for start, stop in ranges:
        found.feed(start, memoryview(data)[start:stop])
    # what came before its turn within a piece is asked for again, as whole pieces
    for start, stop in list(found.missing()):
        assert start % PIECE == 0
        assert stop % PIECE == 0 or stop == nbytes
        found.feed(start, memoryview(data)[start:stop])
    assert found.value == plainly(data)
    assert list(found.missing()) == []


def test_ranges_in_order_leave_nothing_to_read_again() -> None:
    data = random.Random(1).randbytes(5 * PIECE + 7)
    found = TensorHash(len(data))
    for start in range(0, len(data), 10_001):
        found.feed(start, memoryview(data)[start : start + 10_001])
    assert list(found.missing()) == []
    assert found.value == plainly(data)


def test_a_range_that_comes_twice_counts_once() -> None:
    data = random.Random(2).randbytes(3 * PIECE)
    found = TensorHash(len(data))
    for start, stop in [(0, 100), (0, 100), (50, PIECE), (PIECE, 3 * PIECE), (10, 2 * PIECE)]:
        found.feed(start, memoryview(data)[start:stop])
    assert found.value == plainly(data)


def test_threads_may_feed_one_tensor_side_by_side() -> None:
    data = random.Random(3).randbytes(64 * PIECE)
    found = TensorHash(len(data))
    step = PIECE // 3

    def feed(first: int) -> None:
        for start in range(first * step, len(data), 4 * step):
            found.feed(start, memoryview(data)[start : start + step])

    threads = [threading.Thread(target=feed, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for start, stop in list(found.missing()):
        found.feed(start, memoryview(data)[start:stop])
    assert found.value == plainly(data)


def test_what_another_process_found_is_entered() -> None:
    specs = {"a": Spec("uint8", (5,)), "b": Spec("uint8", (0,))}
    one, other = PartHashes(specs), PartHashes(specs)
    assert other.unfinished().keys() == {"a"}
    one.unfinished()["a"].feed(0, memoryview(b"abcde"))
    other.add(one.account())
    assert other.unfinished() == {}
    assert other.values() == {"a": plainly(b"abcde"), "b": plainly(b"")}


PARTS = PartsFile(
    "m1:out",
    (
        HashedParts("m1:a", ("l.0.w", "l.1.w", "x"), (b"00000001", b"00000002", b"00000003")),
        HashedParts("m1:b", (), ()),
        HashedParts("m1:c", ("y",), (b"00000004",)),
    ),
)


def kept(folder: Path, raw: bytes) -> tuple[PartsFile | None, str]:
    (folder / "migrate.parts").write_bytes(raw)
    return read_parts(str(folder), "m1:out")


def test_the_file_is_read_as_it_was_written_and_its_length_is_known_before(tmp_path: Path) -> None:
    unknown = PartsFile(PARTS.output, tuple(HashedParts(r.source, r.keys) for r in PARTS.runs))
    raw = file_of(PARTS)
    assert len(raw) == size_of_file(unknown)
    assert raw.endswith(b"\n00000001000000020000000300000004")
    assert kept(tmp_path, raw) == (PARTS, "")


def test_a_folder_without_the_file_keeps_nothing(tmp_path: Path) -> None:
    assert read_parts(str(tmp_path), "m1:out") == (None, "")


def test_one_made_for_other_contents_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "migrate.parts").write_bytes(file_of(PARTS))
    found, why = read_parts(str(tmp_path), "m1:other")
    assert found is None
    assert "other contents" in why


RAW = file_of(PARTS)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\n",
        b"[]\n",
        b"{" * 100_000,
        RAW[:-1],
        RAW + b"0",
        RAW.replace(b'"parts"', b'"party"'),
        RAW.replace(b"xxh3_64", b"xxh3_65"),
        RAW.replace(b'"tensors":3', b'"tensors":2'),
        RAW.replace(b'"tensors":3', b'"tensors":-1'),
        RAW.replace(b'"tensors":3', b'"tensors":true'),
        RAW.replace(b'"tensors":3', b'"tensors":1e300'),
        RAW.replace(b'"tensors":3', b'"tensors":99999999999999999999'),
        RAW.replace(b"[0,1]", b"[0,99999999999]"),
        RAW.replace(b'["y"]', b'[{"y": 1}]'),
        RAW.replace(b'"m1:a"', b"7"),
        RAW.replace(b'"1.0"', b'"9.0"'),
        b"x" * (MOST + 1),
    ],
    ids=range(18),
)
def test_a_broken_one_is_ignored_and_said_so(tmp_path: Path, raw: bytes) -> None:
    assert raw != RAW
    found, why = kept(tmp_path, raw)
    assert found is None
    assert why == "migrate.parts cannot be read and is ignored"


def test_one_hash_for_all_is_that_of_the_hashes_in_order() -> None:
    assert combine_hashes([b"00000001", b"00000002"]) == xxhash.xxh3_64_hexdigest(
        b"0000000100000002"
    )
