"""The tiny models that `make_gguf_models.py` stores: their class and configuration, with which a
test builds them again without a look at what was written.
"""

from __future__ import annotations

from typing import Any

_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 64}
# name of the folder -> class of transformers, its configuration
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    # rows of 256 numbers, so that types with blocks of 256 fit
    "gguf-llama": (
        "LlamaForCausalLM",
        {
            "hidden_size": 256, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 32,
            "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
            "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False, **_TOKENS,
        },
    ),
    # llama.cpp has no architecture of its own for it
    "gguf-mistral": (
        "MistralForCausalLM",
        {
            "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 32,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
            "rms_norm_eps": 1e-5, "rope_theta": 1000000.0, "tie_word_embeddings": False, **_TOKENS,
        },
    ),
    "gguf-qwen2": (
        "Qwen2ForCausalLM",
        {
            "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 32,
            "num_attention_heads": 2, "num_key_value_heads": 1, "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0, "tie_word_embeddings": True, **_TOKENS,
        },
    ),
    "gguf-qwen3": (
        "Qwen3ForCausalLM",
        {
            "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 32,
            "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
            "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "tie_word_embeddings": True, **_TOKENS,
        },
    ),
}  # fmt: skip
