"""A rule file's own tests bound to its rules, on headers alone, and what each element of the
outputs is made of.

An element of an output is what the test put into it: the code of a number, or for a computed
element a token that stands for the op and the elements it was computed from. Two outputs that have
equal elements where a test looks are the same to that test.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from math import prod
from typing import Any

from .. import ops
from ..core.diagnostics import Report
from ..core.elements import code
from ..core.errors import MigrateError, OpError
from ..core.spec import spec
from ..core.view import Fill, Leaf, clip
from ..ops._op import ValueOp
from ..planning.bind import Bound, Questions, bind
from ..planning.compose import Leg, directed
from ..planning.graph import Call, Tensor, Value
from ..planning.pipeline import Views
from ..planning.sides import SideFiles
from ..planning.walk import Walk
from ..rules.compiled import DirectedRule
from ..rules.examples import ExpectedTensor, GivenTensor, RuleTest, expand, fill_in, flat, shape_of
from ..rules.neighbours import Neighbour, neighbour
from .inputs import CompiledFile

# of a larger tensor single elements are looked up
MOST_ELEMENTS = 1 << 16


@dataclass(frozen=True, eq=False, slots=True)
class Example:
    """One test of a file, bound. `problems` say why it could not be."""

    test: RuleTest
    number: int
    rules: tuple[DirectedRule, ...]
    given: Mapping[str, Tensor]
    tensors: Mapping[str, GivenTensor]
    # the element of a given tensor at a linear index, see `code_of`
    codes: Mapping[str, Callable[[int], Any]]
    # what the test says of an output, with the given key that it is `same_as`
    expected: Mapping[str, tuple[ExpectedTensor, str | None]]
    bound: Bound
    problems: Report
    # whether the test passes as it is, by output; filled when it is asked
    passes: dict[str, bool] = field(default_factory=dict)

    def keys_of(self, rule: DirectedRule) -> list[str]:
        """The given keys that the rule made something of."""
        found = dict.fromkeys(
            k for made in self.bound.made.values() if made.rule is rule for k in made.keys
        )
        return [
            *found,
            *(
                k
                for k, by in (*self.bound.dropped.items(), *self.bound.redundant.items())
                if by is rule
            ),
        ]


class Elements:
    """The elements of an example's tensors, read one by one or, of a small tensor, all at once."""

    def __init__(self, example: Example) -> None:
        self.example = example
        # the tensor is kept beside its elements: an id means nothing after its object is gone
        self._read: dict[int, tuple[Tensor, Sequence[Any]]] = {}

    def at(self, tensor: Tensor, at: int) -> Any:
        """What element `at`, in linear order, is made of."""
        if prod(tensor.spec.shape) <= MOST_ELEMENTS:
            return self._all(tensor)[at]
        leaf, src = clip(tensor.view, at, at + 1)[0][:2]
        return self._source(tensor, leaf)(src)

    def _all(self, tensor: Tensor) -> Sequence[Any]:
        found = self._read.get(id(tensor))
        if found is None:
            out: list[Any] = [None] * prod(tensor.spec.shape)
            for leaf, src, dst, counts, dst_strides, src_strides in tensor.view.pieces:
                source = self._source(tensor, leaf)
                for loops in product(*map(range, counts)):
                    to = dst + sum(i * d for i, d in zip(loops, dst_strides, strict=True))
                    out[to] = source(
                        src + sum(i * s for i, s in zip(loops, src_strides, strict=True))
                    )
            found = self._read[id(tensor)] = tensor, out
        return found[1]

    def _source(self, tensor: Tensor, leaf: Leaf) -> Callable[[int], Any]:
        if isinstance(leaf, Fill):
            number = code_of(tensor.spec.dtype, leaf.value)
            return lambda at: number
        owner = tensor.sources[leaf]
        return (
            partial(self._token, owner) if isinstance(owner, Value) else self.example.codes[owner]
        )

    def _token(self, value: Value, at: int) -> Any:
        """A token for one element of a computed tensor: equal tokens are surely equal elements."""
        call, op = value.call, ops.get(value.call.step.op)
        return (
            call.step.op,
            repr(call.step.args),
            value.output,
            *self._needed(op, call, value, at),
        )

    def _needed(self, op: Any, call: Call, value: Value, at: int) -> Iterator[Any]:
        """The input elements that one element is computed from; the one at its own place where an
        input has its shape.
        """
        shape, specs = value.spec.shape, [t.spec for t in call.inputs]
        box = tuple((i, i + 1) for i in _index(at, shape))
        boxes = (
            op.needs(call.step.args, specs, value.output, box) if isinstance(op, ValueOp) else None
        )
        for number, tensor in enumerate(call.inputs):
            size = specs[number].shape
            if tuple(size) == tuple(shape):
                yield self.at(tensor, at)
            elif boxes is None or prod(b - a for a, b in boxes[number]) > 64:
                yield at
            else:
                cells = product(*(range(a, b) for a, b in boxes[number]))
                yield tuple(self.at(tensor, _linear(cell, size)) for cell in cells)


def examples(file: CompiledFile, siblings: Sequence[CompiledFile] = ()) -> list[Example]:
    """The file's tests, bound, beside those `siblings` of its edge that speak of what they give;
    without those that expect an error.
    """
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
        bound = bind(
            [rule],
            (),
            {k: example.given[k] for k in keys},
            Views(),
            Questions(_equal, True),
            report,
        )
    except (MigrateError, OpError, ValueError):
        return None
    return None if report.has_errors() else bound


def _equal(key: str, present: Tensor, made: Tensor) -> bool:
    return True


def _example(
    file: CompiledFile, number: int, test: RuleTest, others: Sequence[Neighbour]
) -> Example:
    report, views = Report(), Views()
    given: dict[str, Tensor] = {}
    tensors: dict[str, GivenTensor] = {}
    codes: dict[str, Callable[[int], Any]] = {}
    for written, tensor in test.given.items():
        of = spec(
            tensor.dtype, tensor.shape if tensor.shape is not None else shape_of(tensor.values)
        )
        read = numbers(of.dtype, tensor.fill, tensor.values)
        for key, _ in _expanded(written):
            given[key] = Tensor(of, views.stored(of.shape), (key,))
            tensors[key], codes[key] = tensor, read
    expected: dict[str, tuple[ExpectedTensor, str | None]] = {}
    for written, wanted in (test.expect or {}).items():
        for key, at in _expanded(written):
            expected[key] = wanted, None if wanted.same_as is None else fill_in(wanted.same_as, at)
    bound, rules = Bound(), tuple[DirectedRule, ...]()
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
    return Example(test, number, rules, given, tensors, codes, expected, bound, report)


def _reader(test: RuleTest) -> Callable[[str], bytes | None]:
    written = {
        name: (content if isinstance(content, str) else json.dumps(content)).encode()
        for name, content in test.side.items()
    }
    return written.get


def _expanded(written: str) -> list[tuple[str, dict[str, int]]]:
    try:
        return expand(written)
    except ValueError:
        return [(written, {})]


def numbers(dtype: str, fill: Any, values: Any) -> Callable[[int], Any]:
    """The elements of a tensor that a test writes down, by linear index."""
    if values is not None:
        return [code_of(dtype, number) for number in flat(values)].__getitem__
    if fill == "iota":
        return lambda at: code_of(dtype, at)
    one = code_of(dtype, 0 if fill is None else fill)
    return lambda at: one


def code_of(dtype: str, number: Any) -> Any:
    """The code of a number, or the number as a token of its own where the dtype cannot hold it: the
    test is then refused.
    """
    try:
        return code(dtype, number)
    except ValueError:
        return dtype, number


def _index(at: int, shape: Sequence[int]) -> tuple[int, ...]:
    out: list[int] = []
    for length in reversed(shape):
        at, here = divmod(at, length)
        out.append(here)
    return tuple(reversed(out))


def _linear(cell: Sequence[int], shape: Sequence[int]) -> int:
    at = 0
    for i, length in zip(cell, shape, strict=True):
        at = at * length + i
    return at
