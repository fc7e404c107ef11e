"""A weight and its scale are one tensor: plans that part them are refused, plans that move them
alike are not.
"""

from __future__ import annotations

import pytest
from work import steps

from migrate.core.errors import MigrateError, Report
from migrate.core.spec import spec
from migrate.planning import pairs
from migrate.planning.bind import BindContext
from migrate.planning.compose import compose
from migrate.planning.graph import Tensor
from migrate.planning.pipeline import Views
from migrate.source.blobs import Stored

CODES, U8 = "float8_e4m3fn", "uint8"
FP8 = {
    "a.q.weight": (CODES, (4, 4)), "a.q.weight_scale_inv": ("float32", (2, 2)),
    "a.norm.weight": ("bfloat16", (4,)),
}  # fmt: skip

DECODED = """from: {weight: '{p}.q.weight', scale: '{p}.q.weight_scale_inv'}, to: '{p}.k.weight',
    via: [{dequantize: {codec: fp8-block, dtype: bfloat16, block: [2, 2]}}]"""


def composed(engine, files, tensors=FP8, *more, params=None, backwards=False):
    done = composition(engine, files, tensors, *more, params=params, backwards=backwards)
    return {key: str(tensor.spec) for key, tensor in done.graph.outputs.items()}


def composition(engine, files, tensors, *more, params=None, backwards=False):
    stored = {key: Stored(spec(dtype, shape), 0, 0) for key, (dtype, shape) in tensors.items()}
    report = Report()
    steps = [engine.step(f, params, backwards) for f in (files, *more)]
    done = compose(
        stored, steps, BindContext(lambda *_: True, frozenset({"drop", "lossy"})), report
    )
    report.check()
    return done


def refusal(engine, files, tensors=FP8, *more):
    with pytest.raises(MigrateError) as caught:
        composed(engine, files, tensors, *more)
    assert len({(d.code, d.spans) for d in caught.value.diagnostics}) == 1
    return caught.value.diagnostics[0]


def test_a_scale_that_a_rename_leaves_behind_is_named_with_its_weight_and_the_rule(engine):
    found = refusal(
        engine, engine.rules("from: '{p}.q.weight', to: '{p}.query.weight'", keep=["{k...}"])
    )
    assert found.code == "M408"
    assert (
        found.message
        == "rule 'r0' makes a.query.weight of a.q.weight, and its scale a.q.weight_scale_inv stays"
    )
    assert "to: '{p}.query.weight'" in found.spans[0].text
    assert "dequantize" in (found.help or "")


def test_a_weight_that_stays_while_its_scale_moves_is_found_too(engine):
    found = refusal(
        engine,
        engine.rules(
            "from: '{p}.q.weight_scale_inv', to: '{p}.query.weight_scale_inv'", keep=["{k...}"]
        ),
    )
    assert (
        found.message
        == "rule 'r0' makes a.query.weight_scale_inv of its scale a.q.weight_scale_inv, and "
        "a.q.weight stays"
    )


def test_a_scale_that_is_dropped_alone_is_found(engine):
    found = refusal(
        engine,
        engine.rules(
            "from: '{p...}.weight_scale_inv', via: [{drop: {why: unknown key}}]", keep=["{k...}"]
        ),
    )
    assert found.message == "rule 'r0' drops its scale a.q.weight_scale_inv, and a.q.weight stays"


def test_a_weight_that_is_dropped_alone_is_found(engine):
    found = refusal(
        engine, engine.rules("from: '{p}.q.weight', via: [{drop: {why: unused}}]", keep=["{k...}"])
    )
    assert found.message == "rule 'r0' drops a.q.weight, and its scale a.q.weight_scale_inv stays"


def test_two_rules_that_move_the_parts_to_different_modules_are_found(engine):
    rules = (
        "from: '{p}.q.weight', to: '{p}.x.weight'",
        "from: '{p}.q.weight_scale_inv', to: '{p}.y.weight_scale_inv'",
    )
    found = refusal(engine, engine.rules(*rules, keep=["{k...}"]))
    assert found.message.endswith(
        "makes a.x.weight of a.q.weight, and its scale a.q.weight_scale_inv becomes "
        "a.y.weight_scale_inv"
    )


def test_codes_that_are_cast_without_their_scale_are_found(engine):
    found = refusal(
        engine,
        engine.rules(
            "from: '{p}.q.weight', to: '{p}.q.weight', via: [{cast: {to: bfloat16}}]",
            keep=["{k...}"],
        ),
    )
    assert (
        found.message
        == "rule 'r0' makes a.q.weight of a.q.weight, and its scale a.q.weight_scale_inv stays"
        or "a.q.weight" in found.message
    )


@pytest.mark.parametrize(
    "rules",
    [
        ("from: '{p}.q.{leaf:weight|weight_scale_inv}', to: '{p}.query.{leaf}'",),
        ("from: '{p}.q.weight', to: '{p}.x.weight'",
        "from: '{p}.q.weight_scale_inv', to: '{p}.x.weight_scale_inv'"),
        ("from: '{p}.q.weight', to: '{p}.x.weight'",
        "from: '{p}.q.weight_scale_inv', to: '{p}.x.weight_scale'"),
        ("from: '{p}.q.weight_scale_inv', to: '{p}.q.weight_scale'",),
        ("from: '{p}.q.{leaf:weight|weight_scale_inv}', via: [{drop: {why: unused}}]",),
        ("from: '{p}.q.{leaf:weight|weight_scale_inv}', to: '{leaf}s.of.{p}'",),
        ("from: '{p}.q.weight', to: '{p}.kernel'",
        "from: '{p}.q.weight_scale_inv', to: '{p}.kernel_s'"),
        (DECODED,),
        ("from: '{p}.norm.weight', to: '{p}.n.weight'",),
    ],
    ids=["one rule", "two rules", "another producer's name", "a rename of the scale",
    "both dropped", "names no table knows",
         "two rules, names no table knows", "decoded", "something else moves"],
)  # fmt: skip
def test_parts_that_stay_together_are_no_matter(engine, rules):
    assert composed(engine, engine.rules(*rules, keep=["{k...}"]))


def test_parts_kept_are_no_matter(engine):
    assert (
        len(
            composed(
                engine, engine.rules("from: '{p}.norm.weight', to: '{p}.n.weight'", keep=["{k...}"])
            )
        )
        == 3
    )


def test_a_wide_weight_beside_a_scale_is_not_encoded(engine):
    tensors = {"a.q.weight": ("bfloat16", (4, 4)), "a.q.weight_scale": ("float32", (4,))}
    assert composed(
        engine, engine.rules("from: '{p}.q.weight', to: '{p}.k.weight'", keep=["{k...}"]), tensors
    )


def test_only_the_ends_of_a_path_count(engine):
    one = engine.rules("from: '{p}.q.weight', to: '{p}.k.weight'", keep=["{k...}"])
    two = engine.rules(
        "from: '{p}.q.weight_scale_inv', to: '{p}.k.weight_scale_inv'",
        keep=["{k...}"],
        name="b.yaml",
        edge="[v2, v3]",
    )
    assert composed(engine, one, FP8, two)


def experts(rows, blocks):
    out = {}
    for e in range(2):
        for w in ("gate_proj", "up_proj"):
            out[f"l.mlp.experts.{e}.{w}.weight"] = (CODES, (rows, 4))
            out[f"l.mlp.experts.{e}.{w}.weight_scale_inv"] = ("float32", (blocks, 1))
    return out


JOIN = "via: [{stack: {over: e}}, {concat: {over: w, dim: 1}}]"
STACKED = (
    "from: '{p}.mlp.experts.{e:int}.{w:gate_proj|up_proj}.weight', to: "
    "'{p}.mlp.experts.gate_up_proj', " + JOIN,
    "from: '{p}.mlp.experts.{e:int}.{w:gate_proj|up_proj}.weight_scale_inv', to: "
    "'{p}.mlp.experts.gate_up_proj_scale_inv', " + JOIN,
)


def test_stacked_experts_belong_to_stacked_scales(engine):
    made = composed(engine, engine.rules(*STACKED), experts(12, 3))
    assert made == {
        "l.mlp.experts.gate_up_proj": "float8_e4m3fn [2, 24, 4]",
        "l.mlp.experts.gate_up_proj_scale_inv": "float32 [2, 6, 1]",
    }


def test_blocks_that_joining_cuts_are_refused(engine):
    # 576 rows are four blocks of 128 and a half, whatever the scales of the second half would be of
    found = refusal(engine, engine.rules(*STACKED), experts(576, 5))
    assert found.code == "M310"
    assert (
        "[576, 4] has scales [5, 1] and becomes l.mlp.experts.gate_up_proj [2, 1152, 4] with [2, "
        "10, 1]" in found.message
    )


def test_a_weight_that_is_cut_within_a_block_is_refused(engine):
    tensors = {"a.q.weight": (CODES, (256, 128)), "a.q.weight_scale_inv": ("float32", (2, 1))}
    cut = (
        "from: '{p}.q.weight', to: '{p}.q.weight', via: [{slice: {dim: 0, stop: 100, of: 256, "
        "value: 0}}]"
    )
    found = refusal(engine, engine.rules(cut, keep=["{k...}"]), tensors)
    assert (
        found.code,
        "[256, 128] has scales [2, 1] and becomes a.q.weight [100, 128]" in found.message,
    ) == ("M310", True)


def test_stacked_experts_without_their_scales_are_found(engine):
    with pytest.raises(MigrateError) as caught:
        composed(engine, engine.rules(STACKED[0], keep=["{k...}"]), experts(12, 3))
    assert {d.code for d in caught.value.diagnostics} == {"M408"}
    assert len(caught.value.diagnostics) == 3
    assert "and 1 more like this" in caught.value.diagnostics[-1].notes


# names of producers: key -> spec; the ending that a rename takes and the one that it forgets
NAMED = {
    "gpt-oss": ({"a.up_blocks": (U8, (2, 8, 1, 16)), "a.up_scales": (U8, (2, 8, 1))},
                "a.{w}_blocks", "a.b.{w}_blocks", "its scale a.up_scales stays"),
    "gpt-oss of OpenAI": ({"a.up.blocks": (U8, (2, 8, 1, 16)), "a.up.scales": (U8, (2, 8, 1))},
                          "a.{w}.blocks", "b.{w}.blocks", "its scale a.up.scales stays"),
    "DeepSeek-V4": ({"a.up.weight": ("int8", (32, 16)), "a.up.scale": ("float8_e8m0fnu", (32, 1))},
                    "a.{w}.weight", "b.{w}.weight", "its scale a.up.scale stays"),
    "stacked experts": ({"a.up": (CODES, (2, 128, 128)), "a.up_scale_inv": ("float32", (2, 1, 1))},
                        "a.up", "b.up", "its scale a.up_scale_inv stays"),
    "bitsandbytes": ({"a.up.weight": (U8, (64, 1)), "a.up.weight.absmax": ("float32", (2,)),
                      "a.up.weight.quant_map": ("float32", (16,)),
                      "a.up.weight.quant_state.bitsandbytes__nf4": (U8, (78,))},
                     "a.{w}.weight", "b.{w}.weight", "its absmax a.up.weight.absmax stays"),
    "bitsandbytes int8": ({"a.up.weight": ("int8", (8, 8)), "a.up.SCB": ("float32", (8,))},
                          "a.{w}.weight", "b.{w}.weight", "its scale a.up.SCB stays"),
    "compressed-tensors": ({"a.up.weight_packed": ("int32", (8, 16)),
                            "a.up.weight_scale": ("bfloat16", (8, 1)),
                            "a.up.weight_shape": ("int64", (2,))},
                           "a.{w}.weight_{s:packed|scale}", "b.{w}.weight_{s}",
                           "its shape a.up.weight_shape stays"),
    "GPTQ": ({"a.up.qweight": ("int32", (16, 32)), "a.up.qzeros": ("int32", (4, 4)),
              "a.up.scales": ("float16", (4, 32)), "a.up.g_idx": ("int32", (128,))},
             "a.{w}.q{s:weight|zeros}", "b.{w}.q{s}", "its scale a.up.scales stays"),
    "ModelOpt": ({"a.up.weight": (U8, (8, 16)), "a.up.weight_scale": (CODES, (8, 2)),
                  "a.up.weight_scale_2": ("float32", ())},
                 "a.{w}.{s:weight|weight_scale}", "b.{w}.{s}",
                 "its global a.up.weight_scale_2 stays"),
    "torchao": ({"a._weight_qdata": (CODES, (8, 16)), "a._weight_scale": ("float32", (8, 1))},
                "{p}._weight_qdata", "b.{p}._weight_qdata", "its scale a._weight_scale stays"),
    "Transformer Engine": ({"a.weight._data": (U8, (8, 16)),
                            "a.weight._scale_inv": ("float32", (1,))},
                           "{p...}._data", "b.{p}._data", "its scale a.weight._scale_inv stays"),
    "inputs": ({"a.up.weight": (CODES, (8, 16)), "a.up.weight_scale": ("float32", ()),
                "a.up.input_scale": ("float32", ())},
               "a.{w}.{s:weight|weight_scale}", "b.{w}.{s}",
               "its input_scale a.up.input_scale stays"),
    "cache": ({"a.k_proj.weight": (CODES, (8, 16)), "a.k_proj.weight_scale": ("float32", ()),
               "a.k_proj.k_scale": ("float32", ())},
              "a.{w}.{s:weight|weight_scale}", "b.{w}.{s}", "its k_scale a.k_proj.k_scale stays"),
    "cache of an attention": ({"a.v_proj.weight": (CODES, (8, 16)),
                               "a.v_proj.weight_scale": ("float32", ()),
                               "a.v_scale": ("float32", (1,))},
                              "a.{w}.{s:weight|weight_scale}", "b.{w}.{s}",
                              "its v_scale a.v_scale stays"),
    "cache, vLLM": ({"a.qkv_proj.weight_packed": (U8, (8, 16)),
                     "a.qkv_proj.weight_scale": (U8, (8, 1)), "a.attn.k_scale": ("float32", ())},
                    "a.{w}.{s:weight_packed|weight_scale}", "b.{w}.{s}",
                    "its k_scale a.attn.k_scale stays"),
    "ModelOpt, stacked": ({"a.up": (U8, (2, 8, 16)), "a.up_weight_scale": (CODES, (2, 8, 2)),
                           "a.up_weight_scale_2": ("float32", (2,)),
                           "a.up_input_scale": ("float32", ())},
                          "a.{w:up|up_weight_scale}", "b.{w}",
                          "its global a.up_weight_scale_2 stays"),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMED)
def test_a_part_that_is_left_behind_is_found_whatever_its_producer_calls_it(engine, name):
    tensors, from_, to, says = NAMED[name]
    rule = f"from: '{from_}', to: '{to}'"
    with pytest.raises(MigrateError) as caught:
        composed(engine, engine.rules(rule, keep=["{k...}"]), tensors)
    assert {d.code for d in caught.value.diagnostics} == {"M408"}
    assert any(says in d.message for d in caught.value.diagnostics)


@pytest.mark.parametrize("name", NAMED)
def test_parts_of_all_producers_may_move_together(engine, name):
    tensors = NAMED[name][0]
    made = composed(engine, engine.rules("from: 'a.{k...}', to: 'b.{k}'"), tensors)
    assert set(made) == {f"b{key[1:]}" for key in tensors}


def test_what_only_travels_may_be_dropped_and_may_stay_in_its_module(engine):
    tensors = NAMED["inputs"][0]
    drop = "from: '{p...}.input_scale', via: [{drop: {why: inputs are scaled as they come}}]"
    assert len(composed(engine, engine.rules(drop, keep=["{k...}"]), tensors)) == 2
    rename = "from: '{p...}.{s:weight|weight_scale}', to: '{p}.w.{s}'"
    assert composed(engine, engine.rules(rename, keep=["{k...}"]), tensors)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("input_scale", "what reads plain weights does not use it"),
        ("k_scale", None),
    ],
)
def test_what_stays_beside_decoded_weights_is_a_note(engine, name, says):
    tensors = {**FP8, f"a.q.{name}": ("float32", (4,))}
    rule = engine.rules(DECODED.replace("'{p}.k.weight'", "'{p}.q.weight'"), keep=["{k...}"])
    ((_, bound),) = composition(engine, rule, tensors).steps
    found = [note for note in bound.notes if name in note]
    if says is None:
        assert not found
    else:
        assert found[0].startswith(f"`{name}` stays beside weights that are decoded (a.q.{name}): ")
        assert says in found[0]


@pytest.mark.parametrize(
    "rule",
    [
        DECODED.replace("'{p}.k.weight'", "'{p}.q.weight'"),
        "from: '{p...}.weight', to: '{p}.weight_packed'",
    ],
    ids=["decoded", "under another name"],
)
def test_what_inputs_are_multiplied_by_does_not_stay_beside_other_weights(engine, rule):
    tensors = {**FP8, "a.q.pre_quant_scale": ("float32", (4,))}
    if "weight_packed" in rule:
        tensors = {"a.q.weight": (CODES, (8, 4)), "a.q.pre_quant_scale": ("float32", (4,))}
    found = refusal(engine, engine.rules(rule, keep=["{k...}"]), tensors)
    assert found.code == "M408"
    assert found.message == (
        "rule 'r0' makes other weights of those whose `pre_quant_scale` stays: a.q.pre_quant_scale"
    )
    drop = "from: '{m...}.pre_quant_scale', via: [{drop: {why: it is one everywhere}}]"
    made = composed(engine, engine.rules(rule, drop, keep=["{k...}"]), tensors)
    assert "a.q.pre_quant_scale" not in made


def test_what_an_attention_keeps_of_its_cache_may_stay_where_projections_are_fused(engine):
    tensors = {
        "a.k_proj.weight": (CODES, (8, 16)), "a.v_proj.weight": (CODES, (8, 16)),
        "a.k_scale": ("float32", ()), "a.v_scale": ("float32", ()),
    }  # fmt: skip
    fuse = "from: '{p}.{w:k_proj|v_proj}.weight', to: '{p}.qkv.weight', via: [{concat: {over: w}}]"
    assert set(composed(engine, engine.rules(fuse, keep=["{k...}"]), tensors)) == {
        "a.qkv.weight", "a.k_scale", "a.v_scale",
    }  # fmt: skip


def test_what_travels_with_a_weight_that_is_dropped_is_left_behind(engine):
    drop = "from: '{p...}.{s:weight|weight_scale}', via: [{drop: {why: unused}}]"
    found = refusal(engine, engine.rules(drop, keep=["{k...}"]), NAMED["inputs"][0])
    assert found.message == (
        "rule 'r0' drops a.up.weight, and its input_scale a.up.input_scale stays"
    )


def test_looking_for_scales_takes_work_as_there_are_keys():
    assert steps(looking(800)) < 1.5 * 8 * steps(looking(100))


def looking(layers):
    tensors = {}
    for n in range(layers):
        tensors[f"m.{n}.weight"] = Stored(spec(CODES, (128, 128)), 0, 0)
        tensors[f"m.{n}.weight_scale_inv"] = Stored(spec("float32", (1, 1)), 0, 0)
    views = Views()
    outputs = {
        f"x.{key}": Tensor(s.spec, views.stored(s.spec.shape), (key,)) for key, s in tensors.items()
    }
    report = Report()

    def go():
        pairs.check_pairs(tensors, outputs, [], report)
        assert not report.diagnostics

    return go
