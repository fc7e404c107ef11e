"""What must hold of every rule, found out from the examples it has: no author writes these down.

Each property answers with diagnostics, or the reason why the example says nothing about it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

from ..core.errors import Diagnostic, MigrateError, Report, Span, listed, printable
from ..core.templates import as_seen
from ..planning.compose import Composition
from ..planning.pipeline import Views
from ..planning.stored import untouched_key
from ..rules.compiled import DirectedRule
from ..rules.files import LoadedFile
from ..rules.lineage import Lineage, detect
from ..rules.packs import LAYOUTS
from .binding import BoundTest, GivenSource, rule_behind

# what a comment of a file can allow, as those of lint are allowed
ALLOWABLE = ("M709",)
# bytes of one example; elements that are written down are made one by one
MOST_BYTES = 16 << 20
TOO_LARGE = "the tensors are too large to be made"


def _said(
    bound: BoundTest,
    code: str,
    what: str,
    notes: Sequence[str] = (),
    help: str | None = None,
    *more: Span,
) -> Diagnostic:
    span = bound.file.span("tests", bound.number, "name")
    return Diagnostic(code, f"test {bound.test.name!r}: {what}", (span, *more), tuple(notes), help)


def round_trip(bound: BoundTest, *, values: bool) -> list[Diagnostic] | str:
    """M706 unless the way back returns every given tensor bit for bit, or the edge is not exact."""
    if bound.composition.inexact:
        return f"not exact: {bound.composition.inexact[0]}"
    if not values:
        return []
    if bound.nbytes > MOST_BYTES:
        return TOO_LARGE
    tried = bound.scrambled()
    try:
        back = tried.back()
        found = back.fill()
    except MigrateError as error:
        return [
            _said(
                bound,
                "M706",
                "the downgrade refuses what the upgrade makes",
                ("the reason follows",),
            ),
            *error.diagnostics,
        ]
    out = []
    for key in dict.fromkeys([*tried.source.index.tensors, *found]):
        at = _first_difference(tried.source, key, found.get(key))
        if at is not None:
            by = rule_behind(back, key)
            rule = () if by is None else (by.rule.span,)
            out.append(
                _said(
                    bound,
                    "M706",
                    f"{printable(key)} does not return as it was: {at}",
                    (),
                    None,
                    *rule,
                )
            )
    sides = back.side_files()
    for name, content in bound.source.sides.items():
        if sides.get(name) != content:
            out.append(
                _said(bound, "M706", f"side file {printable(name)} does not return as it was")
            )
    return out[:8]


def _first_difference(source: GivenSource, key: str, returned: memoryview | None) -> str | None:
    if returned is None:
        return "it is not there"
    if key not in source.index.tensors:
        return "it was not there before"
    before, after = source.read_tensor(key), bytes(returned)
    if before == after:
        return None
    byte = next(n for n, (a, b) in enumerate(zip_longest(before, after)) if a != b)
    return f"the first byte that differs is {byte} of {len(before)}"


def twins(bound: BoundTest, *, values: bool) -> list[Diagnostic] | str:
    """M707 where the views that a run gathers and the eager twins of the ops disagree: a fault of
    an op, not of the rules.
    """
    from ..running.verify import recompute

    if bound.nbytes > MOST_BYTES:
        return TOO_LARGE

    tried = bound.scrambled()
    try:
        tried.fill()
    except MigrateError:
        return "the run is refused"
    wrong = [
        m
        for m in recompute(tried.composition.programs, tried.source, tried.result())
        if m.what != "near"
    ]
    out = []
    for found in wrong[:8]:
        at = "" if found.index is None else f", first at {list(found.index)}"
        by = rule_behind(tried, found.key)
        hint = "the op is at fault; `migrate.testing.opkit` tests it alone"
        rule = () if by is None else (by.rule.span,)
        out.append(
            _said(
                bound,
                "M707",
                f"{printable(found.key)} is gathered and recomputed differently: "
                f"{found.detail}{at}",
                (),
                hint,
                *rule,
            )
        )
    return out


def order(bound: BoundTest, *, values: bool) -> list[Diagnostic] | str:
    """M708 if the rules in another order make something else."""
    there = _account(bound.composition)
    for turn in (lambda rules: rules[::-1], lambda rules: (*rules[1:], *rules[:1])):
        steps = [replace(step, rules=turn(step.rules)) for step in bound.steps]
        try:
            again = _account(bound.again(bound.source, steps))
        except MigrateError as error:
            what = "the rules in another order refuse what they took"
            return [_said(bound, "M708", what, ("the reason follows",)), *error.diagnostics]
        if again != there:
            keys = [
                key for key in dict.fromkeys([*there, *again]) if there.get(key) != again.get(key)
            ]
            return [_said(bound, "M708", f"the order of the rules changes {listed(keys, 8)}")]
    return []


def _account(composition: Composition) -> dict[str, Any]:
    """Each output with its spec and program: equal where the same is made of the same."""
    return {
        key: (tensor.spec, composition.programs.get(key))
        for key, tensor in composition.graph.outputs.items()
    }


def twice(bound: BoundTest, *, values: bool) -> list[Diagnostic] | str:
    """M709 if the edge takes its own output and changes it again.

    A file in the folder of a lineage is safe by the stamp of what it makes; there only detection is
    looked at, which is what decides where the stamp was lost. Another one may say that it is so.
    """
    if bound.steps[0].start == bound.steps[-1].goal:
        return "the edge leads to the layout that it begins in"
    source = bound.result()
    try:
        again = bound.again(source, bound.steps)
    except MigrateError:
        return []
    views = Views()
    changed = [
        key
        for key, tensor in again.graph.outputs.items()
        if untouched_key(tensor, source.index.tensors, views) != key
    ]
    changed += [key for key in bound.outputs if key not in again.graph.outputs]
    if not changed:
        return []
    lineage = _lineage(bound.file)
    if lineage is None:
        if _allows(bound.file, "M709"):
            return "the file allows M709: it takes its own output, and changes it again"
        hint = (
            "make the patterns narrower, or put the file into the folder of a lineage: a stamp "
            "then says where a checkpoint is"
        )
        notes = (f"changed again: {listed(changed, 8)}",)
        return [
            _said(bound, "M709", "the edge takes its own output and changes it again", notes, hint)
        ]
    if lineage.ordered:
        start, goal = bound.steps[0].start, bound.steps[-1].goal
        findings = {
            f.layout: f
            for f in detect(lineage, source.index, lambda name: bound.side_files().get(name))
        }
        if (
            start in findings
            and findings[start].holds
            and not (goal in findings and findings[goal].holds)
        ):
            what = (
                f"without its stamp the output counts as {lineage.name}@{start}, and the edge "
                "would change it again"
            )
            return [
                _said(
                    bound,
                    "M709",
                    what,
                    tuple(findings[start].evidence),
                    f"narrow `detect` of {start} in {LAYOUTS}",
                )
            ]
    return []


def _allows(file: LoadedFile, code: str) -> bool:
    """Whether a comment of the file allows what a check finds, and says why."""
    return any(
        not file.document.is_text(number, found.start() + 1)
        for number, line in enumerate(file.document.lines, 1)
        for found in re.finditer(rf"(?<!\S)#\s*migrate:\s*allow\s+{code}\s+because\s+\S", line)
    )


def _lineage(file: LoadedFile) -> Lineage | None:
    """The lineage whose folder the file lies in."""
    from ..rules.layouts import load_layouts

    for folder in list(file.path.resolve().parents)[:2]:
        if (folder / LAYOUTS).is_file():
            return load_layouts(folder / LAYOUTS, Report())
    return None


def coverage(file: LoadedFile, tests: Iterable[BoundTest]) -> list[Diagnostic]:
    """M705 for each rule that no example touches, and each op whose `only` skips all of them."""
    seen: dict[str, set[int]] = {}
    for bound in tests:
        for _, found in bound.composition.steps:
            used = [(m.rule, m.keys) for m in found.provenance.values()]
            used += [
                (rule, (key,))
                for part in (found.dropped, found.redundant)
                for key, rule in part.items()
            ]
            for walked, keys in used:
                # a neighbour's rule may have the same name
                if walked.file != str(file.path):
                    continue
                _touch(walked, keys, seen.setdefault(walked.name, set()))
    if not file.model.tests:
        what = f"{file.model.id} has no tests"
        return [
            Diagnostic(
                "M705",
                what,
                (file.span("id"),),
                (),
                "write `tests:`, with given and expected tensors",
            )
        ]
    out = []
    for number, rule in enumerate(file.model.rules):
        if rule.may_be_idle and rule.name not in seen:
            continue
        if rule.name not in seen:
            what = f"no test of {file.model.id} touches rule {rule.name!r}"
            out.append(
                Diagnostic(
                    "M705",
                    what,
                    (file.span("rules", number, "name"),),
                    (),
                    "give one a tensor that the rule takes",
                )
            )
            continue
        for at, step in enumerate(rule.via):
            if at not in seen[rule.name]:
                what = f"no test of {file.model.id} touches `{step.op}` of rule {rule.name!r}"
                place = file.key_span("rules", number, "via", at, step.op)
                out.append(
                    Diagnostic(
                        "M705", what, (place,), (), "give one a tensor that passes its `only`"
                    )
                )
    return out


def _touch(rule: DirectedRule, keys: Iterable[str], ops: set[int]) -> None:
    """Adds the ops, by their place in `via`, that what was made of `keys` went through."""
    last = len(rule.steps) - 1
    for number, step in enumerate(rule.steps):
        place = last - number if rule.backwards else number
        if place not in ops and (
            not step.only or any(_passes(rule, step.only, key) for key in keys)
        ):
            ops.add(place)


def _passes(rule: DirectedRule, only: Any, key: str) -> bool:
    for side in rule.reads:
        if (
            side.pattern.has_flat
            or (values := side.pattern.match(as_seen(side.pattern, key))) is None
        ):
            continue
        found = dict(zip(side.pattern.captures, values, strict=True))
        found.update({n: undo(found[n]) for n, undo in side.undo.items() if n in found})
        # a role, or a capture that another op makes on the way, is not in the key
        if all(
            n not in found or str(found[n]) in [str(w) for w in wanted]
            for n, wanted in only.items()
        ):
            return True
    return False
