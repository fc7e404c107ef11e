"""Classes whose shards make no whole tensor, and that are encoded anew by a rule of their own:
squares, groups, and integers; what they stand for is written down here with torch alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
from migrate.planning.object_numbers import codings
from migrate.source.pickle.tree import Encoding

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


# kinds that no codec encodes as their class does, what is other than in the table of kinds, and why
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "te-block-2d": ({"number": "e5m2"}, "no codec encodes blocks of float8_e5m2"),
    "te-block-1d": ({"number": "e5m2"}, "no codec encodes blocks of float8_e5m2"),
    "te-nvfp4-2d": (
        {"options": {"_nvfp4_use_4over6": True, "_nvfp4_e4m3_max": 256}},
        "no codec encodes 4 over 6",
    ),
    "te-nvfp4-rows": ({}, "no codec makes an amax for each row"),
    "ao-float8-block": ({"data": "float8_e5m2"}, "no codec has blocks of float8_e5m2"),
    "ao-int8": ({"scale": "bfloat16"}, "no codec has integers with scales of bfloat16"),
    "ao-int4": ({}, "how its kernels order codes is known of no GPU"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_codec_encodes_as_its_class_does_stays_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    how, why = REFUSED[name]
    kind, shape = KINDS[name], (12 * KINDS[name].unit, KINDS[name].shape[1])
    parts = dict(kind.parts)
    for component, part in parts.items():
        other = how.get("data" if component == "qdata" else component)
        parts[component] = dataclasses.replace(part, dtype=other) if other else part
    options = {**kind.options_of(), **how.get("options", {})}
    number = how.get("number", kind.number)
    kind = dataclasses.replace(kind, parts=parts, number=number, options=options)
    monkeypatch.setitem(KINDS, name, kind)
    cut = 5 * kind.unit
    boxes = rows(shape, [cut, shape[0] - cut])
    with classes.installed():
        found = parts_of(name, (cut, shape[1]), 0, monkeypatch)
        raw = {
            at: one.unsqueeze(-1).view(torch.uint8).reshape(*one.shape, -1).numpy()
            for at, one in found.items()
        }
        dense = torch.zeros(shape[0] - cut, shape[1], dtype=torch.bfloat16)
        save_shards(
            tmp_path / "in", shape, boxes, {"w": [wrapped("part", boxes[0][1], raw), dense]}
        )
    with pytest.raises(MigrateError) as caught:
        migrate.plan(tmp_path / "in", output_format="safetensors", **HOW)
    (said,) = caught.value.diagnostics
    assert said.code == "M946"
    assert said.message.startswith("w: its 2 chunks")
    assert f"cannot be encoded anew: {why}" in said.message
    assert not (tmp_path / "out").exists()


def test_integers_that_nothing_encodes_as_torchao_does() -> None:
    """Classes and settings of which no file of ranks is at hand."""
    at = {"qdata": "int8", "scale": "float32", "zero_point": "int8"}
    shape, block = (4, 64), (1, 64)
    reduced = Encoding("ao-int8", "Int8Tensor", shape, "bfloat16", {}, "int8", block=block)
    assert isinstance(codings(reduced, at), list)
    reduced = dataclasses.replace(reduced, options={"reduce_range": True})
    assert codings(reduced, at) == "no codec has integers of a reduced range"
    unpacked = dataclasses.replace(reduced, format="ao-intx", name="IntxUnpackedToInt8Tensor")
    assert str(codings(unpacked, at)).startswith("nothing reads or makes the numbers of ao-intx")
