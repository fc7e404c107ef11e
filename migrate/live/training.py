"""A training checkpoint in memory, as training scripts hold it: a model's state dict in a dict,
beside the state of its optimizer.

It is opened as a file of the same content is: a tree whose leaves are tensors, of which rules see
those of one dict. The tree of the outcome becomes dicts and lists again, in which all that did not
change is the caller's own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from ..core.errors import fail
from ..core.spec import spec
from ..formats import memory
from ..running.output_tree import output_tree
from ..source.index import with_all_tensors
from ..source.pickle.nodes import Global
from ..source.pickle.tree import OBJECTS, SCALARS, Constant, DictNode, ListNode, TensorRecord
from ..source.table import choose_table, flatten_table, model_at_root
from ..source.target import items_of, output_record, outside_prefix
from ..source.tree import CheckpointTree, FileTree, dict_at, name_tensors_outside, tensors_of

if TYPE_CHECKING:
    from ..formats.memory import MemorySource
    from ..source.target import TargetTree
    from .migration import Migration

_DICTS, _LISTS = frozenset({dict, OrderedDict}), frozenset({list, tuple})
# what a dict of a training may be nested in
_MAX_DEPTH = 50
_LABEL = "the state dict"


def is_training(state: Mapping[Any, Any]) -> bool:
    """Whether tensors that rules work on stand in a dict of the dict, or beside the state of an
    optimizer in one.
    """
    inner = [(key, value) for key, value in state.items() if type(value) in _DICTS | _LISTS]
    if not inner:
        return False
    if any(memory.is_tensor(value) for value in state.values()):
        return any(type(key) is str and "optim" in key.lower() for key, _ in inner)
    return any(_has_tensors(value) for _, value in inner)


def _has_tensors(value: Any) -> bool:
    stack, seen = [value], set[int]()
    while stack:
        here = stack.pop()
        if memory.is_tensor(here):
            return True
        if id(here) not in seen and type(here) in _DICTS | _LISTS:
            seen.add(id(here))
            stack += here.values() if type(here) in _DICTS else here
    return False


@dataclass(frozen=True, slots=True)
class _Opening:
    """What is found on the way: nodes by the value's identity, tensors by the record's."""

    nodes: dict[int, Any]
    tensors: dict[int, Any]

    def tree(self, value: Any, depth: int = 0) -> Any:
        """The value as a tree. A value that is neither container nor tensor stands for itself."""
        kind = type(value)
        if kind in SCALARS:
            return value
        if memory.is_tensor(value):
            # each place has a record of its own, so that a tensor may be called otherwise in each
            dtype = str(value.dtype).removeprefix("torch.")
            record = TensorRecord(
                dtype,
                output_record(spec("uint8", ())).storage,
                0,
                tuple(value.shape),
                (),
                False,
                None,
            )
            self.tensors[id(record)] = record, value
            return record
        if id(value) in self.nodes:
            return self.nodes[id(value)][0]
        if depth > _MAX_DEPTH:
            fail("M916", "the state dict is nested too deep", help="hand over its parts")
        made: Any
        if kind in _DICTS:
            pairs = tuple(
                (
                    key if type(key) in SCALARS else self.tree(key, depth + 1),
                    self.tree(held, depth + 1),
                )
                for key, held in value.items()
            )
            made = DictNode(kind.__name__, pairs, None, _attributes(value))
        elif kind in _LISTS:
            items = tuple(self.tree(item, depth + 1) for item in value)
            made = ListNode(kind.__name__, items, None)
        elif (kind.__module__, kind.__name__) == OBJECTS["Namespace"] and not _has_tensors(
            list(vars(value).values())
        ):
            pairs = tuple((key, self.tree(held, depth + 1)) for key, held in vars(value).items())
            made = DictNode("Namespace", pairs, None)
        elif isinstance(value, Enum):
            made = Constant(
                "enum", f"{kind.__name__}.{value.name}", Global("object", str(id(value)))
            )
        else:
            # it is compared by what it is, and by nothing in it
            made = Constant("object", kind.__name__, Global("object", str(id(value))))
        self.nodes[id(value)] = made, value
        return made


def _attributes(state: Any) -> Any:
    """`_metadata` of a module's state dict, as files have it."""
    found = getattr(state, "_metadata", None)
    if not isinstance(found, Mapping):
        return None
    pairs = tuple(
        (name, DictNode("dict", tuple(entry.items()), None))
        for name, entry in found.items()
        if isinstance(entry, Mapping)
    )
    return DictNode("dict", (("_metadata", DictNode("OrderedDict", pairs, None)),), None)


def alone(state: Mapping[Any, Any], at: str | None) -> Mapping[Any, Any]:
    """The dict at `at`, or the one that rules work on; M945 as `open_training`."""
    if at is None and not is_training(state):
        return state
    opening = _Opening({}, {})
    root = opening.tree(state if type(state) in _DICTS else dict(state))
    path = choose_table(root, at, _LABEL)
    found = None if path is None else dict_at(root, path)
    held = {id(node): value for node, value in opening.nodes.values()}
    return state if found is None or not path else held[id(found)]


def open_training(
    state: Mapping[Any, Any], at: str | None = None
) -> tuple[MemorySource, Mapping[int, Any]]:
    """The dict as a Source with the tree around its tensors, and the caller's containers and other
    values by the identity of their nodes. Rules work on the dict `at`.

    M945 where `at` leads to none, or without it several dicts in it may be the model's, M916 for
    tensors that cannot be described.
    """
    opening = _Opening({}, {})
    root = opening.tree(state if type(state) in _DICTS else dict(state))
    if at is None and (
        model_at_root(root) or any(type(value) is TensorRecord for _, value in root.pairs)
    ):
        part = FileTree(root, ())
    else:
        part = flatten_table(FileTree(root, choose_table(root, at, _LABEL)), _LABEL)
    held = tensors_of(part.table)
    names = {id(record): key for key, record in held}
    seen = {key: opening.tensors[id(record)][1] for key, record in held}
    prefix = outside_prefix(seen)
    beside = {}
    for name, record in name_tensors_outside(part):
        names[id(record)] = prefix + name
        beside[prefix + name] = opening.tensors[id(record)][1]
    source = memory.open({**seen, **beside}, wrapped=True)
    every = source.index.tensors
    source.index = replace(
        source.index,
        tensors={key: every[key] for key in seen},
        items=dict(items_of(part)),
        tree=CheckpointTree((part,), names, {key: every[key] for key in beside}, {}),
    )
    return source, {id(node): value for node, value in opening.nodes.values()}


def surround(source: MemorySource, found: Migration) -> tuple[MemorySource, Migration, TargetTree]:
    """The source and the migration with the tensors around those of rules among these, and the tree
    that the outcome has.
    """
    whole = output_tree(source, found.composition)
    composition = found.composition
    graph = replace(composition.graph, outputs=dict(whole.outputs))
    reading = with_all_tensors(source)
    made = replace(
        found,
        index=reading.index,
        composition=replace(composition, graph=graph),
        notes=[*found.notes, *whole.notes],
    )
    return reading, made, whole.rest  # type: ignore[return-value]
