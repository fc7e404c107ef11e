"""`pytest --light`, by `make check`: the tests that need neither torch nor another process.

A file that imports torch, or what imports it or starts processes, is left out as a whole, wherever
in the file the import stands. In the files that remain torch cannot be imported and no process be
started; the few tests that need either all the same have the mark `heavy` and are left out too.
"""

from __future__ import annotations

import ast
import functools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

TESTS = Path(__file__).resolve().parent
HEAVY = "heavy"
LIBRARIES = {
    "diffusers", "einops", "multiprocessing", "peft", "pytorch_lightning", "safetensors",
    "subprocess", "torch", "torchao", "transformers",
}  # fmt: skip
# of the helpers that most tests import, the functions that start a process
STARTS = {"commandline": {"shell", "spawn"}}
# the files that hold this, and what they import to hold it
OWN = {"light", "conftest"}


@functools.cache
def helpers() -> dict[str, Path]:
    return {file.stem: file for file in TESTS.rglob("*.py") if file.stem not in OWN}


def nodes(text: str) -> Iterator[ast.AST]:
    """All nodes of a source; without its expressions if none of them is of interest."""
    skips = "importorskip" in text
    waiting: list[ast.AST] = [ast.parse(text)]
    while waiting:
        node = waiting.pop()
        yield node
        # most of a source is expressions, and no statement stands in one
        waiting += (n for n in ast.iter_child_nodes(node) if skips or not isinstance(n, ast.expr))


@functools.cache
def imported(file: Path) -> tuple[bool, frozenset[Path]]:
    """Whether the file itself imports a library or starts a process, and the helpers it imports."""
    heavy, others = False, set()
    for node in nodes(file.read_text(encoding="utf-8")):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name.split(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            home = node.module.split(".")[0]
            if home in STARTS:
                heavy |= bool(STARTS[home] & {alias.name for alias in node.names})
            else:
                names = [home]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.importorskip":
            names = [ast.literal_eval(node.args[0])]
        heavy |= not LIBRARIES.isdisjoint(names)
        others |= {helpers()[name] for name in names if name in helpers()}
    return heavy, frozenset(others)


def is_heavy(file: Path) -> bool:
    """Whether the file or a helper that it imports is heavy."""
    seen, waiting = {file}, [file]
    while waiting:
        heavy, others = imported(waiting.pop())
        if heavy:
            return True
        waiting += others - seen
        seen |= others
    return False


class NeedsMore(Exception):
    """A test that is light by its file imports torch or starts a process."""


def refuse(*given: Any, **named: Any) -> NoReturn:
    raise NeedsMore(f"torch or another process in a light test: mark it `{HEAVY}`")


class NoTorch:
    """Found before any other finder."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "torch":
            refuse()


def forbid() -> None:
    """For the life of this process: no torch, no child."""
    sys.meta_path.insert(0, NoTorch())  # type: ignore[arg-type]
    subprocess.Popen.__init__ = refuse  # type: ignore[method-assign]
    os.fork = refuse
