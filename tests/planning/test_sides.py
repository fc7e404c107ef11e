"""Side files as edges leave them: read once, compared in value, written in the style they had."""

from __future__ import annotations

import json
from typing import Any

import pytest

from migrate.core.errors import CheckpointError
from migrate.planning.patches import ABSENT
from migrate.planning.sides import MAX_READ, SideFiles, clash


def sides(**contents: Any) -> SideFiles:
    raw = {
        f"{name}.json": value if isinstance(value, bytes) else json.dumps(value).encode()
        for name, value in contents.items()
    }
    return SideFiles(raw.get, ["huge.json"])


@pytest.mark.parametrize(
    ("there", "path", "words"),
    [
        (
            ["config.json"],
            "config.json/x.json",
            "config.json would be a file and the folder of config.json/x.json",
        ),
        (["text/a/b.json"], "text", "text would be a file and the folder of text/a/b.json"),
        (["text/a/b.json"], "text/a", "text/a would be a file and the folder of text/a/b.json"),
    ],
)
def test_a_file_is_not_begun_where_one_stands_in_the_way(
    there: list[str], path: str, words: str
) -> None:
    files = SideFiles({}.get, carried=there)
    with pytest.raises(CheckpointError, match=words) as caught:
        files.put_value(path, {"a": 1})
    assert caught.value.diagnostics[0].code == "M513"
    assert files.changed == {}
    files.put_value(f"x-{path}", {"a": 1})


def test_a_file_may_stand_where_another_one_went() -> None:
    files = SideFiles({"a": b"{}"}.get, carried=["a"])
    files.put_value("a", None)
    files.put_value("a/b.json", {"c": 1})
    assert files.changed.keys() == {"a", "a/b.json"}


@pytest.mark.parametrize(
    ("paths", "found"),
    [
        (["a", "b/a", "a.json"], None),
        (["b", "a/b/c", "a"], ("a", "a/b/c")),
        (["a-b", "a/b", "a"], ("a", "a/b")),
        ([], None),
    ],
)
def test_a_clash_names_the_file_and_what_lies_below(
    paths: list[str], found: tuple[str, str] | None
) -> None:
    assert clash(paths) == found


def test_a_place_is_reached_through_objects_and_lists_only() -> None:
    files = sides(config={"a": {"b": [1, {"c": None}]}, "1": "one", "t": "text"})
    assert files.value_at("config.json", ["a", "b", "0"]) == 1
    assert files.value_at("config.json", ["a", "b", "1", "c"]) is None
    assert files.value_at("config.json", ["1"]) == "one"
    for absent in (
        ["a", "b", "2"],
        ["a", "b", "-1"],
        ["a", "b", "x"],
        ["a", "0"],
        ["t", "0"],
        ["a", "b", "0", "0"],
        ["a", "b", "²"],
    ):
        assert files.value_at("config.json", absent) is ABSENT
    assert files.value_at("other.json", ["a"]) is ABSENT
    assert files.value_at("other.json", []) is ABSENT


def test_what_is_put_is_read_and_what_is_put_back_is_the_old_file() -> None:
    before = b'{"a": 1,  "b": 2}'
    files = sides(config=before)
    files.put_value("config.json", {"b": 2, "a": 1})
    assert files.changed == {}
    assert files.read_file("config.json") == before
    files.put_value("config.json", {"a": 3})
    assert files.read_file("config.json") == b'{"a": 3}'
    assert files.value_at("config.json", ["a"]) == 3
    files.put_value("config.json", None)
    assert files.read_file("config.json") is None
    assert files.list_files([("config.json", 17), ("x", 1)]) == [("x", 1)]
    files.put_value("config.json", {"a": 1, "b": 2})
    assert files.read_file("config.json") == b'{\n  "a": 1,\n  "b": 2\n}\n'
    assert files.list_files([("config.json", 17)]) == [("config.json", 23)]


def test_a_file_that_comes_to_hold_its_old_bytes_counts_as_unchanged() -> None:
    files = sides(config={"a": 1})
    files.put_value("config.json", {"a": 2})
    assert set(files.changed) == {"config.json"}
    files.put_value("config.json", {"a": 1})
    assert files.changed == {}


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"7", b'{"a": 1} x', b"{" + b" " * MAX_READ + b"}", b"\xef\xbb\xbf{}"]
)
def test_what_holds_no_object_is_refused_by_name(content: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        sides(config=content).value("config.json")


def test_a_file_that_is_there_and_is_not_read_is_refused() -> None:
    with pytest.raises(CheckpointError, match="M513"):
        sides().value("huge.json")
    assert sides().value("absent.json") is None
