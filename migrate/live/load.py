"""A checkpoint, or another module, streamed into a live module: each tensor from where it lies to
where it shall be.

All that can be said against it is said before the first parameter changes: names, shapes, dtypes,
conditions on values, checksums, memory. Then outputs are written in the order in which their bytes
lie in the files, by a few threads, each into the memory that the parameter has. What is on the meta
device gets memory of its own, which is put into the module when all of it is filled.
"""

from __future__ import annotations

import argparse
import io
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from .. import formats
from ..core.errors import MigrateError, Report, fail, listed, option, plural, printable, raise_all
from ..core.out_of_memory import guarded
from ..core.templates import list_collapsed, rank_of
from ..core.types import PathLike, Progress
from ..elements.raw import has_plain_bytes, is_dtensor
from ..extra_state.states import States
from ..planning.graph import computations, stored_keys, stored_sources
from ..planning.lineages import known_lineages, layouts_of
from ..planning.request import OUTPUT_FORMATS, Request, make_request, path_text
from ..results import LoadReport
from ..running import checks
from ..running.ahead import reading_ahead
from ..running.checks import tensors_equal
from ..running.error_statistics import Ledger
from ..running.needed_bytes import NeededBytes
from ..running.prepare import side_reader, stamp_of
from ..running.resources import check_threads, memory_of
from ..running.resources import resolve_device as device_of
from ..source.blobs import ChunkedTensor, chunk_at, chunks_of
from ..source.index import FileSource, SideFile
from ..source.pickle.tree import (
    SCALARS,
    Array,
    Buffer,
    Constant,
    DictNode,
    ListNode,
    TensorRecord,
)
from . import module as modules
from .filling import Filling, FillJob, Targets, alike
from .lazy_opening import plan_lazily
from .migration import Outputs, prepare
from .module import Fit, fit
from .quantized import requantized, take_apart
from .training import alone

if TYPE_CHECKING:
    import torch

    from ..source.blobs import ChunkOf, Identity, Stored
    from ..source.index import Source
    from .lazy_opening import Lazily
    from .migration import Migration
    from .module import Slot
    from .quantized import QuantizedTarget

GATHER = (
    "gather the state dict first: `get_model_state_dict` of "
    "torch.distributed.checkpoint.state_dict with full_state_dict=True"
)


@guarded
def load(
    model: torch.nn.Module,
    path: PathLike | Mapping[str, Any],
    to: str | Iterable[str] = (),
    *,
    from_: str | Iterable[str] = (),
    rules: Iterable[PathLike] = (),
    params: Mapping[str, Any] | None = None,
    allow: Iterable[str] = (),
    at: str | None = None,
    strict: bool = True,
    device: Any = None,
    max_memory: int | str = "1GB",
    threads: int = 2,
    progress: Progress | None = None,
) -> LoadReport:
    """Stream a checkpoint, or a state dict, into a live module, migrated on the way.

    The checkpoint is migrated in whichever direction leads to `to`; without `to` and `rules` it is
    loaded as it is. Parameters keep their dtype: what holds every value is cast, what rounds needs
    `allow="lossy"`. If the checkpoint has no `config.json`, the module's `config` is used. Problems
    are raised before anything changes.

    Args:
        model: The module that is filled.
        path: A checkpoint, or a state dict.
        to: Layouts to reach, as `LINEAGE@LAYOUT`, one or several. Default: none; `rules` then
            determine what is done.
        from_: Layouts that the checkpoint is in. Default: none; read from its stamp, else detected
            from keys, shapes and `config.json`.
        rules: Rule files, applied as they are, or one folder of lineages that is searched first.
            Default: none.
        params: Values of the rules' params, by name. Default: none; they are read from the
            checkpoint.
        allow: Permissions, such as "lossy" or "drop". Default: none, so that whatever would lose
            something is refused.
        at: The dict of a nested checkpoint that rules work on, as a path such as
            `model.state_dict`. Default: found automatically.
        strict: Refuse names without a partner; False lists them in the report. Default: True.
        device: The device for tensors that are on the meta device. Default: None, that of the other
            tensors.
        max_memory: Bytes for tensors that are computed or transposed, also as text ("4GB").
            Default: 1 GB.
        threads: Tensors to read at the same time, 1 to 64. Default: 2.
        progress: Called with the bytes done so far and the bytes in total. Default: None.

    Returns:
        A `LoadReport`.

    Raises:
        MigrateError: What `plan` raises, M960, M961 and M963 if module and checkpoint do not fit,
            and M965, which lists what was written, if it stops in the middle.

    Example:
        >>> class Model(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.norm = torch.nn.LayerNorm(4, bias=False)
        >>> migrate.load(Model(), {"model.norm.weight": torch.ones(4)}, rules="rename.yaml").tensors
        1
    """
    request = live_request(to, from_, rules, params, allow, at)
    budget = memory_of(max_memory)
    check_threads(threads)

    def opened(lazily: Lazily | None) -> Source:
        if isinstance(path, Mapping):
            source: Source = modules.opened(_named(alone(path, request.at), model))
        else:
            source = formats.open(path_text("path", path), lazily=lazily, **request.opening)
        return _configured(source, model)

    return _loaded(model, opened, request, strict, device, budget, threads, progress)


@guarded
def convert_module(
    old: torch.nn.Module,
    new: torch.nn.Module,
    to: str | Iterable[str] = (),
    *,
    from_: str | Iterable[str] = (),
    rules: Iterable[PathLike] = (),
    params: Mapping[str, Any] | None = None,
    allow: Iterable[str] = (),
    strict: bool = True,
    device: Any = None,
    max_memory: int | str = "1GB",
    threads: int = 2,
    progress: Progress | None = None,
) -> LoadReport:
    """Move the state of one live module into another of a new layout, tensor by tensor.

    `old` is not changed.

    Args:
        old: The module that is read.
        new: The module that is filled.
        to: Layouts to reach, as `LINEAGE@LAYOUT`, one or several. Default: none; `rules` then
            determine what is done.
        from_: Layouts that the checkpoint is in. Default: none; read from its stamp, else detected
            from keys, shapes and `config.json`.
        rules: Rule files, applied as they are, or one folder of lineages that is searched first.
            Default: none.
        params: Values of the rules' params, by name. Default: none; they are read from the
            checkpoint.
        allow: Permissions, such as "lossy" or "drop". Default: none, so that whatever would lose
            something is refused.
        strict: Refuse names without a partner; False lists them in the report. Default: True.
        device: The device for tensors that are on the meta device. Default: None, that of the other
            tensors.
        max_memory: Bytes for tensors that are computed or transposed, also as text ("4GB").
            Default: 1 GB.
        threads: Tensors to write at the same time, 1 to 64. Default: 2.
        progress: Called with the bytes done so far and the bytes in total. Default: None.

    Returns:
        A `LoadReport`.

    Raises:
        MigrateError: What `load` raises, and M916 for a module on the meta device, which holds
            nothing.

    Example:
        >>> old, new = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        >>> migrate.convert_module(old, new).tensors
        2
    """
    for name, given in (("old", old), ("new", new)):
        if not modules.is_module(given):
            fail("M115", f"`{name}` must be a module, not a {printable(type(given).__qualname__)}")
    request = live_request(to, from_, rules, params, allow, None)
    budget = memory_of(max_memory)
    check_threads(threads)
    return _loaded(
        new, lambda _: modules.opened(old), request, strict, device, budget, threads, progress
    )


def _loaded(
    model: torch.nn.Module,
    open_source: Callable[[Lazily | None], Source],
    request: Request,
    strict: bool,
    device: Any,
    budget: int,
    threads: int,
    progress: Progress | None,
) -> LoadReport:
    """Loads what `open_source` opens."""

    def planned(source: Source) -> tuple[_Load, Fit]:
        return _fitted(model, source, request, strict, device, budget)

    source, (one, found) = plan_lazily(open_source, request, planned)
    with closing(source):
        if one.confirm(found, source):
            return one.run(found, threads, progress)
    with closing(open_source(None)) as source:
        one, found = planned(source)
        one.confirm(found, source)
        return one.run(found, threads, progress)


def _fitted(
    model: torch.nn.Module,
    source: Source,
    request: Request,
    strict: bool,
    device: Any,
    budget: int,
) -> tuple[_Load, Fit]:
    """The load, and what goes where; if nothing says a goal and M960 arises, its help names the
    goals that would fit.
    """
    try:
        one = _Load(model, source, request, strict, device, budget)
        return one, one.require_fit()
    except MigrateError as error:
        if request.to or request.rules or not any(d.code == "M960" for d in error.diagnostics):
            raise
        fits = [
            to
            for to in _goals(source)
            if _would_fit(
                model, source, replace(request, to=(to,), output_format=None), device, budget
            )
        ]
        if not fits:
            raise
        # not the error: a frame that an error refers to must not refer to the error
        found = error.diagnostics
    hint = f"as another layout it fits the module: {' or '.join(option('to', to) for to in fits)}"
    first = next(d for d in found if d.code == "M960")
    return raise_all([replace(d, help=hint) if d is first else d for d in found])


def _goals(source: Source) -> Iterator[str]:
    """The other layouts of the lineages that the checkpoint stands in."""
    stamp = stamp_of(source)[0]
    standing = {
        x["lineage"]: x["layout"]
        for x in layouts_of(source.index, side_reader(source), (), stamp.layouts, States(source))
    }
    for lineage in (one for name in standing for one in known_lineages((), name)):
        yield from (
            f"{lineage['name']}@{x['name']}"
            for x in lineage["layouts"]
            if x["name"] != standing[lineage["name"]]
        )


def _would_fit(
    model: torch.nn.Module, source: Source, request: Request, device: Any, budget: int
) -> bool:
    try:
        _Load(model, source, request, True, device, budget).require_fit()
    except MigrateError as error:
        # what is lost on the way is another question
        return all(d.permit for d in error.diagnostics)
    return True


def live_request(
    to: str | Iterable[str],
    from_: str | Iterable[str],
    rules: Iterable[PathLike],
    params: Mapping[str, Any] | None,
    allow: Iterable[str],
    at: str | None,
    output_format: str | None = None,
    chunks: int | None = None,
) -> Request:
    """The request, in either direction; without a goal it asks for the checkpoint as it is."""
    found = make_request(
        to,
        from_,
        rules,
        params,
        allow,
        backwards=None,
        at=at,
        output_format=output_format,
        chunks=chunks,
    )
    aimless = not (found.to or found.rules or found.from_ or output_format)
    return replace(found, output_format=OUTPUT_FORMATS[0]) if aimless else found


def _named(state: Mapping[str, Any], model: torch.nn.Module) -> Mapping[str, Any]:
    """The state dict by the names that rules know, which have no segments of wrappers."""
    if not modules.is_module(model):
        return state
    text = {key: value for key, value in state.items() if isinstance(key, str)}
    own = modules.unwrapped(
        text,
        parallel=not any(
            name.startswith("module.") for name in (s.plain for s in modules.slots(model).values())
        ),
    )
    if len(text) < len(state) or len(set(own.values())) < len(own):
        return state
    return {own[key]: value for key, value in state.items()}


def _configured(source: Source, model: torch.nn.Module) -> Source:
    """The source with the model's configuration, where it has none of its own."""
    sides = modules.sides(model) if modules.is_module(model) else {}
    sides = {
        path: content
        for path, content in sides.items()
        if path not in {f.path for f in source.index.side_files}
    }
    return _Configured(source, sides) if sides else source


class _Configured:
    """A source with more side files than lie beside it."""

    def __init__(self, source: Source, sides: Mapping[str, bytes]) -> None:
        self._source, self._sides = source, sides
        files = (
            *source.index.side_files,
            *(SideFile(path, len(content)) for path, content in sides.items()),
        )
        self.path, self.format = source.path, source.format
        self.blobs, self.history = source.blobs, source.history
        self.index = replace(source.index, side_files=files)
        self.values = getattr(source, "values", {})
        self.converted: frozenset[str] = getattr(source, "converted", frozenset())

    def side_file(self, path: str) -> bytes:
        return self._sides[path] if path in self._sides else self._source.side_file(path)

    def identities(self) -> Mapping[str, Identity] | None:
        return self._source.identities()

    def check_unchanged(self) -> None:
        self._source.check_unchanged()

    def confirm(self, places: Iterable[Stored]) -> bool:
        return not isinstance(self._source, FileSource) or self._source.confirm(places)

    def close(self) -> None:
        self._source.close()


class _Load:
    """One source on its way into one module."""

    def __init__(
        self,
        model: torch.nn.Module,
        source: Source,
        request: Request,
        strict: bool,
        device: Any,
        budget: int,
    ) -> None:
        if not modules.is_module(model):
            fail("M115", f"`model` must be a module, not a {printable(type(model).__qualname__)}")
        self.model, self.source, self.strict, self.budget = model, source, strict, budget
        where, compute = device_of(device)
        stamp, self.notes = stamp_of(source)
        self.migration = prepare(source, request, stamp)
        self.objects: Mapping[str, Any] = getattr(source, "values", {})
        modules.reshard(model)
        self.taken = take_apart(
            modules.slots(model), self.migration.composition.graph.outputs, source.index, request
        )
        if self.taken.decoded:
            self.migration = self.migration.with_outputs(self.taken.decoded)
        self.ledger = Ledger(self.migration.composition.graph.outputs)
        self.targets = Targets(model, where)
        compute = compute if device is not None else device_of(self.targets.device)[1]
        # a reference to this object would be a cycle, which keeps the module
        read = self._read_from = [source]
        self.outputs = Outputs(
            self.migration,
            lambda: read[0],
            self.objects,
            max_memory=budget,
            device=compute,
            ledger=self.ledger,
            # of most tensors other processes read the rest
            sparing=any(is_dtensor(slot.tensor) for slot in self.taken.slots.values()),
        )
        self.others = _others(self.migration, source)
        self.allow = request.allow
        self.slots = self.taken.slots

    def confirm(self, found: Fit, source: Source) -> bool:
        """Whether the chunks that are read here are what they were taken for. `source` is what is
        read from now on; planning may have had another view of it.
        """
        self.source = self._read_from[0] = source
        self.read = self._needed(self._jobs(found))
        if not isinstance(source, (FileSource, _Configured)):
            return True
        stored = source.index.tensors
        conditions = (t for check in self.outputs.graph.checks for t in check.tensors)
        read = {*self.read, *(at for tensor in conditions for at in stored_sources(tensor))}
        return source.confirm([chunk_at(stored, at) for at in read])

    def _needed(self, jobs: Iterable[FillJob]) -> dict[str | ChunkOf, int]:
        """What is read here, and the bytes of it: of the parts of a DTensor that are elsewhere
        nothing.
        """
        _, layouts, values = self.outputs.engine
        needed = NeededBytes(layouts, values.kind)
        for tensor in (job.part for job in jobs):
            needed.add(tensor, tuple((0, size) for size in tensor.spec.shape))
        return needed.stored

    def run(self, found: Fit, threads: int, progress: Progress | None) -> LoadReport:
        jobs = self._jobs(found)
        self._refuse_own(jobs)
        self._refuse_parts(jobs)
        self.outputs.require()
        graph = self.outputs.graph
        stored = self.source.index.tensors
        whole = [at for at, n in self.read.items() if n >= chunk_at(stored, at).spec.nbytes]
        checks.check_records(whole, self.source, {})
        values = {
            slot: self._value(name) for name, slot in found.places.items() if name in self.others
        }
        filling = Filling(self.outputs, self.targets, self.budget, progress)
        source, layouts, _ = self.outputs.engine
        read = ((one, 0, one.spec.nbytes) for one in (job.part for job in jobs))
        with reading_ahead(read, source, layouts, self.budget):
            written = filling.run(jobs, threads, self._finish(found, values))
        specs = self.outputs.specs
        said = self.migration.describe()
        notes = [*self.source.index.notes, *said["notes"], *self.notes, *found.notes]
        return LoadReport.of(
            source=self.source.path,
            format=self.source.format,
            steps=said["steps"],
            layouts=said["layouts"],
            params=said["params"],
            tensors=len(jobs),
            bytes_written=written,
            missing=[self.slots[key].plain for key in found.missing],
            unexpected=list(found.unexpected),
            left_on_meta=self.targets.left(),
            losses=said["losses"],
            notes=list(dict.fromkeys(notes)),
            warnings=said["warnings"],
            report=self.ledger.report(complete=True)
            if computations(graph.outputs[name] for name in specs)
            else None,
        )

    def require_fit(self) -> Fit:
        """What goes where; raises all that speaks against it."""
        taken = self.taken
        specs = {k: spec for k, spec in self.outputs.specs.items() if k not in taken.left}
        specs.update({key: part.spec for key, part in taken.cuts.items() if key in specs})
        slots = self.targets.shaped(self.slots, specs)
        found = fit(specs, self.others, slots, self.allow, requantizes=self._requantizes)
        report = Report()
        report.diagnostics += self.taken.problems
        notes, found = self._tied(found, report)
        report.diagnostics += found.problems
        left_over = found.left_over() if self.strict else None
        if left_over is not None:
            report.diagnostics.append(left_over)
        left = self.targets.unfilled()
        if left and self.strict:
            report.add(
                "M963",
                f"{plural(len(left), 'tensor')} of the module would stay on the meta device; no "
                f"checkpoint has them: {list_collapsed(left, 8)}",
                help="create what holds them on a real device first, or load with "
                "strict=False and do it afterwards",
            )
        self.targets.check(report)
        report.check()
        return replace(found, notes=(*notes, *self.taken.notes, *found.notes))

    def _requantizes(self, name: str, slot: Slot) -> QuantizedTarget | None:
        """The quantized parameter of the slot, if the output is not in its encoding."""
        return requantized(self.outputs.own(name), slot.tensor)

    def _tied(self, found: Fit, report: Report) -> tuple[list[str], Fit]:
        """A tied tensor needs one tensor of the checkpoint; M960 where several differ."""
        names: dict[Any, list[str]] = {}
        for name, key in found.places.items():
            names.setdefault(self._identity(key), []).append(name)
        filled = [key for key in found.missing if self._identity(key) in names]
        notes = []
        if filled:
            one = names[self._identity(filled[0])][0]
            more = f", and {len(filled) - 1} more" if len(filled) > 1 else ""
            notes.append(
                "one tensor under several names, of which the checkpoint has one: "
                f"{self.slots[filled[0]].plain} is {one}{more}"
            )
        places = dict(found.places)
        order = {key: number for number, key in enumerate(self.slots)}
        outputs = self.outputs.graph.outputs
        for several in names.values():
            if len(several) == 1:
                continue
            several.sort(key=lambda name: order[places[name]])
            *before, last = several
            made = [outputs.get(name) for name in several]
            same = all(
                a is not None
                and b is not None
                and a.spec == b.spec
                and tensors_equal(a, b, self.source)
                for a, b in pairwise(made)
            )
            if not same and last in outputs and self.strict:
                all_names = listed([printable(name) for name in several])
                what = (
                    f"the checkpoint has different tensors for {all_names}, which are one in "
                    "the module"
                )
                report.add(
                    "M960",
                    what,
                    help="build the module without this tie, or load with strict=False: the last "
                    "one counts",
                )
            elif not same:
                notes.append(
                    f"one tensor of the module, of which the last one counts: {listed(several)}"
                )
            for name in before:
                del places[name]
        missing = tuple(key for key in found.missing if key not in set(filled))
        return notes, replace(found, places=places, missing=missing)

    def _identity(self, key: str) -> Any:
        slot = self.slots[key]
        return id(slot.owner) if slot.tensor is None else ("tensor", id(slot.tensor))

    def _jobs(self, found: Fit) -> list[FillJob]:
        """Each output with its place, in the order of the bytes that it reads."""
        outputs = self.outputs.graph.outputs
        stored = self.migration.index.tensors
        wanted = [
            name
            for name in found.places
            if name in outputs and self.slots[found.places[name]].tensor is not None
        ]
        starts = {
            name: min(
                (
                    (at.blob, at.offset)
                    for key in stored_keys(outputs[name])
                    for at in chunks_of(stored[key])
                ),
                default=(0, 0),
            )
            for name in wanted
        }
        wanted.sort(key=starts.__getitem__)
        parts = {**outputs, **self.taken.cuts}
        return [FillJob(name, parts[name], self.slots[found.places[name]]) for name in wanted]

    def _refuse_own(self, jobs: list[FillJob]) -> None:
        """M115 if the source is in the memory to be written: it would change while being read."""
        held = {
            one.untyped_storage().data_ptr()
            for one in self.objects.values()
            if has_plain_bytes(one) and one.numel()
        }
        own = []
        for job in jobs if held else ():
            target, same = job.slot.tensor, self.outputs.own(job.key)
            if (
                not has_plain_bytes(target)
                or not target.numel()
                or target.untyped_storage().data_ptr() not in held
            ):
                continue
            if same is None or (same.data_ptr(), same.stride(), same.dtype) != (
                target.data_ptr(),
                target.stride(),
                target.dtype,
            ):
                own.append(job.slot.plain)
        if own:
            what = f"the module would be loaded from its own memory: {list_collapsed(own, 8)}"
            fail(
                "M115",
                what,
                help="clone these tensors first, or build another module and use `convert_module`",
            )

    def _refuse_parts(self, jobs: list[FillJob]) -> None:
        """M916 where elements of a DTensor are needed, most of which are in other processes."""
        parts = {key for key, one in self.objects.items() if is_dtensor(one)}
        needed = [
            job.slot.plain
            for job in (jobs if parts else ())
            if parts.intersection(stored_keys(job.tensor))
            and not alike(self.outputs.own(job.key), job.slot.tensor)
        ]
        if needed:
            fail(
                "M916",
                f"other processes hold parts of what is needed for {list_collapsed(needed, 8)}",
                help=GATHER,
            )

    def _value(self, name: str) -> Any:
        """The value, not a tensor, that has this name now."""
        was = self.migration.names[self.others[name]]
        index = self.migration.index
        outline = index.tree
        if outline is None:
            return index.items[was]
        several = len(outline.parts) > 1
        part = outline.parts[(rank_of(was) or 0) if several else 0]
        tree = (
            part.table.get(was.rpartition("@")[0] if several else was)
            if part.table is not None
            else None
        )

        def tensor(record: TensorRecord) -> Any:
            return self._read(outline.names[id(record)], record)

        return value_of(tree, name, tensor)

    def _read(self, key: str, record: TensorRecord) -> Any:
        from ..formats import memory

        index = self.source.index
        at = index.tensors.get(key) or index.passed_through[key]
        made, buffers = memory.allocate({key: at.spec})
        if isinstance(at, ChunkedTensor) or at.strides is not None:
            fail(
                "M916",
                f"{printable(key)} is part of a value that is not a tensor, and is not "
                "stored row by row",
            )
        if at.spec.nbytes:
            self.source.blobs[at.blob].readinto(at.offset, buffers[key])
        return made[key].reshape(record.shape)

    def _finish(self, found: Fit, values: Mapping[str, Any]) -> Callable[[], None]:
        def finish() -> None:
            self.taken.finish(self.targets.real, self.targets.replace)
            self.source.check_unchanged()
            self.targets.install()
            owners = set()
            for name, key in found.places.items():
                slot = self.slots[key]
                if slot.tensor is None and id(slot.owner) not in owners:
                    owners.add(id(slot.owner))
                    slot.owner.set_extra_state(values[key] if key in values else self._state(name))

        return finish

    def _state(self, name: str) -> Any:
        return self.outputs.get(name)


def _others(migration: Migration, source: Source) -> dict[str, str]:
    """The values that are no tensors, by the names that a module may have for them -> their name in
    the migration.

    Files of ranks have each their own; where a module of one piece is loaded, those of the first
    rank count.
    """
    outline = source.index.tree
    if outline is None or len(outline.parts) < 2:
        return {name: name for name in migration.names}
    several = any(rank_of(key) is not None for key in migration.composition.graph.outputs)
    return {
        name if several else name.rpartition("@")[0]: name
        for name in migration.names
        if several or (rank_of(name) or 0) == 0
    }


_LISTS: dict[str, Callable[[list[Any]], Any]] = {
    "list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque,
    "slice": lambda items: slice(*items), "range": lambda items: range(*items),
}  # fmt: skip
_DICTS: dict[str, Callable[[], Any]] = {
    "dict": dict,
    "OrderedDict": OrderedDict,
    "Counter": Counter,
}
# what the pickle machine lets a defaultdict call
_FACTORIES: dict[str, Callable[[], Any]] = {
    kind.__name__: kind for kind in (list, dict, set, tuple, int, float, str, bool, OrderedDict)
}


def value_of(tree: Any, name: str, tensor: Callable[[TensorRecord], Any]) -> Any:
    """The object that the tree means, its tensors made by `tensor`; M916 if it cannot be made."""
    made: dict[int, Any] = {}

    def visit(node: Any) -> Any:
        kind = type(node)
        if kind in SCALARS:
            return node
        if id(node) not in made:
            # one object in several places stays one; containers hold no cycles
            made[id(node)] = _made(node, name, visit, tensor)
        return made[id(node)]

    return visit(tree)


def _made(  # noqa: RET503 - what fails does not return
    node: Any, name: str, visit: Callable[[Any], Any], tensor: Callable[[TensorRecord], Any]
) -> Any:
    import torch

    match node:
        case DictNode(kind="defaultdict"):
            factory = node.node.arguments[0] if node.node.arguments else None
            made = None if factory is None else _FACTORIES[factory.name]
            return defaultdict(made, {visit(key): visit(value) for key, value in node.pairs})
        case DictNode(kind="Namespace"):
            made_of = argparse.Namespace()
            vars(made_of).update({key: visit(value) for key, value in node.pairs})
            return made_of
        case DictNode() if node.kind in _DICTS:
            out = _DICTS[node.kind]()
            out.update({visit(key): visit(value) for key, value in node.pairs})
            return out
        case ListNode(kind="Size"):
            return torch.Size(node.items)
        case ListNode():
            return _LISTS[node.kind]([visit(item) for item in node.items])
        case TensorRecord():
            return tensor(node)
        case Buffer():
            found = io.BytesIO(node.data)
            found.seek(node.position)
            return found
        case Constant(kind="device"):
            return torch.device(node.text)
        case Constant(kind="numpy.dtype"):
            import numpy as np

            return np.dtype(node.text)
        case Constant() if node.kind != "enum":
            return getattr(torch, node.text)
        case Array():
            import numpy as np

            array = np.frombuffer(node.data, node.dtype).reshape(
                node.shape, order="F" if node.fortran else "C"
            )
            return array[()] if node.scalar else array.copy()
    fail(
        "M916",
        f"{printable(name)} holds a {printable(type(node).__name__)}, and an object of it cannot "
        "be made here",
    )
