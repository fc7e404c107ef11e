"""Which classes of tensor are their bytes and nothing else, and which are spread over processes.

A tensor of another class may hold scales, several tensors or a view of other processes beside its
bytes, so what is true of its memory is asked here and nowhere else.
"""

from __future__ import annotations

from typing import Any


def is_plain_class(value: Any) -> bool:
    """Whether a value is a tensor of torch's own classes, wherever it lies: with bytes, these are
    all that it is. One on the meta device has none.
    """
    import torch

    return type(value) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def has_plain_bytes(value: Any) -> bool:
    """Whether a tensor is its bytes and nothing else, and has them: not on the meta device."""
    return is_plain_class(value) and not value.is_meta


def is_dtensor(value: Any) -> bool:
    """Whether a value is a DTensor, of torch or derived from it; their module is not imported."""
    return any(
        c.__name__ == "DTensor" and c.__module__.startswith("torch.distributed.")
        for c in type(value).__mro__
    )
