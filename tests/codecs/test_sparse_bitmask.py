"""`sparse-bitmask`: what is kept goes where the mask says, row by row, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import goldens_by_rules
import numpy as np
import pytest

import migrate
from migrate.codecs import get
from migrate.codecs.base import OpError
from migrate.codecs.kit.bit_masks import random_rows
from migrate.core.errors import MigrateError
from migrate.core.spec import Spec
from migrate.testing import codeckit

CODEC: Any = get("sparse-bitmask")
ROLES = ("mask", "weight", "shape", "offsets")


@pytest.mark.parametrize(("name", "number"), codeckit.cases(["sparse-bitmask"]))
def test_the_codec_passes_the_kit(name: str, number: int) -> None:
    codeckit.check_sample(name, number)


def test_the_codec_is_described_and_decodes_only() -> None:
    codeckit.check_description("sparse-bitmask")
    assert not CODEC.encodes


def parts(dtype: str, *shape: int) -> dict[str, Any]:
    return dict(zip(ROLES, random_rows(dtype, shape), strict=True))


def decoded(folder: Path, held: dict[str, Any], dtype: str) -> Any:
    call = {"codec": "sparse-bitmask", "dtype": dtype}
    return goldens_by_rules.decoded(folder, {"w": held}, call, ("lossy",))["w"]


@pytest.mark.parametrize(
    ("dtype", "shape"), [("bfloat16", (700, 1203)), ("float16", (9, 5)), ("float32", (1203,))]
)
def test_numbers_are_copied_to_their_places_and_all_others_are_zero(
    dtype: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    held = parts(dtype, *shape)
    spec, made = decoded(tmp_path / "x", held, dtype)
    assert spec == Spec(dtype, shape)
    left = iter(held["weight"][1].tolist())
    mask = held["mask"][1].reshape(-1, held["mask"][1].shape[-1])
    for row, bits in zip(made.reshape(-1, shape[-1]).tolist(), mask.tolist(), strict=True):
        kept = [bits[column // 8] >> (column % 8) & 1 for column in range(shape[-1])]
        assert row == [next(left) if keep else 0 for keep in kept]
    assert next(left, None) is None


def test_where_rows_of_many_begin_is_read_too(tmp_path: Path) -> None:
    """More than the 64 KiB that are read of other parts while planning."""
    rows = 9_000
    held = parts("float16", rows, 3)
    assert held["offsets"][1].nbytes > 64 << 10
    spec, made = decoded(tmp_path / "x", held, "float16")
    assert spec == Spec("float16", (rows, 3))
    assert (made != 0).sum() == (held["weight"][1] != 0).sum()


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_codes_are_multiplied_by_the_scale_of_their_row(dtype: str, tmp_path: Path) -> None:
    held = parts(dtype, 5, 44)
    scale = np.array([[0.5], [1], [2], [0.25], [3]], "<f4")
    held["scale"] = Spec("float32", (5, 1)), scale.view("<u4")
    made = decoded(tmp_path / "x", held, "float32")[1].view("<f4")
    kept = np.unpackbits(held["mask"][1], axis=1, bitorder="little")[:, :44] == 1
    if dtype == "int8":
        codes = held["weight"][1].view("i1").astype("<f4")
    else:
        torch = pytest.importorskip("torch")
        codes = torch.tensor(held["weight"][1]).view(torch.float8_e4m3fn).float().numpy()
    assert (made[kept] == codes * np.repeat(scale[:, 0], kept.sum(1))).all()
    assert not made[~kept].any()


def test_a_mask_that_does_not_keep_what_a_row_stores_is_refused_with_the_row(
    tmp_path: Path,
) -> None:
    held = parts("bfloat16", 4, 16)
    bits = held["mask"][1]
    bits[2, 1] ^= 0b100
    counts = np.unpackbits(bits, axis=1).sum(1)
    with pytest.raises(MigrateError, match="M406") as caught:
        decoded(tmp_path / "x", held, "bfloat16")
    stored = int(np.diff(held["offsets"][1].view("<i8"))[2])
    said = f"the mask keeps {counts[2]} numbers of row 2, and {stored} are stored of it"
    assert said in str(caught.value)
    assert not (tmp_path / "x" / "out.safetensors").exists()


def shaped(*shape: int) -> tuple[Spec, Any]:
    return Spec("int64", (len(shape),)), np.array(shape, "<i8").view("<u8")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"offsets": shaped(1, 3, 3, 5)}, "the rows begin at number 1 of 9"),
        ({"offsets": shaped(0, 3, 2, 5)}, "of 9 numbers row 1 has those from 3 to 2"),
        ({"offsets": shaped(0, 3, 3, 10)}, "row 2 has those from 3 to 10"),
        ({"offsets": shaped(0, 3, 3, -1)}, "row 2 has those from 3 to -1"),
        ({"offsets": shaped(0, 5, 5, 8)}, "row 0 has those from 0 to 5, and a row is of 4"),
        ({"offsets": shaped(0, 0, 0, 0)}, "row 3 has those from 0 to 9, and a row is of 4"),
        ({"offsets": shaped(0, 3, 3)}, "[4, 4], the offsets is int64 [3]"),
        ({"offsets": (Spec("int32", (4,)), np.zeros(4, "<u4"))}, "the offsets is int32 [4]"),
        ({"shape": shaped(4, 9)}, "[4, 9], the mask is uint8 [4, 1]"),
        ({"shape": shaped(3, 4)}, "[3, 4], the mask is uint8 [4, 1]"),
        ({"shape": shaped(4, -4)}, "[4, -4], the mask"),
        ({"shape": shaped(2, 2, 4)}, "[2, 2, 4], the mask"),
        ({"shape": shaped()}, "[], the mask"),
        ({"weight": (Spec("bfloat16", (9, 1)), np.ones((9, 1), "<u2"))}, "the weight is bfloat16"),
    ],
)  # fmt: skip
def test_parts_that_do_not_fit_are_refused_while_planning(
    changed: dict[str, Any], words: str, tmp_path: Path
) -> None:
    held = {
        "mask": (Spec("uint8", (4, 1)), np.array([[7], [0], [3], [15]], "u1")),
        "weight": (Spec("bfloat16", (9,)), np.ones(9, "<u2")),
        "shape": shaped(4, 4),
        "offsets": shaped(0, 3, 3, 5),
        **changed,
    }
    source, rules = tmp_path / "in.safetensors", tmp_path / "r.yaml"
    source.write_bytes(goldens_by_rules.safetensors({f"w.{k}": v for k, v in held.items()}))
    names = ", ".join(f'{role}: "{{c}}.{role}"' for role in held)
    rules.write_text(
        f"{goldens_by_rules.HEAD}  - {{name: all, from: {{{names}}}, to: '{{c}}', via: "
        "[{dequantize: {codec: sparse-bitmask, dtype: bfloat16}}]}\n"
    )
    with pytest.raises(MigrateError, match="M310") as caught:
        migrate.plan(source, rules=rules, allow=("lossy",))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("weight", "scale", "code", "words"),
    [
        ("float16", None, "M303", "`dtype: float16`"),
        ("float8_e4m3fn", None, "M303", "a scale"),
        ("bfloat16", Spec("float32", (4, 1)), "M303", "nothing has a scale"),
        ("int8", Spec("float32", (3, 1)), "M310", "[3, 1]"),
        ("int8", Spec("int8", (4, 1)), "M303", "the scale is int8"),
    ],
)
def test_dtypes_that_do_not_fit_are_refused(
    weight: str, scale: Spec | None, code: str, words: str
) -> None:
    held = parts(weight, 4, 16)
    specs = [*(held[role][0] for role in ROLES), scale]
    values = {role: held[role][1].tobytes() for role in CODEC.planning}
    args = CODEC.settle(CODEC.Args(), specs, values)
    with pytest.raises(OpError) as caught:
        CODEC.decoded(args, specs, "bfloat16")
    assert caught.value.code == code
    assert words in str(caught.value)


def test_numbers_are_read_by_rows_where_the_parts_are_larger_than_memory_may_be(
    tmp_path: Path,
) -> None:
    """A box of rows needs what they keep, and no more."""
    held = parts("bfloat16", 40, 16)
    specs = [*(held[role][0] for role in ROLES), None]
    values = {role: held[role][1].tobytes() for role in CODEC.planning}
    args = CODEC.settle(CODEC.Args(), specs, values)
    mask, weight, *rest = CODEC.decode_needs(args, specs, ((10, 12), (3, 7)))
    starts = held["offsets"][1].view("<i8")
    assert mask == ((10, 12), (0, 2))
    assert weight == ((starts[10], starts[12]),)
    assert rest == [((0, 0),), ((0, 0),), None]
