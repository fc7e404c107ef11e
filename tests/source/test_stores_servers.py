"""Buckets on servers that are not moto: what each of them is for, and the whole of a run.

ministack honours every condition, that on copies too; Ceph's gateway enforces what a part may be,
and ignores the conditions on copies and on the completion of an upload.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
from bucket_servers import STARTED
from store_servers import S3
from test_stores_ranks import launch
from test_stores_written import refused, tree
from written_stores import held, through_a_released_lineage, uploads

import migrate
from migrate.core.types import RunPart
from migrate.source.stores import s3_uploads

pytestmark = [
    pytest.mark.servers,
    pytest.mark.parametrize("started_other", sorted(STARTED), indirect=True),
    pytest.mark.usefixtures("started_other"),
]


@pytest.mark.parametrize("copy", ["auto", "never"])
def test_a_run_from_bucket_to_bucket_and_back(
    s3: S3, local: Path, made: Path, tmp_path: Path, copy: str
) -> None:
    source, out = s3.put(local, f"{tmp_path.name}/old"), f"s3://bucket/{tmp_path.name}/new"
    options: Any = {"rules": [made], "max_shard_size": "15MB"}
    migrate.apply(local, tmp_path / "here", **options)
    report = migrate.apply(source, out, **options, copy=copy)
    assert (report.store.copied > 10 << 20) == (copy == "auto")
    assert (report.store.copied == 0) == (copy == "never")
    # neither has a checksum of the whole object that is made of parts, nor of those it copies
    assert (report.store.checksum, report.store.compared) == ("MD5", 0)
    assert held(s3, f"{tmp_path.name}/new/") == tree(tmp_path / "here")
    assert migrate.diff(out, tmp_path / "here").equal
    assert migrate.verify(out, source=source, rules=[made]).equal
    migrate.downgrade(out, f"{out}-back", rules=[made], copy=copy)
    assert migrate.diff(f"{out}-back", local).tensors_equal
    assert not uploads(s3, tmp_path.name)
    assert not held(s3, f"{tmp_path.name}/new.migrate-partial")


@pytest.mark.parametrize("copy", ["auto", "never"])
def test_a_released_lineage_from_bucket_to_bucket(s3: S3, tmp_path: Path, copy: str) -> None:
    through_a_released_lineage(s3, tmp_path, copy)


def test_a_run_that_fails_goes_on_or_is_thrown_away(
    s3: S3, local: Path, made: Path, tmp_path: Path
) -> None:
    source, out = s3.put(local, f"{tmp_path.name}/old"), f"s3://bucket/{tmp_path.name}/new"
    options: Any = {"rules": [made], "max_shard_size": "15MB"}
    foreign = s3.client.create_multipart_upload(
        Bucket="bucket", Key=f"{tmp_path.name}/new/model-00001-of-00002.safetensors"
    )["UploadId"]
    for again in (False, True):
        # the second that is copied
        s3.spoil(fail="*1=partNumber=.*&copy")
        refused("M969", source, out, **options)
        s3.spoil()
        assert not held(s3, f"{tmp_path.name}/new/")
        assert len(uploads(s3, tmp_path.name)) == 3
        if not again:
            found = migrate.clean(out)
            assert found.removed
            assert sum(one.bytes for one in found.uploads) > 5 << 20
            assert [one["UploadId"] for one in uploads(s3, tmp_path.name)] == [foreign]
    s3.log()
    report = migrate.apply(source, out, **options, resume=True)
    sent = [one for one in s3.log() if one.method == "PUT" and one.path.endswith(".safetensors")]
    assert 0 < len(sent) < report.store.parts
    migrate.apply(local, tmp_path / "here", **options)
    assert held(s3, f"{tmp_path.name}/new/") == tree(tmp_path / "here")
    assert [one["UploadId"] for one in uploads(s3, tmp_path.name)] == [foreign]
    s3.client.abort_multipart_upload(
        Bucket="bucket",
        Key=f"{tmp_path.name}/new/model-00001-of-00002.safetensors",
        UploadId=foreign,
    )


def test_what_appeared_meanwhile_is_not_replaced(
    s3: S3, local: Path, made: Path, tmp_path: Path
) -> None:
    """Asked for before each completion, where the condition on it is ignored."""
    out, key = f"s3://bucket/{tmp_path.name}/new", f"{tmp_path.name}/new/model.safetensors"

    def appear(done: int, total: int) -> None:
        s3.client.put_object(Bucket="bucket", Key=key, Body=b"mine")

    assert "appeared" in refused("M904", local, out, rules=[made], progress=appear)
    assert held(s3, key) == {"": b"mine"}
    s3.client.delete_object(Bucket="bucket", Key=key)
    migrate.clean(out)
    assert not uploads(s3, tmp_path.name)


def test_an_object_that_is_replaced_before_it_is_copied_stops_the_run(
    s3: S3, local: Path, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = s3.put(local, f"{tmp_path.name}/old"), f"s3://bucket/{tmp_path.name}/new"
    shard = "model-00002-of-00002.safetensors"
    begin = s3_uploads.S3Output.begin

    def replace_first(output: s3_uploads.S3Output, key: str, run: str) -> str:
        body = bytearray((local / shard).read_bytes())
        body[-1] ^= 1
        s3.client.put_object(Bucket="bucket", Key=f"{tmp_path.name}/old/{shard}", Body=bytes(body))
        return begin(output, key, run)

    before = hashlib.md5((local / shard).read_bytes()).hexdigest()
    monkeypatch.setattr(s3_uploads.S3Output, "begin", replace_first)
    said = refused("M905", source, out, rules=[made])
    assert shard in said
    assert before in said
    assert not held(s3, f"{tmp_path.name}/new")
    assert not uploads(s3, tmp_path.name)


def test_a_copy_is_on_the_condition_that_the_source_is_the_one_that_was_opened(
    request: pytest.FixtureRequest, s3: S3, local: Path, tmp_path: Path
) -> None:
    """Which ministack alone honours."""
    s3.put(local, f"{tmp_path.name}/old")
    key = f"{tmp_path.name}/old/model-00001-of-00002.safetensors"
    etag = s3.client.head_object(Bucket="bucket", Key=key)["ETag"]
    output = s3_uploads.S3Output(f"s3://bucket/{tmp_path.name}/new")
    name = output.key_of("model.safetensors")
    upload = output.begin(name, "0" * 32)
    output.copy_part(name, upload, 1, ("bucket", key, etag), 0, 5 << 20)
    other = ("bucket", key, f'"{"0" * 32}"')
    if request.node.callspec.params["started_other"] == "ministack":
        with pytest.raises(FileNotFoundError):
            output.copy_part(name, upload, 2, other, 0, 5 << 20)
    output.abort(name, upload)


def test_of_two_runs_that_go_on_at_once_one_finishes_and_the_other_says_so(
    s3: S3, local: Path, made: Path, tmp_path: Path
) -> None:
    source, out = s3.put(local, f"{tmp_path.name}/old"), f"s3://bucket/{tmp_path.name}/new"
    options: Any = {"rules": [made], "max_shard_size": "15MB", "copy": "never"}
    begun: list[int] = []

    def other(done: int, total: int) -> None:
        if not begun:
            begun.append(done)
            text = refused("M911", source, out, **options)
            assert "or another one is writing there now" in text
            migrate.apply(source, out, **options, resume=True)

    said = refused("M913", source, out, **options, progress=other, threads=1)
    assert "the store no longer knows the upload that was begun for it" in said
    assert "another run has finished the output with it" in said
    assert "is kept" not in said
    migrate.apply(local, tmp_path / "here", **options)
    assert held(s3, f"{tmp_path.name}/new/") == tree(tmp_path / "here")
    assert not uploads(s3, tmp_path.name)
    assert not held(s3, f"{tmp_path.name}/new.migrate-partial")


def test_a_run_whose_uploads_are_thrown_away_meanwhile_says_so(
    s3: S3, local: Path, made: Path, tmp_path: Path
) -> None:
    source, out = s3.put(local, f"{tmp_path.name}/old"), f"s3://bucket/{tmp_path.name}/new"
    options: Any = {"rules": [made], "max_shard_size": "15MB", "copy": "never"}

    def clean(done: int, total: int) -> None:
        migrate.clean(out)

    said = refused("M913", source, out, **options, progress=clean, threads=1)
    assert "`migrate clean`" in said
    assert not held(s3, f"{tmp_path.name}/new")
    migrate.apply(source, out, **options, resume=True)
    assert migrate.verify(out, source=source, rules=[made]).equal


@pytest.mark.parametrize("name", ["new.pt", "new"])
def test_parts_and_ranks_upload_what_one_process_uploads(
    s3: S3, local: Path, made: Path, tmp_path: Path, name: str
) -> None:
    """An archive in pieces, whose tail is uploaded by what publishes, and files."""
    options: Any = {"rules": [made], "max_shard_size": "9MB"}
    here = tmp_path / "here"
    here.mkdir()
    migrate.apply(local, here / name, **options)
    wanted = tree(here)
    out = f"s3://bucket/{tmp_path.name}/parts/{name}"
    for number in (1, 0):
        migrate.apply(local, out, part=RunPart(number, 2), **options)
    migrate.publish(out)
    assert held(s3, f"{tmp_path.name}/parts/") == wanted
    out = f"s3://bucket/{tmp_path.name}/ranks/{name}"
    words = ["apply", local, "-o", out, "--rules", made, "--max-shard-size", "9MB", "-q"]
    assert [(status, err) for status, _, err in launch(words, 2)] == [(0, "")] * 2
    assert held(s3, f"{tmp_path.name}/ranks/") == wanted
    assert not uploads(s3, tmp_path.name)
