"""Side files that change with the checkpoint, edge by edge, and return to the byte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import MOVE, files, fits, folder, refusal, round_trip, side, small, stamp
from commandline import contents, done, rules, run, safetensors

# --- edges one after the other

LAYOUTS = """
lineage: demo
title: Demo
layouts:
  v1: {title: one, detect: {present: "x.{n:int}"}}
  v2: {title: two, detect: {present: whole}}
  v3: {title: three, detect: {present: "y.{n:int}"}}
"""
FIRST = """
id: demo/v2/stack
title: t
lineage: demo
edge: [v1, v2]
params: {n: {type: int, config: parts}}
files: {config.json: {parts: null, model: {halves: $n, kind: v2}, old: null}}
rules: [{name: stack, from: "x.{n:int}", to: whole, via: [{stack: {over: n, count: $n}}]}]
"""
SECOND = """
id: demo/v3/unbind
title: t
lineage: demo
edge: [v2, v3]
params:
  n: {type: int, config: model.halves, shape: {key: whole, dim: 0}}
  wide: {type: int, shape: {key: whole, dim: 1}}
files: {config.json: {model: {halves: null, wide: $wide}}}
rules: [{name: unbind, from: whole, to: "y.{n:int}", via: [{unbind: {into: n, count: $n}}]}]
"""


@pytest.fixture
def pack(tmp_path: Path) -> Path:
    home = tmp_path / "pack" / "demo"
    for name, text in (
        ("layouts.yaml", LAYOUTS),
        ("v2/stack.yaml", FIRST),
        ("v3/unbind.yaml", SECOND),
    ):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(text)
    return home.parent


CONFIG = {
    "a": None,
    "parts": 2,
    "old": {"z": [None, 1.5], "b": 1e-05},
    "model": {"name": "m"},
    "b": True,
}


def parts(path: Path, **changes: Any) -> Path:
    return folder(
        path,
        {f"x.{n}": ("F32", [3]) for n in range(2)},
        config={**CONFIG, **changes},
        tokenizer="{ }",
    )


def test_an_edge_reads_what_the_edge_before_it_left(tmp_path: Path, pack: Path) -> None:
    source = parts(tmp_path / "old")
    new = round_trip(source, tmp_path, "--to", "demo@v3", "--rules", pack, back=("--rules", pack))
    assert side(new) == {"a": None, "model": {"name": "m", "kind": "v2", "wide": 3}, "b": True}
    assert list(side(new)) == ["a", "model", "b"]
    assert (new / "tokenizer.json").read_text() == "{ }"
    assert [entry["params"] for entry in stamp(new)["applied"]] == [{"n": 2}, {"n": 2, "wide": 3}]


def test_a_name_that_means_another_number_on_each_edge_is_shown_twice(
    tmp_path: Path, pack: Path
) -> None:
    second = SECOND.replace(
        "config: model.halves, shape: {key: whole, dim: 0}", "shape: {key: whole, dim: 1}"
    )
    second = second.replace("unbind: {into: n, count: $n}", "unbind: {into: n, dim: 1, count: $n}")
    (pack / "demo" / "v3" / "unbind.yaml").write_text(second)
    document = done(
        "plan", parts(tmp_path / "old"), "--to", "demo@v3", "--rules", pack, "--format", "json"
    ).json
    assert document["params"] == {"n": 2, "n (demo v2 -> v3)": 3, "wide": 3}
    round_trip(
        tmp_path / "old", tmp_path, "--to", "demo@v3", "--rules", pack, back=("--rules", pack)
    )


def test_each_edge_is_undone_by_itself_and_in_order(tmp_path: Path, pack: Path) -> None:
    source = parts(tmp_path / "old")
    done("apply", source, "-o", tmp_path / "v2", "--to", "demo@v2", "--rules", pack)
    done("apply", tmp_path / "v2", "-o", tmp_path / "v3", "--to", "demo@v3", "--rules", pack)
    done("downgrade", tmp_path / "v3", "-o", tmp_path / "again", "--rules", pack)
    assert files(tmp_path / "again") == files(tmp_path / "v2")
    done("downgrade", tmp_path / "again", "-o", tmp_path / "back", "--rules", pack)
    assert files(tmp_path / "back") == files(source)
    done("downgrade", tmp_path / "v3", "-o", tmp_path / "both", "--to", "demo@v1", "--rules", pack)
    assert files(tmp_path / "both") == files(source)
    # and up again, from a checkpoint that has been down
    done("apply", tmp_path / "back", "-o", tmp_path / "up", "--to", "demo@v3", "--rules", pack)
    assert files(tmp_path / "up") == files(tmp_path / "v3")


def test_the_plan_shows_what_changes_in_side_files(tmp_path: Path, pack: Path) -> None:
    source = parts(tmp_path / "old")
    (source / "pytorch_model.bin").write_text("x")
    document = done("plan", source, "--to", "demo@v3", "--rules", pack, "--format", "json").json
    fits(document, "plan")
    assert document["left_out"] == ["pytorch_model.bin"]
    first, second = document["patched"]
    assert (first["path"], first["change"], first["leg"]) == (
        "config.json",
        "changed",
        "demo v1 -> v2",
    )
    assert {"at": "parts", "before": 2} in first["changes"]
    assert {"at": "model.halves", "after": 2} in first["changes"]
    assert second["changes"] == [
        {"at": "model.halves", "before": 2},
        {"at": "model.wide", "after": 3},
    ]
    text = done("plan", source, "--to", "demo@v3", "--rules", pack).out
    assert "config.json: parts: 2 → nothing" in text
    assert "carried along: config.json, tokenizer.json" in text
    assert "left behind: pytorch_model.bin" in text


def test_the_stamp_fits_its_schema_and_history_names_the_files(tmp_path: Path, pack: Path) -> None:
    done(
        "apply", parts(tmp_path / "old"), "-o", tmp_path / "new", "--to", "demo@v3", "--rules", pack
    )
    fits(stamp(tmp_path / "new"), "history")
    document = fits(done("history", tmp_path / "new", "--format", "json").json, "history")
    assert document["applied"][0]["files"]["config.json"][0] == {
        "at": ["parts"],
        "was": 2,
        "next": "old",
    }
    assert "changed config.json" in done("history", tmp_path / "new").out


def test_a_saved_plan_does_not_run_over_another_configuration(tmp_path: Path, pack: Path) -> None:
    source = parts(tmp_path / "old")
    done("plan", source, "--to", "demo@v3", "--rules", pack, "-o", tmp_path / "plan.json")
    parts_again = json.dumps({**CONFIG, "old": 5}, indent=2)
    (source / "config.json").write_text(parts_again)
    found = refusal("apply", tmp_path / "plan.json", "-o", tmp_path / "new", exit=2)
    assert found["code"] == "M903"


def test_an_edit_after_the_migration_survives_and_one_at_a_patched_place_is_said(
    tmp_path: Path, pack: Path
) -> None:
    done(
        "apply", parts(tmp_path / "old"), "-o", tmp_path / "new", "--to", "demo@v3", "--rules", pack
    )
    config = side(tmp_path / "new")
    config["mine"], config["model"]["kind"] = 7, "edited"
    (tmp_path / "new" / "config.json").write_text(json.dumps(config))
    answer = done(
        "downgrade", tmp_path / "new", "-o", tmp_path / "back", "--rules", pack, "--format", "json"
    ).json
    assert side(tmp_path / "back") == {**CONFIG, "mine": 7}
    assert not answer["downgrade"]["exact"]
    assert any(
        "config.json was edited since, at model.kind" in reason
        for reason in answer["downgrade"]["because"]
    )


def test_without_a_stamp_a_param_is_read_back_and_the_rest_is_said_to_stay(
    tmp_path: Path, pack: Path
) -> None:
    done(
        "apply", parts(tmp_path / "old"), "-o", tmp_path / "new", "--to", "demo@v2", "--rules", pack
    )
    (tmp_path / "new" / "migrate.history.json").unlink()
    answer = done(
        "downgrade",
        tmp_path / "new",
        "-o",
        tmp_path / "back",
        "--to",
        "demo@v1",
        "--rules",
        pack,
        "--format",
        "json",
    ).json
    assert [w["code"] for w in answer["warnings"]] == ["M512"]
    assert "config.json" in answer["warnings"][0]["message"]
    assert answer["downgrade"]["exact"] is False
    assert any(
        "config.json is not as it was before demo/" in reason
        for reason in answer["downgrade"]["because"]
    ), answer["downgrade"]
    assert contents(tmp_path / "back") == contents(tmp_path / "old")
    assert files(tmp_path / "back") == files(tmp_path / "new")


def test_a_stamp_that_holds_no_change_says_that_there_was_none(tmp_path: Path) -> None:
    rule = rules(tmp_path, "files: {config.json: {gone: null, kind: v2}}\n" + MOVE)
    new = round_trip(small(tmp_path / "old", config={"kind": "v2"}), tmp_path, "--rules", rule)
    answer = done("plan", new, "--downgrade", "--rules", rule, "--format", "json").json
    assert answer["warnings"] == answer["patched"] == []
    assert answer["downgrade"]["exact"]


# --- files that come and go


def test_a_file_that_a_patch_makes_goes_again(tmp_path: Path) -> None:
    rule = rules(
        tmp_path,
        "files: {config.json: {rows: 4, none: null}, other.json: {gone: null}, 'sub/x.json': {a: "
        "1}}\n" + MOVE,
    )
    new = round_trip(small(tmp_path / "old"), tmp_path, "--rules", rule)
    assert (new / "config.json").read_text() == '{\n  "rows": 4\n}\n'
    assert not (new / "other.json").exists()
    assert json.loads((new / "sub" / "x.json").read_text()) == {"a": 1}
    assert not (tmp_path / "back" / "sub").exists()


def test_a_patch_that_changes_nothing_changes_no_byte(tmp_path: Path) -> None:
    written = '{"rows":4 ,\n "x": 1.50}'
    source = small(tmp_path / "old", config=written)
    done(
        "apply",
        source,
        "-o",
        tmp_path / "new",
        "--rules",
        rules(tmp_path, "files: {config.json: {rows: 4, y: null}}\n" + MOVE),
    )
    assert (tmp_path / "new" / "config.json").read_text() == written
    assert "files" not in stamp(tmp_path / "new")["applied"][0]


def test_a_single_file_carries_nothing_and_the_plan_says_so(tmp_path: Path) -> None:
    rule = rules(tmp_path, "files: {config.json: {rows: 4}}\n" + MOVE)
    done(
        "apply",
        small(tmp_path / "old", config={}),
        "-o",
        tmp_path / "new.safetensors",
        "--rules",
        rule,
    )
    document = done(
        "plan",
        small(tmp_path / "o", config={}),
        "--rules",
        rule,
        "--single-file",
        "--format",
        "json",
    ).json
    assert document["notes"][0] == "demo/v2/rules changes config.json, which only a folder has"
    assert [note.partition(":")[0] for note in document["notes"][1:]] == ["only names change"]
    assert document["patched"] == document["side_files"] == []
    alone = safetensors(tmp_path / "alone.safetensors", {"old.weight": ("F32", [4, 2])})
    done("apply", alone, "-o", tmp_path / "made", "--rules", rule)
    assert not (tmp_path / "made" / "config.json").exists()


def test_files_that_a_folder_never_carries_are_listed(tmp_path: Path) -> None:
    source = small(tmp_path / "old", config={}, generation_config={})
    for name in ("pytorch_model.bin", "model.gguf", "old.bin.index.json"):
        (source / name).write_text("x")
    (source / ".git").mkdir()
    (source / ".git" / "HEAD").write_text("x")
    found = done("inspect", source, "--format", "json").json
    assert [f["path"] for f in found["side_files"]] == ["config.json", "generation_config.json"]
    assert set(found["left_out"]) == {
        ".git/",
        "pytorch_model.bin",
        "model.gguf",
        "old.bin.index.json",
    }


@pytest.mark.parametrize(
    "name",
    [
        "../config.json",
        "/etc/x",
        "a/../b.json",
        "./config.json",
        "model.safetensors",
        "migrate.history.json",
        "x.index.json",
    ],
)
def test_a_rule_file_cannot_change_what_is_no_side_file(tmp_path: Path, name: str) -> None:
    rule = rules(tmp_path, f"files: {{'{name}': {{a: 1}}}}\n" + MOVE)
    assert refusal("plan", small(tmp_path / "old"), "--rules", rule, exit=2)["code"] == "M114"


@pytest.mark.parametrize("patch", ["[1]", "text"])
def test_a_patch_is_an_object(tmp_path: Path, patch: str) -> None:
    rule = rules(tmp_path, f"files: {{config.json: {patch}}}\n" + MOVE)
    assert refusal("plan", small(tmp_path / "old"), "--rules", rule, exit=2)["code"] == "M106"


@pytest.mark.parametrize("step", [{"at": ["a"], "was": 1}, {"at": [], "was": '{"a": 1}'}])
@pytest.mark.parametrize(
    "path", ["../evil.json", "/tmp/evil.json", "model.safetensors", "absent.json"]
)
def test_a_stamp_cannot_make_files(tmp_path: Path, path: str, step: Any) -> None:
    rule = rules(tmp_path, "files: {config.json: {rows: 4}}\n" + MOVE)
    done("apply", small(tmp_path / "old", config={}), "-o", tmp_path / "new", "--rules", rule)
    text = stamp(tmp_path / "new")
    text["applied"][0]["files"] = {path: [step]}
    (tmp_path / "new" / "migrate.history.json").write_text(json.dumps(text))
    run("downgrade", tmp_path / "new", "-o", tmp_path / "back", "--rules", rule)
    names = {p.name for p in tmp_path.rglob("*")}
    assert "evil.json" not in names
    assert "absent.json" not in names
    assert not Path("/tmp/evil.json").exists()


# --- lists of names


def test_a_list_of_names_is_renamed_as_keys_are(tmp_path: Path) -> None:
    keys = [
        f"model.layers.{n}.{m}.weight" for n in range(2) for m in ("mlp.gate", "mlp.up", "attn.q")
    ] + ["lm_head.weight"]
    ignored = [
        "model.layers.0.mlp.gate",
        "model.layers.1.mlp",
        "lm_head",
        "re:.*vision.*",
        "absent",
        "model.layers.1",
    ]
    config = {"q": {"ignore": ignored, "targets": ["q", "mlp.up"], "none": None}}
    text = (
        'keep: ["lm_head.weight"]\nnames: [config.json#q.ignore, config.json#q.targets, '
        "config.json#q.none, config.json#q.gone]\nrules:\n"
    )
    text += (
        '  - {name: up, from: "model.layers.{n:int}.mlp.up.weight", to: "h.{n}.ffn.up.weight"}\n'
    )
    text += (
        '  - {name: gate, from: "model.layers.{n:int}.mlp.gate.weight", to: '
        '"h.{n}.router.weight"}\n'
    )
    text += (
        '  - {name: attn, from: "model.layers.{n:int}.attn.q.weight", to: '
        '"h.{n}.attn.query.weight"}\n'
    )
    source = folder(tmp_path / "old", {key: ("F32", [2]) for key in keys}, config=config)
    rule = rules(tmp_path, text)
    found = done("plan", source, "--rules", rule, "--format", "json", exit=3).json["diagnostics"]
    assert [d["code"] for d in found] == ["M514"], "gate and up part below model.layers.1.mlp"
    ignored.remove("model.layers.1.mlp")
    source = folder(tmp_path / "good", {key: ("F32", [2]) for key in keys}, config=config)
    new = round_trip(source, tmp_path, "--rules", rule)
    assert side(new)["q"] == {
        "ignore": ["h.0.router", "lm_head", "re:.*vision.*", "absent", "h.1"],
        "targets": ["query", "ffn.up"],
        "none": None,
    }
    notes = done("plan", source, "--rules", rule, "--format", "json").json["notes"]
    assert notes.pop().startswith("only names change: ")
    assert notes == [
        "config.json#q.ignore: re:.*vision.*, absent stay as they are: no key is below them"
    ]
    (new / "migrate.history.json").unlink()
    done("downgrade", new, "-o", tmp_path / "bare", "--rules", rule)
    assert side(tmp_path / "bare") == side(source)


def test_a_list_of_names_that_is_none_is_refused(tmp_path: Path) -> None:
    source = small(tmp_path / "old", config={"ignore": ["a", 1]})
    found = refusal(
        "plan", source, "--rules", rules(tmp_path, "names: [config.json#ignore]\n" + MOVE), exit=3
    )
    assert found["code"] == "M515"
    assert "config.json#ignore" in found["message"]


def test_a_param_whose_place_the_edge_emptied_is_asked_for_with_that_reason(tmp_path: Path) -> None:
    head = "params: {n: {type: int, config: rows}}\nfiles: {config.json: {rows: null}}\n"
    cut = (
        "rules: [{name: cut, from: old.weight, to: 'new.{i:int}.weight', via: [{split: {into: "
        "i, dim: 0, count: $n}}]}]\n"
    )
    rule = rules(tmp_path, head + cut)
    done(
        "apply",
        small(tmp_path / "old", config={"rows": 2}),
        "-o",
        tmp_path / "new",
        "--rules",
        rule,
    )
    (tmp_path / "new" / "migrate.history.json").unlink()
    found = refusal("downgrade", tmp_path / "new", "-o", tmp_path / "back", "--rules", rule, exit=2)
    assert (found["code"], found["help"]) == ("M509", "--set n=…, an integer")
    assert any(
        "it was at config.json#rows" in n
        and "changes on the way there, and no stamp records it" in n
        for n in found["notes"]
    )
    done("downgrade", tmp_path / "new", "-o", tmp_path / "back", "--rules", rule, "--set", "n=2")
    assert contents(tmp_path / "back") == contents(tmp_path / "old")
    # where the patch leaves the place alone it is the usual reason
    other = rules(tmp_path, head.replace("rows: null", "cols: null") + cut)
    found = refusal("downgrade", tmp_path / "new", "-o", tmp_path / "b2", "--rules", other, exit=2)
    assert any(
        "its place in the configuration is config.json#rows, and nothing is there" in n
        for n in found["notes"]
    )
