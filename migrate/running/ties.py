"""Tensors of an output that are one: they stood in one storage, or were declared to be one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ..core.errors import plural, printable
from ..planning.graph import ComputedTensor, Tensor, TensorSource, ValueCheck
from ..planning.stored import stored_tensor
from ..source.blobs import Stored, StoredTensor, chunk_at
from ..source.index import Index
from ..source.tree import CheckpointTree

_TEXTS = frozenset({str})


class Declared(NamedTuple):
    """The storage of separate tensors declared to have been one; `key` is that of the first."""

    key: str


def declare_ties(outline: CheckpointTree, stored: dict[str, Any]) -> dict[str, ValueCheck]:
    """Makes tensors declared to have been one share a storage; returns conditions to check."""
    checks = {}
    for key, first in outline.ties.items():
        one, other = stored[first], stored[key]
        if one.spec != other.spec:
            continue
        tensors = tuple(stored_tensor(name, at) for name, at in ((first, one), (key, other)))
        message = f"{printable(key)} and {printable(first)} were one tensor, and their bytes differ"
        checks[key] = ValueCheck(
            "equal", tensors, None, "M404", message, "migrate.items.json", (first, key)
        )
        stored[first] = one._replace(storage=Declared(first))
        stored[key] = other._replace(storage=Declared(first))
    return checks


def find_ties(outputs: Mapping[str, Tensor], stored: Mapping[str, StoredTensor]) -> dict[str, str]:
    """For each output the first output that it is tied to, often itself."""
    sources = [source for tensor in outputs.values() for source in tensor.sources]
    # whether each source is told from all others by its name alone
    named = False
    if _TEXTS.issuperset(map(type, sources)):
        used: set[Any] = set(sources)
        held = map(stored.get, used)
        storages = [s.storage for s in held if type(s) is Stored and s.storage is not None]
        apart = len(set(storages)) == len(storages)
        if apart and len(used) == len(sources):
            # no two outputs are made of one tensor, and no two tensors lie in one storage
            return {key: key for key in outputs}
        named = apart and len(storages) == len(used)
    groups: dict[Any, tuple[str, Tensor]] = {}
    views: dict[Any, int] = {}
    numbers: dict[int, int] = {}
    out: dict[str, str] = {}
    for key, tensor in outputs.items():
        places: list[Any] = list(tensor.sources) if named else []
        for source in () if named else tensor.sources:
            place = _place(source, stored)
            if place is None:
                break
            places.append(place)
        # a part that shares with nothing is enough
        if not places or len(places) < len(tensor.sources):
            out[key] = key
            continue
        number = numbers.get(id(tensor.view))
        if number is None:
            # views of one plan are one object if they are equal; those of another are not
            number = numbers[id(tensor.view)] = views.setdefault(tensor.view, len(views))
        name, other = groups.setdefault((number, tensor.spec.dtype, *places), (key, tensor))
        # the same source key twice is a copy, unless the op that made both handed out one tensor
        out[key] = name if other is tensor or other.sources != tensor.sources else key
    return out


def describe_ties(index: Index, first: Mapping[str, str], written: str) -> list[str]:
    """Notes on ties that the output cannot express, and on tensors that share some bytes."""
    ties = sum(one != key for key, one in first.items())
    shared: dict[Any, list[tuple[Any, ...]]] = {}
    for stored in (*index.tensors.values(), *index.passed_through.values()):
        if isinstance(stored, Stored) and stored.storage is not None:
            shared.setdefault(stored.storage, []).append(
                (stored.spec, stored.offset, stored.strides)
            )
    partly = sum(
        len(set(views)) for views in shared.values() if len(views) > 1 and len(set(views)) > 1
    )
    return [
        (
            f"{plural(ties, 'tensor')} {'shares' if ties == 1 else 'share'} memory with another "
            "one; each is written"
        )
    ] * bool(ties and written != "torch") + [
        f"{partly} tensors share a part of their memory with another one; each is written apart"
    ] * bool(partly)


def _place(source: TensorSource, stored: Mapping[str, StoredTensor]) -> Any:
    """What is equal for sources that are the same bytes; None for what shares with nothing."""
    if isinstance(source, ComputedTensor):
        return id(source)
    # nearly all are whole tensors
    found = stored[source] if type(source) is str else None
    at = found if type(found) is Stored else chunk_at(stored, source)
    if at.storage is None or isinstance(at.storage, Declared):
        return at.storage
    return at.storage, at.offset, at.strides
