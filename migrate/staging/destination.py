"""Where a job writes: a path of this machine, or the URL of a store."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..core.errors import fail, option, printable
from ..core.types import PathLike
from ..planning.request import path_text
from ..running.leftovers import remove_leftover
from ..running.publish import check_place, partial_folder
from ..source.places import output_in_store


@dataclass(frozen=True, slots=True)
class Destination:
    """A place as a run takes it (`given`), as messages call it (`shown`), and the last part of its
    name. `stored`: it is in a store.
    """

    given: str
    shown: str
    name: str
    stored: bool

    def remove_leftover(self) -> bool:
        """Removes what a run over memory has left there; whether nothing is there any more. Into a
        store such a run removes what it wrote by itself.
        """
        return self.stored or remove_leftover(Path(self.given))


def find_destination(path: PathLike, source: str, apart: bool) -> Destination:
    """The place that a caller names, which is free. QuestionError M904, M911; M115 for the Hub, and
    where it is to be written by another process (`apart`) that does not see it.
    """
    text = path_text("path", path)
    stored = output_in_store(text)
    if stored is None:
        out = os.path.abspath(text)
        # as dcp.save does: the first save of a training finds no folder for its steps
        with suppress(OSError):
            os.makedirs(os.path.dirname(out), exist_ok=True)
        check_place(Path(out), source)
        found = Destination(out, out, os.path.basename(out), False)
        if not found.remove_leftover():
            fail(
                "M911",
                f"{printable(str(partial_folder(Path(out))))} was left by an earlier run, or "
                "belongs to one that goes on",
                help="let it finish, or remove that folder",
            )
        return found
    from ..running.store_run import check_store_place

    check_store_place(stored, source, resume=False)
    if stored.kind == "s3":
        from ..running.store_journal import refuse_left

        if stored.read_journal() is not None:
            refuse_left(stored)
    else:
        if apart and stored.in_process:
            fail(
                "M115",
                f"{printable(stored.location, 240)}: is in the memory of this process, and another "
                "one writes",
                help=f"use a Stager without {option('process', True)}",
            )
        from ..running.stream_run import require_nothing_left

        require_nothing_left(stored)
    return Destination(text, stored.location, stored.name, True)
