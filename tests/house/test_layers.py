"""Imports run only downwards, and what is heavy is imported only where it may be. Source files are
read, not imported.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "migrate"

FLOORS = {
    "core": 0,
    "results": 1,
    "source": 1,
    "elements": 2, "ops": 2, "codecs": 2, "extra_state": 2, "formats": 2,
    "rules": 3,
    "planning": 4,
    "running": 5,
    "live": 6, "ruletests": 6, "lints": 6,
    "staging": 7, "cli": 7, "api": 7, "authoring": 7, "dcp": 7, "__init__": 7, "__main__": 7,
    "testing": 8,
}  # fmt: skip
# folders of one floor that may use each other: (who, whom)
BESIDE = {
    ("lints", "ruletests"),
    ("ops", "elements"),
    ("codecs", "elements"),
    ("formats", "elements"),
    ("ops", "codecs"),
    ("ops", "extra_state"),
    ("extra_state", "formats"),
    ("cli", "api"),
    ("api", "authoring"),
    ("__main__", "cli"),
    ("__init__", "api"),
}
# the lowest floor that may import each distribution at module level, and the lowest that may import
# it at all
AT_MODULE_LEVEL = {
    "yaml": 1,
    "pydantic": 3,
    "click": 7,
    "rich": 7,
    "jsonschema": 7,
    "torch": 6,
    "numpy": 6,
    "xxhash": 6,
    # of those who name a store by URL alone: never at module level
    "boto3": 9,
    "botocore": 9,
    "fsspec": 9,
    "aiohttp": 9,
    "huggingface_hub": 9,
}
AT_ALL = {
    "yaml": 1,
    "pydantic": 3,
    "click": 7,
    "rich": 7,
    "jsonschema": 3,
    "torch": 2,
    "numpy": 2,
    "xxhash": 2,
    "boto3": 1,
    "botocore": 1,
    "fsspec": 1,
    "aiohttp": 1,
    "huggingface_hub": 1,
}
# planning decides on headers alone: nothing that could read or compute a value, and no format
NEVER = {
    "planning": {"torch", "numpy", "migrate.formats"},
    "lints": {"torch", "numpy", "migrate.formats"},
}
# test tools belong to the kits, the libraries that are oracles to the tests
ONLY_IN_TESTING = {"pytest", "hypothesis", "safetensors", "einops", "transformers"}


class Import(NamedTuple):
    """One import statement: `module` is absolute, `lazy` means inside a function."""

    file: Path
    line: int
    module: str
    lazy: bool

    def __str__(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line}: imports {self.module}"


def floor_name(module: str) -> str:
    """The folder (or top-level module) of `migrate` that an absolute module name lies in."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def imports(file: Path, package: Path = PACKAGE) -> Iterator[Import]:
    """Every import of `file`, those under `if TYPE_CHECKING` left out; `from . import x` counts as
    an import of x.
    """
    here = [package.name, *file.relative_to(package).with_suffix("").parts]

    def walk(node: ast.AST, lazy: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for name in child.names:
                    yield Import(file, child.lineno, name.name, lazy)
            elif isinstance(child, ast.ImportFrom):
                base = here[: -child.level] if child.level else []
                module = ".".join([*base, *(child.module.split(".") if child.module else [])])
                if child.module is None or is_package(module, package):
                    yield from (
                        Import(file, child.lineno, f"{module}.{name.name}", lazy)
                        for name in child.names
                    )
                else:
                    yield Import(file, child.lineno, module, lazy)
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                for other in child.orelse:
                    yield from walk(ast.Module([other], []), lazy)
            elif not isinstance(child, ast.expr):
                function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
                yield from walk(child, lazy or function)

    yield from walk(ast.parse(file.read_text(encoding="utf-8"), str(file)), False)


def is_package(module: str, package: Path) -> bool:
    parts = module.split(".")
    return parts[0] == package.name and package.joinpath(*parts[1:], "__init__.py").exists()


def problems(package: Path = PACKAGE) -> list[str]:
    """Each import that breaks the order of the floors or is heavier than its floor may be."""
    out = []
    for file in sorted(package.rglob("*.py")):
        relative = file.relative_to(package).with_suffix("").parts
        name = relative[0]
        if name not in FLOORS:
            out.append(f"{'/'.join(relative)}: is on no floor")
            continue
        floor = FLOORS[name]
        for found in imports(file, package):
            top = found.module.split(".")[0]
            where = f"{'/'.join(relative)}.py:{found.line}: {name} (floor {floor})"
            if any(
                found.module == n or found.module.startswith(f"{n}.") for n in NEVER.get(name, ())
            ):
                out.append(f"{where} never imports {found.module}")
            if top == package.name:
                other = floor_name(found.module)
                if other not in FLOORS:
                    out.append(f"{where} imports {found.module}, which is not a module")
                elif other != name and FLOORS[other] >= floor and (name, other) not in BESIDE:
                    out.append(f"{where} imports {found.module} (floor {FLOORS[other]})")
            elif top in ONLY_IN_TESTING and name != "testing":
                out.append(f"{where} imports {top}, which only tests may")
            elif floor < (AT_ALL if found.lazy else AT_MODULE_LEVEL).get(top, 0):
                out.append(
                    f"{where} imports {found.module}{'' if found.lazy else ' at module level'}"
                )
    return out


def test_imports_run_only_downwards_and_heavy_ones_stay_where_they_may_be() -> None:
    found = problems()
    assert not found, "\n".join(found)


def test_the_command_line_imports_nothing_heavy_at_module_level() -> None:
    heavy = {"torch", "numpy", "pydantic", "jsonschema", "xxhash"}
    files = [
        *(PACKAGE / "cli").glob("*.py"),
        *(PACKAGE / "api").glob("*.py"),
        PACKAGE / "__init__.py",
        PACKAGE / "__main__.py",
    ]
    found = [
        str(i)
        for f in files
        if f.exists()
        for i in imports(f)
        if i.module.split(".")[0] in heavy and not i.lazy
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("core/a.py", "from ..rules import model", "imports migrate.rules"),
        ("core/a.py", "from .. import __version__", "which is not a module"),
        ("core/a.py", "import yaml", "imports yaml at module level"),
        ("core/a.py", "def f():\n    import torch", "imports torch"),
        ("ops/a.py", "import numpy as np", "imports numpy at module level"),
        ("ops/a.py", "from ..formats import memory", "imports migrate.formats"),
        ("ops/a.py", "if True:\n    from ..running import tiles", "imports migrate.running"),
        ("planning/a.py", "def f():\n    import torch", "never imports torch"),
        (
            "planning/a.py",
            "from ..formats.safetensors import open",
            "never imports migrate.formats",
        ),
        ("running/a.py", "import torch.nn", "imports torch.nn at module level"),
        ("running/a.py", "from .. import live", "imports migrate.live"),
        ("live/a.py", "import safetensors", "only tests may"),
        ("attic/a.py", "", "is on no floor"),
    ],
)
def test_an_import_upwards_is_found(tmp_path: Path, file: str, text: str, said: str) -> None:
    package = tmp_path / "migrate"
    for name in ("core", "rules", "formats", "live", "running", "ops", "planning"):
        (package / name).mkdir(parents=True)
        (package / name / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / file).parent.mkdir(exist_ok=True)
    (package / file).write_text(text)
    assert [p for p in problems(package) if said in p]


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("ops/a.py", "def f():\n    import numpy"),
        ("ops/a.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"),
        ("ops/a.py", "from ..codecs import fp8\nfrom ..core.view import View\nfrom . import stack"),
        ("planning/a.py", "from ..rules.model import Rule"),
        ("testing/a.py", "import pytest, torch\nfrom ..cli import main"),
    ],
)
def test_an_import_downwards_is_let_through(tmp_path: Path, file: str, text: str) -> None:
    package = tmp_path / "migrate"
    (package / file).parent.mkdir(parents=True)
    (package / "core").mkdir(exist_ok=True)
    (package / file).write_text(text)
    assert problems(package) == []
