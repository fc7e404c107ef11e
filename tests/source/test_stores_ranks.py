"""Processes of one launcher that write into a bucket, or compare what lies there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from marks import thorough
from store_servers import S3, hub_server
from test_stores import point_at_hub
from test_stores_parts import plain
from test_stores_written import tree
from work import HANG
from written_stores import held, listed, uploads

import migrate
from migrate.core.errors import MigrateError
from migrate.core.types import Ranks
from migrate.results import ApplyReport

pytestmark = [pytest.mark.servers, pytest.mark.ranks]
ROOT = Path(__file__).parents[2]


def rank(words: list[object], number: int, world: int) -> subprocess.Popen[str]:
    """One process of a launch."""
    place = {"RANK": number, "WORLD_SIZE": world, "LOCAL_RANK": number, "LOCAL_WORLD_SIZE": world}
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **{k: str(v) for k, v in place.items()}}
    command = [sys.executable, "-m", "migrate", *map(str, words)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True)


def launch(words: list[object], world: int) -> list[tuple[int, str, str]]:
    children = [rank(words, number, world) for number in range(world)]
    return [(child.returncode, *texts) for child in children for texts in [ended(child)]]


def ended(child: subprocess.Popen[str]) -> tuple[str, str]:
    return child.communicate(timeout=HANG)


@pytest.mark.parametrize(
    ("name", "world", "stored"),
    [
        ("new", 2, True),
        ("new", 2, False),
        *thorough([("new.pt", 2, True), ("new.safetensors", 2, False)], default=0),
        pytest.param("new.pt", 2, False, marks=pytest.mark.campaign),
        pytest.param("new.safetensors", 2, True, marks=pytest.mark.campaign),
    ],
)
def test_ranks_write_what_one_process_writes(
    s3: S3, local: Path, made: Path, tmp_path: Path, name: str, world: int, stored: bool
) -> None:
    source = s3.put(local, f"{tmp_path.name}/old") if stored else local
    one, out = (f"s3://bucket/{tmp_path.name}/{place}{name}" for place in ("one/", ""))
    alone = migrate.apply(source, one, rules=[made], max_shard_size="9MB")
    words = ["apply", source, "-o", out, "--rules", made, "--max-shard-size", "9MB"]
    found = launch([*words, "--format", "json", "-q"], world)
    assert [(status, err) for status, _, err in found] == [(0, "")] * world
    # rank 0 alone answers, and for all
    assert [text for _, text, _ in found[1:]] == [""] * (world - 1)
    said = ApplyReport.from_json(json.loads(found[0][1]))
    # of a file in pieces no hash is known, and it is cut into other parts
    unlike = {} if name == "new" else {key: plain(alone)[key] for key in ("files", "store")}
    assert {**plain(said), **unlike} == plain(alone)
    assert held(s3, f"{tmp_path.name}/{name}") == held(s3, f"{tmp_path.name}/one/{name}")
    # nothing of the meeting is left
    assert not [key for key in held(s3, f"{tmp_path.name}/") if "migrate-partial" in key]
    assert not uploads(s3, tmp_path.name)
    report = launch(["verify", out, "--source", source, "--rules", made, "-q"], world)
    assert [(status, err) for status, _, err in report] == [(0, "")] * world
    assert not [key for key in held(s3, f"{tmp_path.name}/") if "migrate-partial" in key]


@pytest.mark.parametrize("dies", [0, 1])
def test_a_rank_that_dies_ends_all_and_leaves_nothing_that_shows(
    s3: S3, local: Path, made: Path, tmp_path: Path, dies: int
) -> None:
    """The stack is the longest of the three files, and rank 0's alone."""
    prefix = f"{tmp_path.name}/new"
    out, here = f"s3://bucket/{prefix}", tmp_path / "here"
    migrate.apply(local, here, rules=[made], max_shard_size="9MB")
    longest = max(here.glob("*.safetensors"), key=lambda file: file.stat().st_size)
    others = sorted(set(here.glob("*.safetensors")) - {longest})
    name = longest.name if dies == 0 else others[0].name
    words = ["apply", local, "-o", out, "--rules", made, "--max-shard-size", "9MB"]
    s3.spoil(late=f"*0=PUT .*{name}.*partNumber=")
    children = [rank(words, number, 2) for number in range(2)]
    s3.wait_until_held()
    # the other one has sent something, which it takes down when it ends
    while not any(listed(s3, one) for one in uploads(s3, prefix) if name not in one["Key"]):
        time.sleep(0.05)
    children[dies].send_signal(signal.SIGKILL)
    _, err = ended(children[1 - dies])
    ended(children[dies])
    s3.spoil()
    assert children[1 - dies].returncode == 4
    assert f"error[M973]: rank {dies} died (process {children[dies].pid} on " in err
    assert "--resume" in err
    assert not held(s3, f"{prefix}/")
    again = rank(words, 0, 2)
    assert "error[M911]: " in ended(again)[1]
    assert again.returncode == 2
    if dies:
        found = launch([*words, "--resume", "-q"], 2)
        assert [(status, err) for status, _, err in found] == [(0, "")] * 2
    else:
        # by one process, which uploads what is not known to be there
        report = migrate.apply(local, out, rules=[made], max_shard_size="9MB", resume=True)
        assert report.bytes_written < sum(file.size for file in report.files.values())
    assert held(s3, f"{prefix}/") == tree(here)
    assert not held(s3, f"{prefix}.migrate-partial/")
    assert not uploads(s3, tmp_path.name)


def test_what_ranks_left_is_thrown_away(s3: S3, local: Path, made: Path, tmp_path: Path) -> None:
    prefix = f"{tmp_path.name}/new"
    out = f"s3://bucket/{prefix}"
    words = ["apply", local, "-o", out, "--rules", made, "--max-shard-size", "9MB"]
    s3.spoil(fail="PUT .*partNumber=")
    assert {status for status, _, _ in launch(words, 2)} == {4}
    s3.spoil()
    assert "ranks/call.json" in held(s3, f"{prefix}.migrate-partial/")
    assert migrate.clean(out).removed
    assert not held(s3, prefix)
    assert not uploads(s3, tmp_path.name)


def test_a_rank_with_another_plan_is_named(s3: S3, local: Path, made: Path, tmp_path: Path) -> None:
    out = f"s3://bucket/{tmp_path.name}/new"
    words = ["apply", local, "-o", out, "--rules", made, "--max-shard-size"]
    children = [rank([*words, size], n, 2) for n, size in enumerate(("9MB", "15MB"))]
    found = [ended(child)[1] for child in children]
    assert [child.returncode for child in children] == [4, 4]
    assert "error[M974]: the ranks do not see the same: rank 1 has another plan" in found[0]
    assert not held(s3, f"{tmp_path.name}/new/")
    assert not uploads(s3, tmp_path.name)


def test_outputs_that_nothing_is_written_beside_are_compared_by_one(
    local: Path, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("huggingface_hub")
    with hub_server(local) as servers:
        point_at_hub(monkeypatch, servers.hub.url, tmp_path)
        with pytest.raises(MigrateError) as caught:
            migrate.verify("hf://org/model", source=local, rules=[made], ranks=Ranks(1, 2))
    (found,) = caught.value.diagnostics
    assert (found.code, "ranks" in str(found.help)) == ("M115", True)
    assert "nothing can be written beside hf://org/model" in found.message


def test_torchrun_writes_into_a_bucket(s3: S3, local: Path, made: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch.distributed.run")
    out = f"s3://bucket/{tmp_path.name}/new"
    words: list[Any] = ["apply", local, "-o", out, "--rules", made, "--max-shard-size", "9MB"]
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    found = subprocess.run(
        [*start, "-m", "migrate", *map(str, words)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.count("published ") == 1
    migrate.apply(local, tmp_path / "here", rules=[made], max_shard_size="9MB")
    assert held(s3, f"{tmp_path.name}/new/") == tree(tmp_path / "here")
