"""Cases for `ranks` and a process of its own for each rank: loads through a reader that migrates
which do not come to a good end.

    dcp_trouble_case.py RANK WORLD STORE SOURCE RULES     the last rank dies in the middle; what the
                                                          others then know is a line of JSON
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import built
import dcp_reader_case as case
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, zeros

from migrate.dcp import MigratingReader


def blank(shapes: dict[str, torch.Size]) -> dict[str, torch.Tensor]:
    return {key: torch.zeros(shape) for key, shape in shapes.items()}


def state(old: bool = False) -> dict[str, torch.Tensor]:
    held = case.old_layout()
    return blank({k: v.shape for k, v in (held if old else case.new_layout(held)).items()})


def other_layouts(rank: int) -> None:
    """The ranks ask for different layouts, each with the keys of its own."""
    wanted = built.state_of(built.V4 if rank else built.V5)
    mine = {key: torch.zeros_like(value) for key, value in wanted.items()}
    reader = MigratingReader(built.V4, to="hf-mixtral@v4" if rank else "hf-mixtral@v5")
    found = case.failures(lambda: dcp.load(mine, storage_reader=reader))
    assert found.keys() == {0}
    assert "M974" in str(found[0])
    assert "rank 1 migrates in another way than the coordinator" in str(found[0])
    assert not any(value.any() for value in mine.values())
    assert reader.report is None


def other_shapes_and_placements(rank: int, source: str, rules: str) -> None:
    """What a state dict of shards asks for and the migrated checkpoint cannot give is the planner's
    error, on every rank and before a byte is written. Partial targets torch refuses itself, though
    not yet in 2.8.
    """
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    good = zeros(case.EXPERTS, 6, 5, device_mesh=mesh, placements=[Shard(0)])
    # an expert too many
    wrong = zeros(case.EXPERTS + 1, 6, 5, device_mesh=mesh, placements=[Shard(0)])
    # the sum of what the ranks hold: no part of a tensor
    summed = DTensor.from_local(torch.zeros(case.EXPERTS, 6, 5), mesh, [Partial()])
    for bad, said in ((wrong, "Size mismatch"), (summed, "layers.1.up")):
        mine = {"layers.0.up": good, "layers.1.up": bad}
        reader = MigratingReader(source, rules=[rules])
        found = case.failures(lambda: dcp.load(mine, storage_reader=reader))
        assert found.keys() == set(range(world))
        for one in found.values():
            assert said in str(one)
            assert "layers.1.up" in str(one)
        assert not good.to_local().any()
        assert not bad.to_local().any()
        assert reader.report is None


class Fails(DefaultLoadPlanner):  # type: ignore[misc]
    """Stops after the first tensor, in the way that `how` is."""

    def __init__(self, how: Any) -> None:
        super().__init__()
        self._how = how

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        self._how()


def unplugged() -> None:
    raise OSError("the disk is gone")


def fails_in_the_middle(rank: int, source: str, rules: str) -> None:
    """One rank fails while it writes: every rank is told which, and what that one has written."""
    one = rank == dist.get_world_size() - 1
    reader, mine = MigratingReader(source, rules=[rules]), state()
    planner = Fails(unplugged) if one else DefaultLoadPlanner()
    found = case.failures(lambda: dcp.load(mine, storage_reader=reader, planner=planner))
    assert found.keys() == {dist.get_world_size() - 1}
    (said,) = map(str, found.values())
    assert "M965" in said
    assert "the state dict is written in part" in said
    assert "OSError: the disk is gone" in said
    assert any(value.any() for value in mine.values())
    assert (reader.report is None) == one
    # the ranks are in step: they load again
    dcp.load(mine, storage_reader=MigratingReader(source, rules=[rules]))
    case.same(mine, case.new_layout(case.old_layout()))


def main() -> None:
    rank, world, store, source, rules = sys.argv[1:]
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(world)
    )
    last = int(rank) == int(world) - 1
    planner = Fails(lambda: os._exit(7)) if last else DefaultLoadPlanner()
    reader, mine = MigratingReader(source, rules=[rules]), state()
    try:
        with reader:
            dcp.load(mine, storage_reader=reader, planner=planner)
    except Exception as error:  # noqa: BLE001 - whatever it is, the test looks at it
        out = {"error": str(error), "cause": type(error.__cause__).__name__}
        out |= {"written": reader.report is not None and reader.report.tensors}
    else:
        out = {"error": None}
    print(json.dumps(out), flush=True)
    # the group has lost a member: nothing that ends it in order returns
    os._exit(0)


if __name__ == "__main__":
    main()
