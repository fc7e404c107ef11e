"""What a plan makes of a checkpoint that was cut for a grid of processes: what its run has to
compare, what no output holds, and what does not come back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..core.errors import fail, listed, option, plural, printable, together
from ..source.blobs import replica_of
from .graph import Tensor, ValueCheck
from .optimizers import DROP, OptimizerVerdict
from .request import OPTIMIZER_PARAM, Request
from .stored import view_of

if TYPE_CHECKING:
    from ..source.grids import Grid
    from .pathstate import PathStep

_HELP = (
    "fetch the parts again: they are not of one iteration, or the ranks that wrote them drifted "
    "apart; one part alone can be read"
)
# of how many parts a note names the first
_NAMED = 3


class GridVerdict(NamedTuple):
    """Notes for the plan, and what of the source does not come back."""

    notes: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()


def replica_checks(grid: Grid) -> list[ValueCheck]:
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


def judge_grid(grid: Grid, request: Request) -> GridVerdict:
    """What the plan says of the grid. M916 where parts hold tensors beside the model that are in no
    output, unless dropping is allowed.
    """
    if grid.alone:
        return GridVerdict((f"{grid}; the tensors of the other parts are not here",))
    if not grid.joined:
        return GridVerdict()
    notes = [f"{grid}: {plural(len(grid.parts), 'part')} joined"]
    lost = [f"the grid of {plural(len(grid.parts), 'part')}"]
    if len(grid.parts) > 1:
        notes.append(
            f"what stands beside the model, `args` among it, is that of {grid.parts[0]}, and "
            "describes the grid that was read"
        )
        lost.append("what the other parts hold beside the model")
    if grid.apart:
        if DROP not in request.allow:
            fail(
                "M916",
                f"{plural(len(grid.apart), 'tensor')} beside the model in parts that are joined "
                f"with others: {listed(list(grid.apart), _NAMED)}",
                help=f"{option('allow', DROP)} leaves them out",
                permit=DROP,
            )
        notes.append(
            f"dropped with their parts: {plural(len(grid.apart), 'tensor')} beside the model: "
            f"{listed(list(grid.apart), _NAMED)}"
        )
    return GridVerdict(tuple(notes), tuple(lost))


def settle_optimizers(
    grid: Grid, request: Request, fresh: OptimizerVerdict | None
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


def refuse_way_back(steps: Sequence[PathStep], request: Request) -> tuple[str, ...]:
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


def remembered(grid: Grid | None) -> dict[str, Any]:
    """What a stamp keeps of the grid that was read."""
    return {"grid": str(grid)} if grid is not None and grid.joined and not grid.alone else {}
