"""`mxfp8` and `mxfp4`: golden vectors through rule files, what is refused, what returns."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import goldens_by_rules
import numpy as np
import pytest
from kit_layouts import FORMATS, goldens
from test_kit_encoding import FAULTS as ENCODING_FAULTS
from test_kit_goldens import BITS, UNSIGNED_ZERO, equal, fault

from migrate.codecs import get
from migrate.codecs.base import OpError
from migrate.codecs.kit.encoding_reference import reference_parts
from migrate.core.errors import MigrateError
from migrate.core.spec import Spec, spec
from migrate.testing import codeckit

E4M3, E5M2, E2M1 = "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"
POWERS = ("floor", "ceil", "rceil", "even")
CT = "compressed-tensors"

# golden format -> codec, what its rule says to decode, and to encode
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "ct_mxfp8": ("mxfp8", {}, {"like": CT}),
    "modelopt_mxfp8": ("mxfp8", {}, {"like": "modelopt"}),
    **{f"ao_mxfp8_e4m3_{r}": ("mxfp8", {}, {"like": "torchao", "rule": r}) for r in POWERS},
    "ao_mxfp8_e5m2_rceil": ("mxfp8", {}, {"codes": E5M2}),
    "ao_mxfp8_e4m3_rceil_swizzled": ("mxfp8", {"swizzled": True}, {}),
    "ct_mxfp4": ("mxfp4", {}, {"like": CT, "rule": "even"}),
    "modelopt_mxfp4": ("mxfp4", {}, {"like": "modelopt"}),
    **{f"ao_mxfp4_{r}": ("mxfp4", {}, {"like": "torchao", "rule": r}) for r in POWERS},
    "deepgemm_fp4_ue8m0": ("mxfp4", {}, {"like": "deepseek"}),
    "mxfp4_to_nvfp4_exact mxfp4": ("mxfp4", {"form": "blocks"}, {}),
    "gptoss_mxfp4": ("mxfp4", {"form": "blocks"}, {}),
}
# what infinities and the largest of all numbers became: products that are infinite to the library,
# and refused here
BEYOND = {
    *((kind, "nonfinite_f32") for kind in (
        "modelopt_mxfp8", "ao_mxfp8_e4m3_floor", "ao_mxfp8_e4m3_even", "ao_mxfp8_e5m2_rceil",
        "ao_mxfp4_ceil", "ao_mxfp4_rceil", "deepgemm_fp4_ue8m0",
    )),
    *((kind, "huge_f32") for kind in (
        "modelopt_mxfp8", "ao_mxfp8_e4m3_even", "ao_mxfp8_e5m2_rceil", "ao_mxfp4_rceil",
        "ao_mxfp4_even",
    )),
}  # fmt: skip
# of which there are numbers that were encoded
ENCODED = [kind for kind in KINDS if kind.split("_")[0] not in ("mxfp4", "gptoss")]


def parts_of(kind: str) -> dict[str, dict[str, Any]]:
    """case -> role -> (spec, raw elements)."""
    case: Any = FORMATS[kind]
    found = goldens()[kind.split()[0]]
    return {
        name: {role: held[f"q/{stored}"] for role, stored in case.names.items()}
        for name, held in found.items()
    }


def wanted_of(kind: str, dtype: str) -> dict[str, dict[str, Any]]:
    """case -> what its library makes of it in this dtype, by function; its faults apart."""
    out: dict[str, dict[str, Any]] = {}
    for case, held in goldens()[kind.split()[0]].items():
        for name, (one, raw) in held.items():
            if name.startswith("dq/") and one.dtype == dtype and not fault(kind, case, name):
                # transformers answers with rows and columns in the other order
                out.setdefault(case, {})[name] = (
                    raw.swapaxes(-1, -2) if "transposed" in name else raw
                )
    return out


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_goldens_decode_through_a_rule_file_and_no_loss_has_to_be_allowed(
    kind: str, dtype: str, tmp_path: Path
) -> None:
    codec, said, _ = KINDS[kind]
    wanted, call = wanted_of(kind, dtype), {"codec": codec, "dtype": dtype, **said}
    held = {case: parts for case, parts in parts_of(kind).items() if case in wanted}
    beyond = {case for case in held if (kind, case) in BEYOND}
    for case in beyond:
        with pytest.raises(MigrateError) as caught:
            goldens_by_rules.decoded(tmp_path / case, {case: held[case]}, call)
        assert caught.value.diagnostics[0].code == "M406"
        assert re.search(r"the number at \[[\d, ]+\] is", caught.value.diagnostics[0].message)
    there = {case: parts for case, parts in held.items() if case not in beyond}
    made = goldens_by_rules.decoded(tmp_path / "all", there, call) if there else {}
    for case in there:
        for name, one in wanted[case].items():
            a, b = equal(made[case][1], dtype), equal(one, dtype)
            if name.endswith(UNSIGNED_ZERO):
                a, b = (np.where(x & BITS[dtype][2], x, 0) for x in (a, b))
            assert (a == b).all(), f"{case} {name}: {(a != b).sum()} of {a.size} differ"


@pytest.mark.parametrize("kind", ENCODED)
def test_goldens_encode_through_a_rule_file(kind: str, tmp_path: Path) -> None:
    codec, decoding, encoding = KINDS[kind]
    stored = parts_of(kind)
    for dtype in ("float32", "bfloat16"):
        cases = {
            case: held["input"]
            for case, held in goldens()[kind].items()
            if held["input"][0].dtype == dtype
        }
        if not cases:
            continue
        parts = stored[next(iter(cases))]
        call = {
            "codec": codec,
            "from": dtype,
            "scale": parts["scale"][0].dtype,
            "non_finite": "keep",
            **({"weight": parts["weight"][0].dtype} if codec == "mxfp4" else {}),
            **decoding,
            **encoding,
        }
        made = goldens_by_rules.encoded(tmp_path / dtype, cases, ("weight", "scale"), call)
        for case in cases:
            same = all(
                (made[case][role][0], made[case][role][1].tobytes()) == (one, raw.tobytes())
                for role, (one, raw) in stored[case].items()
            )
            # a fault that is one no more is to be taken off the list
            assert same == ((kind, case) not in ENCODING_FAULTS), (
                case,
                ENCODING_FAULTS.get((kind, case)),
            )


def decode(codec: str, args: dict[str, Any], parts: list[Any], dtype: str = "bfloat16") -> Any:
    made = get(codec)
    specs, arrays = [one for one, _ in parts], [raw for _, raw in parts]
    own = made.Args(**args)
    made.validate(own, False)
    return codeckit.decoded(made, own, arrays, specs, dtype)


def numbers_of(raw: Any, dtype: str = "bfloat16") -> Any:
    wide = raw.astype("<u4") << 16 if dtype == "bfloat16" else raw
    return wide.view("<f4")


def held(dtype: str, values: Any, kind: str = "u1") -> Any:
    raw = np.array(values, kind)
    if kind == "f4":
        raw = raw.view("<u4")
    return spec(dtype, raw.shape), raw


CODES = np.full((2, 32), 0x77)


@pytest.mark.parametrize("scale", [0.0, -1.0, 3.0, float("inf"), 1.0000001])
def test_a_float32_scale_that_is_no_power_of_two_is_refused_with_its_index(scale: float) -> None:
    scales = held("float32", [[1, 2], [0.5, scale]], "f4")
    for dtype in ("float32", "bfloat16", "float16"):
        with pytest.raises(OpError, match=r"from \[1, 32\] on is .* not a power of two") as caught:
            decode("mxfp4", {}, [held("uint8", CODES), scales], dtype)
        assert caught.value.code == "M406"


def test_float32_scales_are_exact_and_nan_is_nan() -> None:
    scales = held("float32", [[1, float("nan")], [2.0**-127, 2.0**120]], "f4")
    codes = held("uint8", CODES)
    assert get("mxfp4").exact(get("mxfp4").Args(), [codes[0], scales[0]], "bfloat16")
    made = numbers_of(decode("mxfp4", {}, [codes, scales]))
    assert (made[0, :32] == 6).all()
    assert np.isnan(made[0, 32:]).all()
    assert (made[1, :32] == 6 * 2.0**-127).all()
    assert (made[1, 32:] == 6 * 2.0**120).all()


def test_the_byte_255_is_nan_and_the_byte_0_a_number() -> None:
    scales = held("uint8", [[255, 0], [127, 126]])
    for codec, codes in (
        ("mxfp4", held("uint8", CODES)),
        ("mxfp8", held(E4M3, np.full((2, 64), 0x4C))),
    ):
        made = numbers_of(decode(codec, {}, [codes, scales]))
        assert np.isnan(made[0, :32]).all()
        assert (made[0, 32:] == 6 * 2.0**-127).all()
        assert (made[1, :32] == 6).all()


def test_a_product_beyond_the_range_is_refused_with_its_index() -> None:
    scales = held("uint8", [[127, 127], [127, 254]])
    for dtype in ("float32", "bfloat16"):
        with pytest.raises(OpError, match=r"the number at \[1, 32\] is 6 times") as caught:
            decode("mxfp4", {}, [held("uint8", CODES), scales], dtype)
        assert caught.value.code == "M406"


@pytest.mark.parametrize(
    ("codec", "args", "parts", "code", "message"),
    [
        ("mxfp4", {}, [("uint8", 4, 2, 16), ("uint8", 4, 2)], "M310", "blocks of their own"),
        ("mxfp4", {"form": "blocks"}, [("uint8", 4, 16), ("uint8", 4, 1)], "M310", "of numbers of"),
        ("mxfp4", {"form": "blocks"}, [("uint8", 4, 2, 8), ("uint8", 4, 2)], "M310", "16 entries"),
        ("mxfp4", {}, [("uint8", 4, 32), ("uint8", 4, 3)], "M310", r"is \[4, 3\]"),
        ("mxfp4", {}, [("uint8", 4, 32), ("bfloat16", 4, 2)], "M303", "scale is bfloat16"),
        ("mxfp4", {}, [("int32", 4, 32), ("uint8", 4, 2)], "M303", "weight is int32"),
        ("mxfp8", {}, [("uint8", 4, 32), ("uint8", 4, 1)], "M303", "does not say what it holds"),
        ("mxfp8", {"codes": E5M2}, [(E4M3, 4, 32), ("uint8", 4, 1)], "M303", "the rule says"),
        ("mxfp8", {}, [(E4M3, 4, 32), ("uint8", 128, 4)], "M310", r"is \[4, 1\]"),
        ("mxfp8", {"form": "te", "codes": E4M3}, [("uint8", 4, 32), ("uint8", 4, 1)], "M310",
         "128, 4"),
        ("mxfp8", {}, [("float8_e4m3fnuz", 4, 32), ("uint8", 4, 1)], "M303", "e4m3fnuz"),
        ("mxfp8", {"form": "te"}, [("uint8", 4, 32), ("uint8", 128, 4)], "M308", "need `codes`"),
    ],
)  # fmt: skip
def test_parts_that_do_not_fit_are_refused(
    codec: str, args: dict[str, Any], parts: list[Any], code: str, message: str
) -> None:
    made = get(codec)
    specs = [Spec(dtype, tuple(shape)) for dtype, *shape in parts]

    def refuse() -> None:
        made.validate(made.Args(**args), False)
        made.decoded(made.Args(**args), specs, "bfloat16")

    with pytest.raises(OpError, match=message) as caught:
        refuse()
    assert caught.value.code == code


@pytest.mark.parametrize(("like", "rule"), [(CT, "floor"), ("modelopt", "even")])
def test_a_rule_that_the_library_does_not_have_is_refused(like: str, rule: str) -> None:
    for codec in map(get, ("mxfp4", "mxfp8")):
        with pytest.raises(OpError, match=f"scales of {like} are") as caught:
            codec.validate(codec.Args(like=like, rule=rule), True)
        assert caught.value.code == "M308"


def test_rows_that_would_come_back_longer_are_refused() -> None:
    codec = get("mxfp4")
    for args, columns in ((codec.Args(), 7), (codec.Args(form="blocks"), 48)):
        with pytest.raises(OpError, match="would be read again as rows of") as caught:
            codec.encoded(args, spec("bfloat16", (4, columns)))
        assert caught.value.code == "M304"


LIKES = {"mxfp8": ("torchao", CT, "modelopt"), "mxfp4": ("torchao", CT, "modelopt", "deepseek")}
CALLS = [
    (codec, {"like": like, **({"rule": rule} if like == "torchao" else {})})
    for codec, likes in LIKES.items()
    for like in likes
    for rule in (POWERS if like == "torchao" else POWERS[:1])
]


@pytest.mark.parametrize(("codec", "args"), CALLS)
def test_zeros_and_blocks_of_zeros_never_make_nan(codec: str, args: dict[str, Any]) -> None:
    made = get(codec)
    own, numbers = made.Args(**args), spec("bfloat16", (2, 96))
    raw = np.zeros((2, 96), "<u2")
    # one block of numbers among those of zeros
    raw[1, 32:64] = 0x3F80
    parts, specs = codeckit.encoded(made, own, raw, numbers), made.encoded(own, numbers)
    found = numbers_of(codeckit.decoded(made, own, parts, specs, "bfloat16"))
    assert (found[raw == 0] == 0).all()
    assert (found[raw != 0] == 1).all()


def stored(codec: str, args: dict[str, Any], seed: int) -> list[Any]:
    """Random codes, those of blocks up to random largest ones, and scales that have neighbours."""
    dice, made = np.random.default_rng(seed), get(codec)
    own = made.Args(**args)
    specs = made.encoded(own, spec("float32", (64, 64)))
    known = np.array(made.layout(own, dict(zip(made.parts, specs, strict=True))).elements.values())
    finite = np.flatnonzero(np.isfinite(known))
    largest = dice.choice(known[finite][known[finite] > 0], (64, 2, 1))
    codes = dice.choice(finite, (64, 2, 32))
    codes = np.where(np.abs(known[codes]) > largest, 0, codes)
    # so that each block has its largest
    codes[..., 0] = np.array([np.flatnonzero(known == v)[0] for v in largest.ravel()]).reshape(
        64, 2
    )
    codes = codes.reshape(64, 64).astype("u1")
    if codec == "mxfp4":
        codes = codes[:, ::2] | codes[:, 1::2] << 4
    scales = dice.integers(121, 134, (64, 2)).astype("u1")
    return [(specs[0], codes), (specs[1], scales)], largest[..., 0]


@pytest.mark.parametrize(("codec", "args"), CALLS)
def test_what_returns_is_what_the_codec_says(codec: str, args: dict[str, Any]) -> None:
    made = get(codec)
    own, numbers = made.Args(**args), spec("bfloat16", (64, 64))
    said = made.returns(own, numbers)
    words = re.search(r"whose largest code is ([\d.e+]+)(?: (or|to) ([\d.e+]+))?", said)
    assert words
    low, _, high = words.groups()
    parts, largest = stored(codec, args, seed=1)
    decoded = codeckit.decoded(made, own, [a for _, a in parts], [s for s, _ in parts], "bfloat16")
    again = codeckit.encoded(made, own, decoded, numbers)
    returned = again[1] == parts[1][1]
    expected = (largest >= float(low)) & (largest <= float(high or low))
    assert 0 < expected.sum() < expected.size
    assert (returned == expected).all()
    codes = [one.reshape(64, 2, -1) for one in (parts[0][1], again[0])]
    if "sign of zeros" in said:
        codes = [value_neutral(one) for one in codes]
    assert (codes[0][returned] == codes[1][returned]).all()
    # the numbers are the same ones all the same, where no code is lost
    if args.get("rule") != "ceil" and codec == "mxfp4":
        once = codeckit.decoded(made, own, again, [s for s, _ in parts], "bfloat16")
        assert (numbers_of(once) == numbers_of(decoded)).all()


def value_neutral(codes: Any) -> Any:
    """e2m1 codes in which every zero is +0."""
    low, high = codes & 15, codes >> 4
    low, high = (np.where(half == 8, 0, half) for half in (low, high))
    return low | high << 4


@pytest.mark.parametrize(("codec", "args"), CALLS)
def test_the_error_is_within_what_the_codec_says(codec: str, args: dict[str, Any]) -> None:
    made = get(codec)
    own, numbers = made.Args(**args), spec("float32", (256, 64))
    words = re.search(
        r"\|x\| \* ([\d.e-]+), scale \* ([\d.e-]+)\), scale being at most amax of the block / "
        r"([\d.]+)",
        made.bound(own),
    )
    assert words
    part, least, divisor = map(float, words.groups())
    dice = np.random.default_rng(3)
    given = (dice.standard_normal((256, 64)) * 2.0 ** dice.integers(-9, 9, (256, 1))).astype("<f4")
    parts = reference_parts(made.encoding(own, numbers), given.view("<u4"))
    specs = made.encoded(own, numbers)
    found = codeckit.decoded(made, own, [parts["weight"], parts["scale"]], specs, "float32").view(
        "<f4"
    )
    scale = np.repeat(2.0 ** (parts["scale"].astype("f8") - 127), 32, 1)
    amax = np.repeat(np.abs(given).reshape(256, 2, 32).max(-1), 32, 1)
    error = np.abs(found.astype("f8") - given)
    bound = np.maximum(np.abs(given) * part * 1.001, scale * least)
    assert (error <= bound).all()
    assert (scale <= amax / divisor * 1.001).all()
    # and not much smaller
    assert (error > 0.9 * bound).any()


def test_a_number_out_of_range_is_found_among_blocks_of_zeros_and_nan() -> None:
    """Only rows with such a scale are looked at: in large tensors, and in boxes of them."""
    dice = np.random.default_rng(2)
    codes = dice.integers(0x30, 0x40, (2, 300, 4096)).astype("u1")
    scales = np.full((2, 300, 128), 127, "u1")
    # blocks of zeros as libraries store them, and one that is NaN
    codes[:, 7, :64], scales[:, 7, :2], scales[1, 8, 5] = 0, 0, 255
    codec = get("mxfp8")
    own, specs = codec.Args(), [spec(E4M3, codes.shape), spec("uint8", scales.shape)]
    box = ((1, 2), (3, 300), (32, 4096))
    cut = [codes[1:2, 3:300, 32:4096], scales[1:2, 3:300, 1:128]]
    assert codec.decode_needs(own, specs, box) == [box, ((1, 2), (3, 300), (1, 128))]
    out = np.empty((1, 297, 4064), "<u2")
    codec.decode(own, cut, specs, "bfloat16", box, out)
    assert np.isnan(numbers_of(out)).sum() == 32
    for row, column, code, scale in ((7, 60, 1, 0), (299, 4095, 0x7E, 254)):
        codes[1, row, column], scales[1, row, column // 32] = code, scale
        with pytest.raises(OpError, match=rf"the number at \[1, {row}, {column}\] is") as caught:
            codec.decode(own, cut, specs, "bfloat16", box, out)
        assert caught.value.code == "M406"
        codes[1, row, column] = 0


@pytest.mark.parametrize("shape", [(130, 200), (256, 128), (5, 96)])
@pytest.mark.parametrize(
    ("name", "said"), [("mxfp8", {"codes": E4M3, "form": "te"}), ("nvfp4", {"form": "te"})]
)
def test_tiles_of_transformer_engine_have_the_shape_of_its_padded_scales(
    name: str, said: dict[str, Any], shape: tuple[int, int]
) -> None:
    """Byte (i // 128 * columns / 4 + j // 4) * 512 + i % 32 * 16 + i % 128 // 32 * 4 + j % 4."""
    rows, columns = shape if name == "mxfp8" else (shape[0], shape[1] // 16 * 16)
    codec, of = get(name), spec("bfloat16", (rows, columns))
    plain, swizzled = codec.Args(**said), codec.Args(**said, swizzled=True)
    array = codeckit.numbers(of)
    specs, parts = codec.encoded(plain, of), codeckit.encoded(codec, plain, array, of)
    assert codec.encoded(swizzled, of) == specs
    weight, scale, *whole = parts
    assert scale is not None
    high, wide = scale.shape
    tiles = np.zeros(scale.size, "u1")
    for i, j in np.ndindex(high, wide):
        at = (i // 128 * (wide // 4) + j // 4) * 512 + i % 32 * 16 + i % 128 // 32 * 4 + j % 4
        tiles[at] = scale[i, j]
    tiled = [weight, tiles.reshape(scale.shape), *whole]
    made = codeckit.encoded(codec, swizzled, array, of)
    there = [part is not None for part in tiled]
    assert [part is not None for part in made] == there
    assert all((a == b).all() for a, b, is_made in zip(made, tiled, there, strict=True) if is_made)
    for dtype in ("float32", "bfloat16"):
        wanted = codeckit.decoded(codec, plain, parts, specs, dtype)
        assert (codeckit.decoded(codec, swizzled, tiled, specs, dtype) == wanted).all()
        codeckit.check_decoding(codec, swizzled, tiled, specs, dtype)


def by_formula(scales: np.ndarray) -> np.ndarray:
    """Where cuBLAS says that the scale of row i, column j of a tile of 128 x 4 lies: at byte
    i % 32 * 16 + i // 32 * 4 + j; tiles follow each other row by row, filled up with zeros.
    """
    rows, columns = (-(-n // unit) for n, unit in zip(scales.shape, (128, 4), strict=True))
    out = np.zeros((rows, columns, 512), "u1")
    for i, j in np.ndindex(*scales.shape):
        out[i // 128, j // 4, i % 32 * 16 + i % 128 // 32 * 4 + j % 4] = scales[i, j]
    return out.reshape(32 * rows, 16 * columns)


def by_torchao(scales: np.ndarray) -> np.ndarray:
    import torch
    from torchao.prototype.mx_formats.utils import to_blocked

    made = to_blocked(torch.from_numpy(scales.copy())).numpy()
    return made.reshape(-(-scales.shape[0] // 128) * 32, -1)


@pytest.mark.parametrize(
    "swizzle", [by_formula, pytest.param(by_torchao, marks=pytest.mark.libraries)]
)
@pytest.mark.parametrize("kind", ["ao_mxfp4_rceil", "ao_mxfp4_floor"])
@pytest.mark.filterwarnings("ignore")
def test_scales_of_mxfp4_may_lie_in_tiles(kind: str, swizzle: Any, tmp_path: Path) -> None:
    codec, _, encoding = KINDS[kind]
    flat = {
        case: parts
        for case, parts in parts_of(kind).items()
        if len(parts["scale"][0].shape) == 2 and (kind, case) not in BEYOND
    }
    random = np.random.default_rng(4)
    # rows and columns of more than one tile, not full; the codes are any
    many = random.integers(0, 256, (300, 144), "u1"), random.integers(120, 134, (300, 9), "u1")
    flat["many"] = {
        "weight": (Spec("uint8", (300, 144)), many[0]),
        "scale": (Spec("float8_e8m0fnu", (300, 9)), many[1]),
    }
    tiled = {}
    for case, parts in flat.items():
        made = swizzle(np.asarray(parts["scale"][1]).view("u1"))
        tiled[case] = {**parts, "scale": (Spec(parts["scale"][0].dtype, made.shape), made)}
    call = {"codec": codec, "dtype": "bfloat16"}
    wanted = goldens_by_rules.decoded(tmp_path / "flat", flat, call)
    found = goldens_by_rules.decoded(tmp_path / "tiled", tiled, {**call, "swizzled": True})
    assert len({of.shape for of, _ in wanted.values()}) > 2
    for case in flat:
        assert found[case][1].tobytes() == wanted[case][1].tobytes(), case
    inputs = {
        case: held["input"]
        for case, held in goldens()[kind].items()
        if case in flat and held["input"][0].dtype == "bfloat16"
    }
    assert len(inputs) > 1
    call = {
        "codec": codec, "from": "bfloat16", "swizzled": True,
        **{role: of.dtype for role, (of, _) in flat[next(iter(inputs))].items()},
        "non_finite": "keep", **encoding,
    }  # fmt: skip
    parts = goldens_by_rules.encoded(tmp_path / "made", inputs, ("weight", "scale"), call)
    for case in inputs:
        assert (kind, case) not in ENCODING_FAULTS
        for role, (of, raw) in tiled[case].items():
            assert parts[case][role][0] == of, case
            assert parts[case][role][1].tobytes() == raw.tobytes(), (case, role)
