"""What has to be read for a box of a tensor: the stored tensors and chunks that are below it, and
how many bytes of each; and what is read whole for any part.

Planning knows what a whole output reads; a rank that loads a part of it asks here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING

from ..core.spec import BITS
from ..core.view import Fill, TooManyPieces
from ..planning.graph import ComputedTensor, Tensor
from .geometry import ByteLayouts, footprint

if TYPE_CHECKING:
    from ..ops.base import Box
    from ..planning.graph import Computation, Kind
    from ..source.blobs import ChunkOf


@dataclass(slots=True)
class NeededBytes:
    """What several boxes need; `kind` as `Evaluator.kind`.

    `stored` has the bytes of each stored tensor or chunk. `whole` has those of computed tensors of
    which a part needs all that the tensor is made of, by the op and the keys of its rule. What is
    read for two boxes is counted twice, as it is read twice; of a tensor that is looked through
    before it is computed, small ones are read once.
    """

    layouts: ByteLayouts
    kind: Callable[[ComputedTensor], Kind]
    stored: dict[str | ChunkOf, int] = field(default_factory=dict)
    whole: dict[tuple[str, tuple[str, ...]], int] = field(default_factory=dict)

    def add(self, tensor: Tensor, box: Box) -> int:
        """Counts what this box of a tensor needs; the bytes."""
        total = 0
        computed: dict[int, tuple[ComputedTensor, set[Box]]] = {}
        for leaf, src, loops in self._reads(tensor, box):
            source = tensor.sources[leaf]
            if isinstance(source, ComputedTensor):
                part = footprint(source.spec.shape, src, loops).box
                computed.setdefault(id(source), (source, set()))[1].add(part)
            else:
                nbytes = (prod(n for n, _ in loops) * BITS[tensor.spec.dtype] + 7) // 8
                self.stored[source] = self.stored.get(source, 0) + nbytes
                total += nbytes
        for source, boxes in computed.values():
            total += self._add_computed(source, boxes)
        return total

    def add_whole(self, tensors: Iterable[Tensor]) -> None:
        """Counts in `whole` what any part of these needs all of, whichever part it is."""
        todo, seen = list(tensors), set[int]()
        for tensor in todo:
            for value in tensor.sources:
                if not isinstance(value, ComputedTensor) or id(value) in seen:
                    continue
                seen.add(id(value))
                kind, call = self.kind(value), value.computation
                todo += call.inputs
                everything = [_all(read) for read in call.inputs]
                first = tuple((0, min(n, 1)) for n in value.spec.shape)
                # of one element no rank has a part
                if value.spec.numel > 1 and everything in self._reads_of(kind, call, {first}):
                    nbytes = sum(map(self.add, call.inputs, everything))
                    self.whole[call.op_call.op, call.keys] = nbytes

    def whole_by_op(self) -> dict[str, tuple[int, list[str]]]:
        """The bytes of `whole`, and the keys, by op."""
        out: dict[str, tuple[int, list[str]]] = {}
        for (op, keys), nbytes in self.whole.items():
            before, listed = out.get(op, (0, []))
            out[op] = before + nbytes, listed + [key for key in keys if key not in listed]
        return out

    def _reads(
        self, tensor: Tensor, box: Box
    ) -> Iterator[tuple[int, int, Sequence[tuple[int, int]]]]:
        """(source, first element, loops) of each piece that is not a fill."""
        try:
            view = self.layouts.box(tensor.view, box)
        except TooManyPieces:
            view = tensor.view
        for leaf, src, _, counts, _, strides in view.pieces:
            if not isinstance(leaf, Fill):
                yield leaf, src, list(zip(counts, strides, strict=True))

    def _add_computed(self, value: ComputedTensor, boxes: set[Box]) -> int:
        kind, call = self.kind(value), value.computation
        reads = self._reads_of(kind, call, boxes)
        everything = [_all(tensor) for tensor in call.inputs]
        total = 0
        for needed in reads:
            total += sum(map(self.add, call.inputs, needed))
        if everything in reads and _all(value) not in boxes:
            self.whole[call.op_call.op, call.keys] = total
        return total

    def _reads_of(self, kind: Kind, call: Computation, boxes: set[Box]) -> list[Sequence[Box]]:
        """What is read of the inputs to compute these boxes, one pass after the other."""
        everything = [_all(tensor) for tensor in call.inputs]
        parts = sorted(boxes) if kind.regional else []
        reads: list[Sequence[Box]] = [kind.needs(kind.rounded(box)) for box in parts]
        if (kind.surveyed or not kind.regional) and everything not in reads:
            reads.append(everything)
        return reads


def _all(tensor: Tensor | ComputedTensor) -> Box:
    return tuple((0, n) for n in tensor.spec.shape)
