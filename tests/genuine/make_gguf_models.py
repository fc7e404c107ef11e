"""Makes tiny GGUF files with gguf-py, and what gguf-py and transformers decode them to.

    python tests/genuine/make_gguf_models.py [NAME ...]

writes tests/data/genuine/NAME/model.gguf and NAME.json beside it. It needs transformers and gguf.

The models are transformers' own; names are those of gguf-py's table, and rows of q and k are put in
llama.cpp's order as convert_hf_to_gguf.py does, here written as the list of rows. gguf-py encodes
types with blocks of 32; those of 256 it only decodes, so that their blocks are random, with small
scales: what they stand for is then the model. What is decoded is asserted to be what transformers
itself reads from the file.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType as Type
from gguf_models import MODELS
from make_genuine import FOLDER, MAKERS, Tensors, make, maker, uneven
from transformers import AutoModelForCausalLM

TOKENS = ["<unk>", "<s>", "</s>", *(f"t{n}" for n in range(29))]
# ending of a tensor in each layer -> its type; all others are F32, as llama.cpp writes vectors
TYPES = {
    "gguf-llama": [
        {
            "token_embd": Type.Q4_K, "output": Type.Q6_K,
            "attn_q": Type.Q4_K, "attn_k": Type.Q5_K, "attn_v": Type.Q6_K, "attn_output": Type.Q8_0,
            "ffn_gate": Type.Q3_K, "ffn_up": Type.Q2_K, "ffn_down": Type.Q5_0,
        },
        {
            "attn_q": Type.Q8_0, "attn_k": Type.Q4_1, "attn_v": Type.BF16, "attn_output": Type.Q4_0,
            "ffn_gate": Type.Q4_1, "ffn_up": Type.Q5_1, "ffn_down": Type.MXFP4,
        },
    ],
    "gguf-mistral": [
        {
            "token_embd": Type.Q4_0, "output": Type.Q8_0, "attn_q": Type.Q5_1, "attn_k": Type.Q8_0,
            "attn_v": Type.Q5_0, "attn_output": Type.Q4_1, "ffn_gate": Type.Q4_0,
            "ffn_up": Type.F16, "ffn_down": Type.Q8_0,
        },
    ],
    "gguf-qwen2": [
        {
            "token_embd": Type.Q8_0, "attn_q": Type.Q4_0, "attn_k": Type.Q8_0, "attn_v": Type.F16,
            "attn_output": Type.Q5_1, "ffn_gate": Type.Q8_0, "ffn_up": Type.Q5_0,
            "ffn_down": Type.Q4_1,
        },
    ],
    "gguf-qwen3": [
        {
            "token_embd": Type.F16, "attn_q": Type.Q8_0, "attn_k": Type.BF16, "attn_v": Type.Q4_0,
            "attn_output": Type.Q8_0, "ffn_gate": Type.Q5_0, "ffn_up": Type.Q8_0,
            "ffn_down": Type.Q8_0,
        },
    ],
}  # fmt: skip
ARCHITECTURES = {
    "gguf-llama": gguf.MODEL_ARCH.LLAMA,
    "gguf-mistral": gguf.MODEL_ARCH.LLAMA,
    "gguf-qwen2": gguf.MODEL_ARCH.QWEN2,
    "gguf-qwen3": gguf.MODEL_ARCH.QWEN3,
}
# of a block: where its float16 scales are
_SCALES = {Type.Q2_K: (80, 82), Type.Q3_K: (108,), Type.Q4_K: (0, 2), Type.Q5_K: (0, 2),
           Type.Q6_K: (208,)}  # fmt: skip


def in_pairs(rows: int, heads: int) -> list[int]:
    """The rows of q or k in the order of llama.cpp: of each head those that are rotated together
    are neighbours; transformers has them half a head apart.
    """
    width = rows // heads
    half = width // 2
    return [
        head * width + second * half + pair
        for head in range(heads)
        for pair in range(half)
        for second in (0, 1)
    ]


def encoded(weight: np.ndarray, kind: Type, dice: np.random.Generator) -> np.ndarray:
    """The bytes of a tensor in a type, as gguf-py encodes it; random ones where it does not."""
    if kind not in _SCALES:
        return gguf.quantize(weight, kind)
    count, nbytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = dice.integers(
        0, 256, (*weight.shape[:-1], weight.shape[-1] // count, nbytes), np.uint8
    )
    for at in _SCALES[kind]:
        scale = (dice.random(blocks.shape[:-1]) * 2e-4 + 5e-5).astype("<f2")
        blocks[..., at : at + 2] = scale[..., None].view(np.uint8)
    return blocks.reshape(*weight.shape[:-1], -1)


def write(folder: Path, name: str) -> dict[str, tuple[str, Any]]:
    """Writes the file. GGUF's name of each tensor, and the order of its rows if that is changed."""
    kind, said = MODELS[name]
    config = getattr(transformers, kind.replace("ForCausalLM", "Config"))(**said)
    model = uneven(getattr(transformers, kind)(config)).float()
    architecture = ARCHITECTURES[name]
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    dice = np.random.default_rng(18)
    writer = gguf.GGUFWriter(folder / "model.gguf", gguf.MODEL_ARCH_NAMES[architecture])
    writer.add_name(f"tiny {name}")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(said["rope_theta"])
    if "head_dim" in said:
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if architecture == gguf.MODEL_ARCH.LLAMA:
        writer.add_rope_dimension_count(config.head_dim)
        writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(TOKENS)
    writer.add_token_scores([0.0] * len(TOKENS))
    writer.add_token_types([1] * len(TOKENS))
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    writer.add_chat_template("{{ messages }}")
    made: dict[str, tuple[str, Any]] = {}
    for key, weight in model.state_dict().items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        called = names.get_name(key, try_suffixes=(".weight", ".bias"))
        array, rows = weight.numpy(), None
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        module = key.split(".")[-2]
        if architecture == gguf.MODEL_ARCH.LLAMA and module in heads:
            rows = in_pairs(len(array), heads[module])
            array = array[rows]
        *_, tensor, ending = called.split(".")
        layer = int(key.split(".")[2]) if ".layers." in key else 0
        type_ = TYPES[name][layer].get(tensor, Type.F32) if ending == "weight" else Type.F32
        type_ = type_ if array.ndim > 1 else Type.F32
        if type_ == Type.F32:
            writer.add_tensor(called, np.ascontiguousarray(array))
        elif type_ == Type.F16:
            writer.add_tensor(called, array.astype(np.float16))
        else:
            writer.add_tensor(called, encoded(array, type_, dice), raw_dtype=type_)
        made[key] = called, rows
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return made


def decoded(folder: Path, made: Mapping[str, tuple[str, Any]]) -> Tensors:
    """What gguf-py makes of the file, in float32, under transformers' names and in its order."""
    reader = gguf.GGUFReader(folder / "model.gguf")
    held = {tensor.name: tensor for tensor in reader.tensors}
    assert len(held) == len(made)
    out: Tensors = {}
    for key, (name, rows) in made.items():
        array = gguf.dequantize(held[name].data, held[name].tensor_type).astype(np.float32)
        array = array.reshape(held[name].shape[::-1])
        if rows is not None:
            back = np.empty_like(array)
            back[rows] = array
            array = back
        out[key] = torch.from_numpy(array.copy())
    return out


def checkpoint(folder: Path, name: str) -> Tensors:
    made = decoded(folder, write(folder, name))
    # that of Qwen3 it does not ask the file for
    width = {"head_dim": MODELS[name][1]["head_dim"]} if name == "gguf-qwen3" else {}
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file="model.gguf", dtype=torch.float32, **width
    )
    theirs = model.state_dict()
    if model.config.tie_word_embeddings:
        del theirs["lm_head.weight"]
    assert theirs.keys() == made.keys(), theirs.keys() ^ made.keys()
    apart = [key for key in made if not torch.equal(theirs[key], made[key])]
    assert not apart, apart
    return {key: tensor.to(torch.bfloat16) for key, tensor in made.items()}


for one in MODELS:
    maker(one, "transformers", "gguf")(lambda folder, name=one: checkpoint(folder, name))


def main(names: list[str]) -> None:
    transformers.utils.logging.disable_progress_bar()
    for name in names or MODELS:
        make(name, FOLDER)


if __name__ == "__main__":
    assert MODELS.keys() <= MAKERS.keys()
    main(sys.argv[1:])
