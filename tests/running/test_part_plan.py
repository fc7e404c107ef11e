"""The parts of files in a bucket: within the limits of S3, and copied where they can be."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from migrate.running.part_plan import (
    COPIED,
    ENOUGH,
    NOTED,
    SHORTER,
    UPLOADED,
    UploadPart,
    cut_parts,
    held_parts,
    is_due,
    part_size,
)
from migrate.running.share import Extent
from migrate.running.store_run import published_order, side_by_side
from migrate.source.stores.requests import PIECE
from migrate.source.stores.s3_uploads import LARGEST, LEAST, MOST_PARTS

MIB = 1 << 20


@st.composite
def files(draw: st.DrawFn) -> tuple[int, list[Extent]]:
    """The size of a file, and what of it moves, with gaps between that do not."""
    lengths = st.sampled_from([1, 1000, LEAST - 1, LEAST, LEAST + 1, 7 * MIB, COPIED + 1, 3 << 30])
    at, found = draw(st.integers(0, 100)), []
    for _ in range(draw(st.integers(0, 30))):
        nbytes = draw(lengths)
        found.append(Extent(at, nbytes, draw(st.integers(0, 2)), draw(st.integers(0, 1 << 40))))
        at += nbytes + draw(st.sampled_from([0, 0, 1, LEAST - 1, LEAST, 40 * MIB]))
    return at, found


@given(files())
def test_parts_are_within_the_limits_and_copy_what_is_there(made: tuple[int, list[Extent]]) -> None:
    size, extents = made
    parts = cut_parts(size, extents)
    assert (parts[0].start, parts[-1].stop) == (0, size)
    assert all(one.stop == other.start for one, other in pairwise(parts))
    assert len(parts) <= MOST_PARTS
    assert all(LEAST <= part.size <= LARGEST for part in parts[:-1])
    assert parts[-1].size <= LARGEST
    for part in parts:
        if part.blob < 0:
            continue
        # a copy lies in one stretch, at its place there, and is never too short
        assert part.size >= LEAST
        assert any(
            one.blob == part.blob
            and one.at <= part.start
            and part.stop <= one.at + one.nbytes
            and part.origin - part.start == one.origin - one.at
            for one in extents
        )
    # what is uploaded of a long stretch is at most what its neighbours borrow
    copied = sum(part.size for part in parts if part.blob >= 0)
    assert copied >= sum(one.nbytes - LEAST for one in extents if one.nbytes >= 2 * LEAST)


def test_the_largest_files_have_parts_of_their_own_size() -> None:
    size = 40 << 40
    parts = cut_parts(size, [Extent(100 + n * 6 * MIB, 6 * MIB, 0, 0) for n in range(20_000)])
    assert len(parts) <= MOST_PARTS
    assert parts[-1].stop == size
    assert all(LEAST <= part.size <= LARGEST for part in parts)


def test_without_copies_all_parts_but_the_last_are_alike() -> None:
    assert [part.size for part in cut_parts(2 * UPLOADED + 5)] == [UPLOADED, UPLOADED, 5]
    assert cut_parts(0) == [UploadPart(0, 0)]


def test_many_parts_are_taken_down_seldom() -> None:
    new = notes = 0
    for made in range(1, 600_001):
        new += 1
        if is_due(new, made):
            new, notes = 0, notes + 1
    # what is lost to a kill is 3 % at most, and what is written does not grow by squares
    assert notes < 400
    assert is_due(NOTED, NOTED)
    assert not is_due(NOTED - 1, NOTED - 1)


def test_with_less_memory_parts_are_shorter() -> None:
    assert part_size(256 * 10**6, 2) == SHORTER
    assert part_size(1 << 30, 2) == UPLOADED
    assert held_parts(256 * 10**6, 2, SHORTER) >= ENOUGH
    assert {part.size for part in cut_parts(4 * UPLOADED, uploaded=SHORTER)} == {SHORTER}


def test_of_names_in_order_those_that_are_alike_go_together() -> None:
    order = ["1", "2", "config.json", "vocab.txt", "stamp", "3", "index"]
    assert side_by_side(order, ["1", "2"], ["vocab.txt", "config.json"]) == [
        ["1", "2"], ["config.json", "vocab.txt"], ["stamp"], ["3"], ["index"],
    ]  # fmt: skip
    assert side_by_side(["stamp", "1"]) == [["stamp"], ["1"]]


def test_what_tells_that_the_set_is_whole_appears_last() -> None:
    stamp, index = "migrate.history.json", "model.safetensors.index.json"
    assert published_order(["1", "2"], ["config.json"], [stamp, index]) == [
        "1", "config.json", stamp, "2", index,
    ]  # fmt: skip
    assert published_order(["1"], ["config.json"], [stamp]) == ["config.json", stamp, "1"]
    assert published_order(["d"], [], ["iter/.metadata", "iter/common.pt", "latest.txt"])[1:] == [
        "iter/common.pt", "iter/.metadata", "latest.txt",
    ]  # fmt: skip


def test_the_arithmetic_of_the_page_is_that_of_the_parts() -> None:
    page = (Path(__file__).parents[2] / "docs" / "scale.md").read_text(encoding="utf-8")
    _, _, page = page.partition("## Costs and times of 10 TB")
    all_bytes, files, size = 10**13, 2000, 5 * 10**9
    assert files * size == all_bytes
    uploaded = cut_parts(size)
    copied = cut_parts(size, [Extent(0, size, 0, 0)])
    assert f"= {len(uploaded)} parts a file | {files * len(uploaded):,} PUT |" in page
    assert f"= {len(copied)} parts a file" in page
    assert f"| {files * len(copied):,} COPY |" in page
    assert f"| {-(-all_bytes // PIECE):,} GET |" in page
    assert f"at most {MOST_PARTS:,} parts" in page
    assert f"Parts of {UPLOADED >> 20} MiB make {MOST_PARTS * UPLOADED / 1e9:.0f} GB" in page
