"""Patterns that take everything, nothing, or what another rule takes."""

from __future__ import annotations

import pytest
from written_rules import LAYOUTS, Lineage


def found(lineage: Lineage, body: str, *only: str) -> list[str]:
    lineage.rules(body)
    return [d.message for d in lineage.found(*only)]


@pytest.mark.parametrize(
    ("pattern", "everything"),
    [
        ("{k...}", True),
        ("{k...}.weight", False),
        ("{p...}.{leaf}", True),
        ("{top}.{k...}", True),
        ("{leaf}", False),
    ],
)
def test_a_keep_that_matches_every_key_is_found(
    lineage: Lineage, pattern: str, everything: bool
) -> None:
    messages = found(
        lineage,
        f'keep: ["{pattern}"]\nrules: [{{name: a, from: "old.{{i:int}}.w", to: "new.{{i}}.w"}}]\n',
        "M612",
    )
    assert bool(messages) is everything


@pytest.mark.parametrize(
    ("entries", "everything"),
    [
        (["{n}", "{a}.{b}.{k...}"], True),
        (["{n}", "{a}.{b}", "{k...}.{a}.{b}.{c}"], True),
        (["{n}", "{a}.{b}.{c}.{k...}"], False),
        (["{a}.{b}.{k...}", "{k...}.weight"], False),
    ],
)
def test_entries_that_together_keep_everything_are_found_once(
    lineage: Lineage, entries: list[str], everything: bool
) -> None:
    written = ", ".join(f'"{entry}"' for entry in entries)
    messages = found(
        lineage,
        f'keep: [{written}]\nrules: [{{name: a, from: "old.{{i:int}}.w", to: "new.{{i}}.w"}}]\n',
        "M612",
    )
    assert len(messages) == everything
    assert not everything or messages[0].partition(" together")[0] == ", ".join(
        f"`{entry}`" for entry in entries
    )


ALL = '  - {name: all, from: "{k...}", to: "{k}"%s}\n'


@pytest.mark.parametrize(
    ("extra", "codes"),
    [
        ("", ["M612"]),
        (", where: {$f: true}", ["M612"]),
        (", where: {k: [a.b]}", []),
        (", when: {ndim: 1}", []),
        (", map: {k: {a: b}}", []),
        (", via: [{flip: {dim: 0}}]", []),
    ],
)
def test_a_rule_that_leaves_every_key_as_it_is_keeps_everything(
    lineage: Lineage, extra: str, codes: list[str]
) -> None:
    other = '  - {name: a, from: "old.{i:int}.w", to: "new.{i}.w"}\n'
    lineage.rules("params: {f: {type: bool, default: true}}\nrules:\n" + ALL % extra + other)
    assert [(d.code, d.message.split("`")[1]) for d in lineage.found("M612")] == [
        (code, "all") for code in codes
    ]
    if not extra:
        assert lineage.found("M613") == []
        # alone it is the same finding, not another one
        lineage.rules("rules:\n" + ALL % "")
        assert [d.code for d in lineage.found("M612", "M613")] == ["M612"]


def test_only_a_broader_rule_is_a_reason_for_one_from_x_to_x(lineage: Lineage) -> None:
    same = 'rules:\n  - {name: same, from: "{m...}.head.{leaf}", to: "{m}.head.{leaf}"}\n'
    narrow = '  - {name: a, from: "{m...}.head.bias", to: "{m}.head.b"}\n'
    assert found(lineage, same + narrow, "M613")
    broad = '  - {name: b, from: "{m...}.{leaf}", to: "{m}.x.{leaf}"%s}\n'
    assert not found(lineage, same + narrow + broad % "", "M613")
    assert found(lineage, same + narrow + broad % ", keep_source: true", "M613")


def test_a_rule_without_ranks_may_exempt_keys_from_one_that_joins_them(lineage: Lineage) -> None:
    join = (
        '  - {name: j, from: "{m...}.w@{r:int}", to: "{m}.w", via: [{concat: {over: r, count: '
        "2}}]}\n"
    )
    assert not found(
        lineage, 'rules:\n  - {name: same, from: "foo.w", to: "foo.w"}\n' + join, "M613"
    )


def test_a_rule_from_x_to_x_needs_a_broader_one(lineage: Lineage) -> None:
    same = '  - {name: same, from: "old.head.w", to: "old.head.w"}\n'
    assert found(lineage, "rules:\n" + same, "M613")
    assert not found(
        lineage, "rules:\n" + same + '  - {name: a, from: "old.{n}.w", to: "new.{n}.w"}\n', "M613"
    )
    assert not found(
        lineage, 'rules:\n  - {name: up, from: "old.{i:int}.w", to: "old.{i+1}.w"}\n', "M613"
    )


def test_a_rule_whose_alternatives_all_belong_to_narrower_rules_takes_nothing(
    lineage: Lineage,
) -> None:
    wide = (
        'rules:\n  - {name: wide, from: "{p...}.{w:a|b}", to: "{p}.x.{w}"}\n  - {name: a, '
        'from: "{p...}.a", to: "{p}.1"}\n'
    )
    assert not found(lineage, wide, "M614")
    assert found(lineage, wide + '  - {name: b, from: "{p...}.b", to: "{p}.2"}\n', "M614") == [
        "rule `wide` never takes a key: narrower rules take all of them"
    ]
    assert not found(
        lineage, wide + '  - {name: b, from: "{p...}.b", to: "{p}.2", when: {ndim: 2}}\n', "M614"
    )


def test_two_rules_for_one_key_are_found_with_the_key(lineage: Lineage) -> None:
    two = (
        'rules:\n  - {name: a, from: "old.{i:int}.{w}", to: "a.{i}.{w}"}\n  - {name: b, from: '
        '"old.{n}.w", to: "b.{n}"}\n'
    )
    assert found(lineage, two, "M615") == [
        "rules `a` and `b` both take `old.7.w`, and neither is narrower"
    ]
    assert not found(
        lineage, two.replace("{w}", "w").replace('to: "a.{i}.w', 'to: "a.{i}.w'), "M615"
    )


def test_conditions_may_divide_the_keys(lineage: Lineage) -> None:
    two = (
        'rules:\n  - {name: a, from: "old.{x}.{w}", to: "a.{x}.{w}", when: {ndim: 1}}\n  - '
        '{name: b, from: "{y}.0.{w}", to: "b.{y}.{w}"}\n'
    )
    assert not found(lineage, two, "M615")
    assert found(lineage, two.replace(", when: {ndim: 1}", ""), "M615")
    assert not found(lineage, two.replace("when: {ndim: 1}", "keep_source: true"), "M615")


def test_the_same_condition_on_a_param_divides_nothing(lineage: Lineage) -> None:
    one = '{name: a, from: "old.{x}.{w}", to: "a.{x}.{w}", where: {$f: true}}'
    other = '{name: b, from: "{y}.0.{w}", to: "b.{y}.{w}", where: {$f: %s}}'
    body = f"params: {{f: {{type: bool, default: true}}}}\nrules:\n  - {one}\n  - {other}\n"
    assert found(lineage, body % "true", "M615")
    assert not found(lineage, body % "false", "M615")


def test_files_of_an_edge_may_not_read_one_key_even_where_one_is_narrower(lineage: Lineage) -> None:
    lineage.rules('rules: [{name: a, from: "old.{i:int}.w", to: "new.{i}.w"}]\n')
    lineage.rules('rules: [{name: b, from: "old.0.w", to: "new.x.w"}]\n', "second")
    (finding,) = lineage.found("M615")
    assert "two files of one edge" in finding.message
    assert {s.file.rpartition("/")[2] for s in finding.spans} == {"first.yaml", "second.yaml"}


A = '{name: a, from: "{p...}.a", to: "{p}.c"%s}'
B = '{name: b, from: "{p...}.b", to: "{p}.c"%s}'


def two(one: str, other: str) -> str:
    return f"params: {{f: {{type: bool, default: true}}}}\nrules:\n  - {one}\n  - {other}\n"


def test_two_rules_that_write_one_key_are_found_with_the_key_and_its_sources(
    lineage: Lineage,
) -> None:
    lineage.rules(two(A % "", B % ""))
    (finding,) = lineage.found("M617")
    assert finding.message == "rules `a` and `b` both write `c`"
    assert finding.notes == (
        "it would be made of `a` and of `b`",
        "on a downgrade nothing decides which of them takes it",
    )
    assert [s.text.split()[2] for s in finding.spans] == ["b,", "a,"]
    assert all(s.text[s.column - 1 :].startswith('"{p}.c"') for s in finding.spans)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        # alternatives, of which the way back restores one
        (A % ", optional: true", B % ", optional: true, inverse: skip", False),
        (A % "", B % ", inverse: skip", False),
        # nobody says when either condition holds
        (A % ", when: {ndim: 1}", B % "", False),
        (A % ", where: {p: [x]}", B % ", where: {p: [x]}", False),
        (A % ", where: {$f: true}", B % ", where: {$f: false}", False),
        (A % ", where: {$f: true}", B % ", where: {$f: true}", True),
        (A % ", if_exists: keep", B % ", if_exists: keep", True),
        (A % ", keep_source: true", B % "", True),
        # a narrower target decides on the way back
        (A % "", '{name: b, from: head.b, to: head.c}', False),
        (A % "", '{name: b, from: "{p...}.b", to: "{p}.d"}', False),
        # one alternative is the other rule's target
        ('{name: a, from: "{p...}.{w:q|k}", to: "{p}.n.{w}", map: {w: {q: x, k: y}}}',
        '{name: b, from: "{p...}.z", to: "{p}.n.y"}', True),
        ('{name: a, from: "{p...}.{w:q|k}", to: "{p}.n.{w}", map: {w: {q: x, k: y}}}',
        '{name: b, from: "{p...}.z", to: "{p}.n.k"}', False),
        ('{name: a, from: "{p...}.qkv", to: "{p}.{w:q|k}", via: [{split: {into: w}}]}',
        '{name: b, from: "{p...}.k2", to: "{p}.k"}', True),
        # numbers that interleave
        ('{name: a, from: "a.{i:int}.w", to: "n.{2*i}.w"}',
        '{name: b, from: "b.{i:int}.w", to: "n.{2*i+1}.w"}', False),
        ('{name: a, from: "a.{i:int}.w", to: "n.{2*i}.w"}',
        '{name: b, from: "b.{i:int}.{x}", to: "n.{2*i}.{x}"}', False),
        ('{name: a, from: "a.{i:int}.{y}.w", to: "n.{2*i}.w.{y}"}',
        '{name: b, from: "b.{i:int}.{x}.v", to: "n.{2*i}.{x}.v"}', True),
        ('{name: a, from: "{p...}.w", to: {x: "{p}.v", y: "{p}.v"}, via: [{split: {into: role}}]}',
        B % "", True),
        ('{name: a, from: "{p...}.w", to: {x: "{p}.v", y: "{p}.u"}, via: [{split: {into: role}}]}',
        B % "", False),
        # a path that is rewritten is in no pattern
        ('{name: a, from: "{p...}.a", to: "{p}.c", map: {p: {x: y}}}', B % "", False),
    ],
)  # fmt: skip
def test_which_rules_write_the_same_key(lineage: Lineage, one: str, other: str, same: bool) -> None:
    lineage.rules(two(one, other))
    assert bool(lineage.found("M617")) is same


@pytest.mark.parametrize(
    ("one", "other", "key"),
    [
        (A % ", optional: true", B % ", optional: true", "c"),
        (A % ", optional: true", '{name: b, from: head.b, to: head.c, optional: true}', "head.c"),
        ('{name: a, from: "{m}.x", to: "{m}.v", map: {m: {k: k, l: l}}, optional: true}',
         '{name: b, from: "{m}.y", to: "{m}.v", map: {m: {k: k}}, optional: true}', "k.v"),
        # decided, by a param or for good
        (A % ", optional: true, where: {$f: true}",
         B % ", optional: true, where: {$f: false}", None),
        (A % ", optional: true, where: {$f: true}",
         B % ", optional: true, where: {$f: true}", "c"),
        (A % ", optional: true", B % ", optional: true, inverse: skip", None),
        # the narrower one is always there
        (A % ", optional: true", "{name: b, from: head.b, to: head.c}", None),
        # and a key that only one of them can have made
        ('{name: a, from: "m.{x}.w", to: "n.{x}.w", optional: true}',
         '{name: b, from: m.k.w, to: n.k.w, optional: true}', None),
    ],
)  # fmt: skip
def test_of_two_optional_rules_with_one_target_a_param_should_decide(
    lineage: Lineage, one: str, other: str, key: str | None
) -> None:
    lineage.rules(two(one, other))
    assert lineage.found("M617") == []
    found = [d.message for d in lineage.found("M619")]
    said = f"rules `a` and `b` are alternatives for `{key}`, and nothing says which of its sources"
    assert found == ([] if key is None else [f"{said} a downgrade makes"])


def test_a_rule_whose_source_belongs_to_a_narrower_one_does_not_write_the_key(
    lineage: Lineage,
) -> None:
    body = two(
        '{name: a, from: "m.{x}.w", to: "n.{x}.w"}', '{name: b, from: "q.{y}", to: "n.k.{y}"}'
    )
    lineage.rules(body)
    assert [d.message for d in lineage.found("M617")] == ["rules `a` and `b` both write `n.k.w`"]
    lineage.rules(body + '  - {name: c, from: "m.k.w", to: "z.w"}\n')
    assert lineage.found("M617") == []


def test_a_file_of_the_way_back_leaves_the_way_forwards(lineage: Lineage) -> None:
    lineage.rules(two(A % "", B % ""))
    lineage.rules(
        'rules: [{name: back, from: "{p...}.c", to: "{p}.a"}]\n', "back", edge=("v2", "v1")
    )
    (finding,) = lineage.found("M617")
    assert finding.notes == ("it would be made of `a` and of `b`",)
    lineage.rules(two(A % ", optional: true", B % ", optional: true"))
    assert lineage.found("M617") == []


def test_a_rule_without_inverse_ends_the_way_back_before_anything_is_to_be_decided(
    lineage: Lineage,
) -> None:
    joined = (
        '{name: a, from: "{p...}.{i:int}.a", to: "{p}.c", optional: true, via: [{concat: '
        "{over: i, dim: 0}}]}"
    )
    lineage.rules(two(joined, B % ", optional: true"))
    assert lineage.found("M617") == []


def test_files_of_an_edge_may_not_write_one_key_even_where_one_is_narrower(
    lineage: Lineage,
) -> None:
    lineage.rules('rules: [{name: a, from: "old.{i:int}.w", to: "new.{i}.w"}]\n')
    lineage.rules('rules: [{name: b, from: "x.w", to: "new.0.w"}]\n', "second")
    (finding,) = lineage.found("M617")
    assert {s.file.rpartition("/")[2] for s in finding.spans} == {"first.yaml", "second.yaml"}


THREE = LAYOUTS + "  v3: {title: third, note: n}\n"


@pytest.mark.parametrize(
    ("second", "reachable"),
    [
        ('{name: b, from: "new.{i:int}.w", to: "x.{i}"}', True),
        ('{name: b, from: "new.{i:int}.ww", to: "x.{i}"}', False),
        ('{name: b, from: "new.{i:int}.ww", to: "x.{i}", optional: true}', True),
        ('{name: b, from: "kept.{k...}", to: "x.{k}"}', True),
        ('{name: b, from: "old.{i:int}.w", to: "x.{i}"}', False),
        ('{name: b, from: "{k...}.w", to: "x.{k}"}', True),
    ],
)
def test_what_no_edge_before_makes_cannot_be_read(
    lineage: Lineage, second: str, reachable: bool
) -> None:
    lineage.layouts(THREE)
    lineage.rules(
        'keep: ["kept.{n}.bias"]\nrules: [{name: a, from: "old.{i:int}.w", to: "new.{i}.w"}]\n'
    )
    lineage.rules(f"rules: [{second}]\n", edge=("v2", "v3"))
    assert bool(lineage.found("M616")) is not reachable


@pytest.mark.parametrize(
    ("one", "other", "code", "key"),
    [
        ("from: 'model.{k...}', to: '{k}'", "from: 'module.{k...}', to: '{k}'", "M617", "7"),
        ("from: 'a.{i:int}', to: 'b.{i+13}'", "from: 'c.{i:int}', to: 'b.{i+13}'", "M617", "b.13"),
        (
            "from: 'a.{i:int}', to: 'b.{i}.{i+1}'",
            "from: 'c.{i:int}', to: 'b.{i}.{i+1}'",
            "M617",
            "b.0.1",
        ),
        ("from: 'a.{i:int}', to: 'b.{3*i}'", "from: 'c.{i:int}', to: 'b.{2*i+1}'", "M617", "b.3"),
        ("from: 'a.{i:int}', to: 'b.{2*i}'", "from: 'c.{i:int}', to: 'b.{2*i+1}'", "M617", None),
        (
            "from: 'a.{i:int}.{i+1}', to: 'b.{i}'",
            "from: 'a.{j:int}.{j+1}', to: 'c.{j}'",
            "M615",
            "a.0.1",
        ),
        ("from: '{k...}', to: 'a.{k}'", "from: '{j...}', to: 'b.{j}'", "M615", "7"),
    ],
)
def test_keys_in_common_are_found_whatever_the_numbers(
    lineage: Lineage, one: str, other: str, code: str, key: str | None
) -> None:
    messages = found(lineage, f"rules:\n  - {{name: a, {one}}}\n  - {{name: b, {other}}}\n", code)
    assert [message.split("`")[5] for message in messages] == ([] if key is None else [key])


def test_a_rule_whose_capture_has_a_type_in_from_only_is_without_effect(lineage: Lineage) -> None:
    rules = (
        "rules:\n  - {name: a, from: 'x.{i:int}.w', to: 'x.{i}.w'}\n  - {name: b, from: y, to: z}\n"
    )
    assert found(lineage, rules, "M613")
    assert not found(lineage, rules.replace("to: 'x.{i}.w'", "to: 'x.{i+1}.w'"), "M613")


@pytest.mark.parametrize(
    ("pattern", "letters"),
    [
        ("old.*.w", "`*`"),
        (r"old\\.(\\d+)\\.w", "`(` and `\\`"),
        ("^old.[0-9].w$", "`$` and `[` and `^`"),
        ("old.{i:int}.{w:w|*}", "`*`"),
        ("old.{i:int}.w", ""),
        ("old.{i:int}.w?+", ""),
    ],
)
def test_letters_of_globs_and_regular_expressions_are_found(
    lineage: Lineage, pattern: str, letters: str
) -> None:
    lineage.rules(
        f'keep: ["{pattern}"]\nrules: [{{name: a, from: "old.{{i:int}}.w", to: "new.{{i}}.w"}}]\n'
    )
    said = [
        (d.message.rpartition("` takes ")[2], d.spans[0].line, d.help)
        for d in lineage.found("M625")
    ]
    assert [(words, line) for words, line, _help in said] == (
        [(f"{letters} literally", 7)] if letters else []
    )
    assert all("neither globs nor regular expressions" in advice for _, _, advice in said)


def test_letters_of_another_notation_are_found_wherever_patterns_stand_and_may_be_meant(
    lineage: Lineage,
) -> None:
    body = """params: {n: {type: int, shape: {key: "a.*"}}, d: {type: str, dtype: {key: "b.*"}}}
rules:
  - {name: a, from: {x: "old.{i:int}.w", y: "c.*"}, to: {x: "new.{i}.w", y: "e.(1)"}, where: {$n: 1, $d: float32}}
"""  # noqa: E501
    lineage.rules(body)
    lineage.layouts(LAYOUTS.replace('"new.{i:int}.w"', '"new.[0].w"'))
    assert sorted(d.message.split("`")[1] for d in lineage.found("M625")) == [
        "a.*",
        "b.*",
        "c.*",
        "e.(1)",
        "new.[0].w",
    ]
    lineage.rules(
        body.replace("  - {", "  # migrate: allow M625 because the exporter writes so\n  - {")
    )
    assert sorted(d.message.split("`")[1] for d in lineage.found("M625", "M603")) == [
        "a.*",
        "b.*",
        "new.[0].w",
    ]
