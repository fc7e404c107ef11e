"""Answers of a store that are lost, so that the client library asks again for what was done."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from store_servers import S3
from stored_checkpoint import rule, shards
from test_stores_written import refused, tree
from work import HANG
from written_stores import held, large, uploads

import migrate
from migrate.core.types import RunPart
from migrate.running import store_run

pytestmark = pytest.mark.servers


@pytest.fixture
def local(tmp_path: Path) -> Path:
    return shards(tmp_path / "old", rows=20)


@pytest.fixture
def made(tmp_path: Path) -> Path:
    return rule(tmp_path)


@pytest.fixture(autouse=True)
def patient(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    """boto3 asks again once, as it does unless it is told not to."""
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")


def test_whichever_answer_is_lost_the_run_succeeds_and_leaves_nothing(
    s3: S3, local: Path, made: Path, tmp_path: Path
) -> None:
    source = s3.put(local, f"{tmp_path.name}/old")
    migrate.apply(local, tmp_path / "here", rules=[made])
    expected = tree(tmp_path / "here")
    s3.log()
    migrate.apply(source, f"s3://bucket/{tmp_path.name}/new", rules=[made])
    count = len(s3.log())
    assert count > 30
    for at in range(count):
        prefix = f"{tmp_path.name}/new-{at}"
        s3.spoil(lose=f"*{at}=^[A-Z]+ /bucket")
        migrate.apply(source, f"s3://bucket/{prefix}", rules=[made])
        s3.spoil()
        assert held(s3, f"{prefix}/") == expected, at
        assert not uploads(s3, prefix), at
        assert not held(s3, f"{prefix}.migrate-partial/"), at


def test_a_run_knows_its_own_journal_and_no_other(
    s3: S3, local: Path, made: Path, tmp_path: Path
) -> None:
    out = f"s3://bucket/{tmp_path.name}/new"
    s3.spoil(lose="*0=^PUT .*journal")
    migrate.apply(local, out, rules=[made])
    # what another run wrote between the look and the journal is not taken for its own
    other = f"{out}-other"
    s3.spoil(fail="partNumber=")
    refused("M969", local, other, rules=[made])
    journal = f"{tmp_path.name}/new-other.migrate-partial/journal.json"
    content = s3.client.get_object(Bucket="bucket", Key=journal)["Body"].read()
    s3.spoil()

    def appear(output: object) -> None:
        key = f"{tmp_path.name}/new-third.migrate-partial/journal.json"
        s3.client.put_object(Bucket="bucket", Key=key, Body=content)

    with pytest.MonkeyPatch.context() as patched:
        # the last that is done before the journal is written
        patched.setattr(store_run, "require_free", appear)
        assert "left by an earlier run" in refused("M911", local, f"{out}-third", rules=[made])


@pytest.mark.parametrize("way", ["alone", "resumed", "parts", "cleaned"])
def test_an_upload_that_was_begun_twice_does_not_stay_and_foreign_ones_do(
    s3: S3, local: Path, made: Path, tmp_path: Path, way: str
) -> None:
    out, key = f"s3://bucket/{tmp_path.name}/new", f"{tmp_path.name}/new/model.safetensors"
    foreign = s3.client.create_multipart_upload(Bucket="bucket", Key=key)["UploadId"]
    s3.spoil(lose="*0=^POST .*uploads", **{} if way == "alone" else {"fail": "partNumber="})
    if way == "alone":
        migrate.apply(local, out, rules=[made])
    elif way == "parts":
        refused("M969", local, out, rules=[made], part=RunPart(0, 1))
        assert len(uploads(s3, tmp_path.name)) == 3
        s3.spoil()
        migrate.apply(local, out, rules=[made], part=RunPart(0, 1))
        migrate.publish(out)
    else:
        refused("M969", local, out, rules=[made])
        assert len(uploads(s3, tmp_path.name)) == 3
        s3.spoil()
        if way == "resumed":
            migrate.apply(local, out, rules=[made], resume=True)
        else:
            assert len(migrate.clean(out).uploads) == 2
    assert [one["UploadId"] for one in uploads(s3, tmp_path.name)] == [foreign]
    s3.client.abort_multipart_upload(Bucket="bucket", Key=key, UploadId=foreign)


@pytest.mark.parametrize("of", [None, RunPart(0, 1)])
def test_of_a_run_that_the_checkpoint_stops_no_upload_stays(
    s3: S3, local: Path, made: Path, tmp_path: Path, of: RunPart | None
) -> None:
    """An upload that was begun twice is thrown away with the others."""
    source, out = s3.put(local, f"{tmp_path.name}/old"), f"s3://bucket/{tmp_path.name}/new"
    key = f"{tmp_path.name}/old/model-00002-of-00003.safetensors"
    s3.spoil(lose="*0=^POST .*uploads")

    def replace(done: int, total: int) -> None:
        s3.client.put_object(Bucket="bucket", Key=key, Body=b"other")

    more: dict[str, Any] = {} if of is None else {"part": of}
    refused("M905", source, out, rules=[made], progress=replace, **more)
    assert bool(uploads(s3, tmp_path.name)) == (of is not None)
    migrate.clean(out)
    assert not uploads(s3, tmp_path.name)


def test_an_interrupt_leaves_what_resuming_takes_and_says_so_in_a_line(
    s3: S3, made: Path, tmp_path: Path
) -> None:
    local = large(tmp_path / "large")
    prefix = f"{tmp_path.name}/new"
    out, words = f"s3://bucket/{prefix}", ["--rules", str(made), "--max-shard-size", "15MB"]
    s3.spoil(hold="*1=partNumber=")
    child = subprocess.Popen(
        [sys.executable, "-m", "migrate", "apply", str(local), "-o", out, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    s3.wait_until_held()
    child.send_signal(signal.SIGINT)
    # what is on its way is waited for
    s3.spoil()
    said, shown = child.communicate(timeout=HANG)
    assert (child.returncode, said) == (130, "")
    (line,) = [one for one in shown.splitlines() if "interrupted" in one]
    assert "--resume" in line
    assert "Traceback" not in shown
    assert not held(s3, f"{prefix}/")
    assert len(uploads(s3, prefix)) == 2
    there = sum(
        len(
            s3.client.list_parts(Bucket="bucket", Key=one["Key"], UploadId=one["UploadId"])["Parts"]
        )
        for one in uploads(s3, prefix)
    )
    s3.log()
    report = migrate.apply(local, out, rules=[made], max_shard_size="15MB", resume=True)
    sent = [one for one in s3.log() if one.method == "PUT" and one.path.endswith(".safetensors")]
    assert len(sent) == report.store.parts - there
    migrate.apply(local, tmp_path / "here", rules=[made], max_shard_size="15MB")
    assert held(s3, f"{prefix}/") == tree(tmp_path / "here")
    assert not uploads(s3, prefix)
