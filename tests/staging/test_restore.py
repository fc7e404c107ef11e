"""`Snapshot.restore`: the values back into the live state, or as a new one; refused by path."""

from __future__ import annotations

import copy
import dataclasses
import random
import warnings
from collections import OrderedDict, deque
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import migrate


class Pair(NamedTuple):
    left: Any
    right: Any


class Thing:
    def __init__(self, value: Any) -> None:
        self.value = value


class Lists(list[Any]):
    pass


@dataclasses.dataclass(frozen=True)
class Frozen:
    n: int
    x: Any


def other(**attributes: Any) -> Thing:
    made = Thing(1)
    made.__dict__.update(attributes)
    return made


def held(*values: Any) -> Any:
    made = numpy.empty(len(values), dtype=object)
    made[:] = values
    return made


def read_only(*values: int) -> Any:
    made = numpy.array(values)
    made.flags.writeable = False
    return made


class Own(Thing):
    def __deepcopy__(self, memo: Any) -> Any:
        return Own(copy.deepcopy(self.value, memo))


def train(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 3)).square().sum().backward()
    optimizer.step()


def test_a_bad_step_is_taken_back() -> None:
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(model, optimizer)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 1}
    snapshot = migrate.Stager().stage(state)
    weight = model.weight
    before = weight.detach().clone()
    train(model, optimizer)
    after = weight.detach().clone()
    live = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 2}
    assert snapshot.restore(live) is live
    assert model.weight is weight
    assert weight.equal(before)
    assert live["step"] == 1
    optimizer.load_state_dict(live["optimizer"])
    train(model, optimizer)
    assert weight.equal(after)


def test_modules_and_optimizers_are_restored_in_place() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer)
    optimizer.zero_grad()
    state = {"model": model, "optimizer": optimizer}
    snapshot = migrate.Stager().stage(state)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    train(model, optimizer)
    optimizer.param_groups[0]["lr"] = 5.0
    model.eval()
    snapshot.restore(state)
    assert all(model.state_dict()[name].equal(x) for name, x in before.items())
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert model.training
    assert optimizer.param_groups[0]["params"][0] is model[0].weight


def strided() -> dict[str, torch.Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantized = torch.quantize_per_tensor(torch.randn(4), 0.1, 3, torch.quint8)
        eye = torch.eye(3) * torch.randn(3)
        return {
            "plain": torch.randn(3, 4),
            "parameter": torch.nn.Parameter(torch.randn(2)),
            "turned": torch.randn(3, 4).t(),
            "expanded": torch.randn(3, 1).expand(3, 4),
            "overlapping": torch.randn(8).unfold(0, 4, 1),
            "conj": torch.randn(3, dtype=torch.complex64).conj(),
            "neg": torch.randn(3, dtype=torch.complex64).conj().imag,
            "half": torch.randn(3, dtype=torch.complex32),
            "wide": torch.randn(3, dtype=torch.complex128),
            "float8": torch.randn(4).to(torch.float8_e4m3fn),
            "nan": torch.tensor([0x7F800001, -4194303], dtype=torch.int32).view(torch.float32),
            "bits": torch.arange(4, dtype=torch.uint8).view(torch.bits8),
            "quantized": quantized,
            "coo": eye.to_sparse(),
            "csr": eye.to_sparse_csr(),
            "csc": eye.to_sparse_csc(),
            "nested": torch.nested.nested_tensor([torch.randn(2), torch.randn(3)]),
            "jagged": torch.nested.nested_tensor(
                [torch.randn(2), torch.randn(3)], layout=torch.jagged
            ),
            "two": TwoTensor(torch.randn(3), torch.randn(3)),
            "empty": torch.empty(0, 3),
            "meta": torch.empty(2, device="meta"),
        }


def bits(x: Any) -> list[bytes]:
    """The bytes of all storages of a tensor."""
    if isinstance(x, TwoTensor):
        return bits(x.a) + bits(x.b)
    if x.is_nested:
        inner = x.values() if x.layout is torch.jagged else torch.ops.aten.values(x)
        return bits(inner.detach())
    if x.layout is torch.sparse_coo:
        return bits(x._indices()) + bits(x._values())
    if x.layout is torch.sparse_csr:
        return bits(x.crow_indices()) + bits(x.col_indices()) + bits(x.values())
    if x.layout is torch.sparse_csc:
        return bits(x.ccol_indices()) + bits(x.row_indices()) + bits(x.values())
    if x.is_meta:
        return []
    if x.is_neg():
        # what lies between its elements is not restored in place
        x = x.resolve_neg().contiguous()
    return [bytes(torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage()).numpy())]


def spoil(x: Any) -> None:
    if isinstance(x, TwoTensor):
        spoil(x.a)
        spoil(x.b)
    elif x.is_nested:
        spoil((x.values() if x.layout is torch.jagged else torch.ops.aten.values(x)).detach())
    elif x.layout is torch.sparse_coo:
        spoil(x._values())
    elif x.layout in (torch.sparse_csr, torch.sparse_csc):
        spoil(x.values())
    elif not x.is_meta:
        torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage()).bitwise_not_()


@pytest.mark.parametrize("kind", strided())
def test_a_tensor_is_restored_bit_for_bit_in_place(kind: str) -> None:
    x = strided()[kind]
    state = {"x": x, "other": [torch.ones(2)]}
    before = bits(x)
    snapshot = migrate.Stager().stage(state)
    spoil(x)
    assert not before or bits(x) != before or kind == "empty"
    snapshot.restore(state)
    assert state["x"] is x
    assert bits(x) == before
    new = snapshot.restore()
    assert bits(new["x"]) == before
    assert type(new["x"]) is type(x)
    spoil(new["x"])
    assert bits(snapshot["x"]) == before


def test_gaps_of_a_view_are_left_alone() -> None:
    base = torch.arange(10.0)
    view = base[::3]
    snapshot = migrate.Stager().stage([view])
    base.fill_(-1)
    snapshot.restore([view])
    assert base.tolist() == [0, -1, -1, 3, -1, -1, 6, -1, -1, 9]


def test_a_new_state_is_on_its_own_and_tied_as_it_was() -> None:
    x = torch.nn.Parameter(torch.arange(4.0))
    state = {"x": x, "view": x.detach()[1:], "list": [1, {"a": (x,)}], "array": x.detach().numpy()}
    snapshot = migrate.Stager().stage(state)
    new = snapshot.restore()
    assert type(new["x"]) is torch.nn.Parameter
    assert new["list"][1]["a"][0] is new["x"]
    new["view"].fill_(9)
    assert new["x"].tolist() == [0, 9, 9, 9]
    assert new["array"].tolist() == [0, 9, 9, 9]
    assert snapshot["x"].tolist() == x.tolist() == [0, 1, 2, 3]
    snapshot.release()
    assert new["x"].tolist() == [0, 9, 9, 9]


def test_values_other_than_tensors_come_back() -> None:
    state: dict[str, Any] = {
        "n": 1, "zero": 0.0, "flag": True, "text": "a", "list": [1, [2, 3]], "set": {1, 2},
        "bytes": bytearray(b"ab"), "deque": deque([1, 2]), "ordered": OrderedDict(a=1),
        "thing": Thing(1), "own": Own([1]), "array": numpy.arange(3), 3: "by number",
        "python": random.Random(1), "numpy": numpy.random.default_rng(1), "tuple": (1, [2]),
        "torch": torch.Generator().manual_seed(4), "storage": torch.ones(1).untyped_storage(),
        "equal": (1000, float("inf")), "pair": Pair([1], 10**20), None: 1,
        "k" * 300: 1, ("t", 1): 1, "function": len, "dtype": torch.float32, "lists": Lists([1]),
        "kept": read_only(1, 2),
    }  # fmt: skip
    state["lists"].tag = 1
    identities = {key: id(value) for key, value in state.items()}
    snapshot = migrate.Stager().stage(state)
    expected = (
        snapshot.restore()["python"].random(),
        snapshot.restore()["numpy"].random(),
        torch.rand(1, generator=snapshot.restore()["torch"]),
    )
    state.update(n=2, zero=-0.0, flag=1, text="b")
    state["list"][1][0] = 9
    state["set"].add(7)
    state["bytes"][:] = b"xyz"
    state["deque"][0] = 9
    state["ordered"]["a"] = 2
    state["thing"].value = 5
    state["own"].value[0] = 5
    state["array"][:] = 8
    state[3] = "changed"
    state["python"].random(), state["numpy"].random(), torch.rand(1, generator=state["torch"])
    state["tuple"][1][0] = 9
    state["pair"].left[0] = 9
    state["storage"][0] = 1
    state.update({None: 2, "k" * 300: 2, ("t", 1): 2, "function": print, "dtype": torch.int8})
    state["lists"][0] = state["lists"].tag = 2
    snapshot.restore(state)
    assert (state[None], state["k" * 300], state["lists"][0], state["lists"].tag) == (1, 1, 1, 1)
    assert state["t", 1] == 1
    assert (state["function"], state["dtype"]) == (len, torch.float32)
    assert (state["n"], str(state["zero"]), state["flag"] is True) == (1, "0.0", True)
    assert (state["text"], state["list"], state["set"]) == ("a", [1, [2, 3]], {1, 2})
    assert (state["bytes"], list(state["deque"])) == (b"ab", [1, 2])
    assert (state["ordered"]["a"], state["thing"].value, state["own"].value) == (1, 1, [1])
    assert (state["array"].tolist(), state[3]) == ([0, 1, 2], "by number")
    assert (state["tuple"], state["pair"].left, state["storage"][0]) == ((1, [2]), [1], 0)
    assert state["python"].random() == expected[0]
    assert state["numpy"].random() == expected[1]
    assert torch.rand(1, generator=state["torch"]).equal(expected[2])
    scalars = ("n", "zero", "flag", "text", 3, None, "k" * 300, ("t", 1), "function", "dtype")
    assert {key: id(v) for key, v in state.items() if key not in scalars} == {
        key: number for key, number in identities.items() if key not in scalars
    }


def tied() -> dict[str, Any]:
    x = torch.ones(2)
    return {"a": x, "b": x}


def nested(*lengths: int) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.ones(n) for n in lengths])


OTHERS: dict[str, tuple[Any, Any, str]] = {
    "more keys": ({"a": 1}, {"a": 1, "b": 2}, "the state itself: has 'b'"),
    "fewer keys": ({"a": {"x": 1, "y": 2}}, {"a": {"x": 1}}, "['a']: lacks 'y'"),
    "shape": ({"a": [torch.ones(2)]}, {"a": [torch.ones(3)]}, "['a'][0]: torch.float32 [3] "),
    "dtype": ([torch.ones(2)], [torch.ones(2).double()], "[0]: torch.float64 [2] instead of"),
    "layout": ([torch.eye(2)], [torch.eye(2).to_sparse()], "[0]: torch.float32 [2, 2] torch."),
    "meta": ([torch.ones(2)], [torch.ones(2, device="meta")], "[0]: a tensor on the meta device"),
    "kind": ({"a": [1]}, {"a": {0: 1}}, "['a']: dict instead of list"),
    "length": ([[1, 2]], [[1]], "[0]: 1 parts instead of 2"),
    "tuple": ({"a": (1, 2)}, {"a": Pair(1, 2)}, "['a']: Pair instead of tuple"),
    "in a named tuple": ([Pair(1, torch.ones(1))], [Pair(2, torch.ones(1))], "[0].left: a Pair "),
    "array": ([numpy.ones(2)], [numpy.ones(3)], "[0]: float64 (3,) instead of float64 (2,)"),
    "set": ({1, 2}, {1, Thing(2)}, "{1}: Thing instead of int"),
    "nested": ([torch.ones(2)], [nested(2, 3)], "[0]: torch.float32 nested instead of"),
    "not nested": ([nested(2, 3)], [torch.ones(2)], "instead of torch.float32 nested"),
    "dtype of nested": ([nested(2)], [nested(2).double()], "[0]: torch.float64 nested instead of"),
    "shape of nested": ([nested(2, 3)], [nested(3, 2)], "[0]: torch.float32 nested instead of"),
    "objects": ([held([1], 2)], [held([2], 2)], "[0]: an array of objects"),
    "read-only": ([read_only(1, 2)], [read_only(1, 3)], "[0]: an array that is read-only"),
    "frozen": ([Frozen(1, torch.ones(1))], [Frozen(2, torch.ones(1))], "[0].n: a Frozen cannot be"),
    "attributes": ([Thing(1)], [other(more=2)], "[0]: other parts"),
    "tied": ({"a": torch.ones(2), "b": torch.ones(2)}, tied(), "one object where the "),
}  # fmt: skip


@pytest.mark.parametrize("kind", OTHERS)
def test_another_structure_is_refused_by_path_and_nothing_is_written(kind: str) -> None:
    staged, live, said = OTHERS[kind]
    guard = torch.zeros(3)
    snapshot = migrate.Stager().stage([torch.ones(3), 5, staged])
    target = [guard, 6, live]
    with pytest.raises(migrate.MigrateError) as caught:
        snapshot.restore(target)
    assert "M977" in str(caught.value)
    wanted = said.replace("the state itself", "[2]")
    assert wanted in str(caught.value).replace("[2][", "[").replace("[2].", ".") or wanted in str(
        caught.value
    )
    assert guard.tolist() == [0, 0, 0]
    assert target[1] == 6


def test_equal_tuples_may_be_one() -> None:
    """As constants of a program are, whether or not the copies of them are."""
    x = torch.ones(1)
    snapshot = migrate.Stager().stage({"a": (1, x), "b": (1, x)})
    both = (1, x)
    x.zero_()
    snapshot.restore({"a": both, "b": both})
    assert x.item() == 1


def test_conj_and_neg_views_are_restored_from_tensors_that_are_none() -> None:
    plain = torch.tensor([1 + 2j, 3 - 4j])
    snapshot = migrate.Stager().stage([plain, plain.imag])
    base = torch.zeros(2, dtype=torch.complex64)
    other = torch.zeros(2, dtype=torch.complex64)
    snapshot.restore([base.conj(), other.conj().imag])
    assert base.conj().equal(plain)
    assert other.conj().imag.equal(plain.imag)


def test_a_new_state_has_tensors_of_no_elements() -> None:
    new = migrate.Stager().stage([torch.zeros(600_000)[7:7], torch.empty(0, 3)]).restore()
    assert [tuple(x.shape) for x in new] == [(0,), (0, 3)]


def test_all_paths_that_differ_are_named() -> None:
    snapshot = migrate.Stager().stage({"a": torch.ones(2), "b": [1], "c": torch.ones(1)})
    with pytest.raises(migrate.MigrateError) as caught:
        snapshot.restore({"a": torch.ones(3), "b": (1,), "c": torch.ones(1)})
    assert "['a']: " in str(caught.value)
    assert "['b']: " in str(caught.value)
    assert "['c']" not in str(caught.value)


def test_inference_tensors_are_restored() -> None:
    with torch.inference_mode():
        state = [torch.ones(3)]
    snapshot = migrate.Stager().stage(state)
    with torch.inference_mode():
        state[0].zero_()
    snapshot.restore(state)
    assert state[0].tolist() == [1, 1, 1]


def test_cycles_are_restored() -> None:
    state: list[Any] = [torch.ones(1), 1]
    state.append(state)
    snapshot = migrate.Stager().stage(state)
    state[0].zero_()
    state[1] = 2
    snapshot.restore(state)
    assert (state[0].item(), state[1]) == (1, 1)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("grad", [False, True])
def test_a_sparse_tensor_gets_its_elements_and_whether_it_is_coalesced(grad: bool) -> None:
    x = (torch.eye(3) * 2).to_sparse().coalesce().requires_grad_(grad)
    loose = torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (3,)).requires_grad_(grad)
    snapshot = migrate.Stager().stage([x, loose])
    with torch.no_grad():
        x._coalesced_(False)
        snapshot.restore([x, loose])
        assert (x.is_coalesced(), loose.is_coalesced()) == (True, False)
        # no elements any more
        x.zero_()
        loose.zero_()
    assert x._nnz() == 0
    snapshot.restore([x, loose])
    assert x.detach().to_dense().equal(torch.eye(3) * 2)
    assert loose._values().tolist() == [1, 2]
    assert (x.is_coalesced(), loose.is_coalesced()) == (True, False)
    assert (x.requires_grad, x.is_leaf) == (grad, True)


class Once:
    """Copies itself, but no copy of it does."""

    def __init__(self, left: int) -> None:
        self.left = left

    def __deepcopy__(self, memo: Any) -> Any:
        if not self.left:
            raise ValueError("used up")
        return Once(self.left - 1)


def test_what_cannot_copy_itself_again_is_named() -> None:
    snapshot = migrate.Stager().stage({"a": [Once(1)]})
    with pytest.raises(migrate.MigrateError, match=r"M975.*\['a'\]\[0\]: .*used up"):
        snapshot.restore()
    assert snapshot["a"][0].left == 0


def test_a_released_snapshot_restores_nothing() -> None:
    snapshot = migrate.Stager().stage([torch.ones(1)])
    snapshot.release()
    with pytest.raises(migrate.MigrateError, match="M976"):
        snapshot.restore()
