"""Whether two values that torch loaded are the same: bits, kinds, flags, attributes, and which
tensors are one.
"""

from __future__ import annotations

import math
import struct
from typing import Any

import torch


def raw(tensor: torch.Tensor) -> bytes:
    flat = torch.empty(0, dtype=torch.uint8)
    if tensor.dtype == torch.float4_e2m1fn_x2:
        # torch 2.8 copies no such tensor
        tensor = tensor.view(torch.uint8)
    packed = tensor.detach().clone(memory_format=torch.contiguous_format)
    return bytes(flat.set_(packed.untyped_storage())[: packed.numel() * packed.itemsize].numpy())


def same(a: Any, b: Any, path: str = "") -> None:
    """Raises AssertionError at the first difference of two values, ties apart."""
    assert type(a) is type(b), (path, type(a), type(b))
    if isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape, a.requires_grad) == (b.dtype, b.shape, b.requires_grad), path
        assert raw(a) == raw(b), path
        assert getattr(a, "_is_buffer", False) == getattr(b, "_is_buffer", False), path
    elif isinstance(a, dict):
        # a plain dict that lost its order is the same dict
        assert (list(a) == list(b)) if "Ordered" in type(a).__name__ else (set(a) == set(b)), (
            path,
            list(a),
            list(b),
        )
        for key, value in a.items():
            same(value, b[key], f"{path}.{key}")
        assert getattr(a, "_metadata", None) == getattr(b, "_metadata", None), path
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), path
        for number, (x, y) in enumerate(zip(a, b, strict=True)):
            same(x, y, f"{path}.{number}")
    elif isinstance(a, float):
        assert struct.pack("d", a) == struct.pack("d", b) or (math.isnan(a) and math.isnan(b)), path
    else:
        assert a == b, path


def places(value: Any, path: str = "", out: dict[str, Any] | None = None) -> dict[str, Any]:
    """Each tensor with bytes, by its path: the memory it views."""
    out = {} if out is None else out
    if isinstance(value, torch.Tensor):
        if value.numel():
            out[path] = (value.data_ptr(), value.dtype, tuple(value.shape), tuple(value.stride()))
    elif isinstance(value, dict):
        for key, held in value.items():
            places(held, f"{path}.{key}", out)
    elif isinstance(value, list | tuple):
        for number, held in enumerate(value):
            places(held, f"{path}.{number}", out)
    return out


def ties(value: Any) -> set[frozenset[str]]:
    """The groups of paths whose tensors are one."""
    groups: dict[Any, set[str]] = {}
    for path, place in places(value).items():
        groups.setdefault(place, set()).add(path)
    return {frozenset(group) for group in groups.values() if len(group) > 1}
