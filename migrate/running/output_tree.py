"""What goes out beside the tensors that rules made: the tree around them, tensors that rules do not
see, ties; and states that are objects, made tensors where a rule decides about them.

The dict that rules work on is made anew: its tensors are the outputs, each where the first of its
sources stood, its other values follow the modules that they belong to. Everything else is the tree
as it came in. Transformer Engine stored its extra state as an object until 1.13; a state that no
rule reads stays the object that it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from .. import ops
from ..core import view as views
from ..core.errors import fail, listed, option, plural, printable
from ..core.keys import Pattern, TwoReadings
from ..core.spec import spec
from ..core.templates import rank_of
from ..extra_state.record import Object
from ..extra_state.states import objects
from ..planning.graph import ComputedTensor, Tensor, ValueCheck, stored_keys
from ..planning.items import Items
from ..planning.sides import follow_all
from ..source.blobs import Blob, BytesBlob, Stored
from ..source.pickle.jsonform import to_json
from ..source.pickle.tree import PARAMETER, Composite, DictNode, TensorRecord, ask
from ..source.shards import by_rank
from ..source.target import TargetTree, items_of, node_of, output_record
from ..source.tree import (
    CheckpointTree,
    FileTree,
    nest,
    prune,
    replace_dict,
    resolve_objects,
    tensor_records,
    tree_of,
)

if TYPE_CHECKING:
    from ..planning.bind import StepResult
    from ..planning.compose import Composition
    from ..planning.optimizers import OptimizerState
    from ..planning.path import MigrationPath
    from ..source.index import Index, Source

S = TypeVar("S", bound="Source")


@dataclass(frozen=True, slots=True)
class OutputTree:
    """The whole output: `rest` for the format, tensors by key, what a run checks and reports."""

    rest: TargetTree
    outputs: Mapping[str, Tensor]
    checks: tuple[ValueCheck, ...]
    notes: tuple[str, ...]
    # what of it does not come back on the way back
    lost: tuple[str, ...] = ()


def index_of_all_tensors(index: Index) -> Index:
    """The index with the tensors that rules do not see among the others."""
    return (
        replace(index, tensors={**index.tensors, **index.passed_through}, tree=None)
        if index.passed_through
        else index
    )


def with_all_tensors(source: Source) -> Source:
    """The source with all its tensors in its index, as a run reads them; closed with the source."""
    if not source.index.passed_through:
        return source
    found = copy(source)
    found.index = index_of_all_tensors(source.index)
    return found


def without_states(source: S, states: Sequence[OptimizerState]) -> S:
    """The source without these optimizers' tensors and values; it is closed with the source."""
    if not states:
        return source
    index, gone = source.index, {key for state in states for key in state.keys}
    unfit = {id(node): "" for state in states for node in state.nodes}
    tensors = {key: at for key, at in index.tensors.items() if key not in gone}
    if index.tree is None:
        tops = {state.path[0] for state in states if state.path}
        items = {
            key: value
            for key, value in index.items.items()
            if key not in tops and id(value) not in unfit
        }
        made = replace(index, tensors=tensors, items=items)
    else:
        outline, several, items = index.tree, len(index.tree.parts) > 1, {}
        homes = (
            tuple({key[: key.lower().rindex(".state.")] + "." for key in gone if "." in key})
            if gone
            else ()
        )
        parts = []
        for rank, part in enumerate(outline.parts):
            table = part.table
            root = part.root
            if table is not None and homes:
                own = tuple(
                    pair
                    for pair in table.pairs
                    if not (type(pair[0]) is str and pair[0].startswith(homes))
                )
                root = replace_dict(
                    root, table, DictNode(table.kind, own, table.node, table.attributes)
                )
            parts.append(part._replace(root=prune(root, unfit)[0]))
            mark = f"@{rank}" if several else ""
            items.update({path + mark: value for path, value in items_of(parts[-1])})
        left = {
            outline.names[id(leaf)]
            for part in parts
            for leaf in tensor_records([part.root])
            if id(leaf) in outline.names
        }
        carried = {key: at for key, at in outline.passed_through.items() if key in left}
        ties = {key: first for key, first in outline.ties.items() if key in left and first in left}
        made = replace(
            index,
            tensors=tensors,
            items=items,
            tree=replace(outline, parts=tuple(parts), passed_through=carried, ties=ties),
        )
    found = copy(source)
    found.index = made
    return found


def output_tree(
    source: Source, composition: Composition, *, alone: bool = False, drop: bool = False
) -> OutputTree:
    """What the output holds; `alone`: of a nested checkpoint nothing but the tensors that rules
    work on.

    M916 where a rule makes a key that a tensor outside of its dict has, and for such tensors of
    ranks that have no file any more, unless `drop`.
    """
    index, outputs = source.index, composition.graph.outputs
    outline = index.tree
    stored = dict(index.tensors)
    if outline is None or alone:
        specs = {key: tensor.spec for key, tensor in outputs.items()}
        first = find_ties(outputs, stored)
        if outline is not None:
            return OutputTree(_plain(specs, first, {}, None), outputs, (), ())
        said: tuple[list[str], list[str]] = ([], [])
        versions = _attributes(
            _versions(index), [bound for _, bound in composition.steps if bound.provenance], *said
        )
        return OutputTree(
            _plain(specs, first, _called(writable_items(index), composition), versions),
            outputs,
            (),
            *map(tuple, said),
        )
    lost = _lost(outline, len(by_rank(outputs)), drop)
    kept = {key: at for key, at in outline.passed_through.items() if key not in lost}
    carried = {
        key: Tensor(at.spec, views.stored(0, at.spec.shape, at.strides), (key,))
        for key, at in kept.items()
    }
    if both := [key for key in carried if key in outputs]:
        fail(
            "M916",
            f"rules make {listed(both)}, and a tensor outside of the dict that they work on has "
            "this name",
            help="give the key another name",
        )
    every = {**outputs, **carried}
    stored.update(outline.passed_through)
    checks = _declare(outline, stored)
    first = find_ties(every, stored)
    notes = [f"dropped with the files of their ranks: {listed(sorted(lost))}"] * bool(lost)
    gone = ["what the permission `drop` leaves out"] * bool(lost)
    parts, names = _parts(outline, composition, notes, gone)
    if _differ(index.items, len(parts), len(outline.parts)):
        gone.append("what the ranks without a file hold beside tensors, and rank 0 does not,")
    specs = {key: tensor.spec for key, tensor in carried.items()}
    used = [
        check
        for key, check in checks.items()
        if first.get(key, key) != key or any(f == key for f in first.values())
    ]
    return OutputTree(
        TargetTree(parts, names, specs, first), every, tuple(used), tuple(notes), tuple(gone)
    )


def writable_items(index: Index) -> dict[str, Any]:
    """The values of a state dict in memory that a tree can hold, as trees."""
    out = {}
    for key, value in index.items.items():
        try:
            out[key] = tree_of(value)
        except TypeError:
            continue
    return out


def _called(items: Mapping[str, Any], composition: Composition) -> dict[str, Any]:
    """The values by what they are called now."""
    names = (
        composition.items.names if composition.items is not None else {key: key for key in items}
    )
    return {name: items[was] for name, was in names.items() if was in items}


def _versions(index: Index) -> Any:
    """The attributes of a state dict in memory, as a file's; None for a dict without any."""
    if index.module_versions is None:
        return None
    pairs = tuple(
        (name, DictNode("dict", (("version", version),), None))
        for name, version in index.module_versions.items()
    )
    return DictNode("dict", (("_metadata", DictNode("OrderedDict", pairs, None)),), None)


def _plain(
    specs: Mapping[str, Any], first: Mapping[str, str], items: Mapping[str, Any], attributes: Any
) -> TargetTree:
    kind = "dict" if attributes is None else "OrderedDict"
    made: list[FileTree] = []
    names: dict[int, str] = {}
    for part in by_rank(specs):
        tensors = [(short, output_record(specs[key]), key) for key, short in part]
        names.update({id(leaf): key for _, leaf, key in tensors})
        taken = {short for short, _, _ in tensors}
        others = [] if made else [(key, value) for key, value in items.items() if key not in taken]
        made.append(
            FileTree(
                DictNode(
                    kind,
                    (*((short, leaf) for short, leaf, _ in tensors), *others),
                    None,
                    attributes,
                ),
                (),
            )
        )
    return TargetTree(tuple(made), names, {}, first)


def _declare(outline: CheckpointTree, stored: dict[str, Any]) -> dict[str, ValueCheck]:
    """Makes tensors declared to have been one share a storage; returns conditions to check."""
    checks = {}
    for key, first in outline.ties.items():
        one, other = stored[first], stored[key]
        if one.spec != other.spec:
            continue
        tensors = tuple(
            Tensor(at.spec, views.stored(0, at.spec.shape, at.strides), (name,))
            for name, at in ((first, one), (key, other))
        )
        message = f"{printable(key)} and {printable(first)} were one tensor, and their bytes differ"
        checks[key] = ValueCheck(
            "equal", tensors, None, "M404", message, "migrate.items.json", (first, key)
        )
        stored[first] = one._replace(storage=Declared(first))
        stored[key] = other._replace(storage=Declared(first))
    return checks


def _differ(items: Mapping[str, Any], kept: int, ranks: int) -> bool:
    """Whether a rank from `kept` on holds other values than rank 0."""
    held: dict[int, dict[str, str]] = {}
    for path, value in items.items() if kept < ranks else ():
        held.setdefault(rank_of(path) or 0, {})[path.rpartition("@")[0]] = repr(value)
    return any(held.get(rank, {}) != held.get(0, {}) for rank in range(kept, ranks))


def _parts(
    outline: CheckpointTree, composition: Composition, notes: list[str], gone: list[str]
) -> tuple[tuple[FileTree, ...], dict[int, str]]:
    """The trees of the output, and the key of each tensor in them."""
    outputs = composition.graph.outputs
    ranks = by_rank(outputs)
    several = len(outline.parts) > 1
    names = {number: key for number, key in outline.names.items() if key in outline.passed_through}
    made: list[FileTree] = []
    bounds = [bound for step, bound in composition.steps if bound.provenance]
    for rank, keys in enumerate(ranks):
        here = min(rank, len(outline.parts) - 1)
        part = outline.parts[here]
        old = part.table
        if old is None:
            if keys:
                fail(
                    "M945",
                    "rules make tensors, and the checkpoint has no dict of tensors to put them "
                    "into",
                )
            made.append(part)
            continue
        called: dict[str, list[str]] = {}
        for name, was in composition.items.names.items() if composition.items is not None else ():
            if not several or (rank_of(name) or 0) == here:
                called.setdefault(_short(was, several), []).append(_short(name, several))
        table, own = _table(
            _answered(part, composition),
            keys,
            outputs,
            rank if several else None,
            bounds,
            notes,
            gone,
            called,
        )
        names.update(own)
        made.append(
            FileTree(
                replace_dict(part.root, old, nest(table, part.nested_dicts)),
                part.at,
                part.nested_dicts,
            )
        )
    if len(outline.parts) > len(made):
        left = len(outline.parts) - len(made)
        notes.append(
            f"{plural(left, 'rank')} without a file; values beside tensors are those of rank 0"
        )
    return tuple(made), names


def _answered(part: FileTree, composition: Composition) -> DictNode:
    """The dict that rules work on, with what file and user say of its objects' numbers."""
    said = (step.memory.get("params", {}).get(PARAMETER) for step, _ in composition.steps)
    known = resolve_objects(
        part, next((numbering for numbering in said if numbering is not None), None)
    )
    table = part.table or DictNode("dict", (), None)
    if not known:
        return table
    pairs = tuple(
        (key, known.get(key, value) if type(value) is Composite else value)
        for key, value in table.pairs
    )
    return DictNode(table.kind, pairs, table.node, table.attributes)


def items_of_index(index: Index) -> Items:
    """The values that are no tensors among those that rules work on."""
    if index.tree is None:
        return Items({key: key for key in index.items}, False, lambda name: repr(index.items[name]))
    several = len(index.tree.parts) > 1
    held: dict[str, Any] = {}
    for rank, part in enumerate(index.tree.parts):
        for key, value in part.table.pairs if part.table is not None else ():
            if type(key) is str and type(value) not in (TensorRecord, Composite):
                held[f"{key}@{rank}" if several else key] = value
    texts: dict[int, str] = {}

    def told(name: Any) -> str:
        # one value can stand under many names
        if id(held[name]) not in texts:
            texts[id(held[name])] = repr(to_json(node_of(held[name], index.tree)))
        return texts[id(held[name])]

    return Items({name: name for name in held}, several, told)


def _short(name: str, several: bool) -> str:
    return name.rpartition("@")[0] if several else name


def _lost(outline: CheckpointTree, ranks: int, drop: bool) -> set[str]:
    """The carried tensors of ranks that have no file in an output of so many ranks."""
    gone = {
        outline.names[id(leaf)]
        for part in outline.parts[ranks:]
        for leaf in tensor_records([part.root])
    } & outline.passed_through.keys()
    if gone and not drop:
        fail(
            "M916",
            f"the output has the files of {ranks} ranks; {len(gone)} tensors of other ranks stand "
            f"outside of the dict that rules work on: {listed(sorted(gone))}",
            help=f"{option('allow', 'drop')} leaves them out",
            permit="drop",
        )
    return gone


def _table(
    old: DictNode,
    keys: Sequence[tuple[str, str]],
    outputs: Mapping[str, Tensor],
    rank: int | None,
    bounds: Sequence[StepResult],
    notes: list[str],
    gone: list[str],
    called: Mapping[str, Sequence[str]],
) -> tuple[DictNode, dict[int, str]]:
    """The dict with the outputs in it, and their keys by identity; `called`: its values' names."""
    places: dict[str, int] = {}
    leaves: dict[str, TensorRecord] = {}
    objects: dict[str, tuple[Composite, str]] = {}
    others: list[tuple[float, Any, Any]] = []
    for number, (key, value) in enumerate(old.pairs):
        if type(value) is TensorRecord or type(value) is Composite:
            held = [(key, value)] if isinstance(value, TensorRecord) else value.keys(key)
            for nth, (base, leaf) in enumerate(held):
                for name in (base,) if rank is None else (f"{base}@{rank}", base):
                    places.setdefault(name, number)
                    leaves.setdefault(name, leaf)
                    if isinstance(value, Composite):
                        objects.setdefault(name, (value, value.components[nth][0]))
        else:
            others.append((number, key, value))
    entries: list[tuple[float, Any, Any]] = []
    made_of: dict[str, list[tuple[Composite, str]]] = {}
    names: dict[int, str] = {}
    for key, short in keys:
        sources = stored_keys(outputs[key])
        found = [leaves[s] for s in sources if s in leaves]
        like = _alike(found, len(sources))
        leaf = output_record(outputs[key].spec, like)
        names[id(leaf)] = key
        entries.append((min((places[s] for s in sources if s in places), default=inf), short, leaf))
        if objects and sources and all(s in objects for s in sources):
            made_of[short] = [objects[s] for s in sources]
    if made_of:
        from .output_tree import regroup_objects

        entries = regroup_objects(entries, made_of, notes)
    entries += [
        (at, name, value)
        for at, key, value in others
        for name in (called.get(key, ()) if type(key) is str else (key,))
    ]
    entries.sort(key=lambda entry: entry[0])
    return DictNode(
        old.kind,
        tuple((key, value) for _, key, value in entries),
        old.node,
        _attributes(old.attributes, bounds, notes, gone),
    ), names


def _alike(found: Sequence[TensorRecord], count: int) -> TensorRecord | None:
    """A tensor with the flags that all sources have; attributes belong to one tensor alone."""
    if not found:
        return None
    one = found[0]
    if any((f.parameter, f.requires_grad) != (one.parameter, one.requires_grad) for f in found):
        return None
    return one if count == 1 else one._replace(state=None, subclass=None)


def _attributes(
    attributes: Any, bounds: Sequence[StepResult], notes: list[str], gone: list[str]
) -> Any:
    """The attributes of a state dict, with the names in `_metadata` (module -> version) as the
    modules are called now.

    A module that came apart has its version in each place; one that was put together has it where
    all parts agree.
    """
    found = attributes.get("_metadata") if type(attributes) is DictNode else None
    if type(found) is not DictNode or not bounds:
        return attributes
    moved = follow_all(bounds, [key for key, _ in found.pairs if type(key) is str])
    pairs: dict[Any, Any] = {}
    spelled: dict[Any, str] = {}
    texts: dict[int, str] = {}
    unlike: dict[str, None] = {}
    left = [key for key, names in moved.items() if not names]
    for key, value in found.pairs:
        for there in moved[key] if type(key) is str else (key,):
            # one value can stand under many names
            if id(value) not in texts:
                texts[id(value)] = repr(to_json(node_of(value)))
            text = texts[id(value)]
            if spelled.setdefault(there, text) != text:
                unlike[there] = None
            pairs.setdefault(there, value)
    for there in unlike:
        del pairs[there]
    if left:
        notes.append(
            f"`_metadata`: {plural(len(left), 'module')} without tensors, left out: "
            f"{listed(left, 4)}"
        )
    if unlike:
        gone.append("the `_metadata` of modules with different versions")
        notes.append(
            f"`_metadata`: {plural(len(unlike), 'module')} made of such with other versions, left "
            f"out: {listed(list(unlike), 4)}"
        )
    made = DictNode(found.kind, tuple(pairs.items()), found.node, found.attributes)
    return DictNode(
        attributes.kind,
        tuple((k, made if v is found else v) for k, v in attributes.pairs),
        attributes.node,
        attributes.attributes,
    )


class Declared(NamedTuple):
    """The storage of separate tensors declared to have been one; `key` is that of the first."""

    key: str


def find_ties(outputs: Mapping[str, Tensor], stored: Mapping[str, Stored]) -> dict[str, str]:
    """For each output the first output that it is tied to, often itself."""
    groups: dict[Any, tuple[str, Tensor]] = {}
    views: dict[Any, int] = {}
    numbers: dict[int, int] = {}
    out: dict[str, str] = {}
    for key, tensor in outputs.items():
        number = numbers.get(id(tensor.view))
        if number is None:
            # views of one plan are one object if they are equal; those of another are not
            number = numbers[id(tensor.view)] = views.setdefault(tensor.view, len(views))
        places = tuple(_place(source, stored) for source in tensor.sources)
        shares = bool(places) and None not in places
        name, other = groups.setdefault(
            (number, tensor.spec.dtype, places) if shares else (key,), (key, tensor)
        )
        # the same source key twice is a copy, unless the op that made both handed out one tensor
        out[key] = name if other is tensor or other.sources != tensor.sources else key
    return out


def _place(source: str | ComputedTensor, stored: Mapping[str, Stored]) -> Any:
    """What is equal for sources that are the same bytes; None for what shares with nothing."""
    if not isinstance(source, str):
        return id(source)
    at = stored[source]
    if at.storage is None or isinstance(at.storage, Declared):
        return at.storage
    return at.storage, at.offset, at.strides


def regroup_objects(
    entries: Sequence[tuple[float, Any, Any]],
    made_of: Mapping[str, Sequence[tuple[Composite, str]]],
    notes: list[str],
) -> list[tuple[float, Any, Any]]:
    """The entries (place, key, tensor) of a dict with objects in place of their components, each
    where its first component stood.

    `made_of` has for each key that is made of components alone these objects and attributes. M955
    where an object whose integer has two meanings does not stay what it is: behind it nothing says
    what its numbers are.
    """
    leaves = {key: leaf for _, key, leaf in entries if type(leaf) is TensorRecord}
    gathered: dict[str, dict[str, str]] = {}
    parted: list[str] = []
    for key, origins in made_of.items():
        attributes = {attribute for _, attribute in origins}
        if len(attributes) != 1:
            continue
        (attribute,) = attributes
        if not attribute:
            gathered.setdefault(key, {})[""] = key
        elif key.endswith(f".{attribute}"):
            gathered.setdefault(key[: -len(attribute) - 1], {})[attribute] = key
        else:
            parted.append(key)
    whole: dict[str, tuple[str, Composite]] = {}
    for prefix, keys in gathered.items():
        made = _object(
            {attribute: leaves[key] for attribute, key in keys.items()},
            [made_of[key] for key in keys.values()],
        )
        if made is not None and (prefix not in leaves or prefix in keys.values()):
            whole.update(dict.fromkeys(keys.values(), (prefix, made)))
        else:
            parted += [key for attribute, key in keys.items() if attribute]
    _told(made_of, {id(made.node) for _, made in whole.values()}, parted, notes)
    out: list[tuple[float, Any, Any]] = []
    placed: dict[str, int] = {}
    for at, key, value in entries:
        found = whole.get(key) if type(value) is TensorRecord else None
        if found is None:
            out.append((at, key, value))
        elif found[0] not in placed:
            placed[found[0]] = len(out)
            out.append((at, *found))
        elif at < out[placed[found[0]]][0]:
            out[placed[found[0]]] = (at, *found)
    return out


def _told(
    made_of: Mapping[str, Sequence[tuple[Composite, str]]],
    still: set[int],
    parted: list[str],
    notes: list[str],
) -> None:
    """Notes which keys are plain tensors now, and asks what is unknown; `still`: objects left."""
    gone = {
        key: one.encoding
        for key, origins in made_of.items()
        for one, _ in origins
        if id(one.node) not in still
    }
    ask(gone)
    if parted:
        numbers = sorted(
            {e.number for e in gone.values() if e.number is not None and e.code is not None}
        )
        of = f"; the numbers of their data are {listed(numbers)}" if numbers else ""
        notes.append(
            f"plain tensors, no longer parts of an object: {listed(sorted(parted), 4)}{of}"
        )


def _object(
    leaves: Mapping[str, TensorRecord], origins: Sequence[Sequence[tuple[Composite, str]]]
) -> Composite | None:
    """The object that these components make, by attribute; None if they make none."""
    # most checkpoints have no such objects
    from ..source.pickle.te_grouped import alike, group, member_of

    sets = [list({id(one): one for one, _ in of}.values()) for of in origins]
    objects = {id(one): one for one in sets[0]}
    if any({id(one) for one in held} != objects.keys() for held in sets):
        return None
    first, *others = objects.values()
    if others:
        possible = [group(first, len(objects))] if all(alike(first, one) for one in others) else []
    else:
        possible = [first, member_of(first) if first.encoding.members else None]
    for like in possible:
        if like is None or {attribute for attribute, _ in like.components} != leaves.keys():
            continue
        components = tuple((attribute, leaves[attribute]) for attribute, _ in like.components)
        if all(
            (a.dtype, a.shape) == (b.dtype, b.shape)
            for (_, a), (_, b) in zip(components, like.components, strict=True)
        ):
            return replace(like, components=components)
    return None


def lift_states(source: Source, migration_path: MigrationPath) -> None:
    """Puts the states that rules of the path ask for among the tensors of the source, and takes
    them from where they were.

    Calling it again changes nothing. M950 for a state that is made of what no extra state is made
    of.
    """
    patterns = list(_patterns(migration_path))
    found = list(objects(source.index, lambda key: _asked(patterns, key))) if patterns else []
    if not found:
        return
    from ..extra_state.write import content

    index = source.index
    tensors = dict(index.tensors)
    blobs: list[Blob] = list(source.blobs)
    for one in found:
        data = content(one, index, source.blobs)
        tensors[one.name] = Stored(spec("uint8", (len(data),)), len(blobs), 0)
        blobs.append(BytesBlob(one.name, data))
    if index.tree is None:
        items = {key: value for key, value in index.items.items() if key not in tensors}
        source.index = replace(index, tensors=tensors, items=items)
    else:
        specs = {one.name: tensors[one.name].spec for one in found}
        paths = {_path(one, index.tree) for one in found}
        items = {
            path: value
            for path, value in index.items.items()
            if not _below(path, paths, len(index.tree.parts) > 1)
        }
        source.index = replace(
            index, tensors=tensors, items=items, tree=_without(index.tree, found, specs)
        )
    source.blobs = tuple(blobs)


def _patterns(migration_path: MigrationPath) -> Iterator[Pattern]:
    for step in migration_path.steps:
        for compiled, _ in step.rules:
            if not step.backwards and any(
                ops.get(step.op).kind == "decide" for step in compiled.rule.via
            ):
                yield from (pattern for pattern in compiled.sources.values() if not pattern.params)


def _asked(patterns: list[Pattern], key: str) -> bool:
    for pattern in patterns:
        try:
            if not pattern.has_flat and pattern.match(key) is not None:
                return True
        except TwoReadings:
            return True
    return False


def _without(
    outline: CheckpointTree, found: list[Object], specs: Mapping[str, Any]
) -> CheckpointTree:
    """The trees with a tensor's place for each state, without tensors that were in states only."""
    names = dict(outline.names)
    parts: list[FileTree] = []
    for rank, part in enumerate(outline.parts):
        here = {one.key: one.name for one in found if one.rank == rank}
        table = part.table
        if table is None or not here:
            parts.append(part)
            continue
        pairs: list[tuple[Any, Any]] = []
        for key, value in table.pairs:
            if type(key) is str and key in here:
                value = output_record(specs[here[key]])
                names[id(value)] = here[key]
            pairs.append((key, value))
        parts.append(
            part._replace(
                root=replace_dict(
                    part.root,
                    table,
                    DictNode(table.kind, tuple(pairs), table.node, table.attributes),
                )
            )
        )
    left = {id(leaf) for leaf in tensor_records([part.root for part in parts])}
    names = {number: name for number, name in names.items() if number in left}
    kept = set(names.values())
    carried = {key: stored for key, stored in outline.passed_through.items() if key in kept}
    gone = outline.passed_through.keys() - carried.keys()
    ties = {key: first for key, first in outline.ties.items() if gone.isdisjoint((key, first))}
    return replace(outline, parts=tuple(parts), names=names, passed_through=carried, ties=ties)


def _path(one: Object, outline: CheckpointTree) -> str:
    rank = f"@{one.rank}" if len(outline.parts) > 1 else ""
    return ".".join((*(outline.parts[one.rank].at or ()), one.key)) + rank


def _below(path: str, states: set[str], several: bool) -> bool:
    """Whether the value at a path is one of these states, or inside of one."""
    short, at, rank = path.rpartition("@") if several else (path, "", "")
    ends = [n for n, letter in enumerate(short) if letter == "."] if "." in short else []
    return any(short[:end] + at + rank in states for end in (*ends, len(short)))
