"""Arguments that codecs have in common, declared once, and what they say of rounding."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ..base import NON_FINITE, arg

if TYPE_CHECKING:
    from .layout import ElementType

# how the exponent of an MX scale is chosen (`scale_rules.mx`)
POWERS = ("rceil", "floor", "ceil", "even")


def like_arg(*libraries: str, **default: Any) -> Any:
    """`like`: whose arithmetic encodes; the first of them unless `default=` says otherwise."""
    return arg(
        f"whose arithmetic encodes, by default {libraries[0]}",
        words=libraries,
        encoding=True,
        **(default or {"default": libraries[0]}),
    )


def block_arg(doc: str) -> Any:
    """`block`: the rows and columns that share a scale."""
    return arg(doc, least=1, length=2, default=None)


def power_arg(**default: Any) -> Any:
    """`rule`: how the powers of two of MX formats are chosen; rceil unless `default=` says
    otherwise.
    """
    return arg(
        "how scales are chosen: rceil, the least power of two that no code overflows, or floor, "
        "ceil or even",
        words=POWERS,
        encoding=True,
        **(default or {"default": POWERS[0]}),
    )


def scale_form_arg(forms: str, *libraries: str) -> Any:
    """`form`: the shapes in which scales are stored, by whose they are."""
    return arg(
        f"how scales are stored: {forms}; by default that of `like`",
        words=libraries,
        encoding=True,
        default=None,
    )


def non_finite_arg() -> Any:
    """`non_finite`: what becomes of infinities and NaN."""
    return arg(
        "refuse, saturate or keep infinities and NaN",
        words=NON_FINITE,
        encoding=True,
        default=NON_FINITE[0],
    )


def scales_arg(zeros: bool = False) -> Any:
    """`non_finite` of a codec that does not encode: what becomes of odd scales, of which 0 is none
    where blocks of `zeros` have it.
    """
    return arg(
        f"refuse or keep scales that are {'' if zeros else 'zero, '}negative, infinite or NaN",
        words=NON_FINITE[::2],
        default=NON_FINITE[0],
    )


def symmetric_arg() -> Any:
    """`symmetric`: whether integers are without a zero."""
    return arg(
        "whether codes are without a zero, by default unless the rule has a name for it",
        encoding=True,
        default=None,
    )


def integer_bound(elements: ElementType, symmetric: bool | None, of: str) -> str:
    """The largest error of rounding to integers whose scales are those `of` some numbers."""
    if symmetric is not False:
        return rounding_bound(elements, of=f"amax of {of}")
    return f"|error| <= (max - min) / {(1 << elements.bits) - 1} of {of}: a step"


def rounding_bound(elements: ElementType, amax: str = "amax", of: str = "amax of the block") -> str:
    """The largest error of rounding to the nearest of these numbers, as a sentence: blocks are
    scaled such that `amax`, which `of` explains, becomes the largest number.
    """
    known = sorted({abs(number) for number in elements.values() if abs(number) < float("inf")})
    if elements.whole:
        return f"|error| <= {amax} / {(1 << elements.bits) - 2}, {of}: half a step"
    # all steps are equal up to twice the least normal number
    steps = [high - low for low, high in pairwise(known)]
    normal = next(low for low, step in zip(known, steps, strict=False) if step > steps[0])
    kind = elements.dtype.split("_")[-1].removesuffix("fn")
    return (
        f"|error| <= max(|x| / {normal / steps[0]:g}, "
        f"{amax} / {known[-1]:g} / {2 / steps[0]:g}), {of}: half a step of {kind} and of its "
        "subnormals"
    )
