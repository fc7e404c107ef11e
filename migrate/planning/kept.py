"""What `resize` cuts off the end of tensors is kept, by the rule that cut it, and put back where
the axis grows again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import ops
from ..core.errors import printable
from ..ops.base import step as call_of
from ..rules.compiled import CompiledCall, DirectedRule
from .graph import ApplyOp, Item, Program, Tensor

if TYPE_CHECKING:
    from .pipeline import Views


class KeptPart(NamedTuple):
    """A part of a tensor that was cut off its end, with its eager program."""

    tensor: Tensor
    program: Program | None = None


class Kept:
    """The parts that are kept, by name, as rules find and leave them; `cut` has the rules that
    left some, by the identity of each, and `notes` what was kept and could not be put back.
    `read` gives bytes, by which a way back knows zeros that the way there put.
    """

    def __init__(
        self,
        parts: dict[str, KeptPart],
        read: Callable[[Tensor], bytes] | None = None,
        of: str = "",
    ) -> None:
        self.parts, self.cut, self.notes = parts, set[int](), list[str]()
        self._read, self._of = read, of

    def within(self, of: str) -> Kept:
        """The same parts, as rules see them that work on state of parameters."""
        made = Kept(self.parts, self._read, of)
        made.cut, made.notes = self.cut, self.notes
        return made

    def resize(
        self,
        rule: DirectedRule,
        step: CompiledCall,
        names: Sequence[str],
        item: Item,
        views: Views,
    ) -> Item:
        """The item after `resize`: what is kept of it is put back as far as there is room, and what
        does not fit is kept. OpError as the op alone.
        """
        made = _apply(rule, step, [item], views)
        dim = step.args.dim % len(made.tensor.spec.shape)
        was, size = (one.tensor.spec.shape[dim] for one in (item, made))
        if was == size:
            return item
        at = [f"{n}={v}" for n, v in sorted(zip(names, map(str, item.values), strict=True))]
        name = " ".join([rule.id, rule.name, *at, *([self._of] if self._of else [])])
        part, whole = self.parts.get(name), item
        if part is not None and _alike(part.tensor, item.tensor, dim):
            del self.parts[name]
            lengths = (was, part.tensor.spec.shape[dim])
            tail = Item((), part.tensor, item.keys, part.program)
            joined = _call(step, "concat", over="end", dim=dim, sizes=lengths)
            whole, was = _apply(rule, joined, [item, tail], views), sum(lengths)
            made = _apply(rule, _call(step, "resize", dim=dim, size=size), [whole], views)
        elif part is not None:
            self.notes.append(
                f"{printable(name)} is kept as {part.tensor.spec}, which does not fit "
                f"{printable(item.keys[0])}, {item.tensor.spec}: it is not put back"
            )
        if was > size:
            rest = _apply(rule, _call(step, "slice", dim=dim, start=size), [whole], views)
            if rule.backwards and self._read is not None and not any(self._read(rest.tensor)):
                return made
            self.parts[name] = KeptPart(rest.tensor, rest.program)
            self.cut.add(id(rule))
        return made


def _call(step: CompiledCall, op: str, **args: Any) -> CompiledCall:
    return CompiledCall(op, ops.get(op), call_of(op, **args).args, None, step.span)


def _apply(rule: DirectedRule, step: CompiledCall, items: Sequence[Item], views: Views) -> Item:
    """What the step makes of these items, with the values of the first."""
    tensors = [item.tensor for item in items]
    (made,), _ = views.trace(step, tensors, 1, rule.label, items[0].keys)
    programs = tuple(item.program for item in items if item.program is not None)
    program = None
    if len(programs) == len(items):
        dtypes = tuple(tensor.spec.dtype for tensor in tensors)
        program = ApplyOp(step.name, step.args, 1, 0, programs, dtypes)
    return items[0]._replace(tensor=made, program=program)


def _alike(part: Tensor, of: Tensor, dim: int) -> bool:
    one, other = ((t.spec.dtype, t.spec.shape[:dim], t.spec.shape[dim + 1 :]) for t in (part, of))
    return one == other and len(part.spec.shape) == len(of.spec.shape)
