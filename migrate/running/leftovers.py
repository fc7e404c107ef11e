"""Partial folders of runs over memory that ended early. No later run takes anything over from them:
what a process held cannot be told from what another one holds.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import stat
from pathlib import Path

from ..source.blobs import release
from .publish import JOURNAL, partial_folder

_LONGEST = 1 << 20
_SAFE = os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0) | os.O_NONBLOCK


def remove_leftover(out: Path) -> bool:
    """Removes what a run over memory has left beside `out`; whether nothing is there any more.

    Folders of runs over files (these can be resumed), of runs that still go on, and of other users
    stay.
    """
    folder = partial_folder(out)
    try:
        status = os.lstat(folder)
    except FileNotFoundError:
        return True
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        return False
    try:
        journal = os.open(folder / JOURNAL, _SAFE)
    except FileNotFoundError:
        # killed before it had one
        try:
            folder.rmdir()
        except OSError:
            return False
        return True
    except OSError:
        return False
    try:
        fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not stat.S_ISREG(os.fstat(journal).st_mode) or not _of_memory(journal):
            return False
        shutil.rmtree(folder, ignore_errors=True)
        return not os.path.lexists(folder)
    except OSError:
        return False
    finally:
        release(journal)


def _of_memory(journal: int) -> bool:
    """Whether a journal is that of a run over memory, or was never begun."""
    line, end, _ = os.pread(journal, _LONGEST, 0).partition(b"\n")
    if not end:
        return len(line) < _LONGEST
    try:
        head = json.loads(line)
    except ValueError:
        return False
    return isinstance(head, dict) and head.get("kind") == "journal" and head.get("source") is None
