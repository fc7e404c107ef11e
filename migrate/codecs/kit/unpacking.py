"""Codes out of words and out of records of bytes, one code an element; one text for numpy and
torch.

Shifts are of signed integers, which torch has on every device, and a mask takes off what they
bring in from the sign.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from ...core.spec import BITS
from ...elements.numbers import as_kind, is_numpy, kind, module, view
from .layout import BitPiece, Field, Packing


def codes(words: Any, packing: Packing, dtype: str, transposed: bool) -> Any:
    """The codes of words as a tensor of `dtype` stores them, `transposed` or not, as uint8
    [..., rows, columns] of the numbers: all that the words have room for.
    """
    if packing.run:
        words = words.reshape(*words.shape[:-2], -1)
    word = packing.word(dtype)
    if word != packing.bits or packing.plus:
        axis = -3 - packing.axis if transposed else packing.axis
        words = _fields(words, packing, word, axis)
    elif kind(words) != "u1":
        words = as_kind(words, "u1")
    return words.swapaxes(-1, -2) if transposed else words


def records(raw: Any, nbytes: int) -> Any:
    """Bytes [..., rows, records * nbytes] as [..., rows, records, nbytes]."""
    return raw.reshape(*raw.shape[:-1], -1, nbytes)


def field_codes(records: Any, field: Field) -> Any:
    """The codes of a field of records [..., nbytes], as uint8 [..., count]."""
    out = _empty((*records.shape[:-1], field.count), "u1", records)
    if is_numpy(records) and _put_runs(records, field, out):
        return out
    for number, piece in enumerate(field.pieces):
        mask = (1 << piece.bits) - 1
        for run in field_runs(piece):
            found = records[..., run.first : run.first + run.length]
            target = out[..., run.at : run.at + run.length]
            if not (number or run.shift or piece.left or mask != 255) and is_numpy(records):
                # a run is one element: numpy copies short rows one by one
                target.view(f"V{run.length}")[...] = found.view(f"V{run.length}")
                continue
            if run.shift:
                found = found >> run.shift
            if mask != 255 >> run.shift:
                found = found & mask
            if piece.left:
                found = found << piece.left
            if not number:
                target[...] = found
            else:
                target |= found
    return out


def _put_runs(records: Any, field: Field, out: Any) -> bool:
    """Fills `out` with the codes of a field whose runs of one shift together are some bytes of each
    record; False where they are not. All of them are shifted at once, for numpy takes as long to
    begin a row as for half of a run.
    """
    import numpy as np

    piece, *more = field.pieces
    if more or piece.left or piece.bits == 8:
        return False
    runs = field_runs(piece)
    first, last = min(run.first for run in runs), max(run.first + run.length for run in runs)
    length, shifts = last - first, {run.shift for run in runs}
    short = min(run.length for run in runs) < 8
    if short or length % 8 or length * len(shifts) != field.count:
        return False
    held = np.empty((*records.shape[:-1], length), "u1")
    held.view(f"V{length}")[...] = records[..., first:last].view(f"V{length}")
    mask = np.uint64(((1 << piece.bits) - 1) * 0x0101010101010101)
    for shift in shifts:
        words = held.view("<u8") >> np.uint64(shift)
        words &= mask
        found = words.view("u1")
        for run in runs:
            if run.shift == shift:
                at, kind = run.first - first, f"V{run.length}"
                target = out[..., run.at : run.at + run.length]
                target.view(kind)[...] = found[..., at : at + run.length].view(kind)
    return True


def field_numbers(records: Any, field: Field) -> Any:
    """The numbers of a field of records [..., nbytes] as raw elements [..., 1] of its dtype."""
    size = BITS[field.dtype] // 8
    found = records[..., field.at : field.at + size]
    if is_numpy(found):
        import numpy as np

        return np.ascontiguousarray(found.view(f"<u{size}"))
    # a whole copy begins where any element may
    return view(found.clone(memory_format=_contiguous()), f"i{size}")


def _contiguous() -> Any:
    import torch

    return torch.contiguous_format


class Run(NamedTuple):
    """Neighbouring codes whose bits lie in neighbouring bytes, shifted alike."""

    at: int
    first: int
    length: int
    shift: int


@lru_cache(maxsize=256)
def field_runs(piece: BitPiece) -> tuple[Run, ...]:
    """The codes of a piece as runs."""
    out: list[Run] = []
    for i, (byte, shift) in enumerate(zip(piece.bytes, piece.shifts, strict=True)):
        last = out[-1] if out else None
        if last is not None and last.shift == shift and last.first + last.length == byte:
            out[-1] = last._replace(length=last.length + 1)
        else:
            out.append(Run(i, byte, 1, shift))
    return tuple(out)


def _fields(words: Any, packing: Packing, word: int, axis: int) -> Any:
    bits, mask = packing.bits, (1 << packing.bits) - 1
    size = word // 8
    if is_numpy(words):
        words = words.view(f"<i{size}" if size > 1 else "u1")
    elif size > 1:
        words = view(words, f"i{size}")
    elif kind(words) != "u1":
        words = view(words, "u1")
    per, need = _unit(packing, word)
    if short := -words.shape[axis] % need:
        words = _longer(words, axis, short)
    if packing.plus and not packing.dense:
        # as the libraries do it: carries go on into the next code
        words = words + _signed(sum(packing.plus << (bits * i) for i in range(word // bits)), word)
    count = words.shape[axis] // need
    shape = list(words.shape)
    shape[axis] = count * per
    out = _empty(tuple(shape), "u1", words)
    for i in range(per):
        field = packing.order[i] if packing.order else i
        first, low = divmod(field * bits, word)
        found = _along(words, axis, first, need) >> low
        if low + bits > word:
            found = found & ((1 << (word - low)) - 1)
            found = found | (_along(words, axis, first + 1, need) << (word - low))
        if low + bits != 8 or size > 1:
            found = found & mask
        if packing.plus and packing.dense:
            found = (found + packing.plus) & mask
        _put(found, _along(out, axis, i, per))
    return out


def _unit(packing: Packing, word: int) -> tuple[int, int]:
    return packing.unit({8: "uint8", 16: "int16", 32: "int32", 64: "int64"}[word])


def _signed(value: int, word: int) -> int:
    return value - (1 << word) if value >> (word - 1) else value


def _along(array: Any, axis: int, first: int, step: int) -> Any:
    return array[..., first::step] if axis == -1 else array[..., first::step, :]


def _put(found: Any, target: Any) -> None:
    if is_numpy(found):
        import numpy as np

        np.copyto(target, found, casting="unsafe")
    else:
        target.copy_(found)


def _empty(shape: tuple[int, ...], name: str, like: Any) -> Any:
    if is_numpy(like):
        import numpy as np

        return np.empty(shape, name)
    import torch

    return torch.empty(shape, dtype=torch.uint8, device=like.device)


def _longer(words: Any, axis: int, by: int) -> Any:
    shape = list(words.shape)
    shape[axis] = by
    xp = module(words)
    if is_numpy(words):
        return xp.concatenate([words, xp.zeros(shape, words.dtype)], axis)
    return xp.cat([words, words.new_zeros(shape)], axis)
