"""The opcodes that are rare or refused, the names that may be spelled, and why a stream that ends
too early does.

The frequent opcodes stand in the machine's loop.
"""

from __future__ import annotations

import struct
from typing import Any

from .keys import EndedError, WrongError
from .limits import Limits

# the opcodes that are refused by name, and why nobody misses them
_OLD = "an opcode of protocols 0 and 1, which no supported writer uses"
_REFUSED = {
    **dict.fromkeys(
        (
            "INT",
            "LONG",
            "FLOAT",
            "STRING",
            "UNICODE",
            "GET",
            "PUT",
            "DICT",
            "LIST",
            "INST",
            "OBJ",
            "PERSID",
        ),
        _OLD,
    ),
    **dict.fromkeys(
        ("POP", "POP_MARK", "DUP"),
        "supported writers use it only for values that contain themselves",
    ),
    **dict.fromkeys(
        ("EXT1", "EXT2", "EXT4"),
        "names from the registry of the reading process are not known here",
    ),
    **dict.fromkeys(("NEXT_BUFFER", "READONLY_BUFFER"), "its data lies outside the stream"),
}
_CODES = {
    "INT": "I", "LONG": "L", "FLOAT": "F", "STRING": "S", "UNICODE": "V", "GET": "g", "PUT": "p",
    "DICT": "d", "LIST": "l",
    "INST": "i", "OBJ": "o", "PERSID": "P", "POP": "0", "POP_MARK": "1", "DUP": "2", "EXT1": "\x82",
    "EXT2": "\x83", "EXT4": "\x84",
    "NEXT_BUFFER": "\x97", "READONLY_BUFFER": "\x98",
}  # fmt: skip
_BY_CODE = {ord(code): name for name, code in _CODES.items()}
# values that are preceded by their length, and the form of the length; their shorter forms, which
# are frequent, stand in the loop
_LENGTHS = {
    0x58: ("text", "<I"), 0x8D: ("text", "<Q"), 0x55: ("a string of Python 2", "<B"),
    0x54: ("a string of Python 2", "<i"),
    0x8B: ("an integer", "<i"), 0x43: ("bytes", "<B"), 0x42: ("bytes", "<I"), 0x8E: ("bytes", "<Q"),
    0x96: ("a bytearray", "<Q"),
}  # fmt: skip
# bytes of operand, for those that have a fixed number
_OPERANDS = {
    0x68: 1, 0x71: 1, 0x4B: 1, 0x8C: 1, 0x8A: 1, 0x43: 1, 0x55: 1, 0x4D: 2, 0x6A: 4, 0x72: 4,
    0x4A: 4, 0x58: 4, 0x8B: 4, 0x42: 4, 0x54: 4,
    0x47: 8, 0x8D: 8, 0x8E: 8, 0x96: 8, 0x95: 8,
}  # fmt: skip

# as unpickler and pickler map them for protocol 2, which Python 2 wrote and reads
PYTHON2_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg"}
PYTHON2_NAMES = {
    ("__builtin__", "unicode"): "str",
    ("__builtin__", "long"): "int",
    ("__builtin__", "xrange"): "range",
}
TO_PYTHON2_MODULES = {new: old for old, new in PYTHON2_MODULES.items()}
TO_PYTHON2_NAMES = {
    (PYTHON2_MODULES[module], new): (module, old) for (module, old), new in PYTHON2_NAMES.items()
}


def lengthy(op: int, buffer: bytes, at: int, limits: Limits) -> tuple[Any, int]:
    """The value of an opcode that is followed by its length, and where the next one starts."""
    if op not in _LENGTHS:
        raise _unknown(op)
    what, form = _LENGTHS[op]
    (size,) = struct.unpack_from(form, buffer, at + 1)
    first = at + 1 + struct.calcsize(form)
    if size < 0:
        raise WrongError("M930", f"{what} of {size} bytes")
    most = (
        limits.blob
        if what in ("bytes", "a bytearray")
        else limits.integer
        if what == "an integer"
        else limits.text
    )
    if size > most:
        raise too_large(what, size, most)
    # never copied twice: a blob may be a quarter of all memory that a stream may take
    taken = memoryview(buffer)[first : first + size]
    if what == "an integer":
        return int.from_bytes(taken, "little", signed=True), first + size
    if what == "a bytearray":
        return bytearray(taken), first + size
    if what == "bytes":
        return bytes(taken), first + size
    return (
        str(taken, "ascii")
        if what == "a string of Python 2"
        else str(taken, "utf-8", "surrogatepass")
    ), first + size


def cut_off(buffer: bytes, at: int, framed: bool) -> WrongError:
    """Why an index was out of range: the stream or its frame ends, the memo has no such entry, or
    the stack is empty.
    """
    if at >= len(buffer) or at + _OPERANDS.get(buffer[at], 0) >= len(buffer):
        return (
            WrongError("M930", "an opcode reaches out of its frame")
            if framed
            else EndedError("M930", "the stream ends before STOP")
        )
    if buffer[at] in (0x68, 0x6A):
        return WrongError("M930", "a memo entry is read, but was not written")
    return WrongError("M930", "an opcode takes more values than the stack holds above its mark")


def _unknown(op: int) -> WrongError:
    name = _BY_CODE.get(op)
    if name:
        return WrongError("M931", f"{name} is not read: {_REFUSED[name]}")
    return WrongError(
        "M930", "a second PROTO" if op == 0x80 else f"no opcode begins with the byte 0x{op:02x}"
    )


def too_large(what: str, size: int, limit: int) -> WrongError:
    return WrongError("M932", f"{what} of {size:,} bytes; at most {limit:,} are read")
