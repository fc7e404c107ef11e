"""The tiny checkpoints that libraries made (`make_genuine.py`), and what they decode them to."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from commandline import contents

FOLDER = Path(__file__).resolve().parents[1] / "data" / "genuine"


class Checkpoint(NamedTuple):
    """One of them; `tensors`: key -> dtype, shape and SHA-256 of what `decoded_by` makes of it."""

    folder: Path
    made_by: Mapping[str, str]
    decoded_by: str
    tensors: Mapping[str, str]


def names() -> list[str]:
    return sorted(path.name for path in FOLDER.iterdir() if path.is_dir())


@cache
def checkpoint(name: str) -> Checkpoint:
    said = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return Checkpoint(FOLDER / name, **said)


def digest(dtype: str, shape: tuple[int, ...], data: bytes) -> str:
    """dtype, shape and SHA-256 of the bytes of a tensor."""
    return f"{dtype} {list(shape)} {hashlib.sha256(data).hexdigest()}"


def digests(folder: Path) -> dict[str, str]:
    """key -> `digest`, of all tensors of a folder."""
    return {key: digest(*tensor) for key, tensor in contents(folder).items()}
