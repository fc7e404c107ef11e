"""Cases that move tensors to other names, against upstream's own modules and patterns: which tensor
ends up under which name.
"""

from __future__ import annotations

import re
import warnings

import numpy as np
import torch
from torch import nn
from torch.nn.utils import parametrizations
from upstream import Example, Numbers, are_seen, comes_back, directions, goes_there


def arrays(state, prefix=""):
    return {f"{prefix}{key}": tensor.detach().numpy() for key, tensor in state.items()}


def numbered(module):
    """The module with parameters and buffers in which no number occurs twice."""
    number = Numbers()
    for tensor in [*module.parameters(), *module.buffers()]:
        if tensor.is_floating_point():
            tensor.data.copy_(torch.from_numpy(number(*tensor.shape)))
    return module


def wrappers():
    """The names DataParallel gives; the prefixes of torch/_dynamo/eval_frame.py,
    fsdp/_common_utils.py and _checkpoint/checkpoint_wrapper.py. A segment that only resembles one
    stays."""
    number = Numbers()
    inner = numbered(nn.Sequential(nn.Linear(3, 2)))
    source = arrays(nn.DataParallel(inner).state_dict())
    assert list(source) == ["module.0.weight", "module.0.bias"]
    target = arrays(inner.state_dict())
    for old, new in {
        "module._orig_mod.layers.0._fsdp_wrapped_module.w": "layers.0.w",
        "_fsdp_wrapped_module.layers.1._checkpoint_wrapped_module._orig_mod.w": "layers.1.w",
        "layers.2.submodule.w": "layers.2.submodule.w",
        "plain": "plain",
    }.items():
        source[old] = target[new] = number(2)
    return Example(
        "c01-wrappers",
        source,
        target,
        back=target,
        mistakes=(("_orig_mod: null, ", ""), ("module: null, ", "")),
    )


def densenet():
    """The pattern of torchvision/models/densenet.py::_load_state_dict joins its two groups; other
    keys stay.
    """
    number = Numbers()
    pattern = re.compile(
        r"(.*denselayer\d+\.(?:norm|relu|conv))\.((?:[12])\.(?:weight|bias|running_mean|running_var))"
    )
    names = [f"features.denseblock{b}.denselayer{n}" for b in (1, 2) for n in (1, 2, 12)]
    leaves = [
        f"norm.{i}.{leaf}"
        for i in (1, 2)
        for leaf in ("weight", "bias", "running_mean", "running_var")
    ] + [
        "conv.1.weight",
        "conv.2.weight",
    ]
    keys = [f"{name}.{leaf}" for name in names for leaf in leaves]
    keys += [
        "features.conv0.weight",
        "features.transition1.norm.weight",
        "features.norm5.weight",
        "classifier.1.weight",
    ]
    source = {key: number(2) for key in keys}
    target = {
        (m[1] + m[2] if (m := pattern.fullmatch(key)) else key): array
        for key, array in source.items()
    }
    return Example(
        "c02-densenet",
        source,
        target,
        mistakes=(
            ("{w:norm|relu|conv}.{i:1|2}", "{w:norm|relu|conv}.{i:1}"),
            ("{i:1|2}", "{i:2|3}"),
            ("{w}{i}", "{w}_{i}"),
        ),
    )


def vit_mlp():
    """torchvision/models/vision_transformer.py::MLPBlock is a Sequential of linear, activation,
    dropout, linear, dropout.
    """
    block = numbered(
        nn.Sequential(nn.Linear(3, 5), nn.GELU(), nn.Dropout(), nn.Linear(5, 3), nn.Dropout())
    )
    linears = [module for module in block if isinstance(module, nn.Linear)]
    source, target = {}, {}
    for layer in ("encoder.layers.0.mlp.", "encoder.layers.10.mlp."):
        target |= arrays(block.state_dict(), layer)
        for i, linear in enumerate(linears):
            source |= arrays(linear.state_dict(), f"{layer}linear_{i + 1}.")
    return Example(
        "c03-vit-mlp", source, target, mistakes=(("{3*i-3}", "{2*i-2}"), ("weight|bias", "weight"))
    )


def batch_norm():
    """torch/nn/modules/batchnorm.py adds the counter to a state of version 1; the dropped buffers
    are those that vLLM's ROTARY_EMBEDS_UNUSED_WEIGHTS and MLX's gpt2.py leave out."""
    number = Numbers()
    module = nn.ModuleDict({"bn": nn.BatchNorm1d(3), "counted": nn.BatchNorm1d(2)})
    old = {
        key: torch.from_numpy(number(*t.shape)) for key, t in module.state_dict().items() if t.ndim
    }
    old["counted.num_batches_tracked"] = torch.tensor(7)
    module.load_state_dict(old)
    source, target = arrays(old), arrays(module.state_dict())
    assert target["bn.num_batches_tracked"] == 0
    assert target["counted.num_batches_tracked"] == 7
    stays = {
        "h.0.attn.qkv.bias": number(3),
        "h.0.attn.bias_scale": number(2),
        "l.0.rotary_emb.scale": number(2),
    }
    goes = {
        key: number(2)
        for key in (
            "l.0.rotary_emb.inv_freq",
            "l.0.rotary_emb.cos_cached",
            "h.0.attn.bias",
            "h.11.attn.bias",
        )
    }
    return Example(
        "c04-batchnorm",
        source | stays | goes,
        target | stays,
        back=source | stays,
        mistakes=(
            ("{w:rotary_emb.inv_freq|rotary_emb.cos_cached|attn.bias}", "{w:zzz}"),
            ("rotary_emb.inv_freq|", ""),
            ("|attn.bias", ""),
            ("value: 0", "value: 1"),
            ("dtype: int64", "dtype: uint8"),
            ("shape: []", "shape: [1]"),
        ),
    )


def weight_norm():
    """torch/nn/utils/parametrizations.py::_weight_norm_compat_hook reads the old names; the new
    module computes the weight the old one did. The other spectral norm is named by its own
    state."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        old = numbered(nn.utils.weight_norm(nn.Conv1d(3, 5, 2)))
    new = parametrizations.weight_norm(nn.Conv1d(3, 5, 2))
    new.load_state_dict(old.state_dict())
    x = torch.ones(1, 3, 4)
    assert torch.equal(old(x), new(x))
    spectral = numbered(parametrizations.spectral_norm(nn.Linear(3, 5)))
    state = arrays(spectral.state_dict(), "sn.")
    del state[
        "sn.parametrizations.weight.0._v"
    ]  # states without a version had none: it is computed
    source = arrays(old.state_dict(), "conv.") | arrays(old.state_dict())
    source |= {
        "sn.weight_orig": spectral.parametrizations.weight.original.detach().numpy(),
        "sn.bias": state["sn.bias"],
    }
    source["sn.weight_u"] = spectral.parametrizations.weight[0]._u.numpy()
    return Example(
        "c05-weight-norm",
        source,
        arrays(new.state_dict(), "conv.") | arrays(new.state_dict()) | state,
        mistakes=(
            (
                'original0", v: "{m}.parametrizations.{n}.original1',
                'original1", v: "{m}.parametrizations.{n}.original0',
            ),
            ("{n}.0._u", "{n}.0._v"),
            ('{n}.original"', '{n}.original2"'),
            ('w: "{m...}.{n}_orig", u: "{m...}.{n}_u"', 'u: "{m...}.{n}_orig", w: "{m...}.{n}_u"'),
        ),
    )


def hybrid():
    """Megatron-LM tools/checkpoint/remap_gpt_dsa_to_mamba.py: attention of layer N to 2N, its MLP
    to 2N + 1.
    """
    number = Numbers()
    source, target = {}, {}
    for n in (0, 1, 2, 10):
        for at, names in (
            (
                2 * n,
                (
                    "input_layernorm.weight",
                    "self_attention.linear_qkv.weight",
                    "self_attention.linear_proj.bias",
                ),
            ),
            (
                2 * n + 1,
                (
                    "pre_mlp_layernorm.weight",
                    "mlp.linear_fc1.weight",
                    "mlp.experts.local_experts.3.linear_fc2.weight",
                ),
            ),
        ):
            for name in names:
                source[f"decoder.layers.{n}.{name}"] = target[f"decoder.layers.{at}.{name}"] = (
                    number(2)
                )
    source["decoder.final_layernorm.weight"] = target["decoder.final_norm.weight"] = number(2)
    source["embedding.word_embeddings.weight"] = target["embedding.word_embeddings.weight"] = (
        number(2)
    )
    return Example(
        "c12a-hybrid",
        source,
        target,
        mistakes=(
            ("layers.{2*n}.", "layers.{2*n+1}."),
            ("{2*n+1}", "{2*n}"),
            ("{2*n+1}", "{2*n+2}"),
            ("input_layernorm|", ""),
        ),
    )


def mtp():
    """torchtitan's deepseek_v3/state_dict_adapter.py: layer n at or past the number of layers is
    MTP layer n - layers.
    """
    number = Numbers()
    source, target = {"model.norm.weight": number(3)}, {}
    target |= source
    for n, name in enumerate(
        [f"model.layers.{n}" for n in range(3)] + ["mtp_layers.0", "mtp_layers.1"]
    ):
        for leaf in ("self_attn.q_proj.weight", "input_layernorm.weight"):
            source[f"model.layers.{n}.{leaf}"] = target[f"{name}.{leaf}"] = number(2)
    return Example(
        "c12b-mtp",
        source,
        target,
        {"layers": 3},
        mistakes=(("{n-$layers}", "{n-$layers+1}"), ("min: $layers", "min: $layers + 1")),
    )


def homogeneous():
    """Megatron-LM core/dist_checkpointing/gpt_checkpoint_interop.py: index n of the leading axis is
    decoder.layers.n, from 0.
    """
    number = Numbers()
    source, target = {"decoder.final_layernorm.weight": number(2)}, {}
    target |= source
    for name, shape in {
        "mlp.linear_fc1.weight": (12, 2, 3),
        "input_layernorm.weight": (12, 3),
        "self_attention.linear_qkv.weight": (12, 4, 3),
        "pre_mlp_layernorm.weight": (12, 3),
    }.items():
        source[f"decoder.layers.{name}"] = whole = number(*shape)
        for n in range(12):
            target[f"decoder.layers.{n}.{name}"] = whole[n]
    return Example(
        "c12c-homogeneous",
        source,
        target,
        mistakes=(
            ("into: n, dim: 0", "into: n, dim: 0, start: 1"),
            ("dim: 0", "dim: 1"),
            ("|mlp}", "}"),
        ),
    )


def pattern():
    """Megatron-LM tools/checkpoint/gpt_hybrid_conversion.py: the i-th attention layer stands where
    the i-th star stands, which is where a Sequential of such blocks numbers them."""
    block = {
        "M": nn.Identity,
        "-": nn.Identity,
        "*": lambda: nn.ModuleDict({"self_attention": nn.Linear(3, 2)}),
    }
    model = numbered(nn.Sequential(*(block[kind]() for kind in "M*-M*-")))
    attention = [module for module in model if isinstance(module, nn.ModuleDict)]
    source = {
        k: v
        for n, module in enumerate(attention)
        for k, v in arrays(module.state_dict(), f"decoder.layers.{n}.").items()
    }
    return Example(
        "c12d-pattern",
        source,
        arrays(model.state_dict(), "decoder.layers."),
        mistakes=(("{0: 1, 1: 4}", "{0: 4, 1: 1}"), ("{0: 1, 1: 4}", "{0: 1, 1: 3}")),
    )


def adam(grad):
    """The state torch.optim.AdamW keeps of one parameter after two steps along these gradients."""
    weight = nn.Parameter(torch.zeros(grad.shape))
    optimizer = torch.optim.AdamW([weight])
    for scale in (1, 3):
        weight.grad = grad * scale
        optimizer.step()
    return arrays(optimizer.state_dict()["state"][0])


def optimizer():
    """torch.optim.AdamW over the fused parameter whose gradient is that of [gate; up] (the halves
    SwiGLU chunks) keeps the moments of both; its integer ids count the parameters in the order of
    the model."""
    number = Numbers()
    source, target = {}, {}
    for layer in (0, 10):
        gate, up = (torch.from_numpy(number(4, 8)) for _ in range(2))
        for name, grad in (("gate", gate), ("up", up)):
            source |= {
                f"state.layers.{layer}.mlp.{name}_proj.weight.{k}": v for k, v in adam(grad).items()
            }
        target |= {
            f"state.layers.{layer}.mlp.fc1.weight.{k}": v
            for k, v in adam(torch.cat([gate, up])).items()
        }
    model = nn.ModuleDict({"embed": nn.Embedding(5, 3), "head": nn.Linear(3, 2, bias=False)})
    run = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.from_numpy(number(*parameter.shape))
    run.step()
    for at, (name, _) in enumerate(model.named_parameters()):
        state = arrays(run.state_dict()["state"][at])
        source |= {f"state.{at}.{k}": v for k, v in state.items()}
        target |= {f"state.{name}.{k}": v for k, v in state.items()}
    return Example(
        "c18-optimizer",
        source,
        target,
        mistakes=(
            ("{w:gate|up}", "{w:up|gate}"),
            ("concat: {over: w, dim: 0}", "concat: {over: w, dim: 1}"),
            ('to:   "state.{p}.mlp.fc1.weight.step"', 'to:   "state.{p}.mlp.fc1.weight.steps"'),
            ("{0: embed.weight, 1: head.weight}", "{0: head.weight, 1: embed.weight}"),
        ),
    )


class Shadows(nn.Module):
    """The buffers LitEma of CompVis latent-diffusion (ldm/modules/ema.py) registers: a name without
    its dots for each parameter.
    """

    def __init__(self, model, number):
        super().__init__()
        self.register_buffer("decay", torch.from_numpy(number()))
        self.register_buffer("num_updates", torch.tensor(7))
        self.twins = {name: name.replace(".", "") for name, _ in model.named_parameters()}
        for name, parameter in model.named_parameters():
            self.register_buffer(self.twins[name], torch.from_numpy(number(*parameter.shape)))


def ema():
    """A model with LitEma's buffers; a buffer of the model has no shadow."""
    number = Numbers()
    blocks = nn.ModuleList(
        [
            nn.Sequential(nn.Linear(3, 2)),
            nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4, affine=False)),
        ]
    )
    model = numbered(nn.ModuleDict({"diffusion_model": nn.ModuleDict({"input_blocks": blocks})}))
    shadows = Shadows(model, number)
    live, state = arrays(model.state_dict(), "model."), arrays(shadows.state_dict())
    target = live | {f"ema.{name}": state[twin] for name, twin in shadows.twins.items()}
    target |= {f"ema.{name}": state[name] for name in ("decay", "num_updates")}
    return Example(
        "c19-ema",
        live | {f"model_ema.{key}": array for key, array in state.items()},
        target,
        mistakes=(
            (
                'to:   {live: "model.{k}", ema: "ema.{k}"}',
                'to:   {ema: "model.{k}", live: "ema.{k}"}',
            ),
            ("{w:decay|num_updates}", "{w:decay}"),
            ('"ema.{w}"', '"ema.1.{w}"'),
        ),
    )


there, back = directions(
    wrappers,
    densenet,
    vit_mlp,
    batch_norm,
    weight_norm,
    hybrid,
    mtp,
    homogeneous,
    pattern,
    optimizer,
    ema,
)


@there
def test_each_tensor_arrives_under_the_name_upstream_gives_it(engine, example):
    goes_there(engine, example)


@back
def test_each_tensor_returns_to_the_name_it_had(engine, example):
    comes_back(engine, example)


@there
def test_a_mistake_in_the_names_is_seen(engine, example):
    are_seen(engine, example)


def test_the_numbers_of_an_example_occur_once():
    number = Numbers()
    drawn = np.concatenate([number(2, 3).ravel(), number(4), number()[None]])
    assert len(set(drawn.tolist())) == drawn.size == 11
