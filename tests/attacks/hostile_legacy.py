"""Hostile torch.save streams of before 1.6: a call in each of the five pickles, storages that lie,
and pickles that are no torch file.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import opcodes as o
from hostile_streams import touch

Row = tuple[str, str, bool, Callable[[str], bytes], bool]
FILES: list[Row] = []


def add(
    name: str, rows: str, live: bool, make: Callable[[str], bytes], carried: bool = False
) -> None:
    FILES.append((name, rows, live, make, carried))


def good(**other: bytes) -> bytes:
    return o.legacy(o.value({"w": o.legacy_tensor()}), **other)


def evil(canary: str) -> bytes:
    return o.stream(touch(canary))


add("raw-pickle", "P1 Z4", True, evil)
add(
    "raw-pickle-of-protocol-0",
    "P1 Z4",
    True,
    lambda c: b"cposix\nmknod\n(V" + c.encode() + b"\ntR.",
)
add("call-as-magic-number", "P1", True, lambda c: good(magic=evil(c)))
add("call-in-system-info", "P1", True, lambda c: good(system=evil(c)))
add(
    "call-in-the-object",
    "P1",
    True,
    lambda c: o.legacy(o.value({"w": o.legacy_tensor(), "x": touch(c)})),
    carried=True,
)
add("call-in-the-keys", "P1", True, lambda c: good(keys=evil(c)))
add("other-magic-number", "Z4", False, lambda c: good(magic=o.stream(o.value(12345))))
add(
    "big-endian",
    "T5",
    False,
    lambda c: good(
        system=o.stream(
            o.value({"protocol_version": 1001, "little_endian": False, "type_sizes": {}})
        )
    ),
)
add("cut-in-the-object", "P7", False, lambda c: good()[:150])
add("cut-in-the-data", "T1", False, lambda c: good()[:-1])
add("bytes-after-the-data", "P7", False, lambda c: good() + b"\0")
add("key-unknown", "T1", False, lambda c: good(keys=o.stream(o.value(["1"]))))
add(
    "key-twice",
    "T3",
    False,
    lambda c: good(keys=o.stream(o.value(["0", "0"])), data=(struct.pack("<q", 4) + bytes(16)) * 2),
)
add(
    "key-of-nobody",
    "T4",
    False,
    lambda c: good(keys=o.stream(o.value(["0", "1"])), data=(struct.pack("<q", 4) + bytes(16)) * 2),
)
add("keys-no-list", "T1", False, lambda c: good(keys=o.stream(o.value("0"))))
add("count-negative", "T1", False, lambda c: good(data=struct.pack("<q", -4) + bytes(16)))
add("count-huge", "T1 P8", False, lambda c: good(data=struct.pack("<q", 2**62) + bytes(16)))
add("count-other-than-said", "T1", False, lambda c: good(data=struct.pack("<q", 3) + bytes(12)))
add("tensor-outside", "T1", False, lambda c: o.legacy(o.value({"w": o.legacy_tensor(numel=2)})))


def viewed() -> bytes:
    """A storage that is a part of another one, as only early releases of torch saved it: sound, and
    not read.
    """
    held = (
        o.value(("storage", o.old("torch", "FloatStorage"), "0", "cpu", 4, ("1", 0, 4)))
        + o.BINPERSID
    )
    return o.legacy(o.value({"w": o.tensor(held), "v": o.legacy_tensor()}))


add("storage-that-is-a-view", "T1", False, lambda c: viewed(), carried=True)
