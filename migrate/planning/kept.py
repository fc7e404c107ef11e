"""What `resize` cuts off the end of tensors is kept, by the rule that cut it, and put back where
the axis grows again. So is what a rule drops that says `inverse: keep`, where its module is again.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import ops
from ..core.errors import listed, printable
from ..ops.base import step as call_of
from ..rules.compiled import CompiledCall, CompiledRule, DirectedRule
from ..source.pickle.tree import Buffer
from .graph import ApplyOp, Item, Program, ReadKey, Tensor
from .stored import initial

if TYPE_CHECKING:
    from ..source.blobs import StoredTensor
    from .bind import StepResult
    from .pipeline import Views


# how a name ends whose tensor is the content of an object, with where that was read to
_OBJECT = re.compile(r" io\.BytesIO:([0-9]{1,18})$", re.ASCII)


class KeptPart(NamedTuple):
    """A part of a tensor that was cut off its end, with its eager program."""

    tensor: Tensor
    program: Program | None = None


class Kept:
    """The parts that are kept, by name, as rules find and leave them; `rules` are those that left
    some, by identity, and `notes` say what was kept and could not be put back. `whole` has what was
    not cut because a param has no value, with its length, by how to give that. `read` gives bytes,
    by which a way back knows zeros that the way there put.
    """

    def __init__(
        self,
        parts: dict[str, KeptPart],
        read: Callable[[Tensor], bytes] | None = None,
        of: str = "",
    ) -> None:
        self.parts, self.rules, self.notes = parts, set[int](), list[str]()
        # the keys of what rules dropped and is kept
        self.kept_keys = set[str]()
        self.whole: dict[str, list[str]] = {}
        self._before = dict(parts)
        self._read, self._of = read, of

    def within(self, of: str) -> Kept:
        """The same parts, as rules see them that work on state of parameters."""
        made = Kept(self.parts, self._read, of)
        made.rules, made.notes = self.rules, self.notes
        return made

    def again(self) -> Kept:
        """What is kept in the end, for the way back."""
        return Kept(dict(self.parts))

    def account(self, place: bool) -> list[str]:
        """What to say of axes that stay as they are, and if there is a `place` for parts, of those
        that are kept now and those that are put back.
        """
        whole = [f"nothing is cut off {listed(of, 4)}: {how}" for how, of in self.whole.items()]
        if not place:
            return whole
        before, after = self._before, self.parts
        new = [
            f"{printable(name)} ({part.tensor.spec})"
            for name, part in after.items()
            if before.get(name) is not part
        ]
        back = [printable(name) for name in before if name not in after]
        notes = [f"kept for the way back, beside the tensors: {listed(new, 4)}"] * bool(new)
        notes += [f"put back, as it was kept: {listed(back, 4)}"] * bool(back)
        return [*self.notes, *whole, *notes]

    def keep_dropped(
        self,
        bound: StepResult,
        tensors: Mapping[str, Tensor],
        programs: Mapping[str, Program] | None,
        lifted: Mapping[str, Any],
        place: bool,
    ) -> None:
        """Keeps what rules dropped that say so: if there is a `place` for them, tensors and the
        content of each `io.BytesIO`, and of values that are None the names, for a stamp. Other
        values that were `lifted` are not kept.
        """
        none: list[str] = []
        others: list[str] = []
        for key, rule in bound.dropped.items():
            if not rule.keeps:
                continue
            value = lifted.get(key, lifted)
            if value is None:
                none.append(key)
                continue
            others.append(key)
            form = "" if value is lifted else _form(value)
            if place and form is not None and key in tensors:
                program = None if programs is None else programs.get(key)
                self.parts[f"{rule.id} {rule.name} {key}{form}"] = KeptPart(tensors[key], program)
                self.kept_keys.add(key)
        if none or others:
            self.kept_keys.update(none)
            # what is None on some ranks alone has no name that stands for all
            names, of_others = ({_split(key)[0] for key in keys} for keys in (none, others))
            bound.nothing = sorted(names - of_others)

    def put_back(
        self, keeping: Sequence[CompiledRule], bound: StepResult, nothing: Collection[str]
    ) -> dict[str, Any]:
        """Puts tensors that these rules dropped back among those of `bound`, where there is their
        module on the same ranks; by name, with its rank, what is None there and each object.
        """
        starts = tuple(f"{rule.loaded.model.id} {rule.rule.name} " for rule in keeping)
        wanted: dict[str, dict[str, str]] = {}
        for name in self.parts:
            for start in starts:
                if name.startswith(start):
                    key, mark = _split(_OBJECT.sub("", name[len(start) :]))
                    wanted.setdefault(key, {})[mark] = name
        objects: dict[str, Any] = {}
        if not (wanted or nothing):
            return objects
        there = _marks(bound.tensors)
        for key, names in wanted.items():
            if there(key) != names.keys() or any(f"{key}{mark}" in bound.tensors for mark in names):
                self.notes.append(f"{printable(key)} is kept, and is no module's here")
                continue
            for mark, name in names.items():
                part = self.parts.pop(name)
                if found := _OBJECT.search(name):
                    objects[f"{key}{mark}"] = self._object(part.tensor, int(found[1]))
                    continue
                bound.tensors[f"{key}{mark}"] = part.tensor
                if part.program is not None:
                    bound.programs[f"{key}{mark}"] = part.program
        without = {f"{key}{mark}" for key in nothing for mark in there(key)}
        return objects | dict.fromkeys(without - bound.tensors.keys() - objects.keys())

    def _object(self, tensor: Tensor, position: int) -> Buffer | None:
        """The object with this content; None where no bytes are read."""
        if self._read is None:
            return None
        from ..source.pickle.python_objects import buffer_of

        return buffer_of(self._read(tensor), position)

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
            how = step.unset.get("size")
            if how and not self._of and not rule.backwards:
                key = printable(_split(item.keys[0])[0])
                self.whole.setdefault(how, []).append(f"{key} ({was:,} on axis {dim})")
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
            self.rules.add(id(rule))
        return made


def _form(value: Any) -> str | None:
    """How the name of an object's content ends; None for a value that is not kept."""
    if type(value) is Buffer:
        return f" io.BytesIO:{value.position}"
    return f" io.BytesIO:{value.tell()}" if type(value) is io.BytesIO else None


def stored_parts(
    parts: Mapping[str, tuple[str, StoredTensor]], views: Views
) -> dict[str, KeptPart]:
    """Parts that are stored, by name, under keys that rules do not see."""
    return {
        name: KeptPart(initial({key: stored}, views)[key], ReadKey(key))
        for name, (key, stored) in parts.items()
    }


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


def _split(key: str) -> tuple[str, str]:
    """A key without its rank, and the rank as it is written."""
    short, at, rank = key.rpartition("@")
    return (short, at + rank) if at and rank.isdecimal() else (key, "")


def _marks(tensors: Iterable[str]) -> Callable[[str], AbstractSet[str]]:
    """What says on which ranks, as they are written, the module of a key is; of a module without
    tensors, such as a tied output layer, the one around it, which may be the whole model.
    """
    ranks: dict[str, list[str]] = {}
    for key in tensors:
        short, mark = _split(key)
        ranks.setdefault(short, []).append(mark)
    found: dict[str, set[str]] = {}
    for short, marks in ranks.items():
        while short:
            short = short.rpartition(".")[0]
            known = found.setdefault(short, set())
            if known.issuperset(marks):
                break
            known.update(marks)

    def of(key: str) -> AbstractSet[str]:
        module = key.rpartition(".")[0]
        return found.get(module) or found.get(module.rpartition(".")[0], set())

    return of


def _alike(part: Tensor, of: Tensor, dim: int) -> bool:
    one, other = ((t.spec.dtype, t.spec.shape[:dim], t.spec.shape[dim + 1 :]) for t in (part, of))
    return one == other and len(part.spec.shape) == len(of.spec.shape)
