"""DTensors saved with torch.save: one rank's shard, and what it is a shard of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch_streams import decoded, reduce, saved, tree

from migrate.core.errors import CheckpointError
from migrate.source.pickle import machine, nodes, policy
from migrate.source.pickle.nodes import Call, Dict, Global
from migrate.source.pickle.tree import LocalShard, Opaque, TensorRecord

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceMesh]:
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    dist.destroy_process_group()


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_dtensor_is_a_shard_with_its_global_shape(mesh: DeviceMesh, protocol: int) -> None:
    value = distribute_tensor(torch.arange(12.0).reshape(4, 3), mesh, [Shard(0), Replicate()])
    found = tree({"w": value}, protocol).get("w")
    assert type(found) is LocalShard
    assert (found.dtype, found.shape, found.placements, found.mesh) == (
        "float32",
        (4, 3),
        ("S(0)", "R"),
        (1, 1),
    )
    assert type(found.local) is TensorRecord
    assert (found.local.shape, found.local.strides) == ((4, 3), (3, 1))
    assert found.whole
    assert not found.parameter


def test_a_distributed_parameter_and_its_ties(mesh: DeviceMesh) -> None:
    value = torch.nn.Parameter(distribute_tensor(torch.ones(2, 2), mesh, [Replicate(), Shard(1)]))
    found = tree({"a": value, "b": value, "c": value.detach()})
    a, b, c = (found.get(key) for key in "abc")
    assert (a.parameter, a.requires_grad, c.parameter) == (True, True, False)
    assert a is b
    assert c.local.storage is a.local.storage


def test_a_partial_sum_is_never_the_whole_tensor(mesh: DeviceMesh) -> None:
    value = DTensor.from_local(torch.ones(2), mesh, [Replicate(), Partial()])
    found = tree(value)
    assert found.placements == ("R", "P(sum)")
    assert not found.whole


def shard_of(mesh: DeviceMesh) -> Any:
    data, records = saved({"w": distribute_tensor(torch.ones(4, 3), mesh, [Shard(0), Replicate()])})
    return machine.read_pickle(data, nodes.ARCHIVE, name="x", persistent=True), records


def fields(call: Call) -> Dict:
    state = call.arguments[3]
    return state[1] if type(state) is tuple else state


def test_a_shard_of_a_larger_tensor_is_not_whole(mesh: DeviceMesh) -> None:
    root, records = shard_of(mesh)
    call = root.get("w")
    wrapped = list(call.arguments[2])
    wrapped[2] = (8, 3)
    call.arguments = (*call.arguments[:2], tuple(wrapped), call.arguments[3])
    found = policy.decode(root, "x", records).tree.get("w")
    assert (found.shape, found.local.shape, found.whole) == ((8, 3), (4, 3), False)


def test_a_dtensor_that_contradicts_itself_is_said_at_its_key(mesh: DeviceMesh) -> None:
    root, records = shard_of(mesh)
    call = root.get("w")
    wrapped = list(call.arguments[2])
    wrapped[2] = (4, 3, 1)
    call.arguments = (*call.arguments[:2], tuple(wrapped), call.arguments[3])
    with pytest.raises(CheckpointError, match="x: w: a DTensor of float32 and 3 dimensions"):
        policy.decode(root, "x", records)


def test_an_unknown_placement_makes_the_dtensor_opaque_under_its_name(mesh: DeviceMesh) -> None:
    root, records = shard_of(mesh)
    spec = fields(root.get("w")).get("_spec").state
    spec.pairs[:] = [
        (k, (Call("newobj", Global("os", "Shard"), ()),) if k == "placements" else v)
        for k, v in spec.pairs
    ]
    found = policy.decode(root, "x", records)
    assert [(o.name, o.paths) for o in found.outside] == [("os.Shard", ("w.1._spec.placements.0",))]
    assert type(found.tree.get("w")) is Opaque


def test_a_wrapper_of_another_class_is_outside() -> None:
    inner = reduce("torch._utils", "_rebuild_wrapper_subclass", Global("torch._utils", "x"))
    found = policy.decode(inner, "x")
    assert [o.name for o in found.outside] == [
        "torch._utils._rebuild_wrapper_subclass",
        "torch._utils.x",
    ]


def test_a_real_wrapper_subclass_is_outside_with_its_class() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    found = decoded({"w": TwoTensor(torch.ones(2), torch.ones(2))})
    assert "torch.testing._internal.two_tensor.TwoTensor" in [o.name for o in found.outside]
    assert {p for o in found.outside for p in o.paths} == {"w"}
