"""A rule file's own tests bound to its rules, on headers alone, and which elements of the outputs they state.

An element of an output is what the test put into it: a number, or for a computed element a token that stands for the op
and the elements it was computed from. Two outputs that have equal elements where a test looks are the same to that test.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

from .. import ops
from ..core.diagnostics import Report
from ..core.errors import MigrateError, OpError
from ..core.spec import spec
from ..core.view import Fill
from ..ops._op import ValueOp
from ..planning.bind import Bound, Questions, bind
from ..planning.compose import Leg, directed
from ..planning.graph import Call, Tensor, Value
from ..planning.pipeline import Views
from ..planning.sides import SideFiles
from ..planning.walk import Walk
from ..rules.compiled import DirectedRule
from ..rules.examples import GivenTensor, RuleTest, expand, flat, indexes, shape_of
from ..rules.neighbours import Neighbour, neighbour
from ._lint import Written

# a larger tensor of a test is not looked into
MOST_ELEMENTS = 1 << 16


@dataclass(frozen=True, eq=False, slots=True)
class Example:
    """One test of a file, bound. `problems` say why it could not be."""

    test: RuleTest
    number: int
    rules: tuple[DirectedRule, ...]
    given: Mapping[str, Tensor]
    numbers: Mapping[str, Sequence[Any]]
    bound: Bound
    problems: Report

    def keys_of(self, rule: DirectedRule) -> list[str]:
        """The given keys that the rule made something of."""
        found = dict.fromkeys(k for made in self.bound.made.values() if made.rule is rule for k in made.keys)
        return [*found, *(k for k, by in (*self.bound.dropped.items(), *self.bound.redundant.items()) if by is rule)]

    def stated(self, key: str) -> list[int] | None:
        """The elements of an output that the test states, by linear index; None where it does not name the key."""
        wanted = next((w for written, w in (self.test.expect or {}).items() if key in _keys(written)), None)
        tensor = self.bound.tensors.get(key)
        if wanted is None or tensor is None:
            return None
        shape = tensor.spec.shape
        if wanted.values is not None or wanted.fill is not None or wanted.same_as is not None:
            return list(range(prod(shape)))
        out: list[int] = []
        for written in wanted.slices:
            at = indexes(written)
            inner = prod(shape[len(at) :])
            start = 0
            for index, length in zip(at, shape, strict=False):
                start = start * length + index % max(1, length)
            out += range(start * inner, (start + 1) * inner)
        return out

    def elements(self, tensor: Tensor) -> list[Any]:
        """What each element of a tensor is made of, in linear order."""
        out: list[Any] = [None] * prod(tensor.spec.shape)
        for leaf, src, dst, counts, dst_strides, src_strides in tensor.view.pieces:
            if isinstance(leaf, Fill):
                source: Sequence[Any] = ()
            else:
                owner = tensor.sources[leaf]
                source = _computed(self, owner) if isinstance(owner, Value) else self.numbers[owner]
            for loops in product(*map(range, counts)):
                to = dst + sum(i * d for i, d in zip(loops, dst_strides, strict=True))
                at = src + sum(i * s for i, s in zip(loops, src_strides, strict=True))
                out[to] = leaf.value if isinstance(leaf, Fill) else source[at]
        return out


def examples(file: Written, siblings: Sequence[Written] = ()) -> list[Example]:
    """The file's tests, bound, beside those `siblings` of its edge that speak of what they give; without those that expect an error."""
    out = []
    others = [neighbour(s.loaded, s.rules, s.keep) for s in siblings if s is not file]
    for number, test in enumerate(file.model.tests):
        if test.error is None:
            out.append(_example(file, number, test, others))
    return out


def rerun(example: Example, rule: DirectedRule, keys: Sequence[str]) -> Bound | None:
    """The rule alone on these keys; None where it cannot take them."""
    report = Report()
    try:
        bound = bind([rule], (), {k: example.given[k] for k in keys}, Views(), Questions(_equal, True), report)
    except (MigrateError, OpError, ValueError):
        return None
    return None if report.has_errors() else bound


def _equal(key: str, present: Tensor, made: Tensor) -> bool:
    return True


def _example(file: Written, number: int, test: RuleTest, others: Sequence[Neighbour]) -> Example:
    report, views = Report(), Views()
    given: dict[str, Tensor] = {}
    numbers: dict[str, Sequence[Any]] = {}
    for written, tensor in test.given.items():
        shape = tuple(tensor.shape if tensor.shape is not None else shape_of(tensor.values))
        for key in _keys(written):
            given[key] = Tensor(spec(tensor.dtype, shape), views.stored(shape), (key,))
            numbers[key] = _numbers(tensor, prod(shape))
    bound, rules = Bound(), tuple[DirectedRule, ...]()
    if any(len(n) > MOST_ELEMENTS for n in numbers.values()):
        return Example(test, number, rules, given, numbers, bound, report)
    try:
        model = file.model
        ends = model.edge[::-1] if test.backwards else model.edge
        beside = [other for other in others if other.speaks_of(given, backwards=test.backwards)]
        compiled = (*file.rules, *(rule for other in beside for rule in other.rules))
        keep = (*file.keep, *(p for other in beside for p in other.keep))
        leg = Leg(
            model.lineage,
            *ends,
            test.backwards,
            tuple((rule, {}) for rule in compiled),
            keep,
            (file.loaded, *(other.file for other in beside)),
        )
        leg = Walk(test.params, SideFiles(_reader(test)), carried=True).enter(leg, given)
        rules = tuple(directed(leg, report))
        if not report.has_errors():
            bound = bind(rules, keep, given, views, Questions(_equal, True), report)
    except MigrateError as error:
        report.diagnostics += error.diagnostics
    return Example(test, number, rules, given, numbers, bound, report)


def _reader(test: RuleTest) -> Callable[[str], bytes | None]:
    written = {name: (content if isinstance(content, str) else json.dumps(content)).encode() for name, content in test.side.items()}
    return written.get


def _keys(written: str) -> list[str]:
    try:
        return [key for key, _ in expand(written)]
    except ValueError:
        return [written]


def _numbers(tensor: GivenTensor, count: int) -> Sequence[Any]:
    if tensor.values is not None:
        return list(flat(tensor.values))
    if tensor.fill == "iota":
        return range(count)
    return [0 if tensor.fill is None else tensor.fill] * count


def _computed(example: Example, value: Value) -> list[Any]:
    """A token for each element of a computed tensor: equal tokens are surely equal elements."""
    call, op = value.call, ops.get(value.call.step.op)
    inputs = [example.elements(t) for t in call.inputs]
    shape = value.spec.shape
    what = (call.step.op, repr(call.step.args), value.output)
    return [(*what, *_needed(op, call, value.output, shape, inputs, index)) for index in product(*map(range, shape))]


def _needed(
    op: Any, call: Call, output: int, shape: Sequence[int], inputs: Sequence[Sequence[Any]], index: tuple[int, ...]
) -> Iterator[Any]:
    """The input elements that one element is computed from; the one at its own place where an input has its shape."""
    at = 0
    for i, length in zip(index, shape, strict=True):
        at = at * length + i
    specs = [t.spec for t in call.inputs]
    boxes = op.needs(call.step.args, specs, output, tuple((i, i + 1) for i in index)) if isinstance(op, ValueOp) else None
    for number, elements in enumerate(inputs):
        size = specs[number].shape
        if tuple(size) == tuple(shape):
            yield elements[at]
        elif boxes is None or prod(b - a for a, b in boxes[number]) > 64:
            yield at
        else:
            cells = product(*(range(a, b) for a, b in boxes[number]))
            yield tuple(elements[_linear(cell, size)] for cell in cells)


def _linear(cell: Sequence[int], shape: Sequence[int]) -> int:
    at = 0
    for i, length in zip(cell, shape, strict=True):
        at = at * length + i
    return at
