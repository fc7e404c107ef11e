"""`shape-invisible`: an op is tested if some test of its file would fail with a near mistake in its
place.
"""

from __future__ import annotations

import pytest
from written_rules import Lineage

HEAD = "rules:\n  - {name: r, from: %s, to: %s, via: [%s]}\ntests:\n  - name: t\n    given:\n"


def file(
    source: str,
    target: str,
    via: str,
    given: dict[str, str],
    expect: dict[str, str],
    extra: str = "",
) -> str:
    """A rule file with one rule and one test."""
    lines = [extra + HEAD % (source, target, via)]
    lines += [f"      {key}: {{{tensor}}}\n" for key, tensor in given.items()]
    lines += ["    expect:\n", *(f"      {key}: {{{tensor}}}\n" for key, tensor in expect.items())]
    return "".join(lines)


def invisible(lineage: Lineage, body: str) -> list[str]:
    lineage.rules(body)
    return [d.message for d in lineage.found("M620")]


CONCAT = ('"old.{i:int}.{w:a|b}"', '"new.{i}.w"', "{concat: {over: w}}")
PAIR = {"old.0.a": "shape: [1, 2], fill: 1", "old.0.b": "shape: [1, 2], fill: 2"}


def test_values_of_parts_that_differ_show_the_order_of_a_concat(lineage: Lineage) -> None:
    assert invisible(lineage, file(*CONCAT, PAIR, {"new.0.w": "values: [[1, 1], [2, 2]]"})) == []


@pytest.mark.parametrize(
    ("given", "expect"),
    [
        (PAIR, {"new.0.w": "shape: [2, 2]"}),
        (PAIR, {"new.0.w": "shape: [2, 2], slices: {}"}),
        (dict.fromkeys(PAIR, "shape: [1, 2], fill: 1"), {"new.0.w": "values: [[1, 1], [1, 1]]"}),
        # both parts have a 7 where the slice looks
        (
            {"old.0.a": "values: [[7, 1]]", "old.0.b": "values: [[7, 2]]"},
            {"new.0.w": 'slices: {"0, 0": 7}'},
        ),
    ],
)
def test_what_does_not_tell_the_parts_apart_does_not_show_their_order(
    lineage: Lineage, given: dict[str, str], expect: dict[str, str]
) -> None:
    (message,) = invisible(lineage, file(*CONCAT, given, expect))
    assert (
        message == "rule `r`: no test of this file would notice if concat had a and b interchanged"
    )


def test_a_slice_that_lies_in_one_part_shows_the_order(lineage: Lineage) -> None:
    assert invisible(lineage, file(*CONCAT, PAIR, {"new.0.w": 'slices: {"1": [2, 2]}'})) == []


def test_of_three_parts_each_neighbour_must_be_told_from_the_next(lineage: Lineage) -> None:
    rule = (
        '"old.{i:int}.{w:q|k|v}"',
        '"new.{i}.w"',
        "{concat: {over: w, sizes: {q: 2, k: 1, v: 1}}}",
    )
    given = {
        "old.0.q": "shape: [2], fill: 1",
        "old.0.k": "shape: [1], fill: 2",
        "old.0.v": "shape: [1], fill: 3",
    }
    assert invisible(lineage, file(*rule, given, {"new.0.w": "values: [1, 1, 2, 3]"})) == []
    (message,) = invisible(
        lineage,
        file(
            *rule, given | {"old.0.v": "shape: [1], fill: 2"}, {"new.0.w": "values: [1, 1, 2, 2]"}
        ),
    )
    assert "k and v interchanged" in message


def test_the_order_of_numbers_needs_no_test(lineage: Lineage) -> None:
    rule = ('"old.{i:int}.w"', "new.0.w", "{stack: {over: i, count: 2}}")
    given = {"old.0.w": "shape: [3], fill: 1", "old.1.w": "shape: [3], fill: 1"}
    assert invisible(lineage, file(*rule, given, {"new.0.w": "shape: [2, 3]"})) == []


def test_split_in_parts_of_sizes_that_differ_can_still_be_cut_in_the_wrong_order(
    lineage: Lineage,
) -> None:
    rule = ("old.0.w", '"new.{w:q|k}.w"', "{split: {into: w, sizes: {q: 2, k: 1}}}")
    given = {"old.0.w": "values: [1, 2, 3]"}
    assert invisible(
        lineage, file(*rule, given, {"new.q.w": "shape: [2]", "new.k.w": "shape: [1]"})
    )
    assert invisible(lineage, file(*rule, given, {"new.k.w": "values: [3]"})) == []


def test_the_shape_shows_a_transpose_unless_it_is_square(lineage: Lineage) -> None:
    rule = ("old.0.w", "new.0.w", "{transpose: {dims: [0, 1]}}")
    assert (
        invisible(lineage, file(*rule, {"old.0.w": "shape: [2, 3]"}, {"new.0.w": "shape: [3, 2]"}))
        == []
    )
    (message,) = invisible(
        lineage, file(*rule, {"old.0.w": "shape: [2, 2], fill: iota"}, {"new.0.w": "shape: [2, 2]"})
    )
    assert "left the axes as they are" in message
    assert (
        invisible(
            lineage,
            file(
                *rule,
                {"old.0.w": "shape: [2, 2], fill: iota"},
                {"new.0.w": "values: [[0, 2], [1, 3]]"},
            ),
        )
        == []
    )


def test_an_output_that_the_test_does_not_name_shows_nothing(lineage: Lineage) -> None:
    body = file(
        "old.0.w",
        "new.0.w",
        "{transpose: {dims: [0, 1]}}",
        {"old.0.w": "shape: [2, 3]", "x": "shape: [1]"},
        {"x": "shape: [1]"},
        "keep: [x]\n",
    )
    assert invisible(lineage, body)


ROPE = (
    "old.0.w",
    "new.0.w",
    '{rearrange: {pattern: "(h d two) i -> (h two d) i", axes: {h: %d, two: 2}}}',
)


def test_rope_needs_values_and_more_than_one_head(lineage: Lineage) -> None:
    one, two = ((ROPE[0], ROPE[1], ROPE[2] % heads) for heads in (1, 2))
    iota = {"old.0.w": "shape: [8, 1], fill: iota"}
    assert (
        "(h d two) i -> (h d two) i"
        in invisible(lineage, file(*two, iota, {"new.0.w": "shape: [8, 1]"}))[0]
    )
    assert (
        invisible(
            lineage,
            file(*two, iota, {"new.0.w": "values: [[0], [2], [1], [3], [4], [6], [5], [7]]"}),
        )
        == []
    )
    (message,) = invisible(
        lineage, file(*one, iota, {"new.0.w": "values: [[0], [2], [4], [6], [1], [3], [5], [7]]"})
    )
    assert "(two h d) i" in message


def test_splitting_an_axis_is_shown_by_the_shape_unless_both_parts_are_equal(
    lineage: Lineage,
) -> None:
    rule = ("old.0.w", "new.0.w", '{rearrange: {pattern: "(g x) -> g x", axes: {g: 2}}}')
    assert (
        invisible(lineage, file(*rule, {"old.0.w": "shape: [6]"}, {"new.0.w": "shape: [2, 3]"}))
        == []
    )
    assert invisible(lineage, file(*rule, {"old.0.w": "shape: [4]"}, {"new.0.w": "shape: [2, 2]"}))


@pytest.mark.parametrize(
    ("via", "given", "expect"),
    [
        ("{flip: {dim: 0}}", "values: [1, 2]", "values: [2, 1]"),
        ("{roll: {dim: 0, shift: 1}}", "values: [1, 2, 3]", "values: [3, 1, 2]"),
        (
            "{permute: {dims: [1, 2, 0]}}",
            "shape: [2, 2, 2], fill: iota",
            "values: [[[0, 4], [1, 5]], [[2, 6], [3, 7]]]",
        ),
        ("{pad: {dim: 0, size: 3, of: 2, value: 9}}", "values: [1, 2]", "values: [1, 2, 9]"),
        ("{fill: {value: 3, dtype: float32, shape: [1]}}", "values: [1]", "values: [3]"),
    ],
)
def test_an_op_that_its_shape_hides_needs_values(
    lineage: Lineage, via: str, given: str, expect: str
) -> None:
    rule = ("old.0.w", "new.0.w", via)
    assert invisible(lineage, file(*rule, {"old.0.w": given}, {"new.0.w": expect})) == []
    assert invisible(lineage, file(*rule, {"old.0.w": given}, {"new.0.w": "dtype: float32"}))


INTO = ('"old.{i:int}.w"', "new.0.w", "{stack: {over: i, count: 2, dim: %d}}")
OUT_OF = ("old.0.w", '"new.{i:int}.w"', "{unbind: {into: i, count: 2, dim: %d}}")
ONE = ("old.0.w", "new.0.w", "{%s}")


@pytest.mark.parametrize(
    ("rule", "via", "given", "expect", "mistake"),
    [
        (INTO, 1, {"old.0.w": "values: [1, 2]", "old.1.w": "values: [3, 4]"},
        {"new.0.w": "shape: [2, 2]"}, "stack had `dim: 0`"),
        (INTO, -1, {"old.0.w": "values: [1, 2]", "old.1.w": "values: [3, 4]"},
        {"new.0.w": "shape: [2, 2]"}, "stack had `dim: -2`"),
        (INTO, 1, {"old.0.w": "values: [1, 2]", "old.1.w": "values: [3, 4]"},
        {"new.0.w": "values: [[1, 3], [2, 4]]"}, None),
        (INTO, 1, {"old.0.w": "shape: [3]", "old.1.w": "shape: [3]"}, {"new.0.w": "shape: [3, 2]"},
        None),
        (OUT_OF, 1, {"old.0.w": "values: [[1, 2], [3, 4]]"},
        {"new.0.w": "shape: [2]", "new.1.w": "shape: [2]"}, "unbind had `dim: 0`"),
        (OUT_OF, 1, {"old.0.w": "values: [[1, 2], [3, 4]]"},
        {"new.0.w": "values: [1, 3]", "new.1.w": "shape: [2]"}, None),
        # along the other axis there would be three keys
        (OUT_OF, 0, {"old.0.w": "shape: [2, 3]"}, {"new.0.w": "fill: 0", "new.1.w": "fill: 0"},
        None),
        (ONE, "flip: {dim: 0}", {"old.0.w": "values: [[0, 1], [1, 0]]"},
        {"new.0.w": "values: [[1, 0], [0, 1]]"}, "flip had `dim: 1`"),
        (ONE, "flip: {dim: -1}", {"old.0.w": "values: [[0, 1], [1, 0]]"},
        {"new.0.w": "values: [[1, 0], [0, 1]]"}, "flip had `dim: -2`"),
        (ONE, "flip: {dim: 0}", {"old.0.w": "values: [[0, 1], [2, 3]]"},
        {"new.0.w": "values: [[2, 3], [0, 1]]"}, None),
        (ONE, "flip: {dim: -1}", {"old.0.w": "values: [1, 2]"}, {"new.0.w": "values: [2, 1]"},
        None),
        (ONE, "roll: {dim: 0, shift: 1}", {"old.0.w": "values: [1, 2]"},
        {"new.0.w": "values: [2, 1]"}, "roll had `shift: -1`"),
        (ONE, "roll: {dim: 0, shift: 1}", {"old.0.w": "values: [[0, 1, 2], [1, 2, 0], [2, 0, 1]]"},
         {"new.0.w": "values: [[2, 0, 1], [0, 1, 2], [1, 2, 0]]"}, "roll had `dim: 1`"),
        (ONE, "transpose: {dims: [0, 1]}", {"old.0.w": "shape: [2, 2, 2], fill: iota"},
         {"new.0.w": 'slices: {"0, 0": [0, 1], "0, 1, 0": 4}'}, None),
        (ONE, "transpose: {dims: [0, 1]}",
        {"old.0.w": "values: [[[0, 0], [0, 0]], [[1, 0], [0, 0]]]"},
         {"new.0.w": 'slices: {"0, 1, 0": 1, "0, 0, 0": 0}'}, None),
        (ONE, "transpose: {dims: [0, 1]}",
        {"old.0.w": "values: [[[0, 1], [1, 0]], [[1, 0], [0, 0]]]"},
         {"new.0.w": "values: [[[0, 1], [1, 0]], [[1, 0], [0, 0]]]"}, "transpose left the axes"),
        # what follows hides the axis
        (ONE, 'slice: {dim: 0, stop: 1}}, {reshape: {to: [-1]}',
        {"old.0.w": "values: [[1, 1, 2], [1, 5, 6], [2, 6, 7]]"},
         {"new.0.w": "values: [1, 1, 2]"}, "slice had `dim: 1`"),
    ],
)  # fmt: skip
def test_an_axis_is_told_from_its_neighbour(
    lineage: Lineage,
    rule: tuple[str, str, str],
    via: object,
    given: dict[str, str],
    expect: dict[str, str],
    mistake: str | None,
) -> None:
    source, target, steps = rule
    messages = invisible(
        lineage, file(source, target, steps % via, given, expect, "why: of the kernels\n")
    )
    assert [m.partition("if ")[2][: len(mistake or "")] for m in messages] == (
        [mistake] if mistake else []
    )


@pytest.mark.parametrize(("shift", "found"), [("$half", []), ("2", ["`shift: -2`"])])
def test_half_a_turn_that_a_param_says_is_the_same_both_ways(
    lineage: Lineage, shift: str, found: list[str]
) -> None:
    rule = ("old.0.w", "new.0.w", f"{{roll: {{dim: 0, shift: {shift}}}}}")
    body = file(
        *rule,
        {"old.0.w": "values: [1, 2, 3, 4]"},
        {"new.0.w": "values: [3, 4, 1, 2]"},
        "params: {half: {type: int}}\n",
    )
    lineage.rules(body.replace("    given:\n", "    params: {half: 2}\n    given:\n"))
    assert [d.message.rpartition(" had ")[2] for d in lineage.found("M620")] == found


def test_a_mutant_is_made_with_the_params_of_the_test(lineage: Lineage) -> None:
    body = file(
        "old.0.w",
        "new.0.w",
        "{flip: {dim: $d}}",
        {"old.0.w": "values: [[1, 2], [3, 4]]"},
        {"new.0.w": "values: [[2, 1], [4, 3]]"},
        "params: {d: {type: int}}\n",
    )
    lineage.rules(body.replace("    given:\n", "    params: {d: 1}\n    given:\n"))
    assert lineage.found("M620") == []


def test_a_step_that_no_param_suits_is_no_reason_to_stop(lineage: Lineage) -> None:
    given, expect = {"old.0.w": "shape: [8]"}, {"new.0.w": "shape: [8]"}
    via = '{rearrange: {pattern: "h d -> h", axes: {h: $h}}}'
    body = file("old.0.w", "new.0.w", via, given, expect, "params: {h: {type: int, default: 2}}\n")
    lineage.rules(body)
    (finding,) = lineage.found("M620", "M621", "M622", "M632")
    assert (finding.code, "axis d does not stand on the right" in finding.message) == ("M621", True)
    lineage.rules(body.partition("tests:")[0])
    assert [d.code for d in lineage.found("M620", "M621", "M622", "M632")] == ["M622"]


def test_a_test_that_contradicts_itself_is_no_reason_to_stop(lineage: Lineage) -> None:
    assert invisible(
        lineage,
        file(
            *TRANSPOSED,
            {**SQUARE, "x": "values: [1]"},
            {"new.0.w": "shape: [2, 2], same_as: x"},
            "keep: [x]\n",
        ),
    )


TRANSPOSED = ("old.0.w", "new.0.w", "{transpose: {dims: [0, 1]}}")
SQUARE = {"old.0.w": "values: [[1, 2], [3, 4]]"}


@pytest.mark.parametrize(
    ("rtol", "seen"),
    [
        ("0", True),
        ("0.001", True),
        ("0.49", True),
        ("0.5", False),
        ("10", False),
        ("1.0e+300", False),
    ],
)
@pytest.mark.parametrize("via", ["", "{cast: {to: float64, from: float32}}, "])
def test_a_tolerance_that_takes_the_untransposed_numbers_hides_the_transpose(
    lineage: Lineage, via: str, rtol: str, seen: bool
) -> None:
    rule = (*TRANSPOSED[:2], via + TRANSPOSED[2])
    messages = invisible(
        lineage, file(*rule, SQUARE, {"new.0.w": f"values: [[1, 3], [2, 4]], rtol: {rtol}"})
    )
    assert bool(messages) is not seen


@pytest.mark.parametrize(("rtol", "seen"), [("0.1", True), ("1", False)])
def test_a_tolerance_that_takes_zeros_says_nothing_of_what_is_computed(
    lineage: Lineage, rtol: str, seen: bool
) -> None:
    rule = ("old.0.w", "new.0.w", "{affine: {mul: 4}}")
    assert (
        bool(
            invisible(
                lineage,
                file(*rule, SQUARE, {"new.0.w": f"values: [[4, 8], [12, 16]], rtol: {rtol}"}),
            )
        )
        is not seen
    )


def test_numbers_that_no_op_would_change_do_not_show_what_is_computed(lineage: Lineage) -> None:
    rule = ("old.0.w", "new.0.w", "{affine: {mul: 4}}")
    (message,) = invisible(lineage, file(*rule, {"old.0.w": "shape: [2]"}, {"new.0.w": "fill: 0"}))
    assert message.endswith("if affine left the numbers as they are")
    assert (
        invisible(lineage, file(*rule, {"old.0.w": "shape: [2], fill: 1"}, {"new.0.w": "fill: 4"}))
        == []
    )


def test_numbers_are_told_apart_as_the_dtype_stores_them(lineage: Lineage) -> None:
    def body(dtype: str) -> str:
        given = {
            key: f"dtype: {dtype}, values: [[{n}]]"
            for key, n in (("old.0.a", 1.0001), ("old.0.b", 1.0002))
        }
        return file(*CONCAT, given, {"new.0.w": "values: [[1.0001], [1.0002]]"})

    assert invisible(lineage, body("float32")) == []
    assert "interchanged" in invisible(lineage, body("float16"))[0]


@pytest.mark.parametrize(
    ("expect", "seen"),
    [("fill: 1", False), ("dtype: float32", False), ("shape: [3, 2]", True),
    ("same_as: old.0.w", True), ('slices: {"2": 1}', True),
     ('slices: {"0": [1, 1]}', True), ('slices: {"0": 1}', False)],
)  # fmt: skip
def test_a_shape_shows_something_where_the_test_states_it(
    lineage: Lineage, expect: str, seen: bool
) -> None:
    assert (
        bool(
            invisible(
                lineage,
                file(*TRANSPOSED, {"old.0.w": "shape: [2, 3], fill: 1"}, {"new.0.w": expect}),
            )
        )
        is not seen
    )


def test_a_tensor_that_is_its_own_transpose_hides_it(lineage: Lineage) -> None:
    assert invisible(
        lineage,
        file(*TRANSPOSED, {"old.0.w": "values: [[1, 2], [2, 4]]"}, {"new.0.w": "same_as: old.0.w"}),
    )


def test_a_test_that_fails_with_the_rule_as_it_is_notices_something(lineage: Lineage) -> None:
    for expect in ("same_as: old.0.w", "values: [[1, 2], [3, 4]]", "fill: 9"):
        assert invisible(lineage, file(*TRANSPOSED, SQUARE, {"new.0.w": expect})) == []


LARGE = "shape: [300, 300], fill: %s"


@pytest.mark.parametrize(
    ("rule", "given", "expect", "codes"),
    [
        (TRANSPOSED, {"old.0.w": LARGE % 1}, LARGE % 1, ["M620"]),
        (TRANSPOSED, {"old.0.w": LARGE % "iota"}, "shape: [300, 300]", ["M620"]),
        (TRANSPOSED, {"old.0.w": LARGE % "iota"}, 'slices: {"0, 1": 300}', []),
        (TRANSPOSED, {"old.0.w": LARGE % "iota"}, "fill: iota, rtol: 100000", ["M623"]),
        (
            CONCAT,
            {"old.0.a": "shape: [40000], fill: 1", "old.0.b": "shape: [40000], fill: 2"},
            "fill: 1",
            [],
        ),
        (
            CONCAT,
            {"old.0.a": "shape: [40000], fill: 1", "old.0.b": "shape: [40000], fill: 1"},
            "fill: 1",
            ["M620"],
        ),
        (
            CONCAT,
            {"old.0.a": "shape: [9999999], fill: 1", "old.0.b": "shape: [9999999], fill: 1"},
            'slices: {"0": 1}',
            ["M620"],
        ),
        (
            CONCAT,
            {"old.0.a": "shape: [9999999], fill: 1", "old.0.b": "shape: [9999999], fill: 2"},
            'slices: {"0": 1}',
            [],
        ),
        (
            ("old.0.w", "new.0.w", "{neg_exp: {}}, {flip: {dim: 0}}"),
            {"old.0.w": LARGE % "iota"},
            'slices: {"0": 1, "1": 2}',
            [],
        ),
        (("old.0.w", "new.0.w", ""), {"old.0.w": LARGE % "iota"}, "shape: [300, 300]", []),
    ],
)
def test_large_tensors_of_a_test_are_bound_and_compared(
    lineage: Lineage,
    rule: tuple[str, str, str],
    given: dict[str, str],
    expect: str,
    codes: list[str],
) -> None:
    lineage.rules(file(*rule, given, {"new.0.w": expect}, "why: of the kernels\n"))
    assert [d.code for d in lineage.found("M620", "M621", "M622", "M623")] == codes


def test_what_is_not_known_of_a_large_test_is_said(lineage: Lineage) -> None:
    lineage.rules(
        file(*TRANSPOSED, {"old.0.w": LARGE % "iota"}, {"new.0.w": "fill: iota, rtol: 100000"})
    )
    (finding,) = lineage.found("M623")
    assert (
        finding.message
        == "rule `r`: `t` states so much that it is not known whether a near mistake of transpose "
        "would be noticed"
    )
    assert finding.notes == ("of more than 65,536 elements, only some are compared",)


def test_the_middle_of_a_large_tensor_is_compared_where_something_else_begins(
    lineage: Lineage,
) -> None:
    rule = (
        '"old.{i:int}.{w:q|k|v|o}"',
        '"new.{i}.w"',
        "{concat: {over: w, sizes: {q: 90000, k: 1, v: 1, o: 90000}}}",
    )
    given = {
        f"old.0.{w}": f"shape: [{n}], fill: {f}"
        for w, n, f in (("q", 90000, 1), ("k", 1, 2), ("v", 1, 3), ("o", 90000, 4))
    }
    assert invisible(lineage, file(*rule, given, {"new.0.w": "fill: iota"})) == []
    # a test that would pass: the parts in a row
    lineage.rules(
        file(*rule, given, {"new.0.w": 'slices: {"0": 1, "90000": 2, "90001": 3, "90002": 4}'})
    )
    assert lineage.found("M620", "M623") == []


def test_a_slice_hides_which_end_it_keeps_unless_it_says_what_it_cuts(lineage: Lineage) -> None:
    given, expect = {"old.0.w": "values: [1, 2, 3]"}, {"new.0.w": "shape: [2]"}
    assert invisible(
        lineage,
        "why: the end is unused\n"
        + file("old.0.w", "new.0.w", "{slice: {dim: 0, stop: 2}}", given, expect),
    )
    assert (
        invisible(
            lineage,
            file(
                "old.0.w", "new.0.w", "{slice: {dim: 0, stop: 2, of: 3, value: 3}}", given, expect
            ),
        )
        == []
    )


def test_a_computed_element_is_told_apart_by_what_it_is_computed_from(lineage: Lineage) -> None:
    rule = (
        '"old.{i:int}.{w:a|b}"',
        '"new.{i}.w"',
        "{cast: {to: bfloat16, from: float32}}, {concat: {over: w}}",
    )
    assert (
        invisible(
            lineage,
            "why: half the size\n" + file(*rule, PAIR, {"new.0.w": "values: [[1, 1], [2, 2]]"}),
        )
        == []
    )
    same = dict.fromkeys(PAIR, "shape: [1, 2], fill: 1")
    (message,) = invisible(
        lineage, "why: half the size\n" + file(*rule, same, {"new.0.w": "values: [[1, 1], [1, 1]]"})
    )
    assert "concat" in message


FP8 = """why: as the new kernels want it
rules:
  - name: r
    from: {weight: "old.{i:int}.{w:a|b}.weight", scale: "old.{i}.{w}.scale"}
    to: "new.{i}.w"
    via: [{dequantize: {codec: fp8-block, block: [2, 2], dtype: float32}}, {concat: {over: w}}]
tests:
  - name: t
    given:
      old.0.a.weight: {shape: [2, 2], dtype: float8_e4m3fn, fill: 1}
      old.0.b.weight: {shape: [2, 2], dtype: float8_e4m3fn, fill: 1}
      old.0.a.scale: {shape: [1, 1], fill: 1}
      old.0.b.scale: {shape: [1, 1], fill: %d}
    expect:
      new.0.w: {%s}
"""


@pytest.mark.parametrize(
    ("scale", "expect", "ops"),
    [
        (2, "values: [[1, 1], [1, 1], [2, 2], [2, 2]]", []),
        (1, "values: [[1, 1], [1, 1], [1, 1], [1, 1]]", ["concat"]),
        (2, "shape: [4, 2]", ["dequantize", "concat"]),
    ],
)
def test_the_parts_of_a_quantized_tensor_are_told_apart_by_all_they_are_made_of(
    lineage: Lineage, scale: int, expect: str, ops: list[str]
) -> None:
    assert [
        m.partition("if ")[2].split()[0] for m in invisible(lineage, FP8 % (scale, expect))
    ] == ops


def test_params_of_a_test_come_from_the_configuration_it_gives(lineage: Lineage) -> None:
    body = file(
        "old.0.w",
        "new.0.w",
        '{rearrange: {pattern: "(h d two) -> (h two d)", axes: {h: $heads, two: 2}}}',
        {"old.0.w": "shape: [8], fill: iota"},
        {"new.0.w": "values: [0, 2, 1, 3, 4, 6, 5, 7]"},
        "params: {heads: {type: int, config: n_heads}}\n",
    )
    lineage.rules(
        body.replace("    given:\n", "    side: {config.json: {n_heads: 2}}\n    given:\n")
    )
    assert lineage.found("M620", "M621", "M622") == []


def test_a_test_of_the_way_back_says_nothing_about_the_way_forwards(lineage: Lineage) -> None:
    body = file(
        *CONCAT,
        {"new.0.w": "values: [[1], [2]]"},
        {"old.0.a": "values: [[1]]", "old.0.b": "values: [[2]]"},
    )
    lineage.rules(body.replace("    given:\n", "    backwards: true\n    given:\n"))
    assert [d.message for d in lineage.found("M620")] == [
        "rule `r`: no test of this file would notice if concat had a and b interchanged"
    ]


def test_several_tests_together_may_show_what_none_shows_alone(lineage: Lineage) -> None:
    body = file(*CONCAT, PAIR, {"new.0.w": "shape: [2, 2]"})
    lineage.rules(
        body
        + "  - name: u\n    given: {old.0.a: {values: [1]}, old.0.b: {values: [2]}}\n    expect: "
        "{new.0.w: {values: [1, 2]}}\n"
    )
    assert lineage.found("M620", "M621", "M622") == []


def test_a_rule_that_no_test_takes_is_found_once(lineage: Lineage) -> None:
    lineage.rules(
        "rules:\n  - {name: a, from: 'old.{i:int}.w', to: 'new.{i}.w'}\n  - {name: b, from: x, "
        "to: y, via: [{flip: {dim: 0}}]}\n"
    )
    assert [(d.code, d.message.split("`")[1]) for d in lineage.found("M620", "M621", "M622")] == [
        ("M622", "a"),
        ("M620", "b"),
    ]


def test_an_axis_that_shapes_show_asks_for_no_values_before_there_is_a_test(
    lineage: Lineage,
) -> None:
    lineage.rules(
        "rules:\n  - {name: a, from: 'old.{i:int}.w', to: new.w, via: [{stack: {over: i, count: "
        "2}}]}\n"
    )
    assert [d.code for d in lineage.found("M620", "M621", "M622")] == ["M622"]
    body = file(
        '"old.{i:int}.w"',
        "new.w",
        "{stack: {over: i, count: 2}}",
        {"new.w": "shape: [2, 2]"},
        {"old.0.w": "shape: [2]"},
    )
    lineage.rules(body.replace("    given:\n", "    backwards: true\n    given:\n"))
    assert lineage.found("M620", "M621", "M622") == []


def test_a_test_that_does_not_bind_is_told_with_the_reason(lineage: Lineage) -> None:
    lineage.rules(file(*CONCAT, {"old.0.a": "shape: [2]"}, {"new.0.w": "shape: [2]"}))
    (finding,) = lineage.found("M620", "M621", "M622")
    assert finding.code == "M621"
    assert "missing {w} = b" in finding.message


def test_a_test_that_expects_an_error_is_none_that_must_bind(lineage: Lineage) -> None:
    lineage.rules(
        "rules:\n  - {name: a, from: 'old.{i:int}.w', to: 'new.{i}.w'}\ntests:\n"
        "  - {name: t, given: {x: {shape: [1]}}, error: M211}\n"
        "  - {name: u, given: {old.0.w: {shape: [1]}}, expect: {new.0.w: {shape: "
        "[1]}}}\n"
    )
    assert lineage.found("M620", "M621", "M622") == []


def test_a_test_may_give_keys_that_another_file_of_the_edge_takes(lineage: Lineage) -> None:
    body = file(
        *CONCAT,
        {**PAIR, "old.0.x": "shape: [1]"},
        {"new.0.w": "values: [[1, 1], [2, 2]]", "new.0.x": "shape: [1]"},
    )
    lineage.rules(body)
    assert [d.code for d in lineage.found("M620", "M621", "M622")] == ["M621"]
    lineage.rules(
        "rules:\n  - {name: r, from: 'old.{i:int}.x', to: 'new.{i}.x'}\n  - {name: s, from: z, "
        "to: z.z}\n",
        "second",
    )
    # the other file is only here for its first rule; its own tests are its own matter
    assert [
        (d.code, d.spans[0].file.rpartition("/")[2]) for d in lineage.found("M620", "M621", "M622")
    ] == [
        ("M622", "second.yaml"),
        ("M622", "second.yaml"),
    ]
