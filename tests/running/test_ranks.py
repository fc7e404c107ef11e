"""Processes that meet in a folder: who takes part, who is missed, who differs, who has died."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from work import HANG

from migrate.core.errors import MigrateError, QuestionError, RunError
from migrate.core.types import Ranks
from migrate.running import ranks
from migrate.source.blobs import Identity

FACTS = ranks.facts_of({"a": Identity(1, 2, 3, 4, 5)}, "m1:1")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Everything many times as fast; all watches end with the test."""
    for name, seconds in (("BEAT", 0.1), ("SILENT", 2.0), ("POLL", 0.01)):
        monkeypatch.setattr(ranks, name, seconds)
    groups: list[ranks.Group] = []
    begin = ranks.Group.begin

    def begun(group: ranks.Group, members: Any) -> None:
        groups.append(group)
        begin(group, members)

    monkeypatch.setattr(ranks.Group, "begin", begun)
    yield
    for group in groups:
        group._over.set()


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is not there after a second is missing."""
    monkeypatch.setattr(ranks, "APPEAR", 1.0)


def all_of(world: int, work: Callable[[int], Any]) -> list[Any]:
    """What `work(rank)` returns or raises, for each rank in a thread of its own."""
    found: list[Any] = [None] * world

    def run(rank: int) -> None:
        try:
            found[rank] = work(rank)
        except MigrateError as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG)
        assert not thread.is_alive()
    return found


def meeting(
    folder: Path, world: int, facts: dict[int, dict] | None = None, launch: str = ""
) -> list[Any]:
    return all_of(
        world,
        lambda rank: ranks.meet(
            folder, Ranks(rank, world, 0, launch), (facts or {}).get(rank, FACTS)
        ),
    )


def said(error: Any) -> str:
    assert isinstance(error, (RunError, QuestionError)), error
    (found,) = error.diagnostics
    return f"{found.code} {found.message}"


@pytest.mark.parametrize("world", [2, 3, 5])
def test_all_meet_and_hear_each_other(tmp_path: Path, world: int) -> None:
    groups = meeting(tmp_path, world)

    def talk(rank: int) -> Any:
        group = groups[rank]
        if rank:
            group.say("done", {"rank": rank})
            return group.wait("answer")
        heard = [group.wait("done", other)["rank"] for other in range(1, world)]
        group.say("answer", {"heard": heard})
        return heard

    heard = list(range(1, world))
    assert all_of(world, talk) == [heard, *({"heard": heard} for _ in heard)]
    all_of(world, lambda rank: groups[rank].leave())
    # a rank that has left has not died
    groups[0].look()
    groups[0].check()


def test_those_that_do_not_appear_are_named(tmp_path: Path, hasty: None) -> None:
    places = [Ranks(0, 4), Ranks(2, 4)]
    found = all_of(2, lambda n: ranks.meet(tmp_path, places[n], FACTS))
    assert said(found[0]).startswith("M972 ranks 1, 3 did not appear in ")
    assert "within 1 s" in said(found[0])
    assert said(found[1]).startswith("M973 rank 0 failed: ranks 1, 3 did not appear")


def test_rank_0_that_does_not_appear_is_named(tmp_path: Path, hasty: None) -> None:
    with pytest.raises(RunError) as caught:
        ranks.meet(tmp_path / "ranks", Ranks(1, 2), FACTS)
    assert said(caught.value) == f"M972 rank 0 did not appear in {tmp_path} within 1 s"


@pytest.mark.parametrize(
    ("changed", "how"),
    [
        ({"version": "0.0.9"}, "is migrate 0.0.9, rank 0 is migrate "),
        ({"digest": "m1:2"}, "has another plan: its digest is m1:2, that of rank 0 m1:1"),
        ({"source": {"a": [2, 9, 4]}}, "sees another source: a: size 9 instead of 3"),
        ({"source": {"a": [7, 3, 4]}}, "sees another source: a: inode 7 instead of 2"),
        (
            {"source": {"a": [2, 3, 9]}},
            "sees another source: a: time of the last change 9 instead of 4",
        ),
        ({"source": {}}, "sees another source: a: it has no such file"),
        (
            {"source": {"a": [2, 3, 4], "b": [1, 1, 1]}},
            "sees another source: b: rank 0 has no such file",
        ),
    ],
)
def test_a_rank_that_sees_something_else_is_named_by_both(
    tmp_path: Path, changed: dict, how: str
) -> None:
    found = meeting(tmp_path, 2, {1: {**FACTS, **changed}})
    assert said(found[0]).startswith(f"M974 the ranks do not see the same: rank 1 {how}")
    assert said(found[1]).startswith(
        f"M974 the ranks do not see the same: this process, rank 1, {how}"
    )


def test_the_device_of_a_source_may_be_another(tmp_path: Path) -> None:
    other = ranks.facts_of({"a": Identity(9, 2, 3, 4, 7)}, "m1:1")
    assert all(isinstance(one, ranks.Group) for one in meeting(tmp_path, 2, {1: other}))


def dead() -> dict[str, Any]:
    """A process of this machine that has ended."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    who = {**ranks.myself(), "pid": child.pid, "started": "1"}
    child.wait()
    return who


@pytest.mark.parametrize("elsewhere", [False, True])
def test_what_an_earlier_launch_left_is_not_mistaken_for_this_one(
    tmp_path: Path, elsewhere: bool
) -> None:
    who = {**dead(), "machine": "another"} if elsewhere else dead()
    old = tmp_path / "0123456789abcdef"
    old.mkdir()
    call = {"launch": old.name, "by": "", "world": 2, "who": who, "facts": FACTS}
    (tmp_path / "call.json").write_text(json.dumps(call))
    roll = {"members": {"0": who, "1": who}, "nonces": {"1": "fedcba9876543210"}}
    (old / "roll.json").write_text(json.dumps(roll))
    (old / "end.json").write_text('{"message": "rank 1 died"}')
    (old / "begun-0.json").write_text("{}")
    found = meeting(tmp_path, 2)
    assert all(isinstance(one, ranks.Group) for one in found), found
    assert found[1].heard("begun") is None


def test_two_launches_are_kept_apart_by_what_the_launcher_says(tmp_path: Path, hasty: None) -> None:
    # that of another launch is there first
    places = [Ranks(1, 2, 0, "two"), Ranks(0, 2, 0, "one"), Ranks(1, 2, 0, "one")]

    def come(number: int) -> Any:
        time.sleep(0.2 * number)
        return ranks.meet(tmp_path, places[number], FACTS)

    found = all_of(3, come)
    assert said(found[0]).startswith("M972 rank 0 did not appear")
    assert all(isinstance(one, ranks.Group) for one in found[1:])


def test_what_one_fails_of_all_others_say(tmp_path: Path) -> None:
    groups = meeting(tmp_path, 4)
    groups[2].fail(RunError([ranks.Diagnostic("M909", "no room")]))
    groups[2].leave()
    others = [n for n in range(4) if n != 2]
    found = all_of(4, lambda n: groups[n].wait("answer", 0) if n in others else None)
    assert [said(found[n]) for n in others] == ["M973 rank 2 failed: no room (M909)"] * 3


def test_a_listing_that_shows_only_that_a_rank_left_does_not_hide_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder is listed while files are made in it, and a later one may be listed alone."""
    first, second = meeting(tmp_path, 2)
    listed = os.listdir

    def late(path: Any) -> list[str]:
        return [name for name in listed(path) if not name.startswith("failed")]

    monkeypatch.setattr(ranks.os, "listdir", late)
    second.fail(RunError([ranks.Diagnostic("M909", "the disk is full")]))
    second.leave()
    with pytest.raises(RunError, match=r"M973.*rank 1 failed: the disk is full \(M909\)"):
        first.wait("done", 1)


def test_why_a_rank_failed_is_known_before_it_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watch has seen why, and writes it down while the other thread waits for the rank."""
    first, second = meeting(tmp_path, 2)
    place = ranks._place

    def slow(at: ranks.Meeting, name: str, content: Any) -> None:
        if name == "end.json":
            time.sleep(0.5)
        place(at, name, content)

    monkeypatch.setattr(ranks, "_place", slow)
    second.fail(RunError([ranks.Diagnostic("M909", "the disk is full")]))
    second.leave()
    with pytest.raises(RunError, match=r"M973.*rank 1 failed: the disk is full \(M909\)"):
        first.wait("done", 1)


def test_a_process_that_left_writes_nothing_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the folder, which rank 0 removes then, would stay."""
    replace, writing = ranks._replace, threading.Event()

    def slow(path: Path, content: Any) -> None:
        writing.set()
        time.sleep(0.3)
        replace(path, content)

    first, second = meeting(tmp_path, 2)
    monkeypatch.setattr(ranks, "_replace", slow)
    for group, end in ((second, second.leave), (first, first.part)):
        writing.clear()
        assert writing.wait(HANG)
        end()
        there = sorted(path.stat().st_mtime_ns for path in group.home.path.iterdir())
        assert not group._watcher.is_alive()
        time.sleep(0.5)
        if group is first:
            assert sorted(path.stat().st_mtime_ns for path in group.home.path.iterdir()) == there


def test_what_rank_0_fails_of_all_others_say(tmp_path: Path) -> None:
    groups = meeting(tmp_path, 3)
    groups[0].fail(KeyboardInterrupt())
    groups[0].leave()
    found = all_of(2, lambda n: groups[n + 1].wait("begun"))
    wanted = "M973 rank 0 failed: it was interrupted or terminated"
    assert [said(one) for one in found] == [wanted] * 2


@pytest.mark.parametrize("rank", [0, 2])
def test_a_process_that_died_is_noticed_by_all(tmp_path: Path, rank: int) -> None:
    groups = meeting(tmp_path, 3)
    # it vanishes without a word
    groups[rank]._over.set()
    who = dead()
    others = [n for n in range(3) if n != rank]
    for n in others:
        if rank in groups[n]._members:
            groups[n]._members[rank] = who
    found = all_of(3, lambda n: groups[n].wait("answer", 0) if n in others else None)
    wanted = f"M973 rank {rank} died (process {who['pid']} on {who['name']})"
    assert [said(found[n]) for n in others] == [wanted] * 2


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_of_another_machine_is_given_up_after_a_silence(
    tmp_path: Path, rank: int
) -> None:
    groups = meeting(tmp_path, 2)
    other = groups[1 - rank]
    other._members[rank] = {**other._members[rank], "machine": "another"}
    # as long as it beats it is there, whatever the machine
    time.sleep(3)
    other.check()
    groups[rank]._over.set()
    with pytest.raises(RunError) as caught:
        other.wait("answer", rank)
    assert said(caught.value).startswith(f"M973 rank {rank} has given no sign of life for 2 s")


def test_one_that_is_being_terminated_asks_why(tmp_path: Path) -> None:
    groups = meeting(tmp_path, 3)
    assert groups[1].inquire() is None
    # rank 0 is ended as well, and does not pass it on
    groups[0]._over.set()
    groups[2].fail(OSError("a bad disk"))
    error = groups[1].inquire()
    assert error is not None
    assert said(error) == "M973 rank 2 failed: OSError: a bad disk"


def test_bytes_that_others_have_done_are_known_to_rank_0(tmp_path: Path) -> None:
    groups = meeting(tmp_path, 2)
    groups[1].progress(77)
    while groups[0].done.get(1) != 77:
        groups[0].check()
        time.sleep(0.01)
    assert groups[0].done == {1: 77}


def test_files_are_dealt_by_bytes_and_always_alike() -> None:
    sizes = {"a": 5, "b": 9, "c": 5, "d": 1, "e": 7}
    assert ranks.deal(sizes, 2) == [["b", "c"], ["e", "a", "d"]]
    assert ranks.deal(sizes, 1) == [["b", "e", "a", "c", "d"]]
    assert ranks.deal({"a": 5}, 3) == [["a"], [], []]
    many = {str(n): n * n % 97 for n in range(200)}
    dealt = ranks.deal(many, 7)
    assert sorted(name for part in dealt for name in part) == sorted(many)
    loads = [sum(many[name] for name in part) for part in dealt]
    assert max(loads) - min(loads) <= 2


def test_a_folder_is_quiet_when_its_processes_left_or_died(tmp_path: Path) -> None:
    ranks.require_quiet(tmp_path)
    groups = meeting(tmp_path, 2)
    with pytest.raises(QuestionError) as caught:
        ranks.require_quiet(tmp_path)
    assert said(caught.value).startswith("M911 another run is using ")
    assert f"rank 0, process {os.getpid()}" in said(caught.value)
    groups[0].leave()
    with pytest.raises(QuestionError):
        ranks.require_quiet(tmp_path)
    groups[1].leave()
    ranks.require_quiet(tmp_path)


@pytest.mark.parametrize("beating", [True, False])
def test_processes_of_other_machines_are_listened_to(tmp_path: Path, beating: bool) -> None:
    groups = meeting(tmp_path, 2)
    roll = groups[0].home.path / "roll.json"
    found = json.loads(roll.read_text())
    found["members"]["1"]["machine"] = "another"
    roll.write_text(json.dumps(found))
    groups[0].leave()
    if beating:
        with pytest.raises(QuestionError, match="rank 1 on"):
            ranks.require_quiet(tmp_path)
    else:
        groups[1]._over.set()
        time.sleep(0.1)
        ranks.require_quiet(tmp_path)


def test_a_process_is_known_by_its_start_and_a_zombie_does_not_live() -> None:
    me = ranks.myself()
    assert ranks.is_alive(me)
    assert ranks.is_alive({**me, "started": "1"}) is False
    assert ranks.is_alive({**me, "machine": "another"}) is None
    assert ranks.is_alive({}) is None
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = ranks._started(child.pid)
    assert ranks.is_alive({**me, "pid": child.pid, "started": started})
    child.kill()
    # not waited for: it is a zombie
    while ranks._started(child.pid) is not None:
        time.sleep(0.01)
    assert ranks.is_alive({**me, "pid": child.pid, "started": started}) is False
    child.wait()
    assert child.stdin is not None
    child.stdin.close()
