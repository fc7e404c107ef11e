"""The storage inside a plain pickle of a tensor: a torch.save stream of the old form in a string of
bytes.

    magic number, protocol version, system    three pickles, the same in every stream that one
    program wrote the storage's persistent id, its keys     two pickles
    int64 count of elements, their bytes

A state holds one stream for each tensor and a checkpoint thousands of states, so the three that
never change are read once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..source.pickle.decoding import STORAGES, ContradictionError
from ..source.pickle.limits import EXTRA_STATE
from ..source.pickle.machine import read_pickle
from ..source.pickle.nodes import Dict, Global, Persistent
from ..source.pickle.tree import ITEMSIZE

MAGIC, PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
MOST_HEADS = 16


class StoredState(NamedTuple):
    """A storage's persistent id, its bytes, and the stream that they end."""

    node: Persistent
    data: memoryview
    stream: bytes


class Heads:
    """The beginnings of streams that were read and found sound."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: list[bytes] = []

    def end(self, data: bytes, name: str) -> int:
        """The offset behind the three pickles that every stream begins with."""
        for head in self._known:
            if data.startswith(head):
                return len(head)
        window = data[:4096]
        magic, at = read_pickle(window, EXTRA_STATE, name=f"{name}: magic number", whole=False)
        protocol, at = read_pickle(
            window, EXTRA_STATE, name=f"{name}: protocol version", start=at, whole=False
        )
        system, end = read_pickle(
            window, EXTRA_STATE, name=f"{name}: system", start=at, whole=False
        )
        if (
            type(magic) is not int
            or magic != MAGIC
            or type(protocol) is not int
            or protocol != PROTOCOL
        ):
            raise ContradictionError(
                "a storage whose stream does not begin as torch.save begins it"
            )
        if type(system) is not Dict or system.get("little_endian") is not True:
            raise ContradictionError("a storage that was not written by a little-endian machine")
        if len(self._known) < MOST_HEADS:
            self._known.append(data[:end])
        return int(end)


HEADS = Heads()


def stored(data: bytes, name: str, heads: Heads = HEADS) -> StoredState:
    """The one storage of a stream, all bytes accounted for. ContradictionError for another content,
    M93x from the machine.
    """
    at = heads.end(data, name)
    # what stands in front of the numbers is short, and the machine copies what it reads
    window = data[at : at + 4096]
    node, end = read_pickle(window, EXTRA_STATE, name=name, whole=False, persistent=True)
    keys, end = read_pickle(window, EXTRA_STATE, name=f"{name}: keys", start=end, whole=False)
    at += end
    numel, itemsize, key = _described(node)
    if type(keys) is not list or len(keys) != 1 or type(keys[0]) is not str or keys[0] != key:
        raise ContradictionError("a storage under another key than it is listed with")
    if (
        len(data) < at + 8
        or int.from_bytes(data[at : at + 8], "little") != numel
        or len(data) - at - 8 != numel * itemsize
    ):
        raise ContradictionError(
            f"a storage of {numel:,} elements with {max(0, len(data) - at - 8):,} bytes"
        )
    return StoredState(node, memoryview(data)[at + 8 :], data)


def _described(node: Any) -> tuple[int, int, str]:
    """The number of elements, the size of one and the key of a persistent id."""
    identity = node.id if type(node) is Persistent else None
    if type(identity) is not tuple or len(identity) not in (5, 6) or identity[0] != "storage":
        raise ContradictionError("a stream of torch.save that holds something other than a storage")
    _, cls, key, _, numel = identity[:5]
    if (
        type(cls) is not Global
        or (cls.module, cls.name) not in STORAGES
        or type(key) is not str
        or type(numel) is not int
    ):
        raise ContradictionError("a storage whose class, key or size is of another type")
    dtype = STORAGES[cls.module, cls.name]
    if not 0 <= numel < 1 << 40:
        raise ContradictionError("a storage of an impossible size")
    return numel, 1 if dtype is None else ITEMSIZE[dtype], key
