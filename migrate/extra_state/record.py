"""What every form of extra state is normalised to, whichever release wrote it; which recipes there
are, as data; and how the releases from 2.0 on hold a state.

A recipe that is new gets a line in `RECIPES`: module, class, the first release that has it, and its
sort. Stateless recipes compute their scales anew in every step; delayed scaling keeps them between
steps; of a custom recipe only its payload says which it is. A class that stands in the fields of a
recipe goes into `PARAMETERS`. A field that may hold the name of a user's function goes into
`FUNCTIONS`, with the sort of the recipes that have it; the name is carried as text and looked up
nowhere.

Until 0.7 a GEMM had two slots forwards (input, weight) and one backwards (gradient of the output);
since 0.8 it has three and two. A slot that is new begins as a new module begins it: scale 1, no
magnitude seen. 1.x stored no recipe, but the shape of the history says its length, and the largest
numbers say the format; what nothing says (margin, the way of the maximum) is TE's default. The
operations of 1.13 kept input and parameter apart, those of 2.0 keep both in one state.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ..core.errors import OpError, option

STATELESS, DELAYED, CUSTOM = "stateless", "delayed", "custom"
_TE = "transformer_engine.common.recipe"


class Known(NamedTuple):
    """A recipe's sort, and the first release (major, minor) that writes it."""

    sort: str
    since: tuple[int, int]


RECIPES: dict[tuple[str, str], Known] = {
    (_TE, "DelayedScaling"): Known(DELAYED, (2, 0)),
    (_TE, "MXFP8BlockScaling"): Known(STATELESS, (2, 0)),
    (_TE, "Float8CurrentScaling"): Known(STATELESS, (2, 2)),
    (_TE, "Float8BlockScaling"): Known(STATELESS, (2, 3)),
    (_TE, "NVFP4BlockScaling"): Known(STATELESS, (2, 8)),
    (_TE, "CustomRecipe"): Known(CUSTOM, (2, 9)),
    # Megatron's own subclass, under the two names that it had
    ("megatron.core.extensions.transformer_engine", "TEDelayedScaling"): Known(DELAYED, (2, 0)),
    ("megatron.core.transformer.custom_layers.transformer_engine", "TEDelayedScaling"): Known(
        DELAYED, (2, 0)
    ),
}
PARAMETERS = {(_TE, "MMParams"), (_TE, "QParams")}
FORMAT, FORMAT_HELPER = (_TE, "Format"), (_TE, "_FormatHelper")
# (largest number forwards, backwards) of each format
FORMATS = {"HYBRID": (448, 57344), "E4M3": (448, 448), "E5M2": (57344, 57344), "E2M1": (6, 6)}
# which recipes have the field
FUNCTIONS = {
    "amax_compute_algo": DELAYED,
    "scaling_factor_compute_algo": DELAYED,
    "qfactory": CUSTOM,
}
# fields that tell a recipe's release: the first that has it, the first that has it no more
FIELDS: dict[str, tuple[tuple[int, int], tuple[int, int] | None]] = {
    "interval": ((0, 1), (2, 2)),
    "nvfp4_4over6": ((2, 17), None),
    "row_scaled_activation": ((2, 16), None),
    "_cached_repr": ((2, 16), None),
    "backward_override": ((2, 15), None),
}
# how a message says what to do about a class that is none of these
HOW_TO_ADD = (
    "if it is a recipe, add a line to RECIPES in migrate/extra_state/record.py that "
    "says whether it keeps state"
)


def how_to_leave() -> str:
    """How a message says to leave delayed scaling behind, where no param of the rule file does."""
    return f"`delayed_scaling: drop` in the rule and {option('allow', 'drop')} leave it behind"


# what delayed scaling keeps between steps; in the order in which 2.x writes it
SCALING = ("scale_fwd", "amax_history_fwd", "scale_bwd", "amax_history_bwd")
# reciprocals of the scales, computed anew from 2.0 on
INVERSES = ("scale_inv_fwd", "scale_inv_bwd")
# the buffers of the whole model, which old releases stored again in each module
BUFFERS = ("global_fp8_buffer", "global_fp8_recompute_buffer", "global_fp8_state")
EXTRAS, RECIPE = "extra_fp8_variables", "recipe"
KEYS = frozenset({RECIPE, EXTRAS, *SCALING, *INVERSES, *BUFFERS})
# what the constructor of a module sets again: numbers that are no state
BOOKKEEPING = {"fp8_checkpoint": bool, "num_gemms": int, "fp8_max_fwd": int, "fp8_max_bwd": int}
LOCAL_RECIPES = "local_recipes"
# what an object that is packed as bytes begins with: drawn anew for each process, so that no bytes
# of a checkpoint can pass for one
MARK = os.urandom(16)
# forms that are read as the object that they are, and cannot be kept as bytes
OBJECTS = frozenset({"archive", "list", "dict", "nothing"})
# of the operations of `te.ops`: from 2.0 on, and in 1.13
MODES, OLD_MODES = ("forward", "backward"), ("input", "param", "grad_output")


@dataclass(frozen=True, slots=True, repr=False)
class StateTensor:
    """`data` are the elements, row-major and little-endian, of torch's `dtype`; a view of what was
    read, where nothing had to change.
    """

    dtype: str
    shape: tuple[int, ...]
    data: bytes | memoryview


class Object(NamedTuple):
    """One state: the key that rules see, the rank of its file, its key there, and its value."""

    name: str
    rank: int
    key: str
    value: Any


class StateForm(NamedTuple):
    """A pair of FP8 (or FP4) formats by the largest number of each, `forward` and `backward`."""

    forward: int
    backward: int

    @property
    def name(self) -> str | None:
        """TE's name of the pair; None for a pair that has none."""
        return next((name for name, pair in FORMATS.items() if pair == self), None)


class Function(NamedTuple):
    """The name of a user's function, which is carried and never looked up."""

    module: str
    name: str


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Parameters:
    """Settings inside a recipe (`MMParams`, `QParams`)."""

    module: str
    name: str
    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Recipe:
    """A recipe by class and fields: scalars, text, `StateForm`, `Function`, `Parameters`, lists."""

    module: str
    name: str
    fields: Mapping[str, Any]

    @property
    def sort(self) -> str:
        """ "stateless", "delayed" or "custom", as the table says."""
        return RECIPES[self.module, self.name].sort

    @property
    def format(self) -> StateForm | None:
        """The FP8 format, where the recipe says it."""
        found = self.fields.get("fp8_format")
        return found if isinstance(found, StateForm) else None


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ScalingState:
    """What one module, or one mode of an operation, keeps.

    `tensors` are those of `SCALING` and `INVERSES` that are there, float32: scales [n], histories
    [length, n], the newest amax in row 0. `extras` are plain values, lists, dicts, recipes and
    tensors. `buffers` names what belongs to no single module.
    """

    recipe: Recipe | None = None
    tensors: Mapping[str, StateTensor] = field(default_factory=dict)
    extras: Mapping[str, Any] = field(default_factory=dict)
    buffers: tuple[str, ...] = ()

    @property
    def scaling(self) -> tuple[str, ...]:
        """The names of the scales and histories that are there."""
        return tuple(name for name in SCALING if name in self.tensors)

    @property
    def history(self) -> int | None:
        """The length of the amax history, by the shape of the tensor; None without one."""
        for name in ("amax_history_fwd", "amax_history_bwd"):
            if name in self.tensors:
                return self.tensors[name].shape[0]
        return None

    @property
    def format(self) -> StateForm | None:
        """The FP8 format of the recipe, else of the largest numbers, which every release stores."""
        if self.recipe is not None and self.recipe.format is not None:
            return self.recipe.format
        said = self.extras.get("fp8_max_fwd"), self.extras.get("fp8_max_bwd")
        return next((StateForm(*pair) for pair in FORMATS.values() if pair == said), None)

    def recipes(self) -> Iterator[Recipe]:
        """The recipe, and those inside the extras."""
        stack: list[Any] = [self.recipe, self.extras]
        seen: set[int] = set()
        while stack:
            value = stack.pop()
            if isinstance(value, Recipe):
                yield value
            elif isinstance(value, (list, tuple, dict)) and id(value) not in seen:
                seen.add(id(value))
                stack += value.values() if isinstance(value, dict) else value


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class StateRecord:
    """One extra state. `form` is how it was stored: "empty", "none" (a pickle of None), "pickle" or
    "archive"; or as an object: "list", "dict", "nothing" (None).

    `api` is "module" or "ops". `states` has one state under "" for a module, one for each mode of
    an operation (None: the mode keeps nothing), and none at all where nothing was stored.
    `releases` are those of Transformer Engine that write this.
    """

    form: str
    api: str
    releases: str
    states: Mapping[str, ScalingState | None]


_ONE, _ZERO = b"\x00\x00\x80?", b"\x00\x00\x00\x00"


def normal(record: StateRecord) -> dict[str, ScalingState]:
    """The states by mode ("" for a module), with recipes and all slots, without other buffers.

    A state of 2.x is left as it is. OpError M950 for a record of 1.x that does not say what a
    recipe needs, and for modes whose histories differ.
    """
    return {mode: _normal(state, record.api) for mode, state in scaling_states(record).items()}


def scaling_states(record: StateRecord) -> dict[str, ScalingState]:
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
    """The recipe of a state without one, from the length of the history and the largest numbers."""
    history = state.history
    pair = state.format
    if history is None or pair is None:
        missing = "a history" if history is None else f"a known format ({_shown(state)})"
        raise OpError(
            "M950",
            f"without a recipe and without {missing} its recipe cannot be determined",
            help=f"`delayed_scaling: tensors` keeps the scales without a recipe; {how_to_leave()}",
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
    """One more slot behind each `each` of the last axis; in each row, where steps have rows."""
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
                "M950",
                f"its modes input and param do not fit together: {name}",
                help=how_to_leave(),
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
