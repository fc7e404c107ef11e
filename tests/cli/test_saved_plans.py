"""What was reviewed is what runs: a saved plan is planned again and refused when anything that
decides the bytes has changed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commandline import DATA, ROOT, contents, done, environment, mixtral, rules, run, safetensors
from marks import thorough

import migrate
from migrate.core.errors import QuestionError

LOSSY = (
    'id: demo/2/x\ntitle: x\nlineage: demo\nedge: ["1", "2"]\n'
    "rules: [{name: r, from: 'a.{i:int}', to: 'b.{i}', via: [{cast: {to: bfloat16}}]}]\n"
)
RULE = (
    "params: {n: {type: int, default: 2}}\nrules: [{name: r, from: 'a.{i:int}', to: a, via: "
    "[{stack: {over: i, count: $n}}]}]\n"
)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return safetensors(tmp_path / "in.safetensors", {"a.0": ("F32", [2]), "a.1": ("F32", [2])})


@pytest.fixture
def rule(tmp_path: Path) -> Path:
    return rules(tmp_path, RULE)


@pytest.fixture
def plan(tmp_path: Path, source: Path, rule: Path) -> Path:
    done("plan", source, "--rules", rule, "-o", tmp_path / "plan.json", "--set", "n=2")
    return tmp_path / "plan.json"


def refused(plan: Path, out: Path, *, code: str = "M903") -> str:
    result = run("apply", plan, "-o", out, "--format", "json")
    assert (result.exit, result.codes) == (2, [code])
    assert not out.exists()
    assert not out.with_name(out.name + ".migrate-partial").exists()
    return json.dumps(result.json, ensure_ascii=False)


def test_a_plan_runs_from_anywhere_and_gives_what_apply_gives(
    tmp_path: Path, source: Path, rule: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done("plan", source.name, "--rules", rule.name, "-o", "plan.json")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    done("apply", "../plan.json", "-o", "out.safetensors")
    done("apply", source, "-o", "direct.safetensors", "--rules", rule)
    assert Path("out.safetensors").read_bytes() == Path("direct.safetensors").read_bytes()


def test_an_unchanged_plan_of_a_lineage_runs(tmp_path: Path) -> None:
    hub = DATA / "mixtral__v4" / "hub"
    done("plan", hub, "--to", "+1", "-o", tmp_path / "plan.json", "--max-shard-size", "10kB")
    published = done(
        "apply", tmp_path / "plan.json", "-o", tmp_path / "new", "--format", "json"
    ).json
    assert published["digest"] == json.loads((tmp_path / "plan.json").read_text())["digest"]
    assert len(published["files"]) > 1
    assert contents(tmp_path / "new") == contents(DATA / "mixtral__v4" / "v5")


def test_another_checkpoint_is_refused(tmp_path: Path, source: Path, plan: Path) -> None:
    safetensors(source, {"a.0": ("F32", [3]), "a.1": ("F32", [3])})
    assert "changed since: the checkpoint" in refused(plan, tmp_path / "out.safetensors")


def test_other_rules_are_refused(tmp_path: Path, rule: Path, plan: Path) -> None:
    rule.write_text(rule.read_text().replace("to: a,", "to: b,"))
    assert "changed since: the rules" in refused(plan, tmp_path / "out.safetensors")


def test_a_comment_in_the_rules_changes_nothing(tmp_path: Path, rule: Path, plan: Path) -> None:
    rule.write_text(
        "# reviewed\n" + rule.read_text().replace("title: a change", "title: another title")
    )
    done("apply", plan, "-o", tmp_path / "out.safetensors")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"params": {}}, None),
        ({"params": {"n": 3}}, "M"),
        ({"allow": ["drop"]}, "M903"),
        ({"backwards": True}, "M"),
        ({"rules": ["/nowhere.yaml"]}, "M"),
    ],
)
def test_an_edited_question_is_asked_as_it_stands_and_does_not_fit(
    tmp_path: Path, plan: Path, change: dict, said: str | None
) -> None:
    document = json.loads(plan.read_text())
    document["question"].update(change)
    plan.write_text(json.dumps(document))
    result = run("apply", plan, "-o", tmp_path / "out.safetensors", "--format", "json")
    if said is None:
        assert result.exit == 0, "the default is the same value"
        return
    assert result.exit in (2, 3)
    assert all(code.startswith(said) for code in result.codes)
    assert not (tmp_path / "out.safetensors").exists()


def test_other_params_are_refused(tmp_path: Path, source: Path) -> None:
    rule = rules(
        tmp_path,
        "params: {n: {type: int, default: 2}}\nrules: [{name: r, from: 'a.{i:int}', to: 'b.{i}', "
        "where: {i: {max: $n}}}]\n",
    )
    done("plan", source, "--rules", rule, "-o", tmp_path / "plan.json")
    rule.write_text(rule.read_text().replace("default: 2", "default: 5"))
    assert "changed since" in refused(tmp_path / "plan.json", tmp_path / "out.safetensors")


def test_another_shape_of_output_is_refused(tmp_path: Path, plan: Path) -> None:
    assert "--folder" in refused(plan, tmp_path / "folder", code="M115")


@pytest.mark.parametrize(
    "option",
    [
        ["--to", "x"],
        ["--from", "x"],
        ["--rules", "x"],
        ["--set", "n=2"],
        ["--allow", "drop"],
        ["--max-shard-size", "1GB"],
    ],
)
def test_nothing_can_be_added_to_a_saved_plan(
    tmp_path: Path, plan: Path, option: list[str]
) -> None:
    result = run("apply", plan, "-o", tmp_path / "out.safetensors", *option, "--format", "json")
    assert (result.exit, result.codes) == (2, ["M115"])


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"kind": "plan"}', '{"kind": "plan", "question": {}}', "[" * 100_000],
)
def test_what_is_no_plan_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "plan.json").write_text(text)
    refused(tmp_path / "plan.json", tmp_path / "out", code="M115")


@pytest.mark.parametrize("gone", ["digest", "source", "options", "question"])
def test_a_plan_with_a_part_missing_is_refused(tmp_path: Path, plan: Path, gone: str) -> None:
    document = json.loads(plan.read_text())
    del document[gone]
    plan.write_text(json.dumps(document))
    refused(plan, tmp_path / "out.safetensors", code="M115")


def test_a_plan_of_a_later_format_is_refused(tmp_path: Path, plan: Path) -> None:
    plan.write_text(
        plan.read_text().replace('"format_version": "1.0"', '"format_version": "2.0"', 1)
    )
    refused(plan, tmp_path / "out.safetensors")


def test_a_plan_that_knows_no_sizes_has_to_be_made_anew(tmp_path: Path, plan: Path) -> None:
    document = json.loads(plan.read_text())
    del document["source"]["states"]
    plan.write_text(json.dumps(document))
    assert "an earlier version of migrate wrote it" in refused(plan, tmp_path / "out.safetensors")


@pytest.mark.parametrize(
    "files",
    [
        None, 7, [7], ["in.safetensors"], [{"name": 1, "size": 1, "mtime_ns": 1}],
        [{"name": "a", "size": 1}],
        [{"name": "a", "size": 1, "mtime_ns": "1"}],
    ],
)  # fmt: skip
def test_a_plan_whose_files_are_no_files_is_no_plan(
    tmp_path: Path, plan: Path, files: object
) -> None:
    document = json.loads(plan.read_text())
    document["source"]["states"] = files
    plan.write_text(json.dumps(document))
    refused(plan, tmp_path / "out.safetensors", code="M115")


def test_a_plan_holds_the_sizes_and_times_of_the_files(
    tmp_path: Path, source: Path, plan: Path
) -> None:
    found = os.stat(source)
    files = [{"name": "in.safetensors", "size": found.st_size, "mtime_ns": found.st_mtime_ns}]
    document = json.loads(plan.read_text())
    assert document["source"]["states"] == files
    hub = done("plan", DATA / "mixtral__v4" / "hub", "--to", "+1", "--format", "json").json[
        "source"
    ]
    stood = {
        f.name: (f.stat().st_size, f.stat().st_mtime_ns)
        for f in (DATA / "mixtral__v4" / "hub").iterdir()
    }
    held = {f["name"]: (f["size"], f["mtime_ns"]) for f in hub["states"]}
    assert held == {name: stood[name] for name in held}
    assert {"config.json", "model.safetensors"} <= held.keys()


def touched(path: Path) -> None:
    os.utime(path, ns=(1, path.stat().st_mtime_ns + 1))


def other_bytes(path: Path) -> None:
    raw = path.read_bytes()
    path.write_bytes(raw[:-8] + bytes(8))
    touched(path)


def longer(path: Path) -> None:
    """The same tensors behind a longer header, the time of modification as it was."""
    before, raw = os.stat(path), path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    path.write_bytes(
        (length + 8).to_bytes(8, "little") + raw[8 : 8 + length] + b" " * 8 + raw[8 + length :]
    )
    os.utime(path, ns=(1, before.st_mtime_ns))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (touched, "time of modification"),
        (other_bytes, "time of modification"),
        (longer, "its size was"),
    ],
)
def test_a_source_that_changed_is_refused_unless_that_is_allowed(
    tmp_path: Path, source: Path, plan: Path, change: Callable[[Path], None], why: str
) -> None:
    out, digest = tmp_path / "out.safetensors", json.loads(plan.read_text())["digest"]
    change(source)
    said = refused(plan, out)
    assert f"in.safetensors: {'it was modified or replaced' if 'time' in why else why}" in said
    assert why in said
    assert "--allow changed-source" in said
    published = done("apply", plan, "-o", out, "--allow", "changed-source", "--format", "json").json
    assert (published["digest"], published["copy_of"], published["question"]["allow"]) == (
        digest,
        None,
        [],
    )
    assert any(
        "in.safetensors" in note and why in note and "allowed" in note
        for note in published["notes"]
    )
    done(
        "apply",
        source,
        "-o",
        tmp_path / "direct.safetensors",
        "--rules",
        tmp_path / "rules.yaml",
        "--set",
        "n=2",
    )
    assert contents(out) == contents(tmp_path / "direct.safetensors")


def test_a_changed_source_of_other_tensors_is_refused_whatever_is_allowed(
    tmp_path: Path, source: Path, plan: Path
) -> None:
    safetensors(source, {"a.0": ("F32", [3]), "a.1": ("F32", [3])})
    result = run(
        "apply",
        plan,
        "-o",
        tmp_path / "out.safetensors",
        "--allow",
        "changed-source",
        "--format",
        "json",
    )
    assert (result.exit, result.codes) == (2, ["M903"])


def test_a_side_file_that_changed_is_refused(tmp_path: Path) -> None:
    hub = tmp_path / "hub"
    shutil.copytree(DATA / "mixtral__v4" / "hub", hub)
    done("plan", hub, "--to", "+1", "-o", tmp_path / "plan.json")
    config = hub / "config.json"
    config.write_text(config.read_text().replace('"bos_token_id": 1', '"bos_token_id": 2'))
    touched(config)
    assert "config.json: it was modified or replaced" in refused(
        tmp_path / "plan.json", tmp_path / "new"
    )
    done("apply", tmp_path / "plan.json", "-o", tmp_path / "new", "--allow", "changed-source")


def test_nothing_changed_is_nothing_to_say(tmp_path: Path, plan: Path) -> None:
    published = done(
        "apply",
        plan,
        "-o",
        tmp_path / "out.safetensors",
        "--allow",
        "changed-source",
        "--format",
        "json",
    ).json
    assert published["notes"] == json.loads(plan.read_text())["notes"]


def test_a_plan_runs_on_a_copy_and_says_so(tmp_path: Path, source: Path, plan: Path) -> None:
    copy = Path(shutil.copy(source, tmp_path / "copy.safetensors"))
    source.unlink()
    out = tmp_path / "out.safetensors"
    result = done("apply", plan, "--source", copy, "-o", out)
    assert f"note: read from {copy}, a copy of {source}, which the plan was made for" in result.out
    assert f"migrate verify {out} --source {copy}" in result.err
    published = done(
        "apply", plan, "--source", copy, "-o", tmp_path / "again.safetensors", "--format", "json"
    ).json
    assert (published["source"], published["copy_of"]) == (str(copy), str(source))
    assert published["digest"] == json.loads(plan.read_text())["digest"]
    assert any(str(source) in note for note in published["notes"])
    answer = migrate.apply(plan, tmp_path / "python.safetensors", source=copy)
    assert answer.copy_of == str(source)
    assert (
        out.read_bytes()
        == (tmp_path / "again.safetensors").read_bytes()
        == (tmp_path / "python.safetensors").read_bytes()
    )


def test_a_copy_of_a_folder_has_the_sizes_of_the_plan(tmp_path: Path) -> None:
    hub, copy = DATA / "mixtral__v4" / "hub", tmp_path / "copy"
    done("plan", hub, "--to", "+1", "-o", tmp_path / "plan.json")
    shutil.copytree(hub, copy, copy_function=shutil.copyfile)
    done("apply", tmp_path / "plan.json", "--source", copy, "-o", tmp_path / "new")
    longer(copy / "model.safetensors")
    result = run(
        "apply",
        tmp_path / "plan.json",
        "--source",
        copy,
        "-o",
        tmp_path / "other",
        "--format",
        "json",
    )
    assert (result.exit, result.codes) == (2, ["M903"])
    assert (
        "the copy is not what the plan was made for: model.safetensors: its size was"
        in result.json["diagnostics"][0]["message"]
    )


def test_the_plans_own_place_is_no_copy(tmp_path: Path, source: Path, plan: Path) -> None:
    published = done(
        "apply", plan, "--source", source, "-o", tmp_path / "out.safetensors", "--format", "json"
    ).json
    assert published["copy_of"] is None
    touched(source)
    result = run(
        "apply", plan, "--source", source, "-o", tmp_path / "again.safetensors", "--format", "json"
    )
    assert (result.exit, result.codes) == (2, ["M903"])


def test_a_copy_of_other_tensors_is_refused(tmp_path: Path, plan: Path) -> None:
    copy = safetensors(tmp_path / "copy.safetensors", {"a.0": ("F32", [2]), "b.1": ("F32", [2])})
    result = run(
        "apply", plan, "--source", copy, "-o", tmp_path / "out.safetensors", "--format", "json"
    )
    assert result.exit in (2, 3)
    assert not (tmp_path / "out.safetensors").exists()


@pytest.mark.parametrize(
    ("verb", "options"),
    [
        ("apply", ("--allow", "changed-source")), ("plan", ("--allow", "changed-source")),
        ("inspect", ("--allow", "changed-source")),
        ("apply", ("--source", "copy.safetensors")),
    ],
)  # fmt: skip
def test_what_a_saved_plan_takes_is_for_saved_plans(
    tmp_path: Path, source: Path, rule: Path, verb: str, options: tuple[str, ...]
) -> None:
    out = (
        ("-o", tmp_path / "out.safetensors", "--rules", rule)
        if verb == "apply"
        else ("--rules", rule)
    )
    result = run(verb, source, *out, *options, "--format", "json")
    assert (result.exit, result.codes) == (2, ["M115"])


def test_python_allows_a_changed_source_as_the_command_line_does(
    tmp_path: Path, source: Path, plan: Path
) -> None:
    touched(source)
    with pytest.raises(QuestionError, match=r"allow=\{\"changed-source\"\} runs the plan"):
        migrate.apply(plan, tmp_path / "out.safetensors")
    answer = migrate.apply(plan, tmp_path / "out.safetensors", allow={"changed-source"})
    assert answer.digest == json.loads(plan.read_text())["digest"]
    with pytest.raises(QuestionError, match="saved plan"):
        migrate.apply(
            source, tmp_path / "new.safetensors", rules=[tmp_path / "rules.yaml"], source=source
        )


@pytest.mark.parametrize("form", ["touch", "rename", "same time"])
@pytest.mark.parametrize("how", ["rules", "plan", "folder"])
def test_a_killed_run_is_not_resumed_over_another_source(
    tmp_path: Path, how: str, form: str
) -> None:
    tensors = {f"a.{i}": ("U8", [1 << 20]) for i in range(9)}
    path = tmp_path / "in" / "model.safetensors" if how == "folder" else tmp_path / "in.safetensors"
    out = tmp_path / ("out" if how == "folder" else "out.safetensors")
    safetensors(path, tensors)
    checkpoint: Path = path.parent if how == "folder" else path
    rule = rules(tmp_path, "rules: [{name: r, from: 'a.{i:int}', to: 'b.{i}'}]\n")
    question: dict[str, Any] = {"rules": [rule]}
    if how == "plan":
        done("plan", path, "--rules", rule, "-o", tmp_path / "plan.json")
        checkpoint, question = tmp_path / "plan.json", {"allow": {"changed-source"}}

    def killed(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        migrate.apply(checkpoint, out, progress=killed, **question)
    before = os.stat(path)
    raw = path.read_bytes()
    other = raw[: len(raw) - (9 << 20)] + bytes(9 << 20)
    if form == "rename":
        (tmp_path / "beside").write_bytes(other)
        (tmp_path / "beside").rename(path)
    else:
        path.write_bytes(other)
    if form != "touch":
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(QuestionError) as caught:
        migrate.apply(checkpoint, out, resume=True, **question)
    assert [d.code for d in caught.value.diagnostics] == ["M918"]
    assert f"{path.name}: " in caught.value.diagnostics[0].message
    assert not out.exists()
    shutil.rmtree(tmp_path / f"{out.name}.migrate-partial")
    migrate.apply(checkpoint, out, **question)
    assert {raw for _, _, raw in contents(out).values()} == {bytes(1 << 20)}


def test_a_checkpoint_that_is_gone_is_named(tmp_path: Path, source: Path, plan: Path) -> None:
    shutil.move(source, tmp_path / "moved.safetensors")
    assert str(source) in refused(plan, tmp_path / "out.safetensors", code="M917")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rows", []), ("losses", [{"kind": "drop"}]),
        ("downgrade", {"exact": False, "because": []}), ("notes", ["looks good"]),
        ("checks", [{}]), ("peak_memory", 1), ("unchanged", 7), ("bytes_read", 0),
        ("reviewed_by", "me"), ("rules", []),
    ],
)  # fmt: skip
def test_an_edited_plan_is_refused_and_its_fields_named(
    tmp_path: Path, plan: Path, field: str, value: object
) -> None:
    document = json.loads(plan.read_text())
    document[field] = value
    plan.write_text(json.dumps(document))
    assert f"`{field}`" in refused(plan, tmp_path / "out.safetensors")


def test_a_row_of_a_plan_may_not_say_something_else(tmp_path: Path, plan: Path) -> None:
    plan.write_text(plan.read_text().replace('"to": "a"', '"to": "harmless"'))
    assert "`rows`" in refused(plan, tmp_path / "out.safetensors")


def test_a_plan_without_a_warning_that_came_later_runs_and_warns(tmp_path: Path) -> None:
    import torch

    source, plan = tmp_path / "in.pt", tmp_path / "plan.json"
    torch.save({name: {"a.0": torch.ones(2)} for name in ("model", "ema")}, source)
    rule = rules(tmp_path, "rules: [{name: r, from: 'a.{i:int}', to: 'b.{i}'}]\n")
    done("plan", source, "--rules", rule, "-o", plan)
    saved = json.loads(plan.read_text())
    (warning,) = saved["warnings"]
    assert warning["code"] == "M411"
    for warnings in (
        [warning, warning],
        [{**warning, "code": "M512"}],
        [{**warning, "message": warning["message"].replace("`ema`", "`teacher`")}],
        [{**warning, "notes": ["b.7"]}],
        ["fine"],
        7,
    ):
        plan.write_text(json.dumps({**saved, "warnings": warnings}))
        assert "`warnings`" in refused(plan, tmp_path / "out.pt")
    for number, warnings in enumerate(([], [{**warning, "message": "mind `ema`: 1 of 1"}])):
        plan.write_text(json.dumps({**saved, "warnings": warnings}))
        result = done("apply", plan, "-o", tmp_path / f"out-{number}.pt")
        assert "warning[M411]" in result.err


def test_free_space_and_where_things_lie_are_not_compared(
    tmp_path: Path, source: Path, plan: Path
) -> None:
    document = json.loads(plan.read_text())
    document["free"], document["source"]["path"] = (
        1,
        str(shutil.move(source, tmp_path / "moved.safetensors")),
    )
    plan.write_text(json.dumps(document))
    done("apply", plan, "-o", tmp_path / "out.safetensors")


def test_a_plan_is_never_written_over_what_is_no_plan(
    tmp_path: Path, source: Path, rule: Path
) -> None:
    hub = tmp_path / "hub"
    shutil.copytree(DATA / "mixtral__v4" / "hub", hub)
    index = next(hub.glob("*.index.json"), None)
    (tmp_path / "notes.json").write_text('{"kind": "shopping"}')
    (tmp_path / "link.json").symlink_to(source)
    cases = [
        (source, ["--rules", rule], out)
        for out in (source, tmp_path / "notes.json", tmp_path / "link.json", rule)
    ]
    cases += [
        (hub, ["--to", "v5"], out)
        for out in (hub / "new.json", hub / "config.json", next(hub.glob("*.safetensors")))
    ]
    if index is not None:
        cases += [(index, ["--to", "v5"], out) for out in (index, next(hub.glob("*.safetensors")))]
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    for checkpoint, question, out in cases:
        result = run("plan", checkpoint, *question, "-o", out, "--format", "json")
        assert (result.exit, result.codes) == (2, ["M115"]), out
        assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


def test_a_plan_replaces_a_plan(tmp_path: Path, source: Path, plan: Path) -> None:
    plan.write_text(plan.read_text().replace('"free"', '"older": 1, "free"'))
    done("plan", source, "--rules", tmp_path / "rules.yaml", "-o", plan)
    assert "older" not in json.loads(plan.read_text())


def test_check_answers_with_the_exit_status(tmp_path: Path, source: Path, rule: Path) -> None:
    assert run("plan", source, "--rules", rule, "--check").exit == 1
    assert run("plan", DATA / "mixtral__v4" / "hub", "--to", "v4", "--check").exit == 0


def test_a_plan_that_cannot_be_saved_says_so(tmp_path: Path, source: Path, rule: Path) -> None:
    result = run(
        "plan", source, "--rules", rule, "-o", tmp_path / "no" / "plan.json", "--format", "json"
    )
    assert (result.exit, result.codes) == (2, ["M115"])


@pytest.mark.parametrize("kind", ["file", "folder", "torch"])
def test_the_sizes_of_a_plan_are_those_of_what_is_published(tmp_path: Path, kind: str) -> None:
    source = safetensors(tmp_path / "old.safetensors", {"a.0": ("F32", [2]), "a.1": ("F32", [2])})
    rule = rules(
        tmp_path,
        "rules: [{name: r, from: 'a.{i:int}', to: a, via: [{concat: {over: i, dim: 0}}]}]\n",
    )
    asked = ["--folder"] * (kind == "folder") + ["--output-format", "torch"] * (kind == "torch")
    shown = done("plan", source, "--rules", rule, *asked, "-o", tmp_path / "plan.json").out
    written = "torch" if kind == "torch" else "safetensors"
    assert "2 → 1 tensor, 16 B → " in shown
    assert f" in 1 {written} file\n" in shown
    out = tmp_path / {"file": "new.safetensors", "folder": "new", "torch": "new.pt"}[kind]
    done("apply", tmp_path / "plan.json", "-o", out)
    made = [out] if out.is_file() else list(out.iterdir())
    document = json.loads((tmp_path / "plan.json").read_text())
    assert document["bytes_written"] == sum(one.stat().st_size for one in made)
    assert len(made) == (2 if kind == "folder" else 1)


def test_a_plan_tells_rules_by_line_sizes_and_room(tmp_path: Path) -> None:
    source = safetensors(tmp_path / "old.safetensors", mixtral())
    document = done("plan", source, "--to", "hf-mixtral@v5", "--format", "json").json
    total = sum(len(raw) for _, _, raw in contents(source).values())
    assert document["bytes_read"] == total == document["source"]["bytes"]
    done("apply", source, "-o", tmp_path / "new.safetensors", "--to", "hf-mixtral@v5")
    assert document["bytes_written"] == (tmp_path / "new.safetensors").stat().st_size
    assert document["free"] > 0
    for row in document["rows"]:
        path, line, _ = row["at"].rsplit(":", 2)
        assert (
            f"name: {row['rule']}"
            in (ROOT / "rules" / path).read_text().splitlines()[int(line) - 1]
        )
    assert {row["to"]: row["from"] for row in document["rows"]} == {
        "model.layers.{0,1}.mlp.experts.gate_up_proj": [
            "model.layers.{0,1}.block_sparse_moe.experts.{0,1}.w{1,3}.weight"
        ],
        "model.layers.{0,1}.mlp.experts.down_proj": [
            "model.layers.{0,1}.block_sparse_moe.experts.{0,1}.w2.weight"
        ],
        "model.layers.{0,1}.mlp.gate.weight": ["model.layers.{0,1}.block_sparse_moe.gate.weight"],
    }
    assert document["unchanged"] == len(mixtral()) - 2 * (2 * 3 + 1)


MEASURED = """
import sys, threading, time
from migrate.cli.terminal import private_bytes
peak = 0
def watch():
    global peak
    while True:
        peak = max(peak, private_bytes())
        time.sleep(0.002)
threading.Thread(target=watch, daemon=True).start()
from migrate.cli.main import run
status = run(sys.argv[1:])
print(max(peak, private_bytes()))
sys.exit(status)
"""


@pytest.mark.parametrize(
    "via", thorough([", via: [{transpose: {dims: [0, 1]}}]", ""]), ids=["transpose", "rename"]
)
def test_the_planned_memory_is_about_what_the_run_takes(tmp_path: Path, via: str) -> None:
    source = safetensors(
        tmp_path / "in.safetensors",
        {f"a.{i}": ("BF16", [4096, 2048]) for i in range(6)},
        holes=True,
    )
    rule = rules(tmp_path, f"rules: [{{name: r, from: 'a.{{i:int}}', to: 'b.{{i}}'{via}}}]\n")
    planned = done("plan", source, "--rules", rule, "--format", "json").json["peak_memory"]
    command = [
        sys.executable,
        "-c",
        MEASURED,
        "apply",
        str(source),
        "-o",
        str(tmp_path / "out.safetensors"),
        "--rules",
        str(rule),
        "-q",
    ]
    child = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
    taken = int(child.stdout.splitlines()[-1])
    if taken:
        assert taken / 2 < planned < taken * 2


def test_a_plan_with_losses_runs_as_it_was_reviewed(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lossy.yaml").write_text(LOSSY)
    monkeypatch.chdir(tmp_path)
    done("plan", source, "--rules", "lossy.yaml", "--allow", "lossy", "-o", "plan.json")
    done("apply", "plan.json", "-o", "new.safetensors")


@pytest.mark.parametrize(
    ("change", "runs"),
    [
        ('{name: r, from: "m.{k}", to: "n.{k}"}', "in 1 run"),
        # the output has its own order: what was a run comes apart
        ('{name: r, from: "m.{k}", to: "{k}.m", map: {k: {a: z, b: y}}}', "in 2 runs"),
        ('{name: r, from: "m.{k}", to: "n.{k}", via: [{transpose: {dims: [1, 0]}}]}', None),
    ],
    ids=["renamed", "reordered", "transposed"],
)
def test_a_plan_says_that_names_alone_change(tmp_path: Path, change: str, runs: str | None) -> None:
    given = {"m.a": ("F32", [4, 2]), "m.b": ("F32", [4, 2])}
    source = safetensors(tmp_path / "in.safetensors", given)
    rule = rules(tmp_path, f"rules:\n  - {change}\n")
    notes = done("plan", source, "--rules", rule, "--format", "json").json["notes"]
    assert [note.rpartition(", ")[2] for note in notes if "only names change" in note] == [runs] * (
        runs is not None
    )
