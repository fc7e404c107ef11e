"""A random part of an output that is compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from raw_files import write_source
from test_verify import Counting, large

from migrate.core.errors import QuestionError
from migrate.running.sample import choose_sample, left_out_of, parse_share
from migrate.running.verify import recompute


def test_a_sample_has_a_region_of_each_kind_and_is_what_its_seed_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, source, made = large(tmp_path, monkeypatch)
    output = write_source(tmp_path / "o", made)
    for seed in range(20):
        sample = choose_sample(program, source, output, 0.05, seed)
        assert sample == choose_sample(program, source, output, 0.05, seed)
        taken = {*sample.whole, *sample.regions}
        assert {key[0] for key in taken} == {"k", "n", "t"}
        assert len(taken) < len(program)
    share = [choose_sample(program, source, output, 0.5, seed).nbytes(output) for seed in range(40)]
    assert (
        0.35 < np.mean(share) / sum(output.index.tensors[key].spec.nbytes for key in program) < 0.65
    )
    assert (
        choose_sample(program, source, output, 0.05).seed
        != choose_sample(program, source, output, 0.05).seed
    )


def test_a_sample_reads_its_regions_alone_and_finds_what_is_wrong_in_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, source, made = large(tmp_path, monkeypatch)
    output = write_source(tmp_path / "o", made)
    sample = choose_sample(program, source, output, 0.1, 1)
    assert sample.regions
    Counting.total = 0
    assert recompute(program, source, output, sample=sample) == []
    assert Counting.total <= sample.nbytes(output)
    key, one = next(iter(sample.regions.items()))
    row = one.rows[0][0]
    made[key][1][row, 3, 5] ^= 1
    wrong = write_source(tmp_path / "wrong", made)
    (found,) = recompute(program, source, wrong, sample=sample)
    assert (found.key, found.index) == (key, (row, 3, 5))
    assert "that were looked at" in found.detail
    left = left_out_of(sample, program, output, False)
    assert {one.why for one in left} == {"not in the sample", "rows that are not in the sample"}


@pytest.mark.parametrize(
    ("given", "share"), [("5%", 0.05), ("0.05", 0.05), (0.25, 0.25), ("100%", 1.0), (1, 1.0)]
)
def test_a_share_is_a_part(given: Any, share: float) -> None:
    assert parse_share(given) == pytest.approx(share)


@pytest.mark.parametrize("given", ["5", "0", "-1%", "many", "nan", "200%", True, "%"])
def test_what_is_no_part_is_refused(given: Any) -> None:
    with pytest.raises(QuestionError, match="M115"):
        parse_share(given)
