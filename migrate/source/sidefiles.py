"""The small files beside the tensors: which of them travel with a migration, and which are only
listed.

A migration carries configuration and tokenizers, never other weights: a stale `pytorch_model.bin`
beside new tensors would be loaded by somebody. What stays behind is listed, so nothing disappears
unsaid.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from operator import itemgetter

from ..core.errors import MigrateError, Report, fail
from . import pointers
from .blobs import CHANGED_HELP, Identity, difference, identity
from .index import SideFile
from .paths import MAX_ENTRIES, Folder

HISTORY = "migrate.history.json"
# what safetensors has no place for (formats/_items_file)
ITEMS = "migrate.items.json"
MAX_SIZE = 50_000_000  # bytes; tokenizer.json reaches some tens of MB
MAX_HISTORY = 64_000_000
MAX_DEPTH = 3
PARTIAL = ".migrate-partial"

WEIGHT_SUFFIXES = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".gguf",
    ".ggml",
    ".h5",
    ".msgpack",
    ".onnx",
    ".onnx_data",
    ".npz",
    ".npy",
    ".distcp",
    ".tflite",
    ".index.json",
    PARTIAL,
)
CACHES = ("__pycache__", "cache", "node_modules")
# of a folder that torch.distributed.checkpoint wrote
METADATA = ".metadata"


def stays_behind(name: str, folder: bool = False) -> bool:
    """Whether a file or folder of this name is never carried: weights, their indexes, caches,
    hidden folders, partial output.
    """
    low = name.lower()
    if folder:
        return low.startswith(".") or low in CACHES or low.endswith(PARTIAL)
    return low.endswith(WEIGHT_SUFFIXES) or name == METADATA


@dataclass(slots=True)
class Beside:
    """The files beside the tensors of one folder."""

    folder: Folder
    side_files: tuple[SideFile, ...] = ()
    left_out: tuple[str, ...] = ()
    identities: dict[str, Identity] = field(default_factory=dict)

    def read(self, path: str) -> bytes:
        """The bytes of the side file; KeyError if it is none, M905 if it is not the file that was
        listed.
        """
        then = self.identities[path]
        blob = self.folder.open(path)
        try:
            change = difference(then, blob.identity)
            if change:
                fail(
                    "M905",
                    f"{self.folder.label(path)}: changed since it was listed: {change}",
                    help=CHANGED_HELP,
                )
            return blob.read(0, blob.size)
        finally:
            blob.close()


def look_beside(folder: Folder, taken: frozenset[str]) -> Beside:
    """The side files of `folder`, without the files named in `taken` and without the stamp.

    Links that may not be followed are one M907 that names them; more than MAX_ENTRIES entries are
    M914.
    """
    out, side, left, report, seen = Beside(folder), [], [], Report(), 0
    pending = [""]
    while pending:
        here = pending.pop()
        parts = here.split("/")[:-1]
        try:
            with folder.entered(parts) as inside, os.scandir(inside) as entries:
                found = sorted(
                    ((e.name, e.stat(follow_symlinks=False)) for e in entries), key=itemgetter(0)
                )
        except OSError as error:
            fail("M901", f"{folder.label(here)}: cannot be listed: {error.strerror}")
        seen += len(found)
        if seen > MAX_ENTRIES:
            fail("M914", f"{folder.label('')}: holds more than {MAX_ENTRIES} files")
        for name, status in found:
            path = here + name
            if path in taken or path == HISTORY:
                continue
            if stat.S_ISDIR(status.st_mode):
                deep = stays_behind(name, folder=True) or len(parts) >= MAX_DEPTH
                left.append(path + "/") if deep else pending.append(path + "/")
                continue
            now = None
            if not stays_behind(name):
                now = (
                    _behind_link(folder, path, report)
                    if stat.S_ISLNK(status.st_mode)
                    else identity(status)
                )
            if now is not None and now.size < pointers.LARGEST and stat.S_ISREG(status.st_mode):
                # a pointer would travel as if it were the file
                try:
                    folder.open(path).close()
                except MigrateError as error:
                    report.diagnostics += error.diagnostics
                    continue
            if (
                now is None
                or now.size > MAX_SIZE
                or not (stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode))
            ):
                left.append(path)
            else:
                side.append(SideFile(path, now.size))
                out.identities[path] = now
    report.check()
    out.side_files, out.left_out = tuple(sorted(side)), tuple(sorted(left))
    return out


def _behind_link(folder: Folder, path: str, report: Report) -> Identity | None:
    try:
        blob = folder.open(path)
    except MigrateError as error:
        # with permission given, a link to a folder or to nothing is like a pipe: listed, not
        # carried
        if not folder.allow_links and len(report.diagnostics) < 20:
            report.diagnostics += error.diagnostics
        return None
    try:
        return blob.identity
    finally:
        blob.close()


def read_history(folder: Folder, names: tuple[str, ...]) -> bytes | None:
    """The bytes of the stamp in `folder`, None without one; M914 if it is larger than a stamp can
    be.
    """
    if HISTORY not in names:
        return None
    blob = folder.open(HISTORY)
    try:
        if blob.size > MAX_HISTORY:
            fail("M914", f"{folder.label(HISTORY)}: {blob.size} bytes, more than {MAX_HISTORY}")
        return blob.read(0, blob.size)
    finally:
        blob.close()
