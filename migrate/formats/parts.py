"""Checkpoints of parts with coordinates, as Megatron writes them: one set of keys out of all parts.

Everything is known from the streams of the parts: which of them there are, what their arguments
say, which layers and experts each holds. What is missing, what does not agree and what is not
joined is refused by name before a tensor is read. Parts along the axes that number layers and
experts are joined for each tensor-parallel rank, and become one tree as a single file would have
it; what parts have otherwise beside the model is kept by part, see `source.by_part`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from ..core.errors import CheckpointError, Report, fail, listed, option, plural, printable
from ..source.blobs import FileBlob
from ..source.by_part import PARTS, Sharing, is_optimizer
from ..source.grids import Axis, PartGrid, Replica, WrittenGrid
from ..source.index import FileSource, Source
from ..source.jsontext import collector_paused
from ..source.paths import Place, look_beside, read_history
from ..source.pickle.tree import DictNode
from ..source.shards import MAX_RANKS
from ..source.tree import is_flat
from . import _megatron
from ._joinparts import MIXED, Member, RankOfParts, RanksAlike, contradict, with_value
from ._megatron import Facts, Numbers
from .base import SURE
from .torchzip import FORMAT as TORCH
from .torchzip import (
    MEGATRON,
    FileForm,
    FilesAlike,
    Raw,
    TorchFile,
    form_of,
    index_of,
    is_weights,
    read_file,
    read_raw,
)

if TYPE_CHECKING:
    from ..core.spec import Spec
    from ..source.target import Target, TargetTree

MODEL = "model"
_AXES = ("TP", "PP", "EP")
# what `parts` may say that a second number counts
_SECOND = {"stages": "PP", "experts": "EP"}
_COUNTED = {"PP": "pipeline stages", "EP": "expert groups"}
_MOST_STAGES = 100_000
_FETCH = "fetch them again: the tensors of a checkpoint are whole only with all its parts"


class TorchParts:
    """The format: `sniff`, `open` and `describe` as `formats.Format` asks."""

    name = "torch"
    suffixes = MEGATRON

    def sniff(self, place: Place) -> int:
        return SURE if find(place) is not None else 0

    def open(self, place: Place) -> Source:
        """The checkpoint of the parts at a folder, or one part of it; raises as `open_parts`."""
        found = find(place)
        if found is None:
            return TORCH.open(place)
        return open_parts(place, found)

    def describe(
        self,
        specs: Mapping[str, Spec],
        *,
        stamp: str | None,
        tree: TargetTree | None = None,
        grid: WrittenGrid | None = None,
        **asked: Any,
    ) -> Target:
        """As the format of single files has it, or, with a grid, all of its parts."""
        if grid is None:
            return TORCH.describe(specs, stamp=stamp, tree=tree, **asked)
        from ._partswrite import describe

        return describe(specs, grid, stamp=stamp, tree=tree)


FORMAT = TorchParts()


class PartFile(NamedTuple):
    """A part's weights, by the path in the checkpoint, and the numbers in its name. `optimizer`:
    the state of the distributed optimizer lies beside them.
    """

    path: str
    called: str
    numbers: tuple[int, ...]
    optimizer: str | None


class Found(NamedTuple):
    files: list[PartFile]
    alone: bool


def find(place: Place) -> Found | None:
    """The parts in a folder, or the part that a folder or a file is; None where there is none.

    M915 where they are not the only weights of the folder.
    """
    if place.file is not None:
        if place.file.name not in MEGATRON:
            return None
        state = place.folder.locate(_megatron.OPTIMIZER) and [_megatron.OPTIMIZER]
        part = _part(place.folder.called, "", place.file.name, state or ())
        return part and Found([part], True)
    called = place.folder.called
    if _megatron.PART.fullmatch(called):
        held = [name for name in MEGATRON if name in place.names]
        part = _part(called, "", held[0], place.names) if held else None
        return part and Found([part], True)
    files = []
    for name in place.names:
        if not _megatron.PART.fullmatch(name) or not place.folder.is_folder(name):
            continue
        within = tuple(place.folder.names(name))
        held = [weights for weights in MEGATRON if weights in within]
        files += [part for one in held[:1] if (part := _part(name, f"{name}/", one, within))]
    if files and (others := [name for name in place.names if is_weights(name)]):
        fail(
            "M915",
            f"{place.folder.label('')}: holds {plural(len(files), 'part')} of a checkpoint, and "
            f"beside them {listed(others)}",
            help="pass the file that you mean, or move away what does not belong here",
        )
    return Found(files, False) if files else None


def _part(called: str, below: str, name: str, beside: Sequence[str]) -> PartFile | None:
    match = _megatron.PART.fullmatch(called)
    if match is None:
        return None
    numbers = tuple(int(number) for number in match.groups() if number is not None)
    state = f"{below}{_megatron.OPTIMIZER}" if _megatron.OPTIMIZER in beside else None
    return PartFile(f"{below}{name}", called, numbers, state)


@dataclass(slots=True)
class _Part:
    """An opened part. `numbers` are what its dicts count, by virtual stage, and `tensor`, `stage`
    and `group` its coordinates.
    """

    file: PartFile
    raw: Raw
    facts: Facts
    tensor: int = 0
    stage: int = 0
    group: int = 0
    numbers: Sequence[Numbers] = ()

    @property
    def called(self) -> str:
        return self.file.called

    @property
    def models(self) -> list[DictNode]:
        held = self.facts.models
        return [held[number] for number in sorted(held, key=lambda n: -1 if n is None else n)]


@collector_paused()
def open_parts(place: Place, found: Found) -> Source:
    """The checkpoint of these parts. Beyond what one file of torch.save is refused for: M914 for
    too many, M920 naming all that are missing, M924 where they do not agree with each other or with
    their arguments, M925 for what is not joined.
    """
    folder, blobs = place.folder, list[FileBlob]()
    if place.parts is not None and place.parts not in _SECOND:
        fail(
            "M115",
            f"`parts` is {printable(repr(place.parts))}; there are {listed(list(_SECOND))}",
        )
    label = printable(place.path, 240) if place.file is not None else folder.label("")
    try:
        parts: list[_Part] = []
        report, like = Report(), FilesAlike()
        shared: Sharing | None = None
        if len(found.files) > MAX_RANKS:
            fail("M914", f"{label}: {len(found.files)} parts, more than {MAX_RANKS}")
        if place.file is None:
            folder.expect([file.path for file in found.files], ends=True)
        for file in found.files:
            try:
                blob = place.file or folder.open(file.path)
                blobs.append(blob)
                raw = read_raw(blob, folder.label(file.path), like)
                if shared is None and type(raw.root) is DictNode and not parts:
                    shared = Sharing(raw.root)
                elif shared is not None and type(raw.root) is DictNode:
                    raw = raw._replace(root=shared.root(raw.root, raw.form))
                parts.append(_Part(file, raw, _megatron.facts_of(raw.root)))
            except CheckpointError as error:
                report.diagnostics += error.diagnostics
                if len(report.diagnostics) >= 20:
                    break
        report.check()
        _agree(parts, label)
        grid, layers = _grid_of(parts, found.alone, place.parts, label)
        _require_different(parts, label)
        numbered = None if layers is None or not grid.joined else _first_numbers(layers)
        # what counts the parameters of a part counts those of no whole model
        keep = not grid.joined or (found.alone and len(parts[0].models) == 1)
        held = _read(parts, grid, numbered, place, keep)
        units, replicas = _join(parts, held, grid, label)
        untied = (parts[0].facts.args or {}).get(_megatron.UNTIED)
        if not grid.alone and (why := _megatron.tie_contradicted(untied, units[0].tensors)):
            contradict(label, why, help="the arguments are those of another model: fetch it again")
        names = [part.file.path for part in parts]
        state = [part.file.optimizer for part in parts if part.file.optimizer is not None]
        state += [] if keep else _states(parts)
        grid = replace(grid, replicas=replicas, optimizers=tuple(state))
        if layers is not None and not grid.alone and all(part.models for part in parts):
            called = _megatron.folder_of(folder.called, parts[0].facts)
            grid = replace(grid, again=partial(_again, parts, grid, layers, called))
        beside = None
        if place.file is None:
            beside = look_beside(folder, frozenset(names))
        index = index_of(
            names,
            [[unit] for unit in units],
            label,
            beside.side_files if beside else (),
            beside.left_out if beside else (),
        )
        index = replace(
            index,
            notes=_megatron.iteration_note(folder.called, parts[0].facts.iteration) + index.notes,
            grid=grid
            if parts[0].facts.args is not None or prod(a.size for a in grid.axes) > 1 or state
            else None,
            sums=lambda: {
                (one.number, record.offset): (record.size, record.crc)
                for one in held
                for record in one.places.values()
                if record.crc is not None and record.size
            },
        )
        history = read_history(folder, tuple(folder.names())) if beside else None
        if history is None and len(parts) == 1:
            history = parts[0].raw.history
        return FileSource(
            place.path,
            "torch",
            index,
            blobs,
            history=history,
            side=beside.read if beside else None,
            watched=beside.identities if beside else None,
            locate=folder.current,
            release=place.close if place.file is None else folder.close,
        )
    except BaseException:
        for blob in blobs:
            blob.close()
        raise


def _agree(parts: Sequence[_Part], label: str) -> None:
    """M924 unless all parts say the same of the model and of how far it was trained."""
    first = parts[0]
    report = Report()
    for part in parts:
        if len(part.file.numbers) != len(first.file.numbers):
            contradict(label, f"{first.called} and {part.called} are not parts of one grid")
        version = part.facts.version
        if type(version) in (int, float) and version < _megatron.OLDEST_VERSION:
            fail(
                "M925",
                f"{label}: {part.called} is of checkpoint_version {version}, whose rows of "
                "queries, keys and values are in another order",
                help="load it with Megatron and save it again",
            )
    if any((part.facts.args is None) != (first.facts.args is None) for part in parts):
        without = [part.called for part in parts if part.facts.args is None]
        contradict(label, f"parts without args, beside others that have them: {listed(without, 8)}")
    for name in ("iteration", *_megatron.DESCRIBING, *_megatron.OF_RUN):
        said = _said(first, name)
        other = next((part for part in parts if _said(part, name) != said), None)
        if other is not None:
            report.add(
                "M924",
                f"{label}: `{name}` is {_shown(said)} in {first.called} and "
                f"{_shown(_said(other, name))} in {other.called}",
                help=MIXED,
            )
    report.check()


def _require_different(parts: Sequence[_Part], label: str) -> None:
    """M924 where two parts are one: a file of the same rank with the same bytes in every storage.

    The rank alone does not tell, because a program that converts writes all parts with its own.
    """
    known: dict[tuple[int, frozenset[tuple[str, int, int | None]]], _Part] = {}
    ranks = [(part.facts.args or {}).get(_megatron.RANK) for part in parts]
    counts = Counter(rank for rank in ranks if type(rank) is int)
    if len(counts) == len(parts) > 1:
        at = [(part.stage, part.group, part.tensor) for part in parts]
        for one, other in _megatron.exchanged(at, ranks):
            what = f"{parts[one].called} is of rank {ranks[one]}, and {parts[other].called} "
            contradict(
                label, f"{what}behind it of rank {ranks[other]}: they were exchanged", help=_FETCH
            )
    for part, rank in zip(parts, ranks, strict=True):
        if type(rank) is not int or counts[rank] < 2:
            continue
        sums = frozenset((name, at.size, at.crc) for name, at in part.raw.places.items())
        if not sums or any(crc is None for _, _, crc in sums):
            continue
        same = known.setdefault((rank, sums), part)
        if same is not part:
            contradict(
                label,
                f"{same.called} and {part.called} are the same part, that of rank {rank}",
                help=_FETCH,
            )


def _said(part: _Part, name: str) -> Any:
    return part.facts.iteration if name == "iteration" else (part.facts.args or {}).get(name)


def _shown(value: Any) -> str:
    return printable(repr(value), 80)


def _grid_of(
    parts: list[_Part], alone: bool, said: str | None, label: str
) -> tuple[PartGrid, list[list[int]] | None]:
    """The grid, with the coordinates of each part entered in it, and how many layers each virtual
    stage and stage has; None where nothing says it.
    """
    facts = parts[0].facts
    sizes = _coordinates(parts, alone, said, label)
    virtual = _virtual(parts, label)
    if sizes["PP"] * virtual > _MOST_STAGES:
        fail("M914", f"{label}: more than {_MOST_STAGES} virtual stages")
    if not alone:
        _complete(parts, sizes, label)
    parts.sort(key=lambda part: (part.tensor, part.stage, part.group))
    joined = sizes["PP"] * sizes["EP"] * virtual > 1
    # most parts have the same names
    numbers_in = cache(_megatron.numbers_in)
    for part in parts:
        names = [tuple(k for k, _ in model.pairs if type(k) is str) for model in part.models]
        part.numbers = [numbers_in(held) for held in names]
        if joined and not (
            names and all(is_flat(model) or not model.pairs for model in part.models)
        ):
            fail(
                "M925",
                f"{label}: {part.called} has no flat dict `{MODEL}` of tensors, as older releases "
                "of Megatron write it, and such parts are not joined",
                help="load it with Megatron Core and save it again",
            )
    layers = _layers(parts, sizes["PP"], virtual, alone, label)
    _experts(parts, sizes["EP"], label)
    axes = [Axis(name, sizes[name], _at(parts[0], name) if alone else None) for name in _AXES]
    axes[2:2] = [Axis("VPP", virtual)] * (virtual > 1)
    alone = alone and prod(axis.size for axis in axes if axis.name in _AXES) > 1
    grid = PartGrid(
        tuple(axes),
        tuple(part.file.path for part in parts),
        facts.layers if facts.layers is not None or layers is None else sum(map(sum, layers)),
        alone,
        joined,
    )
    return grid, layers


def _again(
    parts: Sequence[_Part], grid: PartGrid, layers: Sequence[Sequence[int]], folder: str
) -> WrittenGrid:
    """How the parts are written so again; without an order where none is that of all of them."""
    names = ([key for key, _ in model.pairs] for part in parts for model in part.models)
    order = _megatron.order_of([key for key in row if type(key) is str] for row in names) or ()
    known = {axis.name: axis.size for axis in grid.axes}
    sizes = {axis: known.get(axis, 1) for axis in _megatron.SIZES}
    file = parts[0].file.path.rpartition("/")[2]
    called: dict[int, list[str]] = {}
    for part in parts:
        called.setdefault(part.tensor, []).append(part.called)
    return WrittenGrid(_megatron.NAME, sizes, layers, folder, file, order, tuple(called.values()))


def _first_numbers(layers: Sequence[Sequence[int]]) -> list[list[int]]:
    """The number of the first layer of each virtual stage and stage."""
    first, at = [], 0
    for row in layers:
        first.append([at + sum(row[:p]) for p in range(len(row))])
        at += sum(row)
    return first


def _coordinates(
    parts: Sequence[_Part], alone: bool, said: str | None, label: str
) -> dict[str, int]:
    """The sizes of the axes of files, with the coordinates of the parts entered."""
    facts, numbers = parts[0].facts, len(parts[0].file.numbers)
    stages, groups = facts.size("PP"), facts.size("EP")
    if stages is not None and groups is not None:
        counted = (stages > 1) + (groups > 1)
        if counted != numbers - 1:
            contradict(
                label,
                f"args say PP {stages} x EP {groups}, so that names have "
                f"{plural(counted + 1, 'number')}, and there is {parts[0].called}",
            )
    second = _second(parts, said, label) if numbers == 2 else "PP"
    for part in parts:
        part.tensor, *rest = part.file.numbers
        part.stage = rest[0] if rest and second == "PP" else 0
        part.group = rest[-1] if len(rest) == 2 or (rest and second == "EP") else 0
    most = {
        "TP": max(part.tensor for part in parts) + 1,
        "PP": max(part.stage for part in parts) + 1,
        "EP": max(part.group for part in parts) + 1,
    }
    sizes = {axis: facts.size(axis) or most[axis] for axis in _AXES}
    for axis in {1: (), 2: (second,), 3: ("PP", "EP")}[numbers]:
        if sizes[axis] == 1 and not alone:
            fail(
                "M920",
                f"{label}: names such as {parts[0].called} are those of several {_COUNTED[axis]}, "
                "and there is one",
                help=f"{_FETCH}; {parts[0].called} itself can be read alone",
            )
    for axis in _AXES:
        if most[axis] > sizes[axis]:
            beyond = [part.called for part in parts if _at(part, axis) >= sizes[axis]]
            contradict(
                label,
                f"args say {axis} {sizes[axis]}, and beyond that there is {listed(beyond, 8)}",
            )
    if prod(sizes.values()) > MAX_RANKS:
        fail("M914", f"{label}: a grid of {prod(sizes.values())} parts, more than {MAX_RANKS}")
    return sizes


def _at(part: _Part, axis: str) -> int:
    return {"TP": part.tensor, "PP": part.stage, "EP": part.group}[axis]


def _second(parts: Sequence[_Part], said: str | None, label: str) -> str:
    """What the second of two numbers counts: args decide, then the keys, then a person."""
    facts = parts[0].facts
    stages, groups = facts.size("PP"), facts.size("EP")
    if stages is not None and groups is not None:
        decided = "PP" if stages > 1 else "EP"
        if said is not None and _SECOND[said] != decided:
            contradict(
                label,
                f"args say PP {stages} x EP {groups}, and not that numbers count {said}",
                help=f"leave {option('params', f'parts={said}')} out",
            )
        return decided
    whole = [
        _megatron.is_whole({key for model in part.models for key, _ in model.pairs})
        for part in parts
    ]
    if said is not None:
        return _SECOND[said]
    if all(one is None for one in whole):
        contradict(
            label,
            f"the second number of {parts[0].called} is that of a pipeline stage or of an expert "
            "group, and neither args nor keys say which",
            help=f"say it: {' or '.join(option('params', f'parts={w}') for w in _SECOND)}",
        )
    return "EP" if all(whole) else "PP"


def _virtual(parts: Sequence[_Part], label: str) -> int:
    """How many virtual stages each stage has."""
    most = max(len(part.facts.models) for part in parts)
    for part in parts:
        if None in part.facts.models and len(part.facts.models) > 1:
            contradict(label, f"{part.called} has `{MODEL}` and virtual stages beside it")
    for part in parts:
        held = part.facts.models
        absent = [f"{MODEL}{n}" for n in range(most) if n not in held] if None not in held else []
        if len(held) < most and not absent:
            absent = [f"{MODEL}{n}" for n in range(most)]
        if held and absent:
            has = next(other.called for other in parts if len(other.facts.models) == most)
            contradict(label, f"{part.called} lacks {listed(absent, 8)}", f"{has} has {most} dicts")
    said = parts[0].facts.size("VPP")
    if said is not None and parts[0].facts.models and said != max(most, 1):
        contradict(
            label,
            f"args say {plural(said, 'virtual stage')}, and {parts[0].called} has {most}",
        )
    return max(most, 1)


def _complete(parts: Sequence[_Part], sizes: Mapping[str, int], label: str) -> None:
    """M924 where two files stand for one part, M920 naming all parts that are missing."""
    there: dict[tuple[int, int, int], _Part] = {}
    for part in parts:
        same = there.setdefault((part.tensor, part.stage, part.group), part)
        if same is not part:
            contradict(label, f"two stand for one part: {same.called} and {part.called}")
    count = prod(sizes.values())
    if len(there) == count:
        return
    absent = []
    for tensor in range(sizes["TP"]):
        for stage in range(sizes["PP"]):
            for group in range(sizes["EP"]):
                if (tensor, stage, group) not in there:
                    name = f"mp_rank_{tensor:02}"
                    name += f"_{stage:03}" if sizes["PP"] > 1 else ""
                    name += f"_{group:03}" if sizes["EP"] > 1 else ""
                    absent.append(f"{name} (TP {tensor}, PP {stage}, EP {group})")
    fail(
        "M920",
        f"{label}: {len(absent)} of {count} parts are missing: {listed(absent, 20)}",
        help=_FETCH,
    )


def _layers(
    parts: Sequence[_Part], stages: int, virtual: int, alone: bool, label: str
) -> list[list[int]] | None:
    """How many layers each virtual stage and stage has; None where nothing says it."""
    if stages * virtual > 1:
        _one_stack(parts, label)
    counts: dict[tuple[int, int], int] = {}
    for part in parts:
        for number, held in enumerate(part.numbers):
            absent = _absent(held.layers)
            where = part.called + (f", {MODEL}{number}" if virtual > 1 else "")
            if absent:
                contradict(
                    label,
                    f"{where} has {plural(len(held.layers), 'layer')} up to number "
                    f"{max(held.layers)}, and lacks {listed(absent, 8)}",
                )
            count = counts.setdefault((number, part.stage), len(held.layers))
            if count != len(held.layers):
                contradict(
                    label,
                    f"{where} has {plural(len(held.layers), 'layer')}, and another part of its "
                    f"stage {count}",
                )
    said = _megatron.spread(parts[0].facts, stages, virtual)
    if isinstance(said, str) and stages * virtual > 1:
        contradict(
            label,
            f"args contradict themselves: {said}",
            help="if they were changed after saving, take the parts as they were saved",
        )
    whole = all(not held.others for part in parts for held in part.numbers)
    expected = said if isinstance(said, list) and whole else None
    for (number, stage), count in counts.items() if expected is not None else ():
        due = expected[number][stage] if expected is not None else count
        if due != count and (stages * virtual > 1 or count):
            one = next(part for part in parts if part.stage == stage)
            contradict(
                label,
                f"by args {one.called} has {plural(due, 'layer')}"
                + (f" in {MODEL}{number}" if virtual > 1 else "")
                + f", and its keys have {count}",
            )
    if said is None or isinstance(said, str):
        if alone and virtual > 1:
            contradict(
                label,
                f"nothing says which layers of the model the {virtual} virtual stages of "
                f"{parts[0].called} have",
                help="pass the folder of all parts",
            )
        if (alone and stages > 1) or not counts:
            return None
        said = [[counts.get((v, p), 0) for p in range(stages)] for v in range(virtual)]
    return said


def _absent(numbers: Collection[int]) -> list[str]:
    """The first numbers from 0 on that are missing below the largest."""
    largest, found = max(numbers, default=-1), list[str]()
    for number in range(largest):
        if number not in numbers:
            found.append(str(number))
            if len(found) == 9:
                break
    return found


def _one_stack(parts: Sequence[_Part], label: str) -> None:
    """M925 unless the layers that are numbered over stages are those of one stack."""
    homes: dict[str, set[tuple[int, int]]] = {}
    stacks: set[str] = set()
    for part in parts:
        for number, held in enumerate(part.numbers):
            stacks.update({held.stack} if held.stack else ())
            for name in held.others:
                homes.setdefault(name, set()).add((number, part.stage))
    several = sorted(name for name, there in homes.items() if len(there) > 1)
    if len(stacks) > 1:
        several = [f"{stack}.layers" for stack in sorted(stacks)]
    if several:
        fail(
            "M925",
            f"{label}: layers of {listed(several, 4)} stand in several stages, and only those of "
            "one decoder, or of one encoder, are numbered over stages",
            help="load it with Megatron and save it with a single stage",
        )


def _experts(parts: Sequence[_Part], groups: int, label: str) -> None:
    """M924 unless every group has the same experts; M925 for what holds them otherwise."""
    facts, counts = parts[0].facts, dict[int, str]()
    for part in parts:
        for held in part.numbers:
            if not (held.experts or held.grouped):
                continue
            if facts.expert_tensor is not None:
                fail(
                    "M925",
                    f"{label}: experts are cut for "
                    f"{plural(facts.expert_tensor, 'tensor-parallel rank')} and the rest for "
                    f"{facts.size('TP')}, and such parts are not joined",
                    help="save it with expert_tensor_parallel_size equal to "
                    "tensor_model_parallel_size, or as a distributed checkpoint",
                )
            if held.grouped and facts.experts is not None and facts.experts % groups:
                contradict(label, f"args say {facts.experts} experts in {groups} groups")
            if not held.experts:
                continue
            if absent := _absent(held.experts):
                contradict(label, f"{part.called} lacks experts: {listed(absent, 8)}")
            if held.lost:
                contradict(label, f"{part.called} lacks {printable(held.lost)}")
            counts.setdefault(len(held.experts), part.called)
    if len(counts) > 1:
        contradict(
            label,
            "expert groups of different sizes: "
            + ", ".join(f"{called} has {count}" for count, called in list(counts.items())[:4]),
        )
    if counts and facts.experts is not None:
        (count,) = counts
        if facts.experts % groups or facts.experts // groups != count:
            contradict(
                label,
                f"args say {facts.experts} experts in {plural(groups, 'group')}, and "
                f"{counts[count]} has {count}",
            )


def _read(
    parts: Sequence[_Part],
    grid: PartGrid,
    first: list[list[int]] | None,
    place: Place,
    keep: bool,
) -> list[TorchFile]:
    """What the files hold, with one dict of the model in each, under the numbers of the whole."""
    if grid.joined and len(parts) > 1 and place.at not in (None, MODEL):
        fail(
            "M945",
            f"{place.folder.label('')}: parts are joined, and what they have at "
            f"`{printable(place.at or '')}` is not",
            help=f"leave {option('at')} out, or pass one part alone",
        )
    held = []
    # of streams that say the same but for plain values, in archives that are laid out alike, what
    # the first of them holds
    known: dict[tuple[int, int], FileForm] = {}
    renamed = cache(_renamed)
    for number, part in enumerate(parts):
        raw = part.raw
        if grid.joined and len(parts) > 1 and raw.root.get(PARTS) is not None:
            fail(
                "M925",
                f"{place.folder.label(part.file.path)}: has a value `{PARTS}` of its own, where "
                "what differs between parts is kept once they are joined",
                help="rename or remove it, or pass one part alone",
            )
        if grid.joined:
            raw = raw._replace(root=_renamed_root(part, first, keep, renamed))
        named = place.folder.label(part.file.path)
        sort = id(raw.form), id(raw.layout)
        like = None if raw.form is None else known.get(sort)
        found = read_file(None, number, named, place.at, raw, carrying=place.carry, like=like)
        if like is None and raw.form is not None and (form := form_of(found, raw.layout)):
            known[sort] = form
        held.append(found)
    return held


def _renamed(names: tuple[Any, ...], layer: int, expert: int) -> list[Any]:
    """The names of a part by the numbers of the whole: of tensor-parallel ranks they are the same
    texts.
    """
    name = _megatron.renumber(layer, expert)
    return [name(key) if type(key) is str else key for key in names]


def _renamed_root(
    part: _Part,
    first: list[list[int]] | None,
    keep: bool,
    renamed: Callable[[tuple[Any, ...], int, int], list[Any]],
) -> DictNode:
    """The root with one dict `model` in the place of all that the part has, its names `renamed`;
    without the state of its optimizer unless that is to `keep`.
    """
    pairs: list[tuple[Any, Any]] = []
    versions: list[tuple[Any, Any]] = []
    for number, model in enumerate(part.models):
        held = part.numbers[number]
        at = first[number][part.stage] if first is not None else 0
        expert = part.group * len(held.experts)
        names = renamed(tuple([key for key, _ in model.pairs]), at, expert)
        pairs += zip(names, [value for _, value in model.pairs], strict=True)
        if type(model.attributes) is DictNode:
            said = model.attributes.get("_metadata")
            modules = said.pairs if type(said) is DictNode else ()
            names = renamed(tuple([key for key, _ in modules]), at, expert)
            versions += zip(names, [value for _, value in modules], strict=True)
    like = part.models[0]
    attributes = like.attributes
    if type(attributes) is DictNode and type(attributes.get("_metadata")) is DictNode:
        known = attributes.get("_metadata")
        made = DictNode(known.kind, tuple(dict(versions).items()), known.node, known.attributes)
        attributes = with_value(attributes, "_metadata", made)
    model = DictNode(like.kind, tuple(pairs), like.node, attributes)
    root, done = list[tuple[Any, Any]](), False
    for key, value in part.raw.root.pairs:
        if any(value is one for one in part.models):
            root += [] if done else [(MODEL, model)]
            done = True
        elif keep or not is_optimizer(key, value):
            root.append((key, value))
    given = part.raw.root
    return DictNode(given.kind, tuple(root), given.node, given.attributes)


def _states(parts: Sequence[_Part]) -> list[str]:
    """Where parts have state of optimizers that a joined tree has no place for."""
    return [
        f"{part.file.path}: {key}"
        for part in parts
        for key, value in part.raw.root.pairs
        if is_optimizer(key, value)
    ]


def _join(
    parts: Sequence[_Part], held: Sequence[TorchFile], grid: PartGrid, label: str
) -> tuple[list[TorchFile], dict[str, Sequence[Replica]]]:
    """What each tensor-parallel rank holds, and what stands in several parts."""
    by_rank: dict[int, list[Member]] = {}
    for part, one in zip(parts, held, strict=True):
        member = Member(part.file.path, part.called, part.stage, one)
        by_rank.setdefault(part.tensor, []).append(member)
    tied = parts[0].facts.tied and len({part.stage for part in parts}) > 1
    replicas: dict[str, Sequence[Replica]] = {}
    units: list[TorchFile] = []
    several = len(by_rank) > 1
    alike = RanksAlike()
    for tensor, members in by_rank.items():
        if len(members) == 1:
            units.append(members[0].content)
            continue
        rank = RankOfParts(members, tied, label, alike)
        units.append(rank.joined)
        mark = f"@{tensor}" if several else ""
        replicas.update({f"{key}{mark}": found for key, found in rank.replicas.items()})
    for tensor, unit in enumerate(units[1:], 1):
        if grid.joined and (unlike := units[0].tensors.keys() ^ unit.tensors.keys()):
            contradict(
                label,
                f"TP ranks 0 and {tensor} do not have the same keys: {listed(sorted(unlike), 4)}",
            )
    return units, replicas
