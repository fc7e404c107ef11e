"""What a plan makes of the state of optimizers: whether it follows, stays right or goes stale.

State by name goes stale as soon as a parameter's name or shape changes. State by number counts the
parameters in the order of the module, which no name shows: it stays right where tensors get other
names one by one, and goes stale where their set, their shapes or their order change. A cast leaves
it right: torch keeps moments in a dtype of their own, or casts them when it loads them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ..core import view as views
from ..core.errors import Report, fail, listed, option, plural, printable, together
from ..source.pickle.tree import DictNode
from ..source.target import items_of
from ..source.tree import prune, replace_dict, tensor_records
from .graph import ComputedTensor, Tensor
from .numbered_states import GIVEN, REMEMBERED
from .optimizer_states import GROUPS, SEEN, Names, OptimizerState, may_train, plain
from .pipeline import Views
from .request import OPTIMIZER_NAMES, OPTIMIZER_PARAM, STALE_OPTIMIZER
from .stored import untouched_key

if TYPE_CHECKING:
    from ..core.errors import Span
    from ..core.spec import Spec
    from ..source.index import Index, Source
    from .compose import Composition
    from .following import MovingState

S = TypeVar("S", bound="Source")


# the one thing that may be said of it by name, and has to be allowed
DROP = "drop"


# what a stamp remembers
LASTING = ("stale", "dropped")


_INTEGERS = re.compile(r"[0-9]+")


class OptimizerVerdict(NamedTuple):
    """What becomes of all state, None where there is none, and notes.

    "followed": it was moved as its parameters were. "right": it is carried, and right. "renamed":
    it goes by number, names change, and so it is right if the order of parameters does not.
    "stale": it is carried and wrong, as somebody allowed. "dropped": it is left out.
    """

    became: str | None
    notes: tuple[str, ...] = ()


def judge_states(
    states: Sequence[OptimizerState], composition: Composition, index: Index, allow: frozenset[str]
) -> OptimizerVerdict:
    """What the plan makes of them. M410 where state would go stale, unless that is allowed."""
    if not states or not composition.steps:
        return OptimizerVerdict("right" if states else None)
    moved = [one for one in following_of(composition) if one.moved]
    own = {key for state in states for key in state.keys}
    numbered = any(one.of.numbering is not None for one in moved)
    if moved:
        gone = {id(one.of.state) for one in moved}
        states = [state for state in states if id(state) not in gone]
    if not (states or numbered):
        return OptimizerVerdict("followed", tuple(map(_followed, moved)))
    fates = follow_tensors(composition, index, own)
    # nothing says in which order a module has what has changed places under new names
    unsure = []
    for one in moved:
        names = set(one.of.owners.values())
        strange = {key for key in fates.moved & names if not names.issuperset(fates.same[key])}
        if one.of.numbering is not None and strange:
            unsure.append(one)
    states = [*states, *(one.of.state for one in unsure)]
    moved = [one for one in moved if one not in unsure]
    notes, stale, report = list(map(_followed, moved)), False, Report()
    renamed = False
    undone = all(
        step.backwards and step.memory.get("optimizer") == "stale" for step, _ in composition.steps
    )
    for state in states:
        broken, how = _broken(state, fates)
        if not broken:
            if how:
                renamed = True
                notes.append(how)
            continue
        many = plural(len(broken), "parameter")
        if STALE_OPTIMIZER in allow and undone:
            notes.append(
                f"optimizer state at {state.place} is carried as it is: the stamp says that the "
                "run that is undone left it so"
            )
        elif STALE_OPTIMIZER in allow:
            stale = True
            notes.append(
                f"optimizer state at {state.place} is stale and carried as it is: {many} changed: "
                f"{listed(broken, 4)}"
            )
        else:
            way = together(option("params", f"{OPTIMIZER_PARAM}={DROP}"), option("allow", DROP))
            report.add(
                "M410",
                f"the optimizer state at {state.place} would go stale: the plan changes {many} of "
                "it",
                spans=tuple(dict.fromkeys(rules_of(broken, composition)))[:4],
                notes=(
                    how,
                    listed(broken, 8),
                    *[
                        (
                            "the stamp says that the run that is undone carried it as it was: it "
                            "would fit again"
                        )
                    ]
                    * undone,
                ),
                help=_which(state)
                + f"leave it out and begin with a new optimizer: {way}; or carry it as it is: "
                f"{option('allow', STALE_OPTIMIZER)}",
                permit=STALE_OPTIMIZER,
            )
    report.check()
    became = "stale" if stale else "renamed" if renamed else "followed" if moved else "right"
    return OptimizerVerdict(became, tuple(notes))


def following_of(composition: Composition) -> Sequence[MovingState]:
    """The states that follow their parameters, whether these move or not."""
    return () if composition.following is None else composition.following.active


def said_names(composition: Composition) -> list[dict[str, Any]]:
    """For a stamp: the names of numbered parameters in the order of the numbers before and after,
    where a person gave them or numbers changed. The tensors of an output need not be in this order.
    """
    return [
        {
            "place": one.of.state.place,
            "before": [one.of.spell(key) for key in one.of.owners.values()],
            "after": _in_order(one),
        }
        for one in following_of(composition)
        if one.of.numbering is not None
        and (one.moved or one.of.numbering.known in (GIVEN, REMEMBERED))
    ]


def _in_order(one: MovingState) -> list[str]:
    """The names of numbered parameters in the order that they have now."""
    return [one.of.spell(key) for key in sorted(one.numbers, key=lambda key: one.numbers[key])]


def _which(state: OptimizerState) -> str:
    """How to say which parameters the numbers of the state are."""
    if state.keys or not state.numbered:
        return ""
    names = option("params", f"{OPTIMIZER_NAMES}=@FILE")
    return f"say which parameters the numbers are, one name a line: {names}; "


def _followed(one: MovingState) -> str:
    said = f"optimizer state at {one.of.state.place} follows its parameters"
    if one.of.numbering is None:
        return said
    order = _in_order(one)
    return (
        f"{said}; its numbers are known {one.of.numbering.known}, and count in the output "
        f"{listed(order, 4)}: that is right if the new module has its parameters in this order"
    )


def dropped(params: Mapping[str, Any]) -> bool:
    """Whether somebody asked to leave optimizer state out; M115 for any other word."""
    if OPTIMIZER_PARAM not in params:
        return False
    if params[OPTIMIZER_PARAM] != DROP:
        fail(
            "M115",
            f"`{OPTIMIZER_PARAM}` can be `{DROP}`, not {printable(repr(params[OPTIMIZER_PARAM]))}",
            help=f"or {option('allow', STALE_OPTIMIZER)} carries it",
        )
    return True


def require_drop(states: Sequence[OptimizerState], allow: frozenset[str]) -> None:
    """M402 unless leaving the states out is allowed."""
    if states and DROP not in allow:
        where = listed([state.place for state in states], 4)
        what = (
            f"{option('params', f'{OPTIMIZER_PARAM}={DROP}')} leaves out "
            f"{plural(sum(s.tensors for s in states), 'tensor')} of optimizer state"
        )
        fail(
            "M402",
            f"{what}: {where}",
            help=f"if that is wanted: {option('allow', DROP)}",
            permit=DROP,
        )


def without_states(source: S, states: Sequence[OptimizerState]) -> S:
    """The source without these optimizers' tensors and values; it is closed with the source."""
    if not states:
        return source
    index, gone = source.index, {key for state in states for key in state.keys}
    unfit = {id(node): "" for state in states for node in state.nodes}
    tensors = {key: at for key, at in index.tensors.items() if key not in gone}
    if index.tree is None:
        tops = {state.path[0] for state in states if state.path}
        items = {
            key: value
            for key, value in index.items.items()
            if key not in tops and id(value) not in unfit
        }
        made = replace(index, tensors=tensors, items=items)
    else:
        outline, several, items = index.tree, len(index.tree.parts) > 1, {}
        homes = tuple(
            {
                GROUPS if match[1] is None else f"{match[1]}."
                for match in map(SEEN.fullmatch, gone)
                if match is not None
            }
        )
        parts = []
        for rank, part in enumerate(outline.parts):
            table = part.table
            root = part.root
            if table is not None and homes:
                own = tuple(
                    pair
                    for pair in table.pairs
                    if not (type(pair[0]) is str and (pair[0] in gone or pair[0].startswith(homes)))
                )
                root = replace_dict(
                    root, table, DictNode(table.kind, own, table.node, table.attributes)
                )
            parts.append(part._replace(root=prune(root, unfit)[0]))
            mark = f"@{rank}" if several else ""
            items.update({path + mark: value for path, value in items_of(parts[-1])})
        left = {
            outline.names[id(leaf)]
            for part in parts
            for leaf in tensor_records([part.root])
            if id(leaf) in outline.names
        }
        carried = {key: at for key, at in outline.passed_through.items() if key in left}
        ties = {key: first for key, first in outline.ties.items() if key in left and first in left}
        made = replace(
            index,
            tensors=tensors,
            items=items,
            tree=replace(outline, parts=tuple(parts), passed_through=carried, ties=ties),
        )
    found = copy(source)
    found.index = made
    return found


def left_out(states: Sequence[OptimizerState]) -> OptimizerVerdict:
    """What there is to say where the states are left out."""
    if not states:
        return OptimizerVerdict(None, ("there is no optimizer state to leave out",))
    where = listed([state.place for state in states], 4)
    return OptimizerVerdict(
        "dropped",
        (
            (
                f"optimizer state is left out: {plural(sum(s.tensors for s in states), 'tensor')} "
                f"at {where}"
            ),
        ),
    )


class TensorFates(NamedTuple):
    """`same`: key -> the outputs that are that tensor, cast or not. `others`: outputs that are made
    otherwise. `specs`: of the model's tensors that an optimizer may have; `moved`: keys whose new
    names stand in another order. `known(name)`: the key that a name means, of all `keys`.
    """

    same: Mapping[str, list[str]]
    others: list[str]
    specs: Mapping[str, Spec]
    moved: frozenset[str]
    known: Callable[[str], str | None]
    keys: frozenset[str]


def follow_tensors(composition: Composition, index: Index, own: set[str]) -> TensorFates:
    """What becomes of the tensors that rules see, but for those called `own`."""
    whole = Views()

    # a loop: a function that calls itself is a cycle, and would keep the caller's tensors
    def origin(tensor: Tensor) -> str | None:
        """The stored tensor whose elements these are, in their order, cast or not."""
        while len(tensor.sources) == 1 and isinstance(source := tensor.sources[0], ComputedTensor):
            call = source.computation
            if (
                call.op_call.op != "cast"
                or tensor.view != views.stored(0, source.spec.shape)
                or tensor.spec != source.spec
                or len(call.inputs) != 1
            ):
                return None
            tensor = call.inputs[0]
        return untouched_key(tensor, index.tensors, whole)

    @cache
    def names() -> Names:
        return Names(index.tensors.keys() - own)

    def known(name: str) -> str | None:
        return names().of(name)

    same: dict[str, list[str]] = {}
    others = []
    outputs = composition.graph.outputs
    if following := following_of(composition):
        gone = {key for one in following for key, _ in one.each()}
        outputs = {key: tensor for key, tensor in outputs.items() if key not in gone}
    for key, tensor in outputs.items():
        was = origin(tensor)
        if was is not None:
            same.setdefault(was, []).append(key)
        elif may_train(tensor.spec):
            others.append(key)
    specs = {
        key: stored.spec
        for key, stored in index.tensors.items()
        if key not in own and may_train(stored.spec)
    }
    return TensorFates(
        same,
        others,
        specs,
        _moved(specs, same),
        known,
        frozenset(index.tensors.keys() - own),
    )


def _moved(specs: Mapping[str, Spec], same: Mapping[str, list[str]]) -> frozenset[str]:
    """The keys whose new names stand elsewhere among the others than they did: two that change
    places, or count backwards.
    """
    pairs = [(key, same[key][0]) for key in specs if len(same.get(key, ())) == 1]
    found: set[str] = set()
    # a name that was there before stood where it stood
    there = {key: at for at, key in enumerate(specs)}
    common = [(there[new], key) for key, new in pairs if new in there]
    last = -1
    for at, key in common:
        if at < last:
            found.add(key)
        last = max(last, at)
    before: dict[str, tuple[Any, Any]] = {}
    for key, new in pairs:
        if key == new:
            continue
        form = _INTEGERS.sub("0", new)
        numbers, was = (
            [int(n) for n in _INTEGERS.findall(new)],
            [int(n) for n in _INTEGERS.findall(key)],
        )
        if form in before and before[form][0] > numbers and before[form][1] <= was:
            found.add(key)
        before[form] = (numbers, was)
    return frozenset(found)


def _broken(state: OptimizerState, fates: TensorFates) -> tuple[list[str], str]:
    """The parameters for which the state would be wrong, and why; or what is known of it."""
    if state.names:
        # of each name the parameter that it may speak of, and the key that this means
        spoken = {
            name: next(((one, key) for one in maybe if (key := fates.known(one)) is not None), None)
            for name, maybe in state.names.items()
        }
        owner = {name: found for name, found in spoken.items() if found is not None}
        kept = {key for key in state.keys if fates.same.get(key) == [key]} if state.keys else None
        wrong = {
            key: None
            for name, (one, key) in owner.items()
            if not stays(one, key, fates) and (kept is None or name in kept)
        }
        # of a parameter that is an object only the components are tensors
        objects = {name for name, found in spoken.items() if found is None}
        components = (
            [key for key in sorted(fates.keys) if key.rpartition("._")[0] in objects]
            if objects
            else []
        )
        broken = [key for key in components if key not in fates.same.get(key, ())]
        if broken:
            why = (
                "it refers by name to parameters that are several tensors, and no object says how "
            )
            return [*broken, *wrong], why + "the numbers lie in these"
        if owner:
            why = "it refers to parameters by name, and the names change"
            parts = {key.rpartition("._")[0] for key in components}
            if strange := [name for name in spoken if name in objects and name not in parts]:
                why += f"; there is no parameter for {listed(strange, 4)}"
            return list(wrong), why if wrong else ""
    if not (state.numbered or state.names):
        return [], ""
    subject = [key for key in map(fates.known, state.called) if key is not None]
    if not subject or len(subject) < state.numbered:
        subject = _with_shapes(state, fates.specs)
    wrong = {
        key: None for key in subject if len(fates.same.get(key, ())) != 1 or key in fates.moved
    }
    added = [key for key in fates.others if not wrong]
    if wrong or added:
        return (
            [*wrong, *added],
            (
                "it refers to parameters by number, and the set, the shapes or the order of what "
                "the numbers count change"
            ),
        )
    if any(fates.same[key] != [key] for key in subject):
        goes = (
            "goes by number"
            if not state.names
            else "names no parameter of these, and is taken to follow their order"
        )
        same = "which is right where the new module has its parameters in the order of the old one"
        return (
            [],
            (
                f"optimizer state at {state.place} {goes}, and is carried: names change one by "
                f"one, {same}"
            ),
        )
    return [], ""


def stays(name: str, key: str, fates: TensorFates) -> bool:
    """Whether what the name speaks of is still there, under that name."""
    outputs = fates.same.get(key, ())
    if key in outputs:
        return True
    return any(name == new or name == plain(new) for new in outputs)


def _with_shapes(state: OptimizerState, specs: Mapping[str, Spec]) -> list[str]:
    """The tensors that the numbers may count: those of a shape that one of them has, where each
    says its shape; else all.
    """
    shapes = Counter(state.shapes)
    there: Counter[tuple[int, ...] | None] = Counter(spec.shape for spec in specs.values())
    if len(state.shapes) < state.numbered or not state.shapes or None in shapes or shapes - there:
        return list(specs)
    return [key for key, spec in specs.items() if spec.shape in shapes]


def rules_of(keys: Iterable[str], composition: Composition) -> Iterator[Span]:
    """Where the rules stand that take or make these keys."""
    wanted = set(keys)
    for _, bound in composition.steps:
        for new, made in bound.provenance.items():
            if (new in wanted or not wanted.isdisjoint(made.keys)) and (
                made.rule.steps or made.keys != (new,)
            ):
                yield made.rule.span
        yield from (
            rule.span
            for key, rule in (*bound.dropped.items(), *bound.redundant.items())
            if key in wanted
        )
