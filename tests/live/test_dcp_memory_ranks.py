"""What a rank takes to load its shards, beside the model and the imports."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import dcp_memory_case as case
import pytest
from ranks import Ranks
from safetensors.torch import save_file

pytestmark = pytest.mark.ranks


def test_a_rank_takes_some_megabytes_and_never_a_shard(
    ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError as error:
        pytest.skip(f"this kernel does not count the most memory anew: {error}")
    source = tmp_path / "old.safetensors"
    save_file(case.saved(), source)
    (tmp_path / "rules.yaml").write_text(case.RULES)
    try:
        ranks(2).run("dcp_memory_case", "takes_little", str(source), str(tmp_path / "rules.yaml"))
    finally:
        # 570 MB, which pytest would keep
        source.unlink()
