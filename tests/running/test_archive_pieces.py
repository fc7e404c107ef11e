"""Archives cut so that what is uploaded of them is never changed."""

from __future__ import annotations

import zlib
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from migrate.formats._dcpwrite import _chained, _Shard
from migrate.formats._torchwrite import archive
from migrate.running.pieces import LEAST_PIECE, cut_archive, sealed_tail, tail_of
from migrate.source.target import OutputFile

MIB = 1 << 20
SIZES = st.lists(st.sampled_from([0, 0, 5, MIB, 3 * MIB, 9 * MIB]), min_size=1, max_size=8)


def chain(several: list[list[int]]) -> OutputFile:
    """A file of archives one behind the other, each with storages of these sizes."""
    shard, count = _Shard("file"), 0
    for sizes in several:
        made = archive("a chunk", b"..", [(str(count + n), size) for n, size in enumerate(sizes)])
        count += len(sizes)
        shard.archives.append(made)
        shard.placed += [one._replace(offset=shard.size + one.offset) for one in made.tensors]
        shard.size += made.size
    return _chained(shard)


FILES = st.one_of(
    SIZES.map(lambda sizes: archive("file", b"..", [(str(n), s) for n, s in enumerate(sizes)])),
    st.lists(SIZES, min_size=1, max_size=6).map(chain),
)


def crc(offset: int) -> int:
    return zlib.crc32(str(offset).encode())


def sealed(file: OutputFile) -> dict[int, bytes]:
    """What the seal of a file or a piece of one puts behind each tensor, by where it stands."""
    found, crcs = {}, list[int]()
    stops = [*(one.offset for one in file.tensors[1:]), file.size]
    for placed, stop in zip(file.tensors, stops, strict=True):
        crcs.append(crc(placed.offset) if placed.nbytes else 0)
        at = placed.offset + placed.nbytes
        if file.seal is not None and at < stop:
            found[at] = file.seal(crcs)
            assert len(found[at]) == stop - at
    return found


@given(FILES, st.integers(2, 6))
def test_what_pieces_are_sealed_with_is_what_stands_in_the_whole(
    file: OutputFile, count: int
) -> None:
    pieces = cut_archive(file, count)
    if pieces == [file]:
        return
    assert len(pieces) <= count
    assert all(one.size == two.begin for one, two in pairwise(pieces))
    assert (pieces[0].begin, pieces[-1].size) == (0, tail_of(file))
    assert all(piece.nbytes >= LEAST_PIECE for piece in pieces)
    found: dict[int, bytes] = {}
    for piece in pieces:
        found |= sealed(piece)
    said = [(one, [crc(p.offset) if p.nbytes else 0 for p in one.tensors]) for one in pieces]
    start, tail = sealed_tail(file, said)
    found[start] = tail
    assert found == sealed(file)


@given(st.integers(2, 5))
def test_no_archive_is_cut_whose_directory_needs_all_its_storages(count: int) -> None:
    file = chain([[4 * MIB, 4 * MIB, 4 * MIB]] * 5)
    begins = {file.tensors[n].offset for n in range(0, 15, 3)}
    pieces = cut_archive(file, count)
    assert len(pieces) == count
    assert {piece.begin for piece in pieces[1:]} <= begins
