"""Runs into a bucket that go on: which parts are kept, and what is not gone on with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from store_servers import S3
from test_stores_written import refused, tree
from written_stores import held, replace_a_part, uploads

import migrate

pytestmark = pytest.mark.servers


def test_a_failed_run_goes_on_with_the_parts_that_the_store_has(
    s3: S3, local: Path, made: Path, tmp_path: Path
) -> None:
    out = f"s3://bucket/{tmp_path.name}/new"
    foreign = s3.client.create_multipart_upload(
        Bucket="bucket", Key=f"{tmp_path.name}/new/model-00001-of-00002.safetensors"
    )["UploadId"]
    s3.spoil(fail="*1=partNumber=")
    assert "resume=True" in refused("M969", local, out, rules=[made], max_shard_size="20MB")
    s3.spoil()
    assert not held(s3, f"{tmp_path.name}/new/")
    assert "resume=True" in refused("M911", local, out, rules=[made], max_shard_size="20MB")
    text = refused("M918", local, out, rules=[made], max_shard_size="10MB", resume=True)
    assert "another plan" in text
    s3.log()
    report = migrate.apply(local, out, rules=[made], max_shard_size="20MB", resume=True)
    sent = [one for one in s3.log() if one.method == "PUT" and "safetensors" in one.path]
    assert 0 < len(sent) < report.store.parts + 1
    migrate.apply(local, tmp_path / "here", rules=[made], max_shard_size="20MB")
    assert held(s3, f"{tmp_path.name}/new/") == tree(tmp_path / "here")
    # what others began is not touched
    assert [one["UploadId"] for one in uploads(s3, tmp_path.name)] == [foreign]


@pytest.mark.parametrize("copied", [False, True])
def test_a_part_that_another_has_made_is_made_again(
    s3: S3, local: Path, made: Path, tmp_path: Path, copied: bool
) -> None:
    prefix = f"{tmp_path.name}/new"
    source, out = s3.put(local, f"{tmp_path.name}/old"), f"s3://bucket/{prefix}"
    s3.spoil(fail="*1=partNumber=(?!.*&copy)" if copied else "*2=partNumber=")
    named: dict[str, Any] = {"rules": [made], "max_shard_size": "20MB", "max_memory": "256MB"}
    named["copy"] = "auto" if copied else "never"
    refused("M969", source, out, **named)
    s3.spoil()
    key = replace_a_part(s3, tmp_path.name)
    s3.log()
    report = migrate.apply(source, out, resume=True, **named)
    sent = [one.path for one in s3.log() if one.method == "PUT" and one.path.endswith("tensors")]
    assert any(path.endswith(key) for path in sent)
    # those that nobody has touched stay
    assert len(sent) < report.store.parts
    migrate.apply(local, tmp_path / "here", rules=[made], max_shard_size="20MB")
    assert held(s3, f"{prefix}/") == tree(tmp_path / "here")


def test_another_state_of_the_source_is_not_gone_on_with(
    s3: S3, local: Path, made: Path, tmp_path: Path
) -> None:
    out = f"s3://bucket/{tmp_path.name}/new"
    s3.spoil(fail="partNumber=")
    refused("M969", local, out, rules=[made])
    s3.spoil()
    shard = local / "model-00001-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes())
    assert shard.name in refused("M918", local, out, rules=[made], resume=True)


def test_a_run_with_other_parts_is_not_gone_on_with(
    s3: S3, local: Path, made: Path, tmp_path: Path
) -> None:
    source, out = s3.put(local, f"{tmp_path.name}/old"), f"s3://bucket/{tmp_path.name}/new"
    s3.spoil(fail="partNumber=(?!.*&copy)")
    refused("M969", source, out, rules=[made])
    s3.spoil()
    assert "copy" in refused("M918", source, out, rules=[made], copy="never", resume=True)
    s3.log()
    report = migrate.apply(source, out, rules=[made], resume=True)
    again = [one for one in s3.log() if one.method == "PUT" and "safetensors" in one.path]
    assert len(again) < report.store.parts
    assert migrate.verify(out, source=source, rules=[made]).equal


def test_a_run_with_less_memory_goes_on_with_the_parts_of_one_with_more(
    s3: S3, local: Path, made: Path, tmp_path: Path
) -> None:
    out = f"s3://bucket/{tmp_path.name}/new"
    named: dict[str, Any] = {"rules": [made], "max_shard_size": "100MB"}
    small, large = (
        migrate.apply(local, out, dry_run=True, max_memory=memory, **named).store.parts
        for memory in ("256MB", "1GB")
    )
    assert small > large
    s3.spoil(fail="*1=partNumber=")
    assert "resume" in refused("M969", local, out, max_memory="1GB", **named)
    s3.spoil()
    report = migrate.apply(local, out, max_memory="256MB", resume=True, **named)
    assert report.store.parts == large
    assert migrate.verify(out, source=local, rules=[made]).equal
