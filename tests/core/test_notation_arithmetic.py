import random
import re

import pytest

from migrate.core.errors import PatternError
from migrate.core.notation import LONGEST, Expr, Unset, parse_expression, parse_index


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 7),
        ("007", 7),
        ("$a + $b*2", 16),
        ("($a+$b) * 2", 22),
        ("-$a // 2", -3),
        ("-(9 // 3)", -3),
        ("-8 // 2", -4),
        ("-7 % 5", 3),
        ("2 - -3", 5),
        ("--$a", 6),
        ("20 - 3 - 4", 13),
        ("100 // 5 // 2", 10),
        ("$num_heads // $num_kv_heads * $head_dim", 512),
    ],
)
def test_arithmetic_has_pythons_precedence_and_remainder(text, value):
    params = {"a": 6, "b": 5, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
    assert parse_expression(text).evaluate(params) == value


def test_random_expressions_agree_with_python():
    rng = random.Random(3)

    def some(depth):
        if depth == 0 or rng.random() < 0.3:
            return rng.choice(["$a", "$b", str(rng.randrange(20))])
        if rng.random() < 0.2:
            return f"-{some(depth - 1)}"
        inner = f"{some(depth - 1)} {rng.choice(['+', '-', '*', '//', '%'])} {some(depth - 1)}"
        return f"({inner})" if rng.random() < 0.5 else inner

    class Whole(int):
        def __floordiv__(self, other):
            if other and int(self) % int(other):
                raise OverflowError("is not divisible by")
            return Whole(int(self) // int(other))

    for name in ("__add__", "__sub__", "__mul__", "__mod__", "__neg__"):
        setattr(
            Whole, name, lambda *operands, name=name: Whole(getattr(int, name)(*map(int, operands)))
        )

    refused = {ZeroDivisionError: 0, OverflowError: 0}
    for _ in range(3000):
        text = some(4)
        try:
            expected = eval(
                re.sub("[0-9]+", r"Whole(\g<0>)", text.replace("$", "")),
                {"a": Whole(-7), "b": Whole(12), "Whole": Whole},
            )
        except (ZeroDivisionError, OverflowError) as error:
            refused[type(error)] += 1
            with pytest.raises(
                PatternError,
                match="division by zero"
                if type(error) is ZeroDivisionError
                else "is not divisible by",
            ):
                parse_expression(text).evaluate({"a": -7, "b": 12})
            continue
        assert parse_expression(text).evaluate({"a": -7, "b": 12}) == expected, text
    assert min(refused.values()) > 50, refused


@pytest.mark.parametrize(
    ("text", "start", "end"),
    [
        ("", 0, 0),
        ("1 +", 3, 3),
        ("+ 1", 0, 1),
        ("1 2", 2, 3),
        ("(1", 0, 1),
        ("1)", 1, 2),
        ("()", 1, 2),
        ("1 / 2", 2, 3),
        ("2 ** 3", 3, 4),
        ("1.5", 1, 2),
        ("$", 0, 1),
        ("$1", 0, 2),
        ("heads", 0, 5),
        ("f(1)", 1, 2),
        ("1 if 2 else 3", 2, 4),
        ("__import__", 0, 10),
        ("٣", 0, 1),
        ("2²", 1, 2),
        ("1\n", 1, 2),
    ],
)
def test_what_is_no_arithmetic_is_refused_with_its_place(text, start, end):
    with pytest.raises(PatternError) as caught:
        parse_expression(text)
    assert (caught.value.code, caught.value.start, caught.value.end) == ("M111", start, end)


def test_an_unset_param_is_named():
    with pytest.raises(Unset) as caught:
        parse_expression("$a * $b").evaluate({"a": 1})
    assert caught.value.name == "b"


@pytest.mark.parametrize("value", [True, "3", 2.0, [1]])
def test_a_param_that_is_no_integer_is_refused(value):
    with pytest.raises(PatternError, match="not an integer"):
        parse_expression("$a + 1").evaluate({"a": value})


def test_deep_nesting_does_not_exhaust_the_stack():
    half = LONGEST // 2 - 1
    assert parse_expression("(" * half + "1" + ")" * half).evaluate({}) == 1
    assert parse_expression("-" * (LONGEST - 1) + "1").evaluate({}) == -1
    with pytest.raises(PatternError, match="longer"):
        parse_expression("1+" * LONGEST + "1")


def test_names_are_listed_once_in_order():
    assert parse_expression("$b * $a + $b").names == ("b", "a")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("n", ("n", 1, 0)),
        ("n+1", ("n", 1, 1)),
        ("1+n", ("n", 1, 1)),
        ("2*n+1", ("n", 2, 1)),
        ("3*i-3", ("i", 3, -3)),
        ("n*2 - (4 - 1)", ("n", 2, -3)),
        ("3*(n-1)", ("n", 3, -3)),
        ("n+n", ("n", 2, 0)),
        ("3*n-(n-2)", ("n", 2, 2)),
        ("8//2 + n", ("n", 1, 4)),
        ("-(-n)", ("n", 1, 0)),
    ],
)
def test_index_expressions_are_read_as_factor_and_offset(text, expected):
    assert parse_index(text) == expected


def test_random_linear_indexes_have_the_value_of_the_text():
    rng = random.Random(5)
    for _ in range(2000):
        a, b, c = rng.randint(1, 5), rng.randint(0, 9), rng.randint(1, 4)
        text = rng.choice(
            [
                f"{a}*n+{b}-$p",
                f"{c}*({a}*n-{b})+$p",
                f"$p-{b}+n*{a}",
                f"{a}*n-({b}-$p)*{c}",
                f"-({b}-{a}*n) + $p // {c}",
            ]
        )
        capture, factor, offset = parse_index(text)
        assert capture == "n"
        for n in (0, 1, 7):
            value = factor * n + (
                offset.evaluate({"p": 12}) if isinstance(offset, Expr) else offset
            )
            assert value == eval(text.replace("$", ""), {"n": n, "p": 12}), text


@pytest.mark.parametrize(
    "text",
    [
        "5-n",
        "0*n",
        "n-n",
        "n*n",
        "n//2",
        "n%2",
        "2//n",
        "n*$k",
        "$k*n",
        "(n+1)*(n)",
        "n+m",
        "3",
        "$k",
        "-n",
    ],
)
def test_an_index_that_cannot_be_read_backwards_is_refused(text):
    with pytest.raises(PatternError) as caught:
        parse_index(text)
    assert caught.value.code == "M111"


def test_expressions_are_equal_by_what_they_compute_and_hashable():
    assert parse_expression("$a+1") == parse_expression(" $a + 1 ")
    assert (
        len({parse_expression("$a+1"), parse_expression("$a + 1"), parse_expression("$a+2")}) == 2
    )
