"""What formats see of where a checkpoint lies: a folder of any home, the rules about names in it,
and the small files beside the tensors.

A migration carries configuration and tokenizers, never other weights: a stale `pytorch_model.bin`
beside new tensors would be loaded by somebody. What stays behind is listed, so nothing disappears
unsaid.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple, Protocol, TypeAlias

from ..core.errors import MigrateError, Report, fail, printable
from .blobs import CHANGED_HELP, FileBlob, Identity, difference
from .index import SideFile

# bytes; a file below may be a pointer of Git LFS, which is refused when it is opened
LARGEST_POINTER: Final = 1024
_POINTER: Final = re.compile(
    rb"version https://(?:git-lfs\.github\.com|hawser\.github\.com)/spec/v1\r?\n(?:[a-z0-9.-]+ "
    rb"[^\n]*\n)*size ([0-9]{1,18})\r?\n?"
)
MAX_ENTRIES = 100_000


def pointer_stands_for(content: bytes) -> int | None:
    """The size in bytes of the file that a pointer of Git LFS stands for, None if it is none."""
    found = _POINTER.match(content)
    return int(found[1]) if found else None


def plain_name(name: str, suffix: str = "") -> bool:
    """Whether `name` is that of a file in the same folder, on any system, and ends in `suffix`."""
    if not name.endswith(suffix) or name in ("", ".", "..", suffix) or len(name) > 255:
        return False
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return name.isprintable() and not any(c in name for c in "/\\~:")


def same_when_folded(names: list[str]) -> list[list[str]]:
    """The groups of names that a file system which ignores case takes for one."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(name.casefold(), []).append(name)
    return [sorted(g) for g in groups.values() if len(g) > 1]


Kind: TypeAlias = Literal["file", "folder", "link", "other"]


class Listed(NamedTuple):
    """An entry of a folder, as a listing has it. `identity` is that of the entry itself."""

    name: str
    kind: Kind
    identity: Identity


class Folder(Protocol):
    """What formats need of a folder: names, sizes, files. `local` has those of this machine,
    `stores` those of stores.

    Paths are relative to it, with `/` between the parts. `path` is how messages call it,
    `allow_links` whether the operator lets links lead anywhere.
    """

    path: str
    allow_links: bool

    @property
    def called(self) -> str:
        """The name of the folder itself."""

    def label(self, name: str) -> str:
        """The name as messages show it: with the folder's path before it."""

    def names(self, below: str = "") -> list[str]:
        """The sorted names of all entries, here or in the folder `below`. M901, M907, M914."""

    def listing(self, below: str = "") -> list[Listed]:
        """What lies here or in the folder `below`, by name. M901, M907, M914."""

    def is_folder(self, name: str) -> bool:
        """Whether an entry is a folder, or a link to one, which `names` refuses."""

    def below(self, name: str) -> Folder:
        """The folder `name` in this one, opened; to be closed by itself. M907 if it is a link."""

    def open(self, path: str) -> FileBlob:
        """The regular file at `path`, opened. M907 for a link that is not allowed or anything but a
        regular file, M966 for a pointer of Git LFS, else M901.
        """

    def expect(
        self,
        names: Sequence[str],
        needed: Callable[[bytes], int] | None = None,
        *,
        ends: bool = False,
    ) -> None:
        """These files are about to be opened, and their beginnings to be read, or their `ends`: a
        store fetches them side by side. `needed` says of the first bytes of a beginning how long it
        is.
        """

    def locate(self, path: str) -> Identity | None:
        """The identity of the file that `path` named when the folder was listed, None without."""

    def current(self, path: str) -> Identity | None:
        """The identity of the file that `path` names now, None if there is none."""

    def suspend(self) -> None:
        """Lets go of what is open until it is needed. Whatever is asked for from now on is asked of
        the same folder; M905 if another one is there by then.
        """

    def close(self) -> None:
        """Lets go of it for good; may be called twice."""


@dataclass(frozen=True, slots=True)
class Place:
    """What the operator pointed at: a folder, or one `file` in it, open. Formats sniff and open it.

    `at` is the dict in a nested checkpoint that rules shall work on; None if it was not given.
    `lazily`: whether of the chunks of a tensor that look alike a part is read, and the rest before
    it is used; None for no tensor. `extensions` undo what archives were written through, see
    `formats.open`. `parts`: what a person says of numbers in the names of parts, where these have
    two meanings. `carry`: what is outside the allow-list is to be written again as it is.
    """

    path: str
    folder: Folder
    file: FileBlob | None
    names: tuple[str, ...]
    at: str | None = None
    lazily: Callable[[str], bool] | None = None
    extensions: Any = None
    parts: str | None = None
    carry: bool = False

    def head(self, size: int = 16) -> bytes:
        """The first bytes of the file, b"" for a folder."""
        return self.file.read(0, min(size, self.file.size)) if self.file else b""

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
        self.folder.close()


def check_weight_names(folder: Folder, where: str, names: list[str], suffix: str) -> None:
    """M907 naming each name in `where` that is not a plain file name ending in `suffix`."""
    report = Report()
    for name in [n for n in names if not plain_name(n, suffix)][:20]:
        report.add(
            "M907",
            f"{folder.label(where)}: {printable(name) or 'an empty name'} is not a plain file "
            f"name ending in {suffix}",
            help="an index may only name files in its own folder",
        )
    report.check()


HISTORY = "migrate.history.json"
# hashes of what was decoded (running/part_hashes)
PARTS = "migrate.parts"
# what safetensors has no place for (formats/safetensors)
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
_OF_RANK = re.compile(r"__(0|[1-9][0-9]{0,6})" + re.escape(METADATA))


def metadata_files(names: Iterable[str]) -> list[str]:
    """The file that describes a distributed checkpoint, or those that its ranks leave when they
    save without collectives, by rank; none without.
    """
    names = list(names)
    if METADATA in names:
        return [METADATA]
    ranks = {int(found[1]): name for name in names if (found := _OF_RANK.fullmatch(name))}
    return [ranks[rank] for rank in sorted(ranks)]


def stays_behind(name: str, folder: bool = False) -> bool:
    """Whether a file or folder is never carried: weights, indexes, caches, partial output."""
    low = name.lower()
    if folder:
        return low.startswith(".") or low in CACHES or low.endswith(PARTIAL)
    # that of a rank is called `__3.metadata`
    return low.endswith(WEIGHT_SUFFIXES) or (name.endswith(METADATA) and name[:2] in (".m", "__"))


@dataclass(slots=True)
class Beside:
    """The files beside the tensors of one folder."""

    folder: Folder
    side_files: tuple[SideFile, ...] = ()
    left_out: tuple[str, ...] = ()
    identities: dict[str, Identity] = field(default_factory=dict)

    def read(self, path: str) -> bytes:
        """The bytes of the side file; KeyError for any other, M905 if it changed since."""
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
    """The side files of `folder`, without the files named in `taken`, the stamp, and hashes.

    Links that may not be followed are one M907 that names them; too many entries are M914.
    """
    out, side, left, report, seen = Beside(folder), [], [], Report(), 0
    pending = [""]
    while pending:
        here = pending.pop()
        found = folder.listing(here.rstrip("/"))
        seen += len(found)
        if seen > MAX_ENTRIES:
            fail("M914", f"{folder.label('')}: holds more than {MAX_ENTRIES} files")
        for name, kind, there in found:
            path = here + name
            if path in taken or path in (HISTORY, PARTS):
                continue
            if kind == "folder":
                deep = stays_behind(name, folder=True) or here.count("/") >= MAX_DEPTH
                left.append(path + "/") if deep else pending.append(path + "/")
                continue
            now = None
            if not stays_behind(name):
                now = _behind_link(folder, path, report) if kind == "link" else there
            if now is not None and now.size < LARGEST_POINTER and kind == "file":
                # a pointer would travel as if it were the file
                try:
                    folder.open(path).close()
                except MigrateError as error:
                    report.diagnostics += error.diagnostics
                    continue
            if now is None or now.size > MAX_SIZE or kind not in ("file", "link"):
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
        # with permission, a link to a folder or to nothing is listed, not carried
        if not folder.allow_links and len(report.diagnostics) < 20:
            report.diagnostics += error.diagnostics
        return None
    try:
        return blob.identity
    finally:
        blob.close()


def read_history(folder: Folder, names: tuple[str, ...]) -> bytes | None:
    """The bytes of the stamp in `folder`, None without one; M914 if it is too large."""
    if HISTORY not in names:
        return None
    blob = folder.open(HISTORY)
    try:
        if blob.size > MAX_HISTORY:
            fail("M914", f"{folder.label(HISTORY)}: {blob.size} bytes, more than {MAX_HISTORY}")
        return blob.read(0, blob.size)
    finally:
        blob.close()
