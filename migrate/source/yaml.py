"""YAML as data that remembers where it stood, for files that people write.

The text is read as parser events, never as objects: no tag, anchor or alias can build anything,
sizes and depth are limited before a value exists, and each problem gets a line. A scalar stays text
until somebody asks for a type, because YAML's guesses lose what was written (`2.10` is a version,
`no` is a word); `Plain` marks the unquoted ones, `core` types them by the YAML 1.2 core schema. The
parser is apart, in `_yamlparse`: what reads no rule file that people wrote needs no PyYAML.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path as FilePath
from typing import Any, NamedTuple

from ..core.diagnostics import Report, Span, printable

MAX_BYTES = 1 << 20
MAX_EVENTS = 100_000
MAX_DEPTH = 32
# int() takes a few more; to read them all would take time that grows with the square
MAX_DIGITS = 4000
# of one file, after which it is read no further: a file of anchors and aliases would be answered
# with a book
MAX_REFUSED = 50

Path = tuple["str | int", ...]

# what YAML 1.1 calls a line break, and so what its marks count
BREAK = re.compile("\r\n|[\n\r\x85\u2028\u2029]")
_NULLS = frozenset(("", "~", "null", "Null", "NULL"))
_BOOLS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
INTEGER = re.compile(r"[-+]?[0-9]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_SPECIAL_FLOAT = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


class Plain(str):
    """An unquoted scalar: text that `core` may read as null, bool, int or float."""

    __slots__ = ()


class Place(NamedTuple):
    line: int
    column: int
    end_line: int
    end_column: int


class Document:
    """One parsed file: `data` of dicts, lists, `str` (quoted) and `Plain` (not), and where each
    node stood.

    `whole` is False when something could not be read (an alias, a merge key): `data` is then of no
    use beyond messages.
    """

    __slots__ = ("_keys", "_lines", "_texts", "_values", "data", "name", "whole")

    def __init__(self, name: str, text: str) -> None:
        self.name, self.whole = name, True
        self.data: Any = None
        self._lines = BREAK.split(text)
        self._values: dict[Path, Place] = {}
        self._keys: dict[Path, Place] = {}
        # the quoted scalars and, from the line below their sign on, the block scalars
        self._texts: list[Place] = []

    @classmethod
    def of(cls, name: str, text: str, values: Iterable[Any], keys: Iterable[Any]) -> Document:
        """A document without data, whose places are known: what `places` gave of a document of this
        text.
        """
        document = cls(name, text)
        document._values = {tuple(path): Place(*place) for path, place in values}
        document._keys = {tuple(path): Place(*place) for path, place in keys}
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
        return self._at(self._values.get((), Place(0, 0, 0, 1)))

    def key_span(self, path: Path) -> Span:
        """The place of the key that leads to `path`; of the value where the last step is a list
        index.
        """
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

    def _at(self, place: Place, label: str = "") -> Span:
        text = self._lines[place.line] if place.line < len(self._lines) else ""
        end = place.end_column if place.end_line == place.line else len(text.rstrip())
        return Span(
            self.name, place.line + 1, place.column + 1, max(1, end - place.column), text, label
        )


def parse(text: str, name: str) -> Document:
    """The document in `text`; raises all its problems at once (M104, M105, M108, M109, M110, M116),
    exit status 2.
    """
    report = Report()
    document = read(text, name, report)
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
        return read(raw.decode("utf-8-sig"), name, report)
    except UnicodeDecodeError as error:
        if len(raw) > MAX_BYTES:
            return read("#" * (MAX_BYTES + 1), name, report)
        line = raw.count(b"\n", 0, error.start) + 1
        report.add(
            "M108",
            "the file is not UTF-8 text",
            spans=(Span(name, line, 1),),
            help="save it as UTF-8",
        )
        return nothing(name, "")


def read(text: str, name: str, report: Report) -> Document:
    """The document in `text`, its problems added to `report`; `whole` says whether `data` can be
    used.
    """
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
    from ._yamlparse import parsed

    parsed(document, text, report)
    return document


def core(node: Any) -> Any:
    """`node` with each `Plain` typed by the YAML 1.2 core schema (null, true, false, decimal ints,
    floats); keys stay text.
    """
    if isinstance(node, Plain):
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
    """Like `core`, but only what can be written back as it was: `1.10`, `007` and `+1` stay
    text.
    """
    if isinstance(node, Plain):
        typed = core(node)
        if typed is None or isinstance(typed, bool):
            return typed
        return typed if isinstance(typed, int) and str(typed) == node else str(node)
    if isinstance(node, dict):
        return {str(key): exact(value) for key, value in node.items()}
    return [exact(item) for item in node] if isinstance(node, list) else node


def is_null(node: Any) -> bool:
    """Whether `node` is None or an unquoted null, or nothing was written at all."""
    return node is None or (isinstance(node, Plain) and node in _NULLS)


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
