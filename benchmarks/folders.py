"""Folders of number formats: `apply` against the larger of `cp` of the output and the codec's own
time in memory with the same threads; and one tensor of 8 GB against one of 100 MB.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import memory
import process
import report
from tasks import FOLDER_PRIVATE, FOLDER_TIMES, LARGE_TENSOR, RULES, Limit

if TYPE_CHECKING:
    from bench import Bench

HERE = Path(__file__).resolve().parent
MB = 1_000_000
# of `apply`, and of the codec alone
THREADS = 2


class Folder(NamedTuple):
    """A folder to convert: what it starts from, the words of the command, and the codec's work."""

    title: str
    source: str
    words: tuple[str, ...]
    codec: str
    arguments: dict[str, Any]
    verb: str


_LOSSY = ("--allow", "lossy")
_DEEPSEEK = {"block": [128, 128], "like": "deepseek"}
FOLDERS = (
    Folder(
        "FP8 blocks -> bf16",
        "fp8-large",
        ("apply", "--to", "deepseek-v3@bf16", *_LOSSY),
        "fp8-block",
        _DEEPSEEK,
        "decode",
    ),
    Folder(
        "bf16 -> FP8 blocks",
        "bf16-large",
        ("downgrade", "--to", "deepseek-v3@fp8", *_LOSSY),
        "fp8-block",
        _DEEPSEEK,
        "encode",
    ),
    Folder(
        "bf16 -> FP8 tensors",
        "bf16-large",
        ("apply", "--rules", str(RULES / "fp8-tensor.yaml"), *_LOSSY),
        "fp8",
        {"granularity": "tensor"},
        "encode",
    ),
    Folder(
        "bf16 -> NVFP4",
        "bf16-large",
        ("apply", "--rules", str(RULES / "nvfp4.yaml"), *_LOSSY),
        "nvfp4",
        {},
        "encode",
    ),
)


def folders(bench: Bench) -> list[Limit]:
    """Each folder in rounds of `apply`, `cp` and the codec alone."""
    return [limit for folder in FOLDERS for limit in _measured(bench, folder)]


def _measured(bench: Bench, folder: Folder) -> list[Limit]:
    bench.require(folder.source)
    source, kept, target = bench.root / folder.source, bench.root / "kept", bench.root / "out"
    for left in (kept, target):
        shutil.rmtree(left, ignore_errors=True)

    def command(old: Path, new: Path) -> list[Any]:
        verb, *rest = folder.words
        return [*bench.migrate, verb, old, "-o", new, *rest, "--threads", THREADS, "--no-fsync"]

    process.run(_texts(command(source, kept)))
    for place in (source, kept):
        memory.read_through(place, anew=True)
    written = sum(f.stat().st_size for f in kept.iterdir())
    need = int(1.05 * written) + 512 * MB
    tiny = source.with_name(f"tiny-{folder.source}")
    alone = [
        sys.executable, HERE / "in_memory.py", source, folder.codec,
        json.dumps(folder.arguments), folder.verb, THREADS,
    ]  # fmt: skip
    taken: list[process.Taken] = []
    ratios, larger = [], []
    for _ in range(bench.args.rounds):
        taken.append(bench.timed(_texts(command(source, target)), target, need))
        cp = bench.timed(["cp", "-r", str(kept), str(target)], target, need).wall
        small = bench.timed(_texts(command(tiny, target)), target, 256 * MB).wall
        codec = float(process.run(_texts(alone)).stdout)
        ratios.append(max(taken[-1].wall - small, 0.0) / max(cp, codec))
        larger.append((cp, codec))
    shutil.rmtree(kept)
    found = report.spread(ratios)
    cp, codec = (statistics.median(times) for times in zip(*larger, strict=True))
    note = (
        f" ({report.shown(found)}; {written / 1e9:.2f} GB, {THREADS} threads: "
        f"cp {cp:.2f} s, in memory {codec:.2f} s)"
    )
    what = f"{folder.title}: less start-up, of the larger of cp and the codec in memory"
    private = max(t.private for t in taken) / MB
    return [
        Limit(what, found[0], FOLDER_TIMES, note=note),
        Limit(f"{folder.title}: private memory", private, FOLDER_PRIVATE, unit=" MB"),
    ]


def _texts(words: list[Any]) -> list[str]:
    return [str(word) for word in words]


# bytes of bfloat16 in the two tensors
SIZES = {"tiny": (100 * MB, 400 * MB), "demo": (100 * MB, 800 * MB)}
COLUMNS = 8192


def large_tensor(bench: Bench) -> list[Limit]:
    """Encoding one tensor with one scale for all, in a file with holes: its private memory."""
    limits = []
    for folder in FOLDERS[2:]:
        private = []
        for size in SIZES.get(bench.args.size, (100 * MB, 8_000 * MB)):
            source, target = bench.root / "one.safetensors", bench.root / "one-out.safetensors"
            _write(source, size // (2 * COLUMNS))
            try:
                words = [*bench.migrate, "apply", source, "-o", target, *folder.words[1:]]
                private.append(process.run(_texts([*words, "--no-fsync"])).private / MB)
            finally:
                for file in (source, target):
                    file.unlink(missing_ok=True)
        small, large = private
        note = f" ({small:.0f} MB and {large:.0f} MB)"
        what = f"{folder.title}: private memory of a tensor of 8 GB, of one of 100 MB"
        limits.append(Limit(what, large / small, LARGE_TENSOR, note=note))
    return limits


def _write(path: Path, rows: int) -> None:
    """A file of one bfloat16 matrix, whose zeros take no place on the disk."""
    entry = {"dtype": "BF16", "shape": [rows, COLUMNS], "data_offsets": [0, 2 * rows * COLUMNS]}
    text = json.dumps({"model.layers.0.mlp.down_proj.weight": entry}).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + 2 * rows * COLUMNS)


ROWS: dict[str, Callable[[Bench], list[Limit]]] = {
    "folders": folders,
    "large-tensor": large_tensor,
}
