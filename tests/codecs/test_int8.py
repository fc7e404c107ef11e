"""`int8` and `int4-rows`: golden vectors through rule files, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import goldens_by_rules
import numpy as np
import pytest
from kit_layouts import FORMATS, Case, goldens
from test_kit_goldens import BITS

from migrate.codecs import get
from migrate.codecs.base import OpError
from migrate.core.errors import MigrateError
from migrate.core.spec import Spec
from migrate.testing import codeckit

CODEC: Any = get("int8")
ROWS: Any = get("int4-rows")
# golden format -> the codec, and what a rule says to encode; None: nothing encodes it
KINDS: dict[str, tuple[str, dict[str, Any] | None]] = {
    "ct_int8_channel": ("int8", {}),
    "modelopt_int8_wo": ("int8", {"like": "modelopt"}),
    "ao_int8_row": ("int8", {"like": "torchao"}),
    "modelopt_int4_awq": ("int4-rows", None),
}
ENCODED = [kind for kind, (_, said) in KINDS.items() if said is not None]


def parts_of(kind: str) -> dict[str, dict[str, Any]]:
    """case -> role -> (spec, raw elements)."""
    names = {"weight": "weight", "scale": "weight_scale"}
    case = FORMATS[kind]
    if isinstance(case, Case):
        names = dict(case.names)
    return {
        case: {role: found[f"q/{name}"] for role, name in names.items()}
        for case, found in goldens()[kind].items()
    }


@pytest.mark.parametrize(("name", "number"), codeckit.cases(["int8", "int4-rows"]))
def test_the_codecs_pass_the_kit(name: str, number: int) -> None:
    codeckit.check_sample(name, number)


def test_the_codecs_are_described_and_take_any_axes() -> None:
    codeckit.check_description("int8")
    codeckit.check_description("int4-rows")
    assert codeckit.check_axes("int8") > 0
    assert not ROWS.encodes


@pytest.mark.parametrize("kind", KINDS)
def test_goldens_decode_through_a_rule_file(kind: str, tmp_path: Path) -> None:
    stored, call = parts_of(kind), {"codec": KINDS[kind][0], "non_finite": "keep"}
    assert goldens_by_rules.compare_numbers(tmp_path, kind, stored, call) == len(stored)


@pytest.mark.parametrize("kind", ENCODED)
def test_goldens_encode_through_a_rule_file(kind: str, tmp_path: Path) -> None:
    stored, said = parts_of(kind), KINDS[kind][1] or {}
    call = {"codec": "int8", "non_finite": "keep", **said}
    assert goldens_by_rules.compare_parts(tmp_path, kind, stored, call) == len(stored)


def float32(numbers: Any) -> tuple[Spec, Any]:
    raw = np.asarray(numbers, "<f4")
    return Spec("float32", raw.shape), raw.view("<u4")


@pytest.mark.parametrize("shape", [(), (1,), (4, 1), (4,), (4, 2)])
@pytest.mark.parametrize("has_zero", [False, True])
def test_scales_and_zeros_of_a_tensor_of_rows_and_of_groups(
    shape: tuple[int, ...], has_zero: bool, tmp_path: Path
) -> None:
    rng = np.random.default_rng(1)
    codes = rng.integers(-128, 128, (4, 64)).astype("i1")
    scale = rng.uniform(0.1, 1, shape).astype("f4")
    zero = rng.integers(-128, 128, shape).astype("i1")
    parts = {"weight": (Spec("int8", (4, 64)), codes.view("u1")), "scale": float32(scale)}
    if has_zero:
        parts["zero"] = (Spec("int8", shape), zero.view("u1"))
    call = {"codec": "int8", "dtype": "float32"}
    made = goldens_by_rules.decoded(tmp_path / "x", {"c": parts}, call, ("lossy",))["c"][1]

    def wide(entries: Any) -> Any:
        rows = entries.reshape(-1, 1) if entries.ndim < 2 else entries
        return np.repeat(rows, 64 // rows.shape[1], axis=1).astype("f4")

    less = wide(zero) if has_zero else np.float32(0)
    assert (made.view("<f4") == (codes.astype("f4") - less) * wide(scale)).all()


WEIGHT = Spec("int8", (4, 64))


@pytest.mark.parametrize(
    ("codec", "said", "specs", "code", "words"),
    [
        (CODEC, {}, (Spec("uint8", (4, 64)), Spec("float32", (4, 1)), None), "M303", "is uint8"),
        (CODEC, {}, (WEIGHT, Spec("int8", (4, 1)), None), "M303", "the scale is int8"),
        (CODEC, {}, (WEIGHT, Spec("float32", (4, 3)), None), "M310", "are not 3 groups"),
        (
            CODEC, {}, (WEIGHT, Spec("float32", (3, 1)), None), "M310",
            "is [3, 1]; numbers of [4, 64] have one of [] or [1] or [1, 1], or for their rows",
        ),
        (CODEC, {}, (WEIGHT, Spec("float32", (3,)), None), "M310", "is [3]; numbers of [4, 64]"),
        (
            CODEC, {"granularity": "channel"}, (WEIGHT, Spec("float32", (3, 1)), None), "M310",
            "is [3, 1], that of numbers of [4, 64] with one for each row is [4, 1] or [4]"
        ),
        (CODEC, {}, (WEIGHT, Spec("float32", (4, 1)), Spec("int8", (4, 2))), "M310", "the zero is"),
        (CODEC, {"group": 16}, (WEIGHT, Spec("float32", (4, 2)), None), "M310", "is [4, 4]"),
        (CODEC, {"granularity": "tensor"}, (WEIGHT, Spec("float32", (4, 1)), None), "M310", "is"),
        (ROWS, {}, (Spec("uint8", (2, 64)), Spec("float32", (2, 2))), "M310", "scale is [2, 2]"),
        (ROWS, {}, (Spec("uint8", (2, 64)), Spec("float32", (4, 3))), "M310", "are not 3 groups"),
        (ROWS, {}, (Spec("int8", (2, 64)), Spec("float32", (4, 2))), "M303", "the weight is int8"),
    ],
)  # fmt: skip
def test_parts_that_do_not_fit_are_refused_from_their_specs(
    codec: Any, said: dict[str, Any], specs: Any, code: str, words: str
) -> None:
    with pytest.raises(OpError) as caught:
        codec.decoded(codec.Args(**said), specs, "bfloat16")
    assert caught.value.code == code
    assert words in caught.value.message


def test_groups_and_a_granularity_contradict_each_other() -> None:
    with pytest.raises(OpError) as caught:
        CODEC.validate(CODEC.Args(granularity="channel", group=32), True)
    assert caught.value.code == "M308"
    with pytest.raises(OpError) as caught:
        CODEC.encoded(CODEC.Args(group=48), Spec("bfloat16", (4, 64)))
    assert caught.value.code == "M304"


NUMBERS = np.random.default_rng(2).normal(0.3, 1, (6, 64)).astype("<f4")


@pytest.mark.parametrize(
    ("said", "shape"),
    [({}, (6, 1)), ({"group": 32}, (6, 2)), ({"granularity": "tensor"}, (1,))],
)
def test_zeros_are_encoded_where_a_rule_has_a_name_for_them(
    said: dict[str, Any], shape: tuple[int, ...], tmp_path: Path
) -> None:
    """The range of what shares a scale, and 0, in 255 steps of which the least is code -128."""
    call = {"codec": "int8", "from": "float32", **said}
    roles = ("weight", "scale", "zero")
    made = goldens_by_rules.encoded(tmp_path / "x", {"w": float32(NUMBERS)}, roles, call)["w"]
    assert made["scale"][0] == Spec("float32", shape)
    assert made["zero"][0] == Spec("int8", shape)
    blocks = NUMBERS.reshape(*({(1,): (1, 1)}.get(shape, shape)), -1)
    low, high = (np.minimum(blocks.min(-1), 0), np.maximum(blocks.max(-1), 0))
    scale = ((high - low) / np.float32(255)).astype("f4")
    zero = np.rint(np.float32(-128) - low / scale).clip(-128, 127)
    codes = np.rint(blocks / scale[..., None] + zero[..., None]).clip(-128, 127)
    assert np.array_equal(made["scale"][1].view("<f4"), scale.reshape(shape))
    assert np.array_equal(made["zero"][1].view("i1"), zero.reshape(shape))
    assert np.array_equal(made["weight"][1].view("i1"), codes.reshape(6, 64))
    assert codes.min() == -128
    assert codes.max() == 127
    back = {"codec": "int8", "dtype": "float32", **said}
    again = goldens_by_rules.decoded(tmp_path / "y", {"w": made}, back, ("lossy",))["w"][1]
    assert (abs(again.view("<f4") - NUMBERS) <= scale.max()).all()


def test_no_zeros_are_made_where_a_rule_has_no_name_for_them(tmp_path: Path) -> None:
    call = {"codec": "int8", "from": "float32", "symmetric": False}
    with pytest.raises(MigrateError) as caught:
        goldens_by_rules.encoded(tmp_path / "x", {"w": float32(NUMBERS)}, ("weight", "scale"), call)
    assert caught.value.diagnostics[0].code == "M408"


@pytest.mark.parametrize("said", [{"like": "modelopt"}, {"like": "torchao"}, {"form": "modelopt"}])
def test_only_compressed_tensors_has_zeros(said: dict[str, Any]) -> None:
    with pytest.raises(OpError) as caught:
        CODEC.validate(CODEC.Args(symmetric=False, **said), True)
    assert caught.value.code == "M308"


def test_one_zero_for_more_numbers_than_a_box_holds_is_refused() -> None:
    args = CODEC.Args(symmetric=False, granularity="tensor")
    with pytest.raises(OpError) as caught:
        CODEC.encoded(args, Spec("bfloat16", (1024, 1025)))
    assert caught.value.code == "M304"
    assert "one zero for 1049600 numbers" in caught.value.message


@pytest.mark.parametrize("kind", ["ct_int8_channel", "modelopt_int4_awq"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_a_scale_that_scales_nothing_is_refused(kind: str, value: float, tmp_path: Path) -> None:
    parts = dict(parts_of(kind)["normal_f32"])
    spec, raw = parts["scale"]
    raw = raw.copy()
    raw.view("<f4")[3] = value
    call = {"codec": KINDS[kind][0], "dtype": "float32"}
    cases = {"c": parts | {"scale": (spec, raw)}}
    with pytest.raises(MigrateError) as caught:
        goldens_by_rules.decoded(tmp_path / "x", cases, call, ("lossy",))
    assert caught.value.diagnostics[0].code == "M406"


@pytest.mark.parametrize("kind", ["ct_int8_channel", "modelopt_int4_awq"])
@pytest.mark.parametrize("role", ["weight", "scale"])
def test_a_part_that_is_missing_is_named(kind: str, role: str, tmp_path: Path) -> None:
    parts = parts_of(kind)["normal_f32"]
    cases = {"c": {r: one for r, one in parts.items() if r != role}, "whole": parts}
    call = {"codec": KINDS[kind][0], "dtype": "float32"}
    with pytest.raises(MigrateError) as caught:
        goldens_by_rules.decoded(tmp_path / "x", cases, call, ("lossy",))
    (found,) = caught.value.diagnostics
    assert found.code == "M207"
    assert f"c.{role}" in str(found)


STRATEGIES: dict[str, dict[str, Any]] = {
    "channel": {}, "group": {"group": 32}, "tensor": {"granularity": "tensor"}
}  # fmt: skip


@pytest.mark.libraries
@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_zeros_are_those_of_compressed_tensors(strategy: str, dtype: str, tmp_path: Path) -> None:
    """Numbers of both signs, of one, all zero, and so small that scales are subnormal or 0."""
    quantization = pytest.importorskip("compressed_tensors.quantization")
    torch = pytest.importorskip("torch")
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    of = torch.Generator().manual_seed(9)
    normal = torch.randn(24, 96, generator=of)
    cases = {
        "both": normal, "above": normal.abs() + 1, "below": -normal.abs(), "zeros": normal * 0,
        "outlier": torch.where(normal > 2.5, normal * 1000, normal), "tiny": normal * 2.0**-130,
    }  # fmt: skip
    numbers = {name: x.to(getattr(torch, dtype)) for name, x in cases.items()}
    width = {4: (torch.int32, "<u4"), 2: (torch.int16, "<u2")}

    def held(tensor: Any) -> tuple[Spec, Any]:
        kind, raw = width[tensor.element_size()]
        return Spec(dtype, tuple(tensor.shape)), tensor.view(kind).numpy().view(raw)

    said = STRATEGIES[strategy]
    call = {"codec": "int8", "from": dtype, **said}
    roles = ("weight", "scale", "zero")
    made = goldens_by_rules.encoded(
        tmp_path / "x", {name: held(x) for name, x in numbers.items()}, roles, call
    )
    args = quantization.QuantizationArgs(
        num_bits=8, symmetric=False, strategy=strategy, group_size=said.get("group")
    )
    for name, x in numbers.items():
        blocks = x.reshape(24, -1, 32) if strategy == "group" else x
        low, high = (
            (x.min(), x.max())
            if strategy == "tensor"
            else (blocks.amin(-1, strategy == "channel"), blocks.amax(-1, strategy == "channel"))
        )
        scale, zero = calculate_qparams(low, high, args)
        codes = quantize(x, scale, zero, args, dtype=torch.int8)
        ours = made[name]
        assert np.array_equal(ours["scale"][1], held(scale)[1]), name
        assert np.array_equal(ours["zero"][1].view("i1"), zero.to(torch.int8).numpy()), name
        assert np.array_equal(ours["weight"][1].view("i1"), codes.numpy()), name


def test_columns_that_awq_divided_are_multiplied_again() -> None:
    codes = np.arange(2 * 64, dtype="u1").reshape(2, 64)
    scale, inputs = np.full((4, 2), 0.5, "<f4"), np.linspace(0.5, 2, 64, dtype="<f4")
    specs = [Spec("uint8", (2, 64)), Spec("float32", (4, 2)), Spec("float32", (64,))]
    parts = [codes, scale.view("<u4"), inputs.view("<u4")]
    plain = codeckit.decoded(ROWS, ROWS.Args(), [*parts[:2], None], [*specs[:2], None], "float32")
    made = codeckit.decoded(ROWS, ROWS.Args(), parts, specs, "float32")
    assert np.array_equal(made.view("<f4"), plain.view("<f4") * inputs)
