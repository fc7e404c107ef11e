"""`fp8` against what compressed-tensors, ModelOpt, torchao and Transformer Engine made of the same
bytes, and what it refuses.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from golden_rules import RULE, decoded, same_numbers, tensor_of, vectors
from kit_layouts import goldens
from safetensors.torch import load_file, save_file

import migrate
from migrate.codecs import get
from migrate.codecs.base import OpError
from migrate.core.errors import CheckpointError
from migrate.core.spec import Spec
from migrate.elements.raw import carrier
from migrate.testing import codeckit

CODEC = get("fp8")
Args: Any = CODEC.Args
E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
# format -> names of its parts, and what its rules say
KINDS: dict[str, tuple[str, str, str]] = {
    "ct_fp8_tensor": ("weight", "weight_scale", ""),
    "ct_fp8_channel": ("weight", "weight_scale", ""),
    "modelopt_fp8_tensor": ("weight", "weight_scale", ""),
    "modelopt_fp8_channel": ("weight", "weight_scale", ""),
    "te_fp8_e4m3_current": ("_data", "_scale_inv", f"codes: {E4M3}"),
    "te_fp8_e4m3_current_pow2": ("_data", "_scale_inv", f"codes: {E4M3}"),
    "te_fp8_e5m2_current": ("_data", "_scale_inv", f"codes: {E5M2}"),
    "te_fp8_e5m2_current_pow2": ("_data", "_scale_inv", f"codes: {E5M2}"),
    "ao_float8_tensor": ("qdata", "scale", ""),
    "ao_float8_row": ("qdata", "scale", ""),
    "ao_float8_e5m2_row": ("qdata", "scale", ""),
}
# what encodes what of them is encoded
ENCODED: dict[str, dict[str, Any]] = {
    "ct_fp8_tensor": {"like": "compressed-tensors"},
    "ct_fp8_channel": {"like": "compressed-tensors", "granularity": "channel"},
    "modelopt_fp8_tensor": {"granularity": "stack"},
    "modelopt_fp8_channel": {"granularity": "channel"},
    "ao_float8_tensor": {"like": "torchao"},
    "ao_float8_row": {"like": "torchao", "granularity": "channel"},
    "ao_float8_e5m2_row": {"like": "torchao", "granularity": "channel", "codes": E5M2},
}
# libraries that divide zero by zero, and so store NaN
ZEROS = ("zeros_bf16", "zero_blocks_bf16")
DIVIDE_BY_ZERO = {
    "modelopt_fp8_tensor": ZEROS[:1],
    "modelopt_fp8_channel": ZEROS[:1],
    "ao_float8_tensor": ZEROS[:1],
    "ao_float8_row": ZEROS,
    "ao_float8_e5m2_row": ZEROS,
}
VECTORS = list(vectors(KINDS))


@pytest.mark.parametrize(("name", "number"), codeckit.cases(["fp8"]))
def test_a_sample_is_what_the_reference_makes_whole_and_box_by_box(name: str, number: int) -> None:
    codeckit.check_sample(name, number)


def test_the_codec_is_described_and_takes_numbers_of_0_to_4_axes() -> None:
    codeckit.check_description("fp8")
    # several, for axes of length 1 are what shapes of scales leave out
    assert all(codeckit.check_axes("fp8", seed) > 0 for seed in range(6))


@pytest.mark.heavy
@pytest.mark.parametrize(("kind", "case", "of"), VECTORS, ids="/".join)
def test_a_rule_decodes_every_golden_bit_for_bit(
    kind: str, case: str, of: str, tmp_path: Path
) -> None:
    found = goldens()[kind][case]
    weight, scale, said = KINDS[kind]
    (spec, wanted) = found[of]
    stored = {
        role: tensor_of(found[f"q/{name}"][0].dtype, found[f"q/{name}"][1])
        for role, name in (("weight", weight), ("scale", scale))
    }
    if not ((stored["scale"] > 0) & stored["scale"].isfinite()).all():
        with pytest.raises(CheckpointError) as caught:
            decoded(tmp_path, "fp8", stored, spec.dtype, said)
        assert [d.code for d in caught.value.diagnostics] == ["M406"]
        (tmp_path / "a.safetensors").unlink()
        said = f"{said}, non_finite: keep".removeprefix(", ")
    made = decoded(tmp_path, "fp8", stored, spec.dtype, said)
    # ModelOpt rounds its scale to bfloat16 here
    assert same_numbers(made, spec.dtype, wanted) != (
        kind == "modelopt_fp8_tensor" and of.endswith(".bf16")
    )


@pytest.mark.parametrize(
    ("kind", "case"), [(kind, case) for kind in ENCODED for case in sorted(goldens()[kind])]
)
def test_encoding_is_bit_for_bit_what_the_library_stores(kind: str, case: str) -> None:
    found = goldens()[kind][case]
    weight, scale, _ = KINDS[kind]
    (spec, numbers), parts = found["input"], [found[f"q/{weight}"], found[f"q/{scale}"]]
    args = Args(**ENCODED[kind], non_finite="keep" if "nonfinite" in case else "refuse")
    assert list(CODEC.encoded(args, spec)) == [s for s, _ in parts]
    made = codeckit.encoded(CODEC, args, np.array(numbers), spec)
    same = all(m.tobytes() == a.tobytes() for m, (_, a) in zip(made, parts, strict=True))
    assert same == (case not in DIVIDE_BY_ZERO.get(kind, ()))


@pytest.mark.parametrize(
    ("weight", "scale", "granularity"),
    [
        ((4, 6), (), "stack"), ((4, 6), (1,), "stack"), ((4, 6), (1, 1), "stack"),
        ((4, 6), (4,), "channel"), ((4, 6), (4, 1), "channel"),
        ((3, 4, 6), (), "stack"), ((3, 4, 6), (1,), "stack"), ((3, 4, 6), (1, 1, 1), "stack"),
        ((3, 4, 6), (3,), "tensor"), ((3, 4, 6), (3, 1), "tensor"),
        ((3, 4, 6), (3, 1, 1), "tensor"),
        ((3, 4, 6), (3, 4), "channel"), ((3, 4, 6), (3, 4, 1), "channel"),
        ((6,), (), "stack"), ((), (), "stack"),
    ],
)  # fmt: skip
def test_what_has_a_scale_follows_from_its_shape(
    weight: tuple[int, ...], scale: tuple[int, ...], granularity: str
) -> None:
    rng = np.random.default_rng(5)
    codes = rng.integers(0, 0x7E, weight, "u1")
    scales = rng.random(scale, "f4") + np.float32(0.5)
    specs = [Spec(E4M3, weight), Spec("float32", scale)]
    made = codeckit.decoded(CODEC, Args(), [codes, scales.view("<u4")], specs, "float32")
    numbers = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()
    lead = {"stack": (), "tensor": weight[:-2], "channel": weight[:-1]}[granularity]
    wanted = numbers * scales.reshape(lead + (1,) * (len(weight) - len(lead)))
    assert (made.view("<f4") == wanted).all()
    said = codeckit.decoded(
        CODEC, Args(granularity=granularity), [codes, scales.view("<u4")], specs, "float32"
    )
    assert (said == made).all()


@pytest.mark.parametrize(
    ("said", "shape", "stored"),
    [
        ({}, (4, 6), [(E4M3, (4, 6)), ("float32", ())]),
        ({"granularity": "channel"}, (4, 6), [(E4M3, (4, 6)), ("float32", (4,))]),
        ({}, (3, 4, 6), [(E4M3, (3, 4, 6)), ("float32", (3,))]),
        ({"granularity": "stack"}, (3, 4, 6), [(E4M3, (3, 4, 6)), ("float32", ())]),
        ({"like": "compressed-tensors"}, (4, 6), [(E4M3, (4, 6)), ("bfloat16", (1,))]),
        ({"form": "compressed-tensors", "scale": "float32", "granularity": "channel"}, (3, 4, 6),
         [(E4M3, (3, 4, 6)), ("float32", (3, 4, 1))]),
        ({"like": "torchao", "codes": E5M2}, (4, 6), [(E5M2, (4, 6)), ("float32", (1, 1))]),
        ({"form": "torchao", "scale": "bfloat16"}, (3, 4, 6),
         [(E4M3, (3, 4, 6)), ("bfloat16", (3, 1, 1))]),
        ({"form": "te", "codes": E5M2}, (4, 6), [("uint8", (4, 6)), ("float32", (1,))]),
    ],
)  # fmt: skip
def test_a_form_says_how_parts_are_stored(
    said: dict[str, Any], shape: tuple[int, ...], stored: list[tuple[str, tuple[int, ...]]]
) -> None:
    args = Args(**said)
    made = CODEC.encoded(args, Spec("bfloat16", shape))
    assert [(s.dtype, s.shape) for s in made if s is not None] == stored
    assert CODEC.decoded(args, made, "bfloat16") == Spec("bfloat16", shape)


@pytest.mark.parametrize(
    ("weight", "scale", "said", "code", "says"),
    [
        (Spec("bfloat16", (4, 6)), (), {}, "M303", "the weight is bfloat16"),
        (Spec("uint8", (4, 6)), (), {}, "M303", "the weight is uint8"),
        (Spec(E5M2, (4, 6)), (), {"codes": E4M3}, "M303", f"is {E5M2}, not {E4M3}"),
        (Spec(E4M3, (4, 6)), "int8", {}, "M303", "the scale is int8"),
        (Spec(E4M3, (4, 6)), (6,), {}, "M310", "is [6]; numbers of [4, 6] have one of [] or [1]"),
        (Spec(E4M3, (4, 6)), (2, 2), {}, "M310", "the scale is [2, 2]"),
        (Spec(E4M3, (4, 6)), (1, 6), {}, "M310", "the scale is [1, 6]"),
        (Spec(E4M3, (4, 6)), (4, 1, 1), {}, "M310", "the scale is [4, 1, 1]"),
        (Spec(E4M3, (3, 4, 6)), (4,), {}, "M310", "the scale is [4]"),
        (Spec(E4M3, (4, 6)), (4, 1), {"granularity": "tensor"}, "M310", "the scale is [4, 1]"),
        (Spec(E4M3, (4, 6)), (1,), {"granularity": "channel"}, "M310", "the scale is [1]"),
        (Spec(E4M3, (3, 4, 6)), (), {"granularity": "channel"}, "M310", "the scale is []"),
        (Spec(E4M3, (3, 4, 6)), (3,), {"granularity": "stack"}, "M310", "the scale is [3]"),
        (Spec(E4M3, (6,)), (6,), {}, "M304", "2 or more axes"),
    ],
)
def test_parts_that_do_not_fit_are_refused(
    weight: Spec, scale: Any, said: dict[str, Any], code: str, says: str
) -> None:
    grid = Spec(scale, ()) if isinstance(scale, str) else Spec("float32", scale)
    with pytest.raises(OpError) as caught:
        CODEC.decoded(Args(**said), [weight, grid], "bfloat16")
    assert caught.value.code == code
    assert says in caught.value.message


@pytest.mark.parametrize("way", ["numpy", "torch"])
@pytest.mark.parametrize("value", [0.0, -0.0, -1.0, float("inf"), float("nan")])
def test_a_scale_that_is_none_is_refused_by_its_place_unless_it_is_kept(
    value: float, way: str
) -> None:
    codes = np.full((5, 4, 6), 0x38, "u1")
    scales = np.ones((5, 4), "f4")
    scales[3, 2] = value
    specs = [Spec(E4M3, (5, 4, 6)), Spec("float32", (5, 4))]
    box = ((2, 5), (1, 4), (0, 6))
    needed = CODEC.decode_needs(Args(), specs, box)
    held: list[Any] = [
        np.array(array[tuple(slice(a, b) for a, b in need or ())])
        for array, need in zip((codes, scales.view("<i4")), needed, strict=True)
    ]
    out: Any = np.zeros((3, 3, 6), "<i4")
    if way == "torch":
        held, out = [torch.from_numpy(a) for a in held], torch.from_numpy(out)
    with pytest.raises(OpError) as caught:
        CODEC.decode(Args(), held, specs, "float32", box, out)
    assert caught.value.code == "M406"
    assert caught.value.message == (
        f"dequantize: the scale of the numbers from [3, 2, 0] on is {value:g}"
    )
    CODEC.decode(Args(non_finite="keep"), held, specs, "float32", box, out)
    made = np.asarray(out).view("<f4")
    assert np.array_equal(made[1, 1], np.full(6, value, "f4"), equal_nan=True)
    made[1, 1] = 1
    assert (made == 1).all()


@pytest.mark.heavy
def test_a_scale_that_is_none_stops_a_run_before_anything_is_published(tmp_path: Path) -> None:
    weight = torch.ones(4, 6).to(torch.float8_e4m3fn)
    with pytest.raises(CheckpointError) as caught:
        decoded(tmp_path, "fp8", {"weight": weight, "scale": torch.tensor(0.0)}, "bfloat16")
    (found,) = caught.value.diagnostics
    assert (found.code, "from [0, 0] on is 0" in found.message) == ("M406", True)
    assert not (tmp_path / "b.safetensors").exists()


@pytest.mark.heavy
def test_a_weight_without_its_scale_is_refused_by_the_name_of_the_scale(tmp_path: Path) -> None:
    source, rule = tmp_path / "a.safetensors", tmp_path / "r.yaml"
    weight = torch.ones(4, 6).to(torch.float8_e4m3fn)
    others = {"l.1.weight": weight.clone(), "l.1.scale": torch.ones(4)}
    save_file({"l.0.weight": weight, **others}, source)
    rule.write_text(
        RULE.format(
            parts='weight: "{m...}.weight", scale: "{m...}.scale"',
            codec="fp8",
            dtype="bfloat16",
            more="",
        )
    )
    with pytest.raises(CheckpointError) as caught:
        migrate.apply(source, tmp_path / "b.safetensors", rules=[rule], allow=["lossy"])
    assert [d.code for d in caught.value.diagnostics] == ["M207"]
    assert "missing: l.0.scale" in str(caught.value)
    assert not (tmp_path / "b.safetensors").exists()


@pytest.mark.parametrize("non_finite", ["refuse", "saturate", "keep"])
def test_numbers_that_are_not_finite(non_finite: str) -> None:
    numbers = np.full((4, 6), 2, "f4")
    numbers[1, 3], numbers[2, 0] = np.inf, np.nan
    args, spec = Args(non_finite=non_finite), Spec("float32", (4, 6))
    if non_finite == "refuse":
        with pytest.raises(OpError, match=r"the number at \[1, 3\] is inf") as caught:
            codeckit.encoded(CODEC, args, numbers.view("<u4"), spec)
        assert caught.value.code == "M406"
        return
    codes, scale = codeckit.encoded(CODEC, args, numbers.view("<u4"), spec)
    if non_finite == "saturate":
        assert scale.view("<f4") == np.float32(2) / np.float32(448)
        assert (codes[1, 3], codes[2, 0], codes[0, 0]) == (0x7E, 0x7F, 0x7E)
    else:
        assert not np.isfinite(scale.view("<f4"))


def raw(tensor: torch.Tensor, dtype: str) -> Any:
    kept = tensor.to(getattr(torch, dtype))
    kind = {4: torch.int32, 2: torch.int16}[kept.element_size()]
    return kept.view(kind).numpy().view(carrier(dtype))


@pytest.mark.parametrize("codes", [E4M3, E5M2, "float8_e4m3fnuz", "float8_e5m2fnuz"])
@pytest.mark.parametrize("like", ["modelopt", "compressed-tensors", "torchao"])
def test_neither_zeros_nor_the_smallest_numbers_make_nan(codes: str, like: str) -> None:
    for dtype, granularity, largest in product(
        ("float32", "bfloat16", "float16"),
        ("tensor", "channel", "stack"),
        (0.0, 1e-45, 3e-44, 1e-40, 6e-8, 1e-3, 1.0, 3e4),
    ):
        numbers = raw(torch.linspace(-largest, largest, 48).reshape(2, 4, 6), dtype)
        args, spec = Args(granularity=granularity, codes=codes, like=like), Spec(dtype, (2, 4, 6))
        made, specs = codeckit.encoded(CODEC, args, numbers, spec), CODEC.encoded(args, spec)
        wanted = CODEC.reference_parts(args, numbers, spec)
        assert all(a.tobytes() == b.tobytes() for a, b in zip(made, wanted, strict=True))
        back = codeckit.decoded(CODEC, args, made, specs, "float32").view("<f4")
        assert np.isfinite(back).all(), (args, dtype, largest)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("like", ["modelopt", "compressed-tensors", "torchao"])
def test_what_returns_is_what_is_said(like: str, dtype: str) -> None:
    spec = Spec(dtype, (40, 96))
    for granularity, codes, scale, seed in product(
        ("tensor", "channel"), (E4M3, E5M2, "float8_e4m3fnuz"), (None, "bfloat16"), range(4)
    ):
        args = Args(granularity=granularity, codes=codes, like=like, scale=scale)
        assert CODEC.returns(args, spec) == (
            f"codes and scales of what the same arithmetic encoded from {dtype}"
        )
        numbers = codeckit.numbers(spec, seed)
        parts, specs = codeckit.encoded(CODEC, args, numbers, spec), CODEC.encoded(args, spec)
        read = codeckit.decoded(CODEC, args, parts, specs, dtype)
        again = codeckit.encoded(CODEC, args, read, spec)
        assert all(a.tobytes() == b.tobytes() for a, b in zip(parts, again, strict=True)), args


def test_a_scale_of_a_large_tensor_takes_no_box_of_all_its_numbers() -> None:
    spec = Spec("bfloat16", (3, 4096, 4096))
    box = ((1, 2), (100, 164), (0, 4096))
    for granularity, surveyed in (("tensor", True), ("stack", True), ("channel", False)):
        args = Args(granularity=granularity)
        assert CODEC.surveys(args, spec) == surveyed
        assert CODEC.encode_needs(args, spec, 0, box) == box
        assert CODEC.remembers(args, spec) < 1 << 17


@pytest.mark.heavy
@pytest.mark.parametrize(
    "said",
    [
        "like: modelopt",
        "like: compressed-tensors, granularity: channel",
        "like: torchao, codes: float8_e5m2",
        "form: te, codes: float8_e4m3fn",
        "granularity: stack",
    ],
)
def test_a_rule_encodes_and_its_inverse_decodes(said: str, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(5)
    held = {
        "a.weight": (torch.randn(96, 64, generator=generator) * 0.02).bfloat16(),
        "b.weight": (torch.randn(3, 700, 900, generator=generator) * 0.02).bfloat16(),
        "c.weight": torch.zeros(8, 32, dtype=torch.bfloat16),
    }
    source, out, back = (tmp_path / f"{n}.safetensors" for n in "abc")
    save_file(held, source)
    rule = tmp_path / "r.yaml"
    rule.write_text(
        "id: a/b\ntitle: t\nlineage: a\nedge: [one, two]\nrules:\n  - name: r\n"
        "    from: '{m...}.weight'\n    to: {weight: '{m}.codes', scale: '{m}.scale'}\n"
        f"    via: [{{quantize: {{codec: fp8, from: bfloat16, {said}}}}}]\n"
    )
    how: dict[str, Any] = {"rules": [rule], "allow": ["lossy"]}
    migrate.apply(source, out, **how)
    assert migrate.verify(out, source=source, **how).to_json()["differences"] == []
    migrate.downgrade(out, back, **how)
    for key, tensor in load_file(back).items():
        error = (tensor.float() - held[key].float()).norm()
        assert error <= 0.08 * held[key].float().norm(), key


@pytest.mark.heavy
def test_the_scale_of_inputs_is_dropped_and_the_plan_says_why(tmp_path: Path) -> None:
    source, out, rule = (tmp_path / n for n in ("a.safetensors", "b.safetensors", "r.yaml"))
    save_file(
        {
            "l.0.weight": torch.ones(4, 6).to(torch.float8_e4m3fn),
            "l.0.weight_scale": torch.tensor(0.5),
            "l.0.input_scale": torch.tensor(0.25),
            "l.1.weight": torch.ones(4, 6).to(torch.float8_e4m3fn),
            "l.1.weight_scale": torch.tensor(0.5),
        },
        source,
    )
    rule.write_text(
        "id: a/b\ntitle: t\nlineage: a\nedge: [one, two]\nrules:\n  - name: r\n"
        "    from: {weight: '{m...}.weight', scale: '{m...}.weight_scale', "
        "input_scale: '{m...}.input_scale'}\n"
        "    optional: [input_scale]\n    to: '{m}.weight'\n"
        "    via: [{dequantize: {codec: fp8, dtype: bfloat16}}]\n"
    )
    plan = migrate.plan(source, rules=[rule], allow=["lossy", "drop"])
    dropped = [row for row in plan.document["rows"] if row["change"] == "dropped"]
    assert [row["why"] for row in dropped] == [
        "it scales activations, which a layer of plain weights does not encode"
    ]
    with pytest.raises(CheckpointError):
        migrate.apply(source, out, rules=[rule], allow=["lossy"])
    migrate.apply(source, out, rules=[rule], allow=["lossy", "drop"])
    assert sorted(load_file(out)) == ["l.0.weight", "l.1.weight"]
