"""Paths of the objects of a state, as Python would reach them: `["model"]["w"]`, `.attr`, `[3]`.

The fast walk of a state knows no paths. This one, in Python and without recursion, goes the same
way when a path is asked for: a refusal, the devices of a snapshot, a restore.
"""

from __future__ import annotations

import copyreg
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .tensors import NotCopiedError, Storages, describe
from .walk import Walk, attributes_of, by_reference, copies_itself

# deeper structures are refused: what reads checkpoints counts on a limit as well
DEEPEST: Final = 400
_SCALARS: Final = (type(None), bool, int, float, complex, str, bytes, bytearray, range)

Child = tuple[str, Any]


def objects(state: Any) -> Iterator[tuple[str, Any, int]]:
    """(path, object, depth) of everything in `state`, each object once, parents first.

    What does not tell its parts, because its reduce method raises, has none.
    """
    seen: dict[int, Any] = {}
    todo: list[tuple[str, Any, int]] = [("", state, 0)]
    while todo:
        path, obj, depth = todo.pop()
        if isinstance(obj, _SCALARS) or id(obj) in seen:
            continue
        seen[id(obj)] = obj
        yield path, obj, depth
        try:
            inner = children(obj)
        except Exception:  # noqa: BLE001 - the reduce method may raise anything
            continue
        todo += [(path + step, child, depth + 1) for step, child in reversed(inner)]


def children(obj: Any) -> list[Child]:
    """(step of the path, part) of an object. What its reduce method raises."""
    cls = type(obj)
    if isinstance(obj, _SCALARS) or by_reference(cls):
        return []
    if cls is dict:
        return [(f"[{_short(key)}]", value) for key, value in list(obj.items())]
    if cls in (list, tuple):
        return [(f"[{at}]", value) for at, value in enumerate(obj)]
    if cls in (set, frozenset):
        return [(f"{{{at}}}", value) for at, value in enumerate(obj)]
    if isinstance(obj, torch.Tensor):
        return _of_tensor(obj)
    if issubclass(cls, tuple) and hasattr(cls, "_fields"):
        return [(f".{name}", value) for name, value in zip(cls._fields, obj, strict=True)]
    if copies_itself(cls):
        return []
    reducer = copyreg.dispatch_table.get(cls)
    reduced = reducer(obj) if reducer is not None else obj.__reduce_ex__(4)
    if isinstance(reduced, str):
        return []
    return _of_reduced(*reduced)


def _of_reduced(
    function: Any,
    arguments: Any,
    state: Any = None,
    items: Any = None,
    pairs: Any = None,
    *rest: Any,
) -> list[Child]:
    found: list[Child] = [
        (f".__reduce__[{at}]", value)
        for at, value in enumerate(arguments)
        if not isinstance(value, type)
    ]
    for part in state if isinstance(state, tuple) and len(state) == 2 else (state,):
        if isinstance(part, dict):
            found += [(f".{name}", value) for name, value in part.items()]
        elif part is not None:
            found.append((".__getstate__()", part))
    found += [(f"[{at}]", value) for at, value in enumerate(items or ())]
    found += [(f"[{_short(key)}]", value) for key, value in pairs or ()]
    return found


def _of_tensor(x: Any) -> list[Child]:
    found = attributes_of(x)
    if is_traceable_wrapper_subclass(x):
        found.update((name, getattr(x, name)) for name in x.__tensor_flatten__()[0])
    return [(f".{name}", value) for name, value in found.items()]


def _short(key: Any) -> str:
    text = repr(key) if isinstance(key, _SCALARS) else f"<{type(key).__name__}>"
    return text if len(text) < 200 else text[:197] + "..."


def refusals(state: Any) -> list[tuple[str, str]]:
    """(path, reason) of all that cannot be staged: tensors, and what does not reduce."""
    found: list[tuple[str, str]] = []
    for path, obj, depth in objects(state):
        reason = _reason(obj)
        if depth > DEEPEST:
            return [*found, (path[:200] + "…", f"nested deeper than {DEEPEST} levels")]
        if reason is not None:
            found.append((path, reason))
    return found


def _reason(obj: Any) -> str | None:
    try:
        if isinstance(obj, torch.Tensor):
            walk = Walk()
            walk.reducer_override(obj)
            for x in walk.tensors:
                describe(x, Storages())
        children(obj)
    except NotCopiedError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - as above
        return f"a {type(obj).__qualname__} cannot be copied: {error}"
    return None
