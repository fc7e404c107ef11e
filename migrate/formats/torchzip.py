"""Files of torch.save: one `.pt`, `.pth`, `.bin` or `.ckpt`, shards with an index, or ranks.

What belongs to a checkpoint is decided as for safetensors: by the index where there is one, else by
names that leave no choice. Files that training leaves beside the weights (optimizer, scheduler,
arguments) are known by their names and never taken for them. Written files are what torch itself
writes: zip archives that any torch.load reads, by name of huggingface_hub's shards or of the ranks.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from ..core.errors import CheckpointError, Report, fail, listed, printable
from ..core.spec import Spec
from ..source import zip_archive
from ..source.blobs import FileBlob, Stored, StoredTensor
from ..source.index import FileSource, Index, Source
from ..source.jsontext import collector_paused
from ..source.paths import HISTORY, MAX_HISTORY, Folder, Place, look_beside, read_history
from ..source.pickle.jsonform import to_json
from ..source.pickle.machine import read_pickle
from ..source.pickle.nodes import ARCHIVE
from ..source.pickle.policy import Outside, decode, together
from ..source.pickle.tree import (
    Composite,
    DictNode,
    TensorRecord,
    dotted,
    inside,
    segment,
)
from ..source.shards import (
    INDEX,
    RANK_NAMES,
    WHICH_HELP,
    Entry,
    Naming,
    Unit,
    in_natural_order,
    index_in,
    indexed,
    join_ranks,
    rank_entries,
    shard_sets,
)
from ..source.table import choose_table, flatten_table, tensors_at_root
from ..source.target import Target, ValuesByPath, node_of, outside_prefix
from ..source.tree import (
    NODES,
    CheckpointTree,
    FileTree,
    TensorForm,
    dict_at,
    dropped_note,
    is_state,
    name_tensors_outside,
    place_tensor,
    prune,
    refuse_same_names,
    tensor_form,
    tensors_of,
    tensors_outside,
    unfit,
)
from ..source.unread import StreamPlace, Unread, unread_entries
from ..source.zip_archive import ArchiveRecord
from . import _signatures
from ._legacy import read_legacy

if TYPE_CHECKING:
    from ..source.target import TargetTree
    from ..source.unread import Unread
    from ._header import Origins


SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
_INDEXES = tuple(suffix + INDEX for suffix in SUFFIXES)
# what trainers leave beside the weights
_BESIDE = (
    "training_args.",
    "optimizer.",
    "scheduler.",
    "rng_state",
    "random_states",
    "scaler.",
    "sampler",
    "dl_state",
    "distrib_optim.",
)
# and what Megatron calls the weights of a rank
MEGATRON = ("model_optim_rng.pt", "model_rng.pt")


class TorchZip:
    """The format: `sniff`, `open` and `describe` as `formats.Format` asks."""

    name = "torch"
    suffixes = (*SUFFIXES, *_INDEXES)

    def sniff(self, place: Place) -> int:
        if place.file is None:
            # where a folder has both, safetensors is what others load too
            sure = 1 if any(n.endswith(".safetensors") for n in place.names) else 2
            return (
                sure
                if any(is_weights(n) or n.endswith(_INDEXES) for n in place.names) or _ranks(place)
                else 0
            )
        if place.file.name.endswith(SUFFIXES) or place.file.name.endswith(_INDEXES):
            return 2
        size = place.file.size
        tail = place.file.read(max(0, size - _signatures.TAIL), min(_signatures.TAIL, size))
        return int(
            _signatures.file_kind(place.head(_signatures.HEAD), size, tail)
            in ("zip", "legacy", "tar", "pickle")
        )

    def open(self, place: Place) -> Source:
        """The checkpoint at a file, an index or a folder: M901, M905, M907, M908, M914, M915, M920,
        M930 to M945.
        """
        if place.file is None:
            return _open_folder(place, None)
        if place.file.name.endswith(_INDEXES):
            return _open_folder(place, place.file.name)

        label = printable(place.path, 240)
        held = read_file(place.file, 0, label, place.at, carrying=place.carry)
        index = index_of([place.file.name], [[held]], label)
        return FileSource(
            place.path,
            "torch",
            index,
            [place.file],
            history=held.history,
            release=place.folder.close,
            suspend=place.folder.suspend,
        )

    def describe(
        self,
        specs: Mapping[str, Spec],
        *,
        folder: bool,
        max_shard_size: int,
        metadata: Mapping[str, str],
        stamp: str | None,
        origins: Origins | None = None,
        ranks: Naming | None = None,
        tree: TargetTree | None = None,
        last: Container[str] = (),
    ) -> Target:
        from ._torchwrite import describe

        return describe(
            specs, folder=folder, max_shard_size=max_shard_size, stamp=stamp, ranks=ranks, tree=tree
        )


FORMAT = TorchZip()


def is_weights(name: str) -> bool:
    """Whether a file is called as weights are, and not as what trainers leave beside them."""
    return name.endswith(SUFFIXES) and not name.startswith(_BESIDE)


def _ranks(place: Place) -> list[Entry]:
    if not any(n.startswith(RANK_NAMES) for n in place.names):
        return []
    # files beside the weights are no weights of anybody
    visible = Place(
        place.path,
        place.folder,
        place.file,
        tuple(n for n in place.names if not n.startswith(_BESIDE)),
        place.at,
    )
    return next(
        (found for suffix in (".pth", ".pt", ".bin") if (found := rank_entries(visible, suffix))),
        [],
    )


def _open_folder(place: Place, index_name: str | None) -> Source:
    folder = place.folder
    ranks = _ranks(place) if index_name is None else []
    if ranks:
        units = [_unit_of_rank(folder, entry) for entry in ranks]
    else:
        units = [
            _unit(
                folder,
                "",
                tuple(folder.names()) if index_name else place.names,
                index_name,
                place.file,
            )
        ]
    names = [name for unit in units for name in unit.names]
    indexes = [unit.index_name for unit in units if unit.index_name is not None]
    blobs: list[FileBlob] = []
    folder.expect(names, ends=True)
    try:
        held: list[list[TorchFile]] = []
        report, number = Report(), 0
        for unit in units:
            held.append([])
            for name in unit.names:
                # the files of one unit are flat, for a key must be sought somewhere
                at = place.at if len(unit.names) == 1 else "."
                try:
                    blobs.append(folder.open(name))
                    held[-1].append(
                        read_file(blobs[-1], number, folder.label(name), at, carrying=place.carry)
                    )
                except CheckpointError as error:
                    report.diagnostics += error.diagnostics
                number += 1
            if len(report.diagnostics) >= 20:
                break
        report.check()
        for unit, parts in zip(units, held, strict=True):
            _check_unit(folder, unit, parts)
        beside = look_beside(folder, frozenset((*names, *indexes)))
        history = read_history(folder, tuple(folder.names()))
        if history is None and len(names) == 1:
            history = held[0][0].history
        index = index_of(names, held, folder.label(""), beside.side_files, beside.left_out)
        return FileSource(
            place.path,
            "torch",
            index,
            blobs,
            history=history,
            side=beside.read,
            watched=beside.identities,
            locate=folder.current,
            release=place.close,
            suspend=place.folder.suspend,
        )
    except BaseException:
        for blob in blobs:
            blob.close()
        raise


def _unit_of_rank(folder: Folder, entry: Entry) -> Unit:
    if entry.names is None:
        return Unit([entry.name])
    return _unit(folder, f"{entry.name}/", entry.names, None, None)


def _unit(
    folder: Folder,
    below: str,
    names: Sequence[str],
    index_name: str | None,
    opened: FileBlob | None,
) -> Unit:
    """The files that belong together among the `names` of the folder `below`."""
    label = folder.label(below)
    index_name = index_name or index_in(names, SUFFIXES, label)
    if index_name is not None:
        return indexed(folder, below, names, index_name, opened)
    weights = [n for n in names if is_weights(n)]
    called = [n for n in (*MEGATRON, "pytorch_model.bin") if n in weights]
    if len(called) == 1:
        weights = called
    sets = shard_sets(weights)
    if len(weights) != 1 and (len(sets) != 1 or any(not shard_sets([n]) for n in weights)):
        fail(
            "M915",
            f"{label}: {len(weights)} files of torch.save and no index, so it is "
            f"unclear what belongs together: {listed(weights)}",
            help=WHICH_HELP,
        )
    if sets:
        sets[0].check_whole(label)
    return Unit([below + n for n in in_natural_order(weights)])


def _check_unit(folder: Folder, unit: Unit, parts: list[TorchFile]) -> None:
    """M915 unless the files of a unit are flat, hold each key once, and fit their index."""
    report = Report()
    for name, held in zip(unit.names, parts, strict=True):
        if len(parts) > 1 and not _is_shard(held):
            report.add(
                "M915",
                f"{folder.label(name)}: one of {len(parts)} files, and it holds more than tensors "
                "by name",
            )
    first: dict[Any, str] = {}
    twice: list[str] = []
    for name, held in zip(unit.names, parts, strict=True) if len(parts) > 1 else ():
        keys = dict.fromkeys((*held.tensors, *_keys(held)))
        twice += [
            f"{key} (in {first[key]} and {name})"
            for key in keys
            if first.setdefault(key, name) != name
        ]
    if twice:
        report.add("M915", f"{folder.label('')}: keys that occur in two files: {listed(twice)}")
    tables = [held.part.table for held in parts if len(parts) > 1 and held.part.table is not None]
    said = [to_json(node_of(table.attributes)) for table in tables if table.attributes is not None]
    if any(one != said[0] for one in said[1:]):
        report.add(
            "M915",
            f"{folder.label('')}: files of one state dict whose attributes (`_metadata`) differ",
            help=WHICH_HELP,
        )
    report.check()
    where = {
        key: name for name, held in zip(unit.names, parts, strict=True) for key in held.tensors
    }
    for name, held in zip(unit.names, parts, strict=True) if unit.weight_map is not None else ():
        # an index names the object, not what it is made of, and may name values that are no tensors
        for key, value in held.part.table.pairs if held.part.table is not None else ():
            if type(value) is Composite:
                named = [where.pop(name) for name, _ in value.keys(key)]
                where[key] = named[0]
            elif type(value) is not TensorRecord and key in (unit.weight_map or ()):
                where[key] = name
    if unit.weight_map is not None:
        wrong = [key for key, name in unit.weight_map.items() if where.get(key) != name]
        more = [f"{key} (in {where[key]})" for key in where if key not in unit.weight_map]
        more += [
            f"{path} (in {name})"
            for name, held in zip(unit.names, parts, strict=True)
            for path in _unnamed(held, unit.weight_map)
        ]
        label = folder.label(unit.index_name or "")
        if wrong:
            report.add(
                "M915", f"{label}: keys that are not in the file that it names: {listed(wrong)}"
            )
        if more:
            report.add("M915", f"{label}: keys that it does not name: {listed(more)}")
    report.check()


def _unnamed(held: TorchFile, weight_map: Mapping[str, str]) -> list[str]:
    """Paths of tensors outside of the index's dict, and in values there that it does not name."""

    at = held.part.at or ()
    paths = (
        [path for path, _ in tensors_outside(held.part.root, held.part.table)]
        if held.others
        else []
    )
    return [
        ".".join(path) for path in paths if path[: len(at)] != at or path[len(at)] not in weight_map
    ]


def index_of(
    names: list[str],
    units: list[list[TorchFile]],
    label: str,
    side_files: Any = (),
    left_out: tuple[str, ...] = (),
) -> Index:
    with collector_paused():
        parts = [unit[0] if len(unit) == 1 else _merged(unit) for unit in units]
        several = len(parts) > 1
        tensors = join_ranks([p.tensors for p in parts], label) if several else parts[0].tensors
        prefix = outside_prefix(tensors) if any(held.paths for held in parts) else ""
        carried: dict[str, Stored] = {}
        known: dict[int, str] = {}
        unread: dict[str, Unread] = {}
        for rank, held in enumerate(parts):
            mark = f"@{rank}" if several else ""
            for number, key in held.names.items():
                known[number] = key if not mark or (not rank and key in tensors) else key + mark
            for number, path in held.paths.items():
                known[number] = f"{prefix}{path}{mark}"
            carried.update(
                {f"{prefix}{path}{mark}": stored for path, stored in held.others.items()}
            )
            unread.update({path + mark: one for path, one in held.unread.items()})
        every = [held for unit in units for held in unit]
        outside = tuple(found for held in every for found in held.outside)
        carries = tuple(found for held in every for found in held.carried)
        tree = CheckpointTree(tuple(held.part for held in parts), known, carried, {})
        return Index(
            tensors,
            tuple(names),
            side_files,
            left_out,
            items={} if all(held.plain for held in parts) else ValuesByPath(tree.parts),
            tree=tree,
            outside=together(outside) if outside else (),
            carried=together(carries) if carries else (),
            unread=unread,
            notes=tuple(dict.fromkeys(note for held in every for note in held.notes)),
            sums=lambda: {
                (held.number, place.offset): (place.size, place.crc)
                for held in every
                for place in held.places.values()
                if place.crc is not None and place.size
            },
        )


def _is_shard(held: TorchFile) -> bool:
    """Whether a file is a flat dict, with no tensors below its values but those of extra states."""
    part = held.part
    if part.at != () or part.nested_dicts or any(type(key) is not str for key in _keys(held)):
        return False

    return not held.others or all(
        is_state(path[0]) for path, _ in tensors_outside(part.root, part.table)
    )


def _keys(held: TorchFile) -> list[Any]:
    return [] if held.part.table is None else [key for key, _ in held.part.table.pairs]


def _merged(unit: list[TorchFile]) -> TorchFile:
    """The files of one unit as if they were one."""
    tables = [held.part.root for held in unit]
    first = tables[0]
    attributes = next((table.attributes for table in tables if table.attributes is not None), None)
    root = DictNode(
        first.kind, tuple(pair for table in tables for pair in table.pairs), first.node, attributes
    )
    names = {number: name for held in unit for number, name in held.names.items()}
    tensors = {key: stored for held in unit for key, stored in held.tensors.items()}
    others: dict[str, Stored] = {}
    paths: dict[int, str] = {}
    unread: dict[str, Unread] = {}
    for held in unit:
        unread.update(
            {
                f"{path}#{held.number}" if path in unread else path: one
                for path, one in held.unread.items()
            }
        )
        # one path can spell two places, as keys have dots
        called = {path: f"{path}#{held.number}" if path in others else path for path in held.others}
        others.update({called[path]: stored for path, stored in held.others.items()})
        paths.update({number: called[path] for number, path in held.paths.items()})
    return replace(
        unit[0],
        part=FileTree(root, ()),
        tensors=tensors,
        names=names,
        others=others,
        paths=paths,
        unread=unread,
        plain=all(held.plain for held in unit),
    )


@dataclass(frozen=True, slots=True, eq=False)
class TorchFile:
    """What one file holds. `tensors` are those of the dict that rules work on, by key; `others` all
    the other ones, by path.

    `names` has the keys of the former and `paths` the paths of the latter, by the identity of their
    records. `places` are its storages, and `number` is that of the file among all.
    """

    part: FileTree
    tensors: Mapping[str, StoredTensor]
    others: dict[str, Stored]
    names: dict[int, str]
    paths: dict[int, str]
    outside: tuple[Outside, ...]
    carried: tuple[Outside, ...]
    notes: tuple[str, ...]
    places: Mapping[str, ArchiveRecord]
    number: int
    history: bytes | None
    unread: Mapping[str, Unread]
    # a flat dict of tensors, and nothing else
    plain: bool


class Raw(NamedTuple):
    """The decoded tree of a file, and where the bytes of its stream and of each storage lie."""

    root: Any
    places: Mapping[str, ArchiveRecord]
    outside: tuple[Outside, ...]
    history: bytes | None
    hidden: frozenset[str]
    stream: tuple[int, int]
    # archives have checksums, memory has none
    summed: bool = True
    # one object for streams that say the same but for plain values, and one for archives that are
    # laid out alike
    form: Any = None
    layout: Any = None


def read_file(
    blob: FileBlob | None,
    number: int,
    label: str,
    at: str | None,
    raw: Raw | None = None,
    *,
    rest: bool = True,
    carrying: bool = False,
    like: FileForm | None = None,
) -> TorchFile:
    """What the file that is blob `number` holds; `label` names it in messages, `at` is the dict
    that rules work on. `raw` is what was decoded of it, or of no file; without the `rest` that dict
    is all that is held, with a note of what was left out. `like` is the form of another file whose
    stream has the form of this one's, with as many keys in its dicts.

    M930 to M936 and M940 to M945 for an unsound file of torch.save, M935 never:
    `TorchFile.outside` says what was left out.
    """
    with collector_paused():
        if raw is None:
            raw = read_raw(cast("FileBlob", blob), label)
        root, refused, notes, unread = raw.root, raw.outside, [], {}
        carried: tuple[Outside, ...] = ()
        outside: tuple[Outside, ...] = ()
        if like is not None:
            part = FileTree(root, like.file.part.at)
        else:
            if not rest:
                root, path, beside = _alone(root, at, label)
                at = "." if path else at
                # an entry names its first places only
                refused = tuple(
                    one
                    for one in refused
                    if one.count > len(one.paths)
                    or any(f"{place}.".startswith(dotted((*path, ""))) for place in one.paths)
                )
                notes += [
                    f"only the dict that rules work on is taken, without {listed(beside, 12)}"
                ] * bool(beside)
            left_out, more = unfit(root)
            outside = (*refused, *more)
            if left_out or outside:
                kept = None
                if carrying:
                    from ..source.carrying import carry

                    sizes = {key: place.size for key, place in raw.places.items()}
                    kept = carry(root, left_out, sizes)
                root, gone = prune(root, left_out)
                unread = unread_entries(
                    gone, StreamPlace(number, raw.stream, raw.places, raw.hidden)
                )
                if kept is not None:
                    root, carried, outside = kept, outside, ()
                else:
                    notes += [dropped_note([printable(one.path) for one in gone])] * bool(gone)
            part = flatten_table(FileTree(root, choose_table(root, at, label)), label)
        if part.at is None and (why := tensors_at_root(root)) is not None:
            notes.append(f"{label}: {why}")
        if part.nested_dicts:
            where = f"`{printable('.'.join(part.at))}`" if part.at else "the file"
            notes.append(f"{where} is made of dicts; rules see their keys joined by dots")
        if like is not None and raw.layout is not None and raw.layout is like.layout:
            tensors, names, others, paths = like.placed(part, raw.places, number, label)
            plain, unsummed = like.file.plain, 0
        else:
            tensors, names = _table(part, raw.places, number, label)
            table = part.table
            plain = (
                table is not None
                and table is part.root
                and table.attributes is None
                and all(type(value) is TensorRecord for _, value in table.pairs)
            )
            others, paths = ({}, {}) if plain else _others(part, raw.places, number)
            unsummed = sum(one.crc is None and one.size > 0 for one in raw.places.values())
    if unsummed and raw.summed:
        notes.append(
            f"{label}: {unsummed} of {len(raw.places)} storages have no checksum; damage to them "
            "would not be noticed"
        )
    return TorchFile(
        part,
        tensors,
        others,
        names,
        paths,
        outside,
        carried,
        tuple(notes),
        raw.places,
        number,
        raw.history,
        unread,
        plain,
    )


class FileForm:
    """What was found out about a `file`, which holds for others whose streams have its form; and
    where their tensors lie in archives of the `layout` of its own, None where that is not known.
    """

    def __init__(self, file: TorchFile, layout: Any) -> None:
        self.file, self.layout = file, layout
        pairs = table.pairs if (table := file.part.table) is not None else ()
        numbers = [n for n, (_, value) in enumerate(pairs) if id(value) in file.names]
        stored = [*file.tensors.values(), *file.others.values()]
        chains = _chains(file.part.root, table, file.paths)
        if (
            len(numbers) < 2
            or len(numbers) < len(file.tensors)
            or chains is None
            or not all(type(one) is Stored and one.storage is not None for one in stored)
        ):
            self.layout = None
            return
        self._held, self._chains = itemgetter(*numbers), chains
        self._paths = list(file.others)
        self._specs, _, self._offsets, self._strides, storages = zip(*stored, strict=True)
        self._storages = [name for _, name in storages]
        self._key, self._offset = next((k, at.offset) for k, at in file.places.items())

    def placed(
        self, part: FileTree, places: Mapping[str, ArchiveRecord], number: int, label: str
    ) -> tuple[dict[str, Stored], dict[int, str], dict[str, Stored], dict[int, str]]:
        """As `_table` and `_others`, of a file whose archive is laid out so."""
        table = part.table
        keys, records = zip(*self._held(table.pairs if table is not None else ()), strict=True)
        further = places[self._key].offset - self._offset
        rows = zip(
            self._specs,
            repeat(number),
            [offset + further for offset in self._offsets],
            self._strides,
            zip(repeat(number), self._storages),
            strict=False,
        )
        stored = list(map(tuple.__new__, repeat(Stored), rows))
        others = [_at(part.root, chain) for chain in self._chains]
        tensors = dict(zip(keys, stored, strict=False))
        if len(tensors) < len(keys):
            refuse_same_names(list(zip(keys, records, strict=True)), label)
        return (
            tensors,
            dict(zip(map(id, records), keys, strict=True)),
            dict(zip(self._paths, stored[len(keys) :], strict=True)),
            dict(zip(map(id, others), self._paths, strict=True)),
        )


def _chains(
    root: Any, table: DictNode | None, paths: Mapping[int, str]
) -> list[tuple[int, ...]] | None:
    """Where in the tree each of these tensors stands, as places in dicts and lists; None where they
    stand in no plain one, or in the table, whose keys parts have otherwise.
    """
    found: dict[int, tuple[int, ...]] = {}
    seen: set[int] = set()
    stack: list[tuple[Any, tuple[int, ...]]] = [(root, ())]
    while stack:
        node, chain = stack.pop()
        if type(node) is TensorRecord:
            found.setdefault(id(node), chain)
        elif node is not table and type(node) in NODES and id(node) not in seen:
            seen.add(id(node))
            held = [v for _, v in node.pairs] if type(node) is DictNode else node.items
            kinds = NODES | {TensorRecord}
            stack += [(v, (*chain, at)) for at, v in enumerate(held) if type(v) in kinds]
    return [found[one] for one in paths] if found.keys() >= paths.keys() else None


def _at(root: Any, chain: tuple[int, ...]) -> Any:
    """What stands in a tree at these places."""
    for at in chain:
        root = root.pairs[at][1] if type(root) is DictNode else root.items[at]
    return root


def form_of(held: TorchFile, layout: Any) -> FileForm | None:
    """The form of a file that was read; None unless all that the file says is in its tree, with a
    dict for rules that needed no change and no note: so that what was found out about it holds for
    every tree of the form.
    """
    known = held.part.at is not None and not held.part.nested_dicts
    if not known or held.outside or held.carried or held.unread or held.notes:
        return None
    return FileForm(held, layout)


def _alone(root: Any, at: str | None, label: str) -> tuple[Any, tuple[str, ...], list[str]]:
    """The dict that rules work on, its path, and the paths of what stands around it."""
    path = choose_table(root, at, label) or ()
    around: list[str] = []
    for depth, part in enumerate(path):
        around += [
            printable(".".join((*path[:depth], segment(key))))
            for key, _ in inside(dict_at(root, path[:depth]) or root)
            if segment(key) != part
        ]
    return dict_at(root, path) or root, path, around


class FilesAlike:
    """Reads what files of one kind say alike once, in their archives and in their streams."""

    def __init__(self) -> None:
        from ..source.pickle.alike import StreamsAlike
        from ..source.zip_alike import ArchivesAlike

        self.archives, self.streams = ArchivesAlike(), StreamsAlike()


def read_raw(blob: FileBlob, label: str, like: FilesAlike | None = None) -> Raw:
    """The tree of a file, decoded and not yet looked at; `like` reads what files say alike once."""
    size = blob.size
    head = blob.read(0, min(_signatures.HEAD, size))
    found = "zip"
    if not head.startswith(_signatures.ZIP):
        tail = blob.read(max(0, size - _signatures.TAIL), min(_signatures.TAIL, size))
        found = _signatures.file_kind(head, size, tail)
    if found == "legacy":
        legacy = read_legacy(blob, label=label)
        decoded = decode(
            legacy.value, label, {key: record.size for key, record in legacy.records.items()}
        )
        end = min((record.offset for record in legacy.records.values()), default=size)
        return Raw(decoded.tree, legacy.records, decoded.outside, None, decoded.hidden, (0, end))
    if found != "zip":
        _signatures.refuse_kind(label, found)
    layout = None
    if like is not None:
        archive, places, sizes, layout = like.archives.read(blob, label)
    else:
        archive = zip_archive.read_archive(blob, label=label)
        places = {
            name[5:]: record for name, record in archive.records.items() if name.startswith("data/")
        }
        sizes = {key: record.size for key, record in places.items()}
    stream = zip_archive.read_record(blob, archive.records["data.pkl"], ARCHIVE.size, label)
    if like is not None:
        decoded = like.streams.decode(stream, sizes, label)
    else:
        nodes = read_pickle(stream, ARCHIVE, name=f"{label}: data.pkl", persistent=True)
        decoded = decode(nodes, label, sizes)
    history = archive.records.get(HISTORY)
    stamp = None if history is None else zip_archive.read_record(blob, history, MAX_HISTORY, label)
    written = archive.records["data.pkl"]
    return Raw(
        decoded.tree,
        places,
        decoded.outside,
        stamp,
        decoded.hidden,
        (written.offset, written.size),
        form=decoded.form,
        layout=layout,
    )


def _table(
    part: FileTree, places: Mapping[str, ArchiveRecord], number: int, label: str
) -> tuple[dict[str, Stored], dict[int, str]]:
    """The tensors of the dict that rules work on, and their keys by identity."""
    table = part.table
    held = tensors_of(table)
    known: dict[tuple[Any, ...], TensorForm] = {}
    tensors: dict[str, Stored] = {}
    for key, record in held:
        sort = (record.dtype, record.shape, record.strides)
        form = known.get(sort)
        if form is None:
            form = known[sort] = tensor_form(*sort)
        tensors[key] = place_tensor(record, form, places[record.storage.key], number)
    if len(tensors) < len(held):
        refuse_same_names(held, label)
    return tensors, {id(record): key for key, record in held}


def _others(
    part: FileTree, places: Mapping[str, ArchiveRecord], number: int
) -> tuple[dict[str, Stored], dict[int, str]]:
    """Tensors of all other places by path, and their paths by identity; shared ones are in both."""
    named = name_tensors_outside(part)
    others = {}
    for name, record in named:
        form = tensor_form(record.dtype, record.shape, record.strides)
        others[name] = place_tensor(record, form, places[record.storage.key], number)
        if record.node is None:
            # the bytes of a carried value's storage, which are nobody else's in the output
            others[name] = others[name]._replace(storage=None)
    return others, {id(record): name for name, record in named}
