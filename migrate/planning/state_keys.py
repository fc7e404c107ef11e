"""Which tensors of a checkpoint are state of which parameter, and what they are called once their
parameter is called otherwise.

Four spellings are known: `state: {<parameter>: {<moment>: …}}`, the same the other way round, as
Megatron's distributed checkpoints have it, the same flattened into keys
`state.<parameter>.<moment>`, and such keys among the tensors that rules see. What is in another
spelling has no `StateKeys`.

A parameter that is an object made of tensors is known here by the component that holds its codes:
that has a code for each number and lies as the numbers do, so what rules do to it is what they do
to the parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ..core.errors import printable
from ..core.templates import rank_of
from ..source.pickle.tree import Composite, DictNode, ListNode, TensorRecord, joined
from ..source.tree import tensor_records
from .optimizer_states import SEEN, Names, ObjectCodes, OptimizerState, plain

if TYPE_CHECKING:
    from ..core.spec import Spec
    from ..source.index import Index
    from ..source.tree import FileTree
    from .numbered_states import GivenNames

# names longer than this are cut where a checkpoint's index has them
_LONGEST = 500


@dataclass(frozen=True, slots=True)
class Numbering:
    """How an optimizer numbers its parameters. `groups`: number -> group; `text`: numbers are keys
    of text; `known`: how it is known which number is which parameter; `earlier`: the names in the
    order that they had before the last run, where a stamp has them.
    """

    groups: Mapping[int, int]
    text: bool
    known: str
    earlier: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class StateKeys:
    """The tensors of one optimizer by parameter.

    `owners`: what the optimizer calls a parameter -> its key, in the optimizer's order. `tensors`:
    moment -> key of a parameter -> key of the tensor, and `specs` the same of what they are.
    `seen`: rules see these tensors, and among the values settings of parameters, which begin with
    `settings`. `flat`: the dict that holds them has joined keys; `turned`: it has a dict of
    parameters for each moment. `spell` is what the optimizer calls a key. `shapes` are those of the
    parameters that are objects.
    """

    state: OptimizerState
    owners: Mapping[Any, str]
    tensors: Mapping[str, Mapping[str, str]]
    specs: Mapping[str, Mapping[str, Spec]]
    seen: bool
    flat: bool
    spell: Callable[[str], str]
    _key: Callable[[str, str], str]
    numbering: Numbering | None = None
    # the parameters of each group that lists them
    groups: Sequence[Sequence[str]] = ()
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    turned: bool = False
    settings: str = ""

    def settings_of(self, parameter: str) -> tuple[str, int]:
        """Where rules see the settings of the parameter of this key: the name, and the rank."""
        short, mark = _without_rank(parameter)
        return f"{self.settings}{self.spell(short)}", int(mark[1:] or 0)

    def key(self, parameter: str, moment: str) -> str:
        """The key of a tensor of state once its parameter has this key; numbers are not used."""
        return self._key(self.spell(parameter), moment)

    def numbered_key(self, number: int, moment: str) -> str:
        """The key of a tensor of state of the parameter with this number."""
        return self._key(str(number), moment)


def read_all(
    states: Sequence[OptimizerState],
    index: Index,
    names: Callable[[OptimizerState], GivenNames | None] = lambda state: None,
) -> list[StateKeys]:
    """The tensors of those of the states that have a known spelling. `names(state)` are those of
    numbered parameters, where somebody gave them.
    """
    found = (read_state_keys(state, index, names(state)) for state in states)
    return [one for one in found if one is not None and not _has_more(one, states)]


def _has_more(one: StateKeys, states: Sequence[OptimizerState]) -> bool:
    """Whether the dict around an optimizer holds tensors beside its state that may be those of
    parameters, such as master weights in a list.
    """
    if one.seen:
        return False
    known = {
        id(record)
        for state in states
        if state.home is not None
        for record in tensor_records([state.home.get("state"), state.home])
    }
    return any(
        id(record) not in known and record.shape for record in tensor_records(one.state.nodes)
    )


def read_state_keys(
    state: OptimizerState, index: Index, given: GivenNames | None = None
) -> StateKeys | None:
    """The tensors of the state by parameter; None where they do not say theirs in a known spelling,
    or where one of them belongs to no parameter.
    """
    objects = _objects(index)
    if not state.keys and state.numbered:
        return read_numbered(state, index, given, objects)
    own = set(state.keys)
    names = _Parameters((key for key in index.tensors if key not in own), objects)
    found = _seen(state, index, names) if state.keys else _outside(state, index, names)
    if found is None:
        return None
    # what is spelled anew for new names has to spell the old ones as they are
    for moment, held in found.tensors.items():
        if any(found.key(name, moment) != key for name, key in held.items()):
            return None
    return found


def _objects(index: Index) -> dict[str, ObjectCodes]:
    """The objects among the tensors that rules see, by name."""
    parts: Sequence[FileTree] = () if index.tree is None else index.tree.parts
    found: dict[str, ObjectCodes] = {}
    # files of ranks hold parts of parameters, each with the state of its part
    table = parts[0].table if len(parts) == 1 else None
    for name, value in () if table is None else table.pairs:
        if type(value) is not Composite or any(not at for at, _ in value.components):
            continue
        # few checkpoints have objects
        from ..source.quantized_layouts import layout_of

        layout = layout_of(value.encoding)
        grids = {} if layout is None else layout.grids
        straight = (
            at
            for at, _ in value.components
            if (grid := grids.get(at)) is not None
            and grid.deep
            and grid.rows == 1
            and not grid.turned
            and grid.columns in (1, 2)
        )
        codes = next(straight, None)
        found[name] = ObjectCodes(
            value.encoding.shape,
            tuple(key for key, _ in value.keys(name)),
            None if codes is None else f"{name}.{codes}",
        )
    return found


class _Parameters(Names):
    """The parameters that a name in an optimizer's state speaks of; objects by their codes."""

    def __init__(self, keys: Iterable[str], objects: Mapping[str, ObjectCodes]) -> None:
        inside = {key for one in objects.values() for key in one.components}
        super().__init__([*objects, *(key for key in keys if key not in inside)])
        self.objects = objects

    def of(self, name: str, rank: str = "") -> str | None:
        found = super().of(name, rank)
        return found if found is None or found not in self.objects else self.objects[found].key


def read_numbered(
    state: OptimizerState,
    index: Index,
    given: GivenNames | None,
    objects: Mapping[str, ObjectCodes],
) -> StateKeys | None:
    """State by number, as `torch.optim` has it; None where nothing says which parameters the
    numbers are, or where several orders fit.
    """
    # few checkpoints number their parameters
    from .numbered_states import ORDERED, parameters_of

    tree, held = index.tree, state.home
    if tree is None or type(held) is not DictNode or len(tree.parts) != 1:
        return None
    entries = held.get("state")
    if type(entries) is not DictNode:
        return None
    records: dict[int, dict[str, Any]] = {}
    for number, entry in entries.pairs:
        if not (type(number) is int or (type(number) is str and number.isdecimal())):
            return None
        if type(entry) is not DictNode or any(type(name) is not str for name, _ in entry.pairs):
            return None
        values = {name: value for name, value in entry.pairs if type(value) not in _PLAIN}
        if any(type(v) is not TensorRecord or id(v) not in tree.names for v in values.values()):
            return None
        records[int(number)] = values
    groups = held.get("param_groups")
    found = parameters_of(groups, records, tree.parts[0], index, given, objects)
    if found is None:
        return None
    called, of_group, known = found
    owners: dict[int, str] = {}
    for number, name in called.items():
        key = objects[name].key if name in objects else name
        if key is None:
            return None
        owners[number] = key
    # without any shape only names tell a parameter from a buffer
    if known == ORDERED and not any(records.values()):
        return None
    tensors: dict[str, dict[str, str]] = {}
    prefix = ""
    for number, values in records.items():
        for moment, record in values.items():
            key = tree.names[id(record)]
            prefix = key[: len(key) - len(key.lstrip("/"))]
            tensors.setdefault(moment, {})[owners[number]] = key
    path = state.path

    def spelled(name: str, moment: str) -> str:
        return prefix + printable(joined((*path, "state", name, moment), 520), _LONGEST)

    made = _made(state, index, owners, tensors, spelled, objects, seen=False, flat=False)
    text = any(type(number) is str for number, _ in entries.pairs)
    if made is None:
        return None
    listed: dict[int, list[str]] = {}
    for number, at in of_group.items():
        listed.setdefault(at, []).append(owners[number])
    numbering = Numbering(of_group, text, known, () if given is None else given.earlier)
    return replace(made, numbering=numbering, groups=list(listed.values()))


def _seen(state: OptimizerState, index: Index, names: _Parameters) -> StateKeys | None:
    """State among the tensors that rules see, its moment before or behind the parameter."""
    owners: dict[str, str] = {}
    tensors: dict[str, dict[str, str]] = {}
    before = None
    home = ""
    for key in state.keys:
        # of a rank's parameter the same rank has the state
        short, mark = _without_rank(key)
        match = SEEN.fullmatch(short)
        if match is None:
            return None
        home = "state." if match[1] is None else f"{match[1]}.state."
        last, first = match[2].rpartition("."), match[2].partition(".")
        readings = [
            (turned, name, moment, owner)
            for turned, name, moment in ((False, last[0], last[2]), (True, first[2], first[0]))
            if (owner := names.of(name, mark)) is not None
        ]
        if not readings:
            return None
        turned, name, moment, owner = readings[0]
        if before not in (None, turned) or owners.setdefault(name + mark, owner) != owner:
            return None
        before = turned
        tensors.setdefault(moment, {})[owner] = key
    # some have settings and no state so far
    settings = "" if before else f"{home.removesuffix('state.')}param_groups."
    for item in index.items if settings else ():
        short, mark = _without_rank(item)
        name = short.removeprefix(settings).rpartition(".")[0]
        if short.startswith(settings) and (owner := names.of(name, mark)) is not None:
            owners.setdefault(name + mark, owner)

    def spelled(name: str, moment: str) -> str:
        name, mark = _without_rank(name)
        return (f"{home}{moment}.{name}" if before else f"{home}{name}.{moment}") + mark

    made = _made(state, index, owners, tensors, spelled, names.objects, seen=True, flat=True)
    return None if made is None else replace(made, settings=settings)


def _without_rank(key: str) -> tuple[str, str]:
    """The key, and what says its rank: `@3`, or nothing."""
    if "@" not in key or (rank := rank_of(key)) is None:
        return key, ""
    return key.removesuffix(f"@{rank}"), f"@{rank}"


def _outside(state: OptimizerState, index: Index, names: _Parameters) -> StateKeys | None:
    """State in a dict of its own, beside the one that rules work on."""
    tree, held = index.tree, state.home
    if tree is None or type(held) is not DictNode or len(tree.parts) != 1:
        return None
    entries = held.get("state")
    flat = not (type(entries) is DictNode and entries.pairs)
    records = _flat_records(held, names) if flat else _nested_records(entries)
    turned = False
    if not flat and (records is None or all(names.of(one) is None for one, _, _ in records)):
        records, turned = _turned_records(entries), True
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
    groups: list[list[str]] = []
    for called in _names_in_groups(held):
        # some are without any state so far
        found = {name: owner for name in called if (owner := names.of(name)) is not None}
        groups.append(list(found.values()))
        owners = {**owners, **found}
    path = state.path

    def spelled(name: str, moment: str) -> str:
        order = (moment, name) if turned else (name, moment)
        keys = (f"state.{name}.{moment}",) if flat else ("state", *order)
        return prefix + printable(joined((*path, *keys), 520), _LONGEST)

    made = _made(state, index, owners, tensors, spelled, names.objects, seen=False, flat=flat)
    return None if made is None else replace(made, groups=groups, turned=turned)


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


def _turned_records(entries: DictNode) -> list[tuple[str, str, Any]] | None:
    """(parameter, moment, tensor) of `state`, where it has a dict for each moment; None where it
    has none. What it counts for all parameters is of none of them.
    """
    out: list[tuple[str, str, Any]] = []
    for moment, held in entries.pairs:
        if type(held) is DictNode:
            if type(moment) is not str or any(type(name) is not str for name, _ in held.pairs):
                return None
            out += [(name, moment, value) for name, value in held.pairs]
        elif type(held) not in _PLAIN and (type(held) is not TensorRecord or held.shape):
            return None
    return out or None


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


def _names_in_groups(held: DictNode) -> Iterator[list[str]]:
    groups = held.get("param_groups")
    for group in groups.items if type(groups) is ListNode else ():
        called = group.get("params") if type(group) is DictNode else None
        items = called.items if type(called) is ListNode else ()
        yield [name for name in items if type(name) is str]


def _made(
    state: OptimizerState,
    index: Index,
    owners: Mapping[Any, str],
    tensors: Mapping[str, Mapping[str, str]],
    key: Callable[[str, str], str],
    objects: Mapping[str, ObjectCodes],
    *,
    seen: bool,
    flat: bool,
) -> StateKeys | None:
    numbered = all(type(name) is int for name in owners)
    named = {one.key: name for name, one in objects.items() if one.key is not None}
    suffixes = {at.removeprefix(named[at]) for at in owners.values() if at in named}

    def name_of(at: str) -> str:
        return next((at.removesuffix(s) for s in suffixes if at.endswith(s)), at)

    spell = name_of if numbered else _spelling(owners, name_of)
    if spell is None or not (tensors or numbered) or len(set(owners.values())) != len(owners):
        return None
    every = index.tensors if seen else index.passed_through
    specs = {
        moment: {name: every[at].spec for name, at in held.items()}
        for moment, held in tensors.items()
    }
    shapes = {at: objects[named[at]].shape for at in owners.values() if at in named}
    return StateKeys(state, dict(owners), tensors, specs, seen, flat, spell, key, shapes=shapes)


def _spelling(
    owners: Mapping[str, str], name_of: Callable[[str], str]
) -> Callable[[str], str] | None:
    """How the optimizer would call a parameter of a new name: as it is, or without the segments of
    wrappers; None where it calls them otherwise. A name with a prefix more or less may be that of
    another layout already.
    """
    if all(name == name_of(key) for name, key in owners.items()):
        return name_of
    if all(name == plain(name_of(key)) for name, key in owners.items()):
        return lambda key: plain(name_of(key))
    return None
