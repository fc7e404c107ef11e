"""Quantized tensors that ranks of torch.distributed saved, each its part as an object."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import quantized_classes as classes
import torch
from quantized_ranks import KINDS, WAYS, boxes, piece, sizes
from ranks import Ranks

Start = Callable[[int], Ranks]


def chunks(folder: Path, key: str) -> list[tuple[tuple[int, ...], Any]]:
    """The offsets of each chunk of a tensor and what torch loads from its archive; the folder is
    one that the test made.
    """
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    found = []
    for index, at in metadata.storage_data.items():
        if index.fqn == key:
            with (folder / at.relative_path).open("rb") as file:
                file.seek(at.offset)
                held = io.BytesIO(file.read(at.length))
            found.append((tuple(index.offset), torch.load(held, weights_only=True)))
    return sorted(found, key=lambda one: one[0])


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def of_object(kind: str, held: classes.Wrapper) -> dict[str, bytes]:
    """The bytes of an object's components, by the names that they have in one tensor."""
    names = list(KINDS[kind].parts)
    if KINDS[kind].cls != "GroupedTensor":
        return {name: raw(held.held()[name]) for name in names}
    runs = {name: name.replace("_rowwise_scale", "scale").removeprefix("_") for name in names}
    return {name: raw(held.held()[run]) for name, run in runs.items()}


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
            assert [at for at, _ in found] == [tuple(start for start, _ in box) for box in due]
            for box, (_, held) in zip(due, found, strict=True):
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
