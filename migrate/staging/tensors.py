"""Tensors taken apart into recipes and storages, and made again over other memory.

A recipe names storages by number and says how a tensor looks at them. It holds no tensor, so it
outlives the source and travels to another process. Kept: dtype, shape, strides, offset, ties, conj
and neg bits, quantizers, the parts of sparse and nested tensors, `requires_grad`, the class of a
subclass that keeps its bytes in itself. What cannot be kept is refused with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

# what a recipe's flags say
GRAD: Final = 1
PARAMETER: Final = 2
CONJ: Final = 4
NEG: Final = 8

# from here on a storage has a block of its own, and may be copied in part
LARGE: Final = 1 << 20

Recipe = tuple[Any, ...]


class NotCopiedError(Exception):
    """A tensor or object that cannot be staged; the message is the reason, without its path."""


def _plain_sizes() -> dict[torch.dtype, int]:
    """Bytes of an element of each dtype whose tensors have neither a quantizer nor a conj bit."""
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    return {d: d.itemsize for d in dtypes if not d.is_complex and not str(d).startswith("torch.q")}


_SIZES: Final = _plain_sizes()


class Storages:
    """The storages that the tensors of a state look at, and the bytes of each that they touch."""

    __slots__ = ("_numbers", "addresses", "devices", "sizes", "storages", "touched", "users")

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self.storages: list[torch.UntypedStorage] = []
        self.addresses: list[int] = []
        self.sizes: list[int] = []
        self.users: list[int] = []
        # where storages lie that are not on the CPU
        self.devices: dict[int, torch.device] = {}
        # (first byte, end) of each look at a storage that is worth copying in part
        self.touched: dict[int, list[tuple[int, int]]] = {}

    def number(self, storage: torch.UntypedStorage, low: int, high: int) -> int:
        """The number of `storage`, of which bytes `low` to `high` are looked at.

        Storages over the same memory are one, however many torch has made (numpy, DLPack); those
        of no bytes are each their own.
        """
        address = storage.data_ptr()
        size = storage.nbytes()
        device = storage.device
        if not address or not size:
            key: Any = ("empty", storage._cdata)
        elif device.type == "cpu":
            key = (address, size)
        else:
            number = self.entered((device, address, size), storage, address, size, low, high)
            self.devices[number] = device
            return number
        return self.entered(key, storage, address, size, low, high)

    def entered(
        self, key: Any, storage: torch.UntypedStorage, address: int, size: int, low: int, high: int
    ) -> int:
        """`number` for a caller that knows address and size; both are the key on the CPU."""
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.storages)
            self.storages.append(storage)
            self.addresses.append(address)
            self.sizes.append(size)
            self.users.append(1)
            if size > LARGE:
                self.touched[number] = [(low, high)]
        else:
            self.users[number] += 1
            if size > LARGE:
                self.touched[number].append((low, high))
        return number


def describe(x: torch.Tensor, storages: Storages) -> Recipe:
    """The recipe of a tensor or Parameter; its storages are entered.

    NotCopiedError if it has none.
    """
    dtype = x.dtype
    size = _SIZES.get(dtype)
    if size is None or not x.is_cpu or x.layout is not torch.strided or x.is_nested or x.is_neg():
        return _describe_other(x, storages)
    try:
        storage = x.untyped_storage()
    except RuntimeError:
        return _describe_other(x, storages)
    if not x.is_contiguous():
        return _strided(x, storage, size, storages)
    flags = (GRAD if x.requires_grad else 0) | (PARAMETER if type(x) is not torch.Tensor else 0)
    held, end = storage.nbytes(), x.numel() * size
    offset = x.storage_offset()
    if offset:
        first, address = offset * size, storage.data_ptr()
        end += first
        if end > held or end == first or not address:
            return _strided(x, storage, size, storages)
        number = storages.entered((address, held), storage, address, held, first, end)
        return ("strided", number, dtype, offset, tuple(x.shape), x.stride(), flags)
    if end > held:
        raise NotCopiedError(_FREED.format(held, end))
    address = x.data_ptr()
    if not end or not address:
        return _strided(x, storage, size, storages)
    number = storages.entered((address, held), storage, address, held, 0, end)
    if end == held:
        return ("whole", number, dtype, x.shape, flags)
    return ("strided", number, dtype, 0, tuple(x.shape), x.stride(), flags)


_FREED: Final = (
    "its storage was freed or shrunk: it holds {} bytes, and the tensor reads up to byte {}"
)


def _strided(
    x: torch.Tensor, storage: torch.UntypedStorage, size: int, storages: Storages
) -> Recipe:
    shape = tuple(x.shape)
    offset = x.storage_offset()
    stride = x.stride()
    count = x.numel()
    first = offset * size
    if not count:
        end = first = 0
    elif x.is_contiguous():
        end = first + count * size
    else:
        end = first + (1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))) * size
    if end > storage.nbytes():
        raise NotCopiedError(_FREED.format(storage.nbytes(), end))
    flags = (GRAD if x.requires_grad else 0) | (PARAMETER if type(x) is not torch.Tensor else 0)
    if x.is_neg():
        flags |= NEG
    if x.is_conj():
        flags |= CONJ
    return ("strided", storages.number(storage, first, end), x.dtype, offset, shape, stride, flags)


def _describe_other(x: torch.Tensor, storages: Storages) -> Recipe:
    flags = (GRAD if x.requires_grad else 0) | (PARAMETER if type(x) is not torch.Tensor else 0)
    if torch._C._functorch.is_functorch_wrapped_tensor(x):
        raise NotCopiedError("a tensor inside of a transform (vmap, grad) has no memory of its own")
    y = x.detach()
    if x.is_nested:
        parts = (
            y.values() if x.layout is torch.jagged else torch.ops.aten.values(y),
            y._nested_tensor_size(),
            y._nested_tensor_strides(),
            y._nested_tensor_storage_offsets(),
        )
        return ("nested", tuple(describe(part, storages) for part in parts), flags)
    if x.layout is torch.sparse_coo:
        coo = (describe(y._indices(), storages), describe(y._values(), storages))
        return ("sparse", coo, x.layout, tuple(x.shape), x.is_coalesced(), flags)
    if x.layout in (torch.sparse_csr, torch.sparse_bsr):
        rows = (
            describe(y.crow_indices(), storages),
            describe(y.col_indices(), storages),
            describe(y.values(), storages),
        )
        return ("sparse", rows, x.layout, tuple(x.shape), None, flags)
    if x.layout in (torch.sparse_csc, torch.sparse_bsc):
        columns = (
            describe(y.ccol_indices(), storages),
            describe(y.row_indices(), storages),
            describe(y.values(), storages),
        )
        return ("sparse", columns, x.layout, tuple(x.shape), None, flags)
    if x.layout is not torch.strided:
        raise NotCopiedError(f"the layout {x.layout} has no parts that could be copied")
    if x.is_meta:
        return ("meta", x.dtype, tuple(x.shape), x.stride(), flags)
    try:
        storage = x.untyped_storage()
    except (RuntimeError, NotImplementedError) as error:
        raise NotCopiedError(f"it has no memory that could be copied: {error}") from None
    if not x.is_quantized:
        return _strided(x, storage, x.dtype.itemsize, storages)
    inner = _strided(y, storage, x.dtype.itemsize, storages)
    if x.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return ("quantized", inner, (x.q_scale(), x.q_zero_point()), flags)
    scales = (
        describe(x.q_per_channel_scales(), storages),
        describe(x.q_per_channel_zero_points(), storages),
    )
    return ("quantized", inner, (*scales, x.q_per_channel_axis()), flags)


def _finished(y: torch.Tensor, flags: int) -> torch.Tensor:
    if flags & PARAMETER:
        return torch.nn.Parameter(y, bool(flags & GRAD))
    return y.requires_grad_() if flags & GRAD else y


Storage = Callable[[int], torch.UntypedStorage]


def _make_strided(recipe: Recipe, storage: Storage) -> torch.Tensor:
    _, number, dtype, offset, shape, stride, flags = recipe
    base = storage(number)
    y = torch.empty(0, dtype=dtype, device=base.device).set_(base, offset, shape, stride)
    if flags & CONJ:
        y = torch._conj(y)
    if flags & NEG:
        y = torch._neg_view(y)
    return _finished(y, flags)


def _make_whole(recipe: Recipe, storage: Storage) -> torch.Tensor:
    _, number, dtype, shape, flags = recipe
    base = storage(number)
    return _finished(torch.empty(0, dtype=dtype, device=base.device).set_(base, 0, shape), flags)


def _make_nested(recipe: Recipe, storage: Storage) -> torch.Tensor:
    _, parts, flags = recipe
    made = torch._nested_view_from_buffer(*(make(part, storage) for part in parts))
    return _finished(made, flags)


def _make_sparse(recipe: Recipe, storage: Storage) -> torch.Tensor:
    _, parts, layout, shape, coalesced, flags = recipe
    tensors = [make(part, storage) for part in parts]
    if layout is torch.sparse_coo:
        made = torch.sparse_coo_tensor(
            *tensors, size=shape, is_coalesced=coalesced, check_invariants=False
        )
    else:
        made = torch.sparse_compressed_tensor(
            *tensors, size=shape, layout=layout, check_invariants=False
        )
    return _finished(made, flags)


def _make_meta(recipe: Recipe, storage: Storage) -> torch.Tensor:
    _, dtype, shape, stride, flags = recipe
    return _finished(torch.empty_strided(shape, stride, dtype=dtype, device="meta"), flags)


def _make_quantized(recipe: Recipe, storage: Storage) -> torch.Tensor:
    _, (_, number, dtype, offset, shape, stride, _), quantizer, flags = recipe
    base = storage(number)
    if len(quantizer) == 2:
        made = torch._empty_affine_quantized(
            shape, scale=quantizer[0], zero_point=quantizer[1], dtype=dtype, device=base.device
        )
    else:
        scales, zeros, axis = make(quantizer[0], storage), make(quantizer[1], storage), quantizer[2]
        made = torch._empty_per_channel_affine_quantized(
            shape, scales=scales, zero_points=zeros, axis=axis, dtype=dtype, device=base.device
        )
    return _finished(made.set_(base, offset, shape, stride), flags)


_MAKERS: Final = {
    "whole": _make_whole,
    "strided": _make_strided,
    "nested": _make_nested,
    "sparse": _make_sparse,
    "meta": _make_meta,
    "quantized": _make_quantized,
}


def make(recipe: Recipe, storage: Storage) -> torch.Tensor:
    """The tensor of a recipe, over the storages that `storage` answers with by number."""
    return _MAKERS[recipe[0]](recipe, storage)


def moved(recipe: Recipe, shifts: Sequence[Callable[[int], int] | None]) -> Recipe:
    """The recipe over storages of which only touched ranges are kept: offsets in bytes change."""
    if recipe[0] == "whole":
        return recipe
    if recipe[0] == "strided":
        kind, number, dtype, offset, shape, stride, flags = recipe
        shift = shifts[number]
        if shift is None:
            return recipe
        size = dtype.itemsize
        return (kind, number, dtype, shift(offset * size) // size, shape, stride, flags)
    return tuple(_moved_part(part, shifts) for part in recipe)


def _moved_part(part: Any, shifts: Sequence[Callable[[int], int] | None]) -> Any:
    if not isinstance(part, tuple) or not part:
        return part
    if isinstance(part[0], str) and part[0] in _MAKERS:
        return moved(part, shifts)
    return tuple(_moved_part(inner, shifts) for inner in part)
