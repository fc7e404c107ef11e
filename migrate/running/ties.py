"""Which outputs are one tensor under several keys.

Two outputs are tied where the graph gives them equal views of tied sources, or where a `tie` op
made them one. `copy` makes tensors of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from ..planning.graph import Tensor, Value
    from ..source.blobs import Stored


class Declared(NamedTuple):
    """The storage of tensors that lie apart, and of which somebody says that they were one: `key`
    is that of the first.
    """

    key: str


def find_ties(outputs: Mapping[str, Tensor], stored: Mapping[str, Stored]) -> dict[str, str]:
    """For each output the first output that it is tied to, often itself."""
    groups: dict[Any, tuple[str, Tensor]] = {}
    views: dict[Any, int] = {}
    numbers: dict[int, int] = {}
    out: dict[str, str] = {}
    for key, tensor in outputs.items():
        number = numbers.get(id(tensor.view))
        if number is None:
            # views of one plan are one object if they are equal; those of another are not
            number = numbers[id(tensor.view)] = views.setdefault(tensor.view, len(views))
        places = tuple(_place(source, stored) for source in tensor.sources)
        shares = bool(places) and None not in places
        name, other = groups.setdefault(
            (number, tensor.spec.dtype, places) if shares else (key,), (key, tensor)
        )
        # the same source key twice is a copy, unless the op that made both handed out one tensor
        out[key] = name if other is tensor or other.sources != tensor.sources else key
    return out


def _place(source: str | Value, stored: Mapping[str, Stored]) -> Any:
    """What is equal for sources that are the same bytes; None for what shares with nothing."""
    if not isinstance(source, str):
        return id(source)
    at = stored[source]
    if at.storage is None or isinstance(at.storage, Declared):
        return at.storage
    return at.storage, at.offset, at.strides
