"""A way back that has to encode again says which tensors it brought back bit for bit."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from commandline import done, run, spawn
from safetensors.torch import load_file, save_file
from work import HANG

FP8 = torch.float8_e4m3fn
RULE = """
id: t/b/decode
title: t
lineage: t
edge: [a, b]
params:
  fmt: {type: str, optional: true}
keep: ["{k...}.bias"]
rules:
  - name: decode
    from: {weight: "{p...}.weight", scale: "{p...}.scale"}
    to: "{p}.weight"
    via:
      - dequantize:
          {codec: fp8-block, dtype: bfloat16, block: [4, 4], like: deepseek, scale_fmt: $fmt}
"""


def encoded(shape: tuple[int, int], seed: int, *, powers: bool) -> dict[str, torch.Tensor]:
    """What DeepSeek's arithmetic encodes of random numbers, blocks of 4 by 4, in plain torch."""
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / 8
    blocks = numbers.view(shape[0] // 4, 4, shape[1] // 4, 4)
    if powers:
        # a largest code of 224 would be encoded again with half the power
        blocks[:, 0, :, 0] = 1.5
    scale = blocks.abs().amax((1, 3), keepdim=True).clamp(1e-4) / 448
    if powers:
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    codes = (blocks * (1.0 / scale)).to(FP8).view(shape)
    return {"weight": codes, "scale": scale.view(shape[0] // 4, shape[1] // 4)}


def checkpoint(*, powers: bool = False, layers: int = 3) -> dict[str, torch.Tensor]:
    found = {
        f"l.{n}.{part}": tensor
        for n in range(layers)
        for part, tensor in encoded((32, 48), n, powers=powers).items()
    }
    return {**found, "l.0.bias": torch.ones(3)}


@pytest.fixture
def rule(tmp_path: Path) -> Path:
    path = tmp_path / "rule.yaml"
    path.write_text(RULE)
    return path


def folder(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    return path


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def differing(back: dict[str, torch.Tensor], old: dict[str, torch.Tensor]) -> list[str]:
    assert back.keys() == old.keys()
    return sorted(key for key in old if bits(back[key]) != bits(old[key]))


def there_and_back(
    rule: Path, source: Path, new: Path, back: Path, *more: str
) -> tuple[dict[str, Any], str]:
    asked = ("--rules", rule, "--allow", "lossy", *more)
    done("apply", source, "-o", new, *asked, "-q")
    text = run("downgrade", new, "-o", back.with_name("text" + back.name), *asked, "-q")
    return done("downgrade", new, "-o", back, *asked, "--format", "json").json, text.out


def test_codes_return_and_float_scales_do_not(tmp_path: Path, rule: Path) -> None:
    old = checkpoint()
    said, text = there_and_back(
        rule, folder(tmp_path / "old", old), tmp_path / "new", tmp_path / "back"
    )
    wrong = differing(load_file(tmp_path / "back" / "model.safetensors"), old)
    # what the numbers say of this format: all codes return, and no scale
    assert wrong == ["l.0.scale", "l.1.scale", "l.2.scale"]
    assert said["restored"] == {"tensors": 6, "equal": 3, "different": wrong, "known": "each"}
    assert (
        "restored: 3 of 6 tensors made again, bit for bit; not: l.0.scale, l.1.scale, l.2.scale"
        in text
    )


def test_powers_of_two_return_all(tmp_path: Path, rule: Path) -> None:
    old = checkpoint(powers=True)
    said, text = there_and_back(
        rule,
        folder(tmp_path / "old", old),
        tmp_path / "new",
        tmp_path / "back",
        "--set",
        "fmt=ue8m0",
    )
    assert differing(load_file(tmp_path / "back" / "model.safetensors"), old) == []
    assert said["restored"] == {"tensors": 6, "equal": 6, "different": [], "known": "each"}
    assert "restored: all 6 tensors made again, bit for bit" in text


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
@pytest.mark.parametrize("powers", [False, True])
def test_a_single_file_keeps_one_hash_of_all(
    tmp_path: Path, rule: Path, suffix: str, powers: bool
) -> None:
    source = folder(tmp_path / "old", checkpoint(powers=powers))
    said, text = there_and_back(
        rule,
        source,
        tmp_path / ("new" + suffix),
        tmp_path / ("back" + suffix),
        *(("--set", "fmt=ue8m0") if powers else ()),
    )
    equal = 6 if powers else None
    assert said["restored"] == {
        "tensors": 6,
        "equal": equal,
        "different": [],
        "known": "together",
    }
    assert ("restored: all 6" if powers else "which cannot be told") in text
    assert not (tmp_path / "migrate.parts").exists()


@pytest.mark.parametrize("form", ["torch", "dcp"])
def test_folders_of_other_formats_keep_a_hash_of_each(
    tmp_path: Path, rule: Path, form: str
) -> None:
    old = checkpoint()
    said, _ = there_and_back(
        rule,
        folder(tmp_path / "old", old),
        tmp_path / "new",
        tmp_path / "back",
        "--output-format",
        form,
    )
    assert (tmp_path / "new" / "migrate.parts").exists()
    assert said["restored"]["different"] == ["l.0.scale", "l.1.scale", "l.2.scale"]


def test_a_distributed_checkpoint_whose_tensors_are_cut(tmp_path: Path, rule: Path) -> None:
    source = folder(tmp_path / "old", checkpoint())
    cut = ("--output-format", "dcp", "--chunks", "3")
    said, _ = there_and_back(rule, source, tmp_path / "new", tmp_path / "back", *cut)
    assert said["restored"]["equal"] == 3


def test_without_hashes_it_cannot_be_told(tmp_path: Path, rule: Path) -> None:
    source = folder(tmp_path / "old", checkpoint())
    asked = ("--rules", rule, "--allow", "lossy", "-q")
    done("apply", source, "-o", tmp_path / "new", *asked)
    (tmp_path / "new" / "migrate.parts").unlink()
    found = done("downgrade", tmp_path / "new", "-o", tmp_path / "back", *asked).out
    assert "restored: 6 tensors made again; whether bit for bit cannot be told" in found


def test_what_is_edited_meanwhile_is_named(tmp_path: Path, rule: Path) -> None:
    source = folder(tmp_path / "old", checkpoint(powers=True))
    asked = ("--rules", rule, "--allow", "lossy", "--set", "fmt=ue8m0", "-q")
    done("apply", source, "-o", tmp_path / "new", *asked)
    numbers = load_file(tmp_path / "new" / "model.safetensors")
    numbers["l.1.weight"][0, 0] *= 4
    save_file(numbers, tmp_path / "new" / "model.safetensors", {"format": "pt"})
    found = done(
        "downgrade", tmp_path / "new", "-o", tmp_path / "back", *asked, "--format", "json"
    ).json["restored"]
    assert "l.1.weight" in found["different"]
    assert {name.split(".")[1] for name in found["different"]} == {"1"}


def test_hashes_of_an_earlier_run_stay_with_what_is_made_of_its_output(
    tmp_path: Path, rule: Path
) -> None:
    rename = tmp_path / "rename.yaml"
    rename.write_text(
        "id: u/b/rename\ntitle: t\nlineage: u\nedge: [a, b]\nkeep: ['{k...}.bias']\nrules:\n"
        "  - {name: rename, from: 'l.{i:int}.weight', to: 'm.{i}.weight'}\n"
    )
    source = folder(tmp_path / "old", checkpoint())
    lossy = ("--rules", rule, "--allow", "lossy", "-q")
    done("apply", source, "-o", tmp_path / "b", *lossy)
    done("apply", tmp_path / "b", "-o", tmp_path / "c", "--rules", rename, "-q")
    done("downgrade", tmp_path / "c", "-o", tmp_path / "d", "--rules", rename, "-q")
    found = done("downgrade", tmp_path / "d", "-o", tmp_path / "e", *lossy, "--format", "json")
    assert found.json["restored"]["equal"] == 3
    # the run is undone, and nothing is left that could be made again
    assert not (tmp_path / "e" / "migrate.parts").exists()


def test_runs_that_decode_nothing_keep_nothing(tmp_path: Path) -> None:
    narrow = tmp_path / "narrow.yaml"
    narrow.write_text(
        "id: u/b/narrow\ntitle: t\nlineage: u\nedge: [a, b]\nrules:\n"
        "  - name: narrow\n    from: '{k...}'\n    to: '{k}'\n"
        "    via: [{cast: {from: float32, to: bfloat16}}]\n"
    )
    source = folder(tmp_path / "old", {"a": torch.randn(4, 4)})
    asked = ("--rules", narrow, "--allow", "lossy", "-q")
    done("apply", source, "-o", tmp_path / "new", *asked)
    assert sorted(os.listdir(tmp_path / "new")) == ["migrate.history.json", "model.safetensors"]


def test_the_file_of_hashes_is_planned_and_not_carried(tmp_path: Path, rule: Path) -> None:
    source = folder(tmp_path / "old", checkpoint())
    asked = ("--rules", rule, "--allow", "lossy")
    plan = done("plan", source, *asked, "--format", "json").json
    done("apply", source, "-o", tmp_path / "new", *asked, "-q")
    size = (tmp_path / "new" / "migrate.parts").stat().st_size
    assert plan["parts"] == {"tensors": 6, "bytes": size}
    codes = "codes, not scales, of what the same arithmetic encoded"
    assert plan["returns"] == [{"rule": "decode", "codec": "fp8-block", "returns": codes}]
    written = sum(p.stat().st_size for p in (tmp_path / "new").iterdir())
    assert plan["bytes_written"] == written
    back = done("plan", tmp_path / "new", *asked, "--downgrade", "--format", "json").json
    assert back["returns"] == plan["returns"]
    assert back["side_files"] == []
    assert back["left_out"] == []


def test_a_resumed_run_hashes_what_was_written_before(tmp_path: Path, rule: Path) -> None:
    tensors = {
        f"l.{n}.{part}": tensor
        for n in range(3)
        for part, tensor in encoded((2048, 1536), n, powers=True).items()
    }
    source = folder(tmp_path / "old", tensors)
    asked = ("--rules", rule, "--allow", "lossy", "--set", "fmt=ue8m0", "-q")
    done("apply", source, "-o", tmp_path / "whole", *asked)
    killed_after(3, "apply", source, "-o", tmp_path / "new", *asked)
    done("apply", source, "-o", tmp_path / "new", *asked, "--resume")
    whole, new = ((tmp_path / name / "migrate.parts").read_bytes() for name in ("whole", "new"))
    assert whole == new
    killed_after(2, "downgrade", tmp_path / "new", "-o", tmp_path / "back", *asked)
    found = done(
        "downgrade",
        tmp_path / "new",
        "-o",
        tmp_path / "back",
        *asked,
        "--resume",
        "--format",
        "json",
    )
    assert found.json["restored"]["equal"] == 6
    assert differing(load_file(tmp_path / "back" / "model.safetensors"), tensors) == []


def killed_after(tiles: int, *words: object) -> None:
    """A run of the command line that dies when it has claimed so many tiles."""
    import subprocess
    import sys

    from commandline import environment

    main = (
        "import os, sys\n"
        "from migrate.cli import main\n"
        "from migrate.running import publish\n"
        "claim, claims = publish.Partial.claim, []\n"
        "def dying(*arguments):\n"
        "    claim(*arguments)\n"
        "    claims.append(1)\n"
        f"    if len(claims) == {tiles}:\n"
        "        os._exit(9)\n"
        "publish.Partial.claim = dying\n"
        "main.run(sys.argv[1:])\n"
    )
    command = [sys.executable, "-c", main, *map(str, words)]
    assert subprocess.run(command, env=environment(), check=False).returncode == 9


def launch(*words: object) -> str:
    """What rank 0 of two processes of one launch answers."""
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    children = []
    before = dict(os.environ)
    try:
        for n in range(2):
            os.environ.update(place, RANK=str(n), LOCAL_RANK=str(n))
            children.append(spawn(*words))
    finally:
        os.environ.clear()
        os.environ.update(before)
    found = [child.communicate(timeout=HANG) for child in children]
    assert [child.returncode for child in children] == [0, 0], found
    return found[0][0]


@pytest.mark.ranks
def test_several_processes_find_what_one_does(tmp_path: Path, rule: Path) -> None:
    source = folder(tmp_path / "old", checkpoint(layers=6))
    asked = ["--rules", rule, "--allow", "lossy", "--max-shard-size", "6kB"]
    done("apply", source, "-o", tmp_path / "one", *asked, "-q")
    launch("apply", source, "-o", tmp_path / "two", *asked, "-q")
    one, two = ((tmp_path / name / "migrate.parts").read_bytes() for name in ("one", "two"))
    assert one == two
    said = launch(
        "downgrade", tmp_path / "two", "-o", tmp_path / "back", *asked, "--format", "json"
    )
    assert json.loads(said)["restored"]["equal"] == 6


def test_what_was_dropped_is_said_to_stay_away(tmp_path: Path, rule: Path) -> None:
    rule.write_text(
        RULE
        + "  - {name: inputs, from: '{p...}.input_scale', inverse: skip, via: [{drop: {why: a}}]}\n"
    )
    old = checkpoint(powers=True)
    source = folder(tmp_path / "old", {**old, "l.0.input_scale": torch.ones(1)})
    asked = ("--rules", rule, "--allow", "lossy", "--allow", "drop", "--set", "fmt=ue8m0", "-q")
    done("apply", source, "-o", tmp_path / "new", *asked)
    planned = done("plan", tmp_path / "new", "--downgrade", *asked[:-1]).out
    said = done("downgrade", tmp_path / "new", "-o", tmp_path / "back", *asked)
    assert differing(load_file(tmp_path / "back" / "model.safetensors"), old) == []
    assert "restored: all 6 tensors made again, bit for bit" in said.out
    for text in (planned, said.out):
        assert "what it dropped returns only with a folder that --undo DIR kept" in text
