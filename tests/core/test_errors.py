"""Diagnostics: pages, rendering, repetition, and text that is safe to print."""

import pytest

from migrate.core.errors import (
    CheckpointError,
    Diagnostic,
    QuestionError,
    Report,
    Span,
    condensed,
    did_you_mean,
    fail,
    listed,
    page,
    printable,
)


def test_a_code_is_its_page():
    found = page("M203")
    assert (found.name, found.severity, found.exit) == ("undefined-capture", "error", 2)
    assert found.body
    with pytest.raises(KeyError):
        page("M000")


def test_it_is_drawn_as_rustc_would():
    span = Span("a.yaml", 12, 5, 6, "  - splitt:", "not an operation")
    drawn = Diagnostic(
        "M102", "unknown operation `splitt`", (span,), ("a note",), "did you mean `split`?"
    ).render()
    assert drawn.splitlines() == [
        "error[M102]: unknown operation `splitt`",
        "  --> a.yaml:12:5",
        "   |",
        "12 |   - splitt:",
        "   |     ^^^^^^ not an operation",
        "   = note: a note",
        "   = help: did you mean `split`?",
    ]


def test_the_exit_status_follows_from_the_code():
    with pytest.raises(QuestionError) as wrong:
        fail("M102", "x")
    assert wrong.value.exit_code == 2
    report = Report()
    report.add("M211", "a checkpoint's fault")
    with pytest.raises(CheckpointError) as caught:
        report.check()
    assert caught.value.exit_code == 3
    report.add("M102", "the question's fault")
    with pytest.raises(QuestionError) as both:
        report.check()
    assert len(both.value.diagnostics) == 2


def test_a_warning_alone_raises_nothing():
    report = Report()
    report.add("M511", "deprecated")
    report.check()
    assert not report.has_errors()


def test_what_repeats_at_one_place_is_said_three_times_and_counted():
    here, there = Span("a.yaml", 1, 1), Span("a.yaml", 2, 1)
    many = [Diagnostic("M207", f"group {n}", (here,)) for n in range(60)] + [
        Diagnostic("M207", "elsewhere", (there,))
    ]
    kept = condensed(many)
    assert [d.message for d in kept] == ["group 0", "group 1", "group 2", "elsewhere"]
    assert kept[2].notes == ("and 57 more like this",)
    placeless = [Diagnostic("M211", f"key {n}") for n in range(5)]
    assert condensed(placeless) == placeless


def test_what_repeats_without_a_place_is_said_twenty_times_and_counted():
    many = [Diagnostic("M211", f"key {n}") for n in range(20_000)] + [
        Diagnostic("M212", "something else")
    ]
    kept = condensed(many)
    assert [d.message for d in kept] == [f"key {n}" for n in range(20)] + ["something else"]
    assert kept[18].notes == ()
    assert kept[19].notes == ("and 19,980 more like this",)
    permitted = [
        Diagnostic("M211", f"{word} {n}", permit=word)
        for n in range(25)
        for word in ("drop", "lossy")
    ]
    assert [sum(d.permit == word for d in condensed(permitted)) for word in ("drop", "lossy")] == [
        20,
        20,
    ]


def test_of_a_very_long_line_only_what_is_about_the_caret_is_drawn():
    line = "a" * 50_000 + "HERE" + "b" * 50_000
    drawn = Diagnostic("M111", "x", (Span("a.yaml", 1, 50_001, 4, line),)).render().splitlines()
    assert max(map(len, drawn)) < 260
    assert drawn[3][drawn[4].index("^") : drawn[4].rindex("^") + 1] == "HERE"
    whole = Diagnostic("M111", "x", (Span("a.yaml", 1, 1, 100_004, line),)).render().splitlines()
    assert max(map(len, whole)) < 260


def test_text_of_a_checkpoint_cannot_drive_a_terminal():
    assert printable("a\x1b[31mb\n") == "a\\x1b[31mb\\n"
    assert printable("ü") == "\\xfc"
    assert len(printable("x" * 500)) == 120
    assert printable("") == '""'
    assert listed([str(n) for n in range(25)]).endswith("19 … and 5 more")


def test_only_near_words_are_suggested():
    assert did_you_mean("stakc", ["stack", "split"]) == "did you mean `stack`?"
    assert did_you_mean("zebra", ["stack", "split"]) is None
