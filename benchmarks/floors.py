"""What the machine gives the two rows of work on values that are bound by memory and by torch: the
same reads, arithmetic, checksums and writes as the engine's, two threads, without the engine;
against `cp` of as many bytes and the script's work in the same round.

    floors.py [--data bench-data/1.2GB] [--rounds 5]

`make bench BENCH='--rows narrow,quantize'` makes the checkpoints it reads.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import compare
import memory
import numpy as np
import report
import xxhash

STEP, FILE = 1 << 20, 128 << 20
SCRIPT = Path(__file__).with_name("baseline_stack.py")


class Writer:
    """Files of 128 MiB in `folder`, with their blocks from the start, hashed as a run hashes: a
    tile and the whole.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name, self._number = folder, name, 0
        self._descriptor, self._at = -1, 0
        self._sums = xxhash.xxh3_128(), xxhash.xxh3_128()

    def write(self, data: memoryview) -> None:
        if self._descriptor < 0 or self._at + len(data) > FILE:
            self.close()
            self._descriptor, self._at = (
                os.open(self._folder / f"{self._name}-{self._number}", os.O_CREAT | os.O_WRONLY),
                0,
            )
            self._number += 1
            os.posix_fallocate(self._descriptor, 0, FILE)
        for checksum in self._sums:
            checksum.update(data)
        self._at += os.pwrite(self._descriptor, data, self._at)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.ftruncate(self._descriptor, self._at)
            os.close(self._descriptor)


def narrow(tensors: list[Any], writer: Writer) -> None:
    """float32 to bfloat16, low halves looked at."""
    given, made = np.empty(2 * STEP, "u1"), np.empty(STEP, "u1")
    words, halves, later = (
        given.view("<u4"),
        made.view("<u2"),
        np.ndarray(STEP // 2 - 1, "<u4", given, 2),
    )
    for descriptor, place in tensors:
        for start in range(0, place.nbytes, given.size):
            n = min(given.size, place.nbytes - start)
            os.preadv(descriptor, [given[:n].data], place.offset + start)
            for first in range(0, n // 4, 1 << 19):
                last = min(n // 4, first + (1 << 19))
                if np.bitwise_or.reduce(words[first:last]) & np.uint32(0xFFFF):
                    raise ValueError("a value is not exact")
                np.copyto(halves[first : last - 1], later[first : last - 1], casting="unsafe")
                halves[last - 1] = words[last - 1] >> np.uint32(16)
            writer.write(made[: n // 2].data)


def quantize(tensors: list[Any], writer: Writer) -> None:
    """bfloat16 to e4m3 with a scale for 128 x 128: magnitudes, product and cast, a matrix read
    once.
    """
    import torch

    size = max(place.nbytes for _, place in tensors)
    given, made, floats = np.empty(size, "u1"), np.empty(size // 2, "u1"), torch.empty(size // 2)
    numbers, codes = (
        torch.from_numpy(given).view(torch.bfloat16),
        torch.from_numpy(made).view(torch.float8_e4m3fn),
    )
    for descriptor, place in tensors:
        rows, columns = place.shape
        os.preadv(descriptor, [given[: place.nbytes].data], place.offset)
        step = max(1, (1 << 20) // columns // 128) * 128
        for top in range(0, rows, step):
            first, last = top * columns, min(rows, top + step) * columns
            words = given[2 * first : 2 * last]
            signed, unsigned = (
                np.maximum.reduce(words.view(t).reshape(-1, 128, columns), 1)
                .reshape(-1, columns // 128, 128)
                .max(2)
                for t in ("i2", "u2")
            )
            amax = (
                torch.from_numpy(np.maximum(signed, (unsigned & 0x7FFF).view("i2")))
                .view(torch.bfloat16)
                .float()
            )
            factor = (amax.clamp(min=1e-4) / 448).reciprocal().repeat_interleave(128, 1)
            part = floats[: last - first]
            part.copy_(numbers[first:last])
            part.view(-1, 128, columns).mul_(factor.unsqueeze(1))
            codes[first:last].copy_(part)
        writer.write(made[: place.nbytes // 2].data)


def timed(
    work: Callable[[list[Any], Writer], None],
    source: Path,
    target: Path,
    wanted: Callable[[Any], bool],
) -> float:
    """Seconds that two threads take for every second tensor each."""
    places = [p for p in compare.tensors(source).values() if wanted(p)]
    opened = {path: os.open(path, os.O_RDONLY) for path in {p.file for p in places}}
    target.mkdir()
    parts = [[(opened[p.file], p) for p in places[n::2]] for n in range(2)]
    threads = [
        threading.Thread(target=work, args=(part, Writer(target, str(n))))
        for n, part in enumerate(parts)
    ]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took = time.perf_counter() - start
    for descriptor in opened.values():
        os.close(descriptor)
    return took


def process_of(argv: list[Any], free: int, holder: memory.Holder, env: dict[str, str]) -> float:
    """Seconds of a process that writes the folder it names last; the folder is removed."""
    holder.refill()
    holder.drop(free)
    start = time.perf_counter()
    subprocess.run(argv, check=True, env=env)
    took = time.perf_counter() - start
    shutil.rmtree(argv[-1])
    return took


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, default=Path(__file__).resolve().parent.parent / "bench-data" / "1.2GB"
    )
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    # the script is to have torch's own threads
    given = dict(os.environ)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch

    torch.set_num_threads(1)
    target = args.data / "floor"
    shutil.rmtree(target, ignore_errors=True)
    holder = memory.Holder(args.data / "hold")
    try:
        for work, source, wanted in (
            (narrow, "f32", lambda p: True),
            (
                quantize,
                "bf16-large",
                lambda p: len(p.shape) == 2 and not p.shape[0] % 128 and not p.shape[1] % 128,
            ),
        ):
            memory.read_through(args.data / source, anew=True)
            tiny, large = (
                [sys.executable, SCRIPT, work.__name__, args.data / f, target]
                for f in (f"tiny-{source}", source)
            )
            start_up = statistics.median(
                process_of(tiny, 256_000_000, holder, given) for _ in range(3)
            )
            of_cp, faster = [], []
            for _ in range(args.rounds):
                holder.refill()
                holder.drop(1_900_000_000)
                bare = timed(work, args.data / source, target, wanted)
                kept = target.rename(args.data / "floor-kept")
                memory.read_through(kept, anew=True)
                of_cp.append(
                    bare / process_of(["cp", "-r", kept, target], 1_900_000_000, holder, given)
                )
                shutil.rmtree(kept)
                faster.append((process_of(large, 6_000_000_000, holder, given) - start_up) / bare)
            print(
                "{}: of cp {:.2f} [{:.2f}-{:.2f}], the script less its start-up takes {:.2f} "
                "[{:.2f}-{:.2f}] times as long".format(
                    work.__name__, *report.spread(of_cp), *report.spread(faster)
                )
            )
    finally:
        holder.close()
        for left in ("floor", "floor-kept"):
            shutil.rmtree(args.data / left, ignore_errors=True)


if __name__ == "__main__":
    main()
