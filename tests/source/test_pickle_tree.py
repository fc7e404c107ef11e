"""Walking a decoded tree, and making nodes of it again."""

from __future__ import annotations

import io
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import numpy as np
import pytest
import torch
from torch_streams import decoded, dense, storage, tree

from migrate.core.errors import CheckpointError
from migrate.source.pickle import emit, machine, policy
from migrate.source.pickle.nodes import ARCHIVE, Dict
from migrate.source.pickle.tree import DictNode, ListNode, TensorRecord, dotted, to_nodes, walk


def places(found: Any) -> dict[str, Any]:
    return {dotted(path): value for path, value in walk(found, "x")}


def test_every_value_has_its_path() -> None:
    model = torch.nn.Linear(2, 1)
    found = places(
        tree({"model": model.state_dict(), "groups": [{"params": [0, 1]}], 3: (), "none": None})
    )
    assert found["model.weight"].shape == (1, 2)
    assert found["groups.0.params.1"] == 1
    assert found["3"].kind == "tuple"
    assert found["none"] is None
    assert found["model..state._metadata..version"] == 1


def test_what_is_shared_appears_in_each_place_and_not_without_end() -> None:
    weight = torch.ones(2)
    shared = {"w": weight}
    found = places(tree({"a": shared, "b": shared}))
    assert found["a.w"] is found["b.w"]
    value: Any = ()
    for _ in range(40):
        value = (value, value)
    with pytest.raises(CheckpointError, match="M914"):
        sum(1 for _ in walk(policy.decode(value, "x").tree, "x", most=1000))


def again(value: Any, protocol: int = 2) -> Any:
    """What is read from the stream that is emitted for what was read from torch.save(value)."""
    found = decoded(value, protocol)
    nodes = to_nodes(found.tree, lambda record: record.node)
    data = emit.emit(nodes, name="x")
    return policy.decode(machine.read_pickle(data, ARCHIVE, name="x", persistent=True), "x").tree


def shape_of(value: Any) -> Any:
    if type(value) is DictNode:
        return (
            value.kind,
            [(shape_of(k), shape_of(v)) for k, v in value.pairs],
            shape_of(value.attributes),
        )
    if type(value) is ListNode:
        return (value.kind, [shape_of(item) for item in value.items])
    if type(value) is TensorRecord:
        named = (
            value.dtype,
            value.storage,
            value.offset,
            value.shape,
            value.strides,
            value.requires_grad,
            value.parameter,
        )
        return (*named, shape_of(value.state))
    if type(value) in (int, float, str, bytes, bytearray, bool, type(None), complex, tuple):
        return (type(value), value)
    names = getattr(value, "_fields", None) or type(value).__slots__
    return tuple(shape_of(getattr(value, name)) for name in names if name != "node")


@pytest.mark.parametrize("protocol", [2, 5])
def test_what_is_read_is_written_again_as_it_was(protocol: int) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    value = {
        "model": model.state_dict(), "parameters": list(model.parameters()),
        "default": defaultdict(list, {"a": [1]}),
        "counter": Counter("aab"), "deque": deque([1, torch.ones(2)], 4), "set": {1, "x"},
        "frozen": frozenset([2]),
        "small": [torch.float32, torch.Size([1]), torch.device("cuda", 1), 1j, b"\xff",
        bytearray(b"\xfe"), slice(1), range(3)],
        "numpy": [np.arange(3), np.float32(1)], "buffer": io.BytesIO(b"abc"),
        "ordered": OrderedDict(a=(1, (2,))), (1, "t"): None,
    }  # fmt: skip
    before = decoded(value, protocol)
    assert [(o.name, o.paths) for o in before.outside] == []
    assert shape_of(again(value, protocol)) == shape_of(before.tree)


def test_tensors_are_written_as_the_caller_says_and_ties_stay_one_node() -> None:
    weight = torch.ones(2, 3)
    found = tree({"a": weight, "b": weight, "c": {"d": torch.zeros(1)}})
    made: list[TensorRecord] = []

    def write(record: TensorRecord) -> Any:
        made.append(record)
        return dense(storage("9", record.storage.numel), 0, record.shape, record.strides)

    nodes = to_nodes(found, write)
    assert type(nodes) is Dict
    assert nodes.get("a") is nodes.get("b")
    assert len(made) == 2
    assert nodes.get("c").get("d").arguments[0].id[2] == "9"


def test_containers_of_the_caller_need_no_node() -> None:
    found = DictNode(
        "OrderedDict", (("k", ListNode("list", (1, ListNode("tuple", (2,), None)), None)),), None
    )
    nodes = to_nodes(found, lambda record: record)
    assert (nodes.function.module, nodes.function.name) == ("collections", "OrderedDict")
    assert nodes.pairs == [("k", [1, (2,)])]
    assert to_nodes(DictNode("Counter", (("a", 1),), None), lambda record: record).arguments[
        0
    ].pairs == [("a", 1)]


def test_contiguous_is_what_torch_calls_contiguous() -> None:
    for value in (
        torch.ones(2, 3),
        torch.ones(2, 3).t(),
        torch.ones(0, 3).t(),
        torch.ones(3, 1).t(),
        torch.ones(4)[::2],
        torch.ones(()),
    ):
        assert tree(value).contiguous is value.is_contiguous()
