"""Keys that stayed on the way there stay on the way back: files, ranks, folders, archives and state
dicts, without a flag.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from checkpoints import fits, folder, refusal, round_trip, stamp
from commandline import contents, done, rules, safetensors, shards

from migrate import api

MIXED = (
    'keep: ["{p...}.new.weight", "{k...}.bias"]\nrules: [{name: r, from: "{p...}.old.weight", '
    'to: "{p}.new.weight"}]\n'
)
TENSORS = {
    **{f"l.{n}.old.weight": ("F32", [2, 2]) for n in range(4)},
    **{f"l.{n}.new.weight": ("F32", [2, 2]) for n in range(4, 12)},
    "head.bias": ("F32", [3]),
}
KEPT = [["l.{}.new.weight", [[4, 11]]]]


def test_a_mixed_checkpoint_comes_back_as_it_was(tmp_path: Path) -> None:
    rule = rules(tmp_path, MIXED)
    source = folder(tmp_path / "old", TENSORS)
    planned = done("plan", source, "--rules", rule, "--format", "json").json
    assert planned["downgrade"] == {"exact": True, "because": []}
    new = round_trip(source, tmp_path, "--rules", rule)
    assert stamp(new)["applied"][0]["kept"] == KEPT
    assert set(contents(new)) == {*(f"l.{n}.new.weight" for n in range(12)), "head.bias"}
    # the way back has nothing to remember: forwards the rule takes none of what stays
    assert [("kept" in entry) for entry in stamp(tmp_path / "back")["applied"]] == [True, False]


def test_where_nothing_stays_the_stamp_says_nothing(tmp_path: Path) -> None:
    rule = rules(tmp_path, MIXED)
    source = folder(
        tmp_path / "old", {key: spec for key, spec in TENSORS.items() if "new" not in key}
    )
    assert "kept" not in stamp(round_trip(source, tmp_path, "--rules", rule))["applied"][0]


def test_history_names_what_stays_as_its_schema_says(tmp_path: Path) -> None:
    rule = rules(tmp_path, MIXED)
    single = safetensors(tmp_path / "old.safetensors", TENSORS)
    done("apply", single, "-o", tmp_path / "new.safetensors", "--rules", rule)
    document = done("history", tmp_path / "new.safetensors", "--format", "json").json
    assert fits(document, "history")["applied"][0]["kept"] == KEPT
    assert (
        "    stays on a downgrade: l.{}.new.weight\n"
        in done("history", tmp_path / "new.safetensors").out
    )
    done(
        "downgrade",
        tmp_path / "new.safetensors",
        "-o",
        tmp_path / "back.safetensors",
        "--rules",
        rule,
    )
    assert contents(tmp_path / "back.safetensors") == contents(single)


def edges(path: Path) -> Path:
    """A lineage whose first edge leaves some keys as they are, and whose second renames all of
    them.
    """
    texts = {
        "v2/x.yaml": 'edge: [v1, v2]\nkeep: ["{p...}.new"]\nrules: [{name: r, from: "{p...}.old", '
        'to: "{p}.new"}]\n',
        "v3/y.yaml": 'edge: [v2, v3]\nrules: [{name: r, from: "{p...}.new", to: "{p}.newer"}]\n',
        "layouts.yaml": "".join(
            f'  v{n}: {{title: layout {n}, detect: {{present: "{{p...}}.{leaf}"}}}}\n'
            for n, leaf in ((1, "old"), (2, "new"), (3, "newer"))
        ),
    }
    for name, text in texts.items():
        file = path / "demo" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        head = "lineage: demo\ntitle: a change\n" + (
            "ordered: true\nlayouts:\n" if name == "layouts.yaml" else f"id: demo/{name[:-5]}\n"
        )
        file.write_text(head + text)
    return path


def test_over_several_edges_at_once_and_one_after_the_other(tmp_path: Path) -> None:
    pack = ("--rules", edges(tmp_path / "rules"))
    source = folder(tmp_path / "old", {"a.old": ("F32", [2]), "b.new": ("F32", [2])})
    new = round_trip(source, tmp_path, *pack, "--from", "demo@v1", "--to", "demo@v3", back=pack)
    assert [entry.get("kept") for entry in stamp(new)["applied"]] == [["b.new"], None]
    for start, goal, to in ((new, tmp_path / "v2", "v2"), (tmp_path / "v2", tmp_path / "v1", "v1")):
        done("downgrade", start, "-o", goal, *pack, "--to", f"demo@{to}")
        done("verify", goal, "--source", start, *pack)
    assert contents(tmp_path / "v1") == contents(source)


def test_keys_of_ranks_stay_each_in_its_file(tmp_path: Path) -> None:
    source = tmp_path / "old"
    for rank in range(2):
        tensors = {
            "a.old.weight": ("F32", [2], bytes([rank]) * 8),
            "b.new.weight": ("F32", [2], bytes([rank + 8]) * 8),
        }
        safetensors(source / f"consolidated.{rank:02}.safetensors", tensors)
    rule = rules(tmp_path, MIXED)
    done("apply", source, "-o", tmp_path / "new", "--rules", rule)
    assert stamp(tmp_path / "new")["applied"][0]["kept"] == ["b.new.weight@0", "b.new.weight@1"]
    done("downgrade", tmp_path / "new", "-o", tmp_path / "back", "--rules", rule)
    for file in source.iterdir():
        assert contents(tmp_path / "back" / file.name) == contents(file)


def test_shards_and_saved_plans_remember_alike(tmp_path: Path) -> None:
    rule = rules(tmp_path, MIXED)
    halves = [
        {k: v for n, (k, v) in enumerate(TENSORS.items()) if n % 2 == part} for part in range(2)
    ]
    source = shards(tmp_path / "old", halves)
    done("plan", source, "--rules", rule, "-o", tmp_path / "plan.json")
    done("apply", tmp_path / "plan.json", "-o", tmp_path / "new")
    done("apply", source, "-o", tmp_path / "again", "--rules", rule, "--resume")
    assert stamp(tmp_path / "new") == stamp(tmp_path / "again")
    done("plan", "--downgrade", tmp_path / "new", "--rules", rule, "-o", tmp_path / "back.json")
    done("apply", tmp_path / "back.json", "-o", tmp_path / "back")
    assert contents(tmp_path / "back") == contents(source)


def test_a_state_dict_and_the_values_beside_its_tensors(tmp_path: Path) -> None:
    text = 'keep: ["{p...}.new.weight"]\nrules:\n'
    text += '  - {name: r, from: "{p...}.old.weight", to: "{p}.new.weight"}\n'
    text += '  - {name: s, from: "{p...}.old.step", to: "{p}.new.step"}\n'
    rule = rules(tmp_path, text)
    state = {
        f"{m}.{x}": torch.full((2,), n)
        for n, (m, x) in enumerate([("a.old", "weight"), ("b.new", "weight")])
    }
    state |= {"a.old.step": 1, "b.new.step": 2}
    for name in ("new.pt", "new"):
        api.apply(state, tmp_path / name, rules=[rule], fsync=False, output_format="torch")
        api.downgrade(
            tmp_path / name,
            tmp_path / f"{name}.back.pt",
            rules=[rule],
            fsync=False,
            output_format="torch",
        )
        back = torch.load(tmp_path / f"{name}.back.pt", weights_only=True)
        assert {key: v if isinstance(v, int) else v.tolist() for key, v in back.items()} == {
            key: v if isinstance(v, int) else v.tolist() for key, v in state.items()
        }


def test_without_the_stamp_the_plan_says_that_some_may_have_stayed(tmp_path: Path) -> None:
    rule = rules(tmp_path, MIXED)
    done("apply", folder(tmp_path / "old", TENSORS), "-o", tmp_path / "new", "--rules", rule)
    (tmp_path / "new" / "migrate.history.json").unlink()
    notes = done("plan", "--downgrade", tmp_path / "new", "--rules", rule, "--format", "json").json[
        "notes"
    ]
    assert (
        len(
            [
                note
                for note in notes
                if "which `keep` may have left unchanged on the way there: no stamp says so" in note
            ]
        )
        == 1
    )


@pytest.mark.parametrize(
    ("keep", "told"), [("{p...}.{w:new|other}", True), ("{p...}.{k}", False), ("{k...}", False)]
)
def test_only_a_keep_for_anything_says_nothing_of_what_may_have_stayed(
    tmp_path: Path, keep: str, told: bool
) -> None:
    rule = rules(
        tmp_path, f'keep: ["{keep}"]\nrules: [{{name: r, from: "{{p...}}.old", to: "{{p}}.new"}}]\n'
    )
    source = folder(tmp_path / "new", {"a.new": ("F32", [2])})
    notes = done("plan", "--downgrade", source, "--rules", rule, "--format", "json").json["notes"]
    assert any("which `keep` may have left" in note for note in notes) is told


def test_a_key_of_two_readings_that_stayed_stays(tmp_path: Path) -> None:
    rule = rules(
        tmp_path,
        'keep: ["{k...}"]\nrules: [{name: r, from: "o.{a...}.m.{b...}", to: "{a}.m.{b}"}]\n',
    )
    source = folder(tmp_path / "old", {"o.x.m.y": ("F32", [2]), "p.m.q.m.r": ("F32", [1])})
    assert (
        done("plan", source, "--rules", rule, "--format", "json").json["downgrade"]["exact"] is True
    )
    assert stamp(round_trip(source, tmp_path, "--rules", rule))["applied"][0]["kept"] == [
        "p.m.q.m.r"
    ]


@pytest.mark.parametrize("kept", [{}, [3], [["l.{}.new.weight", [[5, 4]]]], [["l.{}.new.weight"]]])
def test_a_stamp_whose_keys_are_none_is_ignored(tmp_path: Path, kept: object) -> None:
    rule = rules(tmp_path, MIXED)
    done("apply", folder(tmp_path / "old", TENSORS), "-o", tmp_path / "new", "--rules", rule)
    written = stamp(tmp_path / "new")
    written["applied"][0]["kept"] = kept
    (tmp_path / "new" / "migrate.history.json").write_text(json.dumps(written))
    assert done("history", tmp_path / "new", "--format", "json").json["notes"] == [
        "the stamp cannot be read and is ignored"
    ]


def test_a_stamp_that_speaks_of_endless_keys_costs_nothing(tmp_path: Path) -> None:
    rule = rules(tmp_path, MIXED)
    done("apply", folder(tmp_path / "old", TENSORS), "-o", tmp_path / "new", "--rules", rule)
    hostile = tmp_path / "hostile"
    shutil.copytree(tmp_path / "new", hostile)
    written = stamp(hostile)
    written["applied"][0]["kept"] = [["l.{}.new.{}", [[0, 10**12]], [[0, 10**12]]]]
    (hostile / "migrate.history.json").write_text(json.dumps(written))
    done("downgrade", hostile, "-o", tmp_path / "back", "--rules", rule)
    assert set(contents(tmp_path / "back")) == {
        *(f"l.{n}.old.weight" for n in range(12)),
        "head.bias",
    }


def lineage(path: Path, name: str, edge: str, layouts: dict[str, str]) -> None:
    """An ordered lineage of two layouts, `detect` of each if it has one, and the edge between
    them.
    """
    (path / name / "x").mkdir(parents=True)
    rows = "".join(
        f"  {layout}: {{title: t{detect and ', detect: ' + detect}}}\n"
        for layout, detect in layouts.items()
    )
    (path / name / "layouts.yaml").write_text(
        f"lineage: {name}\ntitle: t\nordered: true\nlayouts:\n{rows}"
    )
    head = f"id: {name}/x\nlineage: {name}\ntitle: t\nedge: [{', '.join(layouts)}]\n"
    (path / name / "x" / "x.yaml").write_text(head + edge)


def crossed(path: Path, later: str) -> Path:
    """Lineage `first` leaves keys as they are; `later` is the edge of another one."""
    text = 'keep: ["{k...}"]\nrules: [{name: r, from: "{p...}.old", to: "{p}.new"}]\n'
    lineage(path, "first", text, {"v1": '{present: "{p...}.old"}', "v2": '{present: "{p...}.new"}'})
    lineage(path, "later", later, {"w1": "", "w2": ""})
    return path


SHIFT = 'keep: ["{k...}"]\nrules: [{name: s, from: "l.{n:int}.{w:new|old}", to: "l.{n+1}.{w}"}]\n'
INTO = 'rules: [{name: s, from: "{p...}.{w:new|old}", to: "m.{p}.{w}"}]\n'
ASIDE = 'keep: ["{k...}"]\nrules: [{name: s, from: "l.0.b", to: "m.0.b"}]\n'
SOURCE = {
    "l.0.old": ("F32", [2], bytes(8)),
    "l.1.new": ("F32", [2], bytes([1]) * 8),
    "l.0.b": ("F32", [2], bytes([2]) * 8),
}


@pytest.mark.parametrize("edge", [SHIFT, INTO.replace("new|old", "new|old|b")])
def test_an_edge_is_not_undone_while_a_later_one_stands_that_may_have_renamed_what_stayed(
    tmp_path: Path, edge: str
) -> None:
    pack = ("--rules", crossed(tmp_path / "rules", edge))
    source = folder(tmp_path / "old", SOURCE)
    done("apply", source, "-o", tmp_path / "one", *pack, "--from", "first@v1", "--to", "first@v2")
    done(
        "apply",
        tmp_path / "one",
        "-o",
        tmp_path / "two",
        *pack,
        "--from",
        "later@w1",
        "--to",
        "later@w2",
    )
    for question in (["--to", "first@v1"], ["--to", "first@v1", "--to", "later@w1"]):
        said = refusal(
            "downgrade", tmp_path / "two", "-o", tmp_path / "no", *pack, *question, exit=3
        )
        assert said["code"] == "M405"
        assert said["message"].startswith("first v1 → v2 left keys as they were, and later w1 → w2")
        assert said["help"] == "downgrade the later edge first: --to later@w1"
    done(
        "downgrade",
        tmp_path / "two",
        "-o",
        tmp_path / "back",
        *pack,
        "--to",
        "later@w1",
        "--to",
        "first@v1",
    )
    assert contents(tmp_path / "back") == contents(source)


def test_a_later_edge_that_is_not_known_here_counts_as_one_that_renames(tmp_path: Path) -> None:
    pack = crossed(tmp_path / "rules", ASIDE)
    source = folder(tmp_path / "old", SOURCE)
    question = (
        "--rules",
        pack,
        "--from",
        "first@v1",
        "--to",
        "first@v2",
        "--from",
        "later@w1",
        "--to",
        "later@w2",
    )
    done("apply", source, "-o", tmp_path / "new", *question)
    done(
        "downgrade", tmp_path / "new", "-o", tmp_path / "back", "--rules", pack, "--to", "first@v1"
    )
    assert set(contents(tmp_path / "back")) == {"l.0.old", "l.1.new", "m.0.b"}
    shutil.rmtree(pack / "later")
    assert (
        refusal(
            "downgrade",
            tmp_path / "new",
            "-o",
            tmp_path / "no",
            "--rules",
            pack,
            "--to",
            "first@v1",
            exit=3,
        )["code"]
        == "M405"
    )


def test_the_newest_entry_of_an_edge_says_what_stayed(tmp_path: Path) -> None:
    pack = ("--rules", crossed(tmp_path / "rules", ASIDE))
    start = folder(tmp_path / "0", {**SOURCE, "l.2.new": ("F32", [2])})
    ways = [
        "apply first@v2",
        "apply later@w2",
        "downgrade first@v1",
        "apply first@v2",
        "downgrade first@v1",
    ]
    for number, way in enumerate(ways):
        verb, goal = way.split()
        origin = (
            ["--from", "later@w1"]
            if goal == "later@w2"
            else ["--from", "first@v1"]
            if goal == "first@v2"
            else []
        )
        done(
            verb,
            tmp_path / str(number),
            "-o",
            tmp_path / str(number + 1),
            *pack,
            *origin,
            "--to",
            goal,
        )
    assert set(contents(tmp_path / "5")) == {"l.0.old", "l.1.new", "l.2.new", "m.0.b"}
    # undone is the last run that stands
    done("downgrade", tmp_path / "5", "-o", tmp_path / "6", *pack)
    assert contents(tmp_path / "6") == contents(start)
