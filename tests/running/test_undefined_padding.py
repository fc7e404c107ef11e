"""What fills up scales differs between equal checkpoints, and counts for nothing."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_shards import CLASSES, draw, keep, save_shards, shard
from quantized_streams import stand_ins

import migrate

SHAPE = (160, 160)
BOX = ((0, 0), SHAPE)


def saved(path: Path, name: str, padding: int, changed: str | None = None) -> Path:
    """A file of torch.save with a quantized tensor filled up with `padding`, the first element of
    the grid of component `changed` being another one.
    """
    cls = CLASSES[name]
    grids = draw(cls, *SHAPE)
    if changed is not None:
        grids[changed][0, 0] += 1
    with stand_ins() as modules:
        torch.save({"w": cls.object(modules, shard(cls, grids, BOX, padding), SHAPE)}, path)
    return path


@pytest.mark.parametrize(
    "name",
    [
        "mxfp8-swizzled",
        *(pytest.param(n, marks=pytest.mark.thorough) for n in ("mxfp8", "nvfp4", "block-2d")),
    ],
)
def test_padding_is_no_difference(tmp_path: Path, name: str) -> None:
    one, other = (saved(tmp_path / f"{n}.pt", name, n) for n in (3, 5))
    found = migrate.diff(one, other)
    assert found.equal
    assert [note for note in found.notes if note.startswith("differs only in padding")]
    report = migrate.verify(other, source=one, rules=[keep(tmp_path)])
    assert report.equal
    assert [note for note in report.notes if "w._rowwise_scale_inv" in note]
    assert not migrate.diff(one, one).notes


@pytest.mark.parametrize("part", ["_rowwise_scale_inv", "_columnwise_scale_inv"])
def test_a_scale_is_one(tmp_path: Path, part: str) -> None:
    one = saved(tmp_path / "a.pt", "mxfp8-swizzled", 3)
    other = saved(tmp_path / "b.pt", "mxfp8-swizzled", 5, part)
    found = migrate.diff(one, other)
    assert [(one.key, one.count) for one in found.bytes_differ] == [(f"w.{part}", 1)]
    report = migrate.verify(other, source=one, rules=[keep(tmp_path)])
    assert [one.key for one in report.differences] == [f"w.{part}"]


def test_a_joined_tensor_equals_the_one_that_was_saved_whole(tmp_path: Path) -> None:
    cls = CLASSES["mxfp8"]
    grids = draw(cls, 256, 160)
    boxes = [((r, 0), (128, 160)) for r in (0, 128)]
    with stand_ins() as modules:
        parts: list[Any] = [cls.object(modules, shard(cls, grids, box), box[1]) for box in boxes]
        save_shards(tmp_path / "in", (256, 160), boxes, {"w": parts})
        whole = cls.object(modules, shard(cls, grids, ((0, 0), (256, 160)), 7), (256, 160))
        raw = io.BytesIO()
        torch.save({"w": whole}, raw)
    (tmp_path / "w.pt").write_bytes(raw.getvalue())
    found = migrate.diff(tmp_path / "in", tmp_path / "w.pt")
    assert found.tensors_equal
    assert [note for note in found.notes if "padding" in note]
