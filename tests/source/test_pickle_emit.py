"""What is emitted is read again as the same graph, is what the pickler writes, and is what torch's
weights-only reader takes.
"""

from __future__ import annotations

import collections
import io
import pickle
import pickletools
import struct
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pickle_oracle import difference, oracle

from migrate.core.errors import CheckpointError
from migrate.source.pickle.emit import emit
from migrate.source.pickle.machine import read_pickle
from migrate.source.pickle.nodes import ARCHIVE, Call, Dict, Global, Persistent, Set

# what torch/_weights_only_unpickler.py knows
ACCEPTED = {
    "PROTO", "STOP", "GLOBAL", "NEWOBJ", "REDUCE", "BUILD", "APPEND", "APPENDS", "SETITEM",
    "SETITEMS", "MARK", "TUPLE", "TUPLE1", "TUPLE2",
    "TUPLE3", "NONE", "NEWFALSE", "NEWTRUE", "EMPTY_TUPLE", "EMPTY_LIST", "EMPTY_DICT", "BININT",
    "BININT1", "BININT2", "BINFLOAT",
    "BINUNICODE", "BINPERSID", "BINGET", "LONG_BINGET", "BINPUT", "LONG_BINPUT", "LONG1",
}  # fmt: skip


def nodes(thing: Any, done: dict[int, Any] | None = None) -> Any:
    """Python values as nodes, shared as they are, equal texts as one: Python itself makes one of
    short ones, now and then.
    """
    done = {} if done is None else done
    if type(thing) is str:
        return sys.intern(thing)
    if type(thing) not in (dict, list, tuple, set, frozenset):
        return thing
    if id(thing) not in done:
        made: Any
        if type(thing) is dict:
            made = Dict([(nodes(k, done), nodes(v, done)) for k, v in thing.items()])
        elif type(thing) in (set, frozenset):
            made = Set(type(thing) is frozenset, [nodes(x, done) for x in thing])
        else:
            made = type(thing)(nodes(x, done) for x in thing)
        done[id(thing)] = made
    return done[id(thing)]


def graph(value: Any) -> list[Any]:
    """A value as a flat list that two values share only if they are the same graph: who refers to
    whom, by number.
    """
    numbers: dict[int, int] = {}
    out: list[Any] = []
    todo = [value]
    while todo:
        node = todo.pop()
        kind = type(node)
        if kind is Global:
            out.append(str(node))
            continue
        if kind not in (list, tuple, Dict, Call, Persistent):
            out.append((kind.__name__, struct.pack(">d", node) if kind is float else node))
            continue
        if id(node) in numbers and node != ():
            out.append(("again", numbers[id(node)]))
            continue
        numbers[id(node)] = len(numbers)
        parts: list[Any]
        if kind is Call:
            parts = [
                node.function,
                node.arguments,
                node.items or [],
                [x for p in node.pairs or [] for x in p],
                node.state,
            ]
            out.append(("call", node.how))
            todo += [part for part in parts if type(part) is not list]
            todo += [x for part in parts if type(part) is list for x in part]
        else:
            parts = (
                [x for p in node.pairs for x in p]
                if kind is Dict
                else [node.id]
                if kind is Persistent
                else list(node)
            )
            out.append((kind.__name__, len(parts)))
            todo += parts
    return out


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**100), 2**100),
    st.floats(),
    st.text(max_size=300),
    st.sampled_from(["\ud800", ""]),
)
KEYS = st.one_of(
    st.text(max_size=5),
    st.integers(-(2**63), 2**63),
    st.tuples(st.integers(0, 3), st.text(max_size=2)),
)


def plain(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    twice = inner.map(lambda x: [x, [x], {"x": x}])
    return st.one_of(
        st.lists(inner, max_size=5),
        st.lists(inner, max_size=5).map(tuple),
        st.dictionaries(KEYS, inner, max_size=5),
        twice,
    )


PLAIN = st.recursive(SCALARS, plain, max_leaves=20)
EXTRA = st.one_of(
    SCALARS,
    st.binary(max_size=20),
    st.binary(max_size=20).map(bytearray),
    st.complex_numbers(),
    st.sets(KEYS, max_size=4),
)
WHOLE = st.recursive(
    EXTRA, lambda inner: st.one_of(plain(inner), st.frozensets(KEYS, max_size=4)), max_leaves=20
)


@given(PLAIN)
def test_plain_data_is_written_as_the_pickler_writes_it_and_read_again_as_it_was(
    thing: Any,
) -> None:
    made = nodes(thing)
    written = emit(made, name="s")
    assert graph(read_pickle(written, ARCHIVE, name="s")) == graph(made)
    assert pickletools.optimize(written) == pickletools.optimize(
        pickle.dumps(pickle.loads(written), 2)
    )
    assert difference(made, oracle(written)) is None


@given(WHOLE)
def test_what_protocol_2_has_no_opcodes_for_is_loaded_as_it_was(thing: Any) -> None:
    written = emit(nodes(thing), name="s")
    assert repr(pickle.loads(written)) == repr(pickle.loads(pickle.dumps(thing)))
    assert {opcode.name for opcode, _, _ in pickletools.genops(written)} <= ACCEPTED
    # what is read is plain calls, which are written as they are; the one text of no length may be
    # shared
    again = emit(read_pickle(written, ARCHIVE, name="s"), name="s")
    assert emit(read_pickle(again, ARCHIVE, name="s"), name="s") == again
    assert repr(pickle.loads(again)) == repr(pickle.loads(written))


def test_the_stream_of_plain_data_is_the_pickler_s_byte_for_byte() -> None:
    shared = ["s"]
    thing = {
        "ints": [0, 1, 255, 256, 65535, 65536, -1, -128, -129, 2**31 - 1, 2**31, -(2**31),
        -(2**31) - 1, 2**63, -(2**63), -(2**39), 2**100],
        "many": list(range(2500)), "one": [1],
        "pairs": {str(i): float(i) for i in range(2002)},
        "tuples": [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)],

        "shared": [shared, shared, {"s": shared}], "bytes": [b"\x00\xff", b"abc"],
        "array": bytearray(b"xyz"), "none": None, "true": True,
        "complex": 1 - 2j, 3: -0.0, (1, "k"): "é\ud800", "empty": [[], {}, bytearray()],
    }  # fmt: skip
    assert emit(nodes(thing), name="s") == pickle.dumps(thing, 2)
    # a rest of one, which Python before 3.15 puts below a mark as well
    rest = {str(i): float(i) for i in range(2001)}
    if sys.version_info < (3, 15):
        assert emit(nodes(rest), name="s") == pickle.dumps(rest, 2)
    assert pickle.loads(emit(nodes(rest), name="s")) == rest
    assert emit(nodes({}), name="s") == b"\x80\x02}q\x00."


def test_calls_names_and_persistent_ids_come_back_with_what_was_done_to_them() -> None:
    storage = Persistent(("storage", Global("torch", "FloatStorage"), "0", "cpu", 4))
    call = Call("reduce", Global("collections", "OrderedDict"), ())
    call.pairs = [(f"k{i}", (storage, i)) for i in range(1200)]
    call.items = [Global("torch", "FloatStorage"), storage]
    call.state = Dict([("_metadata", (call.pairs[0][1], Call("newobj", Global("a.b", "C"), (1,))))])
    one = Call("newobj", Global("builtins", "set"), ([1],))
    one.items, one.pairs, one.state = [1], [(2, 3)], None
    value = [call, one, call, storage]
    again = read_pickle(emit(value, name="s"), ARCHIVE, name="s", persistent=True)
    assert graph(again) == graph(value)
    assert again[0] is again[2]
    assert again[0].pairs[0][1][0] is again[3]


def test_equal_names_are_written_once() -> None:
    written = emit([Global("torch", "float32") for _ in range(3)], name="s")
    assert written.count(b"float32") == 1


def test_what_torch_pickles_for_tensors_goes_through_torch_s_restricted_reader() -> None:
    torch = pytest.importorskip("torch")
    from torch._weights_only_unpickler import load

    value = nodes(
        {
            "b": b"\x00\xffabc",
            "e": b"",
            "s": {1, 2},
            "a": bytearray(b"q"),
            "c": 1j,
            "big": 2**63,
            "l": [1.5, None, True],
            5: (1, 2, 3, 4),
        }
    )
    order = Call("reduce", Global("collections", "OrderedDict"), ())
    order.pairs = [("x", Global("torch", "float32"))]
    order.state = Dict([("_metadata", 1)])
    value.pairs += [("o", order), ("size", Call("reduce", Global("torch", "Size"), ([2, 3],)))]
    got = load(io.BytesIO(emit(value, name="s")))
    assert got.pop("o") == collections.OrderedDict(x=torch.float32)
    assert got.pop("size") == torch.Size([2, 3])
    assert got == {
        "b": b"\x00\xffabc",
        "e": b"",
        "s": {1, 2},
        "a": bytearray(b"q"),
        "c": 1j,
        "big": 2**63,
        "l": [1.5, None, True],
        5: (1, 2, 3, 4),
    }


def deep(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


def knot() -> list[Any]:
    value: list[Any] = []
    value.append((value,))
    return value


class Text(str):
    pass


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (deep(64), "nested more than 64 deep"),
        (deep(100_000), "nested more than 64 deep"),
        (knot(), "nested more than 64 deep"),
        (2**135, "an integer of 18 bytes"),
        (-(2**135) - 1, "an integer of 18 bytes"),
        ([1 << 10**7], "an integer of 1,250,001 bytes"),
        (object(), "a object cannot stand"),
        ([Text("x")], "a text cannot stand"),
        ({"a": 1}, "a dict cannot stand"),
        (Global("os", "path.join"), "is not the name of anything"),
        (Global("a\nb", "c"), "is not the name of anything"),
        (Global("a", "b" * 201), "is not the name of anything"),
        (Call("reduce", Global("a", "b"), [1]), "a call of a.b with a list"),  # type: ignore[arg-type]
        (Call("reduce", Call("reduce", Global("a", "b"), ()), ()), "a call of a call"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_read_again_is_not_written(value: Any, said: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        emit(value, name="the stream")
    (found,) = caught.value.diagnostics
    assert found.code == "M933"
    assert found.message.startswith("the stream: ")
    assert said in found.message


def test_the_deepest_value_that_can_be_read_is_written() -> None:
    assert graph(read_pickle(emit(deep(63), name="s"), ARCHIVE, name="s")) == graph(deep(63))
    assert read_pickle(emit(2**135 - 1, name="s"), ARCHIVE, name="s") == 2**135 - 1
    assert read_pickle(emit(-(2**135), name="s"), ARCHIVE, name="s") == -(2**135)
