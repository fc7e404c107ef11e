"""A folder of torch.distributed.checkpoint (DCP): `.metadata`, and data files with the chunks.

`.metadata` says which tensors there are, how each is cut into chunks and where the archive of each
chunk lies; how the elements lie in an archive, only the archive tells. All of them are opened, and
what contradicts `.metadata` is refused. Its `planner_data` gives the nested dict that was saved,
which is the tree of this checkpoint as that of a `.pt` file is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from ..core.errors import CheckpointError, Report, fail, listed, plural, printable
from ..core.spec import Spec
from ..source.blobs import (
    CHANGED_HELP,
    FileBlob,
    Identity,
    StoredTensor,
    Stretch,
    describe_change,
    difference,
    foreseeing,
)
from ..source.index import FileSource, Index, Source
from ..source.jsontext import collector_paused
from ..source.paths import METADATA, Folder, Place, look_beside, metadata_files, read_history
from ..source.pickle.dcp_metadata import (
    BytesEntry,
    Metadata,
    read_metadata,
    read_metadata_of_ranks,
)
from ..source.pickle.dcp_stream import SavedPart
from ..source.pickle.nodes import METADATA as LIMITS
from ..source.pickle.policy import Outside, together
from ..source.pickle.tree import SCALARS, TOP, DictNode, TensorRecord, inside
from ..source.table import choose_table, flatten_table, tensors_at_root
from ..source.target import Target, items_of, outside_prefix
from ..source.tree import (
    NODES,
    CheckpointTree,
    FileTree,
    RemovedEntry,
    dropped_note,
    name_tensors_outside,
    prune,
    refuse_same_names,
    replace_values,
    tensors_of,
    unfit,
)
from ..source.unread import Unread, unread_entries
from ._dcpchunks import SPILLED, ChunkReader, SavedValue
from ._dcptree import build_tree, gaps_note

if TYPE_CHECKING:
    from ..source.shards import Naming
    from ..source.target import TargetTree

DATA = ".distcp"
# what Megatron puts beside them: `torch_dist.py`
COMMON, MARKER = "common.pt", "metadata.json"
_DATA_FILES = (DATA, ".safetensors")
# bytes in front of the elements of an archive with one tensor, and behind them, are fewer
_EDGE = 4096
_DATA_OF_RANK = re.compile(r"__([0-9]{1,7})_[0-9]+" + re.escape(DATA))


class Dcp:
    """The format: `sniff`, `open` and `describe` as `formats.Format` asks."""

    name = "dcp"

    def sniff(self, place: Place) -> int:
        if metadata_files(place.names):
            return 2
        data = any(name.endswith(DATA) for name in place.names)
        return int(data) if place.file is None else 2 * int(data)

    def open(self, place: Place) -> Source:
        """The checkpoint in a folder, which may be given by its `.metadata`: M901, M905, M907, M914
        to M917, M930 to M938, M940 to M942, M945.
        """
        if place.file is not None:
            if place.file.name != METADATA:
                _refuse_part(place)
            place.file.close()
        else:
            _check_alone(place)
        return open_folder(place, self.name)

    def rename(
        self, source: Source, origins: Mapping[str, str], tree: TargetTree, stamp: str | None
    ) -> Target | None:
        """The target that has the source's data files under new names, if nothing else changes."""
        from ._dcprename import rename

        return rename(source, origins, tree, stamp)

    def describe(
        self,
        specs: Mapping[str, Spec],
        *,
        folder: bool,
        max_shard_size: int,
        metadata: Mapping[str, str],
        stamp: str | None,
        origins: Any = None,
        ranks: Naming | None = None,
        tree: TargetTree | None = None,
        last: Container[str] = (),
        chunks: int | None = None,
        anew: Callable[[str], bool] | None = None,
    ) -> Target:
        from ._dcpwrite import describe

        return describe(
            specs,
            folder=folder,
            max_shard_size=max_shard_size,
            stamp=stamp,
            tree=tree,
            chunks=chunks,
            anew=anew,
        )


FORMAT = Dcp()


class EntryArrangement(NamedTuple):
    """How the entries of a folder stand in the tree of the checkpoint, where not `planner_data`
    says it.

    `common` is a file of torch.save with the values beside the entries, `others` are more files
    that are read and not carried. `arrange` makes the tree of the entries and these values; it
    gives the tensors that it makes their places.
    """

    common: str
    others: tuple[str, ...]
    arrange: Callable[[Mapping[str, Any], Any, dict[int, StoredTensor], str, Report], DictNode]


def open_folder(place: Place, name: str, arrangement: EntryArrangement | None = None) -> Source:
    """The checkpoint whose `.metadata` is in the folder of a place, as one of the format `name`.
    Raises as `Dcp.open`.
    """
    folder = place.folder
    files = metadata_files(folder.names())
    if not files:
        refuse_without_metadata(place)
    metadata, watched = _read_metadata(folder, files)
    if arrangement is None and (metadata.megatron or metadata.planner is None):
        _check_whole(folder)
    beside_them = () if arrangement is None else (arrangement.common,)
    blobs: list[FileBlob] = []
    reader: ChunkReader | None = None
    try:
        report = Report()
        for file in (*metadata.files, *beside_them):
            try:
                blobs.append(folder.open(file))
            except CheckpointError as error:
                report.diagnostics += error.diagnostics
        report.check()
        others = () if arrangement is None else arrangement.others
        watched.update({path: at for path in others if (at := folder.locate(path)) is not None})
        beside = look_beside(folder, frozenset((*files, *metadata.files, *beside_them, *others)))
        named = {blob.name: (number, blob) for number, blob in enumerate(blobs)}
        # places in what an arrangement cuts up do not tell which form it was taken to have
        lazily = place.lazily if arrangement is None else None
        reader = ChunkReader(named, folder.label, report, lazily, place.extensions)
        with collector_paused(), foreseeing(blobs, _edges(metadata, named)):
            index = _index(metadata, blobs, reader, report, place, arrangement)
        index = replace(index, side_files=beside.side_files, left_out=beside.left_out)
        source = FileSource(
            place.path,
            name,
            index,
            blobs,
            history=read_history(folder, tuple(folder.names())),
            side=partial(_side_file, folder, watched, beside.read),
            watched={**beside.identities, **watched},
            locate=folder.current,
            release=partial(_close, folder, reader),
            suspend=folder.suspend,
            confirm=reader.confirm,
            save_id=metadata.save_id,
        )
        if reader.spilled is not None:
            source.blobs = (*blobs, reader.spilled)
        return source
    except BaseException:
        for blob in blobs:
            blob.close()
        if reader is not None and reader.spilled is not None:
            reader.spilled.close()
        raise


def _check_alone(place: Place) -> None:
    """M915 where safetensors lie beside `.metadata`: either could be the checkpoint."""
    if others := [
        n for n in place.names if n.endswith((".safetensors", ".safetensors.index.json"))
    ]:
        label, other = place.folder.label(""), place.folder.label(others[0])
        # what each rank left names no checkpoint by itself
        way = (
            f"give the path of one: {place.folder.label(METADATA)} or {other}"
            if METADATA in place.names
            else f"give the path of {other}, or move it elsewhere"
        )
        fail(
            "M915",
            f"{label}: holds a distributed checkpoint and {listed(others, 4)}, so it is unclear "
            "which of them is meant",
            help=way,
        )


def _refuse_part(place: Place) -> NoReturn:
    """M937 for a data file or what one rank says, which is no checkpoint by itself."""
    folder = place.folder.label("")
    if metadata_files(place.folder.names()):
        fail(
            "M937",
            f"{printable(place.path, 240)}: a part of the distributed checkpoint in {folder}",
            help="give the path of the folder",
        )
    refuse_without_metadata(place)


def refuse_without_metadata(place: Place) -> NoReturn:
    """M937 for data files without their `.metadata`."""
    held = [name for name in place.folder.names() if name.endswith(DATA)]
    fail(
        "M937",
        f"{place.folder.label('')}: files of torch.distributed.checkpoint without their "
        f"`{METADATA}`",
        notes=(f"it holds {listed(held, 4)}",),
        help="saving it was interrupted, or it was copied in part: take an earlier checkpoint, or "
        "fetch it again",
    )


def _check_whole(folder: Folder) -> None:
    """M937 for a checkpoint that Megatron did not finish; `metadata.json` is written last."""
    if COMMON in folder.names():
        fail(
            "M937",
            f"{folder.label('')}: a checkpoint of Megatron without its `{MARKER}`",
            help="saving it was interrupted, or it was copied in part: take an earlier "
            "checkpoint, or fetch it again",
        )


def _ranks(names: Iterable[str], files: Sequence[str]) -> list[int]:
    """The ranks that there have to be where so many left their files, and those that left data."""
    data = {int(found[1]) for name in names if (found := _DATA_OF_RANK.fullmatch(name))}
    return sorted(data.union(range(len(files))))


def _read_metadata(folder: Folder, files: list[str]) -> tuple[Metadata, dict[str, Identity]]:
    """What these files say together, and what each of them is."""
    label = folder.label("")
    if files[0] != METADATA and (
        lost := [
            rank for rank in _ranks(folder.names(), files) if f"__{rank}{METADATA}" not in files
        ]
    ):
        fail(
            "M938",
            f"{label}: {plural(len(files), 'rank')} left `__{{rank}}{METADATA}`, and "
            f"{listed([f'__{rank}{METADATA}' for rank in lost], 4)} is missing",
            help="fetch it again, or take an earlier checkpoint",
        )
    sizes = {
        name: held.size
        for name in folder.names()
        if name.endswith(_DATA_FILES) and (held := folder.locate(name)) is not None
    }
    watched: dict[str, Identity] = {}

    def content(name: str) -> bytes:
        blob = folder.open(name)
        try:
            if blob.size > LIMITS.size:
                fail(
                    "M914",
                    f"{folder.label(name)}: has {blob.size:,} bytes, allowed are {LIMITS.size:,}",
                )
            watched[name] = blob.identity
            return blob.read(0, blob.size)
        finally:
            blob.close()

    if files[0] == METADATA:
        # without a name of their own, for these bytes may be many
        return read_metadata(content(METADATA), folder.label(METADATA), sizes), watched
    found = read_metadata_of_ranks({name: content(name) for name in files}, label, sizes)
    return found, watched


def _close(folder: Folder, reader: ChunkReader) -> None:
    folder.close()
    if reader.spilled is not None:
        reader.spilled.close()


def _side_file(
    folder: Folder, watched: Mapping[str, Identity], others: Callable[[str], bytes], path: str
) -> bytes:
    """A file beside the data, `.metadata` among them; M905 if that is not what was opened."""
    if path not in watched:
        return others(path)
    blob = folder.open(path)
    try:
        if change := difference(watched[path], blob.identity):
            fail("M905", describe_change(blob.name, change), help=CHANGED_HELP)
        return bytes(blob.read(0, blob.size))
    finally:
        blob.close()


def _index(
    metadata: Metadata,
    blobs: Sequence[FileBlob],
    reader: ChunkReader,
    report: Report,
    place: Place,
    arrangement: EntryArrangement | None,
) -> Index:
    """What the folder holds. Everything that contradicts `.metadata` comes out at once.

    The tensors of `metadata` are taken out of it.
    """
    folder, at = place.folder, place.at
    if metadata.reformed:
        fail(
            "M937",
            f"{folder.label('')}: Megatron saved {plural(len(metadata.reformed), 'tensor')} in "
            f"another shape than they have: {listed(list(metadata.reformed), 4)}",
            help="save the checkpoint without the state of the distributed optimizer",
        )
    leaves: dict[str, Any] = {}
    # by the identity of a leaf: where its elements lie, or the archives that it was read from
    placed: dict[int, StoredTensor] = {}
    archives: dict[int, tuple[SavedValue, ...]] = {}
    outside: list[Outside] = []
    data = frozenset(metadata.files)
    unused = sum(blob.size for blob in blobs if blob.name in data) - _used(metadata)
    for key in list(metadata.tensors):
        # there may be a million, and each is needed once
        saved = reader.tensor(key, metadata.tensors.pop(key))
        if saved is None:
            if reader.enough:
                break
            continue
        leaves[key] = saved.leaf
        if saved.stored is not None:
            placed[id(saved.leaf)] = saved.stored
        if saved.archives:
            archives[id(saved.leaf)] = saved.archives
            outside += [one for held in saved.archives for one in _named(held.outside, key)]
    for key, value in metadata.bytes.items():
        if reader.enough:
            break
        held = reader.value(key, value)
        if held is not None:
            leaves[key] = held.value
            # equal numbers and texts are one object
            if type(held.value) not in SCALARS:
                archives[id(held.value)] = (held,)
            outside += _named(held.outside, key)
    for copy in metadata.copies:
        if not reader.enough:
            reader.compare(copy)
    common = None
    if arrangement is not None and not reader.enough:
        size = next(blob.size for blob in blobs if blob.name == arrangement.common)
        common = reader.value("", BytesEntry(SavedPart(arrangement.common, 0, size, ())))
    reader.summarize()
    report.check()
    label = folder.label(METADATA)
    gaps: list[str] = []
    if arrangement is None or common is None:
        root, gaps = build_tree(leaves, metadata.planner, label, report)
    else:
        archives[id(common.value)] = (common,)
        outside += common.outside
        root = arrangement.arrange(leaves, common.value, placed, label, report)
    report.check()
    leaves.clear()
    left_out, more = unfit(root)
    outside += more
    notes, unread = [], {}
    carried: list[Outside] = []
    if left_out or outside:
        kept = _carried(root, archives, left_out, reader) if place.carry else None
        root, gone = prune(root, left_out)
        unread = _unread(gone, archives)
        if kept is not None:
            root, carried, outside = kept, outside, []
        else:
            notes += [dropped_note([printable(one.path) for one in gone])] * bool(gone)
    where = folder.label("")
    part = flatten_table(FileTree(root, choose_table(root, at, where)), where)
    if part.at is None and (why := tensors_at_root(root)) is not None:
        notes.append(why)
    if part.nested_dicts:
        nested = f"`{printable('.'.join(part.at))}`" if part.at else "the checkpoint"
        notes.append(f"{nested} is made of dicts; rules see their keys joined by dots")
    if gaps:
        notes.append(gaps_note(gaps))
    if reader.unsummed:
        notes.append(
            f"{reader.unsummed} stored chunks have no checksum; damage to them would not be noticed"
        )
    if len(reader.rounded) > len(reader.precise):
        notes.append(
            f"the scale of {listed([printable(key) for key in reader.rounded], 4)} has no more "
            "digits than bfloat16: most likely it was rounded to bfloat16 when it was saved, as "
            "torch does it in a distributed checkpoint with current scaling. Then the numbers are "
            "off by up to 0.4 %, and nothing brings the scale back"
        )
    if unused:
        notes.append(f"{unused:,} bytes of the data files belong to no entry")
    placed.update(reader.placed)
    held_in_table = tensors_of(part.table)
    tensors = {name: placed[id(record)] for name, record in held_in_table}
    if len(tensors) < len(held_in_table):
        refuse_same_names(held_in_table, where)
    names = {id(record): name for name, record in held_in_table}
    table = part.table
    plain = table is root and all(type(value) is TensorRecord for _, value in table.pairs)
    others: dict[str, StoredTensor] = {}
    if not plain and (beside := name_tensors_outside(part)):
        prefix = outside_prefix(tensors)
        others = {prefix + name: placed[id(record)] for name, record in beside}
        names.update({id(record): prefix + name for name, record in beside})
    files = tuple(blob.name for blob in blobs)
    return Index(
        tensors,
        (*files, SPILLED) if reader.spilled is not None else files,
        items={} if plain else dict(items_of(part)),
        tree=CheckpointTree((part,), names, others, {}),
        outside=together(outside),
        carried=together(carried),
        unread=unread,
        notes=tuple(notes),
        sums=reader.sums,
        shared=reader.shared,
        torn=tuple(reader.torn),
    )


def _carried(
    root: Any,
    archives: Mapping[int, tuple[SavedValue, ...]],
    left_out: Mapping[int, str],
    reader: ChunkReader,
) -> Any:
    """The tree with what is outside the allow-list, and what is `left_out` by identity, as values
    that are carried; None where something of it cannot be.
    """
    new: dict[int, Any] = {}
    for several in archives.values():
        for saved in several:
            kept = reader.carried(saved, left_out)
            if kept is None:
                return None
            # what an archive holds need not stand in the tree as one
            stack = [(saved.value, kept)]
            while stack:
                was, now = stack.pop()
                if was is not now and id(was) not in new:
                    new[id(was)] = now
                    if type(now) in NODES:
                        both = zip(inside(was), inside(now), strict=True)
                        stack += [(one, other) for (_, one), (_, other) in both]
    made = replace_values(root, new)
    return None if unfit(made)[0] else made


def _edges(metadata: Metadata, named: Mapping[str, tuple[int, FileBlob]]) -> Iterator[Stretch]:
    """What is read of archives to know them: of a tensor's their beginnings and ends, of a value
    all.
    """
    for entry in metadata.tensors.values():
        for part in entry.parts:
            number, end = named[part.file][0], part.offset + part.length
            if part.transforms or part.length <= 2 * _EDGE:
                yield Stretch(number, part.offset, end)
            else:
                yield Stretch(number, part.offset, part.offset + _EDGE)
                yield Stretch(number, end - _EDGE, end)
    for value in metadata.bytes.values():
        part = value.part
        yield Stretch(named[part.file][0], part.offset, part.offset + part.length)


def _used(metadata: Metadata) -> int:
    """The bytes that entries name, of all data files."""
    chunks = sum(part.length for entry in metadata.tensors.values() for part in entry.parts)
    values = sum(entry.part.length for entry in metadata.bytes.values())
    return chunks + values + sum(copy.other.length for copy in metadata.copies)


def _named(outside: Iterable[Outside], key: str) -> list[Outside]:
    """What an archive holds outside of the allow-list, with the entry's key before each path."""
    return [
        replace(one, paths=tuple(key if path == TOP else f"{key}.{path}" for path in one.paths))
        for one in outside
    ]


def _unread(
    gone: Iterable[RemovedEntry], archives: Mapping[int, tuple[SavedValue, ...]]
) -> dict[str, Unread]:
    """The entries that were left out, by path. One that holds several archives is as many."""
    origins: dict[int, SavedValue] = {}
    for several in archives.values():
        for saved in several:
            stack = [saved.value]
            while stack:
                node = stack.pop()
                if type(node) not in SCALARS and id(node) not in origins:
                    origins[id(node)] = saved
                    stack += [child for _, child in inside(node)]
    out: dict[str, Unread] = {}
    for removed in gone:
        stack = [removed.value]
        while stack:
            node = stack.pop()
            if id(node) not in origins:
                stack += [child for _, child in reversed(inside(node))]
                continue
            for saved in archives.get(id(node), (origins[id(node)],)):
                value = saved.value if id(node) in archives else node
                one = removed._replace(value=value)
                for path, found in unread_entries([one], saved.written).items():
                    name, count = path, 1
                    while name in out:
                        count += 1
                        name = f"{path}#{count}"
                    out[name] = found
    return out
