"""Checkpoints written to a bucket: what appears there, in which order, and what is left over."""

from __future__ import annotations

import base64
import json
import random
import signal
import subprocess
import sys
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from marks import thorough
from safetensors.numpy import save_file
from store_servers import S3
from stored_checkpoint import RULE, shards
from written_stores import MIB, held, large, through_a_released_lineage, uploads

import migrate
from migrate.cli import store_text
from migrate.core.errors import MigrateError
from migrate.running import part_plan
from migrate.source.stores import s3_uploads
from migrate.source.stores.s3 import S3Prefix

pytestmark = pytest.mark.servers


def tree(folder: Path) -> dict[str, bytes]:
    return {
        file.relative_to(folder).as_posix(): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file()
    }


def refused(code: str, *arguments: Any, **named: Any) -> str:
    with pytest.raises(MigrateError) as caught:
        migrate.apply(*arguments, **named)
    assert {d.code for d in caught.value.diagnostics} == {code}, str(caught.value)
    return str(caught.value)


def unfinished(out: str, left: dict[str, bytes], expected: dict[str, bytes]) -> None:
    """Of an output that appears file after file a reader takes nothing, but for one that lacks
    the index alone.
    """
    with suppress(MigrateError):
        migrate.inspect(out)
        assert expected.keys() - left.keys() == {"model.safetensors.index.json"}
    assert left.items() < expected.items()


def coded(crc: int, length: int) -> str:
    """A checksum as S3 writes it."""
    return base64.b64encode(crc.to_bytes(length, "big")).decode()


def test_a_local_checkpoint_is_written_to_a_bucket(
    s3: S3, local: Path, made: Path, tmp_path: Path
) -> None:
    here = migrate.apply(local, tmp_path / "here", rules=[made])
    there = migrate.apply(local, f"s3://bucket/{tmp_path.name}/new", rules=[made])
    assert there.path == f"s3://bucket/{tmp_path.name}/new"
    assert held(s3, f"{tmp_path.name}/new/") == tree(tmp_path / "here")
    assert there.digest == here.digest
    assert there.files == here.files
    assert there.store.copied == 0
    assert there.store.why == "the source is not in S3"
    assert not uploads(s3, tmp_path.name)
    assert not held(s3, f"{tmp_path.name}/new.migrate-partial")
    assert migrate.diff(there.path, tmp_path / "here").equal
    assert migrate.verify(there.path, source=local, rules=[made]).equal


def test_from_bucket_to_bucket_the_store_copies_what_only_moves(
    s3: S3, local: Path, made: Path, tmp_path: Path
) -> None:
    source, out = s3.put(local, f"{tmp_path.name}/old"), f"s3://bucket/{tmp_path.name}/new"
    here = migrate.apply(local, tmp_path / "here", rules=[made])
    planned = migrate.apply(source, out, rules=[made], dry_run=True)
    assert not held(s3, f"{tmp_path.name}/new")
    (tmp_path / "plan.json").write_text(json.dumps(planned.to_json()))
    s3.log()
    # what the store would be asked for does not keep that plan from being run
    there = migrate.apply(tmp_path / "plan.json", out)
    log = s3.log()
    assert held(s3, f"{tmp_path.name}/new/") == tree(tmp_path / "here")
    assert there.store.copied > 2 * there.store.passed
    size = sum(file.size for file in here.files.values())
    assert there.store.copied + there.store.passed == size
    assert (planned.store.copied, planned.store.passed) == (there.store.copied, there.store.passed)
    # of the source only what is uploaded is read, and headers
    read = sum(one.sent for one in log if one.method == "GET" and "/old/" in one.path)
    assert read < there.store.passed + (3 << 20)
    assert there.store.requests == planned.store.requests
    # of a file of which a part was copied nothing was hashed whole
    assert {name for name, file in there.files.items() if file.xxh3_128 is None} == {
        "model.safetensors"
    }
    assert here.files["model.safetensors"].xxh3_128 is not None
    assert migrate.downgrade(out, tmp_path / "back", rules=[made]).path is not None
    assert migrate.diff(tmp_path / "back", local).tensors_equal


@pytest.mark.parametrize("copy", thorough(["auto", "never"]))
def test_a_released_lineage_from_bucket_to_bucket(s3: S3, tmp_path: Path, copy: str) -> None:
    through_a_released_lineage(s3, tmp_path, copy)


@pytest.mark.parametrize("noted", [part_plan.NOTED, 2])
def test_as_many_requests_are_made_as_the_plan_says(
    s3: S3,
    local: Path,
    made: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    noted: int,
) -> None:
    monkeypatch.setattr(part_plan, "NOTED", noted)
    source, out = s3.put(local, f"{tmp_path.name}/old"), f"s3://bucket/{tmp_path.name}/new"
    for copy in ("auto", "never"):
        s3.log()
        report = migrate.apply(source, f"{out}-{copy}", rules=[made], copy=copy)
        asked = [one for one in s3.log() if "/old" not in one.path]
        # three are listings, which have the bucket as their path, as those of the source have
        sent = [one for one in asked if f"{tmp_path.name}/new" in one.path]
        assert len(sent) + 3 == report.store.requests


@pytest.mark.parametrize("name", ["new.safetensors", "new.pt"])
def test_a_single_file_is_written_to_a_bucket(
    s3: S3, local: Path, made: Path, tmp_path: Path, name: str
) -> None:
    source, out = s3.put(local, f"{tmp_path.name}/old"), f"s3://bucket/{tmp_path.name}/{name}"
    migrate.apply(local, tmp_path / name, rules=[made])
    report = migrate.apply(source, out, rules=[made])
    assert held(s3, f"{tmp_path.name}/{name}") == {"": (tmp_path / name).read_bytes()}
    assert (report.store.why is None) == (name == "new.safetensors")
    assert migrate.diff(out, tmp_path / name).equal
    assert migrate.history(out).applied[0].to == "b"


def test_what_is_there_is_never_replaced(s3: S3, local: Path, made: Path, tmp_path: Path) -> None:
    out = f"s3://bucket/{tmp_path.name}/new"
    for key in (f"{tmp_path.name}/new/notes.txt", f"{tmp_path.name}/new"):
        s3.client.put_object(Bucket="bucket", Key=key, Body=b"mine")
        s3.log()
        assert key in refused("M904", local, out, rules=[made])
        assert not [one for one in s3.log() if one.method in ("PUT", "POST")]
        s3.client.delete_object(Bucket="bucket", Key=key)
    source = s3.put(local, f"{tmp_path.name}/old")
    assert "overlap" in refused("M904", source, f"{source}/new", rules=[made])
    assert "names a whole bucket" in refused("M115", local, "s3://bucket", rules=[made])


def test_an_object_that_appears_during_the_run_is_not_replaced(
    s3: S3, local: Path, made: Path, tmp_path: Path
) -> None:
    out, key = f"s3://bucket/{tmp_path.name}/new", f"{tmp_path.name}/new/config.json"

    def appear(done: int, total: int) -> None:
        s3.client.put_object(Bucket="bucket", Key=key, Body=b"mine")

    assert "appeared" in refused("M904", local, out, rules=[made], progress=appear)
    assert held(s3, key) == {"": b"mine"}
    s3.client.delete_object(Bucket="bucket", Key=key)
    migrate.apply(local, out, rules=[made], resume=True)
    assert migrate.verify(out, source=local, rules=[made]).equal
    assert not uploads(s3, tmp_path.name)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "migrate.history.json"])
def test_what_appears_after_its_name_was_asked_for_is_refused_by_the_store(
    s3: S3, local: Path, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    out, key = f"s3://bucket/{tmp_path.name}/new", f"{tmp_path.name}/new/{name}"
    stands, appeared = s3_uploads.S3Output._stands, list[str]()

    def asked(output: s3_uploads.S3Output, of: str, run: str) -> bool:
        found = stands(output, of, run)
        if of == key and not appeared:
            assert not found
            appeared.append(of)
            s3.client.put_object(Bucket="bucket", Key=key, Body=b"mine")
        return found

    monkeypatch.setattr(s3_uploads.S3Output, "_stands", asked)
    assert f"{name} appeared during this run" in refused("M904", local, out, rules=[made])
    assert appeared
    assert held(s3, key) == {"": b"mine"}


def test_a_store_that_forbids_copies_is_streamed_to(
    s3: S3, local: Path, made: Path, tmp_path: Path
) -> None:
    source, out = s3.put(local, f"{tmp_path.name}/old"), f"s3://bucket/{tmp_path.name}/new"
    migrate.apply(local, tmp_path / "here", rules=[made])
    s3.spoil(forbid="&copy$")
    report = migrate.apply(source, out, rules=[made])
    assert report.store.copied == 0
    assert report.store.why == "the store refuses copies (AccessDenied)"
    assert held(s3, f"{tmp_path.name}/new/") == tree(tmp_path / "here")


def test_a_store_that_copies_once_and_then_refuses_is_named_with_the_way_out(
    s3: S3, local: Path, made: Path, tmp_path: Path
) -> None:
    source, out = s3.put(local, f"{tmp_path.name}/old"), f"s3://bucket/{tmp_path.name}/new"
    s3.spoil(forbid="*1=&copy$")
    said = refused("M968", source, out, rules=[made])
    assert "the store does not copy from model-0000" in said
    assert "(AccessDenied)" in said
    assert f'`migrate clean {out}`, then run it again with copy="never"' in said
    s3.spoil()
    assert not held(s3, f"{tmp_path.name}/new/")
    migrate.clean(out)
    assert not uploads(s3, tmp_path.name)
    report = migrate.apply(source, out, rules=[made], copy="never")
    assert report.store.copied == 0


# what the server does not know, and what parts carry then
SUMS = {"&NONE": "CRC64NVME", "&CRC64": "CRC32C", "&CRC": "MD5"}


@pytest.mark.parametrize("unknown", SUMS)
def test_parts_carry_the_best_checksum_that_the_store_knows(
    s3: S3, local: Path, made: Path, tmp_path: Path, unknown: str
) -> None:
    from awscrt import checksums

    out, key = f"s3://bucket/{tmp_path.name}/new", f"{tmp_path.name}/new/model.safetensors"
    s3.spoil(reject=unknown)
    report = migrate.apply(local, out, rules=[made])
    assert report.store.checksum == SUMS[unknown]
    found = s3.client.head_object(Bucket="bucket", Key=key, ChecksumMode="ENABLED")
    content = held(s3, key)[""]
    if SUMS[unknown] == "MD5":
        assert "ChecksumCRC32C" not in found
    elif SUMS[unknown] == "CRC32C":
        assert found["ChecksumCRC32C"] == coded(checksums.crc32c(content), 4)
    else:
        assert found["ChecksumCRC64NVME"] == coded(checksums.crc64nvme(content), 8)


@pytest.mark.parametrize("unknown", SUMS)
def test_what_was_changed_on_the_way_is_refused_by_the_store(
    s3: S3, local: Path, made: Path, tmp_path: Path, unknown: str
) -> None:
    out = f"s3://bucket/{tmp_path.name}/new"
    s3.spoil(reject=unknown, flip="partNumber=")
    assert "BadDigest" in refused("M969", local, out, rules=[made])
    s3.spoil()
    assert not held(s3, f"{tmp_path.name}/new/")
    assert migrate.apply(local, out, rules=[made], resume=True).store.checksum == SUMS[unknown]
    assert migrate.verify(out, source=local, rules=[made]).equal


def test_without_the_crt_parts_carry_what_the_standard_library_computes(
    s3: S3, local: Path, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_uploads, "find_spec", lambda name: None)
    out, key = f"s3://bucket/{tmp_path.name}/new", f"{tmp_path.name}/new/model.safetensors"
    assert migrate.apply(local, out, rules=[made]).store.checksum == "CRC32"
    found = s3.client.head_object(Bucket="bucket", Key=key, ChecksumMode="ENABLED")
    assert found["ChecksumCRC32"] == coded(zlib.crc32(held(s3, key)[""]), 4)
    s3.spoil(flip="partNumber=")
    assert "BadDigest" in refused("M969", local, f"{out}-again", rules=[made])


def test_an_object_that_is_replaced_during_the_run_is_named_and_nothing_appears(
    s3: S3, local: Path, made: Path, tmp_path: Path
) -> None:
    source, out = s3.put(local, f"{tmp_path.name}/old"), f"s3://bucket/{tmp_path.name}/new"
    key = f"{tmp_path.name}/old/model-00002-of-00002.safetensors"

    then = s3.client.head_object(Bucket="bucket", Key=key)["ETag"]

    def replace(done: int, total: int) -> None:
        s3.client.put_object(Bucket="bucket", Key=key, Body=b"other")

    said = refused("M905", source, out, rules=[made], progress=replace)
    assert "model-00002-of-00002" in said
    now = s3.client.head_object(Bucket="bucket", Key=key)["ETag"]
    assert then.strip('"') in said
    assert now.strip('"') in said
    assert not held(s3, f"{tmp_path.name}/new")
    assert not uploads(s3, tmp_path.name)


def longer(tmp_path: Path) -> tuple[Path, Path]:
    """A file of 48 MiB, of which a rename of tensors lets all but an eighth be copied, and the rule
    for that.
    """
    numbers = np.random.default_rng(1)
    tensors = {f"w.{n}": numbers.integers(0, 255, (12 * MIB,), np.uint8) for n in range(4)}
    (tmp_path / "old").mkdir()
    save_file(tensors, tmp_path / "old/model.safetensors")
    (tmp_path / "old/config.json").write_text("{}")
    place = tmp_path / "renamed.yaml"
    head = RULE.partition("rules:")[0]
    place.write_text(f"{head}rules: [{{name: r, from: 'w.{{i:int}}', to: 'v.{{i}}'}}]\n")
    return tmp_path / "old", place


@pytest.mark.parametrize("kept", thorough(["CRC64NVME", "CRC32", "CRC32C"], default=2))
def test_what_the_store_copied_is_compared_by_checksums_that_it_tells(
    s3: S3, tmp_path: Path, kept: str
) -> None:
    """moto keeps those of objects; that it tells those of parts is the test server's doing."""
    local, rule = longer(tmp_path)
    source, out = f"s3://bucket/{tmp_path.name}/old", f"s3://bucket/{tmp_path.name}/new"
    for file in local.iterdir():
        key = f"{tmp_path.name}/old/{file.name}"
        more: Any = {"Body": file.read_bytes(), "ChecksumAlgorithm": kept}
        s3.client.put_object(Bucket="bucket", Key=key, **more)
    s3.spoil(sums="GET .*uploadId=")
    s3.log()
    report = migrate.apply(source, out, rules=[rule])
    # parts carry the checksum that the source has, so that the two can be compared
    assert (report.store.checksum, report.store.read_back) == (kept, False)
    assert 42 * MIB < report.store.compared == report.store.copied
    # what is between the copies is read for it, and that is an eighth at most
    read = sum(one.sent for one in s3.log() if one.range and "/old/" in one.path)
    assert read <= report.store.passed + 6 * MIB + (1 << 20)
    migrate.apply(local, tmp_path / "here", rules=[rule])
    assert held(s3, f"{tmp_path.name}/new/") == tree(tmp_path / "here")
    s3.spoil(sums="GET .*uploadId=", shift="&copy$")
    said = refused("M913", source, f"{out}-wrong", rules=[rule])
    assert "new-wrong/model.safetensors: bytes " in said
    assert 'run it again with copy="never"' in said
    assert not held(s3, f"{tmp_path.name}/new-wrong")
    assert not uploads(s3, tmp_path.name)


def test_without_checksums_the_answer_says_that_copies_were_not_read(
    s3: S3, tmp_path: Path
) -> None:
    local, rule = longer(tmp_path)
    source, out = s3.put(local, f"{tmp_path.name}/old"), f"s3://bucket/{tmp_path.name}/new"
    report = migrate.apply(source, out, rules=[rule])
    assert (report.store.copied > 42 * MIB, report.store.compared) == (True, 0)
    (line,) = store_text.stored(report.to_json())
    assert "copied by the store, not read, " in line
    said: Any = json.loads(json.dumps(report.to_json()))
    said["store"]["compared"] = 20 * MIB
    assert " MB of it compared by checksums, " in store_text.stored(said)[0]
    said["store"]["compared"] = said["store"]["copied"]
    assert "copied by the store, compared by checksums and not read, " in store_text.stored(said)[0]


def test_what_the_store_copied_is_read_back_where_that_is_asked(
    s3: S3, local: Path, made: Path, tmp_path: Path
) -> None:
    source, out = s3.put(local, f"{tmp_path.name}/old"), f"s3://bucket/{tmp_path.name}/new"
    options: Any = {"rules": [made], "max_shard_size": "15MB", "read_back": True}
    planned = migrate.apply(source, out, **options, dry_run=True)
    s3.log()
    report = migrate.apply(source, out, **options)
    read = sum(one.sent for one in s3.log() if one.range and "/new/" in one.path)
    assert report.store.read_back
    assert read == report.store.copied == planned.store.copied > 5 << 20


def test_the_file_that_appears_last_is_streamed_where_copies_are_read_back(
    s3: S3, local: Path, made: Path, tmp_path: Path
) -> None:
    """An unfinished upload cannot be read, and this file makes the set whole for a reader."""
    source, out = s3.put(local, f"{tmp_path.name}/old"), f"s3://bucket/{tmp_path.name}/new"
    s3.log()
    migrate.apply(source, out, rules=[made], max_shard_size="15MB", read_back=True)
    asked = [one for one in s3.log() if "/new/" in one.path]
    first, last = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
    read = [at for at, one in enumerate(asked) if one.range]
    # one begins the upload, and one completes it
    _, appeared = (
        at for at, one in enumerate(asked) if one.method == "POST" and one.path.endswith(last)
    )
    assert {asked[at].path.rpartition("/")[2] for at in read} == {first}
    assert read[-1] < appeared


@pytest.mark.parametrize("name", ["new.safetensors", "new"])
def test_nothing_of_a_single_file_is_copied_where_copies_are_read_back(
    s3: S3, local: Path, made: Path, tmp_path: Path, name: str
) -> None:
    source, out = s3.put(local, f"{tmp_path.name}/old"), f"s3://bucket/{tmp_path.name}/{name}"
    s3.spoil(shift="&copy$")
    report = migrate.apply(source, out, rules=[made], read_back=True)
    assert report.store.copied == 0
    assert report.store.why == "a single file would show before it is read back"
    assert migrate.verify(out, source=source, rules=[made]).equal


@pytest.mark.parametrize(("size", "number"), [("15MB", 1), ("8MB", 2)])
def test_of_an_output_that_was_copied_wrongly_nothing_stays(
    s3: S3, local: Path, made: Path, tmp_path: Path, size: str, number: int
) -> None:
    source, out = s3.put(local, f"{tmp_path.name}/old"), f"s3://bucket/{tmp_path.name}/new"
    options: Any = {"rules": [made], "max_shard_size": size}
    migrate.apply(local, tmp_path / "here", **options)
    mine = f"{tmp_path.name}/new.notes"
    s3.client.put_object(Bucket="bucket", Key=mine, Body=b"mine")
    shard = f"model-{number:05}-of-"
    s3.spoil(shift=f"{shard}.*&copy$")
    said = refused("M913", source, out, **options, read_back=True)
    assert f"new/{shard}" in said
    assert 'run it again with copy="never"' in said
    assert held(s3, f"{tmp_path.name}/new") == {".notes": b"mine"}
    assert not uploads(s3, tmp_path.name)
    # without it such an output appears
    migrate.apply(source, f"{out}-unread", **options)
    assert held(s3, f"{tmp_path.name}/new-unread/") != tree(tmp_path / "here")
    assert migrate.apply(source, out, **options, read_back=True, copy="never").store.copied == 0
    assert held(s3, f"{tmp_path.name}/new/") == tree(tmp_path / "here")


def test_what_cannot_be_removed_of_an_output_that_was_copied_wrongly_is_named(
    s3: S3, local: Path, made: Path, tmp_path: Path
) -> None:
    source, out = s3.put(local, f"{tmp_path.name}/old"), f"s3://bucket/{tmp_path.name}/new"
    s3.spoil(shift="&copy$", forbid="^DELETE .*00001-of-00003.safetensors$")
    said = refused("M913", source, out, rules=[made], max_shard_size="8MB", read_back=True)
    left = held(s3, f"{tmp_path.name}/new/")
    assert list(left) == ["model-00001-of-00003.safetensors"]
    assert f"{out}/{next(iter(left))} could not be removed" in said
    assert not uploads(s3, tmp_path.name)


def test_of_an_output_whose_source_is_replaced_while_it_is_read_back_nothing_stays(
    s3: S3, local: Path, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = s3.put(local, f"{tmp_path.name}/old"), f"s3://bucket/{tmp_path.name}/new"
    complete = s3_uploads.S3Output.complete

    def completed(*arguments: Any) -> None:
        complete(*arguments)
        for number in (1, 2):
            key = f"{tmp_path.name}/old/model-{number:05}-of-00002.safetensors"
            s3.client.put_object(Bucket="bucket", Key=key, Body=b"other")

    monkeypatch.setattr(s3_uploads.S3Output, "complete", completed)
    refused("M905", source, out, rules=[made], max_shard_size="8MB", read_back=True)
    assert not held(s3, f"{tmp_path.name}/new")
    assert not uploads(s3, tmp_path.name)


def test_what_is_left_over_is_listed_and_thrown_away(
    s3: S3, local: Path, made: Path, tmp_path: Path
) -> None:
    out = f"s3://bucket/{tmp_path.name}/new"
    assert migrate.clean(out).digest is None
    foreign = s3.client.create_multipart_upload(
        Bucket="bucket", Key=f"{tmp_path.name}/new/other.safetensors"
    )["UploadId"]
    s3.spoil(fail="*1=partNumber=")
    refused("M969", local, out, rules=[made])
    s3.spoil()
    for kept in ({"dry_run": True}, {"older_than": "2d"}):
        found = migrate.clean(out, **kept)
        assert (found.removed, len(found.uploads)) == (False, 1)
        assert len(uploads(s3, tmp_path.name)) == 2
    (mine,) = (one for one in uploads(s3, tmp_path.name) if one["UploadId"] != foreign)
    there = s3.client.list_parts(Bucket="bucket", Key=mine["Key"], UploadId=mine["UploadId"])[
        "Parts"
    ]
    found = migrate.clean(out, older_than="0s")
    assert found.removed
    assert sum(one.bytes for one in found.uploads) == sum(one["Size"] for one in there) > 5 << 20
    assert found.foreign == (f"{tmp_path.name}/new/other.safetensors",)
    assert [one["UploadId"] for one in uploads(s3, tmp_path.name)] == [foreign]
    assert not held(s3, f"{tmp_path.name}/new")
    migrate.apply(local, out, rules=[made])


# how a request fails: it is not answered, wrongly, or in part
FAILED = ("fail", "drop", "lose", "slow", "delay", "stale", "clash", "truncate", "moved", "page")


def fail_each_request(
    s3: S3, folder: Path, made: Path, ways: list[tuple[str, ...]], copied: bool
) -> None:
    """Each request is failed once, in the ways in turn: there is nothing that a reader takes, or
    all, and then it goes on. Tensors are small, or `copied` by the store.
    """
    local = large(folder / "some") if copied else shards(folder / "some", rows=20)
    source = s3.put(local, f"{folder.name}/some")
    migrate.apply(local, folder / "here", rules=[made])
    expected = tree(folder / "here")
    s3.log()
    report = migrate.apply(source, f"s3://bucket/{folder.name}/new", rules=[made])
    assert (report.store.copied > 0) is copied
    asked = [one.path for one in s3.log()]
    assert len(asked) > 30
    for how in ways:
        for at in range(len(asked)):
            prefix, kind = f"{folder.name}/new-{how[0]}{at}", how[at % len(how)]
            out = f"s3://bucket/{prefix}"
            s3.spoil(**{kind: f"*{at}=^[A-Z]+ /bucket"})
            with suppress(MigrateError):
                migrate.apply(source, out, rules=[made])
            s3.spoil()
            left = held(s3, f"{prefix}/")
            if left != expected:
                if left:
                    unfinished(out, left, expected)
                migrate.apply(source, out, rules=[made], resume=True)
            else:
                migrate.clean(out)
            assert held(s3, f"{prefix}/") == expected, (kind, at)
            assert not uploads(s3, prefix), (kind, at)
            assert not held(s3, f"{prefix}.migrate-partial/"), (kind, at)
            for key in expected:
                s3.client.delete_object(Bucket="bucket", Key=f"{prefix}/{key}")


@pytest.mark.parametrize("copied", [False, True])
def test_every_request_of_a_run_may_fail(s3: S3, made: Path, tmp_path: Path, copied: bool) -> None:
    fail_each_request(s3, tmp_path, made, [FAILED], copied)


@pytest.mark.campaign
@pytest.mark.parametrize("copied", [False, True])
def test_every_request_of_a_run_may_fail_in_every_way(
    s3: S3, made: Path, tmp_path: Path, copied: bool
) -> None:
    fail_each_request(s3, tmp_path, made, [(kind,) for kind in FAILED], copied)


@pytest.mark.parametrize("forbidden", ["^PUT .*journal", "^POST .*uploads", "partNumber="])
def test_a_user_who_may_read_and_not_write_is_told_what_writing_needs(
    s3: S3, local: Path, made: Path, tmp_path: Path, forbidden: str
) -> None:
    source, out = s3.put(local, f"{tmp_path.name}/old"), f"s3://bucket/{tmp_path.name}/new"
    s3.spoil(forbid=forbidden)
    said = refused("M968", source, out, rules=[made], copy="never")
    assert f"{tmp_path.name}/new" in said
    assert "s3:PutObject" in said
    s3.spoil()
    assert not held(s3, f"{tmp_path.name}/new/")
    migrate.apply(source, out, rules=[made], resume=True, copy="never")
    assert not uploads(s3, tmp_path.name)


def test_no_secret_is_written_anywhere(s3: S3, local: Path, made: Path, tmp_path: Path) -> None:
    source, out = s3.put(local, f"{tmp_path.name}/old"), f"s3://bucket/{tmp_path.name}/new"
    s3.spoil(fail="*1=partNumber=")
    said = refused("M969", source, out, rules=[made])
    s3.spoil()
    left = held(s3, f"{tmp_path.name}/new.migrate-partial")
    assert left.keys() == {"/journal.json"}
    planned = migrate.apply(source, out, rules=[made], dry_run=True, resume=True)
    done = migrate.apply(source, out, rules=[made], resume=True)
    answers = [json.dumps(answer.to_json()) for answer in (planned, done)]
    assert all(source in text and '"copied"' in text for text in answers)
    texts = [said.encode(), *left.values(), *(text.encode() for text in answers)]
    texts += held(s3, f"{tmp_path.name}/new/").values()
    assert len(texts) > 5
    assert not [text for text in texts if b"planted" in text]


def killed(s3: S3, prefix: str, arguments: list[str], how: str, at: int) -> None:
    """Runs a command and kills it when it has sent so many requests about the output; a request
    that is on its way is done or not.
    """
    s3.spoil(**{how: f"*{at}={prefix}"})
    child = subprocess.Popen(
        [sys.executable, "-m", "migrate", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    s3.wait_until_held()
    child.send_signal(signal.SIGKILL)
    child.communicate()
    s3.spoil()


def survive_kills(s3: S3, folder: Path, rule: Path, seeds: range) -> None:
    local = large(folder / "killed")
    source = s3.put(local, f"{folder.name}/killed")
    more = ["--rules", str(rule), "-q", "--max-shard-size", "15MB"]
    migrate.apply(local, folder / "here", rules=[rule], max_shard_size="15MB")
    expected = tree(folder / "here")
    s3.log()
    migrate.apply(source, f"s3://bucket/{folder.name}/out", rules=[rule], max_shard_size="15MB")
    count = sum(f"{folder.name}/out" in one.path for one in s3.log())
    begun = 0
    for seed in seeds:
        chance = random.Random(seed)
        prefix, streamed = f"{folder.name}/out{seed}", chance.random() < 0.5
        arguments = ["apply", str(local if streamed else source), "-o", f"s3://bucket/{prefix}"]
        # after the last of these there is but the journal to remove
        at, how = chance.randrange(count - 6), chance.choice(["hold", "late"])
        killed(s3, prefix, [*arguments, *more], how, at)
        left = held(s3, f"{prefix}/")
        begun += bool(uploads(s3, prefix))
        if left:
            # killed while one file after the other appeared
            unfinished(f"s3://bucket/{prefix}", left, expected)
        elif chance.random() < 0.2:
            migrate.clean(f"s3://bucket/{prefix}")
            assert not uploads(s3, prefix)
            continue
        where = f"s3://bucket/{prefix}"
        there = local if streamed else source
        migrate.apply(there, where, rules=[rule], max_shard_size="15MB", resume=True)
        assert held(s3, f"{prefix}/") == expected, seed
        assert not uploads(s3, prefix), seed
        for key in expected:
            s3.client.delete_object(Bucket="bucket", Key=f"{prefix}/{key}")
    assert begun


@pytest.mark.parametrize("seeds", thorough([range(3), range(3, 12)]))
def test_kills_are_survived(s3: S3, made: Path, tmp_path: Path, seeds: range) -> None:
    survive_kills(s3, tmp_path, made, seeds)


@pytest.mark.parametrize("how", ["hold", "late"])
def test_a_run_killed_between_completions_goes_on(
    s3: S3, local: Path, made: Path, tmp_path: Path, how: str
) -> None:
    prefix = f"{tmp_path.name}/{how}"
    source, out = s3.put(local, f"{tmp_path.name}/old"), f"s3://bucket/{prefix}"
    named: dict[str, Any] = {"rules": [made], "max_shard_size": "15MB"}
    migrate.apply(local, tmp_path / "here", **named)
    expected = tree(tmp_path / "here")
    words = ["apply", source, "-o", out, "--rules", str(made), "-q", "--max-shard-size", "15MB"]
    killed(s3, rf"^POST .*{prefix}/.*\?uploadId=", words, how, 1)
    left = held(s3, f"{prefix}/")
    # the first weights are there, and the second only if the store did what it did not answer
    assert sum(name.endswith(".safetensors") for name in left) == (1 if how == "hold" else 2)
    unfinished(out, left, expected)
    migrate.apply(source, out, resume=True, **named)
    assert held(s3, f"{prefix}/") == expected
    assert not uploads(s3, prefix)


def test_a_bucket_that_encrypts_with_a_key_of_its_own(
    s3: S3, local: Path, made: Path, tmp_path: Path
) -> None:
    """ETags are no MD5 there."""
    s3.client.create_bucket(Bucket="encrypted")
    by_key = {"SSEAlgorithm": "aws:kms", "KMSMasterKeyID": "alias/models"}
    s3.client.put_bucket_encryption(
        Bucket="encrypted",
        ServerSideEncryptionConfiguration={
            "Rules": [{"ApplyServerSideEncryptionByDefault": by_key, "BucketKeyEnabled": True}]
        },
    )
    source, out = s3.put(local, f"{tmp_path.name}/old"), f"s3://encrypted/{tmp_path.name}/new"
    migrate.apply(source, out, rules=[made])
    head = s3.client.head_object(Bucket="encrypted", Key=f"{tmp_path.name}/new/model.safetensors")
    assert head["ServerSideEncryption"] == "aws:kms"
    assert migrate.verify(out, source=source, rules=[made]).equal
    migrate.downgrade(out, f"{out}-again", rules=[made])
    assert migrate.diff(f"{out}-again", source).equal


@pytest.mark.campaign
@pytest.mark.parametrize("first", range(1000, 1200, 10))
def test_two_hundred_kills_are_survived(s3: S3, made: Path, tmp_path: Path, first: int) -> None:
    survive_kills(s3, tmp_path, made, range(first, first + 10))


def test_a_store_that_takes_no_mixed_parts_is_streamed_to(
    s3: S3, local: Path, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = s3.put(local, f"{tmp_path.name}/old"), f"s3://bucket/{tmp_path.name}/new"
    for host in ("https://account.r2.cloudflarestorage.com", "https://storage.googleapis.com"):
        output = s3_uploads.S3Output(out)
        output.endpoint = host
        assert output.equal_parts()
    monkeypatch.setitem(s3_uploads.EQUAL_PARTS, "127.0.0.1", "this server wants them alike")
    report = migrate.apply(source, out, rules=[made])
    assert (report.store.copied, report.store.why) == (0, "this server wants them alike")
    key = f"{tmp_path.name}/new/model.safetensors"
    found = s3.client.head_object(Bucket="bucket", Key=key, PartNumber=1)
    assert found["ContentLength"] == 16 << 20


def test_between_endpoints_all_is_streamed(
    s3: S3, local: Path, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = s3.put(local, f"{tmp_path.name}/old"), f"s3://bucket/{tmp_path.name}/new"
    of = S3Prefix.copied_from
    monkeypatch.setattr(
        S3Prefix, "copied_from", lambda self, path: ("https://elsewhere", *of(self, path)[1:])
    )
    report = migrate.apply(source, out, rules=[made])
    assert report.store.copied == 0
    assert report.store.why == "source and output have different endpoints"
    assert migrate.verify(out, source=local, rules=[made]).equal


def test_between_regions_all_is_streamed(s3: S3, local: Path, made: Path, tmp_path: Path) -> None:
    s3.client.create_bucket(
        Bucket="elsewhere", CreateBucketConfiguration={"LocationConstraint": "eu-west-1"}
    )
    source, out = s3.put(local, f"{tmp_path.name}/old"), f"s3://elsewhere/{tmp_path.name}/new"
    report = migrate.apply(source, out, rules=[made])
    assert report.store.why == "the source is in us-east-1, and the output in eu-west-1"
    assert migrate.verify(out, source=source, rules=[made]).equal


def test_the_command_line_says_how_the_output_got_there(
    s3: S3, local: Path, made: Path, tmp_path: Path
) -> None:
    source, out = s3.put(local, f"{tmp_path.name}/old"), f"s3://bucket/{tmp_path.name}/new"
    for arguments, words in (
        (["apply", source, "-o", out, "--rules", str(made), "--dry-run"], "copied by the store,"),
        (["apply", source, "-o", out, "--rules", str(made)], "copied by the store, not read,"),
        (["clean", out], "no run has left anything"),
        (["history", out], "b"),
        (["downgrade", out, "-o", f"{out}-back", "--rules", str(made)], "published"),
        (["diff", f"{out}-back", source, "--tensors-only"], "equal"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "migrate", *arguments], capture_output=True, text=True
        )
        assert done.returncode == 0, (arguments, done.stderr)
        assert words in done.stdout, (arguments, done.stdout)
        assert "planted" not in done.stdout + done.stderr
