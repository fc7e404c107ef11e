"""What a format promises about its output before a byte is read: every file, every header, every
offset.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ..core.spec import Spec
    from .tree import FileTree


class Placed(NamedTuple):
    """One output tensor: its packed row-major bytes lie at `offset` (from the start of the file),
    `nbytes` long.
    """

    key: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class OutputFile:
    """One weight file: `header` stands at offset 0, the tensors follow in offset order.

    Without a `seal` they cover the rest without a hole. With one, something may follow each of them
    that depends on what was written before: `seal(crcs)`, given the CRC-32 of the first tensors, is
    what stands behind the last of these, up to the next one or to the end of the file.
    """

    name: str
    header: bytes
    tensors: tuple[Placed, ...]
    size: int
    seal: Callable[[Sequence[int]], bytes] | None = None

    @property
    def fixed(self) -> bytes:
        """What is known of the file before a tensor is read, but for checksums: equal for equal
        plans.
        """
        if self.seal is None or not self.tensors:
            return self.header
        return self.header + self.seal([0] * len(self.tensors))


@dataclass(frozen=True, slots=True)
class Target:
    """The whole output. `folder` is False for a checkpoint that is one file; `small` are small
    files written as they are.
    """

    files: tuple[OutputFile, ...]
    folder: bool
    small: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class TargetTree:
    """What an output holds beside rules' tensors, for the formats that can hold it.

    `parts` are its trees, by rank, and `names` has the key of each tensor in them, by the record's
    identity. `passed_through` are the specs of tensors outside of the dicts that rules work on.
    `first`
    has for each key the first key that shares its bytes: often itself.
    """

    parts: tuple[FileTree, ...]
    names: Mapping[int, str]
    passed_through: Mapping[str, Spec]
    first: Mapping[str, str]
