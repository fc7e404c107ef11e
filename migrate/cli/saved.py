"""Documents that a person asks to have saved: where they may lie, and what they may replace."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from ..core.errors import fail, printable


def check(output: str, kind: str, source: str, files: Sequence[str] = ()) -> None:
    """M115 for a place in the source, which is a folder or one of `files` beside it, for one
    without a folder to lie in, and for a file that is there and is no document of this `kind`."""
    place, shown = Path(os.path.realpath(output)), printable(output, 300)
    home = Path(os.path.realpath(source))
    beside = (
        {Path(os.path.realpath(home.parent / name)) for name in files}
        if not home.is_dir()
        else set()
    )
    if place == home or home in place.parents or place in beside:
        fail(
            "M115",
            f"the {kind} cannot be saved as {shown}, which lies in the source",
            help="choose a place outside the source",
        )
    if place.is_file() and not _holds(place, kind):
        fail(
            "M115",
            f"the {kind} cannot be saved as {shown}: that file exists and is not a {kind}",
            help="choose another place",
        )
    if place.is_dir() or not place.parent.is_dir():
        what = "it is a folder" if place.is_dir() else "the folder does not exist"
        fail("M115", f"cannot write the {kind} to {shown}: {what}", help="choose another place")


def write(output: str, kind: str, text: str) -> None:
    """Saves the text. M115 if it cannot be written."""
    try:
        Path(output).write_text(text, encoding="utf-8")
    except OSError as error:
        fail(
            "M115",
            f"cannot write the {kind} to {printable(output, 300)}: {error.strerror or error}",
            help="choose another place",
        )


def _holds(place: Path, kind: str) -> bool:
    """Whether a file is a document of ours of this kind. Looks at its start before it reads all of
    it.
    """
    try:
        with place.open("rb") as file:
            if not file.read(1).startswith(b"{") or f'"kind": "{kind}"'.encode() not in file.read(
                4096
            ):
                return False
        found = json.loads(place.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return (
        isinstance(found, dict)
        and found.get("kind") == kind
        and str(found.get("digest")).startswith("m1:")
    )
