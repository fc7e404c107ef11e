"""Python's containers and small values: what went in comes out, with its kind."""

from __future__ import annotations

import io
from collections import Counter, OrderedDict, defaultdict, deque
from functools import partial
from typing import Any

import pytest
import torch
from torch_streams import decoded, reduce, tree

from migrate.core.errors import CheckpointError
from migrate.source.pickle import policy
from migrate.source.pickle.nodes import ABSENT, Call, Dict, Global, Set
from migrate.source.pickle.tree import Buffer, DictNode, ListNode, Opaque


def plain(value: Any) -> Any:
    """A decoded value as Python would hold it, with the kind of each container in front."""
    if type(value) is DictNode:
        held = [(plain(key), plain(inner)) for key, inner in value.pairs]
        return (
            (value.kind, held)
            if value.attributes is None
            else (value.kind, held, plain(value.attributes))
        )
    if type(value) is ListNode:
        return (value.kind, [plain(item) for item in value.items])
    return value


def kinds(value: Any) -> Any:
    """The same of a Python value."""
    if isinstance(value, dict):
        held = [(kinds(key), kinds(inner)) for key, inner in value.items()]
        return (type(value).__name__, held)
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return (type(value).__name__, [kinds(item) for item in value])
    return value


VALUES = {
    "dict": {"a": 1, 2: "b", None: 3.5, True: False, (1, "x"): [], b"k": 1.0},
    "ordered": OrderedDict([("b", 1), ("a", OrderedDict())]),
    "default": defaultdict(list, {1: [2]}),
    "default of dicts": defaultdict(dict),
    "default of nothing": defaultdict(None, a=1),
    "counter": Counter("aab"),
    "counter of nothing": Counter(),
    "deque": deque([1, 2], 5),
    "deque without end": deque([[1]]),
    "sets": [{1}, frozenset({"x"}), set(), frozenset()],
    "tuples": ((), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)),
    "numbers": [0, -1, 2**31, -(2**31) - 1, 2**100, 1.5, float("inf"), 1j, complex(-0.0, 2)],
    "texts": ["", "ä", "\U0001f600", "a\nb", "\ud800"],
    "bytes": [b"", b"ab\xff\x00", bytearray(b""), bytearray(b"x\xff"), bytes(range(256))],
    "nothing": None,
}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("name", VALUES)
def test_a_container_keeps_its_kind_its_order_and_its_values(name: str, protocol: int) -> None:
    found, expected = plain(tree(VALUES[name], protocol)), kinds(VALUES[name])
    assert found == expected
    assert repr(found) == repr(expected)


@pytest.mark.parametrize("protocol", [2, 5])
def test_slices_and_ranges_are_their_three_numbers(protocol: int) -> None:
    found = tree([slice(1, None, 2), range(3, 9, 2)], protocol)
    assert [(node.kind, node.items) for node in found.items] == [
        ("slice", (1, None, 2)),
        ("range", (3, 9, 2)),
    ]


@pytest.mark.parametrize("protocol", [2, 5])
def test_a_bytesio_is_its_bytes_unopened(protocol: int) -> None:
    inner = io.BytesIO()
    torch.save({"a": 1}, inner)
    inner.seek(3)
    found = tree({"module._extra_state": inner}, protocol).get("module._extra_state")
    assert type(found) is Buffer
    assert found.data == inner.getvalue()
    assert found.position == 3


def test_what_is_held_twice_is_one_object() -> None:
    shared = {"lr": 0.1}
    found = tree({"a": shared, "b": [shared], "c": {"lr": 0.1}})
    assert found.get("a") is found.get("b").items[0]
    assert found.get("a") is not found.get("c")


def test_the_metadata_of_a_state_dict_is_an_attribute() -> None:
    state = torch.nn.Linear(1, 1).state_dict()
    found = tree(state)
    assert plain(found.attributes) == (
        "dict",
        [("_metadata", ("OrderedDict", [("", ("dict", [("version", 1)]))]))],
    )
    assert [key for key, _ in found.pairs] == ["weight", "bias"]


def unknown_factory() -> int:
    """A factory that no allow-list has."""
    return 3


def test_a_factory_that_is_no_plain_type_is_outside() -> None:
    found = decoded(
        {
            "a": defaultdict(unknown_factory),
            "b": defaultdict(partial(int, 3)),
            "c": defaultdict(int),
        }
    )
    assert [type(value) is Opaque for _, value in found.tree.pairs] == [True, True, False]
    assert {(o.name, o.paths) for o in found.outside} >= {
        (f"{__name__}.unknown_factory", ("a",)),
        ("functools.partial", ("b",)),
    }


CONTRADICTORY = {
    "more than bytes": reduce("_codecs", "encode", "\u0100", "latin1"),
    "other than bytes": reduce("builtins", "bytearray", "a", "utf-8"),
    "longer than it may be": reduce("collections", "deque", (), 1),
    "not floats": reduce("builtins", "complex", 1, 2),
    "something that is not a dict": reduce("collections", "Counter", [1]),
}
CONTRADICTORY["longer than it may be"].items = [1, 2]


@pytest.mark.parametrize("words", CONTRADICTORY)
def test_impossible_arguments_are_contradictions(words: str) -> None:
    with pytest.raises(CheckpointError, match=f"M936.*{words}"):
        policy.decode(CONTRADICTORY[words], "x")


def with_state(call: Call, state: Any) -> Call:
    call.state = state
    return call


def with_pairs(call: Call, *pairs: tuple[Any, Any]) -> Call:
    call.pairs = list(pairs)
    return call


FOREIGN = [
    reduce("_codecs", "encode", "a", "rot13", "strict"),
    reduce("builtins", "set", 5),
    with_pairs(reduce("collections", "Counter", Dict()), (1, 2)),
    with_state(reduce("collections", "OrderedDict"), (None, Dict())),
    with_state(reduce("collections", "deque", (), 3), Dict()),
    with_state(Call("newobj", Global("_io", "BytesIO"), ()), (b"", 0)),
    Call("newobj", Global("_io", "BytesIO"), ()),
    reduce("builtins", "slice", [1], None, None),
    Call("newobj", Global("collections", "OrderedDict"), ()),
]


@pytest.mark.parametrize("number", range(len(FOREIGN)))
def test_an_unknown_use_of_a_known_name_is_opaque(number: int) -> None:
    found = policy.decode(FOREIGN[number], "x")
    assert type(found.tree) is Opaque
    assert [o.paths for o in found.outside] == [("the top",)]
    assert FOREIGN[number].state is ABSENT or found.tree.node.state is FOREIGN[number].state


def test_a_codec_other_than_latin1_is_never_applied() -> None:
    with pytest.raises(CheckpointError, match="where bytes belong"):
        policy.decode(reduce("_codecs", "encode", "a", "rot13"), "x")


def _encoded(text: str) -> Call:
    return reduce("_codecs", "encode", text, "latin1")


# keys that are one key to whoever builds them, spelled so that they differ in the stream
TWICE: dict[str, tuple[Any, Any]] = {
    "bytes made twice": (_encoded("a"), _encoded("a")),
    "bytes made and spelled": (_encoded("a"), b"a"),
    "a complex number that is one": (reduce("builtins", "complex", 1.0, 0.0), 1),
    "a size and a tuple": (reduce("torch", "Size", (2, 3)), (2, 3)),
    "tuples of bytes": ((1, _encoded("a")), (1, _encoded("a"))),
    "devices": (reduce("torch", "device", "cpu"), reduce("torch", "device", "cpu")),
}


def _holding(kind: str, keys: tuple[Any, Any]) -> Any:
    pairs = [(key, number) for number, key in enumerate(keys)]
    if kind == "dict":
        return Dict(pairs)
    if kind == "Counter":
        return reduce("collections", "Counter", Dict(pairs))
    if kind == "set":
        return Set(False, list(keys))
    if kind == "set of a list":
        return reduce("builtins", "frozenset", list(keys))
    call = reduce("collections", kind)
    call.pairs = pairs
    return call


@pytest.mark.parametrize(
    "kind", ["dict", "OrderedDict", "defaultdict", "Counter", "set", "set of a list"]
)
@pytest.mark.parametrize("what", TWICE)
def test_a_key_that_stands_twice_is_refused_however_it_is_spelled(what: str, kind: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        policy.decode(_holding(kind, TWICE[what]), "x.pt")
    (found,) = caught.value.diagnostics
    assert (found.code, "occurs twice" in found.message) == ("M936", True)


def test_keys_that_only_look_alike_are_several() -> None:
    keys = [
        _encoded("a"),
        "a",
        _encoded("b"),
        (1, _encoded("a")),
        (1, "a"),
        reduce("torch", "Size", (1,)),
        1,
        reduce("torch", "device", "cpu"),
    ]
    held = policy.decode(Dict([(key, None) for key in keys]), "x.pt").tree
    assert len(held.pairs) == len(keys)
    assert [key for key, _ in held.pairs if type(key) is bytes] == [b"a", b"b"]


def test_what_can_change_is_no_key() -> None:
    with pytest.raises(CheckpointError, match="a key that can change"):
        policy.decode(Dict([(reduce("builtins", "bytearray", b"a"), 1)]), "x.pt")
