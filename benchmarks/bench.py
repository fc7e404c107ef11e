"""The speed and memory table of migrate, as ratios taken in one run. `make bench`.

Whole processes, files in the page cache, each variant once a round, the order reversed every round,
no fsync on either side and one round with. Against `cp` of the output's bytes, a load_file / torch
/ save_file script, and transformers. See `memory.py` for why free memory is held between the runs,
`process.py` for what private memory means. Before a variant is timed its output is compared bit for
bit with the script's, so that no row can be fast and wrong.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import shutil
import signal
import statistics
import sys
import threading
from pathlib import Path
from typing import Any

import authoring
import compare
import data
import data_fp8
import distributed
import folders
import format_speed
import live
import megatron_rows
import memory
import plans
import process
import ray_rows
import reader
import report
import staging
import staging_behind
import startup
import stores_rows
import verifying
from tasks import BEFORE_MEMORY, BEFORE_TIMES, TASKS, Limit, Task

HERE = Path(__file__).resolve().parent
PYTHON = sys.executable
COMMANDS = {**plans.COMMANDS, **authoring.COMMANDS, **format_speed.COMMANDS, **live.COMMANDS}
ROWS = {
    **authoring.ROWS,
    **verifying.ROWS,
    **folders.ROWS,
    **distributed.ROWS,
    **megatron_rows.ROWS,
    **reader.ROWS,
    **staging.ROWS,
    **staging_behind.ROWS,
    **stores_rows.ROWS,
    **ray_rows.ROWS,
}
MB = 1_000_000


class Bench:
    """One run of the benchmark: its folder, its holder of memory, and what it measured."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.root: Path = args.data / args.size
        self.root.mkdir(parents=True, exist_ok=True)
        self.migrate = shlex.split(args.migrate)
        self.before = shlex.split(args.before)
        self.holder = memory.Holder(args.data / "hold")
        self.total = 0
        self._torch_import: float | None = None

    # -- data --------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Makes the checkpoints that are not there yet: the old layout, a tiny one for start-up,
        the new layout of both.
        """
        for name, preset in (("v4", self.args.size), ("tiny-v4", "tiny")):
            folder = self.root / name
            if not (folder / "config.json").exists():
                shutil.rmtree(folder, ignore_errors=True)
                say(f"making {folder}")
                data.make(folder, data.PRESETS[preset])
            new = self.root / name.replace("v4", "v5")
            if not new.exists():
                process.run([PYTHON, HERE / "baseline_stack.py", "pack", folder, new])
        self.total = sum(p.nbytes for p in compare.tensors(self.root / "v4").values())

    def require(self, source: str) -> None:
        """Makes the checkpoints that only some rows start from, large and tiny."""
        for tiny, preset in (("", self.args.size), ("tiny-", "tiny")):
            folder = self.root / f"{tiny}{source}"
            if source in ("v4", "v5") or folder.exists():
                continue
            say(f"making {folder}")
            if source == "pt":
                process.run(
                    [
                        PYTHON,
                        HERE / "baseline_stack.py",
                        "to-pt",
                        folder.with_name(f"{tiny}v4"),
                        folder,
                    ]
                )
            elif source.startswith("fp8"):
                data_fp8.make(folder, data_fp8.shape(preset, source.removeprefix("fp8")))
            elif source.startswith("bf16"):
                # by our own command, so that the stamp says what to go back to
                codes = source.replace("bf16", "fp8")
                self.require(codes)
                process.run(
                    [
                        *self.migrate,
                        "apply",
                        folder.with_name(tiny + codes),
                        "-o",
                        folder,
                        "--to",
                        "deepseek-v3@bf16",
                        "--allow",
                        "lossy",
                    ]
                )
            else:
                process.run(
                    [
                        PYTHON,
                        HERE / "baseline_stack.py",
                        "widen",
                        folder.with_name(f"{tiny}v4"),
                        folder,
                    ]
                )

    # -- runs --------------------------------------------------------------------------------------

    def timed(
        self, argv: list[Any], target: Path | None, need: int, delay: float = 0.0
    ) -> process.Taken:
        """One run on warm memory; whatever it wrote at `target` is removed and its memory taken
        back.

        `delay`: seconds after which the memory is made free. A hypervisor takes free pages back
        within two seconds, and a process that imports torch first would find them cold.
        """
        freeing = threading.Timer(delay, self.holder.drop, (need,))
        if not self.args.no_hold:
            self.holder.refill()
            freeing.run() if delay <= 0 else freeing.start()
        try:
            return process.run(argv)
        finally:
            if freeing.is_alive():
                freeing.join()
            if target is not None:
                shutil.rmtree(target, ignore_errors=True)

    def command(
        self, task: Task, source: Path, target: Path, fsync: bool, migrate: list[str] | None = None
    ) -> list[Any]:
        argv = [*(migrate or self.migrate), *task.arguments(source, target)]
        if not task.one_file:
            argv += ["--max-shard-size", str(int(self.total * task.grows) // task.files + 64 * MB)]
        return argv if fsync else [*argv, "--no-fsync"]

    def start_up(self, task: Task, target: Path) -> dict[str, list[Any]]:
        """The same command, and where it counts the script, on a tiny checkpoint: everything that
        does not grow with the bytes.
        """
        source = self.root / f"tiny-{task.source}"
        found = {"start-up": self.command(task, source, target, fsync=False)}
        return (
            {**found, "script's start-up": self.script(task, source, target)}
            if task.apart
            else found
        )

    def script(self, task: Task, source: Path, target: Path) -> list[Any]:
        return [
            PYTHON,
            HERE / "baseline_stack.py",
            "pack" if task.one_file else task.name.removesuffix(task.variant),
            source,
            target,
        ]

    def torch_import(self) -> float:
        """Seconds that importing torch takes, numpy and the interpreter apart."""
        if self._torch_import is None:
            with_torch, without = (
                statistics.median(
                    process.run([PYTHON, "-c", f"import {names}"]).wall for _ in range(5)
                )
                for names in ("numpy, torch", "numpy")
            )
            self._torch_import = with_torch - without
        return self._torch_import

    def row(self, task: Task) -> dict[str, Any]:
        """All variants of one task: seconds and private bytes of every round, and how they
        compare.
        """
        self.require(task.source)
        source, target, kept = self.root / task.source, self.root / "out", self.root / "kept"
        for folder in (target, kept):
            shutil.rmtree(folder, ignore_errors=True)
        script = self.script(task, source, target)
        self.check(task, source, target, kept, script)
        written = sum(f.stat().st_size for f in kept.iterdir())
        for folder in (kept, source):
            memory.read_through(folder, anew=True)

        need = int(written * 1.05) + 128 * MB
        variants: dict[str, tuple[list[Any], int]] = {
            "migrate": (self.command(task, source, target, fsync=False), need + 512 * MB),
            "cp": (["cp", "-r", kept, target], need),
            "script": (script, int(need + self.total * task.script_share)),
        }
        if self.before:
            variants["before"] = (
                self.command(task, source, target, fsync=False, migrate=self.before),
                need + 512 * MB,
            )
        if task.transformers_faster and self.has_transformers():
            variants["transformers"] = (
                [
                    PYTHON,
                    HERE / "baseline_transformers.py",
                    source,
                    target,
                    "--max-shard-size",
                    f"{self.total // 4000}KB",
                ],
                int(need + self.total * 1.3) + 512 * MB,
            )
        variants |= {name: (argv, 256 * MB) for name, argv in self.start_up(task, target).items()}
        rounds: dict[str, list[process.Taken]] = {name: [] for name in variants}
        for number in range(self.args.rounds):
            for name in list(variants)[:: 1 if number % 2 == 0 else -1]:
                if name == "transformers" and number >= self.args.transformers_rounds:
                    continue
                argv, wanted = variants[name]
                late = name in ("script", "transformers") or (
                    name in ("migrate", "before") and task.torch
                )
                rounds[name].append(
                    self.timed(argv, target, wanted, self.torch_import() - 0.2 if late else 0.0)
                )
                say(f"  {task.name} {name} {rounds[name][-1].wall:.2f} s")
            memory.read_through(source)
        synced: dict[str, float] = {}
        if self.args.fsync:
            shell = (
                f"cp -r {shlex.quote(str(kept))} {shlex.quote(str(target))} && sync "
                f"{shlex.quote(str(target))}/* {shlex.quote(str(target))}"
            )
            synced["cp"] = self.timed(["sh", "-c", shell], target, need).wall
            synced["migrate"] = self.timed(
                self.command(task, source, target, fsync=True), target, need + 512 * MB
            ).wall
            synced["script"] = self.timed([*script, "--fsync"], target, variants["script"][1]).wall
        shutil.rmtree(kept)
        return self.judge(task, written, rounds, synced)

    def check(self, task: Task, source: Path, target: Path, kept: Path, script: list[Any]) -> None:
        """Leaves our output in `kept`; exits when it is not what the script makes."""
        process.run(self.command(task, source, kept, fsync=False))
        process.run(script)
        found = compare.differences(kept, target)
        shutil.rmtree(target)
        if found:
            sys.exit("\n".join([f"{task.name}: the output differs from the script's", *found[:10]]))

    def has_transformers(self) -> bool:
        found = bool(process.versions(PYTHON, ["transformers"]))
        if not found:
            say("  transformers is not installed: its row is left out")
        return found

    # -- judgement ---------------------------------------------------------------------------------

    def judge(
        self,
        task: Task,
        written: int,
        rounds: dict[str, list[process.Taken]],
        synced: dict[str, float],
    ) -> dict[str, Any]:
        seconds = {name: [t.wall for t in taken] for name, taken in rounds.items()}
        start_up, scripts = (
            statistics.median(seconds.get(name, [0.0]))
            for name in ("start-up", "script's start-up")
        )
        # ratios of the same round, so that a slow minute of the machine hits both sides
        to_cp = report.spread(report.ratios(seconds["migrate"], seconds["cp"]))
        copying = report.spread(
            report.ratios([max(s - start_up, 0.0) for s in seconds["migrate"]], seconds["cp"])
        )
        faster = {
            name: report.spread(report.ratios(seconds[name], seconds["migrate"]))
            for name in ("script", "transformers")
            if name in seconds
        }
        if task.apart:
            pure = [
                [max(s - t, 0.001) for s in seconds[n]]
                for n, t in (("script", scripts), ("migrate", start_up))
            ]
            faster["script, both less start-up"] = report.spread(report.ratios(*pure))
        judged = "script, both less start-up" if task.apart else "script"
        big = self.total > 2_000 * MB
        private = {
            name: max(t.private for t in taken) / MB for name, taken in rounds.items() if taken
        }
        limits = []
        # start-up is printed apart: it does not grow with the bytes
        if task.cp:
            limits.append(Limit("less start-up, against cp", copying[0], task.cp[big]))
        if task.aim:
            limits.append(Limit("(aim) less start-up, against cp", copying[0], task.aim))
        if task.script_faster:
            limits.append(
                Limit(
                    f"faster than the {judged}",
                    faster[judged][0],
                    task.script_faster[big],
                    at_least=True,
                )
            )
        limits.append(Limit("private memory", private["migrate"], task.private_mb, unit=" MB"))
        if "before" in rounds:
            limits += against(rounds["migrate"], rounds["before"])
        if "transformers" in faster and task.transformers_faster:
            limits.append(
                Limit(
                    "faster than transformers",
                    faster["transformers"][0],
                    task.transformers_faster,
                    at_least=True,
                )
            )
        return {
            "task": task.name,
            "title": task.title,
            "written": written,
            "seconds": seconds,
            "cpu": {name: [t.cpu for t in taken] for name, taken in rounds.items()},
            "private_mb": private,
            "start_up": start_up,
            "script_start_up": scripts,
            "to_cp": to_cp,
            "copying_to_cp": copying,
            "faster": faster,
            "with_fsync": synced,
            "limits": [limit_json(x) for x in limits],
        }


def against(now: list[process.Taken], then: list[process.Taken]) -> list[Limit]:
    """How the command compares with an earlier one that ran in the same rounds."""
    out = []
    for what, values, bound in (
        ("time", "wall", BEFORE_TIMES),
        ("processor time", "cpu", BEFORE_TIMES),
        ("private memory", "private", BEFORE_MEMORY),
    ):
        found = report.spread(
            report.ratios(
                *([float(getattr(t, values)) or 1.0 for t in taken] for taken in (now, then))
            )
        )
        out.append(
            Limit(
                f"{what}, of the command before", found[0], bound, note=f" ({report.shown(found)})"
            )
        )
    return out


def limit_json(limit: Limit) -> dict[str, Any]:
    return {
        "what": limit.what,
        "value": limit.value,
        "bound": limit.bound,
        "met": limit.met,
        "text": str(limit),
    }


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=data.PRESETS, default="1.2GB")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds per row (5)")
    parser.add_argument(
        "--transformers-rounds",
        type=int,
        default=3,
        help="rounds in which transformers takes part (3)",
    )
    parser.add_argument(
        "--rows",
        default="",
        help="comma-separated names, or parts of names; also "
        f"{', '.join([*ROWS, *COMMANDS])}, and with --before start-up",
    )
    parser.add_argument(
        "--fsync",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="one more round in which all sides fsync",
    )
    parser.add_argument(
        "--no-hold", action="store_true", help="do not hold free memory (on bare metal)"
    )
    parser.add_argument(
        "--migrate",
        default=f"{shlex.quote(str(Path(sys.executable).parent / 'migrate'))}",
        help="the command to time",
    )
    parser.add_argument(
        "--before",
        default="",
        help="an earlier command to run in the same rounds: 'env PYTHONSAFEPATH=1 "
        "PYTHONPATH=../before python -m migrate'",
    )
    parser.add_argument(
        "--data",
        type=Path,
        default=HERE.parent / "bench-data",
        help="where checkpoints are made and kept",
    )
    parser.add_argument("--name", help="file name under benchmarks/results (the size)")
    args = parser.parse_args()
    args.data.mkdir(parents=True, exist_ok=True)
    wanted, names = (
        [w for w in args.rows.split(",") if w],
        {*COMMANDS, "start-up", *ROWS, *(t.name for t in TASKS)},
    )

    def chosen(name: str) -> bool:
        return not wanted or any(w == name if w in names else w in name for w in wanted)

    bench = Bench(args)
    result: dict[str, Any] = {
        "format_version": 1,
        "kind": "benchmark",
        "size": args.size,
        "rounds": args.rounds,
        "rows": [],
        "commands": [],
    }
    failed: list[str] = []
    result["failed"] = failed
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        result["machine"] = machine()
        bench.prepare()
        for task in [
            t
            for t in TASKS
            if chosen(t.name) and (not t.variant or args.size + t.variant in data_fp8.PRESETS)
        ]:
            say(task.title)
            try:
                result["rows"].append(bench.row(task))
            except process.RunError as error:
                failed.append(task.name)
                say(f"{task.name}: left out, {error}")
        for name, verified in ROWS.items():
            if not chosen(name):
                continue
            say(name)
            try:
                result["commands"] += [limit_json(x) for x in verified(bench)]
            except process.RunError as error:
                failed.append(name)
                say(f"{name}: left out, {error}")
        if bench.before and chosen("start-up"):
            say("start-up")
            result["commands"] += [
                limit_json(x) for x in startup.limits(bench.migrate, bench.before)
            ]
        for name, measure in COMMANDS.items():
            if not chosen(name):
                continue
            say(name)
            try:
                result["commands"] += [
                    limit_json(x)
                    for x in measure(bench.migrate, PYTHON, args.data, bench.root / "v4")
                ]
            except process.RunError as error:
                failed.append(name)
                say(f"{name}: left out, {error}")
    except KeyboardInterrupt:
        # what was measured so far is worth having
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        failed.append("what came after the interrupt")
    finally:
        bench.holder.close()
        for left in ("out", "kept"):
            shutil.rmtree(bench.root / left, ignore_errors=True)
    result["bytes"] = bench.total
    text = report.render(result)
    print(text)
    name = args.name or args.size
    (HERE / "results").mkdir(exist_ok=True)
    (HERE / "results" / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    (HERE / "results" / f"{name}.md").write_text(text + "\n")
    say(f"written to benchmarks/results/{name}.json and .md")
    sys.exit(1 if failed else 0)


def machine() -> dict[str, Any]:
    """What the ratios were taken on; no host name, no path."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": process.cpu_name(),
        "cores": os.cpu_count(),
        "memory_gib": round(pages / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        **process.versions(PYTHON, ["torch", "numpy", "safetensors", "transformers", "xxhash"]),
    }


if __name__ == "__main__":
    main()
