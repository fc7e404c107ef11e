"""Whether a relation makes of the old tensors what the new checkpoint has, to the bit.

The ops of a relation name no captures: a join takes as many tensors in a row as its `count` says,
a part lays its tensors in the place of the one that it cuts, and `only` numbers the tensors as they
stand then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ... import ops
from ...core import view
from ...core.errors import OpError
from ...core.spec import BITS, Spec, coordinates
from ...core.view import Fill, TooManyPieces
from ...elements.raw import carrier
from ...ops.base import ValueOp
from ...planning.graph import Tensor
from ...planning.stored import stored_tensor
from ...running.eager import read_elements
from ...running.evaluator import Evaluator
from ...running.gather import Gather, Window
from ...running.geometry import ByteLayouts
from ...source.blobs import ChunkedTensor
from .blocks import BlockDigests, equal_by_blocks
from .compared import arguments, computed

if TYPE_CHECKING:
    import numpy as np

    from ...planning.graph import TensorSource
    from ...source.blobs import StoredTensor
    from ...source.index import Source
    from ..relations import Relation

    Array = np.ndarray[Any, Any]
    OpTexts = Sequence[Mapping[str, Mapping[str, Any]]]

# elements that are compared at a time, and bytes of the source that are held for a transpose
_STEP = 1 << 19
_WINDOW = 32 << 20


@dataclass(frozen=True, slots=True)
class ElementDifference:
    """The first element of `key` in which it is not what a relation makes, and how many are not."""

    key: str
    index: tuple[int, ...]
    count: int


def run(
    texts: OpTexts, items: Sequence[Any], call: Callable[[Any, Any, list[Any], int], Any]
) -> list[Any]:
    """What the ops make of the items; `call(op, args, inputs, parts)` runs one op."""
    held = list(items)
    for text in texts:
        ((name, given),) = text.items()
        op = ops.get(name)
        fields = arguments(given)
        count = given.get("count") or len(given.get("sizes", ())) or 1
        if op.kind == "end":
            return []
        if op.kind == "join":
            args = op.Args(over="x", **fields)
            if len(held) % count:
                raise OpError("M308", f"{name}: {len(held)} tensors in groups of {count}")
            held = [
                call(op, args, held[at : at + count], 1)[0] for at in range(0, len(held), count)
            ]
        elif op.kind == "part":
            args = op.Args(into="x", **fields)
            held = [made for one in held for made in call(op, args, [one], count)]
        else:
            args = op.Args(**fields)
            only = given.get("only")
            held = [
                call(op, args, [one], 1)[0] if only is None or at in only else one
                for at, one in enumerate(held)
            ]
    return held


class StreamedComparison:
    """Compares what relations make with what the new checkpoint has, a stretch at a time."""

    def __init__(self, old: Source, new: Source) -> None:
        self._sources = old, new
        self._buffers = [memoryview(bytearray(0))] * 2
        self._windows = Window(), Window()
        # of both sides, where these were taken
        self.blocks: tuple[BlockDigests, BlockDigests] | None = None

    def difference(self, relation: Relation) -> ElementDifference | None:
        """Where the new checkpoint is not what the relation makes of the old one; None if it is."""
        old, new = self._sources
        tensors = made_tensors(relation, old.index.tensors)
        stored = [new.index.tensors[key] for key in relation.targets]
        if tensors is None or any(map(_is_torn, stored)):
            return _difference_eager(relation, old, new)
        head = _head(relation.ops)
        for key, tensor, at in zip(relation.targets, tensors, stored, strict=True):
            found = self.compare(key, tensor, stored_tensor(key, at), head)
            if found is not None:
                return found
        return None

    def compare(
        self, key: str, tensor: Tensor, wanted: Tensor, head: OpTexts = ()
    ) -> ElementDifference | None:
        """Where `tensor` of the old checkpoint is not, after the ops of `head`, what is `wanted` of
        the new one.
        """
        import numpy as np

        size = wanted.spec.numel
        dtype = after(head, tensor.spec.dtype)
        if tensor.spec.shape != wanted.spec.shape or dtype != wanted.spec.dtype:
            return ElementDifference(key, (), size)
        if not head and self.blocks is not None and equal_by_blocks(*self.blocks, tensor, key):
            return None
        kinds = carrier(tensor.spec.dtype), carrier(wanted.spec.dtype)
        gathers = self._gathers(tensor, wanted)
        first, count = None, 0
        for start in range(0, size, _STEP):
            stop = min(size, start + _STEP)
            sides = []
            for gather, side, kind in zip(gathers, (tensor, wanted), kinds, strict=True):
                each = np.dtype(kind).itemsize
                gather.fill(side, start * each, stop * each, 0)
                sides.append(np.frombuffer(gather.buffer, kind, stop - start))
            here = computed(head, sides[0], tensor.spec.dtype)[0] if head else sides[0]
            unequal = here != sides[1]
            if unequal.any():
                if first is None:
                    first = start + int(unequal.argmax())
                count += int(np.count_nonzero(unequal))
        if first is None:
            return None
        return ElementDifference(key, coordinates(first, wanted.spec.shape), count)

    def _gathers(self, *tensors: Tensor) -> list[Gather]:
        """What reads these, of either side, into memory that is kept for the next ones."""
        out = []
        for side, (source, tensor) in enumerate(zip(self._sources, tensors, strict=True)):
            room = min(_STEP * BITS[tensor.spec.dtype] // 8, tensor.spec.nbytes)
            if len(self._buffers[side]) < room:
                self._buffers[side] = memoryview(bytearray(room))
            layouts, buffer, window = ByteLayouts(), self._buffers[side], self._windows[side]
            values = Evaluator(source, layouts, [tensor])
            out.append(Gather(source, layouts, buffer, values.leaf, _WINDOW, window))
        return out


def _is_torn(stored: StoredTensor) -> bool:
    return isinstance(stored, ChunkedTensor) and stored.torn is not None


def made_tensors(relation: Relation, tensors: Mapping[str, StoredTensor]) -> list[Tensor] | None:
    """What a relation makes as copies of stored elements, before the ops that compute each by
    itself; None where it makes anything else.
    """
    if relation.roles:
        return None
    rest = relation.ops[len(_head(relation.ops)) :]
    views: list[view.View] = []
    sources: list[TensorSource] = []
    for key in relation.sources:
        at = tensors[key]
        if BITS[at.spec.dtype] < 8 or _is_torn(at):
            return None
        one = stored_tensor(key, at)
        base = len(sources)
        views.append(view.relabel(one.view, range(base, base + len(one.sources))))
        sources += one.sources
    dtypes = {tensors[key].spec.dtype for key in relation.sources}
    if len(dtypes) != 1:
        return None
    try:
        made = run(rest, views, lambda op, args, inputs, parts: op.trace(args, inputs, parts))
    except TooManyPieces:
        return None
    if _head(relation.ops) and any(isinstance(p.leaf, Fill) for v in made for p in v.pieces):
        # what is filled in is not computed
        return None
    (dtype,) = dtypes
    return [Tensor(Spec(dtype, v.shape), v, tuple(sources)) for v in made]


def _head(texts: OpTexts) -> OpTexts:
    """The ops before the first that moves elements."""
    first = 0
    for text in texts:
        (name,) = text
        if not isinstance(ops.get(name), ValueOp):
            break
        first += 1
    return texts[:first]


def _difference_eager(relation: Relation, old: Source, new: Source) -> ElementDifference | None:
    import numpy as np

    held: list[tuple[Array, str]] = [
        (read_elements(old, k), old.index.tensors[k].spec.dtype) for k in relation.sources
    ]

    def call(
        op: Any, args: Any, inputs: list[tuple[Array, str]], parts: int
    ) -> list[tuple[Array, str]]:
        arrays, dtypes = [a for a, _ in inputs], [d for _, d in inputs]
        specs = [Spec(d, a.shape) for a, d in inputs]
        inferred = op.infer(args, specs, parts) if isinstance(op, ValueOp) else None
        out = op.eager(args, arrays, parts, dtypes)
        return [(a, inferred[i].dtype if inferred else dtypes[0]) for i, a in enumerate(out)]

    for key, (array, _) in zip(relation.targets, run(relation.ops, held, call), strict=True):
        wanted = read_elements(new, key)
        if array.shape != wanted.shape or array.dtype != wanted.dtype:
            return ElementDifference(key, (), wanted.size)
        unequal = array != wanted
        if unequal.any():
            return ElementDifference(
                key, tuple(int(i) for i in np.argwhere(unequal)[0]), int(np.count_nonzero(unequal))
            )
    return None


def after(texts: OpTexts, dtype: str) -> str:
    """The dtype of tensors of `dtype` after these ops."""
    for text in texts:
        dtype = text.get("cast", {}).get("to", dtype)
    return dtype
