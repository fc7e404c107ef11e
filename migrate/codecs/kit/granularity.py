"""What has a scale of its own, where the shapes of a weight and its scale say it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...core.errors import OpError
from ...core.spec import Spec


def granularity(
    name: str,
    specs: Mapping[str, Spec],
    said: Any,
    block: Sequence[int] | None,
    codec: str = "",
) -> str:
    """`stack` for one scale in all, `tensor` for one of each matrix of a stack, `channel` for one
    of each row, and where a `block` is known `block` for one of each.

    OpError M310 where shapes show none of these, unless something is `said` of it, which is looked
    at with the layout. `codec` is that of scales of blocks.
    """
    weight, scale = specs["weight"], specs["scale"]
    lead, rows = weight.shape[:-2], weight.shape[:-1]
    one, each = (lead, (*lead, 1), (*lead, 1, 1)), (rows, (*rows, 1))
    if scale.numel == 1:
        return "stack"
    if scale.shape in one:
        return "tensor"
    # numbers of fewer axes have no rows, which the layout says
    if scale.shape in each or said is not None or len(weight.shape) < 2:
        return "channel"
    sides = zip(weight.shape[-2:], block or (), strict=False)
    grid = (*lead, *(-(-length // step) for length, step in sides))
    if block and scale.shape == grid:
        return "block"
    spoken = [" or ".join(str(list(shape)) for shape in shapes) for shapes in (one, each)]
    blocks = f", or for blocks of {block[0]} x {block[1]} of {list(grid)}" if block else ""
    raise OpError(
        "M310",
        f"{name}: the scale is {list(scale.shape)}; numbers of {list(weight.shape)} have one of "
        f"{spoken[0]}, or for their rows of {spoken[1]}{blocks}",
        help="the scale belongs to another weight, or a side was cut or joined without it"
        + (f", or it has one for each block, as `{codec}`" if codec and not block else ""),
    )
