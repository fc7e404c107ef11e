"""Rule files that a test writes as text, loaded without a file."""

from __future__ import annotations

from pathlib import Path

from migrate.core.errors import Report
from migrate.rules.files import LoadedFile
from migrate.rules.loading import load_document
from migrate.source import yaml


def load_text(text: str, name: str) -> LoadedFile:
    """The rule file in `text`, which messages call `name`; raises its problems."""
    report = Report()
    loaded = load_document(Path(name), yaml.read_yaml(text, name, report), report)
    report.check()
    assert loaded is not None, f"{name}: nothing was read and nothing was reported"
    return loaded
