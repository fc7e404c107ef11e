"""What writes rule files, locks, stamps and pages: against `cp` of the two checkpoints that are
compared, against building a class of transformers, and against `plan` of as many keys.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import compare
import data
import plans
import process
import report
from tasks import (
    DIFF_PRIVATE,
    DIFF_TIMES,
    FROM_TRANSFORMERS,
    NEW_HEADERS,
    PLAN_KEYS,
    PLAN_TIMES,
    Limit,
    many_rules,
)

if TYPE_CHECKING:
    from bench import Bench

HERE = Path(__file__).resolve().parent
MB = 1_000_000
# of the shipped lineages
LARGEST = "megatron-gpt"
# numbers as weights have them: the pieces that `data.py` repeats would be found everywhere
RANDOM = """
import os, sys
import numpy as np
dice = np.random.default_rng(7)
for path in sys.argv[1:]:
    with open(path, "r+b") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        left = (os.fstat(file.fileno()).st_size - start) // 2
        file.seek(start)
        while left:
            some = min(left, 1 << 22)
            numbers = dice.standard_normal(some, dtype="f4") * np.float32(0.02)
            file.write((numbers.view("u4") >> 16).astype("<u2").data)
            left -= some
"""
BUILD = """
import sys, torch, transformers
config = transformers.AutoConfig.from_pretrained(sys.argv[1])
with torch.device("meta"):
    getattr(transformers, config.architectures[0])(config)
"""
LAYOUTS = """\
lineage: bench
title: Many keys
layouts:
  old: {title: before, status: supported, detect: {present: ["model.layers.{n:int}.self_attn.o_proj.weight"]}}
  new: {title: after, status: current, detect: {present: ["model.layers.{n:int}.self_attn.out_proj.weight"]}}
"""  # noqa: E501


def from_diff(bench: Bench) -> list[Limit]:
    """`new --from-diff` of experts one by one and stacked, with gate and up joined."""
    old, new, copy = (bench.root / name for name in ("diff-old", "diff-new", "out"))
    if not new.exists():
        shutil.rmtree(old, ignore_errors=True)
        data.make(old, data.PRESETS[bench.args.size])
        process.run([sys.executable, "-c", RANDOM, *sorted(old.glob("*.safetensors"))])
        process.run([sys.executable, HERE / "baseline_stack.py", "pack", old, new])
    made = bench.root / "diff.yaml"
    ours = [*bench.migrate, "new", "-o", made, "--from-diff", old, new]
    total = 2 * sum(p.nbytes for p in compare.tensors(old).values())
    taken: dict[str, list[process.Taken]] = {"cp": [], "new": []}
    for number in range(bench.args.rounds + 1):
        for name in list(taken)[:: 1 if number % 2 == 0 else -1]:
            made.unlink(missing_ok=True)
            if name == "cp":
                copy.mkdir()
                run = bench.timed(["cp", "-r", old, new, copy], copy, total + 512 * MB)
            else:
                run = bench.timed(ours, None, 512 * MB)
                if "3 rules" not in run.stdout:
                    raise process.RunError(f"other rules than expected: {run.stdout}")
            # the first round finds files that are not in the page cache
            taken[name] += [run] * (number > 0)
    ratios = report.ratios(*([t.wall for t in taken[name]] for name in ("new", "cp")))
    spread = report.spread(ratios)
    seconds = {name: statistics.median(t.wall for t in runs) for name, runs in taken.items()}
    what = f"new --from-diff of two checkpoints of {total / 2e9:.1f} GB"
    return [
        Limit(
            f"{what}, against cp of both",
            spread[0],
            DIFF_TIMES,
            note=f" ({report.shown(spread)}; {seconds['new']:.2f} s against {seconds['cp']:.2f} s)",
        ),
        Limit(
            f"{what}: private memory",
            max(t.private for t in taken["new"]) / MB,
            DIFF_PRIVATE,
            unit=" MB",
        ),
    ]


def many_keys(migrate: list[str], python: str, folder: Path, checkpoint: Path) -> list[Limit]:
    """`new`, `seal`, `stamp` and a plan's page, against `plan` of 100,000 keys."""
    old, new = (
        folder / f"keys-{PLAN_KEYS}.safetensors",
        folder / f"keys-{PLAN_KEYS}-new.safetensors",
    )
    if not old.exists():
        data.make_headers(old, PLAN_KEYS)
    if not new.exists():
        _renamed(old, new)
    rules = folder / "many.yaml"
    rules.write_text(many_rules(200))
    sealed = folder / "sealed"
    shutil.rmtree(sealed, ignore_errors=True)
    shutil.copytree(plans.SHIPPED / LARGEST, sealed / LARGEST)
    lineage = folder / "bench-rules"
    (lineage / "bench").mkdir(parents=True, exist_ok=True)
    (lineage / "bench" / "layouts.yaml").write_text(LAYOUTS)
    stamped = folder / "stamped"
    stamped.mkdir(exist_ok=True)
    if not (stamped / "model.safetensors").exists():
        (stamped / "model.safetensors").hardlink_to(old)
    made, page = folder / "made.yaml", folder / "page.html"
    plan: list[Any] = ["plan", old, "--rules", rules]
    seal: list[Any] = ["seal", LARGEST, "--rules", sealed]
    written = [made, page, stamped / "migrate.history.json"]
    commands: list[tuple[str, list[Any], float]] = [
        ("new --headers", ["new", "-o", made, "--from-diff", old, new, "--headers"], NEW_HEADERS),
        ("new", ["new", "-o", made, "--index", old], PLAN_TIMES),
        ("seal of the largest lineage", [*seal, "--replace"], PLAN_TIMES),
        ("seal --check of it", [*seal, "--check"], PLAN_TIMES),
        ("stamp", ["stamp", stamped, "bench@old", "--rules", lineage], PLAN_TIMES),
        ("plan --html", [*plan, "--html", page], PLAN_TIMES),
    ]
    taken: dict[str, list[float]] = {name: [] for name, _, _ in commands}
    plans_taken: list[float] = []
    for _ in range(6):
        for name, arguments, _ in commands:
            for file in written:
                file.unlink(missing_ok=True)
            taken[name].append(process.run([*migrate, *arguments]).wall)
        # beside the commands that take about as long
        plans_taken.append(process.run([*migrate, *plan]).wall)
    found = []
    for name, arguments, times in commands:
        # the first round finds neither bytecode nor the files in the page cache
        ratios = report.spread(report.ratios(taken[name][1:], plans_taken[1:]))
        seconds = statistics.median(taken[name][1:])
        found.append(
            Limit(
                f"{name}, against plan of {PLAN_KEYS:,} keys",
                ratios[0],
                times,
                note=f" ({report.shown(ratios)}; {seconds:.2f} s)",
            )
        )
        for file in written:
            file.unlink(missing_ok=True)
        found.append(plans.imported(python, [str(a) for a in arguments], "torch"))
    return found


def from_transformers(bench: Bench) -> list[Limit]:
    """`new --from-transformers` of the checkpoint's class, against a process that builds it."""
    checkpoint, made = bench.root / "v4", bench.root / "imported.yaml"
    if not bench.has_transformers():
        return []
    build: list[Any] = [sys.executable, "-c", BUILD, checkpoint]
    ours: list[Any] = [*bench.migrate, "new", "-o", made, "--from-transformers", checkpoint]
    rounds = []
    for _ in range(bench.args.rounds + 1):
        made.unlink(missing_ok=True)
        rounds.append((process.run(ours).wall, process.run(build).wall))
    made.unlink(missing_ok=True)
    # the first round finds neither bytecode nor the files in the page cache
    ratios = report.spread([new / built for new, built in rounds[1:]])
    seconds = statistics.median(new for new, _ in rounds[1:])
    return [
        Limit(
            "new --from-transformers, against a process that builds the class on the meta device",
            ratios[0],
            FROM_TRANSFORMERS,
            note=f" ({report.shown(ratios)}; {seconds:.2f} s)",
        )
    ]


def _renamed(old: Path, new: Path) -> None:
    """The same tensors under other names; their data is a hole."""
    with old.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    words = {"self_attn": "attention", "mlp": "feed_forward", "model.layers": "blocks"}
    out = {}
    for key, said in header.items():
        for before, after in words.items():
            key = key.replace(before, after)
        out[key] = said
    text = json.dumps(out).encode()
    with new.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(
            8 + len(text) + max(s["data_offsets"][1] for s in out.values() if "data_offsets" in s)
        )


ROWS: dict[str, Callable[[Bench], list[Limit]]] = {
    "from-diff": from_diff,
    "from-transformers": from_transformers,
}
COMMANDS: dict[str, Callable[[list[str], str, Path, Path], list[Limit]]] = {"authoring": many_keys}
