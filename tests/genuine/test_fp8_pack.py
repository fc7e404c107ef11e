"""The pack `fp8` on checkpoints that libraries made: what they decode is what comes out, to the
bit, and it loads as any plain checkpoint does.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from checkpoints import files, folder, side
from commandline import contents, done, run
from genuine import checkpoint, digests, names

HF = ("hf-fp8-block", "hf-fp8-block-moe", "hf-fp8-block-ue8m0")
LAYOUTS = {
    **dict.fromkeys(HF, "hf"),
    **dict.fromkeys(("ct-fp8-tensor", "ct-fp8-channel", "ct-fp8-block"), "compressed-tensors"),
    **dict.fromkeys(("modelopt-fp8", "modelopt-fp8-channel", "modelopt-fp8-stacked"), "modelopt"),
    "mistral-fp8": "mistral",
}
# what torchao wrote is read by its own metadata, which no rule writes
ONE_WAY = dict.fromkeys(("torchao-fp8-row", "torchao-fp8-tensor"), "torchao")
# the scales of activations, which none has beside plain weights
STATIC = ("ct-fp8-tensor", "modelopt-fp8", "modelopt-fp8-stacked", "mistral-fp8")
INPUTS = ("input_scale", ".activation_scale")
TO = ("--to", "fp8@bf16", "--allow", "lossy")
# key -> dtype and shape
Tensors = dict[str, tuple[str, list[int]]]


def decoded(name: str, tmp_path: Path) -> Path:
    drop = ("--allow", "drop") if name in STATIC else ()
    done("apply", checkpoint(name).folder, "-o", tmp_path / "plain", *TO, *drop)
    return tmp_path / "plain"


def shapes(folder: Path) -> dict[str, tuple[str, Any]]:
    return {key: (dtype, shape) for key, (dtype, shape, _) in contents(folder).items()}


def stands_in(folder: Path) -> set[str]:
    """The layouts of `fp8` and `deepseek-v3` that the checkpoint is in."""
    found = done("inspect", folder, "--format", "json").json["layouts"]
    return {
        f"{x['lineage']}@{x['layout']}" for x in found if x["lineage"] in ("fp8", "deepseek-v3")
    }


@pytest.mark.heavy
@pytest.mark.parametrize("name", [*LAYOUTS, *ONE_WAY])
def test_what_comes_out_is_what_the_library_decodes(name: str, tmp_path: Path) -> None:
    source = checkpoint(name)
    assert stands_in(source.folder) == {f"fp8@{(LAYOUTS | ONE_WAY)[name]}"}
    out = decoded(name, tmp_path)
    assert digests(out) == source.tensors
    said = side(source.folder)
    del said["quantization_config"]
    assert files(out).keys() == {"config.json"}
    assert side(out) == said
    verified = done("verify", out, "--source", source.folder, "--format", "json").json
    assert verified["equal"] is True


@pytest.mark.heavy
@pytest.mark.parametrize("name", ONE_WAY)
def test_what_torchao_stored_has_no_way_back(name: str, tmp_path: Path) -> None:
    out = decoded(name, tmp_path)
    failed = run("downgrade", out, "-o", tmp_path / "back", "--allow", "lossy")
    assert failed.exit == 3
    assert "error[M405]" in failed.err
    assert "have no way back: torchao reads what it stored by metadata" in failed.err
    assert not (tmp_path / "back").exists()


@pytest.mark.heavy
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_way_back_has_the_parts_and_the_configuration_that_were_there(
    name: str, tmp_path: Path
) -> None:
    source = checkpoint(name).folder
    out = decoded(name, tmp_path)
    done("downgrade", out, "-o", tmp_path / "back", "--allow", "lossy")
    there = {k: s for k, s in shapes(source).items() if not k.endswith(INPUTS)}
    assert shapes(tmp_path / "back") == there
    wanted = files(source)
    if name in ("mistral-fp8", "ct-fp8-tensor"):
        # the scales of inputs are gone
        said = json.loads(wanted["config.json"])
        if name == "mistral-fp8":
            said["quantization_config"]["activation_scheme"] = "dynamic"
        else:
            group = said["quantization_config"]["config_groups"]["group_0"]
            group["input_activations"]["dynamic"] = True
        end = b"\n" if wanted["config.json"].endswith(b"\n") else b""
        wanted["config.json"] = json.dumps(said, indent=2).encode() + end
    assert files(tmp_path / "back") == wanted
    before, after = contents(source), contents(tmp_path / "back")
    plain = [k for k, (dtype, _, _) in before.items() if dtype == "BF16" and "_scale" not in k]
    assert len(plain) > 4
    assert all(before[key] == after[key] for key in plain)
    if name == "hf-fp8-block-ue8m0":
        # a block without large codes comes back with others, twice as large, and half the scale
        done("apply", tmp_path / "back", "-o", tmp_path / "again", *TO)
        assert digests(tmp_path / "again") == checkpoint(name).tensors
    elif name.startswith(("hf", "modelopt", "mistral")):
        codes = [key for key, (dtype, _, _) in before.items() if dtype == "F8_E4M3"]
        assert all(before[key] == after[key] for key in codes)


@pytest.mark.heavy
@pytest.mark.parametrize("name", STATIC)
def test_scales_of_activations_go_only_where_that_is_allowed(name: str, tmp_path: Path) -> None:
    found = done("plan", checkpoint(name).folder, *TO, "--format", "json", exit=3).json
    assert {one["code"] for one in found["diagnostics"]} == {"M402"}


@pytest.mark.heavy
@pytest.mark.heavy
@pytest.mark.parametrize(
    ("name", "scale"),
    [
        ("ct-fp8-tensor", "k_scale"),
        ("ct-fp8-tensor", "v_zero_point"),
        ("modelopt-fp8", "k_proj.k_scale"),
        ("hf-fp8-block", "attn.v_scale"),
    ],
)
def test_scales_of_the_cache_go_with_the_configuration(
    name: str, scale: str, tmp_path: Path
) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    source = shutil.copytree(checkpoint(name).folder, tmp_path / "in")
    file, key = source / "model.safetensors", f"model.layers.0.self_attn.{scale}"
    save_file(load_file(file) | {key: torch.tensor([0.5])}, file)
    failed = run("apply", source, "-o", tmp_path / "x", *TO)
    assert failed.exit == 3
    assert "--allow drop" in failed.err
    plan = done("plan", source, *TO, "--allow", "drop")
    assert key in plan.out
    assert "it scales what attention keeps" in plan.out
    done("apply", source, "-o", tmp_path / "plain", *TO, "--allow", "drop")
    assert digests(tmp_path / "plain") == checkpoint(name).tensors


@pytest.mark.heavy
def test_a_trained_model_is_encoded_under_the_names_of_mistral(tmp_path: Path) -> None:
    source, plain = checkpoint("mistral-fp8").folder, decoded("mistral-fp8", tmp_path)
    (plain / "migrate.history.json").unlink()
    (plain / "migrate.parts").unlink(missing_ok=True)
    asked = ("--from", "fp8@bf16", "--to", "fp8@mistral", "--allow", "lossy")
    coded = tmp_path / "coded"
    answer = done("apply", plain, "-o", coded, *asked, "--set", "scale=bfloat16")
    assert "M519" not in answer.out + answer.err
    assert shapes(coded) == {k: s for k, s in shapes(source).items() if not k.endswith(INPUTS)}
    written = side(coded)["quantization_config"]
    assert written.pop("modules_to_not_convert") == ["lm_head", "model.embed_tokens"]
    assert written == {
        "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": None,
    }  # fmt: skip
    assert stands_in(coded) == {"fp8@mistral"}
    again = done("apply", coded, "-o", tmp_path / "again", *TO)
    assert "M315" not in again.out + again.err


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("ct-fp8-channel", ()),
        ("ct-fp8-tensor", ("--set", "strategy=tensor")),
        ("ct-fp8-block", ("--set", "strategy=block", "--set", "block=[32, 32]")),
        ("modelopt-fp8-channel", ("--set", "algorithm=FP8_PER_CHANNEL_PER_TOKEN")),
        ("modelopt-fp8", ()),
        ("modelopt-fp8-stacked", ()),
    ],
)
def test_a_trained_model_is_encoded_as_other_libraries_do(
    name: str, asked: tuple[str, ...], tmp_path: Path
) -> None:
    plain, source = decoded(name, tmp_path), checkpoint(name).folder
    (plain / "migrate.history.json").unlink()
    (plain / "migrate.parts").unlink(missing_ok=True)
    coded, layout = tmp_path / "coded", f"fp8@{LAYOUTS[name]}"
    answer = done(
        "apply", plain, "-o", coded, "--from", "fp8@bf16", "--to", layout, *asked,
        "--allow", "lossy",
    )  # fmt: skip
    # ModelOpt has no word for one scale a tensor and none of inputs
    said = side(coded)["quantization_config"].get("quant_algo")
    assert ("M519" in answer.out + answer.err) == (said == "FP8")
    assert shapes(coded) == {k: s for k, s in shapes(source).items() if not k.endswith(INPUTS)}
    assert files(coded).keys() == files(source).keys()
    assert {"lm_head", "model.embed_tokens"} <= set(side(coded)["quantization_config"]["ignore"])
    assert stands_in(coded) == {layout}
    again = done("apply", coded, "-o", tmp_path / "again", *TO)
    assert "M315" not in again.out + again.err


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["hf-fp8-block", "hf-fp8-block-moe"])
def test_a_trained_model_is_encoded_with_the_configuration_that_describes_it(
    name: str, tmp_path: Path
) -> None:
    source = checkpoint(name).folder
    plain = decoded(name, tmp_path)
    (plain / "migrate.history.json").unlink()
    (plain / "migrate.parts").unlink(missing_ok=True)
    coded = tmp_path / "coded"
    answer = done(
        "apply", plain, "-o", coded, "--from", "fp8@bf16", "--to", "fp8@hf", "--set",
        "block=[32, 32]", "--allow", "lossy",
    )  # fmt: skip
    assert "M519" not in answer.out + answer.err
    assert shapes(coded) == shapes(source)
    said = side(coded)["quantization_config"]
    assert said["weight_block_size"] == [32, 32]
    assert {"lm_head", "model.embed_tokens"} <= set(said["modules_to_not_convert"])
    assert not any("proj" in module for module in said["modules_to_not_convert"])
    assert stands_in(coded) == {"fp8@hf"}
    again = done("plan", coded, *TO)
    assert "M315" not in again.out + again.err


@pytest.mark.heavy
def test_codes_whose_scales_are_elsewhere_are_refused_by_name(tmp_path: Path) -> None:
    source = checkpoint("hf-fp8-block-moe-saved").folder
    answer = done("apply", source, "-o", tmp_path / "x", *TO, "--format", "json", exit=3).json
    found = [(d["code"], d["message"]) for d in answer["diagnostics"]]
    assert {code for code, _ in found} == {"M207"}
    assert any("gate_up_proj_scale_inv stands alone" in message for _, message in found)
    assert any("experts.0.down_proj.weight_scale_inv" in message for _, message in found)
    assert not (tmp_path / "x").exists()


def spoiled(name: str, tmp_path: Path, config: str = "", header: str = "") -> Path:
    """A copy of the checkpoint in which one text stands for another, of the same length in the
    header: `old -> new`.
    """
    made, out = checkpoint(name).folder, tmp_path / "spoiled"
    out.mkdir()
    for path in made.iterdir():
        raw = path.read_bytes()
        change = header if path.suffix == ".safetensors" else config
        if change:
            old, new = (text.encode() for text in change.split(" -> "))
            assert old in raw
            raw = raw.replace(old, new) if path.suffix == ".json" else raw.replace(old, new, 1)
        (out / path.name).write_bytes(raw)
    return out


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("name", "changes", "code", "says"),
    [
        (
            "hf-fp8-block",
            {"config": "32,\n      32\n -> 16,\n      16\n"},
            "M315",
            "blocks of 16 x 16",
        ),
        ("ct-fp8-channel", {"config": '"channel" -> "tensor"'}, "M315", "a scale for each tensor"),
        (
            "modelopt-fp8",
            {"config": '"FP8" -> "FP8_PER_CHANNEL_PER_TOKEN"'},
            "M315",
            "a scale for each channel by config.json",
        ),
        (
            "ct-fp8-channel",
            {"header": "o_proj.weight_scale -> o_proj.weight_shale"},
            "M207",
            "missing: model.layers.0.self_attn.o_proj.weight_scale",
        ),
        (
            "modelopt-fp8",
            {"header": "o_proj.weight_scale -> o_proj.weight_shale"},
            "M207",
            "missing: model.layers.0.self_attn.o_proj.weight_scale",
        ),
    ],
)
def test_what_does_not_belong_together_is_refused_while_planning(
    name: str, changes: dict[str, str], code: str, says: str, tmp_path: Path
) -> None:
    source = spoiled(name, tmp_path, **changes)
    answer = done(
        "apply", source, "-o", tmp_path / "out", *TO, "--allow", "drop", "--format", "json", exit=3
    )
    found = [(d["code"], d["message"]) for d in answer.json["diagnostics"]]
    assert code in {one for one, _ in found}, found
    assert any(says in message for _, message in found), found
    assert not (tmp_path / "out").exists()


@pytest.mark.heavy
def test_codes_that_the_configuration_calls_plain_are_decoded_and_named(tmp_path: Path) -> None:
    change = '"modules_to_not_convert": null -> "modules_to_not_convert": ["q_proj"]'
    source = spoiled("hf-fp8-block", tmp_path, config=change)
    answer = done("apply", source, "-o", tmp_path / "out", *TO)
    assert digests(tmp_path / "out") == checkpoint("hf-fp8-block").tensors
    assert "M519" in answer.err
    assert "model.layers.0.self_attn.q_proj is fp8-block" in answer.err


MLA: Tensors = {
    "model.layers.0.self_attn.kv_a_proj_with_mqa.weight": ("F8_E4M3", [128, 128]),
    "model.layers.0.self_attn.kv_a_proj_with_mqa.weight_scale_inv": ("F32", [1, 1]),
    "model.layers.0.self_attn.o_proj.weight": ("F8_E4M3", [128, 128]),
    "model.layers.0.self_attn.o_proj.weight_scale_inv": ("F32", [1, 1]),
}
INDEXER: Tensors = {
    "model.layers.0.self_attn.indexer.wk.weight": ("F8_E4M3", [128, 128]),
    "model.layers.0.self_attn.indexer.wk.weight_scale_inv": ("F32", [1, 1]),
}
OTHER: Tensors = {k: s for k, s in MLA.items() if "kv_a" not in k}


TENSOR: Tensors = {
    "l.o_proj.weight": ("F8_E4M3", [128, 128]), "l.o_proj.weight_scale_inv": ("BF16", []),
}  # fmt: skip
ROWS: Tensors = {"l.o.weight": ("F8_E4M3", [128, 128]), "l.o.weight_scale": ("F32", [128])}
COLUMN: Tensors = {"l.o.weight": ("F8_E4M3", [128, 128]), "l.o.weight_scale": ("BF16", [128, 1])}
SCALARS: Tensors = {"l.o.weight": ("F8_E4M3", [128, 128]), "l.o.weight_scale": ("F32", [])}
GROUPS = {"group_0": {"targets": ["Linear"], "weights": {
    "num_bits": 8, "type": "float", "strategy": "channel",
}}}  # fmt: skip
MODELOPT = {
    "quantization_config": {
        "quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN",
    }
}  # fmt: skip
COMPRESSED = {
    "quantization_config": {"quant_method": "compressed-tensors", "config_groups": GROUPS}
}


def described(model: str, block: Any = (128, 128)) -> dict[str, Any]:
    said = {"quant_method": "fp8", "weight_block_size": block}
    return {"model_type": model, "quantization_config": said}


@pytest.mark.parametrize(
    ("tensors", "config", "layout"),
    [
        (MLA, described("deepseek_v3"), "deepseek-v3@fp8"),
        (MLA, None, "deepseek-v3@fp8"),
        (MLA, described("kimi_k2"), "fp8@hf"),
        (MLA | INDEXER, described("deepseek_v32"), "fp8@hf"),
        (MLA | INDEXER, described("deepseek_v3"), "fp8@hf"),
        (MLA | INDEXER, described("glm_moe_dsa"), "fp8@hf"),
        (MLA | INDEXER, None, "fp8@hf"),
        (OTHER, described("qwen3"), "fp8@hf"),
        (OTHER, described("deepseek_v3"), "fp8@hf"),
        (OTHER, None, "fp8@hf"),
        (TENSOR, described("mistral3", None), "fp8@mistral"),
        (TENSOR, None, "fp8@mistral"),
        (ROWS, MODELOPT, "fp8@modelopt"),
        (COLUMN, COMPRESSED, "fp8@compressed-tensors"),
        (COLUMN, None, "fp8@compressed-tensors"),
        (SCALARS, None, "fp8@modelopt"),
    ],
)
def test_one_of_two_lineages_holds(
    tmp_path: Path, tensors: Tensors, config: Any, layout: str
) -> None:
    source = folder(tmp_path / "m", tensors, **({} if config is None else {"config": config}))
    assert stands_in(source) == {layout}
    plan = done("plan", source, "--to", f"{layout.split('@')[0]}@bf16", "--allow", "lossy")
    assert plan.exit == 0


@pytest.mark.parametrize(
    "name",
    sorted({*names()} - {*LAYOUTS, *ONE_WAY, "hf-fp8-block-moe-saved", "mistral-fp8-consolidated"}),
)
def test_checkpoints_in_other_formats_are_in_no_layout_of_it(name: str) -> None:
    assert stands_in(checkpoint(name).folder) == set()


def loaded(path: Path, **more: Any) -> Any:
    """The logits of the model that transformers makes of a folder, every key of which has a place
    there, and no other.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model, found = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.bfloat16, output_loading_info=True, **more
    )
    kinds = ("missing_keys", "unexpected_keys", "mismatched_keys")
    assert not any(found[kind] for kind in kinds), found
    with torch.no_grad():
        return model.eval()(torch.arange(24).reshape(2, 12) % 32).logits


@pytest.mark.libraries
@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model", ["deepseek_v32", "glm_moe_dsa"])
def test_attention_with_an_indexer_comes_out_as_transformers_decodes_it(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, FineGrainedFP8Config
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    # it asks for a GPU, and needs none to encode
    monkeypatch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda *_, **__: None)
    config = AutoConfig.for_model(
        model, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, vocab_size=32,
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, n_routed_experts=2,
        num_experts_per_tok=1, n_group=1, topk_group=1, max_position_embeddings=64, q_lora_rank=32,
        kv_lora_rank=32, qk_rope_head_dim=32, qk_nope_head_dim=32, v_head_dim=32,
        first_k_dense_replace=1, mlp_layer_types=["dense"], index_n_heads=2, index_head_dim=32,
        index_topk=8,
    )  # fmt: skip
    torch.manual_seed(0)
    plain, coded = tmp_path / "plain", tmp_path / "coded"
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(plain)
    encoding = FineGrainedFP8Config(weight_block_size=(32, 32))
    AutoModelForCausalLM.from_pretrained(
        plain, dtype=torch.bfloat16, quantization_config=encoding
    ).save_pretrained(coded)
    assert any(".indexer." in key and key.endswith("_scale_inv") for key in shapes(coded))
    assert stands_in(coded) == {"fp8@hf"}
    theirs = loaded(
        coded,
        quantization_config=FineGrainedFP8Config(weight_block_size=(32, 32), dequantize=True),
    )
    done("apply", coded, "-o", tmp_path / "out", *TO)
    assert torch.equal(loaded(tmp_path / "out"), theirs)


@pytest.mark.libraries
@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["hf-fp8-block", "hf-fp8-block-moe"])
def test_what_was_encoded_loads_in_transformers_by_the_configuration_that_was_written(
    name: str, tmp_path: Path
) -> None:
    import torch
    from transformers import FineGrainedFP8Config

    plain = decoded(name, tmp_path)
    (plain / "migrate.history.json").unlink()
    coded = tmp_path / "coded"
    asked = ("--from", "fp8@bf16", "--to", "fp8@hf", "--set", "block=[32, 32]")
    done("apply", plain, "-o", coded, *asked, "--allow", "lossy")
    said = side(coded)["quantization_config"]
    theirs = loaded(
        coded,
        quantization_config=FineGrainedFP8Config(
            weight_block_size=said["weight_block_size"],
            modules_to_not_convert=said["modules_to_not_convert"],
            dequantize=True,
        ),
    )
    done("apply", coded, "-o", tmp_path / "again", *TO)
    assert torch.equal(loaded(tmp_path / "again"), theirs)


@pytest.mark.libraries
@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", LAYOUTS)
def test_it_loads_in_transformers_strictly_with_equal_logits(name: str, tmp_path: Path) -> None:
    import torch
    from transformers import FineGrainedFP8Config

    ours = loaded(decoded(name, tmp_path))
    assert ours.isfinite().all()
    if name not in HF:
        # what the library decodes is held against its own account of bits
        return
    config = json.loads((checkpoint(name).folder / "config.json").read_text())
    block = config["quantization_config"]["weight_block_size"]
    theirs = loaded(
        checkpoint(name).folder,
        quantization_config=FineGrainedFP8Config(weight_block_size=block, dequantize=True),
    )
    assert torch.equal(ours, theirs)
