"""Shards of quantized tensors that make no whole tensor, decoded and encoded anew because a person
says so; what they are is written down here with torch alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import quantized_classes as classes
import torch
import torch.distributed.checkpoint as dcp
from dcp_folders import Box, rows
from quantized_ranks import KINDS, piece, whole, wrapped
from quantized_shards import ARGUMENTS, CLASSES, Class, save_shards, shard, swizzled
from quantized_streams import stand_ins
from safetensors.torch import load_file
from stored_objects import chunks, raw

import migrate
from migrate.core.errors import MigrateError

Parts = Mapping[str, torch.Tensor]
SHAPE = (160, 256)
# 80 rows end inside of blocks of 128 and of 32, and on a border of 16
CUT = rows(SHAPE, [72, 88])
PARAMS, LOSSY = {"requantize": ["w{n}"]}, {"lossy"}


def drawn(cls: Class, m: int, k: int, seed: int) -> dict[str, torch.Tensor]:
    """Grids of which both copies are of the same numbers, near enough: none is infinite or NaN."""
    torch.manual_seed(seed)
    grids = {}
    for name, part in cls.parts.items():
        shape = part.grid(m, k)
        if "scale" in name and part.dtype is torch.uint8:
            # of NVFP4 these are E4M3 numbers, of MXFP8 powers of two
            low, high = (0x30, 0x50) if cls.name == "NVFP4Tensor" else (122, 128)
            grids[name] = torch.randint(low, high, shape, dtype=torch.uint8)
        elif part.dtype is torch.uint8:
            signs = torch.randint(0, 2, shape, dtype=torch.uint8) * 128
            grids[name] = torch.randint(0, 0x7F, shape, dtype=torch.uint8) + signs
        else:
            grids[name] = torch.rand(shape) + 0.5
    if "_transpose" in grids:
        grids["_transpose"] = grids["_data"]
    if cls.flags.get("is_2D_scaled"):
        grids |= {
            name.replace("row", "column"): one for name, one in grids.items() if "row" in name
        }
    return grids


def numbers(cls: Class, grids: Parts) -> torch.Tensor:
    """What the rowwise copy stands for, in float64."""
    data = grids.get("_data", grids.get("_rowwise_data"))
    assert data is not None
    if cls.name == "NVFP4Tensor":
        table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6]).double()
        codes = torch.stack((data & 15, data >> 4), -1).flatten(-2).int()
        codes_ = table[codes & 7] * (1 - 2 * (codes >> 3))
        scales = grids["_rowwise_scale_inv"].view(torch.float8_e4m3fn).double()
        return (
            codes_
            * scales.repeat_interleave(16, 1)
            * grids["_amax_rowwise"].reshape(-1, 1)
            / (6 * 448)
        )
    values = data.view(torch.float8_e4m3fn).double()
    scales = grids.get("_scale_inv", grids.get("_rowwise_scale_inv"))
    assert scales is not None
    if cls.name == "MXFP8Tensor":
        scales = torch.exp2(scales.double() - 127)
    for axis in (0, 1):
        each = -(-values.shape[axis] // scales.shape[axis])
        if scales.shape[axis] > 1:
            each = {"MXFP8Tensor": 32, "Float8Tensor": 1}.get(cls.name, 128) if each > 1 else 1
        scales = scales.repeat_interleave(each, axis).narrow(axis, 0, values.shape[axis])
    return values * scales


def grids_of(cls: Class, held: Parts, shape: tuple[int, int]) -> dict[str, torch.Tensor]:
    """The grids out of the components of an object."""
    found = {}
    for name, part in cls.parts.items():
        i, j = torch.meshgrid(*map(torch.arange, part.grid(*shape)), indexing="ij")
        at, one = part.place(i, j, *shape), held[name]
        found[name] = one.reshape(-1)[sum(a * s for a, s in zip(at, one.stride(), strict=True))]
    return found


def save(
    folder: Path, names: list[str], boxes: list[Box] = CUT, seed: int = 0
) -> dict[str, torch.Tensor]:
    """A checkpoint with a tensor of each class, each box quantized for itself; the numbers."""
    values, due = {}, {}
    with stand_ins() as modules:
        for n, name in enumerate(names):
            cls = CLASSES[name]
            values[f"w{n}"], parts = [], []
            for number, (_, (m, k)) in enumerate(boxes):
                grids = drawn(cls, m, k, seed + 10 * n + number)
                held = shard(cls, grids, ((0, 0), (m, k)))
                values[f"w{n}"].append(cls.object(modules, held, (m, k)))
                parts.append(numbers(cls, grids))
            due[f"w{n}"] = torch.cat(parts)
        save_shards(folder, SHAPE, boxes, values, {"b": torch.ones(2)})
    return due


# how far a number may be off, as a part of the largest that it shares a scale with
BOUNDS: dict[str, float] = {
    "float8": 2**-4,
    "mxfp8": 2**-4,
    "mxfp8-swizzled": 2**-4,
    "block-2d": 2**-4,
    "block-1d": 2**-4,
    "block-1d-compact": 2**-4,
    "nvfp4": 0.3,
    "nvfp4-2d": 0.3,
    "nvfp4-swizzled": 0.3,
}


def test_shards_are_decoded_and_the_whole_is_encoded_anew(tmp_path: Path) -> None:
    names = list(BOUNDS)
    due = save(tmp_path / "in", names)
    made = migrate.apply(tmp_path / "in", tmp_path / "out.safetensors", params=PARAMS, allow=LOSSY)
    found = load_file(tmp_path / "out.safetensors")
    assert torch.equal(found["b"], torch.ones(2))
    for n, name in enumerate(names):
        cls = CLASSES[name]
        held = {part: found[f"w{n}.{part}"] for part in cls.parts}
        got = numbers(cls, grids_of(cls, held, SHAPE))
        wanted = due[f"w{n}"]
        assert got.shape == wanted.shape, name
        assert (got - wanted).abs().max() <= BOUNDS[name] * wanted.abs().max(), name
    assert made.report is not None
    rules = {(one["rule"], one["op"]) for one in made.to_json()["report"]["rules"]}
    assert rules == {("requantize", "dequantize"), ("requantize", "quantize")}
    assert migrate.verify(tmp_path / "out.safetensors", source=tmp_path / "in").equal


def test_a_tensor_with_one_scale_has_the_codes_of_its_largest_number(tmp_path: Path) -> None:
    due = save(tmp_path / "in", ["float8"])["w0"].float()
    migrate.apply(tmp_path / "in", tmp_path / "out.safetensors", params=PARAMS, allow=LOSSY)
    found = load_file(tmp_path / "out.safetensors")
    scale = due.abs().max() / 448
    codes = (due / scale).to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(found["w0._scale_inv"], scale.reshape(1))
    assert torch.equal(found["w0._data"], codes)
    assert torch.equal(found["w0._transpose"], codes.t())


def test_what_joins_exactly_is_not_touched(tmp_path: Path) -> None:
    boxes = rows(SHAPE, [64, 96])
    save(tmp_path / "in", ["mxfp8"], boxes)
    migrate.apply(tmp_path / "in", tmp_path / "exact.safetensors")
    plan = migrate.plan(tmp_path / "in", output_format="safetensors", params=PARAMS)
    assert not plan.document["losses"]
    made = migrate.apply(tmp_path / "in", tmp_path / "out.safetensors", params=PARAMS)
    assert made.report is None
    assert migrate.diff(tmp_path / "out.safetensors", tmp_path / "exact.safetensors").equal


def test_only_the_tensors_that_are_named_and_with_permission(tmp_path: Path) -> None:
    save(tmp_path / "in", ["float8", "block-2d"])
    how = {"output_format": "safetensors"}

    def code(**asked: object) -> list[tuple[str, str]]:
        with pytest.raises(MigrateError) as caught:
            migrate.plan(tmp_path / "in", **how, **asked)  # type: ignore[arg-type]
        return [(d.code, d.message) for d in caught.value.diagnostics]

    ((found, said),) = code(params=PARAMS)
    assert (found, said) == ("M401", "`requantize` changes values of 7 tensors")
    ((found, said),) = code(params={"requantize": "w0"}, allow=LOSSY)
    assert found == "M946"
    assert said.startswith("w1: its 2 chunks")
    ((found, said),) = code(params={"requantize": ["w0", "v{n}"]}, allow=LOSSY)
    assert found == "M115"
    assert "names no quantized tensor" in said
    ((found, _),) = code(params={"requantize": "w{"}, allow=LOSSY)
    assert found == "M115"
    plan = migrate.plan(tmp_path / "in", **how, params={"requantize": "[w0, w1]"}, allow=LOSSY)
    (loss,) = plan.document["losses"]
    assert (loss["kind"], loss["rule"]) == ("lossy", "requantize")
    assert not plan.document["downgrade"]["exact"]


def test_what_no_arithmetic_is_known_for_stays_refused(tmp_path: Path) -> None:
    save(tmp_path / "in", ["nvfp4-row"], rows(SHAPE, [128, 128], dim=1))
    with pytest.raises(MigrateError) as caught:
        migrate.plan(tmp_path / "in", output_format="safetensors", params=PARAMS, allow=LOSSY)
    (found,) = caught.value.diagnostics
    assert found.code == "M946"
    assert "cannot be encoded anew: no codec makes an amax for each row" in found.message


def test_what_the_format_has_no_place_for_stays_refused(tmp_path: Path) -> None:
    save(tmp_path / "in", ["nvfp4"], rows(SHAPE, [160]))
    with pytest.raises(MigrateError, match=r"M946.*cannot be encoded anew: .* a multiple of 16"):
        migrate.plan(tmp_path / "in", output_format="dcp", chunks=3, params=PARAMS, allow=LOSSY)


def test_plain_numbers_of_a_rank_are_taken_as_they_are(tmp_path: Path) -> None:
    cls, (m, k) = CLASSES["float8"], (80, 256)
    boxes = rows(SHAPE, [m, m])
    grids = drawn(cls, m, k, 1)
    dense = torch.randn(m, k).to(torch.bfloat16)
    with stand_ins() as modules:
        held = cls.object(modules, shard(cls, grids, ((0, 0), (m, k))), (m, k))
        save_shards(tmp_path / "in", SHAPE, boxes, {"w0": [held, dense]})
    migrate.apply(tmp_path / "in", tmp_path / "out.safetensors", params=PARAMS, allow=LOSSY)
    found = load_file(tmp_path / "out.safetensors")
    due = torch.cat([numbers(cls, grids), dense.double()]).float()
    scale = due.abs().max() / 448
    assert torch.equal(found["w0._scale_inv"], scale.reshape(1))
    codes = (due / scale).to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(found["w0._data"], codes)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("kind", "cut"),
    [
        ("ao-float8-tensor", [(0, 6), (6, 11)]),
        ("ao-float8-block", [(0, 700), (700, 1536)]),
        ("ao-nvfp4", [(0, 6), (6, 11)]),
        ("ao-nvfp4-swizzled", [(0, 60), (60, 131)]),
        ("te-float8", [(0, 6), (6, 11)]),
    ],
)
def test_objects_of_other_libraries(kind: str, cut: list[tuple[int, int]], tmp_path: Path) -> None:
    shape = KINDS[kind].shape
    boxes = [((a, 0), (b - a, *shape[1:])) for a, b in cut]
    held, due = [], []
    with classes.installed():
        for number, rows_ in enumerate(cut):
            box = (rows_, *((0, n) for n in shape[1:]))
            parts = dict(piece(kind, box, own=True, zeros=True))
            data = "_data" if kind.startswith("te") else "qdata"
            # no NaN, and scales that differ between ranks
            parts[data] = parts[data] & (0xFF if "nvfp4" in kind else 0x77)
            for name in {"_scale_inv", "per_tensor_scale", "scale"} & parts.keys():
                if KINDS[kind].parts[name].shape is not None:
                    numbers_ = parts[name].view("<f4") * (number + 1)
                    parts[name] = numbers_.astype("<f4").view("u1")
                elif KINDS[kind].parts[name].dtype == "float8_e4m3fn":
                    parts[name] = parts[name] % 0x20 + 0x30
            held.append(wrapped(kind, (rows_[1] - rows_[0], *shape[1:]), parts))
        save_shards(tmp_path / "in", shape, boxes, {"w0": held})
    with pytest.raises(MigrateError, match="M946"):
        migrate.plan(tmp_path / "in", output_format="safetensors")
    migrate.apply(tmp_path / "in", tmp_path / "out.safetensors", params=PARAMS, allow=LOSSY)
    assert migrate.verify(tmp_path / "out.safetensors", source=tmp_path / "in").equal
    found = load_file(tmp_path / "out.safetensors")
    with classes.installed():
        target = wrapped(kind, shape, dict(whole(kind)))
        reader = migrate.dcp.MigratingReader(tmp_path / "in", params=PARAMS, allow=LOSSY)
        dcp.load({"w0": target}, storage_reader=reader)
        for name, one in target.held().items():
            assert raw(one) == raw(found[f"w0.{name}"]), name
    numbers_of = DECODE[kind]
    got = numbers_of({name.removeprefix("w0."): one for name, one in found.items()})
    due = torch.cat([numbers_of(one.held()) for one in held])
    assert got.shape == due.shape == shape
    assert (got - due).abs().max() <= 0.3 * due.abs().max()


def _of_torchao(parts: Parts, block: int | None = None) -> torch.Tensor:
    values, scales = parts["qdata"].view(torch.float8_e4m3fn).double(), parts["scale"].double()
    if block:
        for axis in (0, 1):
            scales = scales.repeat_interleave(block, axis).narrow(axis, 0, values.shape[axis])
    return values * scales


def _of_nvfp4(parts: Parts) -> torch.Tensor:
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6]).double()
    data, scales = parts["qdata"], parts["scale"]
    codes = torch.stack((data & 15, data >> 4), -1).flatten(-2).int()
    rows_, columns = codes.shape[0], codes.shape[1] // 16
    if scales.shape != (rows_, columns):
        flat, wide = scales.reshape(-1), scales.numel() // (-(-rows_ // 128) * 128)
        i, j = torch.meshgrid(torch.arange(rows_), torch.arange(columns), indexing="ij")
        scales = flat.view(torch.uint8)[swizzled(i, j, wide)].view(torch.float8_e4m3fn)
    values = table[codes & 7] * (1 - 2 * (codes >> 3))
    return values * scales.double().repeat_interleave(16, 1) * parts["per_tensor_scale"].double()


DECODE = {
    "ao-float8-tensor": _of_torchao,
    "ao-float8-block": lambda parts: _of_torchao(parts, 128),
    "ao-nvfp4": _of_nvfp4,
    "ao-nvfp4-swizzled": _of_nvfp4,
    "te-float8": lambda parts: _of_torchao({"qdata": parts["_data"], "scale": parts["_scale_inv"]}),
}


def test_objects_of_a_distributed_checkpoint_are_whole_again(tmp_path: Path) -> None:
    save(tmp_path / "in", ["mxfp8", "block-2d"])
    migrate.apply(tmp_path / "in", tmp_path / "out", params=PARAMS, allow=LOSSY)
    assert not migrate.inspect(tmp_path / "out").unjoined
    assert migrate.verify(tmp_path / "out", source=tmp_path / "in").equal
    migrate.apply(tmp_path / "in", tmp_path / "one.safetensors", params=PARAMS, allow=LOSSY)
    migrate.apply(tmp_path / "out", tmp_path / "two.safetensors")
    one, two = (load_file(tmp_path / name) for name in ("one.safetensors", "two.safetensors"))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[key], two[key]) for key in one)
    assert {one.key for one in migrate.inspect(tmp_path / "out").objects} == {"w0", "w1"}


def allowed(modules: Mapping[str, Any]) -> list[Any]:
    """What stock torch has to be told of these classes."""
    return [
        one
        for short in ("float8_tensor", "mxfp8_tensor", "float8_blockwise_tensor", "constants")
        for name, one in vars(modules[short]).items()
        if not name.startswith("__")
    ]


@pytest.mark.parametrize("torn", [False, True])
def test_chunks_for_ranks_are_encoded_anew(torn: bool, tmp_path: Path) -> None:
    """`torn`: from shards that make no whole tensor, and the numbers are rounded once."""
    names = ["mxfp8", "block-2d", "float8"]
    due = save(tmp_path / "in", names, CUT if torn else rows(SHAPE, [160]))
    how: dict[str, Any] = {"chunks": 3, "output_format": "dcp"}
    with pytest.raises(MigrateError, match="M946"):
        migrate.plan(tmp_path / "in", **how)
    with pytest.raises(MigrateError, match="M401"):
        migrate.plan(tmp_path / "in", **how, params=PARAMS)
    migrate.apply(tmp_path / "in", tmp_path / "out", **how, params=PARAMS, allow=LOSSY)
    for n, name in enumerate(names):
        cls = CLASSES[name]
        with stand_ins() as modules, torch.serialization.safe_globals(allowed(modules)):
            found = chunks(tmp_path / "out", f"w{n}")
        assert [one.at[0] for one in found] == [0, 54, 108]
        wanted = due[f"w{n}"]
        for rank, ((first, _), value, _) in enumerate(found):
            shape = (54 if rank < 2 else 52, SHAPE[1])
            held = dict(zip(ARGUMENTS[cls.name], value.arguments, strict=False))
            got = numbers(cls, grids_of(cls, held, shape))
            own = wanted[first : first + shape[0]]
            assert got.shape == own.shape, name
            assert (got - own).abs().max() <= BOUNDS[name] * own.abs().max(), name
    checked = migrate.verify(tmp_path / "out", source=tmp_path / "in")
    assert checked.equal, checked.differences
    save(tmp_path / "other", names, CUT if torn else rows(SHAPE, [160]), seed=100)
    checked = migrate.verify(tmp_path / "out", source=tmp_path / "other")
    wrong = {one.key: one.what for one in checked.differences}
    assert {"w0._rowwise_data", "w1._rowwise_data", "w2._data"} <= wrong.keys()
    assert wrong["w1._rowwise_data"].startswith("the chunk at [0, 0] has ")
