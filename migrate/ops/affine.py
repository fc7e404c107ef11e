"""`affine`: y = x * mul + add, in float32 (float64 for float64), rounded once to the dtype of x.

Decisions: the factor and the summand are first rounded to the type that is computed with. A NaN
goes on as it is, its sign turned by a negative `mul`, because processors differ in what they make
of it; `add: 0` is left out, because it would turn -0 to 0. Turning signs is exact; a power of two
is exact but for numbers at the ends of the range, so that `exact` has to look. Such a factor may be
one that float32 does not hold, or whose inverse it does not: float64 computes with it then. All
else rounds, `w + 1` for a norm too: bfloat16 has 8 bits, and a weight of 0.01 loses most of them
beside 1. Errors are those of the numbers that the rule says, in float64.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import frexp, isfinite
from typing import Any

from ..core.spec import BITS, Spec, spec
from ..elements.numbers import as_kind, encode, is_numpy, kind, module, numbers, put, view, widened
from ._elementwise import Elementwise, bounded, differ, measured_slices, only_floats, tell
from .base import (
    Array,
    Loss,
    Meter,
    Number,
    OneWay,
    Only,
    OpCall,
    OpError,
    Shape,
    arg,
    dataclass,
    step,
)


class Affine(Elementwise):
    summary = "multiplies the numbers by `mul` and adds `add`"

    @dataclass(frozen=True, slots=True)
    class Args:
        mul: Number = arg("the factor", finite=True, default=1)
        add: Number = arg("the summand", finite=True, default=0)
        exact: bool = arg(
            "refuse numbers that do not come back; `mul` is a power of two and `add` 0",
            default=False,
        )
        only: Only | None = arg("limits the op to tensors with these capture values", default=None)

    def validate(self, args: Args) -> None:
        super().validate(args)
        if args.exact and not _scales(args):
            raise OpError(
                "M308",
                f"affine: x * {args.mul} + {args.add} cannot be `exact`",
                help="only a power of two as `mul`, with `add: 0`, comes back to the bit",
            )

    def infer(self, args: Args, specs: Sequence[Spec], parts: int = 1) -> list[Spec]:
        self.validate(args)
        only_floats("affine", specs)
        for s in specs:
            if s.dtype == "float64":
                continue
            # beyond 2^300 no number of 32 bits is more than zero or infinite
            low, high = (2.0**-300, 2.0**300) if _scales(args) else (2.0**-149, 2.0**128)
            for name, value in (("mul", args.mul), ("add", args.add)):
                if abs(value) >= high or (value and abs(value) < low):
                    raise OpError(
                        "M303",
                        f"affine: `{name}` is {value}, which float32, in which {s} is computed, "
                        "cannot hold",
                    )
        return [spec(s.dtype, s.shape) for s in specs]

    def passes(self, args: Args, specs: Sequence[Spec]) -> bool:
        return (args.mul, args.add) == (1, 0)

    def loss(self, args: Args) -> Loss:
        return Loss.LOSSLESS if args.exact or (abs(args.mul), args.add) == (1, 0) else Loss.LOSSY

    def invert(self, args: Args, enumerated: bool = False) -> OpCall | OneWay:
        if _scales(args):
            return step("affine", mul=1 / args.mul, exact=abs(args.mul) != 1, only=args.only)
        return OneWay(
            f"x * {args.mul} + {args.add} rounds, so that the numbers do not come back to the bit",
            "write the downgrade as a rule of its own, in a file whose edge runs backwards",
        )

    def chunk(self, args: Args, raw: Any, spec: Spec, out: Any, meter: Meter | None) -> Any:
        if (abs(args.mul), args.add) == (1, 0):
            _turn(raw, out, BITS[spec.dtype], args.mul < 0)
            return None
        x = numbers(raw, spec.dtype)
        if kind(x) != _kind(args, spec.dtype):
            x = widened(x)
        y = _computed(args, x)
        codes, _ = encode(y, spec.dtype)
        put(codes, out)
        if args.exact:
            there, whole = numbers(out, spec.dtype), "i4"
            if kind(x) == "f8":
                there, whole = as_kind(there, "f8"), "i8"
            return (view(there * (1 / float(args.mul)), whole) != view(x, whole)) & (x == x)
        if meter is not None:
            for part in measured_slices(x):
                _tell(
                    meter, args, as_kind(x[part], "f8"), numbers(out[part], spec.dtype), spec.dtype
                )
        return None

    def refusal(self, args: Args, spec: Spec, value: str, at: str) -> OpError:
        return OpError(
            "M406",
            f"affine: {spec.dtype} cannot hold {value}{at} times {args.mul} exactly",
            help="leave out `exact: true` to have it rounded",
        )

    def eager(
        self, args: Args, arrays: Sequence[Array], parts: int = 1, dtypes: Sequence[str] = ()
    ) -> list[Array]:
        import numpy as np

        from ..elements.reference import quiet, reference_values, rounded

        made = []
        for array, dtype in zip(arrays, dtypes, strict=True):
            own = np.dtype(_kind(args, dtype)).type
            x = reference_values(array, dtype).astype(own)
            with np.errstate(all="ignore"):
                y = x * own(args.mul)
                y = y + own(args.add) if args.add else y
            turned = array ^ array.dtype.type(1 << (BITS[dtype] - 1)) if args.mul < 0 else array
            there = np.where(
                np.isnan(y), array.dtype.type(quiet(dtype)), rounded(y.astype("<f8"), dtype)
            )
            made.append(np.where(np.isnan(x), turned, there))
        return made

    def samples(self) -> Iterable[tuple[dict[str, Any], list[Shape]]]:
        yield {"add": 1}, [(7,)]
        yield {"mul": -1}, [(2, 3)]
        yield {"mul": 0.125, "exact": True}, [(4, 4)]
        yield {"mul": 2}, [(4, 4)]
        yield {"mul": 2.0**-130}, [(3, 3)]
        yield {"mul": 0.1, "add": -0.5}, [(3, 2, 2)]


def _scales(args: Any) -> bool:
    return bool(
        args.add == 0 and args.mul and abs(frexp(args.mul)[0]) == 0.5 and isfinite(1 / args.mul)
    )


def _kind(args: Any, dtype: str) -> str:
    """What is computed with: float64 where float32 does not hold a power of two and its inverse."""
    return (
        "f8"
        if dtype == "float64" or (_scales(args) and not 2.0**-127 <= abs(args.mul) <= 2.0**127)
        else "f4"
    )


def _tell(meter: Meter, args: Any, x: Any, got: Any, dtype: str) -> None:
    """Tells what became of the float64 numbers `x`."""
    mul, add = float(args.mul), float(args.add)
    product = x * mul
    wanted = product + add if add else product
    if dtype == "float64":
        tell(meter, bounded(wanted, module(x).isfinite(x)), got, dtype, sure=False)
        return
    tell(
        meter,
        wanted,
        got,
        dtype,
        differ(wanted, got) or _sure(args, product, wanted) or not _some(x),
    )


def _some(x: Any) -> bool:
    """Whether a factor changes one of the numbers."""
    return bool((module(x).isfinite(x) & (x != 0)).any())


def _sure(args: Any, product: Any, wanted: Any) -> bool:
    """Whether float64 rounded neither products with numbers of 24 bits nor the sums `wanted`."""
    if not _scales(args) and args.mul != _narrow(args.mul):
        return False
    # the error of Knuth's TwoSum
    part = wanted - product
    lost = (product - (wanted - part)) + (args.add - part) != 0
    return not bool((lost & module(wanted).isfinite(wanted)).any())


def _turn(raw: Any, out: Any, bits: int, negative: bool) -> None:
    """Copies raw elements, with the other sign."""
    sign = -(1 << (bits - 1)) if negative else 0
    put(view(raw, f"i{bits // 8}") ^ sign, view(out, f"i{bits // 8}"))


def _computed(args: Any, x: Any) -> Any:
    mul, add = _held(args.mul, x), _held(args.add, x)
    y = x * mul
    if add:
        y = y + add
    nan = y != y
    if is_numpy(x) and not nan.any():
        return y
    whole, sign, quiet = (
        ("i8", -(1 << 63), 0x7FF8 << 48) if kind(x) == "f8" else ("i4", -(1 << 31), 0x7FC00000)
    )
    bits = view(x, whole)
    where = module(x).where
    own = where(x != x, bits ^ sign if args.mul < 0 else bits, as_kind(nan, whole) * quiet)
    return view(where(nan, own, view(y, whole)), "f8" if kind(x) == "f8" else "f4")


def _held(value: float, x: Any) -> float:
    """The number that is computed with, which neither library then rounds again."""
    return float(value) if kind(x) == "f8" else _narrow(value)


def _narrow(value: float) -> float:
    import numpy as np

    return float(np.float32(value))


OP = Affine()
