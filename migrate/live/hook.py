"""A hook that migrates old state dicts on their way into a live module: what `migrate.attach`
installs.

It is one hook on the root, because a hook on a child sees none of the keys of others. All is
checked in it, before torch writes the first tensor; the values themselves are made as torch copies
them. Whatever is not recognised is none of its business: torch then decides as it would without it.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import ops
from ..core.errors import Diagnostic, MigrateError, fail, listed, plural, printable
from ..core.templates import matches
from ..core.types import PathLike
from ..elements.raw import is_plain_class
from ..extra_state.states import States, lift_states
from ..formats import memory
from ..planning.lineages import apart, files_of, lineages_of
from ..planning.path import find_path
from ..planning.request import Request, make_request
from ..results import StateDictReport
from ..rules import params as parameters
from ..rules.lineage import mixes
from ..running.prepare import side_reader
from ..running.resources import memory_of, resolve_device
from ..running.stamp import Stamp
from ..source.index import Index
from ..source.jsontext import collector_paused
from ..source.pickle.tree import PARAMETER
from .migration import Migration, Outputs, RecentMigrations, prepare
from .module import EXTRA, fit, sides, slots, unwrapped
from .quantized import requantized
from .standins import LazyTensor, ModuleValues, require_present, require_readable, stand_in, stay

if TYPE_CHECKING:
    import torch

    from ..formats.memory import MemorySource
    from .module import Slot

log = logging.getLogger("migrate")
# says that a checkpoint is in no layout of a lineage
_UNKNOWN = frozenset({"M504"})


class Handle:
    """An attached hook. `remove()` removes it; calling it twice is harmless."""

    def __init__(self, module: torch.nn.Module, hook: _Hook) -> None:
        self._module, self._hook = weakref.ref(module), hook

    def remove(self) -> None:
        """Removes the hook: from then on state dicts are loaded unchanged."""
        module = self._module()
        if module is not None:
            for number, hook in _ours(module):
                if hook is self._hook:
                    del module._load_state_dict_pre_hooks[number]


def attach(
    model: torch.nn.Module,
    to: str | Iterable[str] = (),
    *,
    from_: str | Iterable[str] = (),
    rules: Iterable[PathLike] = (),
    params: Mapping[str, Any] | None = None,
    allow: Iterable[str] = (),
    device: Any = "cpu",
    max_memory: int | str = "1GB",
    inform: Callable[[StateDictReport], None] | None = None,
) -> Handle:
    """Let `model.load_state_dict` take state dicts of other layouts, migrated on the way in.

    A dict whose keys and shapes fit the module, all or a part of them, passes untouched; so a
    layout that differs in neither can only be migrated by `migrate_state_dict`. A dict whose layout
    is recognised but cannot be migrated is refused with diagnostics in the error that
    `load_state_dict` raises, and nothing in the module is changed; any other dict is left to torch.
    Values are made as torch copies them, one at a time; `assign=True` needs all at once. The
    caller's dict and its tensors are never changed. Versions in its `_metadata` count for modules
    that keep their names; torch itself records `assign=True` there, and uses it when the same dict
    is loaded again.

    A model that is part of a larger one is checked when torch reaches it; what comes before it is
    written by then. Modules that override `_load_from_state_dict` or have other hooks decide for
    themselves which names they accept.

    Args:
        model: The module.
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
        device: Where values are computed, a torch device or its name. Default: "cpu".
        max_memory: Bytes for tensors that are computed or transposed, also as text ("4GB").
            Default: 1 GB.
        inform: Called with a `StateDictReport` after each migrated load. Default: None.

    Returns:
        A `Handle`, whose `remove()` removes the hook. Attaching the same request again updates the
        other arguments and adds no second hook.

    Raises:
        MigrateError: M115 for wrong arguments and for another request on the same module, M5xx and
            M1xx for layouts and rules.

    Example:
        >>> class Model(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.norm = torch.nn.LayerNorm(4, bias=False)
        >>> model = Model()
        >>> handle = migrate.attach(model, rules="rename.yaml")
        >>> model.load_state_dict({"model.norm.weight": torch.ones(4)})
        <All keys matched successfully>
        >>> handle.remove()
    """
    import torch

    if not isinstance(model, torch.nn.Module):
        fail("M115", f"`model` must be a torch.nn.Module, not {printable(repr(model))}")
    request = make_request(to, from_, rules, params, allow, backwards=None)
    _require_sound(request)
    settings = _Settings(resolve_device(device)[1], memory_of(max_memory), inform)
    for _, hook in _ours(model):
        if hook.request != request:
            goals = listed([*hook.request.to, *hook.request.rules])
            help = "name all layouts in one call, or remove it first"  # noqa: A001 - the argument's name
            fail("M115", f"the module already has a hook, which leads to {goals}", help=help)
        hook.settings = settings
        return Handle(model, hook)
    hook = _Hook(request, settings)
    model.register_load_state_dict_pre_hook(hook)
    return Handle(model, hook)


def _ours(module: torch.nn.Module) -> list[tuple[int, _Hook]]:
    found = (
        (number, getattr(wrapped, "hook", wrapped))
        for number, wrapped in module._load_state_dict_pre_hooks.items()
    )
    return [(number, hook) for number, hook in found if isinstance(hook, _Hook)]


def _require_sound(request: Request) -> None:
    """Raises what is wrong with the request whatever state dict comes."""
    nothing = Index({}, ())
    for one in apart(request):
        try:
            find_path(nothing, lambda _: None, Stamp(), one)
        except MigrateError as error:
            # of nothing it is not known what it is, and a param may be another goal's
            if not {d.code for d in error.diagnostics} <= {*_UNKNOWN, "M503", "M112"}:
                raise
    known = [name for file in files_of(request) for name in file.model.params]
    parameters.resolve({}, request.params, known=[*known, PARAMETER])


def _is_stateful(request: Request) -> bool:
    """Whether states may have another form under the same names, so that keys do not tell."""
    if request.to and any(
        layout.detect is not None and layout.detect.extra_state
        for x in lineages_of(request)
        for layout in x.layouts
    ):
        return True
    rules = (
        [rule for file in files_of(request) for rule in file.model.rules] if request.files else []
    )
    return any(ops.get(step.op).kind == "decide" for rule in rules for step in rule.via)


class _Settings(NamedTuple):
    device: Any
    max_memory: int
    inform: Callable[[StateDictReport], None] | None


class _NotOursError(Exception):
    """The dict is in no layout that the hook knows, or there is nothing to do: torch decides."""


class _Boxed(NamedTuple):
    """A tensor that rules cannot take, and that goes where its module goes."""

    value: Any


class _Call(NamedTuple):
    """How `load_state_dict` was called."""

    strict: bool
    assign: bool
    metadata: Mapping[str, Any]


class _Hook:
    """The hook of one request. Copies and pickles of the module have it, without its memory."""

    def __init__(self, request: Request, settings: _Settings) -> None:
        self.request, self.settings = request, settings
        self._stateful = _is_stateful(request)
        lineages = lineages_of(request) if request.to else []
        self._versioned = any(
            layout.detect is not None and layout.detect.module_version
            for one in lineages
            for layout in one.layouts
        )
        self._recent = RecentMigrations()

    def __call__(
        self,
        module: torch.nn.Module,
        state: MutableMapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        error_msgs: list[str],
    ) -> None:
        import torch

        own = (
            {key[len(prefix) :]: value for key, value in state.items() if key.startswith(prefix)}
            if prefix
            else dict(state)
        )
        places = slots(module)
        as_is = _fits(own, places)
        if as_is and not (self._stateful and any(key.rpartition(".")[2] == EXTRA for key in own)):
            return
        call = _call(state, local_metadata, strict)
        checked = False
        try:
            with collector_paused():
                outputs, others = self._migrated(
                    module, own, places, _under(prefix, call.metadata) if self._versioned else {}
                )
                checked = True
                values, notes = self._checked(
                    module, prefix, outputs, others, places, call, error_msgs
                )
        except _NotOursError:
            return
        except MigrateError as error:
            if (
                as_is
                and not checked
                and not any(d.code.startswith("M95") for d in error.diagnostics)
            ):
                # only the form of states can be wrong in what has the right names
                return
            error_msgs += [_as_torch_message(found, prefix) for found in error.diagnostics]
            if self._free(module):
                # what loads itself may write, or fall over what it does not find: torch's error,
                # without its walk
                problems = "\n\t".join(error_msgs)
                raise RuntimeError(
                    f"Error(s) in loading state_dict for {type(module).__name__}:\n\t{problems}"
                ) from None
            stay(state, prefix, own, places, assign=call.assign)
            return
        if len(own) == len(state):
            state.clear()
        else:
            for key in own:
                del state[prefix + key]
        state.update({prefix + key: value for key, value in values.items()})
        if isinstance(module, torch.nn.modules.lazy.LazyModuleMixin):
            # its own hook was here before, and found none of its names
            module._lazy_load_hook(
                state, prefix, local_metadata, strict, missing, unexpected, error_msgs
            )
        if self.settings.inform is not None or log.isEnabledFor(logging.INFO):
            self._tell(outputs, len(own), len(values), notes, call)

    def _migrated(
        self,
        module: torch.nn.Module,
        own: Mapping[str, Any],
        places: Mapping[str, Slot],
        versions: Mapping[str, Any],
    ) -> tuple[Outputs, dict[str, Any]]:
        """The outputs, and by their names now the values that are no tensors."""
        try:
            parallel = not any(slot.plain.startswith("module.") for slot in places.values())
            names = unwrapped(own, parallel=parallel)
            said = {unwrapped({n: 0}, parallel=parallel)[n]: entry for n, entry in versions.items()}
        except TypeError:
            # keys that are no text
            raise _NotOursError from None
        try:
            return self._renamed(module, own, names, said)
        except _NotOursError:
            if all(key == name for key, name in names.items()):
                raise
        # without the segments of wrappers there is nothing to do: a goal may be about these
        return self._renamed(module, own, {key: key for key in own}, versions)

    def _renamed(
        self,
        module: torch.nn.Module,
        own: Mapping[str, Any],
        names: Mapping[str, str],
        said: Mapping[str, Any],
    ) -> tuple[Outputs, dict[str, Any]]:
        """`_migrated` for the dict under these names; `said` names modules alike."""
        import torch

        state = dict(zip(names.values(), own.values(), strict=True))
        if len(state) < len(own):
            raise _NotOursError
        if any(issubclass(kind, LazyTensor) for kind in set(map(type, state.values()))):
            # another hook of ours was here before
            state = {
                key: value.make() if isinstance(value, LazyTensor) else value
                for key, value in state.items()
            }
        side = sides(module)
        opened: list[MemorySource] = []

        def source() -> MemorySource:
            if not opened:
                read: OrderedDict[str, Any] = OrderedDict(state)
                read._metadata = dict(said)  # type: ignore[attr-defined]
                opened.append(_opened(read, side))
            return opened[0]

        def make() -> Migration:
            found = self._prepared(source())
            if not (found.moves and found.changes):
                raise _NotOursError
            return found

        signature = _signature(
            state, {**side, **{name: str(entry) for name, entry in said.items()}}
        )
        migration = make() if signature is None else self._recent.get(signature, make)

        def again() -> MemorySource:
            lift_states(source(), migration.migration_path.decided_patterns())
            return source()

        plain = signature is not None and signature[0]
        # arrays are read, because torch takes none
        objects = (
            state
            if plain
            else {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
        )
        outputs = Outputs(
            migration,
            again,
            objects,
            max_memory=self.settings.max_memory,
            device=self.settings.device,
        )
        if not plain:
            require_readable(outputs, outputs.specs)
        return outputs, {name: state[was] for name, was in migration.names.items()}

    def _prepared(self, source: MemorySource) -> Migration:
        try:
            return prepare(source, self.request)
        except MigrateError as error:
            codes = {d.code for d in error.diagnostics}
            if not codes <= _UNKNOWN:
                if (self.request.files or self.request.from_) and not self._reads(source):
                    raise _NotOursError from None
                raise
            if self.request.to and any(
                mixes(one, source.index) for one in lineages_of(self.request)
            ):
                raise
        # a goal in whose lineage the dict is not is none for this dict
        kept = [one for one in apart(self.request) if self._is_known(one, source)]
        if not kept:
            raise _NotOursError
        request = replace(
            self.request,
            to=tuple(t for one in kept for t in one.to),
            from_=tuple(t for one in kept for t in one.from_),
        )
        known = {name for file in files_of(request) for name in file.model.params}
        return prepare(
            source,
            replace(
                request,
                params={n: v for n, v in request.params.items() if n in known or n == PARAMETER},
            ),
        )

    def _is_known(self, request: Request, source: MemorySource) -> bool:
        try:
            find_path(
                source.index,
                side_reader(source),
                Stamp(),
                replace(request, params={}),
                states=States(source),
            )
        except MigrateError as error:
            return not {d.code for d in error.diagnostics} <= _UNKNOWN
        return True

    def _reads(self, source: MemorySource) -> bool:
        """Whether any rule of the first edge matches any key, whatever else it asks."""
        try:
            steps = find_path(
                source.index, side_reader(source), Stamp(), self.request, states=States(source)
            ).steps
        except MigrateError:
            return True
        patterns = [
            pattern
            for rule, _ in (steps[0].rules if steps else ())
            for pattern in (rule.targets if steps[0].backwards else rule.sources).values()
        ]
        keys = [
            *source.index.tensors,
            *(key for key in source.index.items if key.rpartition(".")[2] == EXTRA),
        ]
        return any(
            pattern.params or pattern.has_flat or any(matches(pattern, key) for key in keys)
            for pattern in patterns
        )

    def _checked(
        self,
        module: torch.nn.Module,
        prefix: str,
        outputs: Outputs,
        others: Mapping[str, Any],
        places: Mapping[str, Slot],
        call: _Call,
        error_msgs: list[str],
    ) -> tuple[dict[str, Any], Sequence[str]]:
        """What torch is given, by slot, and notes; raises problems. With `assign` all is made."""
        free = self._free(module)
        judged = (
            {
                k: slot._replace(tensor=None) if k.startswith(free) else slot
                for k, slot in places.items()
            }
            if free
            else places
        )
        loose = {name for name, value in others.items() if hasattr(value, "shape")}
        found = fit(
            outputs.specs,
            others,
            judged,
            self.request.allow,
            cast=not call.assign,
            loose=loose,
            # torch hands objects to the class's own `copy_`
            requantizes=lambda name, slot: requantized(outputs.own(name), slot.tensor, whole=True),
        )
        found = replace(
            found,
            missing=tuple(
                k
                for k in found.missing
                if not (k.startswith(free) or _fills_itself(places[k], prefix + k, call.metadata))
            ),
        )
        own = tuple(unwrapped(dict.fromkeys(free), parallel=False).values())
        strange = (
            [] if not call.strict else [key for key in found.unexpected if not key.startswith(own)]
        )
        problems: list[Diagnostic | None] = [*found.problems]
        if call.strict and (found.missing or strange):
            problems.append(replace(found, unexpected=tuple(strange)).left_over())
        if loose:
            problems.append(
                _other_kinds(
                    {name: others[name] for name in loose if name in found.places},
                    found.places,
                    judged,
                )
            )
        if against := [problem for problem in problems if problem is not None]:
            raise MigrateError(against)
        if outputs.has_meta and not call.assign:
            require_present(
                outputs, {key: places[at] for key, at in found.places.items() if key not in others}
            )
        outputs.require()
        given = ModuleValues(
            outputs,
            found.places,
            places,
            lambda broken: error_msgs.append(_as_torch_message(broken, prefix)),
        )
        values = given.assigned(others) if call.assign else given.lazily(others, free)
        for name in found.unexpected:
            if name in others:
                values[name] = others[name]
            elif name.startswith(own):
                # a module that loads itself may look at what it has no slot for
                view = outputs.view(name)
                values[name] = outputs.get(name) if view is None else view
            else:
                # torch names them; they are not made for that
                values[name] = stand_in(outputs, name)
        return values, found.notes

    def _free(self, module: torch.nn.Module) -> tuple[str, ...]:
        """Where modules load themselves or hooks rename: only they know what they take."""
        import torch

        own = {
            torch.nn.Module._load_from_state_dict,
            torch.nn.modules.batchnorm._NormBase._load_from_state_dict,
        }
        found = []
        for path, child in module.named_modules(remove_duplicate=False):
            hooks = [
                getattr(wrapped, "hook", wrapped)
                for wrapped in child._load_state_dict_pre_hooks.values()
            ]
            if child is module:
                hooks = hooks[hooks.index(self) + 1 :] if self in hooks else []
            foreign = [
                hook
                for hook in hooks
                if not str(getattr(hook, "__module__", "")).startswith("torch.")
            ]
            if foreign or type(child)._load_from_state_dict not in own:
                found.append(f"{path}." if path else "")
        return tuple(found)

    def _tell(
        self, outputs: Outputs, read: int, made: int, notes: Sequence[str], call: _Call
    ) -> None:
        said = outputs.migration.describe()
        steps = ", ".join(
            f"{step['lineage']} {step['from']} -> {step['to']}" for step in said["steps"]
        )
        at_once = ", all made at once for assign=True" if call.assign else ""
        log.info("migrated %s: %s from %s%s", steps, plural(made, "tensor"), f"{read:,}", at_once)
        if self.settings.inform is not None:
            said["notes"] = [*said["notes"], *notes]
            tensors = {"read": read, "made": made}
            self.settings.inform(StateDictReport.of(**said, tensors=tensors))


def _as_torch_message(diagnostic: Diagnostic, prefix: str) -> str:
    """The diagnostic as torch lists its own messages."""
    if prefix:
        diagnostic = replace(
            diagnostic, notes=(*diagnostic.notes, f"all of it below {printable(prefix[:-1])}")
        )
    return diagnostic.render().replace("\n", "\n\t")


def _other_kinds(
    values: Mapping[str, Any], places: Mapping[str, str], slots: Mapping[str, Slot]
) -> Diagnostic | None:
    """M960 for tensors no rule takes (sparse, quantized by torch) that do not fit the module's."""
    import torch

    wrong = []
    for name, value in values.items():
        held = slots[places[name]].tensor
        if held is None or torch.nn.parameter.is_lazy(held):
            continue
        one, other = (
            (tuple(t.shape), getattr(t, "layout", None), getattr(t, "is_quantized", False))
            for t in (value, held)
        )
        if one != other:
            wrong.append(f"{printable(name)}: {_kind(one)}, the module's is {_kind(other)}")
    if not wrong:
        return None
    what = f"tensors of another kind than the module's under {plural(len(wrong), 'name')}"
    return Diagnostic(
        "M960", what, notes=tuple(wrong[:8]), help="turn them into dense tensors first"
    )


def _kind(found: tuple[Any, ...]) -> str:
    shape, layout, quantized = found
    return f"{'quantized ' * bool(quantized)}{str(layout).removeprefix('torch.')} {list(shape)}"


def _fits(own: Mapping[str, Any], places: Mapping[str, Slot]) -> bool:
    """Whether each key is the module's, and each shape that of its tensor, as torch compares."""
    import torch

    lazy = torch.nn.parameter.is_lazy
    for key, value in own.items():
        slot = places.get(key)
        if slot is None:
            return False
        if slot.tensor is None or lazy(slot.tensor) or lazy(value):
            continue
        shape, held = getattr(value, "shape", None), slot.tensor.shape
        if shape is not None and tuple(shape) != held and not (held == () and tuple(shape) == (1,)):
            return False
    return True


def _call(
    state: MutableMapping[str, Any], local_metadata: Mapping[str, Any], strict: bool
) -> _Call:
    """How torch was called: hooks always get `strict=True`, so torch's own frame is asked first."""
    import torch

    frame, code = sys._getframe(1), torch.nn.Module.load_state_dict.__code__
    metadata: Any = getattr(state, "_metadata", None)
    while frame is not None:
        if frame.f_code is code:
            strict = bool(frame.f_locals.get("strict", strict))
            metadata = frame.f_locals.get("metadata", metadata)
            break
        frame = frame.f_back  # type: ignore[assignment]
    metadata = metadata if isinstance(metadata, Mapping) else {}
    # a load with `assign=True` is noted in the metadata, module by module, and the next one of the
    # same dict goes by that
    entries = [local_metadata, *metadata.values()]
    return _Call(
        strict,
        any(
            isinstance(entry, Mapping) and entry.get("assign_to_params_buffers")
            for entry in entries
        ),
        metadata,
    )


def _fills_itself(slot: Slot, key: str, metadata: Mapping[str, Any]) -> bool:
    """Whether torch fills it in: a normalisation's counter, in dicts from before there was one."""
    import torch

    if slot.name != "num_batches_tracked" or not isinstance(
        slot.owner, torch.nn.modules.batchnorm._NormBase
    ):
        return False
    version = (metadata.get(key.rpartition(".")[0]) or {}).get("version")
    return version is None or version < 2


def _signature(state: Mapping[str, Any], side: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """What a migration depends on: keys, classes, dtypes, shapes, strides; None if they are
    unknown.

    The first part says whether all values are plain tensors.
    """
    import torch

    values = list(state.values())
    kinds = tuple(map(type, values))
    plain = all(map(is_plain_class, dict(zip(kinds, values, strict=True)).values()))
    try:
        if plain:
            dtypes = tuple(map(attrgetter("dtype"), values))
            flags = [
                tuple(map(torch.Tensor.is_neg, values)),
                tuple(map(attrgetter("is_meta"), values)),
            ]
            flags += [tuple(map(torch.Tensor.is_conj, values))] * any(
                dtype.is_complex for dtype in set(dtypes)
            )
            # where all is in order, shapes tell the strides
            strides = (
                None
                if all(map(torch.Tensor.is_contiguous, values))
                else tuple(map(torch.Tensor.stride, values))
            )
            shapes = tuple(map(attrgetter("shape"), values))
            return (
                not any(map(any, flags)),
                tuple(state),
                kinds,
                dtypes,
                shapes,
                strides,
                *flags,
                tuple(side.items()),
            )
        rows: list[tuple[Any, ...]] = []
        for value in values:
            if not hasattr(value, "dtype") or not hasattr(value, "shape"):
                rows.append(())
            elif is_plain_class(value):
                rows.append(
                    (
                        value.dtype,
                        value.shape,
                        value.stride(),
                        value.is_meta or value.is_neg() or value.is_conj(),
                    )
                )
            else:
                rows.append(
                    (
                        value.dtype,
                        tuple(value.shape),
                        getattr(value, "strides", None),
                        memory.dense(value),
                    )
                )
        return (False, tuple(state), kinds, tuple(rows), tuple(side.items()))
    except (RuntimeError, NotImplementedError):
        # no strides
        return None


def _under(prefix: str, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of modules below the prefix, by their names there."""
    return {
        name[len(prefix) :]: entry
        for name, entry in metadata.items()
        if isinstance(name, str) and f"{name}.".startswith(prefix)
    }


def _opened(state: MutableMapping[str, Any], side: Mapping[str, bytes]) -> MemorySource:
    """The state dict as a source; tensors no rule can take (sparse, quantized) become values."""
    try:
        return memory.open(state, meta=True, wrapped=True, sides=side)
    except MigrateError:
        state.update({key: _Boxed(value) for key, value in state.items() if not _opens(key, value)})
        return memory.open(state, meta=True, wrapped=True, sides=side)


def _opens(key: str, value: Any) -> bool:
    try:
        memory.open({key: value}, meta=True, wrapped=True)
    except MigrateError:
        return False
    return True
