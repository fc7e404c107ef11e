"""The memory of snapshots: whole pages, lent by reference, back when nothing refers to them.

A block is mapped by ourselves, never taken from malloc or from torch's allocators: its pages belong
to nobody else, so that they can be registered for a GPU once and for life, shared with a process
through a descriptor, and given back to the system at once. What borrows a block holds a memoryview
of it; torch tensors made by `torch.frombuffer` keep that view alive. Its end gives the block back,
whoever held it last and wherever it went, so no promise of a caller is needed and no snapshot in
use is ever overwritten.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

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
        "address",
        "descriptor",
        "given",
        "idle",
        "lent",
        "memory",
        "owner",
        "pinned",
        "size",
    )

    def __init__(self, size: int, *, shared: bool) -> None:
        """Maps `size` bytes, whole pages. OSError if there is no memory for them."""
        self.size = size
        self.descriptor = -1
        if shared:
            self.descriptor = os.memfd_create("migrate-staging", os.MFD_CLOEXEC)
            try:
                # reserved now: a page that cannot be had later would be SIGBUS, not an error
                os.posix_fallocate(self.descriptor, 0, size)
                self.memory = mmap.mmap(self.descriptor, size, mmap.MAP_SHARED)
            except BaseException:
                os.close(self.descriptor)
                raise
        else:
            self.memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if size >= _HUGE:
                self.memory.madvise(mmap.MADV_HUGEPAGE)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.pinned = False
        # another process has it: its pages are never written again by this one
        self.given = False
        self.lent = False
        self.idle = 0
        self.owner = 0

    def lend(self) -> memoryview:
        """A writable view of the bytes. The block is free again when nothing holds the view."""
        self.lent = True
        view = memoryview(self.memory)
        weakref.finalize(view, self._returned).atexit = False
        return view

    def _returned(self) -> None:
        self.lent = False

    def pin(self) -> None:
        """Registers the pages for copies of the GPU; RuntimeError with the driver's number."""
        import torch

        status = torch.cuda.cudart().cudaHostRegister(self.address, self.size, 1)
        if int(status):
            raise RuntimeError(f"cudaHostRegister of {self.size} bytes answers {int(status)}")
        self.pinned = True

    def unmap(self) -> bool:
        """Gives the pages back to the system; False if something still looks at them."""
        if self.pinned:
            import torch

            # a context that has been torn down has no registration left to remove
            torch.cuda.cudart().cudaHostUnregister(self.address)
            self.pinned = False
        try:
            self.memory.close()
        except BufferError:
            return False
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
        return True


class BlockPool:
    """The blocks of one stager. All methods may be called by several threads."""

    def __init__(
        self, *, shared: bool = False, pinned: bool = False, limit: int | None = None
    ) -> None:
        """`limit` is the largest sum of mapped bytes, lent and free ones together."""
        self.shared = shared
        self.pinned = pinned and _has_cuda()
        self.limit = limit
        self._blocks: list[MappedBlock] = []
        self._sources: dict[int, MappedBlock] = {}
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
            self._stages += 1
            blocks = self._matching(wanted)
            missing = [at for at, block in enumerate(blocks) if block is None]
            new = sum(pages(wanted[at].size) for at in missing)
            taken = [block for block in blocks if block is not None]
            self._make_room(new, taken)
            fresh: list[MappedBlock] = []
            try:
                for at in missing:
                    blocks[at] = block = MappedBlock(pages(wanted[at].size), shared=self.shared)
                    fresh.append(block)
                    if self.pinned:
                        block.pin()
            except OSError as error:
                for block in fresh:
                    block.unmap()
                raise RunError(
                    [
                        Diagnostic(
                            "M919",
                            "the system has no memory for a snapshot, which needs "
                            f"{new} bytes more: {error.strerror}",
                            notes=self._held(),
                            help="release snapshots that are no longer needed",
                        )
                    ]
                ) from None
            self._blocks += fresh
            found = [*filter(None, blocks)]
            self._sources = {w.source: b for w, b in zip(wanted, found, strict=True)}
            views = []
            for block in found:
                block.idle, block.owner = 0, self._stages
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
        for block in self._blocks:
            if not block.lent and not block.given:
                free.setdefault(block.size, {})[id(block)] = block
        found: list[MappedBlock | None] = [None] * len(wanted)
        for at, want in enumerate(wanted):
            before = self._sources.get(want.source)
            if before is not None:
                found[at] = free.get(pages(want.size), {}).pop(id(before), None)
        for at, want in enumerate(wanted):
            rest = free.get(pages(want.size))
            if found[at] is None and rest:
                found[at] = rest.popitem()[1]
        return found

    def _make_room(self, new: int, taken: Sequence[MappedBlock]) -> None:
        """Unmaps what is free where `new` bytes go beyond the limit; M919 if it does not help."""
        if self.limit is None or not new or self.nbytes + new <= self.limit:
            return
        kept = set(map(id, taken))
        self._drop(lambda block: id(block) not in kept)
        if self.nbytes + new <= self.limit:
            return
        needed = new + sum(block.size for block in taken)
        used = sum(block.size for block in self._blocks if block.lent)
        raise RunError(
            [
                Diagnostic(
                    "M919",
                    f"a snapshot of {needed} bytes does not fit: `max_memory` is {self.limit} "
                    f"bytes, of which {used} are in use",
                    notes=self._held(),
                    help="release a snapshot and tensors taken out of one, or raise `max_memory`",
                )
            ]
        )

    def _held(self) -> tuple[str, ...]:
        owners: dict[int, int] = {}
        for block in self._blocks:
            if block.lent:
                owners[block.owner] = owners.get(block.owner, 0) + block.size
        return tuple(f"snapshot {n} holds {size} bytes" for n, size in sorted(owners.items()))

    def _retire(self) -> None:
        """Counts a stage for each free block, and unmaps those that enough of them did not use."""
        for block in self._blocks:
            if not block.lent:
                block.idle += 1
        self._drop(lambda block: block.idle >= _IDLE or block.given)

    def _drop(self, which: Callable[[MappedBlock], bool]) -> None:
        self._blocks = [b for b in self._blocks if b.lent or not which(b) or not b.unmap()]
        known = set(map(id, self._blocks))
        self._sources = {source: b for source, b in self._sources.items() if id(b) in known}


def _has_cuda() -> bool:
    import torch

    if torch.cuda.is_available():
        return True
    warnings.warn(
        "`pin_memory` has no effect: torch sees no GPU here, so snapshots lie in ordinary memory",
        stacklevel=4,
    )
    return False
