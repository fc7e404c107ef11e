"""Rules imported from transformers, against what the library itself loads."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from import_proof import compared, prove, read_rules, saved, stored
from make_imports import BEGIN, PAGE

import migrate
from migrate import MigrateError

pytestmark = pytest.mark.libraries

# of each kind of transform some: stacked and joined experts, cuts, ranges of experts, rotations,
# transposes, interleaved rows, offsets, prefixes, ties of many layers, several sources for one
SAMPLE = (
    "mixtral", "qwen2_moe", "deepseek_v3", "llava", "LlavaModel", "ernie4_5_vl_moe",
    "Molmo2TextModel",
    "inkling2", "inkling2_text", "nemo_speechlm", "qwen3_vl_moe", "qwen4_exp_text", "radio", "esm",
    "deformable_detr", "flint", "mimo_v2_flash", "GPTNeoXForCausalLM", "ViTModel", "timesfm2_5",
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _quiet() -> None:
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


@pytest.mark.parametrize("entry", SAMPLE)
def test_rules_do_what_the_library_does(entry: str, tmp_path: Path) -> None:
    proof = prove(entry, tmp_path)
    assert proof.tensors


@pytest.mark.parametrize("entry", ["deepseek_v3", "hy_v3", "voxtral"])
def test_what_the_model_keeps_in_float32_is_cast(entry: str, tmp_path: Path) -> None:
    proof = prove(entry, tmp_path, dtype="bfloat16")
    casts = [draft for draft in proof.imported.drafts if any("cast" in op for op in draft.via)]
    assert casts
    assert all(draft.note for draft in casts)


@pytest.mark.parametrize(
    "entry", ["mixtral", "deepseek_v3", "llava", "radio", "GPTNeoXForCausalLM"]
)
def test_the_new_layout_gives_the_same_rules(entry: str, tmp_path: Path) -> None:
    cls, hub = saved(entry, tmp_path / "hub")
    _, new = saved(entry, tmp_path / "new", original=False)
    assert set(stored(hub)) != set(stored(new))
    forth, back = read_rules(hub, cls.__name__), read_rules(new, cls.__name__, reverse=True)
    assert forth.drafts == back.drafts
    assert forth.params == back.params


def test_every_entry_has_a_row_that_says_why() -> None:
    from tiny_models import entries

    rows = [
        [cell.strip() for cell in line.strip("| ").split(" | ")]
        for line in PAGE.read_text("utf-8").split(BEGIN)[1].splitlines()
        if line.startswith("| ") and not line.startswith("| entry")
    ]
    assert [row[0] for row in rows] == entries()
    assert all(row[-1] and row[-2] in ("no", "not proven", "proven") for row in rows)


def test_a_second_source_of_a_parameter_is_dropped_and_said(tmp_path: Path) -> None:
    cls, hub = saved("mixtral", tmp_path / "hub")
    change(hub, lambda weights: weights | {
        f"model.layers.{n}.mlp.gate.weight":
            weights[f"model.layers.{n}.block_sparse_moe.gate.weight"] + 1
        for n in range(2)
    })  # fmt: skip
    made = read_rules(hub)
    (dropped,) = (draft for draft in made.drafts if not draft.targets and not draft.keep)
    assert "{n:int}.mlp.gate.weight" in str(dropped.sources)
    assert (
        "takes the first of several keys for model.layers.*.mlp.gate.weight"
        in dropped.via[0]["drop"]["why"]
    )
    migrate.new(tmp_path / "rules.yaml", from_transformers=hub)
    compared(cls, hub, tmp_path / "rules.yaml", tmp_path / "one", back=False)


def test_keys_that_the_class_does_not_know_are_dropped_and_said(tmp_path: Path) -> None:
    cls, hub = saved("mixtral", tmp_path / "hub")
    change(hub, lambda weights: weights | {
        f"model.layers.{n}.self_attn.rotary_emb.inv_freq": weights["model.norm.weight"].clone()
        for n in range(2)
    })  # fmt: skip
    (dropped,) = (d for d in read_rules(hub).drafts if not d.targets and not d.keep)
    assert dropped.fields["optional"] is True
    assert dropped.via[0]["drop"]["why"] == "MixtralForCausalLM has no such parameter"
    migrate.new(tmp_path / "rules.yaml", from_transformers=hub)
    compared(cls, hub, tmp_path / "rules.yaml", tmp_path / "one", back=False)


def test_parameters_that_are_missing_are_named(tmp_path: Path) -> None:
    _, hub = saved("mixtral", tmp_path / "hub")
    change(hub, lambda weights: {k: v for k, v in weights.items() if k != "model.norm.weight"})
    migrate.new(tmp_path / "rules.yaml", from_transformers=hub)
    assert "# Not in the checkpoint: model.norm.weight" in (tmp_path / "rules.yaml").read_text()


def refused(code: str, checkpoint: Path, **more: Any) -> str:
    """What is said; nothing is written."""
    out = checkpoint.parent / "rules.yaml"
    with pytest.raises(MigrateError) as caught:
        migrate.new(out, from_transformers=checkpoint, **more)
    assert {d.code for d in caught.value.diagnostics} == {code}
    assert not out.exists()
    assert not [*checkpoint.parent.glob(".*partial")]
    return str(caught.value)


def test_experts_with_a_gap_are_refused(tmp_path: Path) -> None:
    _, hub = saved("mixtral", tmp_path / "hub")
    change(
        hub,
        lambda weights: {
            k.replace(
                "layers.1.block_sparse_moe.experts.3.", "layers.1.block_sparse_moe.experts.7."
            ): v
            for k, v in weights.items()
        },
    )
    assert "[0, 1, 2, 7] …, not 0, 1, 2" in refused("M992", hub)


def test_an_operation_without_an_op_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers.conversion_mapping as table
    from transformers.core_model_loading import ConversionOps, WeightConverter

    class Twirl(ConversionOps):
        def convert(self, input_dict: Any, *args: Any, **kwargs: Any) -> Any:
            return input_dict

    _, hub = saved("mixtral", tmp_path / "hub")
    pattern = "self_attn.q_proj.weight"
    added = [WeightConverter(pattern, pattern, operations=[Twirl()])]
    table.get_checkpoint_conversion_mapping("mixtral")
    monkeypatch.setitem(table._checkpoint_conversion_mapping_cache, "MixtralForCausalLM", added)
    said = refused("M992", hub)
    assert "Twirl" in said
    assert pattern in said
    assert "model.layers.0.self_attn.q_proj.weight" in said


def test_a_class_that_is_not_there(tmp_path: Path) -> None:
    _, hub = saved("mixtral", tmp_path / "hub")
    said = refused("M991", hub, cls="MixtralForCausaLM")
    assert "MixtralForCausaLM" in said
    assert "did you mean `MixtralForCausalLM`?" in said


def test_a_model_type_that_is_not_there(tmp_path: Path) -> None:
    _, hub = saved("mixtral", tmp_path / "hub")
    configure(hub, model_type="mixtrall")
    said = refused("M991", hub)
    assert "mixtrall" in said
    assert "`mixtral`" in said


def test_a_checkpoint_of_another_class_is_refused(tmp_path: Path) -> None:
    _, hub = saved("mixtral", tmp_path / "hub")
    change(hub, lambda weights: {f"net.{key}": tensor for key, tensor in weights.items()})
    said = refused("M991", hub)
    assert "no key of the checkpoint is one of MixtralForCausalLM" in said
    assert "the checkpoint has net." in said
    assert "cls=" in said


def test_without_a_configuration_it_is_asked_for(tmp_path: Path) -> None:
    _, hub = saved("mixtral", tmp_path / "hub")
    (hub / "config.json").unlink()
    assert "no config.json beside the tensors" in refused("M991", hub)


def test_the_new_layout_is_asked_for_where_the_checkpoint_has_the_old_one(tmp_path: Path) -> None:
    _, hub = saved("mixtral", tmp_path / "hub")
    said = refused("M992", hub, reverse=True)
    assert "block_sparse_moe" in said
    assert "help: reverse=True is for a checkpoint in the layout of the model" in said


def test_nothing_of_a_checkpoint_is_imported(tmp_path: Path) -> None:
    _, hub = saved("mixtral", tmp_path / "hub")
    configure(hub, model_type="acme", auto_map={"AutoModelForCausalLM": "modeling_acme.AcmeModel"})
    (hub / "modeling_acme.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    said = refused("M991", hub)
    assert "modeling_acme.AcmeModel" in said
    assert not (tmp_path / "ran").exists()
    assert "modeling_acme" not in sys.modules


def test_a_package_that_a_class_needs_is_named(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    try:
        import timm  # noqa: F401
    except ImportError:
        pass
    else:
        pytest.skip("timm is installed")
    _, hub = saved("mixtral", tmp_path / "hub")
    configure(
        hub, model_type="timm_wrapper", architectures=["TimmWrapperModel"], architecture="resnet18"
    )
    assert "timm" in refused("M991", hub)


def test_internals_that_moved_are_told_with_the_release_that_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers.core_model_loading as loading

    _, hub = saved("mixtral", tmp_path / "hub")
    with monkeypatch.context() as patch:
        patch.delattr(loading, "rename_source_key")
        said = refused("M990", hub)
    assert "rename_source_key" in said
    assert "5.23.0" in said
    with monkeypatch.context() as patch:
        patch.setattr(loading, "rename_source_key", lambda key, *rest: (key, None))
        assert "5.23.0" in refused("M990", hub)


def test_without_transformers_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, hub = saved("mixtral", tmp_path / "hub")
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "ckpt-migrate[transformers]" in refused("M990", hub)


def test_a_quantized_checkpoint_is_refused(tmp_path: Path) -> None:
    _, hub = saved("mixtral", tmp_path / "hub")
    configure(hub, quantization_config={"quant_method": "fp8"})
    assert "fp8" in refused("M992", hub)


def change(hub: Path, to: Any) -> None:
    from safetensors.torch import load_file, save_file

    (file,) = hub.glob("*.safetensors")
    save_file(to(load_file(file)), file, metadata={"format": "pt"})


def configure(hub: Path, **values: Any) -> None:
    file = hub / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.mark.parametrize("entry", ["mixtral", "deepseek_v3", "llava"])
def test_the_file_comes_with_a_test_that_no_rule_made(entry: str, tmp_path: Path) -> None:
    cls, hub = saved(entry, tmp_path / "hub")
    report = migrate.new(tmp_path / "rules.yaml", from_transformers=hub, cls=cls.__name__)
    assert report.to_json()["counts"]["tests"] == 1
    assert not report.to_json()["diagnostics"]
    assert migrate.test([tmp_path / "rules.yaml"]).passed
