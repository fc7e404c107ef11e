"""The recipes of Transformer Engine and what may stand in their pickles: data, so that a new one is
a new line.

A recipe is told by its class alone, and by the whole dotted name. To add one, put a line into
`RECIPES`: module, class, the first release that has it, and its sort. Stateless recipes compute
their scales anew in every step; delayed scaling keeps them between steps; of a custom recipe only
its payload says which it is. A class that stands in the fields of a recipe goes into `PARAMETERS`.
A field that may hold the name of a user's function goes into `FUNCTIONS`, with the sort of the
recipes that have it; the name is carried as text and looked up nowhere.
"""

from __future__ import annotations

from typing import NamedTuple

from ..core.errors import option

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
# fields of a recipe that tell the release which wrote it: the first that has the field, the first
# that has it no more
FIELDS: dict[str, tuple[tuple[int, int], tuple[int, int] | None]] = {
    "interval": ((0, 1), (2, 2)),
    "nvfp4_4over6": ((2, 17), None),
    "row_scaled_activation": ((2, 16), None),
    "_cached_repr": ((2, 16), None),
    "backward_override": ((2, 15), None),
}
# how a message says what to do about a class that is none of these
HOW_TO_ADD = (
    "if it is a recipe, add a line to RECIPES in migrate/extra_state/recipes.py that "
    "says whether it keeps state"
)


def leave() -> str:
    """How a message says that state of delayed scaling is left behind, where no param of the rule
    file says so.
    """
    return f"`delayed_scaling: drop` in the rule and {option('allow', 'drop')} leave it behind"
