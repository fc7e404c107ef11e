"""What a number format is: the stored parts of one tensor, and how numbers become them and back.

A file `codecs/<module>.py` defines `CODEC`, an instance of a subclass of `Codec`; the name that
rules write is its `name`. A codec knows neither keys nor files. Each part has a role; the
names of parts on disk are in `names`, for detection and for the check that no part is
stranded. `dequantize`, `quantize` and detection are the only users.

What a rule may say beside `codec` and `dtype` the codec declares in its `Args`, a frozen dataclass
whose fields have descriptions and limits (`arg`). Rules write them flat, and from the declaration
alone come what a rule file may say, its schema, the reference page and the inverse.

Arrays are of raw elements and boxes are regions, as for a `ValueOp` (`ops/base.py`): numpy on the
CPU, torch tensors on another device, where the same bits must come out. A meter may be given
the errors of a sample only, where measuring all would take longer than computing.

Lists of specs and of arrays are in the order of `parts`; None stands for a part that is not there.
Elements of less than a byte come one to a byte, but for parts that a codec takes `packed`.

A codec makes the choices that a format leaves open by name: `like` is whose arithmetic encodes,
because two libraries that read the same format need not write the same codes, and `form` how parts
are stored. `reference` and `reference_parts` are written a second time without torch and without
haste: `verify` compares with them, and so does the kit (`testing/codeckit.py`) that every codec
must pass.

Provisional: number formats to come will change this contract, so a codec of a third party should
name the version of migrate that it was written for.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass as dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ..core.declaration import Dtype as Dtype
from ..core.declaration import Flag as Flag
from ..core.declaration import Integer as Integer
from ..core.declaration import Integers as Integers
from ..core.declaration import Text as Text
from ..core.declaration import arg as arg
from ..core.declaration import check_limits
from ..core.errors import OpError as OpError
from ..core.part_names import Convention as Convention

if TYPE_CHECKING:
    from ..core.spec import Spec
    from ..ops.base import Array, Box, Meter


# what becomes of numbers that are not finite, in every codec that encodes
NON_FINITE = ("refuse", "saturate", "keep")
# what layers of eight bits and less keep for their inputs and outputs, and why plain weights have
# no use for it (`Codec.unused`)
ACTIVATION_SCALES: Mapping[str, str] = dict.fromkeys(
    ("input_scale", "input_zero_point", "input_global_scale", "activation_scale", "output_scale"),
    "it scales activations, which a layer of plain weights does not encode",
)
# bytes of a part that is read while planning, where a codec does not say otherwise
MOST_PLANNED = 64 << 10


class Codec:
    """Base of all codecs. One that has no `encoded` is decoded only: rules with it are one way."""

    name: ClassVar[str]
    summary: ClassVar[str]
    # the roles in the order in which arrays are passed
    parts: ClassVar[tuple[str, ...]]
    # those of them that a tensor may be without
    optional: ClassVar[tuple[str, ...]] = ()
    # those of `optional` that are read and never made: a way back is without them
    unmade: ClassVar[tuple[str, ...]] = ()
    # roles beside `parts` that numbers have no use for, and why: `dequantize` takes them where a
    # rule names them, and drops them
    unused: ClassVar[Mapping[str, str]] = {}
    # those of `parts` whose bytes `settle` is given while planning, at most `most_planned` of each:
    # they say what no header says, as the shape of the numbers
    planning: ClassVar[tuple[str, ...]] = ()
    most_planned: ClassVar[int] = MOST_PLANNED
    # what producers call the parts, what travels with them, and what they look like
    names: ClassVar[tuple[Convention, ...]]
    # parts that encoding the others leaves in `memo` (`recall`): files hold them behind the others,
    # so that numbers are read once
    follow: ClassVar[tuple[str, ...]] = ()
    # the dtypes of the numbers; empty: any
    numbers: ClassVar[Collection[str]] = ()
    # bytes for each element that `reference` and `reference_parts` take beside what they are given
    # and make; None: whole arrays of float64
    reference_width: ClassVar[int | None] = None

    @dataclass(frozen=True, slots=True)
    class Args:
        """What a rule may say to this codec."""

    @property
    def encodes(self) -> bool:
        """Whether numbers can be encoded."""
        return type(self).encoded is not Codec.encoded

    def validate(self, args: Any, encoding: bool) -> None:
        """OpError M308 for arguments that no tensor could satisfy. What `arg` says of each is
        checked here; a codec with more to say calls this first.
        """
        check_limits(args, lambda: self.name)

    def settle(self, args: Any, specs: Sequence[Any], values: Mapping[str, bytes]) -> Any:
        """The arguments that decoding these parts is given: `args`, and what the bytes of the parts
        in `planning` say, by role.

        OpError M310, naming both, where bytes and the shapes of the parts disagree.
        """
        return args

    def foreseen(self, args: Any, spec: Spec) -> Mapping[str, bytes]:
        """By role, the bytes of the parts in `planning` that encoding makes of a tensor of this
        spec: what is encoded can be decoded again without a look at it. A codec that is a layout
        says here what is in all parts that are the same whatever the numbers are.
        """
        return {}

    def making(self, args: Any, roles: Collection[str]) -> Any:
        """`args` such that encoding makes these parts and no others; the caller looks at `encoded`
        whether it does.
        """
        return args

    def decoded(self, args: Any, specs: Sequence[Any], dtype: str) -> Spec:
        """The spec of the numbers. OpError M303, M304, M310 naming shapes where parts do not fit
        each other, M408 without a part that these need.
        """
        raise NotImplementedError

    def encoded(self, args: Any, spec: Spec) -> Sequence[Spec | None]:
        """The specs of the parts of a tensor of this spec. OpError if there are none."""
        raise NotImplementedError

    def decode_needs(self, args: Any, specs: Sequence[Any], box: Box) -> Sequence[Box | None]:
        """The box of each part that a box of the numbers comes from."""
        raise NotImplementedError

    def packed(self, args: Any, specs: Sequence[Any]) -> Collection[str]:
        """The roles of the parts of less than a byte an element whose boxes `decode` is given as
        the bytes that hold them, uint8: `decode_needs` cuts the last axis of these at whole bytes.
        Asked only where there is a part of such elements.
        """
        return ()

    def encode_needs(self, args: Any, spec: Spec, part: int, box: Box) -> Box:
        """The box of the numbers that a box of part number `part` comes from."""
        raise NotImplementedError

    def grain(self, args: Any, spec: Spec, part: int | None) -> tuple[int, ...]:
        """Multiples at which boxes of a part, or of the numbers (None), are cut at little cost."""
        raise NotImplementedError

    def decode_grain(self, args: Any, specs: Sequence[Any], dtype: str) -> tuple[int, ...]:
        """`grain` of the numbers of these parts."""
        return self.grain(args, self.decoded(args, specs, dtype), None)

    def decode_turns(self, args: Any, specs: Sequence[Any], dtype: str) -> bool:
        """Whether `decode` also takes an array of numpy for `out` whose last axis but one is
        contiguous, and not its last, and is faster than a transpose of what it decoded.
        """
        return False

    def decode(
        self,
        args: Any,
        arrays: Sequence[Any],
        specs: Sequence[Any],
        dtype: str,
        box: Box,
        out: Any,
        meter: Meter | None = None,
    ) -> None:
        """Fills `out` with the numbers of `box`: computed in float32, rounded to `dtype` once."""
        raise NotImplementedError

    def surveys(self, args: Any, spec: Spec) -> bool:
        """Whether something must be known of all numbers before the first code, as the largest of a
        tensor that has one scale: `encode` and `recall` are then given it as `survey`.
        """
        return False

    def survey(self, args: Any, array: Any, spec: Spec, box: Box, known: Any = None) -> Any:
        """What is known of the numbers after one more box of them, `array`, in little memory.

        `known` is what was found before, None of the first box; boxes come in row-major order and
        are of any size. OpError M406 as `encode`.
        """
        raise NotImplementedError

    def remembers(self, args: Any, spec: Spec) -> int:
        """The most bytes that `encode` keeps in `memo`."""
        return 0

    def encode(
        self,
        args: Any,
        array: Any,
        spec: Spec,
        part: int,
        box: Box,
        out: Any,
        meter: Meter | None = None,
        memo: dict[str, Any] | None = None,
        survey: Any = None,
    ) -> None:
        """Fills `out` with `box` of part number `part`, from the box of the numbers that
        `encode_needs` names.

        `memo`, if there is one, is shared by all boxes and parts of one tensor: what is found for
        one part may serve the next. `survey` is there where `surveys` says so. OpError M406 at the
        first number that is not finite, unless `non_finite` says otherwise.
        """
        raise NotImplementedError

    def recall(
        self,
        args: Any,
        spec: Spec,
        part: int,
        box: Box,
        out: Any,
        memo: dict[str, Any] | None = None,
        survey: Any = None,
    ) -> bool:
        """Fills `out` with `box` of part number `part` from `memo` and `survey` alone, as `encode`
        would; False where these do not hold enough.
        """
        return False

    def reference(self, args: Any, arrays: Sequence[Any], specs: Sequence[Any], dtype: str) -> Any:
        """The numbers of whole parts as raw numpy elements, plainly, for `verify` and the kit."""
        raise NotImplementedError

    def reference_rows(self, args: Any, specs: Sequence[Any]) -> int | None:
        """Along the first axis of the numbers, the multiple at which `reference` may be given the
        boxes that `decode_needs` names for whole parts; None: it takes whole parts only.
        """
        return None

    def reference_parts(
        self, args: Any, array: Any, spec: Spec, survey: Any = None, start: int = 0
    ) -> list[Any]:
        """The parts of a tensor as raw numpy elements, by a second and plain implementation.

        With `survey`, what `reference_survey` found in a tensor of `spec`, `array` has rows of it
        from `start` on, which end where blocks do, and what comes are the rows of parts that are
        made of these. Without an array the whole parts come that follow from `survey` alone, and
        None for each other.
        """
        raise NotImplementedError

    def reference_by_rows(self, args: Any, spec: Spec) -> bool:
        """Whether `reference_parts` makes rows of parts of the rows of numbers that `encode_needs`
        names, given what `reference_survey` found where there is a survey.
        """
        return not self.surveys(args, spec)

    def reference_survey(
        self, args: Any, array: Any, spec: Spec, start: int, known: Any = None
    ) -> Any:
        """What `survey` finds, by a second and plain implementation, after one more `array` of rows
        of the first axis, those from `start` on.
        """
        raise NotImplementedError

    def exact(self, args: Any, specs: Sequence[Any], dtype: str) -> bool:
        """Whether decoding to `dtype` keeps every value, whatever the parts hold."""
        return False

    def returns(self, args: Any, spec: Spec) -> str:
        """What of parts that were decoded to `spec` encoding it with `args` brings back: "bit for
        bit", or what does not return, or what it depends on.
        """
        return "depends on the data"

    def bound(self, args: Any) -> str:
        """The largest error of encoding, as a sentence with its formula."""
        raise NotImplementedError

    def samples(self) -> Iterable[tuple[Any, Spec]]:
        """(args, spec of numbers to encode) for the kit; some shapes are ragged or stacked."""
        return ()

    def stored(self) -> Iterable[tuple[Any, list[tuple[Spec, Array] | None]]]:
        """(args, parts with their raw elements) to decode, for the kit: of a codec that does not
        encode, and of forms that it reads and does not write.
        """
        return ()
