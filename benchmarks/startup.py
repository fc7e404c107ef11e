"""What commands on a checkpoint of some KB take of the processor, against an earlier commit, in
turns.

    git worktree add ../before a247dd8
    python benchmarks/startup.py "env PYTHONSAFEPATH=1 PYTHONPATH=../before python -m migrate"
    [--rounds 15]

User and system time of whole processes, which a busy machine disturbs less than the clock. Both
commands should run in one interpreter with the same libraries. Bytecode is written by one run of
each before the first that counts.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
import tempfile
from pathlib import Path

import process
import report
from tasks import BEFORE_TIMES, Limit

ROOT = Path(__file__).resolve().parents[1]
CHECKPOINT = ROOT / "tests" / "data" / "hf" / "mixtral__v4" / "hub"
# a file that every commit reads
RULES = ROOT / "benchmarks" / "rules" / "rename.yaml"
ROUNDS = 15


def limits(now: list[str], then: list[str], rounds: int = ROUNDS) -> list[Limit]:
    """A line for each command: processor time, as a share of the earlier command's."""
    out = []
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "out"
        goal = ["--to", "hf-mixtral@v5"]
        for name, arguments in {
            "--help": ["--help"],
            "lint": ["lint", RULES],
            "inspect": ["inspect", CHECKPOINT],
            "plan": ["plan", CHECKPOINT, *goal],
            "apply": ["apply", CHECKPOINT, *goal, "-o", target],
        }.items():

            def cpu(command: list[str], arguments: list[object] = arguments) -> float:
                shutil.rmtree(target, ignore_errors=True)
                # findings of lint are 1; early commits take rules from the folder they are called
                # in
                return process.run(
                    [*command, *map(str, arguments)], statuses=(0, 1), cwd=target.parent
                ).cpu

            for command in (now, then):
                cpu(command)
            taken = [
                (cpu(now), cpu(then)) if i % 2 else (cpu(then), cpu(now))[::-1]
                for i in range(rounds)
            ]
            ratio = report.spread(report.ratios(*zip(*taken, strict=True)))
            ms = " against ".join(
                f"{1000 * report.spread(seconds)[0]:.0f} ms" for seconds in zip(*taken, strict=True)
            )
            out.append(
                Limit(
                    f"start-up of {name}: processor time, of the command before",
                    ratio[0],
                    BEFORE_TIMES,
                    note=f" ({report.shown(ratio)}; {ms})",
                )
            )
    return out


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", help="the earlier command")
    parser.add_argument(
        "--migrate",
        default=f"env PYTHONSAFEPATH=1 PYTHONPATH={shlex.quote(str(ROOT))} "
        f"{shlex.quote(sys.executable)} -m migrate",
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    args = parser.parse_args()
    print(f"{process.cpu_name()}, {args.rounds} rounds; median [least-most]")
    for limit in limits(shlex.split(args.migrate), shlex.split(args.before), args.rounds):
        print(limit)


if __name__ == "__main__":
    main()
