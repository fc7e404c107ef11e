"""Shards of quantized tensors as torchao cuts them itself, joined: the bits are those of the tensor
that torchao made as a whole. And shards that are tensors of Transformer Engine itself.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dcp_folders import rows, save
from quantized_ranks import KINDS
from quantized_shards import save_shards
from ranks import Ranks
from safetensors.torch import load_file
from stored_objects import saved
from te_python import KINDS_SHARDED, SAVED, SHARDED
from test_joined_ranks import has_components
from torchao_ranks import MADE, SAVED_BY_RANKS, components, tensor
from work import HANG

import migrate
from migrate.core.errors import MigrateError

pytestmark = pytest.mark.libraries


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


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4", "mxfp8-swizzled", "mxfp4-swizzled"])
def test_a_shard_without_a_block_scale_is_encoded_as_torchao_encodes_it(
    name: str, tmp_path: Path
) -> None:
    """One rank saved plain numbers. The scales are those of torchao's configurations (RCEIL);
    numbers that it had encoded have the same codes and scales again.
    """
    from torchao.prototype.mx_formats.config import ScaleCalculationMode

    whole = tensor(name)
    boxes = rows(whole.shape, (128, 128))
    plain = torch.randn(128, whole.shape[1], generator=torch.Generator().manual_seed(5)).bfloat16()
    save_shards(tmp_path / "in", whole.shape, boxes, {name: [whole[:128], plain]})
    out, how = tmp_path / "out.safetensors", {"params": {"requantize": name}}
    with pytest.raises(MigrateError, match="M946"):
        migrate.apply(tmp_path / "in", out)
    with pytest.raises(MigrateError, match="M401"):
        migrate.apply(tmp_path / "in", out, **how)
    migrate.apply(tmp_path / "in", out, **how, allow={"lossy"})
    numbers = torch.cat([whole[:128].dequantize(torch.bfloat16), plain])
    swizzled = name.endswith("swizzled")
    due = type(whole).to_mx(
        numbers, whole.elem_dtype, 32, ScaleCalculationMode.RCEIL, is_swizzled_scales=swizzled
    )
    same(out, name, due)


@pytest.mark.parametrize("world", [2, 3])
def test_shards_of_ranks_are_torchaos_own_tensors(
    world: int, ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    ranks(world).run("torchao_ranks", "saves", str(tmp_path / "in"))
    migrate.apply(tmp_path / "in", tmp_path / "out.safetensors", output_format="safetensors")
    for name in SAVED_BY_RANKS:
        same(tmp_path / "out.safetensors", name, tensor(name))


@pytest.mark.parametrize("world", [2, 3])
def test_parts_of_torchaos_own_classes_take_their_bytes(
    world: int, ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    state = {name: tensor(name) for name in SAVED_BY_RANKS}
    torch.save({"model": state}, tmp_path / "whole.pt")
    ranks(world).run("torchao_ranks", "loads", str(tmp_path / "whole.pt"))
    # and what other ranks saved
    ranks(5 - world).run("torchao_ranks", "saves", str(tmp_path / "in"))
    ranks(world).run("torchao_ranks", "loads", str(tmp_path / "in"))


def test_fully_shard_takes_no_class_of_torchao(ranks: Callable[[int], Ranks]) -> None:
    ranks(2).run("torchao_ranks", "shards")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python code of Transformer Engine, unpacked; installed, it needs a GPU."""
    folder = tmp_path_factory.mktemp("te")
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder)]
    command += ["--only-binary", ":all:", "transformer_engine==2.20.2"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=HANG)
    if found.returncode:
        pytest.skip(f"pip has no transformer_engine here: {found.stderr.strip()[-200:]}")
    (file,) = folder.glob("*.whl")
    with zipfile.ZipFile(file) as archive:
        archive.extractall(folder)
    return folder


@pytest.mark.parametrize("world", [1, 3])
def test_tensors_of_transformer_engine_itself(
    world: int, wheel: Path, ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    # ranks keep what they import
    ranks(world).end()
    try:
        ranks(world).run("te_python", "saves", str(tmp_path / "in"), str(wheel))
    finally:
        ranks(world).end()
    migrate.apply(tmp_path / "in", tmp_path / "out.safetensors")
    has_components(tmp_path / "out.safetensors", list(SAVED), world, norm=False)


def test_shards_of_transformer_engine_itself_under_fsdp2(
    wheel: Path,
    ranks: Callable[[int], Ranks],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for kind, shape in KINDS_SHARDED.items():
        monkeypatch.setitem(KINDS, kind, dataclasses.replace(KINDS[kind], shape=shape))
    for kind in SHARDED:
        saved(tmp_path / f"{kind}.pt", [kind])
    ranks(2).end()
    try:
        ranks(2).run("te_python", "loads", str(tmp_path), str(wheel))
    finally:
        ranks(2).end()
