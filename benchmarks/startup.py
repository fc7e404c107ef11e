"""What `plan` and `apply` of a checkpoint of some KB take of the processor, of this tree and of another one, in turns.

    git worktree add ../before a247dd8
    python benchmarks/startup.py ../before [--rounds 15]

User and system time of whole processes, which a busy machine disturbs less than the clock; both trees run in the same
interpreter with the same libraries. Bytecode is written by one run of each before the first that counts.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import process
import report

HERE = Path(__file__).resolve().parent
CHECKPOINT = HERE.parent / "tests" / "data" / "hf" / "mixtral__v4" / "hub"
GOAL = ["--to", "hf-mixtral@v5"]


def taken(tree: Path, arguments: list[str], out: Path) -> float:
    """Seconds of user and system time of `python -m migrate` from the tree."""
    shutil.rmtree(out, ignore_errors=True)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"} | {"PYTHONPATH": str(tree)}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "migrate", *arguments]
    subprocess.run(command, env=environment, cwd=out.parent, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="a tree of another commit")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    trees = (HERE.parent, args.before.resolve())
    print(f"{process.cpu_name()}, {args.rounds} rounds; median [least-most]")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        for name, arguments in (("plan", []), ("apply", ["-o", str(out)])):
            command = [name, str(CHECKPOINT), *arguments, *GOAL]
            for tree in trees:
                taken(tree, command, out)
            now, then = zip(*[[taken(tree, command, out) for tree in trees] for _ in range(args.rounds)], strict=True)
            ms = [f"{1000 * report.spread(seconds)[0]:.0f} ms" for seconds in (now, then)]
            print(f"{name}: {ms[0]} against {ms[1]}, ratio {report.shown(report.spread(report.ratios(now, then)))}")


if __name__ == "__main__":
    main()
