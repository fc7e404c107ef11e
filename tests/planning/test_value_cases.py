"""Rules that compute, from the file to the bits: Mamba's decay rates, a merged adapter, casts there
and back.
"""

import math

import numpy as np
import pytest

from migrate.core.errors import MigrateError

RNG = np.random.default_rng(11)


def r(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def test_mamba_falls_into_parts_on_every_rank_and_its_decay_is_computed(engine):
    inner, bc, heads = 4, 2, 2
    p = "backbone.layers.0.mixer."
    s = {
        p + "in_proj.weight": r(2 * inner + 2 * bc + heads, 3), p + "conv1d.weight": r(6, 1, 4),
        p + "dt_bias": r(heads),
        p + "norm.weight": r(4), p + "A_log": r(heads), p + "D": r(heads),
    }  # fmt: skip
    params = {"tp": 2, "inner": inner, "bc": bc, "heads": heads}
    out = engine.apply(engine.case("c16-mamba"), s, params, allow=("lossy",))
    expect = {
        p + "conv1d.weight": s[p + "conv1d.weight"][:, 0], p + "dt_proj.bias": s[p + "dt_bias"],
        p + "D": s[p + "D"],
        p + "norm.weight": s[p + "norm.weight"].reshape(2, 2),
        p + "A": np.array([-math.exp(v) for v in s[p + "A_log"]], "f4"),
    }  # fmt: skip
    parts = np.split(s[p + "in_proj.weight"], np.cumsum([inner, inner, bc, bc]))
    for name, part in zip(("z", "x", "B", "C", "dt"), parts, strict=True):
        expect |= {
            f"{p}in_proj.weight.{name}@{rank}": half for rank, half in enumerate(np.split(part, 2))
        }
    assert sorted(out) == sorted(expect)
    for key, array in expect.items():
        assert out[key].tobytes() == np.ascontiguousarray(array).tobytes(), key
    assert [(loss.kind, loss.rule.name, loss.keys) for loss in out.composition.losses] == [
        ("lossy", "A", (p + "A",))
    ]


def test_mamba_does_not_come_back_because_of_its_decay(engine):
    s = {"m.mixer.A_log": r(2)}
    refused = engine.refusals(
        engine.case("c16-mamba"), s, {"tp": 1, "inner": 1, "bc": 1, "heads": 1}, backwards=True
    )
    assert any(
        d.code == "M405" and "'A'" in d.message and "inverse: skip" in (d.help or "")
        for d in refused
    )


def adapter(r_of=2):
    return {
        "model.q.weight": r(4, 3), "model.norm.weight": r(3),
        "base_model.model.model.q.lora_A.weight": r(r_of, 3),
        "base_model.model.model.q.lora_B.weight": r(4, r_of),
    }  # fmt: skip


def test_an_adapter_is_merged_and_a_weight_without_one_is_copied(engine):
    s = adapter()
    out = engine.apply(engine.case("c17-lora-merge"), s, {"alpha": 6, "rank": 2}, allow=("lossy",))
    a, b = (s[f"base_model.model.model.q.lora_{x}.weight"].astype("f8") for x in "AB")
    assert sorted(out) == ["model.norm.weight", "model.q.weight"]
    assert (
        out["model.q.weight"].tobytes()
        == (s["model.q.weight"] + 3 * (b @ a)).astype("f4").tobytes()
    )
    assert out["model.norm.weight"].tobytes() == s["model.norm.weight"].tobytes()
    assert isinstance(out.composition.graph.outputs["model.norm.weight"].sources[0], str)


def test_half_an_adapter_a_wrong_rank_and_an_unallowed_merge_are_refused(engine):
    case, params = engine.case("c17-lora-merge"), {"alpha": 6, "rank": 2}
    s = adapter()
    (lossy,) = engine.refusals(case, s, params)
    assert lossy.code == "M401"
    (rank,) = engine.refusals(case, adapter(5), params, allow=("lossy",))
    assert rank.code == "M301"
    assert "[5, 3]" in rank.message
    del s["base_model.model.model.q.lora_B.weight"]
    refused = engine.refusals(case, s, params, allow=("lossy",))
    assert any(d.code == "M207" and "role b is missing" in d.message for d in refused)


def narrow(array):
    """float32 as raw bfloat16 elements, which the engine takes for bfloat16."""
    return (array.view("u4") >> 16).astype("u2")


@pytest.mark.heavy
@pytest.mark.parametrize("backwards", [False, True])
def test_a_widening_is_lossless_both_ways_and_says_so(engine, backwards):
    files = engine.rules("from: '{k...}', to: '{k}', via: [{cast: {to: float32, from: bfloat16}}]")
    low = narrow(r(3, 4))
    wide = low.astype("u4") << 16
    given, wanted = ({"w": wide.view("f4")}, low) if backwards else ({"w": low}, wide)
    out = engine.apply(files, given, backwards=backwards, prove=not backwards)
    assert out["w"].tobytes() == wanted.tobytes()
    if not backwards:
        assert not out.composition.inexact


@pytest.mark.heavy
def test_a_narrowing_needs_leave(engine):
    files = engine.rules("from: '{k...}', to: '{k}', via: [{cast: {to: bfloat16, from: float32}}]")
    (refused,) = engine.refusals(files, {"w": r(2)})
    assert refused.code == "M401"
    out = engine.apply(files, {"w": np.float32([1.5, 2])}, allow=("lossy",))
    assert out["w"].tolist() == [0x3FC0, 0x4000]


def test_casts_reach_only_what_they_are_limited_to(engine):
    files = engine.rules(
        "from: 'l.{w:q|k}', to: 'm.{w}', via: [{cast: {to: float16, only: {w: [q]}}}]"
    )
    out = engine.apply(files, {"l.q": np.float32([1]), "l.k": np.float32([2])}, allow=("lossy",))
    assert {k: t.spec.dtype for k, t in out.composition.graph.outputs.items()} == {
        "m.q": "float16",
        "m.k": "float32",
    }


def test_a_wrong_dtype_is_named_with_the_rule(engine):
    files = engine.rules("from: '{k...}', to: '{k}', via: [{cast: {to: float32, from: bfloat16}}]")
    with pytest.raises(MigrateError, match=r"M303(.|\n)*float16 \[2\](.|\n)*bfloat16"):
        engine.apply(files, {"w": np.float16([1, 2])})
