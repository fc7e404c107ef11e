"""The arguments of a training run of Megatron, as those of a part of another grid."""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd
from typing import Any, NamedTuple

from ..source.grids import WrittenGrid
from ..source.pickle.tree import DictNode
from . import _megatron

# what one axis alone is said by beside its size
_SAME_AS_PP = "transformer_pipeline_model_parallel_size"
_LAYERS_PER_STAGE = "num_layers_per_virtual_pipeline_stage"
_VIRTUAL_PER_RANK = "num_virtual_stages_per_pipeline_rank"
# ranks of one stage behind each other, and not those of one data-parallel replica
_STAGES_BEFORE_DATA = "use_tp_pp_dp_mapping"


class GridOfArgs(NamedTuple):
    """A grid as arguments say it: `sizes` by axis, `layers` of the whole model, and how stages are
    uneven: the layers of the `first` and the `last` one, or the `layout` of all as text. `rows` are
    those of the padded embedding; None where they stay.
    """

    sizes: Mapping[str, int]
    layers: int
    first: int | None = None
    last: int | None = None
    layout: str | None = None
    rows: int | None = None

    @classmethod
    def of(cls, grid: WrittenGrid, rows: int | None = None) -> GridOfArgs:
        """Those of a grid that is written: of all that says its stages, the shortest."""
        stages, virtual = grid.sizes["PP"], grid.sizes["VPP"]
        layers, count = [list(row) for row in grid.layers], sum(map(sum, grid.layers))
        first, last = (sum(row[at] for row in layers) for at in (0, -1))
        text = "|".join("t" * n for row in layers for n in row)
        ways: list[tuple[int | None, int | None, str | None]] = [
            (None, None, None), (first, None, None), (None, last, None), (first, last, None),
            (None, None, f"E{text}L"),
        ]  # fmt: skip
        for way in ways:
            said = _megatron.facts_that_say(count, *way)
            if stages == 1 or _megatron.spread(said, stages, virtual) == layers:
                break
        return cls(grid.sizes, count, *way, rows)


def args_for(args: DictNode, grid: GridOfArgs, tensor: int, stage: int, group: int) -> DictNode:
    """The arguments as the part of a grid has them that is at these coordinates.

    Fields keep their places. One that the run's script does not know is added only where it says
    what nothing else does. How many processes the run had beyond those of the grid is not known any
    more: as few as its parts need. On which machine a part was, neither: `local_rank` is None.
    """
    said = dict(args.pairs)
    changed = _of_grid(grid) | _of_process(said, grid, tensor, stage, group)
    if grid.rows is not None:
        changed["padded_vocab_size"] = grid.rows
    if grid.sizes.get("TP", 1) == 1:
        changed["sequence_parallel"] = False
    pairs = [(key, changed.pop(key, value)) for key, value in args.pairs]
    pairs += [(key, value) for key, value in changed.items() if key in _SAID and value is not None]
    return DictNode(args.kind, tuple(pairs), args.node, args.attributes)


# what is added where the run's script did not say it
_SAID = frozenset(
    {*_megatron.SIZES.values(), _megatron.FIRST[0], _megatron.LAST[0], _megatron.LAYOUT}
)


def _of_grid(grid: GridOfArgs) -> dict[str, Any]:
    tp, pp, vpp, ep = (grid.sizes.get(axis, 1) for axis in _megatron.SIZES)
    uneven = (grid.first, grid.last, grid.layout)
    even = uneven == (None, None, None) and grid.layers % (pp * vpp) == 0
    virtual = vpp if vpp > 1 else None
    found: dict[str, Any] = dict(zip(_megatron.SIZES.values(), (tp, pp, virtual, ep), strict=True))
    found[_megatron.EXPERT_TENSOR] = tp
    found[_SAME_AS_PP] = pp
    found[_LAYERS_PER_STAGE] = grid.layers // (pp * vpp) if virtual and even else None
    found[_VIRTUAL_PER_RANK] = virtual if not even and grid.layout is None else None
    for names, layers in ((_megatron.FIRST, grid.first), (_megatron.LAST, grid.last)):
        found.update(dict.fromkeys(names, layers))
    found[_megatron.LAYOUT] = grid.layout
    found.update(dict.fromkeys((_megatron.WITH_EMBEDDING, _megatron.WITH_LOSS), False))
    return found


def _of_process(
    said: Mapping[Any, Any], grid: GridOfArgs, tensor: int, stage: int, group: int
) -> dict[str, Any]:
    """The place of the process that writes a part, in the order in which Megatron counts them."""
    tp, pp, _, ep = (grid.sizes.get(axis, 1) for axis in _megatron.SIZES)
    context = said.get("context_parallel_size")
    context = context if type(context) is int and context > 0 else 1
    data = ep // gcd(ep, context)
    # a replica has ranks of all expert groups
    replicas = context * data
    rank = tensor + tp * (group + replicas * stage)
    if said.get(_STAGES_BEFORE_DATA) is True:
        rank = tensor + tp * (stage + pp * group)
    return {
        "rank": rank,
        "local_rank": None,
        "world_size": tp * pp * replicas,
        "data_parallel_size": data,
    }
