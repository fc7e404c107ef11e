"""What a scalar of a rule file is: a `$param`, a number, a truth or text, as an editor's YAML 1.2
parser reads it.

Apart from `fields`, because runs ask it of params, and no run by rules that ship needs the models
of what people write.
"""

from __future__ import annotations

import re
from math import inf
from sys import float_info
from typing import Any

from ..source import yaml

PARAM = re.compile(r"\$([A-Za-z_]\w*)", re.ASCII)
# what the roles of a rule are called where a capture can stand
ROLE = "role"
NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_RADIX = re.compile(r"0o[0-7]+|0x[0-9A-Fa-f]+")
# integers of at most this size are one number to every reader of JSON
MOST = 2**53 - 1


def seen(value: Any) -> Any:
    """What an editor's YAML 1.2 parser makes of the value."""
    return (
        int(value, 0)
        if isinstance(value, yaml.PlainScalar) and _RADIX.fullmatch(value)
        else yaml.core(value)
    )


def numeric(value: Any) -> Any:
    """`seen`, where an integer that no double comes near is infinite, as `1e400` is."""
    typed = seen(value)
    return (
        (inf if typed > 0 else -inf)
        if isinstance(typed, int) and abs(typed) > float_info.max
        else typed
    )


def whole_number(value: Any) -> int | None:
    """The integer that an unquoted or a typed value is, or None; `8.0` is one, as in JSON."""
    if isinstance(value, str) and not isinstance(value, yaml.PlainScalar):
        return None
    number = seen(value)
    if isinstance(number, float) and number.is_integer():
        return int(number)
    return number if isinstance(number, int) and not isinstance(number, bool) else None
