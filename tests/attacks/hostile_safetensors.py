"""Hostile safetensors files (S1 to S3), indexes (I1, I3) and folders of links and devices (I2).

`test_safetensors_headers.py` has the headers one by one; here stands one of each kind, to go
through every command.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from archives import safetensors, with_header

Row = tuple[str, str, Callable[[Path, str], Path]]
FOLDERS: list[Row] = []

GOOD = safetensors({"x": b"abcd"})
INDEX = "model.safetensors.index.json"


def file(name: str, rows: str, raw: Callable[[], bytes]) -> None:
    def build(folder: Path, canary: str) -> Path:
        path = folder / "model.safetensors"
        path.write_bytes(raw())
        return path

    FOLDERS.append((name, rows, build))


def folder(name: str, rows: str, fill: Callable[[Path], Any]) -> None:
    def build(where: Path, canary: str) -> Path:
        inside = where / "ckpt"
        inside.mkdir()
        (where / "outside.safetensors").write_bytes(GOOD)
        fill(inside)
        return inside

    FOLDERS.append((name, rows, build))


def entry(
    begin: int = 0, end: int = 4, dtype: str = "U8", shape: Any = (4,), **more: Any
) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end], **more}


file("header-beyond-the-limit", "S1", lambda: struct.pack("<Q", 2**63) + b"{}")
file("header-longer-than-the-file", "S1", lambda: struct.pack("<Q", 90_000_000) + b"{}")
file(
    "header-of-brackets",
    "S1",
    lambda: with_header(b'{"a":' + b"[" * 3_000_000 + b"]" * 3_000_000 + b"}"),
)
file(
    "header-too-deep",
    "S1",
    lambda: with_header(b'{"a":' + b"[" * 2000 + b"]" * 2000 + b" " * 40000 + b"}"),
)
file("header-not-utf-8", "S1", lambda: with_header(b'{"\xff":{}}'))
file(
    "header-of-half-a-pair",
    "S1 P9",
    lambda: with_header(rb'{"\ud800":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'),
)
file(
    "header-with-nan",
    "S1",
    lambda: with_header(b'{"a":{"dtype":"U8","shape":[NaN],"data_offsets":[0,0]}}'),
)
file("a-pickle", "S1 P1", lambda: b"\x80\x04cposix\nmknod\n(X\x04\0\0\0evilR.")
file(
    "key-twice-by-escape",
    "S2",
    lambda: with_header(
        b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"\\u0061":{"dtype":"I8","shape":[0],"data_offsets":[0,0]}}'
    ),
)
file("overlap", "S3", lambda: with_header({"a": entry(), "b": entry(2, 6)}, bytes(6)))
file("hole", "S3", lambda: with_header({"a": entry(), "b": entry(6, 10)}, bytes(10)))
file("tail", "S3", lambda: with_header({"a": entry()}, bytes(5)))
file(
    "overflow-behind-a-zero", "S3", lambda: with_header({"a": entry(0, 0, shape=[0, 2**32, 2**32])})
)
file(
    "rank-of-five-thousand",
    "S3",
    lambda: with_header({"a": entry(shape=[1] * 5000 + [4])}, bytes(4)),
)
file("unknown-dtype", "S3", lambda: with_header({"a": entry(dtype="OBJECT")}, bytes(4)))
file(
    "names-that-drive-a-terminal",
    "S3 P9",
    lambda: with_header({"\x1b[31mred\u202e\n": entry(0, 5)}, bytes(5)),
)


def index(name: str, value: Any, rows: str = "I1") -> None:
    def fill(where: Path) -> None:
        (where / "model-00001-of-00001.safetensors").write_bytes(GOOD)
        (where / INDEX).write_text(
            json.dumps({"weight_map": {"x": "model-00001-of-00001.safetensors", "y": value}})
        )

    folder(f"index-{name}", rows, fill)


index("climbs", "../outside.safetensors")
index("is-absolute", "/etc/passwd.safetensors")
index("names-proc", "/proc/self/mem")
index("climbs-with-backslashes", "..\\outside.safetensors")
index("with-nul", "x.safetensors\0")
index("in-a-home", "~/x.safetensors")
index("is-a-url", "https://example.com/x.safetensors")
index("names-nothing", "")
index("names-a-pickle", "pytorch_model.bin")
index("in-other-letters", "x\uff0esafetensors")
index("turned-around", "\u202ex.safetensors", "I1 P9")
index("a-number", 7)
index("a-list", ["x.safetensors"])


def mapped(where: Path, stems: list[str], entries: str) -> None:
    """Files with one tensor each, and an index with these entries as they are written."""
    for stem in stems:
        (where / f"{stem}.safetensors").write_bytes(GOOD)
    (where / INDEX).write_text(f'{{"weight_map":{{{entries}}}}}')


folder(
    "index-without-a-map",
    "I3",
    lambda f: ((f / "m.safetensors").write_bytes(GOOD), (f / INDEX).write_text("{}")),
)
folder(
    "index-of-a-list",
    "I3",
    lambda f: ((f / "m.safetensors").write_bytes(GOOD), (f / INDEX).write_text("[]")),
)
folder(
    "index-with-a-key-twice",
    "I3 S2",
    lambda f: mapped(f, ["m"], '"x":"m.safetensors","x":"n.safetensors"'),
)
folder("index-of-another-key", "I3", lambda f: mapped(f, ["m"], '"y":"m.safetensors"'))
folder(
    "index-of-a-missing-file",
    "I3",
    lambda f: (f / INDEX).write_text('{"weight_map":{"x":"m.safetensors"}}'),
)
folder(
    "two-indexes",
    "I3",
    lambda f: (
        mapped(f, ["m"], '"x":"m.safetensors"'),
        (f / f"n{INDEX}").write_text((f / INDEX).read_text()),
    ),
)
folder(
    "key-in-two-shards",
    "I3",
    lambda f: [(f / f"model-0000{i}-of-00002.safetensors").write_bytes(GOOD) for i in (1, 2)],
)
folder(
    "shard-of-a-hundred-thousand",
    "I3 P8",
    lambda f: (f / "model-000001-of-100000.safetensors").write_bytes(GOOD),
)
folder(
    "names-equal-but-for-case",
    "I3",
    lambda f: mapped(f, ["m", "M"], '"x":"m.safetensors","y":"M.safetensors"'),
)


def weight(name: str, make: Callable[[Path], Any]) -> None:
    folder(f"weights-are-{name}", "I2", lambda f: make(f / "model.safetensors"))


def bound(path: Path) -> None:
    """A socket, bound by a relative name: the name of a socket may have 107 bytes."""
    before = Path.cwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    finally:
        os.chdir(before)


weight("a-link-outside", lambda p: p.symlink_to("../outside.safetensors"))
weight("a-link-to-a-device", lambda p: p.symlink_to("/dev/zero"))
weight("a-link-to-itself", lambda p: p.symlink_to(p.name))
weight("a-link-to-nothing", lambda p: p.symlink_to("gone"))
weight("a-link-that-looks-like-a-cache", lambda p: p.symlink_to("../../blobs/f00d"))
weight("a-pipe", lambda p: os.mkfifo(p))
weight("a-folder", lambda p: p.mkdir())
weight("a-socket", bound)
folder(
    "side-file-is-a-link-outside",
    "I2",
    lambda f: (
        (f / "model.safetensors").write_bytes(GOOD),
        (f / "config.json").symlink_to("/etc/passwd"),
    ),
)
folder(
    "stamp-is-a-link-outside",
    "I2",
    lambda f: (
        (f / "model.safetensors").write_bytes(GOOD),
        (f / "migrate.history.json").symlink_to("/etc/passwd"),
    ),
)
folder(
    "index-is-a-link-outside",
    "I2",
    lambda f: ((f / "model.safetensors").write_bytes(GOOD), (f / INDEX).symlink_to("/etc/passwd")),
)
