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
from ...core.spec import Spec, spec
from ...core.view import TooManyPieces
from ...elements.raw import raw
from ...ops.base import ValueOp
from ...running.eager import read_elements

if TYPE_CHECKING:
    import numpy as np

    from ...source.index import Source
    from ..relations import Relation

    Array = np.ndarray[Any, Any]
    OpTexts = Sequence[Mapping[str, Mapping[str, Any]]]


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
        arguments = _arguments(given)
        count = given.get("count") or len(given.get("sizes", ())) or 1
        if op.kind == "end":
            return []
        if op.kind == "join":
            args = op.Args(over="x", **arguments)
            if len(held) % count:
                raise OpError("M308", f"{name}: {len(held)} tensors in groups of {count}")
            held = [
                call(op, args, held[at : at + count], 1)[0] for at in range(0, len(held), count)
            ]
        elif op.kind == "part":
            args = op.Args(into="x", **arguments)
            held = [made for one in held for made in call(op, args, [one], count)]
        else:
            args = op.Args(**arguments)
            only = given.get("only")
            held = [
                call(op, args, [one], 1)[0] if only is None or at in only else one
                for at, one in enumerate(held)
            ]
    return held


def _arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments as an op's Args have them."""
    return {
        "from_" if name == "from" else name: tuple(value) if isinstance(value, list) else value
        for name, value in given.items()
        if name != "only"
    }


def computed(texts: OpTexts, array: Array, dtype: str) -> tuple[Array, str]:
    """A tensor after ops that compute its elements one by one, and its dtype then."""
    held = dtype
    for text in texts:
        ((name, given),) = text.items()
        op = ops.get(name)
        args = op.Args(**_arguments(given))
        made = op.infer(args, [spec(held, array.shape)])
        array = op.eager(args, [array], 1, [held])[0]
        held = made[0].dtype if made else held
    return array, held


def difference(relation: Relation, old: Source, new: Source) -> ElementDifference | None:
    """Where the new checkpoint is not what the relation makes of the old one; None if it is."""
    first = 0
    for text in relation.ops:
        (name,) = text
        if not isinstance(ops.get(name), ValueOp):
            break
        first += 1
    head, rest = relation.ops[:first], relation.ops[first:]
    shapes = [old.index.tensors[k].spec for k in relation.sources]
    try:
        views = run(
            rest,
            [view.stored(i, s.shape) for i, s in enumerate(shapes)],
            lambda op, args, inputs, parts: op.trace(args, inputs, parts),
        )
    except TooManyPieces:
        return _difference_eager(relation, old, new)
    kept: dict[int, Array] = {}

    def leaf(number: int) -> Array:
        # parts are all read from one tensor, joined ones each once
        if number not in kept:
            kept.clear()
            array = read_elements(old, relation.sources[number])
            kept[number] = computed(head, array, shapes[number].dtype)[0].reshape(-1)
        return kept[number]

    for key, made in zip(relation.targets, views, strict=True):
        found = _compare(key, made, leaf, new)
        if found is not None:
            return found
    return None


def _compare(
    key: str, made: view.View, leaf: Callable[[int], Array], new: Source
) -> ElementDifference | None:
    import numpy as np

    wanted = new.index.tensors[key].spec
    if made.shape != wanted.shape:
        return ElementDifference(key, (), wanted.numel)
    array = np.ascontiguousarray(read_elements(new, key)).reshape(-1)
    first, count = None, 0
    for piece in sorted(made.pieces, key=lambda p: (not isinstance(p.leaf, int), str(p.leaf))):
        each = array.itemsize
        there = np.ndarray(
            piece.counts,
            array.dtype,
            array.data,
            piece.dst * each,
            [d * each for d in piece.dst_strides],
        )
        if isinstance(piece.leaf, int):
            flat = leaf(piece.leaf)
            if flat.dtype != array.dtype:
                return ElementDifference(key, (), wanted.numel)
            here: Any = np.ndarray(
                piece.counts,
                flat.dtype,
                flat.data,
                piece.src * each,
                [s * each for s in piece.src_strides],
            )
        else:
            here = raw(wanted.dtype, piece.leaf.value)
        unequal = there != here
        if unequal.any():
            at = np.argwhere(unequal)[0]
            place = piece.dst + int(sum(i * d for i, d in zip(at, piece.dst_strides, strict=True)))
            first = place if first is None else min(first, place)
            count += int(np.count_nonzero(unequal))
    if first is None:
        return None
    return ElementDifference(
        key, tuple(int(i) for i in np.unravel_index(first, wanted.shape)), count
    )


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


def cast_dtype(texts: OpTexts, dtype: str) -> str:
    """The dtype of tensors of `dtype` after these ops."""
    for text in texts:
        dtype = text.get("cast", {}).get("to", dtype)
    return dtype
