"""Megatron's `torch_dist`, written: read by stock torch beside what megatron-core wrote, and given
back by `migrate` as it was; what the format cannot hold is refused by name.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from collections import OrderedDict
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from commandline import done, run
from marks import thorough
from megatron_runs import checkpoint, family, run_folder, runs
from safetensors.torch import save_file
from test_torch_dist import load, made, seeded, tensors
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

import migrate
from migrate import formats
from migrate.core.errors import MigrateError
from migrate.source.tree import kept_by_part

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


class Held(NamedTuple):
    """What stock torch reads of a folder: tensors and values by entry, what `.metadata` says of the
    tensors, and the values beside.
    """

    tensors: dict[str, torch.Tensor]
    values: dict[str, Any]
    said: dict[str, Any]
    common: dict[str, Any]


def written(out: Path) -> Path:
    """The checkpoint in a run folder that holds no other."""
    (only,) = out.glob("*/.metadata")
    tracker = (out / "latest_checkpointed_iteration.txt").read_text()
    assert only.parent.name in (tracker, f"iter_{tracker:>07}")
    return only.parent


def held(folder: Path) -> Held:
    metadata = FileSystemReader(folder).read_metadata()
    assert metadata.planner_data is None
    found: dict[str, Any] = {}
    said, values = {}, {}
    for key, entry in metadata.state_dict_metadata.items():
        if hasattr(entry, "size"):
            found[key] = torch.empty(entry.size, dtype=entry.properties.dtype)
            boxes = {(tuple(one.offsets), tuple(one.sizes)) for one in entry.chunks}
            said[key] = tuple(entry.size), entry.properties, boxes
    for index, place in metadata.storage_data.items():
        if index.fqn not in said:
            data = (folder / place.relative_path).read_bytes()
            values[index.fqn] = load_bytes(data[place.offset : place.offset + place.length])
    planner = torch.distributed.checkpoint.DefaultLoadPlanner(flatten_state_dict=False)
    _load_state_dict(found, FileSystemReader(folder), planner=planner, no_dist=True)
    return Held(found, values, said, load(folder / "common.pt"))


def load_bytes(data: bytes) -> Any:
    return load(BytesIO(data))  # type: ignore[arg-type]


def plain(value: Any) -> Any:
    """The value as what can be compared: objects as their fields, tensors as lists."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.tolist()
    if isinstance(value, Mapping):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    if hasattr(value, "__array__"):
        return str(value.dtype), value.tolist()
    if isinstance(value, argparse.Namespace):
        return plain(vars(value))
    return value if isinstance(value, (int, float, str, type(None))) else type(value).__name__


def same(one: Held, other: Held) -> None:
    assert one.tensors.keys() == other.tensors.keys()
    for key, tensor in one.tensors.items():
        assert torch.equal(tensor, other.tensors[key]), key
    for key, (size, properties, _) in one.said.items():
        assert (size, properties) == other.said[key][:2], key
    assert plain(one.values) == plain(other.values)


@pytest.mark.parametrize(("name", "grid"), thorough(runs()))
def test_is_what_megatron_wrote(name: str, grid: str, tmp_path: Path) -> None:
    folder, out = checkpoint(name, "torch_dist", grid), tmp_path / "out"
    done("apply", folder, "-o", out, "--output-format", "torch_dist")
    there = written(out)
    before, after = held(folder), held(there)
    same(before, after)
    said = dict(after.common["content_metadata"])
    if grid == "1-layers":
        # what no value told is told now
        assert said.pop("non_homogeneous_layers") is True
    assert plain({**after.common, "content_metadata": said}) == plain(before.common)
    assert [*after.common] == [*before.common]
    assert (there / "metadata.json").read_bytes() == (folder / "metadata.json").read_bytes()
    done("verify", out, "--source", folder)
    done("diff", folder, out)


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_layers_and_experts_are_chunks_as_megatron_has_them(name: str, tmp_path: Path) -> None:
    folder, out = checkpoint(name, "torch_dist", "1"), tmp_path / "out"
    done("apply", folder, "-o", out, "--output-format", "torch_dist")
    before, after = held(folder).said, held(written(out)).said
    for key, (_, _, boxes) in after.items():
        # halves are chunks of their own there
        if "linear_fc1.weight" not in key:
            assert boxes == before[key][2], key


@pytest.mark.parametrize(
    ("name", "grid"),
    [("qwen3", "1"), ("mixtral", "pp2-ep2"), ("llama", "pp2-uneven"), ("qwen2", "pp2-vpp2")],
)
def test_parts_become_what_megatron_writes_on_their_grid(
    name: str, grid: str, tmp_path: Path
) -> None:
    """With the generators of each rank, which return to their parts."""
    run_, out = run_folder(name, "legacy", grid), tmp_path / "out"
    said = done("apply", run_, "-o", out, "--output-format", "torch_dist").out
    assert "has no place for" not in said
    after, due = held(written(out)), held(checkpoint(name, "torch_dist", grid))
    same(after, due)
    assert after.common["content_metadata"] == due.common["content_metadata"]
    done("verify", out, "--source", run_)
    with formats.open(out) as one, formats.open(run_) as other:
        assert one.index.hash() == other.index.hash()
        assert one.index.versions == other.index.versions
        assert one.index.versions
        trees = [source.index.tree for source in (one, other)]
        assert None not in trees
        kept = [dict(kept_by_part(tree.parts[0].root)) for tree in trees if tree is not None]
    assert len(kept[0]) == (0 if grid == "1" else 4 if "ep2" in grid else 2)
    assert [*kept[0]] == [*kept[1]]
    # an expert group beyond the first has no entry for its own
    names = [[*dict(entry.pairs)] for entry in kept[0].values()]
    assert names == [[*dict(entry.pairs)] for entry in kept[1].values()]


@pytest.mark.parametrize(
    ("name", "grid"), [("llama", "tp2"), ("mixtral", "tp2-ep2"), ("qwen3", "tp2-pp2")]
)
def test_ranks_are_joined_by_themselves(name: str, grid: str, tmp_path: Path) -> None:
    run_, out = run_folder(name, "legacy", grid), tmp_path / "out"
    words = ("--to", "megatron-gpt@mcore", "--output-format", "torch_dist")
    done("apply", run_, "-o", out, *words)
    done("verify", out, "--source", run_)
    same(held(written(out)), held(checkpoint(name, "torch_dist", grid)))


def test_arguments_say_the_format_that_is_written(tmp_path: Path) -> None:
    run_, out, back = run_folder("llama", "legacy", "tp2"), tmp_path / "out", tmp_path / "back"
    to = ("--to", "megatron-gpt@mcore")
    told = done("apply", run_, "-o", out, *to, "--output-format", "torch_dist")
    # that values are of other ranks is nothing to read
    assert "values that rules name" not in told.out
    args = vars(held(written(out)).common["args"])
    assert (args["ckpt_format"], args["use_dist_ckpt"]) == ("torch_dist", True)
    for way in (("downgrade", out, "-o", back), ("apply", out, "-o", tmp_path / "pp2", *to, "--set",
                                                 "pp=2", "--allow", "drop")):  # fmt: skip
        done(*way)
        values = done("inspect", way[3], "--values").out
        assert re.search(r'args\.ckpt_format(@\{0,1\})? = "torch"', values)
        assert "args.use_dist_ckpt" in values
        assert "use_dist_ckpt = true" not in values
        done("verify", way[3], "--source", out)


@pytest.mark.parametrize(
    "said", [3, {"items": {}}, {"_metadata": {}, "keys": {}}, {"_metadata": [1]}, {}]
)
def test_what_is_no_versions_of_modules_becomes_no_attribute(said: Any, tmp_path: Path) -> None:
    """An attribute of a dict that is loaded may take the place of one of its methods."""
    state = {"decoder.layers.a.weight": seeded(1, 2)}
    folder = made(tmp_path / "c", state, common={"migrate.versions": said})
    migrate.apply(folder, tmp_path / "out.pt")
    read = torch.load(tmp_path / "out.pt", weights_only=True)
    assert read["migrate.versions"] == said
    assert type(read["model"]) is dict
    assert migrate.verify(tmp_path / "out.pt", source=folder).equal


def test_attributes_of_another_kind_have_no_place(tmp_path: Path) -> None:
    model = OrderedDict(layers({"a.weight": seeded(2)}))
    model._metadata, model.other = OrderedDict(), [1]  # type: ignore[attr-defined]
    torch.save({"model": model}, tmp_path / "in.pt")
    answer = migrate.apply(tmp_path / "in.pt", tmp_path / "out", output_format="torch_dist")
    found = answer.to_json()
    assert "Megatron's torch_dist has no place for attributes of the model" in found["notes"]
    assert not found["downgrade"]["exact"]


def test_the_other_spec_has_its_own_names(tmp_path: Path) -> None:
    run_, out, back = run_folder("mixtral", "torch_dist", "1"), tmp_path / "out", tmp_path / "back"
    words = ("--to", "megatron-gpt@mcore", "--set", "impl=te", "--set", "experts=te")
    done("apply", run_, "-o", out, *words, "--output-format", "torch_dist")
    done("verify", out, "--source", run_)
    before, after = held(checkpoint("mixtral", "torch_dist", "1")), held(written(out))
    assert vars(after.common["args"])["transformer_impl"] == "transformer_engine"
    # experts are called alike there, and so is the first norm
    fused, own = (f"decoder.layers.{n}" for n in ("mlp.linear_fc1.layer_norm_weight",
                                                  "pre_mlp_layernorm.weight"))  # fmt: skip
    renamed = {own if key == fused else key: one for key, one in before.tensors.items()}
    assert after.tensors.keys() == renamed.keys()
    assert all(torch.equal(tensor, renamed[key]) for key, tensor in after.tensors.items())
    assert plain(after.values) == plain(before.values)
    done("downgrade", out, "-o", back, "--output-format", "torch_dist")
    same(held(written(back)), before)
    assert plain(held(written(back)).common) == plain(before.common)


def test_moments_go_to_transformers_and_return(tmp_path: Path) -> None:
    run_, hf, back = (
        run_folder("llama", "torch_dist", "1-optimizer"),
        tmp_path / "h",
        tmp_path / "b",
    )
    said = done(
        "apply", run_, "-o", hf, "--to", "megatron-gpt@llama", "--output-format", "safetensors"
    ).out
    assert "optimizer state at `optimizer` follows its parameters" in said
    done("verify", hf, "--source", run_)
    with formats.open(hf) as source:
        moments = [key for key in source.index.passed_through if ".exp_avg." in key]
        assert "/optimizer.state.exp_avg.model.layers.3.self_attn.q_proj.weight" in moments
        assert len(moments) == len(source.index.tensors) == 39
    done("downgrade", hf, "-o", back, "--output-format", "torch_dist")
    before, after = held(checkpoint("llama", "torch_dist", "1-optimizer")), held(written(back))
    same(before, after)
    assert plain(before.common) == plain(after.common)


def test_from_transformers_it_has_what_megatron_asks_for(tmp_path: Path) -> None:
    hf, out, back = tmp_path / "hf", tmp_path / "out", tmp_path / "back"
    shutil.copytree(family("llama") / "hf", hf, ignore=shutil.ignore_patterns("logits*"))
    words = ("--from", "megatron-gpt@llama", "--to", "megatron-gpt@mcore", "--set", "padded=20")
    done("apply", hf, "-o", out, *words, "--output-format", "torch_dist")
    done("verify", out, "--source", hf)
    there = written(out)
    assert there.name == "release"
    after, due = held(there), held(checkpoint("llama", "torch_dist", "1"))
    assert after.said.keys() == due.said.keys()
    layers = [key for key in after.tensors if key.startswith("decoder.layers.")]
    assert layers
    assert all(torch.equal(after.tensors[key], due.tensors[key]) for key in layers)
    states = {key: value for key, value in due.values.items() if "_extra_state" in key}
    assert {key: one for key, one in after.values.items() if "_extra_state" in key} == states
    done("downgrade", out, "-o", back, "--output-format", "safetensors")
    said = json.loads(run("diff", hf, back, "--format", "json").out)
    assert (said["tensors_equal"], said["tensors"]) == (True, 39)


def test_files_have_a_size(tmp_path: Path) -> None:
    folder, out = checkpoint("llama", "torch_dist", "1"), tmp_path / "out"
    words = ("--output-format", "torch_dist", "--max-shard-size", "10KB")
    done("apply", folder, "-o", out, *words)
    names = sorted(path.name for path in written(out).glob("*.distcp"))
    assert names == [f"__0_{number}.distcp" for number in range(len(names))]
    assert len(names) > 2
    same(held(folder), held(written(out)))


RETURNING = [("qwen3", "tp2"), *(run for run in runs() if run != ("qwen3", "tp2"))]


@pytest.mark.parametrize(("name", "grid"), thorough(RETURNING))
def test_all_of_it_returns_from_transformers(name: str, grid: str, tmp_path: Path) -> None:
    """`args`, counters and generators wait beside the weights, and are written again."""
    run_, hf, back = run_folder(name, "torch_dist", grid), tmp_path / "hf", tmp_path / "back"
    words = ("--to", f"megatron-gpt@{name}", "--output-format", "safetensors")
    assert "downgrade: exact" in done("apply", run_, "-o", hf, *words).out
    done("downgrade", hf, "-o", back, "--output-format", "torch_dist")
    before, after = held(checkpoint(name, "torch_dist", grid)), held(written(back))
    same(before, after)
    common = dict(after.common["content_metadata"])
    if grid == "1-layers":
        # what no value told is told now
        assert common.pop("non_homogeneous_layers") is True
    assert plain(before.common) == plain({**after.common, "content_metadata": common})


class Odd:
    """What nobody knows."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def test_what_is_not_read_is_carried(tmp_path: Path) -> None:
    state: dict[str, Any] = {"decoder.layers.a.weight": seeded(2, 3)}
    state["rng_state/shard_0.0_1.1"] = [Odd(torch.arange(3.0))]
    folder = made(tmp_path / "c", state, common={"iteration": 4, "odd": Odd(torch.arange(5))})
    name = f"{__name__}.Odd"
    with pytest.raises(MigrateError, match="M935"):
        migrate.apply(folder, tmp_path / "no", output_format="torch_dist")
    # and out of safetensors again
    migrate.apply(folder, tmp_path / "st", output_format="safetensors", allow=["carry"])
    for folder, out in ((folder, tmp_path / "out"), (tmp_path / "st", tmp_path / "again")):
        answer = migrate.apply(folder, out, output_format="torch_dist", allow=["carry"])
        assert any(name in note for note in answer.to_json()["notes"])
        assert migrate.verify(out, source=folder, allow=["carry"]).equal
        after = held(written(out))
        assert after.values["rng_state/shard_0.0_1.1"][0].tensor.tolist() == [0.0, 1.0, 2.0]
        assert after.common["odd"].tensor.tolist() == [0, 1, 2, 3, 4]


LOCAL = {"args": argparse.Namespace(transformer_impl="local", moe_grouped_gemm=False)}
NORM, QKV = "input_layernorm.weight", "self_attention.linear_qkv.weight"
FC1 = "mlp.experts.linear_fc1"


def layers(*held: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The model whose layers hold these."""
    return {
        f"decoder.layers.{n}.{key}": value
        for n, one in enumerate(held)
        for key, value in one.items()
    }


class TestWhatItCannotHold:
    """Each is refused before anything is written, and names the culprit and the way out."""

    def say(self, tmp_path: Path, state: Any, *texts: str, **words: Any) -> None:
        torch.save(state, tmp_path / "in.pt")
        with pytest.raises(MigrateError) as caught:
            migrate.apply(tmp_path / "in.pt", tmp_path / "out", output_format="torch_dist", **words)
        (found,) = caught.value.diagnostics
        assert found.code == "M916"
        assert not (tmp_path / "out").exists()
        for text in texts:
            assert text in f"{found.message} {found.help}", found

    def test_parts_of_ranks(self, tmp_path: Path) -> None:
        with pytest.raises(MigrateError) as caught:
            migrate.apply(
                run_folder("llama", "legacy", "tp2"), tmp_path / "out", output_format="torch_dist"
            )
        (found,) = caught.value.diagnostics
        assert (found.code, "word_embeddings.weight@0" in found.message) == ("M916", True)
        assert found.help == 'join them: to="megatron-gpt@mcore"'

    def test_one_file(self, tmp_path: Path) -> None:
        failed = run(
            "apply", checkpoint("llama", "torch_dist", "1"), "-o", tmp_path / "out.pt",
            "--output-format", "torch_dist",
        )  # fmt: skip
        assert (failed.exit, "out.pt" in failed.err) == (2, True)

    def test_a_model_of_another_library(self, tmp_path: Path) -> None:
        state = {"model.layers.0.mlp.up_proj.weight": seeded(2, 3)}
        self.say(tmp_path, state, "model.layers.0.mlp", "decoder.layers", "safetensors")

    def test_a_model_elsewhere(self, tmp_path: Path) -> None:
        state = {"net": layers({"a.weight": seeded(2)})}
        self.say(tmp_path, state, "under `model`, and it is `net`")

    def test_one_matrix_of_all_experts(self, tmp_path: Path) -> None:
        state = {"model": layers({"mlp.experts.weight1": seeded(2, 8)})}
        self.say(tmp_path, state, "mlp.experts.weight1", '"experts": "te"')

    def test_values_among_the_tensors(self, tmp_path: Path) -> None:
        state = {"model": {**layers({"a.weight": seeded(2)}), "step": 3}}
        self.say(tmp_path, state, "step: only tensors and extra states")

    @pytest.mark.parametrize("said", [{}, {"args": argparse.Namespace(transformer_impl="te")}])
    def test_names_of_a_spec_that_no_arguments_name(
        self, said: dict[str, Any], tmp_path: Path
    ) -> None:
        state = {"model": layers({NORM: seeded(2), QKV: seeded(4, 2)}), **said}
        self.say(tmp_path, state, f"decoder.layers.0.{NORM}", '"impl": "te"')

    def test_names_of_another_spec_than_arguments_name(self, tmp_path: Path) -> None:
        name = "self_attention.linear_qkv.layer_norm_weight"
        state = {"model": layers({name: seeded(2), QKV: seeded(4, 2)}), **LOCAL}
        self.say(tmp_path, state, f"decoder.layers.0.{name}", "is 'local'", '"impl": "local"')

    def test_experts_that_no_arguments_call_so(self, tmp_path: Path) -> None:
        state = {"model": layers({"mlp.experts.local_experts.0.linear_fc1.weight": seeded(4, 2)})}
        self.say(tmp_path, state, "local_experts.0.linear_fc1.weight")

    def test_an_expert_of_another_shape(self, tmp_path: Path) -> None:
        experts = {f"{FC1}.weight0": seeded(4, 2), f"{FC1}.weight1": seeded(6, 2)}
        self.say(tmp_path, {"model": layers(experts)}, f"{FC1}.weight1", "differ in shape")

    def test_a_hole_between_experts(self, tmp_path: Path) -> None:
        experts = {f"{FC1}.weight0": seeded(4, 2), f"{FC1}.weight2": seeded(4, 2)}
        self.say(tmp_path, {"model": layers(experts)}, f"{FC1}.weight2", "number 0.1 is missing")

    def test_a_hole_between_layers(self, tmp_path: Path) -> None:
        state = {f"decoder.layers.{n}.a.weight": seeded(2) for n in (0, 2)}
        self.say(tmp_path, {"model": state}, "decoder.layers.2.a.weight", "number 1 is missing")

    @pytest.mark.parametrize(
        "optimizer",
        [
            {"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": [{"params": [0]}]},
            {"fp32_from_fp16_params": [[torch.ones(2)]]},
            {"state": {"exp_avg": {"of.another.model": torch.ones(2)}}},
            {"distributed.dp_group_idx_0.gbuf_idx_0.param": torch.ones(2)},
        ],
    )
    def test_optimizer_state_without_names(self, optimizer: dict[str, Any], tmp_path: Path) -> None:
        state = {"model": layers({"a.weight": seeded(2)}), "optimizer": optimizer}
        self.say(tmp_path, state, "optimizer", '"optimizer": "drop"')
        migrate.apply(
            tmp_path / "in.pt", tmp_path / "out", output_format="torch_dist",
            params={"optimizer": "drop"}, allow=["drop"],
        )  # fmt: skip
        assert "optimizer" not in held(written(tmp_path / "out")).common


# the keys of a layer in Transformer Engine's spec, and the entries of two such layers
ATTENTION = (
    "self_attention.linear_qkv.layer_norm_weight",
    "self_attention.linear_qkv.weight",
    "self_attention.linear_qkv._extra_state",
    "self_attention.core_attention._extra_state",
    "self_attention.q_layernorm.weight",
    "self_attention.q_layernorm._extra_state",
    "self_attention.linear_proj.weight",
    "self_attention.linear_proj._extra_state",
)
DENSE = (
    "mlp.linear_fc1.layer_norm_weight",
    "mlp.linear_fc1.weight",
    "mlp.linear_fc1._extra_state",
    "mlp.linear_fc2.weight",
    "mlp.linear_fc2._extra_state",
)
EXPERTS = ("pre_mlp_layernorm.weight", "pre_mlp_layernorm._extra_state", "mlp.router.weight",
           *(f"mlp.experts.linear_fc{n}.weight{e}" for n in (1, 2) for e in range(2)))  # fmt: skip
TE = {"transformer_impl": "transformer_engine", "moe_grouped_gemm": True}


@pytest.mark.parametrize("kind", ["dense", "None", "empty"])
def test_the_names_of_transformer_engine(kind: str, tmp_path: Path) -> None:
    names = (*ATTENTION, *(DENSE if kind == "dense" else EXPERTS))
    one: dict[str, Any] = {
        name: torch.full((4,), number, dtype=torch.uint8)
        if name.endswith("_extra_state")
        else seeded(2, 3) + number
        for number, name in enumerate(names)
    }
    if kind != "dense":
        # one state for all, which says nothing
        nothing = None if kind == "None" else torch.empty(0, dtype=torch.uint8)
        one |= {f"mlp.experts.linear_fc{n}._extra_state": nothing for n in (1, 2)}
    model = {**layers(one, one), "decoder.final_layernorm._extra_state": None}
    state = {"args": argparse.Namespace(**TE, num_layers=2), "model": model}
    torch.save(state, tmp_path / "in.pt")
    migrate.apply(tmp_path / "in.pt", tmp_path / "out", output_format="torch_dist")
    assert migrate.verify(tmp_path / "out", source=tmp_path / "in.pt").equal
    after = held(written(tmp_path / "out"))
    in_layers = {name for name in names if not name.endswith("_extra_state")}
    states = {f"{name}/shard_{n}_2" for name in set(names) - in_layers for n in range(2)}
    if kind != "dense":
        of_experts = {
            key: held for key, (held,) in after.values.items() if ".experts.experts." in key
        }
        assert len(of_experts) == 8
        assert plain(of_experts) == dict.fromkeys(of_experts, plain(nothing))
        with formats.open(tmp_path / "out") as source:
            assert source.index.tree is not None
            read = source.index.tree.parts[0].root.get("model")
            assert {key for key, _ in read.pairs} == {*model, "output_layer._extra_state"}
        in_layers = {
            name[:-1].replace("experts.", "experts.experts.") if "experts." in name else name
            for name in in_layers
        }
        states |= {
            f"mlp.experts.experts.linear_fc{m}._extra_state/shard_{n}.{e}_2.2"
            for m in (1, 2)
            for n in range(2)
            for e in range(2)
        }
    assert after.tensors.keys() == {f"decoder.layers.{name}" for name in in_layers}
    assert after.values.keys() == {
        *(f"decoder.layers.{name}" for name in states),
        "decoder.final_layernorm._extra_state/shard_0_1",
    }
    (found,) = after.values["decoder.layers.self_attention.linear_qkv._extra_state/shard_1_2"]
    assert found.tolist() == [2, 2, 2, 2]


def test_the_state_of_all_experts_is_not_taken_apart(tmp_path: Path) -> None:
    one = {f"{FC1}.weight0": seeded(4, 2), f"{FC1}._extra_state": torch.ones(4, dtype=torch.uint8)}
    torch.save({"model": layers(one)}, tmp_path / "in.pt")
    with pytest.raises(MigrateError, match="each expert has a state of its own there") as caught:
        migrate.apply(tmp_path / "in.pt", tmp_path / "out", output_format="torch_dist")
    assert "leave them out by a rule" in str(caught.value)


def test_layers_that_are_not_alike_are_numbered(tmp_path: Path) -> None:
    dense, moe = (
        {"mlp.linear_fc2.weight": seeded(3, 4)},
        {"mlp.experts.linear_fc2.weight0": seeded(2, 2)},
    )
    torch.save({"model": layers(dense, moe)}, tmp_path / "in.pt")
    said = migrate.apply(tmp_path / "in.pt", tmp_path / "out", output_format="torch_dist")
    assert any("each layer has entries of its own" in note for note in said.to_json()["notes"])
    after = held(written(tmp_path / "out"))
    assert {key: tuple(one.shape) for key, one in after.tensors.items()} == {
        "decoder.layers.0.mlp.linear_fc2.weight": (3, 4),
        "decoder.layers.1.mlp.experts.experts.linear_fc2.weight": (1, 2, 2),
    }
    assert "decoder.layers.1.mlp.experts.experts.linear_fc2._extra_state/shard_0_1" in after.values
    assert migrate.verify(tmp_path / "out", source=tmp_path / "in.pt").equal


@pytest.mark.parametrize(
    "said",
    [
        {"moe_layer_freq": [1, 1]},
        {"moe_layer_freq": 2},
        {"heterogeneous_layers_config_path": "layers.json"},
    ],
)
def test_layers_are_numbered_where_arguments_ask_for_it(
    said: dict[str, Any], tmp_path: Path
) -> None:
    one = {"a.weight": seeded(2)}
    state = {"args": argparse.Namespace(**said), "model": layers(one, one)}
    torch.save(state, tmp_path / "in.pt")
    migrate.apply(tmp_path / "in.pt", tmp_path / "out", output_format="torch_dist")
    assert [*held(written(tmp_path / "out")).tensors] == [
        f"decoder.layers.{n}.a.weight" for n in range(2)
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.float64])
def test_other_dtypes_scalars_and_empty_tensors(dtype: torch.dtype, tmp_path: Path) -> None:
    one = {"a": torch.arange(6).reshape(2, 3).to(dtype), "b": torch.tensor(3, dtype=dtype),
           "c": torch.empty(0, 4, dtype=dtype)}  # fmt: skip
    torch.save({"model": layers(one, one), "iteration": 7}, tmp_path / "in.pt")
    migrate.apply(tmp_path / "in.pt", tmp_path / "out", output_format="torch_dist")
    assert written(tmp_path / "out").name == "iter_0000007"
    after = held(written(tmp_path / "out")).tensors
    assert {key: (one.dtype, tuple(one.shape)) for key, one in after.items()} == {
        "decoder.layers.a": (dtype, (2, 2, 3)),
        "decoder.layers.b": (dtype, (2,)),
        "decoder.layers.c": (dtype, (2, 0, 4)),
    }
    assert migrate.verify(tmp_path / "out", source=tmp_path / "in.pt").equal


def test_tensors_in_safetensors_go_there_too(tmp_path: Path) -> None:
    """Without anything beside the model the checkpoint is a release."""
    save_file(layers({"a.weight": seeded(2)}), tmp_path / "in.safetensors")
    migrate.apply(tmp_path / "in.safetensors", tmp_path / "out", output_format="torch_dist")
    with formats.open(tmp_path / "out") as source:
        assert source.format == "torch_dist"
        assert torch.equal(tensors(source)["decoder.layers.0.a.weight"], seeded(2))
    assert migrate.verify(tmp_path / "out", source=tmp_path / "in.safetensors").equal
