"""What libraries convert a folder with, where they do what a pack does.

    folder_peers.py NAME SOURCE TARGET [GPTQMODEL]

NAME is a function of this module. GPTQMODEL is the unpacked sdist of GPTQModel, of which one module
is used (see tests/genuine/run_gptqmodel.py).
"""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

# modules that stay plain
PLAIN = ["lm_head", "re:.*embed_tokens$", "re:.*norm$", "re:.*kv_a_proj_with_mqa$"]


def _convert(source: str, target: str, converter: Any) -> None:
    from compressed_tensors.entrypoints.convert import convert_checkpoint

    convert_checkpoint(source, target, converter)


def fp8_blocks(source: str, target: str) -> None:
    from compressed_tensors.entrypoints.convert import FP8BlockDequantizer

    _convert(source, target, FP8BlockDequantizer(targets=[r"re:.*_proj(_with_mqa)?$"]))


def compressed_tensors(source: str, target: str) -> None:
    from compressed_tensors.entrypoints.convert import CompressedTensorsDequantizer

    _convert(source, target, CompressedTensorsDequantizer(source, ignore=PLAIN))


def nvfp4(source: str, target: str) -> None:
    from compressed_tensors.entrypoints.convert import ModelOptNvfp4Converter

    _convert(source, target, ModelOptNvfp4Converter(targets=[r"re:.*_proj$"]))


def gptqmodel(source: str, target: str, folder: str) -> None:
    for name in ("gptqmodel", "gptqmodel.quantization", "gptqmodel.nn_modules"):
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = [str(Path(folder, *name.split(".")))]
    dequantize = importlib.import_module("gptqmodel.utils.model_dequant").dequantize_model
    half = re.search("awq|gptq", Path(source).name)
    dequantize(source, target, target_dtype=torch.float16 if half else torch.bfloat16)


if __name__ == "__main__":
    torch.set_num_threads(2)
    {f.__name__: f for f in (fp8_blocks, compressed_tensors, nvfp4, gptqmodel)}[sys.argv[1]](
        *sys.argv[2:]
    )
