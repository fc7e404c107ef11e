"""Paths of the objects of a state, as Python would reach them: `["model"]["w"]`, `.attr`, `[3]`.

The fast walk of a state knows no paths. This one, in Python and without recursion, goes the same
way when a path is asked for: a refusal, the devices of a snapshot, a restore.
"""

from __future__ import annotations

import copyreg
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any, Final

import numpy
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .kinds import attributes_of, by_reference, copies_itself, is_fake

# deeper structures are refused: what reads checkpoints counts on a limit as well
DEEPEST: Final = 400
SCALARS: Final = (type(None), bool, int, float, complex, str, bytes, range)

Child = tuple[str, Any]


def objects(state: Any, *, inside: bool = False) -> Iterator[tuple[str, Any, int]]:
    """(path, object, depth) of everything in `state`, each object once, parents first.

    What does not tell its parts, because its reduce method raises, has none. `inside`: the parts of
    objects that copy themselves, too.
    """
    seen: dict[int, Any] = {}
    todo: list[tuple[str, Any, int]] = [("", state, 0)]
    while todo:
        path, obj, depth = todo.pop()
        if isinstance(obj, SCALARS) or id(obj) in seen:
            continue
        seen[id(obj)] = obj
        yield path, obj, depth
        try:
            inner = inner_parts(obj) if inside else children(obj)
        except Exception:  # noqa: BLE001 - the reduce method may raise anything
            continue
        todo += [(path + step, child, depth + 1) for step, child in reversed(inner)]


def children(obj: Any) -> list[Child]:
    """(step of the path, part) of an object. What its reduce method raises."""
    cls = type(obj)
    if isinstance(obj, (*SCALARS, bytearray)) or by_reference(cls):
        return []
    if cls is dict:
        return _keyed(list(obj.items()))
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


def inner_parts(obj: Any) -> list[Child]:
    """`children`, those of an object that copies itself as well, whether or not it reduces."""
    if not copies_itself(type(obj)) or isinstance(obj, numpy.ndarray):
        return children(obj)
    found = [(f".{name}", value) for name, value in attributes_of(obj).items()]
    if isinstance(obj, (list, tuple, set, frozenset, deque)):
        found += [(f"[{at}]", value) for at, value in enumerate(obj)]
    elif isinstance(obj, Mapping):
        found += _keyed(list(obj.items()))
    return found


def parts_of_own(root: Any, known: Callable[[], Container[int]]) -> list[Any]:
    """What a walk copies for an object that copies itself: tensors, and all that can be shared.

    Left to the object is what a walk cannot copy, and what refers back to it, unless the walk has
    been there: `known` answers with the ids of what it has seen.
    """
    parents: dict[int, list[int]] = {}
    order: dict[int, Any] = {}
    left: list[int] = [id(root)]
    todo = [root]
    while todo:
        obj = todo.pop()
        if id(obj) in order:
            continue
        order[id(obj)] = obj
        try:
            inner = inner_parts(obj) if obj is root else children(obj)
        except Exception:  # noqa: BLE001 - methods of the object may raise anything
            left.append(id(obj))
            inner = list(attributes_of(obj).items())
        for _, part in inner:
            if not isinstance(part, SCALARS) and not by_reference(type(part)):
                parents.setdefault(id(part), []).append(id(obj))
                todo.append(part)
    around: set[int] = set()
    while left:
        key = left.pop()
        if key not in around:
            around.add(key)
            left += parents.get(key, ())
    seen = known() if len(around) > 1 else ()
    return [
        obj
        for key, obj in order.items()
        if obj is not root and (key not in around or isinstance(obj, torch.Tensor) or key in seen)
    ]


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
        elif isinstance(part, (list, tuple)):
            found += [(f".__getstate__()[{at}]", value) for at, value in enumerate(part)]
        elif part is not None:
            found.append((".__getstate__()", part))
    found += [(f"[{at}]", value) for at, value in enumerate(items or ())]
    found += _keyed(pairs or ())
    return found


def _of_tensor(x: Any) -> list[Child]:
    if is_fake(type(x)):
        # what its mode remembers is no part of the state
        return []
    found = attributes_of(x)
    if is_traceable_wrapper_subclass(x):
        found.update((name, getattr(x, name)) for name in x.__tensor_flatten__()[0])
    return [(f".{name}", value) for name, value in found.items()]


def _keyed(pairs: Iterable[tuple[Any, Any]]) -> list[Child]:
    """Parts by key. Keys whose text is the same are told apart by their place among all of them."""
    found = [(_short(key), value) for key, value in pairs]
    times = Counter(text for text, _ in found)
    return [
        (f"[{text}]" if times[text] == 1 else f"[{text} #{at}]", value)
        for at, (text, value) in enumerate(found)
    ]


def _short(key: Any) -> str:
    simple = isinstance(key, SCALARS) or (
        type(key) is tuple and all(isinstance(part, SCALARS) for part in key)
    )
    text = repr(key) if simple else f"<{type(key).__name__}>"
    return text if len(text) < 200 else text[:197] + "..."
