"""What `inspect` answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ..core.document import DocumentPart
from .shared import DocumentReport, FileSize, SideFileSize


class DtypeCount(DocumentPart):
    """The tensors of one dtype: how many, their elements and their bytes."""

    dtype: str
    tensors: int
    parameters: int
    bytes: int


class DetectedLayout(DocumentPart):
    """A layout that the checkpoint matches, and the evidence."""

    lineage: str
    layout: str
    evidence: tuple[str, ...]
    note: str


class NearestLayout(DocumentPart):
    """A layout that the checkpoint does not match, with the evidence for it and `against` it."""

    RENAMED: ClassVar[Mapping[str, str]] = {"signs": "found"}
    lineage: str
    layout: str
    signs: tuple[str, ...]
    against: tuple[str, ...]


class KeyGroup(DocumentPart):
    """Keys of one dtype and shape, collapsed; `bytes` are those of all of them."""

    keys: str
    count: int
    spec: str
    bytes: int


class StoredPartSpec(DocumentPart):
    """A part of a tensor in a number format: what its key ends with, its dtype and shape."""

    name: str
    spec: str


class FormatReading(DocumentPart):
    """A number format that tensors can be in: the codec's name, the producers that name and store
    it so, and the codec's arguments as far as dtypes and shapes tell.
    """

    format: str
    producer: str
    arguments: Mapping[str, Any]


class FormatGroup(DocumentPart):
    """Tensors that are stored alike in a number format.

    `names` are the last words of their modules, `keys` those of their codes, collapsed, `count` how
    many tensors they are, and `parts` the parts of the first. Of several `readings` the arguments
    in `decides` tell which is meant (`codec`: the format itself). `missing` are parts that should
    be there, `problem` says why there is no reading, or why no codec decodes it. `configured` is
    what the configuration says, `contradiction` a sentence where that and the tensors differ.
    """

    names: tuple[str, ...]
    keys: tuple[str, ...]
    count: int
    parts: tuple[StoredPartSpec, ...]
    readings: tuple[FormatReading, ...]
    decides: tuple[str, ...]
    missing: tuple[str, ...]
    problem: str | None
    configured: str | None
    contradiction: str | None


class PlainGroup(DocumentPart):
    """The matrices of one dtype that are not encoded, beside others that are: the last words of
    their modules, how many they are, and a sentence where the configuration says that one of them
    is encoded.
    """

    dtype: str
    names: tuple[str, ...]
    count: int
    contradiction: str | None


class StoredValue(DocumentPart):
    """A value that is not a tensor."""

    path: str
    value: Any


class StoredObject(DocumentPart):
    """A quantized tensor that was saved as an object."""

    key: str
    object: str
    format: str
    dtype: str
    shape: tuple[int, ...]
    number: str | None
    readings: Mapping[str, str]
    block: tuple[int, ...] | None
    members: int
    roles: Mapping[str, str]
    options: Mapping[str, Any]


class CarriedCount(DocumentPart):
    """Tensors outside of the dict that rules work on."""

    tensors: int
    bytes: int


class OutsideName(DocumentPart):
    """A name in a pickle that is outside of the allow-list."""

    name: str
    reason: str
    count: int
    paths: tuple[str, ...]


class InspectReport(DocumentReport):
    """What a checkpoint contains, and which layouts it matches."""

    KIND = "inspection"
    path: str
    format: str
    index_hash: str
    files: tuple[FileSize, ...]
    grid: str | None
    tensors: int
    bytes: int
    parameters: int
    dtypes: tuple[DtypeCount, ...]
    layouts: tuple[DetectedLayout, ...]
    nearest: tuple[NearestLayout, ...]
    keys: tuple[KeyGroup, ...]
    number_formats: tuple[FormatGroup, ...]
    plain: tuple[PlainGroup, ...]
    side_files: tuple[SideFileSize, ...]
    left_out: tuple[str, ...]
    metadata: Mapping[str, str]
    at: str | None
    items: tuple[StoredValue, ...]
    items_more: int
    values: Mapping[str, Any]
    objects: tuple[StoredObject, ...]
    unjoined: Mapping[str, str]
    carried: CarriedCount
    outside: tuple[OutsideName, ...]
    notes: tuple[str, ...]
