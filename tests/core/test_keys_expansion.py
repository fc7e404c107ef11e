import pytest

from migrate.core.keys import CaptureType, NegativeIndex, parse


@pytest.mark.parametrize(
    ("pattern", "names", "values", "key"),
    [
        ("a.b", (), (), "a.b"),
        ("a.b", ("x",), (1,), "a.b"),
        ("{x}", ("x",), ("v",), "v"),
        ("{m...}.w{n:int}", ("n", "unused", "m"), (3, 0, "a.b"), "a.b.w3"),
        ("{m...}.w{n:int}", ("n", "m"), (3, ""), "w3"),
        ("m.{k...}", ("k",), ("",), "m"),
        ("m.{k...}", ("k",), ("a.0",), "m.a.0"),
        ("{k...}", ("k",), ("",), ""),
        ("{k...}@{r:int}", ("r", "k"), (1, "a.b"), "a.b@1"),
        ("{a...}.x.{b...}", ("a", "b"), ("", ""), "x"),
        ("{a...}.x.{b...}", ("a", "b"), ("p", ""), "p.x"),
        ("{a...}.x.{b...}", ("a", "b"), ("", "q.r"), "x.q.r"),
        ("100%.{x}%s", ("x",), ("5%",), "100%.5%%s"),
        ("{x}.{x}", ("x",), ("v",), "v.v"),
        ("l.{2*n+1}.{{{x}}}", ("x", "n"), ("v", 4), "l.9.{v}"),
        ("l.{3*i-3}", ("i",), (1,), "l.0"),
    ],
)
def test_values_are_written_in_the_order_of_the_given_names(pattern, names, values, key):
    parsed = parse(pattern)
    assert parsed.expander(names)(values) == key
    assert parsed.expand(dict(zip(names, values, strict=True))) == key


def test_a_flat_capture_is_written_without_dots():
    expand = parse("ema.{k:flat}", {"k": CaptureType("path")}).expander(("k",))
    assert expand(("layers.0.weight",)) == "ema.layers0weight"


def test_a_capture_without_a_value_is_a_key_error():
    with pytest.raises(KeyError):
        parse("{a}.{b}").expander(("a",))
    with pytest.raises(KeyError):
        parse("{a}.{b}").expand({"a": "x"})


@pytest.mark.parametrize(
    ("pattern", "value"), [("x.{n:int}", -1), ("x.{n-3}", 2), ("x.{2*n-1}", 0), ("x.{n+5}", -2)]
)
def test_a_negative_integer_is_never_written(pattern, value):
    with pytest.raises(NegativeIndex):
        parse(pattern).expander(("n",))((value,))
