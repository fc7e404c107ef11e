"""Copies of the weights beside them, such as a moving average: what is warned of, and the way to
migrate them too.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from commandline import done

import migrate

HEAD = 'id: demo/2/x\ntitle: x\nwhy: x\nlineage: demo\nedge: ["1", "2"]\n'
RULES = {
    "rename": 'rules: [{name: r, from: "{i:int}.{k}", to: "layers.{i}.{k}"}]\n',
    "merge": 'keep: ["{k...}"]\nrules: [{name: r, from: "{i:0|1}.weight", to: "all.weight", via: '
    "[{stack: {over: i}}]}]\n",
    "cast": 'rules: [{name: r, from: "{k...}", to: "{k}", via: [{cast: {to: float64, from: '
    "float32}}]}]\n",
    "unwrap": 'rules: [{name: r, from: "module.{k...}", to: "{k}"}]\n',
}
Weights = dict[str, Any]


@pytest.fixture
def rule(tmp_path: Path) -> Callable[[str], Path]:
    def write(name: str) -> Path:
        path = tmp_path / f"{name}.yaml"
        path.write_text(HEAD + RULES[name])
        return path

    return write


def weights(fill: float = 0.0) -> Weights:
    return {
        f"{i}.{leaf}": torch.full(shape, fill + i)
        for i in range(2)
        for leaf, shape in (("weight", (3, 3)), ("bias", (3,)))
    }


def nested(flat: Weights) -> Weights:
    out: Weights = {}
    for key, value in flat.items():
        outer, inner = key.split(".")
        out.setdefault(outer, {})[inner] = value
    return out


def saved(path: Path, **beside: Any) -> Path:
    torch.save({"model": weights(), **beside, "epoch": 3}, path)
    return path


COPIES: dict[str, tuple[Weights, str]] = {
    "ema": ({"ema": weights(1)}, "ema"),
    "state_dict_ema": ({"state_dict_ema": weights(1)}, "state_dict_ema"),
    "teacher": ({"teacher": {f"module.{k}": v for k, v in weights(1).items()}}, "teacher"),
    "within": ({"ema": {"decay": 0.9, "model": weights(1)}}, "ema.model"),
    "nested": ({"ema": nested(weights(1))}, "ema"),
    "wrapped": ({"ema": {"module": nested(weights(1))}}, "ema.module"),
    "most": ({"ema": {**weights(1), "1.bias": torch.ones(7), "0.scale": torch.ones(1)}}, "ema"),
}


@pytest.mark.parametrize("change", ["rename", "merge"])
@pytest.mark.parametrize("name", COPIES)
def test_a_copy_that_keeps_the_old_layout_is_warned_of(
    name: str, change: str, rule: Any, tmp_path: Path
) -> None:
    beside, at = COPIES[name]
    source, out = saved(tmp_path / "in.pt", **beside), tmp_path / "out.pt"
    (told,) = migrate.plan(source, rules=rule(change)).document["warnings"]
    assert (told["code"], told["severity"]) == ("M411", "warning")
    of = 3 if name == "most" else 4
    many = of if change == "rename" else 2
    assert told["message"] == (
        f"the copy of the weights at `{at}` is carried as it is: the plan changes {many} tensors "
        f"of the {of} that it copies"
    )
    assert f'at="{at}"' in told["help"]
    assert told["spans"][0]["file"].endswith(f"{change}.yaml")
    answer = migrate.apply(source, out, rules=rule(change))
    assert [d.code for d in answer.warnings] == ["M411"]
    made = torch.load(out, weights_only=True)
    before = torch.load(source, weights_only=True)
    assert sorted(made) == sorted(before)
    assert migrate.verify(out, source=source, rules=rule(change)).equal


def test_the_way_that_the_warning_shows_migrates_the_copy(rule: Any, tmp_path: Path) -> None:
    source = saved(tmp_path / "in.pt", ema=weights(1))
    first, second = tmp_path / "first.pt", tmp_path / "second.pt"
    told = done("apply", source, "-o", first, "--rules", rule("rename"))
    assert "warning[M411]: the copy of the weights at `ema` is carried as it is" in told.err
    assert "run it again on the output with --at ema" in told.err
    again = done("apply", first, "-o", second, "--rules", rule("rename"), "--at", "ema")
    assert "M411" not in again.err
    made = torch.load(second, weights_only=True)
    assert made["model"].keys() == made["ema"].keys()
    for part, fill in (("model", 0), ("ema", 1)):
        for key, value in weights(fill).items():
            assert torch.equal(made[part][f"layers.{key}"], value)


@pytest.mark.parametrize(
    "beside",
    [
        {"ema": {"0.weight": torch.ones(3, 3)}},
        {"ema": {key: torch.ones(5) for key in weights()}},
        {"optimizer": {"shadow": weights()}},
        {"ema": [*weights().values()]},
        {},
    ],
)
def test_what_is_no_copy_is_not_warned_of(beside: Weights, rule: Any, tmp_path: Path) -> None:
    source = saved(tmp_path / "in.pt", **beside)
    asked = {"rules": rule("merge"), "allow": {"stale-optimizer"}}
    assert migrate.plan(source, **asked).document["warnings"] == []


def test_a_copy_that_still_fits_is_not_warned_of(rule: Any, tmp_path: Path) -> None:
    source = saved(tmp_path / "in.pt", ema=weights(1))
    plan = migrate.plan(source, rules=rule("cast"))
    assert plan.document["warnings"] == []
    wrapped = tmp_path / "wrapped.pt"
    held = {f"module.{key}": value for key, value in weights().items()}
    torch.save({"model": held, "ema": weights(1)}, wrapped)
    assert migrate.plan(wrapped, rules=rule("unwrap")).document["warnings"] == []
    torch.save({"model": held, "ema": held}, wrapped)
    assert migrate.plan(wrapped, rules=rule("unwrap")).document["warnings"] == []
    torch.save({"model": held, "ema": dict(held)}, wrapped)
    (told,) = migrate.plan(wrapped, rules=rule("unwrap")).document["warnings"]
    assert told["code"] == "M411"
    # nothing is carried that could be stale
    answer = migrate.apply(
        source, tmp_path / "out.safetensors", rules=rule("merge"), allow={"drop"}
    )
    assert answer.warnings == ()


def test_a_state_dict_in_memory_is_looked_at_as_well(rule: Any) -> None:
    state = {**weights(), "ema": weights(1)}
    told: list[Any] = []
    for call in (migrate.apply, migrate.migrate_state_dict):
        made = call(state, rules=rule("rename"), inform=told.append)
        assert made["ema"] is state["ema"]
        (found,) = told[-1].warnings
        assert (found.code, "at `ema`" in found.message) == ("M411", True)
