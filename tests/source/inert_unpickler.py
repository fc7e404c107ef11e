"""Unpicklers for what the tests wrote and for genuine states of Transformer Engine. Neither calls
anything but what rebuilds tensors and plain containers, and stand-ins for Transformer Engine.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections import OrderedDict
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch._weights_only_unpickler import _get_allowed_globals

TE = "transformer_engine"


class _Inert:
    """What stands for each class of Transformer Engine."""

    def __init__(self, *_: object) -> None:
        pass

    def __setstate__(self, fields: dict[str, Any]) -> None:
        self.__dict__.update(fields)


def _storage(data: bytes) -> Any:
    """What `torch.storage._load_from_bytes` does, which takes any pickle."""
    return torch.load(io.BytesIO(data), weights_only=True)


_KNOWN = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,  # type: ignore[attr-defined]
    ("torch.storage", "_load_from_bytes"): _storage,
}


def _refuse(module: str, name: str) -> Any:
    raise pickle.UnpicklingError(f"{module}.{name} is not called in the process of the tests")


class InertUnpickler(pickle.Unpickler):
    """Reads states of Transformer Engine; each of its objects keeps its fields and does nothing."""

    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] == TE:
            return _Inert
        return _KNOWN.get((module, name)) or _refuse(module, name)


def _method(owner: Any, name: str) -> Any:
    """`getattr`, for a method of a stand-in."""
    if not (isinstance(owner, type) and owner.__module__.startswith(TE)):
        return _refuse("builtins", "getattr")
    return getattr(owner, name)


class _StandIns(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module.startswith(TE):
            return getattr(sys.modules[module], name)
        if name == "getattr":
            return _method
        return _get_allowed_globals().get(f"{module}.{name}") or _refuse(module, name)


_PICKLE = ModuleType("stand_in_pickle")
_PICKLE.Unpickler = _StandIns  # type: ignore[attr-defined]


def load_stand_ins(path: Path) -> Any:
    """What `torch.load` makes of a file with objects of the stand-ins that are importable now."""
    return torch.load(path, pickle_module=_PICKLE, weights_only=False)
