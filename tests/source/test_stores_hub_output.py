"""Outputs that are committed to the Hub: to what, and what is there when it does not take them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from store_servers import COMMIT, MADE, MOVED, HubServers, hub_server
from stored_checkpoint import rule, shards
from test_stores import point_at_hub, tree

import migrate
from migrate.core.errors import MigrateError
from migrate.core.types import Ranks, RunPart

pytestmark = [
    pytest.mark.servers,
    # of huggingface_hub about what it calls itself
    pytest.mark.filterwarnings("ignore:Use 'content=<...>':DeprecationWarning"),
]
OUT = "hf://org/model"


@pytest.fixture
def local(tmp_path: Path) -> Path:
    return shards(tmp_path / "old")


@pytest.fixture
def made(tmp_path: Path) -> Path:
    return rule(tmp_path)


@pytest.fixture
def hub(local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServers]:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    with hub_server(local) as servers:
        point_at_hub(monkeypatch, servers.hub.url, tmp_path)
        yield servers


def refused(code: str, *arguments: Any, **named: Any) -> str:
    with pytest.raises(MigrateError) as caught:
        migrate.apply(*arguments, **named)
    assert {d.code for d in caught.value.diagnostics} == {code}, str(caught.value)
    assert "planted" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("branch", "to"),
    [("", "pull request"), ("@main", "main"), ("@v5", "v5"), ("@refs/pr/3", "refs/pr/3")],
)
def test_an_output_is_one_commit_to_what_is_named_or_a_pull_request(
    hub: HubServers, made: Path, tmp_path: Path, branch: str, to: str
) -> None:
    migrate.apply(OUT, tmp_path / "here", rules=[made])
    hub.pushed.branches["refs/pr/3"] = MOVED
    report = migrate.apply(OUT, OUT + branch, rules=[made])
    assert report.path == f"hf://org/model@{MADE}/"
    assert [one for one, _ in hub.pushed.commits] == [to]
    assert hub.pushed.files() == tree(tmp_path / "here")
    # what would be another model beside the one of the output
    assert (
        hub.pushed.removed()
        == {
            *(f"model-{number:05}-of-00003.safetensors" for number in (1, 2, 3)),
            "model.safetensors.index.json",
        }
        - tree(tmp_path / "here").keys()
    )
    said = " ".join(report.notes)
    assert ("discussions/7" in said) == (not branch)
    assert "model-00001-of-00003.safetensors" in said
    # the branch is made where it was not there
    assert ("v5" in hub.pushed.branches) == (branch == "@v5")
    assert not list((tmp_path / "work").iterdir())


def test_a_dry_run_commits_nothing(hub: HubServers, made: Path, tmp_path: Path) -> None:
    assert migrate.apply(OUT, OUT, rules=[made], dry_run=True).digest
    assert not hub.pushed.commits
    assert not list((tmp_path / "work").iterdir())


def test_a_branch_that_moves_during_the_run_is_not_committed_to(
    hub: HubServers, local: Path, made: Path, tmp_path: Path
) -> None:
    def move(done: int, total: int) -> None:
        hub.at[:] = [MOVED, COMMIT]

    said = refused("M905", local, f"{OUT}@main", rules=[made], progress=move)
    assert COMMIT in said
    assert "hf upload org/model" in said
    assert not hub.pushed.commits
    # hours of work are not thrown away
    migrate.apply(local, tmp_path / "here", rules=[made])
    assert tree(tmp_path / "work" / "model.migrate-hub") == tree(tmp_path / "here")


def test_what_the_hub_does_not_take_is_kept(
    hub: HubServers, local: Path, made: Path, tmp_path: Path
) -> None:
    hub.pushed.forbidden = True
    said = refused("M968", local, OUT, rules=[made])
    assert f"kept: {tmp_path / 'work' / 'model.migrate-hub'}" in said
    assert "HF_TOKEN" in said
    assert migrate.verify(tmp_path / "work/model.migrate-hub", source=local, rules=[made]).equal


@pytest.mark.parametrize(
    ("url", "code", "said"),
    [
        ("hf://org/model/sub", "M115", "an output is the whole"),
        (f"hf://org/model@{COMMIT}", "M115", "names a commit"),
        ("hf://org/none", "M917", "no such repository"),
        ("hf://org/old", "M917", "is called org/model now"),
        ("hf://org/gated", "M968", "is gated"),
    ],
)
def test_a_place_on_the_hub_is_looked_at_before_anything_is_written(
    hub: HubServers, local: Path, made: Path, tmp_path: Path, url: str, code: str, said: str
) -> None:
    assert said in refused(code, local, url, rules=[made])
    assert not list((tmp_path / "work").iterdir())


def test_an_upload_that_fails_is_said(
    hub: HubServers, local: Path, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from store_servers import Elsewhere

    monkeypatch.setattr(Elsewhere, "do_PUT", lambda self: self.answer(403))
    said = refused("M969", local, OUT, rules=[made])
    assert "the upload failed (status 403)" in said
    assert "hf upload org/model" in said
    assert not hub.pushed.commits


@pytest.mark.parametrize("more", [{"part": RunPart(0, 2)}, {"ranks": Ranks(0, 2)}])
def test_several_processes_are_told_what_to_do_instead(
    hub: HubServers, local: Path, made: Path, tmp_path: Path, more: dict[str, Any]
) -> None:
    said = refused("M115", local, f"{OUT}@main", rules=[made], **more)
    assert "hf://org/model@main: is committed to by one process" in said
    assert "`hf upload org/model DIR`" in said
    assert not list((tmp_path / "work").iterdir())
    assert not hub.pushed.commits
