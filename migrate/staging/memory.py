"""The memory of snapshots: whole pages, lent by reference, back when nothing refers to them.

A block is mapped by ourselves, never taken from malloc or from torch's allocators: its pages belong
to nobody else, so that they can be registered for a GPU once and for life, shared with a process
through a descriptor, and given back to the system at once. What borrows a block holds a memoryview
of it; torch tensors made by `torch.frombuffer` keep that view alive. Its end gives the block back,
whoever held it last and wherever it went, so no promise of a caller is needed and no snapshot in
use is ever overwritten.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ..core.errors import Diagnostic, RunError

PAGE: Final = mmap.PAGESIZE
# large enough that a huge page is worth asking for
_HUGE: Final = 2 << 20
# how many stages may pass without a block before its memory goes back to the system
_IDLE: Final = 2


def pages(size: int) -> int:
    """`size` rounded up to whole pages, one at least."""
    return max(PAGE, -(-size // PAGE) * PAGE)


@dataclass(frozen=True, slots=True)
class Want:
    """A block that a stage asks for: its bytes, and the address of what will be copied into it.

    The address is a hint: the block that had the same source before is preferred.
    """

    size: int
    source: int = 0


class MappedBlock:
    """Mapped pages of one size; free, or lent to whatever holds the view of the last `lend`."""

    __slots__ = (
        "__weakref__",
        "_unregister",
        "address",
        "descriptor",
        "given",
        "handle",
        "idle",
        "lent",
        "memory",
        "owner",
        "size",
        "source",
    )

    def __init__(self, size: int, *, shared: bool = False, descriptor: int = -1) -> None:
        """Maps `size` bytes, whole pages; `descriptor`: those that another process has sent, which
        is the block's from then on. OSError if there is no memory for them.
        """
        self.size = size
        if shared:
            descriptor = os.memfd_create("migrate-staging", os.MFD_CLOEXEC)
        if descriptor >= 0:
            try:
                if shared:
                    # reserved now: a page that cannot be had later would be SIGBUS, not an error
                    os.posix_fallocate(descriptor, 0, size)
                self.memory = mmap.mmap(descriptor, size, mmap.MAP_SHARED)
            except BaseException:
                os.close(descriptor)
                raise
            weakref.finalize(self, os.close, descriptor).atexit = False
        else:
            self.memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if size >= _HUGE:
                self.memory.madvise(mmap.MADV_HUGEPAGE)
        self.descriptor = descriptor
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self._unregister: Callable[[], object] | None = None
        # another process may have it
        self.given = False
        # a weak reference to what stands for the block in messages to other processes
        self.handle: Any = None
        self.lent = False
        self.idle = 0
        self.owner = 0
        self.source = 0
        if descriptor >= 0:
            _SHARED[self.address] = self

    def lend(self) -> memoryview:
        """A writable view of the bytes. The block is free again when nothing holds the view."""
        self.lent = True
        view = memoryview(self.memory)
        weakref.finalize(view, self._returned).atexit = False
        return view

    def _returned(self) -> None:
        self.lent = False

    def pin(self) -> None:
        """Registers the pages for copies of the GPU, until they are unmapped or the process ends.

        OSError with the driver's number.
        """
        import torch

        status = int(torch.cuda.cudart().cudaHostRegister(self.address, self.size, 1))
        if status:
            raise OSError(
                status, f"cudaHostRegister of {self.size} bytes answers cudaError {status}"
            )
        self._unregister = weakref.finalize(self, _unregister, self.address, os.getpid())

    def give(self) -> int:
        """A descriptor of the pages for another process. This one writes them again only when
        every copy of the descriptor is closed and every mapping of it gone, so that what the other
        sees stays, and a process that was killed keeps nothing.
        """
        # opened anew: the lock belongs to what was opened, wherever it is sent, and ends with it
        sent = os.open(f"/proc/self/fd/{self.descriptor}", os.O_RDWR | os.O_CLOEXEC)
        fcntl.flock(sent, fcntl.LOCK_SH)
        self.given = True
        return sent

    def free(self) -> bool:
        """Whether nothing holds the block, neither here nor in a process that it was given to."""
        if self.lent:
            return False
        if self.given:
            try:
                fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            fcntl.flock(self.descriptor, fcntl.LOCK_UN)
            self.given = False
        return True

    def unmap(self) -> bool:
        """Gives the pages back to the system; False if something still looks at them.

        Pages that another process has stay as long as it holds them.
        """
        if self._unregister is not None:
            self._unregister()
            self._unregister = None
        try:
            self.memory.close()
        except BufferError:
            return False
        return True


_SHARED: Final[weakref.WeakValueDictionary[int, MappedBlock]] = weakref.WeakValueDictionary()


def shared_at(address: int) -> MappedBlock | None:
    """The shared block that an address lies in."""
    for reference in _SHARED.valuerefs():
        block = reference()
        if block is not None and block.address <= address < block.address + block.size:
            return block
    return None


def _unregister(address: int, process: int) -> None:
    """Ends what `pin` began, quietly: a context that is gone has no registration left."""
    if os.getpid() != process:
        return
    import torch

    with contextlib.suppress(Exception):
        torch.cuda.cudart().cudaHostUnregister(address)


class BlockPool:
    """The blocks of one stager. All methods may be called by several threads."""

    def __init__(
        self, *, shared: bool = False, pinned: bool = False, limit: int | None = None
    ) -> None:
        """`limit` is the largest sum of mapped bytes, lent and free ones together."""
        self.shared = shared
        self.pinned = pinned
        self.limit = limit
        self._blocks: list[MappedBlock] = []
        self._lock = threading.Lock()
        self._stages = 0

    @property
    def nbytes(self) -> int:
        """The bytes that are mapped, lent ones and free ones."""
        return sum(block.size for block in list(self._blocks))

    def borrow(self, wanted: Sequence[Want]) -> tuple[list[memoryview], list[int]]:
        """A block for each of `wanted`, all or none: views that keep them, and their addresses.

        Blocks that were used for the same source come first, then any of the size, then new ones.
        What neither this stage nor the one before used is given back to the system.

        Raises:
            RunError: M919 if the limit or the system's memory does not suffice; nothing is taken.
        """
        with self._lock:
            blocks = self._matching(wanted)
            taken = [block for block in blocks if block is not None]
            sizes = [pages(want.size) for want in wanted]
            new = [size for size, block in zip(sizes, blocks, strict=True) if block is None]
            self._make_room(sum(new), taken)
            fresh = self._fresh(new, taken)
            self._blocks += fresh
            self._stages += 1
            coming = iter(fresh)
            found = [next(coming) if block is None else block for block in blocks]
            views = []
            for want, block in zip(wanted, found, strict=True):
                block.idle, block.owner, block.source = 0, self._stages, want.source
                views.append(block.lend())
            self._retire()
            return views, [block.address for block in found]

    def trim(self) -> None:
        """Gives every block that is not lent back to the system."""
        with self._lock:
            self._drop(lambda block: True)

    def _matching(self, wanted: Sequence[Want]) -> list[MappedBlock | None]:
        """A free block for each of `wanted` that there is one for."""
        free: dict[int, dict[int, MappedBlock]] = {}
        by_source: dict[tuple[int, int], MappedBlock] = {}
        for block in self._blocks:
            if block.free():
                free.setdefault(block.size, {})[id(block)] = block
                by_source[block.size, block.source] = block
        found: list[MappedBlock | None] = [None] * len(wanted)
        for at, want in enumerate(wanted):
            key = pages(want.size), want.source
            if key in by_source:
                block = by_source.pop(key)
                found[at] = free[block.size].pop(id(block))
        for at, want in enumerate(wanted):
            rest = free.get(pages(want.size))
            if found[at] is None and rest:
                found[at] = rest.popitem()[1]
        return found

    def _make_room(self, new: int, taken: Sequence[MappedBlock]) -> None:
        """Unmaps what is free if `new` bytes would go beyond the limit, M919 if too little."""
        if self.limit is None or not new or self.nbytes + new <= self.limit:
            return
        self._drop_all_but(taken)
        if self.nbytes + new <= self.limit:
            return
        needed = new + sum(block.size for block in taken)
        used = self.nbytes - sum(block.size for block in taken)
        raise self._refusal(
            f"a snapshot of {needed} bytes does not fit: `max_memory` is {self.limit} bytes, of "
            f"which {used} are in use",
            "release a snapshot, and tensors that were taken out of one, or raise `max_memory`",
        )

    def _fresh(self, sizes: Sequence[int], taken: Sequence[MappedBlock]) -> list[MappedBlock]:
        """New blocks of these sizes, all or none; M919 if the system has no memory for them."""
        try:
            return self._mapped(sizes)
        except OSError:
            # what lies idle may be what is missing
            self._drop_all_but(taken)
        try:
            return self._mapped(sizes)
        except OSError as error:
            raise self._refusal(
                f"the system has no memory for a snapshot, which needs {sum(sizes)} bytes more: "
                f"{error.strerror}",
                "release snapshots that are no longer needed",
            ) from None

    def _mapped(self, sizes: Sequence[int]) -> list[MappedBlock]:
        fresh: list[MappedBlock] = []
        try:
            for size in sizes:
                fresh.append(MappedBlock(size, shared=self.shared))
                if self.pinned:
                    fresh[-1].pin()
        except BaseException:
            for block in fresh:
                block.unmap()
            raise
        return fresh

    def _refusal(self, message: str, help: str) -> RunError:
        owners: dict[int, int] = {}
        for block in self._blocks:
            if block.lent:
                owners[block.owner] = owners.get(block.owner, 0) + block.size
        notes = [f"snapshot {n} holds {size} bytes" for n, size in sorted(owners.items())]
        return RunError([Diagnostic("M919", message, notes=tuple(notes), help=help)])

    def _retire(self) -> None:
        """Counts a stage for each free block, and unmaps those that enough of them did not use."""
        for block in self._blocks:
            if not block.lent:
                block.idle += 1
        self._drop(lambda block: block.idle >= _IDLE)

    def _drop_all_but(self, kept: Sequence[MappedBlock]) -> None:
        ids = set(map(id, kept))
        self._drop(lambda block: id(block) not in ids)

    def _drop(self, which: Callable[[MappedBlock], bool]) -> None:
        self._blocks = [b for b in self._blocks if b.lent or not which(b) or not b.unmap()]


def has_gpu() -> bool:
    """Whether there is a GPU to pin memory for; a warning says what happens without one."""
    import torch

    if torch.cuda.is_available():
        return True
    warnings.warn(
        "`pin_memory` has no effect: torch sees no GPU here, so snapshots lie in ordinary memory",
        stacklevel=3,
    )
    return False
