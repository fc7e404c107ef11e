import random

import pytest
from key_oracle import likely_key, random_pieces, text_of
from marks import thorough

from migrate.core.errors import PatternError
from migrate.core.keys import TwoReadings, parse


@pytest.mark.parametrize(
    ("wider", "narrower"),
    [
        ("{k...}", "{a}_{b}.{n:int}.{w:a|b.c}"),
        ("{k...}", "{j...}"),
        ("{m...}.weight", "{m...}.{w:q|k}.weight"),
        ("{m...}.weight", "weight"),
        ("{m...}.weight", "a.{k...}.weight"),
        ("a.{k...}", "a.{k...}.b"),
        ("a.{k...}", "a"),
        ("{a}.x", "{n:int}.x"),
        ("{a}.x", "w{n:int}_{b}.x"),
        ("{a}.{b}", "{c}.{c}"),
        ("{c}.{c}", "{d}.{d}"),
        ("{n:int}.{n+1}", "{m:int}.{m+1}"),
        ("{w:a|b|c}.x", "{v:c|a}.x"),
        ("{n:int}.x", "{2*n+1}.x"),
        ("{n-2}.x", "{n:int}.x"),
        ("{2*n+1}.x", "{4*n+3}.x"),
        ("{n-$k}.x", "{m-$k}.x"),
        ("x{n:int}", "x12"),
        ("{a}", "a{w:x|y}"),
        ("{k...}@{r:int}", "{k...}.weight@{r:int}"),
        ("{p...}.{m:attn|mlp}.{k...}", "{p...}.mlp.experts.{e:int}"),
        ("model.layers.{n:int}.{k...}", "model.layers.61.eh_proj.weight"),
    ],
)
def test_a_wider_pattern_includes(wider, narrower):
    assert parse(wider).includes(parse(narrower))


@pytest.mark.parametrize(
    ("wider", "narrower"),
    [
        ("{m...}.weight", "{m...}.{w}"),
        ("{a}", "{k...}"),
        ("{c}.{c}", "{a}.{b}"),
        ("{n:int}.x", "{a}.x"),
        ("{w:a|b}.x", "{w:a|b|c}.x"),
        ("{n+1}.x", "{n:int}.x"),
        ("{2*n}.x", "{4*n+1}.x"),
        ("{n-$k}.x", "{m-$j}.x"),
        ("x{n:int}{v}", "x12{w}"),
        ("{n:int}", "12{w:3|a}"),
        ("a.{k...}", "{k...}"),
        ("model.{k...}", "models.{k...}"),
        ("{a}.b", "{w:x|y.z}.b"),
        ("layers.61.{k...}", "layers.{n:int}.{k...}"),
        ("{k...}@{r:int}", "{k...}"),
        ("a.{k...}.b", "a.{w}"),
        ("{n:int}.{n+1}", "{n:int}.{n+2}"),
    ],
)
def test_a_pattern_with_other_keys_is_not_included(wider, narrower):
    assert not parse(wider).includes(parse(narrower))


def can_match(pattern, key):
    try:
        return pattern.match(key) is not None
    except TwoReadings:
        return True


@pytest.mark.parametrize("count", thorough([80, 260]))
def test_inclusion_is_sound_on_random_pairs(count):
    rng = random.Random(17)
    parsed = []
    while len(parsed) < count:
        pieces = random_pieces(rng, repeat=rng.random() < 0.3)
        try:
            pattern = parse(text_of(pieces))
        except PatternError:
            continue
        keys = {likely_key(rng, pieces) for _ in range(30)}
        if any(not isinstance(p, str) and p[0] == "path" for p in pieces):
            absent = [p for p in pieces if isinstance(p, str) or p[0] != "path"]
            keys |= {likely_key(rng, absent).replace("..", ".").strip(".") for _ in range(10)}
        parsed.append((pattern, [key for key in keys if can_match(pattern, key)]))
    yes = 0
    for wider, _ in parsed:
        for narrower, keys in parsed:
            if wider is not narrower and wider.includes(narrower):
                yes += 1
                for key in keys:
                    assert can_match(wider, key), (wider.text, narrower.text, key)
    # of all pairs
    assert yes > count**2 // 225


def test_many_alternatives_are_decided_without_writing_all_out():
    words = "|".join(f"w{i}" for i in range(100))
    narrow = parse(f"{{a:{words}}}.{{b:{words}}}.{{c:{words}}}.{{d:{words}}}")
    assert parse("{k...}").includes(narrow)
    assert parse("{a}.{b}.{c}.{d}").includes(narrow)
    assert parse(f"{{a:{words}}}.{{x}}.{{y}}.{{d:{words}}}").includes(narrow)
    assert not parse(f"{{a:{words}}}.{{x}}.{{y:w1|w2}}.{{d:{words}}}").includes(narrow)


def test_many_paths_and_repeated_captures_end_in_an_answer():
    paths = parse(".x.".join(f"{{p{i}...}}" for i in range(12)))
    assert parse("{k...}").includes(paths) in (True, False)
    assert paths.includes(paths)
    repeated = parse("_".join(["{a}", "{b}"] * 12))
    assert repeated.includes(parse("_".join(["x"] * 60))) in (True, False)
