"""Files of torch.save before 1.6: where each storage lies, and nothing read that contradicts
itself.
"""

from __future__ import annotations

import io
import pickle
import random
import struct
from typing import Any

import pytest
import torch

from migrate.core.errors import CheckpointError
from migrate.formats._legacy import Legacy, is_legacy, read_legacy
from migrate.source.blobs import BytesBlob
from migrate.source.pickle.decoding import MAGIC
from migrate.source.pickle.nodes import Dict


def saved(value: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, _use_new_zipfile_serialization=False, **options)
    return file.getvalue()


class Float:
    """Stands for torch.FloatStorage in streams made by hand."""


def stream(
    object_: Any = None,
    *,
    magic: Any = MAGIC,
    protocol: Any = 1001,
    system: Any = None,
    keys: Any = ("1",),
    tail: bytes | None = None,
    count: int = 3,
) -> bytes:
    """A legacy file of one storage with three floats, or with any of its parts replaced."""
    if system is None:
        system = {
            "protocol_version": 1001,
            "little_endian": True,
            "type_sizes": {"short": 2, "int": 4, "long": 4},
        }
    if object_ is None:
        object_ = {"w": Stored("1", 3)}
    file = io.BytesIO()
    for part in (magic, protocol, system):
        pickle.dump(part, file, protocol=2)
    pickler = type(
        "P",
        (pickle.Pickler,),
        {"persistent_id": lambda _, o: o.identity if type(o) is Stored else None},
    )
    pickler(file, protocol=2).dump(object_)
    pickle.dump(list(keys) if type(keys) is tuple else keys, file, protocol=2)
    file.write(struct.pack("<q3f", count, 1, 2, 3) if tail is None else tail)
    return file.getvalue()


class Stored:
    """What the pickler writes as a persistent id."""

    def __init__(self, key: Any, count: Any, cls: Any = torch.FloatStorage) -> None:
        self.identity = ("storage", cls, key, "cpu", count, None)


DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.uint16,
]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_the_storages_of_a_legacy_file_are_found(protocol: int) -> None:
    state = {str(d): torch.tensor([1, 0, 3]).to(d) for d in DTYPES}
    state |= {
        "none": torch.empty(0),
        "scalar": torch.tensor(7.0),
        "view": state["torch.float32"][1:],
    }
    data = saved(state, pickle_protocol=protocol)
    assert is_legacy(data[:32])
    blob = BytesBlob("x", data)
    found = read_legacy(blob)
    assert type(found.value) is Dict
    by_key = {str(t.untyped_storage()._cdata): t.untyped_storage() for t in state.values()}
    assert found.records.keys() == by_key.keys()
    for key, record in found.records.items():
        assert data[record.offset : record.offset + record.size] == bytes(by_key[key].tolist())
        assert (record.name, record.crc) == (key, None)


def test_a_module_with_its_state_dict_inside_a_larger_blob_is_found() -> None:
    data = saved(torch.nn.Linear(3, 2).state_dict())
    whole = read_legacy(BytesBlob("x", data))
    inside = read_legacy(BytesBlob("x", b"before" + data + b"behind"), start=6, size=len(data))
    assert {k: r.offset - 6 for k, r in inside.records.items()} == {
        k: r.offset for k, r in whole.records.items()
    }


def test_an_object_larger_than_the_first_window_is_read() -> None:
    state = {f"layers.{i}.{'x' * 300}": i for i in range(4000)} | {"w": torch.arange(3.0)}
    data = saved(state)
    assert len(data) > 1 << 20
    found = read_legacy(BytesBlob("x", data))
    assert len(found.value.pairs) == 4001
    (record,) = found.records.values()
    assert struct.unpack("<3f", data[record.offset : record.offset + record.size]) == (0, 1, 2)


def test_a_storage_that_only_a_refused_object_holds_is_found_all_the_same() -> None:
    found = read_legacy(BytesBlob("x", stream({"w": [{"deep": (Stored("1", 3),)}]})))
    assert found.records["1"].size == 12


REFUSED = {
    "another magic number": (stream(magic=5), "M941", "magic number"),
    "text as magic number": (stream(magic="x"), "M941", "magic number"),
    "a magic number that is a float": (stream(magic=float(MAGIC)), "M941", "magic number"),
    "another protocol": (stream(protocol=1002), "M941", "protocol version"),
    "a list as system": (stream(system=[1]), "M941", "protocol version"),
    "no byte order": (stream(system={"a": 1}), "M940", "little-endian"),
    "a number as byte order": (stream(system={"little_endian": 1}), "M940", "little-endian"),
    "big-endian": (stream(system={"little_endian": False}), "M941", "big-endian"),
    "keys that are not a list": (stream(keys="1"), "M940", "not a list of text"),
    "keys that are numbers": (stream(keys=[1]), "M940", "not a list of text"),
    "a key twice": (stream(keys=("1", "1")), "M940", "storage 1 is there twice"),
    "a key that nothing uses": (
        stream(keys=("1", "2")),
        "M940",
        "storage 2 is not used by any tensor",
    ),
    "a storage without bytes": (
        stream(keys=(), tail=b""),
        "M940",
        "storage 1 is used and not in the file",
    ),
    "another count": (stream(count=4), "M940", "has 4 elements, its tensors say 3"),
    "a negative count": (stream(count=-3), "M940", "has -3 elements"),
    "a storage that is cut off": (stream(tail=struct.pack("<q2f", 3, 1, 2)), "M940", "is cut off"),
    "a count that is cut off": (stream(tail=b"\3\0\0"), "M940", "is cut off"),
    "bytes behind": (stream() + b"evil", "M940", "4 unclaimed bytes follow"),
    "a count beyond the file": (
        stream({"w": Stored("1", 1 << 61)}, count=1 << 61),
        "M940",
        "is cut off",
    ),
    "a count of 65 bits": (stream({"w": Stored("1", 1 << 65)}), "M940", "of another type"),
    "a negative element count": (stream({"w": Stored("1", -1)}), "M940", "of another type"),
    "a key that is a number": (stream({"w": Stored(1, 3)}), "M940", "of another type"),
    "two counts": (stream({"w": [Stored("1", 3), Stored("1", 2)]}), "M940", "described twice"),
    "two dtypes": (
        stream({"w": [Stored("1", 3), Stored("1", 3, torch.DoubleStorage)]}),
        "M940",
        "described twice",
    ),
    "an unknown class": (
        stream({"w": Stored("1", 3, Float)}),
        "M941",
        "class that is not known: test_legacy.Float",
    ),
    "no class": (
        stream({"w": Stored("1", 3, "torch.FloatStorage")}),
        "M941",
        "class that is not known: no name",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_and_the_message_says_why(name: str) -> None:
    data, code, said = REFUSED[name]
    with pytest.raises(CheckpointError) as caught:
        read_legacy(BytesBlob("x.pt", data))
    (diagnostic,) = caught.value.diagnostics
    assert (diagnostic.code, said in diagnostic.message) == (code, True), diagnostic.message
    assert diagnostic.message.startswith("x.pt: ")


def tried(data: bytes) -> Legacy | CheckpointError:
    try:
        return read_legacy(BytesBlob("x", data))
    except CheckpointError as error:
        return error


def test_a_file_cut_at_any_byte_is_refused() -> None:
    data = saved({"a": torch.arange(3.0), "b": torch.ones(2, dtype=torch.int64)})
    assert isinstance(tried(data), Legacy)
    for length in range(len(data)):
        assert isinstance(tried(data[:length]), CheckpointError)
        assert isinstance(tried(data[length + 1 :]), CheckpointError)


def test_random_damage_gives_nothing_but_checkpoint_errors() -> None:
    source = random.Random(5)
    original = saved({"a": torch.arange(3.0), "b": [torch.ones(2, dtype=torch.int64), "text", 5]})
    refused = 0
    for _ in range(3000):
        data = bytearray(original)
        for _ in range(source.randrange(1, 5)):
            at = source.randrange(len(data))
            data[at] = source.choice([0, 0x2E, 0x51, 0x85, 0x94, 0xFF, source.randrange(256)])
        refused += isinstance(tried(bytes(data)), CheckpointError)
    assert refused > 1000
