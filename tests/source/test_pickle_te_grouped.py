"""GroupedTensor: unquantized it is the dense tensor that it is, quantized a stack of its members'
components.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from quantized_streams import mxfp8, stand_ins
from torch_streams import decoded, dense, reduce, tree

from migrate.core.errors import CheckpointError
from migrate.source.pickle import policy
from migrate.source.pickle.nodes import Dict, Global
from migrate.source.pickle.te_grouped import GROUPED, group, member_of
from migrate.source.pickle.tree import Composite, Opaque

GENUINE = Path(__file__).parents[1] / "data" / "te" / "tensors"


@pytest.fixture
def te() -> Iterator[dict[str, ModuleType]]:
    with stand_ins() as modules:
        yield modules


def grouped(
    te: dict[str, ModuleType], shape: tuple[int, ...], dtype: torch.dtype, **fields: Any
) -> Any:
    cls = te["grouped_tensor"].GroupedTensor
    made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype)
    every = dict.fromkeys(
        (
            "quantizer",
            "columnwise_data",
            "scale_inv",
            "columnwise_scale_inv",
            "quantized_tensors",
            "first_dims",
        )
    )
    every.update(
        num_tensors=shape[0],
        tensor_shapes=[shape[1:]] * shape[0],
        fake_dtype=dtype,
        _with_gemm_swizzled_scales=False,
    )
    made.__dict__.update({**every, **fields})
    return made


def quantized(te: dict[str, ModuleType], count: int = 3, **fields: Any) -> Any:
    """The group of MXFP8 tensors with seeds from 0 on, as `torch.save` writes it."""
    members = [mxfp8(te, seed).arguments for seed in range(count)]
    runs = [torch.cat([member[at].reshape(-1) for member in members]) for at in range(4)]
    names = ("rowwise_data", "scale_inv", "columnwise_data", "columnwise_scale_inv")
    return grouped(
        te,
        (count, 64, 32),
        torch.bfloat16,
        quantizer=members[0][7],
        **{**dict(zip(names, runs, strict=True)), **fields},
    )


def test_an_unquantized_group_is_the_dense_tensor_that_it_is(te: Any) -> None:
    run = torch.arange(24.0)
    found = tree({"w": grouped(te, (3, 4, 2), torch.float32, rowwise_data=run)}).get("w")
    assert type(found) is Composite
    ((key, record),) = found.keys("w")
    assert (key, record.shape, record.strides, found.encoding.members) == (
        "w",
        (3, 4, 2),
        (8, 2, 1),
        3,
    )


def test_members_that_are_views_are_left_out_and_others_are_refused(te: Any) -> None:
    run = torch.arange(24.0)
    views = [run[i * 8 : i * 8 + 8].view(4, 2) for i in range(3)]
    found = tree(
        {"w": grouped(te, (3, 4, 2), torch.float32, rowwise_data=run, quantized_tensors=views)}
    ).get("w")
    assert [key for key, _ in found.keys("w")] == ["w"]
    own = decoded(
        {
            "w": grouped(
                te,
                (3, 4, 2),
                torch.float32,
                rowwise_data=run,
                quantized_tensors=[v.clone() for v in views],
            )
        }
    )
    assert type(own.tree.get("w")) is Opaque
    assert "bytes of their own" in own.outside[0].reason


def test_a_quantized_group_is_seen_as_stacks_of_its_members_components(te: Any) -> None:
    found = tree({"w": quantized(te)}).get("w")
    assert {key: record.shape for key, record in found.keys("w")} == {
        "w._rowwise_data": (3, 64, 32),
        "w._rowwise_scale_inv": (3, 128, 4),
        "w._columnwise_data": (3, 64, 32),
        "w._columnwise_scale_inv": (3, 4, 128),
    }
    assert (found.encoding.format, found.encoding.number, found.encoding.members) == (
        "te-mxfp8",
        "float8_e4m3fn",
        3,
    )
    assert found.encoding.shape == (3, 64, 32)


def test_a_group_of_members_of_different_shapes_keeps_its_flat_runs(te: Any) -> None:
    made = grouped(
        te, (2, 4, 2), torch.float32, rowwise_data=torch.zeros(12), tensor_shapes=[(4, 2), (2, 2)]
    )
    found = tree({"w": made}).get("w")
    assert [(key, record.shape) for key, record in found.keys("w")] == [("w.rowwise_data", (12,))]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_tensors": 0}, "no number of tensors"),
        ({"num_tensors": 10**9}, "no number of tensors"),
        ({"rowwise_data": torch.zeros(23)}, "has 23 elements"),
        ({"rowwise_data": torch.zeros(24, dtype=torch.int32)}, "not made of one run"),
        ({"rowwise_data": None}, "not made of one run"),
        ({"tensor_shapes": ["x", "y", "z"]}, "whose shape is none"),
    ],
)
def test_fields_that_do_not_fit_are_a_contradiction(
    fields: dict[str, Any], message: str, te: Any
) -> None:
    with pytest.raises(CheckpointError) as caught:
        decoded(
            {
                "w": grouped(
                    te, (3, 4, 2), torch.float32, **{"rowwise_data": torch.zeros(24), **fields}
                )
            }
        )
    assert caught.value.diagnostics[0].code == "M936"
    assert message in str(caught.value)


@pytest.mark.parametrize("fields", [{"more": 1}, {"offsets": 3}, {"scale_inv": [1.0]}])
def test_fields_that_are_not_known_leave_it_outside(fields: dict[str, Any], te: Any) -> None:
    found = decoded(
        {"w": grouped(te, (3, 4, 2), torch.float32, rowwise_data=torch.zeros(24), **fields)}
    )
    assert type(found.tree.get("w")) is Opaque


def test_scales_of_another_size_are_a_contradiction(te: Any) -> None:
    with pytest.raises(CheckpointError, match="M936"):
        decoded({"w": quantized(te, scale_inv=torch.zeros(3, dtype=torch.uint8))})


def test_the_group_of_its_members_is_read_like_the_one_that_the_library_pickles(te: Any) -> None:
    both = tree({"group": quantized(te), "one": mxfp8(te, 0)})
    made, genuine = group(both.get("one"), 3), both.get("group")
    assert made is not None
    assert made.encoding.described() == genuine.encoding.described()
    assert [(n, r.dtype, r.shape) for n, r in made.components] == [
        (n, r.dtype, r.shape) for n, r in genuine.components
    ]


def test_a_member_of_a_group_is_what_the_library_pickles(te: Any) -> None:
    both = tree({"group": quantized(te), "one": mxfp8(te, 0)})
    made, genuine = member_of(both.get("group")), both.get("one")
    assert made is not None
    assert made.encoding == genuine.encoding
    assert [(n, r.dtype, r.shape) for n, r in made.components] == [
        (n, r.dtype, r.shape) for n, r in genuine.components
    ]


def test_no_group_is_made_where_the_quantizer_is_not_known(te: Any) -> None:
    older = tree({"w": mxfp8(te, 0, arguments=7)}).get("w")
    assert group(older, 3) is None
    assert member_of(older) is None


def test_members_that_many_objects_share_are_not_walked_for_ever() -> None:
    shapes = [(0, 1)] * 1000
    state = Dict(
        [
            ("num_tensors", 1000),
            ("tensor_shapes", shapes),
            ("quantizer", None),
            ("rowwise_data", dense(shape=(0,), strides=(1,))),
        ]
    )
    name, wrapper = Global(*GROUPED[0]), Global("torch._utils", "_rebuild_wrapper_subclass")
    arguments = (name, Global("torch", "float32"), (1000, 0, 1), (1, 1, 1), 0, None, None, False)
    objects = [
        reduce("torch._tensor", "_rebuild_from_type_v2", wrapper, name, arguments, state)
        for _ in range(5000)
    ]
    assert len(policy.decode(objects[:1500], "x").tree.items) == 1500
    with pytest.raises(CheckpointError, match="more than 2,000,000 members"):
        policy.decode(objects, "x")
