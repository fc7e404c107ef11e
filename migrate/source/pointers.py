"""Pointers of Git LFS: the small text files that stand where a clone without `git lfs` has no
weights.

The form is that of the Git LFS specification (docs/spec.md there): less than 1024 bytes, `version`
in the first line, then `oid` and `size`, in the order of their names.
"""

from __future__ import annotations

import os
import re
from typing import Final

from .blobs import release

LARGEST: Final = 1024
_POINTER: Final = re.compile(
    rb"version https://(?:git-lfs\.github\.com|hawser\.github\.com)/spec/v1\r?\n(?:[a-z0-9.-]+ "
    rb"[^\n]*\n)*size ([0-9]{1,18})\r?\n?"
)


def read(descriptor: int) -> int | None:
    """The size in bytes of the file that the open file is a pointer to, None if it is no
    pointer.
    """
    head = os.pread(descriptor, LARGEST, 0)
    found = _POINTER.match(head) if head.startswith(b"version https://") else None
    return int(found[1]) if found else None


def is_one(name: str, folder: int) -> bool:
    """Whether a regular file in the folder, which is given by its descriptor, is a pointer."""
    try:
        descriptor = os.open(
            name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW, dir_fd=folder
        )
    except OSError:
        return False
    try:
        return os.fstat(descriptor).st_size < LARGEST and read(descriptor) is not None
    except OSError:
        return False
    finally:
        release(descriptor)
