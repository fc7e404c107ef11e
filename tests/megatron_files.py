"""The files of Megatron's legacy format as torch reads them, without megatron-core, and where two
differ.
"""

from __future__ import annotations

import io
import sys
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from cut_runs import WEIGHTS

# what torch may make of their files: settings, enums by their numbers, numpy's random state
ALLOWED = (
    Namespace,
    io.BytesIO,
    (int, "megatron.core.transformer.enums.AttnBackend"),
    (int, "megatron.core.enums.ModelType"),
    (np.empty(0).__reduce__()[0], "numpy.core.multiarray._reconstruct"),
    (np.empty(0).__reduce__()[0], "numpy._core.multiarray._reconstruct"),
    np.ndarray,
    np.dtype,
    type(np.dtype(np.uint32)),
)


def read_as_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch.load finds in the place of megatron-core's enums."""
    for name in ("megatron", "megatron.core", "megatron.core.enums", "megatron.core.transformer"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    enums = ModuleType("megatron.core.transformer.enums")
    enums.AttnBackend = int  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, enums.__name__, enums)
    sys.modules["megatron.core.enums"].ModelType = int  # type: ignore[attr-defined]


def parts(folder: Path) -> dict[str, Any]:
    with torch.serialization.safe_globals([*ALLOWED]):
        return {
            path.parent.name: torch.load(path, weights_only=True)
            for path in sorted(folder.glob(f"*/{WEIGHTS}"))
        }


def differences(one: Any, other: Any, at: str = "") -> list[str]:
    """Where two values differ, in type, order of keys, attributes or any bit."""
    if type(one) is not type(other):
        return [f"{at}: {type(one).__name__} and {type(other).__name__}"]
    if isinstance(one, torch.Tensor):
        same = one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
        return [] if same else [f"{at}: tensors"]
    if isinstance(one, io.BytesIO):
        same = one.getvalue() == other.getvalue() and one.tell() == other.tell()
        return [] if same else [f"{at}: buffers"]
    if isinstance(one, Namespace):
        return differences(vars(one), vars(other), at)
    if isinstance(one, Mapping):
        found = [] if list(one) == list(other) else [f"{at}: keys or their order"]
        before, after = (getattr(value, "_metadata", None) for value in (one, other))
        found += differences(before, after, f"{at}._metadata") if before or after else []
        return found + [
            text
            for key in one.keys() & other.keys()
            for text in differences(one[key], other[key], f"{at}.{key}")
        ]
    if isinstance(one, (list, tuple)):
        found = [] if len(one) == len(other) else [f"{at}: lengths"]
        for number, pair in enumerate(zip(one, other, strict=False)):
            found += differences(*pair, f"{at}.{number}")
        return found
    return [] if repr(one) == repr(other) else [f"{at}: {one!r} and {other!r}"]
