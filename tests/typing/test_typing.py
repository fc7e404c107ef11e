"""mypy and pyright, on programs that use the installed wheel."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import pytest
from commandline import ROOT

HERE = Path(__file__).parent
WRONG = HERE / "wrong.py"
# the lines of `wrong.py` that are
LINES = {n for n, line in enumerate(WRONG.read_text().splitlines(), 1) if "# wrong: " in line}
pytestmark = pytest.mark.libraries


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter with the wheel, and the other packages of the tests."""
    folder = tmp_path_factory.mktemp("typing")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    quiet = ["-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "wheel", *quiet, "-w", folder, ROOT], check=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    (packages,) = (folder / "venv" / "lib").glob("python3*/site-packages")
    (wheel,) = folder.glob("*.whl")
    subprocess.run([*pip, "install", "-q", "--no-deps", "--target", packages, wheel], check=True)
    assert (packages / "migrate" / "py.typed").exists()
    # after the wheel's, so that the source tree is not what is found
    (packages / "tests.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "venv" / "bin" / "python"


def checked(command: list[str | Path], cwd: Path) -> list[tuple[str, int, str]]:
    """File, line and message of each error that a checker prints."""
    made = subprocess.run(command, capture_output=True, text=True, cwd=cwd)
    found = re.findall(r"(\w+\.py):(\d+)(?::\d+)*(?: -)?:? error: (.*)", made.stdout)
    assert found or made.returncode == 0, made.stdout + made.stderr
    return [(file, int(line), text) for file, line, text in found]


def require(found: list[tuple[str, int, str]]) -> None:
    assert [error for error in found if error[0] != WRONG.name] == []
    assert {line for file, line, _ in found if file == WRONG.name} == LINES


def test_mypy_reads_the_types(python: Path, tmp_path: Path) -> None:
    if find_spec("mypy") is None:
        pytest.skip("mypy is not installed: `make lint` installs it")
    files = [HERE / "public.py", WRONG]
    options = ["--strict", "--no-incremental", "--config-file=", f"--python-executable={python}"]
    require(checked([sys.executable, "-m", "mypy", *options, *files], tmp_path))


def test_pyright_reads_the_types(python: Path, tmp_path: Path) -> None:
    if find_spec("basedpyright") is None:
        pytest.skip("basedpyright is not installed: `make lint` installs it")
    (tmp_path / "pyrightconfig.json").write_text('{"typeCheckingMode": "strict"}')
    for file in (HERE / "public.py", WRONG):
        (tmp_path / file.name).write_text(file.read_text())
    command = [sys.executable, "-m", "basedpyright", "--pythonpath", python, "-p", tmp_path]
    require(checked(command, tmp_path))
