"""The names, dtypes and shapes of parts, as eleven libraries write them, and what they say."""

from __future__ import annotations

import pytest
from kit_layouts import goldens

from migrate import codecs
from migrate.codecs import _formats
from migrate.core.errors import OpError
from migrate.core.part_names import Convention, Endings, Length, PartNames, key_of_part, stored_part
from migrate.core.spec import spec
from migrate.ops.dequantize import codec_called
from migrate.running.number_formats import describe_formats

# what a library wrote of a weight of few rows, and what it is: format, arguments that shapes tell
WRITTEN = {
    "compressed-tensors FP8": (
        {"weight": "float8_e4m3fn 24 256", "weight_scale": "bfloat16 1"},
        [("fp8", {"granularity": "tensor"})],
    ),
    "compressed-tensors FP8_DYNAMIC": (
        {"weight": "float8_e4m3fn 24 256", "weight_scale": "bfloat16 24 1"},
        [("fp8", {"granularity": "channel"})],
    ),
    "compressed-tensors FP8_BLOCK": (
        {"weight": "float8_e4m3fn 256 576", "weight_scale": "bfloat16 2 5"},
        [("fp8-block", {"rows": 128, "columns": 128})],
    ),
    "compressed-tensors MXFP8": (
        {"weight": "float8_e4m3fn 24 256", "weight_scale": "uint8 24 8"}, [("mxfp8", {})],
    ),
    "compressed-tensors MXFP4": (
        {"weight_packed": "uint8 24 128", "weight_scale": "uint8 24 8"}, [("mxfp4", {})],
    ),
    "compressed-tensors NVFP4": (
        {
            "weight_packed": "uint8 24 128", "weight_scale": "float8_e4m3fn 24 16",
            "weight_global_scale": "float32 1", "input_global_scale": "float32 1",
        },
        [("nvfp4", {"form": "compressed-tensors"})],
    ),
    "compressed-tensors W8A8": (
        {"weight": "int8 32 512", "weight_scale": "bfloat16 32 1"},
        [("int8", {"granularity": "channel"})],
    ),
    "ModelOpt FP8": (
        {"weight": "float8_e4m3fn 24 256", "weight_scale": "float32", "input_scale": "float32"},
        [("fp8", {"granularity": "tensor"})],
    ),
    "ModelOpt FP8 per channel": (
        {"weight": "float8_e4m3fn 24 256", "weight_scale": "float32 24"},
        [("fp8", {"granularity": "channel"})],
    ),
    "ModelOpt FP8 blocks": (
        {"weight": "float8_e4m3fn 130 200", "weight_scale": "bfloat16 2 2"},
        [("fp8-block", {"rows": 128, "columns": 128})],
    ),
    "ModelOpt MXFP8": (
        {"weight": "float8_e4m3fn 24 256", "weight_scale": "uint8 24 8"}, [("mxfp8", {})],
    ),
    "ModelOpt MXFP4": (
        {"weight": "uint8 24 128", "weight_scale": "uint8 24 8"}, [("mxfp4", {})],
    ),
    "ModelOpt NVFP4": (
        {
            "weight": "uint8 24 128", "weight_scale": "float8_e4m3fn 24 16",
            "weight_scale_2": "float32", "input_scale": "float32",
        },
        [("nvfp4", {"form": "modelopt"})],
    ),
    "ModelOpt INT4 AWQ": (
        {"weight": "uint8 16 512", "weight_scale": "float32 32 4",
         "pre_quant_scale": "bfloat16 512"},
        [("int4-rows", {"group": 128})],
    ),
    "ModelOpt INT8": (
        {"weight": "int8 32 512", "weight_scale": "float32 32"},
        [("int8", {"granularity": "channel"})],
    ),
    "DeepSeek-V3": (
        {"weight": "float8_e4m3fn 576 7168", "weight_scale_inv": "float32 5 56"},
        [("fp8-block", {"rows": 128, "columns": 128})],
    ),
    "DeepSeek-V4": (
        {"weight": "float8_e4m3fn 512 7168", "scale": "float8_e8m0fnu 4 56"},
        [("fp8-block", {"rows": 128, "columns": 128})],
    ),
    "DeepSeek-V4 experts": (
        {"weight": "int8 2048 3584", "scale": "float8_e8m0fnu 2048 224"}, [("mxfp4", {})],
    ),
    "Mistral": (
        {"weight": "float8_e4m3fn 24 256", "weight_scale_inv": "float32",
         "activation_scale": "float32"},
        [("fp8", {"granularity": "tensor"})],
    ),
    "MiniMax": (
        {"weight": "float8_e4m3fn 24 256", "weight_scale_inv": "uint8 24 8"}, [("mxfp8", {})],
    ),
    "gpt-oss": (
        {"gate_up_proj_blocks": "uint8 4 64 8 16", "gate_up_proj_scales": "uint8 4 64 8"},
        [("mxfp4", {"form": "blocks"})],
    ),
    "gpt-oss of OpenAI": (
        {"mlp1_weight.blocks": "uint8 4 64 8 16", "mlp1_weight.scales": "uint8 4 64 8"},
        [("mxfp4", {"form": "blocks"})],
    ),
    "stacked experts of transformers 5": (
        {"gate_up_proj": "float8_e4m3fn 4 256 512", "gate_up_proj_scale_inv": "float32 4 2 4"},
        [("fp8-block", {"rows": 128, "columns": 128})],
    ),
    "torchao Float8 rows": (
        {"_weight_qdata": "float8_e4m3fn 24 256", "_weight_scale": "float32 24 1"},
        [("fp8", {"granularity": "channel"})],
    ),
    "torchao Float8": (
        {"_weight_qdata": "float8_e4m3fn 24 256", "_weight_scale": "float32 1 1"},
        [("fp8", {"granularity": "tensor"})],
    ),
    "torchao MXFP8, swizzled": (
        {"qdata": "float8_e4m3fn 24 256", "scale": "uint8 32 32"}, [("mxfp8", {"swizzled": True})],
    ),
    "torchao MXFP4": (
        {"qdata": "uint8 24 128", "scale": "float8_e8m0fnu 24 8"}, [("mxfp4", {})],
    ),
    "torchao NVFP4 of one level": (
        {"qdata": "uint8 24 128", "scale": "float8_e4m3fn 24 16"}, [("nvfp4", {})],
    ),
    "torchao NVFP4, swizzled": (
        {"qdata": "uint8 24 128", "scale": "float8_e4m3fn 32 64", "per_tensor_scale": "float32"},
        [("nvfp4", {"swizzled": True})],
    ),
    "Transformer Engine NVFP4": (
        {"_rowwise_data": "uint8 130 40", "_rowwise_scale_inv": "uint8 256 8",
         "_amax_rowwise": "float32 1"},
        [("nvfp4", {"form": "te", "swizzled": False}), ("nvfp4", {"form": "te", "swizzled": True})],
    ),
    "Transformer Engine blocks": (
        {"_rowwise_data": "uint8 129 130", "_rowwise_scale_inv": "float32 2 4"},
        [("fp8-block", {"rows": 128, "columns": 128, "form": "te"})],
    ),
    "Transformer Engine rows of blocks": (
        {"_rowwise_data": "uint8 128 256", "_rowwise_scale_inv": "float32 2 128"},
        [("fp8-block", {"rows": 1, "columns": 128, "form": "te"})],
    ),
    "GPTQ": (
        {"qweight": "int32 16 32", "qzeros": "int32 4 4", "scales": "float16 4 32",
         "g_idx": "int32 128"},
        [("gptq", {"bits": 4, "group": 32, "form": "v1"}),
         ("gptq", {"bits": 4, "group": 32, "form": "v2"})],
    ),
    "GPTQ of three bits": (
        {"qweight": "int32 48 32", "qzeros": "int32 4 3", "scales": "float16 4 32",
         "g_idx": "int32 512"},
        [("gptq", {"bits": 3, "group": 128, "form": "v1"}),
         ("gptq", {"bits": 3, "group": 128, "form": "v2"})],
    ),
    "AWQ": (
        {"qweight": "int32 128 4", "qzeros": "int32 4 4", "scales": "float16 4 32"},
        [("awq", {"group": 32, "form": "gemm"})],
    ),
    "AWQ for GEMV": (
        {"qweight": "int32 32 64", "qzeros": "int32 32 1", "scales": "float16 32 8"},
        [("awq", {"form": "gemv"})],
    ),
    "bitsandbytes NF4": (
        {"weight": "uint8 2048 1", "weight.absmax": "float32 64", "weight.quant_map": "float32 16",
         "weight.quant_state.bitsandbytes__nf4": "uint8 78"},
        [("bnb-4bit", {"form": "nf4", "blocksize": 64})],
    ),
    "bitsandbytes NF4, nested": (
        {"weight": "uint8 2048 1", "weight.absmax": "uint8 64", "weight.quant_map": "float32 16",
         "weight.nested_absmax": "float32 1", "weight.nested_quant_map": "float32 256",
         "weight.quant_state.bitsandbytes__nf4": "uint8 169"},
        [("bnb-4bit", {"form": "nf4", "blocksize": 64})],
    ),
    "bitsandbytes FP4": (
        {"weight": "uint8 8192 1", "weight.absmax": "float32 256", "weight.quant_map": "float32 16",
         "weight.quant_state.bitsandbytes__fp4": "uint8 79"},
        [("bnb-4bit", {"form": "fp4", "blocksize": 64})],
    ),
    "bitsandbytes int8": (
        {"weight": "int8 32 512", "SCB": "float32 32", "weight_format": "uint8"},
        [("bnb-int8", {})],
    ),
}  # fmt: skip


def specs_of(parts, prefix="m.3."):
    out = {}
    for name, text in parts.items():
        dtype, *lengths = text.split()
        out[prefix + name] = spec(dtype, tuple(map(int, lengths)))
    return out


def read(parts):
    """The readings of the one part that can be read as codes."""
    table, specs = codecs.part_names(), specs_of(parts)
    found = []
    for key in specs:
        for stem, first, _ in table.firsts.find(key):
            near = {end: specs[k] for end in table.partners(first)
                    if (k := key_of_part(stem, end)) in specs}  # fmt: skip
            found.append(table.read(first, {first: specs[key], **near}))
    return max(found, key=lambda readings: len(readings[0].endings) if readings else 0)


@pytest.mark.parametrize("name", WRITTEN)
def test_what_a_library_wrote_is_read_from_names_dtypes_and_shapes(name):
    parts, wanted = WRITTEN[name]
    readings = read(parts)
    assert [(r.format, dict(r.arguments)) for r in readings] == wanted
    assert not any(r.missing for r in readings)
    # each part that is there is explained
    assert {len(r.endings) for r in readings} == {len(parts)}


def test_weight_and_weight_scale_are_eight_formats():
    found = {
        tuple(sorted({(r.format, r.arguments.get("granularity")) for r in read(parts)}))
        for parts, _ in WRITTEN.values()
        if {"weight", "weight_scale"} <= set(parts)
    }
    assert len(found) == 8


def test_words_of_integers_have_several_readings_and_the_true_one_among_them():
    parts = {"weight_packed": "int32 32 64", "weight_scale": "bfloat16 32 4",
             "weight_shape": "int64 2"}  # fmt: skip
    readings = [dict(r.arguments) for r in read(parts)]
    assert {"bits": 4, "group": 128} in readings
    assert {"bits": 8, "group": 64} in readings
    assert all(r.format == "int-pack" for r in read(parts))


def test_three_bits_are_within_words_or_across_their_borders():
    # 512 columns are 48 words across borders and 52 within
    dense = read({"weight_packed": "int32 32 48", "weight_scale": "bfloat16 32 4"})
    words = read({"weight_packed": "int32 32 52", "weight_scale": "bfloat16 32 1"})
    assert {"bits": 3, "group": 128} in [dict(r.arguments) for r in dense]
    assert {"bits": 3, "form": "words"} in [dict(r.arguments) for r in words]


def test_a_part_that_is_missing_is_named():
    parts = {"weight": "uint8 24 128", "weight_scale": "float8_e4m3fn 24 16"}
    (reading,) = read(parts)
    assert (reading.format, reading.missing) == ("nvfp4", (".weight_scale_2",))


@pytest.mark.parametrize(
    "parts",
    [
        {"weight": "float8_e4m3fn 576 256", "weight_scale_inv": "float32 7 3 2"},
        {"weight": "float8_e4m3fn 24 256", "weight_scale_inv": "int64 1 2"},
        {"qweight": "int32 16 32", "qzeros": "int32 4 5", "scales": "float16 4 32"},
        {"gate_blocks": "uint8 4 64 8 16", "gate_scales": "uint8 4 64 9"},
    ],
    ids=["rank", "dtype", "zeros", "groups"],
)
def test_parts_that_do_not_fit_have_no_reading(parts):
    assert read(parts) == []


def test_a_format_is_named_in_one_place():
    """Where a codec exists, its names are in its file; beside them are forms that it lacks."""
    own = {
        (name, convention.producer, *convention.parts.values())
        for name in codecs.names()
        for convention in codecs.get(name).names
    }
    others = [(name, n.producer, *n.parts.values()) for name, n in _formats.FORMATS]
    assert own.isdisjoint(others)
    said = [str(convention.arguments) for _, convention in _formats.FORMATS]
    assert len(set(zip(others, said, strict=True))) == len(others)


def test_every_name_of_the_table_is_in_the_notation():
    for _, convention in _formats.FORMATS:
        for text in (*convention.parts.values(), *convention.beside.values()):
            assert stored_part(text).ending == text.split()[0].removeprefix("{w}").rstrip("?")


def test_the_notation_says_name_dtypes_and_shapes():
    part = stored_part("{w}.scale? uint8|wide [] | [*, N, 2*K*bits/32:4]")
    assert (part.ending, part.optional) == (".scale", True)
    assert part.dtypes == ("uint8", "float32", "bfloat16", "float16")
    length = Length(factor=2, size="K", times="bits", divisor=32, multiple=4)
    assert part.shapes == ((False, ()), (True, (Length(1, "N", None, 1, 1), length)))
    assert stored_part("{w}_s").shapes == ()


@pytest.mark.parametrize(
    "text", ["weight [N]", "{w}.{x} [N]", "{w}.s float32 N", "{w}.s float32 [N+1]"]
)
def test_what_is_not_in_the_notation_is_refused(text):
    with pytest.raises(ValueError, match=r"\w"):
        stored_part(text)


def test_an_ending_that_begins_with_a_dot_may_be_the_whole_key():
    endings = Endings([(".weight", 1), ("_scales", 2), (".quant_state.nf4", 3)])
    assert list(endings.find("weight")) == [("", ".weight", [1])]
    assert list(endings.find("a.weight")) == [("a", ".weight", [1])]
    assert list(endings.find("a.b_scales")) == [("a.b", "_scales", [2])]
    assert list(endings.find("a.quant_state.nf4")) == [("a", ".quant_state.nf4", [3])]
    assert list(endings.find("a.other.nf4")) == list(endings.find("scales")) == []
    assert key_of_part("", ".weight") == "weight"


def test_of_several_namings_that_which_explains_more_parts_is_read():
    parts = {"weight": "{w}.weight", "scale": "{w}.scale"}
    more = {**parts, "zero": "{w}.zero"}
    table = PartNames([("a", Convention("one", parts)), ("b", Convention("two", more))])
    there = {f".{name}": spec("uint8", (2,)) for name in ("weight", "scale", "zero")}
    assert [r.format for r in table.read(".weight", there)] == ["b"]
    del there[".zero"]
    assert [r.format for r in table.read(".weight", there)] == ["a"]


# what each format of the golden files is, and names in them that are not those on disk
GOLDEN = {
    "ct_fp8_tensor": "fp8", "ct_fp8_channel": "fp8", "ct_fp8_block": "fp8-block",
    "ct_mxfp8": "mxfp8", "ct_mxfp4": "mxfp4", "ct_nvfp4": "nvfp4", "ct_int8_channel": "int8",
    "ct_w8a16_pack": "int-pack", "ct_w4a16_g128_sym": "int-pack",
    "ct_w4a16_g128_asym": "int-pack", "ct_w3a16_dense": "int-pack",
    "modelopt_fp8_tensor": "fp8", "modelopt_fp8_channel": "fp8", "modelopt_fp8_block": "fp8-block",
    "modelopt_mxfp8": "mxfp8", "modelopt_mxfp4": "mxfp4", "modelopt_nvfp4": "nvfp4",
    "modelopt_int4_awq": "int4-rows", "modelopt_int8_wo": "int8",
    "te_fp8_e4m3_current": "fp8", "te_fp8_e5m2_current": "fp8",
    "te_fp8_block_2d_fp32scale": "fp8-block", "te_fp8_block_1d": "fp8-block",
    "ao_mxfp8_e4m3_rceil": "mxfp8", "ao_mxfp8_e4m3_rceil_swizzled": "mxfp8",
    "ao_mxfp4_even": "mxfp4", "ao_nvfp4_two_level": "nvfp4", "ao_nvfp4_single_level": "nvfp4",
    "ao_nvfp4_two_level_swizzled": "nvfp4", "ao_float8_row": "fp8", "ao_float8_tensor": "fp8",
    "ao_int8_row": "int8", "hf_fp8_block": "fp8-block", "hf_fp8_block_ue8m0": "fp8-block",
    "deepgemm_fp8_block": "fp8-block", "gptoss_mxfp4": "mxfp4",
    "gptq_4bit_g128_sym": "gptq", "gptq_4bit_g32_asym": "gptq", "gptq_4bit_g128_actorder": "gptq",
    "gptq_8bit_channel_sym": "gptq", "gptq_3bit_g128_sym": "gptq", "awq_gemm_g128": "awq",
    "awq_gemm_g32": "awq", "awq_gemv_g128": "awq", "bnb_nf4": "bnb-4bit",
    "bnb_nf4_double": "bnb-4bit", "bnb_fp4": "bnb-4bit", "bnb_int8": "bnb-int8",
}  # fmt: skip


def test_the_headers_of_all_golden_files_are_read_as_what_they_are():
    read_as = {kind: set() for kind in GOLDEN}
    cases = 0
    for kind, of_kind in goldens().items():
        for held in of_kind.values() if kind in GOLDEN else ():
            specs = {
                f"m.{name[2:].removesuffix('(gptq v1)')}": one
                for name, (one, _) in held.items()
                if name.startswith("q/") and "(gptq_v2)" not in name and "/ct." not in name
            }
            if not specs:
                continue
            (group,) = describe_formats(specs)["number_formats"]
            read_as[kind] |= {reading["format"] for reading in group["readings"]}
            assert not group["missing"], kind
            cases += 1
    assert read_as == {kind: {codec} for kind, codec in GOLDEN.items()}
    assert cases > 190


def test_a_format_that_nothing_decodes_is_refused_with_the_reason():
    with pytest.raises(OpError) as caught:
        codec_called("tinygemm")
    assert caught.value.code == "M308"
    assert str(caught.value).startswith("tinygemm cannot be decoded: codes lie as the kernel")
