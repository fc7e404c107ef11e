"""`fp8-block` against what DeepGEMM, transformers, torch's DCP reader, compressed-tensors and
ModelOpt made of the same bytes.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from golden_rules import decoded, same_numbers, tensor_of, vectors
from kit_layouts import goldens

from migrate.codecs import get, names
from migrate.codecs.base import OpError
from migrate.codecs.kit.encoding_boxes import PartBoxes
from migrate.core.errors import CheckpointError, page
from migrate.core.spec import Spec
from migrate.elements.raw import carrier
from migrate.testing import codeckit

CODEC = get("fp8-block")
Args: Any = CODEC.Args
# goldens of which every result of a library is exact
EXACT = [
    ("ct_fp8_block", "block_128x256_bf16"),
    ("ct_fp8_block", "block_sub1e-4_8x128_bf16"),
    ("deepgemm_fp8_block", "block_inf_8x128_bf16"),
    ("deepgemm_fp8_block", "subnormal_f32"),
    ("deepgemm_fp8_block_ue8m0", "block_odd_129x130_bf16"),
    ("deepgemm_fp8_block_ue8m0", "block_sub1e-4_8x128_bf16"),
    ("deepgemm_fp8_block_ue8m0", "block_tiny_8x128_bf16"),
    ("hf_fp8_block", "block_inf_128x128_bf16"),
    ("hf_fp8_block_ue8m0", "block_inf_128x128_bf16"),
    ("hf_fp8_block_ue8m0", "block_sub1e-4_128x128_bf16"),
    ("hf_fp8_block_ue8m0", "block_tiny_128x128_bf16"),
    ("modelopt_fp8_block", "block_1x130_f32"),
    ("modelopt_fp8_block", "block_inf_8x128_bf16"),
    ("modelopt_fp8_block", "block_odd_129x130_bf16"),
]
MAGNITUDE = {"float32": 0x7FFFFFFF, "bfloat16": 0x7FFF, "float16": 0x7FFF}
INFINITY = {"float32": 0x7F800000, "bfloat16": 0x7F80, "float16": 0x7C00}


def raw(tensor: torch.Tensor) -> tuple[np.ndarray, Spec]:
    name = str(tensor.dtype).removeprefix("torch.")
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]
    return tensor.contiguous().view(integers).numpy().view(carrier(name)), Spec(
        name, tuple(tensor.shape)
    )


def is_nan(bits: np.ndarray, dtype: str) -> np.ndarray:
    return (bits & MAGNITUDE[dtype]) > INFINITY[dtype]


def parts_of(kind: str, case: str) -> tuple[dict[str, torch.Tensor], list[np.ndarray], list[Spec]]:
    held = {name: tensor_of(of.dtype, bits) for name, (of, bits) in goldens()[kind][case].items()}
    scale = next(key for key in held if key.startswith("q/weight_scale"))
    pairs = [raw(held["q/weight"]), raw(held[scale])]
    return held, [array for array, _ in pairs], [spec for _, spec in pairs]


@pytest.mark.parametrize(("name", "number"), codeckit.cases(["fp8-block"]))
def test_a_sample_is_what_the_reference_makes_whole_and_box_by_box(name: str, number: int) -> None:
    codeckit.check_sample(name, number)


def test_the_codec_is_described() -> None:
    assert "fp8-block" in names()
    codeckit.check_description("fp8-block")


@pytest.mark.parametrize(("kind", "case"), EXACT)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_decoding_is_bit_for_bit_what_the_libraries_decode(
    kind: str, case: str, dtype: str
) -> None:
    held, parts, specs = parts_of(kind, case)
    # some were made of infinities
    args = Args(non_finite="keep" if "inf" in case else "refuse")
    made = codeckit.decoded(CODEC, args, parts, specs, dtype)
    compared = 0
    for key, wanted in held.items():
        # a result of float32, rounded, is what they round to; one of bfloat16 says nothing about
        # others
        if not key.startswith("dq/") or (wanted.dtype is torch.bfloat16 and dtype != "bfloat16"):
            continue
        bits, _ = raw(wanted.to(getattr(torch, dtype)))
        nan = is_nan(bits, dtype)
        assert np.array_equal(is_nan(made, dtype), nan)
        assert np.array_equal(made[~nan], bits[~nan])
        compared += 1
    assert compared or kind == "ct_fp8_block"
    assert set(made[is_nan(made, dtype)].tolist()) <= {
        {"float32": 0x7FC00000, "bfloat16": 0x7FC0, "float16": 0x7E00}[dtype]
    }
    assert np.array_equal(made, CODEC.reference(Args(), parts, specs, dtype))


@pytest.mark.parametrize(
    ("kind", "case"), [one for one in EXACT if one[0].startswith(("deepgemm", "hf"))]
)
def test_encoding_is_bit_for_bit_what_the_library_encodes(kind: str, case: str) -> None:
    held, parts, specs = parts_of(kind, case)
    scale = (
        "ue8m0"
        if specs[1].dtype == "float8_e8m0fnu"
        else "pow2"
        if kind.endswith("ue8m0")
        else "f32"
    )
    like = "hf" if kind.startswith("hf") else "deepseek"
    args = Args(like=like, scale=scale, non_finite="keep" if "inf" in case else "refuse")
    numbers, spec = raw(held["input"])
    made = codeckit.encoded(CODEC, args, numbers, spec)
    assert [s.dtype for s in CODEC.encoded(args, spec)] == [s.dtype for s in specs]
    for one, wanted in zip(made, parts, strict=True):
        assert np.array_equal(one, wanted)


@pytest.mark.parametrize("scale", ["float32", "bfloat16", "float8_e8m0fnu"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_code_with_every_kind_of_scale_decodes_as_the_formula_says(
    scale: str, dtype: str
) -> None:
    codes = np.tile(np.arange(256, dtype="u1"), (64, 1))
    bits = {"float32": 32, "bfloat16": 16, "float8_e8m0fnu": 8}[scale]
    # all exponents and some mantissas: subnormal, huge, infinite and NaN scales of both signs
    picked = np.linspace(0, 2**bits - 1, 64).astype(carrier(scale))
    if dtype != "float16" and scale == "float8_e8m0fnu":
        # decoding is exact, so that products beyond the range are refused
        least = 3 if dtype == "bfloat16" else 0
        picked = np.where((picked >= 247) | (picked < least), 255, picked).astype("u1")
    specs = [Spec("float8_e4m3fn", (64, 256)), Spec(scale, (64, 1))]
    args = Args(block=(1, 256), non_finite="keep")
    parts = [codes, picked.reshape(64, 1)]
    assert np.array_equal(
        codeckit.decoded(CODEC, args, parts, specs, dtype),
        CODEC.reference(args, parts, specs, dtype),
    )


@pytest.mark.parametrize("like", ["deepseek", "hf"])
@pytest.mark.parametrize("scale", ["f32", "bf16", "pow2", "ue8m0"])
@pytest.mark.parametrize("non_finite", ["saturate", "keep"])
def test_all_bfloat16_patterns_encode_as_the_reference(
    like: str, scale: str, non_finite: str
) -> None:
    patterns = np.arange(65536, dtype="<u2").reshape(256, 256)
    spec = Spec("bfloat16", (256, 256))
    args = Args(block=(16, 8), like=like, scale=scale, non_finite=non_finite)
    wanted = CODEC.reference_parts(args, patterns, spec)
    for one, other in zip(codeckit.encoded(CODEC, args, patterns, spec), wanted, strict=True):
        assert np.array_equal(one, other)


@pytest.mark.parametrize("like", ["deepseek", "hf"])
@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Args(scale="float32"), Args(scale="f32")),
        (Args(scale="bfloat16"), Args(scale="bf16")),
        (Args(scale="float8_e8m0fnu"), Args(scale="ue8m0")),
        (Args(scale_fmt="ue8m0"), Args(scale="pow2")),
        (Args(scale_fmt="float"), Args(scale="f32")),
        (Args(scale="bfloat16", scale_fmt="float"), Args(scale="bf16")),
        (Args(scale="float32", scale_fmt="ue8m0"), Args(scale="pow2")),
        (Args(scale="pow2", scale_fmt="ue8m0"), Args(scale="pow2")),
        (Args(scale="float8_e8m0fnu", scale_fmt="ue8m0"), Args(scale="ue8m0")),
    ],
)
def test_a_scale_may_be_said_by_its_dtype_and_its_format(like: str, one: Args, other: Args) -> None:
    array, spec = raw(torch.randn(40, 24, generator=torch.Generator().manual_seed(5)))
    one, other = (replace(args, block=(8, 8), like=like) for args in (one, other))
    assert CODEC.encoded(one, spec) == CODEC.encoded(other, spec)
    assert CODEC.bound(one) == CODEC.bound(other)
    for a, b in zip(
        codeckit.encoded(CODEC, one, array, spec),
        codeckit.encoded(CODEC, other, array, spec),
        strict=True,
    ):
        assert np.array_equal(a, b)


def test_a_power_of_two_is_one_in_bfloat16_too() -> None:
    array, spec = raw(torch.randn(40, 24, generator=torch.Generator().manual_seed(5)))
    wide, narrow = (
        codeckit.encoded(CODEC, Args(block=(8, 8), scale=scale, scale_fmt="ue8m0"), array, spec)
        for scale in ("f32", "bf16")
    )
    assert np.array_equal(wide[0], narrow[0])
    assert np.array_equal(wide[1].view("<u4") >> 16, narrow[1])
    assert not (narrow[1] & 0x7F).any()


@pytest.mark.parametrize(
    ("said", "stored"),
    [
        ("f32", "bfloat16"),
        ("pow2", "float8_e8m0fnu"),
        ("bf16", "float32"),
        ("float8_e8m0fnu", "float32"),
    ],
)
def test_a_scale_of_another_dtype_than_the_rule_says_is_read_by_its_own(
    said: str, stored: str
) -> None:
    specs = [Spec("float8_e4m3fn", (4, 4)), Spec(stored, (1, 1))]
    assert CODEC.decoded(Args(scale=said), specs, "bfloat16") == CODEC.decoded(
        Args(), specs, "bfloat16"
    )


@pytest.mark.parametrize("scale", ["f32", "pow2", "ue8m0"])
@pytest.mark.parametrize("like", ["deepseek", "hf"])
def test_no_error_of_encoding_is_beyond_the_bound(like: str, scale: str) -> None:
    generator = torch.Generator().manual_seed(3)
    # many magnitudes in one block, so that subnormal codes occur
    numbers = torch.randn(64, 64, generator=generator) * torch.exp(
        -12 * torch.rand(64, 64, generator=generator)
    )
    array, spec = raw(numbers)
    args = Args(block=(16, 16), like=like, scale=scale)
    parts, specs = codeckit.encoded(CODEC, args, array, spec), CODEC.encoded(args, spec)
    made = codeckit.decoded(CODEC, args, parts, specs, "float32").view("<f4").astype("f8")
    exact = numbers.double().numpy()
    amax = np.abs(exact).reshape(4, 16, 4, 16).max((1, 3)).repeat(16, 0).repeat(16, 1)
    bound = np.maximum(np.abs(exact) / 16, (1 if scale == "f32" else 2) * amax / 448 / 1024)
    assert (np.abs(made - exact) <= bound * (1 + 2.0**-20)).all()
    assert ("2 * amax" in CODEC.bound(args)) == (scale != "f32")
    assert (parts[0] & 0x78 == 0).any()


def test_the_last_blocks_may_be_ragged() -> None:
    # DeepSeek's kv_a_proj_with_mqa has 576 rows: five rows of scales, the last for half a block
    spec = Spec("bfloat16", (576, 7168))
    weight, scale = CODEC.encoded(Args(), spec)
    assert (weight.shape, scale.shape) == ((576, 7168), (5, 56))
    assert CODEC.decoded(Args(), [weight, scale], "bfloat16") == spec
    assert CODEC.decode_needs(Args(), [weight, scale], ((500, 576), (0, 130))) == [
        ((500, 576), (0, 130)),
        ((3, 5), (0, 2)),
    ]
    assert CODEC.encode_needs(Args(), spec, 0, ((500, 576), (0, 130))) == ((384, 576), (0, 256))
    assert CODEC.encode_needs(Args(), spec, 1, ((4, 5), (0, 56))) == ((512, 576), (0, 7168))


def test_a_scale_that_does_not_fit_is_refused_with_both_shapes_and_the_block_that_would_fit() -> (
    None
):
    with pytest.raises(OpError) as caught:
        CODEC.decoded(
            Args(), [Spec("float8_e4m3fn", (12, 16)), Spec("float32", (3, 4))], "bfloat16"
        )
    page(caught.value.code)
    assert (caught.value.code, caught.value.message) == (
        "M310",
        (
            "fp8-block: the scale is [3, 4], that of numbers of [12, 16] in blocks of 128 x 128 is "
            "[1, 1]"
        ),
    )
    assert caught.value.help is not None
    assert caught.value.help.startswith("`block: [4, 4]` would fit")
    with pytest.raises(OpError) as caught:
        CODEC.decoded(
            Args(), [Spec("float8_e4m3fn", (2, 12, 16)), Spec("float32", (3, 1, 1))], "bfloat16"
        )
    assert caught.value.help is not None
    assert caught.value.help.startswith("no block fits")


@pytest.mark.parametrize(
    ("weight", "grid", "block"),
    [
        ((576, 256), (4, 2), [144, 128]),
        ((576, 256), (5, 3), [128, 86]),
        ((7, 100000), (7, 1), [1, 100000]),
        ((10, 4), (7, 1), None),
    ],
)
def test_a_block_that_is_no_power_of_two_is_found_too(
    weight: tuple[int, int], grid: tuple[int, int], block: list[int] | None
) -> None:
    specs = [Spec("float8_e4m3fn", weight), Spec("float32", grid)]
    with pytest.raises(OpError) as caught:
        CODEC.decoded(Args(), specs, "bfloat16")
    assert caught.value.help is not None
    assert caught.value.help.startswith(
        f"`block: {block}` would fit, and so may others" if block else "no block fits"
    )
    if block:
        CODEC.decoded(Args(block=tuple(block)), specs, "bfloat16")


@pytest.mark.parametrize(
    ("weight", "scale", "dtype", "code"),
    [
        (Spec("bfloat16", (2, 2)), Spec("float32", (1, 1)), "bfloat16", "M303"),
        (Spec("float8_e4m3fn", (2, 2)), Spec("float16", (1, 1)), "bfloat16", "M303"),
        (Spec("float8_e4m3fn", (2, 2)), Spec("float32", (1, 1)), "float64", "M303"),
        (Spec("float8_e4m3fn", (2,)), Spec("float32", (1,)), "bfloat16", "M304"),
        (Spec("float8_e4m3fn", (2, 2)), Spec("float32", (1, 1, 1)), "bfloat16", "M310"),
    ],
)
def test_parts_of_another_form_are_refused(
    weight: Spec, scale: Spec, dtype: str, code: str
) -> None:
    with pytest.raises(OpError) as caught:
        CODEC.decoded(Args(), [weight, scale], dtype)
    assert caught.value.code == code


@pytest.mark.parametrize("block", [(0, 128), (128,), (128, 128, 1), (-1, 4)])
def test_a_block_that_is_none_is_refused(block: tuple[int, ...]) -> None:
    with pytest.raises(OpError) as caught:
        CODEC.validate(Args(block=block), True)
    assert caught.value.code == "M308"


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_a_number_that_is_not_finite_is_refused_with_its_index_in_the_whole_tensor(
    value: str,
) -> None:
    numbers = torch.zeros(3, 6, 10, dtype=torch.bfloat16)
    numbers[2, 5, 7] = float(value)
    numbers[2, 5, 9] = float("inf")
    array, spec = raw(numbers)
    args = Args(block=(2, 4))
    box = ((1, 3), (4, 6), (5, 8))
    needed = CODEC.encode_needs(args, spec, 0, box)
    part = array[tuple(slice(a, b) for a, b in needed)]
    with pytest.raises(OpError) as caught:
        CODEC.encode(args, part, spec, 0, box, np.empty((2, 2, 3), "u1"))
    assert (caught.value.code, caught.value.message) == (
        "M406",
        f"quantize: the number at [2, 5, 7] is {value}",
    )
    with pytest.raises(OpError, match=r"\[2, 5, 7\]"):
        CODEC.encode(
            args,
            array[2:, 4:, 4:8],
            spec,
            1,
            ((2, 3), (2, 3), (1, 2)),
            np.empty((1, 1, 1), "<u4"),
        )


def test_saturation_keeps_a_block_whose_numbers_are_not_all_finite() -> None:
    numbers = torch.full((4, 4), 2.0)
    numbers[0, 0], numbers[1, 1], numbers[2, 2] = float("inf"), float("-inf"), float("nan")
    array, spec = raw(numbers)
    codes, scale = codeckit.encoded(CODEC, Args(block=(4, 4), non_finite="saturate"), array, spec)
    assert scale.view("<f4") == np.float32(2.0) / np.float32(448)
    assert (codes[0, 0], codes[1, 1], codes[2, 2], codes[3, 3]) == (0x7E, 0xFE, 0x7F, 0x7E)


def test_a_product_that_a_dtype_cannot_hold_is_refused_where_decoding_is_called_exact() -> None:
    specs = [Spec("float8_e4m3fn", (2, 4)), Spec("float8_e8m0fnu", (2, 1))]
    args = Args(block=(1, 4))
    assert CODEC.exact(args, specs, "float32")
    assert CODEC.exact(args, specs, "bfloat16")
    assert not CODEC.exact(args, specs, "float16")
    assert not CODEC.exact(args, [specs[0], Spec("float32", (2, 1))], "float32")
    codes = np.full((2, 4), 0x7E, "u1")
    made = codeckit.decoded(
        CODEC, args, [codes, np.array([[0], [246]], "u1")], specs, "float32"
    ).view("<f4")
    assert (made == np.array([[448 * 2.0**-127], [448 * 2.0**119]], "f8")).all()
    with pytest.raises(OpError) as caught:
        codeckit.decoded(CODEC, args, [codes, np.array([[127], [247]], "u1")], specs, "float32")
    assert caught.value.code == "M406"
    assert caught.value.message.startswith("dequantize: the number at [1, 0] is 448 times 1.32")


# magnitudes from the least subnormal on, on both sides of where the factor of `hf` and its bfloat16
# scale end, and up to the largest
ENDS = [
    [1e-40, 2e-37, 1e-36, 0.0], [0.0, -1e-45, 1e-30, 0.0], [1.3165e-36, -0.0, 1e-36, 0.0],
    [1.3168e-36, 0.0, -1e-36, 1e-40],
    [1.32e-36, 0.0, 0.0, 0.0], [3.4028235e38, -3.4e38, 1.0, 0.0], [3.3e38, 1e38, -0.0, 1e-45],
    [2.0**-126, 2.0**-149, 0.0, -(2.0**-127)],
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("non_finite", ["saturate", "keep"])
@pytest.mark.parametrize("scale", ["f32", "bf16", "pow2", "ue8m0"])
@pytest.mark.parametrize("like", ["deepseek", "hf"])
def test_blocks_of_the_smallest_and_largest_numbers_encode_as_the_reference(
    like, scale, non_finite, dtype
) -> None:
    array, spec = raw(torch.tensor(ENDS).to(dtype))
    args = Args(block=(1, 2), like=like, scale=scale, non_finite=non_finite)
    wanted = CODEC.reference_parts(args, array, spec)
    assert all(
        np.array_equal(got, part)
        for got, part in zip(codeckit.encoded(CODEC, args, array, spec), wanted, strict=True)
    )


def test_hf_encodes_as_transformers_computes_down_to_the_smallest_block() -> None:
    # Fp8Quantize: torch takes 448.0 / x for a product with a reciprocal, and 0 times infinity is
    # x86's negative NaN
    random = torch.randn(500, 4, generator=torch.Generator().manual_seed(5))
    numbers = torch.cat((torch.tensor(ENDS), random))
    amax = numbers.abs().amax(1, keepdim=True)
    factor = torch.where(amax > 0, 448.0 / torch.where(amax > 0, amax, 1.0), 1.0)
    array, spec = raw(numbers)
    codes, scales = codeckit.encoded(
        CODEC, Args(block=(1, 4), like="hf", non_finite="keep"), array, spec
    )
    assert np.array_equal(scales.view("<f4"), (1.0 / factor).numpy())
    made = (
        torch.clamp(numbers * factor, -448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    )
    assert np.array_equal(np.where(codes == 0xFF, 0x7F, codes), np.where(made == 0xFF, 0x7F, made))
    assert (codes[0] == [126, 126, 126, 255]).all()


@pytest.mark.parametrize("scale", ["f32", "bf16"])
@pytest.mark.parametrize("part", [0, 1])
def test_a_block_that_hf_has_no_scale_for_is_refused_by_its_place(scale: str, part: int) -> None:
    numbers = torch.ones(2, 8, 12)
    numbers[0, :4, :4] = 0
    numbers[1, 4:, 8:] = 1e-37
    array, spec = raw(numbers)
    args = Args(block=(4, 4), like="hf", scale=scale)
    box = (((1, 2), (4, 8), (4, 12)), ((1, 2), (1, 2), (1, 3)))[part]
    needed = CODEC.encode_needs(args, spec, part, box)
    out = np.empty([b - a for a, b in box], ["u1", "<u4" if scale == "f32" else "<u2"][part])
    with pytest.raises(OpError) as caught:
        CODEC.encode(args, array[tuple(slice(a, b) for a, b in needed)], spec, part, box, out)
    assert caught.value.code == "M406"
    assert caught.value.message.startswith(
        "quantize: block [1, 1, 2], from [1, 4, 8] on, has no scale: its largest magnitude is 1e-37"
    )
    # zeros have the scale 1, and the other kinds of scales end nowhere
    assert codeckit.encoded(CODEC, args, *raw(numbers[:1]))[1].size == 6
    for other in (
        Args(block=(4, 4), like="hf", scale="ue8m0"),
        Args(block=(4, 4), like="hf", scale="pow2"),
        Args(block=(4, 4)),
    ):
        codeckit.encoded(CODEC, other, array, spec)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("like", ["deepseek", "hf"])
def test_parts_that_share_a_memo_are_the_same_and_look_at_each_number_once(
    like: str, order: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from migrate.codecs.kit import encoding

    spec, args, looked = Spec("bfloat16", (3, 70, 50)), Args(block=(16, 32), like=like), []
    amax = encoding.amax
    monkeypatch.setattr(
        encoding, "amax", lambda bits, *rest: looked.append(prod(bits.shape)) or amax(bits, *rest)
    )
    array = codeckit.numbers(spec)
    made, memo = [np.empty((3, 70, 50), "u1"), np.empty((3, 5, 2), "<u4")], dict[str, Any]()
    boxes = [
        [((0, 3), (0, 32), (0, 50)), ((0, 3), (32, 70), (0, 50))],
        [((0, 3), (0, 2), (0, 2)), ((0, 3), (2, 5), (0, 2))],
    ]
    for part in order:
        for box in boxes[part]:
            here = tuple(slice(a, b) for a, b in box)
            needed = tuple(slice(a, b) for a, b in CODEC.encode_needs(args, spec, part, box))
            out = np.empty_like(made[part][here])
            CODEC.encode(args, array[needed], spec, part, box, out, None, memo)
            made[part][here] = out
    assert sum(looked) == array.size
    assert all(
        np.array_equal(got, wanted)
        for got, wanted in zip(made, CODEC.reference_parts(args, array, spec), strict=True)
    )


@pytest.mark.parametrize("non_finite", ["saturate", "keep"])
@pytest.mark.parametrize("scale", ["f32", "bf16", "pow2", "ue8m0"])
@pytest.mark.parametrize("like", ["deepseek", "hf"])
def test_scales_are_recalled_from_the_codes_alone_and_only_where_these_are_known(
    like: str, scale: str, non_finite: str
) -> None:
    spec, args = (
        Spec("bfloat16", (3, 70, 50)),
        Args(block=(16, 32), like=like, scale=scale, non_finite=non_finite),
    )
    array, memo = codeckit.numbers(spec), dict[str, Any]()
    array[1, 20, 3], array[2, 0, 0] = 0x7F80, 0xFFC1
    wanted = CODEC.reference_parts(args, array, spec)[1]
    box, whole = ((0, 3), (0, 2), (0, 2)), ((0, 3), (0, 5), (0, 2))
    out = np.empty(wanted.shape, wanted.dtype)
    assert not CODEC.recall(args, spec, 1, box, out[:, :2], memo)
    CODEC.encode(
        args,
        array[:, :32],
        spec,
        0,
        ((0, 3), (0, 32), (0, 50)),
        np.empty((3, 32, 50), "u1"),
        None,
        memo,
    )
    assert not CODEC.recall(args, spec, 1, whole, out, memo)
    assert not CODEC.recall(
        args, spec, 0, ((0, 3), (0, 32), (0, 50)), np.empty((3, 32, 50), "u1"), memo
    )
    part = np.empty((3, 2, 2), wanted.dtype)
    assert CODEC.recall(args, spec, 1, box, part, memo)
    assert np.array_equal(part, wanted[:, :2])
    CODEC.encode(
        args,
        array[:, 32:],
        spec,
        0,
        ((0, 3), (32, 70), (0, 50)),
        np.empty((3, 38, 50), "u1"),
        None,
        memo,
    )
    assert CODEC.recall(args, spec, 1, whole, out, memo)
    assert np.array_equal(out, wanted)


@pytest.mark.parametrize("chunk", [1, 700, 5000, 1 << 20])
@pytest.mark.parametrize("shape", [(3, 2000), (2000, 7), (1, 1), (0, 4), (300, 513)])
def test_chunks_leave_no_seam(
    shape: tuple[int, int], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from migrate.codecs.kit import box_decoding, encoding

    monkeypatch.setattr(encoding, "CHUNK", dict.fromkeys(encoding.CHUNK, chunk))
    monkeypatch.setattr(box_decoding, "CHUNK", chunk)
    spec = Spec("float32", shape)
    args = Args(block=(7, 96))
    array = codeckit.numbers(spec)
    parts, specs = codeckit.encoded(CODEC, args, array, spec), CODEC.encoded(args, spec)
    wanted = CODEC.reference_parts(args, array, spec)
    assert all(np.array_equal(got, part) for got, part in zip(parts, wanted, strict=True))
    reference = CODEC.reference(args, parts, specs, "bfloat16")
    for top, left in ((0, 0), (5, 3), (20, 100)):
        box = ((min(top, shape[0]), shape[0]), (min(left, shape[1]), shape[1]))
        needed = CODEC.decode_needs(args, specs, box)
        given = [
            part[tuple(slice(a, b) for a, b in need)]
            for part, need in zip(parts, needed, strict=True)
        ]
        made = np.empty([b - a for a, b in box], "<u2")
        CODEC.decode(args, given, specs, "bfloat16", box, made)
        assert np.array_equal(made, reference[box[0][0] :, box[1][0] :])


@pytest.mark.parametrize(("name", "number"), codeckit.cases(["fp8-block"]))
def test_the_way_of_other_devices_makes_the_same_bits(
    name: str, number: int, other_device: None
) -> None:
    codeckit.check_sample(name, number)


def test_planning_with_a_codec_imports_neither_numpy_nor_torch() -> None:
    code = (
        "import sys; from migrate.codecs import get; "
        "from migrate.core.spec import Spec;"
        "c = get('fp8-block'); c.decoded(c.Args(), c.encoded(c.Args(), Spec('bfloat16', (576, "
        "4))), 'bfloat16');"
        "print(sorted({'numpy', 'torch', 'pydantic'} & set(sys.modules)))"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        == "[]\n"
    )


# the kit must be able to fail


def test_the_kit_notices_a_codec_that_decodes_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    from migrate.codecs.kit import lookup

    monkeypatch.setattr(lookup, "_HALVES", -1)
    with pytest.raises(AssertionError, match=r"instead of"):
        codeckit.check_sample("fp8-block", 0)


def test_the_kit_notices_a_box_that_is_computed_from_the_wrong_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # a box that begins inside a block, as if it began with one
    monkeypatch.setattr(PartBoxes, "_on_tiles", lambda self, box: box)
    with pytest.raises(AssertionError, match=r"weight in"):
        codeckit.check_sample("fp8-block", 0)


# what Transformer Engine, compressed-tensors and ModelOpt store, through rule files

KINDS: dict[str, tuple[str, str, str]] = {
    "te_fp8_block_2d_fp32scale": ("_rowwise_data", "_rowwise_scale_inv", "form: te"),
    "te_fp8_block_1d": ("_rowwise_data", "_rowwise_scale_inv", "form: te, block: [1, 128]"),
    "ct_fp8_block": ("weight", "weight_scale", ""),
    "modelopt_fp8_block": ("weight", "weight_scale", ""),
    "hf_fp8_block": ("weight", "weight_scale_inv", ""),
    "hf_fp8_block_ue8m0": ("weight", "weight_scale_inv", ""),
    "deepgemm_fp8_block": ("weight", "weight_scale_inv", ""),
    "deepgemm_fp8_block_ue8m0": ("weight", "weight_scale_inv", ""),
}


@pytest.mark.heavy
@pytest.mark.parametrize(("kind", "case", "of"), list(vectors(KINDS)))
def test_a_rule_decodes_every_golden_bit_for_bit(
    kind: str, case: str, of: str, tmp_path: Path
) -> None:
    found = goldens()[kind][case]
    weight, scale, said = KINDS[kind]
    spec, wanted = found[of]
    stored = {
        role: tensor_of(found[f"q/{name}"][0].dtype, found[f"q/{name}"][1])
        for role, name in (("weight", weight), ("scale", scale))
    }
    if "inf" in case:
        with pytest.raises(CheckpointError, match="the scale of the numbers from"):
            decoded(tmp_path, "fp8-block", stored, spec.dtype, said)
        (tmp_path / "a.safetensors").unlink()
        said = f"{said}, non_finite: keep".removeprefix(", ")
    made = decoded(tmp_path, "fp8-block", stored, spec.dtype, said)
    assert same_numbers(made, spec.dtype, wanted)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("ct_fp8_block", {"like": "compressed-tensors"}),
        ("modelopt_fp8_block", {"like": "modelopt"}),
    ],
)
def test_blocks_are_encoded_as_other_libraries_do(kind: str, said: dict[str, Any]) -> None:
    for case, found in goldens()[kind].items():
        (spec, numbers), weight, scale = (
            found[name] for name in ("input", "q/weight", "q/weight_scale")
        )
        non_finite = "keep" if "inf" in case else "refuse"
        args = Args(**said, scale=scale[0].dtype, non_finite=non_finite)
        assert list(CODEC.encoded(args, spec)) == [weight[0], scale[0]]
        made = codeckit.encoded(CODEC, args, np.array(numbers), spec)
        for one, (_, wanted) in zip(made, (weight, scale), strict=True):
            assert one.tobytes() == wanted.tobytes(), case


@pytest.mark.parametrize(
    ("block", "shape", "grid"),
    [((128, 128), (129, 130), (2, 4)), ((1, 128), (129, 130), (2, 132)), ((1, 8), (3, 16), (2, 4))],
)
def test_the_scales_of_transformer_engine_are_padded_and_those_of_rows_transposed(
    block: tuple[int, int], shape: tuple[int, int], grid: tuple[int, int]
) -> None:
    args, spec = Args(block=block, form="te"), Spec("bfloat16", shape)
    assert CODEC.encoded(args, spec) == [Spec("uint8", shape), Spec("float32", grid)]
    array = codeckit.numbers(spec)
    parts, specs = codeckit.encoded(CODEC, args, array, spec), CODEC.encoded(args, spec)
    plain = Args(block=block)
    codes, scales = codeckit.encoded(CODEC, plain, array, spec)
    rows, columns = scales.shape
    kept = parts[1].T[:rows, :columns] if block[0] == 1 else parts[1][:rows, :columns]
    assert np.array_equal(parts[0], codes)
    assert np.array_equal(kept, scales)
    # padding means nothing: not even that it is no scale
    parts[1][parts[1] == 0] = 0xFFFFFFFF
    assert np.array_equal(
        codeckit.decoded(CODEC, args, parts, specs, "float32"),
        codeckit.decoded(CODEC, plain, [codes, scales], CODEC.encoded(plain, spec), "float32"),
    )
    with pytest.raises(OpError) as caught:
        CODEC.decoded(plain, specs, "bfloat16")
    assert caught.value.code == "M303"


def test_bytes_of_powers_of_two_are_scales_too() -> None:
    array, spec = raw(torch.randn(40, 24, generator=torch.Generator().manual_seed(5)))
    one, other = (Args(block=(8, 8), scale=scale) for scale in ("ue8m0", "uint8"))
    parts = codeckit.encoded(CODEC, one, array, spec)
    assert CODEC.encoded(other, spec)[1] == Spec("uint8", (5, 3))
    assert all(
        np.array_equal(a, b)
        for a, b in zip(parts, codeckit.encoded(CODEC, other, array, spec), strict=True)
    )
    read = [
        codeckit.decoded(CODEC, args, parts, CODEC.encoded(args, spec), "bfloat16")
        for args in (one, other)
    ]
    assert np.array_equal(*read)
    assert CODEC.exact(other, CODEC.encoded(other, spec), "bfloat16")


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_a_scale_that_is_none_is_refused_by_its_place(value: float) -> None:
    codes, scales = np.full((6, 10), 0x38, "u1"), np.ones((3, 3), "f4")
    scales[2, 1] = value
    specs = [Spec("float8_e4m3fn", (6, 10)), Spec("float32", (3, 3))]
    parts = [codes, scales.view("<u4")]
    with pytest.raises(OpError) as caught:
        codeckit.decoded(CODEC, Args(block=(2, 4)), parts, specs, "bfloat16")
    assert (caught.value.code, caught.value.message) == (
        "M406",
        f"dequantize: the scale of the numbers from [4, 4] on is {value:g}",
    )
    args = Args(block=(2, 4), non_finite="keep")
    made = codeckit.decoded(CODEC, args, parts, specs, "float32").view("<f4")
    assert np.array_equal(made[4:, 4:8], np.full((2, 4), value, "f4"), equal_nan=True)


@pytest.mark.parametrize("like", ["compressed-tensors", "modelopt"])
@pytest.mark.parametrize("scale", ["pow2", "ue8m0", "bf16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scales_of_other_libraries_are_rounded_as_they_are_stored(
    like: str, scale: str, dtype: torch.dtype
) -> None:
    numbers = torch.randn(40, 24, generator=torch.Generator().manual_seed(5)) * 1e-3
    numbers[:8] = 0
    array, spec = raw(numbers.to(dtype))
    args = Args(block=(8, 8), like=like, scale=scale)
    parts, specs = codeckit.encoded(CODEC, args, array, spec), CODEC.encoded(args, spec)
    wanted = CODEC.reference_parts(args, array, spec)
    assert all(np.array_equal(a, b) for a, b in zip(parts, wanted, strict=True))
    made = codeckit.decoded(CODEC, args, parts, specs, "float32").view("<f4")
    error = np.abs(made - numbers.to(dtype).float().numpy()).max()
    assert error <= float(numbers.abs().max()) / 14
    if scale != "bf16":
        stored = parts[1] if scale == "ue8m0" else parts[1] >> 23
        assert scale == "ue8m0" or not (parts[1] & 0x7FFFFF).any()
        assert stored.min() > 0
