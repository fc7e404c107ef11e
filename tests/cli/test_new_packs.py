"""`migrate new --pack`: what it makes is whole, and what is built of it migrates where it is
installed.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml
from commandline import ROOT, done, run, safetensors
from fresh_environment import Environment

import migrate

OLD = {
    "l.0.gate_proj.weight": ("F32", [2, 3]),
    "l.0.up_proj.weight": ("F32", [2, 3]),
    "l.0.down_proj.weight": ("F32", [3, 2]),
    "norm.weight": ("F32", [3]),
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def names(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def test_a_pack_alone_gets_an_example_that_passes_every_check(here: Path) -> None:
    made = migrate.new(pack="acme-rules")
    assert made.id == "acme/v2/fuse-gate-up"
    assert made.diagnostics == ()
    assert sorted(made.files) == [f"acme-rules/{name}" for name in names(here / "acme-rules")]
    assert set(names(here / "acme-rules")) >= {"pyproject.toml", "README.md", "tests/test_pack.py"}
    rules = Path("acme-rules/acme_rules/rules")
    assert done("lint", rules).out == "2 files: nothing found\n"
    assert "1 rule file: 6 passed" in done("test", rules).out
    assert done("seal", "--rules", rules).exit == 0
    # schemas are looked for where the README has them written
    for file in rules.rglob("*.yaml"):
        line = file.read_text().splitlines()[0].partition("$schema=")[2]
        assert (file.parent / line).resolve().parent == (here / "acme-rules/schemas").resolve()


def test_a_named_rule_file_is_the_first_of_its_pack(here: Path) -> None:
    source = safetensors(here / "old.safetensors", OLD)
    made = done("new", "net/v7/split", "--pack", "packs/Acme.Net", "--index", source)
    file = "packs/Acme.Net/acme_net/rules/net/v7/split.yaml"
    assert f"{file}: written, 0 rules, 4 patterns under keep, 1 test\n" in made.out
    assert "--to net@v7" in (here / "packs/Acme.Net/README.md").read_text()
    # the next one goes into the same pack
    done("new", "net/v7/more", "--rules", "packs/Acme.Net/acme_net/rules")
    again = run("new", "net/v7/third", "--pack", "packs/Acme.Net")
    assert (again.exit, "M904" in again.err) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--pack", "9-lives"), "M115"),
        (("--pack", "class"), "M115"),
        (("--pack", 'a"b'), "M115"),
        (("--pack", "hf-mixtral-rules"), "M508"),
        (("a/v1/b", "--pack", "x", "-o", "y.yaml"), "--pack"),
        (("-o", "y.yaml", "--pack", "x"), "--pack"),
        (("a/v1/b", "--pack", "x", "--rules", "y"), "M115"),
        (("a/v1", "--pack", "x"), "M115"),
    ],
)
def test_what_cannot_be_a_pack_is_refused_and_nothing_is_written(
    here: Path, arguments: tuple[str, ...], said: str
) -> None:
    refused = run("new", *arguments)
    assert (refused.exit, said in refused.err) == (2, True), refused.err
    assert names(here) == []


def test_the_hooks_of_a_pack_are_those_that_migrate_offers_and_run(here: Path) -> None:
    offered = {
        hook["id"]: hook for hook in yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    }
    migrate.new(pack="acme-rules")
    os.chdir("acme-rules")
    text = Path(".pre-commit-config.yaml").read_text()
    (local,) = yaml.safe_load(text)["repos"]
    for hook in local["hooks"]:
        assert hook["entry"].startswith(offered[hook["id"]]["entry"])
    files = [str(file) for file in Path("acme_rules").rglob("*.yaml")]
    assert len(files) == 2
    for hook in (*offered.values(), *local["hooks"]):
        given = [] if hook.get("pass_filenames") is False else files
        if hook["id"] == "migrate-seal":
            done("seal", "--rules", "acme_rules/rules")
            given = ["--rules", "acme_rules/rules"]
        elif hook["id"] == "migrate-test":
            given = [file for file in given if "layouts" not in file]
        assert done(*hook["entry"].split()[1:], *given).exit == 0


@pytest.mark.libraries
def test_a_pack_is_built_and_installed_and_its_rules_migrate(here: Path) -> None:
    environment = Environment(here)
    migrate.new(pack=here / "acme-rules")
    assert environment.install(environment.wheel(here / "acme-rules")).exit == 0

    def ran(program: str, *words: object) -> str:
        result = environment.run(program, *words, cwd=here)
        assert result.exit == 0, result.out + result.err
        return result.out

    where = ran("python", "-c", "import migrate; print(migrate.__file__)")
    assert where.startswith(str(environment.folder))
    # an installed pack is data
    (environment.site / "acme_rules" / "__init__.py").write_text("raise SystemExit('imported')\n")
    assert "acme-rules (acme-rules) 0.1.0" in ran("migrate", "packs")
    safetensors(here / "OLD.safetensors", OLD)
    ran("migrate", "apply", "OLD.safetensors", "-o", "NEW.safetensors", "--to", "acme@v2")
    assert "l.0.gate_up_proj.weight" in ran("migrate", "inspect", "NEW.safetensors")
    told = ran("migrate", "history", "NEW.safetensors")
    assert "from an installed pack, acme-rules (acme-rules) 0.1.0" in told
    ran("migrate", "downgrade", "NEW.safetensors", "-o", "BACK.safetensors")
    ran("migrate", "diff", "OLD.safetensors", "BACK.safetensors")
    # the tests of the pack, of its rule files and those beside them
    said = ran("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "acme-rules")
    assert "8 passed" in said
