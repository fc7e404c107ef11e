"""Integer arithmetic over params, as rule files write it:
`$num_heads // $num_kv_heads * $head_dim`.

Rule files come from third parties, so nothing is evaluated by Python: the text is turned into
postfix code by operator precedence and run by a small stack machine. Neither step recurses, so
nesting cannot exhaust the stack. Operators, precedence and rounding are Python's (`//` and `%`
round towards minus infinity, unary minus binds tightest).

The index expressions in the braces of a pattern (`{2*n+1}`) are the same language with one capture
in it. They must be linear with a positive factor known from the text alone: only then do they have
an inverse for every value of a param.
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
    """An integer expression. `names` are the params it reads, in order of first use; equality is
    that of the code.
    """

    text: str = field(compare=False)
    names: tuple[str, ...]
    code: tuple[int | str, ...]
    places: tuple[tuple[int, int], ...] = field(compare=False, repr=False)

    def evaluate(self, params: Mapping[str, int]) -> int:
        """The value. `Unset` if a param has none; PatternError M111 on a division by zero or with a
        rest, or a param that is no integer.
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
                        "where rounding is meant, take the rest off first: `($n - $n % $k) // $k`"
                    )
                    raise PatternError(
                        "M111",
                        f"{left} does not divide by {right} in `{self.text}`",
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


def parse(text: str) -> Expr:
    """The expression that `text` writes; PatternError M111, with offsets into `text`, if it writes
    none.
    """
    postfix = _postfix(text)
    for token in postfix:
        if token.kind == "name":
            _refuse(
                f"`{token.text}` is neither a number nor a param",
                token,
                help=f"a param is written `${token.text}`",
            )
    return _expr(text, postfix)


def parse_index(text: str) -> tuple[str, int, Expr | int]:
    """(capture, a, b) of an index expression, which stands for a * capture + b with a >= 1.

    b is an int where no param occurs in it. PatternError M111 if the text is not linear in exactly
    one capture.
    """
    postfix = _postfix(text)
    captures = list(dict.fromkeys(t.text for t in postfix if t.kind == "name"))
    if len(captures) != 1:
        found = "no capture" if not captures else f"several captures ({', '.join(captures)})"
        raise PatternError(
            "M111",
            f"`{text}` holds {found}",
            0,
            len(text),
            help="an index expression is a*n + b with one capture n",
        )
    # Each entry is (factor of the capture, postfix of the rest; None is zero, so that `n` needs no
    # `+ 0`).
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
        _refuse(
            f"`{op.text}` makes the index not linear in its capture", op, help="write it as a*n + b"
        )
    # One side holds the capture, the other is the factor.
    (a, b), scale = ((a, b), d) if a else ((c, d), b)
    if scale is None or any(t.kind == "param" for t in scale):
        _refuse(
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


def _refuse(message: str, token: _Token, help: str | None = None) -> NoReturn:
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
                _refuse(f"an operator is missing before `{token.text}`", token)
            if token.kind == "(":
                waiting.append(token)
            else:
                out.append(token)
                operand_next = False
        elif operand_next:
            if token.text != "-":
                _refuse(f"a number or a param is missing before `{token.text}`", token)
            waiting.append(_Token("op", "neg", token.start, token.end))
        elif token.kind == ")":
            while waiting and waiting[-1].kind != "(":
                out.append(waiting.pop())
            if not waiting:
                _refuse("`)` was never opened", token)
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
            _refuse("`(` is never closed", waiting[-1])
        out.append(waiting.pop())
    return out
