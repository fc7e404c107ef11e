"""Hashes of what compressed-tensors makes of the inputs of `marlin_cases.py`.

    python tests/codecs/make_marlin_hashes.py

writes tests/data/quant/marlin-24.json. It needs compressed-tensors 0.8 to 0.14, whose
`Marlin24Compressor` writes these parts, and has no way to read them.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import quantize
from marlin_cases import CASES, FILE, PARTS, hashes, inputs


def parts(bits: int, rows: int, columns: int, groups: int, strategy: str) -> dict[str, Any]:
    numbers, scales = (torch.from_numpy(one) for one in inputs(bits, rows, columns, groups))
    wide = numbers.reshape(rows, groups, -1) * scales[..., None].float()
    weight = wide.reshape(rows, columns).half()
    group = 128 if strategy == "group" else None
    args = QuantizationArgs(num_bits=bits, strategy=strategy, group_size=group, symmetric=True)
    found = quantize(weight, scales, torch.zeros_like(scales), args)
    if not torch.equal(found, numbers.half()):
        raise ValueError("other integers than were meant")
    compressor = BaseCompressor.load_from_registry("marlin-24")
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    state = {"l.weight": weight, "l.weight_scale": scales}
    made = compressor.compress(state, names_to_scheme={"l": scheme})
    return {name: made[f"l.{name}"].numpy() for name in PARTS}


def main() -> None:
    found = {}
    for case in CASES:
        _, _, columns, groups = case
        strategies = [*["channel"] * (groups == 1), *["group"] * (columns == 128 * groups)]
        made = [hashes(parts(*case, strategy)) for strategy in strategies]
        if any(one != made[0] for one in made):
            raise ValueError("rows of one group differ from rows with one scale")
        found[" ".join(map(str, case))] = made[0]
    said = {"made_by": {"compressed-tensors": version("compressed-tensors")}, "parts": found}
    FILE.write_text(json.dumps(said, indent=1) + "\n")


if __name__ == "__main__":
    main()
