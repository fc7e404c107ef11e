"""Several rule files of one edge, and what a rule file may not ask for: each thing is done once, or
refused before anything is read.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import files, folder, refusal, side, small
from commandline import contents, done, rules, safetensors

LAYOUTS = """lineage: demo
title: A lineage
ordered: true
layouts:
  v1: {title: one, detect: {present: "l.0.w"}}
  v2: {title: two, detect: {absent: "l.0.w", present: "l.1.w"}}
"""


def edge(tmp: Path, **written: str) -> Path:
    """A folder of rules with one lineage, whose files of v1 -> v2 are these."""
    home = tmp / "rules" / "demo"
    for name, text in written.items():
        rules(home / "v2", text, f"{name}.yaml")
    (home / "layouts.yaml").write_text(LAYOUTS)
    return tmp / "rules"


def moves(kind: str) -> str:
    return f'rules: [{{name: move-{kind}, from: "l.{{n:int}}.{kind}", to: "l.{{n+1}}.{kind}"}}]\n'


LAYERS = {f"l.{n}.{kind}": ("F32", [2]) for n in range(2) for kind in "wz"}


def test_a_list_of_names_that_two_files_of_an_edge_name_is_renamed_once(tmp_path: Path) -> None:
    names = "names: [config.json#skip]\n"
    both = edge(tmp_path, first=names + moves("w"), second=names + moves("z"))
    new, old = tmp_path / "new", tmp_path / "back"
    source = folder(tmp_path / "old", LAYERS, config={"skip": ["l.0"]})
    done("apply", source, "-o", new, "--rules", both, "--to", "demo@v2")
    assert side(new)["skip"] == ["l.1"]
    done("downgrade", new, "-o", old, "--rules", both)
    assert files(old) == files(source)


def test_a_list_that_one_file_names_twice_is_renamed_once(tmp_path: Path) -> None:
    text = "names: [config.json#skip, config.json#skip]\nkeep: ['l.{n:int}.z']\n" + moves("w")
    source = folder(
        tmp_path / "old",
        {k: v for k, v in LAYERS.items() if k.endswith("w")},
        config={"skip": ["l.0"]},
    )
    done("apply", source, "-o", tmp_path / "new", "--rules", rules(tmp_path, text))
    assert side(tmp_path / "new")["skip"] == ["l.1"]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("minimum: 10", "4 is below the minimum 10"),
        ("choices: [1, 2]", "4 is not one of 1, 2"),
        ("default: 7", "the defaults 5 and 7"),
    ],
)
def test_a_param_has_to_suit_every_file_of_the_edge(tmp_path: Path, more: str, words: str) -> None:
    asked = 'where: {$n: [4]}, name: s, from: "l.{n:int}.z", to: "l.{n+1}.z"'
    both = edge(
        tmp_path,
        first="params: {n: {type: int, config: n, default: 5}}\n" + moves("w"),
        second=f"params: {{n: {{type: int, {more}}}}}\nkeep: ['l.{{n:int}}.z']\nrules: "
        f"[{{{asked}}}]\n",
    )
    found = refusal(
        "plan",
        folder(tmp_path / "old", LAYERS, config={"n": 4}),
        "--rules",
        both,
        "--to",
        "demo@v2",
        exit=2,
    )
    assert (found["code"], words in found["message"]) == ("M114", True), found["message"]
    assert found["spans"][0]["file"].endswith("second.yaml")


def test_ranks_that_were_counted_under_a_key_that_keeps_its_name_come_back(tmp_path: Path) -> None:
    for rank in range(3):
        tensors = {"n.g": ("F32", [2], bytes(8)), "n.w": ("F32", [2], bytes([rank] * 8))}
        safetensors(tmp_path / "old" / f"consolidated.{rank:02}.safetensors", tensors)
    text = """params: {n: {type: int, shape: {key: "n.g@{r:int}", count: r}}}
rules:
  - {name: same, from: "{p...}.g@{r:int}", to: "{p}.g", via: [{same: {over: r, count: $n}}]}
  - {name: rows, from: "{p...}.w@{r:int}", to: "{p}.w", via: [{concat: {over: r, dim: 0, count: $n}}]}
"""  # noqa: E501
    question = ("--rules", rules(tmp_path, text))
    done("apply", tmp_path / "old", "-o", tmp_path / "new", *question)
    assert set(contents(tmp_path / "new")) == {"n.g", "n.w"}
    done("downgrade", tmp_path / "new", "-o", tmp_path / "back", *question)
    done("diff", tmp_path / "old", tmp_path / "back")


def test_a_side_file_that_was_removed_since_does_not_come_back_and_that_is_said(
    tmp_path: Path,
) -> None:
    file = rules(
        tmp_path,
        'files: {config.json: {kind: new}}\nkeep: ["{k...}"]\nrules: [{name: m, from: old.weight, '
        "to: new.weight}]\n",
    )
    done(
        "apply",
        small(tmp_path / "old", config={"kind": "old", "size": 2}),
        "-o",
        tmp_path / "new",
        "--rules",
        file,
    )
    (tmp_path / "new" / "config.json").unlink()
    plan = done("plan", "--downgrade", tmp_path / "new", "--rules", file, "--format", "json").json
    assert plan["downgrade"]["exact"] is False
    assert any("config.json was removed since" in reason for reason in plan["downgrade"]["because"])


@pytest.mark.parametrize(
    ("condition", "words"),
    [
        ("$l: [4, 6]", "`$l` is a list"),
        ("$flag: 1", "is neither true nor false"),
        ("$n: many", "is not an integer"),
    ],
)
def test_a_condition_that_no_value_of_its_param_meets_is_refused(
    tmp_path: Path, condition: str, words: str
) -> None:
    text = f"""params: {{l: {{type: list, items: int, default: [4, 6]}}, flag: {{type: bool, default: true}}, n: {{type: int, default: 1}}}}
keep: ["{{k...}}"]
rules: [{{name: m, from: old.weight, to: new.weight, where: {{{condition}}}}}]
"""  # noqa: E501
    found = refusal("plan", small(tmp_path / "old"), "--rules", rules(tmp_path, text), exit=2)
    assert (found["code"], words in found["message"]) == ("M114", True), found["message"]


@pytest.mark.parametrize(
    "patches",
    [
        "migrate.items.json: {a: 1}",
        ".git/x.json: {a: 1}",
        "__pycache__/x.json: {a: 1}",
        "a.json: {a: 1}, a.json/b.json: {a: 1}",
    ],
)
def test_a_side_file_that_would_be_in_the_way_or_left_behind_is_refused(
    tmp_path: Path, patches: str
) -> None:
    text = (
        f'files: {{{patches}}}\nkeep: ["{{k...}}"]\nrules: [{{name: m, from: old.weight, to: '
        "new.weight}]\n"
    )
    assert (
        refusal("plan", small(tmp_path / "old"), "--rules", rules(tmp_path, text), exit=2)["code"]
        == "M114"
    )


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("config.json/x.json", "config.json would be a file and the folder of config.json/x.json"),
        ("text", "text would be a file and the folder of text/vocab.json"),
        ("mp_rank_00", "mp_rank_00 would be a file and the folder of mp_rank_00/"),
    ],
)
@pytest.mark.parametrize("verb", ["plan", "apply"])
def test_a_side_file_in_the_way_of_another_is_refused_before_anything_is_written(
    tmp_path: Path, verb: str, path: str, words: str
) -> None:
    text = (
        f'files: {{{path}: {{a: 1}}}}\nkeep: ["{{k...}}"]\nrules: [{{name: m, from: '
        "old.weight, to: new.weight}]\n"
    )
    if path == "mp_rank_00":
        ranks = (("old.weight", "x"), ("old.weight", "x"))
        for number, keys in enumerate(ranks):
            (tmp_path / "old" / f"mp_rank_{number:02}").mkdir(parents=True)
            safetensors(
                tmp_path / "old" / f"mp_rank_{number:02}" / "model.safetensors",
                {key: ("F32", [2]) for key in keys},
            )
        (tmp_path / "old" / "config.json").write_text("{}")
    else:
        (small(tmp_path / "old", config={"b": 1}) / "text").mkdir()
    if path == "text":
        (tmp_path / "old" / "text" / "vocab.json").write_text("{}")
    where = ["-o", tmp_path / "new"] if verb == "apply" else []
    found = refusal(verb, tmp_path / "old", *where, "--rules", rules(tmp_path, text), exit=3)
    assert found["code"] == "M513"
    assert words in found["message"]
    assert not list(tmp_path.glob("new*"))


def test_a_division_with_a_rest_is_refused_with_both_numbers(tmp_path: Path) -> None:
    text = """params: {n: {type: int, default: 7}}
keep: ["{k...}"]
rules: [{name: m, from: old.weight, to: new.weight, via: [{roll: {dim: 0, shift: $n // 2}}]}]
"""
    found = refusal("plan", small(tmp_path / "old"), "--rules", rules(tmp_path, text), exit=2)
    assert (found["code"], "7 is not divisible by 2 in `$n // 2`" in found["message"]) == (
        "M111",
        True,
    )


def test_a_folder_without_rule_files_is_not_clean(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert refusal("lint", tmp_path / "empty", exit=2)["code"] == "M115"


def test_an_infinite_number_is_near_to_nothing(tmp_path: Path) -> None:
    text = """rules: [{name: m, from: a, to: b}]
tests:
  - name: near
    given: {a: {values: [1, 2]}}
    expect: {b: {values: [.inf, 2], rtol: 0.001}}
"""
    found = done("test", rules(tmp_path, text), exit=1)
    assert "M701" in found.out + found.err
