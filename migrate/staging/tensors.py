"""Tensors taken apart into recipes and storages, and made again over other memory.

A recipe names storages by number and says how a tensor looks at them. It holds no tensor, so it
outlives the source and travels to another process. Kept: dtype, shape, strides, offset, ties, conj
and neg bits, quantizers, the parts of sparse and nested tensors, `requires_grad`, the class of a
subclass that keeps its bytes in itself. What cannot be kept is refused with the reason.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy
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

    def __init__(self, reason: str, culprits: Sequence[tuple[Any, str]] = ()) -> None:
        """`culprits` are objects and reasons, where trying each object alone does not find them."""
        super().__init__(reason)
        self.culprits = culprits


def _plain_sizes() -> dict[torch.dtype, int]:
    """Bytes of an element of each dtype whose tensors have neither a quantizer nor a conj bit."""
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    return {d: d.itemsize for d in dtypes if not d.is_complex and not str(d).startswith("torch.q")}


_SIZES: Final = _plain_sizes()


class Storages:
    """The storages that the tensors of a state look at, and the bytes of each that they touch."""

    __slots__ = (
        "_numbers",
        "addresses",
        "alive",
        "devices",
        "sizes",
        "storages",
        "touched",
        "users",
    )

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self.storages: list[torch.UntypedStorage] = []
        # what owns the memory of storages that do not
        self.alive: list[Any] = []
        self.addresses: list[int] = []
        self.sizes: list[int] = []
        self.users: list[int] = []
        # where storages lie that are not on the CPU
        self.devices: dict[int, torch.device] = {}
        # (first byte, end) of what is looked at of a storage that is worth copying in part
        self.touched: dict[int, list[tuple[int, int]]] = {}

    def number(self, storage: torch.UntypedStorage, low: int, high: int) -> int:
        """The number of `storage`, of which bytes `low` to `high` are looked at.

        Storages over the same memory are one, however many torch has made (numpy, DLPack); those
        of no bytes are each their own.
        """
        size = storage.nbytes()
        try:
            address = storage.data_ptr()
        except RuntimeError:
            address = 0
        if size and high > low and not address:
            raise NotCopiedError("its storage has no memory that could be copied")
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
                ranges = self.touched[number]
                begun, end = ranges[-1]
                # views mostly follow each other: one range then
                if begun <= low <= end:
                    ranges[-1] = begun, max(end, high)
                else:
                    ranges.append((low, high))
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
    shape = x.shape
    # an axis of length 1 may have any stride and is contiguous nevertheless
    if end == held and 1 not in shape:
        return ("whole", number, dtype, shape, flags)
    return ("strided", number, dtype, 0, tuple(shape), x.stride(), flags)


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
    if isinstance(x, numpy.ndarray):
        return _describe_array(x, storages)
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
    if x.layout in _SPARSE:
        inside = tuple(describe(part, storages) for part in parts_of(y))
        coalesced = x.is_coalesced() if x.layout is torch.sparse_coo else None
        return ("sparse", inside, x.layout, tuple(x.shape), coalesced, flags)
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
    if x.dtype in _PACKED:
        number = _packed(x, storage, storages)
        inner: Recipe = ("strided", number, x.dtype, 0, tuple(x.shape), x.stride(), flags)
    else:
        inner = _strided(y, storage, x.dtype.itemsize, storages)
    if x.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return ("quantized", inner, (x.q_scale(), x.q_zero_point()), flags)
    scales = (
        describe(x.q_per_channel_scales(), storages),
        describe(x.q_per_channel_zero_points(), storages),
    )
    return ("quantized", inner, (*scales, x.q_per_channel_axis()), flags)


# elements of a byte of the quantized dtypes that share bytes
_PACKED: Final = {torch.quint4x2: 2, torch.quint2x4: 4}


def _packed(x: torch.Tensor, storage: torch.UntypedStorage, storages: Storages) -> int:
    size = -(-x.numel() // _PACKED[x.dtype])
    if not x.is_contiguous() or x.storage_offset() or storage.nbytes() < size:
        raise NotCopiedError(f"a view of {x.dtype}, or one whose storage was freed")
    return storages.number(storage, 0, size)


def _bounds(x: Any) -> tuple[int, int]:
    """First address of an array's elements, and the end of the last."""
    first = x.__array_interface__["data"][0]
    if not x.nbytes:
        return first, first
    reach = [(n - 1) * s for n, s in zip(x.shape, x.strides, strict=True)]
    return first + sum(min(0, r) for r in reach), first + sum(max(0, r) for r in reach) + x.itemsize


def _describe_array(x: Any, storages: Storages) -> Recipe:
    """An array of numpy over a storage, so that a tensor over the same memory stays tied to it."""
    low, high = _bounds(x)
    if high - low > 2 * x.nbytes:
        # with wide gaps: what lies in them is not the array's
        x = x.copy(order="K")
        low, high = _bounds(x)
    if high == low:
        number = storages.number(torch.UntypedStorage(0), 0, 0)
        return ("array", number, x.dtype, x.shape, x.strides, 0, x.flags.writeable)
    bytes_of_it = (ctypes.c_char * (high - low)).from_address(low)
    storages.alive += [x, bytes_of_it]
    storage = torch.frombuffer(bytes_of_it, dtype=torch.uint8).untyped_storage()
    number = storages.number(storage, 0, high - low)
    offset = x.__array_interface__["data"][0] - low
    return ("array", number, x.dtype, x.shape, x.strides, offset, x.flags.writeable)


_SPARSE: Final = frozenset(
    {torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}
)


def parts_of(x: torch.Tensor) -> list[torch.Tensor]:
    """The strided tensors that a tensor without inner tensors consists of; itself if it is one."""
    if x.is_nested:
        return [torch.ops.aten.values(x)]
    if x.layout is torch.sparse_coo:
        return [x._indices(), x._values()]
    if x.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [x.crow_indices(), x.col_indices(), x.values()]
    if x.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [x.ccol_indices(), x.row_indices(), x.values()]
    return [x]


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
    # such a tensor cannot be over another storage than its own
    packed = dtype in _PACKED
    if len(quantizer) == 2:
        made = torch._empty_affine_quantized(
            shape, scale=quantizer[0], zero_point=quantizer[1], dtype=dtype, device=base.device
        )
    else:
        scales, zeros, axis = make(quantizer[0], storage), make(quantizer[1], storage), quantizer[2]
        made = torch._empty_per_channel_affine_quantized(
            shape, scales=scales, zero_points=zeros, axis=axis, dtype=dtype, device=base.device
        )
    if packed:
        inside = made.untyped_storage()
        taken = torch.empty(0, dtype=torch.uint8, device=base.device).set_(base)
        torch.empty(0, dtype=torch.uint8, device=base.device).set_(inside).copy_(
            taken[: inside.nbytes()]
        )
        return _finished(made, flags)
    return _finished(made.set_(base, offset, shape, stride), flags)


def _make_array(recipe: Recipe, storage: Storage) -> Any:
    _, number, dtype, shape, strides, offset, writeable = recipe
    held = torch.empty(0, dtype=torch.uint8).set_(storage(number)).numpy()
    made = numpy.ndarray(shape, dtype, buffer=held, offset=offset, strides=strides)
    made.flags.writeable = writeable
    return made


_MAKERS: Final = {
    "whole": _make_whole,
    "strided": _make_strided,
    "nested": _make_nested,
    "sparse": _make_sparse,
    "meta": _make_meta,
    "quantized": _make_quantized,
    "array": _make_array,
}


def make(recipe: Recipe, storage: Storage) -> torch.Tensor:
    """The tensor of a recipe, over the storages that `storage` answers with by number."""
    return _MAKERS[recipe[0]](recipe, storage)


def moved(recipe: Recipe, shifts: Sequence[Callable[[int], int] | None]) -> Recipe:
    """The recipe over storages of which only touched ranges are kept: offsets in bytes change."""
    if recipe[0] in ("whole", "array"):
        return recipe
    if recipe[0] == "strided":
        kind, number, dtype, offset, shape, stride, flags = recipe
        shift = shifts[number]
        if shift is None:
            return recipe
        size = dtype.itemsize
        return (kind, number, dtype, max(0, shift(offset * size)) // size, shape, stride, flags)
    return tuple(_moved_part(part, shifts) for part in recipe)


def _moved_part(part: Any, shifts: Sequence[Callable[[int], int] | None]) -> Any:
    if not isinstance(part, tuple) or not part:
        return part
    if isinstance(part[0], str) and part[0] in _MAKERS:
        return moved(part, shifts)
    return tuple(_moved_part(inner, shifts) for inner in part)
