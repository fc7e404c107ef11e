"""Hostile GGUF files: headers that lie about counts, lengths and places (G1), key-values that do
(G2), and shards that do not belong together (G3).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path

from gguf_files import ARRAY, F32, Q4_K, TEXT, Tensor, bfloat16, floats, gguf, text, value

Row = tuple[str, str, Callable[[Path, str], Path]]
FOLDERS: list[Row] = []

X = Tensor((4,), F32, floats(1, 2, 3, 4))
GOOD = gguf({"x": X}, {"general.architecture": value("str", "llama")})


def file(name: str, rows: str, raw: Callable[[], bytes]) -> None:
    def build(folder: Path, canary: str) -> Path:
        path = folder / "model.gguf"
        path.write_bytes(raw())
        return path

    FOLDERS.append((name, rows, build))


def shards(name: str, files: dict[str, Callable[[], bytes]]) -> None:
    def build(folder: Path, canary: str) -> Path:
        inside = folder / "ckpt"
        inside.mkdir()
        for called, raw in files.items():
            (inside / called).write_bytes(raw())
        return inside

    FOLDERS.append((name, "G3", build))


def one(**fields: object) -> bytes:
    """A file with one tensor that claims these."""
    return gguf({"x": X._replace(**fields)})  # type: ignore[arg-type]


def key_value(raw: bytes) -> bytes:
    """A file whose only key has this type and value."""
    return gguf({"x": X}, {"k": raw})


def array(kind: int, count: int, items: bytes = b"") -> bytes:
    return struct.pack("<IIQ", ARRAY, kind, count) + items


file("cut-in-the-magic", "G1", lambda: b"GGU")
file("cut-in-the-counts", "G1", lambda: GOOD[:15])
file("cut-in-a-tensor", "G1", lambda: GOOD[:-17])
file("cut-in-a-name", "G1", lambda: GOOD[:30])
file("version-1", "G1", lambda: gguf({"x": X}, version=1))
file("version-4", "G1", lambda: gguf({"x": X}, version=4))
file("big-endian", "G1", lambda: gguf({"x": X}, order=">"))
file("2-to-the-63-tensors", "G1", lambda: gguf({"x": X}, counts=(2**63, 0)))
file("a-hundred-thousand-tensors", "G1", lambda: gguf({"x": X}, counts=(100_000, 0)))
file("2-to-the-63-key-values", "G1", lambda: gguf({"x": X}, counts=(1, 2**63)))
file("one-tensor-too-many", "G1", lambda: gguf({"x": X}, counts=(2, 0)))
file("a-tensor-twice", "G1", lambda: gguf([("x", X), ("x", X)]))
file("a-name-of-2-to-the-63", "G1", lambda: gguf()[:8] + struct.pack("<QQQ", 1, 0, 2**63))
file("a-name-without-text", "G1", lambda: gguf({"": X}))
file(
    "a-name-not-utf-8",
    "G1",
    lambda: gguf({"x": X}).replace(text("x"), text(b"\xff"), 1),
)
file("tensors-that-overlap", "G1", lambda: gguf({"x": X, "y": X._replace(offset=0)}))
file("a-tensor-within-another", "G1", lambda: gguf({"x": bfloat16(64), "y": X._replace(offset=32)}))
file("a-tensor-behind-the-file", "G1", lambda: one(offset=1 << 40))
file("a-tensor-at-2-to-the-63", "G1", lambda: one(offset=(1 << 64) - 32))
file("a-tensor-longer-than-the-file", "G1", lambda: one(lengths=(1 << 30,)))
file("2-to-the-63-elements", "G1", lambda: one(lengths=(1 << 63,)))
file("a-product-that-wraps", "G1", lambda: one(lengths=(1 << 32, 1 << 32, 1, 4)))
file("zero-hides-a-product", "G1", lambda: one(lengths=(1 << 32, 1 << 32, 0, 4)))
file("a-billion-axes", "G1", lambda: GOOD.replace(text("x") + b"\1", text("x") + b"\xff\xff", 1))
file("five-axes", "G1", lambda: one(lengths=(4, 1, 1, 1, 1)))
file("half-a-block", "G1", lambda: one(lengths=(128, 2), type=Q4_K, data=bytes(144)))
file("a-type-beyond-all", "G1", lambda: one(type=(1 << 32) - 1))
file("an-offset-that-is-not-aligned", "G1", lambda: gguf({"x": X, "y": X._replace(offset=36)}))
file("a-hole-between-tensors", "G1", lambda: gguf({"x": X, "y": X._replace(offset=64)}) + bytes(32))
file("bytes-behind-the-last-tensor", "G1", lambda: GOOD + bytes(64))
file("an-alignment-of-zero", "G1", lambda: gguf({"x": X}, {"general.alignment": value("u32", 0)}))
file("an-alignment-of-48", "G1", lambda: gguf({"x": X}, {"general.alignment": value("u32", 48)}))
file(
    "an-alignment-of-2-to-the-31",
    "G1",
    lambda: gguf({"x": X}, {"general.alignment": value("u32", 1 << 31)}),
)
file(
    "an-alignment-of-text",
    "G1",
    lambda: gguf({"x": X}, {"general.alignment": value("str", "32")}),
)
file(
    "a-tensor-called-as-a-type",
    "G1",
    lambda: gguf({"x": Tensor((256,), Q4_K, bytes(144)), "x_type": X}),
)

file("a-key-twice", "G2", lambda: gguf({"x": X}, [("k", value("u8", 1)), ("k", value("u8", 2))]))
file(
    "keys-that-are-one-in-json",
    "G2",
    lambda: gguf(
        {"x": X}, [("k.", value("u8", 1)), ("k.a", value("u8", 1)), ("k", value("u8", 2))]
    ),
)
file("a-key-of-40-segments", "G2", lambda: gguf({"x": X}, {"k" + ".k" * 40: value("u8", 1)}))
file(
    "keys-of-five-million-bytes",
    "G2",
    lambda: gguf({"x": X}, {f"{n:03}{'k' * 60_000}": value("u8", 1) for n in range(90)}),
)
file("a-value-of-type-99", "G2", lambda: key_value(struct.pack("<IQ", 99, 0)))
file("a-bool-of-2", "G2", lambda: key_value(struct.pack("<IB", 7, 2)))
file("a-text-of-2-to-the-63", "G2", lambda: key_value(struct.pack("<IQ", TEXT, 2**63)))
file("a-text-longer-than-the-file", "G2", lambda: key_value(struct.pack("<IQ", TEXT, 10**9)))
file("an-array-of-2-to-the-63-bytes", "G2", lambda: key_value(array(0, 2**63)))
file("an-array-of-2-to-the-61-doubles", "G2", lambda: key_value(array(12, 2**61)))
file("an-array-of-2-to-the-60-texts", "G2", lambda: key_value(array(TEXT, 2**60)))
file("an-array-of-texts-that-end", "G2", lambda: key_value(array(TEXT, 3, text("a"))))
file("an-array-of-arrays", "G2", lambda: key_value(array(ARRAY, 1, array(ARRAY, 1, b"")[4:])))
file("an-array-of-type-99", "G2", lambda: key_value(array(99, 1, bytes(64))))


def hole(name: str, kind: int, count: int) -> None:
    """A file of 100 MB that takes no room: an array of zeros, or of empty texts."""

    def build(folder: Path, canary: str) -> Path:
        path = folder / "model.gguf"
        path.write_bytes(key_value(array(kind, count)))
        os.truncate(path, 100_000_000)
        return path

    FOLDERS.append((name, "G2", build))


hole("a-header-beyond-the-limit", 0, 90_000_000)
hole("nine-million-texts", TEXT, 9_000_000)


def numbered(number: int, count: int, total: int, **tensors: Tensor) -> Callable[[], bytes]:
    values = {
        "split.no": value("u16", number),
        "split.count": value("u16", count),
        "split.tensors.count": value("i32", total),
    }
    return lambda: gguf(tensors, values)


A, B = "m-00001-of-00002.gguf", "m-00002-of-00002.gguf"
shards("a-shard-is-missing", {A: numbered(0, 2, 2, x=X)})
shards("a-shard-of-another-set", {A: numbered(0, 2, 2, x=X), B: numbered(1, 3, 2, y=X)})
shards("a-shard-twice", {A: numbered(0, 2, 2, x=X), B: numbered(0, 2, 2, y=X)})
shards("a-tensor-in-two-shards", {A: numbered(0, 2, 2, x=X), B: numbered(1, 2, 2, x=X)})
shards("shards-with-other-tensors", {A: numbered(0, 2, 3, x=X), B: numbered(1, 2, 3, y=X)})
shards("a-shard-called-otherwise", {"model.gguf": numbered(0, 2, 2, x=X)})
shards("several-files", {"a.gguf": lambda: GOOD, "b.gguf": lambda: GOOD})
shards("a-side-file-of-its-name", {"a.gguf": lambda: GOOD, "gguf.json": lambda: b"{}"})
