"""Hostile .pt archives: zips with two readings (Z1 to Z4), and tensors that lie about their storage
(T1 to T5).
"""

from __future__ import annotations

import gzip
import struct
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy
import opcodes as o
from archives import Member, archive, changed, data_pkl, genuine_pickle, safetensors, tar_of
from hostile_streams import touch

Row = tuple[str, str, bool, Callable[[str], bytes]]
ARCHIVES: list[Row] = []
# a checksum of a tensor is compared when the tensor is read
LATE = {"bad-crc", "crc-of-the-tensor-wrong"}
# what the decoders know and only the format refuses: it has no key
DECODED = {"storage-as-a-value", "tensor-as-a-key", "tensor-in-a-tuple-as-a-key"}
# sound archives with a value that nobody knows
CARRIED = {
    "call-in-a-dict-in-a-called-set", "storage-as-a-value", "tensor-as-a-key",
    "tensor-in-a-tuple-as-a-key",
    "hidden-in-a-storage", "module", "meta-tensor", "sparse-outside", "wrapper-of-any-function",
    "nested-tensor", "bad-crc",
    "storage-of-a-foreign-type", "persistent-id-of-no-storage", "persistent-id-too-short",
    "persistent-id-of-another-kind",
    "tensor-without-arguments", "tensor-of-a-called-storage", "function-as-a-factory",
    "function-as-a-hook", "more-of-a-tensor",
}  # fmt: skip


def live(name: str, rows: str, make: Callable[[str], bytes]) -> None:
    ARCHIVES.append((name, rows, True, make))


def dead(name: str, rows: str, make: Callable[[], bytes]) -> None:
    ARCHIVES.append((name, rows, False, lambda canary: make()))


def evil(canary: str) -> bytes:
    return o.stream(o.value({"w": touch(canary)}))


def good() -> list[Member]:
    return data_pkl(genuine_pickle())


def with_one_changed(name: str, **fields: Any) -> bytes:
    return archive(changed(good(), name, **fields))


def deflated(member: Member) -> Member:
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    return replace(member, method=8, packed=packer.compress(member.data) + packer.flush())


# Z1: which member is meant

# torch takes the first of two equal names, Python's zipfile the last
live("member-twice", "Z1", lambda c: archive([Member("archive/data.pkl", evil(c)), *good()]))
live(
    "central-name-differs",
    "Z1",
    lambda c: archive(
        [Member("archive/data.pkl", evil(c), local={"name": b"archive/dxta.pkl"}), *good()[1:]]
    ),
)
live("bad-crc", "Z3", lambda c: archive(changed(data_pkl(evil(c)), "data/0", crc=1)))
live(
    "before-the-archive",
    "Z1",
    lambda c: archive(data_pkl(evil(c)), before=b"PK\x03\x04\n#!/bin/sh\nexit\n"),
)
SECOND_NAME = (
    struct.pack("<HHBI", 0x7075, 5 + 16, 1, zlib.crc32(b"archive/data.pkl")) + b"archive/evil.pkl"
)
live(
    "unicode-path",
    "Z1",
    lambda c: archive(changed(data_pkl(evil(c)), "data.pkl", extra=SECOND_NAME)),
)
live(
    "compressed",
    "Z2",
    lambda c: archive(
        [deflated(m) if m.raw_name.endswith(b"data.pkl") else m for m in data_pkl(evil(c))]
    ),
)
live("comment", "Z1", lambda c: archive(data_pkl(evil(c)), comment=b"hello"))
live(
    "hidden-in-a-storage",
    "P2",
    lambda c: archive(data_pkl(o.stream(o.value({"w": touch(c)})), {"0": o.legacy(touch(c))})),
)
dead("case-equal-members", "Z1", lambda: archive([*good(), Member("archive/DATA.PKL", b"x")]))
dead(
    "two-roots-of-whole-archives",
    "Z1",
    lambda: archive(
        [*data_pkl(genuine_pickle(), root="first"), *data_pkl(genuine_pickle(), root="second")]
    ),
)
dead("two-roots", "Z1", lambda: archive([*good(), Member("other/data.pkl", genuine_pickle())]))
dead(
    "no-root",
    "Z1",
    lambda: archive([Member(m.raw_name.partition(b"/")[2], m.data) for m in good()]),
)
dead("after-the-archive", "Z1", lambda: archive(good(), after=b"x" * 100))
dead("second-end-record", "Z1", lambda: archive(good(), after=archive(good())[-22:]))
dead(
    "zip64-says-another-directory", "Z1", lambda: archive(good(), zip64={"start": 0, "entries": 1})
)
dead("zip64-record-elsewhere", "Z1", lambda: archive(good(), zip64={"record": 0}))
dead("zip64-of-a-billion-entries", "Z1 P8", lambda: archive(good(), zip64={"entries": 2**40}))
dead("end-says-fewer-entries", "Z1", lambda: archive(good(), end={"entries": 2}))
dead("end-says-more-entries", "Z1", lambda: archive(good(), end={"entries": 60000}))
dead("end-says-another-disk", "Z1", lambda: archive(good(), end={"disk": 1}))
dead("end-says-a-comment", "Z1", lambda: archive(good(), end={"comment": 30}))
dead("directory-outside", "Z1", lambda: archive(good(), end={"start": 2**31}))
dead(
    "member-hidden-from-the-directory",
    "Z1",
    lambda: archive(good(), hidden=[Member("archive/data/7", bytes(16))]),
)
dead("bytes-between", "Z1", lambda: archive(good(), between=b"x" * 64))
dead("local-size-differs", "Z1", lambda: with_one_changed("data/0", local={"size": 8}))
dead("local-method-differs", "Z1", lambda: with_one_changed("data/0", local={"method": 8}))
dead("local-flags-differ", "Z1", lambda: with_one_changed("data/0", local={"flags": 1}))
dead("local-crc-differs", "Z1 Z3", lambda: with_one_changed("data/0", local={"crc": 77}))
dead("member-offset-outside", "Z1", lambda: with_one_changed("data/0", offset=2**31))
dead(
    "two-members-in-one-place",
    "Z2",
    lambda: archive([*good(), Member("archive/data/1", bytes(16), offset=0)]),
)
dead("encrypted", "Z2", lambda: with_one_changed("data/0", flags=0x0801))
dead("unknown-flags", "Z2", lambda: with_one_changed("data/0", flags=0x8840))
dead("unknown-method", "Z2", lambda: with_one_changed("data/0", method=99))
dead("a-link", "Z2", lambda: with_one_changed("data/0", attributes=0o120777 << 16))
dead("member-comment", "Z2", lambda: with_one_changed("data/0", comment=b"x"))
dead(
    "unknown-extra-field",
    "Z2",
    lambda: with_one_changed("data/0", extra=struct.pack("<HH", 0xCAFE, 0)),
)
dead("member-that-climbs", "Z2", lambda: archive([*good(), Member("archive/../../evil", b"x")]))
dead("member-that-is-absolute", "Z2", lambda: archive([*good(), Member("/etc/evil", b"x")]))
dead("member-with-a-backslash", "Z2", lambda: archive([*good(), Member("archive\\..\\evil", b"x")]))
dead("member-with-nul", "Z2", lambda: archive([*good(), Member("archive/data/0\0.txt", b"x")]))
dead(
    "member-that-is-not-utf-8",
    "Z2 P9",
    lambda: archive([*good(), Member(b"archive/\xff\xfe", b"x")]),
)
dead(
    "member-that-drives-a-terminal",
    "Z2 P9",
    lambda: archive([*good(), Member("archive/\x1b[31m\u202ered", b"x")]),
)
dead(
    "bomb",
    "Z2 P8",
    lambda: archive(
        [
            deflated(m) if m.raw_name.endswith(b"data/0") else m
            for m in data_pkl(genuine_pickle(), {"0": bytes(50_000_000)})
        ]
    ),
)
dead("crc-of-the-tensor-wrong", "Z3", lambda: with_one_changed("data/0", crc=123456))
dead("crc-of-the-pickle-wrong", "Z3", lambda: with_one_changed("data.pkl", crc=123456))

# Z4: something else under the name

dead("seven-zip", "Z4", lambda: b"7z\xbc\xaf\x27\x1c\0\4" + bytes(500))
dead("gzip", "Z4", lambda: gzip.compress(archive(good())))
dead(
    "torchscript",
    "Z4",
    lambda: archive(
        [
            *good(),
            Member("archive/constants.pkl", genuine_pickle()),
            Member("archive/code/__torch__.py", b"x"),
        ]
    ),
)
dead(
    "no-pickle", "Z4", lambda: archive([m for m in good() if not m.raw_name.endswith(b"data.pkl")])
)
dead("empty-archive", "Z4", lambda: archive([]))
dead("two-bytes", "Z4", lambda: b"PK")
dead("nothing", "Z4", lambda: b"")
live(
    "tar-of-2016",
    "Z4",
    lambda c: tar_of(
        {
            "storages": o.stream(touch(c)),
            "tensors": o.stream(o.value(0)),
            "pickle": o.stream(o.value({})),
        }
    ),
)

# T1: tensors that are not what their storage holds


def tensor(
    name: str,
    rows: str,
    *,
    held: dict[str, bytes] | None = None,
    byteorder: bytes = b"little",
    **said: Any,
) -> None:
    facts = {k: said.pop(k) for k in ("key", "numel", "kind", "location") if k in said}
    pickle = o.stream(o.value({"w": o.tensor(o.storage(**facts), **said)}))
    dead(name, rows, lambda: archive(data_pkl(pickle, held, byteorder=byteorder)))


tensor("storage-missing", "T1", held={})
tensor("storage-short", "T1", held={"0": bytes(12)})
tensor("storage-long", "T1", held={"0": bytes(20)})
tensor("storage-key-climbs", "T1", key="../data.pkl")
tensor("storage-key-absolute", "T1", key="/etc/passwd")
tensor("storage-key-a-number", "T1", key=0)
tensor("storage-key-of-fifty-digits", "T1", key="9" * 50)
tensor("storage-of-a-foreign-type", "T1 P1", kind="os")
tensor("numel-negative", "T1", numel=-4)
tensor("numel-overflows", "T1", numel=2**62)
tensor("numel-beyond-64-bits", "T1", numel=2**70)
tensor("numel-a-text", "T1", numel="4")
tensor("numel-true", "T1", numel=True)
tensor("shape-beyond-storage", "T1", shape=(5,))
tensor("shape-overflows", "T1", shape=(2**32, 2**32), strides=(1, 1))
tensor("shape-beyond-64-bits", "T1", shape=(2**70,), strides=(0,))
tensor("shape-negative", "T1", shape=(-4,))
tensor("shape-of-texts", "T1", shape=("4",))
tensor("shape-of-a-thousand-axes", "T1", shape=(1,) * 1000, strides=(1,) * 1000)
tensor("strides-too-few", "T1", shape=(2, 2))
tensor("strides-negative", "T1", strides=(-1,))
tensor("strides-overflow", "T1", shape=(2,), strides=(2**63,))
tensor("offset-negative", "T1", offset=-1)
tensor("offset-outside", "T1", offset=4)
tensor("offset-a-float", "T1", offset=0.0)
tensor("view-outside", "T1", shape=(2, 2), strides=(3, 2))
tensor("four-terabytes-of-one-element", "T1", shape=(2**40,), strides=(0,))
tensor("unknown-byteorder", "T5", byteorder=b"middle")
tensor("big-endian", "T5", byteorder=b"big")
tensor("byteorder-of-a-megabyte", "T5", byteorder=b"little" * 200_000)


# what torch.save writes as a line may carry no more than a line
for line in (".format_version", ".storage_alignment", "version"):
    dead(
        f"{line.strip('.').replace('_', '-')}-of-a-megabyte",
        "T4",
        lambda line=line: with_one_changed(f"/{line}", data=bytes(1 << 20)),
    )
dead(
    "serialization-id-of-a-megabyte",
    "T4",
    lambda: archive([*good(), Member("archive/.data/serialization_id", bytes(1 << 20))]),
)
dead("crc-of-the-version-wrong", "Z3", lambda: with_one_changed("/version", crc=1))


def of_two(first: bytes, second: bytes, held: dict[str, bytes]) -> bytes:
    return archive(data_pkl(o.stream(o.value({"v": first, "w": second})), held))


dead(
    "storage-of-two-types",
    "T1",
    lambda: of_two(
        o.tensor(), o.tensor(o.storage(numel=2, kind="DoubleStorage"), (2,)), {"0": bytes(16)}
    ),
)
dead(
    "storage-of-two-lengths",
    "T1",
    lambda: of_two(o.tensor(), o.tensor(o.storage(numel=3), (3,)), {"0": bytes(16)}),
)
dead(
    "record-of-nobody",
    "T4",
    lambda: archive(data_pkl(genuine_pickle(), {"0": bytes(16), "1": bytes(16)})),
)


def whole(name: str, rows: str, body: bytes) -> None:
    dead(name, rows, lambda: archive(data_pkl(o.stream(o.value({"w": o.tensor(), "x": body})))))


def pairs(*items: Any) -> bytes:
    return o.EMPTY_DICT + o.MARK + b"".join(o.value(i) for i in items) + o.SETITEMS


dead(
    "key-of-a-state-dict-twice",
    "T3",
    lambda: archive(data_pkl(o.stream(pairs("w", o.tensor(), "w", o.tensor())))),
)
whole("persistent-id-of-no-storage", "T1", o.value("storage") + o.BINPERSID)
whole("persistent-id-too-short", "T1", o.value(("storage", "x")) + o.BINPERSID)
whole(
    "persistent-id-of-another-kind",
    "T1",
    o.value(("module", o.found("posix", "mknod"), "0", "cpu", 4)) + o.BINPERSID,
)
whole("tensor-without-arguments", "T1", o.call(o.found("torch._utils", "_rebuild_tensor_v2")))
whole("tensor-of-no-storage", "T1", o.tensor(o.value("storage")))
whole(
    "tensor-of-a-called-storage", "T1 P1", o.tensor(o.call(o.found("torch", "FloatStorage"), 2**40))
)

whole("storage-as-a-value", "T1", o.storage())
whole("tensor-as-a-key", "T1", pairs(o.tensor(), 1))
whole("tensor-in-a-tuple-as-a-key", "T1", pairs((1, o.tensor()), 1))


def overlapping() -> bytes:
    """Each tensor begins one element after the one before: 800 kB that would be written as 2.4
    GB.
    """
    held = o.storage(numel=200_000)
    views = {f"v{i}": o.tensor(held, shape=(200_000 - i,), offset=i) for i in range(3000)}
    return archive(data_pkl(o.stream(o.value(views)), {"0": bytes(800_000)}))


dead("three-thousand-views-of-one-storage", "T1 P8", overlapping)

# P1: calls in corners of values that are known


def numpy_dtype(canary: str) -> bytes:
    """A dtype whose flags are a call: nobody needs them, but whoever writes the value again as it
    stands writes the call.
    """
    made = o.call(o.found("numpy", "dtype"), "f4", False, True)
    return made + o.value((3, "<", None, None, None, -1, -1, touch(canary))) + o.BUILD


# its name before numpy 2.0, which a genuine unpickler there needs
CORE = "numpy.core" if numpy.__version__.startswith("1.") else "numpy._core"


def numpy_array(canary: str) -> bytes:
    begun = o.call(
        o.found(f"{CORE}.multiarray", "_reconstruct"),
        o.found("numpy", "ndarray"),
        (0,),
        bytearray(b"b"),
    )
    return begun + o.value((1, (2,), numpy_dtype(canary), False, bytearray(8))) + o.BUILD


def planted(body: bytes) -> bytes:
    return archive(data_pkl(o.stream(o.value({"w": o.tensor(), "x": body}))))


live("call-in-a-numpy-dtype", "P1", lambda c: planted(numpy_dtype(c)))
live("call-in-the-dtype-of-an-array", "P1", lambda c: planted(numpy_array(c)))
live(
    "call-in-a-dict-in-a-called-set",
    "P1",
    lambda c: planted(o.call(o.found("builtins", "set"), [pairs("a", touch(c))])),
)

# T2: what is no plain tensor

whole("module", "T2", o.new("torch.nn.modules.linear", "Linear", {"in_features": 4}))
whole(
    "meta-tensor",
    "T2",
    o.call(
        o.found("torch._utils", "_rebuild_meta_tensor_no_storage"),
        o.found("torch", "float32"),
        (4,),
        (1,),
        False,
    ),
)
SPARSE = (o.found("torch", "sparse_coo"), (o.tensor(), o.tensor(), o.value((2,)), True))
whole("sparse-outside", "T2", o.call(o.found("torch._utils", "_rebuild_sparse_tensor"), *SPARSE))
WRAPPED = (o.found("posix", "mknod"), o.found("torch", "Tensor"), ("nowhere",), {})
whole(
    "wrapper-of-any-function",
    "T2 P1",
    o.call(o.found("torch._tensor", "_rebuild_from_type_v2"), *WRAPPED),
)
whole(
    "nested-tensor",
    "T2",
    o.call(
        o.found("torch._utils", "_rebuild_nested_tensor"),
        o.tensor(),
        o.tensor(),
        o.tensor(),
        o.tensor(),
    ),
)

# T3: keys that are spelled in different ways, and are one key to whoever makes the dict


def numpy_number(dtype: str, raw: bytes, order: str = "<") -> bytes:
    made = (
        o.call(o.found("numpy", "dtype"), dtype, False, True)
        + o.value((3, order, None, None, None, -1, -1, 0))
        + o.BUILD
    )
    return o.call(o.found("numpy._core.multiarray", "scalar"), made, bytearray(raw))


ONE = numpy_number("f8", struct.pack("<d", 1.0))
whole(
    "numbers-of-numpy-that-are-one-key",
    "T3",
    pairs(ONE, "a", numpy_number("i8", struct.pack("<q", 1)), "b"),
)
whole("number-of-numpy-and-a-number", "T3", pairs(ONE, "a", True, "b"))
whole(
    "number-of-numpy-in-another-order",
    "T3",
    pairs(ONE, "a", numpy_number("f4", struct.pack(">f", 1.0), ">"), "b"),
)
whole(
    "text-of-numpy-and-a-text", "T3", pairs(numpy_number("U1", "a".encode("utf-32-le")), 1, "a", 2)
)
whole(
    "ranges-of-the-same-numbers",
    "T3",
    pairs(
        *[
            part
            for stop in (3, 4)
            for part in (o.call(o.found("builtins", "range"), 0, stop, 2), stop)
        ]
    ),
)
whole("array-as-a-key", "T3", pairs(numpy_array(""), 1).replace(touch(""), o.value(0)))

# and calls of what is known, with what nobody writes

whole("bytearray-by-its-size", "P1 P8", o.call(o.found("builtins", "bytearray"), 2**40))
whole("bytes-by-another-codec", "P1", o.call(o.found("_codecs", "encode"), "ab", "rot13"))
whole(
    "function-as-a-factory",
    "P1",
    o.call(o.found("collections", "defaultdict"), o.found("os", "system")),
)
NO_HOOKS = o.call(o.found("collections", "OrderedDict"))
HOOKS = NO_HOOKS + o.MARK + o.value(0) + o.found("os", "system") + o.SETITEMS
REBUILD = o.found("torch._utils", "_rebuild_tensor_v2")
whole("function-as-a-hook", "P1", o.call(REBUILD, o.storage(), 0, (4,), (1,), False, HOOKS))
whole("gradient-that-is-a-number", "T1", o.call(REBUILD, o.storage(), 0, (4,), (1,), 3, NO_HOOKS))
whole(
    "more-of-a-tensor",
    "T2",
    o.call(REBUILD, o.storage(), 0, (4,), (1,), False, NO_HOOKS, pairs("more", 1)),
)
whole("device-that-is-a-path", "T1", o.call(o.found("torch", "device"), "../../etc/passwd", 1))
dead(
    "safetensors-around-an-archive",
    "Z1",
    lambda: safetensors({"x": archive(data_pkl(genuine_pickle()))}),
)
