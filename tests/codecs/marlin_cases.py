"""Inputs of `marlin-24`, and their parts packed once more, number by number: what the library made
of the same inputs has the hashes of tests/data/quant/marlin-24.json (`make_marlin_hashes.py`).
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

FILE = Path(__file__).resolve().parents[1] / "data" / "quant" / "marlin-24.json"
# bits, rows, columns, groups of columns
CASES = (
    (4, 64, 32, 1), (4, 192, 96, 1), (4, 64, 128, 1), (4, 64, 256, 2), (4, 128, 384, 3),
    (4, 64, 1024, 8), (8, 64, 32, 1), (8, 192, 96, 1), (8, 128, 256, 2), (8, 64, 640, 5),
)  # fmt: skip
PARTS = ("weight_packed", "scale_packed", "meta")


def inputs(bits: int, rows: int, columns: int, groups: int) -> tuple[Any, Any]:
    """(integers of which at most two of each four are not 0, float16 scales [rows, groups])."""
    dice = np.random.default_rng([bits, rows, columns, groups])
    half = 1 << (bits - 1)
    numbers = dice.integers(-half, half, (rows, columns // 4, 4))
    left = np.argsort(dice.random(numbers.shape), axis=-1)[..., :2]
    np.put_along_axis(numbers, left, 0, -1)
    # some fours have fewer than two
    numbers[dice.random(numbers.shape) < 0.05] = 0
    scales = dice.uniform(0.001, 0.01, (rows, groups)).astype("<f2")
    return numbers.reshape(rows, columns), scales


def hashes(parts: dict[str, Any]) -> dict[str, str]:
    """part -> shape and SHA-256 of its bytes."""
    return {
        name: f"{list(one.shape)} {hashlib.sha256(np.ascontiguousarray(one).tobytes()).hexdigest()}"
        for name, one in parts.items()
    }


def recorded() -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = json.loads(FILE.read_text())["parts"]
    return found


def places(four: list[int]) -> tuple[int, int]:
    """Which two of four are kept: those that are not 0, and others where there are fewer."""
    kept = [i for i, number in enumerate(four) if number]
    if len(kept) == 2:
        return kept[0], kept[1]
    return {(): (2, 3), (0,): (0, 2), (1,): (1, 2), (2,): (2, 3), (3,): (2, 3)}[tuple(kept)]


def packed(numbers: Any, scales: Any, bits: int) -> dict[str, Any]:
    """The parts, each code put where a thread of the kernel looks for it."""
    rows, columns = numbers.shape
    tiles, each = columns // 32, 32 // bits
    codes = np.zeros((tiles, rows * 16), "<u8")
    meta = np.zeros((tiles, 2 * rows), "<u2")
    within = [0, 4, 1, 5, 2, 6, 3, 7] if bits == 4 else [0, 2, 1, 3]
    for row in range(rows):
        for four in range(columns // 4):
            number = numbers[row, 4 * four : 4 * four + 4].tolist()
            tile, place = divmod(four, 8)
            first, second = places(number)
            low, high = divmod(row, 64)
            # rows of a block of 64 by their bits, from the highest: 1, 5, 4, 3, 0; then half a tile
            at = (high >> 1 & 1) << 5 | (high >> 3) << 2 | (high & 1) << 1 | place // 4
            word = low * 128 + 2 * at + (high >> 2 & 1)
            meta[tile, word] |= (first | second << 2) << 4 * (place % 4)
            for which, found in enumerate((number[first], number[second])):
                k = place * 2 + which
                # 32 threads of 32 codes, eight for each of four columns
                thread = high // 16 * 8 + high % 16 // 8 * 4 + k % 8 // 2
                eight = high // 4 % 2 * 4 + k // 8 * 2 + k % 2
                order = eight // len(within) * len(within) + within[eight % len(within)]
                index = low * 1024 + thread * 32 + high % 4 * 8 + order
                codes[tile, index] = found + (1 << (bits - 1))
    fields = codes.reshape(tiles, -1, each) << (bits * np.arange(each, dtype="<u8"))
    entries = scales.T
    if scales.shape[1] > 2:
        order = [0, 4, 1, 5, 2, 6, 3, 7]
        entries = entries[:, [i // 8 * 8 + order[i % 8] for i in range(rows)]]
    return {
        "weight_packed": fields.sum(-1).astype("<u4"),
        "scale_packed": np.ascontiguousarray(entries).view("<u2"),
        "meta": meta,
    }
