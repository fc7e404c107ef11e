"""The tensors of a live module that are to be filled: those that it has, and those that the meta
device only promises.

A tensor on the meta device gets memory when its turn comes and goes into the module when all is
filled, under all names that the one it replaces had. So a load that fails leaves such a module as
it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ..core.errors import Report, listed
from ..core.spec import Spec
from ..core.view import region
from ..elements.raw import is_dtensor
from ..planning.graph import Tensor

if TYPE_CHECKING:
    import torch

    from .module import Slot


class Targets:
    """What a load writes to. Call sequence: `shaped`, `unfilled`, `check`; `open` for each slot;
    `install` when all is filled.
    """

    def __init__(self, module: torch.nn.Module, device: Any) -> None:
        """`device` is where tensors of the meta device are made; None: where the others are, else
        the CPU.
        """
        import torch

        self._module, self._asked = module, device
        self._made: dict[int, torch.Tensor] = {}
        self._here = {one.device for _, _, one in _tensors(module) if not one.is_meta}
        chosen = next(iter(self._here)) if len(self._here) == 1 else torch.device("cpu")
        self.device: torch.device = chosen if device is None else device

    def shaped(self, slots: Mapping[str, Slot], specs: Mapping[str, Spec]) -> dict[str, Slot]:
        """The slots with the shape of the output for each lazy parameter, which takes any."""
        import torch

        out = dict(slots)
        for key, slot in slots.items():
            made = specs.get(slot.plain)
            if (
                made is not None
                and slot.tensor is not None
                and torch.nn.parameter.is_lazy(slot.tensor)
            ):
                out[key] = slot._replace(
                    tensor=torch.empty(made.shape, dtype=slot.tensor.dtype, device="meta")
                )
        return out

    def unfilled(self) -> list[str]:
        """Tensors on the meta device that are in no state dict."""
        import torch

        kept = {
            id(one)
            for owner, name, one in _tensors(self._module)
            if name not in owner._non_persistent_buffers_set
        }
        return [
            name
            for name, one in self._module.named_buffers()
            if one.is_meta and id(one) not in kept and not torch.nn.parameter.is_lazy(one)
        ]

    def check(self, report: Report) -> None:
        """Adds M115 if `device` was named and the module has tensors elsewhere."""
        asked = self._asked
        other = [
            d
            for d in self._here
            if asked is not None and (d.type != asked.type or asked.index not in (None, d.index))
        ]
        if other:
            what = f"the module is on {listed([str(d) for d in other])}, and `device` says {asked}"
            report.add(
                "M115", what, help="leave `device` out: the tensors of a module stay where they are"
            )
        hollow = [
            name
            for name, one in self._module.named_parameters()
            if not one.is_meta and any(t.is_meta for t in _inner(one))
        ]
        if hollow:
            what = (
                f"{listed(hollow)} say that they are on a real device, and keep their numbers "
                "in tensors on the meta device"
            )
            report.add(
                "M963",
                what,
                help="build the module on a real device: their class would take what is loaded "
                "and hold nothing",
            )

    def open(self, slot: Slot) -> torch.Tensor:
        """The tensor that is written for the slot: its own, or the one that will stand in its
        place.
        """
        import torch

        held: Any = slot.tensor
        if torch.nn.parameter.is_lazy(held) or not held.is_meta:
            return held
        if id(held) not in self._made:
            self._made[id(held)] = _like(held, self.device)
        return self._made[id(held)]

    def materialise(self, slot: Slot, shape: tuple[int, ...]) -> None:
        """Gives a lazy parameter its shape."""
        import torch

        if torch.nn.parameter.is_lazy(slot.tensor):
            slot.tensor.materialize(shape, device=self.device if slot.tensor.is_meta else None)

    def changes(self, slot: Slot) -> bool:
        """Whether writing to the slot changes the module at once."""
        return id(slot.tensor) not in self._made

    def install(self) -> None:
        """Puts the tensors that were made into the module, under all names."""
        for owner, name, one in list(_tensors(self._module)) if self._made else ():
            made: Any = self._made.get(id(one))
            if made is not None:
                (owner._parameters if name in owner._parameters else owner._buffers)[name] = made

    def left(self) -> list[str]:
        """What is on the meta device still."""
        both = (*self._module.named_parameters(), *self._module.named_buffers())
        return [name for name, one in both if one.is_meta]


def _tensors(module: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str, torch.Tensor]]:
    for owner in module.modules():
        for table in (owner._parameters, owner._buffers):
            yield from ((owner, name, one) for name, one in table.items() if one is not None)


def _inner(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that a tensor of a class of its own is made of."""
    import torch

    return [one for one in vars(tensor).values() if isinstance(one, torch.Tensor)]


def _like(held: Any, device: torch.device) -> torch.Tensor:
    """A tensor without contents of the same class, dtype, strides and flags, on the device."""
    import torch

    made: Any = torch.empty_like(held, device=device, requires_grad=False)
    if type(held) in (torch.nn.Parameter, torch.nn.Buffer):
        made = (
            torch.nn.Parameter(made, held.requires_grad)
            if type(held) is torch.nn.Parameter
            else torch.nn.Buffer(made)
        )
    elif type(made) is not type(held):
        made = made.as_subclass(type(held))
    elif isinstance(held, torch.nn.Parameter):
        # a class that holds tensors of its own is one already, and wants to be told that it is a
        # parameter
        return torch.nn.Parameter(made, held.requires_grad)
    if type(made) is type(held) and type(held) is not torch.Tensor:
        made.__dict__.update(vars(held))
    return made.requires_grad_(held.requires_grad)


def local(target: torch.Tensor, tensor: Tensor) -> tuple[torch.Tensor, Tensor] | None:
    """Of a distributed tensor the part that this process holds, and that part of the output; None
    where it is no such box.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if not isinstance(target, DTensor) or not all(
        type(p) in (Shard, Replicate) for p in target.placements
    ):
        return None
    shape, offset = compute_local_shape_and_global_offset(
        target.shape, target.device_mesh, target.placements
    )
    box = tuple((first, first + size) for first, size in zip(offset, shape, strict=True))
    if 0 in shape:
        box = tuple((0, size) for size in shape)
    here = target._local_tensor
    if tuple(here.shape) != tuple(shape):
        return None
    return here, Tensor(
        Spec(tensor.spec.dtype, tuple(shape)), region(tensor.view, box), tensor.sources
    )


def alike(value: Any, target: Any) -> bool:
    """Whether both are DTensors whose parts lie in the same processes."""
    if not (is_dtensor(value) and is_dtensor(target)):
        return False
    return bool(value.placements == target.placements and value.device_mesh == target.device_mesh)
