"""`shape-invisible`: an op whose effect no test of the file would notice, because the shapes come
out alike without it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

from ..core.diagnostics import Diagnostic
from ..rules.compiled import CompiledRule, DirectedRule
from ..ruletests.binding import CompiledFile
from .elements import MOST_ELEMENTS, Example, examples, rerun, states, takes
from .inputs import FileSet, directed
from .mutants import mutants

# a test, a rule as the test has it, and the given keys that the rule made something of
_Touching = tuple[Example, DirectedRule, list[str]]


def find_problems(fileset: FileSet) -> Iterator[Diagnostic]:
    """M620 and M623 for ops, M621 for tests that the rules cannot take, M622 for rules that no test
    touches.
    """
    edges = fileset.edges
    for file in fileset.files:
        tests = examples(file, edges[file.edge])
        yield from _unbound(file, tests)
        forwards = {id(rule): made for rule, made in directed(file)}
        for rule in file.rules:
            yield from _rule(file, rule, forwards.get(id(rule)), tests)


def _unbound(file: CompiledFile, tests: Sequence[Example]) -> Iterator[Diagnostic]:
    for example in tests:
        for problem in example.problems.diagnostics:
            if problem.severity == "error":
                span = file.loaded.span("tests", example.number, "name")
                yield Diagnostic(
                    "M621",
                    f"the rules do not take what this test gives: {problem.message}",
                    (span, *problem.spans[:1]),
                    problem.notes,
                    problem.help,
                )
                break


def _rule(
    file: CompiledFile, rule: CompiledRule, forwards: DirectedRule | None, tests: Sequence[Example]
) -> Iterator[Diagnostic]:
    name = rule.rule.name
    own = [
        (e, mine)
        for e in tests
        for mine in e.rules
        if (mine.file, mine.name) == (str(file.loaded.path), name)
    ]
    touching = [(e, mine, keys) for e, mine in own if (keys := e.keys_of(mine))]
    if not touching and any(e.problems.has_errors() for e in tests):
        return
    # as a test has it; the params of a rule that none touches are samples
    shown = next((mine for e, mine, _ in touching if not e.test.backwards), forwards)
    invisible = (
        []
        if shown is None
        else [
            d
            for number in range(len(shown.steps))
            for d in _step(file, rule, shown, number, touching)
        ]
    )
    yield from invisible
    if not touching and not invisible:
        yield Diagnostic(
            "M622",
            f"no test touches rule `{name}`",
            (file.span(rule),),
            (),
            "give a test a key that the rule takes, and expect what it makes",
        )


def _step(
    file: CompiledFile,
    rule: CompiledRule,
    shown: DirectedRule,
    number: int,
    touching: Sequence[_Touching],
) -> Iterator[Diagnostic]:
    """M620 for the first near mistake of the step that no test notices; M623 where of one it is not
    known.
    """
    step = shown.steps[number]
    span = file.span(rule, "via", number, step.name)
    derived = not isinstance(rule.rule.via[number].args.get("shift", 0), int)
    doubt: str | None = None
    for which, mutant in enumerate(mutants(shown, step, derived=derived)):
        seen = [_seen(e, mine, keys, number, which, derived) for e, mine, keys in touching]
        if any(seen) or (mutant.shown and all(e.test.backwards for e, _, _ in touching)):
            continue
        if None in seen:
            doubt = doubt or touching[seen.index(None)][0].test.name
            continue
        who = "no test of this file" if touching else "no test takes this rule, so none"
        what = f"rule `{rule.rule.name}`: {who} would notice if {step.name} {mutant.what}"
        hint = (
            "add a test that gives tensors which differ, and whose `expect` has `values` or "
            "`slices` of a key that this rule makes"
        )
        yield Diagnostic("M620", what, (span,), (), hint)
        return
    if doubt is not None:
        what = (
            f"rule `{rule.rule.name}`: whether a near mistake of {step.name} would be noticed "
            f"is not known, so much does `{doubt}` state"
        )
        notes = (f"of more than {MOST_ELEMENTS:,} elements only some are compared",)
        yield Diagnostic("M623", what, (span,), notes, "smaller tensors show the same")


def _seen(
    example: Example,
    rule: DirectedRule,
    keys: Sequence[str],
    number: int,
    which: int,
    derived: bool,
) -> bool | None:
    """Whether the test would fail with a mutant of the rule's step in its place; None: it states
    too much to be sure.

    A test of the way back does not see the step. The mutant is made anew, because the params of the
    test have their say in it.
    """
    if example.test.backwards:
        return False
    made = [key for key, by in example.bound.provenance.items() if by.rule is rule]
    mutant = next(islice(mutants(rule, rule.steps[number], derived=derived), which, None), None)
    if mutant is None:
        return False
    if mutant.step is None:
        return any(states(example, key) for key in made)
    steps = (*rule.steps[:number], mutant.step, *rule.steps[number + 1 :])
    other = rerun(example, replace(rule, steps=steps), keys)
    if other is None or (
        example.test.expect is not None
        and not other.provenance.keys() <= example.bound.tensors.keys()
    ):
        return True
    taken = [takes(example, key, other.tensors.get(key)) for key in made]
    return True if False in taken else None if None in taken else False
