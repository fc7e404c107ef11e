from __future__ import annotations

import pytest
from rule_text import load_text

from migrate import ops
from migrate.core.errors import OpError, QuestionError
from migrate.rules import arguments, steps


def test_arithmetic_over_params_becomes_integers() -> None:
    args = arguments.resolve(
        "split",
        {"into": "w", "dim": "$d - 1", "sizes": ["$h // $g * 8", 4]},
        {"d": 2, "h": 6, "g": 2},
    )
    assert (args.dim, args.sizes) == (1, (24, 4))


def test_an_argument_that_is_exactly_an_unset_param_counts_as_not_written() -> None:
    assert arguments.resolve("stack", {"over": "e", "count": "$n"}, {}) == arguments.resolve(
        "stack", {"over": "e"}, {}
    )
    assert arguments.resolve("stack", {"over": "e", "count": "$n"}, {"n": 3}).count == 3


def test_arithmetic_with_an_unset_param_is_an_error_that_names_it() -> None:
    with pytest.raises(OpError) as caught:
        arguments.resolve("stack", {"over": "e", "count": "$n + 1"}, {})
    assert (caught.value.code, caught.value.help) == ("M509", 'params={"n": …}')


def test_sizes_by_value_come_in_the_order_of_the_values() -> None:
    args = arguments.resolve(
        "split", {"into": "w", "sizes": {"k": 1, "q": "$n", "v": 3}}, {"n": 2}, ["q", "k", "v"]
    )
    assert args.sizes == (2, 1, 3)


@pytest.mark.parametrize(
    ("sizes", "says"), [({"q": 1}, "lacks k"), ({"q": 1, "k": 2, "x": 3}, "has x")]
)
def test_sizes_must_name_the_values_and_no_others(sizes: dict[str, int], says: str) -> None:
    with pytest.raises(OpError, match=says):
        arguments.resolve("split", {"into": "w", "sizes": sizes}, {}, ["q", "k"])


def test_a_whole_list_can_be_a_param() -> None:
    assert arguments.resolve("permute", {"dims": "$order"}, {"order": [2, 0, 1]}).dims == (2, 0, 1)
    with pytest.raises(OpError, match="a list is expected"):
        arguments.resolve("permute", {"dims": "$order"}, {"order": 3})


def test_axes_take_arithmetic_and_skip_what_is_unset() -> None:
    args = arguments.resolve(
        "rearrange",
        {"pattern": "(a b c) -> a b c", "axes": {"a": "$h * 2", "b": 4, "c": "$x"}},
        {"h": 3},
    )
    assert args.axes == {"a": 6, "b": 4}


def test_a_param_of_another_type_is_refused() -> None:
    with pytest.raises(OpError, match="an integer is expected"):
        arguments.resolve("stack", {"over": "e", "count": "$n"}, {"n": True})


def test_what_a_param_should_have_been_is_said_as_rule_files_write_it() -> None:
    assert arguments.resolve("stack", {"over": "e", "count": "$n"}, {"n": 3.0}).count == 3
    for op, args, params, message, kind in (
        (
            "stack",
            {"over": "e", "dim": "$n"},
            {"n": True},
            "stack: `dim`: $n is true, an integer is expected",
            "int",
        ),
        ("permute", {"dims": "$n"}, {"n": 1}, "permute: `dims` is 1, a list is expected", "list"),
        ("cast", {"to": "$n"}, {"n": [None]}, "cast: `to` is [null], text is expected", "str"),
    ):
        with pytest.raises(OpError) as caught:
            arguments.resolve(op, args, params)
        assert (caught.value.code, caught.value.message) == ("M114", message)
        assert f"type: {kind}" in str(caught.value.help)


def test_a_needed_argument_without_a_value_is_named() -> None:
    with pytest.raises(OpError) as caught:
        arguments.resolve("permute", {"dims": "$order"}, {})
    assert caught.value.code == "M509"
    assert "`dims`" in caught.value.message


def test_words_of_authors_that_are_no_field_names_find_their_field() -> None:
    words = {
        a.word: a.field
        for op in ops.registry.builtin()
        for a in arguments.arguments(op)
        if a.word != a.field
    }
    assert words
    args = arguments.resolve("reshape", {"to": [2, 3], "from": [6]}, {})
    assert getattr(args, words["from"]) == (6,)


@pytest.mark.parametrize("op", ops.registry.builtin())
def test_the_samples_of_every_op_can_be_written_in_a_file(op: str) -> None:
    for given, _ in ops.get(op).samples():
        step = steps.step({op: given})
        assert step.args.keys() == given.keys()
        arguments.resolve(
            op,
            step.args,
            {},
            list(given["sizes"]) if isinstance(given.get("sizes"), dict) else None,
        )


@pytest.mark.parametrize("op", ops.registry.builtin())
def test_every_argument_has_a_description(op: str) -> None:
    assert all(argument.doc for argument in arguments.arguments(op))


def test_params_are_found_wherever_an_argument_holds_them() -> None:
    step = {"into": "w", "dim": "$a", "sizes": {"q": "$b + $c", "k": 1}}
    assert list(arguments.used("split", step)) == [
        (("dim",), "a"),
        (("sizes", "q"), "b"),
        (("sizes", "q"), "c"),
    ]
    assert list(arguments.used("drop", {"why": "costs $money"})) == []


@pytest.mark.parametrize(
    ("step", "under"),
    [
        ("stack: {over: e, count: 0}", "0"),
        ("concat: {over: e, sizes: [1, -2]}", "-2"),
        ("concat: {over: e, sizes: {q: -3}}", "-3"),
        ("slice: {dim: 0, start: -1}", "-1"),
        ("pad: {dim: 0, multiple_of: 0}", "0"),
        ("fill: {value: 0, dtype: float32, shape: [1, -4]}", "-4"),
        ("reshape: {to: [-1, -2]}", "-2"),
        ("transpose: {dims: [0]}", "[0]"),
        ("affine: {mul: .inf}", ".inf"),
        ("affine: {add: .nan}", ".nan"),
        ("lora_merge: {alpha: 1e400, rank: 1}", "1e400"),
        ("cast: {to: float33}", "float33"),
        ("cast: {to: float32, from: bf17}", "bf17"),
        ("dequantize: {codec: fp8-block, dtype: flaot}", "flaot"),
    ],
)
def test_an_argument_out_of_its_limits_is_refused_where_it_stands(step: str, under: str) -> None:
    text = (
        "id: a/b\ntitle: t\nlineage: l\nedge: [v1, v2]\nrules: [{name: r, from: "
        f'"a.{{e:int}}", to: b, via: [{{{step}}}]}}]\n'
    )
    with pytest.raises(QuestionError) as caught:
        load_text(text, "r.yaml")
    (found,) = caught.value.diagnostics
    span = found.spans[0]
    assert (found.code, span.text[span.column - 1 : span.column - 1 + span.length]) == (
        "M308",
        under,
    )
