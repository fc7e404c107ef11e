"""Checkpoints that were cut for a grid of processes: along which axes, and what stands in several
parts.

Ranks of one axis stay apart, as `key@r`, because their tensors differ and rules join them. What a
part has along the other axes is a number in its keys, of a layer or of an expert, and so the parts
are joined when they are opened; which name of a framework counts what is said by its table in
`formats`. Tensors that stand in several of the joined parts have to be equal to the bit. That is
not known from headers: a plan lists it, and a run checks it before anything is published.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .blobs import Stored


class Axis(NamedTuple):
    """An axis of the grid: what it is called, into how many it was cut, and which of them is here,
    where that is one alone.
    """

    name: str
    size: int
    here: int | None = None

    def __str__(self) -> str:
        return f"{self.name} {self.size}"


class Replica(NamedTuple):
    """What one part has under a key that several have."""

    part: str
    stored: Stored


@dataclass(frozen=True, slots=True)
class PartGrid:
    """How a checkpoint was cut.

    `parts` are the files, by their names. `alone`: one part is here, and not the others. `joined`:
    parts were joined beyond ranks. `layers` is how many the whole model has, None where nothing
    says it. `replicas` has, by key, what the parts have that hold it, the one that is read first;
    `optimizers` are the places of optimizer state that is not among the tensors.
    """

    axes: Sequence[Axis]
    parts: Sequence[str]
    layers: int | None = None
    alone: bool = False
    joined: bool = False
    replicas: Mapping[str, Sequence[Replica]] = field(default_factory=dict)
    optimizers: Sequence[str] = ()

    def __str__(self) -> str:
        said = " x ".join(map(str, self.axes))
        if self.layers is not None:
            said += f", {self.layers} layer{'' if self.layers == 1 else 's'}"
        if self.alone:
            here = ", ".join(f"{a.name} {a.here}" for a in self.axes if a.here is not None)
            said += f": one part alone, {here}"
        return said
