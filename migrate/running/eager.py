"""Outputs made anew through the eager twins of the ops: stored tensors are read whole, ops run on
whole arrays.

Nothing here knows views, tiles or gathering. Reads go into memory that is kept from one tensor to
the next of the same sizes, because fresh memory costs as much as a copy. How much memory a tensor
takes is known beforehand, from specs alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeGuard

from .. import ops
from ..core import view as views
from ..core.pieces import Fill
from ..core.spec import BITS, Spec
from ..elements.codes import element_code
from ..elements.raw import carrier
from ..ops.base import ValueOp
from ..planning.graph import ApplyOp, ComputedTensor, Program, ReadKey
from ..source.blobs import ChunkedTensor, Stored, chunk_at, chunks_of, rows_of

if TYPE_CHECKING:
    import numpy as np

    from ..core.view import View
    from ..planning.graph import Tensor
    from ..source.index import Source
    from ..source.torn_tensors import TornPart

    Array: TypeAlias = np.ndarray[Any, Any]

# what an op needs for itself where it does not say how little: a dozen arrays of float64
_WIDTH = 96
# bytes of the numbers that are surveyed at a time
SURVEYED = 1 << 20
# bytes of a stretch of columns that is read by itself
RUN = 256


class Pool:
    """A thread's memory for reads. Call order: `begin`, `take` for each, `begin` to free them."""

    __slots__ = ("_free", "_lent")

    def __init__(self) -> None:
        self._free: dict[int, list[Array]] = {}
        self._lent: list[Array] = []

    def begin(self, sizes: Iterable[int] = ()) -> None:
        """Takes all memory back, and keeps what has one of these sizes."""
        for array in self._lent:
            self._free.setdefault(array.nbytes, []).append(array)
        wanted = set(sizes)
        self._free = {size: arrays for size, arrays in self._free.items() if size in wanted}
        self._lent = []

    def take(self, nbytes: int) -> Array:
        """Bytes that hold anything at all."""
        import numpy as np

        free = self._free.get(nbytes)
        found = free.pop() if free else np.empty(nbytes, "u1")
        self._lent.append(found)
        return found


def read_elements(source: Source, key: str, pool: Pool | None = None) -> Array:
    """The raw elements of a stored tensor, one byte each below a byte. M946 if it is torn."""
    import numpy as np

    at = source.index.tensors[key]
    if isinstance(at, Stored):
        return _read_place(source, at, pool)
    if at.torn is not None:
        return _encoded_anew(source, key, at.torn)
    if at.view is not None:
        return _read_pieces(source, at, at.view)
    joined: Array = np.empty(at.spec.shape, carrier(at.spec.dtype))
    for start, chunk in zip(at.starts, at.chunks, strict=True):
        box = tuple(slice(a, a + n) for a, n in zip(start, chunk.spec.shape, strict=True))
        joined[box] = _read_place(source, chunk, pool)
    return joined


def _encoded_anew(source: Source, key: str, torn: TornPart) -> Array:
    """A component of a tensor whose shards are decoded and encoded as one."""
    from ..planning.requantized import whole_again

    if not torn.anew:
        torn.refuse()
    tensors = source.index.tensors
    own = {name: tensors[name] for name in torn.siblings(key).values()}
    return evaluated(source, whole_again(own)[key], {})


def evaluated(source: Source, tensor: Tensor, made: dict[int, Sequence[Array]]) -> Array:
    """The elements of a tensor of a graph, by the eager twins of what computes it. `made` keeps
    what calls answered with, by the identity of the call, and is of use while these are held.
    """
    import numpy as np

    held = []
    for one in tensor.sources:
        if isinstance(one, ComputedTensor):
            call = one.computation
            if id(call) not in made:
                inputs = [evaluated(source, part, made) for part in call.inputs]
                dtypes = [part.spec.dtype for part in call.inputs]
                op = ops.get(call.op_call.op)
                made[id(call)] = op.eager(call.op_call.args, inputs, call.parts, dtypes)
            held.append(np.ascontiguousarray(made[id(call)][one.output]).reshape(-1))
        else:
            held.append(_read_storage(source, chunk_at(source.index.tensors, one), None))
    out: Array = np.zeros(tensor.spec.shape, carrier(tensor.spec.dtype))
    copy_pieces(tensor.view, held, out)
    each = out.itemsize
    for leaf, _, dst, counts, dsts, _ in tensor.view.pieces:
        if isinstance(leaf, Fill):
            to = np.ndarray(counts, out.dtype, out.data, dst * each, [d * each for d in dsts])
            to[...] = element_code(tensor.spec.dtype, leaf.value)
    return out


def _read_pieces(source: Source, at: ChunkedTensor, view: View) -> Array:
    """The raw elements of a tensor that is put together from parts of its chunks, and of zeros."""
    import numpy as np

    out: Array = np.zeros(at.spec.shape, carrier(at.spec.dtype))
    held = [_read_storage(source, chunk, None) for chunk in at.chunks]
    copy_pieces(view, held, out)
    return out


def copy_pieces(view: View, held: Sequence[Array], out: Array) -> None:
    """Copies what a view takes from its leaves, flat and `held` in order, into contiguous `out`;
    where it has a fill, nothing is changed.
    """
    import numpy as np

    each = out.itemsize
    for leaf, src, dst, counts, dsts, srcs in view.pieces:
        if isinstance(leaf, Fill):
            continue
        flat = held[leaf]
        # of a piece without loops, one element
        to = np.ndarray(counts, out.dtype, out.data, dst * each, [d * each for d in dsts])
        to[...] = np.ndarray(counts, flat.dtype, flat.data, src * each, [s * each for s in srcs])


def _read_place(source: Source, at: Stored, pool: Pool | None) -> Array:
    import numpy as np

    spec = at.spec
    if not spec.numel:
        return np.zeros(spec.shape, carrier(spec.dtype))
    elements = _read_storage(source, at, pool)
    if at.strides is None:
        whole: Array = elements[: spec.numel].reshape(spec.shape)
        return whole
    strided: Array = np.ndarray(
        spec.shape, elements.dtype, elements.data, 0, [s * elements.itemsize for s in at.strides]
    )
    ordered: Array = np.array(strided)
    return ordered


def _read_storage(source: Source, at: Stored, pool: Pool | None) -> Array:
    """The raw elements from the first of a tensor to its last, as they lie there."""
    import numpy as np

    nbytes, bits = _read_bytes(at), BITS[at.spec.dtype]
    packed = np.empty(nbytes, "u1") if pool is None else pool.take(nbytes)
    source.blobs[at.blob].readinto(at.offset, packed.data)
    elements: Array = packed.view(carrier(at.spec.dtype)) if bits >= 8 else _apart(packed, bits)
    return elements


def read_stretch(source: Source, key: str, start: int, stop: int, packed: Array) -> Array:
    """The raw elements from `start` to `stop`, in row-major order, of a stored tensor that lies so
    (`rows_of`), read into `packed`.

    Below a byte, `start` is a multiple of 8, and so is each chunk.
    """
    at = source.index.tensors[key]
    bits = BITS[at.spec.dtype]
    first, last = start * bits // 8, (stop * bits + 7) // 8
    into = packed[: last - first]
    here = 0
    for row in rows_of(at) or ():
        low, high = max(first, here), min(last, here + row.spec.nbytes)
        if low < high:
            source.blobs[row.blob].readinto(
                row.offset + low - here, into[low - first : high - first].data
            )
        here += row.spec.nbytes
    made: Array = (
        into.view(carrier(at.spec.dtype)) if bits >= 8 else _apart(into, bits)[: stop - start]
    )
    return made


def _read_bytes(at: Stored) -> int:
    extent = at.spec.numel
    if at.strides is not None and extent:
        extent = 1 + sum((n - 1) * s for n, s in zip(at.spec.shape, at.strides, strict=True))
    return (extent * BITS[at.spec.dtype] + 7) // 8


def _apart(packed: Array, bits: int) -> Array:
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


class Need(NamedTuple):
    """What making some outputs takes: bytes of `memory` at once, and `sizes` of reads in bytes."""

    memory: int
    sizes: tuple[int, ...]


class Specs:
    """The specs of expressions over one source, and with them what it takes to evaluate them."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._of: dict[int, tuple[Program, Spec]] = {}
        self._made: dict[tuple[Any, ...], tuple[Any, list[Spec]]] = {}

    def of(self, expression: Program) -> Spec:
        """dtype and shape of what the expression makes."""
        if isinstance(expression, ReadKey):
            return self._source.index.tensors[expression.key].spec
        found = self._of.get(id(expression))
        if found is None:
            made = self.outputs_of(expression)[expression.output]
            found = self._of[id(expression)] = expression, made
        return found[1]

    def outputs_of(self, call: ApplyOp) -> list[Spec]:
        """The specs of all outputs of a call."""
        specs = [self.of(e) for e in call.inputs]
        key = call.op, id(call.args), call.parts, *specs
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = call.args, _made(call, specs)
        return found[1]

    def need(self, expressions: Sequence[Program]) -> Need:
        """What it takes to evaluate these one after the other, with shared calls counted once."""
        sizes: list[int] = []
        kept: dict[Any, int] = {}
        most = 0
        for expression in expressions:
            own, stack = 0, [expression]
            while stack:
                here = stack.pop()
                if isinstance(here, ReadKey):
                    # memory for reads is taken back when all outputs are made
                    there = self._source.index.tensors[here.key]
                    sizes += [_read_bytes(at) for at in chunks_of(there)]
                    own += self._unpacked(here.key)
                    continue
                if here.parts > 1:
                    if shared(here) in kept:
                        continue
                    copied = (
                        sum(_loose(s) for s in self.outputs_of(here))
                        if ops.get(here.op).copies
                        else 0
                    )
                    kept[shared(here)] = copied + self._for_itself(here)
                else:
                    own += _loose(self.of(here)) + self._for_itself(here)
                stack += here.inputs
            most = max(most, own)
        return Need(sum(sizes) + sum(kept.values()) + most, tuple(sizes))

    def _unpacked(self, key: str) -> int:
        at = self._source.index.tensors[key]
        return (
            _loose(at.spec) * (5 if BITS[at.spec.dtype] < 8 else 1)
            if BITS[at.spec.dtype] < 8 or isinstance(at, ChunkedTensor) or at.strides is not None
            else 0
        )

    def _for_itself(self, call: ApplyOp) -> int:
        op = ops.get(call.op)
        if not isinstance(op, ValueOp):
            return 0
        given = [self.of(e) for e in call.inputs]
        if (known := op.eager_memory(call.args, given)) is not None:
            return known
        width = op.eager_width(call.args)
        return (_WIDTH if width is None else width) * max(
            s.numel for s in (*self.outputs_of(call), *given)
        )


def _made(call: ApplyOp, specs: Sequence[Spec]) -> list[Spec]:
    op = ops.get(call.op)
    made = op.infer(call.args, specs, call.parts)
    if made is not None:
        return made
    shapes = [
        v.shape
        for v in op.trace(
            call.args, [views.stored(i, s.shape) for i, s in enumerate(specs)], call.parts
        )
    ]
    return [Spec(specs[0].dtype, shape) for shape in shapes]


def _loose(spec: Spec) -> int:
    """Bytes of an array of raw elements."""
    return spec.numel * max(1, BITS[spec.dtype] // 8)


def shared(call: ApplyOp) -> tuple[Any, ...]:
    """What is equal for the outputs of one call with several."""
    return call.op, id(call.args), call.parts, *map(id, call.inputs)


def several(expression: Program) -> list[tuple[Any, ...]]:
    """The calls with several outputs that an expression is made of, innermost first."""
    out, stack = [], [expression]
    while stack:
        here = stack.pop()
        if isinstance(here, ApplyOp):
            if here.parts > 1:
                out.append(shared(here))
            stack += here.inputs
    return out[::-1]


class EagerEvaluation:
    """Makes outputs one by one; keeps what calls with several made while any of `uses` is left."""

    def __init__(
        self,
        source: Source,
        specs: Specs,
        pool: Pool | None = None,
        uses: Mapping[tuple[Any, ...], int] | None = None,
        surveys: dict[Any, tuple[ApplyOp, Any]] | None = None,
    ) -> None:
        """`surveys` keeps what calls must know of all their numbers, for evaluations to come; with
        it, an output that follows from that alone is made without the numbers.
        """
        self._source, self._specs, self._pool = source, specs, pool
        self._uses = dict(uses or {})
        self._surveys = surveys
        self._calls: dict[tuple[Any, ...], list[Array]] = {}

    def __call__(self, expression: Program) -> Array:
        """The raw elements that the expression makes."""
        if isinstance(expression, ReadKey):
            return read_elements(self._source, expression.key, self._pool)
        several = expression.parts > 1
        if several and (kept := self._calls.get(shared(expression))) is not None:
            return kept[expression.output]
        if self._surveys is not None and not self._specs.of(expression).shape:
            op, specs = ops.get(expression.op), [self._specs.of(e) for e in expression.inputs]
            if _makes_scalars(op, expression.args, specs):
                return self.rows(expression, 0, 1)
        inputs = [self(e) for e in expression.inputs]
        outputs = ops.get(expression.op).eager(
            expression.args, inputs, expression.parts, expression.dtypes
        )
        if several and self._uses.get(shared(expression), 0) > 1:
            self._calls[shared(expression)] = outputs
        return outputs[expression.output]

    def done(self, expression: Program) -> None:
        """Lets go of what no later output needs."""
        for call in several(expression):
            self._uses[call] = self._uses.get(call, 0) - 1
            if self._uses[call] <= 0:
                self._calls.pop(call, None)

    def rows(self, expression: Program, start: int, stop: int) -> Array:
        """Rows `start` to `stop` of the first axis, from no more input than the ops need."""
        if isinstance(expression, ReadKey):
            return self._stored_rows(expression.key, start, stop)
        op = ops.get(expression.op)

        def part(number: int, low: int, high: int, columns: tuple[int, int] | None = None) -> Array:
            one = expression.inputs[number]
            if columns is not None:
                return self._columns(one, low, high, *columns)
            whole = self._specs.of(one).shape
            return (
                self(one)
                if not whole or (low, high) == (0, whole[0])
                else self.rows(one, low, high)
            )

        specs = [self._specs.of(e) for e in expression.inputs]
        args, parts, output = expression.args, expression.parts, expression.output
        if _is_surveyed(op, args, specs):
            found = self._survey(expression, op, specs)
            return op.surveyed_rows(args, part, specs, parts, output, start, stop, found)
        return op.rows(args, part, specs, parts, output, start, stop)

    def _survey(self, call: ApplyOp, op: ValueOp, specs: Sequence[Spec]) -> Any:
        """What the op must know of all rows of its first input, found once."""
        surveys = {} if self._surveys is None else self._surveys
        if shared(call) not in surveys:
            count, step = specs[0].shape[0], SURVEYED * specs[0].shape[0]
            step = max(1, step // max(1, _loose(specs[0])))
            if not by_rows(call.inputs[0], self._specs):
                step = count
            # memory of its own: what is lent here is in use
            numbers = EagerEvaluation(self._source, self._specs, None, None, surveys)
            found = None
            for start in range(0, count, step):
                part = numbers.rows(call.inputs[0], start, min(start + step, count))
                found = op.eager_survey(call.args, specs, start, part, found)
            # the call keeps its ids taken
            surveys[shared(call)] = call, found
        return surveys[shared(call)][1]

    def _stored_rows(self, key: str, start: int, stop: int) -> Array:
        at = self._source.index.tensors[key]
        shape = at.spec.shape
        if not shape:
            return read_elements(self._source, key, self._pool)
        each = at.spec.numel // shape[0] if shape[0] else 0
        if rows_of(at) is None or each * BITS[at.spec.dtype] % 64 or not each:
            return read_elements(self._source, key, self._pool)[start:stop]
        nbytes = (stop - start) * each * BITS[at.spec.dtype] // 8
        packed = Pool().take(nbytes) if self._pool is None else self._pool.take(nbytes)
        return read_stretch(self._source, key, start * each, stop * each, packed).reshape(
            stop - start, *shape[1:]
        )

    def _columns(self, expression: Program, low: int, high: int, first: int, last: int) -> Array:
        """Rows and columns of a matrix, or of each of several."""
        import numpy as np

        spec = self._specs.of(expression)
        each, bits = spec.shape[-1], BITS[spec.dtype]
        if not isinstance(expression, ReadKey) or len(spec.shape) != 2 or bits < 8:
            return np.ascontiguousarray(self.rows(expression, low, high)[..., first:last])
        key, nbytes = expression.key, (last - first) * bits // 8
        made: Array = np.empty((high - low, last - first), carrier(spec.dtype))
        if rows_of(self._source.index.tensors[key]) is not None and nbytes >= RUN:
            for at, line in enumerate(made, low):
                read_stretch(
                    self._source, key, at * each + first, at * each + last, line.view("u1")
                )
            return made
        # what is between short stretches is cheaper to read than to skip
        step = max(1, SURVEYED // max(1, each * bits // 8))
        own = EagerEvaluation(self._source, self._specs)
        for at in range(low, high, step):
            there = own.rows(expression, at, min(at + step, high))
            made[at - low : at - low + len(there)] = there[:, first:last]
        return made

    def slack(self, expression: Program) -> tuple[str, Array] | None:
        """The op whose bits may differ, and by how much per element; None if bytes are equal."""
        import numpy as np

        if isinstance(expression, ReadKey):
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
        bounds = [
            np.zeros(self(e).shape) if one is None else one[1]
            for e, one in zip(expression.inputs, inner, strict=True)
        ]
        moved, still = (
            op.eager(
                expression.args,
                [np.asarray(b, "<f8", order="C").view("<u8") for b in given],
                expression.parts,
                ["float64"] * len(given),
            )
            for given in (bounds, [np.zeros_like(b) for b in bounds])
        )
        made: Array = moved[expression.output].view("<f8") - still[expression.output].view("<f8")
        return found[0], made


def _is_surveyed(op: Any, args: Any, specs: Sequence[Spec]) -> TypeGuard[ValueOp]:
    """Whether rows are made by `surveyed_rows`."""
    return isinstance(op, ValueOp) and op.surveys(args, specs) and op.makes_rows(args, specs)


def _makes_scalars(op: Any, args: Any, specs: Sequence[Spec]) -> bool:
    """Whether an output without axes is made as a row is."""
    if not isinstance(op, ValueOp) or not op.makes_rows(args, specs):
        return False
    return op.scalars_by_rows or op.surveys(args, specs)


def is_computed(expression: Program) -> bool:
    """Whether a value op is among those that make it of its first input."""
    while isinstance(expression, ApplyOp):
        if isinstance(ops.get(expression.op), ValueOp):
            return True
        expression = expression.inputs[0]
    return False


def reads_nothing(expression: Program, specs: Specs) -> bool:
    """Whether an output needs no element of what its numbers are computed from: a shape, or what
    follows from a survey of all of them.
    """
    op = ops.get(expression.op) if isinstance(expression, ApplyOp) else None
    if not isinstance(expression, ApplyOp) or not isinstance(op, ValueOp):
        return False
    whole = tuple((0, n) for n in specs.of(expression).shape)
    given = [specs.of(e) for e in expression.inputs]
    needed = op.needs(expression.args, given, expression.output, whole)
    return all(any(low == high for low, high in box) for box in needed)


def by_rows(expression: Program, specs: Specs) -> bool:
    """Whether some rows can be made from less than all of the inputs."""
    while isinstance(expression, ApplyOp):
        op = ops.get(expression.op)
        if not op.by_rows:
            return False
        if isinstance(op, ValueOp) and not op.makes_rows(
            expression.args, [specs.of(e) for e in expression.inputs]
        ):
            return False
        expression = expression.inputs[0]
    return True


def kind(expression: Program, specs: Specs) -> tuple[Any, ...]:
    """What outputs of one rule share: ops and arguments, dtypes, and the number of inputs."""
    made: list[Any] = [specs.of(expression)]
    while isinstance(expression, ApplyOp):
        made += [expression.op, id(expression.args), len(expression.inputs), *expression.dtypes[:1]]
        expression = expression.inputs[0]
    return tuple(made)
