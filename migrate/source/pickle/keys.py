"""Keys of dicts and members of sets, in a form that is safe to compare.

A hash of numbers or tuples can be chosen by who writes the stream, so that a dict of them takes for
ever; hashing a tuple that is deep enough kills the process. Here numbers keep to 64 bits, and
tuples become a flat row of texts, whose hashes nobody can choose.
"""

from __future__ import annotations

from typing import Any, Final

from ...core.errors import printable
from .nodes import Call, Global

# compared as they are; calls and globals by identity
_KEYS: Final = frozenset({str, bool, float, Global, Call})


class WrongError(Exception):
    """What is wrong with the opcode in hand; the machine adds the stream and the offset."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


class EndedError(WrongError):
    """The stream ends too early; where only a part of it was read, that part is too short."""


def kind_of(value: Any) -> str:
    """What a value is, in a few words; never its contents."""
    kind = type(value)
    if kind is Global:
        return printable(str(value))
    if kind is Call:
        return f"a call of {printable(str(value.function))}"
    return "None" if value is None else "an int" if kind is int else f"a {kind.__name__.lower()}"


def forms_of(keys: list[Any]) -> tuple[list[Any], int]:
    """What stands for the keys where they are compared, and what that costs, in nodes."""
    if set(map(type, keys)) <= {str}:
        return keys, 0
    forms: list[Any] = []
    cost = 0
    for key in keys:
        kind = type(key)
        if kind is tuple:
            shape: list[str] = []
            leaves: list[Any] = []
            _flatten(key, 1, shape, leaves)
            forms.append(("".join(shape), *leaves))
            cost += len(shape)
        elif kind is bytes:
            forms.append(("b", _text(key)))
            cost += 1
        elif kind is int:
            forms.append(_number(key))
        elif key is None or kind in _KEYS:
            forms.append(key)
        else:
            raise WrongError("M931", f"{kind_of(key)} as a key")
    return forms, cost


def _flatten(key: tuple[Any, ...], depth: int, shape: list[str], leaves: list[Any]) -> None:
    """A tuple as the text of its shape and its leaves. Hashes of numbers can be chosen, those of
    texts cannot.
    """
    if depth > 3:
        raise WrongError("M932", "a tuple as a key that is more than 3 deep")
    shape.append("(")
    for part in key:
        kind = type(part)
        if len(shape) > 64:
            raise WrongError("M932", "a tuple as a key that has more than 64 parts")
        if kind is tuple:
            _flatten(part, depth + 1, shape, leaves)
            continue
        if (
            kind is int
            or kind is bool
            or (kind is float and part.is_integer() and abs(part) < 2.0**64)
        ):
            # 1, 1.0 and True are one key
            shape.append("n")
            leaves.append(str(_number(int(part))))
        elif kind is float:
            shape.append("f")
            leaves.append(repr(part))
        elif kind is bytes:
            shape.append("b")
            leaves.append(_text(part))
        elif part is None:
            shape.append("z")
        elif kind in _KEYS:
            shape.append("s" if kind is str else "@")
            leaves.append(part)
        else:
            raise WrongError("M931", f"{kind_of(part)} in a tuple as a key")
    shape.append(")")


def _number(key: int) -> int:
    if key.bit_length() > 64:
        raise WrongError("M932", "an integer of more than 64 bits as a key")
    return key


def _text(key: bytes) -> str:
    if len(key) > 1024:
        raise WrongError("M932", f"bytes of length {len(key):,} as a key; at most 1,024")
    return key.decode("latin-1")
