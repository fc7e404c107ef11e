"""Python's own containers and small values, as pickle writes those that have no opcode, and numpy's
arrays and numbers, as descriptions with raw bytes; numpy itself is not needed.

Of numpy, only dtypes of plain numbers, bools, bytes and text are read: an object array holds a
pickle of its own, a structured one needs rules for its fields that no checkpoint has asked for.
"""

from __future__ import annotations

import re
import struct
from typing import Any

from .decoding import (
    LARGEST,
    MOST_DIMENSIONS,
    ContradictionError,
    Decoder,
    Decoding,
    ForeignError,
    NestedError,
    Table,
    integers,
    is_global,
    plain,
)
from .nodes import ABSENT, JSON_SCALARS, Call, Dict, Global, WrongError, forms_of, kind_of
from .tree import Array, Buffer, Constant, DictNode, ListNode, Opaque

_BUILTINS = ("builtins",)
_LATIN1 = ("latin1", "latin-1")
FACTORIES = ("list", "dict", "set", "tuple", "int", "float", "str", "bool")


def flat(pairs: list[tuple[Any, Any]] | None) -> list[Any]:
    """Keys and values in turn."""
    return [part for pair in pairs or () for part in pair]


def paired(parts: list[Any], count: int) -> tuple[tuple[Any, Any], ...]:
    """The first `count` pairs of what `flat` made; ContradictionError as `distinct`."""
    return tuple(zip(distinct(parts[: 2 * count : 2]), parts[1 : 2 * count : 2], strict=True))


def distinct(keys: list[Any]) -> list[Any]:
    """The keys of a dict, or the members of a set. ContradictionError if two of them, spelled in
    different ways, make one key.

    The machine has compared those that are spelled out; what calls make is known only here.
    """
    if JSON_SCALARS.issuperset(map(type, keys)):
        return keys
    try:
        forms, _ = forms_of([_compared(key) for key in keys])
    except WrongError as no:
        raise ForeignError(no.message) from None
    if len(set(forms)) < len(keys):
        raise ContradictionError(
            "a key that occurs twice in one dict or set, spelled in two ways, and readers differ "
            "on which counts"
        )
    return keys


def _compared(key: Any) -> Any:
    """A key as the machine reads it where it is spelled out; other objects by identity."""
    kind = type(key)
    if kind in JSON_SCALARS or kind is bytes:
        return key
    if kind is complex:
        return ("", "complex", repr(key)) if key.imag else key.real
    if kind is Constant:
        return "", key.kind, key.text
    if kind is Array:
        return _compared(number(key))
    if kind is ListNode and key.kind == "range":
        return "", "range", *_range(*key.items)
    if kind is ListNode and key.kind == "frozenset":
        raise ForeignError("a frozenset as a key")
    if kind is ListNode and key.kind in ("tuple", "Size"):
        # one more than may be is enough to be refused
        return tuple(map(_compared, key.items[:65]))
    if (
        kind is bytearray
        or kind is DictNode
        or (kind is ListNode and key.kind in ("list", "set", "deque", "slice"))
    ):
        raise ContradictionError("a key that can change, which no dict can hold")
    return "", "object", str(id(key))


def number(key: Array) -> Any:
    """What a number of numpy equals, which Python takes for the same key: 1 of any dtype is 1.
    ContradictionError for an array.

    ForeignError for a dtype that Python has no numbers of.
    """
    if not key.scalar:
        raise ContradictionError("a key that can change, which no dict can hold")
    order, sort, size = key.dtype[0], key.dtype[1], int(key.dtype[2:])
    if sort in "biu":
        return int.from_bytes(key.data, "big" if order == ">" else "little", signed=sort == "i")
    if sort == "S":
        return key.data.rstrip(b"\0")
    if sort == "U":
        try:
            return key.data.decode(
                f"utf-32-{'be' if order == '>' else 'le'}", "surrogatepass"
            ).rstrip("\0")
        except UnicodeDecodeError:
            raise ContradictionError("text of numpy's that is none") from None
    parts = size if sort == "f" else size // 2
    if parts not in _FLOATS:
        raise ForeignError(f"a number of numpy's {key.dtype} as a key")
    numbers = struct.unpack(
        f"{'>' if order == '>' else '<'}{size // parts}{_FLOATS[parts]}", key.data
    )
    return complex(*numbers) if sort == "c" else numbers[0]


_FLOATS = {2: "e", 4: "f", 8: "d"}


def _range(start: Any, stop: Any, step: Any) -> tuple[int, int, int]:
    """Ranges of the same numbers are equal: their count, the first number, and the step."""
    if any(type(n) is not int for n in (start, stop, step)) or not step:
        raise ContradictionError("a range that is not made of integers")
    count = max(0, -((start - stop) // step))
    return count, start if count else 0, step if count > 1 else 0


def _pairs_and_state(call: Call) -> list[Any]:
    return [*flat(call.pairs), None if call.state is ABSENT else call.state]


def _ordered(call: Call, parts: list[Any], _: Decoding) -> DictNode:
    state = parts[-1]
    if call.items or (state is not None and not (type(state) is DictNode and state.kind == "dict")):
        raise ForeignError("a collections.OrderedDict with more than pairs and attributes")
    return DictNode("OrderedDict", paired(parts, len(call.pairs or ())), call, state)


def _defaultdict(call: Call, parts: list[Any], _: Decoding) -> DictNode:
    factory = call.arguments[0] if call.arguments else None
    named = (
        isinstance(factory, Global) and factory.module == "builtins" and factory.name in FACTORIES
    )
    if (
        call.items
        or parts[-1] is not None
        or not (factory is None or named or is_global(factory, ("collections", "OrderedDict")))
    ):
        raise ForeignError(f"a collections.defaultdict that calls {kind_of(factory)}")
    return DictNode("defaultdict", paired(parts, len(call.pairs or ())), call)


def _counter(call: Call, parts: list[Any], _: Decoding) -> DictNode:
    if not plain(call):
        raise ForeignError("a collections.Counter with more than counts")
    if not call.arguments:
        return DictNode("Counter", (), call)
    if type(parts[0]) is Opaque:
        raise NestedError(parts[0])
    if type(parts[0]) is not DictNode or parts[0].kind != "dict":
        raise ContradictionError("a collections.Counter of something that is not a dict")
    return DictNode("Counter", parts[0].pairs, call)


def _deque(call: Call, parts: list[Any], _: Decoding) -> ListNode:
    longest = call.arguments[1] if len(call.arguments) == 2 else None
    if call.state is not ABSENT or call.pairs or (call.arguments and call.arguments[0] != ()):
        raise ForeignError("a collections.deque with more than items")
    if longest is not None and (type(longest) is not int or longest < len(parts)):
        raise ContradictionError("a collections.deque that is longer than it may be")
    return ListNode("deque", tuple(parts), call)


def _set(call: Call, parts: list[Any], _: Decoding) -> ListNode:
    held = parts[0] if parts else None
    if not plain(call) or not (
        held is None or (type(held) is ListNode and held.kind in ("list", "tuple"))
    ):
        raise ForeignError("a set of something other than a list")
    return ListNode(
        call.function.name, tuple(distinct(list(held.items))) if held is not None else (), call
    )


def _scalars(call: Call) -> tuple[Any, ...]:
    if not plain(call) or any(
        a is not None and type(a) not in (int, float, str, bool) for a in call.arguments
    ):
        raise ForeignError(f"{kind_of(call)} with other arguments than numbers")
    return call.arguments


def _slice(call: Call, _: Any, __: Decoding) -> ListNode:
    return ListNode(call.function.name, _scalars(call), call)


def _complex(call: Call, _: Any, __: Decoding) -> complex:
    real, imaginary = _scalars(call)
    if type(real) is not float or type(imaginary) is not float:
        raise ContradictionError("a complex number whose parts are not floats")
    return complex(real, imaginary)


def encoded(node: Any) -> bytes:
    """The bytes of `_codecs.encode(text, "latin1")`, of protocol 2, or of bytes and bytearray."""
    if type(node) in (bytes, bytearray):
        return bytes(node)
    if type(node) is Call and plain(node):
        if is_global(node.function, ("_codecs", "encode")) and len(node.arguments) == 2:
            text, codec = node.arguments
            if type(text) is str and type(codec) is str and codec in _LATIN1:
                return _latin1(text)
        if is_global(node.function, ("builtins", "bytes")) and not node.arguments:
            return b""
        if is_global(node.function, ("builtins", "bytearray")) and len(node.arguments) <= 2:
            return _spelled(node.arguments)
    raise ContradictionError(f"{kind_of(node)} where bytes belong")


def _bytes(call: Call, _: Any, __: Decoding) -> bytes:
    return encoded(call)


def _spelled(arguments: tuple[Any, ...]) -> bytes:
    """The bytes of the arguments of a bytearray: none, bytes, or text with its codec."""
    if not arguments:
        return b""
    if len(arguments) == 1:
        if type(arguments[0]) is Call and is_global(
            arguments[0].function, ("builtins", "bytearray")
        ):
            raise ForeignError("a bytearray of a bytearray")
        return encoded(arguments[0])
    text, codec = arguments
    if type(text) is not str or type(codec) is not str or codec not in _LATIN1:
        raise ContradictionError("a bytearray made of something other than bytes")
    return _latin1(text)


def _latin1(text: str) -> bytes:
    try:
        return text.encode("latin-1")
    except UnicodeEncodeError:
        raise ContradictionError("bytes written as text that holds more than bytes") from None


def _bytearray(call: Call, _: Any, __: Decoding) -> bytearray:
    if not plain(call):
        raise ForeignError("a bytearray that was changed")
    return bytearray(_spelled(call.arguments))


def _bytesio(call: Call, _: Any, __: Decoding) -> Buffer:
    state = call.state
    if call.items or call.pairs or type(state) is not tuple or len(state) != 3:
        raise ForeignError("an io.BytesIO without its three fields")
    data, position, attributes = state
    if type(position) is not int or position < 0:
        raise ContradictionError("an io.BytesIO whose position is not a number")
    if attributes is not None and not (type(attributes) is Dict and not attributes.pairs):
        raise ForeignError("an io.BytesIO with attributes")
    return Buffer(encoded(data), position, call)


def buffer_of(data: bytes, position: int) -> Buffer:
    """An io.BytesIO with this content, read to that position, as the pickler writes it."""
    spelled = Call("reduce", Global("_codecs", "encode"), (data.decode("latin-1"), "latin1"))
    if not data:
        spelled = Call("reduce", Global("builtins", "bytes"), ())
    made = Call("newobj", Global("_io", "BytesIO"), ())
    made.state = spelled, position, None
    return Buffer(data, position, made)


def _ways(
    name: str, *arities: int, module: tuple[str, ...] = _BUILTINS, how: str = "reduce"
) -> list[tuple[str, str, str, int]]:
    return [(m, name, how, n) for m in module for n in arities]


_COLLECTIONS = ("collections",)
_OF_PYTHON: Table = {
    **dict.fromkeys(
        _ways("OrderedDict", 0, module=_COLLECTIONS),
        Decoder(_ordered, _pairs_and_state, keyed=True),
    ),
    **dict.fromkeys(
        _ways("defaultdict", 0, 1, module=_COLLECTIONS),
        Decoder(_defaultdict, _pairs_and_state, keyed=True),
    ),
    **dict.fromkeys(
        _ways("Counter", 0, 1, module=_COLLECTIONS),
        Decoder(_counter, lambda call: list(call.arguments)),
    ),
    **dict.fromkeys(
        _ways("deque", 0, 1, 2, module=_COLLECTIONS),
        Decoder(_deque, lambda call: list(call.items or ()), numbered=True),
    ),
    **dict.fromkeys(
        [*_ways("set", 0, 1), *_ways("frozenset", 0, 1)],
        Decoder(_set, lambda call: list(call.arguments)),
    ),
    **dict.fromkeys([*_ways("slice", 3), *_ways("range", 3)], Decoder(_slice)),
    **dict.fromkeys(_ways("complex", 2), Decoder(_complex)),
    **dict.fromkeys(_ways("bytearray", 0, 1, 2), Decoder(_bytearray)),
    **dict.fromkeys(
        [*_ways("bytes", 0), *_ways("encode", 2, module=("_codecs",))], Decoder(_bytes)
    ),
    **dict.fromkeys(_ways("BytesIO", 0, module=("_io", "io"), how="newobj"), Decoder(_bytesio)),
}


# kind and bytes an element; "U" counts characters of four bytes
_PLAIN = re.compile(r"([biufcSUV])([0-9]{1,9})", re.ASCII)
_SIZES = {"b": (1,), "i": (1, 2, 4, 8), "u": (1, 2, 4, 8), "f": (2, 4, 8, 16), "c": (8, 16, 32)}
_NDARRAY = ("numpy", "ndarray")


def dtype(node: Any) -> tuple[str, int]:
    """The array-interface name of a dtype and its bytes an element; ForeignError for others.

    The state is (version, byte order, subdtype, names, fields, size, alignment, flags); source:
    numpy's descriptor.c, arraydescr_reduce.
    """
    if (
        type(node) is not Call
        or not is_global(node.function, ("numpy", "dtype"))
        or node.how != "reduce"
        or node.items
        or node.pairs
    ):
        raise ForeignError(f"{kind_of(node)} where a numpy.dtype belongs")
    name, *flags = node.arguments
    if type(name) is not str or any(type(f) not in (bool, int) for f in flags):
        raise ContradictionError("a numpy.dtype that is not made from a name")
    found = _PLAIN.fullmatch(name)
    if found is None or found[1] == "V":
        raise ForeignError("a numpy.dtype that is not a plain number")
    kind, count = found[1], int(found[2])
    if count not in _SIZES.get(kind, (count,)):
        raise ForeignError("a numpy.dtype of an unusual size")
    itemsize = 4 * count if kind == "U" else count
    order = "|"
    if node.state is not ABSENT:
        state = node.state
        if (
            type(state) is not tuple
            or len(state) != 8
            or state[0] != 3
            or state[2:5] != (None, None, None)
        ):
            raise ForeignError("a numpy.dtype with fields")
        order = state[1]
        if type(order) is not str or order not in ("<", ">", "|", "="):
            raise ContradictionError("a numpy.dtype of an unknown byte order")
        # all of it is written again as it stands: nothing that is not looked at may be in it
        if any(type(number) is not int for number in (state[0], *state[5:])):
            raise ContradictionError(
                "a numpy.dtype whose version, size, alignment or flags are not integers"
            )
        if state[5] not in (-1, itemsize):
            raise ContradictionError("a numpy.dtype whose size is not that of its name")
    if order == "=" or (order == "|" and itemsize > 1 and kind != "S"):
        # files written by numpy always say it
        raise ContradictionError("a numpy.dtype without a byte order")
    return ("|" if kind in "bS" or (kind in "iu" and count == 1) else order) + name, itemsize


def _dtype(call: Call, _: Any, __: Decoding) -> Constant:
    return Constant("numpy.dtype", dtype(call)[0], call)


def _array(
    name: str, itemsize: int, shape: tuple[int, ...], fortran: bool, data: bytes, call: Call
) -> Array:
    numel = 1
    if len(shape) > MOST_DIMENSIONS:
        raise ContradictionError(f"a numpy array of {len(shape)} dimensions")
    for size in shape:
        if not 0 <= size <= LARGEST:
            raise ContradictionError("a numpy array with a negative or impossible size")
        numel *= size
    if numel * itemsize != len(data):
        raise ContradictionError(
            f"a numpy array of {name} whose shape asks for other bytes than the {len(data):,} "
            "that are there"
        )
    return Array(name, shape, fortran, False, data, call)


def _reconstruct(call: Call, _: Any, __: Decoding) -> Array:
    cls, start, kind = call.arguments
    if not is_global(cls, _NDARRAY):
        raise ForeignError(f"a subclass of numpy.ndarray, {kind_of(cls)}")
    if integers(start) != (0,) or encoded(kind) != b"b" or call.items or call.pairs:
        raise ContradictionError("a numpy array that is not begun as numpy begins it")
    state = call.state
    if type(state) is not tuple or len(state) != 5 or state[0] != 1 or type(state[3]) is not bool:
        raise ForeignError("a numpy array without its five fields")
    name, itemsize = dtype(state[2])
    return _array(name, itemsize, integers(state[1]), state[3], encoded(state[4]), call)


def _scalar(call: Call, _: Any, __: Decoding) -> Array:
    name, itemsize = dtype(call.arguments[0])
    data = encoded(call.arguments[1])
    if len(data) != itemsize or not plain(call):
        raise ContradictionError(f"a numpy number of {name} with {len(data):,} bytes")
    return Array(name, (), False, True, data, call)


def _frombuffer(call: Call, _: Any, __: Decoding) -> Array:
    data, described, shape, order = call.arguments
    if type(order) is not str or order not in ("C", "F") or not plain(call):
        raise ForeignError("a numpy array in another order than C or F")
    name, itemsize = dtype(described)
    return _array(name, itemsize, integers(shape), order == "F", encoded(data), call)


def _numpy(module: str, name: str, arity: int) -> list[tuple[str, str, str, int]]:
    # numpy 1 and 2
    return [(f"numpy.{core}.{module}", name, "reduce", arity) for core in ("core", "_core")]


DECODERS: Table = {
    **_OF_PYTHON,
    ("numpy", "dtype", "reduce", 3): Decoder(_dtype),
    ("numpy", "dtype", "reduce", 1): Decoder(_dtype),
    **dict.fromkeys(_numpy("multiarray", "_reconstruct", 3), Decoder(_reconstruct)),
    **dict.fromkeys(_numpy("multiarray", "scalar", 2), Decoder(_scalar)),
    **dict.fromkeys(_numpy("numeric", "_frombuffer", 4), Decoder(_frombuffer)),
}
