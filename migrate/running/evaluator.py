"""Tensors that are computed: box by box where their op says what a box needs, else whole, once, and
let go after their last use.

Arrays hold raw elements (unsigned integers, one byte each for elements below a byte), so no bit
passes through a float unless the op itself computes with floats. Threads compute side by side; only
a node that needs more than a thread's share of the memory has it to itself.

A computed tensor is never whole in memory if its op says what a part of it needs. A read names a
linear range or a strided move of the packed bytes; it becomes boxes of the result, each of these
boxes of the inputs, and those are read as every output is: through a view, gathered. A box that is
what was asked is computed straight into the reader's buffer. Where an op has a coarser grain, or a
move takes elements apart, it goes through a box that this thread keeps for its next reads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import count, product
from math import prod
from typing import TYPE_CHECKING, Any, NoReturn

from ..core import view as views
from ..core.errors import Report, fail, listed, option
from ..core.out_of_memory import lacking, ran_out
from ..core.spec import BITS, Spec, coordinates, unit
from ..core.view import linear
from ..elements.codes import encode
from ..elements.raw import carrier, pack, scratch, unpack
from ..elements.transposes import is_turned
from ..ops.base import OpError, ValueOp
from ..planning.graph import (
    BLOCKS,
    CHUNK,
    FEW,
    MEMOS,
    TEMPORARIES,
    Computation,
    ComputedTensor,
    Kind,
    Tensor,
    kind_of,
    size_of,
)
from .gather import ByteReader, Gather, copy_strided, halved, stored_reader
from .geometry import (
    STAGE,
    STAGE_MAX,
    ByteLayouts,
    Move,
    footprint,
    ranges,
    strides_of,
    within,
)
from .resources import CPU, MAX_MEMORY, Device
from .surveys import Surveys, shared_memos
from .workspace import Workspace

if TYPE_CHECKING:
    import numpy as np

    from ..ops.base import Box, Meter
    from ..source.index import Source
    from .error_statistics import Ledger

# among which a lack of memory shows
_SHORT = (MemoryError, OSError, RuntimeError, ImportError)
# a fill of the buffer grows to this where an op's grain asks for it
GRAIN_MOST = 16 << 20


class Evaluator:
    """The computed tensors of a run, for any number of threads.

    `max_memory` is that of the run: three quarters of it are for computing, the rest is the
    gatherers'. Whole values are kept until each of `outputs` that reads them is done, or until
    memory is needed for others; then they are computed again.
    """

    def __init__(
        self,
        source: Source,
        layouts: ByteLayouts,
        outputs: Iterable[Tensor] = (),
        max_memory: int = MAX_MEMORY,
        *,
        threads: int = 1,
        device: Device = CPU,
        ledger: Ledger | None = None,
        watch: Callable[[Computation, Sequence[Box], Sequence[Any]], None] | None = None,
    ) -> None:
        self._source, self._layouts, self._device, self._ledger = source, layouts, device, ledger
        # sees the boxes that calls compute with
        self._watch = watch
        self.max_memory, self.budget = max_memory, max_memory - max_memory // 4
        # beside one node that takes the whole budget the other threads still have theirs
        self.share = self.budget // (4 * threads)
        self.sparing = layouts.sparing
        # what a box may cost with its inputs: the op's own arrays come on top
        self.limit = min(CHUNK, self.share // TEMPORARIES)
        self.widest = max(self.limit, min(GRAIN_MOST, self.share // TEMPORARIES))
        # by thread; a thread frees its `threading.local` when nothing waits for it any more
        self._own: dict[int, Workspace] = {}
        self._lock, self._heavy = threading.Lock(), threading.RLock()
        self._uses: dict[int, int] = {}
        # calls that other calls read, once for each of their boxes
        self._inner: set[int] = set()
        # id of a call and number of its output -> the call, to keep its id taken, and the bytes
        self._kept: dict[tuple[int, int], tuple[Computation, memoryview]] = {}
        # what calls remember between their boxes, and how many bytes that is; the call keeps its id
        # taken
        self._memos: dict[int, tuple[Computation, dict[str, Any], int]] = {}
        self._remembered = 0
        self._surveys: Surveys | None = None
        self._making: dict[int, threading.RLock] = {}
        self._spent: set[int] = set()
        self._kinds: dict[tuple[Any, ...], Kind] = {}
        # of tensors that read computed ones (`reading_step`)
        self.steps: dict[tuple[Any, ...], int] = {}
        # whether two ranges of such a step compute the same box
        self.overlapping = False
        self._weights: dict[int, tuple[Computation, int]] = {}
        self._live = 0
        for tensor in outputs:
            self._count(tensor)

    def forget(self) -> None:
        """Frees the memory that threads compute in; it refers to this object and to the source."""
        self._own = {}

    def _count(self, tensor: Tensor, inner: bool = False) -> None:
        for value in tensor.sources:
            if isinstance(value, ComputedTensor):
                first = id(value.computation) not in self._uses
                self._uses[id(value.computation)] = self._uses.get(id(value.computation), 0) + 1
                if inner:
                    self._inner.add(id(value.computation))
                for read in value.computation.inputs if first else ():
                    self._count(read, True)

    def kind(self, value: ComputedTensor) -> Kind:
        """What the value has in common with others of its op, arguments and specs."""
        call = value.computation  # its arguments are kept beside their id
        key = (
            call.op_call.op,
            id(call.op_call.args),
            value.output,
            value.spec,
            *[t.spec for t in call.inputs],
        )
        found = self._kinds.get(key)
        if found is None:
            found = self._kinds[key] = kind_of(call, value.output, value.spec)
        return found

    def require(self, outputs: Iterable[Tensor]) -> None:
        """RunError M919 naming each node whose smallest box does not fit in the memory."""
        report, seen, todo = Report(), set[int](), list(outputs)
        reported: set[tuple[str, int]] = set()
        while todo:
            for value in todo.pop().sources:
                if not isinstance(value, ComputedTensor) or id(value) in seen:
                    continue
                seen.add(id(value))
                todo += value.computation.inputs
                least = self.kind(value).least
                if least > self.budget and (value.computation.rule, least) not in reported:
                    reported.add((value.computation.rule, least))
                    self._refuse(report, value.computation, least)
        report.check()

    def _refuse(self, report: Report, call: Computation, least: int) -> None:
        report.add(
            "M919",
            f"{self._said(call)} takes {least} bytes at once, the limit is {self.budget}, three "
            f"quarters of {option('max_memory')}",
            help=f"give {option('max_memory', -(-least * 4 // 3))} or more",
        )

    def _short(self, error: Exception, value: ComputedTensor, kind: Kind, box: Box) -> None:
        """RunError M922 with the bytes of the box and its inputs, if `error` means no memory."""
        if lacking(error):
            nbytes = TEMPORARIES * kind.cost(box) if kind.regional else kind.least
            ran_out(error, f"compute {self._said(value.computation)}, {nbytes} bytes at once")

    @staticmethod
    def _said(call: Computation) -> str:
        """The op with its rule and keys, as messages name it."""
        rule = f"rule {call.rule}: " if call.rule else ""
        keys = f" of {listed(list(call.keys), 4)}" if call.keys else ""
        return f"{rule}`{call.op_call.op}`{keys}"

    def leaf(self, wanted: ComputedTensor | Tensor) -> ByteReader:
        """The packed bytes of a value, or of a tensor whose sub-byte elements move one by one."""
        if isinstance(wanted, ComputedTensor):
            kind = self.kind(wanted)
            if kind.regional and not (
                wanted.spec.nbytes <= FEW
                and (
                    id(wanted.computation) in self._inner
                    or self._uses.get(id(wanted.computation), 0) > 1
                )
            ):
                return ComputedReader(self, wanted, kind)
        return ByteReader(None, 0, self.bytes(wanted))

    def bytes(self, wanted: ComputedTensor | Tensor) -> memoryview:
        """The packed bytes of a whole value or tensor, in memory; RunError M919 if too large."""
        if not isinstance(wanted, ComputedTensor):
            return pack(self._loose(wanted), wanted.spec.dtype)
        call, at = wanted.computation, (id(wanted.computation), wanted.output)
        kind = self.kind(wanted)
        with self._alone(call, kind.least):
            with self._lock:
                lock = self._making.setdefault(id(call), threading.RLock())
            with lock:
                with self._lock:
                    kept = self._kept.get(at)
                if kept is not None:
                    return kept[1]
                with self._lock:
                    self._make_room(kind.least)
                try:
                    return self._run(wanted, kind)
                except _SHORT as error:
                    self._short(error, wanted, kind, _all(wanted.spec))
                    raise

    def done(self, tensor: Tensor) -> None:
        """Counts down what `tensor` read, and frees what will not be read again."""
        for value in tensor.sources:
            if not isinstance(value, ComputedTensor):
                continue
            with self._lock:
                left = self._uses[id(value.computation)] = (
                    self._uses.get(id(value.computation), 1) - 1
                )
                if left <= 0:
                    self._drop(id(value.computation))
            if left <= 0:
                self._spend(value.computation)

    def _spend(self, call: Computation) -> None:
        """Its inputs are not read by this call any more."""
        with self._lock:
            if id(call) in self._spent:
                return
            self._spent.add(id(call))
            if (memo := self._memos.pop(id(call), None)) is not None:
                self._remembered -= memo[2]
        if self._surveys is not None:
            self._surveys.drop(call)
        if self._ledger is not None:
            self._ledger.close(call)
        for tensor in call.inputs:
            self.done(tensor)

    def _drop(self, call: int) -> None:
        for at in [at for at in self._kept if at[0] == call]:
            self._live -= len(self._kept.pop(at)[1])

    def _make_room(self, nbytes: int) -> None:
        """Drops kept values, to be computed again, if the budget cannot hold them and `nbytes`."""
        if self._live + nbytes > self.budget:
            for call in {at[0] for at in self._kept}:
                self._drop(call)

    def _keep(self, call: Computation, outputs: dict[int, memoryview]) -> None:
        nbytes = sum(len(p) for p in outputs.values())
        with self._lock:
            self._make_room(nbytes)
            self._kept.update(
                {(id(call), output): (call, packed) for output, packed in outputs.items()}
            )
            self._live += nbytes

    def _alone(self, call: Computation, least: int) -> AbstractContextManager[Any]:
        """Held while a box is made that needs, with what it reads, more than a thread's share."""
        if max(least, self._weight(call)) <= self.share:
            return nullcontext()
        if least > self.budget:
            report = Report()
            self._refuse(report, call, least)
            report.check()
        return self._heavy

    def _weight(self, call: Computation) -> int:
        """The most bytes that a node below `call` takes at once."""
        found = self._weights.get(id(call))
        if found is None:
            below = [v for t in call.inputs for v in t.sources if isinstance(v, ComputedTensor)]
            weight = max(
                (max(self.kind(v).least, self._weight(v.computation)) for v in below), default=0
            )
            found = self._weights[id(call)] = call, weight
        return found[1]

    def _run(self, value: ComputedTensor, kind: Kind) -> memoryview:
        import numpy as np

        call = value.computation
        if isinstance(kind.op, ValueOp):
            array = np.empty(kind.spec.shape, carrier(kind.spec.dtype))
            self.compute(self.workspace(), value, kind, _all(kind.spec), array)
            packed = [pack(array, kind.spec.dtype)]
            self._keep(call, {value.output: packed[0]})
            return packed[0]
        arrays = [self.array(t) for t in call.inputs]
        made = kind.op.eager(
            call.op_call.args, arrays, call.parts, [t.spec.dtype for t in call.inputs]
        )
        specs = kind.op.infer(call.op_call.args, [t.spec for t in call.inputs], call.parts)
        plain = [call.inputs[0].spec.dtype] * len(made)
        dtypes = plain if specs is None else [s.dtype for s in specs]
        packed = [pack(array, dtype) for array, dtype in zip(made, dtypes, strict=True)]
        self._keep(call, dict(enumerate(packed)))
        self._spend(call)
        return packed[value.output]

    def workspace(self) -> Workspace:
        """The calling thread's memory for computing."""
        found = self._own.get(thread := threading.get_ident())
        if found is None:
            found = self._own[thread] = Workspace(self, self._device.lane())
        return found

    def gather(self, memory: memoryview) -> Gather:
        """What fills `memory` with the packed bytes of input boxes."""
        return Gather(self._source, self._layouts, memory, self.leaf, 2 * STAGE_MAX)

    def compute(
        self,
        workspace: Workspace,
        value: ComputedTensor,
        kind: Kind,
        box: Box,
        out: np.ndarray[Any, Any],
    ) -> None:
        """Fills `out` with a box that lies on the op's grain, in parts that fit the memory."""
        with self._alone(value.computation, kind.least):
            part = box
            try:
                for part in kind.cuts(box, self.limit) if kind.regional else (box,):
                    self._part(workspace, value, kind, part, out[within(box, part)])
                workspace.settle()
            except _SHORT as error:
                self._short(error, value, kind, part)
                raise

    def turns(self, value: ComputedTensor, kind: Kind) -> bool:
        """Whether boxes of this value are computed where their columns are contiguous."""
        # what is measured, and another device, take contiguous arrays
        if value.computation.lossy or self.workspace().lane is not None or not kind.regional:
            return False
        return bool(kind.op.turns(kind.args, kind.specs, kind.output))

    def into(self, value: ComputedTensor, kind: Kind, box: Box, buffer: memoryview) -> None:
        """Fills `buffer` with the packed bytes of `box`, which are contiguous in it."""
        import numpy as np

        workspace = self.workspace()
        if kind.unit[0] > 1:
            buffer[:] = self.packed(value, kind, box)[0]
            return
        out = np.frombuffer(buffer, carrier(kind.spec.dtype)).reshape([b - a for a, b in box])
        with self._alone(value.computation, kind.least):
            part = box
            try:
                for part in kind.cuts(box, self.limit):
                    place = out[within(box, part)]
                    if kind.rounded(part) == part and not workspace.has(value, part):
                        self._part(workspace, value, kind, part, place)
                    else:
                        # the next read goes on in the same rows
                        chunk = workspace.chunk(value, kind, kind.widened(part, self.widest))
                        place[...] = chunk.array[within(chunk.box, part)]
                workspace.settle()
            except _SHORT as error:
                self._short(error, value, kind, part)
                raise

    def packed(self, value: ComputedTensor, kind: Kind, box: Box) -> tuple[memoryview, Box]:
        """The packed bytes of a box around `box`, and that box; valid until it computes again."""
        try:
            chunk = self.workspace().chunk(value, kind, box)
            if kind.unit[0] == 1:
                return chunk.memory.data, chunk.box
            return pack(chunk.array[within(chunk.box, box)], kind.spec.dtype), box
        except _SHORT as error:
            self._short(error, value, kind, box)
            raise

    def _part(
        self,
        workspace: Workspace,
        value: ComputedTensor,
        kind: Kind,
        box: Box,
        place: np.ndarray[Any, Any],
    ) -> None:
        """Computes one box, of a size that fits the memory, into `place`."""
        call = value.computation
        on_device = workspace.lane is not None and self._device.takes(kind.op, place.dtype)
        memo = {} if on_device else self._memo(call, kind)
        if kind.surveyed:
            memo["survey"] = self._survey(workspace, call, kind)
        if (
            memo
            and place.flags.c_contiguous
            and kind.op.recall(kind.args, kind.specs, kind.output, box, place, **memo)
        ):
            return
        needed = kind.needs(box, memo.get("survey"))
        arrays = [*map(workspace.input, count(), call.inputs, needed, kind.packed)]
        if self._watch is not None:
            self._watch(call, needed, arrays)
        boxes = self._ledger.claim(value, box) if self._ledger is not None and call.lossy else []
        meter = (
            self._ledger.meter(value, box) if self._ledger is not None and boxes == [box] else None
        )

        def run(given: list[Any], out: Any) -> None:
            try:
                kind.op.compute(kind.args, given, kind.specs, kind.output, box, out, meter, **memo)
            except OpError as error:
                self._refused(call, error)

        if on_device and workspace.lane is not None:
            workspace.lane.submit(arrays, run, place)
        elif place.flags.aligned and (place.flags.c_contiguous or is_turned(place)):
            run(arrays, place)
        else:
            memory = scratch(f"region {workspace.depth}", place.nbytes)
            made = memory.view(place.dtype).reshape(place.shape)
            run(arrays, made)
            place[...] = made
        if self._ledger is not None and meter is None:
            for part in boxes:
                self._measure(workspace, value, kind, part, self._ledger.meter(value, part), memo)

    def _refused(self, call: Computation, error: OpError) -> NoReturn:
        message = f"{self._said(call)}: {error.message}"
        fail(error.code, message, notes=error.notes, help=error.help)

    def survey(self, value: ComputedTensor) -> Any:
        """What the op of a surveyed value has to know of all numbers of its first input."""
        return self._survey(self.workspace(), value.computation, self.kind(value))

    def surveys(self) -> Surveys:
        """What was found in surveys."""
        with self._lock:
            self._surveys = self._surveys or Surveys()
        return self._surveys

    def _survey(self, workspace: Workspace, call: Computation, kind: Kind) -> Any:
        try:
            return self.surveys().of(
                call, kind, lambda box: workspace.input(0, call.inputs[0], box, False)
            )
        except OpError as error:
            self._refused(call, error)

    def _measure(
        self,
        workspace: Workspace,
        value: ComputedTensor,
        kind: Kind,
        box: Box,
        meter: Meter,
        memo: dict[str, Any],
    ) -> None:
        """Computes a part of a box again, for its error only: the rest was measured before."""
        import numpy as np

        workspace.settle()
        call = value.computation
        arrays = [*map(workspace.input, count(), call.inputs, kind.needs(box), kind.packed)]
        made = np.empty([b - a for a, b in box], carrier(kind.spec.dtype))
        kind.op.compute(kind.args, arrays, kind.specs, kind.output, box, made, meter, **memo)

    def _memo(self, call: Computation, kind: Kind) -> dict[str, Any]:
        """The argument `memo` for a call's op; none if it is not used, or memory is short."""
        nbytes = kind.op.remembers(kind.args, kind.specs)
        if not nbytes:
            return {}
        with self._lock:
            found = self._memos.get(id(call))
            if found is None:
                if id(call) in self._spent or self._remembered + nbytes > self.budget // MEMOS:
                    return {}
                found = self._memos[id(call)] = call, {}, nbytes
                self._remembered += nbytes
        return {"memo": found[1]}

    def share_memos(self, values: Iterable[ComputedTensor]) -> None:
        """Lays what calls of these values remember where forked processes share it, if it fits."""
        calls = ((v.computation, self.kind(v)) for v in values)
        self._memos = shared_memos(calls, self.budget // MEMOS)
        self._remembered = sum(n for *_, n in self._memos.values())

    def fill(self, gather: Gather, tensor: Tensor, box: Box) -> bool:
        """Fills the gatherer's buffer with a box; False if elements that share bytes separate."""
        spec = tensor.spec
        (elements, size), sizes = unit(spec.dtype), [b - a for a, b in box]
        nbytes = (prod(sizes) * BITS[spec.dtype] + 7) // 8
        if not nbytes:
            return True
        span = linear(spec.shape, box)
        if span is not None and span[0] % elements == 0:
            layout = self._layouts.of(tensor.view, spec.dtype, spec.nbytes)
            first = span[0] // elements * size
            if not layout.loose:
                step = nbytes if layout.whole else layout.step
                for at in range(0, nbytes, step):
                    gather.fill(tensor, first + at, first + min(nbytes, at + step), at)
                return True
        try:
            _, layout = self._layouts.part(tensor.view, spec.dtype, box)
        except views.TooManyPieces:
            if elements > 1:
                return False
            self._rows(gather, tensor, box)
            return True
        if layout.loose:
            return False
        for at in range(0, nbytes, layout.step):
            gather.fill(tensor, at, min(nbytes, at + layout.step), at, layout)
        return True

    def _rows(self, gather: Gather, tensor: Tensor, box: Box) -> None:
        """`fill`, one contiguous part after the other."""
        spec, at = tensor.spec, 0
        inner = next(i for i in range(len(box) + 1) if linear(spec.shape[i:], box[i:]) is not None)
        for index in product(*(range(a, b) for a, b in box[:inner])):
            span = linear(spec.shape, (*((i, i + 1) for i in index), *box[inner:])) or (0, 0)
            size = BITS[spec.dtype] // 8
            gather.fill(tensor, span[0] * size, span[1] * size, at)
            at += (span[1] - span[0]) * size

    def read(self, tensor: Tensor, box: Box) -> np.ndarray[Any, Any]:
        """The raw elements of a box of any tensor of a graph."""
        spec = Spec(tensor.spec.dtype, tuple(b - a for a, b in box))
        memory = memoryview(bytearray(spec.nbytes))
        return (
            unpack(memory, spec)
            if self.fill(self.gather(memory), tensor, box)
            else self.loose(tensor, box)
        )

    def array(self, tensor: Tensor) -> np.ndarray[Any, Any]:
        """The raw elements of a tensor, gathered whole."""
        return self.read(tensor, _all(tensor.spec))

    def loose(self, tensor: Tensor, box: Box) -> np.ndarray[Any, Any]:
        """The elements of a box of a tensor below a byte, one element a byte."""
        try:
            part = self._layouts.box(tensor.view, box)
        except views.TooManyPieces:
            found: np.ndarray[Any, Any] = self._loose(tensor)[within(_all(tensor.spec), box)]
            return found
        return self._loose(Tensor(Spec(tensor.spec.dtype, part.shape), part, tensor.sources))

    def _loose(self, tensor: Tensor) -> np.ndarray[Any, Any]:
        """The elements of a tensor below a byte, piece by piece, one element a byte."""
        import numpy as np

        out = np.zeros(tensor.spec.numel, "u1")
        bits = BITS[tensor.spec.dtype]
        for piece in tensor.view.pieces:
            place: np.ndarray[Any, Any] = np.ndarray(
                piece.counts, "u1", out.data, piece.dst, piece.dst_strides
            )
            if isinstance(piece.leaf, views.Fill):
                place[...] = encode(tensor.spec.dtype, piece.leaf.value)[0] & ((1 << bits) - 1)
                continue
            far = [(n - 1) * s for n, s in zip(piece.counts, piece.src_strides, strict=True)]
            low = piece.src + sum(min(0, x) for x in far)
            high = piece.src + sum(max(0, x) for x in far) + 1
            first = low * bits // 8 // 3 * 3
            packed = bytearray((high * bits + 7) // 8 - first)
            source = tensor.sources[piece.leaf]
            leaf = (
                stored_reader(self._source, source)
                if not isinstance(source, ComputedTensor)
                else self.leaf(source)
            )
            leaf.read(first, memoryview(packed))
            # bytes in threes hold whole elements of 4 and of 6 bits
            base = first * 8 // bits
            codes = unpack(packed, Spec(tensor.spec.dtype, (len(packed) * 8 // bits,)))
            place[...] = np.ndarray(
                piece.counts,
                "u1",
                np.ascontiguousarray(codes).data,
                piece.src - base,
                piece.src_strides,
            )
        return out.reshape(tensor.spec.shape)


def _all(spec: Spec) -> Box:
    return tuple((0, n) for n in spec.shape)


class ComputedReader(ByteReader):
    """The packed bytes of a computed tensor, none of which is there before it is read."""

    __slots__ = ("_kind", "_value", "_values")

    def __init__(self, values: Evaluator, value: ComputedTensor, kind: Kind) -> None:
        super().__init__(None, 0)
        self._values, self._value, self._kind = values, value, kind

    def read(self, offset: int, buffer: memoryview) -> None:
        """Fills `buffer` from byte `offset` of the packed tensor."""
        size = self._kind.unit[1]
        before, after = offset % size, -(offset + len(buffer)) % size
        # a fill may end within a group of elements that share bytes
        if before or after:
            wider = memoryview(bytearray(before + len(buffer) + after))
            self.read(offset - before, wider)
            buffer[:] = wider[before : before + len(buffer)]
            return
        at = 0
        for box in ranges(self._kind.shape, offset // size, (offset + len(buffer)) // size):
            nbytes = size_of(box) * size
            self._values.into(
                self._value, self._kind, self._elements(box), buffer[at : at + nbytes]
            )
            at += nbytes

    def move(self, move: Move, out: memoryview, base: int) -> bool:
        """Does one strided move of these bytes: computes its bounding box, and copies from that."""
        size = self._kind.unit[1]
        if any(x % size for x in (move.run, move.src, *(s for _, _, s in move.loops))):
            for a, b in move.runs():
                self.read(move.lo + a, out[base + b : base + b + move.run])
            return True
        loops = [loop for loop in move.loops if loop[0] > 1]
        if not loops:
            self.read(move.src, out[move.dst + base : move.dst + base + move.run])
            return True
        steps = [(n, s // size) for n, _, s in loops]
        found = footprint(self._kind.shape, move.src // size, [*steps, (move.run // size, 1)])
        box = self._elements(found.box)
        if self._turned(move, loops, box, out, base):
            return True
        if self._kind.cost(box) > self._values.limit:
            for half in halved(move):
                self.move(half, out, base)
            return True
        packed, outer = self._values.packed(self._value, self._kind, box)
        outer = self._units(outer)
        places = [w * size for w in strides_of([b - a for a, b in outer])]
        src = sum((i - a) * w for i, (a, _), w in zip(found.start, outer, places, strict=True))
        turned = tuple(
            (n, d, sum(i * w for i, w in zip(step, places, strict=True)))
            for (n, d, _), step in zip(loops, found.steps, strict=False)
        )
        copy_strided(out, move.dst + base, packed, src, move.run, turned)
        return True

    def _turned(
        self,
        move: Move,
        loops: Sequence[tuple[int, int, int]],
        box: Box,
        out: memoryview,
        base: int,
    ) -> bool:
        """Computes a matrix into `out`, where its columns are contiguous; False where the move is
        anything else, or the op does not do that.
        """
        import numpy as np

        kind, size = self._kind, self._kind.unit[1]
        sizes = tuple(b - a for a, b in box)
        if len(loops) != 2 or move.run != size or kind.unit[0] > 1 or len(box) < 2:
            return False
        (columns, apart, step), (rows, next_to, stride) = loops
        if (
            (rows, columns) != sizes[-2:]
            or prod(sizes) != rows * columns
            or (next_to, step) != (size, size)
            or stride != kind.shape[-1] * size
            or kind.rounded(box) != box
            or not self._values.turns(self._value, kind)
        ):
            return False
        places = (*(0 for _ in sizes[:-2]), size, apart)
        dtype, first = carrier(kind.spec.dtype), move.dst + base
        array: np.ndarray[Any, Any] = np.ndarray(sizes, dtype, out, first, places)
        self._values.compute(self._values.workspace(), self._value, kind, box, array)
        return True

    def scatter(self, offset: int, buffers: Sequence[memoryview], nbytes: int) -> None:
        for buffer in buffers:
            self.read(offset, buffer)
            offset += len(buffer)

    def _elements(self, box: Box) -> Box:
        per = self._kind.unit[0]
        return box if per == 1 else (*box[:-1], (box[-1][0] * per, box[-1][1] * per))

    def _units(self, box: Box) -> Box:
        per = self._kind.unit[0]
        return box if per == 1 else (*box[:-1], (box[-1][0] // per, box[-1][1] // per))


def reading_step(tensor: Tensor, layouts: ByteLayouts, values: Evaluator) -> int:
    """The length of the ranges that a tensor should be asked for: as its layout says, and of
    computed ones whole boxes on their op's grain, so that no two ranges compute the same block.
    """
    layout = layouts.of(tensor.view, tensor.spec.dtype, tensor.spec.nbytes)
    if (
        layout.loose
        or layout.windowed
        or not any(isinstance(s, ComputedTensor) for s in tensor.sources)
    ):
        return layout.step
    read = {
        n: values.kind(s) for n, s in enumerate(tensor.sources) if isinstance(s, ComputedTensor)
    }
    # `values` keeps the kinds, and its layouts are kept: no id is used again
    key = (id(layout), *[(n, id(kind)) for n, kind in read.items()])
    found = values.steps.get(key)
    if found is None:
        period = max(
            (
                _period(move, read[move.leaf])
                for move in layout.moves
                if move.leaf in read and read[move.leaf].regional
            ),
            default=1,
        )
        if period > GRAIN_MOST:
            values.overlapping, found = True, layout.step
        else:
            longest = BLOCKS if layout.whole and period > 1 else layout.step
            found = max(1, longest // period) * period
        values.steps[key] = found
    return found


def _period(move: Move, kind: Kind) -> int:
    """The bytes of a result after which a move begins a new row of the grain of what it reads."""
    shape, (elements, size) = kind.shape, kind.unit
    grain = (*kind.grain[:-1], kind.grain[-1] // elements)
    if move.loops:
        _, width, stride = move.loops[0]
        axes = [i for i, d in enumerate(coordinates(abs(stride) // size, shape)) if d]
        return width * grain[axes[0]] if len(axes) == 1 else width
    periods = []
    for axis, n in enumerate(shape):
        inner = prod(shape[axis + 1 :]) * size
        if axis == 0 or n % grain[axis] == 0:
            periods.append(min(grain[axis], n) * inner)
        if grain[axis] > 1:
            break
        periods.append(inner)
    return max((p for p in periods if p <= STAGE), default=min(periods))


def longest_step(tensors: Iterable[Tensor], layouts: ByteLayouts, values: Evaluator) -> int:
    """The longest `step` of these tensors; 1 if there are none."""
    kinds: dict[tuple[Any, ...], Tensor] = {}
    for tensor in tensors:
        of = [
            (n, id(values.kind(s)))
            for n, s in enumerate(tensor.sources)
            if isinstance(s, ComputedTensor)
        ]
        kinds.setdefault((id(tensor.view), tensor.spec.dtype, *of), tensor)
    return max((reading_step(t, layouts, values) for t in kinds.values()), default=1)


def divides(tensors: Iterable[Tensor], layouts: ByteLayouts, values: Evaluator) -> bool:
    """Whether processes that compute different ranges of these tensors, `reading_step` long, do
    nothing twice: nothing is computed whole and kept, nothing needs more than one share of the
    memory, and no two ranges need the same box.
    """
    todo, seen = list(tensors), set[int]()
    for tensor in todo:
        layout = layouts.of(tensor.view, tensor.spec.dtype, tensor.spec.nbytes)
        if layout.windowed or layout.loose:
            return False
    longest_step(todo, layouts, values)
    if values.overlapping:
        return False
    while todo:
        for value in todo.pop().sources:
            if isinstance(value, ComputedTensor) and id(value) not in seen:
                seen.add(id(value))
                kind = values.kind(value)
                if kind.least > values.share or (not kind.regional and value.spec.nbytes > FEW):
                    return False
                todo += value.computation.inputs
    return True
