"""The folder of a pack that can be published: its rules inside a package, and what belongs around.

The package holds data alone and is never imported. What checks the rules stands in the folder's CI
and in its hooks, as `docs/how-to/ci.md` explains them.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..core.errors import fail, printable
from ..source.registry import canonical
from .relations import RuleDraft
from .writing import FileHead, MadeFile

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
# what the names of packs end in, and those of lineages do not
_ENDINGS = re.compile(r"-(?:rules|rulepack|pack|layouts|migrations)$")


@dataclass(frozen=True, slots=True)
class PackFolder:
    """The folder of a distribution that is called `name`; `package` holds its rules."""

    folder: Path
    name: str
    package: str

    @property
    def rules(self) -> Path:
        """The folder of its lineages."""
        return self.folder / self.package / "rules"

    @property
    def example(self) -> str:
        """LINEAGE/TO/SLUG of the rule file that shows how one looks."""
        return f"{_ENDINGS.sub('', canonical(self.name)) or 'example'}/v2/fuse-gate-up"

    def files(self, lineage: str, goal: str) -> dict[Path, str]:
        """The text of each file around the rules, of which the first lineage leads to `goal`."""
        words = {
            "name": self.name,
            "package": self.package,
            "lineage": lineage,
            "goal": goal,
            "rules": f"{self.package}/rules",
        }

        def filled(text: str) -> str:
            return re.sub(f"<({'|'.join(words)})>", lambda found: words[found[1]], text)

        return {self.folder / filled(path): filled(text) for path, text in _FILES.items()}


def pack_folder(place: str) -> PackFolder:
    """The pack whose folder is `place`; M115 where its last part cannot name a distribution."""
    folder = Path(place)
    name = folder.resolve().name
    package = canonical(name).replace("-", "_")
    if not _NAME.fullmatch(name) or not package.isidentifier() or keyword.iskeyword(package):
        fail(
            "M115",
            f"`{printable(name, 100)}` cannot be the name of a distribution and its package",
            help="such as acme-rules: letters, digits, `-`, `_` and dots; a letter comes first",
        )
    return PackFolder(folder, name, package)


def example(head: FileHead) -> MadeFile:
    """A rule file that holds: its rule is to be replaced, its form to be kept."""
    drafts = [
        RuleDraft("", "{p...}.{m:down_proj|norm}.weight", keep=True),
        RuleDraft(
            "gate-up",
            "{p...}.{w:gate|up}_proj.weight",
            "{p}.gate_up_proj.weight",
            ({"concat": {"over": "w", "dim": 0}},),
        ),
    ]
    return MadeFile.of(drafts, _TESTS, replace(head, comments=(_NOTE,)))


def example_layouts(text: str) -> str:
    """The `layouts.yaml` of the example: that of a new lineage, whose layouts are recognised."""
    signs = iter(_SIGNS)
    lines = [
        f"    detect: {next(signs)}" if line.lstrip().startswith("note: ") else line
        for line in text.splitlines()
        if not line.lstrip().startswith("# detect")
    ]
    return "\n".join(lines) + "\n"


_NOTE = (
    "an example: write your own keys, rules and tests in its place, and rename the file and its id"
)
_SIGNS = (
    '{present: "{p...}.gate_proj.weight"}',
    '{present: "{p...}.gate_up_proj.weight", absent: "{p...}.gate_proj.weight"}',
)
_TESTS: list[Mapping[str, Any]] = [
    {
        "name": "gate above up",
        "given": {
            "l.gate_proj.weight": {"values": [[1, 2], [3, 4]]},
            "l.up_proj.weight": {"values": [[5, 6], [7, 8]]},
            "l.norm.weight": {"values": [9, 10]},
        },
        "expect": {
            "l.gate_up_proj.weight": {"values": [[1, 2], [3, 4], [5, 6], [7, 8]]},
            "l.norm.weight": {"values": [9, 10]},
        },
    }
]

_FILES = {
    "pyproject.toml": """\
[build-system]
requires = ["hatchling>=1.25"]
build-backend = "hatchling.build"

[project]
name = "<name>"
version = "0.1.0"
description = "Layouts of checkpoints, for migrate"
readme = "README.md"
requires-python = ">=3.10"
dependencies = ["ckpt-migrate>=0.1"]

# the package and, behind the colon, the folder inside of it; it is found without an import
[project.entry-points."migrate.rulepacks"]
"<name>" = "<package>:rules"

[tool.hatch.build.targets.wheel]
packages = ["<package>"]

[tool.pytest.ini_options]
testpaths = ["<rules>", "tests"]
""",
    "README.md": """\
# <name>

Rules for `migrate` (on PyPI: `ckpt-migrate`) that bring checkpoints from one layout to another.

    pip install <name>
    migrate plan CHECKPOINT --to <lineage>@<goal>
    migrate apply CHECKPOINT -o NEW --to <lineage>@<goal>

## Working on it

The rules are in `<rules>`, a folder for each lineage.

    migrate schema -o schemas   # for completion in editors
    migrate new <lineage>/<goal>/another --rules <rules>

    pip install -e . pytest
    migrate lint <rules>
    pytest

Before a release, seal what the rules mean and commit the lock:

    migrate seal --rules <rules>

From then on a sealed file cannot change unnoticed; a change gets a file of its own.
""",
    ".gitignore": """\
/dist/
/schemas/
__pycache__/
""",
    ".github/workflows/rules.yml": """\
name: rules
on: [push, pull_request]
jobs:
  rules:
    runs-on: ubuntu-latest
    steps:
      - uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with: {python-version: "3.12"}
      - run: pip install . pytest
      - run: migrate lint <rules> --format github
      - run: migrate seal --check --rules <rules>
        if: hashFiles('<rules>/*/rules.lock') != ''
      - run: pytest
""",
    # the hooks of migrate's `.pre-commit-hooks.yaml`, of whatever release pip installs
    ".pre-commit-config.yaml": """\
repos:
  - repo: local
    hooks:
      - id: migrate-lint
        name: migrate lint
        entry: migrate lint
        language: python
        additional_dependencies: ["ckpt-migrate>=0.1"]
        files: ^<rules>/.*\\.yaml$
      - id: migrate-test
        name: migrate test
        entry: migrate test <rules>
        language: python
        additional_dependencies: ["ckpt-migrate>=0.1"]
        files: ^<rules>/.*\\.yaml$
        pass_filenames: false
""",
    "<package>/__init__.py": "",
    "tests/test_pack.py": '''\
"""What users of the pack get. Its rule files have tests of their own, which pytest runs too."""

from pathlib import Path

import migrate

RULES = Path(__file__).resolve().parents[1] / "<package>" / "rules"


def test_lint_finds_nothing():
    assert migrate.lint([RULES]).diagnostics == ()


def test_the_installed_pack_has_every_lineage():
    installed = {lineage.name for lineage in migrate.history(rules=["pack:<name>"]).lineages}
    assert {file.parent.name for file in RULES.glob("*/layouts.yaml")} <= installed
''',
}
