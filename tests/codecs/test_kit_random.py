"""Layouts that no library writes, of all that a layout can say at once: every way of decoding makes
the reference's bits, whole and in odd boxes.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from migrate.codecs.kit import box_decoding, decoding, tables
from migrate.codecs.kit.decoding import decode
from migrate.codecs.kit.geometry import geometry, stored_shapes
from migrate.codecs.kit.layout import (
    ElementType,
    Grid,
    NumberLayout,
    Packing,
    Term,
    floats,
    integers,
    signed,
    table,
    times,
)
from migrate.codecs.kit.reference import reference
from migrate.core.spec import Spec
from migrate.elements.raw import carrier

SCALES = ("float32", "bfloat16", "float16", "uint8", "float8_e4m3fn")
FLOATS = ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz")


def elements(rng: random.Random, some: Any) -> ElementType:
    bits = rng.choice([2, 3, 4, 5, 6, 7, 8])
    return rng.choice(
        [
            floats(f"float8_{rng.choice(FLOATS)}"),
            floats("float4_e2m1fn"),
            integers(bits),
            integers(bits, 1 << (bits - 1)),
            signed(bits),
            table(tuple(some.standard_normal(1 << bits).astype("f4").tolist())),
        ]
    )


def block(rng: random.Random, flat: bool) -> tuple[int, int]:
    if flat:
        return 0, rng.choice([0, 8, 16, 64])
    return rng.choice([0, 1, 1, 2, 7, 16]), rng.choice([0, 1, 8, 16, 32, 33, 64])


def zeros(rng: random.Random, bits: int, dtype: str, dense: bool) -> Grid:
    turned, leading = rng.random() < 0.3, rng.random() < 0.8
    if rng.random() < 0.5:
        return Grid(
            "zero", block(rng, False), leading, ("uint8",),
            elements=integers(8), transposed=turned,
        )  # fmt: skip
    packing = Packing(
        bits, (dtype,), axis=rng.choice([-1, -2]), dense=dense, plus=rng.choice([0, 1])
    )
    return Grid(
        "zero", block(rng, False), leading,
        elements=integers(bits), packing=packing, transposed=turned,
    )  # fmt: skip


def layout(rng: random.Random, some: Any) -> NumberLayout:
    found = elements(rng, some)
    bits, flat = found.bits, rng.random() < 0.15
    dtype = rng.choice(["uint8", "int32"])
    dense, order = rng.random() < 0.4, list(range({"uint8": 8, "int32": 32}[dtype] // bits))
    rng.shuffle(order)
    packing = Packing(
        bits,
        (dtype,),
        axis=-1 if flat else rng.choice([-1, -1, -2]),
        order=tuple(order) if not dense and rng.random() < 0.3 else (),
        dense=dense,
        transposed=not flat and rng.random() < 0.3,
    )
    first = Grid(
        "scale", block(rng, flat), rng.random() < 0.8, SCALES,
        transposed=not flat and rng.random() < 0.3,
        padded=(1, 1) if flat else (rng.choice([1, 4]), rng.choice([1, 4])),
    )  # fmt: skip
    scale = times(first)
    if rng.random() < 0.4:
        rows, columns = (n * rng.choice([0, 1, 2]) for n in first.block)
        second = Grid("second", (rows, columns), rng.random() < 0.5, ("float32",))
        scale += (Term(rng.choice(["*", "/", "+"]), second),)
    if rng.random() < 0.3:
        scale += (Term(rng.choice(["*", "/", "+"]), 0.7109375),)
    less = Grid("less", first.block, rng.random() < 0.5, ("float32",))
    with_zero = found == integers(bits) and not flat and rng.random() < 0.7
    lead = () if flat else tuple(rng.randrange(1, 3) for _ in range(rng.choice([0, 0, 1, 2])))
    return NumberLayout(
        "random",
        found,
        packing,
        scale,
        zero=zeros(rng, bits, dtype, dense) if with_zero else None,
        after=0.30078125 if rng.random() < 0.15 else None,
        less=times(less) if rng.random() < 0.15 else (),
        flat=flat,
        shape=(*lead, rng.randrange(1, 40), rng.randrange(1, 140)),
    )


def part(rng: random.Random, some: Any, spec: Spec) -> Any:
    kind = carrier(spec.dtype)
    numbers = (some.standard_normal(spec.shape) * 10.0 ** rng.choice([-30, -3, 0, 2])).astype("f4")
    if spec.dtype == "float32" and rng.random() < 0.8:
        return numbers.view("<u4")
    if spec.dtype == "bfloat16":
        return (numbers.view("<u4") >> 16).astype("<u2")
    if spec.dtype == "float16":
        with np.errstate(over="ignore"):
            return numbers.astype("<f2").view("<u2")
    return some.integers(0, 1 << 8 * np.dtype(kind).itemsize, spec.shape).astype(kind)


@pytest.mark.parametrize("seed", range(60))
def test_every_way_makes_the_bits_of_the_reference(
    seed: int, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    monkeypatch.setattr(decoding, "is_exact", lambda *given: False)
    rng, some = random.Random(seed), np.random.default_rng(seed)
    made = layout(rng, some)
    shape = made.shape or ()
    dtypes = {made.role: made.codes.dtypes[0]} if isinstance(made.codes, Packing) else {}
    dtypes |= {
        grid.role: rng.choice(grid.packing.dtypes if grid.packing else grid.dtypes)
        for grid in made.grids()
    }
    stored = stored_shapes(made, shape, dtypes)
    specs = {role: Spec(dtypes[role], stored[role]) for role in stored}
    arrays = {role: part(rng, some, spec) for role, spec in specs.items()}
    dtype = rng.choice(["float32", "bfloat16", "float16"])
    wanted = reference(made, specs, arrays, dtype)
    for chunk, worth, alone, staged in (
        (1 << 19, 1 << 17, False, False),
        (1 << 19, 0, True, False),
        (500, 0, False, False),
        (64, 0, False, True),
    ):
        lows = [rng.randrange(n) for n in shape]
        odd = tuple((a, rng.randrange(a, n) + 1) for a, n in zip(lows, shape, strict=True))
        monkeypatch.setattr(box_decoding, "CHUNK", chunk)
        monkeypatch.setattr(box_decoding, "WORTH", worth)
        with monkeypatch.context() as patch:
            if alone:
                patch.setattr(tables, "imported", lambda: None)
            for box in (tuple((0, n) for n in shape), odd):
                at = tuple(slice(*side) for side in box)
                given = {
                    role: np.ascontiguousarray(arrays[role][tuple(slice(*s) for s in need)])
                    for role, need in geometry(made, specs).needs(box).items()
                }
                out = np.full(wanted[at].shape, 0xEE, wanted.dtype)
                if staged:
                    into = tensor(out).to(device)
                    held = {role: tensor(array).to(device) for role, array in given.items()}
                    decode(made, specs, held, dtype, box, into)
                    tensor(out).copy_(into)
                else:
                    decode(made, specs, given, dtype, box, out)
                assert (out == wanted[at]).all(), (box, made, specs)


def tensor(array: Any) -> torch.Tensor:
    return torch.from_numpy(array.view("u1" if array.itemsize == 1 else f"<i{array.itemsize}"))
