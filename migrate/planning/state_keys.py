"""Which tensors of a checkpoint are state of which parameter, and what they are called once their
parameter is called otherwise.

Three spellings are known: `state: {<parameter>: {<moment>: …}}`, the same flattened into keys
`state.<parameter>.<moment>`, and such keys among the tensors that rules see. What is in another
spelling has no `StateKeys`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..core.errors import printable
from ..core.templates import rank_of
from ..source.pickle.tree import DictNode, ListNode, TensorRecord, joined
from .optimizers import SEEN, Names, OptimizerState, plain

if TYPE_CHECKING:
    from ..core.spec import Spec
    from ..source.index import Index

# names longer than this are cut where a checkpoint's index has them
_LONGEST = 500


@dataclass(frozen=True, slots=True)
class StateKeys:
    """The tensors of one optimizer by parameter.

    `owners`: what the optimizer calls a parameter -> its key, in the optimizer's order. `tensors`:
    moment -> key of a parameter -> key of the tensor, and `specs` the same of what they are.
    `seen`: rules see these tensors. `flat`: the dict that holds them has joined keys.
    """

    state: OptimizerState
    owners: Mapping[Any, str]
    tensors: Mapping[str, Mapping[str, str]]
    specs: Mapping[str, Mapping[str, Spec]]
    seen: bool
    flat: bool
    spell: Callable[[str], str]
    _key: Callable[[str, str], str]

    def key(self, parameter: str, moment: str) -> str:
        """The key of a tensor of state once its parameter has this key."""
        return self._key(self.spell(parameter), moment)


def read_all(states: Sequence[OptimizerState], index: Index) -> list[StateKeys]:
    """The tensors of those of the states that have a known spelling."""
    return [found for state in states if (found := read_state_keys(state, index)) is not None]


def read_state_keys(state: OptimizerState, index: Index) -> StateKeys | None:
    """The tensors of the state by parameter; None where they do not say theirs in a known spelling,
    or where one of them belongs to no parameter.
    """
    names = Names(key for key in index.tensors if key not in set(state.keys))
    found = _seen(state, index, names) if state.keys else _outside(state, index, names)
    if found is None:
        return None
    # what is spelled anew for new names has to spell the old ones as they are
    for moment, held in found.tensors.items():
        if any(found.key(name, moment) != key for name, key in held.items()):
            return None
    return found


def _seen(state: OptimizerState, index: Index, names: Names) -> StateKeys | None:
    """State among the tensors that rules see, its moment before or behind the parameter."""
    owners: dict[str, str] = {}
    tensors: dict[str, dict[str, str]] = {}
    before = None
    home = ""
    for key in state.keys:
        if "@" in key and rank_of(key) is not None:
            return None
        match = SEEN.fullmatch(key)
        if match is None:
            return None
        home = "state." if match[1] is None else f"{match[1]}.state."
        last, first = match[2].rpartition("."), match[2].partition(".")
        readings = [
            (turned, name, moment, owner)
            for turned, name, moment in ((False, last[0], last[2]), (True, first[2], first[0]))
            if (owner := names.of(name)) is not None
        ]
        if not readings:
            return None
        turned, name, moment, owner = readings[0]
        if before not in (None, turned) or owners.setdefault(name, owner) != owner:
            return None
        before = turned
        tensors.setdefault(moment, {})[owner] = key

    def spelled(name: str, moment: str) -> str:
        return f"{home}{moment}.{name}" if before else f"{home}{name}.{moment}"

    return _made(state, index, owners, tensors, spelled, seen=True, flat=True)


def _outside(state: OptimizerState, index: Index, names: Names) -> StateKeys | None:
    """State in a dict of its own, beside the one that rules work on."""
    tree, held = index.tree, state.held
    if tree is None or type(held) is not DictNode or len(tree.parts) != 1:
        return None
    entries = held.get("state")
    flat = not (type(entries) is DictNode and entries.pairs)
    records = _flat_records(held, names) if flat else _nested_records(entries)
    if records is None:
        return None
    owners: dict[str, str] = {}
    tensors: dict[str, dict[str, str]] = {}
    prefix = ""
    for name, moment, record in records:
        owner = names.of(name)
        if owner is None or owners.setdefault(name, owner) != owner:
            return None
        if record is not None:
            if type(record) is not TensorRecord or id(record) not in tree.names:
                return None
            key = tree.names[id(record)]
            prefix = key[: len(key) - len(key.lstrip("/"))]
            tensors.setdefault(moment, {})[owner] = key
    for name in _names_in_groups(held):
        # without any state so far
        if (owner := names.of(name)) is not None:
            owners.setdefault(name, owner)
    path = state.path

    def spelled(name: str, moment: str) -> str:
        keys = (f"state.{name}.{moment}",) if flat else ("state", name, moment)
        return prefix + printable(joined((*path, *keys), 520), _LONGEST)

    return _made(state, index, owners, tensors, spelled, seen=False, flat=flat)


def _nested_records(entries: DictNode) -> list[tuple[str, str, Any]] | None:
    """(parameter, moment, tensor) of `state`; None for parameters without one."""
    out: list[tuple[str, str, Any]] = []
    for name, held in entries.pairs:
        if type(name) is not str or type(held) is not DictNode:
            return None
        out.append((name, "", None))
        for moment, value in held.pairs:
            if type(moment) is not str:
                return None
            if type(value) in _PLAIN:
                continue
            out.append((name, moment, value))
    return out


_PLAIN = frozenset({int, float, bool, type(None), str})


def _flat_records(held: DictNode, names: Names) -> list[tuple[str, str, Any]] | None:
    out: list[tuple[str, str, Any]] = []
    for key, value in held.pairs:
        if type(key) is not str:
            return None
        if key.startswith("state."):
            name, _, moment = key[len("state.") :].rpartition(".")
            out.append((name, moment, None if type(value) in _PLAIN else value))
        elif key.startswith("param_groups."):
            out.append((key[len("param_groups.") :].rpartition(".")[0], "", None))
    return out or None


def _names_in_groups(held: DictNode) -> Iterator[str]:
    groups = held.get("param_groups")
    for group in groups.items if type(groups) is ListNode else ():
        called = group.get("params") if type(group) is DictNode else None
        yield from (
            name for name in (called.items if type(called) is ListNode else ()) if type(name) is str
        )


def _made(
    state: OptimizerState,
    index: Index,
    owners: Mapping[str, str],
    tensors: Mapping[str, Mapping[str, str]],
    key: Callable[[str, str], str],
    *,
    seen: bool,
    flat: bool,
) -> StateKeys | None:
    spell = _spelling(owners)
    if spell is None or not tensors or len(set(owners.values())) != len(owners):
        return None
    every = index.tensors if seen else index.passed_through
    specs = {
        moment: {name: every[at].spec for name, at in held.items()}
        for moment, held in tensors.items()
    }
    return StateKeys(state, dict(owners), tensors, specs, seen, flat, spell, key)


def _spelling(owners: Mapping[str, str]) -> Callable[[str], str] | None:
    """How the optimizer would call a parameter of a new name: as it is, or without the segments of
    wrappers; None where it calls them otherwise. A name with a prefix more or less may be that of
    another layout already.
    """
    if all(name == key for name, key in owners.items()):
        return str
    return plain if all(name == plain(key) for name, key in owners.items()) else None
