"""Codes of which two of each four are kept, in the order of a GPU's matrix units, which vLLM's
kernel Marlin reads (`marlin-24`).

A tile has 64 rows and 32 numbers of each, of which 16 codes are kept: 1,024 codes one after the
other. `meta` says in two bits for each code where among its four it was. In a tile both lie in
another order of axes of length 2, 4 and 8, called here by letters:

    row = 16 o + 8 c + 4 b + j = 8 u + 4 x + 2 y + z
    number = 16 h + 4 q + where the code p, one of two, was

Of more than two groups of columns entries of scales lie in another order too. The source is what
compressed-tensors 0.8 to 0.14 writes (`pack_weight_24`, `get_permutations_24`, and
`sparse_semi_structured_from_dense_cutlass`, whose code for two of four it is).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...core.errors import OpError
from ...core.spec import Spec
from ...elements.numbers import is_numpy
from .bit_masks import first_of
from .geometry import matrices_of, place
from .layout import Packing
from .samples import random_part
from .unpacking import codes

if TYPE_CHECKING:
    from ...ops.base import Box

# rows and numbers of a tile
ROWS, NUMBERS = 64, 32
# the last axes of the codes of a tile, which are those of a word, by bits
_IN_WORDS = {4: ("p", "b", "h"), 8: ("b", "p", "h")}
_LENGTHS = {"o": 4, "c": 2, "q": 4, "j": 4, "b": 2, "h": 2, "p": 2, "u": 8, "x": 2, "y": 2, "z": 2}
_KEPT = "ocbj", "hqp"
_META = ("y", "u", "z", "h", "x", "q", "p")


def group_of(groups: int, columns: int) -> int:
    """The columns of a row that share a scale where there are so many: all, or 128; 0 where that
    does not fit.
    """
    return columns if groups == 1 else 128 * (128 * groups == columns)


def size_stored(name: str, specs: Mapping[str, Spec]) -> tuple[int, int]:
    """The rows and columns of the numbers. OpError, for the codec `name`, M304 for parts that are
    no matrices, M310 where these do not fit each other.
    """
    (down, words), (groups, rows), meta = matrices_of(name, specs, ("weight", "scale", "meta"))
    weight, scale, places = (specs[role] for role in ("weight", "scale", "meta"))
    fits = (weight.dtype, places.dtype) == ("int32", "int16") and words in (2 * rows, 4 * rows)
    if not fits or meta != (down, 2 * rows) or rows % ROWS or not group_of(groups, 32 * down):
        raise OpError(
            "M310",
            f"{name}: the weight is {weight}, the scale {scale} and the meta {places}, not those "
            "of codes of 4 or 8 bits in rows by 64, with one scale each or one for 128 columns",
        )
    return rows, NUMBERS * down


def tiles_of(box: Box) -> Box:
    """The rows, and the tiles of numbers, that a box of the numbers lies in."""
    (low, high), (first, last) = box
    return (low // ROWS * ROWS, -(-high // ROWS) * ROWS), (first // NUMBERS, -(-last // NUMBERS))


def kept_codes(words: Any, bits: int) -> Any:
    """The kept codes of words [tiles of numbers, words], as uint8 [rows, tiles, 2, 4, 2]."""
    order = ("o", "c", "q", "j", *_IN_WORDS[bits])
    return _turned(codes(words, Packing(bits, ("int32",)), "int32", False), order, *_KEPT)


def kept_places(meta: Any) -> Any:
    """Where among its four each kept code was, shaped as these."""
    return _turned(codes(meta, Packing(2, ("int16",)), "int16", False), _META, "uxyz", "hqp")


def _turned(found: Any, order: tuple[str, ...], rows: str, numbers: str) -> Any:
    """[tiles, codes in this order] as [rows, tiles, numbers]."""
    lengths = [_LENGTHS[name] for name in order]
    axes = {name: 2 + number for number, name in enumerate(order)}
    split = found.reshape(len(found), -1, *lengths)
    moved = [1, *(axes[name] for name in rows), 0, *(axes[name] for name in numbers)]
    turned = split.transpose(moved) if is_numpy(split) else split.permute(moved)
    return turned.reshape(-1, len(found), *(_LENGTHS[name] for name in numbers))


def spread(words: Any, meta: Any, box: Box) -> Any:
    """The codes of a box, of whose tiles these are, as int8 in two's complement, the middle of all
    codes being 0, with 0 where none was kept. OpError M406 where `meta` does not name two places of
    four in turn.
    """
    (top, _), (left, _) = tiles_of(box)
    left *= NUMBERS
    bits = _bits(words, meta)
    kept, where = kept_codes(words, bits), kept_places(meta)
    wrong = where[..., 0] >= where[..., 1]
    if wrong.any():
        row, tile, half, four = first_of(wrong)
        found = [int(i) for i in where[row, tile, half, four]]
        at = place((row, tile * NUMBERS + half * 16 + four * 4), ((top, 0), (left, 0)))
        raise OpError(
            "M406",
            f"dequantize: of the four numbers from {at} on the meta says that those at {found[0]} "
            f"and {found[1]} are kept, which are no two in turn",
            help="the parts belong to different tensors, or one of them is damaged",
        )
    # less the middle, in the eight bits that there are
    kept = kept - (1 << (bits - 1))
    rows = len(kept)
    if is_numpy(kept):
        import numpy as np

        dense = np.zeros((*kept.shape[:-1], 4), "u1")
        np.put_along_axis(dense, where.astype("i8"), kept.astype("u1"), -1)
    else:
        import torch

        dense = kept.new_zeros((*kept.shape[:-1], 4), dtype=torch.uint8)
        dense.scatter_(-1, where.long(), kept.to(torch.uint8))
    (low, high), (first, last) = box
    return dense.reshape(rows, -1)[low - top : high - top, first - left : last - left]


def _bits(words: Any, meta: Any) -> int:
    """The bits of a code; for parts without any 4."""
    return int(4 * words.shape[1] // max(meta.shape[1], 1)) or 4


def in_turn(scale: Any, spec: Spec) -> Any:
    """Entries [groups, rows] in the order of rows. Of a scale of one or two groups they are: the
    kept half of the columns is no more than one group then.
    """
    if spec.shape[0] <= 2:
        return scale
    return scale.reshape(len(scale), -1, 4, 2).swapaxes(-1, -2).reshape(scale.shape)


def spread_plainly(words: Any, meta: Any) -> Any:
    """`spread` of whole parts, written a second time, code by code."""
    import numpy as np

    bits, rows, kept = _bits(words, meta), meta.shape[1] // 2, 16 * len(words)
    n, k = np.arange(rows)[:, None], np.arange(kept)[None]
    h, q, p = k % 16 // 8, k % 8 // 2, k % 2
    o, c, b, j = n % 64 // 16, n % 16 // 8, n % 8 // 4, n % 4
    word, field = ((o * 2 + c) * 4 + q) * 4 + j, p * 4 + b * 2 + h
    if bits == 8:
        word, field = word * 2 + b, p * 2 + h
    word = n // 64 * 32 * bits + word
    found = words[k // 16, word] >> np.asarray(bits * field, "u4") & ((1 << bits) - 1)
    column = n // 64 * 128 + ((n % 4 // 2 * 8 + n % 64 // 8) * 4 + n % 2 * 2 + h) * 2 + b
    where = meta[k // 16, column] >> np.asarray(4 * q + 2 * p, "u2") & 3
    dense = np.zeros((rows, 2 * kept), "u1")
    np.put_along_axis(
        dense, (k // 2 * 4 + where).astype("i8"), (found - (1 << (bits - 1))).astype("u1"), 1
    )
    return dense


def in_turn_plainly(scale: Any) -> Any:
    """`in_turn` of a whole scale, written a second time."""
    mixed = len(scale) > 2
    order = [i // 8 * 8 + i % 4 * 2 + i % 8 // 4 if mixed else i for i in range(scale.shape[1])]
    return scale[:, order]


def random_tiles(bits: int, rows: int, columns: int, groups: int) -> list[tuple[Spec, Any]]:
    """(spec, raw elements) of words of random codes, of scales, and of a meta."""
    import numpy as np

    down = columns // NUMBERS
    _, dice = random_part("uint8", down, 2 * rows, 4)
    # the six ways to keep two of four
    pairs = np.array([4, 8, 12, 9, 13, 14], "<u2")[dice % 6]
    meta = pairs[..., 0] | pairs[..., 1] << 4 | pairs[..., 2] << 8 | pairs[..., 3] << 12
    return [
        random_part("int32", down, rows * bits // 2),
        random_part("float16", groups, rows),
        (Spec("int16", meta.shape), meta),
    ]
