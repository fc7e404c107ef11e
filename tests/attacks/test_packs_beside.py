"""A folder of rules that came with a checkpoint replaces nothing that is known, whichever command
meets it.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from commandline import ROOT, done, mixtral, run, safetensors

import migrate

GOAL = "hf-mixtral@v5"


@pytest.fixture
def downloaded(tmp_path: Path) -> Path:
    """A checkpoint, and beside it a lineage of a known name that turns gate and up around."""
    safetensors(tmp_path / "old.safetensors", mixtral())
    shutil.copytree(ROOT / "rules" / "hf-mixtral", tmp_path / "rules" / "hf-mixtral")
    (rules,) = (tmp_path / "rules").rglob("fuse-experts.yaml")
    text = rules.read_text()
    assert "w1|w3" in text
    rules.write_text(text.replace("w1|w3", "w3|w1"))
    # an attacker who changes rules throws their lock away as well
    (tmp_path / "rules" / "hf-mixtral" / "rules.lock").unlink()
    return tmp_path


def test_it_is_refused_by_every_command_that_would_use_it(
    downloaded: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    apart = tmp_path_factory.mktemp("apart")
    old = downloaded / "old.safetensors"
    done("apply", old, "-o", downloaded / "new.safetensors", "--to", GOAL, cwd=apart)
    for command in (
        ["plan", old, "--to", GOAL],
        ["plan", old, "--to", "latest"],
        ["apply", old, "-o", "x.safetensors", "--to", GOAL],
        ["verify", "new.safetensors", "--source", old],
        ["downgrade", "new.safetensors", "-o", "x.safetensors"],
        ["history"],
        ["inspect", old],
    ):
        result = run(*command, cwd=downloaded)
        assert result.exit == 2, f"{command}: {result.out}{result.err}"
        assert "M508" in result.err, f"{command}: {result.err}"
    assert not (downloaded / "x.safetensors").exists()


def test_the_way_out_names_what_ships_as_well(downloaded: Path) -> None:
    text = run("plan", "old.safetensors", "--to", GOAL, cwd=downloaded).err
    assert f"--rules {ROOT / 'rules'} or --rules rules" in text
    plan = done(
        "plan",
        "old.safetensors",
        "--to",
        GOAL,
        "--rules",
        ROOT / "rules",
        "--format",
        "json",
        cwd=downloaded,
    ).json
    assert plan["origins"] == []


def test_it_is_refused_in_python_as_well(downloaded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.chdir(downloaded)
    module = torch.nn.Linear(2, 2)
    with pytest.raises(migrate.MigrateError, match="M508"):
        migrate.attach(module, to=GOAL)
    with pytest.raises(migrate.MigrateError, match="M508"):
        migrate.load(module, "old.safetensors", to=GOAL)


def test_named_it_is_used_and_said(
    downloaded: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    rules, old, new = (
        downloaded / "rules",
        downloaded / "old.safetensors",
        downloaded / "new.safetensors",
    )
    text = done("plan", old, "--to", GOAL, "--rules", rules, cwd=downloaded).out
    assert text.splitlines()[1] == "the rules of hf-mixtral do not ship with migrate: folder rules"
    saved = downloaded / "plan.json"
    done("plan", old, "--to", GOAL, "--rules", rules, "-o", saved)
    assert json.loads(saved.read_text())["origins"] == [
        {
            "lineage": "hf-mixtral",
            "origin": "folder",
            "name": "",
            "version": "",
            "places": [str(rules)],
        }
    ]
    published = done("apply", old, "-o", new, "--to", GOAL, "--rules", rules)
    assert "do not ship with migrate" in published.out
    (entry,) = done("history", new, "--format", "json").json["applied"]
    assert entry["pack"] == {"origin": "folder"}
    assert "not shipped with migrate" in done("history", new).out
    answer = done("verify", new, "--source", old, "--rules", rules, "--format", "json").json
    assert any("do not ship" in note for note in answer["notes"])
    # with the rules that ship it is another checkpoint, and that the rules are others is said
    # beside it
    apart = tmp_path_factory.mktemp("apart")
    wrong = done("verify", new, "--source", old, "--format", "json", cwd=apart, exit=1).json
    assert any("applied with other rules" in note for note in wrong["notes"])
    back = run("downgrade", new, "-o", downloaded / "back.safetensors", cwd=apart)
    assert "M518" in back.err
    assert "the stamp says that hf-mixtral v4 → v5 was applied with other rules" in back.err
    assert "hf-mixtral/v5/fuse-experts has changed since" in back.err
    assert "did not ship with migrate (folder)" in back.err
    assert "name them with --rules" in back.err


def test_what_ships_needs_no_word(
    downloaded: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    apart = tmp_path_factory.mktemp("apart")
    old, new = downloaded / "old.safetensors", apart / "new.safetensors"
    plan = done("plan", old, "--to", GOAL, "--format", "json", cwd=apart).json
    assert plan["origins"] == []
    done("apply", old, "-o", new, "--to", GOAL, cwd=apart)
    (entry,) = done("history", new, "--format", "json", cwd=apart).json["applied"]
    assert "pack" not in entry
    # equal rules beside are the same lineage
    shutil.copytree(ROOT / "rules", apart / "rules")
    assert (
        done("plan", old, "--to", GOAL, "--format", "json", cwd=apart).json["digest"]
        == plan["digest"]
    )
    assert (
        done("downgrade", new, "-o", apart / "back.safetensors", cwd=apart).err.count("M518") == 0
    )


def test_a_rule_file_is_said_too(tmp_path: Path) -> None:
    old = safetensors(tmp_path / "old.safetensors", mixtral())
    (rules,) = (ROOT / "rules" / "hf-mixtral").rglob("fuse-experts.yaml")
    own = shutil.copy(rules, tmp_path / "own.yaml")
    text = done("plan", old, "--rules", own, cwd=tmp_path).out
    assert text.splitlines()[1] == "the rules of hf-mixtral do not ship with migrate: file own.yaml"
    done("apply", old, "-o", tmp_path / "new.safetensors", "--rules", own)
    (entry,) = done("history", tmp_path / "new.safetensors", "--format", "json").json["applied"]
    assert entry["pack"] == {"origin": "file"}
