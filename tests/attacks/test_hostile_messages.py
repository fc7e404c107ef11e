"""What a diagnostic quotes of a checkpoint cannot act on a terminal or an editor."""

from __future__ import annotations

import json
import re
import sys

import pytest

from migrate.core.errors import HIDDEN, Diagnostic, Span

ACTING = re.findall(f"[{HIDDEN}]", "".join(map(chr, range(sys.maxunicode + 1))))
HOSTILE = {
    "colour": "\x1b[2J\x1b[31mall is well",
    "title": "\x1b]0;owned\x07",
    "one-byte-control": "\x9b2J",
    "carriage-return": "error\rnothing wrong",
    "backspace": "rm\x08\x08ok",
    "bidi": "a\u202egnp.exe",
    "isolate": "a\u2066b\u2069",
    "zero-width": "lm\u200b_head",
    "line-separator": "a\u2028error[M999]: b",
    "tag": "a\U000e0041b",
}


def texts(diagnostic: Diagnostic) -> list[str]:
    """All that a document and a terminal get of it, but for the lines of the user's own files."""
    document = diagnostic.to_json()
    return [
        diagnostic.render(),
        document["message"],
        *document["notes"],
        document["help"],
    ]


@pytest.mark.parametrize("name", HOSTILE)
def test_text_that_no_caller_made_printable_is_shown_and_does_nothing(name: str) -> None:
    text = HOSTILE[name]
    found = Diagnostic("M906", f"{text} is odd", (Span("f", 1, 1, 1, text, text),), (text,), text)
    for shown in texts(found):
        assert not re.search(f"[{HIDDEN}]", shown)
        assert ascii(next(c for c in text if c in ACTING))[1:-1] in shown
        assert json.loads(json.dumps(shown)) == shown


def test_no_acting_character_is_left_in_any_part() -> None:
    all_of_them = "".join(c for c in ACTING if c.isprintable() or ord(c) < 0x2100)
    found = Diagnostic("M906", all_of_them, notes=(all_of_them,), help=all_of_them)
    for shown in texts(found):
        assert not re.search(f"[{HIDDEN}]", shown)


def test_what_is_shown_as_it_is_stays_as_it_was() -> None:
    text = "größer als 3 × 4 → „x“ … und 日本"
    found = Diagnostic("M906", text, notes=(text, "two\nlines"), help=text)
    assert (found.message, found.notes, found.help) == (text, (text, "two\nlines"), text)
