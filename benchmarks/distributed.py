"""Distributed checkpoints: files of several ranks in and out, against `cp` of the output's bytes
and against torch's own converter; opening, renaming, several processes, and what chunks are for.
"""

from __future__ import annotations

import functools
import json
import re
import shutil
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import memory
import process
import report
from tasks import (
    DCP_CHUNKS,
    DCP_COLUMNS,
    DCP_COLUMNS_PRIVATE,
    DCP_CONVERT,
    DCP_FILES_BYTES,
    DCP_JOIN,
    DCP_LINEAR,
    DCP_NAMES,
    DCP_OPEN,
    DCP_PRIVATE,
    DCP_RANKS,
    DCP_RENAME,
    DCP_ROWS,
    DCP_ROWS_ZLIB,
    DCP_SHARED,
    DCP_STACK,
    Limit,
)

if TYPE_CHECKING:
    from bench import Bench

HERE = Path(__file__).resolve().parent
PYTHON = sys.executable
MB = 1_000_000
V5 = ["--to", "hf-mixtral@v5"]
IDENTITY = """\
id: bench/same
title: Names that change, one by one
lineage: bench-dcp
edge: [old, new]
rules: [{name: all, from: "{k...}.weight", to: "renamed.{k}.weight"}]
"""


def _saved(bench: Bench, name: str, ranks: int, dim: int, source: str = "v4") -> Path:
    """The old layout as stock torch saves it, each tensor cut along `dim` for so many ranks."""
    folder = bench.root / name
    if not (folder / ".metadata").exists():
        shutil.rmtree(folder, ignore_errors=True)
        process.run(
            [
                PYTHON, HERE / "dcp_torch.py", "save", str(ranks), str(dim),
                bench.root / source, folder,
            ]
        )  # fmt: skip
    memory.read_through(folder)
    return folder


def in_turn(
    bench: Bench,
    sides: dict[str, Callable[[Path], Sequence[Any]]],
    count: int | None = None,
    delays: Mapping[str, float] | None = None,
) -> dict[str, list[process.Taken]]:
    """Each side once a round, in turn, into a folder that is removed. `delays`: seconds after which
    a side has its memory made free.
    """
    found: dict[str, list[process.Taken]] = {name: [] for name in sides}
    out = bench.root / "out"
    if bench.args.no_hold:
        # a run takes over what the one before it freed, which is warm: the first pays for all
        shutil.rmtree(out, ignore_errors=True)
        bench.timed(list(next(iter(sides.values()))(out)), None, 0)
    for number in range(count or bench.args.rounds):
        for name in list(sides)[:: 1 if number % 2 == 0 else -1]:
            shutil.rmtree(out, ignore_errors=True)
            if out.exists():
                out.unlink()
            argv, need = list(sides[name](out)), 2 * bench.total + 512 * MB
            found[name].append(bench.timed(argv, None, need, (delays or {}).get(name, 0.0)))
    shutil.rmtree(out, ignore_errors=True)
    return found


def _start_up(bench: Bench, argv: Callable[[Path], Sequence[Any]]) -> float:
    """The least processor time of the same command on a tiny checkpoint."""
    return min(t.wall for t in in_turn(bench, {"tiny": argv}, 3)["tiny"])


def against_cp(
    bench: Bench,
    title: str,
    argv: Callable[[Path], Sequence[Any]],
    tiny: Callable[[Path], Sequence[Any]],
    bound: float,
    private: float,
    convert: Sequence[Any] = (),
    zlib: float | None = None,
) -> list[Limit]:
    """A run against `cp -r` of what it writes; `convert` is torch's way to the same data, `zlib`
    the bound for a run that has no faster CRC-32.
    """
    kept = bench.root / "kept"
    shutil.rmtree(kept, ignore_errors=True)
    process.run(list(argv(kept)))
    memory.read_through(kept, anew=True)
    sides: dict[str, Callable[[Path], Sequence[Any]]] = {
        "migrate": argv,
        "cp": lambda out: ["cp", "-r", kept, out],
    }
    if zlib is not None:
        sides["zlib"] = lambda out: ["env", f"PYTHONPATH={HERE / 'without_isal'}", *argv(out)]
    if convert:
        sides["torch"] = lambda out: [*convert, out]
    start = _start_up(bench, tiny)
    # what begins to write only then would find some of its memory handed back before it ends
    delays = {name: start / 2 for name in sides if name != "cp"}
    rounds = in_turn(bench, sides, delays=delays)
    walls = {name: [t.wall for t in taken] for name, taken in rounds.items()}
    copying = report.spread(report.ratios([w - start for w in walls["migrate"]], walls["cp"]))
    most = max(t.private for t in rounds["migrate"]) / MB
    least = min(t.private for t in in_turn(bench, {"tiny": tiny}, 1)["tiny"]) / MB
    note = f" ({report.shown(copying)}; start-up {start:.2f} s apart)"
    found = [
        Limit(f"{title}: less start-up, against cp -r", copying[0], bound, note=note),
        Limit(f"{title}: private memory beyond start-up", most - least, private, unit=" MB"),
    ]
    if zlib is not None:
        slower = report.spread(report.ratios([w - start for w in walls["zlib"]], walls["cp"]))
        found.append(
            Limit(
                f"{title}: less start-up, with CRC-32 by zlib",
                slower[0],
                zlib,
                note=f" ({report.shown(slower)})",
            )
        )
    if convert:
        faster = report.spread(report.ratios(walls["torch"], walls["migrate"]))
        held = max(t.private for t in rounds["torch"]) / MB
        found.append(
            Limit(
                f"{title}: faster than dcp_to_torch_save",
                faster[0],
                DCP_CONVERT,
                at_least=True,
                note=f" ({report.shown(faster)}; it takes {held:.0f} MB)",
            )
        )
    shutil.rmtree(kept)
    return found


def rows(bench: Bench) -> list[Limit]:
    """Chunks of rows of two ranks to safetensors, experts stacked; and back out as DCP."""
    old, tiny = _saved(bench, "dcp-2", 2, 0), _saved(bench, "tiny-dcp-2", 2, 0, "tiny-v4")
    plain = [
        "--output-format",
        "safetensors",
        "--no-fsync",
        "--set",
        f"num_experts={_experts(bench)}",
    ]
    small = ["--output-format", "safetensors", "--no-fsync", "--set", "num_experts=4"]
    into = ["--output-format", "dcp", "--no-fsync"]
    return [
        *against_cp(
            bench,
            "DCP of 2 ranks -> safetensors, v4 -> v5",
            lambda out: [*bench.migrate, "apply", old, "-o", out, *V5, *plain],
            lambda out: [*bench.migrate, "apply", tiny, "-o", out, *V5, *small],
            DCP_ROWS,
            DCP_PRIVATE,
            [PYTHON, HERE / "dcp_torch.py", "convert", old],
            DCP_ROWS_ZLIB,
        ),
        *against_cp(
            bench,
            "safetensors -> DCP, v4 -> v5",
            lambda out: [*bench.migrate, "apply", bench.root / "v4", "-o", out, *V5, *into],
            lambda out: [*bench.migrate, "apply", bench.root / "tiny-v4", "-o", out, *V5, *into],
            DCP_ROWS,
            DCP_PRIVATE,
            zlib=DCP_ROWS_ZLIB,
        ),
    ]


def columns(bench: Bench) -> list[Limit]:
    """The same with every matrix cut along its columns, for 8 ranks: short runs."""
    old, tiny = _saved(bench, "dcp-8c", 8, 1), _saved(bench, "tiny-dcp-8c", 8, 1, "tiny-v4")
    plain = ["--output-format", "safetensors", "--no-fsync"]
    return against_cp(
        bench,
        "DCP, Shard(1) of 8 ranks -> safetensors, v4 -> v5",
        lambda out: [
            *bench.migrate, "apply", old, "-o", out, *V5, *plain,
            "--set", f"num_experts={_experts(bench)}",
        ],
        lambda out: [
            *bench.migrate, "apply", tiny, "-o", out, *V5, *plain, "--set", "num_experts=4",
        ],
        DCP_COLUMNS,
        DCP_COLUMNS_PRIVATE,
    )  # fmt: skip


def _experts(bench: Bench) -> int:
    found: int = json.loads((bench.root / "v4" / "config.json").read_text())["num_local_experts"]
    return found


def _many(bench: Bench, count: int) -> Path:
    """A distributed checkpoint of so many chunks, two of each tensor."""
    folder, flat = bench.args.data / f"dcp-{count}", bench.args.data / f"dcp-{count}.safetensors"
    if not folder.exists():
        import data

        tensors = {f"layers.{n // 8}.k{n % 8}.weight": (2, 4) for n in range(count // 2)}
        head, nbytes = data.header(tensors)
        with flat.open("wb") as file:
            file.write(head)
            file.truncate(len(head) + nbytes)
        process.run(
            [*bench.migrate, "apply", flat, "-o", folder, "--output-format", "dcp", "--chunks", "2"]
        )
        flat.unlink()
    memory.read_through(folder)
    return folder


def opening(bench: Bench) -> list[Limit]:
    """Opened and planned: many chunks, and a tenth of them. Names alone changed, too."""
    rule = bench.root / "same.yaml"
    rule.write_text(IDENTITY)
    folders = {count: _many(bench, count) for count in (DCP_CHUNKS, DCP_CHUNKS // 10)}
    seconds = {}
    for count, folder in folders.items():
        argv = [*bench.migrate, "plan", folder, "--rules", rule, "--rewrite"]
        seconds[count] = statistics.median(process.run(argv).cpu for _ in range(3))
    tenth = seconds[DCP_CHUNKS // 10]
    return [
        Limit(f"plan of {DCP_CHUNKS:,} chunks", seconds[DCP_CHUNKS], DCP_OPEN, unit=" s"),
        Limit(
            f"plan of {DCP_CHUNKS:,} chunks, against a tenth",
            seconds[DCP_CHUNKS] / tenth,
            DCP_LINEAR,
            note=f" ({tenth:.2f} s)",
        ),
        _names(bench, folders[DCP_CHUNKS], rule),
    ]


def _names(bench: Bench, folder: Path, rule: Path) -> Limit:
    """The processor time of `apply` where names alone change."""
    out = bench.root / "out"
    taken = []
    for _ in range(3):
        argv = [*bench.migrate, "apply", folder, "-o", out, "--rules", rule, "--no-fsync"]
        taken.append(process.run(argv).cpu)
        shutil.rmtree(out)
    return Limit(
        f"names of {DCP_CHUNKS:,} chunks changed: apply",
        statistics.median(taken),
        DCP_NAMES,
        unit=" s",
    )


class NoDiskError(Exception):
    """No file system can be made and mounted here."""


@contextmanager
def _disk(bench: Bench, nbytes: int) -> Iterator[Path]:
    """A file system that shares extents, in a file beside the checkpoints. NoDiskError."""
    image, mounted = bench.args.data / "disk.image", bench.args.data / "disk"
    try:
        with image.open("wb") as file:
            file.truncate(nbytes)
        mounted.mkdir(exist_ok=True)
        try:
            process.run(["mkfs.xfs", "-q", "-f", "-m", "reflink=1", image])
            process.run(["mount", "-o", "loop", image, mounted])
        except (FileNotFoundError, process.RunError) as error:
            raise NoDiskError(error) from error
        try:
            yield mounted
        finally:
            process.run(["umount", mounted])
    finally:
        image.unlink()


def sharing(bench: Bench) -> list[Limit]:
    """Names that change where the file system lets the data files share their extents."""
    try:
        with _disk(bench, 4 * DCP_FILES_BYTES) as disk:
            return _shared(bench, disk)
    except NoDiskError as error:
        print(f"dcp-shared: left out, no XFS can be mounted: {error}", file=sys.stderr)
        return []


def _of_eight_files(bench: Bench, root: Path, name: str) -> Path:
    """A checkpoint of 64 tensors in 8 files, each tensor in all of them: "whole", of
    `DCP_FILES_BYTES`, or "tiny".
    """
    import data

    folder, flat = root / name, root / f"{name}.safetensors"
    shape = (8, 8) if name == "tiny" else (DCP_FILES_BYTES // 2 // 4096 // 64, 4096)
    if not folder.exists():
        head, nbytes = data.header({f"layers.{n}.weight": shape for n in range(64)})
        with flat.open("wb") as file:
            file.write(head)
            for part in data.Noise(7).take(nbytes):
                file.write(part)
        cut = ["--output-format", "dcp", "--chunks", "8"]
        process.run([*bench.migrate, "apply", flat, "-o", folder, *cut])
        flat.unlink()
    return folder


def _shared(bench: Bench, disk: Path) -> list[Limit]:
    seconds = {}
    rule, out = disk / "same.yaml", disk / "out"
    rule.write_text(IDENTITY)
    for name in ("tiny", "whole"):
        old, taken = _of_eight_files(bench, disk, name), []
        memory.read_through(old)
        for _ in range(2 * bench.args.rounds + 1):
            argv = [*bench.migrate, "apply", old, "-o", out, "--rules", rule, "--no-fsync"]
            taken.append(process.run(argv).wall)
            shutil.rmtree(out)
        seconds[name] = statistics.median(taken)
    return [
        Limit(
            f"DCP of 8 files, {DCP_FILES_BYTES / MB:.0f} MB, renamed on XFS: beside start-up",
            1000 * (seconds["whole"] - seconds["tiny"]),
            DCP_SHARED,
            unit=" ms",
            note=f" (start-up {seconds['tiny']:.2f} s apart)",
        )
    ]


def renaming(bench: Bench) -> list[Limit]:
    """Names that change over data files that are copied: few large chunks, and the many of a model
    whose every tensor lies in all files.
    """
    root = bench.root / "renamed"
    root.mkdir(exist_ok=True)
    few, none = (_of_eight_files(bench, root, name) for name in ("whole", "tiny"))
    many, small = (_in_eight(bench, name) for name in ("v4", "tiny-v4"))
    megabytes = sum(path.stat().st_size for path in many.iterdir()) / MB
    return [
        _renamed(bench, f"{DCP_FILES_BYTES / MB:.0f} MB", few, none),
        _renamed(bench, f"{megabytes:,.0f} MB, {_chunks(many):,} chunks", many, small),
    ]


def _in_eight(bench: Bench, source: str) -> Path:
    """The checkpoint as 8 ranks would have it."""
    folder = bench.root / f"{source.replace('v4', 'dcp-8')}"
    if not folder.exists():
        cut = ["--output-format", "dcp", "--chunks", "8"]
        process.run([*bench.migrate, "apply", bench.root / source, "-o", folder, *cut])
    return folder


def _chunks(folder: Path) -> int:
    """The archives in the data files: the name of its stream stands in each of them twice."""
    files = (path.read_bytes() for path in folder.glob("*.distcp"))
    return sum(content.count(b"archive/data.pkl") for content in files) // 2


def _renamed(bench: Bench, what: str, old: Path, tiny: Path) -> Limit:
    """A rename against `cp -r` of the same folder."""
    rule = bench.root / "same.yaml"
    rule.write_text(IDENTITY)
    # not in the pieces that a run of ours has written
    memory.read_through(old, anew=True)

    def argv(folder: Path) -> Callable[[Path], list[Any]]:
        return lambda out: [
            *bench.migrate, "apply", folder, "-o", out, "--rules", rule, "--no-fsync"
        ]  # fmt: skip

    rounds = in_turn(bench, {"migrate": argv(old), "cp": lambda out: ["cp", "-r", old, out]})
    start = _start_up(bench, argv(tiny))
    walls = {name: [t.wall for t in taken] for name, taken in rounds.items()}
    found = report.spread(report.ratios([w - start for w in walls["migrate"]], walls["cp"]))
    note = f" ({report.shown(found)}; start-up {start:.2f} s apart)"
    title = f"DCP of 8 files renamed, {what}: less start-up, against cp -r"
    return Limit(title, found[0], DCP_RENAME, note=note)


# starts the command after it as two ranks, as a launcher does, and takes no time of its own
TWO = """\
export MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 WORLD_SIZE=2 LOCAL_WORLD_SIZE=2
RANK=0 LOCAL_RANK=0 "$@" & first=$!
RANK=1 LOCAL_RANK=1 "$@" && wait $first"""


def ranks(bench: Bench) -> list[Limit]:
    """Two processes against one, a thread each: to a distributed checkpoint, whose CRCs they
    compute, and to safetensors, where the kernel copies all bytes.
    """
    old, shard = bench.root / "v4", max(1, bench.total // 8)
    torchrun = [PYTHON, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python"]
    launched = statistics.median(process.run([*torchrun, "true"]).wall for _ in range(3))
    found = []
    for title, rest in (
        ("DCP of 8 files", ["--output-format", "dcp", "--chunks", "8"]),
        ("safetensors of 8 files", ["--max-shard-size", str(shard)]),
    ):
        run = [*bench.migrate, "apply", old, *V5, *rest, "--no-fsync", "--threads", "1", "-o"]
        rounds = in_turn(
            bench,
            {
                "one": functools.partial(_appended, run),
                "two": functools.partial(_appended, ["sh", "-c", TWO, "ranks", *run]),
            },
        )
        walls = {name: [t.wall for t in taken] for name, taken in rounds.items()}
        spread = report.spread(report.ratios(walls["two"], walls["one"]))
        note = f" ({report.shown(spread)}; torchrun takes {launched:.2f} s to start them)"
        what = f"{title}: two processes, against one with one thread"
        found.append(Limit(what, spread[0], DCP_RANKS, note=note))
    return found


def _appended(argv: Sequence[Any], out: Path) -> list[Any]:
    return [*argv, out]


def stack(bench: Bench) -> list[Limit]:
    """`dcp.load` on 4 ranks of one stack, written in chunks for them, against one chunk."""
    import data

    count, columns = 8 * max(1, bench.total // 8 // 2 // 4096 // 2), 4096
    flat = bench.root / "stack.safetensors"
    head, nbytes = data.header({"stack": (count, columns)})
    with flat.open("wb") as file:
        file.write(head)
        for part in data.Noise(7).take(nbytes):
            file.write(part)
    seconds = {}
    for name, cut in (("chunks", ["--chunks", "4"]), ("one", ["--chunks", "1"])):
        folder = bench.root / f"stack-{name}"
        shutil.rmtree(folder, ignore_errors=True)
        process.run([*bench.migrate, "apply", flat, "-o", folder, "--output-format", "dcp", *cut])
        memory.read_through(folder)
        said = process.run(
            [PYTHON, HERE / "dcp_torch.py", "load", "4", folder, "stack", str(count), str(columns)]
        ).stdout
        seconds[name] = float(re.findall(r"[\d.e-]+", said)[-1])
        shutil.rmtree(folder)
    flat.unlink()
    note = f" ({seconds['chunks']:.2f} s against {seconds['one']:.2f} s, {nbytes / MB:.0f} MB)"
    return [
        Limit(
            "dcp.load on 4 ranks: one chunk, against a chunk for each rank",
            seconds["one"] / seconds["chunks"],
            DCP_STACK,
            at_least=True,
            note=note,
        )
    ]


def joining(bench: Bench) -> list[Limit]:
    """MXFP8 weights of 8 ranks, each shard an object with its own padding, joined."""
    columns = 4096
    each = 2 * 8 * 1056 * columns
    counts = {"mxfp8-8": (max(2, bench.total // (2 * each)), columns), "tiny-mxfp8-8": (1, 128)}
    for name, made in counts.items():
        folder = bench.root / name
        if not (folder / ".metadata").exists():
            shutil.rmtree(folder, ignore_errors=True)
            process.run([PYTHON, HERE / "dcp_quantized.py", *map(str, made), folder])
        memory.read_through(folder)
    old, tiny = (bench.root / name for name in counts)
    found = []
    for target in ("safetensors", "dcp"):
        into = ["--output-format", target, "--no-fsync", *["--chunks", "1"] * (target == "dcp")]
        found += against_cp(
            bench,
            f"MXFP8 of 8 ranks -> {target}, {counts[old.name][0] * each / MB:,.0f} MB",
            lambda out, into=into: [*bench.migrate, "apply", old, "-o", out, *into],
            lambda out, into=into: [*bench.migrate, "apply", tiny, "-o", out, *into],
            DCP_JOIN,
            DCP_PRIVATE,
        )
    return found


ROWS: dict[str, Callable[[Bench], list[Limit]]] = {
    "dcp-rows": rows,
    "dcp-columns": columns,
    "dcp-open": opening,
    "dcp-rename": renaming,
    "dcp-shared": sharing,
    "dcp-ranks": ranks,
    "dcp-stack": stack,
    "dcp-join": joining,
}
