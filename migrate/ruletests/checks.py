"""`migrate test`: the examples of rule files, and what must hold of any rule.

An example is bound exactly as a checkpoint is, gathered by the same code, and compared with what it
says: every key that rules make, dtype, shape, and each element bit for bit. A NaN that is written
stands for any NaN; with `rtol` numbers are compared instead of bits.

From its given tensors follow five checks that cost the author nothing: the way back returns the
source, the traced views agree with the eager twins, the order of the rules means nothing, a second
application is refused, and every rule and op was touched. They run on scrambled bytes where no op
computes and nothing asks for values, because a constant hides a wrong permutation.

With `specs` nothing is gathered: names, shapes, dtypes and refusals only, without torch and numpy.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from ..core.errors import Diagnostic, MigrateError, Span, did_you_mean, listed, option, printable
from ..core.spec import BITS, Spec, coordinates, spec
from ..elements.codes import Number, code_at, is_close, number_of
from ..rules.examples import ExpectedTensor, RuleTest, expand, fill_in, flat, indexes, shape_of
from . import properties
from .binding import (
    BoundTest,
    CompiledFile,
    RefusedTest,
    bind_test,
    packed,
    require_held,
    rule_behind,
    siblings,
    side_bytes,
    unwritable,
)
from .binding import elements as encoded

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
EXAMPLE, COVERAGE = "example", "coverage"
TWINS, TWICE = "eager twins", "applied twice"
PROPERTIES = ("round trip", TWINS, "order of rules", TWICE)


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
    """The checks of one rule file; what they share is made once, when it is first asked for. Files
    of its folder that are among those `loaded` are not read again.
    """

    file: CompiledFile
    specs: bool = False
    loaded: Sequence[CompiledFile] = ()
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
                self._siblings = siblings(self.file, self.loaded)
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
        found = compare(result, check.number, values=not self.specs)
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
        f"test {check.name!r}: {result.nbytes} bytes are given and made; a test may have at most "
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


def compare(bound: BoundTest, number: int, *, values: bool) -> list[Diagnostic]:
    """What differs from what the test expects: M702 keys, M701 tensors, M711 side files; without
    `values` names, dtypes and shapes only.
    """
    file, test = bound.file, bound.test
    out: list[Diagnostic] = []
    wanted: dict[str, tuple[ExpectedTensor, str, dict[str, int]]] = {}
    for written, expected in (test.expect or {}).items():
        wanted.update((key, (expected, written, at)) for key, at in expand(written))
    specs = bound.specs
    for key, (expected, written, at) in wanted.items():
        place = file.document.key_span(("tests", number, "expect", written))
        if key not in specs:
            unnamed = [k for k in specs if k not in wanted]
            hint = did_you_mean(key, unnamed)
            said = (
                f"made and not expected: {listed(unnamed, 8)}"
                if unnamed
                else f"made: {listed(list(specs), 8)}"
            )
            out.append(
                Diagnostic(
                    "M702",
                    f"test {test.name!r}: {printable(key)} is not made",
                    (place,),
                    (said,),
                    hint,
                )
            )
            continue
        out += _tensor(bound, key, expected, written, at, place, values)
    extra = [key for key in specs if key not in wanted and rule_behind(bound, key) is not None]
    if extra and test.expect is not None:
        place = file.document.key_span(("tests", number, "expect"))
        notes = tuple(f"{printable(k)}  {specs[k]}" for k in extra[:8])
        what = (
            f"test {test.name!r}: {len(extra)} key{'s come' if len(extra) > 1 else ' comes'} "
            "out that `expect` does not name"
        )
        rules = tuple(dict.fromkeys(rule_behind(bound, k).rule.span for k in extra))
        out.append(
            Diagnostic(
                "M702",
                what,
                (place, *rules[:2]),
                notes,
                "name every key that a rule makes; keys that are kept may be left out",
            )
        )
    return out + list(_side(bound, number))


def _tensor(
    bound: BoundTest,
    key: str,
    expected: ExpectedTensor,
    entry: str,
    at: dict[str, int],
    place: Span,
    values: bool,
) -> list[Diagnostic]:
    """What differs in one tensor that comes out; `entry` is the key as the test writes it, with
    these values of its ranges.
    """
    made, name = bound.specs[key], bound.test.name
    by = rule_behind(bound, key)
    spans = (place,) if by is None else (place, by.rule.span)
    origin = (
        "kept as it was"
        if by is None
        else f"rule {by.rule.name!r} makes it of {listed(list(by.keys), 4)}"
    )
    like = None if expected.same_as is None else fill_in(expected.same_as, at)
    said = _said(bound, expected, like, made)
    if said != made:
        unlike = (f"- expected  {said}", f"+ made      {made}", origin)
        return [
            Diagnostic(
                "M701", f"test {name!r}: {printable(key)} is not what is expected", spans, unlike
            )
        ]
    for written, numbers in expected.slices.items():
        if why := _misplaced(written, numbers, made.shape):
            here = bound.file.document.key_span(
                ("tests", bound.number, "expect", entry, "slices", written)
            )
            return [
                Diagnostic(
                    "M701",
                    f"test {name!r}: {printable(key)} is not what is expected: {why}",
                    (here, *spans[1:]),
                    (origin,),
                )
            ]
    try:
        require_held(made, expected.fill, expected.values)
        for numbers in expected.slices.values():
            require_held(made, 0, numbers)
    except ValueError as error:
        return [unwritable(name, key, str(error), place)]
    if not values:
        return []
    there = bound.fill()[key]
    out = []
    for start, shape, want in _pieces(bound, expected, like, made):
        differ = _differing(made, there, start, want, expected.rtol)
        if not differ:
            continue
        index = coordinates(start + differ[0], made.shape)
        got, wish = (
            number_of(made.dtype, code_at(made.dtype, raw, n))
            for raw, n in ((there, start + differ[0]), (want, differ[0]))
        )
        notes = (f"{len(differ)} of {prod(shape)} elements that are written differ", origin)
        what = (
            f"test {name!r}: {printable(key)}{list(index)} is {_spell_number(got, made)}, expected "
            f"{_spell_number(wish, made)}"
        )
        out.append(Diagnostic("M701", what, spans, notes))
        break
    return out


def _said(bound: BoundTest, expected: ExpectedTensor, like: str | None, made: Spec) -> Spec:
    """The spec that the test says; what it leaves open is as it came out."""
    shape, dtype = expected.shape, expected.dtype
    if shape is None and expected.values is not None:
        shape = shape_of(expected.values)
    if like is not None:
        source = bound.source.index.tensors[like].spec
        shape, dtype = (
            source.shape if shape is None else shape,
            source.dtype if dtype is None else dtype,
        )
    return spec(dtype or made.dtype, made.shape if shape is None else shape)


def _misplaced(written: str, numbers: Any, shape: tuple[int, ...]) -> str:
    """Why a tensor of the shape has no such slice; "" if it has."""
    at = indexes(written)
    if len(at) > len(shape):
        return (
            f"slice {written!r} has {len(at)} indexes, the shape {list(shape)} has "
            f"{len(shape)} axes"
        )
    if any(not -length <= position < length for position, length in zip(at, shape, strict=False)):
        return f"slice {written!r} is outside of {list(shape)}"
    rest = shape[len(at) :]
    if isinstance(numbers, list) and shape_of(numbers) != rest:
        return (
            f"slice {written!r} has the shape {list(rest)}, the lists have "
            f"{list(shape_of(numbers))}"
        )
    return ""


def _pieces(
    bound: BoundTest, expected: ExpectedTensor, like: str | None, made: Spec
) -> Iterator[tuple[int, tuple[int, ...], bytes]]:
    """(first element, shape, bytes) of what is written of the tensor."""
    if like is not None:
        yield 0, made.shape, bound.source.read_tensor(like)
    elif expected.values is not None or expected.fill is not None:
        yield 0, made.shape, encoded(made, expected.fill, expected.values)
    for written, numbers in expected.slices.items():
        start, rest = 0, made.shape
        for position in indexes(written):
            length, rest = rest[0], rest[1:]
            start += (position % length) * prod(rest)
        if isinstance(numbers, list):
            yield start, rest, packed(made.dtype, flat(numbers))
        else:
            yield start, rest, encoded(spec(made.dtype, rest), numbers, None)


def _differing(
    of: Spec, there: memoryview, start: int, want: bytes, rtol: float | None
) -> list[int]:
    """The numbers of the elements of `want` that the tensor does not have from `start` on."""
    count = of.numel if start == 0 and len(want) == of.nbytes else len(want) * 8 // BITS[of.dtype]
    if start == 0 and count == of.numel and bytes(there) == want:
        return []
    out = []
    for n in range(min(count, of.numel - start)):
        code, wish = code_at(of.dtype, there, start + n), code_at(of.dtype, want, n)
        if code != wish and not is_close(
            number_of(of.dtype, code), number_of(of.dtype, wish), rtol
        ):
            out.append(n)
    return out


def _spell_number(number: Number, of: Spec) -> str:
    if isinstance(number, float) and number.is_integer() and abs(number) < 1e15:
        return "-0.0" if str(number) == "-0.0" else str(int(number))
    return f"{number:.9g}" if of.dtype == "float32" and isinstance(number, float) else repr(number)


def _side(bound: BoundTest, number: int) -> Iterator[Diagnostic]:
    """M711 for side files that are not what is expected, and for those that changed although the
    test does not name them.
    """
    test, file = bound.test, bound.file
    there = bound.side_files()
    for name, content in test.expect_side.items():
        place = file.document.key_span(("tests", number, "expect_side", name))
        if content is None or name not in there:
            if (name in there) is (content is None):
                is_it = "is made" if content is None else "is not made"
                what = f"test {test.name!r}: side file {printable(name)} {is_it}"
                yield Diagnostic("M711", what, (place,))
        elif lines := _unlike(there[name], content):
            yield Diagnostic(
                "M711",
                f"test {test.name!r}: side file {printable(name)} is not what is expected",
                (place,),
                tuple(lines),
            )
    for name, content in test.side.items():
        if name not in test.expect_side and there.get(name) != side_bytes(content):
            place = file.document.key_span(("tests", number, "side", name))
            hint = "write what becomes of it in `expect_side`"
            yield Diagnostic(
                "M711",
                f"test {test.name!r}: side file {printable(name)} changes unexpectedly",
                (place,),
                (),
                hint,
            )


def _unlike(there: bytes, wanted: Any) -> list[str]:
    """The lines in which a side file differs; JSON is compared as values."""
    if isinstance(wanted, str):
        return (
            []
            if there == wanted.encode()
            else [
                f"- expected  {printable(wanted)}",
                f"+ made      {printable(there.decode(errors='replace'))}",
            ]
        )
    try:
        found = json.loads(there)
    except ValueError as error:
        return [f"it is not JSON: {error}"]
    one, other = (
        json.dumps(value, indent=1, sort_keys=True).splitlines() for value in (wanted, found)
    )
    if one == other:
        return []
    import difflib

    return [
        printable(line)
        for line in difflib.unified_diff(one, other, "expected", "made", lineterm="", n=1)
    ][2:22]
