"""Whether two folders hold the same weights, bit for bit: two runs in Megatron's legacy format,
part by part, or two folders of transformers.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from data_megatron import WEIGHTS, enums
from safetensors.torch import load_file


def parts(folder: Path) -> dict[str, Any]:
    """The tensors of each part by its name, or of all files of transformers under one."""
    found = {
        file.parent.name: torch.load(file, weights_only=False, mmap=True)["model"]
        for file in folder.rglob(WEIGHTS)
    }
    if not found:
        found[""] = {}
        for file in folder.glob("model*.safetensors"):
            found[""] |= load_file(file)
    return {
        called: {key: tensor for key, tensor in held.items() if tensor is not None}
        for called, held in found.items()
    }


def main() -> None:
    enums()
    one, other = (parts(Path(folder)) for folder in sys.argv[1:3])
    if one.keys() != other.keys():
        sys.exit(f"parts {sorted(one)} and {sorted(other)}")
    for called, held in one.items():
        if list(held) != list(other[called]) and called:
            sys.exit(f"{called}: other keys, or in another order")
        wrong = [key for key in held if not torch.equal(held[key], other[called][key])]
        if wrong or held.keys() != other[called].keys():
            sys.exit(f"{called}: {len(wrong)} tensors differ, {wrong[:3]}")
    print(f"{sum(map(len, one.values()))} tensors in {len(one)} parts are the same")


if __name__ == "__main__":
    main()
