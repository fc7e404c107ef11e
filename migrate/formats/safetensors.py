"""safetensors checkpoints: one file, shards with an index, folders as of huggingface_hub.

What belongs to a checkpoint is decided by the index where there is one and by nothing else; where a
folder allows two answers (an index and a `model.safetensors` that it does not name, several files
and no index) it is an error, because the wrong answer would migrate somebody else's weights.
Written files follow huggingface_hub: greedy shards, `model-00001-of-00003.safetensors`,
`model.safetensors.index.json`; where keys name ranks, each rank has its file.

A training checkpoint becomes a folder whose `model.safetensors` is what others expect, the weights
and nothing else. What safetensors has no place for (nesting, optimizer state, numbers and text,
versions of modules, which tensors were one) lies beside it in two files of migrate's own,
`migrate.items.json` and `migrate.items.safetensors` for the tensors in it, from which a .pt file is
made again with equal bits. They say for which tensors they were written; where these were changed
since, they are left alone.
"""

from __future__ import annotations

import json
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from json.encoder import encode_basestring
from typing import TYPE_CHECKING, Any

from ..core.errors import CheckpointError, Report, fail, listed, printable
from ..core.spec import Spec
from ..core.types import FORMAT_VERSION
from ..source.blobs import FileBlob, Stored, StoredTensor
from ..source.index import FileSource, Index, Source, specs_hash
from ..source.jsontext import collector_paused, parse
from ..source.paths import HISTORY, ITEMS, Beside, Folder, Place, look_beside, read_history
from ..source.pickle.jsonform import Ref, from_json, to_json
from ..source.pickle.nodes import Persistent
from ..source.pickle.tree import CarriedStorage, DictNode, TensorRecord
from ..source.shards import (
    INDEX,
    RANK_NAMES,
    Entry,
    Naming,
    Unit,
    by_rank,
    deal,
    in_natural_order,
    index_in,
    indexed,
    join_ranks,
    rank_entries,
    shard_names,
    shard_sets,
)
from ..source.table import flatten_table
from ..source.target import OutputFile, Target, TargetTree, items_of, nodes, tensor_ref, torch_form
from ..source.tree import (
    CheckpointTree,
    FileTree,
    dict_at,
    prune,
    tensor_records,
    tensors_of,
    tensors_outside,
)
from ..source.zip_archive import ArchiveRecord
from ._header import (
    MAX_HEADER,
    RELEASE,
    SHARDING,
    Header,
    Origins,
    check_holds,
    header_length,
    read_header,
    write_header,
)

if TYPE_CHECKING:
    from ..source.pickle.policy import Outside
    from ..source.unread import Unread

TENSORS = "migrate.items.safetensors"
IN_HEADER = "migrate.items"
MAX_ITEMS = 120_000_000
_HELP = "remove it to go on with the tensors alone"


def items_text(tree: TargetTree, specs: Mapping[str, Spec]) -> str | None:
    """The JSON text that says all of `tree` but the bytes of tensors; None if it is a flat dict of
    tensors alone, by rank.
    """
    with collector_paused():
        if _trivial(tree):
            return None

        states: dict[int, Any] = {}

        def tensor(found: TensorRecord) -> Ref:
            key = tree.names[id(found)]
            first = tree.first.get(key, key)
            return tensor_ref(found, key, first if first != key else None, states)

        parts = [
            {
                "at": None if part.at is None else list(part.at),
                "root": to_json(nodes(part.root, tensor)),
            }
            for part in tree.parts
        ]
        document = {
            "format_version": FORMAT_VERSION,
            "kind": "items",
            "output": specs_hash({**specs, **tree.passed_through}),
            "carried": list(tree.passed_through),
            "parts": parts,
        }
        return (
            json.dumps(document, ensure_ascii=True, separators=(",", ":"), allow_nan=False) + "\n"
        )


def _trivial(tree: TargetTree) -> bool:
    if tree.passed_through or any(first != key for key, first in tree.first.items()):
        return False
    for part in tree.parts:
        table = part.root
        if (
            part.at != ()
            or type(table) is not DictNode
            or table.kind != "dict"
            or table.attributes is not None
        ):
            return False
        for _, value in table.pairs:
            if (
                type(value) is not TensorRecord
                or value.parameter
                or value.requires_grad
                or value.subclass
                or value.state is not None
            ):
                return False
    return True


def read_items(
    data: bytes,
    tensors: Mapping[str, StoredTensor],
    carried: Mapping[str, StoredTensor],
    label: str,
    carrying: bool = False,
) -> tuple[CheckpointTree | None, dict[str, Any], str | None, tuple[Outside, ...], dict[str, Any]]:
    """The tree that the text describes over these tensors, its items by path, a note if it was
    written for others, and what of it is outside the allow-list: names, and entries by path, which
    stand in the tree only if it is for `carrying`.

    `tensors` are those that rules see, by their keys with ranks. M906 for any other text,
    M930 to M936 as for a pickle.
    """
    with collector_paused():
        document = parse(data, label, floats=True)
        match document:
            case {
                "format_version": str(version),
                "kind": "items",
                "output": str(output),
                "carried": list(names),
                "parts": list(parts),
            }:
                pass
            case _:
                fail("M906", f"{label}: is not what migrate writes beside tensors", help=_HELP)
        if version.split(".")[0] != FORMAT_VERSION.split(".")[0]:
            note = f"{label}: is of another version ({version[:20]!a}) and is left alone"
            return None, {}, note, (), {}
        every = {**tensors, **carried}
        fits = all(type(name) is str for name in names) and set(names) == set(carried)
        if not parts:
            fail("M906", f"{label}: describes no file", help=_HELP)
        if not fits or specs_hash({key: stored.spec for key, stored in every.items()}) != output:
            note = (
                f"{label}: was written for other tensors (the index hash differs) and is left alone"
            )
            return None, {}, note, (), {}
        tree, items, outside, unread = _read(parts, every, carried, label, carrying)
        return tree, items, None, outside, unread


def _read(
    parts: list[Any],
    every: Mapping[str, StoredTensor],
    carried: Mapping[str, StoredTensor],
    label: str,
    carrying: bool,
) -> tuple[CheckpointTree, dict[str, Any], tuple[Outside, ...], dict[str, Any]]:
    # what reads pickles; most checkpoints have no such file
    from ..source.pickle.emit import Rebuilder
    from ..source.pickle.policy import decode, together
    from ..source.tree import unfit

    numbers = {key: str(number) for number, key in enumerate(every)}
    keys = list(every)
    ties: dict[str, str] = {}
    made: list[FileTree] = []
    names: dict[int, str] = {}
    items: dict[str, Any] = {}
    outside: list[Outside] = []
    unread: dict[str, Any] = {}
    hidden: set[str] = set()
    for rank, part in enumerate(parts):
        at = part.get("at") if type(part) is dict else None
        if (
            type(part) is not dict
            or "root" not in part
            or not (at is None or (type(at) is list and all(type(word) is str for word in at)))
        ):
            fail("M906", f"{label}: part {rank} is not what migrate writes", help=_HELP)
        rebuilder, used = Rebuilder(), set[str]()

        def tensor(found: Any, rebuilder: Rebuilder = rebuilder, used: set[str] = used) -> Any:
            if type(found) is CarriedStorage:
                if found.at.key not in carried:
                    fail("M906", f"{label}: names a tensor that is not there", help=_HELP)
                used.add(number := numbers[found.at.key])
                return Persistent(("storage", found.cls, number, found.location, found.numel))
            if found.key not in every or (found.tied is not None and found.tied not in every):
                fail("M906", f"{label}: names a tensor that is not there", help=_HELP)
            if found.tied is not None and found.tied != found.key:
                ties[found.key] = found.tied
            spec = every[found.key].spec
            dtype, shape = torch_form(spec)
            used.add(numbers[found.key])
            return rebuilder.tensor(
                numbers[found.key],
                dtype,
                shape,
                spec.nbytes,
                requires_grad=found.requires_grad,
                parameter=found.parameter,
                subclass=found.subclass,
                state=found.state,
            )

        root = from_json(part["root"], tensor, label)
        decoded = decode(
            root, label, {number: every[keys[int(number)]].spec.nbytes for number in used}
        )
        tree = decoded.tree
        mark = f"@{rank}" if len(parts) > 1 else ""
        left_out, more = unfit(tree)
        if decoded.outside or more:
            storages = {number: every[keys[int(number)]] for number in used}
            tree, gone = _outside(tree, left_out, carrying, storages)
            if tree is None:
                fail("M906", f"{label}: holds values that migrate does not write", help=_HELP)
            outside += (*decoded.outside, *more)
            hidden |= {keys[int(number)] for number in used}
            unread.update({path + mark: one for path, one in gone.items()})
        path = None if at is None else tuple(at)
        if path is not None and dict_at(tree, path) is None:
            fail("M906", f"{label}: part {rank} has no dict at its path", help=_HELP)
        one = flatten_table(FileTree(tree, path), label)
        names.update({id(leaf): keys[int(leaf.storage.key)] for leaf in tensor_records([one.root])})
        items.update({where + mark: value for where, value in items_of(one)})
        made.append(one)
    shown = set(names.values())
    left = {key: stored for key, stored in carried.items() if key in shown or key not in hidden}
    every = {key: stored for key, stored in every.items() if key in left or key not in carried}
    _check_complete(made, every, left, names, label)
    tree = CheckpointTree(tuple(made), names, left, ties)
    return tree, items, together(outside), unread


def _outside(
    tree: Any, left_out: Mapping[int, str], carrying: bool, storages: Mapping[str, Any]
) -> tuple[Any, dict[str, Unread]]:
    """The tree with what is outside the allow-list, or without it, and these entries by path."""
    from ..source.carrying import carry
    from ..source.unread import StreamPlace, unread_entries

    kept, gone = prune(tree, left_out)
    # what is carried lies in the last file, behind those of the rules' tensors
    blob = max((at.blob for at in storages.values()), default=0)
    places = {
        number: ArchiveRecord(number, at.offset, at.spec.nbytes, None)
        for number, at in storages.items()
        if at.blob == blob
    }
    entries = unread_entries(gone, StreamPlace(blob, (0, 0), places, frozenset(storages)))
    sizes = {number: at.spec.nbytes for number, at in storages.items()}
    return (carry(tree, left_out, sizes) if carrying else kept), entries


def _check_complete(
    parts: list[FileTree],
    every: Mapping[str, StoredTensor],
    carried: Mapping[str, StoredTensor],
    names: Mapping[int, str],
    label: str,
) -> None:
    """Raises unless each tensor stands in the tree, where tensors of its kind stand."""
    inside = {names[id(record)] for part in parts for _, record in tensors_of(part.table)}
    outside = {
        names[id(record)] for part in parts for _, record in tensors_outside(part.root, part.table)
    }
    if (
        set(names.values()) != set(every)
        or not inside.isdisjoint(carried)
        or not outside <= carried.keys()
    ):
        fail("M906", f"{label}: does not name each tensor where it belongs", help=_HELP)


SUFFIX = ".safetensors"
INDEX_SUFFIX = SUFFIX + INDEX
STAMP = "migrate.history"


def _open_file(place: Place, blob: FileBlob) -> Source:
    header = read_header(blob, 0, printable(place.path, 240))
    if SHARDING in header.metadata:
        from ._hfshards import refuse_lone

        refuse_lone(place, header, printable(place.path, 240))
        header.metadata.pop(SHARDING)
        header.metadata.pop(RELEASE, None)
    stamp, written = header.metadata.pop(STAMP, None), header.metadata.pop(IN_HEADER, None)
    index = Index(header.tensors, (blob.name,), metadata=header.metadata)
    if written is not None:
        index = _with_items(
            index,
            written.encode("utf-8", "surrogatepass"),
            {},
            f"{printable(place.path, 240)}: {IN_HEADER}",
            place.carry,
        )
    return FileSource(
        place.path,
        "safetensors",
        index,
        [blob],
        history=None if stamp is None else stamp.encode(),
        release=place.folder.close,
        suspend=place.folder.suspend,
    )


def _open_folder(place: Place, index_name: str | None) -> Source:
    folder = place.folder
    ranks: list[Entry] = []
    if place.file is None and any(n.startswith(RANK_NAMES) for n in place.names):
        ranks = rank_entries(place, SUFFIX)
    if ranks:
        parts = [_part_of_rank(folder, entry) for entry in ranks]
    else:
        if index_name is not None:
            parts = [indexed(folder, "", folder.names(), index_name, place.file)]
        else:
            parts = [Unit(_files_of(place.names, printable(place.path, 240)))]
    names = [name for part in parts for name in part.names]
    indexes = [part.index_name for part in parts if part.index_name is not None]
    blobs: list[FileBlob] = []
    try:
        headers = _read_headers(folder, names, blobs)
        held: list[Mapping[str, StoredTensor]] = []
        notes: tuple[str, ...] = ()
        for part in parts:
            at = sum(len(p.names) for p in parts[: len(held)])
            own = headers[at : at + len(part.names)]
            if part.names[0].startswith("shard-"):
                from ._hfshards import join_shards

                joined, note = join_shards(folder, part.names, own)
                held.append(joined)
                notes = (note,)
            else:
                held.append(own[0].tensors if len(own) == 1 else _merged(folder, names, own))
            if part.weight_map is not None:
                _check_index(folder.label(part.index_name or ""), part.names, own, part.weight_map)
        tensors = held[0] if len(held) == 1 else join_ranks(held, folder.label(""))
        present = tuple(folder.names())
        metadata = headers[0].metadata if len(headers) == 1 else _metadata(headers)
        index = Index(tensors, tuple(names), metadata=metadata, notes=notes)
        taken: tuple[str, ...] = ()
        if ITEMS in present and (place.file is None or index_name is not None):
            index, taken = _items_beside(folder, present, index, blobs, place.carry)
        beside = look_beside(folder, frozenset((*names, *indexes, *taken)))
        history = read_history(folder, present)
        return _folder_source(place, index, blobs, beside, history)
    except BaseException:
        for blob in blobs:
            blob.close()
        raise


def _items_beside(
    folder: Folder, present: tuple[str, ...], index: Index, blobs: list[FileBlob], carrying: bool
) -> tuple[Index, tuple[str, ...]]:
    """The index with what lies beside the tensors in migrate's own files, and their names."""
    blob = folder.open(ITEMS)
    try:
        if blob.size > MAX_ITEMS:
            fail("M914", f"{folder.label(ITEMS)}: {blob.size} bytes, more than {MAX_ITEMS}")
        data = blob.read(0, blob.size)
    finally:
        blob.close()
    carried: Mapping[str, StoredTensor] = {}
    if TENSORS not in present:
        return _with_items(index, data, {}, folder.label(ITEMS), carrying), (ITEMS,)
    beside = folder.open(TENSORS)
    try:
        carried = read_header(beside, len(blobs), folder.label(TENSORS)).tensors
        made = _with_items(index, data, carried, folder.label(ITEMS), carrying)
    except BaseException:
        beside.close()
        raise
    if made.tree is None:
        beside.close()
        return made, (ITEMS,)
    blobs.append(beside)
    return replace(made, files=(*made.files, TENSORS)), (ITEMS, TENSORS)


def _with_items(
    index: Index,
    data: bytes,
    carried: Mapping[str, StoredTensor],
    label: str,
    carrying: bool = False,
) -> Index:
    tree, items, note, outside, unread = read_items(data, index.tensors, carried, label, carrying)
    notes = index.notes if note is None else (*index.notes, note)
    kept, refused = (outside, ()) if carrying else ((), outside)
    return replace(
        index,
        tree=tree,
        items=items,
        notes=notes,
        carried=kept,
        outside=refused,
        unread=unread,
    )


def _part_of_rank(folder: Folder, entry: Entry) -> Unit:
    """The files of one rank, by path in the checkpoint: the file, or what its folder holds."""
    if entry.names is None:
        return Unit([entry.name])
    below, label = f"{entry.name}/", folder.label(entry.name)
    index_name = index_in(entry.names, (SUFFIX,), label)
    if index_name is None:
        return Unit([below + name for name in _files_of(entry.names, label)])
    return indexed(folder, below, entry.names, index_name)


def _folder_source(
    place: Place, index: Index, blobs: list[FileBlob], beside: Beside, history: bytes | None
) -> Source:
    metadata = dict(index.metadata)
    metadata.pop(SHARDING, None)
    metadata.pop(RELEASE, None)
    stamp, written = metadata.pop(STAMP, None), metadata.pop(IN_HEADER, None)
    if history is None and stamp is not None and len(blobs) == 1:
        # a stamped single file that was put into a folder
        history = stamp.encode()
    if written is not None and index.tree is None and len(blobs) == 1:
        index = _with_items(
            index,
            written.encode("utf-8", "surrogatepass"),
            {},
            f"{printable(place.path, 240)}: {IN_HEADER}",
            place.carry,
        )
    complete = replace(
        index, side_files=beside.side_files, left_out=beside.left_out, metadata=metadata
    )
    return FileSource(
        place.path,
        "safetensors",
        complete,
        blobs,
        history=history,
        side=beside.read,
        watched=beside.identities,
        locate=beside.folder.current,
        release=place.close,
        suspend=place.folder.suspend,
    )


def _files_of(names: Sequence[str], label: str) -> list[str]:
    """The weight files among the names of a folder without an index."""
    names = [n for n in names if n.endswith(SUFFIX) and n != TENSORS]
    if "model" + SUFFIX in names:
        return ["model" + SUFFIX]
    sets = shard_sets(names)
    if len(names) == 1 and not sets:
        return names
    if len(sets) != 1 or sets[0].beyond or any(not shard_sets([n]) for n in names):
        from ._hfshards import are_shards

        if are_shards(names):
            return in_natural_order(names)
        fail(
            "M915",
            f"{label}: {len(names)} safetensors files and no index, so it is unclear "
            f"what belongs together: {listed(names)}",
            help="pass one file, or write an index",
        )
    sets[0].check_whole(label)
    return in_natural_order(names)


def _read_headers(folder: Folder, names: Sequence[str], blobs: list[FileBlob]) -> list[Header]:
    """The headers of all files, which join the `blobs`; the problems of all files at once."""
    folder.expect(names, header_length)
    report = Report()
    headers = []
    # each is read while it is open: of many files only some stay so
    for number, name in enumerate(names):
        try:
            blobs.append(folder.open(name))
            headers.append(read_header(blobs[-1], number, folder.label(name)))
        except CheckpointError as error:
            report.diagnostics += error.diagnostics
            if len(report.diagnostics) >= 20:
                break
    report.check()
    return headers


def _merged(folder: Folder, names: list[str], headers: list[Header]) -> dict[str, Stored]:
    """The tensors of all files; M915 naming keys that stand in two. `names`: by blob number."""
    tensors: dict[str, Stored] = {}
    with collector_paused():
        for header in headers:
            tensors.update(header.tensors)
    if len(tensors) < sum(len(h.tensors) for h in headers):
        # a key's last file won; any other file that holds it is the second
        twice = [
            f"{key} (in {names[stored.blob]} and {names[tensors[key].blob]})"
            for header in headers
            for key, stored in header.tensors.items()
            if tensors[key].blob != stored.blob
        ]
        fail("M915", f"{folder.label('')}: keys that occur in two files: {listed(twice)}")
    return tensors


def _check_index(
    label: str, names: list[str], headers: list[Header], weight_map: Mapping[str, str]
) -> None:
    """M915 unless each key of the index stands in its file, and each key of a file in the index."""
    if sum(len(header.tensors) for header in headers) == len(weight_map) and all(
        list(map(weight_map.get, header.tensors)).count(name) == len(header.tensors)
        for name, header in zip(names, headers, strict=True)
    ):
        return
    report = Report()
    with collector_paused():
        said: dict[str, set[str]] = {name: set() for name in names}
        for key, name in weight_map.items():
            said[name].add(key)
    for name, header in zip(names, headers, strict=True):
        if said[name] == header.tensors.keys():
            continue
        gone = sorted(said[name] - header.tensors.keys())
        holders = {
            key: [n for n, h in zip(names, headers, strict=True) if key in h.tensors]
            for key in gone
        }
        where = [f"{key} (it is in {holders[key][0]})" if holders[key] else key for key in gone]
        more = sorted(k for k in header.tensors if k not in weight_map)
        if where:
            report.add(
                "M915",
                f"{label}: {name} does not hold keys that the index places there: {listed(where)}",
            )
        if more:
            report.add(
                "M915", f"{label}: {name} holds keys that the index does not name: {listed(more)}"
            )
    report.check()


def _metadata(headers: list[Header]) -> dict[str, str]:
    """The metadata of all files; where two differ, the first."""
    out: dict[str, str] = {}
    for header in headers:
        out = {**header.metadata, **out}
    return out


def describe(
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
    """The whole output: every header, offset and small file.

    A folder has as many files of at most `max_shard_size` bytes of tensors as are needed, an index
    if they are several, and the stamp in `migrate.history.json`. Without `folder` it is one file of
    any size, called `model.safetensors` until the caller names it, with the stamp in its metadata.
    Keys of ranks (`key@1`) make a file for each rank, of any size and called as `ranks` says; so
    does `ranks` for a single one. `{"format": "pt"}` is added where the source says nothing:
    transformers refuses files without it. `origins` pads the headers so that the source's blocks
    can be shared (`_header.write_header`), and `last` stands behind what else is in its file, if
    it lies aligned there. What `tree` has beside the tensors goes to files of its own, or into the
    metadata of a single file, which has no place for more tensors. M916 naming every key that the
    format cannot hold.
    """
    kept = {"format": "pt", **{k: v for k, v in metadata.items() if k not in (STAMP, IN_HEADER)}}
    if stamp is not None and not folder:
        kept[STAMP] = stamp
    small: dict[str, bytes] = {}
    written = None if tree is None else items_text(tree, specs)
    if written is not None and not folder:
        kept[IN_HEADER] = written
    with collector_paused():
        parts = by_rank(specs) if ranks is not None or "@" in "".join(specs) else []
        if len(parts) > 1 and not folder:
            fail(
                "M916",
                f"one file cannot hold what each of {len(parts)} ranks has",
                help="write a folder: an output whose name has no suffix",
            )
        if len(parts) > 1 or (ranks is not None and folder):
            called = ranks or Naming()
            files = tuple(
                _file_of_rank(called.name(rank, SUFFIX), part, specs, kept, origins, last)
                for rank, part in enumerate(parts)
            )
        else:
            check_holds(specs, kept)
            keys = in_natural_order(specs)
            shards = deal(keys, specs, max_shard_size) if folder else [keys]
            names = shard_names(len(shards))
            files = tuple(
                write_header(name, shard, specs, kept, origins, last)
                for name, shard in zip(names, shards, strict=True)
            )
            if len(files) > 1:
                total = sum(f.size - len(f.header) for f in files)
                small["model" + INDEX_SUFFIX] = _index_text(
                    dict(zip(names, shards, strict=True)), total
                )
        if tree is not None and tree.passed_through:
            if not folder:
                fail(
                    "M916",
                    f"one safetensors file has no place for {len(tree.passed_through)} tensors "
                    "beside the weights",
                    help="write a folder",
                )
            check_holds(tree.passed_through, {})
            files = (
                *files,
                write_header(
                    TENSORS,
                    in_natural_order(tree.passed_through),
                    tree.passed_through,
                    {"format": "pt"},
                    origins,
                ),
            )
    if written is not None and folder:
        small[ITEMS] = written.encode()
    if folder and stamp is not None:
        small[HISTORY] = stamp.encode()
    return Target(files, folder, small)


def _file_of_rank(
    name: str,
    part: list[tuple[str, str]],
    specs: Mapping[str, Spec],
    metadata: Mapping[str, str],
    origins: Origins | None,
    last: Container[str],
) -> OutputFile:
    """The file of one rank: each key stands there without its `@r`, and is placed with it."""
    own = {short: specs[key] for key, short in part}
    check_holds(own, metadata)
    keys = {short: key for key, short in part}
    whole = None if origins is None else (lambda short, find=origins: find(keys[short]))
    behind = {short for key, short in part if key in last}
    file = write_header(name, in_natural_order(own), own, metadata, whole, behind)
    return replace(
        file, tensors=tuple(placed._replace(key=keys[placed.key]) for placed in file.tensors)
    )


def _index_text(shards: Mapping[str, list[str]], total: int) -> bytes:
    """The index as transformers writes it: two spaces of indent, keys sorted."""
    lines = sorted((key, name) for name, keys in shards.items() for key in keys)
    entries = ",\n".join(f'    {encode_basestring(key)}: "{name}"' for key, name in lines)
    return (
        f'{{\n  "metadata": {{\n    "total_size": {total}\n  }},\n  "weight_map": '
        f"{{\n{entries}\n  }}\n}}\n"
    ).encode()


class Safetensors:
    """The format: `sniff`, `open` and `describe` as `formats.Format` asks."""

    name = "safetensors"
    suffixes = (SUFFIX, INDEX_SUFFIX)

    def sniff(self, place: Place) -> int:
        if place.file is None:
            return (
                2
                if any(n.endswith((SUFFIX, INDEX_SUFFIX)) for n in place.names)
                or rank_entries(place, SUFFIX)
                else 0
            )
        if place.file.name.endswith((SUFFIX, INDEX_SUFFIX)):
            return 2
        head = place.head()
        return 1 if head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= MAX_HEADER else 0

    def open(self, place: Place) -> Source:
        """The checkpoint at a file, an index or a folder; M901, M905 to M915 from `safetensors`."""
        if place.file is None:
            return _open_folder(place, index_in(place.names, (SUFFIX,), printable(place.path, 240)))
        if place.file.name.endswith(INDEX_SUFFIX):
            return _open_folder(place, place.file.name)
        return _open_file(place, place.file)

    describe = staticmethod(describe)


FORMAT = Safetensors()
