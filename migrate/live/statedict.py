"""A state dict migrated in memory: all at once as new tensors, or as a mapping that makes them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from weakref import WeakValueDictionary

from ..core.errors import fail, printable
from ..core.out_of_memory import guarded
from ..core.types import PathLike
from ..formats import memory
from ..planning.copies import stale_copies
from ..planning.module_names import follow_all
from ..planning.optimizers import judge_states
from ..planning.request import STALE_OPTIMIZER, Request, make_request
from ..results import StateDictReport
from ..running.error_statistics import Ledger
from ..running.prepare import find_optimizers, without_optimizers
from ..running.resources import CPU, MAX_MEMORY, Device, memory_of, resolve_device
from ..running.ties import find_ties
from ..source.pickle.tree import SCALARS, DictNode, ListNode, TensorRecord
from . import training
from .migration import Migration, Outputs, prepare
from .standins import LazyTensor, stand_in

if TYPE_CHECKING:
    import torch

    from ..formats.memory import MemorySource
    from ..planning.bind import StepResult
    from ..source.target import TargetTree


class StateDict(Mapping[str, Any]):
    """A migrated state dict over the caller's tensors, which it holds and never changes.

    A value is the caller's own object where nothing happens to it, a torch view of it where the
    layout allows one (it shares the caller's memory, as `state_dict()` shares the module's), else a
    new tensor, computed on each access and kept only by the caller; tied tensors that are
    alive together are one. With a `device` all tensors are on it. `_metadata` has the versions of
    the modules under the names that they have now.
    """

    def __init__(
        self,
        outputs: Outputs,
        source: MemorySource,
        device: Any,
        versions: Mapping[str, Any] | None,
    ) -> None:
        self._outputs, self._device = outputs, device
        self._names = outputs.migration.names
        self._items = source.index.items
        self._first = find_ties(outputs.graph.outputs, source.index.tensors)
        self._alive: WeakValueDictionary[str, torch.Tensor] = WeakValueDictionary()
        if versions is not None:
            self._metadata = _versions(
                versions, [bound for _, bound in outputs.migration.composition.steps]
            )

    def __getitem__(self, key: str) -> Any:
        if key not in self._first:
            return self._items[self._names[key]]
        found = self._outputs.view(key)
        if found is not None and (
            self._device is None or getattr(found, "device", None) == self._device
        ):
            return found
        first = self._first[key]
        made = self._alive.get(first)
        if made is None:
            made = self._outputs.compute(first, self._device)
            self._alive[first] = made
        return made

    def __iter__(self) -> Iterator[str]:
        yield from self._first
        yield from (name for name in self._names if name not in self._first)

    def __len__(self) -> int:
        return len(self._first) + sum(name not in self._first for name in self._names)

    def __contains__(self, key: object) -> bool:
        return key in self._first or key in self._names

    def __repr__(self) -> str:
        return (
            f"StateDict of {len(self._first)} tensors and {len(self) - len(self._first)} other "
            "values"
        )

    def lazy(self) -> dict[str, Any]:
        """The state dict for `load_state_dict`, which first copies what it is given: its values are
        made one by one, as torch copies them into parameters.

        Not for `assign=True`, which keeps what it is given.
        """
        out: OrderedDict[str, Any] = OrderedDict()
        for key in self:
            found = self._outputs.view(key) if key in self._first else self[key]
            out[key] = self._stand_in(key) if found is None else found
        if hasattr(self, "_metadata"):
            out._metadata = self._metadata  # type: ignore[attr-defined]
        return out

    def _stand_in(self, key: str) -> LazyTensor:
        return stand_in(
            self._outputs, key, partial(self.__getitem__, key), partial(self._copy_into, key)
        )

    def _copy_into(self, key: str, target: torch.Tensor) -> None:
        if not self._outputs.fill(key, target):
            target.copy_(self[key])

    def materialise(self) -> OrderedDict[str, Any]:
        """The state dict with new tensors, row-major on the CPU, each made once; ties stay ties."""
        tensors: dict[str, torch.Tensor] = {}
        out: OrderedDict[str, Any] = OrderedDict()
        for key in self:
            first = self._first.get(key)
            if first is None:
                out[key] = self[key]
                continue
            if first not in tensors:
                tensors[first] = self._outputs.compute(first)
            out[key] = tensors[first]
        if hasattr(self, "_metadata"):
            out._metadata = self._metadata  # type: ignore[attr-defined]
        return out


class Training(StateDict):
    """A migrated training checkpoint: the caller's own values where nothing changed, else new dicts
    and lists. Those of the model are mappings whose tensors are made on each access.
    """

    def __init__(self, tensors: StateDict, tree: TargetTree, own: Mapping[int, Any] | None) -> None:
        self._tensors, self._own = tensors, own or {}
        self._keys = tree.names
        part = tree.parts[0]
        self._table = part.table
        self._around = tree.passed_through
        # caller's tensors that stand in one place of the state already: optimizers change state in
        # place, and what two parameters shared would change twice
        self._placed: dict[int, str] = {}
        self._places = dict(part.root.pairs)

    def __getitem__(self, key: str) -> Any:
        value = self._places[key]
        if value is self._table and type(value) is DictNode:
            return _Model(self, value)
        return self._value(value)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __repr__(self) -> str:
        return f"migrated training checkpoint of {', '.join(map(str, self._places))}"

    def __contains__(self, key: object) -> bool:
        return key in self._places

    def lazy(self) -> dict[str, Any]:
        """The checkpoint in dicts, in which the model's tensors are made one by one, as torch
        copies them into parameters.
        """
        tensors = self._tensors.lazy()
        return {
            key: self._value(value, tensors.__getitem__) if value is self._table else self[key]
            for key, value in self._places.items()
        }

    def materialise(self) -> OrderedDict[str, Any]:
        """The checkpoint in dicts, with new tensors wherever anything changed, each made once."""
        tensors = self._tensors
        made: dict[str, Any] = {}

        def make(name: str) -> Any:
            first = tensors._first[name] if name not in self._around else name
            if first not in made:
                made[first] = tensors._outputs.compute(first)
            return made[first]

        return OrderedDict((key, self._value(held, make)) for key, held in self._places.items())

    def _tensor(self, name: str) -> Any:
        found = self._tensors[name]
        if name not in self._around:
            return found
        place = found.data_ptr() or id(found)
        return found if self._placed.setdefault(place, name) == name else found.detach().clone()

    def _value(self, node: Any, tensor: Callable[[str], Any] | None = None) -> Any:
        """The value of a node: the caller's own if nothing in it changed."""
        kind = type(node)
        if kind is TensorRecord:
            return (tensor or self._tensor)(self._keys[id(node)])
        if node is not self._table and id(node) in self._own:
            return self._own[id(node)]
        if kind is ListNode:
            items = [self._value(item, tensor) for item in node.items]
            return tuple(items) if node.kind == "tuple" else items
        if kind is not DictNode:
            return node
        made: Any = OrderedDict() if node.kind == "OrderedDict" else {}
        for key, held in node.pairs:
            name = key if type(key) in SCALARS else self._value(key)
            made[name] = self._value(held, tensor)
        if (versions := _versions_of(node)) is not None:
            made._metadata = versions
        return made


def _versions_of(node: DictNode) -> OrderedDict[str, Any] | None:
    """`_metadata` of a module's state dict; None for other dicts."""
    if node.kind != "OrderedDict" or type(node.attributes) is not DictNode:
        return None
    found = node.attributes.get("_metadata")
    return OrderedDict((name, dict(entry.pairs)) for name, entry in found.pairs) if found else None


class _Model(Mapping[str, Any]):
    """The dict of the model in a migrated training checkpoint; a value is made on each access."""

    def __init__(self, training: Training, node: DictNode) -> None:
        self._training, self._held = training, dict(node.pairs)
        if (versions := _versions_of(node)) is not None:
            self._metadata = versions

    def __getitem__(self, key: str) -> Any:
        return self._training._value(self._held[key])

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)


def _made(value: Any) -> Any:
    """The value, a model's dict with all of its tensors."""
    if type(value) is not _Model:
        return value
    made: Any = OrderedDict(value)
    if hasattr(value, "_metadata"):
        made._metadata = value._metadata
    return made


@guarded
def migrate_state_dict(
    state_dict: Mapping[str, Any],
    to: str | Iterable[str] = (),
    *,
    from_: str | Iterable[str] = (),
    rules: Iterable[PathLike] = (),
    params: Mapping[str, Any] | None = None,
    allow: Iterable[str] = (),
    backwards: bool | None = None,
    at: str | None = None,
    rest: Literal["carry", "leave"] = "carry",
    device: Any = None,
    max_memory: int | str = "1GB",
    inform: Callable[[StateDictReport], None] | None = None,
) -> StateDict:
    """View a state dict in another layout: a mapping that makes each value when it is accessed.

    The caller's dict, its tensors and its `_metadata` are never changed.

    Args:
        state_dict: Tensors and other values, by key; or a training checkpoint, such as
            `{"model": …, "optimizer": …}`, whose optimizer state follows the model's tensors.
        to: Layouts to reach, as `LINEAGE@LAYOUT`, one or several. Default: none; `rules` then
            determine what is done.
        from_: Layouts that the checkpoint is in. Default: none; read from its stamp, else detected
            from keys, shapes and `config.json`.
        rules: Rule files, applied as they are, or one folder of lineages that is searched first.
            Default: none.
        params: Values of the rules' params, by name. Default: none; they are read from the
            checkpoint.
        allow: Permissions, such as "lossy" or "drop". Default: none, so that whatever would lose
            something is refused.
        backwards: True goes the way of `downgrade`, rule files too, and False that of `apply`.
            Default: None; whichever leads to `to`, and forwards with rule files.
        at: The dict of a nested state that rules work on, as a path such as `model.state_dict`.
            Default: found automatically.
        rest: "leave" takes that dict alone and answers with it. Default: "carry".
        device: The device of the values, a torch device or its name. Default: None, so that they
            stay where they are and are computed on the CPU.
        max_memory: Bytes for tensors that are computed or transposed, also as text ("4GB").
            Default: 1 GB.
        inform: Called with a `StateDictReport` before anything is computed. Default: None.

    Returns:
        A `StateDict`. Its values are the caller's own tensors where nothing happens to them, torch
        views where the layout allows it, else new tensors, made on each access. A training
        checkpoint keeps its form: the model's dict is such a mapping, and what did not change is
        the caller's own.

    Raises:
        MigrateError: What `plan` raises, also for conditions on values.

    Example:
        >>> old = {"model.norm.weight": torch.ones(4)}
        >>> new = migrate.migrate_state_dict(old, rules="rename.yaml")
        >>> new["norm.weight"] is old["model.norm.weight"]
        True
    """
    where, compute = resolve_device(device)
    request = make_request(to, from_, rules, params, allow, backwards=backwards)
    if rest == "leave":
        state_dict, at = training.alone(state_dict, at), None
    elif rest != "carry":
        fail("M115", f"`rest` is {printable(repr(rest))}", help='"carry" or "leave"')
    opened = _open(state_dict, wrapped=True, at=at)
    source, found = _with_optimizers(opened.source, request)
    source, found, tree = opened.surround(source, found)
    outputs = Outputs(
        found, lambda: source, source.values, max_memory=memory_of(max_memory), device=compute
    )
    outputs.require()
    if inform is not None:
        inform(StateDictReport.of(**found.describe(), report=None))
    made = StateDict(outputs, source, where, opened.versions)
    return made if tree is None else Training(made, tree, opened.own)


class _Opened(NamedTuple):
    """A state dict as a Source. Of a training checkpoint `own` has the caller's containers by the
    identity of their nodes.
    """

    source: MemorySource
    own: Mapping[int, Any] | None
    versions: Mapping[str, Any] | None

    def surround(
        self, source: MemorySource, found: Migration
    ) -> tuple[MemorySource, Migration, TargetTree | None]:
        """Source and migration with all tensors, and the tree that the outcome has, if any."""
        return (source, found, None) if self.own is None else training.surround(source, found)


def _open(state: Mapping[str, Any], *, wrapped: bool = False, at: str | None = None) -> _Opened:
    kept = type(state) in (dict, OrderedDict, Training)
    if kept and any(type(value) is _Model for value in state.values()):
        # what was migrated before
        state = {key: _made(value) for key, value in state.items()}
    if at is not None or training.is_training(state):
        return _Opened(*training.open_training(state, at), None)
    return _Opened(memory.open(state, wrapped=wrapped), None, getattr(state, "_metadata", None))


def _versions(versions: Mapping[str, Any], bounds: Sequence[StepResult]) -> OrderedDict[str, Any]:
    """`_metadata` by the modules' new names, without modules merged from different versions."""
    moved = follow_all(bounds, list(versions)) if bounds else {name: (name,) for name in versions}
    out: OrderedDict[str, Any] = OrderedDict()
    unlike = set()
    for name, entry in versions.items():
        for there in moved[name]:
            if out.setdefault(there, entry) != entry:
                unlike.add(there)
    return OrderedDict((name, dict(entry)) for name, entry in out.items() if name not in unlike)


def _with_optimizers(source: MemorySource, request: Request) -> tuple[MemorySource, Migration]:
    """The migration, with what becomes of optimizer state that the dict holds, and the source that
    it is of: without that state if asked.

    M410 where it would go stale, and a warning M411 of a copy of the weights, as in a run into
    files.
    """
    kept, fresh = without_optimizers(source, request)
    states = find_optimizers(kept)
    found = prepare(kept, request, states=() if STALE_OPTIMIZER in request.allow else states)
    became = fresh or judge_states(states, found.composition, kept.index, request.allow)
    copies = stale_copies(kept.index, found.composition) if kept.index.items else []
    return kept, replace(
        found, notes=[*found.notes, *became.notes], warnings=[*found.warnings, *copies]
    )


def migrate_in_memory(
    tensors: Mapping[str, Any],
    request: Request,
    max_memory: int = MAX_MEMORY,
    device: Device = CPU,
    inform: Callable[[StateDictReport], None] | None = None,
) -> OrderedDict[str, Any]:
    """What `migrate_state_dict` gives, with all tensors made anew; `inform` gets the errors too."""
    if request.undo:
        fail("M115", "`undo` is for a run that writes files: a state dict is changed nowhere")
    opened = _open(tensors, at=request.at)
    source = opened.source
    try:
        source, found = _with_optimizers(source, request)
        source, found, tree = opened.surround(source, found)
        ledger = Ledger(found.composition.graph.outputs) if inform is not None else None
        outputs = Outputs(
            found,
            lambda: source,
            source.values,
            max_memory=max_memory,
            device=device,
            ledger=ledger,
        )
        outputs.require()
        state = StateDict(outputs, source, None, opened.versions)
        made = (state if tree is None else Training(state, tree, opened.own)).materialise()
    finally:
        source.close()
    if inform is not None:
        errors = None if ledger is None else ledger.report(complete=True)
        inform(StateDictReport.of(**found.describe(), report=errors))
    return made
