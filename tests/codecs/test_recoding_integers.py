"""Parts of integers made of others: what is refused and how, which parts are copied, in which boxes
they are computed, and what the rule's names decide.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from recoded_parts import RECODE, computed_parts

from migrate import codecs
from migrate.core.declaration import NumberFormat
from migrate.core.errors import OpError, page
from migrate.core.spec import Spec
from migrate.elements.raw import carrier
from migrate.ops.base import Loss, OneWay

Parts = dict[str, tuple[Spec, Any]]
ALL = ("weight", "scale", "shape", "zero", "group")
SYMMETRIC = ("weight", "scale", "shape")


def words(codes: Any, bits: int = 4) -> Any:
    """Codes along the first axis in 32-bit words, the first in the lowest bits."""
    per = 32 // bits
    fields = np.asarray(codes, "<u4").reshape(-1, per, codes.shape[1])
    return np.bitwise_or.reduce(fields << (np.arange(per, dtype="<u4") * bits)[:, None], 1)


def gptq(zeros: Any = None, index: Any = None, columns: int = 64, less: int = 1) -> Parts:
    """16 rows in groups of 32 columns; zeros are those of the numbers, [groups, 16]."""
    dice, groups = np.random.default_rng(2), columns // 32
    zeros = np.full((groups, 16), 8) if zeros is None else np.asarray(zeros)
    codes = dice.integers(0, 16, (columns, 16))
    scale = dice.uniform(0.01, 1, (groups, 16)).astype("<f2").view("<u2")
    packed = words(zeros.T, 4).T - np.uint32(0x11111111 * less)
    made = {
        "weight": (Spec("int32", (columns // 8, 16)), words(codes)),
        "zero": (Spec("int32", (groups, 2)), np.ascontiguousarray(packed)),
        "scale": (Spec("float16", (groups, 16)), scale),
    }
    if index is not None:
        made["group"] = Spec("int32", (columns,)), np.asarray(index, "<i4").view("<u4")
    return made


def int_pack(codes: Any, bits: int = 4, group: int = 32) -> Parts:
    codes = np.asarray(codes)
    rows, columns = codes.shape
    scale = np.linspace(0.5, 1, rows * columns // group).astype("<f2").view("<u2")
    packed = np.ascontiguousarray(words(codes.T, bits).T)
    return {
        "weight": (Spec("int32", packed.shape), packed),
        "scale": (Spec("float16", (rows, columns // group)), scale.reshape(rows, -1)),
        "shape": (Spec("int64", (2,)), np.array(codes.shape, "<i8").view("<u8")),
    }


def form(codec: str, **said: Any) -> NumberFormat:
    made: Any = codecs.get(codec)
    return NumberFormat(codec, made.Args(**said))


def settled(one: NumberFormat, parts: Parts, other: NumberFormat, named: Any = None) -> Any:
    args = RECODE.Args(from_=one, to=other)
    if named is not None:
        args = RECODE.naming(args, gives=named)
    said = {role: parts[role][1].tobytes() for role in codecs.get(one.codec).planning}
    return RECODE.settle(args, [*parts], [spec for spec, _ in parts.values()], said)


def recoded(one: NumberFormat, parts: Parts, other: NumberFormat, named: Any = None) -> Parts:
    call = settled(one, parts, other, named)
    specs, held = ([parts[role][i] for role in call.inputs] for i in (0, 1))
    made, out = computed_parts(call, specs, held)
    return dict(zip(call.outputs, zip(made, out, strict=True), strict=True))


def refused(*given: Any) -> OpError:
    with pytest.raises(OpError) as caught:
        recoded(*given)
    page(caught.value.code)
    return caught.value


V1, V2 = (form("gptq", form=word, bits=4) for word in ("v1", "v2"))
PACK = form("int-pack")


def test_a_zero_goes_only_where_it_is_the_middle() -> None:
    assert [*recoded(V1, gptq(), PACK, SYMMETRIC)] == [*SYMMETRIC]
    zeros = np.full((2, 16), 8)
    zeros[1, 5] = 7
    error = refused(V1, gptq(zeros), PACK, SYMMETRIC)
    assert error.code == "M406"
    assert "the zero of the numbers from [5, 32] on is 7, and not 8" in error.message
    assert "give the zero a name in `to`" in str(error.help)
    assert "zero" in recoded(V1, gptq(zeros), PACK, ALL)


def test_the_names_of_a_rule_say_whether_zeros_stay_and_else_the_arguments_do() -> None:
    asymmetric = form("int-pack", symmetric=False)
    given = gptq()
    assert "zero" not in settled(V1, given, PACK).outputs
    assert "zero" in settled(V1, given, asymmetric).outputs
    assert "zero" in settled(V1, given, PACK, ALL).outputs
    plain = int_pack(np.zeros((16, 64)))
    assert "zero" not in settled(PACK, plain, PACK, ALL).outputs
    made = recoded(PACK, plain, asymmetric)
    assert (made["zero"][1] == 0x88888888).all()


@pytest.mark.parametrize("bad", [0, 16])
def test_a_zero_of_v1_that_may_be_two_is_refused_unless_words_are_asked_for(bad: int) -> None:
    zeros = np.full((2, 16), 3)
    zeros[0, 9] = 0
    for to in (V2, PACK):
        error = refused(V1, gptq(zeros), to, ALL)
        assert error.code == "M406"
        assert "from [9, 0] on is stored as 15, which less 1 can be 0 or 16" in error.message
        assert "`zeros: words`" in str(error.help)
    lenient = form("gptq", form="v1", bits=4, zeros="words")
    made = recoded(lenient, gptq(zeros), V2)
    assert (made["zero"][1] == gptq(zeros, less=0)["zero"][1]).all()
    error = refused(V2, gptq(zeros, less=0), V1)
    assert "from [9, 0] on is 0, which cannot be stored less 1" in error.message
    again = recoded(V2, gptq(zeros, less=0), lenient)
    assert (again["zero"][1] == gptq(zeros)["zero"][1]).all()


def test_v1_and_v2_differ_by_one_in_whole_words_and_nothing_else_is_computed() -> None:
    given = gptq(np.arange(1, 33).reshape(2, 16) % 15 + 1, np.arange(64) // 32)
    made = recoded(V1, given, V2)
    assert (made["zero"][1] == given["zero"][1] + np.uint32(0x11111111)).all()
    for role in ("weight", "scale", "group"):
        assert made[role][1].tobytes() == given[role][1].tobytes()
    call = settled(V1, given, V2)
    specs = [given[role][0] for role in call.inputs]
    copied = {role: RECODE.copied(call, specs, n) for n, role in enumerate(call.outputs)}
    # an index of groups that there are not has to be seen
    assert copied.pop("zero") is copied.pop("group") is None
    assert all(how is not None and how[1] == () for how in copied.values())
    back = recoded(V2, made, V1)
    assert all(back[role][1].tobytes() == array.tobytes() for role, (_, array) in given.items())


def test_an_index_in_turn_is_dropped_and_made_again() -> None:
    given = gptq(index=np.arange(64) // 32)
    made = recoded(V1, given, PACK, SYMMETRIC)
    assert "group" not in made
    back = recoded(PACK, made, V1, [*given])
    assert {role: array.tobytes() for role, (_, array) in back.items()} == {
        role: array.tobytes() for role, (_, array) in given.items()
    }
    assert "group" not in recoded(PACK, made, V1, ("weight", "zero", "scale"))


def test_an_index_out_of_turn_is_carried_along_or_refused() -> None:
    index = np.arange(64) // 32
    index[3], index[40] = 1, 0
    error = refused(V1, gptq(index=index), PACK, ("weight", "scale", "shape", "zero"))
    assert error.code == "M406"
    assert "the group of column 3 is 1, that of columns in turn, 32 in each group, is 0" in (
        error.message
    )
    assert "name it in `to`" in str(error.help)
    assert "`dequantize` and `quantize`" in str(error.help)
    made = recoded(V1, gptq(index=index), PACK, ALL)
    assert (made["group"][1] == index).all()
    codec: Any = codecs.get("int-pack")
    specs, arrays = ([made[role][i] for role in codec.parts] for i in (0, 1))
    args = codec.settle(PACK.args, specs, {"shape": arrays[2].tobytes()})
    own: Any = codecs.get("gptq")
    given = [gptq(index=index)[role] for role in own.parts]
    np.testing.assert_array_equal(
        codec.reference(args, arrays, specs, "float16"),
        own.reference(V1.args, [a for _, a in given], [s for s, _ in given], "float16"),
    )


@pytest.mark.parametrize("number", [-1, 2, 2**31 - 1])
def test_an_index_beyond_the_groups_is_refused_where_it_goes_and_where_it_stays(
    number: int,
) -> None:
    index = np.arange(64) // 32
    index[63] = number
    for other, named in ((PACK, SYMMETRIC), (PACK, ALL), (V2, None)):
        error = refused(V1, gptq(index=index), other, named)
        assert error.code == "M406"
        assert f"the group of column 63 is {number}, the scale has entries 0 to 1" in error.message
        assert "damaged" in str(error.help)


def test_codes_of_eight_bits_become_four_where_all_fit() -> None:
    small = np.arange(-8, 8, dtype="i1").repeat(8).reshape(2, 64)
    scale = np.full((2, 1), 0.5, "<f4").view("<u4")
    given = {
        "weight": (Spec("int8", (2, 64)), small.view("u1")),
        "scale": (Spec("float32", (2, 1)), scale),
    }
    four = form("int-pack", bits=4)
    made = recoded(form("int8"), given, four)
    assert made["weight"][0] == Spec("int32", (2, 8))
    assert made["scale"][0] == Spec("float32", (2, 1))
    assert made["shape"][1].tolist() == [2, 64]
    back = recoded(four, made, form("int8"))
    assert {r: a.tobytes() for r, (_, a) in back.items()} == {
        r: a.tobytes() for r, (_, a) in given.items()
    }
    small[1, 7] = 8
    error = refused(form("int8"), given, four)
    assert error.code == "M406"
    assert "the number at [1, 7] has no code in int-pack: its code stands for 8" in error.message


@pytest.mark.parametrize("bits", [3, 5, 6, 7])
def test_codes_of_eight_bits_become_those_that_do_not_fill_words(bits: int) -> None:
    half = 1 << (bits - 1)
    small = np.resize(np.arange(-half, half, dtype="i1"), (3, 70))
    given = {
        "weight": (Spec("int8", (3, 70)), small.view("u1")),
        "scale": (Spec("float32", (3, 1)), np.full((3, 1), 0.5, "<f4").view("<u4")),
    }
    other = form("int-pack", bits=bits)
    made = recoded(form("int8"), given, other)
    line = sum(int(code) + half << bits * i for i, code in enumerate(small[2]))
    row = [line >> 32 * i & 0xFFFFFFFF for i in range(-(-70 * bits // 32))]
    assert made["weight"][1][2].tolist() == row
    back = recoded(form("int-pack", bits=bits, form="dense"), made, form("int8"))
    assert {r: a.tobytes() for r, (_, a) in back.items()} == {
        r: a.tobytes() for r, (_, a) in given.items()
    }


def test_coarser_scales_and_stacks_are_refused_with_their_shapes() -> None:
    given = int_pack(np.full((16, 64), 9))
    error = refused(PACK, given, form("int8", granularity="channel"))
    assert error.code == "M308"
    assert "numbers [16, 64]" in error.message
    assert "64 columns share a scale there, and 32 here" in error.message
    stack = {
        "weight": (Spec("int8", (2, 3, 8)), np.zeros((2, 3, 8), "u1")),
        "scale": (Spec("float32", (2, 3, 1)), np.zeros((2, 3, 1), "<u4")),
    }
    error = refused(form("int8"), stack, PACK)
    assert (error.code, "[2, 3, 8]" in error.message) == ("M304", True)
    error = refused(form("int8"), stack, V1)
    assert (error.code, "[2, 3, 8]" in error.message) == ("M308", True)


def test_groups_of_the_other_form_may_be_finer_or_whole_rows() -> None:
    given = int_pack(np.full((16, 64), 9), group=64)
    for group, count in ((None, 1), (-1, 1), (32, 2)):
        made = recoded(PACK, given, form("gptq", form="v2", group=group))
        assert made["scale"][0] == Spec("float16", (count, 16))
        assert (made["scale"][1] == given["scale"][1].T).all()


def test_scales_that_have_to_be_positive_are_looked_at() -> None:
    lenient = form("int-pack", non_finite="keep")
    given = int_pack(np.full((16, 64), 9))
    assert recoded(lenient, given, PACK)["scale"][1].tobytes() == given["scale"][1].tobytes()
    given["scale"][1][4, 1] = 0x8000
    assert recoded(lenient, given, lenient)["scale"][1][4, 1] == 0x8000
    error = refused(lenient, given, form("int8"))
    assert "the scale of the numbers from [4, 32] on is -0" in error.message


def test_what_only_moves_is_copied() -> None:
    given = gptq(less=0)
    call = settled(V2, given, PACK, ("weight", "scale", "shape", "zero"))
    specs = [given[role][0] for role in call.inputs]
    copied = {role: RECODE.copied(call, specs, n) for n, role in enumerate(call.outputs)}
    turned = (("permute", (1, 0)),)
    assert {role: how and how[1] for role, how in copied.items()} == {
        "weight": turned, "scale": turned, "zero": turned, "shape": None,
    }  # fmt: skip
    assert RECODE.foreseen(call, specs, call.outputs.index("shape")) == (
        (16).to_bytes(8, "little") + (64).to_bytes(8, "little")
    )


@pytest.mark.parametrize("name", ["gptq", "awq", "int4-rows", "int8", "int-pack", "gguf"])
def test_boxes_are_those_of_the_whole(name: str) -> None:
    """Each output in boxes cut anywhere, of the boxes of the inputs that are asked for."""
    from test_recoding_pairs import pairs_of

    dice, seen = np.random.default_rng(7), 0
    for other in ("int-pack", "int8", "gptq", "awq", "gguf"):
        for _, parts, call in pairs_of(name, other):
            if isinstance(call, str):
                continue
            specs, held = ([parts[role][i] for role in call.inputs] for i in (0, 1))
            try:
                made, whole = computed_parts(call, specs, held)
            except OpError:
                continue
            for number, (spec, array) in enumerate(zip(made, whole, strict=True)):
                for _ in range(3):
                    box = tuple(
                        (int(low), int(dice.integers(low, n + 1)))
                        for n in spec.shape
                        for low in [dice.integers(0, n + 1)]
                    )
                    needed = RECODE.needs(call, specs, number, box)
                    cut = [
                        a[tuple(slice(*s) for s in b)] for a, b in zip(held, needed, strict=True)
                    ]
                    out = np.full([b - a for a, b in box], 77, carrier(spec.dtype))
                    RECODE.compute(call, cut, specs, number, box, out)
                    wanted = array[tuple(slice(*side) for side in box)]
                    assert out.tobytes() == wanted.tobytes(), (call, call.outputs[number], box)
                    seen += 1
                assert len(RECODE.grain(call, specs, number)) == len(spec.shape)
    assert seen > 100


def test_nothing_is_lost_and_the_way_back_is_there_where_forms_say_what_it_needs() -> None:
    args = RECODE.Args(from_=V1, to=PACK)
    assert RECODE.loss(args) is Loss.LOSSLESS
    back = RECODE.invert(args)
    assert (back.op, back.args.from_, back.args.to) == ("recode", PACK, V1)
    known = RECODE.Args(from_=form("int-pack", bits=4), to=form("int8"))
    assert RECODE.invert(known).op == "recode"
    open_bits = RECODE.invert(RECODE.Args(from_=PACK, to=form("int8")))
    assert isinstance(open_bits, OneWay)
    assert "how many bits" in open_bits.because


def test_symmetric_drops_zeros_though_they_have_a_name() -> None:
    symmetric = form("int-pack", symmetric=True)
    assert "zero" not in settled(V1, gptq(), symmetric, ALL).outputs
    error = refused(V1, gptq(np.full((2, 16), 7)), symmetric, ALL)
    assert "is 7, and not 8, the middle of the codes" in error.message


@pytest.mark.parametrize(
    ("columns", "rows"), [(512, 8192), (4096, 8192), (16384, 2048), (1 << 20, 32)]
)
def test_what_lies_in_columns_is_read_in_stretches_as_long_as_boxes_permit(
    columns: int, rows: int
) -> None:
    """A box of fewer rows would read the same stretches of the file again for each."""
    parts = {
        "weight": Spec("int32", (columns, 1024)),
        "zero": Spec("int32", (columns // 128, 1024)),
        "scale": Spec("float16", (columns // 128, 8192)),
    }
    args = RECODE.Args(from_=form("awq"), to=PACK)
    call = RECODE.settle(args, [*parts], [*parts.values()], {})
    assert RECODE.grain(call, [*parts.values()], call.outputs.index("weight")) == (rows, 1)
