"""Classes whose shards make no whole tensor, and that are encoded anew by a rule of their own:
squares, groups, and integers; what they stand for is written down here with torch alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import pytest
import quantized_classes as classes
import torch
from dcp_folders import rows
from quantized_ranks import KINDS, Part, tensors, whole, wrapped
from quantized_shards import CLASSES, MX, Class, save_shards, shard
from quantized_streams import stand_ins
from safetensors.torch import load_file

import migrate
from migrate.core.errors import MigrateError

Parts = Mapping[str, torch.Tensor]
HOW = {"params": {"requantize": "w"}, "allow": {"lossy"}}
SQUARES = Class(
    "MXFP8Tensor", MX, {"with_gemm_swizzled_scales": False}, {"with_2d_quantization": True}
)


def of_mxfp8(data: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Rows of E4M3 codes with a power of two for each 32."""
    powers = torch.exp2(scales.double() - 127).repeat_interleave(32, -1)
    return data.view(torch.float8_e4m3fn).double() * powers[..., : data.shape[-1]]


def test_squares_are_encoded_as_squares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape, held, due = (160, 256), [], []
    monkeypatch.setitem(CLASSES, "squares", SQUARES)
    boxes = rows(shape, [72, 88])
    with stand_ins() as modules:
        for seed, (_, (m, k)) in enumerate(boxes):
            torch.manual_seed(seed)
            codes = torch.randint(0, 0x7F, (m, k), dtype=torch.uint8)
            squares = torch.randint(122, 128, (-(-m // 32), k // 32), dtype=torch.uint8)
            grids = {
                "_rowwise_data": codes,
                "_rowwise_scale_inv": squares.repeat_interleave(32, 0)[:m],
                "_columnwise_data": codes,
                "_columnwise_scale_inv": squares.repeat_interleave(32, 1),
            }
            parts = shard(SQUARES, grids, ((0, 0), (m, k)))
            held.append(SQUARES.object(modules, parts, (m, k)))
            due.append(of_mxfp8(codes, grids["_rowwise_scale_inv"]))
        save_shards(tmp_path / "in", shape, boxes, {"w": held})
    migrate.apply(tmp_path / "in", tmp_path / "out.safetensors", **HOW)
    found, wanted = load_file(tmp_path / "out.safetensors"), torch.cat(due)
    codes, scales = found["w._rowwise_data"], found["w._rowwise_scale_inv"][:160, :8]
    # the least power of two with which 448 is not below the largest number of a square
    largest = wanted.reshape(5, 32, 8, 32).abs().amax((1, 3))
    powers = (torch.ceil(torch.log2(largest / 448)) + 127).to(torch.uint8)
    assert torch.equal(scales, powers.repeat_interleave(32, 0))
    numbers = wanted / torch.exp2(scales.double() - 127).repeat_interleave(32, 1)
    assert torch.equal(codes, numbers.float().to(torch.float8_e4m3fn).view(torch.uint8))
    assert torch.equal(found["w._columnwise_data"], codes)
    turned = found["w._columnwise_scale_inv"][:5, :256]
    assert torch.equal(turned, powers.repeat_interleave(32, 1))
    assert migrate.verify(tmp_path / "out.safetensors", source=tmp_path / "in").equal


def parts_of(
    kind: str, shape: tuple[int, ...], seed: int, patch: pytest.MonkeyPatch
) -> dict[str, torch.Tensor]:
    """The components of a tensor of this shape, by itself; scales are near each other."""
    patch.setitem(KINDS, "part", dataclasses.replace(KINDS[kind], shape=shape))
    held = dict(whole("part", seed))
    for name in held:
        if "scale" in name and KINDS[kind].parts[name].dtype == "uint8":
            held[name] = held[name] % 8 + 120
        elif "data" in name and KINDS[kind].parts[name].dtype == "uint8":
            held[name] = held[name] & 0xF7
    return tensors("part", held)


def test_members_of_a_group_are_encoded_each_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, cut = (3, 96, 64), (40, 56)
    held, due, boxes = [], [], []
    with classes.installed():
        for seed, size in enumerate(cut):
            own = (shape[0], size, shape[2])
            parts = parts_of("te-grouped", own, seed, monkeypatch)
            raw = {name: one.unsqueeze(-1).numpy() for name, one in parts.items()}
            held.append(wrapped("part", own, raw))
            scales = parts["_rowwise_scale_inv"][:, :size, :2]
            due.append(of_mxfp8(parts["_rowwise_data"], scales))
            boxes.append(((0, sum(cut[:seed]), 0), own))
        save_shards(tmp_path / "in", shape, boxes, {"w": held})
    migrate.apply(tmp_path / "in", tmp_path / "out.safetensors", **HOW)
    found, wanted = load_file(tmp_path / "out.safetensors"), torch.cat(due, 1)
    got = of_mxfp8(found["w._rowwise_data"], found["w._rowwise_scale_inv"][:, :96, :2])
    assert got.shape == wanted.shape == shape
    assert (got - wanted).abs().max() <= 2**-4 * wanted.abs().max()
    # columns of each member in blocks of 32 rows
    scales = torch.exp2(found["w._columnwise_scale_inv"][:, :3, :64].double() - 127)
    got = found["w._columnwise_data"].view(torch.float8_e4m3fn).double()
    got = got * scales.repeat_interleave(32, 1)
    assert (got - wanted).abs().max() <= 2**-4 * wanted.abs().max()
    assert migrate.verify(tmp_path / "out.safetensors", source=tmp_path / "in").equal
    # and cut again, at places that are no borders either
    how = {"chunks": 2, "output_format": "dcp"}
    migrate.apply(tmp_path / "in", tmp_path / "cut", **how, **HOW)
    assert migrate.verify(tmp_path / "cut", source=tmp_path / "in").equal


def test_integers_with_one_scale_are_encoded_as_torchao_does_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Part("float32", shape=(1, 1))
    parts = {"qdata": Part("int8"), "scale": one, "zero_point": Part("int8", shape=(1, 1))}
    kind = dataclasses.replace(
        KINDS["ao-int8"], parts=parts, options={"block_size": [None, None]}, shape=(11, 6)
    )
    monkeypatch.setitem(KINDS, "one", kind)
    held, due, boxes = [], [], []
    with classes.installed():
        for seed, (top, bottom) in enumerate([(0, 6), (6, 11)]):
            own = (bottom - top, 6)
            found = parts_of("one", own, seed, monkeypatch)
            raw = {
                name: value.unsqueeze(-1).view(torch.uint8).reshape(*value.shape, -1).numpy()
                for name, value in found.items()
            }
            held.append(wrapped("part", own, raw))
            codes = found["qdata"].float() - found["zero_point"].float()
            due.append(codes * found["scale"])
            boxes.append(((top, 0), own))
        save_shards(tmp_path / "in", (11, 6), boxes, {"w": held})
    migrate.apply(tmp_path / "in", tmp_path / "out.safetensors", **HOW)
    made, wanted = load_file(tmp_path / "out.safetensors"), torch.cat(due)
    scale = wanted.abs().max() / 127.5
    assert torch.equal(made["w.scale"], scale.reshape(1, 1))
    assert torch.equal(made["w.zero_point"], torch.zeros(1, 1, dtype=torch.int8))
    codes = torch.round(wanted * (1 / scale)).clamp(-128, 127).to(torch.int8)
    assert torch.equal(made["w.qdata"], codes)
    assert migrate.verify(tmp_path / "out.safetensors", source=tmp_path / "in").equal


def test_integers_of_four_bits_stay_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense = torch.zeros(5, 64, dtype=torch.bfloat16)
    with classes.installed():
        parts = parts_of("ao-int4", (6, 64), 0, monkeypatch)
        raw = {
            name: one.unsqueeze(-1).view(torch.uint8).reshape(*one.shape, -1).numpy()
            for name, one in parts.items()
        }
        held = [wrapped("part", (6, 64), raw), dense]
        save_shards(tmp_path / "in", (11, 64), rows((11, 64), [6, 5]), {"w": held})
    with pytest.raises(MigrateError, match="cannot be encoded anew: how its kernels order codes"):
        migrate.plan(tmp_path / "in", output_format="safetensors", **HOW)
