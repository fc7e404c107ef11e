"""A second way to the same bytes: outputs recomputed through the eager twins of the ops and compared.

It shares nothing with views, tiles and gathering: stored tensors are read whole, ops run on whole arrays, one output at
a time. An error in the view algebra or in the writer therefore shows here.

Bytes are compared. Two ops do not promise theirs, on a GPU or where libraries add in another order (`ValueOp.same_bits`), and declare
how far they may be off. What one of them made, moved about but not computed with again, may differ by so much and is told.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from .. import ops
from ..core.spec import BITS
from ..ops._op import ValueOp
from ..ops._raw import carrier
from ..ops._twins import values
from ..planning.graph import Apply, Expr, Read

if TYPE_CHECKING:
    import numpy as np

    from ..source.index import Source

# calls with several outputs whose results are kept for the next outputs
_KEPT_CALLS = 2


@dataclass(frozen=True, slots=True)
class Mismatch:
    """An output that is not what the program makes. `index` is that of the first element that differs.

    `what` is "missing", "shape", "bytes", or "near": bytes that differ by no more than the op that made them says they may.
    """

    key: str
    what: str
    index: tuple[int, ...] | None
    detail: str


def recompute(
    program: Mapping[str, Expr], source: Source, output: Source, *, progress: Callable[[int, int], None] | None = None
) -> list[Mismatch]:
    """Every output of `program` that differs from what `output` holds, in the program's order.

    Keys of `output` that the program does not make are not looked at. One output at a time is in memory, with its inputs.
    """
    evaluate = _Evaluation(source)
    found = []
    total = done = 0
    if progress is not None:
        total = sum(output.index.tensors[k].spec.nbytes for k in program if k in output.index.tensors)
    for key, expression in program.items():
        if key not in output.index.tensors:
            found.append(Mismatch(key, "missing", None, "is not in the output"))
            continue
        spec = output.index.tensors[key].spec
        made, there = evaluate(expression), read(output, key)
        wrong = list(_compared(key, made, there))
        if wrong and wrong[0].what == "bytes" and (slack := evaluate.slack(expression)) is not None:
            wrong = [_excused(wrong[0], slack, made, there, spec.dtype)]
        found += wrong
        del made, there, wrong
        done += spec.nbytes
        if progress is not None:
            progress(done, total)
    return found


def _compared(key: str, made: np.ndarray[Any, Any], there: np.ndarray[Any, Any]) -> Iterator[Mismatch]:
    import numpy as np

    if made.shape != there.shape:
        yield Mismatch(key, "shape", None, f"is {list(there.shape)}, should be {list(made.shape)}")
        return
    if made.dtype.itemsize != there.dtype.itemsize:
        yield Mismatch(key, "bytes", None, f"has elements of {there.dtype.itemsize} bytes, should have {made.dtype.itemsize}")
        return
    if not made.size:
        return
    width = made.dtype.itemsize
    a = np.ascontiguousarray(made).reshape(-1).view("u1").reshape(-1, width)
    b = np.ascontiguousarray(there).reshape(-1).view("u1").reshape(-1, width)
    differ = (a != b).any(axis=1)
    count = int(differ.sum())
    if count:
        index = tuple(int(i) for i in np.unravel_index(int(differ.argmax()), made.shape))
        yield Mismatch(key, "bytes", index, f"{count} of {made.size} elements differ")


def _excused(
    wrong: Mismatch, slack: tuple[str, np.ndarray[Any, Any]], made: np.ndarray[Any, Any], there: np.ndarray[Any, Any], dtype: str
) -> Mismatch:
    """The mismatch, as "near" where no element is further off than `slack` lets it be."""
    import numpy as np

    op, bound = slack
    differ = made != there
    with np.errstate(invalid="ignore"):
        off = np.abs(values(made, dtype) - values(there, dtype))
    # a NaN is within no bound
    if made.dtype != there.dtype or not (off[differ] <= bound[differ]).all():
        return replace(wrong, detail=f"{wrong.detail}, by more than {op} may")
    return replace(wrong, what="near", detail=f"{wrong.detail}, by no more than {op} may")


def read(source: Source, key: str) -> np.ndarray[Any, Any]:
    """The raw elements of a stored tensor, one byte each below a byte."""
    import numpy as np

    at = source.index.tensors[key]
    bits, spec = BITS[at.spec.dtype], at.spec
    if not spec.numel:
        return np.zeros(spec.shape, carrier(spec.dtype))
    extent = spec.numel
    if at.strides is not None:
        extent = 1 + sum((n - 1) * s for n, s in zip(spec.shape, at.strides, strict=True))
    packed = np.zeros((extent * bits + 7) // 8, "u1")
    source.blobs[at.blob].readinto(at.offset, packed.data)
    elements: np.ndarray[Any, Any] = packed.view(carrier(spec.dtype)) if bits >= 8 else _apart(packed, bits)
    if at.strides is None:
        whole: np.ndarray[Any, Any] = elements[: spec.numel].reshape(spec.shape)
        return whole
    strided: np.ndarray[Any, Any] = np.ndarray(spec.shape, elements.dtype, elements.data, 0, [s * elements.itemsize for s in at.strides])
    ordered: np.ndarray[Any, Any] = np.array(strided)
    return ordered


def _apart(packed: np.ndarray[Any, Any], bits: int) -> np.ndarray[Any, Any]:
    """Elements of `bits` bits, the first in the low bits, one byte each."""
    import numpy as np

    group = 1 if bits == 4 else 3
    whole = np.zeros(-(-packed.size // group) * group, "u4")
    whole[: packed.size] = packed
    words = sum(whole[i::group] << (8 * i) for i in range(group))
    per = group * 8 // bits
    out = np.empty((len(whole) // group, per), "u1")
    for i in range(per):
        out[:, i] = (words >> (bits * i)) & ((1 << bits) - 1)
    return out.reshape(-1)


class _Evaluation:
    def __init__(self, source: Source) -> None:
        self._source = source
        self._calls: deque[tuple[Apply, list[np.ndarray[Any, Any]]]] = deque(maxlen=_KEPT_CALLS)

    def __call__(self, expression: Expr) -> np.ndarray[Any, Any]:
        if isinstance(expression, Read):
            return read(self._source, expression.key)
        for call, outputs in self._calls:
            if call._replace(output=expression.output) == expression:
                return outputs[expression.output]
        inputs = [self(e) for e in expression.inputs]
        outputs = ops.get(expression.op).eager(expression.args, inputs, expression.parts, expression.dtypes)
        if expression.parts > 1:
            self._calls.append((expression, outputs))
        return outputs[expression.output]

    def slack(self, expression: Expr) -> tuple[str, np.ndarray[Any, Any]] | None:
        """The op that does not promise its bits, and how far each element may be off; None where bytes must be equal."""
        import numpy as np

        if isinstance(expression, Read):
            return None
        op = ops.get(expression.op)
        inner = [self.slack(e) for e in expression.inputs]
        found = next((one for one in inner if one is not None), None)
        if isinstance(op, ValueOp):
            if op.same_bits or found is not None:
                return None
            inputs = [self(e) for e in expression.inputs]
            return op.name, op.slack(expression.args, inputs, expression.dtypes)[expression.output]
        if found is None:
            return None
        # the bounds go the way of the elements; what the op fills in comes out on both sides
        bounds = [np.zeros(self(e).shape) if one is None else one[1] for e, one in zip(expression.inputs, inner, strict=True)]
        moved, still = (
            op.eager(
                expression.args, [np.asarray(b, "<f8", order="C").view("<u8") for b in given], expression.parts, ["float64"] * len(given)
            )
            for given in (bounds, [np.zeros_like(b) for b in bounds])
        )
        made: np.ndarray[Any, Any] = moved[expression.output].view("<f8") - still[expression.output].view("<f8")
        return found[0], made
