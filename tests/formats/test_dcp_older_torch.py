"""torch 2.6, in an environment of its own that has no migrate, reads the distributed checkpoints
that are written here; and what other releases write is in tests/data/dcp.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import save_by_torch
import torch
from test_dcp_sink import nested

import migrate

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data" / "dcp"
OLDER = ROOT / ".venv-torch26" / "bin" / "python"
READER = Path(__file__).parent / "read_by_torch.py"
# those that torch 2.6 has too
KINDS = ("float64", "float16", "bfloat16", "float8_e4m3fn", "int8", "uint16", "bool", "complex64")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A file of torch.save, and what it becomes when it is cut in several ways."""
    folder = tmp_path_factory.mktemp("made")
    value = nested()
    for dtype in KINDS:
        kind = getattr(torch, dtype)
        data = torch.arange(6 * 4 * kind.itemsize, dtype=torch.uint8)
        value["model"][dtype] = (data % 2 if dtype == "bool" else data).view(kind).reshape(6, 4)
    value["model"] |= {"none": torch.empty(0, 3), "grad": torch.randn(5).requires_grad_()}
    value["tensors in a tuple"] = (torch.arange(3), {"x": torch.ones(2, 2)})
    torch.save(value, folder / "whole.pt")
    ways = ({}, {"chunks": 1}, {"chunks": 4}, {"max_shard_size": 64})
    for number, options in enumerate(ways):
        migrate.apply(folder / "whole.pt", folder / f"{number}", output_format="dcp", **options)
    return [folder / "whole.pt", *(folder / f"{number}" for number in range(len(ways)))]


def read_by(python: str | Path, made: list[Path]) -> tuple[str, int]:
    """The release that read all of it, and how many tensors it compared."""
    child = subprocess.run(
        [python, "-I", READER, *made], capture_output=True, text=True, check=False
    )
    assert child.returncode == 0, child.stderr
    release, count = child.stdout.split()
    return release, int(count)


def test_this_release_reads_them(made: list[Path]) -> None:
    release, count = read_by(sys.executable, made)
    assert (release, count > 100) == (torch.__version__, True)


@pytest.mark.libraries
def test_torch_2_6_reads_them(made: list[Path]) -> None:
    if not OLDER.exists():
        pytest.skip("torch 2.6 is not there: `make .venv-torch26/.ready` installs it, 5 GB")
    release, count = read_by(OLDER, made)
    assert (release.startswith("2.6."), count > 100) == (True, True)


def test_what_this_release_writes_is_recorded(tmp_path: Path) -> None:
    save_by_torch.main(tmp_path / "c")
    rows = re.findall(r"\| `(torch-[\d.]+)` .*\| ([\d., ]+) \|", (DATA / "README.md").read_text())
    folders = {release: folder for folder, named in rows for release in named.split(", ")}
    assert set(folders.values()) == {path.name for path in DATA.iterdir() if path.is_dir()}
    # one that is newer than all of them is expected to write as the last
    release = ".".join(torch.__version__.split(".")[:2])
    wanted = DATA / folders.get(release, "torch-2.15") / "__0_0.distcp"
    assert (tmp_path / "c" / "__0_0.distcp").read_bytes() == wanted.read_bytes()
