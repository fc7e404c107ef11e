"""Parts of a run into a bucket: joined, killed, left out, cleared away, and published."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from store_servers import S3
from stored_checkpoint import shards
from test_stores_written import killed, refused, tree
from written_stores import MIB, held, replace_a_part, uploads

import migrate
from migrate.core.errors import MigrateError
from migrate.core.types import Ranks, RunPart
from migrate.running import store_parts
from migrate.source.stores import s3_uploads

pytestmark = pytest.mark.servers


def parts(
    source: object, out: str, of: int, numbers: tuple[int, ...], **options: Any
) -> list[migrate.results.PartReport]:
    return [migrate.apply(source, out, part=RunPart(n, of), **options) for n in numbers]


def unpublished(code: str, out: str) -> str:
    with pytest.raises(MigrateError) as caught:
        migrate.publish(out)
    assert {d.code for d in caught.value.diagnostics} == {code}, str(caught.value)
    return str(caught.value)


def plain(report: Any) -> Mapping[str, Any]:
    """What an answer says, but for where the output lies and how many requests were planned."""
    said = json.loads(json.dumps(report.to_json()))
    said["path"], said["store"]["requests"] = "", 0
    return said


@pytest.mark.parametrize("stored", [True, False])
def test_parts_and_publish_give_what_one_process_gives(
    s3: S3, local: Path, made: Path, tmp_path: Path, stored: bool
) -> None:
    source = s3.put(local, f"{tmp_path.name}/old") if stored else local
    options: Any = {"rules": [made], "max_shard_size": "9MB"}
    one, out = (f"s3://bucket/{tmp_path.name}/{name}" for name in ("one", "new"))
    alone = migrate.apply(source, one, **options)
    assert len(alone.files) == 3
    for number, found in zip((1, 0, 2), parts(source, out, 3, (1, 0, 2), **options), strict=True):
        assert (found.part, found.already, found.partial) == (
            number,
            False,
            f"{out}.migrate-partial",
        )
        assert len(found.files) == 1
        assert not held(s3, f"{tmp_path.name}/new/")
    assert found.missing == ()
    again = migrate.publish(out)
    assert plain(again) == plain(alone)
    assert bool(again.store.copied) is stored
    assert held(s3, f"{tmp_path.name}/new/") == held(s3, f"{tmp_path.name}/one/")
    assert not held(s3, f"{tmp_path.name}/new.migrate-partial/")
    assert not uploads(s3, tmp_path.name)
    assert "is there already" in unpublished("M983", out)


@pytest.mark.parametrize("stored", [True, False])
def test_one_file_is_uploaded_in_pieces(
    s3: S3, local: Path, made: Path, tmp_path: Path, stored: bool
) -> None:
    source = s3.put(local, f"{tmp_path.name}/old") if stored else local
    out = f"s3://bucket/{tmp_path.name}/new.safetensors"
    migrate.apply(local, tmp_path / "new.safetensors", rules=[made])
    found = parts(source, out, 2, (1, 0), rules=[made])
    sizes = [one.files["model.safetensors"].size for one in found]
    size = (tmp_path / "new.safetensors").stat().st_size
    assert (sum(sizes), min(sizes) > 5 << 20) == (size, True)
    # one upload, which all have joined
    assert len(uploads(s3, tmp_path.name)) == 1
    assert sum(one.bytes_written for one in found) == size
    report = migrate.publish(out)
    assert report.files["model.safetensors"].xxh3_128 is None
    assert (report.store.copied > 0) is stored
    assert held(s3, f"{tmp_path.name}/new") == {
        ".safetensors": (tmp_path / "new.safetensors").read_bytes()
    }


def test_where_nothing_may_be_copied_parts_are_alike(s3: S3, made: Path, tmp_path: Path) -> None:
    """A store that we do not know may want them so: one part of the run has the file."""
    local = shards(tmp_path / "old", rows=8_000)
    out = f"s3://bucket/{tmp_path.name}/new.safetensors"
    parts(local, out, 2, (1, 0), rules=[made], copy="never")
    (one,) = uploads(s3, tmp_path.name)
    found = s3.client.list_parts(Bucket="bucket", Key=one["Key"], UploadId=one["UploadId"])
    sizes = [part["Size"] for part in found["Parts"]]
    assert len(sizes) > 2
    assert sizes == [16 * MIB] * (len(sizes) - 1) + [sizes[-1]]
    migrate.publish(out)
    migrate.apply(local, tmp_path / "new.safetensors", rules=[made])
    assert held(s3, f"{tmp_path.name}/new") == {
        ".safetensors": (tmp_path / "new.safetensors").read_bytes()
    }


ARCHIVES = [("new.pt", {}), ("new", {"output_format": "dcp"})]


@pytest.mark.parametrize(("name", "form"), ARCHIVES)
def test_an_archive_is_uploaded_in_pieces(
    s3: S3, local: Path, made: Path, tmp_path: Path, name: str, form: Any
) -> None:
    """Checksums stand among the data, and what was uploaded cannot be changed."""
    one, out = (f"s3://bucket/{tmp_path.name}/{place}{name}" for place in ("one/", ""))
    alone = migrate.apply(local, one, rules=[made], **form)
    found = parts(local, out, 2, (1, 0), rules=[made], **form)
    assert min(sum(file.size for file in one.files.values()) for one in found) > 8 * MIB
    assert len(uploads(s3, tmp_path.name)) == 1
    again = migrate.publish(out)
    assert again.bytes_written == alone.bytes_written == sum(f.size for f in alone.files.values())
    assert next(iter(again.files.values())).xxh3_128 is None
    assert held(s3, f"{tmp_path.name}/{name}") == held(s3, f"{tmp_path.name}/one/{name}")
    assert migrate.diff(out, one).equal
    assert migrate.verify(out, source=local, rules=[made]).equal
    assert not uploads(s3, tmp_path.name)


@pytest.mark.parametrize("at", [0, 1])
def test_one_that_is_stopped_while_it_seals_or_publishes_goes_on(
    s3: S3, local: Path, made: Path, tmp_path: Path, at: int
) -> None:
    out = f"s3://bucket/{tmp_path.name}/new.pt"
    parts(local, out, 2, (1, 0), rules=[made])
    # the tail is uploaded, or the file was completed and what parts said is removed
    s3.spoil(fail=["*0=PUT .*partNumber=", "*0=DELETE "][at])
    if at:
        assert migrate.publish(out).notes[-1].endswith("is no longer needed: remove it")
    else:
        unpublished("M969", out)
        assert "" not in held(s3, f"{tmp_path.name}/new.pt")
    s3.spoil()
    migrate.publish(out)
    migrate.apply(local, tmp_path / "new.pt", rules=[made])
    assert held(s3, f"{tmp_path.name}/new.pt") == {"": (tmp_path / "new.pt").read_bytes()}
    assert not uploads(s3, tmp_path.name)


def test_one_process_goes_on_with_an_archive_in_pieces(
    s3: S3, local: Path, made: Path, tmp_path: Path
) -> None:
    out = f"s3://bucket/{tmp_path.name}/new.pt"
    (found,) = parts(local, out, 2, (1,), rules=[made])
    report = migrate.apply(local, out, rules=[made], resume=True)
    migrate.apply(local, tmp_path / "new.pt", rules=[made])
    whole = (tmp_path / "new.pt").read_bytes()
    assert report.bytes_written == len(whole) - found.bytes_written
    assert held(s3, f"{tmp_path.name}/new.pt") == {"": whole}


@pytest.mark.parametrize("at", [3, 6])
def test_a_part_that_is_killed_goes_on(
    s3: S3, local: Path, made: Path, tmp_path: Path, at: int
) -> None:
    """While the uploads are begun, and while parts are uploaded."""
    prefix = f"{tmp_path.name}/new"
    out = f"s3://bucket/{prefix}.safetensors"
    migrate.apply(local, tmp_path / "new.safetensors", rules=[made])
    command = ["apply", str(local), "-o", out, "--rules", str(made), "-q", "--part", "0/2"]
    killed(s3, prefix, command, "late", at)
    text = unpublished("M984", out)
    assert "2 parts of 2 are not done: 0/2, 1/2" in text
    assert 'part="0/2"' in text
    s3.log()
    parts(local, out, 2, (0, 1), rules=[made])
    migrate.publish(out)
    assert held(s3, prefix) == {".safetensors": (tmp_path / "new.safetensors").read_bytes()}
    assert not uploads(s3, tmp_path.name)


def test_what_is_there_is_not_uploaded_again(
    s3: S3, local: Path, made: Path, tmp_path: Path
) -> None:
    out, options = f"s3://bucket/{tmp_path.name}/new", {"rules": [made], "max_shard_size": "15MB"}
    s3.spoil(fail="*1=partNumber=")
    said = refused("M969", local, out, part=RunPart(0, 1), **options)
    assert "it goes on where it ended" in said
    assert "--resume" not in said
    assert "resume=True" not in said
    s3.spoil()
    s3.log()
    (found,) = parts(local, out, 1, (0,), **options)
    sent = [one for one in s3.log() if one.method == "PUT" and "safetensors" in one.path]
    whole = sum(file.size for file in found.files.values())
    assert sent
    assert 0 < found.bytes_written < whole
    (again,) = parts(local, out, 1, (0,), **options)
    assert (again.already, again.bytes_written, again.files) == (True, 0, found.files)
    migrate.apply(local, tmp_path / "here", **options)
    migrate.publish(out)
    assert held(s3, f"{tmp_path.name}/new/") == tree(tmp_path / "here")


@pytest.mark.parametrize("together", [True, False])
def test_a_part_of_an_upload_that_another_has_made_is_made_again(
    s3: S3, local: Path, made: Path, tmp_path: Path, together: bool
) -> None:
    """By the part of the run, and by one process that goes on with what all have begun."""
    out, options = f"s3://bucket/{tmp_path.name}/new", {"rules": [made], "max_shard_size": "15MB"}
    s3.spoil(fail="*1=partNumber=")
    refused("M969", local, out, part=RunPart(0, 1), **options)
    s3.spoil()
    key = replace_a_part(s3, tmp_path.name)
    s3.log()
    if together:
        migrate.apply(local, out, resume=True, **options)
    else:
        parts(local, out, 1, (0,), **options)
        migrate.publish(out)
    sent = [one.path for one in s3.log() if one.method == "PUT"]
    assert any(path.endswith(key) for path in sent)
    migrate.apply(local, tmp_path / "here", **options)
    assert held(s3, f"{tmp_path.name}/new/") == tree(tmp_path / "here")
    assert not held(s3, f"{tmp_path.name}/new.migrate-partial")


def test_what_parts_left_is_thrown_away(s3: S3, local: Path, made: Path, tmp_path: Path) -> None:
    out = f"s3://bucket/{tmp_path.name}/new.safetensors"
    foreign = f"{tmp_path.name}/new.safetensors.migrate-partial/parts/notes.txt"
    s3.client.put_object(Bucket="bucket", Key=foreign, Body=b"mine")
    parts(local, out, 2, (0, 1), rules=[made])
    assert len(held(s3, f"{tmp_path.name}/")) == 6
    found = migrate.clean(out)
    assert (found.removed, len(found.uploads)) == (True, 1)
    assert list(held(s3, f"{tmp_path.name}/")) == [foreign.removeprefix(f"{tmp_path.name}/")]
    assert not uploads(s3, tmp_path.name)
    assert "does not exist" in unpublished("M983", out)


def test_other_parts_and_other_plans_are_refused(
    s3: S3, local: Path, made: Path, tmp_path: Path
) -> None:
    out = f"s3://bucket/{tmp_path.name}/new"
    parts(local, out, 3, (0,), rules=[made])
    text = refused("M918", local, out, rules=[made], part=RunPart(0, 4))
    assert "was begun with 3 parts, and this is part 0/4" in text
    more: Any = {"rules": [made], "max_shard_size": "9MB", "part": RunPart(1, 3)}
    assert "belongs to another plan" in refused("M918", local, out, **more)
    shard = local / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes())
    assert shard.name in refused("M918", local, out, rules=[made], part=RunPart(1, 3))
    # nothing of the parts that are there is lost
    assert len(uploads(s3, tmp_path.name)) == 1


def test_a_part_waits_until_the_uploads_are_begun(
    s3: S3, local: Path, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = f"s3://bucket/{tmp_path.name}/new"
    s3.spoil(fail="uploads")
    refused("M969", local, out, rules=[made], part=RunPart(1, 2))
    s3.spoil()
    monkeypatch.setattr(store_parts, "APPEAR", 0.0)
    text = refused("M911", local, out, rules=[made], part=RunPart(0, 2))
    assert "part 1/2 was about to begin the uploads" in text
    parts(local, out, 2, (1, 0), rules=[made])
    migrate.publish(out)
    assert migrate.verify(out, source=local, rules=[made]).equal


def test_parts_that_begin_at_once_share_the_uploads(
    s3: S3, local: Path, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one comes between the first one's look and its journal."""
    out, options = f"s3://bucket/{tmp_path.name}/new", {"rules": [made], "max_shard_size": "9MB"}
    write, first = s3_uploads.S3Output.write_journal, []

    def overtaken(self: Any, content: bytes, new: bool) -> bool:
        if not first:
            first.append(content)
            parts(local, out, 2, (1,), **options)
        return write(self, content, new)

    monkeypatch.setattr(s3_uploads.S3Output, "write_journal", overtaken)
    parts(local, out, 2, (0,), **options)
    migrate.publish(out)
    migrate.apply(local, tmp_path / "here", **options)
    assert held(s3, f"{tmp_path.name}/new/") == tree(tmp_path / "here")
    assert not uploads(s3, tmp_path.name)


def test_what_parts_left_is_finished_by_one_process(
    s3: S3, local: Path, made: Path, tmp_path: Path
) -> None:
    out = f"s3://bucket/{tmp_path.name}/new.safetensors"
    (found,) = parts(local, out, 2, (1,), rules=[made])
    assert "resume=True" in refused("M911", local, out, rules=[made])
    report = migrate.apply(local, out, rules=[made], resume=True)
    size = report.files["model.safetensors"].size
    assert report.bytes_written == size - found.bytes_written
    migrate.apply(local, tmp_path / "new.safetensors", rules=[made])
    assert held(s3, f"{tmp_path.name}/new") == {
        ".safetensors": (tmp_path / "new.safetensors").read_bytes()
    }


def test_what_was_published_halfway_is_published_again(
    s3: S3, local: Path, made: Path, tmp_path: Path
) -> None:
    out, options = f"s3://bucket/{tmp_path.name}/new", {"rules": [made], "max_shard_size": "9MB"}
    parts(local, out, 2, (0, 1), **options)
    s3.spoil(fail="*1=POST .*uploadId=")
    assert "run it again" in unpublished("M969", out)
    s3.spoil()
    left = held(s3, f"{tmp_path.name}/new/")
    assert sum(name.endswith(".safetensors") for name in left) == 1
    migrate.publish(out)
    migrate.apply(local, tmp_path / "here", **options)
    assert held(s3, f"{tmp_path.name}/new/") == tree(tmp_path / "here")
    assert not held(s3, f"{tmp_path.name}/new.migrate-partial")


def test_processes_of_a_launcher_keep_nothing_for_the_way_back(
    s3: S3, local: Path, made: Path, tmp_path: Path
) -> None:
    out, ranks = f"s3://bucket/{tmp_path.name}/new", Ranks(1, 2)
    text = refused("M115", local, out, rules=[made], ranks=ranks, undo=tmp_path / "undo")
    assert 'ranks="off"' in text
