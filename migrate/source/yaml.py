"""YAML as data that remembers where it stood, for files that people write.

The text is read as parser events, never as objects: no tag, anchor or alias can build anything,
sizes and depth are limited before a value exists, and each problem gets a line. A scalar stays text
until somebody asks for a type, because YAML's guesses lose what was written (`2.10` is a version,
`no` is a word); `PlainScalar` marks the unquoted ones, `core` types them by the YAML 1.2 core
schema. PyYAML is imported when a text is parsed: what reads no rule file that people wrote needs
none.
"""

from __future__ import annotations

import re
from bisect import bisect
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from ..core.errors import HIDDEN, Report, Span, printable

if TYPE_CHECKING:
    from yaml import YAMLError

MAX_BYTES = 1 << 20
MAX_EVENTS = 100_000
MAX_DEPTH = 32
TOO_DEEP = f"lists and mappings are nested more than {MAX_DEPTH} deep"
# int() takes a few more; to read them all would take time that grows with the square
MAX_DIGITS = 4000
# problems of one file, after which reading stops: aliases could make a book of them
MAX_REFUSED = 50

Path = tuple["str | int", ...]

# what YAML 1.1 calls a line break, and so what its marks count
BREAK = re.compile("\r\n|[\n\r\x85\u2028\u2029]")
_NULLS = frozenset(("", "~", "null", "Null", "NULL"))
_BOOLS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
INTEGER = re.compile(r"[-+]?[0-9]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_SPECIAL_FLOAT = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


class PlainScalar(str):
    """An unquoted scalar: text that `core` may read as null, bool, int or float."""

    __slots__ = ()


class Mark(NamedTuple):
    line: int
    column: int
    end_line: int
    end_column: int


class Document:
    """One parsed file: `data` of dicts, lists, `str` (quoted) and `PlainScalar` (not), and where
    each node stood.

    `whole` is False when something could not be read (an alias, a merge key): `data` is then of no
    use beyond messages.
    """

    __slots__ = ("_keys", "_lines", "_texts", "_values", "data", "name", "whole")

    def __init__(self, name: str, text: str) -> None:
        self.name, self.whole = name, True
        self.data: Any = None
        self._lines = BREAK.split(text)
        self._values: dict[Path, Mark] = {}
        self._keys: dict[Path, Mark] = {}
        # the quoted scalars and, from the line below their sign on, the block scalars
        self._texts: list[Mark] = []

    @classmethod
    def of(cls, name: str, text: str, values: Iterable[Any], keys: Iterable[Any]) -> Document:
        """A document without data, whose places are known: what `places` gave of this text."""
        document = cls(name, text)
        document._values = {tuple(path): Mark(*place) for path, place in values}
        document._keys = {tuple(path): Mark(*place) for path, place in keys}
        return document

    def places(self) -> tuple[list[tuple[Path, tuple[int, ...]]], ...]:
        """(path, where it stands) of all values, and of all keys."""
        return [*self._values.items()], [*self._keys.items()]

    @property
    def lines(self) -> list[str]:
        """The text line by line, comments and all."""
        return self._lines

    def span(self, path: Path = ()) -> Span:
        """The place of the value at `path`; of its nearest ancestor where there is none."""
        for end in range(len(path), 0, -1):
            if place := self._values.get(tuple(path[:end])):
                return self._at(place)
        return self._at(self._values.get((), Mark(0, 0, 0, 1)))

    def key_span(self, path: Path) -> Span:
        """The place of the key that leads to `path`, or of the value where that is a list index."""
        place = self._keys.get(tuple(path))
        return self._at(place) if place else self.span(path)

    def is_text(self, line: int, column: int) -> bool:
        """Whether the character at this line and column, from 1, lies in a quoted or a block
        scalar; a `#` there begins no comment.
        """
        here = (line - 1, column - 1)
        return any((t.line, t.column) <= here < (t.end_line, t.end_column) for t in self._texts)

    def __contains__(self, path: Path) -> bool:
        return path in self._values

    def _at(self, place: Mark, label: str = "") -> Span:
        text = self._lines[place.line] if place.line < len(self._lines) else ""
        end = place.end_column if place.end_line == place.line else len(text.rstrip())
        return Span(
            self.name, place.line + 1, place.column + 1, max(1, end - place.column), text, label
        )


def parse(text: str, name: str) -> Document:
    """The document in `text`; raises all problems at once (M104, M105, M108-M110, M116)."""
    report = Report()
    document = read_yaml(text, name, report)
    report.check()
    return document


def read_file(path: FilePath | str, report: Report) -> Document:
    """`read` of a file's UTF-8 text; an unreadable file is M108."""
    name = str(path)
    try:
        with open(path, "rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        report.add("M108", f"cannot read {printable(name)}: {error.strerror or error}")
        return nothing(name, "")
    try:
        return read_yaml(raw.decode("utf-8-sig"), name, report)
    except UnicodeDecodeError as error:
        if len(raw) > MAX_BYTES:
            return read_yaml("#" * (MAX_BYTES + 1), name, report)
        line = raw.count(b"\n", 0, error.start) + 1
        report.add(
            "M108",
            "the file is not UTF-8 text",
            spans=(Span(name, line, 1),),
            help="save it as UTF-8",
        )
        return nothing(name, "")


def read_yaml(text: str, name: str, report: Report) -> Document:
    """The document in `text`, its problems added to `report`; `whole`: `data` can be used."""
    document = Document(name, text)
    try:
        size = len(text.encode("utf-8"))
    except UnicodeEncodeError as error:
        line = len(BREAK.findall(text, 0, error.start)) + 1
        report.add(
            "M108",
            "the text holds a lone surrogate, which UTF-8 cannot",
            spans=(Span(name, line, 1),),
        )
        document.whole = False
        return document
    if size > MAX_BYTES:
        report.add(
            "M109",
            f"the file has more than {MAX_BYTES:,} bytes",
            spans=(Span(name, 1, 1),),
            help="split it into several files",
        )
        return nothing(name, text)

    _parse_text(document, text, report)
    return document


def core(node: Any) -> Any:
    """`node` with each `PlainScalar` typed by the YAML 1.2 core schema (null, true, false, decimal
    ints, floats); keys stay text.
    """
    if isinstance(node, PlainScalar):
        if node in _NULLS:
            return None
        if node in _BOOLS:
            return _BOOLS[node]
        if INTEGER.fullmatch(node):
            number = integer(node)
            return str(node) if number is None else number
        if _FLOAT.fullmatch(node):
            return float(node)
        return float(node.replace(".", "")) if _SPECIAL_FLOAT.fullmatch(node) else str(node)
    if isinstance(node, dict):
        return {str(key): core(value) for key, value in node.items()}
    return [core(item) for item in node] if isinstance(node, list) else node


def exact(node: Any) -> Any:
    """Like `core`, but only what is written back as it was: `1.10`, `007`, `+1` stay text."""
    if isinstance(node, PlainScalar):
        typed = core(node)
        if typed is None or isinstance(typed, bool):
            return typed
        return typed if isinstance(typed, int) and str(typed) == node else str(node)
    if isinstance(node, dict):
        return {str(key): exact(value) for key, value in node.items()}
    return [exact(item) for item in node] if isinstance(node, list) else node


def is_null(node: Any) -> bool:
    """Whether `node` is None or an unquoted null, or nothing was written at all."""
    return node is None or (isinstance(node, PlainScalar) and node in _NULLS)


def boolean(node: str) -> bool | None:
    """The boolean of the YAML 1.2 core schema that `node` spells, or None."""
    return _BOOLS.get(node)


def integer(node: str) -> int | None:
    """The decimal integer that `node` spells, or None; more than MAX_DIGITS characters are none."""
    return int(node) if len(node) <= MAX_DIGITS and INTEGER.fullmatch(node) else None


def nothing(name: str, text: str) -> Document:
    document = Document(name, text[:1000])
    document.whole = False
    return document


# What does not look as it is read, wherever it stands. A carriage return is a line end for YAML,
# and sends a terminal to the beginning of the line that it just showed.
_HIDDEN = re.compile(rf"(?!\r\n)(?![\x85\u2028\u2029])[{HIDDEN}]")
# line ends for YAML 1.1, and so the end of a comment; YAML 1.2 and editors read on
_LINE_ENDS = re.compile("[\x85\u2028\u2029]")
_EDITOR_BREAK = re.compile("\r\n|[\n\r]")
_UNQUOTED = re.compile(
    r"""(?:^\s*|-\s+|:\s+|[\[,{]\s*)(?P<value>\{[^{}\s'"]*\}[^\s,\]}][^\s,\]]*)"""
)
_PATTERN_KEY = re.compile(r"\w+(\.\.\.|:\S+)")
_SURROGATE = re.compile("[\ud800-\udfff]")


def _parse_text(document: Document, text: str, report: Report) -> None:
    """Fills the document from the text; problems go to the report, `whole`: data is usable."""
    if hidden := [found.start() for found in islice(_HIDDEN.finditer(text), MAX_REFUSED)]:
        _refuse_hidden(document, text, hidden, report)
        return
    # what people did not write is read without PyYAML
    import yaml

    # libyaml where the wheel has it; both emit the same events
    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    builder = _Builder(document, report)
    read_to = len(text)
    try:
        builder.build(yaml.parse(text, Loader=loader))
    except _Stop:
        document.whole, read_to = False, builder.read_to
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        document.whole, read_to = False, mark.index if mark is not None else builder.read_to
        _explain(document, text, error, report)
    except (ValueError, OverflowError):
        # what chr() says of an escape where the parser is not libyaml
        document.whole, read_to = False, builder.read_to
        report.add(
            "M108",
            "an escape in the text does not stand for a character",
            spans=(Span(document.name, 1, 1),),
        )
    ends = (found.start() for found in _LINE_ENDS.finditer(text, 0, read_to))
    if unquoted := list(islice((at for at in ends if not builder.is_quoted(at)), MAX_REFUSED)):
        _refuse_hidden(document, text, unquoted, report)


class _Stop(Exception):  # noqa: N818 (control flow inside this module, never seen outside)
    """Reading on would cost too much or mean nothing."""


class _Builder:
    """Turns events into data; with a stack of its own, so that depth is a number."""

    __slots__ = ("anchors", "document", "events", "quoted", "read_to", "refused", "report")

    def __init__(self, document: Document, report: Report) -> None:
        self.document, self.report = document, report
        self.anchors: set[str] = set()
        # (start, end) of each quoted scalar in the text, in order
        self.quoted: list[tuple[int, int]] = []
        self.events = self.refused = self.read_to = 0

    def build(self, events: Iterator[Any]) -> None:
        stream = self._limited(events)
        documents = 0
        for event in stream:
            if type(event).__name__ == "DocumentStartEvent":
                documents += 1
                if documents > 1:
                    self._refuse(
                        event,
                        "a second document starts here",
                        "one file holds one document; move it to a file of its own",
                    )
                    raise _Stop
                if event.version or event.tags:
                    self._refuse(
                        event, "YAML directives are not read", "remove the line that starts with %"
                    )
            elif type(event).__name__ in (
                "ScalarEvent",
                "SequenceStartEvent",
                "MappingStartEvent",
                "AliasEvent",
            ):
                self.document.data = self._node(event, stream, (), 0)
        if not documents:
            self.report.add("M108", "the file is empty", spans=(Span(self.document.name, 1, 1),))
            raise _Stop

    def is_quoted(self, at: int) -> bool:
        """Whether the character at this index lies in a quoted scalar that was read."""
        before = bisect(self.quoted, (at, at)) - 1
        return before >= 0 and at < self.quoted[before][1]

    def _limited(self, events: Iterator[Any]) -> Iterator[Any]:
        for event in events:
            self.events += 1
            start, self.read_to = event.start_mark.index, event.end_mark.index
            if type(event).__name__ == "ScalarEvent" and event.style:
                place = _place(event)
                if event.style in "'\"":
                    self.quoted.append((start, self.read_to))
                self.document._texts.append(
                    place._replace(line=place.line + 1, column=0) if event.style in "|>" else place
                )
            if self.events > MAX_EVENTS:
                self._limit(event, f"the file has more than {MAX_EVENTS:,} YAML events")
            yield event

    def _node(self, event: Any, stream: Iterator[Any], path: Path, depth: int) -> Any:
        self.document._values[path] = _place(event)
        if type(event).__name__ == "AliasEvent":
            return self._alias(event)
        if event.anchor is not None:
            self.anchors.add(event.anchor)
            self._refuse(
                event,
                f"anchor `&{printable(event.anchor)}`",
                "write the value out; quote it if it is text that starts with &",
            )
        if event.tag is not None:
            self._refuse(
                event,
                f"tag `{printable(event.tag)}`",
                "leave the tag out; quote the value if it is text that starts with !",
            )
        if type(event).__name__ == "ScalarEvent":
            return self._scalar(event)
        if depth >= MAX_DEPTH:
            self._limit(event, TOO_DEEP)
        if type(event).__name__ == "SequenceStartEvent":
            return self._sequence(stream, path, depth + 1)
        return self._mapping(event, stream, path, depth + 1)

    def _scalar(self, event: Any) -> str:
        if not event.value.isascii() and _SURROGATE.search(event.value):
            self.document.whole = False
            self.report.add(
                "M108",
                "half a character, which UTF-8 cannot hold",
                spans=(self.document._at(_place(event)),),
            )
        if event.style:
            return str(event.value)
        if len(event.value) > MAX_DIGITS and INTEGER.fullmatch(event.value):
            self._limit(event, f"an integer has more than {MAX_DIGITS:,} digits")
        return PlainScalar(event.value)

    def _sequence(self, stream: Iterator[Any], path: Path, depth: int) -> list[Any]:
        out: list[Any] = []
        for event in stream:
            if type(event).__name__ == "SequenceEndEvent":
                self._close(path, event)
                break
            out.append(self._node(event, stream, (*path, len(out)), depth))
        return out

    def _mapping(self, start: Any, stream: Iterator[Any], path: Path, depth: int) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for event in stream:
            if type(event).__name__ == "MappingEndEvent":
                self._close(path, event)
                break
            key = self._key(event, stream, path, depth)
            place = _place(event)
            value_event = next(stream)
            if key is None or key in out:
                if key is not None:
                    self._duplicate(key, (*path, key), place)
                spare = (*path, key or "", len(out))
                self._node(value_event, stream, spare, depth)
                continue
            here = (*path, key)
            self.document._keys[here] = place
            out[key] = self._node(value_event, stream, here, depth)
        if start.flow_style and len(out) == 1:
            key, value = next(iter(out.items()))
            if isinstance(value, PlainScalar) and not value and _PATTERN_KEY.fullmatch(key):
                _unquoted(self.document, self.document._values[path], "{" + key + "}", self.report)
                self.document.whole = False
        return out

    def _key(self, event: Any, stream: Iterator[Any], path: Path, depth: int) -> str | None:
        if type(event).__name__ != "ScalarEvent":
            self._refuse(
                event, "a key that is not text", "quote the key if it starts with `{`, `[` or `*`"
            )
            self._node(event, stream, (*path, -1), depth)
            self.document.whole = False
            return None
        if event.anchor is not None or event.tag is not None:
            self._refuse(
                event,
                "an anchor or tag on a key",
                "leave it out; quote the key if it is text that starts with & or !",
            )
        if not event.style and event.value == "<<":
            self._refuse(event, "merge key `<<`", "write the fields out")
            self.document.whole = False
            return None
        self._scalar(event)
        return str(event.value)

    def _alias(self, event: Any) -> PlainScalar:
        self.document.whole = False
        if event.anchor in self.anchors:
            self._refuse(event, f"alias `*{printable(event.anchor)}`", "write the value out")
        else:
            _unquoted(self.document, _place(event), f"*{event.anchor}", self.report)
        return PlainScalar("")

    def _duplicate(self, key: str, path: Path, place: Mark) -> None:
        first = self.document._at(self.document._keys[path], "first written here")
        again = self.document._at(place, "and here again")
        self.report.add(
            "M104",
            f"key `{printable(key)}` is written twice",
            spans=(again, first),
            help="remove one of the two",
        )
        self._count()

    def _close(self, path: Path, event: Any) -> None:
        place = self.document._values[path]
        self.document._values[path] = place._replace(
            end_line=event.end_mark.line, end_column=event.end_mark.column
        )

    def _refuse(self, event: Any, what: str, help: str) -> None:
        text = what if what.endswith(("read", "here")) else f"{what} is not allowed"
        self.report.add("M105", text, spans=(self.document._at(_place(event)),), help=help)
        self._count()

    def _count(self) -> None:
        self.refused += 1
        if self.refused >= MAX_REFUSED:
            raise _Stop

    def _limit(self, event: Any, what: str) -> NoReturn:
        self.report.add("M109", what, spans=(self.document._at(_place(event)),))
        raise _Stop


def _place(event: Any) -> Mark:
    start, end = event.start_mark, event.end_mark
    if type(event).__name__ in ("SequenceStartEvent", "MappingStartEvent") and not event.flow_style:
        return Mark(start.line, start.column, start.line + 1, 0)
    return Mark(start.line, start.column, end.line, end.column)


def _refuse_hidden(document: Document, text: str, places: list[int], report: Report) -> None:
    """M116 for each of these characters, at the line and column that an editor shows."""
    document.whole = False
    for at in places:
        start = max(text.rfind("\n", 0, at), text.rfind("\r", 0, at)) + 1
        line = len(_EDITOR_BREAK.findall(text, 0, start)) + 1
        rest = _EDITOR_BREAK.split(text[start:], 1)[0]
        character = text[at]
        report.add(
            "M116",
            f"U+{ord(character):04X} ({_named(character)}) makes the text look different from "
            "what is read",
            spans=(Span(document.name, line, at - start + 1, 1, rest),),
            help="remove it; in text that is meant to hold it write an escape, in double quotes: "
            f'"{_escape(character)}"',
        )


def _named(character: str) -> str:
    import unicodedata  # of a broken file only

    return unicodedata.name(character, "a control character").lower()


def _escape(character: str) -> str:
    return (
        f"\\x{ord(character):02X}"
        if character < "\x80"
        else f"\\u{ord(character):04X}"
        if character < "\U00010000"
        else f"\\U{ord(character):08X}"
    )


def _unquoted(document: Document, place: Mark, value: str, report: Report) -> None:
    span = document._at(place)
    if any(
        d.code == "M110" and (d.spans[0].line, d.spans[0].column) == (span.line, span.column)
        for d in report.diagnostics
    ):
        return  # the mapping that it opened was reported, now the parser stumbles over what follows
    report.add(
        "M110",
        f"a value that starts with `{value[0]}` is not text in YAML",
        spans=(span,),
        help=f'quote the pattern: "{printable(value)}"',
    )


def _explain(document: Document, text: str, error: YAMLError, report: Report) -> None:
    """Turns the parser's error into a diagnostic in an author's words."""
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    if mark is None:
        before = text[: getattr(error, "position", 0) or 0]
        line = len(BREAK.findall(before))
        column = len(before) - max((m.end() for m in BREAK.finditer(before)), default=0)
        place = Mark(line, column, line, column + 1)
        report.add(
            "M108",
            "a character that YAML does not allow",
            spans=(document._at(place),),
            help="remove the control character",
        )
        return
    line = min(mark.line, len(document._lines) - 1)
    source = document._lines[line]
    place = (
        Mark(line, mark.column, line, mark.column + 1)
        if line == mark.line
        else Mark(line, 0, line, 1)
    )
    for found in _UNQUOTED.finditer(source):
        start, before = found.start("value"), source[: found.start("value")]
        if start <= place.column and before.count('"') % 2 == 0 and before.count("'") % 2 == 0:
            _unquoted(document, Mark(line, start, line, found.end("value")), found["value"], report)
            return
    problem = str(getattr(error, "problem", None) or error)
    if "nesting" in problem:
        # libyaml's own limit, in PyYAML 6.0.4: it reads ahead of the events that are counted here
        report.add("M109", TOO_DEEP, spans=(document._at(place),))
        return
    rest = source[place.column :].split(" #")[0].rstrip()
    if "anchor" in str(getattr(error, "context", "")) or "alias" in str(
        getattr(error, "context", "")
    ):
        start = source.rfind("*", 0, place.column + 1) if "alias" in str(error) else -1
        if start >= 0:
            value = source[start:].split()[0].rstrip(",]}")
            _unquoted(document, Mark(line, start, line, start + len(value)), value, report)
            return
    if "\t" in source[: place.column + 1] and (
        "tab" in problem or rest.startswith("\t") or not rest
    ):
        column = source.index("\t")
        report.add(
            "M108",
            "a tab cannot indent",
            spans=(document._at(Mark(line, column, line, column + 1)),),
            help="indent with spaces",
        )
    elif "cannot start any token" in problem and rest[:1] == "@":
        _unquoted(document, Mark(line, place.column, line, place.column + len(rest)), rest, report)
    elif "cannot start any token" in problem:
        report.add(
            "M108",
            f"a value cannot start with `{printable(rest[:1])}`",
            spans=(document._at(place),),
            help="quote the value",
        )
    elif "mapping values are not allowed" in problem:
        message = "a colon and a space inside a value that is not quoted"
        report.add(
            "M108",
            message,
            spans=(document._at(place),),
            help="quote the value, or put the field on a line of its own",
        )
    else:
        _syntax(document, place, problem, error, report)


def _syntax(document: Document, place: Mark, problem: str, error: Any, report: Report) -> None:
    spans = [document._at(place)]
    context, mark = getattr(error, "context", None), getattr(error, "context_mark", None)
    if (
        context
        and mark is not None
        and mark.line != place.line
        and mark.line < len(document._lines)
    ):
        spans.append(
            document._at(Mark(mark.line, mark.column, mark.line, mark.column + 1), str(context))
        )
    report.add("M108", f"not valid YAML: {printable(problem)}", spans=tuple(spans))
