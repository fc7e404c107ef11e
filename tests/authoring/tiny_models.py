"""A small model for each entry of transformers' conversion mapping, with random weights.

The configuration of a class is taken with its defaults, and its numbers are made small by what they
are called. `SPECIAL` says what names do not tell.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from pathlib import Path
from typing import Any

HIDDEN, INNER, HEADS, GROUPS, HEAD, WORDS = 32, 24, 4, 2, 8, 96

# by the last part of a name; the first that fits, `...` for the number of layers, None to leave it
NAMES: tuple[tuple[str, Any], ...] = (
    ((r"^num_(local_|routed_)?experts$|^n_routed_experts$|^moe_num_experts$|"
        r"^num_experts_per_layer$|moe_n_routed"), "experts"),
    (r"n_group$|topk_group$|num_expert_groups?$|expert_group", 1),
    (r"experts_per_tok|moe_k$|moe_topk|top_k$|topk$|num_selected_experts", 2),
    (r"shared_experts$|num_shared", 1),
    ((r"^first_k_dense_replace$|^num_dense_layers$|moe_layer_start_index|"
        r"^n_dense|first_k_dense"), 1),
    (r"moe_layer_end_index", None),
    (r"vocab_size$|vocab_size_per_layer_input$|^n_vocab$", WORDS),
    (r"_token_id$|_token_index$|_token_ids$|_id$|_ids$|pad_index$", 1),
    (r"nextn_predict|mtp_num|num_mtp", 0),
    ((r"^(num_hidden_layers|num_layers|n_layers?|encoder_layers|"
        r"decoder_layers|num_encoder_layers|num_decoder_layers|depth|num_blocks|"
        r"n_blocks|num_hidden_layers_.*|.*_num_hidden_layers|.*num_layers|"
        r"text_layers|vision_layers)$"), "layers"),
    ((r"(num_key_value_heads|num_kv_heads|n_kv_heads|multi_query_group_num|"
        r"kv_heads)"), GROUPS),
    (r"(num_attention_heads|num_heads|n_head|n_heads|attention_heads|heads)$", HEADS),
    ((r"^(qk_nope_head_dim|qk_rope_head_dim|v_head_dim|head_dim|"
        r"attention_head_dim|kv_channels|.*head_dim|.*head_size)$"), HEAD),
    (r"q_lora_rank|kv_lora_rank|.*_rank$", 16),
    ((r"(intermediate_size|ffn_dim|inner_dim|n_inner|ffn_hidden_size|"
        r"intermediate_dim|dim_feedforward|mlp_dim|feedforward_dim|intermediate|"
        r"mlp_hidden)"), INNER),
    (r"hidden_dim$", HIDDEN),
    ((r"^(hidden_size|d_model|embed_dim|n_embd|dim|embedding_size|"
        r"projection_dim|hidden_size_.*|.*hidden_size|.*embed_dim|"
        r".*embedding_dim|.*_width|width|embedding_dim|d_embed|.*_dim)$"), HIDDEN),
    (r"^(image_size|img_size)$", 32),
    ((r"^(max_position_embeddings|n_positions|max_seq_len|"
        r"max_source_positions|max_target_positions|context_length|n_ctx|"
        r".*max_position.*)$"), 64),
    (r"num_queries|num_query_tokens", 8),
    (r"^(patch_size)$", 8),
)  # fmt: skip

# a small backbone in place of one of timm, which is not installed
_RESNET = {
    "use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None,
    "backbone_config": {
        "model_type": "resnet", "embedding_size": 32, "hidden_sizes": [32, 32, 32, 32],
        "depths": [1, 1, 1, 1], "out_features": ["stage2", "stage3", "stage4"],
    },
}  # fmt: skip
_SWIN = {"depths": [1, 1, 1, 1], "num_heads": [2, 2, 2, 2], "num_layers": 4, "hidden_size": 256}
_ALL_HEADS = {"num_key_value_heads": HEADS}


def _linear(kinds: str, last: str) -> Any:
    return lambda layers, experts: [kinds] * (layers - 1) + [last]


_DOTS = _ALL_HEADS | {
    "layer_types": lambda layers, experts: (["indexed_attention"] * 2 + ["sliding_attention"])[
        :layers
    ],
    "per_layer_config": lambda layers, experts: (
        {
            2: {
                "num_attention_heads": HEADS,
                "num_key_value_heads": HEADS,
                "kv_lora_rank": 16,
                "qk_nope_head_dim": HEAD,
                "head_dim": 2 * HEAD,
            }
        }
        if layers > 2
        else {}
    ),
}

# by model type: what the names of fields do not tell
SPECIAL: dict[str, dict[str, Any]] = {
    "aria": {
        "text_config": {"pad_token_id": 1},
        "vision_config": {"model_type": "idefics3_vision"},
    },
    "beit": {
        "out_indices": [1, 2, 3, 4],
        "num_hidden_layers": lambda layers, experts: layers + 2,
    },
    "conditional_detr": _RESNET | {"encoder_attention_heads": 8, "decoder_attention_heads": 8},
    "cosmos3_edge": {"text_config": {"rope_parameters": {"mrope_section": [2, 1, 1]}}},
    "deepseek_ocr2": {
        "text_config": {"num_experts_per_tok": 2, "mlp_layer_types": _linear("dense", "sparse")}
    },
    "deformable_detr": _RESNET,
    "detr": _RESNET | {"encoder_attention_heads": 8, "decoder_attention_heads": 8},
    "dots1": {
        "n_routed_experts": lambda layers, experts: experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
    },
    "d_fine": {
        "backbone_config": {"out_features": ["stage2", "stage3", "stage4"]},
        "encode_proj_layers": [1, 2],
        "encoder_layers": lambda layers, experts: layers,
    },
    "dots3_note": {"text_config": _DOTS, "audio_config": {"adapter_input_size": HIDDEN}},
    "dots3_note_text": _DOTS,
    "dots3_note_audio_encoder": {"adapter_input_size": HIDDEN},
    "emu3": {"vocabulary_map": {"<image>": 1}},
    "ernie4_5_vl_moe": {"text_config": {"rope_parameters": {"mrope_section": [1, 1, 2]}}},
    "esm": {
        "vocab_size": WORDS,
        "pad_token_id": 1,
        "mask_token_id": 2,
        "position_embedding_type": "rotary",
    },
    "flint": {"mlp_only_layers": [0]},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "glm5_next": {"text_config": _ALL_HEADS | {"index_topk": 16}},
    "glm5_next_text": _ALL_HEADS | {"index_topk": 16},
    "gradium_phonon_tts": _ALL_HEADS,
    "inkling2": {"quantization_config": None},
    "inkling_mm_model": {
        "text_config": {"mlp_layer_types": _linear("dense", "sparse")},
        # with fewer it needs scipy
        "vision_config": {"n_layers": lambda layers, experts: layers + 4},
    },
    "t5gemma2_encoder": {"text_config": {"dropout_rate": 0.0}},
    "jev": {"text_config": {"tie_word_embeddings": False}},
    "granitemoehybrid": {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8},
    "hunyuan_v1_moe": {
        "head_dim": HEAD,
        "num_experts": lambda layers, experts: experts,
        "moe_topk": 2,
    },
    "hunyuan_vl": {"text_config": {"head_dim": HEAD}},
    "lfm2_moe": {"layer_types": _linear("conv", "full_attention")},
    "longcat_flash": {"zero_expert_num": 2},
    "lw_detr": {
        "backbone_config": {
            "image_size": 64,
            "num_windows": 4,
            "num_windows_side": 2,
            "out_features": ["stage1", "stage2"],
        }
    },
    "maskformer": {"backbone_config": _SWIN, "decoder_config": _RESNET},
    "mimi": {
        "upsample_groups": HIDDEN,
        "num_filters": 4,
        "vector_quantization_hidden_dimension": 16,
        "codebook_size": 16,
        "num_quantizers": 4,
    },
    "mimi_decoder": {"upsample_groups": HIDDEN},
    "mistral_large4": {
        "text_config": {"kv_source_layers": lambda layers, experts: [*range(layers)]}
    },
    "mistral_large4_text": {"kv_source_layers": lambda layers, experts: [*range(layers)]},
    "molmo2": {"adapter_config": {"vision_feature_layer": [1, 0]}},
    "nemo_speechlm": {"*": _ALL_HEADS},
    "qwen3_omni_moe": {
        "talker_config": {
            "spatial_merge_size": 2,
            "text_config": {"shared_expert_intermediate_size": INNER},
        }
    },
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": HEAD,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
        "ple_layer_ids": [1],
        "split_ngram_parts": 4,
        "ngram_vocab_size_base": 64,
        "eos_token_id": 1,
        "make_ngram_vocab_size_divisible_by": 4,
        "hc_lowrank": 8,
    },
    "sapiens2": {
        "out_features": ["stage2"],
        "head_config": {
            "upsample_out_channels": [8],
            "upsample_kernel_sizes": [4],
            "conv_out_channels": [8],
            "conv_kernel_sizes": [1],
            "scale_conv_out_channels": [8],
            "scale_conv_kernel_sizes": [1],
            "scale_final_input_size": 32,
            "scale_final_hidden_sizes": [8, 8],
        },
    },
    "swin": _SWIN,
    "vibevoice_asr": {"*": {"num_filters": 2}},
}


AS_THEY_ARE = ("rope_scaling", "rope_parameters", "id2label", "label2id")


def shrunk(values: dict[str, Any], layers: int, experts: int) -> dict[str, Any]:
    """The settings with small numbers."""
    out: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict) and name not in (
            "rope_scaling",
            "rope_parameters",
            "id2label",
            "label2id",
        ):
            out[name] = shrunk(value, layers, experts)
        else:
            out[name] = _small(name, value, layers, experts)
    for name in ("out_features", "_out_features", "stage_names", "out_indices", "_out_indices"):
        out.pop(name, None)
    if isinstance(plan := out.get("per_layer_config"), dict):
        out["per_layer_config"] = {n: v for n, v in plan.items() if int(n) < layers}
    lengths = {
        value for name, value in values.items()
        if isinstance(value, int) and not isinstance(value, bool) and _wanted(name) == "layers"
    }  # fmt: skip
    for name, value in out.items():
        if isinstance(value, list) and len(value) in lengths and len(value) > layers:
            out[name] = value[: layers - 1] + value[-1:]
    return out


def _wanted(name: str) -> Any:
    return next((small for pattern, small in NAMES if re.search(pattern, str(name))), None)


def _small(name: str, value: Any, layers: int, experts: int) -> Any:
    small = _wanted(name)
    if isinstance(value, bool) or small is None:
        return value
    small = {"layers": layers, "experts": experts}.get(small, small)
    if isinstance(value, int):
        return min(value, small) if value > 0 or small == 0 else value
    if (
        isinstance(value, list)
        and value
        and all(isinstance(v, int) and not isinstance(v, bool) for v in value)
    ):
        if small == 1:
            return value if max(value) < WORDS else [min(v, i + 1) for i, v in enumerate(value)]
        return [min(v, small) for v in value]
    return value


@functools.cache
def _sources() -> dict[str, tuple[str, str]]:
    """Class -> (module, the class it is made of, as written), of all models of transformers."""
    import transformers.models

    found: dict[str, tuple[str, str]] = {}
    for file in sorted(Path(transformers.models.__path__[0]).glob("*/modeling_*.py")):
        module = f"transformers.models.{file.parent.name}.{file.stem}"
        for name, base in re.findall(
            r"^class (\w+)\(([^)]*)\):", file.read_text("utf-8"), re.MULTILINE
        ):
            found.setdefault(name, (module, base))
    return found


def entries() -> list[str]:
    """The entries of the conversion mapping, but for what is added to all."""
    from transformers.conversion_mapping import _build_checkpoint_conversion_mapping

    return sorted(set(_build_checkpoint_conversion_mapping()) - {"legacy"})


HEADS_FIRST = (
    "ForCausalLM", "ForConditionalGeneration", "ForMaskedLM", "ForPreTraining",
    "ForImageTextToText", "ForObjectDetection", "ForImageClassification", "ForCTC", "LMHeadModel",
    "ForSpeechSeq2Seq", "ForSequenceClassification", "ForUniversalSegmentation", "Model",
    "ForInstanceSegmentation", "PreTrainedModel",
)  # fmt: skip


def class_of(entry: str) -> Any:
    """A class that the entry is for: itself, or the fullest of the model type."""
    if entry in _sources():
        return getattr(importlib.import_module(_sources()[entry][0]), entry)
    held = classes_of(entry)
    for ending in HEADS_FIRST:
        for value in held:
            if value.__name__.endswith(ending):
                return value
    if held:
        return held[0]
    raise LookupError("no class of the library has this model type")


def classes_of(entry: str) -> list[Any]:
    """The classes of a model type, in the order of their module."""
    from transformers import PreTrainedModel
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if entry not in CONFIG_MAPPING:
        raise LookupError("neither a class nor a model type of this name is in the library")
    configuration = CONFIG_MAPPING[entry]
    home = configuration.__module__.replace("configuration_", "modeling_")
    if importlib.util.find_spec(home) is None:
        from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

        return [MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[configuration]]
    module = importlib.import_module(home)
    return [
        value for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, PreTrainedModel)
        and value.__module__ == home and "PreTrained" not in value.__name__
        and getattr(value, "config_class", None) is configuration
    ]  # fmt: skip


def configuration(entry: str, cls: Any, layers: int = 2, experts: int = 4) -> Any:
    """A small configuration of the class."""
    values = cls.config_class().to_dict()
    values = shrunk(values, layers, experts)
    _merge(values, SPECIAL.get(cls.config_class.model_type, {}), layers, experts)
    values.pop("transformers_version", None)
    config = cls.config_class.from_dict(values)
    config.architectures = [cls.__name__]
    return config


def _merge(values: dict[str, Any], more: dict[str, Any], layers: int, experts: int) -> None:
    for name, value in more.items():
        if name == "*":
            _everywhere(values, value)
            continue
        if callable(value):
            value = value(layers, experts)
        if isinstance(value, dict) and isinstance(values.get(name), dict):
            _merge(values[name], value, layers, experts)
        else:
            values[name] = value


def _everywhere(values: dict[str, Any], more: dict[str, Any]) -> None:
    for name, value in values.items():
        if isinstance(value, dict):
            _everywhere(value, more)
        elif name in more:
            values[name] = more[name]


def model(cls: Any, config: Any, seed: int = 0) -> Any:
    """The class with random numbers everywhere."""
    import torch

    made = cls(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in {id(t): t for t in made.state_dict(keep_vars=True).values()}.values():
            if tensor.is_floating_point():
                tensor.data.copy_(torch.randn(tensor.shape, generator=generator))
    return made.eval()
