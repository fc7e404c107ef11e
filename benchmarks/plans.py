"""The commands that read headers only: how long they take, and that they import neither torch nor numpy."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import data
import process
from tasks import HELP_SECONDS, PLAN_BIND, PLAN_KEYS, PLAN_LINEAR, PLAN_SECONDS, PLAN_WHOLE, Limit, many_rules

HERE = Path(__file__).resolve().parent

# runs the command line in this process and prints which heavy modules it left behind
IMPORTS = """
import sys
from migrate.cli.main import main
try:
    main()
except SystemExit as stop:
    if stop.code: raise
print("\\nIMPORTED", *sorted({"torch", "numpy"} & set(sys.modules)))
"""


def _median(argv: list[Any], times: int = 5) -> float:
    process.run(argv)
    return statistics.median(process.run(argv).wall for _ in range(times))


def _imported(python: str, arguments: list[str]) -> Limit:
    """How many of torch and numpy the command imports; none is wanted."""
    out = process.run([python, "-c", IMPORTS, *arguments]).stdout
    names = out.rsplit("IMPORTED", 1)[1].split()
    return Limit(f"{arguments[0]}: torch, numpy imported", len(names), 0, unit="", note=f" ({', '.join(names)})" if names else "")


def help_and_plan(migrate: list[str], python: str, folder: Path, checkpoint: Path) -> list[Limit]:
    """`migrate --help`, and `migrate plan` of the benchmark's checkpoint."""
    plan = ["plan", str(checkpoint), "--to", "hf-mixtral@v5"]
    return [
        Limit("--help", _median([*migrate, "--help"]), HELP_SECONDS, unit=" s"),
        _imported(python, ["--help"]),
        Limit("plan", _median([*migrate, *plan]), PLAN_SECONDS, unit=" s"),
        _imported(python, plan),
    ]


def many_keys(migrate: list[str], python: str, folder: Path, checkpoint: Path) -> list[Limit]:
    """`migrate plan` of 100,000 and of 1,000,000 keys under 200 rules."""
    rules = folder / "many.yaml"
    rules.write_text(many_rules(200))
    whole, bind = {}, {}
    for keys in (PLAN_KEYS, 10 * PLAN_KEYS):
        path = folder / (f"keys-{keys}.safetensors" if keys == PLAN_KEYS else f"keys-{keys}")
        if not path.exists():
            data.make_headers(path, keys)
        times = 5 if keys == PLAN_KEYS else 3
        whole[keys] = _median([*migrate, "plan", path, "--rules", rules], times)
        runs = [json.loads(process.run([python, HERE / "bind_time.py", path, rules]).stdout) for _ in range(times)]
        bind[keys] = statistics.median(r["seconds"] for r in runs)
        if runs[0]["keys"] != keys:
            raise process.RunError(f"bind_time.py saw {runs[0]['keys']} keys, not {keys}")
    return [
        Limit("plan of 100,000 keys, 200 rules: binding and lowering", bind[PLAN_KEYS], PLAN_BIND, unit=" s"),
        Limit("plan of 100,000 keys, 200 rules: whole command", whole[PLAN_KEYS], PLAN_WHOLE, unit=" s"),
        Limit("1,000,000 keys: binding against 100,000", bind[10 * PLAN_KEYS] / bind[PLAN_KEYS], PLAN_LINEAR),
        Limit("1,000,000 keys: whole command against 100,000", whole[10 * PLAN_KEYS] / whole[PLAN_KEYS], PLAN_LINEAR),
    ]


COMMANDS: dict[str, Callable[[list[str], str, Path, Path], list[Limit]]] = {"start": help_and_plan, "plan": many_keys}
