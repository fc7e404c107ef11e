"""Checkpoints that were cut for a grid of processes: along which axes, and what stands in several
parts.

Ranks of one axis stay apart, as `key@r`, because their tensors differ and rules join them. What a
part has along the other axes is a number in its keys, of a layer or of an expert, and so the parts
are joined when they are opened; which name of a framework counts what is said by its table in
`formats`. Tensors that stand in several of the joined parts have to be equal to the bit. That is
not known from headers: a plan lists it, and a run checks it before anything is published.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from .blobs import Stored

# stages that are believed of a stamp, and layers of one of them
_MOST = 100_000


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
    """What one part has under a key that several have, and what it is `called` there if that is
    another key.
    """

    part: str
    stored: Stored
    called: str = ""


@dataclass(frozen=True, slots=True)
class WrittenGrid:
    """A grid that is written, or what has to be known of one to write it so again.

    `table` names the framework's table in `formats`; `sizes` has the number of parts along each of
    its axes, `layers` how many each stage has, by virtual stage and stage. `folder` is what the
    checkpoint is called in the folder of its run, and `file` what the weights of a part are.
    `order` is the order of keys, see the table. `parts` are the names of the parts, by
    tensor-parallel rank; `again`: it is the grid that was read, or that a way back leads to, and
    `processes`: it has the same processes at least, with other layers.
    """

    table: str
    sizes: Mapping[str, int]
    layers: Sequence[Sequence[int]]
    folder: str
    file: str
    order: Sequence[str] = ()
    parts: Sequence[Sequence[str]] = field(default=(), compare=False)
    again: bool = field(default=False, compare=False)
    processes: bool = field(default=False, compare=False)

    def to_json(self) -> dict[str, Any]:
        """The grid as a stamp holds it."""
        return {
            "table": self.table,
            "sizes": dict(self.sizes),
            "layers": [list(row) for row in self.layers],
            "folder": self.folder,
            "file": self.file,
            "order": list(self.order),
        }

    @property
    def count(self) -> int:
        """How many parts there are."""
        return sum(map(len, self.parts))

    def like(self, other: WrittenGrid | None) -> WrittenGrid:
        """The grid that knows whether it is the other one."""
        if other is None or other.table != self.table:
            return self
        axes = [axis for axis in self.sizes if axis != "VPP"]
        processes = all(self.sizes[axis] == other.sizes.get(axis) for axis in axes)
        layers = [[list(row) for row in one.layers] for one in (self, other)]
        return replace(self, again=processes and layers[0] == layers[1], processes=processes)

    def __str__(self) -> str:
        return described(self.sizes, sum(map(sum, self.layers)))


def grid_of(said: Any) -> WrittenGrid | None:
    """The grid that a stamp holds; None for anything that is not well formed. What it names is for
    the table to judge: a stamp comes with the checkpoint, from its author.
    """
    if not isinstance(said, dict):
        return None
    names = [said.get(word) for word in ("table", "folder", "file")]
    sizes, layers, order = said.get("sizes"), said.get("layers"), said.get("order")
    if not (
        all(isinstance(name, str) and name.isprintable() for name in names)
        and isinstance(sizes, dict)
        and all(isinstance(axis, str) and _is_count(n, 1) for axis, n in sizes.items())
        and isinstance(layers, list)
        and layers
        and all(isinstance(row, list) and row for row in layers)
        and all(_is_count(n, 0) for row in layers for n in row)
        and isinstance(order, list)
        and all(isinstance(one, str) and one.isprintable() for one in order)
    ):
        return None
    table, folder, file = map(str, names)
    return WrittenGrid(table, sizes, layers, folder, file, order)


def _is_count(value: Any, least: int) -> bool:
    return type(value) is int and least <= value <= _MOST


@dataclass(frozen=True, slots=True)
class AskedGrid:
    """What is said of the grid that an output shall have: `sizes` by axis and `stages` as
    `LayoutGrid` has them, and in `params` the param behind each of them, for messages. What is not
    said is as in the grid that is `like` it, if there is one.
    """

    table: str
    sizes: Mapping[str, int] = field(default_factory=dict)
    stages: Mapping[str, Any] = field(default_factory=dict)
    params: Mapping[str, str] = field(default_factory=dict)
    like: WrittenGrid | None = None


def described(sizes: Mapping[str, int], layers: int | None) -> str:
    """`TP 2 x PP 2 x EP 1, 4 layers`."""
    shown = [f"{axis} {size}" for axis, size in sizes.items() if axis != "VPP" or size > 1]
    said = " x ".join(shown)
    return said if layers is None else f"{said}, {layers} layer{'' if layers == 1 else 's'}"


@dataclass(frozen=True, slots=True)
class PartGrid:
    """How a checkpoint was cut.

    `parts` are the files, by their names. `alone`: one part is here, and not the others. `joined`:
    parts were joined beyond ranks. `layers` is how many the whole model has, None where nothing
    says it. `again` answers how it is cut so again: None where nothing says it, or one part alone
    is here. `replicas` has, by key, what the parts have that hold it, the one that is read first;
    `optimizers` are the places of optimizer state that is not among the tensors.
    """

    axes: Sequence[Axis]
    parts: Sequence[str]
    layers: int | None = None
    alone: bool = False
    joined: bool = False
    replicas: Mapping[str, Sequence[Replica]] = field(default_factory=dict)
    optimizers: Sequence[str] = ()
    again: Callable[[], WrittenGrid | None] = lambda: None

    def __str__(self) -> str:
        said = described({axis.name: axis.size for axis in self.axes}, self.layers)
        if self.alone:
            here = ", ".join(f"{a.name} {a.here}" for a in self.axes if a.here is not None)
            said += f": one part alone, {here}"
        return said
