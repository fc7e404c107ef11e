"""Progress on stderr: a bar with bytes/s, time left and memory on a terminal, else a line per 10 %
once a run takes longer than 2 s.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

import click

from .render import size

# seconds without a line in a log: what is done by then needs none
_PATIENCE = 2.0


def private_bytes() -> int:
    """RssAnon of this process in bytes; 0 where /proc does not tell."""
    try:
        with open("/proc/self/status", encoding="ascii") as status:
            for line in status:
                if line.startswith("RssAnon:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def memory() -> str:
    """How much memory this process has, in words: private on Linux, on macOS the most that was
    resident; "" where nothing tells.
    """
    if sys.platform == "darwin":
        import resource

        # bytes there, kilobytes on Linux
        return f"peak memory {size(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)}"
    private = private_bytes()
    return f"private memory {size(private)}" if private else ""


class Progress:
    """A context whose `update(done, total)` may be called from any thread. `verb` says what is
    going on: "writing".
    """

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
            speed = ", ".join(word for word in (f"{size(rate)}/s", left, memory()) if word)
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
            self._task = self._bar.add_task(self._verb, total=total, memory=memory())
        self._bar.update(self._task, completed=done, memory=memory())

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
