"""One load into a live module, in a process of its own:
`live_load.py migrate|torch OLD NEW TINY-OLD TINY-NEW [--memory]`.

The module has the tensors of NEW, already touched, as a module that was initialised has. `migrate`
loads OLD into it, `torch` loads NEW, file by file. Prints the seconds of the load alone, the best
of three, what the first load in a process takes more, and with `--memory` the most private bytes
that it took beyond the module, sampled.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from process import INTERVAL, private
from safetensors.torch import load_file

import migrate

DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32}


def headers(folder: Path) -> dict[str, tuple[Any, Any]]:
    """Key -> (shape, dtype) of every tensor of a checkpoint."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            head = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        found |= {
            key: (entry["shape"], DTYPES[entry["dtype"]])
            for key, entry in head.items()
            if key != "__metadata__"
        }
    return found


def module_of(tensors: dict[str, tuple[Any, Any]]) -> torch.nn.Module:
    """A module with a parameter for each of these (shape, dtype), by name."""
    root = torch.nn.Module()
    for key, (shape, dtype) in tensors.items():
        *path, last = key.split(".")
        owner = root
        for name in path:
            if name not in owner._modules:
                owner.add_module(name, torch.nn.Module())
            owner = owner._modules[name]
        owner.register_parameter(
            last, torch.nn.Parameter(torch.empty(shape, dtype=dtype).fill_(1), requires_grad=False)
        )
    return root


def load(how: str, model: torch.nn.Module, old: Path, new: Path) -> float:
    """Seconds."""
    start = time.perf_counter()
    if how == "migrate":
        migrate.load(model, old, "hf-mixtral@v5")
    else:
        state = {}
        for path in sorted(new.glob("*.safetensors")):
            state |= load_file(path)
        model.load_state_dict(state)
    return time.perf_counter() - start


def main() -> None:
    how, old, new, tiny_old, tiny_new = sys.argv[1], *map(Path, sys.argv[2:6])
    # what a process does once, at its first load, does not grow with the bytes
    tiny = module_of(headers(tiny_new))
    started, warm = (load(how, tiny, tiny_old, tiny_new) for _ in range(2))
    model = module_of(headers(new))
    before = peak = private(os.getpid())
    finished = threading.Event()

    def sample() -> None:
        nonlocal peak
        while not finished.wait(INTERVAL):
            peak = max(peak, private(os.getpid()))

    if "--memory" in sys.argv:
        threading.Thread(target=sample, daemon=True).start()
    # the best of three: what else the machine does is no part of it
    seconds = min(load(how, model, old, new) for _ in range(3))
    finished.set()
    largest = max(p.nbytes for p in model.parameters())
    print(
        json.dumps(
            {
                "seconds": seconds,
                "first": started - warm,
                "private": peak - before,
                "largest": largest,
            }
        )
    )


if __name__ == "__main__":
    main()
