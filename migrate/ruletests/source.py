"""The tensors that a test of a rule file writes down, as a checkpoint: an index and bytes, without
torch and without a file.

Bytes are made when they are first read, so a test that looks at headers only never makes any.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from ..core.elements import code, pack
from ..core.spec import BITS, Spec, spec
from ..rules.examples import GivenTensor, expand, flat, shape_of
from ..source.blobs import Blob, Stored
from ..source.index import Index, SideFile


class GivenBlob:
    """The packed bytes of one tensor."""

    __slots__ = ("_bytes", "_make", "name", "size")
    identity = None

    def __init__(self, name: str, size: int, make: Callable[[], bytes | memoryview]) -> None:
        self.name, self.size, self._make = name, size, make
        self._bytes: bytes | memoryview | None = None

    def fileno(self) -> int | None:
        return None

    def hold(self) -> AbstractContextManager[None]:
        return nullcontext()

    def readinto(self, offset: int, buffer: memoryview) -> None:
        if self._bytes is None:
            self._bytes = self._make()
        view = memoryview(buffer).cast("B")
        view[:] = memoryview(self._bytes)[offset : offset + view.nbytes]


class GivenSource:
    """A Source over tensors that are written down or were made a moment ago."""

    path = "<given>"
    format = "given"
    history: bytes | None = None

    def __init__(
        self,
        tensors: Mapping[str, tuple[Spec, Callable[[], bytes | memoryview]]],
        side: Mapping[str, bytes],
    ) -> None:
        stored = {
            key: Stored(of, number, 0) for number, (key, (of, _)) in enumerate(tensors.items())
        }
        files = tuple(SideFile(name, len(content)) for name, content in side.items())
        self.index = Index(stored, tuple(tensors), side_files=files)
        self.blobs: Sequence[Blob] = tuple(
            GivenBlob(key, of.nbytes, make) for key, (of, make) in tensors.items()
        )
        self.sides = dict(side)

    def side_file(self, path: str) -> bytes:
        return self.sides[path]

    def read_tensor(self, key: str) -> bytes:
        """All bytes of a tensor."""
        out = bytearray(self.index.tensors[key].spec.nbytes)
        self.blobs[self.index.tensors[key].blob].readinto(0, memoryview(out))
        return bytes(out)

    def identities(self) -> None:
        """Nothing that could tell these bytes from others in another process."""

    def check_unchanged(self) -> None:
        """Nothing: what is written down does not change."""

    def close(self) -> None:
        """Nothing is open."""


def given_source(
    tensors: Mapping[str, GivenTensor], side: Mapping[str, Any], *, scrambled: bool = False
) -> GivenSource:
    """The tensors of a test. `scrambled`: bytes that differ from key to key and from element to
    element, in place of what is written.
    """
    found: dict[str, tuple[Spec, Callable[[], bytes | memoryview]]] = {}
    for written, tensor in tensors.items():
        of = spec(tensor.dtype, shape_of(tensor.values) if tensor.shape is None else tensor.shape)
        for key, _ in expand(written):
            found[key] = (of, _scrambler(key, of) if scrambled else _maker(tensor, of))
    return GivenSource(found, {name: side_bytes(content) for name, content in side.items()})


def made_source(
    specs: Mapping[str, Spec], read: Callable[[str], memoryview], side: Mapping[str, bytes]
) -> GivenSource:
    """What a run makes, as a checkpoint to be read again; `read` gives the bytes of a key when they
    are asked for.
    """
    return GivenSource({key: (of, partial(read, key)) for key, of in specs.items()}, side)


def side_bytes(content: Any) -> bytes:
    """A side file: text as it is, anything else as JSON."""
    return (content if isinstance(content, str) else json.dumps(content, indent=2) + "\n").encode()


def elements(of: Spec, fill: Any, values: Any) -> bytes:
    """The packed bytes of `values`, or of `fill` (a number or `iota`); ValueError for a number that
    the dtype cannot hold.
    """
    if values is not None:
        return packed(of.dtype, flat(values))
    if fill == "iota":
        return packed(of.dtype, range(of.numel))
    one = code(of.dtype, 0 if fill is None else fill)
    return (
        pack(of.dtype, [one]) * of.numel
        if BITS[of.dtype] >= 8
        else pack(of.dtype, [one] * of.numel)
    )


def packed(dtype: str, numbers: Iterable[Any]) -> bytes:
    """The packed bytes of numbers; ValueError for one that the dtype cannot hold."""
    return pack(dtype, (code(dtype, number) for number in numbers))


def _maker(tensor: GivenTensor, of: Spec) -> Callable[[], bytes]:
    return lambda: elements(of, tensor.fill, tensor.values)


def _scrambler(key: str, of: Spec) -> Callable[[], bytes]:
    def make() -> bytes:
        nbytes, spare = of.nbytes, -of.numel * BITS[of.dtype] % 8
        seed = hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
        blocks = (
            hashlib.blake2b(seed + n.to_bytes(8, "little")).digest()
            for n in range(-(-nbytes // 64))
        )
        out = bytearray(b"".join(blocks)[:nbytes])
        if spare:
            # below a byte the last one may hold less than it could, and what it does not hold is
            # zero
            out[-1] &= 0xFF >> spare
        return bytes(out)

    return make


def first_unstorable(tensors: Mapping[str, GivenTensor]) -> tuple[str, str] | None:
    """(key as written, why) of the first tensor whose numbers its dtype cannot hold; None if there
    is none.
    """
    for written, tensor in tensors.items():
        of = spec(tensor.dtype, shape_of(tensor.values) if tensor.shape is None else tensor.shape)
        try:
            require_held(of, tensor.fill, tensor.values)
        except ValueError as error:
            return written, str(error)
    return None


def require_held(of: Spec, fill: Any, values: Any) -> None:
    """ValueError for a number that the dtype cannot hold, without making the tensor."""
    if values is not None:
        packed(of.dtype, flat(values))
    elif fill == "iota":
        # a float that holds an odd number holds all below it
        packed(of.dtype, range(max(0, of.numel - 2), of.numel))
    else:
        code(of.dtype, 0 if fill is None else fill)


__all__ = [
    "GivenSource",
    "elements",
    "first_unstorable",
    "given_source",
    "made_source",
    "packed",
    "require_held",
    "side_bytes",
]
