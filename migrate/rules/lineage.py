"""Lineages: layouts, the edges between them, ways along them, and which layout a checkpoint is in.

A lineage is a value: tests write one down without a file. Reading `layouts.yaml` is the business of
`loading`, finding the folder that of `packs`.

Detection asks whether *some* key fits a pattern and has the dtype or the number of axes: a layout
shows itself in the tensors that changed, and says nothing about the others.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import combinations, compress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..core.errors import Diagnostic, did_you_mean, fail, listed, option, printable
from ..core.keys import Pattern, parse
from ..core.spec import Spec
from ..core.templates import Ranked, matches, matching, ranked, seen_by
from ..extra_state.states import States, ranges
from ..source.index import Index

if TYPE_CHECKING:
    from .param_model import Param

LATEST = "latest"
_STEPS = re.compile(r"[+-][1-9][0-9]{0,3}")
_UNKNOWN = object()
# of the layouts that ship: each checkpoint is held against all of them
_parsed = lru_cache(maxsize=4096)(parse)
# shapes under one pattern, and ways to give the names of `shape` a size
_MOST_SHAPES = 200


@dataclass(frozen=True, slots=True)
class Detect:
    """The signs of a layout. `dtype`, `ndim` and `shape` map a pattern to what one of its keys has.

    An axis of `shape` is a size, None for any, `$key.path` for what config.json says there, or a
    name: the same size wherever it stands. A value of `config` is a mapping where it lists under
    `not` what config.json must not say. Where all signs of `unless` hold, the layout does not.
    `configured`: without config.json it does not hold.
    """

    present: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    dtype: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    ndim: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    config: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    module_version: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    extra_state: str = ""
    shape: Mapping[str, tuple[int | str | None, ...]] = field(default_factory=dict)
    unless: Detect | None = None
    configured: bool = False


@dataclass(frozen=True, slots=True)
class LayoutGrid:
    """How checkpoints in a layout are cut for a grid of processes: `table` is that of a framework
    in `formats`, which knows what parts and keys are called.

    `axes` has for each axis of the table the param that says how many parts there are along it,
    `stages` for what uneven stages have the param that says it.
    """

    table: str
    axes: Mapping[str, str]
    stages: Mapping[str, str] = field(default_factory=dict)

    @property
    def params(self) -> list[str]:
        """The params that speak of the grid."""
        return [*self.axes.values(), *self.stages.values()]


@dataclass(frozen=True, slots=True)
class Layout:
    """One arrangement of names and tensors. `status` is current, supported or deprecated, `message`
    what to use instead.

    `note` says what detection cannot see. `files` are the side files that belong to it, as they are
    made of `params` where a checkpoint comes without them. `format` is what a folder in it is
    written as unless something else is asked for, "" if that follows the source; `grid` is how it
    is cut where that format has parts.
    """

    name: str
    title: str = ""
    detect: Detect | None = None
    status: str = "supported"
    message: str = ""
    note: str = ""
    files: Mapping[str, Any] = field(default_factory=dict)
    params: Mapping[str, Param] = field(default_factory=dict, compare=False)
    format: str = ""
    grid: LayoutGrid | None = None


@dataclass(frozen=True, slots=True)
class Edge:
    """The rule files that lead from layout `source` to layout `target`.

    `superseded` are those that others of the edge replace: read for stamps that name them.
    """

    source: str
    target: str
    files: tuple[Path, ...] = ()
    superseded: tuple[Path, ...] = ()

    def __str__(self) -> str:
        return f"{self.source} -> {self.target}"


class DirectedEdge(NamedTuple):
    """One edge of a way; `backwards` when the inverses of its rules are what runs."""

    edge: Edge
    backwards: bool

    @property
    def start(self) -> str:
        return self.edge.target if self.backwards else self.edge.source

    @property
    def end(self) -> str:
        return self.edge.source if self.backwards else self.edge.target


class LayoutName(NamedTuple):
    lineage: str
    layout: str


@dataclass(frozen=True, slots=True)
class Lineage:
    """One independent axis of change; `layouts` from oldest to latest if it is `ordered`.

    `ids` are those of all its rule files, `aliases` other names that people may say. `sealed` is
    the hash of what the layouts mean where that was worked out when the lineage was packaged.
    """

    name: str
    title: str = ""
    ordered: bool = True
    layouts: tuple[Layout, ...] = ()
    edges: tuple[Edge, ...] = ()
    ids: tuple[str, ...] = ()
    sealed: str = field(default="", compare=False)
    aliases: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        return [layout.name for layout in self.layouts]

    @property
    def model_types(self) -> list[str]:
        """What layouts ask config.json to say, the first layout's first."""
        signs = (layout.detect for layout in self.layouts if layout.detect)
        kinds = (kind for detect in signs for kind in detect.config.get("model_type", ()))
        return list(dict.fromkeys(kind for kind in kinds if isinstance(kind, str)))

    def layout(self, name: str) -> Layout:
        """The layout called `name`; M501 with the nearest name if there is none."""
        layout = next((layout for layout in self.layouts if layout.name == name), None)
        if layout is None:
            hint = did_you_mean(name, self.names) or f"its layouts are {listed(self.names)}"
            fail(
                "M501",
                f"lineage `{printable(self.name)}` has no layout `{printable(name)}`",
                help=hint,
            )
        return layout

    def loop(self, name: str) -> Edge | None:
        """The edge from this layout to itself, if there is one."""
        return next((e for e in self.edges if e.source == e.target == name), None)

    @property
    def latest(self) -> str:
        """The last layout of an ordered lineage; M501 for one without order."""
        if not self.ordered:
            what = (
                f"lineage `{printable(self.name)}` has no order, so no layout of it is the latest"
            )
            fail(
                "M501", what, help=f"say which: {listed([f'{self.name}@{n}' for n in self.names])}"
            )
        return self.names[-1]


def path(
    lineage: Lineage,
    start: str,
    goal: str,
    *,
    down: bool | None = None,
    loop: bool | None = None,
) -> list[DirectedEdge]:
    """The shortest way from `start` to `goal`; when they are the same [], or with a `loop` the edge
    that leads from the layout to itself, backwards if that is True.

    In an ordered lineage each edge goes the way of the whole: up, or down over inverses and over
    files whose own edge runs down. `down` states which of the two is meant, M502 where the goal
    lies the other way; None takes either. Where an edge is written in both directions, each is used
    as written. M501 for an unknown layout, M502 where there is no way.
    """
    at, end = (
        lineage.names.index(lineage.layout(start).name),
        lineage.names.index(lineage.layout(goal).name),
    )
    if at == end and loop is None:
        return []
    if at == end:
        itself = lineage.loop(start)
        if itself is None:
            fail(
                "M502",
                f"no edge of lineage `{printable(lineage.name)}` leads from `{printable(start)}` "
                "to itself",
                help="update the rule pack",
            )
        return [DirectedEdge(itself, bool(loop))]
    if lineage.ordered and down is not None and down != (end < at):
        verb, way = ("`migrate apply`", "later") if down else ("`migrate downgrade`", "earlier")
        fail(
            "M502",
            f"layout `{printable(goal)}` of {lineage.name} is {way} than `{printable(start)}`",
            help=f"{verb} goes that way",
        )
    edges_from = _directed_edges(lineage)
    came: dict[str, DirectedEdge] = {}
    queue = deque([start])
    while queue and goal not in came:
        here = queue.popleft()
        for edge in edges_from.get(here, ()):
            towards = lineage.names.index(edge.end)
            onwards = not lineage.ordered or (at < end) == (lineage.names.index(here) < towards)
            if onwards and edge.end not in came and edge.end != start:
                came[edge.end] = edge
                queue.append(edge.end)
    if goal not in came:
        edges = listed([str(edge) for edge in lineage.edges]) or "none"
        what = (
            f"no path leads from `{printable(start)}` to `{printable(goal)}` in lineage "
            f"`{printable(lineage.name)}`"
        )
        fail(
            "M502",
            what,
            notes=(f"its edges: {edges}",),
            help="write a rule file for the edge that is missing, or choose another goal",
        )
    back: list[DirectedEdge] = []
    while not back or back[-1].start != start:
        back.append(came[back[-1].start if back else goal])
    return back[::-1]


def _directed_edges(lineage: Lineage) -> dict[str, list[DirectedEdge]]:
    written = {(edge.source, edge.target) for edge in lineage.edges}
    out: dict[str, list[DirectedEdge]] = {}
    for edge in lineage.edges:
        out.setdefault(edge.source, []).append(DirectedEdge(edge, backwards=False))
    for edge in lineage.edges:
        if (edge.target, edge.source) not in written:
            out.setdefault(edge.target, []).append(DirectedEdge(edge, backwards=True))
    return out


def warnings(lineage: Lineage, names: Sequence[str]) -> list[Diagnostic]:
    """M511 for each of the layouts that its lineage calls deprecated."""
    out = []
    for name in names:
        layout = lineage.layout(name)
        if layout.status == "deprecated":
            out.append(
                Diagnostic(
                    "M511",
                    f"layout {lineage.name}@{name} is deprecated",
                    help=layout.message or None,
                )
            )
    return out


def resolve_goal(
    text: str, lineages: Mapping[str, Lineage], current: Mapping[str, str]
) -> LayoutName:
    """The layout that `--to` or `--from` means: `lineage@layout`, a layout, a lineage (its latest),
    `latest`, `+1`, `-1`.

    `current` maps lineages to the layouts that the checkpoint is in: steps count from there, and a
    layout name that several lineages share means the one among them. M507 for an unknown lineage;
    M501 for an unknown or shared layout; M502 for a step past an end.
    """
    name, at, wanted = text.rpartition("@")
    if at:
        lineage = _known(name, lineages)
        return LayoutName(lineage.name, _within(lineage, wanted, current))
    if text == LATEST or _STEPS.fullmatch(text):
        ordered = [n for n in current if n in lineages and lineages[n].ordered] or (
            [n for n, known in lineages.items() if known.ordered] if text == LATEST else []
        )
        if len(ordered) == 1:
            return LayoutName(ordered[0], _within(lineages[ordered[0]], text, current))
        if not ordered:
            fail(
                "M501",
                f"`{text}` needs a lineage with an order, and the checkpoint is in none that is "
                "known",
                help="say lineage@layout",
            )
        fail(
            "M501",
            f"`{text}` exists in several lineages",
            help=f"say which: {listed([f'{n}@{text}' for n in ordered])}",
        )
    if (called := called_so(text, lineages)) is not None:
        return LayoutName(called.name, called.latest)
    having = [n for n, known in lineages.items() if text in known.names]
    if len(having) > 1:  # the checkpoint can be in one of them only
        having = [n for n in having if n in current] or having
    if len(having) > 1:
        fail(
            "M501",
            f"several lineages have a layout `{printable(text)}`",
            help=f"say which: {listed([f'{n}@{text}' for n in having])}",
        )
    if not having:
        known_names = [
            *lineages,
            *dict.fromkeys(n for known in lineages.values() for n in known.names),
        ]
        hint = did_you_mean(text, known_names) or f"the lineages are {listed(list(lineages))}"
        fail("M501", f"no lineage has a layout `{printable(text)}`", help=hint)
    return LayoutName(having[0], text)


def _known(name: str, lineages: Mapping[str, Lineage]) -> Lineage:
    if name in lineages:
        return lineages[name]
    names = list(lineages)
    found = called_so(name, lineages)
    if found is None:
        hint = did_you_mean(name, names) or (
            f"the lineages are {listed(names)}" if names else "no folder of rules was found"
        )
        fail("M507", f"there is no lineage `{printable(name)}`", help=hint)
    return found


def called_so(name: str, lineages: Mapping[str, Lineage]) -> Lineage | None:
    """The lineage of this name, or else the one that has it as an alias."""
    return lineages.get(name) or next((x for x in lineages.values() if name in x.aliases), None)


def _within(lineage: Lineage, wanted: str, current: Mapping[str, str]) -> str:
    if wanted == LATEST and LATEST not in lineage.names:
        return lineage.latest
    if wanted in lineage.names or not _STEPS.fullmatch(wanted):
        return lineage.layout(wanted).name
    if not lineage.ordered:
        fail(
            "M501",
            f"lineage `{lineage.name}` has no order to count `{wanted}` in",
            help=f"its layouts are {listed(lineage.names)}",
        )
    if lineage.name not in current:
        fail(
            "M501",
            f"`{wanted}` counts from the layout that the checkpoint is in, which is not known",
            help=f"say {option('from_', f'{lineage.name}@LAYOUT')}",
        )
    here = lineage.names.index(lineage.layout(current[lineage.name]).name)
    there = here + int(wanted)
    if not 0 <= there < len(lineage.names):
        end = "first" if there < 0 else "last"
        what = (
            f"`{wanted}` from `{current[lineage.name]}` is past the {end} layout of lineage "
            f"`{lineage.name}`"
        )
        fail("M502", what, help=f"its layouts are {listed(lineage.names)}")
    return lineage.names[there]


class LayoutFinding(NamedTuple):
    """Whether the signs of a layout hold, and what was found, for people; a line that did not hold
    starts with `not: `.
    """

    layout: str
    holds: bool
    evidence: list[str]


def detect(
    lineage: Lineage,
    index: Index,
    read_side: Callable[[str], bytes | None],
    match: Matcher | None = None,
    states: States | None = None,
) -> list[LayoutFinding]:
    """A finding for each layout of the lineage, in its order. A layout without signs never holds.

    `read_side` answers with the bytes of a side file or None; `config` signs count only where there
    is a config.json. `states` are the extra states; without them, or without module versions in the
    index, the signs of that kind do not count. `match` serves those who ask about several lineages:
    the index's keys are then grouped once.
    """
    versions = (
        index.versions
        if any(layout.detect and layout.detect.module_version for layout in lineage.layouts)
        else None
    )
    asks = any(
        layout.detect
        and (
            layout.detect.config
            or layout.detect.shape
            or layout.detect.unless
            or layout.detect.configured
        )
        for layout in lineage.layouts
    )
    config = config_of(read_side) if asks else None
    match = match or Matcher(index, states)
    out = []
    for layout in lineage.layouts:
        signs = (
            list(_signs(layout.detect, match, config, versions, states)) if layout.detect else []
        )
        counted = [holds for holds, _ in signs if holds is not None]
        lines = [text if holds is not False else f"not: {text}" for holds, text in signs] or [
            "this layout has no signs"
        ]
        out.append(LayoutFinding(layout.name, bool(counted) and all(counted), lines))
    return out


class NearLayout(NamedTuple):
    """A layout that a checkpoint only partly shows: what was found, and what speaks against it."""

    lineage: str
    layout: str
    evidence: list[str]
    against: list[str]


def nearest(
    lineages: Iterable[Lineage],
    index: Index,
    read_side: Callable[[str], bytes | None],
    states: States | None = None,
    match: Matcher | None = None,
    most: int = 3,
) -> list[NearLayout]:
    """The nearest layouts, one of a lineage, nearest first: by how much of what they ask is there.
    A lineage that the checkpoint is in has none.

    A sign that something is absent brings no layout nearer. One less than half there is left out.
    `match` is as for `detect`.
    """
    match, config = match or Matcher(index, states), config_of(read_side)
    ranked: list[tuple[float, int, NearLayout]] = []
    for lineage in lineages:
        best: tuple[float, int, NearLayout] | None = None
        for layout in lineage.layouts:
            if layout.detect is None:
                continue
            signs = list(
                _signs(
                    layout.detect,
                    match,
                    config,
                    index.versions if layout.detect.module_version else None,
                    states,
                )
            )
            lacking = len(layout.detect.present) + len(layout.detect.absent)
            asked = [*signs[: len(layout.detect.present)], *signs[lacking:]]
            found = [text for holds, text in asked if holds]
            against = [text for holds, text in signs if holds is False]
            if found and not against:
                # it is in this one, so that no other of the lineage is near
                best = None
                break
            part = len(found) / max(1, sum(holds is not None for holds, _ in asked))
            # less than half of it may be any model's `weight`
            if 2 * part >= 1 and against and (best is None or (part, len(found)) > best[:2]):
                best = (part, len(found), NearLayout(lineage.name, layout.name, found, against))
        ranked += [best] if best else []
    return [near for *_, near in sorted(ranked, key=lambda one: one[:2], reverse=True)[:most]]


def mixes(lineage: Lineage, index: Index) -> bool:
    """Whether all keys that a layout asks for stand beside all that another asks for instead."""
    match = Matcher(index)
    asked = [set(layout.detect.present) for layout in lineage.layouts if layout.detect]
    there = [one for one in asked if all(match.first(pattern) is not None for pattern in one)]
    return any(one - other and other - one for one, other in combinations(there, 2))


def _signs(
    signs: Detect,
    match: Matcher,
    config: Any,
    module_versions: Mapping[str, int] | None,
    states: States | None,
) -> Iterator[tuple[bool | None, str]]:
    """(holds, or None where it does not count; what was found) for each sign."""
    for pattern in signs.present:
        key = match.first(pattern)
        yield (
            key is not None,
            f"{printable(key)} fits {pattern}" if key is not None else f"no key fits {pattern}",
        )
    for pattern in signs.absent:
        key = match.first(pattern)
        yield (
            key is None,
            f"no key fits {pattern}" if key is None else f"{printable(key)} fits {pattern}",
        )
    for pattern, dtypes in signs.dtype.items():
        key = match.first(pattern, partial(_has_dtype, dtypes))
        none = f"no key of those that fit {pattern} is {listed(list(dtypes))}"
        yield key is not None, none if key is None else f"{printable(key)} is {match.dtype(key)}"
    for pattern, numbers in signs.ndim.items():
        key = match.first(pattern, partial(_has_ndim, numbers))
        none = f"no key of those that fit {pattern} has {' or '.join(map(str, numbers))} axes"
        yield (
            key is not None,
            none if key is None else f"{printable(key)} has {match.ndim(key)} axes",
        )
    if signs.shape:
        yield from _shape_signs(signs.shape, match, config)
    if signs.configured and config is None:
        yield False, "there is no config.json"
    for dotted, values in signs.config.items():
        yield _config_sign(dotted, values, config)
    for pattern, versions in signs.module_version.items():
        yield _version_sign(pattern, versions, module_versions)
    if signs.extra_state:
        yield _age_sign(signs.extra_state, states)
    if signs.unless is not None:
        found = list(_signs(signs.unless, match, config, module_versions, states))
        counted = [holds for holds, _ in found if holds is not None]
        held = bool(counted) and all(counted)
        said = "; ".join(text for holds, text in found if holds is held)
        yield not held, f"{said}: signs of something else" if held else said


def _shape_signs(
    shapes: Mapping[str, tuple[int | str | None, ...]], match: Matcher, config: Any
) -> Iterator[tuple[bool | None, str]]:
    """One sign for each pattern: some key of it has this shape, whose names stand for the sizes
    that they have in the patterns before.
    """
    named: set[tuple[tuple[str, int], ...]] = {()}
    for pattern, axes in shapes.items():
        written = f"[{', '.join('null' if axis is None else str(axis) for axis in axes)}]"
        sizes = [
            _configured(axis[1:], config) if isinstance(axis, str) and axis[0] == "$" else axis
            for axis in axes
        ]
        if unsaid := [
            str(axis) for axis, size in zip(axes, sizes, strict=True) if size is _UNKNOWN
        ]:
            yield None, f"no config.json that says {listed([place[1:] for place in unsaid])}"
            continue
        fits: dict[tuple[tuple[str, int], ...], str] = {}
        there = match.shapes(pattern)
        for key, shape in there:
            for known in named if len(shape) == len(sizes) else ():
                names = dict(known)
                agree = all(
                    wanted is None
                    or (names.setdefault(wanted, size) if isinstance(wanted, str) else wanted)
                    == size
                    for wanted, size in zip(sizes, shape, strict=True)
                )
                if agree:
                    fits.setdefault(tuple(sorted(names.items())), key)
        if max(len(fits), len(there)) > _MOST_SHAPES:
            yield None, f"the keys that fit {pattern} have too many different shapes to be compared"
            continue
        if not fits:
            sized = (
                f" with {listed([f'{n} = {s}' for n, s in next(iter(named))])}"
                if len(named) == 1 and named != {()}
                else ""
            )
            yield False, f"no key of those that fit {pattern} has the shape {written}{sized}"
            return
        named = set(fits)
        key = next(iter(fits.values()))
        yield (
            True,
            (
                f"{printable(key)} has the shape {list(match.shape(key))}, which {written} means "
                f"of {pattern}"
            ),
        )


def _configured(dotted: str, config: Any) -> Any:
    """The size that config.json says at the path, _UNKNOWN if it says none."""
    value = config
    for name in dotted.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value if isinstance(value, int) and not isinstance(value, bool) else _UNKNOWN


def _config_sign(dotted: str, values: tuple[Any, ...], config: Any) -> tuple[bool | None, str]:
    if config is None:
        return None, f"no config.json that says {dotted}"
    value = config
    for name in dotted.split("."):
        value = value.get(name, _UNKNOWN) if isinstance(value, dict) else _UNKNOWN
    others = [v["not"] for v in values if isinstance(v, dict) and "not" in v]
    if value is _UNKNOWN:
        return (None if others else False), f"config.json says nothing about {dotted}"
    if others:
        said = f"config.json says {dotted} = {printable(json.dumps(value), 60)}"
        listed_ = [w for v in others for w in (v if isinstance(v, list) else [v])]
        # that it says something else is no evidence
        return (
            False if any(type(value) is type(v) and value == v for v in listed_) else None
        ), said
    wanted = " or ".join(json.dumps(v) for v in values)
    said = f"config.json says {dotted} = {printable(json.dumps(value), 60)}"
    # 1 == True in Python, not in JSON
    holds = any(type(value) is type(v) and value == v for v in values)
    return holds, said if holds else f"{said}, not {wanted}"


def _version_sign(
    pattern: str, versions: tuple[int, ...], found: Mapping[str, int] | None
) -> tuple[bool | None, str]:
    wanted = " or ".join(map(str, versions))
    if found is None:
        return None, f"no module versions that say {pattern} = {wanted}"
    parsed = parse(pattern)
    for module, version in found.items():
        if version in versions and matches(parsed, module):
            return True, f"module {printable(module)} has version {version}"
    return False, f"no module that fits {pattern} has version {wanted}"


def _age_sign(wanted: str, states: States | None) -> tuple[bool | None, str]:
    if states is None:
        return None, f"no extra states that are of {wanted}"
    age = states.age()
    holds = age.releases is not None and any(
        r.first <= age.releases.last <= r.last for r in ranges(wanted)
    )
    return (
        holds,
        age.evidence if holds or age.releases is None else f"{age.evidence}, not of {wanted}",
    )


class Matcher:
    """Keys by pattern; each pattern is parsed once and read once per template of keys that can have
    it.
    """

    __slots__ = ("_beside", "_first", "_fits", "_having", "_patterns", "_templates", "_tensors")

    def __init__(self, index: Index, states: States | None = None) -> None:
        self._tensors = index.tensors
        # only what lies beside tensors can be a state that is an object
        self._beside: Mapping[str, Spec] = {}
        if states is not None and (index.tree is not None or index.items):
            self._beside = states.beside
        self._templates = ranked([*index.tensors, *self._beside])
        self._patterns: dict[str, Pattern] = {}
        self._first: dict[str, str | None] = {}
        # the keys that fit a pattern as far as they were asked for, and those to come: several
        # layouts ask other things of the same keys
        self._fits: dict[str, tuple[list[str], Iterator[str]]] = {}
        # keys without a form are many templates, most of which lack a segment that a pattern asks
        # for
        self._having: dict[str, list[Ranked]] = {}
        for both in self._templates:
            template, (base, _) = both
            for segment in {*template.text.split("."), *base.text.split(".")}:
                self._having.setdefault(segment, []).append(both)

    def first(self, pattern: str, test: Callable[[Spec], bool] | None = None) -> str | None:
        """The first key that fits the pattern and whose spec passes the test."""
        if test is None and pattern in self._first:
            return self._first[pattern]
        if pattern not in self._patterns:
            self._patterns[pattern] = _parsed(pattern)
        found = next(
            (key for key in self._fitting(pattern) if test is None or test(self._spec(key))), None
        )
        if test is None:
            self._first[pattern] = found
        return found

    def _fitting(self, pattern: str) -> Iterator[str]:
        """`fitting` of a parsed pattern; what was found once is not looked for again."""
        if pattern not in self._fits:
            self._fits[pattern] = [], self.fitting(self._patterns[pattern])
        found, rest = self._fits[pattern]
        yield from found
        for key in rest:
            found.append(key)
            yield key

    def fitting(self, pattern: Pattern) -> Iterator[str]:
        """The keys that fit the pattern, those of one template after the other."""
        templates = min(
            (self._having.get(segment, []) for segment in pattern.anchors),
            key=len,
            default=self._templates,
        )
        for template, cut in templates:
            yield from compress(template.keys, matching(pattern, seen_by(pattern, template, cut)))

    def has(self, segment: str) -> bool:
        """Whether some key has this segment."""
        return segment in self._having

    @property
    def keys(self) -> Iterator[str]:
        """All keys, those of one template after the other."""
        return (key for template, _ in self._templates for key in template.keys)

    def _spec(self, key: str) -> Spec:
        return self._tensors[key].spec if key in self._tensors else self._beside[key]

    def shapes(self, pattern: str) -> list[tuple[str, tuple[int, ...]]]:
        """(key, shape) of keys that fit the pattern, the first of each shape, up to a number."""
        if pattern not in self._patterns:
            self._patterns[pattern] = _parsed(pattern)
        found: dict[tuple[int, ...], str] = {}
        for key in self.fitting(self._patterns[pattern]):
            if len(found) <= _MOST_SHAPES:
                found.setdefault(tuple(self._spec(key).shape), key)
        return [(key, shape) for shape, key in found.items()]

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self._spec(key).shape)

    def dtype(self, key: str) -> str:
        return self._spec(key).dtype

    def ndim(self, key: str) -> int:
        return len(self._spec(key).shape)


def _has_dtype(wanted: tuple[str, ...], spec: Spec) -> bool:
    return spec.dtype in wanted


def _has_ndim(wanted: tuple[int, ...], spec: Spec) -> bool:
    return len(spec.shape) in wanted


def config_of(read_side: Callable[[str], bytes | None]) -> Any:
    """What config.json holds, if it is an object; else None."""
    raw = read_side("config.json")
    if raw is None:
        return None
    try:
        config = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return config if isinstance(config, dict) else None
