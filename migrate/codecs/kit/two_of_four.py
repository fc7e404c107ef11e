"""Rows of which two of each four elements are kept, and a bit for each that says which: a byte
says it of eight, the first in its lowest bit.
"""

from __future__ import annotations

from typing import Any

from ...core.errors import OpError
from ...core.spec import Spec
from ...elements.numbers import is_numpy
from .bit_masks import bits_of, first_of
from .geometry import place
from .samples import random_part


def spread(weight: Any, mask: Any, first: tuple[int, int]) -> Any:
    """The kept elements of rows in their places, and 0 in all others, as numpy or torch; the box
    begins at `first`. OpError M406 where not two of four are kept.
    """
    bits = bits_of(mask, 2 * weight.shape[1])
    if is_numpy(mask):
        import numpy as np

        dense = np.zeros(bits.shape, weight.dtype)
    else:
        dense = weight.new_zeros(bits.shape)
    kept = bits.reshape(len(bits), bits.shape[1] // 4, 4).sum(-1)
    if (wrong := kept != 2).any():
        row, four = first_of(wrong)
        at = place((row, 4 * four), ((first[0], 0), (first[1], 0)))
        raise OpError(
            "M406",
            f"dequantize: the mask keeps {int(kept[row, four])} of the four numbers from {at} on, "
            "and not two",
            help="the parts belong to different tensors, or one of them is damaged",
        )
    dense[bits == 1] = weight.reshape(-1)
    return dense


def spread_plainly(weight: Any, mask: Any) -> Any:
    """`spread` of whole parts, written a second time."""
    import numpy as np

    dense = np.zeros((len(weight), 2 * weight.shape[1]), weight.dtype)
    for row, kept, bits in zip(dense, weight, mask, strict=True):
        row[np.unpackbits(bits, bitorder="little")[: len(row)] == 1] = kept
    return dense


def random_kept(dtype: str, rows: int, columns: int) -> list[tuple[Spec, Any]]:
    """(spec, raw elements) of kept elements, finite ones of floats, of the mask, and of the shape
    of all, which is a column.
    """
    import numpy as np

    _, dice = random_part("uint8", rows, columns // 4)
    # the six ways to keep two of four
    pairs = np.array([3, 5, 6, 9, 10, 12], "u1")[dice % 6]
    bits = np.unpackbits(pairs[..., None], axis=-1, bitorder="little")[..., :4]
    mask = np.packbits(bits.reshape(rows, columns), axis=-1, bitorder="little")
    spec, kept = random_part(dtype, rows, columns // 2)
    # without one bit of the exponent
    kept = kept & ~np.array(1 << (4 if kept.itemsize == 1 else 10), kept.dtype)
    shape = np.array([[rows], [columns]], "<i8").view("<u8")
    return [(spec, kept), (Spec("uint8", mask.shape), mask), (Spec("int64", (2, 1)), shape)]
