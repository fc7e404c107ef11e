"""Whether chunks cover their tensor, against counting its elements."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from work import steps

from migrate.source.pickle.dcp_metadata import uncovered
from migrate.source.pickle.dcp_stream import SavedChunk


def counted(shape: tuple[int, ...], chunks: list[SavedChunk]) -> bool:
    """Whether each element of the tensor is in exactly one chunk, by looking at each."""
    elements = dict.fromkeys(product(*(range(size) for size in shape)), 0)
    for chunk in chunks:
        for point in product(
            *(range(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))
        ):
            if point not in elements:
                return False
            elements[point] += 1
    return set(elements.values()) <= {1}


def cut(shape: tuple[int, ...], random: random.Random, times: int) -> list[SavedChunk]:
    """Boxes that cover the shape, cut at random places."""
    boxes = [SavedChunk((0,) * len(shape), shape)]
    for _ in range(times):
        box = boxes.pop(random.randrange(len(boxes)))
        dims = [d for d, size in enumerate(box.sizes) if size > 1]
        if not dims:
            boxes.append(box)
            continue
        d = random.choice(dims)
        at = random.randrange(1, box.sizes[d])
        for start, size in ((0, at), (at, box.sizes[d] - at)):
            offsets, sizes = list(box.offsets), list(box.sizes)
            offsets[d] += start
            sizes[d] = size
            boxes.append(SavedChunk(tuple(offsets), tuple(sizes)))
    random.shuffle(boxes)
    return boxes


SHAPES = st.lists(st.integers(1, 4), min_size=0, max_size=4).map(tuple)


@given(shape=SHAPES, seed=st.integers(0, 2**32), times=st.integers(0, 8), change=st.integers(0, 3))
def test_the_answer_is_that_of_counting_every_element(
    shape: tuple[int, ...], seed: int, times: int, change: int
) -> None:
    rng = random.Random(seed)
    chunks = cut(shape, rng, times)
    for _ in range(change):
        at = rng.randrange(len(chunks))
        box = chunks[at]
        kind = rng.randrange(3)
        if kind == 0:
            chunks.append(box)
        elif kind == 1 and len(chunks) > 1:
            chunks.pop(at)
        elif shape:
            d = rng.randrange(len(shape))
            offsets, sizes = list(box.offsets), list(box.sizes)
            if rng.random() < 0.5:
                offsets[d] = rng.randrange(shape[d])
            sizes[d] = (
                rng.randrange(shape[d] - offsets[d] + 1)
                if rng.random() < 0.5
                else min(sizes[d], shape[d] - offsets[d])
            )
            chunks[at] = SavedChunk(tuple(offsets), tuple(sizes))
    assert (uncovered(shape, chunks) == "") is counted(shape, chunks)


def test_cuts_that_fit_are_always_accepted() -> None:
    rng = random.Random(7)
    for _ in range(200):
        shape = tuple(rng.randrange(1, 50) for _ in range(rng.randrange(1, 4)))
        assert uncovered(shape, cut(shape, rng, rng.randrange(30))) == ""


@pytest.mark.parametrize(
    ("shape", "boxes", "words"),
    [
        ((4,), [((0,), (2,))], "hold 2 of 4 elements: there is a hole"),
        ((4,), [((0,), (3,)), ((2,), (2,))], "hold 5 of 4 elements: there is an overlap"),
        ((4,), [((0,), (2,)), ((1,), (2,))], "an overlap and a hole"),
        ((4,), [((2,), (3,))], "a chunk at [2] of size [3] reaches outside of [4]"),
        ((4,), [((0, 0), (4, 1))], "has 1 dimensions and a chunk of 2 and 2"),
        ((4,), [], "hold 0 of 4 elements"),
        ((), [], "hold 0 of 1 elements"),
        ((0, 3), [], "has no chunk"),
        ((2**30, 2**30), [((0, 0), (2**30, 2**30))], "at most 2^50 are read"),
    ],
)
def test_what_is_wrong_is_said_with_numbers(
    shape: tuple[int, ...], boxes: list[tuple[tuple[int, ...], tuple[int, ...]]], words: str
) -> None:
    assert words in uncovered(shape, [SavedChunk(*box) for box in boxes])


def test_empty_tensors_and_empty_shards_are_covered() -> None:
    assert uncovered((0, 3), [SavedChunk((0, 0), (0, 3))]) == ""
    assert uncovered((), [SavedChunk((), ())]) == ""
    # more ranks than rows: the last ones hold nothing, at the same place
    assert (
        uncovered(
            (2, 3),
            [
                SavedChunk((0, 0), (1, 3)),
                SavedChunk((1, 0), (1, 3)),
                SavedChunk((2, 0), (0, 3)),
                SavedChunk((2, 0), (0, 3)),
            ],
        )
        == ""
    )


def test_many_chunks_take_linear_work_and_huge_shapes_no_memory() -> None:
    few, many = tiled(8), tiled(32)
    assert steps(many) < 1.5 * 16 * steps(few)


def tiled(side: int) -> Callable[[], None]:
    """Square tensors in side * side chunks, which cover it but for one."""
    large = [
        SavedChunk((i * 10**7, j * 10**7), (10**7, 10**7)) for i in range(side) for j in range(side)
    ]
    small = [SavedChunk((i * 10, j * 10), (10, 10)) for i in range(side) for j in range(side)]

    def look() -> None:
        assert "at most 2^50" in uncovered((side * 10**7, side * 10**7), large)
        assert uncovered((side * 10, side * 10), small) == ""
        assert "a hole" in uncovered((side * 10, side * 10), small[:-1])

    return look


def test_a_tensor_cut_along_every_of_many_dimensions_is_refused_at_once() -> None:
    shape = (2,) * 40
    boxes = [SavedChunk((0,) * 40, (1,) * 40), SavedChunk((1,) * 40, (1,) * 40)]
    said = []
    assert steps(lambda: said.append(uncovered(shape, boxes))) < 10_000
    assert "is cut along 40 dimensions" in said[0]
