"""Stored tensors as the graph sees them, and which tensors of a graph are stored ones untouched."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from ..core import view as core_view
from ..source.blobs import ChunkedTensor, StoredTensor, chunk_names
from ..source.torn_tensors import part_of
from .graph import ComputedTensor, Tensor, stored_keys
from .pipeline import Views

if TYPE_CHECKING:
    from ..core.view import View
    from ..source.torn_tensors import TornTensor


def view_of(stored: StoredTensor, views: Views | None = None) -> View:
    """The view of a stored tensor over the places that it lies in; one of `views`, if given."""
    if isinstance(stored, ChunkedTensor):
        return (views or Views()).chunked(stored)
    whole = (stored.spec.shape, stored.strides)
    return core_view.stored(0, *whole) if views is None else views.stored(*whole)


def initial(tensors: Mapping[str, StoredTensor], views: Views) -> dict[str, Tensor]:
    """The stored tensors as the graph sees them."""
    out = {}
    whole: dict[int, View] = {}
    anew = False
    last: StoredTensor | None = None
    like: Tensor | None = None
    for key, stored in tensors.items():
        if stored is last and like is not None:
            # thousands of values that are None stand for one tensor
            out[key] = Tensor(like.spec, like.view, (key,))
            continue
        spec = stored.spec
        if isinstance(stored, ChunkedTensor):
            anew = anew or (stored.torn is not None and stored.torn.anew)
            out[key] = Tensor(spec, views.chunked(stored), chunk_names(key, stored))
            continue
        view = whole.get(id(spec)) if stored.strides is None else None
        if view is None:
            view = views.stored(spec.shape, stored.strides)
            if stored.strides is None:
                whole[id(spec)] = view
        last, like = stored, Tensor(spec, view, (key,))
        out[key] = like
    if anew:
        from .requantized import whole_again

        for key, made in whole_again(tensors).items():
            out[key] = Tensor(made.spec, views.intern(made.view), made.sources)
    return out


def stored_tensor(key: str, stored: StoredTensor) -> Tensor:
    """One stored tensor as the graph sees it."""
    return Tensor(stored.spec, view_of(stored), chunk_names(key, stored))


def torn_in(
    outputs: Mapping[str, Tensor], stored: Mapping[str, StoredTensor]
) -> Iterator[TornTensor]:
    """The torn tensors that outputs are made of, where these are not encoded anew."""
    for tensor in outputs.values():
        for key in stored_keys(tensor):
            torn = part_of(stored[key])
            if torn is not None and not torn.anew:
                yield torn.tensor


def untouched_key(
    tensor: Tensor, stored: Mapping[str, StoredTensor], views: Views | None = None
) -> str | None:
    """The key of the stored tensor that this one is, element for element; None if it is another."""
    source = tensor.sources[0] if tensor.sources else None
    if source is None or isinstance(source, ComputedTensor):
        return None
    key = source if isinstance(source, str) else source.key
    at = stored.get(key)
    if at is None:
        # it lies outside of what rules see
        return None
    names = chunk_names(key, at) if isinstance(at, ChunkedTensor) else (key,)
    if (tensor.spec, tensor.sources) != (at.spec, names):
        return None
    return key if tensor.view == view_of(at, views) else None


def find_renamed(
    outputs: Mapping[str, Tensor], stored: Mapping[str, StoredTensor]
) -> dict[str, str] | None:
    """Output key -> key, if every output is a stored tensor, each taken at most once; else None."""
    views, found = Views(), dict[str, str]()
    for key, tensor in outputs.items():
        was = untouched_key(tensor, stored, views)
        if was is None:
            return None
        found[key] = was
    return found if len(set(found.values())) == len(found) else None
