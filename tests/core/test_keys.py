import contextlib
import random

import pytest
from key_oracle import likely_key, random_key, random_pieces, readings, text_of
from marks import thorough
from work import steps, times

from migrate.core.errors import PatternError
from migrate.core.keys import (
    CaptureType,
    NegativeIndex,
    TwoReadings,
    narrower,
    narrower_any,
    nearest,
    parse,
)
from migrate.core.notation import Unset


@pytest.mark.parametrize(
    ("pattern", "key", "expected"),
    [
        (
            "{p...}.experts.{e:int}.{w:w1|w3}.weight",
            "model.0.experts.12.w3.weight",
            ("model.0", 12, "w3"),
        ),
        ("{p...}.experts.{e:int}.{w:w1|w3}.weight", "experts.12.w3.weight", ("", 12, "w3")),
        ("{m...}.weight", "weight", ("",)),
        ("{m...}.weight", "a.b.weight", ("a.b",)),
        ("{m...}.weight", ".weight", None),
        ("{m...}.weight", "xweight", None),
        ("model.{k...}", "model", ("",)),
        ("model.{k...}", "model.a.b", ("a.b",)),
        ("model.{k...}", "model.", None),
        ("model.{k...}", "models.a", None),
        ("{k...}", "", ("",)),
        ("{k...}", "a..b", ("a..b",)),
        ("{k...}", ".", (".",)),
        ("a.{k...}.b", "a.b", ("",)),
        ("a.{k...}.b", "a.x.y.b", ("x.y",)),
        ("a.{k...}.b", "a..b", None),
        ("{a}", "", None),
        ("{a}", "x.y", None),
        (
            "{p...}.denselayer{n:int}.{w:norm|relu|conv}.{i:1|2}.{leaf}",
            "f.denselayer3.norm.1.weight",
            ("f", 3, "norm", "1", "weight"),
        ),
        (
            "{p...}.denselayer{n:int}.{w:norm|relu|conv}.{i:1|2}.{leaf}",
            "denselayer16.conv.2.weight",
            ("", 16, "conv", "2", "weight"),
        ),
        (
            "{p...}.denselayer{n:int}.{w:norm|relu|conv}{i:1|2}.{leaf}",
            "f.denselayer3.norm1.weight",
            ("f", 3, "norm", "1", "weight"),
        ),
        ("{m...}.weight{i:int}", "a.weight12", ("a", 12)),
        ("{m...}.weight{i:int}", "weight0", ("", 0)),
        ("{m...}.weight{i:int}", "a.weight", None),
        ("{m...}.weight{i:int}", "a.weight01", None),
        ("x.{n:int}", "x.0", (0,)),
        ("x.{n:int}", "x.00", None),
        ("x.{n:int}", "x.-1", None),
        ("x.{n:int}", "x.+1", None),
        ("x.{n:int}", "x.1_0", None),
        ("x.{n:int}", "x.٣", None),
        ("x.{n:int}", "x.²", None),
        ("x.{n:int}", "x.1 ", None),
        ("x.{n:int}", "x." + "9" * 5000, None),
        ("{a}{n:int}", "w12", ("w", 12)),
        ("{a}{n:int}", "12", None),
        ("{n:int}{a}", "12w", (12, "w")),
        ("{n:int}{a}", "123", None),
        ("{w:a.b|c}.x", "a.b.x", ("a.b",)),
        ("{w:attn.c|mlp.c}.{leaf}", "attn.c.bias", ("attn.c", "bias")),
        ("{{{n}}}", "{x}", ("x",)),
        ("{{}}", "{}", ()),
        ("{m...}.{n}_g", "a.weight_g", ("a", "weight")),
        ("{k...}.weight@{r:int}", "a.weight@3", ("a", 3)),
        ("{k...}.weight@{r:int}", "weight@0", ("", 0)),
        ("{k...}.weight@{r:int}", "a.weight", None),
        ("{k...}@{r:int}", "a.b@7", ("a.b", 7)),
        ("{k...}@{r:int}", "@7", ("", 7)),
        ("{k...}@{r:int}", "a@1@2", ("a@1", 2)),
        ("model.{k...}@{r:int}", "model@1", ("", 1)),
        ("model.{k...}@{r:int}", "model.a.b@1", ("a.b", 1)),
        ("{w}.{k...}@{r:int}", "m@x@1", ("m@x", "", 1)),
        ("{n:int}.{w}.{n}", "3.x.3", (3, "x")),
        ("{n:int}.{w}.{n}", "3.x.4", None),
        ("{m...}.x.{m...}", "a.b.x.a.b", ("a.b",)),
        ("{m...}.x.{m...}", "a.x.b", None),
        ("{a}_{a}", "x_y_x_y", ("x_y",)),
        ("{a}_{a}", "p_q_r", None),
        ("layers.{2*n+1}.x", "layers.7.x", (3,)),
        ("layers.{2*n+1}.x", "layers.6.x", None),
        ("layers.{n-3}.x", "layers.2.x", (5,)),
        ("layers.{3*i-3}.x", "layers.0.x", (1,)),
        ("layers.{n+2}.x", "layers.1.x", None),
        ("{n:int}.{n+1}", "3.4", (3,)),
        ("{n:int}.{n+1}", "3.5", None),
        ("grüße.{w}", "grüße.ß", ("ß",)),
        ("%s.{w}%", "%s.x%", ("x",)),
    ],
)
def test_a_key_is_read_as_written(pattern, key, expected):
    parsed = parse(pattern)
    values = parsed.match(key)
    assert values == expected
    if values is not None:
        assert [type(v) for v in values] == [type(v) for v in expected]
        assert parsed.expand(dict(zip(parsed.captures, values, strict=True))) == key


@pytest.mark.parametrize(
    ("pattern", "key", "one", "other"),
    [
        ("{a...}.x.{b...}", "p.x.q.x.r", {"a": "p", "b": "q.x.r"}, {"a": "p.x.q", "b": "r"}),
        ("{a}_{b}", "x_y_z", {"a": "x", "b": "y_z"}, {"a": "x_y", "b": "z"}),
        ("{w:a|a.b}.{k...}", "a.b.c", {"w": "a", "k": "b.c"}, {"w": "a.b", "k": "c"}),
        ("{a...}.{n:int}.{b...}", "1.2", {"a": "", "n": 1, "b": "2"}, {"a": "1", "n": 2, "b": ""}),
    ],
)
def test_two_readings_are_an_error_that_shows_both(pattern, key, one, other):
    with pytest.raises(TwoReadings) as caught:
        parse(pattern).match(key)
    assert {tuple(sorted(r.items())) for r in (caught.value.first, caught.value.second)} == {
        tuple(sorted(r.items())) for r in (one, other)
    }
    assert (caught.value.key, caught.value.pattern) == (key, pattern)


@pytest.mark.parametrize(
    ("repeat", "count"),
    thorough([(True, 1_200), (False, 1_200), (True, 12_000), (False, 12_000)], default=2),
)
def test_matching_agrees_with_an_exhaustive_matcher(repeat, count):
    rng = random.Random(11 + repeat)
    compared = matched = ambiguous = 0
    while compared < count:
        pieces = random_pieces(rng, repeat)
        text = text_of(pieces)
        try:
            pattern = parse(text)
        except PatternError:
            continue
        for _ in range(4):
            key = likely_key(rng, pieces) if rng.random() < 0.5 else random_key(rng)
            if rng.random() < 0.1:
                key = key.replace(rng.choice([".", "x", "0"]), rng.choice(["", ".", "1"]), 1)
            expected = readings(pieces, key)
            compared += 1
            try:
                found = pattern.match(key)
            except TwoReadings as error:
                shown = {
                    tuple(r[name] for name in pattern.captures) for r in (error.first, error.second)
                }
                assert len(shown) == 2, (text, key)
                assert shown <= expected, (text, key)
                ambiguous += 1
                continue
            assert expected == (set() if found is None else {found}), (text, key)
            if found is not None:
                matched += 1
                assert pattern.expand(dict(zip(pattern.captures, found, strict=True))) == key
                assert pattern.expander(pattern.captures)(found) == key
                assert pattern.anchors <= set(key.split(".")), (text, key)
    assert matched > count // 6
    assert ambiguous > count // 40


def test_matching_is_linear_in_the_key():
    pattern = parse("{a...}.x.{b...}.y.{c...}.z.{d...}")

    def matching(segments, words):
        key = ".".join(words * (segments // 4))

        def go():
            try:
                assert pattern.match(key) is None
            except TwoReadings:
                assert words == ["x", "y", "z", "w"]

        return go

    for words in (["x", "y", "z", "w"], ["x", "y", "w", "w"]):
        # were it quadratic, 128 * 128
        assert times(matching(32_000, words), matching(250, words)) < 10 * 128


@pytest.mark.parametrize(
    ("pattern", "key"),
    [
        ("{a}_{b}_{c}_{d}", "_" * 20_000),
        ("{a}_{b}_{a}_{b}", "x_" * 10_000),
        ("{a...}.x.{a...}", "x." * 10_000 + "x"),
        ("{a}{w:x|xx|xxx}{b}", "x" * 20_000),
        ("{a}{n:int}{b}", "1" * 20_000),
        ("x{a}y", "x" * 40_000),
    ],
)
def test_hostile_keys_cost_little(pattern, key):
    def go():
        with contextlib.suppress(TwoReadings):
            parse(pattern).match(key)

    assert times(go) < 100


def test_too_many_disagreeing_cuts_are_an_error_and_no_guess():
    # 2 ** n cuts whose captures disagree: whether one agrees is not searched for
    with pytest.raises(TwoReadings):
        parse("{a}_{b}_{a}_{c}").match("_".join("abcdefghijklmnopqrstuvwxyz" * 3))


def test_types_come_from_other_patterns_where_the_text_declares_none():
    types = parse("{p...}.{w:q|k}.{n:int}").types
    target = parse("{p}.{w}_proj.{n+1}", types)
    assert {name: kind.kind for name, kind in target.types.items()} == {
        "p": "path",
        "w": "enum",
        "n": "int",
    }
    assert target.match("a.b.k_proj.3") == ("a.b", "k", 2)
    assert target.match("a.b.v_proj.3") is None
    assert target.expand({"p": "", "w": "q", "n": 0}) == "q_proj.1"


def test_a_plain_capture_takes_the_values_that_it_is_given():
    pattern = parse("layers.{w}.weight", {"w": CaptureType("enum", ("attention.wq", "ffn"))})
    assert pattern.match("layers.attention.wq.weight") == ("attention.wq",)
    assert pattern.match("layers.other.weight") is None


def test_flat_is_expanded_and_never_parsed():
    pattern = parse("model_ema.{k:flat}", {"k": CaptureType("path")})
    assert pattern.has_flat
    assert pattern.expand({"k": "layers.0.weight"}) == "model_ema.layers0weight"
    with pytest.raises(ValueError, match="never parsed"):
        pattern.match("model_ema.layers0weight")


def test_index_expressions_over_params_are_resolved_first():
    pattern = parse("mtp.{n-$layers}.{k...}")
    assert pattern.params == ("layers",)
    with pytest.raises(Unset):
        pattern.match("mtp.0.x")
    with pytest.raises(Unset):
        pattern.with_params({})
    resolved = pattern.with_params({"layers": 61})
    assert resolved.params == ()
    assert resolved.match("mtp.0.x") == (61, "x")
    assert resolved.expand({"n": 62, "k": "y"}) == "mtp.1.y"
    assert parse("a.{k...}").with_params({}) == parse("a.{k...}")


def test_a_negative_index_is_an_error_forwards():
    pattern = parse("mtp.{n-3}.x")
    with pytest.raises(NegativeIndex) as caught:
        pattern.expand({"n": 2})
    assert (caught.value.name, caught.value.value) == ("n", -1)
    with pytest.raises(NegativeIndex):
        parse("x.{n:int}").expand({"n": -1})


def test_patterns_are_immutable_equal_by_meaning_and_hashable():
    one, other = parse("{a}.x.{n:int}"), parse("{a}.x.{n:int}")
    assert one == other
    assert hash(one) == hash(other)
    assert one != parse("{a}.x.{n}")
    with pytest.raises(AttributeError):
        one.text = "y"


@pytest.mark.parametrize(
    ("pattern", "anchors", "touches", "ranked"),
    [
        ("{p...}.mlp.experts.{e:int}.{w:w1|w3}.weight", {"mlp", "experts", "weight"}, False, False),
        ("model.layers.61.x{w}", {"model", "layers"}, True, False),
        ("layers.007.x", {"layers", "007", "x"}, True, False),
        ("{w:a.0|b}.norm1", {"norm1"}, True, False),
        ("a.{w}1", {"a"}, True, False),
        ("norm.weight@{r:int}", {"norm"}, False, True),
        ("{k...}@{r:int}", set(), False, True),
        ("a.b.{k...}@{r:int}", {"a"}, False, True),
        ("x@y", {"x@y"}, False, False),
    ],
)
def test_what_the_index_of_rules_needs_is_known(pattern, anchors, touches, ranked):
    parsed = parse(pattern)
    assert (parsed.anchors, parsed.touches_digits, parsed.ranked) == (anchors, touches, ranked)


@pytest.mark.parametrize(
    ("pattern", "key", "position", "found", "expected"),
    [
        (
            "{p...}.mlp.experts.{e:int}.{w:w1|w3}.weight",
            "m.0.mlp.experts.3.w4.weight",
            18,
            "w4",
            "{w:w1|w3}",
        ),
        (
            "{p...}.mlp.experts.{e:int}.w2.weight",
            "m.0.mlp.expert.3.w2.weight",
            14,
            "expert",
            "experts",
        ),
        ("model.layers.{n:int}.x", "model.layers.a.x", 13, "a", "{n:int}"),
        ("model.x", "model.x.y", 7, "y", "the end of the key"),
        ("model.x", "model.xy", 7, "xy", "x"),
        ("model.x.y", "model.x", 7, "", "y"),
        ("model.x", "other", 0, "other", "model"),
        ("a.linear_{i:int}.{leaf}", "a.linear_x.weight", 9, "linear_x", "linear_{i:int}"),
    ],
)
def test_a_key_that_does_not_match_says_where_it_left_the_pattern(
    pattern, key, position, found, expected
):
    failure = parse(pattern).failure(key)
    assert (failure.position, failure.actual, failure.expected) == (position, found, expected)


def test_failure_is_total_on_keys_that_do_not_match():
    rng = random.Random(2)
    asked = 0
    while asked < 3000:
        try:
            pattern = parse(text_of(random_pieces(rng)))
        except PatternError:
            continue
        key = random_key(rng)
        try:
            if pattern.match(key) is not None:
                continue
        except TwoReadings:
            continue
        failure = pattern.failure(key)
        asked += 1
        assert 0 <= failure.position <= len(key)
        assert failure.actual in key
        assert failure.expected


def test_the_nearest_pattern_is_the_one_with_most_text_in_common():
    patterns = [
        parse(p)
        for p in (
            "lm_head.weight",
            "{p...}.self_attn.{w:q|k}_proj.weight",
            "{p...}.mlp.{w:gate|up}_proj.weight",
            "{n:int}",
        )
    ]
    found = nearest(patterns, "model.layers.0.self_attn.v_proj.weight")
    assert found is not None
    assert found[0] is patterns[1]
    assert (found[1].actual, found[1].expected) == ("v_proj", "{w:q|k}_proj")
    assert nearest(patterns, "zzz") is None
    assert nearest([], "x") is None


def test_a_pattern_is_narrower_when_its_keys_lie_inside_and_not_the_other_way_round():
    broad, narrow = parse("{p...}.weight"), parse("{p...}.mlp.{w:gate|up}.weight")
    assert narrower(narrow, broad)
    assert not narrower(broad, narrow)
    assert not narrower(broad, parse("{q...}.weight"))
    assert narrower_any([narrow, parse("a.bias")], [broad, parse("{k...}.bias")])
    assert not narrower_any([narrow, parse("a.scale")], [broad, parse("{k...}.bias")])


def test_the_patterns_of_known_migrations_parse():
    for text in (
        "{p...}.{m:self_attn|input_layernorm|post_attention_layernorm}.{k...}",
        "{p...}.{w:rotary_emb.inv_freq|rotary_emb.cos_cached|attn.bias}",
        "{m}.parametrizations.{n}.original0",
        "h.{n:int}.{w:attn.c_attn|attn.c_proj|mlp.c_fc|mlp.c_proj}.weight",
        "layers.{n:int}.attention.wq.weight@{r:int}",
        "decoder.layers.{2*n+1}.{m:pre_mlp_layernorm|mlp}.{k...}",
        "mtp_layers.{n-$layers}.{k...}",
        "{p...}.mixer.in_proj.weight.{w:z|x|B|C|dt}@{r:int}",
        "base_model.model.{m...}.lora_A.weight",
        "state.{p...}.mlp.{w:gate|up}_proj.weight.{s:exp_avg|exp_avg_sq}",
        "{m...}._extra_state",
        "{m...}.bias{i:int}",
        "{p...}.mlp.{3*i-3}.{leaf:weight|bias}",
    ):
        assert parse(text).text == text


def test_an_ordinary_key_is_matched_and_expanded_in_few_steps():
    pattern = parse("{p...}.block_sparse_moe.experts.{e:int}.{w:w1|w3}.weight")
    key = "model.layers.0.block_sparse_moe.experts.12.w3.weight"
    values = pattern.match(key)
    expand = pattern.expander(pattern.captures)
    assert steps(lambda: pattern.match(key)) < 600
    assert steps(lambda: expand(values)) < 20
