from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from rule_text import load_text

from migrate.core.errors import QuestionError, Report
from migrate.rules.files import LoadedFile
from migrate.rules.loading import load_files, read_files

ROOT = Path(__file__).resolve().parents[2]
CASES = sorted((ROOT / "tests" / "data" / "cases").glob("*.yaml"))

HEAD = """id: a/b/c
title: t
lineage: a
edge: [one, two]
"""


def load(body: str) -> LoadedFile:
    return load_text(HEAD + body, "r.yaml")


def problems(text: str, head: str = HEAD) -> list[tuple[str, str]]:
    """(code, the text under the caret) of each problem."""
    with pytest.raises(QuestionError) as caught:
        load_text(head + text, "r.yaml")
    out = []
    for found in caught.value.diagnostics:
        span = found.spans[0]
        out.append((found.code, span.text[span.column - 1 : span.column - 1 + span.length]))
    return out


def messages(text: str) -> str:
    with pytest.raises(QuestionError) as caught:
        load_text(HEAD + text, "r.yaml")
    return str(caught.value)


def rule(fields: str) -> str:
    return f'rules:\n  - {{name: r, from: "{{p...}}.{{w:a|b}}.x", to: "{{p}}.{{w}}.y", {fields}}}\n'


@pytest.mark.parametrize("path", CASES, ids=lambda p: p.stem)
def test_every_case_loads(path: Path) -> None:
    report = Report()
    loaded = read_files([path], report)
    assert not report.diagnostics
    assert loaded[0].model.rules


def test_there_are_cases() -> None:
    assert len(CASES) > 25


def test_roles_are_written_in_three_ways_and_read_as_one() -> None:
    file = load(
        'rules: [{name: r, from: ["{a}.x", "{a}.y"], to: {u: "{a}.u", v: "{a}.v"}}, {name: s, '
        'from: "{a}.z", to: "{a}.w"}]'
    )
    assert file.model.rules[0].sources == {"0": "{a}.x", "1": "{a}.y"}
    assert file.model.rules[0].targets == {"u": "{a}.u", "v": "{a}.v"}
    assert file.model.rules[1].sources == {None: "{a}.z"}


def test_steps_keep_what_the_author_wrote_typed() -> None:
    file = load(
        "params: {n: {type: int}}\n"
        + rule(
            'via: [{concat: {over: w, dim: -1, count: "$n + 1"}}, {split: {into: w, sizes: {a: 1, '
            "b: $n}}},"
            " {flip: {dim: 0, only: {w: [a]}}}]"
        )
    )
    assert [(step.op, dict(step.args)) for step in file.model.rules[0].via] == [
        ("concat", {"over": "w", "dim": -1, "count": "$n + 1"}),
        ("split", {"into": "w", "sizes": {"a": 1, "b": "$n"}}),
        ("flip", {"dim": 0, "only": {"w": ["a"]}}),
    ]


def test_versions_and_words_stay_text() -> None:
    head = HEAD.replace("edge: [one, two]", "edge: [2.10, no]")
    assert load_text(head, "r").model.edge == ("2.10", "no")


def test_where_and_when_are_typed_by_what_they_speak_of() -> None:
    file = load(
        "params: {f: {type: bool}}\n"
        + rule("where: {w: [a, 007, true], p: {min: 1}, $f: true}, when: {dtype: half, ndim: 2}")
    )
    assert file.model.rules[0].where == {"w": ["a", "007", "true"], "p": {"min": 1}, "$f": True}
    assert file.model.rules[0].when == {"dtype": ["float16"], "ndim": [2]}
    shape = load(rule("when: {shape: [3, null, {min: 2}]}")).model.rules[0].when
    assert shape == {"shape": [3, None, {"min": 2}]}


def test_all_problems_of_all_files_come_out_at_once(tmp_path) -> None:
    (tmp_path / "a.yaml").write_text(
        "id: x\ntitel: t\nlineage: l\nedge: [a, b]\nrules: [{name: r, from: x, too: y}]\n"
    )
    (tmp_path / "b.yaml").write_text(
        "id: y\ntitle: t\nlineage: l\nedge: [a, b]\nrules: [{name: r, from: x, to: y, via: "
        "[{splitt: {into: w}}]}]\n"
    )
    (tmp_path / "c.yaml").write_text("a: [\n")
    with pytest.raises(QuestionError) as caught:
        load_files([tmp_path / "a.yaml", tmp_path / "b.yaml", tmp_path / "c.yaml"])
    text = str(caught.value)
    assert [d.code for d in caught.value.diagnostics] == ["M101", "M103", "M103", "M102", "M108"]
    for hint in ("did you mean `title`?", "did you mean `to`?", "did you mean `split`?"):
        assert hint in text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("rules: [{name: r}]", [("M101", "{name: r}")]),
        ("rules: [{name: r, from: x}]", [("M101", "{name: r, from: x}")]),
        ("rules: 3", [("M106", "3")]),
        ("keep: x", [("M106", "x")]),
        ("why:", [("M106", "\n")]),
        ("rules: [{name: r, from: {a: [x]}, to: y}]", [("M106", "[x]")]),
        ("rules: [{name: [1], from: x, to: y}]", [("M106", "[1]")]),
        (rule("keep_source: yes"), [("M106", "yes")]),
        (rule('keep_source: "true"'), [("M106", '"true"')]),
        (rule("if_exists: kepe"), [("M114", "kepe")]),
        (rule("inverse: refuse"), [("M114", "refuse")]),
        (rule("inverse: {refuse: ' '}"), [("M114", "' '")]),
        (rule("inverse: {refuse: [why]}"), [("M106", "[why]")]),
        (rule("inverse: {skip: why}"), [("M106", "{skip: why}")]),
        (rule("inverse: {refuse: a, b}"), [("M106", "{refuse: a, b}")]),
        (rule("keep_source: true, inverse: {refuse: why}"), [("M114", "inverse")]),
        (
            rule("via: [{concat: {over: w}, flip: {dim: 0}}]"),
            [("M106", "{concat: {over: w}, flip: {dim: 0}}")],
        ),
        (rule("via: [stak]"), [("M106", "stak")]),
        (rule("via: [{stak: {over: w}}]"), [("M102", "stak")]),
        (rule("via: [{stack: {ovr: w, dim: 0}}]"), [("M101", "stack"), ("M103", "ovr")]),
        (rule("via: [{stack: {over: w, dim: x}}]"), [("M111", "x")]),
        (rule("via: [{stack: {over: w, dim: 1 / 2}}]"), [("M111", "/")]),
        (rule('via: [{stack: {over: "{w}"}}]'), [("M114", '"{w}"')]),
        (rule("via: [{stack: {over: w, count: $n}}]"), [("M112", "$n")]),
        (rule("via: [{split: {into: w, sizes: [1, $n]}}]"), [("M112", "$n")]),
        (rule("where: {p: $n}"), [("M112", "$n")]),
        (rule("where: {$n: 1}"), [("M112", "1")]),
        (rule("where: {p: {mn: 1}}"), [("M103", "mn")]),
        (rule("where: {p: {min: }}"), [("M106", "}")]),
        (rule("when: {dtype: [bfloat61]}"), [("M114", "[bfloat61]")]),
        (rule("when: {dtpye: bfloat16}"), [("M103", "dtpye")]),
        (rule("when: {weight: {ndim: 2}}"), [("M114", "weight")]),
        (rule("when: {shape: 3}"), [("M106", "3")]),
        (rule("when: {shape: [-1]}"), [("M114", "-1")]),
        (rule("when: {shape: [{max: 2}]}"), [("M114", "{max: 2}")]),
        (rule("when: {shape: [{min: x}]}"), [("M106", "{min: x}")]),
        (rule("optional: [true, bias]"), [("M114", "bias")]),
        (rule('optional: ["true"]'), [("M114", '"true"')]),
        (rule("optional: [bias]"), [("M114", "bias")]),
        (rule("map: {w: {a: c, b: c}}"), [("M114", "c")]),
        (rule("map: {w: {a: null, b: c}}"), [("M114", "null")]),
        (rule("via: [{drop: {why: w}}]"), [("M114", "to")]),
        (
            'rules: [{name: r, from: "a.{n:int}", to: "b.{n-$layers}"}]',
            [("M112", '"b.{n-$layers}"')],
        ),
        ("rules: [{name: r, from: x, to: y}, {name: r, from: u, to: v}]", [("M113", "r")]),
        ("params: {n: {type: itn}}", [("M114", "itn")]),
        ("params: {n: {type: int, default: x}}", [("M114", "x")]),
        ("params: {n: {type: int, minimum: 3, default: 2}}", [("M114", "2")]),
        ("params: {n: {type: str, minimum: 3}}", [("M114", "minimum")]),
        ("params: {n: {type: int, choices: [1, 2], default: 3}}", [("M114", "3")]),
        ("params: {n: {type: int, config: a..b}}", [("M114", "a..b")]),
        ("params: {n: {type: bool, shape: {key: k}}}", [("M114", "shape")]),
        ("files: {../x.json: {a: 1}}", [("M114", "../x.json")]),
        ("files: {c.json: {a: {b: $n}}}", [("M112", "$n")]),
        ("names: [config.json]", [("M114", "config.json")]),
        ("tests: [{name: t, given: {a: {shape: [2], dtype: f61}}, expect: {}}]", [("M114", "f61")]),
        ("tests: [{name: t, given: {a: {shape: [-2]}}, expect: {}}]", [("M114", "[-2]")]),
        ("tests: [{name: t, given: {a: {}}, expect: {}}]", [("M101", "a")]),
    ],
)
def test_a_mistake_is_shown_where_it_stands(text: str, expected: list[tuple[str, str]]) -> None:
    shown = problems(text)
    assert [code for code, _ in shown] == [code for code, _ in expected]
    for (_, under), (_, wanted) in zip(shown, expected, strict=True):
        assert under.startswith(wanted) or wanted == "\n"


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("id: a b", "M114"),
        ("id: /a", "M114"),
        ("lineage: a/b", "M114"),
        ("edge: [a, a]", "M114"),
        ("edge: [a]", "M106"),
        ("edge: a", "M106"),
    ],
)
def test_the_head_of_a_file_is_checked(line: str, code: str) -> None:
    field = line.split(":")[0]
    head = "".join(
        line + "\n" if old.startswith(field + ":") else old
        for old in HEAD.splitlines(keepends=True)
    )
    assert [found for found, _ in problems("", head)] == [code]


def test_requires_is_looked_at_before_anything_else() -> None:
    assert problems('requires: ">=99"\nnew_field: 1\nrules: 3') == [("M107", '">=99"')]
    assert problems('requires: "~=1"\nrules: 3') == [("M114", '"~=1"')]
    assert load('requires: ">=0.1, <99"').model.requires == ">=0.1, <99"


def test_null_in_a_map_removes_segments_of_a_path_only() -> None:
    file = load(
        'rules: [{name: r, from: "{k...}", to: "{k}", map: {k: {module: null, _orig_mod: null, '
        "a.b: c}}}]"
    )
    assert file.model.rules[0].map == {"k": {"module": None, "_orig_mod": None, "a.b": "c"}}


def test_an_unquoted_capture_in_a_mapping_field_says_quote_it() -> None:
    assert "quote a pattern" in messages("rules: [{name: r, from: x, to: [{w}]}]")


def test_what_an_op_says_against_its_arguments_is_said_at_load() -> None:
    found = problems(rule("via: [{stack: {over: w, count: 0}}]"))
    assert [code for code, _ in found] == ["M308"]


def test_two_files_with_one_id_are_refused(tmp_path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.yaml").write_text(HEAD)
    with pytest.raises(QuestionError) as caught:
        load_files([tmp_path / "a.yaml", tmp_path / "b.yaml"])
    assert [(d.code, len(d.spans)) for d in caught.value.diagnostics] == [("M508", 2)]


def test_the_report_is_drawn_like_rustcs() -> None:
    assert messages(
        "rules:\n  - {name: r, from: a, to: b, via: [{transpse: {dims: [0, 1]}}]}\n"
    ) == (
        "error[M102]: unknown operation `transpse`\n"
        " --> r.yaml:6:38\n"
        "  |\n"
        "6 |   - {name: r, from: a, to: b, via: [{transpse: {dims: [0, 1]}}]}\n"
        "  |                                      ^^^^^^^^\n"
        "  = help: did you mean `transpose`?"
    )


def test_loading_rules_imports_neither_torch_nor_numpy() -> None:
    load = f"from migrate.rules.loading import load_files; load_files([{str(CASES[1])!r}])"
    code = f"import sys; {load}; print({{'torch', 'numpy'}} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"


def test_a_rule_that_reads_nothing_is_told_how_a_tensor_is_added() -> None:
    text = (
        "id: a/b\ntitle: t\nlineage: l\nedge: [a, b]\nrules: [{name: r, to: x, via: [{fill: "
        "{value: 0, dtype: int8, shape: []}}]}]\n"
    )
    with pytest.raises(QuestionError) as caught:
        load_text(text, "x")
    (found,) = caught.value.diagnostics
    assert (found.code, found.message) == ("M101", "`from` is missing")
    assert "`keep_source: true` and `fill`" in (found.help or "")


@pytest.mark.parametrize(
    ("written", "code"),
    [
        ("type: bool, absent: x.weight", None),
        ("type: bool, absent: [x.weight, y.weight]", None),
        ("type: int, absent: x.weight", "M114"),
        ("type: bool, absent: []", "M114"),
        ('type: bool, absent: "{m"', "M201"),
        ("type: float, default: 1e-5", None),
        ("type: float, default: x", "M114"),
        ("type: float, minimum: 1", "M114"),
    ],
)
def test_params_of_numbers_and_of_tensors_that_are_absent(written, code):
    text = f"id: a\ntitle: t\nlineage: l\nedge: [a, b]\nparams: {{p: {{{written}}}}}\n"
    if code is None:
        assert load_text(text, "r.yaml").model.params["p"].type in ("bool", "float")
    else:
        with pytest.raises(QuestionError) as caught:
            load_text(text, "r.yaml")
        assert [d.code for d in caught.value.diagnostics] == [code]


@pytest.mark.parametrize(
    ("written", "code"),
    [
        ('type: list, items: str, groups: {key: "{m...}.w{i:int}", of: m, over: i}', None),
        ('type: list, groups: {key: "{m...}.w{i:int}", of: m, over: i, ndim: 0}', None),
        ('type: str, groups: {key: "{m...}.w{i:int}", of: m, over: i}', "M114"),
        ('type: list, items: int, groups: {key: "{m...}.w{i:int}", of: m, over: i}', "M114"),
        ('type: list, groups: {key: "{m...}.w{i:int}", of: i, over: i}', "M114"),
        ('type: list, groups: {key: "{m...}.w{i:int}", of: m, over: m}', "M114"),
        ('type: list, groups: {key: "{m...}.w{i:int}", of: n, over: i}', "M114"),
        ('type: list, groups: {key: "{m...}.w{i:int}", of: m}', "M101"),
        ('type: list, groups: {key: "{m...}.w{i:int}", of: m, over: i, ndim: -1}', "M114"),
        ('type: list, groups: {key: "{m", of: m, over: i}', "M201"),
    ],
)
def test_groups_name_the_captures_of_one_pattern(written, code):
    text = f"id: a\ntitle: t\nlineage: l\nedge: [a, b]\nparams: {{p: {{{written}}}}}\n"
    if code is None:
        assert load_text(text, "r.yaml").model.params["p"].groups.over == "i"
    else:
        with pytest.raises(QuestionError) as caught:
            load_text(text, "r.yaml")
        assert [d.code for d in caught.value.diagnostics] == [code]
