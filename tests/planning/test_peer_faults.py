"""Damaged Mixtral checkpoints that a well-known loader takes without a word: each is refused by
name.
"""

from pathlib import Path

import numpy as np
import pytest

from migrate.rules.loading import load_files

RULES = Path(__file__).parents[2] / "rules" / "hf-mixtral" / "v5"
MOE = "model.layers.0.block_sparse_moe"


@pytest.fixture
def rules():
    return load_files(sorted(RULES.glob("*.yaml")))


@pytest.fixture
def checkpoint():
    def r(*shape):
        return np.random.default_rng(0).standard_normal(shape).astype(np.float32)

    out = {
        "model.embed_tokens.weight": r(5, 3),
        "model.norm.weight": r(3),
        "lm_head.weight": r(5, 3),
    }
    for layer in (0, 1):
        p = f"model.layers.{layer}"
        out |= {f"{p}.self_attn.{w}_proj.weight": r(3, 3) for w in "qkvo"}
        out |= {f"{p}.input_layernorm.weight": r(3), f"{p}.post_attention_layernorm.weight": r(3)}
        out[f"{p}.block_sparse_moe.gate.weight"] = r(4, 3)
        for e in range(4):
            for w in ("w1", "w2", "w3"):
                out[f"{p}.block_sparse_moe.experts.{e}.{w}.weight"] = r(
                    *((3, 2) if w == "w2" else (2, 3))
                )
    return out


def only(found):
    """The one diagnostic, as a person reads it."""
    assert len(found) == 1, [d.message for d in found]
    return found[0].code, found[0].render()


def test_the_undamaged_checkpoint_is_taken_there_and_back(engine, rules, checkpoint):
    out = engine.apply(rules, checkpoint, {"num_experts": 4}, prove=True)
    assert out.composition.inexact == []
    back = engine.apply(
        rules, {k: v.view(np.float32) for k, v in out.items()}, {"num_experts": 4}, backwards=True
    )
    assert {k: v.tobytes() for k, v in back.items()} == {
        k: v.tobytes() for k, v in checkpoint.items()
    }


@pytest.mark.parametrize("params", [{}, {"num_experts": 4}])
def test_an_expert_under_a_wrong_number_is_refused(engine, rules, checkpoint, params):
    checkpoint[f"{MOE}.experts.7.w1.weight"] = checkpoint.pop(f"{MOE}.experts.1.w1.weight")
    code, text = only(engine.refusals(rules, checkpoint, params))
    assert code == "M207"
    assert "missing {e} = 1" in text
    assert "{w} = w1" in text
    assert f"{MOE}.experts.7.w1.weight" in text


def test_experts_with_gaps_are_refused_and_not_renumbered(engine, rules, checkpoint):
    numbers = {0: 0, 1: 1, 2: 3, 3: 9}
    renamed = {}
    for key, array in checkpoint.items():
        for e, to in numbers.items():
            key = key.replace(f"{MOE}.experts.{e}.", f"{MOE}.experts.#{to}.")
        renamed[key.replace("#", "")] = array
    found = engine.refusals(rules, renamed)
    assert {d.code for d in found} == {"M207"}
    assert len(found) == 3
    assert all("missing {e} = 2, 4, 5, 6, 7, 8" in d.message for d in found)
    assert all(f"{MOE}.experts." in d.render() for d in found)


@pytest.mark.parametrize("w", ["w1", "w2", "w3"])
@pytest.mark.parametrize("e", [0, 2])
def test_one_missing_expert_is_refused_by_its_number(engine, rules, checkpoint, w, e):
    del checkpoint[f"{MOE}.experts.{e}.{w}.weight"]
    code, text = only(engine.refusals(rules, checkpoint))
    assert code == "M207"
    assert f"missing {{e}} = {e}" in text
    assert "model.layers.0" in text


def test_a_missing_last_expert_is_refused_where_the_number_of_experts_is_known(
    engine, rules, checkpoint
):
    del checkpoint[f"{MOE}.experts.3.w2.weight"]
    code, text = only(engine.refusals(rules, checkpoint, {"num_experts": 4}))
    assert code == "M207"
    assert "missing {e} = 3" in text


def test_a_missing_last_gate_is_refused_even_where_it_is_not_known(engine, rules, checkpoint):
    del checkpoint[f"{MOE}.experts.3.w1.weight"]
    code, text = only(engine.refusals(rules, checkpoint))
    assert code == "M301"
    assert f"{MOE}.experts.0.w1.weight" in text


def test_an_expert_of_wrong_shape_is_refused_by_its_key(engine, rules, checkpoint):
    checkpoint[f"{MOE}.experts.2.w1.weight"] = np.zeros((3, 3), np.float32)
    code, text = only(engine.refusals(rules, checkpoint))
    assert code == "M301"
    assert f"[3, 3]: {MOE}.experts.2.w1.weight" in text


def test_two_keys_for_one_target_are_refused_with_both(engine, rules, checkpoint):
    checkpoint["model.layers.0.mlp.gate.weight"] = checkpoint[f"{MOE}.gate.weight"]
    found = engine.refusals(rules, checkpoint)
    assert any(
        d.code in ("M211", "M212") and "model.layers.0.mlp.gate.weight" in d.message for d in found
    )


def test_two_keys_for_one_target_are_refused_even_where_both_are_accounted_for(engine):
    text = (
        (RULES / "fuse-experts.yaml")
        .read_text(encoding="utf-8")
        .replace("keep:\n", 'keep:\n  - "{p...}.mlp.{k...}"\n')
    )
    keys = {
        "m.block_sparse_moe.gate.weight": np.zeros(1, np.float32),
        "m.mlp.gate.weight": np.zeros(1, np.float32),
    }
    for e in (0, 1):
        keys |= {
            f"m.block_sparse_moe.experts.{e}.{w}.weight": np.zeros((1, 1), np.float32)
            for w in ("w1", "w2", "w3")
        }
    code, shown = only(engine.refusals(engine.text(text), keys))
    assert code == "M212"
    assert "m.mlp.gate.weight" in shown
    assert "m.block_sparse_moe.gate.weight" in shown


def test_per_expert_and_fused_weights_side_by_side_are_refused(engine, rules, checkpoint):
    checkpoint["model.layers.0.mlp.experts.down_proj"] = np.zeros((4, 3, 2), np.float32)
    found = engine.refusals(rules, checkpoint)
    assert any(
        d.code in ("M211", "M212") and "model.layers.0.mlp.experts.down_proj" in d.message
        for d in found
    )


def test_one_expert_in_another_dtype_is_refused_and_not_cast(engine, rules, checkpoint):
    key = f"{MOE}.experts.2.w3.weight"
    checkpoint[key] = checkpoint[key].astype(np.float16)
    code, text = only(engine.refusals(rules, checkpoint))
    assert code == "M303"
    assert key in text
    assert "float16 for 2" in text


def test_a_whole_layer_in_another_dtype_is_refused_where_it_meets_another(
    engine, rules, checkpoint
):
    for e in range(4):
        key = f"{MOE}.experts.{e}.w1.weight"
        checkpoint[key] = checkpoint[key].astype(np.float16)
    code, text = only(engine.refusals(rules, checkpoint))
    assert code == "M303"
    assert "float16 for w1" in text
