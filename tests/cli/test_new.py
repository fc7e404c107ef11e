"""`migrate new`: what it writes loads, says what is missing, and replaces nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from commandline import DATA, mixtral, run, safetensors

import migrate
from migrate.rules.loading import load_files

HUB = DATA / "mixtral__v4" / "hub"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_a_new_lineage_gets_its_layouts_and_a_test_that_fails_and_says_what_to_write(
    here: Path,
) -> None:
    done = run("new", "toy/v2/join-experts")
    assert done.exit == 0, done.err
    assert sorted(files(here)) == ["rules/toy/layouts.yaml", "rules/toy/v2/join-experts.yaml"]
    model = load_files([here / "rules/toy/v2/join-experts.yaml"])[0].model
    assert (model.id, model.title, model.edge) == (
        "toy/v2/join-experts",
        "Join experts",
        ("v1", "v2"),
    )
    tested = run("test")
    assert tested.exit == 1
    assert "write here" in tested.out
    assert {d.code for d in migrate.lint(["rules"]).diagnostics} == {"M621"}


def test_the_next_file_of_a_lineage_leaves_its_layouts_alone(here: Path) -> None:
    run("new", "toy/v2/one")
    before = files(here)
    assert run("new", "toy/v2/two").exit == 0
    after = files(here)
    assert {name: after[name] for name in before} == before
    assert set(after) - set(before) == {"rules/toy/v2/two.yaml"}
    assert load_files([here / "rules/toy/v2/two.yaml"])[0].model.edge == ("v1", "v2")


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (("new", "toy/v2/one"), 2, "M904"),
        (("new", "toy/v3/one"), 2, "M501"),
        (("new", "toy/v2/more", "--from", "v0"), 2, "M501"),
        (("new", "toy/one"), 2, "M115"),
        (("new", "../v2/one"), 2, "M115"),
        (("new", "toy/v2/.one"), 2, "M115"),
        (("new", "hf-mixtral/v6/one"), 2, "M508"),
        (("new", "other/v1/one", "--from", "v1"), 2, "M115"),
        (("new", "toy/v2/more", "--index", "nowhere"), 2, "M917"),
        (("new",), 2, "-o"),
        (("new", "-o", "rules.txt"), 2, ".yaml"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_written(
    here: Path, arguments: tuple[str, ...], status: int, said: str
) -> None:
    run("new", "toy/v2/one")
    before = files(here)
    done = run(*arguments)
    assert (done.exit, said in done.err) == (status, True), done.err
    assert files(here) == before


def test_a_file_without_a_lineage(here: Path) -> None:
    assert run("new", "-o", "my rules.yaml", "--from", "2.0").exit == 0
    model = load_files([here / "my rules.yaml"])[0].model
    assert (model.id, model.edge) == ("local/new/my-rules", ("2.0", "new"))
    assert run("new", "-o", "my rules.yaml").exit == 2


def test_an_index_lists_its_templates_to_be_deleted_and_moved(here: Path) -> None:
    source = safetensors(here / "old.safetensors", mixtral())
    assert run("new", "toy/v2/one", "--index", source).exit == 0
    path = here / "rules/toy/v2/one.yaml"
    keep = load_files([path])[0].model.keep
    assert "model.layers.{n:int}.block_sparse_moe.experts.{e:int}.w1.weight" in keep
    # as it is, it keeps every key
    assert run("plan", source, "--rules", path).exit == 0


def test_hostile_names_of_a_checkpoint_are_kept_as_they_are(here: Path) -> None:
    names = [
        'a"b',
        "a'b",
        "{x}",
        "a\nb",
        "@a",
        "x@y.z",
        "a: b # c",
        "*",
        "",
        "é\x85\u2028",
        "-",
        "n",
    ]
    source = safetensors(here / "odd.safetensors", {f"m.{n}": ("F32", [1]) for n in names})
    done = run("new", "toy/v2/odd", "--index", source, "--format", "json")
    assert done.exit == 0, done.err
    assert json.loads(done.out)["counts"]["keep"] == len(names)
    planned = run("plan", source, "--rules", here / "rules/toy/v2/odd.yaml")
    assert planned.exit == 0, planned.err


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_that_cannot_be_written_is_said(here: Path) -> None:
    here.chmod(0o500)
    done = run("new", "toy/v2/one")
    here.chmod(0o700)
    assert (done.exit, "M115" in done.err) == (2, True)


def test_a_folder_in_the_way_is_said(here: Path) -> None:
    (here / "rules").write_text("")
    done = run("new", "toy/v2/one")
    assert (done.exit, "M115" in done.err) == (2, True)
    assert sorted(files(here)) == ["rules"]


def test_python_answers_with_the_same(here: Path) -> None:
    found = migrate.new("toy/v2/one", index=HUB)
    assert found.files == ("rules/toy/layouts.yaml", "rules/toy/v2/one.yaml")
    assert (found.counts.rules, found.counts.tests) == (0, 1)
    with pytest.raises(migrate.MigrateError, match="M904"):
        migrate.new("toy/v2/one")
