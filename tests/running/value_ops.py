"""Small value ops for tests of the running floor: numpy on raw elements, with every shape that
`needs` and `grain` can have.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import numpy as np
import pytest

from migrate import ops
from migrate.core import view as views
from migrate.core.spec import spec
from migrate.ops.base import OpCall, OpError, ValueOp
from migrate.planning.graph import Computation, ComputedTensor, Tensor


class Counting(ValueOp):
    """Notes the memory that each box was computed into, and the bytes of the largest."""

    def __init__(self) -> None:
        self.places: list[int] = []
        self.largest = 0
        self._lock = threading.Lock()

    def count(self, output: int, box: Any, out: Any) -> None:
        with self._lock:
            self.places.append(out.__array_interface__["data"][0])
            self.largest = max(self.largest, out.nbytes)

    def needs(self, args, specs, output, box):
        return [box for _ in specs]


class Widen(Counting):
    """bfloat16 to float32 by a shift; elements computed are counted in `seen`."""

    name = "widen"
    refuse: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[tuple[tuple[int, int], ...]] = Counter()

    def infer(self, args, specs, parts=1):
        return [spec("float32", specs[0].shape)]

    def compute(self, args, arrays, specs, output, box, out, meter=None):
        assert [b - a for a, b in box] == list(out.shape) == list(arrays[0].shape)
        self.count(output, box, out)
        with self._lock:
            self.seen[tuple(box)] += 1
        if self.refuse is not None and (arrays[0] == self.refuse).any():
            index = [
                int(i) + a
                for i, (a, _) in zip(np.argwhere(arrays[0] == self.refuse)[0], box, strict=True)
            ]
            raise OpError("M303", f"element {index} is not wanted")
        np.left_shift(arrays[0].astype("u4"), 16, out=out)

    def eager(self, args, arrays, parts=1, dtypes=()):
        return [arrays[0].astype("u4") << 16]


class Blocks(Counting):
    """float32 to float32: each element plus the sum of its 4x8 block, modulo 2**32. Boxes must lie
    on the block grid.
    """

    name = "blocks"

    def infer(self, args, specs, parts=1):
        return [specs[0]]

    def grain(self, args, specs, output):
        return (*(1 for _ in specs[0].shape[:-2]), *(4, 8)[-len(specs[0].shape) :])

    def _aligned(self, args, specs, output, box):
        return tuple(
            (a // g * g, min(n, -(-b // g) * g))
            for (a, b), g, n in zip(
                box, self.grain(args, specs, output), specs[0].shape, strict=True
            )
        )

    def needs(self, args, specs, output, box):
        return [self._aligned(args, specs, output, box)]

    def compute(self, args, arrays, specs, output, box, out, meter=None):
        aligned = self._aligned(args, specs, output, box)
        assert list(arrays[0].shape) == [b - a for a, b in aligned]
        whole = self.eager(args, arrays)[0]
        out[...] = whole[
            tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(box, aligned, strict=True))
        ]

    def eager(self, args, arrays, parts=1, dtypes=()):
        a = arrays[0]
        out = a.copy()
        for lead in np.ndindex(*a.shape[:-2]):
            plane, to = (a[lead], out[lead]) if a.ndim > 1 else (a[None], out[None])
            for i in range(0, plane.shape[0], 4):
                for j in range(0, plane.shape[1], 8):
                    to[i : i + 4, j : j + 8] = plane[i : i + 4, j : j + 8] + plane[
                        i : i + 4, j : j + 8
                    ].sum(dtype="u4")
        return [out]


class Xor(Counting):
    """Two float32 tensors of one shape, element by element; output 1 is their complement."""

    name = "xor"

    def infer(self, args, specs, parts=1):
        return [specs[0], specs[0]]

    def compute(self, args, arrays, specs, output, box, out, meter=None):
        np.bitwise_xor(*arrays, out=out)
        if output:
            np.invert(out, out=out)

    def eager(self, args, arrays, parts=1, dtypes=()):
        return [arrays[0] ^ arrays[1], ~(arrays[0] ^ arrays[1])]


class Nibbles(Counting):
    """The low 4 bits of a float32, as a 4-bit float."""

    name = "nibbles"

    def infer(self, args, specs, parts=1):
        return [spec("float4_e2m1fn", specs[0].shape)]

    def compute(self, args, arrays, specs, output, box, out, meter=None):
        out[...] = arrays[0] & 15

    def eager(self, args, arrays, parts=1, dtypes=()):
        return [(arrays[0] & 15).astype("u1")]


class Sixes(Counting):
    """The low 6 bits of a float32, as a 6-bit float."""

    name = "sixes"

    def infer(self, args, specs, parts=1):
        return [spec("float6_e2m3fn", specs[0].shape)]

    def compute(self, args, arrays, specs, output, box, out, meter=None):
        out[...] = arrays[0] & 63

    def eager(self, args, arrays, parts=1, dtypes=()):
        return [(arrays[0] & 63).astype("u1")]


class Spread(Counting):
    """A 4-bit float as the float32 with the same low bits."""

    name = "spread"

    def infer(self, args, specs, parts=1):
        return [spec("float32", specs[0].shape)]

    def compute(self, args, arrays, specs, output, box, out, meter=None):
        out[...] = arrays[0]

    def eager(self, args, arrays, parts=1, dtypes=()):
        return [arrays[0].astype("u4")]


class Total(Counting):
    """Each element plus the sum of all: a part needs everything."""

    name = "total"

    def infer(self, args, specs, parts=1):
        return [specs[0]]

    needs = ValueOp.needs

    def compute(self, args, arrays, specs, output, box, out, meter=None):
        self.count(output, box, out)
        out[...] = (arrays[0] + arrays[0].sum(dtype="u4"))[tuple(slice(a, b) for a, b in box)]

    def eager(self, args, arrays, parts=1, dtypes=()):
        return [arrays[0] + arrays[0].sum(dtype="u4")]


def install(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The ops above under their names, beside those of the project."""
    made = {c.name: c() for c in (Widen, Blocks, Xor, Nibbles, Sixes, Spread, Total)}
    get = ops.get
    monkeypatch.setattr(ops, "get", lambda name: made[name] if name in made else get(name))
    return made


def call(op: Any, *inputs: Tensor, lossy: bool = False) -> list[Tensor]:
    """The op's outputs on these tensors, each as a whole computed tensor."""
    specs = op.infer(None, [t.spec for t in inputs])
    node = Computation(
        OpCall(op.name, None), inputs, len(specs), f"{op.name} (rules.yaml:1)", ("k",), lossy
    )
    return [
        Tensor(s, views.stored(0, s.shape), (ComputedTensor(node, n, s),))
        for n, s in enumerate(specs)
    ]
