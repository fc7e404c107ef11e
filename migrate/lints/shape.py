"""`shape-invisible`: an op whose effect no test of the file would notice, because the shapes come out alike without it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ..core.diagnostics import Diagnostic
from ..planning.graph import Tensor
from ..rules.compiled import CompiledRule, DirectedRule
from ._bound import Example, examples, rerun
from ._lint import Shelf, Written, directed
from ._mutants import Mutant, mutants


def find(shelf: Shelf) -> Iterator[Diagnostic]:
    """M620 for ops, M621 for tests that the rules cannot take, M622 for rules that no test touches."""
    edges = shelf.edges
    for file in shelf.files:
        tests = examples(file, edges[file.edge])
        yield from _unbound(file, tests)
        for rule, forwards in directed(file):
            yield from _rule(file, rule, forwards, tests)


def _unbound(file: Written, tests: Sequence[Example]) -> Iterator[Diagnostic]:
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


def _rule(file: Written, rule: CompiledRule, forwards: DirectedRule, tests: Sequence[Example]) -> Iterator[Diagnostic]:
    name = rule.rule.name
    own = [(e, mine) for e in tests for mine in e.rules if (mine.file, mine.name) == (str(file.loaded.path), name)]
    touching = [(e, mine, keys) for e, mine in own if (keys := e.keys_of(mine))]
    if not touching and any(e.problems.has_errors() for e in tests):
        return
    silent = True
    for number, step in enumerate(forwards.steps):
        unseen = next((m for m in mutants(forwards, step) if not any(_seen(e, own, keys, number, m) for e, own, keys in touching)), None)
        if unseen is None:
            continue
        silent = False
        who = "no test of this file" if touching else "no test takes this rule, so none"
        yield Diagnostic(
            "M620",
            f"rule `{name}`: {who} would notice if {step.name} {unseen.what}",
            (file.span(rule, "via", number, step.name),),
            (),
            "add a test that gives tensors which differ, and whose `expect` has `values` or `slices` of a key that this rule makes",
        )
    if not touching and silent:
        yield Diagnostic(
            "M622",
            f"no test touches rule `{name}`",
            (file.span(rule),),
            (),
            "give a test a key that the rule takes, and expect what it makes",
        )


def _seen(example: Example, rule: DirectedRule, keys: Sequence[str], number: int, mutant: Mutant) -> bool:
    """Whether the test would fail with the mutant in the place of the rule's step. One of the way back does not see the step."""
    if example.test.backwards:
        return False
    made = [key for key, by in example.bound.made.items() if by.rule is rule]
    if mutant.step is None:
        return any(example.stated(key) for key in made)
    # the mutant was made with sample params; what it does to the step does not depend on them
    step = next((m.step for m in mutants(rule, rule.steps[number]) if m.what == mutant.what), mutant.step)
    if step is None:
        return False
    steps = (*rule.steps[:number], step, *rule.steps[number + 1 :])
    other = rerun(example, replace(rule, steps=steps), keys)
    if other is None:
        return True
    return any(_differs(example, key, other.tensors.get(key)) for key in made)


def _differs(example: Example, key: str, other: Tensor | None) -> bool:
    stated = example.stated(key)
    right = example.bound.tensors[key]
    if stated is None:
        return False
    if other is None or other.spec != right.spec:
        return True
    if not stated:
        return False
    ours, theirs = example.elements(right), example.elements(other)
    return any(ours[at] != theirs[at] for at in stated)
