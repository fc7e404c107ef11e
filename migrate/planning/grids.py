"""What a plan makes of a checkpoint that was cut for a grid of processes: what its run has to
compare, what no output holds, and what does not come back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from ..core.errors import fail, listed, option, plural, printable, together
from ..source.blobs import replica_of
from ..source.by_part import PARTS
from .graph import Tensor, ValueCheck
from .optimizers import DROP, OptimizerVerdict
from .request import OPTIMIZER_PARAM, Request
from .stored import view_of

if TYPE_CHECKING:
    from ..source.grids import PartGrid
    from .pathstate import PathStep

_HELP = (
    "fetch the parts again: they are not of one iteration, or the ranks that wrote them drifted "
    "apart; one part alone can be read"
)
# of how many parts a note names the first
_NAMED = 3


class GridVerdict(NamedTuple):
    """What becomes of optimizer state, notes, what of the source does not come back, and what a
    stamp keeps of the grid that was read.
    """

    optimizer: OptimizerVerdict | None
    notes: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    remembered: str = ""


def replica_checks(grid: PartGrid) -> list[ValueCheck]:
    """The conditions that what stands in several parts is equal to the bit."""
    found = []
    for key, replicas in grid.replicas.items():
        tensors = tuple(
            Tensor(one.stored.spec, view_of(one.stored), (replica_of(key, number, *one),))
            for number, one in enumerate(replicas)
        )
        what = f"{printable(key)} is not the same in {plural(len(tensors), 'part')} that have it"
        found.append(ValueCheck("equal", tensors, None, "M923", what, "", (key,), _HELP))
    return found


def judge_grid(
    grid: PartGrid | None,
    steps: Sequence[PathStep],
    request: Request,
    fresh: OptimizerVerdict | None,
    *,
    written: bool,
) -> GridVerdict:
    """What a plan says of the grid that is read, None without one, and of one that the steps lead
    back to. `fresh` is what becomes of optimizer state among the tensors; without `written` no
    output has to hold what the source does.

    M402 and M410 for optimizer state that is in no output, M925 for a way back to a grid: each
    unless leaving it out is allowed.
    """
    back = _way_back(steps, request)
    if grid is None:
        return GridVerdict(fresh, back)
    if written:
        fresh = _optimizers(grid, request, fresh)
    if grid.alone:
        notes = (f"{grid}; the tensors of the other parts are not here", *back)
        return GridVerdict(fresh, notes)
    if not grid.joined:
        return GridVerdict(fresh, back)
    notes = (f"{grid}: {plural(len(grid.parts), 'part')} joined", *back)
    lost: tuple[str, ...] = (f"the grid of {plural(len(grid.parts), 'part')}",)
    if len(grid.parts) > 1:
        differs = "what differs between them beside the model (`args.rank`, random states)"
        notes += (f"{differs} is kept by part at `{PARTS}`",)
    return GridVerdict(fresh, notes, lost, str(grid))


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


def _way_back(steps: Sequence[PathStep], request: Request) -> tuple[str, ...]:
    """A note on grids that the steps lead back to; M925 unless it is allowed to leave them out."""
    grids = [said for step in steps if step.backwards and (said := step.memory.get("grid"))]
    if grids and DROP not in request.allow:
        fail(
            "M925",
            f"the way back leads to a grid, {printable(grids[-1])}, and its parts are not written",
            help=f"{option('allow', DROP)} writes one file for each tensor-parallel rank, with all "
            "layers and experts",
            permit=DROP,
        )
    return tuple(f"all layers and experts in one part: {printable(said)}" for said in grids)
