"""What a stranger looks for in a repository: licence, version, changelog, hooks, addresses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "pyproject.toml",
]
# what addresses may lead to: standards, and projects that are compared with
KNOWN = {
    "keepachangelog.com", "semver.org", "www.apache.org", "json-schema.org",
    "github.com/huggingface", "github.com/pytorch", "github.com/deepseek-ai",
}  # fmt: skip
CHANGES = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
RELEASE = re.compile(
    r"^## \[(Unreleased|\d+\.\d+\.\d+)\](?: - (\d{4}-\d{2}-\d{2}))?$", re.MULTILINE
)


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_licence_is_the_one_that_is_named_and_travels() -> None:
    assert read("LICENSE").split()[:3] == ["Apache", "License", "Version"]
    assert "END OF TERMS AND CONDITIONS" in read("LICENSE")
    project = read("pyproject.toml")
    assert 'license = "Apache-2.0"\nlicense-files = ["LICENSE"]\n' in project
    assert '"/LICENSE"' in project.split("[tool.hatch.build.targets.sdist]")[1]
    assert "licenses/LICENSE" in read(".ci/run")


def test_the_version_is_written_once() -> None:
    import migrate

    assert f'__version__ = "{migrate.__version__}"' in read("migrate/core/types.py")
    assert 'dynamic = ["version"]' in read("pyproject.toml")
    written = re.compile(r"^(__)?version(__)? *= *[\"']", re.MULTILINE)
    files = [ROOT / "pyproject.toml", *(ROOT / "migrate").rglob("*.py")]
    places = [str(f.relative_to(ROOT)) for f in files if written.search(f.read_text("utf-8"))]
    assert places == ["migrate/core/types.py"]


def test_the_changelog_has_the_form_of_keep_a_changelog() -> None:
    text = read("CHANGELOG.md")
    assert text.startswith("# Changelog\n")
    releases = RELEASE.findall(text)
    assert len(releases) == text.count("\n## ")
    assert releases[0] == ("Unreleased", "")
    assert all(date for name, date in releases[1:])
    dates = [date for _, date in releases[1:]]
    assert dates == sorted(dates, reverse=True)
    assert set(re.findall(r"^### (.*)$", text, re.MULTILINE)) <= CHANGES
    for release in text.split("\n## ")[1:]:
        kinds = re.findall(r"^### (.*)$", release, re.MULTILINE)
        assert kinds
        assert len(kinds) == len(set(kinds))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_address_leads_to_a_place_that_does_not_exist(page: Path) -> None:
    """A test cannot ask the network; so an address is of a place that is listed as known."""
    said = re.findall(r"https?://([^\s)\"'`>]+)", page.read_text(encoding="utf-8"))
    unknown = [one for one in said if not any(one.startswith(place) for place in KNOWN)]
    assert unknown == []
    assert "[project.urls]" not in page.read_text(encoding="utf-8")


def test_the_hooks_check_what_ci_checks() -> None:
    hooks = yaml.safe_load(read(".pre-commit-config.yaml"))["repos"]
    assert [repo["repo"] for repo in hooks] == ["local"], "a hook from elsewhere needs the network"
    entries = [hook["entry"] for hook in hooks[0]["hooks"]]
    ci = read(".ci/run") + read("Makefile").replace("\t", "")
    for entry in entries:
        assert entry.startswith("sh -c") or f"\n{entry}\n" in ci, entry
    assert {".venv-test/bin/mypy", ".venv-test/bin/ruff check"} <= set(entries)


def test_the_workflow_runs_what_a_developer_runs() -> None:
    steps = yaml.safe_load(read(".github/workflows/ci.yml"))["jobs"]["run"]["steps"]
    assert [step["run"] for step in steps if "run" in step] == ["bash .ci/run"]


def test_contributing_says_how_to_add_each_kind_of_thing() -> None:
    text = read("CONTRIBUTING.md")
    rows = re.findall(r"^\| an? (\w+)", text, re.MULTILINE)
    assert rows == ["op", "codec", "format", "command", "lint", "diagnostic", "pack"]
    folders = re.findall(r"`(\w+)`", "".join(re.findall(r"^\| \d \| (.*?) \|", text, re.MULTILINE)))
    package = ROOT / "migrate"
    assert set(folders) == {f.name for f in package.iterdir() if f.is_dir() and any(f.glob("*.py"))}
