"""Folders held by descriptor, so that nothing in a checkpoint can lead the reader outside of it,
and the small files in them beside the tensors.

Every file is opened relative to a directory descriptor, without following a link, and must be a
regular file. The one link that needs no permission is the one huggingface_hub makes,
`snapshots/<rev>/…/name -> ../…/blobs/<hash>`; its text is taken apart and walked by descriptor, so
the system never resolves what an attacker wrote. `allow_links` (the operator's `--allow links`)
lets the system follow other links to regular files; folders that are links never count.

A clone without `git lfs` has pointers in place of weights: text files of the form of the Git LFS
specification (docs/spec.md there), of less than 1024 bytes, `version` in the first line, then `oid`
and `size`, in the order of their names. They are refused, and so is a URL, with the command that
fetches what is meant.

A migration carries configuration and tokenizers, never other weights: a stale `pytorch_model.bin`
beside new tensors would be loaded by somebody. What stays behind is listed, so nothing disappears
unsaid.
"""

from __future__ import annotations

import errno
import os
import re
import shlex
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Final, NoReturn

from ..core import log
from ..core.errors import MigrateError, Report, did_you_mean, fail, listed, option, printable
from ..core.types import PathLike
from .blobs import (
    CHANGED_HELP,
    DescriptorPool,
    FileBlob,
    Identity,
    describe_change,
    difference,
    identity,
    release,
)
from .index import SideFile

LARGEST_POINTER: Final = 1024
# what every pointer begins with
POINTER_HEAD: Final = b"version https://"
_POINTER: Final = re.compile(
    rb"version https://(?:git-lfs\.github\.com|hawser\.github\.com)/spec/v1\r?\n(?:[a-z0-9.-]+ "
    rb"[^\n]*\n)*size ([0-9]{1,18})\r?\n?"
)


def pointer_size(descriptor: int) -> int | None:
    """The size in bytes of the file that an open file is a pointer to, None if it is none."""
    head = os.pread(descriptor, LARGEST_POINTER, 0)
    found = _POINTER.match(head) if head.startswith(POINTER_HEAD) else None
    return int(found[1]) if found else None


def is_pointer(name: str, folder: int) -> bool:
    """Whether a regular file in the folder, which is given by its descriptor, is a pointer."""
    try:
        descriptor = os.open(
            name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW, dir_fd=folder
        )
    except OSError:
        return False
    try:
        return (
            os.fstat(descriptor).st_size < LARGEST_POINTER and pointer_size(descriptor) is not None
        )
    except OSError:
        return False
    finally:
        release(descriptor)


# a pathlib.Path has lost the second slash; one letter would be a drive
_SCHEME: Final = re.compile(r"([a-z][a-z0-9+.-]+):/{1,2}(.+)", re.IGNORECASE | re.DOTALL)
# as huggingface_hub allows them
_HUB_ID: Final = re.compile(r"[\w][\w.-]*/[\w][\w.-]*", re.ASCII)
_HUB_HOSTS: Final = ("huggingface.co", "www.huggingface.co", "hf.co")
_KINDS: Final = {"datasets": "dataset", "spaces": "space"}


def is_url(text: str) -> bool:
    """Whether it is written like a URL."""
    return _SCHEME.fullmatch(text) is not None


def how_to_fetch(text: str) -> str | None:
    """The command that downloads what a URL or an id of the Hub names, as help for the one who gave
    it; None for any other name.
    """
    found = _SCHEME.fullmatch(text)
    if found is None:
        return (
            f"if this is a model on the Hugging Face Hub, download it first:  {_hub(text)}"
            if _HUB_ID.fullmatch(text)
            else None
        )
    scheme, rest = found[1].lower(), found[2]
    here = shlex.quote(rest.rstrip("/").rpartition("/")[2] or "CKPT")
    url = shlex.quote(text)
    host, _, path = rest.partition("/")
    if scheme == "hf":
        command = _hub(rest)
    elif scheme in ("http", "https"):
        command = _hub(path) if host.lower() in _HUB_HOSTS else f"curl -L -o {here} {url}"
    elif scheme == "s3":
        command = f"aws s3 cp --recursive {url} {here}"
    elif scheme == "gs":
        command = f"gcloud storage cp --recursive {url} {here}"
    elif scheme == "file":
        return "give the path without `file://`"
    else:
        return "download it first, and give the path of the folder"
    return f"download it first:  {command}"


def _hub(path: str) -> str:
    """`hf download` for `[datasets/]org/name[@revision][/{tree,blob,resolve}/revision][/file]`."""
    parts = [part for part in path.partition("?")[0].split("/") if part]
    kind = _KINDS.get(parts[0]) if len(parts) > 2 else None
    org, name, *more = [*(parts[1:] if kind else parts), "", ""][: max(2, len(parts) - bool(kind))]
    name, _, revision = name.partition("@")
    if len(more) > 1 and more[0] in ("tree", "blob", "resolve"):
        revision, more = more[1], more[2:]
    words = ["hf", "download", f"{org}/{name}" if name else org]
    words += ["/".join(more)] if more else []
    words += ["--repo-type", kind] if kind else []
    words += ["--revision", revision] if revision not in ("", "main") else []
    return shlex.join([*words, "--local-dir", name or org])


FOLLOW = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
READ = FOLLOW | os.O_NOFOLLOW
ENTER = READ | os.O_DIRECTORY
MAX_ENTRIES = 100_000
_MAX_CLIMB = 8


def _link_help() -> str:
    return f"pass {option('allow', 'links')} if you trust where it leads"


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


class Folder:
    """A directory by its descriptor. Paths are relative to it, with `/` between the parts."""

    __slots__ = ("_absolute", "_descriptor", "_shelf", "_was", "allow_links", "path")

    def __init__(self, path: str, allow_links: bool = False) -> None:
        self.path, self.allow_links = path, allow_links
        self._absolute = os.path.abspath(path)
        # device and inode of a suspended one
        self._was: tuple[int, int] | None = None
        self._shelf = DescriptorPool(lambda path: self._regular(path)[0])
        # the operator named this path: links up to here are his own
        try:
            self._descriptor: int | None = os.open(path, FOLLOW | os.O_DIRECTORY)
        except OSError as error:
            fail("M901", f"{printable(path)}: cannot be opened: {error.strerror}")

    def label(self, name: str) -> str:
        """The name as messages show it: with the folder's path before it."""
        return printable(name if name and self.path == "." else os.path.join(self.path, name), 240)

    def names(self, below: str = "") -> list[str]:
        """The sorted names of all entries, here or in the folder `below`."""
        try:
            with self.entered(below.split("/") if below else []) as inside:
                found = sorted(os.listdir(inside))
        except OSError as error:
            fail("M901", f"{self.label(below)}: cannot be listed: {error.strerror}")
        if len(found) > MAX_ENTRIES:
            fail(
                "M914", f"{self.label(below)}: holds {len(found)} entries, more than {MAX_ENTRIES}"
            )
        return found

    def open(self, path: str) -> FileBlob:
        """The regular file at `path`, opened. M907 for a link that is not allowed or anything but a
        regular file, else M901.

        Of many files, only the first stay open; the others are opened again when they are read.
        """
        try:
            descriptor, status = self._regular(path)
        except OSError as error:
            many = (
                "raise the limit of open files (`ulimit -n`)"
                if error.errno in (errno.EMFILE, errno.ENFILE)
                else None
            )
            fail("M901", f"{self.label(path)}: cannot be opened: {error.strerror}", help=many)
        if (
            status.st_size < LARGEST_POINTER
            and os.pread(descriptor, len(POINTER_HEAD), 0) == POINTER_HEAD
            and (stands_for := pointer_size(descriptor)) is not None
        ):
            release(descriptor)
            self._refuse_pointer(path, stands_for)
        log.trace("opened %s, %d bytes", self.label(path), status.st_size)
        return FileBlob(path, descriptor, self.locate, self._shelf)

    def _regular(self, path: str) -> tuple[int, os.stat_result]:
        """A descriptor of the regular file at `path`, and what it says of it. OSError if it cannot
        be opened, M907 as `open`.
        """
        parts = path.split("/")
        if any(p in ("", ".", "..") or "\0" in p for p in parts):
            fail("M907", f"{self.label(path)}: not a path inside the checkpoint")
        with self.entered(parts[:-1]) as inside:
            descriptor = self._open(inside, parts[-1], path)
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            release(descriptor)
            fail("M907", f"{self.label(path)}: not a regular file")
        return descriptor, status

    def _refuse_pointer(self, path: str, stands_for: int) -> NoReturn:
        below, _, name = path.rpartition("/")
        with self.entered(below.split("/") if below else []) as inside:
            others = [
                other
                for other in sorted(os.listdir(inside))
                if other != name and is_pointer(other, inside)
            ]
        more = (
            (f"so {'is' if len(others) == 1 else 'are'} {listed(others, 4)} beside it",)
            if others
            else ()
        )
        fail(
            "M966",
            f"{self.label(path)}: a pointer of Git LFS, and not the {stands_for:,} bytes that it "
            "stands for",
            notes=more,
            help=f"fetch what it points at:  git -C {shlex.quote(printable(self.path, 400))} lfs "
            "pull",
        )

    def _open(self, inside: int, name: str, path: str) -> int:
        kind = os.stat(name, dir_fd=inside, follow_symlinks=False).st_mode
        if stat.S_ISLNK(kind):
            if not self.allow_links:
                return self._open_cached(inside, name, path)
            try:
                kind = os.stat(name, dir_fd=inside).st_mode
            except OSError as error:
                fail("M907", f"{self.label(path)}: a link that leads nowhere ({error.strerror})")
            if stat.S_ISREG(kind):
                return os.open(name, FOLLOW, dir_fd=inside)
        # looked at before it is opened: opening a device or a pipe is an act of its own
        if not stat.S_ISREG(kind):
            fail("M907", f"{self.label(path)}: not a regular file but {kind_of(kind)}")
        try:
            return os.open(name, READ, dir_fd=inside)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EMLINK):
                fail(
                    "M907",
                    f"{self.label(path)}: became a link while it was opened",
                    help=_link_help(),
                )
            raise

    def _open_cached(self, inside: int, name: str, path: str) -> int:
        """Follows `../…/blobs/<hash>` out of `snapshots/<rev>/…` as huggingface_hub lays it out,
        refuses any other link.
        """
        target = os.readlink(name, dir_fd=inside)
        *climb, beside, blob = target.split("/") if target.count("/") >= 3 else ["", ""]
        refusal = (
            f"{self.label(path)}: a link to {printable(target)}, which may lead outside the "
            "checkpoint"
        )
        if (
            beside != "blobs"
            or set(climb) != {".."}
            or len(climb) > _MAX_CLIMB
            or not plain_name(blob)
        ):
            fail("M907", refusal, help=_link_help())
        opened = [os.dup(inside)]
        try:
            for level in range(1, len(climb) + 1):
                opened.append(os.open("..", ENTER, dir_fd=opened[-1]))
                if _is_called("snapshots", opened[-2], opened[-1]) != (level == len(climb)):
                    fail("M907", refusal, help=_link_help())
            try:
                opened.append(os.open("blobs", ENTER, dir_fd=opened[-1]))
                kind = os.stat(blob, dir_fd=opened[-1], follow_symlinks=False).st_mode
                if stat.S_ISREG(kind):
                    return os.open(blob, READ, dir_fd=opened[-1])
            except OSError as error:
                fail(
                    "M907",
                    f"{self.label(path)}: its blob {printable(target)} cannot be opened: "
                    f"{error.strerror}",
                )
            fail(
                "M907",
                f"{self.label(path)}: its blob {printable(target)} is not a regular file but "
                f"{kind_of(kind)}",
            )
        finally:
            for descriptor in opened:
                release(descriptor)

    @contextmanager
    def entered(self, parts: list[str]) -> Iterator[int]:
        """The descriptor of the folder `parts` below this one. A link there is always refused."""
        here = self._again() if self._descriptor is None else os.dup(self._descriptor)
        try:
            for part in parts:
                try:
                    below = os.open(part, ENTER, dir_fd=here)
                except OSError as error:
                    if error.errno in (errno.ELOOP, errno.EMLINK, errno.ENOTDIR):
                        _refuse_folder(self.label("/".join(parts)), part, here)
                    raise
                release(here)
                here = below
            yield here
        finally:
            release(here)

    def locate(self, path: str) -> Identity | None:
        """The identity of the file that `path` names now, None if there is none."""
        *parents, name = path.split("/")
        try:
            with self.entered(parents) as inside:
                return identity(os.stat(name, dir_fd=inside))
        except OSError:
            return None

    def suspend(self) -> None:
        """Closes the descriptor. Whatever is asked for from now on opens the folder by its path, as
        long as that takes; M905 if another one is there by then.
        """
        if self._descriptor is not None:
            status = os.fstat(self._descriptor)
            self._was = status.st_dev, status.st_ino
            release(self._descriptor)
            self._descriptor = None

    def _again(self) -> int:
        """A descriptor of the suspended folder, which is the caller's. OSError if it is gone."""
        if self._was is None:
            raise ValueError(f"{self.path} is closed")
        here = os.open(self._absolute, FOLLOW | os.O_DIRECTORY)
        status = os.fstat(here)
        if (status.st_dev, status.st_ino) != self._was:
            release(here)
            change = describe_change(self.path, "another folder has its name")
            fail("M905", change, help=CHANGED_HELP)
        return here

    def close(self) -> None:
        if self._descriptor is not None:
            release(self._descriptor)
        self._descriptor = self._was = None


def _is_called(name: str, child: int, parent: int) -> bool:
    try:
        named = os.stat(name, dir_fd=parent, follow_symlinks=False)
    except OSError:
        return False
    return os.path.samestat(named, os.fstat(child))


def kind_of(mode: int) -> str:
    """What a file of this mode is called."""
    for test, word in (
        (stat.S_ISREG, "a file"),
        (stat.S_ISDIR, "a folder"),
        (stat.S_ISLNK, "a link"),
        (stat.S_ISFIFO, "a pipe"),
        (stat.S_ISSOCK, "a socket"),
    ):
        if test(mode):
            return word
    return "a device"


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


def find_place(path: PathLike, allow_links: bool = False, at: str | None = None) -> Place:
    """The place at `path`, opened; M917 without, M907 if it is neither file nor folder."""
    where = os.fspath(path)
    try:
        kind = os.stat(where).st_mode
    except (FileNotFoundError, NotADirectoryError):
        if os.path.islink(where):
            fail("M907", f"{printable(where, 240)}: a link that leads nowhere")
        if is_url(where):
            fail(
                "M917",
                f"{printable(where, 240)}: a URL, and only files are read",
                help=how_to_fetch(where),
            )
        fail(
            "M917",
            f"{printable(where, 240)}: no such file or folder",
            help=_nearest(where) or how_to_fetch(where),
        )
    except (OSError, ValueError) as error:
        code = "M907" if getattr(error, "errno", None) == errno.ELOOP else "M901"
        fail(
            code,
            f"{printable(where, 240)}: cannot be opened: "
            f"{getattr(error, 'strerror', None) or error}",
        )
    if stat.S_ISDIR(kind):
        folder = Folder(where, allow_links)
        try:
            return Place(where, folder, None, tuple(folder.names()), at)
        except BaseException:
            folder.close()
            raise
    if not stat.S_ISREG(kind):
        fail("M907", f"{printable(where, 240)}: not a regular file but {kind_of(kind)}")
    parent, name = os.path.split(where)
    folder = Folder(parent or ".", allow_links)
    try:
        return Place(where, folder, folder.open(name), (name,), at)
    except BaseException:
        folder.close()
        raise


def _nearest(path: str) -> str | None:
    parent, name = os.path.split(path.rstrip("/"))
    try:
        return did_you_mean(name, os.listdir(parent or "."))
    except OSError:
        return None


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
            if path in taken or path in (HISTORY, PARTS):
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
            if now is not None and now.size < LARGEST_POINTER and stat.S_ISREG(status.st_mode):
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


def _refuse_folder(label: str, name: str, inside: int) -> NoReturn:
    """M907 for what stands where a folder of the checkpoint should."""
    try:
        target = printable(os.readlink(name, dir_fd=inside))
    except OSError:
        fail("M907", f"{label}: {printable(name)} is not a folder of the checkpoint")
    fail(
        "M907",
        f"{label}: a link to {target}, and links to folders are not followed",
        help="pass the folder that it leads to, or put that folder in its place",
    )


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
