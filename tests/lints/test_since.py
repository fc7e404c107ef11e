"""`migrate lint --since REF`: only what changed, as git says."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import migrate

RULE = "id: a/b/{name}\ntitle: T\nlineage: a\nedge: [v1, v2]\nrules: []\n"


def git(folder: Path, *words: str) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "init.defaultBranch=main"]
    subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two committed rule files in a folder of a repository."""
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    folder = tmp_path / "work"
    (folder / "mine" / "rules").mkdir(parents=True)
    for name in ("old", "changed"):
        (folder / "mine" / "rules" / f"{name}.yaml").write_text(RULE.format(name=name))
    git(folder, "init")
    git(folder, "add", ".")
    git(folder, "commit", "-m", "one")
    monkeypatch.chdir(folder / "mine")
    return folder


def looked_at(*paths: str, since: str = "HEAD") -> list[str]:
    return [Path(file).stem for file in migrate.lint(paths, since=since).files]


def test_files_that_changed_or_are_new_are_looked_at(repository: Path) -> None:
    assert looked_at() == []
    assert migrate.lint(since="HEAD").exit == 0
    rules = repository / "mine" / "rules"
    (rules / "changed.yaml").write_text(RULE.format(name="changed") + "# more\n")
    (rules / "new ä.yaml").write_text(RULE.format(name="new"))
    assert looked_at() == looked_at("rules") == ["changed", "new ä"]
    assert looked_at("rules/old.yaml") == []
    # what was committed since counts as well, and so does what is staged
    git(repository, "add", ".")
    assert looked_at() == ["changed", "new ä"]
    git(repository, "commit", "-m", "two")
    assert looked_at() == []
    assert looked_at(since="HEAD~1") == ["changed", "new ä"]
    assert migrate.lint(since="main~1", fix=True).fixed[0].file == "rules/changed.yaml"
    assert (rules / "old.yaml").read_text() == RULE.format(name="old")


@pytest.mark.parametrize("ref", ["", "nowhere", "--output=x", "-x", "HEAD:mine", "a\nb", "a\0b"])
def test_what_is_no_commit_is_refused(repository: Path, ref: str) -> None:
    with pytest.raises(migrate.MigrateError, match="M115"):
        migrate.lint(since=ref)
    assert sorted(p.name for p in (repository / "mine").iterdir()) == ["rules"]


def test_the_configuration_of_a_repository_starts_no_program(repository: Path) -> None:
    trap = repository / "trap"
    trap.write_text("#!/bin/sh\ntouch ../sprung sprung\n")
    trap.chmod(0o755)
    for name in ("core.fsmonitor", "diff.external", "core.pager"):
        git(repository, "config", name, str(trap))
    (repository / "mine" / "rules" / "changed.yaml").write_text("# other\n")
    assert looked_at() == ["changed"]
    assert not list(repository.rglob("sprung"))


def test_outside_of_a_repository_and_without_git_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    (tmp_path / "a.yaml").write_text(RULE.format(name="a"))
    with pytest.raises(migrate.MigrateError, match=r"M115.*lies in no repository"):
        migrate.lint([tmp_path], since="HEAD")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(migrate.MigrateError, match=r"M115.*git, which is not installed"):
        migrate.lint([tmp_path], since="HEAD")
