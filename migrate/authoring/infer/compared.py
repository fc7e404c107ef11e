"""Tensors of either side as they are compared: their raw elements, a stretch at a time.

What is between the file and the comparison is computed element by element, so that it can be
computed of a stretch as well. A tensor is read whole only where its elements do not lie in order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ... import ops
from ...core.errors import Report, option, printable
from ...core.spec import BITS, Spec, spec
from ...elements.raw import carrier
from ...running.eager import read_elements, read_stretch
from ...source.blobs import rows_of

if TYPE_CHECKING:
    import numpy as np

    from ...source.blobs import StoredTensor
    from ...source.index import Source

    Array = np.ndarray[Any, Any]
    OpTexts = Sequence[Mapping[str, Mapping[str, Any]]]

# bytes of a stretch: what several passes over it find in the cache
STRETCH = 1 << 20


@dataclass(frozen=True, slots=True)
class ComparedTensor:
    """A tensor of either side; `before` are ops that compute it element by element, of what it is
    in the file, to what `spec` says.
    """

    key: str
    spec: Spec
    source: Source
    before: OpTexts = ()

    @property
    def stored_spec(self) -> Spec:
        """What it is in the file."""
        return self.source.index.tensors[self.key].spec

    def read(self) -> Array:
        """All raw elements, in their shape."""
        return self._after(read_elements(self.source, self.key))

    def stretches(self, more: int = 0, multiple: int = 1) -> Iterator[tuple[int, int, Array]]:
        """(start, number, elements) of all stretches in order, whose numbers are multiples of
        `multiple` but for the last one. The array begins at `start`; behind its own elements up to
        `more` of those that follow stand. It is valid until the next one.
        """
        import numpy as np

        held = self.stored_spec
        size = held.numel
        if not _in_order(self.source.index.tensors[self.key]):
            flat = self.read().reshape(-1)
            step = -(-max(1, STRETCH // flat.itemsize) // multiple) * multiple
            for start in range(0, size, step):
                yield start, min(step, size - start), flat[start : start + step + more]
            return
        width = BITS[held.dtype] // 8
        step = -(-max(STRETCH // width, more // 2) // multiple) * multiple
        into: Array = np.empty(min(step + more, size), carrier(self.spec.dtype))
        packed = np.empty(into.size * width, "u1") if self.before else into.view("u1")
        there = 0
        for start in range(0, size, step):
            kept = there - start if start else 0
            if kept:
                into[:kept] = into[step : step + kept].copy()
            stop = min(size, start + step + more)
            if stop > start + kept:
                room = packed if self.before else packed[kept * width :]
                read = read_stretch(self.source, self.key, start + kept, stop, room)
                if self.before:
                    into[kept : stop - start] = self._after(read)
            there = stop
            yield start, min(step, size - start), into[: stop - start]

    def _after(self, array: Array) -> Array:
        return computed(self.before, array, self.stored_spec.dtype)[0] if self.before else array


def _in_order(stored: StoredTensor) -> bool:
    return BITS[stored.spec.dtype] >= 8 and rows_of(stored) is not None


def require_memory(sources: Sequence[Source], most: int) -> None:
    """M919 for tensors that have to be held whole and take more."""
    report = Report()
    for source in sources:
        for key, stored in source.index.tensors.items():
            nbytes = 2 * stored.spec.numel * max(1, BITS[stored.spec.dtype] // 8)
            if nbytes > most and not _in_order(stored):
                report.add(
                    "M919",
                    f"the elements of {printable(key)} do not lie in order; to read them takes "
                    f"{nbytes} bytes, the limit is {most}",
                    help=f"give {option('max_memory', nbytes)} or more",
                )
    report.check()


def computed(texts: OpTexts, array: Array, dtype: str) -> tuple[Array, str]:
    """Elements after ops that compute them one by one, and their dtype then."""
    held = dtype
    for text in texts:
        ((name, given),) = text.items()
        op = ops.get(name)
        args = op.Args(**arguments(given))
        made = op.infer(args, [spec(held, array.shape)])
        array = op.eager(args, [array], 1, [held])[0]
        held = made[0].dtype if made else held
    return array, held


def arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments as an op's Args have them."""
    return {
        "from_" if name == "from" else name: tuple(value) if isinstance(value, list) else value
        for name, value in given.items()
        if name != "only"
    }
