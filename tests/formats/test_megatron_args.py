"""Arguments for another grid than the one that was read, against those that Megatron's own runs of
that grid have.
"""

from __future__ import annotations

from typing import Any

import megatron_runs
import pytest
from marks import thorough

from migrate import formats
from migrate.formats._megatronargs import GridOfArgs, args_for
from migrate.source.by_part import names_of, of_part, without_parts
from migrate.source.pickle.jsonform import to_json
from migrate.source.pickle.tree import DictNode
from migrate.source.target import node_of

UNEVEN = {"pp2-uneven": {"first": 1}}


def fields(args: DictNode) -> dict[str, Any]:
    return {key: to_json(node_of(value)) for key, value in args.pairs}


def roots(family: str, grid: str) -> dict[str, DictNode]:
    """The roots of all parts of a run, by name."""
    with formats.open(megatron_runs.run_folder(family, "legacy", grid)) as source:
        found: dict[str, DictNode] = {}
        parts = source.index.grid.parts
        trees = source.index.tree.parts
        for rank, tree in enumerate(trees):
            names = names_of(tree.root) or [parts[rank].partition("/")[0]]
            found.update(
                (name, of_part(tree.root, name) or without_parts(tree.root)) for name in names
            )
        return found


RUNS = [run for run in megatron_runs.runs("legacy") if not run[1].startswith("1")]


@pytest.mark.parametrize(("family", "grid"), thorough(RUNS))
def test_arguments_for_another_grid_are_those_of_a_run_of_it(family: str, grid: str) -> None:
    (alone,) = roots(family, "1").values()
    there = roots(family, grid)
    tp, pp, vpp, ep = megatron_runs.GRIDS[grid]
    sizes = {"TP": tp, "PP": pp, "VPP": vpp, "EP": ep}
    for name, root in there.items():
        wanted = fields(root.get("args"))
        numbers = [int(number) for number in name.split("_")[2:]]
        tensor, stage = numbers[0], numbers[1] if pp > 1 else 0
        group = numbers[-1] if ep > 1 else 0
        asked = GridOfArgs(sizes, 4, rows=wanted["padded_vocab_size"], **UNEVEN.get(grid, {}))
        made = fields(args_for(alone.get("args"), asked, tensor, stage, group))
        # which process of its machine it was, nothing says any more
        assert made.pop("local_rank") is None
        del wanted["local_rank"]
        assert list(made) == list(wanted)
        assert made == wanted, name
