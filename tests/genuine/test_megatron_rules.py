"""Runs that megatron-core wrote become models of transformers: weights to the bit on every grid,
logits equal, config.json made of the run's own arguments.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import megatron_runs
import pytest
import torch
from marks import thorough
from safetensors.torch import load_file

import migrate
from migrate import formats

RUNS = [
    (family, kind, grid)
    for kind in megatron_runs.FORMATS
    for family, grid in megatron_runs.runs()
    if not grid.endswith("optimizer")
]
# what the arguments of these runs leave to the tokenizer
VOCABULARY = 20
OF_EXPERTS = ("mixtral", "qwen3-moe")


def converted(family: str, grid: str, out: Path, kind: str = "legacy", **asked: Any) -> Path:
    migrate.apply(
        megatron_runs.run_folder(family, kind, grid),
        out,
        to=f"megatron-gpt@{family}",
        output_format="safetensors",
        allow=["drop"],
        **asked,
    )
    return out


@pytest.mark.parametrize(("family", "kind", "grid"), thorough(RUNS))
def test_every_grid_gives_the_weights_that_went_in(
    family: str, kind: str, grid: str, tmp_path: Path
) -> None:
    out = converted(family, grid, tmp_path / "out", kind, params={"vocab": VOCABULARY})
    made = load_file(out / "model.safetensors")
    wanted = load_file(megatron_runs.family(family) / "hf" / "model.safetensors")
    assert made.keys() == wanted.keys()
    assert all(torch.equal(made[key], wanted[key]) for key in wanted)


@pytest.mark.parametrize(
    ("family", "grid"),
    thorough([(family, "pp2") for family in sorted(megatron_runs.RUNS)] + [("mixtral", "pp2-ep2")]),
)
def test_one_part_alone_gives_its_weights_and_is_said_to_be_one(
    family: str, grid: str, tmp_path: Path
) -> None:
    wanted = load_file(megatron_runs.family(family) / "hf" / "model.safetensors")
    parts = sorted(megatron_runs.checkpoint(family, "legacy", grid).glob("mp_rank_*"))
    found: dict[str, torch.Tensor] = {}
    for part in parts:
        out = tmp_path / part.name
        asked: dict[str, Any] = {"output_format": "safetensors", "allow": ["drop"]}
        done = migrate.apply(
            part, out, to=f"megatron-gpt@{family}", params={"vocab": VOCABULARY}, **asked
        )
        notes = " ".join(done.notes)
        assert "one part alone" in notes
        assert "rules that match no key, which may be in other parts: " in notes
        assert not done.downgrade.exact
        # what it would say of the whole model is not known
        assert not (out / "config.json").exists()
        made = load_file(out / "model.safetensors")
        assert len(made) < len(wanted)
        for key, tensor in made.items():
            assert torch.equal(tensor, found.setdefault(key, tensor)), key
    # the last stage has the embedding once more, as its output layer
    if "lm_head.weight" not in wanted:
        assert torch.equal(found.pop("lm_head.weight"), found["model.embed_tokens.weight"])
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)


@pytest.mark.parametrize(
    ("family", "grid", "first", "second"),
    [
        ("llama", "tp2", "mp_rank_00", "mp_rank_01"),
        ("llama", "pp2", "mp_rank_00_000", "mp_rank_00_001"),
        ("llama", "pp2-vpp2", "mp_rank_00_000", "mp_rank_00_001"),
        ("llama", "tp2-pp2", "mp_rank_01_000", "mp_rank_01_001"),
        ("mixtral", "ep2", "mp_rank_00_000", "mp_rank_00_001"),
    ],
)
def test_parts_under_each_others_names_are_refused(
    family: str, grid: str, first: str, second: str, tmp_path: Path
) -> None:
    shutil.copytree(megatron_runs.checkpoint(family, "legacy", grid), tmp_path / "run")
    here, there = tmp_path / "run" / first, tmp_path / "run" / second
    here.rename(tmp_path / "other")
    there.rename(here)
    (tmp_path / "other").rename(there)
    with pytest.raises(migrate.MigrateError) as refused:
        migrate.apply(tmp_path / "run", tmp_path / "out", to=f"megatron-gpt@{family}")
    (found,) = refused.value.diagnostics
    assert found.code == "M924"
    assert f"{first} is of rank " in found.message
    assert f"{second} behind it of rank " in found.message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["torch", "torch_dist"])
def test_made_arguments_say_the_format_that_is_written(kind: str, tmp_path: Path) -> None:
    migrate.apply(
        megatron_runs.family("llama") / "hf",
        tmp_path / "out",
        to="megatron-gpt@mcore",
        output_format=kind,
    )
    assert values_of_root(tmp_path / "out")["args.ckpt_format"] == kind


def test_one_rank_alone_is_not_taken_for_the_whole(tmp_path: Path) -> None:
    part = megatron_runs.checkpoint("llama", "legacy", "tp2-pp2") / "mp_rank_01_001"
    for goal in ("llama", "mcore"):
        with pytest.raises(migrate.MigrateError) as refused:
            migrate.apply(part, tmp_path / "out", to=f"megatron-gpt@{goal}", params={"impl": "te"})
        (found,) = refused.value.diagnostics
        assert found.code == "M920"
        assert "all 2 tensor-parallel ranks" in found.message
        assert found.notes == ("TP 2 x PP 2 x EP 1, 4 layers: one part alone, TP 1, PP 1, EP 0",)
        assert not (tmp_path / "out").exists()
    report = migrate.apply(part, tmp_path / "out", output_format="safetensors")
    assert any("one part alone" in note for note in report.notes)
    assert len(load_file(tmp_path / "out" / "model.safetensors")) == report.tensors
    assert migrate.diff(part, tmp_path / "out").tensors_equal


def test_what_a_stage_alone_cannot_tell_is_asked_for_with_its_place(tmp_path: Path) -> None:
    part = megatron_runs.checkpoint("llama", "legacy", "pp2") / "mp_rank_00_001"
    with pytest.raises(migrate.MigrateError) as refused:
        migrate.plan(part, to="megatron-gpt@mcore", params={"impl": "te"})
    assert {found.code for found in refused.value.diagnostics} == {"M509"}
    assert all(
        "one part alone, TP 0, PP 1, EP 0" in found.notes[-1] for found in refused.value.diagnostics
    )


@pytest.mark.parametrize("family", sorted(megatron_runs.RUNS))
def test_the_configuration_is_that_of_the_model_that_went_in(family: str, tmp_path: Path) -> None:
    out = converted(family, "tp2", tmp_path / "out", params={"vocab": VOCABULARY})
    made = json.loads((out / "config.json").read_text())
    wanted = json.loads((megatron_runs.family(family) / "hf" / "config.json").read_text())
    # the newer spelling of the same
    wanted["rope_theta"] = wanted.pop("rope_parameters")["rope_theta"]
    wanted["torch_dtype"] = wanted.pop("dtype")
    wanted["num_experts"] = wanted.get("num_local_experts")
    head_dim = wanted["hidden_size"] // wanted["num_attention_heads"]
    wanted["head_dim"] = wanted.get("head_dim") or head_dim
    assert {name: value for name, value in made.items() if wanted.get(name) != value} == {}


def computed(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    """The logits that transformers computes of a folder, all of whose weights it takes."""
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", output_loading_info=True
    )
    assert not any(info.values())
    with torch.no_grad():
        return model.eval()(tokens).logits


@pytest.mark.libraries
@pytest.mark.parametrize("family", sorted(megatron_runs.RUNS))
def test_transformers_computes_the_same_logits(family: str, tmp_path: Path) -> None:
    went_in = megatron_runs.family(family) / "hf"
    said = load_file(went_in / "logits.safetensors")
    logits = computed(converted(family, "tp2-pp2", tmp_path / "out"), said["input_ids"])
    # nothing said how many entries the vocabulary has, so its padding is there
    assert logits.shape[-1] == 32
    logits = logits[..., :VOCABULARY]
    assert torch.equal(logits, computed(went_in, said["input_ids"]))
    # what transformers found where the run was made: another processor adds in another order
    assert (logits - said["logits"]).abs().max() <= 2e-6
    assert torch.equal(logits.argmax(-1), said["logits"].argmax(-1))


def test_the_state_of_the_optimizer_of_one_part_follows_and_comes_back(tmp_path: Path) -> None:
    run = megatron_runs.run_folder("llama", "legacy", "1-optimizer")
    report = migrate.apply(run, tmp_path / "out", to="megatron-gpt@llama")
    assert any("optimizer` follows its parameters" in note for note in report.notes)
    migrate.downgrade(tmp_path / "out", tmp_path / "back")
    assert migrate.diff(run, tmp_path / "back").equal


def test_padding_of_the_vocabulary_stays_where_nothing_says_how_much_it_is(tmp_path: Path) -> None:
    run = megatron_runs.run_folder("qwen2", "legacy", "1")
    plan = migrate.plan(run, to="megatron-gpt@qwen2")
    assert plan.document["losses"] == []
    assert plan.document["params"]["padded"] == 24
    (note,) = [note for note in plan.document["notes"] if note.startswith("nothing is cut off ")]
    assert "embedding.word_embeddings.weight (24 on axis 0)" in note
    assert note.endswith('which has no value: params={"vocab": …}')
    cut = migrate.plan(run, to="megatron-gpt@qwen2", params={"vocab": VOCABULARY})
    assert cut.document["losses"] == []
    kept = "kept for the way back, beside the tensors: megatron-gpt/qwen2/gpt embedding"
    assert any(note.startswith(kept) for note in cut.document["notes"])


def test_a_reference_folder_says_how_much_padding_there_is(tmp_path: Path) -> None:
    reference = tmp_path / "reference"
    reference.mkdir()
    wanted = (megatron_runs.family("llama") / "hf" / "config.json").read_bytes()
    (reference / "config.json").write_bytes(wanted)
    (reference / "tokenizer.json").write_text("{}")
    out = converted("llama", "tp2", tmp_path / "out", side=reference)
    assert (out / "config.json").read_bytes() == wanted
    assert (out / "tokenizer.json").read_text() == "{}"
    assert load_file(out / "model.safetensors")["lm_head.weight"].shape == (VOCABULARY, 16)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", 32),
        ("num_hidden_layers", 8),
        ("num_attention_heads", 8),
        ("num_key_value_heads", 4),
        ("head_dim", 8),
        ("intermediate_size", 48),
        ("rms_norm_eps", 1e-06),
        ("rope_theta", 500000.0),
    ],
)
def test_a_reference_folder_of_another_model_is_refused(
    field: str, value: float, tmp_path: Path
) -> None:
    said = json.loads((megatron_runs.family("llama") / "hf" / "config.json").read_text())
    # of its two spellings the other one
    assert said.pop("rope_parameters")["rope_theta"] == 10000.0
    (tmp_path / "config.json").write_text(json.dumps({**said, field: value}))
    run = megatron_runs.run_folder("llama", "legacy", "tp2")
    with pytest.raises(migrate.MigrateError, match=f"config.json#{field} says {value}") as refused:
        migrate.plan(run, to="megatron-gpt@llama", side=tmp_path)
    assert "M510" in {d.code for d in refused.value.diagnostics}


@pytest.mark.parametrize("family", sorted(megatron_runs.RUNS))
@pytest.mark.parametrize("field", ["rms_norm_eps", "rope_theta", "tie_word_embeddings"])
def test_what_a_model_computes_with_is_compared_in_every_family(
    family: str, field: str, tmp_path: Path
) -> None:
    said = json.loads((megatron_runs.family(family) / "hf" / "config.json").read_text())
    at = said if field in said else said["rope_parameters"]
    at[field] = not at[field] if field.startswith("tie") else at[field] * 2
    (tmp_path / "config.json").write_text(json.dumps(said))
    run = megatron_runs.run_folder(family, "legacy", "1")
    with pytest.raises(
        migrate.MigrateError, match=rf"{field} says {json.dumps(at[field])}"
    ) as refused:
        migrate.plan(run, to=f"megatron-gpt@{family}", side=tmp_path)
    assert "M510" in {d.code for d in refused.value.diagnostics}


def test_another_family_than_the_one_that_was_trained_is_refused(tmp_path: Path) -> None:
    for family, goal, said in (
        ("qwen2", "llama", "args.add_qkv_bias"),
        ("qwen3", "llama", "args.qk_layernorm"),
        ("llama", "qwen3", "args.qk_layernorm"),
        ("mixtral", "llama", "args.num_experts"),
        ("qwen3-moe", "mixtral", "args.qk_layernorm"),
    ):
        with pytest.raises(migrate.MigrateError, match=said):
            migrate.plan(megatron_runs.run_folder(family, "legacy", "1"), to=f"megatron-gpt@{goal}")


@pytest.fixture
def _enums(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch.load finds in the place of megatron-core's enums."""
    for name in ("megatron.core.enums", "megatron.core.transformer.enums"):
        module = ModuleType(name)
        module.ModelType = module.AttnBackend = int  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("megatron", "megatron.core", "megatron.core.transformer"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))


@pytest.mark.usefixtures("_enums")
@pytest.mark.parametrize("family", sorted(megatron_runs.RUNS))
def test_the_way_back_cuts_for_two_ranks_as_megatron_core_does(family: str, tmp_path: Path) -> None:
    params: dict[str, Any] = {"tp": 2, "impl": "local", "divisible": 8}
    if family in OF_EXPERTS:
        params["experts"] = "local"
    if family in ("qwen2", "mixtral"):
        # its configuration does not say it
        params["head_dim"] = 4
    source = tmp_path / "hf"
    source.mkdir()
    for name in ("model.safetensors", "config.json"):
        content = (megatron_runs.family(family) / "hf" / name).read_bytes()
        (source / name).write_bytes(content)
    back = {"to": "megatron-gpt@mcore", "from_": f"megatron-gpt@{family}"}
    migrate.apply(source, tmp_path / "out", params=params, **back)
    vocabulary: dict[str, list[torch.Tensor]] = {}
    for rank in range(2):
        there = tmp_path / "out" / "release" / f"mp_rank_0{rank}" / "model_optim_rng.pt"
        made = torch.load(there, weights_only=False)["model"]
        part = megatron_runs.checkpoint(family, "legacy", "tp2") / f"mp_rank_0{rank}"
        held = torch.load(part / "model_optim_rng.pt", weights_only=False)["model"]
        own = {k: v for k, v in held.items() if v is not None}
        assert made.keys() == own.keys()
        for key in own:
            if key.startswith(("embedding.", "output_layer.")):
                vocabulary.setdefault(key, []).append(made[key])
                vocabulary.setdefault(f"{key} of megatron-core", []).append(own[key])
            else:
                assert torch.equal(made[key], own[key]), key
    whole = {key: torch.cat(parts) for key, parts in vocabulary.items()}
    for key in (key for key in whole if " " not in key):
        rows = whole[f"{key} of megatron-core"]
        assert whole[key].shape == rows.shape
        assert torch.equal(whole[key][:VOCABULARY], rows[:VOCABULARY])
        # what the folder of transformers never had
        assert not whole[key][VOCABULARY:].any()


# what a configuration does not say as the run did: how long its samples were, what it padded the
# vocabulary to, and what it saved
UNLIKE = {
    "seq_length", "vocab_size", "padded_vocab_size", "make_vocab_size_divisible_by", "no_save_rng",
}  # fmt: skip

# what Megatron-LM compares when it loads (check_checkpoint_args) and takes over where it is asked
# to (load_args_from_checkpoint), but for the tokenizer and for models of other kinds
READ_BY_MEGATRON = {
    "num_layers", "hidden_size", "ffn_hidden_size", "seq_length", "num_attention_heads",
    "num_query_groups", "group_query_attention", "kv_channels", "max_position_embeddings",
    "position_embedding_type", "add_position_embedding", "use_rotary_position_embeddings",
    "rotary_base", "rotary_percent", "rotary_interleaved", "add_bias_linear", "add_qkv_bias",
    "squared_relu", "swiglu", "untie_embeddings_and_output_weights", "apply_layernorm_1p",
    "normalization", "apply_query_key_layer_scaling", "attention_dropout", "hidden_dropout",
    "mtp_num_layers", "num_experts", "moe_layer_freq", "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size", "make_vocab_size_divisible_by", "padded_vocab_size",
    "tensor_model_parallel_size", "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size", "num_layers_per_virtual_pipeline_stage",
    "expert_model_parallel_size", "ckpt_format",
}  # fmt: skip
READ_OF_EXPERTS = {
    "moe_router_topk", "moe_router_pre_softmax", "moe_grouped_gemm", "moe_aux_loss_coeff",
    "moe_router_load_balancing_type", "moe_router_score_function",
    "moe_router_enable_expert_bias", "moe_router_topk_scaling_factor",
}  # fmt: skip


@pytest.mark.parametrize("family", sorted(megatron_runs.RUNS))
def test_arguments_are_made_of_a_configuration(family: str, tmp_path: Path) -> None:
    """All that Megatron compares or takes over is there, as a run of the same model had it."""
    source = tmp_path / "hf"
    source.mkdir()
    for name in ("model.safetensors", "config.json"):
        (source / name).write_bytes((megatron_runs.family(family) / "hf" / name).read_bytes())
    params: dict[str, Any] = {"impl": "local"}
    if family in OF_EXPERTS:
        params["experts"] = "local"
    if family in ("qwen2", "mixtral"):
        params["head_dim"] = 4
    migrate.apply(
        source,
        tmp_path / "out",
        to="megatron-gpt@mcore",
        from_=f"megatron-gpt@{family}",
        params=params,
    )
    made, wanted = (
        values_of_root(path)
        for path in (tmp_path / "out", megatron_runs.run_folder(family, "legacy", "1"))
    )
    assert [key for key in made if not key.startswith("args.")][:2] == [
        "checkpoint_version",
        "iteration",
    ]
    assert (made["checkpoint_version"], made["iteration"]) == (3.0, 0)
    unlike = {
        key[5:]
        for key, value in made.items()
        if key.startswith("args.") and key in wanted and repr(wanted[key]) != repr(value)
    }
    assert unlike == UNLIKE
    read = READ_BY_MEGATRON | (READ_OF_EXPERTS if family in OF_EXPERTS else set())
    assert {f"args.{name}" for name in read} <= made.keys()
    # and back: nothing of it is left
    migrate.downgrade(tmp_path / "out", tmp_path / "back")
    found = migrate.inspect(tmp_path / "back").to_json()
    assert found["items"] == []
    assert (
        load_file(tmp_path / "back" / "model.safetensors").keys()
        == load_file(source / "model.safetensors").keys()
    )


def values_of_root(path: Path) -> dict[str, Any]:
    """The values of a checkpoint of one part by path, as JSON."""
    with formats.open(path) as source:
        return dict(source.index.items)


def test_scaled_rope_is_said_where_megatron_scales_it_so(tmp_path: Path) -> None:
    source = tmp_path / "hf"
    source.mkdir()
    hf = megatron_runs.family("llama") / "hf"
    (source / "model.safetensors").write_bytes((hf / "model.safetensors").read_bytes())
    config = json.loads((hf / "config.json").read_text())
    scaled = {
        "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    asked = {
        "to": "megatron-gpt@mcore",
        "from_": "megatron-gpt@llama",
        "params": {"impl": "local"},
    }
    config["rope_parameters"] |= scaled
    (source / "config.json").write_text(json.dumps(config))
    migrate.apply(source, tmp_path / "out", **asked)
    made = values_of_root(tmp_path / "out")
    assert (made["args.use_rope_scaling"], made["args.rope_scaling_factor"]) == (True, 32.0)
    for name, other in {"rope_type": "yarn", "low_freq_factor": 2.0}.items():
        config["rope_parameters"] |= {**scaled, name: other}
        (source / "config.json").write_text(json.dumps(config))
        with pytest.raises(migrate.MigrateError) as refused:
            migrate.plan(source, **asked)
        assert {d.code for d in refused.value.diagnostics} == {"M114"}


@pytest.mark.parametrize(
    ("family", "said", "where"),
    [
        # the same keys, multiplied by numbers that no other family has
        ("llama", {"model_type": "granite", "logits_scaling": 8.0}, "config.json#model_type"),
        ("llama", {"model_type": "mistral", "sliding_window": 16}, "config.json#sliding_window"),
        ("llama", {"partial_rotary_factor": 0.5}, "config.json#partial_rotary_factor"),
        ("llama", {"hidden_act": "gelu"}, "config.json#hidden_act"),
        ("mixtral", {"sliding_window": 16}, "config.json#sliding_window"),
        *(
            (family, {"use_sliding_window": True}, "config.json#use_sliding_window")
            for family in ("qwen2", "qwen3", "qwen3-moe")
        ),
        *((family, {"model_type": "gemma"}, "#model_type") for family in megatron_runs.RUNS),
    ],
)
def test_a_model_that_computes_something_else_is_refused_on_the_way_to_megatron(
    family: str, said: dict[str, Any], where: str, tmp_path: Path
) -> None:
    hf = megatron_runs.family(family) / "hf"
    (tmp_path / "model.safetensors").write_bytes((hf / "model.safetensors").read_bytes())
    config = json.loads((hf / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **said}))
    with pytest.raises(migrate.MigrateError) as refused:
        migrate.plan(tmp_path, to="megatron-gpt@mcore", from_=f"megatron-gpt@{family}")
    (found,) = (d for d in refused.value.diagnostics if d.code == "M114")
    assert where in found.message


def test_a_mistral_without_a_window_is_a_llama(tmp_path: Path) -> None:
    hf = megatron_runs.family("llama") / "hf"
    (tmp_path / "model.safetensors").write_bytes((hf / "model.safetensors").read_bytes())
    config = json.loads((hf / "config.json").read_text())
    said = {"model_type": "mistral", "sliding_window": None}
    (tmp_path / "config.json").write_text(json.dumps({**config, **said}))
    plan = migrate.plan(tmp_path, to="megatron-gpt@mcore")
    assert plan.document["params"]["model_type"] == "mistral"


@pytest.mark.parametrize("family", megatron_runs.RUNS)
def test_families_are_told_from_each_other_by_keys_and_config(family: str, tmp_path: Path) -> None:
    hf = megatron_runs.family(family) / "hf"
    (found,) = [one for one in migrate.inspect(hf).layouts if one.lineage == "megatron-gpt"]
    config = json.loads((hf / "config.json").read_text())
    assert found.layout == family
    assert f'config.json says model_type = "{config["model_type"]}"' in found.evidence
    (tmp_path / "model.safetensors").write_bytes((hf / "model.safetensors").read_bytes())
    # the keys alone tell them too
    (alone,) = [one for one in migrate.inspect(tmp_path).layouts if one.lineage == "megatron-gpt"]
    assert alone.layout == family
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "granite"}))
    with pytest.raises(migrate.MigrateError) as refused:
        migrate.plan(tmp_path, to="megatron-gpt@mcore")
    assert [one.code for one in refused.value.diagnostics] == ["M504"]


def test_arguments_that_nothing_says_are_named(tmp_path: Path) -> None:
    source = tmp_path / "hf"
    source.mkdir()
    hf = megatron_runs.family("llama") / "hf"
    (source / "model.safetensors").write_bytes((hf / "model.safetensors").read_bytes())
    params = {"impl": "local", "heads": 4, "groups": 2, "head_dim": 4}
    asked = {"to": "megatron-gpt@mcore", "from_": "megatron-gpt@llama"}
    plan = migrate.plan(source, params=params, **asked)
    (note,) = [note for note in plan.document["notes"] if "are not made" in note]
    assert "`args`, `checkpoint_version`, `iteration` are not made" in note
    assert "`positions`" in note
