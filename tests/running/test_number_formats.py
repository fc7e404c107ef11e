"""`inspect` names the number format of each group of tensors, with its evidence."""

from __future__ import annotations

import json
import struct
from math import prod
from pathlib import Path

import pytest
from header_files import write_headers
from work import steps

import migrate
from migrate.cli import render
from migrate.core.spec import spec
from migrate.running.number_formats import describe_formats
from migrate.source.quantization import read_quantization

E4M3, BF16, F32, U8 = "float8_e4m3fn", "bfloat16", "float32", "uint8"
HIDDEN = 4096


def nvfp4(layers=32):
    """A checkpoint as ModelOpt exports it: four linear layers of each attention are encoded."""
    tensors = {"lm_head.weight": (BF16, (32000, HIDDEN))}
    for n in range(layers):
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            module = f"model.layers.{n}.self_attn.{name}"
            rows = 1024 if name in ("k_proj", "v_proj") else HIDDEN
            tensors |= {
                f"{module}.weight": (U8, (rows, HIDDEN // 2)),
                f"{module}.weight_scale": (E4M3, (rows, HIDDEN // 16)),
                f"{module}.weight_scale_2": (F32, ()),
                f"{module}.input_scale": (F32, ()),
            }
        tensors[f"model.layers.{n}.input_layernorm.weight"] = (BF16, (HIDDEN,))
    return tensors


def formats(tensors):
    specs = {key: spec(dtype, shape) for key, (dtype, shape) in tensors.items()}
    return describe_formats(specs)


def text(folder):
    return [
        line
        for line in render.inspection(migrate.inspect(folder).to_json()).splitlines()
        if line.startswith(("numbers", "           "))
    ]


def test_a_group_is_named_with_its_modules_its_count_and_its_parts(tmp_path):
    folder = write_headers(tmp_path / "m", nvfp4())
    assert text(folder)[-3:] == [
        "numbers  q,k,v,o_proj ×128   nvfp4 (ModelOpt), form modelopt",
        (
            "           weight uint8 [4096, 2048], weight_scale float8_e4m3fn [4096, 256], "
            "weight_scale_2 f32 [], input_scale f32 []"
        ),
        "numbers  lm_head   bf16",
    ]


def test_the_document_holds_the_same_for_programs(tmp_path):
    report = migrate.inspect(write_headers(tmp_path / "m", nvfp4()))
    (group,) = report.number_formats
    assert group.count == 128
    assert group.names == ("q_proj", "k_proj", "v_proj", "o_proj")
    assert group.keys == ("model.layers.{0..31}.self_attn.{q,k,v,o}_proj.weight",)
    assert group.readings[0].to_json() == {
        "format": "nvfp4", "producer": "ModelOpt", "arguments": {"form": "modelopt"},
    }  # fmt: skip
    assert (group.decides, group.missing, group.problem) == ((), (), None)
    assert [p.to_json() for p in report.plain] == [
        {"dtype": "bfloat16", "names": ["lm_head"], "count": 1, "contradiction": None}
    ]


def test_formats_are_told_apart_within_a_checkpoint():
    found = formats({
        "a.experts.gate_up_proj_blocks": (U8, (4, 64, 8, 16)),
        "a.experts.gate_up_proj_scales": (U8, (4, 64, 8)),
        "a.q_proj.weight": (E4M3, (576, 7168)),
        "a.q_proj.weight_scale_inv": (F32, (5, 56)),
        "a.k_proj.weight": (E4M3, (64, 7168)),
        "a.k_proj.weight_scale_inv": (F32, (1, 56)),
        "a.v_proj.weight": ("int8", (32, 512)),
        "a.v_proj.SCB": (F32, (32,)),
    })  # fmt: skip
    assert [
        (g["names"], g["count"], g["readings"][0]["format"], g["readings"][0]["arguments"])
        for g in found["number_formats"]
    ] == [
        (["gate_up_proj"], 1, "mxfp4", {"form": "blocks"}),
        # of one block of rows the shape does not tell how many they are
        (["q_proj", "k_proj"], 2, "fp8-block", {"rows": 128, "columns": 128}),
        (["v_proj"], 1, "bnb-int8", {}),
    ]


def test_several_readings_are_given_with_the_argument_that_decides(tmp_path):
    tensors = {
        "a.q.qweight": ("int32", (512, 4096)), "a.q.qzeros": ("int32", (32, 512)),
        "a.q.scales": ("float16", (32, 4096)), "a.q.g_idx": ("int32", (4096,)),
    }  # fmt: skip
    (group,) = formats(tensors)["number_formats"]
    assert group["decides"] == ["form"]
    assert [r["arguments"] for r in group["readings"]] == [
        {"bits": 4, "group": 128, "form": form} for form in ("v1", "v2")
    ]
    assert text(write_headers(tmp_path / "m", tensors))[-3:] == [
        "numbers  q   gptq (GPTQModel, AutoGPTQ), bits 4, group 128",
        (
            "           qweight i32 [512, 4096], qzeros i32 [32, 512], scales f16 [32, 4096], "
            "g_idx i32 [4096]"
        ),
        "           either form v1 or form v2: `form` decides",
    ]


def configured(tmp_path, tensors, quantization):
    config = {"model_type": "llama", "quantization_config": quantization}
    folder = write_headers(tmp_path / "m", tensors, config)
    return migrate.inspect(folder), text(folder)


GPTQ = {
    "a.q.qweight": ("int32", (512, 4096)), "a.q.qzeros": ("int32", (32, 512)),
    "a.q.scales": ("float16", (32, 4096)), "a.q.g_idx": ("int32", (4096,)),
}  # fmt: skip
PACKED = {
    "a.q.weight_packed": ("int32", (32, 64)), "a.q.weight_scale": (BF16, (32, 4)),
    "a.q.weight_shape": ("int64", (2,)),
}  # fmt: skip


@pytest.mark.parametrize(
    ("tensors", "quantization", "arguments", "says"),
    [
        (
            GPTQ,
            {
                "quant_method": "gptq", "bits": 4, "group_size": 128,
                "checkpoint_format": "gptq_v2",
            },
            {"bits": 4, "group": 128, "form": "v2"},
            "gptq, 4 bits, groups of 128",
        ),
        (
            PACKED,
            {
                "quant_method": "compressed-tensors", "format": "pack-quantized",
                "config_groups": {
                    "group_0": {
                        "targets": ["Linear"],
                        "weights": {
                            "num_bits": 8, "type": "int", "strategy": "group", "group_size": 64,
                        },
                    }
                },
            },
            {"bits": 8, "group": 64},
            "int-pack, 8 bits, groups of 64",
        ),
    ],
    ids=["gptq", "pack"],
)  # fmt: skip
def test_of_several_readings_the_configuration_decides(
    tmp_path, tensors, quantization, arguments, says
):
    report, lines = configured(tmp_path, tensors, quantization)
    (group,) = report.number_formats
    assert [dict(r.arguments) for r in group.readings] == [arguments]
    assert (group.decides, group.contradiction) == ((), None)
    assert group.configured is not None
    assert group.configured.startswith(says)
    assert f"           {group.configured}" in lines


@pytest.mark.parametrize(
    ("tensors", "quantization", "found", "said"),
    [
        (
            {"a.q.weight": (E4M3, (512, 512)), "a.q.weight_scale_inv": (F32, (4, 4))},
            {"quant_method": "fp8", "weight_block_size": [64, 64]},
            "fp8-block, blocks of 128 x 128",
            "fp8-block, 8 bits, blocks of 64 x 64 by config.json#quantization_config",
        ),
        (
            GPTQ,
            {"quant_method": "gptq", "bits": 8, "group_size": 128},
            "gptq, 4 bits, groups of 128",
            "gptq, 8 bits, groups of 128",
        ),
        (
            GPTQ,
            {"quant_method": "gptq", "bits": 4, "group_size": 64},
            "gptq, 4 bits, groups of 128",
            "gptq, 4 bits, groups of 64",
        ),
        (
            {"a.q.weight": ("int8", (32, 512)), "a.q.SCB": (F32, (32,))},
            {"quant_method": "fp8", "weight_block_size": [128, 128]},
            "bnb-int8",
            "fp8-block, 8 bits, blocks of 128 x 128 by",
        ),
        (
            {"a.q.weight": (E4M3, (512, 512)), "a.q.weight_scale_inv": (F32, (4, 4))},
            {
                "quant_method": "fp8", "weight_block_size": [128, 128],
                "modules_to_not_convert": ["a.q"],
            },
            "fp8-block, blocks of 128 x 128",
            "plain by",
        ),
    ],
    ids=["block", "bits", "group", "format", "plain"],
)  # fmt: skip
def test_where_configuration_and_tensors_differ_both_readings_are_named(
    tmp_path, tensors, quantization, found, said
):
    report, lines = configured(tmp_path, tensors, quantization)
    (group,) = report.number_formats
    assert group.contradiction is not None
    assert group.contradiction.startswith(f"a.q is {found} by its tensors, and {said}")
    assert f"           contradiction: {group.contradiction}" in lines


def test_a_configuration_that_cannot_be_read_is_a_note(tmp_path):
    report, _ = configured(tmp_path, GPTQ, {"quant_method": "gptq", "bits": "four"})
    assert [note for note in report.notes if "quantization_config.bits" in note]
    assert report.number_formats[0].decides == ("form",)


def test_a_missing_part_is_named(tmp_path):
    tensors = nvfp4(1)
    del tensors["model.layers.0.self_attn.v_proj.weight_scale_2"]
    whole, broken = formats(tensors)["number_formats"]
    assert (whole["count"], whole["missing"]) == (3, [])
    assert (broken["names"], broken["missing"]) == (["v_proj"], ["weight_scale_2"])
    assert "           missing: weight_scale_2" in text(write_headers(tmp_path / "m", tensors))


@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        (
            {"a.q.weight": (E4M3, (256, 256)), "a.q.weight_scale_inv": (F32, (3, 7, 2))},
            "dtypes and shapes of these parts are those of no known format",
        ),
        (
            {"a.q.weight_packed": (U8, (256, 128))},
            "the other parts are missing: weight_scale",
        ),
        (
            {"a.q.weight": (E4M3, (256, 256)), "a.q.bias": (BF16, (256,))},
            "no scale under a known name",
        ),
        (
            {"a.q.weight": (E4M3, (256, 256)), "a.q.factors": (F32, (2, 2))},
            "no scale under a known name, and factors is all but certainly one",
        ),
    ],
    ids=["shapes", "alone", "no scale", "unknown name"],
)
def test_what_is_in_no_known_format_is_named_with_what_it_lacks(tensors, problem):
    (group,) = formats(tensors)["number_formats"]
    assert group["problem"].startswith(problem)
    assert (group["names"], group["readings"]) == (["q"], [])


def test_a_key_with_a_rank_has_its_parts_on_that_rank():
    found = formats({
        "a.q.weight@0": (E4M3, (256, 256)), "a.q.weight_scale_inv@0": (F32, (2, 2)),
        "a.q.weight@1": (E4M3, (256, 256)), "a.q.weight_scale_inv@1": (F32, (2, 2)),
    })["number_formats"]  # fmt: skip
    assert [(g["names"], g["count"], g["problem"]) for g in found] == [(["q"], 2, None)]


def test_integers_without_parts_are_no_matter():
    tensors = {"a.mask.weight": (U8, (8, 8)), "a._extra_state": (U8, (100,)),
               "a.ids": ("int32", (8,)), "a.weight": (F32, (4, 4))}  # fmt: skip
    assert formats(tensors) == {"number_formats": [], "plain": []}


def test_a_plain_checkpoint_is_asked_once_per_spec():
    one = spec(BF16, (4, 4))
    few, many = ({f"m.{n}.weight": one for n in range(count)} for count in (1000, 8000))
    assert describe_formats(few) == {"number_formats": [], "plain": []}
    # a dict of the distinct specs is built, a step for each key
    assert steps(lambda: describe_formats(many)) < 9 * steps(lambda: describe_formats(few))


def test_looking_for_formats_takes_work_as_there_are_keys():
    def look(layers):
        tensors = nvfp4(layers)
        specs = {key: spec(*one) for key, one in tensors.items()}
        return lambda: describe_formats(specs)

    assert steps(look(80)) < 1.5 * 8 * steps(look(10))


def test_a_checkpoint_that_transformers_wrote_is_as_its_configuration_says():
    folder = Path(__file__).parents[1] / "data" / "hf" / "fp8_dequant_deepseek_v3" / "hub"
    report = migrate.inspect(folder)
    (group,) = report.number_formats
    assert (group.count, group.readings[0].format) == (28, "fp8-block")
    assert group.readings[0].arguments == {"rows": 4, "columns": 4}
    said = "fp8-block, 8 bits, blocks of 4 x 4 (config.json#quantization_config)"
    assert group.configured == said
    assert group.contradiction is None
    assert [(p.dtype, p.count) for p in report.plain] == [("bfloat16", 3)]


def quantization(bits, group):
    weights = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": group}
    return {
        "quant_method": "compressed-tensors", "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }  # fmt: skip


def packed(tmp_path, shape, words=(32, 64), groups=(32, 4), config=None):
    """A matrix in words, with the shape of its numbers beside it."""
    folder = tmp_path / "m"
    folder.mkdir()
    tensors = {
        "a.q.weight_packed": ("I32", list(words)),
        "a.q.weight_scale": ("BF16", list(groups)),
        "a.q.weight_shape": ("I64", [len(shape)]),
    }
    header, data = {}, b""
    for key, (dtype, lengths) in tensors.items():
        size = prod(lengths) * {"I32": 4, "BF16": 2, "I64": 8}[dtype]
        header[key] = {
            "dtype": dtype, "shape": lengths, "data_offsets": [len(data), len(data) + size],
        }  # fmt: skip
        said = struct.pack(f"<{len(shape)}q", *shape)
        data += said if key.endswith("shape") else bytes(size)
    raw = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + data)
    if config is not None:
        (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    return folder


@pytest.mark.parametrize(
    ("shape", "words", "groups", "arguments"),
    [
        ((32, 512), (32, 64), (32, 4), {"bits": 4, "group": 128}),
        ((32, 256), (32, 64), (32, 4), {"bits": 8, "group": 64}),
        ((32, 512), (32, 48), (32, 4), {"bits": 3, "group": 128}),
        ((32, 512), (32, 52), (32, 4), {"bits": 3, "form": "words", "group": 128}),
        ((32, 1024), (32, 64), (32, 8), {"bits": 2, "group": 128}),
    ],
)
def test_the_stored_shape_says_how_many_bits_a_code_has(tmp_path, shape, words, groups, arguments):
    (group,) = migrate.inspect(packed(tmp_path, shape, words, groups)).number_formats
    assert [(r.format, dict(r.arguments)) for r in group.readings] == [("int-pack", arguments)]
    assert group.decides == ()


@pytest.mark.parametrize("shape", [(32, 500_000), (31, 512), (32, -512)])
def test_a_stored_shape_that_no_reading_has_is_said(tmp_path, shape):
    (group,) = migrate.inspect(packed(tmp_path, shape)).number_formats
    assert group.readings == ()
    assert group.problem == (
        f"weight_shape says {list(shape)}, which is the shape of no known format with these parts"
    )


@pytest.mark.parametrize(("bits", "group", "agrees"), [(3, 128, True), (4, 128, False)])
def test_the_stored_shape_is_compared_with_the_configuration(tmp_path, bits, group, agrees):
    # of 52 words the header alone would make 520 columns, and groups of 130
    folder = packed(tmp_path, (32, 512), (32, 52), (32, 4), quantization(bits, group))
    (found,) = migrate.inspect(folder).number_formats
    assert dict(found.readings[0].arguments) == {"bits": 3, "form": "words", "group": 128}
    assert (found.contradiction is None) is agrees


def test_tensors_alike_whose_stored_shapes_differ_are_two_groups(tmp_path):
    specs = {
        f"{m}.{name}": spec(*found)
        for m in "abc"
        for name, found in {
            "weight_packed": ("int32", (32, 64)), "weight_scale": (BF16, (32, 4)),
            "weight_shape": ("int64", (2,)),
        }.items()
    }  # fmt: skip
    shapes = {"a.weight_shape": (32, 512), "b.weight_shape": (32, 256), "c.weight_shape": (32, 512)}
    found = describe_formats(specs, elements=shapes.get)["number_formats"]
    assert [(g["names"], g["readings"][0]["arguments"]) for g in found] == [
        (["a", "c"], {"bits": 4, "group": 128}),
        (["b"], {"bits": 8, "group": 64}),
    ]


def test_what_the_configuration_says_of_one_reading_is_not_read(tmp_path):
    def refuse(key):
        raise AssertionError(key)

    specs = {
        "a.weight_packed": spec("int32", (64, 64)), "a.weight_scale": spec(BF16, (64, 4)),
        "a.weight_shape": spec("int64", (2,)),
    }  # fmt: skip
    config = {"quantization_config": quantization(4, 128)}
    said = read_quantization({"config.json": config}.get)
    (group,) = describe_formats(specs, lambda: said, refuse)["number_formats"]
    assert [r["arguments"] for r in group["readings"]] == [{"bits": 4, "group": 128}]


@pytest.mark.parametrize(
    ("weight", "scale"), [("._weight_qdata", "._weight_scale"), (".weight.qdata", ".weight.scale")]
)
def test_blocks_of_torchao_are_named_and_counted(tmp_path, weight, scale):
    tensors = {}
    for name, (rows, columns) in {"q": (256, 384), "k": (128, 384), "o": (384, 256)}.items():
        tensors[f"a.{name}{weight}"] = (E4M3, (rows, columns))
        tensors[f"a.{name}{scale}"] = (F32, (rows // 128, columns // 128))
    kind = {"quant_method": "torchao", "quant_type": {"default": {
        "_type": "Float8DynamicActivationFloat8WeightConfig", "_version": 2,
        "_data": {"granularity": [
            {"_type": "PerBlock", "_version": 1, "_data": {"block_size": [1, 128]}},
            {"_type": "PerBlock", "_version": 1, "_data": {"block_size": [128, 128]}},
        ]},
    }}}  # fmt: skip
    folder = write_headers(tmp_path / "m", tensors, {"quantization_config": kind})
    lines = text(folder)
    lines = lines[next(n for n, line in enumerate(lines) if line.startswith("numbers")) :]
    assert lines[0].endswith(" ×3   fp8-block (torchao), blocks of 128 × 128")
    assert "float8_e4m3fn [256, 384]" in lines[1]
    assert "blocks of 128 x 128 (config.json#quantization_config.quant_type.default)" in lines[2]


def test_tinygemm_is_named_with_the_reason_why_nothing_decodes_it(tmp_path):
    tensors = {
        "a.q._weight_qdata": ("int32", (512, 32, 32, 4)),
        "a.q._weight_scale_and_zero": (BF16, (32, 4096, 2)),
    }
    lines = text(write_headers(tmp_path / "m", tensors))
    assert lines[0] == "numbers  q   tinygemm (torchao)"
    assert lines[-1].startswith("           is not decoded: codes lie as the kernel of one device")


@pytest.mark.parametrize(
    ("tensors", "format", "producer"),
    [
        (
            {
                "m.experts.down_proj": (U8, (8, 64, 32)),
                "m.experts.down_proj_weight_scale": (E4M3, (8, 64, 4)),
                "m.experts.down_proj_weight_scale_2": (F32, (8,)),
                "m.experts.down_proj_input_scale": (F32, ()),
            },
            "nvfp4",
            "ModelOpt, stacked experts",
        ),
        (
            {
                "m.experts.down_proj": (U8, (8, 32, 96)),
                "m.experts.down_proj_weight_scale": (E4M3, (8, 4, 96)),
                "m.experts.down_proj_weight_scale_2": (F32, ()),
            },
            "nvfp4",
            "ModelOpt, stacked experts with groups along rows",
        ),
        (
            {
                "m.experts.down_proj": (E4M3, (8, 64, 64)),
                "m.experts.down_proj_weight_scale": (F32, ()),
                "m.experts.down_proj_input_scale": (F32, ()),
            },
            "fp8",
            "ModelOpt, stacked experts",
        ),
    ],
)
def test_stacked_experts_of_modelopt_are_named(tensors, format, producer):
    (group,) = formats(tensors)["number_formats"]
    assert [(r["format"], r["producer"]) for r in group["readings"]] == [(format, producer)]
    assert len(group["parts"]) == len(tensors)
