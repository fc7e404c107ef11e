"""What a record is, judged by what it holds and by nothing that is merely spelled in its bytes.

The order of the questions is the order of what would be lost: a state that keeps scales is delayed,
whatever recipe stands beside them, and only a value that is understood to its last leaf can be
called stateless.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from math import isfinite
from typing import Any, NamedTuple

from ..core.errors import printable
from .decode import Reference, StoredState, examine
from .record import (
    BOOKKEEPING,
    CUSTOM,
    DELAYED,
    LOCAL_RECIPES,
    STATELESS,
    Recipe,
    ScalingState,
    StateRecord,
)

LEGACY, UNKNOWN = "legacy", "unknown"
# what is asked of the user first, where the modes of an operation differ
_ORDER = (UNKNOWN, DELAYED, LEGACY, STATELESS)


class StateVerdict(NamedTuple):
    """`sort` is "stateless", "delayed", "legacy" or "unknown"; `why` says what makes it that."""

    sort: str
    why: str


def judge(record: StateRecord) -> StateVerdict:
    """The verdict on a record: that of its most demanding mode."""
    found = [_judge(state, mode) for mode, state in record.states.items() if state is not None]
    return min(
        found,
        key=lambda v: _ORDER.index(v.sort),
        default=StateVerdict(STATELESS, "it holds nothing"),
    )


def _judge(state: ScalingState, mode: str) -> StateVerdict:
    where = f" ({mode})" if mode else ""
    if state.scaling:
        return StateVerdict(DELAYED, f"it keeps {', '.join(state.scaling)}{where}")
    delayed = next((r for r in state.recipes() if r.sort == DELAYED), None)
    if delayed is not None:
        inside = "" if delayed is state.recipe else f" in {printable(_place(state))}"
        return StateVerdict(DELAYED, f"its recipe{inside} is {delayed.name}{where}")
    if state.recipe is None:
        if not (state.tensors or state.extras or state.buffers):
            return StateVerdict(STATELESS, f"it holds nothing{where}")
        held = [*state.tensors, *state.buffers, *(["extra_fp8_variables"] if state.extras else [])]
        return StateVerdict(
            LEGACY, f"it has neither a recipe nor scales, only {', '.join(held)}{where}"
        )
    if state.tensors or state.buffers:
        held = [*state.tensors, *state.buffers]
        return StateVerdict(
            UNKNOWN,
            f"its recipe is {state.recipe.name}, which keeps nothing, and it keeps "
            f"{', '.join(held)}{where}",
        )
    odd = next((name for name, value in state.extras.items() if not _is_plain(name, value)), None)
    if odd is not None:
        return StateVerdict(
            UNKNOWN,
            f"beside its recipe {state.recipe.name} it keeps {printable(odd)}, which may be "
            f"state{where}",
        )
    local = next((r for r in state.recipes() if r.sort == CUSTOM and r is not state.recipe), None)
    if local is not None:
        return StateVerdict(UNKNOWN, f"it lists a custom recipe inside {state.recipe.name}{where}")
    return StateVerdict(STATELESS, f"its recipe is {state.recipe.name}{where}")


def _is_plain(name: str, value: Any) -> bool:
    """Whether an extra is one that the constructor makes again, or a list of recipes."""
    if name == LOCAL_RECIPES:
        return isinstance(value, (list, tuple)) and all(isinstance(v, Recipe) for v in value)
    return type(value) is BOOKKEEPING.get(name)


def _place(state: ScalingState) -> str:
    return next(
        (name for name, value in state.extras.items() if type(value) is list), "extra_fp8_variables"
    )


def oddities(record: StateRecord) -> tuple[str, ...]:
    """What is odd about the numbers of a state: scales that are not positive, infinities."""
    tensors = (
        (_label(mode, name), state.tensors[name].data)
        for mode, state in record.states.items()
        if state
        for name in state.scaling
    )
    return tuple(found for label, data in tensors if (found := _odd(label, data)))


def _label(mode: str, name: str) -> str:
    return f"{name} ({mode})" if mode else name


def _odd(label: str, data: bytes | memoryview) -> str:
    numbers = struct.unpack(f"<{len(data) // 4}f", data)
    if not all(map(isfinite, numbers)):
        return f"{label} holds numbers that are not finite"
    if label.startswith("scale"):
        return f"{label} holds a scale that is not positive" if min(numbers) <= 0 else ""
    return f"{label} holds a magnitude below zero" if min(numbers) < 0 else ""


class Judged(NamedTuple):
    """A verdict and a record of what was judged, whose numbers may be those of another state that
    has the same structure.

    `odd` is what is odd about its own numbers. `labels` say of each storage which scales or
    magnitudes it holds, nothing for other numbers; None where a storage is not that of one tensor.
    """

    verdict: StateVerdict
    like: StateRecord
    odd: tuple[str, ...] = ()
    labels: tuple[str, ...] | None = ()


def judged(payload: bytes, name: str) -> Judged:
    """The verdict on bytes, with a record of the same structure: keys, recipes, dtypes and shapes.

    Modules with one recipe have states that are equal byte for byte, or up to the numbers of their
    scales: one of them is decoded. That one is judged whole, so nothing is judged by what it looks
    like. CheckpointError as `decode`.
    """
    equal = _EQUAL.get(payload) if len(payload) <= _SHORT else None
    if equal is not None:
        return equal
    twin = _TWINS.find_known(payload)
    if twin is not None:
        known, runs = twin
        odd = (
            oddities(examine(payload, name)[0])
            if known.labels is None
            else _oddities(payload, runs, known.labels)
        )
        return known._replace(odd=odd) if odd else known
    record, held = examine(payload, name)
    found = Judged(judge(record), record, oddities(record), _labels(record, held))
    if held:
        _TWINS.add(payload, held, found._replace(odd=()))
    elif len(payload) <= _SHORT and len(_EQUAL) < _MOST_EQUAL:
        _EQUAL[payload] = found
    return found


def _labels(record: StateRecord, held: Sequence[StoredState]) -> tuple[str, ...] | None:
    labels: dict[int, str] = {}
    sizes = {id(one.stream): len(one.data) for one in held}
    for mode, state in record.states.items():
        for name in state.scaling if state is not None else ():
            data = state.tensors[name].data if state is not None else b""
            stream = id(data.obj) if isinstance(data, memoryview) else 0
            if stream in labels or sizes.get(stream) != len(data):
                return None
            labels[stream] = _label(mode, name)
    return tuple(labels.get(id(one.stream), "") for one in held)


def _oddities(
    payload: bytes, runs: Sequence[tuple[int, int]], labels: Sequence[str]
) -> tuple[str, ...]:
    """As `oddities`, of a payload whose structure is known; most are sound by the highest byte of
    each float: a sign, and an exponent.
    """
    found = []
    for (start, end), label in zip(runs, labels, strict=True):
        if label:
            top = payload[start + 3 : end : 4]
            if not top.isascii() or b"\x7f" in top or (b"\0" in top and label.startswith("scale")):
                found.append(_odd(label, payload[start:end]))
    return tuple(filter(None, found))


# states without tensors, and states with
_EQUAL: dict[bytes, Judged] = {}
_TWINS: Reference[Judged] = Reference()
_SHORT, _MOST_EQUAL = 4096, 256
