"""Edges from a layout to itself, which change what `--set` says: how a checkpoint is cut, or which
of two spellings it has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..core.errors import fail, listed, option
from ..rules import params as parameters
from ..rules.arguments import PARAM
from ..rules.packs import load_edge
from .pathstate import PathStep
from .pipeline import Views
from .stored import untouched_key
from .tensor_params import Asked, presence_of, sizes_of

if TYPE_CHECKING:
    from ..rules.lineage import Lineage
    from ..source.blobs import StoredTensor
    from ..source.index import Index
    from .graph import Tensor
    from .request import Request


def loop_asked_for(lineage: Lineage, layout: str, request: Request, index: Index) -> bool | None:
    """False, forwards, where the layout has an edge to itself and the request gives one of its
    params another value than the checkpoint has; None otherwise.
    """
    edge = lineage.loop(layout)
    if edge is None:
        return None
    step = PathStep(lineage.name, layout, layout, backwards=False)
    asked = Asked(index.tensors, index.grid is not None and index.grid.alone)
    for file in load_edge(edge.files):
        declared = file.model.params
        for name in declared.keys() & request.params.keys():
            if not _has(step, declared, name, request.params[name], asked):
                return False
    return None


def refuse_idle(
    steps: Sequence[PathStep],
    given: Mapping[str, Any],
    outputs: Mapping[str, Tensor],
    tensors: Mapping[str, StoredTensor],
) -> None:
    """M115 where edges from a layout to itself leave all tensors as they are, and nothing else is
    asked of the grid that is written.
    """
    if any(not step.loops or step.backwards for step in steps):
        return
    declared = {name for step in steps for file in step.files for name in file.model.params}
    goals = [step.layouts[1] for step in steps if step.layouts is not None]
    sizes = {name for layout in goals if layout.grid for name in layout.grid.params}
    if (sizes - declared) & given.keys():
        return
    views = Views()
    if outputs.keys() == tensors.keys() and all(
        untouched_key(tensor, tensors, views) == key for key, tensor in outputs.items()
    ):
        asked = [name for name in given if name in declared]
        fail(
            "M115",
            f"{option('params')} {listed(asked)} would change nothing: the checkpoint is like that",
            help="say what else it shall be",
        )


def _has(
    step: PathStep,
    declared: Mapping[str, Any],
    name: str,
    given: Any,
    asked: Asked,
) -> bool:
    """Whether the param follows another one that tensors say, and is what they say."""
    param = declared[name]
    found = PARAM.fullmatch(param.follows[0]) if param.follows else None
    if found is None:
        return False
    there = declared[found[1]]
    said = [value for _, value in sizes_of(step, there.shape, asked)] if there.shape else []
    said += [value[found[1]] for _, value in presence_of(step, found[1], there, asked)]
    try:
        value = parameters.convert(given, param, is_text=True)
    except parameters.RefusedError:
        return False
    return bool(said) and all(one == value for one in said)
