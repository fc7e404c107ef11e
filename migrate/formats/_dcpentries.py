"""The entries that a nested checkpoint is taken apart into for torch.distributed.checkpoint.

What becomes an entry of its own is what torch takes apart (torch 2.4 to 2.15,
`_traverse.traverse_state_dict`): dicts, and lists with tensors or dicts in them; everything else is
one value, a tuple with the tensors in it as well. Entries have keys, paths and values, and nothing
else: what a dict is beside what it holds is lost, and so are dicts that hold nothing. The way back
is `_dcptree.build_tree`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from ..core.errors import Report, fail, listed, option, printable
from ..source.blobs import Stored, StoredTensor
from ..source.index import Index
from ..source.pickle.tree import (
    OBJECTS,
    Carried,
    Composite,
    DictNode,
    ListNode,
    TensorRecord,
    joined,
)
from ..source.table import flatten_table
from ..source.target import items_of, outside_prefix
from ..source.tree import (
    CheckpointTree,
    FileTree,
    name_tensors_outside,
    tensor_records,
    tensors_of,
)
from ._dcptree import build_tree

# places in nested containers: shared ones are several
MOST_ENTRIES = 5_000_000
_TEXT = frozenset({str, int, float, bool, type(None)})
# what a value may have in common with another one
_SHARED = frozenset({DictNode, ListNode, Composite, TensorRecord, Carried})


class SavedEntry(NamedTuple):
    """What is saved by itself: its flat key, its path, a tensor, an object or another value."""

    key: str
    path: tuple[str | int, ...]
    value: Any


class Entries:
    """The entries of a nested dict, in order, and what of it no entry holds.

    `whole` are the keys of values with tensors in them. M914 for more than `MOST_ENTRIES` places.
    """

    def __init__(self, root: Any) -> None:
        self.saved: list[SavedEntry] = []
        self.whole: list[str] = []
        self._root = root
        self._keys: set[str] = set()
        self._twice: list[str] = []
        self._places = 0
        # paths by what is lost of them
        self._lost: dict[str, list[str]] = {}
        if _is_dict(root):
            self._visit_dict(root, ())

    def check(self) -> None:
        """M916 for anything but a dict, and naming keys that collide."""
        if not _is_dict(self._root):
            fail(
                "M916",
                "a distributed checkpoint holds a dict, and this checkpoint is something else",
                help=f"write another format: {option('output_format', 'torch')}",
            )
        if self._twice:
            fail(
                "M916",
                "a distributed checkpoint joins the keys of nested dicts by dots, and these "
                f"would be two entries each: {listed(self._twice, 4)}",
                help="rename one of them, or write another format",
            )

    def losses(self) -> list[str]:
        """What the format has no place for, each kind with where it stood."""
        return [f"{what}: {listed(paths, 4)}" for what, paths in self._lost.items()]

    def _lose(self, what: str, path: tuple[str | int, ...]) -> None:
        self._lost.setdefault(what, []).append(printable(joined(path, 200)) if path else ".")

    def _visit(self, value: Any, path: tuple[str | int, ...]) -> None:
        self._places += 1
        if self._places > MOST_ENTRIES:
            fail(
                "M914",
                "its containers share each other so often that they hold more than "
                f"{MOST_ENTRIES:,} values",
                help="no program saves such a checkpoint; do not trust its origin",
            )
        kind = type(value)
        if _is_dict(value) and all(type(key) in _TEXT for key, _ in value.pairs):
            self._visit_dict(value, path)
        elif kind is ListNode and value.kind == "list" and not _is_terminal(value):
            for number, item in enumerate(value.items):
                self._visit(item, (*path, number))
        else:
            self._add(value, path)

    def _visit_dict(self, node: DictNode, path: tuple[str | int, ...]) -> None:
        if node.attributes is not None:
            self._lose("`_metadata`", path)
        if node.kind not in ("dict", "OrderedDict"):
            self._lose(f"what a {node.kind} has beside its items", path)
        if not node.pairs and path:
            self._lose("empty dicts", path)
        texts: set[str] = set()
        for key, value in node.pairs:
            text = str(key)
            if type(key) is not str:
                self._lose("keys that are not text (they become text)", (*path, text))
            if text in texts:
                self._twice.append(".".join(map(str, (*path, text))))
            texts.add(text)
            self._visit(value, (*path, text))

    def _add(self, value: Any, path: tuple[str | int, ...]) -> None:
        key = ".".join(map(str, path))
        if key in self._keys and key not in self._twice:
            self._twice.append(key)
        self._keys.add(key)
        self.saved.append(SavedEntry(key, path, value))
        if type(value) is TensorRecord:
            if value.parameter or value.state is not None or value.subclass is not None:
                self._lose("classes and attributes of tensors", path)
        elif type(value) is ListNode and next(tensor_records([value]), None) is not None:
            self.whole.append(key)


def _is_dict(value: Any) -> bool:
    """Whether it is a dict; objects that are their fields are values."""
    return type(value) is DictNode and value.kind not in OBJECTS


def _is_terminal(value: Any) -> bool:
    """Whether torch saves a list as one value."""
    return not any(
        type(item) in (TensorRecord, Composite)
        or _is_dict(item)
        or (type(item) is ListNode and item.kind == "list" and not _is_terminal(item))
        for item in value.items
    )


class SavedTree(NamedTuple):
    """A tree as it is read again: `names` has the key of each tensor in it, by the record's
    identity, `origins` what each of these keys was before; `lost` says what did not come along.
    """

    part: FileTree
    names: dict[int, str]
    origins: dict[str, str]
    lost: list[str]

    @property
    def tensors(self) -> list[str]:
        """The keys of the tensors that rules see."""
        return [self.names[id(record)] for _, record in tensors_of(self.part.table)]


def saved_tree(part: FileTree, names: Mapping[int, str]) -> SavedTree | None:
    """The tree after it was saved in this format, `names` being those of its tensors: without
    classes of dicts and tensors and without ties, and what stood in several places as many tensors.

    None where it cannot be saved so.
    """
    entries = Entries(part.root)
    paths = {entry.key: entry.path for entry in entries.saved}
    if not _is_dict(part.root) or len(paths) < len(entries.saved):
        return None
    was: dict[int, str] = {}
    leaves: dict[str, Any] = {}
    for key, _, value in entries.saved:
        made: dict[int, Any] = {}
        leaves[key] = own = unshared(value, made)
        if type(value) is TensorRecord:
            made[id(value)] = leaves[key] = own._replace(parameter=False, subclass=None, state=None)
        was |= {id(made[id(record)]): names[id(record)] for record in tensor_records([value])}
    root, _ = build_tree(leaves, paths, "the tree", Report())
    saved = flatten_table(FileTree(root, part.at), "the tree")
    if not saved.nested_dicts:
        saved = saved._replace(nested_dicts=part.nested_dicts)
    return named_anew(saved, was, entries.losses())


def named_anew(part: FileTree, was: Mapping[int, str], lost: list[str]) -> SavedTree:
    """The tree with the keys that its tensors have when it is read; `was` has those that they had
    before, by the records' identity.
    """
    seen = tensors_of(part.table)
    prefix = outside_prefix(dict(seen))
    beside = [(prefix + name, record) for name, record in name_tensors_outside(part)]
    return SavedTree(
        part,
        {id(record): key for key, record in (*seen, *beside)},
        {key: was[id(record)] for key, record in (*seen, *beside)},
        lost,
    )


def as_saved(
    index: Index, saves: Callable[[FileTree, Mapping[int, str]], SavedTree | None] = saved_tree
) -> tuple[Index, list[str]]:
    """The index of the same checkpoint after it was saved so that `saves` gives its tree back, and
    what it lost. As it is where it cannot be saved so.
    """
    tree = index.tree
    if tree is None:
        tensors = {key: _alone(at) for key, at in index.tensors.items()}
        lost = ["`_metadata`: ."] * (index.module_versions is not None)
        return replace(index, tensors=tensors, module_versions=None), lost
    saved = saves(tree.parts[0], tree.names) if len(tree.parts) == 1 else None
    if saved is None:
        return index, []
    stored = {**index.tensors, **tree.passed_through}
    every = {key: _alone(stored[was]) for key, was in saved.origins.items()}
    tensors = {key: every.pop(key) for key in saved.tensors}
    return replace(
        index,
        tensors=tensors,
        items=dict(items_of(saved.part)),
        tree=CheckpointTree((saved.part,), saved.names, every, {}),
    ), saved.lost


def unshared(value: Any, made: dict[int, Any]) -> Any:
    """The value with containers and tensors that stand in no other entry; `made` are those of this
    one, by the identity of what they are copies of.
    """
    kind = type(value)
    if kind not in _SHARED or id(value) in made:
        return made.get(id(value), value)
    if kind is TensorRecord:
        own: Any = value._replace()
    elif kind is ListNode:
        own = replace(value, items=tuple(unshared(held, made) for held in value.items))
    elif kind is Carried:
        own = replace(
            value, storages=tuple((key, unshared(held, made)) for key, held in value.storages)
        )
    elif kind is Composite:
        parts = tuple((name, unshared(record, made)) for name, record in value.components)
        own = replace(value, components=parts)
    else:
        pairs = tuple((key, unshared(held, made)) for key, held in value.pairs)
        own = replace(value, pairs=pairs)
    made[id(value)] = own
    return own


def _alone(stored: StoredTensor) -> StoredTensor:
    """The tensor as one that shares its storage with no other."""
    if isinstance(stored, Stored) and stored.storage is not None:
        return stored._replace(storage=None)
    return stored
