"""How fast number formats are encoded by the kit, beside copying the result and beside torchao: one
matrix of 4096 x 4096 of bfloat16 in memory, one thread.

    python benchmarks/encoding_speed.py [--rounds 5] [--json results.json]

Times are the smallest CPU time of this thread over all rounds, in which the candidates take turns,
so that a busy machine slows all of them alike; compare figures of one run only. `migrate` writes
codes and scales into memory that is reused, as the engine does, surveys of whole tensors included;
torchao, where it is installed, allocates its result, as it does. Its bits are compared first.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from codec_speed import Nobody, race

from migrate.codecs.kit.encoding import TensorEncoding
from migrate.codecs.kit.layout import Grid, NumberLayout, Packing, floats, plain, times
from migrate.codecs.kit.scale_rules import ScaleRule
from migrate.core.spec import Spec
from migrate.elements.raw import carrier

SIDE = 4096
E4M3, E2M1 = "float8_e4m3fn", "float4_e2m1fn"


def fp8(block: tuple[int, int], scale: Spec, rule: ScaleRule, leading: bool = True) -> Any:
    grid = Grid("scale", block, leading=leading, dtypes=(scale.dtype,))
    parts = {"weight": Spec(E4M3, (SIDE, SIDE)), "scale": scale}
    return NumberLayout("fp8", floats(E4M3), plain(E4M3), times(grid)), parts, rule


def fp4(name: str, block: int, dtype: str, rule: ScaleRule) -> Any:
    grids = [Grid("scale", (1, block), dtypes=(dtype,))]
    parts = {
        "weight": Spec("uint8", (SIDE, SIDE // 2)),
        "scale": Spec(dtype, (SIDE, SIDE // block)),
    }
    if name == "nvfp4":
        grids.append(Grid("global", (0, 0), leading=False))
        parts["global"] = Spec("float32", ())
    return NumberLayout(name, floats(E2M1), Packing(4), times(*grids)), parts, rule


FORMATS = {
    "fp8 tensor": fp8((0, 0), Spec("float32", ()), ScaleRule("float", "hf"), False),
    "fp8 row": fp8((1, 0), Spec("float32", (SIDE, 1)), ScaleRule("float", "torchao", region="row")),
    "mxfp8": fp8((1, 32), Spec("uint8", (SIDE, SIDE // 32)), ScaleRule("mx", "torchao")),
    "mxfp4": fp4("mxfp4", 32, "uint8", ScaleRule("mx", "torchao")),
    "nvfp4": fp4("nvfp4", 16, E4M3, ScaleRule("nvfp4", "torchao")),
}


def peers() -> dict[str, Callable[[torch.Tensor], tuple[Any, Any]]]:
    """format -> torchao's function, which answers with codes and scales."""
    warnings.filterwarnings("ignore")
    try:
        from torchao.prototype.mx_formats import nvfp4_tensor
        from torchao.prototype.mx_formats.config import ScaleCalculationMode
        from torchao.prototype.mx_formats.mx_tensor import to_mx
        from torchao.quantization import PerRow
        from torchao.quantization.quantize_.workflows import Float8Tensor
    except ImportError as error:
        print(f"torchao is not compared with: {error}")
        return {}

    def mx(kind: torch.dtype) -> Callable[[torch.Tensor], tuple[Any, Any]]:
        def run(numbers: torch.Tensor) -> tuple[Any, Any]:
            scale, codes = to_mx(numbers, kind, 32, ScaleCalculationMode.RCEIL)
            return codes, scale

        return run

    def nv(numbers: torch.Tensor) -> tuple[Any, Any]:
        whole = nvfp4_tensor.per_tensor_amax_to_scale(numbers.abs().amax())
        made = nvfp4_tensor.NVFP4Tensor.to_nvfp4(numbers, per_tensor_scale=whole)
        return made.qdata, made.scale

    def row(numbers: torch.Tensor) -> tuple[Any, Any]:
        made = Float8Tensor.from_hp(numbers, granularity=PerRow())
        return made.qdata, made.scale

    return {
        "mxfp8": mx(torch.float8_e4m3fn),
        "mxfp4": mx(torch.float4_e2m1fn_x2),
        "nvfp4": nv,
        "fp8 row": row,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="speed of encoding against copying and torchao")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    numbers = (torch.randn(SIDE, SIDE, generator=generator) * 0.02).bfloat16()
    raw, box = numbers.view(torch.int16).numpy().view("<u2"), ((0, SIDE), (0, SIDE))
    compared, results = peers(), {}
    for name, (layout, parts, rule) in FORMATS.items():
        encoding = TensorEncoding(layout, Spec("bfloat16", (SIDE, SIDE)), parts, rule)
        out = {role: np.empty(part.shape, carrier(part.dtype)) for role, part in parts.items()}

        def run(meter: Any = None, encoding: Any = encoding, out: Any = out) -> None:
            survey = encoding.survey(raw, box) if encoding.surveyed else None
            memo: dict[str, Any] = {}
            for role, array in out.items():
                whole = tuple((0, n) for n in array.shape)
                if role == "weight":
                    encoding.encode(raw, role, whole, array, meter, memo, survey)
                elif not encoding.recall(role, whole, array, memo, survey):
                    raise SystemExit(f"the {role} is not known")

        codes = torch.from_numpy(out["weight"])
        candidates = {
            "clone of the codes": codes.clone,
            "migrate": run,
            "migrate, measured": lambda run=run: run(Nobody()),
        }
        run()
        if name in compared:
            peer = compared[name]
            theirs = peer(numbers)[0].view(torch.uint8).reshape(codes.shape)
            same = float((theirs == codes).float().mean())
            candidates["torchao"] = lambda peer=peer: peer(numbers)
            print(f"{name}: {same:.4%} of the bytes of codes are torchao's")
        results[name] = found = race(candidates, given.rounds, "cpu")
        for who, ms in found.items():
            print(f"  {who:<20} {ms:8.2f} ms  {ms / found['migrate']:6.2f} x migrate")
    if given.json:
        given.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
