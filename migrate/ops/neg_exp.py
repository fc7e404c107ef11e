"""`neg_exp`: y = -exp(x), computed in float64 and rounded once: the A of a Mamba layer from its
stored logarithm.

Decision: one way. log(-y) would be right to a unit in the last place, which is not the bits that
were there. Libraries differ in the last place of a float64 exponential too, so a GPU is not
promised to give the CPU's bits; either is within one unit in the last place of the dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..core.spec import Spec, spec
from ..elements.codes import FLOATS
from ..elements.numbers import as_kind, encode, module, numbers, put
from ._elementwise import Elementwise, bounded, differ, measured_slices, only_floats, tell
from .base import Array, Loss, Meter, OneWay, Only, Shape, arg, dataclass


class NegExp(Elementwise):
    summary = "makes -exp(x) of the numbers x; within 1 unit in the last place"
    same_bits = False

    @dataclass(frozen=True, slots=True)
    class Args:
        only: Only | None = arg("limits the op to tensors with these capture values", default=None)

    def infer(self, args: Args, specs: Sequence[Spec], parts: int = 1) -> list[Spec]:
        only_floats("neg_exp", specs)
        return [spec(s.dtype, s.shape) for s in specs]

    def loss(self, args: Args) -> Loss:
        return Loss.LOSSY

    def invert(self, args: Args, enumerated: bool = False) -> OneWay:
        return OneWay(
            "-exp(x) rounds, so that x does not come back to the bit",
            "`inverse: skip` leaves the rule out on a downgrade; `keep` what it makes, or write a "
            "file with the reversed edge",
        )

    def chunk(self, args: Args, raw: Any, spec: Spec, out: Any, meter: Meter | None) -> Any:
        x = as_kind(numbers(raw, spec.dtype), "f8")
        y = -module(x).exp(x)
        # whatever the sign and payload, a NaN comes out as one
        y = module(x).where(x != x, float("nan"), y)
        put(encode(y, spec.dtype)[0], out)
        if meter is not None:
            for part in measured_slices(x):
                _tell(meter, x[part], y[part], numbers(out[part], spec.dtype), spec.dtype)
        return None

    def eager(
        self, args: Args, arrays: Sequence[Array], parts: int = 1, dtypes: Sequence[str] = ()
    ) -> list[Array]:
        import numpy as np

        from ..elements.reference import quiet, reference_values, rounded

        made = []
        for array, dtype in zip(arrays, dtypes, strict=True):
            x = reference_values(array, dtype)
            with np.errstate(all="ignore"):
                # numpy's exponential of strided numbers may differ in the last place
                y = rounded(-np.exp(np.asarray(x, order="C")), dtype)
            made.append(np.where(np.isnan(x), array.dtype.type(quiet(dtype)), y))
        return made

    def slack(self, args: Args, arrays: Sequence[Array], dtypes: Sequence[str] = ()) -> list[Array]:
        """One unit in the last place."""
        from ..elements.reference import reference_values, spacing

        made = self.eager(args, arrays, dtypes=dtypes)
        return [
            spacing(reference_values(y, dtype), dtype)
            for y, dtype in zip(made, dtypes, strict=True)
        ]

    def samples(self) -> Iterable[tuple[dict[str, Any], list[Shape]]]:
        yield {}, [(8, 16)]
        yield {}, [(5,)]


def _tell(meter: Meter, x: Any, y: Any, got: Any, dtype: str) -> None:
    finite = module(x).isfinite(x)
    # -exp(x) is no zero, and but for that of zero no float
    wanted = module(x).where(finite & (y == 0), -FLOATS["float64"].quantum, bounded(y, finite))
    sure = dtype != "float64" and (differ(wanted, got) or not bool((finite & (x != 0)).any()))
    tell(meter, wanted, got, dtype, sure)


OP = NegExp()
