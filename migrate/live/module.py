"""What a live module takes from a state dict: its parameters, buffers and extra states by the names
that `state_dict` gives them, and how migrated tensors fit there.

Wrappers put a segment of their own into every name (`module.` of DDP, `_orig_mod.` of
torch.compile). Rules are written for the model's own names, so each slot knows both.

Shapes must be equal. A dtype may be another one where the module's holds every value of the
tensor's, which is said; where it does not, `copy_` would round, and that is a loss to be allowed.
Which names are left over on either side is listed both ways.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from ..core.errors import Report, did_you_mean, plural, printable
from ..core.part_names import FLOAT8
from ..core.spec import ALIASES, BITS, PACKED, Spec, spec
from ..core.templates import list_collapsed
from ..elements.numbers import holds
from ..elements.raw import is_plain_class
from ..formats import memory
from ..planning.pairs import scales_beside
from .training import is_training

if TYPE_CHECKING:
    import torch

    from ..core.errors import Diagnostic
    from ..core.spec import Spec
    from ..formats.memory import MemorySource

# segments that only wrappers have, wherever they stand
WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
# a wrapper whose own hooks keep its segment out of state dicts
_UNNAMED = "_checkpoint_wrapped_module"
EXTRA = "_extra_state"


class Slot(NamedTuple):
    """A place of a module that a state dict fills: attribute `name` of `owner`, which is `plain` to
    rules.

    `tensor` is the parameter or buffer, None for an extra state.
    """

    plain: str
    owner: torch.nn.Module
    name: str
    tensor: Any

    @property
    def spec(self) -> Spec | None:
        """dtype and shape; None for extra states, lazy parameters, dtypes of no checkpoint."""
        return spec_of(self.tensor)


def spec_of(tensor: Any) -> Spec | None:
    """The spec of a parameter or buffer; None where nothing fixed can be said."""
    import torch

    if tensor is None or torch.nn.parameter.is_lazy(tensor):
        return None
    name = _name_of(tensor.dtype)
    if name == PACKED:
        return spec("float4_e2m1fn", (*tensor.shape[:-1], 2 * tensor.shape[-1]))
    return None if name is None else spec(name, tuple(tensor.shape))


@cache
def _name_of(dtype: torch.dtype) -> str | None:
    """The name of a dtype that checkpoints have; `PACKED` is torch's alone."""
    name = str(dtype).removeprefix("torch.")
    return name if name == PACKED or name in BITS else ALIASES.get(name)


def slots(module: torch.nn.Module) -> dict[str, Slot]:
    """The slots by key, in state dict order; a submodule registered twice has its slots twice."""
    return dict(_walk(module, "", ""))


def reshard(module: torch.nn.Module) -> None:
    """Frees the whole parameters FSDP2 keeps after a forward: what is written to them is lost."""
    for one in module.modules():
        if any(
            c.__name__ == "FSDPModule" and c.__module__.startswith("torch.distributed.")
            for c in type(one).__mro__
        ):
            one.reshard()


def _walk(module: torch.nn.Module, prefix: str, plain: str) -> Iterator[tuple[str, Slot]]:
    import torch

    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield prefix + name, Slot(plain + name, module, name, parameter)
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield prefix + name, Slot(plain + name, module, name, buffer)
    for child, child_prefix, child_plain in _children(module, prefix, plain):
        yield from _walk(child, child_prefix, child_plain)
    if type(module).get_extra_state is not torch.nn.Module.get_extra_state:
        yield prefix + EXTRA, Slot(plain + EXTRA, module, EXTRA, None)


def _children(
    module: torch.nn.Module, prefix: str, plain: str
) -> Iterator[tuple[torch.nn.Module, str, str]]:
    """The submodules with the prefixes of their keys, with and without segments of wrappers."""
    for name, child in module._modules.items():
        if child is None:
            continue
        segment = f"{name}."
        if name in WRAPPERS or (not plain and _is_parallel(module)):
            yield child, prefix if name == _UNNAMED else prefix + segment, plain
        else:
            yield child, prefix + segment, plain + segment


def _versions(module: torch.nn.Module, plain: str = "") -> Iterator[tuple[str, dict[str, int]]]:
    """What `_metadata` says of each module; what stands in a wrapper comes after it."""
    yield plain[:-1], {"version": module._version}
    for child, _, child_plain in _children(module, "", plain):
        yield from _versions(child, child_plain)


def _is_parallel(module: torch.nn.Module) -> bool:
    """Whether the module is a data-parallel wrapper, with its model under the name `module`."""
    import torch

    return isinstance(module, (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel))


def is_module(value: Any) -> bool:
    """Whether it is a module; torch is not imported to find out."""
    return any(
        c.__module__ == "torch.nn.modules.module" and c.__name__ == "Module"
        for c in type(value).__mro__
    )


def state(module: torch.nn.Module) -> dict[str, Any]:
    """What the module's own `state_dict` holds, parameters and buffers themselves, by the names
    that rules know them by.

    Its `_metadata` has the versions of the modules, by such names too.
    """
    known = slots(module)
    held: dict[str, Any] = module.state_dict(keep_vars=True)
    named = {key: known[key].plain if key in known else _own(key) for key in held}
    if len(set(named.values())) < len(named):
        # a wrapper's segment is all that tells two names apart
        return held
    out = OrderedDict((named[key], value) for key, value in held.items())
    out._metadata = OrderedDict(_versions(module))  # type: ignore[attr-defined]
    return out


def opened(
    given: torch.nn.Module | Mapping[str, Any],
    *,
    meta: bool = False,
    wrapped: bool = True,
    at: str | None = None,
) -> MemorySource:
    """A module with its configuration, or a state dict, as `memory.open` opens it; a snapshot of a
    nested state as it opens itself, rules working on the dict `at`.
    """
    if isinstance(given, Mapping):
        snapshot = getattr(given, "opened", None)
        if snapshot is not None and (at is not None or is_training(given)):
            found: MemorySource = snapshot(at)
            return found
        return memory.open(given, meta=meta, wrapped=wrapped)
    return memory.open(state(given), meta=meta, wrapped=wrapped, sides=sides(given))


def unwrapped(keys: Mapping[str, Any], *, parallel: bool) -> dict[str, str]:
    """Key -> the model's own name. `parallel`: `module.` before all keys is a wrapper's too."""
    lead = "module." if parallel and keys and all(key.startswith("module.") for key in keys) else ""
    text = "\n".join(keys)
    if not any(word in text for word in WRAPPERS):
        return (
            {key: key[len(lead) :] for key in keys} if lead else dict(zip(keys, keys, strict=True))
        )
    return {key: _own(key[len(lead) :]) for key in keys}


def _own(key: str) -> str:
    return ".".join(part for part in key.split(".") if part not in WRAPPERS)


def sides(module: torch.nn.Module) -> dict[str, bytes]:
    """`config.json` from the model's own configuration, for rules; empty for a model without."""
    config = getattr(_model(module), "config", None)
    if config is not None and hasattr(config, "to_dict"):
        config = config.to_dict()
    if not isinstance(config, Mapping):
        return {}
    return {"config.json": (json.dumps(config, indent=2, default=str) + "\n").encode()}


def _model(module: torch.nn.Module) -> torch.nn.Module:
    """The model inside its wrappers."""
    while True:
        inner = module._modules.get("module") if _is_parallel(module) else None
        # a module may have a length, or none, and is then no truth value
        if inner is None:
            inner = next(
                (module._modules[name] for name in WRAPPERS if name in module._modules), None
            )
        if inner is None:
            return module
        module = inner


# names for which a near one is looked for, because comparing all with all takes long
_NEAR = 4


@dataclass(frozen=True, slots=True)
class Fit:
    """What came of the comparison: for each output that has a place the slot's key, what is left
    over on both sides, and what is wrong.

    `missing` are keys of slots, `unexpected` are outputs. `problems` are shapes (M960), codes
    without their scale (M409) and losses (M961), `notes` casts that lose nothing.
    """

    places: Mapping[str, str]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    problems: tuple[Diagnostic, ...]
    notes: tuple[str, ...]

    def left_over(self) -> Diagnostic | None:
        """M960 for names on either side, with the nearest of the other; None if there are none."""
        if not (self.missing or self.unexpected):
            return None
        report, notes = Report(), []
        if self.missing:
            notes.append(
                "in the module and not in the migrated checkpoint: "
                f"{list_collapsed(self.missing, 8)}"
            )
        if self.unexpected:
            notes.append(
                "in the migrated checkpoint and not in the module: "
                f"{list_collapsed(self.unexpected, 8)}"
            )
        near = (
            (key, did_you_mean(key, list(self.missing)))
            for key in self.unexpected[:_NEAR]
            if self.missing
        )
        notes += [f"{printable(key)}: {hint}" for key, hint in near if hint]
        short = [f"{plural(len(self.missing), 'key')} of the module would not be filled"] * bool(
            self.missing
        )
        long = [
            f"{plural(len(self.unexpected), 'key')} of the checkpoint would have no place"
        ] * bool(self.unexpected)
        way_out = "build a module that fits the checkpoint, or load with strict=False"
        report.add("M960", " and ".join(short + long), notes=tuple(notes), help=way_out)
        return report.diagnostics[0]


def _is_quantized(tensor: Any) -> bool:
    """Whether it is a parameter of bitsandbytes that holds codes."""
    if not type(tensor).__module__.startswith("bitsandbytes."):
        return False
    return getattr(tensor, "quant_state", None) is not None or not tensor.is_floating_point()


def fit(
    specs: Mapping[str, Spec],
    others: Iterable[str],
    slots: Mapping[str, Slot],
    allow: frozenset[str],
    *,
    cast: bool = True,
    loose: Container[str] = (),
    requantizes: Callable[[str, Slot], Any] = lambda name, slot: None,
) -> Fit:
    """Compares outputs (`specs`, and `others` that are no tensors) with slots. Outputs are named as
    the model itself names its own.

    Without `cast` the module takes the outputs' dtypes (`assign=True`), but for parameters of other
    classes than torch's. `loose` are those of `others` that are tensors after all, of a kind that
    no rule takes. `requantizes` answers with what a quantized parameter is made of if the output
    would have to be quantized into it.
    """
    by_name: dict[str, list[str]] = {}
    for key, slot in slots.items():
        by_name.setdefault(slot.plain, []).append(key)
    places: dict[str, str] = {}
    unexpected, shapes, casts, losses = [], [], dict[str, list[str]](), dict[str, list[str]]()
    values: list[str] = []
    coded: list[str] = []
    closed: dict[str, list[str]] = {}
    for name in (*specs, *others):
        keys = by_name.get(name, ())
        # a name that the wrappers' own segments make equal to another one means nothing
        if name in keys:
            key = name
        elif len(keys) == 1:
            key = keys[0]
        else:
            unexpected.append(name)
            continue
        places[name] = key
        there, made = slots[key].spec, specs.get(name)
        if made is None and slots[key].tensor is not None and name not in loose:
            values.append(name)
        if there is None or made is None:
            continue
        plain = is_plain_class(slots[key].tensor)
        anew = None if plain else requantizes(name, slots[key])
        if anew is not None and there.shape == made.shape:
            kind = losses if anew.takes_dense else closed
            kind.setdefault(f"{made.dtype} -> {anew.cls}", []).append(name)
            continue
        if there is made:
            continue
        if there.shape != made.shape:
            shapes.append(
                f"{printable(name)}: {list(made.shape)}, the module's is {list(there.shape)}"
            )
        elif (cast or not plain) and there.dtype != made.dtype:
            kind = casts if holds(there.dtype, made.dtype) else losses
            kind.setdefault(f"{made.dtype} -> {there.dtype}", []).append(name)
            if made.dtype in FLOAT8 and BITS[there.dtype] > 8:
                coded.append(name)
    filled = set(places.values())
    report = Report()
    if shapes:
        report.add(
            "M960",
            f"other shapes than the module's in {plural(len(shapes), 'migrated tensor')}",
            notes=(*shapes[:8], *[f"and {len(shapes) - 8} more"] * (len(shapes) > 8)),
            help="build the module with the sizes of the checkpoint",
        )
    if values:
        what = (
            "values that are not tensors stand for parameters or buffers of the module: "
            f"{list_collapsed(values, 8)}"
        )
        report.add(
            "M960",
            what,
            help="the checkpoint was written by other code than its names say; leave these values "
            "out",
        )
    if closed:
        report.add(
            "M960",
            "quantized parameters of the module are of classes that take no plain tensors",
            notes=tuple(f"{how}: {list_collapsed(names, 8)}" for how, names in closed.items()),
            help="load the plain weights before the module is quantized",
        )
    kinds = {type(slot.tensor) for slot in slots.values()}
    if any(kind.__module__.startswith("bitsandbytes.") for kind in kinds):
        held = [name for name, key in places.items() if _is_quantized(slots[key].tensor)]
        if held:
            report.add(
                "M960",
                f"bitsandbytes has quantized {plural(len(held), 'parameter')} of the module and "
                f"keeps the scales elsewhere: {list_collapsed(held, 8)}",
                help="load the plain weights before bitsandbytes quantizes them, as it does when "
                "the module is moved to a device; or save a folder for `from_pretrained`",
            )
    # a module with a place for the scale applies it itself
    found = scales_beside(specs, coded) if coded else {}
    if scales := {name: scale for name, scale in found.items() if scale not in places}:
        report.add(
            "M409",
            f"the module would be given the codes of {plural(len(scales), 'float8 tensor')} as "
            "numbers, without the scale beside each",
            notes=tuple(
                f"{printable(name)} ({specs[name]}): {printable(scale)} ({specs[scale]})"
                for name, scale in list(scales.items())[:8]
            ),
            help="decode them first, with `to=` or `rules=`; if the numbers are meant as they are, "
            "a rule says so: `cast: {…, unscaled: true}`",
        )
    if losses and "lossy" not in allow:
        report.add(
            "M961",
            "the module's dtypes and number formats cannot hold all values of the checkpoint's",
            notes=tuple(f"{how}: {list_collapsed(names, 8)}" for how, names in losses.items()),
            help='allow={"lossy"}, or build the module in the dtype of the checkpoint',
            permit="lossy",
        )
        losses = {}
    return Fit(
        places,
        tuple(key for key in slots if key not in filled),
        tuple(unexpected),
        tuple(report.diagnostics),
        tuple(
            f"cast {how}: {list_collapsed(names, 8)}"
            for how, names in (*casts.items(), *losses.items())
        ),
    )
