"""Copies of the weights that a checkpoint holds beside them: a moving average (`ema`), a teacher.

Rules work on one dict, and what stands beside it is carried as it is. So a copy keeps the layout
that the weights had, and no reader of the new layout takes it. Each framework calls it otherwise:
it is found by its tensors, which have the names and shapes of the weights below one key.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ..core.errors import Diagnostic, listed, option, plural, printable
from ..core.templates import rank_of
from ..source.tree import tensors_outside
from .optimizer_states import plain
from .optimizers import follow_tensors, rules_of, stays

if TYPE_CHECKING:
    from ..source.index import Index
    from .compose import Composition

# dots before the name that a tensor has in its copy
_DEEPEST = 8


def stale_copies(index: Index, composition: Composition) -> list[Diagnostic]:
    """M411 for each copy of at least half of the weights whose tensors the plan changes."""
    if not composition.steps:
        return []
    shapes = {stored.spec.shape for stored in index.tensors.values()}
    beside = [one for one in _beside(index) if tuple(one[2].shape) in shapes]
    if not beside:
        return []
    fates = follow_tensors(composition, index, set())
    weights: dict[tuple[int | None, str], str] = {}
    for key in fates.specs:
        rank = rank_of(key)
        weights[rank, plain(key if rank is None else key.rpartition("@")[0])] = key
    copies: dict[tuple[str, ...], dict[str, str]] = {}
    for rank, path, tensor in beside:
        name = plain(".".join(path))
        for _ in range(_DEEPEST):
            name = name.partition(".")[2]
            copied = weights.get((rank, name)) or weights.get((None, name))
            if name and copied is not None and fates.specs[copied].shape == tuple(tensor.shape):
                around = _around(path, name)
                copies.setdefault(around, {})[copied] = ".".join(path[len(around) :])
                break
    found = []
    for path, names in copies.items():
        stale = [key for key, name in names.items() if not stays(name, key, fates)]
        if not stale or 2 * len(names) < len(fates.specs):
            continue
        at = ".".join(path)
        found.append(
            Diagnostic(
                "M411",
                f"the copy of the weights at `{printable(at)}` is carried as it is: the plan "
                f"changes {plural(len(stale), 'tensor')} of the {len(names):,} that it copies",
                tuple(dict.fromkeys(rules_of(stale, composition)))[:4],
                (listed(stale, 8),),
                f"to migrate it too, run it again on the output with {option('at', at)}",
            )
        )
    return found


def _beside(index: Index) -> Iterator[tuple[int | None, tuple[str, ...], Any]]:
    """(rank, path, tensor) of all that rules do not see, but for the state of optimizers."""
    parts = () if index.tree is None else index.tree.parts
    for rank, part in enumerate(parts):
        for path, tensor in tensors_outside(part.root, part.table):
            if not any("optim" in word.lower() for word in path[:-1]):
                yield rank if len(parts) > 1 else None, path, tensor
    for key, held in index.items.items() if index.tree is None else ():
        if isinstance(held, Mapping) and "optim" not in key.lower():
            for name, value in held.items():
                if isinstance(name, str) and hasattr(value, "shape") and hasattr(value, "dtype"):
                    yield None, (key, name), value


def _around(path: tuple[str, ...], name: str) -> tuple[str, ...]:
    """The dicts around a copy, of the path of one of its tensors, which is called `name` there."""
    count = len(path) - 1
    while count > 1 and not plain(".".join(path[count:])).endswith(name):
        count -= 1
    return path[:count]


__all__ = ["stale_copies"]
