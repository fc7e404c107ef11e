"""Quantized tensors that ranks of torch.distributed saved, each its part as an object."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import quantized_classes as classes
import torch
from quantized_ranks import KINDS, WAYS, boxes, piece, sizes
from ranks import Ranks
from stored_objects import chunks, of_object

Start = Callable[[int], Ranks]


@pytest.mark.parametrize(
    ("world", "way"),
    [
        (2, "save"),
        *(
            pytest.param(world, way, marks=pytest.mark.ranks)
            for world in (1, 2, 3, 4)
            for way in WAYS
            if (world, way) != (2, "save")
        ),
    ],
)
def test_each_rank_saves_its_part_as_an_object(
    world: int, way: str, ranks: Start, tmp_path: Path
) -> None:
    ranks(world).run("quantized_ranks", "saves", str(tmp_path / "in"), list(KINDS), way)
    with classes.installed():
        for name, kind in KINDS.items():
            found, due = chunks(tmp_path / "in", f"model.{name}"), boxes(kind, world)
            assert [one.at for one in found] == [tuple(start for start, _ in box) for box in due]
            for box, (_, held, _) in zip(due, found, strict=True):
                assert (tuple(held.shape), held.dtype) == (sizes(box), torch.bfloat16), name
                wanted = {key: one.tobytes() for key, one in piece(name, box).items()}
                assert of_object(name, held) == wanted, name


def test_padding_of_a_part_is_not_that_of_another() -> None:
    """Else a join that takes it over would go unnoticed."""
    for name, kind in KINDS.items():
        one, other = (piece(name, box) for box in boxes(kind, 2))
        for key, part in kind.parts.items():
            if part.padded != (1, 1):
                assert np.any(one[key] != 0), name
                assert not np.array_equal(one[key], other[key]), name
