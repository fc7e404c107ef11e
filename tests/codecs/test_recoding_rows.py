"""Rows of recoded parts are those of the whole parts, whatever else is read; `verify` compares a
large tensor by them, in memory that does not follow it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from little_memory import verify_sees_bytes
from test_recoding import PATHS, given, path_of

from migrate.codecs.kit.recoding_reference import recoded_parts
from migrate.codecs.kit.recoding_rows import recoded_rows, survey_rows, unit_of

# of which all rows are needed for any: a scale of all numbers, tiles of 128 rows, padding, columns
# that are stored as rows
WHOLE = {
    "blocks to padded ones", "padded blocks to others", "rows of 16, transposed",
    "transposed back", "FP4 to one scale", "swizzled FP4 to NVFP4", "NVFP4 for kernels",
    "NVFP4 swizzled back", "rows to a tensor",
}  # fmt: skip
CUT = [name for name in PATHS if name not in WHOLE]


class Parts:
    """Counts the rows of the source's parts that are read."""

    def __init__(self, arrays: dict[str, Any]) -> None:
        self.arrays, self.read = arrays, 0

    def __call__(self, role: str, low: int, high: int) -> Any:
        found = self.arrays[role]
        if not found.ndim or (low, high) == (0, len(found)):
            return found
        self.read = max(self.read, high - low)
        return found[low:high]


@pytest.mark.parametrize("name", PATHS)
def test_what_can_be_cut_into_rows_is_known(name: str) -> None:
    one, other, shape = PATHS[name]
    assert (unit_of(path_of(one, other, shape)) > 0) == (name in CUT)


@pytest.mark.parametrize("name", CUT)
def test_rows_are_those_of_whole_parts(name: str) -> None:
    one, other, shape = PATHS[name]
    path = path_of(one, other, shape)
    arrays = given(one, shape, spread=6)
    survey: Any = None
    if path.surveyed:
        scale = path.inputs[0]
        for start in range(len(arrays[scale])):
            survey = survey_rows(path, start, arrays[scale][start : start + 1], survey)
    wanted = recoded_parts(path, arrays)
    for role, spec in path.parts.items():
        count = spec.shape[0] if spec.shape else 1
        for start, stop in {
            (0, 1),
            (count - 1, count),
            (count // 3, max(count // 3 + 1, count - 1)),
        }:
            read = Parts(arrays)
            found = recoded_rows(path, role, start, stop, read, survey)
            whole = wanted[role][start:stop] if spec.shape else wanted[role]
            np.testing.assert_array_equal(found, whole, err_msg=f"{role} {start} {stop}")
            if stop - start == 1 < count:
                assert read.read < max(len(a) for a in arrays.values() if a.ndim)


RULES = """
id: test/recode
title: MXFP4 becomes NVFP4
lineage: test
edge: [mxfp4, nvfp4]
requires: ">=0.1"
rules:
  - name: all
    from: {weight: "{m}.weight", scale: "{m}.scale"}
    to: {weight: "{m}.packed", scale: "{m}.scales", global: "{m}.global"}
    via: [{recode: {from: {codec: mxfp4}, to: {codec: nvfp4}}}]
"""


@pytest.mark.heavy
def test_verify_compares_what_is_surveyed_in_little_memory(tmp_path: Path) -> None:
    dice, (rows, columns) = np.random.default_rng(0), (1024, 1024)
    parts = {
        "a.weight": dice.integers(0, 256, (rows, columns // 2), "u1"),
        "a.scale": dice.integers(117, 125, (rows, columns // 32), "u1"),
    }
    # whole tensors would take six times as much
    verify_sees_bytes(parts, RULES, tmp_path, [-5])
