from __future__ import annotations

from pathlib import Path

import pytest
import yaml as pyyaml

from migrate.core.errors import QuestionError, Report
from migrate.source import yaml


def codes(text: str) -> list[tuple[str, int, int]]:
    with pytest.raises(QuestionError) as caught:
        yaml.parse(text, "r.yaml")
    return [(d.code, d.spans[0].line, d.spans[0].column) for d in caught.value.diagnostics]


def test_scalars_stay_the_text_that_was_written() -> None:
    data = yaml.parse("a: 2.10\nb: no\nc: 012\nd: 1:30\ne: 2024-01-01\nf: 1_000\n7: x\n", "r").data
    assert data == {
        "a": "2.10",
        "b": "no",
        "c": "012",
        "d": "1:30",
        "e": "2024-01-01",
        "f": "1_000",
        "7": "x",
    }


def test_core_types_are_those_of_yaml_1_2_and_no_others() -> None:
    data = yaml.parse(
        "[null, ~, true, False, 12, -3, 012, 1.5, 1e3, .inf, no, on, 1_000, 0x10, '1', 2024-01-01]",
        "r",
    ).data
    assert yaml.core(data) == [
        None,
        None,
        True,
        False,
        12,
        -3,
        12,
        1.5,
        1000.0,
        float("inf"),
        "no",
        "on",
        "1_000",
        "0x10",
        "1",
        "2024-01-01",
    ]


def test_exact_keeps_as_text_what_could_not_be_written_back() -> None:
    data = yaml.parse("[1, -1, 007, +1, 1.10, true, '2']", "r").data
    assert yaml.exact(data) == [1, -1, "007", "+1", "1.10", True, "2"]


def test_a_number_of_a_million_digits_is_text() -> None:
    assert isinstance(yaml.core(yaml.PlainScalar("9" * 100_000)), str)


def test_spans_point_at_keys_and_values() -> None:
    document = yaml.parse("a:\n  - b: [x, yy]\n    c: 'q'  # note\n", "r.yaml")
    value, key = document.span(("a", 0, "b", 1)), document.key_span(("a", 0, "c"))
    assert (value.file, value.line, value.column, value.length, value.text) == (
        "r.yaml",
        2,
        12,
        2,
        "  - b: [x, yy]",
    )
    assert (key.line, key.column, key.length) == (3, 5, 1)
    assert (document.span(("a", 0, "c")).column, document.span(("a", 0, "c")).length) == (8, 3)


def test_a_path_that_is_not_there_gets_the_place_of_its_nearest_ancestor() -> None:
    document = yaml.parse("a:\n  b: {c: 1}\n", "r")
    assert document.span(("a", "b", "nothing", 3)) == document.span(("a", "b"))
    assert document.span(("nothing",)).line == 1


@pytest.mark.parametrize("separator", ["\n", "\r\n"])
def test_lines_are_counted_as_yaml_counts_them(separator: str) -> None:
    span = yaml.parse(f"a: 1{separator}b: 2{separator}c: 3", "r").span(("c",))
    assert (span.line, span.column, span.text) == (3, 4, "c: 3")


def test_columns_count_code_points() -> None:
    span = yaml.parse('{"ä𝄞": 1, b: 2}', "r").span(("b",))
    assert span.text[span.column - 1] == "2"


def test_all_forbidden_features_come_out_in_one_report() -> None:
    text = "a: &x 1\nb: *x\nc: !!str 2\nd: ! 3\ne: {<<: {q: 1}}\na: 4\n? [k]\n: 5\n"
    found = codes(text)
    assert [(code, line) for code, line, _ in found] == [
        ("M105", 1),
        ("M105", 2),
        ("M105", 3),
        ("M105", 4),
        ("M105", 5),
        ("M104", 6),
        ("M105", 7),
    ]


def test_a_duplicate_key_shows_both_places() -> None:
    with pytest.raises(QuestionError) as caught:
        yaml.parse("a: 1\nb: 2\na: 3\n", "r")
    (found,) = caught.value.diagnostics
    assert [(s.line, s.label) for s in found.spans] == [
        (3, "and here again"),
        (1, "first written here"),
    ]


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("a: 1\nfrom: {p...}.x\n", (2, 7)),
        ("keep:\n  - {p...}.{m:a|b}.x\n", (2, 5)),
        ("- {from: {p...}.x, to: y}\n", (1, 10)),
        ("from: {p...}\n", (1, 7)),
        ("from: {e:int}\n", (1, 7)),
        ("from: *.weight\n", (1, 7)),
        ("from: *w\n", (1, 7)),
        ("from: @r\n", (1, 7)),
    ],
)
def test_an_unquoted_pattern_gets_a_hint_of_its_own(text: str, place: tuple[int, int]) -> None:
    assert codes(text) == [("M110", *place)]


def test_braces_that_are_mappings_are_left_alone() -> None:
    text = "a: {b: }\nc: [{d: 1}, {e}]\n\"f\": \"{p...}.x\"\ng: ['{x}.y', {h: '{z}'}]\n"
    assert yaml.parse(text, "r").data["c"] == [{"d": "1"}, {"e": ""}]


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("a:\n\tb: 1\n", 2, "tab"),
        ("a:\n  b: 1\n\tc: 2\n", 3, "tab"),
        ("a: 1\nwhy: foo: bar\n", 2, "colon"),
        ("a: `x`\n", 1, "cannot start with"),
        ("a: [1, 2\nb: 3\n", 2, "not valid YAML"),
        ("a: 'x\n", 2, "not valid YAML"),
        ("a:\n   b: 1\n  c: 2\n", 3, "not valid YAML"),
        ("a: 1\nb: \uffff\n", 2, "does not allow"),
        ("", 1, "empty"),
        ("# only a comment\n", 1, "empty"),
        ("a: 1\nb: \ud800\n", 2, "surrogate"),
    ],
)
def test_what_is_not_yaml_is_said_with_its_line(text: str, line: int, says: str) -> None:
    with pytest.raises(QuestionError) as caught:
        yaml.parse(text, "r")
    (found,) = caught.value.diagnostics
    assert (found.code, found.spans[0].line) == ("M108", line)
    assert says in found.message


def test_several_documents_and_directives_are_refused() -> None:
    assert codes("a: 1\n---\nb: 2\n") == [("M105", 2, 1)]
    assert codes("%YAML 1.1\n---\na: 1\n")[0][0] == "M105"
    assert yaml.parse("---\na: 1\n", "r").data == {"a": "1"}


def test_depth_size_and_events_are_limited() -> None:
    assert yaml.parse("[" * 32 + "]" * 32, "r").data
    assert codes("[" * 33 + "]" * 33) == [("M109", 1, 33)]
    assert [c for c, _, _ in codes("[" * 100_000)] == ["M109"]
    assert [c for c, _, _ in codes("[" + "1," * 100_000 + "]")] == ["M109"]
    assert [c for c, _, _ in codes("a: " + "x" * (1 << 20))] == ["M109"]
    assert yaml.parse("a: " + "9" * yaml.MAX_DIGITS, "r").data
    assert codes("a: " + "9" * (yaml.MAX_DIGITS + 1)) == [("M109", 1, 4)]
    assert yaml.parse("a: '" + "9" * (yaml.MAX_DIGITS + 1) + "'", "r").data


@pytest.mark.parametrize(
    "text",
    ['a: "\\ud800"', '"\\ud800": 1', 'a: "\\ud83d\\ude00"', 'a: "\\U00110000"', 'a: "\\UFFFFFFFF"'],
)
@pytest.mark.parametrize("parser", ["SafeLoader", "CSafeLoader"])
def test_an_escape_that_is_no_character_is_refused_by_either_parser(
    monkeypatch: pytest.MonkeyPatch, parser: str, text: str
) -> None:
    loader = getattr(pyyaml, parser, pyyaml.SafeLoader)
    monkeypatch.setattr(pyyaml, "CSafeLoader", loader, raising=False)
    assert {c for c, _, _ in codes(text)} == {"M108"}


def test_an_alias_bomb_is_an_error_and_not_a_load() -> None:
    text = "a: &a [x, x]\n" + "".join(
        f"{c}: &{c} [*{b}, *{b}]\n" for b, c in zip("abcdefgh", "bcdefghi", strict=True)
    )
    assert {code for code, _, _ in codes(text)} == {"M105"}


@pytest.mark.parametrize("raw", [b"a: \xff\n", "a: 1\n".encode("utf-16")])
def test_a_file_that_is_not_utf_8_is_said_to_be_none(tmp_path, raw: bytes) -> None:
    path = tmp_path / "r.yaml"
    path.write_bytes(raw)
    report = yaml.Report()
    assert not yaml.read_file(path, report).whole
    assert [d.code for d in report.diagnostics] == ["M108"]


def test_a_file_that_is_not_there_is_a_diagnostic(tmp_path) -> None:
    report = yaml.Report()
    assert not yaml.read_file(tmp_path / "none.yaml", report).whole
    assert "cannot read" in report.diagnostics[0].message


def test_a_byte_order_mark_is_not_part_of_the_first_key(tmp_path) -> None:
    (tmp_path / "r.yaml").write_bytes(b"\xef\xbb\xbfa: 1\n")
    report = yaml.Report()
    assert yaml.read_file(tmp_path / "r.yaml", report).data == {"a": "1"}


def test_the_pure_python_parser_gives_the_same_document(monkeypatch) -> None:
    text = 'a: [1, "2", {b: c}]\nd: |\n  long\ne:\n  - f: 0.10\n'
    fast = yaml.parse(text, "r")
    monkeypatch.setattr(pyyaml, "CSafeLoader", pyyaml.SafeLoader, raising=False)
    slow = yaml.parse(text, "r")
    assert slow.data == fast.data
    assert [type(v) for v in slow.data["a"]] == [type(v) for v in fast.data["a"]]
    assert slow.span(("a", 2, "b")) == fast.span(("a", 2, "b"))
    assert [c for c, _, _ in codes("from: {p...}.x\n")] == ["M110"]


def hidden(text: str) -> list[tuple[int, int, str]]:
    """(line, column, code point named) of what is refused as hidden; nothing else may be wrong."""
    report = Report()
    document = yaml.read_yaml(text, "r", report)
    assert {d.code for d in report.diagnostics} <= {"M116"}
    assert document.whole == (not report.diagnostics)
    return [(d.spans[0].line, d.spans[0].column, d.message.split()[0]) for d in report.diagnostics]


@pytest.mark.parametrize("end", ["\x85", "\u2028", "\u2029"])
def test_a_line_end_that_editors_do_not_show_is_refused_outside_of_quotes(end: str) -> None:
    point = f"U+{ord(end):04X}"
    # to an editor the rule is part of the comment, to the parser it is a rule
    assert hidden(f"# what follows is safe{end}a: {{drop: }}\nb: 1\n") == [(1, 23, point)]
    assert hidden(f"b: 1\n\na: one{end}  two\n") == [(3, 7, point)]
    assert hidden(f"b: 1\nc: |\n  one{end}  two\n") == [(3, 6, point)]
    assert hidden(f"a: \"one{end}two\"\nb: 'one{end}two'\n") == []
    assert hidden(f'a: "one"{end}b: 2\n') == [(1, 9, point)]
    assert hidden('a: "\\x85\\u2028\\u2029\\L\\P\\N"\n') == []


def test_it_is_refused_beside_what_the_parser_stumbles_over() -> None:
    report = Report()
    yaml.read_yaml("# safe\u2028a: [1\nb: 2\nc: '\u2028'\n", "r", report)
    assert [d.code for d in report.diagnostics] == ["M108", "M116"]


CONTROLS = [*range(0x09), 0x0B, 0x0C, *range(0x0E, 0x20), *range(0x7F, 0x85), *range(0x86, 0xA0)]
BIDI = [0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)]
UNSEEN = [
    0xAD,
    0x034F,
    0x180E,
    0x200B,
    0x200C,
    0x200D,
    0x2060,
    0x2064,
    0x3164,
    0xFEFF,
    0xFFA0,
    0xFFF9,
    0xE0001,
    0xE0041,
    0xE007F,
]


def test_what_changes_how_a_line_looks_is_refused_wherever_it_stands() -> None:
    for code in (*CONTROLS, *BIDI, *UNSEEN):
        for text, place in (
            (f"a: 1\n# x{chr(code)}y\n", (2, 4)),
            (f"a: 'x{chr(code)}y'\n", (1, 6)),
            (f'"a{chr(code)}": 1\n', (1, 3)),
            (f"a: |\n  x{chr(code)}y\n", (2, 4)),
            (f"a: x{chr(code)}y\n", (1, 5)),
        ):
            assert hidden(text) == [(*place, f"U+{code:04X}")]
        # an escape is seen
        assert yaml.parse(f'a: "x\\U{code:08x}y"\n', "r").data == {"a": f"x{chr(code)}y"}


def test_a_carriage_return_alone_is_refused_and_before_a_line_feed_it_is_not() -> None:
    assert hidden("a: 1\r\n# x\r\nb: 'y\r\n  z'\r\n") == []
    assert hidden("a: 1\r\n# drop: nothing\rb: 2\r\n") == [(2, 16, "U+000D")]


def test_other_scripts_and_emoji_are_left_alone() -> None:
    assert hidden("# Größe 専門家 خبراء ⚠\ufe0f\na: 'é 𝄞 \u3000'\n") == []


def test_a_byte_order_mark_may_begin_a_file_once(tmp_path: Path) -> None:
    for marks, codes in ((1, []), (2, ["M116"])):
        (tmp_path / "r.yaml").write_bytes(b"\xef\xbb\xbf" * marks + b"a: 1\n")
        report = Report()
        yaml.read_file(tmp_path / "r.yaml", report)
        assert [d.code for d in report.diagnostics] == codes


def test_hidden_characters_without_end_are_answered_briefly() -> None:
    assert len(hidden("a: 1\n# " + "\u202e" * 100_000)) == yaml.MAX_REFUSED
    assert len(hidden("a: 1\n# " + "\u2028# " * 10_000)) == yaml.MAX_REFUSED
