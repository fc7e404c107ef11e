"""`dequantize`: the stored parts of a number format become one tensor of numbers.

It joins the roles that its codec stores; a rule names them in `from` (`{weight: …, scale: …}`), and
a part that is missing is found by the binder, which knows the key that should be there. What the
codec needs to encode again, `dequantize` takes too and hands to its inverse.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from ..codecs.base import NON_FINITE, Codec, Options
from .base import Dtype, Integers, Loss, OpCall, OpError, Text, ValueOp, arg, dataclass, step

if TYPE_CHECKING:
    import numpy as np

    from ..core.spec import Spec
    from .base import Box, Meter


@cache
def codec_called(name: str) -> Codec:
    """The codec of this name. OpError M308 if there is none or it does not load."""
    from .. import codecs
    from ..core.errors import did_you_mean, listed, printable
    from ..source.registry import BrokenEntryError

    try:
        return codecs.get(name)
    except KeyError:
        known = codecs.names()
        hint = did_you_mean(name, known) or f"the codecs are {listed(known)}"
        raise OpError("M308", f"there is no codec {name!r}", help=hint) from None
    except BrokenEntryError as error:
        what = f"codec {name!r} cannot be loaded: {printable(str(error))}"
        raise OpError("M308", what, help="update or remove that package") from None


def options(args: Any) -> Options:
    return Options(args.block, args.like, args.scale, args.scale_fmt, args.non_finite)


class CodecOp(ValueOp):
    """An op that a codec carries out."""

    def roles(self, codec: str = "") -> tuple[str, ...]:
        """The parts of a codec, without a name those that most have; none where there is no such
        codec or it does not load, which `validate` reports.
        """
        from .. import codecs

        if not codec:
            return ("weight", "scale")
        try:
            return codecs.get(codec).parts
        except LookupError:
            return ()

    def eager_width(self, args: Any) -> int | None:
        return codec_called(args.codec).reference_width


class Dequantize(CodecOp):
    kind = "join"
    summary = "makes numbers of the stored parts of a number format"

    @dataclass(frozen=True, slots=True)
    class Args:
        codec: Text = arg("the number format, e.g. fp8-block", least=1)
        dtype: Dtype = arg("what the numbers become, e.g. bfloat16")
        block: Integers | None = arg(
            "rows and columns that share a scale; without it what the codec has",
            least=1,
            default=None,
        )
        like: Text | None = arg("for the inverse: whose arithmetic encodes", default=None)
        scale: Text | None = arg("for the inverse: how scales are stored", default=None)
        scale_fmt: Text | None = arg(
            "for the inverse: ue8m0 rounds scales up to powers of two; float does not", default=None
        )
        non_finite: Text = arg(
            "for the inverse: refuse, saturate or keep infinities and NaN",
            words=NON_FINITE,
            default="refuse",
        )

    def validate(self, args: Args) -> None:
        super().validate(args)
        codec_called(args.codec).validate(options(args), False)

    def infer(self, args: Args, specs: Sequence[Spec], parts: int = 1) -> list[Spec]:
        # a param may have given what the rule file left open
        self.validate(args)
        codec = codec_called(args.codec)
        if len(specs) != len(codec.parts):
            there, lacking = (
                ", ".join(codec.parts[: len(specs)]),
                ", ".join(codec.parts[len(specs) :]),
            )
            raise OpError(
                "M408",
                f"dequantize: {args.codec} cannot be decoded without its {lacking}; there is "
                f"only the {there}",
            )
        return [codec.decoded(options(args), specs, args.dtype)]

    def needs(self, args: Args, specs: Sequence[Spec], output: int, box: Box) -> list[Box]:
        return codec_called(args.codec).decode_needs(options(args), specs, box)

    def grain(self, args: Args, specs: Sequence[Spec], output: int) -> tuple[int, ...]:
        codec = codec_called(args.codec)
        return codec.grain(options(args), codec.decoded(options(args), specs, args.dtype), None)

    def compute(
        self,
        args: Args,
        arrays: Sequence[Any],
        specs: Sequence[Spec],
        output: int,
        box: Box,
        out: Any,
        meter: Meter | None = None,
    ) -> None:
        codec_called(args.codec).decode(options(args), arrays, specs, args.dtype, box, out, meter)

    def eager(
        self,
        args: Args,
        arrays: Sequence[np.ndarray[Any, Any]],
        parts: int = 1,
        dtypes: Sequence[str] = (),
    ) -> list[np.ndarray[Any, Any]]:
        from ..core.spec import Spec

        specs = [Spec(d, a.shape) for d, a in zip(dtypes, arrays, strict=True)]
        return [codec_called(args.codec).reference(options(args), arrays, specs, args.dtype)]

    def rounded_rows(
        self, args: Args, specs: Sequence[Spec], parts: int, output: int, start: int, stop: int
    ) -> tuple[int, int]:
        # a box of numbers may begin anywhere in a block, but its scales are those of whole blocks
        codec, made = codec_called(args.codec), self.infer(args, specs, parts)[output]
        boxes = codec.decode_needs(
            options(args), specs, ((start, stop), *((0, n) for n in made.shape[1:]))
        )
        found = [
            codec.encode_needs(options(args), made, part, box)[0]
            for part, box in enumerate(boxes)
            if box
        ]
        return min(low for low, _ in found), max(high for _, high in found)

    def loss(self, args: Args) -> Loss:
        return Loss.LOSSY

    def loss_on(self, args: Args, specs: Sequence[Spec]) -> Loss:
        return (
            Loss.LOSSLESS
            if codec_called(args.codec).exact(options(args), specs, args.dtype)
            else Loss.LOSSY
        )

    def invert(self, args: Args, enumerated: bool = False) -> OpCall:
        said = {
            name: getattr(args, name)
            for name in ("block", "like", "scale", "scale_fmt", "non_finite")
        }
        return step("quantize", codec=args.codec, from_=args.dtype, **said)

    def samples(self) -> Iterable[tuple[dict[str, Any], list[tuple[int, ...]]]]:
        yield {"codec": "fp8-block", "dtype": "bfloat16"}, [(576, 256), (5, 2)]
        yield (
            {"codec": "fp8-block", "dtype": "float32", "block": [2, 3], "scale_fmt": "ue8m0"},
            [(2, 5, 7), (2, 3, 3)],
        )


OP = Dequantize()
