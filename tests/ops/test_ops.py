"""The kit over every op, and what is particular to some."""

from __future__ import annotations

import subprocess
import sys

import pytest

from migrate import ops
from migrate.core.errors import page
from migrate.core.spec import spec
from migrate.core.view import filled, is_whole, stored
from migrate.ops.base import Loss, OneWay, Op, OpCall, OpError
from migrate.testing import opkit

LAYOUT = [
    "concat", "copy", "drop", "fill", "flip", "pad", "permute", "rearrange", "reshape", "roll",
    "resize", "same", "slice", "split", "squeeze",
    "stack", "tie", "transpose", "unbind", "unsqueeze",
]  # fmt: skip


def call(name: str, *shapes: tuple[int, ...], parts: int = 1, **written: object) -> list:
    op = ops.get(name)
    return op.trace(
        opkit.arguments(op, written), [stored(i, s) for i, s in enumerate(shapes)], parts
    )


def refusal(name: str, *shapes: tuple[int, ...], parts: int = 1, **written: object) -> OpError:
    with pytest.raises(OpError) as caught:
        call(name, *shapes, parts=parts, **written)
    page(caught.value.code)
    return caught.value


def inverse(name: str, enumerated: bool = False, **written: object) -> OpCall | OneWay:
    op = ops.get(name)
    return op.invert(opkit.arguments(op, written), enumerated=enumerated)


def loss(name: str, **written: object) -> Loss:
    op = ops.get(name)
    return op.loss(opkit.arguments(op, written))


@pytest.mark.parametrize(("name", "number"), opkit.cases(LAYOUT))
def test_a_sample_traces_as_its_eager_twin_and_back(name, number):
    opkit.check_sample(name, number)


@pytest.mark.parametrize("name", LAYOUT)
def test_an_op_is_described(name):
    opkit.check_description(name)


def test_all_layout_ops_are_found_by_their_file_names():
    assert set(LAYOUT) <= set(ops.names())
    assert not [n for n in ops.names() if n.startswith("_")]


def test_importing_ops_imports_no_op_and_nothing_heavy():
    code = (
        "import sys, migrate.ops as o; o.registry.builtin(); heavy = {'numpy', 'torch', "
        "'pydantic', 'yaml', 'importlib.metadata'};"
        "print(sorted(heavy & set(sys.modules)), sorted(m for m in sys.modules if "
        "m.startswith('migrate.ops.')))"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        == "[] ['migrate.ops.base']\n"
    )


def test_layout_ops_trace_without_numpy():
    code = (
        "import sys; from migrate import ops; [ops.get(n) for n in ops.registry.builtin()];"
        "from migrate.core.view import stored; op = ops.get('pad'); args = op.Args(dim=0, size=4);"
        "op.trace(args, [stored(0, (2,))]); print(sorted({'numpy', 'torch', 'pydantic', 'yaml'} & "
        "set(sys.modules)))"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        == "[]\n"
    )


# the kit must be able to fail


class Wrong(Op):
    name = "wrong"
    summary = "reverses, but says it does nothing"
    Args = ops.get("flip").Args

    def trace(self, args, views, parts=1):
        return ops.get("flip").trace(args, views)

    def eager(self, args, arrays, parts=1, dtype=""):
        return list(arrays)

    def invert(self, args, enumerated=False):
        return OpCall("squeeze", ops.get("squeeze").Args(dim=0))


def test_the_kit_notices_a_twin_that_differs():
    with pytest.raises(AssertionError, match="traced and eager differ"):
        opkit.check_twin(Wrong(), Wrong.Args(dim=0), [(3,)])


def test_the_kit_notices_an_inverse_that_does_not_bring_the_input_back():
    with pytest.raises(AssertionError, match=r"makes \(3,\) of input 0, \(1, 3\)"):
        opkit.check_inverse(Wrong(), Wrong.Args(dim=0), [(1, 3)])


def test_the_kit_notices_an_axis_that_is_not_refused():
    class Lenient(Wrong):
        def trace(self, args, views, parts=1):
            return list(views)

    with pytest.raises(AssertionError, match="was not refused"):
        opkit.check_refusals(Lenient(), Wrong.Args(dim=0), [(3,)])


# messages


def test_stack_names_both_shapes():
    error = refusal("stack", (2, 3), (2, 3), (2, 4), over="e")
    assert (error.code, error.message) == (
        "M301",
        "stack over {e}: tensor 0 is [2, 3] and tensor 2 is [2, 4]; they differ",
    )


def test_concat_without_sizes_names_all_part_sizes():
    error = refusal("concat", (4, 2), (1, 2), (1, 2), over="w")
    assert error.code == "M301"
    assert (
        error.message
        == "concat over {w}: the parts have [4, 1, 1] elements along axis 0; without `sizes` they "
        "must be equal"
    )


def test_concat_takes_exactly_its_sizes():
    assert call("concat", (4, 2), (1, 2), over="w", sizes=[4, 1])[0].shape == (5, 2)
    assert refusal("concat", (4, 2), (1, 2), over="w", sizes=[1, 4]).code == "M301"
    assert refusal("concat", (4, 2), (1, 2), over="w", sizes=[5]).code == "M305"


def test_concat_parts_may_not_differ_elsewhere():
    error = refusal("concat", (4, 2), (4, 3), over="w")
    assert error.code == "M301"
    assert "[4, 2]" in error.message
    assert "other than 0" in error.message


@pytest.mark.parametrize("name", ["stack", "concat", "same"])
def test_joined_tensors_agree_in_dtype(name):
    op = ops.get(name)
    with pytest.raises(OpError) as caught:
        op.infer(
            op.Args(over="w"),
            [spec("bfloat16", (2,)), spec("bfloat16", (2,)), spec("float32", (2,))],
        )
    assert caught.value.code == "M303"
    assert (
        caught.value.message == f"{name} over {{w}}: tensor 0 is bfloat16 and tensor 2 is float32"
    )


def test_split_names_the_remainder():
    error = refusal("split", (7,), into="r", count=2, parts=2)
    assert (error.code, error.message) == (
        "M302",
        "split into {r}: axis 0 has 7 elements, not divisible into 2 equal parts",
    )


def test_split_sizes_must_make_up_the_axis():
    error = refusal("split", (2, 7), into="w", dim=-1, sizes=[4, 2], parts=2)
    assert (error.code, error.message) == (
        "M301",
        "split into {w}: sizes [4, 2] add up to 6, axis 1 has 7 elements",
    )
    assert refusal("split", (7,), into="w", sizes=[9, -2], parts=2).code == "M301"


@pytest.mark.parametrize("name", ["split", "copy", "tie"])
def test_parts_of_an_int_capture_need_a_count(name):
    op = ops.get(name)
    assert op.parts(op.Args(into="r", count=4), (8,), None) == 4
    assert op.parts(op.Args(into="r"), (8,), 2) == 2
    with pytest.raises(OpError) as caught:
        op.parts(op.Args(into="r"), (8,), None)
    assert (caught.value.code, caught.value.help) == ("M305", "write `count`")
    with pytest.raises(OpError, match=r"values are 2, count says 4"):
        op.parts(op.Args(into="r", count=4), (8,), 2)


def test_unbind_counts_the_axis():
    op = ops.get("unbind")
    assert op.parts(op.Args(into="e", dim=1), (2, 5), None) == 5
    with pytest.raises(OpError, match=r"axis 1 has 5 elements, the values of \{e\} are 3"):
        op.parts(op.Args(into="e", dim=1), (2, 5), 3)
    assert refusal("unbind", (2, 5), into="e", dim=2).code == "M304"
    assert "has 0 elements" in refusal("unbind", (0, 5), into="e", parts=0).message


def test_an_axis_is_counted_where_the_op_stands():
    error = refusal("stack", (2,), (2,), over="e", dim=2)
    assert error.message == "stack: there is no axis 2 in a result of rank 2, shape [2]"
    error = refusal("flip", (), dim=0)
    assert (error.code, error.notes) == ("M304", ("a scalar has no axes",))
    assert refusal("permute", (2, 3), dims=[0, 2, 1]).code == "M304"


def test_squeeze_refuses_an_axis_that_holds_something():
    error = refusal("squeeze", (2, 3), dim=1)
    assert (error.code, error.message) == (
        "M301",
        "squeeze: axis 1 has 3 elements, only an axis of 1 can be removed; shape [2, 3]",
    )


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("transpose", {"dims": [0]}),
        ("permute", {"dims": [0, 0]}),
        ("permute", {"dims": [0, 5]}),
        ("permute", {"dims": [0, -2]}),
        ("reshape", {"to": [-1, -1]}),
        ("reshape", {"to": [4], "from": [-2]}),
        ("pad", {"dim": 0}),
        ("pad", {"dim": 0, "size": 4, "multiple_of": 2}),
        ("pad", {"dim": 0, "multiple_of": 0}),
        ("pad", {"dim": 0, "size": 4, "start": -1}),
        ("pad", {"dim": 0, "size": 4, "of": 5}),
        ("slice", {"dim": 0, "start": -1}),
        ("slice", {"dim": 0, "start": 3, "stop": 2}),
        ("slice", {"dim": 0, "stop": 3, "of": 2}),
        ("stack", {"over": "e", "count": 0}),
        ("split", {"into": "e", "sizes": [1, -1]}),
        ("fill", {"value": 0, "dtype": "int46", "shape": []}),
        ("fill", {"value": 0, "dtype": "int64", "shape": [-1]}),
    ],
)
def test_arguments_that_no_tensor_could_satisfy_are_wrong_before_any_is_seen(name, written):
    op = ops.get(name)
    with pytest.raises(OpError) as caught:
        op.validate(opkit.arguments(op, written))
    assert caught.value.code == "M308"
    assert page("M308").exit == 2


def test_the_state_before_is_checked():
    assert (
        refusal("slice", (8,), dim=0, stop=4, of=9).message
        == "slice: axis 0 has 8 elements, `of` says 9"
    )
    assert refusal("pad", (8,), dim=0, size=12, of=9).code == "M307"
    error = refusal("reshape", (2, 3), to=[6], **{"from": [3, -1]})
    assert (error.code, error.message) == (
        "M307",
        "reshape: the shape is [2, 3], `from` says [3, -1]",
    )


def test_a_slice_lies_within_its_axis():
    assert (
        refusal("slice", (4, 2), dim=0, start=2, stop=5).message
        == "slice: 2 to 5 does not lie in axis 0 of 4 elements, shape [4, 2]"
    )


def test_pad_does_not_shrink():
    assert (
        refusal("pad", (8,), dim=0, size=6).message
        == "pad: axis 0 has 8 elements, more than size 6; shape [8]"
    )
    assert refusal("pad", (8,), dim=0, start=2, size=9).code == "M301"


def test_reshape_says_what_does_not_divide():
    assert refusal("reshape", (2, 3), to=[7]).message == "reshape: [2, 3] has 6 elements, [7] has 7"
    assert refusal("reshape", (2, 3), to=[4, -1]).code == "M302"
    assert refusal("reshape", (0, 3), to=[0, -1]).code == "M302"


def test_a_value_must_be_exact_in_the_dtype():
    pad, fill = ops.get("pad"), ops.get("fill")
    with pytest.raises(OpError) as caught:
        pad.infer(pad.Args(dim=0, size=4, value=0.1), [spec("float32", (2,))])
    assert caught.value.code == "M303"
    with pytest.raises(OpError) as caught:
        fill.infer(fill.Args(value=float("inf"), dtype="int8", shape=()), [spec("int64", ())])
    assert caught.value.code == "M303"
    assert pad.infer(pad.Args(dim=0, size=4, value=0.5), [spec("float32", (2,))]) is None


def test_fill_takes_torchs_other_spellings():
    fill = ops.get("fill")
    assert fill.infer(fill.Args(value=0, dtype="half", shape=(2,)), [spec("int64", ())]) == [
        spec("float16", (2,))
    ]
    assert call("fill", (3,), value=0, dtype="long", shape=[2]) == [filled((2,), 0)]


# checks on values


def test_same_asks_for_equal_tensors_unless_they_are_one():
    same = ops.get("same")
    views = [stored(0, (2,)), stored(1, (2,))]
    (check,) = same.checks(same.Args(over="r"), views)
    assert (check.kind, check.views, check.value) == ("equal", tuple(views), None)
    assert same.checks(same.Args(over="r"), [views[0], views[0]]) == []


def test_slice_with_a_value_asks_for_it_in_all_that_it_cuts():
    op = ops.get("slice")
    args = op.Args(dim=1, start=1, stop=3, of=5, value=0)
    (check,) = op.checks(args, [stored(0, (2, 5))])
    assert (check.kind, check.value, [v.shape for v in check.views]) == (
        "filled",
        0,
        [(2, 1), (2, 2)],
    )
    assert op.checks(op.Args(dim=1, start=1), [stored(0, (2, 5))]) == []
    assert op.checks(op.Args(dim=1, stop=5, of=5, value=0), [stored(0, (2, 5))]) == []


# losses and inverses


def test_what_slice_cuts_is_lost_unless_it_is_known():
    assert loss("slice", dim=0, stop=3, of=5, value=0) is Loss.LOSSLESS
    assert loss("slice", dim=0, stop=3, of=5) is Loss.DESTRUCTIVE
    assert loss("slice", dim=0, stop=3, value=0) is Loss.DESTRUCTIVE
    assert loss("slice", dim=0, stop=3) is Loss.DESTRUCTIVE
    assert loss("slice", dim=0, stop=5, of=5) is Loss.LOSSLESS
    assert loss("slice", dim=0, of=5) is Loss.LOSSLESS
    assert loss("drop", why="old") is Loss.DESTRUCTIVE
    assert loss("pad", dim=0, size=4) is Loss.LOSSLESS


def test_resize_cuts_or_adds_at_the_end_and_undoes_itself():
    assert loss("resize", dim=0, size=3, of=5) is Loss.LOSSLESS
    step = inverse("resize", dim=0, size=3, of=5, value=1)
    assert step == OpCall("resize", ops.get("resize").Args(dim=0, size=5, of=3, value=1))
    assert isinstance(ops.get("resize").invert(ops.get("resize").Args(dim=0, size=3)), OneWay)
    assert refusal("resize", (8,), dim=0, size=4, of=9).code == "M307"
    rows = opkit.elements((3, 2), "int32")
    for size, due in ((2, rows[:2].tolist()), (4, [*rows.tolist(), [7, 7]])):
        args = ops.get("resize").Args(dim=0, size=size, of=3, value=7)
        (view,) = ops.get("resize").trace(args, [stored(0, (3, 2))])
        assert opkit.realise(view, [rows], "int32").tolist() == due


def test_slice_and_pad_undo_each_other():
    step = inverse("slice", dim=-1, start=2, stop=5, of=8, value=1, only={"w": ["q"]})
    assert step == OpCall(
        "pad", ops.get("pad").Args(dim=-1, start=2, size=8, of=3, value=1, only={"w": ["q"]})
    )
    step = inverse("pad", dim=0, start=1, multiple_of=4, of=6, value=1)
    assert step == OpCall("slice", ops.get("slice").Args(dim=0, start=1, stop=7, of=8, value=1))


@pytest.mark.parametrize(
    ("name", "written", "named"),
    [
        ("slice", {"dim": 0, "stop": 2}, "`of`"),
        ("slice", {"dim": 0, "stop": 2, "value": 0}, "`of`"),
        ("slice", {"dim": 0, "stop": 2, "of": 4}, "`value`"),
        ("pad", {"dim": 0, "size": 4}, "`of`"),
        ("reshape", {"to": [4]}, "`from`"),
        ("concat", {"over": "r"}, "`count`"),
        ("same", {"over": "r"}, "`count`"),
        ("rearrange", {"pattern": "h d i -> (h d) i"}, "{h: …}"),
        ("rearrange", {"pattern": "a b c -> (a b c)", "axes": {"b": 2}}, "{a: …}"),
    ],
)
def test_an_inverse_that_is_missing_names_the_argument_that_would_make_it(name, written, named):
    answer = inverse(name, **written)
    assert isinstance(answer, OneWay)
    assert named in answer.help


def test_a_capture_that_lists_its_values_needs_no_count_backwards():
    assert inverse("concat", enumerated=True, over="w") == OpCall(
        "split", ops.get("split").Args(into="w")
    )
    assert inverse("same", enumerated=True, over="w") == OpCall(
        "copy", ops.get("copy").Args(into="w")
    )
    assert inverse("concat", over="r", sizes=[1, 2]) == OpCall(
        "split", ops.get("split").Args(into="r", sizes=(1, 2))
    )
    assert inverse("stack", over="e", count=4, start=1) == OpCall(
        "unbind", ops.get("unbind").Args(into="e", count=4, start=1)
    )


def test_a_pair_of_inverse_ops_leaves_nothing_behind():
    views = call("unbind", (4, 2, 3), into="e", dim=1, parts=2)
    (back,) = ops.get("stack").trace(ops.get("stack").Args(over="e", dim=1), views)
    assert is_whole(back)
