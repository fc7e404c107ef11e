"""Made rules are about as long as those that people wrote, and do the same.

`python benchmarks/compactness.py` prints the rows; it runs the hand's tests on the made rules, too.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from compactness import report, rows

PAGE = Path(__file__).resolve().parents[2] / "docs" / "authoring.md"


def test_made_rules_are_not_much_longer_than_those_by_hand() -> None:
    found = list(rows())
    assert {"hf-mixtral", "meta-llama", "megatron-gpt", "te-grouped-bias", "torch-wrappers"} <= {
        row.file.split("/")[0] for row in found
    }
    assert statistics.median(row.ratio[0] for row in found) <= 1.3
    assert statistics.median(row.ratio[1] for row in found) <= 1.3
    # what the docs show is what is measured: the counts do not depend on the machine
    page = PAGE.read_text(encoding="utf-8")
    assert page.split("```text\n")[1].split("```")[0] == report(found)
