"""Stored parts of random codes and scales, with which a codec that does not encode is tested."""

from __future__ import annotations

from typing import Any

from ...core.spec import Spec
from ...core.spec import spec as spec_of
from ...elements.raw import carrier


def random_part(dtype: str, *shape: int) -> tuple[Spec, Any]:
    """(spec, raw elements): integers of any bits, or float16 scales from 0.01 to 1."""
    import numpy as np

    dice = np.random.default_rng([*shape])
    if dtype == "float16":
        return spec_of(dtype, shape), dice.uniform(0.01, 1, shape).astype("<f2").view("<u2")
    width = np.dtype(carrier(dtype)).itemsize
    raw = dice.integers(0, 256, (*shape[:-1], shape[-1] * width), "u1")
    return spec_of(dtype, shape), raw.view(carrier(dtype))


def index_part(columns: int, groups: int, shuffled: bool = False) -> tuple[Spec, Any]:
    """(spec, raw elements): the group of each column, groups as equal as they can be."""
    import numpy as np

    index = np.arange(columns, dtype="<u4") // -(-columns // groups)
    if shuffled:
        index = np.random.default_rng(columns).permutation(index)
    return spec_of("int32", (columns,)), index
