"""The values of a snapshot, put back into the live structure that it was taken from."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, MutableMapping, MutableSequence, MutableSet
from functools import partial
from typing import Any, Final

import numpy
import torch

from ..core.errors import Diagnostic, QuestionError, listed
from .kinds import by_reference
from .paths import SCALARS, Child, inner_parts
from .tensors import parts_of

_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def put_back(staged: Any, live: Any) -> None:
    """Writes the values of `staged` into `live`: tensors in place, other values where they stand.

    QuestionError M977 naming each path where the structures differ; nothing is written then.
    """
    plan = _Plan()
    plan.compare(staged, live)
    if plan.problems:
        raise QuestionError(
            [
                Diagnostic(
                    "M977",
                    f"the state is not built like the snapshot: {listed(plan.problems)}",
                    help="restore into what was staged, or call `restore()` for a new state",
                )
            ]
        )
    # leaves of autograd are written to as they stand
    with torch.no_grad():
        for write in plan.writes:
            write()


class _Plan:
    """What is to be written, and where the structures differ."""

    def __init__(self) -> None:
        self.writes: list[Callable[[], None]] = []
        self.problems: list[str] = []
        # live object by id, and what it is to become
        self._seen: dict[int, tuple[Any, Any]] = {}

    def compare(self, staged: Any, live: Any) -> None:
        """Enters what differs in value, and what differs in structure."""
        todo = [("", staged, live)]
        while todo:
            path, old, new = todo.pop()
            before = self._seen.get(id(new))
            if before is not None:
                if before[1] is not old and not isinstance(new, tuple):
                    self._differs(path, "one object where the snapshot has two")
                continue
            self._seen[id(new)] = new, old
            if type(old) is not type(new):
                self._differs(path, f"{type(new).__name__} instead of {type(old).__name__}")
            elif isinstance(old, torch.Tensor):
                if self._tensor(path, old, new):
                    todo += reversed(self._attributes(path, old, new))
            elif isinstance(old, numpy.ndarray):
                self._array(path, old, new)
            elif isinstance(old, (torch.UntypedStorage, torch.TypedStorage)):
                self._storage(path, old, new)
            elif isinstance(old, bytearray):
                self.writes.append(partial(new.__setitem__, slice(None), bytes(old)))
            elif isinstance(old, MutableSet):
                if any(map(_holds, old)) or any(map(_holds, new)):
                    todo += reversed(self._attributes(path, old, new))
                elif old != new:
                    self.writes += [new.clear, partial(new.update, set(old))]
            else:
                todo += reversed(self._attributes(path, old, new))

    def _tensor(self, path: str, old: torch.Tensor, new: torch.Tensor) -> bool:
        """Whether these tensors agree in form; those that hold numbers themselves are entered."""
        if hasattr(type(old), "__tensor_flatten__"):
            same = old.dtype == new.dtype and old.dim() == new.dim()
        elif old.is_nested and new.is_nested:
            same = old.dtype == new.dtype and torch.equal(
                old._nested_tensor_size(), new._nested_tensor_size()
            )
        else:
            same = (
                (old.dtype, old.layout, old.is_nested) == (new.dtype, new.layout, new.is_nested)
                # one that is nested has none
                and old.shape == new.shape
            )
        if not same:
            self._differs(path, f"{_form(new)} instead of {_form(old)}")
            return False
        if hasattr(type(old), "__tensor_flatten__") or old.is_meta:
            return True
        if new.is_meta:
            self._differs(path, "a tensor on the meta device, which holds no values")
            return False
        into, values = parts_of(new.detach()), parts_of(old.detach())
        if [x.shape for x in into] != [x.shape for x in values]:
            if new.layout is not torch.sparse_coo:
                self._differs(path, "a sparse tensor with another number of elements")
                return False
            # a detached one has parts of its own: what is put into it does not show
            self.writes.append(partial(_copy, new, old.detach()))
            return True
        self.writes += [partial(_write, *pair) for pair in zip(into, values, strict=True)]
        if new.layout is torch.sparse_coo:
            self.writes.append(partial(new._coalesced_, old.is_coalesced()))
        return True

    def _array(self, path: str, old: Any, new: Any) -> None:
        if (old.dtype, old.shape) != (new.dtype, new.shape):
            self._differs(path, f"{new.dtype} {new.shape} instead of {old.dtype} {old.shape}")
        elif old.dtype.hasobject and any(map(_holds, old.flat)):
            self._differs(path, "an array of objects")
        elif not new.flags.writeable:
            if old.tobytes() != new.tobytes():
                self._differs(path, "an array that is read-only")
        else:
            self.writes.append(partial(numpy.copyto, new, old))

    def _storage(self, path: str, old: Any, new: Any) -> None:
        if old.nbytes() != new.nbytes():
            self._differs(path, f"{new.nbytes()} bytes instead of {old.nbytes()}")
        else:
            self.writes.append(partial(new.copy_, old))

    def _attributes(self, path: str, old: Any, new: Any) -> list[tuple[str, Any, Any]]:
        """The parts of two objects of a type that have to be compared; values are entered."""
        try:
            pairs = self._paired(old, new)
        except Exception as error:  # noqa: BLE001 - methods of the objects may raise anything
            self._differs(path, f"a {type(old).__name__} that cannot be looked into: {error}")
            return []
        if pairs is None:
            self._differs(path, _lack(old, new))
            return []
        # what is made anew for each look cannot be written to
        again = [part for _, part in inner_parts(new)]
        lasting = set(map(id, again))
        if any(_holds(now) and id(now) not in lasting for _, _, _, now in pairs):
            self._whole(path, old, new)
            return []
        found = []
        for step, key, was, now in pairs:
            if _holds(was) or _holds(now):
                found.append((path + step, was, now))
            elif was is now or _same(was, now):
                continue
            elif step.startswith(".__getstate__()"):
                self._whole(path, old, new)
                return []
            else:
                self._value(path + step, new, step, key, was)
        return found

    def _paired(self, old: Any, new: Any) -> list[tuple[str, Any, Any, Any]] | None:
        """(step, key of a mapping, part, part) of two objects; None if their parts differ."""
        keys: dict[str, Any] = {}
        if isinstance(old, MutableMapping):
            if len(old) != len(new):
                return None
            plain = all(map(_plain, new)) and all(map(_plain, old))
            if plain and set(old) != set(new):
                return None
        before, after = inner_parts(old), inner_parts(new)
        if isinstance(old, MutableMapping):
            # items are the last parts, unless the mapping is taken apart in another way
            items = after[len(after) - len(new) :]
            if all(step.startswith("[") for step, _ in items):
                keys = {step: key for (step, _), key in zip(items, new, strict=True)}
        if isinstance(old, torch.Tensor):
            # what a wrapper remembers of its sizes may be there or not
            before, after = _lasting(before, after), _lasting(after, before)
        if keys:
            order = {step: at for at, (step, _) in enumerate(after)}
            if order.keys() != {step for step, _ in before}:
                return None
            before = sorted(before, key=lambda part: order[part[0]])
        if [step for step, _ in before] != [step for step, _ in after]:
            return None
        return [
            (step, keys.get(step), was, now)
            for (step, was), (_, now) in zip(before, after, strict=True)
        ]

    def _whole(self, path: str, old: Any, new: Any) -> None:
        """Enters an object that tells what it consists of and does not show it, a generator say."""
        state = old.__reduce_ex__(4)[2:3]
        if not hasattr(new, "__setstate__") or state in ((), (None,)):
            self._differs(path, f"a {type(new).__name__}, whose parts cannot be changed in place")
            return
        self.writes.append(partial(new.__setstate__, copy.deepcopy(state[0])))

    def _value(self, path: str, parent: Any, step: str, key: Any, value: Any) -> None:
        frozen = getattr(getattr(parent, "__dataclass_params__", None), "frozen", False)
        if key is not None or (isinstance(parent, MutableMapping) and step == "[None]"):
            self.writes.append(partial(parent.__setitem__, key, value))
        elif isinstance(parent, (MutableSequence, deque)) and step.startswith("["):
            self.writes.append(partial(parent.__setitem__, int(step[1:-1]), value))
        elif step[1:].isidentifier() and not frozen and not isinstance(parent, tuple):
            self.writes.append(partial(setattr, parent, step[1:], value))
        else:
            self._differs(path, f"a {type(parent).__name__} cannot be changed in place")

    def _differs(self, path: str, what: str) -> None:
        self.problems.append(f"{path or 'the state itself'}: {what}")


def _lasting(parts: list[Child], others: list[Child]) -> list[Child]:
    steps = {step for step, _ in others}
    return [
        (step, part)
        for step, part in parts
        if step in steps or (isinstance(part, torch.Tensor) and part.numel())
    ]


def _plain(key: Any) -> bool:
    return isinstance(key, SCALARS) and len(repr(key)) < 200


def _holds(obj: Any) -> bool:
    """Whether there may be tensors or mutable parts in an object: it is compared, not replaced."""
    if type(obj) in (tuple, frozenset):
        return any(map(_holds, obj))
    if isinstance(obj, bytearray):
        return True
    return not (isinstance(obj, SCALARS) or by_reference(type(obj)))


def _same(was: Any, now: Any) -> bool:
    # repr tells -0.0 from 0.0, and True from 1
    return type(was) is type(now) and (was == now) is True and repr(was) == repr(now)


def _lack(old: Any, new: Any) -> str:
    """What one of two objects has and the other has not."""
    if isinstance(old, MutableMapping):
        more = [repr(key) for key in new if key not in old]
        less = [repr(key) for key in old if key not in new]
        said = [f"has {listed(more, 3)}"] * bool(more) + [f"lacks {listed(less, 3)}"] * bool(less)
        if said:
            return ", ".join(said)
    if hasattr(old, "__len__") and len(old) != len(new):
        return f"{len(new)} parts instead of {len(old)}"
    return "other parts"


def _form(x: torch.Tensor) -> str:
    shape = "nested" if x.is_nested else list(x.shape)
    layout = "" if x.layout is torch.strided else f" {x.layout}"
    return f"{x.dtype} {shape}{layout}"


def _write(into: torch.Tensor, values: torch.Tensor) -> None:
    """Copies bits from one strided tensor into another of its dtype and shape."""
    if into.is_quantized or into.is_conj() != values.is_conj() or into.is_neg() != values.is_neg():
        _copy(into, values)
        return
    if into.is_neg():
        into, values = torch._neg_view(into), torch._neg_view(values)
    if into.is_conj():
        into, values = torch._conj(into), torch._conj(values)
    integer = _INTEGERS.get(into.dtype.itemsize)
    if integer is not None:
        # as integers, which no copy rounds or makes quiet
        into, values = into.view(integer), values.view(integer)
    for dim, (size, stride) in enumerate(zip(into.shape, into.stride(), strict=True)):
        if stride == 0 and size > 1:
            # what is expanded has one element where it shows many
            into, values = into.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    if not _overlaps(into):
        _copy(into, values)
        return
    # elements that lie on one another: each place once
    reach = 1 + sum((n - 1) * s for n, s in zip(into.shape, into.stride(), strict=True))
    places = torch.arange(reach, device=into.device)
    seen = places.as_strided(into.shape, into.stride()).reshape(-1).clone()
    places[seen] = torch.arange(seen.numel(), device=into.device)
    used = seen.unique()
    flat = into.as_strided((reach,), (1,))
    flat[used] = values.reshape(-1).to(into.device)[places[used]]


def _overlaps(x: torch.Tensor) -> bool:
    """Whether some elements of a strided tensor may lie on one another."""
    reach = 0
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


def _copy(into: torch.Tensor, values: torch.Tensor) -> None:
    # tensors that were made under inference mode can be written to under it only
    # `inference_mode` turns autograd on again where it is not meant
    with torch.inference_mode(into.is_inference()), torch.no_grad():
        into.copy_(values)
