"""Shared memory of snapshots, sent to other processes as handles.

torch sends a tensor by a file of its own for each storage: thousands of descriptors, and a move of
the tensor into that file. What lies in a shared block is sent as the block's descriptor, once for a
message, and where in it the storage lies. `multiprocessing` asks by class how to send an object, so
what stands there for tensors and storages is asked first whether the memory is a block's; all
others are sent as before. `Tensor.is_shared` stays False: it knows the allocators of torch alone.
A snapshot is sent as its structure and blocks, and built again where it arrives.

A descriptor that was sent and never received stays with the sender's multiprocessing until it ends.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Callable
from multiprocessing import resource_sharer
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch

from .memory import MappedBlock, shared_at
from .snapshot import Image, Snapshot
from .streams import Arrival
from .walk import outside_of_modes

_lock = threading.Lock()
_before: dict[type, Callable[[Any], Any]] = {}


def install() -> None:
    """From now on `multiprocessing` sends what lies in shared blocks by handle."""
    with _lock:
        if _before:
            return
        known = ForkingPickler._extra_reducers  # type: ignore[attr-defined]
        for cls, reduce in (
            (torch.Tensor, _tensor),
            (torch.nn.Parameter, _tensor),
            (torch.UntypedStorage, _storage),
        ):
            _before[cls] = known[cls]
            ForkingPickler.register(cls, reduce)
        ForkingPickler.register(Snapshot, _snapshot)


def _tensor(x: torch.Tensor) -> Any:
    part = x
    if x.is_nested:
        part = torch.ops.aten.values(x)
    elif x.layout is torch.sparse_coo:
        part = x._values()
    elif x.layout is not torch.strided:
        part = x.values()
    if _block(part.untyped_storage()) is None:
        return _before[type(x)](x)
    # as torch.save takes it apart: in the end there are storages
    function, arguments, *rest = x.__reduce_ex__(4)
    if function is torch._utils._rebuild_tensor_v3:
        # dtypes without a typed storage (float8): it expects one, as torch.load would give it
        whole = torch.TypedStorage(wrap_storage=arguments[0], dtype=torch.uint8, _internal=True)
        arguments = (whole, *arguments[1:])
    return function, arguments, *rest


def _block(storage: torch.UntypedStorage) -> MappedBlock | None:
    return shared_at(storage.data_ptr()) if storage.device.type == "cpu" else None


def _storage(storage: torch.UntypedStorage) -> Any:
    block = _block(storage)
    if block is None:
        return _before[torch.UntypedStorage](storage)
    return _received_storage, (
        BlockHandle.of(block),
        storage.data_ptr() - block.address,
        storage.nbytes(),
    )


def _snapshot(snapshot: Snapshot) -> Any:
    """The structure as it was staged, over the memory as it is."""
    image, views, _ = snapshot._held()
    snapshot.wait()
    firsts = map(ctypes.c_ubyte.from_buffer, views)
    blocks = [shared_at(ctypes.addressof(first)) for first in firsts]
    handles = [BlockHandle.of(block) for block in blocks if block is not None]
    if len(handles) < len(blocks):
        return snapshot.__reduce__()
    # offsets are those in the blocks by now, whatever ranges they came from
    places = [None if place is None else place._replace(shift=None) for place in image.places]
    built_from = image.stream, image.recipes, image.references, image.users, places, image.devices
    return _received_snapshot, (handles, built_from, snapshot.nbytes)


def _received_snapshot(views: list[memoryview], built_from: Any, nbytes: int) -> Snapshot:
    with outside_of_modes():
        return Snapshot(Image(*built_from), views, nbytes, Arrival())


class BlockHandle:
    """A block on its way. A message has it once, whatever lies in the block."""

    __slots__ = ("__weakref__", "block")

    def __init__(self, block: MappedBlock) -> None:
        self.block = block

    @staticmethod
    def of(block: MappedBlock) -> BlockHandle:
        """The one handle of a block: a pickler remembers by identity what it has sent."""
        known: BlockHandle | None = None if block.handle is None else block.handle()
        if known is None:
            known = BlockHandle(block)
            block.handle = weakref.ref(known)
        return known

    def __reduce__(self) -> Any:
        sent = self.block.give()
        try:
            # not by inheritance, even when a process is being started: that copy stays open here
            return _received_block, (resource_sharer.DupFd(sent), self.block.size)
        finally:
            os.close(sent)


def _received_block(sent: Any, size: int) -> memoryview:
    """The same pages in this process, which keeps them as long as it uses them."""
    install()
    return MappedBlock(size, descriptor=sent.detach()).lend()


def _received_storage(view: memoryview, at: int, size: int) -> torch.UntypedStorage:
    return torch.frombuffer(view, dtype=torch.uint8, count=size, offset=at).untyped_storage()
