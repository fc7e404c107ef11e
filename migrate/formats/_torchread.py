"""One .pt file, or what stands for one: its tree of values with its tensors where they lie.

The zip archive and the older row of pickles differ in where a storage's bytes are and in nothing
else. What the decoders could read and no output can hold (numbers whose sign or conjugation is
still pending, a rank's part of a distributed tensor, dtypes that only torch's own kernels know) is
treated as what they could not read: named, and left out with permission.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..core.diagnostics import fail, listed, printable
from ..core.spec import ALIASES, BITS, Spec, spec
from ..source.blobs import FileBlob
from ..source.index import Stored
from ..source.jsontext import collector_paused
from ..source.outline import Part, choose, dropped, flat, pruned, tensors_of
from ..source.pickle.limits import ARCHIVE
from ..source.pickle.machine import read as read_pickle
from ..source.pickle.policy import Outside, decode
from ..source.pickle.tree import (
    ITEMSIZE,
    Composite,
    Described,
    DictNode,
    ListNode,
    LocalShard,
    Opaque,
    Storage,
    TensorRecord,
    dotted,
    holders,
    inside,
    joined,
)
from ..source.sidefiles import HISTORY, MAX_HISTORY
from ..source.unread import Unread, Written, left
from . import _kinds, _legacy, _zip
from ._zip import Record

PACKED = "float4_e2m1fn_x2"


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """What one file holds. `tensors` are those of the dict that rules work on, by key; `others` all
    the other ones, by path.

    `names` has the keys of the former and `paths` the paths of the latter, by the identity of their
    records. `places` are its storages, and `number` is that of the file among all.
    """

    part: Part
    tensors: dict[str, Stored]
    others: dict[str, Stored]
    names: dict[int, str]
    paths: dict[int, str]
    outside: tuple[Outside, ...]
    notes: tuple[str, ...]
    places: Mapping[str, Record]
    number: int
    history: bytes | None
    unread: Mapping[str, Unread]


class _Raw(NamedTuple):
    """The decoded tree of a file, and where the bytes of its stream and of each storage lie."""

    root: Any
    places: Mapping[str, Record]
    outside: tuple[Outside, ...]
    history: bytes | None
    hidden: frozenset[str]
    stream: tuple[int, int]


def read(blob: FileBlob, number: int, label: str, at: str | None) -> Held:
    """What the file that is blob `number` holds; `label` names it in messages, `at` is the dict
    that rules work on.

    M930 to M936 and M940 to M945 for what is no sound file of torch.save, M935 never:
    `Held.outside` says what was left out.
    """
    with collector_paused():
        raw = _raw(blob, label)
        root, notes, unread = raw.root, [], {}
        left_out, more = unfit(root)
        outside = (*raw.outside, *more)
        if left_out or outside:
            root, gone = pruned(root, left_out)
            notes += [dropped([printable(one.path) for one in gone])] * bool(gone)
            unread = left(gone, Written(number, raw.stream, raw.places, raw.hidden))
        part = flat(Part(root, choose(root, at, label)), label)
        if part.nests:
            where = f"`{printable('.'.join(part.at))}`" if part.at else "the file"
            notes.append(f"{where} is made of dicts; rules see their keys joined by dots")
        tensors, names = _table(part, raw.places, number, label)
        others, paths = _others(part, raw.places, number)
    unsummed = sum(record.crc is None and record.size > 0 for record in raw.places.values())
    if unsummed:
        notes.append(
            f"{label}: {unsummed} of {len(raw.places)} storages without a checksum; a damaged one "
            "would not be noticed"
        )
    return Held(
        part,
        tensors,
        others,
        names,
        paths,
        outside,
        tuple(notes),
        raw.places,
        number,
        raw.history,
        unread,
    )


def _raw(blob: FileBlob, label: str) -> _Raw:
    size = blob.size
    head = blob.read(0, min(_kinds.HEAD, size))
    tail = blob.read(max(0, size - _kinds.TAIL), min(_kinds.TAIL, size))
    found = _kinds.kind(head, size, tail)
    if found == "legacy":
        legacy = _legacy.read(blob, label=label)
        decoded = decode(
            legacy.value, label, {key: record.size for key, record in legacy.records.items()}
        )
        end = min((record.offset for record in legacy.records.values()), default=size)
        return _Raw(decoded.tree, legacy.records, decoded.outside, None, decoded.hidden, (0, end))
    if found != "zip":
        _kinds.refuse(label, found)
    archive = _zip.read(blob, label=label)
    stream = _zip.content(blob, archive.records["data.pkl"], ARCHIVE.size, label)
    nodes = read_pickle(stream, ARCHIVE, name=f"{label}: data.pkl", persistent=True)
    places = {
        name[5:]: record for name, record in archive.records.items() if name.startswith("data/")
    }
    decoded = decode(nodes, label, {key: record.size for key, record in places.items()})
    history = archive.records.get(HISTORY)
    stamp = None if history is None else _zip.content(blob, history, MAX_HISTORY, label)
    written = archive.records["data.pkl"]
    return _Raw(
        decoded.tree, places, decoded.outside, stamp, decoded.hidden, (written.offset, written.size)
    )


def unfit(root: Any) -> tuple[dict[int, str], tuple[Outside, ...]]:
    """The values that no output can hold, by identity with the reason, and the account of those
    that the decoders read.
    """
    reasons: dict[int, str] = {}
    found: dict[tuple[str, str], tuple[int, list[str]]] = {}
    seen: set[int] = set()
    holding: set[int] = set()
    met: set[int] = set()

    def holds_more(value: Any) -> bool:
        """Whether there is more in a value than plain data: what is opaque would go out again as it
        came in.
        """
        return id(value) in holders(value, _MORE, holding, met)

    def holds_tensors(key: Any) -> bool:
        return id(key) in holders(key, _TENSORS)

    stack: list[tuple[Any, tuple[Any, ...]]] = [(root, ())]
    while stack:
        node, path = stack.pop()
        kind = type(node)
        if kind is TensorRecord:
            # most tensors are of a known dtype, and nothing else is asked of them
            if (
                node.dtype in _KNOWN
                and not (node.conjugate or node.negative)
                and node.state is None
            ):
                continue
            reason = _why_unfit(node, holds_more)
        elif kind is Described:
            reason = "an object that holds what is not read" if holds_more(node) else ""
        elif kind is Composite:
            reason = next(
                (why for _, record in node.components if (why := _why_unfit(record, holds_more))),
                "",
            )
        elif kind is LocalShard:
            reason = (
                "a DTensor, or the part of one that a rank held; save its full_tensor(), or "
                "a distributed checkpoint"
            )
        elif kind is DictNode and any(
            type(key) is TensorRecord or holds_tensors(key)
            for key, _ in node.pairs
            if type(key) not in _PLAIN
        ):
            reason = "a dict with tensors as keys"
        elif kind is Storage:
            reason = "a storage that is no tensor; save a tensor of it"
        elif kind is Opaque:
            reasons[id(node)] = node.reason
            continue
        else:
            reason = ""
        if reason:
            reasons[id(node)] = reason
            name = _name_of(node)
            count, paths = found.get((name, reason), (0, []))
            if len(paths) < 20:
                paths.append(dotted(path))
            found[name, reason] = (count + 1, paths)
            continue
        if kind is DictNode or kind is ListNode:
            if id(node) in seen:
                continue
            seen.add(id(node))
            stack += [
                (child, (*path, key))
                for key, child in reversed(inside(node))
                if type(child) not in _PLAIN
            ]
            if kind is DictNode:
                stack += [(key, (*path, key)) for key, _ in node.pairs if type(key) not in _PLAIN]
    return reasons, tuple(
        Outside(name, reason, count, tuple(paths))
        for (name, reason), (count, paths) in found.items()
    )


_PLAIN = frozenset({type(None), bool, int, float, str, bytes, bytearray, complex})
_CONTAINERS = frozenset({DictNode, ListNode})
_KNOWN = frozenset(ITEMSIZE) & frozenset(BITS)


# what may stand in no state, no object's field and no key of a dict that goes out again
_MORE = frozenset({Opaque, TensorRecord, LocalShard, Storage})
_TENSORS = _MORE - {Opaque}


def _why_unfit(record: TensorRecord, holds_more: Callable[[Any], bool]) -> str:
    """Why no output can hold this tensor; nothing if one can."""
    if record.conjugate or record.negative:
        return (
            "a tensor with a pending conjugation or negation; save resolve_conj() or "
            "resolve_neg() of it"
        )
    if record.dtype == PACKED:
        fit = record.shape and (record.shape[-1] == 1 or record.strides[-1] == 1)
        return (
            ""
            if fit
            else "a tensor of packed 4-bit numbers whose pairs do not lie beside each other"
        )
    if record.dtype not in BITS:
        return "a dtype that only torch's own kernels know"
    return (
        "a tensor whose attributes hold tensors, or what is not read"
        if holds_more(record.state)
        else ""
    )


def _name_of(node: Any) -> str:
    if type(node) is LocalShard:
        return "torch.distributed.tensor.DTensor"
    if type(node) in (Storage, DictNode):
        return "torch.UntypedStorage" if type(node) is Storage else "dict"
    return getattr(node, "name", None) or f"torch.{node.dtype}"


def _table(
    part: Part, places: Mapping[str, Record], number: int, label: str
) -> tuple[dict[str, Stored], dict[int, str]]:
    """The tensors of the dict that rules work on, and their keys by identity."""
    table = part.table
    held = tensors_of(table)
    known: dict[tuple[Any, ...], _Form] = {}
    tensors: dict[str, Stored] = {}
    for key, record in held:
        sort = (record.dtype, record.shape, record.strides)
        form = known.get(sort)
        if form is None:
            form = known[sort] = _form(*sort)
        tensors[key] = _stored(record, form, places[record.storage.key], number)
    if len(tensors) < len(held):
        counts = Counter(key for key, _ in held)
        twice = sorted(key for key, count in counts.items() if count > 1)
        fail(
            "M956",
            f"{label}: a tensor is called like a part of an object beside it: {listed(twice, 4)}",
        )
    return tensors, {id(record): key for key, record in held}


def _others(
    part: Part, places: Mapping[str, Record], number: int
) -> tuple[dict[str, Stored], dict[int, str]]:
    """The tensors of all other places by path, and their paths by identity; one that stands in both
    is in both.
    """
    others: dict[str, Stored] = {}
    paths: dict[int, str] = {}
    counts: dict[str, int] = {}
    for path, record in elsewhere(part.root, part.table):
        if id(record) in paths:
            continue
        name = base = printable(joined(path, 520), 500)
        while name in others:
            counts[base] = again = counts.get(base, 1) + 1
            name = f"{base}#{again}"
        others[name] = _stored(
            record,
            _form(record.dtype, record.shape, record.strides),
            places[record.storage.key],
            number,
        )
        paths[id(record)] = name
    return others, paths


def elsewhere(root: Any, table: DictNode | None) -> list[tuple[tuple[str, ...], TensorRecord]]:
    """(path, tensor) of those that rules do not see: around the dict that they work on, and inside
    of values in it.
    """
    out: list[tuple[tuple[str, ...], TensorRecord]] = []
    seen: set[int] = set()
    stack: list[tuple[Any, tuple[str, ...]]] = [(root, ())]
    while stack:
        node, path = stack.pop()
        kind = type(node)
        if kind is TensorRecord:
            out.append((path or ("tensor",), node))
        elif kind is Composite:
            stack += [
                (record, (*path, *attribute.split(".")))
                for attribute, record in reversed(node.components)
            ]
        elif (kind is DictNode or kind is ListNode) and id(node) not in seen:
            seen.add(id(node))
            held = [
                pair for pair in inside(node) if node is not table or type(pair[1]) in _CONTAINERS
            ]
            stack += [
                (child, (*path, str(key) if type(key) in (str, int) else "~"))
                for key, child in reversed(held)
            ]
    return out


class _Form(NamedTuple):
    """What many tensors of a file have in common. `empty`: nothing of it is shared, wherever it
    points.
    """

    spec: Spec
    strides: tuple[int, ...] | None
    itemsize: int
    empty: bool


def _form(dtype: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> _Form:
    packed, expected = True, 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        packed = packed and (size == 1 or stride == expected)
        expected *= size
    if dtype == PACKED:
        shape, strides = (*shape[:-1], 2 * shape[-1]), (*(2 * s for s in strides[:-1]), 1)
    return _Form(
        spec(ALIASES.get(dtype, dtype), shape),
        None if packed else strides,
        ITEMSIZE[dtype],
        0 in shape,
    )


def _stored(record: TensorRecord, form: _Form, place: Record, number: int) -> Stored:
    """Where a tensor of one file lies."""
    if form.empty:
        return Stored(form.spec, number, place.offset)
    # all fields at once: the named tuple's own function takes three times as long
    return tuple.__new__(
        Stored,
        (
            form.spec,
            number,
            place.offset + record.offset * form.itemsize,
            form.strides,
            (number, place.name),
        ),
    )
