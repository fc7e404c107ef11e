"""Shards of quantized tensors as torchao cuts them itself, joined: the bits are those of the tensor
that torchao made as a whole.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dcp_folders import rows, save
from quantized_shards import save_shards
from ranks import Ranks
from safetensors.torch import load_file
from torchao_ranks import MADE, SAVED_BY_RANKS, components, tensor

import migrate

pytestmark = pytest.mark.libraries


@pytest.fixture(autouse=True)
def ao() -> None:
    pytest.importorskip("torchao", reason="torchao is not installed here; `make peers` has it")


def same(out: Path, name: str, whole: Any) -> None:
    found = {
        key.rpartition(".")[2]: one
        for key, one in load_file(out).items()
        if f"{name}." in f".{key}"
    }
    wanted = components(whole)
    assert found.keys() == wanted.keys()
    for key, one in wanted.items():
        assert (found[key].dtype, found[key].shape) == (one.dtype, one.shape), key
        one, held = (t.contiguous().reshape(-1).view(torch.uint8) for t in (one, found[key]))
        assert torch.equal(one, held), key


@pytest.mark.parametrize("name", MADE)
def test_shards_that_torchao_cut_are_its_own_tensor(name: str, tmp_path: Path) -> None:
    whole = tensor(name)
    boxes = rows(whole.shape, (128, 128))
    if name == "int4":
        # torch asks Int4Tensor whether it is pinned, which it cannot say
        shards = [whole.narrow(0, start[0], 128) for start, _ in boxes]
        save_shards(tmp_path / "in", whole.shape, boxes, {name: shards})
    else:
        save(tmp_path / "in", {name: whole}, {name: boxes})
    migrate.apply(tmp_path / "in", tmp_path / "out.safetensors", output_format="safetensors")
    same(tmp_path / "out.safetensors", name, whole)


@pytest.mark.parametrize("world", [2, 3])
def test_shards_of_ranks_are_torchaos_own_tensors(
    world: int, ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    ranks(world).run("torchao_ranks", "saves", str(tmp_path / "in"))
    migrate.apply(tmp_path / "in", tmp_path / "out.safetensors", output_format="safetensors")
    for name in SAVED_BY_RANKS:
        same(tmp_path / "out.safetensors", name, tensor(name))
