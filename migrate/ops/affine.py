"""`affine`: y = x * mul + add, computed in float32 (float64 for float64) and rounded once to the dtype of x.

Decisions: the factor and the summand are first rounded to the type that is computed with. A NaN goes on as it is, its sign
turned by a negative `mul`, because processors differ in what they make of it; `add: 0` is left out, because it would turn
-0 to 0. Turning signs is exact; a power of two is exact but for numbers at the ends of the range, so that `exact` has to
look. All else rounds, `w + 1` for a norm too: bfloat16 has 8 bits, and a weight of 0.01 loses most of them beside 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import frexp, isfinite
from typing import Any

from ..core.spec import BITS, Spec, spec
from ._axes import Shape
from ._elementwise import Elementwise, only_floats, tell
from ._numbers import as_kind, encode, is_numpy, kind, module, numbers, put, view
from ._op import Array, Loss, Meter, Number, OneWay, Only, OpError, Step, arg, dataclass, step


class Affine(Elementwise):
    summary = "multiplies the numbers by `mul` and adds `add`"

    @dataclass(frozen=True, slots=True)
    class Args:
        mul: Number = arg("the factor", default=1)
        add: Number = arg("the summand", default=0)
        exact: bool = arg("refuse numbers that do not come back; `mul` is a power of two and `add` 0", default=False)
        only: Only | None = arg("limits the op to tensors with these capture values", default=None)

    def validate(self, args: Args) -> None:
        for name, value in (("mul", args.mul), ("add", args.add)):
            if not isfinite(value):
                raise OpError("M308", f"affine: `{name}` is {value}, it must be finite")
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
            largest = 2.0**128 if s.dtype != "float64" else float("inf")
            for name, value in (("mul", args.mul), ("add", args.add)):
                if abs(value) >= largest or (value and largest < float("inf") and not abs(value) >= 2.0**-149):
                    raise OpError("M303", f"affine: `{name}` is {value}, which float32, in which {s} is computed, cannot hold")
        return [spec(s.dtype, s.shape) for s in specs]

    def passes(self, args: Args, specs: Sequence[Spec]) -> bool:
        return (args.mul, args.add) == (1, 0)

    def loss(self, args: Args) -> Loss:
        return Loss.LOSSLESS if args.exact or (abs(args.mul), args.add) == (1, 0) else Loss.LOSSY

    def invert(self, args: Args, enumerated: bool = False) -> Step | OneWay:
        if _scales(args) and isfinite(1 / args.mul):
            return step("affine", mul=1 / args.mul, exact=abs(args.mul) != 1, only=args.only)
        return OneWay(
            f"x * {args.mul} + {args.add} rounds, so that the numbers do not come back to the bit",
            "write the way back as a rule of its own, in a file whose edge runs backwards",
        )

    def chunk(self, args: Args, raw: Any, spec: Spec, out: Any, meter: Meter | None) -> Any:
        if (abs(args.mul), args.add) == (1, 0):
            _turn(raw, out, BITS[spec.dtype], args.mul < 0)
            return None
        x = numbers(raw, spec.dtype)
        y = _computed(args, x)
        codes, _ = encode(y, spec.dtype)
        put(codes, out)
        if args.exact:
            there = numbers(out, spec.dtype)
            whole = "i8" if kind(x) == "f8" else "i4"
            return (view(there * (1 / float(args.mul)), whole) != view(x, whole)) & (x == x)
        if meter is not None:
            tell(meter, y, numbers(out, spec.dtype), spec.dtype)
        return None

    def refusal(self, args: Args, spec: Spec, value: str, at: str) -> OpError:
        return OpError(
            "M406",
            f"affine: {spec.dtype} cannot hold {value}{at} times {args.mul} exactly",
            help="leave out `exact: true` to have it rounded",
        )

    def eager(self, args: Args, arrays: Sequence[Array], parts: int = 1, dtypes: Sequence[str] = ()) -> list[Array]:
        import numpy as np

        from ._twins import quiet, rounded, values

        made = []
        for array, dtype in zip(arrays, dtypes, strict=True):
            own = np.float64 if dtype == "float64" else np.float32
            x = values(array, dtype).astype(own)
            with np.errstate(all="ignore"):
                y = x * own(args.mul)
                y = y + own(args.add) if args.add else y
            turned = array ^ array.dtype.type(1 << (BITS[dtype] - 1)) if args.mul < 0 else array
            there = np.where(np.isnan(y), array.dtype.type(quiet(dtype)), rounded(y.astype("<f8"), dtype))
            made.append(np.where(np.isnan(x), turned, there))
        return made

    def samples(self) -> Iterable[tuple[dict[str, Any], list[Shape]]]:
        yield {"add": 1}, [(7,)]
        yield {"mul": -1}, [(2, 3)]
        yield {"mul": 0.125, "exact": True}, [(4, 4)]
        yield {"mul": 2}, [(4, 4)]
        yield {"mul": 0.1, "add": -0.5}, [(3, 2, 2)]


def _scales(args: Any) -> bool:
    return bool(args.add == 0 and args.mul and abs(frexp(args.mul)[0]) == 0.5)


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
    whole, sign, quiet = ("i8", -(1 << 63), 0x7FF8 << 48) if kind(x) == "f8" else ("i4", -(1 << 31), 0x7FC00000)
    bits = view(x, whole)
    where = module(x).where
    own = where(x != x, bits ^ sign if args.mul < 0 else bits, as_kind(nan, whole) * quiet)
    return view(where(nan, own, view(y, whole)), "f8" if kind(x) == "f8" else "f4")


def _held(value: float, x: Any) -> float:
    """The number that is computed with, which neither library then rounds again."""
    import numpy as np

    return float(value) if kind(x) == "f8" else float(np.float32(value))


OP = Affine()
