"""cast, affine, neg_exp and lora_merge: the kit, every pattern of 8 and 16 bits, and what is
refused.
"""

from __future__ import annotations

import subprocess
import sys
from decimal import Decimal, localcontext
from fractions import Fraction

import numpy as np
import pytest
import torch

from migrate import ops
from migrate.core.errors import page
from migrate.core.spec import BITS, spec
from migrate.elements import numbers
from migrate.elements.codes import FLOATS, INTEGERS, encode
from migrate.elements.raw import carrier, typed
from migrate.ops import _elementwise
from migrate.ops.base import Loss, OneWay, OpCall, OpError
from migrate.testing import valuekit

NARROW = [d for d in FLOATS if BITS[d] <= 16]
TORCH = [d for d in FLOATS if BITS[d] >= 8]
CAST, AFFINE, NEG_EXP, LORA = (ops.get(n) for n in ("cast", "affine", "neg_exp", "lora_merge"))


def every(dtype):
    """All patterns of a dtype of at most 16 bits."""
    return np.arange(1 << BITS[dtype]).astype(carrier(dtype))


def bits(dtype, *values):
    """Raw elements of float values, by torch."""
    return (
        torch.tensor(values, dtype=torch.float64)
        .to(getattr(torch, dtype))
        .view(getattr(torch, f"uint{BITS[dtype]}"))
        .numpy()
    )


def run(op, args, arrays, dtypes, box=None, meter=None):
    specs = [spec(d, a.shape) for d, a in zip(dtypes, arrays, strict=True)]
    made = op.infer(args, specs)[0]
    return valuekit.compute(
        op, args, arrays, specs, 0, box or tuple((0, n) for n in made.shape), meter
    )


def cast(raw, source, to, exact=False, **more):
    return run(CAST, CAST.Args(to=to, exact=exact), [raw], [source], **more)


def refused(call, code="M406"):
    with pytest.raises(OpError) as caught:
        call()
    page(code)
    assert caught.value.code == code
    return caught.value


@pytest.mark.parametrize("name", ["cast", "affine", "neg_exp", "lora_merge", "reciprocal"])
def test_an_op_that_computes_satisfies_the_kit(name):
    assert valuekit.check(name) >= 8


@pytest.mark.parametrize("dtype", NARROW)
def test_each_finite_code_stands_for_the_number_that_encodes_to_it(dtype):
    found = numbers.numbers(every(dtype), dtype)
    # a step of 7 visits every exponent, sign and last place of the 16-bit dtypes
    for code in range(0, 1 << BITS[dtype], 1 if BITS[dtype] <= 8 else 7):
        if np.isfinite(found[code]):
            assert encode(dtype, float(found[code]))[0] & ((1 << BITS[dtype]) - 1) == code & 0xFF, (
                code
            )


@pytest.mark.parametrize("dtype", [d for d in TORCH if BITS[d] <= 16])
def test_every_pattern_widens_to_the_number_that_torch_reads(dtype):
    ours, theirs = numbers.numbers(every(dtype), dtype), typed(every(dtype), dtype).float().numpy()
    number = ~np.isnan(theirs)
    assert (np.isnan(ours) == ~number).all()
    assert (ours.view("u4")[number] == theirs.view("u4")[number]).all()


@pytest.mark.parametrize("to", TORCH)
@pytest.mark.parametrize("source", ["float16", "bfloat16", "float8_e5m2", "float8_e4m3fn"])
def test_every_pattern_is_cast_as_torch_casts_it(source, to):
    raw = every(source)
    x = typed(raw, source).float()
    form = FLOATS[to]
    if to == "float8_e8m0fnu":
        return
    kept = ~torch.isinf(x) if form.special != "ieee" else torch.ones_like(x, dtype=torch.bool)
    clamped = x.clamp(-form.largest, form.largest) if BITS[to] == 8 else x
    clamped = torch.where(torch.isinf(x), x, clamped)[kept]
    theirs = clamped.to(getattr(torch, to)).view(getattr(torch, f"uint{BITS[to]}")).numpy()
    ours = cast(raw[kept.numpy()], source, to)
    number = ~torch.isnan(clamped).numpy()
    assert (ours[number] == theirs[number]).all()
    assert np.isnan(numbers.numbers(ours[~number], to)).all()


def wild(dtype, count=100_000):
    dice = np.random.default_rng(7)
    raw = dice.integers(0, 256, (count, BITS[dtype] // 8), dtype="u1").view(carrier(dtype))[:, 0]
    near = (dice.integers(-(2**15), 2**15, count) * 2.0 ** dice.integers(-155, 20, count)).astype(
        f"f{BITS[dtype] // 8}"
    )
    ends = np.array(
        [
            0.0,
            -0.0,
            np.inf,
            -np.inf,
            65504,
            65520,
            65519.99,
            448,
            464,
            464.01,
            3.4e38,
            2**-149,
            2**-150,
            2**-24,
            2**-25,
        ]
    )
    return np.concatenate(
        [raw, near.view(carrier(dtype)), ends.astype(near.dtype).view(carrier(dtype))]
    )


@pytest.mark.parametrize("to", [d for d in TORCH if d != "float8_e8m0fnu"])
def test_float32_is_narrowed_as_torch_narrows_it(to):
    raw = wild("float32")
    x = torch.from_numpy(raw.view("f4"))
    form = FLOATS[to]
    if form.special != "ieee":
        x = x[~torch.isinf(x)]
    theirs = (
        torch.where(torch.isinf(x), x, x.clamp(-form.largest, form.largest)) if BITS[to] == 8 else x
    )
    theirs = theirs.to(getattr(torch, to)).view(getattr(torch, f"uint{BITS[to]}")).numpy()
    ours, number = cast(x.numpy().view("u4"), "float32", to), ~torch.isnan(x).numpy()
    assert (ours[number] == theirs[number]).all()
    assert np.isnan(numbers.numbers(ours[~number], to)).all()


@pytest.mark.parametrize("share", [1, 1 + 2**-11, 1 - 2**-12, 1 / 3, 2**-20, 2**10])
def test_float16_is_made_as_numpy_makes_it(share):
    halves = np.arange(1 << 16, dtype="<u2").view("<f2")
    x = halves[np.isfinite(halves)].astype("<f4") * np.float32(share)
    x = np.concatenate([x, np.nextafter(x, 0), np.nextafter(x, np.float32(np.inf))])
    # all of them, those that take one way, and memory with gaps
    for some in (x, x[np.abs(x) > 2.0**-13], x[::2].copy()):
        out = np.zeros((some.size, 2 if some.size < x.size else 1), "<u2")[:, -1]
        numbers.narrow_float16(some.copy(), out)
        with np.errstate(all="ignore"):
            np.testing.assert_array_equal(out, some.astype("<f2").view("<u2"))


@pytest.mark.parametrize("to", [d for d in FLOATS if d not in ("float64", "float8_e8m0fnu")])
def test_float64_is_rounded_once(to):
    form = FLOATS[to]
    dice = np.random.default_rng(3)
    # on, just above and just below half way between neighbours of the result: what passes through
    # float32 goes wrong there
    codes = dice.integers(0, form.top, 300)
    quantum = [
        Fraction(2) ** (max(int(c) >> form.mantissa, 1) - form.bias - form.mantissa) for c in codes
    ]
    low = [
        Fraction(int(c) & ((1 << form.mantissa) - 1 | 0)) * q
        for c, q in zip(codes, quantum, strict=True)
    ]
    low = [
        v + (q * (1 << form.mantissa) if c >> form.mantissa else 0)
        for v, q, c in zip(low, quantum, codes, strict=True)
    ]
    for shift, wanted in (
        (Fraction(1, 2**28), codes + 1),
        (Fraction(-(1), 2**28), codes),
        (Fraction(0), codes + codes % 2),
    ):
        exact = [v + q * (Fraction(1, 2) + shift) for v, q in zip(low, quantum, strict=True)]
        x = np.array([float(v) for v in exact])
        assert [Fraction(float(v)) for v in x] == exact
        assert (cast(x.view("u8"), "float64", to) == wanted).all(), shift


def test_a_dtype_holds_another_exactly_where_every_pattern_comes_back():
    for narrow in NARROW:
        for wide in (*FLOATS, "bool", "int8", "uint8", "int16", "int64"):
            raw = every(narrow)
            try:
                back = cast(
                    cast(raw, narrow, wide), wide, narrow, exact=numbers.holds(wide, narrow)
                )
            except OpError:
                assert not numbers.holds(wide, narrow), (wide, narrow)
                continue
            assert (back == raw).all() == numbers.holds(wide, narrow), (wide, narrow)


def test_integers_are_held_by_floats_with_enough_bits():
    for narrow in ("bool", "int8", "uint8", "int16", "uint16"):
        raw = every(narrow)[:2] if narrow == "bool" else every(narrow)
        for wide in (*FLOATS, *INTEGERS):
            try:
                back = cast(cast(raw, narrow, wide), wide, narrow)
            except OpError:
                assert not numbers.holds(wide, narrow), (wide, narrow)
                continue
            assert (back == raw).all() == numbers.holds(wide, narrow), (wide, narrow)
    for wide, narrow, there in (
        ("float64", "int32", True),
        ("float64", "int64", False),
        ("float32", "int32", False),
        ("uint64", "int8", False),
        ("int64", "uint32", True),
        ("complex128", "complex64", True),
        ("complex64", "float32", False),
        ("float32", "bfloat16", True),
    ):
        assert numbers.holds(wide, narrow) is there, (wide, narrow)


def test_all_nan_patterns_of_bfloat16_survive_float32():
    raw = every("bfloat16")
    wide = cast(raw, "bfloat16", "float32")
    assert (wide == raw.astype("u4") << 16).all()
    for exact in (False, True):
        assert (cast(wide, "float32", "bfloat16", exact) == raw).all()


def test_float32_narrows_element_by_element_whatever_stands_beside_it():
    cases = {
        # zeros and infinities
        0x00000000: 0x0000, 0x80000000: 0x8000, 0x7F800000: 0x7F80, 0xFF800000: 0xFF80,
        # subnormals, half to even
        0x00000001: 0x0000, 0x00008000: 0x0000, 0x00008001: 0x0001, 0x80018000: 0x8002,
        0x3F808000: 0x3F80, 0x3F818000: 0x3F82, 0x3F807FFF: 0x3F80, 0x3F808001: 0x3F81,
        0x7F7F7FFF: 0x7F7F, 0x7F7F8000: 0x7F80, 0xFF7FFFFF: 0xFF80,  # to infinity
        0x7F810000: 0x7F81, 0x7FC00000: 0x7FC0, 0xFFA50000: 0xFFA5,  # NaNs that fit
        0x7F800001: 0x7FC0, 0xFF81FFFF: 0xFFC1, 0x7FFFFFFF: 0x7FFF,  # NaNs that do not stay NaNs
    }  # fmt: skip
    given, wanted = np.array(list(cases), "u4"), np.array(list(cases.values()), "u2")
    assert [hex(v) for v in cast(given, "float32", "bfloat16")] == [hex(v) for v in wanted]
    for one, code in cases.items():
        assert cast(np.array([one], "u4"), "float32", "bfloat16")[0] == code, hex(one)
    number = (given & 0x7FFFFFFF) <= 0x7F800000
    assert (cast(given[number], "float32", "bfloat16") == wanted[number]).all()


def test_a_nan_keeps_its_sign_and_what_fits_of_its_payload():
    nans = np.array([0x7FF0000000000001, 0xFFF8000000000000, 0x7FF4000000000000], "u8")
    assert [hex(v) for v in cast(nans, "float64", "float32")] == [
        "0x7fc00000",
        "0xffc00000",
        "0x7fa00000",
    ]
    assert [hex(v) for v in cast(nans, "float64", "float16")] == ["0x7e00", "0xfe00", "0x7d00"]
    assert [
        hex(v) for v in cast(np.array([0x7F800001, 0xFFA00000], "u4"), "float32", "float64")
    ] == [
        "0x7ff0000020000000",
        "0xfff4000000000000",
    ]


def test_small_floats_saturate_and_wide_ones_overflow():
    raw = bits("float32", 1e5, -1e5, 449.0, 240.0)
    assert cast(raw, "float32", "float8_e4m3fn").tolist() == [0x7E, 0xFE, 0x7E, 0x77]
    assert cast(raw, "float32", "float8_e4m3fnuz").tolist() == [0x7F, 0xFF, 0x7F, 0x7F]
    assert cast(raw, "float32", "float4_e2m1fn").tolist() == [7, 15, 7, 7]
    assert cast(raw, "float32", "float16").tolist() == [0x7C00, 0xFC00, 0x5F04, 0x5B80]
    inf = bits("float32", 1.0, np.inf)
    assert cast(inf, "float32", "float8_e5m2").tolist() == [0x3C, 0x7C]
    assert refused(lambda: cast(inf, "float32", "float8_e4m3fn")).message == (
        "cast: float8_e4m3fn cannot hold inf at [1] of the float32 tensor"
    )
    refused(lambda: cast(bits("float32", np.nan), "float32", "float4_e2m1fn"))
    assert cast(bits("float32", np.nan, -0.0), "float32", "float8_e4m3fnuz").tolist() == [0x80, 0]


def test_e8m0_holds_powers_of_two_and_nothing_else():
    raw = bits("float32", 1.0, 2.0**-127, 2.0**127, np.nan, 2.0**-126)
    assert cast(raw, "float32", "float8_e8m0fnu").tolist() == [127, 0, 254, 255, 1]
    for value in (0.0, -1.0, 3.0, np.inf, 2.0**-128):
        refused(lambda value=value: cast(bits("float32", value), "float32", "float8_e8m0fnu"))


@pytest.mark.parametrize(
    ("value", "to", "exact"),
    [
        (0.5, "int32", False), (np.nan, "int8", False), (np.inf, "int64", False),
        (128.0, "int8", False), (-1.0, "uint8", False),
        (2.0**63, "int64", False), (-0.0, "int8", True), (2.0, "bool", False),
        (2.0**64, "uint64", False),
    ],
)  # fmt: skip
def test_what_an_integer_cannot_hold_is_refused(value, to, exact):
    assert (
        str(value)
        in refused(lambda: cast(bits("float64", 1.0, value), "float64", to, exact)).message
    )


def test_whole_numbers_in_range_become_integers():
    assert cast(bits("float64", -128.0, 127.0, -0.0), "float64", "int8").view("i1").tolist() == [
        -128,
        127,
        0,
    ]
    assert cast(bits("float64", -(2.0**63), 2.0**62), "float64", "int64").view("i8").tolist() == [
        -(2**63),
        2**62,
    ]
    assert cast(bits("float32", 2.0**63), "float32", "uint64").tolist() == [2**63]
    assert cast(bits("bfloat16", 0, 1), "bfloat16", "bool").tolist() == [0, 1]


def test_integers_out_of_range_are_refused_and_never_wrap():
    whole = np.array([[1, 2], [3, 2**31]], "i8").view("u8")
    assert (
        refused(lambda: cast(whole, "int64", "int32")).message
        == "cast: int32 cannot hold 2147483648 at [1, 1] of the int64 tensor"
    )
    assert refused(
        lambda: cast(np.array([-1], "i2").view("u2"), "int16", "uint64")
    ).message.startswith("cast: uint64 cannot hold -1 at [0]")
    assert "byte 2" in refused(lambda: cast(np.array([0, 2], "u1"), "bool", "uint8")).message
    assert cast(whole[:1], "int64", "int8").tolist() == [[1, 2]]


@pytest.mark.parametrize("to", ["bfloat16", "float16", "float32", "float64", "float8_e5m2"])
@pytest.mark.parametrize("source", ["int64", "uint64", "int32"])
def test_integers_round_once_to_the_nearest_float(source, to):
    dice = np.random.default_rng(5)
    low, high = INTEGERS[source]
    values = [low, high, 0, 1, (1 << 24) + 1, 257, 259] + [
        (1 << k) + (1 << (k - 8)) + 1 for k in range(12, 30)
    ]
    values += [
        int(v) >> int(s)
        for v, s in zip(
            dice.integers(low, high, 300, dtype=source, endpoint=True),
            dice.integers(0, 60, 300),
            strict=True,
        )
    ]
    if source != "int32":
        values += [(1 << 62) + (1 << 54) + 1, (1 << 62) + (1 << 54), (1 << 62) + 3 * (1 << 54) - 1]
    raw = np.array(values, source).view(f"u{BITS[source] // 8}")
    made = numbers.numbers(cast(raw, source, to), to).astype("f8")
    form = FLOATS[to]
    for value, got in zip(values, made, strict=True):
        place = max(abs(value).bit_length() - 1, 1 - form.bias) - form.mantissa
        scaled = Fraction(value) / Fraction(2) ** place
        wanted = round(scaled) * Fraction(2) ** place
        if abs(wanted) > Fraction(form.largest):
            assert abs(got) == (form.largest if BITS[to] == 8 else np.inf)
        else:
            assert Fraction(float(got)) == wanted, value


def test_an_exact_cast_names_the_first_number_that_does_not_fit():
    x = np.zeros((8, 9), "f4")
    x[3, 5], x[6, 0] = 1.001, 2.5e-40
    error = refused(lambda: cast(x.view("u4"), "float32", "bfloat16", True))
    assert (
        error.message == "cast: bfloat16 cannot hold exactly 1.0010000467300415 "
        "at [3, 5] of the float32 tensor"
    )
    assert "exact" in error.help
    assert (
        "[6, 0]"
        in refused(
            lambda: cast(x.view("u4"), "float32", "float16", True, box=((4, 8), (0, 9)))
        ).message
    )
    strided = np.asfortranarray(x.view("u4"))
    out = np.empty(x.shape, "u2")
    with pytest.raises(OpError, match=r"at \[3, 5\]"):
        CAST.compute(
            CAST.Args("bfloat16", exact=True),
            [strided],
            [spec("float32", x.shape)],
            0,
            ((0, 8), (0, 9)),
            out,
        )
    there = torch.from_numpy(x.view("u4").copy())
    with pytest.raises(OpError, match=r"1.00100\d+ at \[3, 5\]"):
        CAST.compute(
            CAST.Args("bfloat16", exact=True),
            [there],
            [spec("float32", x.shape)],
            0,
            ((0, 8), (0, 9)),
            torch.empty(8, 9, dtype=torch.uint16),
        )
    refused(lambda: cast(np.array([0x7F800001], "u4"), "float32", "bfloat16", True))
    big = np.array([(1 << 53) + 1, (1 << 63) - 1], "u8")
    for at in (0, 1):
        assert (
            str(int(big[at]))
            in refused(lambda at=at: cast(big[at : at + 1], "int64", "float64", True)).message
        )


@pytest.mark.parametrize(
    "size", [0, 1, _elementwise.CHUNK - 1, _elementwise.CHUNK, 2 * _elementwise.CHUNK + 3]
)
def test_chunks_leave_nothing_out(size):
    x = np.random.default_rng(size).standard_normal(size).astype("f4")
    made = cast(x.view("u4"), "float32", "bfloat16")
    assert (made == torch.from_numpy(x).bfloat16().view(torch.uint16).numpy()).all()
    assert (cast(made, "bfloat16", "float32") == made.astype("u4") << 16).all()


def test_a_cast_says_what_it_loses_and_what_undoes_it():
    def step(**written):
        args = CAST.Args(**written)
        CAST.validate(args)
        return CAST.invert(args)

    assert isinstance(step(to="float32"), OneWay)
    assert "from" in step(to="float32").help
    assert step(to="float32", from_="bfloat16") == OpCall(
        "cast", CAST.Args("bfloat16", "float32", True)
    )
    assert step(to="bfloat16", from_="float32") == OpCall(
        "cast", CAST.Args("float32", "bfloat16", False)
    )
    lossless = {
        ("float32", "bfloat16"),
        ("int8", "int16"),
        ("int64", "int8"),
        ("float64", "float32"),
        ("bfloat16", "float8_e4m3fn"),
    }
    lossy = {
        ("bfloat16", "float32"),
        ("float16", "bfloat16"),
        ("int8", "float32"),
        ("float32", "int32"),
        ("float8_e4m3fn", "bfloat16"),
    }
    for to, source in lossless | lossy:
        found = CAST.loss_on(CAST.Args(to), [spec(source, (2,))])
        assert found is (Loss.LOSSLESS if (to, source) in lossless else Loss.LOSSY), (to, source)
        assert CAST.loss_on(CAST.Args(to, exact=True), [spec(source, (2,))]) is Loss.LOSSLESS
    assert CAST.passes(CAST.Args("float"), [spec("float32", (2,))])
    assert not CAST.passes(CAST.Args("float", "bfloat16"), [spec("float32", (2,))])


def test_a_cast_refuses_wrong_dtypes_by_name():
    error = refused(
        lambda: CAST.infer(CAST.Args("float32", "bfloat16"), [spec("float16", (2, 3))]), "M303"
    )
    assert "float16 [2, 3]" in error.message
    assert "bfloat16" in error.message
    assert "bfloat16" in refused(lambda: CAST.validate(CAST.Args("bfloat61")), "M308").help
    assert (
        "complex64 [2]"
        in refused(
            lambda: CAST.infer(CAST.Args("float32"), [spec("complex64", (2,))]), "M309"
        ).message
    )
    for op in (AFFINE, NEG_EXP):
        assert (
            "int64 [2]"
            in refused(lambda op=op: op.infer(op.Args(), [spec("int64", (2,))]), "M309").message
        )


def test_complex_numbers_are_cast_part_by_part():
    x = np.array([1 + 2j, -0.0 + 1e-3j], "c8")
    wide = cast(x.view("u8"), "complex64", "complex128")
    assert (wide.view("c16") == x.astype("c16")).all()
    assert (cast(wide, "complex128", "complex64", True) == x.view("u8")).all()
    assert "[1]" in refused(lambda: cast(x.view("u8"), "complex64", "complex32", True)).message


def test_the_meter_counts_what_saturates_and_what_vanishes():
    class Meter(valuekit.CountingMeter):
        saturated = underflowed = 0

        def add(self, wanted, got, amax=None, *, saturated=0, underflowed=0, sure=True):
            super().add(wanted, got)
            self.saturated += saturated
            self.underflowed += underflowed
            self.worst = float(abs(wanted - got).max())

    meter = Meter()
    cast(bits("float32", 1e5, -449.0, 1e-9, 0.0, 1.0), "float32", "float8_e4m3fn", meter=meter)
    assert (meter.count, meter.saturated, meter.underflowed, meter.worst) == (5, 2, 1, 1e5 - 448)
    meter = Meter()
    cast(bits("float32", 1.001), "float32", "bfloat16", meter=meter)
    assert 0 < meter.worst < 0.002


def test_casts_of_arrays_import_no_torch():
    code = (
        "import sys, numpy as np; from migrate import ops; from migrate.core.spec import spec; op "
        "= ops.get('cast')\n"
        "for a, b in (('bfloat16', 'float32'), ('float32', 'bfloat16'), ('float32', "
        "'float8_e4m3fn'), ('int64', 'int8')):\n"
        "    from migrate.elements.raw import carrier\n"
        "    out = np.empty(4, carrier(b)); op.compute(op.Args(b), [np.ones(4, carrier(a))], "
        "[spec(a, (4,))], 0, ((0, 4),), out)\n"
        "print('torch' in sys.modules)"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        == "False\n"
    )


def affine(raw, dtype, **written):
    return run(AFFINE, AFFINE.Args(**written), [raw], [dtype])


def test_affine_computes_in_float32_and_rounds_once():
    x = np.random.default_rng(1).standard_normal(1000).astype("f4")
    b = torch.from_numpy(x).bfloat16()
    wanted = (b.float() * 0.1 + -0.5).bfloat16()
    assert (
        affine(b.view(torch.uint16).numpy(), "bfloat16", mul=0.1, add=-0.5)
        == wanted.view(torch.uint16).numpy()
    ).all()
    assert (affine(x.view("u4"), "float32", mul=3) == (x * np.float32(3)).view("u4")).all()
    d = x.astype("f8")
    assert (affine(d.view("u8"), "float64", mul=0.1, add=1) == (d * 0.1 + 1).view("u8")).all()
    norm = bits("bfloat16", -0.99, 0.0078125)
    assert (
        affine(norm, "bfloat16", add=1).tolist() == bits("bfloat16", 0.01171875, 1.0078125).tolist()
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_turned_sign_is_one_bit_of_every_pattern(dtype):
    assert (affine(every(dtype), dtype, mul=-1) == every(dtype) ^ 0x8000).all()
    assert AFFINE.loss(AFFINE.Args(mul=-1)) is Loss.LOSSLESS
    assert AFFINE.invert(AFFINE.Args(mul=-1)) == OpCall("affine", AFFINE.Args(mul=-1.0))


def test_a_power_of_two_comes_back_or_is_refused():
    raw = every("bfloat16")
    x = numbers.numbers(raw, "bfloat16")
    fits = (x == 0) | ~np.isfinite(x) | (abs(x) >= 2.0**-125)
    half = affine(raw[fits], "bfloat16", mul=-0.5, exact=True)
    assert (affine(half, "bfloat16", mul=-2, exact=True) == raw[fits]).all()
    assert AFFINE.invert(AFFINE.Args(mul=-0.5, exact=True)) == OpCall(
        "affine", AFFINE.Args(mul=-2.0, exact=True)
    )
    assert (
        "[1]"
        in refused(lambda: affine(np.array([0, 1], "u2"), "bfloat16", mul=0.5, exact=True)).message
    )
    refused(lambda: affine(bits("float16", 65504.0), "float16", mul=2, exact=True))
    assert affine(bits("float16", 65504.0), "float16", mul=2).tolist() == [0x7C00]


def test_nans_pass_through_affine_and_new_ones_are_the_same_everywhere():
    raw = np.array([0x7F800001, 0xFFC12345, 0x7F800000], "u4")
    assert [hex(v) for v in affine(raw, "float32", mul=-3, add=1)] == [
        "0xff800001",
        "0x7fc12345",
        "0xff800000",
    ]
    assert [hex(v) for v in affine(raw, "float32", mul=0)] == [
        "0x7f800001",
        "0xffc12345",
        "0x7fc00000",
    ]


def test_affine_refuses_what_cannot_be_meant():
    for written in (
        {"mul": np.inf},
        {"add": np.nan},
        {"mul": 3, "exact": True},
        {"mul": 2, "add": 1, "exact": True},
    ):
        refused(lambda written=written: AFFINE.validate(AFFINE.Args(**written)), "M308")
    assert (
        "1e+39"
        in refused(
            lambda: AFFINE.infer(AFFINE.Args(mul=1e39), [spec("bfloat16", (2,))]), "M303"
        ).message
    )
    assert AFFINE.infer(AFFINE.Args(mul=1e39), [spec("float64", (2,))])
    assert AFFINE.passes(AFFINE.Args(), [spec("float32", (2,))])
    found = AFFINE.invert(AFFINE.Args(add=1))
    assert isinstance(found, OneWay)
    assert AFFINE.loss(AFFINE.Args(add=1)) is Loss.LOSSY


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_neg_exp_is_the_correctly_rounded_exponential(dtype):
    x = np.random.default_rng(2).uniform(-12, 9, 200)
    raw = cast(x.view("u8"), "float64", dtype)
    with localcontext() as context:
        context.prec = 60
        wanted = [-Decimal(float(v)).exp() for v in numbers.numbers(raw, dtype)]
    form = FLOATS[dtype]
    got = numbers.numbers(run(NEG_EXP, NEG_EXP.Args(), [raw], [dtype]), dtype)
    for value, found in zip(wanted, got, strict=True):
        exact = Fraction(value)
        exponent = max(int(np.frexp(float(exact))[1]) - 1, 1 - form.bias) - form.mantissa
        assert (
            Fraction(float(found))
            == round(exact / Fraction(2) ** exponent) * Fraction(2) ** exponent
        )


def test_neg_exp_at_the_ends():
    raw = bits("float32", 0.0, -0.0, np.inf, -np.inf, 100.0, -200.0, np.nan)
    assert [hex(v) for v in run(NEG_EXP, NEG_EXP.Args(), [raw], ["float32"])] == [
        "0xbf800000",
        "0xbf800000",
        "0xff800000",
        "0x80000000",
        "0xff800000",
        "0x80000000",
        "0x7fc00000",
    ]
    assert isinstance(NEG_EXP.invert(NEG_EXP.Args()), OneWay)
    assert not NEG_EXP.same_bits


def test_lora_merge_is_the_correctly_rounded_sum():
    dice = np.random.default_rng(4)
    base, a, b = (
        torch.from_numpy(dice.standard_normal(s)).bfloat16() for s in ((5, 7), (3, 7), (5, 3))
    )
    got = run(
        LORA,
        LORA.Args(8, 3),
        [t.view(torch.uint16).numpy() for t in (base, a, b)],
        ["bfloat16"] * 3,
    )
    made = numbers.numbers(got.reshape(-1), "bfloat16").reshape(5, 7)
    for i, j in np.ndindex(5, 7):
        total = sum(Fraction(float(b[i, k])) * Fraction(float(a[k, j])) for k in range(3))
        exact = Fraction(float(base[i, j])) + total * Fraction(8, 3)
        place = Fraction(2) ** (int(np.frexp(float(exact))[1]) - 8)
        assert Fraction(float(made[i, j])) == round(exact / place) * place


def test_an_adapter_may_have_another_dtype_than_its_base():
    base, a, b = (
        np.zeros((2, 2), "u2"),
        bits("float32", 1, 2).reshape(1, 2),
        bits("float64", 3, 4).reshape(2, 1),
    )
    got = run(LORA, LORA.Args(2, 1), [base, a, b], ["bfloat16", "float32", "float64"])
    assert numbers.numbers(got.reshape(-1), "bfloat16").tolist() == [6, 12, 8, 16]


def test_lora_merge_names_what_is_missing_and_what_does_not_fit():
    args = LORA.Args(16, 4)
    base, a, b = spec("bfloat16", (6, 5)), spec("bfloat16", (4, 5)), spec("bfloat16", (6, 4))
    assert LORA.passes(args, [base])
    assert LORA.loss_on(args, [base]) is Loss.LOSSLESS
    assert "role b is missing" in refused(lambda: LORA.infer(args, [base, a]), "M207").message
    assert "role a is missing" in refused(lambda: LORA.infer(args, [base, b]), "M207").message
    for specs, code, words in (
        ([base, a, a], "M301", "b is [4, 5]"),
        ([base, spec("bfloat16", (4, 6)), b], "M301", "a is [4, 6]"),
        ([base, spec("bfloat16", (3, 5)), spec("bfloat16", (6, 3))], "M301", "`rank` says 4"),
        ([spec("bfloat16", (6, 5, 1)), a, b], "M304", "base is [6, 5, 1]"),
        ([base, a, spec("int8", (6, 4))], "M309", "int8 [6, 4]"),
    ):
        assert words in refused(lambda specs=specs: LORA.infer(args, specs), code).message
    for written in ({"alpha": 1, "rank": 0}, {"alpha": np.nan, "rank": 1}):
        refused(lambda written=written: LORA.validate(LORA.Args(**written)), "M308")
    assert LORA.needs(
        args, [spec("bfloat16", (200, 5)), a, spec("bfloat16", (200, 4))], 0, ((70, 130), (1, 3))
    ) == [
        ((70, 130), (1, 3)),
        ((0, 4), (0, 5)),
        ((64, 192), (0, 4)),
    ]


@pytest.mark.parametrize(
    "shape",
    [(3, _elementwise.CHUNK // 2 + 5), (4, 2, _elementwise.CHUNK + 1), (2 * _elementwise.CHUNK, 3)],
)
def test_chunks_of_strided_memory_keep_their_places(shape):
    x = np.asfortranarray(np.random.default_rng(0).standard_normal(shape).astype("f4"))
    box, given, out = tuple((0, n) for n in shape), [spec("float32", shape)], np.empty(shape, "u2")
    CAST.compute(CAST.Args("bfloat16"), [x.view("u4")], given, 0, box, out)
    assert (out == torch.from_numpy(x.copy()).bfloat16().view(torch.uint16).numpy()).all()
    whole = np.asfortranarray(np.zeros(shape, "f4"))
    last = tuple(n - 2 for n in shape)
    whole[last] = 0.1
    with pytest.raises(OpError) as caught:
        CAST.compute(CAST.Args("bfloat16", exact=True), [whole.view("u4")], given, 0, box, out)
    assert f"at {list(last)} of" in caught.value.message
