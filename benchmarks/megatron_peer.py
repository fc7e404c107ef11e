"""What megatron-core does with a run: its own distributed checkpoint read into its model on a CPU,
and the model of transformers saved. Run by the interpreter of `make .venv-megatron/.ready`.

    megatron_peer.py save RUN OUT      the parts of a legacy run of one rank, as torch_dist
    megatron_peer.py convert RUN OUT   torch_dist, to a folder of transformers
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "tests"), str(HERE.parent / "tests" / "genuine")]
from make_megatron import content, sharded, without_gpu  # noqa: E402

ITERATION = "iter_0000010"


def build(args: Any) -> Any:
    """The model of one rank on a CPU."""
    from megatron.core import parallel_state as mpu
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mpu.initialize_model_parallel()
    config = TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups,
        kv_channels=args.kv_channels,
        normalization="RMSNorm",
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        use_cpu_initialization=True,
        # nothing that is loaded over is drawn first
        perform_initialization=False,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
    )
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        position_embedding_type="rope",
        rotary_base=args.rotary_base,
        parallel_output=False,
        share_embeddings_and_output_weights=False,
    ).bfloat16()


def save(run: Path, out: Path) -> None:
    from megatron.core import dist_checkpointing

    file = run / ITERATION / "mp_rank_00" / "model_optim_rng.pt"
    held = torch.load(file, weights_only=False, mmap=True)
    model = build(held["args"])
    model.load_state_dict(held["model"], strict=True)
    folder = out / ITERATION
    folder.mkdir(parents=True)
    state = {name: held[name] for name in ("args", "checkpoint_version", "iteration")}
    dist_checkpointing.save(
        {**state, **sharded([model], {})}, str(folder), content_metadata=content({})
    )
    (out / "latest_checkpointed_iteration.txt").write_text(str(held["iteration"]))


def convert(run: Path, out: Path) -> None:
    import transformers as hf
    from megatron.core import dist_checkpointing

    folder = str(run / ITERATION)
    args = dist_checkpointing.load_common_state_dict(folder)["args"]
    model = build(args)
    model.load_state_dict(
        dist_checkpointing.load(sharded([model], {}), folder)["model"], strict=True
    )
    config = hf.LlamaConfig(
        vocab_size=args.padded_vocab_size,
        hidden_size=args.hidden_size,
        intermediate_size=args.ffn_hidden_size,
        num_hidden_layers=args.num_layers,
        num_attention_heads=args.num_attention_heads,
        num_key_value_heads=args.num_query_groups,
        max_position_embeddings=args.max_position_embeddings,
        rms_norm_eps=args.norm_epsilon,
        dtype="bfloat16",
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        made = hf.LlamaForCausalLM(config)
    made.load_state_dict(renamed(model.state_dict(), args), strict=True, assign=True)
    made.save_pretrained(out)


def renamed(state: dict[str, Any], args: Any) -> dict[str, torch.Tensor]:
    """The weights under the names of transformers."""
    groups, size = args.num_query_groups, args.kv_channels
    per = args.num_attention_heads // groups
    out = {
        "model.embed_tokens.weight": state["embedding.word_embeddings.weight"],
        "model.norm.weight": state["decoder.final_layernorm.weight"],
        "lm_head.weight": state["output_layer.weight"],
    }
    for n in range(args.num_layers):
        old, new = f"decoder.layers.{n}.", f"model.layers.{n}."
        qkv = state[f"{old}self_attention.linear_qkv.weight"]
        rows = qkv.view(groups, (per + 2) * size, -1).split([per * size, size, size], 1)
        for one, held in zip("qkv", rows, strict=True):
            out[f"{new}self_attn.{one}_proj.weight"] = held.reshape(-1, held.shape[-1])
        gate, up = state[f"{old}mlp.linear_fc1.weight"].chunk(2)
        out |= {
            f"{new}self_attn.o_proj.weight": state[f"{old}self_attention.linear_proj.weight"],
            f"{new}mlp.gate_proj.weight": gate.contiguous(),
            f"{new}mlp.up_proj.weight": up.contiguous(),
            f"{new}mlp.down_proj.weight": state[f"{old}mlp.linear_fc2.weight"],
            f"{new}input_layernorm.weight": state[f"{old}input_layernorm.weight"],
            f"{new}post_attention_layernorm.weight": state[f"{old}pre_mlp_layernorm.weight"],
        }
    return out


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    without_gpu()
    {"save": save, "convert": convert}[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
