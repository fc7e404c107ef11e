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
from ..source import yaml
from ..source.registry import canonical
from .relations import RuleDraft
from .writing import FileHead, MadeFile

FILES = Path(__file__).with_name("pack.yaml")
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

        files = yaml.core(yaml.parse(FILES.read_text(encoding="utf-8"), str(FILES)).data)
        return {self.folder / filled(path): filled(text) for path, text in files.items()}


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
