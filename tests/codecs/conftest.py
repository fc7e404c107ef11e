from __future__ import annotations

from typing import Any

import pytest
import torch

from migrate.codecs import get
from migrate.codecs.kit.rounding import Lanes


@pytest.fixture
def other_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """`fp8-block` is given torch tensors, and takes them for another device's: torch's own casts,
    no look at the elements between.
    """
    kind = type(get("fp8-block"))
    encode, decode = kind.encode, kind.decode

    def encoded(
        self: Any, args: Any, array: Any, spec: Any, part: int, box: Any, out: Any, *rest: Any
    ) -> None:
        encode(self, args, torch.from_numpy(array), spec, part, box, torch.from_numpy(out), *rest)

    def decoded(
        self: Any, args: Any, arrays: Any, specs: Any, dtype: str, box: Any, out: Any, *rest: Any
    ) -> None:
        decode(
            self,
            args,
            [torch.from_numpy(a) for a in arrays],
            specs,
            dtype,
            box,
            torch.from_numpy(out),
            *rest,
        )

    monkeypatch.setattr(Lanes, "on_cpu", False)
    monkeypatch.setattr(kind, "encode", encoded)
    monkeypatch.setattr(kind, "decode", decoded)
