"""How many rules an edge of a lineage has, and whether they lose anything, as their text says."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..core.errors import Report
from ..ops.base import Loss
from ..rules.compiled import compile_file_once, direct
from ..rules.packs import load_edge


def counts_of(files: Sequence[Path]) -> dict[str, Any]:
    """`rules` and `lossless` of the rule files of an edge; None where params decide it."""
    report, count, verdicts = Report(), 0, set[bool | None]()
    for file in load_edge(files):
        rules, _ = compile_file_once(file, report)
        count += len(rules)
        for rule in rules:
            forwards = direct(rule, {}, Report())
            verdicts.add(
                None
                if forwards is None
                else forwards.keeps
                or all(step.op.loss(step.args) is Loss.LOSSLESS for step in forwards.steps)
            )
    report.check()
    lossless = False if False in verdicts else None if None in verdicts else True
    return {"rules": count, "lossless": lossless}
