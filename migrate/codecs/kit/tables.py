"""The numbers behind codes and bytes, and float32 rounded to what numbers are stored as; one text
for numpy and torch, which give the same bits.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ...elements.numbers import is_numpy, look_up, narrow_bfloat16, narrow_float16, numbers
from ...elements.raw import carrier, typed
from .layout import ElementType

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

# the one NaN that decoding makes: which sign and payload a product would have depends on the
# processor
NAN = {"float32": 0x7FC00000, "bfloat16": 0x7FC0, "float16": 0x7E00}

# numbers from which on a call of torch takes less than it saves
_MANY = 1 << 10


def imported() -> Any:
    """torch where something has imported it, which takes a second or more, else None."""
    return sys.modules.get("torch")


@lru_cache(maxsize=64)
def values(elements: ElementType) -> Array:
    """The float32 number of each code; of a table that is a part nothing."""
    import numpy as np

    found: Array = np.array(elements.values(), "<f4")
    found.setflags(write=False)
    return found


@lru_cache(maxsize=64)
def _values_on(elements: ElementType, device: str) -> Any:
    import torch

    return torch.from_numpy(values(elements).copy()).to(device)


def values_like(elements: ElementType, like: Any) -> Any:
    """`values`, as numpy or as a tensor on the device of `like`."""
    return values(elements) if is_numpy(like) else _values_on(elements, str(like.device))


def widened(raw: Any, dtype: str) -> Any:
    """Raw elements of a float dtype of at most 32 bits as float32; E8M0 as powers of two, whose
    byte 255 is NaN.
    """
    if is_numpy(raw):
        return numbers(raw, dtype)
    if dtype in ("float32", "bfloat16", "float16"):
        return typed(raw, dtype).float()
    codes = typed(raw, "uint8")
    return look_up(dtype, codes.reshape(-1)).reshape(codes.shape)


def narrowed(floats: Any, dtype: str, out: Any, finite: bool = False) -> None:
    """Fills `out`, raw elements of `dtype`, with float32 rounded to the nearest, half to even; NaN
    is `NAN`. `floats` is contiguous and may be overwritten; `finite`: there is no NaN among them.
    """
    if is_numpy(floats):
        _narrowed_by_numpy(floats, dtype, out, finite)
    else:
        _narrowed_by_torch(floats, dtype, out)


def _narrowed_by_numpy(floats: Array, dtype: str, out: Array, finite: bool) -> None:
    import numpy as np

    if not floats.size:
        return
    nan = None
    # the largest is NaN where any is
    if not finite and np.isnan(np.maximum.reduce(floats, axis=None)):
        nan = np.isnan(floats)
        floats[nan] = 0
    if dtype == "float32":
        out[...] = floats.view("<u4")
    elif floats.size >= _MANY and (torch := imported()) is not None:
        # torch has the processor's own conversions
        typed(out.view("<i2"), dtype).copy_(torch.from_numpy(floats))
    elif dtype == "float16":
        narrow_float16(floats, out)
    elif out.flags.c_contiguous:
        narrow_bfloat16(floats.view("<u4").reshape(-1), out.reshape(-1))
    else:
        made = np.empty(floats.size, carrier(dtype))
        narrow_bfloat16(floats.view("<u4").reshape(-1), made)
        out[...] = made.reshape(out.shape)
    if nan is not None:
        out[nan] = NAN[dtype]


def _narrowed_by_torch(floats: Any, dtype: str, out: Any) -> None:
    import torch

    target = typed(out, dtype)
    target.copy_(floats)
    whole = target.view({16: torch.int16, 32: torch.int32}[8 * target.element_size()])
    whole.masked_fill_(floats.isnan(), NAN[dtype])
