"""Cases that move values inside tensors or between them, against upstream's arithmetic written out
in numpy.
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np
from upstream import Example, Numbers, are_seen, comes_back, directions, goes_there


def joined(*parts, axis=0):
    return np.concatenate(parts, axis)


def gpt2():
    """transformers/pytorch_utils.py::Conv1D holds [in, out] and adds x @ weight; a Linear holds
    [out, in]. mlx_lm/models/gpt2.py::sanitize transposes the four of a block and leaves the masks
    out."""
    number = Numbers()
    source = {"wte.weight": number(7, 4), "wpe.weight": number(5, 4), "ln_f.weight": number(4)}
    for n in (0, 11):
        shapes = {
            "attn.c_attn": (4, 12),
            "attn.c_proj": (4, 4),
            "mlp.c_fc": (4, 16),
            "mlp.c_proj": (16, 4),
        }
        for name, (nx, nf) in shapes.items():
            source |= {f"h.{n}.{name}.weight": number(nx, nf), f"h.{n}.{name}.bias": number(nf)}
        source |= {f"h.{n}.ln_1.weight": number(4), f"h.{n}.ln_2.bias": number(4)}
    target = {}
    for key, array in source.items():
        conv = key.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
        target[f"transformer.{key}"] = array.T if conv else array
    masks = {
        f"h.{n}.attn.{name}": number(1, 1, 5, 5)
        for n in (0, 11)
        for name in ("bias", "masked_bias")
    }
    return Example(
        "c06-gpt2",
        source | masks,
        target,
        back=source,
        mistakes=(
            ("|mlp.c_fc|mlp.c_proj", ""),
            ("attn.c_attn|", ""),
            ("|attn.c_proj", ""),
            ("|masked_bias", ""),
        ),
    )


def embedding():
    """Megatron-Bridge model_bridge.py::_truncate_vocab_padding keeps the first rows; the head of a
    tied model is the embedding.
    """
    number = Numbers()
    padded, norm = number(8, 3), number(3)
    padded[6:] = 0
    source = {"embedding.word_embeddings.weight": padded, "decoder.final_layernorm.weight": norm}
    target = {
        "model.embed_tokens.weight": padded[:6],
        "lm_head.weight": padded[:6],
        "decoder.final_layernorm.weight": norm,
    }
    return Example(
        "c07-megatron-embedding",
        source,
        target,
        {"vocab": 6, "padded": 8},
        mistakes=(("lm_head.weight", "head.weight"),),
    )


def meta_llama(generation):
    """transformers models/llama/convert_llama_weights_to_hf.py: `permute` and the axes along which
    shards are joined; the embedding by columns before version 3, by rows from then on."""
    heads, kv, d, hidden, inner, vocab, tp = 4, 2, 4, 6, 10, 14, 2
    number = Numbers()

    def permute(w, n):
        return (
            w.reshape(n, w.shape[0] // n // 2, 2, w.shape[1]).transpose(0, 2, 1, 3).reshape(w.shape)
        )

    source = {f"rope.freqs@{r}": number(2) for r in range(tp)}
    target = {}

    def put(old, new, whole, axis, make=lambda w: w):
        parts = [whole] * tp if axis is None else np.split(whole, tp, axis)
        source.update({f"{old}.weight@{r}": part for r, part in enumerate(parts)})
        target[f"{new}.weight"] = make(whole)

    for n in (0, 1):
        old, new = f"layers.{n}.", f"model.layers.{n}."
        put(
            f"{old}attention.wq",
            f"{new}self_attn.q_proj",
            number(heads * d, hidden),
            0,
            partial(permute, n=heads),
        )
        put(
            f"{old}attention.wk",
            f"{new}self_attn.k_proj",
            number(kv * d, hidden),
            0,
            partial(permute, n=kv),
        )
        put(f"{old}attention.wv", f"{new}self_attn.v_proj", number(kv * d, hidden), 0)
        put(f"{old}attention.wo", f"{new}self_attn.o_proj", number(hidden, heads * d), 1)
        put(f"{old}feed_forward.w1", f"{new}mlp.gate_proj", number(inner, hidden), 0)
        put(f"{old}feed_forward.w2", f"{new}mlp.down_proj", number(hidden, inner), 1)
        put(f"{old}feed_forward.w3", f"{new}mlp.up_proj", number(inner, hidden), 0)
        put(f"{old}attention_norm", f"{new}input_layernorm", number(hidden), None)
        put(f"{old}ffn_norm", f"{new}post_attention_layernorm", number(hidden), None)
    put("norm", "model.norm", number(hidden), None)
    put("output", "lm_head", number(vocab, hidden), 0)
    put("tok_embeddings", "model.embed_tokens", number(vocab, hidden), 0 if generation == 3 else 1)
    back = {key: array for key, array in source.items() if not key.startswith("rope")}
    params = {"heads": heads, "kv_heads": kv, "tp": tp, "generation": generation}
    w1, w3, wv = "feed_forward.w1", "feed_forward.w3", "attention.wv"
    norms = "{{w: {{{}: input_layernorm, {}: post_attention_layernorm}}}}".format
    rows = "{{w: {{{}: self_attn.v_proj, {}: mlp.gate_proj, {}: mlp.up_proj}}}}".format
    swaps = [
        (norms("attention_norm", "ffn_norm"), norms("ffn_norm", "attention_norm")),
        (rows(wv, w1, w3), rows(wv, w3, w1)),
        (
            "{attention.wo: self_attn.o_proj, feed_forward.w2: mlp.down_proj}",
            "{attention.wo: mlp.down_proj, feed_forward.w2: self_attn.o_proj}",
        ),
        ("h: $kv_heads", "h: $heads"),
        ("h: $heads", "h: $kv_heads"),
        ("(h two d) i", "(h d two) i"),
    ]
    embedding = "to: model.embed_tokens.weight, via: [{{concat: {{over: r, dim: {}".format
    swaps = (
        [*swaps, (embedding(0), embedding(1))]
        if generation == 3
        else [(embedding(1), embedding(0))]
    )
    return Example("c08-meta-llama", source, target, params, back=back, mistakes=tuple(swaps))


def llama_of_version_3():
    return meta_llama(3)


def llama_of_version_2():
    return meta_llama(2)


def llama_of_version_1():
    return meta_llama(1)


def swiglu(interleave):
    """MCore transformer/mlp.py::apply_swiglu_sharded_factory: rank r holds its rows of gate above
    its rows of up; interleaved, blocks of both take turns inside the rank."""
    tp, block = 2, 2
    number = Numbers()
    source, target = {}, {}
    for n in (0, 1):
        gate, up, down = number(16, 6), number(16, 6), number(6, 16)
        source |= {
            f"model.layers.{n}.mlp.{name}_proj.weight": w
            for name, w in (("gate", gate), ("up", up), ("down", down))
        }
        for r in range(tp):
            g, u = (np.split(w, tp)[r] for w in (gate, up))
            turns = [
                part
                for at in range(0, len(g), block)
                for part in (g[at : at + block], u[at : at + block])
            ]
            target[f"decoder.layers.{n}.mlp.linear_fc1.weight@{r}"] = joined(
                *(turns if interleave else (g, u))
            )
            target[f"decoder.layers.{n}.mlp.linear_fc2.weight@{r}"] = np.split(down, tp, 1)[r]
    both = [
        ("{w:gate|up}", "{w:up|gate}"),
        ("{split: {into: r, dim: 1", "{split: {into: r, dim: 0"),
    ]
    if interleave:
        both.append(("k: $block", "k: 2 * $block"))
    else:
        fused = "[{split: {into: r, dim: 0, count: $tp}}, {concat: {over: w, dim: 0}}]"
        both.append(
            (fused, "[{concat: {over: w, dim: 0}}, {split: {into: r, dim: 0, count: $tp}}]")
        )
    return Example(
        "c09-swiglu-tp",
        source,
        target,
        {"tp": tp, "block": block, "interleave": interleave},
        mistakes=tuple(both),
    )


def swiglu_in_halves():
    return swiglu(interleave=False)


def swiglu_in_blocks():
    return swiglu(interleave=True)


def split_qkv(fused, heads, groups, d):
    """Megatron-Bridge param_mapping.py::split_qkv_weights: a group's slots are its query heads, a
    key, a value.
    """
    slots = fused.reshape(heads + 2 * groups, d, *fused.shape[1:])
    per = heads // groups
    q = [(per + 2) * g + i for g in range(groups) for i in range(per)]
    k = range(per, len(slots), per + 2)
    v = range(per + 1, len(slots), per + 2)
    return {
        name: slots[list(at)].reshape(-1, *fused.shape[1:])
        for name, at in (("q", q), ("k", k), ("v", v))
    }


HEADS = {"heads": 6, "groups": 2, "head_dim": 2}


def gqa():
    """`split_qkv` of weights and biases; the norm fused into linear_qkv is the layer's input
    norm.
    """
    number = Numbers()
    source, target = {}, {}
    for n in (0, 1):
        for leaf, shape in (("weight", (20, 3)), ("bias", (20,))):
            source[f"decoder.layers.{n}.self_attention.linear_qkv.{leaf}"] = fused = number(*shape)
            parts = split_qkv(fused, 6, 2, 2)
            target |= {
                f"model.layers.{n}.self_attn.{w}_proj.{leaf}": part for w, part in parts.items()
            }
        norm = number(3)
        source[f"decoder.layers.{n}.self_attention.linear_qkv.layer_norm_weight"] = norm
        target[f"model.layers.{n}.input_layernorm.weight"] = norm
    return Example(
        "c10-megatron-gqa-qkv",
        source,
        target,
        HEADS,
        mistakes=(
            ("{w:q|k|v}", "{w:q|v|k}"),
            ("(g x) ... -> g x", "(x g) ... -> g x"),
            ("weight|bias", "weight"),
        ),
    )


def mixtral():
    """Two layers of eleven experts: their order as text is not their order as numbers."""
    number = Numbers()
    shapes = {"w1": (5, 3), "w2": (3, 5), "w3": (5, 3)}
    layers = [
        {w: [number(*shape) for _ in range(11)] for w, shape in shapes.items()} for _ in range(2)
    ]
    source = {
        f"model.layers.{n}.block_sparse_moe.experts.{e}.{w}.weight": expert
        for n, layer in enumerate(layers)
        for w, experts in layer.items()
        for e, expert in enumerate(experts)
    }
    return layers, source


def mixtral_megatron():
    """Megatron-LM tools/checkpoint/loader_mixtral_hf.py: linear_fc1 is w1 above w3, linear_fc2 is
    w2.
    """
    layers, source = mixtral()
    target = {}
    for n, layer in enumerate(layers):
        for e in range(11):
            at = f"decoder.layers.{n}.mlp.experts.local_experts.{e}."
            target[f"{at}linear_fc1.weight"] = joined(layer["w1"][e], layer["w3"][e])
            target[f"{at}linear_fc2.weight"] = layer["w2"][e]
    return Example(
        "c11a-megatron",
        source,
        target,
        mistakes=(("{w:w1|w3}", "{w:w3|w1}"), ("linear_fc2.weight", "linear_fc2.bias")),
    )


def mixtral_vllm():
    """vLLM's fused_moe make_expert_params_mapping: shard w1 fills the first half of w13's rows, w3
    the second.
    """
    layers, source = mixtral()
    target = {}
    for n, layer in enumerate(layers):
        at = f"model.layers.{n}.block_sparse_moe.experts."
        w13 = np.zeros((11, 10, 3), "f4")
        for e in range(11):
            w13[e, :5], w13[e, 5:] = layer["w1"][e], layer["w3"][e]
        target |= {f"{at}w13_weight": w13, f"{at}w2_weight": np.stack(layer["w2"])}
    return Example(
        "c11b-vllm",
        source,
        target,
        mistakes=(("{w:w1|w3}", "{w:w3|w1}"), ("over: w, dim: 1", "over: w, dim: 0")),
    )


def mixtral_mlx():
    """mlx_lm/models/mixtral.py::sanitize: w1 is gate_proj, w2 is down_proj, w3 is up_proj, stacked
    in the order of the experts.
    """
    layers, source = mixtral()
    names = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    target = {
        f"model.layers.{n}.block_sparse_moe.switch_mlp.{names[w]}.weight": np.stack(experts)
        for n, layer in enumerate(layers)
        for w, experts in layer.items()
    }
    return Example(
        "c11c-mlx",
        source,
        target,
        mistakes=(
            (
                "w1: gate_proj, w2: down_proj, w3: up_proj",
                "w1: up_proj, w2: down_proj, w3: gate_proj",
            ),
            ("w1: gate_proj, w2: down_proj", "w1: down_proj, w2: gate_proj"),
        ),
    )


def mixtral_transposed():
    """Experts that compute x @ gate_up_proj[e], gate in the first half of the columns
    (transformers' fused experts).
    """
    layers, source = mixtral()
    target = {}
    for n, layer in enumerate(layers):
        gate_up = [
            joined(w1.T, w3.T, axis=1) for w1, w3 in zip(layer["w1"], layer["w3"], strict=True)
        ]
        target[f"model.layers.{n}.mlp.experts.gate_up_proj"] = np.stack(gate_up)
        target[f"model.layers.{n}.mlp.experts.down_proj"] = np.stack([w.T for w in layer["w2"]])
    return Example(
        "c11d-transposed",
        source,
        target,
        mistakes=(
            ("{w:w1|w3}", "{w:w3|w1}"),
            (", {transpose: {dims: [1, 2]}}", ""),
            ("dims: [1, 2]", "dims: [0, 1]"),
        ),
    )


def mla():
    """mlx_lm/models/deepseek_v3.py::sanitize splits kv_b by head and transposes the keys' part;
    SGLang's deepseek_v2.py::load_weights puts q_a above kv_a."""
    heads, nope, v, q_rank, kv_rank, rope, hidden = 2, 3, 4, 6, 5, 1, 7
    number = Numbers()
    source, target = {}, {}
    for n in (0, 1):
        at = f"model.layers.{n}.self_attn."
        kv_b, q_a, kv_a = (
            number(heads * (nope + v), kv_rank),
            number(q_rank, hidden),
            number(kv_rank + rope, hidden),
        )
        source |= {
            f"{at}kv_b_proj.weight": kv_b,
            f"{at}q_a_proj.weight": q_a,
            f"{at}kv_a_proj_with_mqa.weight": kv_a,
        }
        of_head = [kv_b[h * (nope + v) : (h + 1) * (nope + v)] for h in range(heads)]
        target[f"{at}embed_q.weight"] = np.stack([w[:nope].T for w in of_head])
        target[f"{at}unembed_out.weight"] = np.stack([w[nope:] for w in of_head])
        target[f"{at}fused_qkv_a_proj_with_mqa.weight"] = joined(q_a, kv_a)
    params = {
        "heads": heads,
        "nope": nope,
        "v": v,
        "q_rank": q_rank,
        "kv_rank": kv_rank,
        "rope": rope,
    }
    return Example(
        "c13-mla",
        source,
        target,
        params,
        mistakes=(
            ("only: {w: [embed_q]}", "only: {w: [unembed_out]}"),
            ("{w:embed_q|unembed_out}", "{w:unembed_out|embed_q}"),
            ("embed_q: $nope, unembed_out: $v", "embed_q: $v, unembed_out: $nope"),
            ("{w:q_a_proj|kv_a_proj_with_mqa}", "{w:kv_a_proj_with_mqa|q_a_proj}"),
            ("(a x) k -> a x k", "(x a) k -> a x k"),
        ),
    )


def mamba(*, decay):
    """MCore core/ssm/mamba_mixer.py::sharded_state_dict: in_proj is z, x, B, C, dt, each sharded
    for itself; a squeezed convolution; mlx_lm's A = -exp(A_log), rounded once."""
    inner, bc, heads, tp = 8, 2, 4, 2
    number = Numbers()
    source, target = {}, {}
    for n in (0, 1):
        at = f"backbone.layers.{n}.mixer."
        parts = {
            "z": number(inner, 3),
            "x": number(inner, 3),
            "B": number(bc, 3),
            "C": number(bc, 3),
            "dt": number(heads, 3),
        }
        source[f"{at}in_proj.weight"] = joined(*parts.values())
        target |= {
            f"{at}in_proj.weight.{w}@{r}": half
            for w, part in parts.items()
            for r, half in enumerate(np.split(part, tp))
        }
        conv, bias, norm, skip, rate = (
            number(12, 1, 4),
            number(heads),
            number(inner),
            number(heads),
            number(heads) / 512,
        )
        source |= {
            f"{at}conv1d.weight": conv,
            f"{at}dt_bias": bias,
            f"{at}norm.weight": norm,
            f"{at}D": skip,
        }
        target |= {f"{at}conv1d.weight": conv[:, 0], f"{at}dt_proj.bias": bias, f"{at}D": skip}
        target[f"{at}norm.weight"] = np.stack(np.split(norm, tp))
        if decay:
            source[f"{at}A_log"] = rate
            target[f"{at}A"] = np.array([-math.exp(a) for a in rate], "f4")
    params = {"tp": tp, "inner": inner, "bc": bc, "heads": heads}
    mistakes = [
        ("{w:z|x|B|C|dt}", "{w:x|z|B|C|dt}"),
        ("{w:z|x|B|C|dt}", "{w:z|x|C|B|dt}"),
        ("(g d) -> g d", "(d g) -> g d"),
        ("dt_proj.bias", "dt_proj.weight"),
    ]
    if decay:
        mistakes = [("neg_exp: {}", "affine: {mul: -1, add: 0}")]
    return Example(
        "c16-mamba",
        source,
        target,
        params,
        left_out=None if decay else "A",
        mistakes=tuple(mistakes),
    )


def mamba_layout():
    return mamba(decay=False)


def mamba_decay():
    return mamba(decay=True)


def fused_adapter():
    """Megatron-Bridge peft_bridge.py: linear_in serves q, k and v alike; linear_out is split as the
    weight it is added to, so that every product B @ A is that part of linear_out @ linear_in."""
    number = Numbers()
    source, target = {}, {}
    for n in (0, 1):
        a, b = number(4, 3), number(20, 4)
        at = f"decoder.layers.{n}.self_attention.linear_qkv.adapter."
        source |= {f"{at}linear_in.weight": a, f"{at}linear_out.weight": b}
        products = split_qkv(b @ a, 6, 2, 2)
        for w, part in split_qkv(b, 6, 2, 2).items():
            assert (part @ a == products[w]).all()
            target |= {
                f"base_model.model.model.layers.{n}.self_attn.{w}_proj.lora_{x}.weight": t
                for x, t in (("A", a), ("B", part))
            }
    b_rule = "{w:q|k|v}_proj.lora_B"
    return Example(
        "c17-lora-fused",
        source,
        target,
        HEADS,
        mistakes=(
            (b_rule, b_rule.replace("k|v", "v|k")),
            ("(g x) r -> g x r", "(x g) r -> g x r"),
            ("lora_A", "lora_a"),
            ("g x r -> (g x) r", "g x r -> (x g) r"),
        ),
    )


def merged_adapter():
    """peft/tuners/lora/layer.py::get_delta_weight: weight + alpha / rank * (B @ A), here in whole
    numbers, so exact.
    """
    number = Numbers()
    source = {"model.norm.weight": number(3), "model.k.weight": number(4, 3)}
    target = dict(source)
    for name in ("q", "v"):
        base, a, b = number(5, 3), number(2, 3), number(5, 2)
        at = f"base_model.model.model.{name}.lora_"
        source |= {f"model.{name}.weight": base, f"{at}A.weight": a, f"{at}B.weight": b}
        target[f"model.{name}.weight"] = base + 3 * (b @ a)
    return Example(
        "c17-lora-merge",
        source,
        target,
        {"alpha": 6, "rank": 2},
        mistakes=(("alpha: $alpha,", "alpha: $rank,"),),
    )


there, back = directions(
    gpt2,
    embedding,
    llama_of_version_3,
    llama_of_version_2,
    llama_of_version_1,
    swiglu_in_halves,
    swiglu_in_blocks,
    gqa,
    mixtral_megatron,
    mixtral_vllm,
    mixtral_mlx,
    mixtral_transposed,
    mla,
    mamba_layout,
    mamba_decay,
    fused_adapter,
    merged_adapter,
    one_way=(mamba_decay, merged_adapter),
)


@there
def test_the_values_are_those_upstream_computes(engine, example):
    goes_there(engine, example)


@back
def test_the_values_of_the_target_become_those_of_the_source(engine, example):
    comes_back(engine, example)


@there
def test_a_mistake_in_a_layout_is_seen(engine, example):
    are_seen(engine, example)
