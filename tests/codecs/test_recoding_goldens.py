"""What libraries stored of one tensor in two formats, or in two forms of one: each is made of the
other, byte for byte.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest
from kit_layouts import goldens
from recoded_parts import RECODE, computed_parts

from migrate import codecs
from migrate.core.declaration import NumberFormat
from migrate.core.errors import OpError
from migrate.core.spec import Spec

TORCHAO = ("qdata", "scale", "per_tensor_scale")
MODELOPT = ("weight", "weight_scale", "weight_scale_2")


def number_format(codec: str, **own: Any) -> NumberFormat:
    made: Any = codecs.get(codec).Args
    return NumberFormat(codec, made(**own))


class Side(NamedTuple):
    """A golden, the names of its parts, and the form that they are in."""

    golden: str
    names: tuple[str, ...]
    form: NumberFormat


FP4, FP8 = number_format("mxfp4"), number_format("mxfp8")
CT, ONES = number_format("nvfp4", form="compressed-tensors"), number_format("nvfp4")
TILES = {name: number_format(name, swizzled=True) for name in ("mxfp8", "nvfp4")}
EXACT, CHANNEL = "mxfp4_to_nvfp4_exact", {"granularity": "channel"}
SCALED = ("weight", "weight_scale")
# one tensor as two libraries, or one in two forms, stored it
PAIRS = {
    "MXFP8 of torchao, out of tiles and into them": (
        Side("ao_mxfp8_e4m3_rceil", TORCHAO[:2], FP8),
        Side("ao_mxfp8_e4m3_rceil_swizzled", TORCHAO[:2], TILES["mxfp8"]),
        "normal_bf16",
    ),
    "MXFP8 of ModelOpt and torchao's tiles": (
        Side("modelopt_mxfp8", SCALED, FP8),
        Side("ao_mxfp8_e4m3_rceil_swizzled", TORCHAO[:2], TILES["mxfp8"]),
        "normal_bf16",
    ),
    "NVFP4 of torchao, out of tiles and into them": (
        Side("ao_nvfp4_two_level", TORCHAO, ONES),
        Side("ao_nvfp4_two_level_swizzled", TORCHAO, TILES["nvfp4"]),
        "normal_bf16",
    ),
    "NVFP4 of torchao and of ModelOpt": (
        Side("ao_nvfp4_two_level", TORCHAO, ONES),
        Side("modelopt_nvfp4", MODELOPT, ONES),
        "normal_f32",
    ),
    "NVFP4 of ModelOpt and of compressed-tensors": (
        Side("modelopt_nvfp4", MODELOPT, ONES),
        Side("ct_nvfp4", ("weight_packed", "weight_scale", "weight_global_scale"), CT),
        "normal_f32",
    ),
    "MXFP4 of compressed-tensors and of torchao": (
        Side("ct_mxfp4", ("weight_packed", "weight_scale"), FP4),
        Side("ao_mxfp4_even", TORCHAO[:2], FP4),
        "normal_bf16",
    ),
    "FP8 rows of compressed-tensors and of ModelOpt": (
        Side("ct_fp8_channel", SCALED, number_format("fp8", form="compressed-tensors", **CHANNEL)),
        Side("modelopt_fp8_channel", SCALED, number_format("fp8", form="modelopt", **CHANNEL)),
        "normal_f32",
    ),
    "FP8 tensors of compressed-tensors and of ModelOpt": (
        Side("ct_fp8_tensor", SCALED, number_format("fp8", form="compressed-tensors")),
        Side("modelopt_fp8_tensor", SCALED, number_format("fp8", form="modelopt")),
        "normal_f32",
    ),
}


def stored(side: Side, case: str) -> tuple[list[Spec], list[Any]]:
    found: Mapping[str, tuple[Spec, Any]] = goldens()[side.golden][case]
    parts = [found[f"q/{name}"] for name in side.names]
    return [spec for spec, _ in parts], [raw for _, raw in parts]


def recoded(
    one: Side, target: NumberFormat, case: str, exact_in: str | None = None
) -> tuple[list[Spec], list[Any]]:
    """The specs of what becomes of a golden, and what it is; the reference makes the same."""
    specs, held = stored(one, case)
    args = RECODE.Args(from_=one.form, to=target, exact_in=exact_in)
    roles = codecs.get(one.form.codec).parts[: len(specs)]
    settled = RECODE.settle(args, roles, specs, {})
    order = [roles.index(role) for role in settled.inputs]
    specs, held = [specs[i] for i in order], [held[i] for i in order]
    made, out = computed_parts(settled, specs, held)
    again = RECODE.eager(settled, held, dtypes=[s.dtype for s in specs])
    assert [a.tobytes() for a in out] == [a.tobytes() for a in again]
    return made, out


def assert_is(made: tuple[list[Spec], list[Any]], wanted: Side, case: str) -> None:
    specs, arrays = stored(wanted, case)
    assert [s.shape for s in made[0]] == [s.shape for s in specs]
    for name, got, one in zip(wanted.names, made[1], arrays, strict=True):
        assert got.tobytes() == one.tobytes(), name


@pytest.mark.parametrize("name", PAIRS)
def test_each_is_made_of_the_other(name: str) -> None:
    one, other, case = PAIRS[name]
    divided = "compressed-tensors" if "NVFP4 of ModelOpt and of" in name else None
    exact_in = "bfloat16" if divided else None
    assert_is(recoded(one, other.form, case, exact_in), other, case)
    assert_is(recoded(other, one.form, case, exact_in), one, case)


def test_mxfp4_becomes_the_nvfp4_that_modelopt_makes_of_it() -> None:
    one = Side(EXACT, ("blocks", "scales"), number_format("mxfp4", form="blocks"))
    other = Side(EXACT, tuple(f"nvfp4.{name}" for name in MODELOPT), ONES)
    assert_is(recoded(one, ONES, "normal_bf16"), other, "normal_bf16")
    # with one block 2^21 below another, which ModelOpt loses
    with pytest.raises(
        OpError, match=r"the scale at \[.*\] is .*, more than 2\^17 below"
    ) as caught:
        recoded(one, ONES, "outlier_bf16")
    assert caught.value.code == "M406"


def test_every_byte_of_gpt_oss_is_one_of_mxfp8_but_what_scales_cannot_say() -> None:
    one = Side("gptoss_mxfp4", ("w_blocks", "w_scales"), number_format("mxfp4", form="blocks"))
    specs, (codes, scales) = recoded(one, FP8, "raw_all_bytes")
    assert [s.shape for s in specs] == [(1, 4, 128), (1, 4, 4)]
    (_, (blocks, was)) = stored(one, "raw_all_bytes")
    assert scales.tobytes() == was.tobytes()
    # 0, 0.5, 1, 1.5, 2, 3, 4 and 6 as e4m3
    table = np.array([0, 0x30, 0x38, 0x3C, 0x40, 0x44, 0x48, 0x4C], "u1")
    nibbles = np.stack([blocks & 15, blocks >> 4], -1).reshape(codes.shape)
    assert (codes == (table[nibbles & 7] | (nibbles & 8) << 4)).all()


TE = ("_rowwise_data", "_rowwise_scale_inv")


@pytest.mark.parametrize(
    ("golden", "case", "block", "scales"),
    [
        ("te_fp8_block_2d_fp32scale", "block_odd_129x130_bf16", (128, 128), (2, 2)),
        ("te_fp8_block_2d_fp32scale", "block_1x130_f32", (128, 128), (1, 2)),
        ("te_fp8_block_1d", "block_odd_129x130_bf16", (1, 128), (129, 2)),
        ("te_fp8_block_1d", "block_128x256_bf16", (1, 128), (128, 2)),
    ],
)
def test_scales_of_transformer_engine_lose_their_padding_and_get_it_back(
    golden: str, case: str, block: tuple[int, int], scales: tuple[int, int]
) -> None:
    one = Side(golden, TE, number_format("fp8-block", form="te", block=block))
    plain = number_format("fp8-block", block=block)
    specs, (codes, made) = recoded(one, plain, case)
    (_, (was, padded)) = stored(one, case)
    assert (specs[0].dtype, specs[1].shape) == ("float8_e4m3fn", scales)
    assert codes.tobytes() == was.tobytes()
    kept = padded.T if block[0] == 1 else padded
    assert made.tobytes() == kept[: scales[0], : scales[1]].tobytes()
    args = RECODE.Args(from_=plain, to=one.form)
    back = RECODE.eager(args, [codes, made], dtypes=[s.dtype for s in specs])
    assert back[0].tobytes() == was.tobytes()
    again = back[1].T if block[0] == 1 else back[1]
    assert back[1].shape == padded.shape
    assert again[: scales[0], : scales[1]].tobytes() == made.tobytes()
    # what TE pads with is not defined, here it is nothing
    assert not again[scales[0] :].any()
    assert not again[:, scales[1] :].any()
