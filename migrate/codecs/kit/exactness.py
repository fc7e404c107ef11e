"""Which formats are decoded without rounding, whatever the parts hold."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from math import frexp, isfinite

from ...core.spec import Spec
from ...elements.codes import FLOATS
from .layout import ElementType, Grid, NumberLayout


def is_exact(layout: NumberLayout, specs: Mapping[str, Spec], dtype: str) -> bool:
    """Whether decoding to `dtype` keeps every value: codes times powers of two, by their dtype
    (E8M0) or because `decode` refuses others. It refuses as well the few products that are beyond
    the range of `dtype`.
    """
    form, elements = FLOATS[dtype], layout.elements
    # float16 has so few exponents that most scales of a checkpoint would be beyond it
    if form.exponent < 8 or elements.part or not layout.scale:
        return False
    if layout.zero is not None or layout.after is not None or layout.less:
        return False
    return _digits(elements) <= form.mantissa + 1 and all(
        term.how == "*"
        and isinstance(term.what, Grid)
        and term.what.elements is None
        and (term.what.powers or _stands_for(term.what, specs) == "float8_e8m0fnu")
        for term in layout.scale
    )


@lru_cache(maxsize=64)
def _digits(elements: ElementType) -> int:
    """The most binary digits of what a code stands for."""
    if elements.dtype:
        return FLOATS[elements.dtype].mantissa + 1
    # of a number from 1/2 to 1 the denominator has a zero for each
    parts = (frexp(n)[0].as_integer_ratio() for n in elements.numbers if isfinite(n))
    return max((below.bit_length() - 1 for _, below in parts), default=elements.bits)


def _stands_for(grid: Grid, specs: Mapping[str, Spec]) -> str:
    if grid.field is not None:
        return grid.field.dtype
    dtype = specs[grid.role].dtype
    return grid.byte if dtype == "uint8" else dtype
