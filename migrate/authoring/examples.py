"""Tests of made rules, from the values of the two checkpoints that the rules were made of.

What a test gives is cut out of the old checkpoint, and what it expects out of the new one, by the
values alone: of a new tensor, what holds the elements that were given. No rule and no op has a hand
in it. Elements that only move are shown as small integers, equal ones by the same. A test that the
rules do not pass is not made, nor is one whose elements cannot be told apart; `Examples.untested`
names those rules.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import ops
from ..core.errors import MigrateError, Report
from ..core.notation import parse_expression
from ..core.spec import Spec
from ..core.templates import group
from ..lints.inputs import FileSet
from ..lints.shape import find_problems
from ..ops.dequantize import CodecOp
from ..rules.loading import load_document
from ..ruletests.binding import CompiledFile, RefusedTest, bind_test, compiled
from ..ruletests.checks import compare
from ..source import yaml
from . import writing
from ._lines import number
from .relations import Relation, RuleDraft

if TYPE_CHECKING:
    import numpy as np

    Elements = np.ndarray[Any, Any]
    Read = Callable[[str], Elements]

NAME = "the smallest part of both checkpoints that every rule takes some of"
_NOWHERE = Path("made.yaml")
# of an example, and the largest integer that every dtype of weights holds
_MOST_ELEMENTS = 2000
_LARGEST = 256
# that are sorted at once
_AT_ONCE = 1 << 21
# of tensors of rules without an example, which a test fills with zeros
_MOST_BYTES = 1 << 20
# along each axis of what is cut out: the fewest elements with which a mistake shows
_LENGTHS = (2, 3, 4)
# along one of them, of as many parts of equal length
_SPREAD = (4, 3)
# along one of them, where an op says how it is divided: no fewer can be
_LONGER = (6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)


@dataclass(frozen=True, slots=True)
class _CutSizes:
    """How much is cut out of a tensor: so many elements along each axis, but along one; `spread`:
    along that one as far apart as can be.
    """

    length: int
    axis: int = -1
    longer: int = 0
    spread: bool = False

    def of(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The sizes of what is cut out of a tensor of this shape."""
        return tuple(
            min(n, self.longer if axis == self.axis else self.length)
            for axis, n in enumerate(shape)
        )

    def box(self, shape: Sequence[int]) -> tuple[slice, ...]:
        """Where what is cut out of a tensor of this shape lies in it."""
        return tuple(
            slice(0, size * (step := n // size if self.spread and axis == self.axis else 1), step)
            if size
            else slice(0)
            for axis, (n, size) in enumerate(zip(shape, self.of(shape), strict=True))
        )


@dataclass(frozen=True, slots=True)
class Examples:
    """Tests as they are written, and the names of the rules of which they say nothing."""

    tests: tuple[Mapping[str, Any], ...]
    untested: tuple[str, ...]


def made_tests(
    drafts: Sequence[RuleDraft],
    relations: Sequence[Relation],
    specs: Mapping[str, Spec],
    read: tuple[Read, Read],
    header: writing.FileHead,
    params: Mapping[str, int] | None = None,
    most: int | None = None,
) -> Examples:
    """A test of all rules, with the values of those that an example can be made for: not of those
    that take or make more than `most` bytes at once.

    specs: of the keys of the old checkpoint. read: for the old and the new one, the elements of a
    key as unsigned integers in its shape. params: the values that the rules' params have there.
    """
    by_key: dict[str, list[Relation]] = defaultdict(list)
    for relation in relations:
        by_key[relation.sources[0]].append(relation)
    known = params or {}
    rules = [draft for draft in drafts if not draft.keep]
    best = Examples((), tuple(draft.name for draft in rules))
    # fewer of what params count is easier to read, where no rule needs them all
    for values, counted in ((known, {}), ({}, known)) if known else ((known, {}),):
        whole, untested = _whole_test(rules, by_key, specs, read, header, values, counted, most)
        sizes = sum(specs[k].nbytes for k, tensor in whole["given"].items() if "shape" in tensor)
        better = len(untested) < len(best.untested) and sizes <= _MOST_BYTES
        if better and _passes(drafts, header, whole) is not None:
            best = Examples((whole,), tuple(untested))
        if not best.untested:
            break
    return best


def _whole_test(
    rules: Sequence[RuleDraft],
    by_key: Mapping[str, Sequence[Relation]],
    specs: Mapping[str, Spec],
    read: tuple[Read, Read],
    header: writing.FileHead,
    values: Mapping[str, int],
    counted: Mapping[str, int],
    most: int | None,
) -> tuple[dict[str, Any], list[str]]:
    """One test of all rules, and the names of those of which it says nothing."""
    given: dict[str, Any] = {}
    expect: dict[str, Any] = {}
    few: dict[str, int] = dict(counted)
    untested: list[str] = []
    for draft in rules:
        wanted = _first_of_each(draft, by_key)
        large = most is not None and any(
            sum(specs[key].nbytes for key in r.sources) > most for r in wanted
        )
        tests = iter(()) if large else _candidates(draft, wanted, specs, read, values, counted)
        test = _chosen(draft, header, tests)
        if test is not None:
            given |= test["given"]
            expect |= test["expect"]
            few |= test.get("params", {})
        else:
            untested.append(draft.name)
            # a rule binds or the file does not: its keys are there, and nothing is said of them
            for relation in wanted:
                for key in relation.sources:
                    given[key] = {"shape": list(specs[key].shape), "dtype": specs[key].dtype}
                expect |= {key: {} for key in relation.targets}
    params = {"params": few} if few else {}
    return {"name": NAME, **params, "given": given, "expect": expect}, untested


def _contents(array: Elements, axis: int) -> Iterator[int | bytes]:
    """For each index along the axis what tells its elements from others, in whatever order they
    lie.
    """
    import numpy as np

    rows = np.moveaxis(array, axis, 0)
    step = max(1, _AT_ONCE * rows.shape[0] // max(1, rows.size))
    numbers = _numbers_of_codes(array.itemsize) if array.itemsize <= 2 else None
    for at in range(0, rows.shape[0], step):
        some = rows[at : at + step]
        if numbers is not None:
            # a sum needs no order; to sort takes ten times as long
            yield from numbers[some].sum(axis=tuple(range(1, some.ndim)), dtype="u8").tolist()
            continue
        for row in np.sort(some.reshape(len(some), -1), axis=1):
            yield row.tobytes()


@lru_cache(maxsize=2)
def _numbers_of_codes(nbytes: int) -> Elements:
    """A number of 64 bits for each code of so many bytes, at random."""
    import numpy as np

    return np.random.default_rng(nbytes).integers(0, 1 << 64, 1 << 8 * nbytes, "u8")


def _same_elements(some: Sequence[Elements], others: Sequence[Elements]) -> bool:
    """Whether these arrays hold the same elements, each as many times."""
    import numpy as np

    if sum(a.size for a in some) != sum(a.size for a in others):
        return False
    if any(a.itemsize > 2 for a in (*some, *others)):
        one, other = (np.sort(np.concatenate([a.reshape(-1) for a in s])) for s in (some, others))
        return bool(np.array_equal(one, other))
    counts = [np.zeros(1 << 16, np.int64) for _ in range(2)]
    for side, count in zip((some, others), counts, strict=True):
        for array in side:
            flat = array.reshape(-1)
            for at in range(0, flat.size, _AT_ONCE):
                count += np.bincount(flat[at : at + _AT_ONCE], minlength=1 << 16)
    return bool(np.array_equal(counts[0], counts[1]))


class _Known:
    """Elements of which others may be some."""

    def __init__(self, elements: Elements, kind: np.dtype[Any]) -> None:
        import numpy as np

        self._elements = elements
        self._known: Elements | None = None
        if kind.itemsize <= 2:
            self._known = np.zeros(1 << 8 * kind.itemsize, bool)
            # what is cast may have been wider
            self._known[elements[elements < self._known.size]] = True
            self._low, self._high = _both_signs(self._known)

    def within(self, array: Elements) -> Elements:
        """Where one of the elements lies."""
        import numpy as np

        if self._known is None:
            found: Elements = np.isin(array, self._elements)
            return found
        flat, kind = array.reshape(-1), array.dtype.type
        out: Elements = np.empty(array.size, bool)
        rest: Elements = np.empty(min(_AT_ONCE, array.size), array.dtype)
        for at in range(0, flat.size, _AT_ONCE):
            some, inside = flat[at : at + _AT_ONCE], out[at : at + _AT_ONCE]
            far = rest[: some.size]
            # most are found by two comparisons, which costs less than to look each of them up
            np.bitwise_and(some, kind(self._known.size // 2 - 1), out=far)
            np.subtract(far, kind(self._low), out=far)
            np.less(far, kind(self._high - self._low), out=inside)
            left = np.flatnonzero(~inside)
            inside[left] = self._known[some[left]]
        out.shape = array.shape
        return out


def _both_signs(known: Elements) -> tuple[int, int]:
    """The longest stretch of codes, without their highest bit, that are all known with that bit and
    without it.
    """
    import numpy as np

    half = known.size // 2
    borders = np.flatnonzero(np.diff(known[:half] & known[half:], prepend=False, append=False))
    if not borders.size:
        return 0, 0
    starts, stops = borders[::2], borders[1::2]
    longest = int(np.argmax(stops - starts))
    return int(starts[longest]), int(stops[longest])


def _whole_lines(array: Elements, elements: Elements) -> list[Elements]:
    """For each axis, at which of its indices only these elements lie."""
    import numpy as np

    out = [np.ones(n, bool) for n in array.shape]
    if not out:
        return out
    known = _Known(elements, array.dtype)
    step = max(1, _AT_ONCE * array.shape[0] // max(1, array.size))
    for at in range(0, array.shape[0], step):
        held = known.within(array[at : at + step])
        for axis, lines in enumerate(out):
            here = lines[at : at + step] if not axis else lines
            here &= held.all(axis=tuple(a for a in range(held.ndim) if a != axis))
    return out


def _chosen(
    draft: RuleDraft, header: writing.FileHead, candidates: Iterator[dict[str, Any]]
) -> dict[str, Any] | None:
    """The first example that the rule passes and that would show near mistakes; where none does so,
    the first that it passes.
    """
    first = None
    for test in candidates:
        file = _passes([draft], header, test)
        if file is not None:
            if not any(find_problems(FileSet(None, None, None, (file,)))):
                return test
            first = first or test
    return first


def _first_of_each(draft: RuleDraft, by_key: Mapping[str, Sequence[Relation]]) -> list[Relation]:
    """Of each form of the draft's keys the first relation."""
    firsts = {template.keys[0] for template in group(dict.fromkeys(draft.keys))}
    seen: set[tuple[str, ...]] = set()
    out = []
    for key in draft.keys:
        for relation in by_key.get(key, ()):
            made = tuple(t.text for t in group(relation.targets)) if relation.targets else ()
            form = (*(t.text for t in group(relation.sources)), "->", *made)
            # several rules may read one key
            if form not in seen and (key in firsts or len(relation.sources) > 1):
                seen.add(form)
                out.append(relation)
    return out


def _candidates(
    draft: RuleDraft,
    relations: Sequence[Relation],
    specs: Mapping[str, Spec],
    read: tuple[Read, Read],
    params: Mapping[str, int],
    counted: Mapping[str, int],
) -> Iterator[dict[str, Any]]:
    """Examples of one rule, the smallest first; `counted` are params that they all give."""
    axes = range(max((len(specs[r.sources[0]].shape) for r in relations if r.ops), default=0))
    # so that their elements can all differ
    longer = [_CutSizes(min(2, _LARGEST // n), axis, n) for n in _LONGER for axis in axes]
    # of each part of an axis that moves as a whole some
    spread = [_CutSizes(2, axis, n, spread=True) for n in _SPREAD for axis in axes]
    for length in (*(_CutSizes(n) for n in _LENGTHS), *spread, None, *longer):
        few: dict[str, int] = dict(counted)
        labels: dict[tuple[str, int], int] = {}
        given: dict[str, Any] = {}
        expect: dict[str, Any] = {}
        for relation in relations:
            found = _cut(relation, specs, read, params, length, few)
            if found is None:
                break
            kind = specs[relation.sources[0]].dtype
            for into, arrays in ((given, found[0]), (expect, found[1])):
                for key, array in arrays.items():
                    into[key] = {"dtype": kind, "values": _labelled(array, kind, labels)}
        else:
            if relations and len(labels) <= _LARGEST:
                yield {
                    "name": NAME,
                    **({"params": few} if few else {}),
                    "given": given,
                    "expect": expect,
                }


def _labelled(array: Elements, kind: str, labels: dict[tuple[str, int], int]) -> Any:
    flat: list[Any] = [
        labels.setdefault((kind, int(bits)), len(labels) + 1) for bits in array.reshape(-1)
    ]
    for size in reversed(array.shape):
        flat = [flat[at : at + size] for at in range(0, len(flat), size)] if size else [flat]
    return flat[0] if flat else []


def _cut(
    relation: Relation,
    specs: Mapping[str, Spec],
    read: tuple[Read, Read],
    params: Mapping[str, int],
    length: _CutSizes | None,
    few: dict[str, int],
) -> tuple[dict[str, Elements], dict[str, Elements]] | None:
    """(given, expected) of one relation, cut to some elements along each axis; None if the elements
    do not say which of the new tensors these are, or are too many.
    """
    import numpy as np

    calls = [ops.get(name) for op in relation.ops for name in op]
    if any(op.kind == "make" or isinstance(op, CodecOp) for op in calls):
        return None
    sources, targets = _fewer(relation, params, few)
    sizes = [specs[key].shape for key in sources]
    cut = [shape if length is None else length.of(shape) for shape in sizes]
    if sum(map(prod, cut)) > _MOST_ELEMENTS or not all(map(prod, cut)):
        return None
    boxes = [tuple(map(slice, shape)) if length is None else length.box(shape) for shape in sizes]
    given = {
        # a copy, or the rest of the tensor would stay with it
        key: read[0](key)[box].copy()
        for key, box in zip(sources, boxes, strict=True)
    }
    if not relation.ops:
        # what only changes its name is cut alike on both sides
        return given, {key: read[1](key)[boxes[0]].copy() for key in targets}
    elements = np.concatenate([array.reshape(-1) for array in given.values()])
    # so many elements of few bits are found anywhere
    codes = 1 << 8 * elements.itemsize
    repeated = sum(map(prod, sizes)) > codes or len(np.unique(elements)) < len(elements)
    if length is not None and repeated:
        return _cut_by_lines(relation, sources, targets, read, length)
    expected = {}
    for key in targets:
        whole = read[1](key)
        mask = _Known(elements, whole.dtype).within(whole)
        axes = [
            np.flatnonzero(mask.any(axis=tuple(a for a in range(mask.ndim) if a != axis)))
            for axis in range(mask.ndim)
        ]
        inside = np.ix_(*axes) if axes else ()
        # not only these elements lie there, or not in a box
        if not mask[inside].all():
            return (
                None if length is None else _cut_by_lines(relation, sources, targets, read, length)
            )
        expected[key] = whole[inside]
    if length is not None and sum(a.size for a in expected.values()) != len(elements):
        return _cut_by_lines(relation, sources, targets, read, length)
    return given, expected


def _cut_by_lines(
    relation: Relation,
    sources: Sequence[str],
    targets: Sequence[str],
    read: tuple[Read, Read],
    box: _CutSizes,
) -> tuple[dict[str, Elements], dict[str, Elements]] | None:
    """The same where elements occur several times, as those of bfloat16 do: an axis is cut at a
    time, and what is left is found by all that lies along the others.
    """
    import numpy as np

    olds, news = [read[0](key) for key in sources], [read[1](key) for key in targets]
    if len({array.ndim for array in olds}) != 1 or not news:
        return None
    if len(sources) < len(relation.sources):
        found = _lines(olds, news)
        if found is None:
            return None
        news = [np.take(new, at, found[0]) for new, at in zip(news, found[1], strict=True)]
    places = [[np.arange(n) for n in new.shape] for new in news]
    cuts = [box.box(array.shape) for array in olds]
    for axis in range(olds[0].ndim):
        along = [(slice(None),) * axis + (cut[axis],) for cut in cuts]
        if all(a[here].shape == a.shape for a, here in zip(olds, along, strict=True)):
            continue
        kept = [a[here] for a, here in zip(olds, along, strict=True)]
        found = _lines(kept, news, [line for a in kept for line in _contents(a, axis)])
        if found is None:
            return None
        for place, at in zip(places, found[1], strict=True):
            place[found[0]] = np.intersect1d(place[found[0]], at)
    given = {key: a[cut] for key, a, cut in zip(sources, olds, cuts, strict=True)}
    expected = {
        key: new[np.ix_(*place)] for key, new, place in zip(targets, news, places, strict=True)
    }
    same = _same_elements(list(given.values()), list(expected.values()))
    return (given, expected) if same else None


def _lines(
    olds: Sequence[Elements], news: Sequence[Elements], lines: Sequence[int | bytes] = ()
) -> tuple[int, list[Elements]] | None:
    """An axis, and of each new tensor the indices along it at which exactly these elements lie.

    So many that all numbers are among them lie anywhere; then those indices count at which one of
    the `lines` lies.
    """
    import numpy as np

    elements = np.concatenate([array.reshape(-1) for array in olds])
    whole = [_whole_lines(new, elements) for new in news]
    for axis in range(min(new.ndim for new in news)):
        found = [np.flatnonzero(held[axis]) for held in whole]
        if lines and sum(map(len, found)) > len(lines):
            known = set(lines)
            found = [
                np.array([n for n, line in enumerate(_contents(new, axis)) if line in known], int)
                for new in news
            ]
        across = [prod(n for a, n in enumerate(new.shape) if a != axis) for new in news]
        if sum(n * len(at) for n, at in zip(across, found, strict=True)) != elements.size:
            continue
        lying = [np.take(new, at, axis) for new, at in zip(news, found, strict=True)]
        if _same_elements(lying, [elements]):
            return axis, found
    return None


def _fewer(
    relation: Relation, params: Mapping[str, int], few: dict[str, int]
) -> tuple[list[str], list[str]]:
    """The keys of two of those that a param counts, where it counts more; `few` gets the param."""
    joins = [a for op in relation.ops for n, a in op.items() if _has(n, "over")]
    parts = [a for op in reversed(relation.ops) for n, a in op.items() if _has(n, "into")]
    return (
        _picked(relation.sources, joins, params, few),
        _picked(relation.targets, parts, params, few),
    )


def _picked(
    keys: Sequence[str],
    calls: Sequence[Mapping[str, Any]],
    params: Mapping[str, int],
    few: dict[str, int],
) -> list[str]:
    counts: list[int] = []
    kept: list[int] = []
    for at, args in enumerate(calls):
        said = args.get("count")
        count = len(args["sizes"]) if isinstance(args.get("sizes"), (list, tuple)) else None
        count = count or number(said, params)
        if at == len(calls) - 1 or count is None:
            count = len(keys) // max(1, prod(counts))
        name = str(said)[1:]
        short = count
        if isinstance(said, str) and name in params and parse_expression(said).names == (name,):
            short = few[name] = min(2, count)
        counts.append(count)
        kept.append(short)
    if prod(counts) != len(keys):
        return list(keys)
    out = []
    # the first call takes neighbours, so its number changes fastest
    for place in product(*(range(n) for n in reversed(kept))):
        at = 0
        for count, index in zip(reversed(counts), place, strict=True):
            at = at * count + index
        out.append(keys[at])
    return out


def _has(op: str, argument: str) -> bool:
    return argument in getattr(ops.get(op).Args, "__dataclass_fields__", {})


def _passes(
    drafts: Sequence[RuleDraft], header: writing.FileHead, test: Mapping[str, Any]
) -> CompiledFile | None:
    """The file, if its rules make of what is given what is expected."""
    text = writing.text(drafts, header, [test])
    report = Report()
    try:
        loaded = load_document(_NOWHERE, yaml.read_yaml(text, str(_NOWHERE), report), report)
        report.check()
        if loaded is None:
            return None
        file = compiled(loaded, report)
        bound = bind_test(file, 0)
        report.check()
        passed = not isinstance(bound, RefusedTest) and not compare(bound, 0, values=True)
        return file if passed else None
    except MigrateError:
        return None
