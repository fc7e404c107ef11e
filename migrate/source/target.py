"""What a format promises about its output before a byte is read: every file, every header, every offset."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class Placed(NamedTuple):
    """One output tensor: its packed row-major bytes lie at `offset` (from the start of the file), `nbytes` long."""

    key: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class OutputFile:
    """One weight file: `header` stands at offset 0, the tensors cover the rest without a hole, in offset order."""

    name: str
    header: bytes
    tensors: tuple[Placed, ...]
    size: int


@dataclass(frozen=True, slots=True)
class Target:
    """The whole output. `folder` is False for a checkpoint that is one file; `small` are small files written as they are."""

    files: tuple[OutputFile, ...]
    folder: bool
    small: Mapping[str, bytes] = field(default_factory=dict)
