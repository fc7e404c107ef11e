"""Saves behind the training: what is planned at once, what is written, and what failures leave."""

from __future__ import annotations

import gc
import logging
import os
import threading
from concurrent.futures import CancelledError

import pytest
import torch
from built import V5, module, state_of
from commandline import ROOT
from safetensors.torch import load_file
from work import HANG

import migrate
from migrate.running.publish import partial_folder
from migrate.staging import jobs

RULE = """\
id: t/rename
title: t
lineage: t
edge: [a, b]
rules: [{name: r, from: "old.{k...}", to: "new.{k}"}]
"""


@pytest.fixture
def rule(tmp_path):
    path = tmp_path / "rename.yaml"
    path.write_text(RULE)
    return path


@pytest.fixture
def held(monkeypatch):
    """Lets jobs begin; the writer waits until then."""
    go = threading.Event()

    def write(work, progress, stop):
        assert go.wait(HANG)
        return jobs.write_here(work, progress, stop)

    monkeypatch.setattr("migrate.staging.stager.write_here", write)
    yield go
    go.set()


def state(fill=1.0):
    return {"model": {"old.a": torch.full((4, 3), fill), "old.b": torch.arange(3)}, "step": 7}


def test_the_export_is_what_a_downgrade_of_the_file_makes(tmp_path) -> None:
    model = state_of(V5)
    torch.save({"model": model, "step": 1000}, tmp_path / "step.pt")
    stager = migrate.Stager()
    job = (
        stager.stage({"model": model, "step": 1000})
        .migrate(to="hf-mixtral@v4", at="model")
        .save_async(tmp_path / "export")
    )
    for one in model.values():
        one.zero_()
    report = job.result(HANG)
    assert report.path == str(tmp_path / "export")
    assert report.layouts["hf-mixtral"] == "v4"
    assert job.done()
    assert job.exception() is None
    assert job.progress[0] == job.progress[1] > 0
    for form in ("torch", "safetensors"):
        migrate.downgrade(
            tmp_path / "step.pt",
            tmp_path / form,
            to="hf-mixtral@v4",
            at="model",
            output_format=form,
        )
        assert migrate.diff(tmp_path / "export", tmp_path / form).equal
    for file in (tmp_path / "safetensors").iterdir():
        assert file.read_bytes() == (tmp_path / "export" / file.name).read_bytes()


def test_the_lines_of_the_readme_export_the_step_that_was_staged(tmp_path, monkeypatch) -> None:
    section = (ROOT / "README.md").read_text(encoding="utf-8").split("# Write another layout")[1]
    lines = section.split("```python\n")[1].split("```")[0]
    assert "\n... " in lines
    model = module(state_of(V5))
    with torch.no_grad():
        for number, one in enumerate(model.parameters()):
            one.copy_(torch.randn(one.shape, generator=torch.Generator().manual_seed(number)))

    def train():
        with torch.no_grad():
            for one in model.parameters():
                one.add_(1)

    monkeypatch.chdir(tmp_path)
    torch.save({"model": model.state_dict(), "step": 1000}, "step.pt")
    names = {"torch": torch, "migrate": migrate, "model": model, "train": train}
    exec(lines.replace("\n... ", "\ntrain() "), names)
    assert names["job"].done()
    migrate.downgrade("step.pt", "made", to="hf-mixtral@v4", at="model")
    assert migrate.diff("out/step-1000", "made").equal


def test_problems_are_raised_by_migrate_before_anything_is_written(tmp_path, rule) -> None:
    snapshot = migrate.Stager().stage({"model": {"else": torch.ones(2)}})
    with pytest.raises(migrate.MigrateError) as caught:
        snapshot.migrate(rules=rule)
    assert "M201" in str(caught.value) or "else" in str(caught.value)


def test_the_plan_the_state_dict_and_the_file_agree(tmp_path, rule) -> None:
    snapshot = migrate.Stager().stage(state())
    migration = snapshot.migrate(rules=rule)
    assert [step.to for step in migration.plan.report.path] == ["b"]
    made = migration.state_dict()
    assert list(made["model"]) == ["new.a", "new.b"]
    assert made["step"] == 7
    report = migration.save(tmp_path / "out.pt")
    saved = torch.load(tmp_path / "out.pt", weights_only=True)
    assert report.tensors == 2
    assert saved["step"] == 7
    assert all(torch.equal(saved["model"][key], made["model"][key]) for key in made["model"])


def test_a_snapshot_is_saved_as_it_is(tmp_path) -> None:
    snapshot = migrate.Stager().stage(state())
    snapshot.save(tmp_path / "out.pt")
    again = torch.load(tmp_path / "out.pt", weights_only=True)
    assert torch.equal(again["model"]["old.a"], torch.ones(4, 3))
    assert again["step"] == 7


@pytest.mark.parametrize(
    ("given", "at", "said"),
    [
        ({"g": {"old.a": torch.ones(2)}, "d": {"old.a": torch.ones(2)}}, None, ["g: 1", "d: 1"]),
        ({"g": {"old.a": torch.ones(2)}, "n": {"x": 1}}, "elsewhere", ["`elsewhere`", "g"]),
    ],
)
def test_at_that_fits_no_dict_or_two_is_refused_by_path(given, at, said, rule) -> None:
    snapshot = migrate.Stager().stage(given)
    with pytest.raises(migrate.MigrateError) as caught:
        snapshot.migrate(rules=rule, at=at)
    assert [d.code for d in caught.value.diagnostics] == ["M945"]
    assert all(text in str(caught.value) for text in said)
    with pytest.raises(migrate.MigrateError, match="M945"):
        migrate.migrate_state_dict(snapshot, rules=rule, at=at)


def test_at_chooses_among_several(tmp_path, rule) -> None:
    given = {"g": {"old.a": torch.ones(2)}, "d": [{"old.a": torch.zeros(2)}]}
    migration = migrate.Stager().stage(given).migrate(rules=rule, at="d.0")
    made = migration.state_dict()
    assert list(made["d"][0]) == ["new.a"]
    assert list(made["g"]) == ["old.a"]
    migration.save(tmp_path / "out.pt")
    saved = torch.load(tmp_path / "out.pt", weights_only=True)
    assert list(saved["d"][0]) == ["new.a"]
    assert list(saved["g"]) == ["old.a"]


def test_what_no_file_holds_is_refused_by_path_when_it_is_planned(tmp_path) -> None:
    given = {"model": {"a": torch.ones(2), "s": torch.eye(3).to_sparse()}, "n": [lambda: 0]}
    with pytest.raises(migrate.MigrateError, match="M935") as caught:
        migrate.Stager().stage(given).save_async(tmp_path / "out.pt")
    notes = " ".join(note for d in caught.value.diagnostics for note in d.notes)
    assert "model.s" in notes
    assert "n.0" in notes
    assert os.listdir(tmp_path) == []


def test_the_rest_is_left_with_its_optimizer_and_listed(tmp_path) -> None:
    rule = tmp_path / "merge.yaml"
    rule.write_text(
        "id: t/merge\ntitle: t\nlineage: t\nedge: [a, b]\nrules:\n  - name: r\n"
        '    from: "{w:a|b}"\n    to: both\n    via: [{affine: {mul: 2}}, {stack: {over: w}}]\n'
    )
    weights = {"a": torch.nn.Parameter(torch.ones(2)), "b": torch.nn.Parameter(torch.ones(2))}
    optimizer = torch.optim.Adam(weights.values())
    sum(one.sum() for one in weights.values()).backward()
    optimizer.step()
    given = {"model": weights, "optimizer": optimizer.state_dict(), "f": lambda: 0}
    snapshot = migrate.Stager().stage(given)
    asked = {"rules": rule, "allow": {"lossy"}}
    with pytest.raises(migrate.MigrateError, match=r"M935|M410"):
        snapshot.migrate(**asked)
    migration = snapshot.migrate(**asked, rest="leave")
    notes = " ".join(migration.plan.report.notes)
    assert "optimizer" in notes
    assert "without" in notes
    assert list(migration.state_dict()) == ["both"]
    migration.save(tmp_path / "out")
    assert set(load_file(tmp_path / "out" / "model.safetensors")) == {"both"}


def test_what_takes_a_state_dict_takes_a_snapshot(tmp_path, rule) -> None:
    flat = torch.nn.Module()
    flat.old = torch.nn.Linear(2, 2)
    snapshot = migrate.Stager().stage(flat.state_dict())
    assert migrate.inspect(snapshot).tensors == 2
    assert (
        migrate.plan(snapshot, rules=rule).digest == migrate.plan(dict(snapshot), rules=rule).digest
    )
    new = migrate.apply(snapshot, rules=rule)
    assert list(new) == ["new.weight", "new.bias"]
    assert list(new._metadata) == list(migrate.apply(flat.state_dict(), rules=rule)._metadata)
    assert migrate.apply(snapshot, tmp_path / "out.safetensors", rules=rule).tensors == 2
    assert list(migrate.migrate_state_dict(snapshot, rules=rule)) == list(new)
    target = torch.nn.Module()
    target.new = torch.nn.Linear(2, 2)
    migrate.load(target, snapshot, rules=rule)
    assert torch.equal(target.new.weight, flat.old.weight)


def test_a_target_that_exists_is_refused_by_save_async_itself(tmp_path, held) -> None:
    snapshot = migrate.Stager().stage(state())
    (tmp_path / "there").mkdir()
    with pytest.raises(migrate.MigrateError, match="M904"):
        snapshot.save_async(tmp_path / "there")
    job = snapshot.save_async(tmp_path / "out")
    with pytest.raises(migrate.MigrateError, match="M904"):
        snapshot.save_async(tmp_path / "out")
    held.set()
    job.result(HANG)


def test_jobs_are_written_in_order_by_one_thread(tmp_path, held) -> None:
    stager = migrate.Stager()
    made = [stager.stage(state(n)).save_async(tmp_path / f"{n}.pt") for n in range(4)]
    writers = [t for t in threading.enumerate() if t.name == "migrate-writer"]
    assert len(writers) == 1
    assert not any(job.done() for job in made)
    with pytest.raises(TimeoutError, match=r"3\.pt"):
        made[3].result(0.01)
    held.set()
    made[3].result(HANG)
    assert all(job.done() for job in made)
    for n in range(4):
        saved = torch.load(tmp_path / f"{n}.pt", weights_only=True)
        assert torch.equal(saved["model"]["old.a"], torch.full((4, 3), float(n)))


def test_a_failure_frees_the_lease_leaves_nothing_and_a_retry_succeeds(
    tmp_path, monkeypatch, caplog
) -> None:
    stager = migrate.Stager()
    snapshot = stager.stage(state())

    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("migrate.running.tiles.write_at", fail)
        job = snapshot.save_async(tmp_path / "out")
        error = job.exception(HANG)
    assert isinstance(error, migrate.MigrateError)
    assert "M909" in str(error)
    assert str(tmp_path / "out") in str(error)
    assert "resume" not in str(error)
    assert os.listdir(tmp_path) == []
    with pytest.raises(migrate.MigrateError, match="M909"):
        job.result()
    gc.collect()
    gc.disable()
    try:
        assert snapshot.save_async(tmp_path / "out").result(HANG).path
        del snapshot
        assert not any(block.lent for block in stager._pool._blocks)
    finally:
        gc.enable()
    stager.close()


def test_a_failure_that_nobody_asked_for_is_logged_and_raised_by_close(
    tmp_path, monkeypatch, caplog
) -> None:
    stager = migrate.Stager()
    monkeypatch.setattr(jobs, "write_checkpoint", lambda *args, **more: 1 / 0)
    with caplog.at_level(logging.ERROR, "migrate"):
        stager.stage(state()).save_async(tmp_path / "out")
        with pytest.raises(migrate.MigrateError, match=r"M980.*ZeroDivisionError") as caught:
            stager.close()
    assert "M980" in caplog.text
    assert str(tmp_path / "out") in str(caught.value)
    stager.close()
    asked = stager.stage(state()).save_async(tmp_path / "out")
    assert asked.exception(HANG) is not None
    stager.close()


def test_a_path_is_free_as_soon_as_its_job_has_ended(tmp_path, monkeypatch) -> None:
    """Even if the writer's thread has not gone on since: who got the error saves again at once."""
    go = threading.Event()
    run = jobs.Job._run

    def held_after(self, write):
        run(self, write)
        assert go.wait(HANG)

    monkeypatch.setattr(jobs.Job, "_run", held_after)
    stager = migrate.Stager()
    with monkeypatch.context() as patched:
        patched.setattr(jobs, "write_checkpoint", lambda *args, **more: 1 / 0)
        failed = stager.stage(state()).save_async(tmp_path / "out")
        assert failed.exception(HANG) is not None
    try:
        again = stager.stage(state(2.0)).save_async(tmp_path / "out")
    finally:
        go.set()
    assert again.result(HANG).tensors == 2
    stager.close()


def test_cancel_ends_a_job_that_waits_and_one_in_the_middle(tmp_path, monkeypatch) -> None:
    begun, go = threading.Event(), threading.Event()
    stager = migrate.Stager()

    def heard(self, done, total):
        begun.set()
        assert go.wait(HANG)

    monkeypatch.setattr(jobs.Job, "_told", heard)
    job = stager.stage(state()).save_async(tmp_path / "a")
    waiting = stager.stage(state()).save_async(tmp_path / "b")
    assert begun.wait(HANG)
    assert partial_folder(tmp_path / "a").exists()
    assert job.cancel()
    assert waiting.cancel()
    go.set()
    for one in (job, waiting):
        with pytest.raises(CancelledError, match=one.path):
            one.result(HANG)
        assert not one.cancel()
    assert os.listdir(tmp_path) == []
    stager.close()
    assert not any(block.lent for block in stager._pool._blocks)


def test_close_waits_for_jobs_or_abandons_them(tmp_path, held) -> None:
    stager = migrate.Stager()
    first = stager.stage(state()).save_async(tmp_path / "a")
    stager.close(wait=False)
    held.set()
    assert isinstance(first.exception(HANG), CancelledError)
    held.clear()
    second = stager.stage(state()).save_async(tmp_path / "b")
    threading.Timer(0.05, held.set).start()
    stager.close()
    assert second.done()
    assert (tmp_path / "b").is_dir()
    assert not (tmp_path / "a").exists()


def test_a_snapshot_can_be_released_while_it_is_written(tmp_path, held) -> None:
    stager = migrate.Stager()
    with stager.stage(state(3.0)) as snapshot:
        job = snapshot.save_async(tmp_path / "out.pt")
    other = stager.stage(state(5.0))
    held.set()
    job.result(HANG)
    saved = torch.load(tmp_path / "out.pt", weights_only=True)
    assert torch.equal(saved["model"]["old.a"], torch.full((4, 3), 3.0))
    with pytest.raises(migrate.MigrateError, match="M976"):
        snapshot.save_async(tmp_path / "again")
    del other


def test_what_a_killed_process_left_is_no_obstacle_but_a_run_over_files_is(tmp_path) -> None:
    snapshot = migrate.Stager().stage(state())
    folder = partial_folder(tmp_path / "out")
    (folder / "data").mkdir(parents=True)
    (folder / "journal.jsonl").write_text('{"kind": "journal", "source": null}\n')
    snapshot.save(tmp_path / "out")
    other = partial_folder(tmp_path / "other")
    (other / "data").mkdir(parents=True)
    (other / "journal.jsonl").write_text('{"kind": "journal", "source": {"a": [1]}}\n')
    with pytest.raises(migrate.MigrateError, match="M911"):
        snapshot.save_async(tmp_path / "other")
    assert other.is_dir()
