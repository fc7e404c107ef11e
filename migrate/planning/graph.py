"""The graph: each output key is a Tensor, that is a view over sources. Tied to no path, no format,
and not to torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from ..core.spec import Spec
from ..core.view import View
from ..ops.base import OpCall


class Tensor:
    """One tensor of the graph: `view` over leaves that are positions in `sources`.

    A source is a stored key (str) or a `ComputedTensor`. Tensors of the same rule and shapes share
    one view object; only their sources differ. Immutable by convention; a slotted class because a
    plan holds one per key.
    """

    __slots__ = ("sources", "spec", "view")

    def __init__(self, spec: Spec, view: View, sources: tuple[str | ComputedTensor, ...]) -> None:
        self.spec, self.view, self.sources = spec, view, sources


@dataclass(frozen=True, eq=False, slots=True)
class ComputedTensor:
    """A tensor that is computed, not copied: output number `output` of `step`'s eager form on
    `inputs`.

    Used for value ops, and for a layout op whose view would have too many pieces. Compared by
    identity; the `parts` outputs of one step share one `computation`, so that they are computed
    once.
    """

    computation: Computation
    output: int
    spec: Spec


@dataclass(frozen=True, eq=False, slots=True)
class Computation:
    """A step computed on whole inputs or, for a `ValueOp`, box by box. `rule` and `keys` (of the
    source) are for messages and reports.

    `lossy`: the result does not determine the input.
    """

    op_call: OpCall
    inputs: tuple[Tensor, ...]
    parts: int
    rule: str = ""
    keys: tuple[str, ...] = ()
    lossy: bool = False


class ReadKey(NamedTuple):
    """Eager program: the stored tensor of this key."""

    key: str


class ApplyOp(NamedTuple):
    """Eager program: output number `output` of an op's eager twin on its inputs; `dtypes` are
    torch's names of their elements.
    """

    op: str
    args: Any
    parts: int
    output: int
    inputs: tuple[Program, ...]
    dtypes: tuple[str, ...]


Program: TypeAlias = "ReadKey | ApplyOp"


class ValueCheck(NamedTuple):
    """A condition on values, to be met before anything is published.

    kind "equal": all tensors hold the same bytes; kind "filled": each element equals `value`.
    """

    kind: str
    tensors: tuple[Tensor, ...]
    value: float | None
    code: str
    message: str
    rule: str
    keys: tuple[str, ...]


@dataclass(slots=True)
class Graph:
    """All outputs of a run, in output order, and the conditions on values that the run must
    check.
    """

    outputs: dict[str, Tensor] = field(default_factory=dict)
    checks: list[ValueCheck] = field(default_factory=list)
    # output key -> who made it (planning.bind.Provenance); None for a key that a `keep` pattern
    # carried over
    origin: dict[str, Any] = field(default_factory=dict)


def computations(tensors: Iterable[Tensor]) -> list[Computation]:
    """All calls that these tensors need, each once."""
    seen: dict[int, Computation] = {}
    todo = list(tensors)
    while todo:
        for source in todo.pop().sources:
            if isinstance(source, ComputedTensor) and id(source.computation) not in seen:
                seen[id(source.computation)] = source.computation
                todo += source.computation.inputs
    return list(seen.values())


def stored_keys(tensor: Tensor) -> list[str]:
    """The stored tensors that an output is made of, however far below, each once."""
    if all(isinstance(source, str) for source in tensor.sources):
        return list(dict.fromkeys(s for s in tensor.sources if isinstance(s, str)))
    found: dict[str, None] = {}
    todo, seen = [tensor], set[int]()
    while todo:
        for source in todo.pop().sources:
            if not isinstance(source, ComputedTensor):
                found[source] = None
            elif id(source.computation) not in seen:
                seen.add(id(source.computation))
                todo += source.computation.inputs
    return list(found)
