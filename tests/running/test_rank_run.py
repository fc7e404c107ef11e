"""Files written by several processes, here by threads: the output is that of one."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from raw_files import RawSource, describe, random_raw, whole, write_source
from work import HANG

from migrate.core.errors import MigrateError, QuestionError, RunError
from migrate.core.types import Ranks
from migrate.planning.graph import Tensor, ValueCheck
from migrate.running import publish, rank_run, ranks
from migrate.running.error_statistics import Ledger, Tally
from migrate.running.resources import RunOptions
from migrate.running.tiles import RunResult, write_target
from migrate.source.target import Target

KEYS = [f"k{n}" for n in range(7)]
SIZE = 5 << 20


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("BEAT", 0.1), ("POLL", 0.01), ("PARTING", 2.0)):
        monkeypatch.setattr(ranks, name, seconds)


@dataclass
class Case:
    """A source of seven tensors of two tiles each, and a target of a file for each of them."""

    outputs: dict[str, Tensor]
    target: Target
    first: RawSource

    def source(self) -> RawSource:
        """The source, opened once more."""
        names = [blob.name for blob in self.first.blobs]
        return RawSource(Path(self.first.path), dict(self.first.index.tensors), names)


@pytest.fixture
def case(tmp_path: Path) -> Iterator[Case]:
    rng = np.random.default_rng(0)
    arrays = {key: ("uint8", random_raw(rng, "uint8", (SIZE,))) for key in KEYS}
    source = write_source(tmp_path / "in", arrays, files=2)
    outputs = {key: whole(key, "uint8", (SIZE,)) for key in KEYS}
    target = replace(describe(outputs, files=len(KEYS)), small={"note.json": b"{}"})
    yield Case(outputs, target, source)
    source.close()


def by(case: Case, world: int, out: Path, *, resume: bool = False, **more: Any) -> list[Any]:
    """What each of `world` processes returns or raises."""
    found: list[Any] = [None] * world
    options = RunOptions(threads=1, fsync=False, resume=resume)

    def run(rank: int) -> None:
        source = case.source()
        try:
            found[rank] = rank_run.write_by_ranks(
                case.outputs,
                source,
                case.target,
                out,
                digest="d",
                options=more.get("options", options),
                side_files=[("side.txt", b"side")],
                checks=more.get("checks", ()),
                ranks=Ranks(rank, world),
            )
        except BaseException as error:  # noqa: BLE001 - looked at by the test
            found[rank] = error
        finally:
            source.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG)
        assert not thread.is_alive()
    return found


def alone(case: Case, out: Path, *, resume: bool = False) -> RunResult:
    return write_target(
        case.outputs,
        case.first,
        case.target,
        out,
        digest="d",
        side_files=[("side.txt", b"side")],
        options=RunOptions(fsync=False, resume=resume),
    )


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}


def said(error: Any) -> str:
    assert isinstance(error, MigrateError), error
    return f"{error.diagnostics[0].code} {error.diagnostics[0].message}"


@pytest.mark.parametrize("world", [2, 3, 9])
def test_the_output_is_that_of_one_process(case: Case, tmp_path: Path, world: int) -> None:
    one = alone(case, tmp_path / "one")
    found = by(case, world, tmp_path / "several")
    assert all(isinstance(result, RunResult) for result in found), found
    assert bytes_of(tmp_path / "several") == bytes_of(tmp_path / "one")
    assert dict(found[0].files) == dict(one.files)
    assert (found[0].bytes_read, found[0].bytes_written) == (one.bytes_read, one.bytes_written)
    assert sum(result.bytes_written for result in found[1:]) < one.bytes_written
    assert found[0].idle == max(0, world - len(KEYS))
    assert not (tmp_path / "several.migrate-partial").exists()


class Full:
    """A disk that is full for one rank after some tiles."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rank: int, after: int) -> None:
        self.rank, self.left = rank, after
        self.claim = publish.Partial.claim
        monkeypatch.setattr(publish.Partial, "claim", self._claimer())

    def _claimer(self) -> Any:
        def claim(partial: publish.Partial, *arguments: Any) -> None:
            if partial._rank == self.rank:
                self.left -= 1
                if self.left < 0:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.claim(partial, *arguments)

        return claim


@pytest.mark.parametrize(
    ("before", "broken", "after"), [(2, 1, 3), (2, 0, 1), (3, 1, 1), (3, 2, 2), (1, 0, 2)]
)
def test_another_number_of_processes_resumes(
    case: Case,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    before: int,
    broken: int,
    after: int,
) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        Full(patch, broken if before > 1 else None, 3)
        if before > 1:
            found = by(case, before, out)
            assert said(found[broken]).startswith("M909 cannot write ")
            for rank in set(range(before)) - {broken}:
                assert said(found[rank]).startswith(f"M973 rank {broken} failed: cannot write ")
                assert "(M909)" in said(found[rank])
                assert any("kept in" in note for note in found[rank].diagnostics[0].notes)
        else:
            with pytest.raises(RunError, match="M909"):
                alone(case, out)
    assert not out.exists()
    journals = sorted((tmp_path / "out.migrate-partial").glob("journal*"))
    lines = [json.loads(line) for path in journals for line in path.read_text().splitlines()]
    claimed = {(one["file"], one["tile"]): one["length"] for one in lines if "tile" in one}
    assert len(claimed) >= 3
    assert [path.name for path in journals] == [
        *(f"journal-{n}.jsonl" for n in range(1, before)),
        "journal.jsonl",
    ]
    total = sum(file.size for file in case.target.files)
    if after > 1:
        results = by(case, after, out, resume=True)
        assert all(isinstance(result, RunResult) for result in results), results
        written = results[0].bytes_written
    else:
        written = alone(case, out, resume=True).bytes_written
    # what any of them claimed is not written again
    assert written == total - sum(claimed.values())
    alone(case, tmp_path / "one")
    assert bytes_of(out) == bytes_of(tmp_path / "one")
    assert not (tmp_path / "out.migrate-partial").exists()


def test_a_folder_of_an_earlier_run_is_refused_without_resume(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "APPEAR", 0.5)
    (tmp_path / "out.migrate-partial").mkdir()
    found = by(case, 2, tmp_path / "out")
    assert said(found[0]).startswith("M911 ")
    assert said(found[1]).startswith("M972 rank 0 did not appear in ")
    assert list((tmp_path / "out.migrate-partial").iterdir()) == []


def test_value_checks_run_once_and_fail_all(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from migrate.running import tiles

    calls = []
    monkeypatch.setattr(tiles, "require_checks", lambda *found: calls.append(found[0]))
    check = ValueCheck("equal", (case.outputs["k0"],), None, "M402", "m", "r", ("k0",))
    assert all(isinstance(one, RunResult) for one in by(case, 3, tmp_path / "a", checks=[check]))
    assert calls == [[check]]

    def refuse(*_: Any) -> None:
        raise RunError([ranks.Diagnostic("M919", "too much")])

    monkeypatch.setattr(tiles, "require_checks", refuse)
    found = by(case, 3, tmp_path / "b", checks=[check])
    assert said(found[0]) == "M919 too much"
    assert [said(one) for one in found[1:]] == ["M973 rank 0 failed: too much (M919)"] * 2
    assert not (tmp_path / "b").exists()
    assert (tmp_path / "b.migrate-partial").is_dir()


def test_a_disk_that_is_full_before_the_first_byte_fails_all_and_holds_no_space(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(publish, "_allocate", refuse)
    found = by(case, 2, tmp_path / "out")
    assert said(found[0]).startswith("M909 cannot allocate ")
    assert said(found[1]).startswith("M973 rank 0 failed: cannot allocate ")
    assert list((tmp_path / "out.migrate-partial" / "data").iterdir()) == []


def test_progress_is_that_of_all_and_ends_at_the_total(case: Case, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    options = RunOptions(threads=1, fsync=False, progress=lambda *now: seen.append(now))
    found = by(case, 2, tmp_path / "out", options=options)
    assert all(isinstance(one, RunResult) for one in found), found
    total = sum(file.size for file in case.target.files)
    assert {whole for _, whole in seen} == {total}
    assert max(now for now, _ in seen) <= total


def test_a_source_in_memory_cannot_be_shared(case: Case, tmp_path: Path) -> None:
    case.first.blobs[0].identity = None
    with pytest.raises(QuestionError, match="in memory"):
        rank_run.write_by_ranks(
            case.outputs,
            case.first,
            case.target,
            tmp_path / "out",
            digest="d",
            options=RunOptions(),
            ranks=Ranks(0, 2),
        )


def test_what_was_measured_elsewhere_counts_once() -> None:
    class Value:
        spec = whole("k", "float32", (10,)).spec

    def tally(count: int, error: float) -> dict[str, Any]:
        from dataclasses import asdict

        return asdict(Tally(count=count, max_abs=error, error=error))

    ledger = Ledger({})
    for name in (1, 2):
        ledger._values[name] = (Value(), ["k"])  # type: ignore[assignment]
        ledger._names.append(name)
    ledger.add([(0, tally(4, 0.5)), (1, tally(10, 1.0))])
    # the other part of the first, and the second again
    ledger.add([(0, tally(6, 0.25)), (1, tally(10, 1.0))])
    assert [(t.count, t.max_abs, t.error) for t in ledger._totals.values()] == [
        (10, 0.5, 0.75),
        (10, 1.0, 1.0),
    ]
    assert ledger.tallies() == [(0, {**tally(10, 0.5), "error": 0.75}), (1, tally(10, 1.0))]
