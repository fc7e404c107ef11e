"""A pack that is installed twice, and plugins that are written for an older contract: what the user
sees of them on the command line.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from commandline import ROOT, Result, environment, safetensors

LAYOUTS = "lineage: acme\ntitle: {title}\nlayouts:\n  v1: {{title: one}}\n  v2: {{title: two}}\n"
RULES = (
    "id: acme/v2/rename\ntitle: {title}\nlineage: acme\nedge: [v1, v2]\n"
    'rules: [{{name: r, from: "old.{{k...}}", to: "{target}.{{k}}"}}]\n'
)


def install(
    folder: Path, distribution: str, package: str, version: str, target: str, title: str = "t"
) -> Path:
    """A folder for `sys.path` with a distribution whose package holds a pack of one lineage."""
    home = folder / package / "rules" / "acme"
    (home / "v2").mkdir(parents=True)
    (folder / package / "__init__.py").write_text("raise RuntimeError('packs are never imported')")
    (home / "layouts.yaml").write_text(LAYOUTS.format(title=title))
    (home / "v2" / "rename.yaml").write_text(RULES.format(target=target, title=title))
    info = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
    )
    (info / "entry_points.txt").write_text(f"[migrate.rulepacks]\nacme = {package}:rules\n")
    return folder


def migrate(cwd: Path, path: list[Path], *words: str) -> Result:
    """The command line in a process of its own, with these folders of packages in this order."""
    child = subprocess.run(
        [sys.executable, "-m", "migrate", *words],
        cwd=cwd,
        env={**environment(), "PYTHONPATH": ":".join(map(str, [ROOT, *path]))},
        capture_output=True,
        text=True,
    )
    return Result(child.returncode, child.stdout, child.stderr)


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A folder without rules, with a checkpoint."""
    folder = tmp_path / "work"
    folder.mkdir()
    safetensors(folder / "OLD.safetensors", {"old.w": ("F32", [2])})
    return folder


PLAN = ("plan", "OLD.safetensors", "--to", "acme@v2", "--from", "acme@v1")


def test_one_distribution_in_two_places_is_one_pack_the_first_that_python_finds(
    tmp_path: Path, work: Path
) -> None:
    first = install(tmp_path / "user", "acme-rules", "acme_rules", "2.0", "new")
    second = install(tmp_path / "venv", "acme-rules", "acme_rules", "1.0", "older")
    listed = migrate(work, [first, second], "packs", "--format", "json")
    packs = [p for p in listed.json["packs"] if p["origin"] == "installed"]
    assert [(p["version"], p["folder"]) for p in packs] == [
        ("2.0", str(first / "acme_rules" / "rules"))
    ]
    made = migrate(work, [first, second], *PLAN)
    assert made.exit == 0, made.err
    assert "installed acme (acme-rules) 2.0" in made.out
    assert "new.w" in made.out


def test_two_distributions_with_the_same_rules_are_one_pack(tmp_path: Path, work: Path) -> None:
    one = install(tmp_path / "one", "acme-rules", "acme_rules", "1.0", "new")
    other = install(tmp_path / "other", "acme-copy", "acme_copy", "3.0", "new", "another title")
    listed = migrate(work, [one, other], "packs")
    assert "acme (acme-rules) 1.0" in listed.out
    assert "acme (acme-copy) 3.0" in listed.out
    assert migrate(work, [one, other], *PLAN).exit == 0


def test_two_distributions_that_differ_are_refused_and_both_ways_out_are_shown(
    tmp_path: Path, work: Path
) -> None:
    one = install(tmp_path / "one", "acme-rules", "acme_rules", "1.0", "new")
    other = install(tmp_path / "other", "acme-copy", "acme_copy", "3.0", "other")
    refused = migrate(work, [one, other], *PLAN)
    assert refused.exit == 2
    assert refused.err.startswith(
        "error[M508]: lineage `acme` is defined by acme (acme-copy) 3.0, acme (acme-rules) 1.0"
    )
    for place in (one / "acme_rules", other / "acme_copy"):
        assert f"has it in {place}/rules/acme" in refused.err
        assert f"--rules {place}/rules" in refused.err
        # what the help says works
        assert migrate(work, [one, other], *PLAN, "--rules", f"{place}/rules").exit == 0
    # and nothing else is stopped
    assert migrate(work, [one, other], "history", "--lineage", "hf-mixtral").exit == 0
