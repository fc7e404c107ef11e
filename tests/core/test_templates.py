import random

import pytest
from key_oracle import random_pieces, text_of
from work import steps, times

from migrate.core import templates
from migrate.core.errors import PatternError
from migrate.core.keys import TwoReadings, parse
from migrate.core.notation import Unset
from migrate.core.templates import PER_KEY, SLOT, bind, collapse, group


def rows_of(pattern, keys):
    """The values of all keys by way of the templates."""
    found = {}
    for template in group(keys):
        binding = bind(pattern, template)
        if binding is None:
            rows = [None] * len(template.keys)
        elif binding is PER_KEY:
            rows = [pattern.match(key) for key in template.keys]
        else:
            rows = binding.rows()
        assert len(rows) == len(template.keys)
        found.update(zip(template.keys, rows, strict=True))
    return [found[key] for key in keys]


def test_whole_segments_that_are_integers_become_slots():
    keys = [
        "a.0.b",
        "a.b",
        "a.17.b",
        "a.007.b",
        "a.x1.b",
        "a.0.1",
        "a.3.b",
        "9",
        "a.².b",
        "a.٣.b",
        "a.00.b",
        "",
        "a..b",
        "a.1.é.2",
        "a.4.é.3",
    ]
    templates = group(keys)
    assert [t.text.replace(SLOT, "#") for t in templates] == [
        "a.#.b",
        "a.b",
        "a.007.b",
        "a.x1.b",
        "a.#.#",
        "#",
        "a.².b",
        "a.٣.b",
        "a.00.b",
        "",
        "a..b",
        "a.#.é.#",
    ]
    assert templates[0].keys == ["a.0.b", "a.17.b", "a.3.b"]
    assert templates[0].ints == [(0,), (17,), (3,)]
    assert templates[4].ints == [(0, 1)]
    assert templates[1].ints == [()]
    assert templates[-1].ints == [(1, 2), (4, 3)]


def test_a_key_that_holds_the_slot_character_is_a_template_of_its_own():
    keys = [f"a.{SLOT}", "a.1", f"a.{SLOT}.2", f"a.{SLOT}.3"]
    templates = group(keys)
    assert [(t.text, t.keys, t.literal) for t in templates] == [
        (f"a.{SLOT}", [keys[0]], True),
        (f"a.{SLOT}", ["a.1"], False),
        (keys[2], [keys[2]], True),
        (keys[3], [keys[3]], True),
    ]
    assert rows_of(parse("a.{n:int}"), keys) == [None, (1,), None, None]
    assert rows_of(parse(f"a.{SLOT}"), keys) == [(), None, None, None]
    assert rows_of(parse("a.{k...}"), keys) == [(SLOT,), ("1",), (f"{SLOT}.2",), (f"{SLOT}.3",)]


def test_grouping_keeps_every_key_once_and_in_order():
    rng = random.Random(4)
    words = ["a", "0", "7", "12", "007", "w1", "1w", "100", "x.y", "", "é", "１２", "\ud800"]
    keys = list(
        dict.fromkeys(".".join(rng.choices(words, k=rng.randint(1, 5))) for _ in range(5000))
    )
    templates = group(keys)
    place = {key: i for i, key in enumerate(keys)}
    assert sorted(key for t in templates for key in t.keys) == sorted(keys)
    assert [place[t.keys[0]] for t in templates] == sorted(place[t.keys[0]] for t in templates)
    assert len({(t.text, t.literal) for t in templates}) == len(templates)
    for t in templates:
        assert [place[key] for key in t.keys] == sorted(place[key] for key in t.keys)
        for key, ints in zip(t.keys, t.ints, strict=True):
            numbers = iter(ints)
            assert key == "".join(str(next(numbers)) if c == SLOT else c for c in t.text)
            pieces = zip(key.split("."), t.text.split("."), strict=True)
            assert all(
                (form == SLOT) == (piece.isascii() and piece.isdigit() and str(int(piece)) == piece)
                for piece, form in pieces
            )


@pytest.mark.parametrize(
    ("pattern", "keys", "expected"),
    [
        (
            "{p...}.{e:int}.w",
            ["a.0.1.w", "a.5.2.w", "b.3.w", "a.b.w"],
            [("a.0", 1), ("a.5", 2), ("b", 3), None],
        ),
        ("l.{x}.w", ["l.0.w", "l.11.w", "l.a.w"], [("0",), ("11",), ("a",)]),
        ("{k...}", ["a.1", "1", "1.2.3"], [("a.1",), ("1",), ("1.2.3",)]),
        ("{n:int}.{n}", ["1.1", "1.2", "7.7"], [(1,), None, (7,)]),
        ("{x}.{x}", ["1.1", "1.2", "a.a"], [("1",), None, ("a",)]),
        ("{n:int}.{n+1}", ["1.2", "1.3", "0.1"], [(1,), None, (0,)]),
        ("l.{2*n+1}.w", ["l.0.w", "l.1.w", "l.3.w"], [None, (0,), (1,)]),
        ("l.{n+2}.w", ["l.0.w", "l.1.w", "l.2.w"], [None, None, (0,)]),
        ("l.{n:int}.w", ["l.007.w", "l.7.w", "l.².w"], [None, (7,), None]),
        ("layers.61.{x}", ["layers.61.a", "layers.60.a"], [("a",), None]),
        ("{w:1|2}.x", ["1.x", "3.x"], [("1",), None]),
        ("{a}1.x", ["21.x", "2.x", "a1.x"], [("2",), None, ("a",)]),
        ("%{x}.{k...}.%d", ["%a.1.2.%d", "%a.%d"], [("a", "1.2"), ("a", "")]),
        (
            "{p...}.experts.{e:int}.{w:w1|w3}",
            ["m.0.experts.1.w3", "m.1.experts.1.w2", "experts.4.w1"],
            [("m.0", 1, "w3"), None, ("", 4, "w1")],
        ),
    ],
)
def test_rows_are_the_values_of_each_key(pattern, keys, expected):
    found = rows_of(parse(pattern), keys)
    assert found == expected
    assert found == [parse(pattern).match(key) for key in keys]


def test_rows_agree_with_matching_key_by_key_on_random_keys():
    rng = random.Random(23)
    words = ["x", "y", "0", "10", "01", "x_y", "w3", "7", "7", "12", "norm2"]
    compared = matched = bound = ambiguous = 0
    while compared < 20_000:
        pieces = random_pieces(rng, repeat=rng.random() < 0.3)
        text = text_of(pieces)
        if rng.random() < 0.2:
            text = text.replace(":int}", "}", 1).replace("{b}", "{2*b+1}").replace("{c}", "{c+3}")
        try:
            pattern = parse(text)
        except PatternError:
            continue
        keys = list(
            dict.fromkeys(".".join(rng.choices(words, k=rng.randint(1, 5))) for _ in range(30))
        )
        for template in group(keys):
            per_key = []
            for key in template.keys:
                try:
                    per_key.append(pattern.match(key))
                except TwoReadings:
                    per_key.append(TwoReadings)
            compared += len(per_key)
            binding = two = None
            try:
                binding = bind(pattern, template)
            except TwoReadings as error:
                two = error.key
            if two is not None:
                ambiguous += 1
                assert per_key[template.keys.index(two)] is TwoReadings
                continue
            if binding is PER_KEY:
                continue
            rows = [None] * len(per_key) if binding is None else binding.rows()
            assert rows == per_key, (text, template)
            bound += SLOT in template.text and binding is not None
            matched += sum(row is not None for row in rows)
    assert matched > 1000
    assert bound > 300
    assert ambiguous > 15


def test_two_readings_are_raised_with_a_key_that_exists():
    (template,) = group(["a.1.2", "a.3.4"])
    with pytest.raises(TwoReadings) as caught:
        bind(parse("{p...}.{n:int}.{k...}"), template)
    assert caught.value.key == "a.1.2"
    assert caught.value.first != caught.value.second


def test_a_reading_that_the_numbers_rule_out_does_not_count():
    # by form both numbers could be n; by value one is odd
    keys = ["2.3", "4.5"]
    assert rows_of(parse("{a...}.{2*n}.{b...}"), keys) == [("", 1, "3"), ("", 2, "5")]


def test_an_unset_param_is_reported_not_ignored():
    (template,) = group(["mtp.3.x"])
    with pytest.raises(Unset):
        bind(parse("mtp.{n-$layers}.x"), template).rows()
    assert bind(parse("mtp.{n-$layers}.x").with_params({"layers": 2}), template).rows() == [(5,)]


def test_many_keys_are_grouped_bound_and_collapsed_in_a_few_steps_each():
    keys = [
        f"model.layers.{n}.mlp.experts.{e}.{w}.weight"
        for n in range(26)
        for e in range(64)
        for w in ("w1", "w2", "w3")
    ]
    pattern = parse("{p...}.mlp.experts.{e:int}.{w:w1|w2|w3}.weight")
    templates, rows, lines = [], [], []
    grouping = steps(lambda: templates.extend(group(keys)))
    binding = steps(lambda: rows.extend(row for t in templates for row in bind(pattern, t).rows()))
    collapsing = steps(lambda: lines.extend(collapse(keys)))
    assert len(templates) == 3
    assert len(rows) == len(keys)
    assert rows[1] == ("model.layers.0", 1, "w1")
    assert lines[0].text == "model.layers.{0..25}.mlp.experts.{0..63}.w{1..3}.weight"
    assert grouping < 60 * len(keys)
    assert binding < 10 * len(keys)
    assert collapsing < 60 * len(keys)


def test_many_keys_without_a_common_form_stay_linear():
    def grouping(n):
        keys = [f"a{i * 7919}.b{i}.c.{i}" for i in range(n)]

        def go():
            assert len(group(keys)) == n

        return go

    # were it quadratic, 64 * 64
    assert times(grouping(32_000), grouping(500)) < 10 * 64


def test_the_work_grows_with_the_length_of_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hostile key has as many numbers as its length allows."""
    looked_at: list[int] = []
    real = templates._digits

    def counted(text: str) -> list[bytes]:
        looked_at.append(len(text))
        return real(text)

    monkeypatch.setattr(templates, "_digits", counted)
    keys = ["a" + f".{number}" * 5_000 for number in (1, 2)]
    (found,) = templates.group(keys)
    assert found.ints == [(1,) * 5_000, (2,) * 5_000]
    assert sum(looked_at) <= 2 * sum(map(len, keys))
