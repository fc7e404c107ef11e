"""Tensors: bit for bit, with their layout, ties and class, or refused by path and reason."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import migrate
from migrate.staging import walk

DTYPES = sorted(
    {x for x in vars(torch).values() if isinstance(x, torch.dtype) and "torch.q" not in str(x)},
    key=str,
)


def staged(state: Any) -> Any:
    return migrate.Stager().stage(state).state


def raw(x: torch.Tensor) -> bytes:
    """The bytes of a tensor's storage, whatever its dtype."""
    storage = x.untyped_storage()
    return bytes(torch.empty(0, dtype=torch.uint8).set_(storage).numpy())


def same(made: torch.Tensor, source: torch.Tensor) -> None:
    assert type(made) is type(source)
    assert (made.dtype, made.layout, made.requires_grad) == (
        source.dtype,
        source.layout,
        source.requires_grad,
    )
    assert made.shape == source.shape
    assert made.stride() == source.stride()
    assert made.storage_offset() == source.storage_offset()
    assert (made.is_conj(), made.is_neg()) == (source.is_conj(), source.is_neg())
    assert raw(made) == raw(source)
    assert made.data_ptr() != source.data_ptr() or not source.numel()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_dtype_keeps_its_bits(dtype: torch.dtype) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # among them NaNs of every kind
        data = torch.arange(256, dtype=torch.uint8).repeat(2).untyped_storage()
        whole = torch.empty(0, dtype=dtype).set_(data, 0, (512 // dtype.itemsize,), (1,))
        view = torch.empty(0, dtype=dtype).set_(data, 3, (2, 3), (1, 4))
        for x in ([whole], [view], [whole, view]):
            for made, source in zip(staged(x), x, strict=True):
                same(made, source)


def channels_last() -> torch.Tensor:
    return torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)


def result() -> torch.Tensor:
    return torch.ones(3, requires_grad=True) * 2


STRIDED: dict[str, Callable[[], torch.Tensor]] = {
    "scalar": lambda: torch.tensor(3.0),
    "transposed": lambda: torch.randn(3, 4).t(),
    "one row, transposed": lambda: torch.randn(5, 1).t(),
    "one channel, channels last": lambda: torch.randn(2, 1, 4, 4).to(
        memory_format=torch.channels_last
    ),
    "strided": lambda: torch.randn(9, 4)[::2, 1::2],
    "channels last": channels_last,
    "expanded": lambda: torch.randn(3, 1).expand(3, 1000),
    "overlapping": lambda: torch.randn(10).unfold(0, 4, 1),
    "no elements": lambda: torch.empty(3, 0, 2),
    "no elements of some": lambda: torch.randn(5, 4)[2:2],
    "no elements of many": lambda: torch.zeros(600_000)[7:7],
    "conj": lambda: torch.randn(3, dtype=torch.complex64).conj(),
    "neg": lambda: torch.randn(3, dtype=torch.complex64).conj().imag,
    "neg without gaps": lambda: torch._neg_view(torch.randn(3)),
    "conj and neg": lambda: torch.randn(3, dtype=torch.complex128).conj().imag.neg(),
    "parameter": lambda: torch.nn.Parameter(torch.randn(2, 2)),
    "frozen parameter": lambda: torch.nn.Parameter(torch.ones(2), requires_grad=False),
    "parameter, turned": lambda: torch.nn.Parameter(torch.randn(3, 4).t()),
    "frozen parameter with gaps": lambda: torch.nn.Parameter(torch.randn(6)[::2], False),
    "parameter of integers": lambda: torch.nn.Parameter(torch.arange(2), requires_grad=False),
    "large": lambda: torch.randn(500, 1000),
}


@pytest.mark.parametrize("kind", STRIDED)
def test_a_strided_tensor_keeps_bits_and_form(kind: str) -> None:
    x = STRIDED[kind]()
    made = staged({"x": x})["x"]
    if kind == "no elements of many":
        assert (made.shape, made.stride(), made.untyped_storage().nbytes()) == ((0,), (1,), 0)
        return
    same(made, x)


def test_results_of_autograd_become_leaves() -> None:
    x = torch.ones(3, requires_grad=True) * 2
    made = staged([x, x[1:]])
    assert [(v.is_leaf, v.requires_grad, v.grad_fn) for v in made] == [(True, True, None)] * 2
    assert made[0].tolist() == [2, 2, 2]


def nested(layout: torch.layout, grad: bool = False) -> torch.Tensor:
    return torch.nested.nested_tensor(
        [torch.ones(2), torch.ones(3)], layout=layout, requires_grad=grad
    )


RESULTS: dict[str, Callable[[], torch.Tensor]] = {
    "sparse": lambda: (torch.eye(3).requires_grad_() * 2).to_sparse(),
    "conj": lambda: torch.ones(2, dtype=torch.cfloat, requires_grad=True).conj(),
    "nested": lambda: nested(torch.strided, True) * 2,
    "jagged": lambda: nested(torch.jagged, True) * 2,
    "subclass": lambda: torch.ones(2).as_subclass(Sub).requires_grad_() * 2,
    "wrapper": lambda: TwoTensor(torch.ones(2), torch.ones(2)).requires_grad_() * 2,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", RESULTS)
def test_results_of_every_kind_become_leaves(kind: str) -> None:
    x = RESULTS[kind]()
    assert not x.is_leaf
    made = staged([x])[0]
    assert type(made) is type(x)
    assert (made.is_leaf, made.requires_grad, made.grad_fn) == (True, True, None)
    assert not x.is_leaf


@pytest.mark.filterwarnings("ignore")
def test_tensors_of_every_kind_keep_their_attributes() -> None:
    state = [
        torch.empty(2, device="meta"), torch.eye(2).to_sparse(), torch.eye(2).to_sparse_csr(),
        torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), nested(torch.strided),
        nested(torch.jagged), torch.nn.Parameter(torch.ones(2)), torch.nn.UninitializedParameter(),
        torch.ones(2, dtype=torch.cfloat).conj(), TwoTensor(torch.ones(2), torch.ones(2)),
        torch.ones(600_000)[:3],
    ]  # fmt: skip
    for number, x in enumerate(state):
        x.tag = [number]
    for number, (x, made) in enumerate(zip(state, staged(state), strict=True)):
        assert made.tag == [number]
        assert made.tag is not x.tag


def test_nothing_of_the_source_changes() -> None:
    base = torch.randn(4, 4)
    state: dict[str, Any] = {
        "w": torch.nn.Parameter(base), "view": base[1:],
        "conj": torch.ones(2, dtype=torch.cfloat).conj(),
        "sparse": torch.eye(3).to_sparse(), "sub": Sub(torch.ones(2)), "two": TwoTensor(base, base),
    }  # fmt: skip
    state["w"].note = {"a": 1}
    versions = {name: x._version for name, x in state.items()}
    looks = {name: (dict(x.__dict__), x.requires_grad) for name, x in state.items()}
    addresses = {name: state[name].data_ptr() for name in ("w", "view", "conj", "sub")}
    bits = raw(base)
    staged(state)
    assert {name: x._version for name, x in state.items()} == versions
    assert {name: (dict(x.__dict__), x.requires_grad) for name, x in state.items()} == looks
    assert {name: state[name].data_ptr() for name in addresses} == addresses
    assert raw(base) == bits


def test_ties_and_views_stay_tied() -> None:
    base = torch.arange(12.0)
    parameter = torch.nn.Parameter(base[:4])
    state = [base, base[2:6], parameter, base.view(3, 4), base.untyped_storage(), parameter]
    made = staged(state)
    made[0].fill_(7)
    assert made[1].eq(7).all()
    assert made[2].eq(7).all()
    assert made[3].eq(7).all()
    assert made[2] is made[5]
    assert made[4].data_ptr() == made[0].data_ptr()
    assert made[1].untyped_storage()._cdata == made[0].untyped_storage()._cdata
    assert base.tolist() == list(range(12))


def test_storages_are_values() -> None:
    x = torch.arange(4, dtype=torch.int16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        typed = x.storage()
        made = staged({"u": x.untyped_storage(), "t": typed, "x": x, "e": torch.UntypedStorage(0)})
        assert type(made["t"]) is type(typed)
        assert made["t"].dtype is torch.int16
        assert list(made["t"]) == [0, 1, 2, 3]
    assert list(made["u"]) == [0, 0, 1, 0, 2, 0, 3, 0]
    made["x"][0] = 1
    assert made["u"][0] == 1
    assert made["e"].nbytes() == 0


def test_memory_that_numpy_and_dlpack_share_is_one() -> None:
    x = torch.arange(100.0)
    array = x.numpy()
    state = {
        "x": x, "array": array, "back": torch.from_numpy(array[10:]),
        "dlpack": torch.from_dlpack(x), "every": array[::-2], "whole": torch.from_numpy(array),
    }  # fmt: skip
    snapshot = migrate.Stager().stage(state)
    made = snapshot.state
    assert snapshot.nbytes == 400
    made["x"].fill_(3)
    for name in state:
        assert set(made[name].tolist()) == {3}
    assert made["every"].strides == array[::-2].strides
    assert x[5] == 5


class Sub(torch.Tensor):
    """A subclass without storage of another kind."""


class SlottedSub(torch.Tensor):
    __slots__ = ("scale",)


class SubParameter(torch.nn.Parameter):
    pass


def test_subclasses_keep_class_and_attributes() -> None:
    shared = torch.arange(3.0)
    plain = shared.as_subclass(Sub)
    plain.scale = shared
    slotted = torch.ones(2).as_subclass(SlottedSub)
    slotted.scale = [shared]
    parameter = SubParameter(torch.ones(2))
    parameter.partition = ("tp", 2)
    view = shared[1:]
    view.name_of_it = "view"
    grad = torch.ones(2).as_subclass(Sub).requires_grad_()
    unset = torch.ones(2).as_subclass(SlottedSub)
    made = staged([plain, slotted, parameter, view, shared, grad, unset])
    assert [type(x) for x in made] == [
        Sub,
        SlottedSub,
        SubParameter,
        torch.Tensor,
        torch.Tensor,
        Sub,
        SlottedSub,
    ]
    assert not hasattr(made[6], "scale")
    assert made[0].scale is made[4]
    assert made[1].scale[0] is made[4]
    assert made[2].partition == ("tp", 2)
    assert (made[2].requires_grad, made[5].requires_grad) == (True, True)
    assert made[3].name_of_it == "view"
    made[4].fill_(9)
    assert made[0].as_subclass(torch.Tensor).tolist() == [9, 9, 9]
    assert made[3].tolist() == [9, 9]


def test_attributes_may_lead_back() -> None:
    x = torch.ones(2)
    x.me = x
    x.holder = [x]
    made = staged(x)
    assert made.me is made
    assert made.holder[0] is made


def test_a_buffer_stays_a_buffer() -> None:
    module = torch.nn.Module()
    module.b = torch.nn.Buffer(torch.ones(2), persistent=False)
    made = staged(module)
    assert isinstance(made.b, torch.nn.Buffer)
    assert made.state_dict() == {}


def sparse(layout: torch.layout) -> torch.Tensor:
    dense = torch.tensor([[0.0, 1, 0, 2], [3, 0, 0, 0], [0, 0, 0, 4], [0, 5, 6, 0]])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        blocks = (2, 2) if layout in (torch.sparse_bsr, torch.sparse_bsc) else None
        return dense.to_sparse(layout=layout, blocksize=blocks)


def parts(x: torch.Tensor) -> list[torch.Tensor]:
    if x.layout is torch.sparse_coo:
        return [x._indices(), x._values()]
    rows = x.layout in (torch.sparse_csr, torch.sparse_bsr)
    index = [x.crow_indices(), x.col_indices()] if rows else [x.ccol_indices(), x.row_indices()]
    return [*index, x.values()]


LAYOUTS = [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_sparse_tensors_are_their_parts(layout: torch.layout) -> None:
    x = sparse(layout)
    values = parts(x)[-1]
    made = staged({"x": x, "values": values, "grad": x.detach().requires_grad_()})
    assert (made["x"].layout, made["x"].shape, made["x"].dtype) == (layout, x.shape, x.dtype)
    for ours, theirs in zip(parts(made["x"]), parts(x), strict=True):
        assert ours.dtype == theirs.dtype
        assert ours.equal(theirs)
    assert made["grad"].requires_grad
    made["values"].zero_()
    assert parts(made["x"])[-1].eq(0).all()
    assert not values.eq(0).all()


@pytest.mark.filterwarnings("ignore")
def test_sparse_tensors_say_whether_they_are_coalesced() -> None:
    index, values = torch.tensor([[0, 0, 1]]), torch.tensor([[1.0, 2], [3, 4], [5, 6]])
    loose = torch.sparse_coo_tensor(index, values, (3, 2))
    empty = torch.sparse_coo_tensor(size=(2, 2))
    made = staged([loose, loose.coalesce(), empty])
    assert [x.is_coalesced() for x in made] == [False, True, empty.is_coalesced()]
    assert made[0]._values().equal(values)
    assert (made[0].sparse_dim(), made[0].dense_dim()) == (1, 1)
    assert made[2]._nnz() == 0


@pytest.mark.filterwarnings("ignore")
def test_quantized_tensors_keep_their_quantizer() -> None:
    weight = torch.randn(4, 8)
    channels = (torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([0, 1, 2, 3]))
    image = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    state = {
        "tensor": torch.quantize_per_tensor(weight, 0.1, 3, torch.quint8),
        "channel": torch.quantize_per_channel(weight, *channels, 0, torch.qint8),
        "axis": torch.quantize_per_channel(weight.t(), *channels, 1, torch.qint32),
        "image": torch.quantize_per_tensor(image, 0.1, 0, torch.qint8),
        "float": torch.quantize_per_channel(
            weight, torch.ones(4), torch.zeros(4), 0, torch.quint4x2
        ),
    }
    state["row"] = state["tensor"][1]
    made = staged(state)
    for name, x in state.items():
        y = made[name]
        assert (y.dtype, y.shape, y.stride(), y.qscheme()) == (
            x.dtype,
            x.shape,
            x.stride(),
            x.qscheme(),
        )
        assert raw(y) == raw(x)
        if x.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
            assert (y.q_scale(), y.q_zero_point()) == (x.q_scale(), x.q_zero_point())
        else:
            assert y.q_per_channel_scales().equal(x.q_per_channel_scales())
            assert y.q_per_channel_zero_points().equal(x.q_per_channel_zero_points())
            assert y.q_per_channel_axis() == x.q_per_channel_axis()
    assert made["row"].data_ptr() == made["tensor"].data_ptr() + 8


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_tensors_are_kept(layout: torch.layout) -> None:
    rows = [torch.arange(3.0), torch.arange(2.0) + 5]
    x = torch.nested.nested_tensor(rows, layout=layout)
    made = staged([x, x])
    assert made[0] is made[1]
    assert made[0].is_nested
    assert made[0].layout is layout
    for ours, theirs in zip(made[0].unbind(), rows, strict=True):
        assert ours.equal(theirs)
    turned = torch.nested.nested_tensor(
        [torch.randn(2, 3), torch.randn(4, 3)], layout=layout
    ).transpose(1, 2)
    for ours, theirs in zip(staged([turned])[0].unbind(), turned.unbind(), strict=True):
        assert ours.stride() == theirs.stride()
        assert ours.equal(theirs)


def test_meta_tensors_stay_on_meta() -> None:
    snapshot = migrate.Stager().stage(
        {"m": torch.empty(3, 4, device="meta").t(), "c": torch.ones(1)}
    )
    assert snapshot["m"].is_meta
    assert snapshot["m"].stride() == (1, 4)
    assert snapshot.nbytes == 4
    assert snapshot.devices == {"['m']": torch.device("meta"), "['c']": torch.device("cpu")}


def test_every_tensor_has_a_path_of_its_own_whatever_its_key() -> None:
    first, second, long = object(), object(), "k" * 300
    keys = [("a", 1), ("a", 2), (1, (2,)), first, second, long + "1", long + "2", "w", 0, "0"]
    found = migrate.Stager().stage({key: torch.ones(1) for key in keys}).devices
    assert len(found) == len(keys)
    assert {"[('a', 1)]", "[('a', 2)]", "[<tuple>]", "['w']", "[0]", "['0']"} < set(found)
    assert {"[<object> #3]", "[<object> #4]"} < set(found)


def test_a_refusal_tells_keys_of_one_class_apart() -> None:
    keys = [object(), object()]
    with pytest.raises(migrate.MigrateError) as caught:
        migrate.Stager().stage({key: threading.Lock() for key in keys})
    assert all(f"[<object> #{at}]" in str(caught.value) for at in range(2))


def test_lazy_parameters_stay_lazy() -> None:
    state = {
        "p": torch.nn.UninitializedParameter(requires_grad=False, dtype=torch.float16),
        "b": torch.nn.UninitializedBuffer(dtype=torch.int8),
        "m": torch.nn.LazyLinear(3),
        "meta": torch.nn.UninitializedParameter(device="meta"),
    }
    made = staged(state)
    assert (made["p"].dtype, made["p"].requires_grad) == (torch.float16, False)
    assert made["b"].dtype is torch.int8
    assert made["meta"].device.type == "meta"
    # on a device only what is restored is there again
    for apart, device in ((False, "cpu"), (True, "cuda")):
        build = walk.Build(b"", [], [], lambda number: torch.UntypedStorage(0), apart=apart)
        assert build._device(torch.device("cuda")).type == device
    assert made["m"](torch.ones(1, 5)).shape == (1, 3)
    made["p"].materialize((2, 2))
    assert made["p"].shape == (2, 2)


class Shell(torch.Tensor):
    """A wrapper that cannot be flattened, as those of several libraries."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor, note: Any) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]

    def __init__(self, inner: torch.Tensor, note: Any) -> None:
        self.inner, self.note = inner, note

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} is called")


class Reduced(Shell):
    def __reduce_ex__(self, protocol: Any) -> Any:
        return Reduced, (self.inner, [self.note])


class Logged(torch.Tensor):
    """Dispatches, and holds bytes itself."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} is called")


def test_wrappers_are_their_inner_tensors() -> None:
    a, b = torch.arange(4.0), torch.ones(4)
    two = TwoTensor(a, b)
    nested = TwoTensor(TwoTensor(a, b), TwoTensor(b, a))
    parameter = torch.nn.Parameter(TwoTensor(a, b))
    two.note = [a]
    made = staged({"two": two, "nested": nested, "parameter": parameter, "a": a})
    assert type(made["two"]) is TwoTensor
    assert made["two"].a is made["a"]
    assert made["two"].note[0] is made["a"]
    assert made["nested"].b.b is made["a"]
    assert isinstance(made["parameter"], torch.nn.Parameter)
    assert made["parameter"].requires_grad
    assert made["parameter"].a.equal(a)
    assert made["nested"].a.b.equal(b)


def test_wrappers_that_cannot_be_flattened_are_class_and_attributes() -> None:
    a = torch.arange(4.0)
    shell, reduced = Shell(a, {"k": 1}), Reduced(a, 3)
    made = staged([shell, reduced, a])
    assert (type(made[0]), made[0].shape, made[0].dtype) == (Shell, (4,), torch.float32)
    assert made[0].inner is made[2]
    assert made[0].note == {"k": 1}
    assert made[0].note is not shell.note
    assert made[1].inner is made[2]
    assert made[1].note == [3]


def test_a_dispatching_class_with_bytes_keeps_them() -> None:
    base = torch.arange(6.0)
    x = torch.Tensor._make_subclass(Logged, base[2:], True)
    x.note = base
    made = staged([x, base])
    with torch._C.DisableTorchFunction():
        assert type(made[0]) is Logged
        assert made[0].untyped_storage().data_ptr() == made[1].data_ptr()
        assert (made[0].storage_offset(), made[0].requires_grad) == (2, True)
    assert made[0].note is made[1]
    pairs = torch.arange(4.0).view(torch.complex64)
    for plain in (pairs.conj(), pairs.conj().imag):
        made = staged([torch.Tensor._make_subclass(Logged, plain)])
        with torch._C.DisableTorchFunction():
            assert (made[0].is_conj(), made[0].is_neg()) == (plain.is_conj(), plain.is_neg())
        same(walk_plain(made[0]), plain)


def walk_plain(x: torch.Tensor) -> torch.Tensor:
    """The tensor without its class, whose methods answer to nothing."""
    with torch._C.DisableTorchFunction():
        plain = torch.empty(0, dtype=x.dtype).set_(
            x.untyped_storage(), x.storage_offset(), x.size(), x.stride()
        )
        plain = torch._conj(plain) if x.is_conj() else plain
        return torch._neg_view(plain) if x.is_neg() else plain


def freed() -> torch.Tensor:
    x = torch.ones(4)
    x.untyped_storage().resize_(8)
    return x


def freed_view() -> torch.Tensor:
    x = torch.ones(3, 4)
    view = x[1:].t()
    x.untyped_storage().resize_(8)
    return view


def packed() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_channel(
            torch.ones(4, 8), torch.ones(4), torch.zeros(4), 0, torch.quint4x2
        )


def emptied(x: torch.Tensor) -> torch.Tensor:
    x.untyped_storage().resize_(4)
    return x


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "freed": (freed, "its storage was freed or shrunk: it holds 8 bytes"),
    "freed view": (freed_view, "its storage was freed or shrunk"),
    "mkldnn": (lambda: torch.ones(2).to_mkldnn(), "the layout torch._mkldnn"),
    "fake": (
        lambda: torch._subclasses.FakeTensorMode().from_tensor(torch.ones(2)),
        "a FakeTensor has a shape and no bytes",
    ),
    "functional": (lambda: torch._to_functional_tensor(torch.ones(2)), "no memory"),
    "zero": (lambda: torch._efficientzerotensor(3), "no memory"),
    "packed, freed": (lambda: emptied(packed()), "or one whose storage was freed"),
    "in a wrapper": (lambda: TwoTensor(freed(), freed()), "its storage was freed"),
    "in an attribute": (lambda: setattr(x := torch.ones(1), "y", freed()) or x, "was freed"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_tensor_without_bytes_is_refused_by_path(kind: str) -> None:
    make, reason = REFUSED[kind]
    stager = migrate.Stager()
    with pytest.raises(migrate.MigrateError) as caught:
        stager.stage({"model": [torch.ones(2), {"deep": make()}], "other": freed()})
    text = str(caught.value)
    assert "M975" in text
    assert "['model'][1]['deep']" in text
    assert reason in text
    assert "['other']: its storage was freed" in text
    assert stager.nbytes == 0
    assert stager.stage([torch.ones(2)]).state[0].tolist() == [1, 1]


@pytest.mark.filterwarnings("ignore")
def test_tensors_of_transforms_are_refused() -> None:
    said = []

    def inside(x: torch.Tensor) -> torch.Tensor:
        with pytest.raises(migrate.MigrateError) as caught:
            staged({"x": x})
        said.append(str(caught.value))
        return x.sum()

    torch.vmap(inside)(torch.ones(2, 3))
    torch.func.grad(inside)(torch.ones(2))
    torch.func.jvp(inside, (torch.ones(2),), (torch.ones(2),))
    assert len(said) == 3
    assert all("['x']: a tensor inside of a transform" in text for text in said)


def test_only_what_tensors_touch_of_a_large_storage_is_held() -> None:
    big = torch.arange(2_000_000, dtype=torch.int32)
    state = {
        "a": big[100:110], "b": big[105:120], "far": big[1_900_000:1_900_010:3], "none": big[50:50],
        "whole": torch.arange(300_000),
    }  # fmt: skip
    stager = migrate.Stager()
    snapshot = stager.stage(state)
    for name, x in state.items():
        assert snapshot[name].equal(x)
        assert snapshot[name].stride() == x.stride()
    assert snapshot.nbytes < 2_400_000 + 1000
    assert stager.nbytes < 2_400_000 + 10_000
    assert snapshot["b"].data_ptr() - snapshot["a"].data_ptr() == 20
    assert len({snapshot[k].untyped_storage().data_ptr() for k in ("a", "b", "far")}) == 1
    # half of it is touched, or it is small: everything is kept where it was
    for x in (big[100:1_100_000], big[16:1_000_016], torch.arange(100_000)[7:9]):
        made = staged([x])[0]
        assert made.storage_offset() == x.storage_offset()
        assert made.untyped_storage().nbytes() == x.untyped_storage().nbytes()


def test_parts_of_many_large_storages_share_pages() -> None:
    state = [torch.full((300_000,), float(n))[n + 16 : n + 32] for n in range(40)]
    stager = migrate.Stager()
    made = stager.stage(state).state
    assert [x.unique().tolist() for x in made] == [[n] for n in range(40)]
    assert stager.nbytes <= 2 * 4096


def test_gaps_of_an_array_are_not_held() -> None:
    array = numpy.arange(1_000_000)[5::1000]
    snapshot = migrate.Stager().stage([array])
    assert snapshot.nbytes <= 8 * len(array) + 64
    assert snapshot.state[0].tolist() == array.tolist()


@pytest.mark.filterwarnings("ignore")
def test_every_view_of_a_large_storage_is_held_in_part() -> None:
    big = torch.arange(2_000_000.0)
    pairs = torch.view_as_complex(big.view(-1, 2))
    codes = torch.quantize_per_tensor(torch.randn(2000, 1000), 0.1, 0, torch.qint8)
    state = {
        "conj": pairs[1000:1010].conj(), "neg": pairs[50:60].conj().imag,
        "turned": big[8000:8100].view(10, 10).t(), "row": codes[3], "again": codes[3, 5:9],
        "parameter": torch.nn.Parameter(big[8050:8060]),
    }  # fmt: skip
    snapshot = migrate.Stager().stage(state)
    assert snapshot.nbytes < 3000
    for name, x in state.items():
        made = snapshot[name]
        assert (made.is_conj(), made.is_neg()) == (x.is_conj(), x.is_neg())
        assert made.equal(x)
    assert snapshot["again"].data_ptr() == snapshot["row"].data_ptr() + 5
    snapshot["turned"].zero_()
    assert snapshot["parameter"].eq(0).all()
    # a storage that is a value itself is touched everywhere
    whole = migrate.Stager().stage([big[3:5], big.untyped_storage()])
    assert whole.nbytes == 8_000_000
    assert whole.state[0].data_ptr() == whole.state[1].data_ptr() + 12
    # and an array of the same memory, which has a storage of its own, keeps all of it
    tied = migrate.Stager().stage([big[3:5], big[4:6].numpy()])
    tied.state[0][1] = -1
    assert tied.state[1][0] == -1


def test_what_deepcopy_makes_of_it_is_what_is_staged() -> None:
    x = torch.randn(3, 4)
    state = {"w": torch.nn.Parameter(x), "v": x[1], "o": numpy.arange(3), "s": x.to_sparse()}
    copied, made = copy.deepcopy(state), staged(state)
    assert made.keys() == copied.keys()
    assert made["w"].equal(copied["w"])
    assert made["v"].equal(copied["v"])
    assert made["s"].to_dense().equal(copied["s"].to_dense())
