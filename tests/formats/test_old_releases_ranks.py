"""What ranks saved with releases of Transformer Engine before 2.16: their classes pickle in other
words, which torch's loader of weights refuses, and some of what they saved is dense.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import quantized_classes as classes
import torch
from old_releases_case import RELEASES, known, today
from quantized_ranks import KINDS, whole, wrapped
from ranks import Ranks
from safetensors.torch import load_file
from stored_objects import chunks, of_object, raw
from test_joined_ranks import fields, has_components

import migrate
from migrate.core.errors import MigrateError

pytestmark = pytest.mark.ranks
Start = Callable[[int], Ranks]
NEW: Any = {"params": {"object_form": "te-2.18"}}


@pytest.mark.parametrize(("group", "world"), [("to 2.3", 2), ("to 2.13", 3), ("compact", 2)])
def test_parts_in_the_words_of_old_releases_are_one_tensor(
    group: str, world: int, ranks: Start, tmp_path: Path
) -> None:
    source = tmp_path / "in"
    ranks(world).run("old_releases_case", "saves", str(source), group)
    with known(group) as names:
        assert len(names) == len(RELEASES[group])
        migrate.apply(source, tmp_path / "out.safetensors")
        has_components(tmp_path / "out.safetensors", names, world)
    ranks(2).run("old_releases_case", "loads", str(source), group)


@pytest.mark.parametrize("group", ["to 2.3", "to 2.13"])
def test_stock_torch_reads_them_in_the_words_of_a_new_release(
    group: str, ranks: Start, tmp_path: Path
) -> None:
    source, new = tmp_path / "in", tmp_path / "new.pt"
    ranks(2).run("old_releases_case", "saves", str(source), group)
    migrate.apply(source, new, **NEW)
    with known(group) as names, classes.installed():
        model = torch.load(new, weights_only=True)["model"]
        for name in names:
            kind = KINDS[name]
            bare = kind.cls == "MXFP8Tensor" and kind.release < (2, 6)
            KINDS[name] = today(kind)
            due, held = wrapped(name, kind.shape, whole(name)), model[name]
            assert (type(held), held.shape, held.dtype) == (type(due), due.shape, due.dtype), name
            # those before 2.6 came without
            assert fields(held) == fields(due) | ({"_quantizer": None} if bare else {}), name
            assert of_object(name, held) == {k: v.tobytes() for k, v in whole(name).items()}, name


def test_chunks_are_cut_for_ranks_in_the_words_of_a_new_release(
    ranks: Start, tmp_path: Path
) -> None:
    source = tmp_path / "in"
    ranks(2).run("old_releases_case", "saves", str(source), "to 2.13")
    migrate.apply(source, tmp_path / "out", chunks=3, **NEW)
    with classes.installed():
        for name in ("te-float8-of-2-13", "te-mxfp8-of-2-4", "te-nvfp4-2d-of-2-8"):
            found = chunks(tmp_path / "out", f"model.{name}")
            assert len(found) == 3
            assert not any(one.value._by_method for one in found)
    ranks(3).run("old_releases_case", "loads", str(tmp_path / "out"), "to 2.13")


def test_compact_scales_have_no_words_in_a_new_release(ranks: Start, tmp_path: Path) -> None:
    ranks(2).run("old_releases_case", "saves", str(tmp_path / "in"), "compact")
    with pytest.raises(MigrateError) as caught:
        migrate.apply(tmp_path / "in", tmp_path / "out.pt", **NEW)
    (found,) = caught.value.diagnostics
    assert found.code == "M957"
    assert "model.te-block-1d-compact-of-2-11: its scales are compact" in found.render()


def dense(out: Path, wanted: dict[str, torch.Tensor]) -> None:
    found = load_file(out)
    assert found.keys() == {"norm", *wanted}
    for name, due in wanted.items():
        assert (found[name].dtype, found[name].shape) == (due.dtype, due.shape), name
        assert raw(found[name]) == raw(due), name


@pytest.mark.parametrize("way", ["save", "thread"])
@pytest.mark.parametrize("world", [1, 2])
def test_numbers_in_place_of_objects_are_dense_tensors(
    world: int, way: str, ranks: Start, tmp_path: Path
) -> None:
    """As 2.14 and 2.15 pickle what lies on the CPU."""
    ranks(world).run("old_releases_case", "saves", str(tmp_path / "in"), "dense", way)
    migrate.apply(tmp_path / "in", tmp_path / "out.safetensors")
    with known("dense") as names, classes.installed():
        made = {name: wrapped(name, KINDS[name].shape, whole(name)) for name in names}
        dense(tmp_path / "out.safetensors", {k: v.dequantize() for k, v in made.items()})


@pytest.mark.parametrize(
    ("world", "way"),
    [
        *((world, way) for world in (1, 3) for way in ("blocking", "thread")),
        (2, "process"),
        *(pytest.param(world, "process", marks=pytest.mark.campaign) for world in (1, 3)),
    ],
)
def test_what_async_save_staged_without_memory_is_the_dense_tensor_that_it_is(
    world: int, way: str, ranks: Start, tmp_path: Path
) -> None:
    """Whatever lay there: not the numbers, but nobody can know that."""
    kinds, source = ["te-float8", "te-mxfp8-rowwise"], tmp_path / "in"
    ranks(world).run("old_releases_case", "saves_unwritten", str(source), json.dumps(kinds), way)
    migrate.apply(source, tmp_path / "out.safetensors")
    made = {
        kind: torch.full(KINDS[kind].shape, classes.UNWRITTEN, dtype=torch.bfloat16)
        for kind in kinds
    }
    dense(tmp_path / "out.safetensors", made)
    ranks(2).run("old_releases_case", "loads_dense", str(source), kinds[0])
