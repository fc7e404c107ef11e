"""What `dcp.load` reads a migrated checkpoint through, without a copy of it on disk.

Call sequence of `dcp.load`, on every rank: `read_metadata` plans the migration from headers and
shows what comes of it, each tensor as one chunk; the planner compares that with its state dict and
asks for boxes; `prepare_local_plan` says which plan this rank has, and on the coordinator
`prepare_global_plan` compares them; `read_data` fills each box in the memory that the planner names
for it. Whatever speaks against the load is raised before `read_data`, where torch brings the errors
of all ranks to all of them; only the dtypes of the targets are not known before.

torch asks a reader whose `read_metadata` fails for the metadata of a single rank, and loads without
the others if it gets an answer. So planning that fails is kept, and raised as soon as anything
looks at the metadata.
"""

from __future__ import annotations

import io
import os
import uuid
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn

import torch
from torch.distributed.checkpoint import FileSystemReader, StorageReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from .. import formats
from ..core.errors import (
    MigrateError,
    Report,
    did_you_mean,
    fail,
    listed,
    plural,
    printable,
    raise_all,
)
from ..core.spec import Spec
from ..core.templates import list_collapsed
from ..core.types import PathLike
from ..planning.graph import Tensor, ValueCheck, computations, stored_sources
from ..planning.request import DISTRIBUTED, Request, make_request, path_text
from ..results import LoadReport, PlanReport
from ..running.ahead import reading_ahead
from ..running.buffers import fill_buffer
from ..running.checks import require_checks
from ..running.evaluator import Evaluator
from ..running.gather import WINDOW
from ..running.geometry import ByteLayouts
from ..running.needed_bytes import NeededBytes
from ..running.prepare import plan_for
from ..running.resources import memory_of
from ..source.blobs import chunk_at
from ..source.component_boxes import views_of
from ..source.index import FileSource, with_all_tensors
from ..source.target import torch_form
from . import module as modules
from .box_reading import BoxReader
from .lazy_opening import closed_if_it_fails, plan_lazily
from .module import Slot
from .planner_targets import check_targets, elements_of, local_target, require_no_summands
from .quantized import TakenApart, held, take_apart
from .rank_plans import AgreedPlan, RankPlan, agree, agreed_plans, bits_of, packed_plan

if TYPE_CHECKING:
    from types import TracebackType

    from ..planning.plan import Plan
    from ..source.index import Source
    from .lazy_opening import Lazily

UNEXPECTED = ("ignore", "warn", "error")
# names for which a near one is looked for, because comparing all with all takes long
_NEAR = 4
# of a file, where none is written
_NO_LIMIT = 1 << 62


class MigratingReader(StorageReader):  # type: ignore[misc]
    """Reads a checkpoint for `dcp.load` as if it had been migrated, without writing it.

    Each rank reads the boxes that its shards need, from where they lie. The checkpoint is migrated
    in whichever direction leads to `to`; without `to` and `rules` it is read as it is, in any
    format that `migrate` reads. Nothing in it is executed: values other than tensors reach the
    planner in streams that are written from what was decoded. `plan` says before the load what will
    be done, `report` after it what was done.

    Args:
        path: A checkpoint (a folder, a file, an index of shards), a state dict or a module.
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
        unexpected: What to do about keys of the migrated checkpoint that no rank asks for:
            "ignore", as torch does, "warn" or "error". Default: "ignore".
        max_memory: Bytes for tensors that are computed or transposed, also as text ("4GB").
            Default: 1 GB.
        extensions: A registry of stream extensions, as torch's reader takes it as
            `_extension_registry`: classes of your own that the archives were written through. They
            are run. Default: None, so that zstandard alone is read.

    Raises:
        MigrateError: M115 for wrong arguments. What `plan` raises comes out of `dcp.load`, on every
            rank, inside of torch's `CheckpointException`; so do M960 for unexpected keys, M961 for
            targets that would round, M965 if it stops in the middle, M973 and M974 where ranks have
            different plans. Used in a `with` statement, it raises M965 also where another rank was
            killed, which torch's own error does not tell from a lost connection.

    Example:
        >>> model = torch.nn.LayerNorm(4, bias=False)
        >>> state = {"norm.weight": model.weight}
        >>> old = {"model.norm.weight": torch.ones(4)}
        >>> reader = migrate.dcp.MigratingReader(old, rules="rename.yaml")
        >>> torch.distributed.checkpoint.load(state, storage_reader=reader)
        >>> reader.report.tensors
        1
    """

    report: LoadReport | None

    def __init__(
        self,
        path: PathLike | Mapping[str, Any] | torch.nn.Module,
        to: str | Iterable[str] = (),
        *,
        from_: str | Iterable[str] = (),
        rules: Iterable[PathLike] = (),
        params: Mapping[str, Any] | None = None,
        allow: Iterable[str] = (),
        at: str | None = None,
        unexpected: str = "ignore",
        max_memory: int | str = "1GB",
        extensions: Any = None,
    ) -> None:
        super().__init__()
        if unexpected not in UNEXPECTED:
            fail(
                "M115",
                f"`unexpected` cannot be {printable(repr(unexpected))}",
                help=f"one of {listed(list(UNEXPECTED))}",
            )
        self._request = make_request(
            to,
            from_,
            rules,
            params,
            allow,
            backwards=None,
            at=at,
            output_format=DISTRIBUTED,
            rewrite=True,
        )
        self._path, self._unexpected, self._max_memory = path, unexpected, memory_of(max_memory)
        self._extensions = extensions
        self._loading: _Loading | None = None
        self._planned: PlanReport | None = None
        self._failed: MigrateError | None = None
        self.report = None
        self.load_id = str(uuid.uuid4())

    @property
    def plan(self) -> PlanReport:
        """What the load will do, as `migrate.plan` says it of an output in DCP.

        Its notes also say which ops need all of a tensor, with the bytes that each rank reads which
        loads a part of what they make. All ranks have the same. Headers are read for it: whether
        the downgrade is exact, which it says, is of no use to a load. Raises what `plan` raises.
        """
        if self._planned is None:
            loading = self._begun(prove=True)
            try:
                self._planned = loading.planned()
            finally:
                loading.source.close()
        return self._planned

    @property
    def checkpoint_id(self) -> Any:
        """The path that is read."""
        return self._path

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Forgets what was planned; a `checkpoint_id` that `dcp.load` was given is read instead."""
        self._close()
        self._planned = None
        # names one load, as that of torch's reader does
        self.load_id = str(uuid.uuid4())
        if checkpoint_id is not None:
            self._path = checkpoint_id

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it can be the path of a checkpoint."""
        return bool(FileSystemReader.validate_checkpoint_id(checkpoint_id))

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What the migrated checkpoint consists of; raises nothing before that is looked at."""
        self._close()
        self._planned = self.report = self._failed = None
        try:
            self._loading = self._begun()
        except Exception as error:  # noqa: BLE001 - it is raised when the metadata is used
            return Metadata(_Failed(error))
        self._loading.suspend()
        found = self._loading.metadata()
        found.storage_meta = self._loading.storage_meta(self.load_id)
        return found

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Raises what spoke against reading the checkpoint."""
        if isinstance(metadata.state_dict_metadata, _Failed):
            metadata.state_dict_metadata.keys()
        self._is_coordinator = is_coordinator

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan with the digest of the migration; on the coordinator the conditions on values
        are checked first.
        """
        loading = self._require()
        try:
            loading.require(plan.items, self._is_coordinator)
        except BaseException:
            self._close()
            raise
        loading.suspend()
        return packed_plan(plan, loading.said_of(plan.items))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans with what no rank asks for; M974 where they are not of one migration."""
        loading = self._require()
        left = agree(plans, loading.plan.digest, loading.keys)
        if left and self._unexpected != "ignore":
            what = f"no rank asks for {plural(len(left), 'key')} of the migrated checkpoint"
            names = list_collapsed(left, 8)
            if self._unexpected == "error":
                way_out = 'ask for them, drop them by rules, or give unexpected="ignore"'
                fail("M960", what, notes=(names,), help=way_out)
            warnings.warn(f"{what}: {names}", stacklevel=2)
        return agreed_plans(plans, left)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fills what the planner asks for; M961 before anything is written, M965 in the middle."""
        loading = self._require()
        try:
            written = loading.read(plan.items, planner)
        except BaseException as error:
            self._failed = error if isinstance(error, MigrateError) else None
            self._close()
            raise
        left = plan.storage_data.unexpected if isinstance(plan.storage_data, AgreedPlan) else ()
        self.report = loading.report(plan.items, written, left)
        self._close()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def __enter__(self) -> MigratingReader:
        """The reader, whose errors say what is written also where a rank was killed."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Raises M965, or what stopped this rank, in place of the error with which torch ends a
        load whose ranks do not answer any more; torch asks them after the last call of the reader.
        """
        self._close()
        if not isinstance(error, Exception) or not _is_of_torch(trace):
            return
        if self._failed is not None:
            raise self._failed from error
        if self.report is not None:
            done = plural(self.report.tensors, "tensor")
            said = (
                f"other ranks did not say that they have loaded: this one has written {done}, and "
                "the model is written in part"
            )
            cause = printable(f"{type(error).__name__}: {error}", 300)
            way_out = "find out which process died, and load again with all of them"
            try:
                fail("M965", said, notes=(f"the cause: {cause}",), help=way_out)
            except MigrateError as stopped:
                raise stopped from error

    def _begun(self, prove: bool = False) -> _Loading:
        return _Loading(self._path, self._request, self._max_memory, self._extensions, prove)

    def _require(self) -> _Loading:
        if self._loading is None:
            fail(
                "M115",
                "nothing is being read: `read_metadata` comes first",
                help="load with `dcp.load(…, storage_reader=reader)`, which calls it",
            )
        return self._loading

    def __del__(self) -> None:
        # a load that another rank or a planner stopped ends without a word to the reader
        if "_loading" in self.__dict__:
            self._close()

    def _close(self) -> None:
        if self._loading is not None:
            self._loading.source.close()
            self._loading = None


# where `dcp.load` is defined
_LOADER: Final = "torch.distributed.checkpoint.state_dict_loader"


def _is_of_torch(trace: TracebackType | None) -> bool:
    """Whether an exception was raised while torch was loading a checkpoint."""
    while trace is not None:
        if trace.tb_frame.f_globals.get("__name__") == _LOADER:
            return True
        trace = trace.tb_next
    return False


class _Failed(dict[str, Any]):
    """The entries of a checkpoint that cannot be read: whatever asks for them gets the reason."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    def _raise(self, *args: Any) -> NoReturn:
        raise self._error

    __contains__ = __getitem__ = __iter__ = __len__ = _raise
    get = items = keys = values = _raise


class _Shown(dict[str, Any]):
    """The entries by key; remembers which keys were looked for in vain, and `warns` of them. The
    planner's own error names one, and nothing that is near to it.
    """

    def __init__(self, entries: Mapping[str, Any], *, warns: bool) -> None:
        super().__init__(entries)
        self.missing: dict[str, None] = {}
        self._warns = warns

    def __contains__(self, key: object) -> bool:
        found = super().__contains__(key)
        if not found and isinstance(key, str) and key not in self.missing:
            self.missing[key] = None
            if self._warns and len(self.missing) <= _NEAR:
                near = did_you_mean(key, list(self))
                said = f"the migrated checkpoint has no {printable(key)}"
                warnings.warn(f"{said}: {near}" if near else said, stacklevel=3)
        return found


class _Read(NamedTuple):
    """A box of a tensor, and what it is read into for an item."""

    tensor: Tensor
    box: tuple[tuple[int, int], ...]
    target: torch.Tensor
    item: ReadItem


class _Loading:
    """One load: the opened checkpoint, what it becomes, and what is asked of it."""

    def __init__(
        self, path: Any, request: Request, max_memory: int, extensions: Any, prove: bool
    ) -> None:
        self._path, self._request, self._max_memory = path, request, max_memory
        self._extensions, self._prove = extensions, prove
        self._shown = _Shown({}, warns=False)
        self.notes: list[str] = []
        # the numbers of the files that are read here
        self._needed: set[int] = set()
        self._adopt(*plan_lazily(self._open, request, self._described))

    def _open(self, lazily: Lazily | None) -> Source:
        path, request = self._path, self._request
        if isinstance(path, Mapping) or modules.is_module(path):
            opened: Source = modules.opened(path, at=request.at)
            return opened
        place, extensions = path_text("path", path), self._extensions
        return formats.open(place, lazily=lazily, extensions=extensions, **request.opening)

    def _described(self, source: Source) -> Plan:
        self._entries = formats.describe_entries()
        form, prove = self._entries, self._prove
        return plan_for(source, self._request, False, _NO_LIMIT, form=form, prove=prove)

    def _plan_anew(self) -> None:
        """Plans from all chunks."""
        self.source.close()
        source = self._open(None)
        self._adopt(source, closed_if_it_fails(source, lambda: self._described(source)))

    def _adopt(self, source: Source, plan: Plan) -> None:
        self.source, self.plan = source, plan
        self._all = with_all_tensors(self.source)
        outputs = self.plan.outputs
        # what lies where is asked before boxes are read, and while they are
        self._layouts = ByteLayouts(sparing=True)
        self._tensors = {key: outputs[name] for key, name in self._entries.tensors.items()}

    def suspend(self) -> None:
        """Closes the files until they are read: torch does not say that a planner failed, here or
        on another rank, and that nothing will be read.
        """
        if isinstance(self.source, FileSource):
            self.source.suspend()

    @property
    def migrates(self) -> bool:
        """Whether anything was asked for beyond reading."""
        return bool(self._request.to or self._request.rules)

    def planned(self) -> PlanReport:
        """The plan, with what ranks have to read whole for a part."""
        layouts = ByteLayouts()
        needed = NeededBytes(layouts, self._evaluator((), layouts).kind)
        needed.add_whole(self.plan.outputs.values())
        notes = [
            f"`{op}` needs all of a tensor: a rank that loads any part of "
            f"{list_collapsed(keys, 4)} reads all {nbytes:,} bytes of what they are made of"
            for op, (nbytes, keys) in needed.whole_by_op().items()
        ]
        said = self.plan.document
        return PlanReport.from_json({**said, "notes": [*said["notes"], *notes]})

    def metadata(self) -> Metadata:
        """The entries as torch describes a checkpoint: each tensor is one chunk."""
        entries: dict[str, Any] = {}
        for key in self._entries.paths:
            if key in self._entries.values:
                entries[key] = BytesStorageMetadata()
                continue
            tensor = self._tensors.get(key)
            if tensor is not None:
                dtype, shape = torch_form(tensor.spec)
            else:
                encoding = self._entries.objects[key].encoding
                dtype, shape = encoding.dtype, encoding.shape
            size = torch.Size(shape)
            entries[key] = TensorStorageMetadata(
                TensorProperties(dtype=getattr(torch, dtype)),
                size,
                [ChunkStorageMetadata(torch.Size([0] * len(size)), size)],
            )
        self._shown = _Shown(entries, warns=self.migrates)
        return Metadata(self._shown, planner_data=dict(self._entries.paths), storage_data={})

    def storage_meta(self, load_id: str) -> StorageMeta:
        """Which load of which save this is, for torch's log."""
        path = self._path if isinstance(self._path, (str, os.PathLike)) else None
        return StorageMeta(path, getattr(self.source, "save_id", None), load_id)

    def require(self, items: Sequence[ReadItem], is_coordinator: bool) -> None:
        """Raises what speaks against reading these: lack of memory (M919), and on the coordinator
        conditions on values that do not hold.
        """
        asked = dict.fromkeys(item.storage_index.fqn for item in items)
        self._confirm(items, self.plan.checks if is_coordinator else ())
        tensors = [tensor for key in asked for tensor in self._made(key)]
        if computations(tensors):
            self._evaluator(tensors).require(tensors)
        if is_coordinator and self.plan.checks:
            require_checks(self.plan.checks, self._all, self._max_memory)

    def _made(self, key: str) -> list[Tensor]:
        """The tensors that an entry consists of: of an object its components; none of a value."""
        if key in self._tensors:
            return [self._tensors[key]]
        return [self.plan.outputs[name] for name in self._entries.parts.get(key, {}).values()]

    def _parts(self, item: ReadItem) -> list[Tensor]:
        """What an item reads of an object: of each component what belongs to its box."""
        key = item.storage_index.fqn
        made = self._made(key)
        if not made:
            return made
        wholes = {
            name: (one.view, one.spec.dtype)
            for name, one in zip(self._entries.parts[key], made, strict=True)
        }
        box = tuple(item.storage_offsets), tuple(item.lengths)
        views = views_of(self._entries.objects[key].encoding, wholes, box)
        return [
            Tensor(Spec(one.spec.dtype, view.shape), view, one.sources)
            for one, view in zip(made, views, strict=True)
        ]

    def _confirm(self, items: Iterable[ReadItem], checks: Iterable[ValueCheck]) -> None:
        """Looks at the chunks that are read; plans anew with all of them if one is not what it was
        taken for.
        """
        needed = NeededBytes(self._layouts, self._evaluator((), self._layouts).kind)
        for item in items:
            key = item.storage_index.fqn
            if key in self._tensors:
                needed.add(self._tensors[key], elements_of(item, self._tensors[key].spec))
            else:
                for tensor in self._parts(item):
                    needed.add(tensor, tuple((0, size) for size in tensor.spec.shape))
        read = {*needed.stored, *(s for c in checks for t in c.tensors for s in stored_sources(t))}
        stored = self._all.index.tensors
        places = [chunk_at(stored, source) for source in read]
        self._needed = {at.blob for at in places}
        if isinstance(self.source, FileSource) and not self.source.confirm(places):
            self._plan_anew()
        self.notes = [
            f"`{op}` needs all of a tensor: up to {nbytes:,} bytes are read here for "
            f"{list_collapsed(keys, 4)}"
            for op, (nbytes, keys) in needed.whole_by_op().items()
        ]

    @property
    def keys(self) -> Iterable[str]:
        """The keys of the migrated checkpoint, in their order."""
        return self._entries.paths

    def said_of(self, items: Iterable[ReadItem]) -> RankPlan:
        """What this rank says of its plan. A tensor without elements needs no item."""
        asked = {item.storage_index.fqn for item in items}
        asked.update(key for key, tensor in self._tensors.items() if not tensor.spec.numel)
        return RankPlan(self.plan.digest, bits_of(asked, self.keys))

    def read(self, items: Sequence[ReadItem], planner: LoadPlanner) -> int:
        """Fills all targets, and returns the bytes of the tensors that were read."""
        tensors = [item for item in items if item.type != LoadItemType.BYTE_IO]
        require_no_summands(tensors, planner)
        targets = [local_target(planner.resolve_tensor(item)) for item in tensors]
        reads, taken = self._reads(tensors, targets)
        if isinstance(self.source, FileSource):
            self.source.reopen(self._needed)
        evaluator = self._evaluator([read.tensor for read in reads], self._layouts)
        window = min(WINDOW, self._max_memory // 4)
        reader = BoxReader(self._all, self._layouts, evaluator, window)
        reads.sort(key=lambda read: reader.place(read.tensor, read.box))
        written, begun = 0, ""
        done: list[str] = []
        try:
            here = (reader.part(read.tensor, read.box) for read in reads)
            ahead = ((part, 0, part.spec.nbytes) for part in here)
            with torch.no_grad(), reading_ahead(ahead, self._all, self._layouts, self._max_memory):
                for tensor, box, target, item in reads:
                    begun = item.dest_index.fqn
                    reader.read(tensor, box, target)
                    written += Spec(tensor.spec.dtype, tuple(b - a for a, b in box)).nbytes
                    evaluator.done(tensor)
                    if item.storage_index.fqn in self._tensors:
                        planner.commit_tensor(item, target)
                    done.append(begun)
                reader.drain()
                if taken is not None:
                    taken.finish()
                for item, target in zip(tensors, targets, strict=True):
                    if item.storage_index.fqn in self._entries.objects:
                        planner.commit_tensor(item, target)
                for item in items:
                    if item.type == LoadItemType.BYTE_IO:
                        begun = item.dest_index.fqn
                        planner.load_bytes(item, io.BytesIO(self._stream(item.storage_index.fqn)))
                        done.append(begun)
            self.source.check_unchanged()
        except Exception as error:  # noqa: BLE001 - what is written has to be said
            _stopped(error, begun, done)
        finally:
            evaluator.forget()
        return written

    def _reads(
        self, items: Sequence[ReadItem], targets: Sequence[torch.Tensor]
    ) -> tuple[list[_Read], TakenApart | None]:
        """What is to be read for these targets: their boxes, or those of their components."""
        plain = []
        objects: dict[str, tuple[ReadItem, torch.Tensor]] = {}
        for item, target in zip(items, targets, strict=True):
            if item.storage_index.fqn in self._entries.objects:
                objects[str(len(objects))] = item, target
            else:
                plain.append((item, target))
        wanted = [(i, target, self._tensors[i.storage_index.fqn].spec) for i, target in plain]
        check_targets(wanted, not self.migrates, self._request.allow)
        reads = []
        for item, target in plain:
            tensor = self._tensors[item.storage_index.fqn]
            reads.append(_Read(tensor, elements_of(item, tensor.spec), target, item))
        if not objects:
            return reads, None
        taken = self._take_apart(objects)
        wrong: list[str] = []
        for name, slot in taken.slots.items():
            number, _, attribute = name.partition(".")
            item = objects[number][0]
            numbers = taken.decoded.get(slot.plain)
            if numbers is not None:
                reads.append(_Read(numbers, elements_of(item, numbers.spec), slot.tensor, item))
                continue
            made = self.plan.outputs[self._entries.parts[item.storage_index.fqn][attribute]]
            tensor = taken.cuts.get(slot.plain, made)
            there = slot.spec
            if there is None or there != tensor.spec:
                wrong.append(f"{printable(slot.plain)}: {tensor.spec}, the target's is {there}")
            box = tuple((0, size) for size in tensor.spec.shape)
            reads.append(_Read(tensor, box, slot.tensor, item))
        if wrong:
            fail(
                "M960",
                f"other shapes than the targets' in {plural(len(wrong), 'component')}",
                notes=tuple(wrong[:8]),
                help="build the model with the blocks of the checkpoint",
            )
        return reads, taken

    def _take_apart(self, objects: Mapping[str, tuple[ReadItem, torch.Tensor]]) -> TakenApart:
        """Objects by their components; raises what speaks against copying these."""
        entries, outputs = self._entries, self.plan.outputs
        other = [item.storage_index.fqn for item, one in objects.values() if held(one) is None]
        if other:
            fail(
                "M916",
                f"an object of a class of its own goes into one of the same encoding only: "
                f"{list_collapsed(list(dict.fromkeys(other)), 8)}",
                help="dequantize it by rules, or leave it out of the state dict",
            )
        slots, parts, boxes, nothing = {}, {}, {}, torch.nn.Module()
        for number, (item, target) in objects.items():
            key = item.storage_index.fqn
            # a rank can have several parts of a tensor
            plain = key if f"{key}." not in parts else f"{key} ({number})"
            parts[f"{plain}."] = key
            slots[number] = Slot(plain, nothing, "", target)
            offsets, sizes = tuple(item.storage_offsets), tuple(item.lengths)
            boxes[number] = entries.objects[key].encoding.shape, (offsets, sizes)
        made = {
            f"{plain}{name}": outputs[output]
            for plain, key in parts.items()
            for name, output in entries.parts[key].items()
        }
        # with the tensors that rules do not see there is no tree, which says what objects are
        index = replace(self._all.index, tree=self.source.index.tree)
        taken = take_apart(slots, made, index, self._request, boxes)
        if taken.problems:
            raise_all(taken.problems)
        self.notes += taken.notes
        return taken

    def report(
        self, items: Sequence[ReadItem], written: int, unexpected: Sequence[str]
    ) -> LoadReport:
        """What was loaded here."""
        said = self.plan.document
        tensors = {i.storage_index.fqn for i in items if i.type != LoadItemType.BYTE_IO}
        return LoadReport.of(
            source=self.source.path,
            format=self.source.format,
            steps=said["path"],
            layouts=said["layouts"],
            params=said["params"],
            tensors=len(tensors),
            bytes_written=written,
            missing=list(self._shown.missing),
            unexpected=list(unexpected),
            left_on_meta=[],
            losses=said["losses"],
            notes=list(dict.fromkeys([*self.source.index.notes, *said["notes"], *self.notes])),
            warnings=said["warnings"],
            report=None,
        )

    def _stream(self, key: str) -> bytearray:
        return self._entries.write_stream(key, self._fill)

    def _fill(self, key: str, buffer: memoryview) -> None:
        tensor, layouts = self.plan.outputs[key], ByteLayouts()
        evaluator = self._evaluator([tensor], layouts)
        fill_buffer(tensor, self._all, layouts, evaluator, buffer, self._max_memory)
        evaluator.forget()

    def _evaluator(
        self, tensors: Iterable[Tensor], layouts: ByteLayouts | None = None
    ) -> Evaluator:
        return Evaluator(self._all, layouts or ByteLayouts(), tensors, self._max_memory)


def _stopped(error: Exception, begun: str, done: Sequence[str]) -> NoReturn:
    """M965 with the diagnostics of the cause: what this rank has written, and what in part."""
    report = Report()
    if isinstance(error, MigrateError):
        report.diagnostics += error.diagnostics
    notes = [f"the cause: {printable(f'{type(error).__name__}: {error}', 300)}"]
    notes = notes * (not isinstance(error, MigrateError))
    if done:
        notes.append(f"written: {list_collapsed(list(dict.fromkeys(done)), 8)}")
    what = f"loading stopped at {printable(begun)}: the state dict is written in part"
    report.add("M965", what, notes=tuple(notes), help="fix the cause and load again")
    raise_all(report.diagnostics)
