"""Two checkpoints compared: the answers of `verify` and `diff`, and differences in keys, specs,
bytes, side files, values, ties and flags.

Bytes are compared without torch and numpy. Only what differs is measured, a stage at a time, in
float64.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import formats
from ..core import log
from ..core.errors import fail, listed, option, plural, printable
from ..core.spec import BITS, Spec, coordinates
from ..core.templates import rank_of
from ..core.types import Progress
from ..elements.raw import unpack
from ..extra_state.states import States
from ..planning.graph import ReadKey, Tensor
from ..planning.optimizers import DROP
from ..planning.path import find_path
from ..planning.request import OPTIMIZER_PARAM, OUTPUT_FORMATS, STALE_OPTIMIZER
from ..planning.sides import SideFiles
from ..planning.stored import stored_tensor
from ..results import DiffReport, VerifyEstimate, VerifyReport
from ..source.blobs import ChunkedTensor
from ..source.index import with_all_tensors
from ..source.pickle.jsonform import to_json
from ..source.pickle.tree import DictNode, ListNode, joined, segment
from ..source.target import node_of
from ..source.tree import CheckpointTree, flatten_table, tensor_records
from . import stamp as stamps
from .checks import check_all_records
from .evaluator import Evaluator
from .gather import Gather
from .geometry import STAGE, ByteLayouts
from .output_tree import groups_of, items_of_index, output_tree
from .prepare import compose_for, path_state_for, side_reader, stamp_of, without_optimizers
from .verify import Mismatch, Recomputation, Unlooked, choose_sample, estimate_seconds, left_out_of

if TYPE_CHECKING:
    import torch

    from ..planning.compose import Composition
    from ..planning.request import Request
    from ..source.index import Index, Source
    from ..source.tree import FileTree


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
    part: slice = slice(None),
) -> VerifyReport:
    """Whether `made` is what `opened` gives when it is computed again.

    What was applied is read from the stamp of `made`, unless the request says it. `share` and
    `seed` choose a sample. `compare` and `part` are what this process does of it, if not all.
    """
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
    before, (opened, _) = stamp_of(opened)[0], without_optimizers(opened, request)
    migration_path = find_path(
        opened.index, side_reader(opened), before, request, applied, States(opened)
    )
    notes += [
        *migration_path.remarks,
        *(d.message for d in migration_path.warnings if d.code == "M518"),
    ]
    path_state = path_state_for(opened, migration_path, os.path.isdir(made.path))
    composition = compose_for(
        opened, migration_path, request, path_state, programs=True, prove=False
    )
    differences = spec_differences(composition, made)
    wrong = {d["key"] for d in differences}
    programs = {key: program for key, program in composition.programs.items() if key not in wrong}
    if made.index.tree is not None:
        programs.update((key, ReadKey(key)) for key in opened.index.passed_through)
    both = with_all_tensors(opened), with_all_tensors(made)
    # a share of 1 leaves nothing to chance
    chosen = None if share in (None, 1) else choose_sample(programs, *both, share, seed)
    work = Recomputation(programs, *both, budget, chosen)
    if inform is not None:
        inform(VerifyEstimate.of(**work.announced(threads, estimate_seconds(work, threads))))
    if chosen is None:
        check_all_records(opened, part)
        check_all_records(made, part)
    near: list[dict[str, str]] = []
    for found in compare(work, threads, progress):
        first = "" if found.index is None else f", first at {list(found.index)}"
        (near if found.what == "near" else differences).append(
            {"key": found.key, "what": f"{found.detail}{first}"}
        )
    unread, unlooked = unread_outcome(opened, made, "opaque" in request.allow)
    if chosen is not None:
        unlooked += left_out_of(chosen, programs, both[1], any(one.index.sums() for one in both))
    differences += side_differences(opened, made, path_state.sides) + unread
    held, lost = formats.as_saved(opened, made.format)
    unlooked += _unlooked(lost, made.format)
    differences += item_differences(held, made, bool(migration_path.steps))
    differences += made_form_differences(held, composition, made)
    opened.check_unchanged()
    return VerifyReport.of(
        path=made.path,
        source=opened.path,
        equal=not differences,
        tensors=len(composition.graph.outputs),
        bytes=made.index.nbytes,
        memory=work.memory(threads),
        sample=None if chosen is None else chosen.to_json(both[1]),
        differences=differences,
        near=near,
        not_compared=[one.to_json() for one in unlooked],
        notes=notes,
    )


def compare_checkpoints(
    one: Source, other: Source, progress: Progress | None, *, tensors_only: bool
) -> DiffReport:
    """Where the two differ, and what was not looked at."""
    found = diff(with_all_tensors(one), with_all_tensors(other), progress=progress)
    side: list[dict[str, str]] = []
    others: list[dict[str, str]] = []
    notes: list[str] = []
    if tensors_only:
        unlooked = [Unlooked(what, "only tensors were asked for") for what in TENSORS_ONLY]
    else:
        unread, notes = unread_differences(one, other)
        side = side_differences(one, other, SideFiles(side_reader(one)))
        unlooked = not_compared(one, other)
        a, lost = formats.as_saved(one, other.format)
        b, also = formats.as_saved(other, one.format)
        unlooked += _unlooked(lost, other.format) + _unlooked(also, one.format)
        others = [*item_differences(a, b), *form_differences(a, b), *unread]
    return DiffReport.of(
        a=one.path,
        b=other.path,
        equal=found.equal and not (side or others),
        tensors_equal=found.equal,
        tensors=len(one.index.tensors),
        bytes=one.index.nbytes,
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
        notes=notes,
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
    """Keys of one side only, (key, spec of a, spec of b) that differ, tensors of other bytes."""

    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    specs: tuple[tuple[str, Spec, Spec], ...]
    bytes: tuple[Changed, ...]

    @property
    def equal(self) -> bool:
        return not (self.only_a or self.only_b or self.specs or self.bytes)


@log.phase("comparing tensors")
def diff(
    source_a: Source, source_b: Source, *, progress: Callable[[int, int], None] | None = None
) -> Difference:
    """The difference of two checkpoints in the order of their keys, however they are stored."""
    a, b = source_a.index.tensors, source_b.index.tensors
    shared = [k for k in a if k in b]
    specs = tuple((k, a[k].spec, b[k].spec) for k in shared if a[k].spec != b[k].spec)
    same = [k for k in shared if a[k].spec == b[k].spec]
    total, done = sum(a[k].spec.nbytes for k in same), 0
    readers = _StageReader(source_a), _StageReader(source_b)
    changed = []
    for key in same:
        if any(r.differ for r in _pairs(readers, key)):
            changed.append(_measured(readers, key, a[key].spec))
        done += a[key].spec.nbytes
        if progress is not None:
            progress(done, total)
    return Difference(
        tuple(k for k in a if k not in b), tuple(k for k in b if k not in a), specs, tuple(changed)
    )


class _StageReader:
    def __init__(self, source: Source) -> None:
        self.source = source
        self.stage = memoryview(bytearray(STAGE))
        layouts = ByteLayouts()
        self.gather = Gather(source, layouts, self.stage, Evaluator(source, layouts).leaf)

    def tensor(self, key: str) -> Tensor:
        return stored_tensor(key, self.source.index.tensors[key])


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


# as many as there are values, at most, that are compared one by one
MOST_CONTAINERS = 1_000_000


def spec_differences(composition: Composition, made: Source) -> list[dict[str, str]]:
    """Keys that are missing, too many, or of another spec than planned."""
    outputs, there = composition.graph.outputs, made.index.tensors
    out = [{"key": key, "what": "is not in the output"} for key in outputs if key not in there]
    out += [
        {"key": key, "what": "is in the output and nothing makes it"}
        for key in there
        if key not in outputs
    ]
    for key, tensor in outputs.items():
        if key in there and there[key].spec != tensor.spec:
            out.append({"key": key, "what": f"is {there[key].spec}, planned was {tensor.spec}"})
    return out


def side_differences(one: Source, other: Source, sides: SideFiles) -> list[dict[str, str]]:
    """Side files that differ or are missing, of two folders; `sides`: what `one`'s should be."""
    if not _both_folders(one, other):
        return []
    a, b = dict(sides.list_files(one.index.side_files)), dict(other.index.side_files)
    out = [
        {"key": name, "what": f"side file {printable(name, 300)} is in one of them only"}
        for name in sorted(a.keys() ^ b.keys())
    ]
    unlike = (
        n
        for n in sorted(a.keys() & b.keys())
        if a[n] != b[n] or sides.read_file(n) != other.side_file(n)
    )
    return out + [
        {"key": name, "what": f"side file {printable(name, 300)} differs"} for name in unlike
    ]


def unread_differences(
    one: Source, other: Source, names: tuple[str, str] = ("A", "B")
) -> tuple[list[dict[str, str]], list[str]]:
    """Values that are not decoded and differ, and notes on how the equal ones were compared."""
    if not (one.index.unread or other.index.unread):
        return [], []
    from ..source.unread import entry_contents

    a = entry_contents(one.index.unread, one.blobs)
    b = entry_contents(other.index.unread, other.blobs)
    differences: list[dict[str, str]] = []
    alike: list[str] = []
    whole: list[str] = []
    for path in sorted(a.keys() | b.keys()):
        x, y = a.get(path), b.get(path)
        name = (
            f"value {printable(path, 300)} ({printable((a.get(path) or b[path]).name, 100)}, "
            "not decoded)"
        )
        if x is None or y is None:
            differences.append({"key": path, "what": f"{name} is only in {names[x is None]}"})
        elif x.bytes != y.bytes or x.digest != y.digest:
            by = (
                "; it is too large to be compared but by the bytes of its file's pickle"
                if x.bytes or y.bytes
                else ""
            )
            differences.append({"key": path, "what": f"{name} differs{by}"})
        else:
            (whole if x.bytes else alike).append(printable(path, 300))
    notes = [
        (
            "not decoded, and equal by its canonical pickle stream and the bytes of its storages: "
            f"{listed(alike)}"
        )
    ] * bool(alike)
    return differences, [
        *notes,
        *[f"not decoded, and equal by the bytes of the whole pickle: {listed(whole)}"]
        * bool(whole),
    ]


def not_compared(one: Source, other: Source, names: tuple[str, str] = ("A", "B")) -> list[Unlooked]:
    """What two checkpoints hold and no comparison of the two looks at, stamps apart."""
    a, b = one.index, other.index
    out = []
    for name, index in zip(names, (a, b), strict=True):
        if index.left_out:
            files = plural(len(index.left_out), "file")
            out.append(
                Unlooked(
                    f"{files} beside {name}: {listed(list(index.left_out), 8)}",
                    "not part of the checkpoint",
                )
            )
        if index.side_files and not _both_folders(one, other):
            listing = listed([f.path for f in index.side_files], 8)
            out.append(
                Unlooked(f"side files of {name}: {listing}", "the other one is not a folder")
            )
        if _too_many(index):
            out.append(
                Unlooked(
                    f"values of {name} beyond the first {MOST_CONTAINERS:,}",
                    "too many to be compared one by one",
                )
            )
    if (a.tree is None) != (b.tree is None):
        out.append(
            Unlooked(
                "ties, flags of parameters, versions of modules and kinds of dicts",
                "only one of the two can hold these",
            )
        )
    if a.tree is not None and b.tree is not None and (moved := _moved(a, b)):
        out.append(
            Unlooked(
                f"the order of keys, which differs from {listed(moved, 1)} on",
                "dicts are compared key by key",
            )
        )
    # the default is written where the source says nothing
    said, other_said = ({"format": "pt", **index.metadata} for index in (a, b))
    if unlike := sorted(
        k for k in said.keys() | other_said.keys() if said.get(k) != other_said.get(k)
    ):
        out.append(
            Unlooked(
                f"metadata in the headers, which differs: {listed(unlike, 8)}",
                "text that no tensor depends on",
            )
        )
    return out


def _moved(a: Index, b: Index) -> list[str]:
    """Of tensors and values that both have, each first key that stands elsewhere in the other."""
    found = []
    both: tuple[tuple[Mapping[str, Any], Mapping[str, Any]], ...] = (
        (a.tensors, b.tensors),
        (a.passed_through, b.passed_through),
        (a.items, b.items),
    )
    for one, other in both:
        orders = (key for key in one if key in other), (key for key in other if key in one)
        found += [x for x, y in zip(*orders, strict=True) if x != y][:1]
    return found


TENSORS_ONLY = (
    "side files",
    "values that are not tensors",
    "ties, flags of parameters, versions of modules and kinds of dicts",
)


def _both_folders(one: Source, other: Source) -> bool:
    return os.path.isdir(one.path) and os.path.isdir(other.path)


def _too_many(index: Index) -> bool:
    """Whether the checkpoint has more values than are compared one by one."""
    parts = index.tree.parts if index.tree is not None else ()
    return len(index.items) >= MOST_CONTAINERS or any(
        _containers(part.root) >= MOST_CONTAINERS for part in parts
    )


def _containers(root: Any) -> int:
    seen: set[int] = set()
    stack = [root]
    while stack and len(seen) < MOST_CONTAINERS:
        node = stack.pop()
        if type(node) not in (DictNode, ListNode) or id(node) in seen:
            continue
        seen.add(id(node))
        held = (value for _, value in node.pairs) if type(node) is DictNode else node.items
        stack += [child for child in held if type(child) in (DictNode, ListNode)]
    return len(seen)


def unread_outcome(
    source: Source, made: Source, allowed: bool
) -> tuple[list[dict[str, str]], list[Unlooked]]:
    """For `verify`: differences in what is not decoded, and what it did not look at.

    No run writes what it did not decode. An output without it is what its source gives only if that
    was `allowed`.
    """
    names = ("the source", "the output")
    differences, _ = unread_differences(source, made, names)
    unlooked = not_compared(source, made, names)
    lost = [path for path in source.index.unread if path not in made.index.unread]
    if lost and allowed:
        differences = [d for d in differences if d["key"] not in lost]
        unlooked.append(
            Unlooked(
                f"what is not decoded and was left out of the output: {listed(lost, 20)}",
                option("allow", "opaque"),
            )
        )
    said = f"; if it was left out with {option('allow', 'opaque')}, say so here too"
    return [{**d, "what": d["what"] + said * (d["key"] in lost)} for d in differences], unlooked


def item_differences(one: Source, other: Source, moved: bool = False) -> list[dict[str, str]]:
    """Values that differ, other than tensors; where rules `moved` keys, those outside the dict."""
    a, b = _items(one.index, moved), _items(other.index, moved)
    held, made = (
        max(1, len(x.index.tree.parts)) if x.index.tree is not None else 1 for x in (one, other)
    )
    if moved and held != made:
        a = _of_ranks(a, held, made)
    known: dict[tuple[int, int], bool] = {}
    out = [
        {"key": path, "what": f"value {printable(path, 300)} is in one of them only"}
        for path in sorted(a.keys() ^ b.keys())
    ]
    out += [
        {"key": path, "what": f"value {printable(path, 300)} differs"}
        for path in sorted(a.keys() & b.keys())
        if not _same(a[path], b[path], known)
    ]
    kinds, others = _kinds(one.index, moved), _kinds(other.index, moved)
    unlike = (path for path in sorted(kinds.keys() & others.keys()) if kinds[path] != others[path])
    return out + [
        {
            "key": path,
            "what": f"value {printable(path, 300)} is made of other containers, or of ones "
            "with keys of another type or with other attributes",
        }
        for path in unlike
    ]


def _kinds(index: Index, moved: bool) -> dict[str, list[Any]]:
    """The kinds of containers by path, their keys' types, their attributes, and what a defaultdict
    calls or how long a deque may be; each once, without the dict.
    """
    out: dict[str, list[Any]] = {}
    texts: dict[int, str] = {}
    for rank, part in enumerate(index.tree.parts if index.tree is not None else ()):
        seen: set[int] = set()
        stack: list[tuple[Any, tuple[str, ...]]] = [(part.root, ())]
        while stack and len(seen) < MOST_CONTAINERS:
            node, path = stack.pop()
            if (
                type(node) not in (DictNode, ListNode)
                or id(node) in seen
                or (moved and node is part.table)
            ):
                continue
            seen.add(id(node))
            held = node.pairs if type(node) is DictNode else enumerate(node.items)
            if node is not part.table:
                types: list[str] = []
                said = None
                if type(node) is DictNode:
                    types = sorted({type(key).__name__ for key, _ in node.pairs})
                    said = node.attributes and _text(node.attributes, texts)
                made = node.node.arguments if node.kind in ("defaultdict", "deque") else ()
                out.setdefault(f"{joined(path, 300) or '.'}@{rank}", []).append(
                    (node.kind, types, said, to_json(made))
                )
            stack += [
                (child, (*path, segment(key)))
                for key, child in held
                if type(child) in (DictNode, ListNode)
            ]
    return out


def _same(a: Any, b: Any, known: dict[tuple[int, int], bool]) -> bool:
    """Equality that tells 1 from True and 0.0 from -0.0; `known` holds what was compared."""
    pair = (id(a), id(b))
    if pair not in known:
        known[pair] = repr(a) == repr(b)
    return known[pair]


def _items(index: Index, moved: bool) -> Mapping[str, Any]:
    if not moved or index.tree is None:
        return index.items
    roots = [".".join(part.at) for part in index.tree.parts if part.at is not None]
    if "" in roots:
        return {}
    return {
        path: value
        for path, value in index.items.items()
        if not any(path.startswith(f"{root}.") for root in roots)
    }


def _of_ranks(items: Mapping[str, Any], held: int, made: int) -> dict[str, Any]:
    """Values of `held` ranks as an output of `made` ranks has them: new ranks have rank 0's."""
    ranks: list[dict[str, Any]] = [{} for _ in range(held)]
    for path, value in items.items():
        name, _, rank = path.rpartition("@") if held > 1 else (path, "", "0")
        ranks[int(rank)][name] = value
    mark = "@{}" if made > 1 else ""
    return {
        path + mark.format(r): value
        for r in range(made)
        for path, value in ranks[r if r < held else 0].items()
    }


_Found = list[dict[str, str]]


def form_differences(one: Source, other: Source) -> _Found:
    """Where two checkpoints differ in ties, flags, versions and kinds, if both have a tree."""
    if one.index.tree is None or other.index.tree is None:
        return []
    return _compare(
        (_said_of(one.index.tree), _firsts(one.index)),
        (_said_of(other.index.tree), _firsts(other.index)),
    )


def made_form_differences(source: Source, composition: Composition, made: Source) -> _Found:
    """The same for an output and what rules make of its source, values among tensors too."""
    if made.index.tree is None:
        return []
    out = output_tree(source, composition, drop=True)
    found = _compare(
        (_said(out.rest.parts, out.rest.names), out.rest.first),
        (_said_of(made.index.tree), _firsts(made.index)),
    )
    if composition.items is None or source.index.tree is None:
        return found
    before, there = composition.items, items_of_index(made.index)
    if before.ranks != there.ranks:
        return found
    kept = len(made.index.tree.parts)
    groups = groups_of(out.rest, before.ranks)
    for name, was in before.names.items():
        if before.ranks and (rank_of(name) or 0) >= kept:
            # its rank has no file any more, which the plan says
            continue
        if name not in there.names:
            found.append(
                {"key": name, "what": f"value {printable(name, 300)} is not in the output"}
            )
        elif there.spelled(name) != (groups.get(name) or before.spelled(was)):
            found.append({"key": name, "what": f"value {printable(name, 300)} differs"})
    more = [name for name in there.names if name not in before.names]
    return found + [
        {"key": name, "what": f"value {printable(name, 300)} is in the output and nothing makes it"}
        for name in more
    ]


def _said_of(outline: CheckpointTree) -> dict[str, str]:
    return _said(outline.parts, outline.names)


def _compare(
    one: tuple[Mapping[str, str], Mapping[str, str]],
    other: tuple[Mapping[str, str], Mapping[str, str]],
) -> _Found:
    (a, ties_a), (b, ties_b) = one, other
    out = [
        {"key": what, "what": f"{printable(what, 300)} differs"}
        for what in sorted(a.keys() | b.keys())
        if a.get(what) != b.get(what)
    ]
    # a tensor that is in one of them only is a difference already
    both = [key for key in ties_a if key in ties_b]
    groups_a, groups_b = _groups(both, ties_a), _groups(both, ties_b)
    return out + [
        {
            "key": key,
            "what": f"{printable(key, 300)} is one tensor with others in one of them, and not in "
            "the other",
        }
        for key in both
        if groups_a[key] != groups_b[key]
    ]


def _groups(keys: Sequence[str], firsts: Mapping[str, str]) -> dict[str, str]:
    """For each key the first key that is one tensor with it in its rank's file."""
    found: dict[Any, str] = {}
    return {key: found.setdefault((firsts[key], rank_of(key)), key) for key in keys}


def _firsts(index: Index) -> dict[str, str]:
    """For each tensor the first one that is the same elements of one storage, often itself."""
    places: dict[Any, str] = {}
    out: dict[str, str] = {}
    ties = index.tree.ties if index.tree is not None else {}
    for key, stored in (*index.tensors.items(), *index.passed_through.items()):
        if key in ties:
            out[key] = ties[key]
        elif isinstance(stored, ChunkedTensor) or stored.storage is None or not stored.spec.nbytes:
            out[key] = key
        else:
            out[key] = places.setdefault(
                (stored.storage, stored.offset, stored.strides, stored.spec), key
            )
    return out


def _said(parts: Sequence[FileTree], names: Mapping[int, str]) -> dict[str, str]:
    """What the dicts that rules work on and all tensors say: a name of the fact -> its text."""
    out: dict[str, str] = {}
    texts: dict[int, str] = {}
    for rank, part in enumerate(parts):
        # of what is nested, each dict has a kind, and the tensors say the keys
        table = flatten_table(part, "").table
        if table is not None:
            mark = f"@{rank}" if len(parts) > 1 else ""
            out[f"the kind of the dict{mark}"] = table.kind
            for name, value in table.attributes.pairs if type(table.attributes) is DictNode else ():
                if type(value) is DictNode:
                    out.update(
                        {
                            f"{name} of `{key}`{mark}": _text(held, texts)
                            for key, held in value.pairs
                        }
                    )
                else:
                    out[f"the attribute {name}{mark}"] = _text(value, texts)
        for leaf in tensor_records([table, part.root]):
            if leaf.parameter or leaf.requires_grad or leaf.subclass is not None:
                out[f"the flags of {names[id(leaf)]}"] = (
                    f"{leaf.parameter} {leaf.requires_grad} {leaf.subclass}"
                )
            if leaf.state is not None:
                out[f"the attributes of {names[id(leaf)]}"] = _text(leaf.state, texts)
    return out


def _text(value: Any, texts: dict[int, str]) -> str:
    """The text of a value; one value can stand under many names."""
    if id(value) not in texts:
        texts[id(value)] = repr(to_json(node_of(value)))
    return texts[id(value)]
