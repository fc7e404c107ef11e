"""No command of ours, no function, and no part of our readers does what a hostile input wants, and
every one says why not.

All inputs go through one child process with the tripwire; each test looks at the answers for one of
them.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import opcodes as o
import pytest
from archives import archive, data_pkl, genuine_pickle, safetensors
from commandline import contents, done
from corpus import ATTACKS, BY_NAME, DOUBLED, READ, Attack
from hostile_archives import DECODED
from hostile_dcp import BEYOND_METADATA
from hostile_sharing import BODIES, sharing
from hostile_streams import STREAMS, Stream
from marks import thorough
from work import HANG

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# in yardsticks of some milliseconds, with a factor of ten to spare: for any one act on one file,
COST = 2000.0
# and where the file is sound, as dense as can be, and read through: some took minutes once
DENSE_COST = 7000.0
MEMORY = 300  # MB, for all of them in one process

# everything fits them, so that nothing but the attack can be the reason of a refusal
RULES = """\
id: demo/v2/x
title: A change
lineage: demo
edge: [v1, v2]
keep: ["{k...}"]
rules:
  - {name: r, from: x, to: y, optional: true}
"""


@dataclass
class Acts:
    """What to do with one input, and then what came of it."""

    canary: str
    folder: Path
    jobs: list[dict[str, Any]] = field(default_factory=list)
    answers: list[dict[str, Any]] = field(default_factory=list)

    def add(self, act: str, *arguments: Any) -> None:
        out = self.folder / "out"
        absent = [
            str(out),
            f"{out}.migrate-partial",
            str(self.folder / "out.safetensors"),
            str(self.folder / "out.safetensors.migrate-partial"),
        ]
        job = {
            "act": act,
            "arguments": list(arguments),
            "canary": self.canary,
            "allowed": str(self.folder),
            "absent": absent,
        }
        self.jobs.append(job)

    def command(self, *arguments: object) -> None:
        self.add("command", [str(a) for a in arguments])


def run(acts: dict[str, Acts], where: Path) -> None:
    """Does all of it in one child process."""
    jobs = [job for one in acts.values() for job in one.jobs]
    (where / "jobs.json").write_text(json.dumps(jobs))
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, HERE, HERE.parent))),
        "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE": "1",
    }
    # a module's first import would write beside it
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    command = [sys.executable, str(HERE / "tripwire.py"), "jobs.json", "answers.json"]
    done = subprocess.run(
        command,
        cwd=where,
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert not done.stdout, done.stdout[:2000]
    answers = iter(json.loads((where / "answers.json").read_text()))
    for one in acts.values():
        one.answers = [next(answers) for _ in one.jobs]


def refused(job: dict[str, Any], answer: dict[str, Any], exits: set[int]) -> None:
    """The act was refused with a diagnostic, and nothing else happened."""
    told = short(job, answer)
    assert answer["exit"] in exits, told
    harmless(job, answer)
    said = answer["err"] + answer["out"]
    assert re.search(r"error\[M\d{3}\]|\"M\d{3}\"", said), told
    printable(said, told)
    # of what is not ASCII only the mark of what was cut
    assert said.replace("…", "").isascii(), told


def harmless(job: dict[str, Any], answer: dict[str, Any], cost: float = COST) -> None:
    told = short(job, answer)
    assert not answer["seen"], told
    assert not answer["there"], told
    assert "Traceback" not in answer["err"], told
    two = job["act"] == "command" and job["arguments"][0][0] in ("verify", "diff")
    assert answer["cost"] < cost * (1 + two), told


def short(job: dict[str, Any], answer: dict[str, Any]) -> str:
    """What was asked and said, as much as can be read."""
    return f"{job['act']} {job['arguments']}: " + str(
        {name: said[:600] if isinstance(said, str) else said for name, said in answer.items()}
    )


def printable(said: str, told: str) -> None:
    """Nothing that drives a terminal, and no book."""
    assert all(c.isprintable() or c == "\n" for c in said), told
    assert len(said) < 20_000, told


# streams


@pytest.fixture(scope="module")
def machine_acts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Acts]:
    where = tmp_path_factory.mktemp("streams")
    acts = {}
    for stream in STREAMS:
        folder = where / stream.name
        folder.mkdir()
        acts[stream.name] = one = Acts(str(where / f"{stream.name}.canary"), folder)
        (folder / "x.pkl").write_bytes(stream.pickle(one.canary))
        for limits in ("EXTRA_STATE", "ARCHIVE", "METADATA"):
            one.add("stream", str(folder / "x.pkl"), limits)
    run(acts, where)
    return acts


@pytest.mark.parametrize("stream", STREAMS, ids=lambda s: s.name)
def test_the_machine_runs_nothing(machine_acts: dict[str, Acts], stream: Stream) -> None:
    acts = machine_acts[stream.name]
    for job, answer in zip(acts.jobs, acts.answers, strict=True):
        if answer["exit"] == 0:
            assert stream.machine != "refuse", answer
            harmless(job, answer)
        else:
            # .metadata holds no bytes, so that what is inert elsewhere may be beyond its limits
            assert stream.machine != "inert" or job["arguments"][1] == "METADATA", answer
            assert answer["code"] in ("M930", "M931", "M932"), answer
            refused(job, answer, {3})
        assert answer["memory"] < MEMORY, answer


def test_the_tripwire_trips(tmp_path: Path) -> None:
    """Read the usual way, the same streams are seen in every way that the tripwire has."""
    acts = {}
    for name in (
        "reduce-global",
        "os-system",
        "builtins-open",
        "subprocess",
        "import-alone",
        "timeit",
    ):
        (stream,) = (s for s in STREAMS if s.name == name)
        acts[name] = one = Acts(str(tmp_path / f"{name}.canary"), tmp_path / "nowhere")
        (tmp_path / name).write_bytes(stream.pickle(one.canary))
        one.add("unsafe", str(tmp_path / name))
    run(acts, tmp_path)
    seen = {name: " ".join(one.answers[0]["seen"]) for name, one in acts.items()}
    assert all("pickle.find_class" in told for told in seen.values()), seen
    assert "os.system" in seen["os-system"]
    assert "subprocess.Popen" in seen["subprocess"]
    assert "for writing" in seen["builtins-open"]
    assert "import attack_touches_on_import" in seen["import-alone"]
    assert "import timeit" in seen["timeit"]
    touched = {name for name, one in acts.items() if one.canary in one.answers[0]["there"]}
    assert touched == acts.keys() - {"import-alone"}


# files and folders


@pytest.fixture(scope="module", params=thorough(["in turn", "all"]))
def acts(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Acts]:
    """Every hostile input given to every command and function that reads one; by default to `apply`
    and to another, in turn.
    """
    where = tmp_path_factory.mktemp("attacks")
    good = where / "good.safetensors"
    good.write_bytes(safetensors({"x": b"abcd"}))
    other = where / "other.safetensors"
    other.write_bytes(safetensors({"a.0": b"abcd"}))
    rules = where / "rules.yaml"
    rules.write_text(RULES)
    done("apply", good, "-o", where / "made.safetensors", "--rules", rules, "-q")
    out: dict[str, Acts] = {}
    for attack in ATTACKS:
        folder = where / attack.name
        folder.mkdir()
        out[attack.name] = one = Acts(str(where / f"{attack.name}.canary"), folder)
        path = attack.build(folder, one.canary)
        ask_rules(one, path, other) if attack.kind == "rules" else ask(
            one, path, good, where / "made.safetensors", rules
        )
        if attack.carried:
            for name in ("dropped.safetensors", "dropped.pt"):
                one.command(
                    "apply",
                    path,
                    "-o",
                    folder / name,
                    "--rules",
                    rules,
                    "-q",
                    "--allow",
                    "opaque",
                    "--allow",
                    "drop",
                )
        if (
            attack.kind != "rules"
            and attack.name not in BEYOND_METADATA
            and attack.name.removeprefix("pt-") not in DECODED
        ):
            one.add("container", str(path))
        if request.param == "in turn":
            (first, *_) = (job for job in one.jobs if job["arguments"][0][0] == "apply")
            one.jobs = [first, one.jobs[len(out) % len(one.jobs)]]
    run(out, where)
    return out


def ask(one: Acts, path: Path, good: Path, made: Path, rules: Path) -> None:
    target = one.folder / "out"
    one.command("inspect", path)
    one.command("inspect", path, "--all", "--format", "json")
    one.command("history", path)
    one.command("plan", path, "--rules", rules)
    one.command("apply", path, "-o", target, "--rules", rules, "-q")
    one.command(
        "apply",
        path,
        "-o",
        f"{target}.safetensors",
        "--rules",
        rules,
        "-q",
        "--allow",
        "drop",
        "--allow",
        "lossy",
    )
    one.command("downgrade", path, "-o", target, "--rules", rules, "-q")
    one.command("verify", path, "--source", good, "--rules", rules, "-q")
    one.command("verify", made, "--source", path, "--rules", rules, "-q")
    one.command("diff", path, good, "-q")
    one.command("diff", good, path, "-q")
    one.command("lint", rules, "--index", path)
    one.add("api", "inspect", [str(path)], {})
    one.add("api", "plan", [str(path)], {"rules": [str(rules)]})
    one.add("api", "apply", [str(path), str(target)], {"rules": [str(rules)]})
    one.add("api", "verify", [str(made)], {"source": str(path), "rules": [str(rules)]})
    one.add("api", "diff", [str(path), str(good)], {})


def ask_rules(one: Acts, path: Path, good: Path) -> None:
    target = one.folder / "out"
    one.command("plan", good, "--rules", path)
    one.command("apply", good, "-o", target, "--rules", path, "-q")
    one.command("lint", path)
    one.command("test", path)
    one.add("api", "apply", [str(good), str(target)], {"rules": [str(path)]})


def may_answer(attack: Attack, job: dict[str, Any]) -> bool:
    """Whether the act makes nothing from the file, and may answer where a plan and a run must
    refuse.
    """
    verb = job["arguments"][0] if job["act"] == "api" else job["arguments"][0][0]
    looks = {"inspect", "history", "lint", "diff", "verify"} | ({"plan"} if attack.late else set())
    return attack.kind in READ and (attack.carried or attack.late) and verb in looks


@pytest.mark.parametrize("name", [a.name for a in ATTACKS])
def test_no_command_does_what_it_wants(acts: dict[str, Acts], name: str) -> None:
    attack, one = BY_NAME[name], acts[name]
    for job, answer in zip(one.jobs, one.answers, strict=True):
        if job["act"] == "container":
            refused(job, answer, {3})
        elif "opaque" in job["arguments"][0] and answer["exit"] == 0:
            harmless(job, answer)
            written = Path(job["arguments"][0][3]).read_bytes()
            assert not any(
                word in written for word in (b"mknod", b"posix", b"attack_", one.canary.encode())
            )
        elif answer["exit"] in (0, 1) and may_answer(attack, job):
            harmless(job, answer)
            printable(answer["out"] + answer["err"], short(job, answer))
        else:
            refused(job, answer, exits_of(attack, job))
        assert answer["memory"] < MEMORY, answer


def exits_of(attack: Attack, job: dict[str, Any]) -> set[int]:
    if attack.kind == "rules" and job["arguments"][0][0] in ("lint", "test"):
        return {1, 2}
    return {attack.expected}


# what is accepted and dense


@pytest.mark.parametrize(
    "unit",
    thorough([b"}NNN", b"]NNN", b"N\x85NN", b"}K\x01Ns"]),
    ids=["dicts", "lists", "tuples", "full dicts"],
)
def test_memory_grows_with_the_file_and_no_faster(tmp_path: Path, unit: bytes) -> None:
    """One container for each four bytes is what is still read; it takes less than 150 bytes for
    each byte.
    """
    size = 400_000
    body = o.EMPTY_LIST + (o.MARK + unit * 1000 + o.APPENDS) * (size // (1000 * len(unit)))
    one = Acts(str(tmp_path / "canary"), tmp_path / "nowhere")
    for name, held in (("small", o.value(1)), ("dense", body)):
        (tmp_path / f"{name}.pt").write_bytes(archive(data_pkl(genuine_pickle(held))))
        one.add("container", str(tmp_path / f"{name}.pt"))
    run({"both": one}, tmp_path)
    small, dense = one.answers
    assert (small["exit"], dense["exit"]) == (0, 0), dense
    assert (dense["memory"] - small["memory"]) * 1_000_000 < 150 * size, (small, dense)
    assert dense["cost"] < COST


@pytest.mark.parametrize("name", thorough([DOUBLED[0], *BODIES, *DOUBLED[1:]], default=2))
def test_a_value_of_few_bytes_and_many_places_costs_nothing(tmp_path: Path, name: str) -> None:
    """Sound files: what they hold may be written again as it is shared, or refused as too large, at
    once.
    """
    one = Acts(str(tmp_path / "canary"), tmp_path)
    path, rules = tmp_path / "m.pt", tmp_path / "rules.yaml"
    streams = {s.name: s for s in STREAMS}
    path.write_bytes(
        sharing(name)
        if name in BODIES
        else archive(data_pkl(genuine_pickle(streams[name].build(""))))
    )
    rules.write_text(RULES)
    one.command("inspect", path)
    one.command("inspect", path, "--format", "json")
    one.command("plan", path, "--rules", rules)
    one.command(
        "apply", path, "-o", tmp_path / "made.pt", "--rules", rules, "-q", "--allow", "opaque"
    )
    one.command(
        "apply",
        path,
        "-o",
        tmp_path / "folder",
        "--rules",
        rules,
        "-q",
        "--allow",
        "opaque",
        "--output-format",
        "safetensors",
    )
    one.command("apply", path, "-o", tmp_path / "made", "--rules", rules, "-q", "--allow", "drop")
    one.command("verify", tmp_path / "made.pt", "--source", path, "--rules", rules, "-q")
    one.command("diff", path, path, "-q")
    run({name: one}, tmp_path)
    for job, answer in zip(one.jobs, one.answers, strict=True):
        assert answer["exit"] in ((0, 1, 2, 3) if "pt" in READ else (2,)), (job, answer)
        harmless(job, answer, DENSE_COST)
        assert answer["memory"] < MEMORY, (job, answer)


# hostile bytes in tensors


def test_hostile_extra_state_is_carried_byte_for_byte_and_never_read(tmp_path: Path) -> None:
    """Every stream as the extra state of a module: bytes are bytes, and TE's own switch for unsafe
    pickles changes nothing.
    """
    one = Acts(str(tmp_path / "canary"), tmp_path)
    source, rules, made = tmp_path / "model.safetensors", tmp_path / "keep.yaml", tmp_path / "made"
    states = {f"layer.{n}._extra_state": s.pickle(one.canary) for n, s in enumerate(STREAMS)}
    source.write_bytes(safetensors({"x": b"abcd", **states}))
    rules.write_text(RULES)
    one.command("inspect", source)
    one.command("plan", source, "--rules", rules)
    one.command("apply", source, "-o", made, "--rules", rules, "-q")
    one.command("verify", made, "--source", source, "--rules", rules, "-q")
    one.command("diff", source, source, "-q")
    one.command("downgrade", made, "-o", tmp_path / "back", "--rules", rules, "-q")
    for job in one.jobs:
        job["absent"] = []
    run({"all": one}, tmp_path)
    for job, answer in zip(one.jobs, one.answers, strict=True):
        assert answer["exit"] == 0, answer
        assert not answer["seen"], (job, answer)
        assert not answer["there"], (job, answer)
    assert {key: raw for key, (_, _, raw) in contents(made).items() if key != "y"} == states
    assert {
        key: raw for key, (_, _, raw) in contents(tmp_path / "back").items() if key != "x"
    } == states
