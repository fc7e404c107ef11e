"""`shape-invisible`: an op whose effect no test of the file would notice, as shapes do not show it.

A shape often does not show what an op did: a concat with its parts interchanged, a square transpose
left out, RoPE's halves in another order. So each such op is replaced by near mistakes of the same
kind, and whatever a test of the file cannot distinguish from the right op is not tested.

The tests are bound to the rules on headers alone. An element of an output is what the test put into
it: the code of a number, or for a computed element a token that stands for the op and the elements
it was computed from. Two outputs that have equal elements where a test looks are the same to it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice, pairwise, permutations, product
from math import prod
from typing import Any, NamedTuple

from .. import ops
from ..core import view
from ..core.errors import Diagnostic, MigrateError, OpError, Report
from ..core.pieces import Piece, end
from ..core.spec import Spec, coordinates
from ..core.view import Fill, Leaf, View, clip, relabel
from ..elements.codes import element_code, is_close, number_of
from ..ops.base import Op, ValueOp, axis
from ..planning.bind import DROP, BindContext, StepResult, bind
from ..planning.graph import Computation, ComputedTensor, Tensor
from ..planning.pipeline import Views
from ..rules.compiled import ROLE, CompiledCall, CompiledRule, DirectedRule
from ..rules.examples import (
    ExpectedTensor,
    GivenTensor,
    RuleTest,
    expand,
    fill_in,
    flat,
    indexes,
    shape_of,
)
from ..rules.files import used_beside
from ..ruletests.binding import CompiledFile, bind_headers, prepare
from ..source.blobs import key_of
from .inputs import FileSet, directed, finding

# of a larger tensor single elements are looked up
MOST_ELEMENTS = 1 << 16
# how many elements of a longer run are compared at each end of it, and in how many places between
AT_AN_END = 1 << 12


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
    bound: StepResult
    problems: Report
    read_part: Callable[[Tensor], bytes]
    # whether the test passes as it is, by output; filled when it is asked
    passes: dict[str, bool] = field(default_factory=dict)

    def keys_of(self, rule: DirectedRule) -> list[str]:
        """The given keys that the rule made something of."""
        found = dict.fromkeys(
            k for made in self.bound.provenance.values() if made.rule is rule for k in made.keys
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
            partial(self._token, owner)
            if isinstance(owner, ComputedTensor)
            else self.example.codes[key_of(owner)]
        )

    def _token(self, value: ComputedTensor, at: int) -> Any:
        """A token for one element of a computed tensor: equal tokens are surely equal elements."""
        call, op = value.computation, ops.get(value.computation.op_call.op)
        return (
            call.op_call.op,
            repr(call.op_call.args),
            value.output,
            *self._needed(op, call, value, at),
        )

    def _needed(self, op: Any, call: Computation, value: ComputedTensor, at: int) -> Iterator[Any]:
        """The inputs' elements for one element; the one at its place where shapes are equal."""
        shape, specs = value.spec.shape, [t.spec for t in call.inputs]
        box = tuple((i, i + 1) for i in coordinates(at, shape))
        boxes = (
            op.needs(call.op_call.args, specs, value.output, box)
            if isinstance(op, ValueOp)
            else None
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


def examples(file: CompiledFile, files: Sequence[CompiledFile] = ()) -> list[Example]:
    """The file's tests, bound, beside those of its edge's `files` that speak of what they give;
    without those that expect an error.
    """
    others = [other for other in files if other is not file]
    tests = enumerate(file.model.tests)
    return [_example(file, n, test, others) for n, test in tests if test.error is None]


def _example(
    file: CompiledFile, number: int, test: RuleTest, others: Sequence[CompiledFile]
) -> Example:
    report = Report()
    prepared = prepare(file, number, others)
    rules, given, bound = bind_headers(prepared, report)
    tensors: dict[str, GivenTensor] = {}
    codes: dict[str, Callable[[int], Any]] = {}
    for written, tensor in test.given.items():
        keys = [key for key, _ in expand(written)]
        read = numbers(given[keys[0]].spec.dtype, tensor.fill, tensor.values)
        tensors.update(dict.fromkeys(keys, tensor))
        codes.update(dict.fromkeys(keys, read))
    expected: dict[str, tuple[ExpectedTensor, str | None]] = {}
    for written, wanted in (test.expect or {}).items():
        for key, at in expand(written):
            like = None if wanted.same_as is None else fill_in(wanted.same_as, at)
            expected[key] = wanted, like
    return Example(
        test,
        number,
        rules,
        given,
        tensors,
        codes,
        expected,
        bound,
        report,
        prepared.source.read_part,
    )


def rerun(example: Example, rule: DirectedRule, keys: Sequence[str]) -> StepResult | None:
    """The rule alone on these keys; None where it cannot take them."""
    report = Report()
    try:
        bound = bind(
            [rule],
            (),
            {k: example.given[k] for k in keys},
            Views(),
            BindContext(lambda *_: True, DROP, part=example.read_part),
            report,
        )
    except (MigrateError, OpError, ValueError):
        return None
    return None if report.has_errors() else bound


def numbers(dtype: str, fill: Any, values: Any) -> Callable[[int], Any]:
    """The elements of a tensor that a test writes down, by linear index."""
    if values is not None:
        return [code_of(dtype, number) for number in flat(values)].__getitem__
    if fill == "iota":
        return lambda at: code_of(dtype, at)
    one = code_of(dtype, 0 if fill is None else fill)
    return lambda at: one


def code_of(dtype: str, number: Any) -> Any:
    """The code of a number; the number where the dtype cannot hold it and the test is refused."""
    try:
        return element_code(dtype, number)
    except ValueError:
        return dtype, number


def _linear(cell: Sequence[int], shape: Sequence[int]) -> int:
    at = 0
    for i, length in zip(cell, shape, strict=True):
        at = at * length + i
    return at


# What a test accepts: whether it would pass as well with another tensor in the place of the one
# that its rules make. The comparison is the one that runs tests, on the numbers that the test
# itself writes down. A number that an op computes is not known here; it stands for what the test
# expects where the rules put it.


class _Stated(NamedTuple):
    """A run of elements that a test states of an output, and their codes, by place in the run."""

    start: int
    length: int
    codes: Callable[[int], Any]


def states(example: Example, key: str) -> bool:
    """Whether the test states some element of the output, not only its size and kind."""
    if key not in example.expected or key not in example.bound.tensors:
        return False
    wanted, like = example.expected[key]
    if wanted.rtol is not None and wanted.rtol >= 1:
        # zeros are within such a tolerance of any number
        return False
    try:
        return any(
            run.length for run in _stated(example, wanted, like, example.bound.tensors[key].spec)
        )
    except ValueError:
        return False


def takes(example: Example, key: str, other: Tensor | None) -> bool | None:
    """Whether the test would be the same with `other` as output; None: too many elements to say.

    Of a test that fails as it is, because what it expects is wrong, the same elements are compared
    with those that the rules make.
    """
    if other is None or key not in example.expected:
        return key not in example.expected
    right = example.bound.tensors[key]
    if key not in example.passes:
        example.passes[key] = _passes(example, key, right, right) is not False
    if example.passes[key]:
        return _passes(example, key, other, right)
    return right.spec == other.spec and _alike(example, key, other, right)


def _passes(example: Example, key: str, other: Tensor, right: Tensor) -> bool | None:
    """Whether the key's part of the test passes with `other`."""
    wanted, like = example.expected[key]
    said = _shape(example, wanted, like)
    dtype = wanted.dtype or (None if like is None else example.given[like].spec.dtype)
    if said not in (None, other.spec.shape) or dtype not in (None, other.spec.dtype):
        return False
    try:
        runs = list(_stated(example, wanted, like, other.spec))
    except ValueError:
        return False
    large = any(run.length > MOST_ELEMENTS for run in runs)
    if large and right.spec == other.spec and _plain(example, right) == _plain(example, other):
        return True
    read, known = Elements(example), dict[Any, Any]()
    for run in runs:
        for n in _looked_at(run, other.view):
            code, wish = read.at(other, run.start + n), run.codes(n)
            if isinstance(code, tuple):
                known = known or _computed(example, wanted, like, right, read)
                code = known.get(code)
            if code != wish and not _close(other.spec.dtype, code, wish, wanted.rtol):
                return False
    return None if large else True


def _alike(example: Example, key: str, other: Tensor, right: Tensor) -> bool:
    """Whether two outputs of one shape have the same elements where the test states them."""
    read = Elements(example)
    try:
        runs = list(_stated(example, *example.expected[key], right.spec))
    except ValueError:
        return True
    return all(
        read.at(right, run.start + n) == read.at(other, run.start + n)
        for run in runs
        for n in _looked_at(run, other.view)
    )


def _close(dtype: str, code: Any, wish: Any, rtol: float | None) -> bool:
    if not isinstance(code, int) or not isinstance(wish, int):
        return False
    return is_close(number_of(dtype, code), number_of(dtype, wish), rtol)


def _shape(example: Example, wanted: ExpectedTensor, like: str | None) -> tuple[int, ...] | None:
    if wanted.shape is not None:
        return tuple(wanted.shape)
    if wanted.values is not None:
        return shape_of(wanted.values)
    return None if like is None else example.given[like].spec.shape


def _stated(
    example: Example, wanted: ExpectedTensor, like: str | None, of: Spec
) -> Iterator[_Stated]:
    """What the test states of an output of this spec; ValueError for an element beyond it."""
    if like is not None:
        if example.given[like].spec.numel != of.numel:
            raise ValueError(f"{like!r} has other elements")
        yield _Stated(0, of.numel, example.codes[like])
    elif wanted.values is not None or wanted.fill is not None:
        yield _Stated(0, of.numel, numbers(of.dtype, wanted.fill, wanted.values))
    for written, values in wanted.slices.items():
        start, rest = 0, of.shape
        for position in indexes(written):
            if not rest or not -rest[0] <= position < rest[0]:
                raise ValueError(f"slice {written!r} is outside of {list(of.shape)}")
            start, rest = start + position % rest[0] * prod(rest[1:]), rest[1:]
        if isinstance(values, list) and shape_of(values) != rest:
            raise ValueError(f"slice {written!r} has the shape {list(rest)}")
        yield _Stated(
            start,
            prod(rest),
            numbers(of.dtype, *((None, values) if isinstance(values, list) else (values, None))),
        )


def _looked_at(run: _Stated, view: View) -> Iterable[int]:
    """The places in a run that are compared: of a long one its ends, and where something else
    begins in what is compared with it.
    """
    if run.length <= MOST_ELEMENTS:
        return range(run.length)
    pieces = clip(view, run.start, run.start + run.length)[:AT_AN_END]
    corners = (place - run.start for piece in pieces for place in _corners(piece))
    return chain(range(AT_AN_END), corners, range(run.length - AT_AN_END, run.length))


def _corners(piece: Piece) -> Iterator[int]:
    yield piece.dst
    yield from (piece.dst + stride for stride in piece.dst_strides)
    yield end(piece) - 1


def _computed(
    example: Example, wanted: ExpectedTensor, like: str | None, right: Tensor, read: Elements
) -> dict[Any, Any]:
    """What the test expects each computed element to be, by its token."""
    out: dict[Any, Any] = {}
    for run in _stated(example, wanted, like, right.spec):
        for n in _looked_at(run, right.view):
            out.setdefault(read.at(right, run.start + n), run.codes(n))
    return out


def _plain(example: Example, tensor: Tensor) -> View:
    """The view over leaves alike where the given tensors are: equal views are equal tensors."""
    leaves: list[Leaf] = []
    for source in tensor.sources:
        given = example.tensors.get(source) if isinstance(source, str) else None
        if given is None or given.values is not None:
            # a leaf of its own; a given key is the same one in both
            leaves.append(
                2 * list(example.given).index(source) + 1
                if isinstance(source, str)
                else 2 * id(source)
            )
        else:
            leaves.append(0 if given.fill == "iota" else Fill(given.fill or 0))
    return relabel(tensor.view, leaves)


_AXIS = re.compile(r"[^\W\d]\w*")
# permutations of up to so many axes are tried; of more, only those that interchange two neighbours
MOST_AXES = 4

_Trace = Callable[[Any, Sequence[View], int], list[View]]


class Mutant(NamedTuple):
    """A near mistake; `what` completes "if the op …".

    `step` is None where there is none to try: then only a test that states values would notice one.
    `shown` says that shapes show it unless lengths happen to be equal, so that any test of the rule
    will do for a start.
    """

    what: str
    step: CompiledCall | None
    shown: bool = False


class _Nothing(Op):
    """In place of an op that computes: what comes in goes out."""

    def trace(self, args: Any, views: Sequence[View], parts: int = 1) -> list[View]:
        return list(views)


_NOTHING = _Nothing()


def mutants(rule: DirectedRule, step: CompiledCall, *, derived: bool = False) -> Iterator[Mutant]:
    """The near mistakes of one step that a shape can hide, in one order whatever the params.

    None for an op that its shape always shows. `derived`: the numbers of the step come from params.
    """
    name, args = step.name, step.args
    if name in ("stack", "concat", "unbind", "split"):
        yield from _orders(rule, step)
        yield from _axes(step)
    elif name == "transpose":
        yield Mutant(
            "left the axes as they are", _with(step, lambda args, views, parts: list(views))
        )
        yield from _pairs(step)
    elif name == "permute":
        for order in _permutations(list(args.dims)):
            yield Mutant(
                f"had `dims: {order}`", replace(step, args=replace(args, dims=tuple(order)))
            )
    elif name == "rearrange":
        before, after = args.pattern.split("->")
        names = _AXIS.findall(after)
        written = _AXIS.findall(before)
        # first the mistake that is nearest: nothing moves
        for order in sorted(_permutations(names), key=lambda order: order != written):
            # a mapping, because one axis' name may be part of another's
            other = dict(zip(names, order, strict=True))
            pattern = f"{before.strip()} -> {_AXIS.sub(lambda m, o=other: o[m[0]], after).strip()}"  # type: ignore[misc]
            yield Mutant(f'said "{pattern}"', replace(step, args=replace(args, pattern=pattern)))
    elif name in ("flip", "roll"):
        yield Mutant("moved nothing", _with(step, lambda args, views, parts: list(views)))
        yield from _axes(step)
        # a shift that depends on the model is half of the axis, which is the same both ways
        if name == "roll" and not derived:
            yield Mutant(
                f"had `shift: {-args.shift}`", replace(step, args=replace(args, shift=-args.shift))
            )
    elif name == "slice" and args.value is None:
        # with `value` the run itself looks at what is cut
        yield Mutant("kept the other end", _with(step, _other_end))
        yield from _axes(step)
    elif name == "pad":
        yield Mutant(
            "padded the other end",
            _with(step, lambda args, views, parts: _padded(step.op, args, views)),
        )
        yield from _axes(step)
    elif name != "cast" and (isinstance(step.op, ValueOp) or step.op.kind == "make"):
        if step.op.kind in ("each", "make"):
            yield Mutant("left the numbers as they are", replace(step, op=_NOTHING))
        yield Mutant("computed something else", None)


def _axes(step: CompiledCall) -> Iterator[Mutant]:
    """The same along a neighbouring axis; an axis that is not there is refused, and so seen."""
    for dim in _beside(step.args.dim):
        yield Mutant(
            f"had `dim: {dim}`", replace(step, args=replace(step.args, dim=dim)), shown=True
        )


def _pairs(step: CompiledCall) -> Iterator[Mutant]:
    """A transpose of which one axis is a neighbour of the right one."""
    one, other = step.args.dims
    for dims in [*((d, other) for d in _beside(one)), *((one, d) for d in _beside(other))]:
        if dims[0] != dims[1]:
            yield Mutant(
                f"had `dims: {list(dims)}`",
                replace(step, args=replace(step.args, dims=dims)),
                shown=True,
            )


def _beside(dim: int) -> list[int]:
    """The neighbours of an axis, counted from its end: from the other they could be the axis."""
    return [d for d in (dim - 1, dim + 1) if (d < 0) is (dim < 0)]


def _orders(rule: DirectedRule, step: CompiledCall) -> Iterator[Mutant]:
    """Two neighbouring values interchanged; none for an int capture, whose order is no choice."""
    kind = rule.types[step.capture or ROLE]
    if kind.kind != "enum":
        return
    for number, (one, other) in enumerate(pairwise(kind.values)):
        order = list(range(len(kind.values)))
        order[number], order[number + 1] = number + 1, number
        yield Mutant(f"had {one} and {other} interchanged", _with(step, _reordered(step.op, order)))


def _reordered(op: Op, order: Sequence[int]) -> _Trace:
    def trace(args: Any, views: Sequence[View], parts: int) -> list[View]:
        sizes = getattr(args, "sizes", None)
        if sizes is not None:
            args = replace(args, sizes=tuple(sizes[i] for i in order))
        if op.kind == "join":
            return op.trace(
                args, [views[i] for i in order] if len(views) == len(order) else list(views), parts
            )
        made = op.trace(args, views, parts)
        return [made[i] for i in order] if len(made) == len(order) else made

    return trace


def _other_end(args: Any, views: Sequence[View], parts: int) -> list[View]:
    out = []
    for v in views:
        dim = axis("slice", args.dim, v.shape)
        stop = v.shape[dim] if args.stop is None else args.stop
        out.append(view.slice_(v, dim, v.shape[dim] - stop, v.shape[dim] - args.start))
    return out


def _padded(op: Op, args: Any, views: Sequence[View]) -> list[View]:
    out = []
    for v, made in zip(views, op.trace(args, views), strict=True):
        dim = axis("pad", args.dim, v.shape)
        out.append(view.roll(made, dim, made.shape[dim] - v.shape[dim] - 2 * args.start))
    return out


def _with(step: CompiledCall, trace: _Trace) -> CompiledCall:
    """The step with an op that traces as said, and is otherwise what it was."""

    def traced(self: Op, args: Any, views: Sequence[View], parts: int = 1) -> list[View]:
        return trace(args, views, parts)

    def unchecked(self: Op, args: Any, views: Sequence[View], parts: int = 1) -> list[Any]:
        return []

    base = type(step.op)
    body = {"name": step.name, "trace": traced, "checks": unchecked, "__module__": base.__module__}
    return replace(step, op=type(base.__name__, (base,), body)())


def _permutations(things: list[Any]) -> Iterator[list[Any]]:
    if len(things) <= MOST_AXES:
        yield from (list(order) for order in permutations(things) if list(order) != things)
        return
    for at in range(len(things) - 1):
        yield [*things[:at], things[at + 1], things[at], *things[at + 2 :]]


# a test, a rule as the test has it, and the given keys that the rule made something of
_Touching = tuple[Example, DirectedRule, list[str]]


def find_problems(fileset: FileSet) -> Iterator[Diagnostic]:
    """M620 and M623 of ops, M621 of tests that the rules cannot take, M622 of untested rules."""
    edges = fileset.edges
    for file in fileset.files:
        beside = used_beside(file.loaded, [f.loaded for f in edges[file.edge]])
        tests = examples(file, [f for f in edges[file.edge] if f.loaded in beside])
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
        yield finding(
            "M622",
            f"no test touches rule `{name}`",
            file.span(rule),
            "give a test a key that the rule takes, and expect what it makes",
        )


def _step(
    file: CompiledFile,
    rule: CompiledRule,
    shown: DirectedRule,
    number: int,
    touching: Sequence[_Touching],
) -> Iterator[Diagnostic]:
    """M620 for the step's first near mistake that no test notices; M623 where one is undecided."""
    step = shown.steps[number]
    span = file.span(rule, "via", number, step.name)
    derived = not isinstance(rule.rule.via[number].args.get("shift", 0), int)
    doubt: str | None = None
    for which, mutant in enumerate(mutants(shown, step, derived=derived)):
        seen: list[bool | None] = []
        # one test that notices is enough
        while len(seen) < len(touching) and not (seen and seen[-1]):
            seen.append(_seen(*touching[len(seen)], number, which, derived))
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
        yield finding("M620", what, span, hint)
        return
    if doubt is not None:
        what = (
            f"rule `{rule.rule.name}`: `{doubt}` states so much that it is not known whether a "
            f"near mistake of {step.name} would be noticed"
        )
        notes = (f"of more than {MOST_ELEMENTS:,} elements, only some are compared",)
        yield finding("M623", what, span, "smaller tensors show the same", notes=notes)


def _seen(
    example: Example,
    rule: DirectedRule,
    keys: Sequence[str],
    number: int,
    which: int,
    derived: bool,
) -> bool | None:
    """Whether the test would fail with a mutant of the rule's step; None: too much to be sure.

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
