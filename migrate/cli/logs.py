"""`-v` and `--log-file`: what the package logs, on stderr and in a file. Answers stay on stdout."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..core.errors import MigrateError, fail, printable
from ..core.log import NAME, TRACE
from .render import safe

if TYPE_CHECKING:
    import logging


@contextmanager
def listening(verbosity: int, file: str | None, sources: Iterable[str]) -> Iterator[None]:
    """Handlers for as long as the context is open: DEBUG on stderr with a `verbosity` of 1, TRACE
    with 2, and all in `file`.

    M115 for a file that cannot be written, or that would lie in one of the `sources`.
    """
    # every command imports this file, and few log
    import logging

    class Lines(logging.Formatter):
        """One line a record, with nothing in it that would move the cursor."""

        def format(self, record: logging.LogRecord) -> str:
            return str(safe(super().format(record).replace("\n", " | ")))

    logging.addLevelName(TRACE, "TRACE")
    handlers: list[logging.Handler] = []
    if verbosity:
        shown = logging.StreamHandler(sys.stderr)
        shown.setLevel(logging.DEBUG if verbosity == 1 else TRACE)
        shown.addFilter(
            lambda record: record.levelno < logging.ERROR
        )  # errors are on stderr already
        shown.setFormatter(Lines("%(relativeCreated)6.0f ms  %(message)s"))
        handlers.append(shown)
    if file is not None:
        kept = _opened(file, sources)
        kept.setFormatter(Lines("%(asctime)s %(levelname)s %(message)s"))
        handlers.append(kept)
    logger = logging.getLogger(NAME)
    level = logger.level
    logger.setLevel(TRACE if file is not None else min(handler.level for handler in handlers))
    for handler in handlers:
        logger.addHandler(handler)
    try:
        yield
    except MigrateError as error:
        logger.error("%s", error)
        raise
    finally:
        logger.setLevel(level)
        for handler in handlers:
            logger.removeHandler(handler)
            handler.close()


def _opened(file: str, sources: Iterable[str]) -> logging.Handler:
    import logging

    place = os.path.realpath(file)
    for source in sources:
        home = os.path.realpath(source)
        if place == home or place.startswith(home + os.sep):
            fail(
                "M115",
                f"the log cannot be kept in {printable(file, 300)}, which lies in the source",
                help="choose a place outside the source",
            )
    try:
        return logging.FileHandler(file, encoding="utf-8")
    except OSError as error:
        fail(
            "M115",
            f"cannot write the log to {printable(file, 300)}: {error.strerror or error}",
            help="choose another place",
        )
