"""Runs PyTorch's own tests of distributed checkpoints with the reader that migrates in place of
`FileSystemReader`:

    python tests/torch_dcp_tests.py [--stock] PATH/test/distributed/checkpoint/test_*.py

`--stock` leaves torch's reader where it is, to compare. The files are those of the release of torch
that is installed; they import `expecttest`, and their processes find no accelerator. Exit status
and output are pytest's.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def swap_reader() -> None:
    """Puts the reader in the place of torch's, in this process."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import filesystem

    from migrate.dcp import MigratingReader

    class Swapped(MigratingReader):
        """A reader of checkpoints as they are, with the arguments of torch's."""

        def __init__(self, path: Any, _extension_registry: Any = None) -> None:
            super().__init__(path, extensions=_extension_registry)

    dcp.FileSystemReader = filesystem.FileSystemReader = Swapped


def main(arguments: list[str]) -> int:
    """Starts pytest; the processes that tests start are told by the environment, too."""
    with tempfile.TemporaryDirectory() as folder:
        start = f"import runpy\nrunpy.run_path({__file__!r})['swap_reader']()\n"
        if "--stock" not in arguments:
            (Path(folder) / "sitecustomize.py").write_text(start)
        files = [argument for argument in arguments if argument != "--stock"]
        path = f"{folder}{os.pathsep}{ROOT}"
        return subprocess.call(
            [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *files],
            env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
