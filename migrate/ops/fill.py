"""`fill`: a new tensor of one value for each input, of which nothing but its name is read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ..core import view
from ..core.errors import did_you_mean
from ..core.spec import ALIASES, BITS, Spec, spec
from ..elements.raw import carrier, encoded, raw
from .base import Array, Dtype, Integers, Number, OneWay, Op, OpError, Shape, arg, dataclass

if TYPE_CHECKING:
    from ..core.view import View


class FillOp(Op):
    kind = "make"
    summary = (
        "makes a tensor of one value in place of each that the rule reads; with "
        "`keep_source: true` beside it"
    )

    @dataclass(frozen=True, slots=True)
    class Args:
        value: Number = arg("what each element equals")
        dtype: Dtype = arg("torch's name of the dtype")
        shape: Integers = arg("the shape; [] is a scalar", least=0)

    def validate(self, args: Args) -> None:
        super().validate(args)
        dtype = ALIASES.get(args.dtype, args.dtype)
        if dtype not in BITS:
            raise OpError(
                "M308",
                f"fill: there is no dtype `{args.dtype}`",
                help=did_you_mean(args.dtype, [*BITS]),
            )
        encoded("fill: `value`", dtype, args.value)

    def trace(self, args: Args, views: Sequence[View], parts: int = 1) -> list[View]:
        self.validate(args)
        return [view.filled(tuple(args.shape), args.value) for _ in views]

    def infer(self, args: Args, specs: Sequence[Spec], parts: int = 1) -> list[Spec]:
        self.validate(args)
        return [spec(ALIASES.get(args.dtype, args.dtype), tuple(args.shape)) for _ in specs]

    def eager(
        self, args: Args, arrays: Sequence[Array], parts: int = 1, dtypes: Sequence[str] = ()
    ) -> list[Array]:
        import numpy as np

        made = ALIASES.get(args.dtype, args.dtype)
        out = []
        for _ in arrays:
            one = np.empty(args.shape, carrier(made))
            one[...] = raw(made, args.value)
            out.append(one)
        return out

    def invert(self, args: Args, enumerated: bool = False) -> OneWay:
        return OneWay(
            "fill makes its tensor out of nothing",
            "with `keep_source: true` the inverse removes what the rule made",
        )

    def samples(self) -> Iterable[tuple[dict[str, Any], list[Shape]]]:
        yield {"value": 0, "dtype": "int64", "shape": []}, [(4,)]
        yield {"value": 1, "dtype": "bfloat16", "shape": [2, 3]}, [(4,)]
        yield {"value": -1.5, "dtype": "float4_e2m1fn", "shape": [4]}, [()]


OP = FillOp()
