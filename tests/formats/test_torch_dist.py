"""Megatron's `torch_dist` folders: those that megatron-core wrote against its other format, and
folders that are made by hand for what it would not write.
"""

from __future__ import annotations

import argparse
import json
import pickle
import re
import shutil
import types
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from commandline import done, run
from dcp_folders import Box, rows, save, tensor_of
from marks import thorough
from megatron_runs import GRIDS, RUNS, checkpoint, run_folder, runs

from migrate import formats
from migrate.core.errors import CheckpointError
from migrate.source.blobs import Stored, chunks_of
from migrate.source.index import Source

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

# tensors that tensor parallelism cuts, by what their keys end in, and along which dimension
COLUMNS = ("linear_qkv.weight", "linear_qkv.bias", "word_embeddings.weight", "output_layer.weight")
ROWS = ("linear_proj.weight", "linear_fc2.weight")


class Stub:
    """Stands for what only megatron-core has."""

    def __init__(self, *_: object) -> None:
        pass


class Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return Stub if module.startswith("megatron.") else super().find_class(module, name)


LOADER: Any = types.ModuleType("loader")
LOADER.Unpickler, LOADER.load = Unpickler, pickle.load


def load(path: Path) -> Any:
    return torch.load(path, weights_only=False, pickle_module=LOADER)


def part(folder: Path, grid: str, rank: int, stage: int, group: int) -> Any:
    """What one rank left in the legacy format."""
    _, pp, _, ep = GRIDS[grid]
    name = f"mp_rank_{rank:02}" + (f"_{stage:03}" if pp > 1 else "")
    return load(folder / (name + (f"_{group:03}" if ep > 1 else "")) / "model_optim_rng.pt")


def joined(key: str, ranks: Sequence[torch.Tensor]) -> torch.Tensor:
    """The whole tensor of what each tensor-parallel rank holds."""
    if key.endswith(COLUMNS):
        return torch.cat(list(ranks))
    if key.endswith(ROWS):
        return torch.cat(list(ranks), 1)
    if key.endswith("linear_fc1.weight"):
        halves = [rank.chunk(2) for rank in ranks]
        return torch.cat([half[n] for n in range(2) for half in halves])
    assert all(torch.equal(ranks[0], rank) for rank in ranks), key
    return ranks[0]


def legacy_model(name: str, grid: str) -> dict[str, torch.Tensor]:
    """The whole model that a legacy run holds, with layers and experts numbered over all parts."""
    tp, pp, vpp, ep = GRIDS[grid]
    folder = checkpoint(name, "legacy", grid)
    out: dict[str, torch.Tensor] = {}
    first = 0
    # the layers go through all stages once for each virtual one
    for virtual, stage in product(range(vpp), range(pp)):
        held = f"model{virtual}" if vpp > 1 else "model"
        count = 0
        for group in range(ep):
            parts = [part(folder, grid, rank, stage, group)[held] for rank in range(tp)]
            for key in parts[0]:
                if parts[0][key] is None:
                    continue
                number = re.match(r"decoder\.layers\.([0-9]+)\.(.*)", key)
                new = key
                if number:
                    count = max(count, int(number[1]) + 1)
                    new = f"decoder.layers.{first + int(number[1])}.{number[2]}"
                expert = re.match(r"(.*\.local_experts)\.([0-9]+)\.(.*)", new)
                if expert:
                    numbered = int(expert[2]) + group * (4 // ep)
                    new = f"{expert[1]}.{numbered}.{expert[3]}"
                tensor = joined(key, [one[key] for one in parts])
                assert new not in out or torch.equal(out[new], tensor), new
                out[new] = tensor
        first += count
    if name in ("qwen2", "qwen3"):
        # the copy of the last stage, of what the first one has
        tied = out.pop("output_layer.weight", out["embedding.word_embeddings.weight"])
        assert torch.equal(tied, out["embedding.word_embeddings.weight"])
    return out


def tensors(source: Source) -> dict[str, torch.Tensor]:
    return {key: tensor_of(source, stored) for key, stored in source.index.tensors.items()}


def same(found: Mapping[str, torch.Tensor], due: Mapping[str, torch.Tensor]) -> None:
    assert sorted(found) == sorted(due)
    for key, tensor in due.items():
        assert found[key].dtype == tensor.dtype, key
        assert torch.equal(found[key], tensor), key


@pytest.mark.parametrize(("name", "grid"), thorough(runs()))
def test_holds_the_tensors_that_the_legacy_run_holds(name: str, grid: str) -> None:
    with formats.open(checkpoint(name, "torch_dist", grid)) as source:
        assert source.format == "torch_dist"
        same(tensors(source), legacy_model(name, grid))


@pytest.mark.parametrize("name", RUNS)
def test_layers_and_experts_are_read_where_they_lie(name: str) -> None:
    """Megatron saves a chunk for each layer and expert, and that is what stands in the index."""
    with formats.open(checkpoint(name, "torch_dist", "1")) as source:
        layers = {k: t for k, t in source.index.tensors.items() if k.startswith("decoder.layers.")}
        plain = [key for key, stored in layers.items() if isinstance(stored, Stored)]
        # gated halves are two
        gated = {key for key in layers if ".linear_fc1.weight" in key}
        assert set(layers) - set(plain) == gated
        assert all(len(chunks_of(layers[key])) == 2 for key in gated)
        places = [(at.blob, at.offset) for stored in layers.values() for at in chunks_of(stored)]
        assert len(places) == len(set(places))
        # and the checksum of each is the one that was recorded for its archive
        sums = source.index.sums()
        assert all(place in sums for place in places)


def test_stands_in_the_tree_of_the_legacy_format() -> None:
    legacy = load(checkpoint("qwen3", "legacy", "1") / "mp_rank_00" / "model_optim_rng.pt")
    with formats.open(checkpoint("qwen3", "torch_dist", "1")) as source:
        assert source.index.tree is not None
        root = source.index.tree.parts[0].root
        assert [key for key, _ in root.pairs] == [*legacy, "content_metadata"]
        args = vars(legacy["args"])
        assert [key for key, _ in root.get("args").pairs] == list(args)
        other = {"ckpt_format": "torch_dist", "use_dist_ckpt": True}
        for key, value in root.get("args").pairs:
            if not isinstance(args[key], (Stub, list, torch.dtype)):
                assert value == other.get(key, args[key]), key
        assert source.index.tree.parts[0].at == ("model",)
        states = [key for key, value in root.get("model").pairs if value is None]
        assert "decoder.layers.3.mlp.linear_fc2._extra_state" in states
        assert "output_layer._extra_state" in states
        assert len(states) == 4 * 4 + 1


def test_generators_are_kept_for_each_rank() -> None:
    folder = checkpoint("llama", "legacy", "tp2-pp2")
    with formats.open(checkpoint("llama", "torch_dist", "tp2-pp2")) as source:
        carried = source.index.passed_through
        for rank in range(2):
            for stage in range(2):
                due = part(folder, "tp2-pp2", rank, stage, 0)["rng_state"][0]["torch_rng_state"]
                (key,) = [
                    key
                    for key in carried
                    if f"rng_state.mp_rank_{rank:02}_{stage:03}." in key
                    and key.endswith(".torch_rng_state")
                ]
                assert torch.equal(tensor_of(source, carried[key]), due)


@pytest.mark.parametrize("grid", ["tp2", "pp2"])
def test_another_grid_of_the_same_model_is_the_same(grid: str) -> None:
    one, other = (checkpoint("llama", "torch_dist", which) for which in (grid, "1"))
    said = json.loads(run("diff", one, other, "--format", "json").out)
    # the vocabulary is padded for the ranks
    due = ["embedding.word_embeddings.weight", "output_layer.weight"] if grid == "tp2" else []
    assert [found["key"] for found in said["specs"]] == due
    assert said["bytes_differ"] == []
    # and each of them has the generators of its ranks
    assert all(key.startswith("/rng_state.") for key in said["only_a"] + said["only_b"])


RENAME = """
id: acme/flat/names
lineage: acme
edge: [nested, flat]
title: Another name.
rules:
  - {name: all, from: "decoder.layers.{n:int}.{k...}", to: "h.{n}.{k}"}
  - {name: rest, from: "{k...}", to: "{k}"}
"""


def test_is_migrated_and_verified(tmp_path: Path) -> None:
    rule, out = tmp_path / "r.yaml", tmp_path / "out"
    rule.write_text(RENAME)
    folder = checkpoint("mixtral", "torch_dist", "ep2")
    asked = ("--rules", rule)
    done("plan", folder, *asked)
    done("apply", folder, "-o", out, *asked)
    done("verify", out, "--source", folder, *asked)
    with formats.open(out) as source:
        found = tensors(source)
    due = legacy_model("mixtral", "ep2")
    same(found, {key.replace("decoder.layers.", "h."): tensor for key, tensor in due.items()})


def test_a_run_folder_is_its_newest_checkpoint(tmp_path: Path) -> None:
    one = run_folder("qwen2", "torch_dist", "pp2")
    said = done("inspect", one).out
    assert "torch_dist, 5 files" in said
    assert "latest_checkpointed_iteration.txt names" in said
    done("apply", one, "-o", tmp_path / "out", "--output-format", "safetensors")
    with formats.open(tmp_path / "out") as source:
        same(tensors(source), legacy_model("qwen2", "pp2"))


@pytest.mark.parametrize(
    ("args", "norm", "expert"),
    [
        ({}, "self_attention.linear_qkv.layer_norm_weight", "linear_fc2.weight{}"),
        (
            {"transformer_impl": "transformer_engine", "moe_grouped_gemm": True},
            "self_attention.linear_qkv.layer_norm_weight",
            "linear_fc2.weight{}",
        ),
        (
            {"transformer_impl": "transformer_engine", "moe_grouped_gemm": False},
            "self_attention.linear_qkv.layer_norm_weight",
            "local_experts.{}.linear_fc2.weight",
        ),
        (
            {"transformer_impl": "local", "moe_grouped_gemm": False},
            "input_layernorm.weight",
            "local_experts.{}.linear_fc2.weight",
        ),
    ],
)
def test_arguments_say_how_the_model_calls_its_norms_and_experts(
    args: Mapping[str, Any], norm: str, expert: str, tmp_path: Path
) -> None:
    state = {
        "decoder.layers.self_attention.linear_qkv.layer_norm_weight": seeded(2, 3),
        "decoder.layers.mlp.experts.experts.linear_fc2.weight": seeded(2, 2, 3, 4),
    }
    common = {"args": argparse.Namespace(**args)}
    with formats.open(made(tmp_path / "c", state, common=common)) as source:
        found = tensors(source)
    norms, experts = state.values()
    due = {f"decoder.layers.{n}.{norm}": norms[n] for n in range(2)}
    due |= {
        f"decoder.layers.{n}.mlp.experts.{expert.format(e)}": experts[n, e]
        for n in range(2)
        for e in range(2)
    }
    same(found, due)


def test_moments_follow_their_parameters_or_are_left_out_by_a_word(tmp_path: Path) -> None:
    rule, out, left = tmp_path / "r.yaml", tmp_path / "out", tmp_path / "left"
    rule.write_text(RENAME)
    folder = checkpoint("llama", "torch_dist", "1-optimizer")
    with formats.open(folder) as source:
        same(tensors(source), legacy_model("llama", "1"))
        before = {
            key: tensor_of(source, stored) for key, stored in source.index.passed_through.items()
        }
    moments = {key: tensor for key, tensor in before.items() if ".exp_avg" in key}
    assert len(moments) == 2 * 27
    asked = ("--rules", rule, "--output-format", "torch")
    done("apply", folder, "-o", out, *asked)
    done("verify", out, "--source", folder, "--rules", rule)
    with formats.open(out) as source:
        after = {
            key: tensor_of(source, stored) for key, stored in source.index.passed_through.items()
        }
    same(
        after,
        {key.replace(".decoder.layers.", ".h."): tensor for key, tensor in before.items()},
    )
    done("apply", folder, "-o", left, *asked, "--set", "optimizer=drop", "--allow", "drop")
    with formats.open(left) as source:
        assert not [key for key in source.index.passed_through if "exp_avg" in key]


# what flips the tensors of layers as well
FLIP = RENAME.replace('{k}"}', '{k}", via: [{flip: {dim: 0}}]}', 1)


@pytest.mark.parametrize("moment", ["exp_avg", "exp_avg_sq", "fp32_param"])
@pytest.mark.parametrize("optimizer", ["optimizer", "chained_1.optimizer"])
def test_moments_of_each_spelling_follow(optimizer: str, moment: str, tmp_path: Path) -> None:
    rule, out = tmp_path / "r.yaml", tmp_path / "out"
    rule.write_text(FLIP)
    state = {"decoder.layers.a.weight": seeded(2, 3), "norm": seeded(2)}
    kept = {
        f"{optimizer}.state.{moment}.decoder.layers.a.weight": seeded(2, 3) + 1,
        f"{optimizer}.state.{moment}.norm": seeded(2) + 1,
    }
    folder = made(tmp_path / "c", state | kept)
    done("apply", folder, "-o", out, "--rules", rule)
    done("verify", out, "--source", folder, "--rules", rule)
    with formats.open(out) as source:
        found = {k: tensor_of(source, at) for k, at in source.index.passed_through.items()}
    layers, norm = kept.values()
    due = {f"/{optimizer}.state.{moment}.h.{n}.a.weight": layers[n].flip(0) for n in range(2)}
    same(found, {**due, f"/{optimizer}.state.{moment}.norm": norm})


@pytest.mark.parametrize(
    "key",
    [
        "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.bucket_idx_0.exp_avg",
        "chained_1.optimizer.distributed.dp_group_idx_0.gbuf_idx_0.bucket_idx_0.param",
        "optimizer.state.exp_avg.decoder.layers.of.another.model.weight",
    ],
)
def test_no_spelling_of_optimizer_state_goes_stale_in_silence(key: str, tmp_path: Path) -> None:
    rule, out = tmp_path / "r.yaml", tmp_path / "out"
    rule.write_text(FLIP)
    state = {"decoder.layers.a.weight": seeded(2, 3), "norm": seeded(2), key: seeded(2, 3)}
    folder = made(tmp_path / "c", state)
    failed = run("apply", folder, "-o", out, "--rules", rule)
    assert (failed.exit, "error[M410]" in failed.err) == (3, True)
    asked = ("--rules", rule, "--set", "optimizer=drop")
    done("apply", folder, "-o", out, *asked, "--allow", "drop")
    with formats.open(out) as source:
        assert list(source.index.tensors) == ["h.0.a.weight", "h.1.a.weight", "norm"]
        assert not source.index.passed_through


MARKER = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


def made(
    folder: Path,
    state: Mapping[str, Any],
    boxes: Mapping[str, Sequence[Box]] | None = None,
    common: Any = None,
) -> Path:
    """A folder such as Megatron leaves, by stock torch."""
    save(folder, state, boxes, flatten_state_dict=False)
    torch.save({"iteration": 3} if common is None else common, folder / "common.pt")
    (folder / "metadata.json").write_text(json.dumps(MARKER))
    return folder


def seeded(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(sum(shape)))


def refused(folder: Path) -> list[str]:
    with pytest.raises(CheckpointError) as caught:
        formats.open(folder)
    return [f"{found.code}: {found.message}" for found in caught.value.diagnostics]


def test_chunks_may_hold_several_layers_and_experts(tmp_path: Path) -> None:
    whole = seeded(4, 6, 3, 2)
    key = "decoder.layers.mlp.experts.experts.linear_fc2.weight"
    boxes: list[Box] = [
        ([layer, 0, row, 0], [2, 6, size, 2]) for layer in (0, 2) for row, size in ((0, 1), (1, 2))
    ]
    folder = made(tmp_path / "c", {key: whole, "norm": seeded(2)}, {key: boxes})
    with formats.open(folder) as source:
        found = tensors(source)
    due = {
        f"decoder.layers.{n}.mlp.experts.linear_fc2.weight{e}": whole[n, e]
        for n in range(4)
        for e in range(6)
    }
    same(found, {**due, "norm": seeded(2)})


def test_halves_are_joined_behind_each_other(tmp_path: Path) -> None:
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    gate, up = seeded(4, 3), seeded(4, 3) + 1
    boxes = {f"{name}_w": rows((4, 3), [2, 2]), f"{name}_v": rows((4, 3), [1, 3])}
    folder = made(tmp_path / "c", {f"{name}_w": gate, f"{name}_v": up}, boxes)
    with formats.open(folder) as source:
        same(tensors(source), {name: torch.cat([gate, up])})


def test_extra_states_belong_to_their_modules(tmp_path: Path) -> None:
    experts = "decoder.layers.mlp.experts.experts.linear_fc1"
    state: dict[str, Any] = {f"{experts}.weight": seeded(2, 2, 3)}
    for layer in range(2):
        for expert in range(2):
            held = torch.tensor([layer, expert], dtype=torch.uint8)
            state[f"{experts}._extra_state/shard_{layer}.{expert}_2.2"] = [held]
        state[f"decoder.layers.mlp.linear_fc2._extra_state/shard_{layer}_2"] = [None]
    state["output_layer._extra_state/shard_0_1"] = [torch.ones(1, dtype=torch.uint8)]
    with formats.open(made(tmp_path / "c", state)) as source:
        found = {key: tensor for key, tensor in tensors(source).items() if "_extra_state" in key}
        assert source.index.tree is not None
        model = source.index.tree.parts[0].root.get("model")
        assert model.get("decoder.layers.1.mlp.linear_fc2._extra_state", "") is None
    due = {
        f"decoder.layers.{n}.mlp.experts.linear_fc1.{e}._extra_state": [n, e]
        for n in range(2)
        for e in range(2)
    }
    assert {key: tensor.tolist() for key, tensor in found.items()} == {
        **due,
        "output_layer._extra_state": [1],
    }


@pytest.mark.parametrize("odd", [None, torch.ones(1, dtype=torch.uint8)])
def test_states_of_experts_are_one_only_where_none_says_anything(odd: Any, tmp_path: Path) -> None:
    experts = "decoder.layers.mlp.experts.experts.linear_fc1"
    state: dict[str, Any] = {f"{experts}.weight": seeded(2, 2, 3)}
    for layer in range(2):
        for expert in range(2):
            other = (layer, expert) == (1, 1)
            held = odd if other else torch.empty(0, dtype=torch.uint8)
            state[f"{experts}._extra_state/shard_{layer}.{expert}_2.2"] = [held]
    with formats.open(made(tmp_path / "c", state)) as source:
        assert source.index.tree is not None
        model = source.index.tree.parts[0].root.get("model")
        assert [key for key, _ in model.pairs if "experts" in key and "_extra" in key] == [
            "decoder.layers.0.mlp.experts.linear_fc1._extra_state",
            "decoder.layers.1.mlp.experts.linear_fc1.0._extra_state",
            "decoder.layers.1.mlp.experts.linear_fc1.1._extra_state",
        ]


class TestWhatContradictsItself:
    """Each is refused, and names what is wrong."""

    def say(self, folder: Path, code: str, text: str) -> None:
        found = refused(folder)
        assert [one[:4] for one in found] == [code] * len(found)
        assert text in "\n".join(found)

    def test_layers_that_differ_in_number(self, tmp_path: Path) -> None:
        state = {"decoder.layers.a.weight": seeded(3, 2), "decoder.layers.b.weight": seeded(4, 2)}
        self.say(made(tmp_path / "c", state), "M938", "3 in decoder.layers.a.weight")

    def test_a_hole_between_layers(self, tmp_path: Path) -> None:
        state = {f"decoder.layers.{n}.a.weight": seeded(2) for n in (0, 1, 3)}
        self.say(made(tmp_path / "c", state), "M938", "1 of 4 are missing: 2")

    def test_a_hole_between_experts(self, tmp_path: Path) -> None:
        name = "decoder.layers.0.mlp.experts.experts"
        state = {f"{name}.{n}.linear_fc2.weight": seeded(2) for n in (0, 2)}
        self.say(
            made(tmp_path / "c", state), "M938", "decoder.layers.0.mlp.experts: 1 of 3 are missing"
        )

    def test_half_of_a_tensor(self, tmp_path: Path) -> None:
        state = {"decoder.layers.0.mlp.linear_fc1.weight_w": seeded(2, 2)}
        self.say(made(tmp_path / "c", state), "M938", "there is no other half")

    def test_halves_of_other_shapes(self, tmp_path: Path) -> None:
        name = "decoder.layers.0.mlp.linear_fc1.weight"
        state = {f"{name}_w": seeded(2, 2), f"{name}_v": seeded(3, 2)}
        self.say(made(tmp_path / "c", state), "M938", "_w and _v differ in shape")

    def test_shards_that_are_missing(self, tmp_path: Path) -> None:
        state = {"decoder.layers.a._extra_state/shard_0_2": [None], "w": seeded(1)}
        self.say(made(tmp_path / "c", state), "M938", "1 of its 2 shards are missing")

    def test_shards_of_another_number_of_layers(self, tmp_path: Path) -> None:
        state: dict[str, Any] = {"decoder.layers.a.weight": seeded(3, 2)}
        state |= {f"decoder.layers.a._extra_state/shard_{n}_2": [None] for n in range(2)}
        self.say(made(tmp_path / "c", state), "M938", "entries differ in number")

    def test_two_entries_of_one_key(self, tmp_path: Path) -> None:
        state = {"decoder.layers.a.w": seeded(1, 2), "decoder.layers.0.a.w": seeded(2)}
        self.say(made(tmp_path / "c", state), "M938", "another entry is decoder.layers.0.a.w")

    def test_a_tensor_without_the_axis(self, tmp_path: Path) -> None:
        state = {"decoder.layers.a.w": torch.tensor(1.0)}
        self.say(made(tmp_path / "c", state), "M938", "no axis of layers or experts")

    def test_an_entry_that_common_has_too(self, tmp_path: Path) -> None:
        state = {"w": seeded(2), "args/shard_0_1": [3]}
        folder = made(tmp_path / "c", state, common={"args": 1})
        self.say(folder, "M938", "args: stands there, and beside it in common.pt")

    @pytest.mark.parametrize(
        ("args", "text"),
        [
            (
                {"num_layers": 5},
                "4 of decoder.layers, and the arguments in common.pt say `num_layers` 5",
            ),
            ({"num_experts": 3}, "2 of decoder.layers.mlp.experts, and the arguments"),
            ({"num_experts": None}, "2 of decoder.layers.mlp.experts, and the arguments"),
        ],
    )
    def test_arguments_of_another_model(
        self, args: Mapping[str, Any], text: str, tmp_path: Path
    ) -> None:
        state = {"decoder.layers.mlp.experts.experts.linear_fc2.weight": seeded(4, 2, 3)}
        rights = ({}, {"num_layers": 4, "num_experts": 2}, {"num_layers": None, "num_experts": 2})
        for number, right in enumerate(rights):
            common = {"args": argparse.Namespace(**right)}
            formats.open(made(tmp_path / f"right{number}", state, common=common)).close()
        common = {"args": argparse.Namespace(**{"num_layers": 4, "num_experts": 2, **args})}
        self.say(made(tmp_path / "c", state, common=common), "M938", text)

    def test_arguments_of_a_model_of_another_width(self, tmp_path: Path) -> None:
        state = {"decoder.final_layernorm.weight": seeded(3)}
        formats.open(
            made(tmp_path / "a", state, common={"args": argparse.Namespace(hidden_size=3)})
        ).close()
        common = {"args": argparse.Namespace(hidden_size=4)}
        text = "has the shape [3], and the arguments in common.pt say `hidden_size` 4"
        self.say(made(tmp_path / "c", state, common=common), "M938", text)

    @pytest.mark.parametrize("untied", [True, False])
    def test_arguments_that_say_another_output_layer(self, untied: bool, tmp_path: Path) -> None:
        state = {"embedding.word_embeddings.weight": seeded(4, 2)}
        if not untied:
            state["output_layer.weight"] = seeded(4, 2)
        common = {"args": argparse.Namespace(untie_embeddings_and_output_weights=untied)}
        text = f"common.pt `untie_embeddings_and_output_weights` is {untied}, and there is"
        self.say(made(tmp_path / "c", state, common=common), "M938", text)

    def test_a_folder_that_is_called_after_another_iteration(self, tmp_path: Path) -> None:
        state = {"w": seeded(1)}
        folder = made(tmp_path / "iter_0000100", state, common={"iteration": 200})
        with formats.open(folder) as source:
            assert "called iter_0000100" in source.index.notes[0]

    def test_an_older_checkpoint_version(self, tmp_path: Path) -> None:
        common = {"checkpoint_version": 2.0}
        folder = made(tmp_path / "c", {"w": seeded(1)}, common=common)
        self.say(folder, "M925", "common.pt is of checkpoint_version 2.0")

    def test_arguments_of_experts_that_are_not_there(self, tmp_path: Path) -> None:
        state = {"decoder.layers.0.mlp.linear_fc2.weight": seeded(4, 2)}
        common = {"args": argparse.Namespace(num_layers=1, num_experts=8)}
        self.say(made(tmp_path / "c", state, common=common), "M938", "0 of experts")

    def test_an_axis_of_nothing_that_makes_many_keys(self, tmp_path: Path) -> None:
        state = {"decoder.layers.a.w": torch.empty(1 << 40, 0), "w": seeded(1)}
        self.say(made(tmp_path / "c", state), "M914", "more than 1,000,000 tensors")

    @pytest.mark.parametrize("common", [[1], 3, {1: 2}])
    def test_common_that_is_no_dict_by_names(self, common: Any, tmp_path: Path) -> None:
        folder = made(tmp_path / "c", {"w": seeded(1)}, common=common)
        self.say(folder, "M938", "holds no dict by names")


class TestWhatIsNotWhole:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        return Path(shutil.copytree(checkpoint("llama", "torch_dist", "1"), tmp_path / "c"))

    @pytest.mark.parametrize("name", ["common.pt", "metadata.json", ".metadata"])
    def test_without_one_of_its_files(self, name: str, folder: Path, tmp_path: Path) -> None:
        (folder / name).unlink()
        (found,) = refused(folder)
        assert found.startswith("M937: ")
        assert f"without {'its' if name != '.metadata' else 'their'} `{name}`" in found
        failed = run("apply", folder, "-o", tmp_path / "out", "--output-format", "torch")
        assert (failed.exit, (tmp_path / "out").exists()) == (3, False)

    def test_with_values_alone(self, folder: Path) -> None:
        for path in (*folder.glob("*.distcp"), folder / ".metadata"):
            path.unlink()
        (found,) = refused(folder)
        assert found.startswith("M937: ")

    @pytest.mark.parametrize("keep", [0, 100, -1])
    def test_with_damaged_values(self, keep: int, folder: Path) -> None:
        data = (folder / "common.pt").read_bytes()
        (folder / "common.pt").write_bytes(data[:keep])
        (found,) = refused(folder)
        assert re.match(r"M94[01]: .*/common\.pt: ", found), found

    def test_metadata_names_the_folder(self, folder: Path) -> None:
        with formats.open(folder / ".metadata") as source:
            assert (source.format, len(source.index.tensors)) == ("torch_dist", 27)

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("sharded_backend", "zarr"),
            ("sharded_backend_version", 2),
            ("sharded_backend_version", True),
            ("common_backend", "zarr"),
            ("common_backend_version", [1]),
        ],
    )
    def test_of_another_backend(self, field: str, value: Any, folder: Path) -> None:
        (folder / "metadata.json").write_text(json.dumps({**MARKER, field: value}))
        (found,) = refused(folder)
        assert found.startswith("M937: ")
        assert f"`{field}` is {value!r}" in found

    def test_of_zarr_as_it_lies_on_disk(self, tmp_path: Path) -> None:
        (tmp_path / "decoder.layers.w").mkdir()
        (tmp_path / "decoder.layers.w" / ".zarray").write_text("{}")
        torch.save({"iteration": 3}, tmp_path / "common.pt")
        (tmp_path / "metadata.json").write_text(json.dumps({**MARKER, "sharded_backend": "zarr"}))
        (found,) = refused(tmp_path)
        assert "`sharded_backend` is 'zarr'" in found

    @pytest.mark.parametrize(
        ("text", "code"),
        [
            ("", "M906"),
            ("[" * 5000, "M914"),
            ('{"a": ' * 900 + "1" + "}" * 900, "M937"),
            ('{"sharded_backend": "torch_dist", "sharded_backend": "zarr"}', "M906"),
            ("[]", "M937"),
            ("{}", "M937"),
            ('{"sharded_backend": 5}', "M937"),
            ('{"sharded_backend": {"a": 1}}', "M937"),
            (" " * (1 << 17), "M914"),
        ],
    )
    def test_a_hostile_marker(self, text: str, code: str, folder: Path) -> None:
        (folder / "metadata.json").write_text(text)
        (found,) = refused(folder)
        assert found.startswith(f"{code}: "), found


def test_a_file_of_the_same_name_makes_no_other_folder_megatrons(tmp_path: Path) -> None:
    folder = save(tmp_path / "c", {"model": {"w": seeded(2)}})
    for text in ("{}", "not JSON", " " * (1 << 17)):
        (folder / "metadata.json").write_text(text)
        with formats.open(folder) as source:
            assert (source.format, list(source.index.tensors)) == ("dcp", ["w"])
