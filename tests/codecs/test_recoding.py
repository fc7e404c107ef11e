"""Parts of one layout made of parts of another: both decode to the same numbers, bit for bit, and
what cannot is refused with its index and value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pytest
from kit_layouts import E2M1, E4M3, E5M2, OVER_1536, OVER_2688

from migrate.codecs.kit import code_tables
from migrate.codecs.kit.geometry import stored_shapes
from migrate.codecs.kit.layout import Grid, NumberLayout, Packing, Term, floats, plain, times
from migrate.codecs.kit.recoding import Recoding, recoding
from migrate.codecs.kit.recoding_boxes import recode, survey_powers
from migrate.codecs.kit.recoding_reference import recoded_parts
from migrate.codecs.kit.reference import reference
from migrate.core import view as views
from migrate.core.errors import OpError
from migrate.core.spec import Spec
from migrate.elements.raw import carrier
from migrate.ops.recode import OP
from migrate.testing.opkit import realise

E8M0, FNUZ = "float8_e8m0fnu", "float8_e4m3fnuz"
POWERS = ("float32", "bfloat16", E8M0, "uint8")


class Form(NamedTuple):
    """A layout and the dtypes that its parts are stored in."""

    layout: NumberLayout
    dtypes: Mapping[str, str]


def fp8(block: tuple[int, int], scale: str = "float32", codes: str = E4M3, **more: Any) -> Form:
    grid = Grid("scale", block, dtypes=POWERS, **more)
    return Form(
        NumberLayout("fp8", floats(codes), plain(codes, "uint8"), times(grid)),
        {"weight": codes, "scale": scale},
    )


def fp4(scale: str = "uint8", weight: str = "uint8", run: int = 0, **more: Any) -> Form:
    packing = Packing(4, ("uint8", "int8", E2M1), run=run)
    grid = Grid("scale", (1, 32), dtypes=POWERS, **more)
    return Form(
        NumberLayout("mxfp4", floats(E2M1), packing, times(grid)),
        {"weight": weight, "scale": scale},
    )


def nvfp4(
    how: Any = "*", *factors: float, scale: str = E4M3, leading: bool = False, **more: Any
) -> Form:
    terms = (
        *times(Grid("scale", (1, 16), dtypes=(E4M3, "uint8"), byte=E4M3, **more)),
        Term(how, Grid("global", (0, 0), leading=leading, dtypes=("float32",))),
        *times(*factors),
    )
    return Form(
        NumberLayout("nvfp4", floats(E2M1), Packing(4, ("uint8", E2M1)), terms),
        {"weight": "uint8", "scale": scale, "global": "float32"},
    )


def path_of(one: Form, other: Form, shape: tuple[int, ...], exact_in: str = "") -> Recoding:
    specs = specs_of(one, shape)
    return recoding(
        one.layout,
        tuple(specs.items()),
        other.layout,
        tuple(specs_of(other, shape).items()),
        exact_in,
    )


def specs_of(form: Form, shape: tuple[int, ...]) -> dict[str, Spec]:
    shapes = stored_shapes(form.layout, shape, form.dtypes)
    return {role: Spec(form.dtypes[role], shapes[role]) for role in shapes}


def given(form: Form, shape: tuple[int, ...], seed: int = 0, spread: int = 6) -> dict[str, Any]:
    """Random codes, and scales that are powers of two within `spread`."""
    dice, out = np.random.default_rng(seed), {}
    for role, spec in specs_of(form, shape).items():
        if role == "weight":
            high = 16 if spec.dtype == E2M1 else 256
            out[role] = dice.integers(0, high, spec.shape, "u1")
            if spec.dtype == E4M3:
                out[role][(out[role] & 127) == 127] = 0
        elif role == "global":
            out[role] = (
                np.ldexp(np.float32(1), dice.integers(-9, 9, spec.shape)).astype("f4").view("<u4")
            )
        elif spec.dtype == E4M3 or form.layout.name == "nvfp4":
            out[role] = dice.integers(1, 127, spec.shape, "u1")
        else:
            powers = dice.integers(120 - spread, 121, spec.shape)
            wide = {"float32": (23, "<u4"), "bfloat16": (7, "<u2")}.get(spec.dtype, (0, "u1"))
            out[role] = (powers << wide[0]).astype(wide[1])
        out[role] = np.asarray(out[role], carrier(spec.dtype)).reshape(spec.shape)
    return out


def boxes(shape: tuple[int, ...]) -> Iterator[tuple[tuple[int, int], ...]]:
    """All of it, and parts that begin and end anywhere."""
    cuts = [[(0, n)] + ([(0, n // 3), (n // 3, n)] if n > 2 else []) for n in shape]
    yield from product(*cuts)


def made(path: Recoding, arrays: Mapping[str, Any], cut: bool = True) -> dict[str, Any]:
    """The parts as boxes make them, whole and in pieces."""
    survey = None
    if path.surveyed:
        role = path.inputs[0]
        for box in boxes(arrays[role].shape):
            survey = survey_powers(path, box, arrays[role][tuple(slice(*s) for s in box)], survey)
    out = {}
    for role, spec in path.parts.items():
        whole = None
        for box in boxes(spec.shape) if cut else [tuple((0, n) for n in spec.shape)]:
            needed = path.needs(role, box)
            held = {r: arrays[r][tuple(slice(*side) for side in b)] for r, b in needed.items()}
            got = np.full([b - a for a, b in box], 0xA5, carrier(spec.dtype))
            recode(path, held, role, box, got, survey=survey)
            if whole is None:
                whole = got
            else:
                np.testing.assert_array_equal(got, whole[tuple(slice(*side) for side in box)])
        out[role] = whole
    return out


def same_numbers(
    path: Recoding, arrays: Mapping[str, Any], parts: Mapping[str, Any], dtype: str = "float32"
) -> None:
    source = {r: path.source.spec(r) for r in path.source.layout.roles()}
    one = reference(path.source.layout, source, arrays, dtype)
    other = reference(path.target.layout, path.parts, parts, dtype)
    np.testing.assert_array_equal(one, other)


BLOCKS, ROWS, TENSOR, GROUPS = (128, 128), (1, 0), (0, 0), (1, 32)
FN_BLOCK = fp8((8, 16))

PATHS: dict[str, tuple[Form, Form, tuple[int, ...]]] = {
    "scales of rows to groups": (fp8(ROWS), fp8(GROUPS, E8M0), (5, 96)),
    "the scale of a tensor to rows": (fp8(TENSOR), fp8(ROWS), (5, 7)),
    "a tensor of one scale to stacked ones": (fp8(TENSOR, leading=False), fp8(TENSOR), (3, 5, 7)),
    "blocks to groups of 32": (fp8(BLOCKS), fp8(GROUPS, "uint8"), (300, 160)),
    "blocks to swizzled groups": (fp8(BLOCKS), fp8(GROUPS, "uint8", swizzled=True), (300, 160)),
    "swizzled to linear": (fp8(GROUPS, "uint8", swizzled=True), fp8(GROUPS, E8M0), (2, 130, 160)),
    "linear to swizzled": (fp8(GROUPS, E8M0), fp8(GROUPS, E8M0, swizzled=True), (2, 130, 160)),
    "blocks to padded ones": (fp8((8, 16)), fp8((8, 16), padded=(1, 4)), (20, 40)),
    "padded blocks to others": (fp8((8, 16), padded=(1, 4)), fp8((8, 16)), (20, 40)),
    "rows of 16, transposed": (fp8((1, 16)), fp8((1, 16), transposed=True, padded=(1, 4)), (9, 40)),
    "transposed back": (fp8((1, 16), transposed=True, padded=(1, 4)), fp8((1, 16)), (9, 40)),
    "float32 to E8M0": (fp8((8, 16)), fp8((8, 16), E8M0), (20, 40)),
    "E8M0 to bfloat16": (fp8((8, 16), E8M0), fp8((8, 16), "bfloat16"), (20, 40)),
    "FP4 to FP8": (fp4(), fp8(GROUPS, "uint8"), (5, 96)),
    "FP4 in runs to FP8": (fp4(run=16), fp8(GROUPS, E8M0), (3, 5, 96)),
    "FP4 in runs to rows": (fp4(run=16), fp4(E8M0, "int8"), (3, 5, 96)),
    "rows to FP4 in runs": (fp4(E8M0, "int8"), fp4(run=16), (3, 5, 96)),
    "FP4 one an element to pairs": (fp4(weight=E2M1), fp4(), (3, 5, 96)),
    "pairs to FP4 one an element": (fp4(), fp4(weight=E2M1), (3, 5, 96)),
    "FP4 to blocks": (fp4(), fp8((128, 128)), (260, 320)),
    "FP4 to blocks of bytes": (fp4(E8M0), fp8((4, 64), E8M0), (9, 96)),
    "FP4 of runs, stacked, to blocks": (fp4("float32", run=16), fp8((128, 128)), (2, 100, 256)),
    "FP4 to one scale": (fp4(), fp8(TENSOR), (5, 96)),
    "groups of FP8 to blocks": (fp8(GROUPS, "uint8"), fp8((16, 64), "bfloat16"), (20, 96)),
    "FP4 to NVFP4": (fp4(), nvfp4(), (5, 96)),
    "stacked FP4 to NVFP4": (fp4(run=16), nvfp4("/", leading=True), (3, 5, 96)),
    "swizzled FP4 to NVFP4": (fp4(swizzled=True), nvfp4(swizzled=True), (3, 130, 160)),
    "NVFP4, divided": (nvfp4(), nvfp4("/"), (5, 96)),
    "NVFP4, multiplied": (nvfp4("/"), nvfp4(), (5, 96)),
    "NVFP4 for kernels": (nvfp4(), nvfp4(scale="uint8", padded=(128, 4)), (5, 96)),
    "NVFP4 swizzled back": (nvfp4(swizzled=True), nvfp4("/"), (5, 96)),
    "fn to fnuz": (FN_BLOCK, fp8((8, 16), codes=FNUZ), (20, 40)),
    "rows to a tensor": (fp8(ROWS), fp8(TENSOR), (5, 40)),
    "E5M2 to E5M2": (fp8(ROWS, codes=E5M2), fp8(ROWS, "bfloat16", codes=E5M2), (20, 40)),
}  # fmt: skip


@pytest.mark.parametrize("name", PATHS)
def test_numbers_stay_what_they_are(name: str) -> None:
    one, other, shape = PATHS[name]
    path = path_of(one, other, shape)
    # less than the codes of a block have room for
    coarse = 6 if one.layout.name == "mxfp4" else 0
    arrays = given(one, shape, spread=coarse if path.coarse else 6)
    parts = made(path, arrays)
    if name == "fn to fnuz":
        arrays["weight"][arrays["weight"] == 0x80] = 0
    same_numbers(path, arrays, parts)
    wanted = recoded_parts(path, arrays)
    for role in parts:
        np.testing.assert_array_equal(parts[role], wanted[role], err_msg=role)


@pytest.mark.parametrize("name", PATHS)
def test_what_is_copied_is_what_would_be_computed(name: str) -> None:
    one, other, shape = PATHS[name]
    path, arrays = path_of(one, other, shape), given(one, shape)
    if path.coarse:
        arrays = given(one, shape, spread=0)
    wanted = recoded_parts(path, arrays)
    for role, copied in path.copies.items():
        spec = path.parts[role]
        stored = views.stored(0, arrays[copied.role].shape)
        found = OP.moved(stored, copied.moves, spec.dtype)
        np.testing.assert_array_equal(
            realise(found, [arrays[copied.role]], spec.dtype), wanted[role], err_msg=role
        )


def refused(call: Any) -> OpError:
    with pytest.raises(OpError) as caught:
        call()
    return caught.value


def floats_of(raw: Any) -> Any:
    return raw.view("<f4")


def test_a_scale_that_is_no_power_of_two_is_refused_where_it_must_be_one() -> None:
    shape = (20, 40)
    one, other = fp8((8, 16)), fp8((8, 16), E8M0)
    path, arrays = path_of(one, other, shape), given(one, shape)
    floats_of(arrays["scale"])[1, 2] = 0.3
    error = refused(lambda: made(path, arrays))
    assert error.code == "M406"
    assert "the scale at [1, 2] is 0.300000012" in error.message
    for odd in (0.0, -2.0, np.inf, 2.0**-129):
        floats_of(arrays["scale"])[1, 2] = odd
        assert f"the scale at [1, 2] is {odd:.9g}" in refused(lambda: made(path, arrays)).message


def test_a_scale_that_the_narrower_dtype_rounds_is_refused() -> None:
    one, other, shape = fp8((8, 16)), fp8((8, 16), "bfloat16"), (20, 40)
    path, arrays = path_of(one, other, shape), given(one, shape)
    floats_of(arrays["scale"])[2, 0] = 1 + 2.0**-8
    error = refused(lambda: made(path, arrays))
    assert "the scale at [2, 0] is 1.00390625, and bfloat16 does not hold that" in error.message


def test_scales_that_are_nan_stay_so() -> None:
    for one, other, shape in (
        (fp8((8, 16)), fp8((8, 16), E8M0), (20, 40)),
        (fp4(), fp8((4, 64)), (9, 96)),
        (fp4(), nvfp4(), (9, 96)),
    ):
        path, arrays = path_of(one, other, shape), given(one, shape)
        if arrays["scale"].dtype == "u1":
            arrays["scale"][0, 1] = 255
        else:
            floats_of(arrays["scale"])[0, 1] = np.nan
        parts = made(path, arrays)
        same_numbers(path, arrays, parts)
        source = {r: path.source.spec(r) for r in path.source.layout.roles()}
        found = floats_of(reference(path.source.layout, source, arrays, "float32"))
        assert np.isnan(found).any()


def test_a_scale_that_is_nan_is_refused_where_the_other_format_takes_none() -> None:
    other = nvfp4(positive=True, zeros=True)
    path, arrays = path_of(fp4(), other, (9, 96)), given(fp4(), (9, 96))
    arrays["scale"][2, 1] = 255
    with pytest.raises(OpError, match=r"the scale at \[2, 1\] is nan, and no positive") as caught:
        made(path, arrays)
    assert caught.value.code == "M406"


@pytest.mark.parametrize(("spread", "fits"), [(14, True), (15, False)])
def test_exponents_in_a_block_may_differ_by_fourteen(spread: int, fits: bool) -> None:
    one, other, shape = fp4(), fp8((128, 128)), (130, 256)
    path, arrays = path_of(one, other, shape), given(one, shape, spread=0)
    arrays["weight"][...] = 0x71
    arrays["scale"][40, 2] = 120 - spread
    if fits:
        parts = made(path, arrays)
        same_numbers(path, arrays, parts)
        # the largest code is 6 * 2^6, of 448
        assert (parts["weight"] & 127).max() == 0x7C
        return
    error = refused(lambda: made(path, arrays))
    assert error.code == "M406"
    assert "the number at [40, 64] has no code in fp8: its code stands for 0.5" in error.message
    # zeros are the same whatever their scale
    arrays["weight"][40, 32:48] = 0x80
    same_numbers(path, arrays, made(path, arrays))


@pytest.mark.parametrize(("scale", "top"), [("float32", 254 << 23), ("uint8", 254)])
def test_a_scale_beyond_the_largest_power_is_refused_with_its_block(scale: str, top: int) -> None:
    # codes of fnuz stand for half as much
    one, other = fp8((1, 128), scale), fp8((128, 128), scale, FNUZ)
    path, arrays = path_of(one, other, (256, 256)), given(one, (256, 256))
    arrays["weight"][...] = 0x38
    half = 1 << 23 if scale == "float32" else 1
    arrays["scale"][...] = top - half
    same_numbers(path, arrays, made(path, arrays))
    arrays["scale"][130, 1] = top
    said = refused(lambda: made(path, arrays)).message
    assert said.startswith("recode: the scale of block [1, 1] from [0, 0] on would be 2^128")


@pytest.mark.parametrize(("spread", "fours"), [(1, True), (11, True), (12, False), (14, False)])
def test_four_codes_at_a_time_are_shifted_while_they_stay_normal(
    spread: int, fours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other, shape = fp4(), fp8((128, 128)), (256, 256)
    path, arrays = path_of(one, other, shape), given(one, shape, spread=0)
    # every code beside every shift, but halves where the other format has none
    arrays["weight"][...] = np.arange(shape[1] // 2, dtype="u1") * 37
    arrays["scale"][...] = 120 - np.arange(256)[:, None] % (spread + 1)
    arrays["weight"][arrays["scale"][:, :1].repeat(128, 1) < 108] &= 0xEE
    slow = made(path, arrays)
    same_numbers(path, arrays, slow)
    seen = []
    fast = code_tables.CodeLookup._fours
    monkeypatch.setattr(code_tables, "WORTH", 0)
    monkeypatch.setattr(code_tables, "CHUNK_OF_FOURS", 1 << 10)
    monkeypatch.setattr(
        code_tables.CodeLookup, "_fours", lambda *args: (seen.append(args[2]), fast(*args))
    )
    found = made(path, arrays)
    np.testing.assert_array_equal(found["weight"], slow["weight"])
    assert {slope is not None for slope in seen} == ({True} if fours else set())


@pytest.mark.parametrize("name", [name for name in PATHS if "FP4" in name])
def test_codes_are_the_same_however_many_are_looked_up(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other, shape = PATHS[name]
    path, arrays = path_of(one, other, shape), given(one, shape, spread=4)
    slow = made(path, arrays)
    monkeypatch.setattr(code_tables, "WORTH", 0)
    found = made(path, arrays)
    for role, part in slow.items():
        np.testing.assert_array_equal(found[role], part, err_msg=role)


@pytest.mark.parametrize(("spread", "fits"), [(17, True), (18, False)])
def test_exponents_of_a_tensor_may_differ_by_seventeen(spread: int, fits: bool) -> None:
    one, other, shape = fp4(), nvfp4(), (9, 96)
    path, arrays = path_of(one, other, shape), given(one, shape, spread=0)
    arrays["scale"][3, 1] = 120 - spread
    if fits:
        same_numbers(path, arrays, made(path, arrays))
        return
    error = refused(lambda: made(path, arrays))
    assert error.code == "M406"
    assert f"the scale at [3, 1] is {2.0 ** (120 - spread - 127):.9g}" in error.message
    arrays["weight"][3, 16:32] = 0
    same_numbers(path, arrays, made(path, arrays))


def test_every_power_of_a_byte_goes_from_four_bits_to_blocks_of_eight() -> None:
    one, other = fp4(), fp8((1, 64))
    path = path_of(one, other, (255, 64))
    arrays = given(one, (255, 64))
    arrays["scale"][...] = np.arange(255, dtype="u1")[:, None]
    same_numbers(path, arrays, made(path, arrays))


def test_every_code_of_fnuz_is_one_of_fn_but_the_largest_and_the_way_there_loses_a_sign() -> None:
    there, back = fp8((8, 16), codes=FNUZ), fp8((8, 16))
    codes = np.arange(256, dtype="u1").reshape(16, 16)
    scale = {"scale": np.full((2, 1), 2.0**-3, "<f4").view("<u4")}
    path = path_of(there, back, (16, 16))
    error = refused(lambda: made(path, {"weight": codes, **scale}))
    assert "the number at [7, 15] has no code in fp8: its code stands for 240" in error.message
    fits = np.where((codes & 127) == 127, 1, codes).astype("u1")
    parts = made(path, {"weight": fits, **scale})
    same_numbers(path, {"weight": fits, **scale}, parts)
    assert (floats_of(parts["scale"]) == 2.0**-4).all()
    assert not path.merges
    # the other way all have a code, and a zero its only one
    other = path_of(back, there, (16, 16))
    parts = made(other, {"weight": codes, **scale})
    assert (floats_of(parts["scale"]) == 2.0**-2).all()
    assert other.merges
    assert parts["weight"][8, 0] == 0
    assert parts["weight"][7, 15] == 0x80
    given_codes = np.where(codes == 0x80, 0, codes).astype("u1")
    same_numbers(other, {"weight": given_codes, **scale}, parts)


GLOBALS = np.array([1 / 3, 0.0123, 3e-5, 7.7e-4, 1 / 2688, 5.0], "<f4")
FORMS = {
    "modelopt": nvfp4(),
    "divided": nvfp4("/"),
    "amax": nvfp4("*", OVER_2688),
    "amax of 256": nvfp4("*", OVER_1536),
}


@pytest.mark.parametrize("there", FORMS)
@pytest.mark.parametrize("back", FORMS)
def test_a_scale_of_all_is_certified_over_all_products_of_codes_and_scales(
    there: str, back: str
) -> None:
    one, other, shape = FORMS[there], FORMS[back], (128, 32)
    # each scale of a byte and each code
    arrays = given(one, shape)
    scales = np.arange(256, dtype="u1") & 127
    arrays["scale"] = np.where(scales == 127, 0, scales).reshape(128, 2).astype("u1")
    arrays["weight"][...] = np.tile(np.arange(0, 256, 17, dtype="u1") ^ 0x50, (128, 1))
    outcomes = set()
    for dtype in ("", "bfloat16"):
        path = path_of(one, other, shape, dtype)
        for value in [*GLOBALS, *np.float32(2) ** np.arange(-9, 9, 3)]:
            arrays["global"] = np.full((1, 1), value, "<f4").view("<u4")
            error = None
            try:
                parts = made(path, arrays, cut=False)
            except OpError as caught:
                error = caught
            if error is not None:
                outcomes.add(f"refused {dtype}")
                assert error.code == "M406"
                assert f"the global at [0, 0] is {value:.9g}, and " in error.message
                assert f"differ in {dtype or 'float32'}, the first " in error.message
                assert ("exact_in" in str(error.help)) is (dtype == "")
                continue
            outcomes.add(f"made {dtype}")
            same_numbers(path, arrays, parts, dtype or "float32")
            np.testing.assert_array_equal(parts["global"], recoded_parts(path, arrays)["global"])
    assert "made bfloat16" in outcomes
    if there == back:
        assert outcomes == {"made ", "made bfloat16"}
        assert path.copies.keys() == {"weight", "scale", "global"}
    else:
        assert {"refused ", "made bfloat16"} <= outcomes


@pytest.mark.parametrize("odd", [0.0, -1.0, np.inf, np.nan])
def test_a_scale_of_all_that_has_no_reciprocal_is_refused(odd: float) -> None:
    path = path_of(nvfp4(), nvfp4("/"), (5, 96), "bfloat16")
    arrays = given(nvfp4(), (5, 96))
    arrays["global"] = np.full((1, 1), odd, "<f4").view("<u4")
    error = refused(lambda: made(path, arrays, cut=False))
    assert f"the global at [0, 0] is {odd:.9g}, it is no positive number" in error.message


def test_a_zero_scale_of_all_numbers_stays_where_only_places_change() -> None:
    path = path_of(nvfp4(), nvfp4(scale="uint8", padded=(128, 4)), (5, 96))
    assert path.copies.keys() == {"weight", "scale", "global"}


def test_what_only_moves_is_copied() -> None:
    shape = (4, 64, 96)
    for one, other in (
        (fp4(run=16), fp4(E8M0, "int8")),
        (fp8((8, 16)), fp8((8, 16), padded=(1, 4))),
        (fp8(GROUPS, E8M0), fp8(GROUPS, "uint8", swizzled=True)),
        (fp8(ROWS, codes=E5M2), fp8(ROWS, codes=E5M2)),
    ):
        path = path_of(one, other, shape)
        assert path.copies.keys() == {"weight", "scale"}
    # codes stay where only scales become others
    assert path_of(fp8(BLOCKS), fp8(GROUPS, E8M0), shape).copies.keys() == {"weight"}
    assert path_of(fp4(), nvfp4(), shape).copies.keys() == {"weight"}
    assert path_of(nvfp4(), nvfp4("/"), shape).copies.keys() == {"weight", "scale"}


@pytest.mark.parametrize(
    ("one", "other", "why"),
    [
        (nvfp4(), fp4(), "the scale of all numbers has no place there"),
        (fp8(GROUPS), nvfp4(), "neither codes nor scales are those of the other"),
        (fp4(), fp8((4, 48)), "blocks of 32 and of 48 overlap"),
        (fp8((2, 2)), fp4(), "the largest code has none there, whatever its scale"),
        (fp8(TENSOR), fp8(TENSOR, leading=False), "one scale cannot stand for those of 3"),
        (nvfp4(), nvfp4("/"), ""),
    ],
)
def test_without_a_path_the_plan_is_refused(one: Form, other: Form, why: str) -> None:
    if not why:
        assert path_of(one, other, (3, 5, 96)).path == "reform"
        return
    error = refused(lambda: path_of(one, other, (3, 5, 96)))
    assert error.code == "M308"
    assert why in error.message


def test_one_scale_may_stand_for_several_that_are_the_same() -> None:
    one, other, shape = fp8(ROWS), fp8(TENSOR), (5, 40)
    path, arrays = path_of(one, other, shape), given(one, shape)
    floats_of(arrays["scale"])[...] = 0.3
    parts = made(path, arrays)
    same_numbers(path, arrays, parts)
    assert (floats_of(parts["scale"]) == np.float32(0.3)).all()
    assert (parts["weight"] == arrays["weight"]).all()
    floats_of(arrays["scale"])[3] = 0.6
    error = refused(lambda: made(path, arrays))
    assert "the scale at [0, 0] is 0.300000012, and no power of two" in error.message


def test_scales_that_have_to_be_powers_are_looked_at_though_their_dtype_stays() -> None:
    one, other, shape = fp8(BLOCKS), fp8(GROUPS, powers=True), (9, 64)
    path, arrays = path_of(one, other, shape), given(one, shape)
    same_numbers(path, arrays, made(path, arrays))
    floats_of(arrays["scale"])[0, 0] = 0.3
    error = refused(lambda: made(path, arrays))
    assert "the scale at [0, 0] is 0.300000012, and no power of two" in error.message
    assert "scale" not in path_of(fp8(GROUPS), other, shape).copies
    assert "scale" in path_of(other, fp8(GROUPS), shape).copies


@pytest.mark.parametrize("odd", [0.0, -1.0, np.inf, np.nan])
def test_scales_that_have_to_be_positive_are_looked_at(odd: float) -> None:
    one, other, shape = fp8(BLOCKS), fp8(BLOCKS, positive=True), (9, 64)
    path, arrays = path_of(one, other, shape), given(one, shape)
    same_numbers(path, arrays, made(path, arrays))
    assert path.copies.keys() == {"weight"}
    floats_of(arrays["scale"])[0, 0] = odd
    error = refused(lambda: made(path, arrays))
    assert f"the scale at [0, 0] is {odd:.9g}, and no positive number" in error.message
