"""What Megatron can configure and a family of transformers has not is refused by the value that
says so, before anything is converted.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cut_runs import WEIGHTS, part_name
from safetensors.torch import load_file, save_file

import migrate
from migrate.rules.files import shipped_folder
from migrate.rules.loading import load_files

FAMILIES = ("llama", "qwen2", "qwen3", "mixtral", "qwen3-moe")
MODEL = {
    "embedding.word_embeddings.weight": (4, 2),
    "decoder.layers.0.input_layernorm.weight": (2,),
    "decoder.layers.0.self_attention.linear_qkv.weight": (6, 2),
    "decoder.layers.0.self_attention.linear_proj.weight": (2, 2),
    "decoder.layers.0.pre_mlp_layernorm.weight": (2,),
    "decoder.layers.0.mlp.linear_fc1.weight": (6, 2),
    "decoder.layers.0.mlp.linear_fc2.weight": (2, 3),
    "decoder.final_layernorm.weight": (2,),
}
ARGS = {
    "num_attention_heads": 1,
    "group_query_attention": False,
    "num_query_groups": 1,
    "kv_channels": 2,
    "padded_vocab_size": 4,
}
# what stands in a field otherwise than in an int, a bool or a text
OTHERS = {
    "window_size": [128, 0], "no_rope_freq": [0, 0, 0, 1], "moe_router_topk_scaling_factor": 2.5,
    "rotary_percent": 0.5, "glu_linear_offset": 1.0, "activation_func_clamp_value": 7.0,
    "softmax_scale": 0.5, "moe_expert_capacity_factor": 1.25,
    "moe_router_load_balancing_type": ["seq_aux_loss", "sinkhorn"],
}  # fmt: skip


def gates(family: str) -> dict[str, Any]:
    """Field of `args` -> the declaration that refuses what the family has not."""
    (file,) = load_files([shipped_folder() / "megatron-gpt" / family / "gpt.yaml"])
    return {
        param.value.removeprefix("args."): param
        for param in file.model.params.values()
        if param.value and param.value.startswith("args.") and param.choices
    }


def saved(tmp_path: Path, **args: Any) -> Path:
    path = tmp_path / "model_optim_rng.pt"
    model = {key: torch.ones(shape) for key, shape in MODEL.items()}
    torch.save({"args": {**ARGS, **args}, "model": model}, path)
    return path


def refused(field: str, value: Any, family: str, tmp_path: Path) -> None:
    with pytest.raises(migrate.MigrateError) as found:
        migrate.plan(saved(tmp_path, **{field: value}), to=f"megatron-gpt@{family}")
    said = [d for d in found.value.diagnostics if f"args.{field}" in d.message]
    assert [d.code for d in said] == ["M114"], str(found.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_value_that_the_family_has_not_is_refused_by_its_name(
    family: str, tmp_path: Path
) -> None:
    known = gates(family)
    assert {
        "swiglu", "position_embedding_type", "rotary_percent", "apply_layernorm_1p",
        "attention_output_gate", "multi_latent_attention", "mtp_num_layers", "add_bias_linear",
        "no_rope_freq", "glu_linear_offset", "activation_func_clamp_value", "softmax_scale",
    } <= known.keys()  # fmt: skip
    if family in ("mixtral", "qwen3-moe"):
        assert {
            "moe_router_num_groups", "moe_apply_probs_on_input", "moe_expert_capacity_factor",
            "moe_router_load_balancing_type", "moe_router_topk_scaling_factor",
        } <= known.keys()  # fmt: skip
        refused("moe_router_load_balancing_type", "sinkhorn", family, tmp_path)
    for field, param in known.items():
        value = OTHERS.get(field)
        if value is None:
            value = {"bool": param.choices == (False,), "int": 2, "str": "another"}[param.type]
        refused(field, value, family, tmp_path)


def test_what_the_family_has_is_converted(tmp_path: Path) -> None:
    usual = {
        field: param.choices[0] for field, param in gates("llama").items() if param.type == "bool"
    }
    plan = migrate.plan(
        saved(tmp_path, **usual, rotary_percent=1, window_size=None), to="megatron-gpt@llama"
    )
    assert plan.document["params"]["grouped"] is False
    assert plan.document["losses"] == []


def test_a_layer_without_gate_is_refused_by_its_rows_where_nothing_else_says_it(
    tmp_path: Path,
) -> None:
    path = tmp_path / "model.pt"
    shapes = {**MODEL, "decoder.layers.0.mlp.linear_fc1.weight": (4, 2)}
    model = {key: torch.ones(shape) for key, shape in shapes.items()}
    torch.save({"args": {**ARGS}, "model": model}, path)
    with pytest.raises(migrate.MigrateError, match="fc1"):
        migrate.plan(path, to="megatron-gpt@llama")


@pytest.mark.parametrize(
    "lost",
    [
        "self_attention.linear_qkv.weight", "self_attention.linear_proj.weight",
        "input_layernorm.weight", "pre_mlp_layernorm.weight", "mlp.linear_fc1.weight",
        "mlp.linear_fc2.weight",
    ],
)  # fmt: skip
def test_a_layer_that_lacks_a_tensor_is_refused(lost: str, tmp_path: Path) -> None:
    model = {key.replace("layers.0", f"layers.{n}"): s for key, s in MODEL.items() for n in (0, 1)}
    path = tmp_path / "model.pt"
    torch.save({"args": ARGS, "model": {k: torch.ones(s) for k, s in model.items()}}, path)
    assert migrate.plan(path, to="megatron-gpt@llama").document["params"]["layers"] == 2
    del model[f"decoder.layers.1.{lost}"]
    torch.save({"args": ARGS, "model": {k: torch.ones(s) for k, s in model.items()}}, path)
    with pytest.raises(migrate.MigrateError) as found:
        migrate.plan(path, to="megatron-gpt@llama")
    (said,) = found.value.diagnostics
    assert said.code == "M510"
    assert any(f"{{n:int}}.{lost}" in note and note.endswith("says 1") for note in said.notes)


@pytest.mark.parametrize(
    ("field", "value"), [("num_layers", 2), ("hidden_size", 3), ("ffn_hidden_size", 4)]
)
def test_arguments_that_contradict_tensors_are_refused(
    field: str, value: int, tmp_path: Path
) -> None:
    said = {"max_position_embeddings": 8, "norm_epsilon": 1e-5, "rotary_base": 10000}
    saved(tmp_path, **said, num_layers=1, hidden_size=2, ffn_hidden_size=3)
    out = {"to": "megatron-gpt@llama", "output_format": "safetensors"}
    assert migrate.plan(tmp_path, **out).document["params"]["hidden"] == 2
    saved(tmp_path, **said, **{field: value})
    with pytest.raises(migrate.MigrateError, match=f"args.{field} says {value}"):
        migrate.plan(tmp_path, **out)


@pytest.mark.parametrize(
    ("heads", "groups", "code"), [(4, 4, "M302"), (4, 2, "M301"), (8, 1, "M301")]
)
def test_rows_of_queries_keys_and_values_that_fit_no_such_groups_are_refused(
    heads: int, groups: int, code: str, tmp_path: Path
) -> None:
    said = {"num_attention_heads": heads, "num_query_groups": groups, "group_query_attention": True}
    with pytest.raises(migrate.MigrateError) as found:
        migrate.plan(saved(tmp_path, **said), to="megatron-gpt@llama")
    (qkv,) = [d for d in found.value.diagnostics if "rule 'qkv'" in d.message]
    assert qkv.code == code
    assert any("linear_qkv.weight" in note for note in qkv.notes)


@pytest.mark.parametrize(
    "key",
    [
        "decoder.layers.0.self_attention.linear_proj.bias",
        "decoder.layers.0.self_attention.linear_qkv.bias",
        "decoder.layers.0.mlp.linear_fc1.bias",
        "decoder.layers.0.input_layernorm.bias",
        "decoder.layers.0.self_attention.q_layernorm.weight",
        "decoder.layers.0.mlp.shared_experts.linear_fc1.weight",
        "decoder.layers.0.mlp.router.weight",
        "embedding.position_embeddings.weight",
        "mtp.layers.0.eh_proj.weight",
    ],
)
def test_what_the_keys_alone_say_that_the_family_has_not_is_refused_by_name(
    key: str, tmp_path: Path
) -> None:
    model = {one: torch.ones(shape) for one, shape in MODEL.items()} | {key: torch.ones(2, 2)}
    torch.save({"args": ARGS, "model": model}, tmp_path / "model.pt")
    with pytest.raises(migrate.MigrateError) as found:
        migrate.plan(tmp_path / "model.pt", to="megatron-gpt@llama")
    (said,) = found.value.diagnostics
    assert said.code == "M211"
    assert said.message.startswith(key)


@pytest.mark.parametrize("groups", [8, 4, 1])
@pytest.mark.parametrize("tp", [1, 2])
def test_heads_lie_by_groups_on_any_number_of_ranks(tp: int, groups: int, tmp_path: Path) -> None:
    """As many heads of keys as of queries, fewer, and one; heads are not hidden / heads wide."""
    heads, width, hidden, ffn, vocab = 8, 3, 4, 6, 5
    shapes = {
        "self_attn.q_proj": (heads * width, hidden), "self_attn.k_proj": (groups * width, hidden),
        "self_attn.v_proj": (groups * width, hidden), "self_attn.o_proj": (hidden, heads * width),
        "mlp.gate_proj": (ffn, hidden), "mlp.up_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn), "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }  # fmt: skip
    model = {f"model.layers.0.{name}.weight": torch.rand(shape) for name, shape in shapes.items()}
    model["model.norm.weight"] = torch.rand(hidden)
    model["model.embed_tokens.weight"] = torch.rand(vocab, hidden)
    hf, out, back = tmp_path / "hf", tmp_path / "out", tmp_path / "back"
    hf.mkdir()
    save_file(model, hf / "model.safetensors")
    said = {"model_type": "llama", "num_attention_heads": heads, "num_key_value_heads": groups,
            "head_dim": width}  # fmt: skip
    (hf / "config.json").write_text(json.dumps(said))
    asked = {"to": "megatron-gpt@mcore", "from_": "megatron-gpt@llama", "params": {"tp": tp}}
    migrate.apply(hf, out, **asked)
    ranks = [
        torch.load(out / "release" / part_name(r) / WEIGHTS, weights_only=True)["model"]
        for r in range(tp)
    ]
    key = "decoder.layers.0.self_attention.linear_qkv.weight"
    q, k, v = (
        model[f"model.layers.0.self_attn.{w}_proj.weight"].chunk(groups) for w in ("q", "k", "v")
    )
    due = torch.cat([one for group in zip(q, k, v, strict=True) for one in group])
    assert torch.equal(torch.cat([rank[key] for rank in ranks]), due)
    # Megatron's own rule: a multiple of 128 rows on each rank, and what nobody trained is zero
    for rank in ranks:
        assert rank["embedding.word_embeddings.weight"].shape == (128, hidden)
    assert not torch.cat([r["embedding.word_embeddings.weight"] for r in ranks])[vocab:].any()
    migrate.downgrade(out, back)
    found = load_file(back / "model.safetensors")
    assert found.keys() == model.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in model.items())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_order_of_rows_before_version_3_is_refused(family: str, tmp_path: Path) -> None:
    """A file alone, which is no part of a run."""
    model = {key: torch.ones(shape) for key, shape in MODEL.items()}
    torch.save({"args": ARGS, "checkpoint_version": 2.0, "model": model}, tmp_path / "model.pt")
    with pytest.raises(migrate.MigrateError) as found:
        migrate.plan(tmp_path / "model.pt", to=f"megatron-gpt@{family}")
    assert any(
        one.code == "M114" and "checkpoint_version" in one.message + "".join(one.notes)
        for one in found.value.diagnostics
    ), found.value


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_heads_that_are_not_hidden_by_heads_wide_stand_in_the_configuration(
    family: str, tmp_path: Path
) -> None:
    width, layer = 3, "decoder.layers.0.self_attention"
    shapes = {**MODEL, f"{layer}.linear_qkv.weight": (9, 2), f"{layer}.linear_proj.weight": (2, 3)}
    if family == "qwen2":
        shapes[f"{layer}.linear_qkv.bias"] = (9,)
    if family == "qwen3":
        shapes |= {f"{layer}.{w}_layernorm.weight": (3,) for w in "qk"}
    args = {
        **ARGS, "kv_channels": width, "hidden_size": 2, "ffn_hidden_size": 3, "num_layers": 1,
        "norm_epsilon": 1e-6, "rotary_base": 10000, "max_position_embeddings": 16,
        "untie_embeddings_and_output_weights": False,
    }  # fmt: skip
    model = {key: torch.ones(shape) for key, shape in shapes.items()}
    torch.save({"args": args, "model": model}, tmp_path / "model.pt")
    migrate.apply(tmp_path / "model.pt", tmp_path / "out", to=f"megatron-gpt@{family}")
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    assert said["head_dim"] == width != said["hidden_size"] // said["num_attention_heads"]
