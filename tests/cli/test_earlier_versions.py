"""Plans and partial folders that earlier versions left: they go on, or are refused by name."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from commandline import ROOT, contents, done, run

from migrate.running import publish

EARLIER = ROOT / "tests" / "data" / "earlier_versions"
FIRST, SECOND = (f"model-0000{n}-of-00002.safetensors" for n in (1, 2))
# without sizes in the plan, and with another form of journal; with what there is today
OLD, BEFORE = "a247dd8", "5c24549"
WORDS = ("--max-shard-size", "150B", "--allow", "lossy", "--set", "n=2")


def left_by(version: str, tmp_path: Path) -> Path:
    """A folder as the version left it; the plan and the source say the same of where and when."""
    for name in ("in.safetensors", "rules.yaml", "modules.yaml"):
        shutil.copyfile(EARLIER / name, tmp_path / name)
    os.utime(tmp_path / "in.safetensors", ns=(1, 1_700_000_000_000_000_000))
    plan = (EARLIER / version / "plan.json").read_text().replace("HERE", str(tmp_path))
    (tmp_path / "plan.json").write_text(plan)
    shutil.copytree(EARLIER / version / "out.migrate-partial", tmp_path / "out.migrate-partial")
    return tmp_path


def direct(here: Path) -> dict[str, Any]:
    """What this version makes of the same source and rules without a saved plan."""
    rules = ("--rules", here / "rules.yaml")
    done("apply", here / "in.safetensors", "-o", here / "direct", *rules, *WORDS)
    return contents(here / "direct")


@pytest.mark.parametrize("copied", [False, True])
def test_a_plan_of_the_version_before_runs_and_its_digest_fits(
    tmp_path: Path, copied: bool
) -> None:
    here = left_by(BEFORE, tmp_path)
    source = here / "in.safetensors"
    if copied:
        source = source.rename(here / "copy.safetensors")
        os.utime(source)
    asked = ("apply", here / "plan.json", *(("--source", source) if copied else ()))
    published = done(*asked, "-o", here / "new", "--format", "json").json
    assert published["digest"] == json.loads((here / "plan.json").read_text())["digest"]
    assert (published["copy_of"] is not None) is copied
    source.rename(here / "in.safetensors")
    assert contents(here / "new") == direct(here)


def test_a_plan_of_the_version_before_is_what_planning_gives_today(tmp_path: Path) -> None:
    here = left_by(BEFORE, tmp_path)
    asked = ("in.safetensors", "--rules", "rules.yaml", "--folder", *WORDS)
    done("plan", *asked, "-o", "again.json", cwd=here)
    one, other = (json.loads((here / name).read_text()) for name in ("plan.json", "again.json"))
    for plan in (one, other):
        del plan["free"]
    assert one == other


def with_a_note(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    here = left_by(BEFORE, tmp_path)
    text = (EARLIER / BEFORE / "plan-with-a-note.json").read_text().replace("HERE", str(here))
    (here / "plan.json").write_text(text)
    return here / "plan.json", json.loads(text)


def test_a_plan_that_says_the_same_in_other_words_runs(tmp_path: Path) -> None:
    plan, saved = with_a_note(tmp_path)
    out = tmp_path / "out.safetensors"
    published = done("apply", plan, "-o", out, "--format", "json").json
    assert published["digest"] == saved["digest"]
    ((was,), (now,)) = (saved["notes"], published["notes"])
    assert was != now
    assert all("`modules` of demo" in note and note.endswith(": a") for note in (was, now))


@pytest.mark.parametrize(
    "notes",
    [
        [], ["looks good"], ["nothing says `heads` of demo, and the tensors tell: a"],
        ["nothing says `modules` of demo, and 2 tensors tell: a"], [7], None,
    ],
)  # fmt: skip
def test_a_plan_that_says_something_else_is_refused(tmp_path: Path, notes: object) -> None:
    plan, saved = with_a_note(tmp_path)
    plan.write_text(json.dumps({**saved, "notes": notes}))
    result = run("apply", plan, "-o", tmp_path / "out.safetensors", "--format", "json")
    assert (result.exit, result.codes) == (2, ["M903"])
    assert "`notes`" in result.json["diagnostics"][0]["message"]


def as_it_stood(here: Path) -> Path:
    """The partial folder, begun over the source that lies here: no file has the inode and the time
    of change of the one that the version read.
    """
    journal = here / "out.migrate-partial" / "journal.jsonl"
    head, *claims = journal.read_text().splitlines(keepends=True)
    found, begun = os.stat(here / "in.safetensors"), json.loads(head)
    (was,) = begun["source"].values()
    now = [found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]
    assert was[1:3] == now[1:3]
    begun["source"] = {"in.safetensors": now}
    journal.write_text(json.dumps(begun, separators=(",", ":")) + "\n" + "".join(claims))
    return journal.parent


def test_a_partial_folder_of_the_version_before_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = left_by(BEFORE, tmp_path)
    partial, written, claim = as_it_stood(here), [], publish.Partial.claim

    def recorded(self: Any, file: str, *arguments: Any) -> None:
        written.append(file)
        claim(self, file, *arguments)

    monkeypatch.setattr(publish.Partial, "claim", recorded)
    again = run("apply", here / "plan.json", "-o", here / "out", "--format", "json")
    assert (again.exit, again.codes) == (2, ["M911"])
    done("apply", here / "plan.json", "-o", here / "out", "--resume")
    # of the two files, the first stood
    assert written == [SECOND]
    assert not partial.exists()
    assert contents(here / "out") == direct(here)


def test_a_claim_of_the_version_before_is_not_trusted(tmp_path: Path) -> None:
    here = left_by(BEFORE, tmp_path)
    first = as_it_stood(here) / "data" / FIRST
    first.write_bytes(first.read_bytes()[:-1] + b"\1")
    done("apply", here / "plan.json", "-o", here / "out", "--resume")
    assert contents(here / "out") == direct(here)


def refused(here: Path) -> str:
    """The message of M918, after which all of the partial folder stands."""
    partial = here / "out.migrate-partial"
    before = {path: path.read_bytes() for path in partial.rglob("*") if path.is_file()}
    asked = ("apply", here / "in.safetensors", "--rules", here / "rules.yaml", *WORDS)
    result = run(*asked, "-o", here / "out", "--resume", "--format", "json")
    assert (result.exit, result.codes) == (2, ["M918"])
    assert before == {path: path.read_bytes() for path in partial.rglob("*") if path.is_file()}
    (found,) = result.json["diagnostics"]
    assert "remove that folder" in found["help"]
    assert not (here / "out").exists()
    return str(found["message"])


def test_a_partial_folder_of_the_version_before_over_another_source_is_refused_by_its_name(
    tmp_path: Path,
) -> None:
    here = left_by(BEFORE, tmp_path)
    said = refused(here)
    assert f"{here / 'out.migrate-partial'} was begun over another state of the source" in said
    assert "in.safetensors: another file has its name" in said


def test_what_a_version_without_identities_left_is_refused_by_its_name(tmp_path: Path) -> None:
    here = left_by(OLD, tmp_path)
    said = refused(here)
    assert f"{here / 'out.migrate-partial'} was begun by another version of migrate" in said
    assert "its journal has format version 2, this one's is 3" in said
    result = run("apply", here / "plan.json", "-o", here / "new", "--format", "json")
    assert (result.exit, result.codes) == (2, ["M903"])
    assert "the plan no longer fits: its digest is" in result.json["diagnostics"][0]["message"]
