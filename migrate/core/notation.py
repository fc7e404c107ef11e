"""The notation of patterns: from text to pieces of literal text and captures with their types.

The type of a capture is written once, where it first occurs, so reading goes from left to right and
knows what earlier patterns of the same rule have declared. What can be refused when a rule file is
loaded is refused here: captures that touch and cannot be told apart, and integers beside digits,
would otherwise show only as rules that never match or keys with two readings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NoReturn

from . import expr
from .errors import PatternError
from .expr import DIGITS, LETTERS

LONGEST_PATTERN: Final = 4000

# Words that stand where a type is expected and are meant as one, not as the only alternative.
_LOOKS_LIKE_A_TYPE: Final = frozenset(
    (
        "Int",
        "INT",
        "integer",
        "number",
        "num",
        "digits",
        "str",
        "string",
        "text",
        "float",
        "bool",
        "any",
        "path",
        "plain",
        "enum",
        "segment",
    )
)


@dataclass(frozen=True, slots=True)
class CaptureType:
    """What a capture takes: `kind` is plain, int, path, enum or flat; `values` are the alternatives
    of an enum, as written.
    """

    kind: str
    values: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "|".join(self.values) if self.kind == "enum" else self.kind


@dataclass(slots=True)
class PatternPiece:
    """Literal text, or one pair of braces; `start` and `end` are offsets into the pattern, braces
    included.
    """

    start: int
    end: int
    text: str = ""  # literal text, or what stands between the braces
    name: str = ""  # of the capture; empty for literal text
    type: CaptureType | None = None
    factor: int = 1
    offset: int | expr.Expr = 0


def read_pieces(
    text: str, types: Mapping[str, CaptureType]
) -> tuple[list[PatternPiece], dict[str, CaptureType]]:
    """The pieces of a pattern, and the types of all captures known by then; PatternError M201 or
    M111.
    """
    if not text:
        raise PatternError("M201", "a pattern is empty", 0, 0)
    if len(text) > LONGEST_PATTERN:
        raise PatternError(
            "M201",
            f"a pattern has more than {LONGEST_PATTERN} characters",
            LONGEST_PATTERN,
            len(text),
        )
    pieces = _pieces(text)
    known = _declare(pieces, types)
    _check_neighbours(pieces)
    return pieces, known


def _pieces(text: str) -> list[PatternPiece]:
    out: list[PatternPiece] = []
    literal, begin, p = "", 0, 0
    while p < len(text):
        c = text[p]
        if text[p : p + 2] in ("{{", "}}"):
            literal += c
            p += 2
        elif c == "}":
            raise PatternError(
                "M201",
                "`}` without `{`",
                p,
                p + 1,
                help="a brace that is part of the key is written `}}`",
            )
        elif c != "{":
            literal += c
            p += 1
        else:
            end = text.find("}", p)
            if end < 0 or "{" in text[p + 1 : end]:
                raise PatternError(
                    "M201",
                    "`{` is never closed",
                    p,
                    p + 1,
                    help="a brace that is part of the key is written `{{`",
                )
            if literal:
                out.append(PatternPiece(begin, p, literal))
            out.append(PatternPiece(p, end + 1, text[p + 1 : end], name="?"))
            literal, p = "", end + 1
            begin = p
    if literal:
        out.append(PatternPiece(begin, p, literal))
    return out


def _declare(
    pieces: list[PatternPiece], given: Mapping[str, CaptureType]
) -> dict[str, CaptureType]:
    """Gives each piece in braces its name and type, and returns the types by name."""
    known = dict(given)
    for piece in pieces:
        if not piece.name:
            continue
        name, declared = _read_braces(piece)
        piece.name = name
        before = known.get(name)
        if declared is None:
            piece.type = before or CaptureType("plain")
            if piece.type.kind == "flat":
                _refuse(
                    piece,
                    f"`{{{name}}}` is known with its dots removed only",
                    help=f"write {{{name}...}} in one of the patterns",
                )
            known[name] = piece.type
        elif declared.kind == "flat":
            if before is not None and before.kind not in ("path", "flat"):
                _refuse(
                    piece,
                    f"`{name}` is {_a(before)}; only a path capture can be written without its "
                    "dots",
                )
            piece.type = declared
            known.setdefault(name, declared)
        else:
            if (
                before is not None
                and before != declared
                and (before.kind, declared.kind) != ("flat", "path")
            ):
                _refuse(
                    piece, f"`{name}` is {_a(before)} where it first occurs and {_a(declared)} here"
                )
            known[name] = piece.type = declared
    return known


def _a(type: CaptureType) -> str:
    names = {
        "int": "an integer",
        "path": "a path",
        "enum": f"one of {type}",
        "flat": "a path without dots",
    }
    return names.get(type.kind, "plain text")


def _read_braces(piece: PatternPiece) -> tuple[str, CaptureType | None]:
    """The name, and the type if it is written here."""
    body = piece.text
    if body.endswith("...") and ":" not in body:
        return _name(piece, body[:-3]), CaptureType("path")
    name, colon, written = body.partition(":")
    if not colon:
        if _is_name(body) or not any(c in "+-*/%()$ " or c in DIGITS for c in body):
            return _name(piece, body), None
        try:
            capture, piece.factor, piece.offset = expr.parse_index(body)
        except PatternError as e:
            at = piece.start + 1
            raise PatternError(e.code, e.message, at + e.start, at + e.end, help=e.help) from None
        if piece.factor == 1 and piece.offset == 0:
            _refuse(piece, f"`{{{body}}}` is not a name", help=f"write {{{capture}}}")
        return capture, CaptureType("int")
    _name(piece, name)
    if written in ("int", "flat"):
        return name, CaptureType(written)
    values = tuple(written.split("|"))
    if len(values) == 1 and (
        not written or written in _LOOKS_LIKE_A_TYPE or written.endswith("...")
    ):
        from difflib import get_close_matches  # of mistakes only

        near = get_close_matches(written.lower(), ["int", "flat"], n=1)
        hint = (
            f"did you mean {{{name}:{near[0]}}}?"
            if near
            else "a type is int, flat, or a list of alternatives: {w:q|k|v}"
        )
        _refuse(piece, f"`{written}` is not a type", help=hint)
    if "" in values:
        _refuse(piece, f"an alternative of `{name}` is empty")
    if len(set(values)) < len(values):
        twice = next(v for i, v in enumerate(values) if v in values[:i])
        _refuse(piece, f"`{twice}` occurs twice among the alternatives of `{name}`")
    return name, CaptureType("enum", values)


def _is_name(text: str) -> bool:
    return bool(text) and text[0] in LETTERS and all(c in LETTERS or c in DIGITS for c in text)


def _name(piece: PatternPiece, name: str) -> str:
    if not name:
        _refuse(
            piece,
            "a capture has no name",
            help="write {name}, or {name...} for any number of segments",
        )
    if not _is_name(name):
        _refuse(
            piece,
            f"`{name}` is not a name",
            help="names are ASCII letters, digits and _, and begin with no digit",
        )
    return name


def _refuse(piece: PatternPiece, message: str, help: str | None = None) -> NoReturn:
    raise PatternError("M201", message, piece.start, piece.end, help=help)


def _check_neighbours(pieces: list[PatternPiece]) -> None:
    for i, piece in enumerate(pieces):
        before = pieces[i - 1] if i else None
        after = pieces[i + 1] if i + 1 < len(pieces) else None
        kind = piece.type.kind if piece.type else ""
        if kind == "path":
            if after is not None and after.text == "." and not after.name and i + 2 < len(pieces):
                following = pieces[i + 2].type
                if following is not None and following.kind == "path":
                    raise PatternError(
                        "M201",
                        f"there is nothing between the paths `{piece.name}` and "
                        f"`{pieces[i + 2].name}`",
                        piece.start,
                        pieces[i + 2].end,
                        help="put a segment that is always there between them",
                    )
            begins = before is None or (not before.name and before.text.endswith("."))
            ends = after is None or (not after.name and after.text[0] in ".@")
            if not (begins and ends):
                _refuse(
                    piece,
                    f"the path `{piece.name}` does not stand alone between dots",
                    help="only `@` may follow it directly",
                )
        elif kind == "int":
            fixed = [before.text[-1]] if before is not None and not before.name else []
            fixed += [after.text[0]] if after is not None and not after.name else []
            if any(c in DIGITS for c in fixed):
                _refuse(
                    piece,
                    f"a digit stands beside the integer `{piece.name}`, which takes all its digits",
                )
        if (
            after is not None
            and after.type is not None
            and kind in ("plain", "int")
            and after.type.kind == kind
        ):
            message = f"`{piece.name}` and `{after.name}` touch and cannot be distinguished"
            raise PatternError(
                "M201",
                message,
                piece.start,
                after.end,
                help="put text between them, or list the values of one",
            )
