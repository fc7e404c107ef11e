"""Inert nodes to a pickle stream of protocol 4: what `pickle.dumps` writes by default from Python
3.8 to 3.13.

Torch's archives are of protocol 2 and have their writer in `emit`; this one is for programs that
call the pickler themselves. Equal texts are one object here, as they are in programs whose texts
are names.
"""

from __future__ import annotations

import struct
from typing import Any

from ...core.diagnostics import fail, printable
from ..jsontext import collector_paused
from .emit import _Writer
from .keys import WrongError
from .limits import EXTRA_STATE
from .measure import measure

# the pickler begins a new frame when one has this many bytes; a stream without frames is read as
# well
_FRAME = 64 << 10


def emit(value: Any, *, name: str) -> bytes:
    """The stream whose reading gives `value` again. M933, naming the stream `name`, for what no
    stream or no reader here can hold.
    """
    writer = _Writer4()
    try:
        with collector_paused():
            measure(value, EXTRA_STATE)
            writer.write(value)
    except WrongError as error:
        fail("M933", f"{name}: {error.message}")
    body = b"".join((*writer.parts, b"."))
    stream = (
        b"\x80\x04" + (struct.pack("<cQ", b"\x95", len(body)) if len(body) < _FRAME else b"") + body
    )
    if len(stream) > EXTRA_STATE.size:
        fail(
            "M933",
            f"{name}: a pickle stream of {len(stream):,} bytes; at most {EXTRA_STATE.size:,} can "
            "be read again",
        )
    return stream


class _Writer4(_Writer):
    """The opcodes in which protocol 4 differs: short texts, bytes, names from the stack, a memo
    that counts by itself.
    """

    __slots__ = ("texts",)

    def __init__(self) -> None:
        super().__init__()
        self.texts: dict[str, int] = {}

    def put(self) -> None:
        self.parts.append(b"\x94")
        self.entries += 1

    def write(self, value: Any) -> None:
        kind = type(value)
        if kind is str:
            self.text(value)
        elif kind is bytes and id(value) not in self.memo:
            size = len(value)
            head = bytes((0x43, size)) if size < 256 else struct.pack("<cI", b"B", size)
            self.parts += (head, value)
            self.remember(value)
        else:
            super().write(value)

    def text(self, text: str) -> None:
        entry = self.texts.get(text)
        if entry is not None:
            self.parts.append(
                bytes((0x68, entry)) if entry < 256 else struct.pack("<cI", b"j", entry)
            )
            return
        encoded = text.encode("utf-8", "surrogatepass")
        if len(encoded) > EXTRA_STATE.text:
            raise WrongError(
                "M933",
                f"a text of {len(encoded):,} bytes; at most {EXTRA_STATE.text:,} can be read again",
            )
        head = (
            bytes((0x8C, len(encoded)))
            if len(encoded) < 256
            else struct.pack("<cI", b"X", len(encoded))
        )
        self.parts += (head, encoded)
        self.texts[text] = self.entries
        self.put()

    def write_global(self, module: str, name: str) -> None:
        entry = self.names.get((module, name))
        if entry is not None:
            self.parts.append(
                bytes((0x68, entry)) if entry < 256 else struct.pack("<cI", b"j", entry)
            )
            return
        plain = (
            module.isascii()
            and name.isascii()
            and all(map(str.isidentifier, (*module.split("."), name)))
        )
        if not plain or len(module) > 200 or len(name) > 200:
            raise WrongError(
                "M933", f"{printable(module)}.{printable(name)} is not the name of anything"
            )
        self.text(module)
        self.text(name)
        self.parts.append(b"\x93")
        self.names[module, name] = self.entries
        self.put()
