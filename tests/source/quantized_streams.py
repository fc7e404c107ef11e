"""Objects that pickle by the names of Transformer Engine without it: modules that hold stand-ins
while a test runs.
"""

from __future__ import annotations

import copyreg
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

TE = "transformer_engine.pytorch"
FUNCTIONS = {
    "Float8Tensor": ("float8_tensor", "_make_float8_tensor_in_reduce_ex"),
    "MXFP8Tensor": ("mxfp8_tensor", "_make_mxfp8_tensor_in_reduce_ex"),
    "Float8BlockwiseQTensor": (
        "float8_blockwise_tensor",
        "_make_float8_blockwise_tensor_in_reduce_ex",
    ),
    "NVFP4Tensor": ("nvfp4_tensor", "_make_nvfp4_tensor_in_reduce_ex"),
}
QUANTIZERS = {
    "mxfp8_tensor": "MXFP8Quantizer",
    "float8_blockwise_tensor": "Float8BlockQuantizer",
    "nvfp4_tensor": "NVFP4Quantizer",
}


class Made:
    """What a reconstructor was called with; pickles as that call."""

    def __init__(self, function: Any, arguments: tuple[Any, ...]) -> None:
        self.function, self.arguments = function, arguments

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.function, self.arguments


class Quantizer:
    """Fields and nothing else."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.__dict__ == other.__dict__

    __hash__ = None  # type: ignore[assignment]


class Called:
    """A dtype that pickles as `DType(7)`, as releases from 2.16 on write it."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.value == other.value  # type: ignore[attr-defined]

    __hash__ = None  # type: ignore[assignment]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return type(self), (self.value,)


class Bound(Called):
    """A dtype that pickles as an enum of pybind11 does: a bare object, then the integer as its
    state.
    """

    def __reduce_ex__(self, protocol: Any) -> Any:
        return copyreg.__newobj__, (type(self),), self.value  # type: ignore[attr-defined]

    def __setstate__(self, value: int) -> None:
        self.value = value


class GroupedTensor(torch.Tensor):
    """A wrapper subclass that holds its fields."""

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        if function is torch.ops.aten.detach.default:
            return arguments[0]
        raise NotImplementedError(str(function))


@contextmanager
def stand_ins() -> Iterator[dict[str, ModuleType]]:
    """The modules by their last names, importable inside of the block."""
    modules: dict[str, ModuleType] = {}
    places = {
        **{module: f"{TE}.tensor.{module}" for module, _ in FUNCTIONS.values()},
        "old_float8_tensor": f"{TE}.float8_tensor",
        "constants": f"{TE}.constants",
        "grouped_tensor": f"{TE}.tensor.grouped_tensor",
        "transformer_engine_torch": "transformer_engine_torch",
        "transformer_engine_extensions": "transformer_engine_extensions",
        "te": "transformer_engine",
        "pytorch": TE,
        "tensor": f"{TE}.tensor",
    }
    for short, name in places.items():
        modules[short] = ModuleType(name)
        modules[short].__path__ = []
    for cls, (short, function) in FUNCTIONS.items():
        for module in (
            (modules[short], modules["old_float8_tensor"])
            if cls == "Float8Tensor"
            else (modules[short],)
        ):
            _put(module, function)
            _put_class(module, cls)
    for short, name in QUANTIZERS.items():
        _place(modules[short], name, type(name, (Quantizer,), {}))
    _place(modules["constants"], "DType", type("DType", (Called,), {}))
    for short in ("transformer_engine_torch", "transformer_engine_extensions"):
        _place(modules[short], "DType", type("DType", (Bound,), {}))
    _place(
        modules["transformer_engine_torch"],
        "Float8BlockScaleTensorFormat",
        type("Float8BlockScaleTensorFormat", (Bound,), {}),
    )
    _place(modules["grouped_tensor"], "GroupedTensor", type("GroupedTensor", (GroupedTensor,), {}))
    before = {name: sys.modules.get(name) for name in places.values()}
    sys.modules.update({name: modules[short] for short, name in places.items()})
    try:
        yield modules
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def _put(module: ModuleType, name: str) -> None:
    def function(*arguments: Any) -> Made:
        return Made(function, arguments)

    function.__module__, function.__name__, function.__qualname__ = module.__name__, name, name
    setattr(module, name, function)


def _put_class(module: ModuleType, name: str) -> None:
    def method(cls: Any, *arguments: Any) -> Made:
        return Made(cls._make_in_reduce_ex, arguments)

    method.__name__, method.__qualname__ = "_make_in_reduce_ex", f"{name}._make_in_reduce_ex"
    _place(module, name, type(name, (), {"_make_in_reduce_ex": classmethod(method)}))


def _place(module: ModuleType, name: str, cls: type) -> None:
    cls.__module__, cls.__qualname__ = module.__name__, name
    setattr(module, name, cls)


def mxfp8(
    modules: dict[str, ModuleType],
    seed: int,
    *,
    shape: tuple[int, int] = (64, 32),
    arguments: int = 9,
) -> Made:
    """An MXFP8Tensor as 2.17 pickles it, its bytes drawn at random; fewer `arguments` are those of
    older releases.
    """
    torch.manual_seed(seed)
    rows, columns = shape
    code = modules["constants"].DType(7)
    quantizer = modules["mxfp8_tensor"].MXFP8Quantizer(
        rowwise_usage=True, columnwise_usage=True, dtype=code
    )
    parts = [(rows, columns), (-(-rows // 128) * 128, 4), (rows, columns), (4, 128)]
    data = [torch.randint(0, 256, part, dtype=torch.uint8) for part in parts]
    every = (*data, code, torch.bfloat16, torch.Size(shape), quantizer, False)
    return Made(modules["mxfp8_tensor"]._make_mxfp8_tensor_in_reduce_ex, every[:arguments])
