"""The tiny runs that megatron-core itself wrote (tests/genuine/make_megatron.py), unpacked when a
test asks for the first of a family.
"""

from __future__ import annotations

import atexit
import hashlib
import shutil
import tarfile
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

ARCHIVES = Path(__file__).resolve().parent / "data" / "megatron"
# tensor, pipeline, virtual pipeline and expert parallel size of each grid; `singleton`: halves of
# gated projections as entries of their own, `layers`: layers and not an axis of them, `optimizer`:
# with the state of an optimizer, `grouped`: experts in GroupedMLP, `mixed`: a layer without experts
GRIDS = {
    "1": (1, 1, 1, 1), "tp2": (2, 1, 1, 1), "pp2": (1, 2, 1, 1), "tp2-pp2": (2, 2, 1, 1),
    "pp2-vpp2": (1, 2, 2, 1), "ep2": (1, 1, 1, 2), "pp2-uneven": (1, 2, 1, 1),
    "tp2-ep2": (2, 1, 1, 2), "pp2-ep2": (1, 2, 1, 2), "tp2-singleton": (2, 1, 1, 1),
    "ep2-singleton": (1, 1, 1, 2), "tp4": (4, 1, 1, 1), "1-layers": (1, 1, 1, 1),
    "1-optimizer": (1, 1, 1, 1),
    "pp2-layout": (1, 2, 1, 1), "1-grouped": (1, 1, 1, 1), "tp2-grouped": (2, 1, 1, 1),
    "ep2-grouped": (1, 1, 1, 2), "1-mixed": (1, 1, 1, 1),
}  # fmt: skip

_OF_ALL = ("1", "tp2", "pp2", "tp2-pp2", "pp2-vpp2")
# the grids of each family
RUNS = {
    "llama": (*_OF_ALL, "pp2-uneven", "tp2-singleton", "1-layers", "1-optimizer"),
    "qwen2": _OF_ALL,
    "qwen3": _OF_ALL,
    "mixtral": (*_OF_ALL, "ep2", "tp2-ep2", "pp2-ep2", "ep2-singleton", "1-layers"),
    "qwen3-moe": (*_OF_ALL, "ep2"),
}
# grids that are converted in a way of their own, or not at all
OTHERS = {
    "llama": ("pp2-layout",),
    "mixtral": ("1-grouped", "tp2-grouped", "ep2-grouped", "1-mixed"),
}
FORMATS = ("legacy", "torch_dist")


@cache
def family(name: str) -> Path:
    """The folder of a family: `hf`, and `FORMAT-GRID` for each run. It is shared: copy what you
    change.
    """
    there = Path(tempfile.mkdtemp(prefix=f"megatron-{name}-"))
    atexit.register(shutil.rmtree, there, ignore_errors=True)
    with tarfile.open(ARCHIVES / f"{name}.tar.xz") as archive:
        archive.extractall(there, filter="data")
    return there


def runs() -> list[tuple[str, str]]:
    """(family, grid) of all runs, which are there in each of the formats."""
    return [(name, grid) for name, grids in RUNS.items() for grid in grids]


def run_folder(name: str, format: str, grid: str) -> Path:
    """The run folder of a family."""
    return family(name) / f"{format}-{grid}"


def checkpoint(name: str, format: str, grid: str) -> Path:
    """The folder of the one iteration of a run."""
    return run_folder(name, format, grid) / "iter_0000010"


def digest(model: dict[str, Any]) -> str:
    """Of names, shapes and bytes, in the order of the names."""
    found = hashlib.sha256()
    for name in sorted(model):
        tensor = model[name]
        found.update(f"{name} {'' if tensor is None else list(tensor.shape)}\n".encode())
        found.update(b"" if tensor is None else tensor.contiguous().numpy().tobytes())
    return found.hexdigest()
