"""What a store does not give, and what a server answers wrongly: each is said, without secrets."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from store_servers import COMMIT, MOVED, S3, Elsewhere, Hub, Sent, hub_server, serving, web_server
from stored_checkpoint import rule, shards
from test_stores import point_at_hub, refused, tree

import migrate
from migrate.core.errors import MigrateError
from migrate.core.types import RunPart
from migrate.source.stores import requests

PLANTED = ("planted-key", "planted-secret", "planted-token", "hf_planted", "planted-signature")
pytestmark = pytest.mark.servers


@pytest.fixture
def local(tmp_path: Path) -> Path:
    return shards(tmp_path / "old")


@pytest.fixture
def url(s3: S3, local: Path, tmp_path: Path) -> str:
    made = s3.put(local, tmp_path.name)
    s3.log()
    return made


def shard_of(url: str, number: int = 1) -> str:
    return f"{url.removeprefix('s3://bucket/')}/model-{number:05}-of-00003.safetensors"


def test_planning_reads_a_listing_and_headers_only(s3: S3, url: str, tmp_path: Path) -> None:
    migrate.plan(url, rules=[rule(tmp_path)])
    asked = s3.log()
    # what the name is, the listing, the index, three beginnings, configuration and tokenizer
    assert [one.method for one in asked if not one.range] == ["HEAD", "GET"]
    ranges = [one for one in asked if one.range]
    assert len({one.path for one in ranges}) == len(ranges) == 5
    weights = [one for one in ranges if one.path.endswith(".safetensors")]
    assert len(weights) == 3
    assert {one.range for one in weights} == {"bytes=0-524287"}
    assert sum(one.sent for one in weights) == 3 * (512 << 10) < 3 * 600 * 500 * 4


def test_a_run_reads_each_byte_of_tensors_once_and_under_the_version_that_was_listed(
    s3: S3, url: str, local: Path, tmp_path: Path
) -> None:
    migrate.plan(url, rules=[rule(tmp_path)])
    planned = sum(one.sent for one in s3.log())
    migrate.apply(url, tmp_path / "out", rules=[rule(tmp_path)])
    sent = sum(one.sent for one in s3.log())
    weights = sum(file.stat().st_size for file in local.glob("*.safetensors"))
    # and at the end a listing says that nothing was replaced
    assert sent - planned <= weights + 10_000


def test_planning_of_torch_files_reads_ends_and_headers_only(s3: S3, tmp_path: Path) -> None:
    import torch

    folder = tmp_path / "pt"
    folder.mkdir()
    state = {f"layers.{n}.w": torch.randn(1 << 20) for n in range(5)}
    state["layers.0.b"] = torch.randn(1 << 20)
    torch.save(state, folder / "pytorch_model.bin")
    url = s3.put(folder, f"{tmp_path.name}/pt")
    s3.log()
    assert migrate.inspect(url).tensors == 6
    asked = [one for one in s3.log() if one.range]
    # the beginning and the end, and the headers between records, side by side
    assert len(asked) <= 2 + 7
    assert sum(one.sent for one in asked) < (2 << 20)
    migrate.apply(url, tmp_path / "out", rules=[rule(tmp_path)])
    migrate.apply(folder, tmp_path / "here", rules=[rule(tmp_path)])
    assert tree(tmp_path / "out") == tree(tmp_path / "here")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_distributed_checkpoints_are_read_from_a_store(s3: S3, tmp_path: Path) -> None:
    import torch
    import torch.distributed.checkpoint as dcp

    from migrate.dcp import MigratingReader

    state = {f"layers.{n}.w": torch.randn(300, 1000) for n in range(8)}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    url = s3.put(tmp_path / "dcp", f"{tmp_path.name}/dcp")
    s3.log()
    assert migrate.inspect(url).tensors == 8
    opening = [one for one in s3.log() if one.range]
    assert len(opening) <= 12
    assert migrate.diff(url, tmp_path / "dcp").equal
    target = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
    dcp.load(target, storage_reader=MigratingReader(url), no_dist=True)
    assert all(torch.equal(target[key], state[key]) for key in state)


def test_an_object_that_is_replaced_during_a_run_stops_it_and_nothing_appears(
    s3: S3, url: str, tmp_path: Path
) -> None:
    key = shard_of(url, 2)
    before = s3.client.head_object(Bucket="bucket", Key=key)["ETag"]
    changed: list[str] = []

    def replace(done: int, total: int) -> None:
        if not changed:
            body = s3.client.get_object(Bucket="bucket", Key=key)["Body"].read()
            made = s3.client.put_object(Bucket="bucket", Key=key, Body=body[:-1] + b"x")
            changed.append(made["ETag"])

    with pytest.raises(MigrateError) as caught:
        migrate.apply(url, tmp_path / "out", rules=[rule(tmp_path)], progress=replace)
    assert {d.code for d in caught.value.diagnostics} == {"M905"}
    said = str(caught.value)
    assert "model-00002-of-00003.safetensors" in said
    assert before.strip('"') in said
    assert changed[0].strip('"') in said
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.migrate-partial").exists()


def test_a_read_after_the_object_was_replaced_is_refused_by_the_store(s3: S3, url: str) -> None:
    from migrate import formats

    with formats.open(url) as source:
        s3.client.put_object(Bucket="bucket", Key=shard_of(url), Body=bytes(1_300_000))
        with pytest.raises(MigrateError) as caught:
            source.blobs[0].readinto(600 << 10, memoryview(bytearray(100)))
    assert [d.code for d in caught.value.diagnostics] == ["M905"]
    assert "its version was" in str(caught.value)


def test_a_run_whose_store_fails_is_resumed(
    s3: S3, local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = shards(tmp_path / "large", rows=6000)
    url = s3.put(large, f"{tmp_path.name}/large")
    made, out = rule(tmp_path), tmp_path / "out"
    begun: list[int] = []

    def fail(done: int, total: int) -> None:
        if not begun:
            begun.append(done)
            s3.spoil(fail="GET .*safetensors")

    monkeypatch.setattr(requests, "PIECE", 1 << 16)
    monkeypatch.setattr(requests, "FLIGHT", 2)
    with pytest.raises(MigrateError) as caught:
        migrate.apply(url, out, rules=[made], progress=fail, threads=1)
    assert {d.code for d in caught.value.diagnostics} == {"M969"}
    assert not out.exists()
    s3.spoil()
    migrate.apply(url, out, rules=[made], resume=True)
    migrate.apply(large, tmp_path / "here", rules=[made])
    assert tree(out) == tree(tmp_path / "here")


def test_answers_that_are_cut_short_and_a_server_without_ranges_are_refused(
    s3: S3, url: str, tmp_path: Path
) -> None:
    s3.spoil(truncate="GET .*safetensors$")
    assert "cut short" in refused("M969", url)
    s3.spoil(whole="GET .*safetensors$")
    assert "was asked for a range" in refused("M969", url)
    s3.spoil(fail="GET .*safetensors$")
    assert "the store fails (InternalError)" in refused("M969", url)


class Endless(BaseHTTPRequestHandler):
    """A file of 1 GB, of which each request gets the whole, whatever range it asks for."""

    size = 1 << 30

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(self.size))
        self.send_header("ETag", '"1"')
        self.send_header("Last-Modified", "Sun, 01 Nov 2026 00:00:00 GMT")
        self.end_headers()

    def do_GET(self) -> None:
        if "list-type" in self.path:
            # of what lies below the name: nothing
            listing = b"<ListBucketResult><KeyCount>0</KeyCount></ListBucketResult>"
            self.send_response(200)
            self.send_header("Content-Length", str(len(listing)))
            self.end_headers()
            self.wfile.write(listing)
            return
        self.do_HEAD()
        sent = 0
        with suppress(OSError):
            while sent < self.size:
                sent += self.wfile.write(bytes(1 << 16))
        self.server.log.append(Sent(self.command, self.path, "", sent))


@pytest.mark.parametrize("scheme", ["http", "s3"])
def test_a_whole_that_comes_in_place_of_a_range_is_not_read_to_its_end(
    s3: S3, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    with serving(Endless) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        where = server.url if scheme == "http" else "s3:/"
        assert "was asked for a range" in refused("M969", f"{where}/bucket/model.safetensors")
    assert server.log
    # what the connection had taken when it was closed
    assert all(one.sent < Endless.size // 8 for one in server.log)


@pytest.mark.parametrize("forbidden", ["^GET /bucket$", "GET .*safetensors$"])
def test_a_user_who_may_not_read_is_told_what_reading_needs(
    s3: S3, url: str, forbidden: str
) -> None:
    s3.spoil(forbid=forbidden)
    said = refused("M968", url)
    assert "the store refuses (AccessDenied)" in said
    assert "reading needs s3:ListBucket on the bucket and s3:GetObject on its objects" in said


def test_an_output_in_a_bucket_that_does_not_exist(s3: S3, local: Path, tmp_path: Path) -> None:
    with pytest.raises(MigrateError) as caught:
        migrate.apply(local, "s3://nothing-here/new", rules=[rule(tmp_path)])
    assert [d.code for d in caught.value.diagnostics] == ["M917"]
    assert "there is no such bucket" in str(caught.value)


def test_no_credentials(s3: S3, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name)
    assert "finds no credentials" in refused("M968", url)


def test_another_region(s3: S3, url: str) -> None:
    # botocore asks for the region by a HEAD of the bucket, which does not help here
    s3.spoil(moved="^GET|HEAD /bucket/.")
    assert "in another region" in refused("M968", url)


def test_a_bucket_and_a_prefix_that_do_not_exist(s3: S3) -> None:
    assert "there is no such bucket" in refused("M917", "s3://nothing-here/x")
    said = refused("M917", "s3://bucket/nothing/here")
    assert "contains no checkpoint" in said
    assert "look at the spelling" in said
    assert "names no bucket" in refused("M917", "s3:///x")


def test_no_server(monkeypatch: pytest.MonkeyPatch, s3: S3) -> None:
    # a port that nothing listens on
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    assert "does not answer" in refused("M969", "s3://bucket/x")


def test_a_prefix_that_is_a_key(s3: S3, url: str, tmp_path: Path) -> None:
    s3.client.put_object(Bucket="bucket", Key=tmp_path.name, Body=b"1")
    assert "is an object, and there are objects below it" in refused("M915", url)
    assert migrate.inspect(url + "/").tensors == 6


def test_two_checkpoints_below_a_prefix(s3: S3, url: str, local: Path, tmp_path: Path) -> None:
    for number in (1, 2):
        s3.put(local, f"{tmp_path.name}-runs/iter_000000{number}")
    said = refused("M915", f"s3://bucket/{tmp_path.name}-runs")
    assert "2 checkpoints" in said
    s3.client.put_object(
        Bucket="bucket", Key=f"{tmp_path.name}-runs/latest_checkpointed_iteration.txt", Body=b"2"
    )
    found = migrate.inspect(f"s3://bucket/{tmp_path.name}-runs")
    assert found.path.endswith("-runs/iter_0000002/")


def test_an_object_without_bytes_and_one_that_is_archived(
    s3: S3, url: str, local: Path, tmp_path: Path
) -> None:
    s3.client.put_object(Bucket="bucket", Key=shard_of(url, 3), Body=b"")
    assert "0 bytes, too short" in refused("M906", url)
    body = (local / "model-00003-of-00003.safetensors").read_bytes()
    s3.client.put_object(Bucket="bucket", Key=shard_of(url, 3), Body=body, StorageClass="GLACIER")
    assert "restore it first" in refused("M968", url)


def test_an_archived_object_that_was_restored_is_read(
    s3: S3, url: str, local: Path, tmp_path: Path
) -> None:
    """A listing has the class in which it is kept, and nothing of the copy that can be read."""
    for file in local.glob("*.safetensors"):
        key = f"{tmp_path.name}/{file.name}"
        s3.client.put_object(
            Bucket="bucket", Key=key, Body=file.read_bytes(), StorageClass="DEEP_ARCHIVE"
        )
    assert "is archived (DEEP_ARCHIVE)" in refused("M968", url)
    for number in (1, 2, 3):
        assert "restore it first" in refused("M968", f"s3://bucket/{shard_of(url, number)}")
        s3.client.restore_object(
            Bucket="bucket", Key=shard_of(url, number), RestoreRequest={"Days": 1}
        )
    assert migrate.diff(url, local).equal
    migrate.apply(url, tmp_path / "out", rules=[rule(tmp_path)])
    migrate.apply(local, tmp_path / "here", rules=[rule(tmp_path)])
    assert tree(tmp_path / "out") == tree(tmp_path / "here")
    assert migrate.inspect(f"s3://bucket/{shard_of(url)}").tensors == 2


@pytest.mark.parametrize(
    ("set_to", "said"),
    [
        ({"AWS_CONFIG_FILE": "{bad}"}, "{bad} cannot be parsed"),
        ({"AWS_SHARED_CREDENTIALS_FILE": "{bad}"}, "{bad} cannot be parsed"),
        ({"AWS_PROFILE": "planted-profile"}, "there is no profile planted-profile"),
        ({"AWS_DEFAULT_REGION": "no region!"}, "'no region!' is no region"),
        ({"AWS_ENDPOINT_URL": "me:planted-secret@host"}, "AWS_ENDPOINT_URL is no URL"),
        ({"AWS_ENDPOINT_URL_S3": "http://"}, "AWS_ENDPOINT_URL_S3 is no URL"),
        ({"AWS_MAX_ATTEMPTS": "many"}, "AWS_MAX_ATTEMPTS is no number"),
        ({"AWS_RETRY_MODE": "often"}, 'provided to "mode": "often"'),
        ({"AWS_DEFAULTS_MODE": "x"}, "invalid defaults mode: x"),
        ({"AWS_CONFIG_FILE": "{role}", "AWS_PROFILE": "p"}, 'source_profile "q"'),
        ({"AWS_CONFIG_FILE": "{process}"}, "/no/such/program cannot be read"),
        (
            {"AWS_ROLE_ARN": "arn:aws:iam::1:role/x", "AWS_WEB_IDENTITY_TOKEN_FILE": "/no/token"},
            "/no/token cannot be read",
        ),
        (
            {"AWS_CONTAINER_CREDENTIALS_FULL_URI": "planted-secret"},
            "AWS_CONTAINER_CREDENTIALS_FULL_URI",
        ),
    ],
)
def test_a_setting_of_the_library_that_is_wrong_is_named(
    s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, set_to: dict[str, str], said: str
) -> None:
    files = {
        "bad": "[default\n",
        "role": "[profile p]\nrole_arn = a\nsource_profile = q\n",
        "process": "[default]\ncredential_process = /no/such/program planted-secret\n",
    }
    paths = {name: str(tmp_path / name) for name in files}
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    if not {"AWS_ENDPOINT_URL", "AWS_MAX_ATTEMPTS"} & set_to.keys():
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
            monkeypatch.delenv(name)
    for name, value in set_to.items():
        monkeypatch.setenv(name, value.format(**paths))
    found = refused("M968", "s3://bucket/x")
    assert said.format(**paths) in found
    assert "planted-secret" not in found


def test_a_page_for_people_in_place_of_an_answer(s3: S3, url: str) -> None:
    """A proxy or a page for logging in: a listing without objects, if it were believed."""
    for like in ("^GET /bucket$", "HEAD", "GET .*index.json", "GET .*safetensors"):
        s3.spoil(page=like)
        said = refused("M969", url if like != "HEAD" else f"s3://bucket/{shard_of(url)}")
        assert "a web page came in place of the store's answer" in said, like
        assert "HTTPS_PROXY" in said


def test_an_object_that_is_a_page_is_no_answer_of_a_proxy(s3: S3, url: str, tmp_path: Path) -> None:
    body = b"<!DOCTYPE html><html><body>about this model</body></html>"
    s3.client.put_object(
        Bucket="bucket", Key=f"{tmp_path.name}/card.html", Body=body, ContentType="text/html"
    )
    migrate.apply(url, tmp_path / "out", rules=[rule(tmp_path)])
    assert (tmp_path / "out" / "card.html").read_bytes() == body


def test_a_head_that_is_refused_without_a_reason(s3: S3, url: str) -> None:
    s3.spoil(reject="^HEAD")
    said = refused("M968", f"s3://bucket/{shard_of(url)}")
    assert "does not say why (status 400)" in said
    assert "an expired token and another region (AWS_DEFAULT_REGION)" in said


@pytest.mark.parametrize(
    "key", ["a/../b", "..", "a//b", "/a", "./a", "a/.", "a\nb", "a\x1b[2Jb", "a/b//"]
)
def test_a_url_that_no_key_of_a_file_has(s3: S3, local: Path, tmp_path: Path, key: str) -> None:
    for url in (f"s3://bucket/{key}", f"memory://bucket/{key}", f"hf://org/model@main/{key}"):
        assert "names no path inside a store" in refused("M907", url)
    with pytest.raises(MigrateError) as caught:
        migrate.apply(local, f"s3://bucket/{key}", rules=[rule(tmp_path)])
    assert [d.code for d in caught.value.diagnostics] == ["M907"]
    assert not s3.log()


def test_a_key_that_climbs(s3: S3, url: str, tmp_path: Path) -> None:
    s3.client.put_object(Bucket="bucket", Key=f"{tmp_path.name}/a//b", Body=b"1")
    assert "names no path inside the checkpoint" in refused("M907", url)


def test_a_pointer_of_git_lfs(s3: S3, url: str) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 5000\n"
    s3.client.put_object(Bucket="bucket", Key=shard_of(url), Body=pointer)
    assert "not the 5,000 bytes" in refused("M966", url)


def test_no_secret_is_in_a_message_a_plan_or_an_output(
    s3: S3, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []

    def collect(call: Callable[[], Any]) -> None:
        try:
            said.append(repr(call()))
        except MigrateError as error:
            said.append(str(error))

    made = rule(tmp_path)
    said.append(migrate.plan(url, rules=[made]).to_json())
    migrate.apply(url, tmp_path / "out", rules=[made])
    said += [content.decode("latin-1") for content in tree(tmp_path / "out").values()]
    for kind in ("fail", "moved", "truncate", "whole"):
        s3.spoil(**{kind: "^GET|HEAD /bucket/."})
        collect(lambda: migrate.inspect(url))
    s3.spoil()
    for given in (
        "s3://planted-key:planted-secret@bucket/x",
        "https://me:planted-secret@127.0.0.1:9/x?X-Amz-Signature=planted-signature",
        f"{s3.url}/bucket/x?X-Amz-Signature=planted-signature",
        "memory://me:planted-secret@bucket/x",
    ):
        collect(lambda given=given: migrate.inspect(given))
        collect(lambda given=given: migrate.apply(tmp_path / "old", given, rules=[made]))
    with hub_server(tmp_path / "old") as servers, pytest.MonkeyPatch.context() as patched:
        point_at_hub(patched, servers.hub.url, tmp_path)
        for name in ("org/model", "org/gated", "org/none", "org/old"):
            collect(lambda name=name: migrate.inspect(f"hf://{name}"))
        said.append(migrate.plan("hf://org/model", rules=[made]).to_json())
    assert len(said) > 15
    assert not [(word, text[:200]) for text in said for word in PLANTED if word in text]


# the web


def test_a_signed_url_is_read_and_recorded_without_its_signature(
    local: Path, tmp_path: Path
) -> None:
    with web_server(local) as server:
        url = f"{server.url}/model-00001-of-00003.safetensors?X-Amz-Signature=planted-signature"
        report = migrate.apply(url, tmp_path / "out.safetensors", rules=[rule(tmp_path)])
        words = [sys.executable, "-m", "migrate", "-vvv", "inspect", url]
        said = subprocess.run(words, capture_output=True, text=True, check=True)
    assert "model-00001-of-00003.safetensors" in said.stderr
    assert "planted" not in said.stdout + said.stderr
    assert report.source == f"{server.url}/model-00001-of-00003.safetensors"
    asked = [one.path for one in server.log]
    assert all(path.endswith("?X-Amz-Signature=planted-signature") for path in asked)


def test_parts_of_a_signed_url_are_published_when_it_is_given_again(
    local: Path, tmp_path: Path
) -> None:
    out, made, query = tmp_path / "out", rule(tmp_path), "?X-Amz-Signature=planted-signature"
    with web_server(local, signed=query) as server:
        url = f"{server.url}/model-00001-of-00003.safetensors{query}"
        options: Any = {"rules": [made], "max_shard_size": "1MB"}
        for number in range(2):
            migrate.apply(url, out, part=RunPart(number, 2), **options)
        left = [file.read_bytes() for file in tmp_path.rglob("out.migrate-partial/**/*.json*")]
        assert len(left) > 3
        assert not [content for content in left if b"planted" in content]
        with pytest.raises(MigrateError) as caught:
            migrate.publish(out)
        assert {d.code for d in caught.value.diagnostics} == {"M968"}
        assert "the store refuses (status 403)" in str(caught.value)
        assert "give it again with `source`: its query is not recorded" in str(caught.value)
        report = migrate.publish(out, source=url)
    assert report.copy_of is None
    assert report.source == url.removesuffix(query)
    migrate.apply(local / "model-00001-of-00003.safetensors", tmp_path / "here", **options)
    assert tree(out) == tree(tmp_path / "here")


def test_a_web_server_without_ranges_is_refused_before_a_file_is_read(local: Path) -> None:
    with web_server(local, ranges=False) as server:
        assert "was asked for a range" in refused(
            "M969", f"{server.url}/model-00001-of-00003.safetensors"
        )


@pytest.mark.parametrize("stamp", ["strong", "weak", "time"])
def test_a_file_that_is_replaced_on_a_web_server(local: Path, stamp: str) -> None:
    from migrate import formats

    name = "model-00001-of-00003.safetensors"
    with (
        web_server(local, stamp=stamp) as server,
        formats.open(f"{server.url}/{name}") as source,
    ):
        (local / name).write_bytes((local / name).read_bytes()[::-1])
        with pytest.raises(MigrateError) as caught:
            source.blobs[0].readinto(600 << 10, memoryview(bytearray(100)))
        assert [d.code for d in caught.value.diagnostics] == ["M905"]
        with pytest.raises(MigrateError, match="its version was"):
            source.check_unchanged()


def test_what_a_web_server_does_not_have_or_does_not_give(local: Path) -> None:
    """fsspec calls all of it an absent file."""
    with web_server(local, signed="?key") as server:
        assert "there is no such file or folder" in refused("M917", f"{server.url}/none")
        one = f"{server.url}/model-00001-of-00003.safetensors"
        assert "the store refuses (status 403)" in refused("M968", one)
    # a port that nothing listens on
    for url in ("http://127.0.0.1:9/x", "http://127.0.0.1:9/x/"):
        said = refused("M969", url)
        assert f"{url}: the store does not answer as it should (ClientConnectorError)" in said
        assert "look at the network" in said


# the hub


@pytest.fixture
def hub(local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    with hub_server(local) as servers:
        point_at_hub(monkeypatch, servers.hub.url, tmp_path)
        yield servers


def test_everything_is_read_at_one_commit_while_main_moves(
    hub: Any, local: Path, tmp_path: Path
) -> None:
    plan = migrate.plan("hf://org/model", rules=[rule(tmp_path)])
    assert plan.report.source.path == f"hf://org/model@{COMMIT}/"
    weights = [one for one in hub.weights.log if one.sent]
    assert [one.range for one in weights] == ["bytes=0-524287"] * 3
    (tmp_path / "plan.json").write_text(plan.to_json())
    # main is another commit now
    hub.at.insert(0, MOVED)
    hub.hub.log.clear()
    migrate.apply(tmp_path / "plan.json", tmp_path / "out")
    resolved = [one.path for one in hub.hub.log if "/resolve/" in one.path]
    assert resolved
    assert all(f"/resolve/{COMMIT}/" in path for path in resolved)
    migrate.apply(local, tmp_path / "here", rules=[rule(tmp_path)])
    assert tree(tmp_path / "out") == tree(tmp_path / "here")


def test_main_may_move_while_a_plan_is_made(
    hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = Hub.tree

    def moving(self: Any) -> Any:
        hub.at[:] = [MOVED, COMMIT]
        return tree(self)

    monkeypatch.setattr(Hub, "tree", moving)
    plan = migrate.plan("hf://org/model", rules=[rule(tmp_path)])
    assert hub.at[0] == MOVED
    assert plan.report.source.path == f"hf://org/model@{COMMIT}/"
    resolved = [one.path for one in hub.hub.log if "/resolve/" in one.path]
    assert len(resolved) > 3
    assert all(f"/resolve/{COMMIT}/" in path for path in resolved)


def test_a_page_for_people_in_place_of_the_hub(hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    page = b"<!DOCTYPE html><html><body>Please log in.</body></html>"
    plain = Hub.do_GET
    for part in ("/api/models/org/model", "/tree/", "/resolve/"):

        def answer(self: Any, part: str = part) -> None:
            if part in self.path and (part != "/api/models/org/model" or "/tree/" not in self.path):
                return self.answer(200, page, Content_Type="text/html")
            return plain(self)

        monkeypatch.setattr(Hub, "do_GET", answer)
        said = refused("M969", "hf://org/model")
        words = "was asked for a range" if part == "/resolve/" else "does not speak as the Hub does"
        assert words in said, part


def test_a_hub_without_ranges_is_refused(hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Elsewhere, "do_GET", lambda self: self.answer(200, bytes(2 << 20)))
    assert "was asked for a range" in refused("M969", "hf://org/model")


@pytest.mark.parametrize(
    ("url", "code", "said"),
    [
        ("hf://org/gated", "M968", "is gated"),
        ("hf://org/old", "M917", "is called org/model now"),
        ("hf://org/none", "M917", "there is no such repository"),
        ("hf://org/model@gone", "M917", "no such revision"),
        ("hf://org/model@main/none.safetensors", "M917", "no such file or folder"),
        ("hf://org", "M917", "names no repository"),
        ("hf://org/model@", "M917", "names no revision"),
    ],
)
def test_what_the_hub_does_not_give(hub: Any, url: str, code: str, said: str) -> None:
    assert said in refused(code, url)


def test_a_snapshot_in_the_cache_is_read_from_there_and_offline(
    hub: Any, local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants, snapshot_download

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "is not in the cache" in refused("M917", "hf://org/model")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    snapshot_download("org/model", cache_dir=str(tmp_path / "hub"), token=False)
    hub.weights.log.clear()
    assert migrate.diff("hf://org/model", local).equal
    assert not hub.weights.log
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.hub.log.clear()
    found = migrate.inspect("hf://org/model")
    assert found.path == f"hf://org/model@{COMMIT}/"
    assert not hub.hub.log
