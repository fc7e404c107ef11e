"""The weights of `tests/data/genuine`, which git keeps as one archive.

Most of these checkpoints were made of the same few numbers, so that the archive has a quarter of
their size. `unpack` puts them beside their configurations, where git ignores them, before the tests
start; after one was made again, `python tests/genuine/weights.py` packs what lies there.
"""

from __future__ import annotations

import hashlib
import os
import tarfile
import tempfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "data" / "genuine"
ARCHIVE = FOLDER / "weights.tar.xz"
# the digest of the archive whose files lie here
UNPACKED = FOLDER / ".unpacked"
SUFFIXES = (".safetensors", ".gguf")


def unpack() -> None:
    """Makes the files be those of the archive. Several processes may do so at once."""
    digest = hashlib.sha256(ARCHIVE.read_bytes()).hexdigest()
    if UNPACKED.exists() and UNPACKED.read_text(encoding="utf-8") == digest:
        return
    with tempfile.TemporaryDirectory(dir=FOLDER.parent) as there:
        for name in _extract(there):
            _put(Path(there), name)
        marker = Path(there) / UNPACKED.name
        marker.write_text(digest, encoding="utf-8")
        os.replace(marker, UNPACKED)


def _extract(there: str) -> list[str]:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(there, filter="data")
        return archive.getnames()


def _put(there: Path, name: str) -> None:
    # some consist of weights alone
    (FOLDER / name).parent.mkdir(exist_ok=True)
    os.replace(there / name, FOLDER / name)


def pack() -> None:
    """Makes the archive of the files that lie here, and of its own that do not, of checkpoints that
    are still there; equal files give an equal archive.
    """
    with tempfile.TemporaryDirectory(dir=FOLDER.parent) as there:
        for name in _extract(there):
            described = FOLDER / f"{Path(name).parts[0]}.json"
            if described.exists() and not (FOLDER / name).exists():
                _put(Path(there), name)
    files = sorted(one for one in FOLDER.glob("*/*") if one.suffix in SUFFIXES)
    with tarfile.open(ARCHIVE, "w:xz", preset=9) as archive:
        for file in files:
            member = tarfile.TarInfo(file.relative_to(FOLDER).as_posix())
            member.size = file.stat().st_size
            with file.open("rb") as data:
                archive.addfile(member, data)
    UNPACKED.write_text(hashlib.sha256(ARCHIVE.read_bytes()).hexdigest(), encoding="utf-8")


if __name__ == "__main__":
    pack()
