"""Every golden vector of every number format that is written, encoded by each way of the kit."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from kit_layouts import E2M1, FORMATS, ROW, TENSOR, Case, goldens

from migrate.codecs.kit import encoding_boxes as kit
from migrate.codecs.kit.encoding import TensorEncoding
from migrate.codecs.kit.encoding_reference import reference_parts
from migrate.codecs.kit.layout import Grid, NumberLayout, Packing, floats, integers, table, times
from migrate.codecs.kit.quant_state import TABLES
from migrate.codecs.kit.reference import reference
from migrate.codecs.kit.scale_rules import ScaleRule
from migrate.codecs.kit.word_packing import size_bytes
from migrate.core.errors import OpError
from migrate.core.spec import Spec
from migrate.elements.raw import carrier

CT = "compressed-tensors"
BNB = {
    kind: NumberLayout(
        "bnb-4bit", table(TABLES[form]), Packing(4, order=(1, 0)), times(Grid("scale", (0, 64))),
        flat=True,
    )
    for kind, form in (("bnb_nf4", "nf4"), ("bnb_fp4", "fp4"))
}  # fmt: skip

# format -> whose arithmetic
RULES: dict[str, ScaleRule] = {
    "ct_fp8_tensor": ScaleRule("float", CT, region="tensor"),
    "ct_fp8_channel": ScaleRule("float", CT, region="row"),
    "ct_fp8_block": ScaleRule("float", CT),
    "modelopt_fp8_tensor": ScaleRule("float", "modelopt", region="tensor"),
    "modelopt_fp8_channel": ScaleRule("float", "modelopt", region="row"),
    "modelopt_fp8_block": ScaleRule("float", "modelopt"),
    "ao_float8_tensor": ScaleRule("float", "torchao", region="tensor"),
    "ao_float8_row": ScaleRule("float", "torchao", region="row"),
    "ao_float8_e5m2_row": ScaleRule("float", "torchao", region="row"),
    "hf_fp8_block": ScaleRule("float", "hf"),
    "hf_fp8_block_ue8m0": ScaleRule("float", "hf", rounding="pow2"),
    "deepgemm_fp8_block": ScaleRule("float", "deepseek"),
    "deepgemm_fp8_block_ue8m0": ScaleRule("float", "deepseek", rounding="pow2"),
    "deepgemm_fp4_ue8m0": ScaleRule("mx", "deepseek"),
    "ct_mxfp8": ScaleRule("mx", CT, power="even"),
    "ct_mxfp4": ScaleRule("mx", CT, power="even"),
    "modelopt_mxfp8": ScaleRule("mx", "modelopt"),
    "modelopt_mxfp4": ScaleRule("mx", "modelopt"),
    **{
        f"ao_{kind}_{power}": ScaleRule("mx", "torchao", power=power)
        for kind in ("mxfp8_e4m3", "mxfp4")
        for power in ("floor", "ceil", "rceil", "even")
    },
    "ao_mxfp8_e4m3_rceil_swizzled": ScaleRule("mx", "torchao"),
    "ao_mxfp8_e5m2_rceil": ScaleRule("mx", "torchao"),
    "ct_nvfp4": ScaleRule("nvfp4", CT),
    "modelopt_nvfp4": ScaleRule("nvfp4", "modelopt"),
    "ao_nvfp4_two_level": ScaleRule("nvfp4", "torchao"),
    "ao_nvfp4_two_level_swizzled": ScaleRule("nvfp4", "torchao"),
    "ao_nvfp4_single_level": ScaleRule("nvfp4", "torchao"),
    "te_nvfp4_1x16": ScaleRule("nvfp4", "te"),
    "ct_int8_channel": ScaleRule("integer", CT),
    "modelopt_int8_wo": ScaleRule("integer", "modelopt"),
    "ao_int8_row": ScaleRule("integer", "torchao"),
    "ct_w8a16_pack": ScaleRule("integer", CT),
    "ct_w4a16_g128_sym": ScaleRule("integer", CT),
    "ct_w4a16_g128_asym": ScaleRule("integer", CT, asymmetric=True),
    "ct_w3a16_dense": ScaleRule("integer", CT),
    "bnb_nf4": ScaleRule("table", "bitsandbytes"),
    "bnb_fp4": ScaleRule("table", "bitsandbytes"),
}

# what a library makes otherwise, and why: (format, case) -> why
ZEROS = "divides zero by zero: NaN of numbers that are all zero"
NAN = "another NaN, or what its casts make of NaN"
FAULTS = {
    ("modelopt_fp8_tensor", "zeros_bf16"): ZEROS,
    ("modelopt_fp8_channel", "zeros_bf16"): ZEROS,
    ("ao_float8_tensor", "zeros_bf16"): ZEROS,
    ("ao_float8_row", "zeros_bf16"): ZEROS,
    ("ao_float8_row", "zero_blocks_bf16"): ZEROS,
    ("ao_float8_e5m2_row", "zeros_bf16"): ZEROS,
    ("ao_float8_e5m2_row", "zero_blocks_bf16"): ZEROS,
    ("modelopt_nvfp4", "zeros_bf16"): ZEROS,
    ("ao_nvfp4_two_level", "zeros_bf16"): ZEROS,
    ("ct_mxfp4", "huge_f32"): "a scale that overflows becomes 1",
    ("ct_mxfp4", "nonfinite_f32"): "a scale that overflows becomes 1",
    ("modelopt_mxfp4", "nonfinite_f32"): "finite codes of infinity",
    ("modelopt_mxfp8", "nonfinite_f32"): NAN,
    ("ct_nvfp4", "nonfinite_f32"): NAN,
    ("ao_nvfp4_single_level", "nonfinite_f32"): NAN,
    **{(f"ao_mxfp8_e4m3_{power}", "nonfinite_f32"): NAN for power in ("floor", "even")},
    **{(f"ao_mxfp4_{power}", "nonfinite_f32"): NAN for power in ("ceil", "rceil")},
    ("ao_mxfp8_e5m2_rceil", "scale_thresholds_f32"): "a rounded logarithm",
    **{
        (kind, "subnormal_f32"): "divides by 2^-126 where it stores 2^-127"
        for kind in ("ao_mxfp8_e4m3_ceil", "ao_mxfp8_e5m2_rceil", "ao_mxfp4_ceil")
    },
}


def cases() -> list[tuple[str, str]]:
    return [(kind, case) for kind in RULES for case in sorted(goldens()[kind])]


def made(kind: str, case: str) -> tuple[TensorEncoding, Any, dict[str, Any]]:
    """The encoding of a golden, its numbers, and what its library stored by role."""
    found = goldens()[kind][case]
    if kind in BNB:
        layout, names = BNB[kind], {"weight": "weight", "scale": "weight.absmax"}
    else:
        maker = FORMATS[kind]
        chosen = maker if isinstance(maker, Case) else maker(found)
        layout, names = chosen.layout, dict(chosen.names)
    spec, numbers = found["input"]
    constant = {}
    if "q/weight_shape" in found:
        names["shape"] = "weight_shape"
        constant = {"shape": size_bytes(spec.shape, "int64")}
    parts = {role: found[f"q/{name}"] for role, name in names.items()}
    encoding = TensorEncoding(
        layout, spec, {r: s for r, (s, _) in parts.items()}, RULES[kind], "keep", constant
    )
    return encoding, numbers, {r: a for r, (_, a) in parts.items()}


def whole(shape: tuple[int, ...]) -> Any:
    return tuple((0, n) for n in shape)


def cut(array: Any, box: Any) -> Any:
    return array[tuple(slice(a, b) for a, b in box)]


def by_numpy(encoding: TensorEncoding, numbers: Any, role: str, box: Any, survey: Any) -> Any:
    out = np.full([b - a for a, b in box], 0x5A, carrier(encoding.parts[role].dtype))
    needed = cut(numbers, encoding.needs(role, box))
    # neither what is read nor what is written need lie side by side
    encoding.encode(gaps(needed), role, box, out, survey=survey)
    return out


def by_torch(
    encoding: TensorEncoding, numbers: Any, role: str, box: Any, survey: Any, device: str = "cpu"
) -> Any:
    out = np.full([b - a for a, b in box], 0x5A, carrier(encoding.parts[role].dtype))
    held = torch.from_numpy(
        np.array(cut(numbers, encoding.needs(role, box))).view(whole_numbers(numbers))
    ).to(device)
    into = torch.from_numpy(out.view(whole_numbers(out)))
    there = into.to(device)
    encoding.encode(held, role, box, there, survey=survey)
    if there is not into:
        into.copy_(there)
    return out


def by_cuda(encoding: TensorEncoding, numbers: Any, role: str, box: Any, survey: Any) -> Any:
    if not torch.cuda.is_available():
        pytest.skip("torch finds no GPU here")
    return by_torch(encoding, numbers, role, box, survey, "cuda")


def gaps(array: Any) -> Any:
    if not array.ndim:
        return array
    wide = np.empty((*array.shape[:-1], array.shape[-1] + 3), array.dtype)
    wide[..., : array.shape[-1]] = array
    return wide[..., : array.shape[-1]]


def whole_numbers(array: Any) -> str:
    return "u1" if array.itemsize == 1 else f"<i{array.itemsize}"


def surveyed(encoding: TensorEncoding, numbers: Any) -> Any:
    return encoding.survey(numbers, whole(numbers.shape)) if encoding.surveyed else None


WAYS = {"numpy": by_numpy, "torch": by_torch}
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)


def made_by(way: str) -> Callable[..., Any]:
    return by_cuda if way == "cuda" else WAYS[way]


def stored(encoding: TensorEncoding, numbers: Any, way: str) -> dict[str, Any]:
    if way == "reference":
        return reference_parts(encoding, numbers)
    survey = surveyed(encoding, numbers)
    return {
        role: made_by(way)(encoding, numbers, role, whole(spec.shape), survey)
        for role, spec in encoding.parts.items()
    }


@pytest.mark.parametrize("way", [*WAYS, "reference", CUDA])
@pytest.mark.parametrize(("kind", "case"), cases())
def test_every_golden_is_stored_bit_for_bit(kind: str, case: str, way: str) -> None:
    encoding, numbers, wanted = made(kind, case)
    found = stored(encoding, numbers, way)
    same = all(found[role].tobytes() == wanted[role].tobytes() for role in wanted)
    # a fault that is one no more is to be taken off the list
    assert same == ((kind, case) not in FAULTS), FAULTS.get((kind, case))


@pytest.mark.parametrize(("kind", "case"), cases())
def test_every_way_makes_the_same_parts_where_libraries_are_at_fault_too(
    kind: str, case: str
) -> None:
    encoding, numbers, _ = made(kind, case)
    one = stored(encoding, numbers, "reference")
    for way in WAYS:
        other = stored(encoding, numbers, way)
        for role in one:
            assert one[role].tobytes() == other[role].tobytes(), (way, role)


def boxes(shape: tuple[int, ...], grain: tuple[int, ...], seed: int) -> Iterator[Any]:
    pick = random.Random(seed)
    yield tuple(
        ((n // 2) // g * g, min(n, (n // 2) // g * g + g))
        for n, g in zip(shape, grain, strict=True)
    )
    yield tuple((n - 1, n) for n in shape)
    for _ in range(3):
        box = []
        for n in shape:
            low = pick.randrange(n)
            box.append((low, pick.randint(low + 1, n)))
        yield tuple(box)


@pytest.mark.parametrize("way", [*WAYS, CUDA])
@pytest.mark.parametrize(("kind", "case"), cases())
def test_any_box_of_a_part_is_what_the_whole_has_there(kind: str, case: str, way: str) -> None:
    encoding, numbers, _ = made(kind, case)
    survey = surveyed(encoding, numbers)
    for role, spec in encoding.parts.items():
        one = made_by(way)(encoding, numbers, role, whole(spec.shape), survey)
        for box in boxes(spec.shape, encoding.grain(role), len(case)):
            other = made_by(way)(encoding, numbers, role, box, survey)
            assert cut(one, box).tobytes() == other.tobytes(), (role, box)


@pytest.mark.parametrize("kind", ["ct_nvfp4", "modelopt_fp8_tensor", "ct_fp8_channel"])
def test_a_survey_is_the_same_however_the_numbers_are_cut(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    large_tiles(monkeypatch)
    encoding, numbers, _ = made(kind, "normal_bf16")
    assert encoding.surveyed
    once = surveyed(encoding, numbers)
    found = None
    for row in range(numbers.shape[0]):
        for left in (0, 100):
            box = ((row, row + 1), (left, left + 100 if not left else numbers.shape[1]))
            found = encoding.survey(cut(numbers, box), box, found)
    assert found.tobytes() == once.tobytes()


@pytest.mark.parametrize(
    "kind", ["ct_nvfp4", "ao_mxfp4_even", "ct_fp8_block", "ct_w4a16_g128_asym"]
)
def test_scales_are_recalled_once_codes_are_computed(kind: str) -> None:
    case = next(c for c in sorted(goldens()[kind]) if "nonfinite" not in c)
    encoding, numbers, _ = made(kind, case)
    survey, memo = surveyed(encoding, numbers), dict[str, Any]()
    shape = encoding.parts["weight"].shape
    out = np.empty(shape, carrier(encoding.parts["weight"].dtype))
    assert encoding.remembers()
    wanted = stored(encoding, numbers, "numpy")
    for role, spec in encoding.parts.items():
        if role in ("weight", "shape"):
            continue
        place = np.empty(spec.shape, carrier(spec.dtype))
        early = encoding.recall(role, whole(spec.shape), place, memo, survey)
        # only what the survey tells is known before
        assert early == (role == "global")
    encoding.encode(np.array(numbers), "weight", whole(shape), out, memo=memo, survey=survey)
    for role, spec in encoding.parts.items():
        if role != "weight":
            place = np.empty(spec.shape, carrier(spec.dtype))
            assert encoding.recall(role, whole(spec.shape), place, memo, survey)
            assert place.tobytes() == wanted[role].tobytes()


def large_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kit, "TILE_MOST", 8)


@pytest.mark.parametrize(
    "kind", ["ct_fp8_channel", "ct_fp8_block", "ao_int8_row", "ct_int8_channel"]
)
def test_tiles_that_no_box_holds_are_surveyed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(c for c in sorted(goldens()[kind]) if "normal" in c or "block" in c)
    encoding, numbers, _ = made(kind, case)
    one = stored(encoding, numbers, "numpy")
    large_tiles(monkeypatch)
    encoding, numbers, _ = made(kind, case)
    assert encoding.surveyed
    assert not encoding.remembers()
    for role, made_parts in stored(encoding, numbers, "numpy").items():
        assert made_parts.tobytes() == one[role].tobytes()


LAYOUTS = {
    "fp8": NumberLayout(
        "fp8",
        floats("float8_e4m3fn"),
        Packing(8, ("float8_e4m3fn",)),
        times(Grid("scale", TENSOR, leading=False)),
    ),
    "row": NumberLayout(
        "fp8", floats("float8_e4m3fn"), Packing(8, ("float8_e4m3fn",)), times(Grid("scale", ROW))
    ),
    "mxfp4": NumberLayout(
        "mxfp4", floats(E2M1), Packing(4), times(Grid("scale", (1, 32), dtypes=("uint8",)))
    ),
    "int4": NumberLayout(
        "int-pack", integers(4, 8), Packing(4, ("int32",)), times(Grid("scale", (1, 32)))
    ),
    "nf4": BNB["bnb_nf4"],
}
PARTS = {
    "fp8": {"weight": Spec("float8_e4m3fn", (4, 64)), "scale": Spec("float32", ())},
    "row": {"weight": Spec("float8_e4m3fn", (4, 64)), "scale": Spec("float32", (4, 1))},
    "mxfp4": {"weight": Spec("uint8", (4, 32)), "scale": Spec("uint8", (4, 2))},
    "int4": {"weight": Spec("int32", (4, 8)), "scale": Spec("float32", (4, 2))},
    "nf4": {"weight": Spec("uint8", (128, 1)), "scale": Spec("float32", (4,))},
}
OWN = {
    "fp8": ScaleRule("float", CT, region="tensor"),
    "row": ScaleRule("float", "modelopt", region="row"),
    "mxfp4": ScaleRule("mx", "torchao"),
    "int4": ScaleRule("integer", "kimi"),
    "nf4": ScaleRule("table", "bitsandbytes"),
}


def encoded(name: str, numbers: Any, non_finite: str) -> dict[str, Any]:
    spec = Spec("float32", numbers.shape)
    encoding = TensorEncoding(LAYOUTS[name], spec, PARTS[name], OWN[name], non_finite)
    return stored(encoding, numbers.view("<u4"), "numpy")


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_the_first_number_that_is_not_finite_is_named(name: str, bad: float) -> None:
    numbers = np.linspace(-1, 1, 256, dtype="f4").reshape(4, 64)
    numbers[2, 33], numbers[3, 0] = bad, np.nan
    with pytest.raises(OpError, match=r"\[2, 33\] is (-?inf|nan)") as error:
        encoded(name, numbers, "refuse")
    assert error.value.code == "M406"


@pytest.mark.parametrize("name", LAYOUTS)
def test_infinity_saturates(name: str) -> None:
    numbers = np.linspace(-1, 1, 256, dtype="f4").reshape(4, 64)
    numbers[0, 0], numbers[1, 1] = -np.inf, np.inf
    parts = {r: (PARTS[name][r], a) for r, a in encoded(name, numbers, "saturate").items()}
    specs, arrays = ({r: p[i] for r, p in parts.items()} for i in (0, 1))
    read = reference(replace(LAYOUTS[name], shape=(4, 64)), specs, arrays, "float32").view("f4")
    assert np.isfinite(read).all()
    assert read[0, 0] == read[0].min() < 0
    assert read[1, 1] == read[1].max() > 0


@pytest.mark.parametrize("name", ["mxfp4", "int4", "nf4"])
def test_nan_is_refused_where_codes_have_none(name: str) -> None:
    numbers = np.ones((4, 64), "f4")
    numbers[1, 7] = np.nan
    with pytest.raises(OpError, match=r"\[1, 7\] is nan") as error:
        encoded(name, numbers, "saturate")
    assert "no code for NaN" in str(error.value.help)


@pytest.mark.parametrize("kind", RULES)
def test_zeros_never_make_nan(kind: str) -> None:
    case = min(goldens()[kind])
    encoding, numbers, _ = made(kind, case)
    encoding.non_finite = "refuse"
    parts = stored(encoding, np.zeros_like(numbers), "numpy")
    assert not reference(encoding.layout, encoding.parts, parts, "float32").view("f4").any()


def test_codes_of_four_bits_and_integers_need_no_torch() -> None:
    code = (
        "import sys; import numpy as np\n"
        "from migrate.codecs.kit.encoding import TensorEncoding\n"
        "from migrate.codecs.kit.layout import Grid, NumberLayout, Packing, floats, times\n"
        "from migrate.codecs.kit.scale_rules import ScaleRule\n"
        "from migrate.core.spec import Spec\n"
        "layout = NumberLayout('mxfp4', floats('float4_e2m1fn'), Packing(4), "
        "times(Grid('scale', (1, 32), dtypes=('uint8',))))\n"
        "parts = {'weight': Spec('uint8', (4, 32)), 'scale': Spec('uint8', (4, 2))}\n"
        "spec, rule = Spec('float32', (4, 64)), ScaleRule('mx', 'torchao')\n"
        "made = TensorEncoding(layout, spec, parts, rule)\n"
        "out = np.zeros((4, 32), 'u1')\n"
        "numbers = np.linspace(-1, 1, 256, dtype='f4').reshape(4, 64).view('<u4')\n"
        "made.encode(numbers, 'weight', ((0, 4), (0, 32)), out)\n"
        "assert out.any(); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
