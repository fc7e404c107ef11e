"""Transformer Engine's spec: models under the names that Megatron Core gives them with it, recorded
as a list of keys and shapes (tests/data/megatron/te-spec.json), because no GPU is here to write
one.
"""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import megatron_runs
import pytest
import torch
from safetensors.torch import load_file

import migrate

RECORDED: dict[str, Any] = json.loads((megatron_runs.ARCHIVES / "te-spec.json").read_text())
STATES = megatron_runs.ARCHIVES.parent / "te"
LAYERS, VOCABULARY = 4, 20
HEADS, GROUPS = 4, 2
# extra states as TE writes them without FP8, and as Megatron's own output layer has one
EMPTY = torch.empty(0, dtype=torch.uint8)


def keys_of(family: str) -> dict[str, list[int] | None]:
    """All keys in their order with their shapes; None for an extra state."""
    said = RECORDED["families"][family]
    layers = {
        f"decoder.layers.{n}.{key}": shape
        for n in range(LAYERS)
        for key, shape in said["layer"].items()
    }
    return {**said["first"], **layers, **said["last"]}


def model_of(family: str) -> dict[str, torch.Tensor | None]:
    """The recorded model with the weights of transformers' one."""
    weights = load_file(megatron_runs.family(family) / "hf" / "model.safetensors")
    made: dict[str, torch.Tensor | None] = {}
    for key, shape in keys_of(family).items():
        if shape is None:
            made[key] = None if key.startswith("output_layer.") else EMPTY
        else:
            made[key] = tensor_of(key, weights)
            assert list(made[key].shape) == shape, key  # type: ignore[union-attr]
    return made


def tensor_of(key: str, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    """What a key of Megatron holds of the weights of transformers, by the meaning of its name."""
    ends = {
        "embedding.word_embeddings.weight": "model.embed_tokens.weight",
        "output_layer.weight": "lm_head.weight",
        "decoder.final_layernorm.weight": "model.norm.weight",
    }
    if key in ends:
        held = weights[ends[key]]
        return torch.cat([held, torch.ones(4, 16)]) if held.ndim == 2 else held
    _, _, n, module, *rest = key.split(".")
    old, leaf = f"model.layers.{n}.", ".".join(rest)
    if module == "pre_mlp_layernorm" or leaf == "linear_fc1.layer_norm_weight":
        return weights[f"{old}post_attention_layernorm.weight"]
    if leaf == "linear_qkv.layer_norm_weight":
        return weights[f"{old}input_layernorm.weight"]
    if leaf in ("q_layernorm.weight", "k_layernorm.weight"):
        return weights[f"{old}self_attn.{leaf[0]}_norm.weight"]
    if leaf == "linear_proj.weight":
        return weights[f"{old}self_attn.o_proj.weight"]
    if leaf.startswith("linear_qkv."):
        q, k, v = (weights[f"{old}self_attn.{w}_proj.{rest[-1]}"].chunk(GROUPS) for w in "qkv")
        return torch.cat([one for group in zip(q, k, v, strict=True) for one in group])
    mixtral = f"{old}block_sparse_moe.gate.weight" in weights
    block = f"{old}block_sparse_moe" if mixtral else f"{old}mlp"
    if leaf == "router.weight":
        return weights[f"{block}.gate.weight"]
    names = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    if leaf.startswith("experts."):
        block += f".experts.{leaf.rpartition('weight')[2]}"
    gate, up, down = (weights[f"{block}.{name}.weight"] for name in names)
    return torch.cat([gate, up]) if "linear_fc1" in leaf else down


@pytest.fixture
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    """The family and a run of it."""
    family: str = request.param
    wide = 8 if family.startswith("qwen3") else 4
    args = Namespace(
        num_layers=LAYERS, num_attention_heads=HEADS, num_query_groups=GROUPS, kv_channels=wide,
        group_query_attention=True, swiglu=True, normalization="RMSNorm", norm_epsilon=1e-6,
        position_embedding_type="rope", rotary_base=10000, max_position_embeddings=64,
        add_bias_linear=False, add_qkv_bias=family == "qwen2", padded_vocab_size=24,
        qk_layernorm=family.startswith("qwen3"), transformer_impl="transformer_engine",
        num_experts=4 if family in ("mixtral", "qwen3-moe") else None, ffn_hidden_size=24,
        tensor_model_parallel_size=1, pipeline_model_parallel_size=1, moe_router_topk=2,
        untie_embeddings_and_output_weights=family not in ("qwen2", "qwen3"),
    )  # fmt: skip
    run = tmp_path / "run"
    part = run / "release" / "mp_rank_00"
    part.mkdir(parents=True)
    root = {"args": args, "checkpoint_version": 3.0, "iteration": 10, "model": model_of(family)}
    torch.save(root, part / "model_optim_rng.pt")
    (run / "latest_checkpointed_iteration.txt").write_text("release")
    return family, run


FAMILIES = pytest.mark.parametrize("saved", list(RECORDED["families"]), indirect=True)


@FAMILIES
def test_a_run_of_transformer_engines_spec_becomes_the_model_of_transformers(
    saved: tuple[str, Path], tmp_path: Path
) -> None:
    family, run = saved
    out = tmp_path / "out"
    migrate.apply(
        run,
        out,
        to=f"megatron-gpt@{family}",
        output_format="safetensors",
        params={"vocab": VOCABULARY},
        allow=["drop"],
    )
    made = load_file(out / "model.safetensors")
    wanted = load_file(megatron_runs.family(family) / "hf" / "model.safetensors")
    assert made.keys() == wanted.keys()
    assert all(torch.equal(made[key], wanted[key]) for key in wanted)


@FAMILIES
def test_what_is_left_out_comes_back(saved: tuple[str, Path], tmp_path: Path) -> None:
    family, run = saved
    hf, back = tmp_path / "hf", tmp_path / "back"
    file = Path("release", "mp_rank_00", "model_optim_rng.pt")
    root = read(run / file)
    states = [key for key in root["model"] if key.endswith("_extra_state")]
    # what TE writes where there is a recipe and no scale, of which no two need be alike
    recipe = (STATES / "v2.17_linear_MXFP8BlockScaling.pkl").read_bytes()
    for key in states[::2]:
        if root["model"][key] is not None:
            root["model"][key] = torch.frombuffer(bytearray(recipe), dtype=torch.uint8)
    torch.save(root, run / file)
    plan = migrate.apply(run, hf, to=f"megatron-gpt@{family}", params={"vocab": VOCABULARY})
    assert plan.to_json()["downgrade"]["exact"], plan.to_json()["downgrade"]
    migrate.downgrade(hf, back)
    made = read(back / file)
    assert list(made) == list(root)
    assert list(made["model"]) == list(root["model"])
    assert made["args"] == root["args"]
    for key, held in root["model"].items():
        assert made["model"][key] is None if held is None else torch.equal(held, made["model"][key])
    assert sum(root["model"][key] is not None for key in states)


def read(path: Path) -> dict[str, Any]:
    with torch.serialization.safe_globals([Namespace]):
        found: dict[str, Any] = torch.load(path, weights_only=True)
    return found


@pytest.mark.parametrize("family", list(RECORDED["families"]))
def test_the_way_back_makes_the_recorded_names(family: str, tmp_path: Path) -> None:
    source, out = tmp_path / "hf", tmp_path / "out"
    source.mkdir()
    for name in ("model.safetensors", "config.json"):
        content = (megatron_runs.family(family) / "hf" / name).read_bytes()
        (source / name).write_bytes(content)
    params: dict[str, Any] = {"impl": "te", "padded": 24}
    if family in ("mixtral", "qwen3-moe"):
        params["experts"] = "te"
    migrate.apply(
        source,
        out,
        to="megatron-gpt@mcore",
        from_=f"megatron-gpt@{family}",
        params=params,
        output_format="safetensors",
    )
    made = load_file(out / "model.safetensors")
    due = {key: held for key, held in model_of(family).items() if not key.endswith("_extra_state")}
    assert made.keys() == due.keys()
    for key, held in due.items():
        assert held is not None
        if held.shape[0] == 24 and key.startswith(("embedding.", "output_layer.")):
            # rows of padding, which nothing says anything of, are zeros
            held = torch.cat([held[:VOCABULARY], torch.zeros(4, 16)])
        assert torch.equal(made[key], held), key
