"""Stores and checkpoints in them, each started when the first test asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def started_s3() -> Iterator[object]:
    pytest.importorskip("moto", reason="the extra `test` brings moto")
    from store_servers import s3_server

    with s3_server() as found:
        yield found


@pytest.fixture(scope="module")
def started_other(request: pytest.FixtureRequest) -> Iterator[object]:
    """The server of others whose name is the parameter, behind a proxy."""
    from bucket_servers import STARTED, missing
    from store_servers import s3_server

    if (why := missing(request.param)) is not None:
        pytest.skip(why)
    with STARTED[request.param]() as running, s3_server(running.url) as found:
        yield found


@pytest.fixture
def s3(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[object]:
    """The S3 server, as boto3 finds it by its environment; each test has keys of its own."""
    from store_servers import S3

    name = "started_other" if "started_other" in request.fixturenames else "started_s3"
    started_s3 = request.getfixturevalue(name)
    assert isinstance(started_s3, S3)
    for name, value in {
        "AWS_ENDPOINT_URL": started_s3.url,
        "AWS_ACCESS_KEY_ID": "planted-key",
        "AWS_SECRET_ACCESS_KEY": "planted-secret",
        "AWS_SESSION_TOKEN": "planted-token",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "HOME": str(tmp_path),
    }.items():
        monkeypatch.setenv(name, value)
    # the default session keeps the credentials that it has found
    monkeypatch.setattr("boto3.DEFAULT_SESSION", None)
    started_s3.spoil()
    started_s3.log()
    yield started_s3
    started_s3.spoil()


@pytest.fixture
def local(tmp_path: Path) -> Path:
    """A checkpoint of several parts, for tests that have none of their own."""
    from written_stores import large

    return large(tmp_path / "old")


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """The rule file for it."""
    from stored_checkpoint import rule

    return rule(tmp_path)
