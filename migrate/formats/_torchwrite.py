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

from ..core.diagnostics import fail
from ..core.spec import Spec, spec
from ..source.crc import crc32
from ..source.jsontext import collector_paused
from ..source.outline import Part, records
from ..source.pickle.emit import emit
from ..source.pickle.policy import WRITTEN
from ..source.pickle.rebuild import Rebuilder
from ..source.pickle.tree import Composite, DictNode, TensorRecord
from ..source.sidefiles import HISTORY
from ..source.target import OutputFile, Placed, Rest, Target
from . import _zipwrite
from ._ranks import Naming, by_rank
from ._shards import deal, in_natural_order, shard_names
from ._torchtree import check_holds, nodes, plain_part, state_node, torch_form

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
    rest: Rest | None,
) -> Target:
    """The whole output: every header, offset and small file.

    Without `folder` one file with the stamp as a record of its own. A folder has one file for each
    rank where keys name ranks, shards of at most `max_shard_size` bytes of tensors with an index
    where the checkpoint is a flat dict, else one file of any size. `rest` is what the files hold
    beside the tensors of `specs`; without it each is a plain dict. M916 naming every tensor that
    torch cannot hold.
    """
    check_holds(specs)
    with collector_paused():
        parts = (
            by_rank(specs)
            if ranks is not None
            or (rest is not None and len(rest.parts) > 1)
            or "@" in "".join(specs)
            else []
        )
        if rest is None:
            rest = plain(specs, parts)
        if len(parts) > 1 and not folder:
            fail(
                "M916",
                f"one file cannot hold what {len(parts)} ranks have each",
                help="write a folder: an output whose name has no suffix",
            )
        every = {**specs, **rest.carried}
        small: dict[str, bytes] = {}
        own = None if folder or stamp is None else stamp.encode()
        if len(parts) > 1 or (ranks is not None and folder):
            called = ranks or Naming()
            # Meta's ending, and Megatron's
            suffix = ".pt" if called.after else ".pth"
            files = tuple(
                file(called.name(rank, suffix), part, every, rest, own)
                for rank, part in enumerate(rest.parts)
            )
        elif not folder:
            files = (file("model.pt", rest.parts[0], every, rest, own),)
        else:
            shards = _shards(rest, specs, max_shard_size)
            names = [f"pytorch_{name}" for name in shard_names(len(shards), SUFFIX)]
            files = tuple(
                file(name, part, every, rest, own) for name, part in zip(names, shards, strict=True)
            )
            if len(files) > 1:
                total = sum(p.nbytes for f in files for p in f.tensors)
                small[INDEX] = _index_text(dict(zip(names, shards, strict=True)), rest, total)
        if folder and stamp is not None:
            small[HISTORY] = stamp.encode()
    return Target(files, folder, small)


def plain(specs: Mapping[str, Spec], parts: Sequence[Sequence[tuple[str, str]]]) -> Rest:
    """A dict of tensors for each rank, and nothing beside them."""
    made, names = [], {}
    for part in parts or [[(key, key) for key in in_natural_order(specs)]]:
        keys = {short: key for key, short in part}
        one, known = plain_part({short: specs[key] for short, key in keys.items()})
        made.append(one)
        names.update({number: keys[short] for number, short in known.items()})
    return Rest(tuple(made), names, {}, {})


def _shards(rest: Rest, specs: Mapping[str, Spec], limit: int) -> list[Part]:
    """The tree dealt out to files: whole unless it is a flat dict of tensors, and of objects that
    share no bytes.

    Tensors that share their bytes stay together, and so do the components of an object.
    """
    part = rest.parts[0]
    table = part.table
    if part.at != () or part.nests or table is None or rest.carried:
        return [part]
    shared = {first for key, first in rest.first.items() if key != first}
    sizes: dict[str, Spec] = {}
    for _, value in table.pairs:
        if type(value) is Composite:
            held = [rest.names[id(record)] for _, record in value.components]
            if any(rest.first.get(key, key) != key for key in held) or not shared.isdisjoint(held):
                return [part]
            sizes[held[0]] = spec("uint8", (sum(specs[key].nbytes for key in held),))
        elif (
            type(value) is TensorRecord and rest.first.get(key := rest.names[id(value)], key) == key
        ):
            sizes[key] = specs[key]
    dealt = deal(list(sizes), sizes, limit)
    if len(dealt) == 1:
        return [part]
    number = {key: n for n, shard in enumerate(dealt) for key in shard}
    pairs: list[list[tuple[object, object]]] = [[] for _ in dealt]
    for key, value in table.pairs:
        leaf = value.components[0][1] if type(value) is Composite else value
        named = rest.names.get(id(leaf), "") if type(leaf) is TensorRecord else ""
        pairs[number[rest.first.get(named, named)] if named else 0].append((key, value))
    return [
        Part(
            DictNode(table.kind, tuple(held), table.node, table.attributes if n == 0 else None), ()
        )
        for n, held in enumerate(pairs)
    ]


def _index_text(shards: Mapping[str, Part], rest: Rest, total: int) -> bytes:
    """The index as transformers writes it: two spaces of indent, keys sorted. It names an object,
    not what that is made of.
    """
    lines: list[tuple[str, str]] = []
    for name, part in shards.items():
        for key, value in part.root.pairs:
            if type(value) is Composite:
                lines.append((key, name))
            elif type(value) is TensorRecord:
                lines.append((rest.names[id(value)], name))
    entries = ",\n".join(f'    {encode_basestring(key)}: "{name}"' for key, name in sorted(lines))
    return (
        f'{{\n  "metadata": {{\n    "total_size": {total}\n  }},\n  "weight_map": '
        f"{{\n{entries}\n  }}\n}}\n"
    ).encode()


def file(
    name: str, part: Part, specs: Mapping[str, Spec], rest: Rest, stamp: bytes | None
) -> OutputFile:
    """One archive that holds a tree: its pickle, the storages in the order of the pickle, the
    stamp.
    """
    made, numbers, states = Rebuilder(), dict[str, int](), dict[int, object]()
    for found in records([part.root]):
        key = rest.names[id(found)]
        numbers.setdefault(rest.first.get(key, key), len(numbers))

    def tensor(found: TensorRecord) -> object:
        key = rest.names[id(found)]
        first = rest.first.get(key, key)
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

    stream = emit(nodes(part.root, tensor), name=f"{name}: data.pkl", names=WRITTEN)
    before = (("data.pkl", stream), *_BEFORE)
    after = (("version", _VERSION), *(((HISTORY, stamp),) if stamp is not None else ()))
    sizes = [specs[key].nbytes for key in numbers]
    layout = _zipwrite.plan(
        ROOT,
        [
            *((n, len(b)) for n, b in before),
            *((f"data/{i}", size) for i, size in enumerate(sizes)),
            *((n, len(b)) for n, b in after),
        ],
    )
    first, count = len(before), len(sizes)
    placed = tuple(
        Placed(key, slot.offset, slot.size)
        for key, slot in zip(numbers, layout.slots[first : first + count], strict=True)
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
        name, head + _zipwrite.local_header(layout, layout.slots[first]), placed, layout.size, seal
    )


def _literal(layout: _zipwrite.Plan, slot: _zipwrite.Slot, content: bytes) -> bytes:
    """A record that is known beforehand, whole."""
    return (
        _zipwrite.local_header(layout, slot) + content + _zipwrite.descriptor(slot, crc32(content))
    )


class Seal:
    """What follows a storage in its archive, once the CRC-32s of all storages up to it are
    known.
    """

    __slots__ = ("_after", "_before", "_count", "_first", "_layout")

    def __init__(
        self,
        layout: _zipwrite.Plan,
        first: int,
        count: int,
        before: Sequence[bytes],
        after: Sequence[bytes],
    ) -> None:
        self._layout, self._first, self._count, self._after = layout, first, count, after
        self._before = [crc32(content) for content in before]

    def __call__(self, crcs: Sequence[int]) -> bytes:
        layout, slots = self._layout, self._layout.slots
        here = self._first + len(crcs) - 1
        behind = _zipwrite.descriptor(slots[here], crcs[-1]) if crcs else b""
        if len(crcs) < self._count:
            return behind + _zipwrite.local_header(layout, slots[here + 1])
        tail = b"".join(
            _literal(layout, slot, content)
            for slot, content in zip(slots[here + 1 :], self._after, strict=True)
        )
        return (
            behind
            + tail
            + _zipwrite.directory(
                layout, [*self._before, *crcs, *(crc32(content) for content in self._after)]
            )
        )
