"""Optimizer state keeps dtype and shape where its parameters are encoded, decoded or recoded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import following
import pytest
import torch
from following import HEAD

import migrate
from migrate.core.errors import CheckpointError

# experts are stacked and turned before they are encoded
STACKED = """keep: ["{p...}.{w:w1|w3|gate|norm|embed}.weight"]
rules:
  - name: down
    from: "{p...}.moe.experts.{e:int}.w2.weight"
    to: {weight: "{p}.down.codes", scale: "{p}.down.scale"}
    via:
      - stack: {over: e, count: 4}
      - transpose: {dims: [1, 2]}
      - quantize: {codec: fp8, from: float32, granularity: channel, scale: float32}
"""
# each expert is encoded, and the codes are stacked
CODES = """keep: ["{p...}.{w:w1|w3|gate|norm|embed}.weight"]
rules:
  - name: down
    from: "{p...}.moe.experts.{e:int}.w2.weight"
    to: {weight: "{p}.down.codes", scale: "{p}.down.scale"}
    via:
      - quantize: {codec: fp8, from: float32, granularity: channel, scale: float32}
      - stack: {over: e, count: 4}
      - transpose: {dims: [1, 2], only: {role: [weight]}}
"""


def saved(path: Path, model: dict[str, torch.Tensor], state: dict[str, Any]) -> Path:
    groups = [{"lr": 0.5, "params": list(state)}]
    held = {"model": model, "optimizer": {"state": state, "param_groups": groups}}
    torch.save(held, path)
    return path


def state_in(path: Path) -> Any:
    return torch.load(path, weights_only=True)["optimizer"]["state"]


@pytest.mark.parametrize(("text", "make"), [(STACKED, following.adamw), (CODES, following.sgd)])
def test_state_follows_experts_that_are_stacked_and_encoded(
    text: str, make: Any, tmp_path: Path
) -> None:
    rules = following.rules(tmp_path, HEAD + text)
    model, optimizer = following.trained(make)
    source, out = tmp_path / "old.pt", tmp_path / "new.pt"
    torch.save(following.nested(model, optimizer), source)
    answer = migrate.apply(source, out, rules=rules, allow="lossy")
    assert answer.optimizer == "followed"
    assert migrate.verify(out, source=source, rules=rules).equal
    before, after = state_in(source), state_in(out)
    assert "layers.0.down.codes" in after
    assert not any("scale" in key or "w2" in key for key in after)
    for moment, value in after["layers.1.down.codes"].items():
        old = [before[f"layers.1.moe.experts.{e}.w2.weight"][moment] for e in range(4)]
        if moment == "step":
            assert value == old[0]
        else:
            assert value.dtype == torch.float32
            assert torch.equal(value, torch.stack(old).transpose(1, 2))
    groups = torch.load(out, weights_only=True)["optimizer"]["param_groups"]
    assert groups[0]["params"].count("layers.0.down.codes") == 1
    assert not any("scale" in name for name in groups[0]["params"])

    back = tmp_path / "back.pt"
    migrate.downgrade(out, back, rules=rules, allow="lossy")
    again = state_in(back)
    assert again.keys() == before.keys()
    for key, moments in before.items():
        for moment, value in moments.items():
            assert torch.equal(again[key][moment], value), (key, moment)


LAYOUTS = """lineage: demo
title: x
ordered: true
layouts:
  "1": {title: a, detect: {present: "{m...}.weight"}}
  "2": {title: b, detect: {present: "{m...}.codes"}}
  "3": {title: c, detect: {present: "{m...}.packed"}}
  "4": {title: d, detect: {present: "{m...}.bytes"}}
"""
ENCODE = """rules:
  - name: encode
    from: "{p...}.{e:int}.weight"
    to: {weight: "{p}.{e}.codes", scale: "{p}.{e}.scale"}
    via: [{quantize: {codec: mxfp4, from: float32}}]
"""
# packed codes are stacked and turned, so that eight bytes of a row become eight rows
TURN = """rules:
  - name: turn
    from: "{p...}.{e:int}.codes"
    to: "{p}.packed"
    via: [{stack: {over: e, count: 2}}, {transpose: {dims: [1, 2]}}]
  - name: scales
    from: "{p...}.{e:int}.scale"
    to: "{p}.scales"
    via: [{stack: {over: e, count: 2}}]
"""
RECODE = """rules:
  - name: recode
    from: {weight: "{p...}.{e:int}.codes", scale: "{p...}.{e:int}.scale"}
    to: {weight: "{p}.{e}.bytes", scale: "{p}.{e}.scales"}
    via: [{recode: {from: {codec: mxfp4}, to: {codec: fp8-block, block: [1, 32], scale: ue8m0}}}]
"""


def lineage(folder: Path, *edges: tuple[str, str, str]) -> Path:
    root = folder / "rules"
    for start, goal, text in edges:
        path = root / "demo" / goal / f"from-{start}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        head = HEAD.replace("demo/2/x", f"demo/{goal}/from-{start}")
        path.write_text(head.replace('["1", "2"]', f'["{start}", "{goal}"]') + text)
    (root / "demo" / "layouts.yaml").write_text(LAYOUTS)
    return root


def two_layers(folder: Path, *, columns: int = 64) -> tuple[Path, dict[str, Any]]:
    model = following.random({f"m.{e}.weight": (4, 64) for e in range(2)}, 0)
    moments = following.random({f"m.{e}.weight": (4, columns) for e in range(2)}, 1)
    state = {
        key: {"step": torch.tensor(3.0), "m": value.double()} for key, value in moments.items()
    }
    return saved(folder / "old.pt", model, state), state


def test_state_of_packed_codes_has_the_shape_of_the_numbers(tmp_path: Path) -> None:
    rules = lineage(tmp_path, ("1", "2", ENCODE), ("2", "3", TURN))
    source, state = two_layers(tmp_path)
    out, back = tmp_path / "new.pt", tmp_path / "back.pt"
    asked: dict[str, Any] = {"rules": rules, "allow": "lossy"}
    assert migrate.apply(source, out, to="demo@3", from_="demo@1", **asked).optimizer == "followed"
    assert torch.load(out, weights_only=True)["model"]["m.packed"].shape == (2, 32, 4)
    (made,) = state_in(out).values()
    wanted = torch.stack([one["m"] for one in state.values()]).transpose(1, 2)
    assert made["m"].dtype == torch.float64
    assert torch.equal(made["m"], wanted)
    assert migrate.verify(out, source=source, rules=rules).equal
    migrate.downgrade(out, back, to="demo@1", **asked)
    again = state_in(back)
    assert all(torch.equal(again[key]["m"], state[key]["m"]) for key in state)


def test_state_follows_from_one_number_format_into_another(tmp_path: Path) -> None:
    rules = lineage(tmp_path, ("1", "2", ENCODE), ("2", "4", RECODE))
    source, state = two_layers(tmp_path)
    codes, out = tmp_path / "codes.pt", tmp_path / "new.pt"
    asked: dict[str, Any] = {"rules": rules, "allow": "lossy"}
    migrate.apply(source, codes, to="demo@2", **asked)
    answer = migrate.apply(codes, out, to="demo@4", **asked)
    assert answer.optimizer == "followed"
    made = state_in(out)
    assert list(made) == ["m.0.bytes", "m.1.bytes"]
    assert all(
        torch.equal(made[f"m.{e}.bytes"]["m"], one["m"]) for e, one in enumerate(state.values())
    )
    assert migrate.verify(out, source=codes, rules=rules).equal


def test_state_of_the_shape_of_packed_codes_is_refused(tmp_path: Path) -> None:
    rules = lineage(tmp_path, ("1", "2", ENCODE), ("2", "4", RECODE))
    source, _ = two_layers(tmp_path, columns=32)
    with pytest.raises(CheckpointError, match="`m` has another shape than its parameter") as caught:
        migrate.plan(source, to="demo@2", rules=rules, allow="lossy")
    assert "optimizer: drop" in str(caught.value)
    codes, keys = tmp_path / "codes.pt", ("m.0", "m.1")
    migrate.apply(source, codes, to="demo@2", rules=rules, allow={"lossy", "stale-optimizer"})
    held = torch.load(codes, weights_only=True)
    state = {f"{key}.codes": held["optimizer"]["state"][f"{key}.weight"] for key in keys}
    codes = saved(tmp_path / "named.pt", held["model"], state)
    with pytest.raises(CheckpointError, match="M410") as caught:
        migrate.plan(codes, to="demo@4", from_="demo@2", rules=rules)
    assert "the numbers are of [4, 64]" in str(caught.value)
    with pytest.raises(CheckpointError, match="M410") as caught:
        migrate.downgrade(
            codes, tmp_path / "x.pt", to="demo@1", from_="demo@2", rules=rules, allow="lossy"
        )
    assert "the numbers of its parameter are of [4, 64]" in str(caught.value)
