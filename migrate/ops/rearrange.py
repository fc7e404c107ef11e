"""`rearrange`: split, permute and join axes, in the notation of einops.

Text -> expression -> recipe, each step cached. An expression is known when the rule is loaded, a
recipe when the shape is. Axes that only one side names, lengths other than 1, and `...` in
parentheses are not part of the notation: they could not be undone. Its source: einops, `rearrange`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any, NoReturn

from ..core import view
from ..core.errors import did_you_mean
from .base import (
    Array,
    Axes,
    OneWay,
    Only,
    Op,
    OpCall,
    OpError,
    Shape,
    Text,
    arg,
    dataclass,
    format_shape,
    step,
)

if TYPE_CHECKING:
    from ..core.view import View

ELLIPSIS = "..."
ONE_ARROW = "(?:[^-]|-(?!>))*->(?:[^-]|-(?!>))*"
_TOKEN = re.compile(r"\s*(\.\.\.|[()]|\w+|\S)")

Side = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Expression:
    """Both sides of a pattern: per axis its names, none for `1` and `()`, `...` for the rest."""

    pattern: str
    left: Side
    right: Side

    @property
    def names(self) -> frozenset[str]:
        return frozenset(n for group in self.left for n in group)


@dataclass(frozen=True, slots=True)
class AxesRecipe:
    """What to do with a tensor: reshape to `split`, permute by `order`, reshape to `joined`."""

    split: Shape
    order: tuple[int, ...]
    joined: Shape


@lru_cache(maxsize=1024)
def parse(pattern: str) -> Expression:
    """The expression of `pattern`. OpError M308 naming the axis or character that makes none."""
    sides = pattern.split("->")
    if len(sides) != 2:
        _refuse(pattern, f"it has {len(sides) - 1} `->`, it needs one")
    left, right = (_side(pattern, s) for s in sides)
    on_left, on_right = ({n for group in side for n in group} for side in (left, right))
    for here, there, side in ((on_left, on_right, "right"), (on_right, on_left, "left")):
        for name in sorted(here - there):
            _refuse(
                pattern,
                f"axis {name} does not stand on the {side}",
                did_you_mean(name, sorted(there - here)),
            )
    return Expression(pattern, left, right)


@lru_cache(maxsize=4096)
def solve(pattern: str, axes: tuple[tuple[str, int], ...], shape: Shape) -> AxesRecipe:
    """The recipe for a tensor of `shape`, lengths of axes taken from `axes` and from the shape.

    OpError M304 for a wrong rank, M301 and M302 for lengths that do not fit, with numbers.
    """
    expression = parse(pattern)
    check_axes(expression, dict(axes))
    left, right = _expanded(expression, shape)
    known = dict(axes)
    for number, (group, length) in enumerate(zip(left, shape, strict=True)):
        _solve_group(pattern, number, group, length, known, shape)
    flat = [n for group in left for n in group]
    return AxesRecipe(
        tuple(known[n] for n in flat),
        tuple(flat.index(n) for group in right for n in group),
        tuple(prod(known[n] for n in group) for group in right),
    )


def check_axes(expression: Expression, axes: Mapping[str, int]) -> None:
    """OpError M308 for an entry of `axes` that is not in the pattern or is no length."""
    for name, length in axes.items():
        if name not in expression.names or name == ELLIPSIS:
            _refuse(
                expression.pattern,
                f"`axes` gives {name}, which it does not name",
                did_you_mean(name, sorted(expression.names)),
            )
        if length < 0:
            _refuse(expression.pattern, f"`axes` gives {name} the length {length}")


def unknown_backwards(expression: Expression, axes: Mapping[str, int]) -> list[str]:
    """The axes whose lengths the right side does not give: all unknown ones but a group's last."""
    missing: list[str] = []
    for group in expression.right:
        unknown = [n for n in group if n not in axes]
        missing += unknown[:-1]
    return missing


def _side(pattern: str, text: str) -> Side:
    groups: list[tuple[str, ...]] = []
    inside: list[str] | None = None
    seen: set[str] = set()
    for token in _TOKEN.findall(text):
        if token == "(":
            if inside is not None:
                _refuse(pattern, "parentheses within parentheses")
            inside = []
        elif token == ")":
            if inside is None:
                _refuse(pattern, "`)` without `(`")
            groups.append(tuple(inside))
            inside = None
        else:
            name = _name(pattern, token, seen)
            if inside is None:
                groups.append(name)
            elif token == ELLIPSIS:
                _refuse(
                    pattern,
                    "`...` in parentheses, where its axes could not be found again",
                    "`reshape` joins axes without names",
                )
            else:
                inside += name
    if inside is not None:
        _refuse(pattern, "`(` without `)`")
    return tuple(groups)


def _name(pattern: str, token: str, seen: set[str]) -> tuple[str, ...]:
    if token == "1":
        return ()
    if token.isdigit():
        _refuse(
            pattern,
            f"the length {token}; only 1 may stand for itself",
            "give the axis a name, and its length in `axes`",
        )
    if token != ELLIPSIS and not (
        token.isidentifier()
        and token.isascii()
        and not token.startswith("_")
        and not token.endswith("_")
    ):
        _refuse(
            pattern,
            f"{token} is not the name of an axis",
            "names are letters, digits and inner underscores, and begin with a letter",
        )
    if token in seen:
        _refuse(pattern, f"{token} stands twice on one side")
    seen.add(token)
    return (token,)


def _expanded(expression: Expression, shape: Shape) -> tuple[Side, Side]:
    """Both sides with `...` replaced by as many axes as the tensor has to spare."""
    has_rest = (ELLIPSIS,) in expression.left
    spare = len(shape) - len(expression.left) + has_rest
    if spare < 0 or (spare and not has_rest):
        least = "at least " if has_rest else ""
        raise OpError(
            "M304",
            f'rearrange "{expression.pattern}": the left side names '
            f"{least}{len(expression.left) - has_rest} axes, "
            f"the tensor has rank {len(shape)}, shape {format_shape(shape)}",
        )
    rest = tuple((f"...{i}",) for i in range(spare))
    left, right = (
        tuple(g for group in side for g in (rest if group == (ELLIPSIS,) else (group,)))
        for side in (expression.left, expression.right)
    )
    return left, right


def _solve_group(
    pattern: str,
    number: int,
    group: tuple[str, ...],
    length: int,
    known: dict[str, int],
    shape: Shape,
) -> None:
    unknown = [n for n in group if n not in known]
    product = prod(known[n] for n in group if n in known)
    stated = ", ".join(f"{n} = {known[n]}" for n in group if n in known)
    where = (
        f'rearrange "{pattern}": axis {number} of shape {format_shape(shape)} has {length} elements'
    )
    if len(unknown) > 1:
        raise OpError(
            "M301",
            f'rearrange "{pattern}": the lengths of {" and ".join(unknown)} in axis {number} of '
            f"shape {format_shape(shape)} are not known",
            help=f"give all but one in `axes`: {{{', '.join(f'{n}: …' for n in unknown[:-1])}}}",
        )
    if not unknown:
        if product != length:
            raise OpError("M301", f"{where}, {stated or '1 in the pattern'} makes {product}")
    elif product == 0 or length % product:
        raise OpError(
            "M302", f"{where}, not divisible by {product} ({stated}) to give {unknown[0]}"
        )
    else:
        known[unknown[0]] = length // product


def _refuse(pattern: str, why: str, help: str | None = None) -> NoReturn:
    raise OpError("M308", f'rearrange "{pattern}": {why}', help=help)


class Rearrange(Op):
    summary = "splits, permutes and joins axes by name, as einops writes it"

    @dataclass(frozen=True, slots=True)
    class Args:
        pattern: Text = arg(
            'axes before and after, such as "(h d two) i -> (h two d) i"', form=ONE_ARROW
        )
        axes: Axes = arg(
            "lengths of named axes; those that neither side tells are needed",
            least=1,
            default_factory=dict,
        )
        only: Only | None = arg("limits the op to tensors with these capture values", default=None)

    def validate(self, args: Args) -> None:
        check_axes(parse(args.pattern), args.axes)
        super().validate(args)

    def trace(self, args: Args, views: Sequence[View], parts: int = 1) -> list[View]:
        out = []
        for v in views:
            recipe = _recipe(args, v.shape)
            out.append(
                view.reshape(
                    view.permute(view.reshape(v, recipe.split), recipe.order), recipe.joined
                )
            )
        return out

    def eager(
        self, args: Args, arrays: Sequence[Array], parts: int = 1, dtypes: Sequence[str] = ()
    ) -> list[Array]:
        out = []
        for a in arrays:
            recipe = _recipe(args, a.shape)
            out.append(a.reshape(recipe.split).transpose(recipe.order).reshape(recipe.joined))
        return out

    def invert(self, args: Args, enumerated: bool = False) -> OpCall | OneWay:
        expression = parse(args.pattern)
        missing = unknown_backwards(expression, args.axes)
        if missing:
            wanted = ", ".join(f"{name}: …" for name in missing)
            return OneWay(
                f'rearrange "{args.pattern}" does not say how long {" and ".join(missing)} is',
                f"give `axes: {{{wanted}}}`",
            )
        before, after = args.pattern.split("->")
        return step(
            "rearrange",
            pattern=f"{after.strip()} -> {before.strip()}",
            axes=args.axes,
            only=args.only,
        )

    def samples(self) -> Iterable[tuple[dict[str, Any], list[Shape]]]:
        yield {"pattern": "(h d two) i -> (h two d) i", "axes": {"h": 2, "two": 2}}, [(12, 2)]
        yield {"pattern": "(g x) ... -> g x ...", "axes": {"g": 2}}, [(6, 2)]
        yield {"pattern": "e (i two) h -> e (two i) h", "axes": {"two": 2}}, [(2, 6, 3)]
        yield {"pattern": "a 1 b -> b a ()"}, [(2, 1, 3)]
        yield {"pattern": "h d i -> (h d) i"}, [(2, 3, 2)]


def _recipe(args: Rearrange.Args, shape: Shape) -> AxesRecipe:
    return solve(args.pattern, tuple(sorted(args.axes.items())), shape)


OP = Rearrange()
