"""What is logged, under the name "migrate" of the standard library's `logging`: decisions, files,
and what each phase took.

At INFO is one line for what a program would want to know of each load (`live.hook`); decisions and
phases are at DEBUG, files at TRACE. Handlers are the application's, and so is the import: where
nothing has imported `logging`, nothing can listen, and nothing is logged. That keeps its import out
of every command that does not log.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

NAME = "migrate"
TRACE, DEBUG = 5, 10


def _logger(level: int) -> Any:
    """The logger if somebody listens at this level, else None."""
    logging = sys.modules.get("logging")
    if logging is None:
        return None
    logger = logging.getLogger(NAME)
    return logger if logger.isEnabledFor(level) else None


def debug(text: str, *values: object) -> None:
    """Logs a decision. `values` are put into `text` by `%`, and only if somebody listens."""
    if (logger := _logger(DEBUG)) is not None:
        logger.debug(text, *values)


def trace(text: str, *values: object) -> None:
    """Logs a detail, such as a file that was opened."""
    if (logger := _logger(TRACE)) is not None:
        logger.log(TRACE, text, *values)


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Logs the seconds of clock and of processor time that the body took, also where it raises."""
    if _logger(DEBUG) is None:
        yield
        return
    clock, processor = time.perf_counter(), time.process_time()
    try:
        yield
    finally:
        debug(
            "%s took %.3f s, %.3f s of processor time",
            name,
            time.perf_counter() - clock,
            time.process_time() - processor,
        )
