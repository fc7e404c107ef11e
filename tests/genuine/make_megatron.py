"""Makes tiny Megatron runs by megatron-core itself, on a CPU, beside the transformers models that
they hold.

    make genuine-megatron [MEGATRON="llama qwen3"]

writes tests/data/megatron/FAMILY.tar.xz: `hf`, the model of transformers with its logits
(`logits.safetensors`), and `FORMAT-GRID`, each a run folder as Megatron's training script leaves
one; tests/megatron_runs.py has the grids. With `--out DIR` they are made as folders there, and
with `--digests` only those of four ranks are made, of which tests/data/megatron/tp4.json keeps
digests.

The weights go into megatron-core's model by a mapping of this program, and the logits of both
models are compared. Every grid but that of one rank is what megatron-core makes of the distributed
checkpoint of one rank, so the resharding is its own.

megatron-core expects a GPU; what asks for one and is not needed here is replaced. It saves by
processes that need psutil: without it they die, and the save waits for ever.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import numpy
import psutil  # noqa: F401  (without it a save never ends)
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from megatron_runs import ARCHIVES, FORMATS, GRIDS, OTHERS, RUNS, digest

VOCABULARY, DIVISIBLE = 20, 8
IDS = [[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5, 8, 9, 7, 9, 19]]
ITERATION = 10
# what is special about a grid
MORE: dict[str, dict[str, Any]] = {
    "pp2-uneven": {"decoder_first_pipeline_num_layers": 1},
    "tp2-singleton": {"singleton_local_shards": True},
    "ep2-singleton": {"singleton_local_shards": True},
    "1-layers": {"hetereogenous_dist_checkpoint": True},
    "1-optimizer": {"optimizer": True},
    "pp2-layout": {"pipeline_model_parallel_layout": "Et|tttL"},
    "1-grouped": {"moe_grouped_gemm": True},
    "tp2-grouped": {"moe_grouped_gemm": True},
    "ep2-grouped": {"moe_grouped_gemm": True},
    # its first layer has no experts, and is of no model of transformers here
    "1-mixed": {"moe_layer_freq": [0, 1, 1, 1]},
}


# ---- the models of transformers ------------------------------------------------------------------


def huggingface(family: str) -> Any:
    """The model with random weights of a fixed seed; no norm is all ones, no bias all zeros."""
    import transformers as hf

    said: dict[str, Any] = {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4,
        "vocab_size": VOCABULARY, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 64, "tie_word_embeddings": False, "rms_norm_eps": 1e-5,
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
        "attn_implementation": "eager", "dtype": "float32",
    }  # fmt: skip
    if family == "llama":
        model = hf.LlamaForCausalLM(hf.LlamaConfig(**said))
    elif family == "qwen2":
        said.update(rms_norm_eps=1e-6, tie_word_embeddings=True, rope_parameters=rope(1e6))
        model = hf.Qwen2ForCausalLM(hf.Qwen2Config(**said))
    elif family == "qwen3":
        said.update(rms_norm_eps=1e-6, tie_word_embeddings=True, head_dim=8)
        model = hf.Qwen3ForCausalLM(hf.Qwen3Config(**said, rope_parameters=rope(1e6)))
    elif family == "mixtral":
        said.update(num_local_experts=4, num_experts_per_tok=2, rope_parameters=rope(1e6))
        model = hf.MixtralForCausalLM(hf.MixtralConfig(**said, sliding_window=None))
    else:
        said.update(
            num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12, head_dim=8,
            norm_topk_prob=True, rms_norm_eps=1e-6, decoder_sparse_step=1, mlp_only_layers=[],
        )  # fmt: skip
        model = hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**said))
    dice = torch.Generator().manual_seed(21)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(torch.randn(weight.shape, generator=dice) * 0.1)
            if name.endswith("norm.weight"):
                weight += 1.0
    model.config.architectures = [type(model).__name__]
    return model.eval()


def rope(theta: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta}


def save_huggingface(family: str, folder: Path) -> None:
    """The model's folder, and the logits of `IDS` beside it."""
    torch.set_num_threads(1)
    model = huggingface(family)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    ids = torch.tensor(IDS)
    with torch.no_grad():
        logits = model(ids).logits
    save_file({"input_ids": ids, "logits": logits}, folder / "logits.safetensors")


# ---- megatron-core without a GPU -----------------------------------------------------------------


class NoStream:
    """Stands for a CUDA stream or event."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


def without_gpu() -> None:
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.synchronize = lambda *_, **__: None
    torch.cuda.Stream = torch.cuda.Event = NoStream
    torch.cuda.current_stream = NoStream
    torch.cuda.stream = lambda *_: contextlib.nullcontext()
    torch.Tensor.cuda = lambda self, *_, **__: self
    torch.tensor = on_cpu(torch.tensor)
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.moe import grouped_gemm_util, moe_utils

    CudaRNGStatesTracker.fork = lambda self, *_, **__: contextlib.nullcontext()
    moe_utils.te_general_gemm = None
    # weights that are never multiplied need no library that does it
    grouped_gemm_util.assert_grouped_gemm_is_available = lambda: None


def on_cpu(make: Any) -> Any:
    """The function, on the CPU where "cuda" is asked for."""

    def made(*given: Any, device: Any = None, **more: Any) -> Any:
        return make(*given, device=None if device == "cuda" else device, **more)

    return made


def padded(size: int, tp: int) -> int:
    step = DIVISIBLE * tp
    return -(-size // step) * step


def arguments(family: str, config: dict[str, Any], grid: str, form: str, rank: int) -> Any:
    """The namespace that Megatron's training script keeps, with the fields that say what the model
    is and a choice of the others.
    """
    from megatron.core.enums import ModelType
    from megatron.core.transformer.enums import AttnBackend

    tp, pp, vpp, ep = GRIDS[grid]
    more = MORE.get(grid, {})
    moe = config.get("num_local_experts") or config.get("num_experts")
    layers = config["num_hidden_layers"]
    heads = config["num_attention_heads"]
    ffn = config["intermediate_size"]
    parameters = config.get("rope_parameters") or {}
    return argparse.Namespace(
        num_layers=layers,
        encoder_num_layers=layers,
        hidden_size=config["hidden_size"],
        ffn_hidden_size=ffn,
        num_attention_heads=heads,
        attention_backend=AttnBackend.auto,
        kv_channels=config.get("head_dim") or config["hidden_size"] // heads,
        group_query_attention=True,
        num_query_groups=config["num_key_value_heads"],
        max_position_embeddings=config["max_position_embeddings"],
        position_embedding_type="rope",
        use_rotary_position_embeddings=False,
        rotary_base=int(parameters.get("rope_theta", 10000)),
        rotary_percent=1.0,
        rotary_interleaved=False,
        rotary_seq_len_interpolation_factor=None,
        use_rope_scaling=False,
        rope_scaling_factor=8.0,
        add_position_embedding=True,
        make_vocab_size_divisible_by=DIVISIBLE,
        normalization="RMSNorm",
        norm_epsilon=config["rms_norm_eps"],
        apply_layernorm_1p=False,
        apply_residual_connection_post_layernorm=False,
        squared_relu=False,
        swiglu=True,
        gated_linear_unit=True,
        onnx_safe=None,
        untie_embeddings_and_output_weights=not config["tie_word_embeddings"],
        multi_latent_attention=False,
        attention_output_gate=False,
        window_size=None,
        mtp_num_layers=None,
        heterogeneous_layers_config_path=None,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        weight_decay=0.1,
        clip_grad=1.0,
        micro_batch_size=1,
        global_batch_size=8,
        recompute_granularity=None,
        train_iters=100,
        exit_signal_handler=False,
        tensorboard_dir=None,
        add_bias_linear=False,
        add_qkv_bias=family == "qwen2",
        qk_layernorm=family in ("qwen3", "qwen3-moe"),
        qk_l2_norm=False,
        optimizer="adam",
        dataloader_type="single",
        seed=1234,
        init_method_std=0.02,
        lr=0.0003,
        min_lr=3e-05,
        lr_decay_style="cosine",
        save=f"checkpoints/{family}",
        load=None,
        save_interval=ITERATION,
        no_save_optim=None if more.get("optimizer") else True,
        no_save_rng=None,
        ckpt_format="torch" if form == "legacy" else "torch_dist",
        ckpt_fully_parallel_save=True,
        use_distributed_optimizer=False,
        use_dist_ckpt=form != "legacy",
        fp16=False,
        bf16=False,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        decoder_first_pipeline_num_layers=more.get("decoder_first_pipeline_num_layers"),
        decoder_last_pipeline_num_layers=None,
        pipeline_model_parallel_layout=layout_of(more, pp),
        account_for_embedding_in_pipeline_split=False,
        account_for_loss_in_pipeline_split=False,
        num_layers_per_virtual_pipeline_stage=layers // pp // vpp if vpp > 1 else None,
        num_virtual_stages_per_pipeline_rank=None,
        virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
        sequence_parallel=False,
        context_parallel_size=1,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=tp,
        data_path=[f"data/{family}_text_document"],
        split="969, 30, 1",
        seq_length=32,
        encoder_seq_length=32,
        vocab_size=None,
        tokenizer_type="NullTokenizer",
        tokenizer_model=None,
        num_experts=moe,
        moe_layer_freq=more.get("moe_layer_freq", 1),
        moe_ffn_hidden_size=(config.get("moe_intermediate_size") or ffn) if moe else None,
        moe_shared_expert_intermediate_size=None,
        moe_grouped_gemm=more.get("moe_grouped_gemm", False),
        moe_use_legacy_grouped_gemm=more.get("moe_grouped_gemm", False),
        moe_router_topk=config["num_experts_per_tok"] if moe else 2,
        moe_router_pre_softmax=False,
        moe_router_score_function="softmax",
        moe_router_enable_expert_bias=False,
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=0.001 if moe else 0.0,
        moe_token_dispatcher_type="allgather",
        transformer_impl="local",
        fp8=None,
        model_type=ModelType.encoder_or_decoder,
        params_dtype=torch.float32,
        rank=rank,
        local_rank=rank,
        world_size=tp * pp * ep,
        data_parallel_size=ep,
        consumed_train_samples=8 * ITERATION,
        consumed_valid_samples=0,
        padded_vocab_size=padded(VOCABULARY, tp),
        iteration=ITERATION,
    )


def layout_of(more: dict[str, Any], pp: int) -> Any:
    """What the training script makes of `--pipeline-model-parallel-layout`."""
    text = more.get("pipeline_model_parallel_layout")
    if text is None:
        return None
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    return PipelineParallelLayerLayout.from_str(text, pp)


def build(args: Any, grid: str) -> list[Any]:
    """The model of this rank, one for each virtual stage."""
    from megatron.core import parallel_state as mpu
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_layer_local_spec,
    )
    from megatron.core.transformer import TransformerConfig

    tp, pp, vpp, ep = GRIDS[grid]
    more = MORE.get(grid, {})
    uneven = args.decoder_first_pipeline_num_layers
    moe: dict[str, Any] = {}
    if args.num_experts:
        moe = {
            "num_moe_experts": args.num_experts,
            "moe_ffn_hidden_size": args.moe_ffn_hidden_size,
            "moe_router_topk": args.moe_router_topk,
            "moe_token_dispatcher_type": args.moe_token_dispatcher_type,
            "moe_aux_loss_coeff": args.moe_aux_loss_coeff,
            "moe_layer_freq": args.moe_layer_freq,
            "moe_grouped_gemm": args.moe_grouped_gemm,
            "moe_use_legacy_grouped_gemm": args.moe_use_legacy_grouped_gemm,
        }
    config = TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups,
        kv_channels=args.kv_channels,
        normalization=args.normalization,
        layernorm_epsilon=args.norm_epsilon,
        add_bias_linear=args.add_bias_linear,
        add_qkv_bias=args.add_qkv_bias,
        qk_layernorm=args.qk_layernorm,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=args.virtual_pipeline_model_parallel_size,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=tp,
        sequence_parallel=False,
        num_layers_in_first_pipeline_stage=uneven,
        pipeline_model_parallel_layout=args.pipeline_model_parallel_layout,
        hetereogenous_dist_checkpoint=more.get("hetereogenous_dist_checkpoint", False),
        pipeline_dtype=torch.float32,
        params_dtype=torch.float32,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        attention_softmax_in_fp32=True,
        **moe,
    )
    spec = get_gpt_layer_local_spec(
        num_experts=args.num_experts,
        moe_grouped_gemm=args.moe_grouped_gemm,
        moe_use_legacy_grouped_gemm=args.moe_use_legacy_grouped_gemm,
        qk_layernorm=args.qk_layernorm,
        normalization=args.normalization,
    )
    if args.moe_layer_freq != 1:
        spec = get_gpt_decoder_block_spec(config, False, args.normalization)
    stages = range(vpp) if vpp > 1 else [None]
    return [
        GPTModel(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=args.padded_vocab_size,
            max_sequence_length=args.max_position_embeddings,
            pre_process=mpu.is_pipeline_first_stage(ignore_virtual=stage is None, vp_stage=stage),
            post_process=mpu.is_pipeline_last_stage(ignore_virtual=stage is None, vp_stage=stage),
            parallel_output=False,
            share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
            position_embedding_type="rope",
            rotary_base=args.rotary_base,
            vp_stage=stage,
        ).eval()
        for stage in stages
    ]


def mapped(weights: dict[str, torch.Tensor], args: Any) -> dict[str, torch.Tensor]:
    """The weights of transformers under the names of megatron-core's model of one rank."""
    out: dict[str, torch.Tensor] = {}
    heads, groups, size = args.num_attention_heads, args.num_query_groups, args.kv_channels
    per = heads // groups

    def vocabulary(tensor: torch.Tensor, seed: int) -> torch.Tensor:
        rows = args.padded_vocab_size - len(tensor)
        dice = torch.Generator().manual_seed(seed)
        return torch.cat([tensor, torch.randn(rows, tensor.shape[1], generator=dice)])

    out["embedding.word_embeddings.weight"] = vocabulary(weights["model.embed_tokens.weight"], 1)
    out["decoder.final_layernorm.weight"] = weights["model.norm.weight"]
    if args.untie_embeddings_and_output_weights:
        out["output_layer.weight"] = vocabulary(weights["lm_head.weight"], 2)
    for layer in range(args.num_layers):
        old, new = f"model.layers.{layer}.", f"decoder.layers.{layer}."
        for leaf in ("weight", "bias") if args.add_qkv_bias else ("weight",):
            q, k, v = (weights[f"{old}self_attn.{one}_proj.{leaf}"] for one in "qkv")
            rows = []
            for group in range(groups):
                rows += [
                    q[group * per * size : (group + 1) * per * size],
                    k[group * size : (group + 1) * size],
                    v[group * size : (group + 1) * size],
                ]
            out[f"{new}self_attention.linear_qkv.{leaf}"] = torch.cat(rows)
        out[f"{new}self_attention.linear_proj.weight"] = weights[f"{old}self_attn.o_proj.weight"]
        out[f"{new}input_layernorm.weight"] = weights[f"{old}input_layernorm.weight"]
        out[f"{new}pre_mlp_layernorm.weight"] = weights[f"{old}post_attention_layernorm.weight"]
        if args.qk_layernorm:
            for one in "qk":
                norm = weights[f"{old}self_attn.{one}_norm.weight"]
                out[f"{new}self_attention.{one}_layernorm.weight"] = norm
        if not args.num_experts:
            gate, up, down = (
                weights[f"{old}mlp.{one}_proj.weight"] for one in ("gate", "up", "down")
            )
            out[f"{new}mlp.linear_fc1.weight"] = torch.cat([gate, up])
            out[f"{new}mlp.linear_fc2.weight"] = down
            continue
        mixtral = f"{old}block_sparse_moe.gate.weight" in weights
        block = f"{old}block_sparse_moe" if mixtral else f"{old}mlp"
        names = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
        out[f"{new}mlp.router.weight"] = weights[f"{block}.gate.weight"]
        for expert in range(args.num_experts):
            gate, up, down = (weights[f"{block}.experts.{expert}.{one}.weight"] for one in names)
            there = f"{new}mlp.experts.local_experts.{expert}"
            out[f"{there}.linear_fc1.weight"] = torch.cat([gate, up])
            out[f"{there}.linear_fc2.weight"] = down
    return out


# ---- saving --------------------------------------------------------------------------------------


def random_states(rank: int) -> list[dict[str, Any]]:
    """What the training script keeps of its generators; those of CUDA are of a fixed form."""
    random.seed(rank)
    numpy.random.seed(rank)
    torch.manual_seed(rank)
    cuda = torch.tensor([rank, *range(1, 16)], dtype=torch.uint8)
    return [
        {
            "random_rng_state": random.getstate(),
            "np_rng_state": numpy.random.get_state(),
            "torch_rng_state": torch.get_rng_state(),
            "cuda_rng_state": cuda,
            "rng_tracker_states": {"model-parallel-rng": cuda + 1, "data-parallel-rng": cuda + 2},
        }
    ]


def content(more: dict[str, Any]) -> dict[str, Any]:
    return {
        "singleton_local_shards": more.get("singleton_local_shards", False),
        "chained_optim_avoid_prefix": True,
    }


def sharded(models: list[Any], more: dict[str, Any]) -> dict[str, Any]:
    """The state of the models as megatron-core saves it in a distributed checkpoint."""
    single = len(models) == 1
    return {
        "model" if single else f"model{at}": model.sharded_state_dict(metadata=content(more))
        for at, model in enumerate(models)
    }


def trained(model: Any) -> Any:
    """An optimizer of the model behind one step, which leaves the weights as they were."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    model.ddp_config = DistributedDataParallelConfig()
    made = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=0.0003), [model])
    weights = [weight.detach().clone() for weight in model.parameters()]
    for weight in model.parameters():
        weight.grad = torch.randn_like(weight)
    for one in made.chained_optimizers:
        one.optimizer.step()
    with torch.no_grad():
        for weight, was in zip(model.parameters(), weights, strict=True):
            weight.copy_(was)
    return made


SCHEDULER = {"max_lr": 0.0003, "lr_warmup_steps": 0, "num_steps": 80, "lr_decay_style": "cosine"}


def write_legacy(models: list[Any], args: Any, run: Path, more: dict[str, Any]) -> None:
    """What `--ckpt-format torch` leaves of this rank."""
    from megatron.core import parallel_state as mpu

    if mpu.get_expert_data_parallel_rank():
        return
    name = f"mp_rank_{mpu.get_tensor_model_parallel_rank():02d}"
    if args.pipeline_model_parallel_size > 1:
        name += f"_{mpu.get_pipeline_model_parallel_rank():03d}"
    if args.expert_model_parallel_size > 1:
        name += f"_{mpu.get_expert_model_parallel_rank():03d}"
    state = {"args": args, "checkpoint_version": 3.0, "iteration": ITERATION}
    for at, model in enumerate(models):
        key = "model" if len(models) == 1 else f"model{at}"
        state[key] = model.state_dict_for_save_checkpoint()
    if more.get("optimizer"):
        state |= {"optimizer": trained(models[0]).state_dict(), "opt_param_scheduler": SCHEDULER}
    state["rng_state"] = random_states(args.rank)
    state["num_floating_point_operations_so_far"] = 123456789
    folder = run / f"iter_{ITERATION:07d}" / name
    folder.mkdir(parents=True)
    torch.save(state, folder / "model_optim_rng.pt")


def write_dist(models: list[Any], args: Any, run: Path, more: dict[str, Any]) -> None:
    """What `--ckpt-format torch_dist` leaves."""
    from megatron.core import dist_checkpointing
    from megatron.core import parallel_state as mpu
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    state = {"args": args, "checkpoint_version": 3.0, "iteration": ITERATION}
    state |= sharded(models, more)
    if more.get("optimizer"):
        moments = trained(models[0]).sharded_state_dict(sharded(models, more)["model"])
        state |= {"optimizer": moments, "opt_param_scheduler": SCHEDULER}
    state["rng_state"] = ShardedObject(
        "rng_state",
        random_states(args.rank),
        (args.pipeline_model_parallel_size, args.tensor_model_parallel_size),
        (mpu.get_pipeline_model_parallel_rank(), mpu.get_tensor_model_parallel_rank()),
        replica_id=mpu.get_data_parallel_rank(with_context_parallel=True),
    )
    state["num_floating_point_operations_so_far"] = 123456789
    folder = run / f"iter_{ITERATION:07d}"
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(
        state,
        str(folder),
        content_metadata=content(more),
        preprocess_common_before_consistancy_check=_without_rank,
    )


def _without_rank(common: dict[str, Any]) -> dict[str, Any]:
    args = argparse.Namespace(**vars(common["args"]))
    del args.rank, args.local_rank
    return {**common, "args": args}


def compare_logits(model: Any, folder: Path) -> str:
    """How the logits of megatron-core's model compare with those of transformers'."""
    held = load_file(folder / "logits.safetensors")
    ids, due = held["input_ids"], held["logits"]
    length = ids.shape[1]
    places = torch.arange(length).expand_as(ids)
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    with torch.no_grad():
        logits = model(ids, places, mask)[..., :VOCABULARY]
    off, most = (logits - due).abs().max().item(), due.abs().max().item()
    # one product of matrices for queries, keys and values adds up in another order than three do
    if off > 2e-6 or not torch.equal(logits.argmax(-1), due.argmax(-1)):
        sys.exit(f"{folder}: logits differ by {off}, up to {most}")
    return f"off by {off:.1e}, of up to {most:.2f}"


def work(rank: int, family: str, grid: str, forms: list[str], folder: Path, meeting: str) -> None:
    """One rank of a grid: reads the model, saves it in these formats."""
    torch.set_num_threads(1)
    without_gpu()
    from megatron.core import dist_checkpointing
    from megatron.core import parallel_state as mpu

    tp, pp, vpp, ep = GRIDS[grid]
    more = MORE.get(grid, {})
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=tp * pp * ep)
    mpu.initialize_model_parallel(
        tp, pp, vpp if vpp > 1 else None, expert_model_parallel_size=ep,
        expert_tensor_parallel_size=tp,
    )  # fmt: skip
    torch.manual_seed(1234)
    config = json.loads((folder / "hf" / "config.json").read_text())
    args = arguments(family, config, grid, forms[0], rank)
    models = build(args, grid)
    # that of the mixed grid stays as it was drawn
    if tp * pp * ep == 1 and not args.moe_grouped_gemm and "moe_layer_freq" not in more:
        weights = mapped(load_file(folder / "hf" / "model.safetensors"), args)
        known = models[0].state_dict()
        extra = {k: v for k, v in known.items() if k.endswith("_extra_state")}
        models[0].load_state_dict({**extra, **weights}, strict=True)
        print(family, "logits", compare_logits(models[0], folder / "hf"), flush=True)
    elif "moe_layer_freq" not in more:
        state = sharded(models, {})
        one = folder / "torch_dist-1" / f"iter_{ITERATION:07d}"
        read = dist_checkpointing.load(state, str(one))
        for at, model in enumerate(models):
            model.load_state_dict(read["model" if vpp == 1 else f"model{at}"], strict=True)
    for form in forms:
        args = arguments(family, config, grid, form, rank)
        run = folder / f"{form}-{grid}"
        if form == "legacy":
            write_legacy(models, args, run, more)
        else:
            write_dist(models, args, run, more)
        dist.barrier()
        if rank == 0:
            (run / "latest_checkpointed_iteration.txt").write_text(str(ITERATION))
    dist.barrier()
    dist.destroy_process_group()


def as_ranks(work: Any, args: tuple[Any, ...], count: int) -> None:
    """Runs `work(rank, *args)` for so many ranks, as forks of this process: importing megatron-core
    takes longer than all else that most of them do.
    """
    from megatron.core import dist_checkpointing, parallel_state  # noqa: F401
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs  # noqa: F401

    mp.start_processes(work, args, nprocs=count, start_method="fork")


def make(family: str, folder: Path, only: dict[str, list[str]] | None = None) -> None:
    """All run folders of a family, as `FORMAT-GRID`, and the model beside them; or `only` some."""
    if not (folder / "hf").exists():
        save_huggingface(family, folder / "hf")
    for grid in only or (*RUNS[family], *OTHERS.get(family, ())):
        tp, pp, _, ep = GRIDS[grid]
        forms = list(FORMATS if only is None else only[grid])
        # the other grids are made of this one
        forms.sort(key="torch_dist".__eq__, reverse=grid == "1")
        forms = [form for form in forms if not (folder / f"{form}-{grid}").exists()]
        if not forms:
            continue
        with tempfile.TemporaryDirectory() as there:
            meeting = f"file://{there}/meeting"
            as_ranks(work, (family, grid, forms, folder, meeting), tp * pp * ep)
        print(family, grid, *forms, flush=True)


def pack(folder: Path, archive: Path) -> None:
    """The folder as an archive that says neither when nor by whom it was made."""

    def plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = member.mtime = 0
        member.uname = member.gname = ""
        member.mode = 0o755 if member.isdir() else 0o644
        return member

    with tarfile.open(archive, "w:xz", preset=9) as out:
        for path in sorted(folder.rglob("*")):
            out.add(path, path.relative_to(folder), recursive=False, filter=plain)


def of_four(family: str) -> list[str]:
    """Digests of the parts of a model that megatron-core cuts for four ranks."""
    with tempfile.TemporaryDirectory() as there:
        make(family, Path(there), {"1": ["torch_dist"], "tp4": ["legacy"]})
        parts = sorted((Path(there) / "legacy-tp4").glob("*/mp_rank_*/model_optim_rng.pt"))
        return [digest(torch.load(part, weights_only=False)["model"]) for part in parts]


def main() -> None:
    asked = argparse.ArgumentParser()
    asked.add_argument("families", nargs="*", default=list(RUNS), choices=list(RUNS))
    asked.add_argument("--out", type=Path)
    asked.add_argument("--digests", action="store_true")
    said = asked.parse_args()
    if said.digests:
        found = {family: of_four(family) for family in said.families}
        (ARCHIVES / "tp4.json").write_text(json.dumps(found, indent=1) + "\n")
        return
    for family in said.families:
        if said.out is not None:
            make(family, said.out / family)
            continue
        with tempfile.TemporaryDirectory() as there:
            make(family, Path(there))
            pack(Path(there), ARCHIVES / f"{family}.tar.xz")


if __name__ == "__main__":
    main()
