"""Where processes of one launcher meet that write into a bucket, or compare what lies in one.

    OUT.migrate-partial/ranks/call.json, <launch>/<word>-<rank>.json      as in a folder (`ranks`)

A look is a request, so there are fewer of them than in a folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from ..core.errors import MigrateError
from ..source.stores.s3_uploads import StoredWords

# where they meet that write, and that compare
RANKS, COMPARE = "ranks/", "verify/"


class BucketMeeting:
    """Objects by which processes meet."""

    # seconds between two looks, and between two signs of life
    poll, beat = 0.5, 5.0
    apart = "they were given another output, or reach another store under its name"

    def __init__(self, words: StoredWords) -> None:
        self._words, self.shown = words, words.shown.rstrip("/")

    def below(self, name: str) -> BucketMeeting:
        return BucketMeeting(self._words.below(name))

    def make(self) -> None:
        """There is nothing to make."""

    def clear(self) -> None:
        self._words.remove(self._words.names())

    def exists(self) -> bool:
        return bool(self._words.names())

    def names(self) -> list[str]:
        return self._words.names()

    def read(self, name: str) -> dict[str, Any] | None:
        found: Any = None
        # the store may answer the next time
        with suppress(MigrateError, ValueError, RecursionError):
            found = json.loads(self._words.said(name))
        return found if isinstance(found, dict) else None

    def create(self, name: str, content: Mapping[str, Any]) -> None:
        if not self._words.say(name, _text_of(content), new=True):
            raise FileExistsError(name)

    def replace(self, name: str, content: Mapping[str, Any]) -> None:
        self._words.say(name, _text_of(content))


def _text_of(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode()
