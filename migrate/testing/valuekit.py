"""What every op that computes has to satisfy, for the built-in ones and for those of third parties.

    from migrate.testing import valuekit

    def test_my_op():
        valuekit.check("my_op")

The samples of an op are its test cases. On each, in every dtype that the op takes, the whole result
must be what the eager twin makes, a box must be what was cut from the whole, strided memory and
torch tensors must make no difference, an inverse must bring the first bits back, and the meter must
get what rounds. Failures are AssertionErrors.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from .. import ops
from ..core.spec import BITS, Spec, spec
from ..elements.numbers import encode, numbers
from ..elements.raw import as_bytes, carrier, pack, raw
from ..ops.base import Loss, OneWay, OpCall, OpError, ValueOp, format_shape
from .opkit import arguments, check_description, check_rows, require, same_elements

if TYPE_CHECKING:
    import numpy as np

    from ..ops.base import Box

    Array = np.ndarray[Any, Any]

DTYPES = (
    "bfloat16",
    "float16",
    "float32",
    "float64",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e8m0fnu",
    "float4_e2m1fn",
    "int16",
    "int64",
    "uint64",
    "uint8",
    "bool",
    "complex64",
)
BOXES = 6


class CountingMeter:
    """A meter that counts."""

    def __init__(self) -> None:
        self.count = 0
        self.calls = 0

    def add(self, wanted: Any, got: Any, amax: Any = None, **counts: Any) -> None:
        require(
            wanted.shape == got.shape,
            f"the meter was told of {tuple(wanted.shape)} and {tuple(got.shape)} numbers",
        )
        self.calls += 1
        self.count += prod(wanted.shape)


def check(name: str, dtypes: Iterable[str | tuple[str, ...]] = DTYPES, seed: int = 0) -> int:
    """Checks the op called `name` on all its samples; how many (sample, dtypes) there were, at
    least one a sample.

    An entry of `dtypes` is that of all inputs, or one for each. What the op refuses is left out.
    """
    op = ops.get(name)
    require(isinstance(op, ValueOp), f"{name} does not compute")
    if not isinstance(op, ValueOp):
        raise AssertionError(name)
    check_description(name)
    total = 0
    for written, shapes in op.samples():
        args, taken = arguments(op, written), 0
        op.validate(args)
        for entry in dtypes:
            each = entry if isinstance(entry, tuple) else (entry,) * len(shapes)
            if len(each) != len(shapes):
                continue
            specs = [spec(d, s) for d, s in zip(each, shapes, strict=True)]
            try:
                op.infer(args, specs, _parts(op, args, specs))
            except OpError:
                continue
            check_one(op, args, specs, random.Random(f"{seed} {name} {written} {each}"))
            taken += 1
        require(taken > 0, f"{name} {written} takes none of the dtypes {list(dtypes)}")
        total += taken
    return total


def check_one(op: ValueOp, args: Any, specs: Sequence[Spec], dice: random.Random) -> None:
    """One call of the op: all that `check` says of it."""
    label = f"{op.name} {args} on {[str(s) for s in specs]}"
    parts = _parts(op, args, specs)
    made = op.infer(args, specs, parts)
    if op.passes(args, specs):
        require(
            made[0] == specs[0],
            f"{label}: the input goes on as it is, yet {specs[0]} is said to become {made[0]}",
        )
        return
    for wild in (True, False):
        arrays = [
            inputs(s, dice, wild) if op.same_bits or not wild else ordinary(s, dice) for s in specs
        ]
        try:
            twins = op.eager(args, arrays, parts, [s.dtype for s in specs])
            wholes = [compute(op, args, arrays, specs, n, _all(s)) for n, s in enumerate(made)]
        except OpError as error:
            require(wild, f"{label} refuses small whole numbers: {error.message}")
            require(
                error.code == "M406", f"{label} refuses values as {error.code}: {error.message}"
            )
            continue
        for number, (whole, twin, of) in enumerate(zip(wholes, twins, made, strict=True)):
            said = f"{label}: output {number}"
            require(
                twin.shape == of.shape,
                f"{said}: the eager twin makes {twin.shape}, inferred is {of}",
            )
            off = _slack(op, args, arrays, specs, number)
            if op.same_bits:
                check_rows(op, args, arrays, specs, parts, number, twin)
            require(
                near(whole, twin, of, off), f"{said}: compute and eager differ:\n{whole}\n{twin}"
            )
            _check_boxes(op, args, arrays, specs, number, whole, dice, wild, said)
            _check_torch(op, args, arrays, specs, number, of, whole, said)
        _check_inverse(op, args, arrays, specs, made, wholes, label)
    _check_shapes(op, args, specs, label)


def compute(
    op: ValueOp,
    args: Any,
    arrays: Sequence[Array],
    specs: Sequence[Spec],
    output: int,
    box: Box,
    meter: Any = None,
) -> Array:
    """Box `box` of an output, computed from the boxes that the op says it needs, the memory around
    them being out of reach.
    """
    import numpy as np

    given = []
    needed = op.needs(args, specs, output, box)
    require(
        len(needed) == len(specs), f"{op.name} needs {len(needed)} boxes of {len(specs)} inputs"
    )
    for need, array in zip(needed, arrays, strict=True):
        inside = len(need) == array.ndim and all(
            0 <= a <= b <= n for (a, b), n in zip(need, array.shape, strict=True)
        )
        require(
            inside,
            f"{op.name} needs {need} of an input of shape {format_shape(array.shape)} for {box}",
        )
        given.append(array[_index(need)].copy())
    given = _as_given(op, args, specs, given)
    kept = [g.copy() for g in given]
    out = np.empty(
        [b - a for a, b in box],
        carrier(op.infer(args, specs, _parts(op, args, specs))[output].dtype),
    )
    op.compute(args, given, specs, output, box, out, meter)
    require(
        all(same_elements(a, b) for a, b in zip(given, kept, strict=True)),
        f"{op.name} writes into its inputs",
    )
    return out


def _as_given(
    op: ValueOp, args: Any, specs: Sequence[Spec], arrays: Sequence[Array]
) -> list[Array]:
    """Boxes of the inputs as `compute` is given them: packed, where the op says so."""
    packed = op.packed(args, specs) if any(BITS[s.dtype] < 8 for s in specs) else ()
    return [
        as_bytes(pack(a, s.dtype), Spec(s.dtype, a.shape)) if n in packed else a
        for n, (a, s) in enumerate(zip(arrays, specs, strict=True))
    ]


def inputs(of: Spec, dice: random.Random, wild: bool) -> Array:
    """Raw elements: any bits, the ends among them (wild), or small powers of two (tame)."""
    import numpy as np

    source = np.random.default_rng(dice.randrange(1 << 30))
    if not wild:
        held = [raw(of.dtype, v) for v in ((0, 1) if of.dtype == "bool" else (1, 2, 4))]
        return np.array(
            [held[i] for i in source.integers(0, len(held), of.numel)], carrier(of.dtype)
        ).reshape(of.shape)
    width = max(BITS[of.dtype], 8)
    made = source.integers(0, 256, (of.numel, width // 8), dtype="u1").view(carrier(of.dtype))[:, 0]
    if BITS[of.dtype] < 8:
        made &= made.dtype.type((1 << BITS[of.dtype]) - 1)
    if of.dtype == "bool":
        made &= made.dtype.type(1)
    elif width <= 64:
        ends = [0, 1, (1 << (width - 1)) - 1, 1 << (width - 1), (1 << width) - 1]
        for at in range(min(of.numel // 4, len(ends))):
            made[dice.randrange(of.numel)] = ends[at] & (1 << BITS[of.dtype]) - 1
    return made.reshape(of.shape)


def ordinary(of: Spec, dice: random.Random) -> Array:
    """Raw elements of a float dtype, normally distributed: for ops whose error grows with the
    numbers that they add.
    """
    import numpy as np

    drawn = np.random.default_rng(dice.randrange(1 << 30)).standard_normal(of.numel)
    return np.asarray(encode(drawn, of.dtype)[0].astype(carrier(of.dtype))).reshape(of.shape)


def near(a: Array, b: Array, of: Spec, slack: Array | None) -> bool:
    """Whether raw elements are equal; with `slack`, whether numbers are close enough."""
    import numpy as np

    if a.shape != b.shape or a.dtype != b.dtype or slack is None:
        return same_elements(a, b)
    p, q = (numbers(v.reshape(-1), of.dtype).reshape(of.shape).astype("f8") for v in (a, b))
    with np.errstate(all="ignore"):
        return bool(((a == b) | (abs(p - q) <= slack)).all())


def _slack(
    op: ValueOp, args: Any, arrays: Sequence[Array], specs: Sequence[Spec], output: int
) -> Array | None:
    """How far the op says that its elements may be off; None where it promises their bits."""
    return None if op.same_bits else op.slack(args, arrays, [s.dtype for s in specs])[output]


def _check_boxes(
    op: ValueOp,
    args: Any,
    arrays: Sequence[Array],
    specs: Sequence[Spec],
    output: int,
    whole: Array,
    dice: random.Random,
    wild: bool,
    said: str,
) -> None:
    import numpy as np

    of = op.infer(args, specs, _parts(op, args, specs))[output]
    grain = op.grain(args, specs, output)
    require(
        len(grain) == len(of.shape) and min(grain, default=1) >= 1,
        f"{said}: the grain is {grain}, the shape {format_shape(of.shape)}",
    )
    lossy = op.loss_on(args, specs) is Loss.LOSSY
    for turn in range(BOXES):
        box = tuple(
            _range(n, g if turn % 2 else 1, dice) for n, g in zip(of.shape, grain, strict=True)
        )
        told = CountingMeter()
        got = compute(op, args, arrays, specs, output, box, told)
        require(
            same_elements(got, whole[_index(box)]),
            f"{said}: box {box} differs from the whole:\n{got}\n{whole[_index(box)]}",
        )
        require(lossy or not told.calls, f"{said} is lossless, yet tells of errors")
        require(
            told.count <= got.size or op.kind == "part",
            f"{said}: the meter was told of {told.count} numbers, there are {got.size}",
        )
    told = CountingMeter()
    compute(op, args, arrays, specs, output, _all(of), told)
    require(
        not (lossy and wild) or not whole.size or told.calls > 0,
        f"{said} is lossy, and the meter receives nothing",
    )
    strided = [
        np.asfortranarray(np.repeat(a, 2, axis=-1))[..., ::2] if a.ndim else a for a in arrays
    ]
    needed = op.needs(args, specs, output, _all(of))
    room = (
        np.empty((*of.shape[:-1], 2 * of.shape[-1]), whole.dtype)[..., ::2]
        if of.shape
        else np.empty((), whole.dtype)
    )
    op.compute(
        args,
        _as_given(op, args, specs, [a[_index(b)] for a, b in zip(strided, needed, strict=True)]),
        specs,
        output,
        _all(of),
        room,
    )
    require(
        same_elements(np.ascontiguousarray(room).reshape(of.shape), whole),
        f"{said}: strided memory makes a difference",
    )


def _check_torch(
    op: ValueOp,
    args: Any,
    arrays: Sequence[Array],
    specs: Sequence[Spec],
    output: int,
    of: Spec,
    whole: Array,
    said: str,
) -> None:
    import torch

    if any(a.dtype.itemsize > 8 for a in (*arrays, whole)):
        return
    needed = op.needs(args, specs, output, _all(of))
    held = _as_given(op, args, specs, [a[_index(b)] for a, b in zip(arrays, needed, strict=True)])
    given = [torch.from_numpy(a.copy()) for a in held]
    out = torch.from_numpy(whole.copy()).clone()
    out.view(torch.uint8).fill_(0x5A) if out.dim() else out.fill_(0x5A)
    op.compute(args, given, specs, output, _all(of), out, CountingMeter())
    off = _slack(op, args, arrays, specs, output)
    require(
        near(out.numpy(), whole, of, off),
        f"{said}: torch tensors give other bits:\n{out.numpy()}\n{whole}",
    )


def _check_inverse(
    op: ValueOp,
    args: Any,
    arrays: Sequence[Array],
    specs: Sequence[Spec],
    made: Sequence[Spec],
    wholes: Sequence[Array],
    label: str,
) -> None:
    inverse = op.invert(args, enumerated=True)
    if isinstance(inverse, OneWay):
        require(bool(inverse.because.strip()), f"{label} does not say why it is one-way")
        return
    require(op.loss(args) is not Loss.DESTRUCTIVE, f"{label} destroys, yet has an inverse")
    back = ops.get(inverse.op)
    back.validate(inverse.args)
    require(isinstance(back, ValueOp), f"{label}: its inverse {inverse.op} does not compute")
    require(
        isinstance(back.invert(inverse.args, enumerated=True), OpCall),
        f"{label}: its inverse {inverse} has none of its own",
    )
    if not isinstance(back, ValueOp) or op.loss_on(args, specs) is not Loss.LOSSLESS:
        return
    if back.loss_on(inverse.args, made) is Loss.LOSSY and back.kind == "part":
        # parts that decode to the same numbers need not be the parts that an encoder makes of them
        return
    returned = back.infer(inverse.args, made, _parts(back, inverse.args, made))
    require(
        list(returned) == list(specs),
        f"{label}: its inverse {inverse} makes {[str(s) for s in returned]}",
    )
    for number, (array, of) in enumerate(zip(arrays, returned, strict=True)):
        got = compute(back, inverse.args, wholes, made, number, _all(of))
        require(
            same_elements(got, array),
            f"{label}: its inverse {inverse} does not bring back input {number}:\n{got}\n{array}",
        )


def _check_shapes(op: ValueOp, args: Any, specs: Sequence[Spec], label: str) -> None:
    """Inputs that do not fit each other are refused in words that hold the odd one's shape."""
    if op.kind != "join" or len(specs) < 2:
        return
    for number, of in enumerate(specs):
        odd = spec(of.dtype, (*of.shape, 7))
        try:
            op.infer(args, [*specs[:number], odd, *specs[number + 1 :]])
        except OpError as error:
            require(
                format_shape(odd.shape) in error.message,
                f"{label}: the refusal does not name {format_shape(odd.shape)}: {error.message}",
            )
        else:
            raise AssertionError(f"{label} takes {odd} as input {number}")


def _parts(op: ValueOp, args: Any, specs: Sequence[Spec]) -> int:
    return op.parts(args, specs[0].shape, None) if op.kind == "part" else 1


def _range(size: int, grain: int, dice: random.Random) -> tuple[int, int]:
    """A range within `size` that begins and ends at multiples of `grain`; never
    empty.
    """
    a, b = sorted((dice.randint(0, size), dice.randint(0, size)))
    a, b = a // grain * grain, min(-(-b // grain) * grain, size)
    return (a, b) if a < b else (0, size)


def _all(of: Spec) -> Box:
    return tuple((0, n) for n in of.shape)


def _index(box: Box) -> Any:
    # the ellipsis keeps a scalar an array
    return (*[slice(a, b) for a, b in box], ...)
