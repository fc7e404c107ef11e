"""Which rule takes which key: the sentences of the rule language about reading, narrowness,
conditions and keeping.
"""

import random

import numpy as np
import pytest

from migrate.planning import match

CASES = {"a.w": "b.w", "b.w": "a.w"}


def codes(found):
    return [d.code for d in found]


def one(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


# ---------------------------------------------------------------------- one key, one rule


def test_rules_see_source_keys_only_so_a_swap_works(engine):
    files = engine.rules("from: a.w, to: b.w", "from: b.w, to: a.w")
    assert engine.moves(files, list(CASES)) == CASES
    assert engine.moves(files, list(CASES), backwards=True) == CASES


def test_a_chain_of_names_moves_each_key_once(engine):
    files = engine.rules('from: "l.{n:int}.w", to: "l.{n+1}.w"')
    assert engine.moves(files, ["l.0.w", "l.1.w", "l.2.w"]) == {
        "l.0.w": "l.1.w",
        "l.1.w": "l.2.w",
        "l.2.w": "l.3.w",
    }


def test_the_order_of_rules_means_nothing(engine):
    rules = [
        'from: "{p...}.w", to: "{p}.weight"',
        'from: "x.{n:int}.w", to: "y.{n}.w"',
        "from: x.3.w, to: special",
        'from: "{p...}.experts.{e:int}.b", to: "{p}.b", via: [{stack: {over: e}}]',
        "from: q, to: r",
        "from: r, to: q",
    ]
    ckpt = {
        k: np.float32([i])
        for i, k in enumerate(
            ["x.1.w", "x.3.w", "z.w", "w", "q", "r", *(f"m.experts.{e}.b" for e in range(12))]
        )
    }
    want = None
    for seed in range(6):
        random.Random(seed).shuffle(rules)
        out = engine.apply(engine.rules(*rules), ckpt)
        found = {k: v.tobytes() for k, v in out.items()}
        want = want or found
        assert found == want
    assert {"y.1.w", "special", "z.weight", "weight", "m.b"} <= set(want)


def test_the_narrower_pattern_takes_the_key(engine):
    files = engine.rules(
        'from: "{k...}", to: "m.{k}"',
        'from: "a.{k...}", to: "n.{k}"',
        'from: "a.{x:b|c}.w", to: "o.{x}"',
    )
    assert engine.moves(files, ["z.w", "a.z", "a.b.w"]) == {
        "z.w": "m.z.w",
        "a.z": "n.z",
        "a.b.w": "o.b",
    }


def test_a_rule_from_x_to_x_exempts_a_subtree(engine):
    files = engine.rules('from: "{k...}", to: "m.{k}"', 'from: "a.{k...}", to: "a.{k}"')
    assert engine.moves(files, ["z.w", "a.z"]) == {"z.w": "m.z.w", "a.z": "a.z"}
    assert engine.moves(files, ["m.z.w", "a.z"], backwards=True) == {"m.z.w": "z.w", "a.z": "a.z"}


def test_the_narrower_inverted_rule_takes_the_key(engine):
    files = engine.rules('from: "m.{k...}", to: "{k}"', 'from: "n.{k...}", to: "a.{k}"')
    keys = {"m.z.w": "z.w", "n.z": "a.z"}
    assert engine.moves(files, list(keys)) == keys
    assert engine.moves(files, list(keys.values()), backwards=True) == {
        v: k for k, v in keys.items()
    }


def test_a_rule_with_several_roles_is_narrow_key_by_key(engine):
    files = engine.rules(
        'from: {w: "x.{n:int}.w", b: "y.{n}.b"}, to: {w: "{n}.w", b: "{n}.b"}',
        'from: "{p...}.w", to: "{p}.weight"',
    )
    assert engine.moves(files, ["x.1.w", "y.1.b", "q.w"]) == {
        "x.1.w": "1.w",
        "y.1.b": "1.b",
        "q.w": "q.weight",
    }


def test_between_two_roles_the_narrower_pattern_takes_the_key(engine):
    files = engine.rules(
        'from: {rest: "{p...}.{x}", scale: "{p...}.scale"}, to: {rest: "{p}.r.{x}", scale: "{p}.s"}'
    )
    assert engine.moves(files, ["a.w", "a.scale"]) == {"a.w": "a.r.w", "a.scale": "a.s"}


def test_two_equally_narrow_rules_are_an_error_that_shows_both(engine):
    (found,) = engine.refusals(
        engine.rules('from: "a.{x}", to: "b.{x}"', 'from: "{x}.w", to: "c.{x}"'), {"a.w": one(1)}
    )
    assert found.code == "M208"
    assert "'r0'" in found.message
    assert "'r1'" in found.message
    assert [s.line for s in found.spans] == [6, 7]
    assert {"a.{x}", "{x}.w"} <= set(found.notes)


def test_two_equally_narrow_roles_are_an_error(engine):
    files = engine.rules('from: {a: "a.{x}", b: "{x}.w"}, to: {a: "b.{x}", b: "c.{x}"}')
    assert codes(engine.refusals(files, {"a.w": one(1)}))[0] == "M208"


def test_an_error_between_rules_is_said_once_for_all_keys_of_a_form(engine):
    ckpt = {f"a.{n}.w": one(1) for n in range(50)}
    files = engine.rules(
        'from: "a.{n:int}.{y}", to: "b.{n}.{y}"', 'from: "{x}.{n:int}.w", to: "c.{x}.{n}"'
    )
    (found,) = engine.refusals(files, ckpt)
    assert found.code == "M208"
    assert any("50 keys" in note for note in found.notes)


def test_files_of_one_edge_must_not_read_the_same_keys_however_narrow(engine):
    files = engine.rules('from: "{k...}", to: "m.{k}"', name="one.yaml") + engine.rules(
        "from: a, to: b", name="two.yaml"
    )
    (found,) = [d for d in engine.refusals(files, {"a": one(1), "c": one(1)}) if d.code == "M208"]
    assert "files of one edge" in found.help


def test_files_of_one_edge_may_read_the_same_keys_by_keep_source(engine):
    files = engine.rules('from: "{k...}", to: "m.{k}"', name="one.yaml")
    files += engine.rules("from: a, to: copy.a, keep_source: true", name="two.yaml")
    assert set(engine.apply(files, {"a": one(1)})) == {"m.a", "copy.a"}


def test_any_rule_is_narrower_than_keep(engine):
    assert engine.moves(
        engine.rules('from: "{k...}.w", to: "{k}.v"', keep=["a.w", "{k...}"]), ["a.w", "b"]
    ) == {"a.w": "a.v", "b": "b"}


def test_keep_of_all_files_of_an_edge_counts(engine):
    files = engine.rules("from: a, to: b", keep=["x"], name="one.yaml") + engine.rules(
        "from: c, to: d", keep=["y"], name="two.yaml"
    )
    assert set(engine.moves(files, ["a", "c", "x", "y"]).values()) == {"b", "d", "x", "y"}


# ---------------------------------------------------------------------- readings


def test_a_key_with_two_readings_is_an_error_that_shows_both(engine):
    (found,) = [
        d
        for d in engine.refusals(
            engine.rules('from: "{a...}.x.{b...}", to: "{a}.y.{b}"'), {"p.x.q.x.r": one(1)}
        )
        if d.code == "M202"
    ]
    assert "p.x.q.x.r" in found.message
    assert any("{a} = p," in note and "q.x.r" in note for note in found.notes)
    assert any("{a} = p.x.q," in note and "{b} = r" in note for note in found.notes)


def test_what_keep_matches_in_two_ways_is_kept(engine):
    keys = ["p.x.q.x.r", "p.0.x.1.x.r", "p.2.x.3.x.r"]
    files = engine.rules("from: a, to: b", keep=["{a...}.x.{b...}"])
    assert set(engine.moves(files, ["a", *keys])) == {"a", *keys}


# ---------------------------------------------------------------------- where


@pytest.mark.parametrize(
    ("where", "taken"),
    [
        ("{e: 3}", {3}),
        ("{e: [1, 3]}", {1, 3}),
        ("{e: {min: 2}}", {2, 3, 4, 5}),
        ("{e: {max: 1}}", {0, 1}),
        ("{e: {min: 1, max: 2}}", {1, 2}),
        ("{e: {multiple_of: 2}}", {0, 2, 4}),
        ("{e: {multiple_of: 2, remainder: 1}}", {1, 3, 5}),
        ("{e: {multiple_of: 2, min: 1}}", {2, 4}),
        ("{e: $some}", {2, 5}),
        ("{e: {max: $n - 1}}", {0, 1, 2}),
        ("{e: $unset}", set(range(6))),
        ("{e: {min: $unset, max: 1}}", {0, 1}),
    ],
)
def test_where_narrows_by_the_values_of_an_int(engine, where, taken):
    params = (
        "n: {type: int, default: 3}, unset: {type: int, optional: true}, some: {type: list, "
        "items: int, default: [2, 5]}"
    )
    files = engine.rules(
        f'from: "x.{{e:int}}", to: "y.{{e}}", where: {where}', keep=["x.{e:int}"], params=params
    )
    moves = engine.moves(files, [f"x.{e}" for e in range(6)])
    assert {int(k[2:]) for k, v in moves.items() if v[0] == "y"} == taken
    back = engine.moves(files, [f"y.{e}" for e in taken], backwards=True)
    assert back == {f"y.{e}": f"x.{e}" for e in taken}


def test_where_backwards_leaves_targets_that_the_rule_cannot_have_made(engine):
    files = engine.rules('from: "x.{e:int}", to: "y.{e}", where: {e: {max: 1}}', keep=["{k...}"])
    assert engine.moves(files, ["y.1", "y.2"], backwards=True) == {"y.1": "x.1", "y.2": "y.2"}


def test_where_by_a_list_of_paths_takes_the_empty_path_too(engine):
    params = "modules: {type: list, items: str}"
    files = engine.rules(
        'from: "{m...}.weight", to: "{m}.w", where: {m: $modules}', keep=["{k...}"], params=params
    )
    moves = engine.moves(files, ["weight", "a.b.weight", "c.weight"], {"modules": ["", "a.b"]})
    assert moves == {"weight": "w", "a.b.weight": "a.b.w", "c.weight": "c.weight"}


def test_a_flag_switches_a_rule_off_and_it_then_need_not_match(engine):
    params = "tied: {type: bool, optional: true}"
    files = engine.rules(
        "from: head, to: h, where: {$tied: false}", "from: a, to: b", params=params, keep=["head"]
    )
    assert engine.moves(files, ["head", "a"], {"tied": False})["head"] == "h"
    assert engine.moves(files, ["head", "a"], {"tied": True})["head"] == "head"
    assert engine.moves(files, ["a"], {"tied": True}) == {"a": "b"}
    assert codes(engine.refusals(files, {"a": one(1)}, {"tied": False})) == ["M206"]


def test_an_argument_that_is_an_unset_optional_param_counts_as_not_written(engine):
    files = engine.rules(
        'from: "x.{e:int}", to: y, via: [{stack: {over: e, count: $n}}]',
        params="n: {type: int, optional: true}",
    )
    ckpt = {f"x.{e}": one(2) for e in range(3)}
    assert engine.apply(files, ckpt)["y"].shape == (3, 2)
    assert engine.apply(files, ckpt, {"n": 3})["y"].shape == (3, 2)
    (found,) = engine.refusals(files, ckpt, {"n": 4})
    assert found.code == "M207"
    assert "missing {e} = 3" in found.message


# ---------------------------------------------------------------------- when


def test_when_narrows_by_dtype_and_ndim(engine):
    files = engine.rules(
        'from: "{k...}.w", to: "{k}.v", when: {dtype: [float32, half], ndim: 2}', keep=["{k...}"]
    )
    ckpt = {
        "a.w": one(2, 2),
        "b.w": one(2),
        "c.w": one(2, 2, dtype=np.int64),
        "d.w": one(2, 2, dtype=np.float16),
    }
    assert set(engine.apply(files, ckpt)) == {"a.v", "b.w", "c.w", "d.v"}


def test_when_decides_between_rules_with_the_same_pattern(engine):
    files = engine.rules(
        'from: "{k...}.w", to: "{k}.two", when: {ndim: 2}',
        'from: "{k...}.w", to: "{k}.one", when: {ndim: [0, 1]}',
    )
    assert set(engine.apply(files, {"a.w": one(2, 2), "b.w": one(2), "c.w": one()})) == {
        "a.two",
        "b.one",
        "c.one",
    }


def test_when_per_role_tests_only_that_role(engine):
    rule = (
        'from: {w: "{p...}.w", b: "{p...}.b"}, to: {w: "{p}.weight", b: "{p}.bias"}, when: {w: '
        "{ndim: 2}}, optional: [b]"
    )
    files = engine.rules(rule, keep=["{k...}"])
    assert set(engine.apply(files, {"a.w": one(2, 2), "a.b": one(2), "c.w": one(3)})) == {
        "a.weight",
        "a.bias",
        "c.w",
    }


def test_backwards_when_is_tested_on_the_inferred_result(engine):
    files = engine.rules(
        'from: "{k...}.w", to: "{k}.v", when: {ndim: 3}, via: [{reshape: {from: [2, 2, 1], to: '
        "[4]}}]",
        keep=["{k...}"],
    )
    assert set(engine.apply(files, {"a.w": one(2, 2, 1), "b.w": one(4)})) == {"a.v", "b.w"}
    out = engine.apply(files, {"a.v": one(4), "b.v": one(5), "c.v": one(2, 2, 1)}, backwards=True)
    assert {k: v.shape for k, v in out.items() if k != "c.w"} == {"a.w": (2, 2, 1), "b.v": (5,)} | (
        {} if "c.w" in out else {"c.v": (2, 2, 1)}
    )


def test_a_tensor_that_the_ops_cannot_take_backwards_goes_to_another_rule(engine):
    files = engine.rules(
        'from: "{k...}.old", to: "{k}.w", when: {ndim: 2}, via: [{transpose: {dims: [0, 1]}}]',
        'from: "{k...}.vector", to: "{k}.w", when: {ndim: 1}, via: [{flip: {dim: 0}}]',
    )
    out = engine.apply(files, {"a.w": one(2, 3), "b.w": one(4)}, backwards=True)
    assert {k: v.shape for k, v in out.items()} == {"a.old": (3, 2), "b.vector": (4,)}


def test_a_tie_backwards_that_when_does_not_decide_is_an_error(engine):
    files = engine.rules(
        'from: "{k...}.old", to: "{k}.w", when: {ndim: 2}',
        'from: "{k...}.older", to: "{k}.w", when: {ndim: [1, 2]}',
    )
    assert codes(engine.refusals(files, {"a.w": one(2, 3)}, backwards=True)) == ["M208"]


def test_a_key_that_is_released_backwards_completes_a_group_of_another_rule(engine):
    files = engine.rules(
        'from: "{p...}.two", to: "{p}.0", when: {ndim: 2}, via: [{transpose: {dims: [0, 1]}}]',
        'from: "{p...}.all", to: "{p}.{e:int}", via: [{unbind: {into: e}}]',
    )
    out = engine.apply(files, {"a.0": one(4), "a.1": one(4), "b.0": one(3, 2)}, backwards=True)
    assert {k: v.shape for k, v in out.items()} == {"a.all": (2, 4), "b.two": (2, 3)}


def test_a_gap_backwards_is_an_error_and_no_reason_to_keep_the_group(engine):
    files = engine.rules(
        'from: "{p}.w", to: "{p}.{e:int}", when: {ndim: 2}, via: [{unbind: {into: e}}]',
        keep=["{k...}"],
    )
    assert set(
        engine.apply(files, {"x.0": one(1), "x.1": one(1), "y.0": one(1, 1)}, backwards=True)
    ) == {"x.w", "y.0"}
    (found,) = engine.refusals(files, {"x.0": one(1), "x.2": one(1)}, backwards=True)
    assert found.code == "M207"
    assert "missing {e} = 1" in found.message


def test_a_rule_whose_only_keys_are_released_to_it_does_match(engine):
    files = engine.rules(
        'from: "two", to: "x.w", when: {ndim: 2}, via: [{transpose: {dims: [0, 1]}}]',
        'from: "{p...}.rest", to: "{p}.w"',
    )
    found = engine.refusals(files, {"x.w": one(4)}, backwards=True)
    assert codes(found) == ["M206"]
    assert "'r0'" in found[0].message


def test_one_member_that_fails_when_while_others_pass_is_named(engine):
    files = engine.rules(
        'from: "x.{e:int}", to: y, when: {ndim: 1}, via: [{stack: {over: e}}]', keep=["{k...}"]
    )
    for odd in (0, 1, 2):
        ckpt = {f"x.{e}": one(2, 2) if e == odd else one(2) for e in range(3)}
        found = engine.refusals(files, ckpt)
        assert set(codes(found)) == {"M207"}
        assert any(f"x.{odd}" in d.message for d in found)
    assert set(engine.apply(files, {"x.0": one(1), "z": one(2)})) == {"y", "z"}


def test_a_whole_group_that_fails_when_is_left_alone(engine):
    files = engine.rules(
        'from: "{p}.{e:int}", to: "{p}", when: {ndim: 1}, via: [{stack: {over: e}}]',
        keep=["{k...}"],
    )
    out = engine.apply(files, {"x.0": one(1), "x.1": one(1), "y.0": one(1, 1), "y.1": one(1, 1)})
    assert set(out) == {"x", "y.0", "y.1"}


# ---------------------------------------------------------------------- rules that share a part

BOTH = 'from: {w: "{m...}.w", s: "{m...}.s"}'
EIGHT = BOTH + ', to: {w: "{m}.a", s: "{m}.t"}, when: {w: {dtype: uint8}}'
WIDE = BOTH + ', to: {w: "{m}.b", s: "{m}.u"}, when: {w: {dtype: float32}}'
PACKED = 'from: {w: "{m...}.p", s: "{m...}.s"}, to: {w: "{m}.c", s: "{m}.v"}'


def keys(engine, rules, ckpt, **more):
    return set(engine.apply(engine.rules(*rules, **more), ckpt))


def test_when_of_one_role_decides_for_the_other_keys_of_the_group(engine):
    ckpt = {"x.w": one(2, dtype=np.uint8), "x.s": one(1), "y.w": one(2), "y.s": one(1)}
    assert keys(engine, (EIGHT, WIDE), ckpt) == {"x.a", "x.t", "y.b", "y.u"}


def test_a_group_goes_to_the_rule_that_finds_all_of_its_keys(engine):
    ckpt = {"x.w": one(2, dtype=np.uint8), "x.s": one(1), "y.p": one(2), "y.s": one(1)}
    assert keys(engine, (EIGHT, PACKED), ckpt) == {"x.a", "x.t", "y.c", "y.v"}


def test_a_role_that_may_be_missing_does_not_decide(engine):
    more = (
        'from: {w: "{m...}.w", s: "{m...}.s", z: "{m...}.z"}, to: {w: "{m}.a", s: "{m}.t", '
        'z: "{m}.o"}, when: {w: {dtype: uint8}}, optional: [z]'
    )
    small = one(2, dtype=np.uint8)
    ckpt = {"x.w": small, "x.s": one(1), "y.w": small, "y.s": one(1), "y.z": one(1)}
    plain = {"v.w": one(2), "v.s": one(1)}
    assert keys(engine, (more, WIDE), ckpt | plain) == {
        "x.a", "x.t", "y.a", "y.t", "y.o", "v.b", "v.u",
    }  # fmt: skip


def test_a_group_that_two_rules_could_take_whole_is_still_an_error(engine):
    both = {"x.w": one(2, dtype=np.uint8), "x.p": one(2), "x.s": one(1)}
    (found,) = engine.refusals(engine.rules(EIGHT, PACKED, keep=["{k...}"]), both)[:1]
    assert found.code == "M208"
    assert "x.s is taken by rules 'r0', 'r1'" in found.message


@pytest.mark.parametrize(
    ("odd", "notes"),
    [
        (
            {"x.0.s": one(1), "x.1.s": one(1)},
            ("rule 'r0': missing x.0.w", "rule 'r1': missing x.0.w", "2 keys of this form"),
        ),
        (
            {"x.0.w": one(2, dtype=np.int64), "x.0.s": one(1)},
            # of those that its `when` permits, what it lacks
            ("rule 'r2': x.0.s stands alone, missing: x.0.p",),
        ),
        (
            {"x.0.w": one(2, dtype=np.uint8), "x.1.s": one(1)},
            ("rule 'r0': x.0.w stands alone, missing: x.0.s", "rule 'r2': missing x.1.p"),
        ),
    ],
)
def test_a_key_whose_group_no_rule_finds_whole_is_refused_with_what_each_lacks(engine, odd, notes):
    files = engine.rules(EIGHT, WIDE, PACKED, keep=["{k...}"])
    others = {"q.w": one(2, dtype=np.uint8), "q.s": one(1), "v.w": one(1), "v.s": one(1)}
    others |= {"p.p": one(1), "p.s": one(1)}
    found = engine.refusals(files, odd | others)
    assert set(codes(found)) == {"M207"}
    assert "stands alone" in str(found)
    assert all(note in str(found) for note in notes)


def test_a_rule_with_a_narrower_pattern_steps_back_where_its_when_refuses_another_part(engine):
    narrow = (
        'from: {w: "a.{m}.w", s: "a.{m}.s"}, to: {w: "{m}.n", s: "{m}.o"}, '
        "when: {w: {dtype: uint8}}"
    )
    ckpt = {"a.x.w": one(2, dtype=np.uint8), "a.x.s": one(1), "a.y.w": one(2), "a.y.s": one(1)}
    assert keys(engine, (narrow, WIDE), ckpt) == {"x.n", "x.o", "a.y.b", "a.y.u"}


def test_a_rule_with_a_narrower_pattern_does_not_step_back_where_it_lacks_a_part(engine):
    narrow = 'from: {w: "a.{m}.q", s: "a.{m}.s"}, to: {w: "{m}.n", s: "{m}.o"}, optional: true'
    found = engine.refusals(engine.rules(narrow, WIDE), {"a.y.w": one(2), "a.y.s": one(1)})
    assert set(codes(found)) == {"M207"}
    assert "missing: a.y.q" in str(found)


def test_a_part_that_its_own_rule_refuses_and_no_other_takes_is_no_reason_to_keep_the_rest(engine):
    """What is left of a group is refused, although `keep` would take it."""
    joined = (
        'from: {w: "{m...}.w", s: "{m...}.s"}, to: "{m}.a", when: {w: {dtype: float32}}, '
        "via: [{stack: {over: role}}], optional: true"
    )
    ckpt = {"x.w": one(1, dtype=np.int64), "x.s": one(1)}
    found = engine.refusals(engine.rules(joined, keep=["{k...}"]), ckpt)
    assert set(codes(found)) == {"M207"}
    assert "takes x.s and, by `when`, not x.w" in str(found)


def test_the_groups_of_each_rank_are_its_own(engine):
    small = one(2, dtype=np.uint8)
    ckpt = {"x.w@0": small, "x.s@0": one(1), "x.w@1": one(2), "x.s@1": one(1)}
    assert keys(engine, (EIGHT, WIDE), ckpt) == {"x.a", "x.t", "x.b@1", "x.u@1"}


def test_groups_are_looked_at_once_for_each_key_and_rule(engine, monkeypatch):
    seen = []
    for name in ("refused", "missing"):
        own = getattr(match._Groups, name)
        counted = lambda *given, own=own: seen.append(1) or own(*given)  # noqa: E731
        monkeypatch.setattr(match._Groups, name, counted)
    counts = []
    for many in (20, 40, 80):
        ckpt = {f"m.{n}.w": one(2, dtype=np.uint8 if n % 3 else np.float32) for n in range(many)}
        ckpt |= {f"m.{n}.s": one(1) for n in range(many)}
        seen.clear()
        keys(engine, (EIGHT, WIDE), ckpt)
        counts.append(len(seen))
    assert counts[2] - counts[1] == 2 * (counts[1] - counts[0]) > 0


def test_where_no_two_rules_could_take_a_key_no_group_is_looked_at(engine, monkeypatch):
    monkeypatch.setattr(match, "_Groups", None)
    ckpt = {"x.w": one(2, dtype=np.uint8), "x.s": one(1), "y.q": one(1)}
    assert keys(engine, (EIGHT,), ckpt, keep=["{k...}"]) == {"x.a", "x.t", "y.q"}
    # nor where the narrower pattern decides
    narrow = 'from: "a.{x:b|c}.s", to: "o.{x}"'
    rest = 'from: {w: "{m...}.w", s: "{m...}.s"}, to: {w: "{m}.a", s: "{m}.t"}'
    found = {"x.w": one(1), "x.s": one(1), "a.b.s": one(1)}
    assert keys(engine, (rest, narrow), found) == {"x.a", "x.t", "o.b"}


@pytest.mark.parametrize(
    ("shape", "taken"),
    [
        ("[null, 1]", {"b"}),
        ("[null, {min: 2}]", {"c"}),
        ("[3]", {"a"}),
        ("[]", {"d"}),
        ("[null]", {"a"}),
        ("[2, 1]", set()),
    ],
)
def test_when_narrows_by_the_length_of_each_axis(engine, shape, taken):
    files = engine.rules(
        f'from: "{{k}}.w", to: "{{k}}.v", when: {{shape: {shape}}}, optional: true',
        keep=["{k...}"],
    )
    ckpt = {"a.w": one(3), "b.w": one(3, 1), "c.w": one(3, 2), "d.w": one()}
    assert {k[0] for k in engine.apply(files, ckpt) if k.endswith("v")} == taken


# ---------------------------------------------------------------------- flat


def test_flat_keys_are_expanded_from_the_other_role(engine):
    rule = (
        'from: {w: "model.{k...}", ema: "ema.{k:flat}"}, to: {w: "m.{k}", ema: "e.{k}"}, '
        "optional: [ema]"
    )
    keys = {"model.a.b": "m.a.b", "ema.ab": "e.a.b", "model.c": "m.c"}
    assert engine.moves(engine.rules(rule), list(keys)) == keys


def test_a_flat_role_that_is_missing_is_refused_as_any_other(engine):
    rule = 'from: {w: "model.{k...}", ema: "ema.{k:flat}"}, to: {w: "m.{k}", ema: "e.{k}"}'
    found = engine.refusals(
        engine.rules(rule), {"model.a.b": one(1), "ema.ab": one(1), "model.c": one(1)}
    )
    assert codes(found) == ["M207"]
    assert "model.c stands alone, missing: ema.c" in str(found)


def test_flat_keys_may_have_two_sources_with_the_same_path(engine):
    rule = (
        'from: {w: "model.{k...}", b: "bias.{k...}", ema: "ema.{k:flat}"}, to: {w: "m.{k}", b: '
        '"b.{k}", ema: "e.{k}"}'
    )
    keys = {"model.a.b": "m.a.b", "bias.a.b": "b.a.b", "ema.ab": "e.a.b"}
    assert engine.moves(engine.rules(rule), list(keys)) == keys


def test_roles_without_the_path_make_no_flat_keys(engine):
    rule = (
        'from: {n: "x.{n:int}", w: "model.{k...}", ema: "ema.{k:flat}"}, to: {n: "y.{n}", w: '
        '"m.{k}", ema: "e.{k}"}'
    )
    keys = {"x.1": "y.1", "model.a.b": "m.a.b", "ema.ab": "e.a.b"}
    assert engine.moves(engine.rules(rule), list(keys)) == keys


def test_a_flat_key_that_stands_for_two_paths_is_an_error(engine):
    rule = (
        'from: {w: "model.{k...}", ema: "ema.{k:flat}"}, to: {w: "m.{k}", ema: "e.{k}"}, '
        "optional: [ema]"
    )
    found = engine.refusals(
        engine.rules(rule), {"model.a.b": one(1), "model.ab": one(1), "ema.ab": one(1)}
    )
    assert "M202" in codes(found)
    assert "model.a.b" in str(found)


def test_flat_keys_of_a_reading_rule_stay(engine):
    rule = (
        'from: {w: "model.{k...}", ema: "ema.{k:flat}"}, to: {w: "m.{k}", ema: "e.{k}"}, '
        "keep_source: true"
    )
    assert set(engine.apply(engine.rules(rule), {"model.a.b": one(1), "ema.ab": one(1)})) == {
        "model.a.b",
        "ema.ab",
        "m.a.b",
        "e.a.b",
    }


def test_when_holds_for_flat_roles(engine):
    rule = (
        'from: {w: "model.{k...}", ema: "ema.{k:flat}"}, to: {w: "m.{k}", ema: "e.{k}"}, '
        "optional: [ema], when: {ema: {ndim: 2}}"
    )
    out = engine.apply(
        engine.rules(rule, keep=["ema.{k}"]), {"model.a.b": one(1), "ema.ab": one(1)}
    )
    assert set(out) == {"m.a.b", "ema.ab"}


def test_flat_targets_are_read_back_through_the_map(engine):
    rule = (
        'from: {w: "model.{k...}", ema: "e.{k...}"}, to: {w: "m.{k}", ema: "ema.{k:flat}"}, '
        "map: {k: {a: x}}"
    )
    keys = {"model.a.b": "m.x.b", "e.a.b": "ema.xb"}
    assert engine.moves(engine.rules(rule), list(keys)) == keys
    assert engine.moves(engine.rules(rule), list(keys.values()), backwards=True) == {
        v: k for k, v in keys.items()
    }


# ---------------------------------------------------------------------- ranks


def test_a_rule_without_a_rank_works_on_each_rank_alone(engine):
    files = engine.rules(
        'from: "{p...}.{e:int}.w", to: "{p}.w", via: [{stack: {over: e}}]', keep=["norm"]
    )
    ckpt = {f"x.{e}.w@{r}": np.float32([10 * r + e]) for r in (0, 1) for e in (0, 1, 2)} | {
        "norm@0": one(1),
        "norm@1": one(1),
    }
    out = engine.apply(files, ckpt)
    assert set(out) == {"x.w@0", "x.w@1", "norm@0", "norm@1"}
    assert out["x.w@1"].view(np.float32).ravel().tolist() == [10, 11, 12]
    typed = {k: v.view(np.float32) for k, v in out.items()}
    assert set(engine.apply(files, typed, backwards=True)) == set(ckpt)


def test_roles_and_groups_of_a_rank_are_its_own_and_messages_name_it(engine):
    roles = engine.rules('from: {w: "{m}.w", s: "{m}.s"}, to: {w: "{m}.a", s: "{m}.b"}')
    assert set(engine.apply(roles, {f"x.{role}@{r}": one(1) for role in "ws" for r in (0, 1)})) == {
        "x.a@0",
        "x.b@0",
        "x.a@1",
        "x.b@1",
    }
    (found,) = engine.refusals(roles, {"x.w@0": one(1), "x.w@1": one(1), "x.s@0": one(1)})
    assert found.code == "M207"
    assert "x.s@1" in found.message
    stack = engine.rules('from: "x.{e:int}.w", to: x, via: [{stack: {over: e}}]')
    (found,) = engine.refusals(
        stack, {"x.0.w@0": one(1), "x.0.w@1": one(1), "x.1.w@0": one(1), "x.2.w@1": one(1)}
    )
    assert "rank 1" in found.message
    assert "missing {e} = 1" in found.message


def test_keys_with_an_at_sign_that_is_no_rank_are_keys_like_others(engine):
    files = engine.rules('from: "{k...}.w", to: "{k}.v"', keep=["{k...}"])
    keys = {"a@b.w": "a@b.v", "a@1.w": "a@1.v", "x@01": "x@01", "q@0": "q@0"}
    assert engine.moves(files, list(keys)) == keys


def test_a_rank_capture_reads_a_plain_key_as_rank_0(engine):
    files = engine.rules(
        'from: "{k...}.w@{r:int}", to: "{k}.v", via: [{concat: {over: r, count: $tp}}]',
        params="tp: {type: int}",
    )
    assert set(engine.apply(files, {"a.w": one(2)}, {"tp": 1})) == {"a.v"}
    assert engine.apply(files, {"a.w@0": one(2), "a.w@1": one(2)}, {"tp": 2})["a.v"].shape == (4,)
    assert codes(engine.refusals(files, {"a.w": one(2)}, {"tp": 2})) == ["M207"]


def test_a_lone_rank_0_is_plain_on_the_way_out(engine):
    files = engine.rules(
        'from: "{k...}.v", to: "{k}.w@{r:int}", via: [{split: {into: r, dim: 0, count: $tp}}]',
        params="tp: {type: int}",
    )
    assert set(engine.apply(files, {"a.v": one(4)}, {"tp": 1})) == {"a.w"}
    out = engine.apply(files, {"a.v": one(4)}, {"tp": 2})
    assert set(out) == {"a.w@0", "a.w@1"}
    assert set(engine.apply(files, {"a.w": one(4)}, {"tp": 1}, backwards=True)) == {"a.v"}


def test_a_path_may_stand_before_the_rank(engine):
    files = engine.rules('from: "{k...}@{r:int}", to: "{k}", via: [{same: {over: r}}]')
    assert set(engine.apply(files, {"a.b@0": one(2), "a.b@1": one(2), "c": one(1)})) == {"a.b", "c"}


def test_a_rule_with_a_rank_can_be_narrower_than_one_without(engine):
    files = engine.rules(
        'from: "a.w@{r:int}", to: "a.w", via: [{concat: {over: r}}]',
        'from: "{k...}.w", to: "{k}.v"',
    )
    out = engine.apply(files, {"a.w@0": one(1), "a.w@1": one(1), "b.w@0": one(1), "b.w@1": one(1)})
    assert set(out) == {"a.w", "b.v@0", "b.v@1"}


def test_llama_shards_become_one_checkpoint_and_back(engine):
    rng = np.random.default_rng(0)

    def r(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    ckpt = {}
    norm = r(4)
    for rank in (0, 1):
        p = "layers.0."
        for name, shape in {
            "attention.wq": (4, 4),
            "attention.wk": (4, 4),
            "attention.wv": (4, 4),
            "feed_forward.w1": (6, 4),
        }.items():
            ckpt[f"{p}{name}.weight@{rank}"] = r(*shape)
        for name, shape in {"attention.wo": (4, 4), "feed_forward.w2": (4, 6)}.items():
            ckpt[f"{p}{name}.weight@{rank}"] = r(*shape)
        ckpt[f"{p}feed_forward.w3.weight@{rank}"] = r(6, 4)
        for name in ("layers.0.attention_norm", "layers.0.ffn_norm", "norm"):
            ckpt[f"{name}.weight@{rank}"] = norm
        ckpt[f"output.weight@{rank}"] = r(5, 4)
        ckpt[f"tok_embeddings.weight@{rank}"] = r(5, 4)
    params = {"heads": 2, "kv_heads": 2, "tp": 2}
    files = engine.case("c08-meta-llama")
    out = engine.apply(files, ckpt, params)
    assert out["model.layers.0.self_attn.v_proj.weight"].shape == (8, 4)
    assert out["model.layers.0.mlp.down_proj.weight"].shape == (4, 12)
    rows = np.concatenate([ckpt["output.weight@0"], ckpt["output.weight@1"]])
    assert out["lm_head.weight"].tobytes() == rows.tobytes()
    back = engine.apply(
        files, {k: v.view(np.float32) for k, v in out.items()}, params, backwards=True
    )
    assert {k: v.tobytes() for k, v in back.items()} == {k: v.tobytes() for k, v in ckpt.items()}


@pytest.mark.parametrize("interleave", [False, True])
def test_gate_and_up_join_inside_each_rank(engine, interleave):
    gate, up = (np.arange(16, dtype=np.float32).reshape(8, 2) + 100 * n for n in range(2))
    ckpt = {"model.layers.0.mlp.gate_proj.weight": gate, "model.layers.0.mlp.up_proj.weight": up}
    ckpt["model.layers.0.mlp.down_proj.weight"] = np.arange(8, dtype=np.float32).reshape(1, 8)
    params = {"tp": 2, "block": 2, "interleave": interleave}
    out = engine.apply(engine.case("c09-swiglu-tp"), ckpt, params)
    rows = out["decoder.layers.0.mlp.linear_fc1.weight@1"].view(np.float32)
    want = [gate[4:6], up[4:6], gate[6:], up[6:]] if interleave else [gate[4:], up[4:]]
    assert rows.tobytes() == np.concatenate(want).tobytes()
    back = engine.apply(
        engine.case("c09-swiglu-tp"),
        {k: v.view(np.float32) for k, v in out.items()},
        params,
        backwards=True,
    )
    assert {k: v.tobytes() for k, v in back.items()} == {k: v.tobytes() for k, v in ckpt.items()}


# ---------------------------------------------------------------------- accounting


def test_a_key_under_no_rule_is_an_error_with_the_nearest_pattern_and_the_failing_segment(engine):
    files = engine.rules(
        'from: "m.{n:int}.attn.weight", to: "m.{n}.a.weight", optional: true', keep=["norm.weight"]
    )
    (found,) = engine.refusals(
        files, {f"m.{n}.attn.bias": one(1) for n in range(4)} | {"norm.weight": one(1)}
    )
    assert found.code == "M211"
    assert "m.0.attn.bias" in found.message
    assert "3 more" in found.message
    assert any(
        "m.{n:int}.attn.weight" in note and "'bias'" in note and "weight" in note
        for note in found.notes
    )


def test_a_rule_that_matches_nothing_is_an_error_unless_optional(engine):
    (found,) = engine.refusals(engine.rules("from: a, to: b", keep=["c"]), {"c": one(1)})
    assert found.code == "M206"
    assert "'a'" in found.message
    assert engine.moves(engine.rules("from: a, to: b, optional: true", keep=["c"]), ["c"]) == {
        "c": "c"
    }


def test_all_problems_of_a_checkpoint_come_out_at_once(engine):
    files = engine.rules(
        'from: "x.{e:int}", to: y, via: [{stack: {over: e}}]', "from: a, to: b", "from: q, to: r"
    )
    found = engine.refusals(files, {"x.1": one(1), "q": one(1), "z": one(1)})
    assert sorted(codes(found)) == ["M206", "M207", "M211"]
