"""What each producer's configuration says of number formats comes out in one form."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from migrate.core.errors import CheckpointError, MigrateError
from migrate.source.quantization import (
    Quantization,
    Scheme,
    contradiction,
    describe,
    read_quantization,
)

CONFIGS = Path(__file__).parents[1] / "data" / "quantization_configs"


def read(**files: Any) -> Quantization | None:
    named = {"config": "config.json", "modelopt": "hf_quant_config.json"}
    there = {named[name]: value for name, value in files.items()}
    return read_quantization(there.get)


def said(quantization: Mapping[str, Any], **more: Any) -> Quantization:
    found = read(config={"quantization_config": quantization, **more})
    assert found is not None
    return found


def facts(scheme: Scheme | None) -> dict[str, Any] | None:
    """What the scheme says, without what it does not say and where it stands."""
    if scheme is None:
        return None
    return {
        name: value
        for name, value in scheme._asdict().items()
        if value is not None and name not in ("place", "named")
    }


def compressed(weights: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, **more}


# what the schemes mean that compressed-tensors 0.20 writes for its presets
GROUP = {"granularity": "group"}
NVFP4 = {"format": "nvfp4", "bits": 4, "group": 16, "form": "compressed-tensors", **GROUP}
MXFP4 = {"format": "mxfp4", "bits": 4, "group": 32, **GROUP}
MXFP8 = {"format": "mxfp8", "bits": 8, "group": 32, **GROUP}
PRESETS: dict[str, dict[str, Any]] = {
    "FP8": {"format": "fp8", "bits": 8, "granularity": "tensor", "form": "compressed-tensors"},
    "FP8_DYNAMIC": {
        "format": "fp8",
        "bits": 8,
        "granularity": "channel",
        "form": "compressed-tensors",
    },
    "FP8_BLOCK": {"format": "fp8-block", "bits": 8, "block": (128, 128), "granularity": "block"},
    "W8A8": {"format": "int8", "bits": 8, "granularity": "channel", "symmetric": True},
    "W4A16": {"format": "int-pack", "bits": 4, "group": 128, "symmetric": True, **GROUP},
    "W4A16_ASYM": {"format": "int-pack", "bits": 4, "group": 128, "symmetric": False, **GROUP},
    "W8A16": {"format": "int-pack", "bits": 8, "group": 128, "symmetric": True, **GROUP},
    "NVFP4A16": NVFP4,
    "NVFP4": NVFP4,
    "MXFP4A16": MXFP4,
    "MXFP4": MXFP4,
    "MXFP8A16": MXFP8,
    "MXFP8": MXFP8,
}


@pytest.mark.parametrize("preset", PRESETS)
def test_schemes_of_compressed_tensors(preset: str) -> None:
    written = json.loads((CONFIGS / "compressed_tensors.json").read_text())[preset]
    found = said(written)
    assert facts(found.scheme_of("model.layers.0.mlp.up_proj")) == PRESETS[preset]
    assert found.scheme_of("lm_head") is None
    assert found.scheme_of("model.layers.0.mlp.gate") is None
    older = read(config={"compression_config": {**written, "ignore": []}})
    assert older is not None
    assert facts(older.scheme_of("lm_head")) == PRESETS[preset]


def test_pruned_weights_have_the_name_that_the_configuration_gives_them() -> None:
    group = {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}
    found = said(
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"group_0": {**group, "targets": ["Linear"]}},
            "sparsity_config": {"format": "sparse-bitmask"},
        }
    )
    scheme = found.scheme_of("x")
    assert facts(scheme) == {"called": "sparse-bitmask"}
    assert describe(scheme) == "sparse-bitmask"


def test_what_compressed_tensors_leaves_out_has_its_defaults() -> None:
    found = said(compressed({"num_bits": 4, "group_size": 64}))
    assert facts(found.scheme_of("x")) == {
        "format": "int-pack",
        "bits": 4,
        "group": 64,
        "symmetric": True,
        **GROUP,
    }
    whole = said(compressed({"group_size": -1, "type": "float"}))
    assert facts(whole.scheme_of("x")) == PRESETS["FP8_DYNAMIC"]
    text = said(compressed({"type": "float", "strategy": "block", "block_structure": "128x128"}))
    assert facts(text.scheme_of("x")) == PRESETS["FP8_BLOCK"]


def test_names_count_before_expressions_and_expressions_before_classes() -> None:
    def group(bits: int, *targets: str, form: str | None = None) -> dict[str, Any]:
        weights = {"num_bits": bits, "type": "int", "strategy": "channel"}
        return {"targets": list(targets), "weights": weights, "format": form}

    found = said(
        {
            "quant_method": "compressed-tensors",
            "format": "mixed-precision",
            "config_groups": {
                "a": group(8, "Linear", form="int-quantized"),
                "b": group(4, "re:.*experts.*", form="pack-quantized"),
                "c": group(2, "model.experts.0.up_proj", form="pack-quantized"),
                "d": {"targets": ["re:.*kv.*"], "weights": None, "input_activations": {}},
            },
            "ignore": ["re:.*gate$", "lm_head"],
        }
    )
    bits = {
        name: getattr(found.scheme_of(name), "bits", None)
        for name in ("model.q", "model.experts.1.up_proj", "model.experts.0.up_proj", "model.gate",
                     "model.kv", "lm_head")
    }  # fmt: skip
    assert bits == {
        "model.q": 8,
        "model.experts.1.up_proj": 4,
        "model.experts.0.up_proj": 2,
        "model.gate": None,
        "model.kv": None,
        "lm_head": None,
    }
    assert [s.bits for s in found.schemes] == [2, 4, 8]
    assert found.scheme_of("model.q").named is False
    assert found.scheme_of("model.experts.0.up_proj").named is True


@pytest.mark.parametrize("case", ["modelopt_nvfp4", "modelopt_fp8", "modelopt_mixed"])
def test_the_copy_in_config_json_says_what_the_file_of_modelopt_says(case: str) -> None:
    files = json.loads((CONFIGS / "modelopt.json").read_text())[case]
    own = read(modelopt=files["hf_quant_config.json"])
    copy = read(config=files["config.json"])
    assert own is not None
    assert copy is not None
    for name in (
        "lm_head",
        "model.layers.0.self_attn.q_proj",
        "model.layers.0.mlp.up_proj",
        "model.layers.0.mlp.down_proj",
        "model.layers.1.self_attn.q_proj",
    ):
        assert facts(own.scheme_of(name)) == facts(copy.scheme_of(name)), name
    both = read(config=files["config.json"], modelopt=files["hf_quant_config.json"])
    assert both is not None
    assert both.place == "config.json#quantization_config"
    assert both.beside is not None
    assert both.beside.schemes == own.schemes


def test_schemes_of_modelopt() -> None:
    cases = json.loads((CONFIGS / "modelopt.json").read_text())
    nvfp4 = read(modelopt=cases["modelopt_nvfp4"]["hf_quant_config.json"])
    assert facts(nvfp4.scheme_of("model.layers.1.mlp.up_proj")) == {
        "format": "nvfp4",
        "bits": 4,
        "group": 16,
        "granularity": "group",
        "form": "modelopt",
    }
    assert nvfp4.scheme_of("model.layers.0.self_attn.q_proj") is None
    mixed = read(modelopt=cases["modelopt_mixed"]["hf_quant_config.json"])
    named = {
        name: facts(mixed.scheme_of(f"model.layers.0.{name}"))
        for name in ("self_attn.q_proj", "mlp.down_proj", "mlp.gate")
    }
    assert named == {
        "self_attn.q_proj": {"format": "fp8", "bits": 8, "granularity": "tensor"},
        "mlp.down_proj": {"format": "int4-rows", "bits": 4, "group": 128, "granularity": "group"},
        "mlp.gate": None,
    }
    # a cache alone is encoded
    cache = read(modelopt={"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}})
    assert cache.scheme_of("model.layers.0.self_attn.q_proj") is None
    unknown = read(modelopt={"quantization": {"quant_algo": "FP2"}})
    assert facts(unknown.scheme_of("x")) == {}


def test_schemes_of_transformers_fp8() -> None:
    deepseek = said(
        {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "weight_block_size": [128, 128],
            "activation_scheme": "dynamic",
        }
    )
    block = {"format": "fp8-block", "bits": 8, "block": (128, 128), "granularity": "block"}
    assert facts(deepseek.scheme_of("model.layers.0.self_attn.o_proj")) == block
    mistral = said({"quant_method": "fp8", "weight_block_size": None, "activation_scheme": "static",
                    "modules_to_not_convert": ["model.vision_tower", "lm_head"]})  # fmt: skip
    assert facts(mistral.scheme_of("model.layers.0.o_proj")) == {"format": "fp8", "bits": 8}
    assert mistral.scheme_of("model.vision_tower.blocks.0.o_proj") is None
    minimax = said({"quant_method": "fp8", "weight_block_size": [128, 128],
                    "ignored_layers": ["gate"]})  # fmt: skip
    assert minimax.scheme_of("model.layers.0.gate") is None
    v4 = said({"quant_method": "fp8", "weight_block_size": [128, 128], "expert_dtype": "fp4"})
    assert facts(v4.scheme_of("layers.0.ffn.experts.3.w1"))["format"] == "mxfp4"
    assert facts(v4.scheme_of("layers.0.ffn.shared_experts.w1")) == block
    for more in ({"expert_dtype": "fp4"}, {"text_config": {"expert_dtype": "fp4"}}):
        released = said({"quant_method": "fp8", "weight_block_size": [128, 128]}, **more)
        assert facts(released.scheme_of("layers.0.ffn.experts.3.w1"))["format"] == "mxfp4"
        assert facts(released.scheme_of("layers.0.attn.wq_a")) == block
    groups = said({"quant_method": "fp8", "weight_block_size": [1, 32]})
    assert facts(groups.scheme_of("x")) == PRESETS["MXFP8"]
    open_ = said({"quant_method": "fp8", "fmt": "e4m3"})
    assert facts(open_.scheme_of("x")) == {"bits": 8}
    inside = read(config={"text_config": {"quantization_config": {"quant_method": "fp8"}}})
    assert inside.place == "config.json#text_config.quantization_config"


def test_schemes_of_gptq() -> None:
    quantization = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 128,
        "sym": True,
        "desc_act": False,
        "checkpoint_format": "gptq",
        "dynamic": {
            r"-:model\.layers\.0\..*": {},
            r"+:.*\.down_proj": {"bits": 8, "group_size": -1},
            r".*\.up_proj": {"sym": False},
        },
    }
    found = said(quantization)
    form = {"format": "gptq", "bits": 4, "group": 128, "granularity": "group", "form": "v1"}
    assert facts(found.scheme_of("model.layers.1.q_proj")) == {**form, "symmetric": True}
    assert found.scheme_of("model.layers.0.down_proj") is None
    wide = {"format": "gptq", "bits": 8, "granularity": "channel", "symmetric": True, "form": "v1"}
    assert facts(found.scheme_of("model.layers.1.down_proj")) == wide
    assert facts(found.scheme_of("model.layers.1.up_proj")) == {**form, "symmetric": False}
    assert found.scheme_of("lm_head") is None
    assert found.scheme_of("model.layers.1.down_proj").place.endswith(r"dynamic.+:.*\.down_proj")
    head = said({**quantization, "lm_head": True, "checkpoint_format": "gptq_v2"})
    assert head.scheme_of("lm_head").form == "v2"
    some = said({"quant_method": "gptq", "bits": 4, "modules_in_block_to_quantize": [["mlp.up"]]})
    assert some.scheme_of("model.layers.0.mlp.up").bits == 4
    assert some.scheme_of("model.layers.0.mlp.warmup") is None


def test_schemes_of_awq_mxfp4_and_bitsandbytes() -> None:
    awq = said({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True,
                "version": "GEMM", "modules_to_not_convert": ["visual"]})  # fmt: skip
    assert facts(awq.scheme_of("model.layers.0.q_proj")) == {
        "format": "awq",
        "bits": 4,
        "group": 128,
        "granularity": "group",
        "symmetric": False,
        "form": "gemm",
    }
    assert awq.scheme_of("visual.blocks.0.attn") is None
    other = said({"quant_method": "awq", "bits": 4, "version": "marlin"})
    assert facts(other.scheme_of("x")) == {"format": "awq", "bits": 4}
    gpt_oss = said(
        {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
        }
    )
    assert facts(gpt_oss.scheme_of("model.layers.3.mlp.experts"))["format"] == "mxfp4"
    assert gpt_oss.scheme_of("model.layers.3.mlp.router") is None
    assert gpt_oss.scheme_of("model.layers.3.self_attn.q_proj") is None
    four = said({"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False,
                 "bnb_4bit_quant_type": "nf4", "llm_int8_skip_modules": ["lm_head"]})  # fmt: skip
    assert facts(four.scheme_of("x")) == {"format": "bnb-4bit", "bits": 4, "form": "nf4"}
    assert four.scheme_of("lm_head") is None
    eight = said({"quant_method": "bitsandbytes", "_load_in_8bit": True})
    assert facts(eight.scheme_of("x"))["format"] == "bnb-int8"


def by_torchao(kind: str, **data: Any) -> dict[str, Any]:
    return {"_type": kind, "_version": 2, "_data": data}


def torchao(config: Any, **more: Any) -> Any:
    return said({"quant_method": "torchao", "quant_type": {"default": config}, **more})


ROW, TENSOR = by_torchao("PerRow", dim=-1), by_torchao("PerTensor")
FLOAT8 = "Float8DynamicActivationFloat8WeightConfig"


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        (
            by_torchao("Float8WeightOnlyConfig", granularity=ROW),
            {"format": "fp8", "bits": 8, "granularity": "channel"},
        ),
        # of activations, and of weights
        (
            by_torchao(FLOAT8, granularity=[ROW, TENSOR]),
            {"format": "fp8", "bits": 8, "granularity": "tensor"},
        ),
        (by_torchao(FLOAT8), {"format": "fp8", "bits": 8}),
        (
            by_torchao(FLOAT8, granularity=[
                by_torchao("PerBlock", block_size=[1, 128]),
                by_torchao("PerBlock", block_size=[128, 128]),
            ]),
            {"format": "fp8-block", "bits": 8, "block": (128, 128), "granularity": "block"},
        ),
        (
            by_torchao("Int8WeightOnlyConfig", granularity=by_torchao("PerGroup", group_size=32)),
            {"format": "int8", "bits": 8, "group": 32, "granularity": "group"},
        ),
        (by_torchao("Int4WeightOnlyConfig", group_size=64), {"bits": 4, "group": 64}),
        (
            by_torchao("MXDynamicActivationMXWeightConfig", block_size=32,
                       weight_dtype={"_type": "torch.dtype", "_data": "float4_e2m1fn_x2"}),
            {"format": "mxfp4", "bits": 4, "group": 32, "granularity": "group"},
        ),
        (
            by_torchao("NVFP4WeightOnlyConfig"),
            {"format": "nvfp4", "bits": 4, "group": 16, "granularity": "group"},
        ),
        (by_torchao("SomeNewConfig", granularity=ROW), {}),
    ],
)  # fmt: skip
def test_schemes_of_torchao(config: Any, wanted: dict[str, Any]) -> None:
    found = torchao(config, modules_to_not_convert=["lm_head"])
    assert facts(found.scheme_of("model.q_proj")) == wanted
    assert found.scheme_of("lm_head") is None


def test_torchao_chooses_by_parameter_by_module_by_expression_and_by_default() -> None:
    eight, four = by_torchao("Float8WeightOnlyConfig"), by_torchao("NVFP4WeightOnlyConfig")
    chosen = {
        # whole names: this one has no say in `down_proj2`
        r"re:.*\.down_proj": four,
        r"re:.*\.down_proj\.weight": eight,
        "model.0.up_proj": None,
        "model.1.up_proj": None,
        "model.1.up_proj.weight": four,
        "_default": by_torchao("Int8WeightOnlyConfig"),
    }
    for kind, name in (
        ("FqnToConfig", "fqn_to_config"),
        ("ModuleFqnToConfig", "module_fqn_to_config"),
    ):
        found = torchao(by_torchao(kind, **{name: chosen}))
        formats = {
            module: None if (one := found.scheme_of(module)) is None else one.format
            for module in (
                "model.0.up_proj", "model.1.up_proj", "model.1.down_proj", "model.1.down_proj2", "x"
            )
        }  # fmt: skip
        assert formats == {
            "model.0.up_proj": None,
            "model.1.up_proj": "nvfp4",
            "model.1.down_proj": "fp8",
            "model.1.down_proj2": "int8",
            "x": "int8",
        }
        assert found.scheme_of("model.1.up_proj").named
        assert found.scheme_of("model.1.up_proj").place.endswith(f"default._data.{name}")
        assert not found.scheme_of("x").named


@pytest.mark.parametrize(
    ("quantization", "words"),
    [
        ({"quant_type": {"default": "int8"}}, "an object is expected"),
        ({"quant_type": {"a": {}, "default": {}}}, "one configuration, under `default`"),
        ({"quant_type": {"default": {"_type": 3}}}, "text is expected"),
        ({"quant_type": {"default": by_torchao(FLOAT8, granularity=3)}}, "an object is expected"),
        (
            {"quant_type": {"default": by_torchao("FqnToConfig", fqn_to_config={"re:(": {}})}},
            "the expression",
        ),
        (
            {"quant_type": {"default": by_torchao("FqnToConfig", fqn_to_config={"re:(a)\\1": {}})}},
            "the expression",
        ),
    ],
)
def test_what_torchao_would_not_write_is_refused(quantization: Any, words: str) -> None:
    with pytest.raises(MigrateError, match=words) as caught:
        said({"quant_method": "torchao", **quantization})
    assert [found.code for found in caught.value.diagnostics] == ["M513"]


def test_an_old_text_of_torchao_says_nothing_of_the_format() -> None:
    found = said({"quant_method": "torchao", "quant_type": "int8_weight_only"})
    assert facts(found.scheme_of("x")) == {}


def test_no_configuration_and_one_of_a_method_that_is_not_known() -> None:
    assert read() is None
    assert read(config={"model_type": "llama", "quantization_config": None}) is None
    other = said({"quant_method": "aqlm", "nbits_per_codebook": 16})
    assert other.method == "aqlm"
    assert describe(other.scheme_of("x")) == "a format that is not known here"


def test_a_contradiction_names_the_module_and_both_readings() -> None:
    found = said(compressed({"num_bits": 4, "type": "int", "group_size": 128},
                            format="pack-quantized", ignore=["lm_head"]))  # fmt: skip
    said_of = found.scheme_of("model.q_proj")
    stored = Scheme("int-pack", 4, 64, place="tensors")
    assert contradiction("model.q_proj", said_of, stored) == (
        "model.q_proj is int-pack, 4 bits, groups of 64 by its tensors, and int-pack, 4 bits, "
        "groups of 128, symmetric by "
        "config.json#quantization_config.config_groups.group_0.weights"
    )
    assert contradiction("model.q_proj", said_of, Scheme("int-pack", 4)) is None
    # a norm is not a Linear
    assert contradiction("model.norm", said_of, None) is None
    assert "is plain by its tensors" in str(
        contradiction("model.norm", said_of._replace(named=True), None)
    )
    assert contradiction("lm_head", None, stored) == (
        "lm_head is int-pack, 4 bits, groups of 64 by its tensors, and plain by the configuration"
    )


@pytest.mark.parametrize(
    ("quantization", "place"),
    [
        ([], "config.json#quantization_config"),
        ({"quant_method": 3}, "config.json#quantization_config.quant_method"),
        ({"quant_method": "gptq", "bits": "4"}, "config.json#quantization_config.bits"),
        ({"quant_method": "gptq", "bits": True}, "config.json#quantization_config.bits"),
        ({"quant_method": "gptq", "bits": 2**70}, "config.json#quantization_config.bits"),
        ({"quant_method": "gptq", "group_size": 0}, "config.json#quantization_config.group_size"),
        ({"quant_method": "gptq", "dynamic": ["x"]}, "config.json#quantization_config.dynamic"),
        ({"quant_method": "gptq", "dynamic": {"x": 1}}, "quantization_config.dynamic.x"),
        ({"quant_method": "gptq", "dynamic": {"+:(?<=a)": {}}}, "quantization_config.dynamic: the"),
        ({"quant_method": "gptq", "modules_in_block_to_quantize": [[1]]}, "to_quantize"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size"),
        ({"quant_method": "fp8", "weight_block_size": [0, 1]}, "weight_block_size"),
        ({"quant_method": "fp8", "fmt": "e3m4"}, "quantization_config.fmt"),
        ({"quant_method": "fp8", "modules_to_not_convert": "lm_head"}, "modules_to_not_convert"),
        ({"quant_method": "fp8", "modules_to_not_convert": ["("]}, "modules_to_not_convert: the"),
        ({"quant_method": "awq", "zero_point": 1}, "quantization_config.zero_point"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": True}, "8bit"),
        (compressed({"type": "complex"}), "group_0.weights.type"),
        (compressed({"strategy": "group"}), "group_0.weights.group_size"),
        (compressed({"strategy": "block", "block_structure": "128"}), "block_structure"),
        (compressed({}, ignore=["re:a**"]), "quantization_config.ignore: the"),
        ({"quant_method": "compressed-tensors", "config_groups": {"W8A8": ["Linear"]}}, "W8A8"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": []},
         "quantized_layers"),
    ],
)  # fmt: skip
def test_what_is_not_as_its_library_writes_it_is_refused_with_its_place(
    quantization: Any, place: str
) -> None:
    with pytest.raises(CheckpointError) as caught:
        said(quantization)
    (found,) = caught.value.diagnostics
    assert found.code == "M513"
    assert place in found.message
