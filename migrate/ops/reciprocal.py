"""`reciprocal`: y = 1 / x, computed in float64 and rounded once: the quotient of the two numbers.

Libraries store the scale of a layer's inputs either way: ModelOpt what codes are multiplied by,
compressed-tensors what they are divided by. The reciprocal of a reciprocal is mostly not the number
that was there, so that a way back is no exact one. What has no reciprocal in the dtype is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..core.spec import Spec, spec
from ..elements.numbers import as_kind, encode, module, numbers, put
from ._elementwise import Elementwise, differ, measured_slices, only_floats, tell
from .base import Array, Loss, Meter, Only, OpCall, OpError, Shape, arg, dataclass, step


class Reciprocal(Elementwise):
    summary = "makes 1 / x of the numbers x, rounded once"

    @dataclass(frozen=True, slots=True)
    class Args:
        only: Only | None = arg("limits the op to tensors with these capture values", default=None)

    def infer(self, args: Args, specs: Sequence[Spec], parts: int = 1) -> list[Spec]:
        only_floats("reciprocal", specs)
        return [spec(s.dtype, s.shape) for s in specs]

    def loss(self, args: Args) -> Loss:
        return Loss.LOSSY

    def invert(self, args: Args, enumerated: bool = False) -> OpCall:
        return step("reciprocal", only=args.only)

    def chunk(self, args: Args, raw: Any, spec: Spec, out: Any, meter: Meter | None) -> Any:
        x = as_kind(numbers(raw, spec.dtype), "f8")
        y = 1 / x
        put(encode(y, spec.dtype)[0], out)
        made = numbers(out, spec.dtype)
        refused = ~(module(made).isfinite(made) & (made != 0))
        if meter is not None and not bool(refused.any()):
            for part in measured_slices(x):
                # a quotient that is a float64 may still be a rounded one
                tell(meter, y[part], made[part], spec.dtype, differ(y[part], made[part]))
        return refused

    def refusal(self, args: Args, spec: Spec, value: str, at: str) -> OpError:
        return OpError(
            "M406",
            f"reciprocal: {value}{at} has no reciprocal in {spec.dtype}",
            help="a scale is not zero, infinite or NaN: look where it comes from",
        )

    def eager(
        self, args: Args, arrays: Sequence[Array], parts: int = 1, dtypes: Sequence[str] = ()
    ) -> list[Array]:
        import numpy as np

        from ..elements.reference import reference_values, rounded

        with np.errstate(all="ignore"):
            return [
                rounded(np.reciprocal(reference_values(array, dtype)), dtype)
                for array, dtype in zip(arrays, dtypes, strict=True)
            ]

    def samples(self) -> Iterable[tuple[dict[str, Any], list[Shape]]]:
        yield {}, [(8, 16)]
        yield {}, [()]


OP = Reciprocal()
