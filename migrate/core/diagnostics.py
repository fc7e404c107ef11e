"""Diagnostics are data: a code, a message that says what is wrong, spans, notes, and a help that
says how to mend it.

A code is one file, `migrate/explain/<code>.md`. Its front matter holds the code's name, severity
and exit status, its body is what `migrate explain <code>` prints. A new diagnostic is a new page
and the line that raises it.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from functools import cache
from json import dumps
from pathlib import Path
from typing import Any

# What a terminal or an editor acts on instead of showing it, as the inside of a character class:
# controls, line ends that not every reader takes for one, bidirectional and other formatting, and
# what has no glyph (Unicode's Default_Ignorable_Code_Point but for variation selectors, which
# change one glyph, of an emoji mostly).
HIDDEN = (
    r"\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e\u2060-\u206f"
    r"\u3164\ufeff\uffa0\ufff0-\ufffb\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
)
_HIDDEN = re.compile(f"[{HIDDEN}]")
# and its width: no message of ours is longer, but it may quote what somebody wrote
_WIDEST = 8000
# what a diagnostic may take in a JSON document, and with that in text: its parts in characters as
# JSON writes them. Together they are less than 20,000, whatever the checkpoint holds that they
# quote
MOST_MESSAGE, MOST_NOTES, MOST_HELP = 4000, 4000, 1500
MOST_SPANS, _FILE, _TEXT, _LABEL = 4, 1000, 800, 300
PAGES = Path(__file__).resolve().parent.parent / "explain"


@dataclass(frozen=True, slots=True)
class Page:
    """The page of one code: `name` (kebab case, states the bad thing), `severity`, `exit` status,
    `body` (markdown).
    """

    code: str
    name: str
    severity: str
    exit: int
    body: str


@cache
def page(code: str) -> Page:
    """The page of `code`; KeyError when there is none."""
    try:
        text = (PAGES / f"{code}.md").read_text(encoding="utf-8")
    except FileNotFoundError:
        raise KeyError(code) from None
    _, front, body = text.split("---\n", 2)
    head = dict(line.split(": ", 1) for line in front.strip().splitlines())
    return Page(code, head["name"], head["severity"], int(head["exit"]), body.strip())


@cache
def codes() -> list[str]:
    """All codes, sorted."""
    return sorted(path.stem for path in PAGES.glob("M*.md"))


@dataclass(frozen=True, slots=True)
class Span:
    """A place in a text file: 1-based `line` and `column`, `length` code points, and the line's
    `text` for printing.
    """

    file: str
    line: int
    column: int
    length: int = 1
    text: str = ""
    label: str = ""

    def __str__(self) -> str:
        return f"{place(self.file)}:{self.line}:{self.column}"


@cache
def place(file: str) -> str:
    """A rule file of a lineage as `lineage/layout/file.yaml`, wherever its pack is installed; any
    other file as it is.
    """
    lineage = os.path.dirname(os.path.dirname(file))
    if not os.path.isfile(os.path.join(lineage, "layouts.yaml")):
        return file
    return os.path.relpath(file, os.path.dirname(lineage))


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """One finding. `message` is lower case without a final period and names the culprit; `help`
    names the way out.

    `permit` is the word of `allow` that would let it pass, "" where nothing would.
    """

    code: str
    message: str
    spans: tuple[Span, ...] = ()
    notes: tuple[str, ...] = ()
    help: str | None = None
    severity: str = field(default="")
    permit: str = ""

    def __post_init__(self) -> None:
        if not self.severity:
            object.__setattr__(self, "severity", page(self.code).severity)
        object.__setattr__(self, "message", bounded(visible(self.message), MOST_MESSAGE))
        if self.notes:
            notes = tuple(map(visible, self.notes))
            object.__setattr__(self, "notes", _bounded_notes(notes))
        if self.help:
            object.__setattr__(self, "help", bounded(visible(self.help), MOST_HELP))
        if len(self.spans) > MOST_SPANS:
            object.__setattr__(self, "spans", self.spans[:MOST_SPANS])

    @property
    def exit_status(self) -> int:
        return page(self.code).exit

    def to_json(self) -> dict[str, Any]:
        """The diagnostic as the JSON documents hold it."""
        return {
            "code": self.code,
            "name": page(self.code).name,
            "severity": self.severity,
            "message": self.message,
            "spans": [
                {
                    "file": bounded(s.file, _FILE, tail=True),
                    "line": s.line,
                    "column": s.column,
                    "length": s.length,
                    "text": s.text
                    if json_length(s.text) <= _TEXT
                    else bounded(_window(s)[0], _TEXT),
                    "label": bounded(s.label, _LABEL),
                }
                for s in self.spans
            ],
            "notes": list(self.notes),
            "help": self.help,
        }

    def render(self) -> str:
        """The diagnostic as rustc would draw it: message, place, source line, caret, notes,
        help.
        """
        width = max((len(str(s.line)) for s in self.spans), default=1)
        # a message is one line: a second one could pass for another diagnostic
        message = self.message.replace("\n", "\\n")
        out = [f"{self.severity}[{self.code}]: {message}"]
        for span in self.spans:
            where = span.file.removeprefix(os.getcwd() + os.sep)
            where = place(where) if os.path.isabs(where) else where
            where = bounded(
                where if where.isprintable() else printable(where, 400), _FILE, tail=True
            )
            out.append(f"{' ' * width}--> {where}:{span.line}:{span.column}")
            if span.text:
                text, before, length = _window(span)
                caret = " " * before + "^" * length
                out += [
                    f"{' ' * width} |",
                    f"{span.line:>{width}} | {text}",
                    f"{' ' * width} | {caret} {bounded(span.label, _LABEL)}".rstrip(),
                ]
        out += [f"{' ' * width} = note: {note}" for note in self.notes]
        if self.help:
            out.append(f"{' ' * width} = help: {self.help}")
        lines = (line if len(line) <= _WIDEST else line[: _WIDEST - 1] + "…" for line in out)
        # the places too
        return visible("\n".join(lines))


def visible(text: str) -> str:
    """The text with what a terminal or an editor would act on instead of showing it escaped.

    Diagnostics apply it, so that nothing of a checkpoint acts where it is quoted.
    """
    if text.isascii() and text.isprintable():
        return text
    return _HIDDEN.sub(lambda m: ascii(m[0])[1:-1], text)


def json_length(text: str) -> int:
    """The characters that JSON takes for the text, without its quotes."""
    plain = text.isascii() and text.isprintable() and '"' not in text and "\\" not in text
    return len(text) if plain else len(dumps(text)) - 2


def bounded(text: str, most: int, *, tail: bool = False) -> str:
    """The text, or as much of its beginning, or with `tail` of its end, as takes at most `most`
    characters in JSON.
    """
    # no character takes more than twelve
    if 12 * len(text) <= most or json_length(text) <= most:
        return text
    # room for the words that say so
    low, high, room = 0, min(len(text), most), most - 60
    while low < high:
        middle = (low + high + 1) // 2
        if json_length(text[-middle:] if tail else text[:middle]) <= room:
            low = middle
        else:
            high = middle - 1
    said = f"… ({len(text):,} characters)"
    return f"{said} …{text[len(text) - low :]}" if tail else text[:low] + said


def _bounded_notes(notes: tuple[str, ...]) -> tuple[str, ...]:
    left, out = MOST_NOTES, list[str]()
    for number, note in enumerate(notes):
        if left < 200:
            out.append(f"and {plural(len(notes) - number, 'note')} more")
            break
        out.append(bounded(note, left))
        left -= json_length(out[-1]) + 10
    return tuple(out)


def _window(span: Span, widest: int = 240) -> tuple[str, int, int]:
    """The part of the span's line that is drawn, how much of it stands before the caret, and the
    caret's length.

    A line of many thousand characters would bury the message.
    """
    text, at, length = span.text, span.column - 1, max(1, span.length)
    start = max(0, at - widest // 2) if len(text) > widest else 0
    # one column for each, so that the caret stays below its word
    shown = "".join(c if c.isprintable() else " " for c in text[start : start + widest])
    shown = ("…" + shown[1:] if start else shown) + ("…" if start + widest < len(text) else "")
    return shown, at - start, min(length, max(1, start + widest - at))


def refusal(error: OSError) -> str:
    """What the system said, and of which file: `input/output error: model.safetensors`."""
    said = (error.strerror or str(error)).lower()
    return (
        said if error.filename is None else f"{said}: {printable(os.fsdecode(error.filename), 240)}"
    )


def did_you_mean(word: str, known: list[str]) -> str | None:
    """A help text naming the nearest known word, or None when nothing is near (ratio below 0.6)."""
    from difflib import get_close_matches  # of mistakes only

    near = get_close_matches(word, known, n=1, cutoff=0.6)
    return f"did you mean `{near[0]}`?" if near else None


def printable(text: str, limit: int = 120) -> str:
    """Text from a checkpoint made safe for a terminal: control and non-ASCII characters escaped,
    cut at `limit`.

    No text at all is `""`, so that an empty key can be seen.
    """
    if not text:
        return '""'
    safe = text if text.isascii() and text.isprintable() else ascii(text)[1:-1]
    return safe if len(safe) <= limit else safe[: limit - 1] + "…"


def plural(n: int, noun: str) -> str:
    """`1 tensor`, `2,000 tensors`."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def listed(things: list[str], limit: int = 20) -> str:
    """At most `limit` things, comma-separated, and how many more there are."""
    shown = ", ".join(printable(t) for t in things[:limit])
    return shown if len(things) <= limit else f"{shown} … and {len(things) - limit} more"
