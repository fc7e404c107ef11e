"""One example of a rule file, bound: the given tensors as a checkpoint, its graph, and, when asked
for, the bytes that come out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..core.diagnostics import Diagnostic, Report, Span, printable
from ..core.errors import MigrateError
from ..core.spec import Spec
from ..ops._op import Loss, ValueOp
from ..planning.compose import Composition, Leg, compose, directed, initial
from ..planning.graph import Tensor, calls
from ..planning.pipeline import Views
from ..planning.question import Question
from ..planning.route import find_route
from ..planning.sides import SideFiles
from ..planning.walk import Walk
from ..rules.examples import RuleTest
from ..rules.files import LoadedFile
from ..rules.neighbours import Neighbour, spared
from ..running.history import Stamp
from ..running.prepare import side_reader
from .source import GivenSource, first_unstorable, given_source, made_source


@dataclass(frozen=True, slots=True)
class RefusedTest:
    """The rules do not take what the test gives them, and why."""

    test: RuleTest
    diagnostics: tuple[Diagnostic, ...]


@dataclass(eq=False, slots=True)
class BoundTest:
    """An example that binds. `allow` is what the test allows, `asked` whether binding had to look
    at values.
    """

    file: LoadedFile
    number: int
    source: GivenSource
    walk: Walk
    composition: Composition
    allow: frozenset[str]
    asked: bool
    _made: dict[str, memoryview] = field(default_factory=dict)

    @property
    def test(self) -> RuleTest:
        return self.file.model.tests[self.number]

    @property
    def legs(self) -> list[Leg]:
        """The edges that were walked, with the params that they were walked with."""
        return [leg for leg, _ in self.composition.legs]

    @property
    def outputs(self) -> Mapping[str, Tensor]:
        return self.composition.graph.outputs

    @property
    def specs(self) -> dict[str, Spec]:
        """What comes out, without bytes."""
        return {key: tensor.spec for key, tensor in self.outputs.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of all that is given and all that comes out."""
        return self.source.index.nbytes + sum(spec.nbytes for spec in self.specs.values())

    def fill(self) -> Mapping[str, memoryview]:
        """The packed bytes of each output, made once; raises what a run would raise (M404,
        M9xx).
        """
        from ..running.buffers import fill

        if not self._made and self.outputs:
            buffers = {key: memoryview(bytearray(t.spec.nbytes)) for key, t in self.outputs.items()}
            fill(self.outputs, self.source, buffers, checks=self.composition.graph.checks)
            self._made.update(buffers)
        return self._made

    def result(self) -> GivenSource:
        """What comes out, as a checkpoint whose bytes are made when they are read."""
        return made_source(self.specs, lambda key: self.fill()[key], self.side_files())

    def side_files(self) -> dict[str, bytes]:
        """The side files that come out."""
        sides = self.walk.sides
        return {
            path: sides.read(path) or b"" for path, _ in sides.listing(self.source.index.side_files)
        }

    def again(self, source: GivenSource, legs: Sequence[Leg]) -> Composition:
        """The composition of these legs, which have their params, over a source; raises its
        problems.
        """
        return bound(source, legs, self.allow, None, prove=False)[0]

    def back(self) -> BoundTest:
        """The way back over what came out, as one that has the stamp would walk it; raises its
        problems.
        """
        source = self.result()
        legs = [
            replace(
                leg,
                start=leg.goal,
                goal=leg.start,
                backwards=not leg.backwards,
                memory={"files": {}, "kept": [], **memory},
            )
            for leg, memory in zip(reversed(self.legs), reversed(self.walk.remembered), strict=True)
        ]
        walk = walk_over(source, self.test.params)
        allow = frozenset(("lossy", "drop"))
        composition, asked = bound(source, legs, allow, walk, prove=False)
        return BoundTest(self.file, self.number, source, walk, composition, allow, asked)

    def scrambled(self) -> BoundTest:
        """The same over bytes that all differ, where no value decides and no op computes; else this
        test itself.
        """
        if self.asked or self.composition.graph.checks or calls(self.outputs.values()):
            return self
        return replace(
            self, source=given_source(self.test.given, self.test.side, scrambled=True), _made={}
        )


def bind_test(
    file: LoadedFile, number: int, neighbours: Sequence[Neighbour] = ()
) -> BoundTest | RefusedTest:
    """Test `number` of the file, bound to its given tensors as a checkpoint would be, or why it
    cannot be.

    `neighbours` are the other files of its edge; those that speak of given keys are bound beside
    it.
    """
    test = file.model.tests[number]
    if found := first_unstorable(test.given):
        return RefusedTest(
            test, (unwritable(test.name, *found, file.span("tests", number, "given", found[0])),)
        )
    source = given_source(test.given, test.side)
    try:
        beside = [
            n.file
            for n in neighbours
            if n.speaks_of(source.index.tensors, backwards=test.backwards)
        ]
        paths = tuple(str(f.path) for f in (file, *beside))
        question = Question(rules=paths, params=dict(test.params), backwards=test.backwards)
        route = find_route(source.index, side_reader(source), Stamp(), question)
        legs = [_about(file, leg) for leg in route.legs]
        allow = _losses(source, legs, route.given) if test.allow is None else frozenset(test.allow)
        walk = walk_over(source, route.given)
        composition, asked = bound(source, legs, allow, walk)
    except MigrateError as error:
        return RefusedTest(test, error.diagnostics)
    return BoundTest(file, number, source, walk, composition, allow, asked)


def unwritable(test: str, key: str, why: str, span: Span) -> Diagnostic:
    """M710: a number of a test that cannot be stored."""
    hint = "write a number that the dtype holds, or give the tensor another dtype"
    return Diagnostic("M710", f"test {test!r}: {printable(key)}: {why}", (span,), (), hint)


def walk_over(source: GivenSource, params: Mapping[str, Any]) -> Walk:
    """A walk whose side files go with it."""
    return Walk(
        params,
        SideFiles(side_reader(source), carried=[f.path for f in source.index.side_files]),
        carried=True,
    )


def _about(file: LoadedFile, leg: Leg) -> Leg:
    """The leg with rules that may match nothing, but for those of the file."""
    return replace(
        leg,
        rules=tuple(
            (rule if rule.loaded.path == file.path else spared(rule), values)
            for rule, values in leg.rules
        ),
    )


def _losses(source: GivenSource, legs: Sequence[Leg], given: Mapping[str, Any]) -> frozenset[str]:
    """What the ops of the rules say they lose, as `--allow` names it."""
    found = set()
    walk, tensors = walk_over(source, given), initial(source.index.tensors, Views())
    for leg in legs:
        for rule in directed(walk.enter(leg, tensors), Report()):
            for step in rule.steps:
                loss = step.op.loss(step.args)
                if loss is Loss.DESTRUCTIVE:
                    found.add("drop")
                if loss is Loss.LOSSY or isinstance(step.op, ValueOp):
                    found.add("lossy")
    return frozenset(found)


def bound(
    source: GivenSource,
    legs: Sequence[Leg],
    allow: frozenset[str],
    walk: Walk | None,
    *,
    prove: bool = True,
) -> tuple[Composition, bool]:
    """The composition over the source, and whether values were looked at; raises its problems."""
    asked = False

    def same_bytes(key: str, present: Tensor, made: Tensor) -> bool:
        nonlocal asked
        from ..running.checks import equal

        asked = True
        return equal(present, made, source)

    def payload(tensor: Tensor) -> bytes:
        nonlocal asked
        from ..running.checks import content

        asked = True
        return content(tensor, source)

    report = Report()
    composition = compose(
        source.index.tensors,
        legs,
        allow,
        same_bytes,
        report,
        programs=True,
        prove=prove,
        walk=walk,
        payload=payload,
    )
    report.check()
    return composition, asked


def rule_behind(bound: BoundTest, key: str) -> Any:
    """The rule that made an output and the keys it made it of (planning.bind.Made); None for a key
    that was kept.
    """
    for _, found in reversed(bound.composition.legs):
        if key in found.made:
            return found.made[key]
    return None
