"""What GPTQModel's `dequantize_model` made of the folders, as `run_gptqmodel.py` found it, and why
it differs from what the libraries that wrote them decode.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from commandline import contents
from genuine import FOLDER, checkpoint, digest, names

RESULTS: dict[str, Any] = json.loads((FOLDER / "gptqmodel.json").read_text())["results"]
SAME = {
    "ct-fp8-channel", "ct-mxfp8", "hf-fp8-block-ue8m0", "modelopt-mxfp8", "gptq-v1", "gptq-sym",
}  # fmt: skip
# columns stay in the order that they have in words
UNORDERED = {"awq-gemm"}
# all numbers are the same, but the scales of inputs stay, which plain weights have no use for
SAME_AND_MORE = {"ct-fp8-tensor", "mistral-fp8"}
# scales are rounded to bfloat16 before codes are multiplied by them; of AWQ's weights columns stay
# divided, and what inputs are multiplied by stays beside them
ROUNDED = {
    "hf-fp8-block", "hf-fp8-block-moe", "modelopt-fp8", "modelopt-fp8-channel", "modelopt-nvfp4",
    "modelopt-nvfp4-moe", "modelopt-nvfp4-awq",
}  # fmt: skip
# linear layers as above; of experts in one tensor NVFP4 codes stay codes, and codes of FP8 are not
# multiplied by anything
STACKED = {"modelopt-nvfp4-stacked", "modelopt-fp8-stacked"}
# of blocks that are cut at the edge all numbers are wrong, up to 22 times
WRONG = {"ct-fp8-block"}
# codes stay packed and their layers without a weight, and nothing says so
PACKED = {
    "ct-mxfp4", "ct-sparse24-fp8", "ct-sparse24-int8", "ct-bitmask-int8", "ct-mixed",
    "ct-mixed-int", "gpt-oss",
}  # fmt: skip
# codes of int8 stay codes, and where there are no others their scales are gone
# bitsandbytes' stay what they are, with all of their parts
CODES = {"ct-w8a8", "ct-mixed-int", "bnb-int8", "bnb-nf4", "bnb-nf4-plain", "bnb-fp4"}
# NVFP4 as above, and codes of FP8 are not multiplied by anything
MIXED = {"modelopt-mixed"}


# packed integers and NVFP4 of compressed-tensors are refused: GPTQModel 7.7 asks that library for a
# function that 0.20 no longer has, and takes it for not installed


def test_every_folder_has_a_verdict() -> None:
    refused = {name for name, one in RESULTS.items() if "refused" in one}
    assert set(names()) == RESULTS.keys()
    assert refused == (
        RESULTS.keys()
        - (SAME | SAME_AND_MORE | ROUNDED | STACKED | WRONG | PACKED | MIXED | UNORDERED | CODES)
    )
    assert {name for name, one in RESULTS.items() if one.get("different")} == (
        ROUNDED | STACKED | WRONG | MIXED | UNORDERED | CODES
    )
    assert {name for name, one in RESULTS.items() if one.get("missing")} == PACKED
    left = {name for name, one in RESULTS.items() if one.get("left")}
    assert not left & SAME
    assert left >= SAME_AND_MORE


def bfloat16(numbers: Any) -> Any:
    """float32 numbers rounded to bfloat16, as float32."""
    raw = np.asarray(numbers, "<f4").view("<u4").astype("<u8")
    rounded = (raw + 0x7FFF + ((raw >> 16) & 1)) >> 16 << 16
    return rounded.astype("<u4").view("<f4")


def wide(tensor: tuple[str, tuple[int, ...], bytes]) -> Any:
    """A tensor of scales or of codes of a byte as float32 numbers."""
    dtype, shape, data = tensor
    if dtype == "F8_E4M3":
        return E4M3[np.frombuffer(data, "u1")].reshape(shape)
    return np.frombuffer(data, "<f4").reshape(shape)


def e4m3(code: int) -> float:
    exponent, mantissa = code >> 3 & 15, code & 7
    size = (8 + mantissa) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9
    return -size if code & 128 else size


E4M3 = np.array([e4m3(code) for code in range(256)], "<f4")
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], "<f4")


@pytest.mark.parametrize("name", sorted(ROUNDED | STACKED))
def test_rounding_scales_first_gives_its_numbers_to_the_bit(name: str) -> None:
    different = RESULTS[name]["different"]
    parts = contents(checkpoint(name).folder)
    for key, said in different.items():
        if key.endswith("_proj"):
            assert name in STACKED
            continue
        module = key.removesuffix(".weight")
        scale = wide(parts.get(f"{module}.weight_scale_inv") or parts[f"{module}.weight_scale"])
        if parts[key][0] == "U8":
            packed = np.frombuffer(parts[key][2], "u1").reshape(parts[key][1])
            codes = E2M1[np.stack([packed & 15, packed >> 4], -1).reshape(len(packed), -1)]
            scale = np.repeat(scale * wide(parts[f"{module}.weight_scale_2"]), 16, 1)
        else:
            codes = wide(parts[key])
            if scale.ndim == 2:
                scale = np.repeat(np.repeat(scale, 32, 0), 32, 1)
            elif scale.ndim == 1:
                scale = scale[:, None]
        made = bfloat16(codes * bfloat16(scale))
        raw = (made.view("<u4") >> 16).astype("<u2").tobytes()
        assert digest("BF16", made.shape, raw) == said
        assert digest("BF16", made.shape, raw) != checkpoint(name).tensors[key]


@pytest.mark.parametrize(
    ("name", "ending", "count"),
    [("modelopt-mixed", ".weight", 8), ("modelopt-fp8-stacked", "_proj", 2)],
)
def test_codes_of_fp8_become_numbers_without_their_scale(
    name: str, ending: str, count: int
) -> None:
    """In a mixture of formats, and of experts in one tensor."""
    different = RESULTS[name]["different"]
    parts = contents(checkpoint(name).folder)
    eight = [key for key in different if parts[key][0] == "F8_E4M3" and key.endswith(ending)]
    assert len(eight) == count
    for key in eight:
        made = wide(parts[key])
        raw = (made.view("<u4") >> 16).astype("<u2").tobytes()
        assert digest("BF16", made.shape, raw) == different[key]


@pytest.mark.parametrize("name", sorted(CODES | {"modelopt-nvfp4-stacked"}))
def test_codes_that_it_does_not_know_stay_codes(name: str) -> None:
    parts = contents(checkpoint(name).folder)
    different = RESULTS[name]["different"]
    kept = [k for k in different if name in CODES or k.endswith("_proj")]
    assert kept
    for key in kept:
        assert digest(*parts[key]) == different[key]


def test_of_awq_codes_and_zeros_stay_where_they_lie_in_words() -> None:
    different = RESULTS["awq-gemm"]["different"]
    parts = contents(checkpoint("awq-gemm").folder)
    for key, said in different.items():
        module = key.removesuffix(".weight")
        codes, zeros = (
            (
                np.frombuffer(data, "<u4").reshape(shape)[..., None]
                >> np.arange(0, 32, 4, dtype="u4")
            )
            & 15
            for _, shape, data in (parts[f"{module}.qweight"], parts[f"{module}.qzeros"])
        )
        _, shape, data = parts[f"{module}.scales"]
        scales = np.frombuffer(data, "<f2").reshape(shape).astype("f4").repeat(32, 0)
        codes, zeros = (x.reshape(len(x), -1).astype("f4") for x in (codes, zeros))
        made = ((codes - zeros.repeat(32, 0)) * scales).T.astype("<f2")
        assert digest("F16", made.shape, made.tobytes()) == said
        assert said != checkpoint("awq-gemm").tensors[key]
