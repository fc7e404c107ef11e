"""What every form of extra state is normalised to, whichever release wrote it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .recipes import CUSTOM, DELAYED, FORMATS, RECIPES

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
    """A recipe by its class, with its fields: scalars, text, `StateForm`, `Function`, `Parameters`,
    lists and tuples of these.
    """

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
        """The FP8 format that the recipe says, else the one that the largest numbers say, which
        every release stores.
        """
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


__all__ = [
    "BOOKKEEPING", "BUFFERS", "CUSTOM", "DELAYED", "EXTRAS", "INVERSES", "KEYS", "LOCAL_RECIPES",
    "MODES", "OBJECTS", "OLD_MODES", "RECIPE",
    "SCALING", "Function", "Parameters", "Recipe", "ScalingState", "StateForm", "StateRecord",
    "StateTensor",
]  # fmt: skip
