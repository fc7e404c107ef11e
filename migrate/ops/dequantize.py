"""`dequantize`: the stored parts of a number format become one tensor of numbers.

It joins the roles that its codec stores; a rule names them in `from` (`{weight: …, scale: …}`), and
a part that is missing is found by the binder, which knows the key that should be there. Beside its
own arguments it takes those that the codec declares, and hands them all to its inverse.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ..codecs.base import Codec
from .base import (
    CodecArgs,
    Dtype,
    Loss,
    OneWay,
    OpCall,
    OpError,
    Text,
    ValueOp,
    arg,
    dataclass,
    step,
)

if TYPE_CHECKING:
    import numpy as np

    from ..core.spec import Spec
    from .base import Box, Meter

T = TypeVar("T")


@cache
def codec_called(name: str) -> Codec:
    """The codec of this name. OpError M308 if there is none or it does not load."""
    from .. import codecs
    from ..core.errors import did_you_mean, listed, printable
    from ..source.registry import BrokenEntryError

    try:
        codec: Any = codecs.get(name)
    except KeyError:
        if (why := codecs.why_undecodable(name)) is not None:
            raise OpError(
                "M308",
                f"{name} cannot be decoded: {why}",
                help="let the library that wrote it decode it, where it was made for",
            ) from None
        known = codecs.names()
        hint = did_you_mean(name, known) or f"the codecs are {listed(known)}"
        raise OpError("M308", f"there is no codec {name!r}", help=hint) from None
    except BrokenEntryError as error:
        what = f"codec {name!r} cannot be loaded: {printable(str(error))}"
        raise OpError("M308", what, help="update or remove that package") from None
    if not isinstance(codec, Codec):
        what = f"codec {name!r} is a {type(codec).__name__}, not a `migrate.codecs.base.Codec`"
        raise OpError("M308", what, help="update or remove that package")
    return codec


class Called(NamedTuple):
    """A codec and the arguments that its methods are given."""

    codec: Codec
    own: Any


def called(args: Any) -> Called:
    """The codec that the arguments of an op name, and its own. OpError M308 without one."""
    codec = codec_called(args.codec)
    return Called(codec, codec.Args() if args.codec_args is None else args.codec_args)


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

    def may_lack(self, codec: str) -> tuple[str, ...]:
        return codec_called(codec).optional

    def unmade(self, codec: str) -> tuple[str, ...]:
        return codec_called(codec).unmade

    def eager_width(self, args: Any) -> int | None:
        return codec_called(args.codec).reference_width


class Dequantize(CodecOp):
    kind = "join"
    summary = "makes numbers of the stored parts of a number format"

    @dataclass(frozen=True, slots=True)
    class Args:
        codec: Text = arg("the number format, e.g. fp8-block", least=1)
        dtype: Dtype = arg("what the numbers become, e.g. bfloat16")
        codec_args: CodecArgs = arg("what the codec takes", default=None)

    def validate(self, args: Args) -> None:
        super().validate(args)
        codec, own = called(args)
        codec.validate(own, False)

    def roles(self, codec: str = "") -> tuple[str, ...]:
        parts = CodecOp.roles(self, codec)
        return (*parts, *codec_called(codec).unused) if codec and parts else parts

    def unused(self, codec: str) -> Mapping[str, str]:
        return codec_called(codec).unused

    def settles(self, args: Args, named: Collection[str]) -> bool:
        codec = codec_called(args.codec)
        spare = codec.unused and not codec.unused.keys().isdisjoint(named)
        return bool(codec.optional or codec.planning or spare)

    def reads(self, args: Args) -> Mapping[str, int]:
        codec = codec_called(args.codec)
        return dict.fromkeys(codec.planning, codec.most_planned)

    def settle(
        self,
        args: Args,
        roles: Sequence[str],
        specs: Sequence[Spec],
        values: Mapping[str, bytes],
    ) -> Settled:
        self.validate(args)
        codec, own = called(args)
        _require_parts(codec, roles)
        there = _in_order(codec, roles, specs)
        return Settled(args.codec, args.dtype, codec.settle(own, there, values), tuple(roles))

    def infer(self, args: Args, specs: Sequence[Spec], parts: int = 1) -> list[Spec]:
        codec, own = called(args)
        if not isinstance(args, Settled):
            # a param may have given what the rule file left open
            self.validate(args)
            _require_parts(codec, codec.parts[: len(specs)])
        return [codec.decoded(own, _in_order(codec, _roles(args), specs), args.dtype)]

    def needs(self, args: Args, specs: Sequence[Spec], output: int, box: Box) -> list[Box]:
        codec, own = called(args)
        needed = codec.decode_needs(own, _in_order(codec, _roles(args), specs), box)
        return [need for need in needed if need is not None]

    def packed(self, args: Args, specs: Sequence[Spec]) -> list[int]:
        (codec, own), roles = called(args), _roles(args)
        found = codec.packed(own, _in_order(codec, roles, specs))
        return [n for n, r in enumerate(codec.parts if roles is None else roles) if r in found]

    def grain(self, args: Args, specs: Sequence[Spec], output: int) -> tuple[int, ...]:
        codec, own = called(args)
        there = _in_order(codec, _roles(args), specs)
        return codec.decode_grain(own, there, args.dtype)

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
        (codec, own), roles = called(args), _roles(args)
        there, held = _in_order(codec, roles, specs), _in_order(codec, roles, arrays)
        codec.decode(own, held, there, args.dtype, box, out, meter)

    def turns(self, args: Args, specs: Sequence[Spec], output: int) -> bool:
        codec, own = called(args)
        return codec.decode_turns(own, _in_order(codec, _roles(args), specs), args.dtype)

    def eager(
        self,
        args: Args,
        arrays: Sequence[np.ndarray[Any, Any]],
        parts: int = 1,
        dtypes: Sequence[str] = (),
    ) -> list[np.ndarray[Any, Any]]:
        from ..core.spec import Spec

        (codec, own), roles = called(args), _roles(args)
        specs = [Spec(d, a.shape) for d, a in zip(dtypes, arrays, strict=True)]
        there, held = _in_order(codec, roles, specs), _in_order(codec, roles, arrays)
        return [codec.reference(own, held, there, args.dtype)]

    def rounded_rows(
        self, args: Args, specs: Sequence[Spec], parts: int, output: int, start: int, stop: int
    ) -> tuple[int, int]:
        codec, own = called(args)
        rows = self.infer(args, specs, parts)[output].shape[0]
        each = codec.reference_rows(own, _in_order(codec, _roles(args), specs)) or max(1, rows)
        return start // each * each, min(-(-stop // each) * each, rows)

    def loss(self, args: Args) -> Loss:
        return Loss.LOSSY

    def loss_on(self, args: Args, specs: Sequence[Spec]) -> Loss:
        codec, own = called(args)
        exact = codec.exact(own, _in_order(codec, _roles(args), specs), args.dtype)
        return Loss.LOSSLESS if exact else Loss.LOSSY

    def invert(self, args: Args, enumerated: bool = False) -> OpCall | OneWay:
        if not codec_called(args.codec).encodes:
            return OneWay(
                f"{args.codec} is only decoded, nothing encodes it",
                "keep the source: a way back needs its files",
            )
        return step("quantize", codec=args.codec, from_=args.dtype, codec_args=args.codec_args)

    def samples(self) -> Iterable[tuple[dict[str, Any], list[tuple[int, ...]]]]:
        yield {"codec": "fp8-block", "dtype": "bfloat16"}, [(576, 256), (5, 2)]
        yield (
            {"codec": "fp8-block", "dtype": "float32", "block": [2, 3], "scale_fmt": "ue8m0"},
            [(2, 5, 7), (2, 3, 3)],
        )


@dataclass(frozen=True, slots=True)
class Settled(Dequantize.Args):
    """The arguments for parts that were looked at: `roles` are there, `codec_args` hold what the
    bytes of some say.
    """

    roles: tuple[str, ...] = ()


def _roles(args: Dequantize.Args) -> tuple[str, ...] | None:
    return args.roles if isinstance(args, Settled) else None


def _in_order(codec: Codec, roles: Sequence[str] | None, items: Sequence[T]) -> Sequence[T | None]:
    """What there is of each part, in the order of the codec's; None for a part without."""
    if len(items) == len(codec.parts):
        return items
    there = dict(zip(codec.parts if roles is None else roles, items, strict=False))
    return [there.get(role) for role in codec.parts]


def _require_parts(codec: Codec, roles: Sequence[str]) -> None:
    """OpError M408 without a part that is not optional."""
    lacking = [r for r in codec.parts if r not in roles and r not in codec.optional]
    if lacking:
        raise OpError(
            "M408",
            f"dequantize: {codec.name} cannot be decoded without its {', '.join(lacking)}; there "
            f"is only the {', '.join(roles)}",
        )


OP = Dequantize()
