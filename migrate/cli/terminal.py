"""What a command shows a person: text that is safe to print, colours, progress, the log, and
standard streams that may be closed, full, or without a reader.

Renderers make plain text, in which names from a checkpoint cannot hold an escape sequence any more;
only what is here writes one. A log, a pipe or a golden transcript gets the text as it is.
"""

from __future__ import annotations

import errno
import io
import os
import re
import select
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, TextIO

import click

from ..core.errors import MigrateError, fail, printable
from ..core.log import NAME, TRACE

if TYPE_CHECKING:
    import logging


# longer than any name or note that is read
LIMIT = 4000
# what is not ASCII in the words of migrate itself
_FOREIGN = re.compile("[^→×·…–]+")


def safe(value: Any) -> Any:
    """A document with all its texts and field names made printable; empty text stays empty."""
    kind = type(value)
    # what a large document has most of, before classes that take longer to tell
    if kind is int or kind is bool or value is None:
        return value
    if kind is dict:
        return {safe(name): safe(item) for name, item in value.items()}
    if isinstance(value, str):
        return (
            value
            if value.isascii() and value.isprintable() and len(value) <= LIMIT
            else _escaped(value)
        )
    if isinstance(value, Mapping):
        return {safe(name): safe(item) for name, item in value.items()}
    return [safe(item) for item in value] if isinstance(value, (list, tuple)) else value


def _escaped(text: str) -> str:
    return _FOREIGN.sub(lambda m: printable(m[0], LIMIT), text[:LIMIT]) + (
        "…" if len(text) > LIMIT else ""
    )


def size(nbytes: float) -> str:
    """Bytes in decimal units: 16.06 GB."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(nbytes) < 1000 or unit == "TB":
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.2f} {unit}"
        nbytes /= 1000
    return ""


class Standard(io.FileIO):
    """A standard stream whose writes never fail: output is lost, `error` is the first reason."""

    error: OSError | None = None

    def write(self, data: Any, /) -> int:
        if self.error is None:
            try:
                written = super().write(data)
                if written is None:
                    # a pipe that another process made non-blocking is full
                    select.select([], [self], [])
                return written or 0
            except OSError as error:
                self.error = error
        return memoryview(data).nbytes


def install_streams() -> tuple[Standard, Standard]:
    """Puts such streams in the place of `sys.stdout` and `sys.stderr`.

    A descriptor that is closed becomes /dev/null: the next file to be opened would get its number
    otherwise, and with it whatever is printed.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    out, err = Standard(1, "w", closefd=False), Standard(2, "w", closefd=False)
    sys.stdout, sys.stderr = _text(out, sys.stdout, out.isatty()), _text(err, sys.stderr, True)
    return out, err


def _text(raw: Standard, before: Any, by_line: bool) -> io.TextIOWrapper:
    encoding = before.encoding if before is not None else "utf-8"
    errors = before.errors if before is not None else "backslashreplace"
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding, errors, line_buffering=by_line)


def loss(stream: Standard) -> OSError | None:
    """Why output was lost; None if none was, or if the reader left by itself, as `head` does."""
    return None if stream.error is None or stream.error.errno == errno.EPIPE else stream.error


_RED: Final = {"fg": "red", "bold": True}
_YELLOW: Final = {"fg": "yellow"}
_GREEN: Final = {"fg": "green"}
_BLUE: Final = {"fg": "blue", "bold": True}
_FAINT: Final = {"dim": True}

# what a line looks like, and how the group in it is drawn; the first that fits counts
_FORMS: Final = (
    (r"(error\[M\d+\]):", _RED),
    (r"((?:warning|advice|note)\[M\d+\]):", {"fg": "yellow", "bold": True}),
    (r" *(-->) \S", _BLUE),
    (r" *(= (?:note|help):)", _BLUE),
    (r" *\| *(\^+.*)", _RED),
    (r" *(\d* *\|)(?: |$)", _BLUE),
    (r"(?: |^)?((?:\+|<>|><|%|\*)) \S", _GREEN),
    (r" (-) \S", _RED),
    (r" (~) \S", _YELLOW),
    (r" *(\w+: exact)$", _GREEN),
    (r" *(\w+: not exact)$", _YELLOW),
    (r"(published|verified|equal)\b", _GREEN),
    (r"(not what|differs?\b|error:)", _RED),
    (r" *(loss \(\w+\)):", _YELLOW),
    (r" +(rule [^,]+, \S+:\d+)$", _FAINT),
    (r" *(note):", _YELLOW),
    (r"(next|saved):?", _FAINT),
)


def wants_colour(stream: TextIO) -> bool:
    """Whether to colour: on a terminal unless NO_COLOR, CLICOLOR=0, TERM=dumb; FORCE_COLOR: yes."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR") or os.environ.get("CLICOLOR_FORCE", "0") != "0":
        return True
    if os.environ.get("CLICOLOR") == "0" or os.environ.get("TERM") == "dumb":
        return False
    return stream.isatty()


def say(text: str, *, err: bool = False) -> None:
    """Writes a line to stdout, or with `err` to stderr, coloured where that is wanted."""
    coloured = wants_colour(sys.stderr if err else sys.stdout)
    click.echo(
        "\n".join(map(_painted, text.split("\n"))) if coloured else text, err=err, color=coloured
    )


@cache
def _forms() -> list[tuple[re.Pattern[str], dict[str, Any]]]:
    """Compiled when a terminal wants them: it takes longer than the import of all the rest here."""
    return [(re.compile(pattern), style) for pattern, style in _FORMS]


def _painted(line: str) -> str:
    for form, style in _forms():
        if found := form.match(line):
            start, end = found.span(1)
            return line[:start] + click.style(line[start:end], **style) + line[end:]
    return line


# seconds without a line in a log: what is done by then needs none
_PATIENCE = 2.0


def private_bytes() -> int:
    """RssAnon of this process and its children, and what they share, in bytes; 0 where /proc does
    not tell.
    """
    here, children = os.getpid(), []
    with suppress(OSError), open(f"/proc/{here}/task/{here}/children", encoding="ascii") as file:
        children = file.read().split()
    return _resident(here, ("RssAnon:", "RssShmem:")) + sum(
        _resident(int(child), ("RssAnon:",)) for child in children
    )


def _resident(process: int, names: tuple[str, ...]) -> int:
    with suppress(OSError), open(f"/proc/{process}/status", encoding="ascii") as status:
        return sum(int(line.split()[1]) * 1024 for line in status if line.startswith(names))
    return 0


def describe_memory() -> str:
    """The process's memory in words: private on Linux, the peak on macOS; "" where unknown."""
    if sys.platform == "darwin":
        import resource

        # bytes there, kilobytes on Linux
        return f"peak memory {size(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)}"
    private = private_bytes()
    return f"private memory {size(private)}" if private else ""


class Progress:
    """A context whose `update(done, total)` any thread may call. `verb` is, say, "writing"."""

    def __init__(self, verb: str, quiet: bool) -> None:
        self._verb, self._quiet = verb, quiet
        self._bar: Any = None
        self._task: Any = None
        self._tenths = 0
        self._started = time.monotonic()
        context = click.get_current_context(silent=True)
        # lines of a log would be drawn into the bar; asked once, because while a bar is drawn rich
        # stands in for stderr, and its older releases then answer that it is not a terminal
        log = context is not None and bool(context.params.get("verbosity"))
        self._terminal = sys.stderr.isatty() and not log

    def __enter__(self) -> Progress:
        return self

    def update(self, done: int, total: int) -> None:
        if self._quiet or not total:
            return
        if self._terminal:
            self._draw(done, total)
            return
        if time.monotonic() - self._started < _PATIENCE:
            return
        tenths = done * 10 // total
        if tenths > self._tenths:
            self._tenths = tenths
            rate = done / max(time.monotonic() - self._started, 1e-6)
            left = f"{(total - done) / rate:.0f} s left" if rate else "time left unknown"
            speed = ", ".join(word for word in (f"{size(rate)}/s", left, describe_memory()) if word)
            click.echo(
                f"{self._verb} {tenths * 10:3d} %  {size(done)} of {size(total)}  {speed}", err=True
            )

    def _draw(self, done: int, total: int) -> None:
        if self._bar is None:
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                DownloadColumn,
                TextColumn,
                TimeRemainingColumn,
                TransferSpeedColumn,
            )
            from rich.progress import Progress as Bar

            self._bar = Bar(
                TextColumn(self._verb),
                BarColumn(),
                DownloadColumn(),
                TransferSpeedColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[memory]}"),
                console=Console(stderr=True),
                transient=True,
                refresh_per_second=4,
            )
            try:
                self._bar.start()
            except (RuntimeError, MemoryError):
                # it wants a thread of its own
                self._quiet, self._bar = True, None
                return
            self._task = self._bar.add_task(self._verb, total=total, memory=describe_memory())
        self._bar.update(self._task, completed=done, memory=describe_memory())

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()


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

    from ..source import places

    for source in sources:
        if places.exists(source) and places.holds(source, file):
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
