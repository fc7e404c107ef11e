"""What one thread keeps while it computes: boxes of inputs, and the last chunks that it made."""

from __future__ import annotations

from collections import OrderedDict
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ..core.spec import BITS, Spec
from ..elements.raw import as_bytes, carrier, pack, scratch, unpack
from ..planning.graph import FEW, ComputedTensor, Kind, Tensor
from .gather import LONG, Gather
from .geometry import holds, within

if TYPE_CHECKING:
    import numpy as np

    from ..ops.base import Box
    from .resources import Lane

# chunks that a thread keeps for its next reads
_CHUNKS = 8
# the part of a thread's share that is for columns of an input that boxes to come need, and the most
# that they take: stretches of 1.6 KiB or longer of twenty thousand rows, which are read as they
# lie; stretches longer than LONG are no faster
BANDS, BAND = 4, 32 << 20


class Values(Protocol):
    """What an evaluator does for a workspace; `share` are the bytes that a thread may hold,
    `sparing` says that nothing is read ahead.
    """

    share: int
    sparing: bool

    def gather(self, memory: memoryview) -> Gather: ...

    def fill(self, gather: Gather, tensor: Tensor, box: Box) -> bool: ...

    def loose(self, tensor: Tensor, box: Box) -> np.ndarray[Any, Any]: ...

    def compute(
        self,
        workspace: Workspace,
        value: ComputedTensor,
        kind: Kind,
        box: Box,
        out: np.ndarray[Any, Any],
    ) -> None: ...


class ComputedBox(NamedTuple):
    """A box of raw elements that was computed, in memory of this thread."""

    box: Box
    array: np.ndarray[Any, Any]
    memory: np.ndarray[Any, Any]


class Workspace:
    """One thread's memory: input boxes by depth and number, last chunks, and unpacked elements."""

    __slots__ = ("_bands", "_chunks", "_slots", "_values", "depth", "lane")

    def __init__(self, values: Values, lane: Lane | None) -> None:
        self._values, self.lane = values, lane
        self.depth = 0
        # the Value is kept beside its chunk: an id means nothing after its object is gone
        self._chunks: OrderedDict[int, tuple[ComputedTensor, ComputedBox]] = OrderedDict()
        self._slots: dict[tuple[int, int], tuple[memoryview, Gather]] = {}
        # the tensor is kept beside its box, as a value beside its chunk
        self._bands: dict[tuple[int, int], tuple[Tensor, Box, np.ndarray[Any, Any]]] = {}

    def input(self, number: int, tensor: Tensor, box: Box, packed: bool) -> np.ndarray[Any, Any]:
        """The raw elements of a box of an input, or if `packed` the bytes that hold them; valid
        until this depth reads it again."""
        slot = self.depth, number
        kept = self._bands.get(slot)
        if kept is not None and kept[0] is tensor and holds(kept[1], box):
            return _own(kept[2][within(kept[1], box)], f"band {slot}")
        self._bands.pop(slot, None)
        band = self._band(tensor, box)
        spec = Spec(tensor.spec.dtype, tuple(b - a for a, b in band))
        nbytes = spec.nbytes
        found = self._slots.get(slot)
        if found is None or len(found[0]) < nbytes:
            memory = memoryview(bytearray(-(-nbytes // FEW) * FEW))
            found = self._slots[slot] = memory, self._values.gather(memory)
        memory, gather = found
        self.depth += 1
        try:
            if not self._values.fill(gather, tensor, band):
                codes = self._values.loose(tensor, band)
                return as_bytes(pack(codes, spec.dtype), spec) if packed else codes
        finally:
            self.depth -= 1
        if packed:
            return as_bytes(memory[:nbytes], spec)
        made = unpack(memory[:nbytes], spec)
        if band is box:
            return made
        self._bands[slot] = tensor, band, made
        return _own(made[within(band, box)], f"band {slot}")

    def _band(self, tensor: Tensor, box: Box) -> Box:
        """Of a box of some columns, which are short stretches of the file, these with as many
        behind them as fit: boxes to come have them, and would read what lies between again.
        """
        bits, shape = BITS[tensor.spec.dtype], tensor.spec.shape
        if self._values.sparing or bits < 8 or len(box) < 2 or box[-1] == (0, shape[-1]):
            return box
        low, high = box[-1]
        rows = prod(b - a for a, b in box[:-1])
        if rows < 2 or (high - low) * bits >= 8 * LONG:
            return box
        most = min(self._values.share // BANDS, BAND) // (rows * bits // 8)
        if most < 2 * (high - low) or any(isinstance(s, ComputedTensor) for s in tensor.sources):
            return box
        if most >= shape[-1] and shape[-1] * bits <= 8 * LONG:
            return (*box[:-1], (0, shape[-1]))
        most = min(most, max(8 * LONG // bits, 2 * (high - low)))
        return (*box[:-1], (low, min(shape[-1], low + most)))

    def settle(self) -> None:
        """Waits until what was given to the device is where it belongs."""
        if self.lane is not None:
            self.lane.drain()

    def has(self, value: ComputedTensor, box: Box) -> bool:
        """Whether a chunk with `box` is there already."""
        kept = self._chunks.get(id(value))
        return kept is not None and holds(kept[1].box, box)

    def chunk(self, value: ComputedTensor, kind: Kind, box: Box) -> ComputedBox:
        """A chunk that holds `box`: the value's last one, or computed now on the op's grain."""
        import numpy as np

        kept = self._chunks.get(id(value))
        if kept is not None and holds(kept[1].box, box):
            self._chunks.move_to_end(id(value))
            return kept[1]
        box = kind.rounded(box)
        sizes, dtype = tuple(b - a for a, b in box), carrier(kind.spec.dtype)
        nbytes = prod(sizes) * np.dtype(dtype).itemsize
        if kept is not None:
            memory = self._chunks.pop(id(value))[1].memory
        else:
            memory = np.empty(0, "u1")
            while self._chunks and (
                len(self._chunks) >= _CHUNKS
                or nbytes + sum(c.memory.size for _, c in self._chunks.values())
                > self._values.share // 2
            ):
                memory = self._chunks.popitem(last=False)[1][1].memory
        if memory.size < nbytes:
            memory = np.empty(nbytes, "u1")
        array = memory[:nbytes].view(dtype).reshape(sizes)
        self._values.compute(self, value, kind, box, array)
        made = ComputedBox(box, array, memory)
        self._chunks[id(value)] = value, made
        return made


def _own(array: np.ndarray[Any, Any], name: str) -> np.ndarray[Any, Any]:
    """A contiguous copy in memory of that name."""
    memory = scratch(name, array.nbytes)
    made: np.ndarray[Any, Any] = memory.view(array.dtype).reshape(array.shape)
    made[...] = array
    return made
