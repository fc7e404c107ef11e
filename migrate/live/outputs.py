"""The tensors of a migration, made one at a time for whoever asks: as views of what is there, into
a tensor that exists, or new.

A piece of a view is a strided copy, and torch copies between two strided tensors on any devices. So
what lies in memory is moved piece by piece from tensor to tensor, with no bytes of ours between;
what is computed, or lies in files, is gathered.
"""

from __future__ import annotations

import threading
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from ..core import view as views
from ..core.spec import encode
from ..core.view import Fill
from ..formats import memory
from ..planning.graph import calls
from ..running import buffers
from ..running import checks as value_checks
from ..running.device import CPU, Device
from ..running.evaluator import MAX_MEMORY, Evaluator
from ..running.geometry import ByteLayouts
from .lazy import LazyTensor
from .migration import origin

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from ..core.spec import Spec
    from ..planning.graph import Tensor
    from ..running.error_statistics import Ledger
    from ..source.index import Source
    from .migration import Migration

# beyond so many pieces the calls cost more than gathering does
_MOST_PIECES = 4096
# bytes of an element -> an integer of torch that carries its bits unread
_CARRIERS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}


class Way(NamedTuple):
    """How an output is had from tensors in memory, if they are plain ones.

    `origin` is the source key whose tensor it is, untouched; `place` (leaf, offset, strides) says
    which torch view of a source it is; `moved`: strided copies make it.
    """

    origin: str | None
    place: tuple[int, int, tuple[int, ...]] | None
    moved: bool


class Outputs:
    """The outputs of a migration. `opened` answers with the source when something has to be read
    through it.

    `objects` are the caller's tensors by key where the source is a state dict. Nothing is read
    before `require` and the ways to get a tensor. Threads may share it.
    """

    def __init__(
        self,
        migration: Migration,
        opened: Callable[[], Source],
        objects: Mapping[str, Any] | None = None,
        *,
        max_memory: int = MAX_MEMORY,
        device: Device = CPU,
        ledger: Ledger | None = None,
    ) -> None:
        self.migration, self.graph = migration, migration.composition.graph
        self._opened, self._objects = opened, objects or {}
        self._max_memory, self._device, self._ledger = max_memory, device, ledger
        self._lock = threading.Lock()

    def __del__(self) -> None:
        # the caller's tensors go with whoever held the outputs, not when cycles are looked for
        if "engine" in self.__dict__:
            self.engine[2].forget()

    @property
    def specs(self) -> dict[str, Spec]:
        """What the outputs are, in their order."""
        return {key: tensor.spec for key, tensor in self.graph.outputs.items()}

    def require(self) -> None:
        """Raises what speaks against the run: conditions on values that do not hold (M4xx), memory
        that is too small (M919).
        """
        if calls(self.graph.outputs.values()):
            self.engine[2].require(self.graph.outputs.values())
        if self.graph.checks:
            value_checks.require_checks(self.graph.checks, self.engine[0], self._max_memory)

    def untouched(self, key: str) -> Any:
        """The caller's own object if the output is exactly that, under whichever key; None
        otherwise.
        """
        origin = self._way(key).origin
        return None if origin is None else self._objects.get(origin)

    def alias(self, key: str) -> Any:
        """The caller's own object, or a torch view of it that is the output; None where no view can
        be.
        """
        way = self._way(key)
        if way.origin is not None:
            return self._objects.get(way.origin)
        parts = self._parts(key) if way.place is not None else None
        if parts is None or way.place is None:
            return None
        leaf, offset, strides = way.place
        base, first = parts[leaf]
        return base.as_strided(self.graph.outputs[key].spec.shape, strides, first + offset)

    def make(self, key: str, device: Any = None) -> torch.Tensor:
        """A new tensor, row-major, on `device` (the CPU without one)."""
        import torch

        tensor = self.graph.outputs[key]
        parts = self._parts(key)
        if parts is not None and device is not None:
            made = torch.empty(tensor.spec.shape, dtype=torch_dtype(tensor.spec), device=device)
            _move(tensor, parts, made)
            return made
        tensors, memories = memory.allocate({key: tensor.spec})
        if parts is not None:
            _move(tensor, parts, tensors[key])
        else:
            self.gather(key, memories[key])
        return tensors[key] if device is None else tensors[key].to(device)

    def moves(self, key: str) -> bool:
        """Whether `move` can fill a plain dense tensor with this output."""
        return self._parts(key) is not None

    def move(self, key: str, target: torch.Tensor, part: Tensor | None = None) -> bool:
        """Fills a plain dense tensor from tensors in memory, piece by piece; False where that
        cannot be done.

        `part` is a view of the output, with its sources, of the target's shape. Elements are cast
        as `copy_` does.
        """
        parts = self._parts(key) if is_plain(target) and target.is_contiguous() else None
        if parts is None:
            return False
        _move(self.graph.outputs[key] if part is None else part, parts, target.detach())
        return True

    def into(self, key: str, target: torch.Tensor) -> bool:
        """Fills a plain dense tensor of the output's shape, without another one between; False
        where that cannot be done.

        Elements are cast as `copy_` does if the dtypes differ.
        """
        import torch

        if not is_plain(target) or not target.is_contiguous():
            return False
        tensor = self.graph.outputs[key]
        if self.move(key, target):
            return True
        if target.device.type != "cpu" or target.dtype != torch_dtype(tensor.spec):
            return False
        if target.numel():
            self.gather(key, memory.writable(target))
            torch.autograd.graph.increment_version(target)
        return True

    def read(self, key: str) -> dict[str, Any]:
        """The caller's objects that the elements of the output come from, by source key."""
        tensor = self.graph.outputs[key]
        tensors = [tensor, *(read for call in calls([tensor]) for read in call.inputs)]
        return {
            name: self._objects[name]
            for t in tensors
            for name in t.sources
            if isinstance(name, str) and name in self._objects
        }

    def probe(self, key: str) -> None:
        """Reads one source as the outputs will; raises what it raises."""
        source = self.engine[0]
        blob = source.blobs[source.index.tensors[key].blob]
        if blob.size:
            blob.readinto(blob.size - 1, memoryview(bytearray(1)))

    def stand_in(self, key: str) -> LazyTensor:
        """What stands for the output until somebody uses it."""

        def into(target: torch.Tensor) -> None:
            if not self.into(key, target):
                target.copy_(self.make(key))

        return LazyTensor(self.graph.outputs[key].spec, lambda: self.make(key), into)

    def gather(self, key: str, buffer: memoryview) -> None:
        """Fills the buffer with the output's packed bytes, row-major."""
        source, layouts, values = self.engine
        buffers.fill_buffer(
            self.graph.outputs[key], source, layouts, values, buffer, self._max_memory
        )

    @cached_property
    def engine(self) -> tuple[Source, ByteLayouts, Evaluator]:
        """What reads and computes the outputs: the opened source, the layouts of its views, its
        computed values.
        """
        with self._lock:
            layouts, source = ByteLayouts(), self._opened()
            outputs = self.graph.outputs.values()
            return (
                source,
                layouts,
                Evaluator(
                    source,
                    layouts,
                    outputs,
                    self._max_memory,
                    ledger=self._ledger,
                    device=self._device,
                ),
            )

    def _way(self, key: str) -> Way:
        found = self.migration.ways.get(key)
        if found is None:
            found = self.migration.ways[key] = _way(self.graph.outputs[key], self.migration)
        return found

    def _parts(self, key: str) -> list[tuple[Any, int]] | None:
        """For each source of the output a plain tensor and where it begins in its storage, in
        elements; None unless all are such.
        """
        if not self._objects or not self._way(key).moved:
            return None
        found = []
        for source in self.graph.outputs[key].sources:
            held: Any = self._objects.get(source) if isinstance(source, str) else None
            if not is_plain(held):
                return None
            found.append((held.detach(), held.storage_offset()))
        return found


def torch_dtype(spec: Spec) -> torch.dtype | None:
    """torch's dtype of this name; None where it has none, or holds its elements in pairs."""
    import torch

    found = getattr(torch, spec.dtype, None)
    return found if isinstance(found, torch.dtype) else None


def is_plain(value: Any) -> bool:
    """Whether a tensor is its bytes and nothing else, and they are there."""
    import torch

    return type(value) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) and not value.is_meta


def _way(tensor: Tensor, migration: Migration) -> Way:
    same = origin(tensor, migration.index)
    if same is not None:
        return Way(same, None, torch_dtype(tensor.spec) is not None)
    stored = [
        migration.index.tensors[key] if isinstance(key, str) else None for key in tensor.sources
    ]
    alike = torch_dtype(tensor.spec) is not None and all(
        at is not None and at.spec.dtype == tensor.spec.dtype for at in stored
    )
    # torch has no negative strides
    backwards = any(stride < 0 for piece in tensor.view.pieces for stride in piece[5])
    if not alike or backwards or len(tensor.view.pieces) > _MOST_PIECES:
        return Way(None, None, False)
    return Way(None, views.strided(tensor.view), True)


def _move(tensor: Tensor, parts: list[tuple[Any, int]], target: torch.Tensor) -> None:
    """Every piece of the tensor, copied into a contiguous target of its shape."""
    import torch

    carrier = None
    if all(part.dtype == target.dtype for part, _ in parts):
        carrier = getattr(torch, _CARRIERS.get(target.element_size(), ""), None)
    if carrier is not None:
        target = target.view(-1).view(carrier)
        parts = [(_storage(part).view(carrier), first) for part, first in parts]
    here = target.storage_offset()
    with torch.no_grad():
        for leaf, src, dst, counts, dst_strides, src_strides in tensor.view.pieces:
            place = target.as_strided(counts, dst_strides, here + dst)
            if isinstance(leaf, Fill):
                place.copy_(_filled(tensor.spec, leaf, carrier).expand(counts))
            else:
                part, first = parts[leaf]
                place.copy_(part.as_strided(counts, src_strides, first + src))


def _storage(part: Any) -> Any:
    """The whole storage of a tensor as elements of its dtype."""
    return part.as_strided((part.untyped_storage().nbytes() // part.element_size(),), (1,), 0)


def _filled(spec: Spec, leaf: Fill, carrier: torch.dtype | None) -> torch.Tensor:
    import torch

    made = torch.frombuffer(bytearray(encode(spec.dtype, leaf.value)), dtype=torch.uint8).view(
        torch_dtype(spec)
    )
    return (made if carrier is None else made.view(carrier)).reshape(())
