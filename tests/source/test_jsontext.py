"""JSON has one reading here."""

import gc
import sys

import pytest

from migrate.core.errors import CheckpointError
from migrate.source.jsontext import collector_paused, parse


def test_what_is_json_comes_back_in_order():
    assert parse(b'{"b": [1, -2, "x\\u00fc\\ud83d\\ude00"], "a": {"c": null, "d": true}}', "f") == {
        "b": [1, -2, "xü\U0001f600"],
        "a": {"c": None, "d": True},
    }
    assert list(parse(b'{"b": 1, "a": 2}', "f")) == ["b", "a"]
    assert parse(b'{"a": -0.5, "b": -0}', "f", floats=True) == {"a": -0.5, "b": 0}


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b'{"a":1,}',
        b"\xff",
        b'{"a":1,"a":1}',
        b"[1.0]",
        b"[-0]",
        b"[NaN]",
        b'"\\ud800"',
        b"1" * 4400,
        b"\xef\xbb\xbf1",
    ],
)
def test_what_is_not_is_named_with_its_file(text):
    with pytest.raises(CheckpointError, match="some/file: ") as caught:
        parse(text, "some/file")
    assert caught.value.diagnostics[0].code == "M906"


def test_nan_is_no_json_even_where_floats_are_allowed():
    with pytest.raises(CheckpointError, match="NaN is not JSON"):
        parse(b"[NaN]", "f", floats=True)


def test_what_would_fill_stack_or_memory_is_a_limit():
    # since 3.13 the parser of Python goes deeper, and finds that the end is missing
    codes = {"M914"} if sys.version_info < (3, 13) else {"M914", "M906"}
    for text, allowed in (
        (b"[" * 5000 + b" " * 50_000, codes),
        (b"[" + b"{}," * 50_000 + b"1]", {"M914"}),
    ):
        with pytest.raises(CheckpointError) as caught:
            parse(text, "f")
        assert caught.value.diagnostics[0].code in allowed


def test_the_collector_is_as_before_afterwards_also_after_an_error():
    assert gc.isenabled()
    with pytest.raises(CheckpointError):
        parse(b"{", "f")
    assert gc.isenabled()
    with collector_paused():
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with collector_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_what_the_process_froze_stays_frozen_and_little_is_not_worth_counting_it(monkeypatch):
    frozen, counted = gc.get_freeze_count, []
    before = frozen()
    assert before, "conftest.py freezes the tests"
    monkeypatch.setattr(gc, "get_freeze_count", lambda: counted.append(True) or frozen())
    parse(b'{"a": [1]}', "f")
    assert not counted
    made = parse(b"[" + b'["some", "text"],' * 20_000 + b"0]", "f")
    assert counted
    assert len(made) == 20_001
    # some of them are let go of meanwhile
    assert before - 1000 < frozen() <= before


def test_what_is_no_json_is_told_with_line_column_and_a_way_out():
    with pytest.raises(CheckpointError) as caught:
        parse(b'{"a": 1,\n "b": x}', "config.json")
    (found,) = caught.value.diagnostics
    assert (found.code, found.message) == (
        "M906",
        "config.json: not JSON: expecting value at line 2, column 7",
    )
    assert found.help == "correct the file there, or fetch it again"
