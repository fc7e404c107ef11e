"""`nvfp4`: e2m1 codes, two in a byte, an e4m3 scale for each 16 of a row and a float32 one for all.

What is stored for all no name or shape tells (`form`): ModelOpt and torchao multiply by it,
compressed-tensors divides by it, and of Transformer Engine it is the largest magnitude, which is
taken times 1 / (6 * e4m3_max) after the scale of the block. torchao may do without. ModelOpt's AWQ
has divided columns by what inputs are multiplied by, `pre_quant_scale` [K], and decoding undoes it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..core.part_names import ACTIVATIONS, COLUMNWISE, OF_INPUTS, Convention
from ..core.spec import Spec
from ..core.spec import spec as spec_of
from .base import ACTIVATION_SCALES, Flag, Integer, OpError, Text, arg, dataclass
from .kit.arguments import like_arg, non_finite_arg
from .kit.encoding_codec import EncodingCodec
from .kit.geometry import fitting_padding
from .kit.layout import Grid, NumberLayout, Packing, Term, floats, in_squares, times
from .kit.scale_rules import ScaleRule

E4M3, E2M1, TE_2D = "float8_e4m3fn", "float4_e2m1fn", "te-2d"
MODELOPT, COMPRESSED, TE = FORMS = ("modelopt", "compressed-tensors", "te")
# 1 / (6 * e4m3_max) as a quotient of float64 that float32 rounds
OVER = {448: float.fromhex("0x1.861862p-12"), 256: float.fromhex("0x1.555556p-11")}
# multiples of rows and columns of Transformer Engine's scales; of blocks of 16 x 16 the second
PADDED = ((128, 4), (16, 1), (1, 1))
# the scale of all is written without axes, or with one
WHOLE = {MODELOPT: spec_of("float32", ()), **dict.fromkeys(FORMS[1:], spec_of("float32", (1,)))}
# dtypes and shapes of codes, scales and those of all, and what all parts are called
CODES, EACH = "uint8 [*, N, K/2]", "float32 [*] | [*, 1]"
ROWS, TILES = f"{E4M3} [*, N, K/16]", f"{E4M3} [*, 32*N/128, 16*K/64]"
PARTS = ("weight", "scale", "global")
NAMED: tuple[tuple[Any, ...], ...] = (
    ("ModelOpt", ACTIVATIONS, {"form": MODELOPT}, {}, f"weight {CODES}", f"weight_scale {ROWS}",
     f"weight_scale_2 {EACH}"),
    ("compressed-tensors", ACTIVATIONS, {"form": COMPRESSED}, {}, f"weight_packed {CODES}",
     f"weight_scale {ROWS}", f"weight_global_scale {EACH}"),
    ("Transformer Engine", {**COLUMNWISE, "columnwise_amax": "{w}._amax_columnwise"}, {"form": TE},
     {"swizzled": (False, True)}, f"_rowwise_data {CODES}",
     "_rowwise_scale_inv uint8 [N:128, K/16:4]", "_amax_rowwise float32"),
    *(
        ("torchao", {}, said, {}, f"{at}qdata {CODES}", f"{at}scale {scale}",
         f"{at}per_tensor_scale? float32 [] | [*, 1, 1]")
        for at in ("_weight_", "") for scale, said in ((ROWS, {}), (TILES, {"swizzled": True}))
    ),
)  # fmt: skip


class Nvfp4(EncodingCodec):
    name = "nvfp4"
    summary = "e2m1 codes with an e4m3 scale for each 16 of a row and one scale for all"
    parts = (*PARTS, OF_INPUTS)
    optional, unmade = ("global", OF_INPUTS), (OF_INPUTS,)
    unused, follow = ACTIVATION_SCALES, ("scale", "global")
    numbers = ("float32", "bfloat16", "float16")
    names = tuple(
        Convention(who, {r: f"{{w}}.{t}" for r, t in zip(PARTS, texts, strict=True)}, *more)
        for who, *more, texts in ((*one[:4], one[4:]) for one in NAMED)
    )

    @dataclass(frozen=True, slots=True)
    class Args:
        form: Text = arg(
            "what is stored for a whole tensor: the scale of ModelOpt and torchao (modelopt), what "
            "scales are divided by (compressed-tensors) or the largest magnitude (te)",
            words=FORMS,
            default=MODELOPT,
        )
        swizzled: Flag = arg("scales lie in the tiles of 128 x 4 of cuBLAS", default=False)
        transposed: Flag = arg("rows and columns are stored in the other order", default=False)
        e4m3_max: Integer = arg(
            "of the form te, the scale of the block with the largest magnitude: 448, or 256 where "
            "weights were made as 4 over 6",
            values=tuple(OVER),
            default=448,
        )
        like: Text | None = like_arg(*FORMS, TE_2D, "torchao", default=None)
        levels: Integer = arg(
            "1: no scale of the whole tensor", values=(1, 2), encoding=True, default=2
        )
        non_finite: Text = non_finite_arg()

    def validate(self, args: Any, encoding: bool) -> None:
        super().validate(args, encoding)
        like, te = args.like or args.form, args.form == TE
        made = {"torchao": MODELOPT, TE_2D: TE}.get(like, like)
        for wrong, why in (
            (args.form != made, f"`like: {like}` is arithmetic of the form {made}"),
            (args.e4m3_max != 448 and not te, "`e4m3_max` is of the form te"),
            (args.transposed and te, "`transposed` is not of the form te"),
            (args.levels == 1 and like != "torchao", "`levels: 1` is torchao's (`like`)"),
            (encoding and args.e4m3_max != 448, "no arithmetic is known for an `e4m3_max` of 256"),
        ):
            if wrong:
                raise OpError("M308", f"nvfp4: {why}")

    def layout(self, args: Any, specs: Mapping[str, Spec]) -> NumberLayout:
        te, strict = args.form == TE, args.non_finite != "keep"
        pad = fitting_padding(specs, (1, 16), PADDED) if te else (1, 1)
        scale = Grid("scale", (1, 16), True, (E4M3, "uint8"), E4M3, padded=pad, positive=strict)
        scale = replace(scale, zeros=True, swizzled=args.swizzled, transposed=args.transposed)
        terms, whole = times(scale), specs.get("global")
        if whole is not None or args.form != MODELOPT:
            # of a stack there may be one for each matrix; the largest magnitude may be zero
            several = whole is not None and whole.numel != 1
            grid = Grid("global", (0, 0), several, ("float32",), positive=strict and not te)
            terms += (Term("/" if args.form == COMPRESSED else "*", grid),)
        if te:
            terms += times(OVER[args.e4m3_max])
        terms += times(Grid(OF_INPUTS, (0, 1), False, finite=strict)) if OF_INPUTS in specs else ()
        codes = Packing(4, ("uint8", "int8", E2M1), transposed=args.transposed)
        return NumberLayout(self.name, floats(E2M1), codes, terms, axes=2)

    def written(self, args: Any, spec: Spec) -> NumberLayout:
        layout = self.layout(args, {"global": WHOLE[args.form]} if args.levels == 2 else {})
        return in_squares(layout) if args.like == TE_2D else layout

    def encoded(self, args: Any, spec: Spec) -> Sequence[Spec | None]:
        weight, scale, whole, _ = EncodingCodec.encoded(self, args, spec)
        if spec.shape[-1] % 16:
            raise OpError("M304", f"nvfp4 is of rows of a multiple of 16 numbers, these are {spec}")
        scale = spec_of("uint8" if args.form == TE else E4M3, scale.shape if scale else ())
        return [weight, scale, whole and WHOLE[args.form], None]

    def making(self, args: Any, roles: Collection[str]) -> Any:
        return replace(args, levels=1) if args.like == "torchao" and "global" not in roles else args

    def rule(self, args: Any, spec: Spec) -> ScaleRule:
        return ScaleRule("nvfp4", TE if args.form == TE else args.like or args.form)

    def bound(self, args: Any) -> str:
        least = "2^-8, of numbers up to 2688" if args.levels == 1 else "amax of all / 448 / 1024"
        return f"|error| <= max(3/16 amax of the block, {least}): codes are 2 apart at 6"

    def samples(self) -> Iterable[tuple[Any, Spec]]:
        yield self.Args(), spec_of("bfloat16", (6, 64))
        yield self.Args(transposed=True), spec_of("float16", (2, 5, 32))
        yield self.Args(COMPRESSED, non_finite="saturate"), spec_of("bfloat16", (7, 48))
        yield self.Args(like="torchao", swizzled=True), spec_of("float32", (130, 80))
        yield self.Args(like="torchao", levels=1), spec_of("bfloat16", (3, 16))
        for tiles, like in ((False, None), (True, None), (False, TE_2D), (True, TE_2D)):
            yield self.Args(TE, tiles, like=like), spec_of("bfloat16", (130, 80))


CODEC = Nvfp4()
