"""Memory that ran out: how libraries say so, and the error M922 that is made of it."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import NoReturn, ParamSpec, TypeVar

from .errors import (
    Diagnostic,
    MigrateError,
    option,
    printable,
    raise_all,
    with_partial_folder,
)

P = ParamSpec("P")
R = TypeVar("R")

# what the loader, `threading` and torch say
_WORDS = (
    "failed to map segment",
    "cannot allocate memory",
    "can't allocate memory",
    "can't start new thread",
    "out of memory",
    "not enough memory",
    "cannot create a thread",
    "resource temporarily unavailable",
)
_PART = 256 << 20


def lacking(error: BaseException) -> bool:
    """Whether the error, or one that led to it, says that memory or a thread could not be had."""
    return _said(error) is not None


def _said(error: BaseException) -> str | None:
    """The line that says so, empty where there are no words; None where nothing does."""
    seen: list[BaseException] = []
    at: BaseException | None = error
    while at is not None and at not in seen:
        seen.append(at)
        lines = [line.strip() for line in str(at).splitlines() if line.strip()]
        if isinstance(at, MemoryError) or (isinstance(at, OSError) and at.errno == errno.ENOMEM):
            return lines[0] if lines else ""
        if isinstance(at, SystemError) and _scarce():
            return lines[0] if lines else ""
        if isinstance(at, (ImportError, OSError, RuntimeError)):
            for line in lines:
                if any(word in line.lower() for word in _WORDS):
                    return line
        at = at.__cause__ or at.__context__
    return None


def _scarce() -> bool:
    """Whether not even a part of what libraries take can be had: C code then fails in any way."""
    import mmap

    try:
        mmap.mmap(-1, _PART).close()
    except (OSError, MemoryError):
        return True
    return False


def ran_out(error: BaseException, doing: str, *, partial: Path | None = None) -> NoReturn:
    """RunError M922: there was no memory to do that. Lets go of what the frames of `error` hold.
    `partial`: the folder of a run.
    """
    said = printable(line, 300) if (line := _said(error)) else ""
    trace = error.__traceback__
    while trace is not None:
        # a caller's is still running
        with suppress(RuntimeError):
            trace.tb_frame.clear()
        trace = trace.tb_next
    found = Diagnostic(
        "M922",
        f"not enough memory to {doing}" + (f": {said}" if said else ""),
        help=f"give the process more memory (`ulimit -v`), or lower {option('max_memory')}",
    )
    raise_all([found if partial is None else with_partial_folder(found, partial)])


@contextmanager
def needed(doing: str) -> Iterator[None]:
    """Turns errors within it that say that memory is lacking into RunError M922."""
    try:
        yield
    except MigrateError:
        raise
    except Exception as error:
        if lacking(error):
            ran_out(error, doing)
        raise


def guarded(function: Callable[P, R]) -> Callable[P, R]:
    """The function, from which no lack of memory comes but as RunError M922."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with needed(function.__name__.replace("_", " ")):
            return function(*args, **kwargs)

    return call
