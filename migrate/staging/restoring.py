"""The values of a snapshot, put back into the live structure that it was taken from."""

from __future__ import annotations

from collections import deque
from collections.abc import MutableMapping, MutableSequence
from typing import Any

import torch

from ..core.errors import Diagnostic, QuestionError, listed
from .paths import children
from .walk import by_reference


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
    for target, source in plan.tensors:
        _write(target, source)
    for parent, key, value in plan.values:
        if isinstance(key, str) and not isinstance(parent, MutableMapping):
            setattr(parent, key, value)
        else:
            parent[key] = value


class _Plan:
    """What is to be written, and where the structures differ."""

    def __init__(self) -> None:
        self.tensors: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.values: list[tuple[Any, Any, Any]] = []
        self.problems: list[str] = []
        self._seen: dict[int, Any] = {}

    def compare(self, staged: Any, live: Any) -> None:
        todo = [("", staged, live)]
        while todo:
            path, old, new = todo.pop()
            if id(new) in self._seen:
                continue
            self._seen[id(new)] = new
            if type(old) is not type(new):
                self._differs(path, f"{type(new).__name__} instead of {type(old).__name__}")
            elif isinstance(old, torch.Tensor) and not self._same_form(path, old, new):
                continue
            else:
                todo += reversed(self._parts(path, old, new))

    def _same_form(self, path: str, old: torch.Tensor, new: torch.Tensor) -> bool:
        """Whether these tensors agree; those that hold numbers themselves are noted."""
        if (old.dtype, old.shape, old.layout) != (new.dtype, new.shape, new.layout):
            self._differs(
                path, f"{new.dtype} {list(new.shape)} instead of {old.dtype} {list(old.shape)}"
            )
            return False
        if not hasattr(type(old), "__tensor_flatten__"):
            self.tensors.append((new, old))
        return True

    def _parts(self, path: str, old: Any, new: Any) -> list[tuple[str, Any, Any]]:
        before, after = children(old), children(new)
        if [step for step, _ in before] != [step for step, _ in after]:
            self._differs(path, "other parts")
            return []
        found = []
        for (step, was), (_, now) in zip(before, after, strict=True):
            if _holds(was) or _holds(now):
                found.append((path + step, was, now))
            elif was is not now:
                self._value(path + step, new, step, was)
        return found

    def _value(self, path: str, parent: Any, step: str, value: Any) -> None:
        key: Any
        if isinstance(parent, MutableMapping):
            key = (
                next(k for k in parent if path.endswith(f"[{k!r}]"))
                if step.startswith("[")
                else step[1:]
            )
        elif isinstance(parent, (MutableSequence, deque)):
            key = int(step[1:-1])
        elif step.startswith(".") and not step.startswith(".__"):
            key = step[1:]
        else:
            self._differs(path, f"a {type(parent).__name__} cannot be changed in place")
            return
        self.values.append((parent, key, value))

    def _differs(self, path: str, what: str) -> None:
        self.problems.append(f"{path or 'the state itself'}: {what}")


def _holds(obj: Any) -> bool:
    """Whether there may be tensors or mutable parts in an object: it is compared, not replaced."""
    if isinstance(obj, tuple) and type(obj) is tuple:
        return any(map(_holds, obj))
    return not (
        obj is None
        or isinstance(obj, (bool, int, float, complex, str, bytes))
        or by_reference(type(obj))
    )


def _write(target: torch.Tensor, source: torch.Tensor) -> None:
    into, values = target.detach(), source.detach()
    if into.layout is torch.strided and not into.is_nested:
        # what is expanded has one element where it shows many
        for dim, (size, stride) in enumerate(zip(into.shape, into.stride(), strict=True)):
            if stride == 0 and size > 1:
                into, values = into.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    into.copy_(values)
