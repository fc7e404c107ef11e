"""The notation of patterns: from text to pieces of literal text and captures with their types;
and of integer arithmetic over params, `$num_heads // $num_kv_heads * $head_dim`.

The type of a capture is written once, where it first occurs, so reading goes from left to right and
knows what earlier patterns of the same rule have declared. What can be refused when a rule file is
loaded is refused here: captures that touch and cannot be distinguished, and integers beside digits,
would otherwise show only as rules that never match or keys with two readings.

Rule files come from third parties, so nothing is evaluated by Python: an expression is turned into
postfix code by operator precedence and run by a small stack machine. Neither step recurses, so
nesting cannot exhaust the stack. Operators, precedence and rounding are Python's (`//` and `%`
round towards minus infinity, unary minus binds tightest). The index expressions in the braces of a
pattern (`{2*n+1}`) are the same language with one capture in it. They must be linear with a
positive factor known from the text alone: only then do they have an inverse whatever a param is.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, NoReturn

from .errors import PatternError

# Far above anything a shape needs; keeps hostile text from buying big-number arithmetic.
LONGEST: Final = 1000

LETTERS: Final = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_")
DIGITS: Final = frozenset("0123456789")

_BINARY: Final[Mapping[str, Callable[[int, int], int]]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
    "%": operator.mod,
}
_PRECEDENCE: Final = {"+": 1, "-": 1, "*": 2, "//": 2, "%": 2, "neg": 3}


class Unset(LookupError):  # noqa: N818 - a state that callers handle, like StopIteration
    """A param that an expression reads has no value. `name` is written without the `$`."""

    def __init__(self, name: str) -> None:
        super().__init__(f"param ${name} has no value")
        self.name = name


@dataclass(frozen=True, slots=True)
class _Token:
    """A word of the notation, and where it stands."""

    kind: str  # "int", "param", "name", "op", "(" or ")"
    text: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Expr:
    """An integer expression, equal by its code. `names`: the params it reads, by first use."""

    text: str = field(compare=False)
    names: tuple[str, ...]
    code: tuple[int | str, ...]
    places: tuple[tuple[int, int], ...] = field(compare=False, repr=False)

    def evaluate(self, params: Mapping[str, int]) -> int:
        """The value. `Unset` if a param has none; PatternError M111 on a division by zero or with a
        rest, or a param of any type but an integer.
        """
        stack: list[int] = []
        for op, (start, end) in zip(self.code, self.places, strict=True):
            if isinstance(op, int):
                stack.append(op)
            elif op == "neg":
                stack.append(-stack.pop())
            elif op in _BINARY:
                right, left = stack.pop(), stack.pop()
                if op in ("//", "%") and right == 0:
                    raise PatternError("M111", f"division by zero in `{self.text}`", start, end)
                if op == "//" and left % right:
                    hint = (
                        "if rounding is intended, subtract the remainder first: "
                        "`($n - $n % $k) // $k`"
                    )
                    raise PatternError(
                        "M111",
                        f"{left} is not divisible by {right} in `{self.text}`",
                        start,
                        end,
                        help=hint,
                    )
                stack.append(_BINARY[op](left, right))
            else:
                stack.append(_number(op[1:], params, self.text, start, end))
        return stack.pop()

    def __str__(self) -> str:
        return self.text


def parse_expression(text: str) -> Expr:
    """The expression in `text`; PatternError M111, with offsets into `text`, if there is none."""
    postfix = _postfix(text)
    for token in postfix:
        if token.kind == "name":
            _refuse_token(
                f"`{token.text}` is neither a number nor a param",
                token,
                help=f"a param is written `${token.text}`",
            )
    return _expr(text, postfix)


def parse_index(text: str) -> tuple[str, int, Expr | int]:
    """(capture, a, b) of an index expression, which stands for a * capture + b with a >= 1.

    b is an int where it has no param. PatternError M111 if the text is not linear in one capture.
    """
    postfix = _postfix(text)
    captures = list(dict.fromkeys(t.text for t in postfix if t.kind == "name"))
    if len(captures) != 1:
        found = "no capture" if not captures else f"several captures ({', '.join(captures)})"
        raise PatternError(
            "M111",
            f"`{text}` contains {found}",
            0,
            len(text),
            help="an index expression is a*n + b with one capture n",
        )
    # Each entry is (factor of the capture, postfix of the rest; None is zero, for `n` alone).
    stack: list[tuple[int, list[_Token] | None]] = []
    for token in postfix:
        if token.kind == "name":
            stack.append((1, None))
        elif token.kind != "op":
            stack.append((0, [token]))
        elif token.text == "neg":
            a, b = stack.pop()
            stack.append((-a, None if b is None else [*b, token]))
        else:
            right, left = stack.pop(), stack.pop()
            stack.append(_combine(token, left, right))
    a, rest = stack.pop()
    if a < 1:
        raise PatternError(
            "M111",
            f"`{text}` does not grow with {captures[0]}",
            0,
            len(text),
            help="the factor must be 1 or more",
        )
    if rest is None:
        return captures[0], a, 0
    offset = _expr(text, rest)
    return captures[0], a, offset if offset.names else offset.evaluate({})


def _combine(
    op: _Token, left: tuple[int, list[_Token] | None], right: tuple[int, list[_Token] | None]
) -> tuple[int, list[_Token] | None]:
    (a, b), (c, d) = left, right
    if op.text in ("+", "-"):
        factor = a + c if op.text == "+" else a - c
        if d is None:
            return factor, b
        if b is None:
            return factor, d if op.text == "+" else [*d, _Token("op", "neg", op.start, op.end)]
        return factor, [*b, *d, op]
    if a == 0 and c == 0 and b is not None and d is not None:
        return 0, [*b, *d, op]
    if op.text != "*" or (a and c):
        _refuse_token(
            f"`{op.text}` makes the index not linear in its capture", op, help="write it as a*n + b"
        )
    # One side holds the capture, the other is the factor.
    (a, b), scale = ((a, b), d) if a else ((c, d), b)
    if scale is None or any(t.kind == "param" for t in scale):
        _refuse_token(
            "the factor of a capture must be a number",
            op,
            help="a param may only be added or subtracted",
        )
    factor = a * _expr("", scale).evaluate({})
    return factor, None if b is None else [*b, *scale, op]


def _expr(text: str, postfix: list[_Token]) -> Expr:
    names = tuple(dict.fromkeys(t.text[1:] for t in postfix if t.kind == "param"))
    code = tuple(int(t.text) if t.kind == "int" else t.text for t in postfix)
    return Expr(text, names, code, tuple((t.start, t.end) for t in postfix))


def _number(name: str, params: Mapping[str, int], text: str, start: int, end: int) -> int:
    value: object = params.get(name)
    if value is None:
        raise Unset(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise PatternError("M111", f"param ${name} in `{text}` is not an integer", start, end)
    return value


def _refuse_token(message: str, token: _Token, help: str | None = None) -> NoReturn:
    raise PatternError("M111", message, token.start, token.end, help=help)


def _tokens(text: str) -> list[_Token]:
    found = []
    p = 0
    while p < len(text):
        c, start = text[p], p
        if c == " ":
            p += 1
            continue
        p += 1
        if c in DIGITS or c in LETTERS or c == "$":
            allowed = DIGITS if c in DIGITS else DIGITS | LETTERS
            while p < len(text) and text[p] in allowed:
                p += 1
            kind = "int" if c in DIGITS else "param" if c == "$" else "name"
            if c == "$" and (p == start + 1 or text[start + 1] in DIGITS):
                raise PatternError("M111", "a `$` without the name of a param", start, p)
        elif c in "()":
            kind = c
        else:
            kind = "op"
            if c == "/" and text[p : p + 1] == "/":
                p += 1
            if text[start:p] not in _BINARY:
                raise PatternError(
                    "M111",
                    f"`{c}` is not an operator here",
                    start,
                    p,
                    help="+ - * // % and parentheses are",
                )
        found.append(_Token(kind, text[start:p], start, p))
    return found


def _postfix(text: str) -> list[_Token]:
    """The tokens of `text` in postfix order, without parentheses (Dijkstra's shunting yard)."""
    if len(text) > LONGEST:
        raise PatternError(
            "M111", f"expression longer than {LONGEST} characters", LONGEST, len(text)
        )
    out: list[_Token] = []
    waiting: list[_Token] = []
    operand_next = True
    for token in _tokens(text):
        if token.kind in ("int", "param", "name", "("):
            if not operand_next:
                _refuse_token(f"an operator is missing before `{token.text}`", token)
            if token.kind == "(":
                waiting.append(token)
            else:
                out.append(token)
                operand_next = False
        elif operand_next:
            if token.text != "-":
                _refuse_token(f"a number or a param is missing before `{token.text}`", token)
            waiting.append(_Token("op", "neg", token.start, token.end))
        elif token.kind == ")":
            while waiting and waiting[-1].kind != "(":
                out.append(waiting.pop())
            if not waiting:
                _refuse_token("`)` was never opened", token)
            waiting.pop()
        else:
            while (
                waiting
                and waiting[-1].kind == "op"
                and _PRECEDENCE[waiting[-1].text] >= _PRECEDENCE[token.text]
            ):
                out.append(waiting.pop())
            waiting.append(token)
            operand_next = True
    if operand_next:
        raise PatternError(
            "M111", "a number or a param is missing at the end", len(text), len(text)
        )
    while waiting:
        if waiting[-1].kind == "(":
            _refuse_token("`(` is never closed", waiting[-1])
        out.append(waiting.pop())
    return out


LONGEST_PATTERN: Final = 4000

# Words that stand where a type is expected and are meant as one, not as the only alternative.
_LOOKS_LIKE_A_TYPE: Final = frozenset((
    "Int", "INT", "integer", "number", "num", "digits", "str", "string", "text", "float", "bool",
    "any", "path", "plain", "enum", "segment",
))  # fmt: skip


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
    """Literal text, or one pair of braces; `start` and `end` are offsets, braces included."""

    start: int
    end: int
    text: str = ""  # literal text, or what stands between the braces
    name: str = ""  # of the capture; empty for literal text
    type: CaptureType | None = None
    factor: int = 1
    offset: int | Expr = 0


def read_pieces(
    text: str, types: Mapping[str, CaptureType]
) -> tuple[list[PatternPiece], dict[str, CaptureType]]:
    """The pieces of a pattern, and the types of all captures so far; PatternError M201 or M111."""
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
                    f"`{{{name}}}` is known only with its dots removed",
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
            capture, piece.factor, piece.offset = parse_index(body)
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
            help="names consist of ASCII letters, digits and _, and do not begin with a digit",
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
