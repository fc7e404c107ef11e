"""Arrays of raw elements, shared by codecs and ops: unsigned integers of the element's width, so
that no bit passes through a float.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from ..core.spec import BITS

if TYPE_CHECKING:
    import numpy as np
    import torch

_OWN = threading.local()

_CARRIERS = {8: "u1", 16: "<u2", 32: "<u4", 64: "<u8", 128: "V16"}


def carrier(dtype: str) -> str:
    """The numpy dtype that holds one raw element of `dtype`; below a byte one uint8 holds one
    element's code.
    """
    return _CARRIERS[max(BITS[dtype], 8)]


def typed(array: Any, dtype: str) -> torch.Tensor:
    """A torch tensor of `dtype` over the same memory: of a numpy array of raw elements, or of a
    torch tensor of them.

    The 6- and 4-bit floats, which torch cannot compute with, come as uint8, one code a byte.
    """
    import torch

    tensor = array if isinstance(array, torch.Tensor) else torch.from_numpy(array)
    return tensor if BITS[dtype] < 8 else tensor.view(getattr(torch, dtype))


def scratch(name: str, nbytes: int) -> np.ndarray[Any, Any]:
    """At least `nbytes` of this thread's memory called `name`, as uint8: what fresh memory costs is
    faulting it in.
    """
    import numpy as np

    kept: dict[str, np.ndarray[Any, Any]] = _OWN.__dict__
    found = kept.get(name)
    if found is None or found.size < nbytes:
        found = kept[name] = np.empty(nbytes, "u1")
    return found[:nbytes]
