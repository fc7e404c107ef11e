"""What saves of a snapshot hold, beside what the commands make of a file that torch.save wrote of
the same state: byte for byte, by thread and by child process.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from marks import thorough
from quantized_classes import installed
from quantized_ranks import KINDS, tensors, whole, wrapped
from safetensors.torch import load_file
from stored_objects import of_object
from test_staging_streams import COPIES, Device, gpu
from torchao_ranks import MADE, components, tensor
from work import HANG

import migrate

__all__ = ["gpu"]

HEAD = "id: t/rules\ntitle: t\nlineage: t\nedge: [a, b]\n"
RENAME = HEAD + 'rules: [{name: r, from: "{k...}", to: "new.{k}"}]\n'
STACK = (
    HEAD + "rules:\n  - name: r\n"
    '    from: "{e:int}.weight"\n    to: weight\n    via: [{stack: {over: e, count: 2}}]\n'
)


def written(path: Path) -> dict[str, bytes]:
    """The files at a path, by their places in it."""
    if path.is_file():
        return {"": path.read_bytes()}
    files = [one for one in path.rglob("*") if one.is_file()]
    return {str(one.relative_to(path)): one.read_bytes() for one in files}


def saves(
    state: Any,
    folder: Path,
    form: str,
    rules: str | None = None,
    *,
    ordered: bool = True,
    **asked: Any,
) -> tuple[Path, Any]:
    """Stages and saves the state by thread and by process, and compares both with what `apply`
    makes of the file of torch.save. The path of one, and its report.

    The state is overwritten as soon as it is staged. Not `ordered`: attributes of its objects may
    stand in another order.
    """
    suffix = {"torch": ".pt"}.get(form, "")
    made: list[Path] = []
    if rules is not None:
        (folder / "rules.yaml").write_text(rules)
        asked["rules"] = folder / "rules.yaml"
    source = folder / "source.pt"
    torch.save(state, source)
    at = asked.get("at")
    migrate.apply(source, folder / f"file{suffix}", output_format=form, **asked)
    staged = []
    for apart in (False, True):
        stager = migrate.Stager(process=apart)
        snapshot = stager.stage(state)
        staged.append((stager, snapshot.migrate(**asked) if at or rules else snapshot))
    for one in torch.utils._pytree.tree_leaves(state):
        for part in parts(one):
            part.detach().zero_()
    report = None
    for apart, (stager, what) in enumerate(staged):
        made.append(folder / f"staged{apart}{suffix}")
        report = what.save_async(made[-1], output_format=form).result(HANG)
        stager.close()
    wanted = written(folder / f"file{suffix}")
    for path in made:
        found = written(path)
        assert found.keys() == wanted.keys()
        for name, held in wanted.items():
            assert found[name] == held or not ordered, (path.name, name)
        assert migrate.diff(path, folder / f"file{suffix}").equal
    return made[0], report


def parts(one: Any) -> list[torch.Tensor]:
    """The tensors with memory of a leaf."""
    if hasattr(type(one), "__tensor_flatten__") and not type(one).__module__.startswith("torch."):
        held = (getattr(one, name) for name in one.__tensor_flatten__()[0])
        # not every dtype can be filled
        return [x.view(torch.uint8) if x.ndim else x for x in held if isinstance(x, torch.Tensor)]
    return [one] if isinstance(one, torch.Tensor) else []


class Layers(torch.nn.Sequential):
    """Two layers that a rule can stack, trained for two steps by AdamW."""

    def __init__(self) -> None:
        super().__init__(*(torch.nn.Linear(3, 3, bias=False) for _ in range(2)))

    def trained(self) -> torch.optim.Optimizer:
        torch.manual_seed(1)
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            self(torch.randn(4, 3)).square().sum().backward()
            optimizer.step()
        return optimizer


def kept(state: Any) -> Any:
    return torch.utils._pytree.tree_map(
        lambda one: one.detach().clone() if isinstance(one, torch.Tensor) else one, state
    )


@pytest.mark.parametrize("form", thorough(["torch", "safetensors", "dcp"]))
def test_optimizer_state_by_number_is_right_behind_new_names(form: str, tmp_path: Path) -> None:
    model = Layers()
    state = {"model": model.state_dict(), "optimizer": model.trained().state_dict(), "step": 2}
    was = kept(state)
    out, report = saves(state, tmp_path, form, RENAME, at="model")
    assert report.optimizer == "renamed"
    if form == "torch":
        held = torch.load(out, weights_only=True)
        assert list(held["model"]) == ["new.0.weight", "new.1.weight"]
        assert held["optimizer"]["param_groups"] == was["optimizer"]["param_groups"]
        for number, moments in was["optimizer"]["state"].items():
            for name, one in moments.items():
                assert torch.equal(held["optimizer"]["state"][number][name], one)


def test_optimizer_state_follows_what_rules_merge(tmp_path: Path) -> None:
    model = Layers()
    state = {"model": model.state_dict(), "optimizer": model.trained().state_dict()}
    was = kept(state)["optimizer"]["state"]
    assert was[0]["exp_avg"].any()
    out, report = saves(state, tmp_path, "torch", STACK, at="model")
    held = torch.load(out, weights_only=True)["optimizer"]
    assert list(held["state"]) == [0]
    for name in ("exp_avg", "exp_avg_sq"):
        stacked = torch.stack([was[0][name], was[1][name]])
        assert torch.equal(held["state"][0][name], stacked)
    assert report.optimizer == "followed"


def test_optimizer_state_that_cannot_follow_is_refused_before_training_goes_on(
    tmp_path: Path,
) -> None:
    (tmp_path / "rules.yaml").write_text(STACK.replace("[{stack", "[{affine: {mul: 2}}, {stack"))
    model = Layers()
    state = {"model": model.state_dict(), "optimizer": model.trained().state_dict()}
    asked: dict[str, Any] = {"rules": tmp_path / "rules.yaml", "at": "model", "allow": {"lossy"}}
    snapshot = migrate.Stager().stage(state)
    with pytest.raises(migrate.MigrateError, match="M410"):
        snapshot.migrate(**asked)
    migration = snapshot.migrate(**asked, rest="leave")
    assert any("without optimizer" in note for note in migration.plan.report.notes)
    report = migration.save(tmp_path / "left.pt")
    assert any("without optimizer" in note for note in report.notes)
    assert list(torch.load(tmp_path / "left.pt", weights_only=True)) == ["weight"]


def test_what_is_left_is_listed_and_what_is_carried_is_there(tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text(RENAME)
    state = {"model": {"a": torch.ones(2)}, "ema": {"a": torch.zeros(2)}, "f": lambda: 0, "n": 3}
    snapshot = migrate.Stager().stage(state)
    left = snapshot.migrate(rules=tmp_path / "rules.yaml", at="model", rest="leave")
    (note,) = (note for note in left.plan.report.notes if "without" in note)
    assert all(name in note for name in ("ema", "f", "n"))
    for process in (False, True):
        stager = migrate.Stager(process=process)
        asked = stager.stage(state).migrate(rules=tmp_path / "rules.yaml", at="model", rest="leave")
        asked.save(tmp_path / f"{process}")
        assert set(load_file(tmp_path / f"{process}" / "model.safetensors")) == {"new.a"}
        assert not (tmp_path / f"{process}" / "migrate.items.json").exists()
    del state["f"]
    out, _ = saves(state, tmp_path, "torch", RENAME, at="model")
    held = torch.load(out, weights_only=True)
    assert (list(held), list(held["ema"]), held["n"]) == (["model", "ema", "n"], ["a"], 3)


@pytest.mark.parametrize("form", thorough(["torch", "safetensors"]))
def test_several_dicts_are_saved_as_they_are(form: str, tmp_path: Path) -> None:
    def state() -> dict[str, Any]:
        return {"g": {"a": torch.ones(2)}, "d": {"a": torch.arange(2)}, "n": [1]}

    torch.save(state(), tmp_path / "source.pt")
    migrate.apply(tmp_path / "source.pt", tmp_path / "file", output_format=form, at=".")
    for apart in (False, True):
        with migrate.Stager(process=apart) as stager:
            stager.stage(state()).save(tmp_path / f"{apart}", output_format=form)
        assert written(tmp_path / f"{apart}") == written(tmp_path / "file")
    migrate.Stager().stage(state()).save(tmp_path / "out.pt")
    held = torch.load(tmp_path / "out.pt", weights_only=True)
    assert torch.equal(held["g"]["a"], torch.ones(2))
    assert torch.equal(held["d"]["a"], torch.arange(2))
    assert (list(held), held["n"]) == (["g", "d", "n"], [1])


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
def test_a_dtype_that_only_torch_files_hold(tmp_path: Path) -> None:
    """complex32 has no name in safetensors: a folder is refused by the save, a `.pt` is written."""
    x = torch.tensor([1 + 2j, -0.0 + 1j]).to(torch.complex32)
    for apart in (False, True):
        snapshot = migrate.Stager(process=apart).stage({"x": x, "n": 1})
        snapshot.save(tmp_path / f"{apart}.pt")
        held = torch.load(tmp_path / f"{apart}.pt", weights_only=True)
        assert held["x"].dtype is torch.complex32
        assert held["x"].view(torch.int16).tolist() == x.view(torch.int16).tolist()
        with pytest.raises(migrate.MigrateError, match=r"M916.*complex32"):
            snapshot.save_async(tmp_path / "folder")
    assert sorted(os.listdir(tmp_path)) == ["False.pt", "True.pt"]


class Tagged(torch.Tensor):
    """What no reader of files knows."""


UNHELD: dict[str, Callable[[], Any]] = {
    "a conj view": lambda: torch.tensor([1 + 2j]).conj(),
    "a neg view": lambda: torch.tensor([1 + 2j]).conj().imag,
    "sparse": lambda: torch.eye(2).to_sparse(),
    "compressed": lambda: torch.eye(2).to_sparse_csr(),
    "meta": lambda: torch.empty(2, device="meta"),
    "lazy": torch.nn.UninitializedParameter,
    "subclass": lambda: torch.ones(2).as_subclass(Tagged),
    "bits": lambda: torch.zeros(2, dtype=torch.uint8).view(torch.bits8),
    "storage": lambda: torch.ones(2).untyped_storage(),
    "module": lambda: torch.nn.Linear(1, 1),
    "function": lambda: lambda: 0,
    "inside of an object": lambda: functools.partial(print, lambda: 0),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", UNHELD)
def test_what_a_file_cannot_hold_is_refused_by_path_or_left_out_as_allowed(
    kind: str, tmp_path: Path
) -> None:
    state = {"model": {"w": torch.ones(2)}, "others": [0, {"x": UNHELD[kind]()}]}
    snapshot = migrate.Stager().stage(state)
    for suffix in ("", ".pt", ".safetensors"):
        with pytest.raises(migrate.MigrateError, match=r"M935(.|\n)*others\.1\.x") as caught:
            snapshot.save_async(tmp_path / f"out{suffix}")
        assert "migrate.staging" not in str(caught.value)
    assert os.listdir(tmp_path) == []
    report = snapshot.save(tmp_path / "out.pt", allow={"opaque"})
    assert any("others.1.x" in one for one in (*report.notes, *report.warnings, *report.losses))
    held = torch.load(tmp_path / "out.pt", weights_only=True)
    assert torch.equal(held["model"]["w"], torch.ones(2))


@pytest.mark.parametrize("form", thorough(["torch", "safetensors"]))
@pytest.mark.parametrize("kind", thorough(KINDS))
def test_quantized_tensors_are_saved_bit_for_bit(kind: str, form: str, tmp_path: Path) -> None:
    with installed():
        one = wrapped(kind, KINDS[kind].shape, whole(kind))
        was = of_object(kind, one)
        state = {"model": {"w": one, "b": torch.ones(3)}, "n": 1}
        # the stand-ins' own methods put them in another one
        out, _ = saves(state, tmp_path, form, at="model", ordered=False)
        wanted = tensors(kind, whole(kind))
        if form == "torch":
            held = torch.load(out, weights_only=False)["model"]["w"]
            assert type(held) is type(one)
            assert of_object(kind, held) == was
            return
    loaded = load_file(out / "model.safetensors")
    for name, part in wanted.items():
        found = loaded[f"w.{name}"]
        assert (found.dtype, found.shape) == (part.dtype, part.shape), name
        assert bits(found) == bits(part), name


def bits(x: torch.Tensor) -> bytes:
    return x.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.libraries
@pytest.mark.parametrize("name", MADE)
def test_tensors_of_torchao_are_saved_bit_for_bit(name: str, tmp_path: Path) -> None:
    one = tensor(name)
    wanted = {part: bits(held) for part, held in components(one).items()}
    out, _ = saves({"model": {"w": one}}, tmp_path, "torch", at="model")
    held = torch.load(out, weights_only=False)["model"]["w"]
    assert type(held) is type(one)
    assert {part: bits(x) for part, x in components(held).items()} == wanted


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("way", ["save_async", "migrate"])
def test_a_job_waits_for_copies_that_are_on_the_way(
    gpu: Device, way: str, apart: bool, tmp_path: Path
) -> None:
    """Neither `stage`, `migrate` nor `save_async` waits; the writer does, before it reads."""
    (tmp_path / "rules.yaml").write_text(RENAME)
    state = {"there": torch.ones(100), "here": torch.zeros(3)}
    snapshot = migrate.Stager(process=apart).stage(state, non_blocking=True)
    assert gpu.said == COPIES
    if way == "migrate":
        migration = snapshot.migrate(rules=tmp_path / "rules.yaml")
        assert gpu.said == COPIES
        job = migration.save_async(tmp_path / "out.pt")
    else:
        job = snapshot.save_async(tmp_path / "out.pt")
    job.result(HANG)
    assert gpu.said == [*COPIES, "synchronize"]
    held = torch.load(tmp_path / "out.pt", weights_only=True)
    assert held["new.there" if way == "migrate" else "there"].eq(1).all()


def test_a_state_dict_waits_for_copies_that_are_on_the_way(gpu: Device, tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text(RENAME)
    state = {"there": torch.ones(100), "here": torch.zeros(3)}
    migration = (
        migrate.Stager().stage(state, non_blocking=True).migrate(rules=tmp_path / "rules.yaml")
    )
    assert gpu.said == COPIES
    assert migration.state_dict()["new.there"].eq(1).all()
    assert gpu.said == [*COPIES, "synchronize"]


def test_what_is_asked_for_and_does_not_exist_is_refused_at_once(tmp_path: Path) -> None:
    snapshot = migrate.Stager().stage({"a": torch.ones(2)})
    with pytest.raises(migrate.MigrateError, match=r"M115.*no output format gguff"):
        snapshot.save_async(tmp_path / "out", output_format="gguff")
    with pytest.raises(migrate.MigrateError, match=r"M115.*`rest` is 'leaves'"):
        snapshot.migrate(rest="leaves")  # type: ignore[arg-type]
    assert repr(snapshot.migrate()) == "<migrate.SnapshotMigration, as it is>"
    assert os.listdir(tmp_path) == []


def test_rules_may_be_handed_over_once(tmp_path: Path) -> None:
    """A generator of paths is gone after its first use."""
    (tmp_path / "rules.yaml").write_text(RENAME)
    given = (path for path in [tmp_path / "rules.yaml"])
    migration = migrate.Stager().stage({"a": torch.ones(2)}).migrate(rules=given)
    assert repr(migration) == "<migrate.SnapshotMigration, to t@b>"
    assert list(migration.state_dict()) == ["new.a"]


def test_entry_points_take_the_snapshot_of_a_nested_state(tmp_path: Path) -> None:
    rule = tmp_path / "rules.yaml"
    rule.write_text(RENAME)
    state = {"model": {"a": torch.ones(2), "b": torch.zeros(1)}, "n": 3}
    snapshot = migrate.Stager().stage(state)
    for at in (None, "model"):
        found = migrate.inspect(snapshot, at=at)
        assert (found.tensors, found.at) == (2, "model")
        assert [step.to for step in migrate.plan(snapshot, rules=rule, at=at).report.path] == ["b"]
        made = migrate.apply(snapshot, rules=rule, at=at)
        assert (list(made["model"]), made["n"]) == (["new.a", "new.b"], 3)
        lazy = migrate.migrate_state_dict(snapshot, rules=rule, at=at)
        assert list(lazy["model"]) == ["new.a", "new.b"]
        out = tmp_path / f"{at}.pt"
        migrate.apply(snapshot, out, rules=rule, at=at)
        held = torch.load(out, weights_only=True)
        assert torch.equal(held["model"]["new.a"], torch.ones(2))
        model = torch.nn.Module()
        model.new = torch.nn.ParameterDict({"a": torch.zeros(2), "b": torch.ones(1)})
        migrate.load(model, snapshot, rules=rule, at=at)
        assert model.new["a"].tolist() == [1, 1]
    for verb in (migrate.inspect, migrate.plan, migrate.apply, migrate.migrate_state_dict):
        with pytest.raises(migrate.MigrateError, match="M945"):
            verb(snapshot, rules=[rule], at="elsewhere")  # type: ignore[operator]
    with pytest.raises(migrate.MigrateError, match="M945"):
        migrate.load(model, snapshot, at="elsewhere")
    snapshot.release()
    with pytest.raises(migrate.MigrateError, match="M976"):
        migrate.load(model, snapshot)
    for verb in (migrate.inspect, migrate.plan, migrate.apply, migrate.migrate_state_dict):
        with pytest.raises(migrate.MigrateError, match="M976"):
            verb(snapshot, rules=[rule])  # type: ignore[operator]


def test_at_chooses_among_the_dicts_of_a_snapshot(tmp_path: Path) -> None:
    rule = tmp_path / "rules.yaml"
    rule.write_text(RENAME)
    state = {"g": {"a": torch.ones(2)}, "d": [{"a": torch.zeros(2)}]}
    for given in (state, migrate.Stager().stage(state)):
        made = migrate.apply(given, rules=rule, at="d.0")
        assert (list(made["g"]), list(made["d"][0])) == (["a"], ["new.a"])
        model = torch.nn.Module()
        model.new = torch.nn.ParameterDict({"a": torch.zeros(2)})
        migrate.load(model, given, rules=rule, at="g")
        assert model.new["a"].tolist() == [1, 1]


def test_what_a_nested_dict_holds_is_named_by_its_class() -> None:
    report = migrate.inspect({"model": {"a": torch.ones(2)}, "b": torch.ones(1)})
    assert [(one.path, one.value) for one in report.items] == [("model", "<dict>")]
