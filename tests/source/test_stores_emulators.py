"""Google's and Azure's stores as their emulators are, through gcsfs and adlfs. None of these is
among the libraries of the tests: `make .venv-stores/.ready` makes an environment with all but
Azurite, which is `npm install azurite`, and `azurite-blob` on the path.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from stored_checkpoint import rule
from stored_systems import held, tree
from written_stores import large

import migrate
from migrate import formats
from migrate.core.errors import MigrateError, printable
from migrate.source.stores.system_output import HeldFiles

pytestmark = [
    pytest.mark.servers,
    # of aiohttp, to the libraries, which send blocks as they are
    pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning"),
]
# of Azurite, for everybody
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


class Bucket(NamedTuple):
    at: str
    system: Any

    def held(self, below: str = "") -> dict[str, bytes]:
        return held(self.system, self.at + below)


def listens(port: int) -> bool:
    with socket.socket() as asked:
        return not asked.connect_ex(("127.0.0.1", port))


@contextmanager
def running(*command: str, port: int) -> Iterator[None]:
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not listens(port):
            assert child.poll() is None, "the emulator has ended"
            time.sleep(0.5)
        yield
    finally:
        child.terminate()
        child.wait()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.fixture(scope="module", params=["gs", "az"])
def started(request: pytest.FixtureRequest) -> Iterator[str]:
    port = free_port()
    needed = ("gcsfs", "gcp_storage_emulator") if request.param == "gs" else ("adlfs",)
    if lacking := [name for name in needed if find_spec(name) is None]:
        pytest.skip(f"{lacking[0]} is not installed")
    with pytest.MonkeyPatch.context() as patched:
        if request.param == "gs":
            import fsspec

            patched.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
            # else it asks the emulator for what only Google answers
            patched.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
            patched.setitem(fsspec.config.conf, "gs", {"token": "anon"})
            serve = Path(__file__).with_name("serve_google.py")
            command = [sys.executable, str(serve), "start", "--in-memory"]
            command += ["--port", str(port), "-H", "127.0.0.1", "--default-bucket", "bucket"]
        else:
            azurite = shutil.which("azurite-blob")
            if azurite is None:
                pytest.skip("azurite-blob is not on the path")
            at = f"http://127.0.0.1:{port}/devstoreaccount1"
            account = f"AccountName=devstoreaccount1;AccountKey={KEY}"
            text = f"DefaultEndpointsProtocol=http;{account};BlobEndpoint={at};"
            patched.setenv("AZURE_STORAGE_CONNECTION_STRING", text)
            command = [azurite, "--silent", "--disableTelemetry", "--inMemoryPersistence"]
            command += ["--skipApiVersionCheck", "--blobPort", str(port)]
        with running(*command, port=port):
            if request.param == "az":
                import fsspec

                fsspec.filesystem("az").mkdir("bucket")
            yield request.param


@pytest.fixture
def bucket(started: str, tmp_path: Path) -> Bucket:
    import fsspec

    return Bucket(f"{started}://bucket/{tmp_path.name}", fsspec.filesystem(started))


@pytest.fixture
def local(tmp_path: Path) -> Path:
    folder = large(tmp_path / "old")
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "vocab.txt").write_text("a\nb\n")
    return folder


@pytest.fixture
def made(tmp_path: Path) -> Path:
    return rule(tmp_path)


def refused(code: str, *arguments: Any, **named: Any) -> str:
    with pytest.raises(MigrateError) as caught:
        migrate.apply(*arguments, **named)
    assert {d.code for d in caught.value.diagnostics} == {code}, str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", ["new", "new.safetensors", "new.pt"])
def test_what_is_written_there_is_what_is_written_here(
    bucket: Bucket, local: Path, made: Path, tmp_path: Path, name: str
) -> None:
    # each file is of several blocks
    options: Any = {"rules": [made], "max_shard_size": "15MB", "max_memory": "64MB"}
    here = migrate.apply(local, tmp_path / name, **options)
    there = migrate.apply(local, f"{bucket.at}/{name}", **options)
    place = tmp_path / name
    files = tree(place) if place.is_dir() else {"": place.read_bytes()}
    assert bucket.held() == {f"{name}/{inner}".rstrip("/"): d for inner, d in files.items()}
    assert there.files == here.files
    assert there.store.requests is None
    assert migrate.diff(there.path, place).equal
    assert migrate.verify(there.path, source=local, rules=[made]).equal
    if name == "new":
        migrate.downgrade(there.path, f"{bucket.at}/back", rules=[made])
        assert migrate.diff(f"{bucket.at}/back", local).tensors_equal


def test_nothing_there_is_replaced(
    bucket: Bucket, local: Path, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "model-00002-of-00002.safetensors"
    mine = f"{bucket.at}/new/{name}"

    def appear(files: HeldFiles, now: str) -> None:
        if now == name:
            bucket.system.pipe_file(mine, b"mine")
        real(files, now)

    real = HeldFiles.appear
    out, options = f"{bucket.at}/new", {"rules": [made], "max_shard_size": "15MB"}
    with monkeypatch.context() as patched:
        patched.setattr(HeldFiles, "appear", appear)
        assert f"{name} appeared" in refused("M904", local, out, **options)
    assert bucket.held() == {f"new/{name}": b"mine"}
    assert "already exists" in refused("M904", local, out, **options)

    def later(done: int, total: int) -> None:
        bucket.system.pipe_file(f"{bucket.at}/other/config.json", b"mine")

    refused("M904", local, f"{bucket.at}/other", **options, progress=later)
    assert bucket.held("/other") == {"config.json": b"mine"}


def test_of_a_run_that_ends_early_nothing_shows(bucket: Bucket, local: Path, made: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    out = f"{bucket.at}/new"
    with pytest.raises(KeyboardInterrupt):
        migrate.apply(local, out, rules=[made], progress=interrupt, max_memory="64MB")
    assert bucket.held() == {}
    elsewhere = out.replace("//bucket/", "//none/")
    assert "no such bucket" in refused("M917", local, elsewhere, rules=[made])
    migrate.apply(local, out, rules=[made])
    assert migrate.verify(out, source=local, rules=[made]).equal


def test_of_an_object_that_is_replaced_nothing_is_read(
    bucket: Bucket, local: Path, made: Path
) -> None:
    name = "model-00002-of-00002.safetensors"
    for inner, data in tree(local).items():
        bucket.system.pipe_file(f"{bucket.at}/old/{inner}", data)
    content = tree(local)[name]
    there = memoryview(bytearray(100))

    def replace() -> str:
        """The version of another object of the same length."""
        bucket.system.pipe_file(f"{bucket.at}/old/{name}", content[::-1])
        bucket.system.invalidate_cache()
        found = bucket.system.info(f"{bucket.at}/old/{name}")
        return str(found.get("generation") or found["etag"])

    with formats.open(f"{bucket.at}/old") as source:
        blob = source.blobs[source.index.files.index(name)]
        # beyond what opening has read
        blob.readinto(600 << 10, there)
        assert there == content[600 << 10 :][:100]
        then, now = blob.identity.version, replace()
        with pytest.raises(MigrateError) as caught:
            blob.readinto(700 << 10, there)
    assert [d.code for d in caught.value.diagnostics] == ["M905"]
    assert f"{bucket.at}/old/{name}: changed" in str(caught.value)
    assert printable(then) in str(caught.value)
    assert printable(now) in str(caught.value)
    bucket.system.pipe_file(f"{bucket.at}/old/{name}", content)
    versions: list[str] = []

    def later(done: int, total: int) -> None:
        if not versions:
            versions.append(replace())

    said = refused("M905", f"{bucket.at}/old", f"{bucket.at}/new", rules=[made], progress=later)
    assert name in said
    assert printable(versions[0]) in said
    assert not bucket.held("/new")
