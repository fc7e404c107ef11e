"""State of optimizers that follows its parameters.

A moment has the shape of its parameter, so what a rule does to the layout of the parameter it does
to the moment: the rule is bound once more, to the moments of the keys that it took, with the same
captures. What it does to numbers stays away: moments keep their dtype. Plan, run, `verify` and the
way back then come from the engine as they do for weights. A state without axes (`step`) is no part
of a layout: it has to be equal in all that becomes one, and stands in each place where one comes
apart.

State that rules spell themselves is theirs, and what cannot follow is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from ..core.errors import Report, listed, option, plural, printable, together
from ..core.spec import spec as spec_of
from ..core.view import filled
from ..ops.base import ValueOp, get
from ..rules.compiled import DirectedRule
from .bind import BindContext, Followed, StepResult, bind, find_taken_keys
from .graph import ApplyOp, Program, ReadKey, Tensor, ValueCheck
from .numbered_states import NAMED
from .pipeline import CODING
from .request import OPTIMIZER_PARAM, STALE_OPTIMIZER
from .stored import initial

if TYPE_CHECKING:
    from ..source.blobs import StoredTensor
    from .parts import Keeper
    from .pipeline import Views
    from .state_keys import StateKeys

# dtypes that codes of several numbers are packed in
PACKED_IN = frozenset(("uint8", "int8", "int16", "int32"))
# what counts steps, whatever its parameter's shape
STEP = "step"


class Part(NamedTuple):
    """One tensor of state on its way: the tensor, the stored ones that it is made of, its eager
    program.
    """

    tensor: Tensor
    keys: tuple[str, ...]
    program: Program


@dataclass(slots=True, eq=False)
class MovingState:
    """The state of one optimizer on its way. `parts`: moment -> parameter -> tensor, and `origins`:
    parameter -> what the optimizer called what it is made of; `order`: those names as they stood.
    """

    of: StateKeys
    parts: dict[str, dict[str, Part]]
    origins: dict[str, tuple[Any, ...]]
    order: Sequence[Any]
    # whether rules spell its keys, so that it is theirs
    theirs: bool = False
    moved: bool = False
    # of numbered parameters the numbers that they have now
    numbers: dict[str, int] = field(default_factory=dict)
    # the names of an earlier run's parameters in their order, to which this one may lead back
    earlier: Sequence[str] = ()
    # of parameters that are stored as packed codes the shape of their numbers
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def each(self) -> Iterator[tuple[str, Part]]:
        """Each of its tensors, by the key that it has now."""
        for moment, held in self.parts.items():
            for key, part in held.items():
                yield self.key(key, moment), part

    def key(self, parameter: str, moment: str) -> str:
        """The key that a tensor has now."""
        if self.of.numbering is None:
            return self.of.key(parameter, moment)
        return self.of.numbered_key(self.numbers[parameter], moment)

    def renumber(self) -> None:
        """Numbers the parameters in the order of groups, and of modules in each."""
        if self.of.numbering is None:
            return
        groups = self.of.numbering.groups
        of = {key: groups.get(origins[0], 0) for key, origins in self.origins.items()}
        ordered = sorted(self.origins, key=lambda key: of[key])
        self.numbers = {key: number for number, key in enumerate(ordered)}


@dataclass(slots=True)
class Following:
    """The optimizers whose state follows the parameters of a composition."""

    states: list[MovingState] = field(default_factory=list)
    # what ops cut off parameters and state, and is kept
    kept: Keeper | None = None
    # rules as moments see them, by identity, and why a rule is not for moments
    _made: dict[int, tuple[DirectedRule, DirectedRule | str]] = field(default_factory=dict)

    @classmethod
    def of(
        cls, states: Iterable[StateKeys], tensors: Mapping[str, StoredTensor], views: Views
    ) -> Following:
        """All state where it starts; `tensors` are all stored ones."""
        found = []
        for one in states:
            parts = {}
            for moment, held in one.tensors.items():
                begun = initial({key: tensors[key] for key in held.values()}, views)
                parts[moment] = {
                    name: Part(begun[key], (key,), ReadKey(key)) for name, key in held.items()
                }
            labels: dict[str, tuple[Any, ...]] = {}
            for label, name in one.owners.items():
                labels[name] = (*labels.get(name, ()), label)
            begun_at = MovingState(one, parts, labels, list(one.owners))
            begun_at.numbers = {name: label for label, name in one.owners.items()}
            begun_at.earlier = () if one.numbering is None else one.numbering.earlier
            begun_at.shapes = _packed_shapes(begun_at, tensors)
            begun_at.shapes |= {
                key: shape for key, shape in one.shapes.items() if tensors[key].spec.shape != shape
            }
            found.append(begun_at)
        return cls(found)

    def turned(self) -> Following:
        """The same for a way back, which starts where this one ended."""
        return Following(
            [
                MovingState(
                    one.of,
                    {moment: dict(held) for moment, held in one.parts.items()},
                    {key: (key,) for key in one.origins},
                    list(one.origins),
                    one.theirs,
                    earlier=(
                        ()
                        if one.of.numbering is None
                        else [one.of.spell(key) for key in one.of.owners.values()]
                    ),
                    shapes=dict(one.shapes),
                )
                for one in self.states
            ]
        )

    @property
    def active(self) -> list[MovingState]:
        return [one for one in self.states if not one.theirs]

    def take_out(
        self, rules: Sequence[DirectedRule], tensors: Mapping[str, Tensor], views: Views
    ) -> Mapping[str, Tensor]:
        """The tensors without the state among them that follows; what rules name is theirs."""
        gone: set[str] = set()
        for one in self.active:
            if not one.of.seen:
                continue
            own = {key: tensors[key] for key, _ in one.each() if key in tensors}
            if find_taken_keys(rules, own, views):
                one.theirs = True
            else:
                gone.update(own)
        return {key: t for key, t in tensors.items() if key not in gone} if gone else tensors

    def follow(
        self,
        bound: StepResult,
        before: Mapping[str, Tensor],
        views: Views,
        report: Report,
    ) -> None:
        """Moves all state as `bound` moved the parameters, which were `before`. State that rules
        see is put beside its tensors. M410 for what cannot follow.
        """
        takers = _takers(bound)
        for one in self.active:
            _StateStep(self, one, takers, bound, before, views, report).take()

    def as_moments_see(self, rule: DirectedRule) -> DirectedRule | str:
        """The rule for moments, or why there is none."""
        found = self._made.get(id(rule))
        if found is None:
            # the rule is kept beside the result: an id means nothing after its object is gone
            found = self._made[id(rule)] = (rule, _for_moments(rule))
        return found[1]

    def outside(self) -> dict[str, Part]:
        """What follows and is not among the tensors that rules see."""
        return {key: part for one in self.active if not one.of.seen for key, part in one.each()}

    def differences(self, start: Following) -> list[str]:
        """What of `start` a way back, which this is, does not bring back."""
        out = []
        for one, was in zip(self.states, start.states, strict=True):
            if was.theirs or was.of.seen:
                continue
            here = {
                one.of.key(name, moment): part.tensor.spec
                for moment, held in one.parts.items()
                for name, part in held.items()
            }
            there = {
                was.of.key(name, moment): spec
                for moment, held in was.of.specs.items()
                for name, spec in held.items()
            }
            wrong = [key for key in there if here.get(key) != there[key]]
            wrong += [key for key in here if key not in there]
            if wrong:
                out.append(f"optimizer state does not return: {listed(wrong, 4)}")
                continue
            order = list(was.of.owners.values())
            if was.of.numbering is None:
                order = in_modules(order)
            if list(one.origins) != order or any(
                list(group) != [key for key in order if key in group] for group in was.of.groups
            ):
                out.append(
                    f"the optimizer state at {was.of.state.place} returns with its parameters in "
                    "another order"
                )
        return out


class _Taker(NamedTuple):
    """A rule and what it did: outputs with the keys that they are made of, or keys that go."""

    rule: DirectedRule
    made: dict[str, tuple[str, ...]]
    gone: dict[str, None]


def _takers(bound: StepResult) -> list[_Taker]:
    found: dict[int, _Taker] = {}
    for key, made in bound.provenance.items():
        found.setdefault(id(made.rule), _Taker(made.rule, {}, {})).made[key] = made.keys
    for key, rule in (*bound.dropped.items(), *bound.redundant.items()):
        found.setdefault(id(rule), _Taker(rule, {}, {})).gone[key] = None
    return list(found.values())


class _StateStep:
    """One state on one step."""

    def __init__(
        self,
        following: Following,
        one: MovingState,
        takers: Sequence[_Taker],
        bound: StepResult,
        before: Mapping[str, Tensor],
        views: Views,
        report: Report,
    ) -> None:
        self._following, self._one, self._takers = following, one, takers
        self._bound, self._before, self._views, self._report = bound, before, views, report
        self._new: dict[str, dict[str, Part]] = {moment: {} for moment in one.parts}
        self._refused: dict[tuple[int, str], list[str]] = {}
        self._rules: dict[int, DirectedRule] = {}
        self._ways: dict[tuple[int, str], str] = {}
        # shapes of parameters, where headers do not say them: before the step, and behind it
        self._was: dict[str, tuple[int, ...]] = dict(one.shapes)
        self._is: dict[str, tuple[int, ...]] = {}
        # the names that numbers had when all began, with their places
        self._called = (
            {name: at for at, name in enumerate(one.of.owners.values())}
            if one.of.numbering is not None
            else {}
        )

    def take(self) -> None:
        """The state behind the step."""
        one, bound = self._one, self._bound
        kept = {key for key in one.origins if key in bound.tensors and key not in bound.provenance}
        origins = {key: found for key, found in one.origins.items() if key in kept}
        came: dict[str, tuple[str, ...]] = {key: (key,) for key in kept}
        for moment, held in one.parts.items():
            self._new[moment].update((key, part) for key, part in held.items() if key in kept)
        self._is.update((key, shape) for key, shape in one.shapes.items() if key in kept)
        for taker in self._takers:
            if any(step.name in CODING for step in taker.rule.steps):
                taker = self._encoded(taker)
                one.moved |= bool(taker.made)
            elif self._was:
                self._packed(taker)
            if self._adds(taker):
                continue
            for key, keys in taker.made.items():
                if found := tuple(o for k in keys for o in one.origins.get(k, ())):
                    origins[key], came[key] = tuple(dict.fromkeys(found)), keys
                    as_seen = self._following.as_moments_see(taker.rule)
                    one.moved |= (
                        isinstance(as_seen, str)
                        or bool(as_seen.steps)
                        or self._renames(key, origins[key])
                    )
            one.moved |= any(key in one.origins for key in taker.gone)
            for moment, held in one.parts.items():
                self._rule(taker, moment, held)
        if self._refused:
            self._refuse()
            return
        place = {label: at for at, label in enumerate(one.order)}
        # a name that was there before keeps its number, whatever is called so now
        there = {} if one.of.numbering is None else self._called
        order = sorted(origins, key=lambda key: there.get(key, min(place[o] for o in origins[key])))
        called = {one.of.spell(key): key for key in origins}
        if one.earlier and set(one.earlier) == called.keys():
            order = [called[name] for name in one.earlier]
        else:
            order = in_modules(order)
        if one.of.settings:
            goals: dict[str, list[tuple[str, int]]] = {key: [] for key in one.origins}
            for key in order:
                for was in goals.keys() & came[key]:
                    goals[was].append(one.of.settings_of(key))
            bound.settings.update((one.of.settings_of(key), found) for key, found in goals.items())
        one.origins = {key: origins[key] for key in order}
        one.parts = {
            moment: {key: held[key] for key in one.origins if key in held}
            for moment, held in self._new.items()
        }
        one.shapes = {key: self._is[key] for key in one.origins if key in self._is}
        one.renumber()
        if one.of.seen:
            self._put_back()

    def _adds(self, taker: _Taker) -> bool:
        """Whether a rule adds tensors beside numbered parameters; says so, for their numbers are
        nowhere. A rule that drops state says that they begin without, in the order of modules.
        """
        rule, one = taker.rule, self._one
        if (
            one.of.numbering is None
            or rule.optimizer == "drop"
            or not any(step.op.kind == "make" for step in rule.steps)
        ):
            return False
        new = [key for key, keys in taker.made.items() if key not in one.origins and keys]
        if not new or one.origins.keys().isdisjoint(k for key in new for k in taker.made[key]):
            return False
        why = "it adds tensors, and no file says which numbers the new module gives them"
        way = (
            "where they count behind their neighbours, without state, that is the first of these: "
        )
        self._cannot(rule, why, new, way)
        return True

    def _encoded(self, taker: _Taker) -> _Taker:
        """The taker with the parts of codes alone, of parameters that have state."""
        # few checkpoints have both state and rules for number formats
        from .encoded_states import encoded_parameters

        rule, of = taker.rule, self._one.origins
        keys = dict.fromkeys(key for keys in taker.made.values() for key in keys)
        if of.keys().isdisjoint(keys) or rule.optimizer == "drop":
            return taker
        as_seen = self._following.as_moments_see(rule)
        found = (
            as_seen
            if isinstance(as_seen, str)
            else encoded_parameters(
                rule, as_seen, keys, self._bound, self._before, self._numbers_of, self._views
            )
        )
        if isinstance(found, str):
            self._cannot(rule, found, [key for key in keys if key in of])
            return taker._replace(made={})
        self._was.update(found.before)
        self._is.update(
            (key, shape)
            for key, shape in found.after.items()
            if shape != self._bound.tensors[key].spec.shape
        )
        return taker._replace(made=found.outputs)

    def _numbers_of(self, key: str) -> tuple[int, ...] | None:
        """The shape that the state of a parameter says; empty where it says none, None where there
        is no state.
        """
        if key not in self._one.origins:
            return None
        own = self._was.get(key, self._before[key].spec.shape)
        shapes = [
            held[key].tensor.spec.shape
            for moment, held in self._one.parts.items()
            if moment != STEP and key in held
        ]
        return own if own in shapes else max(shapes, key=prod, default=())

    def _packed(self, taker: _Taker) -> None:
        """The shapes of numbers that are packed, behind a rule that moves their codes."""
        from .encoded_states import packing

        whole = self._following.as_moments_see(taker.rule)
        packed = {
            new: members
            for new, keys in taker.made.items()
            if (members := [key for key in keys if key in self._was])
        }
        if not packed or isinstance(whole, str):
            return
        if not whole.steps:
            self._is.update((new, self._was[keys[0]]) for new, keys in packed.items())
            return
        numbers = {
            key: self._blank("float32", self._was[key]) for keys in packed.values() for key in keys
        }
        made = bind(
            [whole], [], numbers, self._views, BindContext(lambda *_: False), own := Report()
        )
        for new, keys in packed.items():
            codes = self._bound.tensors[new].spec.shape
            each = {packing(self._before[key].spec.shape, self._was[key]) for key in keys}
            shape = made.tensors[new].spec.shape if new in made.tensors else ()
            if own.has_errors() or each != {packing(codes, shape)} or None in each:
                why = "its codes are packed, and the rule does not move the numbers as it does them"
                self._cannot(taker.rule, why, keys)
                return
            self._is[new] = shape

    def _blank(self, dtype: str, shape: tuple[int, ...]) -> Tensor:
        spec = spec_of(dtype, shape)
        return Tensor(spec, self._views.intern(filled(spec.shape, 0)), ())

    def _renames(self, key: str, origins: tuple[Any, ...]) -> bool:
        """Whether the optimizer calls a parameter otherwise now. Numbers stay where names change
        one by one, and names beside them do not.
        """
        if (numbering := self._one.of.numbering) is not None:
            owners = self._one.of.owners
            return len(origins) > 1 or (
                owners.get(origins[0], origins[0]) != key
                and (numbering.known == NAMED or key in self._called)
            )
        return origins != (self._one.of.spell(key),)

    def _put_back(self) -> None:
        bound = self._bound
        for key, part in self._one.each():
            if key in bound.tensors:
                self._report.add(
                    "M212",
                    f"{printable(key)} would be written twice",
                    notes=("it is state of an optimizer that follows its parameter",),
                    help="give the other tensor another name, or name the state in a rule of its "
                    "own",
                )
                continue
            bound.tensors[key] = part.tensor
            bound.programs[key] = part.program

    def _rule(self, taker: _Taker, moment: str, held: Mapping[str, Part]) -> None:
        """What one rule does to the tensors of one moment."""
        one, rule, bound = self._one, taker.rule, self._bound
        key_of = one.of.key
        for key in taker.gone:
            if key in held:
                bound.left_behind[key_of(key, moment)] = rule
        taken = dict.fromkeys(k for keys in taker.made.values() for k in keys if k in held)
        if not taken:
            return
        if rule.optimizer == "drop":
            # beside what is added the parameter stays, and has its state
            gone = [k for k in taken if k in bound.provenance or k not in bound.tensors]
            bound.left_behind.update({key_of(key, moment): rule for key in gone})
            return
        as_seen = self._following.as_moments_see(rule)
        if isinstance(as_seen, str):
            self._cannot(rule, as_seen, taken)
            return
        layout: dict[str, Part] = {}
        for new, keys in taker.made.items():
            members = [key for key in keys if key in held]
            if not members:
                continue
            lacking = [key for key in keys if key not in held]
            if lacking and rule.optimizer != "zeros":
                self._cannot(
                    rule,
                    f"{listed(lacking, 3)} of the same group as {printable(members[0])} "
                    f"{'has' if len(lacking) == 1 else 'have'} no `{printable(moment)}`",
                    lacking,
                    "let the rule make it: `optimizer: {missing: zeros}`; ",
                )
                continue
            shapes = {key: held[key].tensor.spec.shape for key in members}
            wanted = {key: self._was.get(key, self._before[key].spec.shape) for key in members}
            axes = any(wanted.values())
            if moment == STEP or (axes and not any(shapes.values())):
                self._scalar(rule, moment, new, members, held)
                continue
            if odd := [key for key in members if shapes[key] != wanted[key]]:
                self._cannot(
                    rule,
                    f"`{printable(moment)}` has another shape than its parameter "
                    f"({list(shapes[odd[0]])} beside {list(wanted[odd[0]])})",
                    odd,
                )
                continue
            layout.update((key, held[key]) for key in members)
            layout.update((key, self._zeros(key, held[members[0]])) for key in lacking)
        if layout:
            self._layout(as_seen, rule, moment, layout)

    def _scalar(
        self,
        rule: DirectedRule,
        moment: str,
        new: str,
        members: Sequence[str],
        held: Mapping[str, Part],
    ) -> None:
        """One of equal ones."""
        bound, key_of = self._bound, self._one.of.key
        parts = [held[key] for key in members]
        keys = tuple(key_of(key, moment) for key in members)
        if len({part.tensor.spec for part in parts}) > 1:
            self._cannot(rule, f"`{printable(moment)}` differs in dtype or shape", members)
            return
        if len(parts) > 1 and len({part.keys for part in parts}) > 1:
            bound.checks.append(
                ValueCheck(
                    "equal",
                    tuple(part.tensor for part in parts),
                    None,
                    "M404",
                    f"the optimizer state `{printable(moment)}` differs in what becomes "
                    f"{printable(new)}",
                    rule.label,
                    keys,
                )
            )
        part = parts[0]._replace(tensor=_apart(parts[0].tensor))
        self._new[moment][new] = part
        bound.followed[key_of(new, moment)] = Followed(rule, keys, part.tensor, new)

    def _layout(
        self, rule: DirectedRule, whole: DirectedRule, moment: str, held: Mapping[str, Part]
    ) -> None:
        """The rule over the tensors of one moment, as it is over their parameters."""
        own, bound, key_of = Report(), self._bound, self._one.of.key
        kept = self._following.kept
        if kept is not None:
            kept = kept.within(f"{self._one.of.state.place} {moment}")
        made = bind(
            [rule],
            [],
            {key: part.tensor for key, part in held.items()},
            self._views,
            BindContext(lambda *_: False, kept=kept),
            own,
            {key: part.program for key, part in held.items()},
        )
        if own.has_errors():
            for found in own.diagnostics:
                self._cannot(whole, found.message, held)
            return
        bound.checks += [
            check._replace(keys=tuple(key_of(key, moment) for key in check.keys))
            for check in made.checks
        ]
        for key, tensor in made.tensors.items():
            keys, tensor = made.provenance[key].keys, _apart(tensor)
            stored = tuple(dict.fromkeys(s for k in keys for s in held[k].keys))
            self._new[moment][key] = Part(tensor, stored, made.programs[key])
            if keys != (key,) or rule.steps:
                bound.followed[key_of(key, moment)] = Followed(
                    whole, tuple(key_of(k, moment) for k in keys), tensor, key
                )

    def _zeros(self, key: str, like: Part) -> Part:
        """A tensor of state of 0, for a parameter that has none where its group has."""
        shape = self._was.get(key, self._before[key].spec.shape)
        zeros = self._blank(like.tensor.spec.dtype, shape)
        args = get("fill").Args(value=0, dtype=zeros.spec.dtype, shape=shape)
        made = ApplyOp("fill", args, 1, 0, (like.program,), (zeros.spec.dtype,))
        return Part(zeros, (), made)

    def _cannot(self, rule: DirectedRule, why: str, keys: Iterable[str], way: str = "") -> None:
        self._rules[id(rule)] = rule
        self._ways[id(rule), why] = way
        found = self._refused.setdefault((id(rule), why), [])
        found += [key for key in keys if key not in found]

    def _refuse(self) -> None:
        way = together(option("params", f"{OPTIMIZER_PARAM}=drop"), option("allow", "drop"))
        for (number, why), keys in self._refused.items():
            rule = self._rules[number]
            self._report.add(
                "M410",
                f"the optimizer state at {self._one.of.state.place} cannot follow "
                f"{plural(len(keys), 'parameter')} through rule {rule.name!r}: {why}",
                spans=(rule.span,),
                notes=(listed(keys, 8),),
                help=f"{self._ways[number, why]}let the rule drop the state of its parameters: "
                f"`optimizer: drop`; begin with a new optimizer: {way}; or carry it all as it is: "
                f"{option('allow', STALE_OPTIMIZER)}",
                permit=STALE_OPTIMIZER,
            )


def _apart(tensor: Tensor) -> Tensor:
    """The tensor as one of its own: optimizers change state in place, and copies that are written
    as one tensor would be changed once for each.
    """
    return Tensor(tensor.spec, tensor.view, tensor.sources)


def _packed_shapes(
    one: MovingState, tensors: Mapping[str, StoredTensor]
) -> dict[str, tuple[int, ...]]:
    """The shapes of the numbers of parameters that are stored as packed codes."""
    packed = [key for key in one.origins if tensors[key].spec.dtype in PACKED_IN]
    if not packed:
        return {}
    from .encoded_states import packed_shape

    found = {}
    for key in packed:
        moments = [h[key].tensor.spec.shape for m, h in one.parts.items() if m != STEP and key in h]
        if (shape := packed_shape(tensors[key].spec, moments)) is not None:
            found[key] = shape
    return found


def _for_moments(rule: DirectedRule) -> DirectedRule | str:
    """The rule as it is for moments: layout alone, whatever the tensors' dtypes, cut and padded
    with 0. The text says why a rule has none.
    """
    steps = []
    if any(step.name in CODING for step in rule.steps):
        from .encoded_states import for_codes

        found = for_codes(rule)
        if isinstance(found, str):
            return found
        rule = found
    for step in rule.steps:
        if step.name == "cast":
            continue
        if isinstance(step.op, ValueOp) or step.op.kind in ("make", "decide", "exchange"):
            return f"`{step.name}` makes other numbers, and moments of these are not known"
        if hasattr(step.args, "value"):
            step = replace(step, args=replace(step.args, value=0))
        steps.append(step)
    return replace(
        rule,
        steps=tuple(steps),
        when={},
        optional=True,
        keep_source=False,
        if_exists="error",
        forward=None,
    )


def in_modules(keys: Sequence[str]) -> list[str]:
    """The parameters in an order that modules can have them in: those of one module together, each
    where its first one stands, and numbered modules by their numbers.
    """
    root: dict[str, Any] = {}
    for key in keys:
        here = root
        *path, last = key.split(".")
        for name in path:
            here = here.setdefault(f"{name}.", {})
        here[last] = key
    out: list[str] = []
    stack: list[Any] = [root]
    while stack:
        here = stack.pop()
        if isinstance(here, str):
            out.append(here)
            continue
        names = list(here)
        if all(name[:-1].isdecimal() for name in names if isinstance(here[name], dict)):
            names.sort(key=lambda name: int(name[:-1]) if isinstance(here[name], dict) else -1)
        stack += [here[name] for name in reversed(names)]
    return out
