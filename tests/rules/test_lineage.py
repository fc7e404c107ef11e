from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from migrate.core.errors import QuestionError
from migrate.core.spec import spec
from migrate.rules.lineage import (
    Detect,
    Edge,
    Layout,
    Lineage,
    detect,
    mixes,
    nearest,
    path,
    resolve_goal,
    warnings,
)
from migrate.source.blobs import Stored
from migrate.source.index import Index


def lineage(
    name: str = "l", *edges: tuple[str, str], names: str = "v1 v2 v3 v4", ordered: bool = True
) -> Lineage:
    return Lineage(
        name,
        "",
        ordered,
        tuple(Layout(n) for n in names.split()),
        tuple(Edge(a, b) for a, b in edges),
    )


def way(found: Lineage, start: str, goal: str, down: bool | None = None) -> str:
    return " ".join(
        f"{hop.start}{'<' if hop.backwards else '>'}{hop.end}"
        for hop in path(found, start, goal, down=down)
    )


def code(call: Any, *args: Any, **more: Any) -> str:
    with pytest.raises(QuestionError) as caught:
        call(*args, **more)
    return caught.value.diagnostics[0].code


CHAIN = lineage("l", ("v1", "v2"), ("v2", "v3"), ("v3", "v4"))


def test_the_way_up_is_the_shortest() -> None:
    assert way(CHAIN, "v1", "v4") == "v1>v2 v2>v3 v3>v4"
    assert (
        way(lineage("l", ("v1", "v2"), ("v2", "v3"), ("v3", "v4"), ("v2", "v4")), "v1", "v4")
        == "v1>v2 v2>v4"
    )
    assert way(CHAIN, "v2", "v2") == ""


def test_an_edge_from_a_layout_to_itself_is_walked_only_when_it_is_asked_for() -> None:
    looped = lineage("l", ("v1", "v2"), ("v2", "v2"), ("v2", "v3"), ("v3", "v4"))
    assert way(looped, "v2", "v2") == ""
    assert way(looped, "v1", "v3") == "v1>v2 v2>v3"
    for backwards in (False, True):
        (hop,) = path(looped, "v2", "v2", loop=backwards)
        assert (hop.start, hop.end, hop.backwards) == ("v2", "v2", backwards)
    assert code(path, CHAIN, "v2", "v2", loop=False) == "M502"


def test_the_way_down_takes_inverses() -> None:
    assert way(CHAIN, "v4", "v2") == "v4<v3 v3<v2"


def test_a_file_whose_edge_runs_down_replaces_the_inverse() -> None:
    assert way(lineage("l", ("v1", "v2"), ("v2", "v1")), "v2", "v1") == "v2>v1"
    assert way(lineage("l", ("v2", "v1")), "v1", "v2") == "v1<v2"


def test_an_ordered_lineage_is_never_walked_to_and_fro() -> None:
    assert code(path, lineage("l", ("v1", "v3"), ("v2", "v3")), "v1", "v2") == "M502"


def test_a_lineage_without_order_is_walked_any_way() -> None:
    star = lineage("l", ("hub", "a"), ("b", "hub"), names="a hub b", ordered=False)
    assert way(star, "a", "b") == "a<hub hub<b"
    assert way(star, "b", "a") == "b>hub hub>a"


def test_apply_and_downgrade_do_not_do_each_others_work() -> None:
    assert way(CHAIN, "v1", "v2", down=False) == "v1>v2"
    assert code(path, CHAIN, "v2", "v1", down=False) == "M502"
    assert code(path, CHAIN, "v1", "v2", down=True) == "M502"


def test_a_way_that_is_not_there_says_which_edges_are() -> None:
    with pytest.raises(QuestionError, match="its edges: v1 -> v2"):
        path(lineage("l", ("v1", "v2")), "v1", "v4")
    assert code(path, CHAIN, "v1", "v9") == "M501"


LINEAGES = {
    "m": lineage("m", names="v4 v5"),
    "q": lineage("q", names="v4 v5 v6"),
    "g": lineage("g", names="multi single", ordered=False),
}


@pytest.mark.parametrize(
    ("text", "current", "goal"),
    [
        ("q@v5", {}, "q@v5"),
        ("q", {}, "q@v6"),
        ("q@latest", {}, "q@v6"),
        ("v6", {}, "q@v6"),
        ("single", {}, "g@single"),
        ("v5", {"m": "v4"}, "m@v5"),
        ("v5", {"m": "v4", "g": "multi"}, "m@v5"),
        ("latest", {"m": "v4", "g": "multi"}, "m@v5"),
        ("+1", {"q": "v4"}, "q@v5"),
        ("-1", {"q": "v5"}, "q@v4"),
        ("q@+2", {"q": "v4", "m": "v4"}, "q@v6"),
    ],
)
def test_a_goal_is_read_in_the_light_of_where_the_checkpoint_stands(
    text: str, current: dict[str, str], goal: str
) -> None:
    found = resolve_goal(text, LINEAGES, current)
    assert f"{found.lineage}@{found.layout}" == goal


@pytest.mark.parametrize(
    ("text", "current", "expected", "says"),
    [
        ("v5", {}, "M501", "m@v5, q@v5"),
        ("v5", {"m": "v4", "q": "v4"}, "M501", "m@v5, q@v5"),
        ("v9", {}, "M501", "no lineage has a layout"),
        ("singel", {}, "M501", "did you mean `single`"),
        ("q@v7", {}, "M501", "q"),
        ("hf@v5", {}, "M507", "no lineage `hf`"),
        ("mm@v5", {}, "M507", "did you mean `m`"),
        ("g", {}, "M501", "g@multi, g@single"),
        ("g@latest", {}, "M501", "no order"),
        ("latest", {}, "M501", "several lineages"),
        ("latest", {"g": "multi"}, "M501", "several lineages"),
        ("+1", {}, "M501", "none that is known"),
        ("+1", {"m": "v5"}, "M502", "past the last"),
        ("-1", {"m": "v4"}, "M502", "past the first"),
        ("q@+1", {}, "M501", "counts from"),
        ("g@+1", {"g": "multi"}, "M501", "no order to count"),
    ],
)
def test_a_goal_that_is_not_clear_is_an_error_with_candidates(
    text: str, current: dict[str, str], expected: str, says: str
) -> None:
    with pytest.raises(QuestionError) as caught:
        resolve_goal(text, LINEAGES, current)
    assert caught.value.diagnostics[0].code == expected
    assert says in str(caught.value)


def test_a_deprecated_layout_is_a_warning_with_its_message() -> None:
    old = Lineage("l", layouts=(Layout("v1", status="deprecated", message="use v2"), Layout("v2")))
    (found,) = warnings(old, ["v1", "v2"])
    assert (found.code, found.severity, found.help) == ("M511", "warning", "use v2")


def index(**tensors: tuple[str, tuple[int, ...]]) -> Index:
    return Index(
        {key.replace("__", "."): Stored(spec(*t), 0, 0) for key, t in tensors.items()}, ("f",)
    )


def finding(
    signs: Detect, found: Index, config: Any = None, versions: dict[str, int] | None = None
) -> tuple[bool, list[str]]:
    raw = (
        None
        if config is None
        else config
        if isinstance(config, bytes)
        else json.dumps(config).encode()
    )
    found = replace(found, module_versions=versions)
    (only,) = detect(
        Lineage("l", layouts=(Layout("v", detect=signs),)),
        found,
        lambda name: raw if name == "config.json" else None,
    )
    return only.holds, only.evidence


TWO = index(a__0__w=("bfloat16", (2, 3)), a__1__w=("float8_e4m3fn", (2,)), a__1__v2=("int8", ()))


@pytest.mark.parametrize(
    ("signs", "holds"),
    [
        (Detect(present=("{p...}.w",)), True),
        (Detect(present=("{p...}.w", "{p...}.x")), False),
        (Detect(present=("a.1.w",)), True),
        (Detect(present=("a.2.w",)), False),
        (Detect(present=("a.{n:int}.v{i:int}",)), True),
        (Detect(absent=("{p...}.x",)), True),
        (Detect(absent=("{p...}.x", "{p...}.w")), False),
        (Detect(dtype={"{p...}.w": ("float8_e4m3fn",)}), True),
        (Detect(dtype={"{p...}.w": ("int8",)}), False),
        (Detect(ndim={"{p...}.w": (2,)}), True),
        (Detect(ndim={"a.1.w": (2, 3)}), False),
        (Detect(), False),
    ],
)
def test_signs_are_read_from_names_and_specs(signs: Detect, holds: bool) -> None:
    assert finding(signs, TWO)[0] is holds


@pytest.mark.parametrize(
    ("config", "holds"),
    [
        ({"model_type": "x", "q": {"bits": 8}}, True),
        ({"model_type": "y", "q": {"bits": 8}}, True),
        ({"model_type": "z", "q": {"bits": 8}}, False),
        ({"model_type": "x", "q": {"bits": True}}, False),
        ({"model_type": "x", "q": 8}, False),
        ({}, False),
        (None, True),
        (b"{", True),
        (b"[" * 100_000, True),
    ],
)
def test_config_counts_only_where_there_is_one(config: Any, holds: bool) -> None:
    signs = Detect(present=("{p...}.w",), config={"model_type": ("x", "y"), "q.bits": (8,)})
    found, evidence = finding(signs, TWO, config)
    assert found is holds
    if config is None:
        assert "no config.json that says model_type" in evidence


def test_a_layout_known_by_config_alone_does_not_hold_without_one() -> None:
    assert finding(Detect(config={"a": (1,)}), TWO) == (False, ["no config.json that says a"])


def test_module_versions_count_where_the_format_has_them() -> None:
    signs = Detect(present=("{p...}.w",), module_version={"{m...}": (2,)})
    assert finding(signs, TWO)[0]
    assert finding(signs, TWO, versions={"bn": 2})[0]
    assert not finding(signs, TWO, versions={"bn": 1})[0]


GATE, DOWN = "{p...}.gate_up", "{p...}.down"
# experts of 4: rows of the hidden size 6 first, or last
ROWS = index(a__gate_up=("int8", (4, 6, 16)), a__down=("int8", (4, 8, 6)), z__down=("int8", (2, 2)))
COLUMNS = index(a__gate_up=("int8", (4, 16, 6)), a__down=("int8", (4, 6, 8)))
SQUARE = index(a__gate_up=("int8", (4, 6, 6)), a__down=("int8", (4, 6, 6)))
NAMED = {
    "rows": {GATE: ("e", "h", None), DOWN: ("e", None, "h")},
    "columns": {GATE: ("e", None, "h"), DOWN: ("e", "h", None)},
}
SAID = {"rows": {GATE: ("e", "$text.hidden", None)}, "columns": {GATE: ("e", None, "$text.hidden")}}


@pytest.mark.parametrize(
    ("found", "holding"),
    [(ROWS, {"rows"}), (COLUMNS, {"columns"}), (SQUARE, {"rows", "columns"}), (TWO, set[str]())],
)
def test_a_shape_tells_layouts_of_one_name_apart(found: Index, holding: set[str]) -> None:
    config = {"text": {"hidden": 6}}
    for signs in (NAMED, SAID):
        assert {
            name for name, shape in signs.items() if finding(Detect(shape=shape), found, config)[0]
        } == holding


def test_a_shape_is_evidence_with_its_key_and_counts_only_where_the_configuration_has_its_size() -> (  # noqa: E501
    None
):
    assert finding(Detect(shape=NAMED["rows"]), ROWS) == (
        True,
        [
            f"a.gate_up has the shape [4, 6, 16], which [e, h, null] means of {GATE}",
            f"a.down has the shape [4, 8, 6], which [e, null, h] means of {DOWN}",
        ],
    )
    assert finding(Detect(shape=NAMED["columns"]), ROWS) == (
        False,
        [
            f"a.gate_up has the shape [4, 6, 16], which [e, null, h] means of {GATE}",
            f"not: no key of those that fit {DOWN} has the shape [e, h, null] with e = 4, h = 16",
        ],
    )
    for config in (None, {}, {"text": {"hidden": "6"}}, {"text": 6}):
        assert finding(Detect(shape=SAID["rows"]), ROWS, config) == (
            False,
            ["no config.json that says text.hidden"],
        )
    assert finding(Detect(present=(GATE,), shape=SAID["rows"]), ROWS)[0]
    assert finding(Detect(shape={"a.v": ()}), index(a__v=("int8", ())))[0]
    assert not finding(Detect(shape={"a.v": ()}), index(a__v=("int8", (1,))))[0]
    assert not finding(Detect(shape={GATE: (4, 6)}), ROWS)[0]


def test_names_may_be_different_sizes_in_different_layers_and_too_many_are_no_sign() -> None:
    sizes = {
        f"l.{n}.{leaf}": Stored(spec("int8", (n + 2, 3) if leaf == "a" else (3, n + 2)), 0, 0)
        for n in range(5)
        for leaf in "ab"
    }
    signs = Detect(shape={"l.{n:int}.a": ("h", None), "l.{n:int}.b": (None, "h")})
    assert finding(signs, Index(sizes, ("f",)))[0]
    hostile = Index({f"l.{n}.a": Stored(spec("int8", (n,)), 0, 0) for n in range(500)}, ("f",))
    found = finding(Detect(shape={"l.{n:int}.a": ("h",)}), hostile)
    assert found == (
        False,
        ["the keys that fit l.{n:int}.a have too many different shapes to be compared"],
    )


def test_evidence_names_the_key_and_marks_what_did_not_hold() -> None:
    _, evidence = finding(Detect(present=("{p...}.w", "x"), absent=("a.0.w",)), TWO)
    assert evidence == ["a.0.w fits {p...}.w", "not: no key fits x", "not: a.0.w fits a.0.w"]


def test_a_key_with_two_readings_is_there_all_the_same() -> None:
    assert finding(Detect(present=("{a...}.x.{b...}",)), index(x__x__x=("int8", ())))[0]


def test_keys_from_hostile_files_are_printed_safely() -> None:
    found = Index({"a\x1b[2J.w": Stored(spec("int8", ()), 0, 0)}, ("f",))
    assert finding(Detect(present=("{p...}.w",)), found)[1][0].isprintable()


@pytest.mark.parametrize(
    ("keys", "mixed"),
    [
        ("a.old", False),
        ("a.new", False),
        ("a.old b.new", True),
        ("a.both b.new", False),
        ("x", False),
    ],
)
def test_layouts_are_mixed_where_the_own_names_of_two_stand_side_by_side(
    keys: str, mixed: bool
) -> None:
    layouts = (
        Layout("v1", detect=Detect(present=("{m}.old",), absent=("{m}.new",))),
        Layout("v2", detect=Detect(present=("{m}.new",), absent=("{m}.old",))),
        # asks for nothing of its own
        Layout("v3", detect=Detect(present=("{m}.new",), dtype={"{m}.new": ("int8",)})),
        Layout("v4"),
    )
    index = Index({key: Stored(spec("float32", (1,)), 0, 0) for key in keys.split()}, ("x",))
    assert mixes(Lineage("l", layouts=layouts), index) is mixed


@pytest.mark.parametrize(
    ("config", "holds", "said"),
    [
        (b'{"m": 1}', True, "config.json says m = 1"),
        (b'{"m": 2}', False, "not: config.json says m = 2"),
        (b'{"m": true}', True, "config.json says m = true"),
        (b"{}", True, "config.json says nothing about m"),
        (None, True, "no config.json that says m"),
    ],
)
def test_config_may_say_anything_but_what_stands_under_not(
    config: bytes | None, holds: bool, said: str
) -> None:
    signs = Detect(present=("b",), config={"m": ({"not": [2, 3]},)})
    lineage = Lineage("l", layouts=(Layout("v1", detect=signs),))
    index = Index({"b": Stored(spec("float32", (1,)), 0, 0)}, ("f",))
    (one,) = detect(lineage, index, {"config.json": config}.get)
    assert one.holds is holds
    assert one.evidence[-1] == said
    # what is not said is no sign of anything
    assert not nearest([lineage], Index({"c": index.tensors["b"]}, ("f",)), lambda _: b"{}")


def test_a_layout_may_need_a_configuration() -> None:
    signs = Detect(present=("b",), configured=True)
    lineage = Lineage("l", layouts=(Layout("v1", detect=signs),))
    index = Index({"b": Stored(spec("float32", (1,)), 0, 0)}, ("f",))
    for config, holds in ((b"{}", True), (None, False)):
        (one,) = detect(lineage, index, {"config.json": config}.get)
        assert one.holds is holds


@pytest.mark.parametrize(
    ("config", "unless", "holds", "said"),
    [
        (
            None,
            Detect(present=("{p...}.w",)),
            False,
            "a.0.w fits {p...}.w: signs of something else",
        ),
        (None, Detect(present=("{p...}.w",), absent=("{p...}.x",)), True, "a.0.x fits {p...}.x"),
        (b'{"m": 1}', Detect(present=("{p...}.w",), config={"m": (2,)}), True, "m = 1, not 2"),
        (b'{"m": 2}', Detect(present=("{p...}.w",), config={"m": (2,)}), False, "m = 2: signs"),
        # without config.json what it would say does not count
        (None, Detect(present=("{p...}.w",), config={"m": (2,)}), False, "signs of something else"),
    ],
)
def test_where_all_signs_of_something_else_hold_a_layout_does_not(
    config: bytes | None, unless: Detect, holds: bool, said: str
) -> None:
    tensors = {k: Stored(spec("float32", (1,)), 0, 0) for k in ("a.0.w", "a.0.x", "b")}
    signs = Detect(present=("b",), unless=unless)
    found = Lineage("l", layouts=(Layout("v1", detect=signs),))
    (one,) = detect(found, Index(tensors, ("f",)), {"config.json": config}.get)
    assert one.holds is holds
    assert said in one.evidence[-1]
