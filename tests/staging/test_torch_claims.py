"""What PyTorch's tests of its own stager claim, asked of ours, on the CPU.

Of `test/distributed/checkpoint/test_state_dict_stager.py`:

| there | here |
|---|---|
| `test_views` | `test_views_share_storages_and_are_counted_once` |
| `test_caching` | `test_the_same_memory_is_used_by_each_stage`; a snapshot in use is never overwritten, which is why each is released first |
| `test_tensor_attrs` | `test_attributes_of_tensors_are_there` |
| `test_different_dtypes` | `test_tensors.py::test_a_dtype_keeps_its_bits`, all of torch's dtypes |
| `test_empty_tensors` | `test_tensors_of_no_elements_keep_their_shape` |
| `test_complex_storage_sharing` | `test_views_of_views_follow_a_write` |
| `test_dataclasses` | `test_dataclasses_are_apart_from_their_source`, `test_structure.py` |
| `test_cpu_storage_independence` | `test_tensors_on_the_cpu_are_copied` |
| `test_tensor_pinned_and_shared` | not so: `is_shared` is False by design (`test_sharing.py::test_is_shared_knows_torchs_allocators_alone`), and `is_pinned` needs a GPU (`test_staging_streams.py::test_the_real_ones`) |
| `TestDTensorStateDictStager` | `test_distributed_tensors_keep_mesh_and_spec`, one rank of gloo; two GPUs and NCCL are not covered |

All of them run on CUDA there; that copies come from a GPU is tested by `test_staging_streams.py`.
"""  # noqa: E501

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import migrate

ways = pytest.mark.parametrize(
    ("pin", "share"), [(False, False), (True, False), (False, True), (True, True)]
)


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    """One rank, for distributed tensors."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def stager(pin: bool = False, share: bool = False) -> migrate.Stager:
    with warnings.catch_warnings():
        # without a GPU it says that nothing is pinned
        warnings.simplefilter("ignore")
        return migrate.Stager(pin_memory=pin, share_memory=share)


@dataclasses.dataclass
class Inner:
    tensor: torch.Tensor
    value: int = 42


@dataclasses.dataclass
class Outer:
    tensor: torch.Tensor
    name: str
    values: list[float]
    inner: Inner


@dataclasses.dataclass(frozen=True)
class Frozen:
    tensor: torch.Tensor
    value: int = 100


def state() -> dict[str, Any]:
    one, other = torch.randn(4, 4), torch.randn(4, 4)
    return {"one": one, "flat": one.view(16), "in": {"x": other, "part": Inner(other[:2])}}


def address(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


@ways
def test_views_share_storages_and_are_counted_once(pin: bool, share: bool) -> None:
    source = state()
    snapshot = stager(pin, share).stage(source)
    assert snapshot.nbytes == 2 * 64
    assert snapshot["one"].equal(source["one"])
    assert snapshot["flat"].equal(source["flat"])
    assert snapshot["in"]["part"].tensor.equal(source["in"]["x"][:2])
    assert address(snapshot["one"]) == address(snapshot["flat"])
    assert address(snapshot["in"]["x"]) == address(snapshot["in"]["part"].tensor)
    assert address(snapshot["in"]["x"]) != address(snapshot["one"])


@ways
def test_the_same_memory_is_used_by_each_stage(pin: bool, share: bool) -> None:
    source, used = state(), stager(pin, share)
    seen = set()
    for step in range(3):
        source["one"].fill_(step)
        with used.stage(source) as snapshot:
            assert snapshot["flat"].eq(step).all()
            assert snapshot["in"]["x"].equal(source["in"]["x"])
            seen.add((address(snapshot["one"]), address(snapshot["in"]["x"]), used.nbytes))
    assert len(seen) == 1


@ways
def test_attributes_of_tensors_are_there(pin: bool, share: bool) -> None:
    source = state()
    source["one"].a, source["one"].b, source["in"]["x"].c = 42, 43, [44]
    made = stager(pin, share).stage(source).state
    assert (made["one"].a, made["one"].b, made["in"]["x"].c) == (42, 43, [44])
    assert made["in"]["x"].c is not source["in"]["x"].c
    assert not hasattr(made["flat"], "a")


@ways
def test_tensors_of_no_elements_keep_their_shape(pin: bool, share: bool) -> None:
    source = [torch.empty(0), torch.empty(0, 0), torch.empty(3, 0, 2), torch.tensor(0.5)]
    made = stager(pin, share).stage(source).state
    assert [x.shape for x in made] == [x.shape for x in source]
    assert {x.dtype for x in made} == {torch.float32}
    assert made[3].item() == 0.5


def test_views_of_views_follow_a_write() -> None:
    base = torch.randn(10, 10)
    flat = base.view(100)
    source = [base, flat, base.view(10, 10), base[2:8, 2:8], base[:, :5], flat[10:60]]
    made = stager().stage(source).state
    for x, y in zip(source, made, strict=True):
        assert (x.stride(), x.storage_offset()) == (y.stride(), y.storage_offset())
        assert x.equal(y)
        assert address(y) == address(made[0])
    made[0].fill_(42)
    assert all(y.eq(42).all() for y in made)
    assert not base.eq(42).any()


def test_dataclasses_are_apart_from_their_source() -> None:
    x, y, z = torch.randn(4, 4), torch.randn(2, 6), torch.randn(3, 5)
    source = {"outer": Outer(x, "name", [1.0, 2.0], Inner(y)), "frozen": Frozen(z)}
    before = [t.clone() for t in (x, y, z)]
    made = stager().stage(source).state
    for t in (x, y, z):
        t.fill_(99)
    source["outer"].values.append(3.0)
    outer, frozen = made["outer"], made["frozen"]
    assert (outer.name, outer.values, outer.inner.value, frozen.value) == (
        "name",
        [1.0, 2.0],
        42,
        100,
    )
    for t, old in zip((outer.tensor, outer.inner.tensor, frozen.tensor), before, strict=True):
        assert t.equal(old)


def test_tensors_on_the_cpu_are_copied() -> None:
    x = torch.randn(8, 8)
    old = x.clone()
    made = stager().stage({"x": x})["x"]
    assert address(made) != address(x)
    x.fill_(99)
    assert made.equal(old)


def test_distributed_tensors_keep_mesh_and_spec(group: None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (1,))
    local = torch.randn(3, 3)
    leaf = DTensor.from_local(local, mesh, [Shard(0)]).requires_grad_()
    result = (leaf + 1) * 2
    parameter = torch.nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)]))
    parameter.tag = "a"
    source = {"leaf": leaf, "result": result, "parameter": parameter, "local": leaf._local_tensor}
    snapshot = stager().stage(source)
    made = snapshot.state
    for name in ("leaf", "result", "parameter"):
        assert type(made[name]) is type(source[name])
        # Not `mesh`: torch's cache of operators answers with an equal mesh made before.
        assert made[name].device_mesh is source[name].device_mesh
        assert made[name]._spec == source[name]._spec
        assert made[name].to_local().equal(source[name].to_local())
        assert (made[name].is_leaf, made[name].requires_grad) == (True, True)
    assert isinstance(made["parameter"], torch.nn.Parameter)
    assert made["parameter"].tag == "a"
    assert made["leaf"]._local_tensor is made["local"]
    kept = local.clone()
    with torch.no_grad():
        leaf._local_tensor.zero_()
    assert made["leaf"].to_local().equal(kept)
    assert snapshot.restore()["leaf"].device_mesh is mesh
    snapshot.restore(source)
    assert leaf.to_local().equal(kept)


@pytest.mark.filterwarnings("ignore")
def test_sharded_tensors_keep_their_group(group: None) -> None:
    from torch.distributed._shard import sharded_tensor
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec

    x = sharded_tensor.rand(ChunkShardingSpec(dim=0, placements=["rank:0/cpu"]), 4, 2)
    local = x.local_shards()[0].tensor
    made = stager().stage([x, local]).state
    assert type(made[0]) is type(x)
    assert made[0]._process_group is x._process_group
    assert made[0].metadata() == x.metadata()
    assert made[0].local_shards()[0].tensor is made[1]
    assert made[1].equal(local)
    assert made[1].data_ptr() != local.data_ptr()
