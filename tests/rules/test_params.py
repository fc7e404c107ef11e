from __future__ import annotations

from typing import Any

import pytest
from rule_text import load_text

from migrate.core.errors import QuestionError
from migrate.rules.files import LoadedFile
from migrate.rules.param_model import Param
from migrate.rules.params import declare, resolve


def param(type: str, **fields: Any) -> Param:
    return Param(type=type, **fields)  # type: ignore[arg-type]


def codes(*args: Any) -> list[str]:
    with pytest.raises(QuestionError) as caught:
        resolve(*args)
    return [d.code for d in caught.value.diagnostics]


@pytest.mark.parametrize(
    ("declared", "text", "value"),
    [
        (param("int"), "12", 12),
        (param("int"), "-3", -3),
        (param("float"), "1e-5", 1e-5),
        (param("float"), "3", 3.0),
        (param("float"), 10000, 10000.0),
        (param("bool"), "true", True),
        (param("str"), "true", "true"),
        (param("str"), "2.10", "2.10"),
        (param("str"), "", ""),
        (param("list", items="str"), "a,b", ["a", "b"]),
        (param("list", items="str"), "1,2", ["1", "2"]),
        (param("list", items="str"), "a", ["a"]),
        (param("list", items="str"), "", [""]),
        (param("list", items="str"), "[]", []),
        (param("list", items="str"), '["a.b", "c,d"]', ["a.b", "c,d"]),
        (param("list", items="str"), "[a.b, 2.10]", ["a.b", "2.10"]),
        (param("list", items="int"), "128, 128", [128, 128]),
        (param("list", items="int"), ["128", "7"], [128, 7]),
        (param("list"), "128,a,007", [128, "a", "007"]),
    ],
)
def test_text_of_the_command_line_becomes_the_declared_type(
    declared: Param, text: str, value: Any
) -> None:
    found = resolve({"n": declared}, {"n": text})["n"]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("declared", "given"),
    [
        (param("int"), "1.5"),
        (param("int"), "x"),
        (param("int"), 1.5),
        (param("int"), "inf"),
        (param("list", items="int"), [True]),
        (param("int"), True),
        (param("int", minimum=1), "0"),
        (param("int", maximum=3), "4"),
        (param("float"), "x"),
        (param("float"), ".inf"),
        (param("float"), True),
        (param("float"), "[1]"),
        (param("bool"), "1"),
        (param("bool"), 1),
        (param("str"), ["a"]),
        (param("list"), {"a": 1}),
        (param("list", items="int"), "1,x"),
        (param("list", items="int", minimum=2), "1,2"),
        (param("list", items="int"), "[1, [2]]"),
        (param("list"), "[1"),
        (param("str", choices=("a", "b")), "c"),
    ],
)
def test_what_a_param_cannot_be_is_refused(declared: Param, given: Any) -> None:
    assert codes({"n": declared}, {"n": given}) == ["M114"]


def test_a_default_counts_only_when_no_other_source_speaks() -> None:
    declared = {"n": param("int", default=3)}
    assert resolve(declared, {}) == {"n": 3}
    assert resolve(declared, {"n": "4"}) == {"n": 4}
    assert resolve(declared, {}, [("config.json", {"n": 5}), ("the stamp", {"n": None})]) == {
        "n": 5
    }


def test_sources_that_differ_are_named_with_their_values() -> None:
    with pytest.raises(QuestionError) as caught:
        resolve(
            {"n": param("int")}, {"n": "4"}, [("the stamp", {"n": 4}), ("config.json#n", {"n": 5})]
        )
    (found,) = caught.value.diagnostics
    assert found.code == "M510"
    assert found.notes == ("`params` says 4", "the stamp says 4", "config.json#n says 5")


def test_sources_that_agree_do_so_after_typing() -> None:
    assert resolve(
        {"n": param("list", items="int")}, {"n": "1,2"}, [("config.json", {"n": [1, 2]})]
    ) == {"n": [1, 2]}


def test_no_value_says_how_to_give_one() -> None:
    with pytest.raises(QuestionError) as caught:
        resolve({"modules": param("list", items="str", title="the modules")}, {})
    (found,) = caught.value.diagnostics
    assert (found.code, found.help, found.notes) == (
        "M509",
        'params={"modules": …}, a list of names: the modules',
        (),
    )


@pytest.mark.parametrize(
    ("declared", "help"),
    [
        (
            param("int", minimum=1, title="attention heads"),
            'params={"n": …}, an integer: attention heads',
        ),
        (param("int"), 'params={"n": …}, an integer'),
        (param("list", items="int"), 'params={"n": …}, a list of integers'),
        (param("bool", title="tied"), 'params={"n": …}, true or false: tied'),
        (param("str"), 'params={"n": …}, text'),
        (param("str", choices=("a", "b")), 'params={"n": …}, one of a, b'),
    ],
)
def test_a_param_without_a_value_is_asked_for_by_its_meaning_and_no_value_is_proposed(
    declared: Param, help: str
) -> None:
    with pytest.raises(QuestionError) as caught:
        resolve({"n": declared}, {})
    assert [(d.code, d.help) for d in caught.value.diagnostics] == [("M509", help)]


def test_an_optional_param_may_be_absent() -> None:
    assert resolve({"n": param("int", optional=True)}, {}) == {}


def test_a_name_that_is_no_param_gets_the_nearest_one() -> None:
    with pytest.raises(QuestionError) as caught:
        resolve({"num_experts": param("int", optional=True)}, {"num_expert": "8"})
    (found,) = caught.value.diagnostics
    assert (found.code, found.help) == ("M112", "did you mean `num_experts`?")


def test_all_problems_come_at_once() -> None:
    assert codes({"a": param("int"), "b": param("int")}, {"b": "x", "c": "1"}) == [
        "M112",
        "M509",
        "M114",
    ]


def file(params: str, id: str) -> LoadedFile:
    return load_text(
        f"id: {id}\ntitle: t\nlineage: l\nedge: [a, b]\nparams: {params}\n", f"{id}.yaml"
    )


def test_files_of_one_path_share_a_param_of_one_type() -> None:
    found = declare(
        [
            file("{n: {type: int, optional: true}}", "x"),
            file("{n: {type: int}, m: {type: str}}", "y"),
        ]
    )
    assert (list(found), found["n"].optional) == (["n", "m"], False)
    with pytest.raises(QuestionError) as caught:
        declare([file("{n: {type: int}}", "x"), file("{n: {type: list}}", "y")])
    assert [(d.code, [s.file for s in d.spans]) for d in caught.value.diagnostics] == [
        ("M114", ["y.yaml", "x.yaml"])
    ]


@pytest.mark.parametrize("given", ["3", "3.0", "0x3", 3.0])
def test_an_integer_is_one_however_a_rule_file_could_write_it(given: Any) -> None:
    made = resolve({"n": param("int")}, {"n": given})
    assert made == {"n": 3}
    assert type(made["n"]) is int


def test_a_value_of_another_kind_is_shown_as_written_with_what_the_param_takes() -> None:
    with pytest.raises(QuestionError) as caught:
        resolve(
            {"n": param("int", minimum=2, choices=(2, 4))}, {}, [("config.json#n", {"n": True})]
        )
    (found,) = caught.value.diagnostics
    assert (found.code, found.message) == (
        "M114",
        "param `n` from config.json#n: true is not an integer",
    )
    assert found.help == "it takes int, from 2, one of 2, 4"


FOLLOWING = {
    "was": param("int"),
    "count": param("int", follows="$was", minimum=1),
    "rows": param("int", optional=True),
    "size": param("int", follows=["$rows * 1", "$was + (0 - $was) % $count"], maximum=20),
}


@pytest.mark.parametrize(
    ("given", "known", "due"),
    [
        ({}, {"was": 3}, {"was": 3, "count": 3, "size": 3}),
        ({"count": "2"}, {"was": 3}, {"was": 3, "count": 2, "size": 4}),
        ({}, {"was": 3, "rows": 9}, {"was": 3, "count": 3, "rows": 9, "size": 9}),
        # what is known counts, unless it belongs to another value of what it is made of
        ({}, {"was": 3, "size": 7}, {"was": 3, "count": 3, "size": 7}),
        ({"count": "2"}, {"was": 3, "size": 7}, {"was": 3, "count": 2, "size": 4}),
        ({"count": "2"}, {"was": 3, "count": 2, "size": 7}, {"was": 3, "count": 2, "size": 7}),
        ({"count": "2", "size": "5"}, {"was": 3}, {"was": 3, "count": 2, "size": 5}),
    ],
)
def test_a_param_follows_others_where_nothing_else_speaks(
    given: dict[str, Any], known: dict[str, Any], due: dict[str, Any]
) -> None:
    assert resolve(FOLLOWING, given, [("the stamp", known)]) == due


def test_what_follows_has_the_limits_of_its_param() -> None:
    assert codes(FOLLOWING, {"count": 7}, [("the tensors", {"was": 30})]) == ["M114"]
    assert codes({"n": param("int"), "m": param("int", follows="8 // $n")}, {"n": 3}) == ["M114"]


def test_what_is_free_may_be_chosen_where_there_is_a_choice() -> None:
    free = {"n": param("int", free=True), "m": param("int")}
    known = [("the stamp", {"n": 2, "m": 2})]
    assert codes(free, {"n": 3}, known) == ["M510"]
    assert resolve(free, {"n": 3}, known, chosen=True) == {"n": 3, "m": 2}
    with pytest.raises(QuestionError):
        resolve(free, {"m": 3}, known, chosen=True)
