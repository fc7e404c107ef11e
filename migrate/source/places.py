"""Where checkpoints lie: what an operator names is found and opened here, and what is asked about a
location is asked here, so that planning and running never ask the operating system about it.
"""

from __future__ import annotations

import errno
import os
import re
import shlex
import stat
from collections.abc import Sequence
from typing import Final

from ..core.errors import did_you_mean, fail, printable
from ..core.types import PathLike
from .local import LocalFolder, kind_of
from .paths import Folder, Place

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
        folder = LocalFolder(where, allow_links)
        try:
            return Place(where, folder, None, tuple(folder.names()), at)
        except BaseException:
            folder.close()
            raise
    if not stat.S_ISREG(kind):
        fail("M907", f"{printable(where, 240)}: not a regular file but {kind_of(kind)}")
    parent, name = os.path.split(where)
    folder = LocalFolder(parent or ".", allow_links)
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


def open_folder(path: str, allow_links: bool = False) -> Folder:
    """The folder at `path`, or the one that the file there lies in."""
    return LocalFolder(path if is_folder(path) else os.path.dirname(path) or ".", allow_links)


def is_folder(path: str) -> bool:
    """Whether a folder is there."""
    return os.path.isdir(path)


def same_location(one: str, other: str) -> bool:
    """Whether both lead to the same place."""
    return os.path.realpath(one) == os.path.realpath(other)


def overlap(one: str, other: str) -> bool:
    """Whether they are the same place, or one of them lies in the other."""
    here, there = os.path.realpath(one), os.path.realpath(other)
    return os.path.commonpath((here, there)) in (here, there)


def exists(path: str) -> bool:
    """Whether anything is there."""
    return os.path.exists(path)


def holds(location: str, path: str, files: Sequence[str] = ()) -> bool:
    """Whether the file `path` of this machine lies in a checkpoint: in its folder or, where that is
    a file, as itself or as one of `files` beside it.
    """
    place, home = os.path.realpath(path), os.path.realpath(location)
    if not os.path.isdir(home):
        parent = os.path.dirname(home)
        return place in (home, *(os.path.realpath(os.path.join(parent, name)) for name in files))
    return place == home or place.startswith(os.path.join(home, ""))


def look_around(path: str) -> tuple[str, int]:
    """The location as a plan records it, which means the same wherever it is read, and the bytes
    that are free there.
    """
    place = os.path.abspath(path)
    room = os.statvfs(os.path.dirname(place) or ".")
    return place, room.f_bavail * room.f_frsize
