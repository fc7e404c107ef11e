"""Makes golden vectors of GGUF's types by gguf-py: blocks, and the numbers that it decodes them to.

    python tests/codecs/make_gguf_vectors.py

writes tests/data/quant/gguf.tar.xz, laid out as goldens.tar.xz beside it. It needs gguf (0.19 made
the vectors) and safetensors. Blocks are what gguf-py encodes, where it does, and random bytes under
scales that are negative, zero, subnormal and large.
"""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize
from safetensors.numpy import save

OUT = Path(__file__).resolve().parents[1] / "data" / "quant" / "gguf.tar.xz"
# where the scales of two bytes of a block begin
SCALES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82),
    "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "MXFP4": (), "F16": (),
    "BF16": (),
}  # fmt: skip
ENCODED = ("Q4_1", "Q5_0", "Q5_1", "BF16")
# as float16: zeros, the least number, one that is subnormal, and the largest
ODD = np.array([0, 0x8000, 0x0001, 0x83FF, 0x7BFF], "<u2")


def random_blocks(name: str, shape: tuple[int, ...], dice: Any) -> Any:
    """[*shape, bytes]: the first blocks have odd scales, those of all others are small."""
    nbytes = GGML_QUANT_SIZES[GGMLQuantizationType[name]][1]
    made = dice.integers(0, 256, (int(np.prod(shape)), nbytes)).astype("u1")
    for number, at in enumerate(SCALES[name]):
        scales = (dice.standard_normal(len(made)) * 0.01).astype("<f2").view("<u2")
        odd = ODD[: len(made) - 2]
        scales[: len(odd)] = np.roll(odd, number)
        made[:, at : at + 2] = scales.view("u1").reshape(-1, 2)
    if name == "MXFP4":
        # all powers but that of NaN
        made[:, 0] = np.linspace(0, 254, len(made)).astype("u1")
    return made.reshape(*shape[:-1], -1)


def cases(name: str) -> dict[str, Any]:
    """Case -> blocks."""
    dice = np.random.default_rng(list(name.encode()))
    count = GGML_QUANT_SIZES[GGMLQuantizationType[name]][0]
    shape = {1: (8, 24), 32: (2, 3, 4), 256: (3, 2)}[count]
    out = {"random": random_blocks(name, shape, dice)}
    if name in ENCODED:
        numbers = (dice.standard_normal((4, 64)) * 0.02).astype("f4")
        numbers[0, :32] = 0
        numbers[1, 40] = 30
        out["normal"] = quantize(numbers, GGMLQuantizationType[name]).view("u1")
    return out


def main() -> None:
    """Writes the archive."""
    with tarfile.open(OUT, "w:xz", preset=9) as archive:
        for name in SCALES:
            for case, blocks in cases(name).items():
                with np.errstate(all="ignore"):
                    numbers = dequantize(blocks, GGMLQuantizationType[name])
                data = save({"q/data": blocks, "dq/gguf.f32": numbers.astype("<f4")})
                member = tarfile.TarInfo(f"gguf_{name.lower()}/{case}.safetensors")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))


if __name__ == "__main__":
    main()
