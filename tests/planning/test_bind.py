"""What rules make of the keys they took: groups, roles, maps, collisions, keys that are read and
left, targets that exist.
"""

import numpy as np
import pytest
from work import steps

F = np.float32


def codes(found):
    return [d.code for d in found]


def one(*shape, dtype=F, fill=1):
    return np.full(shape, fill, dtype)


def typed(out, dtype=F):
    return {k: v.view(dtype) for k, v in out.items()}


STACK = 'from: "x.{e:int}", to: y, via: [{stack: {over: e}}]'


# ---------------------------------------------------------------------- groups


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ([0, 1, 3], "missing {e} = 2"),
        ([0, 1, 3, 9], "missing {e} = 2, 4, 5, 6, 7, 8"),
        ([1, 2], "missing {e} = 0"),
        ([0, 100], "missing {e} = 1, 2, 3, 4, 5, 6, 7, 8 and 91 more"),
    ],
)
def test_a_gap_in_a_group_is_named(engine, numbers, said):
    (found,) = engine.refusals(engine.rules(STACK), {f"x.{e}": one(2) for e in numbers})
    assert found.code == "M207"
    assert said in found.message
    assert any("x." in note for note in found.notes)


def test_a_member_with_an_enormous_number_costs_no_more_than_another(engine):
    rules, found = engine.rules(STACK), []

    def look(last):
        found[:] = engine.refusals(rules, {"x.0": one(2), f"x.{last}": one(2)})

    near = steps(lambda: look(99))
    assert steps(lambda: look(999_999_999_999)) < 2 * near
    assert "999999999990 more" in found[0].message


def test_a_group_whose_count_is_wrong_says_both_numbers(engine):
    files = engine.rules('from: "x.{e:int}", to: y, via: [{stack: {over: e, count: 4}}]')
    few = engine.refusals(files, {f"x.{e}": one(2) for e in range(3)})[0]
    many = engine.refusals(files, {f"x.{e}": one(2) for e in range(5)})[0]
    assert (few.code, many.code) == ("M207", "M207")
    assert "missing {e} = 3" in few.message
    assert "unexpected {e} = 4" in many.message
    assert "count says 4, there are 5" in many.message


def test_a_group_begins_where_start_says(engine):
    files = engine.rules('from: "x.{e:int}", to: y, via: [{stack: {over: e, start: 1}}]')
    ckpt = {f"x.{e}": one(2, fill=e) for e in (3, 1, 2)}
    out = engine.apply(files, ckpt)
    assert out["y"].view(F)[:, 0].tolist() == [1, 2, 3]
    assert {k: v.tobytes() for k, v in engine.apply(files, typed(out), backwards=True).items()} == {
        k: v.tobytes() for k, v in ckpt.items()
    }
    found = engine.refusals(files, {f"x.{e}": one(2) for e in range(3)})[0]
    assert "unexpected {e} = 0" in found.message


def test_numbers_order_as_numbers_and_alternatives_as_written(engine):
    ckpt = {f"x.{e}": one(1, fill=e) for e in (10, 9, 2, 1, 0, 3, 4, 5, 6, 7, 8)}
    assert engine.apply(engine.rules(STACK), ckpt)["y"].view(F).ravel().tolist() == list(range(11))
    files = engine.rules('from: "x.{w:b|a}", to: y, via: [{concat: {over: w}}]')
    assert engine.apply(files, {"x.a": one(1, fill=1), "x.b": one(1, fill=2)})["y"].view(
        F
    ).tolist() == [2, 1]


def test_alternatives_that_an_op_consumes_must_be_complete(engine):
    found = engine.refusals(
        engine.rules('from: "{p}.{w:q|k|v}", to: "{p}", via: [{concat: {over: w}}]'),
        {"a.q": one(1), "a.v": one(1)},
    )
    assert codes(found) == ["M207"]
    assert "missing {w} = k" in found[0].message
    assert "{p} = a" in found[0].message


def test_alternatives_that_no_op_consumes_need_not_be_complete(engine):
    assert engine.moves(engine.rules('from: "x.{w:q|k|v}", to: "y.{w}"'), ["x.k"]) == {"x.k": "y.k"}


def test_groups_join_on_values_and_never_on_position(engine):
    files = engine.rules(
        'from: "{p}.{e:int}.{w:w1|w3}", to: "{p}", via: [{stack: {over: e}}, {concat: {over: w, '
        "dim: 1}}]"
    )
    ckpt = {
        f"l.{e}.{w}": one(1, fill=10 * e + n) for e in (2, 0, 1) for n, w in ((3, "w3"), (1, "w1"))
    }
    assert engine.apply(files, ckpt)["l"].view(F).tolist() == [[1, 3], [11, 13], [21, 23]]
    del ckpt["l.1.w1"]
    (found,) = engine.refusals(files, ckpt)
    assert found.code == "M207"
    assert "missing {e} = 1" in found.message
    assert "{w} = w1" in found.message


def test_mixed_dtypes_in_a_group_are_named(engine):
    ckpt = {"x.0": one(2), "x.1": one(2, dtype=np.float16), "x.2": one(2)}
    (found,) = engine.refusals(engine.rules(STACK), ckpt)
    assert found.code == "M303"
    assert "float16 for 1" in found.message
    assert any("x.1" in note for note in found.notes)
    assert "cast" in found.help


def test_unequal_shapes_in_a_stack_name_all_offending_keys(engine):
    ckpt = {f"x.{e}": one(3 if e in (2, 5) else 2) for e in range(9)}
    (found,) = engine.refusals(engine.rules(STACK), ckpt)
    assert found.code == "M301"
    assert any("[3]" in note and "x.2" in note and "x.5" in note for note in found.notes)


def test_each_broken_group_is_named(engine):
    files = engine.rules('from: "{p}.{e:int}", to: "{p}", via: [{stack: {over: e}}]')
    ckpt = {"a.1": one(1), "b.0": one(1), "c.0": one(1), "c.2": one(1)}
    found = engine.refusals(files, ckpt)
    assert codes(found) == ["M207", "M207"]
    assert {"{p} = a", "{p} = c"} == {d.message.split("at ")[1].split(":")[0] for d in found}


# ---------------------------------------------------------------------- roles


PAIR = (
    'from: {weight: "{m...}.weight", scale: "{m...}.scale"}, to: {weight: "{m}.w", scale: "{m}.s"}'
)


def test_roles_travel_together(engine):
    keys = {"a.weight": "a.w", "a.scale": "a.s", "weight": "w", "scale": "s"}
    assert engine.moves(engine.rules(PAIR), list(keys)) == keys
    assert engine.moves(engine.rules(PAIR), list(keys.values()), backwards=True) == {
        v: k for k, v in keys.items()
    }


def test_a_missing_role_is_named_with_the_key_it_should_have(engine):
    (found,) = engine.refusals(
        engine.rules(PAIR), {"a.weight": one(1), "a.scale": one(1), "b.weight": one(1)}
    )
    assert found.code == "M207"
    assert "b.weight" in found.message
    assert "b.scale" in found.message
    assert "optional: [scale]" in found.help


def test_an_optional_role_may_be_missing_and_nothing_is_made_up(engine):
    files = engine.rules(PAIR + ", optional: [scale]")
    assert engine.moves(files, ["a.weight", "b.weight", "b.scale"]) == {
        "a.weight": "a.w",
        "b.weight": "b.w",
        "b.scale": "b.s",
    }
    (found,) = engine.refusals(files, {"a.scale": one(1)})
    assert "a.weight" in found.message


def test_roles_as_a_list_are_joined_in_their_order(engine):
    files = engine.rules("from: [b, a], to: c, via: [{concat: {over: role}}]")
    ckpt = {"a": one(1, fill=1), "b": one(1, fill=2)}
    out = engine.apply(files, ckpt)
    assert out["c"].view(F).tolist() == [2, 1]
    back = engine.apply(files, typed(out), backwards=True)
    assert {k: v.view(F).tolist() for k, v in back.items()} == {"a": [1], "b": [2]}


def test_one_tensor_is_split_into_roles(engine):
    files = engine.rules(
        'from: "{p}.qkv", to: {q: "{p}.q", k: "{p}.k"}, via: [{split: {into: role, dim: 0, sizes: '
        "{q: 2, k: 1}}}]"
    )
    out = engine.apply(files, {"a.qkv": np.arange(3, dtype=F)})
    assert {k: v.view(F).tolist() for k, v in out.items()} == {"a.q": [0, 1], "a.k": [2]}
    assert engine.apply(files, typed(out), backwards=True)["a.qkv"].view(F).tolist() == [0, 1, 2]


def test_a_join_over_roles_leaves_out_an_optional_one_that_is_missing(engine):
    files = engine.rules(
        'from: {a: "{p}.a", b: "{p}.b"}, to: "{p}", optional: [b], via: [{concat: {over: role}}]'
    )
    out = engine.apply(files, {"x.a": one(1), "y.a": one(1), "y.b": one(1)})
    assert {k: v.shape for k, v in out.items()} == {"x": (1,), "y": (2,)}


# ---------------------------------------------------------------------- maps


@pytest.mark.parametrize(
    ("rule", "keys"),
    [
        (
            'from: "x.{w:w1|w2}", to: "y.{w}", map: {w: {w1: gate, w2: down}}',
            {"x.w1": "y.gate", "x.w2": "y.down"},
        ),
        (
            'from: "x.{w}", to: "y.{w}", map: {w: {a.b: c, d: e.f}}',
            {"x.a.b": "y.c", "x.d": "y.e.f"},
        ),
        ('from: "x.{n:int}", to: "y.{n}", map: {n: {0: 5, 1: 0}}', {"x.0": "y.5", "x.1": "y.0"}),
        (
            'from: "{k...}.w", to: "{k}.v", map: {k: {a: b, b: a, c.d: e}}',
            {"a.b.w": "b.a.v", "c.d.c.w": "e.c.v", "w": "v"},
        ),
        ('from: "x.{w:a|b}", to: "y.{w}", map: {w: {a: b, b: a}}', {"x.a": "y.b", "x.b": "y.a"}),
    ],
)
def test_a_map_translates_on_the_way_to_the_target_and_back(engine, rule, keys):
    files = engine.rules(rule)
    assert engine.moves(files, list(keys)) == keys
    assert engine.moves(files, list(keys.values()), backwards=True) == {
        v: k for k, v in keys.items()
    }


@pytest.mark.parametrize("kind", ["{w}", "{n:int}"])
def test_a_mapped_capture_takes_exactly_the_values_that_the_map_lists(engine, kind):
    name = kind[1]
    files = engine.rules(
        f'from: "x.{kind}", to: "y.{{{name}}}", map: {{{name}: {{1: 7}}}}', keep=["{k...}"]
    )
    assert engine.moves(files, ["x.1", "x.2"]) == {"x.1": "y.7", "x.2": "x.2"}
    assert engine.moves(files, ["y.7", "y.1"], backwards=True) == {"y.7": "x.1", "y.1": "y.1"}


def test_null_removes_segments(engine):
    files = engine.rules('from: "{k...}", to: "{k}", map: {k: {module: null, a.b: null}}')
    assert engine.moves(files, ["module.x.module.w", "a.b.q"]) == {
        "module.x.module.w": "x.w",
        "a.b.q": "q",
    }


def test_over_only_sizes_and_where_speak_of_from_values(engine):
    rule = (
        'from: "x.{w:b|a}.{n:int}", to: "y.{n}", map: {w: {a: z, b: q}, n: {0: 8, 1: 9}}, where: '
        "{n: [1]}, "
        "via: [{flip: {dim: 0, only: {w: [a]}}}, {concat: {over: w, sizes: {a: 2, b: 1}}}]"
    )
    files = engine.rules(rule, keep=["x.{w}.0"])
    ckpt = {"x.a.1": F([1, 2]), "x.b.1": F([3]), "x.a.0": F([5, 6])}
    out = engine.apply(files, ckpt)
    assert {k: v.view(F).tolist() for k, v in out.items()} == {"y.9": [3, 2, 1], "x.a.0": [5, 6]}
    back = engine.apply(files, typed(out), backwards=True)
    assert {k: v.tobytes() for k, v in back.items()} == {k: v.tobytes() for k, v in ckpt.items()}


def test_an_index_expression_that_comes_out_negative_is_an_error_forwards_and_no_match_backwards(
    engine,
):
    files = engine.rules('from: "x.{n:int}", to: "y.{n-2}"', keep=["y.{n:int}"])
    assert codes(engine.refusals(files, {"x.2": one(1), "x.1": one(1)})) == ["M209"]
    files = engine.rules('from: "x.{n:int}", to: "y.{n+2}"', keep=["y.{n:int}"])
    assert engine.moves(files, ["y.5", "y.1"], backwards=True) == {"y.5": "x.3", "y.1": "y.1"}


# ---------------------------------------------------------------------- collisions


def test_two_rules_that_write_one_key_are_an_error_with_both(engine):
    (found,) = engine.refusals(
        engine.rules("from: a, to: c", "from: b, to: c"), {"a": one(1), "b": one(1)}
    )
    assert found.code == "M212"
    assert any("'r0'" in n and "a" in n for n in found.notes)
    assert any("'r1'" in n and "b" in n for n in found.notes)
    assert len(found.spans) == 2


def test_one_rule_that_writes_a_key_twice_is_an_error(engine):
    files = engine.rules('from: "{k...}", to: "{k}", map: {k: {module: null}}')
    (found,) = engine.refusals(files, {"module.a": one(1), "a": one(1)})
    assert found.code == "M212"


def test_a_rule_that_writes_a_kept_key_is_an_error(engine):
    (found,) = engine.refusals(
        engine.rules("from: a, to: b", keep=["b"]), {"a": one(1), "b": one(1)}
    )
    assert found.code == "M212"
    assert "kept" in str(found.notes)


# ---------------------------------------------------------------------- keep_source


def test_keys_read_by_keep_source_only_are_kept(engine):
    assert set(engine.apply(engine.rules("from: a, to: b, keep_source: true"), {"a": one(1)})) == {
        "a",
        "b",
    }


def test_keys_read_by_keep_source_go_where_another_rule_takes_them(engine):
    files = engine.rules("from: a, to: b, keep_source: true", 'from: "{k...}", to: "m.{k}"')
    out = engine.apply(files, {"a": one(1, fill=3)})
    assert set(out) == {"b", "m.a"}
    assert set(engine.apply(files, typed(out), backwards=True)) == {"a"}


def test_a_target_of_keep_source_goes_backwards_if_it_is_what_the_rule_makes_and_stays_else(engine):
    files = engine.rules('from: "{p}.a", to: "{p}.b", keep_source: true, via: [{flip: {dim: 0}}]')
    ckpt = {"x.a": F([1, 2]), "x.b": F([2, 1]), "y.a": F([1, 2]), "y.b": F([1, 2]), "z.b": F([1])}
    out = engine.apply(files, ckpt, backwards=True)
    assert set(out) == {"x.a", "y.a", "y.b", "z.b"}
    bound = out.composition.steps[0][1]
    assert bound.decided == {"x.b": True, "y.b": False, "z.b": False}
    assert any("y.b" in note for note in bound.notes)
    assert any("z.b" in note for note in bound.notes)


def test_targets_of_keep_source_are_told_from_keys_that_the_rule_would_read(engine):
    # backwards the copy matches the rule's own pattern; it is not what the copy was made of
    files = engine.rules('from: "{p...}.w", to: "copy.{p}.w", keep_source: true')
    out = engine.apply(files, {"a.w": one(1)})
    assert set(out) == {"a.w", "copy.a.w"}
    assert set(engine.apply(files, typed(out), backwards=True)) == {"a.w"}


def test_a_target_that_looks_like_one_more_source_still_goes(engine):
    files = engine.rules('from: "c.{e:int}", to: c.2, keep_source: true, via: [{stack: {over: e}}]')
    out = engine.apply(files, {"c.0": one(3), "c.1": one(3)})
    assert out["c.2"].shape == (2, 3)
    assert set(engine.apply(files, typed(out), backwards=True)) == {"c.0", "c.1"}


def test_two_keep_source_rules_may_read_one_key(engine):
    files = engine.rules("from: a, to: b, keep_source: true", "from: a, to: c, keep_source: true")
    out = engine.apply(files, {"a": one(1)})
    assert set(out) == {"a", "b", "c"}
    assert set(engine.apply(files, typed(out), backwards=True)) == {"a"}


def test_between_roles_of_a_reading_rule_the_narrower_reads_the_key(engine):
    files = engine.rules(
        'from: {x: "{k...}.{l}", y: "{k...}.b"}, to: {x: "n.{k}.{l}", y: "m.{k}.b"}, keep_source: '
        "true"
    )
    assert set(engine.apply(files, {"q.a": one(1), "q.b": one(1)})) == {
        "q.a",
        "q.b",
        "n.q.a",
        "m.q.b",
    }


# ---------------------------------------------------------------------- if_exists


COPIES = 'from: "{p}.w", to: "{p}.{e:int}", if_exists: keep, via: [{unbind: {into: e}}]'


def test_targets_that_exist_and_are_equal_stay_and_the_sources_go(engine):
    ckpt = {"a.w": F([[1], [2]]), "a.0": F([1]), "a.1": F([2])}
    files = engine.rules(COPIES, keep=["{k...}.{e:int}"])
    out = engine.apply(files, ckpt | {"b.w": one(1, 1)}, allow=())
    assert {k: v.view(F).tolist() for k, v in out.items()} == {"a.0": [1], "a.1": [2], "b.0": [1]}
    assert set(out.composition.steps[0][1].redundant) == {"a.w"}


def test_targets_that_exist_and_differ_are_a_failed_check_unless_drop_is_allowed(engine):
    ckpt = {"a.w": F([[1], [2]]), "a.0": F([1]), "a.1": F([9])}
    files = engine.rules(COPIES, keep=["{k...}.{e:int}"])
    with pytest.raises(AssertionError, match=r"a\.1 exists and differs"):
        engine.apply(files, ckpt, allow=())
    out = engine.apply(files, ckpt, allow=("drop",))
    assert {k: v.view(F).tolist() for k, v in out.items()} == {"a.0": [1], "a.1": [9]}


def test_targets_that_exist_with_another_spec_are_refused_unless_drop_is_allowed(engine):
    ckpt = {"a.w": F([[1], [2]]), "a.0": F([1, 2]), "a.1": F([9])}
    files = engine.rules(COPIES, keep=["{k...}.{e:int}"])
    assert codes(engine.refusals(files, ckpt, allow=())) == ["M402"]
    assert set(engine.apply(files, ckpt)) == {"a.0", "a.1"}


@pytest.mark.parametrize("allow", [(), ("drop",)])
def test_a_group_of_targets_that_exists_in_part_is_an_error(engine, allow):
    files = engine.rules(COPIES, keep=["{k...}.{e:int}"])
    (found,) = engine.refusals(files, {"a.w": F([[1], [2]]), "a.1": F([2])}, allow=allow)
    assert found.code == "M210"
    assert "a.1 exist and a.0 do not" in found.message


def test_with_keep_source_an_existing_target_is_compared_with_nothing(engine):
    files = engine.rules("from: a, to: b, keep_source: true, if_exists: keep", keep=["b"])
    out = engine.apply(files, {"a": one(1), "b": one(3, fill=5)}, allow=())
    assert {k: v.shape for k, v in out.items()} == {"a": (1,), "b": (3,)}
    assert out.composition.graph.checks == []
    assert engine.apply(files, typed(out), backwards=True).keys() == {"a", "b"}


# ---------------------------------------------------------------------- loss and the way back


def test_a_dropped_tensor_needs_allow_drop_and_the_message_says_why(engine):
    files = engine.rules('from: "{k...}.freqs", via: [{drop: {why: computed again}}]', keep=["w"])
    (found,) = engine.refusals(files, {"a.freqs": one(1), "w": one(1)}, allow=())
    assert found.code == "M402"
    assert "computed again" in found.message
    assert set(engine.apply(files, {"a.freqs": one(1), "w": one(1)}, allow=("drop",))) == {"w"}


def test_a_slice_that_does_not_say_what_it_cuts_needs_allow_drop(engine):
    files = engine.rules("from: a, to: b, via: [{slice: {dim: 0, stop: 2}}]")
    assert codes(engine.refusals(files, {"a": one(3)}, allow=())) == ["M402"]
    assert engine.apply(files, {"a": one(3)}, allow=("drop",))["b"].shape == (2,)
    assert codes(engine.refusals(files, {"a": one(3)}, allow=("lossy",))) == ["M402"]
    files = engine.rules("from: a, to: b, via: [{slice: {dim: 0, stop: 2, of: 3, value: 1}}]")
    assert engine.apply(files, {"a": one(3)}, allow=())["b"].shape == (2,)


def test_a_one_way_rule_stops_the_downgrade_and_is_named(engine):
    files = engine.rules(
        "from: a, via: [{drop: {why: gone}}]", "from: b, to: c, via: [{slice: {dim: 0, stop: 2}}]"
    )
    found = engine.refusals(files, {"c": one(2)}, backwards=True)
    assert codes(found) == ["M405", "M405"]
    assert "'r0'" in found[0].message
    assert "'r1'" in found[1].message


def test_rules_that_nothing_leads_back_from_are_refused_together_with_their_reason(engine):
    files = engine.rules(
        "from: a, to: b, optional: true, inverse: {refuse: nothing reads it}",
        "from: x, to: b, optional: true, inverse: {refuse: nothing reads it}",
        "from: c, to: d, inverse: {refuse: it has no name}",
    )
    assert set(engine.apply(files, {"a": one(2), "c": one(2)})) == {"b", "d"}
    both, third = engine.refusals(files, {"b": one(2), "d": one(2)}, backwards=True)
    assert (both.code, third.code) == ("M405", "M405")
    assert both.message == "rules 'r0', 'r1' have no way back: nothing reads it"
    assert third.message == "rule 'r2' has no way back: it has no name"
    assert len(both.spans) == 2


def test_inverse_skip_leaves_a_rule_out_backwards(engine):
    files = engine.rules(
        "from: a, via: [{drop: {why: gone}}], inverse: skip",
        "from: b, to: c",
        "from: old, to: c, inverse: skip, optional: true",
    )
    assert engine.moves(files, ["a", "b"]) == {"b": "c"}
    assert engine.moves(files, ["c"], backwards=True) == {"c": "b"}


def test_a_rule_that_is_skipped_backwards_needs_no_params_there(engine):
    files = engine.rules(
        'from: "a.{e:int}", to: b, inverse: skip, optional: true, via: [{stack: {over: e, count: '
        "$n + 1}}]",
        "from: c, to: d",
        params="n: {type: int, optional: true}",
    )
    assert engine.moves(files, ["d"], backwards=True) == {"d": "c"}
    assert codes(engine.refusals(files, {"c": one(1)})) == ["M509"]
