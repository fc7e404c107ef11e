"""What a record is, judged by what it holds and by nothing that is merely spelled in its bytes.

The order of the questions is the order of what would be lost: whoever keeps scales is delayed, whatever recipe stands beside them, and only
a value that is understood to its last leaf can be called stateless.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..core.diagnostics import printable
from ._twins import Twins
from .decode import examined
from .record import BOOKKEEPING, CUSTOM, DELAYED, LOCAL_RECIPES, Recipe, Record, State

STATELESS, LEGACY, UNKNOWN = "stateless", "legacy", "unknown"
# what is asked of the user first, where the modes of an operation differ
_ORDER = (UNKNOWN, DELAYED, LEGACY, STATELESS)


class Verdict(NamedTuple):
    """`sort` is "stateless", "delayed", "legacy" or "unknown"; `why` says what in the record makes it that."""

    sort: str
    why: str


def judge(record: Record) -> Verdict:
    """The verdict on a record: that of its most demanding mode."""
    found = [_judge(state, mode) for mode, state in record.states.items() if state is not None]
    return min(found, key=lambda v: _ORDER.index(v.sort), default=Verdict(STATELESS, "it holds nothing"))


def _judge(state: State, mode: str) -> Verdict:
    where = f" ({mode})" if mode else ""
    if state.scaling:
        return Verdict(DELAYED, f"it keeps {', '.join(state.scaling)}{where}")
    delayed = next((r for r in state.recipes() if r.sort == DELAYED), None)
    if delayed is not None:
        inside = "" if delayed is state.recipe else f" in {printable(_place(state))}"
        return Verdict(DELAYED, f"its recipe{inside} is {delayed.name}{where}")
    if state.recipe is None:
        if not (state.tensors or state.extras or state.buffers):
            return Verdict(STATELESS, f"it holds nothing{where}")
        held = [*state.tensors, *state.buffers, *(["extra_fp8_variables"] if state.extras else [])]
        return Verdict(LEGACY, f"it has neither a recipe nor scales, only {', '.join(held)}{where}")
    if state.tensors or state.buffers:
        held = [*state.tensors, *state.buffers]
        return Verdict(UNKNOWN, f"its recipe is {state.recipe.name}, which keeps nothing, and it keeps {', '.join(held)}{where}")
    odd = next((name for name, value in state.extras.items() if not _is_plain(name, value)), None)
    if odd is not None:
        return Verdict(UNKNOWN, f"beside its recipe {state.recipe.name} it keeps {printable(odd)}, which may be state{where}")
    local = next((r for r in state.recipes() if r.sort == CUSTOM and r is not state.recipe), None)
    if local is not None:
        return Verdict(UNKNOWN, f"it lists a custom recipe inside {state.recipe.name}{where}")
    return Verdict(STATELESS, f"its recipe is {state.recipe.name}{where}")


def _is_plain(name: str, value: Any) -> bool:
    """Whether an extra is one that the constructor makes again, or a list of recipes."""
    if name == LOCAL_RECIPES:
        return isinstance(value, (list, tuple)) and all(isinstance(v, Recipe) for v in value)
    return type(value) is BOOKKEEPING.get(name)


def _place(state: State) -> str:
    return next((name for name, value in state.extras.items() if type(value) is list), "extra_fp8_variables")


class Judged(NamedTuple):
    """A verdict and a record of what was judged; numbers in it may be those of another state that has the same structure."""

    verdict: Verdict
    like: Record


def judged(payload: bytes, name: str) -> Judged:
    """The verdict on bytes, with a record of the same structure: keys, recipes, dtypes and shapes.

    Modules with one recipe have states that are equal byte for byte, or up to the numbers of their scales: one of them is decoded. That one
    is judged whole, so nothing is judged by what it looks like. CheckpointError as `decode`.
    """
    known = (_EQUAL.get(payload) if len(payload) <= _SHORT else None) or _TWINS.find(payload)
    if known is not None:
        return known
    record, held = examined(payload, name)
    found = Judged(judge(record), record)
    if held:
        _TWINS.add(payload, held, found)
    elif len(payload) <= _SHORT and len(_EQUAL) < _MOST_EQUAL:
        _EQUAL[payload] = found
    return found


# states without tensors, and states with
_EQUAL: dict[bytes, Judged] = {}
_TWINS: Twins[Judged] = Twins()
_SHORT, _MOST_EQUAL = 4096, 256
