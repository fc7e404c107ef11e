"""What a checkpoint holds beside the tensors that rules work on: nested dicts, other tensors,
values that are no tensors.

Rules work on one flat dict of tensors. Everything around it is kept as the tree that was decoded,
with tensors as leaves that are known by name; an output has new tensors in that one dict and the
rest as it stood. Which dict it is, is said by `--at`, or found where the tree leaves no choice: a
training script has its weights under a usual name, or nothing else in its file looks like a state
dict.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, NoReturn

from ..core.errors import fail, listed, option, plural, printable
from ..core.spec import ALIASES, PACKED, Spec, spec
from .blobs import Stored, StoredTensor
from .pickle.tree import (
    ITEMSIZE,
    Composite,
    DictNode,
    Encoding,
    ListNode,
    LocalShard,
    Opaque,
    TensorRecord,
    answered,
    holders,
    inside,
    joined,
    segment,
)

# where training scripts and their frameworks put the weights
USUAL = ("state_dict", "model", "model_state_dict", "module", "net", "weights")
# less than what a stream may have
MAX_DEPTH = 50
_NODES = frozenset({DictNode, ListNode})


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
    """The dict at a path of text keys; None if there is none."""
    here = root
    for part in path:
        here = here.get(part) if type(here) is DictNode else None
    return here if type(here) is DictNode else None


def flatten_table(part: FileTree, label: str) -> FileTree:
    """The part with a flat dict in place of the nested one that rules work on; as it is where that
    is flat. M945 if it cannot be.
    """
    table = part.table
    if (
        table is None
        or _flat(table)
        or (not part.at and model_at_root(table))
        or not _workable(table)
    ):
        return part
    made, nests = flatten(table, label)
    return part._replace(root=replace_dict(part.root, table, made), nested_dicts=nests)


def replace_dict(root: Any, old: DictNode, new: DictNode) -> Any:
    """The tree with one dict in place of another, wherever it stands."""
    made: dict[int, Any] = {id(old): new}

    def visit(node: Any) -> Any:
        if type(node) is not DictNode:
            return node
        if id(node) not in made:
            pairs = tuple((key, visit(value)) for key, value in node.pairs)
            same = all(a[1] is b[1] for a, b in zip(pairs, node.pairs, strict=True))
            made[id(node)] = (
                node if same else DictNode(node.kind, pairs, node.node, node.attributes)
            )
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
                (child, (*path, segment(key)))
                for key, child in reversed(inside(node))
                if type(child) in _HOLDING
            ]


def choose_table(  # noqa: RET503 - what fails does not return
    root: Any, at: str | None, label: str
) -> tuple[str, ...] | None:
    """The path of the dict that rules work on; None where no dict of text keys has tensors.

    M945 if `at` leads to none, or if several could be meant.
    """
    found = _candidates(root)
    if at in (None, "", ".") and () not in found and model_at_root(root):
        return ()
    if at is not None:
        path = _given(root, at)
        if path is None or (found and path not in found and not _workable(dict_at(root, path))):
            held = (
                f"there is {listed([_shown(p) for p in found], 8)}"
                if found
                else "the file has no dict of tensors by name"
            )
            what = f"{label}: no dict of tensors by name is at `{printable(at)}`"
            fail(
                "M945", what, notes=(held,), help=f"leave {option('at')} out, or name one of these"
            )
        return path
    usual: list[tuple[str, ...]] = [path for path in found if len(path) == 1 and path[0] in USUAL]
    homes = usual or [
        path for path in dict.fromkeys(path[:1] for path in found) if path and path[0] in USUAL
    ]
    if len(homes) == 1 and _workable(dict_at(root, homes[0])):
        return homes[0]
    if len(found) <= 1:
        return next(iter(found), None)
    notes = tuple(f"{_shown(path)}: {plural(found[path], 'tensor')}" for path in list(found)[:12])
    if _workable(dict_at(root, ())):
        notes += (f"{option('at', '.')} takes them all, with their keys joined by dots",)
    raise_help = f"say which one: {option('at', _shown(max(found, key=found.__getitem__)))}"
    fail(
        "M945",
        f"{label}: {len(found)} dicts of tensors, and rules work on one",
        notes=notes,
        help=raise_help,
    )


def model_at_root(root: Any) -> bool:
    """Whether the tensors of a model stand at the root itself, as torchtitan saves them: beside the
    state of its optimizer, or beside counters.

    What else holds tensors there has counters only: tensors without dimensions.
    """
    if type(root) is not DictNode:
        return False
    weights = beside = False
    for key, value in root.pairs:
        kind = type(value)
        if type(key) is not str:
            return False
        if kind is TensorRecord:
            weights = weights or bool(value.shape)
        elif kind is Composite:
            weights = True
        elif (kind is DictNode or kind is ListNode) and not is_object(key, value):
            for record in tensor_records([value]):
                beside = True
                if "optim" in key.lower():
                    break
                if record.shape or key in USUAL:
                    return False
    return weights and beside


def _workable(node: DictNode | None) -> bool:
    """Whether rules can work on this dict: flat, or of dicts in which all tensors have names."""
    if _flat(node):
        return True
    held = values_below(node)
    return held is not None and _flat(
        DictNode("dict", tuple((str(number), value) for number, value in enumerate(held)), None)
    )


def _given(root: Any, at: str) -> tuple[str, ...] | None:
    """The path that `at` spells: keys with dots between, and a key may hold dots itself."""
    if at in ("", "."):
        return () if type(root) is DictNode else None
    pending: list[tuple[Any, tuple[str, ...], str]] = [(root, (), at)]
    while pending:
        here, path, rest = pending.pop()
        if type(here) is not DictNode:
            continue
        for key, value in here.pairs:
            if type(key) is not str or not rest.startswith(key) or type(value) is not DictNode:
                continue
            if rest == key:
                return (*path, key)
            if rest[len(key)] == "." and key:
                pending.append((value, (*path, key), rest[len(key) + 1 :]))
    return None


def _shown(path: tuple[str, ...]) -> str:
    return printable(".".join(path)) if path else "."


def _candidates(root: Any) -> dict[tuple[str, ...], int]:
    """The paths of flat dicts of tensors with how many they hold, none of them in the state of an
    optimizer; one dict counts once.
    """
    out: dict[tuple[str, ...], int] = {}
    seen: set[int] = set()
    holding = holders(root, _TENSORS)
    stack: list[tuple[Any, tuple[str, ...]]] = [(root, ())]
    while stack:
        node, path = stack.pop()
        if type(node) is not DictNode or id(node) in seen:
            continue
        seen.add(id(node))
        if _flat(node, holding):
            out[path] = sum(
                type(value) is TensorRecord or type(value) is Composite for _, value in node.pairs
            )
            continue
        stack += [
            (value, (*path, key))
            for key, value in reversed(node.pairs)
            if type(key) is str and "optim" not in key.lower() and not is_state(key)
        ]
    return out


def _flat(node: DictNode | None, holding: Container[int] | None = None) -> bool:
    """Whether the dict has text keys, a tensor, and no tensors in other values but extra states.

    `holding` are the values that have some below them.
    """
    if node is None:
        return False
    tensors = False
    holding = holders(node, _TENSORS) if holding is None else holding
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
        elif (kind is DictNode or kind is ListNode) and id(node) not in seen:
            seen.add(id(node))
            held = [pair for pair in inside(node) if node is not table or type(pair[1]) in _NODES]
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
        stack += [child for _, child in reversed(inside(node)) if type(child) in _HOLDING]


_TENSORS = frozenset({TensorRecord, Composite, LocalShard})
_HOLDING = frozenset({TensorRecord, Composite, DictNode, ListNode, LocalShard})


class TreeLeaf(NamedTuple):
    """A leaf of the tree, tensor or not, with the path to it; `words` are its segments."""

    words: tuple[str, ...]
    value: Any

    @property
    def path(self) -> str:
        return ".".join(self.words)


def tree_leaves(root: Any, stop: DictNode | None, most: int = 1_000_000) -> Iterator[TreeLeaf]:
    """The leaves of a tree, each container entered once; without the tensors of the dict `stop`."""
    seen: set[int] = set()
    stack: list[tuple[Any, tuple[str, ...]]] = [(root, ())]
    count = 0
    while stack and count < most:
        node, path = stack.pop()
        held: list[tuple[Any, Any]] = []
        if type(node) in (DictNode, ListNode):
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
        stack += [(child, (*path, segment(key))) for key, child in reversed(held)]


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


# what a module of torch calls the state that it keeps beside its parameters
STATE = "_extra_state"
_KINDS = ("dict", "OrderedDict")
# of all joined keys together
MAX_TEXT = 64 << 20


class NestedDict(NamedTuple):
    """A dict inside the one that rules work on: the keys to it, and the dict as it was."""

    path: tuple[str, ...]
    was: DictNode


class _OpenDict:
    """Where keys of one dict go: the dicts inside it by name, and what is put into it. With `like`
    it has dicts alone, each of which is one parameter's, and new ones are like that one.
    """

    __slots__ = ("held", "inner", "like", "path")

    def __init__(self, path: tuple[str, ...], like: DictNode | None = None) -> None:
        self.path, self.like = path, like
        self.inner: dict[str, _OpenDict] = {}
        self.held: dict[str, Any] = {}


def is_state(key: str) -> bool:
    """Whether a key is that of an extra state, of whichever rank."""
    # most keys are none, and there may be very many
    return STATE in key and key.partition("@")[0].rpartition(".")[2] == STATE


def is_object(key: Any, value: Any) -> bool:
    """Whether it is an extra state that is a list or a dict: one value, even with tensors."""
    return (
        (type(value) is DictNode or type(value) is ListNode) and type(key) is str and is_state(key)
    )


def values_below(node: Any) -> list[Any] | None:
    """The values in this dict and in all dicts inside it that are reached through dicts of text
    keys; None if it is no such dict.

    Extra states that are lists or dicts are left out.
    None also where one dict stands in two places, or names are very long: a few bytes could name
    more places, or spell longer keys, than any machine can hold.
    """
    if type(node) is not DictNode or not _plain(node):
        return None
    out: list[Any] = []
    seen = {id(node)}
    stack = [(node, 0, 0)]
    text = 0
    while stack:
        here, depth, before = stack.pop()
        for key, value in here.pairs:
            length = before + len(key) + 1
            text += length
            if not _enters(key, value):
                if key == "state" and _is_state_by_name(value):
                    out += [leaf for _, held in value.pairs for _, leaf in held.pairs]
                elif not is_object(key, value):
                    out.append(value)
            elif id(value) in seen or depth > MAX_DEPTH or text > MAX_TEXT:
                return None
            else:
                seen.add(id(value))
                stack.append((value, depth + 1, length))
    return out if text <= MAX_TEXT else None


def _plain(node: DictNode) -> bool:
    return node.kind in _KINDS and all(type(key) is str and key for key, _ in node.pairs)


def _enters(key: str, value: Any) -> bool:
    """Whether the entries of a dict are seen; not if its name holds a dot, which reads as two."""
    if type(value) is not DictNode or "." in key or key == STATE or not _plain(value):
        return False
    return key != "state" or not _is_state_by_name(value)


def _is_state_by_name(node: Any) -> bool:
    """Whether a dict called `state` is an optimizer's as get_optimizer_state_dict of torch nests
    it: a dict for each parameter, whose name has dots. In joined keys the last name is the moment.
    """
    return (
        type(node) is DictNode
        and _plain(node)
        and any("." in name for name, _ in node.pairs)
        and all(type(held) is DictNode and _plain(held) for _, held in node.pairs)
        and not any(
            "." in name or type(leaf) is DictNode
            for _, held in node.pairs
            for name, leaf in held.pairs
        )
    )


def flatten(node: DictNode, label: str) -> tuple[DictNode, tuple[NestedDict, ...]]:
    """The dict with the entries of all dicts inside it, under keys joined by dots, and those dicts.

    For one that `values_below` has values of. M945 if the way back could not tell where a key
    belongs.
    """
    entries = list(_entries(node, ()))
    nests = tuple(NestedDict(path, value) for path, value, inner in entries if inner)
    places = _places(nests)
    flat: dict[str, Any] = {}
    unclear: list[str] = []
    for path, value, inner in entries:
        if inner:
            continue
        key = ".".join(path)
        home, last = _home(key, places)
        if key in flat or home.path != path[:-1] or last in home.inner:
            unclear.append(key)
        flat[key] = value
    if unclear:
        what = (
            f"{label}: keys of nested dicts hold dots themselves, and it is not clear which "
            f"dict they belong to: {listed(unclear, 4)}"
        )
        fail("M945", what, help=f"say with {option('at')} which one of the dicts is meant")
    return DictNode(node.kind, tuple(flat.items()), node.node, node.attributes), nests


def _entries(node: DictNode, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any, bool]]:
    """(path, value, whether it is a dict that is entered), in order."""
    for key, value in node.pairs:
        inner, named = _enters(key, value), key == "state" and _is_state_by_name(value)
        yield (*path, key), value, inner or named
        if inner:
            yield from _entries(value, (*path, key))
        for name, held in value.pairs if named else ():
            yield (*path, key, name), held, True
            yield from (((*path, key, name, last), leaf, False) for last, leaf in held.pairs)


def _places(nests: tuple[NestedDict, ...]) -> _OpenDict:
    """The outermost place, with all dicts inside; in `nests`, a dict follows those around it."""
    root = _OpenDict(())
    for nest in nests:
        around = root
        for name in nest.path[:-1]:
            around = around.inner[name]
        named = nest.path[-1] == "state" and _is_state_by_name(nest.was)
        around.inner[nest.path[-1]] = _OpenDict(nest.path, nest.was.pairs[0][1] if named else None)
    return root


def _home(key: str, places: _OpenDict) -> tuple[_OpenDict, str]:
    """The innermost dict that the key belongs to, and what it is called there."""
    home, start = places, 0
    while (
        (dot := key.find(".", start)) >= 0
        and dot + 1 < len(key)
        and (inner := home.inner.get(key[start:dot])) is not None
    ):
        home, start = inner, dot + 1
        if home.like is not None and (dot := key.rfind(".", start)) >= 0:
            name, start = key[start:dot], dot + 1
            return home.inner.setdefault(name, _OpenDict((*home.path, name))), key[start:]
    return home, key[start:]


def nest(table: DictNode, nests: tuple[NestedDict, ...]) -> DictNode:
    """The flat dict with its entries in the dicts that they belong to; empty ones stay.

    M916 if a tensor or value is called like one of these dicts.
    """
    if not nests:
        return table
    places = _places(nests)
    twice: list[str] = []
    for key, value in table.pairs:
        home, last = _home(key, places) if type(key) is str else (places, key)
        if last in home.inner or last in home.held:
            twice.append(key)
        if home.path:
            _show(places, home.path)
        home.held[last] = value
    named = {one.path for one in nests if one.path[-1] == "state" and _is_state_by_name(one.was)}
    for nest in nests:
        # the dict of a parameter goes with its name, any other stays
        if nest.path[:-1] not in named or not nest.was.pairs:
            _show(places, nest.path)
    if twice:
        fail(
            "M916",
            f"rules make {listed(twice)}, and a dict has this name",
            help=f"name {printable(twice[0])} otherwise",
        )
    was = {nest.path: nest.was for nest in nests}

    def build(place: _OpenDict, like: DictNode) -> DictNode:
        like = was.get(place.path, like)
        pairs = tuple(
            (key, build(value, place.like or table) if type(value) is _OpenDict else value)
            for key, value in place.held.items()
        )
        return DictNode(like.kind, pairs, like.node, like.attributes)

    return build(places, table)


def _show(places: _OpenDict, path: tuple[str, ...]) -> None:
    """Gives the dict at a path, and those around it, their place among the entries."""
    around = places
    for name in path:
        inner = around.inner[name]
        around.held.setdefault(name, inner)
        around = inner
