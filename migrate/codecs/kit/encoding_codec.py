"""A codec that encodes what a layout says: a rule says whose arithmetic makes scales and codes.

Beside its name, parts, arguments and `layout`, a codec of this kind writes `rule`, `bound` and its
samples. Which parts are made, their dtypes and shapes follow from the layout.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

from ...core.errors import OpError
from ...core.spec import Spec
from ...core.spec import spec as spec_of
from .codec import LayoutCodec
from .encoding import TensorEncoding
from .encoding_boxes import TILE_MOST
from .geometry import stored_shapes
from .turned_encoding import TurnedEncoding, by_rows, turned_parts, turned_roles, turned_spec

if TYPE_CHECKING:
    from ...ops.base import Box, Meter
    from .layout import NumberLayout
    from .scale_rules import ScaleRule


class EncodingCodec(LayoutCodec):
    """Base of codecs that are layouts and encode: they add `rule` and an argument `non_finite`."""

    follow: ClassVar[tuple[str, ...]] = ("scale",)
    # the reference has some float32 numbers for each entry of a grid, of groups of 16 and more
    reference_width = 4

    def rule(self, args: Any, spec: Spec) -> ScaleRule:
        """Whose arithmetic encodes numbers of this spec, and how."""
        raise NotImplementedError

    def written(self, args: Any, spec: Spec) -> NumberLayout:
        """The layout in which numbers of this spec are stored: what `layout` says without a look at
        parts.
        """
        return self.layout(args, {})

    def dtypes(self, args: Any, spec: Spec) -> Mapping[str, str]:
        """role -> dtype of what is written; of others it is the first that the layout has."""
        return {}

    def encoded(self, args: Any, spec: Spec) -> Sequence[Spec | None]:
        """The specs of the parts that the layout has, with all axes that the numbers have; a codec
        whose scales are written without those of length 1 replaces them.

        OpError M303 for numbers of a dtype that is not encoded, M304 for too few axes.
        """
        return list(_encoded(self, args, spec))

    def making(self, args: Any, roles: Collection[str]) -> Any:
        # of a codec whose numbers may have a zero, the default
        unsaid = getattr(args, "symmetric", False) is None
        return replace(args, symmetric="zero" not in roles) if unsaid else args

    def encoding(self, args: Any, spec: Spec) -> TensorEncoding | TurnedEncoding:
        """How a tensor of this spec is encoded."""
        return _encoding(self, args, spec)

    def _by_rows(self, args: Any, spec: Spec) -> tuple[TensorEncoding, set[str]]:
        """The same of parts that are stored by rows, and the roles of those that are not."""
        found = self.encoding(args, spec)
        return (found.rows, found.turned) if isinstance(found, TurnedEncoding) else (found, set())

    def encode_needs(self, args: Any, spec: Spec, part: int, box: Box) -> Box:
        return self.encoding(args, spec).needs(self.parts[part], box)

    def grain(self, args: Any, spec: Spec, part: int | None) -> tuple[int, ...]:
        if part is None:
            return (1,) * len(spec.shape)
        return self.encoding(args, spec).grain(self.parts[part])

    def surveys(self, args: Any, spec: Spec) -> bool:
        return self.encoding(args, spec).surveyed

    def survey(self, args: Any, array: Any, spec: Spec, box: Box, known: Any = None) -> Any:
        return self.encoding(args, spec).survey(array, box, known)

    def remembers(self, args: Any, spec: Spec) -> int:
        return self.encoding(args, spec).remembers()

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
        return self.encoding(args, spec).recall(self.parts[part], box, out, memo, survey)

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
        self.encoding(args, spec).encode(array, self.parts[part], box, out, meter, memo, survey)

    def reference_parts(
        self, args: Any, array: Any, spec: Spec, survey: Any = None, start: int = 0
    ) -> list[Any]:
        from .encoding_reference import parts_of_survey, reference_parts, survey_of_rows

        encoding, turned = self._by_rows(args, spec)
        if survey is None:
            made = reference_parts(encoding, array)
        elif array is None:
            made = parts_of_survey(encoding, survey)
        else:
            found = survey_of_rows(encoding, survey, start, len(array))
            rows, _ = self._by_rows(args, replace(spec, shape=array.shape))
            made = reference_parts(rows, array, found)
        made = turned_parts(made, turned)
        return [made.get(role) for role in self.parts]

    def reference_by_rows(self, args: Any, spec: Spec) -> bool:
        encoding, turned = self._by_rows(args, spec)
        # the blocks of a flat layout are not those of rows, and some rows have no padding or are
        # columns of what is stored
        grids = encoding.layout.grids()
        whole = encoding.layout.flat or any(g.padded[0] > 1 or g.transposed for g in grids)
        return bool(spec.shape) and not whole and (not turned or len(spec.shape) > 2)

    def reference_survey(
        self, args: Any, array: Any, spec: Spec, start: int, known: Any = None
    ) -> Any:
        from .encoding_reference import reference_survey

        return reference_survey(self._by_rows(args, spec)[0], array, start, known)


@lru_cache(maxsize=256)
def _encoding(codec: EncodingCodec, args: Any, spec: Spec) -> TensorEncoding | TurnedEncoding:
    found = zip(codec.parts, codec.encoded(args, spec), strict=True)
    parts = {role: part for role, part in found if part is not None}
    layout, rule = codec.written(args, spec), codec.rule(args, spec)
    turned = turned_roles(layout)
    if turned:
        layout = by_rows(layout)
        parts = {r: turned_spec(part) if r in turned else part for r, part in parts.items()}
    rows = TensorEncoding(layout, spec, parts, rule, args.non_finite, codec.foreseen(args, spec))
    return TurnedEncoding(rows, turned) if turned else rows


@lru_cache(maxsize=256)
def _encoded(codec: EncodingCodec, args: Any, spec: Spec) -> tuple[Spec | None, ...]:
    if codec.numbers and spec.dtype not in codec.numbers:
        raise OpError(
            "M303",
            f"{codec.name} encodes {', '.join(codec.numbers)}, not {spec.dtype}",
            help="write a `cast` before it",
        )
    layout = codec.written(args, spec)
    if layout.zero is not None:
        block = zip(layout.zero.block, spec.shape[-2:], strict=False)
        if (count := prod(each or n for each, n in block)) > TILE_MOST:
            # no box holds them, and what is surveyed are largest magnitudes
            raise OpError("M304", f"{codec.name}: one zero for {count} numbers; write `group`")
    dtypes = {**layout.first_dtypes(), **codec.dtypes(args, spec)}
    shapes = stored_shapes(layout, spec.shape, dtypes)
    if len(spec.shape) < 2 and not layout.flat:
        # of those that a layout counts in front
        shapes = {r: s[len(s) - len(spec.shape) :] for r, s in shapes.items()}
    made = (spec_of(dtypes[r], shapes[r]) if r in shapes else None for r in codec.parts)
    return tuple(made)
