"""Colour on a terminal, put on by the form of a line.

Renderers make plain text, in which names from a checkpoint cannot hold an escape sequence any more.
So nothing but what is here writes one, and a log, a pipe or a golden transcript gets the text as it
is.
"""

from __future__ import annotations

import os
import re
import sys
from functools import cache
from typing import Any, Final, TextIO

import click

_RED: Final = {"fg": "red", "bold": True}
_YELLOW: Final = {"fg": "yellow"}
_GREEN: Final = {"fg": "green"}
_BLUE: Final = {"fg": "blue", "bold": True}
_FAINT: Final = {"dim": True}

# what a line looks like, and how the group in it is drawn; the first that fits counts
_FORMS: Final = (
    (r"(error\[M\d+\]):", _RED),
    (r"((?:warning|advice|note)\[M\d+\]):", {"fg": "yellow", "bold": True}),
    (r" *(-->) \S", _BLUE),
    (r" *(= (?:note|help):)", _BLUE),
    (r" *\| *(\^+.*)", _RED),
    (r" *(\d* *\|)(?: |$)", _BLUE),
    (r"(?: |^)?((?:\+|<>|><|%|\*)) \S", _GREEN),
    (r" (-) \S", _RED),
    (r" (~) \S", _YELLOW),
    (r" *(\w+: exact)$", _GREEN),
    (r" *(\w+: not exact)$", _YELLOW),
    (r"(published|verified|equal)\b", _GREEN),
    (r"(not what|differs?\b|error:)", _RED),
    (r" *(loss \(\w+\)):", _YELLOW),
    (r" +(rule [^,]+, \S+:\d+)$", _FAINT),
    (r" *(note):", _YELLOW),
    (r"(next|saved):?", _FAINT),
)


def wanted(stream: TextIO) -> bool:
    """Whether text for the stream is coloured: on a terminal, unless NO_COLOR, CLICOLOR=0 or
    TERM=dumb; anywhere with FORCE_COLOR.
    """
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR") or os.environ.get("CLICOLOR_FORCE", "0") != "0":
        return True
    if os.environ.get("CLICOLOR") == "0" or os.environ.get("TERM") == "dumb":
        return False
    return stream.isatty()


def say(text: str, *, err: bool = False) -> None:
    """Writes the text and an end of line to stdout, or with `err` to stderr, coloured where that is
    wanted.
    """
    coloured = wanted(sys.stderr if err else sys.stdout)
    click.echo(
        "\n".join(map(_painted, text.split("\n"))) if coloured else text, err=err, color=coloured
    )


@cache
def _forms() -> list[tuple[re.Pattern[str], dict[str, Any]]]:
    """Compiled when a terminal wants them: it takes longer than the import of all the rest here."""
    return [(re.compile(pattern), style) for pattern, style in _FORMS]


def _painted(line: str) -> str:
    for form, style in _forms():
        if found := form.match(line):
            start, end = found.span(1)
            return line[:start] + click.style(line[start:end], **style) + line[end:]
    return line
