"""The machine reads what the unpickler reads, does nothing of it, and refuses the rest with one
error.
"""

from __future__ import annotations

import collections
import contextlib
import enum
import pickle
import random
import struct
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from marks import thorough
from pickle_oracle import difference, oracle
from work import times

from migrate.core.errors import CheckpointError
from migrate.source.pickle.machine import read_pickle
from migrate.source.pickle.nodes import (
    ABSENT,
    ARCHIVE,
    EXTRA_STATE,
    METADATA,
    Call,
    Dict,
    Global,
    Limits,
    Persistent,
    Set,
)


@dataclass
class Point:
    x: Any
    y: Any


class Colour(enum.Enum):
    RED = 1


def stream(body: bytes, protocol: int = 4) -> bytes:
    return b"\x80" + bytes([protocol]) + body + b"."


def value(body: bytes, protocol: int = 4, **options: Any) -> Any:
    return read_pickle(stream(body, protocol), ARCHIVE, name="s", **options)


def refused(data: bytes, limits: Limits = ARCHIVE, **options: Any) -> tuple[str, str]:
    """Code and message of the refusal."""
    with pytest.raises(CheckpointError) as caught:
        read_pickle(data, limits, name="the stream", **options)
    (found,) = caught.value.diagnostics
    assert found.message.startswith("the stream")
    assert found.message.isprintable()
    return found.code, found.message


PLAIN = [
    (b"N", None), (b"\x88", True), (b"\x89", False), (b"K\xff", 255), (b"M\x00\x01", 256),
    (b"J\xff\xff\xff\xff", -1),
    (b"\x8a\x00", 0), (b"\x8a\x01\x80", -128), (b"\x8a\x11" + b"\xff" * 16 + b"\0", 2**128 - 1),
    (b"\x8b\x02\0\0\0\x00\x01", 256),
    (b"G" + struct.pack(">d", -0.5), -0.5), (b"X\x02\0\0\0\xc3\xa9", "é"), (b"\x8c\x01a", "a"),
    (b"\x8d\x01" + b"\0" * 7 + b"a", "a"),
    (b"X\x03\0\0\0\xed\xa0\x80", "\ud800"), (b"U\x02ab", "ab"), (b"T\x02\0\0\0ab", "ab"),
    (b"C\x02\x00\xff", b"\x00\xff"),
    (b"B\x01\0\0\0x", b"x"), (b"\x8e\x01" + b"\0" * 7 + b"x", b"x"),
    (b"\x96\x01" + b"\0" * 7 + b"x", bytearray(b"x")),
    (b")", ()), (b"(t", ()), (b"(K\x01K\x02K\x03K\x04t", (1, 2, 3, 4)), (b"K\x01\x85", (1,)),
    (b"K\x01K\x02\x86", (1, 2)),
    (b"K\x01K\x02K\x03\x87", (1, 2, 3)), (b"]", []), (b"]K\x01a", [1]), (b"](K\x01K\x02e", [1, 2]),
    (b"](e", []),
    (b"K\x07\x94h\x00\x86", (7, 7)), (b"K\x07q\x00h\x00\x86", (7, 7)),
    (b"K\x07r\0\0\0\0j\0\0\0\0\x86", (7, 7)),
    (b"K\x07q\x01K\x08q\x00h\x01\x87", (7, 8, 7)),
    (b"\x95\x02" + b"\0" * 7 + b"K\x01", 1), (b"\x95\x03" + b"\0" * 7 + b"K\x01.", 1),
    (b"\x95" + b"\0" * 8 + b"N", None),
]  # fmt: skip


@pytest.mark.parametrize(("body", "expected"), PLAIN)
def test_plain_values_stand_for_themselves(body: bytes, expected: Any) -> None:
    data = b"\x80\x04" + body if body.endswith(b"K\x01.") else stream(body)
    got = read_pickle(data, ARCHIVE, name="s")
    assert type(got) is type(expected)
    assert got == expected
    assert pickle.loads(data) == expected


def test_dicts_sets_and_calls_become_nodes() -> None:
    got = value(b"}(\x8c\x01aK\x01\x8c\x01bK\x02u")
    assert type(got) is Dict
    assert got.pairs == [("a", 1), ("b", 2)]
    assert (got.get("b"), got.get("c"), got.get("c", 5)) == (2, None, 5)
    assert value(b"}K\x01Ns").get(True, ABSENT) is ABSENT
    members = value(b"\x8f(K\x01K\x02\x90")
    assert type(members) is Set
    assert (members.items, members.frozen) == ([1, 2], False)
    frozen = value(b"(K\x01\x91")
    assert type(frozen) is Set
    assert (frozen.items, frozen.frozen) == ([1], True)
    for opcode, how in ((b"R", "reduce"), (b"\x81", "newobj"), (b"}\x92", "newobj")):
        call = value(b"cos\nsystem\n\x8c\x02ls\x85" + opcode + b"(K\x01K\x02e(\x8c\x01kK\x03u}b")
        assert type(call) is Call
        assert (call.how, str(call.function), call.arguments) == (how, "os.system", ("ls",))
        assert (call.items, call.pairs, type(call.state)) == ([1, 2], [("k", 3)], Dict)
    bare = value(b"cos\nsystem\n)R")
    assert (bare.items, bare.pairs, bare.state) == (None, None, ABSENT)
    one = value(b"cos\nsystem\n)RK\x01aK\x02aK\x03K\x04sK\x05K\x06s")
    assert (one.items, one.pairs) == ([1, 2], [(3, 4), (5, 6)])


def test_one_name_is_one_object_however_it_is_spelled() -> None:
    first, second = value(b"ca.b\nc\n\x8c\x03a.b\x8c\x01c\x93\x86")
    assert type(first) is Global
    assert first is second
    assert str(first) == "a.b.c"


def test_a_name_that_reaches_stack_global_through_the_memo_is_seen() -> None:
    assert (
        str(value(b"\x8c\x02os\x94\x85\x8c\x06system\x94\x85h\x00h\x01\x93\x87")[2]) == "os.system"
    )


def test_names_of_python_2_are_those_of_python_3_in_protocol_2_alone() -> None:
    body = b"c__builtin__\nset\nc__builtin__\nunicode\nccopy_reg\n_reconstructor\n\x87"
    assert [str(g) for g in value(body, 2)] == [
        "builtins.set",
        "builtins.str",
        "copyreg._reconstructor",
    ]
    assert [str(g) for g in value(body, 4)] == [
        "__builtin__.set",
        "__builtin__.unicode",
        "copy_reg._reconstructor",
    ]


def test_persistent_ids_are_read_where_the_caller_says_so() -> None:
    got = value(b"\x8c\x01kQ", persistent=True)
    assert type(got) is Persistent
    assert got.id == "k"
    assert refused(stream(b"\x8c\x01kQ"))[0] == "M931"


def test_a_stream_may_begin_anywhere_and_others_may_follow() -> None:
    data = b"head" + pickle.dumps([1], 4) + pickle.dumps("next", 2)
    first, end = read_pickle(data, ARCHIVE, name="s", start=4, whole=False)
    second, last = read_pickle(memoryview(data), ARCHIVE, name="s", start=end, whole=False)
    assert (first, second, last) == ([1], "next", len(data))
    assert read_pickle(memoryview(data), ARCHIVE, name="s", start=end) == "next"
    assert refused(data, start=4) == (
        "M930",
        f"the stream: byte {end}: {len(data) - end} bytes follow the end of the pickle stream",
    )


NAMED = {
    b"I1\n": "INT", b"L1L\n": "LONG", b"F1.0\n": "FLOAT", b"S'a'\n": "STRING", b"Va\n": "UNICODE",
    b"Ng0\n": "GET", b"Np0\n": "PUT",
    b"(d": "DICT", b"(l": "LIST", b"(ios\nsystem\n": "INST", b"(cos\nsystem\no": "OBJ",
    b"P1\n": "PERSID", b"NN0": "POP",
    b"N(N1": "POP_MARK", b"N2\x86": "DUP", b"\x82\x01": "EXT1", b"\x83\x01\x00": "EXT2",
    b"\x84\x01\0\0\0": "EXT4", b"\x97": "NEXT_BUFFER",
    b"N\x98": "READONLY_BUFFER",
}  # fmt: skip


@pytest.mark.parametrize(("body", "name"), NAMED.items())
def test_opcodes_that_no_supported_writer_uses_are_refused_by_name(body: bytes, name: str) -> None:
    code, message = refused(stream(body))
    assert code == "M931"
    assert f": {name} is not read: " in message


D = b"\x8c\x01d"
REFUSED = [
    # forms
    (b"\x8c\x02os\x8c\x0bpath.system\x93", "M931", "not a plain name"),
    (b"cos\npath.system\n", "M931", "not a plain name"),
    (b"cos.\nsystem\n", "M931", "not the name of a module"),
    (b"c\nsystem\n", "M931", "not the name of a module"),
    (b"cos\n\n", "M931", "not a plain name"),
    ("cos\nsystём\n".encode(), "M931", "not a plain name"),
    (b"cos\nsys tem\n", "M931", "not a plain name"),
    (b"cos\nf\n)}K\x01K\x02s\x92", "M931", "keyword arguments"),
    (b"cos\nf\n)RR", "M930", "takes more values"),
    (b"cos\nf\n)R)R", "M931", "calls a call of os.f"),
    (D + b")R", "M931", "calls a str"),
    (b"cos\nf\n]R", "M930", "instead of a tuple"),
    (b"cos\nf\n)]\x92", "M931", "keyword arguments"),
    (b"cos\nf\n)\x81}b}b", "M931", "second state"),
    (b"cos\nf\n)\x81NbNb", "M931", "second state"),
    (b"}}b", "M931", "BUILD gives a state to a dict"),
    (b"cos\nf\n}b", "M931", "BUILD gives a state to os.f"),
    (b"]K\x01K\x02s", "M931", "SETITEMS sets an item of a list"),
    (b")K\x01a", "M931", "APPENDS adds to a tuple"),
    (b"}(K\x01e", "M931", "APPENDS adds to a dict"),
    (b"\x96" + b"\0" * 8 + b"K\x01a", "M931", "APPENDS adds to a bytearray"),
    (b"](K\x01\x90", "M931", "ADDITEMS adds to a list"),
    (b"(K\x01\x91(K\x02\x90", "M931", "ADDITEMS adds to a set"),
    # values that contain themselves, or change after they were used
    (b"]\x94h\x00a", "M931", "changes after it was used"),
    (b"]\x94(h\x00e", "M931", "changes after it was used"),
    (b"]\x94h\x00\x85\x86", None, ""),
    (b"]\x94}" + D + b"h\x00sh\x00K\x01a\x86", "M931", "changes after it was used"),
    (b"}\x94" + D + b"h\x00s", "M931", "changes after it was used"),
    (b"}\x94(" + D + b"h\x00u", "M931", "changes after it was used"),
    (b"\x8f\x94(h\x00\x85\x90", "M931", "changes after it was used"),
    (b"cos\nf\n)\x81\x94h\x00b", "M931", "changes after it was used"),
    (b"cos\nf\n)\x81\x94h\x00a", "M931", "changes after it was used"),
    # keys
    (b"}(" + D + b"N" + D + b"Nu", "M931", "the key d occurs twice"),
    (b"}" + D + b"Ns" + D + b"Ns", "M931", "the key d occurs twice"),
    (b"}(\x8c\x01aN\x8c\x01bNu(\x8c\x01cN\x8c\x01bNu", "M931", "the key b occurs twice"),
    (b"cos\nf\n)R(" + D + b"N" + D + b"Nu", "M931", "the key d occurs twice"),
    (b"\x8f(K\x01K\x01\x90", "M931", "occurs twice"),
    (b"\x8f(K\x01\x90(K\x01\x90", "M931", "occurs twice"),
    (b"(K\x01\x88\x91", "M931", "occurs twice"),
    (b"}(K\x01N\x88Nu", "M931", "occurs twice"),
    (b"}(K\x00NG" + b"\x80" + b"\0" * 7 + b"Nu", "M931", "occurs twice"),
    (b"}(K\x01\x85N\x88\x85Nu", "M931", "occurs twice"),
    (b"}(K\x01\x85NG\x3f\xf0" + b"\0" * 6 + b"\x85Nu", "M931", "occurs twice"),
    (b"}(C\x01aNC\x01aNu", "M931", "occurs twice"),
    (b"}(C\x01aNC\x01a\x85N\x8c\x01aN\x8c\x01a\x85Nu", None, ""),
    (b"}]Ns", "M931", "a list as a key"),
    (b"}}Ns", "M931", "a dict as a key"),
    (b"}]\x85Ns", "M931", "a list in a tuple as a key"),
    (b"}(\x91Ns", "M931", "a set as a key"),
    # damage
    (b"}(K\x01u", "M930", "no value"),
    (b"\x80\x04N", "M930", "a second PROTO"),
    (b"\xff", "M930", "no opcode begins with the byte 0xff"),
    (b"", "M930", "STOP with 0 values"),
    (b"NN", "M930", "STOP with 2 values"),
    (b"N(", "M930", "mark open"),
    (b"a", "M930", "takes more values"),
    (b"N(\x85", "M930", "takes more values"),
    (b"](a", "M930", "takes more values"),
    (b"t", "M930", "takes more values"),
    (b"\x94", "M930", "takes more values"),
    (b"h\x00", "M930", "not written"),
    (b"j\0\0\0\0", "M930", "not written"),
    (b"Nq\x02h\x01\x86", "M930", "not written"),
    (b"Nq\x00Nq\x00\x86", "M930", "written twice"),
    (b"Nq\x02Nq\x01Nq\x01\x87", "M930", "written twice"),
    (b"Nq\x01N\x94\x86", "M931", "numbered with gaps"),
    (b"K\x01K\x02\x93", "M930", "STACK_GLOBAL takes"),
    (b"\x8b\xff\xff\xff\xff", "M930", "of -1 bytes"),
    (b"T\xff\xff\xff\xff", "M930", "of -1 bytes"),
    (b"U\x01\xff", "M930", "not ASCII"),
    (b"X\x01\0\0\0\xff", "M930", "not UTF-8"),
    (b"cos", "M930", "two lines"),
    (b"cos\nsystem", "M930", "two lines"),
    # frames
    (b"\x95\xff" + b"\0" * 7 + b"N", "M930", "a frame of 255 bytes"),
    (b"\x95" + b"\xff" * 8 + b"N", "M930", "a frame of"),
    (b"\x95\x0b" + b"\0" * 7 + b"\x95\x01" + b"\0" * 7 + b"N", "M930", "FRAME inside a frame"),
    (b"\x95\x01" + b"\0" * 7 + b"K\x01", "M930", "out of its frame"),
    (b"\x95\x03" + b"\0" * 7 + b"\x8c\x04abcd", "M930", "out of its frame"),
    (b"\x95\x02" + b"\0" * 7 + b"J\1\0\0\0", "M930", "out of its frame"),
]


@pytest.mark.parametrize(("body", "code", "said"), REFUSED)
def test_forms_that_readers_could_differ_on_are_refused(
    body: bytes, code: str | None, said: str
) -> None:
    if code is None:
        assert difference(value(body), oracle(stream(body))) is None
    else:
        found, message = refused(stream(body))
        assert (found, said in message) == (code, True), message


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80",
        b"\x80\x01N.",
        b"\x80\x06N.",
        b"N.",
        b"(dp0\n.",
        b"PK\x03\x04",
        b"\x95\0\0\0\0\0\0\0\0\x80\x04N.",
    ],
)
def test_a_stream_begins_with_its_protocol(data: bytes) -> None:
    assert refused(data)[0] == "M930"


def test_stop_stands_at_the_end_of_its_frame() -> None:
    assert "before the end of its frame" in refused(b"\x80\x04\x95\x03" + b"\0" * 7 + b"N.N")[1]


def test_messages_name_the_byte_of_the_opcode() -> None:
    assert refused(b"xx" + stream(b"N\x95\x03" + b"\0" * 7 + b"N\x82\x01"), start=2)[1].startswith(
        "the stream: byte 15: EXT1"
    )


SMALL = replace(
    ARCHIVE,
    opcodes=10_000,
    stack=5_000,
    marks=3,
    memo=6_000,
    nodes=5_000,
    depth=4,
    text=300,
    blob=300,
    size=100_000,
)
LIMITED = [
    (b"]" + b"Na" * 20_000, "more than 10,000 opcodes"),
    (b"(" + b"N" * 12_000 + b"t", "more than 5,000 values on the stack"),
    (b"((((tttt", "more than 3 marks"),
    (b"N" + b"\x94" * 9_000, "more than 6,000 memo entries"),
    (b"Nr\xff\xff\xff\x7f", "memo entry 2,147,483,647; at most"),
    (b"]" + b"}a" * 6_000, "more than 5,000 containers and calls"),
    (b")\x85\x85\x85\x85", "nested more than 4 deep"),
    (b"]]]]]aaaa", "nested more than 4 deep"),
    (b"\x8d\x2d\x01" + b"\0" * 6 + b"a" * 301, "text of 301 bytes; at most 300"),
    (b"X\x2d\x01\0\0" + b"a" * 301, "text of 301 bytes; at most 300"),
    (b"T\x2d\x01\0\0" + b"a" * 301, "a string of Python 2 of 301 bytes; at most 300"),
    (b"B\x2d\x01\0\0" + b"a" * 301, "bytes of 301 bytes; at most 300"),
    (b"\x8e" + b"\xff" * 8, "bytes of 18,446,744,073,709,551,615 bytes; at most 300"),
    (b"\x96" + b"\xff" * 7 + b"\x7f", "a bytearray of"),
    (b"\x8d" + b"\xff" * 8, "text of"),
    (b"\x8a\x12" + b"\1" * 18, "an integer of 18 bytes; at most 17"),
    (b"\x8b\xff\xff\xff\x7f", "an integer of 2,147,483,647 bytes"),
    (b"}\x8a\x09" + b"\1" * 9 + b"Ns", "more than 64 bits as a key"),
    (b"}\x8a\x09" + b"\1" * 9 + b"\x85Ns", "more than 64 bits as a key"),
    (b"})\x85\x85\x85Ns", "more than 3 deep"),
    (b"}(" + b"N" * 65 + b"tNs", "more than 64 parts"),
    (b"}(" + b"K\x01\x85" * 40 + b"tNs", "more than 64 parts"),
    (b"c" + b"a" * 201 + b"\nb\n", "more than 200 characters"),
    (b"\x8c\x01a\x8c\xc9" + b"b" * 201 + b"\x93", "more than 200 characters"),
    (b"B\x96\0\0\0" + b"\0" * 150 + b"N" * 100_000, "a pickle stream of 100,15"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "said"), LIMITED)
def test_every_limit_says_which_it_is(body: bytes, said: str) -> None:
    code, message = refused(stream(body), SMALL)
    assert (code, said in message) == ("M932", True), message


def test_bytes_as_keys_are_short() -> None:
    assert refused(stream(b"}B\x01\x04\0\0" + b"a" * 1025 + b"Ns"))[0] == "M932"


def test_what_lies_just_within_the_limits_is_read() -> None:
    for body in (
        b"(((ttt",
        b")\x85\x85\x85",
        b"]]]]aaa",
        b"X\x2c\x01\0\0" + b"a" * 300,
        b"]" + b"}a" * 4_000,
        b"(" + b"N" * 4_000 + b"t",
    ):
        read_pickle(stream(body), SMALL, name="s")


def test_a_stream_of_several_that_does_not_end_within_the_limit_says_so() -> None:
    data = stream(b"](" + b"N" * 120_000 + b"e")
    assert refused(data, replace(SMALL, opcodes=10**6, stack=10**6), whole=False) == (
        "M932",
        "the stream: byte 100,000: a pickle stream of more than 100,000 bytes",
    )


def test_large_gaps_in_the_memo_cost_no_more_than_the_stream() -> None:
    code, message = refused(stream(b"Nr\x00\x00\x10\x00"))
    assert (code, "at most 1,009 in this stream" in message) == ("M932", True), message


def bomb(levels: int) -> bytes:
    """Lists of one list twice, whose paths are 2^levels."""
    body = b"]\x94"
    for i in range(levels):
        body += b"](h" + bytes([i]) + b"h" + bytes([i]) + b"e\x94"
    return stream(b"(" + body + b"t")


HOSTILE = {
    "a tuple a million deep": stream(b")" + b"\x85" * 1_000_000),
    "a tuple a million deep as key": stream(b"})" + b"\x85" * 1_000_000 + b"Ns"),
    "lists a million deep": stream(b"]" * 50_000 + b"a" * 49_999),
    "a million marks": stream(b"(" * 1_000_000),
    "a million dicts": stream(b"]" + b"}a" * 1_000_000),
    "a million sets": stream(b"]" + b"\x8fa" * 1_000_000),
    "a long line": stream(b"c" + b"a" * 5_000_000),
    "a shared list at every depth": stream(
        b"](" + b"N" * 90_000 + b"e(" + b"N" * 90_000 + b"e\x94" + b"\x85h\x00\x86" * 60
    ),
    "keys that share large parts": stream(
        b"(" + b"K\x01" * 50 + b"t\x94}(" + b"".join(b"h\x00M" + struct.pack("<H",
        i) + b"\x86N" for i in range(60_000)) + b"u\x86"
    ),
    "frames of nothing": stream((b"\x95" + b"\0" * 8) * 100_000 + b"N"),
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_streams_end_soon_with_the_one_error(what: str) -> None:

    def go() -> None:
        with contextlib.suppress(CheckpointError):
            read_pickle(HOSTILE[what], ARCHIVE, name="s")

    # most take 10 yardsticks of some milliseconds, the largest 130
    assert times(go, best_of=1) < 1500


def test_what_is_shared_at_many_depths_is_refused_by_the_size_of_the_stream() -> None:
    row = b"]" + (b"(" + b"N" * 90_000 + b"e") * 3 + b"\x94"
    code, message = refused(stream(row + b"\x85h\x00\x86" * 60), METADATA)
    assert (code, "counted at each depth" in message) == ("M932", True)
    assert len(read_pickle(stream(row + b"\x85h\x00\x86"), METADATA, name="s")) == 2


def test_a_frame_is_not_copied_past_what_a_writer_makes_of_it() -> None:
    data = b"\x80\x04\x95" + struct.pack("<Q", (65 << 20) + 1) + bytes((65 << 20) + 1)
    assert refused(data) == (
        "M932",
        "the stream: byte 2: a frame of 68,157,441 bytes; at most 68,157,440 are read",
    )


def test_sharing_is_not_multiplied() -> None:
    got = read_pickle(bomb(50), ARCHIVE, name="s")
    assert got[-1][0] is got[-1][1]


# plain data, and objects of every kind that pickles differently
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=20),
    st.binary(max_size=20),
    st.sampled_from(
        [
            2**31,
            -(2**31),
            255,
            256,
            65535,
            65536,
            -1,
            2**63,
            "\ud800",
            Colour.RED,
            Point,
            len,
            collections.OrderedDict,
        ]
    ),
)
KEYS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63),
    st.floats(allow_nan=False),
    st.text(max_size=8),
    st.binary(max_size=8),
    st.tuples(st.integers(-3, 3), st.text(max_size=3)),
    st.tuples(st.tuples(st.none(), st.floats(allow_nan=False))),
)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists = st.lists(inner, max_size=5)
    pairs = st.dictionaries(KEYS, inner, max_size=5)
    twice = inner.map(lambda x: [x, x, {"again": x}])
    return st.one_of(
        lists,
        lists.map(tuple),
        pairs,
        st.sets(KEYS, max_size=4),
        st.frozensets(KEYS, max_size=4),
        twice,
        pairs.map(collections.OrderedDict),
        lists.map(collections.deque),
        st.tuples(inner, inner).map(lambda p: Point(*p)),
        st.binary(max_size=30).map(bytearray),
        st.complex_numbers(),
        pairs.map(lambda d: collections.defaultdict(list, d)),
    )


VALUES = st.recursive(SCALARS, containers, max_leaves=15)


@given(VALUES, st.integers(2, 5))
def test_any_value_is_read_as_the_unpickler_reads_it(thing: Any, protocol: int) -> None:
    data = pickle.dumps(thing, protocol)
    assert difference(read_pickle(data, ARCHIVE, name="s"), oracle(data)) is None


@pytest.mark.parametrize("protocol", range(2, 6))
def test_large_values_in_batches_and_frames_are_read_as_the_unpickler_reads_them(
    protocol: int,
) -> None:
    thing = [
        {f"key {i}": (i, [i]) for i in range(5000)},
        list(range(3001)),
        b"x" * 100_000,
        "y" * 100_000,
        set(range(2500)),
    ]
    data = pickle.dumps(thing, protocol)
    assert difference(read_pickle(data, ARCHIVE, name="s"), oracle(data)) is None


def genuine() -> list[bytes]:
    shared = [1, 2.5, "text"]
    thing = {
        "a": shared, "b": (shared, b"bytes", None, True),
        "c": collections.OrderedDict(x=Point(1, [shared])), "d": {3, 4}, 5: 2**80,
        "e": [Point(i, f"v{i}") for i in range(4)], "f": bytearray(b"qq"), (1, "k"): frozenset([7]),
        "g": collections.deque([1, 2]),
    }  # fmt: skip
    return [pickle.dumps(thing, protocol) for protocol in range(2, 6)]


def test_a_stream_that_is_cut_anywhere_is_refused() -> None:
    for data in genuine():
        for end in range(len(data)):
            with pytest.raises(CheckpointError):
                read_pickle(data[:end], ARCHIVE, name="s")


@pytest.mark.parametrize("count", thorough([250, 2_500]))
def test_what_is_left_of_a_damaged_stream_is_read_as_the_unpickler_reads_it_or_refused(
    count: int,
) -> None:
    made = random.Random(4)
    accepted = 0
    for data in genuine():
        for _ in range(count):
            damaged = bytearray(data)
            for _ in range(made.choice((1, 1, 2, 4))):
                if made.random() < 0.7:
                    damaged[made.randrange(2, len(damaged))] = made.randrange(256)
                else:
                    at, size = made.randrange(2, len(damaged)), made.randrange(1, 6)
                    damaged[at : at + size] = made.choice(
                        (b"", data[at : at + 2 * size], bytes([damaged[at]]) * size)
                    )
            try:
                got = read_pickle(bytes(damaged), ARCHIVE, name="s", persistent=True)
            except CheckpointError:
                continue
            accepted += 1
            assert difference(got, oracle(bytes(damaged))) is None, bytes(damaged)
    assert accepted > count // 5


@given(st.binary(max_size=60), st.integers(2, 5))
def test_noise_is_refused_or_read_as_the_unpickler_reads_it(noise: bytes, protocol: int) -> None:
    data = stream(noise, protocol)
    try:
        got = read_pickle(data, EXTRA_STATE, name="s", persistent=True)
    except CheckpointError:
        return
    assert difference(got, oracle(data)) is None


def test_the_limits_of_metadata_allow_no_blobs() -> None:
    assert refused(pickle.dumps(b"x", 4), METADATA)[0] == "M932"


def test_reading_leaves_the_collector_as_it_was() -> None:
    import gc

    assert gc.isenabled()
    refused(b"\x80\x04")
    assert gc.isenabled()
