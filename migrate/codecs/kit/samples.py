"""Stored parts of random codes and scales, with which a codec that does not encode is tested."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...core.spec import Spec
from ...core.spec import spec as spec_of
from ...elements.raw import carrier

if TYPE_CHECKING:
    from .layout import NumberLayout


def random_part(dtype: str, *shape: int) -> tuple[Spec, Any]:
    """(spec, raw elements): integers of any bits, or floats from 0.01 to 1."""
    import numpy as np

    dice = np.random.default_rng([*shape])
    if dtype in ("float16", "float32"):
        made = dice.uniform(0.01, 1, shape).astype({"float16": "<f2", "float32": "<f4"}[dtype])
        return spec_of(dtype, shape), made.view(carrier(dtype))
    width = np.dtype(carrier(dtype)).itemsize
    raw = dice.integers(0, 256, (*shape[:-1], shape[-1] * width), "u1")
    return spec_of(dtype, shape), raw.view(carrier(dtype))


def random_records(layout: NumberLayout, rows: int, records: int) -> tuple[Spec, Any]:
    """(spec, raw elements): rows of records of any bits, but for scales, which are of sizes from
    2^-3 to 2, as float16 of both signs.
    """
    spec, raw = random_part("uint8", rows, records * layout.record.nbytes)
    for grid in layout.grids():
        if grid.field is not None and (dtype := grid.field.dtype):
            power = dtype == "float8_e8m0fnu"
            high = raw[:, grid.field.at + (not power) :: layout.record.nbytes]
            high[...] = high & 0x03 | 0x7C if power else high & 0x83 | 0x30
    return spec, raw


def random_parts(dtypes: Sequence[str], *shapes: tuple[int, ...]) -> list[tuple[Spec, Any]]:
    """`random_part` of each dtype and shape."""
    return [random_part(dtype, *shape) for dtype, shape in zip(dtypes, shapes, strict=True)]


def bytes_part(data: bytes) -> tuple[Spec, Any]:
    """(spec, raw elements) of bytes, one an element."""
    import numpy as np

    return spec_of("uint8", (len(data),)), np.frombuffer(data, "u1")


def number_part(number: int) -> tuple[Spec, Any]:
    """(spec, raw elements) of an int32 without axes."""
    import numpy as np

    return spec_of("int32", ()), np.array(number, "<u4")


def index_part(columns: int, groups: int, ordered: bool = False) -> tuple[Spec, Any]:
    """(spec, raw elements): the group of each column, groups as equal as they can be, in turn only
    where `ordered`.
    """
    import numpy as np

    index = np.arange(columns, dtype="<u4") // -(-columns // groups)
    if not ordered:
        index = np.random.default_rng(columns).permutation(index)
    return spec_of("int32", (columns,)), index
