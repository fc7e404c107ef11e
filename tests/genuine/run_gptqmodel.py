"""What GPTQModel's `dequantize_model` makes of the folders of tests/data/genuine.

    python tests/genuine/run_gptqmodel.py FOLDER

writes tests/data/genuine/gptqmodel.json. FOLDER is the unpacked sdist of GPTQModel, whose own
requirements are those of inference; this module of it needs logbar, device-smi, tokenicer,
threadpoolctl, pypcre, defuser and dill, all without their requirements, in the environment of
`make genuine`, and a C++ compiler.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import torch

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "cli"), str(TESTS / "genuine")]

from genuine import FOLDER, checkpoint, digests, names  # noqa: E402


def without_init(name: str, folder: Path) -> None:
    """Makes a package importable without what its __init__ imports."""
    sys.modules[name] = ModuleType(name)
    sys.modules[name].__path__ = [str(folder)]


def result(name: str) -> dict[str, object]:
    """What it says, or how its tensors compare with those of the library that wrote the folder."""
    from gptqmodel.utils.model_dequant import dequantize_model

    one = checkpoint(name)
    half = any(text.startswith("F16") for text in one.tensors.values())
    dtype = torch.float16 if half else torch.bfloat16
    with tempfile.TemporaryDirectory() as there:
        out = Path(there) / "out"
        try:
            dequantize_model(one.folder, out, target_dtype=dtype)
        except (KeyError, ValueError, RuntimeError, FileNotFoundError) as error:
            return {"refused": str(error.args[0])}
        made = digests(out)
    return {
        "same": sum(made.get(key) == said for key, said in one.tensors.items()),
        "different": {
            key: made[key] for key, said in one.tensors.items() if made.get(key, said) != said
        },
        "missing": sorted(one.tensors.keys() - made.keys()),
        "left": sorted(made.keys() - one.tensors.keys()),
    }


def main(folder: Path) -> None:
    for package in ("gptqmodel", "gptqmodel.quantization", "gptqmodel.nn_modules"):
        without_init(package, folder.joinpath(*package.split(".")))
    (version,) = re.findall(r"^Version: (.+)$", (folder / "PKG-INFO").read_text(), re.MULTILINE)
    said = {"version": version, "results": {name: result(name) for name in names()}}
    (FOLDER / "gptqmodel.json").write_text(json.dumps(said, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
