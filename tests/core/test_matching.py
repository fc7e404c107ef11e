from migrate.core.keys import parse
from migrate.core.matching import advance, cuts, ways


def all_cuts(pattern, key):
    parts = parse(pattern).parts
    tables = advance(parts, key)
    return list(cuts(parts, tables, key))


def test_counts_stop_at_two_and_cuts_yield_every_way():
    parts = parse("{a}_{b}").parts
    key = "_".join("abcdefg")
    tables = advance(parts, key)
    assert ways(parts, tables, key) == 2
    assert max(count for table in tables for count in table.values()) == 2
    found = all_cuts("{a}_{b}", key)
    assert sorted(borders[1] for borders in found) == [1, 3, 5, 7, 9, 11]
    assert len(set(found)) == len(found)


def test_no_way_yields_no_cut():
    assert all_cuts("{a}_{b}", "abc") == []
    assert all_cuts("a.{n:int}", "a.b") == []


def test_cuts_run_from_the_beginning_to_the_end():
    assert all_cuts("{p...}.w{n:int}", "a.b.w12") == [(0, 4, 5, 7)]
    assert all_cuts("m.{k...}", "m") == [(0, 1, 1)]


def test_tables_stay_as_small_as_the_key():
    parts = parse("{a...}.x.{b...}.y.{c...}.z.{d...}").parts
    key = ".".join(["x", "y", "z", "w"] * 500)
    assert all(len(table) <= len(key) + 1 for table in advance(parts, key))


def test_a_slot_is_an_integer_only_where_templates_are_read():
    parts = parse("l.{n:int}").parts
    assert ways(parts, advance(parts, "l.\ue000"), "l.\ue000") == 0
    assert ways(parts, advance(parts, "l.\ue000", "\ue000"), "l.\ue000") == 1
