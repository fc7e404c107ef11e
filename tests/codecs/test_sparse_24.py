"""`sparse-24`: what is kept of each four numbers goes where the mask says, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import goldens_by_rules
import numpy as np
import pytest

from migrate.codecs import get
from migrate.codecs.base import OpError
from migrate.codecs.kit.two_of_four import random_kept
from migrate.core.errors import MigrateError
from migrate.core.spec import Spec
from migrate.testing import codeckit

CODEC: Any = get("sparse-24")


@pytest.mark.parametrize(("name", "number"), codeckit.cases(["sparse-24"]))
def test_the_codec_passes_the_kit(name: str, number: int) -> None:
    codeckit.check_sample(name, number)


def test_the_codec_is_described_and_decodes_only() -> None:
    codeckit.check_description("sparse-24")
    assert not CODEC.encodes


def parts(dtype: str, rows: int, columns: int) -> dict[str, Any]:
    return dict(zip(("weight", "mask", "shape"), random_kept(dtype, rows, columns), strict=True))


def decoded(folder: Path, held: dict[str, Any], dtype: str) -> Any:
    call = {"codec": "sparse-24", "dtype": dtype}
    return goldens_by_rules.decoded(folder, {"w": held}, call, ("lossy",))["w"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_numbers_are_copied_to_their_places_and_all_others_are_zero(
    dtype: str, tmp_path: Path
) -> None:
    held = parts(dtype, 700, 1204)
    spec, made = decoded(tmp_path / "x", held, dtype)
    assert spec == Spec(dtype, (700, 1204))
    weight, mask = held["weight"][1], held["mask"][1]
    for row in (0, 1, 350, 699):
        left = iter(weight[row].tolist())
        for column in range(1204):
            kept = mask[row, column // 8] >> (column % 8) & 1
            assert made[row, column] == (next(left) if kept else 0)


def test_codes_are_multiplied_by_the_scale_of_their_row(tmp_path: Path) -> None:
    held = parts("int8", 5, 44)
    scale = np.array([[0.5], [1], [2], [0.25], [3]], "<f4")
    held["scale"] = Spec("float32", (5, 1)), scale.view("<u4")
    made = decoded(tmp_path / "x", held, "float32")[1].view("<f4")
    kept = made[np.unpackbits(held["mask"][1], axis=1, bitorder="little")[:, :44] == 1]
    wanted = held["weight"][1].view("i1").astype("<f4") * scale
    assert (kept.reshape(5, 22) == wanted).all()


@pytest.mark.parametrize(("bits", "count"), [(0b0111, 3), (0b0001, 1), (0, 0)])
def test_a_mask_that_does_not_keep_two_of_four_is_refused_with_its_place(
    bits: int, count: int, tmp_path: Path
) -> None:
    held = parts("bfloat16", 4, 16)
    held["mask"][1][2, 1] = bits << 4 | 3
    with pytest.raises(MigrateError, match="M406") as caught:
        decoded(tmp_path / "x", held, "bfloat16")
    assert f"keeps {count} of the four numbers from [2, 12] on" in str(caught.value)
    assert not (tmp_path / "x" / "out.safetensors").exists()


def test_a_shape_that_says_something_else_is_refused_while_planning(tmp_path: Path) -> None:
    held = parts("bfloat16", 4, 16)
    held["shape"][1][...] = [[4], [32]]
    with pytest.raises(MigrateError, match="M310") as caught:
        decoded(tmp_path / "x", held, "bfloat16")
    assert "the shape is [4, 32], the weight [4, 8]" in str(caught.value)


MASK, SHAPE = Spec("uint8", (4, 2)), Spec("int64", (2, 1))


@pytest.mark.parametrize(
    ("weight", "mask", "scale", "code", "words"),
    [
        (Spec("bfloat16", (4, 8)), Spec("uint8", (4, 3)), None, "M310", "[4, 3]"),
        (Spec("bfloat16", (4, 8)), Spec("int8", (4, 2)), None, "M310", "int8"),
        (Spec("bfloat16", (4, 7)), MASK, None, "M310", "[4, 7]"),
        (Spec("bfloat16", (8,)), MASK, None, "M304", "[8]"),
        (Spec("float16", (4, 8)), MASK, None, "M303", "`dtype: float16`"),
        (Spec("float8_e4m3fn", (4, 8)), MASK, None, "M303", "a scale"),
        (Spec("bfloat16", (4, 8)), MASK, Spec("float32", (4, 1)), "M303", "nothing has a scale"),
        (Spec("int8", (4, 8)), MASK, Spec("float32", (3, 1)), "M310", "[3, 1]"),
        (Spec("int8", (4, 8)), MASK, Spec("int8", (4, 1)), "M303", "the scale is int8"),
    ],
)  # fmt: skip
def test_parts_that_do_not_fit_are_refused_from_their_specs(
    weight: Spec, mask: Spec, scale: Spec | None, code: str, words: str
) -> None:
    with pytest.raises(OpError) as caught:
        CODEC.decoded(CODEC.Args(), (mask, weight, SHAPE, scale), "bfloat16")
    assert caught.value.code == code
    assert words in str(caught.value)
