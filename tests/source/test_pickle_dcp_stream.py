"""The reader of streams as pickle.dump spells them says what the machine says, or nothing."""

from __future__ import annotations

import pickle
import random
from pathlib import Path
from typing import Any

import pytest
from dcp_streams import CASES, FOLDERS, META, OLD, by_name, checkpoint
from marks import thorough
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties

from migrate.core.errors import CheckpointError
from migrate.source.pickle import dcp_metadata
from migrate.source.pickle.dcp_stream import read_stream


def by_the_machine(data: bytes, monkeypatch: pytest.MonkeyPatch) -> Any:
    with monkeypatch.context() as patch:
        patch.setattr(dcp_metadata, "read_stream", lambda data: None)
        return dcp_metadata.read_metadata(data, "x")


@pytest.mark.parametrize("protocol", [4, 5])
@pytest.mark.parametrize("case", CASES)
def test_both_readers_say_the_same(
    case: str, protocol: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = pickle.dumps(CASES[case], protocol)
    assert read_stream(data) is not None
    assert dcp_metadata.read_metadata(data, "x") == by_the_machine(data, monkeypatch)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda p: p.name)
def test_both_readers_say_the_same_of_other_releases(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = (folder / ".metadata").read_bytes()
    assert (read_stream(data) is None) == (folder in OLD)
    assert dcp_metadata.read_metadata(data, "x") == by_the_machine(data, monkeypatch)


@pytest.mark.parametrize("shared", [True, False])
def test_strides_of_torch_2_15_are_read(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    before, one = TensorProperties.__getstate__, (7, 1)
    monkeypatch.setattr(
        TensorProperties,
        "__getstate__",
        lambda self: (*before(self)[:5], one if shared else (*one,)),
    )
    data = pickle.dumps(checkpoint(3))
    found = read_stream(data)
    assert found is not None
    assert {strides for _, _, _, strides, _ in found.tensors.values()} == {(7, 1)}
    assert dcp_metadata.read_metadata(data, "x") == by_the_machine(data, monkeypatch)


def test_large_numbers_and_long_names_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = checkpoint(2, ranks=1)
    for number, (index, info) in enumerate(list(metadata.storage_data.items())):
        info.offset, info.length = 2 ** (20 + 7 * number), 2 ** (16 + 2 * number)
        if index.offset is not None:
            long = index.fqn + "é" * 300
            metadata.state_dict_metadata[long] = metadata.state_dict_metadata.pop(index.fqn)
            metadata.planner_data[long] = ("m" * 300, long)
            del metadata.planner_data[index.fqn]
            del metadata.storage_data[index]
            metadata.storage_data[MetadataIndex(long, index.offset)] = info
    data = pickle.dumps(metadata)
    assert read_stream(data) is not None
    assert dcp_metadata.read_metadata(data, "x") == by_the_machine(data, monkeypatch)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80\x04",
        b"\x80\x04N.",
        pickle.dumps(checkpoint(3), 2),
        pickle.dumps(checkpoint(3), 3),
        pickle.dumps(checkpoint(3)) + b"\0",
        pickle.dumps(checkpoint(3))[:-1],
        pickle.dumps({"w": 1}),
    ],
)
def test_what_is_spelled_otherwise_is_left_to_the_machine(data: bytes) -> None:
    assert read_stream(data) is None


def test_a_key_that_stands_twice_is_left_to_the_machine() -> None:
    # not of one text: two keys that are spelled alike
    data = pickle.dumps(checkpoint(3)).replace(b"model.layers.1.w", b"model.layers.0.w")
    assert read_stream(data) is None
    with pytest.raises(CheckpointError, match="M931"):
        dcp_metadata.read_metadata(data, "x")


@pytest.mark.parametrize("seed", thorough(range(8)))
def test_a_changed_stream_is_never_read_in_two_ways(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes changed, doubled and left out: what this reader takes, the machine takes alike."""
    chance = random.Random(seed)
    data = pickle.dumps(checkpoint(3, storage_meta=META))
    taken = 0
    for _ in range(400):
        raw = bytearray(data)
        for _ in range(chance.choice((1, 1, 2))):
            at = chance.randrange(11, len(raw))
            match chance.randrange(4):
                case 0:
                    raw[at] = chance.randrange(256)
                case 1:
                    raw[at] = raw[chance.randrange(len(raw))]
                case 2:
                    # another number or another reference of the same size
                    raw[at] = (raw[at] + chance.choice((-1, 1))) % 256
                case 3:
                    end = at + chance.randrange(1, 20)
                    raw[at:end] = raw[at:end][::-1]
        found = read_stream(bytes(raw))
        if found is None:
            continue
        taken += 1
        try:
            expected: Any = by_the_machine(bytes(raw), monkeypatch)
        except CheckpointError as error:
            expected = [d.message for d in error.diagnostics]
        try:
            seen: Any = dcp_metadata.read_metadata(bytes(raw), "x")
        except CheckpointError as error:
            seen = [d.message for d in error.diagnostics]
        assert seen == expected
    assert taken > 20


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("case", CASES)
def test_members_that_cpython_3_11_0_pickles_by_name_are_read(
    case: str, protocol: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As CPython 3.11.0 to 3.11.3 do, Debian 12's among them."""
    wanted = dcp_metadata.read_metadata(pickle.dumps(CASES[case], protocol), "x")
    by_name(monkeypatch)
    data = pickle.dumps(CASES[case], protocol)
    assert (b"getattr" in data) == (case != "values alone")
    assert (read_stream(data) is None) == (protocol == 2)
    assert dcp_metadata.read_metadata(data, "x") == wanted == by_the_machine(data, monkeypatch)


def test_a_member_by_another_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    by_name(monkeypatch)
    data = pickle.dumps(checkpoint(2))
    for old, new, wrong in (
        (b"TORCH_CONTIGUOUS_FORMAT", b"TORCH_CONTIGUOUS_FORMET", "M938"),
        (b"_MEM_FORMAT_ENCODING", b"_MEM_FORMAT_ENCODINX", "M935"),
        (b"\x8c\x07getattr", b"\x8c\x07setattr", "M935"),
    ):
        assert data.count(old) == 1
        changed = data.replace(old, new)
        assert read_stream(changed) is None
        with pytest.raises(CheckpointError, match=wrong):
            dcp_metadata.read_metadata(changed, "x")
