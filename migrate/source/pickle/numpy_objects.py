"""numpy's arrays and numbers, as descriptions with raw bytes; numpy itself is not needed.

Only dtypes of plain numbers, bools, bytes and text are read: an object array holds a pickle of its
own, a structured one needs rules for its fields that no checkpoint has asked for.
"""

from __future__ import annotations

import re
from typing import Any

from .containers import encoded
from .decoding import (
    LARGEST,
    MOST_DIMENSIONS,
    ContradictionError,
    Decoder,
    Decoding,
    ForeignError,
    Table,
    integers,
    is_global,
    plain,
)
from .keys import kind_of
from .nodes import ABSENT, Call
from .tree import Array, Constant

# kind and bytes an element; "U" counts characters of four bytes
_PLAIN = re.compile(r"([biufcSUV])([0-9]{1,9})", re.ASCII)
_SIZES = {"b": (1,), "i": (1, 2, 4, 8), "u": (1, 2, 4, 8), "f": (2, 4, 8, 16), "c": (8, 16, 32)}
_NDARRAY = ("numpy", "ndarray")


def dtype(node: Any) -> tuple[str, int]:
    """The array-interface name of a dtype and its bytes an element; ForeignError for objects, dates
    and structures.

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


def _ways(module: str, name: str, arity: int) -> list[tuple[str, str, str, int]]:
    # numpy 1 and 2
    return [(f"numpy.{core}.{module}", name, "reduce", arity) for core in ("core", "_core")]


DECODERS: Table = {
    ("numpy", "dtype", "reduce", 3): Decoder(_dtype),
    ("numpy", "dtype", "reduce", 1): Decoder(_dtype),
    **dict.fromkeys(_ways("multiarray", "_reconstruct", 3), Decoder(_reconstruct)),
    **dict.fromkeys(_ways("multiarray", "scalar", 2), Decoder(_scalar)),
    **dict.fromkeys(_ways("numeric", "_frombuffer", 4), Decoder(_frombuffer)),
}
