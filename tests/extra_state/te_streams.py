"""Extra state made by hand: what releases write, in any protocol, and what only an attacker
writes.
"""

from __future__ import annotations

import io
import pickle
import struct
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

VECTORS = Path(__file__).resolve().parents[1] / "data" / "te"
TE = "transformer_engine.common.recipe"
NAMES = (
    "DelayedScaling",
    "MXFP8BlockScaling",
    "Float8CurrentScaling",
    "Float8BlockScaling",
    "NVFP4BlockScaling",
    "CustomRecipe",
    "MMParams",
    "NewRecipe",
)


def vector(name: str) -> bytes:
    return (VECTORS / name).read_bytes()


class _Helper:
    def __new__(cls, *arguments: Any) -> _Helper:
        made = super().__new__(cls)
        made.arguments = arguments
        return made

    def __getnewargs__(self) -> tuple[Any, ...]:
        return self.arguments  # type: ignore[attr-defined, no-any-return]

    def __getstate__(self) -> None:
        return None


class _Format:
    def __init__(self, pair: Any) -> None:
        self.pair = pair

    def __reduce__(self) -> Any:
        return type(self), (self.pair,)


@contextmanager
def transformer_engine() -> Iterator[ModuleType]:
    """A module of classes that pickle as Transformer Engine's do."""
    module = ModuleType(TE)
    for name in NAMES:
        setattr(module, name, type(name, (), {"__module__": TE}))
    for name, base in (("_FormatHelper", _Helper), ("Format", _Format)):
        setattr(module, name, type(name, (base,), {"__module__": TE}))
    before = {
        name: sys.modules.get(name)
        for name in ("transformer_engine", "transformer_engine.common", TE)
    }
    sys.modules.update(dict.fromkeys(before, module))
    try:
        yield module
    finally:
        for name, old in before.items():
            if old is None:
                del sys.modules[name]
            else:
                sys.modules[name] = old


def recipe(module: ModuleType, name: str, **fields: Any) -> Any:
    made = getattr(module, name)()
    made.__dict__ = {
        "fp8_format": module.Format(module._FormatHelper(448, 57344)),
        "fp8_dpa": False,
        **fields,
    }
    return made


def scaling(rows: int = 4, forward: int = 3, backward: int = 2) -> dict[str, torch.Tensor]:
    """Scales and histories, no two numbers equal."""
    sizes = {
        "scale_fwd": (forward,),
        "amax_history_fwd": (rows, forward),
        "scale_bwd": (backward,),
        "amax_history_bwd": (rows, backward),
    }
    return {
        name: torch.arange(1, 1 + torch.Size(shape).numel(), dtype=torch.float32).reshape(shape) + n
        for n, (name, shape) in enumerate(sizes.items())
    }


def dumps(value: Any, protocol: int = 4) -> bytes:
    return pickle.dumps(value, protocol)


def archive(value: Any) -> bytes:
    """The bytes of the io.BytesIO that 0.12 to 1.13 store."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


# opcodes, for what no pickler writes


def text(value: str) -> bytes:
    return b"\x8c" + bytes([len(value)]) + value.encode()


def found(module: str, name: str) -> bytes:
    return text(module) + text(name) + b"\x93"


def made(name: str, fields: Mapping[str, bytes] | None = None, module: str = TE) -> bytes:
    """An object without arguments, with a state."""
    state = b"" if fields is None else mapping(fields) + b"b"
    return found(module, name) + b")\x81" + state


def mapping(pairs: Mapping[str, bytes]) -> bytes:
    return b"}(" + b"".join(text(key) + value for key, value in pairs.items()) + b"u"


def stream(body: bytes, protocol: int = 4) -> bytes:
    return b"\x80" + bytes([protocol]) + body + b"."


def number(value: float) -> bytes:
    return b"G" + struct.pack(">d", value)
