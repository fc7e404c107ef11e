import pytest

from migrate.core.errors import PatternError
from migrate.core.keys import CaptureType, parse


@pytest.mark.parametrize(
    ("text", "code", "culprit"),
    [
        ("", "M201", ""),
        ("a{", "M201", "{"),
        ("a.{b.c", "M201", "{"),
        ("a}", "M201", "}"),
        ("{a}}", "M201", "}"),
        ("{w:x{y|z}", "M201", "{"),
        ("x.{}", "M201", "{}"),
        ("x.{...}", "M201", "{...}"),
        ("x.{:int}", "M201", "{:int}"),
        ("{é}", "M201", "{é}"),
        ("{a.b}", "M201", "{a.b}"),
        ("{ a }", "M201", "{ a }"),
        ("{n:}", "M201", "{n:}"),
        ("{n:integer}", "M201", "{n:integer}"),
        ("{n:int...}", "M201", "{n:int...}"),
        ("{w:a||b}", "M201", "{w:a||b}"),
        ("{w:a|b|}", "M201", "{w:a|b|}"),
        ("{w:a|b|a}", "M201", "{w:a|b|a}"),
        ("{a...}.{b...}", "M201", "{a...}.{b...}"),
        ("x.{a...}.{b...}.y", "M201", "{a...}.{b...}"),
        ("x{a...}", "M201", "{a...}"),
        ("{a...}x", "M201", "{a...}"),
        ("x@{a...}", "M201", "{a...}"),
        ("{a...}{b}", "M201", "{a...}"),
        ("{b}{a...}", "M201", "{a...}"),
        ("x.{a}{b}", "M201", "{a}{b}"),
        ("{i:int}{j:int}", "M201", "{i:int}{j:int}"),
        ("{i:int}{i+1}", "M201", "{i:int}{i+1}"),
        ("w1{i:int}", "M201", "{i:int}"),
        ("w{i:int}0", "M201", "{i:int}"),
        ("{n:int}.{n:a|b}", "M201", "{n:a|b}"),
        ("{w:a|b}.{w:b|a}", "M201", "{w:b|a}"),
        ("{n}.{n:int}", "M201", "{n:int}"),
        ("{n}.{n+1}", "M201", "{n+1}"),
        ("{n:int}.{n...}", "M201", "{n...}"),
        ("{k:flat}.{k:int}", "M201", "{k:int}"),
        ("{k:int}.{k:flat}", "M201", "{k:flat}"),
        ("a.{n//2}", "M111", "//"),
        ("a.{n*$k}", "M111", "*"),
        ("a.{n-m}", "M111", "n-m"),
        ("a.{*}", "M111", "*"),
        ("{n+}", "M111", ""),
        ("x" * 5000, "M201", "x" * 1000),
    ],
)
def test_what_is_no_pattern_is_refused_with_its_place(text, code, culprit):
    with pytest.raises(PatternError) as caught:
        parse(text)
    assert (caught.value.code, text[caught.value.start : caught.value.end]) == (code, culprit)


def test_a_type_may_be_repeated_if_it_is_the_same():
    assert parse("{n:int}.{n:int}.{n}").captures == ("n",)
    assert parse("{w:a|b}.{w:a|b}").types["w"] == CaptureType("enum", ("a", "b"))


def test_a_type_that_contradicts_an_earlier_pattern_is_refused():
    with pytest.raises(PatternError, match="where it first occurs"):
        parse("{n:int}", {"n": CaptureType("plain")})
    with pytest.raises(PatternError, match="the path `m`"):
        parse("x{m}", {"m": CaptureType("path")})


def test_a_path_that_is_known_flattened_only_cannot_be_written():
    with pytest.raises(PatternError, match="dots removed"):
        parse("ema.{k}", {"k": CaptureType("flat")})
    assert parse("ema.{k...}", {"k": CaptureType("flat")}).types["k"] == CaptureType("path")


def test_a_misspelt_type_is_guessed():
    with pytest.raises(PatternError) as caught:
        parse("{n:Int}")
    assert caught.value.help == "did you mean {n:int}?"


def test_one_alternative_and_dots_and_digits_in_alternatives_are_fine():
    assert parse("{w:norm}.{v:a.b|c}.{i:1|2}").match("norm.a.b.2") == ("norm", "a.b", "2")
