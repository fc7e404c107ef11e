"""Quantized parameters of which each rank has a part take their boxes of the whole components."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from quantized_ranks import KINDS
from ranks import Ranks
from stored_objects import NAMES, saved

Start = Callable[[int], Ranks]


@pytest.mark.parametrize(
    ("world", "cut"),
    [
        (2, "rows"),
        *(
            pytest.param(world, cut, marks=pytest.mark.ranks)
            for world, cut in ((3, "rows"), (4, "rows"), (2, "columns"))
        ),
    ],
)
def test_each_part_takes_its_box_of_each_component(
    world: int, cut: str, ranks: Start, tmp_path: Path
) -> None:
    names = [name for name in NAMES if cut == "rows" or KINDS[name].across]
    source = saved(tmp_path / "whole.pt", names)
    ranks(world).run("quantized_load_case", "loads", str(source), json.dumps(names), cut)
    ranks(world).run("quantized_load_case", "reads", str(source), json.dumps(names), cut)


@pytest.mark.ranks
@pytest.mark.parametrize(("saving", "loading"), [(2, 4), (4, 2), (3, 2)])
def test_what_ranks_saved_is_loaded_by_other_ranks(
    saving: int, loading: int, ranks: Start, tmp_path: Path
) -> None:
    folder = str(tmp_path / "in")
    ranks(saving).run("quantized_ranks", "saves", folder, NAMES)
    ranks(loading).run("quantized_load_case", "loads", folder, json.dumps(NAMES), "rows")
    ranks(loading).run("quantized_load_case", "reads", folder, json.dumps(NAMES), "rows")


@pytest.mark.ranks
def test_a_part_that_ends_inside_of_a_block_is_refused(
    ranks: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = dataclasses.replace(KINDS["te-block-2d"], shape=(1000, 300))
    monkeypatch.setitem(KINDS, "odd", odd)
    source = saved(tmp_path / "whole.pt", ["odd"])
    ranks(2).run("quantized_load_case", "refuses", str(source))
