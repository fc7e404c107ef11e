"""`quantize`: a tensor of numbers becomes the parts of a number format, by its codec's roles.

Whose arithmetic encodes is part of the rule (`like`): libraries with one format may differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ..codecs.base import NON_FINITE
from .base import (
    Dtype,
    Integers,
    Loss,
    OneWay,
    OpCall,
    OpError,
    Text,
    arg,
    dataclass,
    step,
)
from .dequantize import CodecOp, codec_called, options

if TYPE_CHECKING:
    import numpy as np

    from ..core.spec import Spec
    from .base import Box, Meter


class Quantize(CodecOp):
    kind = "part"
    summary = "encodes numbers as the stored parts of a number format"

    @dataclass(frozen=True, slots=True)
    class Args:
        codec: Text = arg("the number format, e.g. fp8-block", least=1)
        from_: Dtype | None = arg(
            "the dtype of the numbers: checked, and what the inverse restores",
            alias="from",
            default=None,
        )
        block: Integers | None = arg(
            "rows and columns that share a scale; without it what the codec has",
            least=1,
            default=None,
        )
        like: Text | None = arg("whose arithmetic encodes, e.g. deepseek or hf", default=None)
        scale: Text | None = arg(
            "how scales are stored: float32 (f32), bfloat16 (bf16), float8_e8m0fnu (ue8m0), or "
            "pow2",
            default=None,
        )
        scale_fmt: Text | None = arg(
            "ue8m0: scales are rounded up to powers of two, whatever their dtype; float: not",
            default=None,
        )
        non_finite: Text = arg(
            "refuse, saturate or keep infinities and NaN", words=NON_FINITE, default="refuse"
        )

    def validate(self, args: Args) -> None:
        super().validate(args)
        codec_called(args.codec).validate(options(args), True)

    def parts(self, args: Args, shape: tuple[int, ...], values: int | None) -> int:
        return len(codec_called(args.codec).parts)

    def infer(self, args: Args, specs: Sequence[Spec], parts: int = 1) -> list[Spec]:
        # a param may have given what the rule file left open
        self.validate(args)
        if args.from_ is not None and specs[0].dtype != args.from_:
            raise OpError(
                "M303",
                f"quantize: the numbers are {specs[0].dtype}, the rule says `from: {args.from_}`",
                help="write a `cast` before it",
            )
        return codec_called(args.codec).encoded(options(args), specs[0])

    def needs(self, args: Args, specs: Sequence[Spec], output: int, box: Box) -> list[Box]:
        return [codec_called(args.codec).encode_needs(options(args), specs[0], output, box)]

    def grain(self, args: Args, specs: Sequence[Spec], output: int) -> tuple[int, ...]:
        return codec_called(args.codec).grain(options(args), specs[0], output)

    def remembers(self, args: Args, specs: Sequence[Spec]) -> int:
        return codec_called(args.codec).remembers(options(args), specs[0])

    def follows(self, args: Args, output: int) -> bool:
        codec = codec_called(args.codec)
        return codec.parts[output] in codec.follow

    def recall(
        self,
        args: Args,
        specs: Sequence[Spec],
        output: int,
        box: Box,
        out: Any,
        memo: dict[str, Any],
    ) -> bool:
        return codec_called(args.codec).recall(options(args), specs[0], output, box, out, memo)

    def compute(
        self,
        args: Args,
        arrays: Sequence[Any],
        specs: Sequence[Spec],
        output: int,
        box: Box,
        out: Any,
        meter: Meter | None = None,
        memo: dict[str, Any] | None = None,
    ) -> None:
        codec_called(args.codec).encode(
            options(args), arrays[0], specs[0], output, box, out, meter, memo
        )

    def eager(
        self,
        args: Args,
        arrays: Sequence[np.ndarray[Any, Any]],
        parts: int = 1,
        dtypes: Sequence[str] = (),
    ) -> list[np.ndarray[Any, Any]]:
        from ..core.spec import Spec

        return codec_called(args.codec).reference_parts(
            options(args), arrays[0], Spec(dtypes[0], arrays[0].shape)
        )

    def loss(self, args: Args) -> Loss:
        return Loss.LOSSY

    def invert(self, args: Args, enumerated: bool = False) -> OpCall | OneWay:
        if args.from_ is None:
            return OneWay(
                "quantize does not say what the numbers were", "write `from`: their dtype"
            )
        said = {
            name: getattr(args, name)
            for name in ("block", "like", "scale", "scale_fmt", "non_finite")
        }
        return step("dequantize", codec=args.codec, dtype=args.from_, **said)

    def samples(self) -> Iterable[tuple[dict[str, Any], list[tuple[int, ...]]]]:
        yield {"codec": "fp8-block", "from": "bfloat16", "like": "deepseek"}, [(576, 256)]
        yield {"codec": "fp8-block", "block": [2, 3], "scale": "ue8m0"}, [(2, 5, 7)]


OP = Quantize()
