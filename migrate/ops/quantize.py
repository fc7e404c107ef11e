"""`quantize`: a tensor of numbers becomes the parts of a number format, by its codec's roles.

Whose arithmetic encodes is part of the rule (`like`): libraries with one format may differ.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .base import (
    CodecArgs,
    Dtype,
    Loss,
    OneWay,
    OpCall,
    OpError,
    Text,
    arg,
    dataclass,
    step,
)
from .dequantize import CodecOp, called, codec_called

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
        codec_args: CodecArgs = arg("what the codec takes", default=None)

    def validate(self, args: Args) -> None:
        super().validate(args)
        codec, own = called(args)
        if not codec.encodes:
            raise OpError(
                "M308",
                f"quantize: {codec.name} is only decoded, nothing encodes it",
                help="`dequantize` reads it",
            )
        codec.validate(own, True)

    def parts(self, args: Args, shape: tuple[int, ...], values: int | None) -> int:
        return len(_numbers(args))

    def infer(self, args: Args, specs: Sequence[Spec], parts: int = 1) -> list[Spec]:
        # a param may have given what the rule file left open
        self.validate(args)
        if args.from_ is not None and specs[0].dtype != args.from_:
            raise OpError(
                "M303",
                f"quantize: the numbers are {specs[0].dtype}, the rule says `from: {args.from_}`",
                help="write a `cast` before it",
            )
        codec, own = called(args)
        return [part for part in codec.encoded(own, specs[0]) if part is not None]

    def settles(self, args: Args, named: Collection[str]) -> bool:
        return bool(codec_called(args.codec).optional)

    def makes(self, args: Args, spec: Spec) -> tuple[str, ...]:
        self.validate(args)
        codec, own = called(args)
        found = zip(codec.parts, codec.encoded(own, spec), strict=True)
        return tuple(role for role, part in found if part is not None)

    def settle(
        self,
        args: Args,
        roles: Sequence[str],
        specs: Sequence[Spec],
        values: Mapping[str, bytes],
    ) -> Chosen:
        codec, own = called(args)
        if set(self.makes(args, specs[0])) != set(roles):
            own = codec.making(own, roles)
        there = [
            role
            for role, part in zip(codec.parts, codec.encoded(own, specs[0]), strict=True)
            if part is not None
        ]
        if set(there) != set(roles):
            raise OpError(
                "M408",
                f"quantize: {codec.name} makes the {', '.join(there)} of {specs[0]}; the rule has "
                f"names for the {', '.join(roles)}",
                help="name all of them in the rule, or change the arguments of the codec",
            )
        return Chosen(args.codec, args.from_, own, tuple(codec.parts.index(r) for r in there))

    def foreseen(self, args: Args, specs: Sequence[Spec], output: int) -> bytes | None:
        codec, own = called(args)
        role = codec.parts[_numbers(args)[output]]
        return codec.foreseen(own, specs[0]).get(role) if role in codec.planning else None

    def needs(self, args: Args, specs: Sequence[Spec], output: int, box: Box) -> list[Box]:
        codec, own = called(args)
        return [codec.encode_needs(own, specs[0], _numbers(args)[output], box)]

    def grain(self, args: Args, specs: Sequence[Spec], output: int) -> tuple[int, ...]:
        codec, own = called(args)
        return codec.grain(own, specs[0], _numbers(args)[output])

    def remembers(self, args: Args, specs: Sequence[Spec]) -> int:
        codec, own = called(args)
        return codec.remembers(own, specs[0])

    def follows(self, args: Args, output: int) -> bool:
        codec = codec_called(args.codec)
        return codec.parts[_numbers(args)[output]] in codec.follow

    def recall(
        self,
        args: Args,
        specs: Sequence[Spec],
        output: int,
        box: Box,
        out: Any,
        memo: dict[str, Any] | None = None,
        survey: Any = None,
    ) -> bool:
        codec, own = called(args)
        part = _numbers(args)[output]
        return codec.recall(own, specs[0], part, box, out, memo, **_surveyed(survey))

    def surveys(self, args: Args, specs: Sequence[Spec]) -> bool:
        codec, own = called(args)
        return codec.surveys(own, specs[0])

    def survey(
        self, args: Args, specs: Sequence[Spec], box: Box, array: Any, known: Any = None
    ) -> Any:
        codec, own = called(args)
        return codec.survey(own, array, specs[0], box, known)

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
        survey: Any = None,
    ) -> None:
        codec, own = called(args)
        part, known = _numbers(args)[output], _surveyed(survey)
        codec.encode(own, arrays[0], specs[0], part, box, out, meter, memo, **known)

    def eager(
        self,
        args: Args,
        arrays: Sequence[np.ndarray[Any, Any]],
        parts: int = 1,
        dtypes: Sequence[str] = (),
    ) -> list[np.ndarray[Any, Any]]:
        from ..core.spec import Spec

        codec, own = called(args)
        made = codec.reference_parts(own, arrays[0], Spec(dtypes[0], arrays[0].shape))
        return [part for part in made if part is not None]

    def rows(
        self,
        args: Args,
        part: Callable[[int, int, int], Any],
        specs: Sequence[Spec],
        parts: int,
        output: int,
        start: int,
        stop: int,
    ) -> np.ndarray[Any, Any]:
        known = self._known(args, specs, parts, output)
        if known is None:
            return super().rows(args, part, specs, parts, output, start, stop)
        return known[start:stop]

    def _known(
        self, args: Args, specs: Sequence[Spec], parts: int, output: int
    ) -> np.ndarray[Any, Any] | None:
        """The elements of an output that follows from the spec of all numbers, of which some rows
        say nothing.
        """
        import numpy as np

        from ..elements.raw import carrier

        found, made = self.foreseen(args, specs, output), self.infer(args, specs, parts)[output]
        return None if found is None else np.frombuffer(found, carrier(made.dtype))

    def makes_rows(self, args: Args, specs: Sequence[Spec]) -> bool:
        codec, own = called(args)
        return codec.reference_by_rows(own, specs[0])

    def eager_survey(
        self, args: Args, specs: Sequence[Spec], start: int, array: Any, known: Any = None
    ) -> Any:
        codec, own = called(args)
        return codec.reference_survey(own, array, specs[0], start, known)

    def surveyed_rows(
        self,
        args: Args,
        part: Callable[[int, int, int], Any],
        specs: Sequence[Spec],
        parts: int,
        output: int,
        start: int,
        stop: int,
        survey: Any,
    ) -> np.ndarray[Any, Any]:
        if (known := self._known(args, specs, parts, output)) is not None:
            return known[start:stop]
        codec, own = called(args)
        (spec,), number = specs, _numbers(args)[output]
        shape = self.infer(args, specs, parts)[output].shape
        low = 0
        box: Box = ()
        if shape:
            low, high = self.rounded_rows(args, specs, parts, output, start, stop)
            box = ((low, high), *((0, n) for n in shape[1:]))
        first, last = codec.encode_needs(own, spec, number, box)[0]
        array = part(0, first, last) if first < last else None
        made: np.ndarray[Any, Any] = codec.reference_parts(own, array, spec, survey, first)[number]
        if array is None:
            low = 0
        return made[start - low : stop - low] if shape else made

    def loss(self, args: Args) -> Loss:
        return Loss.LOSSY

    def invert(self, args: Args, enumerated: bool = False) -> OpCall | OneWay:
        if args.from_ is None:
            return OneWay(
                "quantize does not say what the numbers were", "write `from`: their dtype"
            )
        return step("dequantize", codec=args.codec, dtype=args.from_, codec_args=args.codec_args)

    def samples(self) -> Iterable[tuple[dict[str, Any], list[tuple[int, ...]]]]:
        yield {"codec": "fp8-block", "from": "bfloat16", "like": "deepseek"}, [(576, 256)]
        yield {"codec": "fp8-block", "block": [2, 3], "scale": "ue8m0"}, [(2, 5, 7)]


@dataclass(frozen=True, slots=True)
class Chosen(Quantize.Args):
    """The arguments for the parts that a tensor is to have: their numbers in the codec's order."""

    numbers: tuple[int, ...] = ()


def _surveyed(survey: Any) -> dict[str, Any]:
    """The argument `survey`, which only a codec takes that makes one."""
    return {} if survey is None else {"survey": survey}


def _numbers(args: Quantize.Args) -> Sequence[int]:
    """The parts that are made, by their number in the codec."""
    return args.numbers if isinstance(args, Chosen) else range(len(codec_called(args.codec).parts))


OP = Quantize()
