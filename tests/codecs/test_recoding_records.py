"""Blocks of GGUF that hold one scale each become words of integers and come back: the numbers are
those of gguf-py, and the bytes the same. What has no place is refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import goldens_by_rules
import numpy as np
import pytest
from kit_layouts import goldens
from recoded_parts import RECODE
from test_recoding_integers import form, int_pack, recoded, refused, settled

import migrate
from migrate.core.errors import MigrateError
from migrate.core.spec import Spec
from migrate.ops.base import OneWay
from migrate.source.ggml_types import TYPES

NUMBERS = {known.name: number for number, known in TYPES.items()}
RULES = """{head}  - name: there
    from: {{data: "{{c}}", type: "{{c}}_type"}}
    to: {{weight: "{{c}}.weight", scale: "{{c}}.scale", shape: "{{c}}.shape"}}
    via: [{{recode: {{from: {{codec: gguf, type: {kind}}}, to: {{codec: int-pack, bits: {bits}, non_finite: keep}}}}}}]
"""  # noqa: E501


def stored(kind: str) -> dict[str, Any]:
    """Case -> blocks, of which gguf-py encoded some."""
    return {case: held["q/data"] for case, held in goldens()[f"gguf_{kind}"].items()}


@pytest.mark.parametrize(("kind", "bits"), [("q4_0", 4), ("q8_0", 8)])
def test_blocks_are_words_and_come_back_through_a_rule_file(
    kind: str, bits: int, tmp_path: Path
) -> None:
    # words have two axes
    cases = {case: held for case, held in stored(kind).items() if len(held[0].shape) == 2}
    number = Spec("int32", ()), np.array(NUMBERS[kind], "<u4")
    source, there, back = (tmp_path / f"{n}.safetensors" for n in "abc")
    source.write_bytes(
        goldens_by_rules.safetensors(cases | {f"{case}_type": number for case in cases})
    )
    rules = tmp_path / "r.yaml"
    rules.write_text(RULES.format(head=goldens_by_rules.HEAD, kind=kind, bits=bits))
    migrate.apply(source, there, rules=rules, fsync=False)
    made = goldens_by_rules.read(there.read_bytes())
    for case, (spec, raw) in cases.items():
        wanted = goldens()[f"gguf_{kind}"][case]["dq/gguf.f32"][1].view("<f4")
        blocks = raw.reshape(-1, spec.shape[-1] // (2 + 4 * bits), 2 + 4 * bits)
        scale = np.ascontiguousarray(blocks[..., :2]).view("<f2")[..., 0]
        assert (made[f"{case}.scale"][1].view("<f2") == scale).all()
        assert made[f"{case}.shape"][1].tolist() == list(wanted.shape)
        words = made[f"{case}.weight"][1]
        codes = words[..., None] >> np.arange(0, 32, bits, dtype="<u4") & (1 << bits) - 1
        integers = codes.reshape(wanted.shape).astype("<i4") - (1 << bits - 1)
        assert (integers * np.repeat(scale, 32, 1).astype("<f4") == wanted).all()
    migrate.downgrade(there, back, rules=rules, fsync=False)
    assert goldens_by_rules.read(back.read_bytes()).keys() == {
        *cases, *(f"{case}_type" for case in cases)
    }  # fmt: skip
    for key, (spec, raw) in goldens_by_rules.read(back.read_bytes()).items():
        before = number if key.endswith("_type") else cases[key]
        assert (spec, raw.tobytes()) == (before[0], before[1].tobytes())


def parts(kind: str, case: str = "random") -> dict[str, Any]:
    """Blocks and their type, by role."""
    return {
        "data": stored(kind)[case],
        "type": (Spec("int32", ()), np.array(NUMBERS[kind], "<u4")),
    }


GGUF, FOUR, EIGHT = form("gguf"), form("gguf", type="q4_0"), form("gguf", type="q8_0")
PACK, LENIENT = form("int-pack"), form("int-pack", non_finite="keep")


def test_a_stack_of_blocks_is_int8_and_comes_back() -> None:
    given = parts("q8_0")
    assert len(given["data"][0].shape) == 3
    target = form("int8", group=32, non_finite="keep")
    made = recoded(GGUF, given, target)
    assert made["weight"][0] == Spec("int8", (2, 3, 128))
    assert made["scale"][0] == Spec("float16", (2, 3, 4))
    back = recoded(target, made, EIGHT)
    assert {role: raw.tobytes() for role, (_, raw) in back.items()} == {
        role: raw.tobytes() for role, (_, raw) in given.items()
    }


def test_the_type_is_made_where_it_has_a_name() -> None:
    given = int_pack(np.full((4, 64), 9))
    assert [*recoded(PACK, given, FOUR)] == ["data", "type"]
    assert [*recoded(PACK, given, FOUR, ("data",))] == ["data"]
    made = recoded(PACK, given, FOUR)
    assert made["type"][1] == 2
    assert made["data"][0] == Spec("uint8", (4, 36))
    assert (made["data"][1].reshape(4, 2, 18)[..., 2:] == 0x99).all()


def test_a_scale_of_more_columns_is_in_every_block_and_one_of_fewer_has_no_place() -> None:
    given = int_pack(np.arange(256).reshape(2, 128) % 16, group=64)
    made = recoded(PACK, given, FOUR)["data"][1].reshape(2, 4, 18)
    scale = np.ascontiguousarray(made[..., :2]).view("<u2")[..., 0]
    assert (scale == given["scale"][1].repeat(2, 1)).all()
    error = refused(PACK, int_pack(np.zeros((2, 64)), group=16), FOUR)
    assert error.code == "M308"
    assert "32 columns share a scale there, and 16 here" in error.message


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_scales_of_another_dtype_are_refused(dtype: str) -> None:
    given = int_pack(np.full((4, 64), 9))
    width = "<u4" if dtype == "float32" else "<u2"
    given["scale"] = Spec(dtype, (4, 2)), np.ones((4, 2), width)
    error = refused(PACK, given, FOUR)
    assert error.code == "M308"
    assert f"its scales are float16, and {dtype} here" in error.message


def test_columns_that_are_not_whole_blocks_are_refused_with_the_shape() -> None:
    given = {
        "weight": (Spec("int8", (2, 48)), np.zeros((2, 48), "u1")),
        "scale": (Spec("float16", (2, 1)), np.full((2, 1), 0x3C00, "<u2")),
    }
    error = refused(form("int8"), given, EIGHT)
    assert error.code == "M308"
    assert "of numbers [2, 48] to gguf q8_0" in error.message


def test_codes_beyond_those_of_the_other_are_refused_with_their_place() -> None:
    given = {
        "weight": (Spec("int8", (2, 64)), np.zeros((2, 64), "u1")),
        "scale": (Spec("float16", (2, 1)), np.full((2, 1), 0x3C00, "<u2")),
    }
    given["weight"][1][1, 40] = 8
    error = refused(form("int8"), given, FOUR)
    assert error.code == "M406"
    assert "the number at [1, 40] has no code in gguf q4_0" in error.message
    given["weight"][1][1, 40] = 0xF8
    made = recoded(form("int8"), given, FOUR)
    assert made["data"][1].reshape(2, 2, 18)[1, 1, 2 + 8] == 0x80


def test_zeros_beside_the_codes_have_no_place() -> None:
    given = int_pack(np.full((8, 64), 9))
    zero = Spec("int32", (1, 2)), np.full((1, 2), 0x88888888, "<u4")
    plain = recoded(form("int-pack", bits=4), given | {"zero": zero}, FOUR)
    assert plain["data"][1].tobytes() == recoded(PACK, given, FOUR)["data"][1].tobytes()
    zero[1][0, 1] ^= 0x300
    error = refused(form("int-pack", bits=4), given | {"zero": zero}, FOUR)
    assert error.code == "M406"
    assert "the zero of the numbers from [2, 32] on is 11, and not 8" in error.message


def test_scales_that_are_negative_or_no_number_are_refused_unless_they_are_kept() -> None:
    error = refused(GGUF, {**parts("q4_0", "normal_bf16")}, PACK)
    assert error.code == "M406"
    assert "the scale of the numbers from [0," in error.message
    assert "`non_finite: keep` in `to`" in str(error.help)
    given = int_pack(np.full((4, 64), 9))
    given["scale"][1][3, 1] = 0xFC00
    error = refused(LENIENT, given, FOUR)
    assert error.code == "M406"
    assert "the scale of the numbers from [3, 32] on is -inf" in error.message
    kept = recoded(LENIENT, given, form("gguf", type="q4_0", non_finite="keep"))
    assert kept["data"][1].reshape(4, 2, 18)[3, 1, :2].tolist() == [0, 0xFC]
    given["scale"][1][3, 1] = 0x8001
    assert recoded(LENIENT, given, FOUR)["data"][1].reshape(4, 2, 18)[3, 1, :2].tolist() == [1, 128]


@pytest.mark.parametrize("kind", ["q4_1", "q5_1", "q2_k", "q4_k", "q6_k", "mxfp4", "f16"])
def test_blocks_of_more_than_codes_and_a_scale_have_no_path(kind: str) -> None:
    given = parts(kind)
    # words have two axes
    raw = given["data"][1].reshape(-1, given["data"][0].shape[-1])
    given["data"] = Spec("uint8", raw.shape), raw
    error = refused(GGUF, given, LENIENT)
    assert error.code == "M308"
    given = int_pack(np.full((4, 256), 9))
    error = refused(PACK, given, form("gguf", type=kind))
    assert error.code == "M308"


def test_what_blocks_are_made_has_to_be_said() -> None:
    error = refused(PACK, int_pack(np.full((4, 64), 9)), GGUF)
    assert error.code == "M408"
    assert "nothing says of which type blocks are" in error.message
    back = RECODE.invert(RECODE.Args(from_=GGUF, to=PACK))
    assert isinstance(back, OneWay)
    assert "`from` does not say with `type`" in back.because
    assert RECODE.invert(RECODE.Args(from_=FOUR, to=PACK)).op == "recode"


def test_nothing_is_quantized_to_blocks(tmp_path: Path) -> None:
    """Parts of integers become blocks; numbers do not."""
    given = {"w": (Spec("float16", (2, 64)), np.zeros((2, 64), "<u2"))}
    call = {"codec": "gguf", "from": "float16", "type": "q4_0"}
    with pytest.raises(MigrateError, match="nothing encodes it"):
        goldens_by_rules.encoded(tmp_path / "x", given, ("data", "type"), call)
    assert settled(PACK, int_pack(np.zeros((2, 64))), FOUR).outputs == ("data", "type")
