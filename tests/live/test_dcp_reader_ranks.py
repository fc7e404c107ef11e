"""`dcp.load` through a reader that migrates, on several ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import dcp_reader_case as case
import pytest
import torch
from ranks import Ranks
from safetensors.torch import save_file

import migrate

pytestmark = pytest.mark.ranks
Start = Callable[[int], Ranks]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_safetensors_fill_a_model_with_fsdp2(
    world: int, ranks: Start, tmp_path: Path, rules: str
) -> None:
    save_file(case.old_layout(), tmp_path / "old.safetensors")
    ranks(world).run("dcp_reader_case", "fills_fsdp2", str(tmp_path / "old.safetensors"), rules)


@pytest.mark.parametrize(("saved", "loaded"), [(2, 2), (3, 2), (2, 4)])
def test_what_other_ranks_saved_fills_a_model_with_fsdp2(
    saved: int, loaded: int, ranks: Start, tmp_path: Path, rules: str
) -> None:
    folder = str(tmp_path / "saved")
    ranks(saved).run("dcp_reader_case", "save_parts", folder)
    ranks(loaded).run("dcp_reader_case", "fills_fsdp2", folder, rules, "model")


OF_RANKS = """\
id: toy/v2/joined
title: One stack of experts for each layer, of what the ranks had
why: the new module has one parameter, and the new trainer shards by itself
lineage: toy
edge: [v1, v2]
requires: ">=0.1"
rules:
  - name: up
    from: "blocks.{n:int}.experts.{e:int}.up.weight@{r:int}"
    to: "layers.{n}.up"
    via: [{concat: {over: r, dim: 0}}, {stack: {over: e}}]
  - name: norm
    from: "blocks.{n:int}.norm.{k}@{r:int}"
    to: "layers.{n}.norm.{k}"
    via: [{same: {over: r}}]
  - {name: head, from: "head.weight@{r:int}", to: head.weight, via: [{same: {over: r}}]}
"""


def test_files_of_other_ranks_fill_a_model_with_fsdp2(ranks: Start, tmp_path: Path) -> None:
    folder = tmp_path / "old"
    for rank in range(2):
        held = {}
        for key, value in case.old_layout().items():
            # tensor parallelism cuts the experts' rows, and each rank has all of the others
            held[key] = value.chunk(2)[rank].clone() if "experts" in key else value
        path = folder / f"mp_rank_{rank:02}" / "model.pt"
        path.parent.mkdir(parents=True)
        torch.save(held, path)
    (tmp_path / "joined.yaml").write_text(OF_RANKS)
    rules = str(tmp_path / "joined.yaml")
    ranks(3).run("dcp_reader_case", "fills_fsdp2", str(folder), rules)


@pytest.mark.parametrize("world", [2, 4])
def test_shards_of_any_placement_are_filled(world: int, ranks: Start, old: str, rules: str) -> None:
    ranks(world).run("dcp_reader_case", "held_in_any_way", old, rules)


def test_fsdp2_over_tensor_parallelism_is_filled(ranks: Start, old: str, rules: str) -> None:
    ranks(4).run("dcp_reader_case", "tensor_parallel_within_fsdp2", old, rules)


DEQUANTIZE = """\
id: toy/v2/dense
title: Plain weights
why: the trainer has no FP8
lineage: toy
edge: [v1, v2]
requires: ">=0.1"
rules:
  - name: experts
    from: {weight: "e.{n:int}.weight", scale: "e.{n:int}.weight_scale_inv"}
    to: "up"
    via:
      - dequantize: {codec: fp8-block, dtype: bfloat16, block: [128, 128]}
      - stack: {over: n}
      - transpose: {dims: [1, 2]}
  - name: plain
    from: {weight: "{m}.weight", scale: "{m}.weight_scale_inv"}
    to: "{m}.weight"
    via: [{dequantize: {codec: fp8-block, dtype: bfloat16, block: [128, 128]}}]
"""


@pytest.mark.parametrize("world", [2, 3])
def test_values_are_computed_by_region(world: int, ranks: Start, tmp_path: Path) -> None:
    (tmp_path / "dense.yaml").write_text(DEQUANTIZE)
    torch.manual_seed(0)
    held = {}
    for name, (rows, columns) in {"e.0": (260, 300), "e.1": (260, 300), "head": (301, 130)}.items():
        held[f"{name}.weight"] = torch.randn(rows, columns).to(torch.float8_e4m3fn)
        blocks = (-(-rows // 128), -(-columns // 128))
        held[f"{name}.weight_scale_inv"] = torch.rand(blocks) + 0.5
    save_file(held, tmp_path / "old.safetensors")
    whole = tmp_path / "new.safetensors"
    rules = str(tmp_path / "dense.yaml")
    migrate.apply(tmp_path / "old.safetensors", whole, rules=rules, allow="lossy")
    arguments = (str(tmp_path / "old.safetensors"), rules, str(whole))
    ranks(world).run("dcp_reader_case", "computes_its_boxes", *arguments)


def test_what_is_wrong_on_one_rank_is_an_error_on_all(
    ranks: Start, tmp_path: Path, old: str, rules: str
) -> None:
    other = tmp_path / "other.yaml"
    other.write_text(case.RULES.replace("stack: {over: e}", "stack: {over: e}}, {flip: {dim: 0}"))
    ranks(2).run("dcp_reader_case", "is_refused_on_every_rank", old, rules, str(other))


def test_a_condition_on_values_stops_all_ranks(ranks: Start, tmp_path: Path) -> None:
    rules = tmp_path / "same.yaml"
    rules.write_text(
        """\
id: toy/v2/one
title: One norm
why: the ranks of tensor parallelism each had a copy
lineage: toy
edge: [v1, v2]
requires: ">=0.1"
rules:
  - {name: one, from: "norm.{r:int}", to: "norm", via: [{same: {over: r}}]}
"""
    )
    save_file({"norm.0": torch.ones(8), "norm.1": torch.zeros(8)}, tmp_path / "a.safetensors")
    arguments = (str(tmp_path / "a.safetensors"), str(rules))
    ranks(2).run("dcp_reader_case", "condition_that_does_not_hold", *arguments)


@pytest.mark.parametrize("form", ["safetensors", "dcp"])
def test_a_rank_reads_what_its_shards_need(form: str, ranks: Start, tmp_path: Path) -> None:
    rules = tmp_path / "stack.yaml"
    rules.write_text(
        """\
id: toy/v2/stacked
title: A stack
why: the new module has one parameter
lineage: toy
edge: [v1, v2]
requires: ">=0.1"
rules:
  - {name: up, from: "e.{n:int}", to: "up", via: [{stack: {over: n}}]}
  - {name: turned, from: "t", to: "turned", via: [{transpose: {dims: [0, 1]}}]}
  - {name: others, from: "{w:wide|narrow}", to: "{w}"}
"""
    )
    held = {f"e.{n}": torch.randn(64, 1024) for n in range(64)}
    held |= {"wide": torch.randn(700, 2048), "narrow": torch.randn(90000, 4)}
    held["t"] = torch.randn(700, 2048)
    save_file(held, tmp_path / "old.safetensors")
    source = tmp_path / "old.safetensors"
    if form == "dcp":
        migrate.apply(source, tmp_path / "old", output_format="dcp")
        source = tmp_path / "old"
    ranks(4).run("dcp_reader_case", "reads_what_its_shards_need", str(source), str(rules))


def test_an_identity_reader_is_invisible(ranks: Start, tmp_path: Path) -> None:
    ranks(4).run("dcp_reader_case", "is_invisible", str(tmp_path))


def test_tensors_of_the_older_class_are_filled(ranks: Start, tmp_path: Path) -> None:
    ranks(2).run("dcp_reader_case", "fills_sharded_tensors", str(tmp_path))


def test_what_one_rank_migrates_is_dealt_out_by_torch(ranks: Start, old: str, rules: str) -> None:
    ranks(2).run("dcp_reader_case", "fills_what_rank_zero_reads", old, rules)
