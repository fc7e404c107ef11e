"""`cast`: the same numbers in another dtype.

Decisions: integers, `bool` and E8M0 never hold anything but the exact value, so a number that they
cannot hold is refused where torch would wrap, truncate or guess. Floats round, and the plan calls
that a loss, unless `exact` makes every element answer for itself. That is what lets a widening be
undone: the way back is exact because it looks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from ..core.errors import did_you_mean
from ..core.spec import ALIASES, BITS, Spec, spec
from ..elements.codes import FLOATS, INTEGERS, PARTS
from ..elements.numbers import (
    encode,
    holds,
    is_numpy,
    narrow_bfloat16,
    numbers,
    put,
    same_bits,
    widen_bfloat16,
)
from ..elements.raw import carrier
from ._elementwise import Elementwise, tell
from .base import (
    Array,
    Dtype,
    Loss,
    Meter,
    OneWay,
    Only,
    OpCall,
    OpError,
    Shape,
    arg,
    dataclass,
    step,
)


class Cast(Elementwise):
    summary = "gives the numbers another dtype"

    @dataclass(frozen=True, slots=True)
    class Args:
        to: Dtype = arg("torch's name of the dtype after")
        from_: Dtype | None = arg(
            "the dtype before, checked, and what the inverse restores", alias="from", default=None
        )
        exact: bool = arg(
            "refuse numbers that do not fit exactly instead of rounding them", default=False
        )
        unscaled: bool = arg(
            "float8 numbers are meant as they are, without the scale that seems to be beside them",
            default=False,
        )
        only: Only | None = arg("limits the op to tensors with these capture values", default=None)

    def validate(self, args: Args) -> None:
        for name, written in (("to", args.to), ("from", args.from_)):
            if written is not None and canonical_dtype(written) not in BITS:
                raise OpError(
                    "M308",
                    f"cast: `{name}` is `{written}`, which is not a dtype",
                    help=did_you_mean(written, [*BITS]),
                )

    def infer(self, args: Args, specs: Sequence[Spec], parts: int = 1) -> list[Spec]:
        self.validate(args)
        to = canonical_dtype(args.to)
        for s in specs:
            if args.from_ is not None and s.dtype != canonical_dtype(args.from_):
                raise OpError(
                    "M303",
                    f"cast: the tensor is {s}, `from` says {canonical_dtype(args.from_)}",
                    help="correct `from`, or limit the rule with `when: {dtype: ["
                    + canonical_dtype(args.from_)
                    + "]}`",
                )
            if (s.dtype in PARTS) != (to in PARTS):
                raise OpError(
                    "M309",
                    f"cast: {s} cannot become {to}: complex numbers only become complex numbers",
                )
        return [spec(to, s.shape) for s in specs]

    def passes(self, args: Args, specs: Sequence[Spec]) -> bool:
        return specs[0].dtype == canonical_dtype(args.to) and (
            args.from_ is None or canonical_dtype(args.from_) == specs[0].dtype
        )

    def eager_width(self, args: Args) -> int:
        return 0

    def loss(self, args: Args) -> Loss:
        return _loss(canonical_dtype(args.from_) if args.from_ else None, args)

    def loss_on(self, args: Args, specs: Sequence[Spec]) -> Loss:
        return _loss(specs[0].dtype, args)

    def invert(self, args: Args, enumerated: bool = False) -> OpCall | OneWay:
        if args.from_ is None:
            return OneWay(
                "cast does not say which dtype there was before", "write `from`: the dtype before"
            )
        return step(
            "cast",
            to=args.from_,
            from_=args.to,
            exact=holds(canonical_dtype(args.to), canonical_dtype(args.from_)),
            only=args.only,
        )

    def chunk(self, args: Args, raw: Any, spec: Spec, out: Any, meter: Meter | None) -> Any:
        source, to = spec.dtype, canonical_dtype(args.to)
        measured = meter if meter is not None and self.loss_on(args, [spec]) is Loss.LOSSY else None
        if is_numpy(raw):
            return _convert(raw, source, to, args.exact, out, measured)
        if source in FLOATS and to in FLOATS:
            return _floats(raw, source, to, args.exact, out, measured)
        import torch

        # integers are few in a checkpoint, and torch computes with half of their dtypes only
        made = torch.empty(out.shape, dtype=out.dtype)
        refused = _convert(raw.cpu().numpy(), source, to, args.exact, made.numpy(), measured)
        out.copy_(made)
        return None if refused is None else torch.from_numpy(refused)

    def refusal(self, args: Args, spec: Spec, value: str, at: str) -> OpError:
        to = canonical_dtype(args.to)
        exactly = " exactly" if args.exact else ""
        soft = args.exact and spec.dtype in FLOATS and to in FLOATS and to != "float8_e8m0fnu"
        return OpError(
            "M406",
            f"cast: {to} cannot hold{exactly} {value}{at} of the {spec.dtype} tensor",
            help="leave out `exact: true` to have it rounded" if soft else None,
        )

    def eager(
        self, args: Args, arrays: Sequence[Array], parts: int = 1, dtypes: Sequence[str] = ()
    ) -> list[Array]:
        from ..elements.reference import converted

        return [
            converted(a, d, canonical_dtype(args.to)) for a, d in zip(arrays, dtypes, strict=True)
        ]

    def samples(self) -> Iterable[tuple[dict[str, Any], list[Shape]]]:
        yield {"to": "float32", "from": "bfloat16"}, [(3, 5)]
        yield {"to": "bfloat16", "from": "float32"}, [(3, 5)]
        yield {"to": "bfloat16", "from": "float32", "exact": True}, [(4, 4)]
        yield {"to": "half"}, [(2, 3, 4)]
        yield {"to": "float8_e4m3fn", "from": "bfloat16"}, [(8,)]
        yield {"to": "double", "from": "float8_e5m2"}, [()]
        yield {"to": "int64", "from": "int16"}, [(6,)]


def canonical_dtype(dtype: str) -> str:
    """The one name of a dtype that people may spell otherwise."""
    return ALIASES.get(dtype, dtype)


def _loss(source: str | None, args: Any) -> Loss:
    to = canonical_dtype(args.to)
    # between integers every value is looked at, whatever `exact` says
    kept = args.exact or (
        source is not None and (holds(to, source) or (source in INTEGERS and to in INTEGERS))
    )
    return Loss.LOSSLESS if kept else Loss.LOSSY


class _CastTable(NamedTuple):
    codes: Array
    refused: Array | None


@lru_cache(maxsize=64)
def _table(source: str, to: str, exact: bool) -> _CastTable:
    """What becomes of each code of a dtype of at most 16 bits."""
    import numpy as np

    every = np.arange(1 << BITS[source], dtype="<u4").astype(carrier(source))
    made = np.empty(every.shape, carrier(to))
    with np.errstate(all="ignore"):
        refused = _compute(every, source, to, exact, made)
    return _CastTable(made, refused if refused is not None and refused.any() else None)


def _convert(raw: Array, source: str, to: str, exact: bool, out: Array, meter: Meter | None) -> Any:
    """Fills `out`; what is refused. All in numpy."""
    import numpy as np

    if source in PARTS:
        halves = _convert(_halves(raw), PARTS[source], PARTS[to], exact, _halves(out), meter)
        return None if halves is None else halves[0::2] | halves[1::2]
    refused: Any
    if (source, to) == ("bfloat16", "float32"):
        widen_bfloat16(raw, out)
        return None
    if (source, to) == ("float32", "bfloat16"):
        fits = narrow_bfloat16(raw, out)
        if fits:
            # nothing was rounded, and nothing is to be measured
            return None
        refused = (raw & np.uint32(0xFFFF)) != 0 if exact else None
    elif (source, to) == ("float32", "float16") and not np.isnan(
        np.maximum.reduce(raw.view("<f4"))
    ):
        np.copyto(out.view("<f2"), raw.view("<f4"), casting="unsafe")
        refused = ~same_bits(raw.view("<f4"), out, to) if exact else None
    elif BITS[source] <= 16:
        table = _table(source, to, exact)
        np.take(table.codes, raw, out=out, mode="clip")
        refused = None if table.refused is None else np.take(table.refused, raw, mode="clip")
    else:
        refused = _compute(raw, source, to, exact, out)
    if meter is not None:
        tell(
            meter, _told(raw, source), _told(out, to), to, source in FLOATS or not _cut(raw, source)
        )
    return refused


def _halves(raw: Array) -> Array:
    return raw.view(f"<u{raw.dtype.itemsize // 2}")


def _told(raw: Array, dtype: str) -> Any:
    """The numbers of raw elements as a meter takes them; integers as the nearest float64."""
    return _integers(raw, dtype).astype("<f8") if dtype in INTEGERS else numbers(raw, dtype)


def _cut(raw: Array, dtype: str) -> bool:
    """Whether float64 may not hold one of the integers."""
    import numpy as np

    if BITS[dtype] < 64 or not raw.size:
        return False
    whole = _integers(raw, dtype)
    return int(np.max(whole)) > 1 << 53 or int(np.min(whole)) < -(1 << 53)


def _compute(raw: Array, source: str, to: str, exact: bool, out: Array) -> Any:
    if source in FLOATS and to in FLOATS:
        return _floats(raw, source, to, exact, out, None)
    if source in FLOATS:
        return _to_integers(numbers(raw, source), to, exact, out)
    whole = _integers(raw, source)
    unknown = raw > 1 if source == "bool" else None
    refused: Any = (
        _between_integers(whole, to, out)
        if to in INTEGERS
        else _from_integers(whole, to, exact, out)
    )
    if unknown is None or refused is None:
        return refused if unknown is None else unknown
    return refused | unknown


def _floats(raw: Any, source: str, to: str, exact: bool, out: Any, meter: Meter | None) -> Any:
    """Between floats, in numpy or torch."""
    x = numbers(raw, source)
    codes, refused = encode(x, to)
    put(codes, out)
    if exact and not holds(to, source):
        differs = ~same_bits(x, codes, to)
        refused = differs if refused is None else refused | differs
    if meter is not None:
        tell(meter, x, numbers(out, to), to)
    return refused


def _integers(raw: Array, dtype: str) -> Array:
    return raw.view(f"<{'i' if INTEGERS[dtype][0] < 0 else 'u'}{BITS[dtype] // 8}")


def _between_integers(whole: Array, to: str, out: Array) -> Array | None:
    import numpy as np

    low, high = INTEGERS[to]
    own = np.iinfo(whole.dtype)
    refused = None
    if own.min < low or own.max > high:
        refused = (whole < max(low, own.min)) | (whole > min(high, own.max))
    np.copyto(_integers(out, to), whole, casting="unsafe")
    return refused


def _to_integers(x: Array, to: str, exact: bool, out: Array) -> Any:
    import numpy as np

    low, high = INTEGERS[to]
    # high + 1 is a power of two, which floats hold where `high` is not; NaN compares as false
    fits = (np.trunc(x) == x) & (x >= float(low)) & (x < float(high + 1))
    if exact:
        fits &= ~((x == 0) & np.signbit(x))
    np.copyto(_integers(out, to), np.where(fits, x, 0).astype(_integers(out, to).dtype))
    return ~fits


def _from_integers(whole: Array, to: str, exact: bool, out: Array) -> Any:
    import numpy as np

    wide = whole.dtype.itemsize == 8
    if wide and to not in ("float32", "float64"):
        # 64 bits pass through float64, with the last bit set where something was cut off
        bits = whole.view("<u8") if whole.dtype.kind == "u" else np.abs(whole).view("<u8")
        cut = np.where(
            bits >> np.uint64(53) != 0,
            (bits >> np.uint64(11) | (bits & np.uint64(0x7FF) != 0)) << np.uint64(11),
            bits,
        )
        x = np.where(whole < 0, -1.0, 1.0) * cut.astype("<f8")
        x = np.where(bits >> np.uint64(53) != 0, x, whole.astype("<f8"))
    else:
        x = whole.astype("<f4" if to == "float32" else "<f8")
    codes, refused = encode(x, to)
    put(codes, out)
    if exact:
        back = numbers(out, to).astype("<f8")
        own = np.iinfo(whole.dtype)
        inside = (back >= float(own.min)) & (back < float(own.max + 1))
        differs = ~inside | (np.where(inside, back, 0).astype(whole.dtype) != whole)
        refused = differs if refused is None else refused | differs
    return refused


OP = Cast()
