"""What state of optimizers sees of rules that encode, decode or recode its parameters.

State is of the numbers, whatever their format is: it has their shape and a dtype of its own, and
goes by the name of the part that holds the codes. So a rule has for it neither the op nor the roles
of the other parts, and all other ops that move the codes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from ..core.errors import OpError, Report
from ..core.spec import spec as spec_of
from ..core.view import filled
from ..ops.dequantize import codec_called
from ..rules.compiled import ROLE, CompiledCall, DirectedRule, Side
from .bind import BindContext, StepResult, bind
from .graph import Tensor
from .match import match
from .pipeline import CODING, Views

if TYPE_CHECKING:
    from ..core.spec import Spec

Shape = tuple[int, ...]


def coding_step(rule: DirectedRule) -> int | None:
    """The place of the step that encodes, decodes or recodes; None where none does."""
    found = [at for at, step in enumerate(rule.steps) if step.name in CODING]
    return found[0] if len(found) == 1 else None


def _codes(codec: str) -> str:
    """The role of the part that holds the codes."""
    parts = codec_called(codec).parts
    return "weight" if "weight" in parts else parts[0]


class _Roles(NamedTuple):
    """The roles of the codes that a rule takes and makes; None where it takes or makes numbers."""

    taken: str | None
    made: str | None


def _roles(step: CompiledCall) -> _Roles:
    if step.name == "recode":
        return _Roles(_codes(step.args.from_.codec), _codes(step.args.to.codec))
    codes = _codes(step.args.codec)
    return _Roles(codes, None) if step.name == "dequantize" else _Roles(None, codes)


def for_codes(rule: DirectedRule) -> DirectedRule | str:
    """The rule over the part that holds the codes alone, as if they were the numbers. The text says
    why there is none.
    """
    place = coding_step(rule)
    if place is None:
        return "it encodes or decodes more than once"
    roles = _roles(rule.steps[place])
    reads, writes = _side(rule.reads, roles.taken), _side(rule.writes, roles.made)
    if not (reads and writes):
        return f"`{rule.steps[place].name}` has no part of codes here"
    steps = []
    for at, step in enumerate(rule.steps):
        role = roles.taken if at < place else roles.made
        if at == place or (role is not None and not _is_for(step, role)):
            continue
        if step.capture == ROLE:
            return f"`{step.name}` goes over the parts of a number format"
        if step.only and ROLE in step.only:
            only = {name: of for name, of in step.only.items() if name != ROLE}
            step = replace(step, args=replace(step.args, only=only or None))
        steps.append(step)
    return replace(rule, steps=tuple(steps), reads=reads, writes=writes, optional_roles=frozenset())


def _side(sides: Sequence[Side], role: str | None) -> tuple[Side, ...]:
    """The side of the role, as the only one there is."""
    if role is None:
        return tuple(sides)
    return tuple(replace(side, role=None) for side in sides if side.role == role)


def _is_for(step: CompiledCall, role: str) -> bool:
    words = (step.only or {}).get(ROLE, [role])
    return role in (words if isinstance(words, (list, tuple)) else [words])


class Encoded(NamedTuple):
    """What a rule that encodes or decodes does to parameters with state. `outputs`: what it makes,
    codes alone, with the keys that they are of; `before` and `after`: shapes of numbers, by key.
    """

    outputs: dict[str, tuple[str, ...]]
    before: dict[str, Shape]
    after: dict[str, Shape]


def encoded_parameters(
    rule: DirectedRule,
    as_seen: DirectedRule,
    keys: Iterable[str],
    bound: StepResult,
    before: Mapping[str, Tensor],
    shape_of: Callable[[str], Shape | None],
    views: Views,
) -> Encoded | str:
    """The parameters among `keys` that have state, `shape_of` being its shape; None: it has none.
    The text says why state cannot follow.
    """
    place = coding_step(rule)
    step = rule.steps[place or 0]
    taken = _roles(step).taken
    readers = match([rule], {key: before[key].spec for key in keys}, Report()).readers
    groups: dict[tuple[object, ...], dict[str | None, str]] = {}
    codes = []
    for reader in readers:
        for one in reader.taken:
            groups.setdefault(tuple(one.values[at] for at in reader.shared), {})[one.role] = one.key
            if taken is None or one.role == taken:
                codes.append(one.key)
    shapes = {}
    for key in codes:
        if (shape := shape_of(key)) is not None:
            # what is encoded says its shape; without moments nothing depends on it
            own = before[key].spec.shape
            shapes[key] = own if taken is None else shape or own
    if step.name == "recode" and (why := _unlike(step, groups.values(), shapes, before, place)):
        return why
    met = Report()
    numbers = {
        key: Tensor(spec_of("float32", shape), views.intern(filled(shape, 0)), ())
        for key, shape in shapes.items()
    }
    whole = bind([as_seen], [], numbers, views, BindContext(lambda *_: False), met)
    if met.has_errors():
        return met.diagnostics[0].message
    after = {key: tensor.spec.shape for key, tensor in whole.tensors.items()}
    if step.name == "dequantize":
        for key, shape in after.items():
            wanted = bound.tensors[key].spec.shape
            if shape != wanted:
                return (
                    f"it would be of {list(shape)}, and the numbers of its parameter are of "
                    f"{list(wanted)}"
                )
    return Encoded({key: made.keys for key, made in whole.provenance.items()}, shapes, after)


def _unlike(
    step: CompiledCall,
    groups: Iterable[Mapping[str | None, str]],
    shapes: Mapping[str, Shape],
    before: Mapping[str, Tensor],
    place: int | None,
) -> str:
    """Why the shapes are not those of the numbers that are recoded; empty where they are."""
    said = step.args.from_
    codec = codec_called(said.codec)
    for group in groups:
        specs = [before[group[role]].spec if role in group else None for role in codec.parts]
        key = group.get(_codes(said.codec))
        if key is None or key not in shapes:
            continue
        try:
            wanted = codec.decoded(said.args, specs, "float32").shape
        except OpError as error:
            return f"the shape of the numbers is not known: {error.message}"
        if place or shapes[key] != wanted:
            return f"it is of {list(shapes[key])}, and the numbers are of {list(wanted)}"
    return ""


def packing(codes: Shape, numbers: Shape) -> int | None:
    """How many numbers one element of packed codes holds; None where these are no such shapes."""
    if len(codes) != len(numbers) or not prod(codes):
        return None
    other = [(c, n) for c, n in zip(codes, numbers, strict=True) if c != n]
    if len(other) > 1 or (other and other[0][1] % other[0][0]):
        return None
    return prod(numbers) // prod(codes)


def packed_shape(codes: Spec, moments: Iterable[Shape]) -> Shape | None:
    """The shape of the numbers of packed codes, where all moments have one that fits; else None."""
    shapes = {shape for shape in moments if shape}
    if len(shapes) != 1:
        return None
    (shape,) = shapes
    each = packing(codes.shape, shape) or 1
    return shape if each > 1 and each & (each - 1) == 0 else None
