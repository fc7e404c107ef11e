"""Quantized parameters of which each rank has a part take their boxes of the whole components."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import quantized_classes as classes
import torch
from quantized_ranks import KINDS, whole, wrapped
from ranks import Ranks
from safetensors.torch import save_file
from stored_objects import NAMES, saved

Start = Callable[[int], Ranks]


@pytest.mark.parametrize(
    ("world", "cut"),
    [
        (2, "rows"),
        *(
            pytest.param(world, cut, marks=pytest.mark.ranks)
            for world, cut in ((3, "rows"), (4, "rows"), (2, "columns"))
        ),
    ],
)
def test_each_part_takes_its_box_of_each_component(
    world: int, cut: str, ranks: Start, tmp_path: Path
) -> None:
    names = [name for name in NAMES if cut == "rows" or KINDS[name].across]
    source = saved(tmp_path / "whole.pt", names)
    ranks(world).run("quantized_load_case", "loads", str(source), json.dumps(names), cut)
    ranks(world).run("quantized_load_case", "reads", str(source), json.dumps(names), cut)
    ranks(world).run("quantized_load_case", "loads_on_meta", str(source), json.dumps(names), cut)


@pytest.mark.ranks
@pytest.mark.parametrize("cut", ["rows", "members"])
def test_parts_of_a_group_take_the_bytes_of_their_members(
    cut: str, ranks: Start, tmp_path: Path
) -> None:
    source = saved(tmp_path / "whole.pt", ["te-grouped"])
    for case in ("loads", "reads", "loads_on_meta"):
        ranks(2).run("quantized_load_case", case, str(source), '["te-grouped"]', cut)


RENAME = """\
id: t/b/c
title: t
why: t
lineage: t
edge: [a, b]
requires: ">=0.1"
rules: [{name: r, from: "te-float8.{k}", to: "weight.{k}"}]
"""


@pytest.mark.ranks
@pytest.mark.parametrize("world", [2, 3])
def test_shards_of_fully_shard_take_their_bytes(world: int, ranks: Start, tmp_path: Path) -> None:
    (tmp_path / "rename.yaml").write_text(RENAME)
    source = saved(tmp_path / "whole.pt", ["te-float8"])
    ranks(world).run(
        "quantized_load_case", "loads_under_fsdp2", str(source), str(tmp_path / "rename.yaml")
    )


@pytest.mark.ranks
def test_a_part_without_elements_leaves_the_meta_device_too(
    ranks: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = dataclasses.replace(KINDS["te-mxfp8-rowwise"], shape=(1, 192))
    monkeypatch.setitem(KINDS, "row", row)
    source = saved(tmp_path / "whole.pt", ["row"])
    ranks(2).run("quantized_load_case", "loads_nothing_on_meta", str(source))


@pytest.mark.ranks
@pytest.mark.parametrize(("saving", "loading"), [(2, 4), (4, 2), (3, 2)])
def test_what_ranks_saved_is_loaded_by_other_ranks(
    saving: int, loading: int, ranks: Start, tmp_path: Path
) -> None:
    folder = str(tmp_path / "in")
    ranks(saving).run("quantized_ranks", "saves", folder, NAMES)
    ranks(loading).run("quantized_load_case", "loads", folder, json.dumps(NAMES), "rows")
    ranks(loading).run("quantized_load_case", "reads", folder, json.dumps(NAMES), "rows")


@pytest.mark.ranks
@pytest.mark.parametrize("world", [2, 3])
def test_parts_of_square_blocks_derive_the_columnwise_usage(
    world: int, ranks: Start, tmp_path: Path
) -> None:
    kind = "te-block-2d-even"
    held = {key: one for key, one in whole(kind).items() if "row" in key}
    with classes.installed():
        value = wrapped(kind, KINDS[kind].shape, held)
        torch.save({"model": {kind: value}}, tmp_path / "rowwise.pt")
    for meta in (False, True):
        ranks(world).run("quantized_load_case", "derives", str(tmp_path / "rowwise.pt"), meta)


@pytest.mark.ranks
@pytest.mark.parametrize("world", [2, 4])
def test_parts_take_plain_numbers_by_their_own_copy(
    world: int, ranks: Start, tmp_path: Path
) -> None:
    generator = torch.Generator().manual_seed(0)
    dense = {
        kind: torch.randn(KINDS[kind].shape, generator=generator).bfloat16()
        for kind in ("te-float8", "te-mxfp8-rowwise")
    }
    save_file(dense, tmp_path / "dense.safetensors")
    ranks(world).run("quantized_load_case", "quantizes", str(tmp_path / "dense.safetensors"))


@pytest.mark.ranks
@pytest.mark.parametrize("world", [2, 4])
def test_parts_take_objects_in_another_encoding_by_their_own_copy(
    world: int, ranks: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shards of ranks need not end on borders of the blocks that are decoded."""
    shape = KINDS["te-float8"].shape
    monkeypatch.setitem(KINDS, "mx", dataclasses.replace(KINDS["te-block-2d"], shape=shape))
    with classes.installed():
        held = wrapped("mx", shape, dict(whole("mx")))
        # no code is NaN, no scale infinite
        held._rowwise_data.bitwise_and_(0x77)
        grid = [-(-size // 128) for size in shape]
        held._rowwise_scale_inv.copy_(torch.rand(held._rowwise_scale_inv.shape) + 0.5)
        torch.save({"te-float8": held}, tmp_path / "mx.pt")
    scales = held._rowwise_scale_inv[: grid[0], : grid[1]]
    scales = scales.repeat_interleave(128, 0)[: shape[0]].repeat_interleave(128, 1)[:, : shape[1]]
    numbers = held._rowwise_data.view(torch.float8_e4m3fn).float() * scales
    save_file({"te-float8": numbers}, tmp_path / "dense.safetensors")
    places = str(tmp_path / "mx.pt"), str(tmp_path / "dense.safetensors")
    ranks(world).run("quantized_load_case", "quantizes_objects", *places)


@pytest.mark.ranks
def test_a_part_that_ends_inside_of_a_block_is_refused(
    ranks: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = dataclasses.replace(KINDS["te-block-2d"], shape=(1000, 300))
    monkeypatch.setitem(KINDS, "odd", odd)
    source = saved(tmp_path / "whole.pt", ["odd"])
    ranks(2).run("quantized_load_case", "refuses", str(source))


@pytest.mark.ranks
def test_parts_that_are_to_be_summed_are_refused(ranks: Start, tmp_path: Path) -> None:
    source = saved(tmp_path / "whole.pt", ["te-float8"])
    ranks(2).run("quantized_load_case", "refuses_sums", str(source))


@pytest.mark.ranks
def test_a_part_that_is_not_the_box_of_its_placement_is_refused(
    ranks: Start, tmp_path: Path
) -> None:
    source = saved(tmp_path / "whole.pt", ["te-mxfp8-rowwise"])
    ranks(2).run("quantized_load_case", "refuses_other_boxes", str(source))


@pytest.mark.ranks
def test_a_part_that_ends_inside_of_a_block_is_encoded_anew(
    ranks: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = dataclasses.replace(KINDS["te-block-2d"], shape=(1000, 300))
    monkeypatch.setitem(KINDS, "odd", odd)
    with classes.installed():
        # no NaN
        parts = {n: raw & 0x77 if "data" in n else raw for n, raw in whole("odd").items()}
        made = wrapped("odd", odd.shape, parts)
        torch.save({"model": {"odd": made}, "step": 1}, tmp_path / "whole.pt")
    ranks(2).run("quantized_load_case", "requantizes", str(tmp_path / "whole.pt"))


# cut into two or four equal parts
EVEN = ["te-mxfp8", "te-nvfp4-2d", "te-block-2d-even", "ao-float8-block"]


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.ranks)])
def test_a_rank_opens_its_chunk_and_the_first_of_a_tensor(
    world: int, ranks: Start, tmp_path: Path
) -> None:
    folder, kinds = str(tmp_path / "in"), EVEN if world > 2 else EVEN[:2]
    ranks(world).run("quantized_ranks", "saves", folder, kinds)
    for way in ("reader", "load"):
        said = folder, json.dumps(kinds), way
        ranks(world).run("quantized_load_case", "opens_its_chunks", *said)
        # all heads are needed of what may be encoded anew, and of nothing else
        ranks(world).run("quantized_load_case", "opens_its_chunks", *said, kinds[0])


@pytest.mark.ranks
@pytest.mark.parametrize("fault", ["shared", "code", "flag"])
@pytest.mark.parametrize("world", [2, 4])
def test_a_shard_that_differs_is_refused_by_the_rank_that_reads_it(
    world: int, fault: str, ranks: Start, tmp_path: Path
) -> None:
    even, uneven = "te-nvfp4-2d", "ao-nvfp4"
    cases = [([even], [world - 1]), ([even, uneven], list(range(world)))]
    if fault != "shared":
        cases = [(["te-mxfp8"], [world - 1])]
    for number, (kinds, seen_by) in enumerate(cases):
        folder = str(tmp_path / str(number))
        ranks(world).run("quantized_ranks", "saves_wrong", folder, kinds, fault)
        said = json.dumps(kinds), json.dumps(seen_by)
        for way in ("reader", "load"):
            ranks(world).run("quantized_load_case", "refuses_what_differs", folder, *said, way)
    if fault != "shared":
        return
    ranks(world).run("quantized_load_case", "leaves_what_differs", str(tmp_path / "0"), even)


@pytest.mark.ranks
def test_a_shard_that_is_stored_in_another_way_is_read_as_it_is(
    ranks: Start, tmp_path: Path
) -> None:
    folder, kinds = str(tmp_path / "in"), json.dumps(EVEN)
    ranks(4).run("quantized_load_case", "saves_turned", folder, kinds)
    for world in (4, 2):
        ranks(world).run("quantized_load_case", "reads", folder, kinds, "rows")


@pytest.mark.ranks
@pytest.mark.parametrize("flat", [False, True])
def test_optimizer_state_follows_objects_onto_other_ranks(
    flat: bool, ranks: Start, tmp_path: Path
) -> None:
    folder, kinds, rules = str(tmp_path / "in"), json.dumps(EVEN), tmp_path / "rules.yaml"
    rules.write_text(
        "id: demo/v2/x\ntitle: x\nwhy: x\nlineage: demo\nedge: [v1, v2]\n"
        'rules: [{name: r, from: "old.{k...}", to: "{k}"}]\n'
    )
    ranks(4).run("quantized_load_case", "saves_with_state", folder, kinds, flat)
    said = folder, str(rules), kinds, flat
    for world in (4, 2):
        ranks(world).run("quantized_load_case", "reads_with_state", *said)
