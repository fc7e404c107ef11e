"""Outputs written into the tensors of a module, by a few threads, with an account of what is
written if it stops.

A tensor on the meta device gets memory when its turn comes and goes into the module when all is
filled, under all names that the one it replaces had. So a load that fails leaves such a module as
it was.

A large tensor is written in ranges, so that threads end together. What needs a whole tensor beside
the target, because the target's own class or strides decide how it is copied, is written one at a
time: the peak is one tensor.

Where a plain tensor lies on the CPU and has the output's dtype, its own memory is what bytes are
gathered into. Everything else goes chunk by chunk through a buffer: to a GPU, where the buffer is
pinned and one is read while the other one travels, and into another dtype. On the CPU the same
class runs without pinning and events: that is how its control flow is tested where there is no GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from ..core.errors import Diagnostic, MigrateError, Report, listed, plural, printable, raise_all
from ..core.spec import Spec
from ..core.view import TooManyPieces, region
from ..elements.raw import has_plain_bytes, is_dtensor
from ..formats.memory import writable
from ..planning.graph import ComputedTensor, Tensor
from ..running.evaluator import reading_step
from ..running.gather import WINDOW, Gather, Window
from ..running.geometry import ranges
from ..running.resources import run_together
from .migration import torch_dtype
from .module import spec_of
from .quantized import copy_alike
from .standins import shard_as

if TYPE_CHECKING:
    import torch

    from ..running.evaluator import Evaluator
    from ..running.geometry import ByteLayouts
    from ..source.index import Source
    from .migration import Outputs
    from .module import Slot


class Targets:
    """What a load writes to. Call order: `shaped`, `unfilled`, `check`, `open`s, `install`."""

    def __init__(self, module: torch.nn.Module, device: Any) -> None:
        """`device`: where tensors of the meta device are made; None: as the others, or the CPU."""
        import torch

        self._module, self._asked = module, device
        self._made: dict[int, Any] = {}
        self._here = {one.device for _, _, one in _tensors(module) if not one.is_meta}
        chosen = next(iter(self._here)) if len(self._here) == 1 else torch.device("cpu")
        self.device: torch.device = chosen if device is None else device

    def shaped(self, slots: Mapping[str, Slot], specs: Mapping[str, Spec]) -> dict[str, Slot]:
        """The slots with the shape of the output for each lazy parameter, which takes any."""
        import torch

        out = dict(slots)
        for key, slot in slots.items():
            made = specs.get(slot.plain)
            if (
                made is not None
                and slot.tensor is not None
                and torch.nn.parameter.is_lazy(slot.tensor)
            ):
                out[key] = slot._replace(
                    tensor=torch.empty(made.shape, dtype=slot.tensor.dtype, device="meta")
                )
        return out

    def unfilled(self) -> list[str]:
        """Tensors on the meta device that are in no state dict."""
        import torch

        kept = {
            id(one)
            for owner, name, one in _tensors(self._module)
            if name not in owner._non_persistent_buffers_set
        }
        return [
            name
            for name, one in self._module.named_buffers()
            if one.is_meta and id(one) not in kept and not torch.nn.parameter.is_lazy(one)
        ]

    def check(self, report: Report) -> None:
        """Adds M115 if `device` was named and the module has tensors elsewhere."""
        asked = self._asked
        other = [
            d
            for d in self._here
            if asked is not None and (d.type != asked.type or asked.index not in (None, d.index))
        ]
        if other:
            what = f"the module is on {listed([str(d) for d in other])}, and `device` says {asked}"
            report.add(
                "M115", what, help="leave `device` out: the tensors of a module stay where they are"
            )
        hollow = [
            name
            for name, one in self._module.named_parameters()
            if not one.is_meta and any(t.is_meta for t in _inner(one))
        ]
        if hollow:
            what = (
                f"{listed(hollow)} say that they are on a real device, and keep their numbers "
                "in tensors on the meta device"
            )
            report.add(
                "M963",
                what,
                help="build the module on a real device: their class would take what is loaded "
                "and hold nothing",
            )

    def open(self, slot: Slot) -> torch.Tensor:
        """The tensor that is written for the slot: its own, or the one that will replace it."""
        return self.real(slot.tensor)

    def real(self, one: Any) -> torch.Tensor:
        """The tensor itself, or what will replace it if it is on the meta device."""
        import torch

        if torch.nn.parameter.is_lazy(one) or not one.is_meta:
            return one
        if id(one) not in self._made:
            self._made[id(one)] = _like(one, self.device)
        found: torch.Tensor = self._made[id(one)]
        return found

    def replace(self, whole: Any, view: Any) -> None:
        """What was made for a view replaces the tensor that it is a view of."""
        if id(view) in self._made:
            self._made[id(whole)] = self._made[id(view)].view(whole.shape)

    def materialise(self, slot: Slot, shape: tuple[int, ...]) -> None:
        """Gives a lazy parameter its shape."""
        import torch

        if torch.nn.parameter.is_lazy(slot.tensor):
            slot.tensor.materialize(shape, device=self.device if slot.tensor.is_meta else None)

    def changes(self, slot: Slot) -> bool:
        """Whether writing to the slot changes the module at once."""
        return id(slot.tensor) not in self._made

    def install(self) -> None:
        """Puts the tensors that were made into the module, under all names."""
        for owner, name, one in list(_tensors(self._module)) if self._made else ():
            made: Any = self._made.get(id(one))
            if made is None and one.is_meta:
                made = self._made[id(one)] = self._rebuilt(one)
            if made is not None:
                (owner._parameters if name in owner._parameters else owner._buffers)[name] = made

    def _rebuilt(self, one: Any) -> Any:
        """A tensor whose components were made, of these; None for any other. The component of a
        DTensor is the part that is here, which may be made of components itself.
        """
        import torch

        flatten = getattr(one, "__tensor_flatten__", None)
        names, context = ((), None) if flatten is None else flatten()
        parts = {name: getattr(one, name) for name in names}
        inner = {name: part for name, part in parts.items() if isinstance(part, torch.Tensor)}
        found = {name: self._made.get(id(part)) for name, part in inner.items()}
        found = {n: self._rebuilt(inner[n]) if made is None else made for n, made in found.items()}
        if all(made is None for made in found.values()):
            return None
        # what nothing was read for is stale
        parts |= {n: self.real(inner[n]) if made is None else made for n, made in found.items()}
        made = type(one).__tensor_unflatten__(parts, context, one.size(), one.stride())
        is_parameter = isinstance(one, torch.nn.Parameter)
        return torch.nn.Parameter(made, one.requires_grad) if is_parameter else made

    def left(self) -> list[str]:
        """What is on the meta device still."""
        both = (*self._module.named_parameters(), *self._module.named_buffers())
        return [name for name, one in both if one.is_meta]


def _tensors(module: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str, torch.Tensor]]:
    for owner in module.modules():
        for table in (owner._parameters, owner._buffers):
            yield from ((owner, name, one) for name, one in table.items() if one is not None)


def _inner(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that a tensor of a class of its own is made of."""
    import torch

    return [one for one in vars(tensor).values() if isinstance(one, torch.Tensor)]


def _like(held: Any, device: torch.device) -> torch.Tensor:
    """A tensor without contents of the same class, dtype, strides and flags, on the device."""
    import torch

    made: Any = torch.empty_like(held, device=device, requires_grad=False)
    if type(held) in (torch.nn.Parameter, torch.nn.Buffer):
        made = (
            torch.nn.Parameter(made, held.requires_grad)
            if type(held) is torch.nn.Parameter
            else torch.nn.Buffer(made)
        )
    elif type(made) is not type(held):
        made = made.as_subclass(type(held))
    elif isinstance(held, torch.nn.Parameter):
        # a class that holds tensors of its own is one already, and has to be marked as a
        # parameter
        return torch.nn.Parameter(made, held.requires_grad)
    if type(made) is type(held) and type(held) is not torch.Tensor:
        made.__dict__.update(vars(held))
    return made.requires_grad_(held.requires_grad)


def local(target: torch.Tensor, tensor: Tensor) -> tuple[torch.Tensor, Tensor] | None:
    """The part of a DTensor that is here, and that part of the output; None if it is not a box.

    torch.distributed.checkpoint asks a DTensor for the same box.
    """
    from torch.distributed.tensor import DTensor

    if not isinstance(target, DTensor) or any(p.is_partial() for p in target.placements):
        return None
    chunks = target.__create_chunk_list__()
    here = target._local_tensor
    if len(chunks) != 1 or tuple(here.shape) != tuple(chunks[0].sizes):
        return None
    shape = tuple(chunks[0].sizes)
    box = tuple((at, at + size) for at, size in zip(chunks[0].offsets, shape, strict=True))
    if 0 in shape:
        box = tuple((0, size) for size in shape)
    return here, Tensor(Spec(tensor.spec.dtype, shape), region(tensor.view, box), tensor.sources)


def alike(value: Any, target: Any) -> bool:
    """Whether both are DTensors whose parts lie in the same processes."""
    if not (is_dtensor(value) and is_dtensor(target)):
        return False
    return bool(value.placements == target.placements and value.device_mesh == target.device_mesh)


# bytes that travel to a GPU at once; on the CPU a fill stays in the cache
AT_ONCE = 16 << 20


def direct(tensor: Tensor, target: torch.Tensor) -> bool:
    """Whether a plain, contiguous target can be gathered into: on the CPU, of the output's spec."""
    return target.device.type == "cpu" and spec_of(target) == tensor.spec


def places(target: torch.Tensor, start: int, stop: int) -> list[torch.Tensor]:
    """Elements `start` to `stop` of the target, in row-major order, as views of it."""
    if target.is_contiguous():
        return [target.view(-1)[start:stop]]
    return [target[tuple(slice(a, b) for a, b in box)] for box in ranges(target.shape, start, stop)]


class Upload:
    """One thread's buffers. Call order: `write` for ranges of outputs, `drain` before reading."""

    def __init__(
        self, source: Source, layouts: ByteLayouts, values: Evaluator, window: int
    ) -> None:
        """`window`: bytes of a source that may be held at a time for a transpose."""
        self._source, self._layouts, self._values, self._window = source, layouts, values, window
        self._stages = (_Stage(), _Stage())
        self._read_window = Window()
        self._next = 0

    def step(self, tensor: Tensor) -> int:
        """A range of the tensor should be a multiple of so many bytes; 0: it is written whole."""
        layout = self._layouts.of(tensor.view, tensor.spec.dtype, tensor.spec.nbytes)
        whole = (
            layout.windowed
            or layout.loose
            or any(isinstance(source, ComputedTensor) for source in tensor.sources)
        )
        return 0 if whole else reading_step(tensor, self._layouts, self._values)

    def write(self, tensor: Tensor, target: torch.Tensor, start: int, stop: int) -> None:
        """Fills bytes `start` to `stop` of a plain target, in row-major order, cast as `copy_`
        casts.
        """
        step = reading_step(tensor, self._layouts, self._values)
        target = target.detach()
        if direct(tensor, target) and target.is_contiguous():
            gather = self._gather(writable(target.view(-1)))
            if self._long(tensor):
                step = max(1, stop - start)
            for first in range(start, stop, step):
                gather.fill(tensor, first, min(first + step, stop), first)
            return
        # what torch has no dtype for lies in a target of bytes
        dtype = torch_dtype(tensor.spec) or target.dtype
        size = dtype.itemsize
        chunk = step if target.device.type == "cpu" else max(1, AT_ONCE // step) * step
        for first in range(start, stop, chunk):
            last = min(first + chunk, stop)
            stage = self._turn(last - first, target.device)
            for at in range(first, last, step):
                stage.gather.fill(tensor, at, min(at + step, last), at - first)
            stage.send(last - first, dtype, places(target, first // size, last // size))
        for stage in self._stages:
            if stage.gather is not None:
                stage.gather.release()

    def drain(self) -> None:
        """Waits for all that was sent."""
        for stage in self._stages:
            stage.wait()

    def _long(self, tensor: Tensor) -> bool:
        """Whether the output is read in stretches to its place, where small steps gain nothing."""
        layout = self._layouts.of(tensor.view, tensor.spec.dtype, tensor.spec.nbytes)
        stored = not layout.loose and not any(
            isinstance(source, ComputedTensor) for source in tensor.sources
        )
        return stored and not any(move.loops for move in layout.moves)

    def _turn(self, nbytes: int, device: torch.device) -> Any:
        stage = self._stages[self._next]
        self._next = 1 - self._next
        stage.wait()
        memory = stage.room(nbytes, device)
        if memory is not None:
            stage.gather = self._gather(memory)
        return stage

    def _gather(self, memory: memoryview) -> Gather:
        return Gather(
            self._source, self._layouts, memory, self._values.leaf, self._window, self._read_window
        )


class _Stage:
    """A buffer on the host, what gathers into it, and its copy on the device if casts need one."""

    __slots__ = ("_there", "gather", "host", "sent")

    def __init__(self) -> None:
        self.host: Any = None
        self.gather: Any = None
        self.sent: Any = None
        self._there: Any = None

    def room(self, nbytes: int, device: torch.device) -> memoryview | None:
        """New memory if the buffer does not hold so many bytes for this device; None if it does."""
        import torch

        pinned = device.type == "cuda"
        if (
            self.host is not None
            and len(self.host) >= nbytes
            and (self.host.is_pinned() or not pinned)
        ):
            return None
        self.host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
        return memoryview(self.host.numpy())

    def send(self, nbytes: int, dtype: Any, places: Sequence[torch.Tensor]) -> None:
        """Copies what was gathered into its places, one after the other; on a GPU it returns before
        that is done.
        """
        import torch

        made, device = self.host[:nbytes], places[0].device
        if device.type != "cpu" and places[0].dtype != dtype:
            # elements are cast on the device: on the host a cast would need a third buffer
            if self._there is None or self._there.device != device or len(self._there) < nbytes:
                self._there = torch.empty(len(self.host), dtype=torch.uint8, device=device)
            self._there[:nbytes].copy_(made, non_blocking=True)
            made = self._there[:nbytes]
        made, at = made.view(dtype), 0
        for place in places:
            part = made[at : at + place.numel()].view(place.shape)
            place.copy_(part, non_blocking=True)
            at += place.numel()
        if device.type == "cuda":
            self.sent = torch.cuda.Event()
            self.sent.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        """Returns when the buffer may be filled again."""
        if self.sent is not None:
            self.sent.synchronize()
            self.sent = None


# what a thread takes of a tensor at once
RANGE = 16 << 20


class FillJob(NamedTuple):
    """The output `key`, and where it goes."""

    key: str
    tensor: Tensor
    slot: Slot

    @property
    def part(self) -> Tensor:
        """What of the output is read in this process: of a DTensor the part that is here."""
        if is_dtensor(self.slot.tensor):
            with suppress(TooManyPieces):
                held = local(self.slot.tensor, self.tensor)
                return self.tensor if held is None else held[1]
        return self.tensor


class _Work:
    """A job that has begun: `tensor` goes to `target`, which may be the part of it that is here."""

    __slots__ = ("how", "job", "left", "target", "tensor")

    def __init__(self, job: FillJob, tensor: Tensor, target: torch.Tensor, how: str) -> None:
        self.job, self.tensor, self.target, self.how = job, tensor, target, how
        self.left = 1


class Filling:
    """One run. `progress` is called with the bytes done and in all."""

    def __init__(
        self,
        outputs: Outputs,
        targets: Targets,
        max_memory: int,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self._outputs, self._targets, self._progress = outputs, targets, progress
        self._window = min(WINDOW, max_memory // 4)
        self._lock, self._whole, self._stop = threading.Lock(), threading.Lock(), threading.Event()
        self._begun: list[_Work] = []
        self._failures: list[BaseException] = []
        self._done = self._total = 0

    def run(self, jobs: Sequence[FillJob], threads: int, finish: Callable[[], None]) -> int:
        """Writes all jobs, calls `finish`, returns the bytes written; M965 if anything stops it."""
        source, layouts, values = self._outputs.engine
        self._total = sum(job.tensor.spec.nbytes for job in jobs)
        uploads = [Upload(source, layouts, values, self._window // threads) for _ in range(threads)]
        tasks = self._tasks(jobs, uploads[0])
        try:
            run_together(lambda number: self._work(tasks, uploads[number]), threads, self._stop.set)
            if not self._failures:
                finish()
        except BaseException as error:  # noqa: BLE001 - whatever stops it, what is written has to be said
            self._failures.append(error)
        if self._failures:
            first = self._failures[0]
            try:
                self._fail(first)
            finally:
                # errors refer to frames, and these to the module, which a cycle would keep
                self._failures.clear()
                del first
        return sum(work.tensor.spec.nbytes for work in self._begun)

    def _work(self, tasks: Iterator[tuple[_Work, int, int]], upload: Upload) -> None:
        import torch

        try:
            with torch.no_grad():
                while not self._stop.is_set():
                    with self._lock:
                        task = next(tasks, None)
                    if task is None:
                        break
                    self._write(*task, upload)
                    with self._lock:
                        self._end(*task)
                upload.drain()
        except BaseException as error:  # noqa: BLE001 - whatever stops it, what is written has to be said
            self._failures.append(error)
            self._stop.set()

    def _tasks(self, jobs: Sequence[FillJob], upload: Upload) -> Iterator[tuple[_Work, int, int]]:
        for job in jobs:
            work = self._open(job)
            self._begun.append(work)
            nbytes = work.tensor.spec.nbytes
            # what other processes hold of it is none of this one's work
            self._done += job.tensor.spec.nbytes - nbytes
            step = upload.step(work.tensor) if work.how == "bytes" else 0
            size = max(1, RANGE // step) * step if step else max(1, nbytes)
            starts = range(0, max(1, nbytes), size)
            work.left = len(starts)
            for start in starts:
                yield work, start, min(start + size, nbytes)

    def _open(self, job: FillJob) -> _Work:
        """How the target is filled: "move" in memory, gathered "bytes", or "object" by `copy_`."""
        self._targets.materialise(job.slot, job.tensor.spec.shape)
        tensor, target = job.tensor, self._targets.open(job.slot)
        if alike(self._outputs.own(job.key), target):
            return _Work(job, tensor, target, "object")
        if is_dtensor(target):
            try:
                found = local(target, tensor)
            except TooManyPieces:
                found = None
            if found is None:
                return _Work(job, tensor, target, "object")
            target, tensor = found
        if not has_plain_bytes(target) or not target.is_contiguous():
            return _Work(job, tensor, target, "object")
        if self._outputs.can_move(job.key):
            return _Work(job, tensor, target, "move")
        known = direct(tensor, target) or (
            torch_dtype(tensor.spec) is not None and tensor.spec.dtype != "bool"
        )
        return _Work(job, tensor, target, "bytes" if known else "object")

    def _write(self, work: _Work, start: int, stop: int, upload: Upload) -> None:
        key, tensor, target = work.job.key, work.tensor, work.target
        if not tensor.spec.numel:
            return
        if work.how == "move":
            self._outputs.move(key, target, tensor)
        elif work.how == "bytes":
            upload.write(tensor, target, start, stop)
        else:
            with self._whole:
                self._copy(work, upload)

    def _copy(self, work: _Work, upload: Upload) -> None:
        """Fills a target by its own `copy_`, which is given the part of the output that it is."""
        target, tensor = work.target, work.tensor
        if tensor is self._outputs.graph.outputs[work.job.key]:
            value = self._outputs.get(work.job.key)
            if not copy_alike(value, target):
                target.copy_(shard_as(value, target))
            return
        import torch

        made = torch.empty(target.shape, dtype=torch_dtype(tensor.spec), device=target.device)
        upload.write(tensor, made, 0, tensor.spec.nbytes)
        upload.drain()
        target.copy_(made)

    def _end(self, work: _Work, start: int, stop: int) -> None:
        work.left -= 1
        if not work.left and work.how == "bytes":
            import torch

            # what was saved for a backward pass is another one now
            torch.autograd.graph.increment_version(work.job.slot.tensor)
            self._outputs.engine[2].done(work.tensor)
        self._done += stop - start
        if self._progress is not None:
            self._progress(self._done, self._total)

    def _fail(self, error: BaseException) -> None:
        """Raises M965, with the diagnostics of the cause if it has some; an interrupt stays one."""
        changed = [work for work in self._begun if self._targets.changes(work.job.slot)]
        done = [printable(work.job.slot.plain, 300) for work in changed if not work.left]
        partly = [printable(work.job.slot.plain, 300) for work in changed if work.left]
        why = (
            printable(f"{type(error).__name__}: {error}", 300)
            if not isinstance(error, MigrateError)
            else "see there"
        )
        message = "loading stopped, and nothing in the module was changed"
        if changed:
            are = "is" if len(done) == 1 else "are"
            message = (
                f"loading stopped: {plural(len(done), 'tensor')} of the module {are} "
                f"written, {len(partly)} in part"
            )
        notes = [f"the cause: {why}"] * (why != "see there")
        notes += [
            f"{what}: {', '.join(names)}"
            for what, names in (("written", done), ("written in part", partly))
            if names
        ]
        said = Diagnostic("M965", message, notes=tuple(notes), help="fix the cause and load again")
        try:
            if isinstance(error, KeyboardInterrupt):
                raise KeyboardInterrupt(said.render()) from error
            if not isinstance(error, Exception):
                raise error
            causes = error.diagnostics if isinstance(error, MigrateError) else ()
            try:
                raise_all([*causes, said])
            except MigrateError as both:
                raise both from error
        finally:
            # a frame that an error refers to must not refer to the error
            del error
