"""`dcp.load` through a reader that migrates, on several ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import dcp_reader_case as case
import pytest
from ranks import Ranks
from safetensors.torch import save_file

pytestmark = pytest.mark.ranks
Start = Callable[[int], Ranks]


@pytest.fixture
def rules(tmp_path: Path) -> str:
    (tmp_path / "rules.yaml").write_text(case.RULES)
    return str(tmp_path / "rules.yaml")


@pytest.mark.parametrize("world", [2, 3, 4])
def test_safetensors_fill_a_model_with_fsdp2(
    world: int, ranks: Start, tmp_path: Path, rules: str
) -> None:
    save_file(case.old_layout(), tmp_path / "old.safetensors")
    ranks(world).run("dcp_reader_case", "fills_fsdp2", str(tmp_path / "old.safetensors"), rules)


@pytest.mark.parametrize(("saved", "loaded"), [(2, 2), (3, 2), (2, 4)])
def test_what_other_ranks_saved_fills_a_model_with_fsdp2(
    saved: int, loaded: int, ranks: Start, tmp_path: Path, rules: str
) -> None:
    folder = str(tmp_path / "saved")
    ranks(saved).run("dcp_reader_case", "save_parts", folder)
    ranks(loaded).run("dcp_reader_case", "fills_fsdp2", folder, rules, "model")
