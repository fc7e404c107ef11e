"""Other names in `.metadata`: the quick way and the general one write the same entries."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dcp_streams import CASES, FOLDERS, OLD, by_name, checkpoint
from marks import covering
from torch.distributed.checkpoint.metadata import TensorProperties

from migrate.source.pickle import dcp_rename
from migrate.source.pickle.dcp_metadata import read_metadata
from migrate.source.pickle.dcp_rename import NamedEntries, NewName
from migrate.source.pickle.dcp_stream import read_stream, read_whole_stream
from migrate.source.pickle.machine import read_pickle
from migrate.source.pickle.nodes import ABSENT, METADATA, Call, Dict, Global

Names = dict[str, NewName]


def said(data: bytes) -> Any:
    """All that a stream says, in its order, as values that can be compared."""

    def plain(node: Any) -> Any:
        match node:
            case Global():
                return str(node)
            case Call():
                parts = (node.arguments, node.items, node.pairs)
                state = None if node.state is ABSENT else plain(node.state)
                return (node.how, str(node.function), *map(plain, parts), state)
            case Dict():
                return {"a dict": plain(node.pairs)}
            case tuple() | list():
                return type(node)(map(plain, node))
        return type(node), node

    return plain(read_pickle(data, METADATA, name="x"))


def all_renamed(entries: NamedEntries) -> Names:
    """Each key and its path, if it has one, with another begin."""
    planner = entries.planner
    names = {}
    for key in planner or entries.sizes:
        path = (f"new.{key}",) if planner is None else ("new", *planner[key])
        names[key] = NewName(f"new.{key}", path)
    return names


def some_dropped(entries: NamedEntries) -> Names:
    """The first entry, which defines most names, and each third one go."""
    names = all_renamed(entries)
    return {old: new for n, (old, new) in enumerate(names.items()) if n % 3}


def in_another_order(entries: NamedEntries) -> Names:
    return dict(reversed(all_renamed(entries).items()))


def swapped(entries: NamedEntries) -> Names:
    """Each key is that of another entry; with one they all end where they began."""
    olds = list(entries.planner or entries.sizes)
    paths = entries.planner or {old: (old,) for old in olds}
    pairs = zip(olds, [*olds[1:], olds[0]], strict=True)
    return {old: NewName(new, paths[new]) for old, new in pairs}


CHANGES: list[Callable[[NamedEntries], Names]] = [
    all_renamed,
    some_dropped,
    in_another_order,
    swapped,
]


def both(
    data: bytes, change: Callable[[NamedEntries], Names], monkeypatch: pytest.MonkeyPatch
) -> tuple[bytes, bytes]:
    """The renamed file by the quick way, and by the machine."""
    assert read_whole_stream(data) is not None
    quick = NamedEntries(data, "x")
    with monkeypatch.context() as patch:
        patch.setattr(dcp_rename, "read_whole_stream", lambda data: None)
        general = NamedEntries(data, "x")
    assert (quick.planner, quick.sizes) == (general.planner, general.sizes)
    names = change(quick)
    return quick.rename(names), general.rename(names)


def assert_alike(data: bytes, quick: bytes, general: bytes) -> None:
    assert said(quick) == said(general) != said(data)
    assert read_metadata(quick, "x") == read_metadata(general, "x")


@pytest.mark.parametrize(
    ("case", "change", "protocol"), covering(list(CASES), CHANGES, [4, 5], rounds=2)
)
def test_both_ways_write_the_same(
    case: str,
    protocol: int,
    change: Callable[[NamedEntries], Names],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = pickle.dumps(CASES[case], protocol)
    quick, general = both(data, change, monkeypatch)
    assert_alike(data, quick, general)
    found = pickle.loads(quick)
    assert found == pickle.loads(general)
    assert found.storage_meta == CASES[case].storage_meta
    # what was written is read quickly again; a dict of one pair the pickler spells otherwise
    assert (read_stream(quick) is None) == (
        1 in (len(found.storage_data), len(found.planner_data or ".."))
    )


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("folder", [f for f in FOLDERS if f not in OLD], ids=lambda p: p.name)
def test_both_ways_write_the_same_of_other_releases(
    folder: Path, change: Callable[[NamedEntries], Names], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = (folder / ".metadata").read_bytes()
    assert_alike(data, *both(data, change, monkeypatch))


@pytest.mark.parametrize("strides", [None, (7, 1), ()])
@pytest.mark.parametrize("shared", [True, False])
def test_strides_of_torch_2_15_stay(
    strides: tuple[int, ...] | None, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = TensorProperties.__getstate__
    monkeypatch.setattr(
        TensorProperties,
        "__getstate__",
        lambda self: (*before(self)[:5], strides if shared or strides is None else (*strides,)),
    )
    data = pickle.dumps(checkpoint(5, dims=0 if strides == () else 2))
    assert_alike(data, *both(data, all_renamed, monkeypatch))


def test_memory_formats_and_pinned_memory_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    metadata = checkpoint(9)
    formats = [torch.contiguous_format, torch.channels_last, torch.preserve_format]
    for number, entry in enumerate(metadata.state_dict_metadata.values()):
        if hasattr(entry, "properties"):
            entry.properties.memory_format = formats[number % 3]
            entry.properties.pin_memory = number % 2 == 0
    data = pickle.dumps(metadata)
    quick, general = both(data, all_renamed, monkeypatch)
    assert_alike(data, quick, general)
    kept = pickle.loads(quick).state_dict_metadata
    assert list(kept.values()) == [*metadata.state_dict_metadata.values()]


def test_a_name_that_is_a_field_or_a_file_stays_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python shares such texts, so that one memo entry is a key and a field's name at once."""
    metadata = checkpoint(3)
    entries, planner = metadata.state_dict_metadata, metadata.planner_data
    for old, new in zip(list(entries), ["size", "__0_0.distcp", "index"], strict=False):
        entries[new] = entries.pop(old)
        del planner[old]
        planner[new] = (new,)
        for index in [one for one in metadata.storage_data if one.fqn == old]:
            metadata.storage_data[type(index)(new, index.offset, index.index)] = (
                metadata.storage_data.pop(index)
            )
    data = pickle.dumps(metadata)
    quick, general = both(data, all_renamed, monkeypatch)
    assert_alike(data, quick, general)
    assert {place.relative_path for place in pickle.loads(quick).storage_data.values()} == {
        "__0_0.distcp",
        "__1_0.distcp",
    }


@pytest.mark.parametrize("protocol", [2, 3])
def test_what_is_spelled_otherwise_is_renamed_all_the_same(protocol: int) -> None:
    data = pickle.dumps(checkpoint(4), protocol)
    assert read_whole_stream(data) is None
    entries = NamedEntries(data, "x")
    found = pickle.loads(entries.rename(all_renamed(entries)))
    assert list(found.planner_data) == [f"new.{key}" for key in checkpoint(4).planner_data]
    assert entries.sizes == NamedEntries(pickle.dumps(checkpoint(4), 4), "x").sizes


@pytest.mark.parametrize("folder", OLD, ids=lambda p: p.name)
def test_entries_of_the_oldest_releases_are_renamed(folder: Path) -> None:
    data = (folder / ".metadata").read_bytes()
    entries, was = NamedEntries(data, "x"), read_metadata(data, "x")
    assert len(entries.sizes) == 11
    made = entries.rename(
        {
            key: NewName(f"new.{key}", ("new", *(was.planner or {}).get(key, (key,))))
            for key in entries.sizes
        }
    )
    now = read_metadata(made, "x")
    assert now.tensors == {f"new.{key}": entry for key, entry in was.tensors.items()}
    assert now.bytes == {f"new.{key}": entry for key, entry in was.bytes.items()}
    assert now.planner == {
        f"new.{key}": ("new", *path) for key, path in (was.planner or {}).items()
    }


@pytest.mark.parametrize("change", CHANGES)
def test_members_that_were_pickled_by_name_stay(
    change: Callable[[NamedEntries], Names], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = both(pickle.dumps(CASES["few"]), change, monkeypatch)[0]
    with monkeypatch.context() as patch:
        by_name(patch)
        data = pickle.dumps(CASES["few"])
    assert b"getattr" in data
    quick, general = both(data, change, monkeypatch)
    assert quick == wanted
    assert read_metadata(general, "x") == read_metadata(wanted, "x")
    assert pickle.loads(general) == pickle.loads(wanted)
