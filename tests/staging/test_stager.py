"""`migrate.Stager` from the outside: what a snapshot is, how long it lives, what is refused."""

from __future__ import annotations

import gc
import io
import threading
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch

import migrate
from migrate.staging import walk
from migrate.staging.streams import Arrival


@pytest.fixture
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_a_snapshot_has_the_values_of_its_moment() -> None:
    w = torch.arange(6.0).reshape(2, 3)
    state = {"w": w, "tied": w, "row": w[1], "step": 3}
    snapshot = migrate.Stager().stage(state)
    w.zero_()
    state["step"] = 4
    assert snapshot["w"].tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert snapshot["step"] == 3
    assert snapshot["tied"] is snapshot["w"]
    snapshot["row"][0] = 9
    assert snapshot["w"][1, 0] == 9
    assert w.eq(0).all()


def test_a_snapshot_is_a_mapping_where_the_state_is_one() -> None:
    snapshot = migrate.Stager().stage({"a": 1, "b": 2})
    assert (list(snapshot), len(snapshot), "a" in snapshot) == (["a", "b"], 2, True)
    with pytest.raises(TypeError, match="a list, not a mapping"):
        migrate.Stager().stage([1])["a"]


def test_a_snapshot_says_what_it_holds_and_that_it_was_released() -> None:
    snapshot = migrate.Stager().stage({"w": torch.ones(3)})
    assert repr(snapshot) == "<migrate.Snapshot, 12 bytes>"
    snapshot.release()
    assert repr(snapshot) == "<migrate.Snapshot, released>"


def test_memory_is_used_again_when_nothing_refers_to_it(without_collector: None) -> None:
    stager = migrate.Stager()
    state = {"w": torch.ones(1000), "big": torch.ones(500_000)}
    first = stager.stage(state)
    kept, address = first["w"], first["big"].data_ptr()
    first.release()
    state["w"].fill_(2)
    second = stager.stage(state)
    assert second["big"].data_ptr() == address
    assert kept.eq(1).all()
    assert second["w"].eq(2).all()


def released_late(state: Any, **options: Any) -> tuple[migrate.Stager, migrate.Snapshot]:
    """A snapshot whose copies come after another thread has let go of it and staged again."""
    stager = migrate.Stager(**options)
    snapshot = stager.stage(state)

    class Late:
        def wait(self) -> None:
            snapshot._copied = Arrival()
            snapshot.release()
            stager.stage({key: torch.full_like(x, 9) for key, x in state.items()})

    snapshot._copied = Late()
    return stager, snapshot


def test_a_snapshot_that_is_released_while_its_state_is_read() -> None:
    _, snapshot = released_late({"a": torch.ones(2)})
    with pytest.raises(migrate.MigrateError, match="M976"):
        _ = snapshot.state


@pytest.mark.parametrize("into", [False, True])
def test_a_restore_that_has_begun_keeps_what_a_release_lets_go_of(into: bool) -> None:
    state = {"a": torch.ones(2), "b": torch.arange(70_000)}
    _, snapshot = released_late(state)
    live = {key: torch.zeros_like(x) for key, x in state.items()} if into else None
    found = snapshot.restore(live)
    assert all(found[key].equal(x) for key, x in state.items())
    with pytest.raises(migrate.MigrateError, match="M976"):
        snapshot.restore(live)


def test_a_snapshot_that_is_released_while_it_is_sent_arrives() -> None:
    state = {"a": torch.ones(2), "b": torch.arange(70_000)}
    _, snapshot = released_late(state, share_memory=True)
    arrived = ForkingPickler.loads(ForkingPickler.dumps(snapshot))
    assert all(arrived[key].equal(x) for key, x in state.items())


def test_a_released_snapshot_is_refused() -> None:
    with migrate.Stager().stage({"a": torch.ones(2)}) as snapshot:
        kept = snapshot["a"]
    with pytest.raises(migrate.MigrateError, match="M976"):
        snapshot.state
    assert kept.tolist() == [1, 1]


def test_what_cannot_be_copied_is_named_by_path_all_at_once() -> None:
    stager = migrate.Stager()
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    state = {"a": [threading.Lock(), {"gen": (i for i in ())}], "freed": freed}
    with pytest.raises(migrate.MigrateError) as caught:
        stager.stage(state)
    text = str(caught.value)
    assert "M975" in text
    for path in ("['a'][0]: a lock", "['a'][1]['gen']: a generator", "['freed']: its storage was"):
        assert path in text
    assert stager.nbytes == 0
    assert stager.stage({"b": torch.ones(1)})["b"].tolist() == [1]


def test_nothing_but_what_the_walk_writes_is_built() -> None:
    for stream in (
        b"cos\nsystem\n(S'true'\ntR.",
        b"cmigrate.staging.walk\nWalk\n.",
        b"cos\nreference\n.",
    ):
        with pytest.raises(Exception, match="no part of a staged structure"):
            walk.Build(stream, [], [], lambda number: torch.UntypedStorage(0)).run()


def test_a_snapshot_is_saved_as_its_source_is() -> None:
    state = {"a": torch.arange(4), "b": torch.nn.Parameter(torch.ones(2))}
    file = io.BytesIO()
    torch.save(migrate.Stager().stage(state).state, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert loaded["a"].equal(state["a"])
    assert type(loaded["b"]) is torch.nn.Parameter
