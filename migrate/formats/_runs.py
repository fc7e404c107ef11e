"""Folders of training runs: which of the checkpoints in them is meant.

Megatron writes each checkpoint into a folder of its own, `iter_0000100` or `release`, and then the
number, or that word, into a tracker file beside these folders. The tracker is written last, so it
names the newest checkpoint that is whole. What it says is a claim like an index's: it may name one
of these folders and nothing else.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from ..core.errors import fail, listed, printable
from ..source.paths import Place, stays_behind
from ..source.shards import RANK_NAMES, in_natural_order
from ._megatron import FOLDER, RELEASE

TRACKER = "latest_checkpointed_iteration.txt"
# bytes; the largest number that is believed, and an end of line
MOST_TEXT = 20
_NUMBER = re.compile(r"[0-9]{1,18}", re.ASCII)


class Resolved(NamedTuple):
    """The place of the checkpoint that is meant, and what there is to say of the choice."""

    place: Place
    notes: tuple[str, ...] = ()


def resolve(place: Place) -> Resolved:
    """The newest checkpoint of a run folder, opened in the place of the folder, which is closed;
    any other place as it is.

    M906 for a tracker that names neither an iteration nor a release, M908 for one whose folder is
    not there, M907 where that is anything but a folder, M915 for several folders without a tracker.
    """
    if place.file is not None:
        return Resolved(place)
    there = in_natural_order(name for name in place.names if FOLDER.fullmatch(name))
    if TRACKER in place.names:
        chosen, said = _tracked(place, there), f"which {TRACKER} names"
    else:
        # weights in the folder itself are the checkpoint, whatever lies below
        own = any(stays_behind(n) or n.startswith(RANK_NAMES) for n in place.names)
        if own or not there:
            return Resolved(place)
        for name in there:
            place.folder.below(name).close()
        if len(there) > 1:
            fail(
                "M915",
                f"{place.folder.label('')}: holds {len(there)} checkpoints, and no {TRACKER} says "
                f"which is the last: {listed(there, 8)}",
                help="pass the folder of the one that you mean",
            )
        chosen, said = there[0], "the only one"
    folder = place.folder.below(chosen)
    place.close()
    note = f"of {listed(there, 12)} in the run folder, {chosen} is read: {said}"
    try:
        return Resolved(Place(folder.path, folder, None, tuple(folder.names()), place.at), (note,))
    except BaseException:
        folder.close()
        raise


def _tracked(place: Place, there: list[str]) -> str:
    """The folder that the tracker names."""
    label = place.folder.label(TRACKER)
    blob = place.folder.open(TRACKER)
    try:
        text = blob.read(0, min(blob.size, MOST_TEXT + 1)).decode("latin-1")
    finally:
        blob.close()
    word = text.strip()
    if len(text) > MOST_TEXT or not (word == RELEASE or _NUMBER.fullmatch(word)):
        fail(
            "M906",
            f"{label}: names neither an iteration nor a `{RELEASE}`: {printable(word, 40)}"
            + (" and more" if len(text) > MOST_TEXT else ""),
            help="pass the folder of the checkpoint that you mean",
        )
    name = word if word == RELEASE else f"iter_{int(word):07}"
    if name not in place.names:
        found = f"there is {listed(there, 8)}" if there else "there is no other checkpoint either"
        fail(
            "M908",
            f"{label}: names {name}, which is not there",
            notes=(found,),
            help="fetch it again, or pass the folder of another one",
        )
    return name


def tracker_of(folder: str) -> bytes:
    """The tracker file of a run whose newest checkpoint is called so."""
    return (folder if folder == RELEASE else str(int(folder.partition("_")[2]))).encode()
