"""Elements as raw numbers: what eager twins work on, so that no bit passes through a float."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..codecs._arrays import carrier as carrier
from ..codecs._arrays import scratch as scratch
from ..codecs._arrays import typed as typed
from ..core.spec import BITS, Spec, encode
from ._op import OpError

if TYPE_CHECKING:
    import numpy as np


def raw(dtype: str, value: float) -> np.ndarray[Any, Any]:
    """The raw element that equals `value`, as an array of rank 0. OpError M303 if `dtype` cannot
    hold it exactly.
    """
    import numpy as np

    packed = encoded("value", dtype, value)
    if BITS[dtype] < 8:
        # the first element lies in the low bits of the unit's first byte
        return np.array(packed[0] & ((1 << BITS[dtype]) - 1), "u1")
    return np.frombuffer(packed, carrier(dtype)).reshape(())


def encoded(label: str, dtype: str, value: float) -> bytes:
    """`spec.encode`, failing with OpError M303."""
    try:
        return encode(dtype, value)
    except (ValueError, OverflowError) as error:
        reason = str(error) if isinstance(error, ValueError) else f"{dtype} cannot hold {value}"
        raise OpError(
            "M303", f"{label}: {reason}", help="give a value that the dtype holds exactly"
        ) from None


def holds(label: str, specs: Sequence[Spec], value: float | None) -> None:
    """OpError M303 unless every dtype holds `value` exactly; None is held by all."""
    if value is not None:
        for spec in specs:
            encoded(label, spec.dtype, value)
