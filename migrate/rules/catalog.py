"""What there is to know without a checkpoint: the schemas, the packs, and what codes and ops mean.
`migrate.api` offers these as verbs.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..core.types import FORMAT_VERSION, PathLike

_HEAD = {"format_version": FORMAT_VERSION}


def explain(word: str | None = None) -> dict[str, Any]:
    """What a code (`M207` or `incomplete-group`), an op or a codec means; without a word, all of
    them. M115 for an unknown one.
    """
    from . import reference

    return {
        **_HEAD,
        "kind": "explanation",
        "topics": reference.topics() if word is None else [reference.explain(word)],
    }


def packs(rules: Iterable[PathLike] = ()) -> dict[str, Any]:
    """Where rules are looked for, in order, with each place's lineages; M507 where no folder is."""
    from .packs import find_packs

    folders = [Path(rule) for rule in rules]
    first = [pack for folder in folders for pack in find_packs(folder).local[:1]]
    beside = [pack for pack in find_packs().all if all(pack.folder != own.folder for own in first)]
    every = (*first, *beside)
    out = [
        {
            "name": pack.name,
            "origin": pack.origin,
            "version": pack.version,
            "folder": None if pack.folder is None else str(pack.folder),
            "error": pack.error,
            "lineages": list(pack.lineages),
        }
        for pack in every
    ]
    warnings = [lost.to_json() for pack in every if (lost := pack.astray()) is not None]
    return {**_HEAD, "kind": "packs", "packs": out, "warnings": warnings}


def schema(
    name: str | None = None, *, folder: PathLike | None = None, write: bool = False
) -> dict[str, Any]:
    """Which schemas there are; with a folder, whether its files are what the models give, or, with
    `write`, make them so.

    `name` limits it to one; M115 if there is none of this name, or if the folder cannot be written.
    """
    from ..core.errors import did_you_mean, fail, listed, printable
    from . import schema as made

    known = made.schemas()
    if name is not None and name not in known:
        fail(
            "M115",
            f"there is no schema `{printable(name)}`",
            help=did_you_mean(name, list(known)) or f"there are {listed(list(known))}",
        )
    names = list(known) if name is None else [name]
    states: dict[str, str | None] = dict.fromkeys((f"{n}{made.SUFFIX}" for n in names), None)
    if folder is not None:
        place = Path(folder)
        wrong = {
            file: state for file, state in made.differences(place) if name is None or file in states
        }
        written: list[Path] = []
        if write:
            try:
                written = made.write(place, names)
            except OSError as error:
                fail(
                    "M115",
                    f"cannot write to {printable(str(place))}: {error.strerror or error}",
                    help="choose another folder",
                )
        states = {
            **dict.fromkeys(states, "current"),
            **wrong,
            **{path.name: "written" for path in written},
        }
    out = []
    for file, state in states.items():
        own = file.removesuffix(made.SUFFIX)
        out.append(
            {
                "name": own,
                "file": file,
                "title": known[own]()["title"] if own in known else "",
                "state": state,
            }
        )
    current = (
        None
        if folder is None
        else all(state in ("current", "written") for state in states.values())
    )
    return {
        **_HEAD,
        "kind": "schemas",
        "folder": None if folder is None else str(folder),
        "current": current,
        "schemas": out,
    }
