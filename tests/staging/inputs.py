"""What a stager may be given: states of every kind, and what a copy of one has to be like.

`look` tells everything of a tensor that a snapshot has to keep, as values that compare by bits.
"""

from __future__ import annotations

import collections
import dataclasses
import io
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch


def bits(x: torch.Tensor) -> bytes:
    """The elements of a strided tensor in row-major order, as they read."""
    plain = x.detach().resolve_conj().resolve_neg().as_subclass(torch.Tensor)
    flat = plain.contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def look(x: Any) -> dict[str, Any]:
    """What has to be kept of a tensor, by the words that the page uses for it."""
    found: dict[str, Any] = {
        "class": type(x),
        "dtype": x.dtype,
        "layout": x.layout,
        "requires_grad": x.requires_grad,
        "attributes": {
            k: v for k, v in x.__dict__.items() if isinstance(v, (int, str)) and k[0] != "_"
        },
    }
    if isinstance(x, torch.nn.UninitializedParameter):
        return found
    if x.is_nested:
        found["values"] = [(tuple(part.shape), bits(part)) for part in x.unbind()]
        return found
    found["shape"] = tuple(x.shape)
    if hasattr(type(x), "__tensor_flatten__"):
        names, context = x.__tensor_flatten__()
        inner = [getattr(x, name) for name in names]
        found["values"] = [look(one)["values"] for one in inner if isinstance(one, torch.Tensor)]
        found["context"] = context
        return found
    if isinstance(x, Plain):
        found["values"] = bits(x.data_held)
        return found
    if x.layout is torch.sparse_coo:
        found["values"] = [bits(x._indices()), bits(x._values())]
        found["coalesced"] = x.is_coalesced()
    elif x.layout in (torch.sparse_csr, torch.sparse_bsr):
        found["values"] = [bits(p) for p in (x.crow_indices(), x.col_indices(), x.values())]
    elif x.layout in (torch.sparse_csc, torch.sparse_bsc):
        found["values"] = [bits(p) for p in (x.ccol_indices(), x.row_indices(), x.values())]
    elif x.is_meta:
        found["values"], found["strides"] = None, x.stride()
    elif x.is_quantized:
        axis = None
        scale: Any
        if x.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
            scale = x.q_scale(), x.q_zero_point()
        else:
            scale = bits(x.q_per_channel_scales()), bits(x.q_per_channel_zero_points())
            axis = x.q_per_channel_axis()
        found["values"] = [bits(x.int_repr()), scale, axis]
    else:
        found["strides"] = x.stride()
        found["bits of conj and neg"] = x.is_conj(), x.is_neg()
        found["values"] = bits(x)
    return found


class Tagged(torch.Tensor):
    """A subclass over memory of its own."""


class Plain(torch.Tensor):
    """A wrapper without `__tensor_flatten__`."""

    data_held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> Plain:
        made = torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype)
        made.data_held = held
        return made

    def __repr__(self, **_: Any) -> str:
        return "Plain"

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.ops.aten.detach.default:
            return cls(args[0].data_held)
        raise NotImplementedError(str(function))


class Pair(torch.Tensor):
    """A wrapper of two tensors; `new_empty` answers as the class says."""

    values: torch.Tensor
    scale: torch.Tensor
    EMPTY = "same"

    @staticmethod
    def __new__(cls, values: torch.Tensor, scale: torch.Tensor) -> Pair:
        made = torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.bfloat16)
        made.values, made.scale = values, scale
        return made

    def __repr__(self, **_: Any) -> str:
        return type(self).__name__

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["values", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Pair:
        return cls(inner["values"], inner["scale"])

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        aten = torch.ops.aten
        if function in (aten.detach.default, aten.alias.default):
            return cls(args[0].values, args[0].scale)
        if function is aten.new_empty.default and cls.EMPTY == "same":
            return cls(args[0].values.new_empty(args[1]), args[0].scale.new_empty(()))
        if function is aten.new_empty.default and cls.EMPTY == "dense":
            # what Transformer Engine did before 2.16, with memory that shows itself
            return torch.full(args[1] or args[0].shape, 7.0, dtype=torch.bfloat16)
        raise NotImplementedError(str(function))


class DensePair(Pair):
    EMPTY = "dense"


class NoPair(Pair):
    EMPTY = "none"


class Point(NamedTuple):
    x: torch.Tensor
    n: int


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    inner: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    x: torch.Tensor


class OwnCopy:
    """Copies itself."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnCopy:
        import copy

        return OwnCopy(copy.deepcopy(self.x, memo))


class Reduced:
    """Is rebuilt by a call."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def __reduce__(self) -> Any:
        return Reduced, (self.x,)


@dataclasses.dataclass(frozen=True)
class Input:
    """A kind of input: how it is made, and what else a copy has to fulfil.

    `check` is given the state and its copy, and answers with what is wrong, or "".
    """

    make: Callable[[], Any]
    check: Callable[[Any, Any], str] | None = None


def _numbers(*shape: int) -> torch.Tensor:
    return torch.arange(int(np.prod(shape)), dtype=torch.float32).reshape(shape) + 1


def _tied(state: Any, copy: Any) -> str:
    """Whether a write to the first tensor shows in all others."""
    first, *others = copy if isinstance(copy, list) else copy.values()
    before = [bits(x) for x in others]
    with torch.no_grad():
        first.view(-1)[:1].fill_(-5)
    return "" if all(bits(x) != b for x, b in zip(others, before, strict=True)) else "ties lost"


def _small(state: Any, copy: Any) -> str:
    held = copy["part"].untyped_storage().nbytes()
    return "" if held < 1 << 20 else "all of the storage"


def _views() -> list[torch.Tensor]:
    base = _numbers(4, 6)
    return [base, base[0], base.t(), base[::2, ::3], base.view(-1)[:7]]


def _numpy() -> list[Any]:
    array = np.ones(8, np.float32)
    return [torch.from_numpy(array), torch.from_numpy(array), torch.from_numpy(array)]


def _dlpack() -> list[Any]:
    x = _numbers(8)
    return [x, torch.from_dlpack(x.numpy()), torch.from_dlpack(x.numpy())]


def _with(x: Any, **attributes: Any) -> Any:
    x.__dict__.update(attributes)
    return x


def _copier() -> dict[str, Any]:
    x = _numbers(3)
    return {"copier": OwnCopy(x[1:]), "x": x}


def _copier_tied(state: Any, copy: Any) -> str:
    copy["x"][1] = -5
    return "" if copy["copier"].x[0] == -5 else "ties lost"


def _cyclic() -> dict[str, Any]:
    made: dict[str, Any] = {"x": _numbers(3)}
    made["itself"] = [made]
    return made


def _cycle_kept(state: Any, copy: Any) -> str:
    return "" if copy["itself"][0] is copy else "cycle lost"


def _ordered() -> Any:
    made = collections.OrderedDict(w=_numbers(3))
    made._metadata = {"": {"version": 2}}  # type: ignore[attr-defined]
    return made


def _metadata(state: Any, copy: Any) -> str:
    same = type(copy) is type(state) and copy._metadata == {"": {"version": 2}}
    return "" if same else "`_metadata` lost"


def _containers() -> dict[str, Any]:
    x = _numbers(3)
    return {
        "deque": collections.deque([x], 3),
        "default": collections.defaultdict(list, a=[x]),
        "set": {1, 2},
        "point": Point(x, 3),
        "frozen": Frozen(x, Frozen(x)),
        "slots": Slotted(x),
        "reduced": Reduced(x),
    }


def _containers_kept(state: Any, copy: Any) -> str:
    for name, value in state.items():
        if type(copy[name]) is not type(value):
            return f"{name} lost"
    xs = [
        copy["deque"][0],
        copy["default"]["a"][0],
        copy["point"].x,
        copy["frozen"].x,
        copy["frozen"].inner.x,
        copy["slots"].x,
        copy["reduced"].x,
    ]
    return "" if all(x is xs[0] for x in xs) and copy["deque"].maxlen == 3 else "identity lost"


def _deep(levels: int) -> Any:
    made: Any = {"x": _numbers(2)}
    for _ in range(levels - 2):
        made = {"a": made}
    return made


def _freed() -> Any:
    x = _numbers(64)
    x.untyped_storage().resize_(0)
    return {"x": x}


def _fake() -> Any:
    from torch._subclasses import FakeTensorMode

    return {"x": FakeTensorMode().from_tensor(_numbers(3))}


def _arrays() -> dict[str, Any]:
    x = _numbers(4)
    return {"array": np.arange(3), "storage": x.untyped_storage(), "x": x}


def _arrays_kept(state: Any, copy: Any) -> str:
    if not np.array_equal(copy["array"], state["array"]) or copy["array"] is state["array"]:
        return "array lost"
    same = copy["storage"].data_ptr() == copy["x"].untyped_storage().data_ptr()
    return "" if same else "ties lost"


def _by_reference() -> dict[str, Any]:
    return {"function": _views, "class": Point, "dtype": torch.float32}


def _referred(state: Any, copy: Any) -> str:
    return "" if all(copy[name] is value for name, value in state.items()) else "copied"


def _dtypes() -> list[torch.Tensor]:
    raw = torch.arange(16, dtype=torch.uint8)
    names = [
        "bfloat16",
        "float8_e4m3fn",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
        "uint16",
        "uint64",
        "bits8",
        "bits16",
        "float4_e2m1fn_x2",
        "complex32",
    ]
    return [raw.clone().view(getattr(torch, name)) for name in names]


def _dtypes_kept(state: Any, copy: Any) -> str:
    for x, y in zip(state, copy, strict=True):
        if y.dtype is not x.dtype:
            return "dtype lost"
        if bytes(y.untyped_storage()) != bytes(x.untyped_storage()):
            return "values"
    return ""


def _module() -> dict[str, Any]:
    made = torch.nn.Linear(2, 3)
    made.register_buffer("table", _numbers(2))
    optimizer = torch.optim.Adam(made.parameters())
    made(torch.ones(2)).sum().backward()
    optimizer.step()
    return {"module": made, "optimizer": optimizer}


def _module_kept(state: Any, copy: Any) -> str:
    held = list(copy["module"]._parameters.values())
    if any(type(p) is not torch.nn.Parameter for p in held):
        return "class lost"
    group = copy["optimizer"].param_groups[0]["params"]
    return "" if all(a is b for a, b in zip(held, group, strict=True)) else "ties lost"


def _dtensor() -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (1,))
    return {"x": distribute_tensor(_numbers(4, 2), mesh, [Shard(0)]), "mesh": mesh}


def _mesh_kept(state: Any, copy: Any) -> str:
    same = copy["x"].device_mesh is state["mesh"]
    return (
        "" if same and bits(copy["x"].to_local()) == bits(state["x"].to_local()) else "another mesh"
    )


def _lazy() -> dict[str, Any]:
    return {"x": torch.nn.UninitializedParameter()}


def _complex() -> torch.Tensor:
    return torch.tensor([1 - 2j, 3 + 1j])


def _eye() -> torch.Tensor:
    return torch.eye(4) * 3


# in the words of the page
INPUTS: dict[str, Input] = {
    "tensors that are tied, or views of one storage": Input(_views, _tied),
    "one memory through numpy": Input(_numpy, _tied),
    "one memory through DLPack": Input(_dlpack, _tied),
    "transposed, strided, channels last, expanded": Input(
        lambda: [
            _numbers(2, 3).t(),
            _numbers(8)[1::3],
            _numbers(1).expand(3, 2),
            torch.ones(1, 2, 3, 4).contiguous(memory_format=torch.channels_last),
        ]
    ),
    "a slice of a large storage": Input(lambda: {"part": _numbers(1 << 20)[10:20]}, _small),
    "`Parameter`, also one without `requires_grad`": Input(
        lambda: [torch.nn.Parameter(_numbers(3)), torch.nn.Parameter(_numbers(3), False)]
    ),
    "a tensor with `requires_grad`": Input(lambda: [_numbers(3).requires_grad_()]),
    "a result of autograd": Input(lambda: [_numbers(3).requires_grad_() * 2]),
    "Python attributes of tensors": Input(lambda: [_with(_numbers(3), tag="a", n=3)]),
    "8 bits, 4 bits, `bits8`, `bits16`, `complex32`, …": Input(_dtypes, _dtypes_kept),
    "conj views": Input(lambda: [_complex().conj()]),
    "neg views": Input(lambda: [_complex().conj().imag]),
    "sparse COO, coalesced or not": Input(
        lambda: [_eye().to_sparse(), torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (3,))]
    ),
    "sparse CSR, CSC, BSR, BSC": Input(
        lambda: [
            _eye().to_sparse_csr(),
            _eye().to_sparse_csc(),
            _eye().to_sparse_bsr((2, 2)),
            _eye().to_sparse_bsc((2, 2)),
        ]
    ),
    "torch's quantized tensors, per tensor": Input(
        lambda: [torch.quantize_per_tensor(_numbers(4), 0.1, 3, torch.qint8)]
    ),
    "torch's quantized tensors, per channel": Input(
        lambda: [
            torch.quantize_per_channel(
                _numbers(2, 3), torch.tensor([0.1, 0.2]), torch.tensor([0, 1]), 0, torch.quint8
            )
        ]
    ),
    "nested, strided": Input(lambda: [torch.nested.nested_tensor([_numbers(2), _numbers(3)])]),
    "nested, jagged": Input(
        lambda: [torch.nested.nested_tensor([_numbers(2), _numbers(3)], layout=torch.jagged)]
    ),
    "meta": Input(lambda: [torch.empty(3, 2, device="meta")]),
    "lazy parameters": Input(_lazy),
    "tensors of no elements, and without axes": Input(lambda: [torch.empty(0, 3), _numbers(3)[1]]),
    "subclass with memory of its own": Input(lambda: [_with(_numbers(3).as_subclass(Tagged), n=3)]),
    "wrapper subclass whose `new_empty` is of the class": Input(
        lambda: [Pair(_numbers(3), _numbers(1))]
    ),
    "wrapper subclass whose `new_empty` is dense": Input(
        lambda: [DensePair(_numbers(3), _numbers(1))]
    ),
    "wrapper subclass without `new_empty`": Input(lambda: [NoPair(_numbers(3), _numbers(1))]),
    "wrapper subclass without `__tensor_flatten__`": Input(lambda: [Plain(_numbers(3))]),
    "DTensor": Input(_dtensor, _mesh_kept),
    "modules and optimizers": Input(_module, _module_kept),
    "`OrderedDict` with `_metadata`": Input(_ordered, _metadata),
    "deque, set, NamedTuple, dataclass, slots, `__reduce__`": Input(_containers, _containers_kept),
    "an object with `__deepcopy__` that holds a view": Input(_copier, _copier_tied),
    "cycles": Input(_cyclic, _cycle_kept),
    "functions, classes, dtypes": Input(_by_reference, _referred),
    "Python modules": Input(lambda: {"torch": torch}, _referred),
    "numpy arrays, storages": Input(_arrays, _arrays_kept),
    "400 levels": Input(lambda: _deep(400)),
    "1,000 levels": Input(lambda: _deep(1000)),
    "FakeTensor": Input(_fake),
    "mkldnn": Input(lambda: {"x": _numbers(3).to_mkldnn()}),
    "a storage that was freed (FSDP)": Input(_freed),
    "a lock": Input(lambda: {"a": [threading.Lock()]}),
    "an open file": Input(lambda: {"a": [io.TextIOWrapper(io.BytesIO())]}),
    "a generator": Input(lambda: {"b": (n for n in (1,))}),
}
