"""Ends of the process that a lack of memory brings about, told as such.

A library that finds no memory may end the process itself: OpenBLAS calls `exit(1)`, which would
pass for the answer no, and C++ and Rust abort. Both are caught below Python where memory is
limited, and only there: it takes ctypes.
"""

from __future__ import annotations

import os
import sys
from typing import Any

STATUS = 4
_LINE = (
    b"error[M922]: a library ended the process, as libraries do that find no memory; nothing "
    b"was published\n"
)
_HELP = (
    b" = help: let the process have more (`ulimit -v`); a folder OUT.migrate-partial may be "
    b"left, which --resume goes on with\n"
)
# what C calls must not be collected
_kept: list[Any] = []


def out_of_memory(published: str | None) -> int:
    """Says that memory ran out, by the least means there are; the exit status. `published`: the
    output that is there already.
    """
    _say(
        b"error[M922]: there was no memory to go on; "
        + (
            b"nothing was published\n"
            if published is None
            else b"the output is published and whole\n"
        )
    )
    return STATUS


def watch() -> None:
    """Where memory is limited, makes an end by a library an exit with `STATUS`, with a message. The
    process must end by `os._exit`.
    """
    if not _limited():
        return
    try:
        import ctypes
        import signal

        libc = ctypes.CDLL(None)

        def end(_: int) -> None:
            _say(_LINE)
            os._exit(STATUS)

        told = ctypes.CFUNCTYPE(None, ctypes.c_int)(end)
        _kept.extend((libc, told))
        # called in reverse order: if there is no memory even for `told`, the status is right all
        # the same
        libc.__cxa_atexit(libc._exit, ctypes.c_void_p(STATUS), None)
        libc.__cxa_atexit(told, None, None)
        libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
        libc.signal.restype = ctypes.c_void_p
        libc.signal(signal.SIGABRT, ctypes.cast(told, ctypes.c_void_p))
    except (ImportError, OSError, AttributeError, MemoryError):
        return


def _say(line: bytes) -> None:
    try:
        sys.stderr.flush()
        os.write(2, line + _HELP)
    except (OSError, ValueError, AttributeError, MemoryError):
        pass


def _limited() -> bool:
    """Whether the system says no to memory; elsewhere it ends a process that takes too much."""
    try:
        import resource

        if any(
            resource.getrlimit(which)[0] != resource.RLIM_INFINITY
            for which in (resource.RLIMIT_AS, resource.RLIMIT_DATA)
        ):
            return True
        with open("/proc/sys/vm/overcommit_memory", "rb") as file:
            return file.read(1) == b"2"
    except (ImportError, OSError, MemoryError):
        return False
