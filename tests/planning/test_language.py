"""Real migrations in the rule language against hand-written numpy, forwards and backwards."""

import numpy as np
import pytest

from migrate.core.errors import MigrateError

RNG = np.random.default_rng(0)


def r(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def equal(out, want):
    assert sorted(out) == sorted(want)
    for key, array in want.items():
        a = np.asarray(array, order="C")
        assert out[key].shape == a.shape, key
        assert out[key].tobytes() == a.tobytes(), key


def back_and_forth(engine, files, ckpt, params=None, expect=None, back=None):
    """Forwards equals `expect`; backwards of that equals `back` (the source, unless said)."""
    out = engine.apply(files, ckpt, params)
    if expect is not None:
        equal(out, expect)
    typed = {k: v.view(ckpt_dtype(out, k)) for k, v in out.items()}
    equal(engine.apply(files, typed, params, backwards=True), ckpt if back is None else back)
    return out


def ckpt_dtype(out, key):
    name = out.composition.graph.outputs[key].spec.dtype
    return {"float32": np.float32, "int64": np.int64, "uint8": np.uint8}[name]


def test_wrappers_are_stripped_wherever_they_stand(engine):
    s = {"module._orig_mod.layers.0._fsdp_wrapped_module.w": r(2), "module.head.weight": r(3)}
    out = engine.apply(engine.case("c01-wrappers"), s)
    equal(out, {"layers.0.w": s["module._orig_mod.layers.0._fsdp_wrapped_module.w"], "head.weight": s["module.head.weight"]})


def test_densenet_joins_the_split_index_and_splits_it_again(engine):
    s = {
        f"features.denseblock1.denselayer{n}.{w}.{i}.{leaf}": r(2)
        for n in (1, 2, 12)
        for w, i in (("norm", 1), ("conv", 1), ("norm", 2), ("conv", 2))
        for leaf in ("weight", "num_batches_tracked")
    }
    out = back_and_forth(engine, engine.case("c02-densenet"), s)
    assert "features.denseblock1.denselayer12.norm2.weight" in out


def test_mlp_layers_are_renumbered_by_an_expression(engine):
    s = {"encoder.layers.0.mlp.linear_1.weight": r(2), "encoder.layers.0.mlp.linear_2.bias": r(2)}
    back_and_forth(
        engine,
        engine.case("c03-vit-mlp"),
        s,
        expect={
            "encoder.layers.0.mlp.0.weight": s["encoder.layers.0.mlp.linear_1.weight"],
            "encoder.layers.0.mlp.3.bias": s["encoder.layers.0.mlp.linear_2.bias"],
        },
    )


def test_missing_counters_are_added_and_go_again_while_they_are_zero(engine):
    s = {"bn.running_mean": r(2), "bn2.running_mean": r(2), "bn2.num_batches_tracked": np.array(7), "running_mean": r(1)}
    out = engine.apply(engine.case("c04-batchnorm"), s)
    equal(out, {**s, "bn.num_batches_tracked": np.array(0), "num_batches_tracked": np.array(0)})
    typed = {k: v.view(ckpt_dtype(out, k)) for k, v in out.items()}
    typed["bn.num_batches_tracked"] = np.array(5)
    back = engine.apply(engine.case("c04-batchnorm"), typed, backwards=True)
    equal(back, {**s, "bn.num_batches_tracked": np.array(5)})
    assert back.composition.legs[0][1].decided == {
        "bn.num_batches_tracked": False,
        "bn2.num_batches_tracked": False,
        "num_batches_tracked": True,
    }


def test_weight_norm_becomes_parametrizations(engine):
    s = {
        "conv.weight_g": r(1),
        "conv.weight_v": r(2, 2),
        "weight_g": r(1),
        "weight_v": r(2),
        "sn.weight_orig": r(2, 2),
        "sn.weight_u": r(2),
    }
    out = back_and_forth(engine, engine.case("c05-weight-norm"), s)
    assert "parametrizations.weight.original1" in out
    assert "sn.parametrizations.weight.0._u" in out


def test_conv1d_weights_are_transposed(engine):
    s = {
        "wte.weight": r(5, 4),
        "h.0.attn.c_attn.weight": r(4, 12),
        "h.0.attn.c_attn.bias": r(12),
        "h.0.attn.c_proj.weight": r(4, 4),
        "h.0.attn.bias": r(1, 1, 3, 3),
        "h.0.ln_1.weight": r(4),
    }
    kept = {k: v for k, v in s.items() if k != "h.0.attn.bias"}
    expect = {"transformer." + k: (v.T if "c_" in k and k.endswith("weight") else v) for k, v in kept.items()}
    back_and_forth(engine, engine.case("c06-gpt2"), s, expect=expect, back=kept)


def test_padded_rows_are_cut_copied_and_come_back(engine):
    emb = r(8, 3)
    emb[6:] = 0
    s = {"embedding.word_embeddings.weight": emb, "x": r(1)}
    expect = {"model.embed_tokens.weight": emb[:6], "lm_head.weight": emb[:6], "x": s["x"]}
    back_and_forth(engine, engine.case("c07-megatron-embedding"), s, {"vocab": 6, "padded": 8}, expect)


def test_a_cut_that_is_not_zero_is_seen(engine):
    s = {"embedding.word_embeddings.weight": r(8, 3)}
    with pytest.raises(AssertionError, match="cut"):
        engine.apply(engine.case("c07-megatron-embedding"), s, {"vocab": 6, "padded": 8})


def test_interleaved_qkv_becomes_q_k_and_v(engine):
    heads, groups, d = 6, 2, 2
    m = heads // groups
    w, b, n = r((heads + 2 * groups) * d, 3), r((heads + 2 * groups) * d), r(3)

    def parts(t):
        x = t.reshape(groups, (m + 2) * d, *t.shape[1:])
        return [q.reshape(-1, *t.shape[1:]) for q in (x[:, : m * d], x[:, m * d : m * d + d], x[:, m * d + d :])]

    p, q = "decoder.layers.0.self_attention.linear_qkv.", "model.layers.0.self_attn."
    expect = {f"{q}{c}_proj.weight": v for c, v in zip("qkv", parts(w), strict=True)}
    expect |= {f"{q}{c}_proj.bias": v for c, v in zip("qkv", parts(b), strict=True)}
    expect["model.layers.0.input_layernorm.weight"] = n
    s = {p + "weight": w, p + "bias": b, p + "layer_norm_weight": n}
    back_and_forth(engine, engine.case("c10-megatron-gqa-qkv"), s, {"heads": heads, "groups": groups, "head_dim": d}, expect)


def mixtral(layers=2, experts=11):
    return {
        f"model.layers.{n}.block_sparse_moe.experts.{e}.{w}.weight": r(*((3, 2) if w != "w2" else (2, 3)))
        for n in range(layers)
        for e in range(experts)
        for w in ("w1", "w2", "w3")
    }


@pytest.mark.parametrize("case", ["c11a-megatron", "c11b-vllm", "c11c-mlx", "c11d-transposed"])
def test_mixtral_experts_go_to_four_other_layouts_and_back(engine, case):
    back_and_forth(engine, engine.case(case), mixtral(), {"experts": 11} if case == "c11b-vllm" else None)


def test_experts_are_stacked_in_numeric_order_with_gate_above_up(engine):
    s = mixtral(1, 11)
    p = "model.layers.0.block_sparse_moe.experts"
    gate = np.stack([s[f"{p}.{e}.w1.weight"] for e in range(11)])
    up = np.stack([s[f"{p}.{e}.w3.weight"] for e in range(11)])
    out = engine.apply(engine.case("c11b-vllm"), s)
    assert out[f"{p}.w13_weight"].tobytes() == np.concatenate([gate, up], 1).tobytes()
    out = engine.apply(engine.case("c11d-transposed"), s)
    want = np.ascontiguousarray(np.concatenate([gate, up], 1).swapaxes(1, 2))
    assert out["model.layers.0.mlp.experts.gate_up_proj"].tobytes() == want.tobytes()


def test_layers_are_renumbered_two_for_one(engine):
    s = {
        f"decoder.layers.{n}.{x}": r(1)
        for n in range(3)
        for x in ("input_layernorm.weight", "self_attention.linear_qkv.weight", "pre_mlp_layernorm.weight", "mlp.linear_fc1.weight")
    } | {"decoder.final_layernorm.weight": r(1)}
    out = back_and_forth(engine, engine.case("c12a-hybrid"), s)
    assert "decoder.layers.5.mlp.linear_fc1.weight" in out


def test_layers_past_the_last_become_mtp_layers(engine):
    out = back_and_forth(engine, engine.case("c12b-mtp"), {f"model.layers.{n}.w": r(1) for n in range(4)}, {"layers": 3})
    assert sorted(out) == ["model.layers.0.w", "model.layers.1.w", "model.layers.2.w", "mtp_layers.0.w"]


def test_a_leading_layer_axis_becomes_one_key_per_layer(engine):
    s = {
        "decoder.layers.mlp.linear_fc1.weight": r(3, 2, 2),
        "decoder.layers.input_layernorm.weight": r(3, 2),
        "decoder.final_layernorm.weight": r(2),
    }
    back_and_forth(engine, engine.case("c12c-homogeneous"), s)


def test_layers_move_to_the_places_a_map_gives_them(engine):
    s = {"decoder.layers.0.self_attention.w": r(1), "decoder.layers.1.self_attention.w": r(1)}
    out = back_and_forth(engine, engine.case("c12d-pattern"), s)
    assert sorted(out) == ["decoder.layers.1.self_attention.w", "decoder.layers.4.self_attention.w"]


def test_absorbed_and_joined_attention_projections(engine):
    h, nope, v, q, kv, ro = 2, 3, 2, 4, 5, 1
    kb = r(h * (nope + v), kv)
    x = kb.reshape(h, nope + v, kv)
    s = {"l.self_attn.kv_b_proj.weight": kb, "l.self_attn.q_a_proj.weight": r(q, 6), "l.self_attn.kv_a_proj_with_mqa.weight": r(kv + ro, 6)}
    expect = {
        "l.self_attn.embed_q.weight": x[:, :nope].transpose(0, 2, 1),
        "l.self_attn.unembed_out.weight": x[:, nope:],
        "l.self_attn.fused_qkv_a_proj_with_mqa.weight": np.concatenate(
            [s["l.self_attn.q_a_proj.weight"], s["l.self_attn.kv_a_proj_with_mqa.weight"]]
        ),
    }
    params = {"heads": h, "nope": nope, "v": v, "q_rank": q, "kv_rank": kv, "rope": ro}
    back_and_forth(engine, engine.case("c13-mla"), s, params, expect)


def test_a_fused_adapter_becomes_three(engine):
    p = "decoder.layers.0.self_attention.linear_qkv.adapter."
    s = {p + "linear_in.weight": r(2, 3), p + "linear_out.weight": r((6 + 4) * 2, 2)}
    back_and_forth(engine, engine.case("c17-lora-fused"), s, {"heads": 6, "groups": 2, "head_dim": 2})


def test_optimizer_moments_follow_and_the_step_is_one(engine):
    s = {}
    for w in ("gate", "up"):
        for k in ("exp_avg", "exp_avg_sq"):
            s[f"state.l.0.mlp.{w}_proj.weight.{k}"] = r(2, 3)
        s[f"state.l.0.mlp.{w}_proj.weight.step"] = np.float32(3).reshape(())
    s |= {"state.0.exp_avg": r(1), "state.1.exp_avg": r(1)}
    out = back_and_forth(engine, engine.case("c18-optimizer"), s)
    assert "state.head.weight.exp_avg" in out


def test_ema_shadows_get_their_dots_back(engine):
    s = {
        "model.diffusion_model.input_blocks.0.0.weight": r(1),
        "model_ema.diffusion_modelinput_blocks00weight": r(1),
        "model_ema.decay": r(1),
        "model_ema.num_updates": r(1),
    }
    out = back_and_forth(engine, engine.case("c19-ema"), s)
    assert out["ema.diffusion_model.input_blocks.0.0.weight"].tobytes() == s["model_ema.diffusion_modelinput_blocks00weight"].tobytes()
    back_and_forth(engine, engine.case("c19-ema"), {**s, "model.buffer": r(1)})
    with pytest.raises(MigrateError, match="stands for two keys"):
        engine.apply(engine.case("c19-ema"), {**s, "model.diffusion_model.input_blocks.00.weight": r(1)})


def grouped():
    s = {"weight": r(3, 2, 2), "bias": r(3, 1, 2), "a.b.weight": r(3, 2, 2), "a.b.bias": r(3, 2), "conv.weight": r(4, 1, 3)}
    s["a.b._extra_state"] = np.zeros(0, np.uint8)
    return s


def test_grouped_linear_falls_into_one_weight_per_gemm_and_back(engine):
    s = grouped()
    files = engine.case("te-grouped-weight", "te-grouped-bias")
    canonical = {**s, "bias": s["bias"][:, 0]}
    params = {"modules": ["", "a.b"], "gemms": 3}
    out = back_and_forth(engine, files, s, params, back=canonical)
    assert {"weight0", "a.b.weight2", "bias1", "conv.weight", "a.b._extra_state"} <= set(out)


def test_the_redundant_layout_goes_where_both_are_present_and_equal(engine):
    s = grouped()
    both = {**s, **{f"a.b.weight{i}": s["a.b.weight"][i] for i in range(3)}}
    files = engine.case("te-grouped-weight", "te-grouped-bias")
    back_and_forth(engine, files, both, {"modules": ["", "a.b"], "gemms": 3}, back={**s, "bias": s["bias"][:, 0]})


def test_both_layouts_present_and_different_are_refused(engine):
    s = grouped()
    both = {**s, **{f"a.b.weight{i}": r(2, 2) for i in range(3)}}
    with pytest.raises(AssertionError, match="differs from what rule"):
        engine.apply(engine.case("te-grouped-weight", "te-grouped-bias"), both, {"modules": ["", "a.b"]}, allow=())


def test_a_partial_second_layout_is_an_error(engine):
    s = {**grouped(), "a.b.weight1": r(2, 2)}
    with pytest.raises(MigrateError, match="exist and"):
        engine.apply(engine.case("te-grouped-weight"), s, {"modules": ["a.b"]})
