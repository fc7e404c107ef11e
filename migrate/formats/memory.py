"""A state dict in memory as a Source, and new tensors as a place to write to.

`live` migrates what a training process holds without a file between. A tensor is described by its
strides in its storage, so views, transposes and ties stay what they are and nothing is copied when
it is opened. What cannot be described that way (sparse, quantized, meta, subclasses, lazy
conjugation) is refused by name: turning it into a plain tensor silently would change what the state
dict holds. A caller that hands objects on as they are, or only looks at names and shapes, asks for
wrappers and meta tensors too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..core.errors import Report, fail, listed, printable
from ..core.spec import ALIASES, BITS, PACKED, Spec, spec
from ..elements.raw import is_dtensor, is_plain_class
from ..source.blobs import Blob, FilelessBlob, Stored
from ..source.index import Index, SideFile

# nothing on disk is in this format
FORMAT = None


class MemoryBlob(FilelessBlob):
    """The bytes of one storage. Those of another device are copied to the CPU range by range."""

    __slots__ = ("_bytes", "_storage", "name", "size")

    def __init__(self, name: str, content: Any, storage: Any = None) -> None:
        """`content` is a flat uint8 array of numpy, or None and `storage` is torch's."""
        self.name, self._bytes, self._storage = name, content, storage
        self.size = int(content.nbytes if storage is None else storage.nbytes())

    def readinto(self, offset: int, buffer: memoryview) -> None:
        """Fills `buffer` from `offset`; M905 if the storage was resized meanwhile."""
        import numpy as np

        end = offset + buffer.nbytes
        if end > self.size or (self._storage is not None and self._storage.nbytes() < self.size):
            fail(
                "M905",
                f"{self.name}: the storage no longer has its {self.size} bytes, {end} are needed",
            )
        if self._storage is not None:
            import torch

            if self._bytes is None:
                self._bytes = _flat(self._storage)
            if buffer.nbytes:
                # numpy's view of a storage would forbid the caller to resize it ever after
                torch.frombuffer(buffer, dtype=torch.uint8).copy_(self._bytes[offset:end])
        else:
            np.frombuffer(buffer, np.uint8)[:] = self._bytes[offset:end]


class ObjectBlob(FilelessBlob):
    """The elements of a tensor that is more than its bytes, or has none: made when they are read,
    and kept for one reading on.

    A wrapper is copied into a plain tensor of its dtype. M916 for the meta device.
    """

    __slots__ = ("_made", "_value", "name", "size")

    def __init__(self, name: str, value: Any, size: int) -> None:
        self.name, self.size, self._value = name, size, value
        self._made: Any = None

    def readinto(self, offset: int, buffer: memoryview) -> None:
        import numpy as np
        import torch

        if self._made is None:
            if self._value.is_meta:
                fail("M916", f"{printable(self.name)} is on the meta device and holds no bytes")
            try:
                with torch.no_grad():
                    plain = torch.empty(
                        self._value.shape, dtype=self._value.dtype, device=self._value.device
                    ).copy_(self._value)
            except (RuntimeError, NotImplementedError, TypeError) as error:
                name = printable(type(self._value).__qualname__)
                fail(
                    "M916",
                    f"{printable(self.name)}: a {name} does not give its elements to a plain "
                    f"tensor: {printable(str(error), 200)}",
                )
            self._made = _flat(plain.cpu().untyped_storage()).numpy()
        np.frombuffer(buffer, np.uint8)[:] = self._made[offset : offset + buffer.nbytes]
        if offset + buffer.nbytes >= self.size:
            self._made = None


def _flat(storage: Any) -> Any:
    import torch

    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class MemorySource:
    """A Source over a state dict. It holds the tensors; closing it lets them go.

    `values` are the caller's own objects by key. `converted`: keys of wrappers whose elements are
    another number format, so that reading them changes what is held.
    """

    path = "<memory>"
    format = "memory"
    history: bytes | None = None

    def __init__(
        self, index: Index, blobs: Sequence[Blob], sides: Mapping[str, bytes] | None = None
    ) -> None:
        self.index, self.blobs, self._sides = index, blobs, dict(sides or {})
        self.values: Mapping[str, Any] = {}
        self.converted: frozenset[str] = frozenset()

    def side_file(self, path: str) -> bytes:
        return self._sides[path]

    def identities(self) -> None:
        """Nothing that could tell these bytes from others in another process."""

    def check_unchanged(self) -> None:
        """Nothing: memory has no record of change. The caller does not train while it migrates."""

    def close(self) -> None:
        self.blobs, self.values = (), {}


def open(  # noqa: A001 - memory.open reads well
    state: Mapping[Any, Any],
    *,
    meta: bool = False,
    wrapped: bool = False,
    sides: Mapping[str, bytes] | None = None,
) -> MemorySource:
    """The tensors and arrays of a flat state dict as a Source; all other values are its `items`,
    `sides` its side files.

    Tensors of one storage share a blob and have equal `storage`. M916 naming every tensor that
    cannot be described, and every key that is not text. `meta` takes tensors without bytes,
    `wrapped` subclasses, too.
    """
    tensors: dict[str, Stored] = {}
    items: dict[str, Any] = {}
    blobs: list[Blob] = []
    numbers: dict[Any, int] = {}
    unfit: dict[str, list[str]] = {}
    unnamed: list[str] = []
    converted: list[str] = []
    for key, value in state.items():
        if not isinstance(key, str):
            unnamed.append(repr(key))
            continue
        if is_tensor(value):
            if (wrapped and not is_plain_class(value)) or (meta and value.is_meta):
                found = _object(key, value, blobs)
                if not (is_plain_class(value) or isinstance(found, str) or dense(value)):
                    converted.append(key)
            else:
                found = _torch_tensor(key, value, blobs, numbers)
        elif _is_array(value):
            found = _numpy_array(key, value, blobs, numbers)
        else:
            items[key] = value
            continue
        if isinstance(found, str):
            unfit.setdefault(found, []).append(key)
        else:
            tensors[key] = found
    report = Report()
    if unnamed:
        report.add(
            "M916",
            f"the keys of a state dict are text, not {listed(unnamed)}",
            help="turn these keys into strings first",
        )
    for why, keys in unfit.items():
        report.add(
            "M916", f"{why}: {listed(keys)}", help="turn them into plain dense tensors first"
        )
    report.check()
    files = tuple(SideFile(path, len(content)) for path, content in (sides or {}).items())
    index = Index(
        tensors, tuple(b.name for b in blobs), files, items=items, module_versions=_versions(state)
    )
    source = MemorySource(index, tuple(blobs), sides)
    source.values, source.converted = {key: state[key] for key in tensors}, frozenset(converted)
    return source


def _versions(state: Mapping[Any, Any]) -> dict[str, int] | None:
    """What the `_metadata` of a module's state dict says."""
    metadata = getattr(state, "_metadata", None)
    if not isinstance(metadata, Mapping):
        return None
    said = {
        name: entry.get("version") for name, entry in metadata.items() if isinstance(entry, Mapping)
    }
    return {
        name: version
        for name, version in said.items()
        if isinstance(name, str) and isinstance(version, int)
    }


def is_tensor(value: Any) -> bool:
    """Whether it is a torch tensor, of whatever subclass."""
    # a tensor's class tells it without an import of torch: a dict of arrays must not cost a second
    return any(c.__module__ == "torch" and c.__name__ == "Tensor" for c in type(value).__mro__)


def dense(value: Any) -> bool:
    """Whether a wrapper merely holds its elements: in one tensor like itself, or as a DTensor."""
    if is_dtensor(value):
        return True
    held = vars(value).values() if hasattr(value, "__dict__") else ()
    return any(is_tensor(v) and v.dtype == value.dtype and v.numel() == value.numel() for v in held)


def _object(key: str, value: Any, blobs: list[Blob]) -> Stored | str:
    """The tensor as something that is read by its own rules, if at all."""
    name = str(value.dtype).removeprefix("torch.")
    dtype = ALIASES.get(name, name)
    if dtype not in BITS or name == PACKED:
        return f"{printable(name)} is not a dtype that checkpoints have"
    found = spec(dtype, tuple(value.shape))
    blobs.append(ObjectBlob(key, value, found.nbytes))
    return Stored(found, len(blobs) - 1, 0)


def _is_array(value: Any) -> bool:
    return any(c.__module__ == "numpy" and c.__name__ == "ndarray" for c in type(value).__mro__)


def _torch_tensor(key: str, value: Any, blobs: list[Blob], numbers: dict[Any, int]) -> Stored | str:
    """Where the tensor lies, or why it cannot be said."""
    import torch

    if not is_plain_class(value):
        return (
            f"tensors of the class {printable(type(value).__qualname__)} hold more than their bytes"
        )
    if value.is_quantized:
        return "quantized tensors hold scales beside their bytes"
    if value.layout is not torch.strided:
        return f"tensors of the layout {value.layout} are not dense"
    if value.device.type == "meta":
        return "tensors on the meta device hold no bytes"
    if value.is_conj() or value.is_neg():
        return (
            "tensors with a pending conjugation or negation are not what their bytes say "
            "(`resolve_conj()`, `resolve_neg()`)"
        )
    name = str(value.dtype).removeprefix("torch.")
    dtype, shape, strides = ALIASES.get(name, name), tuple(value.shape), tuple(value.stride())
    if dtype not in BITS:
        return f"{printable(name)} is not a dtype that checkpoints have"
    offset = value.storage_offset() * value.itemsize
    if name == PACKED:
        if not shape or (strides[-1] != 1 and shape[-1] > 1):
            return f"tensors of {PACKED} must have their pairs beside each other"
        shape, strides = (*shape[:-1], 2 * shape[-1]), (*(2 * s for s in strides[:-1]), 1)
    storage = value.untyped_storage()
    pointer = storage.data_ptr()
    number = numbers.get((value.device, pointer)) if storage.nbytes() else None
    if number is None:
        number = len(blobs)
        blobs.append(MemoryBlob(f"{value.device}:{key}", None, storage))
        if storage.nbytes():
            numbers[value.device, pointer] = number
    return _stored(dtype, shape, strides, number, offset)


def _numpy_array(key: str, value: Any, blobs: list[Blob], numbers: dict[Any, int]) -> Stored | str:
    import numpy as np

    if type(value) not in (np.ndarray, np.memmap):
        return (
            f"arrays of the class {printable(type(value).__qualname__)} hold more than their bytes"
        )
    dtype = value.dtype.name
    if dtype not in BITS or (unpacked := value.dtype.itemsize * 8 != BITS[dtype]):
        how = " stored one to a byte" if dtype in BITS and unpacked else ""
        return f"{printable(str(value.dtype))}{how} is not a dtype that checkpoints have"
    owner = value
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    size = value.itemsize
    if not (value.dtype.isnative and owner.flags.forc) or any(
        s % size or s < 0 for s in value.strides
    ):
        # no strides of a storage say this: a copy of its own, tied to nothing
        owner = value = np.array(value, dtype=value.dtype.newbyteorder("="), order="C")
    place = ("numpy", owner.ctypes.data, owner.nbytes)
    number = numbers.get(place) if owner.nbytes else None
    if number is None:
        number = len(blobs)
        blobs.append(MemoryBlob(f"numpy:{key}", owner.ravel(order="K").view(np.uint8)))
        numbers[place] = number
    strides = tuple(s // size for s in value.strides)
    return _stored(
        dtype,
        value.shape,
        strides,
        number,
        value.ctypes.data - owner.ctypes.data if value.size else 0,
    )


def _stored(
    dtype: str, shape: tuple[int, ...], strides: tuple[int, ...], number: int, offset: int
) -> Stored:
    expected, packed = 1, True
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        packed = packed and (length == 1 or stride == expected)
        expected *= length
    if 0 in shape:
        # nothing in it is shared, wherever it points
        return Stored(spec(dtype, shape), number, 0)
    return Stored(spec(dtype, shape), number, offset, None if packed else strides, number)


def writable(tensor: Any) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, for as long as it is held. Its storage can be
    resized afterwards, as numpy forbids.
    """
    import ctypes

    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def allocate(specs: Mapping[str, Spec]) -> tuple[dict[str, Any], dict[str, memoryview]]:
    """New CPU tensors of these specs, and by key the writable bytes of each, packed row-major.

    The contents are undefined until written. M916 naming every key whose dtype torch does not have
    (the 6-bit floats) or whose 4-bit rows do not fill whole bytes.
    """
    import torch

    report = Report()
    for key, wanted in specs.items():
        if wanted.dtype == "float4_e2m1fn":
            if not hasattr(torch, PACKED) or not wanted.shape or wanted.shape[-1] % 2:
                report.add(
                    "M916",
                    f"torch cannot hold {printable(key)}: {wanted} has no rows of whole pairs",
                )
        elif not hasattr(torch, wanted.dtype):
            report.add(
                "M916",
                f"torch cannot hold {printable(key)}: it has no {wanted.dtype}",
                help="dequantize or cast it",
            )
    report.check()
    tensors: dict[str, Any] = {}
    buffers: dict[str, memoryview] = {}
    for key, wanted in specs.items():
        if wanted.dtype == "float4_e2m1fn":
            made = torch.empty(
                (*wanted.shape[:-1], wanted.shape[-1] // 2),
                dtype=getattr(torch, PACKED),
                device="cpu",
            )
        elif wanted.dtype == "complex32":
            # by way of integers: torch warns about every new tensor of this dtype
            made = (
                torch.empty((*wanted.shape, 1), dtype=torch.int32, device="cpu")
                .view(torch.complex32)
                .squeeze(-1)
            )
        else:
            made = torch.empty(wanted.shape, dtype=getattr(torch, wanted.dtype), device="cpu")
        tensors[key] = made
        flat = torch.empty(0, dtype=torch.uint8, device="cpu").set_(made.untyped_storage())
        buffers[key] = memoryview(flat.numpy())
    return tensors, buffers
