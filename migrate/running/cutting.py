"""How an output is cut into files, and in which format it is written by default: one file
for each rank, called as before, or the parts of a grid, as its layout and the request have it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .. import formats
from ..core.errors import fail, listed, option, together
from ..planning.grids import RANKS, asked_grid, way_to_no_grid
from ..planning.optimizer_states import find_states
from ..planning.optimizers import DROP
from ..planning.request import OPTIMIZER_PARAM, WHOLE_TENSORS, Request
from ..source.root_values import ARGS, values_of
from ..source.shards import Naming, by_rank, naming
from .gathered_ranks import CutParts, OutputCut, called_in, called_parts
from .output_shapes import output_format_of

if TYPE_CHECKING:
    from ..core.spec import Spec
    from ..planning.path import MigrationPath
    from ..source.grids import WrittenGrid
    from ..source.index import Index, Source
    from .stamp import Stamp

# the format whose folders can be those of a grid
_PARTS = "torch"
# arguments of a run that say its format
_SAVED_AS, _DISTRIBUTED = "ckpt_format", "use_dist_ckpt"


def format_for(source: Source, request: Request, path: MigrationPath, folder: bool) -> str:
    """The name of the format of the output: what was asked for, else what the layout that is
    reached comes in, else the source's.
    """
    plain = output_format_of(source.format, request)
    if request.output_format is not None or request.recuts or not folder:
        return plain
    if path.grid is not None:
        return _PARTS
    goal = next((layout for layout in path.goals if layout.format), None)
    if goal is None or not (path.steps or path.given):
        return plain
    # what a downgrade leads back to was no grid, which the stamp would know
    return plain if request.backwards and goal.grid is not None else goal.format


def joins_ranks(request: Request, path: MigrationPath, source: Source) -> Request:
    """What is asked, with what the format asks for: where that holds whole tensors, and the source
    has those of ranks, the edge from the layout to itself joins them.
    """
    goal = next((layout for layout in path.goals if layout.grid is not None), None)
    ranks = None if goal is None or goal.grid is None else goal.grid.axes.get(RANKS)
    if (
        ranks is None
        or ranks in request.params
        or request.backwards
        or "@" not in "".join(source.index.tensors)
    ):
        return request
    return replace(request, params={**request.params, ranks: "1"})


def cut_for(
    source: Source,
    request: Request | None,
    path: MigrationPath,
    specs: Mapping[str, Spec],
    written: str,
    folder: bool,
    was: Naming | None,
    stamp: Stamp,
    notes: list[str],
) -> OutputCut:
    """How an output of these tensors is cut; without a request for no grid. `was` is how the files
    of the source's ranks are called. M115, M410, M929.
    """
    grid = None
    if request is not None:
        grid = grid_for(source, request, path, specs, written, folder)
        if grid is not None and path.grid is None and source.index.grid is None:
            grid = grid.like(stamp.grid)
        notes += way_to_no_grid(path, grid)
    if grid is not None:
        return OutputCut(grid, None, grid_parts(grid, specs, source.index))
    ranks = naming_for(was, specs, path, stamp) if folder else None
    if ranks is None or (count := len(by_rank(specs))) < 2:
        return OutputCut(None, ranks)
    return OutputCut(None, ranks, CutParts(called_parts(ranks, count)))


def grid_for(
    source: Source,
    request: Request,
    path: MigrationPath,
    specs: Mapping[str, Spec],
    written: str,
    folder: bool,
) -> WrittenGrid | None:
    """The grid that the output is cut for, None if it is for none. M115, M410, M929."""
    parts = written == _PARTS and folder and request.at in (None, "model")
    asked = asked_grid(path, request, source.index, specs.keys(), parts=parts)
    if asked is None or (request.backwards and asked.like is None and not asked.sizes):
        return None
    tree = source.index.tree
    if not asked.sizes and _is_nested(source.index):
        # parts hold flat dicts; the ranks of other ones are files, each called as it was
        return None
    root = tree.parts[0].root if tree and tree.parts else None
    made = formats.fit_grid(asked, specs, root)
    if not made.again and (states := find_states(source.index)):
        fail(
            "M410",
            "the state of the optimizer would be left behind: it is of the parameters of each part "
            f"of the grid that was read, by number: {listed([s.place for s in states], 4)}",
            help="leave it out and begin with a new optimizer: "
            + together(option("params", f"{OPTIMIZER_PARAM}={DROP}"), option("allow", DROP)),
        )
    return made


def grid_parts(grid: WrittenGrid, specs: Mapping[str, Spec], source: Index) -> CutParts:
    """The parts of a grid that is written; what they hold is changed unless it was read so, or is
    that of a grid before the one that was read.
    """
    read = source.grid.again() if source.grid is not None else None
    if grid.again and (read is None or read.sizes == grid.sizes):
        return CutParts(grid.parts)
    return CutParts(grid.parts, formats.roots_of_grid(grid, specs), grid.processes)


def values_for(
    source: Source, values: tuple[Any, Any] | None, written: str, grid: bool, cut: CutParts
) -> tuple[Any, Any] | None:
    """The values beside the model as they were and as an output in this format has them, be it a
    `grid` of parts, where `values` are those so far: arguments that say how a run is saved say how
    this one is. What a way back leads to is left as it was.
    """
    again = grid and cut.of_other is None and source.format != WHOLE_TENSORS
    tree = source.index.tree
    if not (grid or written == WHOLE_TENSORS) or again or (tree is None and values is None):
        return values
    here = None if tree is None else values_of(tree.parts[0])
    before, after = values or (here, here)
    if not after:
        return values
    made = formats.without_distributed(after) if grid else after
    args = made.get(ARGS)
    if isinstance(args, dict) and isinstance(args.get(_SAVED_AS), str):
        said: dict[str, Any] = {_SAVED_AS: _PARTS if grid else WHOLE_TENSORS}
        if type(args.get(_DISTRIBUTED)) is bool:
            said[_DISTRIBUTED] = not grid
        made = {**made, ARGS: {**args, **said}}
    return values if made == after else (before, made)


def cut_of(
    made: Index, opened: Source, path: MigrationPath, joined: WrittenGrid | None
) -> CutParts:
    """How an output was cut that was made of the source, whose parts were `joined` before."""
    source = opened.index
    grid = made.grid.again() if made.grid is not None else None
    read = source.grid.again() if source.grid is not None else None
    # of whole tensors parts are made without a step
    like = path.grid or read or joined
    wanted = like is not None or opened.format == WHOLE_TENSORS
    wanted = wanted or any(layout.grid is not None for layout in path.goals)
    if grid is None or not wanted or _is_nested(made):
        return CutParts(called_in(made))
    specs = {key: stored.spec for key, stored in made.tensors.items()}
    return grid_parts(grid.like(like), specs, source)


def _is_nested(index: Index) -> bool:
    """Whether rules work on dicts in dicts."""
    return index.tree is not None and any(part.nested_dicts for part in index.tree.parts)


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
