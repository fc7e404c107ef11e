"""Where a checkpoint lies is asked of `source`: no floor above it asks the operating system about a
location, which may be no path at all.
"""

from __future__ import annotations

import ast
from pathlib import Path

from test_house import PACKAGE, dotted, nodes

# what asks the system about a path; `splitext`, `basename` and the like only take text apart
ASKING = {
    *(f"os.path.{name}" for name in (
        "abspath", "commonpath", "exists", "getsize", "isdir", "isfile", "islink", "lexists",
        "realpath", "samefile",
    )),
    "os.listdir", "os.scandir", "os.stat", "os.lstat", "os.statvfs", "os.open", "os.walk",
    "shutil.disk_usage",
}  # fmt: skip
METHODS = {"exists", "is_dir", "is_file", "is_symlink", "iterdir", "resolve", "stat", "lstat"}
# the floors below, and rule files, which lie on this machine
ELSEWHERE = ("core/", "source/", "rules/", "ruletests/", "lints/", "testing/")
# files that ask about something else, and what that is
LOCAL = {
    "running/publish.py": "the output",
    "running/share.py": "the output",
    "running/leftovers.py": "the output",
    "running/tiles.py": "the output, and side files that are copied into it",
    "running/parts.py": "the partial folder of an output",
    "running/ranks.py": "the folder where ranks meet, in the partial folder",
    "running/rank_run.py": "the output",
    "running/undo.py": "the undo folder",
    "staging/destination.py": "the output",
    "staging/memory.py": "shared memory",
    "planning/lineages.py": "folders of rules",
    "planning/path.py": "rule files",
    "planning/request.py": "rule files and folders",
    "planning/savedplan.py": "a saved plan",
    "authoring/new.py": "the folder of rules",
    "cli/apply.py": "the output",
    "cli/main.py": "the folder of the commands",
    "cli/options.py": "a document that is saved",
    "cli/schema.py": "the folder of the schemas",
    "cli/terminal.py": "the standard streams",
}


def asked(code: ast.AST) -> list[str]:
    """What of a source asks the system about a path."""
    found = []
    for node in ast.walk(code):
        if isinstance(node, ast.Attribute):
            name = dotted(node)
            if name in ASKING or (name.startswith("?.") and node.attr in METHODS):
                found.append(f"{node.lineno}: {name}")
        elif isinstance(node, ast.ImportFrom) and node.module in ("os", "os.path", "shutil"):
            found += [
                f"{node.lineno}: {node.module}.{alias.name}"
                for alias in node.names
                if f"{node.module}.{alias.name}" in ASKING
            ]
    return found


def above_source() -> list[Path]:
    return [
        file
        for file in sorted(PACKAGE.rglob("*.py"))
        if not file.relative_to(PACKAGE).as_posix().startswith(ELSEWHERE)
    ]


def test_no_floor_above_source_asks_the_system_about_a_location() -> None:
    found = {
        name: asked_there
        for file in above_source()
        if (name := file.relative_to(PACKAGE).as_posix()) not in LOCAL
        and (asked_there := [one for node in nodes(file)[:1] for one in asked(node)])
    }
    assert not found


def test_every_exception_is_needed() -> None:
    assert not {name for name in LOCAL if not asked(nodes(PACKAGE / name)[0])}


def test_what_asks_is_found() -> None:
    code = (
        "import os\nfrom os.path import isdir\nif os.path.isdir(p) or os.stat(p):\n"
        "    Path(p).exists()\n    os.path.splitext(p)\n"
    )
    assert asked(ast.parse(code)) == [
        "2: os.path.isdir",
        "3: os.path.isdir",
        "3: os.stat",
        "4: ?.exists",
    ] or sorted(asked(ast.parse(code))) == [
        "2: os.path.isdir",
        "3: os.path.isdir",
        "3: os.stat",
        "4: ?.exists",
    ]
