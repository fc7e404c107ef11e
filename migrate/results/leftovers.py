"""The answer of clean."""

from __future__ import annotations

from ..core.document import DocumentPart
from .shared import DocumentReport


class LeftUpload(DocumentPart):
    """An unfinished upload, and the bytes of its parts."""

    key: str
    bytes: int


class CleanReport(DocumentReport):
    """What a run into a store had left. `digest` is that of its plan and `written` the time of its
    journal, None where there is none; without a journal `written` is the time of the last file, if
    that is known. `removed`: its `uploads`, which are files where there is no S3, and the journal
    are gone. `foreign` are keys of others' uploads, and `appeared` those of objects that the run
    has made.
    """

    KIND = "cleaned"
    path: str
    digest: str | None
    written: str | None
    removed: bool
    uploads: tuple[LeftUpload, ...]
    foreign: tuple[str, ...]
    appeared: tuple[str, ...]
