"""Every golden vector of every number format, decoded by each way of the kit."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from kit_layouts import FORMATS, Case, goldens

from migrate.codecs.kit import box_decoding, decoding, tables
from migrate.codecs.kit.decoding import decode
from migrate.codecs.kit.geometry import geometry, stored_shapes
from migrate.codecs.kit.reference import reference
from migrate.core.spec import Spec
from migrate.elements.raw import carrier

# the quiet NaN, infinity and the bits without the sign
BITS = {
    "float32": (0x7FC00000, 0x7F800000, 0x7FFFFFFF),
    "bfloat16": (0x7FC0, 0x7F80, 0x7FFF),
    "float16": (0x7E00, 0x7C00, 0x7FFF),
}
# what a library makes otherwise than the formula says, and why
FAULTS = {
    ("modelopt_fp8_tensor", "", "FP8QTensor.dequantize.bf16"): "its scale is bfloat16 here",
    ("gptoss_mxfp4", "", "dcp.QuantizedHFReader"): "a part of the tensor is never filled",
    ("mxfp4_to_nvfp4_exact mxfp4", "outlier_bf16", "nvfp4.f32"): "exponents too far apart",
    ("mxfp4_to_nvfp4_exact nvfp4", "outlier_bf16", "mxfp4.f32"): "exponents too far apart",
    ("awq", "", "awq.pseudo.f32"): "scales before they were rounded to float16",
    ("ao_int4_tinygemm", "", "torchao"): "arithmetic in bfloat16",
}
# these make +0 of the code of -0
UNSIGNED_ZERO = ("modelopt.f32", "nvfp4.f32")


def made(name: str, found: Any) -> tuple[Any, dict[str, Spec], dict[str, Any]]:
    maker = FORMATS[name]
    case = maker if isinstance(maker, Case) else maker(found)
    parts = {role: found[f"q/{stored}"] for role, stored in case.names.items()}
    return case.layout, {r: s for r, (s, _) in parts.items()}, {r: a for r, (_, a) in parts.items()}


def whole(shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    return tuple((0, n) for n in shape)


@pytest.fixture(autouse=True)
def lenient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some vectors were made of infinities, and claim to be exact: all are decoded here, and what
    is refused is tested elsewhere.
    """
    monkeypatch.setattr(decoding, "is_exact", lambda *given: False)


def by_numpy(layout: Any, specs: Any, arrays: Any, dtype: str, box: Any) -> Any:
    out = np.full([high - low for low, high in box], 0xEE, carrier(dtype))
    decode(layout, specs, arrays, dtype, box, out)
    return out


def by_torch(
    layout: Any, specs: Any, arrays: Any, dtype: str, box: Any, device: str = "cpu"
) -> Any:
    out = np.full([high - low for low, high in box], 0xEE, carrier(dtype))
    held = {
        r: torch.from_numpy(np.copy(a).view(_whole_numbers(a))).to(device)
        for r, a in arrays.items()
    }
    into = torch.from_numpy(out.view(_whole_numbers(out)))
    there = into.to(device)
    decode(layout, specs, held, dtype, box, there)
    if there is not into:
        into.copy_(there)
    return out


def by_cuda(layout: Any, specs: Any, arrays: Any, dtype: str, box: Any) -> Any:
    if not torch.cuda.is_available():
        pytest.skip("torch finds no GPU here")
    return by_torch(layout, specs, arrays, dtype, box, "cuda")


def _whole_numbers(array: Any) -> str:
    return "u1" if array.itemsize == 1 else f"<i{array.itemsize}"


def by_reference(layout: Any, specs: Any, arrays: Any, dtype: str, box: Any) -> Any:
    return reference(layout, specs, arrays, dtype)


def by_tables(layout: Any, specs: Any, arrays: Any, dtype: str, box: Any) -> Any:
    """With a table for each tensor, which otherwise only large ones are worth."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(box_decoding, "WORTH", 0)
        return by_numpy(layout, specs, arrays, dtype, box)


def without_torch(layout: Any, specs: Any, arrays: Any, dtype: str, box: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "imported", lambda: None)
        return by_numpy(layout, specs, arrays, dtype, box)


def in_small_chunks(layout: Any, specs: Any, arrays: Any, dtype: str, box: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(box_decoding, "CHUNK", 100)
        patch.setattr(box_decoding, "WORTH", 0)
        return by_numpy(layout, specs, arrays, dtype, box)


WAYS = {
    "numpy": by_numpy,
    "numpy, tables": by_tables,
    "numpy alone": without_torch,
    "numpy, small chunks": in_small_chunks,
    "torch": by_torch,
    "reference": by_reference,
}
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)


def made_by(way: str) -> Callable[..., Any]:
    return by_cuda if way == "cuda" else WAYS[way]


def equal(raw: Any, dtype: str) -> Any:
    """Raw elements in which every NaN is the same one."""
    nan, infinity, magnitude = BITS[dtype]
    return np.where((raw & magnitude) > infinity, nan, raw)


def fault(name: str, case: str, oracle: str) -> tuple[str, str, str] | None:
    """The key of FAULTS that a golden belongs to."""
    for of in FAULTS:
        if name.startswith(of[0]) and case.startswith(of[1]) and of[2] in oracle:
            return of
    return None


@pytest.mark.parametrize("way", [*WAYS, CUDA])
@pytest.mark.parametrize("name", FORMATS)
def test_goldens_decode_bit_for_bit(name: str, way: str) -> None:
    compared = 0
    for case, found in goldens()[name.split()[0]].items():
        layout, specs, arrays = made(name, found)
        shape = geometry(layout, specs).shape
        for oracle, (spec, wanted) in found.items():
            if not oracle.startswith("dq/"):
                continue
            got = made_by(way)(layout, specs, arrays, spec.dtype, whole(shape))
            # transformers answers with rows and columns in the other order
            wished = wanted.swapaxes(-1, -2) if "transposed" in oracle else wanted
            assert got.shape == wished.shape
            a, b = equal(got, spec.dtype), equal(wished, spec.dtype)
            if oracle.endswith(UNSIGNED_ZERO):
                magnitude = BITS[spec.dtype][2]
                a, b = (np.where(x & magnitude, x, 0) for x in (a, b))
            compared += 1
            if not fault(name, case, oracle):
                assert (a == b).all(), f"{case} {oracle}: {(a != b).sum()} of {a.size} differ"
    assert compared


def test_every_fault_of_a_library_is_one() -> None:
    """So that none is listed which the library has mended, or which was never there."""
    unseen = set(FAULTS)
    for name in FORMATS:
        for case, found in goldens()[name.split()[0]].items():
            layout, specs, arrays = made(name, found)
            for oracle, (spec, wanted) in found.items():
                key = fault(name, case, oracle) if oracle.startswith("dq/") else None
                if key is not None:
                    got = by_reference(layout, specs, arrays, spec.dtype, None)
                    if (equal(got, spec.dtype) != equal(wanted, spec.dtype)).any():
                        unseen.discard(key)
    assert not unseen


def boxes(shape: tuple[int, ...], seed: str) -> list[tuple[tuple[int, int], ...]]:
    """The whole and odd parts of it."""
    rng, out = random.Random(seed), [whole(shape)]
    for _ in range(3):
        lows = [rng.randrange(n) for n in shape]
        out.append(
            tuple((low, rng.randrange(low, n) + 1) for low, n in zip(lows, shape, strict=True))
        )
    return out


@pytest.mark.parametrize("way", [*(w for w in WAYS if w != "reference"), CUDA])
@pytest.mark.parametrize("name", FORMATS)
def test_boxes_are_parts_of_the_whole(name: str, way: str) -> None:
    cases = goldens()[name.split()[0]]
    for case in sorted(cases, key=lambda c: sum(a.size for _, a in cases[c].values()))[:2]:
        layout, specs, arrays = made(name, cases[case])
        geo = geometry(layout, specs)
        for dtype in BITS:
            wanted = reference(layout, specs, arrays, dtype)
            for box in boxes(geo.shape, case + dtype):
                given = {
                    role: np.ascontiguousarray(arrays[role][tuple(slice(*s) for s in needed)])
                    for role, needed in geo.needs(box).items()
                }
                got = made_by(way)(layout, specs, given, dtype, box)
                assert (got == wanted[tuple(slice(*s) for s in box)]).all(), (case, dtype, box)


@pytest.mark.parametrize("name", FORMATS)
def test_shapes_of_parts_follow_from_those_of_the_numbers(name: str) -> None:
    for found in goldens()[name.split()[0]].values():
        layout, specs, _ = made(name, found)
        shape = geometry(layout, specs).shape
        got = stored_shapes(layout, shape, {role: spec.dtype for role, spec in specs.items()})
        for role, stored in got.items():
            if any(g.index and g.role == role for g in layout.grids()):
                # how many groups there are, only the group of each column says
                continue
            wanted = specs[role].shape
            assert [n for n in stored if n != 1] == [n for n in wanted if n != 1], role


def test_all_vectors_have_a_layout() -> None:
    # `microxcaling_fake` has no parts: it is numbers rounded to others
    assert {n.split()[0] for n in FORMATS} == set(goldens()) - {"microxcaling_fake"}
