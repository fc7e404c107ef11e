"""What a number format is: the stored parts of one tensor, and how numbers become them and back.

A file `codecs/<module>.py` defines `CODEC`, an instance of a subclass of `Codec`; the name that
rules write is its `name`. A codec knows neither keys nor files. Each part has a role; the
names of parts on disk are in `leaves`, for detection and for the check that no part is
stranded. `dequantize`, `quantize` and detection are the only users.

Arrays are of raw elements and boxes are regions, as for a `ValueOp` (`ops/base.py`): numpy on the
CPU, torch tensors on another device, where the same bits must come out. A meter may be given
the errors of a sample only, where measuring all would take longer than computing.

A codec makes the choices that a format leaves open by name (`like`), because two libraries that
read the same format need not write the same codes. `reference` and `reference_parts` are written a
second time without torch and without haste: `verify` compares with them, and so does the kit
(`testing/codeckit.py`) that every codec must pass.

Provisional: number formats to come will change this contract, so a codec of a third party should
name the version of migrate that it was written for.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from ..core.errors import OpError as OpError

if TYPE_CHECKING:
    from ..core.spec import Spec
    from ..ops.base import Box, Meter


# what becomes of numbers that are not finite, in every codec
NON_FINITE = ("refuse", "saturate", "keep")


class Leaves(NamedTuple):
    """How one producer calls the parts: role -> last segments of the key, e.g. {"weight": "weight",
    "scale": "weight_scale_inv"}.
    """

    producer: str
    by_role: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Options:
    """What a rule may say to `dequantize` and `quantize` beside codec and dtype; None: not said. A
    codec refuses what it has no use for.
    """

    block: tuple[int, ...] | None = None
    like: str | None = None
    scale: str | None = None
    scale_fmt: str | None = None
    non_finite: str = "refuse"


class Codec:
    """Base of all codecs."""

    name: ClassVar[str]
    summary: ClassVar[str]
    # the roles in the order in which arrays are passed
    parts: ClassVar[tuple[str, ...]]
    # parts that travel together, by producer
    leaves: ClassVar[tuple[Leaves, ...]]
    # parts that encoding the others leaves in `memo` (`recall`): files hold them behind the others,
    # so that numbers are read once
    follow: ClassVar[tuple[str, ...]] = ()
    # what rule files may say, whatever the tensors are: the words of `like`, `scale` and
    # `scale_fmt`, of which those that are not here can be any; the length of `block`, and the
    # dtypes of the numbers
    words: ClassVar[Mapping[str, Collection[str]]] = {}
    sides: ClassVar[int | None] = None
    numbers: ClassVar[Collection[str]] = ()
    # bytes for each element that `reference` and `reference_parts` take beside what they are given
    # and make; None: whole arrays of float64
    reference_width: ClassVar[int | None] = None

    def validate(self, options: Options, encoding: bool) -> None:
        """OpError M308 for options or values of options that this codec does not have."""

    def decoded(self, options: Options, specs: Sequence[Spec], dtype: str) -> Spec:
        """The spec of the numbers; `specs` in the order of `parts`. OpError M303, M304 naming
        shapes where parts do not fit each other.
        """
        raise NotImplementedError

    def encoded(self, options: Options, spec: Spec) -> list[Spec]:
        """The specs of the parts, in order, of a tensor of this spec. OpError if there are none."""
        raise NotImplementedError

    def decode_needs(self, options: Options, specs: Sequence[Spec], box: Box) -> list[Box]:
        """The box of each part that a box of the numbers comes from."""
        raise NotImplementedError

    def encode_needs(self, options: Options, spec: Spec, part: int, box: Box) -> Box:
        """The box of the numbers that a box of part number `part` comes from."""
        raise NotImplementedError

    def grain(self, options: Options, spec: Spec, part: int | None) -> tuple[int, ...]:
        """Multiples at which boxes of a part, or of the numbers (None), are cut at little cost."""
        raise NotImplementedError

    def decode(
        self,
        options: Options,
        arrays: Sequence[Any],
        specs: Sequence[Spec],
        dtype: str,
        box: Box,
        out: Any,
        meter: Meter | None = None,
    ) -> None:
        """Fills `out` with the numbers of `box`: computed in float32, rounded to `dtype` once."""
        raise NotImplementedError

    def remembers(self, options: Options, spec: Spec) -> int:
        """The most bytes that `encode` keeps in `memo`."""
        return 0

    def encode(
        self,
        options: Options,
        array: Any,
        spec: Spec,
        part: int,
        box: Box,
        out: Any,
        meter: Meter | None = None,
        memo: dict[str, Any] | None = None,
    ) -> None:
        """Fills `out` with `box` of part number `part`, from the box of the numbers that
        `encode_needs` names.

        `memo`, if there is one, is shared by all boxes and parts of one tensor: what is found for
        one part may serve the next. OpError M406 at the first number that is not finite, unless
        `non_finite` says otherwise.
        """
        raise NotImplementedError

    def recall(
        self, options: Options, spec: Spec, part: int, box: Box, out: Any, memo: dict[str, Any]
    ) -> bool:
        """Fills `out` with `box` of part number `part` from `memo` alone, as `encode` would; False
        where it does not hold enough.
        """
        return False

    def reference(
        self, options: Options, arrays: Sequence[Any], specs: Sequence[Spec], dtype: str
    ) -> Any:
        """The numbers of whole parts as raw numpy elements, plainly, for `verify` and the kit."""
        raise NotImplementedError

    def reference_parts(self, options: Options, array: Any, spec: Spec) -> list[Any]:
        """The parts of a tensor as raw numpy elements, by a second and plain implementation."""
        raise NotImplementedError

    def exact(self, options: Options, specs: Sequence[Spec], dtype: str) -> bool:
        """Whether decoding to `dtype` keeps every value, whatever the parts hold."""
        return False

    def bound(self, options: Options) -> str:
        """The largest error of encoding, as a sentence with its formula."""
        raise NotImplementedError

    def samples(self) -> Iterable[tuple[Options, Spec]]:
        """(options, spec of numbers to encode) for the kit; some shapes are ragged or stacked."""
        raise NotImplementedError
