"""`recode`: the stored parts of a number format become those of another, never through numbers.

Both sides are declared as `dequantize` and `quantize` declare one, so that what becomes of each
part follows from two layouts (`codecs/kit/recoding.py`): many are copied as they are, under other
names and in other shapes. What cannot be exact is refused, while planning where shapes tell, else
where a box is computed. The inverse is the other direction.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

from ..codecs.base import Codec
from ..codecs.kit.codec import LayoutCodec
from ..core import view
from ..core.declaration import NumberFormat
from ..core.spec import spec as spec_of
from .base import (
    Formatted,
    Loss,
    OneWay,
    OpCall,
    OpError,
    Text,
    ValueOp,
    arg,
    dataclass,
    replace,
    step,
)
from .dequantize import codec_called

if TYPE_CHECKING:
    import numpy as np

    from ..codecs.kit.recoding import Move, Recoding
    from ..codecs.kit.recoding_integers import IntegerRecoding
    from ..core.spec import Spec
    from ..core.view import View
    from .base import Box, Meter

# paths that are looked up by their arguments
MOST_KNOWN = 1024
# bytes for each integer that is made plainly
_WIDTH = 40
# dtypes in which numbers may be asked to stay what they are
EXACT_IN = ("float32", "bfloat16", "float16")


class Recode(ValueOp):
    kind = "exchange"
    summary = "makes the stored parts of one number format of those of another, without rounding"
    on_device: ClassVar[bool] = False
    scalars_by_rows: ClassVar[bool] = True

    @dataclass(frozen=True, slots=True)
    class Args:
        from_: Formatted = arg("the number format of the parts: `{codec: …}`", alias="from")
        to: Formatted = arg("the number format that they become: `{codec: …}`")
        exact_in: Text | None = arg(
            "where a scale of the whole tensor is stored as its reciprocal or an amax, the dtype "
            "in which all numbers must stay what they are, by default float32",
            words=EXACT_IN,
            default=None,
        )

    def validate(self, args: Args) -> None:
        super().validate(args)
        for said, encoding in ((args.from_, False), (args.to, True)):
            codec = codec_called(said.codec)
            if not isinstance(codec, LayoutCodec):
                raise OpError("M308", f"recode: {codec.name} does not say how its parts are stored")
            if encoding and not (codec.encodes or codec.recodes):
                raise OpError(
                    "M308",
                    f"recode: {codec.name} is only decoded, nothing makes its parts",
                    help="`dequantize` reads it",
                )
            codec.validate(said.args, encoding)

    def takes(self, args: Any) -> tuple[str, ...]:
        return _parts_of(args.from_)

    def gives(self, args: Any) -> tuple[str, ...]:
        return args.outputs if isinstance(args, Between) else _parts_of(args.to)

    def inputs(self, args: Any) -> tuple[str, ...]:
        return args.inputs if isinstance(args, Between) else self.takes(args)

    def naming(self, args: Any, takes: Sequence[str] = (), gives: Sequence[str] = ()) -> Any:
        if not codec_called(args.to.codec).optional:
            return args
        return Named(args.from_, args.to, args.exact_in, (tuple(takes), tuple(gives)))

    def optional(self, said: NumberFormat) -> tuple[str, ...]:
        """The parts that tensors of this format may be without."""
        return codec_called(said.codec).optional

    def settles(self, args: Any, named: Collection[str]) -> bool:
        return True

    def reads(self, args: Args) -> Mapping[str, int]:
        codec = codec_called(args.from_.codec)
        return dict.fromkeys(codec.planning, codec.most_planned)

    def settle(
        self,
        args: Args,
        roles: Sequence[str],
        specs: Sequence[Spec],
        values: Mapping[str, bytes],
    ) -> Between:
        self.validate(args)
        codec = _layout_codec(args.from_)
        lacking = [r for r in codec.parts if r not in roles and r not in codec.optional]
        if lacking:
            raise OpError(
                "M408",
                f"recode: {codec.name} is not whole without its {', '.join(lacking)}; there is "
                f"only the {', '.join(roles)}",
            )
        there = dict(zip(roles, specs, strict=True))
        own = codec.settle(args.from_.args, [there.get(r) for r in codec.parts], values)
        source, named = args.from_._replace(args=own), None
        if isinstance(args, Named):
            taken, named = args.sides
            # what the rule looked for, and is not there, is not made up
            named = tuple(
                r for r in named if r in roles or r not in taken or r not in codec.optional
            )
        path = _path(source, args.to, args.exact_in, tuple(there.items()), named)
        return Between(source, args.to, args.exact_in, path.inputs, tuple(path.parts))

    def infer(self, args: Args, specs: Sequence[Spec], parts: int = 1) -> list[Spec]:
        return list(_path_of(_settled(self, args, specs), specs).parts.values())

    def copied(self, args: Between, specs: Sequence[Spec], output: int) -> tuple[int, Any] | None:
        """Which input an output copies, and what leads to its places; None where it is computed."""
        path = _path_of(args, specs)
        found = path.copies.get(args.outputs[output])
        return None if found is None else (args.inputs.index(found.role), found.moves)

    def moved(self, of: View, moves: Iterable[Move], dtype: str) -> View:
        """The view of a part in the places that `moves` lead to; what is over is zero."""
        # a byte of E8M0 is a power of two
        nothing = 2.0**-127 if dtype == "float8_e8m0fnu" else 0.0
        for name, how in moves:
            if name == "reshape":
                of = view.reshape(of, how)
            elif name == "permute":
                of = view.permute(of, how)
            elif name == "slice":
                of = view.slice_(of, how[0], 0, how[1])
            else:
                of = view.pad(of, how[0], 0, how[1] - of.shape[how[0]], nothing)
        return of

    def needs(self, args: Any, specs: Sequence[Spec], output: int, box: Box) -> list[Box]:
        args = _settled(self, args, specs)
        found = _path_of(args, specs).needs(args.outputs[output], box)
        return [found[role] for role in args.inputs]

    def needs_surveyed(
        self, args: Any, specs: Sequence[Spec], output: int, box: Box, survey: Any
    ) -> list[Box]:
        from ..codecs.kit.recoding_boxes import tells_zeros

        args = _settled(self, args, specs)
        path, found = _surveyed_path(args, specs), self.needs(args, specs, output, box)
        if args.outputs[output] == path.grid.role and not tells_zeros(path, survey):
            # codes are looked at where a scale is too small for any number but zero
            codes = args.inputs.index(path.source.layout.role)
            found[codes] = ((0, 0),) * len(found[codes])
        return found

    def foreseen(self, args: Any, specs: Sequence[Spec], output: int) -> bytes | None:
        args = _settled(self, args, specs)
        return _path_of(args, specs).bytes_of.get(args.outputs[output])

    def grain(self, args: Any, specs: Sequence[Spec], output: int) -> tuple[int, ...]:
        args = _settled(self, args, specs)
        return _path_of(args, specs).grain(args.outputs[output])

    def torch(self, args: Any, specs: Sequence[Spec]) -> bool:
        return False

    def surveys(self, args: Any, specs: Sequence[Spec]) -> bool:
        return _path_of(_settled(self, args, specs), specs).surveyed

    def survey(
        self, args: Any, specs: Sequence[Spec], box: Box, array: Any, known: Any = None
    ) -> Any:
        from ..codecs.kit.recoding_boxes import survey_powers

        path = _surveyed_path(_settled(self, args, specs), specs)
        return survey_powers(path, box, array, known)

    def compute(
        self,
        args: Any,
        arrays: Sequence[Any],
        specs: Sequence[Spec],
        output: int,
        box: Box,
        out: Any,
        meter: Meter | None = None,
        survey: Any = None,
    ) -> None:
        from ..codecs.kit.recoding import Recoding

        args = _settled(self, args, specs)
        path, held = _path_of(args, specs), dict(zip(args.inputs, arrays, strict=True))
        role = args.outputs[output]
        if isinstance(path, Recoding):
            from ..codecs.kit.recoding_boxes import recode

            recode(path, held, role, box, out, meter, survey)
            return
        from ..codecs.kit.integer_boxes import recode_integers

        recode_integers(path, held, role, box, out)

    def eager(
        self,
        args: Any,
        arrays: Sequence[np.ndarray[Any, Any]],
        parts: int = 1,
        dtypes: Sequence[str] = (),
    ) -> list[np.ndarray[Any, Any]]:
        from ..codecs.kit.recoding_reference import recoded_parts

        specs = [spec_of(d, a.shape) for d, a in zip(dtypes, arrays, strict=True)]
        args = _settled(self, args, specs)
        held = dict(zip(args.inputs, arrays, strict=True))
        made = recoded_parts(_path_of(args, specs), held)
        return [made[role] for role in args.outputs]

    def eager_memory(self, args: Any, specs: Sequence[Spec]) -> int | None:
        from ..codecs.kit.recoding import Recoding

        path = _path_of(_settled(self, args, specs), specs)
        # words hold several integers, each of which is looked for in float64
        return None if isinstance(path, Recoding) else _WIDTH * prod(path.source.full)

    def makes_rows(self, args: Any, specs: Sequence[Spec]) -> bool:
        from ..codecs.kit.integer_rows import makes_rows
        from ..codecs.kit.recoding import Recoding
        from ..codecs.kit.recoding_rows import unit_of

        path = _path_of(_settled(self, args, specs), specs)
        return unit_of(path) > 0 if isinstance(path, Recoding) else makes_rows(path)

    def rows(
        self,
        args: Any,
        part: Callable[..., Any],
        specs: Sequence[Spec],
        parts: int,
        output: int,
        start: int,
        stop: int,
    ) -> np.ndarray[Any, Any]:
        from ..codecs.kit.integer_rows import rows_of
        from ..codecs.kit.recoding import Recoding

        if not self.makes_rows(args, specs):
            return super().rows(args, part, specs, parts, output, start, stop)
        settled = _settled(self, args, specs)
        path, inputs = _path_of(settled, specs), settled.inputs
        if isinstance(path, Recoding):
            return self.surveyed_rows(args, part, specs, parts, output, start, stop, None)

        def read(role: str, *box: Any) -> Any:
            return part(inputs.index(role), *box)

        return rows_of(path, settled.outputs[output], start, stop, read)

    def eager_survey(
        self, args: Any, specs: Sequence[Spec], start: int, array: Any, known: Any = None
    ) -> Any:
        from ..codecs.kit.recoding_rows import survey_rows

        path = _surveyed_path(_settled(self, args, specs), specs)
        return survey_rows(path, start, array, known)

    def surveyed_rows(
        self,
        args: Any,
        part: Callable[[int, int, int], Any],
        specs: Sequence[Spec],
        parts: int,
        output: int,
        start: int,
        stop: int,
        survey: Any,
    ) -> np.ndarray[Any, Any]:
        from ..codecs.kit.recoding_rows import recoded_rows

        args = _settled(self, args, specs)

        def read(role: str, low: int, high: int) -> Any:
            return part(args.inputs.index(role), low, high)

        path, role = _surveyed_path(args, specs), args.outputs[output]
        return recoded_rows(path, role, start, stop, read, survey)

    def loss(self, args: Args) -> Loss:
        return Loss.LOSSLESS if args.exact_in in (None, "float32") else Loss.LOSSY

    def loss_on(self, args: Any, specs: Sequence[Spec]) -> Loss:
        path = _path_of(_settled(self, args, specs), specs)
        if path.merges or (path.respells and path.exact_in not in ("", "float32")):
            return Loss.LOSSY
        return Loss.LOSSLESS

    def invert(self, args: Args, enumerated: bool = False) -> OpCall | OneWay:
        codec = codec_called(args.from_.codec)
        if not (codec.encodes or (isinstance(codec, LayoutCodec) and codec.recodes)):
            return OneWay(
                f"{args.from_.codec} is only decoded, nothing makes its parts",
                "keep the source: a way back needs its files",
            )
        if why := _one_way(args.from_, args.to, args.exact_in):
            return OneWay(why, "keep the source: a way back needs its files")
        return step("recode", from_=args.to, to=args.from_, exact_in=args.exact_in)

    def samples(self) -> Iterable[tuple[dict[str, Any], list[tuple[int, ...]]]]:
        yield (
            {
                "from": {"codec": "fp8-block", "scale": "f32"},
                "to": {"codec": "fp8-block", "scale": "ue8m0"},
            },
            [(256, 200), (2, 2)],
        )


@dataclass(frozen=True, slots=True)
class Named(Recode.Args):
    """The arguments in a rule that has names for these roles: those taken, and those made."""

    sides: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())


@dataclass(frozen=True, slots=True)
class Between(Recode.Args):
    """The arguments for parts that were looked at: the roles that are read, and those that are
    made, in order.
    """

    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()


def _parts_of(said: NumberFormat) -> tuple[str, ...]:
    from .. import codecs

    try:
        found: Codec = codecs.get(said.codec)
    except LookupError:
        return ()
    return found.parts


# a shape of numbers that all formats have
_SHAPE = (256, 1024)


@lru_cache(maxsize=256)
def _one_way(source: NumberFormat, target: NumberFormat, exact_in: str | None) -> str:
    """Why parts of the one format cannot be made of those of the other again; empty where they can
    be, as far as formats say.
    """
    codec, other = _layout_codec(source), _layout_codec(target)
    if getattr(source.args, "type", "") is None:
        return f"`from` does not say with `type` what blocks of {codec.name} there were"
    if not codec.encodes:
        return ""
    try:
        was = codec.encoded(source.args, spec_of(_numbers(codec), _SHAPE))
        there = tuple((r, s) for r, s in zip(codec.parts, was, strict=True) if s is not None)
        path = _path(source, target, exact_in, there)
    except OpError:
        # what does not fit is said of the tensors that there are
        return ""
    bits = [geo.layout.elements.bits for geo in (path.source, path.target)]
    if getattr(source.args, "bits", 0) is None and bits[0] != bits[1]:
        return (
            f"{other.name} does not say how many bits codes of {codec.name} had, nor does `from` "
            "with `bits`"
        )
    if path.coarse:
        return (
            f"one scale of {other.name} stands for several of {codec.name}, and does not say what "
            "they were"
        )
    try:
        _path(target, source, exact_in, tuple(path.parts.items()))
    except OpError as error:
        return error.message
    return ""


def _layout_codec(said: NumberFormat) -> LayoutCodec:
    codec = codec_called(said.codec)
    if not isinstance(codec, LayoutCodec):
        raise OpError("M308", f"recode: {codec.name} does not say how its parts are stored")
    return codec


def _settled(op: Recode, args: Any, specs: Sequence[Spec]) -> Between:
    """The arguments for parts of these specs, in the order of the codec's where nothing says it."""
    if isinstance(args, Between):
        return args
    roles = codec_called(args.from_.codec).parts[: len(specs)]
    return op.settle(args, roles, specs, {})


# by the id of arguments, which are kept beside it, and specs: what a box asks for several times
_KNOWN: dict[tuple[Any, ...], tuple[Between, Recoding | IntegerRecoding]] = {}


def _path_of(args: Between, specs: Sequence[Spec]) -> Recoding | IntegerRecoding:
    key = id(args), *specs
    found = _KNOWN.get(key)
    if found is None:
        there = tuple(zip(args.inputs, specs, strict=True))
        found = args, _path(args.from_, args.to, args.exact_in, there, args.outputs)
        if len(_KNOWN) >= MOST_KNOWN:
            _KNOWN.clear()
        _KNOWN[key] = found
    return found[1]


def _surveyed_path(args: Between, specs: Sequence[Spec]) -> Recoding:
    """The path of parts whose scales may have to be known before the first box."""
    from ..codecs.kit.recoding import Recoding

    path = _path_of(args, specs)
    if not isinstance(path, Recoding):
        raise TypeError(path)
    return path


@lru_cache(maxsize=1024)
def _path(
    source: NumberFormat,
    target: NumberFormat,
    exact_in: str | None,
    there: tuple[tuple[str, Spec], ...],
    named: tuple[str, ...] | None = None,
) -> Recoding | IntegerRecoding:
    """The path to the parts that there are names for, None where that is not known."""
    from ..codecs.kit.recoding import recoding, whole_of

    codec, other = _layout_codec(source), _layout_codec(target)
    specs = dict(there)
    layout = codec.layout(source.args, specs)
    ordered = tuple((r, specs[r]) for r in codec.parts if r in specs)
    if layout.elements.whole:
        from ..codecs.kit.recoding_integers import recoding_of_integers

        group = getattr(source.args, "group", None)
        return recoding_of_integers(layout, ordered, other, target.args, group, named)
    if not other.encodes:
        raise OpError("M308", f"recode: no exact path leads from {codec.name} to {other.name} yet")
    shape = codec.decoded(source.args, [specs.get(r) for r in codec.parts], _numbers(codec)).shape
    of = spec_of(_numbers(other), shape)
    own, made = _as_given(other, target.args, of, layout, specs)
    parts = {r: s for r, s in zip(other.parts, made, strict=True) if s is not None}
    first, several = other.layout(own, parts), whole_of(layout)
    if several is not None and specs[several.role].numel > 1 and (one := whole_of(first)):
        # each matrix of a stack has its own, and keeps it
        parts[one.role] = spec_of(parts[one.role].dtype, shape[:-2])
        first = other.layout(own, parts)
    parts = _kept(other, own, parts, first, specs)
    last = other.layout(own, parts)
    return recoding(layout, ordered, last, tuple(parts.items()), exact_in or "")


def _as_given(
    codec: LayoutCodec, args: Any, of: Spec, layout: Any, given: Mapping[str, Spec]
) -> tuple[Any, Sequence[Spec | None]]:
    """The arguments and the specs of the parts; where `args` leave open what codes stand for or how
    many numbers share a scale, as it is in the parts that are there, if that is possible.
    """
    if getattr(args, "codes", "") is None:
        try:
            own = replace(args, codes=layout.elements.dtype)
            codec.validate(own, True)
            args = own
        except OpError:
            # codes of another format
            pass
    made, there = codec.encoded(args, of), given.get("scale")
    if there is None or getattr(args, "granularity", "") is not None:
        return args, made
    for said in ("tensor", "channel", "stack"):
        own = replace(args, granularity=said)
        try:
            found = codec.encoded(own, of)
        except OpError:
            continue
        scale = found[codec.parts.index("scale")]
        if scale is not None and scale.numel == there.numel:
            return own, found
    return args, made


def _numbers(codec: Codec) -> str:
    """A dtype of numbers of this format."""
    return "float32" if not codec.numbers or "float32" in codec.numbers else min(codec.numbers)


def _kept(
    codec: LayoutCodec,
    args: Any,
    parts: Mapping[str, Spec],
    layout: Any,
    given: Mapping[str, Spec],
) -> dict[str, Spec]:
    """The parts with the dtypes of those that are there, where `args` have an argument of the
    part's name, leave it open, and the layout takes that dtype in the same room.
    """
    known = {grid.role: grid.dtypes for grid in layout.grids()}
    known[layout.role] = getattr(layout.codes, "dtypes", ())
    out = dict(parts)
    for role, part in parts.items():
        there = given.get(role)
        if there is None or there.dtype == part.dtype or there.dtype not in known.get(role, ()):
            continue
        if not hasattr(args, role) or getattr(args, role) is not None:
            continue
        if role != layout.role or prod(there.shape) == prod(part.shape):
            out[role] = spec_of(there.dtype, part.shape)
    return out


OP = Recode()
