"""The graph: each output key is a Tensor, a view over sources. Tied to no path, format or torch.

`kind_of` says what a computed tensor costs: whether a part of it needs only parts of its inputs,
and how boxes of it are cut. Both the plan, which says how much memory a run takes, and the run ask
it. It looks at shapes alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from .. import ops
from ..core.errors import listed, option, printable
from ..core.spec import BITS, Spec, unit
from ..core.view import View
from ..ops.base import OpCall, ValueOp
from ..source.blobs import ChunkOf, key_of

if TYPE_CHECKING:
    from ..ops.base import Box
    from ..rules.compiled import DirectedRule


class Tensor:
    """One tensor of the graph: `view` over leaves that are positions in `sources`.

    A source is a stored key, a chunk of one that lies in several places, or a `ComputedTensor`.
    Tensors of the same rule and shapes share one view object; only their sources differ. Immutable
    by convention; a slotted class because a plan holds one per key.
    """

    __slots__ = ("sources", "spec", "view")

    def __init__(self, spec: Spec, view: View, sources: tuple[TensorSource, ...]) -> None:
        self.spec, self.view, self.sources = spec, view, sources


@dataclass(frozen=True, eq=False, slots=True)
class ComputedTensor:
    """A tensor that is computed, not copied: output number `output` of `step`'s eager form on
    `inputs`.

    Used for value ops, and for a layout op whose view would have too many pieces. Compared by
    identity; the `parts` outputs of one step share one `computation`, computed once. `stands_for`:
    the key of the stored tensor that it is in the place of, because that cannot be read.
    """

    computation: Computation
    output: int
    spec: Spec
    stands_for: str | None = None


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


# of sources that are keys
_TEXTS = frozenset({str})

Program: TypeAlias = "ReadKey | ApplyOp"
TensorSource: TypeAlias = "str | ChunkOf | ComputedTensor"


class Item(NamedTuple):
    """A tensor on its way through a rule: values, tensor, the keys it is made of, eager program."""

    values: tuple[Any, ...]
    tensor: Tensor
    keys: tuple[str, ...]
    program: Program | None = None


NOT_ASSUMED = (
    "the checkpoint is not what the rule assumes: correct the rule, or leave these keys to another "
    "one"
)


def assumed(rule: DirectedRule) -> str:
    """What to do where a rule finds what it does not assume; the params that choose it say more."""
    chosen = [f"{name}={printable(str(value))}" for name, value in rule.params.items()]
    if not chosen:
        return NOT_ASSUMED
    return f"{NOT_ASSUMED}; this one is for {listed(chosen)}, and {option('params')} may choose"


class ValueCheck(NamedTuple):
    """A condition on values, to be met before anything is published.

    kind "equal": all tensors hold the same bytes; kind "filled": each element equals `value`.
    `rule` is "" for what the checkpoint itself promises.
    """

    kind: str
    tensors: tuple[Tensor, ...]
    value: float | None
    code: str
    message: str
    rule: str
    keys: tuple[str, ...]
    help: str = NOT_ASSUMED


@dataclass(slots=True)
class Graph:
    """All outputs of a run, in output order, and the conditions on values that it must check."""

    outputs: dict[str, Tensor] = field(default_factory=dict)
    checks: list[ValueCheck] = field(default_factory=list)
    # output key -> who made it (planning.bind.Provenance); None for a key that `keep` carried over
    origin: dict[str, Any] = field(default_factory=dict)


def computations(tensors: Iterable[Tensor]) -> list[Computation]:
    """All calls that these tensors need, each once."""
    seen: dict[int, Computation] = {}
    todo = list(tensors)
    while todo:
        sources = todo.pop().sources
        # a tensor that many were stacked into has many, all of them keys as a rule
        if _TEXTS.issuperset(map(type, sources)):
            continue
        for source in sources:
            if isinstance(source, ComputedTensor) and id(source.computation) not in seen:
                seen[id(source.computation)] = source.computation
                todo += source.computation.inputs
    return list(seen.values())


def stored_keys(tensor: Tensor) -> list[str]:
    """The stored tensors that an output is made of, however far below, each once; what a computed
    tensor stands for is one.
    """
    if _TEXTS.issuperset(map(type, tensor.sources)):
        return list(dict.fromkeys(tensor.sources))  # type: ignore[arg-type]
    return list(dict.fromkeys(map(key_of, _sources(tensor, True))))


def stored_sources(tensor: Tensor) -> list[str | ChunkOf]:
    """The keys and chunks that an output is made of, however far below, each once."""
    return _sources(tensor, False)


def _sources(tensor: Tensor, standing: bool) -> list[str | ChunkOf]:
    """`standing`: without a look below what stands for a stored tensor."""
    found: dict[str | ChunkOf, None] = {}
    todo, seen = [tensor], set[int]()
    while todo:
        for source in todo.pop().sources:
            if not isinstance(source, ComputedTensor):
                found[source] = None
            elif standing and source.stands_for is not None:
                found[source.stands_for] = None
            elif id(source.computation) not in seen:
                seen.add(id(source.computation))
                todo += source.computation.inputs
    return list(found)


# a box with its inputs: in a last-level cache, and few enough calls
CHUNK = 12 << 20
# the bytes that are computed at once of results that come in blocks: their arithmetic is many
# calls, each of which should take longer than the interpreter's lock to change hands
BLOCKS = 4 << 20
# inputs that are cheaper to read again than to think about
FEW = 64 << 10
# the op's own arrays, as a multiple of its inputs and output
TEMPORARIES = 2
# boxes of which a kind keeps what they need: those of its next tensors are the same
KEPT = 1024
# the part of the memory for computing that calls may remember things in: files hold scales behind
# the codes of all tensors, and what was not remembered is read and computed anew
MEMOS = 4


class Kind(NamedTuple):
    """What calls of one op, arguments and specs have in common, for one output.

    `shape` counts whole-byte units of `unit` = (elements, bytes); `grain` counts elements. `least`
    are the bytes of the smallest box with its inputs and temporaries. `regional`: it is computed
    box by box, else whole. `surveyed`: all of the first input is looked through before. `packed`:
    which inputs the op is given as the bytes that hold elements of less. `needed`: what boxes need,
    as far as it was asked.
    """

    op: Any
    args: Any
    specs: tuple[Spec, ...]
    output: int
    spec: Spec
    shape: tuple[int, ...]
    unit: tuple[int, int]
    grain: tuple[int, ...]
    least: int
    regional: bool
    surveyed: bool
    packed: tuple[bool, ...]
    needed: dict[Box, Sequence[Box]]

    def needs(self, box: Box, survey: Any = None) -> Sequence[Box]:
        given = self.args, self.specs, self.output, box
        if survey is not None:
            surveyed: Sequence[Box] = self.op.needs_surveyed(*given, survey)
            return surveyed
        known = self.needed.get(box)
        if known is None:
            known = self.op.needs(*given)
            if len(self.needed) >= KEPT:
                self.needed.clear()
            self.needed[box] = known
        return known

    def cost(self, box: Box) -> int:
        """Bytes of the box and of the boxes it needs, as the op is given them."""
        return _raw_bytes(self.spec.dtype, size_of(box)) + sum(
            _raw_bytes(s.dtype, size_of(b), p)
            for s, b, p in zip(self.specs, self.needs(box), self.packed, strict=True)
        )

    def rounded(self, box: Box) -> Box:
        """The smallest box on the grain that holds `box`."""
        return tuple(
            (a // g * g, min(n, -(-b // g) * g))
            for (a, b), g, n in zip(box, self.grain, self.spec.shape, strict=True)
        )

    def widened(self, box: Box, limit: int) -> Box:
        """The box on the grain, with its last axes whole as far as that costs at most `limit`."""
        box = self.rounded(box)
        for axis in range(len(box) - 1, 0, -1):
            wider = (*box[:axis], (0, self.spec.shape[axis]), *box[axis + 1 :])
            if self.cost(wider) > limit:
                break
            box = wider
        return box

    def cuts(self, box: Box, limit: int) -> Iterator[Box]:
        """The box in parts that cost at most `limit`, cut on the grain, leading axes first."""
        cost = self.cost(box)
        if cost > limit:
            for axis, ((a, b), g) in enumerate(zip(box, self.grain, strict=True)):
                first, last = a // g, -(-b // g)
                if last - first < 2:
                    continue
                step = max(1, (last - first) * limit // cost)
                for i in range(first, last, step):
                    part = (max(a, i * g), min(b, (i + step) * g))
                    yield from self.cuts((*box[:axis], part, *box[axis + 1 :]), limit)
                return
        yield box


def kind_of(call: Computation, output: int, spec: Spec) -> Kind:
    """The kind of a call's output."""
    op, specs = ops.get(call.op_call.op), tuple(t.spec for t in call.inputs)
    elements, size = unit(spec.dtype)
    packed = (False,) * len(specs)
    if isinstance(op, ValueOp) and any(BITS[s.dtype] < 8 for s in specs):
        numbers = op.packed(call.op_call.args, specs)
        packed = tuple(n in numbers for n in range(len(specs)))
    inputs = sum(_raw_bytes(s.dtype, s.numel, p) for s, p in zip(specs, packed, strict=True))
    everything = TEMPORARIES * (inputs + _raw_bytes(spec.dtype, spec.numel))
    grain = (1,) * len(spec.shape)
    whole = Kind(
        op,
        call.op_call.args,
        specs,
        output,
        spec,
        spec.shape,
        (elements, size),
        grain,
        everything,
        False,
        False,
        packed,
        {},
    )
    if not isinstance(op, ValueOp) or not spec.numel:
        return whole
    if op.surveys(call.op_call.args, specs):
        whole = whole._replace(surveyed=True)
        if not spec.shape:
            return whole._replace(least=TEMPORARIES * whole.cost(()))
    if not spec.shape or spec.shape[-1] % elements:
        return whole
    grain = tuple(op.grain(call.op_call.args, specs, output))
    # a unit is not cut
    grain = (*grain[:-1], -(-grain[-1] // elements) * elements)
    kind = whole._replace(grain=grain, shape=(*spec.shape[:-1], spec.shape[-1] // elements))
    box = tuple((0, min(g, n)) for g, n in zip(grain, spec.shape, strict=True))
    least = kind.cost(box)
    needed = least - _raw_bytes(spec.dtype, size_of(box))
    if needed >= inputs > FEW and size_of(box) < spec.numel:
        return whole
    return kind._replace(least=TEMPORARIES * least, regional=True)


def _raw_bytes(dtype: str, numel: int, packed: bool = False) -> int:
    return numel * max(0 if packed else 8, BITS[dtype]) // 8


def size_of(box: Box) -> int:
    """Elements of a box."""
    return prod(b - a for a, b in box)
