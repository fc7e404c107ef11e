"""The verb `stamp`: a checkpoint that no run made says in which layout it is."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from .. import formats
from ..core.errors import fail, option, printable
from ..core.out_of_memory import guarded
from ..core.types import PathLike
from ..extra_state.states import States
from ..planning.path import find_packs_of, lineages_asked_for
from ..planning.request import Request, make_request, path_text
from ..results import StampReport
from ..rules.lineage import LayoutFinding, Lineage, detect, resolve_goal
from ..running import stamp as stamps
from ..running.prepare import side_reader, stamp_of
from ..running.resources import read_options
from ..source.index import Source
from ..source.places import exists, is_folder, require_local

# the one permission that no other verb has
OTHER_LAYOUT = "other-layout"


@guarded
def stamp(
    path: PathLike,
    layout: str,
    out: PathLike | None = None,
    *,
    why: str | None = None,
    rules: PathLike | Iterable[PathLike] = (),
    allow: Iterable[str] = (),
    at: str | None = None,
) -> StampReport:
    """Say of a checkpoint without a stamp which layout it is in.

    To a folder `migrate.history.json` is added, and nothing else is touched. Of a single file a
    stamped copy is made. What the stamp says counts before detection from then on.

    Args:
        path: A checkpoint without a stamp.
        layout: The layout that it is in, as `LINEAGE@LAYOUT`.
        out: The stamped copy of a single file, which must not exist. Default: None, for a folder.
        why: The reason, kept in the stamp, for a layout whose signs the checkpoint lacks; with
            `allow={"other-layout"}` only. Default: None.
        rules: A folder of lineages that is searched first, or `pack:NAME` for an installed pack.
            Default: none.
        allow: Permissions: "other-layout", "links". Default: none.
        at: The dict of a nested checkpoint that rules work on, as a path such as
            `model.state_dict`. Default: found automatically.

    Returns:
        A `StampReport`: what the stamp says, and where it was written.

    Raises:
        MigrateError: M115 for wrong arguments, M501 and M507 for a layout or lineage that is not
            known, M524 where detection says otherwise, M904 where a stamp or `out` exists, M9xx
            where the checkpoint cannot be read.

    Example:
        >>> migrate.stamp("plain", "hf-mixtral@v4").layout
        'v4'
    """
    place = path_text("path", path)
    require_local(place)
    allowed = {allow} if isinstance(allow, str) else set(allow)
    others = allowed - {OTHER_LAYOUT}
    request = make_request((), (), rules, None, others, at=at)
    if (why is not None) != (OTHER_LAYOUT in allowed):
        fail(
            "M115",
            f"{option('allow', OTHER_LAYOUT)} and the reason belong together",
            help=f"{option('allow', OTHER_LAYOUT)} with {option('why', 'TEXT')}, or neither",
        )
    if why is not None and not (why.strip() and why.isprintable()):
        fail("M115", "the reason is one line of text", help=option("why", "TEXT"))
    with closing(formats.open(place, **request.opening)) as source:
        return _stamped(source, place, layout, out, why, request)


def _stamped(
    source: Source, place: str, text: str, out: PathLike | None, why: str | None, request: Request
) -> StampReport:
    packs = find_packs_of([str(p) for p in request.rules])
    lineages = lineages_asked_for(packs, replace(request, to=(text,)))
    goal = resolve_goal(text, lineages, {})
    lineage = lineages[goal.lineage]
    if source.history is not None:
        held, notes = stamp_of(source)
        fail(
            "M904",
            f"{printable(place, 300)} has a stamp already",
            notes=(*notes, *(f"it says {name}@{one}" for name, one in held.layouts.items())),
            help="what was applied to a checkpoint is never overwritten; a stamp that no longer "
            "fits its checkpoint can be moved away",
        )
    findings = detect(lineage, source.index, side_reader(source), states=States(source))
    found = {one.layout: one for one in findings}
    against = _against(lineage, goal.layout, found)
    if against and why is None:
        fail(
            "M524",
            f"{printable(place, 300)} does not look like {lineage.name}@{goal.layout}",
            notes=tuple(against[:8]),
            help=f"name the layout that it is in; or, if you know better: "
            f"{option('allow', OTHER_LAYOUT)} with {option('why', 'TEXT')}",
        )
    said = {"lineage": lineage.name, "layout": goal.layout}
    if against and why is not None:
        said["why"] = why
    folder, copy = is_folder(source.path), None if out is None else path_text("out", out)
    if folder and copy is not None:
        fail("M115", "the stamp of a folder is added to it", help=f"leave {option('out')} out")
    if not folder and copy is None:
        fail(
            "M115",
            f"{printable(place, 300)} is one file, and a stamp stands inside of it",
            help=f"say where the stamped copy goes: {option('out', 'COPY')}",
        )
    written = _added(source, said) if copy is None else _copied(place, copy, said, request)
    evidence = found[goal.layout].evidence
    return StampReport.of(
        path=copy or place,
        written=written,
        lineage=said["lineage"],
        layout=said["layout"],
        why=said.get("why"),
        evidence=list(evidence),
    )


def _against(lineage: Lineage, name: str, found: dict[str, LayoutFinding]) -> list[str]:
    """What speaks against the layout: signs of its own that do not hold, and others that do."""
    own = found[name]
    if own.holds:
        return []
    out = [f"{name}: {line}" for line in own.evidence if line.startswith("not: ")]
    out += [
        f"its signs are those of {o.layout}: {o.evidence[0]}" for o in found.values() if o.holds
    ]
    return [printable(line, 300) for line in out]


def _added(source: Source, said: dict[str, str]) -> str:
    """The stamp's file, added to the folder of the checkpoint."""
    text = stamps.write_stamp(
        stamps.NONE, {said["lineage"]: said["layout"]}, (), source.index.hash(), declared=said
    )
    path = Path(source.path) / stamps.NAME
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except FileExistsError:
        fail("M904", f"{printable(str(path), 300)} exists", help="move it away")
    except OSError as error:
        fail(
            "M115",
            f"cannot write {printable(str(path), 300)}: {error.strerror or error}",
            help="stamp a copy that can be written to",
        )
    return str(path)


def _copied(place: str, out: str, said: dict[str, str], request: Request) -> str:
    """A copy of a single file with the stamp in it."""
    from ..running.job import write_checkpoint

    if exists(out):
        fail("M904", f"{printable(out, 300)} exists", help="choose another place")
    with closing(formats.open(place, **request.opening)) as source:
        form = source.format
    write_checkpoint(
        lambda: formats.open(place, **request.opening),
        out,
        replace(request, output_format=form, declared=said, rules=()),
        read_options(),
    )
    return out
