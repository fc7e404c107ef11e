"""How a message spells an argument: `--to v5` on the command line, `to="v5"` for a caller in
Python.

A message is raised far below both front ends, so that it asks here. The command line says so once
for the process (`on_command_line`); a process that never does is a Python program. Not a context
variable: worker threads raise as well.

What is saved, as the notes of a plan are, spells no argument at all: it is read later, by either.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

# flags that are not called like their keyword
_FLAGS: Final = {"from_": "--from", "params": "--set"}
_NEGATED: Final = {"single_file": "--folder"}
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
        flag = _FLAGS.get(name, "--" + name.replace("_", "-"))
        if values and isinstance(values[0], bool):
            return flag if values[0] else _NEGATED[name]
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
