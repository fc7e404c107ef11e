"""What the reader's tests load: a checkpoint in the old layout, and the rules to the new one."""

from __future__ import annotations

from pathlib import Path

import dcp_reader_case as case
import pytest
from safetensors.torch import save_file


@pytest.fixture
def rules(tmp_path: Path) -> str:
    (tmp_path / "rules.yaml").write_text(case.RULES)
    return str(tmp_path / "rules.yaml")


@pytest.fixture
def old(tmp_path: Path) -> str:
    save_file(case.old_layout(), tmp_path / "old.safetensors")
    return str(tmp_path / "old.safetensors")
