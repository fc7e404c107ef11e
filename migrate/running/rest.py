"""What goes out beside the tensors that rules made: the tree around them, tensors that rules do not see, ties.

The dict that rules work on is made anew: its tensors are the outputs, each where the first of its sources stood, its other values
follow the modules that they belong to. Everything else is the tree as it came in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING, Any

from ..core import view as views
from ..core.diagnostics import fail, listed, printable
from ..formats._ranks import by_rank
from ..formats._torchtree import record
from ..planning.graph import Tensor, Value, ValueCheck
from ..planning.names import follow
from ..source.outline import Outline, Part, records, tree_of
from ..source.pickle.tree import DictNode, TensorRecord
from ..source.target import Rest
from .ties import Declared, tied

if TYPE_CHECKING:
    from ..planning.bind import Bound
    from ..planning.compose import Composition
    from ..source.index import Index, Source


@dataclass(frozen=True, slots=True)
class Outgoing:
    """The whole output: `rest` for the format, all tensors by key, and what a run has to check and to say beside."""

    rest: Rest
    outputs: Mapping[str, Tensor]
    checks: tuple[ValueCheck, ...]
    notes: tuple[str, ...]


def widened(index: Index) -> Index:
    """The index with the tensors that rules do not see among the others."""
    return replace(index, tensors={**index.tensors, **index.carried}, outline=None) if index.carried else index


def whole(source: Source) -> Source:
    """The source with all its tensors among those of its index, as a run reads them. It is closed with the source."""
    if not source.index.carried:
        return source
    found = copy(source)
    found.index = widened(source.index)
    return found


def outgoing(source: Source, composition: Composition, *, alone: bool = False, drop: bool = False) -> Outgoing:
    """What the output holds; `alone`: of a nested checkpoint nothing but the tensors that rules work on.

    M916 where a rule makes a key that a tensor outside of its dict has, and for such tensors of ranks that have no file
    any more, unless `drop`.
    """
    index, outputs = source.index, composition.graph.outputs
    outline = index.outline
    stored = dict(index.tensors)
    if outline is None or alone:
        specs = {key: tensor.spec for key, tensor in outputs.items()}
        items = {} if outline is not None else held(index)
        return Outgoing(_plain(specs, tied(outputs, stored), items), outputs, (), ())
    lost = _lost(outline, len(by_rank(outputs)), drop)
    kept = {key: at for key, at in outline.carried.items() if key not in lost}
    carried = {key: Tensor(at.spec, views.stored(0, at.spec.shape, at.strides), (key,)) for key, at in kept.items()}
    if both := [key for key in carried if key in outputs]:
        fail(
            "M916",
            f"rules make {listed(both)}, and a tensor outside of the dict that they work on is called so",
            help="name the key otherwise",
        )
    every = {**outputs, **carried}
    stored.update(outline.carried)
    checks = _declare(outline, stored)
    first = tied(every, stored)
    notes = [f"dropped with the files of their ranks: {listed(sorted(lost))}"] * bool(lost)
    parts, names = _parts(outline, composition, notes)
    specs = {key: tensor.spec for key, tensor in carried.items()}
    used = [check for key, check in checks.items() if first.get(key, key) != key or any(f == key for f in first.values())]
    return Outgoing(Rest(parts, names, specs, first), every, tuple(used), tuple(notes))


def held(index: Index) -> dict[str, Any]:
    """The values of a state dict in memory that a tree can hold, as trees."""
    out = {}
    for key, value in index.items.items():
        try:
            out[key] = tree_of(value)
        except TypeError:
            continue
    return out


def _plain(specs: Mapping[str, Any], first: Mapping[str, str], items: Mapping[str, Any]) -> Rest:
    made: list[Part] = []
    names: dict[int, str] = {}
    for part in by_rank(specs):
        tensors = [(short, record(specs[key]), key) for key, short in part]
        names.update({id(leaf): key for _, leaf, key in tensors})
        taken = {short for short, _, _ in tensors}
        others = [] if made else [(key, value) for key, value in items.items() if key not in taken]
        made.append(Part(DictNode("dict", (*((short, leaf) for short, leaf, _ in tensors), *others), None), ()))
    return Rest(tuple(made), names, {}, first)


def _declare(outline: Outline, stored: dict[str, Any]) -> dict[str, ValueCheck]:
    """Makes tensors that are said to have been one share a storage, and answers with the conditions that make it true."""
    checks = {}
    for key, first in outline.ties.items():
        one, other = stored[first], stored[key]
        if one.spec != other.spec:
            continue
        tensors = tuple(Tensor(at.spec, views.stored(0, at.spec.shape, at.strides), (name,)) for name, at in ((first, one), (key, other)))
        message = f"{printable(key)} and {printable(first)} were one tensor, and their bytes differ"
        checks[key] = ValueCheck("equal", tensors, None, "M404", message, "migrate.items.json", (first, key))
        stored[first] = one._replace(storage=Declared(first))
        stored[key] = other._replace(storage=Declared(first))
    return checks


def _parts(outline: Outline, composition: Composition, notes: list[str]) -> tuple[tuple[Part, ...], dict[int, str]]:
    """The trees of the output, and the key of each tensor in them."""
    outputs = composition.graph.outputs
    ranks = by_rank(outputs)
    several = len(outline.parts) > 1
    names = {number: key for number, key in outline.names.items() if key in outline.carried}
    made: list[Part] = []
    bounds = [bound for leg, bound in composition.legs if bound.made]
    for rank, keys in enumerate(ranks):
        part = outline.parts[min(rank, len(outline.parts) - 1)]
        old = part.table
        if old is None:
            if keys:
                fail("M945", "rules make tensors, and the checkpoint has no dict of tensors to put them into")
            made.append(part)
            continue
        table, own = _table(old, keys, outputs, rank if several else None, bounds, notes)
        names.update(own)
        made.append(Part(_put(part.root, old, table), part.at))
    if len(outline.parts) > len(made):
        left = len(outline.parts) - len(made)
        notes.append(f"{left} ranks have no file any more; what they held beside tensors is that of rank 0")
    return tuple(made), names


def _lost(outline: Outline, ranks: int, drop: bool) -> set[str]:
    """The carried tensors of ranks that have no file in an output of so many ranks."""
    gone = {outline.names[id(leaf)] for part in outline.parts[ranks:] for leaf in records([part.root])} & outline.carried.keys()
    if gone and not drop:
        fail(
            "M916",
            f"the output has the files of {ranks} ranks; {len(gone)} tensors of other ranks stand outside of the dict that rules work on: "
            f"{listed(sorted(gone))}",
            help="--allow drop leaves them out",
        )
    return gone


def _table(
    old: DictNode,
    keys: Sequence[tuple[str, str]],
    outputs: Mapping[str, Tensor],
    rank: int | None,
    bounds: Sequence[Bound],
    notes: list[str],
) -> tuple[DictNode, dict[int, str]]:
    """The dict that rules work on with the outputs in it, and their keys by identity."""
    places: dict[str, int] = {}
    leaves: dict[str, TensorRecord] = {}
    others: list[tuple[float, Any, Any]] = []
    for number, (key, value) in enumerate(old.pairs):
        if type(value) is TensorRecord:
            for name in (key,) if rank is None else (f"{key}@{rank}", key):
                places.setdefault(name, number)
                leaves.setdefault(name, value)
        else:
            others.append((number, key, value))
    entries: list[tuple[float, Any, Any]] = []
    names: dict[int, str] = {}
    for key, short in keys:
        sources = _sources(outputs[key])
        found = [leaves[s] for s in sources if s in leaves]
        like = _alike(found, len(sources))
        leaf = record(outputs[key].spec, like)
        names[id(leaf)] = key
        entries.append((min((places[s] for s in sources if s in places), default=inf), short, leaf))
    modules = {key.rpartition(".")[0] for _, key, _ in others if type(key) is str and "." in key}
    moved = _follow(bounds, modules)
    taken = {short for _, short in keys}
    for at, key, value in others:
        before, dot, last = key.rpartition(".") if type(key) is str else ("", "", key)
        there = moved.get(before, before) if dot else ""
        name = f"{there}.{last}" if there else last if dot and there == "" else key
        entries.append((at, key if name in taken or there is None else name, value))
    entries.sort(key=lambda entry: entry[0])
    return DictNode(old.kind, tuple((key, value) for _, key, value in entries), old.node, _attributes(old.attributes, bounds, notes)), names


def _alike(found: Sequence[TensorRecord], count: int) -> TensorRecord | None:
    """A tensor with the flags that all sources have; attributes belong to one tensor alone."""
    if not found:
        return None
    one = found[0]
    if any((f.parameter, f.requires_grad) != (one.parameter, one.requires_grad) for f in found):
        return None
    return one if count == 1 else one._replace(state=None, subclass=None)


def _sources(tensor: Tensor) -> Sequence[str]:
    if all(isinstance(source, str) for source in tensor.sources):
        return list(dict.fromkeys(s for s in tensor.sources if isinstance(s, str)))
    out: dict[str, None] = {}
    todo, seen = [tensor], set[int]()
    while todo:
        for source in todo.pop().sources:
            if isinstance(source, Value):
                if id(source.call) not in seen:
                    seen.add(id(source.call))
                    todo += source.call.inputs
            else:
                out[source] = None
    return list(out)


def _follow(bounds: Sequence[Bound], modules: Iterable[str]) -> dict[str, str | None]:
    """Where modules are after all edges; None where they part on the way."""
    out: dict[str, str | None] = {name: name for name in modules}
    for bound in bounds if out else ():
        step = follow(bound, {name for name in out.values() if name is not None})
        out = {name: None if now is None else step[now] for name, now in out.items()}
    return out


def _attributes(attributes: Any, bounds: Sequence[Bound], notes: list[str]) -> Any:
    """The attributes of a state dict, with the names in `_metadata` (module -> version) as the modules are called now."""
    found = attributes.get("_metadata") if type(attributes) is DictNode else None
    if type(found) is not DictNode or not bounds:
        return attributes
    moved = _follow(bounds, [key for key, _ in found.pairs if type(key) is str])
    pairs: dict[Any, Any] = {}
    parted = []
    for key, value in found.pairs:
        there = moved.get(key, key) if type(key) is str else key
        if there is None:
            parted.append(key)
        else:
            pairs.setdefault(there, value)
    if parted:
        notes.append(f"`_metadata`: {len(parted)} modules have no single place any more and are left out: {listed(parted, 4)}")
    made = DictNode(found.kind, tuple(pairs.items()), found.node, found.attributes)
    return DictNode(
        attributes.kind, tuple((k, made if v is found else v) for k, v in attributes.pairs), attributes.node, attributes.attributes
    )


def _put(root: Any, old: DictNode, new: DictNode) -> Any:
    """The tree with one dict in place of another, wherever it stands."""
    made: dict[int, Any] = {id(old): new}

    def visit(node: Any) -> Any:
        if type(node) is not DictNode:
            return node
        if id(node) not in made:
            pairs = tuple((key, visit(value)) for key, value in node.pairs)
            same = all(a[1] is b[1] for a, b in zip(pairs, node.pairs, strict=True))
            made[id(node)] = node if same else DictNode(node.kind, pairs, node.node, node.attributes)
        return made[id(node)]

    return visit(root)
