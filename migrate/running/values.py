"""Tensors that are computed: once, whole, in memory, and let go after their last use.

Arrays hold raw elements (unsigned integers, one byte each for elements below a byte), so no bit passes through a float
unless the op itself computes with floats.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from .. import ops
from ..core import view as views
from ..core.diagnostics import fail
from ..core.spec import BITS, Spec, encode
from ..ops._raw import carrier
from ..planning.graph import Tensor, Value
from .gather import WINDOW, Gather, stored
from .geometry import Layouts

if TYPE_CHECKING:
    import numpy as np

    from ..planning.graph import Call
    from ..source.index import Source

MAX_MEMORY = 1 << 30


def unpack(packed: Any, spec: Spec) -> np.ndarray[Any, Any]:
    """The raw elements of packed row-major bytes, in the tensor's shape. Below a byte the first element is in the low bits."""
    import numpy as np

    bits = BITS[spec.dtype]
    if bits >= 8:
        return np.frombuffer(packed, carrier(spec.dtype), spec.numel).reshape(spec.shape)
    stream = np.unpackbits(np.frombuffer(packed, "u1", spec.nbytes), bitorder="little")
    codes = stream[: spec.numel * bits].reshape(-1, bits)
    weights = (1 << np.arange(bits)).astype("u1")
    out: np.ndarray[Any, Any] = (codes * weights).sum(axis=1, dtype="u1")
    return out.reshape(spec.shape)


def pack(array: np.ndarray[Any, Any], dtype: str) -> memoryview:
    """The packed row-major bytes of raw elements of `dtype`."""
    import numpy as np

    bits = BITS[dtype]
    flat = np.ascontiguousarray(array).reshape(-1)
    if bits < 8:
        stream = (flat.astype("u1")[:, None] >> np.arange(bits, dtype="u1")) & 1
        flat = np.packbits(stream.reshape(-1).astype("u1"), bitorder="little")
    return flat.view("u1").data if flat.size else memoryview(b"")


class Values:
    """The computed tensors of a run. Threads may share it: one computes at a time.

    Values are kept until each of `outputs` that reads them is done, or until memory is needed for others; then they are
    computed again.
    """

    __slots__ = ("_kept", "_layouts", "_live", "_lock", "_source", "_uses", "max_memory")

    def __init__(self, source: Source, layouts: Layouts, outputs: Iterable[Tensor] = (), max_memory: int = MAX_MEMORY) -> None:
        self._source, self._layouts, self.max_memory = source, layouts, max_memory
        self._lock = threading.RLock()
        self._uses: dict[int, int] = {}
        self._kept: dict[int, tuple[Call, list[memoryview]]] = {}
        self._live = 0
        for tensor in outputs:
            self._count(tensor)

    def _count(self, tensor: Tensor) -> None:
        for value in tensor.sources:
            if not isinstance(value, str):
                first = id(value.call) not in self._uses
                self._uses[id(value.call)] = self._uses.get(id(value.call), 0) + 1
                for inner in value.call.inputs if first else ():
                    self._count(inner)

    def bytes(self, wanted: Value | Tensor) -> memoryview:
        """The packed bytes of a value, or of a whole tensor. RunError M919 if it does not fit under `max_memory`."""
        with self._lock:
            if not isinstance(wanted, Value):
                self._reserve(wanted.spec.nbytes, "a tensor of elements below a byte")
                return pack(self._loose(wanted), wanted.spec.dtype)
            kept = self._kept.get(id(wanted.call))
            if kept is None:
                kept = (wanted.call, self._run(wanted.call))
                self._kept[id(wanted.call)] = kept
                self._live += sum(len(b) for b in kept[1])
            return kept[1][wanted.output]

    def done(self, tensor: Tensor) -> None:
        """Counts down what `tensor` read, and frees what nobody will read again."""
        with self._lock:
            for value in tensor.sources:
                if not isinstance(value, str):
                    self._uses[id(value.call)] = self._uses.get(id(value.call), 1) - 1
                    if self._uses[id(value.call)] <= 0:
                        self._drop(id(value.call))

    def _drop(self, call: int) -> None:
        kept = self._kept.pop(call, None)
        if kept is not None:
            self._live -= sum(len(b) for b in kept[1])

    def array(self, tensor: Tensor) -> np.ndarray[Any, Any]:
        """The raw elements of a tensor, gathered whole."""
        layout = self._layouts.of(tensor.view, tensor.spec.dtype, tensor.spec.nbytes)
        if layout.loose:
            return self._loose(tensor)
        packed = bytearray(tensor.spec.nbytes)
        gather = Gather(self._source, self._layouts, memoryview(packed), self.bytes, min(WINDOW, self.max_memory // 4))
        for start in range(0, len(packed), layout.step):
            gather.fill(tensor, start, min(start + layout.step, len(packed)), start)
        return unpack(packed, tensor.spec)

    def _run(self, call: Call) -> list[memoryview]:
        name = call.step.op
        self._reserve(sum(t.spec.numel * max(8, BITS[t.spec.dtype]) // 8 for t in call.inputs), f"the input of `{name}`")
        arrays = [self.array(t) for t in call.inputs]
        made = ops.get(name).eager(call.step.args, arrays, call.parts, [t.spec.dtype for t in call.inputs])
        for tensor in call.inputs:
            self.done(tensor)
        specs = ops.get(name).infer(call.step.args, [t.spec for t in call.inputs], call.parts)
        dtypes = [s.dtype for s in specs] if specs is not None else [call.inputs[0].spec.dtype] * len(made)
        packed = [pack(a, d) for a, d in zip(made, dtypes, strict=True)]
        self._reserve(sum(len(p) for p in packed), f"the result of `{name}`")
        return packed

    def _reserve(self, nbytes: int, what: str) -> None:
        if nbytes > self.max_memory:
            fail(
                "M919",
                f"{what} takes {nbytes} bytes, the limit is {self.max_memory}",
                help=f"raise --max-memory to {nbytes} or more",
            )
        if self._live + nbytes > self.max_memory:
            for call in list(self._kept):
                self._drop(call)

    def _loose(self, tensor: Tensor) -> np.ndarray[Any, Any]:
        """The elements of a tensor below a byte, piece by piece, one element a byte."""
        import numpy as np

        out = np.zeros(tensor.spec.numel, "u1")
        bits = BITS[tensor.spec.dtype]
        for piece in tensor.view.pieces:
            place: np.ndarray[Any, Any] = np.ndarray(piece.counts, "u1", out.data, piece.dst, piece.dst_strides)
            if isinstance(piece.leaf, views.Fill):
                place[...] = encode(tensor.spec.dtype, piece.leaf.value)[0] & ((1 << bits) - 1)
                continue
            far = [(n - 1) * s for n, s in zip(piece.counts, piece.src_strides, strict=True)]
            low, high = piece.src + sum(min(0, x) for x in far), piece.src + sum(max(0, x) for x in far) + 1
            first = low * bits // 8 // 3 * 3
            packed = bytearray((high * bits + 7) // 8 - first)
            source = tensor.sources[piece.leaf]
            if isinstance(source, str):
                stored(self._source, source).read(first, memoryview(packed))
            else:
                packed[:] = self.bytes(source)[first : first + len(packed)]
            # bytes in threes hold whole elements of 4 and of 6 bits
            base = first * 8 // bits
            codes = unpack(packed, Spec(tensor.spec.dtype, (len(packed) * 8 // bits,)))
            place[...] = np.ndarray(piece.counts, "u1", np.ascontiguousarray(codes).data, piece.src - base, piece.src_strides)
        return out.reshape(tensor.spec.shape)
