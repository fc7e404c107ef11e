"""Cases at their edges: what a target holds already, names two keys share, both layouts at once;
their values are in test_case_*.py.
"""

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


def test_missing_counters_are_added_and_go_again_while_they_are_zero(engine):
    s = {
        "bn.running_mean": r(2),
        "bn2.running_mean": r(2),
        "bn2.num_batches_tracked": np.array(7),
        "running_mean": r(1),
    }
    out = engine.apply(engine.case("c04-batchnorm"), s)
    equal(out, {**s, "bn.num_batches_tracked": np.array(0), "num_batches_tracked": np.array(0)})
    typed = {k: v.view(ckpt_dtype(out, k)) for k, v in out.items()}
    typed["bn.num_batches_tracked"] = np.array(5)
    back = engine.apply(engine.case("c04-batchnorm"), typed, backwards=True)
    equal(back, {**s, "bn.num_batches_tracked": np.array(5)})
    assert back.composition.steps[0][1].decided == {
        "bn.num_batches_tracked": False,
        "bn2.num_batches_tracked": False,
        "num_batches_tracked": True,
    }


def test_a_cut_that_is_not_zero_is_seen(engine):
    s = {"embedding.word_embeddings.weight": r(8, 3)}
    with pytest.raises(AssertionError, match="cut"):
        engine.apply(engine.case("c07-megatron-embedding"), s, {"vocab": 6, "padded": 8})


def test_ema_shadows_get_their_dots_back(engine):
    s = {
        "model.diffusion_model.input_blocks.0.0.weight": r(1),
        "model_ema.diffusion_modelinput_blocks00weight": r(1),
        "model_ema.decay": r(1),
        "model_ema.num_updates": r(1),
    }
    out = back_and_forth(engine, engine.case("c19-ema"), s)
    assert (
        out["ema.diffusion_model.input_blocks.0.0.weight"].tobytes()
        == s["model_ema.diffusion_modelinput_blocks00weight"].tobytes()
    )
    back_and_forth(engine, engine.case("c19-ema"), {**s, "model.buffer": r(1)})
    with pytest.raises(MigrateError, match="stands for two keys"):
        engine.apply(
            engine.case("c19-ema"), {**s, "model.diffusion_model.input_blocks.00.weight": r(1)}
        )


def grouped():
    s = {
        "weight": r(3, 2, 2),
        "bias": r(3, 1, 2),
        "a.b.weight": r(3, 2, 2),
        "a.b.bias": r(3, 2),
        "conv.weight": r(4, 1, 3),
    }
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
    back_and_forth(
        engine,
        files,
        both,
        {"modules": ["", "a.b"], "gemms": 3},
        back={**s, "bias": s["bias"][:, 0]},
    )


def test_both_layouts_present_and_different_are_refused(engine):
    s = grouped()
    both = {**s, **{f"a.b.weight{i}": r(2, 2) for i in range(3)}}
    with pytest.raises(AssertionError, match="differs from what rule"):
        engine.apply(
            engine.case("te-grouped-weight", "te-grouped-bias"),
            both,
            {"modules": ["", "a.b"]},
            allow=(),
        )


def test_a_partial_second_layout_is_an_error(engine):
    s = {**grouped(), "a.b.weight1": r(2, 2)}
    with pytest.raises(MigrateError, match="exist and"):
        engine.apply(engine.case("te-grouped-weight"), s, {"modules": ["a.b"]})
