"""Parts of tensors in a number format, beyond their specs: which optional ones are there, which go,
and what the bytes of some say.

An op that joins or makes the roles of a rule may depend on these. Its arguments are settled for
each group of a rule, once for equal ones.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from .. import ops
from ..core.errors import OpError, printable
from ..core.view import is_whole
from ..ops.base import ValueOp
from .graph import ComputedTensor
from .match import RANK

if TYPE_CHECKING:
    from ..core.spec import Spec
    from ..rules.compiled import CompiledCall, CompiledRule, DirectedRule, Side
    from .graph import Item, Tensor

    class Settle(Protocol):
        """The step with the arguments for these roles, specs and bytes; one object for equal ones.

        `sides`: the roles that there are names for on either side of an exchange.
        """

        def __call__(
            self,
            step: CompiledCall,
            op: ValueOp,
            roles: Sequence[str],
            specs: Sequence[Spec],
            values: Mapping[str, bytes],
            sides: tuple[tuple[str, ...], ...] = (),
        ) -> CompiledCall: ...


def _unread(role: str, item: Item, most: int) -> bytes:
    raise OpError("M310", f"the bytes of its {role} are not known here")


class Keeper(Protocol):
    """Where what ops cut off goes, and comes back from: `kept.Kept`."""

    def within(self, of: str) -> Keeper:
        """The same, for state of parameters that rules work on."""

    def again(self) -> Keeper:
        """The same as it is now, for the way back."""

    def resize(
        self,
        rule: DirectedRule,
        step: CompiledCall,
        names: Sequence[str],
        item: Item,
        views: Any,
    ) -> Item:
        """The item after the step."""

    def put_back(
        self, keeping: Sequence[CompiledRule], bound: Any, nothing: Collection[str]
    ) -> dict[str, Any]:
        """Puts back what these rules dropped; answers with the values other than tensors that are
        there again, by name.
        """


class PartFacts(NamedTuple):
    """What is known of the parts of tensors beside their specs.

    `read` gives the bytes of a part, which may have at most the number given. `absent` takes the
    names of optional parts that are not there; `remembered` are those that a stamp names, None
    without one.
    """

    read: Callable[[str, Item, int], bytes] = _unread
    absent: Callable[[Iterable[str]], None] = lambda names: None
    remembered: AbstractSet[str] | None = None
    # takes the keys of parts that have no place in numbers, and why
    unused: Callable[[tuple[str, ...], str], None] = lambda keys, why: None


NOTHING_KNOWN = PartFacts()


def _names_of(
    sides: Iterable[Side], roles: Iterable[str], names: Sequence[str], values: Sequence[Any]
) -> dict[str, str]:
    """role -> key of these parts of a tensor with these values, as far as the values say."""
    known = dict(zip(names, values, strict=True))
    out = {}
    for side in sides:
        if side.role is not None and str(side.role) in roles:
            try:
                key = side.pattern.expand(known)
            except (KeyError, TypeError, ValueError):
                continue
            out[str(side.role)] = f"{key}@{known[RANK]}" if RANK in known else key
    return out


def foreseen_bytes(tensor: Tensor) -> bytes | None:
    """The bytes of a tensor that is computed, where they follow from shapes."""
    source = tensor.sources[0] if len(tensor.sources) == 1 else None
    if not isinstance(source, ComputedTensor) or not is_whole(tensor.view):
        return None
    call = source.computation
    op = ops.get(call.op_call.op)
    if not isinstance(op, ValueOp):
        return None
    given = [one.spec for one in call.inputs]
    return op.foreseen(call.op_call.args, given, source.output)


def bytes_of_part(
    role: str, item: Item, most: int, read: Callable[[Tensor], bytes] | None
) -> bytes:
    """The bytes of a part that says what no header does. OpError M310 for one of more than `most`,
    and where they cannot be had.
    """
    tensor = item.tensor
    if tensor.spec.nbytes > most:
        raise OpError(
            "M310",
            f"{printable(item.keys[0])} is {tensor.spec}; of a {role}, which is read while "
            f"planning, at most {most:,} bytes are",
        )
    if (found := foreseen_bytes(tensor)) is not None:
        return found
    if read is None:
        raise OpError(
            "M310", f"what {printable(item.keys[0])} says is known when its bytes are, not before"
        )
    return read(tensor)


def settle_join(
    rule: DirectedRule,
    step: CompiledCall,
    names: tuple[str, ...],
    group: tuple[Any, ...],
    members: Mapping[Any, Item],
    settle: Settle,
    facts: PartFacts,
) -> tuple[CompiledCall, list[Item]]:
    """The step for the parts that are there, and for what the bytes of some say; and these parts
    without those that have no place in numbers.
    """
    op = step.op
    if not isinstance(op, ValueOp):
        return step, [*members.values()]
    unused = op.unused(step.args.codec)
    roles = [r for r in op.roles(step.args.codec) if r in members and r not in unused]
    ordered = [members[role] for role in roles]
    values = {
        role: facts.read(role, members[role], most)
        for role, most in op.reads(step.args).items()
        if role in roles
    }
    call = settle(step, op, roles, [item.tensor.spec for item in ordered], values)
    for role, why in unused.items():
        if role in members:
            facts.unused(members[role].keys, why)
    if spare := op.may_lack(step.args.codec):
        lacking = [role for role in spare if role not in members]
        facts.absent(_names_of(rule.reads, lacking, names, group).values())
    return call, ordered


def settle_exchange(
    rule: DirectedRule,
    step: CompiledCall,
    names: tuple[str, ...],
    group: tuple[Any, ...],
    members: Mapping[Any, Item],
    settle: Settle,
    facts: PartFacts,
) -> tuple[CompiledCall, list[Item]]:
    """The step for the parts that are there, and these in the order in which it reads them.

    OpError M207 for parts that the rule asks for and that are missing, M408 where the step makes
    others than it has names for.
    """
    op = step.op
    if not isinstance(op, ValueOp):
        raise TypeError(f"{step.name} exchanges no parts")
    asked = [str(side.role) for side in rule.reads]
    missing = [r for r in asked if r not in members and r not in rule.optional_roles]
    if missing:
        raise OpError("M207", f"{step.name} over {{role}} is incomplete: {', '.join(missing)}")
    roles = [role for role in op.takes(step.args) if role in members]
    values = {
        role: facts.read(role, members[role], most)
        for role, most in op.reads(step.args).items()
        if role in roles
    }
    named = [str(side.role) for side in rule.writes]
    if facts.remembered is not None:
        # what was not there before
        keys = _names_of(rule.writes, rule.optional_roles, names, group)
        named = [role for role in named if keys.get(role) not in facts.remembered]
    specs = [members[role].tensor.spec for role in roles]
    call = settle(step, op, roles, specs, values, (tuple(asked), tuple(named)))
    made = op.gives(call.args)
    if set(made) - set(named) or set(named) - set(made) - rule.optional_roles:
        raise OpError(
            "M408",
            f"{step.name} makes the {', '.join(made)}; the rule has names for the "
            f"{', '.join(named)}",
            help="name all of them in the rule, or change the arguments of the codec",
        )
    lacking = [role for role in op.takes(step.args) if role not in members]
    facts.absent(_names_of(rule.reads, lacking, names, group).values())
    return call, [members[role] for role in op.inputs(call.args)]


def settle_part(
    rule: DirectedRule,
    step: CompiledCall,
    names: tuple[str, ...],
    item: Item,
    named: Sequence[str],
    settle: Settle,
    facts: PartFacts,
) -> tuple[CompiledCall, list[Any]]:
    """The step for the parts that this tensor is to have: those of the rule, but for optional ones
    that were not there before or are never made, or, where no stamp says so, that the arguments do
    not make; and these parts.
    """
    op, of = step.op, item.tensor.spec
    if not isinstance(op, ValueOp):
        return step, list(named)
    spare = [role for role in named if role in rule.optional_roles]
    if facts.remembered is None:
        made = op.makes(step.args, of) if spare else ()
        wanted = [role for role in named if role not in spare or role in made]
    else:
        keys = _names_of(rule.writes, spare, names, item.values)
        never = {role for role in op.unmade(step.args.codec) if role in spare}
        wanted = [r for r in named if r not in never and keys.get(r) not in facts.remembered]
    call = settle(step, op, wanted, [of], {})
    return call, list(op.makes(call.args, of))
