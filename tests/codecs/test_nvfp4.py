"""`nvfp4`: golden vectors through rule files, what is refused, and the memory of encoding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import goldens_by_rules
import numpy as np
import pytest
import torch
from kit_layouts import FORMATS, goldens
from safetensors.torch import load_file, save_file
from test_kit_encoding import FAULTS as ENCODING_FAULTS
from test_kit_goldens import BITS, UNSIGNED_ZERO, equal, fault

import migrate
from migrate.codecs import get
from migrate.codecs.base import OpError
from migrate.core.errors import MigrateError
from migrate.core.spec import Spec, spec
from migrate.testing import codeckit

CT = "compressed-tensors"
CODEC: Any = get("nvfp4")
E4M3 = "float8_e4m3fn"
PARTS = ("weight", "scale", "global")
E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6)

# golden format -> what a rule says to decode, and beside it to encode; None: nothing encodes it
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "modelopt_nvfp4": ({}, {"like": "modelopt"}),
    "mxfp4_to_nvfp4_exact nvfp4": ({}, None),
    "ao_nvfp4_two_level": ({}, {"like": "torchao"}),
    "ao_nvfp4_two_level_swizzled": ({"swizzled": True}, {"like": "torchao"}),
    "ao_nvfp4_single_level": ({}, {"like": "torchao"}),
    "ct_nvfp4": ({"form": CT}, {"like": CT}),
    "te_nvfp4_1x16": ({"form": "te"}, {"like": "te"}),
    "te_nvfp4_16x16": ({"form": "te"}, {"like": "te-2d"}),
    "te_nvfp4_4over6": ({"form": "te", "e4m3_max": 256}, None),
}
# of which scales of blocks are NaN, as zeros / 0 are: refused, unless a rule says to keep them
UNUSABLE = {
    ("modelopt_nvfp4", "zeros_bf16"),
    ("ao_nvfp4_two_level", "zeros_bf16"),
}
ENCODED = [kind for kind, (_, said) in KINDS.items() if said is not None]


def parts_of(kind: str) -> dict[str, dict[str, Any]]:
    """case -> role -> (spec, raw elements)."""
    case: Any = FORMATS[kind]
    found = goldens()[kind.split()[0]]
    return {
        name: {role: held[f"q/{stored}"] for role, stored in case.names.items()}
        for name, held in found.items()
    }


@pytest.mark.parametrize("number", range(len(list(CODEC.samples()))))
def test_the_codec_passes_the_kit(number: int) -> None:
    codeckit.check_sample("nvfp4", number)


def test_the_codec_is_described_and_takes_any_axes() -> None:
    codeckit.check_description("nvfp4")
    assert codeckit.check_axes("nvfp4") > 0


@pytest.mark.parametrize("kind", KINDS)
def test_goldens_decode_through_a_rule_file(kind: str, tmp_path: Path) -> None:
    stored, seen, unusable = parts_of(kind), dict[str, Any](), set[str]()
    for dtype in BITS:
        wanted = {
            (case, name): raw
            for case, held in goldens()[kind.split()[0]].items()
            for name, (one, raw) in held.items()
            if name.startswith("dq/") and one.dtype == dtype and not fault(kind, case, name)
        }
        parts = {case: stored[case] for case, _ in wanted}
        call = {"codec": "nvfp4", "dtype": dtype, **KINDS[kind][0]}
        for case in parts:
            if (kind, case) in UNUSABLE:
                with pytest.raises(MigrateError) as caught:
                    goldens_by_rules.decoded(
                        tmp_path / f"{dtype} {case}", {case: parts[case]}, call, ("lossy",)
                    )
                assert caught.value.diagnostics[0].code == "M406"
                assert "the scale of" in caught.value.diagnostics[0].message
                unusable.add(case)
        call["non_finite"] = "keep"
        made = goldens_by_rules.decoded(tmp_path / dtype, parts, call, ("lossy",)) if parts else {}
        for (case, name), one in wanted.items():
            a, b = equal(made[case][1], dtype), equal(one, dtype)
            if name.endswith(UNSIGNED_ZERO):
                a, b = (np.where(x & BITS[dtype][2], x, 0) for x in (a, b))
            assert (a == b).all(), f"{case} {name}: {(a != b).sum()} of {a.size} differ"
        seen |= parts
    assert unusable == {case for of, case in UNUSABLE if of == kind}
    # what no function of a library decoded are its faults alone
    assert all(
        fault(kind, case, name) for case in stored.keys() - seen for name in names_of(kind, case)
    )


def names_of(kind: str, case: str) -> list[str]:
    return [name for name in goldens()[kind.split()[0]][case] if name.startswith("dq/")]


@pytest.mark.parametrize("kind", ENCODED)
def test_goldens_encode_through_a_rule_file(kind: str, tmp_path: Path) -> None:
    stored = parts_of(kind)
    decoding, encoding = KINDS[kind]
    for dtype in ("float32", "bfloat16"):
        cases = {
            case: held["input"]
            for case, held in goldens()[kind].items()
            if held["input"][0].dtype == dtype
        }
        if not cases:
            continue
        roles = tuple(stored[next(iter(cases))])
        call = {
            "codec": "nvfp4",
            "from": dtype,
            "non_finite": "keep",
            **decoding,
            **(encoding or {}),
        }
        made = goldens_by_rules.encoded(tmp_path / dtype, cases, roles, call)
        for case in cases:
            same = all(
                as_stored(*made[case][role], one) == (one, raw.tobytes())
                for role, (one, raw) in stored[case].items()
            )
            # a fault that is one no more is to be taken off the list
            assert same == ((kind, case) not in ENCODING_FAULTS), case


def as_stored(made: Spec, raw: Any, wanted: Spec) -> tuple[Spec, bytes]:
    """A part as the vectors have it: without the padding of Transformer Engine's scales, of which
    they have the bytes as e4m3.
    """
    if made.shape != wanted.shape and len(made.shape) == 2:
        place = tuple(slice(0, n) for n in wanted.shape)
        assert not np.delete(raw, np.s_[: wanted.shape[0]], 0).any()
        assert not np.delete(raw, np.s_[: wanted.shape[1]], 1).any()
        made, raw = Spec(made.dtype, wanted.shape), np.ascontiguousarray(raw[place])
    return made, raw.tobytes()


WEIGHT, SCALE, WHOLE = Spec("uint8", (4, 32)), Spec(E4M3, (4, 4)), Spec("float32", ())


@pytest.mark.parametrize(
    ("args", "parts", "code", "words"),
    [
        ({}, (Spec("int32", (4, 32)), SCALE, WHOLE), "M303", "the weight is int32"),
        ({}, (WEIGHT, Spec("float32", (4, 4)), WHOLE), "M303", "the scale is float32"),
        ({}, (WEIGHT, SCALE, Spec("bfloat16", ())), "M303", "the global is bfloat16"),
        ({}, (WEIGHT, Spec(E4M3, (4, 2)), WHOLE), "M310", "the scale is [4, 2]"),
        ({}, (WEIGHT, Spec(E4M3, (4,)), WHOLE), "M310", "the scale is [4]"),
        ({}, (WEIGHT, SCALE, Spec("float32", (4,))), "M310", "the global is [4]"),
        ({"swizzled": True}, (WEIGHT, SCALE, WHOLE), "M310", "is [32, 16]"),
        ({}, (Spec("uint8", (32,)), Spec(E4M3, (4,)), WHOLE), "M304", "2 or more axes"),
        ({"form": CT}, (WEIGHT, SCALE, None), "M408", "without its global"),
        ({"form": "te"}, (WEIGHT, SCALE, None), "M408", "without its global"),
    ],
)
def test_parts_that_do_not_fit_are_refused_from_their_specs(
    args: dict[str, Any], parts: Any, code: str, words: str
) -> None:
    with pytest.raises(OpError) as caught:
        CODEC.decoded(CODEC.Args(**args), parts, "bfloat16")
    assert caught.value.code == code
    assert words in caught.value.message


@pytest.mark.parametrize(
    ("args", "encoding"),
    [
        ({"form": CT, "like": "torchao"}, False),
        ({"like": CT}, True),
        ({"e4m3_max": 256}, False),
        ({"form": "te", "e4m3_max": 256}, True),
        ({"form": "te", "transposed": True}, False),
        ({"levels": 1}, True),
    ],
)
def test_arguments_that_contradict_each_other_are_refused(
    args: dict[str, Any], encoding: bool
) -> None:
    with pytest.raises(OpError) as caught:
        CODEC.validate(CODEC.Args(**args), encoding)
    assert caught.value.code == "M308"


def test_rows_that_are_no_multiple_of_16_are_refused_while_planning(tmp_path: Path) -> None:
    held = {"w": (Spec("bfloat16", (2, 24)), np.zeros((2, 24), "<u2"))}
    with pytest.raises(MigrateError, match=r"multiple of 16 numbers, these are bfloat16 \[2, 24\]"):
        goldens_by_rules.encoded(
            tmp_path / "x", held, PARTS, {"codec": "nvfp4", "from": "bfloat16"}
        )


@pytest.mark.parametrize("role", ["weight", "scale"])
def test_a_part_that_is_missing_is_named(role: str, tmp_path: Path) -> None:
    (case, parts), *_ = parts_of("modelopt_nvfp4").items()
    cases = {case: {r: one for r, one in parts.items() if r != role}, "whole": parts}
    with pytest.raises(MigrateError) as caught:
        goldens_by_rules.decoded(
            tmp_path / "x", cases, {"codec": "nvfp4", "dtype": "bfloat16"}, ("lossy",)
        )
    (found,) = caught.value.diagnostics
    assert found.code == "M207"
    assert f"{case}.{role}" in str(found)


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
@pytest.mark.parametrize("form", ["modelopt", CT, "te"])
def test_a_scale_of_all_that_scales_nothing_is_refused(form: str, value: float) -> None:
    specs = [WEIGHT, SCALE, WHOLE]
    arrays = [np.full((4, 32), 0x21, "u1"), np.full((4, 4), 0x38, "u1")]
    arrays.append(np.array(value, "<f4").view("<u4"))
    kept = CODEC.Args(form=form, non_finite="keep")
    made = codeckit.decoded(CODEC, kept, arrays, specs, "float32").view("f4")
    if form == "te" and value == 0:
        # of a tensor of zeros the largest magnitude is zero
        assert not made.any()
        return
    if form != "te":
        with pytest.raises(OpError, match="the global of the numbers from") as caught:
            codeckit.decoded(CODEC, CODEC.Args(form=form), arrays, specs, "float32")
        assert caught.value.code == "M406"


@pytest.mark.parametrize("byte", [0x7F, 0xFF, 0xB8, 0x00])
@pytest.mark.parametrize("form", ["modelopt", CT, "te"])
def test_a_scale_of_a_block_that_is_negative_or_nan_is_refused(form: str, byte: int) -> None:
    specs = [WEIGHT, SCALE, WHOLE]
    arrays = [np.full((4, 32), 0x21, "u1"), np.full((4, 4), 0x38, "u1")]
    arrays.append(np.array(1, "<f4").view("<u4"))
    arrays[1][2, 3] = byte
    kept = CODEC.Args(form=form, non_finite="keep")
    made = codeckit.decoded(CODEC, kept, arrays, specs, "float32").view("f4")
    if not byte:
        # the scale of a block of zeros
        assert not made[2, 48:].any()
        made = codeckit.decoded(CODEC, CODEC.Args(form=form), arrays, specs, "float32")
        assert not made.view("f4")[2, 48:].any()
        return
    with pytest.raises(OpError, match=r"the scale of the numbers from \[2, 48\] on") as caught:
        codeckit.decoded(CODEC, CODEC.Args(form=form), arrays, specs, "float32")
    assert caught.value.code == "M406"


@pytest.mark.parametrize("args", [{}, {"form": CT}, {"form": "te"}, {"like": "torchao"}])
@pytest.mark.parametrize("zeros", ["all", "a block"])
def test_zeros_never_make_nan(args: dict[str, Any], zeros: str) -> None:
    made, of = CODEC.Args(**args), spec("float32", (4, 64))
    numbers = np.zeros((4, 64), "f4")
    if zeros == "a block":
        numbers[:, 16:] = np.linspace(-1, 1, 48)
    parts = codeckit.encoded(CODEC, made, numbers.view("<u4"), of)
    back = codeckit.decoded(CODEC, made, parts, CODEC.encoded(made, of), "float32").view("f4")
    assert np.isfinite(back).all()
    assert not back[:, :16].any()
    for one, wanted in zip(
        parts, CODEC.reference_parts(made, numbers.view("<u4"), of), strict=True
    ):
        assert np.array_equal(one, wanted)
    # `bound`
    largest = np.abs(numbers).reshape(4, 4, 16).max(-1, keepdims=True)
    assert (np.abs(back - numbers).reshape(4, 4, 16) <= 3 / 16 * largest).all()


@pytest.mark.parametrize("form", ["modelopt", CT, "te"])
def test_no_more_than_boxes_are_in_memory_for_the_scale_of_a_whole_tensor(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from migrate.codecs.kit.encoding import TensorEncoding

    rows, columns = 9000, 2048
    raw = np.random.default_rng(1).integers(0x3C00, 0x3D00, (rows, columns)).astype("<u2")
    given: dict[str, list[int]] = {"survey": [], "encode": []}
    for name in given:
        way = getattr(TensorEncoding, name)

        def watched(
            self: Any, array: Any, *rest: Any, way: Any = way, name: str = name, **more: Any
        ) -> Any:
            if array is not None:
                given[name].append(array.size)
            return way(self, array, *rest, **more)

        monkeypatch.setattr(TensorEncoding, name, watched)
    held = {"w": (Spec("bfloat16", raw.shape), raw)}
    call = {"codec": "nvfp4", "from": "bfloat16", "form": form}
    made = goldens_by_rules.encoded(tmp_path / "x", held, PARTS, call)["w"]
    # all numbers once for the scale of all
    assert sum(given["survey"]) == raw.size
    # scales are computed beside the codes, or once more by another thread
    assert raw.size <= sum(given["encode"]) <= 2 * raw.size
    assert 2 * max(given["survey"] + given["encode"]) < raw.size
    largest = float((raw.astype("<u4") << 16).view("f4").max())
    whole = float(made["global"][1].view("f4").reshape(()))
    assert whole == pytest.approx(
        {"te": largest, CT: 2688 / largest}.get(form, largest / 2688), rel=0.01
    )


FUSED = """id: fused/one/1
title: Projections become one
lineage: fused
edge: [one, other]
requires: ">=0.1"
rules:
  - name: codes
    from: "{p...}.{w:q|k|v}.{r:weight|weight_scale}"
    to: "{p}.qkv.{r}"
    via: [{concat: {over: w}}]
  - name: whole
    from: "{p...}.{w:q|k|v}.weight_scale_2"
    to: "{p}.qkv.weight_scale_2"
    via: [{same: {over: w}}]
"""


@pytest.mark.parametrize("globals_", [(1, 1, 1), (1, 1, 2)])
def test_modules_with_different_scales_of_all_are_not_fused(
    globals_: tuple[int, ...], tmp_path: Path
) -> None:
    rng = np.random.default_rng(2)
    source, out, rules = (tmp_path / n for n in ("a.safetensors", "b.safetensors", "r.yaml"))
    rules.write_text(FUSED)
    state = {}
    for name, whole in zip("qkv", globals_, strict=True):
        state[f"l.{name}.weight"] = torch.from_numpy(rng.integers(0, 256, (4, 16), dtype="u1"))
        state[f"l.{name}.weight_scale"] = torch.ones(4, 2).to(torch.float8_e4m3fn)
        state[f"l.{name}.weight_scale_2"] = torch.tensor(float(whole))
    save_file(state, source)
    if globals_ == (1, 1, 1):
        migrate.apply(source, out, rules=rules)
        assert load_file(out)["l.qkv.weight"].shape == (12, 16)
        return
    with pytest.raises(MigrateError) as caught:
        migrate.apply(source, out, rules=rules)
    (found,) = caught.value.diagnostics
    assert found.code == "M404"
    assert "l.v.weight_scale_2" in str(found), found
    assert not out.exists()


def test_experts_that_are_stored_transposed_are_the_same_numbers() -> None:
    rng = np.random.default_rng(5)
    codes = rng.integers(0, 256, (3, 40, 32), dtype="u1")
    scales = rng.integers(0x30, 0x40, (3, 40, 4), dtype="u1")
    whole = np.array([1, 2, 3], "<f4").view("<u4")
    plain = [codes, scales, whole]
    specs = [Spec("uint8", codes.shape), Spec(E4M3, scales.shape), Spec("float32", (3,))]
    wanted = codeckit.decoded(CODEC, CODEC.Args(), plain, specs, "bfloat16")
    args = CODEC.Args(transposed=True)
    turned = [np.ascontiguousarray(a.swapaxes(1, 2)) for a in plain[:2]]
    there = [Spec(s.dtype, a.shape) for s, a in zip(specs, turned, strict=False)]
    parts, of = [*turned, whole], [*there, specs[2]]
    assert (codeckit.decoded(CODEC, args, parts, of, "bfloat16") == wanted).all()
    codeckit.check_decoding(CODEC, args, parts, of, "bfloat16")
    with pytest.raises(OpError, match="the scale is"):
        CODEC.decoded(args, specs, "bfloat16")


def test_blocks_of_16_x_16_share_what_each_of_their_rows_stores() -> None:
    rng = np.random.default_rng(3)
    array = (rng.standard_normal((40, 64)) * 3).astype("f4").view("<u4")
    of = spec("float32", (40, 64))
    args = CODEC.Args("te", like="te-2d")
    _, scale, *_ = codeckit.encoded(CODEC, args, array, of)
    assert scale is not None
    assert scale.shape == (128, 4)
    assert not scale[48:].any()
    squares = scale[:48].reshape(3, 16, 4)
    assert (squares == squares[:, :1]).all()
    assert len(np.unique(squares[:, 0])) > 3
    # the largest of each square is what its scale is made for
    numbers = np.abs(array.view("<f4"))
    most = [[numbers[r : r + 16, c : c + 16].max() for c in range(0, 64, 16)] for r in (0, 16, 32)]
    order = np.argsort(np.ravel(most))
    assert (np.diff(squares[:, 0].reshape(-1)[order].astype(int)) >= 0).all()
    for how in ({"like": "te-2d"}, {"form": CT, "like": "te-2d"}):
        with pytest.raises(OpError, match="is arithmetic of the form te"):
            CODEC.validate(CODEC.Args(**how), True)


def divided(dtype: str, inputs: Any, shape: tuple[int, int] = (40, 96)) -> tuple[Any, Any, Any]:
    """Parts with what inputs are multiplied by, their specs, and the numbers in float64."""
    rng = np.random.default_rng(5)
    rows, columns = shape
    packed = rng.integers(0, 256, (rows, columns // 2), dtype="u1")
    scale = rng.integers(1, 0x7F, (rows, columns // 16), dtype="u1")
    whole = np.array(0.0037, "<f4")
    specs = [
        spec("uint8", packed.shape), spec(E4M3, scale.shape), spec("float32", ()),
        spec(dtype, (columns,)),
    ]  # fmt: skip
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(shape)
    wide = np.where(codes & 8, -1.0, 1.0) * np.array(E2M1)[codes & 7]
    of_blocks = torch.from_numpy(scale).view(torch.float8_e4m3fn).double().numpy()
    numbers = wide * np.repeat(of_blocks, 16, 1) * np.float64(whole)
    raw, held = inputs
    return [packed, scale, whole.view("<u4"), raw], specs, numbers * held


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_columns_that_were_divided_are_multiplied_by_what_inputs_are(dtype: str) -> None:
    drawn = torch.rand(96, generator=torch.Generator().manual_seed(1)) * 3 + 0.1
    held = drawn.to(getattr(torch, dtype))
    raw = held.view(torch.int32 if dtype == "float32" else torch.int16).numpy()
    inputs = raw.view("<u4" if dtype == "float32" else "<u2"), held.double().numpy()
    parts, specs, wanted = divided(dtype, inputs)
    args = CODEC.Args()
    assert codeckit.check_decoding(CODEC, args, parts, specs, "bfloat16") is None
    made = codeckit.decoded(CODEC, args, parts, specs, "float32").view("<f4")
    # three products of float32 numbers
    assert (np.abs(made - wanted) <= 3 * 2.0**-24 * np.abs(wanted)).all()
    assert not CODEC.exact(args, specs, "bfloat16")


def test_what_inputs_are_multiplied_by_is_a_finite_number_for_each_column() -> None:
    inputs = np.full(96, np.nan, "<f4")
    parts, specs, _ = divided("float32", (inputs.view("<u4"), inputs))
    with pytest.raises(OpError) as caught:
        codeckit.decoded(CODEC, CODEC.Args(), parts, specs, "float32")
    assert caught.value.code == "M406"
    specs[3] = spec("float32", (40,))
    with pytest.raises(OpError) as caught:
        CODEC.decoded(CODEC.Args(), specs, "float32")
    assert caught.value.code == "M310"
    assert "pre_quant_scale" in caught.value.message
