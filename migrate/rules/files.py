"""Rule files as they are worked with: what stands in them, where it stands, and what it means."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.diagnostics import Span
from . import packaged

if TYPE_CHECKING:
    from ..source import yaml
    from .model import RuleFile


@dataclass(frozen=True, eq=False, slots=True)
class LoadedFile:
    """A rule file and where each of its values stands.

    Of a file that was read when it was packaged, `model` is what stands for the model of what its
    author wrote, without `tests`, and `sealed` its semantic hash.
    """

    path: Path
    model: RuleFile
    document: yaml.Document
    sealed: str = ""

    @property
    def hash(self) -> str:
        """The hash of what the file means."""
        if self.sealed:
            return self.sealed
        from .seal import semantic_hash

        return semantic_hash(self.model)

    def span(self, *path: Any) -> Span:
        """The place of the value at `path` (`"rules", 0, "from"`), of its nearest ancestor where
        nothing is written.
        """
        return self.document.span(path)

    def key_span(self, *path: Any) -> Span:
        """The place of the last key of `path`; of the value where that is a list index."""
        return self.document.key_span(path)


def load_edge(paths: Iterable[Path]) -> list[LoadedFile]:
    """The rule files of an edge of a lineage; as they were packaged where they ship and are as they
    were then.

    Raises all problems of all of them at once (M1xx, M508), exit status 2.
    """
    wanted = list(paths)
    ready = packaged.rule_files(wanted)
    if ready is not None:
        return [
            LoadedFile(path, file.model, file.document, file.hash)
            for path, file in zip(wanted, ready, strict=True)
        ]
    from .model import load_files

    return load_files(wanted)
