"""Quantized tensors of Transformer Engine and torchao without these: wrapper subclasses that hold
the same attributes, behave towards torch as the genuine ones do where checkpoints are concerned,
and pickle by the same names.

Each tensor of Transformer Engine knows in what release's words it pickles (`spelled`). Before 2.16
those that torch makes by `empty_like` and its relatives were dense, and since they had no memory
to copy from, `dcp.async_save` wrote what was there: `DENSE_COPIES`, `UNWRITTEN`. Those of 2.14 and
2.15 pickle as the dense numbers.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from quantized_streams import FUNCTIONS, QUANTIZERS, TE, Bound, Called, Quantizer

aten = torch.ops.aten
DENSE_COPIES = False
UNWRITTEN = 7.0
Release = tuple[int, int]
# where processes that are spawned find the packages
PACKAGES = Path(__file__).with_name("stand_in_packages")
_NEW, _OLD = {"e4m3": 7, "e5m2": 8, "e2m1": 10}, {"e4m3": 6, "e5m2": 7}


class Wrapper(torch.Tensor):
    """A tensor that is made of the tensors among its attributes; it has no memory of its own."""

    COMPONENTS: tuple[str, ...] = ()

    @staticmethod
    def __new__(cls, shape: Any, dtype: torch.dtype, attributes: dict[str, Any]) -> Wrapper:
        held = (attributes.get(name) for name in cls.COMPONENTS)
        device = next((one.device for one in held if one is not None), None)
        made = torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=dtype, device=device
        )
        made.__dict__.update(attributes)
        return made

    def __init__(self, *_: Any) -> None:
        """All is done in `__new__`."""

    def __repr__(self, **_: Any) -> str:
        return f"{type(self).__name__}({list(self.shape)})"

    def held(self) -> dict[str, torch.Tensor]:
        """The components."""
        found = {name: self.__dict__.get(name) for name in self.COMPONENTS}
        return {name: one for name, one in found.items() if one is not None}

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        held = self.held()
        return list(held), {k: v for k, v in self.__dict__.items() if k not in held}

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, torch.Tensor], fields: dict[str, Any], size: Any, stride: Any
    ) -> Wrapper:
        return cls(size, _nominal(fields), {**fields, **inner})

    def like(self, make: Callable[[torch.Tensor], torch.Tensor] = lambda one: one) -> Wrapper:
        """The same with `make` of each component."""
        made = {name: make(one) for name, one in self.held().items()}
        return type(self)(self.shape, self.dtype, {**self.__dict__, **made})

    def dequantize(self) -> torch.Tensor:
        """The numbers, in the nominal dtype."""
        raise NotImplementedError(type(self).__name__)

    def quantize_(self, dense: torch.Tensor) -> None:
        """Takes the numbers over, rounded."""
        raise NotImplementedError(type(self).__name__)

    def dense_copies(self) -> bool:
        """Whether tensors that are made like this one are dense."""
        return False

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        keywords, first = keywords or {}, arguments[0]
        if function is aten.is_pinned.default:
            return False
        if function is aten.copy_.default:
            return _copied(first, arguments[1])
        if isinstance(first, Wrapper):
            made = _remade(function, first, arguments, keywords)
            if made is not None:
                return made
        if function._schema.is_mutable:
            raise NotImplementedError(f"{function} of {cls.__name__}")
        plain = [one.dequantize() if isinstance(one, Wrapper) else one for one in arguments]
        return function(*plain, **keywords)


def _nominal(fields: dict[str, Any]) -> torch.dtype:
    for name in ("fake_dtype", "orig_dtype"):
        if fields.get(name) is not None:
            return fields[name]
    return torch.bfloat16


def _copied(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    if not isinstance(target, Wrapper):
        return target.copy_(source.dequantize())
    if type(source) is type(target):
        for name, one in target.held().items():
            one.copy_(source.held()[name])
    else:
        target.quantize_(source.dequantize() if isinstance(source, Wrapper) else source)
    return target


def _remade(function: Any, one: Wrapper, arguments: Any, keywords: Any) -> Any:
    """The result where it is a tensor like `one`, else None."""
    if function in (aten.detach.default, aten.alias.default):
        return one.like()
    if function is aten.clone.default:
        return one.like(torch.clone)
    if function is aten._to_copy.default and keywords.get("dtype", one.dtype) is one.dtype:
        return one.like(torch.clone)
    if function in (aten.view.default, aten.as_strided.default):
        return one.like() if list(arguments[1]) == list(one.shape) else None
    if isinstance(one, Float8Tensor) and (cut := _cut_rows(function, one, arguments)) is not None:
        return cut
    if function is aten.slice.Tensor:
        dim, start, stop = (*arguments[1:4], *(0, 0, sys.maxsize)[len(arguments) - 1 :])
        return one.like() if not start and stop >= one.shape[dim] else None
    if function in (aten.empty_like.default, aten.zeros_like.default):
        dense, make = one.dense_copies(), torch.zeros_like
    elif function in (aten.new_empty.default, aten.new_zeros.default):
        # a shape without axes is one element, which no block is
        dense = one.dense_copies() or list(arguments[1]) != list(one.shape)
        make = torch.zeros_like
    else:
        return None
    if not dense:
        return one.like(make)
    shape = one.shape if len(arguments) < 2 else arguments[1]
    return torch.full(shape, UNWRITTEN, dtype=one.dtype)


def _cut_rows(function: Any, one: Float8Tensor, arguments: Any) -> Any:
    """What `fully_shard` makes of a tensor with one scale: rows of it, and memory for rows."""
    if function is aten.split.Tensor and (len(arguments) < 3 or not arguments[2]):
        step, rows = arguments[1], one.shape[0]
        return [one.rows(start, min(start + step, rows)) for start in range(0, rows, step)]
    if function is aten.slice.Tensor and not arguments[1] and len(arguments) == 4:
        return one.rows(arguments[2], min(arguments[3], one.shape[0]))
    if function is aten.new_zeros.default and len(arguments[1]) == len(one.shape) == 2:
        return None if one.dense_copies() else one.zeros(arguments[1])
    return None


class OfEngine(Wrapper):
    """Of Transformer Engine: pickles as a call of a reconstructor."""

    CODE = "_fp8_dtype"
    # before these releases the reconstructor took so many arguments, the last one takes the rest
    COUNTS: tuple[tuple[Release, int], ...] = ()

    def dense_copies(self) -> bool:
        return DENSE_COPIES

    def untyped_storage(self) -> torch.UntypedStorage:
        if self.dense_copies():
            return super().untyped_storage()
        return torch.UntypedStorage(0, device=self.device)

    def arguments(self) -> tuple[Any, ...]:
        """What the newest reconstructor is given."""
        raise NotImplementedError

    @classmethod
    def spelling(cls, release: Release) -> dict[str, Any]:
        """The attributes that let a tensor pickle as in this release."""
        count = next(n for before, n in cls.COUNTS if release < before)
        spelled = {"_by_method": release < (2, 16), "_count": count}
        return spelled | ({"_dense": True} if (2, 14) <= release < (2, 16) else {})

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.__dict__.get("_dense"):
            return self.dequantize().__reduce_ex__(protocol)
        cls, arguments = type(self), self.arguments()[: self._count]
        if self._by_method:
            return cls._make_in_reduce_ex, arguments
        return getattr(sys.modules[cls.__module__], FUNCTIONS[cls.__name__][1]), arguments

    @classmethod
    def _make_in_reduce_ex(cls, *arguments: Any) -> OfEngine:
        made = cls.rebuilt(*arguments)
        made.__dict__ |= {"_by_method": True, "_count": len(arguments)}
        return made

    @classmethod
    def rebuilt(cls, *arguments: Any) -> OfEngine:
        """The tensor of a reconstructor's arguments."""
        raise NotImplementedError


_NEWEST = (9, 0)


class Float8Tensor(OfEngine):
    COMPONENTS = ("_data", "_transpose", "_scale_inv")
    COUNTS = (((2, 0), 4), ((2, 19), 5), (_NEWEST, 6))

    def arguments(self) -> tuple[Any, ...]:
        return (self._data, self._fp8_dtype, self._scale_inv, self.dtype, self.shape,
                self._transpose)  # fmt: skip

    @classmethod
    def rebuilt(cls, data: Any, code: Any, scale: Any, dtype: Any, *others: Any) -> OfEngine:
        shape, turned = (*others, *(data.shape, None)[len(others) :])
        held = {"_data": data, "_transpose": turned, "_scale_inv": scale, "_fp8_dtype": code}
        return cls(shape, dtype, {**held, "_quantizer": None, "fake_dtype": dtype})

    def rows(self, start: int, stop: int) -> Float8Tensor:
        """These rows, in the same memory."""
        turned = None if self._transpose is None else self._transpose[:, start:stop]
        held = {"_data": self._data[start:stop], "_transpose": turned}
        shape = (stop - start, *self.shape[1:])
        return type(self)(shape, self.dtype, {**self.__dict__, **held})

    def zeros(self, shape: Any) -> Float8Tensor:
        """One of this shape, with the same scale."""
        held = {"_data": self._data.new_zeros(shape), "_scale_inv": self._scale_inv.clone()}
        if self._transpose is not None:
            held["_transpose"] = self._transpose.new_zeros((shape[1], shape[0]))
        return type(self)(shape, self.dtype, {**self.__dict__, **held})

    def dequantize(self) -> torch.Tensor:
        data = self._data.view(torch.float8_e4m3fn).float()
        return (data * self._scale_inv).to(self.dtype)

    def quantize_(self, dense: torch.Tensor) -> None:
        amax = dense.float().abs().max()
        scale = 448 / amax if amax else torch.tensor(1.0)
        codes = (dense.float() * scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        self._data.copy_(codes.view(torch.uint8))
        self._scale_inv.fill_(1 / scale)


class FirstFloat8Tensor(Float8Tensor):
    """The class in the place that it had before 1.11."""


_BOTH = ("_rowwise_data", "_rowwise_scale_inv", "_columnwise_data", "_columnwise_scale_inv")


class MXFP8Tensor(OfEngine):
    COMPONENTS = _BOTH
    COUNTS = (((2, 3), 6), ((2, 6), 7), ((2, 12), 8), (_NEWEST, 9))

    def arguments(self) -> tuple[Any, ...]:
        parts = [getattr(self, name) for name in _BOTH]
        return (*parts, self._fp8_dtype, self.dtype, self.shape, self._quantizer,
                self._with_gemm_swizzled_scales)  # fmt: skip

    @classmethod
    def rebuilt(cls, *arguments: Any) -> OfEngine:
        held, (code, dtype) = dict(zip(_BOTH, arguments[:4], strict=True)), arguments[4:6]
        others = (*arguments[6:], *(None, None, False)[len(arguments) - 6 :])
        fields = {
            "_fp8_dtype": code,
            "_quantizer": others[1],
            "_with_gemm_swizzled_scales": others[2],
            "fake_dtype": dtype,
        }
        return cls(others[0] or arguments[0].shape, dtype, {**held, **fields})

    def dequantize(self) -> torch.Tensor:
        rows, columns = self._rowwise_data.shape
        steps = self._rowwise_scale_inv[:rows, : columns // 32].double() - 127
        codes = self._rowwise_data.view(torch.float8_e4m3fn).float()
        return (codes * torch.exp2(steps).float().repeat_interleave(32, 1)).to(self.dtype)

    def quantize_(self, dense: torch.Tensor) -> None:
        if "_columnwise_data" in self.held():
            raise NotImplementedError("both ways round")
        rows, columns = dense.shape
        blocks = dense.float().reshape(rows, columns // 32, 32)
        steps = torch.ceil(torch.log2(blocks.abs().amax(2).clamp(min=2.0**-100) / 448))
        codes = (blocks * torch.exp2(-steps)[..., None]).clamp(-448, 448)
        self._rowwise_data.copy_(
            codes.to(torch.float8_e4m3fn).view(torch.uint8).reshape(rows, columns)
        )
        self._rowwise_scale_inv[:rows, : columns // 32] = (steps + 127).to(torch.uint8)


class Float8BlockwiseQTensor(OfEngine):
    COMPONENTS = _BOTH
    COUNTS = (((2, 5), 9), (_NEWEST, 10))

    def arguments(self) -> tuple[Any, ...]:
        parts = [getattr(self, name) for name in _BOTH]
        return (self.shape, *parts, self._fp8_dtype, self.dtype, self._quantizer,
                self._is_2D_scaled, self._data_format)  # fmt: skip

    @classmethod
    def rebuilt(cls, shape: Any, *arguments: Any) -> OfEngine:
        held = dict(zip(_BOTH, arguments[:4], strict=True))
        code, dtype, quantizer, square, form = (*arguments[4:], None)[:5]
        fields = {
            "_fp8_dtype": code,
            "_quantizer": quantizer,
            "_is_2D_scaled": square,
            "_data_format": form,
            "fake_dtype": dtype,
        }
        return cls(shape, dtype, {**held, **fields})


class NVFP4Tensor(OfEngine):
    COMPONENTS = (*_BOTH, "_amax_rowwise", "_amax_columnwise")
    CODE = "_fp4_dtype"
    COUNTS = (((2, 12), 10), ((2, 17), 11), (_NEWEST, 14))
    SCALARS = (
        "_with_gemm_swizzled_scales",
        "_row_scaled_nvfp4",
        "_nvfp4_use_4over6",
        "_nvfp4_e4m3_max",
    )

    def arguments(self) -> tuple[Any, ...]:
        parts = [getattr(self, name) for name in self.COMPONENTS]
        scalars = [getattr(self, name) for name in self.SCALARS]
        return (self.shape, *parts, self._fp4_dtype, self.dtype, self._quantizer, *scalars)

    @classmethod
    def rebuilt(cls, shape: Any, *arguments: Any) -> OfEngine:
        held = dict(zip(cls.COMPONENTS, arguments[:6], strict=True))
        code, dtype, quantizer = arguments[6:9]
        scalars = (*arguments[9:], *(False, False, False, 448)[len(arguments) - 9 :])
        fields = dict(zip(cls.SCALARS, scalars, strict=True))
        fields |= {"_fp4_dtype": code, "_quantizer": quantizer, "fake_dtype": dtype}
        return cls(shape, dtype, {**held, **fields})


class GroupedTensor(Wrapper):
    """Tensors of one shape in flat runs; torch pickles it by its attributes."""

    COMPONENTS = (
        "rowwise_data", "columnwise_data", "scale_inv", "columnwise_scale_inv", "amax",
        "columnwise_amax",
    )  # fmt: skip


class OfTorchao(Wrapper):
    """Of torchao: torch pickles it by its attributes."""

    COMPONENTS = (
        "qdata", "scale", "zero_point", "per_tensor_scale", "act_per_tensor_scale",
        "act_quant_scale", "act_quant_zero_point", "act_pre_scale",
    )  # fmt: skip


class Setting:
    """Fields and nothing else, pickled as such."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.__dict__ == other.__dict__

    __hash__ = None  # type: ignore[assignment]


class Flags(tuple[bool, ...]):
    """A named tuple by its items."""

    def __getnewargs__(self) -> tuple[bool, ...]:
        return tuple(self)

    def __new__(cls, *items: bool) -> Flags:
        return super().__new__(cls, items)


_AO, _MX = "torchao.quantization", "torchao.prototype.mx_formats"
_SETTINGS: dict[str, tuple[str, ...]] = {
    f"{_AO}.granularity": ("PerRow", "PerTensor", "PerBlock"),
    f"{_AO}.quantize_.workflows.float8.float8_tensor": ("QuantizeTensorToFloat8Kwargs",),
    f"{_AO}.quantize_.workflows.int8.int8_tensor": ("QuantizeTensorToInt8Kwargs",),
}
_PREFERENCES = {"AUTO": "auto", "TORCH": "torch", "EMULATED": "emulated"}
_MAPPINGS = {"SYMMETRIC": 1, "ASYMMETRIC": 2}
_MODULES: dict[str, ModuleType] = {}


def install() -> dict[str, ModuleType]:
    """Makes the modules importable for the rest of the process, and loadable for torch with
    `weights_only`; the modules by their names.
    """
    if not _MODULES:
        _build()
    sys.modules.update(_MODULES)
    return _MODULES


@contextmanager
def installed() -> Iterator[dict[str, ModuleType]]:
    """The same inside of the block only, with the folder for processes that are spawned."""
    before = {name: sys.modules.get(name) for name in (*_MODULES, *(() if _MODULES else _build()))}
    # the genuine classes of the same names, where something has imported torchao
    safe = torch.serialization.get_safe_globals()
    genuine = [one for one in safe if getattr(one, "__module__", "").startswith("torchao.")]
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals([one for one in safe if one not in genuine])
    sys.path.insert(0, str(PACKAGES))
    sys.modules.update(_MODULES)
    try:
        with torch.serialization.safe_globals(_safe()):
            yield _MODULES
    finally:
        torch.serialization.add_safe_globals(genuine)
        sys.path.remove(str(PACKAGES))
        for name, module in before.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module


def _module(name: str) -> ModuleType:
    """The module, made with all that it lies in."""
    found = ""
    for part in name.split("."):
        above, found = found, f"{found}.{part}" if found else part
        if found not in _MODULES:
            _MODULES[found] = ModuleType(found)
            _MODULES[found].__path__ = []
            if above:
                setattr(_MODULES[above], part, _MODULES[found])
    return _MODULES[found]


def _put(module: str, name: str, value: Any) -> Any:
    value.__module__, value.__qualname__, value.__name__ = module, name, name
    setattr(_module(module), name, value)
    return value


def _build() -> dict[str, ModuleType]:
    for cls in (Float8Tensor, MXFP8Tensor, Float8BlockwiseQTensor, NVFP4Tensor):
        short, function = FUNCTIONS[cls.__name__]
        _put(f"{TE}.tensor.{short}", cls.__name__, cls)
        _put(f"{TE}.tensor.{short}", function, _function(cls))
    _put(f"{TE}.float8_tensor", "Float8Tensor", FirstFloat8Tensor)
    for short, name in QUANTIZERS.items():
        _put(f"{TE}.tensor.{short}", name, type(name, (Quantizer,), {}))
    scaled_now = "Float8CurrentScalingQuantizer"
    _put(f"{TE}.tensor.float8_tensor", scaled_now, type(scaled_now, (Quantizer,), {}))
    _put(f"{TE}.tensor.grouped_tensor", "GroupedTensor", GroupedTensor)
    _put(f"{TE}.constants", "DType", type("DType", (Called,), {}))
    for name in ("DType", "Float8BlockScaleTensorFormat"):
        _put("transformer_engine_torch", name, type(name, (Bound,), {}))
    _put("transformer_engine_extensions", "DType", type("DType", (Bound,), {}))
    for name in ("Float8Tensor", "Int8Tensor", "Int4Tensor"):
        _put(_AO, name, type(name, (OfTorchao,), {}))
    for short, name in (("mx_tensor", "MXTensor"), ("nvfp4_tensor", "NVFP4Tensor")):
        _put(f"{_MX}.{short}", name, type(name, (OfTorchao,), {}))
    for module, names in _SETTINGS.items():
        for name in names:
            _put(module, name, type(name, (Setting,), {}))
    _put("torchao.float8.inference", "Float8MMConfig", type("Float8MMConfig", (Flags,), {}))
    kernels = f"{_AO}.quantize_.common.kernel_preference"
    _put(kernels, "KernelPreference", enum.Enum("KernelPreference", _PREFERENCES, type=str))
    _put(f"{_AO}.quant_primitives", "MappingType", enum.Enum("MappingType", _MAPPINGS))
    return _MODULES


def _function(cls: type[OfEngine]) -> Callable[..., OfEngine]:
    def rebuilt(*arguments: Any) -> OfEngine:
        made = cls.rebuilt(*arguments)
        made.__dict__ |= {"_by_method": False, "_count": len(arguments)}
        return made

    return rebuilt


def _safe() -> list[Any]:
    """What libraries register for `torch.load(weights_only=True)`."""
    found: list[Any] = [getattr]
    for module in _MODULES.values():
        found += [one for one in vars(module).values() if callable(one)]
    methods = [one for one in found if isinstance(one, type) and issubclass(one, OfEngine)]
    named = [(cls._make_in_reduce_ex, f"{cls.__name__}.method") for cls in methods]
    return [*found, *named]


def code(number: str, release: Release) -> Any:
    """The integer of a dtype, as the release has it."""
    numbering = _NEW if release >= (2, 4) else _OLD
    module = f"{TE}.constants" if release >= (2, 17) else "transformer_engine_torch"
    module = module if release >= (1, 8) else "transformer_engine_extensions"
    return _MODULES[module].DType(numbering[number])


def install_name(short: str) -> ModuleType:
    """The module of Transformer Engine's tensors with this last name."""
    return _MODULES[f"{TE}.tensor.{short}"]


def data_format(value: int) -> Any:
    """How scales of blocks lie: 0 for GEMM_READY, 1 for COMPACT."""
    return _MODULES["transformer_engine_torch"].Float8BlockScaleTensorFormat(value)


def of_torchao(name: str) -> type[Wrapper]:
    """The class of torchao."""
    places = {"MXTensor": f"{_MX}.mx_tensor", "NVFP4Tensor": f"{_MX}.nvfp4_tensor"}
    found: type[Wrapper] = getattr(_MODULES[places.get(name, _AO)], name)
    return found


def float8_fields() -> dict[str, Any]:
    """What a Float8Tensor of torchao holds beside its tensors."""
    inference = _MODULES["torchao.float8.inference"]
    preference = _MODULES[f"{_AO}.quantize_.common.kernel_preference"].KernelPreference.AUTO
    return {
        "block_size": None,
        "mm_config": inference.Float8MMConfig(False, True, False),
        "act_quant_kwargs": None,
        "kernel_preference": preference,
    }


def mx_fields() -> dict[str, Any]:
    """What an MXTensor holds beside its tensors and dtypes."""
    kernels = _MODULES[f"{_AO}.quantize_.common.kernel_preference"]
    return {
        "kernel_preference": kernels.KernelPreference.EMULATED,
        "act_quant_kwargs": None,
        "is_swizzled_scales": False,
    }
