"""Codes of FP8 of which only some are stored, as compressed-tensors 0.12.2 stored them
(make_bitmask_fp8.py): what that release decodes them to is what comes out.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from commandline import done, run
from safetensors.torch import load_file, save_file

# dtype, shape and bytes
Raw = tuple[str, list[int], str]
PARTS: dict[str, Raw] = {
    "shape": (
        "int64",
        [2],
        "05000000000000001300000000000000",
    ),
    "compressed": (
        "float8_e4m3fn",
        [37],
        "f8797e767e79f8f27774f2f9fe757a777d6e7a757b736ff470f7f4747e797b7efe797b7df9",
    ),
    "bitmask": (
        "uint8",
        [5, 3],
        "673e04a410050000005eae069c1a04",
    ),
    "row_offsets": (
        "int64",
        [5],
        "00000000000000000b00000000000000110000000000000011000000000000001d00000000000000",
    ),
    "weight_scale": (
        "bfloat16",
        [5, 1],
        "9d3b803b0034cf3b873b",
    ),
}
WEIGHT: Raw = (
    "bfloat16",
    [5, 19],
    (
        "9dbfb13f094000000000893f094000000000b13f9dbf44bf933f6c3f000000000000000044bf0000"
        "000090bf00000000e0bf0000503f0000000000000000a03f000000000000703f0000d03f00000000"
        "000000000000000000000000000000000000000000000000000000000000000000000000353f0140"
        "a83f0e4000008e3f00000000423f9bbf4f3f0000c2bf00009bbf00009b3f354000000000983fba3f"
        "ec3f00000000ecbf0000983f0000ba3fdb3f0000000000000000000098bf"
    ),
)
TO = ("--from", "compressed-tensors@sparse-bitmask", "--to", "compressed-tensors@bf16")


def tensor(of: Raw) -> torch.Tensor:
    dtype, shape, content = of
    raw = torch.frombuffer(bytearray.fromhex(content), dtype=torch.uint8)
    return raw.view(getattr(torch, dtype)).reshape(shape)


def stored(tmp_path: Path) -> Path:
    save_file({f"l.{name}": tensor(of) for name, of in PARTS.items()}, tmp_path / "in.safetensors")
    return tmp_path / "in.safetensors"


def test_what_comes_out_is_what_the_library_decodes(tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    done("apply", stored(tmp_path), "-o", out, *TO, "--allow", "lossy", "--allow", "drop")
    found = load_file(out)
    assert found.keys() == {"l.weight"}
    assert found["l.weight"].dtype == torch.bfloat16
    # the sign of what is not stored is no one's
    assert torch.equal(found["l.weight"], tensor(WEIGHT))
    stays = tensor(WEIGHT) != 0
    assert stays.sum() == tensor(PARTS["compressed"]).numel()


@pytest.mark.parametrize("part", ["weight_scale", "bitmask", "row_offsets"])
def test_a_part_that_is_missing_is_named(part: str, tmp_path: Path) -> None:
    source = stored(tmp_path)
    tensors = load_file(source)
    del tensors[f"l.{part}"]
    save_file(tensors, source)
    failed = run("plan", source, *TO, "--allow", "lossy")
    assert failed.exit == 3
    assert f"l.{part}" in failed.err
