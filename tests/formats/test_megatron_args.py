"""Arguments for another grid than the one that was read, against those that Megatron's own runs of
that grid have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import megatron_runs
import pytest
from marks import thorough

from migrate import formats
from migrate.formats._megatron import Facts, spread
from migrate.formats._megatronargs import GridOfArgs, args_for
from migrate.source.by_part import names_of, of_part, without_parts
from migrate.source.grids import WrittenGrid
from migrate.source.pickle.jsonform import to_json
from migrate.source.pickle.tree import DictNode
from migrate.source.target import node_of

# layers by virtual stage and stage, where they are uneven
UNEVEN = {"pp2-uneven": ((1, 3),)}


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


def written(sizes: dict[str, int], layers: Sequence[Sequence[int]]) -> WrittenGrid:
    return WrittenGrid("megatron", sizes, layers, "release", "model_optim_rng.pt")


RUNS = [run for run in megatron_runs.runs() if not run[1].startswith("1")]


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
        layers = UNEVEN.get(grid, ((4 // (pp * vpp),) * pp,) * vpp)
        asked = GridOfArgs.of(written(sizes, layers), wanted["padded_vocab_size"])
        made = fields(args_for(alone.get("args"), asked, tensor, stage, group))
        # which process of its machine it was, nothing says any more
        assert made.pop("local_rank") is None
        del wanted["local_rank"]
        assert list(made) == list(wanted)
        assert made == wanted, name


@pytest.mark.parametrize(
    "layers",
    [
        ((4, 4),), ((3, 5),), ((2, 3, 3),), ((3, 3, 2),), ((1, 3, 3, 1),), ((1, 3, 2, 2),),
        ((2, 2), (2, 2)), ((1, 2), (1, 2)), ((2, 2), (2, 1)), ((0, 4),),
        ((1, 2, 2, 1), (1, 2, 2, 1)),
    ],
    ids=str,
)  # fmt: skip
def test_stages_are_said_as_they_are_read(layers: Sequence[Sequence[int]]) -> None:
    """What the arguments say of uneven stages deals out the layers that way again."""
    sizes = {"TP": 1, "PP": len(layers[0]), "VPP": len(layers), "EP": 1}
    count = sum(map(sum, layers))
    args = DictNode(
        "Namespace", (("num_layers", count), ("account_for_loss_in_pipeline_split", True)), None
    )
    made = args_for(args, GridOfArgs.of(written(sizes, layers)), 0, 0, 0)
    facts = Facts(dict(made.pairs), 0, 3.0, {})
    assert spread(facts, sizes["PP"], sizes["VPP"]) == [list(row) for row in layers]


def test_fields_that_no_run_has_are_added_only_where_they_say_something() -> None:
    args = DictNode("Namespace", (("num_layers", 4),), None)
    made = args_for(args, GridOfArgs({"TP": 2, "PP": 1, "VPP": 1, "EP": 1}, 4), 1, 0, 0)
    assert dict(made.pairs) == {
        "num_layers": 4,
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 1,
        "expert_model_parallel_size": 1,
    }


@pytest.mark.parametrize(
    ("more", "rank", "world"),
    [({}, 6, 8), ({"context_parallel_size": 4}, 10, 16), ({"use_tp_pp_dp_mapping": True}, 6, 8)],
    ids=["as usual", "context parallel", "stages before data"],
)
def test_processes_are_counted_as_megatron_counts_them(
    more: dict[str, Any], rank: int, world: int
) -> None:
    args = DictNode("Namespace", (*more.items(), ("rank", 0), ("world_size", 1)), None)
    grid = GridOfArgs({"TP": 2, "PP": 2, "VPP": 1, "EP": 2}, 4)
    made = args_for(args, grid, 0, 1, 1)
    assert (made.get("rank"), made.get("world_size")) == (rank, world)
