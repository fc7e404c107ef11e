"""What a request means for one state dict or opened checkpoint, and the tensors that come of it:
the caller's own, a view of it, written into memory that exists, or computed.

A training process loads the same keys and shapes again and again. What was worked out for them once
is kept, unless values had a part in it; it refers to no value of the state dict, or a module would
hold the whole of what was once loaded into it.

A piece of a view is a strided copy, and torch copies between two strided tensors on any devices. So
what lies in memory is moved piece by piece from tensor to tensor, with no bytes of ours between;
what is computed, or lies in files, is gathered.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from ..core import view as views
from ..core.errors import Report, listed
from ..core.view import Fill
from ..elements.codes import encode
from ..elements.raw import has_plain_bytes
from ..extra_state.states import States
from ..formats import memory
from ..planning.graph import ComputedTensor, computations
from ..planning.path import find_path
from ..planning.plan import losses_of, steps_of
from ..planning.request import with_permissions
from ..planning.stored import untouched_key
from ..running import checks as value_checks
from ..running.buffers import fill_buffer
from ..running.evaluator import Evaluator
from ..running.geometry import ByteLayouts
from ..running.prepare import compose_for, path_state_for, require_known, side_reader
from ..running.resources import CPU, MAX_MEMORY, Device
from ..running.stamp import Stamp
from ..source.blobs import chunks_of, key_of
from ..source.torn_tensors import REQUANTIZE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from ..core.errors import Diagnostic
    from ..core.spec import Spec
    from ..planning.compose import Composition
    from ..planning.graph import Tensor
    from ..planning.optimizer_states import OptimizerState
    from ..planning.path import MigrationPath
    from ..planning.request import Request
    from ..running.error_statistics import Ledger
    from ..source.index import Index, Source

# what a handle remembers: a few checkpoints take turns in a process at most
_MOST_KEPT = 4


@dataclass(frozen=True, slots=True)
class Migration:
    """One request, answered for one index.

    `names`: the name of a value other than a tensor -> its name before. `params` are those
    of the rules. `ways` fills with how each output is had, and belongs to the graph.
    """

    index: Index
    migration_path: MigrationPath
    composition: Composition
    names: Mapping[str, str]
    params: Mapping[str, Any]
    notes: Sequence[str]
    warnings: Sequence[Diagnostic]
    ways: dict[str, Way] = field(default_factory=dict)

    @property
    def moves(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.migration_path.steps)

    @property
    def changes(self) -> bool:
        """Whether anything comes out otherwise than it went in, be it a name."""
        outputs, index = self.composition.graph.outputs, self.index
        same = outputs.keys() == index.tensors.keys() and all(
            untouched_key(tensor, index.tensors) == key for key, tensor in outputs.items()
        )
        return not (
            same
            and all(name == was for name, was in self.names.items())
            and self.names.keys() == index.items.keys()
        )

    def with_outputs(self, more: Mapping[str, Tensor]) -> Migration:
        """The same with these outputs beside its own."""
        graph = self.composition.graph
        graph = replace(graph, outputs={**graph.outputs, **more})
        return replace(self, composition=replace(self.composition, graph=graph), ways={})

    @property
    def lasting(self) -> bool:
        """Whether equal keys, specs and strides mean the same again: no value decided anything."""
        return not any(bound.decided or bound.values for _, bound in self.composition.steps)

    def without_values(self) -> Migration:
        """The same for any state dict of these keys and specs: no value in it is known."""
        index = replace(self.index, items=dict.fromkeys(self.index.items))
        return replace(self, index=index, composition=replace(self.composition, items=None))

    def describe(self) -> dict[str, Any]:
        """What a run into files would have in its answer, as far as it applies."""
        return {
            "steps": steps_of(self.composition),
            "layouts": dict(self.migration_path.layouts),
            "params": dict(self.params),
            "losses": losses_of(self.composition),
            "notes": list(self.notes),
            "warnings": [d.to_json() for d in self.warnings],
        }


def prepare(
    source: Source,
    request: Request,
    stamp: Stamp | None = None,
    *,
    states: Sequence[OptimizerState] = (),
) -> Migration:
    """The migration asked for, or what speaks against it. Reads no tensor but what decides keys.
    The state of optimizers `states` follows its parameters.
    """
    return with_permissions(request, lambda asked: _prepared(source, asked, stamp, states))


def _prepared(
    source: Source, request: Request, stamp: Stamp | None, states: Sequence[OptimizerState]
) -> Migration:
    known = require_known(source, request)
    if REQUANTIZE in request.params:
        from ..running.encoding_anew import encodes_anew

        source = encodes_anew(source, request)
    migration_path = find_path(
        source.index, side_reader(source), stamp or Stamp(), request, states=States(source)
    )
    path_state = path_state_for(source, migration_path, False)
    composition = compose_for(
        source, migration_path, request, path_state, prove=False, states=states
    )
    report = Report()
    migration_path.check_output(composition.graph.outputs, path_state.sides.read_file, report)
    if getattr(source, "converted", None) and "lossy" not in request.allow:
        _refuse_conversions(composition.graph.outputs, source, report)
    report.check()
    index, values = source.index, composition.items
    names = values.names if values is not None else {}
    notes = [
        *(note for _, bound in composition.steps for note in bound.notes),
        *path_state.notes,
        *known,
        *migration_path.remarks,
    ]
    return Migration(
        index,
        migration_path,
        composition,
        names,
        path_state.params,
        notes,
        (*migration_path.warnings, *path_state.warnings),
    )


def _refuse_conversions(outputs: Mapping[str, Tensor], source: Source, report: Report) -> None:
    """M401 where rules need elements of a tensor whose class holds them in another format."""
    converted: frozenset[str] = getattr(source, "converted", frozenset())
    touched = [
        tensor for tensor in outputs.values() if untouched_key(tensor, source.index.tensors) is None
    ]
    touched += [read for call in computations(touched) for read in call.inputs]
    moved = dict.fromkeys(
        key
        for tensor in touched
        for source in tensor.sources
        if not isinstance(source, ComputedTensor) and (key := key_of(source)) in converted
    )
    if moved:
        report.add(
            "M401",
            f"rules need the elements of {listed(list(moved), 4)}, whose class holds them in a "
            "number format of its own",
            help='allow={"lossy"} has them dequantized; rules that only rename hand the objects '
            "on as they are",
            permit="lossy",
        )


class RecentMigrations:
    """The last migrations by what they were prepared for. Threads may share it."""

    def __init__(self) -> None:
        self._found: OrderedDict[Hashable, Any] = OrderedDict()

    def get(self, signature: Hashable, make: Callable[[], Migration]) -> Migration:
        """What was kept for the signature, else what `make` answers with, kept if it lasts."""
        found: Migration | None = self._found.get(signature)
        if found is None:
            found = make()
            if found.lasting:
                self._found[signature] = found = found.without_values()
                while len(self._found) > _MOST_KEPT:
                    self._found.popitem(last=False)
        return found

    def __deepcopy__(self, memo: Any) -> RecentMigrations:
        return RecentMigrations()

    def __reduce__(self) -> Any:
        return RecentMigrations, ()


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
    """The outputs of a migration, each as the caller's `own` object, as a `view` of it, as what is
    to `fill` memory that exists, or as a new tensor that is computed.

    `opened` answers with the source when something has to be read through it. `objects` are the
    caller's tensors by key where the source is a state dict. `sparing`: what is read for a part of
    an output keeps to what it needs. Nothing is read before `require` and the ways to get a tensor.
    Threads may share it.
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
        sparing: bool = False,
    ) -> None:
        self.migration, self.graph = migration, migration.composition.graph
        self._opened, self._objects = opened, objects or {}
        self._max_memory, self._device, self._ledger = max_memory, device, ledger
        self._sparing = sparing
        self._lock = threading.Lock()
        # whether one of them holds no bytes
        self.has_meta = any(getattr(one, "is_meta", False) for one in self._objects.values())

    def __del__(self) -> None:
        # the caller's tensors are freed with the outputs, not when cycles are collected
        if "engine" in self.__dict__:
            self.engine[2].forget()

    @property
    def specs(self) -> dict[str, Spec]:
        """What the outputs are, in their order."""
        return {key: tensor.spec for key, tensor in self.graph.outputs.items()}

    def require(self) -> None:
        """Raises what speaks against the run: failed conditions (M4xx), lack of memory (M919)."""
        if computations(self.graph.outputs.values()):
            self.engine[2].require(self.graph.outputs.values())
        if self.graph.checks:
            value_checks.require_checks(self.graph.checks, self.engine[0], self._max_memory)

    def own(self, key: str) -> Any:
        """The caller's own object if the output is exactly that, under any key; None otherwise."""
        origin = self._way(key).origin
        return None if origin is None else self._objects.get(origin)

    def view(self, key: str) -> Any:
        """The caller's own object, or a torch view of it that is the output; None if neither is."""
        way = self._way(key)
        if way.origin is not None:
            return self._objects.get(way.origin)
        parts = self._parts(key) if way.place is not None else None
        if parts is None or way.place is None:
            return None
        leaf, offset, strides = way.place
        base, first = parts[leaf]
        return base.as_strided(self.graph.outputs[key].spec.shape, strides, first + offset)

    def compute(self, key: str, device: Any = None) -> torch.Tensor:
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

    def can_move(self, key: str) -> bool:
        """Whether `move` can fill a plain dense tensor with this output."""
        return self._parts(key) is not None

    def move(self, key: str, target: torch.Tensor, part: Tensor | None = None) -> bool:
        """Fills a plain dense tensor from tensors in memory, piece by piece; False where that
        cannot be done.

        `part` is a view of the output, with its sources, of the target's shape. Elements are cast
        as `copy_` does.
        """
        parts = self._parts(key) if has_plain_bytes(target) and target.is_contiguous() else None
        if parts is None:
            return False
        _move(self.graph.outputs[key] if part is None else part, parts, target.detach())
        return True

    def fill(self, key: str, target: torch.Tensor) -> bool:
        """Fills a plain dense tensor of the output's shape, without another one between; False
        where that cannot be done.

        Elements are cast as `copy_` does if the dtypes differ.
        """
        import torch

        if not has_plain_bytes(target) or not target.is_contiguous():
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

    def list_sources(self, key: str) -> dict[str, Any]:
        """The caller's objects that the elements of the output come from, by source key."""
        tensor = self.graph.outputs[key]
        tensors = [tensor, *(read for call in computations([tensor]) for read in call.inputs)]
        return {
            name: self._objects[name]
            for t in tensors
            for name in t.sources
            if isinstance(name, str) and name in self._objects
        }

    def probe_source(self, key: str) -> None:
        """Reads one source as the outputs will; raises what it raises."""
        source = self.engine[0]
        for at in chunks_of(source.index.tensors[key]):
            blob = source.blobs[at.blob]
            if blob.size:
                blob.readinto(blob.size - 1, memoryview(bytearray(1)))

    def get(self, key: str) -> Any:
        """The caller's own object if the output is exactly that, else a new tensor."""
        own = self.own(key)
        return self.compute(key) if own is None else own

    def copy_into(self, key: str, target: Any) -> None:
        """Fills a tensor of any class on any device, as `copy_` does."""
        if not self.fill(key, target):
            target.copy_(self.get(key))

    def gather(self, key: str, buffer: memoryview) -> None:
        """Fills the buffer with the output's packed bytes, row-major."""
        source, layouts, values = self.engine
        fill_buffer(self.graph.outputs[key], source, layouts, values, buffer, self._max_memory)

    @cached_property
    def engine(self) -> tuple[Source, ByteLayouts, Evaluator]:
        """What reads and computes the outputs: the opened source, byte layouts, computed values."""
        with self._lock:
            layouts, source = ByteLayouts(self._sparing), self._opened()
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
        """For each source a plain tensor and its offset in its storage; None unless all are."""
        if not self._objects or not self._way(key).moved:
            return None
        found = []
        for source in self.graph.outputs[key].sources:
            held: Any = self._objects.get(source) if isinstance(source, str) else None
            if not has_plain_bytes(held):
                return None
            found.append((held.detach(), held.storage_offset()))
        return found


def torch_dtype(spec: Spec) -> torch.dtype | None:
    """torch's dtype of this name; None where it has none, or holds its elements in pairs."""
    import torch

    found = getattr(torch, spec.dtype, None)
    return found if isinstance(found, torch.dtype) else None


def _way(tensor: Tensor, migration: Migration) -> Way:
    same = untouched_key(tensor, migration.index.tensors)
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
