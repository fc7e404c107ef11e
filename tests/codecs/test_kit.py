"""Layouts whose parts do not fit, boxes, and forms that no golden vector has."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from migrate import codecs
from migrate.codecs.kit.decoding import decode
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
    assert "blocks of [64, 64] would fit" in (error.help or "")
    error = fails(FP8, {"weight": Spec(E4M3, (576, 256)), "scale": Spec("float32", (0, 4))})
    assert "belongs to another weight" in (error.help or "")


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


def k_quant() -> NumberLayout:
    """GGUF's Q4_K: d, dmin, twelve bytes of 6-bit scales and minima, 128 bytes of nibbles."""
    eight = range(8)
    low = tuple(4 + j if j < 4 else 8 + j for j in eight)

    def sixes(of_min: int) -> Field:
        first = tuple(b + 4 * of_min if j < 4 else b for j, b in enumerate(low))
        zeros = tuple(4 * of_min if j >= 4 else 0 for j in eight)
        high = tuple((4 if j < 4 else 0) + 4 * of_min + j for j in eight)
        return Field(
            (
                BitPiece(first, zeros, 4),
                BitPiece(high, tuple(4 if j < 4 else 6 for j in eight), 2, 4),
            )
        )

    codes = BitPiece(
        tuple(16 + i // 64 * 32 + i % 32 for i in range(256)),
        tuple(i // 32 % 2 * 4 for i in range(256)),
        4,
    )
    return NumberLayout(
        "q4_k",
        integers(4),
        Field((codes,)),
        times(
            Grid("weight", field=Field(dtype="float16", at=0)),
            Grid("weight", elements=integers(6), field=sixes(0)),
        ),
        less=times(
            Grid("weight", field=Field(dtype="float16", at=2)),
            Grid("weight", elements=integers(6), field=sixes(1)),
        ),
        record=Record(256, 144),
    )


def test_a_k_quant_is_scales_of_scales_and_minima_of_minima() -> None:
    rng = np.random.default_rng(0)
    stored = rng.integers(0, 256, (3, 2 * 144)).astype("u1")
    stored.reshape(3, 2, 144)[..., :4] = rng.standard_normal((3, 2, 2)).astype("<f2").view("u1")
    made = both(k_quant(), {"weight": stored}, {"weight": "uint8"}, "float32")
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
