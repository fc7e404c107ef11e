"""`dequantize` and `quantize`: the kit, roles, inverses, losses, and what they refuse."""

from __future__ import annotations

import numpy as np
import pytest

from migrate import codecs, ops
from migrate.codecs.base import ACTIVATION_SCALES
from migrate.core.errors import page
from migrate.core.spec import spec
from migrate.ops.base import Loss, OneWay, OpCall, OpError
from migrate.testing import valuekit

DEQUANTIZE, QUANTIZE = ops.get("dequantize"), ops.get("quantize")
CODES = "float8_e4m3fn"
FP8 = codecs.get("fp8-block").Args


def decoding(dtype="bfloat16", codec="fp8-block", **own):
    return DEQUANTIZE.Args(codec=codec, dtype=dtype, codec_args=FP8(**own))


def encoding(from_=None, codec="fp8-block", **own):
    return QUANTIZE.Args(codec=codec, from_=from_, codec_args=FP8(**own))


def refused(call) -> OpError:
    with pytest.raises(OpError) as caught:
        call()
    page(caught.value.code)
    return caught.value


@pytest.mark.heavy
@pytest.mark.parametrize("scale", ["float32", "bfloat16", "float8_e8m0fnu"])
def test_dequantize_satisfies_the_kit(scale):
    assert valuekit.check("dequantize", [(CODES, scale)]) == 2


@pytest.mark.heavy
def test_quantize_satisfies_the_kit():
    assert valuekit.check("quantize", ["bfloat16"]) == 2


def test_roles_are_the_parts_of_the_codec():
    assert QUANTIZE.roles("fp8-block") == ("weight", "scale")
    assert DEQUANTIZE.roles("fp8-block") == ("weight", "scale", *ACTIVATION_SCALES)
    assert QUANTIZE.parts(QUANTIZE.Args(codec="fp8-block"), (4, 4), 2) == 2
    assert DEQUANTIZE.roles("no-such-codec") == ()


def test_a_codec_that_does_not_exist_is_refused_with_the_nearest():
    for op, more in ((DEQUANTIZE, {"dtype": "bfloat16"}), (QUANTIZE, {})):
        error = refused(lambda op=op, more=more: op.validate(op.Args(codec="fp8_blocks", **more)))
        assert (error.code, error.message, error.help) == (
            "M308",
            "there is no codec 'fp8_blocks'",
            "did you mean `fp8-block`?",
        )


def test_options_are_checked_without_a_tensor():
    error = refused(lambda: QUANTIZE.validate(encoding(scale_fmt="e8m0")))
    assert (error.code, error.message, error.help) == (
        "M308",
        "fp8-block: `scale_fmt` is e8m0, it must be one of ue8m0, float",
        None,
    )
    error = refused(lambda: QUANTIZE.validate(encoding(like="deepsek")))
    assert (error.code, error.message) == (
        "M308",
        (
            "fp8-block: `like` is deepsek, it must be one of deepseek, hf, compressed-tensors, "
            "modelopt"
        ),
    )
    assert refused(lambda: DEQUANTIZE.validate(decoding(block=(0, 1)))).code == "M308"


def test_arguments_that_came_from_a_param_are_checked_where_they_meet_a_tensor() -> None:
    parts = [spec("float8_e4m3fn", (4, 4)), spec("float32", (1, 1))]
    assert refused(lambda: DEQUANTIZE.infer(decoding(block=(128,)), parts)).code == "M308"
    assert (
        refused(lambda: QUANTIZE.infer(encoding(block=(128,)), [spec("bfloat16", (4, 4))])).code
        == "M308"
    )


def test_each_is_the_inverse_of_the_other_and_keeps_every_option():
    said = {
        "block": (4, 8),
        "like": "hf",
        "scale": "bf16",
        "scale_fmt": "ue8m0",
        "non_finite": "saturate",
    }
    there = decoding("float16", **said)
    back = DEQUANTIZE.invert(there)
    assert back == OpCall("quantize", encoding("float16", **said))
    assert QUANTIZE.invert(back.args) == OpCall("dequantize", there)


def test_quantize_without_the_dtype_before_is_one_way():
    back = QUANTIZE.invert(QUANTIZE.Args(codec="fp8-block"))
    assert isinstance(back, OneWay)
    assert back.help == "write `from`: their dtype"


@pytest.mark.parametrize(
    ("option", "stored"),
    [
        (None, "float32"),
        ("f32", "float32"),
        ("pow2", "float32"),
        ("bf16", "bfloat16"),
        ("ue8m0", "float8_e8m0fnu"),
    ],
)
def test_the_scale_is_stored_as_the_option_says(option, stored):
    made = QUANTIZE.infer(encoding(scale=option), [spec("bfloat16", (576, 130))], 2)
    assert made == [spec(CODES, (576, 130)), spec(stored, (5, 2))]


def test_the_dtype_before_is_checked():
    error = refused(
        lambda: QUANTIZE.infer(
            QUANTIZE.Args(codec="fp8-block", from_="float16"), [spec("bfloat16", (2, 2))]
        )
    )
    assert (error.code, error.message) == (
        "M303",
        "quantize: the numbers are bfloat16, the rule says `from: float16`",
    )
    assert (
        refused(
            lambda: QUANTIZE.infer(QUANTIZE.Args(codec="fp8-block"), [spec("int8", (2, 2))])
        ).code
        == "M303"
    )
    assert (
        refused(
            lambda: QUANTIZE.infer(QUANTIZE.Args(codec="fp8-block"), [spec("bfloat16", (2,))])
        ).code
        == "M304"
    )


def test_a_weight_alone_has_no_numbers():
    error = refused(
        lambda: DEQUANTIZE.infer(
            DEQUANTIZE.Args(codec="fp8-block", dtype="bfloat16"), [spec(CODES, (2, 2))]
        )
    )
    assert (error.code, error.message) == (
        "M408",
        "dequantize: fp8-block cannot be decoded without its scale; there is only the weight",
    )


def test_dequantize_loses_unless_the_specs_prove_that_it_does_not():
    def loss(dtype, scale):
        args = DEQUANTIZE.Args(codec="fp8-block", dtype=dtype)
        return DEQUANTIZE.loss_on(args, [spec(CODES, (2, 2)), spec(scale, (1, 1))])

    assert loss("float32", "float8_e8m0fnu") is Loss.LOSSLESS
    assert loss("bfloat16", "float8_e8m0fnu") is Loss.LOSSLESS
    assert loss("float16", "float8_e8m0fnu") is Loss.LOSSY
    assert loss("float32", "float32") is Loss.LOSSY
    assert DEQUANTIZE.loss(DEQUANTIZE.Args(codec="fp8-block", dtype="float32")) is Loss.LOSSY
    assert (
        QUANTIZE.loss_on(QUANTIZE.Args(codec="fp8-block"), [spec("float32", (2, 2))]) is Loss.LOSSY
    )


@pytest.mark.heavy
def test_a_codec_of_numbers_that_it_made_itself_gives_the_same_codes_again():
    # a block whose largest code is 448 and whose scale is a power of two comes back to the bit
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 0x7F, (8, 8), dtype="u1")
    codes[::4, ::4] = 0x7E
    scale = (rng.integers(120, 126, (2, 2)).astype("<u4") << 23).astype("<u4")
    there = decoding(block=(4, 4), scale="pow2")
    specs = [spec(CODES, (8, 8)), spec("float32", (2, 2))]
    numbers = valuekit.compute(DEQUANTIZE, there, [codes, scale], specs, 0, ((0, 8), (0, 8)))
    back, of = DEQUANTIZE.invert(there).args, [spec("bfloat16", (8, 8))]
    assert np.array_equal(
        valuekit.compute(QUANTIZE, back, [numbers], of, 0, ((0, 8), (0, 8))), codes
    )
    assert np.array_equal(
        valuekit.compute(QUANTIZE, back, [numbers], of, 1, ((0, 2), (0, 2))), scale
    )
