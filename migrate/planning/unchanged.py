"""Keys that an edge left as they were although its rules, inverted, would take them: a stamp
remembers them, and they stay.

A rule whose `when` passes over some tensors makes the others look like them, and `keep` may let
stay what a rule makes elsewhere. In what came out these keys look like those that the rules made;
so the entry of the edge names them. Mostly there are none. Where there are many they differ in
layers and experts only, and are written as forms.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, pairwise, product
from math import prod
from typing import Any

from ..core.templates import SLOT, group, products

# where an integer stands in a form
_PLACE = "{}"
# forms of more integers are not looked for
_MOST_PLACES = 8


def fold_keys(keys: Iterable[str]) -> list[Any]:
    """The keys as JSON: a key, or `[form, runs, ...]` for all keys that the form gives with
    integers of these runs in its places.

    Linear in the keys, and never longer than their list. `l.{}.w{}` has runs `[[0, 3], [7, 7]]` for
    each `{}`.
    """
    out: list[Any] = []
    for template in group(keys):
        places = 0 if template.literal or _PLACE in template.text else template.text.count(SLOT)
        found = products(set(template.ints), places) if 0 < places <= _MOST_PLACES else []
        if not found or 2 * len(found) > len(template.keys):
            out += template.keys
            continue
        out += [[template.text.replace(SLOT, _PLACE), *map(_runs, axes)] for axes in found]
    return out


def unfold_keys(kept: Iterable[Any], most: int) -> set[str]:
    """The keys that `fold` was given; of a stamp that speaks of more than `most` the first ones."""
    out: set[str] = set()
    for entry in kept:
        form, axes = (entry, []) if isinstance(entry, str) else (entry[0], entry[1:])
        most -= prod(sum(high - low + 1 for low, high in runs) for runs in axes)
        if most < 0:
            break
        first, *rest = form.split(_PLACE) if axes else [form]
        for row in product(
            *(chain.from_iterable(range(low, high + 1) for low, high in runs) for runs in axes)
        ):
            out.add(
                first + "".join(f"{number}{text}" for number, text in zip(row, rest, strict=True))
            )
    return out


def are_folded_keys(value: Any) -> bool:
    """Whether it is what `fold` writes."""
    return isinstance(value, list) and all(
        isinstance(entry, str) or _is_form(entry) for entry in value
    )


def _is_form(entry: Any) -> bool:
    return (
        isinstance(entry, list)
        and len(entry) > 1
        and isinstance(entry[0], str)
        and entry[0].count(_PLACE) == len(entry) - 1
        and all(map(_are_runs, entry[1:]))
    )


def _are_runs(runs: Any) -> bool:
    """Whether they are runs of integers, at least one, in order and apart: the limit counts what
    they hold before they are walked.
    """
    if not (isinstance(runs, list) and runs and all(map(_is_run, runs))):
        return False
    return all(low > last for (_, last), (low, _) in pairwise(runs))


def _is_run(run: Any) -> bool:
    return (
        isinstance(run, list)
        and len(run) == 2
        and all(type(n) is int for n in run)
        and 0 <= run[0] <= run[1]
    )


def _runs(numbers: Sequence[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return runs
