"""The dicts of optimizers whose state follows, written anew: tensors under their parameters' new
names, values beside them, and the groups of parameters with their settings.

Settings and counters of what becomes one parameter have to agree; where a parameter comes apart,
each part has them. Groups keep their order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from ..core.errors import fail, listed, option, printable, together
from ..planning.optimizers import following_of
from ..planning.request import OPTIMIZER_PARAM, STALE_OPTIMIZER
from ..source.pickle.jsonform import to_json
from ..source.pickle.tree import DictNode, ListNode, TensorRecord
from ..source.target import items_of, node_of, output_record
from ..source.tree import CheckpointTree, FileTree, replace_dict

if TYPE_CHECKING:
    from ..planning.compose import Composition
    from ..planning.following import MovingState
    from ..planning.graph import Tensor
    from ..source.index import Source

S = TypeVar("S", bound="Source")

# what an optimizer's dict has
NAMED = ("state", "param_groups")
# what a group calls its parameters; everything else in it is a setting
NAMES = ("params", "param_names")


def follow_tree(root: Any, states: Iterable[MovingState]) -> tuple[Any, dict[int, str]]:
    """The tree with the dicts of these optimizers as they are now, and the keys of the tensors in
    them by the records' identity. M410 where values of what becomes one parameter differ.
    """
    names: dict[int, str] = {}
    for one in states:
        if one.of.seen:
            continue
        state, groups = one.of.state.home.get("state"), one.of.state.home.get("param_groups")
        if one.of.flat:
            root = replace_dict(root, one.of.state.home, _flat(one, names))
        else:
            make = _turned if one.of.turned else _nested
            root = replace_dict(root, state, make(state, one, names))
        if type(groups) is ListNode:
            root = replace_dict(root, groups, _groups(groups, one))  # type: ignore[arg-type]
    return root, names


def _leaf(tensor: Tensor, like: Any, key: str, names: dict[int, str]) -> TensorRecord:
    made = output_record(tensor.spec, like if type(like) is TensorRecord else None)
    names[id(made)] = key
    return made


def _nested(state: DictNode, one: MovingState, names: dict[int, str]) -> DictNode:
    """`state`: a dict for each parameter."""
    numbered = one.of.numbering is not None
    held = {
        int(name) if numbered else name: entry
        for name, entry in state.pairs
        if type(entry) is DictNode
    }
    pairs = []
    for key, origins in one.origins.items():
        entries = [held[origin] for origin in origins if origin in held]
        if not entries:
            continue
        made: list[tuple[Any, Any]] = []
        for moment, value in _moments(entries):
            part = one.parts.get(moment, {}).get(key)
            if part is not None:
                leaf = _leaf(part.tensor, value, one.key(key, moment), names)
                made.append((moment, leaf))
            elif moment not in one.parts:
                values = [entry.get(moment) for entry in entries]
                made.append((moment, _agreed(values, one, f"`{printable(moment)}`", origins)))
        if made or not any(entry.pairs for entry in entries):
            like = entries[0]
            pairs.append((_label(one, key), DictNode(like.kind, tuple(made), None)))
    return DictNode(state.kind, tuple(pairs), None, state.attributes)


def _turned(state: DictNode, one: MovingState, names: dict[int, str]) -> DictNode:
    """`state`: a dict for each moment, and what all parameters have together."""
    pairs: list[tuple[Any, Any]] = []
    for moment, held in state.pairs:
        if moment in one.parts and type(held) is DictNode:
            like = dict(held.pairs)
            tensors = [
                (
                    one.of.spell(key),
                    _leaf(part.tensor, like.get(one.origins[key][0]), one.key(key, moment), names),
                )
                for key, part in one.parts[moment].items()
            ]
            held = DictNode(held.kind, tuple(tensors), None)
        pairs.append((moment, held))
    return DictNode(state.kind, tuple(pairs), None, state.attributes)


def _label(one: MovingState, key: str) -> Any:
    """What the optimizer calls a parameter."""
    if one.of.numbering is None:
        return one.of.spell(key)
    number = one.numbers[key]
    return str(number) if one.of.numbering.text else number


def _moments(entries: Sequence[DictNode]) -> list[tuple[Any, Any]]:
    found: dict[Any, Any] = {}
    for entry in entries:
        for moment, value in entry.pairs:
            found.setdefault(moment, value)
    return list(found.items())


def _flat(one: MovingState, names: dict[int, str]) -> DictNode:
    """A dict with keys `state.<parameter>.<moment>` and `param_groups.<parameter>.<setting>`."""
    held = one.of.state.home
    parts: dict[tuple[str, str], dict[str, Any]] = {}
    others = []
    for key, value in held.pairs:
        head, _, rest = key.partition(".") if type(key) is str else ("", "", "")
        if head in ("state", "param_groups") and rest:
            name, _, last = rest.rpartition(".")
            parts.setdefault((head, last), {})[name] = value
        else:
            others.append((key, value))
    pairs: dict[str, Any] = {}
    for head in ("state", "param_groups"):
        for key, origins in one.origins.items():
            for (kind, last), found in parts.items():
                values = [found[origin] for origin in origins if origin in found]
                if kind != head or not values:
                    continue
                made: Any
                if head == "state" and last in one.parts:
                    part = one.parts[last].get(key)
                    if part is None:
                        continue
                    made = _leaf(part.tensor, values[0], one.key(key, last), names)
                else:
                    made = _agreed(values, one, f"`{printable(last)}`", origins)
                pairs[f"{head}.{one.of.spell(key)}.{last}"] = made
    return DictNode(held.kind, (*pairs.items(), *others), None, held.attributes)


def _groups(groups: ListNode, one: MovingState) -> ListNode:
    """`param_groups` with the names that parameters have now, each in the group it was in."""
    now: dict[Any, list[str]] = {}
    for key, origins in one.origins.items():
        for origin in origins:
            now.setdefault(origin, []).append(key)
    numbered = one.of.numbering is not None
    spelled = {key: one.numbers[key] if numbered else one.of.spell(key) for key in one.origins}
    settings: dict[Any, tuple[str, int]] = {}
    made = []
    for number, group in enumerate(groups.items):
        called = group.get("params") if type(group) is DictNode else None
        if type(called) is not ListNode:
            made.append(group)
            continue
        text = repr(
            [(key, to_json(node_of(value))) for key, value in group.pairs if key not in NAMES]
        )
        own: dict[str, None] = {}
        strange = []
        for origin in called.items:
            if origin not in one.of.owners:
                strange.append(origin)
            for key in now.get(origin, ()):
                if settings.setdefault(key, (text, number))[0] != text:
                    _refuse(one, "settings of groups", one.origins[key])
                if settings[key][1] == number:
                    own[key] = None
        # where a parameter comes apart, its parts stand in the order of a module
        keys = [key for key in one.origins if key in own]
        lists = {
            "params": [*(spelled[key] for key in keys), *strange],
            "param_names": [*map(one.of.spell, keys), *(strange if not numbered else ())],
        }
        pairs = tuple(
            (key, ListNode(value.kind, tuple(lists[key]), None))
            if key in NAMES and type(value) is ListNode
            else (key, value)
            for key, value in group.pairs
        )
        made.append(DictNode(group.kind, pairs, None, group.attributes))
    return ListNode(groups.kind, tuple(made), None)


def _agreed(values: Sequence[Any], one: MovingState, what: str, origins: Sequence[Any]) -> Any:
    """The value that all are."""
    first = values[0]
    if any(value is not first for value in values):
        texts = {repr(to_json(node_of(value))) for value in values}
        if len(texts) > 1:
            _refuse(one, what, origins)
    return first


def _refuse(one: MovingState, what: str, origins: Sequence[Any]) -> None:
    way = together(option("params", f"{OPTIMIZER_PARAM}=drop"), option("allow", "drop"))
    fail(
        "M410",
        f"the optimizer state at {one.of.state.place} cannot follow: {what} of parameters that "
        f"become one differ: {listed([str(origin) for origin in origins], 8)}",
        help=f"begin with a new optimizer: {way}; or carry it all as it is: "
        f"{option('allow', STALE_OPTIMIZER)}",
        permit=STALE_OPTIMIZER,
    )


def with_followed(source: S, states: Sequence[MovingState]) -> S:
    """The source with the dicts of these optimizers as they are now, for its values to be compared
    with an output's. Tensors in these dicts have no place of their own. It is closed with `source`.
    """
    index, tree = source.index, source.index.tree
    if tree is None or all(one.of.seen for one in states):
        return source
    root, names = follow_tree(tree.parts[0].root, states)
    part = tree.parts[0]._replace(root=root)
    there = {**index.tensors, **tree.passed_through}
    made = {key: there[one.keys[0]] for state in states for key, one in state.each()}
    found = copy(source)
    found.index = replace(
        index,
        items=dict(items_of(part)),
        tree=replace(
            tree,
            parts=(part,),
            names={**tree.names, **names},
            passed_through={**tree.passed_through, **made},
        ),
    )
    return found


def followed_values(
    part: FileTree, names: Mapping[int, str], composition: Composition
) -> dict[str, str]:
    """The texts of values among the output's tensors that hold state which followed, by name; with
    the `names` of the tensors in them.
    """
    at, held = part.at or (), dict(part.table.pairs) if part.table is not None else {}
    tree = CheckpointTree((part,), names, {}, {})
    return {
        name: repr(to_json(node_of(held[name], tree)))
        for one in following_of(composition)
        if one.moved and not one.of.seen and one.of.state.path[: len(at)] == at
        for name in one.of.state.path[len(at) :][:1] or NAMED
        if name in held and type(held[name]) in (DictNode, ListNode)
    }


def outside(states: Iterable[MovingState]) -> tuple[Mapping[str, Tensor], frozenset[str]]:
    """The tensors of these states that rules do not see, and the keys that these had."""
    tensors: dict[str, Tensor] = {}
    before: set[str] = set()
    for one in states:
        if not one.of.seen:
            tensors.update((key, part.tensor) for key, part in one.each())
            before.update(key for held in one.of.tensors.values() for key in held.values())
    return tensors, frozenset(before)
