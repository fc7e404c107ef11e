"""The steps of a path, each an edge in the direction in which it is walked, and the side files and
params of the steps so far: each step gets its params when it is reached, and leaves the side files
as the next one finds them.

An edge may ask the configuration or a tensor's shape for a param, and the edges before it change
both. So params are settled edge by edge while the graph is composed, not before. On the way back
each op is inverted, in reverse order, with the same capture values, and the patch of an edge is
undone before its params are asked for: they are those of the layout that the edge starts in.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import TYPE_CHECKING, Any

from .. import ops
from ..core.errors import Diagnostic, Report, fail, listed, option, printable, together
from ..core.keys import Pattern
from ..extra_state.record import how_to_leave
from ..ops.base import OneWay
from ..ops.base import step as call_of
from ..rules import params as parameters
from ..rules.arguments import PARAM, is_each
from ..rules.compiled import (
    CompiledCall,
    CompiledRule,
    DirectedRule,
    compile_file_once,
    direct,
    holds,
)
from ..rules.conditions import ModuleNames
from ..rules.files import VALUES, LoadedFile
from ..rules.lineage import Layout
from ..rules.packs import load_edge
from ..source.pickle.tree import PARAMETER
from .bind import StepResult
from .graph import Tensor
from .module_names import is_place_of, rename
from .patches import (
    ABSENT,
    WRITTEN_NULL,
    account,
    apply_patch,
    conditions_met,
    decides,
    each_as_it_stands,
    fill_patch,
    leaves_of_patch,
    list_changes,
    params_of_each,
    removed_text,
    restore_value,
    same_json,
    undo_steps,
)
from .pipeline import CODING
from .sides import SideFiles
from .tensor_params import Asked, dtypes_of, grouped_names, names_of, presence_of, sizes_of

if TYPE_CHECKING:
    from pathlib import Path

    from ..rules.param_model import Param
    from .made_files import ReachedLayout, Says


@dataclass(frozen=True, eq=False, slots=True)
class PathStep:
    """One edge in the direction in which it is walked: the rules of its files and their params.

    `start` and `goal` are layouts of `lineage`; `backwards` when the inverses of the rules are what
    runs. `memory` is what a stamp holds of the edge: the params that it once had, and, where it
    undoes what the stamp says was done, how side files were and which keys stayed as they were
    (`kept`; None: no stamp says so). `back` are the rule files that lead the other way, if there
    are any; without them, what is done is undone by the inverses of the rules.
    """

    lineage: str
    start: str
    goal: str
    backwards: bool
    rules: tuple[tuple[CompiledRule, Mapping[str, Any]], ...] = ()
    # patterns of keys that stay as they are
    keep: tuple[Pattern, ...] = ()
    files: tuple[LoadedFile, ...] = ()
    memory: Mapping[str, Any] = field(default_factory=dict)
    back: tuple[Path, ...] = ()
    # what the way back does not bring back is kept elsewhere
    undo: bool = False
    # the layouts at both ends; None of rule files given by hand
    layouts: tuple[Layout, Layout] | None = None

    @property
    def loops(self) -> bool:
        """Whether it leads from a layout to itself."""
        return self.start == self.goal

    def reads(self) -> list[Pattern]:
        """The patterns of keys that its rules take as it is walked; none that params decide."""
        rules = [rule for rule, _ in self.rules if not (self.backwards and rule.rule.skipped_back)]
        patterns = (
            pattern
            for rule in rules
            for pattern in (rule.targets if self.backwards else rule.sources).values()
        )
        return [pattern for pattern in patterns if not (pattern.params or pattern.has_flat)]


def directed(step: PathStep, report: Report) -> list[DirectedRule]:
    """The step's rules in its direction; rules that `where` on params switches off are left out,
    one-way rules are refused.
    """
    rules = []
    refused: dict[str, list[DirectedRule]] = {}
    gone: set[Any] = set()
    for compiled, params in step.rules:
        if not holds(compiled.rule.where or {}, params) or (
            step.backwards and compiled.rule.skipped_back
        ):
            continue
        rule = direct(compiled, params, report)
        if rule is None:
            continue
        if not step.backwards:
            rules.append(rule)
            continue
        back = invert(rule)
        if isinstance(back, OneWay) and step.undo:
            made = _writes(rule, compiled)
            if rule.writes and made not in gone:
                gone.add(made)
                rules.append(removed(rule))
        elif isinstance(back, OneWay) and rule.one_way:
            refused.setdefault(rule.one_way, []).append(rule)
        elif isinstance(back, OneWay):
            report.add(
                "M405",
                f"rule {rule.name!r} has no exact inverse: {back.because}",
                spans=(rule.span,),
                help=back.help
                or "`inverse: skip` leaves a rule out on a downgrade, if its tensors are computed "
                "again anyway",
            )
        else:
            rules.append(back)
    for reason, several in refused.items():
        names = listed([repr(rule.name) for rule in several], 12)
        report.add(
            "M405",
            f"{f'rule {names} has' if len(several) == 1 else f'rules {names} have'} no way back: "
            f"{reason}",
            spans=tuple(rule.span for rule in several),
            help=f"keep the source, or apply with {option('undo', 'DIR')}, which keeps what a "
            "downgrade needs",
        )
    return rules


def refuse_without_codes(step: PathStep, rules: Sequence[DirectedRule], report: Report) -> None:
    """M405 for the way to a layout that its edge decodes and nothing encodes: plain numbers would
    be copied, beside a configuration, which a stamp restores, that says they are encoded.
    """
    if not step.backwards or step.undo:
        return
    left_out = [
        compiled
        for compiled, params in step.rules
        if compiled.rule.skipped_back
        and holds(compiled.rule.where or {}, params)
        and any(call.op in CODING for call in compiled.rule.via)
    ]
    if not left_out or any(call.name in CODING for rule in rules for call in rule.steps):
        return
    names = listed([repr(compiled.rule.name) for compiled in left_out], 12)
    report.add(
        "M405",
        f"nothing makes {printable(step.lineage)}@{printable(step.goal)} of plain numbers: "
        f"the way back leaves {'rule' if len(left_out) == 1 else 'rules'} {names} out "
        "(`inverse: skip`)",
        spans=(left_out[0].loaded.span(*left_out[0].path),),
        help="a lineage that encodes, such as fp8, nvfp4 or mxfp8, has another format; this one is "
        "encoded by its library, with a calibration"
        + (
            f"; keep the source, or apply with {option('undo', 'DIR')}"
            if _undone(step) is not None
            else ""
        ),
    )


def invert(rule: DirectedRule) -> DirectedRule | OneWay:
    """The rule backwards, reading what it wrote; or why that cannot be exact.

    Backwards of a `keep_source` rule reads its targets and keeps the forward rule beside it:
    whether a target goes is decided by what the forward rule would make of the restored keys.
    """
    if rule.keep_source:
        return replace(
            rule, reads=rule.writes, writes=rule.reads, steps=(), backwards=True, forward=rule
        )
    if rule.one_way:
        return OneWay(rule.one_way)
    steps = []
    for step in reversed(rule.steps):
        enumerated = step.capture is not None and rule.types[step.capture].kind == "enum"
        inverse = step.op.invert(step.args, enumerated=enumerated)
        if isinstance(inverse, OneWay):
            return OneWay(f"{step.name}: {inverse.because}", inverse.help)
        capture = getattr(inverse.args, "over", None) or getattr(inverse.args, "into", None)
        steps.append(
            CompiledCall(inverse.op, ops.get(inverse.op), inverse.args, capture, step.span)
        )
    return replace(rule, reads=rule.writes, writes=rule.reads, steps=tuple(steps), backwards=True)


def removed(rule: DirectedRule) -> DirectedRule:
    """The way back of a rule that has no inverse, where its sources are kept elsewhere: what it
    made goes.
    """
    call = CompiledCall("drop", ops.get("drop"), call_of("drop", why=UNDONE).args, None, rule.span)
    gone: dict[str, Any] = {"steps": (call,), "when": {}, "optional": True, "why": UNDONE}
    return replace(rule, reads=rule.writes, writes=(), backwards=True, **gone)


def _writes(rule: DirectedRule, compiled: CompiledRule) -> tuple[Any, ...]:
    """What tells the keys that a rule makes from those of another: rules for the forms that one
    tensor may have make one key, and it goes once.
    """
    named = [(side.role, side.pattern.text) for side in rule.writes]
    return (*named, repr(rule.where), repr(compiled.maps))


UNDONE = "what it was made of is kept"

# the param of the rule files that are shipped
DELAYED = "delayed_scaling"
Said = tuple[str, Mapping[str, Any]]


class PathState:
    """What the edges know beside tensors. `given`: from `--set`; `carried`: there are side files.

    For each step `enter_step` before its rules are bound, `leave_step` with what they made.
    """

    def __init__(self, given: Mapping[str, Any], sides: SideFiles, *, carried: bool) -> None:
        self._given, self._carried = given, carried
        self.sides = sides
        self.params: dict[str, Any] = {}
        # where their values are from, for people
        self.param_sources: dict[str, str] = {}
        # of each step, for the stamp: its params, and how what it did to side files is undone
        self.remembered: list[dict[str, Any]] = []
        self.changes: list[dict[str, Any]] = []
        self.warnings: list[Diagnostic] = []
        self.notes: list[str] = []
        # of the step that is walked: what stood in side files that it may remove, and lists of
        # modules that its patches take
        self._texts: dict[str, str] = {}
        self._modules: dict[str, list[str]] = {}
        # and params that nothing but a default says
        self._assumed: dict[str, Any] = {}
        # and how they let a person leave state of delayed scaling behind, if they do
        self._leave: str | None = None
        # the tensors that it begins with
        self.entered = Asked({})
        # the steps whose patches stand or were undone, in order
        self._steps: list[PathStep] = []
        # why the way back would not bring the side files back
        self.inexact: list[str] = []

    def list_side_files(self, source_files: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
        """(path, size) of the side files that come out, given those of the source."""
        return self.sides.list_files(source_files) if self._carried else []

    def enter_step(self, step: PathStep, tensors: Mapping[str, Tensor]) -> PathStep:
        """The step with its rules' params. Raises what is wrong with them or with their files."""
        undone = _undone(step) if step.backwards else None
        self.entered = Asked(tensors, self.sides.partial)
        patching = step.layouts is not None and bool(step.layouts[1].files)
        patching = patching or any(
            m.files or m.names or m.files_back or m.files_restored
            for m in (file.model for file in step.files)
        )
        made = {} if step.backwards else step.memory.get("made", {})
        before = self._snapshot(step, made) if patching or undone or made else {}
        if undone:
            # what the way there made of them stands in what it is undone from
            self._modules = _modules(step, tensors)
        if step.backwards:
            self._undo(step)
            self._steps.append(step)
        for path, undo in made.items():
            self.sides.put_value(path, restore_value(self.sides.value(path) or {}, undo))
        declared = parameters.declare(step.files)
        spans = {
            name: f.span("params", name) for f in reversed(step.files) for name in f.model.params
        }
        given = {name: value for name, value in self._given.items() if name in declared}
        if again := step.memory.get("again"):
            given = parameters.chosen(again, declared) | given
        said = [
            (
                parameters.STAMP,
                {n: v for n, v in step.memory.get("params", {}).items() if n in declared},
            ),
            *self._sources(step, self.entered),
        ]
        for name in given:
            at = (spans[name],) if name in spans else ()
            given[name] = parameters.expand(
                name,
                given[name],
                declared[name],
                lambda: names_of(tensors),
                at,
                [values.get(name) for _, values in said],
            )
        lost = self._lost(step) if self._steps else {}
        silent = [
            n
            for n in declared
            if declared[n].groups
            and n not in given
            and all(source.get(n) is None for _, source in said)
        ]
        from_tensors = {
            name: grouped_names(step, groups, tensors)
            for name in silent
            if (groups := declared[name].groups) is not None
        }
        values = parameters.resolve(
            declared,
            given,
            said,
            spans,
            lost=lost,
            from_tensors=from_tensors,
            chosen=step.backwards or step.loops,
        )
        for name in (n for n in values if declared[n].modules):
            from ..source.module_lists import list_library

            values[name] = ModuleNames.of(values[name], list_library(self.sides.value))
        self.notes += [
            f"`{n}` of {step.lineage} is not given, and is read from the tensors: "
            f"{listed([f or repr('') for f in found], 8)}"
            for n, found in from_tensors.items()
            if isinstance(found, list)
        ]
        if len(step.files) > 1:
            parameters.refuse_others(step.files, values, declared)
        if given:
            _refuse_new(step, values, given, declared)
        self._leave = None
        if DELAYED in declared and "drop" in (declared[DELAYED].choices or ()):
            way = together(option("params", f"{DELAYED}=drop"), option("allow", "drop"))
            self._leave = f"{way} leaves it behind, which is what most users want"
        named = {name: found for name, found in from_tensors.items() if isinstance(found, list)}
        self._assumed = {
            n: v
            for n, v in values.items()
            if n not in given
            and n not in named
            and all(source.get(n) is None for _, source in said)
        }
        for name, value in ((n, v) for n, v in self._assumed.items() if n in lost):
            what = f"`{name}` is taken to be {printable(str(value), 80)}, its default: {lost[name]}"
            at = (spans[name],) if name in spans else ()
            self.warnings.append(
                Diagnostic(
                    "M512", what, at, help=f"if it was another one: {option('params', f'{name}=…')}"
                )
            )
        for name, value in values.items():
            taken = name in self.params and not same_json(self.params[name], value)
            shown = f"{name} ({step.lineage} {step.start} -> {step.goal})" if taken else name
            self.params[shown] = value
            origins = (of for of, found in (("given", given), *said) if found.get(name) is not None)
            other = "the tensors" if name in named else "its default"
            self.param_sources[shown] = next(origins, other)
        numbering = (
            {PARAMETER: step.memory["params"][PARAMETER]}
            if PARAMETER in step.memory.get("params", {})
            else {}
        )
        self.params.update(numbering)
        self.remembered.append({"params": {**values, **numbering}, "before": before})
        own = {
            id(f): {name: values[name] for name in f.model.params if name in values}
            for f in step.files
        }
        return replace(
            step, rules=tuple((rule, own.get(id(rule.loaded), {})) for rule, _ in step.rules)
        )

    def settle_way_back(
        self, step: PathStep, number: int, tensors: Mapping[str, Tensor]
    ) -> PathStep:
        """The step of the rule files that lead back from `step`, which has this number, with the
        params that a downgrade of the output finds: in its stamp and in its side files. Raises what
        is wrong with these files, and as `enter_step`.
        """
        report = Report()
        files = tuple(load_edge(step.back))
        compiled = [compile_file_once(file, report) for file in files]
        report.check()
        back = PathStep(
            step.lineage,
            step.goal,
            step.start,
            backwards=False,
            rules=tuple((rule, dict[str, Any]()) for some, _ in compiled for rule in some),
            keep=tuple(pattern for _, patterns in compiled for pattern in patterns),
            files=files,
            memory={"params": self.remembered[number]["params"]},
        )
        return PathState({}, self.sides, carried=self._carried).enter_step(back, tensors)

    def leave_step(self, step: PathStep, bound: StepResult, report: Report) -> None:
        """Does to the side files what the step's rule files say, now that its keys are known."""
        memory = self.remembered[-1]
        params, before = memory["params"], memory.pop("before")
        if not self._carried:
            changing = [
                (file.model.id, paths)
                for file in step.files
                if (paths := [path for path in _patched_by(file) if path != VALUES])
            ]
            self.notes += [
                f"{who} changes {listed(paths)}, which only a folder has" for who, paths in changing
            ]
        undone = (_undone(step) if step.backwards else None) or {}
        if before and not undone:
            self._modules = _modules(step, bound.tensors)
        values = {**params, **self._modules}
        if len(step.files) > 1:
            _refuse_contradictions(step, values, report)
        renamed: set[tuple[str, tuple[str, ...]]] = set()
        for file in (file for file in step.files if file.model.names):
            self.notes += rename(file, self.sides, bound, undone, renamed, report)
        for file in step.files if before else ():
            for path, patch in _patches(step, file).items():
                filled = fill_patch(patch, values, PARAM)
                if undone:
                    filled = self._changed(path, filled)
                self.sides.patch(path, filled)
        goal = None if step.layouts is None else step.layouts[1]
        # what a stamp restores is all that there was
        if goal is not None and goal.files and _undone(step) is None:
            from .made_files import make_files

            paths = [path for path in goal.files if self._goes_out(path)]
            says = self._says(params, Asked(bound.tensors, self.sides.partial))
            self.notes += make_files(goal, paths, self.sides, self._given, says)
        if not step.backwards:
            self._steps.append(step)
        if step.backwards:
            self._check_way_back(step, before, undone, values)
        files: dict[str, Any] = {}
        for path, old in before.items():
            now = self.sides.value(path)
            if not self._goes_out(path) or same_json(old, now):
                continue
            files[path] = undo_steps(old, now, self._texts.get(path))
            called = "values" if path == VALUES else path
            self.changes.append(
                account(called, old, now, f"{step.lineage} {step.start} -> {step.goal}")
            )
        if files:
            memory["files"] = files

    def _goes_out(self, path: str) -> bool:
        """Whether the output has what stands there: files only beside a folder's."""
        return self._carried or path == VALUES

    def explain_problems(self, report: Report) -> None:
        """Adds to what is wrong what the step's params have to do with it.

        With shapes, which of them are defaults, which may be what does not fit. With delayed
        scaling, which of them leaves it behind.
        """
        notes = tuple(
            f"`{name}` is not given; its default is {printable(str(value), 80)}"
            for name, value in self._assumed.items()
        )
        report.diagnostics = [
            replace(d, notes=(*d.notes, *notes)) if d.code.startswith("M3") else d
            for d in report.diagnostics
        ]
        if (way := self._leave) is not None:
            report.diagnostics = [
                replace(d, help=d.help.replace(how_to_leave(), way))
                if d.help and how_to_leave() in d.help
                else d
                for d in report.diagnostics
            ]

    def _snapshot(
        self, step: PathStep, made: Mapping[str, Any]
    ) -> dict[str, dict[str, Any] | None]:
        """The side files that the step may change, as they stand; `made` are those that the way
        there made.
        """
        paths = [path for file in step.files for path in _patched_by(file, step)]
        going = [p for f in step.files for p, patch in _patches(step, f).items() if patch is None]
        there = {path: self.sides.read_file(path) for path in going}
        self._texts = {path: raw.decode("utf-8", "replace") for path, raw in there.items() if raw}
        paths += () if step.layouts is None else step.layouts[1].files
        return {
            path: self.sides.value(path)
            for path in dict.fromkeys([*paths, *(_undone(step) or {}), *made])
        }

    def _says(self, params: Mapping[str, Any], reached: Asked) -> Says:
        """What is said of a layout's params by those of the rules and by tensors in the layout."""
        from .made_files import ReachedLayout

        return lambda asked: [("the rules", params), *self._said(ReachedLayout(), asked, reached)]

    def _changed(self, path: str, patch: Any) -> dict[str, Any] | None:
        """The part of a patch that says otherwise than what a stamp restored; None: no file."""
        if patch is None:
            return None
        out: dict[str, Any] = {}
        for at, was, new, _ in self.sides.differences(path, patch):
            held = out
            for name in at[:-1]:
                held = held.setdefault(name, {})
            held[at[-1]] = None if new is ABSENT else WRITTEN_NULL if new is None else new
            says = "has nothing" if new is ABSENT else f"says {json.dumps(new)}"
            self.notes.append(
                f"{printable(path)} {says} at {printable('.'.join(at))}, as what is written is; "
                f"it said {printable(json.dumps(was), 200)} before"
            )
        return out

    def _undo(self, step: PathStep) -> None:
        """The side files as they were before the edge, where the stamp says how; else a warning
        that they stay as they are.
        """
        steps = _undone(step)
        going = {p for file in step.files for p, patch in file.model.files.items() if patch is None}
        for path, undo in (steps or {}).items():
            now = self.sides.value(path)
            text = removed_text(undo)
            # a stamp alone begins no file
            if text is not None and path in going:
                self.sides.put_text(path, text)
            elif now is not None or path == VALUES:
                self.sides.put_value(path, restore_value(now or {}, undo))
        for file in step.files if steps is None else ():
            for path, patch in file.model.files.items():
                if (
                    self._goes_out(path)
                    and path not in file.model.files_back
                    and self.sides.touches(path, patch)
                ):
                    there = "whether it was there" if patch is None else "what was there before"
                    self.warnings.append(
                        Diagnostic(
                            "M512",
                            f"what {file.model.id} did to {printable(path)} cannot be downgraded: "
                            f"no stamp says {there}",
                            (file.span("files", path),),
                            help="it is carried as it is; correct it by hand, or say under "
                            "`files_back` what it is then",
                        )
                    )
                    self.inexact.append(
                        f"files of {step.lineage} {step.goal} -> {step.start}: {printable(path)} "
                        f"is not as it was before {file.model.id}"
                    )

    def _sources(self, step: PathStep, tensors: Asked) -> Iterator[Said]:
        """What the checkpoint says of the step's params: (source for messages, {param: value})."""
        for file in step.files:
            for path in file.model.files if step.backwards and _leaves_patches(step) else ():
                yield from self._written(file, path)
            yield from self._said(step, file.model.params, tensors)

    def _said(
        self,
        step: PathStep | ReachedLayout,
        params: Mapping[str, Param],
        tensors: Asked,
    ) -> Iterator[Said]:
        """What side files and tensors say of the params."""
        for name, param in params.items():
            for path, asked in map(parameters.place, param.places):
                for keys in self.sides.places(path, asked) if "*" in asked else (asked,):
                    if (
                        not (self._steps and _foreign(self._steps, path, keys))
                        and (value := self.sides.value_at(path, keys)) is not ABSENT
                    ):
                        yield f"{path}#{'.'.join(keys)}", {name: value}
            if param.value is not None:
                yield from ((at, {name: said}) for at, said in self.sides.beside(param.value))
            if param.shape is not None:
                yield from (
                    (said, {name: size}) for said, size in sizes_of(step, param.shape, tensors)
                )
            if param.dtype is not None:
                known = self._given.get(name, step.memory.get("params", {}).get(name))
                yield from (
                    (said, {name: dtype})
                    for said, dtype in dtypes_of(step, param.dtype, tensors, known)
                )
            yield from presence_of(step, name, param, tensors)

    def _lost(self, step: PathStep) -> dict[str, str]:
        """Param -> why its place in the configuration does not give it, without a stamp."""
        out = {}
        for name, reference in (
            (n, r) for file in step.files for n, p in file.model.params.items() for r in p.places
        ):
            if by := _foreign(self._steps, *parameters.place(reference)):
                place = parameters.spell_place(reference)
                out[name] = (
                    f"it was at {place}, which {by[0].model.id} changes on the way there, and "
                    "no stamp records it"
                )
        return out

    def _written(self, file: LoadedFile, path: str) -> Iterator[Said]:
        """Params that the file's patch wrote into the side file, and those on which an object in it
        depends that is there, on the way back without a stamp, unless a later edge wrote over them.
        """
        now = self.sides.value(path) if file.model.params else None
        for at, name, value in conditions_met(file.model.files[path], now):
            if not _foreign(self._steps[:-1], path, at):
                yield f"{path}#{'.'.join(at)}", {name: value}
        for at, value in leaves_of_patch(file.model.files[path]):
            if is_each(value) and not _foreign(self._steps[:-1], path, at):
                for below, name in params_of_each(value, self.sides.value_at(path, at)):
                    if (found := self.sides.value_at(path, (*at, *below))) is not ABSENT:
                        yield f"{path}#{'.'.join((*at, *below))}", {name: found}
            match = (
                PARAM.fullmatch(value)
                if isinstance(value, str) and not _foreign(self._steps[:-1], path, at)
                else None
            )
            if match and (found := self.sides.value_at(path, at)) is not ABSENT:
                yield f"{path}#{'.'.join(at)}", {match[1]: found}

    def _check_way_back(
        self,
        step: PathStep,
        before: Mapping[str, Any],
        undone: Mapping[str, Any],
        values: Mapping[str, Any],
    ) -> None:
        """A file that was edited after it was patched does not come back as it now is, once the
        patch is undone and done again.
        """
        for path, steps in undone.items():
            if path == VALUES and step.layouts is not None and path in step.layouts[0].files:
                # they were made, and are made again for whatever grid there is
                continue
            gone = before[path] is None and all(step["at"] for step in steps)
            again: Any = (restore_value({}, steps) if gone else self.sides.value(path)) or {}
            if not again and step.layouts is not None and path in step.layouts[0].files:
                # it was made, and is made again
                from .made_files import make_file

                says = self._says(values, self.entered)
                again = make_file(step.layouts[0], path, self._given, says)[0] or {}
            for file in step.files:
                patch = each_as_it_stands(file.model.files.get(path, {}), before[path])
                again = apply_patch(again, fill_patch(patch, values, PARAM)) or {}
            if (gone and again) or (removed_text(steps) and self.sides.value(path) is None):
                self.inexact.append(
                    f"files of {step.lineage} {step.goal} -> {step.start}: {printable(path)} was "
                    "removed since"
                )
            lists = [parameters.place(name) for file in step.files for name in file.model.names]
            edited = [
                c
                for c in list_changes(before[path] or {}, again)
                if not any(path == file and is_place_of(c.at, keys) for file, keys in lists)
            ]
            if edited and before[path] is not None:
                where = listed([".".join(c.at) for c in edited], 4)
                self.inexact.append(
                    f"files of {step.lineage} {step.goal} -> {step.start}: {printable(path)} was "
                    f"edited since, at {where}"
                )


def _refuse_new(
    step: PathStep,
    values: Mapping[str, Any],
    given: Mapping[str, Any],
    declared: Mapping[str, Param],
) -> None:
    """M510 where an edge was walked with an optional param unset, as the stamp has it, and is
    undone with a value for it.
    """
    before = step.memory.get("params", {})
    for name in (
        n for n in given if _undone(step) is not None and declared[n].optional and n not in before
    ):
        notes = (
            f"{parameters.spell_source(parameters.GIVEN)} says {printable(str(values[name]), 80)}",
            f"{parameters.STAMP} says that it was not set",
        )
        fail(
            "M510",
            f"the sources of param `{name}` disagree",
            notes=notes,
            help="leave it out: the edge was walked without it",
        )


def _undone(step: PathStep) -> Mapping[str, Any] | None:
    """Side file -> what undoes the step's changes, on the way back; None where no stamp says so."""
    return step.memory.get("files") if step.backwards else None


def _patches(step: PathStep, file: LoadedFile) -> Mapping[str, Any]:
    """What the rule file does to side files on the step; where a stamp restores them and nothing
    restores the tensors, what these are now.
    """
    if not step.backwards:
        return file.model.files
    if _undone(step) is None:
        return file.model.files_back
    return {} if step.undo else file.model.files_restored


def _modules(step: PathStep, tensors: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """The lists of modules that the step's patches take; none where they take none."""
    own = [p for file in step.files for p in (file.model.files, file.model.files_back) if p]
    if not own:
        return {}
    from .encoded_modules import list_modules, takes_modules

    taken = takes_modules(patch for patches in own for patch in patches.values())
    return list_modules(tensors) if taken else {}


def _refuse_contradictions(step: PathStep, values: Mapping[str, Any], report: Report) -> None:
    """M516 where two files of an edge say different things of one place: order means nothing."""
    said = [
        (file, path, at, value)
        for file in step.files
        for path, patch in _patches(step, file).items()
        for at, value in leaves_of_patch(fill_patch(patch, values, PARAM))
    ]
    for (one, path, at, value), (other, elsewhere, there, known) in combinations(said, 2):
        deep = min(len(at), len(there))
        if (
            one is other
            or path != elsewhere
            or at[:deep] != there[:deep]
            or (at == there and same_json(value, known))
        ):
            continue
        word = "files"
        if step.backwards:
            word = "files_back" if _undone(step) is None else "files_restored"
        spans = (one.span(word, path, *at), other.span(word, path, *there))
        report.add(
            "M516",
            f"two files of one edge change {printable(path)} at {printable('.'.join(at[:deep]))}",
            spans=spans,
        )


def _patched_by(file: LoadedFile, step: PathStep | None = None) -> list[str]:
    """The side files that the rule file changes; on its way back those of that way too."""
    back: Iterable[str] = ()
    if step is not None and step.backwards:
        back = (*file.model.files_back, *file.model.files_restored)
    lists = (parameters.place(name)[0] for name in file.model.names)
    return list(dict.fromkeys([*file.model.files, *back, *lists]))


def _leaves_patches(step: PathStep) -> bool:
    """Whether the step is walked back without a stamp, so that what it did to side files stays."""
    return step.backwards and _undone(step) is None


def _foreign(steps: Sequence[PathStep], path: str, keys: Sequence[str]) -> list[LoadedFile]:
    """The rule files whose patch still decides `keys`, although their edge was walked back."""
    for step in reversed(steps):
        found = [
            f
            for f in step.files
            if decides(f.model.files.get(path, {}), keys)
            or any(parameters.place(name) == (path, tuple(keys)) for name in f.model.names)
        ]
        if found:
            return found if _leaves_patches(step) else []
    return []
