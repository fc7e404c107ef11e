"""Where checkpoints lie: what an operator names is found and opened here, and what is asked about a
location is asked here, so that planning and running never ask the operating system about it.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..core.errors import did_you_mean, fail, printable
from ..core.types import PathLike
from .local import LocalFolder, kind_of
from .paths import Folder, Place
from .urls import how_to_fetch, is_url, shown_url

if TYPE_CHECKING:
    from .stores.hub_output import HubOutput
    from .stores.s3_uploads import S3Output
    from .stores.system_output import SystemOutput


def find_place(path: PathLike, allow_links: bool = False, at: str | None = None) -> Place:
    """The place at a path or a URL, opened; M917 without, M907 if it is neither file nor folder.
    A path that is there is no URL, however it is spelled.
    """
    where = os.fspath(path)
    try:
        kind = os.stat(where).st_mode
    except (FileNotFoundError, NotADirectoryError):
        if os.path.islink(where):
            fail("M907", f"{printable(where, 240)}: a link that leads nowhere")
        if is_url(where):
            from .stores import open_place

            return open_place(where, at)
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


def _in_store(path: str) -> bool:
    """Whether a path with `:/` in it, which hardly any has, is a URL."""
    return is_url(path) and not os.path.lexists(path)


def open_folder(path: str, allow_links: bool = False) -> Folder:
    """The folder at `path`, or the one that the file there lies in."""
    if ":/" in path and _in_store(path):
        from . import stores

        return stores.open_folder(path)
    return LocalFolder(path if is_folder(path) else os.path.dirname(path) or ".", allow_links)


def is_folder(path: str) -> bool:
    """Whether a folder is where an opened checkpoint lies. In a store such a location ends in a
    slash.
    """
    return os.path.isdir(path) or (":/" in path and path.endswith("/") and _in_store(path))


def same_location(one: str, other: str) -> bool:
    """Whether both lead to the same place."""
    if any(":/" in path and _in_store(path) for path in (one, other)):
        return one.rstrip("/") == other.rstrip("/")
    return os.path.realpath(one) == os.path.realpath(other)


def overlap(one: str, other: str) -> bool:
    """Whether they are the same place, or one of them lies in the other."""
    if ":/" in other and _in_store(other):
        return False
    here, there = os.path.realpath(one), os.path.realpath(other)
    return os.path.commonpath((here, there)) in (here, there)


def exists(path: str) -> bool:
    """Whether anything is there on this machine."""
    return os.path.exists(path)


def holds(location: str, path: str, files: Sequence[str] = ()) -> bool:
    """Whether the file `path` of this machine lies in a checkpoint: in its folder or, where that is
    a file, as itself or as one of `files` beside it.
    """
    if ":/" in location and _in_store(location):
        return False
    place, home = os.path.realpath(path), os.path.realpath(location)
    if not os.path.isdir(home):
        parent = os.path.dirname(home)
        return place in (home, *(os.path.realpath(os.path.join(parent, name)) for name in files))
    return place == home or place.startswith(os.path.join(home, ""))


def full_location(path: str) -> str:
    """The location as a plan records it: it means the same wherever it is read."""
    return shown_url(path) if ":/" in path and _in_store(path) else os.path.abspath(path)


def look_around(path: str) -> tuple[str, int]:
    """`full_location`, and the bytes that are free there; of a store those that are free in the
    working directory.
    """
    stored = ":/" in path and _in_store(path)
    place = path if stored else os.path.abspath(path)
    room = os.statvfs("." if stored else os.path.dirname(place) or ".")
    return place, room.f_bavail * room.f_frsize


def require_local(path: str, what: str = "this is written to this machine only") -> None:
    """M115 for a URL as the place of what is written."""
    if ":/" in path and _in_store(path):
        fail(
            "M115",
            f"{printable(shown_url(path), 240)}: is in a store, and {what}",
            help="write to a folder of this machine, and copy that with the store's own tool, such "
            "as `aws s3 sync`, `gcloud storage cp` or `hf upload`",
        )


def output_on_hub(path: str) -> HubOutput | None:
    """The repository of the Hub that a URL names as an output; None for any other place."""
    if ":/" not in path or not _in_store(path):
        return None
    from .stores import open_hub

    return open_hub(path)


def output_in_store(path: str) -> S3Output | SystemOutput | None:
    """The output that a URL names; None for a path. M115 for a protocol that is only read, and for
    the Hub.
    """
    if ":/" not in path or not _in_store(path):
        return None
    from .stores import open_output

    found = open_output(path)
    if found is None:
        require_local(path, "the Hub is committed to when all of an output is on this machine")
    return found
