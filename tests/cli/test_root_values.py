"""The values beside a model: patched by rules as side files are, made where a layout says so, shown
by plans, undone by downgrades.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from commandline import done, run
from safetensors.torch import save_file

RULES = """id: d/2/x
title: x
lineage: d
edge: ["1", "2"]
params:
  base: {{type: int, value: args.rotary_base}}
  heads: {{type: int, default: 8}}
{values}
rules:
  - {{name: w, from: w, to: v}}
"""
PATCH = """values:
  args:
    num_heads: $heads
    params_dtype: torch.bfloat16
    old: null
    none: $null
    more: {$heads: 8, nested: {base: $base, list: [1, 2.5, text]}}
  iteration: 0
"""


def rule_file(folder: Path, values: str = PATCH) -> Path:
    path = folder / "rules.yaml"
    path.write_text(RULES.format(values=values))
    return path


def root() -> dict[str, Any]:
    args = Namespace(
        old=[1, None], rotary_base=500, params_dtype=torch.float32, num_heads=4, kept=(1, 2)
    )
    return {
        "args": args,
        "version": 3.0,
        "model": {"w": torch.arange(4)},
        "iteration": 10,
        "rng": [torch.ones(2)],
    }


def saved(path: Path, **more: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({**root(), **more}, path)
    return path


def loaded(path: Path) -> Any:
    return torch.load(path, weights_only=False)


def same(one: Any, other: Any) -> bool:
    """Equal in all that a file says, the order of keys and fields too."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other) and one.dtype == other.dtype
    if isinstance(one, Namespace):
        return same(vars(one), vars(other))
    if isinstance(one, dict):
        return [*one] == [*other] and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def test_values_are_patched_and_come_back(tmp_path: Path) -> None:
    source, rules = saved(tmp_path / "in.pt"), rule_file(tmp_path)
    out, back = tmp_path / "out.pt", tmp_path / "back.pt"
    plan = done("plan", source, "--rules", rules).out
    assert "values: args.num_heads: 4 → 8" in plan
    assert 'values: args.params_dtype: "torch.float32" → "torch.bfloat16"' in plan
    assert "values: args.old: [1, null] → nothing" in plan
    said = done("apply", source, "-o", out, "--rules", rules, "--no-fsync").out
    assert "downgrade: exact" in said
    made = loaded(out)
    assert vars(made["args"]) == {
        "rotary_base": 500,
        "params_dtype": torch.bfloat16,
        "num_heads": 8,
        "kept": (1, 2),
        "none": None,
        "more": {"nested": {"base": 500, "list": [1, 2.5, "text"]}},
    }
    assert made["iteration"] == 0
    assert [*made] == ["args", "version", "model", "iteration", "rng"]
    done("verify", out, "--source", source, "--rules", rules)
    done("downgrade", out, "-o", back, "--rules", rules, "--no-fsync")
    assert same(loaded(back), root())
    assert same(loaded(source), root())


def test_values_come_back_through_another_format(tmp_path: Path) -> None:
    source, rules = saved(tmp_path / "in" / "model.pt").parent, rule_file(tmp_path)
    out, back = tmp_path / "out", tmp_path / "back.pt"
    asked = ("--rules", rules, "--no-fsync")
    done("apply", source, "-o", out, "--output-format", "safetensors", *asked)
    done("verify", out, "--source", source, "--rules", rules)
    done("downgrade", out, "-o", back, "--output-format", "torch", *asked)
    assert same(loaded(back), root())


def test_tensors_alone_become_the_model_of_a_root_and_come_back(tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    save_file({"w": torch.arange(4)}, source / "model.safetensors")
    rules = rule_file(tmp_path, "values: {args: {size: torch.float16}, iteration: 3}")
    out, back = tmp_path / "out.pt", tmp_path / "back.pt"
    asked = ("--rules", rules, "--set", "base=1", "--output-format", "torch", "--no-fsync")
    done("apply", source, "-o", out, *asked)
    made = {"args": Namespace(size=torch.float16), "iteration": 3, "model": {"v": torch.arange(4)}}
    assert same(loaded(out), made)
    done("verify", out, "--source", source, "--rules", rules, "--set", "base=1")
    done("downgrade", out, "-o", back, *asked)
    assert same(loaded(back), {"w": torch.arange(4)})


@pytest.mark.parametrize(
    ("patch", "at"),
    [
        ("{args: {kept: [1]}}", "args.kept"),
        ("{rng: 1}", "rng"),
        ("{more: 5}", "more"),
        ("{more: null}", "more"),
        ("{args: 7}", "args"),
    ],
)
def test_what_json_does_not_say_is_not_patched(tmp_path: Path, patch: str, at: str) -> None:
    more = {"more": {"plain": 1, "tensor": torch.ones(1)}}
    source = saved(tmp_path / "in.pt", **more)
    rules = rule_file(tmp_path, f"values: {patch}")
    found = run("apply", source, "-o", tmp_path / "out.pt", "--rules", rules)
    assert found.exit == 3
    assert "[M513]" in found.err
    assert f"`{at}`" in found.err
    assert not (tmp_path / "out.pt").exists()


def test_what_stands_beside_a_patch_stays(tmp_path: Path) -> None:
    more = {"more": {"tensor": torch.ones(1), "plain": 1, 5: "five"}}
    source = saved(tmp_path / "in.pt", **more)
    rules = rule_file(tmp_path, "values: {new: [1], args: {a: 1}}")
    done("apply", source, "-o", tmp_path / "out.pt", "--rules", rules, "--no-fsync")
    made = loaded(tmp_path / "out.pt")
    assert same(made["more"], more["more"])
    assert made["args"].a == 1
    assert made["args"].kept == (1, 2)
    assert made["new"] == [1]


def test_every_rank_has_the_patch_and_keeps_its_own(tmp_path: Path) -> None:
    for rank in range(2):
        path = tmp_path / "in" / f"mp_rank_0{rank}" / "model_optim_rng.pt"
        saved(path, args=Namespace(rank=rank, rotary_base=500, old=1))
    rules = tmp_path / "rules.yaml"
    rules.write_text(
        RULES.format(values="values: {args: {old: 2, rank: 9}}").replace(
            "from: w, to: v", 'from: "w@{r:int}", to: v, via: [{same: {over: r, count: 2}}]'
        )
    )
    out, back = tmp_path / "out", tmp_path / "back"
    asked = ("--rules", rules, "--no-fsync")
    done("apply", tmp_path / "in", "-o", out, *asked)
    (made,) = out.glob("*.bin")
    assert vars(loaded(made)["args"]) == {"rank": 9, "rotary_base": 500, "old": 2}
    # what differs between them stays what it was
    assert loaded(made)["parts"]["mp_rank_01"]["args"] == {"rank": 1}
    done("verify", out, "--source", tmp_path / "in", "--rules", rules)
    done("downgrade", out, "-o", back, *asked)
    for rank in range(2):
        (path,) = back.glob(f"**/mp_rank_0{rank}/model_optim_rng.pt")
        found = loaded(path)
        assert vars(found["args"]) == {"rank": rank, "rotary_base": 500, "old": 1}


def test_the_way_back_without_a_stamp_says_what_the_values_are(tmp_path: Path) -> None:
    source = tmp_path / "in.pt"
    torch.save({"args": Namespace(rotary_base=5), "model": {"v": torch.arange(4)}}, source)
    values = "values: {args: {a: 1}}\nvalues_back: {args: {b: 2}}"
    rules = rule_file(tmp_path, values)
    done("downgrade", source, "-o", tmp_path / "out.pt", "--rules", rules, "--no-fsync")
    assert vars(loaded(tmp_path / "out.pt")["args"]) == {"rotary_base": 5, "b": 2}


@pytest.mark.parametrize(
    ("values", "code", "at"),
    [
        ("values: null", "M106", "values"),
        ("values: [1]", "M106", "values"),
        ("values: {args: {a: $unknown}}", "M112", "$unknown"),
        ("values: {args: {$heads: [], a: 1}}", "M106", "$heads"),
        ("values_back: {args: {a: $unknown}}", "M112", "$unknown"),
    ],
)
def test_a_wrong_patch_is_refused_where_it_stands(
    tmp_path: Path, values: str, code: str, at: str
) -> None:
    rules = rule_file(tmp_path, values)
    found = run("lint", rules)
    assert f"[{code}]" in found.err + found.out
    line = next(n for n, text in enumerate(rules.read_text().splitlines(), 1) if at in text)
    assert f"rules.yaml:{line}:" in found.err + found.out
