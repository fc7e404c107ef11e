"""Masks of bits: which numbers of each row are kept. A byte says it of eight columns, the first in
its lowest bit; bits behind the last column mean nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from ...core.errors import OpError
from ...core.spec import Spec
from ...elements.numbers import is_numpy
from .samples import random_part

if TYPE_CHECKING:
    from ...ops.base import Box

# bytes of an offset
WIDTH = 8


class RowOffsets(NamedTuple):
    """Where each row begins among so many kept elements: int64, low byte first. Of a vector one."""

    data: bytes
    total: int

    def side(self, top: int, bottom: int) -> tuple[int, int]:
        """The first kept element of row `top`, and the first behind the rows up to `bottom`."""
        return self._at(top), self._at(bottom)

    def counts(self, top: int, bottom: int) -> list[int]:
        """How many elements each of these rows keeps."""
        return [high - low for low, high in pairwise(map(self._at, range(top, bottom + 1)))]

    def _at(self, row: int) -> int:
        held = self.data[row * WIDTH : (row + 1) * WIDTH]
        return int.from_bytes(held, "little", signed=True) if held else self.total


def rows_stored(
    name: str, size: tuple[int, ...], specs: Mapping[str, Spec], data: bytes
) -> RowOffsets:
    """What `data`, the bytes of the part `offsets`, says of the rows of a matrix or of a vector of
    this size. OpError M310, for the codec `name`, where parts have other shapes, the first row does
    not begin with the first element, or a row has fewer than none or more than its columns.
    """
    lead, columns = size[:-1], size[-1] if size else 0
    wanted = {
        "mask": Spec("uint8", (*lead, -(-columns // 8))),
        "offsets": Spec("int64", lead),
        "weight": Spec(specs["weight"].dtype, (specs["weight"].numel,)),
    }
    for role, spec in wanted.items():
        if specs[role] != spec or len(size) not in (1, 2) or min(size) < 0:
            raise OpError(
                "M310",
                f"{name}: the shape says {list(size)}, the {role} is {specs[role]}: the parts have "
                "to be those of one matrix or vector",
            )
    rows = RowOffsets(data, specs["weight"].numel)
    if first := rows.side(0, 0)[0]:
        raise OpError("M310", f"{name}: the rows begin at number {first:,} of {rows.total:,}")
    for row, count in enumerate(rows.counts(0, len(data) // WIDTH)):
        if not 0 <= count <= columns:
            low, high = rows.side(row, row + 1)
            raise OpError(
                "M310",
                f"{name}: of {rows.total:,} numbers row {row} has those from {low:,} to {high:,}, "
                f"and a row is of {columns:,}",
            )
    return rows


def bits_of(mask: Any, columns: int) -> Any:
    """0 or 1 for each of the first columns of rows of a mask, uint8 as the mask, numpy's or
    torch's.
    """
    if is_numpy(mask):
        import numpy as np

        return np.unpackbits(mask, axis=-1, bitorder="little")[..., :columns]
    import torch

    shifts = torch.arange(8, dtype=torch.uint8, device=mask.device)
    return (mask[..., None] >> shifts & 1).reshape(*mask.shape[:-1], -1)[..., :columns]


def first_of(found: Any) -> list[int]:
    """The index of the first element that is true."""
    if is_numpy(found):
        return [int(axis[0]) for axis in found.nonzero()]
    return [int(i) for i in found.nonzero()[0]]


def rows_of(box: Box) -> tuple[int, int]:
    """The rows of a box of a matrix or of a vector, which is one row."""
    return box[0] if len(box) > 1 else (0, 1)


def spread_rows(weight: Any, mask: Any, rows: RowOffsets, columns: int, box: Box) -> Any:
    """The elements of a box: those that its rows, all columns of them, keep in their places, and 0
    in all others. OpError M406 for a row whose mask keeps more or fewer.
    """
    (top, bottom), (low, high) = rows_of(box), box[-1]
    counts = rows.counts(top, bottom)
    bits = bits_of(mask.reshape(bottom - top, mask.shape[-1]), columns)
    if is_numpy(mask):
        import numpy as np

        wrong = bits.sum(-1, dtype=np.int64) != np.array(counts, np.int64)
        dense = np.zeros(bits.shape, weight.dtype)
    else:
        import torch

        wrong = bits.sum(-1) != torch.tensor(counts, device=bits.device)
        dense = weight.new_zeros(bits.shape)
    if wrong.any():
        (row,) = first_of(wrong)
        raise OpError(
            "M406",
            f"dequantize: the mask keeps {int(bits[row].sum())} numbers of row {top + row}, and "
            f"{counts[row]} are stored of it",
            help="the parts belong to different tensors, or one of them is damaged",
        )
    dense[bits == 1] = weight
    return dense[:, low:high].reshape([stop - first for first, stop in box])


def rows_plainly(weight: Any, mask: Any, columns: int) -> Any:
    """The numbers of whole rows, one after the other, without a look at where others begin."""
    import numpy as np

    shape = (*mask.shape[:-1], columns)
    dense, at = np.zeros((mask.size // max(mask.shape[-1], 1), columns), weight.dtype), 0
    for row, bits in zip(dense, mask.reshape(len(dense), mask.shape[-1]), strict=True):
        kept = np.unpackbits(bits, bitorder="little")[:columns].nonzero()[0]
        row[kept] = weight[at : at + len(kept)]
        at += len(kept)
    return dense.reshape(shape)


def random_rows(dtype: str, shape: tuple[int, ...]) -> list[tuple[Spec, Any]]:
    """(spec, raw elements) of a mask, of the elements that it keeps, finite ones of floats, of the
    shape, and of where rows begin.
    """
    import numpy as np

    bits = np.random.default_rng([*shape]).integers(0, 2, shape, "u1")
    bits[..., : shape[-1] // 3] = 0
    mask = np.packbits(bits, axis=-1, bitorder="little")
    spec, kept = random_part(dtype, int(bits.sum()))
    # without one bit of the exponent
    kept = kept & ~np.array(1 << {1: 4, 2: 10, 4: 26}[kept.itemsize], kept.dtype)
    ends = np.cumsum(bits.sum(-1, dtype="<i8").reshape(-1))
    starts = (np.concatenate([[0], ends[:-1]])).astype("<i8").view("<u8").reshape(shape[:-1])
    size = np.array(shape, "<i8").view("<u8")
    return [
        (Spec("uint8", mask.shape), mask),
        (spec, kept),
        (Spec("int64", (len(shape),)), size),
        (Spec("int64", shape[:-1]), starts),
    ]
