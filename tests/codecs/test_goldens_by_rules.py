"""Which golden vectors of the tests of codecs go through rule files: all that a codec decodes, and
all of `fp8` and `fp8-block` that it encodes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import goldens_by_rules
import pytest
import test_bnb
import test_fp8
import test_fp8_block
import test_gguf
import test_gptq_awq
import test_int8
import test_int_pack
import test_microscaling
import test_nvfp4
from kit_layouts import goldens

# what the tests named `…_decode_through_a_rule_file` and `a_rule_decodes_every_golden…` go through
DECODED = (
    test_bnb.NAMES, test_fp8.KINDS, test_fp8_block.KINDS,
    [f"gguf_{kind}" for kind in test_gguf.DECODED], test_gptq_awq.KINDS, test_int8.KINDS,
    test_int_pack.KINDS, test_microscaling.KINDS, test_nvfp4.KINDS,
)  # fmt: skip
# in a test of its own: AutoAWQ's numbers are not what it stored
ALONE = {"awq_gemv_g128"}
# numbers that were rounded and have no parts; words whose order is that of a device, which are
# named and refused
NOT_DECODED = {"microxcaling_fake", "ao_int4_tinygemm"}


def test_every_golden_that_has_a_codec_is_decoded_through_a_rule_file() -> None:
    found = {kind.split()[0] for kinds in DECODED for kind in kinds} | ALONE
    assert found >= set(goldens()) - NOT_DECODED
    assert not found & NOT_DECODED


# format -> the codec and the arguments with which it stores what the library stored
ENCODED: dict[str, tuple[str, dict[str, Any]]] = {
    **{kind: ("fp8", said) for kind, said in test_fp8.ENCODED.items()},
    "ct_fp8_block": ("fp8-block", {"like": "compressed-tensors"}),
    "modelopt_fp8_block": ("fp8-block", {"like": "modelopt"}),
    "hf_fp8_block": ("fp8-block", {"like": "hf", "scale": "f32"}),
    "hf_fp8_block_ue8m0": ("fp8-block", {"like": "hf", "scale": "ue8m0"}),
    "deepgemm_fp8_block": ("fp8-block", {"like": "deepseek", "scale": "f32"}),
    "deepgemm_fp8_block_ue8m0": ("fp8-block", {"like": "deepseek", "scale": "pow2"}),
    "te_fp8_block_1d": (
        "fp8-block", {"like": "hf", "form": "te", "block": [1, 128], "scale": "pow2"}
    ),
    "te_fp8_block_2d_fp32scale": ("fp8-block", {"like": "hf", "form": "te", "scale": "f32"}),
}  # fmt: skip
# scales of blocks that are stored as the numbers were
OF_THE_NUMBERS = {"ct_fp8_block", "modelopt_fp8_block"}
# what a library stores otherwise than the codec, and why
OTHERWISE = {
    **{
        (kind, case): "zero is divided by zero, and NaN stored"
        for kind, cases in test_fp8.DIVIDE_BY_ZERO.items()
        for case in cases
    },
    ("te_fp8_block_1d", "subnormal_f32"): "448 / amax overflows, and 2^127 is taken for it",
    ("te_fp8_block_2d_fp32scale", "block_odd_129x130_bf16"): "one scale is the next number",
}
# Transformer Engine multiplies by 448 / amax and stores the reciprocal of that: no `like` of `fp8`
# does
TE = {
    "te_fp8_e4m3_current": {"codes": test_fp8.E4M3},
    "te_fp8_e4m3_current_pow2": {"codes": test_fp8.E4M3},
    "te_fp8_e5m2_current": {"codes": test_fp8.E5M2},
    "te_fp8_e5m2_current_pow2": {"codes": test_fp8.E5M2},
}


def differing(kind: str, codec: str, said: dict[str, Any], folder: Path) -> set[str]:
    """The cases of which `quantize` in a rule file makes other bits or specs than are stored."""
    names = {**test_fp8.KINDS, **test_fp8_block.KINDS}[kind][:2]
    found = set()
    for case, held in goldens()[kind].items():
        spec, _ = held["input"]
        call = {"codec": codec, "from": spec.dtype, **said}
        if kind in OF_THE_NUMBERS:
            call["scale"] = spec.dtype
        if "inf" in case or "nonfinite" in case:
            call["non_finite"] = "keep"
        made = goldens_by_rules.encoded(
            folder / case, {case: held["input"]}, ("weight", "scale"), call
        )[case]
        for role, name in zip(("weight", "scale"), names, strict=True):
            of, wanted = held[f"q/{name}"]
            if made[role][0] != of or made[role][1].tobytes() != wanted.tobytes():
                found.add(case)
    return found


@pytest.mark.heavy
@pytest.mark.parametrize("kind", ENCODED)
def test_a_rule_encodes_every_golden_of_fp8_bit_for_bit(kind: str, tmp_path: Path) -> None:
    assert differing(kind, *ENCODED[kind], tmp_path) == {c for k, c in OTHERWISE if k == kind}


@pytest.mark.heavy
@pytest.mark.parametrize("kind", TE)
def test_no_arithmetic_of_fp8_is_that_of_transformer_engine(kind: str, tmp_path: Path) -> None:
    for like in ("modelopt", "compressed-tensors", "torchao"):
        said = {"like": like, "form": "te", **TE[kind]}
        assert differing(kind, "fp8", said, tmp_path / like)


def test_every_golden_of_fp8_is_encoded_or_said_not_to_be() -> None:
    known = {"fp8": {*test_fp8.KINDS}, "fp8-block": {*test_fp8_block.KINDS}}
    for codec, kinds in known.items():
        encoded = {kind for kind, (of, _) in ENCODED.items() if of == codec}
        assert encoded | (kinds & {*TE}) == kinds
    assert not {*ENCODED} & {*TE}
    named = {kind for kind in goldens() if "_fp8_" in kind or "_float8_" in kind}
    assert named == known["fp8"] | known["fp8-block"]
    assert {kind for kind, _ in OTHERWISE} <= {*ENCODED}
