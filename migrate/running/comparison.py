"""Two checkpoints compared: the answers of `verify` and `diff`, and the tensors whose bytes differ.

Bytes are compared without torch and numpy. Only what differs is measured, a stage at a time, in
float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import formats
from ..core import log
from ..core.errors import fail, option, printable
from ..core.spec import BITS, Spec, coordinates
from ..core.types import Progress, Ranks
from ..elements.raw import unpack
from ..extra_state.states import States
from ..planning.graph import ReadKey, Tensor
from ..planning.numbered_states import REMEMBERED, GivenNames
from ..planning.optimizers import DROP, following_of
from ..planning.path import find_path
from ..planning.request import OPTIMIZER_PARAM, OUTPUT_FORMATS, STALE_OPTIMIZER
from ..planning.sides import SideFiles
from ..planning.stored import stored_tensor
from ..results import DiffReport, VerifyEstimate, VerifyReport
from ..rules.files import VALUES
from ..source.blobs import room
from ..source.index import with_all_tensors
from ..source.places import is_folder
from . import stamp as stamps
from .ahead import reading_keys
from .checks import check_all_records, require_checks
from .cutting import cut_of, values_for
from .differences import (
    TENSORS_ONLY,
    Unlooked,
    WrittenTree,
    extra_keys,
    form_differences,
    item_differences,
    made_form_differences,
    not_compared,
    side_differences,
    spec_differences,
    unread_differences,
    unread_outcome,
)
from .evaluator import Evaluator
from .gather import Gather
from .gathered_ranks import as_written
from .geometry import STAGE, ByteLayouts
from .output_shapes import has_place
from .padding import FilledUp, filled_up, padding_note
from .prepare import (
    compose_for,
    find_optimizers,
    path_state_for,
    side_reader,
    stamp_of,
    without_optimizers,
)
from .sample import choose_sample, left_out_of
from .state_trees import with_followed
from .verify import Mismatch, Recomputation, estimate_seconds

if TYPE_CHECKING:
    import torch

    from ..planning.compose import Composition
    from ..planning.request import Request
    from ..source.index import Source


# the place of a process that shares its work with no other
_ALONE = Ranks(0, 1)


def verify_output(
    opened: Source,
    made: Source,
    request: Request,
    *,
    budget: int | None,
    share: float | None,
    seed: int | None,
    threads: int,
    progress: Progress | None,
    inform: Callable[[VerifyEstimate], None] | None,
    compare: Callable[..., list[Mismatch]] = Recomputation.run,
    ranks: Ranks = _ALONE,
) -> VerifyReport:
    """Whether `made` is what `opened` gives when it is computed again.

    What was applied is read from the stamp of `made`, unless the request says it. `share` and
    `seed` choose a sample. `ranks` is the place of this process among those that share the work,
    and `compare` does its part.
    """
    stale = STALE_OPTIMIZER in request.allow
    permitted = {"lossy", "drop", "delayed-scaling", STALE_OPTIMIZER}
    request = replace(request, allow=request.allow | permitted)
    index_hash = made.index.hash()
    stamp, notes = stamps.read_stamp(made.history, index_hash)
    applied = _applied_after(opened, stamp)
    if (
        not (applied or request.to or request.files)
        and made.history is not None
        and index_hash == opened.index.hash()
    ):
        # the same tensors in another format
        request = replace(request, output_format=OUTPUT_FORMATS[0])
    if not (request.to or request.files or applied or request.output_format):
        missing = (
            f"no stamp in {printable(made.path)} says that it was made from "
            f"{printable(opened.path)}"
        )
        if made.history is None:
            missing = f"the output {printable(made.path)} has no stamp that says what was applied"
        fail(
            "M115",
            missing,
            notes=tuple(notes),
            help=f"give {option('to', 'LINEAGE@LAYOUT')} or {option('rules', 'FILE')}",
        )
    if any(entry.get("optimizer") == "dropped" for entry in applied):
        request = replace(request, params={**request.params, OPTIMIZER_PARAM: DROP})
    stale = stale or any(entry.get("optimizer") == "stale" for entry in applied)
    before, (opened, _) = stamp_of(opened)[0], without_optimizers(opened, request)
    if opened.index.torn:
        from .encoding_anew import encodes_anew

        # what could not be joined stands in the output because it was encoded anew
        opened = encodes_anew(opened, request, every=True)
    migration_path = find_path(
        opened.index, side_reader(opened), before, request, applied, States(opened)
    )
    notes += [
        *migration_path.remarks,
        *(d.message for d in migration_path.warnings if d.code == "M518"),
    ]
    path_state = path_state_for(opened, migration_path, is_folder(made.path))
    states = [] if stale else find_optimizers(opened)
    composition = compose_for(
        opened,
        migration_path,
        request,
        path_state,
        programs=True,
        prove=False,
        states=states,
        keeps=has_place(opened.index, made.format, is_folder(made.path)),
        names_before={
            one["place"]: GivenNames(one["before"], REMEMBERED)
            for entry in applied[:1]
            for one in entry.get("optimizer_names", ())
        }
        or None,
    )
    outputs = composition.graph.outputs
    differences, carried = spec_differences(composition, made), 0
    wrong, cut = {d["key"] for d in differences}, None
    if made.index.torn:
        from .torn_outputs import compare_torn

        cut = compare_torn(outputs, with_all_tensors(opened), with_all_tensors(made), request)
        wrong |= cut.keys
        differences += cut.differences
    programs = {key: program for key, program in composition.programs.items() if key not in wrong}
    values = path_state.sides.values if VALUES in path_state.sides.changed else None
    into = cut_of(made.index, opened, migration_path, before.grid)
    values = values_for(opened, values, made.format, made.index.grid is not None, into)
    wanted = None
    if made.index.tree is not None:
        wanted = WrittenTree.of(opened, composition, made, into, values)
    if wanted is not None:
        beside = {key: was for key, was in wanted.origins.items() if key not in outputs}
        carried = len(beside)
        programs.update(
            (key, composition.programs.get(was, ReadKey(was))) for key, was in beside.items()
        )
        differences += extra_keys(key for key in made.index.passed_through if key not in beside)
    _require_equal_copies(opened, composition)
    both = with_all_tensors(opened), with_all_tensors(made)
    # a share of 1 leaves nothing to chance
    chosen = None if share in (None, 1) else choose_sample(programs, *both, share, seed)
    filled = filled_up([made.index])
    work = Recomputation(programs, *both, budget, chosen, filled)
    if inform is not None:
        seconds = estimate_seconds(work, threads, ranks.world)
        inform(VerifyEstimate.of(**work.announced(threads, seconds, ranks.world)))
    if chosen is None:
        part = slice(ranks.rank, None, ranks.world)
        check_all_records(opened, part)
        check_all_records(made, part)
    near: list[dict[str, str]] = []
    padding: list[str] = [] if cut is None else cut.padding
    for found in compare(work, threads, progress):
        if found.what == "padding":
            padding.append(found.key)
            continue
        first = "" if found.index is None else f", first at {list(found.index)}"
        (near if found.what == "near" else differences).append(
            {"key": found.key, "what": f"{found.detail}{first}"}
        )
    unread, unlooked = unread_outcome(opened, made, "opaque" in request.allow)
    if chosen is not None:
        unlooked += left_out_of(chosen, programs, both[1], any(one.index.sums() for one in both))
    differences += side_differences(opened, made, path_state.sides) + unread
    followed = _with_states(opened, composition)
    if migration_path.steps or into.of_other is not None or values is not None:
        followed = as_written(followed, made.index, into, values)
    held, lost = formats.as_saved(followed, made.format)
    unlooked += _unlooked(lost, made.format)
    differences += item_differences(held, made, bool(migration_path.steps))
    if wanted is not None:
        differences += made_form_differences(opened, composition, wanted, made)
    opened.check_unchanged()
    return VerifyReport.of(
        path=made.path,
        source=opened.path,
        equal=not differences,
        tensors=len(outputs) + carried,
        bytes=both[1].index.nbytes,
        memory=work.memory(threads),
        sample=None if chosen is None else chosen.to_json(both[1]),
        differences=differences,
        near=near,
        not_compared=[one.to_json() for one in unlooked],
        notes=[*notes, *padding_note(padding)],
    )


def _require_equal_copies(source: Source, composition: Composition | None = None) -> None:
    """M923 where parts of a grid differ in what several of them have, and the composition takes: of
    the tensors that are compared, only the first copy is read.
    """
    if source.index.grid is not None:
        from ..planning.grids import replica_checks

        require_checks(replica_checks(source.index.grid, composition), source)


def _with_states(opened: Source, composition: Composition) -> Source:
    """The source with the state of optimizers where it followed."""
    moved = [one for one in following_of(composition) if one.moved]
    return with_followed(opened, moved) if moved else opened


def compare_checkpoints(
    one: Source, other: Source, progress: Progress | None, *, tensors_only: bool
) -> DiffReport:
    """Where the two differ, and what was not looked at."""
    _require_equal_copies(one)
    _require_equal_copies(other)
    a, lost = formats.as_saved(one, other.format)
    b, also = formats.as_saved(other, one.format)
    every = with_all_tensors(a)
    filled = filled_up([one.index, other.index])
    found = diff(every, with_all_tensors(b), filled, progress=progress)
    side: list[dict[str, str]] = []
    others: list[dict[str, str]] = []
    notes: list[str] = []
    padding = padding_note(found.padding)
    if tensors_only:
        unlooked = [Unlooked(what, "only tensors were asked for") for what in TENSORS_ONLY]
    else:
        unread, notes = unread_differences(one, other)
        side = side_differences(one, other, SideFiles(side_reader(one)))
        unlooked = not_compared(one, other)
        unlooked += _unlooked(lost, other.format) + _unlooked(also, one.format)
        others = [*item_differences(a, b), *form_differences(a, b), *unread]
    return DiffReport.of(
        a=one.path,
        b=other.path,
        equal=found.equal and not (side or others),
        tensors_equal=found.equal,
        tensors=len(every.index.tensors),
        bytes=every.index.nbytes,
        only_a=list(found.only_a),
        only_b=list(found.only_b),
        specs=[{"key": k, "a": str(x), "b": str(y)} for k, x, y in found.specs],
        bytes_differ=[
            {
                "key": d.key,
                "index": list(d.index),
                "count": d.count,
                "max_abs_error": _number(d.max_abs_error),
                "sqnr_db": _number(d.sqnr_db),
            }
            for d in found.bytes
        ],
        side_files=[d["what"] for d in side],
        others=[d["what"] for d in others],
        not_compared=[one.to_json() for one in unlooked],
        notes=[*notes, *padding],
    )


def _unlooked(lost: Sequence[str], format: str) -> list[Unlooked]:
    return [Unlooked(one, f"{format} has no place for it") for one in lost]


def _number(value: float | None) -> float | None:
    """A float that JSON can hold."""
    return value if value is not None and math.isfinite(value) else None


def _applied_after(source: Source, stamp: stamps.Stamp) -> Sequence[Mapping[str, Any]]:
    """The edges that an output's stamp has beyond its source's: those that made the output."""
    index_hash = source.index.hash()
    for position, entry in enumerate(stamp.applied):
        if entry["source"] == index_hash:
            return stamp.applied[position:]
    return ()


@dataclass(frozen=True, slots=True)
class Changed:
    """A tensor of equal spec and unequal bytes.

    `index` of the first element whose bits differ, `count` of such elements, the largest absolute
    error, and the ratio of signal to error, 10·log10(Σa² / Σ(a-b)²) in dB (infinite if only signs
    of zero or bits of NaNs differ). The last two are None for dtypes without a value in torch, and
    NaN if a NaN stands against a number.
    """

    key: str
    index: tuple[int, ...]
    count: int
    max_abs_error: float | None
    sqnr_db: float | None


@dataclass(frozen=True, slots=True)
class Difference:
    """Keys of one side only, (key, spec of a, spec of b) that differ, tensors of other bytes, and
    those that differ in `padding` only.
    """

    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    specs: tuple[tuple[str, Spec, Spec], ...]
    bytes: tuple[Changed, ...]
    padding: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        return not (self.only_a or self.only_b or self.specs or self.bytes)


@log.phase("comparing tensors")
def diff(
    source_a: Source,
    source_b: Source,
    filled: Mapping[str, FilledUp] | None = None,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> Difference:
    """The difference of two checkpoints in the order of their keys, however they are stored.

    Of the components that are `filled` up, only what is not padding counts.
    """
    a, b = source_a.index.tensors, source_b.index.tensors
    shared = [k for k in a if k in b]
    specs = tuple((k, a[k].spec, b[k].spec) for k in shared if a[k].spec != b[k].spec)
    same = [k for k in shared if a[k].spec == b[k].spec]
    total, done = sum(a[k].spec.nbytes for k in same), 0
    readers = _StageReader(source_a), _StageReader(source_b)
    changed, padding = [], []
    with reading_keys(same, source_a), reading_keys(same, source_b):
        for key in same:
            if any(r.differ for r in _pairs(readers, key)):
                for reader in readers:
                    reader.filled = (filled or {}).get(key)
                if readers[0].filled is None or any(r.differ for r in _pairs(readers, key)):
                    changed.append(_measured(readers, key, a[key].spec))
                else:
                    padding.append(key)
                for reader in readers:
                    reader.filled = None
            done += a[key].spec.nbytes
            if progress is not None:
                progress(done, total)
    return Difference(
        tuple(k for k in a if k not in b),
        tuple(k for k in b if k not in a),
        specs,
        tuple(changed),
        tuple(padding),
    )


class _StageReader:
    def __init__(self, source: Source) -> None:
        self.source = source
        self.stage = room(STAGE)
        layouts = ByteLayouts()
        # set while a component is read with zeros for padding
        self.filled: FilledUp | None = None
        self.gather = Gather(source, layouts, self.stage, Evaluator(source, layouts).leaf)

    def tensor(self, key: str) -> Tensor:
        made = stored_tensor(key, self.source.index.tensors[key])
        if self.filled is None or (view := self.filled.zeroed(made.view)) is None:
            return made
        return Tensor(made.spec, view, made.sources)


class _Pair(NamedTuple):
    start: int
    a: memoryview
    b: memoryview

    @property
    def differ(self) -> bool:
        return bytes(self.a) != bytes(self.b)


def _pairs(readers: tuple[_StageReader, _StageReader], key: str) -> Iterator[_Pair]:
    tensors = [r.tensor(key) for r in readers]
    nbytes = tensors[0].spec.nbytes
    # a multiple of 48 holds whole elements of every dtype
    step = STAGE // 48 * 48
    for start in range(0, nbytes, step):
        stop = min(nbytes, start + step)
        for reader, tensor in zip(readers, tensors, strict=True):
            reader.gather.fill(tensor, start, stop, 0)
        yield _Pair(start, readers[0].stage[: stop - start], readers[1].stage[: stop - start])
    for reader in readers:
        reader.gather.release()


def _measured(readers: tuple[_StageReader, _StageReader], key: str, spec: Spec) -> Changed:
    import torch

    first, count = -1, 0
    signal = noise = worst = 0.0
    dtype = getattr(torch, spec.dtype, None) if BITS[spec.dtype] >= 8 else None
    for pair in _pairs(readers, key):
        n = min(
            len(pair.a) * 8 // BITS[spec.dtype], spec.numel - pair.start * 8 // BITS[spec.dtype]
        )
        raw_a, raw_b = (unpack(bytes(x), Spec(spec.dtype, (n,))) for x in (pair.a, pair.b))
        unlike = raw_a != raw_b
        if not unlike.any():
            if dtype is not None:
                signal += _square(_numbers(pair.a, dtype))
            continue
        if first < 0:
            first = pair.start * 8 // BITS[spec.dtype] + int(unlike.argmax())
        count += int(unlike.sum())
        if dtype is None:
            continue
        a, b = _numbers(pair.a, dtype), _numbers(pair.b, dtype)
        error = (a - b).abs()
        # equal infinities and two NaNs are no error
        error[(a == b) | (a.isnan() & b.isnan())] = 0
        signal += _square(a)
        noise += _square(error)
        top = float(error.max())
        worst = top if math.isnan(top) or top > worst else worst
    index = coordinates(first, spec.shape)
    if dtype is None:
        return Changed(key, index, count, None, None)
    return Changed(key, index, count, worst, _ratio(signal, noise))


def _ratio(signal: float, noise: float) -> float:
    if noise == 0:
        return math.inf
    if math.isnan(noise) or math.isnan(signal) or math.isinf(signal):
        return math.nan
    return -math.inf if signal == 0 or math.isinf(noise) else 10 * math.log10(signal / noise)


def _numbers(packed: memoryview, dtype: torch.dtype) -> torch.Tensor:
    import torch

    found = torch.frombuffer(bytearray(packed), dtype=dtype)
    return found.to(torch.complex128 if dtype.is_complex else torch.float64)


def _square(numbers: torch.Tensor) -> float:
    return float((numbers.abs() ** 2).nan_to_num(nan=math.nan, posinf=math.inf).sum())
