"""Small file systems, to be filled by a test of its own."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted(place: Path, size: str, *, lazily: bool = False) -> Iterator[Path]:
    """A file system of `size`, such as `12m`, at a new folder; the test is skipped where it cannot
    be mounted. `lazily`: it goes away even if something there is still open, which is else an
    error.
    """
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
    try:
        made = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        pytest.skip(f"there is no mount command: {error}")
    if made.returncode:
        pytest.skip(f"a tmpfs cannot be mounted: {made.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", *(["-l"] if lazily else []), str(place)], check=True)
