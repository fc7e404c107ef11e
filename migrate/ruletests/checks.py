"""`migrate test`: the examples of rule files, and what must hold of any rule without being written
down.

An example is bound exactly as a checkpoint is, gathered by the same code, and compared bit for bit.
From its given tensors follow five checks that cost the author nothing: the way back returns the
source, the traced views agree with the eager twins, the order of the rules means nothing, a second
application is refused, and every rule and op was touched. They run on scrambled bytes where no op
computes and nothing asks for values, because a constant hides a wrong permutation.

With `specs` nothing is gathered: names, shapes, dtypes and refusals only, without torch and without
numpy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ..core.diagnostics import Diagnostic, Span, listed, printable
from ..core.errors import MigrateError
from ..core.spelling import option
from ..rules.examples import RuleTest
from . import compare, properties
from .binding import BoundTest, CompiledFile, RefusedTest, bind_test, siblings

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
EXAMPLE, COVERAGE = "example", "coverage"
TWINS = "eager twins"
PROPERTIES = ("round trip", TWINS, "order of rules", "applied twice")


@dataclass(frozen=True, slots=True)
class RuleCheck:
    """Something to find out about a rule file: an example of its author (`number` in the file), or
    a property of all examples.
    """

    kind: str
    name: str
    span: Span
    number: int = -1


@dataclass(frozen=True, slots=True)
class CheckOutcome:
    """What came out. `reason` says why a check was skipped."""

    check: RuleCheck
    status: str
    diagnostics: tuple[Diagnostic, ...] = ()
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        """The outcome as the document of `migrate test` holds it."""
        return {
            "kind": self.check.kind,
            "name": self.check.name,
            "status": self.status,
            "reason": self.reason,
            "diagnostics": [d.to_json() for d in self.diagnostics],
        }


@dataclass(eq=False, slots=True)
class FileChecks:
    """The checks of one rule file; what they share is made once, when it is first asked for."""

    file: CompiledFile
    specs: bool = False
    _tried: dict[int, BoundTest | RefusedTest] = field(default_factory=dict)
    _siblings: list[CompiledFile] | None = None

    def checks(self, select: str = "") -> list[RuleCheck]:
        """The checks whose name, or the file's id, holds `select`, upper and lower case alike.
        Coverage is of the whole file only.
        """
        tests = self.file.model.tests
        found = [
            RuleCheck(EXAMPLE, test.name, self.file.loaded.span("tests", n, "name"), n)
            for n, test in enumerate(tests)
        ]
        whole = self.file.loaded.span("id")
        found += [
            RuleCheck(name, name, whole)
            for name in PROPERTIES
            if tests and not (self.specs and name == TWINS)
        ]
        found.append(RuleCheck(COVERAGE, COVERAGE, whole))
        word = select.casefold()
        return [
            c
            for c in found
            if not word or word in self.file.model.id.casefold() or word in c.name.casefold()
        ]

    def run(self, check: RuleCheck) -> CheckOutcome:
        """The outcome of one check; problems of the rules are part of it and never raised."""
        if check.kind == EXAMPLE:
            return self._example(check)
        if check.kind == COVERAGE:
            found = properties.coverage(
                self.file.loaded, [t for t in self._bound_tests() if not t.test.error]
            )
            return CheckOutcome(check, FAILED if found else PASSED, tuple(found))
        return self._property(check)

    def tried(self, number: int) -> BoundTest | RefusedTest:
        if number not in self._tried:
            if self._siblings is None:
                self._siblings = siblings(self.file)
            self._tried[number] = bind_test(self.file, number, self._siblings)
        return self._tried[number]

    def _bound_tests(self) -> Iterator[BoundTest]:
        for number in range(len(self.file.model.tests)):
            if isinstance(found := self.tried(number), BoundTest):
                yield found

    def _example(self, check: RuleCheck) -> CheckOutcome:
        test, span = self.file.model.tests[check.number], check.span
        result = self.tried(check.number)
        if isinstance(result, RefusedTest) and result.diagnostics[0].code == "M710":
            return CheckOutcome(check, FAILED, result.diagnostics)
        if isinstance(result, BoundTest) and not self.specs:
            if wrong := _too_large(check, result):
                return CheckOutcome(check, FAILED, tuple(wrong))
            try:
                result.fill()
            except MigrateError as error:
                result = RefusedTest(test, error.diagnostics)
        if test.error is not None:
            return _refusal(check, test, result, self.specs)
        if isinstance(result, RefusedTest):
            what = f"test {test.name!r}: the rules refuse what is given"
            codes = ", ".join(dict.fromkeys(d.code for d in result.diagnostics))
            refused = Diagnostic(
                "M704",
                what,
                (span,),
                (f"the reason follows: {codes}",),
                "if that is what the test is about: `error: CODE`",
            )
            return CheckOutcome(check, FAILED, (refused, *result.diagnostics))
        found = compare.compare(result, check.number, values=not self.specs)
        return CheckOutcome(check, FAILED if found else PASSED, tuple(found))

    def _property(self, check: RuleCheck) -> CheckOutcome:
        found: list[Diagnostic] = []
        reasons: dict[str, None] = {}
        looked = False
        for tried in self._bound_tests():
            if tried.test.error is not None:
                continue
            result = _PROPERTIES[check.kind](tried, values=not self.specs)
            if isinstance(result, str):
                reasons[result] = None
            else:
                looked = True
                found += result
        if found:
            return CheckOutcome(check, FAILED, tuple(found))
        more = f" … and {len(reasons) - 1} more" if len(reasons) > 1 else ""
        reason = next(iter(reasons), "") + more
        if not looked:
            return CheckOutcome(check, SKIPPED, reason=reason or "no example gets that far")
        return CheckOutcome(check, PASSED, reason=f"in part: {reason}" if reason else "")


_PROPERTIES = dict(
    zip(
        PROPERTIES,
        (properties.round_trip, properties.twins, properties.order, properties.twice),
        strict=True,
    )
)


def _too_large(check: RuleCheck, result: BoundTest) -> list[Diagnostic]:
    if result.nbytes <= properties.MOST_BYTES:
        return []
    what = (
        f"test {check.name!r}: {result.nbytes} bytes are given and made, a test has at most "
        f"{properties.MOST_BYTES}"
    )
    return [
        Diagnostic(
            "M710",
            what,
            (check.span,),
            (),
            f"smaller shapes show the same; {option('specs', True)} looks at shapes of any size",
        )
    ]


def _refusal(
    check: RuleCheck, test: RuleTest, result: BoundTest | RefusedTest, specs: bool
) -> CheckOutcome:
    """The outcome of a test that expects to be refused."""
    wanted = f"{test.error}" + (f" with {printable(test.contains)!r}" if test.contains else "")
    if isinstance(result, BoundTest):
        if specs:
            return CheckOutcome(check, SKIPPED, reason="headers do not refuse it; values may")
        what = f"test {test.name!r}: {wanted} was expected, and nothing was refused"
        return CheckOutcome(
            check,
            FAILED,
            (Diagnostic("M703", what, (check.span,), (f"made: {listed(list(result.specs), 8)}",)),),
        )
    for found in result.diagnostics:
        said = "\n".join((found.message, *found.notes, found.help or ""))
        if found.code == test.error and (test.contains is None or test.contains in said):
            return CheckOutcome(check, PASSED)
    what = f"test {test.name!r}: {wanted} was expected, and it was refused for something else"
    return CheckOutcome(
        check,
        FAILED,
        (Diagnostic("M703", what, (check.span,), ("its diagnostics follow",)), *result.diagnostics),
    )
