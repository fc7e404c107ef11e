"""A lineage to be filled with rule files."""

from __future__ import annotations

from pathlib import Path

import pytest
from written_rules import Lineage


@pytest.fixture
def lineage(tmp_path: Path) -> Lineage:
    return Lineage(tmp_path)
