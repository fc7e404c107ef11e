"""Hostile torch.distributed.checkpoint folders (D1 to D5): calls in .metadata and in byte entries,
places outside, chunks that lie.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import opcodes as o
from archives import archive, data_pkl
from hostile_streams import imported, touch
from opcodes import bytes_entry, chunk, metadata, size, stored, tensor_entry, where

Row = tuple[str, str, bool, Callable[[Path, str], Path]]
FOLDERS: list[Row] = []
# what is wrong with them stands in their archives, against what .metadata says
BEYOND_METADATA = {"dcp-transformed"}
# nothing is wrong with them but a value that is not known
CARRIED = {"call-in-a-byte-entry", "call-in-common"}

ITEM = archive(data_pkl(o.stream(o.tensor(), 2)))


def written(folder: Path, meta: bytes, files: dict[str, bytes] | None = None) -> Path:
    # outputs go beside it
    folder = folder / "ckpt"
    folder.mkdir()
    (folder / ".metadata").write_bytes(meta)
    for name, raw in ({"__0_0.distcp": ITEM} if files is None else files).items():
        (folder / name).write_bytes(raw)
    return folder


def good(entries: Any = None, places: Any = None, planner: Any = None, **more: Any) -> bytes:
    """The .metadata of `{"w": four floats}`."""
    held = {"w": tensor_entry()} if entries is None else entries
    at = {where("w"): stored(length=len(ITEM))} if places is None else places
    return metadata(held, at, {"w": ("w",)} if planner is None else planner, **more)


def live(name: str, rows: str, build: Callable[[Path, str], Path]) -> None:
    FOLDERS.append((name, rows, True, build))


def dead(
    name: str, rows: str, meta: Callable[[], bytes], files: dict[str, bytes] | None = None
) -> None:
    FOLDERS.append((name, rows, False, lambda folder, canary: written(folder, meta(), files)))


def bytes_item(folder: Path, canary: str) -> Path:
    """A call in the item of a byte entry, which torch unpickles although the tensors are read with
    weights_only.
    """
    raw = archive(data_pkl(o.stream(o.value([1, touch(canary)]))))
    entries = {"w": tensor_entry(), "step": bytes_entry()}
    places = {
        where("w"): stored(length=len(ITEM)),
        where("step", None): stored(offset=len(ITEM), length=len(raw)),
    }
    return written(
        folder,
        good(entries, places, {"w": ("w",), "step": ("step",)}),
        {"__0_0.distcp": ITEM + raw},
    )


def in_common(folder: Path, canary: str) -> Path:
    """A call among the values that Megatron keeps beside its tensors."""
    made = written(folder, good(planner=None))
    raw = archive(data_pkl(o.stream(o.value({"args": touch(canary), "iteration": 3}))))
    (made / "common.pt").write_bytes(raw)
    (made / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    return made


live(
    "call-in-planner-data",
    "D1 P1",
    lambda f, c: written(f, good(planner={"w": ("w",), "x": touch(c)})),
)
live("call-in-storage-meta", "D1 P1", lambda f, c: written(f, good(storage_meta=touch(c))))
live("call-as-version", "D1 P1", lambda f, c: written(f, good(version=touch(c))))
live("call-as-whole", "D1 P1", lambda f, c: written(f, o.stream(touch(c))))
live(
    "call-popped",
    "D1 P4",
    lambda f, c: written(f, good(planner=touch(c) + o.POP + o.value({"w": ("w",)}))),
)
live(
    "call-through-inst",
    "D1 P1",
    lambda f, c: written(f, good(planner=o.MARK + o.text(c) + b"iposix\nmknod\n")),
)
live(
    "call-in-protocol-0",
    "D1 P1",
    lambda f, c: written(f, b"cposix\nmknod\n(V" + c.encode() + b"\ntR."),
)
live(
    "call-through-getattr",
    "D1 P1",
    lambda f, c: written(
        f,
        good(planner=o.call(o.call(o.found("builtins", "getattr"), imported("posix"), "mknod"), c)),
    ),
)
live("call-in-a-byte-entry", "D1 P1 P2", bytes_item)
live("call-in-common", "D1 P1 P2", in_common)
live(
    "call-as-path",
    "D1 P1",
    lambda f, c: written(f, good(places={where("w"): stored(path=touch(c), length=len(ITEM))})),
)
dead("no-metadata-object", "D1", lambda: o.stream(o.value({"w": 1})))
dead("empty", "D1", lambda: b"")
dead("second-pickle", "D1 P7", lambda: good() + good())
dead(
    "fields-missing",
    "D1",
    lambda: o.stream(o.new("torch.distributed.checkpoint.metadata", "Metadata", {})),
)
dead("field-unknown", "D1", lambda: good(evil=1))


def place(name: str, rows: str, files: dict[str, bytes] | None = None, **fields: Any) -> None:
    dead(
        name,
        rows,
        lambda: good(places={where("w"): stored(**{"length": len(ITEM), **fields})}),
        files,
    )


place("path-that-climbs", "D2", path="../outside.distcp")
place("path-that-is-absolute", "D2", path="/etc/passwd")
place("path-in-a-folder", "D2", path="a/b.distcp")
place("path-with-nul", "D2", path="__0_0.distcp\0")
place("path-that-drives-a-terminal", "D2 P9", path="\x1b[31m__0_0.distcp")
place("path-of-another-kind", "D2", path="evil.sh", files={"evil.sh": ITEM})
place("path-a-number", "D2", path=7)
place("file-missing", "D4", path="__9_9.distcp")
place("offset-negative", "D2", offset=-1)
place("offset-outside", "D2", offset=2**40)
place("offset-true", "D2", offset=True)
place("length-negative", "D2", length=-1)
place("length-outside", "D2", length=len(ITEM) + 1)
place("length-beyond-64-bits", "D2", length=2**70)
place("transformed", "D2", transform_descriptors=["stream.zstd/1"])

TWO = {"v": tensor_entry(), "w": tensor_entry()}
BOTH = {"v": ("v",), "w": ("w",)}


def chunks(name: str, rows: str, *held: bytes, shape: bytes | None = None) -> None:
    dead(name, rows, lambda: good({"w": tensor_entry(shape, list(held))}))


dead(
    "places-overlap",
    "D2",
    lambda: good(
        TWO,
        {where("v"): stored(length=len(ITEM)), where("w"): stored(offset=8, length=len(ITEM) - 8)},
        BOTH,
    ),
)
chunks("chunk-with-a-hole", "D3", chunk(0, 2))
chunks("chunks-that-overlap", "D3", chunk(0, 3), chunk(1, 3))
chunks("chunk-outside", "D3", chunk(2, 4))
chunks("chunk-negative", "D3", chunk(-2, 4))
chunks(
    "chunk-of-another-rank",
    "D3",
    o.new(
        "torch.distributed.checkpoint.metadata",
        "ChunkStorageMetadata",
        {"offsets": size(0, 0), "sizes": size(4, 1)},
    ),
)
chunks("no-chunks", "D3")
chunks("huge-shape", "D3 P8", chunk(0, 2**62), shape=size(2**62))
chunks("shape-beyond-64-bits", "D3 P8", chunk(0, 2**70), shape=size(2**70))
chunks("shape-negative", "D3", shape=size(-4))
dead(
    "place-of-nobody",
    "D4",
    lambda: good(
        places={
            where("w"): stored(length=len(ITEM)),
            where("v"): stored(offset=len(ITEM), length=0),
        }
    ),
)
dead("entry-without-place", "D4", lambda: good(places={}))
dead(
    "place-at-another-offset", "D4", lambda: good(places={where("w", 2): stored(length=len(ITEM))})
)
dead(
    "place-twice",
    "D4",
    lambda: good(
        places=o.EMPTY_DICT + o.MARK + (where("w") + stored(length=len(ITEM))) * 2 + o.SETITEMS
    ),
)
dead(
    "entry-twice",
    "D4 T3",
    lambda: good(entries=o.EMPTY_DICT + o.MARK + (o.value("w") + tensor_entry()) * 2 + o.SETITEMS),
)
dead("list-index-of-a-billion", "D5", lambda: good(planner={"w": ("w", 10**9)}))
dead("list-index-negative", "D5", lambda: good(planner={"w": ("w", -1)}))
dead("path-of-nobody", "D5", lambda: good(planner={"w": ("w",), "v": ("v",)}))
AT = {where("v"): stored(length=len(ITEM)), where("w"): stored(offset=len(ITEM), length=len(ITEM))}
PAIR = {"__0_0.distcp": ITEM + ITEM}
dead("paths-that-collide", "D5", lambda: good(TWO, AT, {"v": ("a",), "w": ("a",)}), PAIR)
dead("path-through-another", "D5", lambda: good(TWO, AT, {"v": ("a",), "w": ("a", "b")}), PAIR)
dead("dict-and-list-at-once", "D5", lambda: good(TWO, AT, {"v": ("a", 0), "w": ("a", "b")}), PAIR)
dead("path-through-a-bare-key", "D5", lambda: good(TWO, AT, {"v": ("w", "b")}), PAIR)
# what has no path stands at the root, which the nested dict shows
BEYOND_METADATA.add("dcp-path-through-a-bare-key")
dead("path-of-nothing", "D5", lambda: good(planner={"w": ()}))


# archives that contradict .metadata


def held(name: str, rows: str, raw: bytes) -> None:
    """A folder whose one chunk is this archive, of which .metadata says that it is four floats."""
    BEYOND_METADATA.add(f"dcp-{name}")
    places = {where("w"): stored(length=len(raw))}
    dead(name, rows, lambda: good(places=places), {"__0_0.distcp": raw})


def of(body: bytes, *storages: bytes) -> bytes:
    return archive(
        data_pkl(o.stream(body, 2), {str(n): raw for n, raw in enumerate(storages or [bytes(16)])})
    )


held("chunk-of-another-dtype", "D3", of(o.tensor(o.storage(kind="IntStorage"))))
held("chunk-of-another-shape", "D3", of(o.tensor(shape=(2, 2), strides=(2, 1))))
held("chunk-of-two-tensors", "D3", of(o.value([o.tensor(), o.tensor()])))
held("chunk-that-is-a-dict", "D3", of(o.value({"w": o.tensor()})))
held("chunk-that-is-a-number", "D3", archive(data_pkl(o.stream(o.value(7), 2), {})))
held("chunk-beside-its-storage", "D2 T1", of(o.tensor(offset=1)))
held("strides-out-of-the-storage", "D2 T1", of(o.tensor(strides=(2,))))
held("chunk-with-a-second-storage", "D2 T4", of(o.tensor(), bytes(16), bytes(16)))
held("chunk-that-is-no-archive", "D2", bytes(len(ITEM)))
held("archive-cut-short", "D2", ITEM[:-1])
held("bytes-behind-the-archive", "D2", ITEM + b"\0")


def linked(folder: Path, canary: str) -> Path:
    (folder / "elsewhere").write_bytes(ITEM)
    made = written(folder, good(), {})
    (made / "__0_0.distcp").symlink_to(folder / "elsewhere")
    return made


FOLDERS.append(("data-file-that-is-a-link", "D2 I2", False, linked))
BEYOND_METADATA.add("dcp-data-file-that-is-a-link")
