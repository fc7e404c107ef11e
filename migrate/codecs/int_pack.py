"""`int-pack`: integers of 2 to 8 bits in words of 32 along rows, which compressed-tensors
calls pack-quantized; Kimi K2's experts are among them.

A number is (code - zero) * scale; without a zero the middle of the codes stands for 0. A scale is
that of a row or of a group of its columns; zeros are packed down the rows. The shape of the numbers
is a part, because the last word of a row may have room for more (`kit.word_packing`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..core.part_names import ACTIVATIONS, Convention
from ..core.spec import Spec
from ..core.spec import spec as spec_of
from .base import ACTIVATION_SCALES, Flag, Integer, OpError, Text, dataclass
from .kit import word_packing as words
from .kit.arguments import integer_bound, like_arg, non_finite_arg, symmetric_arg
from .kit.encoding_codec import EncodingCodec
from .kit.groups import group_arg, group_stored, has_whole_groups
from .kit.layout import FLOATS, NumberLayout, integers
from .kit.scale_rules import ScaleRule

# of codes and of zeros; codes within words came before those across their borders
LENGTHS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("[N, K*bits/32]", "[N*bits/32, K/group]", {}),
    *(("[N, K*bits/32]", "[N*bits/32, K/group]", {"bits": bits}) for bits in (5, 6, 7)),
    *(
        (f"[N, K/{32 // bits}]", f"[N/{32 // bits}, K/group]", {"bits": bits, "form": "words"})
        for bits in (3, 5, 6)
    ),
)


class IntPack(EncodingCodec):
    name = "int-pack"
    summary = "integers of 2 to 8 bits packed in words, with a scale for each row or group"
    parts = ("weight", "scale", "shape", "zero", "group")
    optional = ("zero", "group")
    planning = ("shape",)
    unused = ACTIVATION_SCALES
    follow = ("scale", "zero")
    numbers = FLOATS
    names = tuple(
        Convention(
            "compressed-tensors",
            {
                "weight": f"{{w}}.weight_packed int32 {packed}",
                "scale": "{w}.weight_scale wide [N, K/group]",
                "shape": "{w}.weight_shape? int64|int32 [2]",
                "zero": f"{{w}}.weight_zero_point? int32 {zeros}",
                "group": "{w}.weight_g_idx? int32|int64 [K]",
            },
            beside=ACTIVATIONS,
            arguments=said,
            sizes={"shape": ("N", "K")},
            accepts=has_whole_groups,
        )
        for packed, zeros, said in LENGTHS
    )

    @dataclass(frozen=True, slots=True)
    class Args:
        bits: Integer | None = words.bits_arg()
        group: Integer | None = group_arg()
        form: Text | None = words.form_arg()
        symmetric: Flag | None = symmetric_arg()
        like: Text = like_arg("compressed-tensors", "kimi")
        shape: Text = words.shape_arg()
        non_finite: Text = non_finite_arg()

    @dataclass(frozen=True, slots=True)
    class Sized(Args):
        """Arguments for numbers of a shape that was read."""

        size: tuple[int, int] = (0, 0)

    def validate(self, args: Any, encoding: bool) -> None:
        super().validate(args, encoding)
        if args.form and args.bits and not words.is_split(args.bits):
            raise OpError("M308", f"int-pack: `form` is of 3, 5, 6 or 7 bits, not {args.bits}")
        if args.like == "kimi" and args.symmetric is False:
            raise OpError("M308", "int-pack: `like: kimi` is symmetric")

    def settle(self, args: Any, specs: Sequence[Any], values: Mapping[str, bytes]) -> Any:
        there, group = self.by_role(specs), args.group
        size = words.size_stored(self.name, there, values["shape"])
        bits, form = words.form_stored(self.name, (args.bits, args.form), size, there)
        if group is None and "group" not in there:
            group = group_stored(self.name, size[1], there["scale"])
        return self.Sized(bits, group, form, size=size, non_finite=args.non_finite)

    def layout(self, args: Any, specs: Mapping[str, Spec]) -> NumberLayout:
        form, size, group = self._form(args), getattr(args, "size", None), args.group
        if size is None and group is None and specs["scale"].numel:
            # of parts that were made for whole rows of words
            columns = form.packing().capacity(specs["weight"].shape[-1], "int32")
            group = group_stored(self.name, columns, specs["scale"])
        index, positive = "group" if "group" in specs else "", args.non_finite != "keep"
        return form.layout(self.name, group, size, "zero" in specs, positive, index)

    def written(self, args: Any, spec: Spec) -> NumberLayout:
        return self._form(args).layout(self.name, args.group, spec.shape, args.symmetric is False)

    def _form(self, args: Any) -> words.WordForm:
        return words.WordForm(args.bits or 4, args.form)

    def dtypes(self, args: Any, spec: Spec) -> dict[str, str]:
        return {"scale": spec.dtype}

    def encoded(self, args: Any, spec: Spec) -> Sequence[Spec | None]:
        words.check_groups(self.name, spec, args.group)
        weight, scale, _, zero, _ = super().encoded(args, spec)
        return [weight, scale, spec_of(args.shape, (2,)), zero, None]

    def foreseen(self, args: Any, spec: Spec) -> Mapping[str, bytes]:
        return {"shape": words.size_bytes(spec.shape, args.shape)}

    def rule(self, args: Any, spec: Spec) -> ScaleRule:
        return ScaleRule("integer", args.like, asymmetric=args.symmetric is False)

    def returns(self, args: Any, spec: Spec) -> str:
        if args.like != "kimi":
            return super().returns(args, spec)
        most = (1 << ((args.bits or 4) - 1)) - 1
        return f"depends on the data: codes of groups with a code of {most} or -{most}"

    def bound(self, args: Any) -> str:
        return integer_bound(integers(args.bits or 4), args.symmetric, "the group")

    def samples(self) -> Iterable[tuple[Any, Spec]]:
        for dtype, shape, said in (
            ("bfloat16", (6, 256), {"group": 128}),
            ("float32", (5, 85), {"bits": 3}),
            ("float32", (35, 70), {"bits": 3, "form": "words", "group": 35, "symmetric": False}),
            ("bfloat16", (9, 96), {"group": 32, "like": "kimi", "shape": "int32"}),
            ("float16", (17, 64), {"group": 32, "symmetric": False}),
            ("float16", (7, 50), {"bits": 8, "non_finite": "saturate"}),
            ("bfloat16", (3, 33), {"bits": 2, "symmetric": False, "non_finite": "keep"}),
            ("float32", (33, 75), {"bits": 5, "group": 25, "symmetric": False}),
            ("float32", (4, 70), {"bits": 6, "form": "words"}),
            ("bfloat16", (3, 100), {"bits": 7, "form": "dense"}),
        ):
            yield self.Args(**said), Spec(dtype, shape)


CODEC = IntPack()
