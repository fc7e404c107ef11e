"""What writes no checkpoint: commands that read headers or rules, and what they import; indexing;
one codec in memory.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import data
import process
import report
from tasks import (
    FEW_FILES,
    FILES_TIMES,
    HELP_CLICKS,
    INDEX_FASTER,
    INDEX_KEYS,
    KEYS_A_FILE,
    LINEAGE_TIMES,
    LINT_TIMES,
    MANY_FILES,
    PLAN_BIND,
    PLAN_CLICKS,
    PLAN_CPU,
    PLAN_KEYS,
    PLAN_LINEAR,
    PLAN_PEAK,
    PLAN_WHOLE,
    SPECS_TIMES,
    Limit,
    many_rules,
)

HERE = Path(__file__).resolve().parent
SHIPPED = HERE.parent / "rules"

# in the layouts.yaml of a lineage that is imported from transformers
FROM_CATALOGUE = "Made by `make catalogue`"
# runs the command line in this process and prints which heavy modules it left behind
IMPORTS = """
import sys
from migrate.cli.main import run
if run(sys.argv[1:]): sys.exit(1)
print("\\nIMPORTED", *sorted({"torch", "numpy"} & set(sys.modules)))
"""


# what the commands have to do at the least, done by the libraries alone
CLICK = "import click"
HEADER = """
import json, sys, time
started = time.perf_counter()
with open(sys.argv[1], "rb") as file:
    json.loads(file.read(int.from_bytes(file.read(8), "little")))
print(time.perf_counter() - started)
"""
YAML = """
import pathlib, sys, yaml
for path in pathlib.Path(sys.argv[1]).rglob("*.yaml"):
    yaml.load(path.read_text(encoding="utf-8"), yaml.SafeLoader)
"""


def against(
    what: str, argv: list[Any], yardstick: list[Any], bound: float, times: int = 5
) -> Limit:
    """The command's time as a multiple of the yardstick's, in turns: machines differ, and one
    machine from hour to hour.
    """
    for one in (argv, yardstick):
        process.run(one)
    rounds = [(process.run(argv).wall, process.run(yardstick).wall) for _ in range(times)]
    ratio = statistics.median(ours / theirs for ours, theirs in rounds)
    return Limit(
        what, ratio, bound, note=f" ({statistics.median(ours for ours, _ in rounds):.2f} s)"
    )


def imported(python: str, arguments: list[str], *unwanted: str) -> Limit:
    """How many of these modules, by default torch and numpy, the command imports; none is
    wanted.
    """
    out = process.run([python, "-c", IMPORTS, *arguments]).stdout
    heavy = unwanted or ("torch", "numpy")
    names = [name for name in out.rsplit("IMPORTED", 1)[1].split() if name in heavy]
    return Limit(
        f"{arguments[0]}: {', '.join(heavy)} imported",
        len(names),
        0,
        unit="",
        note=f" ({', '.join(names)})" if names else "",
    )


def help_and_plan(migrate: list[str], python: str, folder: Path, checkpoint: Path) -> list[Limit]:
    """`migrate --help`, and `migrate plan` of the benchmark's checkpoint."""
    plan = ["plan", str(checkpoint), "--to", "hf-mixtral@v5"]
    return [
        against(
            "--help, against a process that imports click",
            [*migrate, "--help"],
            [python, "-c", CLICK],
            HELP_CLICKS,
        ),
        imported(python, ["--help"]),
        against(
            "plan, against a process that imports click",
            [*migrate, *plan],
            [python, "-c", CLICK],
            PLAN_CLICKS,
        ),
        imported(python, plan),
    ]


def many_keys(migrate: list[str], python: str, folder: Path, checkpoint: Path) -> list[Limit]:
    """`migrate plan` of 100,000 and of 1,000,000 keys under 200 rules."""
    rules = folder / "many.yaml"
    rules.write_text(many_rules(200))
    few, many = PLAN_KEYS, 10 * PLAN_KEYS
    paths = {few: folder / f"keys-{few}.safetensors", many: folder / f"keys-{many}"}
    for keys, path in paths.items():
        if not path.exists():
            data.make_headers(path, keys)
    whole: dict[int, list[float]] = {few: [], many: []}
    bind: dict[int, list[float]] = {few: [], many: []}
    spent: dict[int, list[float]] = {few: [], many: []}
    parse, parsing, peaks = list[float](), list[float](), list[float]()
    # side by side, because a machine's speed changes within minutes
    for _ in range(5):
        for keys, path in paths.items():
            taken = process.run([*migrate, "plan", path, "--rules", rules])
            whole[keys].append(taken.wall)
            spent[keys].append(taken.cpu)
            if keys == many:
                peaks.append(taken.private)
            timed = json.loads(process.run([python, HERE / "bind_time.py", path, rules]).stdout)
            bind[keys].append(timed["seconds"])
            if timed["keys"] != keys:
                raise process.RunError(f"bind_time.py saw {timed['keys']} keys, not {keys}")
        parsed = process.run([python, "-c", HEADER, paths[few]])
        parse.append(float(parsed.stdout))
        parsing.append(parsed.wall)
    header, said = (
        "plan of 100,000 keys, 200 rules, against json over the same header",
        [statistics.median(t[few]) for t in (bind, whole)],
    )
    return [
        Limit(
            f"{header}: binding",
            statistics.median(report.ratios(bind[few], parse)),
            PLAN_BIND,
            note=f" ({said[0]:.2f} s)",
        ),
        Limit(
            f"{header}: whole processes",
            statistics.median(report.ratios(whole[few], parsing)),
            PLAN_WHOLE,
            note=f" ({said[1]:.2f} s)",
        ),
        Limit(
            "1,000,000 keys: binding against 100,000",
            statistics.median(report.ratios(bind[many], bind[few])),
            PLAN_LINEAR,
        ),
        Limit(
            "1,000,000 keys: whole command against 100,000",
            statistics.median(report.ratios(whole[many], whole[few])),
            PLAN_LINEAR,
        ),
        Limit(
            "1,000,000 keys: processor time of the whole command against 100,000",
            statistics.median(report.ratios(spent[many], spent[few])),
            PLAN_CPU,
            note=f" ({statistics.median(spent[many]):.1f} s)",
        ),
        Limit(
            "1,000,000 keys: peak private memory",
            statistics.median(peaks) / 1e9,
            PLAN_PEAK,
            unit=" GB",
        ),
    ]


def many_files(migrate: list[str], python: str, folder: Path, checkpoint: Path) -> list[Limit]:
    """`migrate plan` of the same keys in 10,000 files and in 5, by processor time."""
    rules = folder / "many.yaml"
    rules.write_text(many_rules(200))
    paths = {count: folder / f"files-{count}" for count in (FEW_FILES, MANY_FILES)}
    for count, path in paths.items():
        if not path.exists():
            data.make_headers(path, MANY_FILES * KEYS_A_FILE, count)
    taken: dict[int, list[float]] = {count: [] for count in paths}
    for _ in range(3):
        for count, path in paths.items():
            taken[count].append(process.run([*migrate, "plan", path, "--rules", rules]).cpu)
    ratio = statistics.median(report.ratios(taken[MANY_FILES], taken[FEW_FILES]))
    what = (
        f"plan of {MANY_FILES:,} files of {KEYS_A_FILE} keys: processor time against "
        f"{FEW_FILES} files"
    )
    return [
        Limit(what, ratio, FILES_TIMES, note=f" ({statistics.median(taken[MANY_FILES]):.1f} s)")
    ]


INDEXING = """
import sys, time
if sys.argv[1] == "torch":
    import torch
    index = lambda path: torch.load(path, weights_only=True, map_location="meta")
else:
    from migrate.formats import open as index
index(sys.argv[2])
started = time.perf_counter()
index(sys.argv[3])
print(time.perf_counter() - started)
"""
MANY_TENSORS = """
import sys, torch
count = int(sys.argv[1])
torch.save({f"model.layers.{i // 10}.mlp.experts.{i % 10}.weight": torch.zeros(2, 3) for i in range(count)}, sys.argv[2])
"""  # noqa: E501


def indexing(migrate: list[str], python: str, folder: Path, checkpoint: Path) -> list[Limit]:
    """A .pt of many tensors opened by us and by torch, each in a process of its own that has opened
    a small one before.
    """
    large, small = folder / "many.pt", folder / "few.pt"
    for path, count in ((large, INDEX_KEYS), (small, 10)):
        if not path.exists():
            process.run([python, "-c", MANY_TENSORS, str(count), path])
    seconds: dict[str, list[float]] = {"torch": [], "migrate": []}
    for _ in range(5):
        for who, taken in seconds.items():
            taken.append(float(process.run([python, "-c", INDEXING, who, small, large]).stdout))
    ratio = statistics.median(report.ratios(seconds["torch"], seconds["migrate"]))
    what = f"index of {INDEX_KEYS:,} tensors in a .pt: faster than torch.load to meta"
    return [
        Limit(
            what,
            ratio,
            INDEX_FASTER,
            at_least=True,
            note=f" ({statistics.median(seconds['migrate']):.2f} s)",
        )
    ]


def rules(migrate: list[str], python: str, folder: Path, checkpoint: Path) -> list[Limit]:
    """`migrate lint` and `migrate test --specs` of all shipped rules."""
    found = []
    reading = [python, "-c", YAML, SHIPPED]
    for arguments, times in (
        (["lint", str(SHIPPED)], LINT_TIMES),
        (["test", "--specs", str(SHIPPED)], SPECS_TIMES),
    ):
        what = (
            f"{' '.join(arguments[:-1])} of all shipped rules, against PyYAML reading them in "
            "Python"
        )
        found += [
            against(what, [*migrate, *arguments], reading, times),
            imported(python, arguments, "torch"),
            by_lineage([*migrate, *arguments[:-1]]),
        ]
    return found


def by_lineage(argv: list[Any], times: int = 5) -> Limit:
    """What a lineage more takes of the command's time, of all shipped ones against those that are
    written by hand, as the first fourteen were: the catalogue shall not be dearer than they are.
    """
    lineages = sorted(path.parent for path in SHIPPED.glob("*/layouts.yaml"))
    by_hand = [
        one for one in lineages if FROM_CATALOGUE not in (one / "layouts.yaml").read_text("utf-8")
    ]
    sets = (by_hand[:1], by_hand, lineages)
    rounds = [[process.run([*argv, *some]).cpu for some in sets] for _ in range(times + 1)][1:]
    each = [
        ((hand - one) / (len(by_hand) - 1), (every - one) / (len(lineages) - 1))
        for one, hand, every in rounds
    ]
    ours, theirs = (1000 * statistics.median(side) for side in zip(*each, strict=True))
    command = " ".join(argv[argv.index("migrate") + 1 :] if "migrate" in argv else argv[-2:])
    return Limit(
        f"{command}: processor time of a lineage, of {len(lineages)} against the {len(by_hand)} "
        "written by hand",
        statistics.median(every / hand for hand, every in each),
        LINEAGE_TIMES,
        note=f" ({theirs:.0f} ms against {ours:.0f} ms)",
    )


COMMANDS: dict[str, Callable[[list[str], str, Path, Path], list[Limit]]] = {
    "start": help_and_plan,
    "plan": many_keys,
    "files": many_files,
    "index": indexing,
    "rules": rules,
}
