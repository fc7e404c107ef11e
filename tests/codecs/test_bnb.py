"""`bnb-4bit` and `bnb-int8`: golden vectors through rule files, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import goldens_by_rules
import numpy as np
import pytest
from kit_layouts import goldens
from test_kit_goldens import equal

from migrate.codecs import get
from migrate.codecs.base import OpError
from migrate.core.errors import MigrateError
from migrate.core.spec import Spec
from migrate.testing import codeckit

FOUR: Any = get("bnb-4bit")
EIGHT: Any = get("bnb-int8")
# golden format -> role -> name on disk
NAMES: dict[str, dict[str, str]] = {
    **{
        kind: {
            "weight": "weight",
            "absmax": "weight.absmax",
            "map": "weight.quant_map",
            "state": f"weight.quant_state.bitsandbytes__{kind.split('_')[1]}",
            "nested_absmax": "weight.nested_absmax",
            "nested_map": "weight.nested_quant_map",
        }
        for kind in ("bnb_nf4", "bnb_nf4_double", "bnb_fp4")
    },
    "bnb_int8": {"weight": "weight", "scale": "SCB", "format": "weight_format"},
}
DTYPES = ("float32", "float16", "bfloat16")
PARTS = ("weight", "absmax", "map", "state")
Held = tuple[Spec, Any]


def codec_of(kind: str) -> str:
    return "bnb-int8" if kind == "bnb_int8" else "bnb-4bit"


def parts_of(kind: str) -> dict[str, dict[str, Held]]:
    """case -> role -> (spec, raw elements)."""
    return {
        case: {r: held[f"q/{name}"] for r, name in NAMES[kind].items() if f"q/{name}" in held}
        for case, held in goldens()[kind].items()
    }


def decoded(folder: Path, parts: Mapping[str, Held], dtype: str = "float32", **said: Any) -> Any:
    codec = "bnb-int8" if "scale" in parts else "bnb-4bit"
    call = {"codec": codec, "dtype": dtype, **said}
    spec, raw = goldens_by_rules.decoded(folder, {"w": parts}, call, ("lossy",))["w"]
    assert spec.dtype == dtype
    return raw.view("<f4") if dtype == "float32" else raw


@pytest.mark.parametrize(("codec", "count"), [("bnb-4bit", 5), ("bnb-int8", 2)])
def test_the_codecs_pass_the_kit(codec: str, count: int) -> None:
    codeckit.check_description(codec)
    assert len(codeckit.cases([codec])) == count
    for _, number in codeckit.cases([codec]):
        codeckit.check_sample(codec, number)


@pytest.mark.parametrize("kind", NAMES)
def test_goldens_decode_through_a_rule_file(kind: str, tmp_path: Path) -> None:
    stored, compared = parts_of(kind), 0
    for dtype in DTYPES:
        wanted = {
            case: raw
            for case, held in goldens()[kind].items()
            for name, (one, raw) in held.items()
            if name.startswith("dq/") and one.dtype == dtype
        }
        if not wanted:
            continue
        # some vectors have blocks of numbers that are not finite
        call = {"codec": codec_of(kind), "dtype": dtype, "non_finite": "keep"}
        parts = {case: stored[case] for case in wanted}
        made = goldens_by_rules.decoded(tmp_path / dtype, parts, call, ("lossy",))
        for case, one in wanted.items():
            a, b = equal(made[case][1], dtype), equal(one, dtype)
            assert a.shape == b.shape
            assert (a == b).all(), f"{case}: {(a != b).sum()} of {a.size} differ"
            compared += 1
    assert compared == len(stored)


@pytest.mark.parametrize("kind", ["bnb_nf4", "bnb_fp4"])
def test_goldens_encode_through_a_rule_file(kind: str, tmp_path: Path) -> None:
    stored, compared = parts_of(kind), 0
    for dtype in DTYPES:
        cases = {
            case: held["input"]
            for case, held in goldens()[kind].items()
            if held["input"][0].dtype == dtype
        }
        if not cases:
            continue
        call = {"codec": "bnb-4bit", "from": dtype, "form": kind[4:], "non_finite": "keep"}
        made = goldens_by_rules.encoded(tmp_path / dtype, cases, PARTS, call)
        for case in cases:
            assert stored[case].keys() == set(PARTS)
            for role, (spec, raw) in stored[case].items():
                assert made[case][role][0] == spec, (case, role)
                assert made[case][role][1].tobytes() == raw.tobytes(), (case, role)
            compared += 1
    assert compared == len(stored)


def encoded(folder: Path, numbers: Any, **said: Any) -> tuple[list[int], list[float]]:
    """The codes of float32 numbers, also that behind the last one, and the scales."""
    call = {"codec": "bnb-4bit", "from": "float32", **said}
    made = goldens_by_rules.encoded(folder, {"w": f4(numbers)}, PARTS, call)["w"]
    codes = made["weight"][1].reshape(-1)
    return [c for byte in codes.tolist() for c in (byte >> 4, byte & 15)], made["absmax"][1].view(
        "<f4"
    ).tolist()


def test_blocks_multiply_by_a_reciprocal_and_a_shorter_last_one_divides(tmp_path: Path) -> None:
    """A number next to the border of codes 0 and 1, whose product with the reciprocal lies on it,
    and whose quotient lies above it.
    """
    most, near = float.fromhex("0x1.2b5bd6p+1"), float.fromhex("-0x1.fbc524p+0")
    numbers = np.zeros((3, 45), "f4")
    numbers[0, :2] = numbers.reshape(-1)[128:130] = most, near
    codes, scales = encoded(tmp_path / "x", numbers)
    assert codes[:3] == [15, 0, 7]
    assert codes[128:131] == [15, 1, 7]
    assert scales == [most, 0, most]


def test_a_short_block_of_zeros_has_a_tiny_scale_and_a_whole_one_has_none(tmp_path: Path) -> None:
    """And the half of the last byte that is over has the code of 0, as bitsandbytes fills it."""
    for number, (form, zero) in enumerate((("nf4", 7), ("fp4", 0))):
        codes, scales = encoded(tmp_path / str(number), np.zeros((5, 13)), blocksize=32, form=form)
        assert codes == [zero] * 66
        assert scales == [0, 0, np.float32(1e-38)]


def test_a_number_between_two_codes_has_the_nearer_and_of_both_the_lower(tmp_path: Path) -> None:
    border = np.float32(1 + 0.7229568362236023) / np.float32(2)
    above, below = np.nextafter(border, np.float32(2)), np.nextafter(border, np.float32(0))
    codes, _ = encoded(tmp_path / "x", [[1, border, above, below]])
    assert codes == [15, 14, 15, 14]
    # two codes stand for zero, the upper one for what is a little above it
    tiny = np.float32(1e-6)
    codes, _ = encoded(tmp_path / "y", [[1, 0, -0.0, tiny, -tiny, -1, 0.5, 0.34]], form="fp4")
    assert codes == [3, 0, 0, 8, 0, 11, 5, 4]


def test_what_is_over_in_a_byte_is_the_code_of_zero_beside_infinities_too(tmp_path: Path) -> None:
    numbers = np.ones((1, 33), "f4")
    numbers[0, 32] = -np.inf
    codes, scales = encoded(tmp_path / "x", numbers, blocksize=32, non_finite="keep")
    assert codes == [15] * 32 + [15, 7]
    assert scales == [1, np.inf]
    codes, scales = encoded(tmp_path / "y", numbers, blocksize=32, non_finite="saturate")
    assert codes == [15] * 32 + [0, 7]
    assert scales == [1, np.float32(1e-38)]


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_numbers_that_are_not_finite_are_refused_with_their_place(
    value: float, tmp_path: Path
) -> None:
    numbers = np.ones((5, 33), "f4")
    numbers[3, 7] = value
    with pytest.raises(MigrateError) as caught:
        encoded(tmp_path / "x", numbers)
    (found,) = caught.value.diagnostics
    assert found.code == "M406"
    assert f"the number at [3, 7] is {value}" in found.message


@pytest.mark.parametrize("blocksize", [1, 48, 63, 8192])
def test_blocks_that_bitsandbytes_does_not_encode_are_refused(
    blocksize: int, tmp_path: Path
) -> None:
    with pytest.raises(MigrateError) as caught:
        encoded(tmp_path / "x", np.ones((2, 64)), blocksize=blocksize)
    (found,) = caught.value.diagnostics
    assert found.code == "M308"
    assert f"encodes blocks of 32, 64, 128, 256, 512, 1024, 2048, 4096, not of {blocksize}" in str(
        found
    )


@pytest.mark.parametrize("shape", [(), (64,), (2, 4, 8)])
def test_only_rows_and_columns_are_encoded(shape: tuple[int, ...], tmp_path: Path) -> None:
    with pytest.raises(MigrateError) as caught:
        encoded(tmp_path / "x", np.ones(shape))
    (found,) = caught.value.diagnostics
    assert found.code == "M304"
    assert "bnb-4bit encodes rows and columns" in found.message


def test_nested_scales_are_refused_by_name(tmp_path: Path) -> None:
    call = {"codec": "bnb-4bit", "from": "float32"}
    with pytest.raises(MigrateError) as caught:
        goldens_by_rules.encoded(
            tmp_path / "x",
            {"w": f4(np.ones((2, 64)))},
            (*PARTS, "nested_absmax", "nested_map"),
            call,
        )
    (found,) = caught.value.diagnostics
    assert found.code == "M408"
    assert "does not encode nested scales: their offset depends on" in found.message


def u1(*numbers: int) -> Held:
    return Spec("uint8", (len(numbers),)), np.array(numbers, "u1")


def f4(numbers: Any) -> Held:
    made = np.asarray(numbers, "<f4")
    return Spec("float32", made.shape), made.view("<u4")


def state(text: str | bytes | None = None, **said: Any) -> Held:
    """The JSON of seven numbers in blocks of four, but for what is `said`; None omits a name."""
    known = {"quant_type": "nf4", "blocksize": 4, "dtype": "float32", "shape": [1, 7], **said}
    made = json.dumps({k: v for k, v in known.items() if v is not None}) if text is None else text
    return u1(*(made.encode() if isinstance(made, str) else made))


def seven(**more: Held) -> dict[str, Held]:
    """Codes 1 to 7 of a table of squares, scaled by 2 and by 10."""
    return {
        "weight": (Spec("uint8", (4, 1)), np.array([[0x12], [0x34], [0x56], [0x7F]], "u1")),
        "absmax": f4([2, 10]),
        "map": f4(np.arange(16) ** 2),
        "state": state(),
        **more,
    }


NESTED = {
    "absmax": u1(3, 5),
    "state": state(nested_blocksize=256, nested_dtype="float32", nested_offset=0.1),
    "nested_absmax": f4([0.3]),
    "nested_map": f4(np.arange(256) / 7),
}


def test_the_high_half_of_a_byte_comes_first_and_the_last_may_be_over(tmp_path: Path) -> None:
    made = decoded(tmp_path / "x", seven())
    assert made.tolist() == [[2, 8, 18, 32, 250, 360, 490]]
    # blocks do not end where rows do
    parts = seven(state=state(shape=[7, 1, 1]))
    assert decoded(tmp_path / "y", parts).reshape(-1).tolist() == made[0].tolist()


def test_a_nested_absmax_is_scaled_and_moved_in_float32(tmp_path: Path) -> None:
    made = decoded(tmp_path / "x", seven(**NESTED))
    table, scale, offset = (np.asarray(x, "<f4") for x in (np.arange(256) / 7, 0.3, 0.1))
    absmax = (table[[3, 5]] * scale).astype("<f4") + offset
    codes = np.arange(1, 8, dtype="<f4") ** 2
    assert np.array_equal(made[0], codes * np.repeat(absmax, 4)[:7])


def test_what_a_rule_says_must_be_what_the_state_says(tmp_path: Path) -> None:
    assert decoded(tmp_path / "x", seven(), form="nf4", blocksize=4).shape == (1, 7)
    for number, (said, words) in enumerate([
        ({"form": "fp4"}, "`form` is fp4, the state says nf4"),
        ({"blocksize": 64}, "`blocksize` is 64, the state says 4"),
    ]):  # fmt: skip
        with pytest.raises(MigrateError) as caught:
            decoded(tmp_path / str(number), seven(), **said)
        (found,) = caught.value.diagnostics
        assert found.code == "M310"
        assert words in found.message


DEEP = "[" * 20_000 + "]" * 20_000


@pytest.mark.parametrize(
    ("held", "words"),
    [
        (state(""), "not JSON"),
        (state('{"quant_type": "nf4"'), "not JSON"),
        (state(b"\xff\xfe{}"), "not UTF-8"),
        (state("[1, 2]"), "the state is not a JSON object"),
        (state("null"), "the state is not a JSON object"),
        (state(DEEP), "consists of brackets"),
        (state('{"a":' * 1500 + "1" + "}" * 1500), "nested too deeply"),
        (state('{"blocksize": 64, "blocksize": 4}'), "the same name twice"),
        (state('{"nested_offset": NaN}'), "NaN is not JSON"),
        (state('{"blocksize": ' + "9" * 5000 + "}"), "more than 4300 digits"),
        (state(quant_type=None), "quant_type of the state is None, not nf4 or fp4"),
        (state(quant_type="int4"), "quant_type of the state is 'int4', not nf4 or fp4"),
        (state(quant_type=["nf4"]), "quant_type of the state is ['nf4']"),
        (state(quant_type="x" * 9000), "quant_type of the state is 'xxx"),
        (state(blocksize=None), "blocksize of the state is None"),
        (state(blocksize=0), "blocksize of the state is 0, not an integer from 1"),
        (state(blocksize=-64), "blocksize of the state is -64"),
        (state(blocksize=4.0), "blocksize of the state is 4.0"),
        (state(blocksize=True), "blocksize of the state is True"),
        (state(blocksize="64"), "blocksize of the state is '64'"),
        (state(blocksize=10**400), "blocksize of the state is 1000"),
        (state(shape=None), "shape of the state is None, not a list of"),
        (state(shape=7), "shape of the state is 7"),
        (state(shape=[1, -7]), "shape of the state is [1, -7]"),
        (state(shape=[1, 7.0]), "shape of the state is [1, 7.0]"),
        (state(shape=[1, True]), "shape of the state is [1, True]"),
        (state(shape=[2**63, 2**63]), "shape of the state is [9223372036854775808"),
        (state(shape=[1] * 65), "not a list of at most 64 integers"),
        (state(shape=[1, 9]), "the weight is [4, 1], that of numbers of [1, 9] is [5, 1]"),
        (state(shape=[1, 6]), "the weight is [4, 1], that of numbers of [1, 6] is [3, 1]"),
        (state(shape=[2**40, 2**8]), "the weight is [4, 1], that of numbers of [1099511627776"),
        (state(shape=[0, 7]), "the weight is [4, 1], that of numbers of [0, 7] is [0, 1]"),
        (state(shape=[]), "the weight is [4, 1], that of numbers of [] is [1, 1]"),
        (state(blocksize=2), "the absmax is [2], that of numbers of [1, 7]"),
        (state(blocksize=2**48), "the absmax is [2], that of numbers of [1, 7]"),
    ],
)  # fmt: skip
def test_a_state_that_is_broken_or_does_not_fit_is_refused_while_planning(
    held: Held, words: str, tmp_path: Path
) -> None:
    with pytest.raises(MigrateError) as caught:
        decoded(tmp_path / "x", seven(state=held))
    (found,) = caught.value.diagnostics
    assert found.code == "M310"
    assert words in found.message
    assert len(found.message) < 400
    assert any("w.state" in note for note in found.notes)
    assert not (tmp_path / "x" / "out.safetensors").exists()


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"nested_blocksize": 0, "nested_offset": 0.1}, "nested_blocksize of the state is 0"),
        ({"nested_offset": 0.1}, "nested_blocksize of the state is None"),
        ({"nested_blocksize": 256}, "nested_offset of the state is None"),
        ({"nested_blocksize": 256, "nested_offset": "0"}, "nested_offset of the state is '0'"),
        ({"nested_blocksize": 256, "nested_offset": 1e300}, "nested_offset of the state is 1e+300"),
        ({"nested_blocksize": 256, "nested_offset": True}, "nested_offset of the state is True"),
        ({"nested_blocksize": 1, "nested_offset": 0.1}, "the nested_absmax is [1]"),
        ({}, "the state says nothing of the nested_absmax beside it"),
    ],
)
def test_a_nested_state_that_does_not_fit_is_refused(
    said: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(MigrateError) as caught:
        decoded(tmp_path / "x", seven(**NESTED) | {"state": state(**said)})
    (found,) = caught.value.diagnostics
    assert found.code == "M310"
    assert words in found.message


def test_an_offset_that_json_has_no_limit_for_is_refused(tmp_path: Path) -> None:
    text = bytes(NESTED["state"][1]).decode().replace("0.1", "1e999")
    with pytest.raises(MigrateError, match="nested_offset of the state is inf"):
        decoded(tmp_path / "x", seven(**NESTED) | {"state": state(text)})


def test_a_state_of_more_than_64_kib_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(MigrateError) as caught:
        decoded(tmp_path / "x", seven(state=state(b" " * 65_537)))
    (found,) = caught.value.diagnostics
    assert found.code == "M310"
    assert "w.state is uint8 [65537]" in found.message


@pytest.mark.parametrize("role", ["weight", "absmax", "map", "state"])
def test_a_part_that_is_missing_is_named(role: str, tmp_path: Path) -> None:
    cases = {"a": {r: one for r, one in seven().items() if r != role}, "whole": seven()}
    call = {"codec": "bnb-4bit", "dtype": "float32"}
    with pytest.raises(MigrateError) as caught:
        goldens_by_rules.decoded(tmp_path / "x", cases, call, ("lossy",))
    assert {found.code for found in caught.value.diagnostics} == {"M207"}
    assert f"a.{role}" in str(caught.value)


@pytest.mark.parametrize("role", ["nested_absmax", "nested_map"])
def test_a_nested_part_that_is_missing_is_named(role: str, tmp_path: Path) -> None:
    parts = {r: one for r, one in seven(**NESTED).items() if r != role}
    with pytest.raises(MigrateError) as caught:
        decoded(tmp_path / "x", parts)
    (found,) = caught.value.diagnostics
    assert found.code == "M408"
    assert f"the state says that there is a {role}" in found.message
    assert any("w.weight" in note for note in found.notes)


def half(numbers: Any) -> Held:
    return Spec("float16", np.shape(numbers)), np.asarray(numbers, "<f2").view("<u2")


def shaped(*shape: int) -> Held:
    return Spec("uint8", shape), np.ones(shape, "u1")


@pytest.mark.parametrize(
    ("parts", "code", "words"),
    [
        ({"weight": (Spec("int8", (4, 1)), np.zeros((4, 1), "u1"))}, "M303", "the weight is int8"),
        ({"absmax": half([2, 10])}, "M303", "the absmax is float16"),
        ({"absmax": u1(3, 5)}, "M303", "the absmax is uint8"),
        ({"absmax": f4([2, 10, 3])}, "M310", "the absmax is [3]"),
        ({"absmax": f4([2])}, "M310", "the absmax is [1]"),
        # bitsandbytes gives the codes one axis of 1, and nothing else
        ({"weight": u1(1, 2, 3, 4)}, "M310", "the weight is [4], that of numbers of [1, 7] is [4"),
        ({"weight": shaped(1, 4)}, "M310", "the weight is [1, 4], that of numbers of [1, 7] is"),
        ({"weight": shaped(4, 1, 1)}, "M310", "the weight is [4, 1, 1], that of numbers of"),
        ({"absmax": f4([[2, 10]])}, "M310", "the absmax is [1, 2], that of numbers of [1, 7] in"),
        ({"absmax": f4([[2], [10]])}, "M310", "the absmax is [2, 1], that of numbers of [1, 7] in"),
        ({"map": f4(np.arange(16)[None])}, "M310", "the map is [1, 16]"),
        ({**NESTED, "nested_absmax": f4([[1]])}, "M310", "the nested_absmax is [1, 1]"),
        ({"map": f4(np.arange(8))}, "M310", "codes of 4 bits look up 16 numbers"),
        ({"map": half(np.arange(16))}, "M303", "the map is float16"),
        ({**NESTED, "absmax": f4([2, 10])}, "M303", "the absmax is float32"),
        ({**NESTED, "nested_absmax": f4([1, 2])}, "M310", "the nested_absmax is [2]"),
        ({**NESTED, "nested_absmax": half([1])}, "M303", "the nested_absmax is float16"),
        ({**NESTED, "nested_map": f4([1, 2])}, "M310", "codes of 8 bits look up 256 numbers"),
    ],
)
def test_other_dtypes_and_shapes_are_refused_while_planning(
    parts: dict[str, Held], code: str, words: str, tmp_path: Path
) -> None:
    with pytest.raises(MigrateError) as caught:
        decoded(tmp_path / "x", seven(**parts))
    (found,) = caught.value.diagnostics
    assert found.code == code
    assert words in found.message


@pytest.mark.parametrize("value", [-1.0, float("inf"), float("nan")])
@pytest.mark.parametrize("role", ["absmax", "nested_absmax", "scale"])
def test_scales_that_no_encoder_makes_are_refused(role: str, value: float, tmp_path: Path) -> None:
    if role == "absmax":
        parts, place = seven(absmax=f4([2, value])), [0, 4]
    elif role == "nested_absmax":
        parts, place = seven(**{**NESTED, role: f4([value])}), [0, 0]
    else:
        parts, place = rows(scale=f4([127, value])), [1, 0]
    with pytest.raises(MigrateError) as caught:
        decoded(tmp_path / "x", parts)
    (found,) = caught.value.diagnostics
    assert found.code == "M406"
    assert f"the {role} of the numbers from {place} on is {value:g}" in str(found)
    made = decoded(tmp_path / "y", parts, non_finite="keep")
    assert not np.isfinite(made).all() or (made < 0).any()


def test_blocks_and_rows_of_zeros_have_a_scale_of_0(tmp_path: Path) -> None:
    made = decoded(tmp_path / "x", seven(absmax=f4([0, 10])))
    assert made.tolist() == [[0, 0, 0, 0, 250, 360, 490]]
    made = decoded(tmp_path / "y", rows(scale=f4([0, 127])))
    assert made.tolist() == [[0, 0, 0], [127, -128, 2]]


def rows(**more: Held) -> dict[str, Held]:
    """Two rows of three codes."""
    codes = np.array([[1, 2, 3], [127, -128, 2]], "<i1").view("u1")
    return {"weight": (Spec("int8", (2, 3)), codes), "scale": f4([127, 254]), **more}


def test_the_format_of_int8_may_be_missing_and_is_that_of_rows(tmp_path: Path) -> None:
    wanted = [[1, 2, 3], [254, -256, 4]]
    none = Spec("uint8", ()), np.zeros((), "u1")
    assert decoded(tmp_path / "x", rows()).tolist() == wanted
    assert decoded(tmp_path / "y", rows(format=none)).tolist() == wanted
    for number in (1, 2, 3):
        odd = Spec("uint8", ()), np.full((), number, "u1")
        with pytest.raises(MigrateError) as caught:
            decoded(tmp_path / str(number), rows(format=odd))
        (found,) = caught.value.diagnostics
        assert found.code == "M310"
        assert f"the format is [{number}], codes are read of [0] alone" in found.message


@pytest.mark.parametrize(
    ("weight", "scale", "code", "words"),
    [
        (Spec("uint8", (2, 3)), Spec("float32", (2,)), "M303", "the weight is uint8"),
        (Spec("int8", (2, 3)), Spec("float16", (2,)), "M303", "the scale is float16"),
        (Spec("int8", (2, 3)), Spec("float32", (3,)), "M310", "the scale is [3]"),
        (Spec("int8", (2, 3)), Spec("float32", ()), "M310", "the scale is []"),
        (Spec("int8", (2, 3, 4)), Spec("float32", (2,)), "M304", "[2, 3, 4], not of 2 axes"),
        (None, Spec("float32", (2,)), "M408", "without its weight"),
        (Spec("int8", (2, 3)), None, "M408", "without its scale"),
    ],
)
def test_int8_that_does_not_fit_is_refused_from_its_specs(
    weight: Spec | None, scale: Spec | None, code: str, words: str
) -> None:
    with pytest.raises(OpError) as caught:
        EIGHT.decoded(EIGHT.Args(), [weight, scale, None], "float16")
    assert caught.value.code == code
    assert words in caught.value.message


def test_nothing_is_decoded_without_a_state() -> None:
    specs = [spec for spec, _ in seven().values()] + [None, None]
    with pytest.raises(OpError) as caught:
        FOUR.decoded(FOUR.Args(), specs, "float32")
    assert caught.value.code == "M308"


def test_int8_is_one_way(tmp_path: Path) -> None:
    assert FOUR.encodes
    assert not EIGHT.encodes
    call = {"codec": "bnb-int8", "from": "float32"}
    with pytest.raises(MigrateError) as caught:
        goldens_by_rules.encoded(
            tmp_path / "x", {"w": f4(np.ones((2, 8)))}, ("weight", "scale"), call
        )
    (found,) = caught.value.diagnostics
    assert found.code == "M308"
    assert "bnb-int8 is only decoded, nothing encodes it" in found.message


def test_the_error_of_int8_is_that_of_rounding(tmp_path: Path) -> None:
    """Half a unit in the last of eight bits, whatever the scale."""
    made = []

    class Meter:
        def add(self, wanted: Any, got: Any, *rest: Any, **more: Any) -> None:
            made.append((wanted, got))

    specs = [Spec("int8", (2, 3)), Spec("float32", (2,)), None]
    arrays = [rows()["weight"][1], f4([3.3, 777])[1], None]
    out = np.zeros((2, 3), "<u2")
    EIGHT.decode(EIGHT.Args(), arrays, specs, "bfloat16", ((0, 2), (0, 3)), out, Meter())
    found = [(w, g) for w, g in made if np.size(w)]
    assert found
    for wanted, got in found:
        assert (abs(wanted - got) <= abs(wanted) * 2.0**-8).all()
        assert (wanted != got).any()


def test_blocks_go_on_across_rows_where_bitsandbytes_takes_other_scales(tmp_path: Path) -> None:
    """Rows of 1, 1, 10, 10, 100 and 100, two to a block, as bitsandbytes 0.50 encodes them. Its own
    `dequantize_4bit` on a CPU makes 1 of all.
    """
    table = [*np.linspace(-1, 0.9, 15), 1]
    parts = {
        "weight": (Spec("uint8", (96, 1)), np.full((96, 1), 0xFF, "u1")),
        "absmax": f4([1, 10, 100]),
        "map": f4(table),
        "state": state(blocksize=64, shape=[6, 32]),
    }
    made = decoded(tmp_path / "x", parts)
    assert [row.tolist() for row in made] == [[n] * 32 for n in (1, 1, 10, 10, 100, 100)]
