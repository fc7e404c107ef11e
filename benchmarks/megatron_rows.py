"""Runs of Megatron: to transformers, back to their grid and to another one, against `cp -r` of what
is written; the same job by megatron-core; the plan of many parts.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import memory
import process
import report
from distributed import against_cp, in_turn
from plans import imported
from tasks import (
    MEGATRON_CP,
    MEGATRON_CP_ZLIB,
    MEGATRON_FIELDS,
    MEGATRON_LINEAR,
    MEGATRON_MEMORY,
    MEGATRON_PLAN,
    MEGATRON_PLAN_PRIVATE,
    MEGATRON_PRIVATE,
    Limit,
)

if TYPE_CHECKING:
    from bench import Bench

HERE = Path(__file__).resolve().parent
PYTHON = sys.executable
# what `make .venv-megatron/.ready` makes
PEER = HERE.parent / ".venv-megatron" / "bin" / "python"
MB = 1_000_000
GRID = {"tp": 2, "pp": 2}
ONE = {"tp": 1}
# stages of the plans: each has four layers, and 64 parts of 8 tensor-parallel ranks and as many
# expert groups
STAGES = (2, 16)
WIDE = {
    "layers": 64,
    "hidden": 8,
    "ffn": 16,
    "heads": 8,
    "groups": 8,
    "vocab": 1024,
    "experts": 128,
}
TO_HF = ("--to", "megatron-gpt@llama", "--output-format", "safetensors", "--allow", "drop")


def _run(bench: Bench, size: str, grid: dict[str, int]) -> Path:
    """A run folder of a model of this size on this grid, made if it is not there."""
    name = "-".join(f"{axis}{count}" for axis, count in grid.items())
    folder = bench.root / f"megatron-{size}-{name}"
    if not (folder / "latest_checkpointed_iteration.txt").exists():
        shutil.rmtree(folder, ignore_errors=True)
        axes = [word for axis, count in grid.items() for word in (f"--{axis}", str(count))]
        process.run([PYTHON, HERE / "data_megatron.py", folder, size, *axes])
    memory.read_through(folder)
    return folder


def _made(folder: Path, argv: Callable[[Path, Path], Sequence[Any]], source: Path) -> Path:
    """What our command or another makes of a source, made if it is not there."""
    if not folder.exists():
        process.run(list(argv(source, folder)))
    memory.read_through(folder)
    return folder


def _equal(one: Path, other: Path) -> None:
    """RunError unless the weights of all parts are the same, bit for bit."""
    process.run([PYTHON, HERE / "megatron_same.py", one, other])


def runs(bench: Bench) -> list[Limit]:
    """TP 2 x PP 2 to transformers, back, and to TP 4."""
    sizes = (bench.args.size, "tiny")
    old, tiny = (_run(bench, size, GRID) for size in sizes)

    def to_hf(source: Path, out: Path) -> list[Any]:
        return [*bench.migrate, "apply", source, "-o", out, *TO_HF, "--no-fsync"]

    def back(source: Path, out: Path) -> list[Any]:
        return [*bench.migrate, "downgrade", source, "-o", out, "--no-fsync"]

    def to_tp4(source: Path, out: Path) -> list[Any]:
        to = ["--to", "megatron-gpt@mcore", "--set", "tp=4", "--allow", "drop"]
        return [*bench.migrate, "apply", source, "-o", out, *to, "--no-fsync"]

    found = _judged(bench, "TP 2 x PP 2 -> safetensors", to_hf, old, tiny)
    made = [bench.root / f"megatron-{size}-hf" for size in sizes]
    for folder, source in zip(made, (old, tiny), strict=True):
        # by the command that is measured, and by no earlier one
        shutil.rmtree(folder, ignore_errors=True)
        _made(folder, to_hf, source)
    for title, argv, sources, due in (
        ("safetensors -> TP 2 x PP 2", back, made, GRID),
        ("TP 2 x PP 2 -> TP 4 x PP 2", to_tp4, (old, tiny), {"tp": 4, "pp": 2}),
    ):
        shutil.rmtree(bench.root / "out", ignore_errors=True)
        process.run(argv(sources[1], bench.root / "out"))
        _equal(bench.root / "out", _run(bench, "tiny", due))
        found += _judged(bench, title, argv, *sources)
    return found


def _judged(
    bench: Bench,
    title: str,
    argv: Callable[[Path, Path], Sequence[Any]],
    source: Path,
    tiny: Path,
) -> list[Limit]:
    megabytes = sum(path.stat().st_size for path in source.rglob("*") if path.is_file()) / MB
    return against_cp(
        bench,
        f"Megatron {title}, {megabytes:,.0f} MB",
        lambda out: argv(source, out),
        lambda out: argv(tiny, out),
        MEGATRON_CP,
        MEGATRON_PRIVATE,
        zlib=MEGATRON_CP_ZLIB,
    )


def peer(bench: Bench) -> list[Limit]:
    """torch_dist to transformers, by megatron-core and by us."""
    if not PEER.exists():
        print("megatron-peer: left out, make .venv-megatron/.ready", file=sys.stderr)
        return []
    other = HERE / "megatron_peer.py"
    old, tiny = (
        _made(
            bench.root / f"megatron-{size}-dist",
            lambda source, out: [PEER, other, "save", source, out],
            _run(bench, size, ONE),
        )
        for size in (bench.args.size, "tiny")
    )
    ours = [*bench.migrate, "apply", old, *TO_HF, "--no-fsync", "-o"]
    theirs = [PEER, other, "convert", old]
    out = bench.root / "out"
    for argv, there in ((ours, "kept"), (theirs, "out")):
        shutil.rmtree(bench.root / there, ignore_errors=True)
        process.run([*argv, bench.root / there])
    process.run([PYTHON, HERE / "megatron_same.py", bench.root / "kept", out])
    shutil.rmtree(bench.root / "kept")
    taken = in_turn(
        bench,
        {
            "ours": lambda out: [*ours, out],
            "theirs": lambda out: [*theirs, out],
            # what does not grow with the bytes, of which theirs is several seconds of imports
            "tiny": lambda out: [PEER, other, "convert", tiny, out],
        },
    )
    walls = {name: [t.wall for t in rounds] for name, rounds in taken.items()}
    spread = report.spread(report.ratios(walls["theirs"], walls["ours"]))
    start = statistics.median(walls["tiny"])
    less = statistics.median(walls["theirs"]) - start
    mine, held = (max(t.private for t in taken[who]) / MB for who in ("ours", "theirs"))
    note = f" ({report.shown(spread)}; theirs less its start-up of {start:.1f} s takes {less:.1f} s"
    note += f", ours with it {statistics.median(walls['ours']):.1f} s)"
    title = "Megatron torch_dist -> transformers"
    return [
        Limit(f"{title}: faster than megatron-core", spread[0], 1.0, at_least=True, note=note),
        Limit(
            f"{title}: private memory, of megatron-core's",
            mine / held,
            MEGATRON_MEMORY,
            note=f" ({mine:.0f} MB and {held:.0f} MB)",
        ),
    ]


def _wide(bench: Bench, stages: int, fields: int) -> Path:
    """A run of 64 parts a stage, as many keys and hardly a byte."""
    folder = bench.args.data / f"megatron-wide-{stages}-{fields}"
    if not (folder / "latest_checkpointed_iteration.txt").exists():
        shutil.rmtree(folder, ignore_errors=True)
        model = json.dumps({**WIDE, "layers": 4 * stages})
        axes = ["--tp", "8", "--pp", str(stages), "--ep", "8", "--fields", str(fields)]
        process.run([PYTHON, HERE / "data_megatron.py", folder, model, *axes])
    memory.read_through(folder)
    return folder


def plan(bench: Bench) -> list[Limit]:
    """The plan of TP 8 x PP 16 x EP 8, of an eighth of it, and with few arguments."""
    rest = ["--to", "megatron-gpt@qwen3-moe", "--output-format", "safetensors", "--allow", "drop"]
    few, many = STAGES
    folders = {
        "few": _wide(bench, few, 800),
        "many": _wide(bench, many, 800),
        "plain": _wide(bench, many, 0),
    }
    taken: dict[str, list[process.Taken]] = {name: [] for name in folders}
    for _ in range(3):
        for name, folder in folders.items():
            taken[name].append(process.run([*bench.migrate, "plan", folder, *rest]))
    seconds = {name: statistics.median(t.cpu for t in rounds) for name, rounds in taken.items()}
    private = max(t.private for t in taken["many"]) / MB
    parts = 64 * many
    title = f"Megatron, plan of {parts:,} parts"
    return [
        Limit(f"{title}: processor time", seconds["many"], MEGATRON_PLAN, unit=" s"),
        Limit(
            f"{title}: against an eighth of them",
            seconds["many"] / seconds["few"],
            MEGATRON_LINEAR,
            note=f" ({seconds['few']:.2f} s)",
        ),
        Limit(f"{title}: private memory", private, MEGATRON_PLAN_PRIVATE, unit=" MB"),
        Limit(
            f"{title}, args of 800 fields: against as few as there can be",
            seconds["many"] / seconds["plain"],
            MEGATRON_FIELDS,
            note=f" ({seconds['plain']:.2f} s)",
        ),
        imported(PYTHON, ["plan", str(folders["few"]), *rest], "torch"),
    ]


ROWS: dict[str, Callable[[Bench], list[Limit]]] = {
    "megatron-runs": runs,
    "megatron-peer": peer,
    "megatron-plan": plan,
}
