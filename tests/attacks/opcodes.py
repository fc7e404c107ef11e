"""An assembler for pickle streams, genuine and hostile, and what torch writes in them. Made by
hand, so that every byte can lie.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

MARK, STOP, POP, POP_MARK, DUP, REDUCE, BUILD, NEWOBJ, NEWOBJ_EX = (
    b"(",
    b".",
    b"0",
    b"1",
    b"2",
    b"R",
    b"b",
    b"\x81",
    b"\x92",
)
STACK_GLOBAL, MEMOIZE, EMPTY_TUPLE, EMPTY_DICT, EMPTY_LIST, SETITEM, SETITEMS = (
    b"\x93",
    b"\x94",
    b")",
    b"}",
    b"]",
    b"s",
    b"u",
)
APPEND, APPENDS, TUPLE, TUPLE1, PERSID, BINPERSID, EMPTY_SET, ADDITEMS, OBJ = (
    b"a",
    b"e",
    b"t",
    b"\x85",
    b"P",
    b"Q",
    b"\x8f",
    b"\x90",
    b"o",
)


def stream(body: bytes, protocol: int = 4) -> bytes:
    return b"\x80" + bytes([protocol]) + body + STOP


def text(value: str) -> bytes:
    raw = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(raw)) + raw


def value(thing: Any) -> bytes:
    """The opcodes that push a value; bytes stand for opcodes that push one already, a bytearray for
    bytes.
    """
    if isinstance(thing, bytes):
        return thing
    if isinstance(thing, bytearray):
        return b"B" + struct.pack("<I", len(thing)) + bytes(thing)
    if thing is None or isinstance(thing, bool):
        return {None: b"N", True: b"\x88", False: b"\x89"}[thing]
    if isinstance(thing, int):
        if -(2**31) <= thing < 2**31:
            return b"J" + struct.pack("<i", thing)
        raw = thing.to_bytes(thing.bit_length() // 8 + 1, "little", signed=True)
        return b"\x8a" + bytes([len(raw)]) + raw
    if isinstance(thing, float):
        return b"G" + struct.pack(">d", thing)
    if isinstance(thing, str):
        return text(thing)
    if isinstance(thing, tuple):
        return MARK + b"".join(map(value, thing)) + TUPLE
    if isinstance(thing, list):
        return EMPTY_LIST + MARK + b"".join(map(value, thing)) + APPENDS
    return EMPTY_DICT + MARK + b"".join(value(k) + value(v) for k, v in thing.items()) + SETITEMS


def found(module: str, name: str) -> bytes:
    """What STACK_GLOBAL finds; dots in the name are followed."""
    return text(module) + text(name) + STACK_GLOBAL


def old(module: str, name: str) -> bytes:
    """What GLOBAL finds."""
    return b"c" + module.encode() + b"\n" + name.encode() + b"\n"


def call(function: bytes, *arguments: Any) -> bytes:
    return function + value(arguments) + REDUCE


def new(module: str, name: str, state: Any = None) -> bytes:
    """An object of a class, made without arguments, with a state."""
    made = found(module, name) + EMPTY_TUPLE + NEWOBJ
    return made if state is None else made + value(state) + BUILD


def memoised(index: int) -> bytes:
    return b"h" + bytes([index])


def put(index: int) -> bytes:
    return b"q" + bytes([index])


# torch


def storage(
    key: Any = "0", numel: Any = 4, kind: str = "FloatStorage", location: Any = "cpu"
) -> bytes:
    return value(("storage", old("torch", kind), key, location, numel)) + BINPERSID


def tensor(
    held: bytes | None = None,
    shape: Sequence[Any] = (4,),
    strides: Sequence[Any] = (1,),
    offset: Any = 0,
    rebuild: str = "_rebuild_tensor_v2",
) -> bytes:
    hooks = call(old("collections", "OrderedDict"))
    function = old("torch._utils", rebuild)
    return call(
        function,
        storage() if held is None else held,
        offset,
        tuple(shape),
        tuple(strides),
        False,
        hooks,
    )


def legacy(
    body: bytes,
    *,
    magic: bytes | None = None,
    system: bytes | None = None,
    keys: bytes | None = None,
    data: bytes | None = None,
) -> bytes:
    """A torch.save stream of before 1.6: five pickles, then for each storage a count and its
    bytes.
    """
    facts = {
        "protocol_version": 1001,
        "little_endian": True,
        "type_sizes": {"short": 2, "int": 4, "long": 4},
    }
    parts = (
        stream(value(0x1950A86A20F9469CFC6C)) if magic is None else magic,
        stream(value(1001)),
        stream(value(facts)) if system is None else system,
        stream(body),
        stream(value(["0"])) if keys is None else keys,
        struct.pack("<q", 4) + bytes(16) if data is None else data,
    )
    return b"".join(parts)


def legacy_tensor(key: str = "0", numel: int = 4) -> bytes:
    held = value(("storage", old("torch", "FloatStorage"), key, "cpu", numel, None)) + BINPERSID
    return tensor(held)


# torch.distributed.checkpoint

_DCP = "torch.distributed.checkpoint.metadata"


def size(*dims: Any) -> bytes:
    return call(found("torch", "Size"), tuple(dims))


def chunk(offset: Any = 0, length: Any = 4) -> bytes:
    return new(_DCP, "ChunkStorageMetadata", {"offsets": size(offset), "sizes": size(length)})


def tensor_entry(shape: bytes | None = None, chunks: Any = None) -> bytes:
    layout = call(found("torch.serialization", "_get_layout"), "torch.strided")
    form = call(found(_DCP, "_MEM_FORMAT_ENCODING"), 0)
    facts = (
        found(_DCP, "TensorProperties")
        + EMPTY_TUPLE
        + NEWOBJ
        + value((found("torch", "float32"), layout, False, form, False))
        + BUILD
    )
    held = value([chunk()] if chunks is None else chunks)
    return new(
        _DCP,
        "TensorStorageMetadata",
        {"properties": facts, "size": size(4) if shape is None else shape, "chunks": held},
    )


def bytes_entry() -> bytes:
    return new(_DCP, "BytesStorageMetadata")


def where(fqn: str, offset: Any = 0) -> bytes:
    state: dict[str, Any] = {"fqn": fqn}
    if offset is not None:
        state |= {"offset": size(offset), "index": 0}
    else:
        state |= {"offset": None, "index": None}
    return new(_DCP, "MetadataIndex", state)


def stored(path: Any = "__0_0.distcp", offset: Any = 0, length: Any = 0, **more: Any) -> bytes:
    state = {"relative_path": path, "offset": offset, "length": length, **more}
    return new("torch.distributed.checkpoint.filesystem", "_StorageInfo", state)


def metadata(entries: Any, places: Any, planner: Any = None, **more: Any) -> bytes:
    """A .metadata file. `entries` and `places` are dicts or opcodes; a key may be opcodes."""
    state = {
        "state_dict_metadata": value(entries),
        "planner_data": planner,
        "storage_data": value(places),
        "storage_meta": None,
        **more,
    }
    return stream(new(_DCP, "Metadata", state))
