"""What a checkpoint holds beside the tensors that rules work on: nested dicts, other tensors,
values that are no tensors.

Rules work on one flat dict of tensors. Everything around it is kept as the tree that was decoded,
with tensors as leaves that are known by name; an output has new tensors in that one dict and the
rest as it stood.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, replace
from operator import is_
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from ..core.errors import fail, listed, printable
from ..core.spec import ALIASES, BITS, PACKED, Spec, spec
from .blobs import Stored, StoredTensor
from .pickle.tree import (
    ITEMSIZE,
    OBJECTS,
    SCALARS,
    Carried,
    Composite,
    Described,
    DictNode,
    Encoding,
    ListNode,
    LocalShard,
    Opaque,
    Storage,
    TensorRecord,
    answered,
    dotted,
    holders,
    inside,
    inside_of,
    joined,
    segment,
)

if TYPE_CHECKING:
    from .pickle.policy import Outside

NODES = frozenset({DictNode, ListNode})
# lists whose items have places
_ORDERED = ("list", "tuple")


class NestedDict(NamedTuple):
    """A dict inside the one that rules work on: the keys to it, and the dict as it was."""

    path: tuple[str, ...]
    was: DictNode


class FileTree(NamedTuple):
    """What one file, or the files of one rank, hold: the tree, and the path of the dict that rules
    work on; None without one.

    `nested_dicts` are the dicts whose entries stand in that one while rules work on it.
    """

    root: Any
    at: tuple[str, ...] | None
    nested_dicts: tuple[NestedDict, ...] = ()

    @property
    def table(self) -> DictNode | None:
        """The dict that rules work on."""
        return None if self.at is None else dict_at(self.root, self.at)


@dataclass(frozen=True, slots=True, eq=False)
class CheckpointTree:
    """The trees of a checkpoint, by rank.

    `names` has the key of each tensor in them, by the record's identity: of `passed_through`, or of
    the index's tensors. `passed_through` are the tensors outside of the dicts that rules work on.
    `ties`: a key -> the key whose bytes it shared before the two were written one by one.
    """

    parts: tuple[FileTree, ...]
    names: Mapping[int, str]
    passed_through: Mapping[str, StoredTensor]
    ties: Mapping[str, str]

    @property
    def versions(self) -> Mapping[str, int] | None:
        """Module -> its version, as `_metadata` of the dicts of rules has them; None without."""
        found: dict[str, int] = {}
        seen = False
        for part in self.parts:
            attributes = part.table.attributes if part.table is not None else None
            metadata = (
                dict(attributes.pairs).get("_metadata") if type(attributes) is DictNode else None
            )
            for name, entry in metadata.pairs if type(metadata) is DictNode else ():
                version = dict(entry.pairs).get("version") if type(entry) is DictNode else None
                if type(name) is str and type(version) is int:
                    found.setdefault(name, version)
            seen = seen or type(metadata) is DictNode
        return found if seen else None


def object_encodings(
    tree: CheckpointTree | None, numbering: str | None = None
) -> dict[str, Encoding]:
    """What tensors are that are objects, by the path of each, with its rank where there are ranks.

    Those of one part are read together; `numbering` is what a person says of integers with two
    meanings, see `pickle.tree.answered`.
    """
    found: dict[str, Encoding] = {}
    parts = () if tree is None else tree.parts
    for rank, part in enumerate(parts):
        mark = f"@{rank}" if len(parts) > 1 else ""
        found.update(
            {
                f"{path}{mark}": value.encoding
                for path, value in resolve_objects(part, numbering).items()
            }
        )
    return found


def resolve_objects(part: FileTree, numbering: str | None) -> dict[str, Composite]:
    """The objects of one part by path, from the dict that rules work on where they stand in it,
    with what the whole part tells of each.
    """
    inside_table = len(part.at or ())
    objects: dict[str, Composite] = {}
    for path, value in objects_of(part.root):
        objects[
            ".".join(
                path[inside_table:]
                if part.at is not None and path[:inside_table] == part.at
                else path
            )
        ] = value
    known = answered({path: value.encoding for path, value in objects.items()}, numbering)
    return {path: replace(value, encoding=known[path]) for path, value in objects.items()}


def dict_at(root: Any, path: tuple[str, ...]) -> DictNode | None:
    """The dict at a path of keys, integers in decimal, and of places in lists; None if there is
    none.
    """
    here = root
    for part in path:
        if type(here) is ListNode:
            here = item_at(here, part)
        elif type(here) is DictNode:
            held = here
            here = held.get(part)
            if here is None:
                here = integer_item(held, part)
        else:
            return None
    return here if type(here) is DictNode and here.kind not in OBJECTS else None


def integer_item(node: DictNode, name: str) -> Any:
    """The value of the integer key that is written so in decimal, and that no text key is spelled
    like; None without.
    """
    if any(key == name for key, _ in node.pairs if type(key) is str):
        return None
    return next((value for key, value in node.pairs if type(key) is int and str(key) == name), None)


def item_at(node: ListNode, place: str) -> Any:
    """What stands at a place of a list or tuple, which is written in decimal; None without one."""
    if node.kind not in _ORDERED or not (place.isascii() and place.isdecimal()):
        return None
    # leading zeros would spell one place in many ways
    known = len(place) <= len(str(len(node.items))) and str(int(place)) == place
    return node.items[int(place)] if known and int(place) < len(node.items) else None


def replace_dict(root: Any, old: DictNode, new: DictNode) -> Any:
    """The tree with one dict in place of another, wherever it stands."""
    return replace_values(root, {id(old): new})


def replace_values(root: Any, new: Mapping[int, Any]) -> Any:
    """The tree with other values in place of those of these identities, wherever they stand."""
    made: dict[int, Any] = dict(new)

    def visit(node: Any) -> Any:
        kind = type(node)
        if id(node) in made:
            return made[id(node)]
        if kind not in NODES or (kind is ListNode and node.kind not in _ORDERED):
            return node
        held = node.items if kind is ListNode else [value for _, value in node.pairs]
        # states of generators are thousands of numbers, and state dicts as many tensors
        if NODES.isdisjoint(map(type, held)) and made.keys().isdisjoint(map(id, held)):
            made[id(node)] = node
            return node
        values = [
            visit(value) if type(value) in NODES or id(value) in made else value for value in held
        ]
        if all(map(is_, values, held)):
            made[id(node)] = node
        elif kind is ListNode:
            made[id(node)] = ListNode(node.kind, tuple(values), node.node)
        else:
            pairs = zip([key for key, _ in node.pairs], values, strict=True)
            made[id(node)] = DictNode(node.kind, tuple(pairs), node.node, node.attributes)
        return made[id(node)]

    return visit(root)


def tensors_of(table: DictNode | None) -> list[tuple[str, TensorRecord]]:
    """The tensors of a dict by the keys that rules see, in order: of an object made of tensors,
    each under its own attribute's name.
    """
    if table is None:
        return []
    held: list[tuple[str, TensorRecord]] = []
    for key, value in table.pairs:
        kind = type(value)
        if kind is TensorRecord:
            held.append((key, value))
        elif kind is Composite:
            held += value.keys(key)
    return held


def objects_of(root: Any) -> Iterator[tuple[tuple[str, ...], Composite]]:
    """(path, object) of the tensors that are objects made of tensors, each place once."""
    seen: set[int] = set()
    stack: list[tuple[Any, tuple[str, ...]]] = [(root, ())]
    while stack:
        node, path = stack.pop()
        kind = type(node)
        if kind is Composite:
            yield path, node
        elif (kind is DictNode or kind is ListNode) and id(node) not in seen:
            seen.add(id(node))
            stack += [
                (child, (*path, segment(key))) for key, child in reversed(inside_of(node, _HOLDING))
            ]


def is_flat(node: DictNode | None, holding: Container[int] | None = None) -> bool:
    """Whether the dict has text keys, a tensor, and no tensors in other values but extra states.

    `holding` are the values that have some below them.
    """
    if node is None:
        return False
    tensors = False
    holding = holders(node, TENSORS) if holding is None else holding
    for key, value in node.pairs:
        if type(key) is not str:
            return False
        kind = type(value)
        if kind is TensorRecord or kind is Composite:
            tensors = True
        elif (
            (kind is DictNode or kind is ListNode)
            and id(value) in holding
            and not is_object(key, value)
        ):
            return False
    return tensors


def tensors_outside(
    root: Any, table: DictNode | None
) -> list[tuple[tuple[str, ...], TensorRecord]]:
    """(path, tensor) of those unseen by rules: around their dict, and inside of its values."""
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
        elif kind is Carried:
            stack += [(record, (*path, place)) for place, record in reversed(inside(node))]
        elif (kind is DictNode or kind is ListNode) and id(node) not in seen:
            seen.add(id(node))
            held = inside_of(node, _HOLDING if node is not table else _AROUND)
            stack += [
                (child, (*path, str(key) if type(key) in (str, int) else "~"))
                for key, child in reversed(held)
            ]
    return out


def refuse_same_names(held: list[tuple[str, TensorRecord]], label: str) -> NoReturn:
    """M956 for the tensors of a dict that have the same key."""
    counts = Counter(key for key, _ in held)
    twice = sorted(key for key, count in counts.items() if count > 1)
    fail(
        "M956",
        f"{label}: a tensor has the same name as a part of an object beside it: {listed(twice, 4)}",
    )


def name_tensors_outside(part: FileTree) -> list[tuple[str, TensorRecord]]:
    """(name, tensor) of those unseen by rules, each tensor once: its path, and a number where
    another one has the same path, as keys have dots.
    """
    out: dict[str, TensorRecord] = {}
    met: set[int] = set()
    counts: dict[str, int] = {}
    for path, record in tensors_outside(part.root, part.table):
        if id(record) in met:
            continue
        name = base = printable(joined(path, 520), 500)
        while name in out:
            counts[base] = again = counts.get(base, 1) + 1
            name = f"{base}#{again}"
        out[name] = record
        met.add(id(record))
    return list(out.items())


class TensorForm(NamedTuple):
    """What many tensors of a file have in common. `empty`: nothing of it is shared."""

    spec: Spec
    strides: tuple[int, ...] | None
    itemsize: int
    empty: bool


def tensor_form(dtype: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> TensorForm:
    """The form of a tensor of torch's `dtype`; without strides if it is row-major."""
    packed, expected = True, 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        packed = packed and (size == 1 or stride == expected)
        expected *= size
    if dtype == PACKED:
        shape, strides = (*shape[:-1], 2 * shape[-1]), (*(2 * s for s in strides[:-1]), 1)
    return TensorForm(
        spec(ALIASES.get(dtype, dtype), shape),
        None if packed else strides,
        ITEMSIZE[dtype],
        0 in shape,
    )


def place_tensor(record: TensorRecord, form: TensorForm, place: Any, number: int) -> Stored:
    """Where a tensor of one file lies; `place` is the record of its storage in the archive."""
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


def tensor_records(roots: list[Any]) -> Iterator[TensorRecord]:
    """The tensors below these values, in order, each once."""
    seen: set[int] = set()
    stack = list(reversed(roots))
    while stack:
        node = stack.pop()
        kind = type(node)
        if kind not in _HOLDING or id(node) in seen:
            continue
        seen.add(id(node))
        if kind is TensorRecord:
            yield node
            if node.state is None:
                continue
        stack += [child for _, child in reversed(inside_of(node, _HOLDING))]


TENSORS = frozenset({TensorRecord, Composite, LocalShard})
_HOLDING = frozenset({TensorRecord, Composite, DictNode, ListNode, LocalShard, Carried})
_AROUND = NODES | {Carried}


class TreeLeaf(NamedTuple):
    """A leaf of the tree, tensor or not, with the path to it; `words` are its segments."""

    words: tuple[str, ...]
    value: Any

    @property
    def path(self) -> str:
        return ".".join(self.words)


def tree_leaves(
    root: Any,
    stop: DictNode | None,
    most: int = 1_000_000,
    whole: Container[int] = frozenset(),
) -> Iterator[TreeLeaf]:
    """The leaves of a tree, each container entered once; without the tensors of the dict `stop`.
    Containers of these identities are `whole`, as leaves.
    """
    seen: set[int] = set()
    stack: list[tuple[Any, tuple[str, ...]]] = [(root, ())]
    count = 0
    while stack and count < most:
        node, path = stack.pop()
        held: list[tuple[Any, Any]] = []
        if type(node) in (DictNode, ListNode) and id(node) not in whole:
            if id(node) in seen:
                continue
            seen.add(id(node))
            held = inside(node)
        if not held:
            count += 1
            yield TreeLeaf(path, node)
            continue
        if node is stop:
            held = [pair for pair in held if type(pair[1]) is not TensorRecord]
        if SCALARS.issuperset([type(child) for _, child in held]):
            # which may be a hundred thousand
            held = held[: most - count]
            count += len(held)
            yield from [TreeLeaf((*path, segment(key)), child) for key, child in held]
            continue
        stack += [(child, (*path, segment(key))) for key, child in reversed(held)]


def unfit(root: Any) -> tuple[dict[int, str], tuple[Outside, ...]]:
    """The values that no output can hold, by identity with the reason; and all decoders read."""
    from .pickle.policy import Outside

    reasons: dict[int, str] = {}
    found: dict[tuple[str, str], tuple[int, list[str]]] = {}
    seen: set[int] = set()
    holding: set[int] = set()
    met: set[int] = set()

    def holds_more(value: Any) -> bool:
        """Whether a value is more than plain data: what is opaque goes out as it came in."""
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
            if type(key) not in SCALARS
        ):
            reason = "a dict with tensors as keys"
        elif kind is Storage:
            reason = "a storage that is not a tensor; save a tensor of it"
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
                if type(child) not in SCALARS
            ]
            if kind is DictNode:
                stack += [(key, (*path, key)) for key, _ in node.pairs if type(key) not in SCALARS]
    return reasons, tuple(
        Outside(name, reason, count, tuple(paths))
        for (name, reason), (count, paths) in found.items()
    )


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


class RemovedEntry(NamedTuple):
    """An entry that was left out: its path, its key and its value. The key is None where it is not
    an entry of a dict.
    """

    path: str
    key: Any
    value: Any


def prune(root: Any, unfit: Mapping[int, str]) -> tuple[Any, list[RemovedEntry]]:
    """The tree without entries of dicts that hold values of these identities, and these entries.

    What stands in a list takes the nearest dict entry around the list with it: the places of the
    others would change. So do the attributes of a dict, and the whole file where there is no dict
    around it.
    """
    gone: list[RemovedEntry] = []
    made: dict[int, Any] = {}
    bad: dict[int, bool] = {}

    def visit(node: Any, path: tuple[str, ...]) -> Any:
        kind = type(node)
        if id(node) in made:
            return made[id(node)]
        if kind is Opaque or id(node) in unfit:
            bad[id(node)] = True
            made[id(node)] = node
        elif kind is DictNode:
            pairs = []
            for key, value in node.pairs:
                # a key may hold what is unfit as well, and would be written again
                if type(key) is not str:
                    visit(key, path)
                new = visit(value, (*path, segment(key)))
                if bad.get(id(value)) or bad.get(id(key)):
                    gone.append(RemovedEntry(joined((*path, key), 300), key, value))
                else:
                    pairs.append((key, new))
            attributes = (
                None if node.attributes is None else visit(node.attributes, (*path, ".state"))
            )
            if bad.get(id(node.attributes)):
                attributes = None
                gone.append(RemovedEntry(joined((*path, ".state"), 300), None, node.attributes))
            same = len(pairs) == len(node.pairs) and all(
                a[1] is b[1] for a, b in zip(pairs, node.pairs, strict=True)
            )
            same = same and attributes is node.attributes
            made[id(node)] = (
                node if same else DictNode(node.kind, tuple(pairs), node.node, attributes)
            )
        elif kind is ListNode:
            items = [visit(item, (*path, str(number))) for number, item in enumerate(node.items)]
            bad[id(node)] = any(bad.get(id(item)) for item in node.items)
            same = all(a is b for a, b in zip(items, node.items, strict=True))
            made[id(node)] = node if same else ListNode(node.kind, tuple(items), node.node)
        else:
            made[id(node)] = node
        return made[id(node)]

    new = visit(root, ())
    if bad.get(id(root)):
        return None, [*gone, RemovedEntry(".", None, root)]
    return new, gone


def dropped_note(gone: list[str]) -> str:
    """The note on entries that were dropped."""
    return f"dropped, because they are outside the allow-list: {listed(gone, 20)}"


# the key of a root under which `by_part` keeps what parts have otherwise
PARTS = "parts"
# that under which stands what was cut off tensors, once for all parts; and in what is kept of a
# part, the states of modules that it has otherwise than the model, by their keys there
KEPT, STATES = "migrate.kept", "migrate.states"


def kept_by_part(root: Any) -> tuple[tuple[str, Any], ...]:
    """(part, what is kept of it) in order, the first part's among them, of which nothing is; empty
    for a root that keeps nothing.
    """
    kept = root.get(PARTS) if type(root) is DictNode else None
    if type(kept) is not DictNode or not kept.pairs or kept.kind != "dict":
        return ()
    first = kept.pairs[0][1]
    ours = type(first) is DictNode and first.kind == "dict" and not first.pairs
    return kept.pairs if ours and all(type(name) is str for name, _ in kept.pairs) else ()


# what a module of torch calls the state that it keeps beside its parameters
STATE = "_extra_state"


def is_state(key: str) -> bool:
    """Whether a key is that of an extra state, of whichever rank."""
    # most keys are none, and there may be very many
    return STATE in key and key.partition("@")[0].rpartition(".")[2] == STATE


def is_object(key: Any, value: Any) -> bool:
    """Whether it is an extra state that is a list or a dict: one value, even with tensors."""
    return (
        (type(value) is DictNode or type(value) is ListNode) and type(key) is str and is_state(key)
    )
