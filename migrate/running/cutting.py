"""How an output is cut into files, and in which format it is written where nobody says it: one file
for each rank, called as before, or the parts of a grid, as its layout and the request have it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from .. import formats
from ..planning.grids import asked_grid, remembered
from ..planning.request import Request, output_format_of
from ..source.shards import Naming, by_rank, naming

if TYPE_CHECKING:
    from ..core.spec import Spec
    from ..planning.path import MigrationPath
    from ..source.grids import WrittenGrid
    from ..source.index import Source
    from .stamp import Stamp

# the format whose folders can be those of a grid
_PARTS = "torch"


def format_for(source: Source, request: Request, path: MigrationPath, folder: bool) -> str:
    """The name of the format of the output: what was asked for, else what the layout that is
    reached comes in, else the source's.
    """
    plain = output_format_of(source.format, request)
    goal = next((layout for layout in path.goals if layout.format), None)
    if request.output_format is not None or goal is None or not folder:
        return plain
    if not path.steps and not path.given:
        return plain
    # what a downgrade leads back to was no grid, unless the stamp knows of one
    back = request.backwards and goal.grid is not None and remembered(path) is None
    return plain if back else goal.format


def grid_for(
    source: Source,
    request: Request,
    path: MigrationPath,
    specs: Mapping[str, Spec],
    written: str,
    folder: bool,
) -> WrittenGrid | None:
    """The grid that the output is cut for, None if it is for none. M115, M929."""
    parts = written == _PARTS and folder and request.at in (None, "model")
    back = request.backwards and path.steps and remembered(path) is None
    asked = asked_grid(path, request, source.index, specs.keys(), parts=parts)
    if asked is None or (back and asked.like is None and not asked.sizes):
        return None
    tree = source.index.tree
    return formats.fit_grid(asked, specs, tree.parts[0].root if tree and tree.parts else None)


def naming_for(
    was: Naming | None, specs: Mapping[str, Spec], path: MigrationPath, stamp: Stamp
) -> Naming | None:
    """How the files of ranks are called: as they were before the edge that is undone, else as the
    source's, else as a stamp says.

    None where the output has a single rank and nothing was called by its rank before: then it is a
    checkpoint like others.
    """
    ranks = path.steps[-1].memory.get("ranks") if path.steps else None
    if ranks and (before := naming([ranks])):
        return before
    ranked = [key for key in specs if "@" in key]
    if not ranked or len(by_rank(ranked)) < 2:
        return None
    return (
        was
        or next((naming([e["ranks"]]) for e in reversed(stamp.applied) if "ranks" in e), None)
        or Naming()
    )
