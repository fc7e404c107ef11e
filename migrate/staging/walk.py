"""Structure: a state becomes a stream, tables of tensors and references, and a state again.

C pickle walks it. It keeps identities, cycles, tuples, slots, frozen dataclasses and objects with
reduce methods of their own as copy.deepcopy does, in half the time, and its stream is what another
process needs to build the same structure. Tensors and storages are numbered and left out of it;
functions, classes and whatever copy.deepcopy answers with itself stand in a table of references.

This module is the one place of the package that unpickles. What it unpickles was made a moment ago
by `Walk`, in this process or in the parent that sent it; `Build.find_class` knows the names
below and nothing else, so that no other stream does anything here.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy
import torch
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass

from .kinds import attributes_of, by_reference, copies_itself, is_fake
from .paths import objects, parts_of_own
from .tensors import NotCopiedError, Storages


# What the stream calls. The pickler writes their names; `Build` answers with something of its own.
def tensor(number: int) -> Any:
    """Stands for the tensor of this number."""


def reference(number: int) -> Any:
    """Stands for the object of this number, which is not copied."""


def storage(number: int) -> Any:
    """Stands for the storage of this number."""


def typed(number: int, dtype: Any) -> Any:
    """Stands for a typed storage."""


def subclass(number: int, cls: Any, grad: bool) -> Any:
    """Stands for the tensor of this number as one of a subclass."""


def instance(number: int, cls: Any, grad: bool) -> Any:
    """Stands for the tensor of this number as one of a subclass that dispatches."""


def lazy(cls: Any, grad: bool, dtype: Any, device: Any) -> Any:
    """Stands for a tensor that has no shape yet."""


def wrapper(cls: Any, inner: Any, context: Any, size: Any, stride: Any, grad: bool) -> Any:
    """Stands for a wrapper made by `__tensor_unflatten__`."""


def shell(cls: Any, dtype: Any, size: Any, stride: Any, grad: bool, device: Any) -> Any:
    """Stands for a wrapper that is its class and its attributes."""


def own(number: int, tensors: Any) -> Any:
    """Stands for an object that is copied by its `__deepcopy__`."""


def attributes(made: Any, state: Any) -> Any:
    """Stands for the Python attributes and slots of a tensor."""


_CALLED: Final = {
    f.__name__: f
    for f in (
        tensor,
        reference,
        storage,
        typed,
        subclass,
        instance,
        lazy,
        wrapper,
        shell,
        own,
        attributes,
    )
}
_CALLED_ONES: Final = frozenset(_CALLED.values())

Reduced = Any
_GENERIC: Final = object()


@contextmanager
def outside_of_modes() -> Iterator[None]:
    """Neither autograd, inference mode, a default device nor a mode of a user counts inside."""
    with (
        torch._C.DisableTorchFunction(),
        _disable_current_modes(),
        # the end of inference mode turns autograd on
        torch.inference_mode(False),
        torch.no_grad(),
    ):
        yield


class Walk(pickle.Pickler):
    """One pass over a state. `run` once; then the tables hold what the stream refers to."""

    def __init__(self) -> None:
        self._file = io.BytesIO()
        super().__init__(self._file, 4)
        self.tensors: list[torch.Tensor] = []
        self.references: list[Any] = []
        self.storages = Storages()
        # tensors that were made for the walk live until the tables are used: their ids are keys
        self._made: list[Any] = []
        # ids of what has a `__deepcopy__` and is being walked or has been
        self.own: set[int] = set()
        self._kinds: dict[type, Any] = {torch.Tensor: _of_tensor, torch.nn.Parameter: _of_tensor}

    def run(self, state: Any) -> bytes:
        """The stream of `state`. What pickle raises on what it cannot walk; `NotCopiedError`."""
        try:
            self.dump(state)
            return self._file.getvalue()
        finally:
            self.clear_memo()

    def reducer_override(self, obj: Any) -> Any:
        cls = type(obj)
        kind = self._kinds.get(cls)
        if kind is None:
            kind = self._kinds[cls] = _kind(cls)
        if kind is _GENERIC:
            return NotImplemented
        return kind(self, obj)

    def refer(self, obj: Any) -> Reduced:
        """Leaves `obj` out of the stream and puts it into the table."""
        self.references.append(obj)
        return reference, (len(self.references) - 1,)

    def keep(self, obj: Any) -> Any:
        """`obj`, alive until the walk's tables go."""
        self._made.append(obj)
        return obj


def _kind(cls: type) -> Any:
    """What makes the reduced form of objects of a class."""
    if issubclass(cls, torch.Tensor):
        return _kind_of_tensor(cls)
    if issubclass(cls, torch.UntypedStorage):
        return _of_storage
    if issubclass(cls, torch.TypedStorage):
        return _of_typed
    if by_reference(cls):
        return _of_reference
    if cls is _Whole:
        return _of_whole
    if cls is numpy.ndarray:
        return _of_array
    if cls is types.MethodType:
        return _of_method
    if copies_itself(cls):
        return _of_own
    if (
        cls in copyreg.dispatch_table
        or getattr(cls, "__reduce_ex__", None) is not object.__reduce_ex__
        or getattr(cls, "__reduce__", None) is not object.__reduce__
    ):
        return _of_reduced
    return _GENERIC


def _kind_of_tensor(cls: Any) -> Any:
    if is_fake(cls):
        return _of_fake
    if issubclass(cls, torch.nn.parameter.UninitializedTensorMixin):
        return _of_lazy
    dispatches = any(
        "__torch_dispatch__" in c.__dict__ for c in cls.__mro__[: cls.__mro__.index(torch.Tensor)]
    )
    if hasattr(cls, "__tensor_flatten__") and dispatches:
        return _of_wrapper
    if cls.__reduce_ex__ not in (torch.Tensor.__reduce_ex__, torch.nn.Parameter.__reduce_ex__):
        return _of_reduced
    return _of_dispatching if dispatches else _of_subclass


def _of_reference(walk: Walk, obj: Any) -> Reduced:
    if type(obj) is types.FunctionType and obj in _CALLED_ONES:
        return NotImplemented
    return walk.refer(obj)


def _of_array(walk: Walk, array: Any) -> Reduced:
    if array.dtype.hasobject:
        # objects in it are copied one by one, by numpy's own reduce
        return NotImplemented
    walk.tensors.append(array)
    return tensor, (len(walk.tensors) - 1,)


def _of_method(walk: Walk, method: Any) -> Reduced:
    return types.MethodType, (method.__func__, method.__self__)


def _of_reduced(walk: Walk, obj: Any) -> Reduced:
    reducer = copyreg.dispatch_table.get(type(obj))
    made = reducer(obj) if reducer is not None else obj.__reduce_ex__(4)
    # a name: the object is a global of its module, which copy.deepcopy does not copy
    return walk.refer(obj) if isinstance(made, str) else made


def _of_storage(walk: Walk, obj: torch.UntypedStorage) -> Reduced:
    return storage, (walk.storages.number(obj, 0, obj.nbytes()),)


def _of_typed(walk: Walk, obj: Any) -> Reduced:
    inner = obj._untyped_storage
    return typed, (walk.storages.number(inner, 0, inner.nbytes()), obj.dtype)


def _of_tensor(walk: Walk, x: torch.Tensor) -> Reduced:
    walk.tensors.append(x)
    made = tensor, (len(walk.tensors) - 1,)
    return _with(made, x.__dict__) if x.__dict__ else made


def _of_subclass(walk: Walk, x: torch.Tensor) -> Reduced:
    walk.tensors.append(walk.keep(x.detach().as_subclass(torch.Tensor)))
    made = subclass, (len(walk.tensors) - 1, type(x), x.requires_grad)
    return _with(made, attributes_of(x))


def _of_wrapper(walk: Walk, x: Any) -> Reduced:
    if not is_traceable_wrapper_subclass(x):
        return _of_shell(walk, x)
    names, context = x.__tensor_flatten__()
    # made here: its id must not become that of another object of the walk
    inner = walk.keep({name: getattr(x, name) for name in names})
    rest = {name: value for name, value in attributes_of(x).items() if name not in inner}
    made = (
        wrapper,
        (
            type(x),
            inner,
            context,
            _Whole(x.size()),
            _Whole(x.stride()),
            x.requires_grad,
        ),
    )
    return _with(made, rest)


def _of_lazy(walk: Walk, x: Any) -> Reduced:
    made = lazy, (type(x), x.requires_grad, x.dtype, x.device)
    return _with(made, attributes_of(x))


def _of_dispatching(walk: Walk, x: Any) -> Reduced:
    """A subclass that dispatches and cannot be flattened: a wrapper, or bytes of its own."""
    try:
        storage = x.untyped_storage()
        filled = bool(storage.nbytes() and storage.data_ptr())
    except RuntimeError:
        filled = False
    if not filled:
        return _of_shell(walk, x)
    empty = torch.empty(0, dtype=x.dtype, device=x.device)
    plain = empty.set_(storage, x.storage_offset(), x.size(), x.stride())
    plain = torch._conj(plain) if x.is_conj() else plain
    walk.tensors.append(walk.keep(torch._neg_view(plain) if x.is_neg() else plain))
    made = instance, (len(walk.tensors) - 1, type(x), x.requires_grad)
    return _with(made, attributes_of(x))


def _of_shell(walk: Walk, x: Any) -> Reduced:
    size, stride = tuple(x.size()), x.stride()
    made = shell, (type(x), x.dtype, size, stride, x.requires_grad, x.device)
    return _with(made, attributes_of(x))


def _of_fake(walk: Walk, x: Any) -> Reduced:
    raise NotCopiedError(f"a {type(x).__name__} has a shape and no bytes")


class _Whole:
    """Holds what goes into the table of references as it is, whatever it is."""

    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held


class _Own:
    """An object that copies itself, and those of its parts that are copied by the walk."""

    __slots__ = ("held", "parts")

    def __init__(self, held: Any, parts: list[Any]) -> None:
        self.held, self.parts = held, parts


def _of_whole(walk: Walk, whole: _Whole) -> Reduced:
    return walk.refer(whole.held)


def _of_own(walk: Walk, obj: Any) -> Reduced:
    if id(obj) in walk.own:
        name = type(obj).__name__
        raise NotCopiedError(f"a {name} copies itself and is reached from one of its own tensors")
    walk.own.add(id(obj))
    known = walk.memo.copy
    parts = parts_of_own(obj, lambda: set(known()))
    return own, (walk.refer(_Own(obj, parts))[1][0], parts)


def _with(made: tuple[Any, ...], state: dict[str, Any]) -> Reduced:
    return (*made, dict(state), None, None, attributes) if state else made


class Build(pickle.Unpickler):
    """Builds a state from the stream of a `Walk` over other tensors."""

    def __init__(
        self,
        stream: bytes,
        tensors: Sequence[torch.Tensor],
        references: list[Any],
        storages: Callable[[int], torch.UntypedStorage],
        *,
        apart: bool = False,
    ) -> None:
        """`apart`: on the devices that the source was on, not on the CPU."""
        super().__init__(io.BytesIO(stream))
        self._tensors, self._references, self._storages = tensors, references, storages
        self._apart = apart
        # objects whose `__deepcopy__` failed, and how
        self._failed: list[tuple[Any, str]] = []

    def run(self) -> Any:
        """The state. NotCopiedError naming all objects that could not copy themselves."""
        try:
            made = self.load()
        except Exception:
            # what met the place of an object that failed is no finding
            if not self._failed:
                raise
        else:
            if not self._failed:
                return made
        finally:
            # the memo holds methods of this object and all that was built: a cycle, which would
            # keep the memory of the snapshot until the garbage collector looks
            self.memo.clear()
        raise NotCopiedError(self._failed[0][1], self._failed)

    def find_class(self, module: str, name: str) -> Any:
        """What stands for one of the names above; nothing else is found, whatever a stream says."""
        if module != __name__ or name not in _CALLED:
            raise pickle.UnpicklingError(f"{module}.{name} is no part of a staged structure")
        if name == "tensor":
            return self._tensors.__getitem__
        if name == "reference":
            return self._references.__getitem__
        if name == "storage":
            return self._storages
        return getattr(self, "_" + name)

    def _typed(self, number: int, dtype: torch.dtype) -> Any:
        return torch.TypedStorage(wrap_storage=self._storages(number), dtype=dtype, _internal=True)

    def _subclass(self, number: int, cls: Any, grad: bool) -> Any:
        made = self._tensors[number].as_subclass(cls)
        return made.requires_grad_() if grad else made

    def _instance(self, number: int, cls: Any, grad: bool) -> Any:
        return torch.Tensor._make_subclass(cls, self._tensors[number], grad)

    def _lazy(self, cls: Any, grad: bool, dtype: Any, device: Any) -> Any:
        return cls(grad, device=self._device(device), dtype=dtype)

    def _device(self, device: torch.device) -> torch.device:
        return device if self._apart or device.type == "meta" else torch.device("cpu")

    def _wrapper(
        self, cls: Any, inner: Any, context: Any, size: Any, stride: Any, grad: bool
    ) -> Any:
        made = cls.__tensor_unflatten__(inner, context, size, stride)
        return made if made.requires_grad == grad else made.requires_grad_(grad)

    def _shell(self, cls: Any, dtype: Any, size: Any, stride: Any, grad: bool, device: Any) -> Any:
        where = self._device(device)
        return torch.Tensor._make_wrapper_subclass(
            cls, size, stride, dtype=dtype, device=where, requires_grad=grad
        )

    def _own(self, number: int, parts: list[Any]) -> Any:
        entry = self._references[number]
        memo = {id(part): twin for part, twin in zip(entry.parts, parts, strict=True)}
        name = type(entry.held).__name__
        try:
            made = entry.held.__deepcopy__(memo)
        except Exception as error:  # noqa: BLE001 - methods of a state may raise anything
            said = f"the __deepcopy__ of {name} raises {type(error).__name__}: {error}"
            self._failed.append((entry.held, said))
            return None
        if self._apart:
            return made
        for _, x, _ in objects(made, inside=True):
            if isinstance(x, torch.Tensor) and x.device.type not in ("cpu", "meta"):
                said = f"the __deepcopy__ of {name} answers with a tensor on {x.device}"
                self._failed.append((entry.held, said))
                return None
        # the copy stands for the original from now on, which the snapshot does not keep alive
        self._references[number] = _Own(made, list(parts))
        return made

    def _attributes(self, made: Any, state: dict[str, Any]) -> Any:
        slots = set(copyreg._slotnames(type(made)))  # type: ignore[attr-defined]
        for name, value in state.items():
            if name in slots:
                setattr(made, name, value)
            else:
                made.__dict__[name] = value
        return made
