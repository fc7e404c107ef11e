"""Quantized tensors that ranks of torch.distributed saved, each its part: what they are as one, in
safetensors and as objects again.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import quantized_classes as classes
import quantized_ranks
import torch
from quantized_ranks import KINDS, WAYS, Arrays, boxes, piece, tensors, whole, wrapped
from quantized_shards import save_shards
from ranks import Ranks
from safetensors.torch import load_file
from stored_objects import NAMES, chunks, of_object, raw

import migrate
from migrate.core.errors import CheckpointError

Start = Callable[[int], Ranks]
KEYS = list(KINDS)
# a GroupedTensor that a module holds is filled by its own `copy_`
LIVE = NAMES


def components(kind: str, world: int) -> Arrays:
    """What the tensor has as a whole. What one rank saved is carried as it is, padding included."""
    return whole(kind) if world > 1 else piece(kind, boxes(KINDS[kind], 1)[0])


def has_components(out: Path, kinds: list[str], world: int, *, norm: bool = True) -> None:
    """Asserts that a file of safetensors has the components of these tensors and no others."""
    found = load_file(out)
    wanted = {
        f"{kind}.{name}": one
        for kind in kinds
        for name, one in tensors(kind, components(kind, world)).items()
    }
    wanted |= {"norm": torch.arange(5.0)} if norm else {}
    # what a quantizer has for itself is no part of the tensor
    assert {key for key in found if "._quantizer." not in key} == wanted.keys()
    for key, one in wanted.items():
        assert (found[key].dtype, found[key].shape) == (one.dtype, one.shape), key
        assert raw(found[key]) == raw(one), key


def fields(held: classes.Wrapper) -> dict[str, Any]:
    """What an object holds beside tensors, but for how it is spelled."""
    found = held.__tensor_flatten__()[1]
    return {key: one for key, one in found.items() if key not in ("_by_method", "_count")}


def has_objects(out: Path, kinds: list[str], world: int) -> None:
    """Asserts that stock torch loads the tensors from a `.pt` file as the objects that they are."""
    with classes.installed():
        model = torch.load(out, weights_only=True)["model"]
        for kind in kinds:
            wanted = components(kind, world)
            due, held = wrapped(kind, KINDS[kind].shape, wanted), model[kind]
            assert (type(held), held.shape, held.dtype) == (type(due), due.shape, due.dtype), kind
            assert fields(held) == fields(due), kind
            assert of_object(kind, held) == {key: one.tobytes() for key, one in wanted.items()}


@pytest.mark.parametrize(
    ("world", "cut"),
    [
        (2, "rows"),
        *(pytest.param(n, "rows", marks=pytest.mark.ranks) for n in (1, 3, 4)),
        pytest.param(2, "columns", marks=pytest.mark.ranks),
        pytest.param(2, "members", marks=pytest.mark.ranks),
    ],
)
def test_parts_of_ranks_are_one_tensor(world: int, cut: str, ranks: Start, tmp_path: Path) -> None:
    kinds = {
        "rows": KEYS,
        "columns": [name for name, kind in KINDS.items() if kind.across],
        "members": ["te-grouped"],
    }[cut]
    ranks(world).run("quantized_ranks", "saves", str(tmp_path / "in"), kinds, "save", cut)
    migrate.apply(tmp_path / "in", tmp_path / "out.safetensors")
    has_components(tmp_path / "out.safetensors", kinds, world)
    migrate.apply(tmp_path / "in", tmp_path / "out.pt")
    has_objects(tmp_path / "out.pt", kinds, world)


# each way and each number of ranks; two of them start a process for each rank
SOME = {(1, "save"), (4, "blocking"), (4, "staged"), (3, "save"), (3, "thread")}


@pytest.mark.parametrize(
    ("saved", "loaded", "way"),
    [
        pytest.param(
            saved,
            loaded,
            way,
            id=f"{saved}-{loaded}-{way}",
            marks=pytest.mark.ranks if saved == 2 or (saved, way) in SOME else pytest.mark.campaign,
        )
        for saved, loaded in [(1, 1), (2, 4), (4, 2), (3, 2)]
        for way in WAYS
    ],
)
def test_what_ranks_saved_in_any_way_goes_anywhere(
    saved: int, loaded: int, way: str, ranks: Start, tmp_path: Path
) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    # 1510 rows of blocks of 128 are dealt out to other ranks on no border
    keys, live = ([one for one in names if one != "te-block-2d"] for names in (KEYS, LIVE))
    ranks(saved).run("quantized_ranks", "saves", str(source), keys, way)
    migrate.apply(source, tmp_path / "out.safetensors")
    has_components(tmp_path / "out.safetensors", keys, saved)
    ranks(loaded).run("quantized_load_case", "loads", str(source), json.dumps(live), "rows")
    migrate.apply(source, out, output_format="dcp", chunks=loaded)
    with classes.installed():
        for kind in keys:
            found = chunks(out, f"model.{kind}")
            due = boxes(KINDS[kind], loaded)
            assert [one.at for one in found] == [tuple(start for start, _ in box) for box in due]
            for box, (_, held, _) in zip(due, found, strict=True):
                wanted = piece(kind, box, zeros=saved > 1)
                assert of_object(kind, held) == {key: one.tobytes() for key, one in wanted.items()}


def test_blocks_as_high_as_a_shard_are_blocks_of_the_whole(tmp_path: Path) -> None:
    kind = KINDS["ao-float8-block"]
    rows, columns = kind.shape
    cut = [((at, at + 128), (0, columns)) for at in range(0, rows, 128)]
    with classes.installed():
        held = [
            wrapped("ao-float8-block", (128, columns), piece("ao-float8-block", box)) for box in cut
        ]
        at = [((start, 0), (128, columns)) for (start, _), _ in cut]
        save_shards(tmp_path / "in", kind.shape, at, {"model.ao-float8-block": held})
    migrate.apply(tmp_path / "in", tmp_path / "out.pt")
    with classes.installed():
        found = torch.load(tmp_path / "out.pt", weights_only=True)["model.ao-float8-block"]
    assert found.block_size == [128, 128]
    assert (
        of_object("ao-float8-block", found)["scale"] == whole("ao-float8-block")["scale"].tobytes()
    )


WRONG = {
    "inside": ("te-mxfp8", "te-block-2d", "te-block-1d", "te-nvfp4-2d", "ao-float8-block"),
    "shared": ("te-float8", "te-nvfp4-2d", "ao-float8-tensor", "ao-nvfp4"),
    "dense": ("te-mxfp8", "te-grouped", "ao-mx"),
}
SAID = {"inside": "inside a block of", "shared": "` is ", "dense": "is a plain tensor"}


@pytest.mark.ranks
@pytest.mark.parametrize("fault", WRONG)
@pytest.mark.parametrize("world", [2, 3])
def test_parts_that_make_no_whole_tensor_are_named(
    world: int, fault: str, ranks: Start, tmp_path: Path
) -> None:
    kinds = list(WRONG[fault])
    ranks(world).run("quantized_ranks", "saves_wrong", str(tmp_path / "in"), kinds, fault)
    with pytest.raises(CheckpointError) as caught:
        migrate.apply(tmp_path / "in", tmp_path / "out.safetensors")
    found = {d.message.partition(":")[0]: d for d in caught.value.diagnostics}
    assert found.keys() == {f"model.{kind}" for kind in kinds}
    assert {d.code for d in found.values()} == {"M946"}
    for kind in kinds:
        said = found[f"model.{kind}"].message
        assert SAID[fault] in said, said
        # the rank that is alone with what it has
        assert f"rank {0 if fault == 'inside' else world - 1}" in said, said
    assert not (tmp_path / "out.safetensors").exists()
    # it can be looked at, and rules can leave such tensors out
    seen = migrate.inspect(tmp_path / "in").unjoined
    assert seen.keys() == found.keys()
    assert all(why in found[key].message for key, why in seen.items())
    (tmp_path / "rules.yaml").write_text(WITHOUT)
    made = migrate.apply(
        tmp_path / "in", tmp_path / "out", rules=[tmp_path / "rules.yaml"], allow={"drop"}
    )
    assert made.tensors == 1


WITHOUT = """
id: demo/v2/without
title: without the quantized tensors
why: to test
lineage: demo
edge: [v1, v2]
requires: ">=0.1"
keep: ["norm"]
rules:
  - {name: gone, from: "{k}.{part...}.{last}", via: [{drop: {why: to test}}]}
"""


def of_group(top: int, bottom: int) -> classes.Wrapper:
    """Rows of each member of a group, as a rank would have them."""
    kind = KINDS["te-grouped"]
    held = {}
    for name, made in quantized_ranks._drawn("te-grouped", kind.shape, 0).items():
        part = kind.parts[name]
        taken = made[:, quantized_ranks._cut(part.rows, top, bottom)]
        held[name] = np.stack([quantized_ranks._stored(part, name, one, None) for one in taken])
    return wrapped("te-grouped", (kind.shape[0], bottom - top, kind.shape[2]), held)


@pytest.mark.parametrize(("cut", "exact"), [(32, True), (16, False)])
def test_a_group_whose_members_are_cut(cut: int, exact: bool, tmp_path: Path) -> None:
    count, rows, columns = KINDS["te-grouped"].shape
    with classes.installed():
        values = [of_group(0, cut), of_group(cut, rows)]
        boxes = [((0, 0, 0), (count, cut, columns)), ((0, cut, 0), (count, rows - cut, columns))]
        save_shards(tmp_path / "in", (count, rows, columns), boxes, {"te-grouped": values})
    if exact:
        migrate.apply(tmp_path / "in", tmp_path / "out.safetensors")
        has_components(tmp_path / "out.safetensors", ["te-grouped"], 2, norm=False)
        return
    with pytest.raises(CheckpointError, match=r"M946.*row 16 lies inside a block of 32 rows"):
        migrate.apply(tmp_path / "in", tmp_path / "out.safetensors")


def of_float8(count: int, rows: int, columns: int, first: int = 0) -> classes.Wrapper:
    """A group of members of `rows` rows that have one scale each, drawn for all of them."""
    quantizer = classes.install_name("float8_tensor").Float8CurrentScalingQuantizer(
        rowwise_usage=True,
        columnwise_usage=False,
        internal=False,
        dtype=classes.code("e4m3", (2, 18)),
    )
    fields: dict[str, Any] = dict.fromkeys(classes.GroupedTensor.COMPONENTS) | {
        "num_tensors": count,
        "quantizer": quantizer,
        "tensor_shapes": [(rows, columns)] * count,
        "fake_dtype": torch.bfloat16,
        "rowwise_data": torch.arange(count * rows * columns, dtype=torch.uint8),
        "scale_inv": torch.arange(first + 1.0, first + count + 1),
        "offsets": [n * rows * columns for n in range(count + 1)],
        "scale_inv_offsets": list(range(count + 1)),
        "logical_shape": (count * rows, columns),
    }
    return classes.GroupedTensor((count, rows, columns), torch.bfloat16, fields)


def test_members_with_one_scale_are_not_cut(tmp_path: Path) -> None:
    with classes.installed():
        whole = {"w": [of_float8(1, 4, 6), of_float8(3, 4, 6, first=1)]}
        boxes = [((0, 0, 0), (1, 4, 6)), ((1, 0, 0), (3, 4, 6))]
        save_shards(tmp_path / "members", (4, 4, 6), boxes, whole)
        # the scales are equal, and stay one for each member all the same
        cut = {"w": [of_float8(4, 2, 6), of_float8(4, 2, 6)]}
        boxes = [((0, 0, 0), (4, 2, 6)), ((0, 2, 0), (4, 2, 6))]
        save_shards(tmp_path / "cut", (4, 4, 6), boxes, cut)
    migrate.apply(tmp_path / "members", tmp_path / "out.safetensors")
    found = load_file(tmp_path / "out.safetensors")
    assert found["w._scale_inv"].flatten().tolist() == [1, 2, 3, 4]
    assert found["w._data"].flatten().tolist() == [*range(24), *range(72)]
    with pytest.raises(CheckpointError) as caught:
        migrate.apply(tmp_path / "cut", tmp_path / "no.safetensors")
    ((code, said),) = [(d.code, d.message) for d in caught.value.diagnostics]
    assert code == "M946"
    assert said.startswith("w: ")
    assert "`_scale_inv`: a member that is cut has one element in all of its parts" in said
    assert not (tmp_path / "no.safetensors").exists()
    # a whole one is cut between members
    migrate.apply(tmp_path / "members", tmp_path / "again", output_format="dcp", chunks=2)
    with classes.installed():
        assert [one.at for one in chunks(tmp_path / "again", "w")] == [(0, 0, 0), (2, 0, 0)]
