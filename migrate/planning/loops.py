"""Edges from a layout to itself, which change what `--set` says: how a checkpoint is cut, or which
of two spellings it has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..rules import params as parameters
from ..rules.arguments import PARAM
from ..rules.packs import load_edge
from .pathstate import PathStep
from .tensor_params import Asked, presence_of, sizes_of

if TYPE_CHECKING:
    from ..rules.lineage import Lineage
    from ..source.blobs import StoredTensor
    from .request import Request


def loop_asked_for(
    lineage: Lineage, layout: str, request: Request, tensors: Mapping[str, StoredTensor]
) -> bool | None:
    """False, forwards, where the layout has an edge to itself and the request gives one of its
    params another value than the checkpoint has; None otherwise.
    """
    edge = lineage.loop(layout)
    if edge is None:
        return None
    step = PathStep(lineage.name, layout, layout, backwards=False)
    asked = Asked(tensors)
    for file in load_edge(edge.files):
        declared = file.model.params
        for name in declared.keys() & request.params.keys():
            if not _has(step, declared, name, request.params[name], asked):
                return False
    return None


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
