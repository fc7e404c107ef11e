"""A state dict migrated in memory: all at once as new tensors, or as a mapping that makes them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from ..core.errors import fail
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
from .migration import Migration, Outputs, prepare
from .standins import LazyTensor, stand_in

if TYPE_CHECKING:
    import torch

    from ..formats.memory import MemorySource
    from ..planning.bind import StepResult


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


@guarded
def migrate_state_dict(
    state_dict: Mapping[str, Any],
    to: str | Iterable[str] = (),
    *,
    from_: str | Iterable[str] = (),
    rules: Iterable[PathLike] = (),
    params: Mapping[str, Any] | None = None,
    allow: Iterable[str] = (),
    device: Any = None,
    max_memory: int | str = "1GB",
    inform: Callable[[StateDictReport], None] | None = None,
) -> StateDict:
    """View a state dict in another layout: a mapping that makes each value when it is accessed.

    The caller's dict, its tensors and its `_metadata` are never changed.

    Args:
        state_dict: Tensors and other values, by key.
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
        device: The device of the values, a torch device or its name. Default: None, so that they
            stay where they are and are computed on the CPU.
        max_memory: Bytes for tensors that are computed or transposed, also as text ("4GB").
            Default: 1 GB.
        inform: Called with a `StateDictReport` before anything is computed. Default: None.

    Returns:
        A `StateDict`. Its values are the caller's own tensors where nothing happens to them, torch
        views where the layout allows it, else new tensors, made on each access.

    Raises:
        MigrateError: What `plan` raises, also for conditions on values.

    Example:
        >>> old = {"model.norm.weight": torch.ones(4)}
        >>> new = migrate.migrate_state_dict(old, rules="rename.yaml")
        >>> new["norm.weight"] is old["model.norm.weight"]
        True
    """
    where, compute = resolve_device(device)
    source = memory.open(state_dict, wrapped=True)
    request = make_request(to, from_, rules, params, allow, backwards=None)
    source, found = _with_optimizers(source, request)
    outputs = Outputs(
        found, lambda: source, source.values, max_memory=memory_of(max_memory), device=compute
    )
    outputs.require()
    if inform is not None:
        inform(StateDictReport.of(**found.describe(), report=None))
    return StateDict(outputs, source, where, getattr(state_dict, "_metadata", None))


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
    source = memory.open(tensors)
    try:
        source, found = _with_optimizers(source, request)
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
        versions = getattr(tensors, "_metadata", None)
        made = StateDict(outputs, source, None, versions).materialise()
    finally:
        source.close()
    if inform is not None:
        errors = None if ledger is None else ledger.report(complete=True)
        inform(StateDictReport.of(**found.describe(), report=errors))
    return made
