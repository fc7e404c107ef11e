"""What goes out beside the tensors that rules made: the tree around them, with the tensors that
rules do not see.

The dict that rules work on is made anew: its tensors are the outputs, each where the first of its
sources stood, its other values follow the modules that they belong to. Tensors that were parts of
one object are one again where they still make it. Everything else is the tree as it came in.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from math import inf
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from ..core.errors import fail, listed, option, plural
from ..core.templates import rank_of
from ..planning.graph import Tensor, ValueCheck, stored_keys
from ..planning.items import Items
from ..planning.module_names import follow_all
from ..planning.optimizers import following_of
from ..planning.pipeline import Views
from ..planning.stored import initial
from ..source.by_part import PARTS, names_of
from ..source.jsontext import collector_paused
from ..source.nesting import nest
from ..source.pickle.jsonform import to_json
from ..source.pickle.nodes import Set
from ..source.pickle.tree import (
    PARAMETER,
    SCALARS,
    Composite,
    DictNode,
    ListNode,
    TensorRecord,
    ask,
)
from ..source.shards import by_rank
from ..source.target import TargetTree, node_of, output_record
from ..source.tree import (
    CheckpointTree,
    FileTree,
    replace_dict,
    resolve_objects,
    tensor_records,
    tensors_outside,
)
from .gathered_ranks import WHOLE, CutParts, gathered, parted, ranks_differ, with_other_values
from .kept import kept_parts, put_kept
from .state_trees import follow_tree, outside
from .ties import declare_ties, find_ties

# the settings of an optimizer for groups of parameters, which it names
_GROUPS = "param_groups"
# the attribute of a state dict that has the versions of its modules, and that in which those are
# kept that a way back needs
_VERSIONS = "_metadata"
_KEPT = "_metadata_kept"
# kinds of containers that are plain, and how deep they may be nested
_CONTAINERS = frozenset({dict, OrderedDict, list, tuple, set, frozenset})
_MAX_DEPTH = 50

if TYPE_CHECKING:
    from ..planning.bind import StepResult
    from ..planning.compose import Composition
    from ..source.index import Index, Source


@dataclass(frozen=True, slots=True)
class OutputTree:
    """The whole output: `rest` for the format, tensors by key, what a run checks and reports.
    `called` has what tensors beside the model are called, where the source calls them otherwise, by
    what they are called there.
    """

    rest: TargetTree
    outputs: Mapping[str, Tensor]
    checks: tuple[ValueCheck, ...]
    notes: tuple[str, ...]
    # what of it does not come back on the way back
    lost: tuple[str, ...] = ()
    called: Mapping[str, str] = field(default_factory=dict)


@collector_paused()
def output_tree(
    source: Source,
    composition: Composition,
    *,
    alone: bool = False,
    drop: bool = False,
    cut: CutParts = WHOLE,
    values: tuple[Any, Any] | None = None,
) -> OutputTree:
    """What the output holds; `alone`: of a nested checkpoint nothing but the tensors that rules
    work on. `cut`: the parts that each rank becomes, to which what is kept by part goes back.
    `values` are those beside the model as they were and as they are now, where they are other ones.

    M916 where a rule makes a key that a tensor outside of its dict has, and for such tensors of
    ranks, or kept of parts, that have no file any more, unless `drop`.
    """
    made = _output_tree(source, composition, alone=alone, drop=drop, cut=cut, values=values)
    parts = composition.parts
    if alone or parts is None or not (parts or kept_parts(source.index)):
        return made
    rest, every, keys = put_kept(made.rest, made.outputs, parts)
    programs = {keys[name]: part.program for name, part in parts.items() if part.program}
    composition.programs.update(programs)
    return replace(made, rest=rest, outputs=every)


def _output_tree(
    source: Source,
    composition: Composition,
    *,
    alone: bool,
    drop: bool,
    cut: CutParts,
    values: tuple[Any, Any] | None,
) -> OutputTree:
    index, outputs = source.index, composition.graph.outputs
    stored = dict(index.tensors)
    if values is not None and not alone:
        index = with_other_values(index, values)
    outline = index.tree
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
            tuple(said[0]),
            tuple(said[1]),
        )
    ranks = len(by_rank(outputs))
    renamed: Mapping[str, str] = {}
    if ranks == 1:
        outline, renamed = gathered(index)
    apart = parted(outline, index.tensors, cut)
    if apart is not None:
        renamed = apart.renamed
    cut_off: set[str] = set()
    if apart is not None:
        # padding, which rules have put back or which is written again beside the tensors
        cut_off = {key for key, _ in kept_parts(index).values()}.intersection(apart.lost)
    lost = _lost(outline, ranks, drop) if apart is None else apart.unkept(drop, cut_off)
    moved = [one for one in following_of(composition) if one.moved]
    followed, before = outside(moved) if moved else ({}, frozenset())
    out = lost | cut_off | before
    kept = {key: at for key, at in outline.passed_through.items() if key not in out}
    passed = {renamed.get(key, key): held for key, held in initial(kept, Views()).items()}
    carried = {**passed, **followed}
    if both := [key for key in carried if key in outputs]:
        fail(
            "M916",
            f"rules make {listed(both)}, and a tensor outside of the dict that they work on has "
            "this name",
            help="give the key another name",
        )
    every = {**outputs, **carried}
    stored.update(outline.passed_through)
    checks = {renamed.get(key, key): one for key, one in declare_ties(outline, stored).items()}
    first = find_ties(every, stored)
    of = "the files of their ranks" if apart is None else "what is kept of other parts"
    notes = [f"dropped with {of}: {listed(sorted(lost))}"] * bool(lost)
    gone = ["what the permission `drop` leaves out"] * bool(lost)
    if apart is not None and apart.other_grid:
        gone.append(f"what is kept at `{PARTS}` of the parts of another grid")
    around = outline.parts if apart is None else apart.parts
    parts, names = _parts(outline, around, composition, notes, gone, out)
    names = {number: renamed.get(key, key) for number, key in names.items()}
    if moved:
        root, more = follow_tree(parts[0].root, moved)
        parts, names = (parts[0]._replace(root=root), *parts[1:]), {**names, **more}
    if ranks_differ(index.items, outline.parts, len(parts)):
        gone.append("what the ranks without a file hold beside tensors, and rank 0 does not,")
    specs = {key: tensor.spec for key, tensor in carried.items()}
    used = [
        check
        for key, check in checks.items()
        if first.get(key, key) != key or any(f == key for f in first.values())
    ]
    return OutputTree(
        TargetTree(parts, names, specs, first, bool(index.carried)),
        every,
        tuple(used),
        tuple(notes),
        tuple(gone),
        renamed,
    )


def in_form(out: OutputTree, form: str, numbering: str | None) -> OutputTree:
    """The output with its objects in the words of a release, see `object_forms.respelled`. M115 if
    it has none.
    """
    from ..source.object_forms import respelled

    parts, count = [], 0
    for part in out.rest.parts:
        root, found = respelled(part.root, form, numbering)
        parts.append(part._replace(root=root))
        count += found
    if not count:
        fail(
            "M115",
            f"the output has no object of Transformer Engine that {form} could write",
            help=f"leave {option('params', f'object_form={form}')} out",
        )
    note = f"written as {form} writes them: {plural(count, 'quantized tensor')}"
    return replace(out, rest=replace(out.rest, parts=tuple(parts)), notes=(*out.notes, note))


def writable_items(index: Index) -> dict[str, Any]:
    """The values of a state dict in memory that a tree can hold, as trees."""
    out = {}
    for key, value in index.items.items():
        try:
            out[key] = _tree_of(value)
        except TypeError:
            continue
    return out


def _tree_of(value: Any, depth: int = 0) -> Any:
    """A plain Python value as a tree. TypeError naming a class that is not plain, or for depth."""
    kind = type(value)
    if kind in SCALARS:
        return value
    if depth > _MAX_DEPTH or kind not in _CONTAINERS:
        raise TypeError(
            f"an object of the class {kind.__qualname__}"
            if kind not in _CONTAINERS
            else "a value that is nested too deep"
        )
    if kind is dict or kind is OrderedDict:
        pairs = tuple(
            (_tree_of(key, depth + 1), _tree_of(held, depth + 1)) for key, held in value.items()
        )
        return DictNode(kind.__name__, pairs, None)
    items = tuple(_tree_of(item, depth + 1) for item in value)
    return ListNode(
        kind.__name__, items, Set(kind is frozenset, []) if kind in (set, frozenset) else None
    )


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


def _parts(
    outline: CheckpointTree,
    around: Sequence[FileTree],
    composition: Composition,
    notes: list[str],
    gone: list[str],
    left_out: Collection[str],
) -> tuple[tuple[FileTree, ...], dict[int, str]]:
    """The trees of the output, with what stands `around` the dicts that rules work on; and the key
    of each tensor in them, without those of `left_out`.
    """
    outputs = composition.graph.outputs
    ranks = by_rank(outputs)
    several = len(outline.parts) > 1
    carried = outline.passed_through.keys() - left_out
    names = {number: key for number, key in outline.names.items() if key in carried}
    made: list[FileTree] = []
    # what one run made is followed at once; there are several only where all of them are verified
    bound = [(step.backwards, bound) for step, bound in composition.steps if bound.provenance]
    runs = [(back, [one for _, one in some]) for back, some in groupby(bound, itemgetter(0))]
    values = composition.items.names if composition.items is not None else {}
    # each is read once, and not for each rank: there may be as many as tensors
    numbered = [(name, was, rank_of(name)) for name, was in values.items()]
    held = {number or 0 for _, _, number in numbered}
    put_back: dict[int | None, dict[str, Any]] = {}
    for name, value in composition.put_back.items():
        at = rank_of(name) if len(ranks) > 1 else 0
        put_back.setdefault(at, {})[_short(name, len(ranks) > 1)] = value
    keeps = composition.parts is not None and _alike_in_ranks(outline, len(ranks))
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
        mine = rank if rank in held else here
        for name, was, number in numbered:
            ranked = number if several or len(ranks) > 1 else None
            # what has no rank is of the first of several, and of each that one becomes
            if ranked == mine or (ranked is None and not (several and mine)):
                called.setdefault(_short(was, several), []).append(_short(name, ranked is not None))
        table, own = _table(
            _answered(part, composition),
            keys,
            outputs,
            rank if several else None,
            notes,
            called,
            put_back.get(rank, {}),
        )
        names.update(own)
        attributes = table.attributes
        for backwards, walked in runs:
            attributes = _attributes(attributes, walked, notes, gone, keeps, backwards)
        table = DictNode(table.kind, table.pairs, table.node, attributes)
        made.append(
            FileTree(
                replace_dict(
                    around[min(rank, len(around) - 1)].root, old, nest(table, part.nested_dicts)
                ),
                part.at,
                part.nested_dicts,
            )
        )
    if len(outline.parts) > len(made):
        left = len(outline.parts) - len(made)
        of = f"kept by part at `{PARTS}`" if names_of(made[0].root) else "those of rank 0"
        notes.append(f"{plural(left, 'rank')} without a file; values beside tensors are {of}")
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
    outside = [[leaf for _, leaf in tensors_outside(p.root, p.table)] for p in outline.parts]
    here = {id(leaf) for leaves in outside[:ranks] for leaf in leaves}
    gone = {
        outline.names[id(leaf)]
        for leaves in outside[ranks:]
        for leaf in leaves
        if id(leaf) not in here
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
    notes: list[str],
    called: Mapping[str, Sequence[str]],
    put_back: Mapping[str, Any],
) -> tuple[DictNode, dict[int, str]]:
    """The dict with the outputs in it, and their keys by identity; `called`: its values' names,
    `put_back`: other values by name, which stand behind the tensors of their modules.
    """
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
        if rank is not None and not found:
            # another rank's, which stands where this one has it
            sources = [s.rpartition("@")[0] or s for s in sources]
            found = [leaves[s] for s in sources if s in leaves]
        like = _alike(found, len(sources))
        leaf = output_record(outputs[key].spec, like)
        names[id(leaf)] = key
        entries.append((min([places[s] for s in sources if s in places], default=inf), short, leaf))
        if objects and sources and all(s in objects for s in sources):
            made_of[short] = [objects[s] for s in sources]
    if made_of:
        entries = regroup_objects(entries, made_of, notes)
    entries += [
        (
            at,
            name,
            _follow_moments(value, keys, outputs, notes)
            if key == _GROUPS and type(value) is ListNode
            else value,
        )
        for at, key, value in others
        for name in (called.get(key, ()) if type(key) is str else (key,))
    ]
    entries.sort(key=lambda entry: entry[0])
    if put_back:
        entries = _with_values(entries, put_back)
    return DictNode(
        old.kind,
        tuple((key, value) for _, key, value in entries),
        old.node,
        old.attributes,
    ), names


def _with_values(
    entries: Sequence[tuple[float, Any, Any]], values: Mapping[str, Any]
) -> list[tuple[float, Any, Any]]:
    """The entries with these values, each behind the last one of its module."""
    behind: dict[str, list[tuple[str, Any]]] = {}
    for name in sorted(values):
        behind.setdefault(name.rpartition(".")[0], []).append((name, values[name]))
    last = {key.rpartition(".")[0]: number for number, (_, key, _) in enumerate(entries)}
    made = []
    for number, entry in enumerate(entries):
        made.append(entry)
        module = entry[1].rpartition(".")[0]
        if last[module] == number:
            made += [(entry[0], *pair) for pair in behind.pop(module, ())]
    return made + [(inf, *pair) for held in behind.values() for pair in held]


def _follow_moments(
    groups: ListNode,
    keys: Sequence[tuple[str, str]],
    outputs: Mapping[str, Tensor],
    notes: list[str],
) -> ListNode:
    """The parameter groups beside an optimizer's state, with the names that its parameters have
    there now: a text in a list is seen by no rule.
    """
    moved: dict[str, dict[str, None]] = {}
    for key, short in keys:
        for was in stored_keys(outputs[key]) if short.startswith("state.") else ():
            old, new = (name[6:].rpartition(".")[0] for name in (was, short))
            moved.setdefault(old, {})[new] = None
    if all([*news] == [old] for old, news in moved.items()):
        return groups
    left: dict[str, None] = {}

    def renamed(names: Any) -> Any:
        if type(names) is not ListNode or any(type(name) is not str for name in names.items):
            return names
        left.update((name, None) for name in names.items if name not in moved)
        news = (new for name in names.items for new in moved.get(name, (name,)))
        return ListNode(names.kind, tuple(dict.fromkeys(news)), names.node)

    made = []
    for group in groups.items:
        if type(group) is DictNode:
            pairs = [(k, renamed(held) if k == "params" else held) for k, held in group.pairs]
            group = DictNode(group.kind, tuple(pairs), group.node, group.attributes)
        made.append(group)
    if left:
        notes.append(
            f"parameters in `param_groups` without state keep their names: {listed([*left], 4)}"
        )
    return ListNode(groups.kind, tuple(made), groups.node)


def groups_of(tree: TargetTree, ranks: bool) -> dict[str, str]:
    """The text of the parameter groups among the output's tensors, by name: the one kind of value
    that is not only moved.
    """
    return {
        f"{_GROUPS}@{rank}" if ranks else _GROUPS: repr(to_json(node_of(value)))
        for rank, part in enumerate(tree.parts)
        for key, value in (part.table.pairs if part.table is not None else ())
        if key == _GROUPS and type(value) is ListNode and not any(tensor_records([value]))
    }


def _alike(found: Sequence[TensorRecord], count: int) -> TensorRecord | None:
    """A tensor with the flags that all sources have; attributes belong to one tensor alone."""
    if not found:
        return None
    one = found[0]
    if any((f.parameter, f.requires_grad) != (one.parameter, one.requires_grad) for f in found):
        return None
    return one if count == 1 else one._replace(state=None, subclass=None)


def _alike_in_ranks(outline: CheckpointTree, left: int) -> bool:
    """Whether the ranks that have no file in an output have the `_metadata` of the first one. That
    one value stands under several names is of no meaning, and otherwise in each rank.
    """
    known: dict[int, Any] = {}
    texts: dict[int, str] = {}

    def text(value: Any) -> str:
        if id(value) not in texts:
            texts[id(value)] = repr(to_json(node_of(value)))
        return texts[id(value)]

    for part in (outline.parts[0], *outline.parts[left:]):
        attributes = part.table.attributes if part.table is not None else None
        found = attributes.get(_VERSIONS) if type(attributes) is DictNode else None
        if id(found) not in known:
            pairs = found.pairs if type(found) is DictNode else (("", found),)
            known[id(found)] = [(text(key), text(value)) for key, value in pairs]
    one, *others = known.values()
    return all(one == other for other in others)


def _attributes(
    attributes: Any,
    bounds: Sequence[StepResult],
    notes: list[str],
    gone: list[str],
    keeps: bool = False,
    again: bool = False,
) -> Any:
    """The attributes of a state dict, with the names in `_metadata` (module -> version) as the
    modules are called now.

    A module that came apart has its version in each place; one that was put together has it where
    all parts agree. If there is a place that `keeps` them, names that go nowhere are kept in an
    attribute of their own, in the order of all, and put back `again`.
    """
    found = attributes.get(_VERSIONS) if type(attributes) is DictNode else None
    if type(found) is not DictNode or not bounds:
        return attributes
    kept = attributes.get(_KEPT)
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
    if keeps and not again and (left or unlike) and kept is None:
        own = [
            (key, None if moved.get(key) and unlike.keys().isdisjoint(moved[key]) else value)
            for key, value in found.pairs
        ]
        kept, left, unlike = DictNode("dict", tuple(own), None), [], {}
    elif again and type(kept) is DictNode:
        were = {key: pairs.pop(key, None) if value is None else value for key, value in kept.pairs}
        pairs = {**{key: value for key, value in were.items() if value is not None}, **pairs}
        kept = None
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
    others = [(k, made if v is found else v) for k, v in attributes.pairs if k != _KEPT]
    if kept is not None:
        others.append((_KEPT, kept))
    return DictNode(attributes.kind, tuple(others), attributes.node, attributes.attributes)


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
