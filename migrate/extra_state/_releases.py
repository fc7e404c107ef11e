"""Which releases of Transformer Engine write what a record holds: told by what is there, never by
what anybody says.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from .recipes import FIELDS, RECIPES, STATELESS
from .record import BUFFERS, INVERSES, OLD_MODES, Recipe, State

_NONE = {
    "archive": "0.12 to 1.13",
    "none": "0.6 to 0.11 and 2.0 to 2.3",
    "nothing": "0.1 to 0.5",
    "pickle": "2.0 to 2.17",
}
# from this release on stateless recipes are not stored
_SILENT = (2, 18)


def releases(form: str, api: str, states: Mapping[str, State | None]) -> str:
    """The range of releases, in words. A range that nothing narrows ends "and later"."""
    held = [s for s in states.values() if s is not None]
    if form == "list":
        return "0.1 to 0.2"
    if form == "dict":
        return "0.3 to 0.5"
    if not held:
        return "1.13" if OLD_MODES[0] in states else _NONE.get(form, "")
    recipes = [s.recipe for s in held if s.recipe is not None]
    if api == "ops" and not recipes:
        return "1.13" if not states.keys().isdisjoint(OLD_MODES) else "2.0 to 2.2"
    if form == "archive":
        return "0.12 to 1.5" if any(s.buffers for s in held) else "1.6 to 1.13"
    if recipes:
        return _by_recipes(recipes, (2, 3) if api == "ops" else (2, 0))
    if any(name in s.tensors for s in held for name in INVERSES):
        return "0.8 to 0.11"
    return "0.6 to 0.7" if any(name in s.buffers for s in held for name in BUFFERS) else "unknown"


def _by_recipes(recipes: Iterable[Recipe], first: tuple[int, int]) -> str:
    last: tuple[int, int] | None = None
    for recipe in recipes:
        first = max(first, RECIPES[recipe.module, recipe.name].since)
        if recipe.sort == STATELESS:
            last = _SILENT
        for field, (since, until) in FIELDS.items():
            if field in recipe.fields:
                first, last = max(first, since), min(filter(None, (last, until)), default=None)
            elif until is not None and recipe.name == "DelayedScaling" and field == "interval":
                first = max(first, until)
    begin = f"{first[0]}.{first[1]}"
    if last is None:
        return f"{begin} and later"
    end = f"{last[0]}.{last[1] - 1}"
    return begin if first >= (last[0], last[1] - 1) else f"{begin} to {end}"
