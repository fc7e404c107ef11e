"""A record of any release as the releases from 2.0 on hold it.

Until 0.7 a GEMM had two slots forwards (input, weight) and one backwards (gradient of the output);
since 0.8 it has three and two. A slot that is new begins as a new module begins it: scale 1, no
magnitude seen. 1.x stored no recipe, but the shape of the history says its length, and the largest
numbers say the format; what nothing says (margin, the way of the maximum) is what TE takes if
nobody says it. The operations of 1.13 kept input and parameter apart, those of 2.0 keep both in one
state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..core.errors import OpError
from .recipes import FORMATS, leave
from .record import (
    BOOKKEEPING,
    INVERSES,
    MODES,
    OLD_MODES,
    SCALING,
    Function,
    Recipe,
    ScalingState,
    StateForm,
    StateRecord,
    StateTensor,
)

_TE = "transformer_engine.common.recipe"
_ONE, _ZERO = b"\x00\x00\x80?", b"\x00\x00\x00\x00"


def normal(record: StateRecord) -> dict[str, ScalingState]:
    """The states by mode ("" for a module), each with a recipe, without inverses and buffers, with
    all slots.

    A state of 2.x is left as it is. OpError M950 for a record of 1.x that does not say what a
    recipe needs, and for modes whose histories differ.
    """
    return {mode: _normal(state, record.api) for mode, state in kept(record).items()}


def kept(record: StateRecord) -> dict[str, ScalingState]:
    """The states by mode, with all slots, of the tensors only those that delayed scaling keeps.
    OpError M950 for modes that do not fit.
    """
    held = {mode: state for mode, state in record.states.items() if state is not None}
    if not held.keys().isdisjoint(OLD_MODES):
        held = _joined(held)
    for mode, state in held.items():
        tensors = {name: state.tensors[name] for name in state.scaling}
        old = state.recipe is None and record.api == "module"
        held[mode] = replace(state, tensors=widened(tensors) if old else tensors)
    return held


def is_current(record: StateRecord) -> bool:
    """Whether these are the bytes of 2.x already: a pickle in which every state has its recipe, and
    no recipe names a function.
    """
    held = [state for state in record.states.values() if state is not None]
    recipes = [recipe for state in held for recipe in state.recipes()]
    named = any(
        isinstance(value, Function) for recipe in recipes for value in recipe.fields.values()
    )
    return record.form == "pickle" and not named and all(state.recipe is not None for state in held)


def _normal(state: ScalingState, api: str) -> ScalingState:
    if state.recipe is not None:
        return state
    out = replace(state, recipe=recovered(state), buffers=())
    extras = {
        name: state.extras[name]
        for name, kind in BOOKKEEPING.items()
        if type(state.extras.get(name)) is kind
    }
    if api == "module":
        extras = {"fp8_checkpoint": True, **extras}
    return replace(out, extras=extras)


def recovered(state: ScalingState) -> Recipe:
    """The recipe of a state that has none, from the length of the history and the largest
    numbers.
    """
    history = state.history
    pair = state.format
    if history is None or pair is None:
        missing = "a history" if history is None else f"a known format ({_shown(state)})"
        raise OpError(
            "M950",
            f"without a recipe and without {missing} its recipe cannot be determined",
            help=f"`delayed_scaling: tensors` keeps the scales without a recipe; {leave()}",
        )
    fields = {
        "margin": 0, "fp8_format": StateForm(*pair), "amax_history_len": history,
        "amax_compute_algo": "max",
        "scaling_factor_compute_algo": None, "reduce_amax": True, "fp8_dpa": False,
        "fp8_mha": False, "backward_override": None,
    }  # fmt: skip
    return Recipe(_TE, "DelayedScaling", fields)


def _shown(state: ScalingState) -> str:
    said = state.extras.get("fp8_max_fwd"), state.extras.get("fp8_max_bwd")
    known = ", ".join(f"{a} and {b}" for a, b in FORMATS.values())
    numbers = [str(n) for n in said if isinstance(n, (int, float)) and abs(n) < 1e9]
    return (
        f"the largest numbers are {' and '.join(numbers)}; known are {known}"
        if len(numbers) == 2
        else "nothing says the largest numbers"
    )


def widened(tensors: Mapping[str, StateTensor]) -> dict[str, StateTensor]:
    """With three slots forwards and two backwards for each GEMM, if there are two and one."""
    forward, backward = tensors.get("scale_fwd"), tensors.get("scale_bwd")
    if forward is None or backward is None or forward.shape[0] != 2 * backward.shape[0]:
        return dict(tensors)
    slots = {"fwd": 2, "bwd": 1}
    return {
        name: _with_slot(tensor, slots[name[-3:]], _ONE if name.startswith("scale") else _ZERO)
        for name, tensor in tensors.items()
    }


def _with_slot(tensor: StateTensor, each: int, new: bytes) -> StateTensor:
    """One slot more behind each `each` of the last axis. Where there is a row for each step, in
    each row.
    """
    width = 4 * each
    data = b"".join(
        part
        for at in range(0, len(tensor.data), width)
        for part in (tensor.data[at : at + width], new)
    )
    return StateTensor(
        tensor.dtype, (*tensor.shape[:-1], tensor.shape[-1] // each * (each + 1)), data
    )


def _joined(states: Mapping[str, ScalingState]) -> dict[str, ScalingState]:
    """The modes of 1.13 as those of 2.0: input and parameter side by side are forward."""
    out = {}
    for mode, parts in zip(MODES, (OLD_MODES[:2], OLD_MODES[2:]), strict=True):
        held = [states[part] for part in parts if part in states]
        if held:
            out[mode] = held[0] if len(held) == 1 else _beside(held)
    return out


def _beside(states: Sequence[ScalingState]) -> ScalingState:
    first = states[0]
    tensors = {}
    for name in (*SCALING, *INVERSES):
        found = [state.tensors[name] for state in states if name in state.tensors]
        if not found:
            continue
        if len(found) != len(states) or len({t.shape[:-1] for t in found}) > 1:
            raise OpError(
                "M950", f"its modes input and param do not fit together: {name}", help=leave()
            )
        tensors[name] = _columns(found)
    return ScalingState(first.recipe, tensors, first.extras, first.buffers)


def _columns(parts: Sequence[StateTensor]) -> StateTensor:
    rows = parts[0].shape[0] if len(parts[0].shape) > 1 else 1
    data = []
    for row in range(rows):
        for part in parts:
            width = 4 * part.shape[-1]
            data.append(part.data[row * width : (row + 1) * width])
    return StateTensor(
        parts[0].dtype, (*parts[0].shape[:-1], sum(p.shape[-1] for p in parts)), b"".join(data)
    )


__all__ = ["is_current", "kept", "normal", "recovered", "widened"]
