"""The values in the stream of a `.metadata` file as Python's pickler spells them, opcode by opcode:
texts and numbers, names in modules, sizes, and the properties of tensors.

Protocol 4 and 5 as CPython writes them: a value is memoised right behind its last opcode, so that
the number of a memo entry is how many were written before. Frames are taken away first, for they
end anywhere between two values.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

from .decoding import LARGEST, dtype_of
from .nodes import METADATA, Global

MODULE = "torch.distributed.checkpoint.metadata"
# by their numbers
MEMORY_FORMATS = ("TORCH_CONTIGUOUS_FORMAT", "TORCH_CHANNELS_LAST", "TORCH_PRESERVE_FORMAT")
NUMBER = rb"(?:K.|M..|J....|\x8a(?:\x04.{4}|\x05.{5}|\x06.{6}|\x07.{7}|\x08.{8}))"
ONE_NUMBER = re.compile(NUMBER, re.DOTALL)
# bytes that are there before a pair is read, and frames that are put together, of 64 KiB each
_LEAST, _FRAMES = 1 << 16, 16


class OtherSpellingError(Exception):
    """The stream is spelled in another way."""


def frames_of(data: bytes) -> Iterator[memoryview]:
    """The opcodes behind PROTO, a frame at a time."""
    if data[:2] not in (b"\x80\x04", b"\x80\x05"):
        raise OtherSpellingError
    at, view = 2, memoryview(data)
    while at < len(data):
        size = int.from_bytes(data[at + 1 : at + 9], "little")
        if data[at] != 0x95 or at + 9 + size > len(data):
            raise OtherSpellingError
        yield view[at + 9 : at + 9 + size]
        at += 9 + size


class Name(NamedTuple):
    """A name in a module, which is defined once and referred to from then on."""

    module: str
    name: str


class MemoryFormat(NamedTuple):
    """A memory format, as it stands in the memo."""

    number: int


# what stands in the memo for the layout, and what is read where strides are said to be unknown
_LAYOUT, UNKNOWN = object(), (-1,)
SIZE, _GETATTR = Name("torch", "Size"), Name("builtins", "getattr")


class ValueReader:
    """One stream: where it is read, and its memo. A torch.Size stands there as the tuple that it
    is, other numbers as a list of their tuple, and None for what no stream refers to.

    `references` are the opcodes that refer to a name or a field.
    """

    def __init__(self, frames: Iterator[bytes | memoryview]) -> None:
        self.data, self.at = b"", 0
        self.frames, self.ended = frames, False
        self.go_on()
        self.memo: list[Any] = []
        self.references: dict[Name | str, bytes] = {}

    def taken(self, opcodes: bytes) -> bool:
        """Whether these opcodes come next; they are passed then, and write nothing."""
        if self.data.startswith(opcodes, self.at):
            self.at += len(opcodes)
            return True
        return False

    def opcodes(self, opcodes: bytes) -> None:
        """Passes these opcodes, the memo entries of which nothing refers to."""
        if not self.taken(opcodes):
            raise OtherSpellingError
        self.memo += (None,) * opcodes.count(b"\x94")

    def reference(self) -> Any:
        """What an entry of the memo holds."""
        data, at = self.data, self.at
        if data[at] == 0x68:
            self.at = at + 2
            return self.memo[data[at + 1]]
        if data[at] != 0x6A or at + 5 > len(data):
            raise OtherSpellingError
        self.at = at + 5
        return self.memo[int.from_bytes(data[at + 1 : at + 5], "little")]

    def text(self) -> str:
        """The text that comes next, or is referred to."""
        data, at = self.data, self.at
        if data[at] == 0x8C:
            begin, end = at + 2, at + 2 + data[at + 1]
        elif data[at] == 0x58:
            begin = at + 5
            end = begin + int.from_bytes(data[at + 1 : begin], "little")
            if end - begin > METADATA.text:
                raise OtherSpellingError
        else:
            found = self.reference()
            if type(found) is not str:
                raise OtherSpellingError
            return found
        found = data[begin:end].decode("utf-8", "surrogatepass")
        if data[end] != 0x94:
            raise OtherSpellingError
        self.memo.append(found)
        self.at = end + 1
        return found

    def field(self, name: str) -> None:
        """The name of a field."""
        begin = self.at
        if self.text() != name:
            raise OtherSpellingError
        self._met(name, begin)

    def name(self, wanted: Name) -> None:
        """This name."""
        begin = self.at
        found = self._global()
        if (found.module, found.name) != wanted:
            raise OtherSpellingError
        self._met(wanted, begin)

    def _global(self) -> Global:
        begin = self.at
        if self.data[begin] in b"hj":
            found = self.reference()
            if type(found) is Global:
                return found
            self.at = begin
        module, name = self.text(), self.text()
        self.opcodes(b"\x93")
        if self.data[self.at] != 0x94:
            raise OtherSpellingError
        self.at += 1
        found = Global(module, name)
        self.memo.append(found)
        return found

    def _met(self, what: Name | str, begin: int) -> None:
        """Keeps how a name or a field is referred to: as it just was, or from now on."""
        if self.data[begin] in b"hj" and self.at - begin in (2, 5):
            self.references[what] = self.data[begin : self.at]
        else:
            number = len(self.memo) - 1
            self.references[what] = (
                bytes((0x68, number)) if number < 256 else b"j" + number.to_bytes(4, "little")
            )

    def number(self) -> int:
        match = ONE_NUMBER.match(self.data, self.at)
        if match is None:
            raise OtherSpellingError
        self.at = match.end()
        return self.number_of(match[0])

    def number_of(self, raw: bytes) -> int:
        """The number that these opcodes push, which is neither negative nor too large."""
        kind = raw[0]
        if kind == 0x4B:
            return raw[1]
        found = int.from_bytes(raw[2:] if kind == 0x8A else raw[1:], "little", signed=kind != 0x4D)
        if not 0 <= found <= LARGEST:
            raise OtherSpellingError
        return found

    def numbers(self) -> tuple[int, ...]:
        """A tuple of numbers."""
        if self.taken(b")"):
            return ()
        many, found = self.taken(b"("), []
        while self.data[self.at] in b"KMJ\x8a":
            found.append(self.number())
        if not found or many != (len(found) > 3) or len(found) > 64:
            raise OtherSpellingError
        self.opcodes(b"t\x94" if many else bytes((0x84 + len(found), 0x94)))
        return tuple(found)

    def size(self) -> tuple[int, ...]:
        """A torch.Size."""
        begin = self.at
        if self.data[begin] in b"hj":
            found = self.reference()
            if type(found) is tuple:
                return found
            self.at = begin
        self.name(SIZE)
        numbers = self.numbers()
        self.opcodes(b"\x85\x94R")
        if self.data[self.at] != 0x94:
            raise OtherSpellingError
        self.at += 1
        self.memo.append(numbers)
        return numbers

    def strides(self) -> tuple[int, ...] | None:
        """The strides of a tensor; None before torch 2.15."""
        if self.taken(b"N"):
            return UNKNOWN
        if self.data[self.at] == 0x74:
            return None
        if self.data[self.at] in b"hj":
            return self._list(self.reference())
        found = self.numbers()
        if found:
            self.memo[-1] = [found]
        return found

    def _list(self, known: Any) -> tuple[int, ...]:
        if type(known) is not list:
            raise OtherSpellingError
        return known[0]  # type: ignore[no-any-return]

    def properties(self) -> tuple[str, bool, int, bool]:
        """dtype, requires_grad, the number of the memory format, and whether memory was pinned; the
        layout is strided.
        """
        dtype = dtype_of(self._global())
        self._called(Name("torch.serialization", "_get_layout"))
        requires_grad = self._flag()
        memory = self._called(Name(MODULE, "_MEM_FORMAT_ENCODING"))
        return dtype, requires_grad, memory.number, self._flag()

    def _called(self, name: Name) -> Any:
        """The layout or a memory format, which is made once."""
        begin, layout = self.at, name.name == "_get_layout"
        if self.data[begin] in b"hj":
            found = self.reference()
            if found is _LAYOUT if layout else type(found) is MemoryFormat:
                return found
            self.at = begin
        made: Any = _LAYOUT
        if layout:
            self.name(name)
            self.field("torch.strided")
            self.opcodes(b"\x85\x94R")
        else:
            made = MemoryFormat(self._member(name))
        if self.data[self.at] != 0x94:
            raise OtherSpellingError
        self.at += 1
        self.memo.append(made)
        return made

    def _member(self, name: Name) -> int:
        """The number of a memory format: `Enum(number)`, or `getattr(Enum, name)` as CPython 3.11.0
        to 3.11.3 pickle members.
        """
        begin, written = self.at, len(self.memo)
        found = self._global()
        if (found.module, found.name) == _GETATTR:
            self.name(name)
            member = self.text()
            self.opcodes(b"\x86\x94R")
            if member not in MEMORY_FORMATS:
                raise OtherSpellingError
            return MEMORY_FORMATS.index(member)
        self.at = begin
        del self.memo[written:]
        self.name(name)
        number = self.number()
        self.opcodes(b"\x85\x94R")
        if number > 2:
            raise OtherSpellingError
        return number

    def _flag(self) -> bool:
        found = self.data[self.at]
        if found not in (0x88, 0x89):
            raise OtherSpellingError
        self.at += 1
        return found == 0x88

    def go_on(self) -> None:
        """Sees to it that the next pair or chunk is there, if it is not of an odd size."""
        if self.ended or len(self.data) - self.at > _LEAST:
            return
        held = [self.data[self.at :], *islice(self.frames, _FRAMES)]
        self.ended = len(held) <= _FRAMES
        self.data, self.at = b"".join(held), 0

    def pairs(self) -> Iterator[None]:
        """Goes through a dict of any number of pairs but one; the caller takes the next pair, or
        several.
        """
        self.opcodes(b"}\x94")
        while self.taken(b"("):
            while not self.taken(b"u"):
                yield
                self.go_on()
