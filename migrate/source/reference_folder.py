"""Files of another folder beside a checkpoint that comes without them, such as tokenizer and
generation config beside what a training framework wrote: from here on they are its side files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING

from ..core.errors import fail, listed, option, printable
from .index import FileSource, Source
from .paths import look_beside
from .places import open_folder

if TYPE_CHECKING:
    from .blobs import Identity


def with_reference(source: Source, path: str, allow_links: bool) -> FileSource:
    """The source with the side files of the folder `path` too, and their hashes by name in
    `reference`; it is closed with `source`. M513 for a name that both have, M115 for a source that
    is no folder of files.
    """
    if not isinstance(source, FileSource):
        fail("M115", f"{option('side')}: {source.format} knows of no files beside it")
    folder = open_folder(path, allow_links)
    try:
        beside = look_beside(folder, frozenset())
        own = {file.path for file in source.index.side_files}
        if both := [file.path for file in beside.side_files if file.path in own]:
            fail(
                "M513",
                f"{option('side', printable(path))}: {listed(both, 4)} "
                f"{'is' if len(both) == 1 else 'are'} beside the checkpoint as well",
                help="name a folder that holds only the files that are missing",
            )
        hashes = {
            file.path: hashlib.sha256(beside.read(file.path)).hexdigest()
            for file in beside.side_files
        }
    except BaseException:
        folder.close()
        raise

    def locate(name: str) -> Identity | None:
        return beside.folder.current(name) if name in beside.identities else source._locate(name)

    def side(name: str) -> bytes:
        return beside.read(name) if name in beside.identities else source.side_file(name)

    found = copy(source)
    files = tuple(sorted((*source.index.side_files, *beside.side_files)))
    found.index = replace(source.index, side_files=files)
    found.reference = hashes
    found._side, found._locate = side, locate
    found._watched = {**source._watched, **beside.identities}
    found._release = _both(folder.close, source._release)
    return found


def _both(first: Callable[[], None], second: Callable[[], None] | None) -> Callable[[], None]:
    def release() -> None:
        first()
        if second is not None:
            second()

    return release
