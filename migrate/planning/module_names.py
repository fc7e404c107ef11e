"""Names of modules along an edge: they follow the keys that they stand for.

A list of names in a side file, such as the modules that a number format leaves out, is renamed as
keys are. A name stands for the keys below it (`model.layers.0.mlp` for
`model.layers.0.mlp.up.weight`) or for a part of keys (`q_proj`, as adapters name their targets). It
follows them where they all go one way; where they part, only the author can say what is meant.

An expression (`re:…`, `*`) of a library that is known stays if it selects what its modules become;
else their names are written in its place.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

from ..core.errors import Report, listed, printable
from ..core.templates import rank_of
from ..rules.compiled import DirectedRule
from ..rules.files import LoadedFile
from ..rules.params import place
from ..source.module_lists import (
    COMPRESSED_TENSORS,
    CONFIG,
    EXACT,
    MODELOPT,
    MODELOPT_CONFIG,
    QUANTIZATION,
    TRANSFORMERS,
    ModuleList,
    RegexError,
    is_pattern,
    list_library,
)
from .bind import StepResult
from .patches import ABSENT, same_json
from .sides import SideFiles

_PATTERN = re.compile(r"re:|.*[*?\[\]^$\\|(){}+]")


def rename(
    file: LoadedFile,
    sides: SideFiles,
    bound: StepResult,
    undone: Mapping[str, Any],
    done: set[tuple[str, tuple[str, ...]]],
    report: Report,
) -> list[str]:
    """Renames the lists that the file's `names` say, but those in files that a stamp restored and
    those of `done`, which it adds to; answers with notes. The keys of an edge move once, however
    many of its files name a list.

    M515 for anything but a list of names, M514 for a name whose keys part; null is no list.
    """
    notes: list[str] = []
    moves = None
    for number, reference in enumerate(file.model.names):
        path, wanted = place(reference)
        span = file.span("names", number)
        for keys in () if path in undone else list(sides.places(path, wanted)):
            names = sides.value_at(path, keys)
            if (path, keys) in done or names is ABSENT or names is None:
                continue
            done.add((path, keys))
            if not isinstance(names, (list, dict)) or not all(isinstance(n, str) for n in names):
                at = printable(f"{path}#{'.'.join(keys)}")
                report.add("M515", f"{at} is not a list of names", spans=(span,))
                continue
            moves = moves or _Moves(bound)
            renaming = _Renaming(moves, names, _notation(sides, path, keys))
            made = renaming.made(names)
            hint = "name what moves together, or change the list with `files:`"
            for name, why in renaming.refused.items():
                what = f"{printable(reference)}: `{printable(name)}` cannot be renamed: {why}"
                report.add("M514", what, spans=(span,), help=hint)
            notes += [f"{printable(reference)}: {note}" for note in renaming.notes()]
            if list(made) != list(names):
                sides.put_value(path, _with(sides.value(path), keys, made))
    return notes


def is_place_of(at: Sequence[str], keys: Sequence[str]) -> bool:
    """Whether `at` is a place that `keys` of `names` mean, or below one."""
    return len(at) >= len(keys) and all(
        wanted in ("*", there) for there, wanted in zip(at, keys, strict=False)
    )


def _notation(sides: SideFiles, path: str, keys: tuple[str, ...]) -> str:
    """How the texts of a list are read: as a library does, or `gptq` for the names of `dynamic`."""
    inside = {*QUANTIZATION, "quantization"}.intersection(keys)
    if path not in (CONFIG, MODELOPT_CONFIG) or not inside:
        return EXACT
    library = MODELOPT if path == MODELOPT_CONFIG else list_library(sides.value)
    return "gptq" if library == TRANSFORMERS and keys[-1] == "dynamic" else library


class _Renaming:
    """One list of names, or the names of an object, as they follow their keys."""

    def __init__(self, moves: _Moves, names: Iterable[str], notation: str) -> None:
        self._moves, self._notation = moves, notation
        self.refused: dict[str, str] = {}
        # an expression stands for the modules that it selects
        self._meant = {name: self._selected(name) for name in names if self._is_pattern(name)}
        every = {*names, *(module for meant in self._meant.values() for module in meant)}
        self._alone = _Alone(moves, frozenset(every))
        self._stay: list[str] = []
        self._spelled: dict[str, int] = {}

    def made(self, names: Any) -> Any:
        """The list, or the object, with new names; those that are refused stay."""
        new = {name: self._of(name) for name in names}
        if not isinstance(names, dict):
            return list(dict.fromkeys(found for name in names for found in new[name]))
        out: dict[str, Any] = {}
        for name, value in names.items():
            for found in new[name]:
                if not same_json(out.setdefault(found, value), value):
                    self.refused[name] = f"another value is under `{printable(found)}` then"
        return out

    def notes(self) -> list[str]:
        """What is worth saying: names that stand for no key, expressions that became names."""
        out = [f"`{name}` is now spelled as {n} names" for name, n in self._spelled.items()]
        if self._stay:
            out.append(f"{listed(self._stay, 4)} stay as they are: no key is below them")
        return out

    def _of(self, name: str) -> list[str]:
        if self._meant.get(name):
            return self._of_pattern(name, self._meant[name])
        found = self._alone.reason(name) or self._moves.of(name)
        if isinstance(found, str):
            self.refused[name] = found
        elif found is None:
            self._stay.append(name)
        return found if isinstance(found, list) else [name]

    def _of_pattern(self, pattern: str, modules: Sequence[str]) -> list[str]:
        """The expression if it selects what its modules become, else their names."""
        wanted: dict[str, None] = {}
        for module in modules:
            found = self._alone.reason(module) or self._moves.of(module)
            if isinstance(found, str):
                self.refused[pattern] = found
                return [pattern]
            wanted.update(dict.fromkeys(found or ()))
        if set(self._matching(pattern, self._moves.modules(after=True))) == set(wanted):
            return [pattern]
        self._spelled[pattern] = len(wanted)
        if self._notation != "gptq":
            return list(wanted)
        lead = pattern[:2] if pattern[:2] in ("-:", "+:") else ""
        return [f"{lead}{re.escape(module)}$" for module in wanted]

    def _is_pattern(self, name: str) -> bool:
        return self._notation == "gptq" or is_pattern(name, self._notation)

    def _selected(self, pattern: str) -> list[str]:
        return self._matching(pattern, self._moves.modules(after=False))

    def _matching(self, pattern: str, modules: Iterable[str]) -> list[str]:
        text, library = pattern, self._notation
        if library == "gptq":
            text = pattern.removeprefix("-:").removeprefix("+:")
            text, library = f"re:{text}", COMPRESSED_TENSORS
        try:
            selects = ModuleList([text], library).selects
        except RegexError as error:
            self.refused[pattern] = str(error)
            return []
        return [module for module in modules if selects(module)]


def _with(value: Any, keys: Sequence[str], item: Any) -> Any:
    """The value with another one at `keys`."""
    if not keys:
        return item
    if isinstance(value, list):
        at = int(keys[0])
        return [*value[:at], _with(value[at], keys[1:], item), *value[at + 1 :]]
    return {**value, keys[0]: _with(value[keys[0]], keys[1:], item)}


def _plain(key: str) -> str:
    """The key without its rank: a list of names knows nothing of files."""
    return key.rpartition("@")[0] if "@" in key and rank_of(key) is not None else key


class _Moves:
    """Where the keys of an edge go: key -> keys made of it, and key -> what else is in them."""

    def __init__(self, bound: StepResult) -> None:
        self._to: dict[str, list[str]] = {_plain(key): [] for key in bound.dropped}
        self._beside: dict[str, tuple[str, ...]] = {}
        for ranked in bound.tensors:
            made = bound.provenance.get(ranked)
            key = _plain(ranked)
            sources = (key,) if made is None else tuple(dict.fromkeys(map(_plain, made.keys)))
            if made is not None and made.rule.keep_source:
                continue
            for source in sources:
                goals = self._to.setdefault(source, [])
                if key is ranked or key not in goals:
                    goals.append(key)
            if len(sources) > 1:
                self._beside[key] = sources
        self._sorted = sorted(self._to)
        self._redundant = sorted(map(_plain, bound.redundant))
        self._by_segment: dict[str, list[str]] = {}

    def modules(self, *, after: bool) -> list[str]:
        """The modules of the keys before the edge or after it, in order."""
        keys = (new for made in self._to.values() for new in made) if after else self._sorted
        return list(dict.fromkeys(key.rpartition(".")[0] for key in keys))

    def of(self, name: str) -> list[str] | str | None:
        """What the name becomes, why it cannot be said (text), or None if it is above no key."""
        votes: dict[tuple[str, ...], str] = {}
        loose: list[str] = []
        for key, lead, rest in self.meant(name):
            made = self._to[key]
            taken = [
                new[len(lead) :] if new.startswith(lead) else _last(new, name)
                for new in _without(made, rest)
            ]
            if taken:
                votes.setdefault(tuple(dict.fromkeys(taken)), key)
            elif made:
                loose.append(key)
        if len(votes) > 1:
            (one, first), (other, second) = list(votes.items())[:2]
            return (
                f"{printable(first)} makes it {listed(list(one))}, {printable(second)} "
                f"{listed(list(other))}"
            )
        goals = list(next(iter(votes), ())) or self._home(name, loose)
        for key in loose:
            if not all(any(_is_below(new, goal) for goal in goals) for new in self._to[key]):
                return f"{printable(key)} becomes {listed(self._to[key], 3)}"
        return goals or None

    def meant(self, name: str) -> list[tuple[str, str, str]]:
        """(key, what stands before the name, what follows) of the keys that the name stands for."""
        if not name or _PATTERN.match(name):
            return []
        return self._below(name) or self._within(name)

    def beside(self, key: str) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Each tensor that is made of the key and of others, and all that it is made of."""
        return ((new, self._beside[new]) for new in self._to[key] if new in self._beside)

    def _home(self, name: str, keys: Sequence[str]) -> list[str]:
        """What the keys become where all agree, else the deepest name above these keys alone."""
        made = dict.fromkeys(new for key in keys for new in self._to[key])
        if all(list(made) == self._to[key] for key in keys):
            return list(made)
        segments = zip(*(new.split(".") for new in made), strict=False)
        home = ".".join(
            column[0] for column in takewhile(lambda column: len(set(column)) == 1, segments)
        )
        others = (
            key
            for key, goals in self._to.items()
            if not _is_below(key, name) and any(_is_below(new, home) for new in goals)
        )
        return [home] if home and next(others, None) is None else []

    def goals_below(self, name: str) -> list[str] | None:
        """The names that the keys below `name` speak for, "" being the root, those that most speak
        for; None if there are no keys.
        """
        below = self._below(name)
        votes: Counter[str] = Counter()
        for key, _, rest in below:
            for new in self._to[key]:
                speaks = {name} if _is_below(new, name) else set()
                if new.endswith(rest) and rest:
                    speaks.add(new[: len(new) - len(rest)])
                elif f".{new}" == rest:
                    speaks.add("")
                elif rest.count(".") == 1:
                    # only what is right below the module has another name
                    speaks.add(new.rpartition(".")[0])
                votes.update(speaks)
        if not below:
            return None
        most = max(votes.values(), default=0)
        best = [goal for goal, count in votes.items() if count == most]
        return [name] if name in best else best

    def copies_below(self, name: str, bound: StepResult) -> tuple[str, ...] | None:
        """The names that `copy` or `tie` gives to all keys below `name` that go on, () if there are
        no such; None if there are no keys.
        """
        found: tuple[str, ...] | None = None
        below = self._below(name)
        for key, _, rest in below:
            made = self._to[key]
            if not made:
                continue
            if any(not (ops := _across(bound, new)) or not ops <= {"copy", "tie"} for new in made):
                return ()
            there = tuple(
                new[: len(new) - len(rest)] if new.endswith(rest) else new.rpartition(".")[0]
                for new in made
                if new.endswith(rest) or rest.count(".") == 1
            )
            if len({*there}) < max(2, len(made)) or (found or there) != there:
                return ()
            found = there
        return found or () if below else None

    def keys_below(self, name: str) -> list[str]:
        """The keys below `name`, with those that went because others stood in their place."""
        at = bisect_left(self._redundant, f"{name}.")
        rest = self._redundant[at : at + 1] if self._redundant else []
        return [key for key, _, _ in self._below(name)] + [k for k in rest if _is_below(k, name)]

    def made_of(self, key: str) -> list[str]:
        """The keys that the key is in."""
        return self._to.get(key, [])

    def _below(self, name: str) -> list[tuple[str, str, str]]:
        """Of keys that are the name or below it."""
        out = [(name, "", "")] if name in self._to else []
        at = bisect_left(self._sorted, f"{name}.")
        while at < len(self._sorted) and self._sorted[at].startswith(f"{name}."):
            out.append((self._sorted[at], "", self._sorted[at][len(name) :]))
            at += 1
        return out

    def _within(self, name: str) -> list[tuple[str, str, str]]:
        """Of keys that hold the name as whole segments."""
        if not self._by_segment:
            for key in self._sorted:
                for segment in dict.fromkeys(key.split(".")):
                    self._by_segment.setdefault(segment, []).append(key)
        out = []
        for key in self._by_segment.get(name.split(".")[0], ()):
            at = f"{key}.".find(f".{name}.")
            if at >= 0:
                out.append((key, key[: at + 1], key[at + 1 + len(name) :]))
        return out


class ModuleMoves:
    """Where modules go on an edge, by the keys below them.

    A module without keys goes with the nearest one around it that has some.
    """

    def __init__(self, bound: StepResult) -> None:
        self._bound, self._moves = bound, _Moves(bound)
        self._dropped = {_plain(key): rule for key, rule in bound.dropped.items()}
        self._goals: dict[str, tuple[str, ...]] = {"": ("",)}
        self._copies: dict[str, tuple[str, ...]] = {"": ()}

    def goals(self, name: str) -> tuple[str, ...]:
        """A new name, the old one where no key moves, several where they part, none where all of
        its keys went.
        """
        if name not in self._goals:
            found = self._moves.goals_below(name)
            self._goals[name] = self._around(name, self.goals) if found is None else tuple(found)
        return self._goals[name]

    def copies(self, name: str) -> tuple[str, ...]:
        """The names of its copies where `copy` or `tie` gives every tensor that goes on to all of
        them; else none.
        """
        if name not in self._copies:
            found = self._moves.copies_below(name, self._bound)
            self._copies[name] = self._around(name, self.copies) if found is None else found
        return self._copies[name]

    def is_same(self, name: str) -> bool:
        """Whether `same` alone puts its tensors, all that go on, together with those of others."""
        made = [new for key in self._with_keys(name) for new in self._moves.made_of(key)]
        return bool(made) and all(_across(self._bound, new) == {"same"} for new in made)

    def dropper(self, name: str) -> DirectedRule | None:
        """The rule that drops its tensors, of several that of the first; None unless all of them
        are dropped, and none goes because another one stands in its place.
        """
        rules = [self._dropped.get(key) for key in self._with_keys(name)]
        found = [rule for rule in rules if rule is not None and _drops(rule)]
        return found[0] if found and len(found) == len(rules) else None

    def _with_keys(self, name: str) -> list[str]:
        """The keys below the module, or else below the nearest one around it that has some."""
        while name:
            if keys := self._moves.keys_below(name):
                return keys
            name = name.rpartition(".")[0]
        return []

    def _around(self, name: str, of: Callable[[str], tuple[str, ...]]) -> tuple[str, ...]:
        around, _, last = name.rpartition(".")
        return tuple(f"{there}.{last}" if there else last for there in of(around))


def _drops(rule: DirectedRule) -> bool:
    return any(step.op.kind == "end" for step in rule.steps)


def _across(bound: StepResult, key: str) -> set[str]:
    """The ops that made the key of several tensors, or several keys of one."""
    made = bound.provenance.get(key)
    return {s.name for s in made.rule.steps if s.op.kind in ("join", "part")} if made else set()


def follow(bound: StepResult, modules: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Where modules go on an edge: see `ModuleMoves.goals`."""
    moves = ModuleMoves(bound)
    return {name: moves.goals(name) for name in modules}


def follow_all(bounds: Sequence[StepResult], modules: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Where modules are after all edges: several names where they part, none where all is gone."""
    out: dict[str, tuple[str, ...]] = {name: (name,) for name in modules}
    for bound in bounds if out else ():
        step = follow(bound, {name for names in out.values() for name in names})
        out = {
            name: tuple(dict.fromkeys(there for now in names for there in step[now]))
            for name, names in out.items()
        }
    return out


class _Alone:
    """Which names of a list go into one tensor with keys that the list does not name."""

    def __init__(self, moves: _Moves, names: frozenset[str]) -> None:
        self._moves, self._names = moves, names
        self._unnamed: dict[str, str | None] = {}

    def reason(self, name: str) -> str | None:
        """Why the name cannot speak for what it goes into; None if it can."""
        for key, _, _ in self._moves.meant(name):
            for new, sources in self._moves.beside(key):
                if new not in self._unnamed:
                    self._unnamed[new] = next(
                        (s for s in sources if self._names.isdisjoint(_runs(s))), None
                    )
                if other := self._unnamed[new]:
                    return (
                        f"{printable(new)} is made of {printable(key)} and of "
                        f"{printable(other)}, which the list does not name"
                    )
        return None


def _is_below(key: str, name: str) -> bool:
    return key == name or key.startswith(f"{name}.")


def _without(keys: Sequence[str], rest: str) -> list[str]:
    """The keys that end in `rest`, without it."""
    return [
        key[: len(key) - len(rest)] for key in keys if key.endswith(rest) and len(key) > len(rest)
    ]


def _last(key: str, name: str) -> str:
    """As many segments from the end of the key as the name has."""
    return ".".join(key.split(".")[-name.count(".") - 1 :])


def _runs(key: str) -> Iterator[str]:
    segments = key.split(".")
    for start in range(len(segments)):
        for stop in range(start + 1, len(segments) + 1):
            yield ".".join(segments[start:stop])
