"""What differs between two checkpoints: keys, specs, bytes, and for bytes how much.

Bytes are compared without torch and numpy. Only what differs is measured, a stage at a time, in
float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ..core import log
from ..core import view as views
from ..core.spec import BITS, Spec, coordinates
from ..elements.raw import unpack
from ..planning.graph import Tensor
from .evaluator import Evaluator
from .gather import Gather
from .geometry import STAGE, ByteLayouts

if TYPE_CHECKING:
    import torch

    from ..source.index import Source


@dataclass(frozen=True, slots=True)
class Changed:
    """A tensor of equal spec and unequal bytes.

    `index` of the first element whose bits differ, `count` of such elements, the largest absolute
    error, and the ratio of signal to error, 10·log10(Σa² / Σ(a-b)²) in dB (infinite if only signs
    of zero or bits of NaNs differ). The last two are None for dtypes without a value in torch, and
    NaN if a NaN stands against a number.
    """

    key: str
    index: tuple[int, ...]
    count: int
    max_abs_error: float | None
    sqnr_db: float | None


@dataclass(frozen=True, slots=True)
class Difference:
    """Keys that only one side has, (key, spec of a, spec of b) where specs differ, and tensors
    whose bytes differ.
    """

    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    specs: tuple[tuple[str, Spec, Spec], ...]
    bytes: tuple[Changed, ...]

    @property
    def equal(self) -> bool:
        return not (self.only_a or self.only_b or self.specs or self.bytes)


@log.phase("comparing tensors")
def diff(
    source_a: Source, source_b: Source, *, progress: Callable[[int, int], None] | None = None
) -> Difference:
    """The difference of two checkpoints, in the order of their keys; nothing of how they are stored
    counts.
    """
    a, b = source_a.index.tensors, source_b.index.tensors
    shared = [k for k in a if k in b]
    specs = tuple((k, a[k].spec, b[k].spec) for k in shared if a[k].spec != b[k].spec)
    same = [k for k in shared if a[k].spec == b[k].spec]
    total, done = sum(a[k].spec.nbytes for k in same), 0
    readers = _StageReader(source_a), _StageReader(source_b)
    changed = []
    for key in same:
        if any(r.differ for r in _pairs(readers, key)):
            changed.append(_measured(readers, key, a[key].spec))
        done += a[key].spec.nbytes
        if progress is not None:
            progress(done, total)
    return Difference(
        tuple(k for k in a if k not in b), tuple(k for k in b if k not in a), specs, tuple(changed)
    )


class _StageReader:
    def __init__(self, source: Source) -> None:
        self.source = source
        self.stage = memoryview(bytearray(STAGE))
        layouts = ByteLayouts()
        self.gather = Gather(source, layouts, self.stage, Evaluator(source, layouts).leaf)

    def tensor(self, key: str) -> Tensor:
        at = self.source.index.tensors[key]
        return Tensor(at.spec, views.stored(0, at.spec.shape, at.strides), (key,))


class _Pair(NamedTuple):
    start: int
    a: memoryview
    b: memoryview

    @property
    def differ(self) -> bool:
        return bytes(self.a) != bytes(self.b)


def _pairs(readers: tuple[_StageReader, _StageReader], key: str) -> Iterator[_Pair]:
    tensors = [r.tensor(key) for r in readers]
    nbytes = tensors[0].spec.nbytes
    # a multiple of 48 holds whole elements of every dtype
    step = STAGE // 48 * 48
    for start in range(0, nbytes, step):
        stop = min(nbytes, start + step)
        for reader, tensor in zip(readers, tensors, strict=True):
            reader.gather.fill(tensor, start, stop, 0)
        yield _Pair(start, readers[0].stage[: stop - start], readers[1].stage[: stop - start])
    for reader in readers:
        reader.gather.release()


def _measured(readers: tuple[_StageReader, _StageReader], key: str, spec: Spec) -> Changed:
    import torch

    first, count = -1, 0
    signal = noise = worst = 0.0
    dtype = getattr(torch, spec.dtype, None) if BITS[spec.dtype] >= 8 else None
    for pair in _pairs(readers, key):
        n = min(
            len(pair.a) * 8 // BITS[spec.dtype], spec.numel - pair.start * 8 // BITS[spec.dtype]
        )
        raw_a, raw_b = (unpack(bytes(x), Spec(spec.dtype, (n,))) for x in (pair.a, pair.b))
        unlike = raw_a != raw_b
        if not unlike.any():
            if dtype is not None:
                signal += _square(_numbers(pair.a, dtype))
            continue
        if first < 0:
            first = pair.start * 8 // BITS[spec.dtype] + int(unlike.argmax())
        count += int(unlike.sum())
        if dtype is None:
            continue
        a, b = _numbers(pair.a, dtype), _numbers(pair.b, dtype)
        error = (a - b).abs()
        # equal infinities and two NaNs are no error
        error[(a == b) | (a.isnan() & b.isnan())] = 0
        signal += _square(a)
        noise += _square(error)
        top = float(error.max())
        worst = top if math.isnan(top) or top > worst else worst
    index = coordinates(first, spec.shape)
    if dtype is None:
        return Changed(key, index, count, None, None)
    return Changed(key, index, count, worst, _ratio(signal, noise))


def _ratio(signal: float, noise: float) -> float:
    if noise == 0:
        return math.inf
    if math.isnan(noise) or math.isnan(signal) or math.isinf(signal):
        return math.nan
    return -math.inf if signal == 0 or math.isinf(noise) else 10 * math.log10(signal / noise)


def _numbers(packed: memoryview, dtype: torch.dtype) -> torch.Tensor:
    import torch

    found = torch.frombuffer(bytearray(packed), dtype=dtype)
    return found.to(torch.complex128 if dtype.is_complex else torch.float64)


def _square(numbers: torch.Tensor) -> float:
    return float((numbers.abs() ** 2).nan_to_num(nan=math.nan, posinf=math.inf).sum())
