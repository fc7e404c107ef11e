"""Digests of the blocks of tensors, taken while these are read for the first time.

A stacked or joined tensor holds the old ones block for block: where each block went says how the
tensors lie, and neither has to be read again to be compared, because equal digests of 128 bits are
equal bytes. That the weights of one checkpoint have two
unequal blocks with one digest has a chance below 1 in 10^20 even for 10^9 blocks; whole tensors are
compared so as well. Blocks without an equal are never evidence against a relation: these tensors
are read, and what differs is counted.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ...core.spec import Spec
from ...core.view import Fill, runs
from ...elements.raw import carrier
from ...running.eager import read_stretch
from ...source.blobs import Stored
from ...source.local import LocalBlob
from .samples import Pairs, salt_of

if TYPE_CHECKING:
    import numpy as np

    from ...planning.graph import Tensor
    from ...source.index import Source
    from .compared import ComparedTensor

    Array = np.ndarray[Any, Any]

# the binary logarithm of the elements of a block: so many, and at least those
LEAST = 12
# fewer than there are elements to one run that is sampled: of a large checkpoint some 2 million
_BELOW_RUNS = 3
# tensors of one shape whose first blocks are looked at
_LOOKED_AT = 64
# runs that are taken of the equal blocks of two tensors, if there are no more blocks, and blocks
# that are taken of more; elements of a run
_LEAST_RUNS, _MOST_BLOCKS, _RUN = 1 << 8, 1 << 11, 4
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

    def firsts(self, specs: Mapping[str, Spec]) -> dict[tuple[str, bytes], set[Spec]]:
        """The specs of tensors by dtype and first block, of those tensors that can be looked at
        without a request to a store.
        """
        import numpy as np

        out: dict[tuple[str, bytes], set[Spec]] = {}
        seen: Counter[Spec] = Counter()
        for key, spec in specs.items():
            at = self._source.index.tensors[key]
            if (
                self.fit(spec)
                and isinstance(at, Stored)
                and at.strides is None
                and isinstance(self._source.blobs[at.blob], LocalBlob)
                and seen[spec] < _LOOKED_AT
            ):
                seen[spec] += 1
                room = np.empty(self.size * np.dtype(carrier(spec.dtype)).itemsize, "u1")
                first = self.take(read_stretch(self._source, key, 0, self.size, room))
                out.setdefault((spec.dtype, first), set()).add(spec)
        return out

    def of(self, key: str) -> Array | None:
        """Those of a tensor; None if none were kept."""
        return self._of.get(key)


def kept_whole(
    olds: BlockDigests, news: BlockDigests, specs: tuple[Mapping[str, Spec], Mapping[str, Spec]]
) -> set[Spec]:
    """The specs of tensors that seem to move in whole blocks: those of which one begins as a tensor
    of the other side does. To be wrong costs time alone.
    """
    firsts = olds.firsts(specs[0]), news.firsts(specs[1])
    both = firsts[0].keys() & firsts[1].keys()
    return {spec for side in firsts for label in both for spec in side[label]}


def moved_blocks(
    olds: BlockDigests,
    news: BlockDigests,
    tensors: tuple[Sequence[ComparedTensor], Sequence[ComparedTensor]],
) -> tuple[dict[tuple[int, int], Pairs], tuple[set[int], set[int]]]:
    """Places that belong together in an old tensor and a new one, by their numbers, because equal
    blocks lie there that no other tensor of their side has; and of which tensors of either side all
    blocks are such.
    """
    import numpy as np

    hashes, owners, numbers, whole = [], [], [], []
    for side, some in zip((olds, news), tensors, strict=True):
        held = {n: of for n, t in enumerate(some) if (of := side.of(t.key)) is not None}
        # half of a digest is enough to look for its equal: what is found is proven later
        halves = [of[:, 0] ^ salt_of(some[n].spec.dtype) for n, of in held.items()]
        hashed = np.concatenate(halves or [np.empty(0, np.uint64)])
        _, first, count = np.unique(hashed, return_index=True, return_counts=True)
        once = first[count == 1]
        lengths = np.array([len(of) for of in held.values()], int)
        begin = np.repeat(np.cumsum(lengths) - lengths, lengths)
        hashes.append(hashed[once])
        owners.append(np.repeat(np.array(list(held), int), lengths)[once])
        numbers.append((np.arange(len(hashed)) - begin)[once])
        whole.append({n: len(of) for n, of in held.items()})
    _, *found = np.intersect1d(hashes[0], hashes[1], assume_unique=True, return_indices=True)
    owner_old, owner_new = (owner[at] for owner, at in zip(owners, found, strict=True))
    old, new = (number[at] for number, at in zip(numbers, found, strict=True))
    complete = tuple(
        {n for n, many in counts.items() if many == matched[n]}
        for counts, matched in zip(
            whole, (Counter(owner_old.tolist()), Counter(owner_new.tolist())), strict=True
        )
    )
    order = np.lexsort((old, owner_new, owner_old))
    owner_old, owner_new, old, new = (x[order] for x in (owner_old, owner_new, old, new))
    changed = (owner_old[1:] != owner_old[:-1]) | (owner_new[1:] != owner_new[:-1])
    borders = np.flatnonzero(np.concatenate(([True], changed, [True]))) if len(old) else ()
    links = {
        (int(owner_old[low]), int(owner_new[low])): _places(old[low:high], new[low:high], olds.size)
        for low, high in pairwise(borders)
    }
    return links, (complete[0], complete[1])


def _places(old: Array, new: Array, size: int) -> Pairs:
    """Some places in these blocks of `size` elements, which are equal; `old` ascends."""
    import numpy as np

    if len(old) > _MOST_BLOCKS:
        # stretches stay whole, so that neighbours remain
        kept = np.arange(len(old) // 64 * 64).reshape(-1, 64)[:: -(-len(old) // _MOST_BLOCKS)]
        old, new = old[kept.reshape(-1)], new[kept.reshape(-1)]
    many = max(1, _LEAST_RUNS // len(old))
    # each block elsewhere, so that no digit of a place is the same in all of them
    number = np.arange(len(old) * many, dtype=np.int64)
    begin = (number * 0x9E3779B1 & 0xFFFFFFFF) * (size - _RUN + 1) >> 32
    block, within = np.divmod(
        np.unique((number // many * size + begin)[:, None] + np.arange(_RUN)), size
    )
    return Pairs(old[block] * size + within, new[block] * size + within)


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
