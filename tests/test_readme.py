"""What the README, the tutorial and the language page show is run as it stands."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from commandline import ROOT, Result, contents, done, mixtral, run, shards

from migrate.core.diagnostics import Report
from migrate.rules.compiled import compile_file
from migrate.rules.layouts import load_layouts
from migrate.rules.loading import load_files

README = (ROOT / "README.md").read_text(encoding="utf-8")
TUTORIAL = (ROOT / "docs" / "first-rule.md").read_text(encoding="utf-8")
LANGUAGE = (ROOT / "docs" / "rules.md").read_text(encoding="utf-8")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(text: str, kind: str) -> list[str]:
    return [body for name, body in FENCE.findall(text) if name == kind]


def section(title: str) -> str:
    return README.split(f"## {title}\n")[1].split("\n## ")[0]


def commands(text: str) -> list[str]:
    """Every command line of the fenced blocks and of the running text, comments cut off."""
    shown = [
        line.split("  #")[0].strip() for block in blocks(text, "") for line in block.splitlines()
    ]
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
    assert "`pip install ckpt-migrate safetensors`" in README
    assert 'name = "ckpt-migrate"' in (ROOT / "pyproject.toml").read_text()


def test_every_command_is_of_a_kind_that_is_tested() -> None:
    assert {c.split()[0] for c in commands(README)} <= {"make", "pip", "migrate", "python"}


def test_every_migrate_command_runs_as_it_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shards(tmp_path / "CKPT", [mixtral()])
    (folder / "config.json").write_text('{"model_type": "mixtral"}')
    monkeypatch.chdir(tmp_path)
    ran = []
    for command in commands(section("Use it")):
        words = shlex.split(command)
        if words[0] == "migrate":
            done(*words[1:], cwd=tmp_path)
            ran.append(words[1] if len(words) > 1 else "")
    assert [w for w in ran if w != "history"] == [
        "inspect",
        "plan",
        "apply",
        "verify",
        "downgrade",
        "diff",
    ]
    assert contents(tmp_path / "BACK") == contents(folder)


def test_the_python_lines_are_true(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards(tmp_path / "CKPT", [mixtral()])
    monkeypatch.chdir(tmp_path)
    shown = re.findall(r"`(migrate\.\w+\([^`]*\))`", README)
    assert shown
    for line in shown:
        if "…" not in line and "(model" not in line:
            import migrate

            name, arguments = re.fullmatch(r'migrate\.(\w+)\("CKPT", to="([^"]+)"\)', line).groups()
            assert getattr(migrate, name)("CKPT", to=arguments).document["path"]


def executed(command: str, cwd: Path) -> Result:
    """A command line that is shown; python in a process of its own, pip not at all."""
    words = shlex.split(command)
    if words[0] == "pip":
        return Result(0, "", "")
    if words[0] == "python":
        child = subprocess.run(
            [sys.executable, *words[1:]], cwd=cwd, capture_output=True, text=True, check=True
        )
        return Result(0, child.stdout, child.stderr)
    assert words[0] == "migrate"
    return run(*words[1:], cwd=cwd)


def test_the_first_rule_is_linted_tested_planned_applied_and_undone(tmp_path: Path) -> None:
    text = section("Write your first rule")
    (rule,) = blocks(text, "yaml")
    (tmp_path / "fuse.yaml").write_text(rule)
    outputs = {}
    for command in commands(text):
        result = executed(command, tmp_path)
        assert result.exit == 0, f"{command}\n{result.out}{result.err}"
        outputs[" ".join(shlex.split(command)[:2])] = result.out
    assert list(outputs) == [
        "python -c",
        *(
            f"migrate {verb}"
            for verb in (
                "inspect",
                "schema",
                "lint",
                "test",
                "plan",
                "apply",
                "verify",
                "downgrade",
                "diff",
            )
        ),
    ]
    assert "l.{0,1}.{down,gate,up}_proj.weight  ×6  f32 [4, 4]" in outputs["migrate inspect"]
    assert "nothing found" in outputs["migrate lint"]
    assert "downgrade: exact" in outputs["migrate plan"]
    given, made = contents(tmp_path / "OLD.safetensors"), contents(tmp_path / "FUSED.safetensors")
    assert made["l.1.gate_up_proj.weight"] == (
        "F32",
        (8, 4),
        given["l.1.gate_proj.weight"][2] + given["l.1.up_proj.weight"][2],
    )
    assert contents(tmp_path / "BACK.safetensors") == given
    modeline = rule.splitlines()[0].partition("$schema=")[2]
    assert (tmp_path / modeline).read_bytes() == (
        ROOT / "schemas" / "rulefile.schema.json"
    ).read_bytes()


def test_an_old_checkpoint_is_loaded_into_a_live_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.chdir(tmp_path)
    Path("fuse.yaml").write_text(blocks(section("Write your first rule"), "yaml")[0])
    executed(
        next(c for c in commands(section("Write your first rule")) if c.startswith("python")),
        tmp_path,
    )
    executed(
        next(c for c in commands(section("A file of torch.save")) if c.startswith("python")),
        tmp_path,
    )
    given = torch.load("OLD.pt", weights_only=True)["model"]

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            sizes = {"gate_up_proj": 8, "down_proj": 4}
            made = [
                torch.nn.ModuleDict(
                    {n: torch.nn.Linear(4, size, bias=False) for n, size in sizes.items()}
                )
                for _ in range(2)
            ]
            self.l = torch.nn.ModuleList(made)

    text = section("Into a live module")
    model = Model()
    (block,) = blocks(text, "python")
    exec(block, {"model": model, "torch": torch})
    state = model.state_dict()
    for i in (0, 1):
        expected = torch.cat([given[f"l.{i}.gate_proj.weight"], given[f"l.{i}.up_proj.weight"]])
        assert torch.equal(state[f"l.{i}.gate_up_proj.weight"], expected)
        assert torch.equal(state[f"l.{i}.down_proj.weight"], given[f"l.{i}.down_proj.weight"])
    (line,) = [one for one in re.findall(r"`(migrate\.load\([^`]*\))`", text) if "…" not in one]
    import migrate

    streamed = Model()
    eval(line, {"model": streamed, "migrate": migrate})
    from safetensors.torch import load_file

    old = load_file("OLD.safetensors")
    assert torch.equal(
        streamed.l[1]["gate_up_proj"].weight,
        torch.cat([old["l.1.gate_proj.weight"], old["l.1.up_proj.weight"]]),
    )


def test_a_file_of_torch_is_migrated_and_comes_back_through_safetensors(tmp_path: Path) -> None:
    (tmp_path / "fuse.yaml").write_text(blocks(section("Write your first rule"), "yaml")[0])
    ran = []
    for command in commands(section("A file of torch.save")):
        result = executed(command, tmp_path)
        assert result.exit == 0, f"{command}\n{result.out}{result.err}"
        ran.append(command.split()[1])
        if ran[-1] == "inspect":
            assert "rules work on: model" in result.out
    assert ran == ["-c", "inspect", "apply", "verify", "apply", "apply", "diff"]


STEP = re.compile(r"(?:^`([^`\n]+)`( \+|:)\n\n)?^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def told(result: Result, shown: list[str]) -> str:
    """What a transcript shows and the command did not say, in this order; `…` stands for
    anything.
    """
    lines, at, skipping = (result.out + result.err).splitlines(), 0, False
    for line in shown:
        if line == "…":
            skipping = True
            continue
        wanted = re.compile(".*".join(map(re.escape, line.split("…"))))
        found = next(
            (
                n
                for n in range(at, len(lines) if skipping else at + 1)
                if n < len(lines) and wanted.fullmatch(lines[n])
            ),
            None,
        )
        if found is None:
            return line
        at, skipping = found + 1, False
    return "" if skipping or at == len(lines) else lines[at]


def test_the_tutorial_happens_as_it_is_told(tmp_path: Path) -> None:
    ran = []
    for name, how, kind, body in STEP.findall(TUTORIAL):
        if kind == "text":
            for transcript in re.split(r"^\$ ", body, flags=re.MULTILINE)[1:]:
                command, *shown = transcript.splitlines()
                result = executed(command, tmp_path)
                ran.append(command.split()[1])
                if shown:
                    missing = told(result, shown)
                    assert not missing, (
                        f"$ {command}\n{missing!r} is not told as it is\n{result.out}{result.err}"
                    )
        else:
            assert name, body
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text((path.read_text() if how == " +" else "") + body)
    verbs = (
        "install make.py inspect schema plan lint lint test plan apply verify history "
        "downgrade diff"
    )
    assert " ".join(ran) == verbs
    for word in re.findall(r"`migrate explain (\w+)`", TUTORIAL):
        done("explain", word)


def test_the_schema_of_a_file_in_the_tutorial_is_where_its_first_line_says() -> None:
    places = {
        name: body.splitlines()[0].partition("$schema=")[2]
        for name, how, kind, body in STEP.findall(TUTORIAL)
        if kind == "yaml" and how == ":"
    }
    assert len(places) == 2
    for name, modeline in places.items():
        assert (ROOT / name).parent.joinpath(modeline).resolve().parent == ROOT / "schemas"


def rule_files() -> list[str]:
    """The rule files that are shown; the fragments of the language page make one together."""
    shown = [*blocks(README, "yaml"), *blocks(LANGUAGE, "yaml")]
    fragments = [text for text in shown if "\nid: " not in text and not text.startswith("layouts:")]
    together = "\n".join(
        ["", "id: shown", "title: shown", "lineage: shown", "edge: [v1, v2]", *fragments]
    )
    return [text for text in shown if "\nid: " in text] + [together]


@pytest.mark.parametrize("text", rule_files())
def test_a_rule_file_that_is_shown_can_be_loaded(tmp_path: Path, text: str) -> None:
    path = tmp_path / "shown.yaml"
    path.write_text(text)
    (loaded,) = load_files([path])
    report = Report()
    compile_file(loaded, report)
    assert report.diagnostics == []
    assert yaml.safe_load(text)["edge"] == list(loaded.model.edge)


def test_the_layouts_that_are_shown_can_be_loaded(tmp_path: Path) -> None:
    shown = [text for text in blocks(LANGUAGE, "yaml") if text.startswith("layouts:")]
    for text in shown:
        path = tmp_path / "layouts.yaml"
        path.write_text("lineage: shown\ntitle: shown\n" + text)
        report = Report()
        lineage = load_layouts(path, report)
        assert (report.diagnostics, lineage is not None) == ([], True)
    assert shown


def test_the_exit_statuses_are_those_of_the_errors() -> None:
    from migrate.core import errors

    said = {
        int(n)
        for n in re.findall(r"(?:^|· )(\d+) ", README.split("## Exit status")[1], re.MULTILINE)
    }
    # no error: an answer of no, a bug
    assert said == {0, 1, 70, 130} | {c.exit_code for c in errors.MigrateError.__subclasses__()}


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda p: p.name
)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target
