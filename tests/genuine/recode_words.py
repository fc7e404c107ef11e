"""What libraries make of the parts of the folders of tests/data/genuine, in place of numbers.

    python tests/genuine/recode_words.py FOLDER

writes tests/data/genuine/recoded.json: what compressed-tensors' AutoAWQConverter makes of AWQ, and
what GPTQModel's conversion makes of the zeros of its two forms. FOLDER is the unpacked sdist of
GPTQModel, whose own requirements are those of inference; the environment is that
of `make_words.py`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "cli"), str(TESTS / "genuine")]

from genuine import FOLDER, checkpoint, digest  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

WORDS = {torch.int32: "I32", torch.int64: "I64", torch.float16: "F16"}


def tensors(name: str) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in sorted(checkpoint(name).folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def digests(made: dict[str, torch.Tensor]) -> dict[str, str]:
    return {
        key: digest(
            WORDS[one.dtype], tuple(one.shape), one.contiguous().view(torch.uint8).numpy().tobytes()
        )
        for key, one in sorted(made.items())
    }


def converted_awq(name: str) -> dict[str, str]:
    """What becomes of the encoded layers."""
    from compressed_tensors.entrypoints.convert.converters import AutoAWQConverter

    config = json.loads((checkpoint(name).folder / "config.json").read_text())
    given = tensors(name)
    converter = AutoAWQConverter.from_autoawq_config(
        config["quantization_config"], targets=["re:.*"]
    )
    made = converter.process(dict(given))
    return digests({key: one for key, one in made.items() if key not in given})


def converted_zeros(name: str, form: str) -> dict[str, str]:
    """The zeros in the form v1 or v2."""
    from gptqmodel.nn_modules.qlinear import BaseQuantLinear
    from gptqmodel.quantization.config import QuantizeConfig
    from gptqmodel.utils.model import (
        convert_gptq_v1_to_v2_format_module,
        convert_gptq_v2_to_v1_format_module,
    )

    class Layer(BaseQuantLinear):
        def __init__(self, zeros: torch.Tensor, bits: int) -> None:
            torch.nn.Module.__init__(self)
            self.bits, self.pack_dtype = bits, torch.int32
            self.register_buffer("qzeros", zeros)

        def qzero_format(self, format: int | None = None) -> int:
            return format or 1

    made = {}
    given = tensors(name)
    for key, zeros in given.items():
        if key.endswith(".qzeros"):
            bits = zeros.shape[1] * 32 // given[key.replace("qzeros", "scales")].shape[1]
            layer = Layer(zeros.clone(), bits)
            if form == "v2":
                convert_gptq_v1_to_v2_format_module(layer, bits, torch.int32)
            else:
                convert_gptq_v2_to_v1_format_module(layer, QuantizeConfig(bits=bits))
            made[key] = layer.qzeros
    return digests(made)


def main(folder: Path) -> None:
    sys.path.insert(0, str(folder))
    said = {
        "awq-gemm": converted_awq("awq-gemm"),
        "gptq-v1": converted_zeros("gptq-v1", "v2"),
        "gptq-v2-dynamic": converted_zeros("gptq-v2-dynamic", "v1"),
    }
    (FOLDER / "recoded.json").write_text(json.dumps(said, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
