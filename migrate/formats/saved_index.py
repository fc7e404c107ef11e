"""What headers say of a checkpoint, as a small JSON file: `migrate inspect CKPT --save-index FILE`.

It stands for the checkpoint wherever names, shapes and dtypes suffice: on a machine without room
for the weights, in a test, in a report of a problem. Beside them it has what tells layouts apart:
the stamp, the metadata, and the configuration. Values that are no tensors are left out, and so is
where the bytes lie.

It is a format of sources: no run writes it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from ..core.errors import fail, option, printable
from ..core.spec import BITS, spec
from ..source import jsontext
from ..source.blobs import FileBlob, FilelessBlob, Stored
from ..source.index import FileSource, Index, SideFile, Source
from ..source.paths import Place

KIND, _VERSION = "saved_index", "1.0"
_START = re.compile(rb'\s*\{\s*"kind"\s*:\s*"saved_index"')
# bytes; a line of a key has about a hundred
_MOST = 1 << 30
# of a side file that is taken, which is a configuration then and no vocabulary
_MOST_BESIDE = 1 << 18


class _NoBytes(FilelessBlob):
    """Stands where the bytes of the tensors are not."""

    __slots__ = ("name", "path", "size")

    def __init__(self, path: str, file: FileBlob) -> None:
        self.path, self.name, self.size = path, file.name, file.size

    def readinto(self, offset: int, buffer: memoryview) -> None:
        refuse(self.path)


def refuse(path: str) -> NoReturn:
    """M986: what is asked for needs the bytes of tensors."""
    fail(
        "M986",
        f"{printable(path, 240)} has names, shapes and dtypes alone, and this needs the tensors",
        help="name the checkpoint itself",
    )


def written(source: Source) -> str:
    """The file that stands for the opened checkpoint."""
    index = source.index
    beside = {}
    for file in index.side_files:
        if file.path.endswith(".json") and file.size <= _MOST_BESIDE:
            try:
                beside[file.path] = source.side_file(file.path).decode("utf-8")
            except UnicodeDecodeError:
                continue
    said = {
        "kind": KIND,
        "format_version": _VERSION,
        "format": source.format,
        "metadata": dict(index.metadata),
        "history": None if source.history is None else source.history.decode("utf-8"),
        "side_files": beside,
    }
    # a line a key, so that two files can be compared
    rows = [
        f"{json.dumps(key)}: {json.dumps([at.spec.dtype, list(at.spec.shape)])}"
        for key, at in index.tensors.items()
    ]
    head = json.dumps(said, indent=1)[: -len("\n}")]
    return head + ',\n "tensors": {\n  ' + ",\n  ".join(rows) + "\n }\n}\n"


def _open(place: Place) -> Source:
    file, where = place.file, printable(place.path, 240)
    if file is None:
        raise ValueError(f"{where}: a folder is no file")
    if file.size > _MOST:
        fail("M914", f"{where}: {file.size} bytes, more than {_MOST}")
    said = jsontext.parse(file.read(0, file.size), where)
    version = str(said.get("format_version"))
    if version.partition(".")[0] != _VERSION.partition(".")[0]:
        fail(
            "M906",
            f"{where}: is of version {printable(version, 40)}, and this release reads {_VERSION}",
            help=f"write it again with {option('save_index')}",
        )
    tensors = {
        key: Stored(spec(*_header(where, key, found)), 0, 0)
        for key, found in _object(where, said, "tensors").items()
    }
    metadata, beside = _texts(where, said, "metadata"), _texts(where, said, "side_files")
    history = said.get("history")
    if not isinstance(history, (str, type(None))):
        _malformed(where, "`history`", "text or null")
    contents = {path: text.encode("utf-8") for path, text in beside.items()}
    index = Index(
        tensors,
        (file.name,),
        side_files=tuple(sorted(SideFile(p, len(content)) for p, content in contents.items())),
        metadata=metadata,
        notes=(f"the names, shapes and dtypes of a checkpoint ({printable(said.get('format'))})",),
    )
    # what a migration of flat files does depends on nothing else, and is planned as that of its own
    flat = said.get("format") == "safetensors"
    source = FileSource(
        place.path,
        "safetensors" if flat else KIND,
        index,
        [file],
        history=None if history is None else history.encode("utf-8"),
        side=contents.__getitem__,
        release=place.close,
        suspend=place.folder.suspend,
    )
    source.blobs = (_NoBytes(place.path, file),)
    return source


def _header(where: str, key: str, found: Any) -> tuple[str, tuple[int, ...]]:
    if isinstance(found, list) and len(found) == 2 and isinstance(found[1], list):
        dtype, shape = found
        sizes = all(type(n) is int and 0 <= n < 1 << 63 for n in shape)
        if isinstance(dtype, str) and dtype in BITS and sizes:
            return dtype, tuple(shape)
    return _malformed(where, f"`tensors` of {printable(key)}", "a dtype and a shape")


def _texts(where: str, said: Mapping[str, Any], name: str) -> dict[str, str]:
    found = _object(where, said, name)
    if not all(isinstance(text, str) for text in found.values()):
        _malformed(where, f"`{name}`", "text for each name")
    return found


def _object(where: str, said: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = said.get(name)
    if not isinstance(found, dict):
        _malformed(where, f"`{name}`", "an object")
    return found


def _malformed(where: str, what: str, wanted: str) -> NoReturn:
    fail(
        "M906",
        f"{where}: {what} is not {wanted}",
        help=f"write it again with {option('save_index')}",
    )


def _refuse_writing(*_: Any, **__: Any) -> NoReturn:
    fail("M916", "a file of headers alone holds no tensors", help="write safetensors")


class SavedIndexFormat:
    """Headers alone, in JSON."""

    name = KIND
    suffixes = (".json",)

    def sniff(self, place: Place) -> int:
        """Sure of a file that begins with its kind."""
        return 2 if _START.match(place.head(64)) else 0

    def open(self, place: Place) -> Source:
        """The names, shapes and dtypes; M906 and M914 for a file that nothing here has written."""
        return _open(place)

    describe = staticmethod(_refuse_writing)


FORMAT = SavedIndexFormat()
