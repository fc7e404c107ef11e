"""`dcp.load` through the reader that migrates, on 4 ranks: against reading the same bytes with
`preadv`, against torch's reader, and against a copy that was migrated before.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import data
import memory
import process
import report
from tasks import (
    READER_BLOCKS,
    READER_MODEL,
    READER_PRIVATE,
    READER_STACK,
    READER_STACK_BYTES,
    READER_STOCK,
    Limit,
)

if TYPE_CHECKING:
    from bench import Bench

HERE = Path(__file__).resolve().parent
MB = 1_000_000
EXPERTS, COLUMNS = 64, 4096
UNSTACKED = """\
id: bench/unstacked
title: A parameter for each expert
lineage: bench-reader
edge: [old, new]
rules: [{name: experts, from: "stack", to: "experts.{e:int}", via: [{unbind: {into: e}}]}]
"""


class Loads(NamedTuple):
    """Seconds of each way by round, the most private memory above model and imports, bytes, and
    the seconds of the reader's first load in its processes.
    """

    seconds: dict[str, list[float]]
    private: int
    first: float

    def times(self, way: str) -> str:
        """What the ratio to another way is of."""
        ours, others = (statistics.median(self.seconds[name]) for name in ("reader", way))
        return f"{ours:.2f} s to {others:.2f}; first load of a process {self.first:.2f} s"

    def against(self, way: str, *, faster: bool = False) -> report.Spread:
        """The reader's seconds in those of another way, or `faster`, those of the other in its."""
        pair = (self.seconds["reader"], self.seconds[way])
        return report.spread(report.ratios(*(reversed(pair) if faster else pair)))


def _loads(what: str, rounds: int, *arguments: Any) -> Loads:
    argv = [sys.executable, HERE / "dcp_ranks.py", what, str(rounds), *map(str, arguments)]
    said = json.loads(process.run(argv).stdout.splitlines()[-1])
    return Loads(said["seconds"], said["private"], said["first"])


def _private(title: str, loads: Loads) -> Limit:
    name = f"{title}: private memory of a rank above model and imports"
    return Limit(name, loads.private / MB, READER_PRIVATE, unit=" MB")


def _stack(bench: Bench, name: str, nbytes: int) -> tuple[Path, int]:
    """One stack of experts in one chunk, as DCP, and its bytes; beside it the rules that take it
    apart.
    """
    folder, flat = bench.root / name, bench.root / f"{name}.safetensors"
    rows = max(4, nbytes // 2 // COLUMNS // EXPERTS // 4 * 4)
    shutil.rmtree(folder, ignore_errors=True)
    head, size = data.header({"stack": (EXPERTS, rows, COLUMNS)})
    with flat.open("wb") as file:
        file.write(head)
        for part in data.Noise(7).take(size):
            file.write(part)
    into = ["--output-format", "dcp", "--chunks", "1", "--no-fsync"]
    process.run([*bench.migrate, "apply", flat, "-o", folder, *into])
    flat.unlink()
    folder.with_suffix(".yaml").write_text(UNSTACKED)
    memory.read_through(folder)
    return folder, size


def stack(bench: Bench) -> list[Limit]:
    """64 experts out of one stack. Torch's reader reads all of the stack for each of them, so it is
    compared on a smaller one.
    """
    found = []
    folder, size = _stack(bench, "reader-stack", max(bench.total, READER_STACK_BYTES))
    loads = _loads("stack", bench.args.rounds, folder, "stack", "reader,preadv")
    shutil.rmtree(folder)
    title = f"{EXPERTS} experts out of a stack, 4 ranks, {size / MB:,.0f} MB"
    times = loads.against("preadv")
    note = f" ({report.shown(times)}; {loads.times('preadv')})"
    found.append(Limit(f"{title}: against preadv", times[0], READER_STACK, note=note))
    found.append(_private(title, loads))
    folder, size = _stack(bench, "reader-stack", READER_STACK_BYTES // 8)
    loads = _loads("stack", 1, folder, "stack", "reader,stock")
    shutil.rmtree(folder)
    times = loads.against("stock", faster=True)
    note = f" ({size / MB:,.0f} MB; it takes {loads.seconds['stock'][0]:.1f} s)"
    title = f"{EXPERTS} experts out of a stack: faster than torch's reader behind names"
    found.append(Limit(title, times[0], READER_STOCK, at_least=True, note=note))
    return found


def model(bench: Bench) -> list[Limit]:
    """A folder of Hugging Face into FSDP2, v4 -> v5, against stock torch and the migrated copy."""
    new = bench.root / "reader-v5"
    shutil.rmtree(new, ignore_errors=True)
    old, layout = bench.root / "v4", "hf-mixtral@v5"
    into = ["--output-format", "dcp", "--chunks", "4", "--no-fsync"]
    process.run([*bench.migrate, "apply", old, "-o", new, "--to", layout, *into])
    for folder in (old, new):
        memory.read_through(folder, anew=True)
    loads = _loads("model", bench.args.rounds, old, new, layout)
    shutil.rmtree(new)
    title = f"Hugging Face -> FSDP2 of 4 ranks, v4 -> v5, {bench.total / MB:,.0f} MB"
    times = loads.against("stock")
    note = f" ({report.shown(times)}; {loads.times('stock')})"
    what = f"{title}: against stock torch and a migrated copy"
    return [Limit(what, times[0], READER_MODEL, note=note), _private(title, loads)]


def blocks(bench: Bench) -> list[Limit]:
    """FP8 blocks dequantized by region into the shards, against `apply` less its start-up."""
    bench.require("fp8-lite")
    old, out, layout = bench.root / "fp8-lite", bench.root / "out", "deepseek-v3@bf16"
    rest = ["-o", out, "--to", layout, "--allow", "lossy", "--no-fsync"]
    memory.read_through(old)
    loads = _loads(
        "blocks", bench.args.rounds, old, layout, out, *bench.migrate, "apply", old, *rest
    )
    starts = []
    for _ in range(3):
        shutil.rmtree(out, ignore_errors=True)
        tiny = [*bench.migrate, "apply", bench.root / "tiny-fp8-lite", *rest]
        starts.append(process.run(tiny).wall)
    shutil.rmtree(out)
    start = min(starts)
    loads.seconds["apply"][:] = [taken - start for taken in loads.seconds["apply"]]
    times = loads.against("apply")
    nbytes = sum(path.stat().st_size for path in old.glob("*.safetensors"))
    title = f"FP8 blocks of {nbytes / MB:,.0f} MB into the shards of 4 ranks"
    note = f" ({report.shown(times)}; {loads.times('apply')}; start-up {start:.2f} s apart)"
    what = f"{title}: against apply, less start-up"
    return [Limit(what, times[0], READER_BLOCKS, note=note), _private(title, loads)]


ROWS: dict[str, Callable[[Bench], Sequence[Limit]]] = {
    "reader-stack": stack,
    "reader-model": model,
    "reader-blocks": blocks,
}
