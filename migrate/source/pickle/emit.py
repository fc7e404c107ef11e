"""Inert nodes to a pickle stream, without a pickler: protocol 2, in the opcodes that torch's
weights-only reader accepts.

Plain data becomes what `pickle.dumps(value, 2)` makes of it, byte for byte. Protocol 2 has no
opcode for bytes, sets and complex numbers; they are written as the calls that the pickler writes
for them. Depth is measured before anything is written, so writing may call itself.

A tensor becomes the call that rebuilds it, as torch.save would have written it. Torch has two
spellings. Storages of the old dtypes have a class each; for all newer dtypes a tensor lies on an
untyped storage and says its dtype itself. Source: torch 2.13, Tensor._reduce_ex_internal and
torch.storage._new_dtypes.
"""

from __future__ import annotations

import struct
from collections.abc import Container
from typing import Any

from ...core.errors import fail, printable
from ..jsontext import collector_paused
from .decoding import TYPED
from .machine import PYTHON2_MODULES, PYTHON2_NAMES, TO_PYTHON2_MODULES, TO_PYTHON2_NAMES
from .nodes import (
    ABSENT,
    ARCHIVE,
    EXTRA_STATE,
    METHOD,
    Call,
    Dict,
    Global,
    Limits,
    Persistent,
    Set,
    WrongError,
    kind_of,
    measure,
)
from .tree import ITEMSIZE

_BATCH = 1000
_LATIN1 = "latin1"
_TUPLES = {1: b"\x85", 2: b"\x86", 3: b"\x87"}
_CONSTANTS = {None: b"N", True: b"\x88", False: b"\x89"}


def emit(
    value: Any,
    *,
    name: str,
    names: Container[tuple[str, str]] | None = None,
    limits: Limits = ARCHIVE,
) -> bytes:
    """The stream whose reading gives `value` again: what is one object here is one object there.

    Bytes, bytearrays, sets and complex numbers come back as calls of `_codecs.encode` and of their
    types. M933, naming the stream `name`, if `value` holds what no stream can: an object of another
    class, a container that contains itself or is too deep, an integer or a text that the reader
    would refuse; `limits` are those of the reader that is meant. M933 as well for a name that is
    not among `names`, if these are given.
    """
    writer = _StreamWriter()
    try:
        with collector_paused():
            measure(value, limits)
            writer.write(value)
            for module, called in writer.names:
                if names is not None and (module, called) not in names:
                    raise WrongError(
                        "M933",
                        f"{printable(module)}.{printable(called)} is not a name that may be "
                        "written",
                    )
    except WrongError as error:
        fail("M933", f"{name}: {error.message}")
    stream = b"".join((b"\x80\x02", *writer.parts, b"."))
    if len(stream) > limits.size:
        fail(
            "M933",
            f"{name}: a pickle stream of {len(stream):,} bytes; at most {limits.size:,} can be "
            "read again",
        )
    return stream


class _StreamWriter:
    """One stream being written. What the memo has stays alive, so that no id comes twice."""

    __slots__ = ("entries", "kept", "memo", "names", "parts")

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.memo: dict[int, int] = {}
        self.names: dict[tuple[str, str], int] = {}
        self.kept: list[bytes] = []
        self.entries = 0

    def write(self, value: Any) -> None:
        """Writes the opcodes that push the value."""
        kind = type(value)
        if kind is int:
            self.parts.append(integer(value))
        elif value is None or kind is bool:
            self.parts.append(_CONSTANTS[value])
        elif kind is float:
            self.parts.append(struct.pack(">cd", b"G", value))
        elif kind is Global:
            self.write_global(value.module, value.name)
        elif kind is tuple and not value:
            self.parts.append(b")")
        elif id(value) in self.memo:
            self.parts.append(_get(self.memo[id(value)]))
        elif kind is str:
            self.write_text(value)
            self.remember(value)
        elif kind is tuple:
            self.write_tuple(value)
            self.remember(value)
        elif kind is list:
            self.parts.append(b"]")
            self.remember(value)
            self.write_items(value)
        elif kind is Dict:
            self.parts.append(b"}")
            self.remember(value)
            self.write_pairs(value.pairs)
        elif kind is Call:
            self.write_call(value)
        elif kind is Persistent:
            self.write(value.id)
            self.parts.append(b"Q")
            self.remember(value)
        else:
            self.write_as_call(value)

    def remember(self, value: Any) -> None:
        """Memoises the value on top of the stack."""
        self.memo[id(value)] = self.entries
        self.put()

    def put(self) -> None:
        entry = self.entries
        self.parts.append(bytes((0x71, entry)) if entry < 256 else struct.pack("<cI", b"r", entry))
        self.entries = entry + 1

    def write_text(self, text: str) -> None:
        encoded = text.encode("utf-8", "surrogatepass")
        if len(encoded) > ARCHIVE.text:
            raise WrongError(
                "M933",
                f"a text of {len(encoded):,} bytes; at most {ARCHIVE.text:,} can be read again",
            )
        self.parts.append(struct.pack("<cI", b"X", len(encoded)) + encoded)

    def write_global(self, module: str, name: str) -> None:
        entry = self.names.get((module, name))
        if entry is not None:
            self.parts.append(_get(entry))
            return
        _require_name(module, name)
        self.names[module, name] = self.entries
        old = TO_PYTHON2_NAMES.get((module, name)) or (TO_PYTHON2_MODULES.get(module, module), name)
        read = PYTHON2_MODULES.get(old[0], old[0]), PYTHON2_NAMES.get(old, old[1])
        if read != (module, name):
            raise WrongError(
                "M933", f"{printable(module)}.{printable(name)} would be read as {'.'.join(read)}"
            )
        self.parts.append(b"c%b\n%b\n" % (old[0].encode(), old[1].encode()))
        self.put()

    def write_tuple(self, value: tuple[Any, ...]) -> None:
        short = _TUPLES.get(len(value))
        if short is None:
            self.parts.append(b"(")
        for part in value:
            self.write(part)
        self.parts.append(short or b"t")

    def write_items(self, items: list[Any]) -> None:
        if len(items) == 1:
            self.write(items[0])
            self.parts.append(b"a")
            return
        for start in range(0, len(items), _BATCH):
            self.parts.append(b"(")
            for item in items[start : start + _BATCH]:
                self.write(item)
            self.parts.append(b"e")

    def write_pairs(self, pairs: list[tuple[Any, Any]]) -> None:
        if len(pairs) == 1:
            self.write(pairs[0][0])
            self.write(pairs[0][1])
            self.parts.append(b"s")
            return
        for start in range(0, len(pairs), _BATCH):
            self.parts.append(b"(")
            for key, value in pairs[start : start + _BATCH]:
                self.write(key)
                self.write(value)
            self.parts.append(b"u")

    def write_call(self, call: Call) -> None:
        if type(call.function) is not Global or type(call.arguments) is not tuple:
            raise WrongError(
                "M933", f"a call of {kind_of(call.function)} with {kind_of(call.arguments)}"
            )
        cls, dot, method = call.function.name.rpartition(".")
        if dot and method == METHOD:
            self.write_method(call.function, cls)
        else:
            self.write_global(call.function.module, call.function.name)
        self.write(call.arguments)
        self.parts.append(b"R" if call.how == "reduce" else b"\x81")
        self.remember(call)
        if call.items:
            self.write_items(call.items)
        if call.pairs:
            self.write_pairs(call.pairs)
        if call.state is not ABSENT:
            self.write(call.state)
            self.parts.append(b"b")

    def write_method(self, function: Global, cls: str) -> None:
        """The class method as the pickler writes it, once for each class."""
        if id(function) in self.memo:
            self.parts.append(_get(self.memo[id(function)]))
            return
        self.write_global("builtins", "getattr")
        self.write_global(function.module, cls)
        self.write_text(METHOD)
        self.put()
        self.parts.append(b"\x86")
        self.put()
        self.parts.append(b"R")
        self.remember(function)

    def write_as_call(self, value: Any) -> None:
        """What protocol 2 has no opcode for. What is made on the way takes numbers of the memo."""
        kind = type(value)
        if kind is bytes or (kind is bytearray and not value):
            self.write_global(
                *(("_codecs", "encode") if kind is bytes else ("builtins", "bytearray"))
            )
            if kind is bytes:
                self.write_text(value.decode("latin-1"))
                self.put()
                self.write(_LATIN1)
                self.parts.append(b"\x86")
                self.put()
            else:
                self.parts.append(b")")
        elif kind is bytearray:
            self.write_global("builtins", "bytearray")
            self.kept.append(bytes(value))
            self.write_as_call(self.kept[-1])
            self.parts.append(b"\x85")
            self.put()
        elif kind is Set:
            self.write_global("builtins", "frozenset" if value.frozen else "set")
            self.parts.append(b"]")
            self.put()
            self.write_items(value.items)
            self.parts.append(b"\x85")
            self.put()
        elif kind is complex:
            self.write_global("builtins", "complex")
            self.parts.append(struct.pack(">cdcd", b"G", value.real, b"G", value.imag) + b"\x86")
            self.put()
        else:
            raise WrongError("M933", f"{kind_of(value)} cannot stand in a pickle stream")
        self.parts.append(b"R")
        self.remember(value)


def _require_name(module: str, name: str) -> None:
    """M933 unless Python could have a class or a function of this name."""
    plain = (
        module.isascii()
        and name.isascii()
        and all(map(str.isidentifier, (*module.split("."), name)))
    )
    if not plain or len(module) > 200 or len(name) > 200:
        raise WrongError(
            "M933", f"{printable(module)}.{printable(name)} is not the name of anything"
        )


def _get(entry: int) -> bytes:
    return bytes((0x68, entry)) if entry < 256 else struct.pack("<cI", b"j", entry)


def integer(value: int) -> bytes:
    """The opcode that pushes a number, as the pickler writes it."""
    if 0 <= value < 256:
        return bytes((0x4B, value))
    if 0 <= value < 65536:
        return struct.pack("<cH", b"M", value)
    if -(1 << 31) <= value < 1 << 31:
        return struct.pack("<ci", b"J", value)
    size = value.bit_length() // 8 + 1
    # the pickler leaves out a last byte that only repeats the sign
    if value < 0 and value >= -(1 << (8 * size - 9)):
        size -= 1
    if size > ARCHIVE.integer:
        raise WrongError(
            "M933", f"an integer of {size:,} bytes; at most {ARCHIVE.integer} can be read again"
        )
    return b"\x8a" + bytes((size,)) + value.to_bytes(size, "little", signed=True)


# the pickler begins a new frame after so many bytes; streams without frames are read too
_FRAME = 64 << 10


def emit_protocol4(value: Any, *, name: str) -> bytes:
    """The stream whose reading gives `value` again. M933, naming the stream `name`, for what no
    stream or no reader here can hold.
    """
    writer = _StreamWriter4()
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


class _StreamWriter4(_StreamWriter):
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
        _require_name(module, name)
        self.text(module)
        self.text(name)
        self.parts.append(b"\x93")
        self.names[module, name] = self.entries
        self.put()


# the dtypes that have a storage class of their own, by their names
_CLASSES = {dtype: name for name, dtype in TYPED.items()}


class Rebuilder:
    """Makes the nodes of one stream; shares names and empty containers as the pickler does."""

    __slots__ = ("_names", "_storages")

    def __init__(self) -> None:
        self._names: dict[tuple[str, str], Global] = {}
        self._storages: dict[str, Persistent] = {}

    def name(self, module: str, name: str) -> Global:
        """The one node of this name."""
        found = self._names.get((module, name))
        if found is None:
            found = self._names[module, name] = Global(module, name)
        return found

    def storage(self, key: str, dtype: str, nbytes: int) -> Persistent:
        """The storage of `nbytes` bytes called `key`, of the class that torch uses for `dtype`."""
        found = self._storages.get(key)
        if found is None:
            typed = _CLASSES.get(dtype)
            cls = (
                self.name("torch", typed)
                if typed is not None
                else self.name("torch.storage", "UntypedStorage")
            )
            numel = nbytes // ITEMSIZE[dtype] if typed is not None else nbytes
            found = self._storages[key] = Persistent(("storage", cls, key, "cpu", numel))
        return found

    def tensor(
        self,
        key: str,
        dtype: str,
        shape: tuple[int, ...],
        nbytes: int,
        *,
        requires_grad: bool = False,
        parameter: bool = False,
        subclass: str | None = None,
        state: Any = None,
    ) -> Call:
        """A row-major tensor that is all of the storage `key`.

        `dtype` is torch's name; `state` are its attributes as nodes, None without.
        """
        strides, step = [], 1
        for size in reversed(shape):
            strides.append(step)
            step *= max(size, 1)
        typed = dtype in _CLASSES
        own = () if typed else (self.name("torch", dtype),)
        hooks = Call("reduce", self.name("collections", "OrderedDict"), ())
        grad = requires_grad and not parameter
        arguments = (
            self.storage(key, dtype, nbytes),
            0,
            shape,
            tuple(reversed(strides)),
            grad,
            hooks,
            *own,
        )
        function = self.name(
            "torch._utils", "_rebuild_tensor_v2" if typed else "_rebuild_tensor_v3"
        )
        made = Call("reduce", function, arguments)
        if parameter:
            more = Call("reduce", self.name("collections", "OrderedDict"), ())
            if state is None:
                return Call(
                    "reduce",
                    self.name("torch._utils", "_rebuild_parameter"),
                    (made, requires_grad, more),
                )
            return Call(
                "reduce",
                self.name("torch._utils", "_rebuild_parameter_with_state"),
                (made, requires_grad, more, state),
            )
        if subclass is None and state is None:
            return made
        # a buffer is a plain tensor with a mark
        marked = Dict([("_is_buffer", True)]) if state is None else state
        rebuild = self.name("torch._tensor", "_rebuild_from_type_v2")
        return Call("reduce", rebuild, (function, self.name("torch", "Tensor"), arguments, marked))
