"""Digests of the blocks of tensors, taken while these are read for the first time.

A stacked or joined tensor holds the old ones block for block, so that it need not be read again to
be compared: equal digests of 128 bits are equal bytes. That the weights of one checkpoint have two
unequal blocks with one digest has a chance below 1 in 10^20 even for 10^9 blocks; whole tensors are
compared so as well. Blocks without an equal are never evidence against a relation: these tensors
are read, and what differs is counted.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ...core.spec import Spec
from ...core.view import Fill, runs
from ...source.blobs import Stored

if TYPE_CHECKING:
    import numpy as np

    from ...planning.graph import Tensor
    from ...source.index import Source

    Array = np.ndarray[Any, Any]

# the binary logarithm of the elements of a block: so many, and at least those
LEAST = 12
# fewer than there are elements to one run that is sampled: of a large checkpoint some 2 million
_BELOW_RUNS = 3
# another one in each process, so that no file can be made with blocks that look equal
_SEED = int.from_bytes(os.urandom(8), "little")


class BlockDigests:
    """The digests of the blocks of one side's tensors, of which one run in 2**bits is sampled; all
    blocks have `size` elements.
    """

    def __init__(self, source: Source, bits: int) -> None:
        self._source = source
        self.size = 1 << max(LEAST, bits - _BELOW_RUNS)
        self._of: dict[str, Array] = {}

    def fit(self, spec: Spec) -> bool:
        """Whether such a tensor is of whole blocks."""
        return spec.numel > 0 and spec.numel % self.size == 0

    def take(self, elements: Array) -> bytes:
        """The digests of a stretch of whole blocks, one after the other."""
        from xxhash import xxh3_128_digest

        held, width = elements.view("u1").data, self.size * elements.itemsize
        return b"".join(
            [xxh3_128_digest(held[at : at + width], _SEED) for at in range(0, len(held), width)]
        )

    def keep(self, key: str, digests: bytes) -> None:
        """Keeps all digests of a tensor, if its elements lie in their order."""
        import numpy as np

        at = self._source.index.tensors[key]
        if isinstance(at, Stored) and at.strides is None:
            self._of[key] = np.frombuffer(digests, "<u8").reshape(-1, 2)

    def of(self, key: str) -> Array | None:
        """Those of a tensor; None if none were kept."""
        return self._of.get(key)


def equal_by_blocks(olds: BlockDigests, news: BlockDigests, tensor: Tensor, key: str) -> bool:
    """Whether `tensor`, of stored old ones in row-major order, is made of the blocks that the new
    one of this key has; False where they do not tell.
    """
    import numpy as np

    block, wanted = olds.size, news.of(key)
    held = [olds.of(source) if isinstance(source, str) else None for source in tensor.sources]
    if wanted is None or len(wanted) * block != tensor.spec.numel:
        return False
    for piece in tensor.view.pieces:
        if isinstance(piece.leaf, Fill) or held[piece.leaf] is None:
            return False
        # whole blocks, in order on both sides
        if not piece.counts or (piece.dst_strides[-1], piece.src_strides[-1]) != (1, 1):
            return False
        places = (piece.src, piece.dst, piece.counts[-1])
        if any(n % block for n in (*places, *piece.src_strides[:-1], *piece.dst_strides[:-1])):
            return False
    made = np.empty_like(wanted)
    for leaf, src, dst, length in runs(tensor.view.pieces):
        digests = held[leaf] if isinstance(leaf, int) else None
        if digests is None:
            return False
        at, to, count = src // block, dst // block, length // block
        made[to : to + count] = digests[at : at + count]
    return bool(np.array_equal(made, wanted))
