"""The packs over the files in which their checkpoints are really released: `.pth` of Meta's ranks,
Megatron's `model_optim_rng.pt`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_layout_packs import (
    bits,
    convert_llama_weights_to_hf,
    interleaved,
    llama,
    params_json,
    random,
)

from migrate import api
from migrate.core.errors import CheckpointError


def write(files: dict[str, Any], folder: Path, **side: object) -> Path:
    for name, value in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        torch.save(value, folder / name)
    for name, value in side.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


def held(folder: Path) -> dict[str, Any]:
    files = sorted(p for ending in ("pth", "pt", "bin") for p in folder.rglob(f"*.{ending}"))
    return {str(p.relative_to(folder)): torch.load(p, weights_only=True) for p in files}


@pytest.mark.parametrize("written", ["torch", "safetensors"])
@pytest.mark.parametrize(("ranks", "generation", "kv_heads"), [(2, 3, 2), (1, 3, 2), (4, 1, None)])
def test_metas_pth_files_become_what_the_released_script_makes_of_them(
    tmp_path: Path, ranks: int, generation: int, kv_heads: int | None, written: str
) -> None:
    files = llama(ranks, generation, kv_heads)
    source = write(
        {name.replace("safetensors", "pth"): tensors for name, tensors in files.items()},
        tmp_path / "in",
        params=params_json(kv_heads),
    )
    out = tmp_path / "out"
    published = api.apply(
        source,
        out,
        to="meta-llama@hf",
        params={"generation": generation},
        output_format=written,
        fsync=False,
    )
    assert published.to_json()["downgrade"]["exact"]
    assert api.verify(out, source=source).equal
    made = (
        load_file(out / "model.safetensors")
        if written == "safetensors"
        else torch.load(out / "pytorch_model.bin", weights_only=True)
    )
    expected = convert_llama_weights_to_hf(files, generation, kv_heads)
    assert {k: bits(t) for k, t in made.items()} == {k: bits(t) for k, t in expected.items()}
    api.downgrade(out, tmp_path / "back", output_format="torch", fsync=False)
    back = held(tmp_path / "back")
    assert list(back) == list(held(source))
    for name, tensors in held(source).items():
        assert {k: bits(t) for k, t in back[name].items()} == {
            k: bits(t) for k, t in tensors.items()
        }
    assert api.diff(source, tmp_path / "back").equal


@pytest.mark.parametrize("ranks", [1, 2])
def test_megatrons_checkpoints_keep_what_stands_beside_the_model(
    tmp_path: Path, ranks: int
) -> None:
    heads, groups, width = 8, 4, 2
    hidden = heads * width
    q, k, v = (
        random(count * width, hidden, seed=w)
        for w, count in (("q", heads), ("k", groups), ("v", groups))
    )
    whole = interleaved(q, k, v, heads, groups, width)
    files = {}
    for rank, part in enumerate(whole.chunk(ranks, 0)):
        model = {
            "decoder.layers.0.self_attention.linear_qkv.weight": part,
            "decoder.layers.0.mlp.weight": random(3, seed=f"mlp{rank}"),
        }
        rng = [
            {
                "random_rng_state": (3, (1, 2, 3), None),
                "torch_rng_state": torch.arange(9 + rank, dtype=torch.uint8),
            }
        ]
        files[f"mp_rank_{rank:02}/model_optim_rng.pt"] = {
            "model": model,
            "iteration": 7,
            "checkpoint_version": 3.0,
            "rng_state": rng,
        }
    config = {"num_attention_heads": heads, "num_key_value_heads": groups, "head_dim": width}
    source = write(files, tmp_path / "in", config=config)
    published = api.apply(source, tmp_path / "out", to="megatron-gqa-qkv@hf", fsync=False)
    assert published.to_json()["downgrade"]["exact"]
    assert api.verify(tmp_path / "out", source=source).equal
    made = held(tmp_path / "out")
    # a single rank is a checkpoint like others
    assert list(made) == (list(files) if ranks > 1 else ["pytorch_model.bin"])
    first = next(iter(made.values()))
    assert bits(first["model"]["model.layers.0.self_attn.k_proj.weight"]) == bits(k)
    for rank, (name, one) in enumerate(made.items()):
        assert one["iteration"] == 7
        assert one["checkpoint_version"] == 3.0
        assert one["rng_state"][0]["random_rng_state"] == (3, (1, 2, 3), None)
        assert torch.equal(
            one["rng_state"][0]["torch_rng_state"], torch.arange(9 + rank, dtype=torch.uint8)
        ), name
    api.downgrade(tmp_path / "out", tmp_path / "back", fsync=False)
    assert api.diff(source, tmp_path / "back").equal
    api.apply(source, tmp_path / "st", output_format="safetensors", fsync=False)
    assert api.diff(source, tmp_path / "st").equal


def test_an_argument_that_is_no_plain_value_goes_with_permission(tmp_path: Path) -> None:
    import argparse
    from fractions import Fraction

    value = {
        "model": {"w": torch.ones(2)},
        "args": argparse.Namespace(hidden_size=4, dropout=Fraction(1, 10)),
        "iteration": 1,
    }
    source = write({"mp_rank_00/model_optim_rng.pt": value}, tmp_path / "in")
    with pytest.raises(CheckpointError) as caught:
        api.apply(source, tmp_path / "out", output_format="safetensors")
    assert [d.code for d in caught.value.diagnostics] == ["M935"]
    answer = api.apply(source, tmp_path / "out", output_format="safetensors", allow=["opaque"])
    assert any("args" in note for note in answer.to_json()["notes"])


def beside(ranks: int, **more: object) -> dict[str, dict[str, object]]:
    return {
        f"mp_rank_0{r}/model_optim_rng.pt": {
            "model": {"w": torch.ones(1), "x": torch.ones(2) * r},
            "rng": [torch.ones(2) + r],
            **more,
        }
        for r in range(ranks)
    }


def joining(folder: Path) -> Path:
    """A rule file that joins all ranks."""
    rule = folder / "r.yaml"
    rule.write_text(
        'id: d/2/x\ntitle: x\nlineage: d\nedge: ["1", "2"]\nrules:\n'
        '  - {name: w, from: "w@{r:int}", to: w, via: [{same: {over: r}}]}\n'
        '  - {name: x, from: "x@{r:int}", to: x, via: [{concat: {over: r, dim: 0}}]}\n'
    )
    return rule


def test_tensors_outside_of_the_model_of_a_rank_that_goes_are_kept_by_part(tmp_path: Path) -> None:
    source = write(beside(2), tmp_path / "in")
    api.apply(source, tmp_path / "out", rules=[joining(tmp_path)])
    (made,) = held(tmp_path / "out").values()
    assert torch.equal(made["model"]["x"], torch.tensor([0.0, 0, 1, 1]))
    assert torch.equal(made["rng"][0], torch.ones(2))
    assert list(made["parts"]) == ["mp_rank_00", "mp_rank_01"]
    assert torch.equal(made["parts"]["mp_rank_01"]["rng"][0], torch.ones(2) + 1)


def test_a_value_that_is_called_as_what_is_kept_by_part_is_not_replaced(tmp_path: Path) -> None:
    source = write(beside(2, parts=7), tmp_path / "in")
    with pytest.raises(CheckpointError) as caught:
        api.apply(source, tmp_path / "out", rules=[joining(tmp_path)])
    assert [d.code for d in caught.value.diagnostics] == ["M916"]
    api.apply(source, tmp_path / "out", rules=[joining(tmp_path)], allow=["drop"])
    (made,) = held(tmp_path / "out").values()
    assert made["parts"] == 7
