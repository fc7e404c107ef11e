"""What is said against a rule before any checkpoint is there: captures, roles, maps, conditions."""

import pytest
from rule_text import load_text

from migrate.core.errors import QuestionError, Report
from migrate.rules.compiled import compile_file, direct, holds

HEAD = """
id: t/v2/x
title: t
lineage: t
edge: [v1, v2]
params:
  n: {type: int, optional: true}
  names: {type: list, items: str, optional: true}
  tied: {type: bool, optional: true}
  kind: {type: str, optional: true}
rules:
"""


def compiled(rule):
    report = Report()
    rules, _ = compile_file(load_text(HEAD + "  - {name: r, " + rule + "}\n", "r.yaml"), report)
    return rules, report.diagnostics


def problems(rule):
    return [d.code for d in compiled(rule)[1]]


def where_of(rule, **params):
    rules, found = compiled(rule)
    assert not found, found
    report = Report()
    made = direct(rules[0], params, report)
    return (made.where if made else None), [d.code for d in report.diagnostics]


STACK = "via: [{stack: {over: e}}]"


@pytest.mark.parametrize(
    "rule",
    [
        'from: "x.{e:int}", to: y, ' + STACK,
        'from: "x.{e:int}.{w:a|b}", to: "y.{w}", ' + STACK,
        'from: x, to: "y.{e:int}", via: [{unbind: {into: e}}]',
        "from: [a, b], to: c, via: [{concat: {over: role}}]",
        "from: {a: x, b: y}, to: {b: v, a: w}",
        "from: c, to: {a: x, b: y}, via: [{split: {into: role}}]",
        'from: "x.{w}", to: y, map: {w: {a: b, c: d}}, via: [{concat: {over: w}}]',
        'from: "x.{e}", via: [{drop: {why: gone}}]',
        'from: {w: "m.{k...}", ema: "e.{k:flat}"}, to: {w: "n.{k}", ema: "f.{k}"}',
        'from: "x.{n:int}", to: "y.{2*n+1}"',
    ],
)
def test_a_rule_whose_captures_add_up_is_taken(rule):
    assert problems(rule) == []


@pytest.mark.parametrize(
    ("rule", "code"),
    [
        ('from: "x.{e:int}", to: y', "M204"),
        ('from: "x.{e:int}", to: "y.{e}", ' + STACK, "M203"),
        ('from: x, to: "y.{j}"', "M203"),
        ("from: x, to: y, " + STACK, "M203"),
        ('from: "x.{e}", to: y, ' + STACK, "M205"),
        ('from: "x.{e...}", to: y, ' + STACK, "M205"),
        ('from: x, to: "y.{e}", via: [{unbind: {into: e}}]', "M205"),
        ('from: "x.{e:int}", to: "y.{e}", via: [{unbind: {into: e}}]', "M204"),
        ("from: x, to: y, via: [{unbind: {into: e}}]", "M203"),
        ('from: "x.{e:int}", to: y, via: [{stack: {over: e}}, {stack: {over: e}}]', "M203"),
        ("from: x, via: [{drop: {why: gone}}, {flip: {dim: 0}}]", "M204"),
        ("from: {a: x, b: y}, to: c", "M204"),
        ("from: {a: x, b: y}, to: {a: v, c: w}", "M203"),
        ("from: {a: x, b: y}, to: {a: v}", "M203"),
        ('from: {a: "x.{role}", b: "y.{role}"}, to: {a: "v.{role}", b: "w.{role}"}', "M204"),
        ("from: c, to: {a: x, b: y}", "M203"),
        ('from: {ema: "e.{k:flat}", a: x}, to: {ema: "f.{k}", a: y}', "M203"),
        ('from: "x.{w}", to: "y.{w}", map: {v: {a: b}}', "M203"),
        ('from: "x.{w:a|b}", to: "y.{w}", map: {w: {a: b}}', "M114"),
        ('from: "x.{w:a|b}", to: "y.{w}", optional: {w: [c]}', "M114"),
        ('from: "x.{w:a|b}", to: "y.{w}", optional: {v: [a]}', "M114"),
        ('from: "x.{w}", to: "y.{w}", optional: {w: [a]}', "M114"),
        ('from: "x.{w:a|b}", to: "y.{w}", optional: {role: [a]}', "M114"),
        (
            (
                'from: {q: "x.{w:a|b}", k: "z.{w}"}, to: {q: "y.{w}", k: "v.{w}"}, optional: '
                "{role: "
                "[v]}"
            ),
            "M114",
        ),
        ('from: "x.{w:a|b}", to: "y.{w}", map: {w: {a: c, b: d, e: f}}', "M114"),
        (
            'from: "x.{e:int}", to: y, via: [{flip: {dim: 0, only: {q: [1]}}}, {stack: {over: e}}]',
            "M203",
        ),
        ('from: "x.{w:a|b}", to: "y.{w}", via: [{flip: {dim: 0, only: {w: [c]}}}]', "M114"),
        (
            'from: "x.{e:int}", to: y, via: [{stack: {over: e}}, {flip: {dim: 0, only: {e: [1]}}}]',
            "M203",
        ),
    ],
)
def test_a_rule_whose_captures_do_not_add_up_is_refused_when_loaded(rule, code):
    assert set(problems(rule)) == {code}


@pytest.mark.parametrize(
    ("where", "code"),
    [
        ("{e: [1, two]}", "M114"),
        ("{w: [a, c]}", "M114"),
        ("{w: {min: 1}}", "M205"),
        ("{f: 1}", "M203"),
        ("{dtype: [float32]}", "M203"),
        ("{role: [0]}", "M203"),
    ],
)
def test_a_condition_that_could_never_hold_or_never_speak_is_refused(where, code):
    assert problems(f'from: "x.{{e:int}}.{{w:a|b}}", to: "y.{{e}}.{{w}}", where: {where}') == [code]


def test_a_condition_on_a_capture_that_only_the_output_has_is_refused():
    assert problems('from: x, to: "y.{e:int}", via: [{unbind: {into: e}}], where: {e: [1]}') == [
        "M203"
    ]


def test_dtype_under_where_points_to_when():
    (found,) = compiled('from: "x.{e:int}", to: "y.{e}", where: {dtype: [float32]}')[1]
    assert "when" in found.help


def test_where_takes_params_alone_in_lists_and_in_arithmetic():
    rule = 'from: "x.{e:int}.{w}", to: "y.{e}.{w}", where: '
    assert where_of(rule + "{e: $n}", n=3) == ({"e": 3}, [])
    assert where_of(rule + "{e: $n - 1}", n=3) == ({"e": 2}, [])
    assert where_of(rule + "{e: [0, $n]}", n=3) == ({"e": [0, 3]}, [])
    assert where_of(rule + "{w: $names}", names=["a", ""]) == ({"w": ["a", ""]}, [])
    assert where_of(rule + "{w: [b, $names]}", names=["a"]) == ({"w": ["b", "a"]}, [])
    assert where_of(rule + "{e: {min: 1, max: $n - 1}}", n=3) == ({"e": {"min": 1, "max": 2}}, [])


def test_where_by_an_unset_optional_param_counts_as_not_written():
    rule = 'from: "x.{e:int}.{w}", to: "y.{e}.{w}", where: '
    assert where_of(rule + "{e: $n}") == ({"e": None}, [])
    assert where_of(rule + "{w: $names}") == ({"w": None}, [])
    assert where_of(rule + "{w: [$names]}") == ({"w": None}, [])
    assert where_of(rule + "{e: {min: $n}}") == ({"e": {"min": None}}, [])
    assert where_of(rule + "{e: [1, $n]}") == ({"e": [1]}, [])
    assert where_of(rule + "{w: $names}", names=[]) == ({"w": []}, [])


def test_where_that_computes_with_an_unset_param_is_an_error_and_not_a_crash():
    rule = 'from: "x.{e:int}", to: "y.{e}", where: '
    assert where_of(rule + "{e: {max: $n - 1}}") == (None, ["M509"])
    assert where_of(rule + "{e: $n - 1}") == (None, ["M509"])
    assert where_of(rule + "{e: {multiple_of: $n}}", n=0) == (None, ["M114"])


@pytest.mark.parametrize(
    ("where", "params", "active"),
    [
        ("$tied: true", {"tied": True}, True),
        ("$tied: true", {"tied": False}, False),
        ("$tied: false", {"tied": False}, True),
        ("$tied: true", {}, True),
        ("$n: 3", {"n": 3}, True),
        ("$n: 3", {"n": 4}, False),
        ("$n: [1, 3]", {"n": 3}, True),
        ("$n: [1, 3]", {"n": 2}, False),
        ("$kind: small", {"kind": "small"}, True),
        ("$kind: small", {"kind": "Small"}, False),
        ("$n: 3, $tied: true", {"n": 3, "tied": False}, False),
    ],
)
def test_where_on_params_switches_a_rule_on_and_off(where, params, active):
    rules, found = compiled(f"from: x, to: y, where: {{{where}}}")
    assert not found
    assert holds(rules[0].rule.where, params) is active


def side_functions(rule):
    rules, found = compiled(rule)
    assert not found, found
    (side,) = direct(rules[0], {}, Report()).writes
    return side.do, side.undo


def test_a_map_of_a_path_replaces_runs_of_segments_leftmost_longest_once():
    do, undo = side_functions(
        'from: "{k...}.w", to: "{k}.w", map: {k: {a: b, b: c, a.b: x.y, module: null}}'
    )
    replaced = {
        "a": "b",
        "a.b": "x.y",
        "b.a": "c.b",
        "module.a.module": "b",
        "ab.a": "ab.b",
        "": "",
        "module": "",
        "q.a.b.a": "q.x.y.b",
    }
    assert {k: do["k"](k) for k in replaced} == replaced
    assert undo["k"]("b.x.y.c") == "a.a.b.b"


def test_a_map_is_undone_with_the_values_and_types_of_from():
    do, undo = side_functions('from: "x.{n:int}", to: "y.{n}", map: {n: {0: 3, 2: first}}')
    assert (do["n"](0), do["n"](2)) == ("3", "first")
    assert (undo["n"]("3"), undo["n"]("first"), undo["n"]("9")) == (0, 2, None)


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ("map: {w: {a: c, b: c}}", "M114"),
        ("optional: {w: []}", "M114"),
        ("optional: {w: {a: b}}", "M106"),
        ("optional: {'{w}': [a]}", "M114"),
        ("optional: x", "M106"),
    ],
)
def test_what_no_field_can_hold_is_refused_when_it_is_read(said, code):
    with pytest.raises(QuestionError) as caught:
        compiled('from: "x.{w:a|b}", to: "y.{w}", ' + said)
    assert [d.code for d in caught.value.diagnostics] == [code]


def test_a_map_of_alternatives_leaves_out_what_stays():
    do, undo = side_functions('from: "enc.{w:norm|head|1.8}", to: "dec.{w}", map: {w: {norm: ln}}')
    assert [do["w"](v) for v in ("norm", "head", "1.8")] == ["ln", "head", "1.8"]
    assert [undo["w"](v) for v in ("ln", "head", "1.8", "norm")] == ["norm", "head", "1.8", None]
    # two that change places do not become one
    do, _ = side_functions('from: "x.{w:a|b|c}", to: "y.{w}", map: {w: {a: b, b: a}}')
    assert [do["w"](v) for v in "abc"] == ["b", "a", "c"]


@pytest.mark.parametrize(
    ("words", "message", "help"),
    [
        ("nrom: ln", "map: {w} is never 'nrom'", "did you mean `norm`?"),
        ("x: ln", "map: {w} is never 'x'", "its values are norm, head"),
        (
            "norm: head",
            "map: 'norm' of {w} becomes 'head', and so does 'head', which stays",
            "each needs a value of its own",
        ),
    ],
)
def test_a_map_of_alternatives_that_cannot_be_names_the_value_and_its_place(words, message, help):
    (found,) = compiled('from: "enc.{w:norm|head}", to: "dec.{w}", map: {w: {' + words + "}}")[1]
    assert (found.code, found.message, found.spans[0].line) == ("M114", message, 12)
    assert (found.help or "").startswith(help)
    assert (
        found.spans[0]
        .text[found.spans[0].column - 1 :]
        .startswith(words.split(":")[0 if "never" in message else 1].strip())
    )


def test_alternatives_that_may_be_missing_are_of_captures_and_roles_alike():
    assert problems('from: "x.{w:a|b}", to: "y.{w}", optional: {w: a}') == []
    roles = 'from: {q: "x.{w:a|b}", k: "z.{w}"}, to: {q: "y.{w}", k: "v.{w}"}'
    rules, found = compiled(roles + ", optional: {role: [k], w: [b]}")
    made = direct(rules[0], {}, Report())
    assert (found, made.optional, made.optional_roles, made.optional_values["w"]) == (
        [],
        False,
        {"k"},
        {"b"},
    )
    (short,) = compiled(roles + ", optional: [k]")[0]
    assert direct(short, {}, Report()).optional_roles == {"k"}
    (both,) = compiled(roles + ", optional: [true, k]")[0]
    made = direct(both, {}, Report())
    assert (made.optional, made.optional_roles) == (True, {"k"})


def test_a_map_beside_a_typed_and_a_plain_writing_of_the_capture_keeps_the_type():
    assert (
        problems(
            'from: {a: "x.{n:int}", b: "y.{n}"}, to: {a: "v.{n}", b: "w.{n}"}, map: {n: {0: 3}}'
        )
        == []
    )


def test_all_problems_of_a_file_come_out_together():
    text = HEAD + '  - {name: r, from: "x.{e:int}", to: y}\n  - {name: s, from: x, to: "y.{j}"}\n'
    report = Report()
    compile_file(load_text(text, "r.yaml"), report)
    assert [d.code for d in report.diagnostics] == ["M204", "M203"]
    assert [d.spans[0].line for d in report.diagnostics] == [12, 13]
