"""What every op has to satisfy, for the built-in ones and for those of third parties.

    import pytest
    from migrate.testing import opkit

    @pytest.mark.parametrize("name, number", opkit.cases(["my_op"]))
    def test_my_op(name, number):
        opkit.check_sample(name, number)

    def test_my_op_is_described():
        opkit.check_description("my_op")

The samples of an op are both its documentation and its test cases: each is traced and the view is
carried out on numpy arrays of raw elements, which must be what the op's eager twin makes of them;
the inverse must bring the first arrays back; and wrong arguments must be refused in words that hold
the numbers. Failures are AssertionErrors.
"""

from __future__ import annotations

import typing
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, fields, is_dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

from .. import codecs, ops
from ..core.declaration import NumberFormat
from ..core.spec import Spec, spec
from ..core.view import Fill, Piece, View, covers, stored
from ..elements.raw import carrier, raw
from ..ops.base import Check, Loss, OneWay, Op, OpCall, OpError, ValueOp, Written, format_shape

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

KINDS = ("join", "part", "each", "make", "end", "decide", "exchange")
DTYPES = ("bfloat16", "bool", "float32", "float4_e2m1fn", "int64", "complex128")


def is_layout(op: Op) -> bool:
    """Whether the op is described by views alone; others are checked by a kit of their own."""
    return type(op).trace is not Op.trace


def cases(names: Iterable[str] | None = None) -> list[tuple[str, int]]:
    """(name, number of the sample) for parametrize, of the layout ops `names`, by default all."""
    chosen = ops.names() if names is None else list(names)
    return [
        (n, i) for n in chosen if is_layout(ops.get(n)) for i, _ in enumerate(ops.get(n).samples())
    ]


def arguments(op: Op, written: dict[str, Any]) -> Any:
    """The op's Args of `written`, a mapping as an author would write it with all numbers plain:
    lists become tuples.
    """
    known = {f.metadata.get("alias", f.name): f.name for f in fields(op.Args)}
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in written.items()}
    made = {known[k]: _formatted(v) for k, v in values.items() if k in known}
    if rest := {k: v for k, v in values.items() if k not in known}:
        # what stands beside the op's own arguments is its codec's
        made["codec_args"] = codecs.get(written["codec"]).Args(**rest)
    return op.Args(**made)


def _formatted(value: Any) -> Any:
    """A codec with its arguments, where that is what a mapping is."""
    if not isinstance(value, dict) or "codec" not in value:
        return value
    rest = {k: tuple(v) if isinstance(v, list) else v for k, v in value.items() if k != "codec"}
    return NumberFormat(value["codec"], codecs.get(value["codec"]).Args(**rest))


def elements(shape: Sequence[int], dtype: str = "int64", first: int = 0) -> Array:
    """Raw elements that count from `first`, as different as the dtype's width allows."""
    import numpy as np

    counted = np.arange(first, first + prod(shape), dtype="<u8").reshape(shape)
    held = carrier(dtype)
    if held == "V16":
        return np.stack([counted, counted + 1], -1).view("V16")[..., 0]
    narrow = {"bool": 2, "float4_e2m1fn": 16, "float6_e2m3fn": 64, "float6_e3m2fn": 64}.get(dtype)
    return (counted % narrow if narrow else counted).astype(held)


def realise(view: View, arrays: Sequence[Array], dtype: str = "int64") -> Array:
    """The tensor of `view`, leaf i being `arrays[i]`; raw elements, fills encoded as `dtype`.

    Each piece is carried out loop by loop, without numpy's strides, so that it shares nothing with
    what it checks. AssertionError if the pieces do not write every element exactly once.
    """
    import numpy as np

    require(covers(view), f"the pieces of {view} do not write each element exactly once")
    flat = [a.reshape(-1) for a in arrays]
    held = arrays[0].dtype if arrays else np.dtype(carrier(dtype))
    out = np.zeros(prod(view.shape), held)
    for piece in view.pieces:
        source, target = _addresses(piece)
        out[target] = (
            raw(dtype, piece.leaf.value)
            if isinstance(piece.leaf, Fill)
            else flat[piece.leaf][source]
        )
    return out.reshape(view.shape)


def check_sample(name: str, number: int) -> None:
    """Everything that must hold for sample `number` of the op called `name`, in several dtypes."""
    op = ops.get(name)
    written, shapes = list(op.samples())[number]
    args = arguments(op, written)
    op.validate(args)
    for dtype in DTYPES:
        check_twin(op, args, shapes, dtype)
        check_inverse(op, args, shapes, dtype)
    check_refusals(op, args, shapes)


def check_twin(op: Op, args: Any, shapes: Sequence[tuple[int, ...]], dtype: str = "int64") -> None:
    """The traced views, carried out, are bit for bit the eager twin's, and the specs are right."""
    arrays, views, parts = _inputs(op, args, shapes, dtype)
    traced = op.trace(args, views, parts)
    expected = op.eager(args, arrays, parts, [dtype] * len(arrays))
    inferred = op.infer(args, [spec(dtype, s) for s in shapes], parts)
    wanted = {"join": 1, "part": parts, "each": len(shapes), "make": len(shapes), "end": 0}[op.kind]
    require(
        len(traced) == wanted,
        f"{op.name} is of kind {op.kind} and made {len(traced)} tensors, not {wanted}",
    )
    require(
        len(traced) == len(expected),
        f"{op.name} traced {len(traced)} tensors, its eager twin made {len(expected)}",
    )
    for number, (view, twin) in enumerate(zip(traced, expected, strict=True)):
        made = inferred[number] if inferred is not None else spec(dtype, view.shape)
        got = realise(view, arrays if made.dtype == dtype else [], made.dtype)
        label = f"{op.name} {args} on {list(shapes)} of {dtype}: output {number}"
        require(
            made.shape == view.shape,
            f"{label}: the view is {view.shape}, the spec says {made.shape}",
        )
        require(got.shape == twin.shape, f"{label}: traced {got.shape}, eager {twin.shape}")
        require(got.dtype == twin.dtype, f"{label}: traced {got.dtype}, eager {twin.dtype}")
        require(same_elements(got, twin), f"{label}: traced and eager differ:\n{got}\n{twin}")
        check_rows(op, args, arrays, [spec(dtype, s) for s in shapes], parts, number, twin)


def check_rows(
    op: Op,
    args: Any,
    arrays: Sequence[Array],
    specs: Sequence[Spec],
    parts: int,
    output: int,
    whole: Array,
) -> None:
    """Any rows that `rows` makes are those of the `whole` output, which `eager` made."""
    count = len(whole) if whole.ndim else 0
    for start, stop in {
        (0, count),
        (0, min(1, count)),
        (count // 2, count),
        (count // 3, count // 2),
        (count - 1, count),
    }:
        if not 0 <= start < stop:
            continue
        made = op.rows(
            args,
            lambda number, low, high, columns=(None, None): (
                arrays[number][low:high, ..., slice(*columns)]
                if len(specs[number].shape) > 1
                else arrays[number][low:high]
                if specs[number].shape
                else arrays[number]
            ),
            specs,
            parts,
            output,
            start,
            stop,
        )
        label = (
            f"{op.name} {args} on {[str(s) for s in specs]}: output {output}: rows {start} to "
            f"{stop}"
        )
        require(
            same_elements(made, whole[start:stop]), f"{label} differ:\n{made}\n{whole[start:stop]}"
        )


def check_inverse(
    op: Op, args: Any, shapes: Sequence[tuple[int, ...]], dtype: str = "int64"
) -> None:
    """The inverse brings back the inputs and has an inverse that does what the op does; or the op
    says why there is none.
    """
    arrays, views, parts = _inputs(op, args, shapes, dtype)
    inverse = op.invert(args, enumerated=True)
    if isinstance(inverse, OneWay):
        require(bool(inverse.because.strip()), f"{op.name} does not say why it is one-way")
        return
    require(op.loss(args) is not Loss.DESTRUCTIVE, f"{op.name} {args} destroys, yet has an inverse")
    traced = op.trace(args, views, parts)
    back = _call(inverse, traced, len(views))
    label = f"{op.name} {args} on {list(shapes)}: its inverse {inverse.op} {inverse.args}"
    require(len(back) == len(arrays), f"{label} makes {len(back)} tensors of {len(arrays)}")
    for number, (view, array) in enumerate(zip(back, arrays, strict=True)):
        require(
            view.shape == array.shape,
            f"{label} makes {view.shape} of input {number}, {array.shape}",
        )
        require(
            same_elements(realise(view, arrays, dtype), array),
            f"{label} does not bring back input {number}",
        )
    again = ops.get(inverse.op).invert(inverse.args, enumerated=True)
    require(isinstance(again, OpCall), f"{label} has no inverse of its own")
    if isinstance(again, OpCall):
        redone = [realise(v, arrays, dtype) for v in _call(again, back, parts)]
        same = all(
            same_elements(a, realise(v, arrays, dtype)) for a, v in zip(redone, traced, strict=True)
        )
        require(same, f"{label}, undone again as {again}, is not what the op does")


def check_refusals(op: Op, args: Any, shapes: Sequence[tuple[int, ...]]) -> None:
    """A missing axis, a wrong count, unequal shapes: refused in messages with the numbers."""
    named = {f.name for f in fields(op.Args)}
    parts = _parts(op, args, shapes)
    if "dim" in named:
        for dim in (99, -99):
            _refused(op, replace(args, dim=dim), shapes, parts, "M304", [str(dim)])
    if "count" in named:
        there = len(shapes) if op.kind == "join" else parts
        _refused(
            op, replace(args, count=there + 1), shapes, parts, "M305", [str(there), str(there + 1)]
        )
    if op.kind == "join" and len(shapes) > 1:
        odd = (*shapes[-1], 7)
        _refused(
            op,
            args,
            [*shapes[:-1], odd],
            parts,
            "M301",
            [format_shape(shapes[0]), format_shape(odd)],
        )


def check_description(name: str) -> None:
    """The op is called as in its registry, says what it does, and documents each argument."""
    op = ops.get(name)
    require(isinstance(op, Op), f"{name} is {op!r}, not an Op")
    require(op.name == name, f"{name} calls itself {op.name}")
    require(op.kind in KINDS, f"{name} is of kind {op.kind!r}, not one of {KINDS}")
    require(bool(op.summary.strip()), f"{name} has no summary")
    frozen = is_dataclass(op.Args) and vars(op.Args)["__dataclass_params__"].frozen
    require(frozen, f"the Args of {name} are not a frozen dataclass")
    hints = typing.get_type_hints(op.Args, include_extras=True)
    for field in fields(op.Args):
        require(
            bool(field.metadata.get("doc", "").strip()),
            f"{name}: argument {field.name} has no description",
        )
        hint = hints[field.name]
        # a choice is written as one of its words
        choice = typing.get_origin(hint) is typing.Literal
        marked = hint is bool or choice or any(isinstance(m, Written) for m in _metadata(hint))
        require(
            marked,
            f"{name}: argument {field.name} is annotated {hints[field.name]}, which does not say "
            "how it is written",
        )
    needed = {
        f.metadata.get("alias", f.name)
        for f in fields(op.Args)
        if f.default is MISSING and f.default_factory is MISSING
    }
    samples = list(op.samples())
    require(bool(samples), f"{name} has no samples")
    for written, _ in samples:
        require(
            needed <= set(written),
            f"{name}: sample {written} lacks {sorted(needed - set(written))}",
        )
        arguments(op, written)
    capture = {"join": "over", "part": "into"}.get(op.kind)
    by_role = isinstance(op, ValueOp) and bool(op.roles())
    require(
        capture is None or capture in needed or by_role,
        f"{name} is of kind {op.kind} and has no `{capture}`",
    )


def settle(checks: Iterable[Check], arrays: Sequence[Array], dtype: str) -> None:
    """Changes the arrays so that the conditions hold."""
    for check in checks:
        if check.kind == "equal":
            first = realise(check.views[0], arrays, dtype).reshape(-1)
            for view in check.views[1:]:
                for piece in view.pieces:
                    if not isinstance(piece.leaf, Fill):
                        source, target = _addresses(piece)
                        arrays[piece.leaf].reshape(-1)[source] = first[target]
        else:
            require(check.value is not None, "a check of kind `filled` has a value")
            for view in check.views:
                for piece in view.pieces:
                    if not isinstance(piece.leaf, Fill):
                        arrays[piece.leaf].reshape(-1)[_addresses(piece)[0]] = raw(
                            dtype, check.value or 0
                        )


def _inputs(
    op: Op, args: Any, shapes: Sequence[tuple[int, ...]], dtype: str
) -> tuple[list[Array], list[View], int]:
    """Arrays that meet the op's checks, views of them, and how many parts the op makes."""
    arrays: list[Array] = []
    for shape in shapes:
        arrays.append(elements(shape, dtype, sum(a.size for a in arrays) + 1))
    views = [stored(i, s) for i, s in enumerate(shapes)]
    parts = _parts(op, args, shapes)
    settle(op.checks(args, views, parts), arrays, dtype)
    return arrays, views, parts


def _parts(op: Op, args: Any, shapes: Sequence[tuple[int, ...]]) -> int:
    return op.parts(args, shapes[0], None) if op.kind == "part" else 1


def _call(step: OpCall, views: Sequence[View], parts: int) -> list[View]:
    op = ops.get(step.op)
    if op.kind == "part":
        parts = op.parts(step.args, views[0].shape, parts)
    return op.trace(step.args, views, parts)


def _refused(
    op: Op,
    args: Any,
    shapes: Sequence[tuple[int, ...]],
    parts: int,
    code: str,
    words: Sequence[str],
) -> None:
    label = f"{op.name} {args} on {list(shapes)}"
    try:
        if op.kind == "part":
            op.parts(args, shapes[0], None)
        op.trace(args, [stored(i, s) for i, s in enumerate(shapes)], parts)
    except OpError as error:
        require(
            error.code == code, f"{label} was refused as {error.code}, not {code}: {error.message}"
        )
        missing = [w for w in words if w not in error.message]
        require(not missing, f"{label}: the message does not name {missing}: {error.message}")
    else:
        raise AssertionError(f"{label} was not refused")


def _addresses(piece: Piece) -> tuple[list[int], list[int]]:
    """(source, target) linear indices that a piece copies between."""
    source, target = [piece.src], [piece.dst]
    for n, d, s in zip(piece.counts, piece.dst_strides, piece.src_strides, strict=True):
        source = [x + i * s for x in source for i in range(n)]
        target = [x + i * d for x in target for i in range(n)]
    return source, target


def _metadata(hint: Any) -> list[Any]:
    """The marks of an annotation, those of the members of a union included."""
    own = list(getattr(hint, "__metadata__", ()))
    return own + [
        m for member in typing.get_args(hint) for m in getattr(member, "__metadata__", ())
    ]


def same_elements(a: Array, b: Array) -> bool:
    """Whether two arrays have the same shape, dtype and bits."""
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def require(holds: bool, message: str) -> None:
    """AssertionError with the message if something does not hold."""
    # raised, not asserted: `python -O` and unrewritten modules must not hide it
    if not holds:
        raise AssertionError(message)
