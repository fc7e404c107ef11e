"""`shape-invisible`: an op is tested if some test of its file would fail with a near mistake in its place."""

from __future__ import annotations

import pytest
from written_rules import Lineage

HEAD = "rules:\n  - {name: r, from: %s, to: %s, via: [%s]}\ntests:\n  - name: t\n    given:\n"


def file(source: str, target: str, via: str, given: dict[str, str], expect: dict[str, str], extra: str = "") -> str:
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
        ({"old.0.a": "values: [[7, 1]]", "old.0.b": "values: [[7, 2]]"}, {"new.0.w": 'slices: {"0, 0": 7}'}),
    ],
)
def test_what_does_not_tell_the_parts_apart_does_not_show_their_order(
    lineage: Lineage, given: dict[str, str], expect: dict[str, str]
) -> None:
    (message,) = invisible(lineage, file(*CONCAT, given, expect))
    assert message == "rule `r`: no test of this file would notice if concat had a and b interchanged"


def test_a_slice_that_lies_in_one_part_shows_the_order(lineage: Lineage) -> None:
    assert invisible(lineage, file(*CONCAT, PAIR, {"new.0.w": 'slices: {"1": [2, 2]}'})) == []


def test_of_three_parts_each_neighbour_must_be_told_from_the_next(lineage: Lineage) -> None:
    rule = ('"old.{i:int}.{w:q|k|v}"', '"new.{i}.w"', "{concat: {over: w, sizes: {q: 2, k: 1, v: 1}}}")
    given = {"old.0.q": "shape: [2], fill: 1", "old.0.k": "shape: [1], fill: 2", "old.0.v": "shape: [1], fill: 3"}
    assert invisible(lineage, file(*rule, given, {"new.0.w": "values: [1, 1, 2, 3]"})) == []
    (message,) = invisible(lineage, file(*rule, given | {"old.0.v": "shape: [1], fill: 2"}, {"new.0.w": "values: [1, 1, 2, 2]"}))
    assert "k and v interchanged" in message


def test_the_order_of_numbers_needs_no_test(lineage: Lineage) -> None:
    rule = ('"old.{i:int}.w"', "new.0.w", "{stack: {over: i, count: 2}}")
    given = {"old.0.w": "shape: [2], fill: 1", "old.1.w": "shape: [2], fill: 1"}
    assert invisible(lineage, file(*rule, given, {"new.0.w": "shape: [2, 2]"})) == []


def test_split_in_parts_of_sizes_that_differ_can_still_be_cut_in_the_wrong_order(lineage: Lineage) -> None:
    rule = ("old.0.w", '"new.{w:q|k}.w"', "{split: {into: w, sizes: {q: 2, k: 1}}}")
    given = {"old.0.w": "values: [1, 2, 3]"}
    assert invisible(lineage, file(*rule, given, {"new.q.w": "shape: [2]", "new.k.w": "shape: [1]"}))
    assert invisible(lineage, file(*rule, given, {"new.k.w": "values: [3]"})) == []


def test_the_shape_shows_a_transpose_unless_it_is_square(lineage: Lineage) -> None:
    rule = ("old.0.w", "new.0.w", "{transpose: {dims: [0, 1]}}")
    assert invisible(lineage, file(*rule, {"old.0.w": "shape: [2, 3]"}, {"new.0.w": "shape: [3, 2]"})) == []
    (message,) = invisible(lineage, file(*rule, {"old.0.w": "shape: [2, 2], fill: iota"}, {"new.0.w": "shape: [2, 2]"}))
    assert "left the axes as they are" in message
    assert invisible(lineage, file(*rule, {"old.0.w": "shape: [2, 2], fill: iota"}, {"new.0.w": "values: [[0, 2], [1, 3]]"})) == []


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


ROPE = ("old.0.w", "new.0.w", '{rearrange: {pattern: "(h d two) i -> (h two d) i", axes: {h: %d, two: 2}}}')


def test_rope_needs_values_and_more_than_one_head(lineage: Lineage) -> None:
    one, two = ((ROPE[0], ROPE[1], ROPE[2] % heads) for heads in (1, 2))
    iota = {"old.0.w": "shape: [8, 1], fill: iota"}
    assert "(h d two) i -> (h d two) i" in invisible(lineage, file(*two, iota, {"new.0.w": "shape: [8, 1]"}))[0]
    assert invisible(lineage, file(*two, iota, {"new.0.w": "values: [[0], [2], [1], [3], [4], [6], [5], [7]]"})) == []
    (message,) = invisible(lineage, file(*one, iota, {"new.0.w": "values: [[0], [2], [4], [6], [1], [3], [5], [7]]"}))
    assert "(two h d) i" in message


def test_splitting_an_axis_is_shown_by_the_shape_unless_both_parts_are_equal(lineage: Lineage) -> None:
    rule = ("old.0.w", "new.0.w", '{rearrange: {pattern: "(g x) -> g x", axes: {g: 2}}}')
    assert invisible(lineage, file(*rule, {"old.0.w": "shape: [6]"}, {"new.0.w": "shape: [2, 3]"})) == []
    assert invisible(lineage, file(*rule, {"old.0.w": "shape: [4]"}, {"new.0.w": "shape: [2, 2]"}))


@pytest.mark.parametrize(
    ("via", "given", "expect"),
    [
        ("{flip: {dim: 0}}", "values: [1, 2]", "values: [2, 1]"),
        ("{roll: {dim: 0, shift: 1}}", "values: [1, 2, 3]", "values: [3, 1, 2]"),
        ("{permute: {dims: [1, 2, 0]}}", "shape: [2, 2, 2], fill: iota", "values: [[[0, 4], [1, 5]], [[2, 6], [3, 7]]]"),
        ("{pad: {dim: 0, size: 3, of: 2, value: 9}}", "values: [1, 2]", "values: [1, 2, 9]"),
        ("{fill: {value: 3, dtype: float32, shape: [1]}}", "values: [1]", "values: [3]"),
    ],
)
def test_an_op_that_its_shape_hides_needs_values(lineage: Lineage, via: str, given: str, expect: str) -> None:
    rule = ("old.0.w", "new.0.w", via)
    assert invisible(lineage, file(*rule, {"old.0.w": given}, {"new.0.w": expect})) == []
    assert invisible(lineage, file(*rule, {"old.0.w": given}, {"new.0.w": "dtype: float32"}))


def test_a_slice_hides_which_end_it_keeps_unless_it_says_what_it_cuts(lineage: Lineage) -> None:
    given, expect = {"old.0.w": "values: [1, 2, 3]"}, {"new.0.w": "shape: [2]"}
    assert invisible(lineage, "why: the end is unused\n" + file("old.0.w", "new.0.w", "{slice: {dim: 0, stop: 2}}", given, expect))
    assert invisible(lineage, file("old.0.w", "new.0.w", "{slice: {dim: 0, stop: 2, of: 3, value: 3}}", given, expect)) == []


def test_a_computed_element_is_told_apart_by_what_it_is_computed_from(lineage: Lineage) -> None:
    rule = ('"old.{i:int}.{w:a|b}"', '"new.{i}.w"', "{cast: {to: bfloat16, from: float32}}, {concat: {over: w}}")
    assert invisible(lineage, "why: half the size\n" + file(*rule, PAIR, {"new.0.w": "values: [[1, 1], [2, 2]]"})) == []
    same = dict.fromkeys(PAIR, "shape: [1, 2], fill: 1")
    (message,) = invisible(lineage, "why: half the size\n" + file(*rule, same, {"new.0.w": "values: [[1, 1], [1, 1]]"}))
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
    assert [m.partition("if ")[2].split()[0] for m in invisible(lineage, FP8 % (scale, expect))] == ops


def test_params_of_a_test_come_from_the_configuration_it_gives(lineage: Lineage) -> None:
    body = file("old.0.w", "new.0.w", '{rearrange: {pattern: "(h d two) -> (h two d)", axes: {h: $heads, two: 2}}}',
                {"old.0.w": "shape: [8], fill: iota"}, {"new.0.w": "values: [0, 2, 1, 3, 4, 6, 5, 7]"},
                "params: {heads: {type: int, config: n_heads}}\n")  # fmt: skip
    lineage.rules(body.replace("    given:\n", "    side: {config.json: {n_heads: 2}}\n    given:\n"))
    assert lineage.found("M620", "M621", "M622") == []


def test_a_test_of_the_way_back_says_nothing_about_the_way_forwards(lineage: Lineage) -> None:
    body = file(*CONCAT, {"new.0.w": "values: [[1], [2]]"}, {"old.0.a": "values: [[1]]", "old.0.b": "values: [[2]]"})
    lineage.rules(body.replace("    given:\n", "    backwards: true\n    given:\n"))
    assert [d.message for d in lineage.found("M620")] == ["rule `r`: no test of this file would notice if concat had a and b interchanged"]


def test_several_tests_together_may_show_what_none_shows_alone(lineage: Lineage) -> None:
    body = file(*CONCAT, PAIR, {"new.0.w": "shape: [2, 2]"})
    lineage.rules(
        body + "  - name: u\n    given: {old.0.a: {values: [1]}, old.0.b: {values: [2]}}\n    expect: {new.0.w: {values: [1, 2]}}\n"
    )
    assert lineage.found("M620", "M621", "M622") == []


def test_a_rule_that_no_test_takes_is_found_once(lineage: Lineage) -> None:
    lineage.rules("rules:\n  - {name: a, from: 'old.{i:int}.w', to: 'new.{i}.w'}\n  - {name: b, from: x, to: y, via: [{flip: {dim: 0}}]}\n")
    assert [(d.code, d.message.split("`")[1]) for d in lineage.found("M620", "M621", "M622")] == [("M622", "a"), ("M620", "b")]


def test_a_test_that_does_not_bind_is_told_with_the_reason(lineage: Lineage) -> None:
    lineage.rules(file(*CONCAT, {"old.0.a": "shape: [2]"}, {"new.0.w": "shape: [2]"}))
    (finding,) = lineage.found("M620", "M621", "M622")
    assert finding.code == "M621"
    assert "missing {w} = b" in finding.message


def test_a_test_that_expects_an_error_is_none_that_must_bind(lineage: Lineage) -> None:
    lineage.rules("rules:\n  - {name: a, from: 'old.{i:int}.w', to: 'new.{i}.w'}\ntests:\n"
                  "  - {name: t, given: {x: {shape: [1]}}, error: M211}\n"
                  "  - {name: u, given: {old.0.w: {shape: [1]}}, expect: {new.0.w: {shape: [1]}}}\n")  # fmt: skip
    assert lineage.found("M620", "M621", "M622") == []


def test_a_test_may_give_keys_that_another_file_of_the_edge_takes(lineage: Lineage) -> None:
    body = file(*CONCAT, {**PAIR, "old.0.x": "shape: [1]"}, {"new.0.w": "values: [[1, 1], [2, 2]]", "new.0.x": "shape: [1]"})
    lineage.rules(body)
    assert [d.code for d in lineage.found("M620", "M621", "M622")] == ["M621"]
    lineage.rules("rules:\n  - {name: r, from: 'old.{i:int}.x', to: 'new.{i}.x'}\n  - {name: s, from: z, to: z.z}\n", "second")
    # the other file is only here for its first rule; its own tests are its own matter
    assert [(d.code, d.spans[0].file.rpartition("/")[2]) for d in lineage.found("M620", "M621", "M622")] == [
        ("M622", "second.yaml"),
        ("M622", "second.yaml"),
    ]
