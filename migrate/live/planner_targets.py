"""What a planner of `dcp.load` asks for: boxes of tensors, and the targets they are read into."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..core.errors import Report, fail, printable
from ..core.spec import PACKED, Spec
from ..core.templates import list_collapsed
from ..elements.numbers import holds
from ..elements.raw import is_dtensor
from ..source.target import torch_form
from . import module as modules

if TYPE_CHECKING:
    import torch
    from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem


def elements_of(item: ReadItem, spec: Spec) -> tuple[tuple[int, int], ...]:
    """The box that an item reads, in elements; torch counts pairs of 4 bits."""
    box = tuple(
        (first, first + size)
        for first, size in zip(item.storage_offsets, item.lengths, strict=True)
    )
    if torch_form(spec)[0] == PACKED and box:
        return (*box[:-1], (2 * box[-1][0], 2 * box[-1][1]))
    return box


def local_target(found: Any) -> torch.Tensor:
    """What a planner answers with, without history, and of a DTensor the part that is here."""
    target = getattr(found, "_local_tensor", found).detach()
    made: torch.Tensor = target
    return made


def require_no_summands(items: Iterable[ReadItem], planner: LoadPlanner) -> None:
    """M960 for targets of which the ranks hold summands. torch refuses them while it plans, but
    not yet in 2.8, which gives each rank the whole value.
    """
    state: Mapping[str, Any] = getattr(planner, "state_dict", {})
    found = {key: state[key] for key in (item.dest_index.fqn for item in items) if key in state}
    summed = [
        key
        for key, held in found.items()
        if is_dtensor(held) and any(p.is_partial() for p in held.placements)
    ]
    if summed:
        fail(
            "M960",
            f"ranks hold summands (Partial), and no parts, of {list_collapsed(summed, 8)}",
            help="shard or replicate them, and sum what is loaded",
        )


def check_targets(
    wanted: Sequence[tuple[ReadItem, torch.Tensor, Spec]], rounding: bool, allow: Collection[str]
) -> None:
    """M960 for targets of another shape than the box; unless they may be `rounding`, M961 for those
    that would round. `wanted` has each item, its target and what the tensor is.
    """
    report, losses = Report(), dict[str, list[str]]()
    for item, target, made in wanted:
        key = item.storage_index.fqn
        if tuple(target.shape) != tuple(item.lengths):
            report.add(
                "M960",
                f"the target of {printable(key)} has the shape {list(target.shape)}, the box "
                f"that is read for it {list(item.lengths)}",
                help="load with a planner whose `resolve_tensor` answers with the part that "
                "the item names",
            )
        there = modules.spec_of(target)
        if torch_form(made)[0] == PACKED and (there is None or there.dtype != made.dtype):
            report.add(
                "M960",
                f"torch cannot convert {made.dtype}, and the target of {printable(key)} has "
                f"{target.dtype}",
                help="load it as it is, or dequantize it by rules",
            )
        dtype = "?" if there is None else there.dtype
        if not rounding and not (there is not None and holds(dtype, made.dtype)):
            losses.setdefault(f"{made.dtype} -> {dtype}", []).append(key)
    if losses and "lossy" not in allow:
        report.add(
            "M961",
            "the dtypes of the state dict cannot hold all values of the migrated checkpoint's",
            notes=tuple(
                f"{how}: {list_collapsed(list(dict.fromkeys(keys)), 8)}"
                for how, keys in losses.items()
            ),
            help='allow={"lossy"}, or build the model in the dtype of the checkpoint',
            permit="lossy",
        )
    report.check()
