"""Arrays of raw elements, and which classes of tensor are their bytes and nothing else.

Raw elements are unsigned integers of the element's width, so that no bit passes through a float. A
tensor of another class than torch's own may hold scales, several tensors or a view of other
processes beside its bytes, so what is true of its memory is asked here and nowhere else.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..core.errors import OpError
from ..core.spec import BITS, Spec
from .codes import encode

if TYPE_CHECKING:
    import numpy as np
    import torch

_OWN = threading.local()

_CARRIERS = {8: "u1", 16: "<u2", 32: "<u4", 64: "<u8", 128: "V16"}


def carrier(dtype: str) -> str:
    """The numpy dtype of one raw element of `dtype`; below a byte a uint8 holds each code."""
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
    """At least `nbytes` of uint8 of this thread's memory called `name`: fresh memory is slow."""
    import numpy as np

    kept: dict[str, np.ndarray[Any, Any]] = _OWN.__dict__
    found = kept.get(name)
    if found is None or found.size < nbytes:
        found = kept[name] = np.empty(nbytes, "u1")
    return found[:nbytes]


def raw(dtype: str, value: float) -> np.ndarray[Any, Any]:
    """The raw element equal to `value`, of rank 0. OpError M303 if `dtype` cannot hold it whole."""
    import numpy as np

    packed = encoded("value", dtype, value)
    if BITS[dtype] < 8:
        # the first element lies in the low bits of the unit's first byte
        return np.array(packed[0] & ((1 << BITS[dtype]) - 1), "u1")
    return np.frombuffer(packed, carrier(dtype)).reshape(())


def encoded(label: str, dtype: str, value: float) -> bytes:
    """`codes.encode`, failing with OpError M303."""
    try:
        return encode(dtype, value)
    except (ValueError, OverflowError) as error:
        reason = str(error) if isinstance(error, ValueError) else f"{dtype} cannot hold {value}"
        raise OpError(
            "M303", f"{label}: {reason}", help="give a value that the dtype holds exactly"
        ) from None


def check_holds(label: str, specs: Sequence[Spec], value: float | None) -> None:
    """OpError M303 unless every dtype holds `value` exactly; None is held by all."""
    if value is not None:
        for spec in specs:
            encoded(label, spec.dtype, value)


def unpack(packed: Any, spec: Spec) -> np.ndarray[Any, Any]:
    """The raw elements of packed row-major bytes. Below a byte the first is in the low bits."""
    import numpy as np

    bits = BITS[spec.dtype]
    if not spec.numel:
        return np.zeros(spec.shape, carrier(spec.dtype))
    if bits >= 8:
        return np.frombuffer(packed, carrier(spec.dtype), spec.numel).reshape(spec.shape)
    stream = np.unpackbits(np.frombuffer(packed, "u1", spec.nbytes), bitorder="little")
    codes = stream[: spec.numel * bits].reshape(-1, bits)
    weights = (1 << np.arange(bits)).astype("u1")
    out: np.ndarray[Any, Any] = (codes * weights).sum(axis=1, dtype="u1")
    return out.reshape(spec.shape)


def as_bytes(packed: Any, spec: Spec) -> np.ndarray[Any, Any]:
    """Packed row-major bytes as uint8, in rows of the last axis, which ends with a whole byte."""
    import numpy as np

    *lead, last = spec.shape
    found = np.frombuffer(packed, "u1", spec.nbytes) if spec.numel else np.zeros(0, "u1")
    return found.reshape(*lead, last * BITS[spec.dtype] // 8)


def pack(array: np.ndarray[Any, Any], dtype: str) -> memoryview:
    """The packed row-major bytes of raw elements of `dtype`."""
    import numpy as np

    bits = BITS[dtype]
    flat = np.ascontiguousarray(array).reshape(-1)
    if bits < 8:
        stream = (flat.astype("u1")[:, None] >> np.arange(bits, dtype="u1")) & 1
        flat = np.packbits(stream.reshape(-1).astype("u1"), bitorder="little")
    return flat.view("u1").data if flat.size else memoryview(b"")


def is_plain_class(value: Any) -> bool:
    """Whether a value is a tensor of torch's own classes, wherever it lies: with bytes, these are
    all that it is. One on the meta device has none.
    """
    import torch

    return type(value) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def has_plain_bytes(value: Any) -> bool:
    """Whether a tensor is its bytes and nothing else, and has them: not on the meta device."""
    return is_plain_class(value) and not value.is_meta


def is_dtensor(value: Any) -> bool:
    """Whether a value is a DTensor, of torch or derived from it; their module is not imported."""
    return any(
        c.__name__ == "DTensor" and c.__module__.startswith("torch.distributed.")
        for c in type(value).__mro__
    )
