"""Params that a value beside the tensors says: a field of a Namespace or a key of a dict, in one
part or several.
"""

from __future__ import annotations

import argparse
import enum
import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from work import steps

import migrate
from migrate.core.errors import MigrateError
from migrate.source.pickle.tree import DictNode
from migrate.source.values import Unlike, Values

RULE = """\
id: demo/2/x
title: x
lineage: demo
edge: ['1', '2']
params:
  heads: {{type: int, value: args.num_attention_heads, config: num_attention_heads{more}}}
rules:
  - {{name: r, from: w, to: "v{{h:int}}", via: [{{split: {{into: h, dim: 0, count: $heads}}}}]}}
"""


def rule(folder: Path, more: str = "", text: str = RULE) -> list[Path]:
    (folder / "r.yaml").write_text(text.format(more=more))
    return [folder / "r.yaml"]


def saved(path: Path, args: Any) -> Path:
    path.parent.mkdir(exist_ok=True)
    torch.save({"args": args, "model": {"w": torch.arange(8.0)}}, path)
    return path


def codes(call: Any) -> list[str]:
    with pytest.raises(MigrateError) as caught:
        call()
    return [d.code for d in caught.value.diagnostics]


@pytest.mark.parametrize(
    "args",
    [
        argparse.Namespace(num_attention_heads=4),
        {"num_attention_heads": 4},
        {"num_attention_heads": np.int64(4)},
    ],
    ids=["Namespace", "dict", "numpy"],
)
def test_a_field_or_a_key_says_it(args: Any, tmp_path: Path) -> None:
    source = saved(tmp_path / "in.pt", args)
    answer = migrate.plan(source, rules=rule(tmp_path))
    assert json.loads(answer.to_json())["params"] == {"heads": 4}
    migrate.plan(source, rules=rule(tmp_path), params={"heads": 4})
    # the stamp remembers it, and the values beside the output say it again
    migrate.apply(source, tmp_path / "out", rules=rule(tmp_path), output_format="safetensors")
    migrate.downgrade(tmp_path / "out", tmp_path / "back.pt", rules=rule(tmp_path))
    assert migrate.diff(source, tmp_path / "back.pt").equal


def test_a_state_dict_in_memory_says_it_too(tmp_path: Path) -> None:
    class Kind(enum.Enum):
        four = 1

    for args in (argparse.Namespace(num_attention_heads=4), {"num_attention_heads": 4}):
        state = {"args": args, "model": {"w": torch.arange(8.0)}}
        made = migrate.apply(state, rules=rule(tmp_path))
        assert list(made["model"]) == ["v0", "v1", "v2", "v3"]
        assert made["args"] is args
        flat = migrate.apply({"w": torch.arange(8.0), "args": args}, rules=rule(tmp_path))
        assert [key for key in flat if key != "args"] == ["v0", "v1", "v2", "v3"]
    text = RULE.replace("heads: {{type: int", "heads: {{type: str")
    text = text.replace("$heads", "2")
    args = argparse.Namespace(num_attention_heads=Kind.four, x=torch.ones(1))
    state = {"args": args, "model": {"w": torch.arange(8.0)}}
    assert codes(lambda: migrate.apply(state, rules=rule(tmp_path))) == ["M509"]
    del args.x
    assert migrate.apply(state, rules=rule(tmp_path, text=text))["args"] is args


def test_all_that_speak_must_agree(tmp_path: Path) -> None:
    source = saved(tmp_path / "in" / "model.pt", argparse.Namespace(num_attention_heads=4)).parent
    (source / "config.json").write_text('{"num_attention_heads": 2}')
    with pytest.raises(MigrateError) as caught:
        migrate.plan(source, rules=rule(tmp_path))
    (one,) = caught.value.diagnostics
    assert one.code == "M510"
    assert one.notes == (
        "config.json#num_attention_heads says 2",
        "args.num_attention_heads says 4",
    )
    (source / "config.json").write_text('{"num_attention_heads": 4}')
    migrate.plan(source, rules=rule(tmp_path))
    assert codes(lambda: migrate.plan(source, rules=rule(tmp_path), params={"heads": 2})) == [
        "M510"
    ]


def test_parts_that_agree_say_it_once_and_parts_that_differ_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    for rank, heads in ((0, 4), (1, 4)):
        saved(folder / f"consolidated.{rank:02}.pth", argparse.Namespace(num_attention_heads=heads))
    text = RULE.replace('from: w, to: "v{{h:int}}"', 'from: "w@{{r:int}}", to: "v{{h:int}}@{{r}}"')
    answer = migrate.plan(folder, rules=rule(tmp_path, text=text))
    assert json.loads(answer.to_json())["params"] == {"heads": 4}
    saved(folder / "consolidated.01.pth", argparse.Namespace(num_attention_heads=2))
    with pytest.raises(MigrateError) as caught:
        migrate.plan(folder, rules=rule(tmp_path, text=text))
    (one,) = caught.value.diagnostics
    assert (one.code, one.notes) == (
        "M510",
        (
            "args.num_attention_heads of part 0 says 4",
            "args.num_attention_heads of part 1 says 2",
        ),
    )


@pytest.mark.parametrize(
    "args", [None, argparse.Namespace(), argparse.Namespace(num_attention_heads=None), [1], 7, "x"]
)
def test_what_is_not_there_says_nothing(args: Any, tmp_path: Path) -> None:
    source = saved(tmp_path / "in.pt", args)
    with pytest.raises(MigrateError) as caught:
        migrate.plan(source, rules=rule(tmp_path))
    (one,) = caught.value.diagnostics
    assert one.code == "M509"
    assert any("args.num_attention_heads, and nothing is there" in note for note in one.notes)
    found = migrate.plan(source, rules=rule(tmp_path, ", default: 2"))
    assert json.loads(found.to_json())["params"] == {"heads": 2}


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("four", "is not an integer"),
        (True, "is not an integer"),
        (2.5, "is not an integer"),
        ({"a": 1}, "a dict"),
        (argparse.Namespace(), "a Namespace"),
        ([1] * 100_001, "a list of 100,001 items"),
        (torch.float32, "float32"),
        (signal.SIGTERM, "SIGTERM"),
        (2**70, "an integer lies between"),
        (b"x", "a bytes"),
    ],
)
def test_a_value_of_another_kind_is_refused_by_what_it_is(
    value: Any, said: str, tmp_path: Path
) -> None:
    source = saved(tmp_path / "in.pt", argparse.Namespace(num_attention_heads=value))
    with pytest.raises(MigrateError) as caught:
        migrate.plan(source, rules=rule(tmp_path))
    (one,) = caught.value.diagnostics
    assert one.code == "M114"
    assert said in one.message
    assert len(one.message) < 300


def test_lists_dtypes_and_members_of_enums_are_values_of_params(tmp_path: Path) -> None:
    text = """\
id: demo/2/x
title: x
lineage: demo
edge: ['1', '2']
params:
  names: {{type: list, items: str, value: args.names}}
  second: {{type: int, value: args.sizes.1}}
  dtype: {{type: str, value: args.params_dtype}}
  signal: {{type: str, value: [args.none, args.exit_signal], choices: [SIGTERM]}}
rules:
  - {{name: r, from: w, to: v}}
"""
    args = argparse.Namespace(
        names=["a", "b"], sizes=(1, 2), params_dtype=torch.bfloat16, exit_signal=signal.SIGTERM
    )
    found = migrate.plan(saved(tmp_path / "in.pt", args), rules=rule(tmp_path, text=text))
    assert json.loads(found.to_json())["params"] == {
        "names": ["a", "b"],
        "second": 2,
        "dtype": "bfloat16",
        "signal": "SIGTERM",
    }


@pytest.mark.parametrize("place", ["''", "a..b", ".a", "a.", "a#b", "[]", "{a: b}", "7.5."])
def test_a_place_is_names_with_dots_between(place: str, tmp_path: Path) -> None:
    text = RULE.replace("args.num_attention_heads", place.replace("{", "{{").replace("}", "}}"))
    (code,) = set(
        codes(lambda: migrate.plan({"w": torch.ones(2)}, rules=rule(tmp_path, text=text)))
    )
    assert code in ("M114", "M106")


def test_many_parts_and_fields_cost_no_more_than_they_have() -> None:
    def work(count: int) -> int:
        node = DictNode("Namespace", tuple((f"f{n}", n) for n in range(count)), None)
        values = Values([("", DictNode("dict", (("args", node),), None))])
        return steps(lambda: [list(values.at(f"args.f{n}")) for n in range(100)])

    assert work(8000) < 10 * work(1000)


def test_an_integer_key_is_spelled_in_decimal_and_text_counts_first() -> None:
    node = DictNode("dict", ((7, "number"), ("7", "text"), (8, {"x"})), None)
    values = Values([("", node)])
    assert list(values.at("7")) == [("7", "text")]
    ((_, other),) = values.at("8")
    assert type(other) is Unlike
    assert list(values.at("9")) == []
