"""Logits of the genuine folders of GPTQ and AWQ as they are, without decoding them first: every
linear layer is GPTQModel's own, run on the CPU (`TorchLinear`, `AwqTorchLinear`).

    python tests/genuine/run_kernels.py GPTQMODEL

writes tests/data/genuine/kernels.json: for each folder the logits in float16, as the bytes of
little-endian numbers in hexadecimal. GPTQMODEL is the unpacked sdist; the environment is that of
`run_gptqmodel.py`. transformers has no such model on a CPU: it asks for a GPU before it loads one.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import torch
from make_genuine import FOLDER, stored

FOLDERS = ("gptq-v1", "gptq-v2-dynamic", "gptq-sym", "awq-gemm")
PARTS = ("qweight", "qzeros", "scales", "g_idx")


def layer(config: dict[str, Any], module: str, parts: dict[str, torch.Tensor]) -> torch.nn.Module:
    """A linear layer that holds these words and multiplies by them."""
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.nn_modules.qlinear.torch_awq import AwqTorchLinear
    from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module

    said = dict(config)
    for pattern, more in config.get("dynamic", {}).items():
        if pattern.startswith("+:") and re.match(pattern[2:], module):
            said |= more
    awq = config["quant_method"] == "awq"
    rows = len(parts["qweight"])
    inside = rows if awq else rows * 32 // said["bits"]
    made = (AwqTorchLinear if awq else TorchLinear)(
        bits=said["bits"], group_size=said["group_size"], sym=said.get("sym", False),
        desc_act=said.get("desc_act", False), in_features=inside,
        out_features=parts["scales"].shape[1], bias=False, register_buffers=True,
    )  # fmt: skip
    for name, part in parts.items():
        assert getattr(made, name).shape == part.shape, (module, name)
        made.register_buffer(name, part.clone())
    if config.get("checkpoint_format") == "gptq":
        convert_gptq_v1_to_v2_format_module(made, said["bits"], torch.int32)
    made.post_init()
    return made.eval()


def logits(folder: Path) -> torch.Tensor:
    import transformers

    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    plain = transformers.AutoConfig.from_pretrained(folder)
    del plain.quantization_config
    model = transformers.AutoModelForCausalLM.from_config(plain, dtype=torch.float16).eval()
    held = stored(folder)
    words = {key.rpartition(".")[0] for key in held if key.endswith(".qweight")}
    for module in words:
        parts = {part: held.pop(f"{module}.{part}") for part in PARTS if f"{module}.{part}" in held}
        model.set_submodule(module, layer(config, module, parts), strict=True)
    found = model.load_state_dict(held, strict=False)
    assert not found.unexpected_keys
    assert {key.rpartition(".")[0] for key in found.missing_keys} <= words
    with torch.no_grad():
        return model(torch.arange(16).reshape(2, 8)).logits


def main(gptqmodel: Path) -> None:
    sys.path.insert(0, str(gptqmodel))
    (version,) = re.findall(r"^Version: (.+)$", (gptqmodel / "PKG-INFO").read_text(), re.MULTILINE)
    said: dict[str, Any] = {"version": version, "torch": torch.__version__, "logits": {}}
    for name in FOLDERS:
        made = logits(FOLDER / name)
        assert made.dtype == torch.float16
        print(name, made.shape, made.abs().max().item(), flush=True)
        said["logits"][name] = made.contiguous().numpy().tobytes().hex()
    (FOLDER / "kernels.json").write_text(json.dumps(said, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
