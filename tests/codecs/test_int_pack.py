"""`int-pack`: golden vectors through rule files, both layouts of bits that do not fill words, and
what is refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import goldens_by_rules
import kit_layouts
import little_memory
import numpy as np
import pytest
from kit_layouts import goldens
from marks import thorough

import migrate
from migrate.codecs import get
from migrate.codecs.base import OpError
from migrate.core.errors import MigrateError
from migrate.core.spec import Spec
from migrate.testing import codeckit

CODEC: Any = get("int-pack")
NAMES = {
    "weight": "weight_packed",
    "scale": "weight_scale",
    "shape": "weight_shape",
    "zero": "weight_zero_point",
}
# golden format -> what a rule says to encode
KINDS: dict[str, dict[str, Any]] = {
    "ct_w8a16_pack": {"bits": 8},
    "ct_w4a16_g128_sym": {"bits": 4, "group": 128},
    "ct_w4a16_g128_asym": {"bits": 4, "group": 128, "symmetric": False},
    "ct_w3a16_dense": {"bits": 3, "group": 128},
}
Held = tuple[Spec, Any]


def parts_of(kind: str) -> dict[str, dict[str, Held]]:
    """case -> role -> (spec, raw elements)."""
    return {
        case: {role: found[f"q/{name}"] for role, name in NAMES.items() if f"q/{name}" in found}
        for case, found in goldens()[kind].items()
    }


@pytest.mark.parametrize("number", range(len(list(CODEC.samples()))))
def test_the_codec_passes_the_kit(number: int) -> None:
    codeckit.check_sample("int-pack", number)


def test_the_codec_is_described_and_takes_any_axes() -> None:
    codeckit.check_description("int-pack")
    assert codeckit.check_axes("int-pack") > 0


@pytest.mark.parametrize("kind", KINDS)
def test_goldens_decode_through_a_rule_file(kind: str, tmp_path: Path) -> None:
    # neither bits nor groups are said
    stored, call = parts_of(kind), {"codec": "int-pack", "non_finite": "keep"}
    assert goldens_by_rules.compare_numbers(tmp_path, kind, stored, call) == len(stored)


@pytest.mark.parametrize("kind", KINDS)
def test_goldens_encode_through_a_rule_file(kind: str, tmp_path: Path) -> None:
    stored = parts_of(kind)
    call = {"codec": "int-pack", "non_finite": "keep", **KINDS[kind]}
    assert goldens_by_rules.compare_parts(tmp_path, kind, stored, call) == len(stored)


def shape(*size: int, dtype: str = "int64") -> Held:
    raw = np.array(size, {"int64": "<i8", "int32": "<i4"}[dtype])
    return Spec(dtype, (len(size),)), raw.view(raw.dtype.str.replace("i", "u"))


def words(codes: Any, bits: int, dense: bool) -> Held:
    """Codes packed along rows, one bit at a time."""
    rows, columns = codes.shape
    per = 32 // bits
    count = -(-columns * bits // 32) if dense else -(-columns // per)
    out = np.zeros((rows, count), "<u8")
    for column in range(columns):
        for bit in range(bits):
            at = column * bits + bit if dense else column // per * 32 + column % per * bits + bit
            out[:, at // 32] |= (codes[:, column].astype("<u8") >> bit & 1) << (at % 32)
    return Spec("int32", out.shape), out.astype("<u4")


def numbers_of(tmp_path: Path, parts: dict[str, Held], **said: Any) -> Any:
    call = {"codec": "int-pack", "dtype": "float32", **said}
    made = goldens_by_rules.decoded(tmp_path / "x", {"c": parts}, call, ("lossy",))
    return made["c"][1].view("<f4")


def scale(rows: int, groups: int) -> Held:
    made = (1 + np.arange(rows * groups, dtype="<f4").reshape(rows, groups)) / 8
    return Spec("float32", made.shape), made.view("<u4")


@pytest.mark.parametrize(
    ("bits", "columns", "said"),
    [
        (3, 64, set()), (3, 70, {"form"}), (5, 64, set()), (6, 64, set()),
        (6, 10, {"bits", "form"}), (7, 64, {"bits"}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("form", ["dense", "words"])
def test_both_layouts_of_bits_that_do_not_fill_words_are_decoded(
    form: str, bits: int, columns: int, said: set[str], tmp_path: Path
) -> None:
    """Lengths tell which it is but where both are the same, and of 7 bits within words, which are
    as many as of 8.
    """
    codes = np.random.default_rng(3).integers(0, 1 << bits, (5, columns)).astype("u1")
    parts = {
        "weight": words(codes, bits, form == "dense"), "scale": scale(5, 2),
        "shape": shape(5, columns),
    }  # fmt: skip
    call = {name: {"bits": bits, "form": form}[name] for name in said}
    made = numbers_of(tmp_path, parts, **call)
    wide = np.repeat(parts["scale"][1].view("<f4"), columns // 2, axis=1)
    assert (made == (codes.astype("f4") - (1 << (bits - 1))) * wide).all()


def test_three_bits_that_fit_both_layouts_are_refused_with_what_decides(tmp_path: Path) -> None:
    codes = np.zeros((5, 70), "u1")
    parts = {"weight": words(codes, 3, True), "scale": scale(5, 2), "shape": shape(5, 70)}
    with pytest.raises(MigrateError) as caught:
        numbers_of(tmp_path, parts, bits=3)
    (found,) = caught.value.diagnostics
    assert found.code == "M310"
    assert "codes may have 3 bits across words or 3 bits within words" in found.message
    assert found.help == "write `form: dense` or `form: words`"
    assert any("c.weight" in note for note in found.notes)


def test_zeros_tell_what_codes_do_not(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    codes, zeros = (rng.integers(0, 8, n).astype("u1") for n in ((64, 70), (64, 2)))
    for dense in (True, False):
        spec, raw = words(np.ascontiguousarray(zeros.T), 3, dense)
        parts = {
            "weight": words(codes, 3, dense), "scale": scale(64, 2), "shape": shape(64, 70),
            "zero": (Spec("int32", spec.shape[::-1]), np.ascontiguousarray(raw.T)),
        }  # fmt: skip
        (tmp_path / str(dense)).mkdir()
        made = numbers_of(tmp_path / str(dense), parts)
        wide = np.repeat(parts["scale"][1].view("<f4"), 35, axis=1)
        assert (made == (codes.astype("f4") - np.repeat(zeros, 35, axis=1)) * wide).all()


@pytest.mark.parametrize("has_zero", [False, True])
def test_groups_that_a_part_names_for_each_column(has_zero: bool, tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    codes, zeros = (rng.integers(0, 16, n).astype("u1") for n in ((8, 64), (8, 2)))
    of = rng.permutation(64) % 2
    spec, raw = words(np.ascontiguousarray(zeros.T), 4, True)
    parts = {
        "weight": words(codes, 4, True), "scale": scale(8, 2),
        "shape": shape(8, 64, dtype="int32"),
        "group": (Spec("int32", (64,)), of.astype("<i4").view("<u4")),
    }  # fmt: skip
    if has_zero:
        parts["zero"] = (Spec("int32", spec.shape[::-1]), np.ascontiguousarray(raw.T))
    made = numbers_of(tmp_path, parts)
    zero = zeros.astype("f4")[:, of] if has_zero else 8
    assert (made == (codes.astype("f4") - zero) * parts["scale"][1].view("<f4")[:, of]).all()


@pytest.mark.parametrize("number", [2, -1])
def test_an_index_beyond_the_groups_is_refused(number: int, tmp_path: Path) -> None:
    of = np.arange(64, dtype="<i4") // 32
    of[33] = number
    parts = {
        "weight": words(np.zeros((8, 64), "u1"), 4, True), "scale": scale(8, 2),
        "shape": shape(8, 64), "group": (Spec("int32", (64,)), of.view("<u4")),
    }  # fmt: skip
    with pytest.raises(MigrateError) as caught:
        numbers_of(tmp_path, parts)
    (found,) = caught.value.diagnostics
    assert found.code == "M406"
    assert f"the group of column 33 is {number}, the scale has entries 0 to 1" in found.message
    assert not (tmp_path / "x" / "out.safetensors").exists()


WEIGHT, SCALE = Spec("int32", (4, 16)), Spec("bfloat16", (4, 4))


def settled(size: Held, *specs: Spec | None, **said: Any) -> Any:
    weight, scale_, zero, group = (*specs, None, None)[:4]
    there = [weight, scale_, size[0], zero, group]
    args = CODEC.settle(CODEC.Args(**said), there, {"shape": size[1].tobytes()})
    return CODEC.decoded(args, there, "bfloat16")


def test_bits_and_groups_follow_from_the_parts() -> None:
    for bits, columns in ((2, 256), (4, 128), (8, 64), (3, 170)):
        size = shape(4, columns)
        wide = Spec("bfloat16", (4, 2))
        assert settled(size, WEIGHT, wide).shape == (4, columns)
        read = CODEC.settle(CODEC.Args(), [WEIGHT, wide, size[0], None, None],
                            {"shape": size[1].tobytes()})  # fmt: skip
        assert (read.bits, read.group) == (bits, columns // 2)


@pytest.mark.parametrize(
    ("size", "specs", "said", "words_"),
    [
        (shape(5, 128), (WEIGHT, SCALE), {}, "the shape says [5, 128], the weight is int32"),
        (shape(4, 90), (WEIGHT, SCALE), {}, "which codes of 2 to 8 bits do not have"),
        (shape(4, 128), (WEIGHT, SCALE), {"bits": 8}, "which codes of 8 bits do not have"),
        (shape(4, -1), (WEIGHT, SCALE), {}, "the shape says [4, -1]"),
        (shape(4, 128, 1), (WEIGHT, SCALE), {}, "the shape is int64 [3]"),
        (shape(4, 128), (Spec("int32", (4, 16, 1)), SCALE), {}, "the weight is int32 [4, 16, 1]"),
        (shape(4, 128), (WEIGHT, Spec("bfloat16", (4, 3))), {}, "128 columns are not 3 groups"),
        (shape(4, 128), (WEIGHT, Spec("bfloat16", (2, 4))), {}, "the scale is [2, 4]"),
        (shape(4, 128), (WEIGHT, SCALE), {"group": 64}, "in blocks of 1 x 64 is [4, 2]"),
        (shape(4, 128), (WEIGHT, SCALE, Spec("int32", (2, 4))), {}, "and the zero int32 [2, 4]"),
        (shape(4, 128), (WEIGHT, SCALE, Spec("int32", (1, 2))), {}, "the zero is [1, 2]"),
        (shape(4, 128), (WEIGHT, SCALE, None, Spec("int32", (64,))), {}, "the group is [64]"),
        (
            shape(4, 128), (WEIGHT, SCALE, Spec("int32", (1, 3)), Spec("int32", (128,))), {},
            "the zero is of 3 groups, the scale of 4",
        ),
    ],
)  # fmt: skip
def test_parts_that_do_not_fit_are_refused_from_their_specs(
    size: Held, specs: tuple[Spec, ...], said: dict[str, Any], words_: str
) -> None:
    with pytest.raises(OpError) as caught:
        settled(size, *specs, **said)
    assert caught.value.code == "M310"
    assert words_ in caught.value.message


@pytest.mark.parametrize(
    ("specs", "words_"),
    [
        ((Spec("int64", (4, 16)), SCALE), "the weight is int64, not int32"),
        ((WEIGHT, Spec("int32", (4, 4))), "the scale is int32"),
        ((WEIGHT, SCALE, Spec("uint8", (1, 4))), "the zero is uint8, not int32"),
    ],
)
def test_other_dtypes_are_refused(specs: tuple[Spec, ...], words_: str) -> None:
    with pytest.raises(OpError) as caught:
        settled(shape(4, 128), *specs)
    assert caught.value.code == "M303"
    assert words_ in caught.value.message


def test_a_shape_that_says_otherwise_is_named_while_planning(tmp_path: Path) -> None:
    parts = dict(parts_of("ct_w4a16_g128_sym")["normal_f32"]) | {"shape": shape(32, 384)}
    with pytest.raises(MigrateError) as caught:
        numbers_of(tmp_path, parts)
    (found,) = caught.value.diagnostics
    assert found.code == "M310"
    assert "the shape says [32, 384], the weight is int32 [32, 16]" in found.message
    assert any("c.shape" in note for note in found.notes)


@pytest.mark.parametrize("role", ["weight", "scale", "shape"])
def test_a_part_that_is_missing_is_named(role: str, tmp_path: Path) -> None:
    parts = parts_of("ct_w4a16_g128_sym")["normal_f32"]
    cases = {"c": {r: one for r, one in parts.items() if r != role}, "whole": parts}
    with pytest.raises(MigrateError) as caught:
        goldens_by_rules.decoded(
            tmp_path / "x", cases, {"codec": "int-pack", "dtype": "float32"}, ("lossy",)
        )
    (found,) = caught.value.diagnostics
    assert found.code == "M207"
    assert f"c.{role}" in str(found)


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_a_scale_that_scales_nothing_is_refused(value: float, tmp_path: Path) -> None:
    spec, raw = scale(4, 2)
    raw = raw.copy()
    raw.view("<f4")[2, 1] = value
    parts = {
        "weight": words(np.full((4, 64), 9, "u1"), 4, True), "scale": (spec, raw),
        "shape": shape(4, 64),
    }  # fmt: skip
    with pytest.raises(MigrateError) as caught:
        numbers_of(tmp_path, parts)
    (found,) = caught.value.diagnostics
    assert found.code == "M406"
    (tmp_path / "kept").mkdir()
    kept = numbers_of(tmp_path / "kept", parts, non_finite="keep")
    assert np.array_equal(kept[2, 32:], np.full(32, value, "f4"), equal_nan=True)


@pytest.mark.parametrize(
    ("said", "size", "code", "words_"),
    [
        ({"group": 48}, (4, 64), "M304", "64 columns are no multiple of groups of 48"),
        ({}, (4, 4, 64), "M304", "of rows and columns"),
        ({"symmetric": False}, (1, 2**20 + 1), "M304", "one zero for 1048577 numbers"),
    ],
)
def test_numbers_that_are_not_encoded_are_refused(
    said: dict[str, Any], size: tuple[int, ...], code: str, words_: str
) -> None:
    with pytest.raises(OpError) as caught:
        CODEC.encoded(CODEC.Args(**said), Spec("bfloat16", size))
    assert caught.value.code == code
    assert words_ in caught.value.message


@pytest.mark.parametrize(
    "said", [{"bits": 4, "form": "dense"}, {"like": "kimi", "symmetric": False}]
)
def test_arguments_that_contradict_each_other_are_refused(said: dict[str, Any]) -> None:
    with pytest.raises(OpError) as caught:
        CODEC.validate(CODEC.Args(**said), True)
    assert caught.value.code == "M308"


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_numbers_that_are_not_finite_are_refused_with_their_index(
    value: float, tmp_path: Path
) -> None:
    numbers = np.ones((3, 64), "<f4")
    numbers[2, 40] = value
    held = {"w": (Spec("float32", (3, 64)), numbers.view("<u4"))}
    call = {"codec": "int-pack", "from": "float32", "group": 32}
    with pytest.raises(MigrateError) as caught:
        goldens_by_rules.encoded(tmp_path / "x", held, ("weight", "scale", "shape"), call)
    (found,) = caught.value.diagnostics
    assert found.code == "M406"
    assert "[2, 40]" in str(found)


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("like", ["kimi", "compressed-tensors"])
def test_what_returns_is_said(bits: int, like: str) -> None:
    args, spec = CODEC.Args(bits=bits, group=32, like=like), Spec("float32", (1, 32))
    most = (1 << (bits - 1)) - 1
    data = "depends on the data"
    said = {
        "kimi": f"{data}: codes of groups with a code of {most} or -{most}",
        "compressed-tensors": data,
    }
    assert CODEC.returns(args, spec) == said[like]
    if like == "kimi":
        # of numbers that are codes, those whose largest is the largest code stay what they are
        for largest in range(1, most + 1):
            numbers = np.array([[largest, *[0] * 31]], "f4")
            found = CODEC.reference_parts(args, numbers.view("<u4"), spec)
            code = int(found[0].reshape(-1)[0]) & ((1 << bits) - 1)
            assert (code - (1 << (bits - 1)) == largest) == (largest == most)


def test_kimi_never_writes_the_least_code_and_its_codes_return(tmp_path: Path) -> None:
    rng = np.random.default_rng(6)
    codes = rng.integers(1, 16, (16, 128)).astype("u1")
    codes[:, ::32] = 15
    scales = np.exp2(rng.integers(-9, -3, (16, 4))).astype("<f4")
    parts = {
        "weight": words(codes, 4, True), "shape": shape(16, 128, dtype="int32"),
        "scale": (Spec("bfloat16", (16, 4)), (scales.view("<u4") >> 16).astype("<u2")),
    }  # fmt: skip
    call = {"codec": "int-pack", "dtype": "bfloat16", "group": 32, "like": "kimi", "shape": "int32"}
    made = goldens_by_rules.decoded(tmp_path / "x", {"c": parts}, call, ("lossy",))
    back = {k: v for k, v in call.items() if k != "dtype"} | {"from": "bfloat16"}
    roles = ("weight", "scale", "shape")
    again = goldens_by_rules.encoded(tmp_path / "y", {"c": made["c"]}, roles, back)["c"]
    assert {r: (s, a.tobytes()) for r, (s, a) in again.items()} == {
        r: (s, a.tobytes()) for r, (s, a) in parts.items()
    }


def test_empty_tensors_keep_their_shape() -> None:
    spec = Spec("bfloat16", (0, 64))
    args = CODEC.Args(group=32)
    parts = codeckit.encoded(CODEC, args, np.zeros((0, 64), "<u2"), spec)
    (size,) = [part for part, role in zip(parts, CODEC.parts, strict=True) if role == "shape"]
    assert size is not None
    assert size.view("<i8").tolist() == [0, 64]
    assert CODEC.foreseen(args, spec) == {"shape": size.tobytes()}


RULE = """
id: x/a/b
title: Words
lineage: x
edge: [a, b]
rules:
  - name: words
    from: {FROM}
    to: {TO}
    via: [{STEP}]
"""


# with zero points every role is there
@pytest.mark.parametrize("symmetric", thorough([False, True]))
def test_verify_compares_large_tensors_in_rows(symmetric: bool, tmp_path: Path) -> None:
    """Words of zeros hold those of several rows, and the shape says how many there are of all."""
    rng, most = np.random.default_rng(8), 12 << 20
    raw = (rng.normal(size=(6_500, 1024)).astype("<f4").view("<u4") >> 16).astype("<u2")
    assert most < raw.nbytes
    files = [tmp_path / f"{name}.safetensors" for name in ("numbers", "words", "again")]
    files[0].write_bytes(goldens_by_rules.safetensors({"w": (Spec("bfloat16", raw.shape), raw)}))
    roles = ("weight", "scale", "shape") + (() if symmetric else ("zero",))
    parts = ", ".join(f"{role}: w.{role}" for role in roles)
    steps = (
        ("w", f"{{{parts}}}", "quantize: {codec: int-pack, from: bfloat16, group: 128}"),
        (f"{{{parts}}}", "w", "dequantize: {codec: int-pack, dtype: bfloat16}"),
    )
    for number, (one, other, call) in enumerate(steps):
        rule = tmp_path / f"{number}.yaml"
        rule.write_text(RULE.replace("{FROM}", one).replace("{TO}", other).replace("STEP", call))
        how: dict[str, Any] = {"rules": [rule], "allow": ["lossy"]}
        source, out = files[number : number + 2]
        migrate.apply(source, out, fsync=False, **how)

        def differences() -> list[Any]:
            found = migrate.verify(out, source=source, threads=1, max_memory=most, **how)
            return found.to_json()["differences"]

        peak = little_memory.peak_of_no_differences(differences)
        assert peak < most, (number, peak)
        held = out.read_bytes()
        wrong = {key: (spec, raw.copy()) for key, (spec, raw) in kit_layouts.read(held).items()}
        for _, raw in wrong.values():
            raw.reshape(-1)[-1] ^= 1
        out.write_bytes(goldens_by_rules.safetensors(wrong))
        assert {one["key"] for one in differences()} == set(wrong)
        out.write_bytes(held)
