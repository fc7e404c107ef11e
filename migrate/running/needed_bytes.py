"""What has to be read for a box of a tensor: the stored tensors and chunks that are below it, and
how many bytes of each.

Planning knows what a whole output reads; a rank that loads a part of it asks here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING

from ..core.spec import BITS
from ..core.view import Fill, TooManyPieces
from ..planning.graph import ComputedTensor, Tensor
from .geometry import ByteLayouts, footprint

if TYPE_CHECKING:
    from ..ops.base import Box
    from ..planning.graph import Kind
    from ..source.blobs import ChunkOf


@dataclass(slots=True)
class NeededBytes:
    """What several boxes need; `kind` as `Evaluator.kind`.

    `stored` has the bytes of each stored tensor or chunk. `whole` has those of computed tensors of
    which a part needs all that the tensor is made of, by the op and the keys of its rule. What is
    read for two boxes is counted twice, as it is read twice.
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

    def _reads(
        self, tensor: Tensor, box: Box
    ) -> Iterator[tuple[int, int, Sequence[tuple[int, int]]]]:
        """(source, first element, loops) of each piece that is not a fill."""
        try:
            view, _ = self.layouts.part(tensor.view, tensor.spec.dtype, box)
        except TooManyPieces:
            view = tensor.view
        for leaf, src, _, counts, _, strides in view.pieces:
            if not isinstance(leaf, Fill):
                yield leaf, src, list(zip(counts, strides, strict=True))

    def _add_computed(self, value: ComputedTensor, boxes: set[Box]) -> int:
        kind, call = self.kind(value), value.computation
        everything = [_all(tensor) for tensor in call.inputs]
        reads = [everything] if not kind.regional or kind.surveyed else []
        reads = reads or [kind.needs(kind.rounded(box)) for box in sorted(boxes)]
        total = 0
        for needed in reads:
            total += sum(map(self.add, call.inputs, needed))
        if everything in reads and _all(value) not in boxes:
            self.whole[call.op_call.op, call.keys] = total
        return total


def _all(tensor: Tensor | ComputedTensor) -> Box:
    return tuple((0, n) for n in tensor.spec.shape)
