"""A GGUF file of the architecture llama whose linear layers become 1 GB of bfloat16: blocks of Q4_K
and, as llama.cpp mixes them in Q4_K_M, some of Q6_K, with random codes and small scales.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import data
import numpy as np
from data_formats import SIZES

FILE, ALIGNMENT = "model.gguf", 32
F32, Q4_K, Q6_K = 0, 12, 14
# bytes of a block of 256 numbers, and where its scales of two bytes are
BLOCKS = {Q4_K: (144, (0, 2)), Q6_K: (210, (208,))}
HEADS = 16
# tensors of a layer -> whether rows and columns are the inner width, and the type
LINEAR = {
    "attn_q": (False, False, Q4_K), "attn_k": (False, False, Q4_K),
    "attn_v": (False, False, Q6_K), "attn_output": (False, False, Q4_K),
    "ffn_gate": (True, False, Q4_K), "ffn_up": (True, False, Q4_K),
    "ffn_down": (False, True, Q6_K),
}  # fmt: skip
NORMS = ("attn_norm", "ffn_norm")
VOCABULARY = 512


def blocks(rng: Any, kind: int, rows: int, columns: int) -> Any:
    """The bytes of a matrix in blocks, whose scales lie between 2^-10 and 2^-8."""
    nbytes, places = BLOCKS[kind]
    made = rng.integers(0, 256, (rows * columns // 256, nbytes), "u1")
    for at in places:
        scales = rng.integers(0x1400, 0x1C00, len(made), "<u2")
        made[:, at : at + 2] = scales.view("u1").reshape(-1, 2)
    return made


def make(folder: Path, name: str, size: str) -> None:
    """Writes the folder: 1 GB of numbers, or few (`tiny`, `demo`)."""
    sizes, rng = SIZES.get(size, SIZES[""]), np.random.default_rng(0)
    widths = sizes.hidden, sizes.inner
    kept: dict[Any, Any] = {}
    tensors: list[tuple[str, tuple[int, ...], int, Any]] = []

    def add(key: str, rows: int, columns: int, kind: int) -> None:
        at = rows, columns, kind
        if at not in kept:
            kept[at] = blocks(rng, kind, rows, columns)
        tensors.append((key, (rows, columns), kind, kept[at]))

    ones = np.ones(sizes.hidden, "<f4")
    for key in ("token_embd", "output"):
        add(f"{key}.weight", VOCABULARY, sizes.hidden, Q6_K)
    tensors.append(("output_norm.weight", ones.shape, F32, ones))
    for layer in range(sizes.layers):
        for part, (rows, columns, kind) in LINEAR.items():
            add(f"blk.{layer}.{part}.weight", widths[rows], widths[columns], kind)
        norms = (f"blk.{layer}.{part}.weight" for part in NORMS)
        tensors += [(key, ones.shape, F32, ones) for key in norms]
    folder.mkdir(parents=True)
    _write(folder / FILE, _values(sizes.layers, *widths), tensors)


def _values(layers: int, hidden: int, inner: int) -> dict[str, str | int | float]:
    return {
        "general.architecture": "llama",
        "general.alignment": ALIGNMENT,
        "llama.block_count": layers,
        "llama.embedding_length": hidden,
        "llama.feed_forward_length": inner,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": HEADS,
        "llama.context_length": 4096,
        "llama.vocab_size": VOCABULARY,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
    }


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def _value(value: str | int | float) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    return (
        struct.pack("<If", 6, value) if isinstance(value, float) else struct.pack("<II", 4, value)
    )


def _write(
    path: Path,
    values: dict[str, str | int | float],
    tensors: list[tuple[str, tuple[int, ...], int, Any]],
) -> None:
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(values))
    head += b"".join(_text(key) + _value(value) for key, value in values.items())
    at = 0
    for key, shape, kind, array in tensors:
        head += _text(key) + struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        head += struct.pack("<IQ", kind, at)
        at += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
    with path.open("xb", buffering=0) as file:
        file.write(head + bytes(-len(head) % ALIGNMENT))
        for _, _, _, array in tensors:
            rest = memoryview(array.reshape(-1).view("u1").data)
            while rest:
                rest = rest[file.write(rest[: data.BLOCK]) :]
            file.write(bytes(-array.nbytes % ALIGNMENT))
