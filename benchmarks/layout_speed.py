"""How fast the codec kit decodes each kind of number format, beside a clone of the result: one
matrix of 4096 x 4096 in memory, to bfloat16 or float16, one thread.

    python benchmarks/layout_speed.py [--rounds 5] [--only nvfp4] [--json results.json]

Each format is decoded twice: where nothing has imported torch, which takes a second or more of a
run, numpy works alone; where torch is there, conversions and products are its own. The bits are the
same. Times are the smallest CPU time of this thread over all rounds, in which the candidates take
turns; `clone` is torch's, into fresh memory, while decoding writes into memory that is reused, as
in a run. Compare figures of one run only.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from migrate.codecs.kit.decoding import decode
from migrate.codecs.kit.geometry import geometry
from migrate.codecs.kit.layout import (
    BitPiece,
    Field,
    Grid,
    NumberLayout,
    Packing,
    Record,
    floats,
    integers,
    plain,
    signed,
    table_of,
    times,
)
from migrate.core.spec import Spec

SIDE = 4096
E4M3, E2M1, E8M0 = "float8_e4m3fn", "float4_e2m1fn", "float8_e8m0fnu"
Case = tuple[NumberLayout, dict[str, tuple[str, Any]], str]
# what each format may take, in clones of the result
BARS = {
    "fp8 tensor": 1, "fp8 row": 1, "fp8-block": 1, "mxfp8": 1, "mxfp4": 2, "nvfp4": 2.2,
    "int-pack sym": 2, "int-pack asym": 2.5, "gptq": 4, "gptq, columns out of order": None,
    "awq": 10, "nf4": 3, "int8": None, "Q8_0": 6, "Q4_K": 6,
}  # fmt: skip


def cases() -> dict[str, Callable[[], Case]]:
    """name -> what makes (layout, role -> (dtype, raw elements), dtype of the numbers)."""
    rng = np.random.default_rng(0)

    def codes(*shape: int) -> Any:
        # no NaN among e4m3
        made = rng.integers(0, 256, shape).astype("u1")
        made[(made & 0x7F) == 0x7F] = 0x7E
        return made

    def words(*shape: int) -> Any:
        return rng.integers(0, 1 << 32, shape).astype("<u4")

    def singles(*shape: int) -> Any:
        return (rng.random(shape) * 0.01 + 0.001).astype("<f4").view("<u4")

    def halves(*shape: int) -> Any:
        return (rng.random(shape) * 0.01 + 0.001).astype("<f2").view("<u2")

    def fp8(block: tuple[int, int], *shape: int) -> Case:
        layout = NumberLayout("fp8", floats(E4M3), plain(E4M3), times(Grid("scale", block)))
        return (
            layout,
            {"weight": (E4M3, codes(SIDE, SIDE)), "scale": ("float32", singles(*shape))},
            "bfloat16",
        )

    def mx(bits: int) -> Case:
        dtype, packing = (E4M3, plain(E4M3)) if bits == 8 else (E2M1, Packing(4))
        layout = NumberLayout(
            "mx", floats(dtype), packing, times(Grid("scale", (1, 32), dtypes=("uint8",)))
        )
        stored = codes(SIDE, SIDE * bits // 8)
        scale = rng.integers(115, 126, (SIDE, SIDE // 32)).astype("u1")
        kind = E4M3 if bits == 8 else "uint8"
        return layout, {"weight": (kind, stored), "scale": ("uint8", scale)}, "bfloat16"

    def nvfp4() -> Case:
        grids = Grid("scale", (1, 16), dtypes=(E4M3,)), Grid("global", (0, 0))
        layout = NumberLayout("nvfp4", floats(E2M1), Packing(4), times(*grids))
        parts = {
            "weight": ("uint8", codes(SIDE, SIDE // 2)),
            "scale": (E4M3, codes(SIDE, SIDE // 16) & 0x7E),
            "global": ("float32", singles()),
        }
        return layout, parts, "bfloat16"

    def int_pack(zero: bool) -> Case:
        block = (1, 128)
        packing = Packing(4, ("int32",), axis=-2)
        layout = NumberLayout(
            "int-pack",
            integers(4, 0 if zero else 8),
            Packing(4, ("int32",)),
            times(Grid("scale", block)),
            zero=Grid("zero", block, elements=integers(4), packing=packing) if zero else None,
        )
        parts = {
            "weight": ("int32", words(SIDE, SIDE // 8)),
            "scale": ("bfloat16", (singles(SIDE, SIDE // 128) >> 16).astype("<u2")),
        }
        if zero:
            parts["zero"] = ("int32", words(SIDE // 8, SIDE // 128))
        return layout, parts, "bfloat16"

    def gptq(in_turn: bool) -> Case:
        zero = Packing(4, ("int32",), axis=-2, plus=1)
        layout = NumberLayout(
            "gptq",
            integers(4),
            Packing(4, ("int32",), transposed=True),
            times(Grid("scale", transposed=True, index="group")),
            zero=Grid("zero", elements=integers(4), packing=zero, transposed=True, index="group"),
        )
        group = (np.arange(SIDE) // 128).astype("<i4").view("<u4")
        parts = {
            "weight": ("int32", words(SIDE // 8, SIDE)),
            "scale": ("float16", halves(SIDE // 128, SIDE)),
            "zero": ("int32", words(SIDE // 128, SIDE // 8)),
            "group": ("int32", group if in_turn else rng.permutation(group)),
        }
        return layout, parts, "float16"

    def awq() -> Case:
        packing = Packing(4, ("int32",), axis=-2, order=(0, 4, 1, 5, 2, 6, 3, 7), transposed=True)
        block = (1, 128)
        layout = NumberLayout(
            "awq",
            integers(4),
            packing,
            times(Grid("scale", block, transposed=True)),
            zero=Grid("zero", block, elements=integers(4), packing=packing, transposed=True),
        )
        parts = {
            "weight": ("int32", words(SIDE, SIDE // 8)),
            "scale": ("float16", halves(SIDE // 128, SIDE)),
            "zero": ("int32", words(SIDE // 128, SIDE // 8)),
        }
        return layout, parts, "float16"

    def nf4() -> Case:
        layout = NumberLayout(
            "nf4",
            table_of("map", 4),
            Packing(4, order=(1, 0)),
            times(Grid("absmax", (0, 64))),
            flat=True,
            shape=(SIDE, SIDE),
        )
        parts = {
            "weight": ("uint8", codes(SIDE * SIDE // 2, 1)),
            "absmax": ("float32", singles(SIDE * SIDE // 64)),
            "map": ("float32", singles(16)),
        }
        return layout, parts, "bfloat16"

    def int8() -> Case:
        layout = NumberLayout("int8", signed(8), plain("int8"), times(Grid("scale", (1, 0))))
        parts = {"weight": ("int8", codes(SIDE, SIDE)), "scale": ("float32", singles(SIDE, 1))}
        return layout, parts, "bfloat16"

    def records(layout: NumberLayout, heads: int) -> Case:
        record = layout.record
        stored = codes(SIDE, SIDE // record.codes, record.nbytes)
        stored[..., : 2 * heads] = halves(SIDE, SIDE // record.codes, heads).view("u1")
        return layout, {"weight": ("uint8", stored.reshape(SIDE, -1))}, "bfloat16"

    return {
        "fp8 tensor": lambda: fp8((0, 0)),
        "fp8 row": lambda: fp8((1, 0), SIDE),
        "fp8-block": lambda: fp8((128, 128), SIDE // 128, SIDE // 128),
        "mxfp8": lambda: mx(8),
        "mxfp4": lambda: mx(4),
        "nvfp4": nvfp4,
        "int-pack sym": lambda: int_pack(False),
        "int-pack asym": lambda: int_pack(True),
        "gptq": lambda: gptq(True),
        "gptq, columns out of order": lambda: gptq(False),
        "awq": awq,
        "nf4": nf4,
        "int8": int8,
        "Q8_0": lambda: records(q8_0(), 1),
        "Q4_K": lambda: records(q4_k(), 2),
    }


def q8_0() -> NumberLayout:
    """GGUF's Q8_0: d and 32 bytes."""
    codes = Field((BitPiece(tuple(range(2, 34)), (0,) * 32, 8),))
    scale = times(Grid("weight", field=Field(dtype="float16")))
    return NumberLayout("q8_0", signed(8), codes, scale, record=Record(32, 34))


def q4_k() -> NumberLayout:
    """GGUF's Q4_K: d, dmin, twelve bytes of 6-bit scales and minima, 128 bytes of nibbles."""
    eight = range(8)

    def sixes(minimum: int) -> Field:
        low = tuple(4 + j + 4 * minimum if j < 4 else 8 + j for j in eight)
        high = tuple((4 if j < 4 else 0) + 4 * minimum + j for j in eight)
        return Field(
            (
                BitPiece(low, tuple(4 * minimum * (j >= 4) for j in eight), 4),
                BitPiece(high, tuple(4 if j < 4 else 6 for j in eight), 2, 4),
            )
        )

    def chain(at: int, minimum: int) -> Any:
        return times(
            Grid("weight", field=Field(dtype="float16", at=at)),
            Grid("weight", elements=integers(6), field=sixes(minimum)),
        )

    every = range(256)
    codes = BitPiece(
        tuple(16 + i // 64 * 32 + i % 32 for i in every), tuple(i // 32 % 2 * 4 for i in every), 4
    )
    return NumberLayout(
        "q4_k", integers(4), Field((codes,)), chain(0, 0), less=chain(2, 1),
        record=Record(256, 144),
    )  # fmt: skip


def measured(rounds: int, only: str, torch: Any) -> dict[str, float]:
    """name -> milliseconds, and those of a clone where torch is there."""
    out = np.empty((SIDE, SIDE), "<u2")
    best: dict[str, float] = {}
    work: dict[str, Callable[[], Any]] = {}
    if torch is not None:
        torch.set_num_threads(1)
        numbers = torch.from_numpy(np.zeros((SIDE, SIDE), "<i2"))
        warm = torch.empty_like(numbers)
        work["clone"], work["copy_"] = numbers.clone, lambda: warm.copy_(numbers)
    for name, make in cases().items():
        if only in name:
            layout, parts, dtype = make()
            specs = {role: Spec(kind, a.shape) for role, (kind, a) in parts.items()}
            arrays = {role: a for role, (_, a) in parts.items()}
            box = tuple((0, n) for n in geometry(layout, specs).shape)
            work[name] = lambda given=(layout, specs, arrays, dtype, box): decode(*given, out)
    for _ in range(rounds):
        for name, run in work.items():
            start = time.thread_time()
            run()
            ms = (time.thread_time() - start) * 1e3
            best[name] = min(best.get(name, ms), ms)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description="speed of decoding by the codec kit")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--alone", action="store_true", help="print the times without torch")
    given = parser.parse_args()
    if given.alone:
        print(json.dumps(measured(given.rounds, given.only, None)))
        return
    command = [sys.executable, __file__, "--alone", f"--rounds={given.rounds}"]
    made = subprocess.run([*command, f"--only={given.only}"], capture_output=True, check=True)
    alone = json.loads(made.stdout)
    import torch

    beside = measured(given.rounds, given.only, torch)
    clone, copy = beside.pop("clone"), beside.pop("copy_")
    print(
        f"decode {SIDE} x {SIDE}, one thread; a clone of the result takes {clone:.1f} ms, a copy "
        f"into warm memory {copy:.1f} ms"
    )
    print(f"{'':<28} {'numpy alone':>22} {'beside torch':>22} {'bar':>6}")
    for name, ms in beside.items():
        bar = BARS[name]
        print(
            f"  {name:<26} {alone[name]:8.1f} ms {alone[name] / clone:6.2f} x   "
            f"{ms:8.1f} ms {ms / clone:6.2f} x   {'' if bar is None else bar:>6}"
        )
    if given.json:
        found = {"clone": clone, "copy_": copy, "numpy alone": alone, "beside torch": beside}
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
