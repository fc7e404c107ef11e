"""A box of a tensor of a graph, read into a tensor of torch: where the box is one, on any device,
in any strides and with any dtype.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core.spec import BITS, PACKED, spec
from ..core.view import Fill, TooManyPieces, stretch
from ..elements.raw import has_plain_bytes
from ..formats.memory import writable
from ..planning.graph import ComputedTensor, Tensor
from ..running.gather import stored_reader
from ..source.blobs import chunk_at
from ..source.target import torch_form
from .filling import Upload, direct

if TYPE_CHECKING:
    import torch

    from ..ops.base import Box
    from ..running.evaluator import Evaluator
    from ..running.geometry import ByteLayouts
    from ..source.index import Source


class BoxReader:
    """Reads boxes, one after the other. Beside the targets it holds a few buffers of some MiB, and
    for transposes at most `window` bytes of the source. `drain` comes last.
    """

    def __init__(
        self, source: Source, layouts: ByteLayouts, values: Evaluator, window: int
    ) -> None:
        self._source, self._layouts = source, layouts
        self._upload = Upload(source, layouts, values, window)

    def place(self, tensor: Tensor, box: Box) -> tuple[int, int]:
        """The blob and the byte where the box begins, to read boxes in the order of the bytes."""
        try:
            part = self._layouts.box(tensor.view, box)
        except TooManyPieces:
            part = tensor.view
        for piece in part.pieces:
            source = None if isinstance(piece.leaf, Fill) else tensor.sources[piece.leaf]
            if source is not None and not isinstance(source, ComputedTensor):
                at = chunk_at(self._source.index.tensors, source)
                return at.blob, at.offset + piece.src * BITS[tensor.spec.dtype] // 8
        return -1, 0

    def part(self, tensor: Tensor, box: Box) -> Tensor:
        """The box as a tensor of its own; the whole where it is of too many pieces."""
        try:
            part = self._layouts.box(tensor.view, box)
        except TooManyPieces:
            return tensor
        return Tensor(spec(tensor.spec.dtype, part.shape), part, tensor.sources)

    def read(self, tensor: Tensor, box: Box, target: torch.Tensor) -> None:
        """Fills a target of the box's shape, cast as `copy_` casts."""
        import torch

        if not target.numel():
            return
        if not has_plain_bytes(target):
            # its class decides how it is copied, and takes it whole
            dtype = getattr(torch, torch_form(tensor.spec)[0])
            made = torch.empty(target.shape, dtype=dtype)
            self.read(tensor, box, made)
            target.copy_(made)
            return
        if torch_form(tensor.spec)[0] == PACKED:
            # torch computes with none of these; it has them in pairs
            self._read(tensor, box, target.view(torch.uint8), 2)
        else:
            self._read(tensor, box, target, 1)
        torch.autograd.graph.increment_version(target)

    def _read(self, tensor: Tensor, box: Box, target: torch.Tensor, per: int) -> None:
        """`read`; `per`: elements of the tensor in one of the target."""
        try:
            part = self._layouts.box(tensor.view, box)
        except TooManyPieces:
            axis = next(i for i, (a, b) in enumerate(box) if b - a > 1)
            (a, b), rest = box[axis], target.shape[axis]
            middle = rest // 2
            cut = a + middle * (per if axis == len(box) - 1 else 1)
            for first, size, half in ((0, middle, (a, cut)), (middle, rest - middle, (cut, b))):
                into = target.narrow(axis, first, size)
                self._read(tensor, (*box[:axis], half, *box[axis + 1 :]), into, per)
            return
        made = Tensor(spec(tensor.spec.dtype, part.shape), part, tensor.sources)
        if not self._read_stretch(made, target):
            self._upload.write(made, target, 0, made.spec.nbytes)

    def _read_stretch(self, made: Tensor, target: torch.Tensor) -> bool:
        """Reads what lies in one stretch of a file to its place, by a single call, as most shards
        do; False for anything else.
        """
        found, bits = stretch(made.view), BITS[made.spec.dtype]
        source = None if found is None or bits < 8 else made.sources[found[0]]
        if (
            found is None
            or source is None
            or isinstance(source, ComputedTensor)
            or not target.is_contiguous()
            or not direct(made, target)
        ):
            return False
        stored_reader(self._source, source).read(found[1] * bits // 8, writable(target))
        return True

    def drain(self) -> None:
        """Waits for all that was sent to a device."""
        self._upload.drain()
