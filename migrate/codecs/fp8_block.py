"""`fp8-block`: e4m3 codes with one scale for each block of rows and columns, as DeepSeek-V3 stores
weights and others after it.

A weight [..., N, K] has a grid of scales [..., ceil(N/b0), ceil(K/b1)]; the last blocks are smaller
where a side is no multiple of the block. A number is float32(code) * float32(scale), rounded once
more where the dtype is narrower.

The block has to be said, not derived from the two shapes: 576 rows with five scales are blocks of
128, not of 115.2, and where a division comes out even it may still be the wrong one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from math import isfinite, prod
from typing import TYPE_CHECKING, Any

from ..core.part_names import ACTIVATIONS, Convention
from ..core.spec import Spec, coordinates
from ..core.spec import spec as spec_of
from ..elements.raw import carrier, typed
from . import _e4m3
from ._e4m3 import Block
from .base import NON_FINITE, Integers, OpError, Text, arg, dataclass
from .kit.codec import LayoutCodec
from .kit.layout import Grid, NumberLayout, floats, plain, times

if TYPE_CHECKING:
    import numpy as np

    from ..ops.base import Box, Meter

CODES = "float8_e4m3fn"
SCALES = ("float32", "bfloat16", "float8_e8m0fnu")
NUMBERS = ("float32", "bfloat16", "float16")
LIKE = ("deepseek", "hf")
# how a scale is stored: as it comes, rounded to bfloat16, or as the power of two above it in four
# bytes or in one; or its dtype
STORED = {
    "f32": "float32",
    "bf16": "bfloat16",
    "pow2": "float32",
    "ue8m0": "float8_e8m0fnu",
    **{name: name for name in SCALES},
}
# what configurations call the power of two above it, in whatever dtype, and what transformers calls
# a scale as it comes
POWER, FORMATS = "ue8m0", ("ue8m0", "float")
# errors are measured on at least so many elements of a tensor, and in a large one on one row of so
# many: a prime, so that the rows fall on all parts of blocks
MEASURED, SPARSEST = 1 << 13, 509


def _has_tiles(arguments: Mapping[str, Any]) -> bool:
    """Whether these are blocks at all, and not a scale for each row or for 32 elements of one."""
    return arguments.get("rows") != 1 or arguments.get("columns", 32) != 32


class Fp8Block(LayoutCodec):
    name = "fp8-block"
    summary = "e4m3 codes with a scale for each block of rows and columns"
    reference_width = 0
    parts = ("weight", "scale")
    names = (
        *(
            Convention(
                producer,
                {
                    "weight": f"{weight} float8_e4m3fn [*, N, K]",
                    "scale": f"{scale} wide|float8_e8m0fnu [*, N/rows, K/columns]",
                },
                beside=beside,
                accepts=_has_tiles,
            )
            for producer, weight, scale, beside in (
                ("DeepSeek, transformers", "{w}.weight", "{w}.weight_scale_inv", ACTIVATIONS),
                ("transformers 5, stacked experts", "{w}", "{w}_scale_inv", {}),
                ("DeepSeek-V4", "{w}.weight", "{w}.scale", {}),
                ("compressed-tensors, ModelOpt", "{w}.weight", "{w}.weight_scale", ACTIVATIONS),
            )
        ),
    )

    follow = ("scale",)
    numbers = NUMBERS

    @dataclass(frozen=True, slots=True)
    class Args:
        block: Integers | None = arg(
            "rows and columns that share a scale, by default 128 and 128",
            least=1,
            length=2,
            default=None,
        )
        like: Text | None = arg(
            "whose arithmetic encodes, by default deepseek", words=LIKE, encoding=True, default=None
        )
        scale: Text | None = arg(
            "how scales are stored: float32 (f32, the default), bfloat16 (bf16), float8_e8m0fnu "
            "(ue8m0), or pow2",
            words=tuple(STORED),
            encoding=True,
            default=None,
        )
        scale_fmt: Text | None = arg(
            "ue8m0: scales are rounded up to powers of two, whatever their dtype; float: not",
            words=FORMATS,
            encoding=True,
            default=None,
        )
        non_finite: Text = arg(
            "refuse, saturate or keep infinities and NaN",
            words=NON_FINITE,
            encoding=True,
            default="refuse",
        )

    def layout(self, args: Any, specs: Mapping[str, Spec]) -> NumberLayout:
        _has_blocks("dequantize", specs["weight"])
        block = _block(args)
        scale = Grid("scale", (block.rows, block.columns), dtypes=SCALES)
        return NumberLayout(self.name, floats(CODES), plain(CODES), times(scale))

    def encoded(self, args: Any, spec: Spec) -> list[Spec]:
        if spec.dtype not in NUMBERS:
            raise OpError(
                "M303",
                f"fp8-block encodes {', '.join(NUMBERS)}, not {spec.dtype}",
                help="write a `cast` before it",
            )
        _has_blocks("quantize", spec)
        return [
            spec_of(CODES, spec.shape),
            spec_of(_stored(args), _grid(spec.shape, _block(args))),
        ]

    def encode_needs(self, args: Any, spec: Spec, part: int, box: Box) -> Box:
        block = _block(args)
        if part == 1:
            box = (
                *box[:-2],
                *((low * b, high * b) for (low, high), b in zip(box[-2:], block, strict=True)),
            )
        sides = zip(box[-2:], block, spec.shape[-2:], strict=True)
        return (
            *box[:-2],
            *((min(low // b * b, n), min(-(-high // b) * b, n)) for (low, high), b, n in sides),
        )

    def grain(self, args: Any, spec: Spec, part: int | None) -> tuple[int, ...]:
        aligned = _block(args) if part == 0 else (1, 1)
        return (*(1,) * (len(spec.shape) - 2), *aligned)

    def remembers(self, args: Any, spec: Spec) -> int:
        return _Known.EACH * prod(_grid(spec.shape, _block(args)))

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
        known: _Known | None = None if memo is None else memo.get("amax")
        found = known.get(box) if known is not None and part == 1 else None
        if found is None:
            return False
        scale, _ = _e4m3.scales_of(found, args.like or LIKE[0], _rounding(args))
        _store(scale, out, _stored(args))
        return True

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
        if 0 in array.shape:
            return
        needed = self.encode_needs(args, spec, part, box)
        (top, bottom), (left, right) = (
            (low - first, high - first)
            for (low, high), (first, _) in zip(box[-2:], needed[-2:], strict=True)
        )
        sampled = _measured(spec, box[-2][0])
        known = (
            None
            if memo is None
            else memo.get("amax")
            or memo.setdefault("amax", _Known(_grid(spec.shape, _block(args))))
        )
        grid = box if part == 1 else _blocks_of(box, _block(args))
        found = None if known is None else known.get(grid)
        for at in _leading(box):
            amax = _amax(args, array[at], spec.dtype) if found is None else found[at]
            # the largest of what has no sign is NaN or infinite where any is
            finite = isfinite(amax.max())
            if not finite and args.non_finite == "refuse":
                raise _not_finite(_here(array[at]), spec.dtype, at, needed)
            scale, factor = _e4m3.scales_of(amax, args.like or LIKE[0], _rounding(args))
            bounded = isfinite(factor.max())
            if not bounded and args.non_finite == "refuse":
                raise _too_small(amax, factor, at, grid, _block(args))
            if known is not None and found is None:
                known.put(grid, at, amax)
            if part == 1:
                _store(scale, out[at], _stored(args))
                continue
            inside, tame = array[at][top:bottom, left:right], finite and bounded
            lost = _encode(
                args,
                inside,
                spec.dtype,
                scale,
                factor,
                top,
                left,
                out[at],
                tame,
                meter is not None,
            )
            if meter is not None:
                rows = _here(inside[sampled]), spec.dtype, _here(out[at][sampled])
                _e4m3.tell(meter, *rows, scale, amax, _block(args), top, left, sampled, *lost)

    def reference_parts(self, args: Any, array: Any, spec: Spec) -> list[Any]:
        import numpy as np

        weight, scale = self.encoded(args, spec)
        codes = np.empty(weight.shape, "u1")
        scales = np.empty(scale.shape, "<f4")
        block = _block(args)
        with np.errstate(all="ignore"):
            for at in np.ndindex(scale.shape):
                rows, columns = (
                    slice(i * b, (i + 1) * b) for i, b in zip(at[-2:], block, strict=True)
                )
                where = (*at[:-2], rows, columns)
                scales[at], codes[where] = _reference_block(
                    args, _e4m3.widened(array[where], spec.dtype)
                )
        return [codes, _stored_reference(scales, scale.dtype)]

    def returns(self, args: Any, spec: Spec) -> str:
        _, scale = self.encoded(args, spec)
        if args.scale_fmt == "ue8m0" or args.scale == "pow2" or scale.dtype == "float8_e8m0fnu":
            # a largest code of 224 or less is encoded again with a smaller power
            return "depends on the data: blocks whose largest code is above 224"
        return (
            "codes and scales of what the same arithmetic encoded"
            if spec.dtype == "float32"
            else "codes, not scales, of what the same arithmetic encoded"
        )

    def bound(self, args: Any) -> str:
        least = " (amax at least 1e-4)" if (args.like or LIKE[0]) == "deepseek" else ""
        twice = "2 * " if _rounding(args) == "pow2" else ""
        return (
            f"|error| <= max(|x| / 16, {twice}amax / 448 / 1024), amax of the block{least}: "
            "half a step of e4m3 and of its subnormals"
        )

    def samples(self) -> Iterable[tuple[Any, Spec]]:
        yield self.Args(), spec_of("bfloat16", (576, 200))
        yield self.Args(block=(1, 128), scale="pow2"), spec_of("float32", (5, 300))
        yield (
            self.Args(block=(4, 4), like="hf", non_finite="saturate"),
            spec_of("float16", (3, 12, 10)),
        )
        yield self.Args(block=(3, 5), scale="ue8m0"), spec_of("bfloat16", (2, 2, 7, 11))
        yield (
            self.Args(block=(8, 1), like="hf", scale="ue8m0", non_finite="keep"),
            spec_of("float32", (30, 7)),
        )
        yield self.Args(block=(64, 64), scale="bf16"), spec_of("bfloat16", (1, 130))
        yield (
            self.Args(block=(2, 2), scale="bfloat16", scale_fmt="ue8m0"),
            spec_of("float32", (5, 6)),
        )


def _here(array: Any) -> np.ndarray[Any, Any]:
    """Raw elements of numpy or torch as numpy's."""
    import numpy as np

    return array if isinstance(array, np.ndarray) else array.cpu().numpy()


def _amax(args: Fp8Block.Args, array: Any, dtype: str) -> np.ndarray[Any, Any]:
    """The largest magnitude of each block of a matrix of raw elements, as float32."""
    import numpy as np

    saturate, block = args.non_finite == "saturate", _block(args)
    if isinstance(array, np.ndarray) and not saturate:
        return _e4m3.widened(_e4m3.amax(array, block), dtype)
    bits = _e4m3.signed(typed(array, dtype), dtype)
    return _e4m3.widened(
        _e4m3.block_amax(bits, block, _e4m3.INFINITY[dtype] if saturate else None), dtype
    )


def _encode(
    args: Fp8Block.Args,
    array: Any,
    dtype: str,
    scale: np.ndarray[Any, Any],
    factor: np.ndarray[Any, Any],
    top: int,
    left: int,
    out: Any,
    tame: bool,
    metered: bool,
) -> tuple[int, int, int]:
    """`_e4m3.encode` of raw elements of `dtype`; `tame`: all numbers and factors are finite."""
    import torch

    count = metered and not (tame and float(scale.max()) * _e4m3.LARGEST <= _e4m3.MOST["float32"])
    wild = not tame or args.non_finite == "saturate"
    with torch.inference_mode():
        return _e4m3.encode(
            typed(array, dtype),
            scale,
            factor,
            _block(args),
            top,
            left,
            typed(out, "uint8"),
            wild,
            count,
            metered,
        )


def _block(args: Fp8Block.Args) -> Block:
    return Block(*(args.block or (128, 128)))


def _stored(args: Fp8Block.Args) -> str:
    return STORED[args.scale or "f32"]


def _rounding(args: Fp8Block.Args) -> str:
    """What becomes of a scale before it is stored: nothing (f32), bf16 or pow2."""
    if args.scale_fmt == POWER or args.scale == "pow2" or _stored(args) == "float8_e8m0fnu":
        return "pow2"
    return {"float32": "f32", "bfloat16": "bf16"}[_stored(args)]


def _has_blocks(verb: str, spec: Spec) -> None:
    if len(spec.shape) < 2:
        raise OpError(
            "M304",
            f"{verb}: fp8-block has blocks of rows and columns, {spec} has "
            f"{len(spec.shape) or 'no'} axes",
        )


def _grid(shape: tuple[int, ...], block: Block) -> tuple[int, ...]:
    return (*shape[:-2], *(-(-n // b) for n, b in zip(shape[-2:], block, strict=True)))


def _blocks_of(box: Box, block: Block) -> Box:
    """The part of the grid whose blocks hold `box`."""
    return (
        *box[:-2],
        *((low // b, -(-high // b)) for (low, high), b in zip(box[-2:], block, strict=True)),
    )


class _Known:
    """The largest magnitudes of the blocks looked at, which scales and then codes need."""

    __slots__ = ("_amax", "_done")
    # bytes for a block
    EACH = 5

    def __init__(self, grid: tuple[int, ...]) -> None:
        import numpy as np

        self._amax, self._done = np.empty(grid, "<f4"), np.zeros(grid, "?")

    def get(self, box: Box) -> np.ndarray[Any, Any] | None:
        part = tuple(slice(low, high) for low, high in box)
        return self._amax[part] if self._done[part].all() else None

    def put(self, box: Box, at: tuple[int, ...], amax: np.ndarray[Any, Any]) -> None:
        """The magnitudes of matrix `at` within `box`."""
        matrix = (low + i for (low, _), i in zip(box, at, strict=False))
        part: tuple[Any, ...] = (*matrix, *(slice(low, high) for low, high in box[-2:]))
        self._amax[part] = amax
        self._done[part] = True


def _measured(spec: Spec, top: int) -> slice:
    """The rows of a box from row `top` on whose error is measured: the same rows of a tensor
    however it is cut into boxes.

    Measuring all would take longer than computing them.
    """
    every = min(SPARSEST, max(1, spec.numel // MEASURED))
    return slice(-top % every, None, every)


def _leading(box: Box) -> list[tuple[int, ...]]:
    """The indices, within the box, of its matrices."""
    return list(product(*(range(high - low) for low, high in box[:-2])))


def _first(mask: np.ndarray[Any, Any]) -> tuple[int, ...] | None:
    """The index of the first True in row-major order."""
    flat = mask.reshape(-1)
    at = int(flat.argmax()) if flat.size else 0
    return coordinates(at, mask.shape) if flat.size and flat[at] else None


def _place(index: Sequence[int], box: Box, each: Sequence[int] = ()) -> str:
    """An index within a box as one within the whole tensor, or where the block of that index
    begins, which has `each` elements a side.
    """
    sides = each or (1,) * len(box)
    return f"[{', '.join(str((i + low) * n) for i, (low, _), n in zip(index, box, sides, strict=True))}]"  # noqa: E501


def _not_finite(
    array: np.ndarray[Any, Any], dtype: str, leading: tuple[int, ...], box: Box
) -> OpError:
    import numpy as np

    numbers = _e4m3.widened(array, dtype)
    at = _first(~np.isfinite(numbers)) or (0, 0)
    message = f"quantize: the number at {_place((*leading, *at), box)} is {float(numbers[at])}"
    return OpError(
        "M406",
        message,
        help="`non_finite: saturate` gives infinities the largest code and keeps NaN to itself; "
        "`keep` encodes as `like` does",
    )


def _too_small(
    amax: np.ndarray[Any, Any],
    factor: np.ndarray[Any, Any],
    leading: tuple[int, ...],
    grid: Box,
    block: Block,
) -> OpError:
    import numpy as np

    at = _first(~np.isfinite(factor)) or (0, 0)
    index = _place((*leading, *at), grid)
    corner = _place((*leading, *at), grid, (*(1,) * len(leading), *block))
    largest = f"its largest magnitude is {float(amax[at]):g}, so that the factor is infinite"
    message = f"quantize: block {index}, from {corner} on, has no scale: {largest}"
    return OpError(
        "M406",
        message,
        help="with `scale_fmt: ue8m0` or `like: deepseek` it has one; `non_finite: keep` stores "
        "what `like` makes: 0 and NaN",
    )


def _store(scale: np.ndarray[Any, Any], out: Any, dtype: str) -> None:
    """Fills `out`, raw elements of numpy or torch, with float32 scales that `dtype` holds whole."""
    import numpy as np

    bits = scale.view("<u4") >> {"float32": 0, "bfloat16": 16, "float8_e8m0fnu": 23}[dtype]
    raw = np.where(np.isnan(scale), _e4m3.NAN.get(dtype, 0xFF), bits).astype(carrier(dtype))
    if isinstance(out, np.ndarray):
        out[...] = raw
    else:
        out.copy_(typed(raw, dtype).view(out.dtype))


def _narrowed(numbers: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
    """float32 as raw elements of `dtype`, to the nearest, ties to even; NaN as the quiet one."""
    import numpy as np

    if dtype == "bfloat16":
        bits = numbers.view("<u4").astype("<u8")
        raw = (bits + 0x7FFF + (bits >> 16 & 1) >> 16).astype("<u2")
    else:
        raw = numbers.view("<u4") if dtype == "float32" else numbers.astype("<f2").view("<u2")
    return np.where(np.isnan(numbers), _e4m3.NAN[dtype], raw)


def _reference_block(args: Fp8Block.Args, numbers: np.ndarray[Any, Any]) -> tuple[Any, Any]:
    """(scale, codes) of one block of float32 numbers."""
    import numpy as np

    f4 = np.float32
    saturate = args.non_finite == "saturate"
    magnitudes = np.abs(numbers[np.isfinite(numbers)] if saturate else numbers)
    amax = magnitudes.max() if magnitudes.size else f4(0)
    hf = args.like == "hf"
    factor = f4(1) / amax * f4(448) if amax > 0 else f4(1)
    scale = f4(1) / factor if hf else np.maximum(amax, f4(1e-4)) / f4(448)
    stored = _rounding(args)
    if stored == "bf16":
        scale = (
            (np.asarray(_narrowed(scale.reshape(1), "bfloat16"), "<u4") << 16)
            .astype("<u4")
            .view("<f4")[0]
        )
    elif stored != "f32":
        odd = f4(np.nan) if hf else f4(2.0**127)
        scale = f4(_e4m3.power_above(float(scale))) if np.isfinite(scale) else odd
    if not hf or stored != "f32":
        factor = f4(1) / scale
    scaled = numbers * factor
    codes = _e4m3.looked_up(scaled)
    if np.isnan(scaled.max(initial=0)):
        codes[np.isnan(scaled) & ~np.isnan(numbers) & ~np.isnan(factor)] = 0xFF
    return scale, codes


def _stored_reference(scales: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
    if dtype == "float8_e8m0fnu":
        return (scales.view("<u4") >> 23 & 0xFF).astype("u1")
    return _narrowed(scales, dtype).astype(carrier(dtype))


CODEC = Fp8Block()
