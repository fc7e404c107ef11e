"""Run as a process of its own: reads hostile files the usual way, and says which of them did
something.

The control of the whole experiment. A file that does nothing here would prove nothing when it does
nothing to us. Arguments: a JSON file of [[name, kind, path, canary], …]; standard output: {name:
[canary before, canary after]}.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any


def extra_state(path: Path) -> None:
    """As frameworks read extra state: a pickle, and if that gives a file, the torch.save archive in
    it.
    """
    import torch

    made = pickle.loads(path.read_bytes())
    if isinstance(made, io.BytesIO):
        torch.load(made, weights_only=False)


def torch_file(path: Path) -> None:
    import torch

    torch.load(path, weights_only=False)


def checkpoint_folder(path: Path) -> None:
    import torch
    import torch.distributed.checkpoint as dcp

    # Megatron begins with its own values
    if (path / "common.pt").exists():
        torch_file(path / "common.pt")
    dcp.load({"w": torch.zeros(4), "step": [0]}, checkpoint_id=path, no_dist=True)


def rule_file(path: Path) -> None:
    import yaml

    yaml.unsafe_load(path.read_text())


READERS: dict[str, Callable[[Path], None]] = {
    "extra state": extra_state,
    "pt": torch_file,
    "legacy": torch_file,
    "dcp": checkpoint_folder,
    "rules": rule_file,
}


def main(jobs: list[list[str]]) -> dict[str, Any]:
    out = {}
    for name, kind, path, canary in jobs:
        os.environ["ATTACK_CANARY"] = canary
        sys.modules.pop("attack_touches_on_import", None)
        before = os.path.exists(canary)
        try:
            READERS[kind](Path(path))
        except BaseException as error:  # noqa: BLE001 - most of them fail after they have done it
            problem = f"{type(error).__name__}: {error}"[:200]
        else:
            problem = ""
        out[name] = [before, os.path.exists(canary), problem]
    return out


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print("\n" + json.dumps(main(json.loads(Path(sys.argv[1]).read_text()))))
