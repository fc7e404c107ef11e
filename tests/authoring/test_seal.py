"""Locks of lineages: what is sealed cannot change unnoticed, in any way in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import migrate
from migrate.core.errors import Diagnostic, MigrateError
from migrate.rules.files import shipped_folder
from migrate.rules.locks import read_lock

LAYOUTS = """\
lineage: toy
title: A toy
layouts:
  old:
    title: old names
    detect: {present: ["{p...}.old.weight"]}
  new:
    title: new names
    detect: {present: ["{p...}.new.weight"]}
"""
RULE = """\
id: toy/new/rename
title: Rename one key
lineage: toy
edge: [old, new]
requires: ">=0.1"
rules:
  - name: weight
    from: "{p...}.old.weight"
    to: "{p}.new.weight"
    via: [{transpose: {dims: [0, 1]}}]
tests:
  - name: a key of two
    given: {m.old.weight: {dtype: float32, values: [[1, 2], [3, 4]]}}
    expect: {m.new.weight: {dtype: float32, values: [[1, 3], [2, 4]]}}
"""
WEIGHT = np.arange(4, dtype=np.float32).reshape(2, 2)


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    home = tmp_path / "rules" / "toy"
    (home / "new").mkdir(parents=True)
    (home / "layouts.yaml").write_text(LAYOUTS)
    (home / "new" / "rename.yaml").write_text(RULE)
    (tmp_path / "old").mkdir()
    save_file({"m.old.weight": WEIGHT}, tmp_path / "old" / "model.safetensors")
    return home


def edit(file: Path, before: str, after: str) -> None:
    text = file.read_text()
    assert before in text
    file.write_text(text.replace(before, after))


def refused(call: Any, *args: Any, **options: Any) -> list[Diagnostic]:
    with pytest.raises(MigrateError) as caught:
        call(*args, **options)
    return caught.value.diagnostics


def plan(toy: Path, **options: Any) -> migrate.Plan:
    rules = options.pop("rules", toy.parent)
    return migrate.plan(toy.parents[1] / "old", rules=rules, **options)


def test_the_lock_holds_hashes_of_meanings_sorted_under_their_sum(toy: Path) -> None:
    report = migrate.seal(toy)
    lines = (toy / "rules.lock").read_text().splitlines()
    assert [line.split(" ")[1] for line in lines[1:]] == ["layouts.yaml", "toy/new/rename"]
    assert lines[0] == report.lineages[0].sum
    assert report.lineages[0].state == "sealed"
    again = migrate.seal(toy)
    assert again.lineages[0].state == "unchanged"
    assert again.lineages[0].sum == lines[0]
    assert migrate.seal(toy, check=True).exit == 0


def test_prose_tests_comments_and_order_may_change(toy: Path) -> None:
    migrate.seal(toy)
    rule = toy / "new" / "rename.yaml"
    edit(rule, "title: Rename one key", "title: Another title  # and a comment\nwhy: so")
    edit(rule, "a key of two", "another name")
    edit(toy / "layouts.yaml", "title: new names", "title: other words\n    note: a word")
    assert migrate.seal(toy, check=True).exit == 0
    assert plan(toy, to="toy@new").report.rows[0].rule == "weight"


@pytest.mark.parametrize("way", ["plan", "apply", "attach", "named file", "verify", "load"])
def test_a_changed_file_is_refused_in_every_way_in(toy: Path, tmp_path: Path, way: str) -> None:
    import torch

    new = tmp_path / "before"
    migrate.apply(tmp_path / "old", new, rules=toy.parent, to="toy@new")
    migrate.seal(toy)
    rule = toy / "new" / "rename.yaml"
    edit(rule, "    via: [{transpose: {dims: [0, 1]}}]\n", "")
    old, goal = tmp_path / "old", {"rules": toy.parent, "to": "toy@new"}
    module = torch.nn.Module()
    module.m = torch.nn.Module()
    module.m.new = torch.nn.Linear(2, 2, bias=False)
    if way == "plan":
        found = refused(plan, toy, to="toy@new")
    elif way == "apply":
        found = refused(migrate.apply, old, tmp_path / "out", **goal)
    elif way == "attach":
        found = refused(migrate.attach, module, **goal)
    elif way == "named file":
        found = refused(plan, toy, rules=rule)
    elif way == "load":
        found = refused(migrate.load, module, old, **goal)
    else:
        found = refused(migrate.verify, new, source=old, rules=toy.parent)
    assert [d.code for d in found] == ["M521"]
    assert not (tmp_path / "out").exists()
    sealed = read_lock(toy)
    assert sealed is not None
    notes = found[0].notes
    assert sealed.entries["toy/new/rename"][0] in notes[0]
    assert "m1:" in notes[1]
    assert notes[2] == 'rule `weight`, via: [["transpose", {"dims": [0, 1]}]] → nothing'
    assert found[0].spans[0].file.endswith("rename.yaml")


@pytest.mark.parametrize("way", ["plan", "apply", "attach", "load", "verify", "from", "command"])
def test_a_sealed_file_under_another_id_is_refused_by_its_path_too(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    import torch

    rule, old, new = toy / "new" / "rename.yaml", tmp_path / "old", tmp_path / "before"
    migrate.apply(old, new, rules=rule)
    migrate.seal(toy)
    edit(rule, "    via: [{transpose: {dims: [0, 1]}}]\n", "")
    edit(rule, "toy/new/rename", "toy/new/renamed")
    module = torch.nn.Module()
    module.m = torch.nn.Module()
    module.m.new = torch.nn.Linear(2, 2, bias=False)
    if way == "plan":
        found = refused(plan, toy, rules=rule)
    elif way == "apply":
        found = refused(migrate.apply, old, tmp_path / "out", rules=rule)
    elif way == "attach":
        found = refused(migrate.attach, module, rules=rule)
    elif way == "load":
        found = refused(migrate.load, module, old, rules=rule)
    elif way == "verify":
        found = refused(migrate.verify, new, source=old, rules=rule)
    elif way == "from":
        # by a path that names no folder, and by a link from elsewhere
        (tmp_path / "link.yaml").symlink_to(rule)
        refused(plan, toy, rules=tmp_path / "link.yaml")
        monkeypatch.chdir(rule.parent)
        found = refused(plan, toy, rules="rename.yaml")
    else:
        run = [sys.executable, "-m", "migrate", "plan", str(old), "--rules", str(rule)]
        told = subprocess.run(run, capture_output=True, text=True, check=False)
        assert told.returncode == 2
        assert "error[M521]: `toy/new/rename` means something else than when sealed" in (
            told.stdout + told.stderr
        )
        return
    assert [d.code for d in found] == ["M521"]
    assert not (tmp_path / "out").exists()
    sealed = read_lock(toy)
    assert sealed is not None
    assert found[0].notes == (
        f"sealed as {sealed.entries['toy/new/rename'][0]}",
        found[0].notes[1],
        'id: "toy/new/rename" → "toy/new/renamed"',
        'rule `weight`, via: [["transpose", {"dims": [0, 1]}]] → nothing',
    )
    assert "it is now m1:" in found[0].notes[1]


def test_a_file_given_by_path_is_refused_where_a_sealed_one_beside_it_is_gone(toy: Path) -> None:
    more = RULE.replace("toy/new/rename", "toy/new/bias").replace("weight", "bias")
    (toy / "new" / "bias.yaml").write_text(more)
    migrate.seal(toy)
    plan(toy, rules=toy / "new" / "rename.yaml")
    # the id counts, not the name of the file
    (toy / "new" / "bias.yaml").rename(toy / "new" / "other.yaml")
    plan(toy, rules=toy / "new" / "rename.yaml")
    (toy / "new" / "other.yaml").unlink()
    (gone,) = refused(plan, toy, rules=toy / "new" / "rename.yaml")
    assert (gone.code, gone.message) == ("M521", "`toy/new/bias` was sealed and is gone")


def test_a_sealed_file_in_a_deeper_folder_is_held_against_the_lock(toy: Path) -> None:
    deep = toy / "new" / "more" / "still"
    deep.mkdir(parents=True)
    rule = (toy / "new" / "rename.yaml").rename(deep / "rename.yaml")
    migrate.seal(toy)
    edit(rule, "name: weight", "name: height")
    for options in ({"rules": rule}, {"to": "toy@new"}):
        assert [d.code for d in refused(plan, toy, **options)] == ["M521"]


def test_rule_files_without_a_lock_near_have_nothing_beside_them_read(
    toy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from migrate.rules import locks

    monkeypatch.setattr(locks, "files_below", None)
    monkeypatch.setattr(locks, "read_lock", None)
    assert plan(toy, rules=toy / "new" / "rename.yaml").report.rows[0].rule == "weight"


def test_changed_layouts_and_files_that_are_gone_are_refused(toy: Path) -> None:
    migrate.seal(toy)
    edit(toy / "layouts.yaml", "{p...}.new.weight", "{p...}.new.bias")
    (layouts,) = refused(plan, toy, to="toy@new")
    assert layouts.code == "M521"
    assert "layouts mean" in layouts.message
    assert any("layout `new`, detect.present" in note for note in layouts.notes)
    edit(toy / "layouts.yaml", "{p...}.new.bias", "{p...}.new.weight")
    (toy / "new" / "rename.yaml").rename(toy.parents[1] / "elsewhere.yaml")
    (gone,) = refused(plan, toy, to="toy@new")
    assert gone.code == "M521"
    assert "`toy/new/rename` was sealed and is gone" in gone.message


def test_new_files_are_free_until_they_are_sealed(toy: Path) -> None:
    migrate.seal(toy)
    more = RULE.replace("toy/new/rename", "toy/new/bias").replace("weight", "bias")
    more = more.replace("    from:", "    optional: true\n    from:")
    (toy / "new" / "bias.yaml").write_text(more)
    checked = migrate.seal(toy, check=True)
    assert checked.exit == 0
    assert checked.lineages[0].state == "open"
    assert checked.lineages[0].new == ("toy/new/bias",)
    edit(toy / "new" / "bias.yaml", "name: bias", "name: offset")
    plan(toy, to="toy@new")
    migrate.seal(toy)
    edit(toy / "new" / "bias.yaml", "name: offset", "name: bias")
    notes = next(d.notes for d in refused(plan, toy, to="toy@new"))
    assert notes[2:] == ("rule `offset` is gone", "rule `bias` is new")


def test_sealing_again_needs_a_word_where_something_changed(toy: Path) -> None:
    migrate.seal(toy)
    edit(toy / "new" / "rename.yaml", "    from:", "    optional: true\n    from:")
    lock = (toy / "rules.lock").read_bytes()
    checked = migrate.seal(toy, check=True)
    assert checked.exit == 1
    assert checked.lineages[0].state == "changed"
    assert [d.code for d in checked.diagnostics] == ["M521"]
    assert [d.code for d in refused(migrate.seal, toy)] == ["M521"]
    assert (toy / "rules.lock").read_bytes() == lock
    migrate.seal(toy, replace=True)
    assert (toy / "rules.lock").read_bytes() != lock
    assert migrate.seal(toy, check=True).exit == 0


def test_what_is_not_ready_is_not_sealed(toy: Path) -> None:
    rule = toy / "new" / "rename.yaml"
    whole = rule.read_text()
    rule.write_text(whole[: whole.index("tests:")])
    found = refused(migrate.seal, toy)
    assert {d.code for d in found} == {"M523"}
    assert "has no tests" in found[0].message
    assert not (toy / "rules.lock").exists()
    rule.write_text(whole.replace("[0, 1]", "[0, 0]"))
    assert {d.code for d in refused(migrate.seal, toy)} == {"M308"}
    assert not (toy / "rules.lock").exists()


def test_a_guess_of_what_stays_keeps_a_lineage_from_being_sealed(toy: Path) -> None:
    migrate.seal(toy)
    before = (toy / "rules.lock").read_text()
    rule = next(toy.glob("*/*.yaml"))
    edit(rule, "rules:\n", 'keep: ["other.w"]\nguessed: ["other.w"]\nrules:\n')
    (found,) = refused(migrate.seal, toy, replace=True)
    assert found.code == "M523"
    assert "that `other.w` stays as it is was guessed from names" in found.message
    edit(rule, 'guessed: ["other.w"]\n', "")
    migrate.seal(toy, replace=True)
    assert (toy / "rules.lock").read_text() != before
    # a guess is no meaning
    after = (toy / "rules.lock").read_text()
    edit(rule, "rules:\n", 'guessed: ["other.w"]\nrules:\n')
    migrate.seal(toy, check=True)
    assert (toy / "rules.lock").read_text() == after


def test_a_guessed_rule_keeps_a_lineage_from_being_sealed(toy: Path) -> None:
    rule = toy / "new" / "rename.yaml"
    edit(rule, "  - name: weight\n", "  - name: weight\n    guessed: true\n")
    (found,) = refused(migrate.seal, toy)
    assert found.code == "M523"
    assert "rule `weight` was guessed from names" in found.message
    assert found.spans[0].line == rule.read_text().splitlines().index("    guessed: true") + 1
    assert not (toy / "rules.lock").exists()
    edit(rule, "    guessed: true\n", "")
    assert migrate.seal(toy).exit == 0


@pytest.mark.parametrize(
    ("before", "after", "line", "what"),
    [
        ("", "<<<<<<< HEAD\n", 1, "conflict marker"),
        ("toy/new/rename {", "toy/new/other {", 1, "sum"),
        ('"name":"weight"', '"name":"height"', 3, "hash"),
        ("m1:", "m2:", 2, "not a hash"),
    ],
)
def test_a_lock_that_is_none_is_refused_with_its_line(
    toy: Path, before: str, after: str, line: int, what: str
) -> None:
    migrate.seal(toy)
    lock = toy / "rules.lock"
    text = lock.read_text()
    first, rest = text.split("\n", 1)
    lock.write_text(after + text if not before else f"{first}\n{rest.replace(before, after)}")
    for call in (lambda: plan(toy, to="toy@new"), lambda: migrate.seal(toy, check=True)):
        (found,) = refused(call)
        assert found.code == "M522"
        assert what in found.message
        assert found.spans[0].line == line


@pytest.mark.parametrize("marker", ["=======", ">>>>>>> theirs", "||||||| base"])
def test_every_marker_of_a_merge_is_named_wherever_it_stands(toy: Path, marker: str) -> None:
    migrate.seal(toy)
    lock = toy / "rules.lock"
    text = lock.read_text().splitlines()
    lock.write_text("\n".join([*text[:2], marker, *text[2:], ""]))
    before = lock.read_bytes()
    for check in (True, False):
        (found,) = refused(migrate.seal, toy, check=check)
        assert (found.code, found.spans[0].line) == ("M522", 3)
        assert "conflict marker" in found.message
    assert lock.read_bytes() == before


def test_sealing_tells_of_sealed_files_that_are_gone_and_forgets_them_on_request_only(
    toy: Path,
) -> None:
    more = RULE.replace("toy/new/rename", "toy/new/bias").replace("weight", "bias")
    (toy / "new" / "bias.yaml").write_text(more)
    migrate.seal(toy)
    before = (toy / "rules.lock").read_bytes()
    (toy / "new" / "bias.yaml").unlink()
    checked = migrate.seal(toy, check=True)
    assert checked.exit == 1
    assert [d.message for d in checked.diagnostics] == ["`toy/new/bias` was sealed and is gone"]
    assert [d.code for d in refused(migrate.seal, toy)] == ["M521"]
    assert (toy / "rules.lock").read_bytes() == before
    migrate.seal(toy, replace=True)
    assert migrate.seal(toy, check=True).exit == 0


def test_a_lock_that_is_empty_or_has_an_id_twice_is_refused(toy: Path) -> None:
    migrate.seal(toy)
    lock = toy / "rules.lock"
    last = lock.read_text().splitlines(keepends=True)[-1]
    lock.write_text(lock.read_text() + last)
    assert "a second time" in refused(plan, toy, to="toy@new")[0].message
    lock.write_text("")
    assert refused(plan, toy, to="toy@new")[0].code == "M522"


def test_a_superseded_file_undoes_what_it_did_and_does_nothing_else(
    toy: Path, tmp_path: Path
) -> None:
    migrate.seal(toy)
    made = tmp_path / "made"
    migrate.apply(tmp_path / "old", made, rules=toy.parent, to="toy@new")
    better = RULE.replace("toy/new/rename", "toy/new/rename-2").replace(
        "dims: [0, 1]", "dims: [1, 0]"
    )
    better = better.replace("    via: [{transpose: {dims: [1, 0]}}]\n", "")
    better = better.replace("[[1, 3], [2, 4]]", "[[1, 2], [3, 4]]")
    new = toy / "new" / "rename-2.yaml"
    new.write_text(better.replace("edge:", "supersedes: toy/new/rename\nedge:"))
    migrate.seal(toy)
    migrate.apply(tmp_path / "old", tmp_path / "again", rules=toy.parent, to="toy@new")
    read = load_file(tmp_path / "again" / "model.safetensors")
    np.testing.assert_array_equal(read["m.new.weight"], WEIGHT)
    # by the rules of its stamp, both ways of saying it, and no word about other rules
    for number, options in enumerate(({}, {"to": "toy@old"})):
        back = tmp_path / f"back{number}"
        report = migrate.downgrade(made, back, rules=toy.parent, **options)
        assert load_file(back / "model.safetensors")["m.old.weight"].tobytes() == WEIGHT.tobytes()
        assert "M518" not in [d["code"] for d in report.to_json().get("warnings", [])]
    assert migrate.verify(made, source=tmp_path / "old", rules=toy.parent).equal
    edit(new, "supersedes: toy/new/rename\n", "supersedes: toy/new/renam\n")
    (found,) = refused(plan, toy, to="toy@new")
    assert found.code == "M114"
    assert "toy/new/rename" in (found.help or "")


def test_the_command_answers_with_what_it_found_and_imports_no_torch(toy: Path) -> None:
    code = (
        "import sys; from migrate.cli.main import main\n"
        "try: main()\nfinally: assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    run = [sys.executable, "-c", code, "seal", "--rules", str(toy.parent)]
    whole = subprocess.run([*run, "--format", "json"], capture_output=True, text=True, check=False)
    assert whole.returncode == 0, whole.stderr
    answer = json.loads(whole.stdout)
    assert answer["lineages"][0]["state"] == "sealed"
    assert answer["exit"] == 0
    edit(toy / "new" / "rename.yaml", "name: weight", "name: weights")
    found = subprocess.run([*run, "toy", "--check"], capture_output=True, text=True, check=False)
    assert found.returncode == 1
    assert "toy  1 file  is not as it was sealed" in found.stdout
    assert "error[M521]" in found.stdout
    wrong = subprocess.run([*run, "tow"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2
    assert "did you mean `toy`" in wrong.stderr


@pytest.mark.skipif(os.geteuid() == 0, reason="the super-user writes everywhere")
def test_a_read_only_folder_is_told(toy: Path) -> None:
    toy.chmod(0o555)
    try:
        (found,) = refused(migrate.seal, toy)
    finally:
        toy.chmod(0o755)
    assert found.code == "M115"
    assert "rules.lock" in found.message


def test_a_lock_that_cannot_be_written_is_told_and_leaves_nothing(toy: Path) -> None:
    (toy / ".rules.lock.new").mkdir()
    (found,) = refused(migrate.seal, toy)
    assert found.code == "M115"
    assert not (toy / "rules.lock").exists()


def test_the_shipped_rules_are_sealed() -> None:
    report = migrate.seal(rules=shipped_folder(), check=True)
    assert not report.diagnostics, [d.message for d in report.diagnostics]
    assert {one.state for one in report.lineages} == {"unchanged"}
