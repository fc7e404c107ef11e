"""What a computed tensor costs: whether a part of it needs only parts of its inputs, and how boxes
of it are cut.

Both the plan, which says how much memory a run takes, and the run ask here. Only shapes are looked
at.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import ops
from ..core.spec import BITS, Spec, unit
from ..ops.base import ValueOp

if TYPE_CHECKING:
    from ..ops.base import Box
    from .graph import Computation

# a box with its inputs: in a last-level cache, and few enough calls
CHUNK = 12 << 20
# the bytes that are computed at once of results that come in blocks: their arithmetic is many
# calls, each of which should take longer than the interpreter's lock to change hands
BLOCKS = 4 << 20
# inputs that are cheaper to read again than to think about
FEW = 64 << 10
# the op's own arrays, as a multiple of its inputs and output
TEMPORARIES = 2


class Kind(NamedTuple):
    """What calls of one op, arguments and specs have in common, for one output.

    `shape` counts whole-byte units of `unit` = (elements, bytes); `grain` counts elements. `least`
    are the bytes of the smallest box with its inputs and temporaries. `regional`: it is computed
    box by box, else whole.
    """

    op: Any
    args: Any
    specs: tuple[Spec, ...]
    output: int
    spec: Spec
    shape: tuple[int, ...]
    unit: tuple[int, int]
    grain: tuple[int, ...]
    least: int
    regional: bool

    def needs(self, box: Box) -> list[Box]:
        found: list[Box] = self.op.needs(self.args, self.specs, self.output, box)
        return found

    def cost(self, box: Box) -> int:
        """Bytes of the box and of the boxes it needs, as raw elements."""
        return _raw_bytes(self.spec.dtype, size_of(box)) + sum(
            _raw_bytes(s.dtype, size_of(b))
            for s, b in zip(self.specs, self.needs(box), strict=True)
        )

    def rounded(self, box: Box) -> Box:
        """The smallest box on the grain that holds `box`."""
        return tuple(
            (a // g * g, min(n, -(-b // g) * g))
            for (a, b), g, n in zip(box, self.grain, self.spec.shape, strict=True)
        )

    def widened(self, box: Box, limit: int) -> Box:
        """The box on the grain, and with its last axes whole as far as that costs at most
        `limit`.
        """
        box = self.rounded(box)
        for axis in range(len(box) - 1, 0, -1):
            wider = (*box[:axis], (0, self.spec.shape[axis]), *box[axis + 1 :])
            if self.cost(wider) > limit:
                break
            box = wider
        return box

    def cuts(self, box: Box, limit: int) -> Iterator[Box]:
        """The box in parts that cost at most `limit`, cut at multiples of the grain, leading axes
        first.
        """
        cost = self.cost(box)
        if cost > limit:
            for axis, ((a, b), g) in enumerate(zip(box, self.grain, strict=True)):
                first, last = a // g, -(-b // g)
                if last - first < 2:
                    continue
                step = max(1, (last - first) * limit // cost)
                for i in range(first, last, step):
                    part = (max(a, i * g), min(b, (i + step) * g))
                    yield from self.cuts((*box[:axis], part, *box[axis + 1 :]), limit)
                return
        yield box


def kind_of(call: Computation, output: int, spec: Spec) -> Kind:
    """The kind of a call's output."""
    op, specs = ops.get(call.op_call.op), tuple(t.spec for t in call.inputs)
    elements, size = unit(spec.dtype)
    inputs = sum(_raw_bytes(s.dtype, s.numel) for s in specs)
    everything = TEMPORARIES * (inputs + _raw_bytes(spec.dtype, spec.numel))
    grain = (1,) * len(spec.shape)
    whole = Kind(
        op,
        call.op_call.args,
        specs,
        output,
        spec,
        spec.shape,
        (elements, size),
        grain,
        everything,
        False,
    )
    if not isinstance(op, ValueOp) or not spec.numel or not spec.shape or spec.shape[-1] % elements:
        return whole
    grain = tuple(op.grain(call.op_call.args, specs, output))
    # a unit is not cut
    grain = (*grain[:-1], -(-grain[-1] // elements) * elements)
    kind = whole._replace(grain=grain, shape=(*spec.shape[:-1], spec.shape[-1] // elements))
    box = tuple((0, min(g, n)) for g, n in zip(grain, spec.shape, strict=True))
    least = kind.cost(box)
    needed = least - _raw_bytes(spec.dtype, size_of(box))
    if needed >= inputs > FEW and size_of(box) < spec.numel:
        return whole
    return kind._replace(least=TEMPORARIES * least, regional=True)


def _raw_bytes(dtype: str, numel: int) -> int:
    return numel * max(8, BITS[dtype]) // 8


def size_of(box: Box) -> int:
    """Elements of a box."""
    return prod(b - a for a, b in box)
