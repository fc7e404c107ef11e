"""The parser of `yaml`: events become data with places, and what the parser stumbles over is said
in an author's words.
"""

from __future__ import annotations

import re
from bisect import bisect
from collections.abc import Iterator
from itertools import islice
from typing import Any, NoReturn

import yaml

from ..core.diagnostics import HIDDEN, Report, Span, printable
from .yaml import (
    BREAK,
    INTEGER,
    MAX_DEPTH,
    MAX_DIGITS,
    MAX_EVENTS,
    MAX_REFUSED,
    Document,
    Path,
    Place,
    Plain,
)

# libyaml where the wheel has it; both emit the same events
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
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


def parsed(document: Document, text: str, report: Report) -> None:
    """Fills the document with what stands in the text; problems go into the report, and `whole`
    says whether data is of use.
    """
    if hidden := [found.start() for found in islice(_HIDDEN.finditer(text), MAX_REFUSED)]:
        _refuse_hidden(document, text, hidden, report)
        return
    builder = _Builder(document, report)
    read_to = len(text)
    try:
        builder.build(yaml.parse(text, Loader=_LOADER))
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
    """Turns events into data. A stack machine of its own, so that depth is a number and not
    Python's stack.
    """

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
            if isinstance(event, yaml.DocumentStartEvent):
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
            elif isinstance(
                event,
                (
                    yaml.ScalarEvent,
                    yaml.SequenceStartEvent,
                    yaml.MappingStartEvent,
                    yaml.AliasEvent,
                ),
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
            if isinstance(event, yaml.ScalarEvent) and event.style:
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
        if isinstance(event, yaml.AliasEvent):
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
        if isinstance(event, yaml.ScalarEvent):
            return self._scalar(event)
        if depth >= MAX_DEPTH:
            self._limit(event, f"lists and mappings are nested more than {MAX_DEPTH} deep")
        if isinstance(event, yaml.SequenceStartEvent):
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
        return Plain(event.value)

    def _sequence(self, stream: Iterator[Any], path: Path, depth: int) -> list[Any]:
        out: list[Any] = []
        for event in stream:
            if isinstance(event, yaml.SequenceEndEvent):
                self._close(path, event)
                break
            out.append(self._node(event, stream, (*path, len(out)), depth))
        return out

    def _mapping(self, start: Any, stream: Iterator[Any], path: Path, depth: int) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for event in stream:
            if isinstance(event, yaml.MappingEndEvent):
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
            if isinstance(value, Plain) and not value and _PATTERN_KEY.fullmatch(key):
                _unquoted(self.document, self.document._values[path], "{" + key + "}", self.report)
                self.document.whole = False
        return out

    def _key(self, event: Any, stream: Iterator[Any], path: Path, depth: int) -> str | None:
        if not isinstance(event, yaml.ScalarEvent):
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

    def _alias(self, event: Any) -> Plain:
        self.document.whole = False
        if event.anchor in self.anchors:
            self._refuse(event, f"alias `*{printable(event.anchor)}`", "write the value out")
        else:
            _unquoted(self.document, _place(event), f"*{event.anchor}", self.report)
        return Plain("")

    def _duplicate(self, key: str, path: Path, place: Place) -> None:
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


def _place(event: Any) -> Place:
    start, end = event.start_mark, event.end_mark
    if (
        isinstance(event, (yaml.SequenceStartEvent, yaml.MappingStartEvent))
        and not event.flow_style
    ):
        return Place(start.line, start.column, start.line + 1, 0)
    return Place(start.line, start.column, end.line, end.column)


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
            f"U+{ord(character):04X} ({_named(character)}) makes the text look other than it is "
            "read",
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


def _unquoted(document: Document, place: Place, value: str, report: Report) -> None:
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


def _explain(document: Document, text: str, error: yaml.YAMLError, report: Report) -> None:
    """Turns the parser's error into a diagnostic in an author's words."""
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    if mark is None:
        before = text[: getattr(error, "position", 0) or 0]
        line = len(BREAK.findall(before))
        column = len(before) - max((m.end() for m in BREAK.finditer(before)), default=0)
        place = Place(line, column, line, column + 1)
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
        Place(line, mark.column, line, mark.column + 1)
        if line == mark.line
        else Place(line, 0, line, 1)
    )
    for found in _UNQUOTED.finditer(source):
        start, before = found.start("value"), source[: found.start("value")]
        if start <= place.column and before.count('"') % 2 == 0 and before.count("'") % 2 == 0:
            _unquoted(
                document, Place(line, start, line, found.end("value")), found["value"], report
            )
            return
    problem = str(getattr(error, "problem", None) or error)
    rest = source[place.column :].split(" #")[0].rstrip()
    if "anchor" in str(getattr(error, "context", "")) or "alias" in str(
        getattr(error, "context", "")
    ):
        start = source.rfind("*", 0, place.column + 1) if "alias" in str(error) else -1
        if start >= 0:
            value = source[start:].split()[0].rstrip(",]}")
            _unquoted(document, Place(line, start, line, start + len(value)), value, report)
            return
    if "\t" in source[: place.column + 1] and (
        "tab" in problem or rest.startswith("\t") or not rest
    ):
        column = source.index("\t")
        report.add(
            "M108",
            "a tab cannot indent",
            spans=(document._at(Place(line, column, line, column + 1)),),
            help="indent with spaces",
        )
    elif "cannot start any token" in problem and rest[:1] == "@":
        _unquoted(document, Place(line, place.column, line, place.column + len(rest)), rest, report)
    elif "cannot start any token" in problem:
        report.add(
            "M108",
            f"a value cannot start with `{printable(rest[:1])}`",
            spans=(document._at(place),),
            help="quote the value",
        )
    elif "mapping values are not allowed" in problem:
        message = "a colon and a blank inside a value that is not quoted"
        report.add(
            "M108",
            message,
            spans=(document._at(place),),
            help="quote the value, or put the field on a line of its own",
        )
    else:
        _syntax(document, place, problem, error, report)


def _syntax(document: Document, place: Place, problem: str, error: Any, report: Report) -> None:
    spans = [document._at(place)]
    context, mark = getattr(error, "context", None), getattr(error, "context_mark", None)
    if (
        context
        and mark is not None
        and mark.line != place.line
        and mark.line < len(document._lines)
    ):
        spans.append(
            document._at(Place(mark.line, mark.column, mark.line, mark.column + 1), str(context))
        )
    report.add("M108", f"not valid YAML: {printable(problem)}", spans=tuple(spans))
