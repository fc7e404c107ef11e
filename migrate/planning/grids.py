"""What a plan makes of a checkpoint that was cut for a grid of processes, and what is asked of the
grid that is written.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from ..core.errors import MigrateError, fail, listed, option, plural, printable, together
from ..core.templates import names_rank
from ..rules import params as parameters
from ..source.blobs import replica_of
from ..source.by_part import PARTS
from ..source.grids import AskedGrid, WrittenGrid
from ..source.tree import is_state
from .graph import Tensor, ValueCheck
from .optimizers import DROP, OptimizerVerdict
from .request import OPTIMIZER_PARAM, Request
from .stored import view_of

if TYPE_CHECKING:
    from ..source.grids import PartGrid
    from ..source.index import Index
    from .compose import Composition
    from .path import MigrationPath

# the axis whose coordinates are in keys
RANKS = "TP"

_HELP = (
    "fetch the parts again: they are not of one iteration, or the ranks that wrote them drifted "
    "apart; one part alone can be read"
)
# of how many parts a note names the first
_NAMED = 3


class GridVerdict(NamedTuple):
    """What becomes of optimizer state, and notes."""

    optimizer: OptimizerVerdict | None
    notes: tuple[str, ...] = ()


def replica_checks(grid: PartGrid, composition: Composition | None = None) -> list[ValueCheck]:
    """The conditions that what stands in several parts is equal to the bit, but for what the rules
    of the composition leave out for good.
    """
    steps = composition.steps[:1] if composition is not None else ()
    gone = {key for _, bound in steps for key, rule in bound.dropped.items() if not rule.keeps}
    found = []
    for key, replicas in grid.replicas.items():
        if key in gone:
            continue
        tensors = tuple(
            Tensor(one.stored.spec, view_of(one.stored), (replica_of(key, number, *one),))
            for number, one in enumerate(replicas)
        )
        what = f"{printable(key)} is not the same in {plural(len(tensors), 'part')} that have it"
        way = _for_states() if is_state(key) else _HELP
        found.append(ValueCheck("equal", tensors, None, "M923", what, "", (key,), way))
    return found


def _for_states() -> str:
    way = together(option("params", "states=drop"), option("allow", DROP))
    return f"a rule can leave states of modules out, as those that ship do with {way}"


@contextmanager
def naming_part(grid: PartGrid) -> Iterator[None]:
    """What is wrong with one part alone says that it is one."""
    try:
        yield
    except MigrateError as error:
        if not grid.alone:
            raise
        note = f"{grid}; what is in the other parts is not here"
        raise type(error)(
            [replace(d, notes=(*d.notes, note)) for d in error.diagnostics]
        ) from error


def require_ranks(grid: PartGrid, path: MigrationPath) -> None:
    """M920 for the part of one rank alone where a rule that has to match takes a tensor of all
    ranks: it would take what one of them holds for the whole.
    """
    ranks = next((axis for axis in grid.axes if axis.name == RANKS and axis.size > 1), None)
    if not grid.alone or ranks is None or ranks.here is None:
        return
    for compiled, _ in path.steps[0].rules if path.steps else ():
        sides = compiled.targets if path.steps[0].backwards else compiled.sources
        if not compiled.rule.optional and any(names_rank(side) for side in sides.values()):
            fail(
                "M920",
                f"rule {compiled.rule.name!r} takes what all {ranks.size} tensor-parallel ranks "
                f"hold of a tensor, and this is one part alone, of rank {ranks.here}",
                spans=(compiled.loaded.span(*compiled.path),),
                notes=(str(grid),),
                help="pass the folder that holds all parts",
            )


def judge_grid(
    grid: PartGrid, request: Request, fresh: OptimizerVerdict | None, *, written: bool
) -> GridVerdict:
    """What a plan says of the grid that is read. `fresh` is what becomes of optimizer state among
    the tensors; without `written` no output has to hold what the source does.

    M402 and M410 for optimizer state that is in no output, unless leaving it out is allowed.
    """
    if written:
        fresh = _optimizers(grid, request, fresh)
    if grid.alone:
        return GridVerdict(fresh, (f"{grid}; the tensors of the other parts are not here",))
    if not grid.joined:
        return GridVerdict(fresh)
    notes = [f"{grid}: {plural(len(grid.parts), 'part')} joined"]
    if len(grid.parts) > 1:
        differs = "what differs between them beside the model (`args.rank`, random states)"
        notes.append(f"{differs} is kept by part at `{PARTS}`")
    return GridVerdict(fresh, tuple(notes))


def asked_grid(
    path: MigrationPath, request: Request, index: Index, keys: Collection[str], *, parts: bool
) -> AskedGrid | None:
    """What is said of the grid of an output with these tensors, None if it has none. `parts`: the
    output can have parts, by its format and as a folder.

    M115 for sizes of a grid that is not written, M112 and M114 as for other params.
    """
    goal = next((layout for layout in path.goals if layout.grid is not None), None)
    like = path.grid
    read = index.grid.again() if index.grid is not None else None
    if goal is None or goal.grid is None:
        # what keeps its keys keeps its places
        like = like or (read if index.tensors.keys() >= set(keys) else None)
        return AskedGrid(like.table, like=like) if parts and like is not None else None
    named = {**goal.grid.axes, **goal.grid.stages}
    params = {name: goal.params[name] for name in named.values()}
    given = {name: value for name, value in path.given.items() if name in params}
    if not parts:
        # the ranks of tensors are what rules made of them, in any format
        alone = [name for name in given if name != goal.grid.axes.get(RANKS)]
        if alone:
            said = listed(
                [option("params", f"{name}={printable(str(given[name]))}") for name in alone]
            )
            fail(
                "M115",
                f"{said}: the output is no folder of parts",
                help=f"write a folder, with {option('output_format', goal.format)}",
            )
        return None
    values = parameters.resolve(params, given)
    axes = {axis: values[name] for axis, name in goal.grid.axes.items() if name in values}
    stages = {what: values[name] for what, name in goal.grid.stages.items() if name in values}
    return AskedGrid(goal.grid.table, axes, stages, named, like or read)


def way_to_no_grid(path: MigrationPath, grid: WrittenGrid | None) -> list[str]:
    """A note on a grid that the path leads back to where none is written."""
    was = path.grid
    if was is None or grid is not None:
        return []
    return [f"the grid was {printable(str(was))}; all layers and experts stand together here"]


def _optimizers(
    grid: PartGrid, request: Request, fresh: OptimizerVerdict | None
) -> OptimizerVerdict | None:
    """What becomes of optimizer state that is not among the tensors, beside what is known of that
    which is. M410 unless somebody asked to leave it out, M402 unless that is allowed.
    """
    if not grid.optimizers:
        return fresh
    where = listed(list(grid.optimizers), _NAMED)
    drop = option("params", f"{OPTIMIZER_PARAM}={DROP}")
    if OPTIMIZER_PARAM not in request.params:
        fail(
            "M410",
            "the state of the optimizer would be left behind: it is of the parameters of each "
            f"part by number, and does not follow them: {where}",
            help="leave it out and begin with a new optimizer: "
            f"{together(drop, option('allow', DROP))}",
        )
    if DROP not in request.allow:
        fail(
            "M402",
            f"{drop} leaves out optimizer state: {where}",
            help=f"if that is wanted: {option('allow', DROP)}",
            permit=DROP,
        )
    known = fresh.notes if fresh is not None and fresh.became is not None else ()
    return OptimizerVerdict("dropped", (*known, f"optimizer state is left out: {where}"))
