"""Streams that are alike: what comes out is what each of them says when it is read by itself."""

from __future__ import annotations

import argparse
import io
import random
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

from migrate.core.errors import CheckpointError
from migrate.source.pickle.alike import StreamsAlike
from migrate.source.pickle.jsonform import to_json
from migrate.source.pickle.machine import read_pickle
from migrate.source.pickle.nodes import ARCHIVE
from migrate.source.pickle.policy import decode
from migrate.source.pickle.tree import TensorRecord, to_nodes
from migrate.source.tree import tensor_records

Stream = tuple[bytes, dict[str, int]]


def saved(value: Any) -> Stream:
    """What torch.save writes of a value: the stream, and the bytes of each storage."""
    out = io.BytesIO()
    torch.save(value, out)
    with zipfile.ZipFile(out) as archive:
        names = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        sizes = {n[5:]: info.file_size for n, info in names.items() if n.startswith("data/")}
        return archive.read(names["data.pkl"]), sizes


def part(rank: int) -> dict[str, Any]:
    """The root of a part as a training script leaves it."""
    dice = random.Random(rank)
    tensors = OrderedDict((f"layers.{n}.weight", torch.zeros(2, 3)) for n in range(3))
    tensors["tied"] = tensors["layers.0.weight"]
    args = argparse.Namespace(hidden=8, path="data", rank=rank, name=f"rank{rank}", seen=None)
    args.rate, args.flag, args.list, args.dtype = rank / 7, bool(rank % 2), [1, rank], torch.float
    return {
        "args": args,
        "iteration": 10,
        "model": OrderedDict(tensors, extra=None),
        "rng": [
            {
                "random": dice.getstate(),
                "numpy": numpy.random.RandomState(rank).get_state(),
                "torch": torch.zeros(16, dtype=torch.uint8),
            }
        ],
    }


def shown(tree: Any) -> Any:
    """A tree as a value that is equal for trees that say the same and share the same."""
    numbers: dict[int, int] = {}

    def tensor(record: Any) -> Any:
        number = numbers.setdefault(id(record), len(numbers))
        fields = record._replace(node=None) if type(record) is TensorRecord else record
        return (number, repr(fields))

    try:
        return to_json(to_nodes(tree, tensor))
    except ValueError:
        # a storage in what is not read has no spelling
        return None


def outcome(read: Callable[[], Any]) -> Any:
    try:
        found = read()
    except CheckpointError as error:
        return [(d.code, d.message) for d in error.diagnostics]
    return shown(found.tree), found.outside, found.hidden, sorted(found.storages)


def alone(stream: bytes, sizes: dict[str, int]) -> Any:
    nodes = read_pickle(stream, ARCHIVE, name="it: data.pkl", persistent=True)
    return decode(nodes, "it", sizes)


def agree(streams: list[Stream]) -> StreamsAlike:
    """Reads them in a row, and each by itself; both say the same."""
    alike = StreamsAlike()
    for stream, sizes in streams:
        assert outcome(lambda: alike.decode(stream, sizes, "it")) == outcome(
            lambda: alone(stream, sizes)
        )
    return alike


def test_parts_are_read_once_but_for_what_they_say_otherwise() -> None:
    few, many = (agree([saved(part(rank)) for rank in range(1, ranks)]) for ranks in (5, 60))
    # once as it is, and again for each value that was found to differ; then no more
    assert few.runs <= many.runs <= few.runs + 2 <= 6


def test_equal_streams_have_tensors_of_their_own() -> None:
    alike, stream = StreamsAlike(), saved(part(0))
    first, second, third = (alike.decode(*stream, "it").tree for _ in range(3))
    records = [{id(one) for one in tensor_records([tree])} for tree in (first, second, third)]
    assert len(records[0]) == 4
    assert records[0].isdisjoint(records[1])
    assert records[1].isdisjoint(records[2])
    assert shown(first) == shown(second) == shown(third)


def view(offset: int, size: int) -> dict[str, Any]:
    return {"whole": (whole := torch.zeros(8)), "view": whole[offset : offset + size]}


LIKE: dict[str, tuple[Any, Any]] = {
    "a key": ({"a": 1, "b": 2}, {"a": 1, "c": 2}),
    "two keys that become one": ({"a": 1, "b": 2}, {"a": 1, "bb": 2}),
    "a number as a key": ({1: 0, 2: 0}, {1: 0, 3: 0}),
    "a tuple as a key": ({(1, 2): 0}, {(1, 3): 0}),
    "a member of a set": ({"of": {1, 2}}, {"of": {1, 3}}),
    "a tensor's place": (view(0, 4), view(2, 4)),
    "a tensor's shape": (view(0, 4), view(0, 3)),
    "a text that stands twice": (["text" * 2] * 2, ["word" * 2] * 2),
    "a value of another type": ({"a": 1}, {"a": None}),
    "a large number": ({"a": 1}, {"a": 1 << 120}),
    "a dtype": ({"a": torch.float32}, {"a": torch.float16}),
    "an array": ({"a": numpy.arange(3)}, {"a": numpy.arange(3) + 1}),
    "one value more": ({"a": [1, 2]}, {"a": [1, 2, 3]}),
    "a device": ({"a": torch.device("cuda", 0)}, {"a": torch.device("cuda", 1)}),
    "what is not read": ({"a": [complex, 1]}, {"a": [complex, 2]}),
    "attributes of a dict": (OrderedDict(a=1), OrderedDict(a=2)),
    "a field": (argparse.Namespace(a=1, b="x"), argparse.Namespace(a=2, b="x")),
    "a field of an object in one": (
        argparse.Namespace(a=argparse.Namespace(b=1), c=[1, (2, 3)]),
        argparse.Namespace(a=argparse.Namespace(b=2), c=[1, (2, 4)]),
    ),
    "values beside a tensor": ([{"w": torch.ones(2)}, (1, 2)], [{"w": torch.ones(2)}, (1, 3)]),
}


@pytest.mark.parametrize("case", LIKE)
def test_two_that_differ_in(case: str) -> None:
    one, other = (saved({"w": torch.zeros(2), "held": value}) for value in LIKE[case])
    agree([one, other, other, one])


def test_whatever_byte_is_another_one() -> None:
    stream, sizes = saved({"w": torch.zeros(2), "n": [1, None, "text"], "t": (1.5, 300, -1)})
    dice = random.Random(0)
    alike = StreamsAlike()
    # a form that is open at what such streams have otherwise
    alike.decode(stream, sizes, "it")
    alike.decode(*saved({"w": torch.zeros(2), "n": [2, 0, "word"], "t": (0, 1, 2)}), "it")
    for at in range(len(stream)):
        for byte in (stream[at] ^ 1, 0x4B, 0x4E, 0x88, dice.randrange(256)):
            broken = stream[:at] + bytes([byte]) + stream[at + 1 :]
            assert outcome(lambda s=broken: alike.decode(s, sizes, "it")) == outcome(
                lambda s=broken: alone(s, sizes)
            ), (at, byte)
    for size in range(len(stream)):
        cut = stream[:size]
        assert outcome(lambda s=cut: alike.decode(s, sizes, "it")) == outcome(
            lambda s=cut: alone(s, sizes)
        )


def test_storages_of_another_size_are_refused_as_ever() -> None:
    stream, sizes = saved(part(0))
    agree([(stream, sizes), (stream, sizes), (stream, {**sizes, "0": 1}), (stream, {})])


def test_a_stream_with_the_name_of_an_open_place() -> None:
    stream, sizes = saved({"w": torch.zeros(2), "n": 1})
    at = stream.index(b"K\x01s") if b"K\x01s" in stream else stream.index(b"K\x01u")
    hostile = stream[:at] + b"cmigrate.open\nn0\n" + stream[at + 2 :]
    agree([(hostile, sizes)] * 3)
