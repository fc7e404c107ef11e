"""What goes wrong: diagnostics, and the exceptions that carry them.

    MigrateError                 carries .diagnostics and .exit_code
    ├─ FindingError          1   what was asked for is found, and it is not fine
    ├─ QuestionError         2   flags, rule files, lineages, a stale plan, a target that exists
    ├─ CheckpointError       3   the checkpoint is unreadable, unsafe, not accounted for, or would
    │                            lose something
    └─ RunError              4   it failed while running; nothing was published unless the message
                                 says so

    OpError, PatternError        raised by ops and patterns, which know neither key nor file;
                                 the caller adds rule, key and span and turns them into a Diagnostic

Diagnostics are data: a code, a message that says what is wrong, spans, notes, and a help that says
how to mend it. A code is one file, `migrate/explain/<code>.md`. Its front matter holds the code's
name, severity and exit status, its body is what `migrate explain <code>` prints. A new diagnostic
is a new page and the line that raises it. The class of an exception follows from the exit status of
the code, so a code cannot leave with two different statuses.

A message is raised far below both front ends and spells arguments as the one that is in use does
(`option`): `--to v5` on the command line, `to="v5"` for a caller in Python. The command line says
so once for the process (`on_command_line`); a process that never does is a Python program. Not a
context variable: worker threads raise as well. What is saved, as the notes of a plan are, spells no
argument at all: it is read later, by either.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from json import dumps
from pathlib import Path
from typing import Any, Final, NoReturn

# flags that are not called like their keyword
_FLAGS: Final = {"from_": "from", "params": "set", "out": "output", "cls": "class"}
_NEGATED: Final = {"single_file": "folder"}
_SETS: Final = ("allow",)

_flags = False


@contextmanager
def on_command_line() -> Iterator[None]:
    """Messages spell arguments as flags for as long as the context is open."""
    global _flags
    before, _flags = _flags, True
    try:
        yield
    finally:
        _flags = before


def option(name: str, *values: str | int) -> str:
    """The keyword `name` of the Python functions with these values, as the front end spells it.

    `allow` takes several values, `params` `NAME=VALUE`. Without values the argument is only named:
    `--to`, or `` `to` `` for Python.
    """
    if _flags:
        if values and isinstance(values[0], bool):
            name, values = name if values[0] else _NEGATED[name], ()
        flag = "--" + _FLAGS.get(name, name.replace("_", "-"))
        return " ".join(f"{flag} {value}" for value in values) or flag
    if not values:
        return f"`{name}`"
    if name in _SETS:
        return f"{name}={{{', '.join(map(_literal, values))}}}"
    if name == "params":
        pairs = (str(value).partition("=") for value in values)
        return f"{name}={{{', '.join(f'{_literal(key)}: {_literal(value)}' for key, _, value in pairs)}}}"  # noqa: E501
    return f"{name}={_literal(values[0])}"


def together(*options: str) -> str:
    """Several arguments of one call, as they are written one after the other."""
    return (" " if _flags else ", ").join(options)


def command(verb: str) -> str:
    """The verb as the front end calls it: `migrate history`, or `migrate.history` in Python."""
    return f"migrate {verb}" if _flags else f"migrate.{verb}"


def _literal(value: str | int) -> str:
    if not isinstance(value, str):
        return str(value)
    return value if value == "…" else '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


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
# JSON writes them. Together they are less than 20,000, whatever a checkpoint holds
MOST_MESSAGE, MOST_NOTES, MOST_HELP = 4000, 4000, 1500
MOST_SPANS, _FILE, _TEXT, _LABEL = 4, 1000, 800, 300
PAGES = Path(__file__).resolve().parent.parent / "explain"


@dataclass(frozen=True, slots=True)
class Page:
    """The page of one code: `name`, `severity`, `exit` status, and `body` in markdown."""

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
    """A place in a text file: 1-based `line` and `column`, `length` code points, `text` of it."""

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
    """A lineage's rule file as `lineage/layout/file.yaml`; any other file as it is."""
    lineage = os.path.dirname(os.path.dirname(file))
    if not os.path.isfile(os.path.join(lineage, "layouts.yaml")):
        return file
    return os.path.relpath(file, os.path.dirname(lineage))


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """One problem or finding.

    `code` is its code, such as M211, and `severity` "error" or "warning". `message` says what is
    wrong, in lower case without a final period; `help` says how to fix it. `spans` are the places
    in rule files, `notes` further facts. `permit` is the word of `allow` that would permit it, or
    "" if none would.
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
            object.__setattr__(self, "notes", _bounded_notes(self.notes))
        if self.help:
            object.__setattr__(self, "help", bounded(visible(self.help), MOST_HELP))
        if len(self.spans) > MOST_SPANS:
            object.__setattr__(self, "spans", self.spans[:MOST_SPANS])

    @property
    def exit_status(self) -> int:
        """The exit status of a command that fails with it."""
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
        """The diagnostic as rustc draws it: message, place, source line, caret, notes, help."""
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
    """The text, or as much of its beginning, or `tail`, as `most` characters of JSON hold."""
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
    """As many of the notes as there is room for, visible; the others are not even read."""
    left, out = MOST_NOTES, list[str]()
    for number, note in enumerate(notes):
        if left < 200:
            out.append(f"and {plural(len(notes) - number, 'note')} more")
            break
        out.append(bounded(visible(note), left))
        left -= json_length(out[-1]) + 10
    return tuple(out)


def _window(span: Span, widest: int = 240) -> tuple[str, int, int]:
    """The part of the span's line that is drawn, how much of it precedes the caret, its length.

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
    """Text from a checkpoint made safe for a terminal: escaped but for plain ASCII, cut at `limit`.

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


class MigrateError(Exception):
    """What every function raises: one or more diagnostics.

    `str()` renders them in full. `diagnostics` has them as objects, `exit_code` is the exit status
    of the command line, and `permits` are the words of `allow` that would permit some of them.
    """

    exit_code = 70

    def __init__(self, diagnostics: Iterable[Diagnostic]) -> None:
        self.diagnostics = tuple(diagnostics)
        self.permits = tuple(dict.fromkeys(d.permit for d in self.diagnostics if d.permit))
        parts = [d.render() for d in self.diagnostics]
        if len(self.permits) > 1:
            parts.append(f"to permit all of this: {option('allow', *self.permits)}")
        super().__init__("\n\n".join(parts))

    def __reduce__(self) -> Any:
        # an error of one rank is sent to the others
        return type(self), (self.diagnostics,)


class FindingError(MigrateError):
    exit_code = 1


class QuestionError(MigrateError):
    exit_code = 2


class CheckpointError(MigrateError):
    exit_code = 3


class RunError(MigrateError):
    exit_code = 4


_BY_EXIT = {c.exit_code: c for c in (FindingError, QuestionError, CheckpointError, RunError)}


class OpError(ValueError):
    """An op cannot take these tensors; `code`, `notes` and `help` are those of the Diagnostic."""

    def __init__(
        self,
        code: str,
        message: str,
        *,
        notes: Iterable[str] = (),
        help: str | None = None,
        permit: str = "",
    ) -> None:
        super().__init__(message)
        self.code, self.message, self.notes, self.help, self.permit = (
            code,
            message,
            tuple(notes),
            help,
            permit,
        )


class PatternError(ValueError):
    """A pattern cannot be understood. `start` and `end` are code-point offsets into its text."""

    def __init__(
        self, code: str, message: str, start: int, end: int, *, help: str | None = None
    ) -> None:
        super().__init__(message)
        self.code, self.message, self.start, self.end, self.help = code, message, start, end, help


def raise_all(diagnostics: Iterable[Diagnostic]) -> NoReturn:
    """Raises the error of the diagnostics' exit status; a wrong question outranks a checkpoint."""
    found = tuple(diagnostics)
    errors = [d for d in found if d.severity == "error"] or found
    raise _BY_EXIT[min(d.exit_status for d in errors)](found)


class Report:
    """Collects diagnostics so that all problems come out at once."""

    __slots__ = ("diagnostics",)

    def __init__(self) -> None:
        self.diagnostics: list[Diagnostic] = []

    def add(
        self,
        code: str,
        message: str,
        *,
        spans: tuple[Span, ...] = (),
        notes: tuple[str, ...] = (),
        help: str | None = None,
        permit: str = "",
    ) -> None:
        self.diagnostics.append(Diagnostic(code, message, spans, notes, help, permit=permit))

    def has_errors(self) -> bool:
        """Whether one of them is an error."""
        return any(d.severity == "error" for d in self.diagnostics)

    def check(self) -> None:
        """Raises all collected diagnostics if one of them is an error, repetitions condensed."""
        if self.has_errors():
            raise_all(condensed(self.diagnostics))


def condensed(
    diagnostics: Sequence[Diagnostic], limit: int = 3, placeless: int = 20
) -> list[Diagnostic]:
    """The diagnostics with at most `limit` of one code at one place, or `placeless` of one that has
    none; the last of these says how many more there are.

    A rule that is wrong is wrong in every layer, and a checkpoint of another family in every key.
    """
    alike: dict[tuple[Any, ...], int] = {}
    for found in diagnostics:
        key = _kind(found)
        alike[key] = alike.get(key, 0) + 1
    out: list[Diagnostic] = []
    seen: dict[tuple[Any, ...], int] = {}
    for found in diagnostics:
        key, most = _kind(found), limit if found.spans else placeless
        seen[key] = seen.get(key, 0) + 1
        more = alike[key] - most
        if seen[key] == most and more > 0:
            found = replace(found, notes=(*found.notes, f"and {more:,} more like this"))
        if seen[key] <= most:
            out.append(found)
    return out


def _kind(found: Diagnostic) -> tuple[Any, ...]:
    return found.code, found.severity, found.permit, found.spans


def fail(
    code: str,
    message: str,
    *,
    spans: tuple[Span, ...] = (),
    notes: tuple[str, ...] = (),
    help: str | None = None,
    permit: str = "",
) -> NoReturn:
    """Raises the one diagnostic."""
    raise_all([Diagnostic(code, message, spans, notes, help, permit=permit)])


def with_partial_folder(found: Diagnostic, partial: Path) -> Diagnostic:
    """The diagnostic with the partial folder, if there and not named yet, and the way out of it."""
    where, resume = printable(str(partial), 300), option("resume", True)
    if not partial.exists() or any(where in text for text in (found.message, *found.notes)):
        return found
    again = found.help
    if again is None or resume not in again:
        again = (
            f"{f'{again}; then ' if again else ''}run it again with {resume}, or remove that folder"
        )
    return replace(
        found, notes=(*found.notes, f"what was written so far is kept in {where}"), help=again
    )
