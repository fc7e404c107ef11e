"""The stamp comes with the checkpoint, from whoever made it: it is read only if it is whole, fits
and may be printed.
"""

from __future__ import annotations

import json

import pytest

from migrate.running.stamp import Stamp, read_stamp, write_stamp

ENTRY = {
    "lineage": "demo",
    "from": "v1",
    "to": "v2",
    "tool": "0.1.0",
    "source": "m1:0",
    "params": {"n": 3},
    "rules": [{"id": "demo/v2/r", "hash": "m1:1"}],
}


def stamp(**changes: object) -> bytes:
    return json.dumps(
        {**json.loads(write_stamp(Stamp(), {"demo": "v2"}, [ENTRY], "m1:2")), **changes}
    ).encode()


def test_a_stamp_that_fits_comes_back_as_it_was_written() -> None:
    assert read_stamp(stamp(), "m1:2") == (Stamp({"demo": "v2"}, (ENTRY,)), [])


def test_what_undoes_a_change_of_side_files_comes_back_in_order() -> None:
    entry = {
        **ENTRY,
        "files": {
            "config.json": [
                {"at": ["z", "a"], "was": {"z": None, "a": 1}, "next": "b"},
                {"at": ["c"]},
            ]
        },
    }
    found, _ = read_stamp(write_stamp(Stamp(), {}, [entry], "m1:2").encode(), "m1:2")
    assert json.dumps(found.applied) == json.dumps([entry])


def test_a_stamp_of_other_contents_is_ignored_with_a_note() -> None:
    found, notes = read_stamp(stamp(), "m1:3")
    assert found == Stamp()
    assert "other contents" in notes[0]


@pytest.mark.parametrize(
    "changes",
    [
        {"layouts": {"demo": "v2\x1b[31m"}},
        {"layouts": {"de\nmo": "v2"}},
        {"layouts": ["demo"]},
        {"applied": [{**ENTRY, "lineage": "\ud800"}]},
        {"applied": [{**ENTRY, "tool": "9\r"}]},
        {"applied": [{**ENTRY, "source": "m1:\u202e0"}]},
        {"applied": [{**ENTRY, "rules": [{"id": "\x07", "hash": "x"}]}]},
        {"applied": [{**ENTRY, "params": []}]},
        {"applied": [{**ENTRY, "files": []}]},
        {"applied": [{**ENTRY, "files": {"config.json": None}}]},
        {"applied": [{**ENTRY, "files": {"config.json": [{"was": 1}]}}]},
        {"applied": [{**ENTRY, "files": {"con\rfig.json": []}}]},
        {
            "applied": [
                {
                    **ENTRY,
                    "files": {
                        "config.json": [{"at": ["a"], "was": json.loads("[" * 200 + "]" * 200)}]
                    },
                }
            ]
        },
        {"applied": {}},
        {"format_version": [1]},
    ],
)
def test_a_stamp_that_is_not_whole_or_would_drive_a_terminal_is_ignored_with_a_note(
    changes: dict,
) -> None:
    found, notes = read_stamp(stamp(**changes), "m1:2")
    assert found == Stamp()
    assert notes == ["the stamp cannot be read and is ignored"]


def test_a_stamp_that_is_nested_without_end_is_ignored() -> None:
    assert read_stamp(b"[" * 200_000, "m1:2")[0] == Stamp()
