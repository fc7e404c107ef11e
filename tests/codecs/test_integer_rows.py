"""Rows of recoded parts of integers are those of the whole parts, whatever else is read; `verify`
compares a large tensor by them, in memory that does not follow it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from little_memory import verify_sees_bytes
from marks import thorough
from recoded_parts import RECODE
from test_recoding_pairs import INTEGERS, RECODED, pairs_of

from migrate.ops.recode import _path_of

# by columns to rows and back, records, rows that are packed
FIRST = [("gptq", "awq"), ("awq", "int8"), ("int-pack", "awq"), ("int4-rows", "gguf")]
PAIRS = FIRST + [
    pair for one in INTEGERS for other in RECODED[one] if (pair := (one, other)) not in FIRST
]


class Parts:
    """The parts of a source by number; `read` is the largest stretch of codes of one call."""

    def __init__(self, arrays: list[Any]) -> None:
        self.arrays, self.read = arrays, [0] * len(arrays)

    def __call__(self, number: int, low: int, high: int, columns: Any = None) -> Any:
        found = self.arrays[number]
        if found.ndim:
            found = found[low:high]
        if columns is not None:
            found = found[..., slice(*columns)]
        self.read[number] = max(self.read[number], found.size)
        return np.ascontiguousarray(found)


@pytest.mark.parametrize(("one", "other"), thorough(PAIRS, default=len(FIRST)))
def test_rows_are_those_of_whole_parts(one: str, other: str) -> None:
    cut = less = 0
    for _, parts, settled in pairs_of(one, other):
        if isinstance(settled, str):
            continue
        specs, held = ([parts[role][i] for role in settled.inputs] for i in (0, 1))
        wanted = RECODE.eager(settled, held, dtypes=[s.dtype for s in specs])
        if not RECODE.makes_rows(settled, specs):
            continue
        cut += 1
        codes = settled.inputs.index(_path_of(settled, specs).source.layout.role)
        for output, whole in enumerate(wanted):
            count = len(whole) if whole.ndim else 1
            for start, stop in {
                (0, 1), (count - 1, count), (count // 3, max(count // 3 + 1, count - 1)),
            }:  # fmt: skip
                reader = Parts(held)
                found = RECODE.rows(settled, reader, specs, 1, output, start, stop)
                np.testing.assert_array_equal(
                    found,
                    whole[start:stop] if whole.ndim else whole,
                    err_msg=f"{settled} {settled.outputs[output]} {start} {stop}",
                )
                less += 0 < reader.read[codes] < held[codes].size
    assert cut
    assert less


RULES = """
id: test/recode
title: GPTQ becomes words along rows
lineage: test
edge: [gptq, words]
requires: ">=0.1"
rules:
  - name: all
    from: {weight: "{m}.qweight", zero: "{m}.qzeros", scale: "{m}.scales", group: "{m}.g_idx"}
    to: {weight: "{m}.packed", scale: "{m}.scale", shape: "{m}.shape", zero: "{m}.zero", group: "{m}.index"}
    via: [{recode: {from: {codec: gptq, form: v2, bits: 4}, to: {codec: int-pack}}}]
"""  # noqa: E501


@pytest.mark.heavy
def test_verify_compares_what_columns_become_rows_of_in_little_memory(tmp_path: Path) -> None:
    dice, side = np.random.default_rng(0), 1024
    # groups out of turn, and a zero for each
    parts = {
        "a.qweight": dice.integers(-(2**31), 2**31, (side // 8, side), "i4"),
        "a.qzeros": dice.integers(-(2**31), 2**31, (side // 128, side // 8), "i4"),
        "a.scales": dice.uniform(0.01, 1, (side // 128, side)).astype("f2"),
        "a.g_idx": dice.permutation(np.arange(side, dtype="i4") // 128),
    }
    # whole tensors would take three times as much
    verify_sees_bytes(parts, RULES, tmp_path, [5, -5])
