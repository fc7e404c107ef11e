"""Tests of rule files: what passes, what fails and how it is said, and the properties that nobody
writes down.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from migrate import ops
from migrate.ops.base import step
from migrate.ruletests import binding
from migrate.ruletests.checks import CheckOutcome, FileChecks
from migrate.ruletests.run import load_rule_files

HEAD = "id: demo/v2/{name}\ntitle: a change\nlineage: demo\nedge: [v1, v2]\n"
Run = Callable[..., dict[str, CheckOutcome]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """The outcomes of a rule file by name of the check."""

    def outcomes(
        text: str, *, specs: bool = False, path: str = "rules.yaml"
    ) -> dict[str, CheckOutcome]:
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(HEAD.format(name=file.stem) + text)
        file_checks = FileChecks(load_rule_files([file])[0], specs)
        return {check.name: file_checks.run(check) for check in file_checks.checks()}

    return outcomes


def statuses(outcomes: dict[str, CheckOutcome]) -> dict[str, str]:
    return {name: outcome.status for name, outcome in outcomes.items()}


def failed(outcomes: dict[str, CheckOutcome]) -> list[str]:
    return [name for name, outcome in outcomes.items() if outcome.status == "failed"]


def said(outcome: CheckOutcome) -> str:
    return "\n".join(d.render() for d in outcome.diagnostics)


STACK = """rules:
  - {name: all, from: "l.{e:int}.{w:a|b}", to: "l.ab", via: [{stack: {over: e}}, {concat: {over: w, dim: 1}}]}
tests:
  - name: order
    given:
      l.0.a: {values: [[1, 2]]}
      l.1.a: {values: [[3, 4]]}
      l.0.b: {values: [[5, 6]]}
      l.1.b: {values: [[7, 8]]}
    expect:
      l.ab: EXPECTED
"""  # noqa: E501


def test_an_example_that_holds_passes_with_all_that_follows_from_it(run: Run) -> None:
    found = run(
        STACK.replace(
            "EXPECTED",
            "{shape: [2, 2, 2], dtype: float32, values: [[[1, 2], [5, 6]], [[3, 4], [7, 8]]]}",
        )
    )
    assert set(statuses(found).values()) == {"passed"}
    assert list(found) == [
        "order",
        "round trip",
        "eager twins",
        "order of rules",
        "applied twice",
        "coverage",
    ]


def test_a_wrong_element_is_named_with_its_index_both_numbers_and_both_lines(run: Run) -> None:
    found = run(STACK.replace("EXPECTED", "{values: [[[1, 2], [5, 6]], [[3, 4], [7, 9]]]}"))
    assert failed(found) == ["order"]
    (diagnostic,) = found["order"].diagnostics
    assert diagnostic.code == "M701"
    assert diagnostic.message == "test 'order': l.ab[1, 1, 1] is 8, expected 9"
    assert [span.line for span in diagnostic.spans] == [15, 6]
    assert "1 of 8 elements that are written differ" in diagnostic.notes
    assert "rule 'all' makes it of l.0.a, l.1.a, l.0.b, l.1.b" in said(found["order"])


@pytest.mark.parametrize("index", range(8))
def test_each_single_element_counts(run: Run, index: int) -> None:
    numbers = [1, 2, 5, 6, 3, 4, 7, 8]
    numbers[index] = 0
    a, b, c, d, e, f, g, h = numbers
    found = run(
        STACK.replace(
            "EXPECTED", f"{{values: [[[{a}, {b}], [{c}, {d}]], [[{e}, {f}], [{g}, {h}]]]}}"
        )
    )
    assert f"l.ab[{index // 4}, {index // 2 % 2}, {index % 2}] is" in said(found["order"])


@pytest.mark.parametrize(
    ("expected", "fails"),
    [
        ('{slices: {"0, 0": [1, 2], "1, 1": [7, 8], "-1, -1, 0": 7}}', None),
        ('{slices: {"0": [[1, 2], [5, 6]], "1, 0, 1": 4}}', None),
        ('{slices: {"1, 0": [3, 5]}}', "l.ab[1, 0, 1] is 4, expected 5"),
        ('{slices: {"1": 3}}', "l.ab[1, 0, 1] is 4, expected 3"),
        ('{slices: {"2, 0": [3, 5]}}', "slice '2, 0' is outside of [2, 2, 2]"),
        ('{slices: {"0, 0": [3, 5, 6]}}', "slice '0, 0' has the shape [2], the lists have [3]"),
        ("{shape: [2, 2, 2]}", None),
        ("{shape: [4, 2]}", "- expected  float32 [4, 2]"),
        ("{dtype: bf16}", None),
        ("{dtype: bfloat16}", "- expected  bfloat16 [2, 2, 2]"),
        ("{values: [[1, 2]]}", "+ made      float32 [2, 2, 2]"),
        ("{fill: 1}", "l.ab[0, 0, 1] is 2, expected 1"),
        ("{fill: iota}", "l.ab[0, 0, 0] is 1, expected 0"),
        ("{same_as: l.0.a}", "- expected  float32 [1, 2]"),
        ("{values: [[[1, 2], [5, 6]], [[3, 4], [7, .nan]]]}", "is 8, expected nan"),
        ("{rtol: 0.2, values: [[[1.1, 2], [5, 6]], [[3, 4], [7, 8.5]]]}", None),
        ("{rtol: 0.01, values: [[[1, 2], [5, 6]], [[3, 4], [7, 8.5]]]}", "is 8, expected 8.5"),
    ],
)  # fmt: skip
def test_what_is_written_of_a_tensor_is_compared_and_nothing_else(
    run: Run, expected: str, fails: str | None
) -> None:
    if expected == "{dtype: bf16}":
        expected = "{dtype: float}"
    found = run(STACK.replace("EXPECTED", expected))
    if fails is None:
        assert found["order"].status == "passed", said(found["order"])
    else:
        assert fails in said(found["order"])


@pytest.mark.parametrize(
    ("expected", "code", "words"),
    [
        ('{slices: {"2, 0": [3, 5]}}', "M701", "slice '2, 0' is outside of [2, 2, 2]"),
        ('{slices: {"0": [[1, 2], [5, 6]], "0, -3": 1}}', "M701",
        "slice '0, -3' is outside of [2, 2, 2]"),
        ('{slices: {"0, 0": [3, 5, 6]}}', "M701",
        "slice '0, 0' has the shape [2], the lists have [3]"),
        ('{slices: {"0, 0, 0, 0": 1}}', "M701", "slice '0, 0, 0, 0' has 4 indexes"),
        ("{shape: [4, 2]}", "M701", "is not what is expected"),
        ("{dtype: bfloat16}", "M701", "is not what is expected"),
        ("{fill: 1e39}", "M710", "float32 cannot hold 1e+39"),
        ('{slices: {"0": [[1, 2], [5, 1e39]]}}', "M710", "float32 cannot hold 1e+39"),
    ],
)  # fmt: skip
def test_headers_alone_refuse_what_a_whole_run_refuses_at_the_same_place(
    run: Run, expected: str, code: str, words: str
) -> None:
    text = STACK.replace("EXPECTED", expected)
    whole, headers = run(text)["order"].diagnostics, run(text, specs=True)["order"].diagnostics
    assert whole == headers
    assert [d.code for d in headers] == [code]
    assert words in headers[0].message
    if "slice '" in words:
        span = headers[0].spans[0]
        assert span.text[span.column - 1 :].startswith('"' + words.split("'")[1])


RENAME = """keep: ["kept.{k...}"]
rules:
  - {name: one, from: "a.{i:int}", to: "b.{i}"}
tests:
"""


def test_keys_that_are_kept_may_be_left_out_and_those_that_are_made_may_not(run: Run) -> None:
    given = "given: {a.0: {shape: [2]}, a.1: {shape: [2]}, kept.x: {shape: [1]}}"
    found = run(
        RENAME
        + f"  - {{name: whole, {given}, expect: {{b.0: {{}}, b.1: {{}}}}}}\n  - {{name: part, "
        f"{given}, expect: {{b.0: {{}}}}}}\n"
    )
    assert found["whole"].status == "passed"
    assert "1 key comes out that `expect` does not name" in said(found["part"])
    assert "b.1  float32 [2]" in said(found["part"])


def test_a_key_that_does_not_come_out_is_named_with_what_does(run: Run) -> None:
    found = run(
        RENAME + "  - {name: t, given: {a.0: {shape: [2]}}, expect: {b.1: {shape: [2]}, b.0: {}}}\n"
    )
    assert [d.code for d in found["t"].diagnostics] == ["M702"]
    assert "b.1 is not made" in said(found["t"])


def test_a_key_with_a_range_is_several_keys(run: Run) -> None:
    test = """  - name: t
    given: {"a.{i=0..11}": {shape: [2], fill: iota}, a.12: {shape: [2], fill: 9}}
    expect: {"b.{i=0..11}": {same_as: "a.{i}"}, b.12: {fill: 9}}
"""
    assert run(RENAME + test)["t"].status == "passed"
    wrong = run(RENAME + test.replace("b.12: {fill: 9}", "b.12: {same_as: a.3}"))
    assert "b.12[0] is 9, expected 0" in said(wrong["t"])


@pytest.mark.parametrize(
    ("fields", "outcome"),
    [
        ("error: M207", "passed"),
        ('error: M207, contains: "missing {i} = 1"', "passed"),
        (
            "error: M207, contains: nothing of this",
            "M207 with 'nothing of this' was expected, and it was refused for something else",
        ),
        ("error: M305", "M305 was expected, and it was refused for something else"),
        ("expect: {b: {}}", "the rules refuse what is given"),
    ],
)
def test_a_test_may_expect_to_be_refused(run: Run, fields: str, outcome: str) -> None:
    text = "rules:\n  - {name: s, from: 'a.{i:int}', to: b, via: [{stack: {over: i}}]}\ntests:\n"
    found = run(
        text + f"  - {{name: t, given: {{a.0: {{shape: [1]}}, a.2: {{shape: [1]}}}}, {fields}}}\n"
    )["t"]
    assert found.status == ("passed" if outcome == "passed" else "failed")
    if outcome != "passed":
        assert outcome in said(found)
        assert "M207" in [d.code for d in found.diagnostics], "its diagnostics follow"


def test_an_error_that_does_not_come_is_a_failure(run: Run) -> None:
    found = run(RENAME + "  - {name: t, given: {a.0: {shape: [2]}}, error: M211}\n")
    assert "M211 was expected, and nothing was refused" in said(found["t"])


CUT = """rules:
  - {name: cut, from: a, to: b, via: [{slice: {dim: 0, start: 0, stop: 2, of: 3, value: 0}}]}
tests:
  - {name: padding, given: {a: {values: [1, 2, 0]}}, expect: {b: {values: [1, 2]}}}
  - {name: no padding, given: {a: {values: [1, 2, 3]}}, error: M404}
"""


def test_a_condition_on_values_is_met_or_expected_not_to_be(run: Run) -> None:
    assert set(statuses(run(CUT)).values()) == {"passed"}
    headers = run(CUT, specs=True)
    assert headers["no padding"].status == "skipped"
    assert headers["padding"].status == "passed"
    assert failed(run(CUT.replace("[1, 2, 3]", "[1, 2, 0]"))) == ["no padding"]


def test_a_test_allows_what_its_rules_say_they_lose_unless_it_says_otherwise(run: Run) -> None:
    rule = "rules:\n  - {name: gone, from: a, via: [{drop: {why: nobody reads it}}]}\ntests:\n"
    found = run(
        rule
        + "  - {name: t, given: {a: {shape: [1]}}, expect: {}}\n  - {name: u, allow: [], given: "
        "{a: {shape: [1]}}, error: M402}\n"
    )
    assert failed(found) == []
    assert found["round trip"].status == "skipped"
    assert "not exact" in found["round trip"].reason


def test_a_test_may_walk_backwards(run: Run) -> None:
    found = run(
        RENAME
        + "  - {name: t, backwards: true, given: {b.3: {values: [1]}}, expect: {a.3: {values: "
        "[1]}}}\n"
    )
    assert set(statuses(found).values()) == {"passed"}


PATCH = """params: {n: {type: int, config: num}}
files: {config.json: {kind: null, parts: $n}}
rules:
  - {name: one, from: a, to: b, via: [{rearrange: {pattern: "(n x) -> n x", axes: {n: $n}}}]}
tests:
  - name: t
    side: {config.json: {num: 2, kind: old}, notes.txt: "left alone"}
    given: {a: {values: [1, 2, 3, 4]}}
    expect: {b: {values: [[1, 2], [3, 4]]}}
    expect_side: SIDE
"""


def test_side_files_are_given_patched_and_expected(run: Run) -> None:
    assert set(
        statuses(run(PATCH.replace("SIDE", "{config.json: {num: 2, parts: 2}}"))).values()
    ) == {"passed"}
    wrong = run(PATCH.replace("SIDE", "{config.json: {num: 2, parts: 3}}"))
    assert [d.code for d in wrong["t"].diagnostics] == ["M711"]
    assert '-"parts": 3' in said(wrong["t"]).replace("- ", "-").replace(" ", "").replace(
        '"parts":', '"parts": '
    )
    assert failed(wrong) == ["t"]


def test_a_side_file_that_changes_and_is_not_expected_fails(run: Run) -> None:
    found = run(PATCH.replace("    expect_side: SIDE\n", ""))
    assert "side file config.json changes unexpectedly" in said(found["t"])
    assert len(found["t"].diagnostics) == 1, "the other file is carried as it is"


def test_numbers_that_a_dtype_cannot_hold_are_told(run: Run) -> None:
    found = run(
        RENAME
        + "  - {name: t, given: {a.0: {dtype: bfloat16, values: [257]}}, expect: {b.0: {}}}\n"
    )
    assert [d.code for d in found["t"].diagnostics] == ["M710"]
    assert "bfloat16 cannot hold 257" in said(found["t"])
    found = run(
        RENAME
        + "  - {name: t, given: {a.0: {dtype: int8, shape: [1]}}, expect: {b.0: {fill: 300}}}\n"
    )
    assert [d.code for d in found["t"].diagnostics] == ["M710"]


def test_every_dtype_can_be_written_down_and_comes_out(run: Run) -> None:
    from migrate.core.spec import BITS

    tests = "".join(
        f"  - {{name: {dtype}, given: {{a.0: {{dtype: {dtype}, values: [1, 1, 1, 1]}}}}, expect: "
        f"{{b.0: {{dtype: {dtype}, fill: 1}}}}}}\n"
        for dtype in BITS
    )
    assert failed(run(RENAME + tests)) == []


ROLL = """rules:
  - {name: r, from: a, to: b, via: [{roll: {dim: 0, shift: 1}}]}
tests:
  - {name: t, given: {a: {shape: [5], fill: 1}}, expect: {b: {fill: 1}}}
"""


def test_an_inverse_that_is_wrong_is_found_although_all_elements_are_equal(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert failed(run(ROLL)) == []
    monkeypatch.setattr(
        type(ops.get("roll")),
        "invert",
        lambda self, args, enumerated=False: step("roll", dim=0, shift=1),
    )
    found = run(ROLL)
    assert failed(found) == ["round trip"]
    assert "a does not return as it was: the first byte that differs is" in said(
        found["round trip"]
    )
    assert "M706" in said(found["round trip"])


def test_a_twin_that_computes_something_else_is_found(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        type(ops.get("roll")), "eager", lambda self, args, arrays, parts=1, dtypes=(): list(arrays)
    )
    found = run(ROLL)
    assert failed(found) == ["eager twins"]
    assert "b is gathered and recomputed differently" in said(found["eager twins"])


TWO = """rules:
  - {name: r, from: a, to: b}
  - {name: s, from: c, to: d}
tests:
  - {name: t, given: {a: {shape: [1]}, c: {shape: [2]}}, expect: {b: {}, d: {}}}
"""


def test_an_engine_in_which_the_order_of_rules_means_something_is_found(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = binding.compose

    def first_only(tensors: Any, legs: Any, *arguments: Any, **keywords: Any) -> Any:
        made = whole(tensors, legs, *arguments, **keywords)
        if legs[0].rules[0][0].rule.name == "s":
            made.graph.outputs.pop("d", None)
        return made

    assert failed(run(TWO)) == []
    monkeypatch.setattr(binding, "compose", first_only)
    found = run(TWO)
    assert "order of rules" in failed(found)
    assert "the order of the rules changes d" in said(found["order of rules"])


TWICE = """rules:
  - {name: t, from: w, to: w, via: [{transpose: {dims: [0, 1]}}]}
tests:
  - {name: t, given: {w: {values: [[1, 2], [3, 4]]}}, expect: {w: {values: [[1, 3], [2, 4]]}}}
"""
LAYOUTS = """lineage: demo
title: a demo
ordered: true
layouts:
  v1: {title: old, status: supported, note: none, detect: {present: SIGN}}
  v2: {title: new, status: current, note: none, detect: {present: new}}
"""


def test_an_edge_that_takes_its_own_output_is_found(run: Run) -> None:
    found = run(TWICE)
    assert failed(found) == ["applied twice"]
    assert "takes its own output and changes it again" in said(found["applied twice"])
    assert "changed again: w" in said(found["applied twice"])


@pytest.mark.parametrize(("sign", "fails"), [("old", False), ("w", True)])
def test_a_lineage_is_safe_by_its_stamp_unless_the_output_counts_as_old(
    run: Run, tmp_path: Path, sign: str, fails: bool
) -> None:
    (tmp_path / "demo" / "v2").mkdir(parents=True)
    (tmp_path / "demo" / "layouts.yaml").write_text(LAYOUTS.replace("SIGN", sign))
    found = run(TWICE, path="demo/v2/turn.yaml")
    assert failed(found) == (["applied twice"] if fails else [])
    if fails:
        assert "counts as demo@v1" in said(found["applied twice"])


def test_an_edge_that_changes_nothing_the_second_time_is_harmless(run: Run) -> None:
    text = (
        "keep: ['{k}']\nrules:\n  - {name: one, from: 'm.{k}', to: '{k}', optional: true}\ntests:\n"
    )
    found = run(text + "  - {name: t, given: {m.a: {shape: [1]}}, expect: {a: {}}}\n")
    assert found["applied twice"].status == "passed"


@pytest.mark.parametrize(
    ("rules", "missing"),
    [
        ("  - {name: s, from: x, to: y}\n", "touches rule 's'"),
        ("  - {name: s, from: x, to: y, optional: true}\n", None),
        ("", None),
    ],
)
def test_a_rule_that_no_test_touches_is_named(run: Run, rules: str, missing: str | None) -> None:
    text = (
        f"rules:\n  - {{name: r, from: a, to: b}}\n{rules}tests:\n  - {{name: t, given: {{a: "
        "{shape: [1]}}, expect: {b: {}}}\n"
    )
    if missing and rules:
        text = text.replace(
            "{name: t, given: {a: {shape: [1]}}",
            "{name: t, given: {a: {shape: [1]}, x: {shape: [1]}}, error: M211}\n  - {name: u, "
            "given: {a: {shape: [1]}}",
        )
    found = run(text)["coverage"]
    assert (missing in said(found)) if missing else found.status == "passed"


def test_an_op_that_nothing_passes_is_named(run: Run) -> None:
    text = """rules:
  - {name: r, from: "l.{w:q|k}", to: "m.{w}", via: [{flip: {dim: 0, only: {w: [k]}}}, {roll: {dim: 0, shift: 1}}]}
tests:
  - {name: t, given: {l.q: {values: [1, 2]}}, expect: {m.q: {values: [2, 1]}}}
"""  # noqa: E501
    found = run(text)["coverage"]
    assert [d.message for d in found.diagnostics] == [
        "no test of demo/v2/rules touches `flip` of rule 'r'"
    ]
    assert found.diagnostics[0].spans[0].line == 6
    more = "  - {name: u, given: {l.k: {values: [1, 2]}}, expect: {m.k: {values: [1, 2]}}}\n"
    assert run(text + more)["coverage"].status == "passed"


def test_a_file_without_tests_is_not_tested(run: Run) -> None:
    found = run("rules:\n  - {name: r, from: a, to: b}\n")
    assert list(found) == ["coverage"]
    assert "demo/v2/rules has no tests" in said(found["coverage"])


def test_specs_look_at_names_shapes_and_dtypes(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binding.BoundTest, "fill", lambda self: pytest.fail("bytes were made"))
    assert (
        failed(
            run(
                STACK.replace("EXPECTED", "{values: [[[0, 0], [0, 0]], [[0, 0], [0, 0]]]}"),
                specs=True,
            )
        )
        == []
    )
    found = run(STACK.replace("EXPECTED", "{shape: [2, 2, 3]}"), specs=True)
    assert failed(found) == ["order"]
    assert "eager twins" not in found


def test_ranks_are_written_behind_the_key(run: Run) -> None:
    given = "given: {a.0@0: {fill: 1, shape: [1]}, a.0@1: {fill: 2, shape: [1]}}"
    found = run(
        RENAME + f"  - {{name: t, {given}, expect: {{b.0@0: {{fill: 1}}, b.0@1: {{fill: 2}}}}}}\n"
    )
    assert failed(found) == [], said(found["t"])


def test_the_example_of_the_manual_passes(run: Run) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "reference" / "testing.md").read_text()
    tests = page.split("```yaml\n")[1].split("```")[0]
    rules = """keep: ["{p...}.norm.weight"]
rules:
  - {name: gate-up, from: "{p...}.experts.{e:int}.{w:w1|w3}.weight", to: "{p}.experts.gate_up_proj",
     via: [{stack: {over: e}}, {concat: {over: w, dim: 1}}]}
"""
    found = run(rules + tests)
    assert set(statuses(found).values()) == {"passed"}, [said(o) for o in found.values()]
    wrong = run(rules + tests.replace('"1, 1": [7, 8]', '"1, 1, 0": 9'))
    assert "l.experts.gate_up_proj[1, 1, 0] is 7, expected 9" in said(
        wrong["two experts, w1 above w3"]
    )


@pytest.mark.parametrize("shape", ["[100000, 100000]", "[4000, 2000]"])
def test_tensors_of_any_size_are_looked_at_and_only_small_ones_made(run: Run, shape: str) -> None:
    text = (
        RENAME + f"  - {{name: t, given: {{a.0: {{shape: {shape}}}}}, expect: {{b.0: {{shape: "
        f"{shape}}}}}}}\n"
    )
    found = run(text)
    assert [d.code for d in found["t"].diagnostics] == ["M710"]
    assert (
        found["round trip"].reason
        == found["eager twins"].reason
        == "the tensors are too large to be made"
    )
    assert failed(run(text, specs=True)) == []


HOME = (
    "lineage: demo\ntitle: t\nlayouts: {v1: {title: one, detect: {present: x}}, v2: {title: "
    "two, detect: {present: y}}}\n"
)
OTHER = (
    "keep: ['{p...}.norm']\nrules: [{name: r, from: '{p...}.old', to: '{p}.new'}, {name: b, "
    "from: bias, to: b}]\n"
)


@pytest.fixture
def beside(tmp_path: Path) -> Callable[[str, str], None]:
    """Writes another file of the lineage `demo`, of the edge from v1 to v2 unless another is
    said.
    """

    def write(text: str, name: str, edge: str = "[v1, v2]") -> None:
        path = tmp_path / "demo" / "v2" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "demo" / "layouts.yaml").write_text(HOME)
        path.write_text(HEAD.format(name=name).replace("[v1, v2]", edge) + text)

    return write


WITH_OTHERS = """rules:
  - {name: r, from: "l.{w:a|b}", to: "l.ab", via: [{concat: {over: w}}]}
tests:
  - name: t
    given: {l.a: {values: [1]}, l.b: {values: [2]}, l.old: {values: [3]}, l.norm: {values: [4]}}
    expect: {l.ab: {values: [1, 2]}, l.new: {values: [3]}}
"""


def test_keys_that_another_file_of_the_edge_takes_or_keeps_may_be_given(
    run: Run, beside: Any
) -> None:
    beside(OTHER, "other")
    found = run(WITH_OTHERS, path="demo/v2/mine.yaml")
    assert set(statuses(found).values()) == {"passed"}, [said(o) for o in found.values()]
    wrong = run(WITH_OTHERS.replace("values: [3]}}\n", "values: [5]}}\n"), path="demo/v2/mine.yaml")
    assert "l.new[0] is 3, expected 5" in said(wrong["t"])


def test_a_file_of_another_edge_or_one_that_cannot_be_read_is_no_help(
    run: Run, beside: Any
) -> None:
    beside(OTHER, "other", "[v2, v1]")
    beside("rulez: []\n", "broken")
    assert "l.old is handled by no rule" in said(run(WITH_OTHERS, path="demo/v2/mine.yaml")["t"])


def test_a_rule_of_another_file_is_not_taken_for_one_of_the_same_name(
    run: Run, beside: Any
) -> None:
    beside(OTHER, "other")
    text = WITH_OTHERS.replace(
        "tests:", "  - {name: b, from: x, to: y, optional: true, via: [{flip: {dim: 0}}]}\ntests:"
    )
    text = text.replace("given: {", "given: {bias: {values: [0]}, ").replace(
        "expect: {", "expect: {b: {values: [0]}, "
    )
    assert failed(run(text, path="demo/v2/mine.yaml")) == []


def test_a_file_that_takes_keys_of_another_one_fails_its_test(run: Run, beside: Any) -> None:
    beside(OTHER.replace("from: bias", "from: '{p}.a'").replace("to: b}", "to: '{p}.c'}"), "other")
    told = said(run(WITH_OTHERS, path="demo/v2/mine.yaml")["t"])
    assert "M208" in told
    assert "files of one edge must not read the same keys" in told


def test_on_the_way_back_it_is_the_targets_that_say_who_is_needed(run: Run, beside: Any) -> None:
    beside(OTHER, "other")
    given, expect = (
        "{b.0: {values: [1]}, l.new: {values: [2]}}",
        "{a.0: {values: [1]}, l.old: {values: [2]}}",
    )
    text = f"  - {{name: t, backwards: true, given: {given}, expect: {expect}}}\n"
    assert failed(run(RENAME + text, path="demo/v2/mine.yaml")) == []
