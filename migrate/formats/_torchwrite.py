"""What a .pt output will be, to the byte, before a tensor is read.

A file of torch.save says nothing about data in front of the data: sizes stand in the pickle, and
CRC-32s behind each record and in the directory. So everything up to the first tensor is a header
like any other, and what follows a tensor is sealed once its checksum is known. The order of
records, their padding and their alignment are those of torch's own writer, which lets torch map the
file into memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from json.encoder import encode_basestring

from ..core.errors import fail
from ..core.spec import Spec, spec
from ..source import zip_archive
from ..source.jsontext import collector_paused
from ..source.paths import HISTORY
from ..source.pickle.emit import Rebuilder, emit
from ..source.pickle.policy import WRITTEN
from ..source.pickle.tree import Composite, DictNode, TensorRecord
from ..source.shards import Naming, by_rank, deal, in_natural_order, shard_names
from ..source.target import (
    OutputFile,
    Placed,
    Target,
    TargetTree,
    check_holds,
    nodes,
    plain_part,
    state_node,
    torch_form,
)
from ..source.tree import FileTree, tensor_records
from ..source.zip_archive import crc32

SUFFIX = ".bin"
INDEX = "pytorch_model.bin.index.json"
# the folder inside an archive that torch calls after the file, or this where it has no name
ROOT = "archive"
_BEFORE = ((".format_version", b"1"), (".storage_alignment", b"64"), ("byteorder", b"little"))
_VERSION = b"3\n"


def describe(
    specs: Mapping[str, Spec],
    *,
    folder: bool,
    max_shard_size: int,
    stamp: str | None,
    ranks: Naming | None,
    tree: TargetTree | None,
) -> Target:
    """The whole output: every header, offset and small file.

    Without `folder` one file with the stamp as a record of its own. A folder has one file for each
    rank where keys name ranks, shards of at most `max_shard_size` bytes of tensors with an index
    where the checkpoint is a flat dict, else one file of any size. `tree` is what the files hold
    beside the tensors of `specs`; without it each is a plain dict. M916 naming every tensor that
    torch cannot hold.
    """
    check_holds(specs)
    with collector_paused():
        parts = (
            by_rank(specs)
            if ranks is not None
            or (tree is not None and len(tree.parts) > 1)
            or "@" in "".join(specs)
            else []
        )
        if tree is None:
            tree = plain(specs, parts)
        if len(parts) > 1 and not folder:
            fail(
                "M916",
                f"one file cannot hold what each of {len(parts)} ranks has",
                help="write a folder: an output whose name has no suffix",
            )
        every = {**specs, **tree.passed_through}
        small: dict[str, bytes] = {}
        own = None if folder or stamp is None else stamp.encode()
        if len(parts) > 1 or (ranks is not None and folder):
            called = ranks or Naming()
            # Meta's ending, and Megatron's
            suffix = ".pt" if called.after else ".pth"
            files = tuple(
                file(called.name(rank, suffix), part, every, tree, own)
                for rank, part in enumerate(tree.parts)
            )
        elif not folder:
            files = (file("model.pt", tree.parts[0], every, tree, own),)
        else:
            shards = _shards(tree, specs, max_shard_size)
            names = [f"pytorch_{name}" for name in shard_names(len(shards), SUFFIX)]
            files = tuple(
                file(name, part, every, tree, own) for name, part in zip(names, shards, strict=True)
            )
            if len(files) > 1:
                total = sum(p.nbytes for f in files for p in f.tensors)
                small[INDEX] = _index_text(dict(zip(names, shards, strict=True)), tree, total)
        if folder and stamp is not None:
            small[HISTORY] = stamp.encode()
    return Target(files, folder, small)


def plain(specs: Mapping[str, Spec], parts: Sequence[Sequence[tuple[str, str]]]) -> TargetTree:
    """A dict of tensors for each rank, and nothing beside them."""
    made, names = [], {}
    for part in parts or [[(key, key) for key in in_natural_order(specs)]]:
        keys = {short: key for key, short in part}
        one, known = plain_part({short: specs[key] for short, key in keys.items()})
        made.append(one)
        names.update({number: keys[short] for number, short in known.items()})
    return TargetTree(tuple(made), names, {}, {})


def _shards(tree: TargetTree, specs: Mapping[str, Spec], limit: int) -> list[FileTree]:
    """The tree dealt out to files: whole unless it is a flat dict of tensors and simple objects.

    Tensors that share their bytes stay together, and so do the components of an object.
    """
    part = tree.parts[0]
    table = part.table
    if part.at != () or part.nested_dicts or table is None or tree.passed_through:
        return [part]
    shared = {first for key, first in tree.first.items() if key != first}
    sizes: dict[str, Spec] = {}
    for _, value in table.pairs:
        if type(value) is Composite:
            held = [tree.names[id(record)] for _, record in value.components]
            if any(tree.first.get(key, key) != key for key in held) or not shared.isdisjoint(held):
                return [part]
            sizes[held[0]] = spec("uint8", (sum(specs[key].nbytes for key in held),))
        elif (
            type(value) is TensorRecord and tree.first.get(key := tree.names[id(value)], key) == key
        ):
            sizes[key] = specs[key]
    dealt = deal(list(sizes), sizes, limit)
    if len(dealt) == 1:
        return [part]
    number = {key: n for n, shard in enumerate(dealt) for key in shard}
    pairs: list[list[tuple[object, object]]] = [[] for _ in dealt]
    for key, value in table.pairs:
        leaf = value.components[0][1] if type(value) is Composite else value
        named = tree.names.get(id(leaf), "") if type(leaf) is TensorRecord else ""
        pairs[number[tree.first.get(named, named)] if named else 0].append((key, value))
    return [
        FileTree(
            DictNode(table.kind, tuple(held), table.node, table.attributes if n == 0 else None), ()
        )
        for n, held in enumerate(pairs)
    ]


def _index_text(shards: Mapping[str, FileTree], tree: TargetTree, total: int) -> bytes:
    """The index as transformers writes it: indented by two, sorted. It names objects as one."""
    lines: list[tuple[str, str]] = []
    for name, part in shards.items():
        for key, value in part.root.pairs:
            if type(value) is Composite:
                lines.append((key, name))
            elif type(value) is TensorRecord:
                lines.append((tree.names[id(value)], name))
    entries = ",\n".join(f'    {encode_basestring(key)}: "{name}"' for key, name in sorted(lines))
    return (
        f'{{\n  "metadata": {{\n    "total_size": {total}\n  }},\n  "weight_map": '
        f"{{\n{entries}\n  }}\n}}\n"
    ).encode()


def file(
    name: str, part: FileTree, specs: Mapping[str, Spec], tree: TargetTree, stamp: bytes | None
) -> OutputFile:
    """One archive that holds a tree: its pickle, the storages in that order, the stamp."""
    made, numbers, states = Rebuilder(), dict[str, int](), dict[int, object]()
    for found in tensor_records([part.root]):
        key = tree.names[id(found)]
        numbers.setdefault(tree.first.get(key, key), len(numbers))

    def tensor(found: TensorRecord) -> object:
        key = tree.names[id(found)]
        first = tree.first.get(key, key)
        dtype, shape = torch_form(specs[key])
        return made.tensor(
            str(numbers[first]),
            dtype,
            shape,
            specs[first].nbytes,
            requires_grad=found.requires_grad,
            parameter=found.parameter,
            subclass=found.subclass,
            state=state_node(found, states),
        )

    written = WRITTEN
    if tree.carries:
        from ..source.carrying import carried_names

        written |= carried_names(part.root)
    stream = emit(nodes(part.root, tensor), name=f"{name}: data.pkl", names=written)
    return archive(name, stream, [(key, specs[key].nbytes) for key in numbers], stamp)


def archive(
    name: str, stream: bytes, storages: Sequence[tuple[str, int]], stamp: bytes | None = None
) -> OutputFile:
    """The archive of a pickle `stream` and of storages: (key of the tensor, bytes), by number."""
    before = (("data.pkl", stream), *_BEFORE)
    after = (("version", _VERSION), *(((HISTORY, stamp),) if stamp is not None else ()))
    layout = zip_archive.lay_out(
        ROOT,
        [
            *((n, len(b)) for n, b in before),
            *((f"data/{i}", size) for i, (_, size) in enumerate(storages)),
            *((n, len(b)) for n, b in after),
        ],
    )
    first, count = len(before), len(storages)
    placed = tuple(
        Placed(key, slot.offset, slot.size)
        for (key, _), slot in zip(storages, layout.slots[first : first + count], strict=True)
    )
    head = b"".join(
        _literal(layout, slot, content)
        for slot, (_, content) in zip(layout.slots, before, strict=False)
    )
    seal = Seal(
        layout, first, count, [content for _, content in before], [content for _, content in after]
    )
    if not placed:
        return OutputFile(name, head + seal([]), (), layout.size)
    return OutputFile(
        name,
        head + zip_archive.local_header(layout, layout.slots[first]),
        placed,
        layout.size,
        seal,
    )


def _literal(
    layout: zip_archive.ArchiveLayout, slot: zip_archive.RecordSlot, content: bytes
) -> bytes:
    """A record that is known beforehand, whole."""
    return (
        zip_archive.local_header(layout, slot)
        + content
        + zip_archive.data_descriptor(slot, crc32(content))
    )


class Seal:
    """What follows a storage in its archive, given the CRC-32s of all storages up to it."""

    __slots__ = ("_after", "_before", "_count", "_first", "_layout")

    def __init__(
        self,
        layout: zip_archive.ArchiveLayout,
        first: int,
        count: int,
        before: Sequence[bytes],
        after: Sequence[bytes],
    ) -> None:
        self._layout, self._first, self._count, self._after = layout, first, count, after
        self._before = [crc32(content) for content in before]

    def needs(self, count: int) -> int:
        """The first storage whose CRC-32 stands in what follows the first `count`."""
        return count - 1 if count < self._count else 0

    def __call__(self, crcs: Sequence[int]) -> bytes:
        layout, slots = self._layout, self._layout.slots
        here = self._first + len(crcs) - 1
        behind = zip_archive.data_descriptor(slots[here], crcs[-1]) if crcs else b""
        if len(crcs) < self._count:
            return behind + zip_archive.local_header(layout, slots[here + 1])
        tail = b"".join(
            _literal(layout, slot, content)
            for slot, content in zip(slots[here + 1 :], self._after, strict=True)
        )
        return (
            behind
            + tail
            + zip_archive.central_directory(
                layout, [*self._before, *crcs, *(crc32(content) for content in self._after)]
            )
        )
