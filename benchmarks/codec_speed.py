"""How fast the codecs are, beside copying the result and beside what others do: one matrix of 4096
x 4096 in memory, one thread.

    python benchmarks/codec_speed.py [--rounds 9] [--device cpu|cuda] [--json results.json]

Times are the smallest CPU time of this thread over all rounds, in which the candidates take turns,
so that a busy machine slows all of them alike. Fresh memory costs more than the arithmetic, so the
allocator matters: run it once as it is and once with THP_MEM_ALLOC_ENABLE=1 (huge pages in torch),
and compare figures of one run only. `migrate` writes into a buffer that is reused, as the engine
does; the peers allocate their result, as they do.

The peers are transformers' own Fp8Dequantize where transformers is installed, and the arithmetic of
the released scripts, written down here: DeepSeek's weight_dequant and compressed-tensors' block
dequantizer (cast, repeat the scales, multiply, round), torch's DCP reader (block by block), and
DeepGEMM's per_block_cast_to_fp8. All of them make the same bits.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch

from migrate.codecs import get
from migrate.core.spec import Spec

SIDE, BLOCK = 4096, 128
CODEC = get("fp8-block")
ARGS = CODEC.Args(block=(BLOCK, BLOCK), like="deepseek")


class Nobody:
    """A meter that does not listen: what measuring costs the codec itself."""

    def add(self, *numbers: Any, **counts: Any) -> None:
        pass


def raw(tensor: torch.Tensor) -> Any:
    """What the codec is given: raw elements, numpy on the CPU."""
    integers = tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])
    if tensor.device.type != "cpu":
        return integers
    return integers.numpy().view({1: "u1", 2: "<u2", 4: "<u4"}[tensor.element_size()])


def repeated(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Scales repeated to the size of the weight: compressed-tensors' block dequantizer, and
    DeepSeek's kernel without Triton.
    """
    wide = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return (codes.to(torch.float32) * wide).to(torch.bfloat16)


def block_by_block(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """torch.distributed.checkpoint's QuantizedHuggingFaceStorageReader."""
    out = codes.to(torch.float32)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            out[i * BLOCK : (i + 1) * BLOCK, j * BLOCK : (j + 1) * BLOCK] *= scale[i, j]
    return out.to(torch.bfloat16)


def broadcast(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """transformers' Fp8Dequantize, where transformers is not installed."""
    rows, columns = scale.shape
    parts = codes.to(torch.float32).reshape(-1, rows, BLOCK, columns, BLOCK)
    return (
        (parts * scale.reshape(-1, rows, columns).unsqueeze(-1).unsqueeze(2))
        .to(torch.bfloat16)
        .reshape(codes.shape)
    )


def deepgemm(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """deep_gemm.utils.math.per_block_cast_to_fp8."""
    m, n = numbers.shape
    view = numbers.view(-1, BLOCK, n // BLOCK, BLOCK)
    scale = view.abs().float().amax(dim=(1, 3), keepdim=True).clamp(1e-4) / 448.0
    return (view * (1.0 / scale)).to(torch.float8_e4m3fn).view(m, n), scale.view(
        m // BLOCK, n // BLOCK
    )


def installed() -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None:
    """transformers' Fp8Dequantize itself."""
    try:
        from transformers.integrations.finegrained_fp8 import Fp8Dequantize
    except ImportError:
        return None
    op = Fp8Dequantize(None)
    return lambda codes, scale: op._dequantize_one(codes, scale, torch.bfloat16)


def race(candidates: dict[str, Callable[[], Any]], rounds: int, device: str) -> dict[str, float]:
    """name -> milliseconds."""
    best = dict.fromkeys(candidates, float("inf"))
    for _ in range(rounds):
        for name, run in candidates.items():
            if device != "cpu":
                torch.cuda.synchronize()
                start = time.perf_counter()
                run()
                torch.cuda.synchronize()
                best[name] = min(best[name], (time.perf_counter() - start) * 1e3)
            else:
                start = time.thread_time()
                run()
                best[name] = min(best[name], (time.thread_time() - start) * 1e3)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(
        description="speed of the codecs against copying and against peers"
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    on = given.device
    numbers = (
        (torch.randn(SIDE, SIDE, generator=torch.Generator().manual_seed(0)) * 0.02)
        .to(torch.bfloat16)
        .to(on)
    )
    codes, scale = deepgemm(numbers)
    weight, grid, plain = (
        Spec("float8_e4m3fn", (SIDE, SIDE)),
        Spec("float32", tuple(scale.shape)),
        Spec("bfloat16", (SIDE, SIDE)),
    )
    box, blocks = ((0, SIDE), (0, SIDE)), ((0, grid.shape[0]), (0, grid.shape[1]))
    wanted = repeated(codes, scale)
    decoded, encoded, scales = (
        torch.empty_like(wanted),
        torch.empty_like(codes),
        torch.empty_like(scale),
    )
    given_parts, out, source = [raw(codes), raw(scale)], raw(decoded), raw(numbers)
    out_codes, out_scales = raw(encoded), raw(scales)

    def decode(meter: Any = None) -> None:
        CODEC.decode(ARGS, given_parts, [weight, grid], "bfloat16", box, out, meter)

    def encode(meter: Any = None) -> None:
        CODEC.encode(ARGS, source, plain, 0, box, out_codes, meter)
        CODEC.encode(ARGS, source, plain, 1, blocks, out_scales)

    decode()
    encode()
    for name, one, other in (
        ("decode", decoded, wanted),
        ("codes", encoded, codes),
        ("scales", scales, scale),
    ):
        if not torch.equal(one.view(torch.uint8), other.view(torch.uint8)):
            raise SystemExit(f"{name}: the bits differ from the peers'")
    peers = {"broadcast": broadcast, "repeat": repeated, "block by block": block_by_block}
    if (own := installed()) is not None:
        peers["transformers Fp8Dequantize"] = own
        del peers["broadcast"]
    decoding: dict[str, Callable[[], Any]] = {
        "clone of the result": wanted.clone,
        "migrate": decode,
        "migrate, measured": lambda: decode(Nobody()),
    }
    decoding |= {name: (lambda peer=peer: peer(codes, scale)) for name, peer in peers.items()}
    encoding: dict[str, Callable[[], Any]] = {
        "clone of the result": codes.clone,
        "migrate": encode,
        "migrate, measured": lambda: encode(Nobody()),
        "DeepGEMM in torch": lambda: deepgemm(numbers),
    }
    allocator = (
        "THP_MEM_ALLOC_ENABLE=1"
        if os.environ.get("THP_MEM_ALLOC_ENABLE") == "1"
        else "default allocator"
    )
    found: dict[str, Any] = {
        "torch": torch.__version__,
        "numpy": np.__version__,
        "device": on,
        "allocator": allocator,
    }
    for title, candidates in (
        ("dequantize fp8-block to bfloat16", decoding),
        ("quantize bfloat16 like deepseek", encoding),
    ):
        times = race(candidates, given.rounds, on)
        own_time, clone = times["migrate"], times["clone of the result"]
        print(f"{title}, {SIDE} x {SIDE}, {on}, one thread, {allocator}")
        for name, ms in times.items():
            print(
                f"  {name:<28} {ms:8.2f} ms  {ms / clone:6.2f} x clone  {ms / own_time:6.2f} x "
                "migrate"
            )
        found[title] = times
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
