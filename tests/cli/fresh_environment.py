"""An environment of its own into which pip has put migrate's wheel, for what must be installed in
earnest; what migrate needs it borrows, because that takes hundreds of megabytes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import click
import pytest
from commandline import ROOT, Result


class Environment:
    def __init__(self, folder: Path) -> None:
        """A new environment in the folder. Skips where hatchling is not there, which builds."""
        self._build = pytest.importorskip(
            "hatchling.builders.wheel", reason="hatchling builds the wheels"
        )
        self.folder = folder / "env"
        venv.create(self.folder, with_pip=False, symlinks=True)
        self.wheels = folder / "dist"
        # the same release may be there already, as what is borrowed
        assert self.install(self.wheel(ROOT)).exit == 0
        (self.site,) = self.folder.glob("lib/python*/site-packages")
        (self.site / "borrowed.pth").write_text(f"{Path(click.__file__).parents[1]}\n")

    def wheel(self, project: Path) -> Path:
        """The wheel of the project in a folder."""
        builder: Any = self._build.WheelBuilder(str(project))
        return Path(next(builder.build(directory=str(self.wheels), versions=["standard"])))

    def install(self, *words: object, cwd: Path | None = None) -> Result:
        """`pip install …` without an index; what is borrowed is there."""
        pip = ["-m", "pip", "--disable-pip-version-check", "--python", self.folder / "bin/python"]
        offline = ["--no-deps", "--no-index", "--no-build-isolation", "--no-compile"]
        return self._run(sys.executable, *pip, "install", "-qq", *offline, *words, cwd=cwd)

    def run(self, program: str, *words: object, cwd: Path | None = None) -> Result:
        """A program of the environment, `python` or what was installed."""
        return self._run(self.folder / "bin" / program, *words, cwd=cwd)

    def _run(self, *command: object, cwd: Path | None) -> Result:
        outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        child = subprocess.run(
            [*map(str, command)], cwd=cwd, env=outside, capture_output=True, text=True
        )
        return Result(child.returncode, child.stdout, child.stderr)
