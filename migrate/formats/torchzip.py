"""Files of torch.save: `.pt`, `.pth`, `.bin`, `.ckpt`; one of them, shards with an index, or one
for each rank.

What belongs to a checkpoint is decided as for safetensors: by the index where there is one, else by
names that leave no choice. Files that training leaves beside the weights (optimizer, scheduler,
arguments) are known by their names and never taken for them. Written files are what torch itself
writes: zip archives that any torch.load reads, by name of huggingface_hub's shards or of the ranks.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..core.diagnostics import Report, fail, listed, printable
from ..core.errors import CheckpointError
from ..core.spec import Spec
from ..source.blobs import FileBlob, FileSource
from ..source.index import Index, Source, Stored
from ..source.jsontext import collector_paused
from ..source.nesting import is_state
from ..source.outline import Outline, Part
from ..source.paths import Folder, Place
from ..source.pickle.jsonform import to_json
from ..source.pickle.tree import Composite, DictNode, TensorRecord
from ..source.sidefiles import look_beside, read_history
from ..source.target import Target
from ._ranks import Entry, Naming, joined, rank_entries
from ._shards import INDEX, WHICH_HELP, Unit, in_natural_order, index_in, indexed, shard_sets
from ._torchtree import carried_prefix, items_of, node_of

if TYPE_CHECKING:
    from ..source.target import Rest
    from ..source.unread import Unread
    from ._stheader import Origins
    from ._torchread import Held

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
_MEGATRON = ("model_optim_rng.pt", "model_rng.pt")


class TorchZip:
    """The format: `sniff`, `open` and `describe` as `formats.Format` asks."""

    name = "torch"

    def sniff(self, place: Place) -> int:
        if place.file is None:
            # where a folder has both, safetensors is what others load too
            sure = 1 if any(n.endswith(".safetensors") for n in place.names) else 2
            return (
                sure
                if any(_is_weights(n) or n.endswith(_INDEXES) for n in place.names) or _ranks(place)
                else 0
            )
        if place.file.name.endswith(SUFFIXES) or place.file.name.endswith(_INDEXES):
            return 2
        from . import _kinds

        size = place.file.size
        tail = place.file.read(max(0, size - _kinds.TAIL), min(_kinds.TAIL, size))
        return int(
            _kinds.kind(place.head(_kinds.HEAD), size, tail) in ("zip", "legacy", "tar", "pickle")
        )

    def open(self, place: Place) -> Source:
        """The checkpoint at a file, an index or a folder: M901, M905, M907, M908, M914, M915, M920,
        M930 to M945.
        """
        if place.file is None:
            return _open_folder(place, None)
        if place.file.name.endswith(_INDEXES):
            return _open_folder(place, place.file.name)
        from ._torchread import read

        held = read(place.file, 0, printable(place.path, 240), place.at)
        index = _index([place.file.name], [[held]], printable(place.path, 240))
        return FileSource(
            place.path,
            "torch",
            index,
            [place.file],
            history=held.history,
            release=place.folder.close,
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
        rest: Rest | None = None,
        last: Container[str] = (),
    ) -> Target:
        from ._torchwrite import describe

        return describe(
            specs, folder=folder, max_shard_size=max_shard_size, stamp=stamp, ranks=ranks, rest=rest
        )


FORMAT = TorchZip()


def _is_weights(name: str) -> bool:
    return name.endswith(SUFFIXES) and not name.startswith(_BESIDE)


def _ranks(place: Place) -> list[Entry]:
    if not any(n.startswith(("consolidated.", "mp_rank_")) for n in place.names):
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
    try:
        from ._torchread import read

        held: list[list[Held]] = []
        report, number = Report(), 0
        for unit in units:
            held.append([])
            for name in unit.names:
                # the files of one unit are flat, for a key must be sought somewhere
                at = place.at if len(unit.names) == 1 else "."
                try:
                    blobs.append(folder.open(name))
                    held[-1].append(read(blobs[-1], number, folder.label(name), at))
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
        index = _index(names, held, folder.label(""), beside.side_files, beside.left_out)
        return FileSource(
            place.path,
            "torch",
            index,
            blobs,
            history=history,
            side=beside.read,
            watched=beside.identities,
            locate=folder.locate,
            release=place.close,
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
    weights = [n for n in names if _is_weights(n)]
    called = [n for n in (*_MEGATRON, "pytorch_model.bin") if n in weights]
    if len(called) == 1:
        weights = called
    sets = shard_sets(weights)
    if len(weights) != 1 and (len(sets) != 1 or any(not shard_sets([n]) for n in weights)):
        fail(
            "M915",
            f"{label}: {len(weights)} files of torch.save and no index: what belongs together? "
            f"{listed(weights)}",
            help=WHICH_HELP,
        )
    if sets and sets[0].absent:
        fail(
            "M908",
            f"{label}: {len(sets[0].absent)} files of {sets[0].title} are missing: "
            f"{listed(list(sets[0].absent))}",
            help="fetch them again",
        )
    return Unit([below + n for n in in_natural_order(weights)])


def _check_unit(folder: Folder, unit: Unit, parts: list[Held]) -> None:
    """M915 unless the files of one unit are flat, hold each key once, and are what their index
    says.
    """
    report = Report()
    for name, held in zip(unit.names, parts, strict=True):
        if len(parts) > 1 and not _is_shard(held):
            report.add(
                "M915",
                f"{folder.label(name)}: one of {len(parts)} files, and holds more than tensors by "
                "name",
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
        report.add("M915", f"{folder.label('')}: keys that stand in two files: {listed(twice)}")
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


def _unnamed(held: Held, weight_map: Mapping[str, str]) -> list[str]:
    """The paths of tensors outside of the dict that the index is of, and in values there that it
    does not name.
    """
    from ._torchread import elsewhere

    at = held.part.at or ()
    paths = [path for path, _ in elsewhere(held.part.root, held.part.table)] if held.others else []
    return [
        ".".join(path) for path in paths if path[: len(at)] != at or path[len(at)] not in weight_map
    ]


def _index(
    names: list[str],
    units: list[list[Held]],
    label: str,
    side_files: Any = (),
    left_out: tuple[str, ...] = (),
) -> Index:
    with collector_paused():
        parts = [_merged(unit) for unit in units]
        tensors = joined([held.tensors for held in parts], label)
        prefix = carried_prefix(tensors)
        carried: dict[str, Stored] = {}
        known: dict[int, str] = {}
        items: dict[str, Any] = {}
        unread: dict[str, Unread] = {}
        for rank, held in enumerate(parts):
            mark = f"@{rank}" if len(parts) > 1 else ""
            for number, key in held.names.items():
                known[number] = key if not mark or (not rank and key in tensors) else key + mark
            for number, path in held.paths.items():
                known[number] = f"{prefix}{path}{mark}"
            carried.update(
                {f"{prefix}{path}{mark}": stored for path, stored in held.others.items()}
            )
            unread.update({path + mark: one for path, one in held.unread.items()})
            items.update({path + mark: value for path, value in items_of(held.part)})
        every = [held for unit in units for held in unit]
        outline = Outline(tuple(held.part for held in parts), known, carried, {})
        return Index(
            tensors,
            tuple(names),
            side_files,
            left_out,
            items=items,
            outline=outline,
            outside=tuple(found for held in every for found in held.outside),
            unread=unread,
            notes=tuple(dict.fromkeys(note for held in every for note in held.notes)),
            sums=lambda: {
                (held.number, place.offset): (place.size, place.crc)
                for held in every
                for place in held.places.values()
                if place.crc is not None and place.size
            },
        )


def _is_shard(held: Held) -> bool:
    """Whether a file is a flat dict, with no tensors below its values but those of extra states."""
    part = held.part
    if part.at != () or part.nests or any(type(key) is not str for key in _keys(held)):
        return False
    from ._torchread import elsewhere

    return not held.others or all(is_state(path[0]) for path, _ in elsewhere(part.root, part.table))


def _keys(held: Held) -> list[Any]:
    return [] if held.part.table is None else [key for key, _ in held.part.table.pairs]


def _merged(unit: list[Held]) -> Held:
    """The files of one unit as if they were one."""
    if len(unit) == 1:
        return unit[0]
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
        part=Part(root, ()),
        tensors=tensors,
        names=names,
        others=others,
        paths=paths,
        unread=unread,
    )
