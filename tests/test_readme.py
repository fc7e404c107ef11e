"""What the README and the language page show is run as it stands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml
from commandline import ROOT, contents, done, mixtral, safetensors, shards

from migrate.core.diagnostics import Report
from migrate.rules.compiled import compile_file
from migrate.rules.model import load_files

README = (ROOT / "README.md").read_text(encoding="utf-8")
LANGUAGE = (ROOT / "docs" / "rules.md").read_text(encoding="utf-8")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(text: str, kind: str) -> list[str]:
    return [body for name, body in FENCE.findall(text) if name == kind]


def commands(text: str) -> list[str]:
    """Every command line of the fenced blocks and of the running text, comments cut off."""
    shown = [line.split("  #")[0].strip() for block in blocks(text, "") for line in block.splitlines()]
    inline = re.findall(r"`(migrate [^`]+)`", FENCE.sub("", text))
    return [line for line in shown if line] + inline


def test_the_first_two_commands_are_targets_of_the_makefile() -> None:
    first = commands(README)[:2]
    assert first == ["make demo", "make test"]
    makefile = (ROOT / "Makefile").read_text()
    for command in first:
        assert re.search(rf"^{command.split()[1]}:", makefile, re.MULTILINE)


def test_the_package_is_installed_under_its_name() -> None:
    installs = [c for c in commands(README) if c.startswith("pip ")]
    assert installs == ["pip install ckpt-migrate"]
    assert 'name = "ckpt-migrate"' in (ROOT / "pyproject.toml").read_text()


def test_every_command_is_of_a_kind_that_is_tested() -> None:
    assert {c.split()[0] for c in commands(README)} <= {"make", "pip", "migrate"}


def test_every_migrate_command_runs_as_it_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = shards(tmp_path / "CKPT", [mixtral()])
    (folder / "config.json").write_text('{"model_type": "mixtral"}')
    monkeypatch.chdir(tmp_path)
    ran = []
    for command in commands(README):
        words = shlex.split(command)
        if words[0] == "migrate" and "--rules" not in words:
            done(*words[1:], cwd=tmp_path)
            ran.append(words[1] if len(words) > 1 else "")
    assert [w for w in ran if w != "history"] == ["inspect", "plan", "apply", "verify", "downgrade", "diff"]
    assert contents(tmp_path / "BACK") == contents(folder)


def test_the_python_lines_are_true(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards(tmp_path / "CKPT", [mixtral()])
    monkeypatch.chdir(tmp_path)
    shown = re.findall(r"`(migrate\.\w+\([^`]*\))`", README)
    assert shown
    for line in shown:
        if "…" not in line:
            import migrate

            name, arguments = re.fullmatch(r'migrate\.(\w+)\("CKPT", to="([^"]+)"\)', line).groups()
            assert getattr(migrate, name)("CKPT", to=arguments).document["path"]


def test_the_first_rule_is_planned_applied_and_undone(tmp_path: Path) -> None:
    (text,) = blocks(README, "yaml")
    (tmp_path / "fuse.yaml").write_text(text)
    (command,) = [c for c in commands(README) if "--rules" in c]
    tensors = {f"l.{i}.{w}_proj.weight": ("F32", [3, 2] if w != "down" else [2, 3]) for i in range(2) for w in ("gate", "up", "down")}
    source = safetensors(tmp_path / "CKPT", tensors)
    planned = done(*shlex.split(command)[1:], cwd=tmp_path)
    assert "downgrade: exact" in planned.out
    done("apply", "CKPT", "-o", "NEW.safetensors", "--rules", "fuse.yaml", cwd=tmp_path)
    made, given = contents(tmp_path / "NEW.safetensors"), contents(source)
    assert made["l.1.gate_up_proj.weight"] == ("F32", (6, 2), given["l.1.gate_proj.weight"][2] + given["l.1.up_proj.weight"][2])
    assert made["l.0.down_proj.weight"] == given["l.0.down_proj.weight"]
    done("verify", "NEW.safetensors", "--source", "CKPT", "--rules", "fuse.yaml", cwd=tmp_path)
    done("downgrade", "NEW.safetensors", "-o", "BACK.safetensors", "--rules", "fuse.yaml", cwd=tmp_path)
    assert contents(tmp_path / "BACK.safetensors") == given


@pytest.mark.parametrize("text", [*blocks(README, "yaml"), *blocks(LANGUAGE, "yaml")])
def test_a_rule_file_that_is_shown_can_be_loaded(tmp_path: Path, text: str) -> None:
    path = tmp_path / "shown.yaml"
    path.write_text(text)
    (loaded,) = load_files([path])
    report = Report()
    compile_file(loaded, report)
    assert report.diagnostics == []
    assert yaml.safe_load(text)["edge"] == list(loaded.model.edge)


def test_the_exit_statuses_are_those_of_the_errors() -> None:
    from migrate.core import errors

    said = {int(n) for n in re.findall(r"(?:^|· )(\d+) ", README.split("## Exit status")[1], re.MULTILINE)}
    # no error: an answer of no, a bug
    assert said == {0, 1, 70, 130} | {c.exit_code for c in errors.MigrateError.__subclasses__()}


def test_every_link_of_the_readme_leads_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), target
