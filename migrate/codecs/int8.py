"""`int8`: whole numbers of eight bits with a scale for the tensor, each row or each group of a row,
(code - zero) * scale, as compressed-tensors, ModelOpt and torchao store them; most have no zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..core.part_names import ACTIVATIONS, Convention
from ..core.spec import Spec
from .base import ACTIVATION_SCALES, Flag, Integer, OpError, Text, arg, dataclass
from .kit.arguments import integer_bound, like_arg, non_finite_arg, scale_form_arg, symmetric_arg
from .kit.encoding_codec import EncodingCodec
from .kit.granularity import granularity
from .kit.groups import check_whole_groups, group_arg, group_stored
from .kit.layout import FLOATS, Grid, NumberLayout, plain, signed, times
from .kit.scale_rules import ScaleRule

CT, MODELOPT, TORCHAO = "compressed-tensors", "modelopt", "torchao"
_OF = ("[*, N, 1]", "[*, N, K/group]")
# what an object of torchao has beside codes, scales and zeros, in the order of its attributes
_BESIDE = {
    "pre_quant_scale": "pre_scale", "input_scale": "quant_scale",
    "input_zero_point": "quant_zero_point",
}  # fmt: skip
# producer, its names, what travels with them, and scales of a tensor, of each row and of groups
_NAMES: tuple[tuple[Any, ...], ...] = (
    (CT, "{w}.weight", "{w}.weight_scale", "{w}.weight_zero_point", ACTIVATIONS, "[*, 1]", *_OF),
    ("ModelOpt", "{w}.weight", "{w}.weight_scale", "", ACTIVATIONS, "", "[*, N]", ""),
    *(
        (TORCHAO, f"{at}qdata", f"{at}scale", f"{at}zero_point",
         {role: f"{at}act_{name}" for role, name in _BESIDE.items()}, "[1, 1]", *_OF)
        for at in ("{w}._weight_", "{w}.")
    ),
)  # fmt: skip


def _groups(arguments: Mapping[str, Any]) -> bool:
    """Whether rows are several whole groups."""
    group, columns = arguments.get("group"), arguments["K"]
    return group is not None and group < columns and columns % group == 0


# a scale of each row is not that of the tensor
ACCEPTS = {"tensor": None, "channel": lambda sizes: bool(sizes["N"] > 1), "group": _groups}


class Int8(EncodingCodec):
    name = "int8"
    summary = "whole numbers of 8 bits with a scale for the tensor, each row or group"
    parts = ("weight", "scale", "zero")
    optional = ("zero",)
    unused = ACTIVATION_SCALES
    follow = ("scale", "zero")
    numbers = FLOATS
    names = tuple(
        Convention(
            who,
            {"weight": f"{weight} int8 [*, N, K]", "scale": f"{scale} wide {shape}"}
            | ({"zero": f"{zero}? int8 {shape}"} if zero else {}),
            beside=beside,
            arguments={"granularity": of} if of != "group" else {},
            accepts=ACCEPTS[of],
        )
        for who, weight, scale, zero, beside, *shapes in _NAMES
        for of, shape in zip(ACCEPTS, shapes, strict=True)
        if shape
    )

    @dataclass(frozen=True, slots=True)
    class Args:
        granularity: Text | None = arg(
            "what has a scale: tensor or channel (a row); by default as shapes say, or channel",
            words=("tensor", "channel"),
            default=None,
        )
        group: Integer | None = group_arg()
        like: Text = like_arg(CT, MODELOPT, TORCHAO)
        form: Text | None = scale_form_arg(
            "of rows [N, 1] (compressed-tensors, torchao) or [N] (modelopt)", CT, MODELOPT, TORCHAO
        )
        symmetric: Flag | None = symmetric_arg()
        non_finite: Text = non_finite_arg()

    def validate(self, args: Any, encoding: bool) -> None:
        super().validate(args, encoding)
        if args.group and (of := args.granularity):
            raise OpError("M308", f"int8: `group` has a scale, not the {of}")
        if args.symmetric is False and {args.like, args.form or CT} != {CT}:
            raise OpError("M308", f"int8: codes with a zero are those of {CT}")

    def layout(self, args: Any, specs: Mapping[str, Spec]) -> NumberLayout:
        weight, scale, group = specs["weight"], specs["scale"], args.group
        # of rows one axis fewer
        of_groups = len(scale.shape) == len(weight.shape) > 0
        if group is None and args.granularity is None and of_groups:
            group = group_stored(self.name, weight.shape[-1], scale)
        seen = granularity(self.name, specs, args.granularity or group, None)
        of = args.granularity or ("channel" if seen == "channel" else "tensor")
        return self._layout(args, of, group, "zero" in specs, scale.numel != 1)

    def written(self, args: Any, spec: Spec) -> NumberLayout:
        of, has_zero = args.granularity or "channel", args.symmetric is False
        return self._layout(args, of, args.group, has_zero)

    def _layout(
        self, args: Any, of: str, group: int | None, has_zero: bool, leading: bool = True
    ) -> NumberLayout:
        block = (1, group) if group else (int(of == "channel"), 0)
        lead, codes = leading or of == "channel" or bool(group), plain("int8")
        zero = Grid("zero", block, lead, elements=signed(8), packing=codes) if has_zero else None
        scale = times(Grid("scale", block, lead, positive=args.non_finite != "keep"))
        return NumberLayout(self.name, signed(8), codes, scale, zero, axes=2)

    def dtypes(self, args: Any, spec: Spec) -> dict[str, str]:
        return {"scale": spec.dtype if args.like == CT else "float32"}

    def encoded(self, args: Any, spec: Spec) -> Sequence[Spec | None]:
        if args.group and len(spec.shape) > 1:
            check_whole_groups(self.name, spec.shape[-1], args.group)
        weight, *grids = super().encoded(args, spec)
        rows = args.granularity != "tensor"
        bare = rows and not args.group and (args.form or args.like) == MODELOPT
        if bare or not rows:
            grids = [one and Spec(one.dtype, one.shape[:-1]) for one in grids]
        return [weight, *grids]

    def rule(self, args: Any, spec: Spec) -> ScaleRule:
        return ScaleRule("integer", args.like, asymmetric=args.symmetric is False)

    def bound(self, args: Any) -> str:
        return integer_bound(signed(8), args.symmetric, "what shares a scale")

    def samples(self) -> Iterable[tuple[Any, Spec]]:
        for dtype, shape, said in (
            ("bfloat16", (9, 70), {}),
            ("float32", (4, 64), {"group": 32, "symmetric": False}),
            ("float16", (2, 5, 33), {"granularity": "tensor"}),
            ("bfloat16", (3, 4, 40), {"like": MODELOPT}),
            ("bfloat16", (7, 50), {"like": TORCHAO, "non_finite": "saturate"}),
            ("float32", (6, 24), {"form": MODELOPT, "non_finite": "keep"}),
            ("float16", (7, 33), {"symmetric": False, "granularity": "tensor"}),
        ):
            yield self.Args(**said), Spec(dtype, shape)


CODEC = Int8()
