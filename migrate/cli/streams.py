"""stdout and stderr that may be closed, full, or without a reader: the command goes on, and its
exit status says what it did.
"""

from __future__ import annotations

import errno
import io
import os
import select
import sys
from typing import Any


class Standard(io.FileIO):
    """One of the standard streams. A write never fails: what cannot be written is lost, and `error`
    is the first reason.
    """

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


def install() -> tuple[Standard, Standard]:
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
    """Why output was lost; None if none was, and where the reader has left by itself, as `head`
    does.
    """
    return None if stream.error is None or stream.error.errno == errno.EPIPE else stream.error
