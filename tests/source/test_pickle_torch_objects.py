"""Tensors as real torch writes them, against what torch.load makes of the same file; and those that
are refused by name.
"""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch_streams import decoded, dense, reduce, saved, storage, tree

from migrate.core.errors import CheckpointError
from migrate.source.pickle import machine, nodes, policy
from migrate.source.pickle.nodes import Call, Global
from migrate.source.pickle.tree import Constant, DictNode, ListNode, Opaque, Storage, TensorRecord

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int8,
    torch.int16, torch.int32, torch.int64,
    torch.bool, torch.complex64, torch.complex128, torch.uint16, torch.uint32, torch.uint64,
    torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2,
    torch.complex32, torch.bits8,
]  # fmt: skip


def check(record: Any, loaded: torch.Tensor) -> None:
    """The record says of the tensor what torch says of the loaded one."""
    assert type(record) is TensorRecord
    assert (f"torch.{record.dtype}", record.shape, record.strides) == (
        str(loaded.dtype),
        tuple(loaded.shape),
        tuple(loaded.stride()),
    )
    assert record.offset == loaded.storage_offset()
    assert record.storage.nbytes == loaded.untyped_storage().nbytes()
    assert record.requires_grad is loaded.requires_grad
    assert record.parameter is isinstance(loaded, torch.nn.Parameter)
    assert (record.conjugate, record.negative) == (loaded.is_conj(), loaded.is_neg())
    assert record.contiguous is loaded.is_contiguous()


def load(value: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("protocol", [2, 5])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tensor_of_every_dtype_is_what_torch_load_makes_of_it(
    dtype: torch.dtype, protocol: int
) -> None:
    value = torch.zeros(48, dtype=torch.uint8).view(dtype)
    check(tree(value, protocol), load(value))


BASE = torch.arange(120.0).reshape(2, 3, 4, 5)
VIEWS = {
    "whole": BASE,
    "transposed": BASE.transpose(0, 3),
    "offset": BASE[1:, 1],
    "strided": BASE[:, ::2, 1::2],
    "channels last": BASE.contiguous(memory_format=torch.channels_last),
    "expanded": torch.ones(1, 3).expand(7, 3),
    "0-dim": BASE[1, 2, 3, 4],
    "empty": BASE[:0],
    "empty at the end": BASE[2:],
    "no elements": torch.empty(0),
    "conjugate": torch.zeros(3, dtype=torch.complex64).conj(),
    "negative": torch.zeros(3, dtype=torch.complex64).conj().imag,
    "parameter": torch.nn.Parameter(torch.ones(2, 2)),
    "frozen parameter": torch.nn.Parameter(torch.ones(2, 2), requires_grad=False),
    "needs a gradient": torch.ones(2, requires_grad=True),
}


@pytest.mark.parametrize("name", VIEWS)
def test_offset_strides_and_flags_are_those_of_torch(name: str) -> None:
    check(tree(VIEWS[name]), load(VIEWS[name]))


def test_tied_tensors_and_views_name_one_storage() -> None:
    weight = torch.nn.Parameter(torch.ones(4, 4))
    found = tree({"a": weight, "b": weight, "row": weight.detach()[1], "c": torch.ones(4, 4)})
    a, b, row, c = (found.get(key) for key in ("a", "b", "row", "c"))
    assert a is b
    assert row.storage is a.storage
    assert c.storage is not a.storage


def test_attributes_of_tensors_and_parameters_are_kept() -> None:
    tensor, parameter = torch.ones(2), torch.nn.Parameter(torch.ones(2))
    tensor.note = "left"  # type: ignore[attr-defined]
    parameter.sharded = {"dim": 0}  # type: ignore[attr-defined]
    found = tree([tensor, parameter, torch.nn.Buffer(torch.ones(2), persistent=False)])
    assert found.items[0].state.get("note") == "left"
    assert not found.items[0].parameter
    assert found.items[1].parameter
    assert found.items[1].state.get("sharded").get("dim") == 0
    assert found.items[2].subclass == "Buffer"
    assert found.items[2].state.get("persistent") is False


def test_a_device_tag_is_only_text() -> None:
    root = dense(storage(location="cuda:3"))
    found = policy.decode(root, "x").tree
    assert found.storage.location == "cuda:3"
    device = tree([torch.device("cuda", 3), torch.device("meta")])
    assert [(c.kind, c.text) for c in device.items] == [("device", "cuda:3"), ("device", "meta")]


def test_small_values_of_torch_are_constants() -> None:
    values = [
        torch.bfloat16,
        torch.strided,
        torch.sparse_coo,
        torch.per_channel_affine,
        torch.Size([2, 3]),
        torch.Size([]),
    ]
    found = tree(values).items
    assert [(c.kind, c.text) for c in found[:4]] == [
        ("dtype", "bfloat16"),
        ("layout", "strided"),
        ("layout", "sparse_coo"),
        ("qscheme", "per_channel_affine"),
    ]
    assert all(type(c) is Constant for c in found[:4])
    assert [(s.kind, s.items) for s in found[4:]] == [("Size", (2, 3)), ("Size", ())]
    assert type(found[4]) is ListNode


@pytest.mark.filterwarnings("ignore:TypedStorage")
def test_a_storage_by_itself_is_a_storage() -> None:
    found = tree([torch.ones(3).untyped_storage(), torch.ones(3, dtype=torch.float64).storage()])
    assert [(type(s), s.dtype, s.nbytes) for s in found.items] == [
        (Storage, None, 12),
        (Storage, "float64", 24),
    ]


def test_an_adam_state_after_a_step_is_read_to_the_last_number() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    scheduler.step()
    value = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "epoch": 3,
    }

    def same(found: Any, loaded: Any) -> None:
        if isinstance(loaded, torch.Tensor):
            check(found, loaded)
        elif isinstance(loaded, dict):
            assert type(found) is DictNode
            assert found.kind == type(loaded).__name__
            assert [key for key, _ in found.pairs] == list(loaded)
            for key, held in found.pairs:
                same(held, loaded[key])
        elif isinstance(loaded, (list, tuple)):
            assert found.kind == type(loaded).__name__
            assert len(found.items) == len(loaded)
            for held, other in zip(found.items, loaded, strict=True):
                same(held, other)
        else:
            assert type(found) is type(loaded)
            assert found == loaded

    same(tree(value), load(value))
    metadata = tree(value).get("model").attributes.get("_metadata")
    assert metadata.kind == "OrderedDict"
    assert metadata.get("1").get("version") == 2


class Unknown(torch.Tensor):
    """A subclass that no release of torch has."""


REFUSED: dict[str, tuple[Any, str]] = {
    "a sparse tensor": (lambda: torch.eye(2).to_sparse(), "torch._utils._rebuild_sparse_tensor"),
    "a quantized tensor": (
        lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 1, torch.qint8),
        "torch._utils._rebuild_qtensor",
    ),
    "a nested tensor": (
        lambda: torch.nested.nested_tensor([torch.ones(2)]),
        "torch._utils._rebuild_nested_tensor",
    ),
    "the meta device": (
        lambda: torch.ones(2, device="meta"),
        "torch._utils._rebuild_meta_tensor_no_storage",
    ),
    "a tensor subclass": (
        lambda: torch.ones(2).as_subclass(Unknown),
        f"{Unknown.__module__}.Unknown",
    ),
    "a whole module": (lambda: torch.nn.Linear(1, 1), "torch.nn.modules.linear.Linear"),
    "a torch.Generator": (torch.Generator, "torch._C.Generator"),
}


@pytest.mark.parametrize("words", REFUSED)
@pytest.mark.filterwarnings("ignore")
def test_what_is_no_dense_tensor_is_refused_by_name_with_its_place(words: str) -> None:
    make, name = REFUSED[words]
    found = decoded({"keep": torch.ones(1), "deep": [make()]})
    assert [(o.name, o.count, o.paths) for o in found.outside] == [(name, 1, ("deep.0",))]
    assert words in found.outside[0].reason
    assert type(found.tree.get("keep")) is TensorRecord
    assert type(found.tree.get("deep").items[0]) is Opaque


def test_a_sparse_parameter_is_reported_once_and_under_the_name_that_matters() -> None:
    found = decoded({"w": torch.nn.Parameter(torch.eye(2).to_sparse())})
    assert [(o.name, o.count) for o in found.outside] == [
        ("torch._utils._rebuild_sparse_tensor", 1)
    ]


def test_storages_that_only_opaque_values_refer_to_are_known_and_hidden() -> None:
    found = decoded({"w": torch.ones(2), "s": torch.eye(2).to_sparse()})
    keys = {found.tree.get("w").storage.key}
    assert found.hidden == set(found.storages) - keys
    assert len(found.hidden) == 2


HOOKS = reduce("collections", "OrderedDict")
WRONG = {
    "reaches to element 6": dense(offset=1),
    "reaches to element 2,999": dense(strides=(2997, 1)),
    "begins at element -1": dense(offset=-1),
    "begins at element a str": dense(offset="0"),
    "a shape that holds -2": dense(shape=(-2, 3)),
    "a shape that holds a bool": dense(shape=(True, 3)),
    "a shape that holds 9223372036854775808": dense(shape=(2**63, 3)),
    "a shape that holds a number of more than 30 digits": dense(shape=(2**126, 3)),
    "strides that hold -3": dense(strides=(-3, 1)),
    "a list": dense(shape=[2, "3"]),
    "1 dimensions with 2 strides": dense(shape=(6,)),
    "65 dimensions with 65 strides": dense(shape=(1,) * 65, strides=(1,) * 65),
    "more than 2^63 elements": dense(shape=(2**62, 2**62), strides=(0, 0)),
    "made of a str instead of a storage": dense("0"),
    "not a decimal number: ../0": dense(storage("../0")),
    'not a decimal number: ""': dense(storage("")),
    "has -6 elements": dense(storage(numel=-6)),
    "of another type": dense(storage(numel="6")),
    "without a dtype": dense(storage(cls="UntypedStorage", module="torch.storage", numel=24)),
    "requires_grad is a str": reduce("torch._utils", "_rebuild_tensor_v2", storage(), 0, (6,), (1,),
    "yes", HOOKS),
    "torch.device of something other": reduce("torch", "device", 3),
    "where a dtype of torch belongs": reduce(
        "torch._utils", "_rebuild_tensor_v3", storage(), 0, (6,), (1,), False, HOOKS,
        Global("torch", "load")
    ),
    "made of something that is not a tensor": reduce("torch._utils", "_rebuild_parameter", 5, True,
    HOOKS),
}  # fmt: skip


@pytest.mark.parametrize("words", WRONG)
def test_a_tensor_that_cannot_be_is_a_contradiction_at_its_key(words: str) -> None:
    root = machine_dict({"layers.0.weight": WRONG[words]})
    with pytest.raises(CheckpointError) as caught:
        policy.decode(root, "x.pt")
    (found,) = caught.value.diagnostics
    assert found.code == "M936"
    assert found.message.startswith("x.pt: layers.0.weight: ")
    assert words in found.message


def machine_dict(pairs: dict[str, Any]) -> Any:
    from migrate.source.pickle.nodes import Dict

    found = Dict()
    found.pairs += list(pairs.items())
    return found


def test_hooks_changes_and_views_of_storages_are_foreign() -> None:
    hooked = dense()
    hooks = reduce("collections", "OrderedDict")
    hooks.pairs = [(1, reduce("os", "system", "true"))]
    hooked.arguments = (*hooked.arguments[:5], hooks)
    built = dense()
    built.state = (1, 2)
    view = dense(storage())
    view.arguments[0].id = (*view.arguments[0].id, ("1", 0, 3))
    old = dense(storage("7", cls="QubitStorage"))
    found = policy.decode(
        machine_dict({"hooked": hooked, "built": built, "view": view, "old": old}), "x"
    )
    assert {(o.name, o.paths[0]) for o in found.outside} >= {
        ("os.system", "hooked"),
        ("torch.QubitStorage", "old"),
    }
    assert [type(value) for _, value in found.tree.pairs] == [Opaque] * 4
    reasons = [value.reason for _, value in found.tree.pairs]
    for words, reason in zip(
        ["backward hooks", "changed after", "a view of another", "QubitStorage"],
        reasons,
        strict=True,
    ):
        assert words in reason
    assert policy.refusal(found.outside, "x").code == "M935"


def test_an_unknown_number_of_arguments_is_outside_and_not_guessed() -> None:
    call = Call(
        "reduce",
        Global("torch._utils", "_rebuild_tensor_v2"),
        (*dense().arguments, None, None, None),
    )
    found = policy.decode(call, "x")
    assert [(o.name, "9 arguments" in o.reason) for o in found.outside] == [
        ("torch._utils._rebuild_tensor_v2", True)
    ]
    made = Call("newobj", Global("torch._utils", "_rebuild_tensor_v2"), dense().arguments)
    assert type(policy.decode(made, "x").tree) is Opaque


def test_a_legacy_storage_identity_with_an_empty_sixth_field_is_read() -> None:
    call = dense()
    call.arguments[0].id = (*call.arguments[0].id, None)
    assert policy.decode(call, "x").tree.shape == (2, 3)


def test_a_storage_described_twice_is_named_with_both_descriptions() -> None:
    root = machine_dict({"a": dense(storage()), "b": dense(storage(cls="DoubleStorage"))})
    with pytest.raises(
        CheckpointError,
        match="storage 0 is described twice: as 6 of float32 on cpu and as 6 of float64 on cpu",
    ):
        policy.decode(root, "x")
    sizes = machine_dict({"a": dense(storage()), "b": dense(storage(numel=7))})
    with pytest.raises(CheckpointError, match="as 6 of float32 on cpu and as 7 of float32"):
        policy.decode(sizes, "x")


def test_the_container_says_how_large_each_storage_is() -> None:
    data, records = saved({"a": torch.ones(2), "b": torch.ones(3)})
    root = machine.read_pickle(data, nodes.ARCHIVE, name="x", persistent=True)
    with pytest.raises(CheckpointError) as caught:
        policy.decode(root, "x", {"0": records["0"] + 4, "2": 5})
    messages = [d.message for d in caught.value.diagnostics]
    assert messages == [
        "x: a: storage 0 has 12 bytes in the file, and 8 by its description",
        "x: b: storage 1 is not in the file",
        "x: record 2 holds 5 bytes that no tensor refers to",
    ]
