"""Quantized tensors have no memory of their own: their address is 0 and their storage has no bytes,
all alike. That ties nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import quantized_classes as classes
import torch
from quantized_ranks import KINDS, whole, wrapped
from stored_objects import of_object

import migrate

KIND = "te-mxfp8-rowwise"
RENAME = """\
id: t/b/c
title: t
why: t
lineage: t
edge: [a, b]
requires: ">=0.1"
rules: [{name: r, from: "{k}.weight", to: "{k}.w"}]
"""


@pytest.fixture(autouse=True)
def libraries() -> Iterator[None]:
    with classes.installed():
        yield


def several() -> dict[str, classes.Wrapper]:
    made = {
        f"{n}.weight": wrapped(KIND, KINDS[KIND].shape, whole(KIND, seed))
        for seed, n in enumerate("abc")
    }
    assert {(one.data_ptr(), one.untyped_storage().nbytes()) for one in made.values()} == {(0, 0)}
    return made


def components(found: dict[str, torch.Tensor]) -> list[dict[str, bytes]]:
    return [of_object(KIND, one) for one in found.values()]  # type: ignore[arg-type]


def test_a_state_dict_that_is_renamed_has_the_objects_themselves(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(RENAME)
    given = several()
    made = migrate.migrate_state_dict(given, rules=[tmp_path / "r.yaml"])
    assert list(made) == ["a.w", "b.w", "c.w"]
    assert all(one is due for one, due in zip(made.values(), given.values(), strict=True))


def test_state_of_an_optimizer_is_the_objects_themselves(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(RENAME)
    (a, b, c), model = several().values(), {key: torch.ones(KINDS[KIND].shape) for key in several()}
    state = {key: {"exp_avg": one} for key, one in zip(model, (a, b, c), strict=True)}
    groups = [{"lr": 0.1, "params": list(model)}]
    given = {"model": model, "optimizer": {"state": state, "param_groups": groups}}
    made = migrate.migrate_state_dict(given, rules=[tmp_path / "r.yaml"])
    assert list(made["model"]) == ["a.w", "b.w", "c.w"]
    assert list(made["optimizer"]["state"]) == ["a.w", "b.w", "c.w"]
    found = [one["exp_avg"] for one in made["optimizer"]["state"].values()]
    assert all(one is due for one, due in zip(found, (a, b, c), strict=True))


def module_of(given: dict[str, classes.Wrapper]) -> torch.nn.Module:
    module = torch.nn.Module()
    for key, one in given.items():
        inner = torch.nn.Module()
        held = one.like(lambda part: torch.full_like(part, 99))
        inner.weight = torch.nn.Parameter(held, requires_grad=False)
        module.add_module(key.partition(".")[0], inner)
    return module


def test_each_parameter_of_a_module_is_filled_for_itself(tmp_path: Path) -> None:
    given = several()
    torch.save(given, tmp_path / "in.pt")
    for source in (given, tmp_path / "in.pt"):
        module = module_of(given)
        report = migrate.load(module, source)
        assert (report.missing, report.unexpected) == ((), ())
        assert components(module.state_dict()) == components(given)


def test_files_hold_each_tensor(tmp_path: Path) -> None:
    given = several()
    torch.save(given, tmp_path / "in.pt")
    assert not [
        note for note in migrate.inspect(tmp_path / "in.pt").to_json()["notes"] if "share" in note
    ]
    migrate.apply(tmp_path / "in.pt", tmp_path / "out", output_format="safetensors")
    migrate.apply(tmp_path / "out", tmp_path / "out.pt", output_format="torch")
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    assert len(set(map(id, found.values()))) == 3
    assert components(found) == components(given)
