"""Checkpoints that transformers stored with bitsandbytes, decoded by the lineage `bnb`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from commandline import done, run
from genuine import checkpoint, digests

ASKED = ("--to", "bnb@bf16", "--allow", "lossy")
NAMES = ("bnb-nf4", "bnb-int8")


@pytest.mark.parametrize("name", NAMES)
def test_what_is_decoded_is_what_bitsandbytes_decodes(name: str, tmp_path: Path) -> None:
    genuine, out = checkpoint(name), tmp_path / "out"
    done("apply", genuine.folder, "-o", out, *ASKED)
    assert digests(out) == genuine.tensors
    before, after = (json.loads((f / "config.json").read_text()) for f in (genuine.folder, out))
    del before["quantization_config"]
    assert after == before
    assert done("verify", out, "--source", genuine.folder, "--format", "json").json["equal"] is True


@pytest.mark.parametrize("name", NAMES)
def test_there_is_no_way_back(name: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done("apply", checkpoint(name).folder, "-o", out, *ASKED)
    failed = run("downgrade", out, "-o", tmp_path / "back")
    assert failed.exit == 3
    assert "M405" in failed.err
    assert "is only decoded, nothing encodes it" in failed.err
    assert not (tmp_path / "back").exists()


def test_a_table_that_the_configuration_does_not_name_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    shutil.copytree(checkpoint("bnb-nf4").folder, folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["bnb_4bit_quant_type"] = "fp4"
    (folder / "config.json").write_text(json.dumps(config))
    failed = run("apply", folder, "-o", tmp_path / "out", *ASKED)
    assert failed.exit == 3
    assert "quant_state.bitsandbytes__fp4" in failed.err
    assert not (tmp_path / "out").exists()
