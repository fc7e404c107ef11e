"""`requires`: which releases of migrate may read a file. Looked at before anything else in it.

Only comparisons of dotted numbers; pre-releases and wildcards are not worth a dependency here.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BeforeValidator, WithJsonSchema

from ..core.version import __version__
from ..source import yaml
from .fields import Problem, text, whole

VERSION = __version__

_ONE = r"\s*(>=|<=|==|!=|>|<)\s*([0-9]{1,9}(?:\.[0-9]{1,9}){0,5})\s*"
_COMPARISON = re.compile(_ONE)
_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    ">=": operator.ge, "<=": operator.le, "==": operator.eq, "!=": operator.ne, ">": operator.gt,
    "<": operator.lt,
}  # fmt: skip

Requires = Annotated[
    str,
    BeforeValidator(text),
    WithJsonSchema({"type": "string", "pattern": whole(f"{_ONE}(?:,{_ONE})*")}),
]


def unmet(requires: Any, version: str = VERSION) -> Problem | None:
    """Why a file with this `requires` cannot be read by `version` (M107), or is not understood
    (M114); None if it can.
    """
    if not isinstance(requires, str) or yaml.is_null(requires):
        return None
    for part in requires.split(","):
        match = _COMPARISON.fullmatch(part)
        if match is None:
            return Problem(
                "M114",
                f"`{part.strip()}` is not a comparison of versions",
                'write `requires: ">=0.1"`',
            )
        if not _OPERATORS[match[1]](_numbers(version), _numbers(match[2])):
            return Problem(
                "M107",
                f"the file requires migrate {part.strip()}, this is {version}",
                "install a release of migrate that fits",
            )
    return None


def _numbers(version: str) -> tuple[int, ...]:
    numbers = [int(n) for n in version.split(".")]
    return tuple(numbers + [0] * (6 - len(numbers)))
