"""Makes the tiny checkpoints of GPTQ and AWQ by the packing code of GPTQModel and AutoAWQ, and what
these decode them to.

    python tests/genuine/make_words.py GPTQMODEL AUTOAWQ [NAME ...]

Both are folders of unpacked sdists: what the libraries require is for inference on GPUs. GPTQModel
needs what `run_gptqmodel.py` says; the environment is that of `make genuine`. Codes are the nearest
to the weights and not those of a calibration, which changes nothing in how they are stored.
"""

from __future__ import annotations

import re
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from make_genuine import FOLDER, MAKERS, Tensors, llama, make, maker, rewrite, save, stored
from run_gptqmodel import without_init

LINEAR = re.compile(r"(.+\.(?:[a-z]+_proj))\.weight")
GPTQMODEL, AUTOAWQ = (Path(argument) for argument in sys.argv[1:3])


def prepare() -> dict[str, str]:
    """Makes both importable. Their releases."""
    sys.path[:0] = [str(GPTQMODEL), str(AUTOAWQ)]
    for package in ("awq", "awq.utils", "awq.modules", "awq.modules.linear", "awq.quantize"):
        without_init(package, AUTOAWQ.joinpath(*package.split(".")))
    # these look for GPUs and data sets
    utils = ModuleType("awq.utils.utils")
    utils.__dict__.update(get_best_device=lambda: "cpu", clear_memory=None)
    data = ModuleType("awq.utils.calib_data")
    data.__dict__.update(get_calib_dataset=None)
    scale = ModuleType("awq.quantize.scale")
    scale.__dict__.update(apply_scale=None, apply_clip=None)
    sys.modules |= {m.__name__: m for m in (utils, data, scale)}
    out = {}
    for name, folder in (("gptqmodel", GPTQMODEL), ("autoawq", AUTOAWQ)):
        information = (folder / "PKG-INFO").read_text()
        (out[name],) = re.findall(r"^Version: (.+)$", information, re.MULTILINE)
    return out


def linear(weight: torch.Tensor) -> torch.nn.Linear:
    made = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    made.weight.data = weight.float()
    return made


def gptq(weight: torch.Tensor, form: str, bits: int, group: int, sym: bool, ordered: bool) -> Any:
    """(parts, decoded) of one weight."""
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.quantization.config import QuantizeConfig
    from gptqmodel.quantization.quantizer import Quantizer
    from gptqmodel.utils.model import (
        convert_gptq_v1_to_v2_format_module,
        convert_gptq_v2_to_v1_format_module,
    )

    rows, columns = weight.shape
    index = torch.arange(columns, dtype=torch.int32) // group
    if not ordered:
        index = index[torch.randperm(columns)]
    config = QuantizeConfig(bits=bits, group_size=group, sym=sym, desc_act=not ordered)
    scales, zeros = [], []
    for number in range(columns // group):
        quantizer = Quantizer(qcfg=config)
        quantizer.configure(perchannel=True)
        quantizer.find_params(weight[:, index == number].float(), weight=True)
        scales.append(quantizer.scale)
        zeros.append(quantizer.zero)
    layer = TorchLinear(
        bits=bits, group_size=group, sym=sym, desc_act=not ordered, in_features=columns,
        out_features=rows, bias=False,
    )  # fmt: skip
    layer.pack_original(linear(weight), torch.cat(scales, 1), torch.cat(zeros, 1), index)
    if form == "gptq":
        convert_gptq_v2_to_v1_format_module(layer, config)
    names = ("qweight", "qzeros", "scales", "g_idx")
    parts = {name: getattr(layer, name).clone() for name in names}
    if form == "gptq":
        convert_gptq_v1_to_v2_format_module(layer, bits, torch.int32)
    layer.post_init()
    return parts, layer.dequantize_weight().T.contiguous()


def checkpoint(folder: Path, encode: Any, config: Any, layers: int = 2) -> Tensors:
    """A Llama in float16, of which `encode` makes the parts and numbers of each linear layer, or
    None where it stays plain.
    """
    save(llama(num_hidden_layers=layers).half(), folder)
    out: Tensors = {}
    decoded: Tensors = {}
    for key, tensor in stored(folder).items():
        found = LINEAR.fullmatch(key)
        made = encode(found[1], tensor) if found else None
        if made is None:
            out[key] = decoded[key] = tensor
            continue
        parts, decoded[key] = made
        out |= {f"{key.removesuffix('weight')}{name}": part for name, part in parts.items()}
    rewrite(folder, out, quantization_config=config)
    return decoded


@maker("gptq-v1", "transformers", "gptqmodel")
def _(folder: Path) -> Tensors:
    """Four bits with zeros, columns in the order of their activations."""
    config = {
        "quant_method": "gptq", "checkpoint_format": "gptq", "bits": 4, "group_size": 32,
        "desc_act": True, "sym": False, "lm_head": False, "pack_dtype": "int32",
        "meta": {"quantizer": ["gptqmodel:7.7.0"]},
    }  # fmt: skip
    return checkpoint(folder, lambda _, w: gptq(w, "gptq", 4, 32, False, False), config)


@maker("gptq-v2-dynamic", "transformers", "gptqmodel")
def _(folder: Path) -> Tensors:
    """Three bits, but eight in `down_proj`, and `o_proj` of the first layer plain."""
    eight, plain = r"+:.*\.down_proj$", r"-:model\.layers\.0\.self_attn\.o_proj$"
    config = {
        "quant_method": "gptq", "checkpoint_format": "gptq_v2", "bits": 3, "group_size": 32,
        "desc_act": False, "sym": True, "lm_head": False, "pack_dtype": "int32",
        "dynamic": {eight: {"bits": 8, "group_size": 96}, plain: {}},
        "meta": {"quantizer": ["gptqmodel:7.7.0"]},
    }  # fmt: skip

    def encode(module: str, weight: torch.Tensor) -> Any:
        if module == "model.layers.0.self_attn.o_proj":
            return None
        if module.endswith("down_proj"):
            return gptq(weight, "gptq_v2", 8, 96, True, True)
        return gptq(weight, "gptq_v2", 3, 32, True, True)

    return checkpoint(folder, encode, config)


@maker("gptq-sym", "transformers", "gptqmodel")
def _(folder: Path) -> Tensors:
    """Four bits without zeros, columns in turn: what most checkpoints have."""
    config = {
        "quant_method": "gptq", "checkpoint_format": "gptq", "bits": 4, "group_size": 32,
        "desc_act": False, "sym": True, "lm_head": False, "pack_dtype": "int32",
        "meta": {"quantizer": ["gptqmodel:7.7.0"]},
    }  # fmt: skip
    return checkpoint(folder, lambda _, w: gptq(w, "gptq", 4, 32, True, True), config, layers=1)


def awq(folder: Path, form: str) -> Tensors:
    """Numbers are those of `gemm`, the only form that AutoAWQ decodes on a CPU."""
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.modules.linear.gemv import WQLinear_GEMV
    from awq.utils.packing_utils import dequantize_gemm

    for name in ("WQLinear_GEMM", "WQLinear_GEMV", "WQLinear_Marlin", "WQLinear_GEMVFast"):
        setattr(sys.modules["awq.modules.linear"], name, None)
    from awq.quantize.quantizer import AwqQuantizer

    quantizer = AwqQuantizer.__new__(AwqQuantizer)
    quantizer.w_bit, quantizer.group_size, quantizer.zero_point = 4, 32, True

    def encode(module: str, weight: torch.Tensor) -> Any:
        if module.endswith("layers.1.mlp.gate_proj"):
            return None
        pseudo, scales, zeros = quantizer.pseudo_quantize_tensor(weight.float())
        layer = gemm = WQLinear_GEMM.from_linear(
            linear(pseudo), 4, 32, scales=scales.T.contiguous(), zeros=zeros.T.contiguous()
        )
        if form == "gemv":
            layer = WQLinear_GEMV.from_linear(linear(pseudo), 4, 32, scales=scales, zeros=zeros)
        names = ("qweight", "qzeros", "scales")
        numbers = dequantize_gemm(*(getattr(gemm, name) for name in names), 4, 32)
        return {name: getattr(layer, name) for name in names}, numbers.T.contiguous()

    config = {
        "quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": form,
        "modules_to_not_convert": ["model.layers.1.mlp.gate_proj"],
    }  # fmt: skip
    return checkpoint(folder, encode, config)


for which in ("gemm", "gemv"):
    maker(f"awq-{which}", "transformers", "autoawq")(partial(awq, form=which))


if __name__ == "__main__":
    releases = prepare()
    ours = [name for name in MAKERS if name.startswith(("gptq-", "awq-"))]
    for made in sys.argv[3:] or ours:
        make(made, FOLDER, releases)
