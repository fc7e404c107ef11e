"""What kind of object one is: copied, left as it is, or one that copies itself."""

from __future__ import annotations

import copyreg
import enum
import types
import weakref
from typing import Any, Final

import numpy
import torch

_BY_REFERENCE: Final = (
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.ModuleType,
    types.CodeType,
    property,
    weakref.ref,
    type(Ellipsis),
    type(NotImplemented),
    enum.Enum,
    numpy.generic,
    numpy.dtype,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch.qscheme,
    torch.SymInt,
    torch.SymFloat,
    torch.SymBool,
)
# torch's communication: a copy of it would be another group
_GROUPS: Final = frozenset({"DeviceMesh", "ProcessGroup", "Backend", "Store", "Work"})


def by_reference(cls: type) -> bool:
    """Whether objects of a class are never copied, as copy.deepcopy does not or must not."""
    if issubclass(cls, _BY_REFERENCE):
        # a numpy record can be written to
        return not issubclass(cls, numpy.void)
    return any(c.__name__ in _GROUPS and c.__module__.startswith("torch.") for c in cls.__mro__)


def is_fake(cls: type) -> bool:
    """Whether tensors of a class have a shape and no bytes, by torch's own modes."""
    return cls.__module__.startswith("torch._subclasses")


def copies_itself(cls: type) -> bool:
    """Whether objects of a class have a `__deepcopy__` of their own that is used."""
    return hasattr(cls, "__deepcopy__") and not issubclass(cls, torch.Tensor)


def attributes_of(x: Any) -> dict[str, Any]:
    """The Python attributes of an object, those in slots as well."""
    # capsules are what torch remembers of sizes that it asked a wrapper for
    own = getattr(x, "__dict__", {})
    state = {name: v for name, v in own.items() if type(v).__name__ != "PyCapsule"}
    for name in copyreg._slotnames(type(x)):  # type: ignore[attr-defined]
        if hasattr(x, name):
            state[name] = getattr(x, name)
    return state
