"""What ranks say to the coordinator of a load, and how their plans travel."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from migrate.core.errors import MigrateError
from migrate.live.rank_plans import (
    AgreedPlan,
    PackedPlan,
    RankPlan,
    agree,
    agreed_plans,
    bits_of,
    packed_plan,
)

KEYS = ["b", "a.10", "a.2", "\ud800"]
SAID = RankPlan("m1:0", 5)


def item(key: str, kind: LoadItemType = LoadItemType.TENSOR) -> ReadItem:
    size = torch.Size
    here = MetadataIndex(key, size((4, 0)), 1)
    return ReadItem(
        kind, here, size((1, 0)), MetadataIndex(key, size((0, 0))), size((5, 0)), size((2, 8))
    )


def items() -> list[ReadItem]:
    scalar, size = MetadataIndex("b"), torch.Size(())
    bytes_of_it = ReadItem(LoadItemType.BYTE_IO, scalar, size, scalar, size, size)
    return [item("a.10"), item("\ud800"), bytes_of_it]


def sent(plan: LoadPlan) -> Any:
    return pickle.loads(pickle.dumps(plan))


def looked_at(plan: LoadPlan) -> bool:
    return "items" in vars(plan)


def test_a_plan_crosses_the_coordinator_and_nobody_looks_at_its_items() -> None:
    told = packed_plan(LoadPlan(items(), None, "the planner's"), SAID)
    there = sent(told)
    (back,) = agreed_plans([there], ["left"])
    arrived = sent(back)
    assert not looked_at(there)
    assert not looked_at(arrived)
    assert arrived.storage_data == AgreedPlan(("left",))
    assert arrived.planner_data == "the planner's"
    assert arrived.items == items()
    # equality of indices leaves the hint out
    assert [one.dest_index.index for one in arrived.items] == [1, 1, None]
    shapes = (one.lengths for one in arrived.items)
    assert {type(shape) for shape in shapes} == {torch.Size}


def test_what_a_planner_changes_on_the_coordinator_is_what_arrives() -> None:
    there = sent(packed_plan(LoadPlan(items()), SAID))
    there.items.append(item("new"))
    assert sent(there).items == [*items(), item("new")]
    swapped = replace(there, items=[item("other")])
    assert isinstance(swapped, PackedPlan)
    assert sent(swapped).items == [item("other")]
    with pytest.raises(AttributeError):
        there.nothing


@dataclass(frozen=True)
class OwnItem(ReadItem):  # type: ignore[misc]
    """An item of a planner, which has more to say."""

    more: str = ""


class OwnPlan(LoadPlan):  # type: ignore[misc]
    """A plan of a planner."""


def test_items_and_plans_of_a_class_of_their_own_travel_as_they_are() -> None:
    own = OwnItem(**vars(item("a")), more="yes")
    assert sent(packed_plan(LoadPlan([item("b"), own]), SAID)).items == [item("b"), own]
    numbers = replace(item("a"), lengths=(torch.tensor(2),))
    assert sent(packed_plan(LoadPlan([numbers]), SAID)).items[0].lengths == (torch.tensor(2),)
    kept = sent(packed_plan(OwnPlan(items()), SAID))
    assert (type(kept), kept.storage_data) == (OwnPlan, SAID)
    assert agreed_plans([kept], ())[0].storage_data == AgreedPlan(())


def test_keys_that_no_rank_asks_for_are_found_in_their_order() -> None:
    asked = [{"b"}, {"b", "a.2"}, set[str]()]
    plans = [LoadPlan([], RankPlan("m1:0", bits_of(keys, KEYS))) for keys in asked]
    assert agree(plans, "m1:0", KEYS) == ["a.10", "\ud800"]
    # ranks list the keys in whichever order
    plans.append(LoadPlan([], RankPlan("m1:0", bits_of({"\ud800", "a.10"}, sorted(KEYS)))))
    assert agree(plans, "m1:0", KEYS) == []
    assert agree([LoadPlan([], RankPlan("m1:0", 0))], "m1:0", []) == []


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (RankPlan("m1:1", 1), "rank 1 migrates in another way than the coordinator"),
        (None, "the planner of rank 1 dropped what the reader put into its plan"),
    ],
)
def test_plans_of_another_migration_are_refused(said: Any, words: str) -> None:
    with pytest.raises(MigrateError, match=words):
        agree([LoadPlan([], RankPlan("m1:0", 1)), LoadPlan([], said)], "m1:0", ["a"])
