"""Sound archives in which a few bytes are used many times, so that a reader which looks twice at
what is shared takes minutes or gigabytes.

Each of them took more than a second, or more than 300 MB, in some earlier reader.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import opcodes as o
from archives import archive, data_pkl

ORDERED = o.old("collections", "OrderedDict")
# a tensor whose parts are entries 0 to 4 of the memo, and one more of the same parts
FIRST = (
    o.old("torch._utils", "_rebuild_tensor_v2")
    + o.MEMOIZE
    + o.MARK
    + o.storage()
    + o.MEMOIZE
    + b"K\0"
    + o.value((4,))
    + o.MEMOIZE
    + o.value((1,))
    + o.MEMOIZE
    + b"\x89"
    + o.call(ORDERED)
    + o.MEMOIZE
    + o.TUPLE
    + o.REDUCE
)
AGAIN = (
    o.memoised(0)
    + o.MARK
    + o.memoised(1)
    + b"K\0"
    + o.memoised(2)
    + o.memoised(3)
    + b"\x89"
    + o.memoised(4)
    + o.TUPLE
    + o.REDUCE
)
EMPTIES = o.EMPTY_LIST + o.MARK + o.EMPTY_TUPLE * 60_000 + o.APPENDS


def pairs(*parts: Any) -> bytes:
    return o.EMPTY_DICT + o.MARK + b"".join(map(o.value, parts)) + o.SETITEMS


def listed(*parts: bytes) -> bytes:
    return o.EMPTY_LIST + o.MARK + b"".join(parts) + o.APPENDS


def beside(key: str, body: bytes) -> bytes:
    return pairs("w", o.tensor(), key, body)


def other_tensors(outer: str, keys: list[Any]) -> bytes:
    """Tensors that rules do not see, under keys below a key."""
    held = [part for key in keys for part in (key, AGAIN)]
    return pairs("state_dict", pairs("w", FIRST), f"optimizer{outer}", pairs(*held))


def dicts_around_one_list() -> bytes:
    shared = pairs(
        "t",
        o.tensor() + o.put(1),
        "inner",
        pairs("z", o.memoised(1)) + o.put(2),
        "big",
        EMPTIES + o.put(0),
    )
    many = [
        part
        for i in range(400)
        for part in (f"d{i}", pairs("t", o.memoised(1), "big", o.memoised(0), "z", o.memoised(2)))
    ]
    return pairs("first", shared, *many)


def parameters_with_one_state() -> bytes:
    call = o.old("torch._utils", "_rebuild_parameter_with_state")
    made = [
        call + o.value((o.memoised(0), True, o.call(ORDERED), o.memoised(1))) + o.REDUCE
        for _ in range(300)
    ]
    start = ("w", o.tensor() + o.put(0), "state", pairs("big", EMPTIES) + o.put(1))
    return pairs(
        *start, *[part for i, parameter in enumerate(made) for part in (f"p{i}", parameter)]
    )


def versions_of_one_list() -> bytes:
    many = [part for i in range(200) for part in (f"m{i}", o.memoised(0))]
    versions = (
        ORDERED
        + o.EMPTY_TUPLE
        + o.REDUCE
        + o.MARK
        + b"".join(map(o.value, ("m", EMPTIES + o.put(0), *many)))
        + o.SETITEMS
    )
    return (
        ORDERED
        + o.EMPTY_TUPLE
        + o.REDUCE
        + o.MARK
        + o.value("m.w")
        + o.tensor()
        + o.SETITEMS
        + pairs("_metadata", versions)
        + o.BUILD
    )


def calls_below_long_keys() -> bytes:
    inner = listed(o.found("posix", "mknod") + o.put(0) + b")R", *[o.memoised(0) + b")R"] * 20_000)
    for level in range(40):
        inner = pairs(f"{level}{'k' * 195}", inner)
    return beside("x", inner)


BLOB = b"B" + struct.pack("<I", 200_000) + bytes(200_000) + o.MEMOIZE
TEXT = o.value("t" * 200_000) + o.MEMOIZE
LONG = "k" * 300_000
BODIES: dict[str, Callable[[], bytes]] = {
    "bytes-in-3000-places": lambda: beside("x", listed(BLOB, o.memoised(0) * 3000)),
    "text-in-3000-places": lambda: beside("x", listed(TEXT, o.memoised(0) * 3000)),
    "a-long-key-over-3000-values": lambda: beside(LONG, listed(b"N" * 3000)),
    "a-long-key-over-3000-calls": lambda: beside(
        LONG,
        pairs(
            "z",
            o.found("posix", "mknod") + o.put(0) + b")R",
            *[p for i in range(3000) for p in (i, o.memoised(0) + b")R")],
        ),
    ),
    "calls-below-forty-long-keys": calls_below_long_keys,
    "tensors-with-paths-that-begin-alike": lambda: other_tensors(
        "q" * 600, [str(i) for i in range(6000)]
    ),
    "tensors-under-a-key-of-300-kilobytes": lambda: other_tensors(
        "q" * 300_000, [str(i) for i in range(6000)]
    ),
    "tensors-under-floats": lambda: other_tensors("", [i + 0.5 for i in range(6000)]),
    "dicts-around-one-list": dicts_around_one_list,
    "parameters-with-one-state": parameters_with_one_state,
    "versions-of-one-list": versions_of_one_list,
    "a-key-of-100000-dots": lambda: pairs(
        "w", o.tensor(), "sub", pairs("a" + ".a" * 100_000, o.tensor(), "b", o.tensor())
    ),
    "keys-of-50000-numbers": lambda: pairs(
        "a" + ".1" * 50_000, o.tensor(), "a" + ".2" * 50_000, o.tensor()
    ),
}


def sharing(name: str) -> bytes:
    """The archive with this one of `BODIES`."""
    return archive(data_pkl(o.stream(BODIES[name]())))
