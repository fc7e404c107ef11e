"""Keys that an edge left as they were although its rules, inverted, would take them: a stamp
remembers them, and they stay. So some edges of a stamp may not be undone before a later one.

A rule whose `when` passes over some tensors makes the others look like them, and `keep` may let
stay what a rule makes elsewhere. In what came out these keys look like those that the rules made;
so the entry of the edge names them. Mostly there are none. Where there are many they differ in
layers and experts only, and are written as forms.

They are remembered under the names that they had behind the edge. An edge of another lineage that
was walked afterwards may have renamed them, or others to their names. Then it cannot be decided
what stays, so such an edge is undone first: refused is the order, never the way back.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, pairwise, product
from math import prod
from typing import Any

from ..core.errors import Report, fail, listed, option, printable
from ..core.keys import Pattern
from ..core.templates import SLOT, group, matching, products, seen_by
from ..rules.compiled import compile_file
from ..rules.files import LoadedFile
from ..rules.packs import Packs, load_edge

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


Entry = Mapping[str, Any]


def standing_entries(applied: Iterable[Entry]) -> list[Entry]:
    """The entries that were not undone since, oldest first: an entry is undone by the next one of
    its lineage, if that goes back.
    """
    out: list[Entry] = []
    for entry in applied:
        at = next(
            (n for n in reversed(range(len(out))) if out[n]["lineage"] == entry["lineage"]), None
        )
        if at is not None and _undoes(entry, out[at]):
            del out[at]
        else:
            out.append(entry)
    return out


def undone_source(applied: Sequence[Entry], again: Sequence[Entry]) -> str | None:
    """The index hash of the checkpoint that a run goes back to, which adds `again` to the entries
    of a stamp: what the oldest entry that it undoes started from. None where it undoes nothing, or
    does more than that.
    """
    was, now = standing_entries(applied), standing_entries([*applied, *again])
    if len(now) >= len(was) or now != was[: len(now)]:
        return None
    source: str = was[len(now)]["source"]
    return source


def check_undo_order(
    applied: Sequence[Entry],
    steps: Sequence[tuple[Entry, Sequence[LoadedFile]]],
    packs: Packs,
    keys: Collection[str],
) -> None:
    """M405 where one of `steps` undoes an entry whose kept keys a later entry may have renamed,
    which still stands then.

    `steps` are (lineage, from and to; its rule files) in the order in which they are walked;
    `keys`: the tensors that are there.
    """
    here = standing_entries(applied)
    walked: dict[int, Sequence[LoadedFile]] = {}
    for number, (step, files) in enumerate(steps):
        at = next((n for n in reversed(range(len(here))) if _undoes(step, here[n])), None)
        if at is None:
            here.append(step)
            walked[id(step)] = files
            continue
        kept = here[at].get("kept") or ()
        for later in here[at + 1 :] if kept else ():
            known = walked.get(id(later)) or _files(
                later, packs, [f for _, some in steps for f in some]
            )
            # before anything is walked, a name that is not there is one that moved
            if names := _moved(
                later, known, unfold_keys(kept, 2 * len(keys)), keys if number == 0 else None
            ):
                _refuse(here[at], later, names)
        del here[at]


def _undoes(entry: Entry, other: Entry) -> bool:
    if (entry["lineage"], entry["from"], entry["to"]) != (
        other["lineage"],
        other["to"],
        other["from"],
    ):
        return False
    # of an edge from a layout to itself the ends say nothing
    return entry["from"] != entry["to"] or goes_back(entry) != goes_back(other)


def goes_back(entry: Entry) -> bool:
    """Whether the entry is of an edge from a layout to itself that was walked backwards."""
    return entry.get("backwards") is True


def _files(entry: Entry, packs: Packs, given: Iterable[LoadedFile]) -> list[LoadedFile]:
    """The entry's rule files as they were when it was applied; [] where not all are known here."""
    wanted = {(rule["id"], rule["hash"]) for rule in entry["rules"]}
    known = {id(pack): pack for pack in packs.all if entry["lineage"] in pack.lineages}
    edges = packs.load_lineage(entry["lineage"]).edges if known else ()
    there = [
        f
        for edge in edges
        if {edge.source, edge.target} == {entry["from"], entry["to"]}
        for some in (edge.files, edge.superseded)
        for f in load_edge(some)
    ]
    found = {(f.model.id, f.hash): f for f in (*given, *there)}
    return [found[rule] for rule in wanted] if wanted <= found.keys() else []


def _moved(
    later: Entry, files: Sequence[LoadedFile], kept: Collection[str], keys: Collection[str] | None
) -> list[str]:
    """The kept keys that `later`'s edge may have taken; all where its rule files are unknown."""
    if not files:
        return sorted(kept)
    taking = list(_taking(later, files))
    if any(pattern.has_flat or pattern.params for pattern in taking):
        return sorted(kept)
    gone = {key for key in kept if key not in keys} if keys is not None else set()
    for template in group(kept):
        fits = [matching(pattern, seen_by(pattern, template)) for pattern in taking]
        gone.update(key for key, *found in zip(template.keys, *fits, strict=True) if any(found))
    return sorted(gone)


def _taking(entry: Entry, files: Sequence[LoadedFile]) -> Iterator[Pattern]:
    for file in files:
        forwards = (entry["from"], entry["to"]) == tuple(file.model.edge)
        forwards = forwards and not goes_back(entry)
        rules, _ = compile_file(file, Report())
        sides = ((rule.sources if forwards else rule.targets).values() for rule in rules)
        yield from chain.from_iterable(sides)


def _refuse(entry: Entry, later: Entry, names: Sequence[str]) -> None:
    def spelled(edge: Entry) -> str:
        return f"{printable(edge['lineage'])} {printable(edge['from'])} → {printable(edge['to'])}"

    back = f"{printable(later['lineage'])}@{printable(later['from'])}"
    fail(
        "M405",
        f"{spelled(entry)} left keys as they were, and {spelled(later)}, which was applied later "
        "and stands, may have renamed them",
        notes=(f"the stamp names them as they were before it: {listed(list(names), 4)}",),
        help=f"downgrade the later edge first: {option('to', back)}",
    )
