"""A codec that is a layout: what a file of `codecs` subclasses.

`layout` says what the parts are, from the arguments and the specs of those that are there; shapes,
boxes, decoding, its error, and the reference follow. A codec that is decoded only writes nothing
else but its name, its parts, and what it yields to be tested with (`stored`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import lcm
from typing import TYPE_CHECKING, Any, ClassVar

from ...core.spec import BITS, Spec
from ..base import Codec
from .geometry import Extents, decoded, geometry
from .layout import NumberLayout, Packing

if TYPE_CHECKING:
    from ...ops.base import Box, Meter


class LayoutCodec(Codec):
    """A codec whose decoding is what a layout says."""

    # of one that does not encode, whether parts can be made of those of other integers: as the
    # first shape of each in `names` says
    recodes: ClassVar[bool] = False

    def layout(self, args: Any, specs: Mapping[str, Spec]) -> NumberLayout:
        """What the parts that are there are, by role. OpError M310 where their shapes contradict
        each other or what `args` say.
        """
        raise NotImplementedError

    def recoded(self, args: Any, numbers: Spec) -> Mapping[str, Spec] | None:
        """By role, the parts of integers of this shape that `recode` makes, where a codec that
        `recodes` says them otherwise than by `names`.
        """
        return None

    def decoded(self, args: Any, specs: Sequence[Any], dtype: str) -> Spec:
        there = self.by_role(specs)
        return decoded(self.layout(args, there), there, dtype)

    def packed(self, args: Any, specs: Sequence[Any]) -> tuple[str, ...]:
        there = self.by_role(specs)
        layout = self.layout(args, there)
        return () if bytes_of_codes(layout, there) is there else (layout.role,)

    def decode_needs(self, args: Any, specs: Sequence[Any], box: Box) -> Sequence[Box | None]:
        geo = self._extents(args, specs)
        needed, role = geo.needs(box), geo.layout.role
        if geo.spec(role) != specs[self.parts.index(role)]:
            *lead, (low, high) = needed[role]
            needed[role] = (*lead, (2 * low, 2 * high))
        # of a part that says something while planning nothing is read any more
        return [
            None if spec is None else needed.get(role, ((0, 0),) * len(spec.shape))
            for role, spec in zip(self.parts[: len(specs)], specs, strict=True)
        ]

    def decode_grain(self, args: Any, specs: Sequence[Any], dtype: str) -> tuple[int, ...]:
        return self._extents(args, specs).grain()

    def decode_turns(self, args: Any, specs: Sequence[Any], dtype: str) -> bool:
        from .lookup import ByteTables

        geo = self._extents(args, specs)
        return not geo.layout.flat and ByteTables(geo.layout, geo, dtype).turns

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
        from .decoding import decode_box

        decode_box(self._extents(args, specs), self.by_role(arrays), dtype, box, out, meter)

    def reference(self, args: Any, arrays: Sequence[Any], specs: Sequence[Any], dtype: str) -> Any:
        from .reference import reference

        there = self.by_role(specs)
        layout = _of_rows(self.layout(args, there), there)
        return reference(layout, there, self.by_role(arrays), dtype)

    def reference_rows(self, args: Any, specs: Sequence[Any]) -> int | None:
        extents = self._extents(args, specs)
        layout, axes = extents.layout, len(extents.shape)
        grids = layout.grids()
        # their rows lack those that pad a part
        padded = any(g.padded[0] > 1 or (g.transposed and max(g.padded) > 1) for g in grids)
        packed = layout.codes if isinstance(layout.codes, Packing) else None
        down = packed is not None and packed.axis == -2
        turned = packed is not None and packed.transposed
        # what is stored by columns says its own rows
        unlike = layout.shape is not None and (axes > 2 or (down and not turned))
        if layout.flat or unlike or axes < 2 or padded:
            return None
        if axes > 2:
            return 1
        rows = extents.unit() if down else 1
        for grid in layout.grids():
            unit = 128 if grid.swizzled else 1
            if grid.packing is not None and grid.packing.axis == -2:
                unit, _ = grid.packing.unit(extents.spec(grid.role).dtype)
            rows = lcm(rows, max(extents.block(grid)[0], 1) * unit)
        return rows

    def exact(self, args: Any, specs: Sequence[Any], dtype: str) -> bool:
        from .exactness import is_exact

        there = self.by_role(specs)
        return is_exact(self.layout(args, there), there, dtype)

    def by_role(self, items: Sequence[Any]) -> dict[str, Any]:
        """role -> what there is of each part; those at the end may be left out."""
        roles = self.parts[: len(items)]
        return {r: i for r, i in zip(roles, items, strict=True) if i is not None}

    def _extents(self, args: Any, specs: Sequence[Any]) -> Extents:
        return _extents(self, args, tuple(specs))


@lru_cache(maxsize=1024)
def _extents(codec: LayoutCodec, args: Any, specs: tuple[Any, ...]) -> Extents:
    """What each box of each tensor with these parts asks for."""
    there = codec.by_role(specs)
    layout = codec.layout(args, there)
    return geometry(layout, bytes_of_codes(layout, there))


def _of_rows(layout: NumberLayout, specs: Mapping[str, Spec]) -> NumberLayout:
    """The layout of as many rows of numbers as parts have, where `reference_rows` lets them have
    fewer than the shape of the numbers that was told.
    """
    codes, shape = layout.codes, layout.shape
    if layout.flat or shape is None or len(shape) != 2 or not isinstance(codes, Packing):
        return layout
    if codes.transposed or codes.axis == -2:
        return layout
    return layout.of_shape((specs[layout.role].shape[0], shape[1]))


def bytes_of_codes(layout: NumberLayout, specs: Mapping[str, Spec]) -> Mapping[str, Spec]:
    """`specs`, but codes of a dtype of 4 bits as the uint8 tensor that they are packed in, where
    the layout has one with the same codes in the same places.
    """
    held, codes = specs.get(layout.role), layout.codes
    if held is None or BITS[held.dtype] != 4 or not held.shape or held.shape[-1] % 2:
        return specs
    if not isinstance(codes, Packing) or "uint8" not in codes.dtypes or layout.flat:
        return specs
    if codes != Packing(4, codes.dtypes, padded=codes.padded):
        return specs
    return {**specs, layout.role: Spec("uint8", (*held.shape[:-1], held.shape[-1] // 2))}
