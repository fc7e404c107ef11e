"""Layouts whose parts do not fit, boxes, and forms that no golden vector has."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from migrate import codecs
from migrate.codecs.kit import tables
from migrate.codecs.kit.decoding import decode
from migrate.codecs.kit.exactness import is_exact
from migrate.codecs.kit.geometry import decoded, geometry
from migrate.codecs.kit.layout import (
    BitPiece,
    Field,
    Grid,
    NumberLayout,
    Packing,
    Record,
    Term,
    floats,
    integers,
    plain,
    signed,
    table,
    table_of,
    times,
)
from migrate.codecs.kit.reference import reference
from migrate.core.errors import OpError
from migrate.core.spec import Spec

E4M3 = "float8_e4m3fn"
FP8 = NumberLayout("fp8", floats(E4M3), plain(E4M3), times(Grid("scale", (128, 128))))
# 4 bits along K in 32-bit words, stored [K / 8, N], with groups of 64
TRANSPOSED = NumberLayout(
    "words",
    integers(4, 8),
    Packing(4, ("int32",), transposed=True),
    times(Grid("scale", (1, 64), transposed=True)),
)


def fails(layout: NumberLayout, specs: dict[str, Spec]) -> OpError:
    with pytest.raises(OpError) as caught:
        geometry(layout, specs)
    return caught.value


def test_the_kit_is_no_codec() -> None:
    assert "kit" not in codecs.names()


def test_planning_needs_neither_numpy_nor_torch() -> None:
    said = (
        "import sys; from migrate.codecs.kit.geometry import geometry; "
        "from migrate.codecs.kit.layout import *; from migrate.core.spec import Spec; "
        "l = NumberLayout('f', floats('float8_e4m3fn'), plain('uint8'), times(Grid('s'))); "
        "g = geometry(l, "
        "{'weight': Spec('uint8', (2, 3)), 's': Spec('float32', (2, 3))}); "
        "g.needs(((0, 1), (0, 2))); assert not {'numpy', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", said], check=True)


def test_the_numpy_way_needs_no_torch() -> None:
    said = (
        "import sys; import numpy as np; from migrate.codecs.kit.decoding import decode; "
        "from migrate.codecs.kit.reference import reference; "
        "from migrate.codecs.kit.layout import *; from migrate.core.spec import Spec; "
        "l = NumberLayout('f', floats('float8_e4m3fn'), plain('uint8'), times(Grid('s', (0, 0)))); "
        "s = {'weight': Spec('uint8', (2, 3)), 's': Spec('float32', ())}; "
        "a = {'weight': np.full((2, 3), 0x39, 'u1'), 's': np.array(0x40000000, '<u4')}; "
        "o = np.zeros((2, 3), '<u2'); decode(l, s, a, 'bfloat16', ((0, 2), (0, 3)), o); "
        "assert (o == 0x4010).all() and (reference(l, s, a, 'bfloat16') == o).all(); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", said], check=True)


def test_a_scale_of_another_shape_is_refused_with_what_would_fit() -> None:
    error = fails(FP8, {"weight": Spec(E4M3, (576, 256)), "scale": Spec("float32", (9, 4))})
    assert error.code == "M310"
    assert "the scale is [9, 4]" in str(error)
    assert "[5, 2]" in str(error)
    assert "`block: [64, 64]` would fit" in (error.help or "")
    error = fails(FP8, {"weight": Spec(E4M3, (576, 256)), "scale": Spec("float32", (0, 4))})
    assert "no block fits: the scale belongs to another weight" in (error.help or "")


def test_a_dtype_that_a_part_cannot_have_is_refused() -> None:
    error = fails(FP8, {"weight": Spec("int8", (4, 4)), "scale": Spec("float32", (1, 1))})
    assert error.code == "M303"
    assert "the weight is int8" in str(error)
    error = fails(FP8, {"weight": Spec(E4M3, (4, 4)), "scale": Spec("int64", (1, 1))})
    assert error.code == "M303"
    assert "the scale is int64" in str(error)


def test_numbers_of_a_dtype_that_is_not_made_are_refused() -> None:
    specs = {"weight": Spec(E4M3, (4, 4)), "scale": Spec("float32", (1, 1))}
    with pytest.raises(OpError) as caught:
        decoded(FP8, specs, "float64")
    assert caught.value.code == "M303"


def test_a_part_that_lacks_is_named() -> None:
    error = fails(FP8, {"weight": Spec(E4M3, (4, 4))})
    assert error.code == "M408"
    assert "its scale" in str(error)


def test_words_of_another_shape_than_is_said_are_refused() -> None:
    layout = NumberLayout(
        "int-pack", integers(4, 8), Packing(4, ("int32",)), times(Grid("scale", (1, 32))),
        shape=(4, 100),
    )  # fmt: skip
    specs = {"weight": Spec("int32", (4, 12)), "scale": Spec("float32", (4, 4))}
    error = fails(layout, specs)
    assert error.code == "M310"
    assert "[4, 12]" in str(error)
    assert "[4, 13]" in str(error)


def test_codes_of_too_few_axes_are_refused() -> None:
    specs = {"weight": Spec("int32", (12,)), "scale": Spec("float32", (1,))}
    assert fails(TRANSPOSED, specs).code == "M304"


def test_a_table_and_an_index_have_as_many_entries_as_they_need() -> None:
    layout = NumberLayout("nf4", table_of("map", 4), Packing(4), times(Grid("scale", (1, 2))))
    specs = {
        "weight": Spec("uint8", (2, 2)), "scale": Spec("float32", (2, 2)),
        "map": Spec("float32", (15,)),
    }  # fmt: skip
    assert "look up 16" in str(fails(layout, specs))
    layout = NumberLayout("i", integers(4), Packing(4), times(Grid("scale", index="group")))
    specs = {
        "weight": Spec("uint8", (2, 2)), "scale": Spec("float32", (2, 3)),
        "group": Spec("int32", (3,)),
    }  # fmt: skip
    assert "one for each of 4" in str(fails(layout, specs))


def test_a_record_that_is_cut_is_refused() -> None:
    layout = NumberLayout(
        "q8",
        signed(8),
        Field((BitPiece(tuple(range(2, 34)), (0,) * 32, 8),)),
        times(Grid("weight", field=Field(dtype="float16"))),
        record=Record(32, 34),
    )
    assert fails(layout, {"weight": Spec("uint8", (4, 70))}).code == "M310"


def test_columns_of_transposed_codes_are_read_alone() -> None:
    specs = {"weight": Spec("int32", (64, 96)), "scale": Spec("float16", (8, 96))}
    geo = geometry(TRANSPOSED, specs)
    assert geo.shape == (96, 512)
    # numbers of rows 10 to 20 and columns 100 to 140: words 12 to 18 of those rows' columns
    assert geo.needs(((10, 20), (100, 140))) == {
        "weight": ((12, 18), (10, 20)), "scale": ((1, 3), (10, 20))
    }  # fmt: skip
    assert geo.grain() == (1, 64)


def test_a_vector_in_groups_is_a_row_of_them() -> None:
    layout = NumberLayout("fp4", floats("float4_e2m1fn"), Packing(4), times(Grid("scale", (1, 16))))
    codes = np.arange(24, dtype="u1") * 3
    scales = np.array([1, 2, 3], "<f4").view("<u4")
    for shape in ((3,), (1, 3)):
        arrays = {"weight": codes, "scale": scales.reshape(shape)}
        made = both(layout, arrays, {"weight": "uint8", "scale": "float32"}, "float32")
        assert made.shape == (48,)
        assert (made[16:32] % 1 == 0).all()
        specs = {"weight": Spec("uint8", (24,)), "scale": Spec("float32", shape)}
        needs = geometry(layout, specs).needs(((17, 40),))
        assert needs == {
            "weight": ((8, 20),),
            "scale": ((1, 3),) if shape == (3,) else ((0, 1), (1, 3)),
        }
        out = np.empty(23, "<u4")
        given = {r: a[tuple(slice(*s) for s in needs[r])] for r, a in arrays.items()}
        decode(layout, specs, given, "float32", ((17, 40),), out)
        assert (out.view("<f4") == made[17:40]).all()


def test_a_scalar_and_a_vector_have_a_scale_too() -> None:
    layout = NumberLayout(
        "fp8", floats(E4M3), plain(E4M3), times(Grid("scale", (0, 0), leading=False))
    )
    for shape in ((), (5,), (2, 3), (2, 2, 3), (2, 1, 2, 3)):
        for stored in ((), (1,)):
            specs = {"weight": Spec(E4M3, shape), "scale": Spec("float32", stored)}
            arrays = {
                "weight": np.full(shape, 0x40, "u1"),
                "scale": np.full(stored, 0x3F800000, "<u4"),
            }
            got = np.empty(shape, "<u4")
            decode(layout, specs, arrays, "float32", tuple((0, n) for n in shape), got)
            assert (got == 0x40000000).all()
            assert (reference(layout, specs, arrays, "float32") == got).all()


def both(layout: NumberLayout, arrays: dict[str, Any], dtypes: dict[str, str], dtype: str) -> Any:
    """The numbers by decoding, equal to the reference's, as float32."""
    specs = {role: Spec(dtypes[role], a.shape) for role, a in arrays.items()}
    shape = geometry(layout, specs).shape
    got = np.empty(shape, "<u4" if dtype == "float32" else "<u2")
    decode(layout, specs, arrays, dtype, tuple((0, n) for n in shape), got)
    assert (reference(layout, specs, arrays, dtype) == got).all()
    return got.view("<f4") if dtype == "float32" else got


def test_the_byte_255_of_e8m0_is_one_quiet_nan_and_0_is_a_number() -> None:
    layout = NumberLayout(
        "mxfp4", floats("float4_e2m1fn"), Packing(4),
        times(Grid("scale", (1, 32), dtypes=("uint8", "float8_e8m0fnu"))),
    )  # fmt: skip
    arrays = {
        "weight": np.full((1, 32), 0xA2, "u1"), "scale": np.array([[0, 255]], "u1")
    }  # fmt: skip
    dtypes = {"weight": "uint8", "scale": "uint8"}
    made = both(layout, arrays, dtypes, "float32").reshape(2, 32)
    assert made[0, 0] == 2.0**-127
    assert made[0, 1] == -(2.0**-127)
    assert (made[1].view("<u4") == 0x7FC00000).all()
    assert (both(layout, arrays, dtypes, "bfloat16").reshape(2, 32)[1] == 0x7FC0).all()


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 5, 6, 7])
def test_codes_lie_in_words_as_said(bits: int, dense: bool) -> None:
    columns = 50
    codes = np.random.default_rng(bits).integers(0, 1 << bits, (3, columns))
    words = -(-columns * bits // 32) if dense else -(-columns // (32 // bits))
    stored = np.zeros((3, words), "<u4")
    for row in range(3):
        whole = 0
        for i, code in enumerate(codes[row].tolist()):
            per = 32 // bits
            whole |= code << (i * bits if dense else i // per * 32 + i % per * bits)
        stored[row] = np.frombuffer(whole.to_bytes(words * 4, "little"), "<u4")
    layout = NumberLayout(
        "int", integers(bits, 1), Packing(bits, ("int32",), dense=dense),
        times(Grid("scale", (0, 0))), shape=(3, columns),
    )  # fmt: skip
    arrays = {"weight": stored, "scale": np.array([0x3F000000], "<u4")}
    made = both(layout, arrays, {"weight": "int32", "scale": "float32"}, "float32")
    assert (made == (codes - 1) * 0.5).all()


def test_a_table_can_be_any_numbers() -> None:
    known = tuple(float(n) for n in (-1.5, 0.25, 3.0, 8.0))
    layout = NumberLayout("t", table(known), Packing(2), times(Grid("scale", (0, 0))))
    arrays = {"weight": np.array([[0b11100100]], "u1"), "scale": np.array(0x40000000, "<u4")}
    made = both(layout, arrays, {"weight": "uint8", "scale": "float32"}, "float32")
    assert made.tolist() == [[2 * n for n in known]]


def test_a_k_quant_is_scales_of_scales_and_minima_of_minima() -> None:
    rng = np.random.default_rng(0)
    stored = rng.integers(0, 256, (3, 2 * 144)).astype("u1")
    stored.reshape(3, 2, 144)[..., :4] = rng.standard_normal((3, 2, 2)).astype("<f2").view("u1")
    codec: Any = codecs.get("gguf")
    layout = codec.layout(codec.Args("q4_k"), {})
    made = both(layout, {"data": stored}, {"data": "uint8"}, "float32")
    # gguf-py's dequantize_blocks of Q4_K, number by number
    f4 = np.float32
    for row in range(3):
        for block in range(2):
            b = stored.reshape(3, 2, 144)[row, block]
            d, least = (f4(n) for n in b[:4].view("<f2"))
            s = b[4:16]
            for j in range(8):
                if j < 4:
                    scale, low = int(s[j]) & 63, int(s[j + 4]) & 63
                else:
                    scale = int(s[j + 4]) & 15 | (int(s[j - 4]) >> 6) << 4
                    low = int(s[j + 4]) >> 4 | (int(s[j]) >> 6) << 4
                codes = b[16 + j // 2 * 32 : 48 + j // 2 * 32] >> (4 * (j % 2)) & 15
                wanted = (d * f4(scale)) * codes.astype("<f4") - least * f4(low)
                at = block * 256 + j * 32
                assert (made[row, at : at + 32] == wanted).all()


def test_what_is_divided_and_added_is_rounded_each_time() -> None:
    third = Term("/", 3.0)
    layout = NumberLayout(
        "chain", integers(8), plain("uint8"), (*times(Grid("scale", (0, 0))), third, Term("+", 0.1))
    )
    arrays = {"weight": np.array([[7]], "u1"), "scale": np.array(0x3F800000, "<u4")}
    made = both(layout, arrays, {"weight": "uint8", "scale": "float32"}, "float32")
    f4 = np.float32
    assert made[0, 0] == f4(7) * (f4(1) / f4(3) + f4(0.1))


MX8 = NumberLayout(
    "mxfp8", floats(E4M3), plain(E4M3), times(Grid("scale", (1, 2), dtypes=("uint8",)))
)


def decode_mx(codes: Any, scales: Any, dtype: str, box: Any = None) -> Any:
    specs = {"weight": Spec(E4M3, (2, 4)), "scale": Spec("uint8", (2, 2))}
    assert is_exact(MX8, specs, dtype)
    arrays = {"weight": np.array(codes, "u1"), "scale": np.array(scales, "u1")}
    box = box or ((0, 2), (0, 4))
    out = np.empty([b - a for a, b in box], "<u4" if dtype == "float32" else "<u2")
    needs = geometry(MX8, specs).needs(box)
    given = {r: a[tuple(slice(*s) for s in needs[r])] for r, a in arrays.items()}
    decode(MX8, specs, given, dtype, box, out)
    return out


def test_powers_of_two_are_exact_and_a_number_out_of_range_is_refused_with_its_place() -> None:
    one, most, least = 0x38, 0x7E, 0x01
    assert decode_mx([[one] * 4] * 2, [[254, 0], [255, 127]], "bfloat16")[0, 0] == 0x7F00
    # 448 * 2^120 is beyond float32; 448 * 2^119 is not
    decode_mx([[one, one, most, one]] * 2, [[127, 246]] * 2, "float32")
    for box in (None, ((1, 2), (2, 4))):
        with pytest.raises(OpError) as caught:
            decode_mx([[one] * 4, [one, one, one, most]], [[127, 246], [127, 247]], "float32", box)
        assert caught.value.code == "M406"
        assert "the number at [1, 3] is 448 times" in str(caught.value)
    # 2^-9 * 2^-124 is the least number of bfloat16
    decode_mx([[least] * 4] * 2, [[3, 127]] * 2, "bfloat16")
    with pytest.raises(OpError) as caught:
        decode_mx([[one] * 4, [least, one, one, one]], [[2, 127]] * 2, "bfloat16")
    assert "the number at [1, 0]" in str(caught.value)
    # a NaN is no number out of range
    decode_mx([[0x7F] * 4] * 2, [[247, 255]] * 2, "float32")


def test_what_is_rounded_is_not_exact() -> None:
    codes = {"weight": Spec(E4M3, (2, 4))}
    assert not is_exact(MX8, codes | {"scale": Spec("uint8", (2, 2))}, "float16")
    assert not is_exact(FP8, codes | {"scale": Spec("float32", (1, 1))}, "float32")


class Told:
    """A meter that keeps what it is told."""

    def __init__(self) -> None:
        self.wanted: list[Any] = []
        self.got: list[Any] = []
        self.amax: list[Any] = []
        self.saturated = self.underflowed = self.non_finite = 0
        self.sure = True

    def add(
        self,
        wanted: Any,
        got: Any,
        amax: Any = None,
        *,
        saturated: int = 0,
        underflowed: int = 0,
        non_finite: int | None = None,
        sure: bool = True,
    ) -> None:
        self.wanted.append(np.ravel(wanted))
        self.got.append(np.ravel(got))
        self.amax.append(np.ravel([] if amax is None else amax))
        self.saturated += saturated
        self.underflowed += underflowed
        self.non_finite += non_finite or 0
        self.sure = self.sure and sure


def test_a_meter_is_told_the_error_of_each_number_of_a_small_tensor() -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 0x70, (6, 8)).astype("u1")
    codes[0, 0], codes[5, 7] = 0x7E, 0x01
    layout = NumberLayout("fp8", floats(E4M3), plain(E4M3), times(Grid("scale", (3, 4))))
    scales = np.array([[200.0, 1.1], [0.3, 1e-7]], "<f4")
    arrays = {"weight": codes, "scale": scales.view("<u4")}
    specs = {"weight": Spec(E4M3, (6, 8)), "scale": Spec("float32", (2, 2))}
    told, out = Told(), np.empty((6, 8), "<u2")
    decode(layout, specs, arrays, "float16", ((0, 6), (0, 8)), out, told)
    known = np.array(floats(E4M3).values())[codes]
    wide = np.repeat(np.repeat(scales.astype("f8"), 3, 0), 4, 1)
    made = out.view("<f2").astype("f8")
    assert told.sure
    assert (np.concatenate(told.wanted) == (known * wide).ravel()).all()
    assert (np.concatenate(told.got) == made.ravel()).all()
    assert (np.concatenate(told.amax) == (wide * 448).ravel()).all()
    # 448 * 200 is no float16, and 2^-9 * 1e-7 rounds to zero
    assert told.saturated == told.non_finite == np.isinf(made).sum() > 0
    assert told.underflowed == ((made == 0) & (known != 0)).sum() > 0


@pytest.mark.parametrize("flat", [False, True])
def test_a_large_tensor_is_measured_in_part_the_same_however_it_is_cut(flat: bool) -> None:
    rows, columns = (600, 2048) if not flat else (1000, 1200)
    codes = np.random.default_rng(1).integers(0, 256, (rows, columns // 2)).astype("u1")
    if flat:
        layout = NumberLayout(
            "nf4", floats("float4_e2m1fn"), Packing(4), times(Grid("scale", (0, 64))),
            flat=True, shape=(rows, columns),
        )  # fmt: skip
        arrays = {
            "weight": codes.reshape(-1, 1),
            "scale": np.full(rows * columns // 64, 0x3DCCCCCD, "<u4"),
        }
    else:
        layout = NumberLayout(
            "fp4", floats("float4_e2m1fn"), Packing(4), times(Grid("scale", (1, 0)))
        )
        arrays = {"weight": codes, "scale": np.full((rows, 1), 0x3DCCCCCD, "<u4")}
    specs = {
        "weight": Spec("uint8", arrays["weight"].shape),
        "scale": Spec("float32", arrays["scale"].shape),
    }
    totals = []
    for cut in (rows, 37):
        told = Told()
        for top in range(0, rows, cut):
            box = ((top, min(top + cut, rows)), (0, columns))
            needs = geometry(layout, specs).needs(box)
            given = {r: a[tuple(slice(*s) for s in needs[r])] for r, a in arrays.items()}
            out = np.empty((box[0][1] - top, columns), "<u2")
            decode(layout, specs, given, "bfloat16", box, out, told)
        assert not told.sure
        totals.append((np.concatenate(told.wanted), np.concatenate(told.got)))
    for one, other in zip(*totals, strict=True):
        assert 0 < one.size < rows * columns / 50
        assert (one == other).all()


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("odd", [300.0, 3e38, np.inf, np.nan, -200.0])
def test_a_large_scale_beside_small_ones_costs_them_no_digit(
    alone: bool, odd: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    if alone:
        monkeypatch.setattr(tables, "imported", lambda: None)
    # all codes that are numbers, some of which are subnormal
    codes = np.tile(np.delete(np.arange(256), [0x7F, 0xFF]).astype("u1"), (6, 1))
    scales = np.array([[odd], [1e-30], [1e-36], [3e-39], [1e-44], [1.1]], "<f4").view("<u4")
    layout = NumberLayout("fp8", floats(E4M3), plain(E4M3), times(Grid("scale", (1, 0))))
    for dtype in ("float32", "bfloat16", "float16"):
        both(
            layout, {"weight": codes, "scale": scales}, {"weight": E4M3, "scale": "float32"}, dtype
        )


@pytest.mark.parametrize(("wrong", "said"), [(2, "is 2"), (-1, "is -1")])
@pytest.mark.parametrize("torch_too", [False, True])
def test_an_index_beyond_the_groups_is_refused(wrong: int, said: str, torch_too: bool) -> None:
    layout = NumberLayout("i", integers(8), plain("uint8"), times(Grid("scale", index="group")))
    specs = {
        "weight": Spec("uint8", (2, 3)),
        "scale": Spec("float32", (2, 2)),
        "group": Spec("int32", (3,)),
    }
    arrays: dict[str, Any] = {
        "weight": np.ones((2, 3), "u1"),
        "scale": np.ones((2, 2), "<f4").view("<i4"),
        "group": np.array([0, wrong, 1], "<i4"),
    }
    out: Any = np.empty((2, 3), "<i4")
    if torch_too:
        arrays, out = {r: torch.from_numpy(a) for r, a in arrays.items()}, torch.from_numpy(out)
    else:
        arrays = {r: a.view(f"<u{a.itemsize}") for r, a in arrays.items()}
    with pytest.raises(OpError) as caught:
        decode(layout, specs, arrays, "float32", ((0, 2), (0, 3)), out)
    assert caught.value.code == "M406"
    assert f"the group of column 1 {said}" in str(caught.value)


def test_codes_that_stand_for_nothing_are_an_error_of_the_layout() -> None:
    layout = NumberLayout("i", integers(4), plain("uint8"), times(Grid("scale", (0, 0))))
    specs = {"weight": Spec("uint8", (2, 3)), "scale": Spec("float32", ())}
    with pytest.raises(ValueError, match="weight: codes of 8 bits, elements of 4"):
        geometry(layout, specs)
