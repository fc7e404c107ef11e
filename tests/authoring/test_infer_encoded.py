"""Encoded weights between two checkpoints: decoded, renamed, or named with their format."""

from __future__ import annotations

import tracemalloc
from math import prod
from typing import Any

import numpy as np
import pytest
from raw_states import State, counted, opened

from migrate.authoring.infer import Inferred, infer
from migrate.authoring.infer.encoded import decoded
from migrate.ops.dequantize import Dequantize


def codes(seed: int, shape: tuple[int, int] = (256, 128)) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 0x78, shape).astype("u1")


def encoded(module: str, seed: int, scale: str = "weight_scale_inv", exponent: int = 1) -> State:
    """A weight in blocks of FP8, all with one scale."""
    scales = np.full((2, 1), 2.0**exponent, "f4")
    return {
        f"{module}.weight": ("float8_e4m3fn", codes(seed)),
        f"{module}.{scale}": ("float32", scales.view("<u4")),
    }


def plain(module: str, seed: int, exponent: int = 1) -> State:
    """What it stands for, by the definition of e4m3: four bits of exponent, three of mantissa."""
    held = codes(seed)
    powers, fractions = held >> 3, (held & 7) / 8
    numbers = np.where(powers, np.exp2(powers - 7.0) * (1 + fractions), np.exp2(-6.0) * fractions)
    numbers = (numbers * 2.0**exponent).astype("<f4")
    return {f"{module}.weight": ("bfloat16", (numbers.view("<u4") >> 16).astype("<u2"))}


def both(old: list[State], new: list[State]) -> Inferred:
    sides = [{key: held for state in side for key, held in state.items()} for side in (old, new)]
    return infer(opened(sides[0]), opened(sides[1]))


def pairs(found: Inferred) -> dict[tuple[str, ...], tuple[str, ...]]:
    return {r.sources: r.targets for r in found.relations}


@pytest.mark.heavy
def test_a_decoded_weight_may_be_called_otherwise() -> None:
    found = both(
        [encoded(f"l.{n}.proj", n) for n in range(3)], [plain(f"h.{n}.out", n) for n in range(3)]
    )
    assert (found.questions, found.unexplained) == ((), ())
    assert pairs(found) == {
        (f"l.{n}.proj.weight", f"l.{n}.proj.weight_scale_inv"): (f"h.{n}.out.weight",)
        for n in range(3)
    }
    assert {r.ops[0]["dequantize"]["codec"] for r in found.relations} == {"fp8-block"}
    assert {r.guessed for r in found.relations} == {False}


@pytest.mark.heavy
def test_beside_weights_that_keep_their_names() -> None:
    old = [encoded("same", 1), encoded("a", 2), plain("other", 3)]
    found = both(old, [plain("same", 1), plain("b", 2), plain("other", 3)])
    assert found.unexplained == ()
    assert pairs(found)["a.weight", "a.weight_scale_inv"] == ("b.weight",)
    assert pairs(found)["same.weight", "same.weight_scale_inv"] == ("same.weight",)
    assert pairs(found)["other.weight",] == ("other.weight",)


@pytest.mark.heavy
def test_of_two_with_the_same_numbers_neither_is_taken() -> None:
    found = both([encoded("a", 1), encoded("b", 1)], [plain("c", 1), plain("d", 1)])
    assert {one.key for one in found.unexplained} == {"c.weight", "d.weight"}
    for one in found.unexplained:
        assert "has the numbers of several" in one.why
        assert "fp8-block" in one.why
    single = both([encoded("a", 1)], [plain("c", 1), plain("d", 1)])
    assert {one.key for one in single.unexplained} == {"c.weight", "d.weight"}


@pytest.mark.heavy
def test_other_numbers_are_named_with_the_formats_that_are_left() -> None:
    found = both([encoded("a", 1)], [plain("b", 2)])
    (rest,) = found.unexplained
    assert rest.key == "b.weight"
    assert "is not the numbers of one that is encoded (fp8-block)" in rest.why


def test_parts_follow_their_codes_although_all_scales_are_equal() -> None:
    # by names a scale could be that of any module: all that there is is the table of parts
    modules = {"q": "x", "k": "y", "v": "z"}
    found = both(
        [encoded(old, n) for n, old in enumerate(modules)],
        [encoded(new, n) for n, new in enumerate(modules.values())],
    )
    assert (found.questions, found.unexplained) == ((), ())
    assert pairs(found) == {
        (f"{old}.{part}",): (f"{new}.{part}",)
        for old, new in modules.items()
        for part in ("weight", "weight_scale_inv")
    }
    assert {r.guessed for r in found.relations} == {False}


@pytest.mark.parametrize("shift", [1, 2])
def test_they_follow_to_another_producers_names_for_them(shift: int) -> None:
    old, new = list("qkv"), [f"m{(n + shift) % 3}" for n in range(3)]
    found = both(
        [encoded(name, n) for n, name in enumerate(old)],
        [encoded(name, n, scale="scale") for n, name in enumerate(new)],
    )
    assert (found.questions, found.unexplained) == ((), ())
    for one, other in zip(old, new, strict=True):
        assert pairs(found)[f"{one}.weight_scale_inv",] == (f"{other}.scale",)


def test_a_part_that_is_another_one_is_not_explained_and_its_format_named() -> None:
    found = both([encoded("q", 0)], [encoded("x", 0, exponent=2)])
    # a power of two is one that an op makes
    assert all(r.sources != r.targets for r in found.relations)
    new = encoded("x", 0)
    scales = np.array([[3.0], [5.5]], "f4")
    new["x.weight_scale_inv"] = ("float32", scales.view("<u4"))
    (rest,) = both([encoded("q", 0)], [new]).unexplained
    assert rest.key == "x.weight_scale_inv"
    assert "belongs to a tensor that is encoded as fp8-block" in rest.why


@pytest.mark.heavy
def test_one_that_is_encoded_anew_is_named_whatever_it_is_called() -> None:
    found = both([plain("a", 1)], [encoded("b", 1)])
    assert {one.key for one in found.unexplained} == {"b.weight", "b.weight_scale_inv"}
    assert all("fp8-block: a rule with `quantize`" in one.why for one in found.unexplained)


def large(codec: str) -> tuple[State, State]:
    """Numbers of 64 MiB that are all 1, of one tensor or two experts, and their codes."""
    rows = 1 << 15
    if codec == "fp8-block":
        old: State = {
            "m.weight": ("float8_e4m3fn", np.full((rows, 1024), 0x38, "u1")),
            "m.weight_scale_inv": ("float32", np.full((rows // 128, 8), 0x3F800000, "<u4")),
        }
        shape: tuple[int, ...] = (rows, 1024)
    else:
        shape = (2, rows // 2, 1024)
        old = {
            "m.weight_blocks": ("uint8", np.full((*shape[:2], 32, 16), 0x22, "u1")),
            "m.weight_scales": ("uint8", np.full((*shape[:2], 32), 127, "u1")),
        }
    return old, {"m.weight": ("bfloat16", np.full(shape, 0x3F80, "<u2"))}


@pytest.mark.heavy
@pytest.mark.parametrize("codec", ["fp8-block", "mxfp4"])
def test_encoded_weights_are_read_once_and_decoded_by_boxes(
    codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sides = [counted(state) for state in large(codec)]
    olds, news = ({k: at.spec for k, at in side.index.tensors.items()} for side in sides)
    compute, boxes = Dequantize.compute, []

    def noted(self: Dequantize, *args: Any, **options: Any) -> None:
        boxes.append(2 * prod(high - low for low, high in args[4]))
        compute(self, *args, **options)

    monkeypatch.setattr(Dequantize, "compute", noted)
    tracemalloc.start()
    (found,) = decoded(*sides, olds, news)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.relation is not None
    assert found.relation.ops[0]["dequantize"]["codec"] == codec
    for side in sides:
        assert sum(blob.read for blob in side.blobs) == side.index.nbytes
    # of 64 MiB of numbers; torch's own memory goes with the boxes
    assert sum(boxes) == 64 << 20
    assert max(boxes) <= 4 << 20, max(boxes)
    assert peak < 16 << 20, peak
