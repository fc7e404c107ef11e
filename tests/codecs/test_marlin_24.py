"""`marlin-24`: what compressed-tensors packs, which no library unpacks, becomes the same integers
times their scales; and what is refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import goldens_by_rules
import marlin_cases
import numpy as np
import pytest

from migrate.codecs import get
from migrate.codecs.base import OpError
from migrate.codecs.kit.marlin import random_tiles
from migrate.core.errors import MigrateError
from migrate.core.spec import Spec
from migrate.testing import codeckit

CODEC: Any = get("marlin-24")


@pytest.mark.parametrize(("name", "number"), codeckit.cases(["marlin-24"]))
def test_the_codec_passes_the_kit(name: str, number: int) -> None:
    codeckit.check_sample(name, number)


def test_the_codec_is_described_and_decodes_only() -> None:
    codeckit.check_description("marlin-24")
    assert not CODEC.encodes


def decoded(folder: Path, held: dict[str, Any], dtype: str) -> Any:
    call = {"codec": "marlin-24", "dtype": dtype}
    return goldens_by_rules.decoded(folder, {"w": held}, call, ("lossy",))["w"]


@pytest.mark.parametrize("case", marlin_cases.CASES)
def test_what_the_library_packed_becomes_its_integers_times_their_scales(
    case: tuple[int, int, int, int], tmp_path: Path
) -> None:
    """The parts are those of compressed-tensors 0.12.2 by their hashes, and so the inputs are what
    has to come out: as float16 what its `dequantize` gives.
    """
    bits, rows, columns, groups = case
    numbers, scales = marlin_cases.inputs(*case)
    parts = marlin_cases.packed(numbers, scales, bits)
    assert marlin_cases.hashes(parts) == marlin_cases.recorded()[" ".join(map(str, case))]
    held = {
        "weight": (Spec("int32", parts["weight_packed"].shape), parts["weight_packed"]),
        "scale": (Spec("float16", parts["scale_packed"].shape), parts["scale_packed"]),
        "meta": (Spec("int16", parts["meta"].shape), parts["meta"]),
    }
    wide = numbers.reshape(rows, groups, -1) * scales[..., None].astype("<f8")
    wanted = wide.reshape(rows, columns)
    spec, made = decoded(tmp_path / "f4", held, "float32")
    assert spec == Spec("float32", (rows, columns))
    # a product of an integer of 8 bits and a float16 number is a float32 number
    assert (made.view("<f4") == wanted).all()
    _, half = decoded(tmp_path / "f2", held, "float16")
    assert (half.view("<f2") == wanted.astype("<f2")).all()


def parts(bits: int, rows: int, columns: int, groups: int) -> dict[str, Any]:
    return dict(zip(CODEC.parts, random_tiles(bits, rows, columns, groups), strict=True))


def test_places_that_are_no_two_in_turn_are_refused_with_their_place(tmp_path: Path) -> None:
    numbers, scales = np.zeros((128, 96), "i8"), np.ones((128, 1), "<f2")
    numbers[..., 2:4] = 1
    first = marlin_cases.packed(numbers, scales, 4)
    numbers[3, 68:72] = [1, 1, 0, 0]
    second = marlin_cases.packed(numbers, scales, 4)
    # where the two places of these four are
    (bits,) = (first["meta"] ^ second["meta"])[first["meta"] != second["meta"]]
    assert bits == 0b1010 << 4
    meta = first["meta"] | (first["meta"] != second["meta"]) * np.uint16(0xF0)
    held = {
        "weight": (Spec("int32", (3, 256)), first["weight_packed"]),
        "scale": (Spec("float16", (1, 128)), first["scale_packed"]),
        "meta": (Spec("int16", (3, 256)), meta.astype("<u2")),
    }
    with pytest.raises(MigrateError, match="M406") as caught:
        decoded(tmp_path / "x", held, "float32")
    assert "[3, 68] on the meta says that those at 3 and 3 are kept" in str(caught.value)
    assert not (tmp_path / "x" / "out.safetensors").exists()


@pytest.mark.parametrize("value", [0, 0x7C00, 0x7E00, 0xBC00])
def test_scales_that_are_none_are_refused(value: int, tmp_path: Path) -> None:
    held = parts(4, 64, 32, 1)
    held["scale"][1][0, 9] = value
    with pytest.raises(MigrateError, match="M406"):
        decoded(tmp_path / "x", held, "float32")


WEIGHT, SCALE, META = Spec("int32", (12, 128)), Spec("float16", (3, 64)), Spec("int16", (12, 128))


@pytest.mark.parametrize(
    ("weight", "scale", "meta", "code"),
    [
        (Spec("uint8", (12, 128)), SCALE, META, "M310"),
        (Spec("int32", (12, 64)), SCALE, META, "M310"),
        (Spec("int32", (12, 512)), SCALE, META, "M310"),
        (Spec("int32", (11, 128)), SCALE, META, "M310"),
        (WEIGHT, Spec("float16", (2, 64)), META, "M310"),
        (WEIGHT, Spec("float16", (3, 32)), META, "M310"),
        (WEIGHT, Spec("float16", (192,)), META, "M304"),
        (WEIGHT, Spec("int8", (3, 64)), META, "M303"),
        (WEIGHT, SCALE, Spec("int32", (12, 128)), "M310"),
        (WEIGHT, SCALE, Spec("int16", (12, 64)), "M310"),
        (WEIGHT, SCALE, Spec("int16", (6, 256)), "M310"),
        (Spec("int32", (1, 64)), Spec("float16", (1, 32)), Spec("int16", (1, 64)), "M310"),
    ],
)
def test_parts_that_do_not_fit_are_refused_from_their_specs(
    weight: Spec, scale: Spec, meta: Spec, code: str
) -> None:
    assert CODEC.decoded(CODEC.Args(), (WEIGHT, SCALE, META), "float32").shape == (64, 384)
    with pytest.raises(OpError) as caught:
        CODEC.decoded(CODEC.Args(), (weight, scale, meta), "float32")
    assert caught.value.code == code
    assert any(str(list(one.shape)) in str(caught.value) or one.dtype in str(caught.value)
               for one in (weight, scale, meta))  # fmt: skip
