"""From a request to a path: where the checkpoint stands, which edges lead to where it shall go, and
with which rules and params.

Where it stands is what `--from` says, else what a stamp that fits says, else what detection finds.
Rule files given by hand are applied as they are, without lineage and without detection.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

from .. import ops
from ..core import log
from ..core.errors import (
    Diagnostic,
    Report,
    command,
    fail,
    listed,
    option,
    place,
    printable,
    together,
)
from ..core.keys import Pattern, parse
from ..core.templates import names_rank
from ..extra_state.states import States
from ..rules import params as parameters
from ..rules.compiled import CompiledRule, compile_file_once, holds
from ..rules.families import Family, suiting
from ..rules.files import LoadedFile
from ..rules.lineage import (
    LATEST,
    Layout,
    LayoutFinding,
    Lineage,
    Matcher,
    NearLayout,
    config_of,
    detect,
    nearest,
    path,
    resolve_goal,
    warnings,
)
from ..rules.locks import check_files
from ..rules.packs import Packs, find_packs, load_edge
from ..source.grids import WrittenGrid
from ..source.index import Index
from ..source.pickle.tree import PARAMETER
from .edge_memory import applied_files, changed_rules, entry_of, remembered, turns
from .graph import Tensor
from .patches import asked_params, leaves_of_patch
from .pathstate import PathStep
from .request import BUILT_IN, Request
from .sides import ReadSide
from .unchanged import check_undo_order, goes_back, standing_entries

if TYPE_CHECKING:
    from pathlib import Path

    from ..rules.param_model import Groups

# signs of a layout that are shown of each sort
_MOST_SIGNS = 4


@dataclass(frozen=True, slots=True)
class MigrationPath:
    """The steps to walk, and what the plan and the stamp say of them."""

    steps: tuple[PathStep, ...]
    rules: tuple[Mapping[str, str], ...]
    # what `--set` says; what the steps make of it is settled when they are reached
    given: Mapping[str, Any]
    # lineage -> the layout it ends in, also where nothing is to be done; never of rule files given
    # by hand
    layouts: Mapping[str, str]
    entries: tuple[Mapping[str, Any], ...]
    warnings: tuple[Diagnostic, ...]
    lineages: Mapping[str, Lineage]
    # where the rules come from that do not ship with migrate, by lineage
    origins: tuple[Mapping[str, Any], ...] = ()
    # the layouts that it ends in and that have a format or a grid of their own
    goals: tuple[Layout, ...] = ()
    # the grid that it leads back to
    grid: WrittenGrid | None = None

    @property
    def remarks(self) -> list[str]:
        """What is worth saying of the rules, for answers that have notes: a folder may have been
        found, a file was named.
        """
        return remarks(origin for origin in self.origins if origin["origin"] != "file")

    @property
    def makes_files(self) -> bool:
        """Whether a layout on the way says of what its side files are made."""
        return any(step.layouts is not None and step.layouts[1].files for step in self.steps)

    def decided_patterns(self) -> list[Pattern]:
        """What rules name whose ops decide about each tensor by what it holds, extra states; and
        what those drop and keep that somebody asked for.
        """
        return [
            pattern
            for compiled in self._deciding()
            for pattern in compiled.sources.values()
            if not pattern.params
        ]

    def decides_alike(self) -> bool:
        """Whether what is None on all ranks may stand under one name: what decides about it drops
        it on each rank, and keeps such names without their ranks.
        """
        return all(
            compiled.rule.inverse == "keep" and not any(map(names_rank, compiled.sources.values()))
            for compiled in self._deciding()
        )

    def _deciding(self) -> Iterator[CompiledRule]:
        return (
            compiled
            for step in self.steps
            for compiled, _ in step.rules
            if not step.backwards
            and (
                any(ops.get(call.op).kind == "decide" for call in compiled.rule.via)
                or (compiled.rule.inverse == "keep" and self._chosen(step, compiled.rule.where))
            )
        )

    def _chosen(self, step: PathStep, where: Mapping[str, Any] | None) -> bool:
        """Whether params that are known before the checkpoint is asked choose a rule."""
        known = {**step.memory.get("params", {}), **self.given}
        asked = {name: value for name, value in (where or {}).items() if name.startswith("$")}
        return all(name[1:] in known for name in asked) and holds(asked, known)

    def check_output(
        self, outputs: Mapping[str, Tensor], read_side: ReadSide, report: Report
    ) -> None:
        """M506 if the planned output would be detected as another layout of its lineage than the
        one it shall be in.

        Ordered lineages only: a checkpoint may well mix the spellings of an unordered one, module
        by module.
        """
        for name, layout in self.layouts.items():
            lineage = self.lineages.get(name)
            if lineage is None or not lineage.ordered or lineage.layout(layout).detect is None:
                continue
            planned: Any = SimpleNamespace(tensors=outputs, versions=None)
            findings = detect(lineage, planned, read_side)
            holding = [f.layout for f in findings if f.holds]
            if holding and layout not in holding:
                evidence = [f"{f.layout}: {'; '.join(f.evidence)}" for f in findings]
                report.add(
                    "M506",
                    f"the planned output would be detected as {name}@{holding[0]}, not as "
                    f"{name}@{layout}",
                    notes=tuple(evidence),
                    help="a rule does less or more than its edge says, or the layout's `detect` "
                    "is too wide",
                )


def find_packs_of(folders: Sequence[str]) -> Packs:
    if len(folders) > 1:
        fail(
            "M115",
            f"{option('rules')} names {len(folders)} folders",
            help="put the lineages into one folder, or run one after the other",
        )
    return find_packs(folders[0] if folders else None)


def load_given_files(request: Request) -> list[LoadedFile]:
    from ..rules.loading import load_files_once

    files = load_files_once(request.files)
    check_files(files, alone=True)
    return files


def lineages_asked_for(
    packs: Packs, request: Request, suits: Callable[[], Callable[[Family], bool]] | None = None
) -> dict[str, Lineage]:
    """The lineages that the request names; where it names a layout alone all known ones, of
    families that ship those that what `suits` answers takes.
    """
    texts = (*request.to, *request.from_)
    names = [text.rpartition("@")[0] or (text if packs.knows(text) else "") for text in texts]
    out = {} if all(names) else packs.lineages(suits() if suits else suiting({}))[0]
    return out | {one.name: one for one in map(packs.load_lineage, filter(None, names))}


def refuse_start_elsewhere(name: str) -> NoReturn:
    what = f"{option('from_')} names lineage {name}, and no {option('to')} leads to a layout of it"
    fail("M115", what, help=f"{option('to', f'{name}@LAYOUT')}, or leave it out")


def remarks(origins: Iterable[Mapping[str, Any]]) -> list[str]:
    """A sentence for each place that rules come from and that does not ship with migrate."""
    out = []
    for origin in origins:
        pack = [word for word in (origin["name"], origin["version"]) if word]
        where = " ".join([origin["origin"], *pack, listed(origin["places"], 8)])
        out.append(f"the rules of {origin['lineage']} do not ship with migrate: {where}")
    return out


@log.phase("finding the way")
def find_path(
    index: Index,
    read_side: ReadSide,
    stamp: Any,
    request: Request,
    applied: Sequence[Mapping[str, Any]] | None = None,
    states: States | None = None,
) -> MigrationPath:
    """The way that the request asks for. `applied`: entries of a stamp that are to be walked
    again, instead of `to`.

    `states` are the checkpoint's extra states, which detection may ask for.

    Raises M5xx when the start, the goal or the way is not known, and every problem of the rule
    files at once.
    """
    packs = find_packs_of(request.folders)
    found: list[Diagnostic] = []
    reached: dict[str, str] = {}
    steps: list[PathStep] = []
    back: WrittenGrid | None = None
    if request.from_ and not request.to:
        fail(
            "M115",
            f"{option('from_')} gives a starting point without a goal",
            help=option("to", "LINEAGE@LAYOUT"),
        )
    if index.tree and not index.tensors and (request.files or request.to) and index.passed_through:
        from ..source.table import refuse_without_table

        refuse_without_table(index)
    if request.files:
        if request.to:
            fail(
                "M115",
                f"{option('to')} names a layout and {option('rules')} a rule file; a rule file is "
                "applied as it is",
                help="give one of them",
            )
        steps = _by_hand(request, applied or ())
    elif request.to:
        steps, reached = _towards(packs, index, read_side, stamp, request, found, states)
    elif applied:
        _refuse_by_hand(packs, applied)
        steps = [
            s
            for entry in applied
            for s in _walk(
                packs,
                entry["lineage"],
                entry["from"],
                entry["to"],
                None,
                goes_back(entry),
                again=[entry],
            )
        ]
    elif request.backwards and stamp.applied:
        undo = _last_run(stamp.applied)
        _refuse_by_hand(packs, undo)
        for entry in undo:
            lineage = packs.load_lineage(entry["lineage"])
            steps += _walk(
                packs,
                entry["lineage"],
                entry["to"],
                entry["from"],
                True if lineage.ordered else None,
                not goes_back(entry),
                undone=[entry],
            )
    elif request.backwards and stamp.grid is not None:
        # parts that were joined are parts again
        back = stamp.grid
    elif request.reshapes and not request.backwards:
        if request.declared:
            reached = {request.declared["lineage"]: request.declared["layout"]}
    elif request.backwards:
        fail(
            "M115",
            "there is no stamp that records the last run, so the goal of the downgrade is unknown",
            notes=(stamp.ignored,) * bool(stamp.ignored),
            help=f"say where to go: {option('to', 'LINEAGE@LAYOUT')}",
        )
    else:
        hint = (
            f"{option('to', 'LINEAGE@LAYOUT')}, {option('rules', 'FILE')} or "
            f"{option('output_format')}; also, to write a distributed checkpoint anew, "
            f"{option('chunks', 'N')} or {option('rewrite', True)}"
        )
        hint += f"; `{command('inspect')}` and `{command('history')}` show layouts"
        fail("M115", "no goal, no rules and no output format are given", help=hint)
    for step in steps:
        way = "downgrade" if step.backwards else "apply"
        log.debug(
            "%s %s %s -> %s by %s",
            way,
            step.lineage,
            step.start,
            step.goal,
            listed([place(str(f.path)) for f in step.files]),
        )
    edges = [(entry_of(step), step.files) for step in steps]
    # what these steps leave as it was is no stamp's yet
    if stamp.applied:
        check_undo_order(stamp.applied, edges, packs, index.tensors)
    # what an integer of the file means is no param of a rule
    given = {
        name: value
        for name, value in request.params.items()
        if name not in BUILT_IN and (name != PARAMETER or steps)
    }
    if not steps and given and not (request.to or request.rules or request.from_):
        params = option("params")
        fail(
            "M115",
            f"no rules are applied, so {params} {listed(list(given))} would change nothing",
            help=f"name a goal with {option('to', 'LINEAGE@LAYOUT')}, or leave {params} out",
        )
    sizes = [
        name
        for lineage, layout in reached.items()
        if (grid := packs.load_lineage(lineage).layout(layout).grid) is not None
        for name in grid.params
    ]
    if not steps and given.keys() - sizes and request.backwards is not None:
        there = [f"{name}@{layout}" for name, layout in reached.items()]
        notes = [
            note
            for name, layout in reached.items()
            if (note := packs.load_lineage(name).layout(layout).note)
        ]
        fail(
            "M115",
            f"the checkpoint is already in {listed(there)}, so {option('params')} "
            f"{listed(list(given))} would change nothing",
            notes=tuple(notes),
            help=f"say what it is in with {option('from_')} if that is wrong, or leave "
            f"{option('params')} out",
        )
    if not request.files:
        reached.update((s.lineage, s.goal) for s in steps)
    found_path = _compile(
        steps,
        packs,
        given if steps else {name: given[name] for name in sizes if name in given},
        (stamp.applied, applied or ()),
        found,
        reached,
        bool(request.files),
    )
    return found_path if back is None else replace(found_path, grid=back)


def _last_run(applied: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The edges of the last run not undone since, last first; to undo a downgrade is an upgrade."""
    here = standing_entries(applied)
    if not here:
        fail(
            "M115",
            "everything that the stamp records is already downgraded",
            help=f"`{command('history')}` shows it; {option('to')} says where else to go",
        )
    # the edges of one run name one source
    run = [here[-1]]
    for entry in reversed(here[:-1]):
        if entry["source"] != run[-1]["source"]:
            break
        run.append(entry)
    return run


def _refuse_by_hand(packs: Packs, applied: Sequence[Mapping[str, Any]]) -> None:
    """M507 for an edge of a stamp that no lineage has: its rule file was given by hand."""
    for entry in applied:
        if not any(entry["lineage"] in pack.lineages for pack in packs.all):
            fail(
                "M507",
                f"the stamp says that {printable(entry['lineage'])} {printable(entry['from'])} → "
                f"{printable(entry['to'])} was applied, and no lineage of this name is known",
                notes=tuple(
                    f"the rule file was {printable(rule['id'])}" for rule in entry["rules"]
                ),
                help=f"name its rule file, or the folder of its lineage: {option('rules', 'PATH')}",
            )


def _by_hand(request: Request, applied: Sequence[Mapping[str, Any]]) -> list[PathStep]:
    """The given files as steps, in the order given; files of one edge are one step."""
    steps: dict[tuple[str, tuple[str, str]], list[LoadedFile]] = {}
    for loaded in load_given_files(request):
        steps.setdefault((loaded.model.lineage, loaded.model.edge), []).append(loaded)
    undone = {(e["lineage"], (e["to"], e["from"])) for e in applied if turns(e)}
    out = []
    for (lineage, edge), files in steps.items():
        backwards = bool(request.backwards) or ((lineage, edge) in undone)
        start, goal = reversed(edge) if backwards else edge
        out.append(PathStep(lineage, start, goal, backwards, files=tuple(files)))
    return out[::-1] if request.backwards else out


def _towards(
    packs: Packs,
    index: Index,
    read_side: ReadSide,
    stamp: Any,
    request: Request,
    found: list[Diagnostic],
    states: States | None,
) -> tuple[list[PathStep], dict[str, str]]:
    """The steps, and the layout that each lineage of a goal ends in, even without a step."""
    lineages = lineages_asked_for(
        packs, request, lambda: suiting(config_of(read_side), names=[*stamp.layouts])
    )
    current: dict[str, str] = {n: v for n, v in stamp.layouts.items() if n in lineages}
    for name, layout in current.items():
        if layout not in lineages[name].names:
            fail(
                "M505",
                f"the checkpoint's stamp says {name}@{printable(layout)}, a layout that is not "
                "known here",
                help="it was written with newer rules; update the rule pack",
            )
    for name, layout in current.items():
        log.debug("it is in %s@%s: its stamp says so", name, layout)
    said: set[str] = set()
    for text in request.from_:
        goal = resolve_goal(text, lineages, current)
        if goal.lineage in said:
            fail(
                "M115",
                f"{option('from_')} names two layouts of lineage {goal.lineage}",
                help="a checkpoint is in only one of them",
            )
        said.add(goal.lineage)
        current[goal.lineage] = goal.layout
    seen: dict[str, list[LayoutFinding]] = {}
    for name, lineage in lineages.items():
        if name not in current and _is_meant(name, request.to, lineage):
            seen[name] = detect(lineage, index, read_side, states=states)
            holding = [f.layout for f in seen[name] if f.holds]
            if len(holding) == 1:
                current[name] = holding[0]
                log.debug(
                    "it is in %s@%s: %s",
                    name,
                    holding[0],
                    "; ".join(next(f.evidence for f in seen[name] if f.holds)),
                )
    steps: list[PathStep] = []
    reached: dict[str, str] = {}
    for text in request.to:
        meant = {
            name
            for name, lineage in lineages.items()
            if "@" not in text and text not in lineages and _may_mean(text, lineage)
        }
        # one that is meant alone says in M504 what keeps the checkpoint away; of nothing at all
        # nothing is near
        if len(meant) > 1 and meant.isdisjoint(current) and index.tensors:
            match = Matcher(index, states)
            suits = suiting(config_of(read_side), match.has)
            known = [one for one in packs.lineages(suits)[0].values() if _may_mean(text, one)]
            near = nearest(known, index, read_side, states, match)
            _refuse_unknown_family(text, current, [n for n in near if n.lineage not in current])
        goal = resolve_goal(text, lineages, current)
        lineage = lineages[goal.lineage]
        if goal.lineage not in current:
            _refuse_unknown_start(
                lineage, seen.get(goal.lineage) or detect(lineage, index, read_side, states=states)
            )
        here = current[goal.lineage]
        steps += _walk(
            packs,
            goal.lineage,
            here,
            goal.layout,
            request.backwards if lineage.ordered else None,
            None if request.backwards else _loop_asked_for(lineage, here, request, index),
            undone=standing_entries(stamp.applied),
        )
        found += warnings(lineage, [goal.layout])
        current[goal.lineage] = reached[goal.lineage] = goal.layout
    for name in sorted(said - reached.keys()):
        refuse_start_elsewhere(name)
    return steps, reached


def _is_meant(name: str, to: Sequence[str], lineage: Lineage) -> bool:
    """Whether a goal could be in this lineage; detection is not run for other lineages."""
    for text in to:
        meant, at, _ = text.rpartition("@")
        called = (name, *lineage.aliases)
        if meant in called if at else text in called or text in lineage.names or text[:1] in "+-l":
            return True
    return False


def _may_mean(text: str, lineage: Lineage) -> bool:
    """Whether a goal without the name of a lineage could be a layout of this one."""
    return text in lineage.names or (lineage.ordered and (text == LATEST or text[:1] in "+-"))


def _refuse_unknown_family(
    text: str, current: Mapping[str, str], near: Sequence[NearLayout]
) -> NoReturn:
    lacks = "which has no layout of that name"
    if text == LATEST or text[:1] in "+-":
        lacks = "whose layouts have no order"
    notes = [f"it is in {name}@{layout}, {lacks}" for name, layout in sorted(current.items())]
    for one in near:
        more = (
            f" and {len(one.against) - _MOST_SIGNS} more" if len(one.against) > _MOST_SIGNS else ""
        )
        notes.append(
            f"nearest is {one.lineage}@{one.layout}, but "
            f"{'; '.join(one.against[:_MOST_SIGNS])}{more}"
        )
    hint = f"a checkpoint of another family needs rules of its own: {option('rules', 'FILE')}"
    if current:
        goals = " or ".join(option("to", f"{name}@LAYOUT") for name in sorted(current))
        hint = f"say the layout by its name: {goals}"
    if near:
        start = together(
            option("to", f"{near[0].lineage}@LAYOUT"),
            option("from_", f"{near[0].lineage}@{near[0].layout}"),
        )
        which = "another of these" if current else "one of these"
        hint = f"if it is {which} nevertheless: {start}; {hint}"
    what = (
        f"`{printable(text)}` refers to the lineage that the checkpoint is in, and it is in none "
        "that has such a layout"
    )
    fail(
        "M520",
        what,
        notes=tuple(notes) or ("nothing in it matches the signs of any lineage",),
        help=hint,
    )


def _refuse_unknown_start(lineage: Lineage, findings: Sequence[LayoutFinding]) -> None:
    holding = [f for f in findings if f.holds]
    names = " or ".join(
        option("from_", f"{lineage.name}@{f.layout}") for f in (holding or findings)
    )
    if holding:
        notes = tuple(f"{f.layout}: {'; '.join(f.evidence)}" for f in holding)
        layouts = " and ".join(f.layout for f in holding)
        fail(
            "M503",
            f"the checkpoint fits the layouts {layouts} of lineage {lineage.name}",
            notes=notes,
            help=f"say which it is: {names}",
        )
    # what speaks against a layout decides; what would speak for it as well is noise
    against = (
        (f.layout, [sign.removeprefix("not: ") for sign in f.evidence if sign.startswith("not: ")])
        for f in findings
    )
    notes = tuple(
        f"not {layout}: {'; '.join(signs)}"
        if signs
        else f"{layout}: cannot be detected, because a checkpoint shows no sign of it"
        for layout, signs in against
    )
    fail(
        "M504",
        f"the checkpoint fits no layout of lineage {lineage.name}",
        notes=notes,
        help=f"if it is in one nevertheless: {names}",
    )


def _loop_asked_for(lineage: Lineage, here: str, request: Request, index: Index) -> bool | None:
    if not request.params or lineage.loop(here) is None:
        return None
    # few layouts have an edge to themselves
    from .loops import loop_asked_for

    return loop_asked_for(lineage, here, request, index)


def _walk(
    packs: Packs,
    name: str,
    start: str,
    goal: str,
    down: bool | None,
    loop: bool | None = None,
    *,
    undone: Sequence[Mapping[str, Any]] = (),
    again: Sequence[Mapping[str, Any]] = (),
) -> list[PathStep]:
    """The steps of the way; `undone` are entries of a stamp that it may undo, `again` the one that
    is done as it was.
    """
    lineage = packs.load_lineage(name)
    return [
        PathStep(
            name,
            edge.start,
            edge.end,
            edge.backwards,
            files=tuple(applied_files(edge.edge, name, undone if edge.backwards else again)),
            memory={"again": again[0]} if again else {},
            layouts=(lineage.layout(edge.start), lineage.layout(edge.end)),
        )
        for edge in path(lineage, start, goal, down=down, loop=loop)
    ]


def _compile(
    steps: Sequence[PathStep],
    packs: Packs,
    given: Mapping[str, Any],
    applied: tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]],
    found: list[Diagnostic],
    layouts: Mapping[str, str],
    by_hand: bool,
) -> MigrationPath:
    memories = [remembered(*applied, step) for step in steps]
    for memory in memories:
        memory["params"].update({PARAMETER: given[PARAMETER]} if PARAMETER in given else {})
    edges = [edge for name in layouts for edge in packs.load_lineage(name).edges] if given else []
    elsewhere = [
        name for edge in edges for file in load_edge(edge.files) for name in file.model.params
    ]
    for name, layout in layouts.items() if given else ():
        grid = packs.load_lineage(name).layout(layout).grid
        elsewhere += [] if grid is None else grid.params
    report = Report()
    ready, entries, rules = [], [], []
    origins: list[Mapping[str, Any]] = []
    for step, memory in zip(steps, memories, strict=True):
        compiled = [compile_file_once(file, report) for file in step.files]
        unsettled = tuple((rule, dict[str, Any]()) for some, _ in compiled for rule in some)
        keep = tuple(pattern for _, patterns in compiled for pattern in patterns)
        back: tuple[Path, ...] = ()
        for edge in () if by_hand or step.backwards else packs.load_lineage(step.lineage).edges:
            if (edge.source, edge.target) == (step.goal, step.start) and not step.loops:
                back = edge.files
        ready.append(replace(step, rules=unsettled, keep=keep, memory=memory, back=back))
        hashes = [{"id": file.model.id, "hash": file.hash} for file in step.files]
        entry: dict[str, Any] = {**entry_of(step), "rules": hashes}
        if pack := _pack(step, packs, by_hand):
            # the name of a folder or a file is where it lies
            named = {name: pack[name] for name in ("origin", "name", "version") if pack.get(name)}
            entry["pack"] = named
            origins.append({"lineage": step.lineage, **pack})
        entries.append(entry)
        rules += hashes
        if any(applied):
            found += changed_rules(step, hashes, *applied)
    report.check()
    check_params(ready, given, elsewhere)
    lineages = {n: packs.load_lineage(n) for n in layouts}
    ends = [lineages[name].layout(layout) for name, layout in layouts.items()]
    distinct = [origin for number, origin in enumerate(origins) if origin not in origins[:number]]
    return MigrationPath(
        tuple(ready),
        tuple(rules),
        given,
        layouts,
        tuple(entries),
        tuple(found),
        lineages,
        tuple(distinct),
        tuple(end for end in ends if end.format or end.grid is not None),
        memories[-1]["grid"] if steps and steps[-1].backwards else None,
    )


def _pack(step: PathStep, packs: Packs, by_hand: bool) -> dict[str, Any] | None:
    """Where the rules of the step come from; None for those that ship. A place is no name: who
    moves a folder changes nothing.
    """
    if by_hand:
        return {
            "origin": "file",
            "name": "",
            "version": "",
            "places": [os.path.abspath(f.path) for f in step.files],
        }
    home = packs.home(step.lineage)
    if home.origin == "built-in":
        return None
    installed = home.origin == "installed"
    return {
        "origin": "installed" if installed else "folder",
        "name": home.name if installed else "",
        "version": home.version,
        "places": [os.path.abspath(home.folder or "")],
    }


def check_params(
    steps: Sequence[PathStep], given: Mapping[str, Any], elsewhere: Sequence[str]
) -> None:
    """Raises, before binding, what is wrong with params that do not depend on the checkpoint.

    `elsewhere`: params of edges that need not be walked.
    """
    files = list({id(f): f for step in steps for f in step.files}.values())
    declared = parameters.declare(files)
    asking = {
        name
        for step in steps
        for file in step.files
        for name in declared
        if _asks_checkpoint(step, file, name)
    }
    asking.update(
        name for name, param in declared.items() if parameters.has_patterns(given.get(name), param)
    )
    alone = {name: param for name, param in declared.items() if name not in asking}
    remembered = {
        name: value
        for step in steps
        for name, value in step.memory["params"].items()
        if name in alone
    }
    reached = [step.layouts[1].params for step in steps if step.layouts is not None]
    made = [name for params in reached for name in params if name not in declared]
    asked = {
        name: value
        for name, value in given.items()
        if name in alone or name not in (*declared, *made)
    }
    if not (alone or asked):
        return
    spans = {name: f.span("params", name) for f in reversed(files) for name in f.model.params}
    from_tensors = {
        name: parameters.why_no_names(param.groups)
        for name, param in alone.items()
        if param.groups is not None
    }
    parameters.resolve(
        alone,
        asked,
        [(parameters.STAMP, remembered)],
        spans,
        known=[*declared, *made, *elsewhere, PARAMETER],
        from_tensors=from_tensors,
        chosen=all(step.backwards or step.loops for step in steps),
    )


def _asks_checkpoint(step: PathStep, file: LoadedFile, name: str) -> bool:
    param = file.model.params.get(name)
    patches = file.model.files.values()
    written = any(
        value == f"${name}" for patch in patches for _, value in leaves_of_patch(patch)
    ) or any(name in asked_params(patch) for patch in patches)
    if param is None:
        return written
    return (
        (param.groups is not None and _may_name(step, param.groups))
        or bool(param.places)
        or bool(param.value_places)
        or param.shape is not None
        or param.dtype is not None
        or param.absent is not None
        or param.present is not None
        or param.follows is not None
        or written
    )


def _may_name(step: PathStep, groups: Groups) -> bool:
    """Whether the step may read, in one of its directions, tensors that number the names."""
    from ..core.overlap import apart

    numbered = parse(groups.key)
    return any(
        pattern.ranked != numbered.ranked or not apart(pattern, numbered)
        for pattern in step.reads()
    )
