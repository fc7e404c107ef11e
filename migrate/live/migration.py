"""What a question means for one state dict or opened checkpoint: the route, the graph, and what
there is to say about it.

A training process loads the same keys and shapes again and again. What was worked out for them once
is kept, unless values had a part in it; it refers to no value of the state dict, or a module would
hold the whole of what was once loaded into it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ..core import view as views
from ..core.diagnostics import Report, listed
from ..extra_state.age import States
from ..planning.graph import calls
from ..planning.plan import losses_of, steps_of
from ..planning.question import with_permissions
from ..planning.route import find_route
from ..running.prepare import compose_for, require_known, side_reader, walk_for
from ..running.stamp import Stamp

if TYPE_CHECKING:
    from ..core.diagnostics import Diagnostic
    from ..planning.compose import Composition
    from ..planning.graph import Tensor
    from ..planning.question import Question
    from ..planning.route import Route
    from ..source.index import Index, Source
    from .outputs import Way

# what a handle remembers: a few checkpoints take turns in a process at most
_MOST_KEPT = 4


@dataclass(frozen=True, slots=True)
class Migration:
    """One question, answered for one index.

    `names`: what a value that is no tensor is called now -> what it was called. `params` are those
    of the rules. `ways` fills with how each output is had, and belongs to the graph.
    """

    index: Index
    route: Route
    composition: Composition
    names: Mapping[str, str]
    params: Mapping[str, Any]
    notes: Sequence[str]
    warnings: Sequence[Diagnostic]
    ways: dict[str, Way] = field(default_factory=dict)

    @property
    def moves(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.route.legs)

    @property
    def changes(self) -> bool:
        """Whether anything comes out otherwise than it went in, be it a name."""
        outputs, index = self.composition.graph.outputs, self.index
        same = outputs.keys() == index.tensors.keys() and all(
            origin(tensor, index) == key for key, tensor in outputs.items()
        )
        return not (
            same
            and all(name == was for name, was in self.names.items())
            and self.names.keys() == index.items.keys()
        )

    @property
    def lasting(self) -> bool:
        """Whether the same keys, specs and strides mean the same again: no value decided
        anything.
        """
        return not any(bound.decided for _, bound in self.composition.legs)

    def without_values(self) -> Migration:
        """The same for any state dict of these keys and specs: it knows of none of them what stands
        in it.
        """
        index = replace(self.index, items=dict.fromkeys(self.index.items))
        return replace(self, index=index, composition=replace(self.composition, values=None))

    def describe(self) -> dict[str, Any]:
        """What a run into files would have in its answer, as far as it applies."""
        return {
            "steps": steps_of(self.composition),
            "layouts": dict(self.route.layouts),
            "params": dict(self.params),
            "losses": losses_of(self.composition),
            "notes": list(self.notes),
            "warnings": [d.to_json() for d in self.warnings],
        }


def prepare(source: Source, question: Question, stamp: Stamp | None = None) -> Migration:
    """The migration that the question asks for; raises all that speaks against it. No tensor is
    read, but for what decides keys.
    """
    return with_permissions(question, lambda asked: _prepared(source, asked, stamp))


def _prepared(source: Source, question: Question, stamp: Stamp | None) -> Migration:
    known = require_known(source, question)
    route = find_route(
        source.index, side_reader(source), stamp or Stamp(), question, states=States(source)
    )
    walk = walk_for(source, route, False)
    composition = compose_for(source, route, question, walk, prove=False)
    report = Report()
    route.check_output(composition.graph.outputs, walk.sides.read, report)
    _refuse_conversions(composition.graph.outputs, source, question.allow, report)
    report.check()
    index, values = source.index, composition.values
    names = values.names if values is not None else {key: key for key in index.items}
    notes = [
        *(note for _, bound in composition.legs for note in bound.notes),
        *walk.notes,
        *known,
        *route.remarks,
    ]
    return Migration(
        index, route, composition, names, walk.params, notes, (*route.warnings, *walk.warnings)
    )


def origin(tensor: Tensor, index: Index) -> str | None:
    """The key whose stored tensor the output is, untouched; None if it is anything else."""
    key = tensor.sources[0] if len(tensor.sources) == 1 else None
    if not isinstance(key, str):
        return None
    at = index.tensors[key]
    return (
        key
        if tensor.spec == at.spec and tensor.view == views.stored(0, at.spec.shape, at.strides)
        else None
    )


def _refuse_conversions(
    outputs: Mapping[str, Tensor], source: Source, allow: frozenset[str], report: Report
) -> None:
    """M401 where rules need the elements of a tensor whose class holds them in another number
    format, unless that is allowed.
    """
    converted: frozenset[str] = getattr(source, "converted", frozenset())
    if not converted or "lossy" in allow:
        return
    touched = [tensor for tensor in outputs.values() if origin(tensor, source.index) is None]
    touched += [read for call in calls(touched) for read in call.inputs]
    moved = dict.fromkeys(
        key
        for tensor in touched
        for key in tensor.sources
        if isinstance(key, str) and key in converted
    )
    if moved:
        report.add(
            "M401",
            f"rules need the elements of {listed(list(moved), 4)}, whose class holds them in a "
            "number format of its own",
            help='allow={"lossy"} has them dequantized; rules that only rename hand the objects '
            "on as they are",
            permit="lossy",
        )


class Kept:
    """The last migrations by what they were prepared for. Threads may share it."""

    def __init__(self) -> None:
        self._found: OrderedDict[Hashable, Any] = OrderedDict()

    def get(self, signature: Hashable, make: Callable[[], Migration]) -> Migration:
        """What was kept for the signature, else what `make` answers with, kept if it lasts."""
        found: Migration | None = self._found.get(signature)
        if found is None:
            found = make()
            if found.lasting:
                self._found[signature] = found = found.without_values()
                while len(self._found) > _MOST_KEPT:
                    self._found.popitem(last=False)
        return found

    def __deepcopy__(self, memo: Any) -> Kept:
        return Kept()

    def __reduce__(self) -> Any:
        return Kept, ()
