"""Which formats are decoded without rounding, whatever the parts hold."""

from __future__ import annotations

from collections.abc import Mapping

from ...core.spec import Spec
from ...elements.codes import FLOATS
from .layout import Grid, NumberLayout


def is_exact(layout: NumberLayout, specs: Mapping[str, Spec], dtype: str) -> bool:
    """Whether decoding to `dtype` keeps every value: codes times powers of two, by their dtype
    (E8M0) or because `decode` refuses others. It refuses as well the few products that are beyond
    the range of `dtype`.
    """
    form, elements = FLOATS[dtype], layout.elements
    # float16 has so few exponents that most scales of a checkpoint would be beyond it
    if form.exponent < 8 or elements.part or elements.numbers or not layout.scale:
        return False
    if layout.zero is not None or layout.after is not None or layout.less:
        return False
    digits = FLOATS[elements.dtype].mantissa + 1 if elements.dtype else elements.bits
    return digits <= form.mantissa + 1 and all(
        term.how == "*"
        and isinstance(term.what, Grid)
        and term.what.elements is None
        and (term.what.powers or _stands_for(term.what, specs) == "float8_e8m0fnu")
        for term in layout.scale
    )


def _stands_for(grid: Grid, specs: Mapping[str, Spec]) -> str:
    dtype = specs[grid.role].dtype
    return grid.byte if dtype == "uint8" else dtype
