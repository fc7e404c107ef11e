"""Small genuine files, cut at every byte and with random bytes changed: opened or refused, and
nothing else.

Seeded, so that a failure comes again. The child process has no torch in it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from gguf_files import F32, Q8_0, Tensor, floats, gguf, value
from marks import thorough
from safetensors.torch import save_file
from work import HANG

HERE = Path(__file__).parent
KINDS = (
    "safetensors",
    "index",
    "pt",
    "pt opened",
    "data.pkl",
    "legacy",
    "legacy opened",
    "metadata",
    "gguf",
    "extra state",
)
# in yardsticks, and MB
COST, MEMORY = 100.0, 300


def genuine(where: Path) -> dict[str, str]:
    """One small file of each kind, as its library writes it. The files of the index lie beside
    it.
    """
    held = {"w": torch.arange(4, dtype=torch.float32), "b": torch.ones(3, dtype=torch.int64)}
    out = {kind: where / kind.replace(" ", "-") / "m.pt" for kind in KINDS}
    for path in out.values():
        path.parent.mkdir()
    save_file(held, out["safetensors"])
    for number, key in enumerate(held, 1):
        save_file(
            {key: held[key]}, out["index"].parent / f"model-0000{number}-of-00002.safetensors"
        )
    out["index"] = out["index"].parent / "model.safetensors.index.json"
    weight_map = {
        key: f"model-0000{number}-of-00002.safetensors" for number, key in enumerate(held, 1)
    }
    out["index"].write_text(json.dumps({"metadata": {"total_size": 40}, "weight_map": weight_map}))
    state = {
        "model": held,
        "epoch": 3,
        "lr": [0.1, None],
        "shape": torch.Size([2]),
        "dtype": torch.float16,
    }
    for kind in ("pt", "pt opened", "legacy", "legacy opened"):
        torch.save(state, out[kind], _use_new_zipfile_serialization=kind.startswith("pt"))
    with zipfile.ZipFile(out["pt"]) as archive:
        out["data.pkl"].write_bytes(archive.read("m/data.pkl"))
    dcp.save({"w": held["w"], "step": 3}, checkpoint_id=out["metadata"].parent, no_dist=True)
    out["metadata"] = out["metadata"].parent / ".metadata"
    # the tensors fill their last blocks, so that no byte of the file is padding
    tensors = {"w": Tensor((32, 2), Q8_0, bytes(68)), "b": Tensor((8,), F32, floats(*range(8)))}
    values = {"k": value("f32", 1e-5), "t.u": value("[str]", ["a", "b"])}
    out["gguf"].write_bytes(gguf(tensors, values))
    out["extra state"].write_bytes(out["metadata"].read_bytes())
    return {kind: str(path) for kind, path in out.items()}


@pytest.fixture(scope="module", params=thorough([500, 10_000]))
def flips(request: pytest.FixtureRequest) -> int:
    """How many mutants of each kind there are."""
    return request.param


@pytest.fixture(scope="module")
def surveys(flips: int, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    where = tmp_path_factory.mktemp("mutants")
    (where / "asked.json").write_text(
        json.dumps({"files": genuine(where), "flips": flips, "seed": 2026})
    )
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (HERE.parents[1], HERE, HERE.parent))),
    }
    command = [sys.executable, str(HERE / "mutants.py"), str(where / "asked.json")]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=HANG, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


# torch says that it saves without a process group
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_cut_at_any_byte_is_refused(surveys: dict[str, Any], kind: str) -> None:
    survey = surveys[kind]["cut"]
    assert not survey["escaped"], survey["escaped"][0]
    assert survey["opened"] == 0
    assert survey["refused"] == surveys[kind]["size"]
    assert survey["dearest"] < COST


@pytest.mark.parametrize("kind", KINDS)
def test_flipped_files_are_opened_or_refused(
    surveys: dict[str, Any], flips: int, kind: str
) -> None:
    survey = surveys[kind]["flipped"]
    assert not survey["escaped"], survey["escaped"][0]
    assert survey["opened"] + survey["refused"] == flips
    assert survey["refused"] > flips // 10
    assert survey["dearest"] < COST


def test_no_mutant_fills_the_memory(surveys: dict[str, Any]) -> None:
    assert surveys["memory"] < MEMORY
