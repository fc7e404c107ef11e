"""How large a pickle stream may be before it is refused: every budget in one place, by what the
stream is.

Genuine streams stay far below. The budgets are for the others: a stream of one-byte opcodes makes
objects of a hundred bytes each, and a tuple a million levels deep kills whoever hashes or prints
it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Budgets of one stream; reaching past one is M932. `size`, `text`, `blob` and `integer` are in
    bytes, the others are counts.
    """

    size: int
    opcodes: int
    stack: int
    marks: int
    memo: int
    # containers and calls; besides this never more than 100,000 and one for each three bytes of the
    # stream
    nodes: int
    depth: int
    text: int
    blob: int
    # 128 bits without a sign, as numpy's generators have them
    integer: int = 17


MiB = 1 << 20

# the state of a Transformer Engine module
EXTRA_STATE = Limits(
    size=64 * MiB,
    opcodes=200_000,
    stack=10_000,
    marks=32,
    memo=50_000,
    nodes=100_000,
    depth=24,
    text=4096,
    blob=32 * MiB,
)
# data.pkl of a zip, the object pickle of a legacy file; protocol 2 writes bytes as text
ARCHIVE = Limits(
    size=176 * MiB,
    opcodes=20_000_000,
    stack=100_000,
    marks=64,
    memo=5_000_000,
    nodes=5_000_000,
    depth=64,
    text=64 * MiB,
    blob=64 * MiB,
)
# .metadata of torch.distributed.checkpoint: one call a chunk, 50 MB for 320,000 chunks
METADATA = Limits(
    size=512 * MiB,
    opcodes=200_000_000,
    stack=100_000,
    marks=64,
    memo=50_000_000,
    nodes=50_000_000,
    depth=64,
    text=MiB,
    blob=0,
)
