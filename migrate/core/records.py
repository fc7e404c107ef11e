"""Many named tuples at once. A plan holds several per key, and a Python call for each of them is
what its time goes to.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

T = TypeVar("T", bound=tuple[Any, ...])


def records(kind: type[T], *columns: Iterable[Any]) -> list[T]:
    """One `kind` for each position of the columns, which are its fields in order, defaults
    included; the shortest ends it.
    """
    new = tuple.__new__
    return [new(kind, row) for row in zip(*columns)]  # noqa: B905 - columns may be endless
