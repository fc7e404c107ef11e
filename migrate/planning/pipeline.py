"""The ops of one rule over all tensors it took: grouping by capture values, tracing once per rule
and shapes.

Tensors of equal geometry share one view object, so the result of an op is looked up by the identity
of its input views: an op is traced for the first layer and merely moved to the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import islice, repeat
from typing import Any, NamedTuple

from ..core.errors import Diagnostic, OpError, fail, listed, plural, printable
from ..core.spec import Spec, spec
from ..core.types import records
from ..core.view import TooManyPieces, View, assemble, leaves, relabel, stored
from ..ops.base import Decided, Loss, OpCall, ValueOp
from ..rules.compiled import ROLE, CompiledCall, DirectedRule
from ..source.blobs import ChunkedTensor
from .graph import (
    ApplyOp,
    Computation,
    ComputedTensor,
    Item,
    Tensor,
    TensorSource,
    ValueCheck,
    assumed,
)
from .match import ABSENT, RANK
from .parts import NOTHING_KNOWN, Keeper, PartFacts, settle_exchange, settle_join, settle_part

# no tensor comes apart into more; a larger number is a mistake, and each part is an object
MOST_PARTS = 100_000
# and the rules of an edge make no more of all tensors together: a plan holds some objects for each
MOST_TENSORS = 1_000_000


class RefusedGroup(NamedTuple):
    """A group that the ops could not take: the keys it was made of, and why."""

    keys: tuple[str, ...]
    diagnostic: Diagnostic


class _Refusals:
    """Hands refused groups on, and knows which later gaps are only their echo."""

    __slots__ = ("_lost", "_refuse")

    def __init__(self, refuse: Callable[[RefusedGroup], None]) -> None:
        self._refuse = refuse
        self._lost: list[dict[str, Any]] = []

    def add(
        self,
        keys: tuple[str, ...],
        rule: DirectedRule,
        step: CompiledCall,
        error: OpError,
        bound: Sequence[str],
        values: tuple[Any, ...],
        items: list[Item],
    ) -> None:
        found = _diagnose(rule, step, error, bound, values, items)
        self._lost.append(dict(zip(bound, values, strict=True)))
        self._refuse(RefusedGroup(keys, found))

    def explain(self, names: Sequence[str], values: Sequence[Any]) -> bool:
        """Whether something refused before would have belonged to the group with these values."""
        group = dict(zip(names, values, strict=True))
        return any(all(group.get(n, v) == v for n, v in lost.items()) for lost in self._lost)


# the spec and the view of an output, and which sources of its inputs it has, None: all of them
_Form = tuple[Spec, View, "tuple[int, ...] | None"]


def _over(form: _Form, sources: tuple[TensorSource, ...]) -> Tensor:
    made, view, at = form
    return Tensor(made, view, sources if at is None else tuple([sources[i] for i in at]))


class Views:
    """The views of a plan, one object for equal geometry, and what each op made of which."""

    __slots__ = ("_chunked", "_interned", "_settled", "_stored", "_traced")

    def __init__(self) -> None:
        self._settled: dict[tuple[Any, ...], tuple[CompiledCall, CompiledCall]] = {}
        self._interned: dict[View, View] = {}
        self._stored: dict[tuple[int, ...], View] = {}
        self._chunked: dict[tuple[Any, ...], View] = {}
        self._traced: dict[tuple[Any, ...], Any] = {}

    def stored(self, shape: tuple[int, ...], strides: tuple[int, ...] | None = None) -> View:
        """The view of a whole stored tensor."""
        if strides is not None:
            return self.intern(stored(0, shape, strides))
        found = self._stored.get(shape)
        if found is None:
            found = self._stored[shape] = self.intern(stored(0, shape))
        return found

    def chunked(self, stored: ChunkedTensor) -> View:
        """The view of a tensor over its chunks: leaf n is chunk n."""
        if stored.view is not None:
            return self.intern(stored.view)
        shapes = tuple([(chunk.spec.shape, chunk.strides) for chunk in stored.chunks])
        form = stored.spec.shape, stored.starts, shapes
        found = self._chunked.get(form)
        if found is None:
            parts = enumerate(zip(stored.starts, shapes, strict=True))
            boxes = [(n, start, *shape) for n, (start, shape) in parts]
            found = self._chunked[form] = self.intern(assemble(stored.spec.shape, boxes))
        return found

    def intern(self, view: View) -> View:
        return self._interned.setdefault(view, view)

    def trace(
        self,
        step: CompiledCall,
        tensors: Sequence[Tensor],
        parts: int,
        rule: str,
        keys: tuple[str, ...],
    ) -> tuple[list[Tensor], list[tuple[Any, list[Tensor]]]]:
        """The step's outputs on `tensors` and its checks as (check, tensors); OpError if it cannot
        take them.

        `rule` and `keys` say in reports where a computed tensor comes from.
        """
        if isinstance(step.op, ValueOp):
            return self._compute(step, step.op, tensors, parts, rule, keys), []
        if len(tensors) == 1:
            mapping, sources = None, tensors[0].sources
            key: tuple[Any, ...] = id(step), parts, id(tensors[0].view), tensors[0].spec.dtype
        else:
            mapping, sources = _join_sources(tensors)
            views = [id(t.view) for t in tensors]
            key = id(step), parts, mapping, *views, tensors[0].spec.dtype
        found = self._traced.get(key)
        if found is None:
            # the step is kept beside the result: an id means nothing after its object is gone
            found = self._traced[key] = (step, *self._trace(step, tensors, mapping, parts))
        _, outputs, checks, specs = found
        if outputs is None:
            made = self._materialise(step, tensors, parts, specs, rule, keys)
        else:
            made = [_over(one, sources) for one in outputs]
        met = [(check, [_over(one, sources) for one in views]) for check, views in checks]
        return made, met

    def traced(self, step: CompiledCall, tensor: Tensor) -> _Form | None:
        """The one output of a step that was traced on a tensor of this view and dtype; None where
        it is computed.
        """
        found = self._traced.get((id(step), 1, id(tensor.view), tensor.spec.dtype))
        return found[1][0] if found is not None and found[1] is not None else None

    def _trace(
        self,
        step: CompiledCall,
        tensors: Sequence[Tensor],
        mapping: tuple[tuple[int, ...], ...] | None,
        parts: int,
    ) -> Any:
        views = []
        base = 0
        for number, tensor in enumerate(tensors):
            count = len(tensor.sources)
            to = mapping[number] if mapping is not None else tuple(range(base, base + count))
            views.append(tensor.view if to == tuple(range(count)) else relabel(tensor.view, to))
            base += count
        dtype = tensors[0].spec.dtype
        try:
            traced: Sequence[View] | None = step.op.trace(step.args, views, parts)
        except TooManyPieces:
            traced = None
        # a view without pieces has a shape all the same, and never too many of them
        shapes = [
            v.shape
            for v in (traced or step.op.trace(step.args, [View(v.shape, ()) for v in views], parts))
        ]
        inferred = step.op.infer(step.args, [t.spec for t in tensors], parts)
        specs = inferred if inferred is not None else [spec(dtype, shape) for shape in shapes]
        outputs = (
            None
            if traced is None
            else [self._compact(v, s, tensors, mapping) for v, s in zip(traced, specs, strict=True)]
        )
        checks = [
            (check, [self._compact(v, spec(dtype, v.shape), tensors, mapping) for v in check.views])
            for check in step.op.checks(step.args, views, parts)
        ]
        return outputs, checks, specs

    def settle(
        self,
        step: CompiledCall,
        op: ValueOp,
        roles: Sequence[str],
        specs: Sequence[Spec],
        values: Mapping[str, bytes],
        sides: tuple[tuple[str, ...], ...] = (),
    ) -> CompiledCall:
        """The step with the arguments for these roles; one object for equal ones. `sides`: the
        roles that the rule of an exchange takes, and makes.
        """
        key = (id(step), sides, *roles, *specs, *values.items())
        found = self._settled.get(key)
        if found is None:
            args = op.settle(op.naming(step.args, *sides), roles, specs, values)
            # the step is kept beside the result: an id means nothing after its object is gone
            found = self._settled[key] = (step, replace(step, args=args))
        return found[1]

    def materialise(
        self,
        step: CompiledCall,
        tensor: Tensor,
        specs: Sequence[Spec],
        rule: str,
        keys: tuple[str, ...],
    ) -> list[Tensor]:
        """What a step makes of one tensor, computed, one output for each of `specs`."""
        return self._materialise(step, [tensor], len(specs), specs, rule, keys)

    def _materialise(
        self,
        step: CompiledCall,
        tensors: Sequence[Tensor],
        parts: int,
        specs: Sequence[Spec],
        rule: str,
        keys: tuple[str, ...],
        lossy: bool = False,
    ) -> list[Tensor]:
        """The step computed instead of traced: what a value op is for, and for a layout op correct,
        but through memory.
        """
        call = Computation(OpCall(step.name, step.args), tuple(tensors), parts, rule, keys, lossy)
        return [
            Tensor(s, self.stored(s.shape), (ComputedTensor(call, n, s),))
            for n, s in enumerate(specs)
        ]

    def _compute(
        self,
        step: CompiledCall,
        op: ValueOp,
        tensors: Sequence[Tensor],
        parts: int,
        rule: str,
        keys: tuple[str, ...],
    ) -> list[Tensor]:
        given = [t.spec for t in tensors]
        if op.passes(step.args, given):
            return [tensors[0]]
        # what the op refuses is said before anything else is asked of it
        made = op.infer(step.args, given, parts)
        lossy = op.loss_on(step.args, given) is Loss.LOSSY
        return self._materialise(step, tensors, parts, made, rule, keys, lossy)

    def exchange(
        self, step: CompiledCall, tensors: Sequence[Tensor], rule: str, keys: tuple[str, ...]
    ) -> list[tuple[str, Tensor]]:
        """The parts that an exchange makes, by role: views where they are copies."""
        op, given = step.op, [t.spec for t in tensors]
        if not isinstance(op, ValueOp):
            raise TypeError(f"{step.name} exchanges no parts")
        roles, specs = op.gives(step.args), op.infer(step.args, given, 1)
        lossy = op.loss_on(step.args, given) is Loss.LOSSY
        made = self._materialise(step, tensors, len(specs), specs, rule, keys, lossy)
        for number, of in enumerate(specs):
            copied = op.copied(step.args, given, number)
            if copied is None:
                continue
            source = tensors[copied[0]]
            key = (id(step), number, id(source.view), source.spec)
            found = self._traced.get(key)
            if found is None:
                try:
                    view = self.intern(op.moved(source.view, copied[1], of.dtype))
                except TooManyPieces:
                    view = None
                # the step is kept beside the result: an id means nothing after its object is gone
                found = self._traced[key] = (step, view)
            if found[1] is not None:
                made[number] = Tensor(of, found[1], source.sources)
        return list(zip(roles, made, strict=True))

    def _compact(
        self,
        view: View,
        of: Spec,
        tensors: Sequence[Tensor],
        mapping: tuple[tuple[int, ...], ...] | None,
    ) -> _Form:
        """The view over its own leaves, and which joined sources they are (None: all, in order)."""
        used = sorted(leaves(view))
        total = (
            sum(len(t.sources) for t in tensors)
            if mapping is None
            else 1 + max((max(m) for m in mapping if m), default=-1)
        )
        if used == list(range(total)):
            return of, self.intern(view), None
        to = [0] * (used[-1] + 1 if used else 0)
        for new, old in enumerate(used):
            to[old] = new
        return of, self.intern(relabel(view, to) if used else view), tuple(used)


def _join_sources(
    tensors: Sequence[Tensor],
) -> tuple[tuple[tuple[int, ...], ...] | None, tuple[TensorSource, ...]]:
    """All sources in one tuple; the mapping is None where none occurs twice: leaves only shift."""
    if len(tensors) == 1:
        return None, tensors[0].sources
    joined: list[TensorSource] = []
    for tensor in tensors:
        joined += tensor.sources
    if len(set(joined)) == len(joined):
        return None, tuple(joined)
    positions = {source: n for n, source in enumerate(dict.fromkeys(joined))}
    return tuple(tuple(positions[s] for s in t.sources) for t in tensors), tuple(positions)


# name of the value that an op of the kind `decide` puts behind the keys of its outputs; no capture
# can have it
SUFFIX = "."
Decide = Callable[[CompiledCall, Item], "Decided | None"]


def run_ops(
    rule: DirectedRule,
    names: tuple[str, ...],
    items: list[Item],
    views: Views,
    refuse: Callable[[RefusedGroup], None],
    checks: list[ValueCheck],
    decide: Decide = lambda step, item: None,
    facts: PartFacts = NOTHING_KNOWN,
    kept: Keeper | None = None,
) -> tuple[tuple[str, ...], list[Item]]:
    """Runs the rule's ops top to bottom; the captures bound at the end, and the items made.

    A group that an op cannot take is handed to `refuse` and left out. `decide` says what becomes of
    a tensor whose bytes decide that; None: bytes cannot be read here, and it goes on as it is.
    What ops cut is put to what is `kept`, where it is not lost.
    """
    bound = names
    refusals = _Refusals(refuse)
    for number, step in enumerate(rule.steps):
        kind = step.op.kind
        if kind in ("join", "exchange"):
            bound, items = _join(rule, step, bound, items, views, refusals, checks, facts)
        elif kind == "part":
            _require_few(rule, number, items)
            bound, items = _part(rule, step, bound, items, views, refusals, checks, facts)
        elif kind == "end":
            items = []
        elif kind == "decide":
            bound, items = _decide(rule, step, bound, items, views, refusals, decide)
        else:
            items = _each(rule, step, bound, items, views, refusals, checks, kept)
    return bound, items


def _each(
    rule: DirectedRule,
    step: CompiledCall,
    bound: tuple[str, ...],
    items: list[Item],
    views: Views,
    refusals: _Refusals,
    checks: list[ValueCheck],
    kept: Keeper | None,
) -> list[Item]:
    only = [
        (bound.index(n), {str(v) for v in (w if isinstance(w, (list, tuple)) else [w])})
        for n, w in (step.only or {}).items()
    ]
    out, label = [], rule.label
    # tensors of one rule mostly have one view, and the op makes of each what it made of the last
    view, dtype, like = None, "", None
    for item in items:
        if only and not all(str(item.values[at]) in allowed for at, allowed in only):
            out.append(item)
            continue
        tensor = item.tensor
        if tensor.view is not view or tensor.spec.dtype != dtype:
            view, dtype, like = tensor.view, tensor.spec.dtype, None
        elif like is not None and item.program is None:
            out.append(Item(item.values, _over(like, tensor.sources), item.keys))
            continue
        try:
            if kept is not None and step.op.keeps:
                out.append(kept.resize(rule, step, bound, item, views))
                continue
            (made,), met = views.trace(step, [tensor], 1, label, item.keys)
            like = None if met else views.traced(step, tensor)
        except OpError as error:
            refusals.add(item.keys, rule, step, error, bound, item.values, [item])
            continue
        _collect(rule, met, item.keys, checks)
        program = item.program
        if program is not None and made is not item.tensor:
            program = ApplyOp(step.name, step.args, 1, 0, (program,), (item.tensor.spec.dtype,))
        out.append(Item(item.values, made, item.keys, program))
    return out


def _decide(
    rule: DirectedRule,
    step: CompiledCall,
    bound: tuple[str, ...],
    items: list[Item],
    views: Views,
    refusals: _Refusals,
    decide: Decide,
) -> tuple[tuple[str, ...], list[Item]]:
    out = []
    for item in items:
        try:
            decided = decide(step, item)
        except OpError as error:
            refusals.add(item.keys, rule, step, error, bound, item.values, [item])
            continue
        if decided is None or (decided.args is None and decided.outputs):
            out.append(item._replace(values=(*item.values, "")))
            continue
        if not decided.outputs:
            continue
        settled = CompiledCall(step.name, step.op, decided.args, None, step.span)
        made = views.materialise(
            settled, item.tensor, [spec for _, spec in decided.outputs], rule.label, item.keys
        )
        for number, ((suffix, _), tensor) in enumerate(zip(decided.outputs, made, strict=True)):
            program = item.program
            if program is not None:
                program = ApplyOp(
                    step.name,
                    decided.args,
                    len(made),
                    number,
                    (program,),
                    (item.tensor.spec.dtype,),
                )
            out.append(Item((*item.values, suffix), tensor, item.keys, program))
    return (*bound, SUFFIX), out


def _values(rule: DirectedRule, step: CompiledCall) -> list[Any] | None:
    """The values that a part step has outputs for; None where they are numbers."""
    kind = rule.types[step.capture or ROLE]
    if kind.kind != "enum":
        return None
    values = list(kind.values)
    if isinstance(step.op, ValueOp) and (step.capture or ROLE) == ROLE:
        values = [r for r in step.op.roles(getattr(step.args, "codec", "")) if r in values]
    return values


def _require_few(rule: DirectedRule, number: int, items: Sequence[Item]) -> None:
    """M313 if this part step and those after it would make more than MOST_TENSORS of all items."""
    of_spec: dict[Spec, tuple[int, list[str]]] = {}
    total = 0
    for item in items:
        found = of_spec.get(item.tensor.spec)
        if found is None:
            found = of_spec[item.tensor.spec] = _foreseen(rule, number, item.tensor.spec)
        total += found[0]
    if total > MOST_TENSORS:
        _, most = max(of_spec.values())
        fail(
            "M313",
            f"rule {rule.name!r} would make {total:,} tensors of {plural(len(items), 'tensor')}, "
            f"at most {MOST_TENSORS:,} are allowed",
            spans=(rule.steps[number].span,),
            notes=(f"of one: {' x '.join(most)}",),
            help="correct `count`, `sizes` or the pattern: a number this large is a mistake",
        )


def _foreseen(rule: DirectedRule, number: int, of: Spec) -> tuple[int, list[str]]:
    """How many tensors the steps from part step `number` on make of one, before the next join; and
    the counts, step by step.
    """
    total, said = 1, []
    for step in rule.steps[number:]:
        op, parts = step.op, 1
        if op.kind in ("join", "end", "decide", "exchange"):
            break
        try:
            if op.kind == "part":
                values = _values(rule, step)
                parts = op.parts(step.args, of.shape, None if values is None else len(values))
                total *= parts
                said.append(f"{step.name} into {parts:,}")
                if parts > MOST_PARTS:
                    break
            if isinstance(op, ValueOp):
                of = op.infer(step.args, [of], parts)[0]
            else:
                # a view without pieces has a shape all the same
                of = spec(of.dtype, op.trace(step.args, [View(of.shape, ())], parts)[0].shape)
        except (OpError, TooManyPieces):
            # it is said when it is made
            break
    return total, said


def _part(
    rule: DirectedRule,
    step: CompiledCall,
    bound: tuple[str, ...],
    items: list[Item],
    views: Views,
    refusals: _Refusals,
    checks: list[ValueCheck],
    facts: PartFacts,
) -> tuple[tuple[str, ...], list[Item]]:
    capture, listed_values = step.capture or ROLE, _values(rule, step)
    start = getattr(step.args, "start", 0) or 0
    out = []
    settles = (
        capture == ROLE
        and isinstance(step.op, ValueOp)
        and step.op.settles(step.args, [str(side.role) for side in rule.writes])
    )
    unsettled, named, label = step, listed_values or [], rule.label
    for item in items:
        try:
            if settles:
                step, listed_values = settle_part(
                    rule, unsettled, bound, item, named, views.settle, facts
                )
            parts = step.op.parts(
                step.args,
                item.tensor.spec.shape,
                len(listed_values) if listed_values is not None else None,
            )
            if parts > MOST_PARTS:
                raise OpError(
                    "M305",
                    f"{step.name} into {{{capture}}}: {parts} parts, at most {MOST_PARTS:,} are "
                    "made of one tensor",
                )
            made, met = views.trace(step, [item.tensor], parts, label, item.keys)
        except OpError as error:
            refusals.add(item.keys, rule, step, error, bound, item.values, [item])
            continue
        _collect(rule, met, item.keys, checks)
        values = listed_values if listed_values is not None else range(start, start + parts)
        if getattr(step.op, "shares", False):
            # one tensor under several keys, where `copy` makes several
            made = made[:1] * parts
        before, keys, dtypes = item.values, item.keys, (item.tensor.spec.dtype,)
        if item.program is None:
            out += records(
                Item, [(*before, value) for value in values], made, repeat(keys), repeat(None)
            )
            continue
        for number, (value, tensor) in enumerate(zip(values, made, strict=True)):
            out.append(
                Item(
                    (*before, value),
                    tensor,
                    keys,
                    ApplyOp(step.name, step.args, parts, number, (item.program,), dtypes),
                )
            )
    return (*bound, capture), out


def _join(
    rule: DirectedRule,
    step: CompiledCall,
    bound: tuple[str, ...],
    items: list[Item],
    views: Views,
    refusals: _Refusals,
    checks: list[ValueCheck],
    facts: PartFacts,
) -> tuple[tuple[str, ...], list[Item]]:
    capture = step.capture or ROLE
    at = bound.index(capture)
    groups: dict[tuple[Any, ...], dict[Any, Item]] = {}
    rest = (*bound[:at], *bound[at + 1 :])
    for item in items:
        values = item.values
        group = values[:at] + values[at + 1 :]
        members = groups.get(group)
        if members is None:
            members = groups[group] = {}
        if values[at] in members:
            error = OpError(
                "M207", f"{step.name} over {{{capture}}}: two members are numbered {values[at]}"
            )
            both = [members[values[at]], item]
            refusals.add(item.keys, rule, step, error, rest, group, both)
            continue
        members[values[at]] = item
    out = []
    settles = (
        capture == ROLE
        and isinstance(step.op, ValueOp)
        and step.op.settles(step.args, [str(side.role) for side in rule.reads])
    )
    unsettled, label = step, rule.label
    exchanges = step.op.kind == "exchange"
    for group, members in groups.items():
        try:
            if exchanges:
                out += _exchange(rule, step, rest, group, members, views, facts)
                continue
            ordered = _complete(rule, step, capture, members)
            tensors = [m.tensor for m in ordered]
            keys = tuple(k for m in ordered for k in m.keys)
            dtype = tensors[0].spec.dtype
            for tensor in tensors if not isinstance(step.op, ValueOp) else ():
                if tensor.spec.dtype != dtype:
                    raise OpError(
                        "M303",
                        f"{step.name} over {{{capture}}}: dtypes differ: "
                        f"{_by_value(members, lambda i: i.tensor.spec.dtype)}",
                        help="write a `cast` before it; nothing is promoted silently",
                    )
            if settles:
                step, ordered = settle_join(
                    rule, unsettled, rest, group, members, views.settle, facts
                )
                tensors = [m.tensor for m in ordered]
                keys = tuple(k for m in ordered for k in m.keys)
            (made,), met = views.trace(step, tensors, 1, label, keys)
        except OpError as error:
            keys = tuple(k for m in members.values() for k in m.keys)
            if error.code != "M207" or not refusals.explain(rest, group):
                refusals.add(keys, rule, step, error, rest, group, list(members.values()))
            continue
        _collect(rule, met, keys, checks)
        program = None
        if ordered[0].program is not None:
            programs = tuple(m.program for m in ordered if m.program is not None)
            program = (
                programs[0]
                if made is tensors[0]
                else ApplyOp(
                    step.name, step.args, 1, 0, programs, tuple(t.spec.dtype for t in tensors)
                )
            )
        out.append(Item(group, made, keys, program))
    return (*rest, ROLE) if exchanges else rest, out


def _exchange(
    rule: DirectedRule,
    step: CompiledCall,
    names: tuple[str, ...],
    group: tuple[Any, ...],
    members: Mapping[Any, Item],
    views: Views,
    facts: PartFacts,
) -> list[Item]:
    """The parts that become of those of one tensor."""
    call, ordered = settle_exchange(rule, step, names, group, members, views.settle, facts)
    tensors = [m.tensor for m in ordered]
    keys = tuple(k for m in ordered for k in m.keys)
    made = views.exchange(call, tensors, rule.label, keys)
    programs = tuple(m.program for m in ordered if m.program is not None)
    dtypes = tuple(t.spec.dtype for t in tensors)
    out = []
    for number, (role, tensor) in enumerate(made):
        program = None
        if len(programs) == len(ordered):
            program = ApplyOp(step.name, call.args, len(made), number, programs, dtypes)
        out.append(Item((*group, role), tensor, keys, program))
    return out


def _complete(
    rule: DirectedRule, step: CompiledCall, capture: str, members: dict[Any, Item]
) -> list[Item]:
    """The members in the order of the capture's values; OpError M207 where they differ."""
    kind = rule.types[capture]
    start = getattr(step.args, "start", 0) or 0
    count = getattr(step.args, "count", None)
    if kind.kind == "enum":
        expected: Sequence[Any] = kind.values
        if capture == ROLE:
            known = (
                step.op.roles(getattr(step.args, "codec", ""))
                if isinstance(step.op, ValueOp)
                else expected
            )
            expected = [
                v for v in known if v in members or (v in expected and v not in rule.optional_roles)
            ]
    else:
        expected = range(start, start + (len(members) if count is None else count))
    try:
        ordered = [members[value] for value in expected]
    except KeyError:
        ordered = []
    if len(ordered) == len(members) and ordered:
        return ordered
    if kind.kind != "enum" and count is None:
        # an absent value (None) is a key whose role does not have the capture
        expected = range(start, max((v + 1 for v in members if v is not None), default=start))
    within = sum(v in expected for v in members)
    # `len` of a range has an end, what `count` says has none
    lacking = (
        max(0, expected.stop - expected.start) if isinstance(expected, range) else len(expected)
    ) - within
    # a key may claim to be member a thousand million: only the first few gaps are looked for
    missing = [str(v) for v in islice((v for v in expected if v not in members), 8)]
    extra = [str(v) for v in members if v not in expected]
    said = []
    if missing:
        said.append(
            f"missing {{{capture}}} = {', '.join(missing)}"
            + (f" and {lacking - 8} more" if lacking > 8 else "")
        )
    if extra:
        said.append(f"unexpected {{{capture}}} = {listed(extra, 8)}")
    if count is not None and kind.kind != "enum":
        said.append(f"count says {count}, there are {len(members)}")
    raise OpError("M207", f"{step.name} over {{{capture}}} is incomplete: {'; '.join(said)}")


def _by_value(members: dict[Any, Item], of: Callable[[Item], str]) -> str:
    by: dict[str, list[str]] = {}
    for value, item in members.items():
        by.setdefault(of(item), []).append(str(value))
    return "; ".join(f"{what} for {listed(values, 5)}" for what, values in by.items())


def _collect(
    rule: DirectedRule,
    met: list[tuple[Any, list[Tensor]]],
    keys: tuple[str, ...],
    checks: list[ValueCheck],
) -> None:
    for check, tensors in met:
        held, way = tuple(tensors), assumed(rule)
        message, label = check.message, rule.label
        checks.append(ValueCheck(check.kind, held, check.value, "M404", message, label, keys, way))


# ops that make numbers of codes, codes of numbers, or other codes
CODING = ("dequantize", "quantize", "recode")
_DECODING = ("dequantize", "recode")
_NOT_PARTS = (
    "they are parts of different tensors, one of them is damaged, or they are in another format: "
    "`migrate inspect` shows how they are read"
)
_PARTS = {
    "M304": _NOT_PARTS,
    "M310": _NOT_PARTS,
    "M408": "fetch the part that is missing; if it is there, `from` has to name it",
}


def _diagnose(
    rule: DirectedRule,
    step: CompiledCall,
    error: OpError,
    bound: Sequence[str],
    values: tuple[Any, ...],
    items: list[Item],
) -> Diagnostic:
    named = [
        (f"{{{n}}} =" if n != RANK else "rank", v)
        for n, v in zip(bound, values, strict=True)
        if v is not ABSENT
    ]
    at = ", ".join(f"{what} {printable(str(v)) or repr('')}" for what, v in named)
    shapes: dict[str, list[str]] = {}
    for item in items:
        shapes.setdefault(str(item.tensor.spec), []).extend(
            item.keys[:1] if len(item.keys) == 1 else [f"{item.keys[0]} ..."]
        )
    ordered = sorted(shapes.items(), key=lambda pair: len(pair[1]))
    notes = [f"{shape}: {listed(keys, 8)}" for shape, keys in ordered[:6]]
    advice = step.advice(error.help)
    if advice is None and step.name in _DECODING:
        advice = _PARTS.get(error.code)
    return Diagnostic(
        error.code,
        f"rule {rule.name!r}" + (f" at {at}" if at else "") + f": {error.message}",
        (step.span,),
        (*error.notes, *notes),
        advice,
        permit=error.permit,
    )
