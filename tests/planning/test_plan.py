"""The plan's account: what enters the digest, what is counted, what the rows say."""

from __future__ import annotations

import json

import torch
from safetensors.torch import save_file

import migrate

HEAD = "id: t/plan\ntitle: t\nlineage: t\nedge: [a, b]\nkeep: ['k.{i:int}']\n"
RULES = """rules:
  - {name: r, from: "w.{e:int}", to: s, via: [{stack: {over: e}}]}
  - {name: c, from: q, to: "q{n:1|2}", via: [{copy: {into: n}}]}
"""


def plan(tmp_path, rules=RULES, name="m.safetensors", shift=0.0, **kwargs):
    path = tmp_path / name
    save_file(
        {
            **{f"w.{e}": torch.ones(4, 2) + shift for e in range(3)},
            "q": torch.ones(8),
            "k.0": torch.ones(2),
        },
        path,
    )
    (tmp_path / "rule.yaml").write_text(HEAD + rules)
    return migrate.plan(path, rules=tmp_path / "rule.yaml", **kwargs).document


def test_the_digest_is_of_the_question_and_not_of_the_values(tmp_path):
    first = plan(tmp_path)["digest"]
    assert plan(tmp_path, shift=1.0)["digest"] == first
    assert plan(tmp_path, RULES.replace("to: s", "to: t"))["digest"] != first
    assert plan(tmp_path, max_shard_size=1 << 20, single_file=False)["digest"] != first


def test_a_tensor_that_is_copied_twice_is_read_once(tmp_path):
    made = plan(tmp_path)
    assert made["bytes_read"] == 3 * 32 + 32 + 8
    assert made["bytes_written"] == made["target"]["bytes"]
    assert made["target"]["tensors"] == 4


def test_rows_say_what_happens_by_which_rule(tmp_path):
    rows = {row["rule"]: row for row in plan(tmp_path)["rows"]}
    assert (rows["r"]["change"], rows["r"]["to"], rows["r"]["count"], rows["r"]["ops"]) == (
        "merged",
        "s",
        1,
        ["stack"],
    )
    assert rows["c"]["change"] == "split"
    assert rows["r"]["at"].endswith("rule.yaml:7:12")
    assert plan(tmp_path)["unchanged"] == 1


def test_a_plan_is_plain_json(tmp_path):
    made = plan(tmp_path)
    assert json.loads(json.dumps(made)) == made


SPELLINGS = """params: {spec: {type: str, choices: [te, local], default: te}}
rules:
  - {name: norms, from: "l.{n:int}.{m}.w", to: "L.{n}.{m}.w", map: {m: {in: i, out: o, q: q}}, %s}
  - {name: fused, from: "l.{n:int}.{m}.v", to: "L.{n}.{m}.w", map: {m: {qkv: i, fc1: o}}, %s}
"""


def spellings(tmp_path, where, **kwargs):
    path = tmp_path / "m.safetensors"
    keys = [f"L.{n}.{m}.w" for n in range(3) for m in "ioq"]
    save_file({key: torch.ones(2) for key in keys}, path)
    conditions = [
        f"optional: true{f', where: {{$spec: {spec}}}' if where else ''}"
        for spec in ("local", "te")
    ]
    rules = HEAD.replace("keep: ['k.{i:int}']", "keep: ['L.{n:int}.q.w']")
    (tmp_path / "rule.yaml").write_text(rules + SPELLINGS % tuple(conditions))
    return migrate.plan(path, rules=tmp_path / "rule.yaml", backwards=True, **kwargs).document


def test_the_way_back_says_which_of_two_optional_rules_takes_a_key(tmp_path):
    note = spellings(tmp_path, where=False)["notes"][0]
    assert note.startswith("rule 'fused' takes L.0.i.w, L.1.i.w, L.2.i.w, L.0.o.w")
    assert "and 2 more, which rule 'norms' could take as well" in note


def test_where_a_param_says_it_there_is_nothing_to_say(tmp_path):
    for spec, key in (("te", "l.2.qkv.v"), ("local", "l.2.in.w")):
        made = spellings(tmp_path, where=True, params={"spec": spec}, expand=True)
        assert not any("could take as well" in note for note in made["notes"])
        assert key in {row["to"] for row in made["rows"]}
