"""What stands beside an output in a bucket and is no journal of a run."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("boto3")

from migrate.core.errors import MigrateError
from migrate.running.store_journal import FORMAT_VERSION, begun_unnamed, parse_journal
from migrate.source.stores.s3_uploads import S3Output

WRITTEN: dict[str, Any] = {
    "format_version": FORMAT_VERSION,
    "kind": "journal",
    "digest": "m1:0",
    "single": False,
    "source": {"model.safetensors": [1, 2, 3, 4]},
    "run": "0" * 32,
    "parts": "1",
    "copied": True,
    "files": ["model.safetensors"],
    "others": ["id"],
    "uploads": {"model.safetensors": "id"},
    "checksum": None,
    "doubled": ["model.safetensors"],
    "why": None,
    "begun": {"of": 2, "plan": {}, "copy_of": None},
    "by": 0,
    "ready": True,
}
OPTIONAL = ("checksum", "doubled", "why", "begun", "by", "ready")


@pytest.fixture
def output(monkeypatch: pytest.MonkeyPatch) -> S3Output:
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    return S3Output("s3://bucket/out")


def refused(output: S3Output, content: Any) -> str:
    """The code with which a journal is refused."""
    raw = content if isinstance(content, bytes) else json.dumps(content).encode()
    with pytest.raises(MigrateError) as caught:
        parse_journal(raw, output)
    assert "s3://bucket/out.migrate-partial" in str(caught.value)
    return caught.value.diagnostics[0].code


def test_what_a_run_writes_is_read(output: S3Output) -> None:
    assert parse_journal(json.dumps(WRITTEN).encode(), output) == WRITTEN
    least = {name: value for name, value in WRITTEN.items() if name not in OPTIONAL}
    assert parse_journal(json.dumps(least).encode(), output) == least
    assert parse_journal(json.dumps({**WRITTEN, "source": None}).encode(), output)


@pytest.mark.parametrize("name", [name for name in WRITTEN if name != "format_version"])
def test_a_field_of_another_type_is_refused(output: S3Output, name: str) -> None:
    others: tuple[Any, ...] = (None, True, 1, 1.5, "x", [], {}, [1], {"a": 1}, ["x"], {"a": "x"})
    # as far as JSON can tell them, of the type that is written
    alike = {bool: [True], int: [1], str: ["x"], list: [[], ["x"]]}.get(type(WRITTEN[name]), [])
    if name in ("uploads", "source", "begun"):
        alike = [{}, {"a": "x"}] if name == "uploads" else [{}]
    alike += [None] if name in ("source", "checksum", "why") else []
    alike += ["x"] if name in ("checksum", "why") else []
    alike += [{"a": 1}, {"a": "x"}] if name == "begun" else []
    wrong = [value for value in others if not any(value is a or _same(value, a) for a in alike)]
    if name in ("kind", "run"):
        wrong = list(others)
    assert len(wrong) >= 7
    for value in wrong:
        assert refused(output, {**WRITTEN, name: value}) == "M926", value


def _same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and one == other


@pytest.mark.parametrize(
    "name", [name for name in WRITTEN if name not in ("format_version", *OPTIONAL)]
)
def test_a_field_that_is_not_there_is_missed(output: S3Output, name: str) -> None:
    content = {key: value for key, value in WRITTEN.items() if key != name}
    assert refused(output, content) == "M926"


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"1", b"[" * 100_000, b"\xff"])
def test_what_is_no_object_is_refused(output: S3Output, content: bytes) -> None:
    assert refused(output, content) == "M926"


def test_fields_of_another_version_are_not_judged(output: S3Output) -> None:
    found = {"kind": "journal", "format_version": FORMAT_VERSION + 1, "run": 7}
    assert refused(output, found) == "M918"


def test_what_others_began_is_not_taken_for_an_upload_of_the_run(
    output: S3Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {
        "id": "out/model.safetensors",
        "before": "out/model.safetensors",
        "again": "out/model.safetensors",
        "begun": "out/model.safetensors",
        "elsewhere": "out/notes.safetensors",
    }
    monkeypatch.setattr(output, "uploads", lambda: {one: (key, 0) for one, key in keys.items()})
    monkeypatch.setattr(output, "parts", lambda key, upload: {1: 1} if upload == "begun" else {})
    journal = {**WRITTEN, "others": ["before"]}
    assert list(begun_unnamed(journal, output)) == [("out/model.safetensors", "again")]
    assert list(begun_unnamed({**journal, "doubled": []}, output)) == []
