"""Progress on stderr: a bar with bytes/s, time left and memory on a terminal, else a line per 10 %."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

from .render import size


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


class Progress:
    """A context whose `update(done, total)` may be called from any thread."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._bar: Any = None
        self._task: Any = None
        self._decile = -1
        self._started = time.monotonic()

    def __enter__(self) -> Progress:
        return self

    def update(self, done: int, total: int) -> None:
        if self._quiet or not total:
            return
        if sys.stderr.isatty():
            self._draw(done, total)
            return
        decile = done * 10 // total
        if decile > self._decile:
            self._decile = decile
            rate = done / max(time.monotonic() - self._started, 1e-6)
            left = (total - done) / rate if rate else 0
            line = f"{decile * 10:3d} %  {size(done)} of {size(total)}  {size(rate)}/s  {left:.0f} s left  private memory {size(private_bytes())}"
            print(line, file=sys.stderr)  # noqa: T201

    def _draw(self, done: int, total: int) -> None:
        if self._bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
            from rich.progress import Progress as Bar

            self._bar = Bar(
                TextColumn("writing"),
                BarColumn(),
                DownloadColumn(),
                TransferSpeedColumn(),
                TimeRemainingColumn(),
                TextColumn("private {task.fields[memory]}"),
                console=Console(stderr=True),
                transient=True,
                refresh_per_second=4,
            )
            self._bar.start()
            self._task = self._bar.add_task("writing", total=total, memory=size(private_bytes()))
        self._bar.update(self._task, completed=done, memory=size(private_bytes()))

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()
