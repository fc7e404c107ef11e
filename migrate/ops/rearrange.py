"""`rearrange`: split, permute and join axes, in the notation of einops."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ..core import view
from ._notation import ONE_ARROW, AxesRecipe, check_axes, parse, solve, unknown_backwards
from .base import Array, Axes, OneWay, Only, Op, OpCall, Shape, Text, arg, dataclass, step

if TYPE_CHECKING:
    from ..core.view import View


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
